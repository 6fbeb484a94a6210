//! A GPU, its streams, and the kernels that are loaded on it.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
use cudarc::driver::sys::CUfunction_attribute_enum::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
};
use cudarc::driver::sys::CUlaunchAttributeID_enum::{
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
};
use cudarc::driver::sys::{
    CUdevice_attribute, CUfunction, CUlaunchAttribute, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use sok_core::contract::tensor::StreamHandle;
use sok_core::error::{Error, Result};

use crate::abi::TABLE_THREADS;
use crate::cache::{self, Compiled};
use crate::nvrtc::{Cubin, Nvrtc, Source};

/// Returns a function that turns an error of the driver into [`Error::Device`]. `what`: what failed, which begins the message.
pub fn driver_error(what: &str) -> impl Fn(DriverError) -> Error + '_ {
    move |error| Error::Device(format!("{what}: {error}"))
}

/// A GPU: its properties, and the kernels that are loaded on it.
pub struct Device {
    /// The primary context, which the frameworks use too.
    pub context: Arc<CudaContext>,
    /// Compute capability: 90 for 9.0.
    pub arch: u32,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum number of bytes of shared memory of a block.
    pub shared_bytes: usize,
    /// Maximum number of bytes of the parameters of a launch.
    pub parameter_bytes: usize,
    /// A stream for copies beside the work of other streams.
    pub(crate) copies: Arc<CudaStream>,
    nvrtc: Nvrtc,
    kernels: Mutex<Kernels>,
}

/// A kernel that is loaded on the device.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    function: CUfunction,
    /// Whether the device can prepare a launch while the previous one runs (programmatic dependent launch).
    may_overlap: bool,
}

/// A stream of a framework or of this library. It lives as long as the process, or until its owner has waited for its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(CUstream);

// SAFETY: Any thread may enqueue work on a stream.
unsafe impl Send for Stream {}
// SAFETY: As above.
unsafe impl Sync for Stream {}

impl Stream {
    /// The default stream of the device.
    pub const DEFAULT: Stream = Stream(std::ptr::null_mut());

    /// The stream of a framework's call.
    pub fn of(handle: StreamHandle) -> Stream {
        Stream(handle.get() as CUstream)
    }

    /// A stream of cudarc. The caller must keep `stream` until all its work has completed.
    pub fn of_cudarc(stream: &CudaStream) -> Stream {
        Stream(stream.cu_stream())
    }

    /// The stream, as the driver and CUDA's libraries have it.
    pub(crate) fn raw(self) -> *mut c_void {
        self.0.cast()
    }

    /// Waits for all work on the stream.
    ///
    /// # Errors
    /// [`Error::Device`] if a launch has failed.
    pub fn synchronize(self) -> Result<()> {
        // SAFETY: The stream is alive.
        unsafe { result::stream::synchronize(self.0) }.map_err(driver_error("waiting for the GPU"))
    }

