//! Absent ids: a lookup has found no record for them, and a commit may insert their keys.
//!
//! Until then their keys are candidates of their table. The commit decides on the device. Only for tables that are nearly full, the host
//! inserts the keys before, in the order of their ids, because they may not all fit.

use std::collections::HashMap;
use std::sync::Arc;

use sok_core::contract::group::Group;
use sok_core::contract::profile::StepPart;
use sok_core::contract::table::Outcomes;
use sok_core::contract::ticket::{Named, RING, TICKET_LEN};
use sok_core::error::{Error, Result};
use sok_core::key::Key;

use super::{Committed, GpuGroup, SavedLookup};
use crate::device::Stream;
use crate::gpu_table::candidates::Candidates;
use crate::gpu_table::sweep::Chosen;
use crate::gpu_table::{GpuTable, Room};
use crate::memory::read;
use crate::step::AdmissionPart;

/// The keys of a table that pushes may insert.
#[derive(Default)]
struct Seen {
    /// By lookup: the keys of its absent ids, in their order.
    of_lookups: Vec<Vec<Key>>,
    /// By key: the number of sights in earlier steps, and in the commit in progress.
    sights: HashMap<Key, (u32, u64)>,
}

impl Seen {
    /// Returns those of these keys, each once, that have no record and are admitted. `room`: then has the records of the others. The device must be
    /// idle.
    fn new_keys(&self, table: &GpuTable, room: &Room, keys: &[Key]) -> Result<Vec<Key>> {
        let mut new = table.absent(room, keys)?;
        new.retain(|key| {
            let (sights, more) = self.sights[key];
            let candidates = table.candidates.as_ref();
            candidates.is_none_or(|candidates| candidates.admits(table.config.seed, *key, sights, more))
        });
        Ok(new)
    }
}

impl GpuGroup {
    /// Returns the pushes that a ticket names. `ticket`: its address on the device. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Ticket`] if one of them is not pending.
    pub(super) fn resolve(&mut self, ticket: u64) -> Result<Vec<Named>> {
        self.check_fault()?;
        self.settle()?;
        self.workspace.device.synchronize()?;
        let ticket = read::<f32>(&self.workspace.device.context, ticket, TICKET_LEN)?;
        self.ring.resolve(&ticket).map_err(|what| Error::Ticket { tables: self.names(), what })
    }

    /// Returns whether a table might not have room for all candidates of these lookups.
    pub(super) fn may_refuse_candidates(&mut self, lookups: &[Arc<SavedLookup>]) -> Result<bool> {
        let refuses = |group: &GpuGroup| group.refusing(lookups).contains(&true);
        if !refuses(self) {
            return Ok(false);
        }
        // The report of the last commit gives lower bounds.
        self.settle()?;
        Ok(refuses(self))
    }

    /// By table: whether it might not have room for all candidates of these lookups.
    fn refusing(&self, lookups: &[Arc<SavedLookup>]) -> Vec<bool> {
        let ids = self.max_candidates(lookups);
        let refuses = |(table, ids): (&GpuTable, u64)| ids > 0 && table.may_refuse(table.max_new(ids));
        self.tables.iter().zip(ids).map(refuses).collect()
    }

    /// By table: the maximum number of candidates of these lookups.
    fn max_candidates(&self, lookups: &[Arc<SavedLookup>]) -> Vec<u64> {
        let of_table = |t: usize| {
            let live =
                lookups.iter().filter(|lookup| lookup.has_candidates() && self.has_records_of(lookup, t));
            live.map(|lookup| lookup.saved.max_candidates(t)).sum()
        };
        (0..self.tables.len()).map(of_table).collect()
    }

    /// Returns whether a table took part in a lookup and still has its records.
    fn has_records_of(&self, lookup: &SavedLookup, table: usize) -> bool {
        lookup.saved.generations.iter().any(|&(t, g)| t == table && self.tables[t].generation == g)
    }

    /// The lookups of all pending pushes, each once.
    pub(super) fn pending_lookups(&self) -> Vec<Arc<SavedLookup>> {
        distinct(self.ring.iter().map(|push| &push.lookup))
    }

    fn lookups_of(&self, named: &[Named]) -> Vec<Arc<SavedLookup>> {
        distinct(named.iter().filter_map(|n| self.ring.get(n.number)).map(|push| &push.lookup))
    }

