//! The commit of a group: which pushes count, and the norm of their gradients.

use super::HostGroup;
use crate::contract::group::Group;
use crate::contract::profile::StepPart;
use crate::contract::table::Outcomes;
use crate::contract::ticket::{Named, PushRing};
use crate::error::{Error, Result};
use crate::host::exact_sum::ExactSum;
use crate::host::merge::{MergedGradients, RecordGradients, StoredGradients};
use crate::host::push::{Push, PushedGradients, SavedTable, merge_push};
use crate::host::room::{add_used, check_capacity, distinct, insert};
use crate::host::sights::{count_sights, num_admitted};
use crate::host::table::HostTable;
use crate::host::uses::{give_scores, take_uses};
use crate::key::Key;
use crate::math::sum_of_squares;
use crate::pool::{Pool, num_pieces, run_if_large};
use crate::store::arena::NO_RECORD;

impl HostGroup {
    /// The pushes that a ticket names. Changes nothing.
    ///
    /// # Errors
    /// [`Error::Ticket`] if one of them no longer exists.
    pub fn resolve(&self, ticket: &[f32]) -> Result<Vec<Named>> {
        self.ring.resolve(ticket).map_err(|what| Error::Ticket { tables: self.names(), what })
    }

    /// Checks that the tables have room for the absent keys of these pushes. Changes no table.
    ///
    /// # Errors
    /// [`Error::TableFull`] if a table would refuse some, and its check mode is to raise. The steps in progress have ended then.
    pub fn check_absent(&self, named: &[Named]) -> Result<()> {
        let checked = self.tables.iter().enumerate().try_for_each(|(number, table)| {
            let lookups = absent_of(&self.ring, named, number, table.generation);
            if surely_fit(table, &lookups) {
                return Ok(());
            }
            let num_new = num_admitted(table, &lookups)?;
            check_capacity(table, num_new, |table, used| add_used(table, keys_of(&lookups), used))
        });
        checked.inspect_err(|_| self.abandon_steps())
    }

    /// Inserts the absent keys of these pushes, in the order of the pushes. Keys that the table does not admit or has no room for get no
    /// row. Returns whether there were absent keys.
    fn insert_absent(&mut self, named: &[Named]) -> Result<bool> {
        self.tables.iter_mut().for_each(HostTable::begin);
        let (mut inserted, mut evicted, mut done) = (Vec::new(), Vec::new(), Ok(()));
        for (number, table) in self.tables.iter_mut().enumerate() {
            let lookups = absent_of(&self.ring, named, number, table.generation);
            done = done.and_then(|()| {
                count_sights(table, &lookups)?;
                evicted.push(make_room_for(table, &lookups)?);
                for absent in lookups.iter().filter_map(|saved| saved.looked.absent.as_ref()) {
                    inserted.push((number, absent, insert(table, absent)?));
                }
                table.start_new_rows()
            });
        }
        if done.is_err() {
            self.tables.iter_mut().for_each(HostTable::undo);
            return done.map(|()| false);
        }
        let were_any = !inserted.is_empty();
        for (table, evicted) in self.tables.iter_mut().zip(evicted) {
            table.note(Outcomes { evicted, ..Outcomes::default() }, 0);
            table.forget_inserted();
        }
        for (number, absent, (records, outcomes)) in inserted {
            absent.settle(records);
            self.tables[number].note(outcomes, absent.num_dropped_ids());
        }
        Ok(were_any)
    }

