//! What a dump says of itself: `manifest.json`, and the safetensors headers that follow from it to the byte.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::checksum::{BLOCK_BYTES, Blocks, Checksum, DIGITS};
use super::open::open_regular;
use crate::contract::table::{Column, Records, Since, Table};
use crate::error::{Error, Result};
use crate::formula::update::Update;
use crate::initializer::Initializer;
use crate::policy::eviction::Score;

/// The file that makes a directory a dump.
pub const MANIFEST: &str = "manifest.json";
/// The newest version that this code reads and writes. A dump has the oldest version that holds all of it.
pub const VERSION: u32 = 4;
const FORMAT: &str = "sok_keras dump";

/// What the stock reader of safetensors takes at most.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// 16 bytes a MiB of data, so enough for 60 TiB: a larger manifest is not one.
const MAX_MANIFEST_BYTES: u64 = 1 << 30;

// The body stands between these, to the byte and in all versions; what is not so is corrupt.
const BEFORE_BODY: &str = "{\"body\": ";
const BEFORE_CHECKSUM: &str = ", \"xxh3\": \"";
const AFTER_CHECKSUM: &str = "\"}\n";
const NO_MANIFEST: &str = "a manifest must be a body and its checksum, and nothing else: it is damaged";

/// All that a dump holds, and its checksums.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Name of the format.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// Optimizer steps taken when it was written.
    pub step: u64,
    /// When it was written: UTC, `2026-01-31T23:59:59Z`.
    pub created: String,
    /// The tables.
    pub tables: Vec<TableEntry>,
    /// Dense weights and optimizer variables of a model, if there were any.
    pub arrays: Option<DataFile>,
    /// Of the compacted parts of a dump, from version 4 on: the snapshot that they had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Checksum>,
    /// What has changed since, oldest first, from version 4 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub increments: Vec<Increment>,
}

/// What has changed in all tables since an earlier part of a dump: its base, or another increment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Increment {
    /// Checksum of the part before.
    pub parent: Checksum,
    /// Optimizer steps taken when it was written.
    pub step: u64,
    /// When it was written, as in the manifest.
    pub created: String,
    /// The tables of the dump, in its order, with the rows that were made or changed.
    pub tables: Vec<TableEntry>,
    /// Dense weights and optimizer variables of a model, whole.
    pub arrays: Option<DataFile>,
}

/// A part of a dump: its base, or an increment.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Part<'a> {
    pub step: u64,
    created: &'a str,
    pub tables: &'a [TableEntry],
    pub arrays: &'a Option<DataFile>,
    parent: Option<Checksum>,
    snapshot: Option<Checksum>,
}

impl<'a> Part<'a> {
    /// Names the tables as they are after this part, for [`Table::track`].
    pub fn snapshot(self) -> Result<Checksum, String> {
        self.snapshot.map_or_else(|| self.checksum(), Ok)
    }

    /// Its files, with the name of the table of each.
    fn files(self) -> impl Iterator<Item = (&'a DataFile, Option<&'a str>)> {
        let of_table = |table: &'a TableEntry| table.files().map(|file| (file, Some(&*table.name)));
        self.tables.iter().flat_map(of_table).chain(self.arrays.iter().map(|arrays| (arrays, None)))
    }

