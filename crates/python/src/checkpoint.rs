//! Writes and reads dumps: tables of several groups, and arrays.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sok_core::checkpoint::{
    self, After, Array, DumpOptions, FrozenTables, LoadMode, LoadOptions, Manifest, Ranks, Target,
    TargetBinding,
};
use sok_core::contract::group::AnyGroup;
use sok_core::contract::table::{Contents, Table};
use sok_core::error::{Error, Result};
use sok_core::exchange::buckets::Owners;
use sok_core::exchange::message::Call;
use sok_core::formula::update::Update;

use crate::error::detached;
use crate::ranks;
use crate::shared_group::{GroupGuard, SharedGroup};
use crate::table::{Table as PyTable, parse};

/// `(name, safetensors dtype, shape, bytes)`
type ArrayTuple<'py> = (String, String, Vec<usize>, PyReadonlyArray1<'py, u8>);

/// As [`ArrayTuple`], returned to Python.
type StoredTuple<'py> = (String, String, Vec<usize>, Bound<'py, PyBytes>);

/// The distinct groups of tables, in the order of their addresses, so that two calls cannot deadlock.
fn groups(tables: &[PyRef<'_, PyTable>]) -> Vec<Arc<SharedGroup>> {
    let mut groups: Vec<_> = tables.iter().map(|t| t.group.clone()).collect();
    groups.sort_unstable_by_key(Arc::as_ptr);
    groups.dedup_by_key(|g| Arc::as_ptr(g));
    groups
}

fn lock(groups: &[Arc<SharedGroup>]) -> Result<Vec<GroupGuard<'_>>> {
    groups.iter().map(|group| group.settled()).collect()
}

/// Index of a table's group in `groups`, and its index there.
fn places(tables: &[PyRef<'_, PyTable>], groups: &[Arc<SharedGroup>]) -> Vec<(usize, usize)> {
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

/// What to dump.
#[derive(FromPyObject)]
struct Request<'py>(
    /// The directory.
    PathBuf,
    Vec<PyRef<'py, PyTable>>,
    Vec<ArrayTuple<'py>>,
    Options,
);

/// `(overwrite, step, states, since)`. `since`: an increment is written, of what has changed since the part of the dump with this step, or
/// since the newest one if it is negative. None: a whole dump.
#[derive(FromPyObject)]
struct Options(bool, u64, bool, Option<i64>);

impl Options {
    fn of_core(&self) -> DumpOptions<'static> {
        let &Options(overwrite, step, states, since) = self;
        let after = since.map(|since| u64::try_from(since).map_or(After::Newest, After::Step));
        DumpOptions { overwrite, after, step, states, ..DumpOptions::default() }
    }
}

/// Writes a dump. Returns its manifest as JSON.
#[pyfunction]
fn dump(py: Python<'_>, request: Request<'_>) -> PyResult<String> {
    let Request(path, tables, arrays, options) = request;
    let groups = groups(&tables);
    let places = places(&tables, &groups);
    let arrays = arrays.iter().map(array).collect::<PyResult<Vec<_>>>()?;
    detached(py, || {
        let mut locked = lock(&groups)?;
        let options = options.of_core();
        let tables = places.iter().map(|&(group, number)| {
            let group: &AnyGroup = &**locked[group];
            (group.table(number) as &dyn Contents, group.owners(number))
        });
        let ranks = ranks::ranks_for(Call::Dump);
        let manifest = write(&path, tables.collect(), &arrays, &options, ranks.as_ref())?;
        for &(group, number) in &places {
            // The dump is in place. Without memory for that, the next one must be a whole one.
            let _ = locked[group].table_mut(number).track(manifest.snapshot());
        }
        json(&manifest)
    })
}

/// Writes a dump. `tables`: each with its owners, if ranks share it.
fn write(
    path: &Path,
    tables: Vec<(&dyn Contents, Option<Owners>)>,
    arrays: &[Array],
    options: &DumpOptions,
    ranks: Option<&Ranks>,
) -> Result<Manifest> {
    let Some(ranks) = ranks else {
        let tables: Vec<&dyn Contents> = tables.into_iter().map(|(table, _)| table).collect();
        return checkpoint::dump(path, &tables, arrays, options);
    };
    let owned = tables.into_iter().map(|(table, owners)| Ok((table, owners.ok_or_else(made_before)?)));
    checkpoint::dump_of_ranks(path, &owned.collect::<Result<Vec<_>>>()?, arrays, options, ranks)
}

/// A dump of copies of tables and arrays, which are as they were when it was made.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct FrozenDump {
    work: Mutex<Option<FrozenWork>>,
    num_written: AtomicU64,
    num_rows: u64,
}

/// What a [`FrozenDump`] writes.
struct FrozenWork {
    path: PathBuf,
    tables: FrozenTables,
    owners: Vec<Option<Owners>>,
    arrays: Vec<Array<'static>>,
    options: DumpOptions<'static>,
    ranks: Option<Ranks>,
    groups: Vec<Arc<SharedGroup>>,
    places: Vec<(usize, usize)>,
}

