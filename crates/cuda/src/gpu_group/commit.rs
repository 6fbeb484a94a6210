//! Commit and apply of one group: from the pushes that a ticket names to updated records.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use sok_core::contract::binding::Binding;
use sok_core::contract::group::Group;
use sok_core::contract::profile::StepPart;
use sok_core::contract::ticket::{Named, RING, gone};
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;

use super::{Combined, Committed, GpuGroup, Push, SavedLookup, SharedTotals, absent};
use crate::abi::{self, COUNTS_WORDS, PREPARED_WORDS, REPORT_WORDS, word_of};
use crate::device::{Device, Stream};
use crate::gpu_table::GpuTable;
use crate::gpu_table::eviction::Evictor;
use crate::gpu_table::expiry::PlannedExpiry;
use crate::memory::{Buffer, Shared};
use crate::rule;
use crate::step::{By, Saved, Taking, num_described};

impl GpuGroup {
    // ---- commit

    /// Reads the report of the last commit. Waits for it if it is not written yet. Drops the pushes that the commit named, because their updates are enqueued; a push that is not applied yet goes to `carried`. Takes over which rows the commit has removed, if the host must know them now, and waits for the device then.
    ///
    /// # Errors
    /// [`Error::Ticket`] if the ticket was wrong; nothing was applied. The steps in progress have ended then.
    pub fn settle(&mut self) -> Result<()> {
        if let Some(error) = self.unheard.take() {
            return Err(error);
        }
        let taken = self.take_named().inspect_err(|_| self.committed = Committed::Nothing)?;
        // The device has counted their uses and inserted their keys.
        for (_, push) in &taken {
            push.lookup.is_counted.store(true, Relaxed);
            push.lookup.is_admitted.store(true, Relaxed);
        }
        if matches!(self.committed, Committed::Alone(_)) {
            self.carry(taken);
        } else {
            taken.into_iter().for_each(|(_, push)| self.reuse(push));
        }
        self.take_expired()
    }

    /// Returns the pushes that the last commit named, with their weights, if the host has not read its report yet. Waits for the
    /// report.
    fn take_named(&mut self) -> Result<Vec<(f32, Push)>> {
        let Some(commit) = self.unseen.take() else { return Ok(Vec::new()) };
        self.wait_for(&self.report, word_of!(ReportHead, commit), commit)?;
        let counts_of = |report: &Shared, number: usize| report.get_all(REPORT_WORDS + COUNTS_WORDS * number);
        let num_tables = self.tables.len();
        for (t, table) in self.tables.iter_mut().enumerate() {
            table.learn_from(counts_of(&self.report, t), self.ids_since[t]);
            if let Some(candidates) = &mut table.candidates {
                candidates.learn_from(counts_of(&self.report, num_tables + t));
            }
        }
        if self.report.get(word_of!(ReportHead, is_due)) == 0 {
            self.evictors().for_each(Evictor::refuse_commit);
            // The call that enqueued the commit has returned without this error.
            self.abandon_steps();
            let (row, weight) = (
                self.report.get(word_of!(ReportHead, bad_row)),
                self.report.get_float(word_of!(ReportHead, bad_weight)),
            );
            return Err(Error::Ticket {
                tables: self.names(),
                what: gone(u64::from(row), weight, self.ring.len()),
            });
        }
        let named = self.report.get_wide(word_of!(ReportHead, named));
        let weight =
            |number: u64| self.report.get_float(word_of!(ReportHead, weights) + (number % RING) as usize);
        let named: Vec<Named> = (self.ring.numbers().filter(|number| named >> (number % RING) & 1 == 1))
            .map(|number| Named { number, weight: weight(number) })
            .collect();
        let (taken, dropped) = self.ring.take(&named);
        dropped.into_iter().for_each(|push| self.reuse(push));
        self.num_commits += 1;
        for table in &mut self.tables {
            let lifetime = table.config.time_to_live.map(|time_to_live| time_to_live.lifetime);
            if let Some(evictor) = &mut table.evictor {
                evictor.end_step(self.num_commits, lifetime);
            }
            if let Some(candidates) = &mut table.candidates {
                table.has_moved |= candidates.end_step();
            }
        }
        taken.iter().for_each(|(_, push)| push.lookup.is_open.store(false, Relaxed));
        // Another push of the same lookup may still wait.
        self.ring.iter().for_each(|push| push.lookup.is_open.store(true, Relaxed));
        if let Some(oldest) = taken.iter().map(|(_, push)| push.lookup.number).min() {
            self.forget_lookups(oldest);
        }
        Ok(taken)
    }

