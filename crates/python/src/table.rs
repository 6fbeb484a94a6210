//! Groups, tables, plans and optimizers as Python holds them: a line or three a method.

use std::path::PathBuf;
use std::sync::Arc;

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use sok_core::batch::Combiner;
use sok_core::error::{Error, Result};
use sok_core::host_group::HostGroup;
use sok_core::optimizer::Update;
use sok_core::table::{Cursor, Outcomes, Records, TableConfig};
use sok_cuda::device::Device;
use sok_cuda::gpu_group::GpuGroup;

use crate::error::{SokError, detached, to_python};
use crate::registry::{self, Axis, Group as GroupInner, PlanFeature};
use crate::tables::Tables;

pub fn parse<T: serde::de::DeserializeOwned>(json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|e| to_python(Error::argument(format!("{e} in {json}"))))
}

/// `(hit, inserted, filtered, evicted, refused)`
type OutcomesTuple = (u64, u64, u64, u64, u64);

fn outcomes_tuple(outcomes: Outcomes) -> OutcomesTuple {
    (outcomes.hit, outcomes.inserted, outcomes.filtered, outcomes.evicted, outcomes.refused)
}

/// The tables of one layer.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Group {
    pub inner: Arc<GroupInner>,
}

#[pymethods]
impl Group {
    /// `configs`: JSON of each table's configuration. `gpu`: number of the device that holds them; none: the host. `nvrtc`: where
    /// the compiler of its kernels may be.
    #[new]
    #[pyo3(signature = (configs, gpu=None, nvrtc=vec![]))]
    fn new(py: Python<'_>, configs: Vec<String>, gpu: Option<usize>, nvrtc: Vec<PathBuf>) -> PyResult<Group> {
        let configs = configs.iter().map(|json| parse::<TableConfig>(json)).collect::<PyResult<Vec<_>>>()?;
        let tables = detached(py, || match gpu {
            None => HostGroup::new(configs).map(|group| Tables::Host(Box::new(group))),
            Some(gpu) => Ok(Tables::Gpu(Box::new(GpuGroup::new(&Device::shared(gpu, &nvrtc)?, configs)?))),
        })?;
        Ok(Group { inner: Arc::new(GroupInner::new(tables)) })
    }

    #[getter]
    fn is_on_gpu(&self) -> bool {
        self.inner.is_on_gpu
    }

    /// Raises the error of a call that nobody has seen yet.
    fn raise_latched(&self) -> PyResult<()> {
        self.inner.take_latched().map_or(Ok(()), |error| Err(to_python(error)))
    }

    /// Keys refused since this was last asked, by table, where the check mode is "warn".
    fn take_refused(&self) -> Vec<(String, u64)> {
        self.inner.lock().take_refused()
    }

    fn is_bound(&self) -> bool {
        self.inner.lock().binding().is_some()
    }
}

/// One table of a group.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Table {
    pub group: Arc<GroupInner>,
    pub number: usize,
}

