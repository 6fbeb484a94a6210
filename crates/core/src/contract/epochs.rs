//! When rows of a table changed, and which keys were removed, between dumps of it.

use std::collections::VecDeque;

use crate::error::Result;
use crate::key::Key;
use crate::memory;

/// Maximum number of epochs that are remembered.
const MAX_EPOCHS: usize = 16;

/// The time from one dump to the next.
struct Epoch {
    /// Identifies the state of the table at the start.
    snapshot: u64,
    /// Keys that were removed, but for rows that were made in the epoch.
    removed: Vec<Key>,
}

/// The newest epochs of a table, and which keys were removed in each. The table has a word for each record: twice the number of the epoch in
/// which its row changed last, plus 1 if the row was made in that epoch.
pub struct Epochs {
    /// The last one is in progress.
    epochs: VecDeque<Epoch>,
    /// Number of the oldest of them.
    oldest: u32,
    /// Number of keys that were removed in this epoch before the call.
    num_removed: usize,
}

impl Epochs {
    /// Starts the first epoch. `snapshot`: identifies the state of the table now.
    pub fn new(snapshot: u64) -> Epochs {
        let epochs = VecDeque::from([Epoch { snapshot, removed: Vec::new() }]);
        Epochs { epochs, oldest: 1, num_removed: 0 }
    }

    /// Number of bytes in use.
    pub fn num_bytes(&self) -> usize {
        size_of::<Key>() * self.epochs.iter().map(|epoch| epoch.removed.capacity()).sum::<usize>()
    }

    /// Starts an epoch.
    pub fn start(&mut self, snapshot: u64) {
        self.epochs.push_back(Epoch { snapshot, removed: Vec::new() });
        if self.epochs.len() > MAX_EPOCHS {
            self.epochs.pop_front();
            self.oldest += 1;
        }
    }

    /// Returns the number of the newest epoch that began with this snapshot.
    pub fn find(&self, snapshot: u64) -> Option<u32> {
        let place = self.epochs.iter().rposition(|epoch| epoch.snapshot == snapshot)?;
        Some(self.oldest + place as u32)
    }

    /// Gives the epochs that began with a snapshot another one.
    pub fn rename(&mut self, from: u64, to: u64) {
        let named = self.epochs.iter_mut().filter(|epoch| epoch.snapshot == from);
        named.for_each(|epoch| epoch.snapshot = to);
    }

    /// Number of the epoch in progress.
    pub fn now(&self) -> u32 {
        self.oldest + self.epochs.len() as u32 - 1
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
        memory::reserve(self.removed_now(), num_keys, "the keys that were removed since a dump")
    }

    /// Notes that a key is removed. There must be room. `word`: of its record.
    pub fn remove(&mut self, key: Key, word: u32) {
        if word != made_in(self.now()) {
            self.removed_now().push(key);
        }
    }

    /// The keys that were removed since the start of an epoch. Some may have come again, and some may come twice.
    pub fn removed_since(&self, since: u32) -> impl Iterator<Item = Key> {
        let earlier = since.saturating_sub(self.oldest) as usize;
        self.epochs.iter().skip(earlier).flat_map(|epoch| epoch.removed.iter().copied())
    }

    fn removed_now(&mut self) -> &mut Vec<Key> {
        let epoch = self.epochs.back_mut().expect("an epoch is in progress");
        &mut epoch.removed
    }
}

/// The word of a row that was made in an epoch.
pub fn made_in(epoch: u32) -> u32 {
    epoch << 1 | 1
}
