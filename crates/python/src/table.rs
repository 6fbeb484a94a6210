//! Groups, tables, plans and optimizers, as Python objects.

use std::path::PathBuf;
use std::sync::Arc;

use numpy::{PyArray1, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use sok_core::contract::batch::Combiner;
use sok_core::contract::binding::{OwnUpdate, UpdateMode};
use sok_core::contract::group::AnyGroup;
use sok_core::contract::profile::StepPart;
use sok_core::contract::records::Records;
use sok_core::contract::table::{Cursor, Explanation, Outcomes, TableConfig};
use sok_core::contract::tensor::Memory;
use sok_core::error::{Error, Result};
use sok_core::exchange::placement::Placement;
use sok_core::formula::update::Update;
use sok_core::host::group::HostGroup;
use sok_core::host::sharded::ShardedGroup;
use sok_core::memory;
use sok_core::policy::clock;
use sok_core::pool;
use sok_core::row_type::RowType;
use sok_cuda::device::Device;
use sok_cuda::gpu_group::GpuGroup;
use sok_cuda::gpu_group::sharded::ShardedGpuGroup;

use crate::call;
use crate::error::{SokError, detached, guarded, to_python};
use crate::fork;
use crate::numpy_out::{matrix, values, vector};
use crate::ranks;
use crate::records_copy::{Exported, RecordsCopy};
use crate::registry::{self, Axis, PlanFeature};
use crate::shared_group::SharedGroup;

pub fn parse<T: serde::de::DeserializeOwned>(json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|e| to_python(Error::argument(format!("{e} in {json}"))))
}

/// `(hit, inserted, filtered, evicted, expired, refused)`
type OutcomesTuple = (u64, u64, u64, u64, u64, u64);
type StatsTuple = (u64, u64, OutcomesTuple, u64, u64, u64, u64, u64);

fn outcomes_tuple(outcomes: Outcomes) -> OutcomesTuple {
    let Outcomes { hit, inserted, filtered, evicted, expired, refused } = outcomes;
    (hit, inserted, filtered, evicted, expired, refused)
}

/// The tables of one layer.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Group {
    pub inner: Arc<SharedGroup>,
}

#[pymethods]
impl Group {
    /// `configs`: JSON of each table's configuration. `gpu`: number of the device that holds them; none: the host. `nvrtc`, `nccl`: where
    /// the compiler of its kernels and NCCL may be. `placements`: JSON of the place of each table among the ranks; none: distributed.
    #[new]
    #[pyo3(signature = (configs, gpu=None, nvrtc=vec![], nccl=vec![], placements=vec![]))]
    fn new(
        py: Python<'_>,
        configs: Vec<String>,
        gpu: Option<usize>,
        nvrtc: Vec<PathBuf>,
        nccl: Vec<PathBuf>,
        placements: Vec<String>,
    ) -> PyResult<Group> {
        let configs = configs.iter().map(|json| parse::<TableConfig>(json)).collect::<PyResult<Vec<_>>>()?;
        let placements =
            placements.iter().map(|json| parse::<Placement>(json)).collect::<PyResult<Vec<_>>>()?;
        let tables = detached(py, || -> Result<Box<AnyGroup>> {
            if let Some(world) = ranks::world() {
                let (communicator, layer) = (world.communicator.clone(), world.next_layer());
                let placements = placements.into_iter().chain(std::iter::repeat(Placement::default()));
                let configs: Vec<_> = configs.into_iter().zip(placements).collect();
                let (blocks, row_type) = (world.merge_blocks, world.row_type);
                let open = |gpu| fork::check_gpu().and_then(|()| Device::shared(gpu, &nvrtc));
                if let Some((peers, device)) = world.peers(gpu.map(open).transpose(), &nccl, layer)? {
                    let group = ShardedGpuGroup::new(&device, configs, &peers, layer, blocks, row_type)?;
                    return Ok(Box::new(group));
                }
                return Ok(Box::new(ShardedGroup::new(configs, communicator, layer, blocks, row_type)?));
            }
            let Some(gpu) = gpu else { return Ok(Box::new(HostGroup::new(configs)?)) };
            fork::check_gpu()?;
            Ok(Box::new(GpuGroup::new(&Device::shared(gpu, &nvrtc)?, configs)?))
        })?;
        Ok(Group { inner: SharedGroup::new(tables) })
    }

