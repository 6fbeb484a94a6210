//! What a call has inserted into a table until now, so that a call without memory for the rest leaves the table as it was.

use crate::arena::RecordNumber;
use crate::error::Result;
use crate::key::Key;
use crate::memory;

/// Entries that are kept from one call to the next.
const KEPT: usize = 1 << 16;
pub const WHAT: &str = "the new keys of a call";

/// New keys with their records, in the order in which one thread inserted them.
pub type Log = Vec<(Key, RecordNumber)>;

#[derive(Default)]
pub struct Journal {
    log: Log,
    /// Of threads that shared the table.
    others: Vec<Log>,
    /// Smallest record number that was never given out when the call began.
    pub unused: RecordNumber,
}

impl Journal {
    pub fn begin(&mut self, unused: RecordNumber) {
        self.others.clear();
        self.log.clear();
        self.log.shrink_to(KEPT);
        self.unused = unused;
    }

    /// Room to `push` an entry: taken before the key gets a record.
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

    /// Takes out all entries. Those of a thread come in reverse order.
    pub fn take(&mut self) -> impl Iterator<Item = (Key, RecordNumber)> + use<> {
        let log = std::mem::take(&mut self.log);
        let others = std::mem::take(&mut self.others);
        others.into_iter().rev().chain([log]).flat_map(|log| log.into_iter().rev())
    }
}
