//! Copies of a table's records as arrays.

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use sok_core::contract::record::{Field, RecordLayout};
use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::{Cursor, Table};
use sok_core::error::Result;
use sok_core::memory;

use crate::numpy_out::{matrix, values, vector};

/// What memory is for.
const COPY: &str = "a copy of a table";
/// Records that are copied at once.
const AT_ONCE: usize = 1 << 16;

/// Keys in ascending order, their rows, their states by name, and the numbers of each column by its name.
pub type Exported<'py> = (
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray2<f32>>,
    Vec<(String, Bound<'py, PyArray2<f32>>)>,
    Vec<(String, Bound<'py, PyArray1<u64>>)>,
);

/// A copy of records.
pub struct RecordsCopy {
    records: Records,
    layout: RecordLayout,
    columns: &'static [Column],
    /// Indices into `records`, by ascending signed keys.
    order: Vec<u32>,
}

impl RecordsCopy {
    pub fn of_all(table: &dyn Table) -> Result<RecordsCopy> {
        let mut records = Self::room(table, table.len()?)?;
        let mut cursor = Some(Cursor::default());
        while let Some(at) = cursor {
            cursor = table.scan(at, AT_ONCE, &mut records)?;
        }
        Self::sorted(table, records)
    }

    /// Up to `num_rows` records from `start` on, and where the next ones begin.
    pub fn of_piece(
        table: &dyn Table,
        start: Cursor,
        num_rows: usize,
    ) -> Result<(RecordsCopy, Option<Cursor>)> {
        let mut records = Self::room(table, num_rows.min(table.len()?))?;
        let next = table.scan(start, num_rows, &mut records)?;
        Ok((Self::sorted(table, records)?, next))
    }

    /// The records that were made or changed since a snapshot; all of them if the table has no record of that.
    pub fn of_changed(table: &dyn Table, snapshot: Option<u64>) -> Result<RecordsCopy> {
        let Some(since) = snapshot.and_then(|snapshot| table.epoch_of(snapshot)) else {
            return Self::of_all(table);
        };
        let mut records = Self::room(table, table.num_changed(since)?)?;
        let mut cursor = Some(Cursor::default());
        while let Some(at) = cursor {
            cursor = table.scan_changed(since, at, AT_ONCE, &mut records)?;
        }
        Self::sorted(table, records)
    }

    fn room(table: &dyn Table, num_rows: usize) -> Result<Records> {
        let width = table.layout().width();
        Ok(Records {
            keys: memory::with_capacity(num_rows, COPY)?,
            values: memory::with_capacity(num_rows.saturating_mul(width), COPY)?,
            ..Records::default()
        })
    }

    fn sorted(table: &dyn Table, records: Records) -> Result<RecordsCopy> {
        let mut order = memory::collect(0..records.keys.len() as u32, COPY)?;
        order.sort_unstable_by_key(|&i| records.keys[i as usize] as i64);
        Ok(RecordsCopy { records, layout: table.layout(), columns: table.config().columns(), order })
    }

    /// The copy as arrays, with states if `states`.
    pub fn export<'py>(&self, py: Python<'py>, states: bool) -> PyResult<Exported<'py>> {
        let mut keys = vector(py, self.order.len())?;
        self.write_keys(values(&mut keys)?);
        let field = |field: &Field| -> PyResult<_> {
            let mut floats = matrix(py, self.order.len(), field.columns.len())?;
            self.write_field(field, values(&mut floats)?);
            Ok(floats)
        };
        let rows = field(&self.layout.fields()[0])?;
        let states = self.layout.states().iter().filter(|_| states);
        let states = states.map(|state| Ok((state.name.to_string(), field(state)?)));
        let columns =
            self.columns.iter().map(|&column| Ok((column.name().to_string(), self.column(py, column)?)));
        Ok((keys, rows, states.collect::<PyResult<_>>()?, columns.collect::<PyResult<_>>()?))
    }

    fn column<'py>(&self, py: Python<'py>, column: Column) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let mut numbers = vector(py, self.order.len())?;
        let ordered = self.order.iter().map(|&at| self.records.column(column)[at as usize]);
        values(&mut numbers)?.iter_mut().zip(ordered).for_each(|(to, number)| *to = number);
        Ok(numbers)
    }

    fn write_keys(&self, keys: &mut [i64]) {
        keys.iter_mut().zip(&self.order).for_each(|(key, &at)| *key = self.records.keys[at as usize] as i64);
    }

    fn write_field(&self, field: &Field, floats: &mut [f32]) {
        let width = self.layout.width();
        for (to, &at) in floats.chunks_exact_mut(field.columns.len().max(1)).zip(&self.order) {
            let record = &self.records.values[at as usize * width..][..width];
            to.copy_from_slice(&record[field.columns.clone()]);
        }
    }
}
