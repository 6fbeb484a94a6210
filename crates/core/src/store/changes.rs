//! Which rows of a table have changed, and which keys were removed, since dumps of it.

use std::collections::VecDeque;

use super::arena::{NO_RECORD, RecordNumber};
use super::region::Region;
use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::simd::prefetch;

/// Maximum number of epochs that are remembered.
const MAX_EPOCHS: usize = 16;
/// How many words are prefetched ahead.
const AHEAD: usize = 16;
const WHAT: &str = "the keys that were removed since a dump";

/// The time from one dump to the next.
struct Epoch {
    /// Identifies the state of the table at the start.
    snapshot: u64,
    /// Keys that were removed, but for rows that were made in the epoch.
    removed: Vec<Key>,
}

/// The changes of a table.
pub struct Changes {
    /// By record: twice the number of the epoch in which its row changed last, plus 1 if the row was made in that epoch.
    words: Region<u32>,
    /// The newest epochs. The last one is in progress.
    epochs: VecDeque<Epoch>,
    /// Number of the oldest of them.
    oldest: u32,
    /// Number of keys that were removed in this epoch before the call.
    num_removed: usize,
}

impl Changes {
    /// Starts the first epoch. `next`: a number above those of all records.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(next: RecordNumber, snapshot: u64) -> Result<Changes> {
        let epochs = VecDeque::from([Epoch { snapshot, removed: Vec::new() }]);
        Ok(Changes { words: Region::new(next as usize)?, epochs, oldest: 1, num_removed: 0 })
    }

    pub fn num_bytes(&self) -> usize {
        let keys: usize = self.epochs.iter().map(|epoch| epoch.removed.capacity()).sum();
        self.words.num_bytes() + size_of::<Key>() * keys
    }

    /// Starts an epoch. `snapshot`: identifies the state of the table now.
    pub fn start_epoch(&mut self, snapshot: u64) {
        self.epochs.push_back(Epoch { snapshot, removed: Vec::new() });
        if self.epochs.len() > MAX_EPOCHS {
            self.epochs.pop_front();
            self.oldest += 1;
        }
    }

    /// Returns the number of the newest epoch that began with this snapshot.
    pub fn epoch_of(&self, snapshot: u64) -> Option<u32> {
        let place = self.epochs.iter().rposition(|epoch| epoch.snapshot == snapshot)?;
        Some(self.oldest + place as u32)
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
        let changed = self.changed_now();
        for (place, &record) in records.iter().enumerate() {
            if let Some(later) = records.get(place + AHEAD).and_then(|&later| self.words.get(later as usize))
            {
                prefetch(later);
            }
            if record != NO_RECORD && self.words[record as usize] >> 1 != changed >> 1 {
                self.words[record as usize] = changed;
            }
        }
    }

    /// Notes that rows are made.
    pub fn start(&mut self, records: impl Iterator<Item = RecordNumber>) {
        let made = self.changed_now() | 1;
        records.for_each(|record| self.words[record as usize] = made);
    }

    /// Starts a call that may remove rows.
    pub fn begin(&mut self) {
        self.num_removed = self.removed_now().len();
    }

    /// Forgets which keys the call has removed.
    pub fn undo(&mut self) {
        let len = self.num_removed;
        self.removed_now().truncate(len);
    }

    /// Makes room for as many keys that are removed.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn reserve_removed(&mut self, num_keys: usize) -> Result<()> {
        memory::reserve(self.removed_now(), num_keys, WHAT)
    }

    /// Notes that a key is removed. There must be room.
    pub fn remove(&mut self, key: Key, record: RecordNumber) {
        if self.words[record as usize] != self.changed_now() | 1 {
            self.removed_now().push(key);
        }
    }

    /// Whether a row has changed since the start of an epoch.
    pub fn has_changed(&self, record: RecordNumber, since: u32) -> bool {
        self.words[record as usize] >> 1 >= since
    }

    /// The keys that were removed since the start of an epoch. Some may have come again, and some may come twice.
    pub fn removed_since(&self, since: u32) -> impl Iterator<Item = Key> {
        let earlier = since.saturating_sub(self.oldest) as usize;
        self.epochs.iter().skip(earlier).flat_map(|epoch| epoch.removed.iter().copied())
    }

    /// The word of a row that changes now.
    fn changed_now(&self) -> u32 {
        (self.oldest + self.epochs.len() as u32 - 1) << 1
    }

    fn removed_now(&mut self) -> &mut Vec<Key> {
        let epoch = self.epochs.back_mut().expect("an epoch is in progress");
        &mut epoch.removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_change_and_keys_are_removed_by_epochs() {
        let mut changes = Changes::new(10, 70).unwrap();
        changes.reserve_removed(9).unwrap();
        let first = changes.epoch_of(70).unwrap();
        assert!(!changes.has_changed(3, first));
        changes.touch(&[3, NO_RECORD]);
        changes.start([4, 5].into_iter());
        changes.touch(&[5]);
        // A row that was made since the dump is no loss.
        changes.remove(40, 4);
        changes.remove(20, 2);
        assert!([3, 5].iter().all(|&record| changes.has_changed(record, first)));
        assert_eq!(changes.removed_since(first).collect::<Vec<_>>(), [20]);
        changes.start_epoch(71);
        let second = changes.epoch_of(71).unwrap();
        assert!(!changes.has_changed(3, second) && changes.has_changed(3, first));
        changes.reserve_removed(9).unwrap();
        changes.remove(50, 5);
        changes.begin();
        changes.remove(30, 3);
        changes.undo();
        assert_eq!(changes.removed_since(second).collect::<Vec<_>>(), [50]);
        assert_eq!(changes.removed_since(first).collect::<Vec<_>>(), [20, 50]);
        // Of equal snapshots the newest one counts, and old epochs are forgotten.
        changes.start_epoch(70);
        assert_eq!(changes.removed_since(changes.epoch_of(70).unwrap()).count(), 0);
        (0..MAX_EPOCHS as u64).for_each(|snapshot| changes.start_epoch(snapshot));
        assert_eq!((changes.epoch_of(70), changes.epoch_of(71)), (None, None));
        assert_eq!(changes.removed_since(0).count(), 0);
    }
}
