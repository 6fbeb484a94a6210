//! Scores of a table's rows, and the rows that it removes to make room.

use std::sync::Weak;

use crate::contract::departures::{Departures, Reason};
use crate::contract::records::Column;
use crate::error::Result;
use crate::key::{Key, hash};
use crate::memory;
use crate::policy::commits::Commits;
use crate::policy::eviction::{Eviction, sweep_size};
use crate::policy::sweep::{Rank, lowest};
use crate::simd::prefetch_slice;
use crate::store::arena::{Arena, NO_RECORD, RecordNumber};
use crate::store::format::RecordFormat;
use crate::store::index::Index;
use crate::store::record_set::RecordSet;
use crate::store::scores::Scores;

/// How many kept rows are prefetched ahead.
const AHEAD: usize = 8;
const WHAT: &str = "the rows that a full table removes";

/// A lookup of training.
pub(crate) trait InProgress: Send + Sync {
    /// Adds the rows that it uses of a table, if they must stay. `number`: of the table in its
    /// group.
    fn add_rows(&self, number: usize, generation: u64, rows: &mut RecordSet);
}

/// The uses of a table's rows, and what it has removed.
pub(crate) struct Evictor {
    /// How uses are counted.
    pub policy: Eviction,
    /// Whether expired rows are kept until they are taken. For evicted rows, `policy` says so.
    keeps_expired: bool,
    pub scores: Scores,
    pub commits: Commits,
    /// Number of the table in its group.
    number: usize,
    /// The saved lookups of the table. The group owns them, so references to lookups that it has forgotten are dead.
    lookups: Vec<Weak<dyn InProgress>>,
    pub departures: Departures,
    /// Rows that this call has removed, which an undo brings back.
    removed: Vec<(Key, RecordNumber)>,
    /// `departures.lens()` at the start of the call.
    lens: [usize; 2],
}

impl Evictor {
    pub fn new(policy: Eviction, keeps_expired: bool) -> Evictor {
        Evictor {
            policy,
            keeps_expired,
            scores: Scores::default(),
            commits: Commits::default(),
            number: 0,
            lookups: Vec::new(),
            departures: Departures::default(),
            removed: Vec::new(),
            lens: [0; 2],
        }
    }

    pub fn num_bytes(&self) -> usize {
        self.scores.num_bytes() + self.departures.num_bytes()
    }

    /// Starts a call that may remove rows.
    pub fn begin(&mut self) {
        self.removed.clear();
        self.departures.trim();
        self.lens = self.departures.lens();
    }

    /// Brings back the rows that the call has removed. Returns false if a row is lost, because the index has no memory to grow.
    pub fn undo(&mut self, index: &mut Index, retired: &mut Vec<(u64, RecordNumber)>) -> bool {
        retired.truncate(retired.len() - self.removed.len());
        self.departures.take_back(self.lens);
        let lost =
            self.removed.drain(..).filter(|(key, record)| index.insert(hash(*key), *key, *record).is_err());
        lost.count() == 0
    }

    /// Remembers the rows that are about to go in a step, in a call that has begun.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). The call has removed nothing then.
    pub fn remember(
        &mut self,
        reason: Reason,
        step: u64,
        going: &[(Rank, RecordNumber)],
        arena: &Arena,
        format: RecordFormat,
    ) -> Result<()> {
        memory::reserve(&mut self.removed, going.len(), WHAT)?;
        let keeps = match reason {
            Reason::Evicted => self.policy.keeps_evicted,
            Reason::Expired => self.keeps_expired,
        };
        if keeps {
            let rows = going.iter().enumerate().map(|(place, &row)| {
                if let Some(&(_, later)) = going.get(place + AHEAD) {
                    prefetch_slice(arena.record(later));
                }
                row
            });
            let read = |record, row: &mut [f32]| format.read_row(arena.record(record), row);
            self.departures.keep(rows, format.dim, read)?;
        }
        let keys = memory::collect(going.iter().map(|(rank, _)| rank.key), WHAT);
        let remembered = keys.and_then(|keys| self.departures.remember(reason, step, keys));
        remembered.inspect_err(|_| self.departures.take_back(self.lens))?;
        self.removed.extend(going.iter().map(|(rank, record)| (rank.key, *record)));
        Ok(())
    }

