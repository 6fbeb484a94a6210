//! The structs of policies: uses of rows, which rows tables remove by themselves, and which keys they admit.

#![allow(unsafe_code)]

use super::constants::NUM_COUNTS;
use super::macros::{InCuda, struct_text};
use super::structs::{Index, Overflow};
use crate::memory::Plain;

structs! {
    /// The score of a record, and its commit as in `Table::commits`, if that is there.
    #[repr(align(16))]
    pub struct Use {
        pub score: u64,
        pub commit: u64,
    }

    /// How far the steps of a table are.
    pub struct Progress {
        /// Number of the step in progress.
        pub step: u64,
        /// Number of the newest commit whose gradients were applied, if rows have a time to live.
        pub settled_commit: u64,
        /// Of `expire_rows`: rows that have expired, and blocks that have ended. Zeros between launches.
        pub num_expired: u32,
        pub blocks_done: u32,
    }

    /// How many ids each key stands for, where a lookup has the distinct keys of ranks.
    pub struct IdCounts {
        /// Features of the call.
        pub features: u64 as "const Feature*",
        /// By place of a key in the call; null if each id comes by itself.
        pub counts: u64 as "const u32*",
        /// `Call::shift` of the call.
        pub shift: u32,
        pub pad: u32,
    }

    /// A key of a lookup, and the score that came with it.
    pub struct KeyScore {
        pub key: u64,
        /// As `ScoreType::Sent`.
        pub score: u64,
    }

    /// The record of a key without a row that a lookup of training has met.
    #[repr(align(16))]
    pub struct Candidate {
        /// Number of sights in earlier steps.
        pub sights: u32,
        /// Number of sights in the commit in progress; 0 otherwise.
        pub more: u32,
        /// Record number that the key has got in the last commit that saw it, or `NO_RECORD`.
        pub record: u32,
        pub pad: u32,
        pub key: u64,
        pub pad1: u64,
    }

    /// A candidate that a lookup has met.
    pub struct Listed {
        /// Position of its first sorted id.
        pub first: u32,
        /// Number of its sorted ids.
        pub count: u32,
    }

    /// A lookup whose candidates a commit inserts.
    pub struct Admitting {
        pub tables: u64 as "const Table*",
        /// By kind.
        pub kinds: u64 as "const Keys*",
        /// Sections of the lookup, and their number.
        pub sections: u64 as "const Section*",
        pub sorted: u64 as "Sorted*",
        /// Its candidates: those of a section from `Section::first` on, in any order.
        pub listed: u64 as "const Listed*",
        /// By section: their number.
        pub num_listed: u64 as "const u32*",
        /// Of the commit.
        pub resolved: u64 as "const Resolved*",
        /// Places in `listed` of candidates whose keys have found no slot.
        pub overflow: Overflow,
        /// How many ids a sorted one stands for.
        pub of_keys: IdCounts,
        pub fault: u64 as "Fault*",
        pub num_sections: u32,
        /// Blocks of a launch for each section.
        pub blocks: u32,
        /// Row of the ticket that names the push; `RING`: it is known to be named.
        pub row: u32,
        /// Whether `count_sights` has counted the sights.
        pub is_counted: u32,
    }

    /// The rows that a sweep or an expiry removes: where their numbers are added to the ring of released numbers, and what is written beside them. Expiries are
    /// numbered with the sweeps.
    pub struct Removal {
        /// The ring.
        pub numbers: u64 as "u32*",
        /// By place in the ring: the key of the row that had the number.
        pub keys: u64 as "u64*",
        /// By place in the ring: the word of `Table::changes` of the row. Null if the table does not note changes.
        pub changes: u64 as "u32*",
        /// The bits of a place that are its place in the ring.
        pub mask: u64,
        /// By number of the sweep, modulo `SWEEP_NOTES`.
        pub notes: u64 as "SweepNote*",
        /// Number of the sweep.
        pub sweep: u64,
        /// The numbers of rows that this sweep or an earlier one has removed may be given out. `NO_SWEEP`: of none.
        pub usable: u64,
    }

    /// What a sweep has done.
    pub struct SweepNote {
        /// Number of the step in progress.
        pub step: u64,
        /// Place in the ring after the numbers of its rows.
        pub end: u64,
    }

    /// The part of a table's keys of which a commit erases rows whose time to live is over.
    pub struct Expiry {
        /// Erases rows that no later commit has trained.
        pub newest: u64,
        /// The hashes of the keys end with these bits.
        pub ending: u64,
        /// The bits of a hash that this concerns.
        pub mask: u64,
        /// Where the rows are added.
        pub removal: Removal,
        /// Maximum number of rows that are added to the ring.
        pub room: u32,
        /// Number of the table.
        pub table: u32,
    }

    /// An expired row for which the ring had no room.
    pub struct UnlistedRow {
        pub key: u64,
        /// The step at the end of which it has expired.
        pub step: u64,
        pub record: u32,
        /// The record's word of `Table::changes`; 0 without changes.
        pub change: u32,
    }

    /// A sweep: it chooses the rows with the lowest scores, and of equal scores those with the lowest keys, and removes them. `choice`
    /// and `bins` start and end as zeros.
    pub struct Sweep {
        pub index: Index,
        /// As in `Table`.
        pub scores: u64 as "const u64*",
        pub commits: u64 as "u64*",
        pub vacant: u64 as "u32*",
        pub keys: u64 as "const u64*",
        /// By group of `FLOOR_RECORDS` records: a lower bound of the ranks of their rows. None has a lower score, or this score and a lower key. With
        /// a score of 0, the key means nothing.
        pub floor_scores: u64 as "u64*",
        pub floor_keys: u64 as "u64*",
        pub progress: u64 as "const Progress*",
        /// A bit for each record that has no row, or one that must stay.
        pub marks: u64 as "u32*",
        pub choice: u64 as "Choice*",
        /// Counts of `RANK_BINS` bins.
        pub bins: u64 as "u32*",
        /// The ranks of a sample of the rows that may go, with room for `SAMPLES`.
        pub samples: u64 as "Ranked*",
        /// The rows with low ranks, with room for `low_room`.
        pub low: u64 as "Ranked*",
        pub low_room: u64,
        pub removal: Removal,
        /// As in `Table`.
        pub changes: u64 as "const u32*",
        /// Maximum number of rows.
        pub capacity: u64,
        /// Maximum number of rows that go.
        pub most: u64,
        /// Number of keys that are inserted later, for which there must be room, too.
        pub new_keys: u64,
        /// As in `Table`.
        pub scoring: u32,
        pub pad: u32,
    }

    /// A row that may go: its score, its key and its record.
    pub struct Ranked {
        pub score: u64,
        pub key: u64,
        pub record: u64,
    }

    /// Which sights a policy with a limited memory forgets. It starts as zeros.
    pub struct Forgetting {
        /// The highest count that is forgotten; 0 if none is.
        pub highest: u32,
        /// Blocks of the launch that have ended.
        pub blocks_done: u32,
        /// How many candidates have so many sights. Zeros between launches.
        pub num_by_count: [u32; NUM_COUNTS],
    }

    /// A list of keys whose rows have changed.
    pub struct ChangedList {
        pub count: u64 as "u32*",
        /// Null if only their number is wanted, as the next one.
        pub keys: u64 as "u64*",
        pub records: u64 as "u32*",
    }

    /// Records that a sweep must leave.
    pub struct Used {
        pub records: u64 as "const u32*",
        /// The number of records, if the device alone knows it; otherwise null.
        pub counted: u64 as "const u32*",
        /// Of a commit that is not known to be valid. If it was, and named the push of `row`, the records need not stay. Null otherwise.
        pub resolved: u64 as "const Resolved*",
        pub row: u32,
        /// Words from one number to the next.
        pub stride: u32,
        /// The number of records, or an upper bound.
        pub count: u32,
        /// Numbers from this one on are not those of records.
        pub end: u32,
        /// Index of the sweep.
        pub sweep: u32,
        pub pad: u32,
    }

    /// The state of a sweep.
    pub struct Choice {
        /// Number of rows to choose.
        pub wanted: u64,
        /// Number of rows that may go, or of those in `low` if all rows that go are there.
        pub count: u64,
        /// Number of rows among which the sweep chooses; of rows that may go, or of samples.
        pub num_ranked: u64,
        /// The lowest score of those, with all bits inverted.
        pub inverse_of_lowest: u64,
        /// The highest score of those.
        pub highest: u64,
        /// The lowest rank of bin 0.
        pub low_score: u64,
        pub low_key: u64,
        /// The highest rank that is known to be high enough.
        pub high_score: u64,
        pub high_key: u64,
        /// Number of rows with ranks below `low`.
        pub below: u64,
        /// Number of samples; of rows in `low`, for all of which there may be no room; and of chosen rows.
        pub num_samples: u32,
        pub num_low: u32,
        pub num_listed: u32,
        /// A bin has `1 << shift` ranks.
        pub shift: u32,
        /// Whether the rows that are searched for have no higher ranks than `high`.
        pub is_done: u32,
        /// Blocks of `remove_chosen` that have ended.
        pub blocks_done: u32,
    }
}