    #[getter]
    fn is_on_gpu(&self) -> bool {
        self.inner.memory == Memory::Device
    }

    /// Raises the error of a call that was not raised yet.
    fn raise_latched(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.take_latched()?.map_or(Ok(()), Err))
    }

    /// Name and number of refused keys since the last call, of tables whose check mode is "warn".
    fn take_refused(&self, py: Python<'_>) -> PyResult<Vec<(String, u64)>> {
        detached(py, || Ok(self.inner.lock()?.take_refused()))
    }

    /// Starts to measure the parts of steps, or stops.
    fn measure(&self, py: Python<'_>, is_on: bool) -> PyResult<()> {
        detached(py, || {
            self.inner.lock()?.measure(is_on);
            Ok(())
        })
    }

    fn is_measured(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || Ok(self.inner.lock()?.is_measured()))
    }

    /// Name, runs and seconds of each part of a step since `measure` or the last call. Waits for a device.
    fn take_profile(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, u64, f64)>> {
        let profile = detached(py, || self.inner.lock()?.take_profile())?;
        let parts = StepPart::ALL.into_iter().map(|part| (part.name(), profile.get(part)));
        Ok(parts.map(|(name, part)| (name, part.runs, part.time.as_secs_f64())).collect())
    }

    fn is_bound(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || Ok(self.inner.lock()?.binding().is_some()))
    }
}

/// One table of a group.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Table {
    pub group: Arc<SharedGroup>,
    /// Below the group's number of tables.
    pub number: usize,
    dim: usize,
}

/// Keys, rows and scores.
type Evicted<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray2<f32>>, Bound<'py, PyArray1<u64>>);

/// Rows and whether each was there.
type Found<'py> = (Bound<'py, PyArray2<f32>>, Bound<'py, PyArray1<bool>>);

