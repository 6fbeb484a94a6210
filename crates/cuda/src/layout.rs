//! What kernels take by value and find in memory, field by field as `kernels/*.cuh` write it. Addresses are device addresses.

#![allow(unsafe_code)]

use crate::memory::Plain;

macro_rules! plain {
    ($($(#[doc = $doc:expr])* pub struct $name:ident { $($(#[doc = $field_doc:expr])* pub $field:ident: $type:ty,)* })*) => {$(
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name { $($(#[doc = $field_doc])* pub $field: $type,)* }
        // SAFETY: numbers, padded by hand.
        unsafe impl Plain for $name {}
    )*};
}

/// Places of a bucket.
pub const PLACES: usize = 5;
/// Words of a bucket, of a table's stash, and of its counters.
pub const BUCKET: usize = 16;
pub const STASH: usize = 3 * 1024;
pub const COUNTERS: usize = 4 * 32;
/// Where a table's counters are, in words.
pub const TAKEN: usize = 0;
pub const DROPPED: usize = 64;
pub const DISTINCT: usize = 96;
/// In place of the first record of a table that has lost those it had.
pub const GONE: u32 = u32::MAX;
/// In place of the table of a section whose distinct keys nobody counts.
pub const NOBODY: u32 = u32::MAX;
/// In a list of record numbers: the record is new.
pub const NEW: u32 = 1 << 31;
/// Words of the tiles that a sort's passes take next; bits of a digit at least and at most; threads of a block, the ids that one of them
/// may take, blocks that a multiprocessor has registers for; blocks that tell the later ones together what they have.
pub const SORT_STATE: usize = 32;
pub const LEAST_BITS: u32 = 9;
pub const MOST_BITS: u32 = 11;
pub const SORT_THREADS: usize = 512;
pub const SORT_ITEMS: [usize; 4] = [4, 8, 10, 13];
pub const SORT_AT_ONCE: usize = 2;
pub const SORT_FELLOWS: usize = 16;
/// Words of the counts of one dim's lists.
pub const LISTS: usize = 64;
/// Ids a run of a hot key, and those beyond which a key is hot.
pub const RUN: usize = 64;
pub const HOT: usize = 16;
/// Threads of a block of `list_keys`, and the places that it takes.
pub const LIST_THREADS: usize = 256;
pub const LIST_BLOCK: usize = 2048;
/// Threads of the launches, and what a group of lanes takes.
pub const FIND_THREADS: usize = 64;
pub const ROWS_THREADS: usize = 256;
pub const UPDATE_THREADS: usize = 128;
pub const PER_SINGLE: usize = 8;
pub const PER_SUM: usize = 4;
pub const TABLE_THREADS: usize = 256;
/// Exponents of an exact sum.
pub const EXPONENTS: usize = 256;

/// Groups of four columns of a row, and of each of its states.
pub fn quads(dim: usize) -> usize {
    dim.div_ceil(4)
}

/// Lanes that share a row.
pub fn lanes(dim: usize) -> usize {
    quads(dim).next_power_of_two().min(32)
}

plain! {
    pub struct Index {
        pub buckets: u64,
        pub stash: u64,
        pub counters: u64,
        pub secret: u64,
        pub num_buckets: u32,
        pub pad: u32,
    }

    pub struct Initializer {
        pub seed: u64,
        /// Constant, uniform, normal, truncated normal.
        pub kind: u32,
        pub a: f32,
        pub b: f32,
        pub pad: u32,
    }

    pub struct Table {
        pub index: Index,
        pub initializer: Initializer,
        pub records: u64,
        pub released: u64,
        pub last_key: u64,
        /// In four floats: of a record, and of its row.
        pub stride: u32,
        pub quads: u32,
        pub num_released: u32,
        pub fresh: u32,
        pub first_state: f32,
        /// 0: the first value; 1: zeros.
        pub missing: u32,
        pub kind: u32,
        pub pad: u32,
    }

    pub struct Feature {
        pub ids: u64,
        pub high: u64,
        pub splits: u64,
        pub weights: u64,
        pub rows: u64,
        pub records: u64,
        pub padding_key: u64,
        pub stride: u32,
        pub table: u32,
        pub kind: u32,
        pub num_ids: u32,
        pub num_bags: u32,
        pub hotness: u32,
        pub key_type: u32,
        pub combiner: u32,
        pub has_padding: u32,
        pub wide_splits: u32,
        pub has_roles: u32,
        pub inserts: u32,
        pub refuses: u32,
        pub is_gather: u32,
        pub pools: u32,
        pub scale: f32,
        pub first_id: u32,
        pub first_split: u32,
    }

    pub struct Call {
        pub tables: u64,
        pub features: u64,
        pub first_find: u64,
        pub first_rows: u64,
        pub num_features: u32,
        pub shift: u32,
    }

    pub struct Homeless {
        pub count: u64,
        pub ids: u64,
    }

    pub struct Found {
        pub records: u64,
        pub values: u64,
        pub named: u64,
        pub zeros: u64,
        pub num_zeros: u32,
        pub pad: u32,
        pub homeless: Homeless,
        pub fault: u64,
        pub absent: u64,
        pub known: u64,
    }

    pub struct Rows {
        pub records: u64,
        pub named: u64,
        pub kept: Kept,
        pub fault: u64,
    }

    pub struct Kept {
        pub keys: u64,
        pub weights: u64,
        pub records: u64,
        pub splits: u64,
    }

    pub struct Fault {
        pub taken: u32,
        pub kind: u32,
        pub feature: u32,
        pub table: u32,
        pub id: u64,
    }

    pub struct Keys {
        pub lists: u64,
        pub singles: u64,
        pub several: u64,
        pub hot: u64,
        pub runs: u64,
        pub partial: u64,
        pub sums: u64,
    }

    pub struct Side {
        pub gradients: u64,
        pub records: u64,
        pub stride: u32,
        pub table: u32,
        pub scale: f32,
        pub pad: u32,
    }

    pub struct Gradients {
        pub from: u64,
        pub count: u64,
    }

    pub struct Section {
        pub first: u32,
        pub count: u32,
        pub first_tile: u32,
        pub first_list: u32,
        pub kind: u32,
        pub table: u32,
        pub pad: [u32; 2],
    }

    pub struct Sorted {
        pub record: u32,
        pub value: u32,
    }

    pub struct Sort {
        pub sections: u64,
        pub counts: u64,
        pub told: u64,
        pub flags: u64,
        pub next: u64,
        pub sorted: u64,
        pub num_sections: u32,
        pub tiles: u32,
        pub rows: u32,
        pub passes: u32,
        pub bits: u32,
        pub pad: u32,
    }

    pub struct Entry {
        pub sum: u64,
        pub weight: f32,
        pub record: u32,
        pub table: u32,
        pub pad: [u32; 3],
    }

    pub struct Renumbering {
        pub firsts: u64,
        pub weight: f32,
        pub first: u32,
    }

    pub struct Conditioning {
        pub factor: f32,
        pub clipvalue: f32,
        pub weight_decay: f32,
        pub learning_rate: f32,
        pub decays: u32,
    }

    pub struct Scalars {
        pub a: f32,
        pub b: f32,
        pub c: f32,
        pub d: f32,
        pub e: f32,
    }

    pub struct Prepared {
        pub is_due: u32,
        pub weight: f32,
        pub conditioning: Conditioning,
        pub scalars: Scalars,
    }

    /// The start of `Work`, which the `Keys` of each dim follow.
    pub struct Work {
        pub sides: u64,
        pub tables: u64,
        pub entries: u64,
        pub sorted: u64,
        pub named: u64,
        pub prepared: u64,
        pub factors: u64,
        pub shift: u32,
        pub pad: u32,
    }

    pub struct Delivery {
        pub to: u64,
        pub zeros: u64,
        pub count: u32,
        pub num_zeros: u32,
        pub number_to: u64,
        pub number: [u32; 2],
        pub pad: [u32; 2],
    }

    pub struct NewTicket {
        pub ticket: u64,
        pub is_bad: u64,
        pub row: u32,
        pub mark: f32,
        pub number: u64,
        pub expected: [u32; 2],
        pub fault: u64,
    }

    pub struct Committed {
        pub ticket: u64,
        pub resolved: u64,
        pub report: u64,
        pub tables: u64,
        pub commit: u64,
        pub oldest: u64,
        pub pending: u64,
        pub num_tables: u32,
        pub pad: u32,
    }

    pub struct RuleNumbers {
        /// Plain, Adam, Ftrl.
        pub kind: u32,
        pub first: f32,
        pub second: f32,
        pub scalars: Scalars,
        pub clipvalue: f32,
        pub weight_decay: f32,
        pub decays: u32,
    }

    pub struct Preparation {
        pub scalars: u64,
        pub resolved: u64,
        pub prepared: u64,
        pub trigger: u64,
        pub new_trigger: u64,
        pub rule: RuleNumbers,
        pub row: u32,
        pub pad: u32,
    }

    pub struct Part {
        pub width: u32,
        pub quad: u32,
        pub column: u32,
        pub pad: u32,
    }

    pub struct Parts {
        pub parts: [Part; 4],
        pub count: u32,
        pub width: u32,
    }

    pub struct Moving {
        pub count: u64,
        pub keys: u64,
        pub records: u64,
        pub room: u32,
        pub pad: u32,
    }
}

/// Words of `Resolved` and of what a `Report` holds before its tables.
pub const RESOLVED: usize = 66;
pub const REPORT: usize = 8 + 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes as a C++ compiler gives them; `kernels/*.cu` assert the same.
    #[test]
    fn layouts_have_no_hidden_padding() {
        assert_eq!(size_of::<Index>(), 40);
        assert_eq!(size_of::<Table>(), 120);
        assert_eq!(size_of::<Feature>(), 128);
        assert_eq!(size_of::<Keys>(), 56);
        assert_eq!(size_of::<Section>(), 32);
        assert_eq!(size_of::<Sort>(), 72);
        assert_eq!(size_of::<Found>(), 80);
        assert_eq!(size_of::<Rows>(), 56);
        assert_eq!(size_of::<Kept>(), 32);
        assert_eq!(size_of::<Call>(), 40);
        assert_eq!(size_of::<NewTicket>(), 48);
        assert_eq!(size_of::<Work>(), 64);
        assert_eq!(size_of::<Side>(), 32);
        assert_eq!(size_of::<Gradients>(), 16);
        assert_eq!(size_of::<Entry>(), 32);
        assert_eq!(size_of::<Preparation>(), 96);
        assert_eq!(size_of::<Committed>(), 64);
        assert_eq!(size_of::<Delivery>(), 48);
        assert_eq!(size_of::<Prepared>(), 48);
    }
}
