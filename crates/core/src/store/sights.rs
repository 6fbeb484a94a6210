//! How often keys without a row have come.

use super::index::Index;
use crate::error::Result;
use crate::key::{Key, hash};
use crate::memory;
use crate::policy::admission::sum_of_sights;

/// Stands for the record of a counted key in the index, whose marks are the counts.
const COUNTED: u32 = 1;

/// Counts by key. A count stays at the highest number that fits.
pub struct Sights {
    index: Index,
}

impl Sights {
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new() -> Result<Sights> {
        Ok(Sights { index: Index::new(0)? })
    }

    pub fn num_bytes(&self) -> usize {
        self.index.num_bytes()
    }

    /// The count of a key, 0 if it has none.
    pub fn get(&self, key: Key) -> u32 {
        self.index.mark(hash(key), key).unwrap_or(0)
    }

    /// Adds to the count of a key. Returns the count before.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn add(&mut self, key: Key, more: u64) -> Result<u32> {
        let hash = hash(key);
        if let Some((_, count)) = self.index.find_mut(hash, key) {
            let before = *count;
            *count = sum_of_sights(before, more);
            return Ok(before);
        }
        *self.index.insert(hash, key, COUNTED)? = sum_of_sights(0, more);
        Ok(0)
    }

    /// Number of keys that have a count.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Calls `visit` with each key that has a count, and its count.
    pub fn for_each(&self, mut visit: impl FnMut(Key, u32)) {
        self.index.scan(0, |key, _| {
            visit(key, self.get(key));
            true
        });
    }

    /// Sets the count of a key that has one. 0 forgets it.
    pub fn set(&mut self, key: Key, count: u32) {
        match self.index.find_mut(hash(key), key) {
            Some((_, to)) if count > 0 => *to = count,
            Some(_) => self.remove(key),
            None => {}
        }
    }

    /// Forgets a key.
    pub fn remove(&mut self, key: Key) {
        self.index.remove(hash(key), key);
    }

    /// Halves all counts, rounded down. Without memory for a list of those that become 0, they take room until they count again.
    pub fn halve(&mut self) {
        let mut num_zeros = 0;
        self.index.for_each_mark(|_, count| {
            *count /= 2;
            num_zeros += usize::from(*count == 0);
        });
        let Ok(mut zeros) = memory::with_capacity(num_zeros, "the counts that became 0") else { return };
        self.index.for_each_mark(|key, count| {
            if *count == 0 {
                zeros.push(key);
            }
        });
        zeros.into_iter().for_each(|key| self.remove(key));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn counts_are_those_of_a_map() {
        let (mut sights, mut map) = (Sights::new().unwrap(), BTreeMap::<Key, u32>::new());
        for step in 0..5u64 {
            for key in (0..20_000).filter(|key| key % (step + 1) == 0) {
                let before = map.get(&key).copied().unwrap_or(0);
                assert_eq!(sights.add(key, step + 1).unwrap(), before);
                map.insert(key, before + step as u32 + 1);
            }
            for key in (0..20_000).step_by(7) {
                sights.remove(key);
                map.remove(&key);
            }
            sights.halve();
            map.values_mut().for_each(|count| *count /= 2);
            map.retain(|_, count| *count > 0);
            assert_eq!(sights.index.len(), map.len());
            assert!((0..20_001).all(|key| sights.get(key) == map.get(&key).copied().unwrap_or(0)));
        }
        sights.set(1, 9);
        sights.set(2, 0);
        sights.set(1 << 40, 3);
        assert_eq!(
            [1, 2, 1 << 40].map(|key| sights.get(key)),
            [if map.contains_key(&1) { 9 } else { 0 }, 0, 0]
        );
    }

    #[test]
    fn a_count_stays_at_its_end() {
        let mut sights = Sights::new().unwrap();
        sights.add(3, u64::MAX).unwrap();
        assert_eq!((sights.add(3, 1).unwrap(), sights.get(3)), (u32::MAX, u32::MAX));
    }
}
