//! The contract of a table, which the tables of the host and of a GPU implement.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::contract::record::RecordLayout;
use crate::contract::records::{Column, Records};
use crate::error::{Error, Result};
use crate::formula::update::{Update, UpdateScalars};
use crate::initializer::Initializer;
use crate::key::Key;
use crate::policy::admission::Admission;
use crate::policy::eviction::{Eviction, Score};
use crate::policy::time_to_live::TimeToLive;
use crate::row_type::RowType;

/// What happens to a batch with more new keys than a table may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckMode {
    /// The call fails and changes nothing.
    Raise,
    /// Keys that fit are inserted, in order of first occurrence. The others are refused and counted, and the caller is to warn.
    Warn,
    /// As `Warn`, but without a warning.
    Count,
}

/// When keys without a row get one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Insertion {
    /// Never. The gradient of such a key is dropped and counted.
    Never = 0,
    /// When a commit names a push of the lookup. The lookup itself returns what `missing` says.
    AtCommit = 1,
    /// In the lookup itself.
    AtLookup = 2,
}

impl Insertion {
    /// Returns the insertion with this number. The graphs of frameworks hold the number.
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

/// What a lookup returns for a key without a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u32)]
pub enum Missing {
    /// The first values of its row, which training would insert.
    Initial = 0,
    /// A row of zeros.
    Zeros = 1,
}

/// What a static table does with an id outside of its vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutOfVocabulary {
    /// The call fails with [`Error::OutOfVocabulary`].
    Raise,
    /// Its row is zeros, and its gradient is dropped.
    Zeros,
}

/// Configuration of a table. A table is made only if [`TableConfig::validate`] passes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableConfig {
    /// Name of the table, for messages and dumps.
    pub name: String,
    /// Number of floats in a row, 1 to [`TableConfig::MAX_DIM`].
    pub dim: usize,
    /// `Some(n)`: a static table with the keys `0..n`. `None`: a dynamic table of any keys.
    pub vocabulary_size: Option<u64>,
    /// Initializer of first values.
    pub initializer: Initializer,
    /// Seed of first values.
    pub seed: u64,
    /// What a lookup returns for a key without a row.
    pub missing: Missing,
    /// What happens to an id outside of a static vocabulary.
    pub out_of_vocabulary: OutOfVocabulary,
    /// The key whose row a lookup returns for a key without a row, instead of what `missing` says: its row, or the first values of
    /// that row if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_vocabulary_key: Option<Key>,
    /// Number of rows to allocate at once.
    pub initial_capacity: u64,
    /// Maximal number of rows. `None`: as many as fit into memory.
    pub max_capacity: Option<u64>,
    /// What happens to a batch with more new keys than fit.
    pub check_mode: CheckMode,
    /// How a table at `max_capacity` makes room. `None`: it removes no rows by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<Eviction>,
    /// Which new keys of training get a row. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admission: Option<Admission>,
    /// After which time without training a row goes. `None`: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_to_live: Option<TimeToLive>,
    /// Type of the numbers of rows. States are float32.
    #[serde(default)]
    pub row_type: RowType,
    /// Whether updates round rows of 16 bits by chance instead of to the nearest. The chance is a function of seed, step, key and column.
    #[serde(default)]
    pub stochastic_rounding: bool,
    /// Whether steps age the table. If not, no row goes because its time is over, and no score or count is halved or forgotten.
    pub trainable: bool,
    /// Number of the optimizer that updates the table. 0 is the model's optimizer; table optimizers of the group count from 1.
    #[serde(default)]
    pub optimizer: usize,
}

impl TableConfig {
    /// Maximal number of rows. Record numbers have 32 bits, and number 0 means "no record".
    pub const MAX_ROWS: u64 = u32::MAX as u64 - 1;
    /// Maximal number of floats in a row, which has 4 MiB then. The size of any number of records fits into 64 bits.
    pub const MAX_DIM: usize = 1 << 20;

