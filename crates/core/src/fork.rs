//! What a forked child has instead of threads: nothing. A pool's threads stay in the parent, and a lock that one of the parent's threads
//! held stays locked for ever, so a child makes both anew.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::{PoisonError, RwLock};

/// A value that each process makes for itself. A forked child finds none.
pub(crate) struct PerProcess<T> {
    value: UnsafeCell<RwLock<Option<T>>>,
}

// SAFETY: threads reach the lock alone, but for `forget`, whose caller promises that there are no others.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

impl<T: Clone> PerProcess<T> {
    pub const fn new() -> PerProcess<T> {
        PerProcess { value: UnsafeCell::new(RwLock::new(None)) }
    }

    fn lock(&self) -> &RwLock<Option<T>> {
        // SAFETY: it is written to by `forget` alone.
        unsafe { &*self.value.get() }
    }

    pub fn get(&self) -> Option<T> {
        self.lock().read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set(&self, value: T) {
        *self.lock().write().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    /// The value stays in memory: to drop it might wait for threads, which are not there.
    ///
    /// # Safety
    /// The caller is the only thread of the process, and in no method of `self`.
    pub unsafe fn forget(&self) {
        // SAFETY: nobody else has it: the caller's promise.
        unsafe { self.value.get().write(RwLock::new(None)) };
    }
}

unsafe extern "C" {
    /// POSIX; 0 if it did.
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> libc::c_int;
}

/// From now on a `fork` calls these, in the thread that forks: before it, and after it in the parent and in the child.
pub fn at_fork(
    prepare: Option<extern "C" fn()>,
    parent: Option<extern "C" fn()>,
    child: Option<extern "C" fn()>,
) {
    // SAFETY: functions, which live as long as the process. It fails only without memory for three addresses.
    unsafe { pthread_atfork(prepare, parent, child) };
}
