//! Adagrad.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_not_negative;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Adagrad`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adagrad {
    /// First value of the accumulators.
    pub initial_accumulator_value: f64,
    /// Added under the root.
    pub epsilon: f64,
}

impl Formula for Adagrad {
    const VARIANTS: &'static [Adagrad] = &[Adagrad { initial_accumulator_value: 0.1, epsilon: 1e-7 }];

    fn validate(&self) -> Result<()> {
        check_not_negative("initial_accumulator_value", self.initial_accumulator_value)?;
        check_not_negative("epsilon", self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(AdagradStep {
            epsilon: self.epsilon as f32,
            initial_accumulator_value: self.initial_accumulator_value as f32,
            ..AdagradStep::default()
        })
    }
}

step! {
    AdagradStep {
        scalars: [learning_rate, epsilon, initial_accumulator_value],
        states: [accumulator = initial_accumulator_value],
        step(x, gradient) {
            accumulator += gradient * gradient;
            x -= (learning_rate * gradient) / sqrt(accumulator + epsilon);
        }
    }
}
