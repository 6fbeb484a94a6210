//! Which rows of a table in host memory have changed since dumps of it.

use crate::contract::epochs::{Epochs, made_in};
use crate::error::Result;
use crate::key::Key;
use crate::policy::sweep::Rank;
use crate::simd::prefetch;
use crate::store::arena::{NO_RECORD, RecordNumber};
use crate::store::region::Region;

/// How many words are prefetched ahead.
const AHEAD: usize = 16;

/// The changes of a table in host memory.
pub struct Changes {
    /// By record, as [`Epochs`] says.
    words: Region<u32>,
    pub epochs: Epochs,
}

impl Changes {
    /// Starts the first epoch. `next`: a number above those of all records.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(next: RecordNumber, snapshot: u64) -> Result<Changes> {
        Ok(Changes { words: Region::new(next as usize)?, epochs: Epochs::new(snapshot) })
    }

    pub fn num_bytes(&self) -> usize {
        self.words.num_bytes() + self.epochs.num_bytes()
    }

    /// Makes room for the records below `next`.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn reserve(&mut self, next: RecordNumber) -> Result<()> {
        self.words.grow_amortized(next as usize)
    }

    /// Notes that rows change.
    pub fn touch(&mut self, records: &[RecordNumber]) {
        let now = self.epochs.now();
        for (place, &record) in records.iter().enumerate() {
            if let Some(later) = records.get(place + AHEAD).and_then(|&later| self.words.get(later as usize))
            {
                prefetch(later);
            }
            if record != NO_RECORD && self.words[record as usize] >> 1 != now {
                self.words[record as usize] = now << 1;
            }
        }
    }

    /// Notes that rows are made.
    pub fn start(&mut self, records: impl Iterator<Item = RecordNumber>) {
        let made = made_in(self.epochs.now());
        records.for_each(|record| self.words[record as usize] = made);
    }

    /// Notes that a key is removed. There must be room.
    pub fn remove(&mut self, key: Key, record: RecordNumber) {
        self.epochs.remove(key, self.words[record as usize]);
    }

    /// Notes that rows are removed. There must be room.
    pub fn remove_all(&mut self, going: &[(Rank, RecordNumber)]) {
        for (place, &(rank, record)) in going.iter().enumerate() {
            if let Some(&(_, later)) = going.get(place + AHEAD) {
                prefetch(&raw const self.words[later as usize]);
            }
            self.remove(rank.key, record);
        }
    }

    /// Whether a row has changed since the start of an epoch.
    pub fn has_changed(&self, record: RecordNumber, since: u32) -> bool {
        self.words[record as usize] >> 1 >= since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_change_and_keys_are_removed_by_epochs() {
        let mut changes = Changes::new(10, 70).unwrap();
        changes.epochs.reserve_removed(9).unwrap();
        let first = changes.epochs.find(70).unwrap();
        assert!(!changes.has_changed(3, first));
        changes.touch(&[3, NO_RECORD]);
        changes.start([4, 5].into_iter());
        changes.touch(&[5]);
        // A row that was made since the dump is no loss.
        changes.remove(40, 4);
        changes.remove(20, 2);
        assert!([3, 5].iter().all(|&record| changes.has_changed(record, first)));
        assert_eq!(changes.epochs.removed_since(first).collect::<Vec<_>>(), [20]);
        changes.epochs.start(71);
        let second = changes.epochs.find(71).unwrap();
        assert!(!changes.has_changed(3, second) && changes.has_changed(3, first));
        changes.epochs.reserve_removed(9).unwrap();
        changes.remove(50, 5);
        changes.epochs.begin();
        changes.remove(30, 3);
        changes.epochs.undo();
        assert_eq!(changes.epochs.removed_since(second).collect::<Vec<_>>(), [50]);
        assert_eq!(changes.epochs.removed_since(first).collect::<Vec<_>>(), [20, 50]);
        // Of equal snapshots the newest one counts, and old epochs are forgotten.
        changes.epochs.start(70);
        assert_eq!(changes.epochs.removed_since(changes.epochs.find(70).unwrap()).count(), 0);
        (0..16).for_each(|snapshot| changes.epochs.start(snapshot));
        assert_eq!((changes.epochs.find(70), changes.epochs.find(71)), (None, None));
        assert_eq!(changes.epochs.removed_since(0).count(), 0);
    }
}
