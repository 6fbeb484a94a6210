//! Device memory.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream, result};
use sok_core::error::Result;

use crate::device::driver_error;

/// A type whose values are plain numbers, the same on host and device.
///
/// # Safety
/// Every bit pattern is a value; no pointers, no padding, nothing to drop.
pub unsafe trait Plain: Copy {}
// SAFETY: numbers.
unsafe impl Plain for u8 {}
// SAFETY: numbers.
unsafe impl Plain for u32 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}

/// `len` values on the device, zeros at first.
pub struct Buffer<T> {
    address: CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
    _values: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// # Errors
    /// [`sok_core::Error::Device`] if the device has not so much memory.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Buffer<T>> {
        let bytes = (len * size_of::<T>()).max(1);
        let failed = || format!("getting {bytes} bytes of GPU memory");
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: fresh memory of this length.
        let address = unsafe {
            let address = result::malloc_sync(bytes).map_err(driver_error(&failed()))?;
            result::memset_d8_sync(address, 0, bytes).map_err(driver_error(&failed()))?;
            address
        };
        Ok(Buffer { address, len, context: context.clone(), _values: PhantomData })
    }

    pub fn from_slice(context: &Arc<CudaContext>, values: &[T]) -> Result<Buffer<T>> {
        let buffer = Buffer::new(context, values.len())?;
        if !values.is_empty() {
            // SAFETY: as long as the slice.
            unsafe { result::memcpy_htod_sync(buffer.address, values) }
                .map_err(driver_error("copying to the GPU"))?;
        }
        Ok(buffer)
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Waits for all work of the device.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.context.synchronize().map_err(driver_error("waiting for the GPU"))?;
        let mut values = Vec::<T>::with_capacity(self.len);
        if self.len > 0 {
            // SAFETY: written whole; every bit pattern is a value.
            unsafe {
                let room = std::slice::from_raw_parts_mut(values.as_mut_ptr(), self.len);
                result::memcpy_dtoh_sync(room, self.address).map_err(driver_error("copying from the GPU"))?;
                values.set_len(self.len);
            }
        }
        Ok(values)
    }

    /// Sets all bytes to `byte`, in the order of the stream.
    pub fn fill(&self, byte: u8, stream: &CudaStream) -> Result<()> {
        // SAFETY: within the buffer.
        unsafe { result::memset_d8_async(self.address, byte, self.len * size_of::<T>(), stream.cu_stream()) }
            .map_err(driver_error("filling GPU memory"))
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: made by `new`; who launched work on it keeps it until that is done.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
