//! How the rows of a table take the steps that they have missed.

use crate::contract::binding::UpdateMode;
use crate::error::Result;
use crate::formula::update::{Update, UpdateScalars};
use crate::host::missed_steps::{CatchUp, MOST, MissedSteps};
use crate::host::table::HostTable;
use crate::key::{Key, hash};
use crate::memory;
use crate::pool::{Pool, num_pieces, run_if_large};
use crate::store::arena::{NO_RECORD, RecordNumber};

const WHAT: &str = "the records of a call";
/// How many keys are prefetched ahead.
const AHEAD: usize = 16;

impl HostTable {
    /// Sets which rows a step of the optimizer updates. No row may have missed a step.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn set_mode(&mut self, mode: UpdateMode, update: &Update) -> Result<()> {
        let misses = mode != UpdateMode::Local && !update.rests();
        let next = self.arena.next_unused();
        self.missed = misses.then(|| MissedSteps::new(mode, next).map(Box::new)).transpose()?;
        Ok(())
    }

    /// Whether rows may have missed steps.
    pub(crate) fn is_behind(&self) -> bool {
        self.missed.as_ref().is_some_and(|missed| !missed.steps.is_empty())
    }

    /// Begins a step of the optimizer. `records`: of the rows with gradients.
    pub(crate) fn begin_update(&mut self, scalars: UpdateScalars, records: &[&[RecordNumber]]) {
        if self.missed.is_none() {
            return;
        }
        records.iter().for_each(|records| self.catch_up(records));
        if let Some(missed) = &mut self.missed {
            missed.begin(scalars, records.iter().copied().flatten());
        }
    }

    /// Ends a step of the optimizer: lets all rows take it, unless they do so when they are read.
    pub(crate) fn end_update(&mut self, pool: &Pool) {
        let keeps_removed = self.config.keeps_removed();
        let is_full = |missed: &MissedSteps| {
            missed.mode == UpdateMode::Global || keeps_removed || missed.steps.len() == MOST
        };
        if self.missed.as_deref().is_some_and(is_full) {
            self.catch_up_all(Some(pool));
        }
    }

    /// Lets the rows of keys take the steps that they have missed, and the row of the out-of-vocabulary key.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn catch_up_keys(&mut self, keys: impl ExactSizeIterator<Item = Key>) -> Result<()> {
        if !self.is_behind() {
            return Ok(());
        }
        let mut records = memory::with_capacity(keys.len() + 1, WHAT)?;
        let keys = memory::collect(keys.chain(self.config.out_of_vocabulary_key), WHAT)?;
        for some in keys.chunks(AHEAD) {
            some.iter().for_each(|&key| self.index.prefetch(hash(key)));
            records.extend(some.iter().map(|&key| self.index.find(hash(key), key)));
        }
        self.catch_up(&records);
        Ok(())
    }

    /// Lets rows take the steps that they have missed.
    pub(crate) fn catch_up(&mut self, records: &[RecordNumber]) {
        let Some(missed) = self.missed.as_deref_mut().filter(|missed| !missed.steps.is_empty()) else {
            return;
        };
        let now = missed.now();
        let is_behind =
            |record: &&RecordNumber| **record != NO_RECORD && missed.taken[**record as usize] != now;
        let Ok(behind) = memory::collect(records.iter().filter(is_behind).copied(), "rows that miss steps")
        else {
            return self.catch_up_all(None);
        };
        if let Some(changes) = &mut self.changes {
            changes.touch(&behind);
        }
        let Some(update) = &self.update else { return };
        CatchUp {
            arena: self.arena.share(),
            format: self.first.format,
            seed: self.config.seed,
            update,
            steps: &missed.steps,
            before: missed.before,
            first: 0,
            taken: &mut missed.taken,
            records: Some(&behind),
        }
        .run();
    }

    /// Lets all rows take the steps that they have missed.
    pub(crate) fn catch_up_all(&mut self, pool: Option<&Pool>) {
        let next = self.arena.next_unused();
        let Some(missed) = self.missed.as_deref_mut().filter(|missed| !missed.steps.is_empty()) else {
            return;
        };
        if let Some(changes) = &mut self.changes {
            (1..next).for_each(|record| changes.touch(&[record]));
        }
        let Some(update) = &self.update else { return };
        let (format, seed, arena) = (self.first.format, self.config.seed, self.arena.share());
        let (steps, before) = (&missed.steps[..], missed.before);
        let all = &mut missed.taken[..next as usize];
        let num = all.len();
        let pieces = pool.map_or(1, |pool| num_pieces(num, num, pool));
        let size = num.div_ceil(pieces).max(1);
        let tasks: Vec<_> = all
            .chunks_mut(size)
            .enumerate()
            .map(|(piece, taken)| {
                let first = (piece * size) as RecordNumber;
                CatchUp { arena, format, seed, update, steps, before, first, taken, records: None }
            })
            .collect();
        match pool {
            Some(pool) => run_if_large(num, tasks, pool, CatchUp::run),
            None => tasks.into_iter().for_each(CatchUp::run),
        }
        missed.before = missed.now();
        missed.steps.clear();
    }
}
