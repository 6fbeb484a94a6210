//! One optimizer step for many records. Merged gradients stay in registers until they update their record.

use std::ops::Range;

use crate::formula::update::{Conditioning, Update, UpdateScalars};
use crate::formula::{MAX_STATES, Step, StepVisitor};
use crate::host::merge::{MergedGradients, RecordGradients};
use crate::math::sum_of_squares;
use crate::row_type::RowType;
use crate::simd::{Kernel, dispatch, prefetch};
use crate::store::arena::{NO_RECORD, RecordNumber, SharedArena};
use crate::store::format::{Chance, RecordFormat};

/// How many records are prefetched ahead.
const AHEAD: usize = 24;

/// What one thread updates: some keys of a table.
pub struct UpdateTask<'a, G> {
    pub arena: SharedArena<'a>,
    pub format: RecordFormat,
    /// By which rows of 16 bits are rounded, if they are rounded by chance.
    pub chance: Chance,
    pub gradients: &'a RecordGradients<'a, G>,
    pub keys: Range<usize>,
    pub update: &'a Update,
    pub scalars: UpdateScalars,
}

impl<G: MergedGradients> UpdateTask<'_, G> {
    /// # Safety
    /// Until it returns, no other thread reads or writes the records of its keys.
    #[allow(unsafe_code)]
    pub unsafe fn run(self) {
        let rule = self.update.rule;
        rule.visit(self);
    }
}

impl<G: MergedGradients> StepVisitor for UpdateTask<'_, G> {
    type Output = ();

    fn visit<S: Step>(self, mut step: S) {
        step.prepare(self.scalars.learning_rate, self.scalars.step);
        let conditioning = self.update.conditioning(&self.scalars);
        match self.format.dim {
            16 => dispatch(RecordUpdate::<16, _, _> { task: self, step, conditioning }),
            32 => dispatch(RecordUpdate::<32, _, _> { task: self, step, conditioning }),
            64 => dispatch(RecordUpdate::<64, _, _> { task: self, step, conditioning }),
            128 => dispatch(RecordUpdate::<128, _, _> { task: self, step, conditioning }),
            _ => dispatch(RecordUpdate::<0, _, _> { task: self, step, conditioning }),
        }
    }
}

impl<G: MergedGradients> UpdateTask<'_, G> {
    #[inline(always)]
    fn prefetch(&self, key: usize) {
        let records = self.gradients.records;
        let Some(&record) = records.get(key) else { return };
        let (start, bytes) = (self.arena.addresses().get(record).cast::<u8>(), self.arena.width() * 4);
        let mut offset = 0;
        while offset < bytes {
            prefetch(start.wrapping_add(offset));
            offset += 64;
        }
    }

    /// The record of a key, unless it has none any more.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn record<'s>(arena: SharedArena<'s>, record: RecordNumber) -> Option<&'s mut [f32]> {
        // SAFETY: the promise of `run`'s caller; distinct keys have distinct records.
        (record != NO_RECORD).then(|| unsafe { arena.record_mut(record) })
    }
}

/// `D`: the dim, or 0 if it is not constant.
struct RecordUpdate<'a, const D: usize, S, G> {
    task: UpdateTask<'a, G>,
    step: S,
    conditioning: Conditioning,
}

impl<const D: usize, S: Step, G: MergedGradients> Kernel for RecordUpdate<'_, D, S, G> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let format = self.task.format;
        let dim = if D > 0 { D } else { format.dim };
        let (mut constant, mut any) = ([0f32; D], vec![0f32; if D > 0 { 0 } else { dim }]);
        let is_wide = format.row_type == RowType::Float32;
        // The row of a record whose numbers have 16 bits.
        let mut values = vec![0f32; if is_wide { 0 } else { dim }];
        let (step, conditioning) = (&self.step, &self.conditioning);
        for key in self.task.keys.clone() {
            self.task.prefetch(key + AHEAD);
            let record = UpdateTask::<G>::record(self.task.arena, self.task.gradients.records[key]);
            let Some(record) = record else { continue };
            let gradient: &mut [f32] = if D > 0 { &mut constant } else { &mut any };
            self.task.gradients.gradients.merge::<D>(key, gradient);
            if is_wide {
                let (row, states) = record.split_at_mut(dim);
                update_record::<D, S>(step, conditioning, row, states, gradient);
            } else {
                format.read_row(record, &mut values);
                let states = &mut record[format.states_start()..];
                update_record::<D, S>(step, conditioning, &mut values[..dim], states, gradient);
                format.write_updated(record, &values, &self.task.chance);
            }
        }
    }
}

/// Updates a record by a merged gradient, which is overwritten. `D`: the dim, or 0 if it is not constant.
#[inline(always)]
pub fn update_record<const D: usize, S: Step>(
    step: &S,
    conditioning: &Conditioning,
    row: &mut [f32],
    states: &mut [f32],
    gradient: &mut [f32],
) {
    let dim = if D > 0 { D } else { row.len() };
    let row = &mut row[..dim];
    let (first, rest) = states.split_at_mut(if S::STATES > 0 { dim } else { 0 });
    let (second, rest) = rest.split_at_mut(if S::STATES > 1 { dim } else { 0 });
    let (third, rest) = rest.split_at_mut(if S::STATES > 2 { dim } else { 0 });
    let mut states = States { first, second, third };
    let mut reduced = 0.0;
    if S::REDUCES {
        gradient.iter_mut().for_each(|g| *g = conditioning.gradient(*g));
        reduced = step.reduce(&mut rest[0], sum_of_squares(gradient) / dim as f32);
    }
    if S::DIRECTS {
        for column in 0..dim {
            let mut of_column = states.get::<S>(column);
            let conditioned = conditioning.gradient(gradient[column]);
            gradient[column] = step.direct(&mut of_column, conditioned);
            states.set::<S>(column, of_column);
            row[column] = conditioning.value(row[column]);
        }
        let ratio = step.ratio(sum_of_squares(row), sum_of_squares(gradient));
        for column in 0..dim {
            row[column] = step.step(row[column], &mut [0.0; MAX_STATES], gradient[column], ratio);
        }
        return;
    }
    for column in 0..dim {
        let mut of_column = states.get::<S>(column);
        let mut gradient = gradient[column];
        if !S::REDUCES {
            gradient = conditioning.gradient(gradient);
        }
        let value = conditioning.value(row[column]);
        row[column] = step.step(value, &mut of_column, gradient, reduced);
        states.set::<S>(column, of_column);
    }
}

/// The states of a record. Each has as many columns as the row, or none if the step has no such state.
struct States<'a> {
    first: &'a mut [f32],
    second: &'a mut [f32],
    third: &'a mut [f32],
}

impl States<'_> {
    #[inline(always)]
    fn get<S: Step>(&self, column: usize) -> [f32; MAX_STATES] {
        let mut states = [0f32; MAX_STATES];
        if S::STATES > 0 {
            states[0] = self.first[column];
        }
        if S::STATES > 1 {
            states[1] = self.second[column];
        }
        if S::STATES > 2 {
            states[2] = self.third[column];
        }
        states
    }

    #[inline(always)]
    fn set<S: Step>(&mut self, column: usize, states: [f32; MAX_STATES]) {
        if S::STATES > 0 {
            self.first[column] = states[0];
        }
        if S::STATES > 1 {
            self.second[column] = states[1];
        }
        if S::STATES > 2 {
            self.third[column] = states[2];
        }
    }
}
