//! The layout of a record: its row, then its states. Each begins at a whole group of four columns.

use sok_core::formula::update::Update;

use crate::abi::{Part, Parts, quads};

/// The layout of a table's records.
#[derive(Clone, Copy, Default)]
pub struct RecordLayout {
    /// Groups of four columns of a record.
    pub stride: usize,
    /// Initial value of the first state. The initial value of all others is 0.
    pub first_state: f32,
    /// The row and each state.
    pub parts: Parts,
}

impl RecordLayout {
    /// Returns the layout for rows of this dim with the states of this update; without an update there are none.
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

    /// Returns the parts without the states.
    pub fn row(&self) -> Parts {
        Parts { count: 1, width: self.parts.parts[0].width, ..self.parts }
    }
}

#[cfg(test)]
mod tests {
    use sok_core::formula::{Adam, RowWiseAdagrad, Rule};

    use super::*;

    fn update(rule: Rule) -> Update {
        Update { rule, weight_decay: None, clipvalue: None, clipnorm: None }
    }

    const ADAM: Rule = Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: true });

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
        let rule = Rule::RowWiseAdagrad(RowWiseAdagrad { initial_accumulator_value: 0.25, epsilon: 1e-7 });
        let layout = RecordLayout::new(Some(&update(rule)), 10);
        assert_eq!((layout.stride, layout.parts.width, layout.first_state), (4, 11, 0.25));
        assert_eq!(RecordLayout::new(None, 10).stride, 3);
    }
}
