//! The four calls of a training step, for all bridges: flat lists of tensors in, flat lists of tensors out.
//!
//! A *plan* is made when a model is traced, and says what the tensors of a layer's call are. An *optimizer* says which layers are updated
//! together. Both are in a registry of the process, so the op of a framework holds one integer. Nothing here copies ids or rows, takes
//! the GIL, or depends on a framework.

use std::sync::MutexGuard;

use sok_core::batch::{Bags, Feature, Keys, Splits};
use sok_core::error::{Error, Result};
use sok_core::host_group::{ApplyScalars, HostGroup};
use sok_core::optimizer::UpdateScalars;
use sok_core::pool;
use sok_core::push::{GradientRows, Keep, OutputGradients};
use sok_core::table::Insertion;
use sok_core::ticket::{RING, TICKET_LEN};
use sok_cuda::gpu_group::LookupNumber;

use crate::gpu_call;
use crate::registry::{self, Axis, Optimizer, Plan, PlanFeature};
use crate::tables::Tables;

/// Element types of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    I32,
    I64,
    U32,
    U64,
    F32,
}

/// A tensor of a framework: dense, row-major, readable during the call, and longer if a [`Keep`] goes with it.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub data: *const u8,
    pub dtype: DType,
    pub dims: Vec<i64>,
}

/// Number of elements. It cannot overflow, because the framework has allocated the tensor.
pub fn num_elements(dims: &[i64]) -> usize {
    dims.iter().product::<i64>() as usize
}

/// The outputs of a call. TensorFlow allocates them on request. XLA and PyTorch have allocated them, and check the shape.
pub trait Outputs {
    /// Memory for output `index` of these dims, row-major. Nothing else writes to it until the call returns.
    ///
    /// # Errors
    /// If the framework has no memory, or has allocated another shape.
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<*mut u8>;
}

/// For tensors in the memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct OnGpu {
    /// The framework's stream, on which tensors are ready.
    pub stream: u64,
    /// Whether the number of the lookup is in GPU memory too.
    pub has_number: bool,
}

impl Tensor {
    pub fn check(&self, dtype: DType) -> Result<()> {
        if self.dtype == dtype {
            return Ok(());
        }
        Err(Error::argument(format!("a tensor must be {dtype:?}. Received: {:?}", self.dtype)))
    }

    pub fn len(&self) -> usize {
        num_elements(&self.dims)
    }

    fn slice<T>(&self, dtype: DType) -> Result<&[T]> {
        self.check(dtype)?;
        if self.len() == 0 {
            return Ok(&[]);
        }
        // SAFETY: - a tensor is dense and readable during the call: the bridge promises it.
        //         - T is the element of `dtype`: the callers below pair them.
        Ok(unsafe { std::slice::from_raw_parts(self.data.cast(), self.len()) })
    }

    fn floats(&self) -> Result<&[f32]> {
        self.slice(DType::F32)
    }

    fn keys(&self) -> Result<Keys<'_>> {
        Ok(match self.dtype {
            DType::I64 => Keys::I64(self.slice(DType::I64)?),
            DType::U64 => Keys::U64(self.slice(DType::U64)?),
            DType::I32 => Keys::I32(self.slice(DType::I32)?),
            DType::U32 => Keys::U32(self.slice(DType::U32)?),
            DType::F32 => return Err(Error::argument("ids must be integers. Received: float32")),
        })
    }

    fn splits(&self) -> Result<Splits<'_>> {
        match self.dtype {
            DType::I32 => Ok(Splits::I32(self.slice(DType::I32)?)),
            _ => Ok(Splits::I64(self.slice(DType::I64)?)),
        }
    }
}

/// Output memory as floats.
fn floats_out<'a>(outputs: &mut dyn Outputs, index: usize, dims: &[i64]) -> Result<&'a mut [f32]> {
    let data = outputs.output(index, DType::F32, dims)?;
    let len = num_elements(dims);
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the framework has allocated these dims, and nothing else uses them until the call returns.
    Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), len) })
}

pub fn take<'a>(inputs: &mut impl Iterator<Item = &'a Tensor>) -> Result<&'a Tensor> {
    inputs.next().ok_or_else(|| Error::argument("the call has fewer tensors than its plan"))
}

/// The tensors of one feature of a lookup.
pub struct FeatureTensors<'a> {
    /// The ids, or their low words if there are `high` ones.
    pub ids: &'a Tensor,
    pub high: Option<&'a Tensor>,
    pub splits: Option<&'a Tensor>,
    pub weights: Option<&'a Tensor>,
}

