//! A dump that is being read, which checks before it believes: no size in a file is used before it is known to add up.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checksum::{BLOCK_BYTES, Checksum};
use super::data_file::{DataFile, Tensor};
use super::data_reader::{DataReader, check_all};
use super::manifest::Manifest;
use super::names::MANIFEST;
use super::open::open_regular;
use super::writer::Array;
use crate::error::{Error, Result};
use crate::memory;

/// Files that stay open from the first look to the last byte, well below the 1024 that a process usually may open.
const HELD_FILES: usize = 256;
/// How often a dump that is replaced while it is read is read anew: the next dump took all its files away.
const ATTEMPTS: usize = 32;

/// What the dump in the directory `path` holds.
///
/// # Errors
/// [`Error::Io`] where there is no dump, [`Error::CorruptDump`] if the manifest was damaged, [`Error::DumpMismatch`]
/// if it is of another version.
pub fn read_manifest(path: &Path) -> Result<Manifest> {
    Ok(Manifest::read(&path.join(MANIFEST))?.0)
}

/// Reads every byte of every file of a dump.
///
/// # Errors
/// As [`read_manifest`]; [`Error::CorruptDump`] names the file, and the block that is not as it was written.
pub fn verify(path: &Path) -> Result<()> {
    with_snapshot(path, DumpReader::verify)
}

/// The arrays of a dump, as [`DumpReader::arrays`].
///
/// # Errors
/// [`Error::CorruptDump`], [`Error::Io`], [`Error::Memory`].
pub fn read_arrays(path: &Path) -> Result<Vec<Array<'static>>> {
    with_snapshot(path, DumpReader::arrays)
}

/// Does `work` on one dump, from its first byte to its last; on the next one if that took its files away meanwhile.
///
/// # Errors
/// As [`DumpReader::open`] and `work`; [`Error::DumpReplaced`] if it happens again and again.
pub(super) fn with_snapshot<T>(path: &Path, mut work: impl FnMut(&DumpReader) -> Result<T>) -> Result<T> {
    retried(|| work(&DumpReader::open(path)?))
}

fn retried<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(Error::DumpReplaced { .. }) => {}
            result => return result,
        }
    }
    attempt()
}

/// One dump, as its manifest was when it was opened. All that is read through it belongs together: its files are opened with
/// the manifest, and their names are drawn anew for each dump, so that a file that is opened later is this dump's or gone.
#[derive(Clone)]
pub struct DumpReader {
    pub(super) path: PathBuf,
    manifest: Manifest,
    /// Of the whole of `manifest.json`.
    checksum: Checksum,
    held: HashMap<String, Arc<File>>,
}

impl DumpReader {
    /// Opens the manifest and, of a dump with very many files, the first of them.
    ///
    /// # Errors
    /// As [`read_manifest`]; [`Error::CorruptDump`] if a file is not there, or no regular file; [`Error::DumpReplaced`] if new
    /// dumps keep taking the files away.
    pub fn open(path: &Path) -> Result<DumpReader> {
        retried(|| DumpReader::open_once(path))
    }

    fn open_once(path: &Path) -> Result<DumpReader> {
        let (manifest, checksum) = Manifest::read(&path.join(MANIFEST))?;
        let mut dump = DumpReader { path: path.into(), manifest, checksum, held: HashMap::new() };
        dump.held = dump.files(HELD_FILES)?;
        Ok(dump)
    }

    /// The first files, open.
    fn files(&self, most: usize) -> Result<HashMap<String, Arc<File>>> {
        let entries = self.manifest.files().take(most);
        entries.map(|(entry, _)| Ok((entry.file.clone(), self.file(&entry.file)?))).collect()
    }

    /// This dump with all of its files open: what reads through it cannot lose one to a new dump.
    ///
    /// # Errors
    /// As [`DumpReader::open`]; [`Error::State`] if the process may not open so many.
    pub(super) fn holding_all(&self) -> Result<Cow<'_, DumpReader>> {
        let count = self.manifest.files().count();
        if self.held.len() == count {
            return Ok(Cow::Borrowed(self));
        }
        let held = self.files(count).map_err(|error| match error {
            Error::Io { source, .. } if source.raw_os_error() == Some(libc::EMFILE) => Error::State(format!(
                "a merge holds all files of the dump open, here {count}: raise the limit on open files (`ulimit -n`)"
            )),
            error => error,
        })?;
        Ok(Cow::Owned(DumpReader { held, ..self.clone() }))
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads every byte of every file.
    ///
    /// # Errors
    /// [`Error::CorruptDump`] names the file, and the block that is not as it was written.
    pub fn verify(&self) -> Result<()> {
        self.check_sizes()?;
        self.manifest.files().try_for_each(|(entry, table)| self.open_file(entry, table)?.verify())
    }

    /// Checks the sizes of all files, before the bytes of any of them are read.
    pub(super) fn check_sizes(&self) -> Result<()> {
        self.manifest.files().try_for_each(|(entry, table)| self.open_file(entry, table)?.check_size())
    }

    /// The arrays of the newest part, widest dtype first, else in the order in which they were given; their file is verified.
    ///
    /// # Errors
    /// [`Error::CorruptDump`], [`Error::Io`], [`Error::Memory`], [`Error::DumpReplaced`].
    pub fn arrays(&self) -> Result<Vec<Array<'static>>> {
        let Some(entry) = self.manifest.last().arrays else { return Ok(Vec::new()) };
        let file = self.open_file(entry, None)?;
        file.check_size()?;
        file.check_header()?;
        let array = |(index, tensor): (usize, &Tensor)| {
            let mut data = zeros(&file.layout.tensors[index])?;
            file.read(index, 0, &mut data)?;
            let blocks = memory::collect(data.chunks(BLOCK_BYTES).enumerate(), "the blocks of an array")?;
            check_all(blocks, |(block, bytes)| file.check_block(index, block, bytes))?;
            let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
            Ok(Array { name, dtype: tensor.dtype.to_string(), shape, data: Cow::Owned(data) })
        };
        entry.tensors.iter().enumerate().map(array).collect()
    }

    pub(super) fn open_file<'a>(&self, entry: &'a DataFile, table: Option<&str>) -> Result<DataReader<'a>> {
        let path = self.path.join(&entry.file);
        let file = self.file(&entry.file)?;
        let layout = entry.layout(table).map_err(|what| Error::corrupt_dump(&path, what))?;
        Ok(DataReader { path, file, entry, layout })
    }

    fn file(&self, name: &str) -> Result<Arc<File>> {
        if let Some(file) = self.held.get(name) {
            return Ok(file.clone());
        }
        let path = self.path.join(name);
        match open_regular(&path) {
            Err(Error::Io { source, .. }) if is_gone(&source) => Err(self.missing(&path)),
            result => result.map(Arc::new),
        }
    }

    /// A file that is gone is no damage if there is a new manifest, which does not name it.
    fn missing(&self, path: &Path) -> Error {
        match Manifest::read(&self.path.join(MANIFEST)) {
            Ok((_, checksum)) if checksum != self.checksum => Error::DumpReplaced { path: self.path.clone() },
            Ok(_) => Error::corrupt_dump(path, "the manifest names this file, but it is not there"),
            Err(error) => error,
        }
    }
}

/// A network file system gives the second where another machine has removed the file.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESTALE)
}

/// Memory for a tensor, if the machine has it.
fn zeros(place: &Range<u64>) -> Result<Vec<u8>> {
    memory::filled(0, (place.end - place.start) as usize, "an array of a dump")
}
