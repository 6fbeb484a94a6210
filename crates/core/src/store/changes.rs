//! Which rows of a table have changed since dumps of it, and which keys have gone.

use std::collections::VecDeque;

use super::arena::{NO_RECORD, RecordNumber};
use super::region::Region;
use crate::error::Result;
use crate::key::Key;
use crate::memory;

/// Maximum number of snapshots that are remembered.
const MAX_SNAPSHOTS: usize = 16;
const WHAT: &str = "the keys that have gone since a dump";

/// The changes of a table, by epochs. A dump ends an epoch.
pub struct Changes {
    /// By record: twice the number of the epoch in which its row changed last, plus 1 if the row was made in that epoch.
    words: Region<u32>,
    /// Number of the epoch in progress, from 1.
    epoch: u32,
    /// Snapshots that dumps have, each with the epoch that it began.
    snapshots: VecDeque<(u64, u32)>,
    /// Keys that went, by epoch, but for rows that were made in it.
    gone: VecDeque<(u32, Vec<Key>)>,
    /// Number of keys that had gone in the epoch at the start of the call.
    num_gone: usize,
}

impl Changes {
    pub fn new() -> Changes {
        Changes {
            words: Region::default(),
            epoch: 0,
            snapshots: VecDeque::new(),
            gone: VecDeque::new(),
            num_gone: 0,
        }
    }

    pub fn num_bytes(&self) -> usize {
        let keys: usize = self.gone.iter().map(|(_, keys)| keys.capacity()).sum();
        self.words.num_bytes() + size_of::<Key>() * keys
    }

    /// Begins an epoch: a dump has a snapshot of this name, of the table as it is now.
    pub fn track(&mut self, snapshot: u64) {
        self.epoch += 1;
        self.snapshots.push_back((snapshot, self.epoch));
        if self.snapshots.len() > MAX_SNAPSHOTS {
            self.snapshots.pop_front();
        }
        let oldest = self.snapshots[0].1;
        self.gone.retain(|(epoch, keys)| *epoch >= oldest && !keys.is_empty());
        self.gone.push_back((self.epoch, Vec::new()));
    }

    /// Returns the epoch that began with the newest snapshot of this name.
    pub fn epoch_of(&self, snapshot: u64) -> Option<u32> {
        self.snapshots.iter().rev().find(|entry| entry.0 == snapshot).map(|entry| entry.1)
    }

    /// Makes room for the records below `next`.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn reserve(&mut self, next: RecordNumber) -> Result<()> {
        self.words.grow_amortized(next as usize)
    }

    /// Notes that rows change.
    pub fn touch(&mut self, records: impl Iterator<Item = RecordNumber>) {
        for record in records.filter(|record| *record != NO_RECORD) {
            let word = &mut self.words[record as usize];
            if *word >> 1 != self.epoch {
                *word = self.epoch << 1;
            }
        }
    }

    /// Notes that rows are made.
    pub fn start(&mut self, records: impl Iterator<Item = RecordNumber>) {
        records.for_each(|record| self.words[record as usize] = self.epoch << 1 | 1);
    }

    /// Starts a call that may remove rows.
    pub fn begin(&mut self) {
        self.num_gone = self.gone_now().len();
    }

    /// Forgets which keys the call has removed.
    pub fn undo(&mut self) {
        let len = self.num_gone;
        self.gone_now().truncate(len);
    }

    /// Makes room for as many keys that go.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn reserve_gone(&mut self, num_keys: usize) -> Result<()> {
        memory::reserve(self.gone_now(), num_keys, WHAT)
    }

    /// Notes that a key goes. There must be room.
    pub fn remove(&mut self, key: Key, record: RecordNumber) {
        if self.words[record as usize] != self.epoch << 1 | 1 {
            self.gone_now().push(key);
        }
    }

    /// Whether a row has changed since the start of an epoch.
    pub fn has_changed(&self, record: RecordNumber, since: u32) -> bool {
        self.words[record as usize] >> 1 >= since
    }

    /// The keys that have gone since the start of an epoch. Some may have come again, and some may come twice.
    pub fn gone_since(&self, since: u32) -> impl Iterator<Item = Key> {
        self.gone.iter().filter(move |(epoch, _)| *epoch >= since).flat_map(|(_, keys)| keys.iter().copied())
    }

    fn gone_now(&mut self) -> &mut Vec<Key> {
        let (epoch, is_missing) = (self.epoch, self.gone.is_empty());
        if is_missing {
            self.gone.push_back((epoch, Vec::new()));
        }
        let last = self.gone.len() - 1;
        &mut self.gone[last].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_change_and_keys_go_by_epochs() {
        let mut changes = Changes::new();
        changes.track(70);
        changes.reserve(10).unwrap();
        changes.reserve_gone(9).unwrap();
        let first = changes.epoch_of(70).unwrap();
        assert!(!changes.has_changed(3, first));
        changes.touch([3, NO_RECORD].into_iter());
        changes.start([4, 5].into_iter());
        changes.touch([5].into_iter());
        // A row that was made since the dump is no loss.
        changes.remove(40, 4);
        changes.remove(20, 2);
        assert!([3, 5].iter().all(|&record| changes.has_changed(record, first)));
        assert_eq!(changes.gone_since(first).collect::<Vec<_>>(), [20]);
        changes.track(71);
        let second = changes.epoch_of(71).unwrap();
        assert!(!changes.has_changed(3, second) && changes.has_changed(3, first));
        changes.reserve_gone(9).unwrap();
        changes.remove(50, 5);
        changes.begin();
        changes.remove(30, 3);
        changes.undo();
        assert_eq!(changes.gone_since(second).collect::<Vec<_>>(), [50]);
        assert_eq!(changes.gone_since(first).collect::<Vec<_>>(), [20, 50]);
        // A name that comes again is that of the newest snapshot, and old dumps are forgotten.
        changes.track(70);
        assert_eq!(changes.gone_since(changes.epoch_of(70).unwrap()).count(), 0);
        (0..MAX_SNAPSHOTS as u64).for_each(|name| changes.track(name));
        assert_eq!((changes.epoch_of(70), changes.epoch_of(71)), (None, None));
        assert_eq!(changes.gone_since(0).count(), 0);
    }
}