impl<'a> FeatureTensors<'a> {
    /// Takes the next tensors of a call, as the plan says.
    pub fn take(
        planned: &PlanFeature,
        inputs: &mut std::slice::Iter<'a, Tensor>,
    ) -> Result<FeatureTensors<'a>> {
        Ok(FeatureTensors {
            ids: take(inputs)?,
            high: planned.words.then(|| take(inputs)).transpose()?,
            splits: (planned.axis == Axis::Ragged).then(|| take(inputs)).transpose()?,
            weights: planned.weights.then(|| take(inputs)).transpose()?,
        })
    }

    /// Dims of the feature's output without the last one.
    pub fn bag_dims(&self, planned: &PlanFeature) -> Result<Vec<i64>> {
        if let Some(splits) = self.splits {
            let empty = || {
                format!(
                    "feature `{}`: row_splits must start at 0, never fall and end at the number of ids. Received: no row_splits",
                    planned.name
                )
            };
            return Ok(vec![splits.len().checked_sub(1).ok_or_else(|| Error::argument(empty()))? as i64]);
        }
        let mut dims = self.ids.dims.clone();
        if planned.axis == Axis::Last {
            dims.pop().ok_or_else(|| Error::argument("a scalar id cannot be combined"))?;
        }
        Ok(dims)
    }

    /// Number of ids in a bag, if it is the same for all.
    pub fn hotness(&self) -> usize {
        self.ids.dims.last().map_or(0, |&hotness| hotness as usize)
    }
}

/// Shapes of the outputs of a lookup of these tensors.
pub fn row_dims(plan: &Plan, inputs: &[Tensor]) -> Result<Vec<Vec<i64>>> {
    let mut inputs = inputs.iter();
    let of_feature = |planned: &PlanFeature| {
        let mut dims = FeatureTensors::take(planned, &mut inputs)?.bag_dims(planned)?;
        dims.push(plan.dims[planned.table] as i64);
        Ok(dims)
    };
    plan.features.iter().map(of_feature).collect()
}

/// A feature of the plan with the tensors of this call, and the dims of its output.
fn feature<'a>(
    planned: &'a PlanFeature,
    dim: usize,
    inputs: &mut std::slice::Iter<'a, Tensor>,
) -> Result<(Feature<'a>, Vec<i64>)> {
    let tensors = FeatureTensors::take(planned, inputs)?;
    let keys = match tensors.high {
        Some(high) => Keys::Words { low: tensors.ids.slice(DType::I32)?, high: high.slice(DType::I32)? },
        None => tensors.ids.keys()?,
    };
    let mut dims = tensors.bag_dims(planned)?;
    let bags = match (planned.axis, tensors.splits) {
        (_, Some(splits)) => Bags::Ragged(splits.splits()?),
        (Axis::Last, None) => {
            Bags::Fixed { num_bags: dims.iter().product::<i64>() as usize, hotness: tensors.hotness() }
        }
        (_, None) => Bags::Each,
    };
    let weights = tensors.weights.map(Tensor::floats).transpose()?;
    let (name, table) = (&planned.name, planned.table);
    let (combiner, padding_key) = (planned.combiner, planned.padding_key);
    dims.push(dim as i64);
    Ok((Feature { name, table, keys, bags, combiner, weights, padding_key }, dims))
}

/// Tensors in: for each feature of the plan its ids (two int32 tensors for low and high words), then row splits, then
/// weights, each only if the plan says so.
///
/// Tensors out: 0 is the lookup's number as int32 `(2,)` (low word, high word), for `push`; then the rows of each feature.
///
/// `insertion`: when keys without a row get one. `save`: whether to keep what `push` needs. `on_gpu`: given if tensors are in GPU memory.
pub fn lookup(
    plan: i64,
    insertion: Insertion,
    save: bool,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    on_gpu: Option<OnGpu>,
) -> Result<()> {
    let plan = registry::plan(plan)?;
    if let Some(on_gpu) = on_gpu {
        let mut tables = plan.group.lock()?;
        return gpu_call::lookup(&plan, tables.gpu()?, insertion, save, inputs, outputs, on_gpu);
    }
    let mut inputs = inputs.iter();
    let mut features = Vec::with_capacity(plan.features.len());
    let mut rows = Vec::with_capacity(plan.features.len());
    for (number, planned) in plan.features.iter().enumerate() {
        let (feature, dims) = feature(planned, plan.dims[planned.table], &mut inputs)?;
        feature.validate()?;
        features.push(feature);
        rows.push(floats_out(outputs, 1 + number, &dims)?);
    }
    let place = outputs.output(0, DType::I32, &[2])?;
    let number = plan.group.lock()?.host()?.lookup(&features, insertion, save, rows, &*pool::global()?)?;
    // SAFETY: the framework has allocated two int32.
    unsafe { place.cast::<[i32; 2]>().write_unaligned([number as i32, (number >> 32) as i32]) };
    Ok(())
}

