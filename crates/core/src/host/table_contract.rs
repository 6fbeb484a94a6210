//! The contract of a table, for the table on the host.

use std::any::Any;
use std::borrow::Cow;

use crate::contract::batch::{Bags, Combiner, Feature, Keys};
use crate::contract::frozen::Frozen;
use crate::contract::record::RecordLayout;
use crate::contract::records::{Column, Records};
use crate::contract::table::{
    Contents, Cursor, Epoch, Explanation, Freezing, Insertion, Outcomes, Table, TableConfig, TableStats,
    not_kept,
};
use crate::error::{Error, Result};
use crate::formula::update::{Update, UpdateScalars, update_with_formula};
use crate::host::changes::Changes;
use crate::host::features::{FeatureOutput, Mode};
use crate::host::lookup::lookup_whole;
use crate::host::merge::{HeldGradients, RecordGradients};
use crate::host::pooling::MissingRow;
use crate::host::push::SavedTable;
use crate::host::room::{add_used, check_capacity, distinct, insert_with_room, lookup_with_room};
use crate::host::runs::{KeyRuns, RowCode};
use crate::host::table::HostTable;
use crate::host::update::UpdateTask;
use crate::host::uses::count_uses;
use crate::key::{Key, hash};
use crate::memory;
use crate::store::arena::{Arena, NO_RECORD, RecordNumber};
use crate::store::index::Index;
use crate::store::scores::Scores;
use crate::store::sights::Sights;

/// How many keys are prefetched ahead.
const AHEAD: usize = 32;

impl HostTable {
    /// Runs a call. Undoes its insertions if it fails.
    fn whole_or_nothing<T>(&mut self, call: impl FnOnce(&mut HostTable) -> Result<T>) -> Result<T> {
        self.begin();
        let result = call(self).and_then(|value| self.start_new_rows().map(|()| value));
        match &result {
            Ok(_) => self.forget_inserted(),
            Err(_) => self.undo(),
        }
        result
    }

    /// The scores of the rows, if the table has an eviction policy.
    fn scores(&self) -> Option<&Scores> {
        let evictor = self.evictor.as_ref().filter(|_| self.config.eviction.is_some());
        evictor.map(|evictor| &evictor.scores)
    }

    fn check_len(&self, what: &str, len: usize, num_keys: usize) -> Result<()> {
        let dim = self.config.dim;
        if len == num_keys * dim {
            return Ok(());
        }
        Err(Error::argument(format!(
            "table `{}`: `{what}` must hold {dim} numbers a key. Received: {len} numbers for {num_keys} keys",
            self.config.name
        )))
    }

    /// Calls `visit` with the record number of each key, and prefetches buckets.
    fn for_each_record(&self, keys: &[Key], mut visit: impl FnMut(usize, RecordNumber)) {
        for (i, &key) in keys.iter().enumerate() {
            if let Some(&later) = keys.get(i + AHEAD) {
                self.index.prefetch(hash(later));
            }
            visit(i, self.index.find(hash(key), key));
        }
    }

    /// # Errors
    /// [`Error::OutOfVocabulary`] for a key outside of the vocabulary.
    fn check_keys(&self, keys: &[Key]) -> Result<()> {
        let Some(size) = self.config.vocabulary_size else { return Ok(()) };
        match keys.iter().find(|&&key| key >= size) {
            None => Ok(()),
            Some(&key) => Err(Error::OutOfVocabulary {
                table: self.config.name.clone(),
                feature: None,
                id: key as i64,
                last: size - 1,
            }),
        }
    }

    /// Returns the record of each key. With `insert`, inserts keys without one, as far as there is room.
    fn locate(&mut self, keys: &[Key], insert: bool) -> Result<(Vec<RecordNumber>, Outcomes)> {
        self.check_keys(keys)?;
        let mut outcomes = Outcomes::default();
        let mut records = memory::filled(NO_RECORD, keys.len(), "the records of a call")?;
        self.for_each_record(keys, |i, record| records[i] = record);
        let absent = keys.iter().zip(&records).filter(|(_, record)| **record == NO_RECORD);
        let new = distinct(absent.map(|(key, _)| *key))?;
        let found = records.iter().copied().filter(|&r| r != NO_RECORD);
        let num_hits = distinct(found)?.len() as u64;
        if insert {
            let used = |table: &HostTable, set: &mut _| add_used(table, keys.iter().copied(), set);
            check_capacity(self, new.len(), used)?;
            outcomes = self.whole_or_nothing(|table| insert_with_room(table, &new, used))?;
            for (record, &key) in records.iter_mut().zip(keys).filter(|(r, _)| **r == NO_RECORD) {
                *record = self.index.find(hash(key), key);
            }
        } else {
            outcomes.refused = new.len() as u64;
        }
        outcomes.hit = num_hits;
        Ok((records, outcomes))
    }

