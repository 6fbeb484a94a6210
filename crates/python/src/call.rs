//! The four calls of a training step, for all bridges: flat lists of tensors in, flat lists of tensors out.
//!
//! A *plan* is made when a model is traced, and says what the tensors of a layer's call are. An *optimizer* says which layers are updated
//! together. Both are in a registry of the process, so the op of a framework holds one integer. Nothing here copies ids or rows, takes
//! the GIL, or depends on a framework or on where the tables are.

use std::sync::Arc;

use sok_core::contract::batch::Combiner;
use sok_core::contract::binding::Binding;
use sok_core::contract::general::{Gather, Scatter};
use sok_core::contract::gradients::Keep;
use sok_core::contract::group::{
    AnyGroup, Apply, BagTensors, Commit, FeatureTensors, GradientTensors, WeightGradient, write_trigger,
};
use sok_core::contract::table::Insertion;
use sok_core::contract::tensor::{DType, Memory, StreamHandle, Tensor, TensorMut, num_elements};
use sok_core::contract::ticket::{RING, TICKET_LEN};
use sok_core::error::{Error, Result};
use sok_core::host::key_gradients::{BagGradients, merge_by_key};
use sok_core::key::Key;
use sok_core::pool;
use sok_core::row_type::RowType;

use crate::ranks;
use crate::registry::{self, Axis, Optimizer, Plan, PlanFeature};
use crate::shared_group::GroupGuard;

/// The outputs of a call. TensorFlow allocates them on request. XLA and PyTorch have allocated them, and check the shape.
pub trait Outputs {
    /// Output `index` of these dims.
    ///
    /// # Errors
    /// If the framework has no memory, or has allocated another shape.
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<TensorMut>;
}

fn take<'a>(inputs: &mut impl Iterator<Item = &'a Tensor>) -> Result<&'a Tensor> {
    inputs.next().ok_or_else(|| Error::argument("the call has fewer tensors than its plan"))
}

/// Takes the tensors of a feature from those of a call, as the plan says. Returns the dims of its output too.
fn feature<'a>(
    planned: &'a PlanFeature,
    dim: usize,
    inputs: &mut std::slice::Iter<'a, Tensor>,
) -> Result<(FeatureTensors<'a>, Vec<i64>)> {
    let ids = take(inputs)?;
    let high = planned.words.then(|| take(inputs)).transpose()?;
    let splits = (planned.axis == Axis::Ragged).then(|| take(inputs)).transpose()?;
    let scores = planned.scores.then(|| take(inputs)).transpose()?;
    let weights = planned.weights.then(|| take(inputs)).transpose()?;
    let mut dims = ids.dims().to_vec();
    let bags = match (planned.axis, splits) {
        (_, Some(splits)) => {
            let num_bags = splits.len().checked_sub(1).ok_or_else(|| no_splits(&planned.name))?;
            dims = vec![num_bags as i64];
            BagTensors::Ragged(splits)
        }
        (Axis::Last, None) => {
            let hotness = dims.pop().ok_or_else(|| Error::argument("a scalar id cannot be combined"))?;
            BagTensors::Fixed { num_bags: num_elements(&dims), hotness: hotness as usize }
        }
        (_, None) => BagTensors::Each,
    };
    dims.push(dim as i64);
    let (name, table) = (&planned.name, planned.table);
    let (combiner, padding_key) = (planned.combiner, planned.padding_key);
    Ok((FeatureTensors { name, table, ids, high, bags, weights, scores, combiner, padding_key }, dims))
}

fn no_splits(feature: &str) -> Error {
    Error::argument(format!(
        "feature `{feature}`: row_splits must start at 0, never fall and end at the number of ids. Received: no row_splits"
    ))
}

/// Shapes of the outputs of a lookup of these tensors.
pub fn row_dims(plan: &Plan, inputs: &[Tensor]) -> Result<Vec<Vec<i64>>> {
    let mut inputs = inputs.iter();
    let dims_of = |planned| feature(planned, plan.dims[planned.table], &mut inputs).map(|(_, dims)| dims);
    plan.features.iter().map(dims_of).collect()
}

