//! The rows that a table has removed by itself.

use std::collections::{HashSet, VecDeque};

use crate::contract::records::{Column, Records};
use crate::contract::table::Explanation;
use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::policy::sweep::Rank;

/// Maximum number of departures that are remembered.
const MAX_DEPARTURES: usize = 1 << 20;
const WHAT: &str = "the rows that a full table removes";

/// Why rows went; in the order in which rows go in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// To make room.
    Evicted,
    /// Training had not used them for long.
    Expired,
}

impl Reason {
    /// Says that a row went in a step for this reason.
    pub fn at(self, step: u64) -> Explanation {
        match self {
            Reason::Evicted => Explanation::Evicted { step },
            Reason::Expired => Explanation::Expired { step },
        }
    }
}

/// Keys that went in the same step, for the same reason.
struct Sweep {
    reason: Reason,
    step: u64,
    keys: Vec<Key>,
}

/// The keys that went last, and the rows that nobody has taken yet.
#[derive(Default)]
pub struct Departures {
    sweeps: VecDeque<Sweep>,
    /// Number of keys of all sweeps.
    num_keys: usize,
    kept: Records,
}

impl Departures {
    /// Number of bytes of memory.
    pub fn num_bytes(&self) -> usize {
        let keys: usize = self.sweeps.iter().map(|sweep| sweep.keys.capacity()).sum();
        size_of::<Key>() * keys + size_of::<Sweep>() * self.sweeps.capacity() + self.kept.num_bytes()
    }

    /// Forgets the oldest keys if there are too many.
    pub fn trim(&mut self) {
        let mut too_many = self.num_keys.saturating_sub(MAX_DEPARTURES);
        self.num_keys -= too_many;
        while let Some(oldest) = self.sweeps.front_mut().filter(|_| too_many > 0) {
            let going = too_many.min(oldest.keys.len());
            oldest.keys.drain(..going);
            too_many -= going;
            if oldest.keys.is_empty() {
                self.sweeps.pop_front();
            }
        }
    }

    /// Remembers keys that go in a step. Steps need not come in their order.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn remember(&mut self, reason: Reason, step: u64, keys: Vec<Key>) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.sweeps.try_reserve(1).map_err(|_| memory::missing::<Sweep>(1, WHAT))?;
        self.num_keys += keys.len();
        self.sweeps.push_back(Sweep { reason, step, keys });
        Ok(())
    }

    /// Keeps rows of `dim` floats that go, in the order in which they go, until they are taken. `read`: reads one.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn keep<T>(
        &mut self,
        rows: impl ExactSizeIterator<Item = (Rank, T)>,
        dim: usize,
        read: impl Fn(T, &mut [f32]),
    ) -> Result<()> {
        self.kept.reserve(rows.len(), dim, &[Column::Scores], WHAT)?;
        for (rank, row) in rows {
            self.kept.keys.push(rank.key);
            let start = self.kept.values.len();
            self.kept.values.resize(start + dim, 0.0);
            read(row, &mut self.kept.values[start..]);
            self.kept.scores.push(rank.score);
        }
        Ok(())
    }

    /// Numbers of sweeps and of kept rows, for `take_back`.
    pub fn lens(&self) -> [usize; 2] {
        [self.sweeps.len(), self.kept.keys.len()]
    }

    /// Forgets what was remembered and kept since there were so many sweeps and rows.
    pub fn take_back(&mut self, [sweeps, kept]: [usize; 2]) {
        let going = self.sweeps.drain(sweeps..).map(|sweep| sweep.keys.len());
        self.num_keys -= going.sum::<usize>();
        self.kept.truncate(kept);
    }

    /// Says why a key without a row has none.
    pub fn explain(&self, key: Key) -> Explanation {
        let of_key = self.sweeps.iter().filter(|sweep| sweep.keys.contains(&key));
        let newest = of_key.max_by_key(|sweep| (sweep.step, sweep.reason));
        newest.map_or(Explanation::Absent, |sweep| sweep.reason.at(sweep.step))
    }

    /// Forgets that these keys were ever there.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn forget(&mut self, keys: &[Key]) -> Result<()> {
        if self.num_keys == 0 && self.kept.keys.is_empty() {
            return Ok(());
        }
        let mut forgotten: HashSet<Key> = HashSet::new();
        forgotten.try_reserve(keys.len()).map_err(|_| memory::missing::<Key>(2 * keys.len(), WHAT))?;
        forgotten.extend(keys);
        for sweep in &mut self.sweeps {
            sweep.keys.retain(|key| !forgotten.contains(key));
        }
        self.sweeps.retain(|sweep| !sweep.keys.is_empty());
        self.num_keys = self.sweeps.iter().map(|sweep| sweep.keys.len()).sum();
        self.kept.keep(|key| !forgotten.contains(&key));
        Ok(())
    }

    /// Returns the rows that were kept, and keeps them no longer.
    pub fn take_kept(&mut self) -> Records {
        std::mem::take(&mut self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_keys_are_forgotten_first_also_within_a_sweep() {
        let mut departures = Departures::default();
        let last = MAX_DEPARTURES as u64;
        let evicted = |step| Explanation::Evicted { step };
        departures.remember(Reason::Evicted, 1, vec![7, 8, 9]).unwrap();
        departures.remember(Reason::Expired, 2, (100..98 + last).collect()).unwrap();
        departures.trim();
        let known = |departures: &Departures, key| departures.explain(key) != Explanation::Absent;
        assert_eq!([7, 8, 9].map(|key| known(&departures, key)), [false, true, true]);
        assert_eq!(departures.explain(100), Explanation::Expired { step: 2 });
        let lens = departures.lens();
        departures.remember(Reason::Evicted, 3, vec![8]).unwrap();
        assert_eq!(departures.explain(8), evicted(3));
        departures.take_back(lens);
        assert_eq!(departures.explain(8), evicted(1));
        departures.remember(Reason::Expired, 3, vec![11]).unwrap();
        departures.remember(Reason::Evicted, 3, vec![11]).unwrap();
        assert_eq!(departures.explain(11), Explanation::Expired { step: 3 });
        departures.forget(&[11]).unwrap();
        departures.forget(&[8]).unwrap();
        assert_eq!(departures.explain(8), Explanation::Absent);
        departures.remember(Reason::Evicted, 4, vec![1, 2]).unwrap();
        departures.trim();
        assert_eq!([9, 100].map(|key| known(&departures, key)), [false, true]);
    }
}
