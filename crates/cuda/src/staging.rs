//! Copies between a framework's GPU tensors and the host, in the context that the framework has made current.

#![allow(unsafe_code)]

use cudarc::driver::sys;
use sok_core::error::Result;

use crate::device::{Stream, driver_error};

/// Waits for all that was put onto a stream.
pub fn wait(stream: Stream) -> Result<()> {
    // SAFETY: it lives.
    unsafe { sys::cuStreamSynchronize(stream.0) }.result().map_err(driver_error("waiting for the GPU"))
}

pub fn to_host(to: &mut [u64], address: u64, num_bytes: usize) -> Result<()> {
    assert!(num_bytes <= size_of_val(to));
    if num_bytes == 0 {
        return Ok(());
    }
    // SAFETY: there is room for so many bytes, and the framework's tensor has them.
    unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), address, num_bytes) }
        .result()
        .map_err(driver_error("copying from the GPU"))
}

/// In the order of the stream; `from` lives until that has run.
pub fn to_device(address: u64, from: &[u64], num_bytes: usize, stream: Stream) -> Result<()> {
    assert!(num_bytes <= size_of_val(from));
    if num_bytes == 0 {
        return Ok(());
    }
    // SAFETY: as above, the other way, and the promise above.
    unsafe { sys::cuMemcpyHtoDAsync_v2(address, from.as_ptr().cast(), num_bytes, stream.0) }
        .result()
        .map_err(driver_error("copying to the GPU"))
}
