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