    /// Checks all fields.
    ///
    /// # Errors
    /// [`Error::Argument`] with the field, the rule and the value.
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
        match self.max_capacity {
            Some(max) if self.initial_capacity > max => fail(format!(
                "`initial_capacity` must not be above `max_capacity`. Received: initial_capacity={}, max_capacity={max}",
                self.initial_capacity
            )),
            None if self.initial_capacity > Self::MAX_ROWS => fail(format!(
                "`initial_capacity` must be at most {}. Received: {}",
                Self::MAX_ROWS,
                self.initial_capacity
            )),
            _ if self.out_of_vocabulary_key.is_some_and(|key| !self.is_in_vocabulary(key)) => fail(format!(
                "`out_of_vocabulary_key` must be in the vocabulary. Received: {}",
                self.out_of_vocabulary_key.unwrap_or_default() as i64
            )),
            _ if self.eviction.is_some() && self.vocabulary_size.is_some() => {
                fail("`eviction` is for dynamic tables, without a `vocabulary_size`".into())
            }
            None if self.eviction.is_some() => fail("`eviction` needs `max_capacity`".into()),
            _ if self.admission.is_some() && self.vocabulary_size.is_some() => {
                fail("`admission` is for dynamic tables, without a `vocabulary_size`".into())
            }
            _ if self.time_to_live.is_some() && self.vocabulary_size.is_some() => {
                fail("`time_to_live` is for dynamic tables, without a `vocabulary_size`".into())
            }
            _ if self.stochastic_rounding && self.row_type == RowType::Float32 => {
                fail("`stochastic_rounding` needs rows of float16 or bfloat16".into())
            }
            _ => {
                self.time_to_live.map_or(Ok(()), |time_to_live| time_to_live.lifetime.validate())?;
                self.admission.map_or(Ok(()), |admission| admission.validate())?;
                self.eviction.map_or(Ok(()), |eviction| eviction.validate())?;
                self.initializer.validate()
            }
        }
    }

    /// Whether `key` may have a row: any key of a dynamic table, `0..vocabulary_size` of a static one.
    #[inline(always)]
    pub fn is_in_vocabulary(&self, key: Key) -> bool {
        self.vocabulary_size.is_none_or(|size| key < size)
    }

    /// Number of rows that the table may hold.
    pub fn capacity(&self) -> u64 {
        self.max_capacity.unwrap_or(Self::MAX_ROWS)
    }

    /// Returns the columns of its records.
    pub fn columns(&self) -> &'static [Column] {
        match (self.eviction.is_some(), self.time_to_live.is_some()) {
            (true, true) => &Column::ALL,
            (true, false) => &[Column::Scores],
            (false, true) => &[Column::Ages],
            (false, false) => &[],
        }
    }

    /// Whether rows whose time to live is over are kept until they are taken.
    pub fn keeps_expired(&self) -> bool {
        self.time_to_live.is_some_and(|time_to_live| time_to_live.keeps_expired)
    }

    /// Whether any rows that the table removes by itself are kept until they are taken.
    pub fn keeps_removed(&self) -> bool {
        self.eviction.is_some_and(|eviction| eviction.keeps_evicted) || self.keeps_expired()
    }

    /// Whether lookups may bring scores of ids.
    pub fn takes_scores(&self) -> bool {
        self.eviction.is_some_and(|policy| policy.score == Score::Custom)
    }

    /// Checks that scores of a feature's ids can be taken. `feature`: its name.
    ///
    /// # Errors
    /// [`Error::Argument`] if the eviction policy is not `Custom`.
    pub fn check_takes_scores(&self, feature: &str) -> Result<()> {
        if self.takes_scores() {
            return Ok(());
        }
        Err(Error::argument(format!(
            "feature `{feature}`: `scores` are for tables with the eviction policy `Custom`. Received: scores for table `{}`",
            self.name
        )))
    }

    /// Returns how uses of rows are counted, if the table has an eviction policy or a time to live. A time to live alone counts as LRU.
    pub fn counting(&self) -> Option<Eviction> {
        let lru = Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: false };
        self.eviction.or(self.time_to_live.map(|_| lru))
    }
}

/// What happened to the distinct keys of a call: hit, inserted, filtered and refused add up to their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Outcomes {
    /// Keys that had a row.
    pub hit: u64,
    /// Keys that got a row.
    pub inserted: u64,
    /// Keys that the admission policy kept out.
    pub filtered: u64,
    /// Rows that were removed to make room.
    pub evicted: u64,
    /// Rows that were removed because training had not used them for long.
    pub expired: u64,
    /// Keys without room, because the table has `max_capacity` rows; and keys without a row in a call that does not insert.
    pub refused: u64,
}

