//! The lookup of a group: room for new keys, insertion, and the rows that go for them.

#![allow(unsafe_code)]

use sok_core::contract::table::{Insertion, Outcomes};
use sok_core::error::{Error, Result};

use super::{GpuGroup, SavedLookup, table_counts};
use crate::abi::{ABSENT_LATER, ABSENT_UNKNOWN, COUNTS_WORDS, TableCounts};
use crate::device::{Stream, driver_error};
use crate::gpu_table::GpuTable;
use crate::gpu_table::sweep::{Going, Sweeps};
use crate::memory::read;
use crate::step::{Feature, KeyType, Remote, RowSource, Started};

/// Sweeps of the tables of which a lookup has inserted too many keys.
struct SweepsOfTables {
    /// Index of each table, and how many rows are too many.
    tables: Vec<(usize, u64)>,
    sweeps: Sweeps,
    /// By table, once it has remembered the rows that are to be erased.
    going: Vec<Going>,
}

/// What a lookup needs if ranks share the tables.
#[derive(Default)]
pub(super) struct OfRanks<'a> {
    /// Completes the features on the device, if their numbers of ids are upper bounds. Then no table may refuse keys.
    pub remote: Option<&'a Remote>,
    /// Called once, before the first change that cannot be undone, unless the lookup has failed on this rank before.
    pub vote: Vote<'a>,
}

/// What becomes of ids without a record: bits of `Feature::absent`.
fn absent_ids(insertion: Insertion, save: bool) -> u32 {
    match insertion {
        Insertion::AtLookup => 0,
        Insertion::AtCommit if save => ABSENT_LATER,
        Insertion::AtCommit | Insertion::Never => ABSENT_UNKNOWN,
    }
}

/// Returns an error if the lookup has failed on another rank.
type Vote<'a> = Option<&'a mut dyn FnMut() -> Result<()>>;

