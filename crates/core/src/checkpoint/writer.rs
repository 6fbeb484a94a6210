//! A dump: data files aside, then the manifest in one rename, then the files that it no longer names go.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::SystemTime;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::value::{Error as ValueError, StrDeserializer};

use super::checksum::{BlockHasher, Checksum};
use super::data_file::{DataFile, Layout, Tensor, check_distinct};
use super::files::{DirectoryLock, Disk, Files};
use super::increment::{After, Parent};
use super::manifest::Manifest;
use super::names::{MANIFEST, data_file_name, is_own_name, manifest_aside_name};
use super::output::{Output, OutputFile};
use super::table_entry::TableEntry;
use super::{CHUNK_BYTES, KEY_BYTES, NUMBER_BYTES, SHARD_BYTES, utc};
use crate::contract::record::Field;
use crate::contract::records::{Column, Records};
use crate::contract::table::{Contents, Cursor};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::memory;
use crate::row_type::RowType;

/// What memory is for.
const BUFFER: &str = "the rows of a dump";

/// Threads that remove the files of a dump that was replaced. This takes 0.2 s for each GB where the operating system has it in memory, and tells
/// the disk which blocks are free.
const REMOVING_THREADS: usize = 4;

/// How a dump is written.
#[derive(Clone, Copy, Debug)]
pub struct DumpOptions<'a> {
    /// Replace a dump that is there; without it, that is an error.
    pub overwrite: bool,
    /// Which part of the dump that is there this one follows, as an increment: what has changed since. `None`: a whole dump is written.
    pub after: Option<After>,
    /// Optimizer steps taken until now.
    pub step: u64,
    /// Whether optimizer states are written. An increment must have them if the dump has them.
    pub states: bool,
    /// Is raised by the number of rows that were written.
    pub num_written: Option<&'a AtomicU64>,
    /// Data in a shard at most; a shard has one row at least.
    #[doc(hidden)]
    pub shard_bytes: usize,
}

impl Default for DumpOptions<'_> {
    fn default() -> Self {
        let shard_bytes = SHARD_BYTES;
        DumpOptions { overwrite: true, after: None, step: 0, states: true, num_written: None, shard_bytes }
    }
}

/// A dense array to keep beside the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array<'a> {
    /// Name of the array.
    pub name: String,
    /// As safetensors calls it: `F32`, `I64`, `BF16`, ...
    pub dtype: String,
    /// Number of elements along each axis.
    pub shape: Vec<usize>,
    /// Row-major, little-endian.
    pub data: Cow<'a, [u8]>,
}

/// Writes `tables` and `arrays` into the directory `path`, which is made if need be; or, as an increment, what has changed in `tables`, and
/// `arrays` whole, as one more part of the dump that is there.
///
/// Until the last moment a dump that is there stays as it is: a process killed at any time, or a machine without power,
/// leaves the old dump or the new one. Memory: a dozen buffers of [`CHUNK_BYTES`], whatever the size of a table, and 16 bytes for each key that an
/// admission policy counts.
///
/// # Errors
/// [`Error::Argument`] for names that come twice, for an array whose data is not of its shape, and for a dump that is
/// there without `overwrite`; [`Error::State`] while another dump writes there; [`Error::Io`] names the path, and what
/// had been written is removed. Of an increment: [`Error::Io`] if there is no dump, [`Error::DumpMismatch`] if that has other tables or
/// states, [`Error::UnknownChanges`] if a table has no record of its changes since.
pub fn dump(
    path: &Path,
    tables: &[&dyn Contents],
    arrays: &[Array],
    options: &DumpOptions,
) -> Result<Manifest> {
    dump_with(Arc::new(Disk), path, tables, arrays, options)
}

/// As [`dump`], on other files: for tests that count and break what is done to them.
#[doc(hidden)]
pub fn dump_with(
    files: Arc<dyn Files>,
    path: &Path,
    tables: &[&dyn Contents],
    arrays: &[Array],
    options: &DumpOptions,
) -> Result<Manifest> {
    check_names(tables.iter().copied(), arrays)?;
    let array_tensors = array_tensors(arrays)?;
    let Some(after) = options.after else {
        create_directory(&*files, path)?;
        let _lock = DirectoryLock::acquire(path)?;
        check_overwrite(path, options)?;
        return write_and_place(files, path, |writer| {
            writer.write(tables, arrays, array_tensors, options, None)
        });
    };
    let _lock = DirectoryLock::acquire(path)?;
    let parent = Parent::new(path, Manifest::read(&path.join(MANIFEST))?.0, after)?;
    let names: Vec<&str> = tables.iter().map(|table| &*table.config().name).collect();
    let tables: Vec<_> = parent.order(path, &names)?.into_iter().map(|number| tables[number]).collect();
    parent.check_tables(path, tables.iter().copied(), options.states)?;
    parent.check_arrays(path, !arrays.is_empty())?;
    write_and_place(files, path, |writer| {
        writer.write(&tables, arrays, array_tensors, options, Some(&parent))
    })
}

