//! The lookup of a group, and the lookups that it remembers for pushes.

use std::sync::{Arc, Weak};

use super::HostGroup;
use crate::contract::batch::Feature;
use crate::contract::profile::StepPart;
use crate::contract::table::{Insertion, Outcomes, TableStats};
use crate::contract::ticket::RING;
use crate::error::{Error, Result};
use crate::host::accumulator::Accumulator;
use crate::host::features::{FeatureOutput, Mode, add_given_scores};
use crate::host::lookup::lookup_whole;
use crate::host::lookup_split::lookup_split;
use crate::host::push::{Push, PushedGradients, SavedLookup, SavedTable};
use crate::host::room::{check_vocabulary, lookup_with_room};
use crate::host::table::HostTable;
use crate::host::uses::give_scores;
use crate::memory;
use crate::pool::{FirstError, Pool, SMALL_CALL, run_if_large};

/// An output of more bytes is written with non-temporal stores.
const STREAM_BYTES: usize = 4 << 20;

impl HostGroup {
    /// Looks up the rows of all features of a layer's call. Returns the number of the lookup for `push`, or 0 without `save`.
    ///
    /// `insertion`: when keys without a row get one. A lookup without `save` inserts nothing at a commit. `outputs`: `(bags, dim)`
    /// for each feature; every element is written.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, [`Error::OutOfVocabulary`], [`Error::TableFull`], [`Error::Memory`].
    /// No table has changed then. The steps in progress have ended, unless `insertion` is `Never`.
    pub fn lookup(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        outputs: Vec<&mut [f32]>,
        pool: &Pool,
    ) -> Result<u64> {
        let ready = self.check_features(features, &outputs).and_then(|()| self.catch_up_rows(features, pool));
        let looked = ready.and_then(|()| {
            self.tables.iter_mut().for_each(HostTable::begin);
            let looked = self.look_up(features, insertion, save, outputs, pool);
            looked.inspect_err(|_| self.tables.iter_mut().for_each(HostTable::undo))
        });
        looked.inspect_err(|_| self.abandon_steps_after(insertion))
    }

    /// After a lookup that has failed: if it was one of training, ends the steps in progress.
    pub(in crate::host) fn abandon_steps_after(&self, insertion: Insertion) {
        if insertion != Insertion::Never {
            self.abandon_steps();
        }
    }

    /// Ends the steps in progress, since a call of one has failed: rows of their lookups may go from now on. Otherwise a table whose rows are
    /// all in use would refuse every later step. A gradient that still comes is taken for the rows that are there.
    pub(in crate::host) fn abandon_steps(&self) {
        let of_pushes = self.ring.iter().map(|push| &push.lookup);
        self.lookups.iter().chain(of_pushes).for_each(|lookup| lookup.set_open(false));
    }

    /// The counts of the tables, for `undo_lookup`.
    pub(in crate::host) fn stats_before_lookup(&self) -> Vec<TableStats> {
        self.tables.iter().map(|table| table.stats).collect()
    }

    /// Takes back the last call of `lookup`: the keys that it inserted, what it counted and, with `save`, what it saved. `before`: the
    /// counts of the tables before it.
    pub(in crate::host) fn undo_lookup(&mut self, before: &[TableStats], save: bool) {
        for (table, stats) in self.tables.iter_mut().zip(before) {
            table.undo();
            table.stats = *stats;
        }
        if save {
            self.next_lookup -= 1;
            self.lookups.pop_back().into_iter().for_each(|lookup| self.reuse_lookup(lookup));
        }
    }

