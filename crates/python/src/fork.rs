//! Forks while other threads use tables. A forked child has only the thread that forked, and a copy of all memory: a table in the
//! middle of an update stays so, and its lock stays locked.
//!
//! Therefore a fork waits for the calls in progress, for a second at most, and takes all locks. It releases them in parent and child.
//! In the child, tables that were busy for longer raise an error, and so do tables on a GPU, which a child cannot use.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use sok_core::error::{Error, Result};
use sok_core::fork::at_fork;

use crate::registry::{self, Group, RegistryLock};
use crate::tables::Tables;

/// How long a fork waits for calls that are under way.
const PATIENCE: Duration = Duration::from_secs(1);

/// All groups, in the order in which they were made.
static GROUPS: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());
/// A process above this one has tables on a GPU.
static PARENT_HAS_GPU: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// From before a fork of this thread until after it.
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Every lock that a call may wait for.
struct Held {
    groups: Vec<HeldGroup>,
    _list: MutexGuard<'static, Vec<Weak<Group>>>,
    _registry: RegistryLock,
}

/// Guards borrow from the group that stands after them, and are dropped before it.
struct HeldGroup {
    /// None: busy.
    guards: Option<(MutexGuard<'static, Tables>, MutexGuard<'static, Option<Error>>)>,
    group: Arc<Group>,
}

/// To be called once, when the module is loaded.
pub fn watch() {
    at_fork(Some(prepare), Some(release), Some(release_in_child));
}

/// Notes a group, so that forks wait for it.
pub fn add(group: &Arc<Group>) {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(group));
}

/// # Errors
/// [`Error::Device`] in a forked child of a process with tables on a GPU.
pub fn check_gpu() -> Result<()> {
    if PARENT_HAS_GPU.load(Relaxed) { Err(gpu_error()) } else { Ok(()) }
}

pub fn gpu_error() -> Error {
    Error::Device(
        "a forked process cannot use the GPU that its parent uses. Start it by `multiprocessing.get_context(\"spawn\")`, or \
         make the tables in the child alone"
            .into(),
    )
}

pub fn busy_error() -> Error {
    Error::State(
        "the process was forked while another thread was at work on these tables, so they are not whole here. Fork while no call is \
         under way, or start the process by `multiprocessing.get_context(\"spawn\")`"
            .into(),
    )
}

extern "C" fn prepare() {
    // A panic could not be reported. The child then finds no locks held, as it would without this function.
    let _ = std::panic::catch_unwind(|| {
        let list = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + PATIENCE;
        let groups = list.iter().filter_map(Weak::upgrade).map(|group| hold(group, deadline)).collect();
        let held = Held { groups, _list: list, _registry: registry::lock() };
        HELD.set(Some(held));
    });
}

fn hold(group: Arc<Group>, deadline: Instant) -> HeldGroup {
    let guards = loop {
        if let Some(guards) = group.try_hold() {
            break Some(guards);
        }
        if Instant::now() > deadline {
            break None;
        }
        std::thread::sleep(Duration::from_micros(100));
    };
    // SAFETY: the guards borrow from the group's own memory, which stays where it is as long as the `Arc` beside them.
    let guards = guards.map(|(tables, error)| unsafe {
        (
            std::mem::transmute::<MutexGuard<'_, Tables>, MutexGuard<'static, Tables>>(tables),
            std::mem::transmute::<MutexGuard<'_, Option<Error>>, MutexGuard<'static, Option<Error>>>(error),
        )
    });
    HeldGroup { guards, group }
}

extern "C" fn release() {
    HELD.take();
}

extern "C" fn release_in_child() {
    let Some(held) = HELD.take() else { return };
    for HeldGroup { guards, group } in &held.groups {
        if guards.is_none() || group.is_on_gpu {
            group.lose();
        }
        PARENT_HAS_GPU.fetch_or(group.is_on_gpu, Relaxed);
    }
}

/// The guards of a mutex that may be free.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
