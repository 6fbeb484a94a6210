//! The apply of a group: the update of records.

use super::HostGroup;
use crate::contract::binding::Binding;
use crate::contract::group::Group;
use crate::contract::profile::StepPart;
use crate::contract::table::TableConfig;
use crate::contract::tensor::Tensor;
use crate::error::{Error, Result};
use crate::formula::update::{Update, UpdateScalars, clipnorm_factor};
use crate::host::accumulator::Accumulator;
use crate::host::merge::{MergedGradients, RecordGradients};
use crate::host::push::PushedGradients;
use crate::host::table::HostTable;
use crate::host::update::UpdateTask;
use crate::pool::{Pool, num_pieces, run_if_large};
use crate::store::arena::RecordNumber;

/// The scalars of an `apply`.
#[derive(Clone, Debug, PartialEq)]
pub struct ApplyScalars {
    /// Scalars of each optimizer, by row.
    pub rows: Vec<UpdateScalars>,
    /// If false, the committed gradients are only accumulated.
    pub is_update: bool,
}

impl ApplyScalars {
    /// Returns the scalars of one optimizer.
    pub fn new(update: UpdateScalars, is_update: bool) -> ApplyScalars {
        ApplyScalars { rows: vec![update], is_update }
    }

    /// Reads learning rate, step, is_update and factor of each optimizer from host memory.
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of them.
    pub(in crate::host) fn read(scalars: &Tensor) -> Result<ApplyScalars> {
        let (rows, rest) = scalars.slice::<f32>()?.as_chunks();
        if rows.is_empty() || !rest.is_empty() {
            return Err(Error::argument("apply takes four scalars for each optimizer"));
        }
        let update = |&[learning_rate, step, _, factor]: &[f32; 4]| UpdateScalars {
            learning_rate,
            step: step as u64,
            factor,
        };
        Ok(ApplyScalars { rows: rows.iter().map(update).collect(), is_update: rows[0][2] != 0.0 })
    }

    /// Returns the scalars of the optimizer of a table.
    pub(super) fn of(&self, binding: &Binding, config: &TableConfig) -> UpdateScalars {
        self.rows[binding.row_of(config.optimizer)]
    }
}

impl HostGroup {
    /// Updates the records of the committed pushes, or only accumulates their gradients.
    ///
    /// # Errors
    /// The same as `take_over`. [`Error::Argument`] for too few scalars. [`Error::State`] if an optimizer without a formula has not brought all new values; the gradients are
    /// dropped then.
    pub fn apply(&mut self, binding: &Binding, scalars: &ApplyScalars, pool: &Pool) -> Result<()> {
        self.take_over(binding)?;
        binding.check_rows(scalars.rows.len())?;
        self.tables.iter_mut().for_each(HostTable::count_call);
        if !scalars.is_update {
            return self.accumulate(pool);
        }
        self.tables.iter_mut().for_each(|table| table.has_loaded_states = false);
        self.touch_rows();
        self.begin_steps(binding, scalars);
        let is_general = binding.update.rule.is_general();
        if is_general {
            let start = self.stopwatch.start();
            let done = self.apply_new_values(&scalars.rows[0], pool);
            self.stopwatch.stop(StepPart::Update, start);
            if done.is_err() || binding.others.is_empty() {
                self.end_update();
                return done;
            }
        }
        let is_single = self.committed.len() == 1 && self.accumulators.iter().all(Accumulator::is_empty);
        let is_held = is_single
            && matches!(self.committed[0].1.gradients, PushedGradients::Held { .. })
            && !binding.clips_norms();
        if !is_held {
            self.merge_committed(pool)?;
        }
        let start = self.stopwatch.start();
        if is_held {
            self.apply_held(binding, scalars, pool);
        } else {
            self.apply_stored(binding, scalars, pool);
        }
        self.tables.iter_mut().for_each(|table| table.end_update(pool));
        self.stopwatch.stop(StepPart::Update, start);
        self.end_update();
        Ok(())
    }

    /// Begins the step in tables of which all rows take it.
    fn begin_steps(&mut self, binding: &Binding, scalars: &ApplyScalars) {
        let HostGroup { tables, committed, accumulators, .. } = self;
        for (number, table) in tables.iter_mut().enumerate().filter(|(_, table)| table.missed.is_some()) {
            let generation = table.generation;
            let saved = committed.iter().flat_map(|(_, push)| &push.lookup.tables);
            let own = saved.filter(|saved| saved.number == number && saved.generation == generation);
            let stored = accumulators[number].stored(generation);
            let records = own.flat_map(|saved| saved.runs().map(|(_, records)| records));
            let records: Vec<&[RecordNumber]> =
                records.chain(stored.as_ref().map(|stored| stored.records)).collect();
            table.begin_update(scalars.of(binding, &table.config), &records);
        }
    }