    /// The checksum of all that the manifest says of the part, with the checksums of its files.
    pub fn checksum(&self) -> Result<Checksum, String> {
        serde_json::to_vec(self).map(|json| Checksum::of(&json)).map_err(|e| e.to_string())
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
/// A table of a dump.
pub struct TableEntry {
    /// Name of the table.
    pub name: String,
    /// Floats in a row.
    pub dim: usize,
    /// Of rows and states: `float32`.
    pub dtype: String,
    /// `None`: a dynamic table.
    pub vocabulary_size: Option<u64>,
    /// Seed of first values.
    pub seed: u64,
    /// Initializer of first values.
    pub initializer: Initializer,
    /// The update whose states are kept; `None` if no optimizer had touched the table.
    pub update: Option<Update>,
    /// States of a record, in order.
    pub states: Vec<StateEntry>,
    /// The scores of the rows, from version 2 on; `None` if the table has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scores: Option<ScoreEntry>,
    /// The ages of the rows, from version 3 on; `None` if they have no time to live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ages: Option<AgeEntry>,
    /// Number of rows in the files.
    pub num_rows: u64,
    /// Of an increment: number of rows of the table, with those of earlier parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_rows: Option<u64>,
    /// Files with the rows.
    pub shards: Vec<DataFile>,
    /// Of an increment: files with the keys that have gone since the part before. Each has the tensor `keys` alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<DataFile>,
}

/// The score of each row: the tensor `scores` of each shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreEntry {
    /// What they count.
    pub score: Score,
    /// Number of the step in progress, from 1.
    pub step: u64,
}

/// The age of each row: the tensor `ages` of each shard, how many commits ago it was trained last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgeEntry {
    /// Number of the step in progress, from 1.
    pub step: u64,
    /// When commits were made, as `Table::commit_times` returns it. Empty if the time to live is a number of steps.
    pub times: Vec<(u64, u64)>,
}

/// A state beside each row: the tensor `state.<name>` of each shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateEntry {
    /// Name of the state.
    pub name: String,
    /// Floats in a record.
    pub width: usize,
}

/// One safetensors file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Its name in the dump's directory.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Of the header with the eight bytes of its length.
    pub header: Checksum,
    /// In the order of their bytes.
    pub tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
/// A tensor of a file.
pub struct Tensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements along each axis.
    pub shape: Vec<usize>,
    /// Checksum of each block.
    pub blocks: Blocks,
}

impl Tensor {
    pub(super) fn new(name: impl Into<String>, dtype: Dtype, shape: Vec<usize>) -> Tensor {
        Tensor { name: name.into(), dtype, shape, blocks: Blocks::default() }
    }
}

/// Where the bytes of a file's tensors are: follows from their names, dtypes and shapes.
pub(super) struct Layout {
    /// The file's first bytes: eight of length, then JSON, padded so that the tensors are aligned.
    pub header: Vec<u8>,
    /// Places in the file, one a tensor, without gaps.
    pub tensors: Vec<Range<u64>>,
}

impl Layout {
    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.tensors.last().map_or(self.header.len() as u64, |t| t.end)
    }
}

impl DataFile {
    pub(super) fn new(file: String, tensors: Vec<Tensor>) -> DataFile {
        DataFile { file, bytes: 0, header: Checksum::default(), tensors }
    }

    /// Rows in a table's shard.
    pub fn num_rows(&self) -> u64 {
        self.tensors.first().and_then(|keys| keys.shape.first()).map_or(0, |&n| n as u64)
    }

    /// The header in safetensors' own rendering; `table` stands in its metadata, for those who find a shard alone.
    ///
    /// # Errors
    /// What is wrong with the names, shapes or sizes.
    pub(super) fn layout(&self, table: Option<&str>) -> Result<Layout, String> {
        // Not a matter of taste: safetensors indexes out of bounds on names that come twice.
        check_distinct("tensor", self.tensors.iter().map(|t| t.name.as_str()))?;
        let mut infos = Vec::with_capacity(self.tensors.len());
        let mut end = 0usize;
        for tensor in &self.tensors {
            let start = end;
            end = tensor.bytes().and_then(|bytes| start.checked_add(bytes)).ok_or_else(|| {
                format!(
                    "tensor `{}` must be a whole number of bytes that fits a file: {} {:?}",
                    tensor.name, tensor.dtype, tensor.shape
                )
            })?;
            let info =
                TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
            infos.push((tensor.name.clone(), info));
        }
        let places: Vec<_> = infos.iter().map(|(_, info)| info.data_offsets).collect();
        let metadata = table.map(|name| HashMap::from([("table".to_owned(), name.to_owned())]));
        let metadata = Metadata::new(metadata, infos).map_err(|e| e.to_string())?;
        let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
        json.resize(json.len().next_multiple_of(8), b' ');
        if json.len() > MAX_HEADER_BYTES {
            return Err(format!("a header must be at most {MAX_HEADER_BYTES} bytes: got {}", json.len()));
        }
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        let first = header.len() as u64;
        first.checked_add(end as u64).ok_or("the tensors must fit into a file")?;
        let tensors =
            places.into_iter().map(|(start, end)| first + start as u64..first + end as u64).collect();
        Ok(Layout { header, tensors })
    }