    /// Lets commits insert keys in all tables again.
    pub(super) fn open_tables(&mut self) {
        for table in &mut self.tables {
            let was_closed = |c: &mut Box<Candidates>| std::mem::take(&mut c.is_closed);
            table.has_moved |= table.candidates.as_mut().is_some_and(was_closed);
        }
    }

    /// Gets memory for all candidates of the pending pushes, in tables that are not closed. Waits only if memory must grow.
    ///
    /// # Errors
    /// [`Error::Device`] without enough memory. Nothing has changed then.
    pub(super) fn make_room_for_candidates(&mut self, stream: Stream) -> Result<()> {
        let ids = self.max_candidates(&self.pending_lookups());
        let grows = |table: &GpuTable, ids: u64| !table.has_room(table.max_new(ids));
        let mut is_idle = false;
        for (table, ids) in self.tables.iter_mut().zip(ids) {
            let is_closed = table.candidates.as_ref().is_some_and(|candidates| candidates.is_closed);
            if ids == 0 || is_closed || !grows(table, ids) {
                continue;
            }
            if !is_idle {
                self.workspace.device.synchronize()?;
                is_idle = true;
            }
            table.learn()?;
            if grows(table, ids) {
                table.make_room(table.max_new(ids), table.max_new_soon(ids), stream)?;
            }
        }
        Ok(())
    }

    /// Notes that the commit in progress may insert the candidates of all pending pushes.
    pub(super) fn expect_candidates(&mut self) {
        let ids = self.max_candidates(&self.pending_lookups());
        for (t, ids) in ids.into_iter().enumerate().filter(|(_, ids)| *ids > 0) {
            let table = &mut self.tables[t];
            if table.candidates.as_ref().is_some_and(|candidates| !candidates.is_closed) {
                table.expect(ids);
                self.ids_since[t] += ids;
            }
        }
    }

    // ---- tables that are nearly full

    /// Checks that the tables have room for the keys that these pushes insert. Adds the counts of steps to the statistics, and changes
    /// nothing else. The device must be idle.
    ///
    /// # Errors
    /// [`Error::TableFull`] if a table does not have room for all of them, and its check mode is `Raise`.
    pub(super) fn check_absent(&mut self, named: &[Named]) -> Result<()> {
        self.tables.iter_mut().try_for_each(GpuTable::count_steps)?;
        for t in self.tight_tables(named) {
            let (_, num_new, chosen) = self.plan_room(named, t)?;
            let table = &mut self.tables[t];
            let chosen = table.check_sweep(num_new, chosen)?;
            table.cancel_sweep(chosen)?;
        }
        Ok(())
    }

    /// Inserts the keys of these pushes that fit, in tables that might not have room for all, and closes these tables to the rest of the commit. The
    /// device must be idle, and `check_absent` must have succeeded.
    pub(super) fn insert_absent(&mut self, named: &[Named]) -> Result<()> {
        for t in self.tight_tables(named) {
            let (seen, _, chosen) = self.plan_room(named, t)?;
            let table = &mut self.tables[t];
            let evicted = table.end_sweep(chosen)?;
            table.note(Outcomes { evicted, ..Outcomes::default() });
            for keys in &seen.of_lookups {
                let room = table.room(keys.len(), 0)?;
                let new = seen.new_keys(table, &room, keys)?;
                let outcomes = table.admit(&room, &new, None)?;
                table.note(outcomes);
            }
            table.candidates_mut()?.is_closed = true;
            table.has_moved = true;
        }
        Ok(())
    }

    /// Returns the keys of a table that pushes may insert, how many of them a commit would insert now, and the rows that go for them.
    fn plan_room(&mut self, named: &[Named], table: usize) -> Result<(Seen, u64, Option<Chosen>)> {
        let seen = self.seen(named, table)?;
        let table = &mut self.tables[table];
        let keys = seen.of_lookups.concat();
        let room = table.room(keys.len(), 0)?;
        let num_new = seen.new_keys(table, &room, &keys)?.len() as u64;
        let chosen = table.sweep_for(num_new, room.used(keys.len()))?;
        Ok((seen, num_new, chosen))
    }

    /// The tables that might not have room for all candidates of these pushes. The counts of the device must be known.
    fn tight_tables(&self, named: &[Named]) -> Vec<usize> {
        let refusing = self.refusing(&self.lookups_of(named));
        refusing.into_iter().enumerate().filter(|(_, refuses)| *refuses).map(|(t, _)| t).collect()
    }

