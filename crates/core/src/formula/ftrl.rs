//! FTRL-Proximal with L1, L2 and shrinkage.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::{check_not_negative, check_not_positive};
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.Ftrl`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ftrl {
    /// Power of the accumulator, with its sign turned.
    pub learning_rate_power: f64,
    /// First value of the accumulators.
    pub initial_accumulator_value: f64,
    /// Strength of L1.
    pub l1_regularization_strength: f64,
    /// Strength of L2.
    pub l2_regularization_strength: f64,
    /// Strength of the L2 penalty on the gradient.
    pub l2_shrinkage_regularization_strength: f64,
    /// Added to the root of the accumulator, over the learning rate.
    pub beta: f64,
}

impl Formula for Ftrl {
    const VARIANTS: &'static [Ftrl] = &[Ftrl::with_power(-0.5), Ftrl::with_power(-0.7)];

    fn validate(&self) -> Result<()> {
        check_not_positive("learning_rate_power", self.learning_rate_power)?;
        check_not_negative("initial_accumulator_value", self.initial_accumulator_value)?;
        check_not_negative("l1_regularization_strength", self.l1_regularization_strength)?;
        check_not_negative("l2_regularization_strength", self.l2_regularization_strength)?;
        let shrinkage = self.l2_shrinkage_regularization_strength;
        check_not_negative("l2_shrinkage_regularization_strength", shrinkage)?;
        check_not_negative("beta", self.beta)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        if self.learning_rate_power == -0.5 {
            visitor.visit(self.step::<true>())
        } else {
            visitor.visit(self.step::<false>())
        }
    }
}

impl Ftrl {
    const fn with_power(learning_rate_power: f64) -> Ftrl {
        Ftrl {
            learning_rate_power,
            initial_accumulator_value: 0.1,
            l1_regularization_strength: 0.001,
            l2_regularization_strength: 0.01,
            l2_shrinkage_regularization_strength: 0.01,
            beta: 0.1,
        }
    }

    fn step<const IS_ROOT: bool>(&self) -> FtrlStep<IS_ROOT> {
        FtrlStep {
            l1: self.l1_regularization_strength as f32,
            l2: self.l2_regularization_strength as f32,
            beta: self.beta as f32,
            twice_shrinkage: (2.0 * self.l2_shrinkage_regularization_strength) as f32,
            exponent: -self.learning_rate_power as f32,
            initial_accumulator_value: self.initial_accumulator_value as f32,
            ..FtrlStep::default()
        }
    }
}

step! {
    /// `exponent`: Keras' `learning_rate_power` with its sign turned. `IS_ROOT`: it is one half, the default; a square root is many
    /// times faster than a power.
    FtrlStep<IS_ROOT> {
        scalars: [learning_rate, l1, twice_l2, twice_shrinkage, exponent, l2, beta, initial_accumulator_value],
        states: [accumulator = initial_accumulator_value, linear],
        prepare(count) {
            twice_l2 = 2.0 * (l2 + beta / (2.0 * learning_rate));
        }
        step(x, gradient) {
            let old_power = raise(IS_ROOT, accumulator, exponent);
            accumulator += gradient * gradient;
            let new_power = raise(IS_ROOT, accumulator, exponent);
            let shrunk = gradient + twice_shrinkage * x;
            linear += shrunk - (new_power - old_power) / learning_rate * x;
            let quadratic = new_power / learning_rate + twice_l2;
            x = (clip(linear, l1) - linear) / quadratic;
        }
    }
}