/// Writes files of a dump, and puts its manifest in place.
pub(super) fn write_and_place(
    files: Arc<dyn Files>,
    path: &Path,
    write: impl FnOnce(&mut Writer) -> Result<(Manifest, PathBuf)>,
) -> Result<Manifest> {
    let manifest_path = path.join(MANIFEST);
    let mut writer = Writer::new(files.clone(), path, unique());
    let written = write(&mut writer).and_then(|(manifest, aside)| {
        files.rename(&aside, &manifest_path).map_err(|e| Error::io(&manifest_path, e))?;
        Ok(manifest)
    });
    match written {
        Ok(manifest) => {
            // If this fails, a loss of power may bring the old manifest back: both dumps' files stay.
            files.sync_dir(path).map_err(|e| Error::io(path, e))?;
            remove_leftovers(&*files, path, &manifest);
            Ok(manifest)
        }
        Err(error) => {
            writer.remove_created();
            Err(error)
        }
    }
}

/// Checks that names are distinct.
pub(super) fn check_names<'a>(
    tables: impl Iterator<Item = &'a dyn Contents>,
    arrays: &[Array],
) -> Result<()> {
    check_distinct("table", tables.map(|t| t.config().name.as_str())).map_err(Error::Argument)?;
    check_distinct("array", arrays.iter().map(|a| a.name.as_str())).map_err(Error::Argument)
}

/// Checks that there is no dump, or that it may be replaced.
pub(super) fn check_overwrite(path: &Path, options: &DumpOptions) -> Result<()> {
    let manifest_path = path.join(MANIFEST);
    if !options.overwrite && manifest_path.try_exists().map_err(|e| Error::io(&manifest_path, e))? {
        let path = path.display();
        return Err(Error::argument(format!("`overwrite` must be True to replace a dump: {path} holds one")));
    }
    Ok(())
}

/// The tensors of arrays, whose data are hashed when they are written.
pub(super) fn array_tensors(arrays: &[Array]) -> Result<Vec<Tensor>> {
    arrays.iter().map(array_tensor).collect()
}

/// Checks the array against itself; its data is hashed when it is written.
fn array_tensor(array: &Array) -> Result<Tensor> {
    let fail = |what: String| Err(Error::argument(format!("array `{}`: {what}", array.name)));
    let Ok(dtype) = Dtype::deserialize(StrDeserializer::<ValueError>::new(&array.dtype)) else {
        return fail(format!("`dtype` must be one of safetensors'. Received: {}", array.dtype));
    };
    if array.name == "__metadata__" {
        return fail("the name is safetensors' own".into());
    }
    let tensor = Tensor::new(&array.name, dtype, array.shape.clone());
    if tensor.bytes() != Some(array.data.len()) {
        let (shape, got) = (&array.shape, array.data.len());
        return fail(format!(
            "`data` must be of the size of dtype {dtype} and shape {shape:?}. Received: {got} bytes"
        ));
    }
    Ok(tensor)
}

/// Makes the directory and those above it that are not there, each synced into its parent.
pub(super) fn create_directory(files: &dyn Files, path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    create_directory(files, parent)?;
    match files.create_dir(path) {
        // Somebody else made it meanwhile: another rank, another dump. A file by that name is an error.
        Err(_) if path.is_dir() => Ok(()),
        Err(e) => Err(Error::io(path, e)),
        Ok(()) => files.sync_dir(parent).map_err(|e| Error::io(parent, e)),
    }
}