impl std::ops::AddAssign for Outcomes {
    fn add_assign(&mut self, other: Outcomes) {
        self.hit += other.hit;
        self.inserted += other.inserted;
        self.filtered += other.filtered;
        self.evicted += other.evicted;
        self.expired += other.expired;
        self.refused += other.refused;
    }
}

/// Counts of a table since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Number of rows now.
    pub size: u64,
    /// Number of rows at which the index grows.
    pub capacity: u64,
    /// Sums over all training calls since the table was made.
    pub outcomes: Outcomes,
    /// Number of gradients that were dropped because their key has no row.
    pub dropped_gradients: u64,
    /// Number of ids without a row in lookups outside of training. These are lookups that insert nothing, and lookups that leave insertion
    /// to a commit but save nothing for it. Padding, ids outside the vocabulary and ids of weight 0 are not counted.
    pub unknown_ids: u64,
    /// Number of pushes that no ticket has named yet.
    pub pending_pushes: u64,
    /// Number of calls of lookup, push, commit and apply on the table.
    pub native_calls: u64,
    /// Number of bytes of index, records, and memory that steps keep.
    pub bytes: u64,
}

/// What a table knows about a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Explanation {
    /// It has a row.
    Present {
        /// Its score, if the table has scores.
        score: Option<u64>,
    },
    /// Its row was removed to make room, in this step, and it has not come again.
    Evicted {
        /// The step.
        step: u64,
    },
    /// Its row was removed in this step because training had not used it for long, and it has not come again.
    Expired {
        /// The step.
        step: u64,
    },
    /// It has come in training and got no row: it has not come often enough, or the table was full.
    Filtered {
        /// How often it has come.
        sights: u32,
    },
    /// It has never had a row, or was erased, or went longer ago than the table remembers.
    Absent,
}

/// Position of a scan. `Cursor::default()` is its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor(pub u64);

/// Number of an epoch: a table records its changes from one dump to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(pub u32);

/// What a dump reads: of a table, or of a copy that does not change ([`Table::freeze`]).
///
/// A *record* is a row and its states. On a device, every method waits for the calls before it and returns their errors.
pub trait Contents: Send {
    /// Returns the configuration.
    fn config(&self) -> &TableConfig;

    /// Returns the number of rows.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn len(&self) -> Result<usize>;

    /// Whether there are no rows.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Returns the update whose states the records have. `None` before an optimizer is bound or states are loaded.
    fn update_rule(&self) -> Option<&Update>;

    /// Returns the layout of the records.
    fn layout(&self) -> RecordLayout {
        RecordLayout::new(self.config().dim, self.update_rule())
    }

    /// Returns the number of the step in progress, from 1, which scores count. A table without a policy does not count steps.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails.
    fn step(&self) -> Result<u64> {
        Ok(1)
    }

    /// Returns when commits were made, if rows have a time to live in milliseconds. Each entry is a time in milliseconds since 1970, and the
    /// number of commits that were made after it. Times ascend.
    fn commit_times(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }

    /// Appends up to `max` records from `cursor` on to `out`, in the order of the table. Returns where the scan goes on, or `None`
    /// at the end. A scan returns each record once if the table does not change meanwhile.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn scan(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>>;

    /// Returns the newest epoch that began with a snapshot. `None` if the table has no record of its changes since.
    fn epoch_of(&self, _snapshot: u64) -> Option<Epoch> {
        None
    }

    /// Returns the number of rows that were made or changed since the start of an epoch.
    ///
    /// # Errors
    /// [`Error::UnknownChanges`] without a record of changes, [`Error::Device`] if a device fails.
    fn num_changed(&self, _since: Epoch) -> Result<usize> {
        Err(Error::UnknownChanges { table: self.config().name.clone() })
    }

    /// As `scan`, of the rows that were made or changed since the start of an epoch. If `max` is below the size of a bucket, a device may
    /// append a whole bucket.
    ///
    /// # Errors
    /// As `num_changed`, and [`Error::Memory`].
    fn scan_changed(
        &self,
        _since: Epoch,
        _cursor: Cursor,
        _max: usize,
        _out: &mut Records,
    ) -> Result<Option<Cursor>> {
        Err(Error::UnknownChanges { table: self.config().name.clone() })
    }

