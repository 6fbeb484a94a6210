//! The four calls on the tensors of a framework.

#![allow(unsafe_code)]

use sok_core::contract::binding::{Binding, UpdateMode};
use sok_core::contract::general::{Gather, Scatter};
use sok_core::contract::gradients::Keep;
use sok_core::contract::group::{
    AnyGroup, Apply, Commit, FeatureTensors, GradientTensors, Group, WeightGradient, parts_together,
    together, write_lookup_number,
};
use sok_core::contract::profile::Profile;
use sok_core::contract::table::{Insertion, Table};
use sok_core::contract::tensor::{Memory, StreamHandle, Tensor, TensorMut};
use sok_core::error::{Error, Result};
use sok_core::exchange::buckets::Owners;

use super::ShardedGpuGroup;
use super::at_owner::PooledBags;
use super::commit::commit;
use crate::device::Stream;
use crate::gpu_group::calls::{CommitArguments, commit_arguments, ids_of, lookup_arguments};
use crate::step::Workspace;

impl Group for ShardedGpuGroup {
    fn memory(&self) -> Memory {
        Memory::Device
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
        self.owners.get(number).copied()
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
            unsafe { ShardedGpuGroup::lookup(self, &features, insertion, save, to, Stream::of(stream)) }?;
        if to.is_none() { write_lookup_number(looked_up, &mut number) } else { Ok(()) }
    }

    fn prefetch(
        &mut self,
        features: &[FeatureTensors<'_>],
        keep: Keep,
        stream: Option<StreamHandle>,
    ) -> Result<()> {
        let features = ids_of(self, features)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid until `keep` is dropped.
        unsafe { ShardedGpuGroup::prefetch(self, &features, keep, stream.map(Stream::of)) }
    }

    fn push(
        &mut self,
        number: &Tensor,
        gradients: GradientTensors<'_>,
        weight_gradients: Vec<WeightGradient>,
        ticket: TensorMut,
        stream: StreamHandle,
    ) -> Result<()> {
        self.follow_generations();
        Group::push(&mut self.front, number, gradients, weight_gradients, ticket, stream)
    }

    fn commit(&mut self, others: Vec<&mut AnyGroup>, to_commit: Commit<'_>) -> Result<()> {
        let CommitArguments { is_update, tickets, norm } = commit_arguments(self, &to_commit)?;
        let stream = Stream::of(to_commit.stream);
        let mut groups = together(self, others)?;
        // SAFETY: Whoever created the tensors guarantees that their memory is valid. Their lengths are checked above.
        unsafe { commit(&mut groups, to_commit.bindings, &tickets, is_update, norm, stream) }
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
        self.shard.set_binding(binding.clone())?;
        // It has no rows.
        self.front.set_binding(Binding { mode: UpdateMode::Local, ..binding })
    }

    fn binding(&self) -> Option<&Binding> {
        self.shard.binding()
    }

    fn pending_pushes(&mut self, wait: bool) -> Result<usize> {
        self.front.pending_pushes(wait)
    }

    fn step_bytes(&self) -> usize {
        let windows = self.front.windows.as_ref().map_or(0, |windows| windows.num_bytes());
        self.front.step_bytes()
            + self.shard.step_bytes()
            + self.asking.num_bytes()
            + self.ahead.num_bytes()
            + self.lending.num_bytes()
            + self.pooling.as_ref().map_or(0, Workspace::num_bytes)
            + self
                .served
                .iter()
                .filter_map(|served| served.pooled.as_ref())
                .map(PooledBags::num_bytes)
                .sum::<usize>()
            + windows
    }

    fn measure(&mut self, is_on: bool) {
        self.front.measure(is_on);
        self.shard.measure(is_on);
        self.pooling.iter_mut().for_each(|pooling| pooling.profiler.switch(is_on));
    }

    fn is_measured(&self) -> bool {
        self.shard.is_measured()
    }

    fn take_profile(&mut self) -> Result<Profile> {
        let mut profile = self.front.take_profile()?;
        profile.add_all(&self.shard.take_profile()?);
        if let Some(pooling) = &mut self.pooling {
            profile.add_all(&pooling.profiler.take()?);
        }
        Ok(profile)
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        self.shard.take_refused()
    }

    fn take_failure(&mut self) -> Option<Error> {
        let waited = self.shard.device().synchronize();
        let of_groups = waited.and_then(|()| self.settle()).err();
        self.peers.take_failure().or(of_groups).or_else(|| self.take_fault())
    }
}
