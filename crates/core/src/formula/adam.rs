//! Adam and AMSGrad. AdamW is Adam with a weight decay.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_moments;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Adam`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root.
    pub epsilon: f64,
    /// Whether the largest second moment so far is used.
    pub amsgrad: bool,
}

impl Formula for Adam {
    const VARIANTS: &'static [Adam] = &[
        Adam { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7, amsgrad: false },
        Adam { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7, amsgrad: true },
    ];

    fn validate(&self) -> Result<()> {
        check_moments(self.beta_1, self.beta_2, self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        if self.amsgrad { visitor.visit(self.step::<true>()) } else { visitor.visit(self.step::<false>()) }
    }
}

impl Adam {
    fn step<const AMSGRAD: bool>(&self) -> AdamStep<AMSGRAD> {
        AdamStep {
            one_minus_beta_1: (1.0 - self.beta_1) as f32,
            one_minus_beta_2: (1.0 - self.beta_2) as f32,
            epsilon: self.epsilon as f32,
            // Keras raises the betas as float32 variables, so they are rounded before they are raised: `1 - beta_2` of the first
            // step would be off by a part in 10^5 otherwise.
            beta_1: self.beta_1 as f32,
            beta_2: self.beta_2 as f32,
            ..AdamStep::default()
        }
    }
}

step! {
    /// `alpha`: the learning rate with both bias corrections.
    AdamStep<AMSGRAD> {
        scalars: [alpha, one_minus_beta_1, one_minus_beta_2, epsilon, learning_rate, beta_1, beta_2],
        states: [momentum, velocity, velocity_hat if AMSGRAD],
        prepare(count) {
            alpha = learning_rate * sqrt(1.0 - power_of_step(beta_2, count)) / (1.0 - power_of_step(beta_1, count));
        }
        step(x, gradient) {
            momentum += (gradient - momentum) * one_minus_beta_1;
            velocity += (gradient * gradient - velocity) * one_minus_beta_2;
            let mut variance = velocity;
            if (AMSGRAD) {
                velocity_hat = larger(velocity_hat, velocity);
                variance = velocity_hat;
            }
            x -= (momentum * alpha) / (sqrt(variance) + epsilon);
        }
    }
}
