//! The contract of a table, in words: what the host table does today and a GPU table does tomorrow.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::initializer::Initializer;
use crate::key::Key;
use crate::optimizer::{StateSpec, Update, UpdateScalars};

/// What a batch does that brings more new keys than a table may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckMode {
    /// The batch changes nothing and fails.
    Raise,
    /// What fits goes in, in order of first occurrence; the rest is refused, counted, and the caller is told to warn.
    Warn,
    /// As `Warn`, in silence.
    Count,
}

/// When a lookup gives rows to keys that have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Insertion {
    /// Never. A gradient for such a key is dropped and counted.
    Never = 0,
    /// When a commit names a push of the lookup. Until then such a key answers as `missing` says.
    AtCommit = 1,
    /// In the lookup itself.
    AtLookup = 2,
}

impl Insertion {
    /// The insertion with this number, as frameworks' graphs keep it.
    ///
    /// # Errors
    /// [`Error::Argument`] for any other number.
    pub fn from_number(number: i64) -> Result<Insertion> {
        match number {
            0 => Ok(Insertion::Never),
            1 => Ok(Insertion::AtCommit),
            2 => Ok(Insertion::AtLookup),
            _ => Err(Error::argument(format!("`insertion` must be 0, 1 or 2. Received: {number}"))),
        }
    }
}

/// What a key without a row answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Missing {
    /// The very row that training would have inserted.
    Initial,
    Zeros,
}

/// What a static table does with an id outside its vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutOfVocabulary {
    Raise,
    Zeros,
}

/// All choices for one table. Valid because [`TableConfig::validate`] passed before a table was made of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableConfig {
    pub name: String,
    /// Floats in a row; 1 to [`TableConfig::MAX_DIM`].
    pub dim: usize,
    /// `Some(n)`: a static table with the ids `0..n`. `None`: a dynamic table, any key.
    pub vocabulary_size: Option<u64>,
    pub initializer: Initializer,
    pub seed: u64,
    pub missing: Missing,
    pub out_of_vocabulary: OutOfVocabulary,
    /// Rows to make room for at once.
    pub initial_capacity: u64,
    /// Rows at most; `None`: as many as memory holds.
    pub max_capacity: Option<u64>,
    pub check_mode: CheckMode,
}

impl TableConfig {
    /// Record numbers are 32 bits and number 0 is "no record".
    pub const MAX_ROWS: u64 = u32::MAX as u64 - 1;
    /// A row of 4 MiB; rows and their states then fit 64 bits however many there are.
    pub const MAX_DIM: usize = 1 << 20;

    /// # Errors
    /// [`Error::Argument`] that names the field, the rule and the value.
    pub fn validate(&self) -> Result<()> {
        let fail = |what: String| Err(Error::argument(format!("table `{}`: {what}", self.name)));
        if !(1..=Self::MAX_DIM).contains(&self.dim) {
            let (most, dim) = (Self::MAX_DIM, self.dim);
            return fail(format!("`embedding_dim` must be between 1 and {most}. Received: {dim}"));
        }
        if self.vocabulary_size.is_some_and(|v| v == 0 || v > Self::MAX_ROWS) {
            return fail(format!(
                "`vocabulary_size` must be between 1 and {}. Received: {}",
                Self::MAX_ROWS,
                self.vocabulary_size.unwrap_or_default()
            ));
        }
        if self.max_capacity.is_some_and(|c| c == 0 || c > Self::MAX_ROWS) {
            return fail(format!(
                "`max_capacity` must be between 1 and {}. Received: {}",
                Self::MAX_ROWS,
                self.max_capacity.unwrap_or_default()
            ));
        }
        if self.initial_capacity > self.max_capacity.unwrap_or(Self::MAX_ROWS) {
            return fail(format!(
                "`initial_capacity` must not be above `max_capacity`. Received: initial_capacity={}, max_capacity={:?}",
                self.initial_capacity, self.max_capacity
            ));
        }
        self.initializer.validate()
    }

    /// Whether `key` may have a row: any key of a dynamic table, `0..vocabulary_size` of a static one.
    #[inline(always)]
    pub fn is_in_vocabulary(&self, key: Key) -> bool {
        self.vocabulary_size.is_none_or(|size| key < size)
    }

    pub fn capacity(&self) -> u64 {
        self.max_capacity.unwrap_or(Self::MAX_ROWS)
    }
}

/// How the distinct keys of a call ended; they add up to the distinct keys of the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Outcomes {
    pub hit: u64,
    pub inserted: u64,
    /// Not admitted by a policy.
    pub filtered: u64,
    /// Rows that went to make room.
    pub evicted: u64,
    /// No room: the table holds `max_capacity` rows; or a key that was not there where none may be inserted.
    pub refused: u64,
}