impl GpuGroup {
    /// Enqueues the lookup of all features of a layer's call. Returns the number of the lookup for `push`, or 0 without `save`.
    /// `number_to`: address on the device that takes the number.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, and [`Error::TableFull`] if the check mode is `Raise`: nothing has
    /// changed. [`Error::Device`] without enough memory: no row has changed, but a table that is near its `max_capacity` may have
    /// inserted the new keys. Errors that the device has found in earlier calls.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    pub unsafe fn lookup(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        stream: Stream,
    ) -> Result<u64> {
        // SAFETY: The caller guarantees it.
        unsafe { self.look_up(features, insertion, save, number_to, OfRanks::default(), true, stream) }
    }

    /// As `lookup`. `exceeds`: whether tables that remove rows may insert first.
    ///
    /// # Errors
    /// As `lookup`, and the error of the vote: no row has changed then, and the keys that were inserted are gone.
    ///
    /// # Safety
    /// As `lookup`.
    #[expect(clippy::too_many_arguments, reason = "all of them are chosen apart")]
    pub(super) unsafe fn look_up(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        of_ranks: OfRanks,
        exceeds: bool,
        stream: Stream,
    ) -> Result<u64> {
        let OfRanks { remote, mut vote } = of_ranks;
        self.check_own_fault()?;
        for feature in features {
            feature.validate()?;
            if feature.table >= self.tables.len() {
                return Err(Error::argument("no such table in the group"));
            }
            feature.check_scores(&self.tables[feature.table].config)?;
        }
        self.workspace.enter(stream)?;
        let insertions: Vec<Insertion> =
            self.tables.iter().map(|table| table.own_insertion(insertion, save)).collect();
        let mut inserts: Vec<bool> = insertions.iter().map(|own| *own == Insertion::AtLookup).collect();
        let insert = inserts.contains(&true);
        let mut exceeding = Vec::new();
        if insert {
            if vote.is_some() {
                // Earlier counts must not be undone with those of this lookup.
                self.count_steps()?;
            }
            exceeding = self.make_room(features, &mut inserts, save, exceeds, &mut vote, stream)?;
        }
        let absent: Vec<u32> = insertions.iter().map(|own| absent_ids(*own, save)).collect();
        let becomes_candidate = |f: &&Feature| !f.is_silent && absent[f.table] & ABSENT_LATER != 0;
        let mut candidates = vec![0; self.tables.len()];
        features.iter().filter(becomes_candidate).for_each(|f| candidates[f.table] += f.ids.len as u64);
        self.expect_new_candidates(&candidates, stream)?;
        // A lookup that inserts but is not saved counts its new keys here, because the device counts hits only of saved lookups.
        let counts_apart = insert && !save;
        if counts_apart {
            self.count_steps()?;
        }
        let number = if save { self.next_lookup } else { 0 };
        let to = number_to.map(|to| (to, number));
        let (workspace, tables) = (&mut self.workspace, &mut self.tables);
        let mut started =
            workspace.start(tables, features, &inserts, &absent, save, to, RowSource::Records, stream)?;
        if let Some(remote) = remote {
            workspace.connect(&mut started, remote, save, stream)?;
        }
        // Counts before and after the insertions are needed to undo these.
        let notes_counts = !exceeding.is_empty() || vote.is_some();
        if notes_counts {
            workspace.note_counts(self.counts.address(), 0, 0, stream)?;
        }
        workspace.find(&started, tables, &inserts, stream)?;
        let begins = remote.map(|remote| remote.begins);
        workspace.keep_id_counts(&started, features, begins, stream)?;
        workspace.keep_scores(&started, begins, stream)?;
        if notes_counts {
            self.num_noted += 1;
            let [after, flag] =
                [1, 2].map(|n| self.counts.address() + (4 * n * COUNTS_WORDS * tables.len()) as u64);
            workspace.note_counts(after, flag, self.num_noted, stream)?;
        }
        let has_silent = features.iter().any(|f| f.is_silent);
        // Their keys may be among those that go.
        let finds_silent_last = has_silent && !exceeding.is_empty();
        if has_silent && !finds_silent_last {
            workspace.find_silent(&started, stream)?;
        }
        let sweeps = self.start_sweeps(&started, &exceeding, save, stream)?;
        // The host removes rows meanwhile.
        self.workspace.sort_ids(&started, stream)?;
        if !finds_silent_last {
            self.catch_up_found(&started, stream)?;
            self.workspace.write_rows(&started, features, stream)?;
        }
        let sweeps = match sweeps.map(|sweeps| self.read_sweeps(sweeps)).transpose()? {
            Some(None) => {
                self.undo_insertions(features, &inserts, save)?;
                self.workspace.forget(started);
                let of_ranks = OfRanks { remote, vote };
                // SAFETY: The caller guarantees it.
                return unsafe {
                    self.look_up(features, insertion, save, number_to, of_ranks, false, stream)
                };
            }
            sweeps => sweeps.flatten(),
        };
        if let Some(Err(refused)) = vote.map(|vote| vote()) {
            self.cancel_sweeps(sweeps);
            if notes_counts {
                self.undo_insertions(features, &inserts, save)?;
            }
            self.workspace.forget(started);
            return Err(refused);
        }
        self.end_sweeps(sweeps, stream)?;
        if finds_silent_last {
            self.workspace.find_silent(&started, stream)?;
            self.catch_up_found(&started, stream)?;
            self.workspace.write_rows(&started, features, stream)?;
        }
        let (workspace, tables) = (&mut self.workspace, &mut self.tables);
        if !save {
            workspace.count_inference(tables, &started, stream)?;
            workspace.give_inference_scores(tables, &started, stream)?;
        }
        let saved = workspace.end(started, tables, features);
        self.reserve_soon();
        let mut takes_part = vec![false; self.tables.len()];
        features.iter().for_each(|f| takes_part[f.table] = true);
        self.tables.iter_mut().zip(takes_part).filter(|(_, takes)| *takes).for_each(|(t, _)| t.count_call());
        if counts_apart {
            self.workspace.device.synchronize()?;
            for table in &mut self.tables {
                let inserted = table.count_inserted()?;
                table.note(Outcomes { inserted, ..Outcomes::default() });
            }
        }
        if let Some(saved) = saved {
            self.save(SavedLookup::new(number, saved));
            number_to.map(|to| self.by_address.insert(to, number));
        }
        Ok(number)
    }

    /// Makes room for all keys that the call may insert. If a table might have to refuse keys, waits for the device, inserts the
    /// keys that fit, in their order, and resets `inserts` of the table, so that the lookup inserts none. Returns the tables of which the
    /// lookup may insert too many keys.
    ///
    /// `exceeds`: whether tables that remove rows may insert first.
    fn make_room(
        &mut self,
        features: &[Feature],
        inserts: &mut [bool],
        save: bool,
        exceeds: bool,
        vote: &mut Vote,
        stream: Stream,
    ) -> Result<Vec<usize>> {
        let mut ids = vec![0u64; self.tables.len()];
        for (table, ids) in ids.iter_mut().enumerate().filter(|(table, _)| inserts[*table]) {
            let of_table = features.iter().filter(|f| f.table == table && !f.is_silent);
            *ids = of_table.map(|f| f.ids.len as u64).sum();
        }
        let new = |tables: &[GpuTable], t: usize| tables[t].max_new(ids[t]);
        let soon = |tables: &[GpuTable], t: usize| tables[t].max_new_soon(ids[t]);
        let may_exceed: Vec<bool> =
            self.tables.iter().zip(&ids).map(|(table, ids)| exceeds && table.may_exceed(*ids)).collect();
        let refuses = |tables: &[GpuTable], t: usize| !may_exceed[t] && tables[t].may_refuse(new(tables, t));
        let all = 0..self.tables.len();
        let is_tight =
            |tables: &[GpuTable], t: usize| !tables[t].has_room(new(tables, t)) || refuses(tables, t);
        if all.clone().any(|t| is_tight(&self.tables, t)) {
            self.settle()?;
            let is_tight_soon =
                |t: usize| !self.tables[t].has_room(soon(&self.tables, t)) || refuses(&self.tables, t);
            if all.clone().any(is_tight_soon) {
                self.workspace.device.synchronize()?;
                self.tables.iter_mut().try_for_each(GpuTable::learn)?;
                for t in all.clone() {
                    let (most, soon) = (new(&self.tables, t), soon(&self.tables, t));
                    if !self.tables[t].has_room(soon) && !refuses(&self.tables, t) {
                        match self.tables[t].make_room(most, soon, stream) {
                            // There may be memory for fewer rows.
                            Err(_) if may_exceed[t] => {
                                return self.make_room(features, inserts, save, false, vote, stream);
                            }
                            made => made?,
                        }
                    }
                }
                let full: Vec<usize> =
                    all.clone().filter(|&t| ids[t] > 0 && refuses(&self.tables, t)).collect();
                if !full.is_empty() && may_exceed.contains(&true) {
                    // What `admit` does could not be undone.
                    return self.make_room(features, inserts, save, false, vote, stream);
                }
                self.admit(features, &full, inserts, save, vote)?;
            }
        }
        let mut exceeding = Vec::new();
        for t in all {
            if inserts[t] {
                if may_exceed[t] && ids[t] > 0 && self.tables[t].may_refuse(new(&self.tables, t)) {
                    exceeding.push(t);
                }
                self.tables[t].expect(ids[t]);
                self.ids_since[t] += ids[t];
            }
        }
        Ok(exceeding)
    }

    /// Enqueues choosing the rows to remove from tables of which a lookup has inserted too many keys. Waits until they are inserted.
    fn start_sweeps(
        &mut self,
        started: &Started,
        exceeding: &[usize],
        save: bool,
        stream: Stream,
    ) -> Result<Option<SweepsOfTables>> {
        if exceeding.is_empty() {
            return Ok(None);
        }
        self.wait_for(&self.counts, 2 * COUNTS_WORDS * self.tables.len(), self.num_noted)?;
        // The report of the last commit has come before: which lookups are closed, and the step.
        self.settle_for_policies();
        let (mut tables, mut planned) = (Vec::new(), Vec::new());
        for &t in exceeding {
            let taken = self.counts_noted(self.tables.len() + t).taken;
            let table = &mut self.tables[t];
            let excess = table.excess(taken);
            if excess > 0 {
                table.count_taken(taken, save);
                tables.push((t, excess));
                planned.extend(table.plan_sweep(
                    0,
                    started.records_of(t),
                    Some(table.found_out_of_vocabulary()),
                )?);
            } else {
                table.max_taken = taken.into();
            }
        }
        if planned.is_empty() {
            return Ok(None);
        }
        let sweeps = Sweeps::start(&self.workspace.device, self.sweep_memory.take(), planned, stream)?;
        stream.record(&self.swept)?;
        Ok(Some(SweepsOfTables { tables, sweeps, going: Vec::new() }))
    }

    /// Waits for the sweeps, and remembers the chosen rows. `None` if too few may go.
    fn read_sweeps(&mut self, mut sweeps: SweepsOfTables) -> Result<Option<SweepsOfTables>> {
        self.swept.synchronize().map_err(driver_error("waiting for the GPU"))?;
        sweeps.sweeps.read()?;
        let mut all = sweeps.tables.iter().enumerate();
        if !all.all(|(number, (_, excess))| sweeps.sweeps.num_removable(number) >= *excess) {
            self.sweep_memory = Some(sweeps.sweeps.into_memory());
            return Ok(None);
        }
        for (number, (t, _)) in sweeps.tables.iter().enumerate() {
            match self.tables[*t].begin_going(&sweeps.sweeps, number) {
                Ok(going) => sweeps.going.push(going),
                Err(error) => {
                    self.cancel_sweeps(Some(sweeps));
                    return Err(error);
                }
            }
        }
        Ok(Some(sweeps))
    }

    /// Leaves the chosen rows where they are.
    fn cancel_sweeps(&mut self, sweeps: Option<SweepsOfTables>) {
        let Some(SweepsOfTables { tables, sweeps, going }) = sweeps else { return };
        tables.iter().zip(&going).for_each(|((t, _), going)| self.tables[*t].cancel_going(going));
        self.sweep_memory = Some(sweeps.into_memory());
    }

    /// Removes the chosen rows.
    fn end_sweeps(&mut self, sweeps: Option<SweepsOfTables>, stream: Stream) -> Result<()> {
        let Some(SweepsOfTables { tables, sweeps, going }) = sweeps else { return Ok(()) };
        sweeps.erase(stream)?;
        for (number, ((t, _), going)) in tables.into_iter().zip(going).enumerate() {
            let evicted = self.tables[t].end_going(&sweeps, number, going, stream)?;
            self.tables[t].note(Outcomes { evicted, ..Outcomes::default() });
        }
        self.sweep_memory = Some(sweeps.into_memory());
        Ok(())
    }

    /// Removes the keys that the last lookup has inserted, and takes back what it has counted. Waits for the device. After an error the group cannot be used.
    fn undo_insertions(&mut self, features: &[Feature], inserts: &[bool], save: bool) -> Result<()> {
        let undone = self.remove_inserted(features, inserts, save);
        undone.inspect_err(|error| {
            let what = format!(
                "a lookup was refused, and its new keys could not be removed from the tables: {error}. Make the model again, and load a dump"
            );
            self.unusable = Some(Error::State(what));
        })
    }

    fn remove_inserted(&mut self, features: &[Feature], inserts: &[bool], save: bool) -> Result<()> {
        self.workspace.device.synchronize()?;
        for (t, inserts) in inserts.iter().enumerate() {
            let (before, after) = (self.counts_noted(t), self.counts_noted(self.tables.len() + t));
            if *inserts {
                let keys = self.active_keys(features, t)?;
                self.tables[t].undo_insertions(&keys, before, after.taken, save)?;
            } else {
                self.tables[t].undo_counts(before)?;
            }
        }
        Ok(())
    }

    /// Adds the counts of steps to the statistics of the tables. Waits for the device.
    fn count_steps(&mut self) -> Result<()> {
        self.workspace.device.synchronize()?;
        self.tables.iter_mut().try_for_each(GpuTable::count_steps)
    }

    fn counts_noted(&self, number: usize) -> TableCounts {
        table_counts(&self.counts, number * COUNTS_WORDS)
    }

    /// For tables that might have to refuse keys: inserts the keys that fit, and resets `inserts`. The device must be
    /// idle.
    fn admit(
        &mut self,
        features: &[Feature],
        full: &[usize],
        inserts: &mut [bool],
        save: bool,
        vote: &mut Vote,
    ) -> Result<()> {
        if full.is_empty() {
            return Ok(());
        }
        self.count_steps()?;
        let mut new = Vec::new();
        for &t in full {
            let keys = self.active_keys(features, t)?;
            let table = &mut self.tables[t];
            let room = table.room(keys.len(), 0)?;
            let new_keys = table.absent(&room, &keys)?;
            let num_new = new_keys.len() as u64;
            let sweeps = table.sweep_for(num_new, room.used(keys.len()))?;
            table.check_capacity(num_new, sweeps.as_ref().map_or(0, |sweeps| sweeps.num_removable(0)))?;
            new.push((room, new_keys, sweeps));
        }
        if let Some(Err(refused)) = vote.take().map(|vote| vote()) {
            full.iter().zip(new).for_each(|(&t, (.., sweeps))| self.tables[t].forget_sweep(sweeps));
            return Err(refused);
        }
        for (&t, (room, new, sweeps)) in full.iter().zip(new) {
            let outcomes = self.tables[t].admit(&room, &new, sweeps)?;
            self.tables[t].note(outcomes);
            if save {
                self.tables[t].take_hits(outcomes.inserted);
            }
            inserts[t] = false;
        }
        Ok(())
    }

    /// Gets memory for later calls.
    pub(super) fn reserve_soon(&mut self) {
        for table in &mut self.tables {
            table.reserve_soon();
            table.candidates.iter_mut().for_each(|candidates| candidates.reserve_soon());
        }
    }

    /// Returns the keys of a table that a lookup with insertion would insert if they are missing, in the order of the ids. The device must
    /// be idle.
    fn active_keys(&self, features: &[Feature], table: usize) -> Result<Vec<u64>> {
        let mut keys = Vec::new();
        for feature in features.iter().filter(|f| f.table == table && !f.is_silent) {
            keys.extend(self.active_keys_of(feature)?);
        }
        Ok(keys)
    }

    /// Returns the keys of a feature that a lookup with insertion would insert if they are missing.
    fn active_keys_of(&self, feature: &Feature) -> Result<Vec<u64>> {
        let (context, ids) = (&self.workspace.device.context, feature.ids);
        let keys: Vec<u64> = match ids.key_type {
            KeyType::Wide => read::<u64>(context, ids.address, ids.len)?,
            KeyType::Signed => {
                read::<i32>(context, ids.address, ids.len)?.into_iter().map(|k| i64::from(k) as u64).collect()
            }
            KeyType::Unsigned => {
                read::<u32>(context, ids.address, ids.len)?.into_iter().map(u64::from).collect()
            }
            KeyType::Words => {
                let (low, high) =
                    (read::<u32>(context, ids.address, ids.len)?, read::<u32>(context, ids.high, ids.len)?);
                low.into_iter().zip(high).map(|(l, h)| u64::from(l) | u64::from(h) << 32).collect()
            }
        };
        let weights = feature.weights.map(|w| read::<f32>(context, w, ids.len)).transpose()?;
        let config = &self.tables[feature.table].config;
        let is_active = |&(i, key): &(usize, u64)| {
            feature.padding_key != Some(key)
                && config.is_in_vocabulary(key)
                && weights.as_ref().is_none_or(|w| w[i] != 0.0)
        };
        Ok(keys.into_iter().enumerate().filter(is_active).map(|(_, key)| key).collect())
    }
}
