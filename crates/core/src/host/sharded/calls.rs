//! The four calls on the tensors of a framework.

use super::commit::commit;
use super::group::ShardedGroup;
use crate::contract::batch::Feature;
use crate::contract::binding::Binding;
use crate::contract::general::{Gather, Scatter};
use crate::contract::group::{
    AnyGroup, Apply, Commit, FeatureTensors, GradientTensors, Group, WeightGradient, check_memory,
    lookup_number, parts_together, together, write_lookup_number,
};
use crate::contract::profile::Profile;
use crate::contract::table::{Insertion, Table};
use crate::contract::tensor::{Memory, StreamHandle, Tensor, TensorMut};
use crate::error::Result;
use crate::exchange::buckets::Owners;
use crate::host::arrays::{FloatGradients, with_float_rows};
use crate::host::group::calls::feature_of;
use crate::host::push::{OutputGradients, PushedGradients};
use crate::pool;
use crate::store::region::Region;

impl Group for ShardedGroup {
    fn memory(&self) -> Memory {
        Memory::Host
    }

    fn num_tables(&self) -> usize {
        self.shard.num_tables()
    }

    fn settle_tables(&mut self) {
        self.shard.settle_tables();
    }

    fn table(&self, number: usize) -> &dyn Table {
        self.shard.table(number)
    }

    fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        self.shard.table_mut(number)
    }

    fn tables_mut(&mut self) -> Vec<&mut dyn Table> {
        self.shard.tables_mut()
    }

    fn owners(&self, number: usize) -> Option<Owners> {
        self.requests.get(number).map(|requests| requests.owners)
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
        let features = features.iter().map(feature_of).collect::<Result<Vec<Feature>>>()?;
        let pool = pool::global()?;
        let looked_up = with_float_rows(&mut rows, &pool, |rows| {
            ShardedGroup::lookup(self, &features, insertion, save, rows, &pool)
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
        ShardedGroup::push(self, number, gradients, weights, ticket.slice_mut()?, &pool)
    }

    fn commit(&mut self, others: Vec<&mut AnyGroup>, to_commit: Commit<'_>) -> Result<()> {
        let Commit { bindings, is_update, tickets, mut norm, .. } = to_commit;
        check_memory(self, is_update.memory())?;
        let mut groups = together(self, others)?;
        let is_update = is_update.slice::<f32>()?.first().is_some_and(|&is_update| is_update != 0.0);
        let tickets = tickets.iter().map(|ticket| ticket.slice()).collect::<Result<Vec<_>>>()?;
        let total = commit(&mut groups, bindings, &tickets, is_update, &*pool::global()?)?;
        norm.slice_mut::<f32>()?[0] = total as f32;
        Ok(())
    }

    fn apply(&mut self, others: Vec<&mut AnyGroup>, apply: Apply<'_>) -> Result<()> {
        let (first, others) = parts_together(self, others, |group| &mut group.shard)?;
        Group::apply(first, others, apply)
    }

    fn gather(&mut self, others: Vec<&mut AnyGroup>, gather: Gather<'_>) -> Result<()> {
        let (first, others) = parts_together(self, others, |group| &mut group.shard)?;
        Group::gather(first, others, gather)
    }

    fn scatter(&mut self, others: Vec<&mut AnyGroup>, scatter: Scatter<'_>) -> Result<()> {
        let (first, others) = parts_together(self, others, |group| &mut group.shard)?;
        Group::scatter(first, others, scatter)
    }

    fn drop_committed(&mut self) {
        self.shard.drop_committed();
    }

    fn set_binding(&mut self, binding: Binding) -> Result<()> {
        self.pushes_without_optimizer = 0;
        self.shard.set_binding(binding)
    }

    fn binding(&self) -> Option<&Binding> {
        self.shard.binding()
    }

    fn pending_pushes(&mut self, _wait: bool) -> Result<usize> {
        Ok(self.ring.len())
    }

    fn step_bytes(&self) -> usize {
        let tables = || self.lookups.iter().flat_map(|lookup| lookup.saved.tables.iter().zip(&lookup.tables));
        let looked = tables().map(|(saved, sent)| {
            saved.looked.num_bytes() + sent.rows.as_ref().map_or(0, |rows| rows.num_bytes())
        });
        let pooled = self.lookups.iter().flat_map(|lookup| &lookup.pooled).flat_map(|lookup| &lookup.tables);
        let pooled = pooled.map(|saved| saved.looked.num_bytes());
        let merged = self.ring.iter().map(|push| match &push.gradients {
            PushedGradients::Merged(tables) => tables.iter().flatten().map(Region::num_bytes).sum(),
            PushedGradients::Held { .. } => 0,
        });
        let requests = self.requests.iter().map(|requests| requests.num_bytes());
        let spare = self.spare.iter().map(|spare| spare.num_bytes());
        looked.chain(pooled).chain(merged).chain(requests).chain(spare).sum::<usize>()
            + self.shard.step_bytes()
    }

    fn measure(&mut self, is_on: bool) {
        self.shard.measure(is_on);
    }

    fn is_measured(&self) -> bool {
        self.shard.is_measured()
    }

    fn take_profile(&mut self) -> Result<Profile> {
        self.shard.take_profile()
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        self.shard.take_refused()
    }
}
