//! The four calls on the tensors of a framework.

use super::{ApplyScalars, HostGroup, general};
use crate::contract::batch::{Bags, Feature, Keys, Scores, Splits};
use crate::contract::binding::Binding;
use crate::contract::general::{Gather, Scatter};
use crate::contract::group::{
    AnyGroup, Apply, BagTensors, Commit, FeatureTensors, GradientTensors, Group, WeightGradient,
    check_memory, lookup_number, together, write_lookup_number, write_trigger,
};
use crate::contract::profile::Profile;
use crate::contract::table::{Insertion, Table};
use crate::contract::tensor::{DType, Memory, StreamHandle, Tensor, TensorMut};
use crate::error::{Error, Result};
use crate::host::accumulator::Accumulator;
use crate::host::arrays::{FloatGradients, with_float_rows};
use crate::host::push::{OutputGradients, PushedGradients, Spare};
use crate::host::table::HostTable;
use crate::pool;
use crate::store::region::Region;

impl Group for HostGroup {
    fn memory(&self) -> Memory {
        Memory::Host
    }

    fn num_tables(&self) -> usize {
        self.tables.len()
    }

    fn settle_tables(&mut self) {
        self.catch_up_tables();
    }

    fn table(&self, number: usize) -> &dyn Table {
        &self.tables[number]
    }

    fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        self.catch_up_tables();
        &mut self.tables[number]
    }

    fn tables_mut(&mut self) -> Vec<&mut dyn Table> {
        self.catch_up_tables();
        self.tables.iter_mut().map(|table| table as &mut dyn Table).collect()
    }

    fn lookup(
        &mut self,
        features: &[FeatureTensors<'_>],
        insertion: Insertion,
        save: bool,
        mut number: TensorMut,
        mut rows: Vec<TensorMut>,
        _stream: StreamHandle,
    ) -> Result<()> {
        features.iter().try_for_each(|feature| check_memory(self, feature.ids.memory()))?;
        let features = features.iter().map(feature_of).collect::<Result<Vec<_>>>()?;
        let pool = pool::global()?;
        let looked_up = with_float_rows(&mut rows, &pool, |rows| {
            HostGroup::lookup(self, &features, insertion, save, rows, &pool)
        })?;
        write_lookup_number(looked_up, &mut number)
    }

    fn push(
        &mut self,
        number: &Tensor,
        gradients: GradientTensors<'_>,
        mut weight_gradients: Vec<WeightGradient>,
        mut ticket: TensorMut,
        _stream: StreamHandle,
    ) -> Result<()> {
        check_memory(self, number.memory())?;
        let number = lookup_number(self, number)?;
        let GradientTensors { rows, keep, check_finite } = gradients;
        let pool = pool::global()?;
        let FloatGradients { rows, keep, wide: _wide } = FloatGradients::of(&rows, keep, &pool)?;
        let weights = weight_gradients.iter_mut().map(|w| w.to.slice_mut()).collect::<Result<Vec<_>>>()?;
        let gradients = OutputGradients { rows, keep, check_finite };
        HostGroup::push(self, number, gradients, weights, ticket.slice_mut()?, &pool).map(drop)
    }

    fn commit(&mut self, others: Vec<&mut AnyGroup>, commit: Commit<'_>) -> Result<()> {
        check_memory(self, commit.is_update.memory())?;
        let mut groups = together(self, others)?;
        let committed = commit_groups(&mut groups, commit);
        committed.inspect_err(|_| groups.iter().for_each(|group| group.abandon_steps()))
    }

    fn apply(&mut self, others: Vec<&mut AnyGroup>, apply: Apply<'_>) -> Result<()> {
        check_memory(self, apply.scalars.memory())?;
        let mut groups = together(self, others)?;
        let scalars = ApplyScalars::read(apply.scalars)?;
        let mut checked = groups.iter().zip(apply.bindings);
        if let Err(error) = checked.try_for_each(|(group, binding)| group.check_owner(binding)) {
            groups.iter_mut().for_each(|group| group.drop_committed());
            return Err(error);
        }
        for (trigger, mut new) in apply.triggers {
            write_trigger(trigger, &mut new)?;
        }
        let pool = pool::global()?;
        let mut groups = groups.iter_mut().zip(apply.bindings);
        groups.try_for_each(|(group, binding)| HostGroup::apply(group, binding, &scalars, &pool))
    }

    fn gather(&mut self, others: Vec<&mut AnyGroup>, gather: Gather<'_>) -> Result<()> {
        check_memory(self, gather.scalars.memory())?;
        general::gather(&mut together(self, others)?, gather, &*pool::global()?)
    }

    fn scatter(&mut self, others: Vec<&mut AnyGroup>, scatter: Scatter<'_>) -> Result<()> {
        check_memory(self, scatter.piece.memory())?;
        general::scatter(&mut together(self, others)?, scatter)
    }

    fn drop_committed(&mut self) {
        self.new_values.forget();
        std::mem::take(&mut self.committed).into_iter().for_each(|(_, push)| self.reuse(push));
        self.settle_commits();
    }

    fn set_binding(&mut self, binding: Binding) -> Result<()> {
        for table in &mut self.tables {
            table.set_mode(binding.mode, binding.update_of(&table.config))?;
        }
        self.binding = Some(binding);
        self.pushes_without_optimizer = 0;
        Ok(())
    }

    fn binding(&self) -> Option<&Binding> {
        self.binding.as_ref()
    }

    fn pending_pushes(&mut self, _wait: bool) -> Result<usize> {
        Ok(self.ring.len())
    }

    fn step_bytes(&self) -> usize {
        let pushes = || self.ring.iter().chain(self.committed.iter().map(|(_, push)| push));
        let looked = self.lookups.iter().flat_map(|l| &l.tables).map(|table| table.looked.num_bytes());
        let merged = pushes().map(|push| match &push.gradients {
            PushedGradients::Merged(tables) => tables.iter().flatten().map(Region::num_bytes).sum(),
            PushedGradients::Held { .. } => 0,
        });
        let accumulated = self.accumulators.iter().map(Accumulator::num_bytes);
        let spare = self.spare.iter().map(Spare::num_bytes);
        let scratch = self.split.num_bytes() + self.new_values.num_bytes();
        looked.chain(merged).chain(accumulated).chain(spare).sum::<usize>() + scratch
    }

    fn measure(&mut self, is_on: bool) {
        self.stopwatch.switch(is_on);
    }

    fn is_measured(&self) -> bool {
        self.stopwatch.is_on()
    }

    fn take_profile(&mut self) -> Result<Profile> {
        Ok(self.stopwatch.take())
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        let take = |t: &mut HostTable| (t.config.name.clone(), std::mem::take(&mut t.refused_to_warn));
        self.tables.iter_mut().map(take).filter(|(_, refused)| *refused > 0).collect()
    }
}

