//! How often keys without a row have come.

use super::index::Index;
use crate::error::Result;
use crate::key::{Key, hash};
use crate::memory;

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

    /// Makes room for the count of a key.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn reserve(&mut self, key: Key) -> Result<()> {
        if self.index.mark(hash(key), key).is_none() {
            self.index.insert(hash(key), key, COUNTED)?;
        }
        Ok(())
    }

    /// Sets the count of a key that has one, or room for one.
    pub fn set(&mut self, key: Key, count: u32) {
        if let Some((_, mark)) = self.index.find_mut(hash(key), key) {
            *mark = count;
        }
    }

    /// Forgets a key.
    pub fn remove(&mut self, key: Key) {
        self.index.remove(hash(key), key);
    }

    /// Halves all counts, and forgets those that become 0.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn halve(&mut self) -> Result<()> {
        let mut keys = memory::with_capacity(self.index.len(), "the counts of keys without a row")?;
        self.index.scan(0, |key, _| {
            keys.push(key);
            true
        });
        for key in keys {
            match self.get(key) / 2 {
                0 => self.remove(key),
                count => self.set(key, count),
            }
        }
        Ok(())
    }
}