#[pymethods]
impl FrozenDump {
    #[new]
    fn new(py: Python<'_>, request: Request<'_>) -> PyResult<FrozenDump> {
        let Request(path, tables, arrays, options) = request;
        let groups = groups(&tables);
        let places = places(&tables, &groups);
        let owned = |tuple| {
            let Array { name, dtype, shape, data } = array(tuple)?;
            PyResult::Ok(Array { name, dtype, shape, data: Cow::Owned(data.into_owned()) })
        };
        let arrays = arrays.iter().map(owned).collect::<PyResult<Vec<_>>>()?;
        detached(py, || {
            let mut locked = lock(&groups)?;
            let options = options.of_core();
            let owners = places.iter().map(|&(group, number)| locked[group].owners(number)).collect();
            let ranks = ranks::ranks_for(Call::Dump);
            let mut all: Vec<Vec<Option<&mut dyn Table>>> =
                locked.iter_mut().map(|group| group.tables_mut().into_iter().map(Some).collect()).collect();
            let mut tables: Vec<&mut dyn Table> =
                places.iter().filter_map(|&(group, number)| all[group][number].take()).collect();
            let tables = checkpoint::freeze(&path, &mut tables, &options, ranks.as_ref())?;
            let num_rows = tables.num_rows;
            drop(locked);
            let work = FrozenWork { path, tables, owners, arrays, options, ranks, groups, places };
            Ok(FrozenDump { work: Mutex::new(Some(work)), num_written: AtomicU64::new(0), num_rows })
        })
    }

    /// Writes the dump, once. Returns its manifest as JSON.
    fn write(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || {
            let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
            let work = work.ok_or_else(|| Error::State("a frozen dump is written once".into()))?;
            let options = DumpOptions { num_written: Some(&self.num_written), ..work.options };
            let contents = work.tables.contents.iter().map(|table| &**table);
            let tables = contents.zip(work.owners.iter().cloned()).collect();
            let manifest = write(&work.path, tables, &work.arrays, &options, work.ranks.as_ref())?;
            if let Ok(mut locked) = lock(&work.groups) {
                for &(group, number) in &work.places {
                    let table = locked[group].table_mut(number);
                    table.rename_snapshot(work.tables.snapshot, manifest.snapshot());
                }
            }
            json(&manifest)
        })
    }

    /// The numbers of rows that were written, and that there are.
    fn progress(&self) -> (u64, u64) {
        (self.num_written.load(Relaxed), self.num_rows)
    }
}

fn made_before() -> Error {
    Error::State(
        "a layer was made before `sok_keras.init`, so its tables are of this rank alone. Call `init` first"
            .into(),
    )
}

#[pyfunction]
fn read_manifest(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    detached(py, || json(&checkpoint::read_manifest(&path)?))
}

#[pyfunction]
fn compact(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    detached(py, || json(&checkpoint::compact(&path)?))
}

#[pyfunction]
fn verify(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    detached(py, || checkpoint::verify(&path))
}

/// A snapshot of a dump: all that it reads belongs to the manifest that was there when it was opened.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct DumpReader {
    inner: checkpoint::DumpReader,
}

#[pymethods]
impl DumpReader {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<DumpReader> {
        Ok(DumpReader { inner: detached(py, || checkpoint::DumpReader::open(&path))? })
    }

    /// As JSON.
    fn manifest(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || json(self.inner.manifest()))
    }

    /// `(name, dtype, shape, bytes)` of each, verified.
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Vec<StoredTuple<'py>>> {
        let arrays = detached(py, || self.inner.arrays())?;
        let bytes = |data: &[u8]| {
            PyBytes::new_with(py, data.len(), |to| {
                to.copy_from_slice(data);
                Ok(())
            })
        };
        arrays.into_iter().map(|a| Ok((a.name, a.dtype, a.shape, bytes(&a.data)?))).collect()
    }

    /// Reads into tables, by their names in the dump. Returns the report as JSON. `expected`: JSON of the update that will be bound to a
    /// table without one, where it is known.
    fn load(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        tables: Vec<PyRef<'_, PyTable>>,
        expected: Vec<Option<String>>,
        merge: bool,
        states: bool,
    ) -> PyResult<String> {
        let expected = expected.iter().map(|json| json.as_deref().map(parse).transpose());
        let expected = expected.collect::<PyResult<Vec<Option<Update>>>>()?;
        let groups = groups(&tables);
        let places = places(&tables, &groups).into_iter();
        let mut wanted: HashMap<_, _> = places.zip(names.iter().zip(expected)).collect();
        detached(py, || {
            let mut locked = lock(&groups)?;
            let mut targets = Vec::new();
            for (group, tables) in locked.iter_mut().enumerate() {
                let is_bound = tables.binding().is_some();
                let mut owners = (0..tables.num_tables())
                    .map(|number| tables.owners(number))
                    .collect::<Vec<_>>()
                    .into_iter();
                for (number, table) in tables.tables_mut().into_iter().enumerate() {
                    let owners = owners.next().flatten();
                    targets.extend(wanted.remove(&(group, number)).map(|(name, expected)| {
                        let binding =
                            if is_bound { TargetBinding::Bound } else { TargetBinding::Free(expected) };
                        Target { name, table, binding, owners }
                    }));
                }
            }
            let mode = if merge { LoadMode::Merge } else { LoadMode::Replace };
            let ranks = ranks::ranks_for(Call::Load);
            json(&self.inner.load(&mut targets, &LoadOptions { mode, states }, ranks.as_ref())?)
        })
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dump, module)?)?;
    module.add_class::<DumpReader>()?;
    module.add_class::<FrozenDump>()?;
    module.add_function(wrap_pyfunction!(compact, module)?)?;
    module.add_function(wrap_pyfunction!(read_manifest, module)?)?;
    module.add_function(wrap_pyfunction!(verify, module)?)
}
