//! A GPU, and the functions compiled for it.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
use cudarc::driver::sys::CUfunction_attribute_enum::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
};
use cudarc::driver::sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
use cudarc::driver::sys::{
    CUdevice_attribute, CUfunction, CUlaunchAttribute, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};
use cudarc::driver::{CudaContext, CudaEvent, DriverError, result, sys};
use sok_core::error::{Error, Result};

use crate::cache::{self, Compiled};
use crate::nvrtc::{Cubin, Nvrtc, Source};

pub fn driver_error(what: &str) -> impl Fn(DriverError) -> Error + '_ {
    move |error| Error::Device(format!("{what}: {error}"))
}

pub struct Device {
    pub context: Arc<CudaContext>,
    /// Compute capability: 90 for 9.0.
    pub arch: u32,
    pub multiprocessors: u32,
    /// Bytes of memory that the threads of a block may share.
    pub shared_bytes: usize,
    /// Bytes that the parameters of a launch may have.
    pub parameter_bytes: usize,
    nvrtc: Nvrtc,
    kernels: Mutex<HashMap<(&'static str, String), Kernel>>,
}

/// A function on the device.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    function: CUfunction,
    /// Whether the device can make it ready while another runs.
    may_overlap: bool,
}

/// A stream, a framework's or ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub CUstream);

// SAFETY: a handle that any thread may put work on.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Streams live as long as the process: the frameworks', and ours.
impl Stream {
    /// The device's default one.
    pub const DEFAULT: Stream = Stream(std::ptr::null_mut());

    /// The event is all that was put onto the stream so far.
    pub fn record(self, event: &CudaEvent) -> Result<()> {
        // SAFETY: both live.
        unsafe { result::event::record(event.cu_event(), self.0) }.map_err(driver_error("ordering streams"))
    }

    /// What comes after waits for the event.
    pub fn wait(self, event: &CudaEvent) -> Result<()> {
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.0, event.cu_event(), CU_EVENT_WAIT_DEFAULT) }
            .map_err(driver_error("ordering streams"))
    }

    /// Whether all that was put onto it has run.
    pub fn is_idle(self) -> Result<bool> {
        // SAFETY: it lives.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().map(|()| true).map_err(driver_error("a step on the GPU")),
        }
    }

    /// Sets bytes of the group's own memory.
    ///
    /// # Safety
    /// There are so many at `address`.
    pub unsafe fn fill(self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(address, byte, bytes, self.0) }
            .map_err(driver_error("filling GPU memory"))
    }

    /// Copies bytes from device memory to the group's own.
    ///
    /// # Safety
    /// There are so many at both addresses, apart from each other.
    pub unsafe fn copy(self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.0) }
            .map_err(driver_error("copying on the GPU"))
    }
}

