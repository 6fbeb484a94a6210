//! The tables of a layer, as the calls of all threads share them.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use sok_core::contract::group::AnyGroup;
use sok_core::contract::tensor::Memory;
use sok_core::error::{Error, Result};

/// All groups, in the order in which they were made.
pub static GROUPS: Mutex<Vec<Weak<SharedGroup>>> = Mutex::new(Vec::new());

/// The tables of a layer while a call uses them.
pub type GroupGuard<'a> = MutexGuard<'a, Box<AnyGroup>>;
/// All locks of a `SharedGroup`.
pub type SharedGuards<'a> = (GroupGuard<'a>, MutexGuard<'a, Option<Error>>);

/// The tables of a layer, as the calls of all threads share them.
pub struct SharedGroup {
    tables: ManuallyDrop<Mutex<Box<AnyGroup>>>,
    pub memory: Memory,
    /// Whether this process is a forked child that cannot use them.
    is_lost: AtomicBool,
    /// An error that was not raised yet.
    latched: Mutex<Option<Error>>,
}

impl SharedGroup {
    pub fn new(tables: Box<AnyGroup>) -> Arc<SharedGroup> {
        let memory = tables.memory();
        let tables = ManuallyDrop::new(Mutex::new(tables));
        let (is_lost, latched) = (AtomicBool::new(false), Mutex::new(None));
        let group = Arc::new(SharedGroup { tables, memory, is_lost, latched });
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&group));
        drop(groups);
        group
    }

    /// # Errors
    /// In a forked child that cannot use them: [`Error::Device`] for tables on a GPU, [`Error::State`] for tables that another thread
    /// used when the process was forked.
    pub fn lock(&self) -> Result<GroupGuard<'_>> {
        if self.is_lost.load(Relaxed) {
            return Err(match self.memory {
                Memory::Device => gpu_error(),
                Memory::Host => busy_error(),
            });
        }
        // A panic inside a call is reported to its caller; the tables stay readable.
        Ok(self.tables.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// As `lock`, for a call that reads tables, which know all steps so far then.
    pub fn settled(&self) -> Result<GroupGuard<'_>> {
        let mut tables = self.lock()?;
        tables.settle_tables();
        Ok(tables)
    }

    pub fn lose(&self) {
        self.is_lost.store(true, Relaxed);
    }

    /// Takes all its locks, if they are free.
    pub fn try_hold(&self) -> Option<SharedGuards<'_>> {
        try_lock(&self.tables).zip(try_lock(&self.latched))
    }

    pub fn latch(&self, error: &Error) {
        if !self.is_lost.load(Relaxed) {
            self.latched.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert_with(|| error.clone());
        }
    }

    /// Takes the error, also one that a device has found after the call had returned.
    pub fn take_latched(&self) -> Result<Option<Error>> {
        let mut tables = self.lock()?;
        let latched = self.latched.lock().unwrap_or_else(|e| e.into_inner()).take();
        Ok(latched.or_else(|| tables.take_failure()))
    }
}

impl Drop for SharedGroup {
    fn drop(&mut self) {
        // A child must not free tables that it cannot use: their device is the parent's, or their memory is inconsistent.
        if !self.is_lost.load(Relaxed) {
            // SAFETY: it is dropped only here, once.
            unsafe { ManuallyDrop::drop(&mut self.tables) };
        }
    }
}

pub fn gpu_error() -> Error {
    Error::Device(
        "a forked process cannot use the GPU that its parent uses. Start it by `multiprocessing.get_context(\"spawn\")`, or \
         make the tables in the child alone"
            .into(),
    )
}

fn busy_error() -> Error {
    Error::State(
        "the process was forked while another thread was at work on these tables, so they are not whole here. Fork while no call is \
         under way, or start the process by `multiprocessing.get_context(\"spawn\")`"
            .into(),
    )
}

/// The guards of a mutex that may be free.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
