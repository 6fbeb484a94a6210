//! NVRTC, the compiler of kernels. The library is loaded at run time. `SOK_NVRTC` is the path of the one that the user chooses.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

use libloading::os::unix::Library;
use sok_core::error::{Error, Result};

use crate::loader;

const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

type Program = *mut std::ffi::c_void;

/// The functions of a loaded NVRTC library.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    add_name: unsafe extern "C" fn(Program, *const c_char) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    lowered_name: unsafe extern "C" fn(Program, *const c_char, *mut *const c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Major and minor version of the library.
    pub version: (i32, i32),
    _library: Library,
}

/// A kernel source and the files that it includes.
pub struct Source {
    /// File name, for messages of the compiler and as the key of compiled kernels.
    pub name: &'static str,
    /// The program.
    pub text: &'static str,
    /// Returns name and text of each header that the source may include.
    pub headers: fn() -> &'static [(&'static str, String)],
}

/// Machine code for one compute capability.
#[derive(Debug)]
pub struct Cubin {
    /// An ELF file.
    pub code: Vec<u8>,
    /// By requested kernel name: the symbol in the code.
    pub symbols: Vec<String>,
}

impl Nvrtc {
    /// Finds and loads the library. `known`: paths of the library that the caller knows.
    ///
    /// # Errors
    /// [`Error::Device`] with the paths that were tried if none can be loaded, or if the library lacks a function.
    pub fn load(known: &[PathBuf]) -> Result<Nvrtc> {
        // SAFETY: NVRTC's initializers only set up its own state.
        let tried = match unsafe { loader::open(&NAMES, "SOK_NVRTC", known) } {
            Ok(library) => return Nvrtc::bind(library),
            Err(tried) => tried,
        };
        Err(Error::Device(format!(
            "NVRTC, which compiles the GPU's kernels, was not found. Tried {tried}. Install the extra `cuda12` or `cuda13`, or set \
             SOK_NVRTC to the path of libnvrtc.so"
        )))
    }

    fn bind(library: Library) -> Result<Nvrtc> {
        fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T> {
            // SAFETY: The caller gives the type that the function has in nvrtc.h.
            unsafe { loader::symbol(library, "NVRTC", name) }
        }
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
            symbol(&library, "nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: Both pointers are to integers that may be written.
        unsafe { version(&mut major, &mut minor) };
        Ok(Nvrtc {
            create: symbol(&library, "nvrtcCreateProgram")?,
            destroy: symbol(&library, "nvrtcDestroyProgram")?,
            add_name: symbol(&library, "nvrtcAddNameExpression")?,
            compile: symbol(&library, "nvrtcCompileProgram")?,
            log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
            log: symbol(&library, "nvrtcGetProgramLog")?,
            lowered_name: symbol(&library, "nvrtcGetLoweredName")?,
            cubin_size: symbol(&library, "nvrtcGetCUBINSize")?,
            cubin: symbol(&library, "nvrtcGetCUBIN")?,
            error_string: symbol(&library, "nvrtcGetErrorString")?,
            version: (major, minor),
            _library: library,
        })
    }

    /// Compiles the kernels with these `names` for compute capability `arch` (90 for 9.0). The name of a template contains its
    /// arguments. Products and sums are not contracted, so that rows are bit-identical to the host's.
    ///
    /// # Errors
    /// [`Error::Device`] with the compiler's log.
    pub fn compile(&self, source: &Source, arch: u32, names: &[String]) -> Result<Cubin> {
        let c_string = |text: &str| CString::new(text).expect("sources and names have no zero byte");
        let (text, name) = (c_string(source.text), c_string(source.name));
        let headers: Vec<_> = (source.headers)().iter().map(|(n, t)| (c_string(n), c_string(t))).collect();
        let header_names: Vec<_> = headers.iter().map(|(n, _)| n.as_ptr()).collect();
        let header_texts: Vec<_> = headers.iter().map(|(_, t)| t.as_ptr()).collect();
        let options = [
            format!("--gpu-architecture=sm_{arch}"),
            "--std=c++17".into(),
            "--fmad=false".into(),
            "--extra-device-vectorization".into(),
            "--device-as-default-execution-space".into(),
        ];
        let options: Vec<_> = options.iter().map(|o| c_string(o)).collect();
        let option_pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let names: Vec<_> = names.iter().map(|n| c_string(n)).collect();

        let mut program = null_mut();
        let count = headers.len() as c_int;
        // SAFETY: All texts end in zero and live until the program is destroyed. Both arrays have `count` elements.
        let created = unsafe {
            (self.create)(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                count,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        self.check(created, source, "")?;
        let result = (|| {
            for name in &names {
                // SAFETY: The program is alive, and the text ends in zero.
                self.check(unsafe { (self.add_name)(program, name.as_ptr()) }, source, "")?;
            }
            // SAFETY: As above.
            let compiled =
                unsafe { (self.compile)(program, options.len() as c_int, option_pointers.as_ptr()) };
            self.check(compiled, source, &self.read_log(program))?;
            let symbols = names.iter().map(|name| {
                let mut symbol = null();
                // SAFETY: The name was added to the program before.
                let found = unsafe { (self.lowered_name)(program, name.as_ptr(), &mut symbol) };
                self.check(found, source, "")?;
                // SAFETY: The text ends in zero and lives as long as the program.
                Ok(unsafe { CStr::from_ptr(symbol) }.to_string_lossy().into_owned())
            });
            let symbols = symbols.collect::<Result<Vec<_>>>()?;
            let mut size = 0;
            // SAFETY: The program is compiled, and the size may be written.
            self.check(unsafe { (self.cubin_size)(program, &mut size) }, source, "")?;
            let mut code = vec![0u8; size];
            // SAFETY: The buffer has the size that NVRTC returned.
            self.check(unsafe { (self.cubin)(program, code.as_mut_ptr().cast()) }, source, "")?;
            Ok(Cubin { code, symbols })
        })();
        // SAFETY: The program was created above and is not used again.
        unsafe { (self.destroy)(&mut program) };
        result
    }

    fn read_log(&self, program: Program) -> String {
        let mut size = 0;
        // SAFETY: The program is alive, and the size may be written.
        if unsafe { (self.log_size)(program, &mut size) } != 0 || size == 0 {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: The buffer has the size that NVRTC returned.
        unsafe { (self.log)(program, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log[..size - 1]).into_owned()
    }

    fn check(&self, code: c_int, source: &Source, log: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: The function accepts any number.
        let what = unsafe { (self.error_string)(code) };
        // SAFETY: The function returns a static text that ends in zero.
        let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
        Err(Error::Device(format!(
            "NVRTC {}.{} on {}: {what}\n{log}",
            self.version.0, self.version.1, source.name
        )))
    }
}
