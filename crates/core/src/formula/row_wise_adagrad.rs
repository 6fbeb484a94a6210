//! Adagrad with one accumulator for each row: the running sum of the mean of squares of its gradient.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_not_negative;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `sok_keras.optimizers.RowWiseAdagrad`. Tables of dim 1 move as with [`Adagrad`](super::Adagrad), bit for bit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowWiseAdagrad {
    /// First value of the accumulators.
    pub initial_accumulator_value: f64,
    /// Added under the root.
    pub epsilon: f64,
}

impl Formula for RowWiseAdagrad {
    const VARIANTS: &'static [RowWiseAdagrad] =
        &[RowWiseAdagrad { initial_accumulator_value: 0.2, epsilon: 1e-7 }];

    fn validate(&self) -> Result<()> {
        check_not_negative("initial_accumulator_value", self.initial_accumulator_value)?;
        check_not_negative("epsilon", self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(RowWiseAdagradStep {
            epsilon: self.epsilon as f32,
            initial_accumulator_value: self.initial_accumulator_value as f32,
            ..RowWiseAdagradStep::default()
        })
    }
}

step! {
    RowWiseAdagradStep {
        scalars: [learning_rate, epsilon, initial_accumulator_value],
        states: [],
        row_state: accumulator = initial_accumulator_value,
        reduce(mean_of_squares) -> divisor {
            accumulator += mean_of_squares;
            let divisor = sqrt(accumulator + epsilon);
        }
        step(x, gradient) {
            x -= (learning_rate * gradient) / divisor;
        }
    }
}
