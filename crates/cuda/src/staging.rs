//! Copies between a framework's GPU tensors and the host, in the CUDA context that the framework has made current.

#![allow(unsafe_code)]

use cudarc::driver::sys;
use sok_core::contract::tensor::{StreamHandle, Tensor, TensorMut};
use sok_core::error::Result;

use crate::device::{Stream, driver_error};

/// Waits for all work on a stream.
///
/// # Errors
/// [`Error::Device`](sok_core::Error::Device) if a launch on it has failed.
pub fn wait(stream: StreamHandle) -> Result<()> {
    Stream::of(stream).synchronize()
}

/// Copies a tensor to the host.
///
/// # Errors
/// [`Error::Device`](sok_core::Error::Device) for a tensor in host memory, or if the copy fails.
///
/// # Panics
/// If the tensor has more bytes than `to`.
pub fn to_host(to: &mut [u64], from: &Tensor) -> Result<()> {
    assert!(from.num_bytes() <= size_of_val(to));
    if from.is_empty() {
        return Ok(());
    }
    let address = from.address(from.dtype())?;
    // SAFETY: `to` has room for the bytes of the tensor, as checked above.
    unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), address, from.num_bytes()) }
        .result()
        .map_err(driver_error("copying from the GPU"))
}

/// Copies to a tensor, and waits until the copy has completed.
///
/// # Errors
/// As `to_host`.
///
/// # Panics
/// If `from` is shorter than the tensor.
pub fn to_device(to: &TensorMut, from: &[u64], stream: StreamHandle) -> Result<()> {
    assert!(to.num_bytes() <= size_of_val(from));
    if to.num_bytes() == 0 {
        return Ok(());
    }
    let (address, stream) = (to.address(to.dtype())?, Stream::of(stream));
    // SAFETY: Both have the bytes of the tensor, as checked above. `from` is borrowed until the copy has completed.
    unsafe { stream.copy_to_device(address, from.as_ptr().cast(), to.num_bytes()) }?;
    stream.synchronize()
}
