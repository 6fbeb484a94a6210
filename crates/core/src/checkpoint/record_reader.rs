//! The records of a table's file, read once: a block is checked before a record of it is used.

use super::checksum::BLOCK_BYTES;
use super::data_reader::{DataReader, check_all};
use super::{KEY_BYTES, LOAD_BYTES};
use crate::contract::record::Field;
use crate::contract::table::Records;
use crate::error::Result;
use crate::key::Key;
use crate::memory;

const BUFFER: &str = "the rows of a dump";

/// The bytes of a tensor, block by block.
struct Stream {
    /// Index of the tensor in the file.
    tensor: usize,
    /// Bytes of a row.
    row_bytes: usize,
    /// Bytes that were read and not used.
    bytes: Vec<u8>,
    /// Number of the next block.
    next: usize,
    /// Number of bytes of the tensor.
    len: usize,
}

impl Stream {
    /// Makes room for the blocks with the next rows. Returns, for each, its number and its memory.
    fn make_room(&mut self, rows: usize) -> Result<Vec<(usize, &mut [u8])>> {
        let (start, first) = (self.bytes.len(), self.next);
        let missing = (rows * self.row_bytes).saturating_sub(start).min(self.len - first * BLOCK_BYTES);
        self.next += missing.div_ceil(BLOCK_BYTES);
        let end = (self.next * BLOCK_BYTES).min(self.len);
        memory::resize(&mut self.bytes, start + end - (first * BLOCK_BYTES).min(end), 0, BUFFER)?;
        let blocks = self.bytes[start..].chunks_mut(BLOCK_BYTES).enumerate();
        memory::collect(blocks.map(|(i, block)| (first + i, block)), BUFFER)
    }
}

/// Reads the records of a file in their order.
pub(super) struct RecordReader<'a> {
    file: DataReader<'a>,
    fields: &'a [Field],
    /// Of the keys, then of the fields.
    streams: Vec<Stream>,
    /// Values of a record before its fields are read.
    first: &'a [f32],
    /// Number of ids of a static table, and its name.
    vocabulary: Option<(u64, &'a str)>,
    /// Number of rows that were not read yet.
    left: usize,
    /// Number of rows of a chunk.
    chunk_rows: usize,
}

impl<'a> RecordReader<'a> {
    /// Reads the keys and `fields`, which are the tensors of the file from tensor 1 on. `first`: a record; its other fields stay as they
    /// are. Without fields, keys alone are read. `vocabulary`: number of ids of a static table, and its name.
    ///
    /// # Errors
    /// [`Error::CorruptDump`](crate::Error::CorruptDump) if size or header of the file are wrong.
    pub fn new(
        file: DataReader<'a>,
        fields: &'a [Field],
        first: &'a [f32],
        vocabulary: Option<(u64, &'a str)>,
    ) -> Result<RecordReader<'a>> {
        file.check_size()?;
        file.check_header()?;
        let row_bytes = [KEY_BYTES].into_iter().chain(fields.iter().map(|field| 4 * field.columns.len()));
        let stream = |(tensor, row_bytes): (usize, usize)| {
            let place = &file.layout.tensors[tensor];
            let len = (place.end - place.start) as usize;
            Stream { tensor, row_bytes, bytes: Vec::new(), next: 0, len }
        };
        let streams = memory::collect(row_bytes.enumerate().map(stream), BUFFER)?;
        let left = file.entry.num_rows() as usize;
        let first = if fields.is_empty() { &[] } else { first };
        let chunk_rows = (LOAD_BYTES / (KEY_BYTES + 4 * first.len())).max(1);
        Ok(RecordReader { file, fields, streams, first, vocabulary, left, chunk_rows })
    }

    /// Reads the next records. Returns whether there are any; after the last ones, checks what was not read of the file.
    ///
    /// # Errors
    /// [`Error::CorruptDump`](crate::Error::CorruptDump) names the block that is not as it was written, or a key that a static table has
    /// not.
    pub fn next(&mut self, records: &mut Records) -> Result<bool> {
        records.keys.clear();
        records.values.clear();
        if self.left == 0 {
            return Ok(false);
        }
        let rows = self.chunk_rows.min(self.left);
        self.left -= rows;
        let file = &self.file;
        let mut blocks = Vec::new();
        for stream in &mut self.streams {
            let tensor = stream.tensor;
            for (number, memory) in stream.make_room(rows)? {
                memory::push(&mut blocks, (tensor, number, memory), BUFFER)?;
            }
        }
        check_all(blocks, |(tensor, number, bytes): (usize, usize, &mut [u8])| {
            file.read(tensor, (number * BLOCK_BYTES) as u64, bytes)?;
            file.check_block(tensor, number, bytes)
        })?;
        let width = self.first.len();
        memory::reserve(&mut records.keys, rows, BUFFER)?;
        memory::reserve(&mut records.values, rows * width, BUFFER)?;
        read_keys(&self.streams[0].bytes[..rows * KEY_BYTES], &mut records.keys);
        if let Some((size, table)) = self.vocabulary
            && let Some(key) = records.keys.iter().find(|key| **key >= size)
        {
            let what = format!("table `{table}`: keys must be below `vocabulary_size` {size}: got {key}");
            return Err(self.file.corrupt(what));
        }
        fill_records(&mut records.values, rows, self.first);
        for (stream, field) in self.streams[1..].iter().zip(self.fields) {
            read_field(&stream.bytes[..rows * stream.row_bytes], width, field, &mut records.values);
        }
        self.streams.iter_mut().for_each(|stream| drop(stream.bytes.drain(..rows * stream.row_bytes)));
        if self.left == 0 {
            let num_read = self.streams.len();
            let rest = num_read..self.file.layout.tensors.len();
            rest.into_iter().try_for_each(|tensor| self.file.verify_tensor(tensor))?;
        }
        Ok(true)
    }
}

fn read_keys(bytes: &[u8], keys: &mut Vec<Key>) {
    keys.extend(bytes.as_chunks().0.iter().map(|bytes| Key::from_le_bytes(*bytes)));
}

/// As many copies of `first` as there are rows.
fn fill_records(values: &mut Vec<f32>, rows: usize, first: &[f32]) {
    for _ in 0..rows {
        values.extend_from_slice(first);
    }
}

/// Fills one field of records of `width` floats.
fn read_field(bytes: &[u8], width: usize, field: &Field, values: &mut [f32]) {
    let parts = bytes.as_chunks().0.chunks_exact(field.columns.len().max(1));
    for (record, part) in values.chunks_exact_mut(width).zip(parts) {
        for (value, bytes) in record[field.columns.clone()].iter_mut().zip(part) {
            *value = f32::from_le_bytes(*bytes);
        }
    }
}