    /// Returns the record of each key. Inserts keys without one. The caller must fill all records.
    fn locate_unfilled(&mut self, keys: &[Key]) -> Result<Vec<RecordNumber>> {
        let mut records = memory::with_capacity(keys.len(), "the records of a call")?;
        for (i, &key) in keys.iter().enumerate() {
            if let Some(&later) = keys.get(i + AHEAD) {
                self.index.prefetch(hash(later));
            }
            let found = self.index.find(hash(key), key);
            records.push(if found == NO_RECORD { self.insert_absent(key, false)? } else { found });
        }
        Ok(records)
    }

    /// As `scan`, of the records that `is_taken` names.
    fn scan_those(
        &self,
        cursor: Cursor,
        max: usize,
        out: &mut Records,
        is_taken: impl Fn(RecordNumber) -> bool,
    ) -> Result<Option<Cursor>> {
        let num = max.min(self.index.len());
        let columns = self.config.columns();
        let (format, width) = (self.first.format, self.first.layout.width());
        out.reserve(num, width, columns, "the records of a scan")?;
        let mut left = max;
        let next = self.index.scan(cursor.0, |key, record| {
            if !is_taken(record) {
                return true;
            }
            if left == 0 {
                return false;
            }
            left -= 1;
            out.keys.push(key);
            let start = out.values.len();
            out.values.resize(start + width, 0.0);
            format.read(self.arena.record(record), &mut out.values[start..]);
            if let Some(evictor) = &self.evictor {
                columns.iter().for_each(|&c| out.column_mut(c).push(evictor.number(c, record)));
            }
            true
        });
        Ok(next.map(Cursor))
    }

    fn known_changes(&self) -> Result<&Changes> {
        let unknown = || Error::UnknownChanges { table: self.config.name.clone() };
        self.changes.as_deref().ok_or_else(unknown)
    }
}

impl Contents for HostTable {
    fn config(&self) -> &TableConfig {
        &self.config
    }

    fn len(&self) -> Result<usize> {
        Ok(self.index.len())
    }

    fn update_rule(&self) -> Option<&Update> {
        self.update.as_ref()
    }

    fn step(&self) -> Result<u64> {
        Ok(self.step)
    }

    fn commit_times(&self) -> Vec<(u64, u64)> {
        self.evictor.as_ref().map_or_else(Vec::new, |evictor| evictor.commits.ages_by_time())
    }

    fn sights(&self) -> Result<Cow<'_, Records>> {
        let Some(admitter) = &self.admitter else { return Ok(Cow::default()) };
        admitter.all_sights().map(Cow::Owned)
    }

    fn scan(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>> {
        self.scan_those(cursor, max, out, |_| true)
    }

    fn epoch_of(&self, snapshot: u64) -> Option<Epoch> {
        self.changes.as_ref()?.epochs.find(snapshot).map(Epoch)
    }

    fn num_changed(&self, Epoch(epoch): Epoch) -> Result<usize> {
        let changes = self.known_changes()?;
        let mut count = 0;
        self.index.scan(0, |_, record| {
            count += usize::from(changes.has_changed(record, epoch));
            true
        });
        Ok(count)
    }

    fn scan_changed(
        &self,
        Epoch(epoch): Epoch,
        cursor: Cursor,
        max: usize,
        out: &mut Records,
    ) -> Result<Option<Cursor>> {
        let changes = self.known_changes()?;
        self.scan_those(cursor, max, out, |record| changes.has_changed(record, epoch))
    }

    fn removed_since(&self, Epoch(epoch): Epoch) -> Result<Vec<Key>> {
        let removed = self.known_changes()?.epochs.removed_since(epoch);
        let what = "the keys that were removed since a dump";
        let mut keys = memory::collect(removed.filter(|key| self.is_absent(*key)), what)?;
        keys.sort_unstable();
        keys.dedup();
        Ok(keys)
    }
}

