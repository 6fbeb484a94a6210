//! Bags of a localized table that its owner pools for another rank, where pooled bags are fewer bytes than rows.
//!
//! The rank that asks makes its ids distinct as always, and gives each the number of its row. The owner finds the records of the distinct
//! keys, and does by these numbers what the other rank would do with the rows: it pools the bags, and in a commit merges their gradients.
//! The order of additions is the same, so the results have the same bits.

#![allow(unsafe_code)]

use sok_core::error::Result;
use sok_core::exchange::buckets::Owners;
use sok_core::row_type::RowType;

use super::layout::{GradientLayout, LookupLayout, row_bytes};
use super::lent::Lent;
use super::request::RankRequest;
use super::{Served, ShardedGpuGroup};
use crate::abi::{NumberCopy, PooledFeature};
use crate::device::Stream;
use crate::memory::{Buffer, Shared};
use crate::step::{
    Bags, Feature, LookupOptions, NumberCopyKind, PooledGradients, RowSource, Saved, Workspace, shares_splits,
};

/// Numbers of bags and ids of the features of a table.
#[derive(Clone, Copy, Default)]
struct BagCounts {
    num_bags: usize,
    num_ids: usize,
}

impl BagCounts {
    /// Whether pooled bags are fewer bytes than rows. `distinct`: likely number of distinct keys. `passes`: how often rows or gradients
    /// travel.
    fn pays(self, row_bytes: usize, distinct: usize, passes: usize) -> bool {
        let of_numbers = size_of::<u32>() * (self.num_ids + self.num_bags);
        passes * row_bytes * self.num_bags + of_numbers < passes * row_bytes * distinct
    }
}

/// The features of other ranks whose bags this rank pools.
#[derive(Default)]
struct BagsToPool {
    features: Vec<Feature<'static>>,
    /// By feature: address and number of its row splits, in the window of the other rank.
    splits: Vec<(u64, usize)>,
    pooled: Vec<PooledFeature>,
    of_ranks: Vec<OfRank>,
}

/// Returns the bags to pool. `features`: as `pool_for_ranks` takes them.
fn bags_to_pool(requests: &[RankRequest], features: &[(usize, usize)], first_keys: &FirstKeys) -> BagsToPool {
    let mut all = BagsToPool::default();
    let mut num_rows = vec![0; requests.first().map_or(0, |request| request.tables.len())];
    for (number, &(table, rank)) in features.iter().enumerate() {
        let (request, places) = (&requests[rank].tables[table], &requests[rank].pooled[table]);
        if !request.is_pooled() {
            continue;
        }
        let (first_row, num_ids) = (num_rows[table], request.num_ids);
        num_rows[table] += num_ids;
        let (first_key, known_first_key) = match first_keys {
            FirstKeys::OnDevice(address) => (address + 4 * number as u64, 0),
            FirstKeys::Known(places) => (0, places[number] as u32),
        };
        let (mut ids, mut numbers) = (places.ids, places.numbers);
        for (index, asked) in request.bags.iter().enumerate() {
            let (splits, rows) = places.features[index];
            all.splits.push((splits, asked.num_splits()));
            all.features.push(asked.feature(table, [ids, 0, rows]));
            all.pooled.push(PooledFeature {
                numbers,
                first_key,
                known_first_key,
                first_row: first_row as u32,
            });
            all.of_ranks.push(OfRank { rank, table, index, first_row, num_ids });
            ids += 8 * asked.num_ids as u64;
            numbers += 4 * asked.num_ids as u64;
        }
    }
    all
}

/// Bags that this rank has pooled for others in a lookup.
pub(super) struct PooledBags {
    saved: Saved,
    features: Vec<OfRank>,
}

/// A feature of another rank.
struct OfRank {
    rank: usize,
    table: usize,
    /// Its index among the features of the table that are pooled for the rank.
    index: usize,
    /// As `PooledFeature::first_row`.
    first_row: usize,
    /// Number of ids of the table in the rank.
    num_ids: usize,
}

impl PooledBags {
    pub fn num_bytes(&self) -> usize {
        self.saved.memory.num_bytes()
    }

    /// Memory of the lookup, for later ones.
    pub fn into_memory(self) -> Buffer<u32> {
        self.saved.memory
    }
}

/// The merge of pooled bags in a commit.
pub(super) struct PooledMerge {
    /// Number of the lookup.
    lookup: u64,
    copies: Vec<NumberCopy>,
    /// By feature.
    gradients: Vec<PooledGradients>,
}