    fn seen(&self, named: &[Named], table: usize) -> Result<Seen> {
        let candidates = self.tables[table].candidates.as_ref();
        let counts_ids = candidates.is_some_and(|candidates| candidates.counts_ids());
        let mut seen = Seen::default();
        for lookup in self.lookups_of(named) {
            if !lookup.has_candidates() || !self.has_records_of(&lookup, table) {
                continue;
            }
            let ids = self.workspace.absent_ids(&lookup.saved, table, Stream::DEFAULT)?;
            for id in &ids {
                let (_, more) = seen.sights.entry(id.key).or_insert((id.sights, 0));
                *more = if counts_ids { *more + u64::from(id.ids) } else { 1 };
            }
            seen.of_lookups.push(ids.into_iter().map(|id| id.key).collect());
        }
        Ok(seen)
    }

    // ---- on the device

    /// Enqueues inserting the candidates of the only pending push, if the ticket names it. Called after `resolve`.
    pub(super) fn admit_alone(&self, stream: Stream) -> Result<()> {
        let (Committed::Alone(number), Some(push)) = (self.committed, self.alone()) else { return Ok(()) };
        self.admit_candidates(std::slice::from_ref(&push.lookup), (number % RING) as u32, stream)
    }

    /// Enqueues inserting the candidates of lookups. `row`: of the ticket that names the push of the only one, or `RING` if all are known to be named.
    pub(super) fn admit_candidates(
        &self,
        lookups: &[Arc<SavedLookup>],
        row: u32,
        stream: Stream,
    ) -> Result<()> {
        let lookups: Vec<_> = lookups.iter().filter(|lookup| lookup.has_candidates()).collect();
        if lookups.is_empty() {
            return Ok(());
        }
        let started = self.workspace.profiler.start(stream)?;
        let named = (self.resolved.address(), row);
        let is_counted = lookups.len() > 1;
        let [count, end] = [AdmissionPart::Count, AdmissionPart::End].map(|part| is_counted.then_some(part));
        for part in count.into_iter().chain([AdmissionPart::Admit { is_counted }]).chain(end) {
            for lookup in &lookups {
                self.workspace.admit(&self.tables, &lookup.saved, named, part, stream)?;
            }
        }
        self.workspace.profiler.stop(StepPart::Insert, started, stream)
    }

    /// Enqueues what the step of the commit ends with for the sights of candidates.
    pub(super) fn age_candidates(&self, stream: Stream) -> Result<()> {
        // With its report the host learns that the step has ended.
        let is_seen = u64::from(self.unseen.is_none());
        let mut candidates = self.tables.iter().filter_map(|table| table.candidates.as_ref());
        candidates.try_for_each(|candidates| {
            candidates.age(candidates.step - is_seen, self.resolved.address(), stream)
        })
    }

    // ---- candidates of new lookups

    /// Makes room for the candidates of a lookup. `ids`: by table, the number of ids that may become candidates.
    ///
    /// # Errors
    /// [`Error::Device`] without enough memory. Errors of the last commit.
    pub(super) fn expect_new_candidates(&mut self, ids: &[u64], stream: Stream) -> Result<()> {
        let mut is_idle = false;
        for (t, &ids) in ids.iter().enumerate().filter(|(_, ids)| **ids > 0) {
            if !self.tables[t].candidates_mut()?.has_room(ids) {
                if !is_idle {
                    self.settle()?;
                    self.workspace.device.synchronize()?;
                    is_idle = true;
                }
                if !self.tables[t].candidates_mut()?.has_room(ids) {
                    let pushed = self.ring.iter().map(|push| &push.lookup);
                    for lookup in distinct(self.lookups.iter().chain(pushed)) {
                        if lookup.has_candidates() && self.has_records_of(&lookup, t) {
                            self.workspace.mark_candidates(&lookup.saved, t, Stream::DEFAULT)?;
                        }
                    }
                    self.tables[t].candidates_mut()?.make_room(ids, stream)?;
                }
            }
            self.tables[t].candidates_mut()?.expect(ids);
        }
        Ok(())
    }
}

/// Returns these lookups, each once.
pub(super) fn distinct<'a>(lookups: impl Iterator<Item = &'a Arc<SavedLookup>>) -> Vec<Arc<SavedLookup>> {
    let mut all: Vec<Arc<SavedLookup>> = Vec::new();
    for lookup in lookups {
        if !all.iter().any(|other| Arc::ptr_eq(other, lookup)) {
            all.push(lookup.clone());
        }
    }
    all
}