/// Removes the files of dumps that were replaced or killed. The new dump is safe already, so one that does not go is
/// left for the next dump.
pub(super) fn remove_leftovers(files: &dyn Files, path: &Path, manifest: &Manifest) {
    let named: HashSet<&str> = manifest.files().map(|(f, _)| f.file.as_str()).collect();
    let is_left = |name: &OsStr| name.to_str().is_some_and(|n| is_own_name(n) && !named.contains(n));
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let left: Vec<PathBuf> = entries.filter(|e| is_left(&e.file_name())).map(|e| e.path()).collect();
    let remove = |some: &[PathBuf]| some.iter().for_each(|path| drop(files.remove(path)));
    thread::scope(|scope| {
        for some in left.chunks(left.len().div_ceil(REMOVING_THREADS).max(1)) {
            let thread = thread::Builder::new().name("sok-dump-remove".into());
            if thread.spawn_scoped(scope, || remove(some)).is_err() {
                remove(some);
            }
        }
    });
}

/// Differs from dump to dump, so that no file of one is ever written by another.
pub(super) fn unique() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    RandomState::new().hash_one((now, std::process::id()))
}

/// Makes the manifest of a dump, or of one with one more increment.
pub(super) fn new_manifest(
    options: &DumpOptions,
    parent: Option<&Parent>,
    tables: Vec<TableEntry>,
    arrays: Option<DataFile>,
) -> Manifest {
    let created = utc(SystemTime::now());
    match parent {
        None => Manifest::new(options.step, created, tables, arrays),
        Some(Parent { manifest, number, .. }) => {
            manifest.with(*number, options.step, created, tables, arrays)
        }
    }
}

/// Writes the files of a dump.
pub(super) struct Writer<'a> {
    files: Arc<dyn Files>,
    output: Output,
    directory: &'a Path,
    unique: u64,
    /// What to remove if something fails.
    created: Vec<PathBuf>,
}

