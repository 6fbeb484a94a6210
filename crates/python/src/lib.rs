//! `sok_keras._native`: converts, releases the GIL, maps errors; no rule of its own.

mod bridge;
mod call;
mod checkpoint;
mod error;
mod fork;
mod fresh;
mod handles;
mod memory;
mod numpy_out;
mod records_copy;
mod registry;
mod scope;
mod shared_group;
mod string_keys;
mod table;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    fork::watch();
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    memory::register(module)?;
    table::register(module)?;
    checkpoint::register(module)?;
    fresh::register(module)?;
    scope::register(module)?;
    string_keys::register(module)?;
    bridge::register(module)
}
