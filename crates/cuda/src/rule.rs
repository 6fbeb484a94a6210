//! An optimizer's rule as kernels have it: a type by name, its numbers, states behind the row.

use sok_core::optimizer::{RowWiseAdagradStep, Rule, Step, StepVisitor, Update, UpdateScalars};

use crate::layout::{Part, Parts, RuleNumbers, Scalars, quads};

const PLAIN: u32 = 0;
const ADAM: u32 = 1;
const FTRL: u32 = 2;

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

/// What `prepare` in `kernels/control.cu` makes a step's scalars of.
pub fn numbers(update: &Update) -> RuleNumbers {
    // Those that depend on the step are made on the device.
    let any = UpdateScalars { learning_rate: 1.0, step: 1, factor: 1.0 };
    let [a, b, c, d, e] = update.rule.visit(&any, ScalarsOf);
    let (kind, first, second) = match update.rule {
        Rule::Adam { beta_1, beta_2, .. } => (ADAM, beta_1 as f32, beta_2 as f32),
        Rule::Ftrl { l2_regularization_strength, beta, .. } => {
            (FTRL, l2_regularization_strength as f32, beta as f32)
        }
        _ => (PLAIN, 0.0, 0.0),
    };
    RuleNumbers {
        kind,
        first,
        second,
        scalars: Scalars { a, b, c, d, e },
        clipvalue: update.clipvalue.unwrap_or(f32::INFINITY),
        weight_decay: update.weight_decay.unwrap_or_default(),
        decays: u32::from(update.weight_decay.is_some()),
    }
}

struct ScalarsOf;

impl StepVisitor for ScalarsOf {
    type Output = [f32; 5];

    fn visit<S: Step>(self, step: S) -> [f32; 5] {
        step.scalars()
    }

    fn visit_row_wise(self, step: RowWiseAdagradStep) -> [f32; 5] {
        step.scalars()
    }
}

/// Where a record has its row and its states.
#[derive(Clone, Copy, Default)]
pub struct RecordLayout {
    /// Groups of four columns of a record.
    pub stride: usize,
    /// First value of the first state; the others' is 0.
    pub first_state: f32,
    pub parts: Parts,
}

impl RecordLayout {
    pub fn new(update: Option<&Update>, dim: usize) -> RecordLayout {
        let states = update.map(|u| u.rule.states(dim)).unwrap_or_default();
        let mut layout = RecordLayout {
            first_state: states.first().map_or(0.0, |s| s.initial),
            ..RecordLayout::default()
        };
        for (part, width) in std::iter::once(dim).chain(states.iter().map(|s| s.width)).enumerate() {
            let (quad, column) = (layout.stride as u32, layout.parts.width);
            layout.parts.parts[part] = Part { width: width as u32, quad, column, pad: 0 };
            layout.parts.count += 1;
            layout.parts.width += width as u32;
            layout.stride += quads(width);
        }
        layout
    }

    /// The row alone.
    pub fn row(&self) -> Parts {
        Parts { count: 1, width: self.parts.parts[0].width, ..self.parts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(rule: Rule) -> Update {
        Update { rule, weight_decay: Some(0.1), clipvalue: None, clipnorm: None }
    }

    const ADAM: Rule = Rule::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: true };

    #[test]
    fn parts_of_a_record_begin_at_whole_groups_of_columns_and_are_dense_outside() {
        for dim in [1, 3, 4, 17, 64, 1024] {
            let layout = RecordLayout::new(Some(&update(ADAM)), dim);
            let parts = &layout.parts.parts[..layout.parts.count as usize];
            assert_eq!((parts.len(), layout.parts.width as usize), (4, 4 * dim));
            for (i, part) in parts.iter().enumerate() {
                assert_eq!((part.quad as usize, part.column as usize), (i * quads(dim), i * dim));
            }
            assert_eq!((layout.stride, layout.row().width as usize), (4 * quads(dim), dim));
        }
    }

    #[test]
    fn a_state_that_is_one_number_a_row_takes_one_group() {
        let rule = Rule::RowWiseAdagrad { initial_accumulator_value: 0.25, epsilon: 1e-7 };
        let layout = RecordLayout::new(Some(&update(rule)), 10);
        assert_eq!((layout.stride, layout.parts.width, layout.first_state), (4, 11, 0.25));
        assert_eq!(RecordLayout::new(None, 10).stride, 3);
    }

    #[test]
    fn numbers_that_a_step_changes_are_left_to_the_device() {
        let adam = numbers(&update(ADAM));
        assert_eq!((adam.kind, adam.first, adam.second), (1, 0.9, 0.999));
        assert_eq!((adam.scalars.b, adam.clipvalue), ((1.0 - 0.9) as f32, f32::INFINITY));
        assert_eq!((adam.decays, adam.weight_decay), (1, 0.1));
        let sgd =
            numbers(&Update { weight_decay: None, ..update(Rule::Sgd { momentum: 0.5, nesterov: true }) });
        assert_eq!((sgd.kind, sgd.scalars.b, sgd.decays), (0, 0.5, 0));
    }
}