impl<'a> Writer<'a> {
    /// `unique`: differs from that of all other writers of the directory.
    pub fn new(files: Arc<dyn Files>, directory: &'a Path, unique: u64) -> Writer<'a> {
        Writer { output: Output::new(files.clone()), files, directory, unique, created: Vec::new() }
    }

    /// Waits until all files are written and synced.
    ///
    /// # Errors
    /// [`Error::Io`] if one is not.
    pub fn finish(&mut self) -> Result<()> {
        self.output.finish()
    }

    /// Everything but the rename: the manifest and the path where it lies aside, all of it synced.
    fn write(
        &mut self,
        tables: &[&dyn Contents],
        arrays: &[Array],
        array_tensors: Vec<Tensor>,
        options: &DumpOptions,
        parent: Option<&Parent>,
    ) -> Result<(Manifest, PathBuf)> {
        let tables = tables.iter().map(|t| self.write_table(*t, options, parent)).collect::<Result<_>>()?;
        let arrays = self.write_arrays(arrays, array_tensors)?;
        let manifest = new_manifest(options, parent, tables, arrays);
        let (_, aside) = self.write_manifest(&manifest)?;
        Ok((manifest, aside))
    }

    /// Writes the manifest aside, once all that it names is synced. Returns its bytes and its path.
    pub fn write_manifest(&mut self, manifest: &Manifest) -> Result<(Vec<u8>, PathBuf)> {
        self.finish()?;
        let aside = self.directory.join(manifest_aside_name(self.unique));
        let unwritable =
            |what: String| Error::State(format!("the manifest of a dump must be readable again: {what}"));
        let bytes = manifest.to_bytes().map_err(unwritable)?;
        // JSON has no infinity, for one: better to fail here than at the load.
        Manifest::from_bytes(&aside, &bytes).map_err(|e| unwritable(e.to_string()))?;
        let file = self.create(&aside)?;
        for (chunk, piece) in bytes.chunks(CHUNK_BYTES).enumerate() {
            self.output.write(&file, (chunk * CHUNK_BYTES) as u64, |to| copy(piece, to))?;
        }
        self.output.sync(file)?;
        self.finish()?;
        self.files.sync_dir(self.directory).map_err(|e| Error::io(self.directory, e))?;
        Ok((bytes, aside))
    }

    /// Writes the rows of a table, or what has changed since `parent`. Returns its entry in the manifest.
    pub fn write_table(
        &mut self,
        table: &dyn Contents,
        options: &DumpOptions,
        parent: Option<&Parent>,
    ) -> Result<TableEntry> {
        let for_scan = table.for_scan(parent.map(|parent| parent.snapshot))?;
        let table = for_scan.as_deref().unwrap_or(table);
        let since = parent.map(|parent| parent.epoch(table)).transpose()?;
        let entry = match since {
            None => TableEntry::of(table, options.states)?,
            Some(since) => TableEntry::of_changes(table, options.states, since)?,
        };
        let layout = table.layout();
        let fields = if options.states { layout.fields() } else { &layout.fields()[..1] };
        let rows = RowsWriter::new(self, entry, fields, layout.width(), options.shard_bytes);
        let max = rows.chunk_rows;
        let mut entry = rows.add_all(options.num_written, |cursor, records| match since {
            None => table.scan(cursor, max, records),
            Some(since) => table.scan_changed(since, cursor, max, records),
        })?;
        table.free_copy();
        if let Some(sights) = &mut entry.sights {
            sights.files = self.write_sights(&entry.name, &*table.sights()?, options.shard_bytes)?;
        }
        if let Some(since) = since {
            self.write_removed(&mut entry, &table.removed_since(since)?, options.shard_bytes)?;
        }
        Ok(entry)
    }

    /// Writes the keys that were removed from the table of an entry.
    fn write_removed(&mut self, entry: &mut TableEntry, removed: &[Key], shard_bytes: usize) -> Result<()> {
        for keys in removed.chunks((shard_bytes / KEY_BYTES).max(1)) {
            let tensor = Tensor::new("keys", Dtype::I64, vec![keys.len()]);
            let mut file = self.open_data_file(vec![tensor], Some(&entry.name))?;
            for some in keys.chunks(CHUNK_BYTES / KEY_BYTES) {
                file.write(&mut self.output, 0, |bytes| write_numbers(some, bytes))?;
            }
            entry.removed.push(file.finish(&mut self.output)?);
        }
        Ok(())
    }

    /// Writes how often keys of a table that have no row have come. Returns the files.
    fn write_sights(&mut self, table: &str, sights: &Records, shard_bytes: usize) -> Result<Vec<DataFile>> {
        let mut files = Vec::new();
        let per_file = (shard_bytes / (KEY_BYTES + NUMBER_BYTES)).max(1);
        for (keys, scores) in sights.keys.chunks(per_file).zip(sights.scores.chunks(per_file)) {
            let mut file = self.open_data_file(TableEntry::sight_tensors(keys.len()), Some(table))?;
            for (tensor, numbers) in [keys, scores].into_iter().enumerate() {
                for some in numbers.chunks(CHUNK_BYTES / NUMBER_BYTES) {
                    file.write(&mut self.output, tensor, |bytes| write_numbers(some, bytes))?;
                }
            }
            files.push(file.finish(&mut self.output)?);
        }
        Ok(files)
    }

    /// Widest dtype first, as the stock writer does it: each tensor then lies aligned.
    pub fn write_arrays(&mut self, arrays: &[Array], tensors: Vec<Tensor>) -> Result<Option<DataFile>> {
        if arrays.is_empty() {
            return Ok(None);
        }
        let mut pairs: Vec<_> = tensors.into_iter().zip(arrays).collect();
        pairs.sort_by_key(|(tensor, _)| std::cmp::Reverse(tensor.dtype.bitsize()));
        let (tensors, arrays): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let mut file = self.open_data_file(tensors, None)?;
        for (tensor, array) in arrays.iter().enumerate() {
            for piece in array.data.chunks(CHUNK_BYTES) {
                file.write(&mut self.output, tensor, |bytes| copy(piece, bytes))?;
            }
        }
        file.finish(&mut self.output).map(Some)
    }

    /// A new data file with its header written.
    fn open_data_file(&mut self, tensors: Vec<Tensor>, table: Option<&str>) -> Result<DataWriter> {
        let entry = DataFile::new(data_file_name(self.unique, self.created.len()), tensors);
        let layout = entry.layout(table).map_err(Error::Argument)?;
        let file = self.create(&self.directory.join(&entry.file))?;
        self.output.write(&file, 0, |bytes| copy(&layout.header, bytes))?;
        let hashers = entry.tensors.iter().map(|_| BlockHasher::new()).collect();
        let ends = layout.tensors.iter().map(|t| t.start).collect();
        Ok(DataWriter { file, entry, layout, ends, hashers })
    }

    fn create(&mut self, path: &Path) -> Result<Arc<OutputFile>> {
        let file = OutputFile::create(&*self.files, path)?;
        self.created.push(path.into());
        Ok(file)
    }

    /// Files that cannot be removed are left for the next dump. The caller has an error to return already.
    pub fn remove_created(&mut self) {
        let _ = self.finish();
        for path in &self.created {
            let _ = self.files.remove(path);
        }
    }
}

/// The shards of a table, which are written one after the other.
pub(super) struct RowsWriter<'w, 'a> {
    writer: &'w mut Writer<'a>,
    entry: TableEntry,
    /// Of a record of `width` floats: those that are written.
    fields: &'w [Field],
    width: usize,
    columns: Vec<Column>,
    /// Number of rows of a shard.
    shard_rows: usize,
    /// Number of records that are best added at once.
    pub chunk_rows: usize,
    /// Number of rows that are missing.
    pub left: usize,
    /// A shard, and the number of rows that it misses.
    open: Option<(DataWriter, usize)>,
}

impl<'w, 'a> RowsWriter<'w, 'a> {
    /// `entry`: without its shards.
    pub fn new(
        writer: &'w mut Writer<'a>,
        entry: TableEntry,
        fields: &'w [Field],
        width: usize,
        shard_bytes: usize,
    ) -> RowsWriter<'w, 'a> {
        let columns = entry.columns();
        let row_bytes = entry.dim * entry.dtype.num_bytes();
        let record_bytes = KEY_BYTES + row_bytes + 4 * (width - entry.dim) + NUMBER_BYTES * columns.len();
        RowsWriter {
            writer,
            fields,
            width,
            columns,
            shard_rows: (shard_bytes / record_bytes).max(1),
            chunk_rows: (CHUNK_BYTES / record_bytes).max(1),
            left: entry.num_rows as usize,
            open: None,
            entry,
        }
    }