/// Rows and whether each was there.
type Found<'py> = (Bound<'py, PyArray2<f32>>, Bound<'py, PyArray1<bool>>);
type Exported<'py> =
    (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray2<f32>>, Vec<(String, Bound<'py, PyArray2<f32>>)>);

pub fn as_keys(keys: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<u64>> {
    Ok(keys.as_slice()?.iter().map(|&key| key as u64).collect())
}

#[pymethods]
impl Table {
    #[new]
    fn new(group: &Group, number: usize) -> Table {
        Table { group: group.inner.clone(), number }
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || self.group.lock().table(self.number).len())
    }

    /// Rows `(len(keys), dim)` and whether each was there.
    fn find<'py>(&self, py: Python<'py>, keys: PyReadonlyArray1<'_, i64>) -> PyResult<Found<'py>> {
        let keys = as_keys(&keys)?;
        let (rows, found, dim) = detached(py, || {
            let group = self.group.lock();
            let table = group.table(self.number);
            let dim = table.config().dim;
            let mut rows = vec![0.0; keys.len() * dim];
            let mut found = vec![false; keys.len()];
            table.find(&keys, &mut rows, &mut found)?;
            Ok((rows, found, dim))
        })?;
        Ok((matrix(py, rows, keys.len(), dim)?, PyArray1::from_vec(py, found)))
    }

    fn find_or_insert<'py>(
        &self,
        py: Python<'py>,
        keys: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, OutcomesTuple)> {
        let keys = as_keys(&keys)?;
        let (rows, outcomes, dim) = detached(py, || {
            let mut group = self.group.lock();
            let table = group.table_mut(self.number);
            let dim = table.config().dim;
            let mut rows = vec![0.0; keys.len() * dim];
            let outcomes = table.find_or_insert(&keys, &mut rows)?;
            Ok((rows, outcomes, dim))
        })?;
        Ok((matrix(py, rows, keys.len(), dim)?, outcomes_tuple(outcomes)))
    }

    fn assign(
        &self,
        py: Python<'_>,
        keys: PyReadonlyArray1<'_, i64>,
        rows: PyReadonlyArray2<'_, f32>,
        insert: bool,
    ) -> PyResult<OutcomesTuple> {
        let (keys, rows) = (as_keys(&keys)?, rows.as_slice()?);
        detached(py, || self.group.lock().table_mut(self.number).assign(&keys, rows, insert))
            .map(outcomes_tuple)
    }

    fn erase(&self, py: Python<'_>, keys: PyReadonlyArray1<'_, i64>) -> PyResult<usize> {
        let keys = as_keys(&keys)?;
        detached(py, || self.group.lock().table_mut(self.number).erase(&keys))
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.group.lock().table_mut(self.number).clear())
    }

    /// Keys ascending, their rows, and if asked their states by name.
    fn export<'py>(&self, py: Python<'py>, states: bool) -> PyResult<Exported<'py>> {
        let (records, width, dim, specs) = detached(py, || {
            let group = self.group.lock();
            let table = group.table(self.number);
            Ok((sorted_records(table)?, table.record_width(), table.config().dim, table.state_specs()))
        })?;
        let column = |start: usize, width_of: usize| -> Vec<f32> {
            records
                .values
                .chunks_exact(width)
                .flat_map(|record| &record[start..start + width_of])
                .copied()
                .collect()
        };
        let num_keys = records.keys.len();
        let keys = PyArray1::from_vec(py, records.keys.iter().map(|&key| key as i64).collect());
        let rows = matrix(py, column(0, dim), num_keys, dim)?;
        let mut start = dim;
        let mut named = Vec::new();
        for spec in specs.iter().filter(|_| states) {
            named.push((spec.name.to_string(), matrix(py, column(start, spec.width), num_keys, spec.width)?));
            start += spec.width;
        }
        Ok((keys, rows, named))
    }

    /// Of the first values of its rows.
    #[getter]
    fn seed(&self) -> u64 {
        self.group.lock().table(self.number).config().seed
    }

    /// The update whose states its records carry, as JSON.
    #[getter]
    fn update_rule(&self) -> PyResult<Option<String>> {
        let update = self.group.lock().table(self.number).update_rule().copied();
        update.map(|u| serde_json::to_string(&u).map_err(|e| SokError::new_err(e.to_string()))).transpose()
    }

    /// `size, capacity, (hit, inserted, filtered, evicted, refused), dropped_gradients, pending_pushes, native_calls, bytes`
    /// Without `waits` as of the last step that a device has told of.
    fn stats(&self, py: Python<'_>, waits: bool) -> PyResult<(u64, u64, OutcomesTuple, u64, u64, u64, u64)> {
        detached(py, || {
            let mut group = self.group.lock();
            let table = group.table(self.number);
            let stats = if waits { table.stats()? } else { table.recent_stats() };
            Ok((
                stats.size,
                stats.capacity,
                outcomes_tuple(stats.outcomes),
                stats.dropped_gradients,
                group.pending_pushes(waits)? as u64,
                stats.native_calls,
                stats.bytes + group.step_bytes() as u64 / group.num_tables().max(1) as u64,
            ))
        })
    }
}

fn matrix(
    py: Python<'_>,
    values: Vec<f32>,
    rows: usize,
    columns: usize,
) -> PyResult<Bound<'_, PyArray2<f32>>> {
    PyArray1::from_vec(py, values).reshape([rows, columns])
}

/// All records, keys ascending as signed integers.
fn sorted_records(table: &dyn sok_core::table::Table) -> Result<Records> {
    let mut all = Records::default();
    let mut cursor = Some(Cursor::default());
    while let Some(at) = cursor {
        cursor = table.scan(at, 1 << 16, &mut all)?;
    }
    let width = table.record_width();
    let mut order: Vec<u32> = (0..all.keys.len() as u32).collect();
    order.sort_unstable_by_key(|&i| all.keys[i as usize] as i64);
    let values = order.iter().flat_map(|&i| &all.values[i as usize * width..][..width]).copied().collect();
    Ok(Records { keys: order.iter().map(|&i| all.keys[i as usize]).collect(), values })
}

