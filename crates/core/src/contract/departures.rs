//! The rows that a table has removed by itself.

use std::collections::{HashSet, VecDeque};

use crate::contract::table::{Departure, Records};
use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::policy::sweep::Rank;

/// Maximum number of departures that are remembered.
const MAX_DEPARTURES: usize = 1 << 20;
const WHAT: &str = "the rows that a full table removes";

/// The keys that went last, and the rows that nobody has taken yet.
#[derive(Default)]
pub struct Departures {
    recent: VecDeque<Departure>,
    kept: Records,
}

impl Departures {
    /// Number of bytes of memory.
    pub fn num_bytes(&self) -> usize {
        self.recent.capacity() * size_of::<Departure>() + self.kept.num_bytes()
    }

    /// Forgets the oldest keys if there are too many.
    pub fn trim(&mut self) {
        let too_many = self.recent.len().saturating_sub(MAX_DEPARTURES);
        self.recent.drain(..too_many);
    }

    /// Remembers keys that go in a step.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn remember(&mut self, step: u64, keys: impl ExactSizeIterator<Item = Key>) -> Result<()> {
        let count = keys.len();
        self.recent.try_reserve(count).map_err(|_| memory::missing::<Departure>(count, WHAT))?;
        self.recent.extend(keys.map(|key| Departure { key, step }));
        Ok(())
    }

    /// Keeps rows of `dim` floats that go, in the order in which they go, until they are taken.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn keep<'a>(
        &mut self,
        rows: impl ExactSizeIterator<Item = (Rank, &'a [f32])>,
        dim: usize,
    ) -> Result<()> {
        self.kept.reserve(rows.len(), dim, true, WHAT)?;
        for (rank, row) in rows {
            self.kept.keys.push(rank.key);
            self.kept.values.extend_from_slice(row);
            self.kept.scores.push(rank.score);
        }
        Ok(())
    }

    /// Numbers of keys and rows, for `take_back`.
    pub fn lens(&self) -> [usize; 2] {
        [self.recent.len(), self.kept.keys.len()]
    }

    /// Forgets what was remembered and kept since there were so many keys and rows.
    pub fn take_back(&mut self, [recent, kept]: [usize; 2]) {
        self.recent.truncate(recent);
        self.kept.truncate(kept);
    }

    /// Returns when a key went last, unless that was too long ago.
    pub fn find(&self, key: Key) -> Option<Departure> {
        self.recent.iter().rev().find(|departure| departure.key == key).copied()
    }

    /// Forgets that these keys were ever there.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn forget(&mut self, keys: &[Key]) -> Result<()> {
        if self.recent.is_empty() && self.kept.keys.is_empty() {
            return Ok(());
        }
        let mut forgotten: HashSet<Key> = HashSet::new();
        forgotten.try_reserve(keys.len()).map_err(|_| memory::missing::<Key>(2 * keys.len(), WHAT))?;
        forgotten.extend(keys);
        self.recent.retain(|departure| !forgotten.contains(&departure.key));
        self.kept.keep(|key| !forgotten.contains(&key));
        Ok(())
    }

    /// Returns the rows that were kept, and keeps them no longer.
    pub fn take_kept(&mut self) -> Records {
        std::mem::take(&mut self.kept)
    }
}
