//! Lion: the sign of a momentum.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_fraction;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Lion`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lion {
    /// Weight of the momentum in the direction of a step.
    pub beta_1: f64,
    /// Decay of the momentum.
    pub beta_2: f64,
}

impl Formula for Lion {
    const VARIANTS: &'static [Lion] = &[Lion { beta_1: 0.9, beta_2: 0.99 }];

    fn validate(&self) -> Result<()> {
        check_fraction("beta_1", self.beta_1)?;
        check_fraction("beta_2", self.beta_2)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(LionStep {
            beta_1: self.beta_1 as f32,
            beta_2: self.beta_2 as f32,
            ..LionStep::default()
        })
    }
}

step! {
    LionStep {
        scalars: [learning_rate, beta_1, beta_2],
        states: [momentum],
        step(x, gradient) {
            x -= learning_rate * sign(momentum * beta_1 + gradient * (1.0 - beta_1));
            momentum = momentum * beta_2 + gradient * (1.0 - beta_2);
        }
    }
}
