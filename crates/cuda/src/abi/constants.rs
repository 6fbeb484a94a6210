//! The constants and enums that host and kernels share.

use std::fmt::Write;

use sok_core::formula::MAX_SCALARS;

use super::macros::enum_text;

constants! {
    /// Slots of a bucket.
    pub const SLOTS: usize = 5;
    /// Slots of the stash.
    pub const STASH: usize = 1024;
    /// Value of [`Renumbering::firsts`] for a table that has lost its records.
    pub const GONE: u32 = u32::MAX;
    /// Value of [`Section::table`] if the distinct keys of the section are not counted.
    pub const NO_TABLE: u32 = u32::MAX;
    /// Bit of a returned record number: the record is new.
    pub const NEW: u32 = 1 << 31;
    /// Value of [`Table::row_type`] of candidates, beside the row types.
    pub const CANDIDATE: u32 = 3;
    /// Bit of [`Feature::absent`]: keys without a record become candidates, which a commit may insert.
    pub const ABSENT_LATER: u32 = 1;
    /// Bit of [`Feature::absent`]: absent ids are counted as unknown, because the lookup is not one of training.
    pub const ABSENT_UNKNOWN: u32 = 2;
    /// Threads of a block of the sort.
    pub const SORT_THREADS: usize = 512;
    /// Tiles of a group, which publishes a common aggregate and inclusive prefix.
    pub const SORT_GROUP: usize = 16;
    /// Maximum number of ids of a run. One group of lanes sums a run.
    pub const RUN: usize = 64;
    /// Maximum number of ids of a key that is not hot. Each run of a hot key is summed by a group of lanes of its own.
    pub const HOT: usize = 16;
    /// Threads of a block of `list_keys`.
    pub const LIST_THREADS: usize = 256;
    /// Number of sorted ids that a block of `list_keys` processes.
    pub const LIST_BLOCK: usize = 2048;
    /// Threads of a block that finds records.
    pub const FIND_THREADS: usize = 64;
    /// Threads of a block of `make_rows`, and of `weight_gradients`, which has the same grid.
    pub const ROWS_THREADS: usize = 256;
    /// Threads of a block that merges gradients or updates records.
    pub const UPDATE_THREADS: usize = 128;
    /// Number of keys of one id that a group of lanes processes.
    pub const PER_SINGLE: usize = 8;
    /// Number of merged gradients that a group of lanes processes in `update_sums`.
    pub const PER_SUM: usize = 4;
    /// Maximum number of arrays of a piece: gradients, rows, and as many states as a record has room for.
    pub const PIECE_ARRAYS: usize = 5;
    /// Threads of a block of the other operations on a table.
    pub const TABLE_THREADS: usize = 256;
    /// Number of exponents of a float32. An exact sum has a total for each.
    pub const EXPONENTS: usize = 256;
    /// Rows of a ticket.
    pub const RING: usize = sok_core::contract::ticket::RING as usize;
    /// Maximum number of ranks that reach each other's memory: the GPUs of one host.
    pub const MAX_RANKS: usize = 16;
    /// Threads of a block that numbers the distinct keys of a call.
    pub const REQUEST_THREADS: usize = 256;
    /// Number of ids that such a block processes.
    pub const REQUEST_BLOCK: usize = 1024;
    /// Maximum number of classes of distinct keys: by owner and merge block.
    pub const MAX_CLASSES: usize = 256;
    /// Number of optimizer steps that are kept. When there are so many, all rows catch up.
    pub const MISSED_STEPS: usize = 1024;
    /// Threads of a block of `choose_rows`.
    pub const SWEEP_THREADS: usize = 512;
    /// Maximum number of tables of a launch of `choose_rows`. It reads as many lists of used records at a time.
    pub const MAX_SWEEPS: usize = 512;
    /// Number of consecutive records that share a floor, a lower bound of their ranks. [`Table::vacant`](super::structs::Table::vacant) has a byte for them.
    pub const FLOOR_RECORDS: usize = 8;
    /// Number of the last sweeps of a table of which the device has notes.
    pub const SWEEP_NOTES: usize = 1024;
    /// Value of [`Sweep::usable`] if no numbers of removed rows may be given out.
    pub const NO_SWEEP: u64 = u64::MAX;
    /// Rows of which a sweep of a large table examines the ranks first.
    pub const SAMPLES: usize = 8192;
    /// Bins in which a sweep counts rows by score and key.
    pub const RANK_BINS: usize = 1 << RANK_BITS;
    /// Bits of the number of a bin.
    pub const RANK_BITS: usize = 12;
    /// Number of values that counts of sights have where the lowest are forgotten.
    pub const NUM_COUNTS: usize = sok_core::policy::admission::MAX_LIMITED_THRESHOLD as usize + 1;
    /// Bits of the dim in the code of a row. The type of its numbers follows.
    pub const ROW_DIM_BITS: usize = 24;
    /// In the code of a row, after the dim: updates round by chance.
    pub const ROW_BY_CHANCE: usize = 4;
    /// Bits of the type of a row and of how updates round. The type of a framework's arrays follows.
    pub const ROW_ARRAY_BITS: usize = 3;
    /// Different values of the initializer `DEBUG`.
    pub const DEBUG_KEYS: u64 = sok_core::initializer::DEBUG_KEYS;
    /// Maximum number of scalars of a formula's step.
    pub const NUM_SCALARS: usize = MAX_SCALARS;
}