    /// Does the work of `lookup`. If it fails, the journals of the tables say what was inserted.
    fn look_up(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        outputs: Vec<&mut [f32]>,
        pool: &Pool,
    ) -> Result<u64> {
        let stream = outputs.iter().map(|o| size_of_val(&**o)).sum::<usize>() > STREAM_BYTES;
        let mut by_table: Vec<Vec<FeatureOutput>> = self.tables.iter().map(|_| Vec::new()).collect();
        for (number, (feature, rows)) in features.iter().zip(outputs).enumerate() {
            by_table[feature.table].push(FeatureOutput { number, feature: *feature, rows });
        }
        let number = if save { self.next_lookup } else { 0 };
        let insertion = if save || insertion == Insertion::AtLookup { insertion } else { Insertion::Never };
        let start = self.stopwatch.start();
        let mode = Mode { insertion, save, stream };
        let mut looked = self.lookup_tables(by_table, mode, pool)?;
        self.tables.iter_mut().try_for_each(HostTable::start_new_rows)?;
        self.stopwatch.stop(StepPart::Find, start);
        let num_bags = memory::collect(features.iter().map(Feature::num_bags), "the features of a call")?;
        for SavedTable { number, looked, .. } in &looked {
            let table = &mut self.tables[*number];
            let outcomes = Outcomes { hit: if save { looked.outcomes.hit } else { 0 }, ..looked.outcomes };
            table.note(outcomes, if save { looked.absent_ids } else { 0 });
            if table.own_mode(mode).insertion == Insertion::Never {
                table.note_unknown(looked.absent_ids);
            }
            table.count_call();
        }
        if save {
            keep_id_counts(features, &mut looked)?;
            self.keep_scores(features, &mut looked)?;
            let saved = SavedLookup::new(number, num_bags, looked);
            saved.set_open(insertion != Insertion::Never);
            self.save(saved);
        } else {
            features.iter().for_each(|feature| self.tables[feature.table].count_inference(feature));
            self.give_inference_scores(features)?;
        }
        Ok(number)
    }

    pub(in crate::host) fn check_features(&self, features: &[Feature], outputs: &[&mut [f32]]) -> Result<()> {
        if features.len() != outputs.len() {
            let (features, outputs) = (features.len(), outputs.len());
            return Err(Error::argument(format!(
                "a lookup has an output a feature. Received: {outputs} for {features} features"
            )));
        }
        for (feature, output) in features.iter().zip(outputs) {
            feature.validate()?;
            let table = self
                .tables
                .get(feature.table)
                .ok_or_else(|| Error::argument("no such table in the group"))?;
            let expected = feature.num_bags() * table.config.dim;
            if output.len() != expected {
                let name = feature.name;
                return Err(Error::argument(format!(
                    "feature `{name}`: its output must hold {expected} numbers. Received: {}",
                    output.len()
                )));
            }
            check_vocabulary(table, feature)?;
            if feature.scores.is_some() {
                table.config.check_takes_scores(feature.name)?;
            }
        }
        Ok(())
    }

    /// Gives rows the scores of features that are not looked up for training, where policies ask for that.
    fn give_inference_scores(&mut self, features: &[Feature]) -> Result<()> {
        for (number, table) in self.tables.iter_mut().enumerate() {
            if !table.config.eviction.is_some_and(|policy| policy.counts_inference) {
                continue;
            }
            let mut given = Vec::new();
            for feature in features.iter().filter(|feature| feature.table == number) {
                if let Some(scores) = &feature.scores {
                    add_given_scores(&table.config, feature, scores, &mut given)?;
                }
            }
            give_scores(table, &[&given]);
        }
        Ok(())
    }

    /// Copies the scores of features to the saved tables.
    fn keep_scores(&self, features: &[Feature], looked: &mut [SavedTable]) -> Result<()> {
        for feature in features {
            let saved = looked.iter_mut().find(|saved| saved.number == feature.table);
            if let (Some(scores), Some(saved)) = (&feature.scores, saved) {
                let config = &self.tables[feature.table].config;
                add_given_scores(config, feature, scores, &mut saved.scores)?;
            }
        }
        Ok(())
    }

    /// Lets the rows of a lookup take the steps that they have missed.
    fn catch_up_rows(&mut self, features: &[Feature], pool: &Pool) -> Result<()> {
        let tables = self.tables.iter_mut().enumerate().filter(|(_, table)| table.is_behind());
        let tasks: Vec<(usize, &mut HostTable)> = tables.collect();
        if tasks.is_empty() {
            return Ok(());
        }
        let num_ids = features.iter().map(|feature| feature.keys.len()).sum();
        let error = FirstError::default();
        run_if_large(num_ids, tasks, pool, |(number, table)| {
            for feature in features.iter().filter(|feature| feature.table == number) {
                let keys = (0..feature.keys.len()).map(|position| feature.keys.get(position));
                error.note(table.catch_up_keys(keys));
            }
        });
        error.into_result()
    }

    /// Lets all rows take the steps that they have missed.
    pub(super) fn catch_up_tables(&mut self) {
        self.tables.iter_mut().for_each(|table| table.catch_up_all(None));
    }

