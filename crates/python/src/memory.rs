//! Settings of glibc's allocator, for memory that a framework frees.

use pyo3::prelude::*;

use crate::error::guarded;

/// Keeps freed memory for the next step, if the C library is glibc and the user has not set it up.
///
/// XLA and TensorFlow allocate the arrays of a step on the CPU with `malloc` and free them after it. glibc maps large arrays anew each
/// time and returns the end of its heap to the system. The page faults of a step then cost more than all work on tables: a step of
/// 26 x 16,384 ids of dim 64 under JAX takes 82 ms, and 26 ms without them.
///
/// Returns whether it has changed settings. `SOK_KEEP_FREED_MEMORY=0`, glibc's tunables and its `MALLOC_...` variables prevent it.
#[pyfunction]
fn keep_freed_memory() -> PyResult<bool> {
    guarded(|| Ok(keep()))
}

fn keep() -> bool {
    let is_said = |name: &str| std::env::var_os(name).is_some();
    let by_tunables = std::env::var("GLIBC_TUNABLES").is_ok_and(|t| t.contains("glibc.malloc"));
    let by_variables =
        ["MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"];
    let is_off = std::env::var("SOK_KEEP_FREED_MEMORY").is_ok_and(|v| v == "0");
    if is_off || by_tunables || by_variables.into_iter().any(is_said) {
        return false;
    }
    set()
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn set() -> bool {
    // Large arrays come from the heap, which grows by 64 MiB and shrinks when 2 GiB of it are unused.
    let options = [(libc::M_MMAP_MAX, 0), (libc::M_TOP_PAD, 64 << 20), (libc::M_TRIM_THRESHOLD, i32::MAX)];
    // SAFETY: sets parameters of glibc's allocator, which takes its own lock.
    options.into_iter().all(|(option, value)| unsafe { libc::mallopt(option, value) } == 1)
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn set() -> bool {
    false
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(keep_freed_memory, module)?)
}
