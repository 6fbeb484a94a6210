//! Device memory that other processes can read and write.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemGenericAllocationHandle,
};
use sok_core::error::Result;

use crate::device::driver_error;
use crate::memory::{count_asking, location, out_of_memory};

const HANDLE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A range of addresses with physical memory, of this GPU or of another one.
pub struct Mapping {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
    bytes: usize,
}

// SAFETY: Device memory belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: Nothing changes through a shared reference.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Address of the first byte.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.bytes
    }

    /// Allocates at least this many bytes that other processes can map. Returns them with a descriptor that those import. They are zeros.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if the device does not have enough memory, or cannot share memory.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<(Mapping, OwnedFd)> {
        let (handle, bytes) = Handle::create(context, bytes, HANDLE)?;
        let mut descriptor = -1i32;
        // SAFETY: The descriptor, which is an int, may be written. The handle is of memory that may be exported.
        unsafe { sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle.0, HANDLE, 0) }
            .result()
            .map_err(driver_error("sharing GPU memory with other ranks"))?;
        // SAFETY: The driver has just made the descriptor for this process.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok((Mapping::zeros(context, &handle, bytes)?, descriptor))
    }

    /// Allocates at least this many bytes that other processes cannot map. They are zeros.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if the device does not have enough memory.
    pub fn private(context: &Arc<CudaContext>, bytes: usize) -> Result<Mapping> {
        let (handle, bytes) =
            Handle::create(context, bytes, CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE)?;
        Mapping::zeros(context, &handle, bytes)
    }

    fn zeros(context: &Arc<CudaContext>, handle: &Handle, bytes: usize) -> Result<Mapping> {
        let mapping = Mapping::of(context, handle, bytes)?;
        // SAFETY: The length is that of the memory.
        unsafe { sys::cuMemsetD8_v2(mapping.address, 0, bytes) }
            .result()
            .map_err(driver_error("filling GPU memory"))?;
        crate::device::Stream::DEFAULT.synchronize()?;
        Ok(mapping)
    }

    /// Maps the memory of another process. `bytes`: its length there.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if this GPU cannot reach the memory.
    pub fn import(context: &Arc<CudaContext>, descriptor: &OwnedFd, bytes: usize) -> Result<Mapping> {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        let mut handle = 0;
        let descriptor = descriptor.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: The handle may be written. The driver checks the descriptor.
        unsafe { sys::cuMemImportFromShareableHandle(&mut handle, descriptor, HANDLE) }
            .result()
            .map_err(driver_error("mapping the GPU memory of another rank"))?;
        Mapping::of(context, &Handle(handle), bytes)
    }

    fn of(context: &Arc<CudaContext>, handle: &Handle, bytes: usize) -> Result<Mapping> {
        let failed = driver_error("mapping GPU memory that ranks share");
        let mut address = 0;
        // SAFETY: The address may be written.
        unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }.result().map_err(&failed)?;
        // SAFETY: The range is reserved and has no memory yet.
        if let Err(error) = unsafe { sys::cuMemMap(address, bytes, 0, handle.0, 0) }.result() {
            // SAFETY: The range is reserved, and nothing is mapped there.
            let _ = unsafe { sys::cuMemAddressFree(address, bytes) }.result();
            return Err(failed(error));
        }
        // From here on, dropping the mapping frees the range.
        let mapping = Mapping { context: context.clone(), address, bytes };
        let access = CUmemAccessDesc {
            location: location(context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: The range is mapped.
        unsafe { sys::cuMemSetAccess(address, bytes, &access, 1) }.result().map_err(&failed)?;
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        let _ = self.context.synchronize();
        // SAFETY: The range is mapped, and nothing on the device uses it after the wait above.
        let _ = unsafe { sys::cuMemUnmap(self.address, self.bytes) }.result();
        // SAFETY: The range was reserved with this length, and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) }.result();
    }
}

/// A handle of the driver to physical memory. Mappings keep the memory when it is dropped.
struct Handle(CUmemGenericAllocationHandle);

impl Handle {
    /// Allocates at least this many bytes. Returns the number of bytes, too.
    fn create(
        context: &CudaContext,
        bytes: usize,
        kind: CUmemAllocationHandleType,
    ) -> Result<(Handle, usize)> {
        context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        let properties = properties(context, kind);
        let bytes = bytes.max(1).next_multiple_of(granularity(&properties)?);
        let mut handle = 0;
        count_asking();
        // SAFETY: The handle may be written.
        let created = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties, 0) }.result();
        created.map_err(|error| out_of_memory(context, bytes, "the exchange between ranks", error))?;
        Ok((Handle(handle), bytes))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: The driver has made the handle, and nobody else releases it.
        let _ = unsafe { sys::cuMemRelease(self.0) }.result();
    }
}

fn properties(context: &CudaContext, kind: CUmemAllocationHandleType) -> CUmemAllocationProp {
    // SAFETY: Zero is a valid value of each field.
    let mut properties: CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(context);
    properties.requestedHandleTypes = kind;
    properties
}

fn granularity(properties: &CUmemAllocationProp) -> Result<usize> {
    let mut granularity = 0;
    let kind = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: The granularity may be written.
    unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, properties, kind) }
        .result()
        .map_err(driver_error("asking the GPU for memory that ranks share"))?;
    Ok(granularity)
}
