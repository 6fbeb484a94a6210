//! A GPU, and the functions compiled for it.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUdevice_attribute, CUfunction, CUstream};
use cudarc::driver::{CudaContext, DriverError, result, sys};
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
    nvrtc: Nvrtc,
    kernels: Mutex<HashMap<(&'static str, String), Kernel>>,
}

/// A function on the device.
#[derive(Clone, Copy)]
pub struct Kernel(CUfunction);

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
        Ok(Device {
            context,
            arch: (10 * major + minor) as u32,
            multiprocessors: multiprocessors as u32,
            nvrtc: Nvrtc::load(known)?,
            kernels: Mutex::default(),
        })
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

impl Kernel {
    /// Puts a launch of `blocks` blocks onto a stream.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameters, and what those point to lives until the kernel has run.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { result::launch_kernel(self.0, (blocks, 1, 1), (threads, 1, 1), 0, stream, arguments) }
            .map_err(driver_error("launching a kernel"))
    }
}
