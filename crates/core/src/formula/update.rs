//! What an optimizer does to a merged gradient and a record before the formula's own step: clip and decay.

use serde::{Deserialize, Serialize};

use super::Rule;
use super::checks::{check, check_not_negative};
use crate::error::{Error, Result};
use crate::math;

/// What an optimizer does to a merged gradient and a record: clip, decay, step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Update {
    /// The formula and its hyper-parameters.
    pub rule: Rule,
    /// Decoupled weight decay: what a value loses for each unit of the learning rate.
    pub weight_decay: Option<f32>,
    /// Clips each element of the merged gradient to `[-clipvalue, clipvalue]`.
    pub clipvalue: Option<f32>,
    /// Scales the merged gradient of a table so that its norm is no higher.
    pub clipnorm: Option<f32>,
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateScalars {
    /// The learning rate.
    pub learning_rate: f32,
    /// 1-based count of updates.
    pub step: u64,
    /// Multiplies the merged gradient before it is clipped by value: loss scale, mean of accumulated steps, norms.
    pub factor: f32,
}

impl Update {
    /// # Errors
    /// [`Error::Argument`] that names the hyper-parameter, the rule and the value.
    pub fn validate(&self) -> Result<()> {
        self.rule.validate()?;
        if let Some(weight_decay) = self.weight_decay {
            check_not_negative("weight_decay", weight_decay.into())?;
        }
        for (name, limit) in [("clipvalue", self.clipvalue), ("clipnorm", self.clipnorm)] {
            if let Some(limit) = limit {
                check(name, limit.into(), limit > 0.0, "finite and above 0")?;
            }
        }
        match (self.clipnorm, self.clipvalue) {
            (Some(clipnorm), Some(clipvalue)) => Err(Error::argument(format!(
                "Only one of `clipnorm` and `clipvalue` can be set. Received: clipnorm={clipnorm}, clipvalue={clipvalue}"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether two updates have the same rule, and states of the same names and widths in a table of `dim`. Then the records need
    /// not change if one update replaces the other.
    pub fn share_states(one: Option<&Update>, other: Option<&Update>, dim: usize) -> bool {
        let states = |update: &Update| {
            let states = update.rule.states(dim).into_iter().map(|s| (s.name, s.width));
            (update.rule.name(), states.collect::<Vec<_>>())
        };
        one.map(states) == other.map(states)
    }

    /// Whether a step with a gradient of zero leaves a record as it is.
    pub fn rests(&self) -> bool {
        let rests = match self.rule {
            Rule::Sgd(sgd) => sgd.momentum == 0.0,
            Rule::Adagrad(_) | Rule::RowWiseAdagrad(_) => true,
            _ => false,
        };
        rests && self.weight_decay.is_none_or(|decay| decay == 0.0)
    }

    /// What comes before the rule's own step in this step of training.
    pub fn conditioning(&self, scalars: &UpdateScalars) -> Conditioning {
        Conditioning {
            factor: scalars.factor,
            clipvalue: self.clipvalue.unwrap_or(f32::INFINITY),
            weight_decay: self.weight_decay,
            learning_rate: scalars.learning_rate,
        }
    }
}

/// What is done to a column's merged gradient and to its value before the rule's own step.
#[derive(Clone, Copy)]
pub struct Conditioning {
    /// What a gradient is multiplied by first.
    pub factor: f32,
    /// Infinity: none.
    pub clipvalue: f32,
    /// Decoupled weight decay.
    pub weight_decay: Option<f32>,
    /// The learning rate.
    pub learning_rate: f32,
}

impl Conditioning {
    /// The gradient scaled, then clipped by value; NaN stays NaN.
    #[inline(always)]
    pub fn gradient(&self, gradient: f32) -> f32 {
        math::clip(gradient * self.factor, self.clipvalue)
    }

    /// The value after decoupled weight decay.
    #[inline(always)]
    pub fn value(&self, x: f32) -> f32 {
        match self.weight_decay {
            Some(weight_decay) => x - x * weight_decay * self.learning_rate,
            None => x,
        }
    }
}

/// What a gradient is multiplied by so that its norm is no higher than `clipnorm`. NaN where the sum is NaN.
pub fn clipnorm_factor(sum_of_squares: f32, clipnorm: f32) -> f32 {
    let norm = sum_of_squares.sqrt();
    if norm <= clipnorm { 1.0 } else { clipnorm / norm }
}

/// Returns the update of a table by which the core itself can make a step.
///
/// # Errors
/// [`Error::State`] without an optimizer, or if the optimizer's own code makes the step.
pub fn update_with_formula(update: Option<Update>, table: &str) -> Result<Update> {
    let update = update.ok_or_else(|| Error::State(format!("table `{table}` has no optimizer yet")))?;
    if update.rule.is_general() {
        let name = update.rule.name();
        return Err(Error::State(format!(
            "the core has no formula of {name}, the optimizer of table `{table}`"
        )));
    }
    Ok(update)
}
