//! One record's update: Keras 3's own formulas, column by column, without contraction.
//!
//! Each formula has Keras' order of operations, in float32; what Keras computes as a Python float (`1 - beta_1`) is computed
//! as an f64 here too and rounded once. So a row moves as a dense Keras variable of the same gradient would.
//!
//! Sources: `keras/src/optimizers/{sgd,adam,adagrad,rmsprop,ftrl,base_optimizer}.py` of Keras 3.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::math;

/// A state of an optimizer in every record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpec {
    pub name: &'static str,
    /// Floats a record: the table's dim, or 1 for one a row.
    pub width: usize,
    /// First value of each.
    pub initial: f32,
}

/// A row's formula with its hyper-parameters, named as in Keras, and as wide as Python's floats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
pub enum Rule {
    Sgd {
        momentum: f64,
        nesterov: bool,
    },
    Adam {
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
        amsgrad: bool,
    },
    Adagrad {
        initial_accumulator_value: f64,
        epsilon: f64,
    },
    /// One accumulator a row: the running sum of the mean of squares of its gradient.
    RowWiseAdagrad {
        initial_accumulator_value: f64,
        epsilon: f64,
    },
    #[serde(rename = "rmsprop")]
    RmsProp {
        rho: f64,
        momentum: f64,
        epsilon: f64,
        centered: bool,
    },
    Ftrl {
        learning_rate_power: f64,
        initial_accumulator_value: f64,
        l1_regularization_strength: f64,
        l2_regularization_strength: f64,
        l2_shrinkage_regularization_strength: f64,
        beta: f64,
    },
}

/// What an optimizer does to a merged gradient and a record: clip, decay, step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Update {
    pub rule: Rule,
    pub weight_decay: Option<f32>,
    /// Clips each element of the merged gradient to `[-clipvalue, clipvalue]`.
    pub clipvalue: Option<f32>,
    /// Scales the merged gradient of a table so that its norm is no higher.
    pub clipnorm: Option<f32>,
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateScalars {
    pub learning_rate: f32,
    /// 1-based count of updates.
    pub step: u64,
    /// Multiplies the merged gradient before it is clipped by value: loss scale, mean of accumulated steps, norms.
    pub factor: f32,
}

/// One column's step, its scalars made ready for this step of training.
///
/// Steps are plain arithmetic without branches on data, so that a loop over columns compiles to vector code.
pub trait Step: Copy + Send + Sync {
    /// How many of `states` it reads and writes, from the first on; each is as wide as the row.
    const STATES: usize;

    /// Its scalars, for a device whose kernels have the formula; in the order that `crates/cuda/kernels/optimizer.cuh` names.
    fn scalars(&self) -> [f32; 5];

    /// New value of a column, from its value `x`, its states in the order of [`Rule::states`], and the merged and
    /// conditioned gradient.
    fn step(&self, x: f32, states: &mut [f32; 3], gradient: f32) -> f32;
}

/// A loop over records that wants to be compiled once for each step; see [`Rule::visit`].
pub trait StepVisitor {
    type Output;

    fn visit<S: Step>(self, step: S) -> Self::Output;

    /// The one rule whose state is one float a row, so that its columns depend on each other.
    fn visit_row_wise(self, step: RowWiseAdagradStep) -> Self::Output;
}

