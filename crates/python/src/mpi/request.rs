//! Messages under way, with the memory that MPI reads or writes meanwhile.

use std::ffi::c_int;

use sok_core::error::{Error, Result};
use sok_core::memory;

use super::functions::Mpi;
use super::handle::Handle;

/// Bytes that MPI moves at a time: its lengths are of 32 bits.
const PIECE: usize = 64 << 20;
const WHAT: &str = "a message of another rank";

/// Bytes under way.
pub struct Moving<H> {
    bytes: Vec<u8>,
    /// Number of the bytes when they have come.
    len: usize,
    /// Those that are not done.
    requests: Vec<H>,
}

impl<H: Handle> Moving<H> {
    /// Bytes that are here.
    pub fn here(bytes: Vec<u8>) -> Moving<H> {
        Moving { len: bytes.len(), bytes, requests: Vec::new() }
    }

    /// Starts to send bytes.
    pub fn send(mpi: &Mpi<H>, bytes: Vec<u8>, to: usize, tag: c_int) -> Result<Moving<H>> {
        let mut moving = Moving::here(bytes);
        for piece in moving.bytes.chunks(PIECE) {
            // SAFETY: the bytes are neither changed nor freed before `is_done`.
            let request = unsafe { mpi.send(piece, to, tag) }?;
            moving.requests.push(request);
        }
        Ok(moving)
    }

    /// Starts to receive `len` bytes.
    pub fn receive(mpi: &Mpi<H>, len: usize, from: usize, tag: c_int) -> Result<Moving<H>> {
        let mut bytes = Vec::new();
        memory::reserve(&mut bytes, len, WHAT)?;
        let mut moving = Moving { bytes, len, requests: Vec::new() };
        for piece in moving.bytes.spare_capacity_mut()[..len].chunks_mut(PIECE) {
            // SAFETY: room of that length, which is neither used nor freed before `is_done`.
            let request = unsafe { mpi.receive(piece.as_mut_ptr().cast(), piece.len(), from, tag) }?;
            moving.requests.push(request);
        }
        Ok(moving)
    }

    /// Whether all bytes have arrived.
    pub fn is_done(&mut self, mpi: &Mpi<H>) -> Result<bool> {
        while let Some(request) = self.requests.last_mut() {
            if !mpi.is_done(request)? {
                return Ok(false);
            }
            self.requests.pop();
        }
        Ok(true)
    }

    /// Returns the bytes, of which `is_done` has said that they have arrived.
    pub fn take(&mut self) -> Result<Vec<u8>> {
        if !self.requests.is_empty() {
            return Err(Error::Bug("bytes were taken that MPI still moves".into()));
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        if bytes.len() < self.len {
            // SAFETY: there is room for so many, and MPI has written them.
            unsafe { bytes.set_len(self.len) };
        }
        Ok(bytes)
    }
}

impl<H> Drop for Moving<H> {
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            // MPI may still use them.
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}

/// Where messages of any rank come in, one at a time.
pub struct Landing<H> {
    bytes: Vec<u8>,
    request: Option<H>,
}

impl<H: Handle> Landing<H> {
    /// Makes room for messages of at most `most` bytes.
    pub fn new(most: usize) -> Landing<H> {
        Landing { bytes: vec![0; most], request: None }
    }

    /// Returns the next message with this tag, if it has come. Bytes after its end are old ones.
    ///
    /// # Safety
    /// Messages with this tag are not longer than there is room for.
    pub unsafe fn next(&mut self, mpi: &Mpi<H>, tag: c_int) -> Result<Option<&[u8]>> {
        if self.request.is_none() {
            // SAFETY: the caller's promise. The bytes are neither used nor freed before `is_done`.
            self.request = unsafe { mpi.receive_any(self.bytes.as_mut_ptr(), self.bytes.len(), tag) }?;
        }
        let Some(request) = &mut self.request else { return Ok(None) };
        if !mpi.is_done(request)? {
            return Ok(None);
        }
        self.request = None;
        Ok(Some(&self.bytes))
    }
}

impl<H> Drop for Landing<H> {
    fn drop(&mut self) {
        if self.request.is_some() {
            // MPI may still write to them.
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}
