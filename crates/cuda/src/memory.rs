//! Memory: device buffers, device arrays that grow in place, and host memory that kernels write to.

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

use crate::device::{Device, Stream, driver_error};

/// A type whose values are plain numbers, with the same bytes on host and device.
///
/// # Safety
/// Every bit pattern must be a valid value. The type must have no pointers, no padding, and nothing to drop.
pub unsafe trait Plain: Copy {}
// SAFETY: A number.
unsafe impl Plain for u8 {}
// SAFETY: A number.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: A number.
unsafe impl Plain for i64 {}
// SAFETY: A number.
unsafe impl Plain for u32 {}
// SAFETY: A number.
unsafe impl Plain for u64 {}
// SAFETY: A number.
unsafe impl Plain for f32 {}
// SAFETY: A number.
unsafe impl Plain for f64 {}

/// Returns plain values as 32-bit words.
pub fn words<T: Plain>(values: &[T]) -> &[u32] {
    const { assert!(size_of::<T>().is_multiple_of(4) && align_of::<T>() >= 4) }
    // SAFETY: The values are numbers. Their size is a multiple of a word's, and their alignment at least a word's.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values) / 4) }
}

thread_local! {
    static TIMES_ASKED: Cell<u64> = const { Cell::new(0) };
}

/// Returns how often this thread has requested memory from the driver, for tables and steps. A steady step requests none.
pub fn times_asked() -> u64 {
    TIMES_ASKED.get()
}

/// Counts a request of memory.
pub(crate) fn count_asking() {
    TIMES_ASKED.set(TIMES_ASKED.get() + 1);
}

/// The error for memory that the device does not have. `what`: the table or step that needs it.
pub(crate) fn out_of_memory(context: &CudaContext, bytes: usize, what: &str, error: DriverError) -> Error {
    let (free, total) = context.mem_get_info().unwrap_or_default();
    Error::Device(format!(
        "{what} wants {bytes} bytes of GPU memory, of which {free} of {total} are free: {error}. Leave the tables more of it: \
         XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX, TF_FORCE_GPU_ALLOW_GROWTH=true for \
         TensorFlow, torch.cuda.set_per_process_memory_fraction for PyTorch; or use `storage=\"host\"`, or lower `max_capacity`"
    ))
}

/// Owner of an array of values in device memory.
pub struct Buffer<T> {
    address: CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
    _values: PhantomData<T>,
}

// SAFETY: Device memory belongs to no thread.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: Through a shared reference, the memory is only copied by calls that wait, or its address is given to kernels.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// Allocates `len` values and leaves them uninitialized.
    ///
    /// # Errors
    /// [`Error::Device`] if the device does not have enough memory.
    pub fn uninit(context: &Arc<CudaContext>, len: usize) -> Result<Buffer<T>> {
        let bytes = (len * size_of::<T>()).max(1);
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        count_asking();
        // SAFETY: The call only allocates.
        let address =
            unsafe { result::malloc_sync(bytes) }.map_err(|e| out_of_memory(context, bytes, "a step", e))?;
        Ok(Buffer { address, len, context: context.clone(), _values: PhantomData })
    }

    /// Allocates `len` values and sets them to 0. Waits until they are.
    ///
    /// # Errors
    /// [`Error::Device`] if the device does not have enough memory, or a call of the driver fails.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Buffer<T>> {
        let buffer = Buffer::uninit(context, len)?;
        if len > 0 {
            // SAFETY: The length is that of the buffer.
            unsafe { result::memset_d8_sync(buffer.address, 0, len * size_of::<T>()) }
                .map_err(driver_error("filling GPU memory"))?;
            // The call may return before the memory is filled. Other streams would not wait for that.
            Stream::DEFAULT.synchronize()?;
        }
        Ok(buffer)
    }

    /// Allocates a copy of `values`. Waits for the copy.
    ///
    /// # Errors
    /// [`Error::Device`] if the device does not have enough memory, or the copy fails.
    pub fn from_slice(context: &Arc<CudaContext>, values: &[T]) -> Result<Buffer<T>> {
        let buffer = Buffer::uninit(context, values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Address of the first value, on the device.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Address of the value with this index, on the device.
    pub fn at(&self, index: usize) -> CUdeviceptr {
        self.address + (index * size_of::<T>()) as u64
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes of all values.
    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Copies `values` to the buffer, from index `start` on, and waits for the copy. The caller must have waited for kernels that
    /// use these values.
    ///
    /// # Errors
    /// [`Error::Device`] if the copy fails.
    ///
    /// # Panics
    /// If the values do not fit in the buffer.
    pub fn write(&self, start: usize, values: &[T]) -> Result<()> {
        assert!(start + values.len() <= self.len, "within the buffer");
        if values.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: The range is within the buffer, as checked above.
        unsafe { result::memcpy_htod_sync(self.at(start), values) }
            .map_err(driver_error("copying to the GPU"))?;
        // The call may return before the last bytes have arrived. Other streams would not wait for them.
        Stream::DEFAULT.synchronize()
    }

    /// The context that the memory belongs to.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Copies `len` values to the host, from index `start` on. The caller must have waited for kernels that write these values.
    ///
    /// # Errors
    /// [`Error::Device`] if the copy fails.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    pub fn read(&self, start: usize, len: usize) -> Result<Vec<T>> {
        assert!(start + len <= self.len, "within the buffer");
        read(&self.context, self.at(start), len)
    }

    /// Enqueues setting all values to 0 on a stream.
    ///
    /// # Errors
    /// [`Error::Device`] if it cannot be enqueued, or an earlier launch has failed.
    pub fn zero(&self, stream: Stream) -> Result<()> {
        // SAFETY: The range is that of the buffer.
        unsafe { stream.fill(self.address, 0, self.num_bytes()) }
    }

    /// Waits for all work on the device, then copies all values to the host.
    ///
    /// # Errors
    /// [`Error::Device`] if a launch has failed, or the copy fails.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.context.synchronize().map_err(driver_error("waiting for the GPU"))?;
        self.read(0, self.len)
    }
}