    /// Writes all records, and returns the entry with its shards. While a thread encodes and writes some records, the caller reads the next ones.
    ///
    /// `scan`: appends the records of a cursor, at most as many as are best added at once, and returns the next cursor. `num_written`: counts records.
    ///
    /// # Errors
    /// The errors of `scan`, of `add` and of `finish`.
    fn add_all(
        mut self,
        num_written: Option<&AtomicU64>,
        mut scan: impl FnMut(Cursor, &mut Records) -> Result<Option<Cursor>>,
    ) -> Result<TableEntry> {
        let room = self.chunk_rows.min(self.left);
        let width = self.width;
        let new_buffer = || {
            let keys = memory::with_capacity(room, BUFFER)?;
            let values = memory::with_capacity(room * width, BUFFER)?;
            Ok(Records { keys, values, ..Records::default() })
        };
        let (filled, next_filled) = mpsc::sync_channel::<Records>(1);
        let (added, next_added) = mpsc::channel();
        let add_each = move || {
            for records in next_filled {
                self.add(&records)?;
                if let Some(num_written) = num_written {
                    num_written.fetch_add(records.keys.len() as u64, Relaxed);
                }
                // The caller may have read all records.
                let _ = added.send(records);
            }
            self.finish()
        };
        thread::scope(|scope| {
            let adding = thread::Builder::new().name("sok-dump-encode".into()).spawn_scoped(scope, add_each);
            let adding = adding.map_err(|e| Error::State(format!("a dump cannot start a thread: {e}")))?;
            let mut scan_all = || {
                let (mut cursor, mut has_buffer) = (Some(Cursor::default()), false);
                while let Some(here) = cursor {
                    let mut records = match next_added.try_recv() {
                        Ok(records) => records,
                        Err(_) => match (new_buffer(), has_buffer) {
                            (Ok(records), _) => records,
                            // Without memory for another buffer, the thread gives one back.
                            (Err(error), true) => next_added.recv().map_err(|_| error)?,
                            (Err(error), false) => return Err(error),
                        },
                    };
                    has_buffer = true;
                    records.truncate(0);
                    cursor = scan(here, &mut records)?;
                    if filled.send(records).is_err() {
                        // The thread has ended with an error.
                        break;
                    }
                }
                Ok(())
            };
            let scanned = scan_all();
            drop(filled);
            let panicked = |_| Err(Error::State("a thread that writes a dump has panicked".into()));
            let entry = adding.join().unwrap_or_else(panicked);
            scanned.and(entry)
        })
    }