    /// Enqueues a copy of bytes from host memory to the device.
    ///
    /// # Errors
    /// [`Error::Device`] if the copy cannot be enqueued, or an earlier launch has failed.
    ///
    /// # Safety
    /// Both addresses have this many bytes. `from` lives until the copy has completed.
    pub unsafe fn copy_to_device(self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: The caller guarantees it.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.0) }
            .result()
            .map_err(driver_error("copying to the GPU"))
    }

    /// Enqueues a copy of bytes from the device to host memory.
    ///
    /// # Errors
    /// As `copy_to_device`.
    ///
    /// # Safety
    /// As `copy_to_device`, and `to` may be written until the copy has completed.
    pub unsafe fn copy_to_host(self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: The caller guarantees it.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.0) }
            .result()
            .map_err(driver_error("copying from the GPU"))
    }

    /// Records the event after all work that is on the stream so far.
    ///
    /// # Errors
    /// [`Error::Device`] if the event cannot be recorded, or an earlier launch has failed.
    pub fn record(self, event: &CudaEvent) -> Result<()> {
        // SAFETY: Stream and event are alive.
        unsafe { result::event::record(event.cu_event(), self.0) }.map_err(driver_error("ordering streams"))
    }

    /// Makes all later work on the stream wait for the event. The host does not wait.
    ///
    /// # Errors
    /// [`Error::Device`] if the wait cannot be enqueued, or an earlier launch has failed.
    pub fn wait(self, event: &CudaEvent) -> Result<()> {
        // SAFETY: Stream and event are alive.
        unsafe { result::stream::wait_event(self.0, event.cu_event(), CU_EVENT_WAIT_DEFAULT) }
            .map_err(driver_error("ordering streams"))
    }

    /// Returns whether all work on the stream has completed. Does not wait.
    ///
    /// # Errors
    /// [`Error::Device`] if a launch has failed.
    pub fn is_idle(self) -> Result<bool> {
        // SAFETY: The stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().map(|()| true).map_err(driver_error("a step on the GPU")),
        }
    }

    /// Enqueues setting `bytes` bytes of device memory to `byte`.
    ///
    /// # Errors
    /// [`Error::Device`] if it cannot be enqueued, or an earlier launch has failed.
    ///
    /// # Safety
    /// `address` has this many bytes, in memory of this library.
    pub unsafe fn fill(self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: The caller guarantees it.
        unsafe { result::memset_d8_async(address, byte, bytes, self.0) }
            .map_err(driver_error("filling GPU memory"))
    }

    /// Enqueues a copy of bytes from device memory to device memory of this library.
    ///
    /// # Errors
    /// [`Error::Device`] if the copy cannot be enqueued, or an earlier launch has failed.
    ///
    /// # Safety
    /// Both addresses have this many bytes, and the ranges do not overlap.
    pub unsafe fn copy(self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: The caller guarantees it.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.0) }
            .map_err(driver_error("copying on the GPU"))
    }
}

// SAFETY: Any thread may launch a kernel, and modules are never unloaded.
unsafe impl Send for Kernel {}
// SAFETY: As above.
unsafe impl Sync for Kernel {}

