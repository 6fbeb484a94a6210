//! New tables for a layer, which are filled before they replace the old ones.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use numpy::{PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use sok_core::contract::record::RecordLayout;
use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::Table;
use sok_core::error::Result;
use sok_core::formula::update::Update;
use sok_core::memory;

use crate::error::{detached, to_python};
use crate::shared_group::SharedGroup;
use crate::table::{Group, as_keys, check_table, parse};

/// New tables, one for each table of a group, until `take_their_place`.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct FreshTables {
    group: Arc<SharedGroup>,
    tables: Mutex<Vec<Box<dyn Table>>>,
}

impl FreshTables {
    fn tables(&self) -> MutexGuard<'_, Vec<Box<dyn Table>>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl FreshTables {
    /// `seeds`: seed of each table. `updates`: JSON of the update whose states its records have.
    #[new]
    fn new(
        py: Python<'_>,
        group: &Group,
        seeds: Vec<u64>,
        updates: Vec<Option<String>>,
    ) -> PyResult<FreshTables> {
        let updates = updates.iter().map(|json| json.as_deref().map(parse).transpose());
        let updates = updates.collect::<PyResult<Vec<Option<Update>>>>()?;
        let group = group.inner.clone();
        let tables = detached(py, || {
            let locked = group.settled()?;
            check_table(seeds.len().max(1) as i64 - 1, locked.num_tables())?;
            let fresh = seeds.iter().zip(updates).enumerate().map(|(number, (seed, update))| {
                let mut fresh = locked.table(number).fresh(update, 0)?;
                fresh.set_seed(*seed);
                Ok(fresh)
            });
            fresh.collect::<Result<Vec<_>>>()
        })?;
        Ok(FreshTables { group, tables: Mutex::new(tables) })
    }

    /// Rows of a table.
    fn len(&self, py: Python<'_>, number: i64) -> PyResult<usize> {
        detached(py, || {
            let tables = self.tables();
            tables[check_table(number, tables.len())?].len()
        })
    }

    /// Sets the number of the step in progress, from which the scores of a table count.
    fn set_step(&self, py: Python<'_>, number: i64, step: u64) -> PyResult<()> {
        detached(py, || {
            let mut tables = self.tables();
            let number = check_table(number, tables.len())?;
            tables[number].set_step(step)
        })
    }

    /// Sets when commits were made, from which the ages of a table's rows count, as `Table.commit_times` returns it.
    fn set_commit_times(&self, py: Python<'_>, number: i64, times: Vec<(u64, u64)>) -> PyResult<()> {
        detached(py, || {
            let mut tables = self.tables();
            let number = check_table(number, tables.len())?;
            tables[number].set_commit_times(&times);
            Ok(())
        })
    }

    /// Inserts complete records, `(len(keys), dim + states)`; or rows, `(len(keys), dim)`, with states at their first values. `columns`: by
    /// name, a number for each record, `(len(keys),)`. A column that is not there has the numbers of new rows.
    fn add(
        &self,
        py: Python<'_>,
        number: i64,
        keys: PyReadonlyArray1<'_, i64>,
        values: PyReadonlyArray2<'_, f32>,
        columns: Vec<(String, PyReadonlyArray1<'_, u64>)>,
    ) -> PyResult<()> {
        let numbers = values.as_slice()?.iter().copied();
        let values = memory::collect(numbers, "the records of a call").map_err(to_python)?;
        let mut records = Records { keys: as_keys(&keys)?, values, ..Records::default() };
        for column in Column::ALL {
            if let Some((_, numbers)) = columns.iter().find(|(name, _)| name == column.name()) {
                *records.column_mut(column) =
                    memory::copied(numbers.as_slice()?, "the records of a call").map_err(to_python)?;
            }
        }
        detached(py, || {
            if let Some(owners) = self.group.lock()?.owners(check_table(number, usize::MAX)?) {
                records.keep(|key| owners.of(key) == owners.rank);
            }
            let mut tables = self.tables();
            let number = check_table(number, tables.len())?;
            let table = &mut tables[number];
            let layout = table.layout();
            if records.values.len() == records.keys.len() * layout.dim() {
                with_first_states(&mut records, &layout)?;
            }
            table.restore(&records)
        })
    }

    /// Replaces all tables of the group.
    fn take_their_place(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            let fresh = std::mem::take(&mut *self.tables());
            let mut group = self.group.lock()?;
            let mut numbered = fresh.into_iter().enumerate();
            numbered.try_for_each(|(number, table)| group.table_mut(number).replace_with(table))
        })
    }
}

/// Gives records of rows alone the first values of their states.
fn with_first_states(records: &mut Records, layout: &RecordLayout) -> Result<()> {
    let (dim, width, first) = (layout.dim(), layout.width(), layout.first_record());
    let mut values = memory::filled(0.0, records.keys.len() * width, "the records of a call")?;
    for (record, row) in values.chunks_exact_mut(width).zip(records.values.chunks_exact(dim)) {
        record.copy_from_slice(&first);
        record[..dim].copy_from_slice(row);
    }
    records.values = values;
    Ok(())
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<FreshTables>()
}
