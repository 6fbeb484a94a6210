//! The tables of a layer, and the four calls of a training step on the CPU.
//!
//! `lookup` finds rows and remembers their records. `push` takes the gradients of a lookup by its number. `commit` reads from a
//! ticket which pushes count. `apply` updates the records. See `docs/architecture.md`, "One training step".

use std::collections::VecDeque;
use std::sync::Arc;

use crate::absent::Absent;
use crate::accumulator::Accumulator;
use crate::arena::NO_RECORD;
use crate::batch::Feature;
use crate::error::{Error, Result};
use crate::exact_sum::ExactSum;
use crate::host_table::{HostTable, distinct};
use crate::lookup::{FeatureOutput, Mode, admit, check_capacity, check_vocabulary, lookup_whole, new_keys};
use crate::lookup_split::{SplitScratch, lookup_split};
use crate::math::sum_of_squares;
use crate::memory;
use crate::merge::{MergedGradients, StoredGradients};
use crate::optimizer::{Update, UpdateScalars, clipnorm_factor};
use crate::pool::{Pool, SMALL_CALL, num_pieces, run_if_large};
use crate::push::{OutputGradients, Push, PushedGradients, SavedLookup, SavedTable, Spare, merge_push};
use crate::region::Region;
use crate::table::{Insertion, Outcomes, Table, TableConfig};
use crate::ticket::{Named, PushRing, RING, write_ticket};
use crate::update::UpdateTask;

/// An output of more bytes is written with non-temporal stores.
const STREAM_BYTES: usize = 4 << 20;

/// The optimizer of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Binding {
    /// Identifies the optimizer.
    pub owner: u64,
    pub update: Update,
    /// Whether `commit` computes the squared norm.
    pub needs_norm: bool,
}

impl Binding {
    /// The binding for tables that were `bound` to another optimizer or to none, and whether their states stay.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid update.
    pub fn after(self, bound: Option<&Binding>) -> Result<(Binding, bool)> {
        self.update.validate()?;
        let needs_norm = self.needs_norm || self.update.clipnorm.is_some();
        let keeps_states = bound.is_none_or(|b| b.owner == self.owner) || self.is_stateless();
        Ok((Binding { needs_norm, ..self }, keeps_states))
    }

    fn is_stateless(&self) -> bool {
        self.update.rule.states(1).is_empty()
    }
}

/// Checks that an optimizer may update tables whose binding is `bound`.
///
/// # Errors
/// [`Error::State`] if another optimizer was bound since, or if the records were replaced and have no states of this one.
pub fn check_owner<'a>(
    bound: Option<&Binding>,
    binding: &Binding,
    tables: impl Iterator<Item = &'a dyn Table> + Clone,
) -> Result<()> {
    let Some(bound) = bound else {
        return Err(Error::State("no optimizer is bound to these tables".into()));
    };
    if bound.owner != binding.owner && !(bound.is_stateless() && binding.is_stateless()) {
        let names = tables.map(|t| format!("`{}`", t.config().name)).collect::<Vec<_>>().join(", ");
        return Err(Error::State(format!(
            "the tables {names} have been bound to another optimizer since, whose states are in their records. \
             Two optimizers can only share tables if both keep no states, as SGD without momentum"
        )));
    }
    let name = binding.update.rule.name();
    let mut tables = tables;
    match tables.find(|t| {
        t.update_rule().is_none_or(|u| u.rule.name() != name)
            || t.state_specs() != binding.update.rule.states(t.config().dim)
    }) {
        None => Ok(()),
        Some(table) => Err(Error::State(format!(
            "the records of table `{}` have no states of {name}, the optimizer that is bound to it: they were replaced since",
            table.config().name
        ))),
    }
}

/// The scalars of an `apply`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ApplyScalars {
    pub update: UpdateScalars,
    /// If false, the committed gradients are only accumulated.
    pub is_update: bool,
}

/// The tables of a layer, and the lookups and pushes that are in progress.
pub struct HostGroup {
    tables: Vec<HostTable>,
    binding: Option<Binding>,
    next_lookup: u64,
    lookups: VecDeque<Arc<SavedLookup>>,
    ring: PushRing<Push>,
    committed: Vec<(f32, Push)>,
    accumulators: Vec<Accumulator>,
    /// Squared norm of the committed gradients, by table.
    norms: Vec<f32>,
    pushes_without_optimizer: u32,
    /// By table.
    spare: Vec<Spare>,
    split: SplitScratch,
}

