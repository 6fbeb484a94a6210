//! How often keys without a row have come.

use super::index::Index;
use crate::error::Result;
use crate::key::{Key, hash};
use crate::memory;
use crate::policy::admission::{highest_forgotten, sum_of_sights};

const WHAT: &str = "the counts of keys without a row";
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

    /// Halves all counts, rounded down.
    pub fn halve(&mut self) {
        self.change_all(|count| count / 2);
    }

    /// If there are more than `max` counts, forgets the lowest, as [`highest_forgotten`] says. Counts from `threshold` on are equal. Without memory it
    /// forgets none.
    pub fn forget_lowest(&mut self, max: u64, threshold: u32) {
        if self.len() as u64 <= max {
            return;
        }
        let Ok(mut num_by_count) = memory::filled(0u64, threshold as usize + 1, WHAT) else { return };
        self.index.for_each_mark(|_, count| num_by_count[(*count).min(threshold) as usize] += 1);
        // These wait to be removed.
        num_by_count[0] = 0;
        if let Some(highest) = highest_forgotten(&num_by_count, max) {
            self.change_all(|count| if count.min(threshold) <= highest { 0 } else { count });
        }
    }

    /// Replaces each count. A count that becomes 0 is forgotten. Without memory for a list of these keys, they take room until they are counted
    /// again.
    fn change_all(&mut self, change: impl Fn(u32) -> u32) {
        let mut num_zeros = 0;
        self.index.for_each_mark(|_, count| {
            *count = change(*count);
            num_zeros += usize::from(*count == 0);
        });
        let Ok(mut zeros) = memory::with_capacity(num_zeros, WHAT) else { return };
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
    fn the_lowest_counts_go_first() {
        let mut sights = Sights::new().unwrap();
        (0..1000).for_each(|key| _ = sights.add(key, key % 10 + 1).unwrap());
        sights.forget_lowest(1000, 5);
        assert_eq!(sights.len(), 1000);
        sights.forget_lowest(800, 5);
        assert_eq!(sights.len(), 700);
        assert!((0..1000).all(|key| sights.get(key) == if key % 10 < 3 { 0 } else { key as u32 % 10 + 1 }));
        // From 5 on all are equal.
        sights.forget_lowest(650, 5);
        assert_eq!(sights.len(), 600);
        sights.forget_lowest(599, 5);
        assert_eq!(sights.len(), 0);
    }

    #[test]
    fn a_count_stays_at_its_end() {
        let mut sights = Sights::new().unwrap();
        sights.add(3, u64::MAX).unwrap();
        assert_eq!((sights.add(3, 1).unwrap(), sights.get(3)), (u32::MAX, u32::MAX));
    }
}
