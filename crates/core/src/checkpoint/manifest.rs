//! What a dump says of itself: `manifest.json`.

use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::checksum::{Checksum, DIGITS};
use super::data_file::{DataFile, check_distinct};
use super::open::open_regular;
use super::table_entry::TableEntry;
use crate::error::{Error, Result};
use crate::row_type::RowType;

/// The newest version that this code reads and writes. A dump has the oldest version that holds all of it.
pub const VERSION: u32 = 6;
/// The first version with increments.
const INCREMENTS_VERSION: u32 = 4;
const FORMAT: &str = "sok_keras dump";

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
    /// Of a compacted dump, from version 4 on: the snapshot of its newest part before, so that tables which know it can go on with increments.
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
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub step: u64,
    created: &'a str,
    pub tables: &'a [TableEntry],
    pub arrays: &'a Option<DataFile>,
    parent: Option<Checksum>,
    snapshot: Option<Checksum>,
}

impl<'a> Part<'a> {
    /// Identifies the state of the tables in this part, for [`Table::track`](crate::contract::table::Table::track).
    pub fn snapshot(self) -> Checksum {
        self.snapshot.unwrap_or_else(|| self.checksum())
    }

    /// Its files, with the name of the table of each.
    fn files(self) -> impl Iterator<Item = (&'a DataFile, Option<&'a str>)> {
        let of_table = |table: &'a TableEntry| table.files().map(|file| (file, Some(&*table.name)));
        self.tables.iter().flat_map(of_table).chain(self.arrays.iter().map(|arrays| (arrays, None)))
    }

    /// The checksum of the part: of its step, time and parent, and of the names and checksums of its files. A manifest renders other fields
    /// as its release does, so these are not part of it.
    fn checksum(self) -> Checksum {
        let parent = self.parent.map(|parent| parent.to_string()).unwrap_or_default();
        let mut text = format!("{} {} {parent}\n", self.step, self.created);
        for (file, _) in self.files() {
            text.push_str(&format!("{} {} {}", file.file, file.bytes, file.header));
            let blocks = file.tensors.iter().flat_map(|tensor| &tensor.blocks.0);
            blocks.for_each(|block| text.push_str(&format!(" {block}")));
            text.push('\n');
        }
        Checksum::of(text.as_bytes())
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
    ) -> Manifest {
        let snapshot = Some(self.last().snapshot());
        let manifest = Manifest::new(self.last().step, created, tables, arrays);
        Manifest { version: manifest.version.max(INCREMENTS_VERSION), snapshot, ..manifest }
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
    ) -> Manifest {
        let version = self.version.max(INCREMENTS_VERSION);
        let mut manifest = Manifest { version, ..self.clone() };
        manifest.increments.truncate(parent);
        let parent = manifest.last().checksum();
        manifest.increments.push(Increment { parent, step, created, tables, arrays });
        manifest
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

    /// Identifies the state of the tables in the dump, for [`Table::track`](crate::contract::table::Table::track).
    pub fn snapshot(&self) -> u64 {
        self.last().snapshot().0
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
        let is_older = version < INCREMENTS_VERSION.into()
            && (manifest.snapshot.is_some() || !manifest.increments.is_empty());
        if is_older || oldest_version(&manifest.tables) > manifest.version {
            let what = "`scores`, `ages`, `increments`, `sights` and rows of 16 bits came later";
            return Err(mismatch(format!("not as version {version} has it: {what}")));
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
            let (expected, got) = (before.checksum(), increment.parent);
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
        _ if table.dtype != RowType::Float32 => 6,
        _ if table.sights.is_some() => 5,
        (Some(_), _) => 3,
        (None, Some(_)) => 2,
        (None, None) => 1,
    };
    tables.iter().map(version_of).max().unwrap_or(1)
}

/// The bytes of a manifest. A large file of another kind is recognised by its first bytes.
pub(super) fn read_whole(path: &Path) -> Result<Vec<u8>> {
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