    /// Whether size and blocks are those of the tensors.
    fn check(&self, table: Option<&str>) -> Result<(), String> {
        if !is_own_name(&self.file) {
            return Err(format!("a file must be named as dumps name theirs: got `{}`", self.file));
        }
        let within = |what: String| format!("`{}`: {what}", self.file);
        let layout = self.layout(table).map_err(within)?;
        if self.bytes != layout.bytes() {
            return Err(within(format!(
                "size must be that of its tensors: expected {}, got {}",
                layout.bytes(),
                self.bytes
            )));
        }
        for (tensor, place) in self.tensors.iter().zip(&layout.tensors) {
            let expected = (place.end - place.start).div_ceil(BLOCK_BYTES as u64);
            if tensor.blocks.0.len() as u64 != expected {
                let got = tensor.blocks.0.len();
                return Err(within(format!(
                    "`{}` must have a checksum a MiB: expected {expected}, got {got}",
                    tensor.name
                )));
            }
        }
        Ok(())
    }
}

impl Tensor {
    /// `None` if they are not whole or too many to count.
    pub(super) fn bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        let bits = elements.checked_mul(self.dtype.bitsize())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl TableEntry {
    /// Without its shards. `states`: whether the dump has the table's optimizer states.
    pub(super) fn of(table: &dyn Table, states: bool) -> crate::Result<TableEntry> {
        let config = table.config();
        let layout = table.layout();
        let dumped = if states { layout.states() } else { &[] };
        Ok(TableEntry {
            name: config.name.clone(),
            dim: config.dim,
            dtype: "float32".into(),
            vocabulary_size: config.vocabulary_size,
            seed: config.seed,
            initializer: config.initializer,
            update: table.update_rule().copied().filter(|_| states),
            states: dumped
                .iter()
                .map(|s| StateEntry { name: s.name.into(), width: s.columns.len() })
                .collect(),
            scores: match config.eviction {
                Some(eviction) => Some(ScoreEntry { score: eviction.score, step: table.step()? }),
                None => None,
            },
            ages: match config.time_to_live {
                Some(_) => Some(AgeEntry { step: table.step()?, times: table.commit_times() }),
                None => None,
            },
            num_rows: table.len()? as u64,
            total_rows: None,
            shards: Vec::new(),
            removed: Vec::new(),
        })
    }

    /// As `of`, of the rows that have changed since a time.
    pub(super) fn of_changes(table: &dyn Table, states: bool, since: Since) -> crate::Result<TableEntry> {
        let whole = TableEntry::of(table, states)?;
        let num_rows = table.num_changed(since)? as u64;
        Ok(TableEntry { num_rows, total_rows: Some(whole.num_rows), ..whole })
    }

    /// Number of rows of the table.
    pub fn total_rows(&self) -> u64 {
        self.total_rows.unwrap_or(self.num_rows)
    }

    /// The files of the table.
    pub(super) fn files(&self) -> impl Iterator<Item = &DataFile> {
        self.shards.iter().chain(&self.removed)
    }

    /// Returns the columns of its records.
    pub(super) fn columns(&self) -> Vec<Column> {
        let are_there = [(Column::Scores, self.scores.is_some()), (Column::Ages, self.ages.is_some())];
        are_there.into_iter().filter(|(_, is_there)| *is_there).map(|(column, _)| column).collect()
    }

    /// Returns the number of the step in progress, if the table counted steps.
    pub(super) fn step(&self) -> Option<u64> {
        self.scores.as_ref().map(|scores| scores.step).or(self.ages.as_ref().map(|ages| ages.step))
    }

    /// The tensors of a shard of `num_rows` rows: keys, then what a record holds, in its order, then its columns.
    pub(super) fn tensors(&self, num_rows: usize) -> Vec<Tensor> {
        let states = self.states.iter().map(|s| (format!("state.{}", s.name), s.width));
        let columns = std::iter::once(("rows".to_owned(), self.dim)).chain(states);
        std::iter::once(Tensor::new("keys", Dtype::I64, vec![num_rows]))
            .chain(columns.map(|(name, width)| Tensor::new(name, Dtype::F32, vec![num_rows, width])))
            .chain(self.columns().into_iter().map(|c| Tensor::new(c.name(), Dtype::U64, vec![num_rows])))
            .collect()
    }

    /// Brings the columns of records to the step of a later entry of the same table.
    pub(super) fn catch_up(&self, later: &TableEntry, records: &mut Records) {
        let (from, to) = (self.step().unwrap_or(1), later.step().unwrap_or(1));
        records.ages.iter_mut().for_each(|age| *age = age.saturating_add(to.saturating_sub(from)));
        if let Some(ScoreEntry { score: Score::Lfu { half_life: Some(every) }, .. }) = self.scores {
            // The steps from `from` on to the one before `to` have ended meanwhile.
            let halvings_before = |step: u64| step.saturating_sub(1).checked_div(every).unwrap_or(0);
            let halvings = halvings_before(to).saturating_sub(halvings_before(from)).min(64);
            let halve = |score: &mut u64| *score = score.checked_shr(halvings as u32).unwrap_or(0);
            records.scores.iter_mut().for_each(halve);
        }
    }

    /// Whether another entry may hold later rows of the same table.
    pub(super) fn is_followed_by(&self, later: &TableEntry) -> bool {
        let kind = |entry: &TableEntry| {
            let score = entry.scores.as_ref().map(|scores| scores.score);
            (entry.name.clone(), entry.dim, entry.vocabulary_size, entry.seed, score, entry.ages.is_some())
        };
        kind(self) == kind(later) && self.states == later.states
    }

    fn check(&self) -> Result<(), String> {
        let times = self.ages.iter().flat_map(|ages| ages.times.windows(2));
        for pair in times {
            if pair[0].0 > pair[1].0 || pair[0].1 < pair[1].1 {
                return Err(format!("the times of commits of table `{}` must ascend", self.name));
            }
        }
        let mut num_rows = 0u64;
        for shard in &self.shards {
            let rows = usize::try_from(shard.num_rows()).map_err(|e| e.to_string())?;
            let expected = self.tensors(rows);
            let is_same =
                |(a, b): (&Tensor, &Tensor)| (&a.name, a.dtype, &a.shape) == (&b.name, b.dtype, &b.shape);
            if shard.tensors.len() != expected.len() || !shard.tensors.iter().zip(&expected).all(is_same) {
                return Err(format!(
                    "`{}` must hold keys, rows and states of table `{}`",
                    shard.file, self.name
                ));
            }
            shard.check(Some(&self.name))?;
            num_rows = num_rows.checked_add(rows as u64).ok_or("rows must be fewer")?;
        }
        for file in &self.removed {
            let keys = file.tensors.first().filter(|keys| {
                file.tensors.len() == 1
                    && (&*keys.name, keys.dtype, keys.shape.len()) == ("keys", Dtype::I64, 1)
            });
            if keys.is_none() {
                return Err(format!("`{}` must hold keys of table `{}` alone", file.file, self.name));
            }
            file.check(Some(&self.name))?;
        }
        if num_rows != self.num_rows {
            return Err(format!(
                "table `{}` must have {} rows: its shards hold {num_rows}",
                self.name, self.num_rows
            ));
        }
        Ok(())
    }
}

impl Manifest {
    pub(super) fn new(
        step: u64,
        created: String,
        tables: Vec<TableEntry>,
        arrays: Option<DataFile>,
    ) -> Manifest {
        let version = oldest_version(&tables);
        Manifest {
            format: FORMAT.into(),
            version,
            step,
            created,
            tables,
            arrays,
            snapshot: None,
            increments: Vec::new(),
        }
    }

