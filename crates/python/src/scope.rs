//! Steps that fail as a whole, under JAX on the CPU.
//!
//! XLA has taken the model's weights when it runs a step that was given them (donation), and gives nothing back if a call in
//! it fails. So a call of a step that belongs to a scope never fails: the scope remembers the first error, and from then on
//! its calls change nothing, in the steps too that were started meanwhile, until Python has taken the error. Updates of rows
//! wait until the end of their step, when all its calls have run: nothing fails after something has changed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use sok_core::error::{Error, Result};
use sok_core::host_group::ApplyScalars;

use crate::call;
use crate::error::{guarded, to_python};
use crate::registry::{self, Group};

/// The steps of one model.
#[derive(Default)]
pub struct Scope {
    has_failed: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    error: Option<Error>,
    /// Updates that wait for the end of the step: optimizer and scalars.
    waiting: Vec<(i64, ApplyScalars)>,
}

impl Scope {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Remembers the first error; the updates that wait will not be made.
    pub fn fail(&self, error: Error) {
        let mut inner = self.lock();
        inner.error.get_or_insert(error);
        self.has_failed.store(true, Ordering::Release);
        for (optimizer, _) in inner.waiting.drain(..) {
            // An optimizer that is gone has committed nothing that would ever be applied.
            call::drop_committed(optimizer).unwrap_or_default();
        }
    }

    /// An update for the end of the step.
    pub fn add_update(&self, optimizer: i64, scalars: ApplyScalars) {
        self.lock().waiting.push((optimizer, scalars));
    }

    /// Makes the updates that wait, if no call has failed.
    pub fn finish(&self) -> Result<()> {
        let waiting = std::mem::take(&mut self.lock().waiting);
        waiting.iter().try_for_each(|(optimizer, scalars)| call::apply_now(*optimizer, scalars))
    }

    /// The same before a lookup, if this group is to be updated: a step may update its tables more than once.
    pub fn finish_before_lookup(&self, group: &Arc<Group>) -> Result<()> {
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

/// A scope as Python holds it.
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
            let handle = registry::add_scope(Scope::default()).map_err(to_python)?;
            Ok(PyScope { handle, scope: registry::scope(handle).map_err(to_python)? })
        })
    }

    /// Whether a call has failed since errors were last raised.
    #[getter]
    fn has_failed(&self) -> bool {
        self.scope.has_failed()
    }

    /// Raises the first error, by its class; steps work from then on. None of them may be under way.
    fn raise_error(&self) -> PyResult<()> {
        self.scope.take_error().map_or(Ok(()), |error| Err(to_python(error)))
    }
}

impl Drop for PyScope {
    fn drop(&mut self) {
        registry::remove_scope(self.handle);
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyScope>()
}