    /// Takes the pushes that `resolve` named, and inserts their absent keys. Returns the squared norm of all gradients to apply,
    /// accumulated ones included, if the optimizer needs it and this step is an update; else 0.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn commit(&mut self, named: &[Named], is_update: bool, pool: &Pool) -> Result<f64> {
        self.take_named(named, pool)?;
        if !(is_update && self.binding.as_ref().is_some_and(|b| b.needs_norm)) {
            return Ok(0.0);
        }
        let squares = self.squares(pool)?;
        Ok(self.set_norms(&squares))
    }

    /// Takes the pushes that `resolve` named, and inserts their absent keys.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub(in crate::host) fn take_named(&mut self, named: &[Named], pool: &Pool) -> Result<()> {
        self.new_values.forget();
        let start = self.stopwatch.start();
        if self.insert_absent(named)? {
            self.stopwatch.stop(StepPart::Insert, start);
        }
        let (taken, dropped) = self.ring.take(named);
        dropped.into_iter().for_each(|push| self.reuse(push));
        self.count_uses(&taken, pool);
        let oldest = taken.iter().map(|(_, push)| push.lookup.number).min();
        self.committed.extend(taken);
        if let Some(oldest) = oldest {
            self.forget_lookups(oldest);
        }
        self.tables.iter_mut().for_each(HostTable::count_call);
        Ok(())
    }

    /// Counts the uses of rows in the step that a commit ends, and ends it.
    fn count_uses(&mut self, taken: &[(f32, Push)], pool: &Pool) {
        if !self.tables.iter().any(HostTable::has_policy) {
            return;
        }
        self.num_commits += 1;
        let commit = self.num_commits;
        let lookups: Vec<_> =
            taken.iter().map(|(_, push)| (&*push.lookup, push.lookup.count_once())).collect();
        let num_ids = lookups.iter().flat_map(|(lookup, _)| &lookup.tables).map(|t| t.looked.num_ids()).sum();
        let tables = self.tables.iter_mut().enumerate().collect();
        run_if_large(num_ids, tables, pool, |(number, table): (usize, &mut HostTable)| {
            let generation = table.generation;
            let is_own = |saved: &&SavedTable| saved.number == number && saved.generation == generation;
            for (lookup, is_first) in &lookups {
                let own = lookup.tables.iter().filter(is_own);
                own.for_each(|saved| take_uses(table, saved, commit, *is_first));
            }
            let first = lookups.iter().filter(|(_, is_first)| *is_first);
            let own = first.flat_map(|(lookup, _)| &lookup.tables).filter(is_own);
            let given: Vec<&[(Key, u64)]> = own.map(|saved| &saved.scores[..]).collect();
            give_scores(table, &given);
            table.end_step(commit);
        });
        taken.iter().for_each(|(_, push)| push.lookup.set_open(false));
        // Another push of the same lookup may still wait.
        self.ring.iter().for_each(|push| push.lookup.set_open(true));
    }

    /// Lets sweeps remove the rows whose gradients were committed: they were applied, or dropped.
    pub(super) fn settle_commits(&mut self) {
        let evictors = self.tables.iter_mut().filter_map(|table| table.evictor.as_mut());
        evictors.for_each(|evictor| evictor.commits.settled = self.num_commits);
    }

    /// Returns the sum of the squared gradients of each table, all that is to be applied.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub(in crate::host) fn squares(&mut self, pool: &Pool) -> Result<Vec<ExactSum>> {
        self.merge_committed(pool)?;
        let start = self.stopwatch.start();
        let squares = (0..self.tables.len()).map(|table| self.table_squares(table, pool)).collect();
        self.stopwatch.stop(StepPart::Norm, start);
        Ok(squares)
    }

    /// Stores the squared norm of each table. Returns their sum over the tables that the model's optimizer updates.
    pub(in crate::host) fn set_norms(&mut self, squares: &[ExactSum]) -> f64 {
        let mut total = 0.0;
        for ((to, squares), table) in self.norms.iter_mut().zip(squares).zip(&self.tables) {
            let norm = squares.total();
            *to = norm as f32;
            total += if table.config.optimizer == 0 { norm } else { 0.0 };
        }
        total
    }

    /// Merges gradients that were not merged at the push. Several pushes, and accumulated gradients, become one sum for each record.
    pub(super) fn merge_committed(&mut self, pool: &Pool) -> Result<()> {
        if self.committed.len() > 1 || self.accumulators.iter().any(|a| !a.is_empty()) {
            return self.accumulate(pool);
        }
        let mut committed = std::mem::take(&mut self.committed);
        for (_, push) in &mut committed {
            if let PushedGradients::Held { rows, .. } = &push.gradients {
                let start = self.stopwatch.start();
                let merged = merge_push(&push.lookup, rows, &mut self.spare, pool)?;
                self.stopwatch.stop(StepPart::Merge, start);
                push.gradients = PushedGradients::Merged(merged);
            }
        }
        self.committed = committed;
        Ok(())
    }

    /// Adds the committed pushes to the accumulators, in order.
    ///
    /// # Errors
    /// [`Error::Memory`]. The committed pushes are dropped then; what was accumulated before stays.
    pub(super) fn accumulate(&mut self, pool: &Pool) -> Result<()> {
        let committed = std::mem::take(&mut self.committed);
        let mut accumulators = self.accumulators.iter_mut().enumerate();
        let room = accumulators.try_for_each(|(number, accumulator)| accumulator.reserve(number, &committed));
        if room.is_err() {
            committed.into_iter().for_each(|(_, push)| self.reuse(push));
            return room;
        }
        let ids_of =
            |(_, push): &(f32, Push)| push.lookup.tables.iter().map(|t| t.looked.num_ids()).sum::<usize>();
        let num_ids: usize = committed.iter().map(ids_of).sum();
        let start = self.stopwatch.start();
        let generations = self.tables.iter().map(|table| table.generation);
        let tasks: Vec<_> = generations.zip(&mut self.accumulators).enumerate().collect();
        run_if_large(num_ids, tasks, pool, |(number, (generation, accumulator))| {
            for (weight, push) in &committed {
                accumulator.add_push(number, generation, push, *weight);
            }
        });
        self.stopwatch.stop(StepPart::Merge, start);
        committed.into_iter().for_each(|(_, push)| self.reuse(push));
        Ok(())
    }

    fn table_squares(&self, number: usize, pool: &Pool) -> ExactSum {
        let dim = self.tables[number].config.dim;
        let stored = self.stored(number, self.tables[number].generation);
        let num_keys: usize = stored.iter().map(|s| s.records.len()).sum();
        let pieces = stored.iter().flat_map(|s| {
            s.gradients
                .pieces(num_pieces(s.records.len(), num_keys, pool))
                .into_iter()
                .map(move |keys| (s, keys))
        });
        let pieces: Vec<_> = pieces.collect();
        let mut sums = vec![ExactSum::default(); pieces.len()];
        let tasks: Vec<_> = pieces.into_iter().zip(&mut sums).collect();
        run_if_large(num_keys, tasks, pool, |((stored, keys), sum)| {
            let mut gradient = vec![0.0; dim];
            for key in keys.filter(|&key| stored.records[key] != NO_RECORD) {
                stored.gradients.merge::<0>(key, &mut gradient);
                sum.add(sum_of_squares(&gradient));
            }
        });
        let mut total = ExactSum::default();
        sums.iter().for_each(|sum| total.merge(sum));
        total
    }

    /// The gradients to apply to a table, after `merge_committed`.
    pub(super) fn stored<'a>(
        &'a self,
        number: usize,
        generation: u64,
    ) -> Vec<RecordGradients<'a, StoredGradients<'a>>> {
        let mut all = Vec::new();
        for (weight, push) in &self.committed {
            let PushedGradients::Merged(tables) = &push.gradients else { continue };
            for (table, sums) in push.lookup.tables.iter().zip(tables) {
                if table.number == number && table.generation == generation {
                    let runs = table.runs().zip(sums);
                    all.extend(runs.map(|((_, records), sums)| {
                        let gradients = StoredGradients { num_keys: records.len(), sums, weight: *weight };
                        RecordGradients { records, gradients }
                    }));
                }
            }
        }
        all.extend(self.accumulators[number].stored(generation));
        all
    }
}