impl Device {
    /// Opens a device by its number, with its primary context. `known`: paths of NVRTC that the caller knows.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no driver, no device of this number, or no NVRTC.
    pub fn open(ordinal: usize, known: &[PathBuf]) -> Result<Device> {
        // SAFETY: The call only looks for the library of the driver.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Device(
                "a GPU was asked for, but no NVIDIA driver is here (libcuda.so was not found)".into(),
            ));
        }
        let context = CudaContext::new(ordinal).map_err(|error| {
            Error::Device(format!("GPU {ordinal} was asked for, but cannot be used: {error}"))
        })?;
        let failed = driver_error("asking the GPU what it is");
        let (major, minor) = context.compute_capability().map_err(&failed)?;
        let multiprocessors = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(&failed)?;
        let shared_bytes = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(&failed)?;
        let nvrtc = Nvrtc::load(known)?;
        let mut driver = 0;
        // SAFETY: The number may be written.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(&failed)?;
        // Large parameters exist since CUDA 12.1, from Volta on.
        let takes_many = major >= 7 && driver >= 12010 && nvrtc.version >= (12, 1);
        Ok(Device {
            copies: context.new_stream().map_err(&failed)?,
            context,
            arch: (10 * major + minor) as u32,
            multiprocessors: multiprocessors as u32,
            shared_bytes: shared_bytes as usize,
            parameter_bytes: if takes_many { 32_764 } else { 4096 },
            nvrtc,
            kernels: Mutex::default(),
        })
    }

    /// Returns the device that all tables of the process share. Opens it at the first call.
    ///
    /// # Errors
    /// As `open`.
    pub fn shared(ordinal: usize, known: &[PathBuf]) -> Result<Arc<Device>> {
        static DEVICES: Mutex<Vec<(usize, Arc<Device>)>> = Mutex::new(Vec::new());
        let mut devices = DEVICES.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, device)) = devices.iter().find(|(number, _)| *number == ordinal) {
            return Ok(device.clone());
        }
        let device = Arc::new(Device::open(ordinal, known)?);
        devices.push((ordinal, device.clone()));
        Ok(device)
    }

    /// Allows launches of a function to use as much shared memory as a block can have.
    fn let_share(&self, function: CUfunction) -> Result<()> {
        let mut own = 0;
        // SAFETY: The module of the function is loaded, and the number may be written.
        let asked =
            unsafe { sys::cuFuncGetAttribute(&mut own, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function) };
        asked.result().map_err(driver_error("loading kernels"))?;
        let most = self.shared_bytes as i32 - own;
        // SAFETY: The module of the function is loaded.
        let set = unsafe {
            sys::cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
        };
        set.result().map_err(driver_error("loading kernels"))
    }

    /// Waits for all work on the device.
    ///
    /// # Errors
    /// [`Error::Device`] if a launch has failed.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        self.context.synchronize().map_err(driver_error("waiting for the GPU"))
    }

    /// Returns one kernel of a source, as `kernels`.
    ///
    /// # Errors
    /// As `kernels`.
    pub fn kernel(&self, source: &Source, name: &str) -> Result<Kernel> {
        let [kernel] = self.kernels(source, [name])?;
        Ok(kernel)
    }

    /// Returns kernels of a source by name; the name of a template contains its arguments. A kernel is loaded once in a process,
    /// and compiled once on a machine that has a cache folder.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or loaded.
    pub fn kernels<const N: usize>(&self, source: &Source, names: [&str; N]) -> Result<[Kernel; N]> {
        let mut loaded = self.kernels.lock().unwrap_or_else(|e| e.into_inner());
        let missing = loaded.missing(source, names);
        if !missing.is_empty() {
            let compiled = self.compile(source, &missing, false)?;
            self.load(&mut loaded, source, &missing, compiled)?;
        }
        Ok(names.map(|name| loaded.get(source, name)))
    }

    /// Returns the number of blocks of `TABLE_THREADS` threads that examine so many records, where a launch does that for `num` tables.
    pub fn blocks_for(&self, records: usize, num: usize) -> u32 {
        let most = 8 * self.multiprocessors as usize / num.max(1);
        records.div_ceil(TABLE_THREADS).clamp(1, most.max(1)) as u32
    }

    /// Returns kernels of a source by name, as `kernels`, but compiles each on a thread of its own.
    ///
    /// # Errors
    /// As `kernels`.
    pub fn kernels_apart(&self, source: &Source, names: &[String]) -> Result<Vec<Kernel>> {
        let mut loaded = self.kernels.lock().unwrap_or_else(|e| e.into_inner());
        let missing = loaded.missing(source, names.iter().map(String::as_str));
        let compiled: Vec<Result<Compiled>> = std::thread::scope(|scope| {
            let compile = |name| self.compile(source, std::slice::from_ref(name), false);
            let threads: Vec<_> = missing.iter().map(|name| scope.spawn(move || compile(name))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|e| resume_unwind(e))).collect()
        });
        for (name, compiled) in missing.iter().zip(compiled) {
            self.load(&mut loaded, source, std::slice::from_ref(name), compiled?)?;
        }
        Ok(names.iter().map(|name| loaded.get(source, name)).collect())
    }

    fn compile(&self, source: &Source, names: &[String], anew: bool) -> Result<Compiled> {
        cache::compile(&self.nvrtc, source, self.arch, names, anew)
    }

    /// Loads kernels on the device. If the driver rejects code from the cache, compiles them anew.
    fn load(&self, to: &mut Kernels, source: &Source, names: &[String], compiled: Compiled) -> Result<()> {
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: `code` is a whole cubin. The module is never unloaded.
        let load = |cubin: &Cubin| unsafe { result::module::load_data(cubin.code.as_ptr().cast()) };
        let Compiled { mut cubin, is_cached } = compiled;
        let mut module = load(&cubin);
        if module.is_err() && is_cached {
            cubin = self.compile(source, names, true)?.cubin;
            module = load(&cubin);
        }
        let module = module.map_err(driver_error("loading kernels"))?;
        for (name, symbol) in names.iter().zip(&cubin.symbols) {
            let symbol = CString::new(symbol.as_str()).expect("a symbol has no zero byte");
            // SAFETY: The module is loaded.
            let function = unsafe { result::module::get_function(module, symbol) }
                .map_err(driver_error("finding a kernel"))?;
            self.let_share(function)?;
            let kernel = Kernel { function, may_overlap: self.arch >= 90 };
            to.0.insert((source.name, name.clone()), kernel);
        }
        Ok(())
    }
}

