//! Adadelta: steps in units of earlier steps.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::{check_fraction, check_not_negative};
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Adadelta`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adadelta {
    /// Decay of the means of squares.
    pub rho: f64,
    /// Added under the roots.
    pub epsilon: f64,
}

impl Formula for Adadelta {
    const VARIANTS: &'static [Adadelta] = &[Adadelta { rho: 0.9, epsilon: 1e-5 }];

    fn validate(&self) -> Result<()> {
        check_fraction("rho", self.rho)?;
        check_not_negative("epsilon", self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(AdadeltaStep {
            rho: self.rho as f32,
            one_minus_rho: (1.0 - self.rho) as f32,
            epsilon: self.epsilon as f32,
            ..AdadeltaStep::default()
        })
    }
}

step! {
    AdadeltaStep {
        scalars: [learning_rate, rho, one_minus_rho, epsilon],
        states: [accumulated_grad, accumulated_delta_var],
        step(x, gradient) {
            accumulated_grad = rho * accumulated_grad + one_minus_rho * (gradient * gradient);
            let delta = (sqrt(accumulated_delta_var + epsilon) * gradient) / sqrt(accumulated_grad + epsilon);
            accumulated_delta_var = rho * accumulated_delta_var + one_minus_rho * (delta * delta);
            x -= learning_rate * delta;
        }
    }
}
