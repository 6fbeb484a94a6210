//! One step of one record, the plain way: column by column.

use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::formula::{MAX_STATES, Step, StepVisitor};
use sok_core::math::sum_of_squares;

/// `record`: the row and its states, one after the other.
pub fn update_record(update: &Update, scalars: &UpdateScalars, record: &mut [f32], gradient: &[f32]) {
    if update.rule.is_general() {
        return update_by_foreign_code(update, scalars, record, gradient);
    }
    update.rule.visit(RecordStep { update, scalars, record, gradient });
}

/// What the tests' optimizer without a formula does to an element.
pub fn step_element(x: &mut f32, [momentum, sum]: [&mut f32; 2], gradient: f32, learning_rate: f32) {
    *momentum = *momentum * 0.5 + gradient;
    *sum += gradient.abs();
    *x -= learning_rate * *momentum / (1.0 + *sum);
}

fn update_by_foreign_code(update: &Update, scalars: &UpdateScalars, record: &mut [f32], gradient: &[f32]) {
    let (conditioning, dim) = (update.conditioning(scalars), gradient.len());
    for (column, gradient) in gradient.iter().enumerate() {
        let (mut x, mut momentum, mut sum) =
            (conditioning.value(record[column]), record[dim + column], record[2 * dim + column]);
        let gradient = conditioning.gradient(*gradient);
        step_element(&mut x, [&mut momentum, &mut sum], gradient, scalars.learning_rate);
        (record[column], record[dim + column], record[2 * dim + column]) = (x, momentum, sum);
    }
}

impl RecordStep<'_> {
    /// A step whose length depends on the row and on what is made of its gradient.
    fn directed<S: Step>(self, step: &S, gradient: Vec<f32>) {
        let dim = gradient.len();
        let conditioning = self.update.conditioning(self.scalars);
        let mut directions = Vec::new();
        for (column, gradient) in gradient.into_iter().enumerate() {
            let mut states = [f32::NAN; MAX_STATES];
            for i in 0..S::STATES {
                states[i] = self.record[(1 + i) * dim + column];
            }
            directions.push(step.direct(&mut states, gradient));
            for i in 0..S::STATES {
                self.record[(1 + i) * dim + column] = states[i];
            }
            self.record[column] = conditioning.value(self.record[column]);
        }
        let ratio = step.ratio(sum_of_squares(&self.record[..dim]), sum_of_squares(&directions));
        for (x, direction) in self.record.iter_mut().zip(directions) {
            *x = step.step(*x, &mut [f32::NAN; MAX_STATES], direction, ratio);
        }
    }
}

struct RecordStep<'a> {
    update: &'a Update,
    scalars: &'a UpdateScalars,
    record: &'a mut [f32],
    gradient: &'a [f32],
}

impl StepVisitor for RecordStep<'_> {
    type Output = ();

    fn visit<S: Step>(self, mut step: S) {
        let dim = self.gradient.len();
        assert_eq!(self.record.len(), dim * (1 + S::STATES) + usize::from(S::REDUCES));
        step.prepare(self.scalars.learning_rate, self.scalars.step);
        let conditioning = self.update.conditioning(self.scalars);
        let gradient: Vec<f32> = self.gradient.iter().map(|g| conditioning.gradient(*g)).collect();
        let mut reduced = f32::NAN;
        if S::REDUCES {
            let mean_of_squares = sum_of_squares(&gradient) / dim as f32;
            reduced = step.reduce(self.record.last_mut().unwrap(), mean_of_squares);
        }
        if S::DIRECTS {
            return self.directed(&step, gradient);
        }
        for (column, gradient) in gradient.into_iter().enumerate() {
            let mut states = [f32::NAN; MAX_STATES];
            for i in 0..S::STATES {
                states[i] = self.record[(1 + i) * dim + column];
            }
            let x = conditioning.value(self.record[column]);
            self.record[column] = step.step(x, &mut states, gradient, reduced);
            for i in 0..S::STATES {
                self.record[(1 + i) * dim + column] = states[i];
            }
        }
    }
}
