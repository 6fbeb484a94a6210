//! An optimizer's rule as kernels have it: a type by name, scalars made ready for a step, states behind the row.

use sok_core::math::whole_power;
use sok_core::optimizer::{Rule, Update, UpdateScalars};

use crate::layout::{Conditioning, Scalars};

/// The rule's type in `kernels/optimizer.cuh`.
pub fn type_name(rule: &Rule) -> String {
    match *rule {
        Rule::Sgd { momentum: 0.0, .. } => "Sgd".into(),
        Rule::Sgd { nesterov, .. } => format!("Momentum<{nesterov}>"),
        Rule::Adam { amsgrad, .. } => format!("Adam<{amsgrad}>"),
        Rule::Adagrad { .. } => "Adagrad".into(),
        Rule::RowWiseAdagrad { .. } => "RowWiseAdagrad".into(),
        Rule::RmsProp { momentum, centered, .. } => format!("RmsProp<{}, {centered}>", momentum > 0.0),
        Rule::Ftrl { learning_rate_power, .. } => format!("Ftrl<{}>", learning_rate_power == -0.5),
    }
}

/// As `Rule::visit` of sok-core makes them ready.
pub fn scalars(rule: &Rule, now: &UpdateScalars) -> Scalars {
    let a = now.learning_rate;
    match *rule {
        Rule::Sgd { momentum, .. } => Scalars { a, b: momentum as f32, ..Scalars::default() },
        Rule::Adam { beta_1, beta_2, epsilon, .. } => {
            let power = |beta: f64| whole_power(f64::from(beta as f32), now.step) as f32;
            Scalars {
                a: a * (1.0 - power(beta_2)).sqrt() / (1.0 - power(beta_1)),
                b: (1.0 - beta_1) as f32,
                c: (1.0 - beta_2) as f32,
                d: epsilon as f32,
                e: 0.0,
            }
        }
        Rule::Adagrad { epsilon, .. } | Rule::RowWiseAdagrad { epsilon, .. } => {
            Scalars { a, d: epsilon as f32, ..Scalars::default() }
        }
        Rule::RmsProp { rho, momentum, epsilon, .. } => {
            Scalars { a, b: rho as f32, c: (1.0 - rho) as f32, d: epsilon as f32, e: momentum as f32 }
        }
        Rule::Ftrl {
            learning_rate_power,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
            beta,
            ..
        } => Scalars {
            a,
            b: l1_regularization_strength as f32,
            c: 2.0 * (l2_regularization_strength as f32 + beta as f32 / (2.0 * a)),
            d: (2.0 * l2_shrinkage_regularization_strength) as f32,
            e: -learning_rate_power as f32,
        },
    }
}

pub fn conditioning(update: &Update, now: &UpdateScalars) -> Conditioning {
    Conditioning {
        factor: now.factor,
        clipvalue: update.clipvalue.unwrap_or(f32::INFINITY),
        weight_decay: update.weight_decay.unwrap_or_default(),
        learning_rate: now.learning_rate,
        decays: u32::from(update.weight_decay.is_some()),
    }
}

/// Groups of four columns of a row, and of each of its states.
pub fn quads(dim: usize) -> usize {
    dim.div_ceil(4)
}

/// Groups of four columns of a record, and the first value of its first state.
pub fn record_layout(rule: &Rule, dim: usize) -> (usize, f32) {
    let states = rule.states(dim);
    let stride = quads(dim) + states.iter().map(|s| quads(s.width)).sum::<usize>();
    (stride, states.first().map_or(0.0, |s| s.initial))
}