    /// Notes which rows the update changes, for tables that are dumped.
    fn touch_rows(&mut self) {
        let HostGroup { tables, committed, accumulators, .. } = self;
        for (number, table) in tables.iter_mut().enumerate().filter(|(_, table)| table.changes.is_some()) {
            let generation = table.generation;
            let saved = committed.iter().flat_map(|(_, push)| &push.lookup.tables);
            for saved in saved.filter(|saved| saved.number == number && saved.generation == generation) {
                saved.runs().for_each(|(_, records)| table.touch(records));
            }
            if let Some(stored) = accumulators[number].stored(generation) {
                table.touch(stored.records);
            }
        }
    }

    /// Forgets the gradients that were applied.
    fn end_update(&mut self) {
        self.drop_committed();
        self.accumulators.iter_mut().for_each(Accumulator::clear);
    }

    fn apply_held(&mut self, binding: &Binding, scalars: &ApplyScalars, pool: &Pool) {
        let Some((weight, push)) = self.committed.first() else { return };
        let PushedGradients::Held { rows, .. } = &push.gradients else { return };
        let mut tables: Vec<Option<&mut HostTable>> = self.tables.iter_mut().map(Some).collect();
        let mut work = Vec::new();
        for saved in &push.lookup.tables {
            let table = tables[saved.number].take().filter(|table| table.generation == saved.generation);
            if let Some(table) = table {
                let (update, scalars) =
                    (binding.update_of(&table.config), scalars.of(binding, &table.config));
                work.push((table, saved.hold(rows, *weight), update, scalars));
            }
        }
        run_updates(work, pool);
    }

    /// Updates the records of all tables whose optimizer has a formula.
    fn apply_stored(&mut self, binding: &Binding, scalars: &ApplyScalars, pool: &Pool) {
        let mut tables = std::mem::take(&mut self.tables);
        // `stored` reads the generations of the tables, so the arenas are borrowed separately.
        let generations: Vec<u64> = tables.iter().map(|t| t.generation).collect();
        let has_formula = |table: &HostTable| !binding.update_of(&table.config).rule.is_general();
        let of_formulas = tables.iter_mut().enumerate().filter(|(_, table)| has_formula(table));
        let work = of_formulas.map(|(number, table)| {
            let (update, scalars) = (binding.update_of(&table.config), scalars.of(binding, &table.config));
            let stored = self.stored(number, generations[number]);
            (table, stored, update, self.clipped(number, update, &scalars))
        });
        run_updates(work.collect(), pool);
        self.tables = tables;
    }

    /// The scalars of a table, whose factor clips its gradients by their norm.
    pub(super) fn clipped(&self, number: usize, update: &Update, scalars: &UpdateScalars) -> UpdateScalars {
        let mut scalars = *scalars;
        if let Some(clipnorm) = update.clipnorm {
            scalars.factor *= clipnorm_factor(self.norms[number] * scalars.factor * scalars.factor, clipnorm);
        }
        scalars
    }
}

/// Updates the records of several tables with their merged gradients.
#[allow(unsafe_code)]
fn run_updates<G: MergedGradients>(
    mut work: Vec<(&mut HostTable, Vec<RecordGradients<G>>, &Update, UpdateScalars)>,
    pool: &Pool,
) {
    let total: usize = work.iter().flat_map(|(_, gradients, ..)| gradients).map(|g| g.records.len()).sum();
    let mut tasks = Vec::new();
    for (table, gradients, update, scalars) in &mut work {
        let (format, chance) = (table.first.format, table.chance(scalars));
        let arena = table.arena.share();
        for gradients in &*gradients {
            for keys in gradients.gradients.pieces(num_pieces(gradients.records.len(), total, pool)) {
                let scalars = *scalars;
                tasks.push(UpdateTask { arena, format, chance, gradients, keys, update, scalars });
            }
        }
    }
    // SAFETY: - the tables are borrowed mutably: nobody else has their arenas.
    //         - the records of all tasks are distinct: keys of a table are distinct over its gradients, and pieces are.
    run_if_large(total, tasks, pool, |task| unsafe { task.run() });
}