/// Copies `len` values from device memory to the host. No kernel may be writing to them.
///
/// # Errors
/// [`Error::Device`] if the copy fails.
pub fn read<T: Plain>(context: &CudaContext, address: CUdeviceptr, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::<T>::with_capacity(len);
    if len > 0 {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: The vector has room for `len` values, which are written before they are read.
        let room = unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr(), len) };
        // SAFETY: The device has `len` values at this address, because each caller reads an array that it knows.
        unsafe { result::memcpy_dtoh_sync(room, address) }.map_err(driver_error("copying from the GPU"))?;
        // SAFETY: All values are written, and every bit pattern is a value.
        unsafe { values.set_len(len) };
    }
    Ok(values)
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `uninit` has allocated the memory. The call waits for work on the device before it frees.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Device memory that grows in place: a reserved range of addresses, the first part of which has physical memory.
pub struct Arena {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
    /// Bytes of the range.
    reserved: usize,
    /// Bytes that have physical memory.
    mapped: usize,
    /// Physical memory comes in multiples of this number of bytes.
    granularity: usize,
    /// Where each piece of physical memory ends, in bytes from `address`.
    pieces: Vec<usize>,
    properties: CUmemAllocationProp,
    /// The owner, for messages.
    what: String,
}

// SAFETY: Device memory belongs to no thread.
unsafe impl Send for Arena {}
// SAFETY: Nothing changes through a shared reference.
unsafe impl Sync for Arena {}

/// Maximum number of spare bytes that memory grows by.
const LARGEST_SPARE: usize = 1 << 30;

impl Arena {
    /// Reserves addresses for `most` bytes, but for no more than the memory of the device. `what`: the owner, for messages.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver cannot reserve them.
    pub fn new(context: &Arc<CudaContext>, most: usize, what: String) -> Result<Arena> {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: Zero is a valid value of each field.
        let mut properties: CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(context);
        let (mut granularity, mut address) = (0, 0);
        let failed = driver_error("reserving GPU addresses");
        // SAFETY: The granularity may be written.
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
        // SAFETY: The address may be written.
        unsafe { sys::cuMemAddressReserve(&mut address, reserved, 0, 0, 0) }.result().map_err(&failed)?;
        let (context, pieces) = (context.clone(), Vec::new());
        Ok(Arena { context, address, reserved, mapped: 0, granularity, pieces, properties, what })
    }

    /// Address of the first byte. It never changes.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Number of bytes that have physical memory.
    pub fn num_bytes(&self) -> usize {
        self.mapped
    }

    /// Maps physical memory to the first `bytes` bytes, and with `spare` to some more if the device has it. Addresses do not
    /// change.
    ///
    /// # Errors
    /// [`Error::Device`] if the device does not have enough memory. Nothing has changed then.
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

