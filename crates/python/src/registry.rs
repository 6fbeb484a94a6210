//! Plans and optimizers by their handles.

use std::sync::Arc;

use sok_core::contract::batch::Combiner;
use sok_core::contract::binding::{Binding, OwnUpdate, UpdateMode};
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;
use sok_core::row_type::RowType;

use crate::handles::Handles;
use crate::shared_group::SharedGroup;

pub static PLANS: Handles<Plan> = Handles::new();
pub static OPTIMIZERS: Handles<Optimizer> = Handles::new();

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
    pub scores: bool,
    pub combiner: Combiner,
    pub padding_key: Option<u64>,
}

pub struct Plan {
    pub group: Arc<SharedGroup>,
    pub features: Vec<PlanFeature>,
    /// Of each table.
    pub dims: Vec<usize>,
    /// Type of the numbers of the rows and of their gradients in the framework.
    pub row_type: RowType,
}

/// Groups that are updated together.
pub struct Optimizer {
    pub groups: Vec<Arc<SharedGroup>>,
    /// Of each group: the update of the model's optimizer, and those of its tables' own optimizers.
    pub updates: Vec<(Update, Arc<[OwnUpdate]>)>,
    pub needs_norm: bool,
    /// Whether gradients of several steps are accumulated.
    pub accumulates: bool,
    /// Which rows a step updates.
    pub mode: UpdateMode,
    /// Whether its variables were loaded.
    pub was_restored: bool,
    /// The handle under which the groups were bound. None: the optimizer's own.
    pub bound_as: Option<i64>,
}

impl Optimizer {
    /// The binding of each group. `handle`: the handle of this optimizer.
    pub fn bindings(&self, handle: i64) -> impl Iterator<Item = Binding> {
        let (owner, needs_norm, mode) = (self.bound_as.unwrap_or(handle) as u64, self.needs_norm, self.mode);
        let was_restored = self.was_restored;
        let binding = move |(update, others): &(Update, Arc<[OwnUpdate]>)| Binding {
            owner,
            update: *update,
            others: others.clone(),
            needs_norm,
            mode,
            was_restored,
        };
        self.updates.iter().map(binding)
    }
}

pub fn add_plan(plan: Plan) -> Result<i64> {
    PLANS.add(plan)
}

/// # Errors
/// [`Error::State`] if no layer of this process has this plan.
pub fn plan(handle: i64) -> Result<Arc<Plan>> {
    PLANS.get(handle).ok_or_else(|| {
        Error::State(format!(
            "this graph's embedding tables are not in this process: the graph was exported from another process, or its layer is gone. \
             An exported graph holds no rows. Load the model with `keras.models.load_model`, or build it and use `sok_keras.load` of \
             what `sok_keras.dump` wrote (plan {handle:#x})"
        ))
    })
}

pub fn remove_plan(handle: i64) {
    PLANS.remove(handle);
}

pub fn add_optimizer(optimizer: Optimizer) -> Result<i64> {
    OPTIMIZERS.add(optimizer)
}

/// # Errors
/// [`Error::State`] if no optimizer of this process has this handle.
pub fn optimizer(handle: i64) -> Result<Arc<Optimizer>> {
    OPTIMIZERS.get(handle).ok_or_else(|| {
        Error::State(format!(
            "this graph's optimizer is not in this process: the graph was traced in another process, or its `OptimizerWrapper` is \
             gone (optimizer {handle:#x})"
        ))
    })
}

pub fn remove_optimizer(handle: i64) {
    OPTIMIZERS.remove(handle);
}