impl Table for HostTable {
    fn find(&self, keys: &[Key], rows: &mut [f32], found: &mut [bool]) -> Result<()> {
        self.check_len("rows", rows.len(), keys.len())?;
        if found.len() != keys.len() {
            return Err(Error::argument(format!(
                "table `{}`: `found` must hold one answer a key. Received: {} for {} keys",
                self.config.name,
                found.len(),
                keys.len()
            )));
        }
        let dim = self.config.dim;
        let mut missing = MissingRow::<f32>::new(&self.first, self.shared_missing_row());
        self.for_each_record(keys, |i, record| {
            let row = &mut rows[i * dim..][..dim];
            match record {
                NO_RECORD if self.config.is_in_vocabulary(keys[i]) => {
                    row.copy_from_slice(missing.get(keys[i]))
                }
                record => self.first.format.read_row(self.arena.record(record), row),
            }
            found[i] = record != NO_RECORD;
        });
        Ok(())
    }

    fn find_or_insert(&mut self, keys: &[Key], rows: &mut [f32]) -> Result<Outcomes> {
        self.check_len("rows", rows.len(), keys.len())?;
        self.check_keys(keys)?;
        let feature = plain_feature(keys);
        let mode = Mode { insertion: Insertion::AtLookup, save: true, stream: false };
        let looked = self.whole_or_nothing(|table| {
            let outputs = &mut [FeatureOutput { number: 0, feature, rows }];
            lookup_with_room(table, outputs, mode, |table, outputs, mode| {
                lookup_whole(table, outputs, mode, KeyRuns::default())
            })
        })?;
        let outcomes = looked.outcomes;
        self.note(outcomes, 0);
        let saved = SavedTable::new(0, self, looked);
        count_uses(self, &saved);
        Ok(outcomes)
    }

    fn assign(&mut self, keys: &[Key], rows: &[f32], insert: bool) -> Result<Outcomes> {
        self.check_len("rows", rows.len(), keys.len())?;
        let (records, outcomes) = self.locate(keys, insert)?;
        self.touch(&records);
        let dim = self.config.dim;
        for (&record, row) in records.iter().zip(rows.chunks_exact(dim)) {
            if record != NO_RECORD {
                self.first.format.write_row(self.arena.record_mut(record), row);
            }
        }
        self.note(outcomes, 0);
        Ok(outcomes)
    }

    #[allow(unsafe_code)]
    fn update(&mut self, keys: &[Key], gradients: &[f32], scalars: &UpdateScalars) -> Result<Outcomes> {
        self.check_len("gradients", gradients.len(), keys.len())?;
        let update = update_with_formula(self.update, &self.config.name)?;
        let absent = keys.iter().copied().filter(|key| self.is_absent(*key));
        let refused = distinct(absent)?.len() as u64;
        let mut rows = memory::filled(0.0, gradients.len(), "the rows of a call")?;
        let feature = plain_feature(keys);
        let mode = Mode { insertion: Insertion::Never, save: true, stream: false };
        let outputs = &mut [FeatureOutput { number: 0, feature, rows: &mut rows }];
        let looked = lookup_whole(self, outputs, mode, KeyRuns::default())?;
        for runs in &looked.runs {
            self.touch(runs.records());
        }
        let dim = self.config.dim;
        let format = self.first.format;
        let chance = self.chance(scalars);
        for runs in &looked.runs {
            let held = HeldGradients {
                runs,
                code: RowCode::new(1, keys.len()).unwrap_or_default(),
                rows: vec![gradients],
                dim,
                weight: 1.0,
            };
            let gradients = RecordGradients { records: runs.records(), gradients: held };
            let keys = 0..gradients.records.len();
            let task = UpdateTask {
                arena: self.arena.share(),
                format,
                chance,
                gradients: &gradients,
                keys,
                update: &update,
                scalars: *scalars,
            };
            // SAFETY: `&mut self` is the only reference to the arena.
            unsafe { task.run() };
        }
        Ok(Outcomes { refused, ..looked.outcomes })
    }

