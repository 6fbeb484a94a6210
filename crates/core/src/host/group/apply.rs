//! The apply of a group: the update of records.

use super::HostGroup;
use crate::contract::binding::Binding;
use crate::contract::group::Group;
use crate::contract::profile::StepPart;
use crate::contract::tensor::Tensor;
use crate::error::{Error, Result};
use crate::formula::update::{Update, UpdateScalars, clipnorm_factor};
use crate::host::accumulator::Accumulator;
use crate::host::merge::{MergedGradients, RecordGradients};
use crate::host::push::PushedGradients;
use crate::host::table::HostTable;
use crate::host::update::UpdateTask;
use crate::pool::{Pool, num_pieces, run_if_large};

/// The scalars of an `apply`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ApplyScalars {
    /// Scalars of the update.
    pub update: UpdateScalars,
    /// If false, the committed gradients are only accumulated.
    pub is_update: bool,
}

impl ApplyScalars {
    /// Reads learning rate, step, is_update and factor from host memory.
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of them.
    pub(in crate::host) fn read(scalars: &Tensor) -> Result<ApplyScalars> {
        let &[learning_rate, step, is_update, factor] = scalars.slice::<f32>()? else {
            return Err(Error::argument("apply takes four scalars"));
        };
        let update = UpdateScalars { learning_rate, step: step as u64, factor };
        Ok(ApplyScalars { update, is_update: is_update != 0.0 })
    }
}

impl HostGroup {
    /// Updates the records of the committed pushes, or only accumulates their gradients.
    ///
    /// # Errors
    /// The same as `take_over`. [`Error::State`] if an optimizer without a formula has not brought all new values; the gradients are
    /// dropped then.
    pub fn apply(&mut self, binding: &Binding, scalars: &ApplyScalars, pool: &Pool) -> Result<()> {
        self.take_over(binding)?;
        self.tables.iter_mut().for_each(HostTable::count_call);
        if !scalars.is_update {
            return self.accumulate(pool);
        }
        self.touch_rows();
        if binding.update.rule.is_general() {
            let start = self.stopwatch.start();
            let done = self.apply_new_values(&scalars.update, pool);
            self.stopwatch.stop(StepPart::Update, start);
            self.end_update();
            return done;
        }
        let is_single = self.committed.len() == 1 && self.accumulators.iter().all(Accumulator::is_empty);
        let is_held = is_single
            && matches!(self.committed[0].1.gradients, PushedGradients::Held { .. })
            && binding.update.clipnorm.is_none();
        if !is_held {
            self.merge_committed(pool)?;
        }
        let start = self.stopwatch.start();
        if is_held {
            self.apply_held(&binding.update, &scalars.update, pool);
        } else {
            self.apply_stored(binding, &scalars.update, pool);
        }
        self.stopwatch.stop(StepPart::Update, start);
        self.end_update();
        Ok(())
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
        let scaled: Vec<_> =
            (0..tables.len()).map(|number| self.clipped(number, &binding.update, scalars)).collect();
        let work = tables.iter_mut().enumerate().map(|(number, table)| {
            let stored = self.stored(number, generations[number]);
            (table, stored, &binding.update, &scaled[number])
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
    mut work: Vec<(&mut HostTable, Vec<RecordGradients<G>>, &Update, &UpdateScalars)>,
    pool: &Pool,
) {
    let total: usize = work.iter().flat_map(|(_, gradients, ..)| gradients).map(|g| g.records.len()).sum();
    let mut tasks = Vec::new();
    for (table, gradients, update, scalars) in &mut work {
        let (format, chance) = (table.first.format, table.chance(scalars));
        let arena = table.arena.share();
        for gradients in &*gradients {
            for keys in gradients.gradients.pieces(num_pieces(gradients.records.len(), total, pool)) {
                let scalars = **scalars;
                tasks.push(UpdateTask { arena, format, chance, gradients, keys, update, scalars });
            }
        }
    }
    // SAFETY: - the tables are borrowed mutably: nobody else has their arenas.
    //         - the records of all tasks are distinct: keys of a table are distinct over its gradients, and pieces are.
    run_if_large(total, tasks, pool, |task| unsafe { task.run() });
}