    /// The manifest of a dump without increments that holds the same as this one with its increments, in other files.
    pub(super) fn compacted(
        &self,
        created: String,
        tables: Vec<TableEntry>,
        arrays: Option<DataFile>,
    ) -> Result<Manifest, String> {
        let snapshot = Some(self.last().snapshot()?);
        Ok(Manifest {
            version: VERSION,
            snapshot,
            ..Manifest::new(self.last().step, created, tables, arrays)
        })
    }

    /// The manifest of the same dump with one more increment, and without increments after the parent of that. `parent`: number of that
    /// part; 0: the base.
    pub(super) fn with(
        &self,
        parent: usize,
        step: u64,
        created: String,
        tables: Vec<TableEntry>,
        arrays: Option<DataFile>,
    ) -> Result<Manifest, String> {
        let mut manifest = Manifest { version: VERSION, ..self.clone() };
        manifest.increments.truncate(parent);
        let parent = manifest.last().checksum()?;
        manifest.increments.push(Increment { parent, step, created, tables, arrays });
        Ok(manifest)
    }

    /// The base and the increments, oldest first.
    pub(super) fn parts(&self) -> impl DoubleEndedIterator<Item = Part<'_>> {
        let (step, created) = (self.step, &*self.created);
        let (tables, arrays, snapshot) = (&*self.tables, &self.arrays, self.snapshot);
        let base = Part { step, created, tables, arrays, parent: None, snapshot };
        std::iter::once(base).chain(self.increments.iter().map(|increment| Part {
            step: increment.step,
            created: &increment.created,
            tables: &increment.tables,
            arrays: &increment.arrays,
            parent: Some(increment.parent),
            snapshot: None,
        }))
    }

