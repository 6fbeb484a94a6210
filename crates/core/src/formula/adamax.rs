//! Adamax: Adam with the largest gradient in place of the second moment.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::{check_below_one, check_fraction, check_not_negative};
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Adamax`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adamax {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the largest gradient.
    pub beta_2: f64,
    /// Added to the largest gradient.
    pub epsilon: f64,
}

impl Formula for Adamax {
    const VARIANTS: &'static [Adamax] = &[Adamax { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7 }];

    fn validate(&self) -> Result<()> {
        check_below_one("beta_1", self.beta_1)?;
        check_fraction("beta_2", self.beta_2)?;
        check_not_negative("epsilon", self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(AdamaxStep {
            one_minus_beta_1: (1.0 - self.beta_1) as f32,
            beta_1: self.beta_1 as f32,
            beta_2: self.beta_2 as f32,
            epsilon: self.epsilon as f32,
            ..AdamaxStep::default()
        })
    }
}

step! {
    /// `correction`: the bias correction of the first moment.
    AdamaxStep {
        scalars: [learning_rate, correction, one_minus_beta_1, beta_2, epsilon, beta_1],
        states: [momentum, norm],
        prepare(count) {
            correction = 1.0 - power_of_step(beta_1, count);
        }
        step(x, gradient) {
            momentum += (gradient - momentum) * one_minus_beta_1;
            norm = larger(beta_2 * norm, absolute(gradient));
            x -= (learning_rate * momentum) / (correction * (norm + epsilon));
        }
    }
}
