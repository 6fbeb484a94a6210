//! The lookup of a group: room for new keys, insertion, and the rows that go for them.

#![allow(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;

use sok_core::contract::table::{Insertion, Outcomes};
use sok_core::contract::ticket::RING;
use sok_core::error::{Error, Result};
use sok_core::key::Key;

use super::{Committed, GpuGroup, SavedLookup};
use crate::abi::{ABSENT_LATER, ABSENT_UNKNOWN};
use crate::device::Stream;
use crate::gpu_table::sweep::{Chosen, PlannedSweep};
use crate::gpu_table::uses::Closing;
use crate::gpu_table::{GpuTable, Room};
use crate::memory::read;
use crate::step::{Feature, KeyType, LookupOptions, Remote, RowSource, Started};

/// A table of which a lookup may insert too many keys.
struct Exceeding {
    table: usize,
    /// Number of ids that may be new keys.
    ids: u64,
}

/// What a lookup inserts in a table that might have to refuse keys.
struct Planned {
    table: usize,
    room: Room,
    new_keys: Vec<Key>,
    /// The rows that go for them.
    chosen: Option<Chosen>,
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
        let looked =
            unsafe { self.look_up(features, insertion, save, number_to, OfRanks::default(), stream) };
        looked.inspect_err(|_| self.abandon_steps_after(insertion))
    }

    /// After a lookup that has failed, as `HostGroup::abandon_steps_after`.
    pub(super) fn abandon_steps_after(&self, insertion: Insertion) {
        if insertion != Insertion::Never {
            self.abandon_steps();
        }
    }

    /// Ends the steps in progress, as `HostGroup::abandon_steps`.
    pub(super) fn abandon_steps(&self) {
        let of_pushes = self.ring.iter().map(|push| &push.lookup);
        self.lookups.iter().chain(of_pushes).for_each(|lookup| lookup.is_open.store(false, Relaxed));
    }

    /// As `lookup`.
    ///
    /// # Errors
    /// As `lookup`, and the error of the vote: nothing has changed then.
    ///
    /// # Safety
    /// As `lookup`.
    pub(super) unsafe fn look_up(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        of_ranks: OfRanks,
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
        // A lookup that inserts but is not saved counts its new keys here, because the device counts hits only of saved lookups.
        let counts_apart = insert && !save;
        if counts_apart {
            self.count_steps()?;
        }
        let mut exceeding = Vec::new();
        if insert {
            self.take_expired()?;
            exceeding = self.make_room(features, &mut inserts, save, true, &mut vote, stream)?;
        }
        let absent: Vec<u32> = insertions.iter().map(|own| absent_ids(*own, save)).collect();
        let becomes_candidate = |f: &&Feature| !f.is_silent && absent[f.table] & ABSENT_LATER != 0;
        let mut candidates = vec![0; self.tables.len()];
        features.iter().filter(becomes_candidate).for_each(|f| candidates[f.table] += f.ids.len as u64);
        self.expect_new_candidates(&candidates, stream)?;
        let number = if save { self.next_lookup } else { 0 };
        let to = number_to.map(|to| (to, number));
        let options =
            LookupOptions { inserts: &inserts, absent: &absent, save, number: to, rows: RowSource::Records };
        let (workspace, tables) = (&mut self.workspace, &mut self.tables);
        let mut started = workspace.start(tables, features, options, stream)?;
        if let Some(remote) = remote {
            workspace.connect(&mut started, remote, save, stream)?;
        }
        let planned = self.plan_sweeps(&started, &exceeding, stream);
        let agreed = planned.and_then(|planned| vote.map_or(Ok(()), |vote| vote()).map(|()| planned));
        let planned = match agreed {
            Ok(planned) => planned,
            Err(error) => {
                self.workspace.forget(started);
                return Err(error);
            }
        };
        let (workspace, tables) = (&mut self.workspace, &mut self.tables);
        workspace.find(&started, tables, &inserts, stream)?;
        let begins = remote.map(|remote| remote.begins);
        workspace.keep_id_counts(&started, features, begins, stream)?;
        workspace.keep_scores(&started, begins, stream)?;
        self.sweep(&planned, stream)?;
        if features.iter().any(|f| f.is_silent) {
            self.workspace.find_silent(&started, stream)?;
        }
        self.workspace.sort_ids(&started, stream)?;
        self.catch_up_found(&started, stream)?;
        self.workspace.write_rows(&started, features, stream)?;
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
            let saved = SavedLookup::new(number, saved);
            saved.is_open.store(insertion != Insertion::Never, Relaxed);
            self.save(saved);
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
    ) -> Result<Vec<Exceeding>> {
        let mut ids = vec![0u64; self.tables.len()];
        for (table, ids) in ids.iter_mut().enumerate().filter(|(table, _)| inserts[*table]) {
            let of_table = features.iter().filter(|f| f.table == table && !f.is_silent);
            *ids = of_table.map(|f| f.ids.len as u64).sum();
        }
        let new = |tables: &[GpuTable], t: usize| tables[t].max_new(ids[t]);
        let soon = |tables: &[GpuTable], t: usize| tables[t].max_new_soon(ids[t]);
        let all = 0..self.tables.len();
        // Whether the lookup fills a table: `Some(true)` if it may insert first, and rows go after that.
        let fills = |group: &GpuGroup, t: usize| {
            let fills = ids[t] > 0 && group.tables[t].may_refuse(new(&group.tables, t));
            fills.then(|| exceeds && group.tables[t].may_exceed(ids[t]))
        };
        let lacks_ring = |table: &GpuTable, ids: u64| !table.ring_has_room(table.most_swept(ids));
        let is_tight = |group: &GpuGroup, t: usize, new: u64| {
            let table = &group.tables[t];
            !table.has_room(new)
                || fills(group, t).is_some_and(|exceeds| !exceeds || lacks_ring(table, ids[t]))
        };
        // A lookup in progress names the rows that a commit has made of its candidates when the host knows of the commit.
        let is_admitting = matches!(self.committed, Committed::Alone(_))
            && self.unseen.is_some()
            && self.alone().is_some_and(|push| push.lookup.has_candidates());
        if is_admitting && all.clone().any(|t| fills(self, t).is_some()) {
            self.settle()?;
        }
        if all.clone().any(|t| is_tight(self, t, new(&self.tables, t))) {
            self.settle()?;
            if all.clone().any(|t| is_tight(self, t, soon(&self.tables, t))) {
                self.workspace.device.synchronize()?;
                self.tables.iter_mut().try_for_each(GpuTable::learn)?;
                let filled: Vec<Option<bool>> = all.clone().map(|t| fills(self, t)).collect();
                for t in all.clone() {
                    let (most, soon) = (new(&self.tables, t), soon(&self.tables, t));
                    let mut made = Ok(());
                    if !self.tables[t].has_room(soon) && filled[t] != Some(false) {
                        made = self.tables[t].make_room(most, soon, stream);
                    }
                    if filled[t] == Some(true) && lacks_ring(&self.tables[t], ids[t]) {
                        let removed = self.tables[t].most_swept(ids[t]);
                        made = made.and_then(|()| self.tables[t].make_room_in_ring(removed));
                    }
                    match made {
                        // There may be memory for fewer rows.
                        Err(_) if filled[t] == Some(true) => {
                            return self.make_room(features, inserts, save, false, vote, stream);
                        }
                        made => made?,
                    }
                }
                let full: Vec<usize> = all.clone().filter(|&t| filled[t] == Some(false)).collect();
                self.admit(features, &full, inserts, save, vote)?;
            }
        }
        let mut exceeding = Vec::new();
        for t in all {
            if inserts[t] {
                if fills(self, t).is_some() {
                    exceeding.push(Exceeding { table: t, ids: ids[t] });
                }
                self.tables[t].expect(ids[t]);
                self.ids_since[t] += ids[t];
            }
        }
        Ok(exceeding)
    }

    /// Returns the sweeps of tables of which the lookup may insert too many keys. Gets their memory.
    fn plan_sweeps(
        &mut self,
        started: &Started,
        exceeding: &[Exceeding],
        stream: Stream,
    ) -> Result<Vec<PlannedSweep>> {
        let (closing, mut planned) = (self.closing(), Vec::new());
        for &Exceeding { table: t, ids } in exceeding {
            let table = &self.tables[t];
            let (used, out_of_vocabulary) = (started.records_of(t), table.found_out_of_vocabulary());
            planned.extend(table.plan_sweep(t, ids, 0, used, closing, Some(out_of_vocabulary))?);
        }
        if !planned.is_empty() {
            self.sweep_memory.prepare(&self.workspace.device, &planned, stream)?;
        }
        Ok(planned)
    }

    /// Enqueues the sweeps of a lookup, after it has inserted its keys.
    fn sweep(&mut self, planned: &[PlannedSweep], stream: Stream) -> Result<()> {
        let device = self.workspace.device.clone();
        let tables = &mut self.tables;
        let enqueued = |planned: &PlannedSweep| planned.note_in(&mut tables[planned.table]);
        self.sweep_memory.sweep(&device, planned, enqueued, stream)?;
        let keeps = |table: &GpuTable| table.config.eviction.is_some_and(|policy| policy.keeps_evicted);
        if planned.iter().any(|planned| keeps(&self.tables[planned.table])) {
            // The next call may give out the numbers of these rows again.
            device.synchronize()?;
            planned.iter().try_for_each(|planned| self.tables[planned.table].take_departures())?;
        }
        Ok(())
    }

    /// The last commit, if the host has not read its report, and it names the only push of its lookup and of older ones.
    fn closing(&self) -> Option<Closing> {
        let number = self.unseen_push.filter(|_| self.unseen.is_some())?;
        let newest_lookup = self.ring.get(number)?.lookup.number;
        let mut of_lookups = self.ring.iter().filter(|push| push.lookup.number <= newest_lookup);
        let is_only = of_lookups.nth(1).is_none();
        let (resolved, row) = (self.resolved.address(), (number % RING) as u32);
        let is_applied = self.committed == Committed::Nothing;
        let newest_lookup = if is_applied { newest_lookup } else { newest_lookup - 1 };
        is_only.then_some(Closing { resolved, row, newest_lookup })
    }

    /// Adds the counts of steps to the statistics of the tables. Waits for the device.
    fn count_steps(&mut self) -> Result<()> {
        self.workspace.device.synchronize()?;
        self.tables.iter_mut().try_for_each(GpuTable::count_steps)
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
        let mut planned = Vec::new();
        let agreed = self.plan_admissions(features, full, &mut planned);
        if let Err(refused) = agreed.and_then(|()| vote.take().map_or(Ok(()), |vote| vote())) {
            planned
                .into_iter()
                .try_for_each(|Planned { table, chosen, .. }| self.tables[table].cancel_sweep(chosen))?;
            return Err(refused);
        }
        let mut planned = planned.into_iter();
        while let Some(Planned { table: t, room, new_keys, chosen }) = planned.next() {
            let admitted = self.tables[t].admit(&room, &new_keys, chosen);
            let outcomes = admitted.inspect_err(|_| {
                planned
                    .by_ref()
                    .for_each(|Planned { table, chosen, .. }| drop(self.tables[table].cancel_sweep(chosen)));
            })?;
            self.tables[t].note(outcomes);
            if save {
                self.tables[t].take_hits(outcomes.inserted);
            }
            inserts[t] = false;
        }
        Ok(())
    }

    /// Finds the new keys of tables that might have to refuse some, and the rows that go for them.
    ///
    /// # Errors
    /// [`Error::TableFull`]. The plans of earlier tables stand.
    fn plan_admissions(
        &mut self,
        features: &[Feature],
        full: &[usize],
        planned: &mut Vec<Planned>,
    ) -> Result<()> {
        for &t in full {
            let keys = self.active_keys(features, t)?;
            let table = &mut self.tables[t];
            let room = table.room(keys.len(), 0)?;
            let new_keys = table.absent(&room, &keys)?;
            let num_new = new_keys.len() as u64;
            let chosen = table.sweep_for(num_new, room.used(keys.len()))?;
            let chosen = table.check_sweep(num_new, chosen)?;
            planned.push(Planned { table: t, room, new_keys, chosen });
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