pub fn as_keys(keys: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<u64>> {
    let keys = keys.as_slice()?.iter().map(|&key| key as u64);
    memory::collect(keys, "the keys of a call").map_err(to_python)
}

#[pymethods]
impl Table {
    #[new]
    fn new(py: Python<'_>, group: &Group, number: i64) -> PyResult<Table> {
        let group = group.inner.clone();
        let (number, dim) = detached(py, || {
            let tables = group.lock()?;
            let number = check_table(number, tables.num_tables())?;
            Ok((number, tables.table(number).config().dim))
        })?;
        Ok(Table { group, number, dim })
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || self.group.settled()?.table(self.number).len())
    }

    /// Rows `(len(keys), dim)` and whether each was there.
    fn find<'py>(&self, py: Python<'py>, keys: PyReadonlyArray1<'_, i64>) -> PyResult<Found<'py>> {
        let keys = as_keys(&keys)?;
        let (mut rows, mut found) = (matrix(py, keys.len(), self.dim)?, vector(py, keys.len())?);
        let (into, was_there) = (values(&mut rows)?, values(&mut found)?);
        detached(py, || self.group.settled()?.table(self.number).find(&keys, into, was_there))?;
        Ok((rows, found))
    }

    fn find_or_insert<'py>(
        &self,
        py: Python<'py>,
        keys: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, OutcomesTuple)> {
        let keys = as_keys(&keys)?;
        let mut rows = matrix(py, keys.len(), self.dim)?;
        let into = values(&mut rows)?;
        let outcomes =
            detached(py, || self.group.lock()?.table_mut(self.number).find_or_insert(&keys, into))?;
        Ok((rows, outcomes_tuple(outcomes)))
    }

    fn assign(
        &self,
        py: Python<'_>,
        keys: PyReadonlyArray1<'_, i64>,
        rows: PyReadonlyArray2<'_, f32>,
        insert: bool,
    ) -> PyResult<OutcomesTuple> {
        let (keys, rows) = (as_keys(&keys)?, rows.as_slice()?);
        detached(py, || self.group.lock()?.table_mut(self.number).assign(&keys, rows, insert))
            .map(outcomes_tuple)
    }

    /// As `assign`, with the states of the optimizer. `values`: `(n, dim + states)`.
    fn assign_records(
        &self,
        py: Python<'_>,
        keys: PyReadonlyArray1<'_, i64>,
        values: PyReadonlyArray2<'_, f32>,
        insert: bool,
    ) -> PyResult<OutcomesTuple> {
        const WHAT: &str = "the records of a call";
        let (keys, values) = (as_keys(&keys)?, values.as_slice()?);
        detached(py, || {
            let mut group = self.group.lock()?;
            let table = group.table_mut(self.number);
            let (dim, width) = (table.layout().dim(), table.layout().width());
            if values.len() != keys.len() * width {
                let (values, keys) = (values.len(), keys.len());
                return Err(Error::argument(format!(
                    "records must have {width} numbers for each key. Received: {values} numbers for {keys} keys"
                )));
            }
            let rows = values.chunks_exact(width).flat_map(|record| &record[..dim]).copied();
            let mut rows = memory::collect(rows, WHAT)?;
            let outcomes = table.assign(&keys, &rows, insert)?;
            // Keys that were refused have no record. The table tells which only with their rows.
            let mut is_found = memory::filled(false, keys.len(), WHAT)?;
            table.find(&keys, &mut rows, &mut is_found)?;
            let found = || is_found.iter().enumerate().filter(|(_, found)| **found).map(|(place, _)| place);
            let records = Records {
                keys: memory::collect(found().map(|place| keys[place]), WHAT)?,
                values: memory::collect(
                    found().flat_map(|place| &values[place * width..(place + 1) * width]).copied(),
                    WHAT,
                )?,
                ..Records::default()
            };
            table.restore(&records)?;
            Ok(outcomes)
        })
        .map(outcomes_tuple)
    }

    fn erase(&self, py: Python<'_>, keys: PyReadonlyArray1<'_, i64>) -> PyResult<usize> {
        let keys = as_keys(&keys)?;
        detached(py, || self.group.lock()?.table_mut(self.number).erase(&keys))
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.group.lock()?.table_mut(self.number).clear())
    }

    /// The rank that owns each key, and whether all ranks have all rows.
    fn owners<'py>(
        &self,
        py: Python<'py>,
        keys: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<(Bound<'py, PyArray1<i64>>, bool)> {
        let keys = as_keys(&keys)?;
        let owners = detached(py, || Ok(self.group.lock()?.owners(self.number)))?;
        let mut ranks = vector(py, keys.len())?;
        let of = |key| owners.map_or(0, |owners| owners.of(key) as i64);
        values(&mut ranks)?.iter_mut().zip(keys).for_each(|(to, key)| *to = of(key));
        Ok((ranks, owners.is_some_and(|owners| owners.is_replicated())))
    }

    /// Keys in ascending order.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let keys = detached(py, || {
            let mut keys = self.group.settled()?.table(self.number).keys()?;
            keys.sort_unstable_by_key(|&key| key as i64);
            Ok(keys)
        })?;
        let mut array = vector(py, keys.len())?;
        values(&mut array)?.iter_mut().zip(keys).for_each(|(to, key)| *to = key as i64);
        Ok(array)
    }

    /// What the table knows about a key: `("present", score or None)`, `("filtered", sights)`, `("evicted", step)`,
    /// `("expired", step)` or `("absent", None)`.
    fn explain(&self, py: Python<'_>, key: i64) -> PyResult<(&'static str, Option<u64>)> {
        let explanation = detached(py, || self.group.settled()?.table(self.number).explain(key as u64))?;
        Ok(match explanation {
            Explanation::Present { score } => ("present", score),
            Explanation::Filtered { sights } => ("filtered", Some(sights.into())),
            Explanation::Evicted { step } => ("evicted", Some(step)),
            Explanation::Expired { step } => ("expired", Some(step)),
            Explanation::Absent => ("absent", None),
        })
    }

    /// Keys, rows and scores of the rows that the table has removed since the last call, in the order in which they went.
    fn take_evicted<'py>(&self, py: Python<'py>) -> PyResult<Evicted<'py>> {
        let records = detached(py, || self.group.lock()?.table_mut(self.number).take_evicted())?;
        let (mut keys, mut scores) = (vector(py, records.keys.len())?, vector(py, records.keys.len())?);
        let mut rows = matrix(py, records.keys.len(), self.dim)?;
        values(&mut keys)?.iter_mut().zip(&records.keys).for_each(|(to, key)| *to = *key as i64);
        values(&mut rows)?.copy_from_slice(&records.values);
        values(&mut scores)?.copy_from_slice(&records.scores);
        Ok((keys, rows, scores))
    }

    /// Number of the step in progress.
    #[getter]
    fn step(&self, py: Python<'_>) -> PyResult<u64> {
        detached(py, || self.group.lock()?.table(self.number).step())
    }

    /// When commits were made: times in milliseconds since 1970, each with how many commits were made since. Empty if rows have no time to
    /// live in milliseconds.
    fn commit_times(&self, py: Python<'_>) -> PyResult<Vec<(u64, u64)>> {
        detached(py, || Ok(self.group.settled()?.table(self.number).commit_times()))
    }

    /// Keys in ascending order, their rows, with `states` their states by name, and the numbers of each column by its name.
    fn export<'py>(&self, py: Python<'py>, states: bool) -> PyResult<Exported<'py>> {
        detached(py, || RecordsCopy::of_all(self.group.settled()?.table(self.number)))?.export(py, states)
    }

    /// Up to `num_rows` rows from `cursor` on, as `export` returns them, and where the next piece begins; None at the end.
    fn scan<'py>(
        &self,
        py: Python<'py>,
        cursor: u64,
        num_rows: usize,
        states: bool,
    ) -> PyResult<(Exported<'py>, Option<u64>)> {
        let (copy, next) = detached(py, || {
            RecordsCopy::of_piece(self.group.settled()?.table(self.number), Cursor(cursor), num_rows)
        })?;
        Ok((copy.export(py, states)?, next.map(|Cursor(next)| next)))
    }

    /// The rows that were made or changed since a snapshot, as `export` returns them; all rows if the table has no record of that. Then starts to
    /// record changes since `next`, a snapshot of now.
    fn changed<'py>(&self, py: Python<'py>, snapshot: Option<u64>, next: u64) -> PyResult<Exported<'py>> {
        let copy = detached(py, || {
            let mut group = self.group.settled()?;
            let copy = RecordsCopy::of_changed(group.table(self.number), snapshot)?;
            group.table_mut(self.number).track(next)?;
            Ok(copy)
        })?;
        copy.export(py, false)
    }

    /// Seed of first values.
    #[getter]
    fn seed(&self, py: Python<'_>) -> PyResult<u64> {
        detached(py, || Ok(self.group.lock()?.table(self.number).config().seed))
    }

    /// The update whose states its records have, as JSON.
    #[getter]
    fn update_rule(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let update = detached(py, || Ok(self.group.lock()?.table(self.number).update_rule().copied()))?;
        update.map(|u| serde_json::to_string(&u).map_err(|e| SokError::new_err(e.to_string()))).transpose()
    }

    /// `size, capacity, (hit, inserted, filtered, evicted, expired, refused), dropped_gradients, pending_pushes, native_calls, bytes, unknown_ids`
    /// Without `waits`, the counts are those of the last step that the device has reported.
    fn stats(&self, py: Python<'_>, waits: bool) -> PyResult<StatsTuple> {
        detached(py, || {
            let mut group = if waits { self.group.settled() } else { self.group.lock() }?;
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
                stats.unknown_ids,
            ))
        })
    }
}

