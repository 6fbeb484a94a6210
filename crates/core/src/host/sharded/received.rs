//! Rows that came from their owners.

use crate::error::Result;
use crate::exchange::message::Reader;
use crate::host::sharded::requests::Request;
use crate::memory;
use crate::store::rows::{RecordNumber, Rows, RowsWithDim};

const WHAT: &str = "the rows of other ranks";

/// Rows by number, from 1. Row 0 is zeros.
#[derive(Default)]
pub struct ReceivedRows {
    values: Vec<f32>,
    dim: usize,
}

impl Rows for ReceivedRows {
    type Number = f32;

    #[inline(always)]
    fn row(&self, number: RecordNumber) -> &[f32] {
        &self.values[number as usize * self.dim..][..self.dim]
    }

    #[inline(always)]
    fn with_dim<const D: usize>(&self) -> RowsWithDim<'_, f32, D> {
        RowsWithDim::new(&self.values, self.dim)
    }
}

impl ReceivedRows {
    /// Room for all rows of a request.
    pub fn new(request: &Request, dim: usize) -> Result<ReceivedRows> {
        Ok(ReceivedRows { values: memory::filled(0.0, (request.num_rows() + 1) * dim, WHAT)?, dim })
    }

    /// Copies rows, one part after the other.
    pub fn copied(parts: [&[f32]; 2], dim: usize) -> Result<ReceivedRows> {
        let mut values = memory::filled(0.0, dim, WHAT)?;
        memory::reserve(&mut values, parts[0].len() + parts[1].len(), WHAT)?;
        parts.iter().for_each(|part| values.extend_from_slice(part));
        Ok(ReceivedRows { values, dim })
    }

    pub fn num_bytes(&self) -> usize {
        self.values.len() * 4
    }

    /// Reads the rows of a request that rank `from` owns. Returns the numbers of those that stand for missing keys.
    pub fn read(&mut self, request: &Request, from: usize, reader: &mut Reader) -> Result<Vec<RecordNumber>> {
        let first_silent = request.keys.len();
        let silent = request.silent.received_from(from);
        let parts =
            [request.keys.received_from(from), first_silent + silent.start..first_silent + silent.end];
        for part in &parts {
            reader.rows(&mut self.values[(part.start + 1) * self.dim..(part.end + 1) * self.dim])?;
        }
        if request.out_of_vocabulary.is_none() {
            return Ok(Vec::new());
        }
        let mut bits = Vec::new();
        let rows = || parts.iter().cloned().flatten();
        reader.numbers(rows().count().div_ceil(64), &mut bits)?;
        let is_missing = |(i, _): &(usize, usize)| bits[i / 64] >> (i % 64) & 1 == 1;
        memory::collect(rows().enumerate().filter(is_missing).map(|(_, row)| row as u32 + 1), WHAT)
    }

    /// Overwrites rows with row `source`.
    pub fn overwrite(&mut self, rows: &[RecordNumber], source: RecordNumber) {
        for &row in rows {
            let start = source as usize * self.dim;
            self.values.copy_within(start..start + self.dim, row as usize * self.dim);
        }
    }
}
