//! Forks while other threads use tables. A forked child has only the thread that forked, and a copy of all memory: a table in the
//! middle of an update stays so, and its lock stays locked.
//!
//! Therefore a fork waits for the calls in progress, for a second at most, and takes all locks. It releases them in parent and child.
//! In the child, tables that were busy for longer raise an error, and so do tables on a GPU, which a child cannot use.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use sok_core::contract::tensor::Memory;
use sok_core::error::Result;
use sok_core::fork::at_fork;

use crate::handles::Locked;
use crate::registry::{OPTIMIZERS, Optimizer, PLANS, Plan};
use crate::scope::{SCOPES, Scope};
use crate::shared_group::{GROUPS, SharedGroup, SharedGuards, gpu_error};

/// How long a fork waits for calls that are under way.
const PATIENCE: Duration = Duration::from_secs(1);

/// A process above this one has tables on a GPU.
static PARENT_HAS_GPU: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// From before a fork of this thread until after it.
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Every lock that a call may wait for.
struct Held {
    groups: Vec<HeldGroup>,
    _list: MutexGuard<'static, Vec<Weak<SharedGroup>>>,
    _registry: (Locked<Plan>, Locked<Optimizer>, Locked<Scope>),
}

/// Guards borrow from the group that stands after them, and are dropped before it.
struct HeldGroup {
    /// None: busy.
    guards: Option<SharedGuards<'static>>,
    group: Arc<SharedGroup>,
}

/// To be called once, when the module is loaded.
pub fn watch() {
    at_fork(Some(prepare), Some(release), Some(release_in_child));
}

/// # Errors
/// [`Error::Device`] in a forked child of a process with tables on a GPU.
pub fn check_gpu() -> Result<()> {
    if PARENT_HAS_GPU.load(Relaxed) { Err(gpu_error()) } else { Ok(()) }
}

extern "C" fn prepare() {
    // A panic could not be reported. The child then finds no locks held, as it would without this function.
    let _ = std::panic::catch_unwind(|| {
        let list = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + PATIENCE;
        let groups = list.iter().filter_map(Weak::upgrade).map(|group| hold(group, deadline)).collect();
        let held = Held { groups, _list: list, _registry: (PLANS.lock(), OPTIMIZERS.lock(), SCOPES.lock()) };
        HELD.set(Some(held));
    });
}

fn hold(group: Arc<SharedGroup>, deadline: Instant) -> HeldGroup {
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
    let guards = guards
        .map(|guards| unsafe { std::mem::transmute::<SharedGuards<'_>, SharedGuards<'static>>(guards) });
    HeldGroup { guards, group }
}

extern "C" fn release() {
    HELD.take();
}

extern "C" fn release_in_child() {
    let Some(held) = HELD.take() else { return };
    for HeldGroup { guards, group } in &held.groups {
        let is_on_gpu = group.memory == Memory::Device;
        if guards.is_none() || is_on_gpu {
            group.lose();
        }
        PARENT_HAS_GPU.fetch_or(is_on_gpu, Relaxed);
    }
}