impl HostGroup {
    pub fn new(configs: Vec<TableConfig>) -> Result<HostGroup> {
        let tables = configs.into_iter().map(HostTable::new).collect::<Result<Vec<_>>>()?;
        Ok(HostGroup {
            accumulators: tables.iter().map(|_| Accumulator::default()).collect(),
            norms: vec![0.0; tables.len()],
            binding: None,
            next_lookup: 1,
            lookups: VecDeque::new(),
            ring: PushRing::default(),
            committed: Vec::new(),
            pushes_without_optimizer: 0,
            spare: tables.iter().map(|_| Spare::default()).collect(),
            split: SplitScratch::default(),
            tables,
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

    /// Bytes that steps keep for later ones.
    pub fn step_bytes(&self) -> usize {
        let pushes = || self.ring.iter().chain(self.committed.iter().map(|(_, push)| push));
        let looked = self.lookups.iter().flat_map(|l| &l.tables).map(|table| table.looked.num_bytes());
        let merged = pushes().map(|push| match &push.gradients {
            PushedGradients::Merged(tables) => tables.iter().flatten().map(Region::num_bytes).sum(),
            PushedGradients::Held { .. } => 0,
        });
        let accumulated = self.accumulators.iter().map(Accumulator::num_bytes);
        let spare = self.spare.iter().map(Spare::num_bytes);
        looked.chain(merged).chain(accumulated).chain(spare).sum::<usize>() + self.split.num_bytes()
    }

    /// Name and number of refused keys since the last call, of tables whose check mode is to warn.
    pub fn take_refused(&mut self) -> Vec<(String, u64)> {
        let take = |t: &mut HostTable| (t.config.name.clone(), std::mem::take(&mut t.refused_to_warn));
        self.tables.iter_mut().map(take).filter(|(_, refused)| *refused > 0).collect()
    }

    // ---- lookup

    /// Looks up the rows of all features of a layer's call. Returns the number of the lookup for `push`, or 0 without `save`.
    ///
    /// `insertion`: when keys without a row get one. A lookup without `save` inserts nothing at a commit. `outputs`: `(bags, dim)`
    /// for each feature; every element is written.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, [`Error::OutOfVocabulary`], [`Error::TableFull`], [`Error::Memory`].
    /// Nothing has changed then.
    pub fn lookup(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        outputs: Vec<&mut [f32]>,
        pool: &Pool,
    ) -> Result<u64> {
        self.check_features(features, &outputs)?;
        self.tables.iter_mut().for_each(HostTable::begin);
        let looked = self.look_up(features, insertion, save, outputs, pool);
        if looked.is_err() {
            self.tables.iter_mut().for_each(HostTable::undo);
        }
        looked
    }

    /// Does the work of `lookup`. If it fails, the journals of the tables say what was inserted.
    fn look_up(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        outputs: Vec<&mut [f32]>,
        pool: &Pool,
    ) -> Result<u64> {
        let admitted = match insertion {
            Insertion::AtLookup => self.admit_new_keys(features)?,
            Insertion::AtCommit | Insertion::Never => vec![None; self.tables.len()],
        };
        let stream = outputs.iter().map(|o| size_of_val(&**o)).sum::<usize>() > STREAM_BYTES;
        let mut by_table: Vec<Vec<FeatureOutput>> = self.tables.iter().map(|_| Vec::new()).collect();
        for (number, (feature, rows)) in features.iter().zip(outputs).enumerate() {
            by_table[feature.table].push(FeatureOutput { number, feature: *feature, rows });
        }
        let number = if save { self.next_lookup } else { 0 };
        let insertion = if save || insertion == Insertion::AtLookup { insertion } else { Insertion::Never };
        let looked = self.lookup_tables(by_table, &admitted, Mode { insertion, save, stream }, pool)?;
        let num_bags = memory::collect(features.iter().map(Feature::num_bags), "the features of a call")?;
        for SavedTable { number, looked, .. } in &looked {
            let mut outcomes = looked.outcomes;
            if let Some(admitted) = &admitted[*number] {
                outcomes.hit = outcomes.hit.saturating_sub(admitted.inserted);
                outcomes += *admitted;
            }
            let table = &mut self.tables[*number];
            let outcomes = if save { outcomes } else { Outcomes { hit: 0, ..outcomes } };
            table.note(outcomes, looked.dropped_gradients);
            table.count_call();
        }
        if save {
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

    /// If a batch might not fit, inserts the keys that do, so that the lookup inserts none. Checks all tables first.
    fn admit_new_keys(&mut self, features: &[Feature]) -> Result<Vec<Option<Outcomes>>> {
        let of_table = |table: usize| features.iter().filter(|f| f.table == table).collect::<Vec<_>>();
        let tables = self.tables.iter().enumerate();
        let new = tables.map(|(number, table)| new_keys(table, &of_table(number)));
        let new = new.collect::<Result<Vec<_>>>()?;
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
    ) -> Result<Vec<SavedTable>> {
        let num_ids = |outputs: &[FeatureOutput]| outputs.iter().map(|o| o.feature.keys.len()).sum::<usize>();
        let total: usize = by_table.iter().map(|o| num_ids(o)).sum();
        let alone = pool.threads() == 1 || total < SMALL_CALL;
        let mut results = Vec::new();
        let mut whole = Vec::new();
        let tables = self.tables.iter_mut().zip(&mut self.spare).enumerate();
        for ((number, (table, spare)), mut outputs) in tables.zip(by_table) {
            if outputs.is_empty() {
                continue;
            }
            // The keys that fit have been inserted.
            let insertion = if admitted[number].is_some() { Insertion::Never } else { mode.insertion };
            let mode = Mode { insertion, ..mode };
            // A table that is larger than its share of the call would leave other threads idle.
            if !alone && num_ids(&outputs) * pool.threads() * 4 > total * 5 {
                let looked = lookup_split(table, &mut outputs, mode, &mut self.split, &mut spare.runs, pool)?;
                results.push(SavedTable::new(number, table, looked));
            } else {
                whole.push((number, table, outputs, mode, spare.runs.pop().unwrap_or_default()));
            }
        }
        // The largest first, so that the last thread to finish has a small task.
        whole.sort_by_key(|(_, _, outputs, ..)| std::cmp::Reverse(num_ids(outputs)));
        let mut looked: Vec<Option<Result<SavedTable>>> = whole.iter().map(|_| None).collect();
        let tasks: Vec<_> = whole.into_iter().zip(&mut looked).collect();
        run_if_large(total, tasks, pool, |((number, table, mut outputs, mode, runs), result)| {
            let looked = lookup_whole(table, &mut outputs, mode, runs);
            *result = Some(looked.map(|looked| SavedTable::new(number, table, looked)));
        });
        for looked in looked.into_iter().flatten() {
            results.push(looked?);
        }
        Ok(results)
    }

    fn save(&mut self, saved: SavedLookup) {
        self.next_lookup += 1;
        for table in &saved.tables {
            self.tables[table.number].newest_lookup = saved.number;
        }
        self.lookups.push_back(Arc::new(saved));
        if self.lookups.len() as u64 > RING {
            self.forget_lookups(self.lookups[1].number);
        }
    }

    /// Drops the lookups before `oldest`. Later lookups reuse their memory.
    fn forget_lookups(&mut self, oldest: u64) {
        while self.lookups.front().is_some_and(|l| l.number < oldest) {
            if let Some(lookup) = self.lookups.pop_front() {
                self.reuse_lookup(lookup);
            }
        }
        let needed = self.ring.iter().chain(self.committed.iter().map(|(_, p)| p)).map(|p| p.lookup.number);
        let oldest = needed.chain(self.lookups.front().map(|l| l.number)).min().unwrap_or(self.next_lookup);
        if self.accumulators.iter().all(Accumulator::is_empty) {
            self.tables.iter_mut().for_each(|t| t.release_retired(oldest));
        }
    }

    fn reuse(&mut self, push: Push) {
        if let PushedGradients::Merged(tables) = push.gradients {
            let tables = push.lookup.tables.iter().zip(tables);
            tables.for_each(|(table, sums)| self.spare[table.number].keep_sums(sums));
        }
        self.reuse_lookup(push.lookup);
    }

    fn reuse_lookup(&mut self, lookup: Arc<SavedLookup>) {
        if let Some(lookup) = Arc::into_inner(lookup) {
            let tables = lookup.tables.into_iter();
            tables.for_each(|table| self.spare[table.number].keep_runs(table.looked.runs));
        }
    }

    // ---- push

    /// Takes the gradients of a lookup's outputs. Writes the ticket, `(64, 2)`, and the gradients of weights, `(ids,)` for each
    /// feature with weights.
    ///
    /// # Errors
    /// [`Error::UnwrappedOptimizer`] at the second push to a group that no optimizer is bound to; [`Error::Ticket`] if the lookup no
    /// longer exists; [`Error::Argument`] for other lengths. Nothing has changed then.
    pub fn push(
        &mut self,
        lookup: u64,
        gradients: OutputGradients,
        weight_gradients: Vec<&mut [f32]>,
        ticket: &mut [f32],
        pool: &Pool,
    ) -> Result<()> {
        let saved = self.lookups.iter().find(|l| l.number == lookup).cloned().ok_or_else(|| Error::Ticket {
            tables: self.names(),
            what: format!("a gradient comes for a lookup that is gone: older than the newest {RING}, or from before a load"),
        })?;
        check_gradients(&saved, &gradients, &self.tables)?;
        if self.binding.is_none() && self.pushes_without_optimizer > 0 {
            return Err(Error::UnwrappedOptimizer { tables: self.names() });
        }
        self.write_weight_gradients(&saved, &gradients, weight_gradients)?;
        let is_all_finite = !gradients.check_finite || gradients.are_finite(pool);
        let OutputGradients { rows, keep, .. } = gradients;
        let gradients = match keep {
            Some(keep) => PushedGradients::Held { rows, _keep: keep },
            None => PushedGradients::Merged(merge_push(&saved, &rows, &mut self.spare, pool)?),
        };
        saved.tables.iter().for_each(|table| self.tables[table.number].count_call());
        self.pushes_without_optimizer += u32::from(self.binding.is_none());
        let (number, fallen) = self.ring.add(Push { lookup: saved, gradients });
        if let Some(push) = fallen {
            self.reuse(push);
        }
        write_ticket(number, is_all_finite, ticket);
        Ok(())
    }

    fn write_weight_gradients<'a>(
        &self,
        saved: &'a SavedLookup,
        gradients: &OutputGradients,
        weight_gradients: Vec<&mut [f32]>,
    ) -> Result<()> {
        let traces_of =
            |table: &'a SavedTable| table.looked.traces.iter().map(move |(f, trace)| (*f, table, trace));
        let traces = saved.tables.iter().flat_map(traces_of);
        let mut traces: Vec<_> = traces.collect();
        traces.sort_unstable_by_key(|&(feature, ..)| feature);
        if traces.len() != weight_gradients.len() {
            return Err(Error::argument(format!(
                "{} features have weights. Received: room for {} gradients",
                traces.len(),
                weight_gradients.len()
            )));
        }
        for ((feature, saved, trace), written) in traces.into_iter().zip(weight_gradients) {
            let table = &self.tables[saved.number];
            if saved.generation == table.generation && written.len() == trace.num_ids() {
                trace.gradients(table, gradients.rows[feature].get(), written);
            } else {
                written.fill(0.0);
            }
        }
        Ok(())
    }

    // ---- commit

    /// The pushes that a ticket names. Changes nothing.
    ///
    /// # Errors
    /// [`Error::Ticket`] if one of them no longer exists.
    pub fn resolve(&self, ticket: &[f32]) -> Result<Vec<Named>> {
        self.ring.resolve(ticket).map_err(|what| Error::Ticket { tables: self.names(), what })
    }

    /// Checks that the tables have room for the absent keys of these pushes. Changes nothing.
    ///
    /// # Errors
    /// [`Error::TableFull`] if a table would refuse some, and its check mode is to raise.
    pub fn check_absent(&self, named: &[Named]) -> Result<()> {
        self.tables.iter().enumerate().try_for_each(|(number, table)| {
            let absent = absent_of(&self.ring, named, number, table.generation);
            let keys = absent.iter().flat_map(|a| &a.keys).filter(|key| table.is_absent(**key));
            check_capacity(table, &distinct(keys.copied())?)
        })
    }

    /// Inserts the absent keys of these pushes, in the order of the pushes, as far as there is room.
    fn insert_absent(&mut self, named: &[Named]) -> Result<()> {
        self.tables.iter_mut().for_each(HostTable::begin);
        let (mut inserted, mut done) = (Vec::new(), Ok(()));
        for (number, table) in self.tables.iter_mut().enumerate() {
            let absent = absent_of(&self.ring, named, number, table.generation);
            let mut absent = absent.into_iter().filter(|absent| !absent.is_settled());
            done = done.and_then(|()| {
                absent.try_for_each(|absent| {
                    table.insert(absent).map(|new| inserted.push((number, absent, new)))
                })
            });
        }
        if done.is_err() {
            self.tables.iter_mut().for_each(HostTable::undo);
            return done;
        }
        for (number, absent, (records, outcomes)) in inserted {
            if !absent.is_settled() {
                absent.settle(records);
                self.tables[number].note(outcomes, absent.num_refused_ids());
            }
        }
        Ok(())
    }

    /// Takes the pushes that `resolve` named, and inserts their absent keys. Returns the squared norm of all gradients to apply,
    /// accumulated ones included, if the optimizer needs it and this step is an update; else 0.
    pub fn commit(&mut self, named: &[Named], is_update: bool, pool: &Pool) -> Result<f64> {
        self.insert_absent(named)?;
        let (taken, dropped) = self.ring.take(named);
        dropped.into_iter().for_each(|push| self.reuse(push));
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

    /// Merges gradients that were not merged at the push. Several pushes, and accumulated gradients, become one sum for each record.
    fn merge_committed(&mut self, pool: &Pool) -> Result<()> {
        if self.committed.len() > 1 || self.accumulators.iter().any(|a| !a.is_empty()) {
            return self.accumulate(pool);
        }
        let mut committed = std::mem::take(&mut self.committed);
        for (_, push) in &mut committed {
            if let PushedGradients::Held { rows, .. } = &push.gradients {
                let merged = merge_push(&push.lookup, rows, &mut self.spare, pool)?;
                push.gradients = PushedGradients::Merged(merged);
            }
        }
        self.committed = committed;
        Ok(())
    }

    /// Adds the committed pushes to the accumulators, in order.
    ///
    /// # Errors
    /// [`Error::Memory`]. The committed pushes are dropped then; what was accumulated before stays.
    fn accumulate(&mut self, pool: &Pool) -> Result<()> {
        let committed = std::mem::take(&mut self.committed);
        let mut accumulators = self.accumulators.iter_mut().enumerate();
        let room = accumulators.try_for_each(|(number, accumulator)| accumulator.reserve(number, &committed));
        if room.is_err() {
            committed.into_iter().for_each(|(_, push)| self.reuse(push));
            return room;
        }
        let ids_of =
            |(_, push): &(f32, Push)| push.lookup.tables.iter().map(|t| t.looked.num_ids()).sum::<usize>();
        let num_ids: usize = committed.iter().map(ids_of).sum();
        let generations = self.tables.iter().map(|table| table.generation);
        let tasks: Vec<_> = generations.zip(&mut self.accumulators).enumerate().collect();
        run_if_large(num_ids, tasks, pool, |(number, (generation, accumulator))| {
            for (weight, push) in &committed {
                accumulator.add_push(number, generation, push, *weight);
            }
        });
        committed.into_iter().for_each(|(_, push)| self.reuse(push));
        Ok(())
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
            for key in keys.filter(|&key| stored.records[key] != NO_RECORD) {
                stored.merge::<0>(key, &mut gradient);
                sum.add(sum_of_squares(&gradient));
            }
        });
        let mut total = ExactSum::default();
        sums.iter().for_each(|sum| total.merge(sum));
        total.total()
    }

    /// The gradients to apply to a table, after `merge_committed`.
    fn stored<'a>(&'a self, number: usize, generation: u64) -> Vec<StoredGradients<'a>> {
        let mut all = Vec::new();
        for (weight, push) in &self.committed {
            let PushedGradients::Merged(tables) = &push.gradients else { continue };
            for (table, sums) in push.lookup.tables.iter().zip(tables) {
                if table.number == number && table.generation == generation {
                    let runs = table.runs().zip(sums);
                    all.extend(runs.map(|((_, records), sums)| StoredGradients {
                        records,
                        sums,
                        weight: *weight,
                    }));
                }
            }
        }
        all.extend(self.accumulators[number].stored(generation));
        all
    }

    // ---- apply

    /// Updates the records of the committed pushes, or only accumulates their gradients.
    ///
    /// # Errors
    /// The same as `take_over`.
    pub fn apply(&mut self, binding: &Binding, scalars: &ApplyScalars, pool: &Pool) -> Result<()> {
        self.take_over(binding)?;
        self.tables.iter_mut().for_each(HostTable::count_call);
        if !scalars.is_update {
            return self.accumulate(pool);
        }
        let is_single = self.committed.len() == 1 && self.accumulators.iter().all(Accumulator::is_empty);
        if is_single
            && matches!(self.committed[0].1.gradients, PushedGradients::Held { .. })
            && binding.update.clipnorm.is_none()
        {
            self.apply_held(&binding.update, &scalars.update, pool);
        } else {
            self.merge_committed(pool)?;
            self.apply_stored(binding, &scalars.update, pool);
        }
        self.drop_committed();
        self.accumulators.iter_mut().for_each(Accumulator::clear);
        Ok(())
    }

    /// Checks that this optimizer may update the tables now. Changes nothing.
    ///
    /// # Errors
    /// [`Error::State`] if another optimizer was bound since, or if the records lost their states.
    pub fn check_owner(&self, binding: &Binding) -> Result<()> {
        check_owner(self.binding.as_ref(), binding, self.tables.iter().map(|t| t as &dyn Table))
    }

    /// Drops the committed pushes without applying them.
    pub fn drop_committed(&mut self) {
        std::mem::take(&mut self.committed).into_iter().for_each(|(_, push)| self.reuse(push));
    }

    fn apply_held(&mut self, update: &Update, scalars: &UpdateScalars, pool: &Pool) {
        let Some((weight, push)) = self.committed.first() else { return };
        let PushedGradients::Held { rows, .. } = &push.gradients else { return };
        let mut tables: Vec<Option<&mut HostTable>> = self.tables.iter_mut().map(Some).collect();
        let mut work = Vec::new();
        for saved in &push.lookup.tables {
            if let Some(table) = tables[saved.number].take().filter(|t| t.generation == saved.generation) {
                work.push((table, saved.hold(rows, *weight), update, scalars));
            }
        }
        run_updates(work, pool);
    }

    fn apply_stored(&mut self, binding: &Binding, scalars: &UpdateScalars, pool: &Pool) {
        let mut tables = std::mem::take(&mut self.tables);
        // `stored` reads the generations of the tables, so the arenas are borrowed separately.
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

    /// Binds an optimizer: the records get its states. States of another optimizer are reset. States that were loaded and not bound
    /// yet are kept.
    pub fn bind(&mut self, binding: Binding) -> Result<()> {
        let (binding, keeps_states) = binding.after(self.binding.as_ref())?;
        for table in &mut self.tables {
            table.set_update_rule(Some(binding.update), keeps_states)?;
        }
        self.binding = Some(binding);
        self.pushes_without_optimizer = 0;
        Ok(())
    }

    /// Binds another optimizer for this step, if neither it nor the bound one has states.
    ///
    /// # Errors
    /// The same as `check_owner`. Nothing has changed then.
    pub fn take_over(&mut self, binding: &Binding) -> Result<()> {
        self.check_owner(binding)?;
        if self.binding.is_some_and(|b| b.owner == binding.owner) { Ok(()) } else { self.bind(*binding) }
    }

    pub fn binding(&self) -> Option<&Binding> {
        self.binding.as_ref()
    }
}

/// The keys that a table of this generation is to insert for the named pushes.
fn absent_of<'a>(
    ring: &'a PushRing<Push>,
    named: &[Named],
    number: usize,
    generation: u64,
) -> Vec<&'a Absent> {
    let tables = named.iter().filter_map(|n| ring.get(n.number)).flat_map(|push| &push.lookup.tables);
    let of_table = tables.filter(|t| t.number == number && t.generation == generation);
    of_table.filter_map(|t| t.looked.absent.as_ref()).filter(|absent| !absent.is_settled()).collect()
}

fn check_gradients(saved: &SavedLookup, gradients: &OutputGradients, tables: &[HostTable]) -> Result<()> {
    let (rows, num_features) = (&gradients.rows, saved.num_bags.len());
    if rows.len() != num_features {
        return Err(Error::argument(format!(
            "a push brings the gradient of each feature. Received: {} of {num_features}",
            rows.len()
        )));
    }
    for table in &saved.tables {
        for &feature in &table.looked.features {
            let (expected, received) = (saved.num_bags[feature] * table.dim, rows[feature].get().len());
            if received != expected {
                return Err(Error::argument(format!(
                    "the gradient of a feature of table `{}` must hold {expected} numbers. Received: {received}",
                    tables[table.number].config.name
                )));
            }
        }
    }
    Ok(())
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