impl ShardedGpuGroup {
    /// Marks the features of a call that the owners of their tables pool.
    ///
    /// Which these are is a question of speed alone. The numbers of distinct keys are those of the last calls that the device has reported.
    pub(super) fn choose_at_owner(&self, features: &mut [Feature], save: bool) {
        if self.peers.nccl().is_some() {
            return;
        }
        let mut asked = vec![Some(BagCounts::default()); self.owners.len()];
        for feature in features.iter() {
            let of_table = &mut asked[feature.table];
            if feature.weights.is_some() {
                *of_table = None;
            }
            if let Some(asked) = of_table {
                asked.num_bags += feature.num_bags();
                asked.num_ids += feature.ids.len;
            }
        }
        let is_pooled = |(table, (owners, asked)): (usize, (&Owners, Option<BagCounts>))| {
            let distinct = |ids| likely_distinct(&self.distinct, table, ids);
            let row_bytes = row_bytes(&self.shard.tables[table]);
            let passes = 1 + usize::from(save);
            owners.is_elsewhere()
                && asked.is_some_and(|asked| asked.pays(row_bytes, distinct(asked.num_ids), passes))
        };
        let is_pooled: Vec<bool> = self.owners.iter().zip(asked).enumerate().map(is_pooled).collect();
        features.iter_mut().for_each(|feature| feature.at_owner = is_pooled[feature.table]);
    }

    /// By feature: the address that takes its row splits for the owner of its table.
    pub(super) fn splits_to(features: &[Feature], layout: &LookupLayout, window: u64) -> Vec<u64> {
        let mut to = vec![0; features.len()];
        for (number, feature, (splits, _)) in pooled_places(features, layout) {
            if shares_splits(feature) {
                to[number] = window + splits as u64;
            }
        }
        to
    }

    /// Enqueues copying the rows that owners have pooled from the window of a lookup to the outputs.
    pub(super) fn take_pooled_rows(
        &mut self,
        features: &[Feature],
        layout: &LookupLayout,
        window: u64,
        stream: Stream,
    ) -> Result<()> {
        let mut copies = Vec::new();
        for (_, feature, (_, rows)) in pooled_places(features, layout) {
            let count = (feature.num_bags() * self.front.tables[feature.table].config.dim) as u64;
            if feature.rows != 0 {
                copies.push(NumberCopy { from: window + rows as u64, to: feature.rows, count });
            }
        }
        let array_type = features.first().map_or(RowType::Float32, |feature| feature.array_type);
        self.front.workspace.copy_all(&copies, NumberCopyKind::Narrow(array_type), stream)
    }

    /// Enqueues pooling the bags that other ranks ask for. The shard has looked up their keys. `features`: by table and rank, those of the
    /// shard's lookup, without those of ids of weight 0, which no bag has that is pooled here. Returns what a commit needs, with `save`.
    pub(super) fn pool_for_ranks(
        &mut self,
        requests: &[RankRequest],
        features: &[(usize, usize)],
        first_keys: &FirstKeys,
        save: bool,
        stream: Stream,
    ) -> Result<Option<PooledBags>> {
        let BagsToPool { mut features, splits, pooled, of_ranks } =
            bags_to_pool(requests, features, first_keys);
        if features.is_empty() {
            return Ok(None);
        }
        self.enter_pooling(stream)?;
        let near = self.fetch_splits(&splits, &mut features, stream)?;
        let Self { shard, pooling, .. } = self;
        let pooling = pooling.as_mut().expect("made above");
        // The lookup may have moved a table to larger memory. The workspace of the shard is the one that has the descriptors.
        shard.workspace.describe(&mut shard.tables, stream)?;
        let inserts = vec![false; shard.tables.len()];
        let rows = RowSource::NumberedRecords;
        let options = LookupOptions { inserts: &inserts, absent: &[], save, number: None, rows };
        let mut started = pooling.start(&mut shard.tables, &features, options, stream)?;
        let records = shard.workspace.found_records();
        pooling.number_pooled(&shard.workspace, &mut started, &pooled, records, stream)?;
        pooling.sort_ids(&started, stream)?;
        pooling.write_rows(&started, &features, stream)?;
        let saved = pooling.end(started, &shard.tables, &features);
        pooling.give_back(near);
        Ok(saved.map(|saved| PooledBags { saved, features: of_ranks }))
    }

    /// Whether this rank has pooled bags for others.
    pub fn has_pooled(&self) -> bool {
        self.pooling.is_some()
    }

    /// Makes the workspace in which bags are pooled, and selects its stream.
    fn enter_pooling(&mut self, stream: Stream) -> Result<()> {
        if self.pooling.is_none() {
            let mut pooling = Workspace::new(&self.shard.workspace.device, &self.shard.tables)?;
            pooling.profiler.switch(self.shard.workspace.profiler.is_on());
            self.pooling = Some(pooling);
        }
        self.pooling.as_mut().expect("made above").enter(stream)
    }

    /// Enqueues copying row splits from other ranks, since a search reads them many times. Returns the memory of the copies.
    fn fetch_splits(
        &mut self,
        splits: &[(u64, usize)],
        bags: &mut [Feature],
        stream: Stream,
    ) -> Result<Buffer<u32>> {
        let pooling = self.pooling.as_mut().expect("entered before");
        let num_words: usize = splits.iter().map(|(_, count)| count.next_multiple_of(4)).sum();
        let near = pooling.take_memory(num_words.max(1))?;
        let (mut to, mut copies) = (near.address(), Vec::new());
        for (&(from, count), feature) in splits.iter().zip(bags) {
            if let Bags::Ragged { splits, .. } = &mut feature.bags {
                *splits = to;
            }
            if count > 0 {
                copies.push(NumberCopy { from, to, count: count as u64 });
            }
            to += 4 * count.next_multiple_of(4) as u64;
        }
        pooling.copy_all(&copies, NumberCopyKind::Words, stream)?;
        Ok(near)
    }

