//! One safetensors file of a dump, read and checked block by block.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::checksum::{BLOCK_BYTES, Checksum};
use super::data_file::{DataFile, Layout};
use crate::error::{Error, Result};
use crate::memory;
use crate::pool::{self, FirstError};

/// Blocks that are read and hashed side by side.
const VERIFIED_BLOCKS: usize = 8;

/// One safetensors file whose entry in the manifest adds up.
pub(super) struct DataReader<'a> {
    pub path: PathBuf,
    pub file: Arc<File>,
    pub entry: &'a DataFile,
    pub layout: Layout,
}

impl DataReader<'_> {
    pub fn corrupt(&self, what: String) -> Error {
        Error::corrupt_dump(&self.path, what)
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

    /// Reads and checks every byte.
    pub fn verify(&self) -> Result<()> {
        self.check_size()?;
        self.check_header()?;
        (0..self.layout.tensors.len()).try_for_each(|tensor| self.verify_tensor(tensor))
    }

    /// Reads and checks every byte of a tensor.
    pub fn verify_tensor(&self, tensor: usize) -> Result<()> {
        let place = &self.layout.tensors[tensor];
        let bytes = (place.end - place.start) as usize;
        let mut buffer = memory::filled(0, bytes.min(VERIFIED_BLOCKS * BLOCK_BYTES), "the blocks of a dump")?;
        for start in (0..bytes).step_by(buffer.len().max(1)) {
            let length = (bytes - start).min(buffer.len());
            let blocks = buffer[..length].chunks_mut(BLOCK_BYTES).zip(start / BLOCK_BYTES..).collect();
            check_all(blocks, |(bytes, block): (&mut [u8], usize)| {
                self.read(tensor, (block * BLOCK_BYTES) as u64, bytes)?;
                self.check_block(tensor, block, bytes)
            })?;
        }
        Ok(())
    }

    pub fn check_size(&self) -> Result<()> {
        let (expected, got) =
            (self.entry.bytes, self.file.metadata().map_err(|e| Error::io(&self.path, e))?.len());
        if got != expected {
            return Err(self.corrupt(format!("it must be of {expected} bytes: got {got}")));
        }
        Ok(())
    }

    pub fn check_header(&self) -> Result<()> {
        let mut header = vec![0; self.layout.header.len()];
        self.read_at(0, &mut header)?;
        let (expected, got) = (self.entry.header, Checksum::of(&header));
        if got != expected {
            return Err(self.corrupt(format!("the header's checksum must be {expected}: got {got}")));
        }
        if header != self.layout.header {
            return Err(self.corrupt("the header must describe the tensors that the manifest names".into()));
        }
        Ok(())
    }

    pub fn check_block(&self, tensor: usize, block: usize, bytes: &[u8]) -> Result<()> {
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

/// Checks all pieces side by side.
pub(super) fn check_all<T: Send>(pieces: Vec<T>, check: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    let error = FirstError::default();
    pool::global()?.run(pieces, |piece| error.note(check(piece)));
    error.into_result()
}
