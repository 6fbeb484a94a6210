//! The formulas of optimizers: what a step does to a record. Each optimizer has a file.
//!
//! A formula is written once, in [`step!`](body), and runs on the host and on a GPU. It keeps Keras' order of operations, in float32;
//! what Keras computes as a Python float (`1 - beta_1`) is computed as an f64 here too and rounded once. So a row moves as a dense Keras
//! variable of the same gradient would. Nothing is contracted.
//!
//! Sources: `keras/src/optimizers/*.py` of Keras 3. A formula has the name of its file there.

mod adadelta;
mod adagrad;
mod adam;
mod adamax;
mod body;
mod checks;
mod ftrl;
mod general;
mod lamb;
mod lion;
mod nadam;
mod rmsprop;
mod row_wise_adagrad;
mod row_wise_adam;
mod sgd;
mod step;
pub mod update;

use serde::{Deserialize, Serialize};

pub use self::adadelta::Adadelta;
pub use self::adagrad::Adagrad;
pub use self::adam::Adam;
pub use self::adamax::Adamax;
pub use self::ftrl::Ftrl;
pub use self::general::{General, GeneralState};
pub use self::lamb::Lamb;
pub use self::lion::Lion;
pub use self::nadam::Nadam;
pub use self::rmsprop::RmsProp;
pub use self::row_wise_adagrad::RowWiseAdagrad;
pub use self::row_wise_adam::RowWiseAdam;
pub use self::sgd::Sgd;
pub use self::step::{Formula, MAX_SCALARS, MAX_STATES, StateSpec, Step, StepVisitor};
use crate::error::Result;

/// Lists the formulas under their names in configurations and dumps.
macro_rules! rules {
    ($($name:literal: $module:ident::$formula:ident),+ $(,)?) => {
        /// A formula with its hyper-parameters.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name")]
        pub enum Rule {
            $(
                #[doc = concat!("`", $name, "`")]
                #[serde(rename = $name)]
                $formula($formula),
            )+
            /// Any other optimizer, whose own code computes the step.
            #[serde(rename = "general")]
            General(General),
        }

        impl Rule {
            /// The name of the formula, or of the optimizer's class if there is none here.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Rule::$formula(_) => $name,)+
                    Rule::General(general) => general.class,
                }
            }

            /// # Errors
            /// [`Error::Argument`] that names the hyper-parameter, the rule and the value.
            pub fn validate(&self) -> Result<()> {
                match self {
                    $(Rule::$formula(formula) => formula.validate(),)+
                    Rule::General(general) => general.validate(),
                }
            }

            /// Calls `visitor` with the step of this rule, so that its loop is compiled once for each.
            pub fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
                match self {
                    $(Rule::$formula(formula) => formula.visit(visitor),)+
                    Rule::General(general) => general.visit(visitor),
                }
            }
        }

        impl Rule {
            /// A rule for each type of step that the core makes.
            pub fn variants() -> Vec<Rule> {
                let mut rules = Vec::new();
                $(rules.extend($formula::VARIANTS.iter().map(|formula| Rule::$formula(*formula)));)+
                rules
            }
        }

        /// Returns a CUDA header with the steps of all formulas. It includes `kernels/math.cuh`, whose functions they call.
        pub fn device_header() -> String {
            let formulas = [$($module::SOURCE.cuda(),)+ general::CUDA.to_string()];
            format!("#pragma once\n#include \"math.cuh\"\n\n{}", formulas.join("\n"))
        }
    };
}

rules! {
    "sgd": sgd::Sgd,
    "adam": adam::Adam,
    "adagrad": adagrad::Adagrad,
    "row_wise_adagrad": row_wise_adagrad::RowWiseAdagrad,
    "rmsprop": rmsprop::RmsProp,
    "ftrl": ftrl::Ftrl,
    "lion": lion::Lion,
    "adadelta": adadelta::Adadelta,
    "adamax": adamax::Adamax,
    "nadam": nadam::Nadam,
    "row_wise_adam": row_wise_adam::RowWiseAdam,
    "lamb": lamb::Lamb,
}

impl Rule {
    /// The states that follow the row in a record of a table of `dim`.
    pub fn states(&self, dim: usize) -> Vec<StateSpec> {
        struct StatesOf(usize);
        impl StepVisitor for StatesOf {
            type Output = Vec<StateSpec>;
            fn visit<S: Step>(self, step: S) -> Vec<StateSpec> {
                step.states(self.0)
            }
        }
        self.visit(StatesOf(dim))
    }

    /// The optimizer's own code computes the step.
    pub fn is_general(&self) -> bool {
        matches!(self, Rule::General(_))
    }
}