    /// Writes records.
    ///
    /// # Errors
    /// [`Error::State`] if there are too many; [`Error::Io`], [`Error::Memory`].
    pub fn add(&mut self, records: &Records) -> Result<()> {
        let RowsWriter { fields, width, columns, .. } = self;
        let (fields, width, count) = (*fields, *width, records.keys.len());
        let is_whole = |column: &Column| records.column(*column).len() == count;
        if count > self.left || records.values.len() != count * width || !columns.iter().all(is_whole) {
            return Err(self.changed());
        }
        self.left -= count;
        // A chunk may end one shard and begin the next.
        let mut start = 0;
        while start < count {
            let (shard, shard_left) = match &mut self.open {
                Some(shard) => shard,
                None => {
                    let rows = self.shard_rows.min(self.left + count - start);
                    let tensors = self.entry.tensors(rows);
                    self.open.insert((self.writer.open_data_file(tensors, Some(&self.entry.name))?, rows))
                }
            };
            let end = count.min(start + *shard_left);
            let output = &mut self.writer.output;
            shard.write(output, 0, |bytes| write_numbers(&records.keys[start..end], bytes))?;
            let values = &records.values[start * width..end * width];
            let types = std::iter::once(self.entry.dtype).chain(std::iter::repeat(RowType::Float32));
            for ((tensor, field), row_type) in (1..).zip(fields).zip(types) {
                shard.write(output, tensor, |bytes| write_field(values, width, field, row_type, bytes))?;
            }
            for (tensor, column) in (1 + fields.len()..).zip(&*columns) {
                let numbers = &records.column(*column)[start..end];
                shard.write(output, tensor, |bytes| write_numbers(numbers, bytes))?;
            }
            *shard_left -= end - start;
            start = end;
            if *shard_left == 0 {
                let shard = self.open.take().map(|(shard, _)| shard.finish(output));
                self.entry.shards.extend(shard.transpose()?);
            }
        }
        Ok(())
    }

    /// Returns the entry with its shards.
    ///
    /// # Errors
    /// [`Error::State`] if there were too few records.
    pub fn finish(self) -> Result<TableEntry> {
        if self.left > 0 { Err(self.changed()) } else { Ok(self.entry) }
    }

    fn changed(&self) -> Error {
        Error::State(format!("table `{}` must not change while it is dumped", self.entry.name))
    }
}

/// One safetensors file, all its tensors written at the same time, each front to back.
struct DataWriter {
    file: Arc<OutputFile>,
    entry: DataFile,
    layout: Layout,
    /// Where the next bytes of each tensor go.
    ends: Vec<u64>,
    hashers: Vec<BlockHasher>,
}

impl DataWriter {
    /// Writes the next bytes of a tensor. `fill`: as for [`Output::write`].
    fn write(
        &mut self,
        output: &mut Output,
        tensor: usize,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let (end, hasher) = (&mut self.ends[tensor], &mut self.hashers[tensor]);
        let start = *end;
        output.write(&self.file, start, |bytes| {
            fill(bytes)?;
            hasher.update(bytes);
            *end += bytes.len() as u64;
            Ok(())
        })
    }

    /// Has the file synced. Returns its entry.
    fn finish(mut self, output: &mut Output) -> Result<DataFile> {
        debug_assert!(
            self.ends.iter().eq(self.layout.tensors.iter().map(|t| &t.end)),
            "a tensor is not complete"
        );
        output.sync(self.file)?;
        self.entry.bytes = self.layout.bytes();
        self.entry.header = Checksum::of(&self.layout.header);
        for (tensor, hasher) in self.entry.tensors.iter_mut().zip(self.hashers) {
            tensor.blocks = hasher.finish();
        }
        Ok(self.entry)
    }
}

/// Replaces the contents of `to` with a copy of `from`.
fn copy(from: &[u8], to: &mut Vec<u8>) -> Result<()> {
    to.clear();
    memory::reserve(to, from.len(), BUFFER)?;
    to.extend_from_slice(from);
    Ok(())
}

/// Replaces `bytes` with keys, or the numbers of a column.
fn write_numbers(numbers: &[u64], bytes: &mut Vec<u8>) -> Result<()> {
    memory::resize(bytes, size_of_val(numbers), 0, BUFFER)?;
    for (number, bytes) in numbers.iter().zip(bytes.as_chunks_mut().0) {
        *bytes = number.to_le_bytes();
    }
    Ok(())
}

/// Replaces `bytes` with one field of records of `width` floats, as numbers of a type.
fn write_field(
    values: &[f32],
    width: usize,
    field: &Field,
    row_type: RowType,
    bytes: &mut Vec<u8>,
) -> Result<()> {
    let row_bytes = field.columns.len() * row_type.num_bytes();
    memory::resize(bytes, values.len() / width * row_bytes, 0, BUFFER)?;
    for (record, part) in values.chunks_exact(width).zip(bytes.chunks_exact_mut(row_bytes.max(1))) {
        row_type.write(&record[field.columns.clone()], part);
    }
    Ok(())
}
