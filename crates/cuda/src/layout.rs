//! What kernels take by value and find in memory, field by field as `kernels/*.cuh` write it. Addresses are device addresses.

#![allow(unsafe_code)]

use crate::memory::Plain;

macro_rules! plain {
    ($($(#[doc = $doc:expr])* pub struct $name:ident { $($(#[doc = $field_doc:expr])* pub $field:ident: $type:ty,)* })*) => {$(
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name { $($(#[doc = $field_doc])* pub $field: $type,)* }
        // SAFETY: numbers, padded by hand.
        unsafe impl Plain for $name {}
    )*};
}

/// Places of a bucket.
pub const PLACES: usize = 5;
pub const BUCKET_BYTES: usize = 64;
/// Words of a table's counters: the record number to give out next, how many stand on the free list, how many keys are in the
/// stash, how many have no place; each on a line of its own.
pub const COUNTERS: usize = 128;
pub const NEXT: usize = 0;
pub const FREE: usize = 32;
pub const STASHED: usize = 64;
pub const HOMELESS: usize = 96;
pub const STASH: usize = 1024;
pub const STASH_BYTES: usize = STASH * 12;
/// Words of the sort's state beside its starts, and digits of a pass.
pub const SORT_HEADER: usize = 32;
pub const DIGIT_BITS: usize = 9;
pub const DIGITS: usize = 1 << DIGIT_BITS;
pub const SORT_THREADS: usize = 512;
pub const SORT_TILE: usize = 512 * 12;
/// Words of the lists' counts.
pub const LISTS: usize = 64;
/// Ids a run of a hot key.
pub const RUN: usize = 64;
/// Ids from which on a key is hot.
pub const HOT: usize = 16;

plain! {
    pub struct Index {
        pub buckets: u64,
        pub stash: u64,
        pub counters: u64,
        pub free: u64,
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
        /// In four floats.
        pub stride: u32,
        pub first: u32,
        pub first_state: f32,
        pub pad: u32,
    }

    pub struct Feature {
        pub ids: u64,
        pub rows: u64,
        pub gradients: u64,
        pub records: u64,
        pub stride: u32,
        pub first_record: u32,
        pub table: u32,
        pub num_bags: u32,
        pub hotness: u32,
        pub first_id: u32,
        pub first_find: u32,
        pub first_forward: u32,
    }

    pub struct Call {
        pub tables: u64,
        pub features: u64,
        pub find_features: u64,
        pub forward_features: u64,
        pub num_features: u32,
        pub shift: u32,
    }

    pub struct Homeless {
        pub count: u64,
        pub ids: u64,
    }

    pub struct Keys {
        pub lists: u64,
        pub singles: u64,
        pub several: u64,
        pub hot: u64,
        pub runs: u64,
        pub partial: u64,
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

    pub struct Work {
        pub call: Call,
        pub keys: Keys,
        pub gradient_rows: u64,
        pub conditioning: Conditioning,
        pub scalars: Scalars,
    }
}