    /// The newest part.
    pub(super) fn last(&self) -> Part<'_> {
        self.parts().next_back().expect("a dump has a base")
    }

    /// Names the tables as the dump has them, for [`Table::track`].
    ///
    /// # Errors
    /// [`Error::State`] for a manifest that cannot be written.
    pub fn snapshot(&self) -> crate::Result<u64> {
        self.last().snapshot().map(|snapshot| snapshot.0).map_err(Error::State)
    }

    /// Every file of the dump, with the name of its table.
    pub(super) fn files(&self) -> impl Iterator<Item = (&DataFile, Option<&str>)> {
        self.parts().flat_map(Part::files)
    }

    /// The whole of `manifest.json`.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let body = serde_json::to_string_pretty(self).map_err(|e| e.to_string())?;
        let checksum = Checksum::of(body.as_bytes());
        Ok(format!("{BEFORE_BODY}{body}{BEFORE_CHECKSUM}{checksum}{AFTER_CHECKSUM}").into_bytes())
    }

    /// The way back, for any bytes: what comes out adds up.
    ///
    /// # Errors
    /// [`Error::CorruptDump`] if the bytes are not those that were written; [`Error::DumpMismatch`] if they are, but of
    /// another version.
    pub(super) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Manifest> {
        let corrupt = |what: String| Error::corrupt_dump(path, what);
        let mismatch = |what: String| Error::dump_mismatch(path, what);

        let body = checked_body(bytes).map_err(corrupt)?;
        let head: Head =
            serde_json::from_slice(body).map_err(|e| mismatch(format!("not the manifest of a dump: {e}")))?;
        if head.format != FORMAT {
            return Err(mismatch(format!("`format` must be `{FORMAT}`: got `{}`", head.format)));
        }
        if !(1..=u64::from(VERSION)).contains(&head.version) {
            let got = head.version;
            return Err(mismatch(format!(
                "this release reads dumps of versions 1 to {VERSION}: got version {got}"
            )));
        }
        let version = head.version;
        let manifest: Manifest = serde_json::from_slice(body)
            .map_err(|e| mismatch(format!("not as version {version} has it: {e}")))?;
        let is_older = version < 4 && (manifest.snapshot.is_some() || !manifest.increments.is_empty());
        if is_older || oldest_version(&manifest.tables) > manifest.version {
            let what = "`scores`, `ages` and `increments` came later";
            return Err(mismatch(format!("not as version {version} has it: {what}")));
        }
        let is_other = |table: &&TableEntry| table.dtype != "float32";
        if let Some(table) = manifest.parts().flat_map(|part| part.tables).find(is_other) {
            let (name, dtype) = (&table.name, &table.dtype);
            return Err(mismatch(format!("`dtype` of table `{name}` must be float32: got {dtype}")));
        }
        manifest.check().map_err(corrupt)?;
        Ok(manifest)
    }

    /// As [`Manifest::from_bytes`], with the checksum of all bytes.
    pub(super) fn read(path: &Path) -> Result<(Manifest, Checksum)> {
        let bytes = read_whole(path)?;
        Ok((Manifest::from_bytes(path, &bytes)?, Checksum::of(&bytes)))
    }

    fn check(&self) -> Result<(), String> {
        check_distinct("table", self.tables.iter().map(|t| t.name.as_str()))?;
        check_distinct("file", self.files().map(|(f, _)| f.file.as_str()))?;
        for part in self.parts() {
            part.tables.iter().try_for_each(TableEntry::check)?;
            part.arrays.iter().try_for_each(|a| a.check(None))?;
        }
        self.check_increments()
    }

    fn check_increments(&self) -> Result<(), String> {
        if self.tables.iter().any(|table| table.total_rows.is_some() || !table.removed.is_empty()) {
            return Err("the base of a dump must hold all rows".into());
        }
        // No table has more rows than the files hold, so memory for rows may be taken by what the manifest says.
        let mut in_files: Vec<u64> = self.tables.iter().map(|table| table.num_rows).collect();
        let pairs = self.parts().zip(&self.increments);
        for (number, (before, increment)) in (1..).zip(pairs) {
            let (expected, got) = (before.checksum()?, increment.parent);
            if got != expected {
                return Err(format!(
                    "increment {number} must follow the part with checksum {expected}: it is one of {got}. An increment is missing, in the \
                     wrong place, or of another dump"
                ));
            }
            let is_same = |(one, other): (&TableEntry, &TableEntry)| one.is_followed_by(other);
            if before.tables.len() != increment.tables.len()
                || !before.tables.iter().zip(&increment.tables).all(is_same)
            {
                return Err(format!("increment {number} must have the tables of the dump, in its order"));
            }
            for (table, in_files) in increment.tables.iter().zip(&mut in_files) {
                *in_files = in_files.checked_add(table.num_rows).ok_or("rows must be fewer")?;
                if table.total_rows() > *in_files {
                    let (name, got) = (&table.name, table.total_rows());
                    return Err(format!(
                        "table `{name}` must have at most {in_files} rows after increment {number}, as its files have: got {got}"
                    ));
                }
            }
            if before.arrays.is_some() != increment.arrays.is_some() {
                return Err(format!("increment {number} must have arrays if the dump has some"));
            }
        }
        Ok(())
    }
}

