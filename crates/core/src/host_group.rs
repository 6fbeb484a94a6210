//! Tables that are looked up together: the four calls of a training step on the CPU.
//!
//! `lookup` finds the rows and remembers where they are, `push` brings the gradients back under a number, `commit` learns
//! from a ticket which pushes count, `apply` updates the records. See `docs/design.md`, "One training step".

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::arena::RecordNumber;
use crate::batch::Feature;
use crate::error::{Error, Result};
use crate::exact_sum::ExactSum;
use crate::host_table::HostTable;
use crate::lookup::{
    FeatureOutput, Looked, Mode, admit, check_capacity, check_vocabulary, lookup_whole, new_keys,
};
use crate::lookup_split::lookup_split;
use crate::math::sum_of_squares;
use crate::merge::{HeldGradients, MergedGradients, StoredGradients, is_finite, merge};
use crate::optimizer::{Update, UpdateScalars, clipnorm_factor};
use crate::pool::Pool;
use crate::region::Region;
use crate::runs::KeyRuns;
use crate::table::{Outcomes, Table, TableConfig};
use crate::ticket::{Named, PushRing, RING, write_ticket};
use crate::update::UpdateTask;

/// Below this many ids a call is done by its own thread: waking others takes as long.
const SMALL_CALL: usize = 2048;
/// Output beyond this many bytes is stored past the cache.
const STREAM_BYTES: usize = 4 << 20;
/// Pieces of work a thread: enough to even out.
const PIECES: usize = 4;

/// Keeps a framework's gradients readable until it is dropped.
pub type Keep = Box<dyn Any + Send + Sync>;

/// The gradient of a feature's output as a framework holds it, `(bags, dim)`.
#[derive(Clone, Copy)]
pub struct GradientRows {
    data: *const f32,
    len: usize,
}

#[allow(unsafe_code)]
mod gradient_rows {
    use super::GradientRows;

    // SAFETY: read-only floats; how long they live is the promise of `new`'s caller.
    unsafe impl Send for GradientRows {}
    // SAFETY: as above.
    unsafe impl Sync for GradientRows {}

    impl GradientRows {
        /// # Safety
        /// `data` holds `len` floats, which nobody writes to until the call to which they are given returns or, if a `Keep`
        /// is given with them, until that is dropped.
        pub unsafe fn new(data: *const f32, len: usize) -> GradientRows {
            GradientRows { data, len }
        }

        pub(super) fn get(&self) -> &[f32] {
            if self.len == 0 {
                return &[];
            }
            // SAFETY: the promise of `new`'s caller; the group drops them with their `Keep`.
            unsafe { std::slice::from_raw_parts(self.data, self.len) }
        }
    }
}

/// What a lookup remembers.
struct SavedLookup {
    number: u64,
    num_bags: Vec<usize>,
    /// One a table that took part: its number in the group, its generation then, and what was found.
    tables: Vec<(usize, u64, Looked)>,
}

enum Gradients {
    /// By feature, as the framework has them.
    Held { rows: Vec<GradientRows>, _keep: Keep },
    /// By run of the lookup's tables, merged.
    Merged(Vec<Vec<Region<f32>>>),
}

struct Push {
    lookup: Arc<SavedLookup>,
    gradients: Gradients,
}

/// Merged gradients of several pushes, by record.
#[derive(Default)]
struct Accumulator {
    places: HashMap<RecordNumber, u32>,
    records: Vec<RecordNumber>,
    /// `(records, dim)`
    sums: Vec<f32>,
    generation: u64,
}

impl Accumulator {
    fn add(&mut self, gradients: &impl MergedGradients, dim: usize) {
        let mut merged = vec![0.0; dim];
        for (key, &record) in gradients.records().iter().enumerate() {
            gradients.merge::<0>(key, &mut merged);
            let next = self.records.len() as u32;
            let place = *self.places.entry(record).or_insert(next);
            if place == next {
                self.records.push(record);
                self.sums.extend_from_slice(&merged);
            } else {
                let sum = &mut self.sums[place as usize * dim..][..dim];
                sum.iter_mut().zip(&merged).for_each(|(s, g)| *s += *g);
            }
        }
    }
}