    fn erase(&mut self, keys: &[Key]) -> Result<usize> {
        let num_rows = keys.len().min(self.index.len());
        self.arena.reserve_free(self.retired.len() + num_rows)?;
        let retiring = if self.newest_lookup == 0 { 0 } else { num_rows };
        memory::reserve(&mut self.retired, retiring, "the numbers of erased rows")?;
        if let Some(changes) = &mut self.changes {
            changes.epochs.reserve_removed(num_rows)?;
        }
        if let Some(evictor) = &mut self.evictor {
            evictor.departures.forget(keys)?;
        }
        if let Some(admitter) = &mut self.admitter {
            admitter.forget(keys.iter().copied());
        }
        let mut erased = 0;
        for &key in keys {
            if let Some(record) = self.index.remove(hash(key), key) {
                if let Some(changes) = &mut self.changes {
                    changes.remove(key, record);
                }
                if self.newest_lookup == 0 {
                    self.arena.release(record);
                } else {
                    self.retired.push((self.newest_lookup, record));
                }
                erased += 1;
            }
        }
        Ok(erased)
    }

    fn clear(&mut self) -> Result<()> {
        let (index, arena, sights) = (Index::new(0)?, Arena::new(self.arena.width())?, Sights::new()?);
        (self.index, self.arena) = (index, arena);
        self.retired.clear();
        if let Some(evictor) = &mut self.evictor {
            evictor.clear();
        }
        if let Some(admitter) = &mut self.admitter {
            admitter.clear(sights);
        }
        self.changes = None;
        self.generation += 1;
        Ok(())
    }

    fn explain(&self, key: Key) -> Result<Explanation> {
        let record = self.index.find(hash(key), key);
        if record != NO_RECORD {
            let score = self.scores().map(|scores| scores.get(record).score);
            return Ok(Explanation::Present { score });
        }
        match self.admitter.as_ref().map_or(0, |admitter| admitter.sights(key)) {
            0 => Ok(self
                .evictor
                .as_ref()
                .map_or(Explanation::Absent, |evictor| evictor.departures.explain(key))),
            sights => Ok(Explanation::Filtered { sights }),
        }
    }

    fn take_evicted(&mut self) -> Result<Records> {
        match &mut self.evictor {
            Some(evictor) if self.config.keeps_removed() => Ok(evictor.departures.take_kept()),
            _ => Err(not_kept(&self.config.name)),
        }
    }

    fn set_step(&mut self, step: u64) -> Result<()> {
        if self.has_policy() {
            self.step = step;
        }
        Ok(())
    }

    fn set_commit_times(&mut self, times: &[(u64, u64)]) {
        if let Some(evictor) = &mut self.evictor {
            evictor.commits.set_ages_by_time(times);
        }
    }

    fn stats(&self) -> Result<TableStats> {
        Ok(self.recent_stats())
    }

    fn recent_stats(&self) -> TableStats {
        let scores = self.evictor.as_ref().map_or(0, |evictor| evictor.num_bytes());
        let sights = self.admitter.as_ref().map_or(0, |admitter| admitter.num_bytes());
        let changes = self.changes.as_ref().map_or(0, |changes| changes.num_bytes());
        let missed = self.missed.as_ref().map_or(0, |missed| missed.num_bytes());
        let bytes =
            (self.index.num_bytes() + self.arena.num_bytes() + scores + sights + missed + changes) as u64;
        TableStats {
            size: self.index.len() as u64,
            capacity: self.index.capacity() as u64,
            bytes: self.stats.bytes + bytes,
            ..self.stats
        }
    }

    fn set_seed(&mut self, seed: u64) {
        (self.config.seed, self.first.seed) = (seed, seed);
    }

    fn has_loaded_states(&self) -> bool {
        self.has_loaded_states
    }

    fn set_update_rule(&mut self, update: Option<Update>, keep_states: bool) -> Result<()> {
        if let Some(update) = &update {
            update.validate()?;
        }
        let dim = self.config.dim;
        let layout = RecordLayout::new(dim, update.as_ref());
        let have_none = self.first.layout.states().is_empty() && layout.states().is_empty();
        let share_them = keep_states && Update::share_states(self.update.as_ref(), update.as_ref(), dim);
        if !have_none && !share_them {
            let format = self.first.format;
            let start = format.states_start();
            self.arena = self.arena.with_width(format.width(layout.num_state_floats()), |old, new| {
                new[..start].copy_from_slice(&old[..start]);
                layout.fill_states(&mut new[start..], true);
            })?;
            self.changes = None;
        }
        self.first.layout = layout;
        self.update = update;
        self.has_loaded_states = false;
        Ok(())
    }