/// The oldest version that holds these tables.
fn oldest_version(tables: &[TableEntry]) -> u32 {
    let version_of = |table: &TableEntry| match (&table.ages, &table.scores) {
        (Some(_), _) => 3,
        (None, Some(_)) => 2,
        (None, None) => 1,
    };
    tables.iter().map(version_of).max().unwrap_or(1)
}

/// The bytes of a manifest. A large file of another kind is recognised by its first bytes.
fn read_whole(path: &Path) -> Result<Vec<u8>> {
    let io = |e| Error::io(path, e);
    let file = open_regular(path)?;
    let size = file.metadata().map_err(io)?.len();
    if size > MAX_MANIFEST_BYTES {
        let what = format!("a manifest must be at most {MAX_MANIFEST_BYTES} bytes: got {size}");
        return Err(Error::corrupt_dump(path, what));
    }
    let mut bytes = Vec::new();
    (&file).take(BEFORE_BODY.len() as u64).read_to_end(&mut bytes).map_err(io)?;
    if bytes != BEFORE_BODY.as_bytes() {
        return Err(Error::corrupt_dump(path, NO_MANIFEST));
    }
    let no_memory = |_| Error::memory(size as usize, "a manifest", ErrorKind::OutOfMemory.into());
    bytes.try_reserve_exact(size as usize).map_err(no_memory)?;
    (&file).take(MAX_MANIFEST_BYTES).read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

/// What all versions have.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

/// The body, if the file is whole.
fn checked_body(bytes: &[u8]) -> Result<&[u8], String> {
    let strip = || {
        let rest = bytes.strip_prefix(BEFORE_BODY.as_bytes())?.strip_suffix(AFTER_CHECKSUM.as_bytes())?;
        let (rest, digits) = rest.split_at_checked(rest.len().checked_sub(DIGITS)?)?;
        Some((rest.strip_suffix(BEFORE_CHECKSUM.as_bytes())?, digits))
    };
    let (body, digits) = strip().ok_or(NO_MANIFEST)?;
    let checksum = Checksum::of(body).to_string();
    if digits != checksum.as_bytes() {
        let expected = String::from_utf8_lossy(digits);
        return Err(format!("the checksum must be that of the body: expected {expected}, got {checksum}"));
    }
    Ok(body)
}

pub(super) fn check_distinct<'a>(noun: &str, names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(format!("each {noun} of a dump must have a name of its own: `{name}` comes twice"));
        }
    }
    Ok(())
}

