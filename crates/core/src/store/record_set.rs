//! A set of records.

use crate::error::Result;
use crate::memory;
use crate::store::arena::RecordNumber;

/// One bit for each record.
pub struct RecordSet(Vec<u64>);

impl RecordSet {
    /// An empty set of records below `next`.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(next: RecordNumber) -> Result<RecordSet> {
        Ok(RecordSet(memory::filled(0, (next as usize).div_ceil(64), "a set of records")?))
    }

    pub fn insert(&mut self, record: RecordNumber) {
        self.0[record as usize / 64] |= 1 << (record % 64);
    }

    pub fn contains(&self, record: RecordNumber) -> bool {
        self.0[record as usize / 64] >> (record % 64) & 1 == 1
    }
}
