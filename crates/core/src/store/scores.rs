//! Scores and keys of records, by record number. They lie beside the arena, so that a sweep reads nothing else.
#![allow(unsafe_code)]

use crate::error::Result;
use crate::key::Key;
use crate::simd::prefetch;
use crate::store::arena::RecordNumber;
use crate::store::region::{Plain, Region};

/// The score of a record, and the newest commit that took gradients of it. A new record has the newest commit that was settled.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Use {
    pub score: u64,
    /// Number of the commit in its group.
    pub commit: u64,
}

// SAFETY: two numbers: every bit pattern is a value, nothing to drop.
unsafe impl Plain for Use {}

/// The uses and keys of all records of a table.
#[derive(Default)]
pub struct Scores {
    uses: Region<Use>,
    keys: Region<Key>,
}

impl Scores {
    /// Makes room for the records below `next`.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn reserve(&mut self, next: RecordNumber) -> Result<()> {
        self.uses.grow_amortized(next as usize)?;
        self.keys.grow_amortized(next as usize)
    }

    pub fn num_bytes(&self) -> usize {
        self.uses.num_bytes() + self.keys.num_bytes()
    }

    /// Starts the life of a record.
    pub fn start(&mut self, record: RecordNumber, key: Key, score: u64, commit: u64) {
        self.keys[record as usize] = key;
        self.uses[record as usize] = Use { score, commit };
    }

    pub fn key(&self, record: RecordNumber) -> Key {
        self.keys[record as usize]
    }

    pub fn get(&self, record: RecordNumber) -> Use {
        self.uses[record as usize]
    }

    pub fn prefetch(&self, record: RecordNumber) {
        prefetch(&raw const self.uses[record as usize]);
    }

    pub fn set_score(&mut self, record: RecordNumber, score: u64) {
        self.uses[record as usize].score = score;
    }

    /// The uses of all records, by number.
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    pub fn uses_mut(&mut self) -> &mut [Use] {
        &mut self.uses
    }

    /// The use of a record.
    pub fn use_mut(&mut self, record: RecordNumber) -> &mut Use {
        &mut self.uses[record as usize]
    }
}
