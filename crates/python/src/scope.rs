//! Steps that fail as a whole, under JAX on the CPU.
//!
//! A step owns the model's weights while it runs (donation), and XLA loses them if a call in it fails. So the calls of a scope never fail.
//! The scope remembers the first error. From then on its calls change nothing, also in steps that were started meanwhile, until Python
//! has taken the error. Updates of rows wait until the end of their step, so nothing fails after something has changed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use sok_core::error::{Error, Result};

use crate::call::{self, Scalars};
use crate::error::{guarded, to_python};
use crate::handles::Handles;
use crate::registry;
use crate::shared_group::SharedGroup;

pub static SCOPES: Handles<Scope> = Handles::new();

/// # Errors
/// [`Error::State`] if no model of this process has this scope.
pub fn scope(handle: i64) -> Result<Arc<Scope>> {
    SCOPES.get(handle).ok_or_else(|| {
        Error::State(format!("this step's model is not in this process, or gone (scope {handle:#x})"))
    })
}

/// The steps of one model.
#[derive(Default)]
pub struct Scope {
    has_failed: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    error: Option<Error>,
    /// Optimizers and scalars of updates that wait for the end of the step.
    waiting: Vec<(i64, Scalars)>,
}

impl Scope {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Remembers the first error, and drops the updates that wait.
    pub fn fail(&self, error: Error) {
        let mut inner = self.lock();
        inner.error.get_or_insert(error);
        self.has_failed.store(true, Ordering::Release);
        for (optimizer, _) in inner.waiting.drain(..) {
            // The commits of an optimizer that no longer exists will never be applied.
            call::drop_committed(optimizer).unwrap_or_default();
        }
    }

    /// Adds an update for the end of the step.
    pub fn add_update(&self, optimizer: i64, scalars: Scalars) {
        self.lock().waiting.push((optimizer, scalars));
    }

    /// Makes the updates that wait, if no call has failed.
    pub fn finish(&self) -> Result<()> {
        let waiting = std::mem::take(&mut self.lock().waiting);
        waiting.iter().try_for_each(|(optimizer, scalars)| call::apply_now(*optimizer, scalars))
    }

    /// Makes them before a lookup, if one is of this group: a step may update its tables more than once.
    pub fn finish_before_lookup(&self, group: &Arc<SharedGroup>) -> Result<()> {
        let updates = |handle| {
            registry::optimizer(handle)
                .is_ok_and(|optimizer| optimizer.groups.iter().any(|g| Arc::ptr_eq(g, group)))
        };
        let is_waiting = self.lock().waiting.iter().any(|&(handle, _)| updates(handle));
        if is_waiting { self.finish() } else { Ok(()) }
    }

    fn take_error(&self) -> Option<Error> {
        let mut inner = self.lock();
        self.has_failed.store(false, Ordering::Release);
        inner.error.take()
    }
}

/// A scope, as a Python object.
#[pyclass(frozen, name = "Scope", module = "sok_keras._native")]
struct PyScope {
    #[pyo3(get)]
    handle: i64,
    scope: Arc<Scope>,
}

#[pymethods]
impl PyScope {
    #[new]
    fn new() -> PyResult<PyScope> {
        guarded(|| {
            let handle = SCOPES.add(Scope::default()).map_err(to_python)?;
            Ok(PyScope { handle, scope: scope(handle).map_err(to_python)? })
        })
    }

    /// Whether a call has failed since errors were last raised.
    #[getter]
    fn has_failed(&self) -> bool {
        self.scope.has_failed()
    }

    /// Raises the first error, by its class, and resets the scope. No step may be running.
    fn raise_error(&self) -> PyResult<()> {
        self.scope.take_error().map_or(Ok(()), |error| Err(to_python(error)))
    }
}

impl Drop for PyScope {
    fn drop(&mut self) {
        SCOPES.remove(self.handle);
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyScope>()
}
