//! The way back, which checks before it believes: no size in a file is used before it is known to add up.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::checksum::{BLOCK_BYTES, Checksum};
use super::manifest::{DataFile, Layout, MANIFEST, Manifest, Tensor};
use super::writer::Array;
use crate::error::{Error, Result};

/// Blocks that are read and hashed side by side.
const VERIFIED_BLOCKS: usize = 8;
/// Files that stay open from the first look to the last byte, well below the 1024 that a process usually may open.
const HELD_FILES: usize = 256;

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
    Dump::open(path)?.verify()
}

/// The arrays of a dump, widest dtype first, else in the order in which they were given; their file is verified.
pub fn read_arrays(path: &Path) -> Result<Vec<Array<'static>>> {
    let dump = Dump::open(path)?;
    let Some(entry) = &dump.manifest.arrays else { return Ok(Vec::new()) };
    let file = dump.open_file(entry, None)?;
    file.check_size()?;
    file.check_header()?;
    let array = |(index, tensor): (usize, &Tensor)| {
        let mut data = zeros(&file.layout.tensors[index])?;
        file.read(index, 0, &mut data)?;
        data.par_chunks(BLOCK_BYTES)
            .enumerate()
            .try_for_each(|(b, bytes)| file.check_block(index, b, bytes))?;
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Ok(Array { name, dtype: tensor.dtype.to_string(), shape, data: Cow::Owned(data) })
    };
    entry.tensors.iter().enumerate().map(array).collect()
}

/// Memory for a tensor, if the machine has it.
fn zeros(place: &Range<u64>) -> Result<Vec<u8>> {
    let bytes = (place.end - place.start) as usize;
    let mut data = Vec::new();
    let no_memory = |_| Error::memory(bytes, "an array of a dump", ErrorKind::OutOfMemory.into());
    data.try_reserve_exact(bytes).map_err(no_memory)?;
    data.resize(bytes, 0);
    Ok(data)
}

/// A dump that is being read.
pub(super) struct Dump {
    pub path: PathBuf,
    pub manifest: Manifest,
    /// Files opened at once: a new dump that replaces this one meanwhile does not take them away.
    held: HashMap<String, File>,
}

impl Dump {
    pub fn open(path: &Path) -> Result<Dump> {
        let manifest_path = path.join(MANIFEST);
        let (mut manifest, mut bytes) = Manifest::read(&manifest_path)?;
        loop {
            let error = match hold_files(path, &manifest) {
                Ok(held) => return Ok(Dump { path: path.into(), manifest, held }),
                Err(error) => error,
            };
            // A file that is gone is no damage if the manifest has changed as well: start again with the new one.
            let new = Manifest::read(&manifest_path)?;
            if new.1 == bytes {
                return Err(error);
            }
            (manifest, bytes) = new;
        }
    }

    pub fn verify(&self) -> Result<()> {
        let mut buffer = vec![0; VERIFIED_BLOCKS * BLOCK_BYTES];
        self.manifest.files().try_for_each(|(entry, table)| self.open_file(entry, table)?.verify(&mut buffer))
    }

    pub fn open_file<'a>(&self, entry: &'a DataFile, table: Option<&str>) -> Result<DataReader<'a>> {
        let path = self.path.join(&entry.file);
        let file = match self.held.get(&entry.file) {
            Some(file) => file.try_clone().map_err(|e| Error::io(&path, e))?,
            None => open(&path)?,
        };
        let layout = entry.layout(table).map_err(|what| Error::CorruptDump { path: path.clone(), what })?;
        Ok(DataReader { path, file, entry, layout })
    }
}

fn hold_files(directory: &Path, manifest: &Manifest) -> Result<HashMap<String, File>> {
    let files = manifest.files().take(HELD_FILES);
    files.map(|(entry, _)| Ok((entry.file.clone(), open(&directory.join(&entry.file))?))).collect()
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::CorruptDump {
            path: path.into(),
            what: "the manifest names this file, but it is not there".into(),
        },
        _ => Error::io(path, e),
    })
}

/// One safetensors file whose entry in the manifest adds up.
pub(super) struct DataReader<'a> {
    pub path: PathBuf,
    file: File,
    pub entry: &'a DataFile,
    layout: Layout,
}

impl DataReader<'_> {
    pub fn corrupt(&self, what: String) -> Error {
        Error::CorruptDump { path: self.path.clone(), what }
    }

    /// Reads `bytes.len()` bytes of a tensor from its byte `start` on.
    pub fn read(&self, tensor: usize, start: u64, bytes: &mut [u8]) -> Result<()> {
        self.read_at(self.layout.tensors[tensor].start + start, bytes)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(bytes, offset).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                self.corrupt(format!("it must be of {} bytes, and ends before", self.entry.bytes))
            }
            _ => Error::io(&self.path, e),
        })
    }

    /// Every byte; `buffer` is a whole number of blocks.
    fn verify(&self, buffer: &mut [u8]) -> Result<()> {
        self.check_size()?;
        self.check_header()?;
        for (tensor, place) in self.layout.tensors.iter().enumerate() {
            for start in (0..place.end - place.start).step_by(buffer.len()) {
                let length = (place.end - place.start - start).min(buffer.len() as u64) as usize;
                let first = start as usize / BLOCK_BYTES;
                buffer[..length].par_chunks_mut(BLOCK_BYTES).enumerate().try_for_each(|(i, bytes)| {
                    self.read(tensor, start + (i * BLOCK_BYTES) as u64, bytes)?;
                    self.check_block(tensor, first + i, bytes)
                })?;
            }
        }
        Ok(())
    }

    fn check_size(&self) -> Result<()> {
        let (expected, got) =
            (self.entry.bytes, self.file.metadata().map_err(|e| Error::io(&self.path, e))?.len());
        if got != expected {
            return Err(self.corrupt(format!("it must be of {expected} bytes: got {got}")));
        }
        Ok(())
    }

    fn check_header(&self) -> Result<()> {
        let mut header = vec![0; self.layout.header.len()];
        self.read_at(0, &mut header)?;
        let (expected, got) = (self.entry.header, Checksum::of(&header));
        if got != expected {
            return Err(self.corrupt(format!("the header's checksum must be {expected}: got {got}")));
        }
        if header != self.layout.header {
            return Err(self.corrupt("the header must tell of the tensors that the manifest names".into()));
        }
        Ok(())
    }

    fn check_block(&self, tensor: usize, block: usize, bytes: &[u8]) -> Result<()> {
        let entry = &self.entry.tensors[tensor];
        let (expected, got) = (entry.blocks.0[block], Checksum::of(bytes));
        if got != expected {
            let start = self.layout.tensors[tensor].start + (block * BLOCK_BYTES) as u64;
            return Err(self.corrupt(format!(
                "the checksum of block {block} of `{}` (bytes {start} to {} of the file) must be {expected}: got {got}",
                entry.name,
                start + bytes.len() as u64
            )));
        }
        Ok(())
    }
}