    /// Returns the same contents in a form that a scan reads faster. `None` if there is none, or not enough memory for it. `since`: as for
    /// [`Table::freeze`].
    ///
    /// # Errors
    /// As `num_changed`.
    fn for_scan(&self, _since: Option<u64>) -> Result<Option<Box<dyn Contents + '_>>> {
        Ok(None)
    }

    /// Returns the keys that had a row at the start of an epoch and have none now, ascending. There may be others that had none then.
    ///
    /// # Errors
    /// As `num_changed`, and [`Error::Memory`].
    fn removed_since(&self, _since: Epoch) -> Result<Vec<Key>> {
        Err(Error::UnknownChanges { table: self.config().name.clone() })
    }

    /// Returns the keys without a row that an admission policy counts, and as scores how often they have come.
    ///
    /// # Errors
    /// [`Error::Memory`].
    fn sights(&self) -> Result<Cow<'_, Records>> {
        Ok(Cow::default())
    }

    /// Frees the memory of a copy whose records were read. A table keeps its own.
    fn free_copy(&self) {}
}

/// A copy of a table's contents, which a device may still be making.
pub trait Freezing {
    /// Waits for the copy. `table`: the table that is copied, which must not have changed.
    ///
    /// # Errors
    /// As [`Table::freeze`].
    fn finish(self: Box<Self>, table: &dyn Contents) -> Result<Box<dyn Contents>>;
}

/// A map from keys to embedding rows and their optimizer states.
///
/// Keys are any 64-bit pattern. Rows are `dim` values, stored in the row type of the table; arrays of rows are float32, row-major,
/// `(keys.len(), dim)`, and are rounded to the nearest where they are stored. A method that fails has changed nothing, unless it says otherwise. On a device, every method waits for the
/// calls before it and returns their errors.
pub trait Table: Contents {
    /// Copies the rows of `keys`. Never inserts: a key without a row gets what `missing` says, and `found` is false.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths or values that are wrong, [`Error::Memory`], [`Error::Device`].
    fn find(&self, keys: &[Key], rows: &mut [f32], found: &mut [bool]) -> Result<()>;

    /// Copies the rows of `keys`. Inserts keys without a row with their first values, as far as `max_capacity` allows.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, [`Error::OutOfVocabulary`], [`Error::TableFull`], [`Error::Memory`],
    /// [`Error::Device`]. Nothing has changed then.
    fn find_or_insert(&mut self, keys: &[Key], rows: &mut [f32]) -> Result<Outcomes>;

    /// Overwrites rows. Optimizer states do not change, and new records start with their first values. With `insert`, keys without
    /// a row get one; without `insert`, they count as refused. Of duplicates the last one counts.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, [`Error::OutOfVocabulary`], [`Error::TableFull`], [`Error::Memory`],
    /// [`Error::Device`]. Nothing has changed then.
    fn assign(&mut self, keys: &[Key], rows: &[f32], insert: bool) -> Result<Outcomes>;

    /// Makes one optimizer step. Gradients `(keys.len(), dim)` of equal keys are merged in the order of `merge.rs`, and each
    /// record is updated once. Keys without a row count as refused, and their gradients are dropped.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, [`Error::State`] without an optimizer or its formula, [`Error::Memory`], [`Error::Device`].
    fn update(&mut self, keys: &[Key], gradients: &[f32], scalars: &UpdateScalars) -> Result<Outcomes>;

    /// Removes rows and returns their number. Gradients that were not applied yet are dropped. If a device fails, some rows may have
    /// been removed.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn erase(&mut self, keys: &[Key]) -> Result<usize>;

    /// Removes all rows and frees their memory. Gradients that were not applied yet are dropped.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn clear(&mut self) -> Result<()>;