    /// Takes over which rows the last commit has removed because their time was over, if their numbers must not be given out before. Waits for the
    /// device then.
    pub(super) fn take_expired(&mut self) -> Result<()> {
        if !self.tables.iter().any(GpuTable::has_unread_expiry) {
            return Ok(());
        }
        self.workspace.device.synchronize()?;
        for table in self.tables.iter_mut().filter(|table| table.has_unread_expiry()) {
            table.learn()?;
            table.take_departures()?;
        }
        Ok(())
    }

    /// As `settle`. The next call returns the error.
    pub(super) fn settle_later(&mut self) {
        let earlier = self.unheard.take();
        let later = self.settle().err();
        self.unheard = earlier.or(later);
    }

    fn evictors(&mut self) -> impl Iterator<Item = &mut Evictor> {
        self.tables.iter_mut().filter_map(|table| table.evictor.as_deref_mut())
    }

    /// Number of the commit in progress, or else of the newest one, as policies count commits.
    fn newest_commit(&self) -> u64 {
        self.num_commits + u64::from(self.unseen.is_some())
    }

    /// Waits until a kernel has written this number, from a word of the memory on.
    pub(super) fn wait_for(&self, memory: &Shared, word: usize, number: u64) -> Result<()> {
        let mut tries = 0u32;
        while memory.get_wide(word) != number {
            tries += 1;
            std::hint::spin_loop();
            if tries.is_multiple_of(1 << 14) {
                // A launch may have failed. Only a call of the driver returns that.
                if self.workspace.is_idle()? && memory.get_wide(word) != number {
                    return Err(Error::Device("a step was lost on the GPU".into()));
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Reads the report of the last commit, and makes room in rings for the rows that this one removes. A commit calls this for all groups before it
    /// enqueues work.
    ///
    /// # Errors
    /// The errors of `settle`, and [`Error::Device`] if the device has failed.
    pub(crate) fn prepare_commit(&mut self) -> Result<()> {
        self.check_own_fault()?;
        self.settle()?;
        self.tables.iter_mut().try_for_each(GpuTable::prepare_expiry)
    }

    /// Returns what the kernel `resolve` needs of this group, after `prepare_commit`. `accumulates`: whether the optimizer accumulates the gradients of
    /// several steps.
    pub(crate) fn begin_commit(
        &mut self,
        ticket: u64,
        accumulates: bool,
        stream: Stream,
    ) -> Result<abi::Committed> {
        self.workspace.enter(stream)?;
        self.workspace.describe(&mut self.tables, stream)?;
        self.drop_stale(stream)?;
        self.tables.iter_mut().for_each(GpuTable::count_call);
        self.tables.iter_mut().for_each(GpuTable::expect_report);
        let oldest = self.ring.numbers().next().unwrap_or(0);
        let pending = self.ring.numbers().fold(0u64, |bits, number| bits | 1 << (number - oldest));
        self.committed = match self.ring.numbers().next() {
            _ if self.combined.is_some() => Committed::Combined,
            _ if !self.carried.is_empty() => Committed::Combined,
            None => Committed::Nothing,
            Some(number) if self.ring.len() == 1 && !accumulates => Committed::Alone(number),
            Some(_) => Committed::Combined,
        };
        self.unseen = Some(self.next_commit);
        self.unseen_push = if let Committed::Alone(number) = self.committed { Some(number) } else { None };
        self.next_commit += 1;
        self.ids_since.fill(0);
        self.tables.iter_mut().filter_map(|t| t.candidates.as_mut()).for_each(|c| c.expect_report());
        self.expect_candidates();
        Ok(abi::Committed {
            ticket,
            resolved: self.resolved.address(),
            report: self.report.address(),
            tables: self.workspace.tables(),
            commit: self.next_commit - 1,
            oldest,
            pending,
            num_tables: num_described(&self.tables) as u32,
            pad: 0,
        })
    }

    /// Inserts keys of the committed pushes. Also takes the pushes and counts the uses of their rows, if there may be several. Called after
    /// `resolve`. Waits for the report then.
    pub(crate) fn take_committed(&mut self, stream: Stream) -> Result<()> {
        if self.committed != Committed::Combined {
            self.admit_alone(stream)?;
            return self.age_candidates(stream);
        }
        let taken = self.take_named().inspect_err(|_| self.committed = Committed::Nothing)?;
        let lookups = absent::distinct(taken.iter().map(|(_, push)| &push.lookup));
        self.admit_candidates(&lookups, RING as u32, stream)?;
        self.age_candidates(stream)?;
        let mut lookups = Vec::new();
        for (_, push) in &taken {
            push.lookup.is_admitted.store(true, Relaxed);
            let taking = self.take_uses(&push.lookup, RING as u32, self.num_commits, stream)?;
            lookups.push((&push.lookup.saved, taking));
        }
        self.workspace.give_scores(&self.tables, &lookups, stream)?;
        self.carry(taken);
        Ok(())
    }

    /// Combines the taken pushes into one, if there may be several. Waits for the device if it combines.
    pub(crate) fn combine(&mut self, stream: Stream) -> Result<()> {
        if self.committed == Committed::Combined { self.combine_carried(stream) } else { Ok(()) }
    }

    /// Enqueues counting the uses of the rows of a lookup, and noting that a commit takes their gradients. `row`: of the ticket that names
    /// its push, or `RING` if it is known to be named.
    pub(super) fn take_uses(
        &self,
        lookup: &SavedLookup,
        row: u32,
        commit: u64,
        stream: Stream,
    ) -> Result<Taking> {
        let is_named = row == RING as u32;
        let is_first = if is_named { lookup.count_once() } else { !lookup.is_counted.load(Relaxed) };
        let taking = Taking { commit, resolved: self.resolved.address(), row, is_first };
        self.workspace.take_uses(&self.tables, &lookup.saved, taking, stream)?;
        Ok(taking)
    }

    /// Enqueues what a commit does with uses of rows: counts those of the step, removes rows whose time to live is over, and ends the step.
    /// Called after `take_committed`.
    pub(crate) fn end_step(&mut self, stream: Stream) -> Result<()> {
        if self.tables.iter().all(|table| table.evictor.is_none()) {
            return Ok(());
        }
        // With its report the host learns that the step has ended.
        let is_seen = u64::from(self.unseen.is_none());
        let ended = |evictor: &Evictor| evictor.step - is_seen;
        let commit = self.newest_commit();
        let is_valid = self.unseen.is_none();
        let mut planned = Vec::new();
        for (number, table) in self.tables.iter_mut().enumerate() {
            let Some(step) = table.evictor.as_deref().map(ended) else { continue };
            planned.extend(table.plan_expiry(number, commit, step, is_valid));
        }
        let enqueued = Cell::new(0);
        let done = self.workspace.beside(stream, |side| {
            if let (Committed::Alone(number), Some(push)) = (self.committed, self.alone()) {
                let taking = self.take_uses(&push.lookup, (number % RING) as u32, commit, side)?;
                self.workspace.give_scores(&self.tables, &[(&push.lookup.saved, taking)], side)?;
            }
            self.workspace.expire(&planned, self.resolved.address(), &enqueued, side)?;
            self.workspace.end_steps(&self.tables, self.resolved.address(), ended, side)
        });
        for PlannedExpiry { expiry, .. } in &planned[..enqueued.get()] {
            self.tables[expiry.table as usize].note_expiry(expiry);
        }
        done
    }

    /// Reads the report of the last commit, as `settle`, which will return the error.
    pub(super) fn settle_for_policies(&mut self) {
        if self.tables.iter().any(|table| table.evictor.is_some() || table.candidates.is_some()) {
            self.settle_later();
        }
    }

    /// As `settle_for_policies`, takes over which rows sweeps have removed, and lets all rows take the steps that they have missed.
    pub(super) fn settle_for_tables(&mut self) {
        self.settle_for_policies();
        let done = self.take_departures().and_then(|()| self.catch_up_tables());
        self.unheard = self.unheard.take().or(done.err());
    }

    /// Takes over which rows sweeps have removed. Waits for them.
    fn take_departures(&mut self) -> Result<()> {
        if self.tables.iter().any(GpuTable::has_unread_sweeps) {
            self.workspace.device.synchronize()?;
        }
        self.tables.iter_mut().try_for_each(GpuTable::take_departures)
    }

    /// Accumulates the committed gradients, in a step that does not update. Called after `commit`.
    pub(crate) fn accumulate(&mut self, stream: Stream) -> Result<()> {
        self.workspace.join_uses(stream)?;
        self.settle()?;
        self.committed = Committed::Nothing;
        self.combine_carried(stream)
    }

    /// Merges the carried pushes, and adds them to `combined`.
    fn combine_carried(&mut self, stream: Stream) -> Result<()> {
        let carried = std::mem::take(&mut self.carried);
        if carried.is_empty() {
            return Ok(());
        }
        let (mut merged, mut lookups) = (Vec::new(), Vec::new());
        if let Some(before) = self.combined.take() {
            merged.push((1.0, Arc::new(SavedLookup::new(0, before.saved)), before.sums));
            lookups = before.lookups;
        }
        for (weight, push) in carried {
            self.refresh_sides(&push, stream)?;
            let sums = match push.sums {
                Some(sums) => sums,
                None => {
                    let sums = self.workspace.take_sums(&push.lookup.saved)?;
                    self.workspace.merge(&push.lookup.saved, Some(sums.address()), stream)?;
                    sums
                }
            };
            push.copy.into_iter().for_each(|copy| self.workspace.give_back(copy));
            if self.must_keep_rows(&push.lookup) {
                lookups.push(push.lookup.clone());
            } else {
                push.lookup.num_unapplied.fetch_sub(1, Relaxed);
            }
            merged.push((weight, push.lookup, sums));
        }
        let parts: Vec<_> =
            merged.iter().map(|(weight, l, sums)| (*weight, &l.saved, sums.address())).collect();
        let (saved, sums) = self.workspace.combine(&self.tables, &parts, stream)?;
        self.combined = Some(Combined { saved, sums, lookups });
        for (_, lookup, sums) in merged {
            self.workspace.give_back(sums);
            self.reuse_lookup(lookup);
        }
        Ok(())
    }

    /// Returns whether sweeps could remove rows of a lookup.
    fn must_keep_rows(&self, lookup: &SavedLookup) -> bool {
        lookup.saved.generations.iter().any(|&(table, _)| self.tables[table].config.eviction.is_some())
    }

    /// Writes the sides of a push to the device, if the device has others.
    pub(super) fn refresh_sides(&self, push: &Push, stream: Stream) -> Result<()> {
        let saved = &push.lookup.saved;
        let sides = self.sides(saved, &push.rows, &push.factors, push.window.as_ref());
        let mut delivered = push.lookup.sides();
        if sides != *delivered {
            self.workspace.deliver_sides(saved, &sides, stream)?;
            *delivered = sides;
        }
        Ok(())
    }

    /// Enqueues adding the squared norm of the committed gradients to `total`, the address of a float64. Merges them first.
    pub(crate) fn add_norm(&mut self, total: u64, stream: Stream) -> Result<()> {
        let row = match self.committed {
            Committed::Nothing => return Ok(()),
            Committed::Alone(number) => (number % RING) as u32,
            Committed::Combined => RING as u32,
        };
        let prepared = self.prepared_of(0);
        self.workspace.prepare_weight(self.resolved.address(), row, prepared, stream)?;
        if let Committed::Alone(_) = self.committed {
            self.merge_alone(stream)?;
        }
        let (saved, sums) = match (self.committed, &self.combined, self.alone()) {
            (Committed::Combined, Some(c), _) => (&c.saved, c.sums.address()),
            (Committed::Alone(_), _, Some(Push { lookup, sums: Some(sums), .. })) => {
                (&lookup.saved, sums.address())
            }
            _ => return Ok(()),
        };
        let started = self.workspace.profiler.start(stream)?;
        self.workspace.sum_squares(saved, sums, prepared, &self.totals, stream)?;
        if let Some(SharedTotals { of, peers, norms, commit }) = &self.shared_totals {
            self.workspace.share_norms(peers, of.nccl(), norms, *commit, stream)?;
        }
        self.workspace.finish_norms(&self.totals, &self.norms, total, stream)?;
        self.workspace.profiler.stop(StepPart::Norm, started, stream)
    }

    /// Enqueues merging the push of `Committed::Alone`, if it has not been merged.
    pub(super) fn merge_alone(&mut self, stream: Stream) -> Result<()> {
        let Some(push) = self.alone().filter(|push| push.sums.is_none()) else { return Ok(()) };
        self.refresh_sides(push, stream)?;
        let lookup = push.lookup.clone();
        let sums = self.workspace.take_sums(&lookup.saved)?;
        self.workspace.merge(&lookup.saved, Some(sums.address()), stream)?;
        if let Some(push) = self.carried.iter_mut().map(|(_, push)| push).chain(self.ring.iter_mut()).next() {
            push.sums = Some(sums);
        }
        Ok(())
    }

    /// Drops the push of `Committed::Alone`, because the step has failed on the host after its commit. The sums of several pushes stay, as
    /// accumulated gradients do.
    pub(super) fn drop_alone(&mut self) {
        self.settle_later();
        self.drop_carried();
        let lookups = self.combined.as_mut().map(|combined| std::mem::take(&mut combined.lookups));
        self.drop_combined(lookups.unwrap_or_default());
        self.committed = Committed::Nothing;
        let newest = self.num_commits;
        for evictor in self.evictors() {
            evictor.commits.settled = newest;
            // A device that has failed raises that elsewhere.
            let _ = evictor.write_settled();
        }
    }

    /// The push of `Committed::Alone`.
    pub(super) fn alone(&self) -> Option<&Push> {
        self.carried.iter().map(|(_, push)| push).chain(self.ring.iter()).next()
    }

    /// Device memory of the squared norm of all gradients, if this is the first group of the optimizer.
    pub(crate) fn norm(&self) -> &Buffer<f64> {
        &self.norm
    }

    // ---- apply

    /// Address of the `Prepared` of an optimizer.
    fn prepared_of(&self, optimizer: usize) -> u64 {
        self.prepared.at(optimizer * PREPARED_WORDS)
    }

    /// Returns what the kernel `prepare` needs of this group for its tables' own optimizers. `scalars`: as for `apply`.
    pub(crate) fn other_preparations<'a>(
        &'a self,
        binding: &'a Binding,
        scalars: u64,
    ) -> impl Iterator<Item = (&'a Update, abi::Preparation)> {
        (1..self.workspace.num_optimizers()).map(move |optimizer| {
            let update = binding.update_by(optimizer);
            let preparation = abi::Preparation {
                prepared: self.prepared_of(optimizer),
                ..self.preparation(update, false, scalars_of(binding, optimizer, scalars), 0, 0)
            };
            (update, preparation)
        })
    }

    /// Returns what the kernel `prepare` needs of this group for the model's optimizer. `is_update`: whether it updates rows. `scalars`, `trigger` and
    /// `new_trigger` are addresses.
    pub(crate) fn preparation(
        &self,
        update: &Update,
        is_update: bool,
        scalars: u64,
        trigger: u64,
        new_trigger: u64,
    ) -> abi::Preparation {
        let row = if let Committed::Alone(number) = self.committed { number % RING } else { RING };
        let counts_commits = self.tables.iter().any(|table| table.config.time_to_live.is_some());
        abi::Preparation {
            scalars,
            resolved: self.resolved.address(),
            prepared: self.prepared.address(),
            trigger,
            new_trigger,
            conditioning: rule::conditioning(update),
            formula: rule::scalars(&update.rule),
            tables: self.workspace.tables(),
            commit: self.newest_commit(),
            row: row as u32,
            num_tables: if is_update && counts_commits { self.tables.len() as u32 } else { 0 },
            pad: 0,
        }
    }

    /// Enqueues updating the records of all committed gradients. Called after `prepare`.
    pub(crate) fn update(&mut self, binding: &Binding, scalars: u64, stream: Stream) -> Result<()> {
        self.tables.iter_mut().for_each(|table| table.has_loaded_states = false);
        self.update_records(binding, scalars, stream)?;
        self.end_steps_of_rows(binding, stream)?;
        self.workspace.join_uses(stream)
    }

    /// Enqueues updating the records of a lookup by all optimizers that have a formula; the new values of another have come. `sums`: address of
    /// merged gradients.
    fn update_by_all(
        &self,
        saved: &Saved,
        binding: &Binding,
        sums: Option<u64>,
        scalars: u64,
        stream: Stream,
    ) -> Result<()> {
        self.workspace.note_updated(saved, self.prepared_of(0), stream)?;
        for optimizer in 0..self.workspace.num_optimizers() {
            let update = binding.update_by(optimizer);
            if update.rule.is_general() {
                continue;
            }
            let factors = update.clipnorm.map_or(0, |_| self.factors.address());
            if let Some(clipnorm) = update.clipnorm {
                let scalars = scalars_of(binding, optimizer, scalars);
                self.workspace.clip_factors(&self.norms, scalars, clipnorm, factors, stream)?;
            }
            let by = By { optimizer, update, prepared: self.prepared_of(optimizer), factors };
            self.begin_steps(saved, &by, stream)?;
            match sums {
                Some(sums) => self.workspace.update_sums(saved, &by, sums, stream)?,
                None => self.workspace.update(saved, &by, stream)?,
            }
        }
        Ok(())
    }

    fn update_records(&mut self, binding: &Binding, scalars: u64, stream: Stream) -> Result<()> {
        self.forget_pieces();
        let committed = std::mem::take(&mut self.committed);
        let newest = self.newest_commit();
        self.evictors().for_each(|evictor| evictor.commits.settled = newest);
        match committed {
            Committed::Alone(_) => {
                let Some(push) = self.alone() else { return Ok(()) };
                self.refresh_sides(push, stream)?;
                let sums = push.sums.as_ref().map(Buffer::address);
                self.update_by_all(&push.lookup.saved, binding, sums, scalars, stream)?;
                self.drop_carried();
            }
            // Earlier steps may have accumulated gradients.
            Committed::Nothing | Committed::Combined => {
                let Some(combined) = self.combined.take() else { return Ok(()) };
                let sums = Some(combined.sums.address());
                self.update_by_all(&combined.saved, binding, sums, scalars, stream)?;
                self.workspace.give_back(combined.sums);
                self.workspace.give_back(combined.saved.memory);
                self.drop_combined(combined.lookups);
            }
        }
        Ok(())
    }

    /// Begins an apply on this stream.
    pub(crate) fn enter(&mut self, stream: Stream) -> Result<()> {
        self.tables.iter_mut().for_each(GpuTable::count_call);
        self.workspace.enter_apply(stream)?;
        self.workspace.describe(&mut self.tables, stream)?;
        self.drop_stale(stream)
    }

    /// Drops the combined gradients of records that are gone.
    pub(super) fn drop_stale(&mut self, stream: Stream) -> Result<()> {
        let Some(combined) = self.combined.take_if(|c| c.saved.is_stale(&self.tables)) else { return Ok(()) };
        let part = (1.0, &combined.saved, combined.sums.address());
        let (saved, sums) = self.workspace.combine(&self.tables, &[part], stream)?;
        self.workspace.give_back(combined.sums);
        self.workspace.give_back(combined.saved.memory);
        self.combined = Some(Combined { saved, sums, lookups: combined.lookups });
        Ok(())
    }

    /// The device of all tables of the group.
    pub fn device(&self) -> &Arc<Device> {
        &self.workspace.device
    }
}

/// Address of the scalars of an optimizer. `scalars`: of row 0.
fn scalars_of(binding: &Binding, optimizer: usize, scalars: u64) -> u64 {
    scalars + (16 * binding.row_of(optimizer)) as u64
}