/// Tensors in: for each feature of the plan its ids (two int32 tensors for low and high words), then row splits,
/// scores and weights, each only if the plan says so.
///
/// Tensors out: 0 is the lookup's number as int32 `(2,)` (low word, high word), for `push`; then the rows of each feature, of the plan's type.
///
/// `insertion`: when keys without a row get one. `save`: whether to keep what `push` needs.
pub fn lookup(
    plan: i64,
    insertion: Insertion,
    save: bool,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    stream: StreamHandle,
) -> Result<()> {
    let plan = registry::plan(plan)?;
    let mut inputs = inputs.iter();
    let mut features = Vec::with_capacity(plan.features.len());
    let mut rows = Vec::with_capacity(plan.features.len());
    for (number, planned) in plan.features.iter().enumerate() {
        let (feature, dims) = feature(planned, plan.dims[planned.table], &mut inputs)?;
        features.push(feature);
        rows.push(outputs.output(1 + number, DType::of(plan.row_type), &dims)?);
    }
    let number = outputs.output(0, DType::I32, &[2])?;
    plan.group.lock()?.lookup(&features, insertion, save, number, rows, stream)
}

/// Tells the ids of a later training lookup. Tensors in: as `lookup`. `keep`: what keeps them readable until it is dropped. `stream`: on
/// which they are ready; `None` if they are.
pub fn prefetch(plan: i64, inputs: &[Tensor], keep: Keep, stream: Option<StreamHandle>) -> Result<()> {
    let plan = registry::plan(plan)?;
    let mut inputs = inputs.iter();
    let feature =
        |planned| feature(planned, plan.dims[planned.table], &mut inputs).map(|(feature, _)| feature);
    let features = plan.features.iter().map(feature).collect::<Result<Vec<_>>>()?;
    plan.group.lock()?.prefetch(&features, keep, stream)
}

/// Tensors in: the lookup's number, the output gradient of each feature, then the weights of each feature that has them
/// (for their shape). Tensors out: 0 is the ticket, float32 `(64, 2)`; then the gradient of each feature's weights.
///
/// With `keep`, the gradients stay where they are until they are applied. Without, they are merged at once.
pub fn push(
    plan: i64,
    inputs: &[Tensor],
    keep: Option<Keep>,
    outputs: &mut dyn Outputs,
    stream: StreamHandle,
) -> Result<()> {
    let plan = registry::plan(plan)?;
    let mut inputs = inputs.iter();
    let number = take(&mut inputs)?;
    let rows = plan.features.iter().map(|_| take(&mut inputs)).collect::<Result<Vec<_>>>()?;
    if let Some(other) = rows.iter().find(|gradient| gradient.dtype() != DType::of(plan.row_type)) {
        let (expected, received) = (plan.row_type.name(), other.dtype().name());
        return Err(Error::argument(format!(
            "the gradients of rows must be {expected}, as the rows are. Received: {received}"
        )));
    }
    let mut weights = Vec::new();
    for (feature, _) in plan.features.iter().enumerate().filter(|(_, planned)| planned.weights) {
        let dims = take(&mut inputs)?.dims();
        weights.push(WeightGradient { feature, to: outputs.output(1 + weights.len(), DType::F32, dims)? });
    }
    let ticket = outputs.output(0, DType::F32, &[RING as i64, 2])?;
    // A loss scale, which only float16 needs, must notice gradients that are not finite.
    let check_finite = plan.row_type == RowType::Float16;
    let gradients = GradientTensors { rows, keep, check_finite };
    plan.group.lock()?.push(number, gradients, weights, ticket, stream)
}

/// The groups of an optimizer, locked.
struct Locked<'a>(Vec<GroupGuard<'a>>);

