//! LAMB: Adam's direction, as long as the row. A row is a variable of its own.
//!
//! Source: Y. You et al., "Large Batch Optimization for Deep Learning", 2019, <https://arxiv.org/abs/1904.00962>, as Keras has it.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_moments;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Lamb`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lamb {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root.
    pub epsilon: f64,
}

impl Formula for Lamb {
    const VARIANTS: &'static [Lamb] = &[Lamb { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7 }];

    fn validate(&self) -> Result<()> {
        check_moments(self.beta_1, self.beta_2, self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(LambStep {
            one_minus_beta_1: (1.0 - self.beta_1) as f32,
            one_minus_beta_2: (1.0 - self.beta_2) as f32,
            epsilon: self.epsilon as f32,
            beta_1: self.beta_1 as f32,
            beta_2: self.beta_2 as f32,
            ..LambStep::default()
        })
    }
}

step! {
    /// `correction_1`, `correction_2`: what the moments are divided by, since they start at 0.
    LambStep {
        scalars: [learning_rate, one_minus_beta_1, one_minus_beta_2, epsilon, beta_1, beta_2, correction_1, correction_2],
        states: [momentum, velocity],
        prepare(count) {
            correction_1 = 1.0 - power_of_step(beta_1, count);
            correction_2 = 1.0 - power_of_step(beta_2, count);
        }
        direct(gradient) -> update {
            momentum += (gradient - momentum) * one_minus_beta_1;
            velocity += (gradient * gradient - velocity) * one_minus_beta_2;
            let update = (momentum / correction_1) / (sqrt(velocity / correction_2) + epsilon);
        }
        ratio(of_row, of_update) -> ratio {
            let mut ratio = 1.0;
            if (of_row > 0.0 && of_update > 0.0) {
                ratio = sqrt(of_row) / sqrt(of_update);
            }
        }
        step(x, update) {
            x -= ratio * learning_rate * update;
        }
    }
}
