//! The exceptions, and the mapping from Rust's errors to them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::create_exception;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use sok_core::Error;

create_exception!(sok_keras, SokError, PyRuntimeError, "An operation on embedding tables failed.");
create_exception!(
    sok_keras,
    TableFullError,
    SokError,
    "A batch brought more new keys than `max_capacity` leaves room for. `.refused` and `.capacity` say how many."
);
create_exception!(
    sok_keras,
    UnwrappedOptimizerError,
    SokError,
    "Tables were trained without an `OptimizerWrapper` around the optimizer."
);
create_exception!(
    sok_keras,
    TicketError,
    SokError,
    "A gradient was applied that cannot be attributed to a backward pass."
);
create_exception!(
    sok_keras,
    DeviceError,
    SokError,
    "A device is missing, or there are more than this process may use."
);
create_exception!(
    sok_keras,
    RankError,
    SokError,
    "Another rank has failed in a call that all ranks make, or cannot be reached."
);
create_exception!(sok_keras, DumpError, SokError, "A dump cannot be written or read.");
create_exception!(sok_keras, CorruptDumpError, DumpError, "A dump's bytes are not those that were written.");
create_exception!(
    sok_keras,
    DumpReplacedError,
    DumpError,
    "New dumps took the files of a dump away while it was read."
);
create_exception!(sok_keras, DumpMismatchError, DumpError, "A dump does not fit what it is loaded into.");
create_exception!(
    sok_keras,
    UnknownChangesError,
    DumpError,
    "A table has no record of what has changed since a dump."
);

pub fn to_python(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Argument(_) | Error::OutOfVocabulary { .. } => PyValueError::new_err(text),
        Error::TableFull { refused, capacity, .. } => Python::attach(|py| {
            let error = TableFullError::new_err(text);
            let value = error.value(py);
            match value.setattr("refused", refused).and_then(|()| value.setattr("capacity", capacity)) {
                Ok(()) => error,
                Err(other) => other,
            }
        }),
        Error::UnwrappedOptimizer { .. } => UnwrappedOptimizerError::new_err(text),
        Error::Ticket { .. } => TicketError::new_err(text),
        Error::CorruptDump { .. } => CorruptDumpError::new_err(text),
        Error::DumpMismatch { .. } => DumpMismatchError::new_err(text),
        Error::DumpReplaced { .. } => DumpReplacedError::new_err(text),
        Error::UnknownChanges { .. } => UnknownChangesError::new_err(text),
        Error::Io { source, .. } => match source.raw_os_error() {
            Some(code) => PyOSError::new_err((code, text)),
            None => PyOSError::new_err(text),
        },
        Error::Device(_) => DeviceError::new_err(text),
        Error::Rank { .. } => RankError::new_err(text),
        Error::Memory { .. } => PyMemoryError::new_err(text),
        _ => SokError::new_err(text),
    }
}

/// Runs the body of a function that Python or a framework calls, and turns a panic into [`Error::Bug`]. Otherwise PyO3 would raise an
/// exception that `except Exception` does not catch, and a panic in a C callback would abort the process.
pub fn caught<T>(work: impl FnOnce() -> sok_core::Result<T>) -> sok_core::Result<T> {
    // A panic leaves only the core inconsistent, behind poisoned locks. Nothing else outlives the call.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(bug(payload.as_ref())))
}

/// As [`caught`], for functions that Python calls.
pub fn guarded<T>(work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|payload| Err(to_python(bug(payload.as_ref()))))
}

fn bug(payload: &(dyn Any + Send)) -> Error {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    Error::Bug(text.unwrap_or("a panic without a message").into())
}

/// Runs Rust without the GIL and maps its error.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> sok_core::Result<T> + Send) -> PyResult<T> {
    py.detach(|| caught(work)).map_err(to_python)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("SokError", py.get_type::<SokError>())?;
    module.add("TableFullError", py.get_type::<TableFullError>())?;
    module.add("UnwrappedOptimizerError", py.get_type::<UnwrappedOptimizerError>())?;
    module.add("TicketError", py.get_type::<TicketError>())?;
    module.add("DeviceError", py.get_type::<DeviceError>())?;
    module.add("RankError", py.get_type::<RankError>())?;
    module.add("DumpError", py.get_type::<DumpError>())?;
    module.add("CorruptDumpError", py.get_type::<CorruptDumpError>())?;
    module.add("DumpReplacedError", py.get_type::<DumpReplacedError>())?;
    module.add("DumpMismatchError", py.get_type::<DumpMismatchError>())?;
    module.add("UnknownChangesError", py.get_type::<UnknownChangesError>())
}