    fn track(&mut self, snapshot: u64) -> Result<()> {
        match &mut self.changes {
            Some(changes) => changes.epochs.start(snapshot),
            None => self.changes = Some(Box::new(Changes::new(self.arena.next_unused(), snapshot)?)),
        }
        Ok(())
    }

    fn keys(&self) -> Result<Vec<Key>> {
        let mut keys = memory::with_capacity(self.index.len(), "the keys of a table")?;
        self.index.scan(0, |key, _| {
            keys.push(key);
            true
        });
        Ok(keys)
    }

    fn restore(&mut self, records: &Records) -> Result<()> {
        let (width, num_keys) = (self.first.layout.width(), records.keys.len());
        if records.values.len() != num_keys * width {
            return Err(Error::argument(format!(
                "table `{}`: `values` must hold {width} numbers a key. Received: {} numbers for {num_keys} keys",
                self.config.name,
                records.values.len()
            )));
        }
        for column in Column::ALL {
            let (name, len) = (column.name(), records.column(column).len());
            if len != 0 && len != num_keys {
                return Err(Error::argument(format!(
                    "table `{}`: `{name}` must hold a number a key, or none. Received: {len} for {num_keys} keys",
                    self.config.name
                )));
            }
        }
        self.check_keys(&records.keys)?;
        let located = self.whole_or_nothing(|table| table.locate_unfilled(&records.keys))?;
        self.touch(&located);
        let format = self.first.format;
        for ((&record, &key), values) in
            located.iter().zip(&records.keys).zip(records.values.chunks_exact(width))
        {
            format.write(self.arena.record_mut(record), key, values);
        }
        if let Some(evictor) = &mut self.evictor {
            located.iter().for_each(|&record| evictor.renew(record));
            for column in Column::ALL {
                let numbers = located.iter().zip(records.column(column));
                numbers.for_each(|(&record, &number)| evictor.set_number(column, record, number));
            }
        }
        Ok(())
    }

    fn restore_sights(&mut self, sights: &Records) -> Result<()> {
        match &mut self.admitter {
            Some(admitter) if admitter.policy.counts() => admitter.restore(sights),
            _ => Ok(()),
        }
    }

    fn fresh(&self, update: Option<Update>, num_rows: usize) -> Result<Box<dyn Table>> {
        let mut table = HostTable::with_room(self.config.clone(), num_rows)?;
        table.set_update_rule(update, false)?;
        table.arena.reserve(num_rows)?;
        if let (Some(evictor), Some(own)) = (&mut table.evictor, &self.evictor) {
            evictor.commits.go_on_from(&own.commits);
        }
        Ok(Box::new(table))
    }

    fn replace_with(&mut self, other: Box<dyn Table>) -> Result<()> {
        let other = other.into_any().downcast::<HostTable>().map_err(|_| {
            Error::State(format!("table `{}` takes records of a host table alone", self.config.name))
        })?;
        let HostTable { config, index, arena, first, update, step, evictor, admitter, .. } = *other;
        self.config.seed = config.seed;
        (self.index, self.arena, self.first, self.update) = (index, arena, first, update);
        (self.step, self.evictor, self.admitter) = (step, evictor, admitter);
        self.retired.clear();
        self.changes = None;
        self.generation += 1;
        self.has_loaded_states = true;
        let next = self.arena.next_unused();
        self.missed.as_mut().map_or(Ok(()), |missed| missed.start(next, 1..next))
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn rename_snapshot(&mut self, from: u64, to: u64) {
        if let Some(changes) = &mut self.changes {
            changes.epochs.rename(from, to);
        }
    }

    fn freeze(&mut self, since: Option<u64>) -> Result<Box<dyn Freezing>> {
        Ok(Box::new(Frozen::of(self, since)?))
    }
}

/// A feature of these keys, one row for each.
fn plain_feature(keys: &[Key]) -> Feature<'_> {
    Feature {
        name: "keys",
        table: 0,
        keys: Keys::U64(keys),
        bags: Bags::Each,
        combiner: Combiner::Sum,
        weights: None,
        padding_key: None,
        id_counts: None,
        scores: None,
    }
}