impl Locked<'_> {
    fn new(optimizer: &Optimizer) -> Result<Locked<'_>> {
        // In the order of their addresses, so that two optimizers that share groups cannot deadlock.
        let mut order: Vec<usize> = (0..optimizer.groups.len()).collect();
        order.sort_unstable_by_key(|&i| Arc::as_ptr(&optimizer.groups[i]));
        let guards = order.into_iter().map(|i| Ok((i, optimizer.groups[i].lock()?)));
        let mut guards = guards.collect::<Result<Vec<_>>>()?;
        guards.sort_unstable_by_key(|(i, _)| *i);
        Ok(Locked(guards.into_iter().map(|(_, guard)| guard).collect()))
    }

    fn groups(&mut self) -> impl Iterator<Item = &mut AnyGroup> {
        self.0.iter_mut().map(|group| &mut ***group)
    }

    /// The first group, whose calls go over the others too.
    fn first(&mut self) -> Result<(&mut AnyGroup, Vec<&mut AnyGroup>)> {
        let mut groups = self.groups();
        let first = groups.next().ok_or_else(|| Error::argument("an optimizer needs tables"))?;
        Ok((first, groups.collect()))
    }
}

/// The next tensor, which has the shape of a ticket.
fn ticket_of<'a>(inputs: &mut impl Iterator<Item = &'a Tensor>, what: &str) -> Result<&'a Tensor> {
    let ticket = take(inputs)?;
    if ticket.len() == TICKET_LEN {
        return Ok(ticket);
    }
    Err(Error::argument(format!("{what} must hold {TICKET_LEN} numbers. Received: {}", ticket.len())))
}

/// Reads which pushes count, and inserts their absent keys. If a table refuses a key and is to raise, nothing has changed.
///
/// Tensors in: `is_update` float32 `(1,)` (0: the gradients are only accumulated), then a ticket for each layer of the
/// optimizer. Tensors out: 0 is the squared norm of all merged gradients, accumulated ones included, float32 `()`; 0 if
/// no optimizer needs norms.
pub fn commit(
    optimizer: i64,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    stream: StreamHandle,
) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = Locked::new(&optimizer)?;
    let mut inputs = inputs.iter();
    let is_update = take(&mut inputs)?;
    let tickets = optimizer.groups.iter().map(|_| ticket_of(&mut inputs, "a ticket"));
    let tickets = tickets.collect::<Result<Vec<_>>>()?;
    let norm = outputs.output(0, DType::F32, &[])?;
    let bindings: Vec<Binding> = optimizer.bindings(handle).collect();
    let (first, others) = locked.first()?;
    let accumulates = optimizer.accumulates;
    first.commit(others, Commit { bindings: &bindings, accumulates, is_update, tickets, norm, stream })
}

/// Tensors in: a vector float32 `(n,)`, and a tensor float32 that is passed on, so that what depends on it comes later. Tensors out: the
/// sums of the vectors of all ranks, and the other tensor. All are on the host, or all on the GPU.
pub fn sum_gradients(inputs: &[Tensor], outputs: &mut dyn Outputs, stream: StreamHandle) -> Result<()> {
    let mut inputs = inputs.iter();
    for index in 0..2 {
        let input = take(&mut inputs)?;
        let mut output = outputs.output(index, DType::F32, input.dims())?;
        if input.memory() == Memory::Device {
            let (from, to) = (input.address(DType::F32)?, output.address(DType::F32)?);
            if index == 0 {
                ranks::sum_on_gpus(from, to, input.len(), stream)?;
            } else {
                ranks::copy_on_gpu(from, to, input.len(), stream)?;
            }
            continue;
        }
        let floats = output.slice_mut::<f32>()?;
        floats.copy_from_slice(input.slice()?);
        if index == 0 {
            ranks::sum_gradients(floats)?;
        }
    }
    Ok(())
}