    /// Gives new records the first scores of a step.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn start(
        &mut self,
        step: u64,
        next: RecordNumber,
        new: impl Iterator<Item = (Key, RecordNumber)>,
    ) -> Result<()> {
        self.scores.reserve(next)?;
        let (score, commit) = (self.policy.first_score(step), self.commits.settled);
        new.for_each(|(key, record)| self.scores.start(record, key, score, commit));
        Ok(())
    }

    /// Returns the number that a record has in a column.
    pub fn number(&self, column: Column, record: RecordNumber) -> u64 {
        let used = self.scores.get(record);
        match column {
            Column::Scores => used.score,
            Column::Ages => self.commits.age(used.commit),
        }
    }

    /// Sets the number that a record has in a column.
    pub fn set_number(&mut self, column: Column, record: RecordNumber, number: u64) {
        match column {
            Column::Scores => self.scores.set_score(record, number),
            Column::Ages => {
                let used = self.scores.use_mut(record);
                used.commit = self.commits.with_age(used.commit, number);
            }
        }
    }

    /// Makes a row as young as a new one, unless it is younger.
    pub fn renew(&mut self, record: RecordNumber) {
        let used = self.scores.use_mut(record);
        used.commit = used.commit.max(self.commits.settled);
    }

    /// Counts a use of each record by a number of ids in a step.
    pub fn count_ids(&mut self, step: u64, uses: impl Iterator<Item = (RecordNumber, u64)>) {
        for (record, num_ids) in uses.filter(|(record, _)| *record != NO_RECORD) {
            let score = self.policy.score_after_use(self.scores.get(record).score, step, num_ids);
            self.scores.set_score(record, score);
        }
    }

    /// Adds a lookup, whose rows stay until their gradients are applied or dropped.
    pub fn add_lookup(&mut self, number: usize, lookup: Weak<dyn InProgress>) {
        self.lookups.retain(|lookup| lookup.strong_count() > 0);
        self.number = number;
        self.lookups.push(lookup);
    }

    /// Adds the rows that lookups use whose gradients were not committed yet.
    pub fn add_rows_in_progress(&self, generation: u64, rows: &mut RecordSet) {
        let lookups = self.lookups.iter().filter_map(Weak::upgrade);
        lookups.for_each(|lookup| lookup.add_rows(self.number, generation, rows));
    }

    /// Halves all scores if that is due after so many steps.
    pub fn end_step(&mut self, step: u64) {
        if self.policy.halves_after(step) {
            self.scores.uses_mut().iter_mut().for_each(|u| u.score /= 2);
        }
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.scores = Scores::default();
        self.departures = Departures::default();
    }
}

/// The records that a sweep may remove.
pub(crate) struct Removable<'a> {
    pub evictor: &'a Evictor,
    /// Records that a sweep must not remove: free ones, and those in use.
    pub excluded: RecordSet,
    pub next: RecordNumber,
}

impl Removable<'_> {
    fn rows(&self) -> impl Iterator<Item = (Rank, RecordNumber)> {
        let scores = &self.evictor.scores;
        let uses = scores.uses().iter().zip(0..self.next).skip(1);
        uses.filter(|(used, record)| {
            used.commit <= self.evictor.commits.settled && !self.excluded.contains(*record)
        })
        .map(|(used, record)| (Rank { score: used.score, key: scores.key(record) }, record))
    }

    pub fn len(&self) -> u64 {
        self.rows().count() as u64
    }

    /// The rows to remove for `needed` new ones, in their order.
    pub fn lowest(&self, needed: u64, capacity: u64) -> Result<Vec<(Rank, RecordNumber)>> {
        lowest(sweep_size(needed, capacity), || self.rows())
    }
}
