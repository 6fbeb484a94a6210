//! Finds libraries of NVIDIA at run time, and their functions.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use sok_core::error::{Error, Result};

/// `RTLD_NOLOAD` of Linux: opens a library only if it is already loaded.
const ONLY_IF_LOADED: c_int = 4;

/// Opens a library. The candidates, in this order: a copy that is already loaded; the path in the environment variable `variable`; the
/// paths in `known`; the library of the system. `names`: file names of the library.
///
/// # Errors
/// The paths that were tried, separated by commas.
///
/// # Safety
/// The initializers of the library only set up its own state.
pub unsafe fn open(
    names: &[&str],
    variable: &str,
    known: &[PathBuf],
) -> std::result::Result<Library, String> {
    let names = || names.iter().map(PathBuf::from);
    let chosen = std::env::var_os(variable).map(PathBuf::from);
    let loaded = names().map(|name| (name, RTLD_LAZY | RTLD_LOCAL | ONLY_IF_LOADED));
    let named = chosen.into_iter().chain(known.iter().cloned()).chain(names());
    let mut tried = Vec::new();
    for (path, flags) in loaded.chain(named.map(|path| (path, RTLD_LAZY | RTLD_LOCAL))) {
        // SAFETY: The caller guarantees it.
        match unsafe { Library::open(Some(&path), flags) } {
            Ok(library) => return Ok(library),
            Err(_) => tried.push(path.display().to_string()),
        }
    }
    tried.dedup();
    Err(tried.join(", "))
}

/// Returns a function of a library. `of`: name of the library, for the error.
///
/// # Errors
/// [`Error::Device`] if the library does not have the function.
///
/// # Safety
/// `T` is the type that the function has in the header of the library.
pub unsafe fn symbol<T: Copy>(library: &Library, of: &str, name: &str) -> Result<T> {
    // SAFETY: The caller guarantees it.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|error| Error::Device(format!("{of} has no {name}: {error}")))
}
