//! Values by handle. The ops of frameworks hold handles. A graph may be saved and run in another process, so handles are random: a
//! graph finds its own values, or none.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use sok_core::error::{Error, Result};

/// Values of one kind.
pub struct Handles<T>(RwLock<Option<HashMap<i64, Arc<T>>>>);

/// While it exists, no other thread reads or changes the values.
pub type Locked<T> = RwLockWriteGuard<'static, Option<HashMap<i64, Arc<T>>>>;

impl<T> Handles<T> {
    pub const fn new() -> Handles<T> {
        Handles(RwLock::new(None))
    }

    /// # Errors
    /// [`Error::State`] if the operating system has no random numbers.
    pub fn add(&self, value: T) -> Result<i64> {
        let mut handles = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let handles = handles.get_or_insert_default();
        let mut handle = draw()?;
        while handles.contains_key(&handle) {
            handle = draw()?;
        }
        handles.insert(handle, Arc::new(value));
        Ok(handle)
    }

    pub fn get(&self, handle: i64) -> Option<Arc<T>> {
        let handles = self.0.read().unwrap_or_else(PoisonError::into_inner);
        handles.as_ref().and_then(|h| h.get(&handle)).cloned()
    }

    pub fn remove(&self, handle: i64) {
        let mut locked = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let removed = locked.as_mut().and_then(|h| h.remove(&handle));
        // Dropping tables takes time, so it is done without the lock.
        drop(locked);
        drop(removed);
    }

    pub fn lock(&'static self) -> Locked<T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A random number of 63 bits from the operating system, never 0.
fn draw() -> Result<i64> {
    let mut bytes = [0; size_of::<i64>()];
    // SAFETY: the call writes at most as many bytes as there are.
    let written = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if written != bytes.len() as isize {
        let error = std::io::Error::last_os_error();
        return Err(Error::State(format!("the operating system has no random numbers: {error}")));
    }
    Ok((i64::from_ne_bytes(bytes) & i64::MAX).max(1))
}