/// The optimizer of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Binding {
    /// Tells optimizers apart.
    pub owner: u64,
    pub update: Update,
    /// `commit` is to give the squared norm.
    pub needs_norm: bool,
}

/// The scalars of an `apply`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ApplyScalars {
    pub update: UpdateScalars,
    /// False: the committed gradients are only accumulated.
    pub is_update: bool,
}

/// Tables that are looked up together, with all that is on its way to them.
pub struct HostGroup {
    tables: Vec<HostTable>,
    binding: Option<Binding>,
    next_lookup: u64,
    lookups: VecDeque<Arc<SavedLookup>>,
    ring: PushRing<Push>,
    committed: Vec<(f32, Push)>,
    accumulators: Vec<Accumulator>,
    /// Squared norm of what is committed, by table.
    norms: Vec<f32>,
    pushes_without_optimizer: u32,
    spare: Vec<KeyRuns>,
}

impl HostGroup {
    pub fn new(configs: Vec<TableConfig>) -> Result<HostGroup> {
        let tables = configs.into_iter().map(HostTable::new).collect::<Result<Vec<_>>>()?;
        Ok(HostGroup {
            accumulators: tables.iter().map(|_| Accumulator::default()).collect(),
            norms: vec![0.0; tables.len()],
            tables,
            binding: None,
            next_lookup: 1,
            lookups: VecDeque::new(),
            ring: PushRing::default(),
            committed: Vec::new(),
            pushes_without_optimizer: 0,
            spare: Vec::new(),
        })
    }

    pub fn num_tables(&self) -> usize {
        self.tables.len()
    }

    pub fn table(&self, number: usize) -> &dyn Table {
        &self.tables[number]
    }