impl Rule {
    /// The name in configurations and dumps.
    pub fn name(&self) -> &'static str {
        match self {
            Rule::Sgd { .. } => "sgd",
            Rule::Adam { .. } => "adam",
            Rule::Adagrad { .. } => "adagrad",
            Rule::RowWiseAdagrad { .. } => "row_wise_adagrad",
            Rule::RmsProp { .. } => "rmsprop",
            Rule::Ftrl { .. } => "ftrl",
        }
    }

    /// # Errors
    /// [`Error::Argument`] that names the hyper-parameter, the rule and the value.
    pub fn validate(&self) -> Result<()> {
        match *self {
            Rule::Sgd { momentum, nesterov: _ } => check_fraction("momentum", momentum),
            Rule::Adam { beta_1, beta_2, epsilon, amsgrad: _ } => {
                check_below_one("beta_1", beta_1)?;
                check_below_one("beta_2", beta_2)?;
                check_not_negative("epsilon", epsilon)
            }
            Rule::Adagrad { initial_accumulator_value, epsilon }
            | Rule::RowWiseAdagrad { initial_accumulator_value, epsilon } => {
                check_not_negative("initial_accumulator_value", initial_accumulator_value)?;
                check_not_negative("epsilon", epsilon)
            }
            Rule::RmsProp { rho, momentum, epsilon, centered: _ } => {
                check_fraction("rho", rho)?;
                check_fraction("momentum", momentum)?;
                check_not_negative("epsilon", epsilon)
            }
            Rule::Ftrl {
                learning_rate_power,
                initial_accumulator_value,
                l1_regularization_strength,
                l2_regularization_strength,
                l2_shrinkage_regularization_strength,
                beta,
            } => {
                check_not_positive("learning_rate_power", learning_rate_power)?;
                check_not_negative("initial_accumulator_value", initial_accumulator_value)?;
                check_not_negative("l1_regularization_strength", l1_regularization_strength)?;
                check_not_negative("l2_regularization_strength", l2_regularization_strength)?;
                check_not_negative(
                    "l2_shrinkage_regularization_strength",
                    l2_shrinkage_regularization_strength,
                )?;
                check_not_negative("beta", beta)
            }
        }
    }

    /// The states that follow the row in a record of a table of `dim`, named as Keras names the variables.
    pub fn states(&self, dim: usize) -> Vec<StateSpec> {
        let zeros = |name| StateSpec { name, width: dim, initial: 0.0 };
        let accumulator =
            |width, initial: f64| StateSpec { name: "accumulator", width, initial: initial as f32 };
        match *self {
            Rule::Sgd { momentum, .. } => {
                if momentum != 0.0 {
                    vec![zeros("momentum")]
                } else {
                    vec![]
                }
            }
            Rule::Adam { amsgrad, .. } => {
                let mut states = vec![zeros("momentum"), zeros("velocity")];
                states.extend(amsgrad.then(|| zeros("velocity_hat")));
                states
            }
            Rule::Adagrad { initial_accumulator_value, .. } => {
                vec![accumulator(dim, initial_accumulator_value)]
            }
            Rule::RowWiseAdagrad { initial_accumulator_value, .. } => {
                vec![accumulator(1, initial_accumulator_value)]
            }
            Rule::RmsProp { momentum, centered, .. } => {
                let mut states = vec![zeros("velocity")];
                states.extend((momentum > 0.0).then(|| zeros("momentum")));
                states.extend(centered.then(|| zeros("average_gradient")));
                states
            }
            Rule::Ftrl { initial_accumulator_value, .. } => {
                vec![accumulator(dim, initial_accumulator_value), zeros("linear")]
            }
        }
    }

    /// Calls `visitor` with the concrete step of this rule, so that its loop is compiled once for each.
    pub fn visit<V: StepVisitor>(&self, scalars: &UpdateScalars, visitor: V) -> V::Output {
        let learning_rate = scalars.learning_rate;
        match *self {
            Rule::Sgd { momentum, nesterov } => {
                let momentum = momentum as f32;
                match (momentum != 0.0, nesterov) {
                    (false, _) => visitor.visit(SgdStep { learning_rate }),
                    (true, false) => visitor.visit(MomentumStep::<false> { learning_rate, momentum }),
                    (true, true) => visitor.visit(MomentumStep::<true> { learning_rate, momentum }),
                }
            }
            Rule::Adam { beta_1, beta_2, epsilon, amsgrad } => {
                let alpha = adam_alpha(beta_1, beta_2, scalars);
                let scalars = AdamScalars {
                    alpha,
                    one_minus_beta_1: (1.0 - beta_1) as f32,
                    one_minus_beta_2: (1.0 - beta_2) as f32,
                    epsilon: epsilon as f32,
                };
                if amsgrad {
                    visitor.visit(AdamStep::<true>(scalars))
                } else {
                    visitor.visit(AdamStep::<false>(scalars))
                }
            }
            Rule::Adagrad { epsilon, .. } => {
                visitor.visit(AdagradStep { learning_rate, epsilon: epsilon as f32 })
            }
            Rule::RowWiseAdagrad { epsilon, .. } => {
                visitor.visit_row_wise(RowWiseAdagradStep { learning_rate, epsilon: epsilon as f32 })
            }
            Rule::RmsProp { rho, momentum, epsilon, centered } => {
                let scalars = RmsPropScalars {
                    learning_rate,
                    rho: rho as f32,
                    one_minus_rho: (1.0 - rho) as f32,
                    momentum: momentum as f32,
                    epsilon: epsilon as f32,
                };
                match (momentum > 0.0, centered) {
                    (false, false) => visitor.visit(RmsPropStep::<false, false>(scalars)),
                    (false, true) => visitor.visit(RmsPropStep::<false, true>(scalars)),
                    (true, false) => visitor.visit(RmsPropStep::<true, false>(scalars)),
                    (true, true) => visitor.visit(RmsPropStep::<true, true>(scalars)),
                }
            }
            Rule::Ftrl {
                learning_rate_power,
                l1_regularization_strength,
                l2_regularization_strength,
                l2_shrinkage_regularization_strength,
                beta,
                ..
            } => {
                let l2 = l2_regularization_strength as f32 + beta as f32 / (2.0 * learning_rate);
                let scalars = FtrlScalars {
                    learning_rate,
                    power: -learning_rate_power as f32,
                    l1: l1_regularization_strength as f32,
                    twice_l2: 2.0 * l2,
                    twice_shrinkage: (2.0 * l2_shrinkage_regularization_strength) as f32,
                };
                if learning_rate_power == -0.5 {
                    visitor.visit(FtrlStep::<true>(scalars))
                } else {
                    visitor.visit(FtrlStep::<false>(scalars))
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct SgdStep {
    learning_rate: f32,
}

impl Step for SgdStep {
    const STATES: usize = 0;

    fn scalars(&self) -> [f32; 5] {
        [self.learning_rate, 0.0, 0.0, 0.0, 0.0]
    }

    #[inline(always)]
    fn step(&self, x: f32, _states: &mut [f32; 3], gradient: f32) -> f32 {
        x - gradient * self.learning_rate
    }
}

/// SGD with momentum.
#[derive(Clone, Copy)]
struct MomentumStep<const NESTEROV: bool> {
    learning_rate: f32,
    momentum: f32,
}

impl<const NESTEROV: bool> Step for MomentumStep<NESTEROV> {
    const STATES: usize = 1;

    fn scalars(&self) -> [f32; 5] {
        [self.learning_rate, self.momentum, 0.0, 0.0, 0.0]
    }

    #[inline(always)]
    fn step(&self, x: f32, [m, ..]: &mut [f32; 3], gradient: f32) -> f32 {
        *m = *m * self.momentum - gradient * self.learning_rate;
        if NESTEROV { x + (*m * self.momentum - gradient * self.learning_rate) } else { x + *m }
    }
}

#[derive(Clone, Copy)]
struct AdamScalars {
    /// The learning rate with both bias corrections.
    alpha: f32,
    one_minus_beta_1: f32,
    one_minus_beta_2: f32,
    epsilon: f32,
}

#[derive(Clone, Copy)]
struct AdamStep<const AMSGRAD: bool>(AdamScalars);

impl<const AMSGRAD: bool> Step for AdamStep<AMSGRAD> {
    const STATES: usize = 2 + AMSGRAD as usize;

    fn scalars(&self) -> [f32; 5] {
        let AdamStep(s) = self;
        [s.alpha, s.one_minus_beta_1, s.one_minus_beta_2, s.epsilon, 0.0]
    }

    #[inline(always)]
    fn step(&self, x: f32, [m, v, v_hat]: &mut [f32; 3], gradient: f32) -> f32 {
        let AdamStep(scalars) = self;
        *m += (gradient - *m) * scalars.one_minus_beta_1;
        *v += (gradient * gradient - *v) * scalars.one_minus_beta_2;
        let mut variance = *v;
        if AMSGRAD {
            // Written so that a NaN in `v` comes through.
            *v_hat = if *v_hat > *v { *v_hat } else { *v };
            variance = *v_hat;
        }
        x - (*m * scalars.alpha) / (variance.sqrt() + scalars.epsilon)
    }
}

/// Keras raises the betas as float32 variables, so they are rounded before they are raised: `1 - beta_2` of the first step
/// would be off by a part in 10^5 otherwise.
fn adam_alpha(beta_1: f64, beta_2: f64, scalars: &UpdateScalars) -> f32 {
    let power = |beta: f64| math::whole_power(f64::from(beta as f32), scalars.step) as f32;
    scalars.learning_rate * (1.0 - power(beta_2)).sqrt() / (1.0 - power(beta_1))
}

#[derive(Clone, Copy)]
struct AdagradStep {
    learning_rate: f32,
    epsilon: f32,
}

impl Step for AdagradStep {
    const STATES: usize = 1;

    fn scalars(&self) -> [f32; 5] {
        [self.learning_rate, 0.0, 0.0, self.epsilon, 0.0]
    }

    #[inline(always)]
    fn step(&self, x: f32, [accumulator, ..]: &mut [f32; 3], gradient: f32) -> f32 {
        *accumulator += gradient * gradient;
        x - (self.learning_rate * gradient) / (*accumulator + self.epsilon).sqrt()
    }
}

/// Adagrad whose accumulator is one float a row. At dim 1 it is [`Rule::Adagrad`] bit for bit.
#[derive(Clone, Copy)]
pub struct RowWiseAdagradStep {
    learning_rate: f32,
    epsilon: f32,
}

impl RowWiseAdagradStep {
    /// As [`Step::scalars`].
    pub fn scalars(&self) -> [f32; 5] {
        [self.learning_rate, 0.0, 0.0, self.epsilon, 0.0]
    }

    /// Adds the mean of squares of a row's gradient to its accumulator; returns what all its columns are divided by.
    #[inline(always)]
    pub fn accumulate(&self, accumulator: &mut f32, gradient: &[f32]) -> f32 {
        *accumulator += math::sum_of_squares(gradient) / gradient.len() as f32;
        (*accumulator + self.epsilon).sqrt()
    }

    /// New value of a column; `divisor` comes from [`accumulate`](Self::accumulate).
    #[inline(always)]
    pub fn step(&self, x: f32, divisor: f32, gradient: f32) -> f32 {
        x - (self.learning_rate * gradient) / divisor
    }
}

#[derive(Clone, Copy)]
struct RmsPropScalars {
    learning_rate: f32,
    rho: f32,
    one_minus_rho: f32,
    momentum: f32,
    epsilon: f32,
}

#[derive(Clone, Copy)]
struct RmsPropStep<const MOMENTUM: bool, const CENTERED: bool>(RmsPropScalars);

impl<const MOMENTUM: bool, const CENTERED: bool> Step for RmsPropStep<MOMENTUM, CENTERED> {
    const STATES: usize = 1 + MOMENTUM as usize + CENTERED as usize;

    fn scalars(&self) -> [f32; 5] {
        let RmsPropStep(s) = self;
        [s.learning_rate, s.rho, s.one_minus_rho, s.epsilon, s.momentum]
    }

    #[inline(always)]
    fn step(&self, x: f32, states: &mut [f32; 3], gradient: f32) -> f32 {
        let RmsPropStep(scalars) = self;
        let velocity = scalars.rho * states[0] + scalars.one_minus_rho * (gradient * gradient);
        states[0] = velocity;
        let mut variance = velocity;
        if CENTERED {
            let average = &mut states[1 + MOMENTUM as usize];
            *average = scalars.rho * *average + scalars.one_minus_rho * gradient;
            variance = velocity - *average * *average;
        }
        let increment = (scalars.learning_rate * gradient) / (variance + scalars.epsilon).sqrt();
        if !MOMENTUM {
            return x - increment;
        }
        states[1] = scalars.momentum * states[1] + increment;
        x - states[1]
    }
}

#[derive(Clone, Copy)]
struct FtrlScalars {
    learning_rate: f32,
    /// Of the accumulator: Keras' `learning_rate_power` with its sign turned.
    power: f32,
    l1: f32,
    twice_l2: f32,
    twice_shrinkage: f32,
}

/// `SQRT`: the power is one half, which it is unless asked otherwise; a square root is many times faster than a power.
#[derive(Clone, Copy)]
struct FtrlStep<const SQRT: bool>(FtrlScalars);

impl<const SQRT: bool> FtrlStep<SQRT> {
    #[inline(always)]
    fn raise(&self, accumulator: f32) -> f32 {
        if SQRT { accumulator.sqrt() } else { math::pow(accumulator, self.0.power) }
    }
}

impl<const SQRT: bool> Step for FtrlStep<SQRT> {
    const STATES: usize = 2;

    fn scalars(&self) -> [f32; 5] {
        let FtrlStep(s) = self;
        [s.learning_rate, s.l1, s.twice_l2, s.twice_shrinkage, s.power]
    }

    #[inline(always)]
    fn step(&self, x: f32, [accumulator, linear, _]: &mut [f32; 3], gradient: f32) -> f32 {
        let FtrlStep(scalars) = self;
        let old_power = self.raise(*accumulator);
        // The accumulator takes the gradient as it came, without the shrinkage.
        *accumulator += gradient * gradient;
        let new_power = self.raise(*accumulator);
        let shrunk = gradient + scalars.twice_shrinkage * x;
        *linear += shrunk - (new_power - old_power) / scalars.learning_rate * x;
        let quadratic = new_power / scalars.learning_rate + scalars.twice_l2;
        (math::clip(*linear, scalars.l1) - *linear) / quadratic
    }
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

    /// Whether records of tables of `dim` stay as they are when one takes the other's place: the same rule, and the same states.
    pub fn share_states(one: Option<&Update>, other: Option<&Update>, dim: usize) -> bool {
        let states = |update: &Update| {
            let states = update.rule.states(dim).into_iter().map(|s| (s.name, s.width));
            (update.rule.name(), states.collect::<Vec<_>>())
        };
        one.map(states) == other.map(states)
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
    pub factor: f32,
    /// Infinity: none.
    pub clipvalue: f32,
    pub weight_decay: Option<f32>,
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

/// Fails unless `holds` and `value` is finite as the float32 that it becomes.
fn check(name: &str, value: f64, holds: bool, rule: &str) -> Result<()> {
    if holds && (value as f32).is_finite() {
        return Ok(());
    }
    Err(Error::argument(format!("`{name}` must be {rule}. Received: {value}")))
}

fn check_not_negative(name: &str, value: f64) -> Result<()> {
    check(name, value, value >= 0.0, "finite and not negative")
}

fn check_not_positive(name: &str, value: f64) -> Result<()> {
    check(name, value, value <= 0.0, "finite and not positive")
}

fn check_fraction(name: &str, value: f64) -> Result<()> {
    check(name, value, (0.0..=1.0).contains(&value), "between 0 and 1")
}

/// Below 1 also as a float32: Adam divides by `1 - beta` to the power of the step.
fn check_below_one(name: &str, value: f64) -> Result<()> {
    check(name, value, value >= 0.0 && (value as f32) < 1.0, "at least 0 and below 1 as a float32")
}
