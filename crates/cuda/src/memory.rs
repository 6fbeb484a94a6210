//! Device memory: buffers, arrays that grow in place, and host memory that kernels write to.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationProp, CUmemAllocationType,
    CUmemLocation, CUmemLocationType,
};
use cudarc::driver::{CudaContext, DriverError, result};
use sok_core::error::{Error, Result};

use crate::device::{Stream, driver_error};

/// A type whose values are plain numbers, the same on host and device.
///
/// # Safety
/// Every bit pattern is a value; no pointers, no padding, nothing to drop.
pub unsafe trait Plain: Copy {}
// SAFETY: numbers.
unsafe impl Plain for u8 {}
// SAFETY: numbers.
unsafe impl Plain for i32 {}
// SAFETY: numbers.
unsafe impl Plain for i64 {}
// SAFETY: numbers.
unsafe impl Plain for u32 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl Plain for f64 {}

/// The words of plain values.
pub fn words<T: Plain>(values: &[T]) -> &[u32] {
    const { assert!(size_of::<T>().is_multiple_of(4) && align_of::<T>() >= 4) }
    // SAFETY: numbers, whole words of them, aligned at least as words are.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values) / 4) }
}

thread_local! {
    static TIMES_ASKED: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has asked the driver for memory, for tables and steps. A steady step asks for none.
pub fn times_asked() -> u64 {
    TIMES_ASKED.get()
}

fn count_asking() {
    TIMES_ASKED.set(TIMES_ASKED.get() + 1);
}

fn failed(context: &CudaContext, bytes: usize, what: &str, error: DriverError) -> Error {
    let (free, total) = context.mem_get_info().unwrap_or_default();
    Error::Device(format!(
        "{what} wants {bytes} bytes of GPU memory, of which {free} of {total} are free: {error}. Leave the tables more of it: \
         XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX, TF_FORCE_GPU_ALLOW_GROWTH=true for \
         TensorFlow, torch.cuda.set_per_process_memory_fraction for PyTorch; or use `storage=\"host\"`, or lower `max_capacity`"
    ))
}

/// `len` values on the device.
pub struct Buffer<T> {
    address: CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
    _values: PhantomData<T>,
}

// SAFETY: device memory belongs to no thread.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: through a shared reference it is read after a wait, or handed to kernels.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// Values are whatever lay there before.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has not so much memory.
    pub fn uninit(context: &Arc<CudaContext>, len: usize) -> Result<Buffer<T>> {
        let bytes = (len * size_of::<T>()).max(1);
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        count_asking();
        // SAFETY: fresh memory of this length.
        let address =
            unsafe { result::malloc_sync(bytes) }.map_err(|e| failed(context, bytes, "a step", e))?;
        Ok(Buffer { address, len, context: context.clone(), _values: PhantomData })
    }

    /// Zeros at first.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Buffer<T>> {
        let buffer = Buffer::uninit(context, len)?;
        if len > 0 {
            // SAFETY: as long as the buffer. The call returns before it is filled, which other streams would not wait for.
            unsafe {
                result::memset_d8_sync(buffer.address, 0, len * size_of::<T>())
                    .and_then(|()| result::stream::synchronize(Stream::DEFAULT.0))
                    .map_err(driver_error("filling GPU memory"))?;
            }
        }
        Ok(buffer)
    }

    pub fn from_slice(context: &Arc<CudaContext>, values: &[T]) -> Result<Buffer<T>> {
        let buffer = Buffer::uninit(context, values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Address of a value.
    pub fn at(&self, index: usize) -> CUdeviceptr {
        self.address + (index * size_of::<T>()) as u64
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Writes values from `start` on; who launched work on them has waited for it.
    pub fn write(&self, start: usize, values: &[T]) -> Result<()> {
        assert!(start + values.len() <= self.len, "within the buffer");
        if values.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: within the buffer. The copy returns before the last bytes are there, which other streams would not wait for.
        unsafe {
            result::memcpy_htod_sync(self.at(start), values)
                .and_then(|()| result::stream::synchronize(Stream::DEFAULT.0))
                .map_err(driver_error("copying to the GPU"))
        }
    }

    /// Values from `start` on; who launched work on them has waited for it.
    pub fn read(&self, start: usize, len: usize) -> Result<Vec<T>> {
        assert!(start + len <= self.len, "within the buffer");
        read(&self.context, self.at(start), len)
    }

    /// Zeros, in the order of the stream.
    pub fn zero(&self, stream: Stream) -> Result<()> {
        // SAFETY: within the buffer.
        unsafe { stream.fill(self.address, 0, self.num_bytes()) }
    }

    /// Waits for all work of the device.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.context.synchronize().map_err(driver_error("waiting for the GPU"))?;
        self.read(0, self.len)
    }
}

/// Copies values from device memory that nobody writes to now.
pub fn read<T: Plain>(context: &CudaContext, address: CUdeviceptr, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::<T>::with_capacity(len);
    if len > 0 {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: written whole; every bit pattern is a value.
        unsafe {
            let room = std::slice::from_raw_parts_mut(values.as_mut_ptr(), len);
            result::memcpy_dtoh_sync(room, address).map_err(driver_error("copying from the GPU"))?;
            values.set_len(len);
        }
    }
    Ok(values)
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: made by `new`; freeing waits for the device's work.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Device memory that grows in place: a range of addresses, of which a part has memory.
pub struct Arena {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
    reserved: usize,
    mapped: usize,
    granularity: usize,
    /// Ends of the pieces.
    pieces: Vec<usize>,
    properties: CUmemAllocationProp,
    /// Whose it is, for messages.
    what: String,
}

// SAFETY: addresses of device memory, which belong to no thread.
unsafe impl Send for Arena {}
// SAFETY: nothing changes through a shared reference.
unsafe impl Sync for Arena {}

/// What memory grows by at most beyond what is asked for.
const LARGEST_SPARE: usize = 1 << 30;

impl Arena {
    /// Addresses for `most` bytes, at most as many as the device has memory for.
    pub fn new(context: &Arc<CudaContext>, most: usize, what: String) -> Result<Arena> {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: zeros are a value of each of its fields.
        let mut properties: CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(context);
        let (mut granularity, mut address) = (0, 0);
        let failed = driver_error("reserving GPU addresses");
        // SAFETY: fields to write to.
        unsafe {
            sys::cuMemGetAllocationGranularity(
                &mut granularity,
                &properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        }
        .result()
        .map_err(&failed)?;
        let (_, total) = context.mem_get_info().map_err(&failed)?;
        let reserved = most.min(total).next_multiple_of(granularity).max(granularity);
        // SAFETY: as above.
        unsafe { sys::cuMemAddressReserve(&mut address, reserved, 0, 0, 0) }.result().map_err(&failed)?;
        let (context, pieces) = (context.clone(), Vec::new());
        Ok(Arena { context, address, reserved, mapped: 0, granularity, pieces, properties, what })
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Bytes that have memory.
    pub fn num_bytes(&self) -> usize {
        self.mapped
    }

    /// Gives the first `bytes` memory, and with `spare` some beyond. Addresses stay.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has not so much; nothing has changed.
    pub fn grow(&mut self, bytes: usize, spare: bool) -> Result<()> {
        if bytes <= self.mapped {
            return Ok(());
        }
        let beyond = (self.mapped / 4).min(LARGEST_SPARE);
        if spare && self.map(bytes + beyond).is_ok() {
            return Ok(());
        }
        self.map(bytes)
    }

    fn map(&mut self, bytes: usize) -> Result<()> {
        let end = bytes.min(self.reserved).next_multiple_of(self.granularity);
        let size = end.saturating_sub(self.mapped);
        let failed = |error| failed(&self.context, size, &self.what, error);
        if bytes > self.reserved {
            return Err(failed(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)));
        }
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        let mut handle = 0;
        let at = self.address + self.mapped as u64;
        let access = CUmemAccessDesc {
            location: location(&self.context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        count_asking();
        // SAFETY: - the range is reserved and has no memory yet.
        //         - the handle may go once it is mapped: the mapping keeps the memory.
        unsafe {
            sys::cuMemCreate(&mut handle, size, &self.properties, 0).result().map_err(failed)?;
            let mapped = sys::cuMemMap(at, size, 0, handle, 0).result();
            let _ = sys::cuMemRelease(handle).result();
            mapped.map_err(failed)?;
            if let Err(error) = sys::cuMemSetAccess(at, size, &access, 1).result() {
                let _ = sys::cuMemUnmap(at, size).result();
                return Err(failed(error));
            }
        }
        self.mapped = end;
        self.pieces.push(end);
        Ok(())
    }
}

fn location(context: &CudaContext) -> CUmemLocation {
    // SAFETY: zeros are a value of each of its fields.
    let mut location: CUmemLocation = unsafe { MaybeUninit::zeroed().assume_init() };
    location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = context.ordinal() as i32;
    location
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: made by `new` and `map`, piece by piece; nothing on the device uses it after the wait.
        unsafe {
            let _ = self.context.synchronize();
            let mut start = 0;
            for &end in &self.pieces {
                let _ = sys::cuMemUnmap(self.address + start as u64, end - start).result();
                start = end;
            }
            let _ = sys::cuMemAddressFree(self.address, self.reserved).result();
        }
    }
}

/// Words of host memory that kernels write to and the host reads without waiting.
pub struct Shared {
    host: *mut u32,
    address: CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
}

// SAFETY: read and written by volatile loads and stores of words alone.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Zeros at first.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Shared> {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        let failed = driver_error("getting host memory that the GPU writes to");
        let mapped = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        count_asking();
        // SAFETY: fresh memory, written whole.
        let host = unsafe {
            let host = result::malloc_host(len * 4, mapped).map_err(&failed)?.cast::<u32>();
            host.write_bytes(0, len);
            host
        };
        let mut address = 0;
        // SAFETY: a field to write to; the memory was made for this.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, host.cast(), 0) }
            .result()
            .map_err(&failed)?;
        Ok(Shared { host, address, len, context: context.clone() })
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub fn get(&self, word: usize) -> u32 {
        assert!(word < self.len);
        // SAFETY: within the memory; a device may write to it meanwhile.
        unsafe { self.host.add(word).read_volatile() }
    }

    pub fn set(&self, word: usize, value: u32) {
        assert!(word < self.len);
        // SAFETY: as above.
        unsafe { self.host.add(word).write_volatile(value) }
    }

    pub fn get_wide(&self, word: usize) -> u64 {
        u64::from(self.get(word)) | u64::from(self.get(word + 1)) << 32
    }

    pub fn get_float(&self, word: usize) -> f32 {
        f32::from_bits(self.get(word))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: made by `new`; nothing on the device writes to it after the wait.
            unsafe {
                let _ = self.context.synchronize();
                let _ = result::free_host(self.host.cast());
            }
        }
    }
}
