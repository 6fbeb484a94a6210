//! The four calls of a training step on tables in GPU memory. Tensors are addresses of device memory. In a steady step no call waits.

use std::sync::MutexGuard;

use sok_core::error::{Error, Result};
use sok_core::host_group::Binding;
use sok_core::push::Keep;
use sok_core::table::Insertion;
use sok_core::ticket::{RING, TICKET_LEN};
use sok_cuda::device::Stream;
use sok_cuda::gpu_group::{GpuGroup, LookupNumber, OutputGradients};
use sok_cuda::optimizer;
use sok_cuda::step::{Bags, Feature, Ids, KeyType};

use crate::call::{DType, FeatureTensors, OnGpu, Outputs, Tensor, take};
use crate::registry::{Axis, Optimizer, Plan, PlanFeature};
use crate::tables::Tables;

fn address(tensor: &Tensor, dtype: DType) -> Result<u64> {
    tensor.check(dtype)?;
    Ok(tensor.data as u64)
}

/// Address of a tensor of `len` floats. The length is checked here, since kernels do not check it.
fn floats(tensor: &Tensor, len: usize, what: &str) -> Result<u64> {
    if tensor.len() != len {
        return Err(Error::argument(format!("{what} must be {len} numbers. Received: {}", tensor.len())));
    }
    address(tensor, DType::F32)
}

fn float_output(outputs: &mut dyn Outputs, index: usize, dims: &[i64]) -> Result<u64> {
    Ok(outputs.output(index, DType::F32, dims)? as u64)
}

/// A feature of the plan with the tensors of this call, and the dims of its output.
fn feature<'a>(
    planned: &'a PlanFeature,
    dim: usize,
    inputs: &mut std::slice::Iter<'_, Tensor>,
) -> Result<(Feature<'a>, Vec<i64>)> {
    let tensors = FeatureTensors::take(planned, inputs)?;
    let ids = tensors.ids;
    if let Some(high) = tensors.high.filter(|high| high.len() != ids.len()) {
        return Err(Error::argument(format!(
            "feature `{}`: {} low words and {} high words",
            planned.name,
            ids.len(),
            high.len()
        )));
    }
    let high = tensors.high.map(|high| address(high, DType::I32)).transpose()?.unwrap_or(0);
    let key_type = match ids.dtype {
        DType::I32 if planned.words => KeyType::Words,
        DType::I32 => KeyType::Signed,
        DType::U32 => KeyType::Unsigned,
        DType::I64 | DType::U64 => KeyType::Wide,
        DType::F32 => return Err(Error::argument("ids must be integers. Received: float32")),
    };
    let ids_of = Ids { address: ids.data as u64, high, key_type, len: ids.len() };
    let mut dims = tensors.bag_dims(planned)?;
    let num_bags = dims.iter().product::<i64>() as usize;
    let bags = match (planned.axis, tensors.splits) {
        (_, Some(splits)) => {
            let wide = splits.dtype == DType::I64;
            let splits = address(splits, if wide { DType::I64 } else { DType::I32 })?;
            Bags::Ragged { splits, wide, num_bags }
        }
        (Axis::Last, None) => Bags::Fixed { num_bags, hotness: tensors.hotness() },
        (_, None) => Bags::Each,
    };
    let what = || format!("the weights of feature `{}`", planned.name);
    let weights = tensors.weights.map(|weights| floats(weights, ids.len(), &what())).transpose()?;
    dims.push(dim as i64);
    let feature = Feature {
        name: &planned.name,
        table: planned.table,
        ids: ids_of,
        bags,
        combiner: planned.combiner,
        weights,
        padding_key: planned.padding_key,
        rows: 0,
    };
    Ok((feature, dims))
}