    /// Returns the merge of the bags that were pooled in a lookup, if any were, and its memory. Enters in `firsts` where the sums go, by
    /// rank and table. `windows`: by rank, the address of its gradients, which `layouts` place there.
    pub(super) fn pooled_merge(
        &self,
        served: &Served,
        layouts: &[GradientLayout],
        windows: &[u64],
        firsts: &mut [Vec<u64>],
    ) -> Result<Option<(PooledMerge, Lent)>> {
        let Some(bags) = &served.pooled else { return Ok(None) };
        let tables = &self.shard.tables;
        let mut num_rows = vec![0; tables.len()];
        bags.features.iter().for_each(|of| num_rows[of.table] = of.first_row + of.num_ids);
        let sum_words: Vec<usize> =
            tables.iter().zip(&num_rows).map(|(table, rows)| row_bytes(table) / 4 * rows).collect();
        let floats = |of: &OfRank| {
            let bags = &served.requests[of.rank][of.table].bags[of.index];
            bags.num_bags * tables[of.table].config.dim
        };
        let gradient_words: usize = bags.features.iter().map(|of| floats(of).next_multiple_of(4)).sum();
        let memory =
            self.lending.lend(self.peers.context(), sum_words.iter().sum::<usize>() + gradient_words)?;
        let mut at = memory.address();
        let mut take = |words: usize| {
            at += 4 * words as u64;
            at - 4 * words as u64
        };
        let sums: Vec<u64> = sum_words.into_iter().map(&mut take).collect();
        let (mut copies, mut gradients) = (Vec::new(), Vec::new());
        for of in &bags.features {
            let place = layouts[of.rank].bags[of.table][of.index] as u64;
            let to = take(floats(of).next_multiple_of(4));
            copies.push(NumberCopy { from: windows[of.rank] + place, to, count: floats(of) as u64 });
            gradients.push(PooledGradients { bags: to, sums: sums[of.table] });
            firsts[of.rank][of.table] = sums[of.table] + (of.first_row * row_bytes(&tables[of.table])) as u64;
        }
        Ok(Some((PooledMerge { lookup: served.number, copies, gradients }, memory)))
    }

    /// Enqueues merging the gradients of pooled bags, which all ranks have written by now.
    pub(super) fn merge_pooled(&mut self, merge: &PooledMerge, stream: Stream) -> Result<()> {
        self.enter_pooling(stream)?;
        let Self { shard, pooling, served, .. } = self;
        let served = served.iter().find(|served| served.number == merge.lookup);
        let bags = served.and_then(|served| served.pooled.as_ref()).expect("the merge is of these bags");
        let pooling = pooling.as_mut().expect("made above");
        pooling.copy_all(&merge.copies, NumberCopyKind::Words, stream)?;
        pooling.merge_pooled(&shard.tables, &bags.saved, &merge.gradients, stream)
    }
}

/// Returns the features that owners pool: the number of each, and the places of its row splits and pooled rows in the window.
fn pooled_places<'a, 'b>(
    features: &'a [Feature<'b>],
    layout: &'a LookupLayout,
) -> impl Iterator<Item = (usize, &'a Feature<'b>, (usize, usize))> {
    let mut next: Vec<_> = layout.pooled.iter().map(|places| places.features.iter()).collect();
    let pooled = features.iter().enumerate().filter(|(_, feature)| feature.at_owner);
    pooled.map(move |(number, feature)| {
        let places = next[feature.table].next().expect("the layout has places for each feature");
        (number, feature, *places)
    })
}

/// Where the first key of each feature of a lookup is among all keys.
pub(super) enum FirstKeys {
    /// Address of the places.
    OnDevice(u64),
    /// The places.
    Known(Vec<usize>),
}

/// Returns how many of a table's ids are likely to be distinct. `reported`: see `KeysTo::distinct`.
fn likely_distinct(reported: &Shared, table: usize, num_ids: usize) -> usize {
    let report = reported.get_wide(2 * table);
    let (distinct, of_ids) = ((report >> 32) as usize, report as u32 as usize);
    // Before the first report, each id is taken for another one.
    (num_ids * distinct).checked_div(of_ids).unwrap_or(num_ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bags_are_pooled_at_the_owner_where_that_is_fewer_bytes() {
        let asked = BagCounts { num_bags: 10, num_ids: 1000 };
        assert!(asked.pays(256, 900, 2));
        assert!(!asked.pays(256, 10, 2), "as many rows as bags");
        assert!(!asked.pays(16, 200, 1), "the numbers of rows are more bytes than the rows");
        assert!(asked.pays(16, 300, 1));
    }
}
