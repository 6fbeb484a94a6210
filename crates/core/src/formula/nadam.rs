//! Nadam: Adam with Nesterov's momentum, whose decay grows with the steps.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_moments;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Nadam`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nadam {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root.
    pub epsilon: f64,
}

impl Formula for Nadam {
    const VARIANTS: &'static [Nadam] = &[Nadam { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7 }];

    fn validate(&self) -> Result<()> {
        check_moments(self.beta_1, self.beta_2, self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(NadamStep {
            beta_1: self.beta_1 as f32,
            beta_2: self.beta_2 as f32,
            epsilon: self.epsilon as f32,
            ..NadamStep::default()
        })
    }
}

step! {
    /// Keras keeps the product of the decays of all steps in a variable. Here it follows from the count of steps, since a table has no
    /// such variable. `of_momentum`, `of_gradient`: weights of the momentum and of the gradient in the direction of a step.
    NadamStep {
        scalars: [learning_rate, of_momentum, of_gradient, correction, epsilon, beta_1, beta_2],
        states: [momentum, velocity],
        prepare(count) {
            let power = power_of_step(0.96, count);
            let decay = beta_1 * (1.0 - 0.5 * power);
            let next_decay = beta_1 * (1.0 - 0.5 * (power * 0.96));
            let product = power_of_step(beta_1, count) * nadam_product(count);
            of_momentum = next_decay / (1.0 - product * next_decay);
            of_gradient = (1.0 - decay) / (1.0 - product);
            correction = 1.0 - power_of_step(beta_2, count);
        }
        step(x, gradient) {
            momentum += (gradient - momentum) * (1.0 - beta_1);
            velocity += (gradient * gradient - velocity) * (1.0 - beta_2);
            let direction = of_momentum * momentum + of_gradient * gradient;
            x -= (direction * learning_rate) / (sqrt(velocity / correction) + epsilon);
        }
    }
}
