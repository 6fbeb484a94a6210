//! The records of a table's file, read once: a block is checked before a record of it is used.

use super::checksum::BLOCK_BYTES;
use super::data_reader::{DataReader, check_all};
use super::{KEY_BYTES, LOAD_BYTES, NUMBER_BYTES};
use crate::contract::record::Field;
use crate::contract::records::{Column, Records};
use crate::error::Result;
use crate::memory;
use crate::pool;
use crate::row_type::RowType;

const BUFFER: &str = "the rows of a dump";
/// Number of records that a thread decodes at a time.
const DECODED: usize = 1024;

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

    /// Takes the bytes of the next rows, which have been read.
    fn take(&mut self, rows: usize) -> Result<Vec<u8>> {
        let end = rows * self.row_bytes;
        let rest = memory::copied(&self.bytes[end..], BUFFER)?;
        let mut bytes = std::mem::replace(&mut self.bytes, rest);
        bytes.truncate(end);
        Ok(bytes)
    }
}

/// Records that are not decoded: the bytes of each tensor.
pub(super) struct RawRecords<'a> {
    /// Of the keys, then of the fields, then of the columns.
    bytes: Vec<Vec<u8>>,
    fields: &'a [Field],
    /// Of the first field, the row. All others are float32.
    row_type: RowType,
    columns: Vec<Column>,
    /// Values of a record before its fields are read.
    first: &'a [f32],
}

impl RawRecords<'_> {
    /// Returns the records.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory), and the errors of [`pool::global`].
    pub fn decode(&self) -> Result<Records> {
        let (mut records, width) = (Records::default(), self.first.len());
        let rows = self.bytes[0].len() / KEY_BYTES;
        memory::reserve(&mut records.keys, rows, BUFFER)?;
        records.keys.extend(numbers_of(&self.bytes[0]));
        records.values = memory::filled(0.0, rows * width, BUFFER)?;
        let parts = records.values.chunks_mut((DECODED * width).max(1)).enumerate();
        let parts = memory::collect(parts, BUFFER)?;
        pool::global()?.run(parts, |(part, values)| self.read_values(part * DECODED, values));
        for (bytes, &column) in self.bytes[1 + self.fields.len()..].iter().zip(&self.columns) {
            memory::reserve(records.column_mut(column), rows, BUFFER)?;
            records.column_mut(column).extend(numbers_of(bytes));
        }
        Ok(records)
    }

    /// Reads the values of records from record `start` on.
    fn read_values(&self, start: usize, values: &mut [f32]) {
        let fields = self.fields.iter().zip(types(self.row_type)).zip(&self.bytes[1..]);
        for (record, values) in values.chunks_exact_mut(self.first.len()).enumerate() {
            values.copy_from_slice(self.first);
            for ((field, row_type), bytes) in fields.clone() {
                let row_bytes = row_type.num_bytes() * field.columns.len();
                let row = &bytes[(start + record) * row_bytes..][..row_bytes];
                row_type.read(row, &mut values[field.columns.clone()]);
            }
        }
    }
}

/// Reads the records of a file in their order.
pub(super) struct RecordReader<'a> {
    file: DataReader<'a>,
    fields: &'a [Field],
    row_type: RowType,
    columns: Vec<Column>,
    /// Of the keys, then of the fields, then of the columns.
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
    /// Reads the keys and `fields`, which are the tensors of the file from tensor 1 on. `row_type`: of the first field, the row. `first`: a
    /// record; its other fields stay as they are. Without fields, keys alone are read. `columns`: which columns to read. `vocabulary`:
    /// number of ids of a static table, and its name.
    ///
    /// # Errors
    /// [`Error::CorruptDump`](crate::Error::CorruptDump) if size or header of the file are wrong.
    pub fn new(
        file: DataReader<'a>,
        fields: &'a [Field],
        row_type: RowType,
        first: &'a [f32],
        columns: Vec<Column>,
        vocabulary: Option<(u64, &'a str)>,
    ) -> Result<RecordReader<'a>> {
        file.check_size()?;
        file.check_header()?;
        let of_fields = fields.iter().zip(types(row_type));
        let of_fields = of_fields.map(|(field, row_type)| row_type.num_bytes() * field.columns.len());
        let row_bytes = [KEY_BYTES].into_iter().chain(of_fields);
        let stream = |(tensor, row_bytes): (usize, usize)| {
            let place = &file.layout.tensors[tensor];
            let len = (place.end - place.start) as usize;
            Stream { tensor, row_bytes, bytes: Vec::new(), next: 0, len }
        };
        let place_of = |column: &Column| {
            let tensors = &file.entry.tensors;
            tensors.iter().position(|tensor| tensor.name == column.name()).map(|place| (place, NUMBER_BYTES))
        };
        let of_columns = columns.iter().filter_map(place_of);
        let streams = memory::collect(row_bytes.enumerate().chain(of_columns).map(stream), BUFFER)?;
        let left = file.entry.num_rows() as usize;
        let first = if fields.is_empty() { &[] } else { first };
        let chunk_rows = (LOAD_BYTES / (KEY_BYTES + 4 * first.len())).max(1);
        Ok(RecordReader { file, fields, row_type, columns, streams, first, vocabulary, left, chunk_rows })
    }

    /// Reads the next records, `None` after the last ones, when what was not read of the file is checked.
    ///
    /// # Errors
    /// [`Error::CorruptDump`](crate::Error::CorruptDump) names the block that is not as it was written, or a key that a static table has
    /// not.
    pub fn next(&mut self) -> Result<Option<RawRecords<'a>>> {
        if self.left == 0 {
            let is_read = |tensor: &usize| self.streams.iter().any(|stream| stream.tensor == *tensor);
            let mut rest = (0..self.file.layout.tensors.len()).filter(|tensor| !is_read(tensor));
            rest.try_for_each(|tensor| self.file.verify_tensor(tensor))?;
            return Ok(None);
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
        let bytes = self.streams.iter_mut().map(|stream| stream.take(rows)).collect::<Result<Vec<_>>>()?;
        if let Some((size, table)) = self.vocabulary
            && let Some(key) = numbers_of(&bytes[0]).find(|key| *key >= size)
        {
            let what = format!("table `{table}`: keys must be below `vocabulary_size` {size}: got {key}");
            return Err(self.file.corrupt(what));
        }
        let RecordReader { fields, row_type, first, .. } = *self;
        Ok(Some(RawRecords { bytes, fields, row_type, columns: self.columns.clone(), first }))
    }
}

fn numbers_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

/// The types of a record's fields: of the row, then of its states.
fn types(row_type: RowType) -> impl Iterator<Item = RowType> + Clone {
    std::iter::once(row_type).chain(std::iter::repeat(RowType::Float32))
}