/// Sums up the gradients of equal ids of each variable, on the host.
///
/// Tensors in: int32 `(n, 2)`, for each variable how its ids were combined (0: not, 1: sum, 2: mean, 3: sqrtn), and whether they have weights. Then
/// for each its ids, its row splits int64 if ids were combined, its weights if there are some, and the gradients of its rows
/// float32 `(.., dim)`. Tensors out: the distinct ids of each variable, int64 `(k,)`; then the sums of each, float32 `(k, dim)`.
pub fn merge_gradients(inputs: &[Tensor], outputs: &mut dyn Outputs) -> Result<()> {
    let mut inputs = inputs.iter();
    let forms = take(&mut inputs)?.slice::<i32>()?.as_chunks::<2>().0;
    let mut of_variables = Vec::with_capacity(forms.len());
    for &[combined, is_weighted] in forms {
        let keys = keys_of(take(&mut inputs)?)?;
        let splits = (combined != 0).then(|| take(&mut inputs)?.slice::<i64>()).transpose()?;
        let weights = (is_weighted != 0).then(|| take(&mut inputs)?.slice::<f32>()).transpose()?;
        let gradients = take(&mut inputs)?;
        let dim = gradients.dims().last().map_or(0, |&dim| dim as usize);
        let combiner = match combined {
            2 => Combiner::Mean,
            3 => Combiner::Sqrtn,
            _ => Combiner::Sum,
        };
        let gradients = gradients.slice()?;
        of_variables.push(BagGradients { keys, splits, combiner, weights, gradients, dim });
    }
    let merged = merge_by_key(&of_variables, &*pool::global()?)?;
    for (number, (merged, from)) in merged.iter().zip(&of_variables).enumerate() {
        let (count, dim) = (merged.keys.len() as i64, from.dim as i64);
        let mut keys = outputs.output(number, DType::I64, &[count])?;
        keys.slice_mut::<i64>()?.iter_mut().zip(&merged.keys).for_each(|(to, &key)| *to = key as i64);
        let mut rows = outputs.output(forms.len() + number, DType::F32, &[count, dim])?;
        rows.slice_mut()?.copy_from_slice(&merged.rows);
    }
    Ok(())
}

/// The keys of ids.
fn keys_of(ids: &Tensor) -> Result<Vec<Key>> {
    Ok(match ids.dtype() {
        DType::I32 => ids.slice::<i32>()?.iter().map(|&id| i64::from(id) as Key).collect(),
        DType::U32 => ids.slice::<u32>()?.iter().map(|&id| Key::from(id)).collect(),
        DType::U64 => ids.slice::<u64>()?.to_vec(),
        _ => ids.slice::<i64>()?.iter().map(|&id| id as Key).collect(),
    })
}

/// Tensors in: scalars float32 `(rows, 4)` = learning rate, step (1-based), is_update, factor of each optimizer; what `commit` gave, for its data
/// dependency; a trigger `(64, 2)` for each layer. Tensors out: the new trigger of each layer.
pub fn apply(
    optimizer: i64,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    stream: StreamHandle,
) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = Locked::new(&optimizer)?;
    let scalars = take(&mut inputs.iter())?;
    let triggers = triggers(&optimizer, inputs, outputs)?;
    let bindings: Vec<Binding> = optimizer.bindings(handle).collect();
    let (first, others) = locked.first()?;
    let accumulates = optimizer.accumulates;
    first.apply(others, Apply { bindings: &bindings, accumulates, scalars, triggers, stream })
}

/// Writes a piece of the rows that an optimizer without a formula is to change.
///
/// Tensors in: the scalars of `apply`; what `commit` gave, for its data dependency; the number of the piece, int32 `(1,)`, from 1. Tensors
/// out, float32 `(size,)`: gradients, rows, and each state; `num_arrays` together.
pub fn gather(
    optimizer: i64,
    num_arrays: usize,
    size: usize,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    stream: StreamHandle,
) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = Locked::new(&optimizer)?;
    let mut inputs = inputs.iter();
    let (scalars, _, piece) = (take(&mut inputs)?, take(&mut inputs)?, take(&mut inputs)?);
    let array = |index| outputs.output(index, DType::F32, &[size as i64]);
    let to = (0..num_arrays).map(array).collect::<Result<Vec<_>>>()?;
    let bindings: Vec<Binding> = optimizer.bindings(handle).collect();
    let (first, others) = locked.first()?;
    first.gather(others, Gather { bindings: &bindings, scalars, piece, to, stream })
}