/// Whether a table has room for all absent keys of these lookups, also if none of them is filtered.
fn surely_fit(table: &HostTable, lookups: &[&SavedTable]) -> bool {
    keys_of(lookups).count() as u64 <= table.room()
}

/// The absent keys of lookups.
fn keys_of<'a>(lookups: &'a [&SavedTable]) -> impl Iterator<Item = Key> + 'a {
    lookups.iter().filter_map(|saved| saved.looked.absent.as_ref()).flat_map(|absent| &absent.keys).copied()
}

/// Makes room for keys that the table is to insert. Returns how many rows went.
fn make_room_for(table: &mut HostTable, lookups: &[&SavedTable]) -> Result<u64> {
    if table.config.eviction.is_none() || surely_fit(table, lookups) {
        return Ok(0);
    }
    let is_new = |key: &Key| table.is_absent(*key) && table.admits(*key, 0);
    let num_new = distinct(keys_of(lookups).filter(is_new))?.len();
    table.make_room(num_new as u64, &|table, used| add_used(table, keys_of(lookups), used))
}

/// The lookups of the named pushes whose absent keys a table of this generation is to insert, each once.
fn absent_of<'a>(
    ring: &'a PushRing<Push>,
    named: &[Named],
    number: usize,
    generation: u64,
) -> Vec<&'a SavedTable> {
    let tables = named.iter().filter_map(|n| ring.get(n.number)).flat_map(|push| &push.lookup.tables);
    let is_own = |saved: &&SavedTable| {
        let absent = &saved.looked.absent;
        saved.number == number
            && saved.generation == generation
            && absent.as_ref().is_some_and(|absent| !absent.is_settled())
    };
    let mut lookups: Vec<&SavedTable> = Vec::new();
    for saved in tables.filter(is_own) {
        if !lookups.iter().any(|other| std::ptr::eq(*other, saved)) {
            lookups.push(saved);
        }
    }
    lookups
}
