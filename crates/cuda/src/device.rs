//! A GPU, and the functions compiled for it.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
use cudarc::driver::sys::{CUdevice_attribute, CUfunction, CUstream};
use cudarc::driver::{CudaContext, CudaEvent, DriverError, result, sys};
use sok_core::error::{Error, Result};

use crate::cache;
use crate::nvrtc::{Nvrtc, Source};

pub fn driver_error(what: &str) -> impl Fn(DriverError) -> Error + '_ {
    move |error| Error::Device(format!("{what}: {error}"))
}

pub struct Device {
    pub context: Arc<CudaContext>,
    /// Compute capability: 90 for 9.0.
    pub arch: u32,
    pub multiprocessors: u32,
    /// Bytes that the parameters of a launch may have.
    pub parameter_bytes: usize,
    nvrtc: Nvrtc,
    kernels: Mutex<HashMap<(&'static str, String), Kernel>>,
}

/// A function on the device.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(CUfunction);

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

    /// Sets bytes of the group's own memory to zero.
    ///
    /// # Safety
    /// There are so many at `address`.
    pub unsafe fn zero(self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(address, 0, bytes, self.0) }
            .map_err(driver_error("filling GPU memory"))
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
            let cubin = cache::compile(&self.nvrtc, source, self.arch, &missing)?;
            self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
            // SAFETY: a whole cubin; the module stays loaded for good.
            let module = unsafe { result::module::load_data(cubin.code.as_ptr().cast()) }
                .map_err(driver_error("loading kernels"))?;
            for (name, symbol) in missing.iter().zip(&cubin.symbols) {
                let symbol = CString::new(symbol.as_str()).expect("a symbol has no zero byte");
                // SAFETY: the module is loaded.
                let function = unsafe { result::module::get_function(module, symbol) }
                    .map_err(driver_error("finding a kernel"))?;
                loaded.insert(key(name), Kernel(function));
            }
        }
        Ok(names.map(|name| loaded[&key(name)]))
    }
}

/// Puts a launch onto a stream: `launch!(kernel, stream, blocks, threads, parameter, ...)`.
///
/// The parameters are of the types that the kernel has, and what they point to lives until it has run: the promise of
/// each place that uses it.
macro_rules! launch {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $($value:expr),* $(,)?) => {{
        let mut arguments = [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*];
        // SAFETY: the promise above.
        #[allow(unsafe_code)]
        let launched = unsafe {
            $crate::device::Kernel::launch(&$kernel, $stream, $blocks as u32, $threads as u32, &mut arguments)
        };
        launched
    }};
}
pub(crate) use launch;

impl Kernel {
    /// Puts a launch of `blocks` blocks onto a stream.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameters, and what those point to lives until the kernel has run.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { result::launch_kernel(self.0, (blocks, 1, 1), (threads, 1, 1), 0, stream.0, arguments) }
            .map_err(driver_error("launching a kernel"))
    }
}