/// What a layer's call looks like; see `call.rs`.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Plan {
    #[pyo3(get)]
    handle: i64,
}

/// `(name, table, words, axis, weights, combiner, padding_key)` of a feature.
type FeatureTuple = (String, usize, bool, String, bool, String, Option<i64>);

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (group, features, check_finite=false))]
    fn new(group: &Group, features: Vec<FeatureTuple>, check_finite: bool) -> PyResult<Plan> {
        let features = features.into_iter().map(plan_feature).collect::<PyResult<Vec<_>>>()?;
        let tables = group.inner.lock();
        let dims = (0..tables.num_tables()).map(|t| tables.table(t).config().dim).collect();
        drop(tables);
        let plan = registry::Plan { group: group.inner.clone(), features, dims, check_finite };
        Ok(Plan { handle: registry::add_plan(plan).map_err(to_python)? })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        registry::remove_plan(self.handle);
    }
}

fn plan_feature(
    (name, table, words, axis, weights, combiner, padding_key): FeatureTuple,
) -> PyResult<PlanFeature> {
    let unknown = |what: &str, value: &str| to_python(Error::argument(format!("unknown {what} `{value}`")));
    let axis = match axis.as_str() {
        "each" => Axis::Each,
        "last" => Axis::Last,
        "ragged" => Axis::Ragged,
        other => return Err(unknown("axis", other)),
    };
    let combiner = match combiner.as_str() {
        "sum" => Combiner::Sum,
        "mean" => Combiner::Mean,
        "sqrtn" => Combiner::Sqrtn,
        other => return Err(unknown("combiner", other)),
    };
    let padding_key = padding_key.map(|key| key as u64);
    Ok(PlanFeature { name, table, words, axis, weights, combiner, padding_key })
}

/// An optimizer's part in the core: which groups it updates, and how.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Optimizer {
    #[pyo3(get)]
    handle: i64,
}

#[pymethods]
impl Optimizer {
    /// Binds the groups: their records get the states of their update (JSON of each).
    #[new]
    fn new(
        py: Python<'_>,
        groups: Vec<PyRef<'_, Group>>,
        updates: Vec<String>,
        needs_norm: bool,
        accumulates: bool,
    ) -> PyResult<Optimizer> {
        let updates = updates.iter().map(|json| parse::<Update>(json)).collect::<PyResult<Vec<_>>>()?;
        let groups = groups.iter().map(|g| g.inner.clone()).collect();
        let optimizer = registry::Optimizer { groups, updates, needs_norm, accumulates };
        let handle = registry::add_optimizer(optimizer).map_err(to_python)?;
        let bound = detached(py, || {
            let optimizer = registry::optimizer(handle)?;
            let mut groups = optimizer.groups.iter().zip(optimizer.bindings(handle));
            groups.try_for_each(|(group, binding)| group.lock().bind(binding))
        });
        bound.inspect_err(|_| registry::remove_optimizer(handle))?;
        Ok(Optimizer { handle })
    }
}

impl Drop for Optimizer {
    fn drop(&mut self) {
        registry::remove_optimizer(self.handle);
    }
}

/// Raises unless a layer of this process has the plan.
#[pyfunction]
fn check_plan(handle: i64) -> PyResult<()> {
    registry::plan(handle).map(|_| ()).map_err(to_python)
}

/// Raises unless an `OptimizerWrapper` of this process has the optimizer.
#[pyfunction]
fn check_optimizer(handle: i64) -> PyResult<()> {
    registry::optimizer(handle).map(|_| ()).map_err(to_python)
}

/// From the next call on, steps use `threads` threads.
#[pyfunction]
fn set_num_threads(threads: usize) -> PyResult<()> {
    sok_core::pool::set_num_threads(threads).map(|_| ()).map_err(to_python)
}

/// Name of an update's rule; names and widths of the states that it gives a record of a table of `dim`, in their order.
#[pyfunction]
fn states_of(update: &str, dim: usize) -> PyResult<(&'static str, Vec<(&'static str, usize)>)> {
    let update: Update = parse(update)?;
    update.validate().map_err(to_python)?;
    let states = update.rule.states(dim).iter().map(|s| (s.name, s.width)).collect();
    Ok((update.rule.name(), states))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Group>()?;
    module.add_class::<Table>()?;
    module.add_class::<Plan>()?;
    module.add_class::<Optimizer>()?;
    module.add_function(wrap_pyfunction!(check_plan, module)?)?;
    module.add_function(wrap_pyfunction!(check_optimizer, module)?)?;
    module.add_function(wrap_pyfunction!(set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(states_of, module)?)
}