pub fn check_table(number: i64, num_tables: usize) -> Result<usize> {
    let checked = usize::try_from(number).ok().filter(|&number| number < num_tables);
    checked.ok_or_else(|| {
        Error::argument(format!("`number` must be that of one of {num_tables} tables. Received: {number}"))
    })
}

/// Describes the tensors of a layer's call; see `call.rs`.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Plan {
    #[pyo3(get)]
    handle: i64,
}

/// `(name, table, words, axis, weights, scores, combiner, padding_key)` of a feature.
type FeatureTuple = (String, i64, bool, String, bool, bool, String, Option<i64>);

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (group, features, row_dtype="float32"))]
    fn new(py: Python<'_>, group: &Group, features: Vec<FeatureTuple>, row_dtype: &str) -> PyResult<Plan> {
        let group = group.inner.clone();
        detached(py, || {
            let tables = group.lock()?;
            let dims: Vec<usize> = (0..tables.num_tables()).map(|t| tables.table(t).config().dim).collect();
            drop(tables);
            let features = features.into_iter().map(|feature| plan_feature(feature, dims.len()));
            let features = features.collect::<Result<_>>()?;
            let row_type = RowType::ALL.into_iter().find(|row_type| row_type.name() == row_dtype);
            let row_type = row_type.ok_or_else(|| unknown("row dtype", row_dtype))?;
            let plan = registry::Plan { group, features, dims, row_type };
            Ok(Plan { handle: registry::add_plan(plan)? })
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        registry::remove_plan(self.handle);
    }
}

fn unknown(what: &str, value: &str) -> Error {
    Error::argument(format!("unknown {what} `{value}`"))
}

fn plan_feature(
    (name, table, words, axis, weights, scores, combiner, padding_key): FeatureTuple,
    num_tables: usize,
) -> Result<PlanFeature> {
    let table = check_table(table, num_tables)?;
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
    Ok(PlanFeature { name, table, words, axis, weights, scores, combiner, padding_key })
}

/// The groups that an optimizer updates, and its update of each.
#[pyclass(frozen, module = "sok_keras._native")]
pub struct Optimizer {
    #[pyo3(get)]
    handle: i64,
}

#[pymethods]
impl Optimizer {
    /// Binds the groups: their records get the states of their update (JSON of each). `others`: of each group, the updates of its tables' own
    /// optimizers, each with its row in the scalars of `apply`; row 0 is that of the model's optimizer. `mode`: which rows a step updates,
    /// `"local"`, `"global"` or `"lazy_global"`. `was_restored`: whether the variables of the optimizer were loaded.
    #[new]
    #[pyo3(signature = (groups, updates, needs_norm, accumulates, others=vec![], mode="local", was_restored=false))]
    #[expect(clippy::too_many_arguments, reason = "a call from Python, where they have names")]
    fn new(
        py: Python<'_>,
        groups: Vec<PyRef<'_, Group>>,
        updates: Vec<String>,
        needs_norm: bool,
        accumulates: bool,
        others: Vec<Vec<(String, usize)>>,
        mode: &str,
        was_restored: bool,
    ) -> PyResult<Optimizer> {
        let mode = match mode {
            "local" => UpdateMode::Local,
            "global" => UpdateMode::Global,
            "lazy_global" => UpdateMode::LazyGlobal,
            other => {
                return Err(to_python(Error::argument(format!("unknown update mode. Received: {other:?}"))));
            }
        };
        let own = |(json, row): (String, usize)| Ok(OwnUpdate { update: parse::<Update>(&json)?, row });
        let others = others.into_iter().chain(std::iter::repeat_with(Vec::new));
        let update = |(json, others): (&String, Vec<_>)| {
            let others = others.into_iter().map(own).collect::<PyResult<Vec<OwnUpdate>>>()?;
            Ok((parse::<Update>(json)?, others.into()))
        };
        let updates = updates.iter().zip(others).map(update).collect::<PyResult<Vec<_>>>()?;
        let groups: Vec<_> = groups.iter().map(|g| g.inner.clone()).collect();
        check_groups(&groups, updates.len()).map_err(to_python)?;
        let optimizer = registry::Optimizer {
            groups,
            updates,
            needs_norm,
            accumulates,
            mode,
            was_restored,
            bound_as: None,
        };
        let handle = registry::add_optimizer(optimizer).map_err(to_python)?;
        let bound = detached(py, || {
            let optimizer = registry::optimizer(handle)?;
            let mut groups = optimizer.groups.iter().zip(optimizer.bindings(handle));
            groups.try_for_each(|(group, binding)| group.lock()?.bind(binding))
        });
        bound.inspect_err(|_| registry::remove_optimizer(handle))?;
        Ok(Optimizer { handle })
    }

    /// The optimizer for some of its groups, by index. Their binding stays as it is.
    fn part(&self, numbers: Vec<usize>) -> PyResult<Optimizer> {
        let whole = registry::optimizer(self.handle).map_err(to_python)?;
        let chosen = || numbers.iter().copied();
        if chosen().any(|number| number >= whole.groups.len()) {
            return Err(to_python(Error::argument("`numbers` must be indices of groups".to_string())));
        }
        let part = registry::Optimizer {
            groups: chosen().map(|number| whole.groups[number].clone()).collect(),
            updates: chosen().map(|number| whole.updates[number].clone()).collect(),
            needs_norm: whole.needs_norm,
            accumulates: whole.accumulates,
            mode: whole.mode,
            was_restored: whole.was_restored,
            bound_as: Some(whole.bound_as.unwrap_or(self.handle)),
        };
        check_groups(&part.groups, part.updates.len()).map_err(to_python)?;
        Ok(Optimizer { handle: registry::add_optimizer(part).map_err(to_python)? })
    }
}

/// Checks that groups are distinct and that each has an update: a step locks each group once.
fn check_groups(groups: &[Arc<SharedGroup>], num_updates: usize) -> Result<()> {
    let mut addresses: Vec<_> = groups.iter().map(Arc::as_ptr).collect();
    addresses.sort_unstable();
    addresses.dedup();
    if addresses.len() < groups.len() || num_updates != groups.len() {
        return Err(Error::argument(format!(
            "`groups` must be different ones, with an update each. Received: {} of {} different ones, {num_updates} updates",
            addresses.len(),
            groups.len()
        )));
    }
    Ok(())
}

/// Drops committed pushes of an optimizer whose step has failed.
#[pyfunction]
fn drop_committed(py: Python<'_>, handle: i64) -> PyResult<()> {
    detached(py, || call::drop_committed(handle))
}

impl Drop for Optimizer {
    fn drop(&mut self) {
        registry::remove_optimizer(self.handle);
    }
}

/// Raises if no layer of this process has the plan.
#[pyfunction]
fn check_plan(py: Python<'_>, handle: i64) -> PyResult<()> {
    detached(py, || registry::plan(handle).map(|_| ()))
}

/// Raises if no `OptimizerWrapper` of this process has the optimizer.
#[pyfunction]
fn check_optimizer(py: Python<'_>, handle: i64) -> PyResult<()> {
    detached(py, || registry::optimizer(handle).map(|_| ()))
}

/// Sets the number of threads of later calls, 1 to 1024.
#[pyfunction]
fn set_num_threads(threads: &Bound<'_, PyAny>) -> PyResult<()> {
    guarded(|| {
        let text = match threads.extract::<usize>() {
            Ok(threads) => threads.to_string(),
            Err(_) => threads.repr()?.to_string(),
        };
        let set = || pool::set_num_threads(pool::parse_threads("`threads`", &text)?);
        set().map(|_| ()).map_err(to_python)
    })
}

/// Name of an update's rule, and names and widths of its states for a table of `dim`, in order.
#[pyfunction]
fn states_of(update: &str, dim: usize) -> PyResult<(&'static str, Vec<(&'static str, usize)>)> {
    let update: Update = parse(update)?;
    guarded(|| {
        update.validate().map_err(to_python)?;
        let states = update.rule.states(dim).iter().map(|s| (s.name, s.width)).collect();
        Ok((update.rule.name(), states))
    })
}

/// Stops the clock of policies at a time in milliseconds since 1970. None: it follows that of the system again.
#[pyfunction]
fn set_clock(now: Option<u64>) {
    clock::set(now);
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(set_clock, module)?)?;
    module.add_class::<Group>()?;
    module.add_class::<Table>()?;
    module.add_class::<Plan>()?;
    module.add_class::<Optimizer>()?;
    module.add_function(wrap_pyfunction!(check_plan, module)?)?;
    module.add_function(wrap_pyfunction!(check_optimizer, module)?)?;
    module.add_function(wrap_pyfunction!(drop_committed, module)?)?;
    module.add_function(wrap_pyfunction!(set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(states_of, module)?)
}