/// The kernels that the process has loaded on a device, by source and name.
#[derive(Default)]
struct Kernels(HashMap<(&'static str, String), Kernel>);

impl Kernels {
    /// Returns those of `names` whose kernels have not been loaded.
    fn missing<'a>(&self, source: &Source, names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let is_missing = |name: &String| !self.0.contains_key(&(source.name, name.clone()));
        names.into_iter().map(String::from).filter(is_missing).collect()
    }

    /// Returns one that is loaded.
    fn get(&self, source: &Source, name: &str) -> Kernel {
        self.0[&(source.name, name.to_string())]
    }
}

/// Enqueues a launch on a stream: `launch!(kernel, stream, blocks, threads, argument, ...)`.
///
/// # Safety
/// As [`Kernel::launch`]: the arguments have the types of the kernel's parameters, and what they point to lives until the kernel
/// has completed.
macro_rules! launch {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $($value:expr),* $(,)?) => {
        $crate::device::put!($crate::device::Order::After, $kernel, $stream, $blocks, $threads, 0, $($value),*)
    };
}

/// As `launch!`, with `bytes` of dynamic shared memory.
macro_rules! launch_shared {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $bytes:expr, $($value:expr),* $(,)?) => {
        $crate::device::put!($crate::device::Order::After, $kernel, $stream, $blocks, $threads, $bytes, $($value),*)
    };
}

/// As `launch!`, but the launch may be prepared while the previous one on the stream still runs (programmatic dependent launch), so
/// that there is no gap between the two. The kernel must have no `__restrict__` pointers, because reads through them may be moved
/// to before the end of the previous launch.
macro_rules! launch_next {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $($value:expr),* $(,)?) => {
        $crate::device::put!($crate::device::Order::Next, $kernel, $stream, $blocks, $threads, 0, $($value),*)
    };
}

/// As `launch!`, for a kernel whose blocks wait for each other: all of them are on the device at the same time. The launch fails if there is not room for
/// all.
macro_rules! launch_together {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $($value:expr),* $(,)?) => {
        $crate::device::put!($crate::device::Order::Together, $kernel, $stream, $blocks, $threads, 0, $($value),*)
    };
}

/// Common part of the launch macros.
macro_rules! put {
    ($order:expr, $kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $bytes:expr, $($value:expr),*) => {{
        let mut arguments = [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*];
        let grid = ($blocks as u32, $threads as u32, $bytes as u32);
        $crate::device::Kernel::launch(&$kernel, $stream, grid, $order, &mut arguments)
    }};
}
pub(crate) use {launch, launch_next, launch_shared, launch_together, put};

/// How a launch runs beside the previous one on the stream, and its blocks beside each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// After it.
    After,
    /// It may be prepared while that one runs, if the device supports it. The kernel then waits in `begin` of kernels/types.cuh.
    Next,
    /// After it, and all blocks are on the device at the same time.
    Together,
}

impl Kernel {
    /// Enqueues a launch on a stream. The grid has `blocks` blocks of `threads` threads, with `shared_bytes` of dynamic shared
    /// memory. Does nothing if there are no blocks.
    ///
    /// # Errors
    /// [`Error::Device`] if the launch cannot be enqueued, or an earlier one has failed.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameters. What those point to lives until the kernel has completed.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        (blocks, threads, shared_bytes): (u32, u32, u32),
        order: Order,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let (id, value) = match order {
            Order::Together => (CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CUlaunchAttributeValue { cooperative: 1 }),
            Order::After | Order::Next => (
                CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            ),
        };
        let mut attribute = CUlaunchAttribute { id, pad: [0; 4], value };
        let has_attribute = match order {
            Order::After => false,
            Order::Next => self.may_overlap,
            Order::Together => true,
        };
        let config = CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: stream.0,
            attrs: &raw mut attribute,
            numAttrs: u32::from(has_attribute),
        };
        // SAFETY: The caller guarantees it.
        unsafe { sys::cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(driver_error("launching a kernel"))
    }
}