    fn lookup_tables(
        &mut self,
        by_table: Vec<Vec<FeatureOutput>>,
        mode: Mode,
        pool: &Pool,
    ) -> Result<Vec<SavedTable>> {
        let num_ids = |outputs: &[FeatureOutput]| outputs.iter().map(|o| o.feature.keys.len()).sum::<usize>();
        let total: usize = by_table.iter().map(|o| num_ids(o)).sum();
        let alone = pool.threads() == 1 || total < SMALL_CALL;
        let mut results = Vec::new();
        let mut whole = Vec::new();
        let tables = self.tables.iter_mut().zip(&mut self.spare).enumerate();
        for ((number, (table, spare)), mut outputs) in tables.zip(by_table) {
            if outputs.is_empty() {
                continue;
            }
            // A table that is larger than its share of the call would leave other threads idle.
            if !alone && num_ids(&outputs) * pool.threads() * 4 > total * 5 {
                let mode = table.own_mode(mode);
                let looked = lookup_with_room(table, &mut outputs, mode, |table, outputs, mode| {
                    lookup_split(table, outputs, mode, &mut self.split, &mut spare.runs, pool)
                });
                results.push((number, looked.map(|looked| SavedTable::new(number, table, looked))));
            } else {
                whole.push((number, table, outputs, spare.runs.pop().unwrap_or_default()));
            }
        }
        // The largest first, so that the last thread to finish has a small task.
        whole.sort_by_key(|(_, _, outputs, ..)| std::cmp::Reverse(num_ids(outputs)));
        let mut looked: Vec<Option<(usize, Result<SavedTable>)>> = whole.iter().map(|_| None).collect();
        let tasks: Vec<_> = whole.into_iter().zip(&mut looked).collect();
        run_if_large(total, tasks, pool, |((number, table, mut outputs, mut runs), result)| {
            let mode = table.own_mode(mode);
            let looked = lookup_with_room(table, &mut outputs, mode, |table, outputs, mode| {
                lookup_whole(table, outputs, mode, std::mem::take(&mut runs))
            });
            *result = Some((number, looked.map(|looked| SavedTable::new(number, table, looked))));
        });
        results.extend(looked.into_iter().flatten());
        // If several tables fail, the error of the first one is returned, whichever thread was faster.
        results.sort_by_key(|(number, _)| *number);
        results.into_iter().map(|(_, looked)| looked).collect()
    }

    fn save(&mut self, saved: SavedLookup) {
        self.next_lookup += 1;
        let saved = Arc::new(saved);
        for SavedTable { number, .. } in &saved.tables {
            let table = &mut self.tables[*number];
            table.newest_lookup = saved.number;
            if let Some(evictor) = &mut table.evictor {
                let lookup: Weak<SavedLookup> = Arc::downgrade(&saved);
                evictor.add_lookup(*number, lookup);
            }
        }
        self.lookups.push_back(saved);
        if self.lookups.len() as u64 > RING {
            self.forget_lookups(self.lookups[1].number);
        }
    }

    /// Drops the lookups before `oldest`. Later lookups reuse their memory.
    pub(super) fn forget_lookups(&mut self, oldest: u64) {
        let oldest = self.oldest_needed.map_or(oldest, |needed| needed.min(oldest));
        while self.lookups.front().is_some_and(|l| l.number < oldest) {
            if let Some(lookup) = self.lookups.pop_front() {
                self.reuse_lookup(lookup);
            }
        }
        let needed = self.ring.iter().chain(self.committed.iter().map(|(_, p)| p)).map(|p| p.lookup.number);
        let oldest = needed.chain(self.lookups.front().map(|l| l.number)).min().unwrap_or(self.next_lookup);
        if self.accumulators.iter().all(Accumulator::is_empty) {
            self.tables.iter_mut().for_each(|t| t.release_retired(oldest));
        }
    }

    pub(super) fn reuse(&mut self, push: Push) {
        if let PushedGradients::Merged(tables) = push.gradients {
            let tables = push.lookup.tables.iter().zip(tables);
            tables.for_each(|(table, sums)| self.spare[table.number].keep_sums(sums));
        }
        self.reuse_lookup(push.lookup);
    }

    pub(super) fn reuse_lookup(&mut self, lookup: Arc<SavedLookup>) {
        if let Some(lookup) = Arc::into_inner(lookup) {
            let tables = lookup.tables.into_iter();
            tables.for_each(|table| self.spare[table.number].keep_runs(table.looked.runs));
        }
    }
}

/// Copies the `id_counts` of features to the saved tables.
fn keep_id_counts(features: &[Feature], looked: &mut [SavedTable]) -> Result<()> {
    for feature in features {
        let saved = looked.iter_mut().find(|saved| saved.number == feature.table);
        if let (Some(counts), Some(saved)) = (feature.id_counts, saved) {
            saved.id_counts = memory::copied(counts, "the ids of a call")?;
        }
    }
    Ok(())
}
