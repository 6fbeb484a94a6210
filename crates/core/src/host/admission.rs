//! Decides which new keys get a row in training, and counts the keys that have none yet.

use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::policy::admission::Admission;
use crate::store::sights::{Sights, sum};

const WHAT: &str = "the sights of keys without a row";
/// Keys of a call whose memory is kept for the next one.
const KEPT: usize = 1 << 16;

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
        self.sights.num_bytes() + self.counted.capacity() * size_of::<(Key, u32)>()
    }

    /// The number of sights of a key without a row, or 0.
    pub fn sights(&self, key: Key) -> u32 {
        self.sights.get(key)
    }

    /// Starts a call that may count.
    pub fn begin(&mut self) {
        self.counted.clear();
        self.counted.shrink_to(KEPT);
    }

    /// Whether a key without a row gets one now, after so many more sights. `seed`: of the table.
    pub fn admits(&self, seed: u64, key: Key, more: u64) -> bool {
        self.policy.admits(sum(self.sights.get(key), more), seed, key, self.step)
    }

    /// Adds sights of distinct keys.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn count(&mut self, seen: Vec<(Key, u64)>) -> Result<()> {
        memory::reserve(&mut self.counted, seen.len(), WHAT)?;
        for (key, sights) in seen {
            let before = self.sights.add(key, sights)?;
            self.counted.push((key, before));
        }
        Ok(())
    }

    /// Takes back what the call has counted.
    pub fn undo(&mut self) {
        self.counted.drain(..).for_each(|(key, before)| self.sights.set(key, before));
    }

    /// Forgets the counts of keys.
    pub fn forget(&mut self, keys: impl Iterator<Item = Key>) {
        keys.for_each(|key| self.sights.remove(key));
    }

    /// Takes the empty `sights` in place of its own. Steps go on.
    pub fn clear(&mut self, sights: Sights) {
        (self.sights, self.counted) = (sights, Vec::new());
    }

    /// Ends the step in progress.
    pub fn end_step(&mut self) {
        if self.policy.halves_after(self.step) {
            self.sights.halve();
        }
        // A damaged file may bring any number.
        self.step = self.step.saturating_add(1);
    }
}
