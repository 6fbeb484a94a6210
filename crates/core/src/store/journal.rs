//! Records what a call inserts, so that a call that runs out of memory can undo it.

use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::store::arena::RecordNumber;

/// Capacity that is kept for the next call.
const KEPT: usize = 1 << 16;
pub const WHAT: &str = "the new keys of a call";

/// New keys with their records, in the order in which one thread inserted them.
pub type Log = Vec<(Key, RecordNumber)>;

#[derive(Default)]
pub struct Journal {
    log: Log,
    /// Entries of threads that shared the table.
    others: Vec<Log>,
    /// Smallest unused record number at the start of the call.
    pub unused: RecordNumber,
    /// Number of keys that the call may still insert one by one.
    pub room: u64,
    /// Whether a key found no room.
    pub is_full: bool,
}

impl Journal {
    pub fn begin(&mut self, unused: RecordNumber, room: u64) {
        self.others.clear();
        self.log.clear();
        self.log.shrink_to(KEPT);
        (self.unused, self.room, self.is_full) = (unused, room, false);
    }

    /// Reserves room for an entry. It must be called before the key gets a record.
    #[inline]
    pub fn reserve(&mut self) -> Result<()> {
        memory::reserve(&mut self.log, 1, WHAT)
    }

    #[inline]
    pub fn push(&mut self, key: Key, record: RecordNumber) {
        self.log.push((key, record));
    }

    pub fn reserve_others(&mut self, logs: usize) -> Result<()> {
        memory::reserve(&mut self.others, logs, WHAT)
    }

    pub fn append(&mut self, log: Log) {
        self.others.push(log);
    }

    /// Takes the room of one key. Returns false if no room is left.
    #[inline]
    pub fn take_room(&mut self) -> bool {
        self.is_full |= self.room == 0;
        self.room = self.room.saturating_sub(1);
        !self.is_full
    }

    pub fn iter(&self) -> impl Iterator<Item = (Key, RecordNumber)> {
        self.others.iter().chain([&self.log]).flatten().copied()
    }

    /// Removes and returns all entries. The entries of one thread come in reverse order.
    pub fn take(&mut self) -> impl Iterator<Item = (Key, RecordNumber)> + use<> {
        let log = std::mem::take(&mut self.log);
        let others = std::mem::take(&mut self.others);
        others.into_iter().rev().chain([log]).flat_map(|log| log.into_iter().rev())
    }
}
