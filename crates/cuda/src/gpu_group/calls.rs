//! The four calls of a training step, on tensors of a framework in device memory. In a steady step no call waits for the device.

#![allow(unsafe_code)]

use sok_core::contract::binding::Binding;
use sok_core::contract::general::{Gather, Scatter};
use sok_core::contract::group::{
    AnyGroup, Apply, BagTensors, Commit, FeatureTensors, GradientTensors, Group, WeightGradient,
    check_memory, lookup_number, together, write_lookup_number,
};
use sok_core::contract::profile::Profile;
use sok_core::contract::table::{Insertion, Table};
use sok_core::contract::tensor::{DType, Memory, StreamHandle, Tensor, TensorMut};
use sok_core::contract::ticket::TICKET_LEN;
use sok_core::error::{Error, Result};
use sok_core::row_type::RowType;

use super::{GpuGroup, LookupNumber, OutputGradients, absent, general};
use crate::device::Stream;
use crate::gpu_group::optimizer;
use crate::gpu_table::GpuTable;
use crate::memory::Buffer;
use crate::step::{Bags, Feature, Ids, KeyType, ScoreType, Scores};

impl Group for GpuGroup {
    fn memory(&self) -> Memory {
        Memory::Device
    }

    fn num_tables(&self) -> usize {
        self.tables.len()
    }

    fn settle_tables(&mut self) {
        self.settle_for_tables();
    }

    fn table(&self, number: usize) -> &dyn Table {
        &self.tables[number]
    }

    fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        self.settle_for_tables();
        &mut self.tables[number]
    }

    fn tables_mut(&mut self) -> Vec<&mut dyn Table> {
        self.settle_for_tables();
        self.tables.iter_mut().map(|table| table as &mut dyn Table).collect()
    }

    fn lookup(
        &mut self,
        features: &[FeatureTensors<'_>],
        insertion: Insertion,
        save: bool,
        mut number: TensorMut,
        rows: Vec<TensorMut>,
        stream: StreamHandle,
    ) -> Result<()> {
        let (features, to) = lookup_arguments(self, features, &number, &rows)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid.
        let looked_up =
            unsafe { GpuGroup::lookup(self, &features, insertion, save, to, Stream::of(stream)) }?;
        if to.is_none() { write_lookup_number(looked_up, &mut number) } else { Ok(()) }
    }

    fn push(
        &mut self,
        number: &Tensor,
        gradients: GradientTensors<'_>,
        weight_gradients: Vec<WeightGradient>,
        ticket: TensorMut,
        stream: StreamHandle,
    ) -> Result<()> {
        check_memory(self, ticket.memory())?;
        let number = match number.memory() {
            Memory::Device => LookupNumber::At(number.address(DType::I32)?),
            Memory::Host => LookupNumber::Known(lookup_number(self, number)?),
        };
        let GradientTensors { rows, keep, check_finite } = gradients;
        let lens: Vec<usize> = rows.iter().map(|gradient| gradient.len()).collect();
        let array_type = array_type(rows.first().map(|gradient| gradient.dtype()))?;
        let rows = rows.iter().map(|gradient| gradient.address(DType::of(array_type)));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        let weights =
            weight_gradients.iter().map(|weight| Ok((weight.feature, weight.to.address(DType::F32)?)));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let gradients = OutputGradients { rows, array_type, keep, check_finite };
        let ticket = ticket.address(DType::F32)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid.
        unsafe { GpuGroup::push(self, number, gradients, &lens, &weights, ticket, Stream::of(stream)) }
    }

    fn commit(&mut self, others: Vec<&mut AnyGroup>, commit: Commit<'_>) -> Result<()> {
        let CommitArguments { is_update, tickets, norm } = commit_arguments(self, &commit)?;
        let stream = Stream::of(commit.stream);
        let mut groups = together(self, others)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid. Their lengths are checked above.
        unsafe { optimizer::commit(&mut groups, commit.bindings, &tickets, is_update, norm, stream) }
    }

    fn apply(&mut self, others: Vec<&mut AnyGroup>, apply: Apply<'_>) -> Result<()> {
        let Apply { bindings, accumulates, scalars, triggers, stream } = apply;
        check_memory(self, scalars.memory())?;
        let scalars = scalar_rows(scalars, bindings)?;
        let triggers = triggers
            .iter()
            .map(|(trigger, new)| Ok((floats(trigger, TICKET_LEN, "a trigger")?, new.address(DType::F32)?)));
        let triggers = triggers.collect::<Result<Vec<_>>>()?;
        let mut groups = together(self, others)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid. Their lengths are checked above.
        unsafe {
            optimizer::apply(&mut groups, bindings, scalars, accumulates, &triggers, Stream::of(stream))
        }
    }

    fn gather(&mut self, others: Vec<&mut AnyGroup>, gather: Gather<'_>) -> Result<()> {
        let Gather { bindings, scalars, piece, to, stream } = gather;
        check_memory(self, scalars.memory())?;
        let (scalars, number) = (scalar_rows(scalars, bindings)?, piece.address(DType::I32)?);
        let size = to.first().map_or(0, TensorMut::num_bytes) / size_of::<f32>();
        let to = to.iter().map(|to| to.address(DType::F32)).collect::<Result<Vec<_>>>()?;
        let mut groups = together(self, others)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid. They have one length.
        unsafe { general::gather(&mut groups, bindings, scalars, number, &to, size, Stream::of(stream)) }
    }

    fn scatter(&mut self, others: Vec<&mut AnyGroup>, scatter: Scatter<'_>) -> Result<()> {
        let Scatter { bindings, piece, from, next, stream } = scatter;
        check_memory(self, piece.memory())?;
        let (number, size) = (piece.address(DType::I32)?, from.first().map_or(0, |from| from.len()));
        let from = from.iter().map(|from| floats(from, size, "new values")).collect::<Result<Vec<_>>>()?;
        let next = next.address(DType::I32)?;
        let mut groups = together(self, others)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid. They have one length.
        unsafe { general::scatter(&mut groups, bindings, number, &from, size, next, Stream::of(stream)) }
    }

    fn drop_committed(&mut self) {
        self.drop_alone();
    }

    fn set_binding(&mut self, binding: Binding) -> Result<()> {
        self.set_mode(&binding)?;
        self.binding = Some(binding);
        self.pushes_without_optimizer = 0;
        Ok(())
    }

    fn binding(&self) -> Option<&Binding> {
        self.binding.as_ref()
    }

    fn pending_pushes(&mut self, wait: bool) -> Result<usize> {
        if wait {
            self.settle()?;
        }
        Ok(self.ring.len())
    }

    fn step_bytes(&self) -> usize {
        let combined = self.combined.iter().flat_map(|combined| &combined.lookups);
        let lookups = absent::distinct(self.lookups.iter().chain(combined));
        let lookups = lookups.iter().map(|lookup| lookup.saved.memory.num_bytes());
        let sums = self.ring.iter().flat_map(|p| p.sums.iter().chain(&p.copy)).map(Buffer::num_bytes);
        let combined = self.combined.iter().map(|c| c.saved.memory.num_bytes() + c.sums.num_bytes());
        let sweeps = self.sweep_memory.num_bytes();
        lookups.chain(sums).chain(combined).sum::<usize>() + self.workspace.num_bytes() + sweeps
    }

    fn measure(&mut self, is_on: bool) {
        self.workspace.profiler.switch(is_on);
    }

    fn is_measured(&self) -> bool {
        self.workspace.profiler.is_on()
    }

    fn take_profile(&mut self) -> Result<Profile> {
        self.workspace.device.synchronize()?;
        self.workspace.profiler.take()
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        let take = |t: &mut GpuTable| (t.config.name.clone(), std::mem::take(&mut t.refused_to_warn));
        self.tables.iter_mut().map(take).filter(|(_, refused)| *refused > 0).collect()
    }

    fn take_failure(&mut self) -> Option<Error> {
        let waited = self.workspace.device.synchronize();
        waited.and_then(|()| self.settle()).err().or_else(|| self.take_fault())
    }
}

/// Returns the features of a lookup with the addresses of their tensors, and the address that takes its number, if the device has it.
pub(super) fn lookup_arguments<'a>(
    group: &AnyGroup,
    features: &[FeatureTensors<'a>],
    number: &TensorMut,
    rows: &[TensorMut],
) -> Result<(Vec<Feature<'a>>, Option<u64>)> {
    features.iter().try_for_each(|feature| check_memory(group, feature.ids.memory()))?;
    let array_type = array_type(rows.first().map(TensorMut::dtype))?;
    let features = features.iter().zip(rows).map(|(tensors, rows)| {
        let rows = rows.address(DType::of(array_type))?;
        Ok(Feature { rows, array_type, ..feature_of(tensors)? })
    });
    let to = match number.memory() {
        Memory::Device => Some(number.address(DType::I32)?),
        Memory::Host => None,
    };
    Ok((features.collect::<Result<_>>()?, to))
}

/// Returns the features of a lookup without memory for rows.
pub(super) fn ids_of<'a>(group: &AnyGroup, features: &[FeatureTensors<'a>]) -> Result<Vec<Feature<'a>>> {
    features.iter().try_for_each(|feature| check_memory(group, feature.ids.memory()))?;
    features.iter().map(feature_of).collect()
}

