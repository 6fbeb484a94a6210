//! Decides which new keys get a row in training, and counts the keys that have none yet.

use crate::contract::records::{Column, Records};
use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::policy::admission::{Admission, sum_of_sights};
use crate::store::sights::Sights;

const WHAT: &str = "the sights of keys without a row";
/// Keys of a call whose memory is kept for the next one.
const KEPT: usize = 1 << 16;

/// Decides which keys without a row get one.
pub struct Admitter {
    /// Which keys get a row.
    pub policy: Admission,
    sights: Sights,
    /// Keys that this call has counted, with their counts before it.
    counted: Vec<(Key, u32)>,
}

impl Admitter {
    /// An admitter that has counted nothing.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(policy: Admission) -> Result<Admitter> {
        Ok(Admitter { policy, sights: Sights::new()?, counted: Vec::new() })
    }

    /// Number of bytes of the counts.
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

    /// Whether a key without a row gets one in a step, after so many more sights. `seed`: of the table.
    pub fn admits(&self, seed: u64, key: Key, more: u64, step: u64) -> bool {
        self.policy.admits(sum_of_sights(self.sights.get(key), more), seed, key, step)
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

    /// Returns the keys that are counted, and as scores their sights.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn all_sights(&self) -> Result<Records> {
        let mut all = Records::default();
        all.reserve(self.sights.len(), 0, &[Column::Scores], WHAT)?;
        self.sights.for_each(|key, count| {
            all.keys.push(key);
            all.scores.push(count.into());
        });
        Ok(all)
    }

    /// Takes sights of keys that are not counted yet, as `all_sights` returns them.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn restore(&mut self, sights: &Records) -> Result<()> {
        let mut pairs = sights.keys.iter().zip(&sights.scores);
        pairs.try_for_each(|(&key, &count)| self.sights.add(key, count).map(drop))
    }

    /// Takes back what the call has counted.
    pub fn undo(&mut self) {
        self.counted.drain(..).for_each(|(key, before)| self.sights.set(key, before));
    }

    /// Forgets the counts of keys.
    pub fn forget(&mut self, keys: impl Iterator<Item = Key>) {
        keys.for_each(|key| self.sights.remove(key));
    }

    /// Takes the empty `sights` in place of its own.
    pub fn clear(&mut self, sights: Sights) {
        (self.sights, self.counted) = (sights, Vec::new());
    }

    /// Ends a step: halves all counts if that is due, and forgets the lowest if the policy's memory does not hold all.
    pub fn end_step(&mut self, step: u64) {
        if self.policy.halves_after(step) {
            self.sights.halve();
        }
        if let Admission::Frequency { threshold, .. } = self.policy
            && let Some(max) = self.policy.max_counts()
        {
            self.sights.forget_lowest(max, threshold);
        }
    }
}
