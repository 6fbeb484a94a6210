//! `sok_keras._native`: converts, releases the GIL, maps errors; no rule of its own.

mod bridge;
mod call;
mod checkpoint;
mod error;
mod fork;
mod fresh;
mod handles;
mod memory;
mod mpi;
mod numpy_out;
mod ranks;
mod records_copy;
mod registry;
mod scope;
mod shared_group;
mod string_keys;
mod table;

use std::io::Write;

use env_logger::Env;
use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    fork::watch();
    log_to_stderr();
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    memory::register(module)?;
    table::register(module)?;
    checkpoint::register(module)?;
    fresh::register(module)?;
    scope::register(module)?;
    ranks::register(module)?;
    string_keys::register(module)?;
    bridge::register(module)
}

/// Sends messages of the crates to stderr: warnings, or what `SOK_LOG` says (`info`, `off`). Python's `logging` would need the GIL,
/// which another thread may hold while it waits for this one.
fn log_to_stderr() {
    let mut logger = env_logger::Builder::from_env(Env::new().filter_or("SOK_LOG", "warn"));
    logger.format(|stderr, record| writeln!(stderr, "sok_keras: {}", record.args()));
    // Fails if the module is initialized a second time, in a subinterpreter.
    let _ = logger.try_init();
}