/// Words of [`Sort::next`]: a counter for each pass, and unused ones.
pub const SORT_STATE: usize = 32;
/// Minimum number of bits of a digit of the sort.
pub const MIN_BITS: u32 = 9;
/// Maximum number of bits of a digit of the sort.
pub const MAX_BITS: u32 = 11;
/// Possible numbers of ids per thread of a tile.
pub const SORT_ITEMS: [usize; 4] = [4, 8, 10, 13];
/// Number of blocks of the sort for which a multiprocessor has registers.
pub const SORT_BLOCKS: usize = 2;

enums! {
    /// Integer types of ids.
    pub enum KeyType {
        /// int64 or uint64.
        Wide = 0 as WIDE,
        /// int32, which is sign-extended.
        Signed = 1 as SIGNED,
        /// uint32.
        Unsigned = 2 as UNSIGNED,
        /// 64-bit ids as two arrays of 32-bit words, the low and the high ones.
        Words = 3 as WORDS,
    }

    /// What scores of rows are.
    pub enum Scoring {
        /// Numbers of ids.
        Ids = 0 as COUNTED_IDS,
        /// Numbers of steps.
        Steps = 1 as STEPS,
        /// What came with the ids.
        Given = 2 as GIVEN,
    }

    /// Types of the scores that come with ids.
    pub enum ScoreType {
        /// int64, of which negative numbers count as 0.
        Wide = 0 as WIDE_SCORES,
        /// int32, likewise.
        Narrow = 1 as NARROW_SCORES,
        /// uint64, as ranks send them: each plus 1; 0 for an id without a score.
        Sent = 2 as SENT_SCORES,
    }

    /// Distributions of initial values.
    pub enum InitializerKind {
        Constant = 0 as CONSTANT,
        Uniform = 1 as UNIFORM,
        /// Cut at two bounds, or not.
        Normal = 2 as NORMAL,
        /// The key modulo `DEBUG_KEYS`.
        Debug = 3 as DEBUG,
    }

    /// Errors that kernels report.
    pub enum FaultKind {
        None = 0 as NO_FAULT,
        /// An id is outside the vocabulary of a table that refuses such ids.
        OutsideVocabulary = 1 as OUTSIDE_VOCABULARY,
        /// Row splits do not begin at 0, fall, or do not end at the number of ids.
        BadSplits = 2 as BAD_SPLITS,
        /// The index has no slot for a key.
        NoPlace = 3 as NO_PLACE,
        /// A gradient came with the number of another lookup than the host expects.
        WrongLookup = 4 as WRONG_LOOKUP,
    }

    /// What a flag of a rank says. Its value is the number of the last call of which that is true.
    pub enum Flag {
        /// The keys of a lookup can be read.
        Keys = 0 as KEYS_READY,
        /// The rows of a lookup are written.
        Rows = 1 as ROWS_READY,
        /// The gradients and verdicts of a commit can be read.
        Gradients = 2 as GRADIENTS_READY,
        /// All verdicts of a commit have been read.
        Agreed = 3 as AGREED,
        /// The squared norms of a commit can be read.
        Norms = 4 as NORMS_READY,
        /// The parts of a sum can be read.
        Parts = 5 as PARTS_READY,
        /// The sums can be read.
        Sums = 6 as SUMS_READY,
    }

    /// Which rank owns a key.
    pub enum OwnerKind {
        /// By a hash of the key.
        Hashed = 0 as HASHED,
        /// The key modulo the number of ranks.
        Remainder = 1 as REMAINDER,
        /// One rank owns all keys.
        One = 2 as ONE_RANK,
        /// Each rank has all keys.
        Every = 3 as EVERY_RANK,
    }

    /// Kinds of bags. The instantiation of `make_rows` for a call is that of its highest kind.
    pub enum BagKind {
        /// Bags of one id each, without weights.
        Each = 0 as EACH,
        /// Bags without weights or padding, whose ids all have rows.
        Summed = 1 as SUMMED,
        /// Bags of any other form.
        Any = 2 as ANY,
    }

    /// Where a merge or an update finds the gradients of keys.
    pub enum Source {
        /// Gradient rows of the framework. All ids of a feature have the same factor.
        Rows = 0 as ROWS,
        /// Gradient rows of the framework. Each id has a coefficient of its own.
        WeightedRows = 1 as WEIGHTED_ROWS,
        /// Sums of earlier merges.
        Sums = 2 as SUMS,
    }
}