/// Takes the new values of a piece. They are written to the records by `apply`.
///
/// Tensors in: the number of the piece, int32 `(1,)`; the rows, and each state, float32 `(size,)`. Tensors out: 0 is the number of the next
/// piece, int32 `(1,)`; 0 after the last one.
pub fn scatter(
    optimizer: i64,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    stream: StreamHandle,
) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = Locked::new(&optimizer)?;
    let mut inputs = inputs.iter();
    let piece = take(&mut inputs)?;
    let next = outputs.output(0, DType::I32, &[1])?;
    let bindings: Vec<Binding> = optimizer.bindings(handle).collect();
    let (first, others) = locked.first()?;
    first.scatter(others, Scatter { bindings: &bindings, piece, from: inputs.collect(), next, stream })
}

/// The trigger of each layer, and the place of its new value.
fn triggers<'a>(
    optimizer: &Optimizer,
    inputs: &'a [Tensor],
    outputs: &mut dyn Outputs,
) -> Result<Vec<(&'a Tensor, TensorMut)>> {
    let mut inputs = inputs.iter().skip(2);
    let layers = 0..optimizer.groups.len();
    let one = |layer| {
        let trigger = ticket_of(&mut inputs, "a trigger")?;
        Ok((trigger, outputs.output(layer, DType::F32, &[RING as i64, 2])?))
    };
    layers.map(one).collect()
}

/// The scalars of an apply.
pub type Scalars = Vec<f32>;

/// Does what `apply` does except for the update. `apply_now` makes it with the scalars that this returns. The tables are on the host.
pub fn prepare_apply(optimizer: i64, inputs: &[Tensor], outputs: &mut dyn Outputs) -> Result<Scalars> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = Locked::new(&optimizer)?;
    let scalars = take(&mut inputs.iter())?.slice::<f32>()?.to_vec();
    let mut checked = locked.groups().zip(optimizer.bindings(handle));
    if let Err(error) = checked.try_for_each(|(group, binding)| group.check_owner(&binding)) {
        drop(checked);
        locked.groups().for_each(AnyGroup::drop_committed);
        return Err(error);
    }
    for (trigger, mut new) in triggers(&optimizer, inputs, outputs)? {
        write_trigger(trigger, &mut new)?;
    }
    Ok(scalars)
}

/// The update that `prepare_apply` has checked.
pub fn apply_now(optimizer: i64, scalars: &[f32]) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = Locked::new(&optimizer)?;
    let dims = vec![scalars.len() as i64];
    // SAFETY: floats that are borrowed until the call returns.
    let scalars = unsafe { Tensor::new(scalars.as_ptr().cast(), DType::F32, dims, Memory::Host) };
    let bindings: Vec<Binding> = optimizer.bindings(handle).collect();
    let (first, others) = locked.first()?;
    let (accumulates, stream) = (optimizer.accumulates, StreamHandle::NONE);
    let apply = Apply { bindings: &bindings, accumulates, scalars: &scalars, triggers: Vec::new(), stream };
    first.apply(others, apply)
}

/// Drops committed pushes, because their step has failed.
pub fn drop_committed(optimizer: i64) -> Result<()> {
    let optimizer = registry::optimizer(optimizer)?;
    Locked::new(&optimizer)?.groups().for_each(AnyGroup::drop_committed);
    Ok(())
}

/// Remembers an error that its framework will raise late, or never.
pub fn latch(plan: &Plan, error: &Error) {
    plan.group.latch(error);
}