    pub fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        &mut self.tables[number]
    }

    pub fn tables_mut(&mut self) -> impl Iterator<Item = &mut dyn Table> {
        self.tables.iter_mut().map(|t| t as &mut dyn Table)
    }

    pub fn names(&self) -> String {
        self.tables.iter().map(|t| format!("`{}`", t.config.name)).collect::<Vec<_>>().join(", ")
    }

    pub fn pending_pushes(&self) -> usize {
        self.ring.len()
    }

    /// Memory that steps keep.
    pub fn step_bytes(&self) -> usize {
        let looked = self.lookups.iter().flat_map(|l| &l.tables).flat_map(|(_, _, looked)| &looked.runs);
        let merged =
            self.ring.iter().chain(self.committed.iter().map(|(_, p)| p)).map(|p| match &p.gradients {
                Gradients::Merged(tables) => tables.iter().flatten().map(Region::num_bytes).sum(),
                Gradients::Held { .. } => 0,
            });
        let accumulated = self.accumulators.iter().map(|a| a.sums.capacity() * 4);
        let traces = self.lookups.iter().flat_map(|l| &l.tables).flat_map(|(_, _, looked)| &looked.traces);
        let traced: usize = traces.map(|(_, trace)| trace.num_bytes()).sum();
        looked.map(KeyRuns::num_bytes).sum::<usize>()
            + traced
            + merged.sum::<usize>()
            + accumulated.sum::<usize>()
    }

    /// Keys refused since this was last asked, by table, where the check mode says to warn.
    pub fn take_refused(&mut self) -> Vec<(String, u64)> {
        let take = |t: &mut HostTable| (t.config.name.clone(), std::mem::take(&mut t.refused_to_warn));
        self.tables.iter_mut().map(take).filter(|(_, refused)| *refused > 0).collect()
    }

    // ---- lookup

    /// Rows of all features of a layer's call. Gives the lookup's number, for `push`; 0 without `save`.
    ///
    /// `outputs`: `(bags, dim)` of each feature, all of it written.
    ///
    /// # Errors
    /// Lengths that do not add up, ids outside a static table, a table that is full and asked to say so: nothing has changed.
    pub fn lookup(
        &mut self,
        features: &[Feature],
        insert: bool,
        save: bool,
        outputs: Vec<&mut [f32]>,
        pool: &Pool,
    ) -> Result<u64> {
        self.check_features(features, &outputs)?;
        let admitted = if insert { self.admit_new_keys(features)? } else { vec![None; self.tables.len()] };
        let stream = outputs.iter().map(|o| size_of_val(&**o)).sum::<usize>() > STREAM_BYTES;
        let mut by_table: Vec<Vec<FeatureOutput>> = self.tables.iter().map(|_| Vec::new()).collect();
        for (number, (feature, rows)) in features.iter().zip(outputs).enumerate() {
            by_table[feature.table].push(FeatureOutput { number, feature: *feature, rows });
        }
        let number = if save { self.next_lookup } else { 0 };
        let looked = self.lookup_tables(by_table, &admitted, Mode { insert, save, stream }, pool)?;
        for (table, _, looked) in &looked {
            let mut outcomes = looked.outcomes;
            if let Some(admitted) = &admitted[*table] {
                outcomes.hit = outcomes.hit.saturating_sub(admitted.inserted);
                outcomes += *admitted;
            }
            self.tables[*table].note(
                if save { outcomes } else { Outcomes { hit: 0, ..outcomes } },
                looked.dropped_gradients,
            );
            self.tables[*table].count_call();
        }
        if save {
            let num_bags = features.iter().map(Feature::num_bags).collect();
            self.save(SavedLookup { number, num_bags, tables: looked });
        }
        Ok(number)
    }

    fn check_features(&self, features: &[Feature], outputs: &[&mut [f32]]) -> Result<()> {
        if features.len() != outputs.len() {
            let (features, outputs) = (features.len(), outputs.len());
            return Err(Error::argument(format!(
                "a lookup has an output a feature. Received: {outputs} for {features} features"
            )));
        }
        for (feature, output) in features.iter().zip(outputs) {
            feature.validate()?;
            let table = self
                .tables
                .get(feature.table)
                .ok_or_else(|| Error::argument("no such table in the group"))?;
            let expected = feature.num_bags() * table.config.dim;
            if output.len() != expected {
                let name = feature.name;
                return Err(Error::argument(format!(
                    "feature `{name}`: its output must hold {expected} numbers. Received: {}",
                    output.len()
                )));
            }
            check_vocabulary(table, feature)?;
        }
        Ok(())
    }

    /// Where a batch might not fit: inserts what does, so that the lookup inserts nothing. All tables are checked first.
    fn admit_new_keys(&mut self, features: &[Feature]) -> Result<Vec<Option<Outcomes>>> {
        let of_table = |table: usize| features.iter().filter(|f| f.table == table).collect::<Vec<_>>();
        let tables = self.tables.iter().enumerate();
        let new: Vec<_> = tables.map(|(number, table)| new_keys(table, &of_table(number))).collect();
        for (table, new) in self.tables.iter().zip(&new) {
            check_capacity(table, new.as_deref().unwrap_or_default())?;
        }
        let tables = self.tables.iter_mut().zip(new);
        tables.map(|(table, new)| new.map(|new| admit(table, &new)).transpose()).collect()
    }

    fn lookup_tables(
        &mut self,
        by_table: Vec<Vec<FeatureOutput>>,
        admitted: &[Option<Outcomes>],
        mode: Mode,
        pool: &Pool,
    ) -> Result<Vec<(usize, u64, Looked)>> {
        let num_ids = |outputs: &[FeatureOutput]| outputs.iter().map(|o| o.feature.keys.len()).sum::<usize>();
        let total: usize = by_table.iter().map(|o| num_ids(o)).sum();
        let alone = pool.threads() == 1 || total < SMALL_CALL;
        let mut results = Vec::new();
        let mut whole = Vec::new();
        for (number, (table, mut outputs)) in self.tables.iter_mut().zip(by_table).enumerate() {
            if outputs.is_empty() {
                continue;
            }
            let mode = Mode { insert: mode.insert && admitted[number].is_none(), ..mode };
            // A table that is more than its share of the call would leave the other threads idle.
            if !alone && num_ids(&outputs) * pool.threads() * 4 > total * 5 {
                let looked = lookup_split(table, &mut outputs, mode, &mut self.spare, pool)?;
                results.push((number, table.generation, looked));
            } else {
                whole.push((number, table, outputs, mode, self.spare.pop().unwrap_or_default()));
            }
        }
        // The largest first, so that the last thread to finish has a small one.
        whole.sort_by_key(|(_, _, outputs, ..)| std::cmp::Reverse(num_ids(outputs)));
        let mut looked: Vec<Option<Result<(usize, u64, Looked)>>> = whole.iter().map(|_| None).collect();
        let tasks: Vec<_> = whole.into_iter().zip(&mut looked).collect();
        run_if_large(total, tasks, pool, |((number, table, mut outputs, mode, runs), result)| {
            let looked = lookup_whole(table, &mut outputs, mode, runs);
            *result = Some(looked.map(|looked| (number, table.generation, looked)));
        });
        for looked in looked.into_iter().flatten() {
            results.push(looked?);
        }
        Ok(results)
    }

    fn save(&mut self, saved: SavedLookup) {
        self.next_lookup += 1;
        for (table, ..) in &saved.tables {
            self.tables[*table].newest_lookup = saved.number;
        }
        self.lookups.push_back(Arc::new(saved));
        if self.lookups.len() as u64 > RING {
            self.forget_lookups(self.lookups[1].number);
        }
    }

    /// Drops the lookups older than `oldest`; their memory serves the next ones.
    fn forget_lookups(&mut self, oldest: u64) {
        while self.lookups.front().is_some_and(|l| l.number < oldest) {
            if let Some(lookup) = self.lookups.pop_front() {
                self.reuse(lookup);
            }
        }
        let needed = self.ring.iter().chain(self.committed.iter().map(|(_, p)| p)).map(|p| p.lookup.number);
        let oldest = needed.chain(self.lookups.front().map(|l| l.number)).min().unwrap_or(self.next_lookup);
        if self.accumulators.iter().all(|a| a.records.is_empty()) {
            self.tables.iter_mut().for_each(|t| t.release_retired(oldest));
        }
    }

    fn reuse(&mut self, lookup: Arc<SavedLookup>) {
        if let Some(lookup) = Arc::into_inner(lookup) {
            self.spare.extend(lookup.tables.into_iter().flat_map(|(_, _, looked)| looked.runs));
            self.spare.truncate(4 * self.tables.len().max(16));
        }
    }

    // ---- push

    /// Takes the gradients of a lookup's outputs. Writes the ticket, `(64, 2)`, and the gradients of weights, `(ids,)` of
    /// each feature that has them, in their order.
    ///
    /// With `keep` the gradients stay where they are until they are applied; without, they are merged now.
    ///
    /// `check_finite`: a gradient that is not finite makes the ticket NaN, by which a loss scale knows that it overflowed. That
    /// reads every gradient once more, so only those ask who compute in float16.
    ///
    /// # Errors
    /// [`Error::UnwrappedOptimizer`] at the second push of a group that no optimizer is bound to; [`Error::Ticket`] if the
    /// lookup is gone; lengths that do not fit it. Nothing has changed.
    pub fn push(
        &mut self,
        lookup: u64,
        rows: Vec<GradientRows>,
        keep: Option<Keep>,
        check_finite: bool,
        weight_gradients: Vec<&mut [f32]>,
        ticket: &mut [f32],
        pool: &Pool,
    ) -> Result<()> {
        let saved = self.lookups.iter().find(|l| l.number == lookup).cloned().ok_or_else(|| Error::Ticket {
            tables: self.names(),
            what: format!("a gradient comes for a lookup that is gone: older than the newest {RING}, or from before a load"),
        })?;
        self.check_gradients(&saved, &rows)?;
        if self.binding.is_none() && self.pushes_without_optimizer > 0 {
            return Err(Error::UnwrappedOptimizer { tables: self.names() });
        }
        self.write_weight_gradients(&saved, &rows, weight_gradients)?;
        let is_all_finite = !check_finite || self.are_finite(&rows, pool);
        let gradients = match keep {
            Some(keep) => Gradients::Held { rows, _keep: keep },
            None => Gradients::Merged(self.merge_push(&saved, &rows, pool)?),
        };
        for (table, ..) in &saved.tables {
            self.tables[*table].count_call();
        }
        self.pushes_without_optimizer += u32::from(self.binding.is_none());
        let (number, _fallen) = self.ring.add(Push { lookup: saved, gradients });
        write_ticket(number, is_all_finite, ticket);
        Ok(())
    }

    fn check_gradients(&self, saved: &SavedLookup, rows: &[GradientRows]) -> Result<()> {
        if rows.len() != saved.num_bags.len() {
            return Err(Error::argument(format!(
                "a push brings the gradient of each feature. Received: {} of {}",
                rows.len(),
                saved.num_bags.len()
            )));
        }
        for (table, _, looked) in &saved.tables {
            let dim = self.tables[*table].config.dim;
            for &feature in &looked.features {
                let (expected, received) = (saved.num_bags[feature] * dim, rows[feature].get().len());
                if received != expected {
                    return Err(Error::argument(format!(
                        "the gradient of a feature of table `{}` must hold {expected} numbers. Received: {received}",
                        self.tables[*table].config.name
                    )));
                }
            }
        }
        Ok(())
    }

    fn write_weight_gradients(
        &self,
        saved: &SavedLookup,
        rows: &[GradientRows],
        weight_gradients: Vec<&mut [f32]>,
    ) -> Result<()> {
        let traces = saved
            .tables
            .iter()
            .flat_map(|(t, g, looked)| looked.traces.iter().map(move |(f, trace)| (*f, *t, *g, trace)));
        let mut traces: Vec<_> = traces.collect();
        traces.sort_unstable_by_key(|&(feature, ..)| feature);
        if traces.len() != weight_gradients.len() {
            return Err(Error::argument(format!(
                "{} features have weights. Received: room for {} gradients",
                traces.len(),
                weight_gradients.len()
            )));
        }
        for ((feature, table, generation, trace), gradients) in traces.into_iter().zip(weight_gradients) {
            if generation == self.tables[table].generation && gradients.len() == trace.num_ids() {
                trace.gradients(&self.tables[table], rows[feature].get(), gradients);
            } else {
                gradients.fill(0.0);
            }
        }
        Ok(())
    }

    fn are_finite(&self, rows: &[GradientRows], pool: &Pool) -> bool {
        let total: usize = rows.iter().map(|r| r.get().len()).sum();
        if total < SMALL_CALL * 16 {
            return rows.iter().all(|r| is_finite(r.get()));
        }
        let all = std::sync::atomic::AtomicBool::new(true);
        let pieces = rows.iter().flat_map(|r| r.get().chunks(1 << 16)).collect();
        pool.run(pieces, |piece| {
            if !is_finite(piece) {
                all.store(false, std::sync::atomic::Ordering::Relaxed);
            }
        });
        all.into_inner()
    }

    fn merge_push(
        &self,
        saved: &SavedLookup,
        rows: &[GradientRows],
        pool: &Pool,
    ) -> Result<Vec<Vec<Region<f32>>>> {
        let mut merged = Vec::new();
        for (table, _, looked) in &saved.tables {
            let dim = self.tables[*table].config.dim;
            merged.push(
                looked.runs.iter().map(|r| Region::new(r.num_keys() * dim)).collect::<Result<Vec<_>>>()?,
            );
        }
        let held: Vec<Vec<HeldGradients>> = saved
            .tables
            .iter()
            .map(|(table, _, looked)| hold(looked, rows, self.tables[*table].config.dim, 1.0))
            .collect();
        let num_ids: usize = held.iter().flatten().map(|h| h.runs.num_ids()).sum();
        let mut tasks = Vec::new();
        for (held, sums) in held.iter().flatten().zip(merged.iter_mut().flatten()) {
            let mut rest = &mut sums[..];
            for keys in held.pieces(num_pieces(held.runs.num_ids(), num_ids, pool)) {
                let (mine, others) = rest.split_at_mut(keys.len() * held.dim);
                rest = others;
                tasks.push((held, keys, mine));
            }
        }
        run_if_large(num_ids, tasks, pool, |(held, keys, sums)| merge(held, keys, sums));
        Ok(merged)
    }

    // ---- commit

    /// The pushes that a ticket names; changes nothing.
    ///
    /// # Errors
    /// [`Error::Ticket`] if one of them is gone.
    pub fn resolve(&self, ticket: &[f32]) -> Result<Vec<Named>> {
        self.ring.resolve(ticket).map_err(|what| Error::Ticket { tables: self.names(), what })
    }

    /// Takes the pushes that `resolve` named. Gives the squared norm of all that is now to be applied, accumulated gradients
    /// included, if the optimizer asks for it and this step is an update; else 0.
    pub fn commit(&mut self, named: &[Named], is_update: bool, pool: &Pool) -> Result<f64> {
        let (taken, _dropped) = self.ring.take(named);
        let oldest = taken.iter().map(|(_, push)| push.lookup.number).min();
        self.committed.extend(taken);
        if let Some(oldest) = oldest {
            self.forget_lookups(oldest);
        }
        self.tables.iter_mut().for_each(HostTable::count_call);
        if !(is_update && self.binding.is_some_and(|b| b.needs_norm)) {
            return Ok(0.0);
        }
        self.merge_committed(pool)?;
        let mut total = 0.0;
        for table in 0..self.tables.len() {
            let norm = self.table_norm(table, pool);
            self.norms[table] = norm as f32;
            total += norm;
        }
        Ok(total)
    }

    /// Gradients that are held are merged; more than one push, or anything accumulated, becomes one sum a record.
    fn merge_committed(&mut self, pool: &Pool) -> Result<()> {
        if self.committed.len() > 1 || self.accumulators.iter().any(|a| !a.records.is_empty()) {
            self.accumulate();
            return Ok(());
        }
        let mut committed = std::mem::take(&mut self.committed);
        for (_, push) in &mut committed {
            if let Gradients::Held { rows, .. } = &push.gradients {
                push.gradients = Gradients::Merged(self.merge_push(&push.lookup, rows, pool)?);
            }
        }
        self.committed = committed;
        Ok(())
    }

    /// Adds what is committed to the accumulators, push after push.
    fn accumulate(&mut self) {
        for (weight, push) in std::mem::take(&mut self.committed) {
            for (at, (table, generation, looked)) in push.lookup.tables.iter().enumerate() {
                let (accumulator, dim) = (&mut self.accumulators[*table], self.tables[*table].config.dim);
                let now = self.tables[*table].generation;
                if *generation != now {
                    continue;
                }
                if accumulator.generation != now {
                    *accumulator = Accumulator { generation: now, ..Accumulator::default() };
                }
                match &push.gradients {
                    Gradients::Held { rows, .. } => {
                        hold(looked, rows, dim, weight).iter().for_each(|held| accumulator.add(held, dim));
                    }
                    Gradients::Merged(tables) => {
                        for (runs, sums) in looked.runs.iter().zip(&tables[at]) {
                            accumulator.add(&StoredGradients { records: runs.records(), sums, weight }, dim);
                        }
                    }
                }
            }
            self.reuse(push.lookup);
        }
    }

    fn table_norm(&self, number: usize, pool: &Pool) -> f64 {
        let dim = self.tables[number].config.dim;
        let stored = self.stored(number, self.tables[number].generation);
        let num_keys: usize = stored.iter().map(|s| s.records.len()).sum();
        let pieces = stored.iter().flat_map(|s| {
            s.pieces(num_pieces(s.records.len(), num_keys, pool)).into_iter().map(move |keys| (s, keys))
        });
        let pieces: Vec<_> = pieces.collect();
        let mut sums = vec![ExactSum::default(); pieces.len()];
        let tasks: Vec<_> = pieces.into_iter().zip(&mut sums).collect();
        run_if_large(num_keys, tasks, pool, |((stored, keys), sum)| {
            let mut gradient = vec![0.0; dim];
            for key in keys {
                stored.merge::<0>(key, &mut gradient);
                sum.add(sum_of_squares(&gradient));
            }
        });
        let mut total = ExactSum::default();
        sums.iter().for_each(|sum| total.merge(sum));
        total.total()
    }

    /// All that is to be applied to a table, after `merge_committed`.
    fn stored(&self, number: usize, generation: u64) -> Vec<StoredGradients<'_>> {
        let mut stored = Vec::new();
        for (weight, push) in &self.committed {
            let Gradients::Merged(tables) = &push.gradients else { continue };
            for ((table, then, looked), sums) in push.lookup.tables.iter().zip(tables) {
                if *table == number && *then == generation {
                    let runs = looked.runs.iter().zip(sums);
                    stored.extend(runs.map(|(r, sums)| StoredGradients {
                        records: r.records(),
                        sums,
                        weight: *weight,
                    }));
                }
            }
        }
        let accumulator = &self.accumulators[number];
        if accumulator.generation == generation && !accumulator.records.is_empty() {
            let (records, sums) = (&accumulator.records[..], &accumulator.sums[..]);
            stored.push(StoredGradients { records, sums, weight: 1.0 });
        }
        stored
    }

    // ---- apply

    /// Updates the records of all that is committed, or only accumulates it.
    ///
    /// # Errors
    /// [`Error::State`] if another optimizer has been bound since.
    pub fn apply(&mut self, owner: u64, scalars: &ApplyScalars, pool: &Pool) -> Result<()> {
        let binding =
            self.binding.ok_or_else(|| Error::State("no optimizer is bound to these tables".into()))?;
        self.check_owner(&binding, owner)?;
        self.check_states(&binding)?;
        self.tables.iter_mut().for_each(HostTable::count_call);
        if !scalars.is_update {
            self.accumulate();
            return Ok(());
        }
        let is_single = self.committed.len() == 1 && self.accumulators.iter().all(|a| a.records.is_empty());
        if is_single
            && matches!(self.committed[0].1.gradients, Gradients::Held { .. })
            && binding.update.clipnorm.is_none()
        {
            self.apply_held(&binding.update, &scalars.update, pool);
        } else {
            self.merge_committed(pool)?;
            self.apply_stored(&binding, &scalars.update, pool);
        }
        for (_, push) in std::mem::take(&mut self.committed) {
            self.reuse(push.lookup);
        }
        self.accumulators.iter_mut().for_each(|a| {
            a.places.clear();
            a.records.clear();
            a.sums.clear();
        });
        Ok(())
    }

    fn check_owner(&self, binding: &Binding, owner: u64) -> Result<()> {
        let is_stateless = binding.update.rule.states(1).is_empty();
        if binding.owner == owner || is_stateless {
            return Ok(());
        }
        Err(Error::State(format!(
            "the tables {} have been bound to another optimizer since, whose states are in their records. \
             Two optimizers can only share tables if both keep no states, as SGD without momentum",
            self.names()
        )))
    }

    /// Records may have been replaced since the optimizer was bound.
    fn check_states(&self, binding: &Binding) -> Result<()> {
        let name = binding.update.rule.name();
        match self.tables.iter().find(|t| {
            t.update.is_none_or(|u| u.rule.name() != name)
                || t.state_specs() != binding.update.rule.states(t.config.dim)
        }) {
            None => Ok(()),
            Some(table) => Err(Error::State(format!(
                "the records of table `{}` have no states of {name}, the optimizer that is bound to it: they were replaced since",
                table.config.name
            ))),
        }
    }

    fn apply_held(&mut self, update: &Update, scalars: &UpdateScalars, pool: &Pool) {
        let Some((weight, push)) = self.committed.first() else { return };
        let Gradients::Held { rows, .. } = &push.gradients else { return };
        let mut tables: Vec<Option<&mut HostTable>> = self.tables.iter_mut().map(Some).collect();
        let mut work = Vec::new();
        for (number, generation, looked) in &push.lookup.tables {
            let Some(table) = tables[*number].take().filter(|t| t.generation == *generation) else {
                continue;
            };
            let held = hold(looked, rows, table.config.dim, *weight);
            work.push((table, held, update, scalars));
        }
        run_updates(work, pool);
    }

    fn apply_stored(&mut self, binding: &Binding, scalars: &UpdateScalars, pool: &Pool) {
        let mut tables = std::mem::take(&mut self.tables);
        // `stored` looks at the tables' generations; the records are borrowed apart from them.
        let generations: Vec<u64> = tables.iter().map(|t| t.generation).collect();
        let mut scaled = Vec::new();
        for number in 0..tables.len() {
            let mut scalars = *scalars;
            if let Some(clipnorm) = binding.update.clipnorm {
                scalars.factor *=
                    clipnorm_factor(self.norms[number] * scalars.factor * scalars.factor, clipnorm);
            }
            scaled.push(scalars);
        }
        let work = tables.iter_mut().enumerate().map(|(number, table)| {
            let stored = self.stored(number, generations[number]);
            (table, stored, &binding.update, &scaled[number])
        });
        run_updates(work.collect(), pool);
        self.tables = tables;
    }

    // ---- binding

    /// Binds an optimizer: the records get its states. States that another optimizer left are started anew; what was loaded
    /// and never bound stays.
    pub fn bind(&mut self, binding: Binding) -> Result<()> {
        binding.update.validate()?;
        let needs_norm = binding.needs_norm || binding.update.clipnorm.is_some();
        let binding = Binding { needs_norm, ..binding };
        let is_first = self.binding.is_none();
        let is_same = self.binding.is_some_and(|b| b.owner == binding.owner);
        for table in &mut self.tables {
            table.set_update_rule(Some(binding.update), is_first || is_same)?;
        }
        self.binding = Some(binding);
        self.pushes_without_optimizer = 0;
        Ok(())
    }

    pub fn binding(&self) -> Option<&Binding> {
        self.binding.as_ref()
    }
}