/// When a `tf.function` is traced it is not known whether its results will be differentiated.
const KEPT_NOTHING: &str = "a gradient is asked of a lookup that kept nothing for it: its `tf.function` was traced where no gradient \
     was recorded. Call the layer with `training=True`, or open the `tf.GradientTape` inside the function";

/// Tensors in: the lookup's number, the output gradient of each feature, then the weights of each feature that has them
/// (for their shape). Tensors out: 0 is the ticket, float32 `(64, 2)`; then the gradient of each feature's weights.
///
/// With `keep`, the gradients stay where they are until they are applied. Without, they are merged at once.
pub fn push(
    plan: i64,
    inputs: &[Tensor],
    keep: Option<Keep>,
    outputs: &mut dyn Outputs,
    on_gpu: Option<OnGpu>,
) -> Result<()> {
    let plan = registry::plan(plan)?;
    let mut inputs = inputs.iter();
    let number = take(&mut inputs)?;
    if let Some(on_gpu) = on_gpu.filter(|on_gpu| on_gpu.has_number) {
        let number = LookupNumber::At(number.data as u64);
        let mut tables = plan.group.lock()?;
        return gpu_call::push(&plan, tables.gpu()?, number, &mut inputs, keep, outputs, on_gpu);
    }
    let number = number.slice::<i32>(DType::I32)?;
    let &[low, high] = number else { return Err(Error::argument("a lookup's number is two int32")) };
    let number = u64::from(low as u32) | u64::from(high as u32) << 32;
    if number == 0 {
        return Err(Error::Ticket { tables: plan.group.lock()?.names(), what: KEPT_NOTHING.into() });
    }
    if let Some(on_gpu) = on_gpu {
        let (number, mut tables) = (LookupNumber::Known(number), plan.group.lock()?);
        return gpu_call::push(&plan, tables.gpu()?, number, &mut inputs, keep, outputs, on_gpu);
    }
    let mut rows = Vec::with_capacity(plan.features.len());
    for _ in &plan.features {
        let gradient = take(&mut inputs)?.floats()?;
        // SAFETY: readable during the call, or until `keep` is dropped: the bridge promises it.
        rows.push(unsafe { GradientRows::new(gradient.as_ptr(), gradient.len()) });
    }
    let mut weights = Vec::new();
    for _ in plan.features.iter().filter(|f| f.weights) {
        weights.push(floats_out(outputs, 1 + weights.len(), &take(&mut inputs)?.dims)?);
    }
    let ticket = floats_out(outputs, 0, &[RING as i64, 2])?;
    let gradients = OutputGradients { rows, keep, check_finite: plan.check_finite };
    plan.group.lock()?.host()?.push(number, gradients, weights, ticket, &*pool::global()?)
}

fn lock_all(optimizer: &Optimizer) -> Result<Vec<MutexGuard<'_, Tables>>> {
    // In the order of their addresses, so that two optimizers that share groups cannot deadlock.
    let mut order: Vec<usize> = (0..optimizer.groups.len()).collect();
    order.sort_unstable_by_key(|&i| std::sync::Arc::as_ptr(&optimizer.groups[i]));
    let guards = order.into_iter().map(|i| Ok((i, optimizer.groups[i].lock()?)));
    let mut guards = guards.collect::<Result<Vec<_>>>()?;
    guards.sort_unstable_by_key(|(i, _)| *i);
    Ok(guards.into_iter().map(|(_, guard)| guard).collect())
}

/// The next tensor, which has the shape of a ticket.
fn ticket_of<'a>(inputs: &mut impl Iterator<Item = &'a Tensor>, what: &str) -> Result<&'a [f32]> {
    let numbers = take(inputs)?.floats()?;
    if numbers.len() == TICKET_LEN {
        return Ok(numbers);
    }
    Err(Error::argument(format!("{what} must hold {TICKET_LEN} numbers. Received: {}", numbers.len())))
}

/// The groups of an optimizer whose tables are on the host.
fn on_host<'a>(groups: &'a mut [MutexGuard<'_, Tables>]) -> Result<Vec<&'a mut HostGroup>> {
    groups.iter_mut().map(|tables| tables.host()).collect()
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
    on_gpu: Option<OnGpu>,
) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = lock_all(&optimizer)?;
    if let Some(on_gpu) = on_gpu {
        return gpu_call::commit(&optimizer, handle, &mut locked, inputs, outputs, on_gpu);
    }
    let mut groups = on_host(&mut locked)?;
    let mut inputs = inputs.iter();
    let is_update = take(&mut inputs)?.floats()?.first().is_some_and(|&u| u != 0.0);
    let out = floats_out(outputs, 0, &[])?;
    let mut named = Vec::with_capacity(groups.len());
    for (group, binding) in groups.iter().zip(optimizer.bindings(handle)) {
        let ticket = ticket_of(&mut inputs, "a ticket")?;
        group.check_owner(&binding)?;
        named.push(group.resolve(ticket)?);
    }
    groups.iter().zip(&named).try_for_each(|(group, named)| group.check_absent(named))?;
    let pool = pool::global()?;
    let mut total = 0.0;
    for ((group, named), binding) in groups.iter_mut().zip(&named).zip(optimizer.bindings(handle)) {
        group.take_over(&binding)?;
        total += group.commit(named, is_update, &pool)?;
    }
    out[0] = total as f32;
    Ok(())
}

