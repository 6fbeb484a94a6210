//! An optimizer's rule as kernels get it: the name of a type, and its numbers.

use sok_core::formula::update::Update;
use sok_core::formula::{MAX_SCALARS, Rule, Step, StepVisitor};

use crate::abi::Conditioning;

/// Returns the name of the rule's step type in the header of formulas, a template argument of kernels.
pub fn type_name(rule: &Rule) -> String {
    rule.visit(TypeName)
}

/// Returns the scalars of the rule's step. `prepare` in `kernels/control.cu` computes those that depend on the training step.
pub fn scalars(rule: &Rule) -> [f32; MAX_SCALARS] {
    rule.visit(Scalars)
}

/// Returns clipping and weight decay of an update. The factor and the learning rate of a step are left 0.
pub fn conditioning(update: &Update) -> Conditioning {
    Conditioning {
        clipvalue: update.clipvalue.unwrap_or(f32::INFINITY),
        weight_decay: update.weight_decay.unwrap_or_default(),
        decays: u32::from(update.weight_decay.is_some()),
        ..Conditioning::default()
    }
}

struct TypeName;

impl StepVisitor for TypeName {
    type Output = String;

    fn visit<S: Step>(self, _step: S) -> String {
        S::device_type()
    }
}

struct Scalars;

impl StepVisitor for Scalars {
    type Output = [f32; MAX_SCALARS];

    fn visit<S: Step>(self, step: S) -> [f32; MAX_SCALARS] {
        step.scalars()
    }
}

#[cfg(test)]
mod tests {
    use sok_core::formula::{Adam, Sgd};

    use super::*;

    #[test]
    fn kernels_get_the_type_and_the_numbers_of_a_rule() {
        let adam = Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: true });
        assert_eq!(type_name(&adam), "AdamStep<true>");
        // The first scalar is alpha, which each step computes anew.
        assert_eq!(scalars(&adam)[..2], [0.0, (1.0 - 0.9) as f32]);
        let sgd = Rule::Sgd(Sgd { momentum: 0.5, nesterov: true });
        assert_eq!((type_name(&sgd).as_str(), scalars(&sgd)[1]), ("SgdStep<true, true>", 0.5));
        let update = Update { rule: sgd, weight_decay: Some(0.1), clipvalue: None, clipnorm: None };
        let conditioning = conditioning(&update);
        assert_eq!((conditioning.clipvalue, conditioning.decays), (f32::INFINITY, 1));
    }
}