impl std::ops::AddAssign for Outcomes {
    fn add_assign(&mut self, other: Outcomes) {
        self.hit += other.hit;
        self.inserted += other.inserted;
        self.filtered += other.filtered;
        self.evicted += other.evicted;
        self.refused += other.refused;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Rows now.
    pub size: u64,
    /// Rows that fit before the index grows.
    pub capacity: u64,
    /// Sums over all training batches since the table was made.
    pub outcomes: Outcomes,
    /// Gradients dropped because their key has no row.
    pub dropped_gradients: u64,
    pub pending_pushes: u64,
    /// Calls of lookup, push, commit and apply that touched the table.
    pub native_calls: u64,
    /// Memory of index, records and what steps keep.
    pub bytes: u64,
}

/// Whole records, side by side: `values` holds for each key its row and then its states, in the order of
/// [`Table::state_specs`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Records {
    pub keys: Vec<Key>,
    /// `(keys.len(), record_width)`, row-major.
    pub values: Vec<f32>,
}

/// Where a scan goes on; `Cursor::default()` starts one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor(pub u64);

/// Embedding rows and their optimizer states, found by key.
///
/// A *record* is a row with its states, found once, saved together. Keys are any 64-bit pattern. Rows are float32 and
/// `dim` long; arrays of rows are row-major, `(keys.len(), dim)`. A method that fails has changed nothing. Every method
/// sees all that calls before it did (on a device: it waits for them) and raises what those left behind.
pub trait Table: Send {
    fn config(&self) -> &TableConfig;

    /// Rows now.
    fn len(&self) -> Result<usize>;

    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// The update whose states the records carry; `None` while no optimizer and no load brought one.
    fn update_rule(&self) -> Option<&Update>;

    /// The states in a record after its row, in order; empty without an update rule.
    fn state_specs(&self) -> Vec<StateSpec> {
        self.update_rule().map(|u| u.rule.states(self.config().dim)).unwrap_or_default()
    }

    /// Floats in a record: row and states.
    fn record_width(&self) -> usize {
        self.config().dim + self.state_specs().iter().map(|s| s.width).sum::<usize>()
    }

    /// Copies the rows of `keys`; never inserts. A key without a row answers as `missing` says and `found` is false.
    fn find(&self, keys: &[Key], rows: &mut [f32], found: &mut [bool]) -> Result<()>;

    /// As `find`, but keys without a row get one, with its first value, as far as `max_capacity` and the vocabulary allow.
    fn find_or_insert(&mut self, keys: &[Key], rows: &mut [f32]) -> Result<Outcomes>;

    /// Overwrites rows; states stay as they are, and are at their first value in new records. With `insert`, keys without
    /// a row get one; without, they are counted as refused. Of duplicates the last wins.
    fn assign(&mut self, keys: &[Key], rows: &[f32], insert: bool) -> Result<Outcomes>;

    /// One optimizer step: gradients `(keys.len(), dim)` of equal keys are merged in the order of `merge.rs`, then each
    /// record is updated once. Keys without a row are counted as refused, their gradient is dropped.
    fn update(&mut self, keys: &[Key], gradients: &[f32], scalars: &UpdateScalars) -> Result<Outcomes>;

    /// Removes rows; returns how many were there. A gradient that is still on its way to them is dropped. A device that fails in
    /// the middle may have removed some.
    fn erase(&mut self, keys: &[Key]) -> Result<usize>;

    /// Removes all rows and gives their memory back. Gradients on their way are dropped.
    fn clear(&mut self) -> Result<()>;

    fn stats(&self) -> Result<TableStats>;

    /// As `stats`, but nothing is waited for: on a device, as of the last step that it has told of.
    fn recent_stats(&self) -> TableStats;

    /// From now on keys without a row answer, and new rows start, as of this seed: that of the rows that came.
    fn set_seed(&mut self, seed: u64);

    /// Gives the records the states of `update`, at their first values. States that are there and belong to the same rule
    /// stay if `keep_states`, else they start anew.
    fn set_update_rule(&mut self, update: Option<Update>, keep_states: bool) -> Result<()>;

    /// Appends up to `max` records to `out`, in the table's own order, each record once in a scan as long as nothing
    /// changes the table; `None` at the end.
    fn scan(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>>;

    /// Puts whole records in, overwriting those that are there. Their width is `record_width()`.
    fn restore(&mut self, records: &Records) -> Result<()>;

    /// An empty table of the same configuration with the states of `update`; `replace_with` takes its records over.
    fn fresh(&self, update: Option<Update>) -> Result<Box<dyn Table>>;

    /// Swaps all records, the seed and the update rule for those of `other`, which `fresh` made. Gradients on their way are dropped.
    fn replace_with(&mut self, other: Box<dyn Table>) -> Result<()>;

    /// For `replace_with`: the concrete table behind `fresh`.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}