fn hold<'a>(looked: &'a Looked, rows: &'a [GradientRows], dim: usize, weight: f32) -> Vec<HeldGradients<'a>> {
    let of_features: Vec<&[f32]> = looked.features.iter().map(|&f| rows[f].get()).collect();
    let hold = |runs| HeldGradients { runs, code: looked.code, rows: of_features.clone(), dim, weight };
    looked.runs.iter().map(hold).collect()
}

/// Pieces for `mine` of `total` work, so that all pieces are alike.
fn num_pieces(mine: usize, total: usize, pool: &Pool) -> usize {
    if pool.threads() == 1 {
        return 1;
    }
    (mine * pool.threads() * PIECES).div_ceil(total.max(1)).max(1)
}

fn run_if_large<T: Send>(work: usize, tasks: Vec<T>, pool: &Pool, run: impl Fn(T) + Sync) {
    if work < SMALL_CALL { tasks.into_iter().for_each(run) } else { pool.run(tasks, run) }
}

/// Updates the records of several tables with their merged gradients.
#[allow(unsafe_code)]
fn run_updates<G: MergedGradients>(
    mut work: Vec<(&mut HostTable, Vec<G>, &Update, &UpdateScalars)>,
    pool: &Pool,
) {
    let total: usize = work.iter().flat_map(|(_, gradients, ..)| gradients).map(|g| g.records().len()).sum();
    let mut tasks = Vec::new();
    for (table, gradients, update, scalars) in &mut work {
        let (arena, dim) = (table.arena.share(), table.config.dim);
        for gradients in &*gradients {
            for keys in gradients.pieces(num_pieces(gradients.records().len(), total, pool)) {
                tasks.push(UpdateTask { arena, dim, gradients, keys, update, scalars: **scalars });
            }
        }
    }
    // SAFETY: - the tables are borrowed mutably: nobody else has their arenas.
    //         - the records of all tasks are distinct: keys of a table are distinct over its gradients, and pieces are.
    run_if_large(total, tasks, pool, |task| unsafe { task.run() });
}
