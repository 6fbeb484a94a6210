//! RMSprop, plain, centered and with momentum.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::{check_fraction, check_not_negative};
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.RMSprop`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsProp {
    /// Decay of the mean of squares.
    pub rho: f64,
    /// Decay of the momentum; 0: there is none.
    pub momentum: f64,
    /// Added under the root.
    pub epsilon: f64,
    /// Whether the variance is estimated in place of the mean of squares.
    pub centered: bool,
}

impl Formula for RmsProp {
    const VARIANTS: &'static [RmsProp] = &[
        RmsProp { rho: 0.9, momentum: 0.0, epsilon: 1e-3, centered: false },
        RmsProp { rho: 0.9, momentum: 0.9, epsilon: 1e-3, centered: false },
        RmsProp { rho: 0.9, momentum: 0.0, epsilon: 1e-3, centered: true },
        RmsProp { rho: 0.9, momentum: 0.9, epsilon: 1e-3, centered: true },
    ];

    fn validate(&self) -> Result<()> {
        check_fraction("rho", self.rho)?;
        check_fraction("momentum", self.momentum)?;
        check_not_negative("epsilon", self.epsilon)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        match (self.momentum > 0.0, self.centered) {
            (false, false) => visitor.visit(self.step::<false, false>()),
            (false, true) => visitor.visit(self.step::<false, true>()),
            (true, false) => visitor.visit(self.step::<true, false>()),
            (true, true) => visitor.visit(self.step::<true, true>()),
        }
    }
}

impl RmsProp {
    fn step<const MOMENTUM: bool, const CENTERED: bool>(&self) -> RmsPropStep<MOMENTUM, CENTERED> {
        RmsPropStep {
            rho: self.rho as f32,
            one_minus_rho: (1.0 - self.rho) as f32,
            epsilon: self.epsilon as f32,
            decay: self.momentum as f32,
            ..RmsPropStep::default()
        }
    }
}

step! {
    RmsPropStep<MOMENTUM, CENTERED> {
        scalars: [learning_rate, rho, one_minus_rho, epsilon, decay],
        states: [velocity, momentum if MOMENTUM, average_gradient if CENTERED],
        step(x, gradient) {
            velocity = rho * velocity + one_minus_rho * (gradient * gradient);
            let mut variance = velocity;
            if (CENTERED) {
                average_gradient = rho * average_gradient + one_minus_rho * gradient;
                variance = velocity - average_gradient * average_gradient;
            }
            let increment = (learning_rate * gradient) / sqrt(variance + epsilon);
            if (MOMENTUM) {
                momentum = decay * momentum + increment;
                x -= momentum;
            } else {
                x -= increment;
            }
        }
    }
}
