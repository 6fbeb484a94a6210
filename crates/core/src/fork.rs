//! Values that a forked child makes for itself. The threads of a pool stay in the parent, and a lock that one of the parent's
//! threads held stays locked for ever in the child. So the child makes a new pool and new locks.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::{PoisonError, RwLock};

/// A value that each process makes for itself. In a forked child it is empty.
pub(crate) struct PerProcess<T> {
    value: UnsafeCell<RwLock<Option<T>>>,
}

// SAFETY: threads use the value through the lock. Only `forget` does not, and its caller promises that there are no other threads.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

impl<T: Clone> PerProcess<T> {
    /// Makes an empty one.
    pub const fn new() -> PerProcess<T> {
        PerProcess { value: UnsafeCell::new(RwLock::new(None)) }
    }

    fn lock(&self) -> &RwLock<Option<T>> {
        // SAFETY: only `forget` writes to it, and its caller promises that no other method runs.
        unsafe { &*self.value.get() }
    }

    /// Returns the value, or `None` if this process has not set one.
    pub fn get(&self) -> Option<T> {
        self.lock().read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the value of this process.
    pub fn set(&self, value: T) {
        *self.lock().write().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    /// Empties it. The value stays in memory, because its drop might wait for threads that do not exist in this process.
    ///
    /// # Safety
    /// The caller is the only thread of the process, and in no method of `self`.
    pub unsafe fn forget(&self) {
        // SAFETY: nobody else uses it: the caller's promise.
        unsafe { self.value.get().write(RwLock::new(None)) };
    }
}

unsafe extern "C" {
    /// A function of POSIX. It returns 0 if it has registered the functions.
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> libc::c_int;
}

/// Registers functions for all later calls of `fork`. The thread that forks calls `prepare` before the fork. After it, `parent` is
/// called in the parent and `child` in the child.
pub fn at_fork(
    prepare: Option<extern "C" fn()>,
    parent: Option<extern "C" fn()>,
    child: Option<extern "C" fn()>,
) {
    // SAFETY: functions live as long as the process. The call fails only if there is no memory for three addresses.
    unsafe { pthread_atfork(prepare, parent, child) };
}
