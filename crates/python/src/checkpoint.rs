//! Dumps: the tables of several groups, and arrays, in and out of a directory.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard};

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sok_core::checkpoint::{self, Array, DumpOptions, LoadMode, LoadOptions};
use sok_core::error::{Error, Result};
use sok_core::table::Table;

use crate::error::detached;
use crate::registry::Group;
use crate::table::Table as PyTable;
use crate::tables::Tables;

/// `(name, safetensors dtype, shape, bytes)`
type ArrayTuple<'py> = (String, String, Vec<usize>, PyReadonlyArray1<'py, u8>);

/// As [`ArrayTuple`], on its way out.
type StoredTuple<'py> = (String, String, Vec<usize>, Bound<'py, PyBytes>);

/// Each group of the tables once, in the order of their addresses: two calls never wait for each other.
fn groups(tables: &[PyRef<'_, PyTable>]) -> Vec<Arc<Group>> {
    let mut groups: Vec<_> = tables.iter().map(|t| t.group.clone()).collect();
    groups.sort_unstable_by_key(Arc::as_ptr);
    groups.dedup_by_key(|g| Arc::as_ptr(g));
    groups
}

fn lock(groups: &[Arc<Group>]) -> Vec<MutexGuard<'_, Tables>> {
    groups.iter().map(|group| group.lock()).collect()
}

/// Where a table is: place of its group among `groups`, its number there.
fn places(tables: &[PyRef<'_, PyTable>], groups: &[Arc<Group>]) -> Vec<(usize, usize)> {
    let place =
        |t: &PyRef<'_, PyTable>| groups.iter().position(|g| Arc::ptr_eq(g, &t.group)).unwrap_or_default();
    tables.iter().map(|t| (place(t), t.number)).collect()
}

fn array<'a>((name, dtype, shape, data): &'a ArrayTuple<'_>) -> PyResult<Array<'a>> {
    let data = Cow::Borrowed(data.as_slice()?);
    Ok(Array { name: name.clone(), dtype: dtype.clone(), shape: shape.clone(), data })
}

fn json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::State(e.to_string()))
}

/// Writes a dump; gives its manifest as JSON.
#[pyfunction]
fn dump(
    py: Python<'_>,
    path: PathBuf,
    tables: Vec<PyRef<'_, PyTable>>,
    arrays: Vec<ArrayTuple<'_>>,
    overwrite: bool,
    step: u64,
) -> PyResult<String> {
    let groups = groups(&tables);
    let places = places(&tables, &groups);
    let arrays = arrays.iter().map(array).collect::<PyResult<Vec<_>>>()?;
    detached(py, || {
        let locked = lock(&groups);
        let tables: Vec<&dyn Table> =
            places.iter().map(|&(group, number)| locked[group].table(number)).collect();
        let options = DumpOptions { overwrite, step, ..DumpOptions::default() };
        json(&checkpoint::dump(&path, &tables, &arrays, &options)?)
    })
}

/// Reads a dump into tables, each named as in the dump; gives the report as JSON.
#[pyfunction]
fn load(
    py: Python<'_>,
    path: PathBuf,
    names: Vec<String>,
    tables: Vec<PyRef<'_, PyTable>>,
    merge: bool,
    states: bool,
) -> PyResult<String> {
    let groups = groups(&tables);
    let mut wanted: HashMap<(usize, usize), String> =
        places(&tables, &groups).into_iter().zip(names).collect();
    detached(py, || {
        let mut locked = lock(&groups);
        let mut targets: Vec<(String, &mut dyn Table)> = Vec::new();
        for (group, tables) in locked.iter_mut().enumerate() {
            for (number, table) in tables.tables_mut().into_iter().enumerate() {
                targets.extend(wanted.remove(&(group, number)).map(|name| (name, table)));
            }
        }
        let mut targets: Vec<(&str, &mut dyn Table)> =
            targets.iter_mut().map(|(n, t)| (n.as_str(), &mut **t)).collect();
        let mode = if merge { LoadMode::Merge } else { LoadMode::Replace };
        json(&checkpoint::load(&path, &mut targets, &LoadOptions { mode, states })?)
    })
}

#[pyfunction]
fn read_manifest(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    detached(py, || json(&checkpoint::read_manifest(&path)?))
}

#[pyfunction]
fn verify(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    detached(py, || checkpoint::verify(&path))
}

/// The arrays of a dump: `(name, dtype, shape, bytes)`, verified.
#[pyfunction]
fn read_arrays(py: Python<'_>, path: PathBuf) -> PyResult<Vec<StoredTuple<'_>>> {
    let arrays = detached(py, || checkpoint::read_arrays(&path))?;
    Ok(arrays.into_iter().map(|a| (a.name, a.dtype, a.shape, PyBytes::new(py, &a.data))).collect())
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dump, module)?)?;
    module.add_function(wrap_pyfunction!(load, module)?)?;
    module.add_function(wrap_pyfunction!(read_manifest, module)?)?;
    module.add_function(wrap_pyfunction!(verify, module)?)?;
    module.add_function(wrap_pyfunction!(read_arrays, module)?)
}
