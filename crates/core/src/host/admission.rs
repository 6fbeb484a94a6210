//! Which new keys of training get a row, and the counts of those that have none yet.

use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::policy::admission::Admission;
use crate::store::sights::Sights;

const WHAT: &str = "the sights of keys without a row";

/// Decides which keys without a row get one.
pub(crate) struct Admitter {
    pub policy: Admission,
    /// Number of the step in progress, from 1. A commit ends it.
    pub step: u64,
    sights: Sights,
    /// Keys that this call has counted, with their counts before it.
    counted: Vec<(Key, u32)>,
}

impl Admitter {
    pub fn new(policy: Admission) -> Result<Admitter> {
        Ok(Admitter { policy, step: 1, sights: Sights::new()?, counted: Vec::new() })
    }

    pub fn num_bytes(&self) -> usize {
        self.sights.num_bytes()
    }

    /// The number of sights of a key without a row, or 0.
    pub fn sights(&self, key: Key) -> u32 {
        self.sights.get(key)
    }

    /// Starts a call that may count.
    pub fn begin(&mut self) {
        self.counted.clear();
    }

    /// Whether a key without a row gets one now, after so many more sights. `seed`: of the table.
    pub fn admits(&self, seed: u64, key: Key, more: u64) -> bool {
        self.policy.admits(sum(self.sights.get(key), more), seed, key, self.step)
    }

    /// Adds sights of keys.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn count(&mut self, seen: impl Iterator<Item = (Key, u64)>) -> Result<()> {
        for (key, sights) in seen {
            let before = self.sights.get(key);
            memory::push(&mut self.counted, (key, before), WHAT)?;
            self.sights.reserve(key)?;
            self.sights.set(key, sum(before, sights));
        }
        Ok(())
    }

    /// Takes back what the call has counted.
    pub fn undo(&mut self) {
        for (key, before) in self.counted.drain(..).rev() {
            match before {
                0 => self.sights.remove(key),
                before => self.sights.set(key, before),
            }
        }
    }

    /// Forgets the counts of keys that the call has inserted.
    pub fn forget_inserted(&mut self, has_row: impl Fn(Key) -> bool) {
        let Admitter { sights, counted, .. } = self;
        counted.drain(..).filter(|(key, _)| has_row(*key)).for_each(|(key, _)| sights.remove(key));
    }

    /// Forgets the counts of keys.
    pub fn forget(&mut self, keys: &[Key]) {
        keys.iter().for_each(|&key| self.sights.remove(key));
    }

    /// Forgets all counts. Steps go on.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn clear(&mut self) -> Result<()> {
        self.sights = Sights::new()?;
        Ok(())
    }

    /// Ends the step in progress.
    pub fn end_step(&mut self) {
        if self.policy.halves_after(self.step) {
            // Without memory for it the counts stay as they are.
            let _ = self.sights.halve();
        }
        // A damaged dump may bring any number.
        self.step = self.step.saturating_add(1);
    }
}

/// A count with more sights.
fn sum(count: u32, sights: u64) -> u32 {
    count.saturating_add(u32::try_from(sights).unwrap_or(u32::MAX))
}