// SAFETY: a handle that any thread may launch; modules are never unloaded.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Device {
    /// The device's primary context, which the frameworks use too. `known`: where NVRTC may be.
    ///
    /// # Errors
    /// [`Error::Device`] without a driver, a device of this number, or NVRTC.
    pub fn open(ordinal: usize, known: &[PathBuf]) -> Result<Device> {
        // SAFETY: only looks for the library.
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
        // SAFETY: a number to write to.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(&failed)?;
        // Since CUDA 12.1, from Volta on.
        let takes_many = major >= 7 && driver >= 12010 && nvrtc.version >= (12, 1);
        Ok(Device {
            context,
            arch: (10 * major + minor) as u32,
            multiprocessors: multiprocessors as u32,
            shared_bytes: shared_bytes as usize,
            parameter_bytes: if takes_many { 32_764 } else { 4096 },
            nvrtc,
            kernels: Mutex::default(),
        })
    }

    /// The device that all tables of the process share.
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

    /// Lets launches of a function take as much shared memory as a block can have.
    fn let_share(&self, function: CUfunction) -> Result<()> {
        let mut own = 0;
        // SAFETY: a function of a loaded module, and a number to write to.
        let result = unsafe {
            sys::cuFuncGetAttribute(&mut own, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
                .result()
                .and_then(|()| {
                    let most = self.shared_bytes as i32 - own;
                    sys::cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
                        .result()
                })
        };
        result.map_err(driver_error("loading kernels"))
    }

    /// Waits for all that was launched.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        self.context.synchronize().map_err(driver_error("waiting for the GPU"))
    }

    pub fn kernel(&self, source: &Source, name: &str) -> Result<Kernel> {
        let [kernel] = self.kernels(source, [name])?;
        Ok(kernel)
    }

    /// Kernels of a source by name, templates with their arguments: compiled once a process, and once a machine.
    pub fn kernels<const N: usize>(&self, source: &Source, names: [&str; N]) -> Result<[Kernel; N]> {
        let mut loaded = self.kernels.lock().unwrap_or_else(|e| e.into_inner());
        let key = |name: &str| (source.name, name.to_string());
        let missing: Vec<String> =
            names.iter().filter(|n| !loaded.contains_key(&key(n))).map(|n| n.to_string()).collect();
        if !missing.is_empty() {
            let (module, cubin) = self.load(source, &missing)?;
            for (name, symbol) in missing.iter().zip(&cubin.symbols) {
                let symbol = CString::new(symbol.as_str()).expect("a symbol has no zero byte");
                // SAFETY: the module is loaded.
                let function = unsafe { result::module::get_function(module, symbol) }
                    .map_err(driver_error("finding a kernel"))?;
                self.let_share(function)?;
                loaded.insert(key(name), Kernel { function, may_overlap: self.arch >= 90 });
            }
        }
        Ok(names.map(|name| loaded[&key(name)]))
    }

    /// Kernels of a source on the device. Those of the cache that the driver does not take are compiled anew.
    fn load(&self, source: &Source, names: &[String]) -> Result<(sys::CUmodule, Cubin)> {
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        // SAFETY: a whole cubin; the module stays loaded for good.
        let load = |cubin: &Cubin| unsafe { result::module::load_data(cubin.code.as_ptr().cast()) };
        let Compiled { cubin, is_cached } = cache::compile(&self.nvrtc, source, self.arch, names, false)?;
        match load(&cubin) {
            Ok(module) => Ok((module, cubin)),
            Err(_) if is_cached => {
                let cubin = cache::compile(&self.nvrtc, source, self.arch, names, true)?.cubin;
                let module = load(&cubin).map_err(driver_error("loading kernels"))?;
                Ok((module, cubin))
            }
            Err(error) => Err(driver_error("loading kernels")(error)),
        }
    }
}

/// Puts a launch onto a stream: `launch!(kernel, stream, blocks, threads, parameter, ...)`.
///
/// The parameters are of the types that the kernel has, and what they point to lives until it has run: the promise of
/// each place that uses it.
macro_rules! launch {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $($value:expr),* $(,)?) => {
        $crate::device::put!(false, $kernel, $stream, $blocks, $threads, 0, $($value),*)
    };
}

/// As `launch!`, with so many bytes of memory that the threads of a block share.
macro_rules! launch_shared {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $bytes:expr, $($value:expr),* $(,)?) => {
        $crate::device::put!(false, $kernel, $stream, $blocks, $threads, $bytes, $($value),*)
    };
}

/// As `launch!`, but made ready while the launch before it on the stream still runs, so that nothing lies between the two. Its
/// kernel has no `__restrict__` pointers: what is read through one may be read before the other launch is over.
macro_rules! launch_next {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $($value:expr),* $(,)?) => {
        $crate::device::put!(true, $kernel, $stream, $blocks, $threads, 0, $($value),*)
    };
}

macro_rules! put {
    ($is_next:expr, $kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $bytes:expr, $($value:expr),*) => {{
        let mut arguments = [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*];
        let grid = ($blocks as u32, $threads as u32, $bytes as u32);
        // SAFETY: the promise above.
        #[allow(unsafe_code)]
        let launched = unsafe { $crate::device::Kernel::launch(&$kernel, $stream, grid, $is_next, &mut arguments) };
        launched
    }};
}
pub(crate) use {launch, launch_next, launch_shared, put};

impl Kernel {
    /// Puts a launch of so many blocks of so many threads, which share so many bytes, onto a stream. `is_next`: it may be made
    /// ready while the one before it runs, if the device can; it waits itself, by `begin` of kernels/types.cuh.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameters, and what those point to lives until the kernel has run.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        (blocks, threads, shared_bytes): (u32, u32, u32),
        is_next: bool,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let mut overlaps = CUlaunchAttribute {
            id: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
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
            attrs: &raw mut overlaps,
            numAttrs: u32::from(is_next && self.may_overlap),
        };
        // SAFETY: the caller's promise.
        unsafe { sys::cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(driver_error("launching a kernel"))
    }
}