/// `sok-<16 hexadecimal digits of the dump>-<number>.safetensors`.
pub(super) fn data_file_name(unique: u64, number: usize) -> String {
    format!("sok-{unique:016x}-{number:05}.safetensors")
}

/// The manifest's name until it is whole.
pub(super) fn manifest_aside_name(unique: u64) -> String {
    format!("sok-{unique:016x}-manifest.json")
}

/// Whether a dump made up this name: only such files are ever removed.
pub(super) fn is_own_name(name: &str) -> bool {
    let parts = || {
        let (digits, rest) = name.strip_prefix("sok-")?.split_at_checked(DIGITS)?;
        Some((digits, rest.strip_prefix('-')?))
    };
    parts().is_some_and(|(digits, rest)| {
        let number = rest.strip_suffix(".safetensors").unwrap_or_default();
        let is_number = (5..=20).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit());
        digits.bytes().all(|b| b.is_ascii_hexdigit()) && (rest == MANIFEST || is_number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_dump_makes_are_own() {
        assert!(is_own_name(&data_file_name(7, 0)));
        assert!(is_own_name(&data_file_name(u64::MAX, 123_456)));
        assert!(is_own_name(&manifest_aside_name(0)));
        for other in [
            "",
            MANIFEST,
            "sok-",
            "model.safetensors",
            "sok-0000000000000000-.safetensors",
            "sok-0000000000000000-00000.safetensors.bak",
            "sok-0000000000000000-../00000.safetensors",
            "../sok-0000000000000000-00000.safetensors",
            "sok-00000000000000é-00000.safetensors",
        ] {
            assert!(!is_own_name(other), "{other}");
        }
    }

    #[test]
    fn shapes_that_lie_are_refused_without_panic() {
        let layout =
            |tensors: Vec<Tensor>| DataFile::new("f".into(), tensors).layout(None).map(|l| l.bytes());
        let tensor = |name, shape: &[usize]| Tensor::new(name, Dtype::F32, shape.to_vec());
        assert!(layout(vec![]).is_ok());
        assert!(layout(vec![tensor("a", &[]), tensor("b", &[0, 3])]).is_ok());
        assert!(layout(vec![tensor("a", &[1]), tensor("a", &[1])]).is_err());
        assert!(layout(vec![tensor("a", &[usize::MAX, usize::MAX])]).is_err());
        assert!(layout(vec![tensor("a", &[usize::MAX / 4]), tensor("b", &[2])]).is_err());
        assert!(layout(vec![tensor("a", &[usize::MAX / 4])]).is_err());
        assert!(layout(vec![Tensor::new("a", Dtype::F4, vec![3])]).is_err());
    }
}