/// Tensors in: scalars float32 `(4,)` = learning rate, step (1-based), is_update, factor; what `commit` gave, for its data
/// dependency; a trigger `(64, 2)` for each layer. Tensors out: the new trigger of each layer.
pub fn apply(
    optimizer: i64,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    on_gpu: Option<OnGpu>,
) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = lock_all(&optimizer)?;
    if let Some(on_gpu) = on_gpu {
        return gpu_call::apply(&optimizer, handle, &mut locked, inputs, outputs, on_gpu);
    }
    let mut groups = on_host(&mut locked)?;
    let scalars = apply_scalars(inputs)?;
    check_owners(&optimizer, handle, &mut groups)?;
    write_triggers(&optimizer, inputs, outputs)?;
    update(&optimizer, handle, &mut groups, &scalars)
}

/// Does what `apply` does except for the update. `apply_now` makes it with the scalars that this returns. The tables are on the host.
pub fn prepare_apply(optimizer: i64, inputs: &[Tensor], outputs: &mut dyn Outputs) -> Result<ApplyScalars> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = lock_all(&optimizer)?;
    let scalars = apply_scalars(inputs)?;
    check_owners(&optimizer, handle, &mut on_host(&mut locked)?)?;
    write_triggers(&optimizer, inputs, outputs)?;
    Ok(scalars)
}

/// The update that `prepare_apply` has checked.
pub fn apply_now(optimizer: i64, scalars: &ApplyScalars) -> Result<()> {
    let (handle, optimizer) = (optimizer, registry::optimizer(optimizer)?);
    let mut locked = lock_all(&optimizer)?;
    let mut groups = on_host(&mut locked)?;
    check_owners(&optimizer, handle, &mut groups)?;
    update(&optimizer, handle, &mut groups, scalars)
}

/// Drops committed pushes, because their step has failed.
pub fn drop_committed(optimizer: i64) -> Result<()> {
    let optimizer = registry::optimizer(optimizer)?;
    let mut locked = lock_all(&optimizer)?;
    on_host(&mut locked)?.into_iter().for_each(HostGroup::drop_committed);
    Ok(())
}

fn apply_scalars(inputs: &[Tensor]) -> Result<ApplyScalars> {
    let &[learning_rate, step, is_update, factor] = take(&mut inputs.iter())?.floats()? else {
        return Err(Error::argument("apply takes four scalars"));
    };
    let update = UpdateScalars { learning_rate, step: step as u64, factor };
    Ok(ApplyScalars { update, is_update: is_update != 0.0 })
}

/// Checks all groups before one is changed.
fn check_owners(optimizer: &Optimizer, handle: i64, groups: &mut [&mut HostGroup]) -> Result<()> {
    let mut checked = groups.iter().zip(optimizer.bindings(handle));
    let result = checked.try_for_each(|(group, binding)| group.check_owner(&binding));
    if result.is_err() {
        groups.iter_mut().for_each(|group| group.drop_committed());
    }
    result
}

/// The new value of a trigger. The next lookup depends on it, so it comes after the update. Any other value would do.
fn write_triggers(optimizer: &Optimizer, inputs: &[Tensor], outputs: &mut dyn Outputs) -> Result<()> {
    let mut triggers = inputs.iter().skip(2);
    for number in 0..optimizer.groups.len() {
        let trigger = ticket_of(&mut triggers, "a trigger")?;
        let new = floats_out(outputs, number, &[RING as i64, 2])?;
        new.copy_from_slice(trigger);
        new[0] += 1.0;
    }
    Ok(())
}

fn update(
    optimizer: &Optimizer,
    handle: i64,
    groups: &mut [&mut HostGroup],
    scalars: &ApplyScalars,
) -> Result<()> {
    let pool = pool::global()?;
    let mut groups = groups.iter_mut().zip(optimizer.bindings(handle));
    groups.try_for_each(|(group, binding)| group.apply(&binding, scalars, &pool))
}

/// Remembers an error that its framework will raise late, or never.
pub fn latch(plan: &Plan, error: &Error) {
    plan.group.latch(error);
}