    /// Says whether a key has a row and, if not, why. The last 2^20 keys that the table has removed by itself are remembered.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn explain(&self, key: Key) -> Result<Explanation> {
        let (mut row, mut found) = (vec![0.0; self.config().dim], [false]);
        self.find(&[key], &mut row, &mut found)?;
        Ok(if found[0] { Explanation::Present { score: None } } else { Explanation::Absent })
    }

    /// Returns the rows that the table has removed since the last call, in the order in which they went, with the scores that they had.
    /// `values` holds rows without states.
    ///
    /// # Errors
    /// [`Error::State`] if the table does not keep such rows ([`Eviction::keeps_evicted`], [`TimeToLive::keeps_expired`]).
    fn take_evicted(&mut self) -> Result<Records> {
        Err(not_kept(&self.config().name))
    }

    /// Goes on counting steps from a number. A load sets it to the step of the dump.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails.
    fn set_step(&mut self, _step: u64) -> Result<()> {
        Ok(())
    }

    /// Replaces the times of commits by those of a dump. `times`: as `commit_times` returns them.
    fn set_commit_times(&mut self, _times: &[(u64, u64)]) {}

    /// Returns the counts since the table was made. A device completes its steps first.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn stats(&self) -> Result<TableStats>;

    /// Returns the statistics without waiting. On a device, the last steps may not be counted yet.
    fn recent_stats(&self) -> TableStats;

    /// Sets the seed of first values. A load sets it to the seed of the rows that it loads.
    fn set_seed(&mut self, seed: u64);

    /// Whether the states came by `replace_with`, and no optimizer was bound or has updated the table since.
    fn has_loaded_states(&self) -> bool;

    /// Gives the records the states of `update`, at their first values. With `keep_states`, states of the same rule stay as they
    /// are.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid update, [`Error::Memory`], [`Error::Device`].
    fn set_update_rule(&mut self, update: Option<Update>, keep_states: bool) -> Result<()>;

    /// Starts an epoch: from now on the table records which rows change and which keys are removed. `snapshot`: identifies its present
    /// state, which a dump has. The default does nothing.
    ///
    /// # Errors
    /// [`Error::Memory`]. The table records what it did before, then.
    fn track(&mut self, _snapshot: u64) -> Result<()> {
        Ok(())
    }

    /// Gives the epochs that began with a snapshot another one. A dump of frozen contents has its own only when it is complete.
    fn rename_snapshot(&mut self, _from: u64, _to: u64) {}

    /// Waits until all earlier steps are complete and counted.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Begins a copy of what a dump reads, which later calls do not change. The caller must call `settle` just before, and
    /// [`Freezing::finish`] before the table changes. A device copies several tables faster if all copies begin before the first is finished.
    /// `since`: a snapshot; only what has changed since is copied, and the copy knows no other epoch.
    ///
    /// # Errors
    /// [`Error::UnknownChanges`] without a record of changes since the snapshot; [`Error::Memory`], or [`Error::Device`] without enough
    /// memory for the copy.
    fn freeze(&mut self, since: Option<u64>) -> Result<Box<dyn Freezing>>;

    /// Returns all keys, in the order of the table.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn keys(&self) -> Result<Vec<Key>>;

    /// Inserts complete records, also beyond the capacity. A record with the same key is overwritten. If there are no scores, each
    /// new record gets the score of a new row.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, [`Error::OutOfVocabulary`], [`Error::Memory`], [`Error::Device`]. Nothing
    /// has changed then.
    fn restore(&mut self, records: &Records) -> Result<()>;

    /// Counts keys without a row as often as these [`Contents::sights`] say, if an admission policy counts keys. None of them has a row, and
    /// none is counted yet.
    ///
    /// # Errors
    /// [`Error::Memory`].
    fn restore_sights(&mut self, _sights: &Records) -> Result<()> {
        Ok(())
    }

    /// Makes an empty table of the same configuration, with the states of `update` and room for `num_rows` rows, for `replace_with`.
    ///
    /// # Errors
    /// [`Error::Device`] if a device fails, [`Error::Memory`].
    fn fresh(&self, update: Option<Update>, num_rows: usize) -> Result<Box<dyn Table>>;

    /// Takes over all records, the seed and the update rule of `other`, which `fresh` made. Gradients that were not applied yet are
    /// dropped.
    ///
    /// # Errors
    /// [`Error::State`] for a table of another kind.
    fn replace_with(&mut self, other: Box<dyn Table>) -> Result<()>;

    /// Returns the concrete table, for `replace_with`.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// The error for a table that does not keep the rows that it removes.
pub fn not_kept(table: &str) -> Error {
    Error::State(format!(
        "table `{table}` does not keep the rows that it removes. Set `keep_evicted=True` in its eviction policy, or `keep_expired=True` in its `TimeToLive`"
    ))
}