    /// Maps physical memory to the first `bytes` bytes.
    fn map(&mut self, bytes: usize) -> Result<()> {
        let end = bytes.min(self.reserved).next_multiple_of(self.granularity);
        let size = end.saturating_sub(self.mapped);
        let failed = |error| out_of_memory(&self.context, size, &self.what, error);
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
        // SAFETY: The handle may be written.
        unsafe { sys::cuMemCreate(&mut handle, size, &self.properties, 0) }.result().map_err(failed)?;
        // SAFETY: The range is reserved and has no memory yet.
        let mapped = unsafe { sys::cuMemMap(at, size, 0, handle, 0) }.result();
        // SAFETY: The handle was created above. The mapping keeps the memory.
        let _ = unsafe { sys::cuMemRelease(handle) }.result();
        mapped.map_err(failed)?;
        // SAFETY: The range is mapped.
        if let Err(error) = unsafe { sys::cuMemSetAccess(at, size, &access, 1) }.result() {
            // SAFETY: The range is mapped, and nothing uses it yet.
            let _ = unsafe { sys::cuMemUnmap(at, size) }.result();
            return Err(failed(error));
        }
        self.mapped = end;
        self.pieces.push(end);
        Ok(())
    }
}

pub(crate) fn location(context: &CudaContext) -> CUmemLocation {
    // SAFETY: Zero is a valid value of each field.
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
        let _ = self.context.synchronize();
        let mut start = 0;
        for &end in &self.pieces {
            // SAFETY: `map` has mapped this piece, and nothing on the device uses it after the wait above.
            let _ = unsafe { sys::cuMemUnmap(self.address + start as u64, end - start) }.result();
            start = end;
        }
        // SAFETY: `new` has reserved the range, and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.reserved) }.result();
    }
}

/// Words of pinned host memory that kernels write and the host reads without waiting for the device.
pub struct Shared {
    host: *mut u32,
    address: CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
}

// SAFETY: The memory belongs to no thread. Through a shared reference it is accessed by volatile loads and stores of words, or read
// while nothing writes to it.
unsafe impl Send for Shared {}
// SAFETY: As above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Allocates `len` 32-bit words and sets them to 0.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver cannot allocate pinned memory.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Shared> {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        let failed = driver_error("getting host memory that the GPU writes to");
        let mapped = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        count_asking();
        // SAFETY: The call only allocates. All words are written below.
        let host = unsafe { result::malloc_host(len * 4, mapped) }.map_err(&failed)?.cast::<u32>();
        // SAFETY: The memory has room for `len` words.
        unsafe { host.write_bytes(0, len) };
        let mut address = 0;
        // SAFETY: The address may be written. The memory was allocated as mapped to the device.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, host.cast(), 0) }
            .result()
            .map_err(&failed)?;
        Ok(Shared { host, address, len, context: context.clone() })
    }

    /// Address of the first word, on the device.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Copies words from device memory, and waits for the copy alone. They must have been written.
    ///
    /// # Errors
    /// [`Error::Device`] if the copy fails.
    pub(crate) fn copy_beside(&mut self, device: &Device, from: CUdeviceptr, len: usize) -> Result<()> {
        assert!(len <= self.len);
        let stream = Stream::of_cudarc(&device.copies);
        // SAFETY: The memory has room for the words, and the call waits.
        unsafe { stream.copy_to_host(self.host.cast(), from, 4 * len) }?;
        stream.synchronize()
    }

    /// Number of words.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All words.
    ///
    /// # Safety
    /// No kernel or copy writes to them meanwhile.
    pub(crate) unsafe fn words(&self) -> &[u32] {
        // SAFETY: The memory has so many words, and the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts(self.host, self.len) }
    }

    /// Reads the word with this index. Panics if it is out of bounds, as do the methods below.
    pub fn get(&self, word: usize) -> u32 {
        assert!(word < self.len);
        // SAFETY: The word is within the memory. The load is volatile, since the device may write the word at any time.
        unsafe { self.host.wrapping_add(word).read_volatile() }
    }

    /// Writes the word with this index.
    pub fn set(&self, word: usize, value: u32) {
        assert!(word < self.len);
        // SAFETY: As above.
        unsafe { self.host.wrapping_add(word).write_volatile(value) }
    }

    /// Reads 64 bits: the low word at this index, then the high word. The two loads are not atomic.
    pub fn get_wide(&self, word: usize) -> u64 {
        u64::from(self.get(word)) | u64::from(self.get(word + 1)) << 32
    }

    /// Reads a value that begins at this word.
    pub fn get_all<T: Plain>(&self, word: usize) -> T {
        let words: Vec<u32> = (word..word + size_of::<T>() / 4).map(|word| self.get(word)).collect();
        // SAFETY: All bytes of plain values are valid, and there are as many. The words may be aligned to less.
        unsafe { words.as_ptr().cast::<T>().read_unaligned() }
    }

    /// Reads the word with this index as a float32.
    pub fn get_float(&self, word: usize) -> f32 {
        f32::from_bits(self.get(word))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `new` has allocated the memory, and nothing on the device writes to it after the wait.
            unsafe {
                let _ = self.context.synchronize();
                let _ = result::free_host(self.host.cast());
            }
        }
    }
}
