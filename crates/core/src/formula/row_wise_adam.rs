//! Adam with one second moment for each row: the mean of the squares of its gradient.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_moments;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `sok_keras.optimizers.RowWiseAdam`. Tables of dim 1 move as with [`Adam`](super::Adam), bit for bit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowWiseAdam {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root.
    pub epsilon: f64,
}

impl Formula for RowWiseAdam {
    const VARIANTS: &'static [RowWiseAdam] = &[RowWiseAdam { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7 }];

    fn validate(&self) -> Result<()> {
        check_moments(self.beta_1, self.beta_2, self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(RowWiseAdamStep {
            one_minus_beta_1: (1.0 - self.beta_1) as f32,
            one_minus_beta_2: (1.0 - self.beta_2) as f32,
            epsilon: self.epsilon as f32,
            beta_1: self.beta_1 as f32,
            beta_2: self.beta_2 as f32,
            ..RowWiseAdamStep::default()
        })
    }
}

step! {
    /// `alpha`: the learning rate with both bias corrections. `first_velocity`: 0.
    RowWiseAdamStep {
        scalars: [alpha, one_minus_beta_1, one_minus_beta_2, epsilon, learning_rate, beta_1, beta_2, first_velocity],
        states: [momentum],
        row_state: velocity = first_velocity,
        prepare(count) {
            alpha = learning_rate * sqrt(1.0 - power_of_step(beta_2, count)) / (1.0 - power_of_step(beta_1, count));
        }
        reduce(mean_of_squares) -> divisor {
            velocity += (mean_of_squares - velocity) * one_minus_beta_2;
            let divisor = sqrt(velocity) + epsilon;
        }
        step(x, gradient) {
            momentum += (gradient - momentum) * one_minus_beta_1;
            x -= (momentum * alpha) / divisor;
        }
    }
}
