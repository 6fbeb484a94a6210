//! What a framework's op names by a number: plans and optimizers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use sok_core::batch::Combiner;
use sok_core::error::{Error, Result};
use sok_core::host_group::Binding;
use sok_core::optimizer::Update;

use crate::tables::Tables;

/// The tables of a layer.
pub struct Group {
    tables: Mutex<Tables>,
    pub is_on_gpu: bool,
    /// An error that no caller has seen yet.
    latched: Mutex<Option<Error>>,
}

impl Group {
    pub fn new(tables: Tables) -> Group {
        let is_on_gpu = matches!(tables, Tables::Gpu(_));
        Group { tables: Mutex::new(tables), is_on_gpu, latched: Mutex::new(None) }
    }

    pub fn lock(&self) -> MutexGuard<'_, Tables> {
        // A panic inside a call is reported to its caller; the tables stay readable.
        self.tables.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub fn latch(&self, error: &Error) {
        self.latched.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert_with(|| error.clone());
    }

    /// Also what a device has found in calls that were over before it did.
    pub fn take_latched(&self) -> Option<Error> {
        let latched = self.latched.lock().unwrap_or_else(|e| e.into_inner()).take();
        latched.or_else(|| match &mut *self.lock() {
            Tables::Gpu(group) => group.take_failure(),
            Tables::Host(_) => None,
        })
    }
}

/// Which ids of a feature are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// None.
    Each,
    /// Those along the last axis.
    Last,
    /// As row splits say.
    Ragged,
}

/// A feature of a layer's call, as far as it is known when the model is traced.
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
    /// Whether gradients may overflow and a ticket is to say so.
    pub check_finite: bool,
}

/// Groups that are updated together.
pub struct Optimizer {
    pub groups: Vec<Arc<Group>>,
    /// Of each group.
    pub updates: Vec<Update>,
    pub needs_norm: bool,
    /// Gradients of several steps may add up.
    pub accumulates: bool,
}

impl Optimizer {
    /// What it binds to each group. `handle`: its own.
    pub fn bindings(&self, handle: i64) -> impl Iterator<Item = Binding> {
        let (owner, needs_norm) = (handle as u64, self.needs_norm);
        self.updates.iter().map(move |&update| Binding { owner, update, needs_norm })
    }
}

type Handles<T> = RwLock<Option<HashMap<i64, Arc<T>>>>;

static NEXT: AtomicI64 = AtomicI64::new(1);
static PLANS: Handles<Plan> = RwLock::new(None);
static OPTIMIZERS: Handles<Optimizer> = RwLock::new(None);

fn add<T>(handles: &Handles<T>, value: T) -> i64 {
    let handle = NEXT.fetch_add(1, Relaxed);
    let mut handles = handles.write().unwrap_or_else(|e| e.into_inner());
    handles.get_or_insert_default().insert(handle, Arc::new(value));
    handle
}

fn get<T>(handles: &Handles<T>, handle: i64, what: &str) -> Result<Arc<T>> {
    let handles = handles.read().unwrap_or_else(|e| e.into_inner());
    let found = handles.as_ref().and_then(|h| h.get(&handle)).cloned();
    found.ok_or_else(|| {
        Error::State(format!("{what} {handle} is no more: the layer or optimizer that made it is gone"))
    })
}

fn remove<T>(handles: &Handles<T>, handle: i64) {
    let mut handles = handles.write().unwrap_or_else(|e| e.into_inner());
    handles.as_mut().and_then(|h| h.remove(&handle));
}

pub fn add_plan(plan: Plan) -> i64 {
    add(&PLANS, plan)
}

pub fn plan(handle: i64) -> Result<Arc<Plan>> {
    get(&PLANS, handle, "plan")
}

pub fn remove_plan(handle: i64) {
    remove(&PLANS, handle);
}

pub fn add_optimizer(optimizer: Optimizer) -> i64 {
    add(&OPTIMIZERS, optimizer)
}

pub fn optimizer(handle: i64) -> Result<Arc<Optimizer>> {
    get(&OPTIMIZERS, handle, "optimizer")
}

pub fn remove_optimizer(handle: i64) {
    remove(&OPTIMIZERS, handle);
}
