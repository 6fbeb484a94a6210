//! The four calls of [`crate::call`] in the calling convention of each framework. A bridge reads tensors in place and turns errors and
//! panics into errors of the framework.

mod arrays;
mod dlpack;
mod staging;
mod tensorflow;
pub mod torch;
mod xla;

use std::ffi::CString;

use pyo3::prelude::*;
use sok_core::error::{Error, Result};

use crate::error::caught;

/// Adds the functions that the Python backends use to find the bridges.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    torch::register(module)?;
    module.add_function(wrap_pyfunction!(arrays::prefetch, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::register_tensorflow, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_has_stream, module)?)?;
    module.add_function(wrap_pyfunction!(xla::xla_targets, module)?)
}

/// Name of the Python class of an error. TensorFlow and JAX do not know our classes, so their messages begin with this name.
pub fn class_name(error: &Error) -> &'static str {
    match error {
        Error::Argument(_) | Error::OutOfVocabulary { .. } => "ValueError",
        Error::UnwrappedOptimizer { .. } => "UnwrappedOptimizerError",
        Error::Ticket { .. } => "TicketError",
        Error::TableFull { .. } => "TableFullError",
        Error::Memory { .. } => "MemoryError",
        Error::Rank { .. } => "RankError",
        _ => "SokError",
    }
}

/// Values of `absl::StatusCode`.
const INVALID_ARGUMENT: i32 = 3;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const INTERNAL: i32 = 13;

/// The error of a call as a status of TensorFlow and XLA, which share the numbers of `absl::StatusCode`.
struct Failure {
    code: i32,
    message: CString,
}

impl Failure {
    fn new(code: i32, class: &str, text: &str) -> Failure {
        let message =
            CString::new(format!("{class}: {text}").replace('\0', " ")).expect("has no zero byte: replaced");
        Failure { code, message }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let code = match error {
            Error::Argument(_) | Error::OutOfVocabulary { .. } => INVALID_ARGUMENT,
            Error::Memory { .. } => RESOURCE_EXHAUSTED,
            // TensorFlow appends a hint on memory to RESOURCE_EXHAUSTED, which a full table does not need.
            Error::TableFull { .. }
            | Error::UnwrappedOptimizer { .. }
            | Error::Ticket { .. }
            | Error::State(_) => FAILED_PRECONDITION,
            _ => INTERNAL,
        };
        Failure::new(code, class_name(&error), &error.to_string())
    }
}

/// Runs the body of a framework's callback.
fn catch<T>(body: impl FnOnce() -> Result<T>) -> std::result::Result<T, Failure> {
    caught(body).map_err(Failure::from)
}