/// As [`crate::call::lookup`].
pub fn lookup(
    plan: &Plan,
    group: &mut GpuGroup,
    insertion: Insertion,
    save: bool,
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    on_gpu: OnGpu,
) -> Result<()> {
    let mut inputs = inputs.iter();
    let mut features = Vec::with_capacity(plan.features.len());
    for (number, planned) in plan.features.iter().enumerate() {
        let (feature, dims) = feature(planned, plan.dims[planned.table], &mut inputs)?;
        let rows = float_output(outputs, 1 + number, &dims)?;
        features.push(Feature { rows, ..feature });
    }
    let place = outputs.output(0, DType::I32, &[2])?;
    let number_to = on_gpu.has_number.then_some(place as u64);
    let number = group.lookup(&features, insertion, save, number_to, Stream(on_gpu.stream as _))?;
    if number_to.is_none() {
        // SAFETY: the framework has allocated two int32 in host memory.
        unsafe { place.cast::<[i32; 2]>().write_unaligned([number as i32, (number >> 32) as i32]) };
    }
    Ok(())
}

/// As [`crate::call::push`].
pub fn push(
    plan: &Plan,
    group: &mut GpuGroup,
    number: LookupNumber,
    inputs: &mut std::slice::Iter<'_, Tensor>,
    keep: Option<Keep>,
    outputs: &mut dyn Outputs,
    on_gpu: OnGpu,
) -> Result<()> {
    let (mut rows, mut lens) = (Vec::with_capacity(plan.features.len()), Vec::new());
    for _ in &plan.features {
        let gradient = take(inputs)?;
        rows.push(address(gradient, DType::F32)?);
        lens.push(gradient.len());
    }
    let mut weights = Vec::new();
    for (feature, _) in plan.features.iter().enumerate().filter(|(_, f)| f.weights) {
        let dims = &take(inputs)?.dims;
        weights.push((feature, float_output(outputs, 1 + weights.len(), dims)?));
    }
    let ticket = float_output(outputs, 0, &[RING as i64, 2])?;
    let gradients = OutputGradients { rows, keep, check_finite: plan.check_finite };
    group.push(number, gradients, &lens, &weights, ticket, Stream(on_gpu.stream as _))
}

/// The groups of an optimizer whose tables are on the GPU.
fn on_gpu<'a>(groups: &'a mut [MutexGuard<'_, Tables>]) -> Result<Vec<&'a mut GpuGroup>> {
    groups.iter_mut().map(|tables| tables.gpu()).collect()
}

/// As [`crate::call::commit`].
pub fn commit(
    optimizer: &Optimizer,
    handle: i64,
    groups: &mut [MutexGuard<'_, Tables>],
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    place: OnGpu,
) -> Result<()> {
    let mut inputs = inputs.iter();
    let is_update = floats(take(&mut inputs)?, 1, "`is_update`")?;
    let out = float_output(outputs, 0, &[])?;
    let tickets = inputs.map(|ticket| floats(ticket, TICKET_LEN, "a ticket")).collect::<Result<Vec<_>>>()?;
    let bindings: Vec<Binding> = optimizer.bindings(handle).collect();
    let is_update = optimizer.accumulates.then_some(is_update);
    optimizer::commit(&mut on_gpu(groups)?, &bindings, &tickets, is_update, out, Stream(place.stream as _))
}

/// As [`crate::call::apply`].
pub fn apply(
    optimizer: &Optimizer,
    handle: i64,
    groups: &mut [MutexGuard<'_, Tables>],
    inputs: &[Tensor],
    outputs: &mut dyn Outputs,
    place: OnGpu,
) -> Result<()> {
    let mut inputs = inputs.iter();
    let scalars = floats(take(&mut inputs)?, 4, "the scalars of a step")?;
    take(&mut inputs)?;
    let mut triggers = Vec::with_capacity(groups.len());
    for number in 0..groups.len() {
        let trigger = floats(take(&mut inputs)?, TICKET_LEN, "a trigger")?;
        triggers.push((trigger, float_output(outputs, number, &[RING as i64, 2])?));
    }
    let bindings: Vec<Binding> = optimizer.bindings(handle).collect();
    let stream = Stream(place.stream as _);
    optimizer::apply(&mut on_gpu(groups)?, &bindings, scalars, optimizer.accumulates, &triggers, stream)
}