/// Commits groups of one optimizer.
fn commit_groups(groups: &mut [&mut HostGroup], commit: Commit) -> Result<()> {
    let Commit { bindings, is_update, tickets, mut norm, .. } = commit;
    let is_update = is_update.slice::<f32>()?.first().is_some_and(|&is_update| is_update != 0.0);
    let mut named = Vec::with_capacity(groups.len());
    for ((group, binding), ticket) in groups.iter().zip(bindings).zip(&tickets) {
        group.check_owner(binding)?;
        named.push(group.resolve(ticket.slice()?)?);
    }
    groups.iter().zip(&named).try_for_each(|(group, named)| group.check_absent(named))?;
    let pool = pool::global()?;
    let mut total = 0.0;
    for ((group, named), binding) in groups.iter_mut().zip(&named).zip(bindings) {
        group.take_over(binding)?;
        total += HostGroup::commit(group, named, is_update, &pool)?;
    }
    norm.slice_mut::<f32>()?[0] = total as f32;
    Ok(())
}

/// The tensors of a feature as slices.
pub(in crate::host) fn feature_of<'a>(tensors: &FeatureTensors<'a>) -> Result<Feature<'a>> {
    let keys = match tensors.high {
        Some(high) => Keys::Words { low: tensors.ids.slice()?, high: high.slice()? },
        None => keys_of(tensors.ids)?,
    };
    let bags = match tensors.bags {
        BagTensors::Each => Bags::Each,
        BagTensors::Fixed { num_bags, hotness } => Bags::Fixed { num_bags, hotness },
        BagTensors::Ragged(splits) if splits.dtype() == DType::I32 => {
            Bags::Ragged(Splits::I32(splits.slice()?))
        }
        BagTensors::Ragged(splits) => Bags::Ragged(Splits::I64(splits.slice()?)),
    };
    let FeatureTensors { name, table, combiner, padding_key, .. } = *tensors;
    let weights = tensors.weights.map(Tensor::slice).transpose()?;
    let scores = tensors.scores.map(scores_of).transpose()?;
    let feature =
        Feature { name, table, keys, bags, combiner, weights, padding_key, id_counts: None, scores };
    feature.validate()?;
    Ok(feature)
}

fn scores_of(scores: &Tensor) -> Result<Scores<'_>> {
    match scores.dtype() {
        DType::I32 => Ok(Scores::I32(scores.slice()?)),
        _ => Ok(Scores::I64(scores.slice()?)),
    }
}

fn keys_of(ids: &Tensor) -> Result<Keys<'_>> {
    Ok(match ids.dtype() {
        DType::I64 => Keys::I64(ids.slice()?),
        DType::U64 => Keys::U64(ids.slice()?),
        DType::I32 => Keys::I32(ids.slice()?),
        DType::U32 => Keys::U32(ids.slice()?),
        other @ (DType::F16 | DType::BF16 | DType::F32) => {
            return Err(Error::argument(format!("ids must be integers. Received: {}", other.name())));
        }
    })
}