/// The addresses of the tensors of a commit.
pub(super) struct CommitArguments {
    /// Whether the step is an update, if the optimizer accumulates.
    pub is_update: Option<u64>,
    pub tickets: Vec<u64>,
    pub norm: u64,
}

pub(super) fn commit_arguments(group: &AnyGroup, commit: &Commit) -> Result<CommitArguments> {
    check_memory(group, commit.is_update.memory())?;
    let is_update = floats(commit.is_update, 1, "`is_update`")?;
    let tickets = commit.tickets.iter().map(|ticket| floats(ticket, TICKET_LEN, "a ticket"));
    Ok(CommitArguments {
        is_update: commit.accumulates.then_some(is_update),
        tickets: tickets.collect::<Result<_>>()?,
        norm: commit.norm.address(DType::F32)?,
    })
}

/// Returns the address of a tensor of `len` floats. The length is checked here, since kernels do not check it.
fn floats(tensor: &Tensor, len: usize, what: &str) -> Result<u64> {
    if tensor.len() != len {
        return Err(Error::argument(format!("{what} must be {len} numbers. Received: {}", tensor.len())));
    }
    tensor.address(DType::F32)
}

/// Returns the type of the numbers of rows or gradients, all of which have it.
fn array_type(of_first: Option<DType>) -> Result<RowType> {
    let Some(dtype) = of_first else { return Ok(RowType::Float32) };
    dtype
        .row_type()
        .ok_or_else(|| Error::argument(format!("rows must be floats. Received: {}", dtype.name())))
}

/// Returns a feature with the addresses of its tensors, without memory for rows.
fn feature_of<'a>(tensors: &FeatureTensors<'a>) -> Result<Feature<'a>> {
    let FeatureTensors { name, table, combiner, padding_key, ids, .. } = *tensors;
    if let Some(high) = tensors.high.filter(|high| high.len() != ids.len()) {
        return Err(Error::argument(format!(
            "feature `{name}`: {} low words and {} high words",
            ids.len(),
            high.len()
        )));
    }
    let high = tensors.high.map(|high| high.address(DType::I32)).transpose()?;
    let key_type = match ids.dtype() {
        DType::I32 if high.is_some() => KeyType::Words,
        DType::I32 => KeyType::Signed,
        DType::U32 => KeyType::Unsigned,
        DType::I64 | DType::U64 => KeyType::Wide,
        other @ (DType::F16 | DType::BF16 | DType::F32) => {
            return Err(Error::argument(format!("ids must be integers. Received: {}", other.name())));
        }
    };
    let ids_of =
        Ids { address: ids.address(ids.dtype())?, high: high.unwrap_or(0), key_type, len: ids.len() };
    let bags = match tensors.bags {
        BagTensors::Each => Bags::Each,
        BagTensors::Fixed { num_bags, hotness } => Bags::Fixed { num_bags, hotness },
        BagTensors::Ragged(splits) => {
            let wide = splits.dtype() == DType::I64;
            let num_bags = splits.len().saturating_sub(1);
            let splits = splits.address(if wide { DType::I64 } else { DType::I32 })?;
            Bags::Ragged { splits, wide, num_bags }
        }
    };
    let what = || format!("the weights of feature `{name}`");
    let weights = tensors.weights.map(|weights| floats(weights, ids.len(), &what())).transpose()?;
    Ok(Feature {
        name,
        table,
        ids: ids_of,
        bags,
        combiner,
        weights,
        padding_key,
        is_silent: false,
        at_owner: false,
        id_counts: 0,
        scores: tensors.scores.map(|scores| scores_of(name, scores, ids.len())).transpose()?,
        rows: 0,
        array_type: RowType::Float32,
    })
}

fn scores_of(feature: &str, scores: &Tensor, num_ids: usize) -> Result<Scores> {
    if scores.len() != num_ids {
        return Err(Error::argument(format!(
            "feature `{feature}`: `scores` must hold one number an id. Received: {} scores for {num_ids} ids",
            scores.len()
        )));
    }
    let score_type = if scores.dtype() == DType::I32 { ScoreType::Narrow } else { ScoreType::Wide };
    let dtype = if scores.dtype() == DType::I32 { DType::I32 } else { DType::I64 };
    Ok(Scores { address: scores.address(dtype)?, score_type })
}

/// Address of the scalars of an apply, four for each optimizer.
fn scalar_rows(scalars: &Tensor, bindings: &[Binding]) -> Result<u64> {
    let num_rows = scalars.len() / 4;
    bindings.iter().try_for_each(|binding| binding.check_rows(num_rows))?;
    floats(scalars, 4 * num_rows.max(1), "the scalars of a step")
}
