//! Plans, optimizers and scopes by their handles, which the ops of frameworks hold. A graph may be saved and run in another process, so
//! handles are random: a graph finds its own tables, or none.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use sok_core::batch::Combiner;
use sok_core::error::{Error, Result};
use sok_core::host_group::Binding;
use sok_core::optimizer::Update;

use crate::fork;
use crate::scope::Scope;
use crate::tables::Tables;

/// The tables of a layer.
pub struct Group {
    tables: ManuallyDrop<Mutex<Tables>>,
    pub is_on_gpu: bool,
    /// Whether this process is a forked child that cannot use them.
    is_lost: AtomicBool,
    /// An error that was not raised yet.
    latched: Mutex<Option<Error>>,
}

impl Group {
    pub fn new(tables: Tables) -> Arc<Group> {
        let is_on_gpu = matches!(tables, Tables::Gpu(_));
        let tables = ManuallyDrop::new(Mutex::new(tables));
        let (is_lost, latched) = (AtomicBool::new(false), Mutex::new(None));
        let group = Arc::new(Group { tables, is_on_gpu, is_lost, latched });
        fork::add(&group);
        group
    }

    /// # Errors
    /// In a forked child that cannot use them: [`Error::Device`] for tables on a GPU, [`Error::State`] for tables that another thread
    /// used when the process was forked.
    pub fn lock(&self) -> Result<MutexGuard<'_, Tables>> {
        if self.is_lost.load(Relaxed) {
            return Err(if self.is_on_gpu { fork::gpu_error() } else { fork::busy_error() });
        }
        // A panic inside a call is reported to its caller; the tables stay readable.
        Ok(self.tables.lock().unwrap_or_else(|e| e.into_inner()))
    }

    pub fn lose(&self) {
        self.is_lost.store(true, Relaxed);
    }

    /// Takes all its locks, if they are free.
    pub fn try_hold(&self) -> Option<(MutexGuard<'_, Tables>, MutexGuard<'_, Option<Error>>)> {
        fork::try_lock(&self.tables).zip(fork::try_lock(&self.latched))
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
        Ok(latched.or_else(|| match &mut *tables {
            Tables::Gpu(group) => group.take_failure(),
            Tables::Host(_) => None,
        }))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A child must not free tables that it cannot use: their device is the parent's, or their memory is inconsistent.
        if !self.is_lost.load(Relaxed) {
            // SAFETY: it is dropped only here, once.
            unsafe { ManuallyDrop::drop(&mut self.tables) };
        }
    }
}

/// Which ids of a feature are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// None.
    Each,
    /// The ids along the last axis.
    Last,
    /// The ids between two row splits.
    Ragged,
}

/// A feature of a layer's call: what is known when the model is traced.
#[derive(Clone, Debug)]
pub struct PlanFeature {
    pub name: String,
    pub table: usize,
    /// Ids come as two int32 tensors, low and high words.
    pub words: bool,
    pub axis: Axis,
    pub weights: bool,
    pub combiner: Combiner,
    pub padding_key: Option<u64>,
}

pub struct Plan {
    pub group: Arc<Group>,
    pub features: Vec<PlanFeature>,
    /// Of each table.
    pub dims: Vec<usize>,
    /// Whether a gradient that is not finite makes the ticket NaN.
    pub check_finite: bool,
}

/// Groups that are updated together.
pub struct Optimizer {
    pub groups: Vec<Arc<Group>>,
    /// Of each group.
    pub updates: Vec<Update>,
    pub needs_norm: bool,
    /// Whether gradients of several steps are accumulated.
    pub accumulates: bool,
}

impl Optimizer {
    /// The binding of each group. `handle`: the handle of this optimizer.
    pub fn bindings(&self, handle: i64) -> impl Iterator<Item = Binding> {
        let (owner, needs_norm) = (handle as u64, self.needs_norm);
        self.updates.iter().map(move |&update| Binding { owner, update, needs_norm })
    }
}

type ByHandle<T> = Option<HashMap<i64, Arc<T>>>;
type Handles<T> = RwLock<ByHandle<T>>;
/// While it exists, no other thread reads or changes the registry.
pub type RegistryLock = (Locked<Plan>, Locked<Optimizer>, Locked<Scope>);
type Locked<T> = RwLockWriteGuard<'static, ByHandle<T>>;

static PLANS: Handles<Plan> = RwLock::new(None);
static OPTIMIZERS: Handles<Optimizer> = RwLock::new(None);
static SCOPES: Handles<Scope> = RwLock::new(None);

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

fn add<T>(handles: &Handles<T>, value: T) -> Result<i64> {
    let mut handles = handles.write().unwrap_or_else(|e| e.into_inner());
    let handles = handles.get_or_insert_default();
    let mut handle = draw()?;
    while handles.contains_key(&handle) {
        handle = draw()?;
    }
    handles.insert(handle, Arc::new(value));
    Ok(handle)
}

fn get<T>(handles: &Handles<T>, handle: i64) -> Option<Arc<T>> {
    let handles = handles.read().unwrap_or_else(|e| e.into_inner());
    handles.as_ref().and_then(|h| h.get(&handle)).cloned()
}

fn remove<T>(handles: &Handles<T>, handle: i64) {
    let mut locked = handles.write().unwrap_or_else(|e| e.into_inner());
    let removed = locked.as_mut().and_then(|h| h.remove(&handle));
    // Dropping tables takes time, so it is done without the lock.
    drop(locked);
    drop(removed);
}

pub fn lock() -> RegistryLock {
    fn whole<T>(handles: &'static Handles<T>) -> Locked<T> {
        handles.write().unwrap_or_else(PoisonError::into_inner)
    }
    (whole(&PLANS), whole(&OPTIMIZERS), whole(&SCOPES))
}

pub fn add_plan(plan: Plan) -> Result<i64> {
    add(&PLANS, plan)
}

/// # Errors
/// [`Error::State`] if no layer of this process has this plan.
pub fn plan(handle: i64) -> Result<Arc<Plan>> {
    get(&PLANS, handle).ok_or_else(|| {
        Error::State(format!(
            "this graph's embedding tables are not in this process: the graph was exported from another process, or its layer is gone. \
             An exported graph holds no rows. Load the model with `keras.models.load_model`, or build it and use `sok_keras.load` of \
             what `sok_keras.dump` wrote (plan {handle:#x})"
        ))
    })
}

pub fn remove_plan(handle: i64) {
    remove(&PLANS, handle);
}

pub fn add_optimizer(optimizer: Optimizer) -> Result<i64> {
    add(&OPTIMIZERS, optimizer)
}

/// # Errors
/// [`Error::State`] if no optimizer of this process has this handle.
pub fn optimizer(handle: i64) -> Result<Arc<Optimizer>> {
    get(&OPTIMIZERS, handle).ok_or_else(|| {
        Error::State(format!(
            "this graph's optimizer is not in this process: the graph was traced in another process, or its `OptimizerWrapper` is \
             gone (optimizer {handle:#x})"
        ))
    })
}

pub fn remove_optimizer(handle: i64) {
    remove(&OPTIMIZERS, handle);
}

pub fn add_scope(scope: Scope) -> Result<i64> {
    add(&SCOPES, scope)
}

/// # Errors
/// [`Error::State`] if no model of this process has this scope.
pub fn scope(handle: i64) -> Result<Arc<Scope>> {
    get(&SCOPES, handle).ok_or_else(|| {
        Error::State(format!("this step's model is not in this process, or gone (scope {handle:#x})"))
    })
}

pub fn remove_scope(handle: i64) {
    remove(&SCOPES, handle);
}
