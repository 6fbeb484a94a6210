//! The structs that kernels take by value or read from memory.

#![allow(unsafe_code)]

use super::constants::*;
use super::macros::{InCuda, struct_text};
use crate::memory::Plain;

structs! {
    /// A bucket of an index: one cache line.
    #[repr(align(64))]
    pub struct Bucket {
        pub keys: [u64; SLOTS],
        /// By slot: the record number of the key. 0: the slot is empty; `CLAIMED`: the number is not written yet.
        pub records: [u32; SLOTS],
        /// Lock, stash bit and filter of the keys that have this first bucket.
        pub word: u32,
    }

    /// Keys for which both of their buckets were full. It is nearly always empty, unless keys were crafted to collide.
    pub struct Stash {
        pub keys: [u64; STASH],
        /// By slot: the record number of the key, as in `Bucket`.
        pub records: [u32; STASH],
    }

    /// The numbers of removed rows that are given out again, in a ring. Places count on; the ring has them modulo its length.
    pub struct Released {
        /// `Counters::taken` when these fields were last updated.
        pub base: u64,
        /// Place of the number that was given out next then.
        pub first: u64,
        /// How many numbers from `first` on may be given out.
        pub count: u64,
        /// Place after the newest number.
        pub end: u64,
        /// Smallest record number that was never given out before `base`. Insertion takes it, and the next ones, when the ring has no more.
        pub fresh: u64,
    }

    /// Counts of a table, each on a cache line of its own.
    pub struct Counters {
        /// Record numbers that were ever given out.
        pub taken: u64,
        pub pad0: [u32; 30],
        /// Rows that were ever removed. The table has `taken - gone` rows.
        pub gone: u64,
        /// Rows that sweeps have removed to make room; a part of `gone`, as the next ones.
        pub evicted: u64,
        /// Rows that have expired.
        pub expired: u64,
        /// Expired rows for which the ring of released numbers had no room, and which the host has not read.
        pub unlisted: u64,
        pub released: Released,
        pub pad7: [u32; 14],
        /// Slots of the stash that threads have requested; more than `STASH` if it is full.
        pub stashed: u32,
        pub pad1: [u32; 31],
        /// Ids whose gradient is dropped, because their key has no record.
        pub dropped: u64,
        pub pad2: [u32; 30],
        /// Distinct keys with a record, summed over the lookups that save what a push needs.
        pub distinct: u64,
        pub pad3: [u32; 30],
        /// Ids without a record, of lookups outside of training.
        pub unknown: u64,
        pub pad4: [u32; 30],
        /// Keys that a commit has not admitted, once for each lookup.
        pub filtered: u64,
        pub pad5: [u32; 30],
        /// Record of the out-of-vocabulary key at the last lookup.
        pub out_of_vocabulary: u32,
        pub pad6: [u32; 31],
    }

    /// The counts of a table in a report: fields of `Counters`.
    pub struct TableCounts {
        pub taken: u64,
        pub gone: u64,
        pub evicted: u64,
        pub expired: u64,
        pub unlisted: u64,
        pub released: Released,
        pub distinct: u64,
        pub dropped: u64,
        pub unknown: u64,
        pub filtered: u64,
    }

    /// The map from keys to record numbers.
    pub struct Index {
        pub buckets: u64 as "Bucket*",
        pub stash: u64 as "Stash*",
        pub counters: u64 as "Counters*",
        /// Secret of the process. Under a public hash, keys that were crafted to share buckets would fill those and the stash.
        pub secret: u64,
        pub num_buckets: u32,
        pub pad: u32,
    }

    /// Distribution of the initial values of rows.
    pub struct Initializer {
        pub seed: u64,
        /// Share of the normal distribution below the lower bound, and between the bounds.
        pub below: f64,
        pub between: f64,
        /// `InitializerKind`
        pub kind: u32,
        /// The value, `minval` or `mean`, by kind.
        pub a: f32,
        /// Unused, `maxval - minval` or `stddev`, by kind.
        pub b: f32,
        pub pad: u32,
    }

    /// Which keys without a record get one in a commit, as `policy/admission.rs` of the core says.
    pub struct Admission {
        /// Number of the step in progress.
        pub step: u64,
        /// A key is admitted in a step if 53 random bits of key and step are below this number.
        pub chance: u64,
        /// Number of sights from which on a key is admitted. 0: sights are not counted.
        pub threshold: u32,
        /// Whether each id is a sight. If not, all ids of a key in a step are one.
        pub counts_ids: u32,
        /// Whether the table has no room for more keys than the host has inserted.
        pub is_closed: u32,
        pub pad: u32,
    }

    /// Descriptor of a table.
    pub struct Table {
        pub index: Index,
        pub initializer: Initializer,
        /// Address of record 0. Record r begins at `records + r * stride`.
        pub records: u64 as "float4*",
        /// The ring of released numbers.
        pub released: u64 as "const u32*",
        /// A place in the ring has these bits of the place.
        pub ring_mask: u64,
        /// Largest key of the vocabulary.
        pub last_key: u64,
        /// Size of a record, in units of 16 bytes.
        pub stride: u32,
        /// Groups of four columns of a row.
        pub quads: u32,
        /// Where the states begin in a record, in units of 16 bytes.
        pub states: u32,
        /// `RowType`: type of the numbers of rows.
        pub row_type: u32,
        /// Initial value of the first state. The initial value of all others is 0.
        pub first_state: f32,
        /// `Missing`: the row of a key without a record.
        pub missing: u32,
        /// Index of the table's kind in the group: one of its distinct rows, and the optimizer.
        pub kind: u32,
        /// Whether every key without a record has the row of `out_of_vocabulary_key`.
        pub has_out_of_vocabulary_key: u32,
        pub out_of_vocabulary_key: u64,
        /// Of a table that ranks share: the row of `out_of_vocabulary_key`, which another rank may own; null otherwise.
        pub out_of_vocabulary_row: u64 as "const float4*",
        /// By record: its score. Null if no policy removes rows, as `vacant`, `keys` and `progress`.
        pub scores: u64 as "u64*",
        /// By record: number of the newest commit that took gradients of it; or `NO_ROW`, or `unlisted_at`. Null if rows have no time to live.
        pub commits: u64 as "u64*",
        /// A bit for each record that has no row.
        pub vacant: u64 as "u32*",
        /// By record: its key.
        pub keys: u64 as "u64*",
        /// As in `Sweep`. Null without eviction, and with LRU, where a new row has the highest score: the step in progress.
        pub floor_scores: u64 as "u64*",
        pub progress: u64 as "Progress*",
        /// By record: when its row changed, as `contract/epochs.rs` of the core says. Null if the table does not note changes.
        pub changes: u64 as "u32*",
        pub admission: Admission,
        /// By record: number of steps of the optimizer that it has taken. Null if steps update the rows with gradients alone, as the next.
        pub taken: u64 as "u32*",
        /// Number of steps so far.
        pub now: u64 as "const u32*",
        /// Number of columns of a row.
        pub dim: u32,
        pub pad: u32,
        /// Number of the optimizer that updates the table. 0: the model's.
        pub optimizer: u32,
        /// Index of the descriptor of the table's candidates, whose records are `Candidate`s; 0 if it has none.
        pub candidates: u32,
        /// `Scoring` of the rows.
        pub scoring: u32,
        /// Number of the epoch in progress.
        pub epoch: u32,
    }

    /// Descriptor of a feature of a call.
    pub struct Feature {
        /// Ids of type `key_type`, or their low words.
        pub ids: u64 as "const void*",
        /// High words of the ids if `key_type` is `Words`.
        pub high: u64 as "const void*",
        /// Where each bag begins in the ids, `(bags + 1,)`; null if each bag has `hotness` ids.
        pub splits: u64 as "const void*",
        /// One weight for each id, or null.
        pub weights: u64 as "const float*",
        /// Output, `(bags, dim)`: float32, or of 16 bits as the kernel's code of rows says.
        pub rows: u64 as "float*",
        /// `Table::records` of the feature's table.
        pub records: u64 as "float4*",
        pub padding_key: u64,
        /// A score of type `score_type` for each id, or null.
        pub scores: u64 as "const void*",
        /// `Table::stride` of the feature's table.
        pub stride: u32,
        /// Index of the feature's table in the group.
        pub table: u32,
        /// Index of the table's kind in the group: one of its distinct rows, and the optimizer.
        pub kind: u32,
        pub num_ids: u32,
        pub num_bags: u32,
        /// Ids of each bag; 0 if there are `splits`.
        pub hotness: u32,
        /// `KeyType`
        pub key_type: u32,
        /// `Combiner`
        pub combiner: u32,
        /// Whether `padding_key` is valid.
        pub has_padding: u32,
        /// Whether splits have 64 bits.
        pub wide_splits: u32,
        /// Whether an id may be outside a vocabulary, have a weight, or be padding.
        pub has_roles: u32,
        /// Whether keys without a record get one.
        pub inserts: u32,
        /// Whether an id outside the vocabulary is an error.
        pub refuses: u32,
        /// Whether each bag has one id, and there are no weights.
        pub is_gather: u32,
        /// Whether ids come in bags, whose rows are combined.
        pub pools: u32,
        /// Factor of the sums of bags, and of the gradients of their ids, if all bags have `hotness` ids; otherwise 1.
        pub scale: f32,
        /// Place of the feature's first id in the call.
        pub first_id: u32,
        /// Place of the feature's first split in `Kept::splits`.
        pub first_split: u32,
        /// Whether ids are looked up after all others, without insertion and without gradients.
        pub is_silent: u32,
        /// What becomes of ids without a record: bits `ABSENT_LATER` and `ABSENT_UNKNOWN`.
        pub absent: u32,
        /// Number of the first candidate among the numbers that are sorted.
        pub first_candidate: u32,
        /// `ScoreType`
        pub score_type: u32,
    }

    /// The features of a call.
    pub struct Call {
        pub tables: u64 as "const Table*",
        pub features: u64 as "const Feature*",
        /// By feature: its first block in `find_records`.
        pub first_find: u64 as "const u32*",
        /// By feature: its first block in `make_rows`.
        pub first_rows: u64 as "const u32*",
        pub num_features: u32,
        /// The name of a gradient row is `feature << shift | bag`.
        pub shift: u32,
    }

    /// The kinds of a launch, where several launches process a call.
    pub struct Kinds {
        /// The first kind. The others follow it.
        pub first: u32,
        /// Whether other launches process other kinds.
        pub has_others: u32,
    }

    /// Keys for which both of their buckets were full.
    pub struct Overflow {
        pub count: u64 as "u32*",
        /// Places of their ids in the call.
        pub ids: u64 as "u32*",
    }

    /// What `find_records` reads and writes besides the features.
    pub struct Found {
        /// By place of an id: its record number, or `NO_RECORD`.
        pub records: u64 as "u32*",
        /// By place of an id: the value that is sorted with its record number. It is the name of the id's gradient row, or the
        /// place of the id if ids have coefficients of their own. Null if the call does not save anything.
        pub values: u64 as "u32*",
        /// By place of an id; null unless ids have coefficients of their own.
        pub named: u64 as "Named*",
        /// Words that `find_records` sets to 0.
        pub zeros: u64 as "u32*",
        pub num_zeros: u32,
        pub pad: u32,
        pub overflow: Overflow,
        pub fault: u64 as "Fault*",
        /// By place of an id: takes its record number, or that of its candidate from `Section::first_candidate` on. Null without candidates.
        pub numbers: u64 as "u32*",
    }

    /// Copies of a call's inputs for the gradients of weights, because a framework may have reused its own memory by then. By place
    /// of an id, or of a split.
    pub struct Kept {
        pub keys: u64 as "u64*",
        pub weights: u64 as "float*",
        /// Record numbers; `PADDING` for padding.
        pub records: u64 as "u32*",
        pub splits: u64 as "u32*",
    }

    /// What `make_rows` reads and writes besides the features.
    pub struct Rows {
        /// By place of an id: its record number.
        pub records: u64 as "const u32*",
        /// By place of an id: takes its coefficient. Null unless ids have coefficients of their own.
        pub named: u64 as "Named*",
        pub kept: Kept,
        pub fault: u64 as "Fault*",
    }

    /// An id with a coefficient of its own: the name of its bag's gradient row, and what the row is multiplied by.
    #[repr(align(8))]
    pub struct Named {
        pub name: u32,
        pub coefficient: f32,
    }

    /// An id of a candidate, as the host reads it.
    pub struct AbsentId {
        pub key: u64,
        /// Its place in the call.
        pub place: u32,
        /// How many ids it stands for.
        pub ids: u32,
        /// Number of sights of its key in earlier steps.
        pub sights: u32,
        pub pad: u32,
    }

    /// An error of a call, in memory that the host reads. Only the first one is kept.
    pub struct Fault {
        /// 1 as soon as a thread reports an error.
        pub taken: u32,
        /// `FaultKind`, written last.
        pub kind: u32,
        pub feature: u32,
        pub table: u32,
        /// The id, the bag or the lookup number that is wrong.
        pub id: u64,
    }

    /// A key of one id.
    pub struct Single {
        pub record: u32,
        /// Sorted value of its id.
        pub gradient_row: u32,
    }

    /// A key of 2 to `HOT` ids.
    pub struct Several {
        pub record: u32,
        /// Sorted place of its first id.
        pub first: u32,
        pub count: u32,
        /// Sorted value of its first id.
        pub name: u32,
    }

    /// A key of more than `HOT` ids.
    pub struct Hot {
        pub record: u32,
        pub first_run: u32,
        pub runs: u32,
        /// Number of its runs that have been summed.
        pub done: u32,
    }

    /// A run of a hot key.
    pub struct Run {
        /// Sorted place of its first id.
        pub first: u32,
        pub count: u32,
        /// Index of its key in `Keys::hot`.
        pub hot: u32,
        pub pad: u32,
    }

    /// Lengths of the lists of keys, on two cache lines.
    pub struct Lists {
        /// several << 32 | singles
        pub cold: u64,
        pub pad0: [u64; 15],
        /// hot << 32 | runs
        pub hot: u64,
        pub pad1: [u64; 15],
    }

    /// The distinct keys of the tables of one dim, in lists by their number of ids.
    pub struct Keys {
        pub lists: u64 as "Lists*",
        pub singles: u64 as "Single*",
        pub several: u64 as "Several*",
        pub hot: u64 as "Hot*",
        pub runs: u64 as "Run*",
        /// Partial sums: the sum of each run, `(runs, dim)`.
        pub partial: u64 as "float4*",
        /// Merged gradients, `(keys, dim)`: of singles, then several, then hot.
        pub sums: u64 as "float4*",
        /// Number of columns of a row, without those that only fill its last group of four.
        pub width: u32,
        pub pad: u32,
    }

    /// What the backward pass needs of a feature.
    pub struct Side {
        /// Gradient rows, `(bags, dim)`: float32, or of 16 bits as the kernel's code of rows says.
        pub gradients: u64 as "const float*",
        /// `Table::records` of the feature's table.
        pub records: u64 as "float4*",
        /// `Table::stride` of the feature's table; 0 if the table has lost its records.
        pub stride: u32,
        pub table: u32,
        /// Factor of the gradients, if all ids of the feature have the same.
        pub scale: f32,
        pub pad: u32,
    }

    /// Gradients of a feature, in memory of the framework.
    pub struct Gradients {
        pub from: u64 as "const void*",
        /// Number of numbers.
        pub count: u64,
    }

    /// Ids that are sorted together. A section of a lookup has the ids of one table. A section of merged gradients has the ids of all tables of one
    /// dim. A block belongs to one section.
    pub struct Section {
        /// Place of its first id.
        pub first: u32,
        pub count: u32,
        /// Index of its first tile.
        pub first_tile: u32,
        /// Index of its first block in `list_keys`.
        pub first_list: u32,
        /// Index of its kind in the group.
        pub kind: u32,
        /// The table whose distinct keys are counted, or `NO_TABLE`.
        pub table: u32,
        /// Numbers from this one on are those of candidates; 0 if there are none.
        pub first_candidate: u32,
        pub pad: u32,
    }

    /// A sorted id.
    #[repr(align(8))]
    pub struct Sorted {
        /// Its record number; 0 if it has none. Until a commit decides, the number of its candidate.
        pub record: u32,
        /// Its value in `Found::values`, or in a sort of merged gradients the index of an `Entry`.
        pub value: u32,
    }

    /// A radix sort of ids by their records.
    pub struct Sort {
        pub sections: u64 as "const Section*",
        /// Histograms: number of ids by section, pass and digit.
        pub counts: u64 as "u32*",
        /// Aggregates and inclusive prefixes that tiles and groups of tiles publish: counts by pass, row and digit.
        pub published: u64 as "u32*",
        /// Status of each row, by pass and row: `TileStatus`.
        pub flags: u64 as "u32*",
        /// By pass: the next tile that a block takes.
        pub next: u64 as "u32*",
        /// Output.
        pub sorted: u64 as "Sorted*",
        pub num_sections: u32,
        pub tiles: u32,
        /// Rows of `published` and `flags` in a pass.
        pub rows: u32,
        pub passes: u32,
        /// Bits of a digit.
        pub bits: u32,
        pub pad: u32,
    }

    /// A merged gradient, and the record that it belongs to.
    pub struct Entry {
        pub sum: u64 as "const float4*",
        /// Weight of its push.
        pub weight: f32,
        pub record: u32,
        pub table: u32,
        pub pad: [u32; 3],
    }

    /// How `list_entries` turns the keys of a merge into entries.
    pub struct Renumbering {
        /// By table: the number of its record 0, when the records of all tables of a dim are numbered one table after the other.
        /// `GONE` if the table has lost its records.
        pub firsts: u64 as "const u32*",
        /// Weight of the push.
        pub weight: f32,
        /// Number of entries before those of this merge.
        pub first: u32,
    }

    /// Scaling and clipping of a merged gradient and weight decay of a value, which come before the formula's own step.
    pub struct Conditioning {
        /// Factor of the gradients.
        pub factor: f32,
        /// Infinity if gradients are not clipped by value.
        pub clipvalue: f32,
        pub weight_decay: f32,
        pub learning_rate: f32,
        /// Whether there is a weight decay.
        pub decays: u32,
    }

    /// What the update of a group needs in a step. Written by `prepare`.
    pub struct Prepared {
        /// 0 if nothing is updated.
        pub is_due: u32,
        /// Weight of the push.
        pub weight: f32,
        pub conditioning: Conditioning,
        /// Scalars of the formula's step.
        pub scalars: [f32; NUM_SCALARS],
        /// Number of the update, from 1.
        pub step: u32,
    }

    /// The newest steps of an optimizer.
    pub struct Missed {
        /// Step number s is in place `s % MISSED_STEPS`.
        pub steps: u64 as "const Prepared*",
        /// Number of steps so far.
        pub now: u64 as "const u32*",
    }

    /// Parameters of a merge or an update. In kernels they are the head of `Work`, where the `Keys` of each dim follow.
    pub struct WorkHead {
        /// By feature.
        pub sides: u64 as "const Side*",
        pub tables: u64 as "const Table*",
        /// Merged gradients if the source is `Sums`; otherwise null.
        pub entries: u64 as "const Entry*",
        /// The sorted ids. A value is the name of a gradient row, the place of an id or the index of an entry, by source.
        pub sorted: u64 as "const Sorted*",
        /// By place of an id, if the source is `WeightedRows`; otherwise null.
        pub named: u64 as "const Named*",
        pub prepared: u64 as "const Prepared*",
        /// By table: the factor that clips by the table's norm. Null if there is none.
        pub factors: u64 as "const float*",
        /// `Call::shift` of the lookup.
        pub shift: u32,
        /// Whether a merge writes the sum of a key where the record of the key would be, by `Side::records`; otherwise to `Keys::sums`.
        pub is_placed: u32,
    }

    /// Where the words in the parameters of a launch go. They need no copy from the host.
    pub struct Delivery {
        pub to: u64 as "u32*",
        /// Words that are set to 0.
        pub zeros: u64 as "u32*",
        pub count: u32,
        pub num_zeros: u32,
        /// Takes the number of a lookup, as two words; or null.
        pub number_to: u64 as "u32*",
        pub number: [u32; 2],
        pub pad: [u32; 2],
    }

    /// A piece of the rows that an optimizer without a formula is to change.
    pub struct Piece {
        /// Number of the piece, from 1; 0: none.
        pub number: u64 as "const int*",
        /// By launch: its first row among those of all launches, in groups of four columns. The end of the last launch follows.
        pub starts: u64 as "u64*",
        /// Addresses of gradients (not in a scatter), rows, and each state.
        pub arrays: [u64; PIECE_ARRAYS],
        /// Groups of four columns of a piece.
        pub quads: u64,
        pub num_arrays: u32,
        /// Number of the launch; in a launch for the whole piece, the number of launches.
        pub launch: u32,
    }

    /// A field of a record: its row, or one of its states.
    pub struct DeviceField {
        /// Number of columns.
        pub width: u32,
        /// Where it begins in the record, in units of 16 bytes.
        pub unit: u32,
        /// Where it begins in a dense record, in columns.
        pub column: u32,
        pub pad: u32,
    }

    /// The fields of a record: the row, then the states.
    pub struct DeviceFields {
        pub fields: [DeviceField; 4],
        pub count: u32,
        /// Number of columns of a dense record.
        pub width: u32,
    }

    /// Entries of an index that found both of their buckets full when they were moved to a larger index.
    pub struct Moving {
        /// Counter of these entries. It counts on if there is no room for more.
        pub count: u64 as "u32*",
        pub keys: u64 as "u64*",
        pub records: u64 as "u32*",
        /// Number of entries for which `keys` and `records` have room.
        pub room: u32,
        pub pad: u32,
    }
}
