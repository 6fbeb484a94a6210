//! SGD with momentum and Nesterov's.

use serde::{Deserialize, Serialize};

use super::body::{body, step};
use super::checks::check_fraction;
use super::step::{Formula, StepVisitor};
use crate::error::Result;

/// Hyper-parameters of `keras.optimizers.SGD`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sgd {
    /// Decay of the momentum; 0: there is none.
    pub momentum: f64,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
}

impl Formula for Sgd {
    const VARIANTS: &'static [Sgd] = &[
        Sgd { momentum: 0.0, nesterov: false },
        Sgd { momentum: 0.9, nesterov: false },
        Sgd { momentum: 0.9, nesterov: true },
    ];

    fn validate(&self) -> Result<()> {
        check_fraction("momentum", self.momentum)
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        let decay = self.momentum as f32;
        match (decay != 0.0, self.nesterov) {
            (false, _) => visitor.visit(SgdStep::<false, false> { decay, learning_rate: 0.0 }),
            (true, false) => visitor.visit(SgdStep::<true, false> { decay, learning_rate: 0.0 }),
            (true, true) => visitor.visit(SgdStep::<true, true> { decay, learning_rate: 0.0 }),
        }
    }
}

step! {
    SgdStep<MOMENTUM, NESTEROV> {
        scalars: [learning_rate, decay],
        states: [momentum if MOMENTUM],
        step(x, gradient) {
            if (MOMENTUM) {
                momentum = momentum * decay - gradient * learning_rate;
                if (NESTEROV) {
                    x += momentum * decay - gradient * learning_rate;
                } else {
                    x += momentum;
                }
            } else {
                x -= gradient * learning_rate;
            }
        }
    }
}
