//! The layout of records in the memory of a GPU. Each field begins at a whole group of four columns.

use sok_core::contract::record::RecordLayout;
use sok_core::formula::update::Update;

use crate::abi::{DeviceField, DeviceFields, quads};

/// The layout of a table's records in the memory of a GPU.
#[derive(Clone, Copy, Default)]
pub struct DeviceLayout {
    /// Groups of four columns of a record.
    pub stride: usize,
    /// Initial value of the first state. The initial value of all others is 0.
    pub first_state: f32,
    /// The row and each state.
    pub fields: DeviceFields,
}

impl DeviceLayout {
    /// Returns the layout for rows of this dim with the states of this update; without an update there are none.
    pub fn new(update: Option<&Update>, dim: usize) -> DeviceLayout {
        let host = RecordLayout::new(dim, update);
        let mut layout = DeviceLayout {
            first_state: host.states().first().map_or(0.0, |s| s.initial),
            ..DeviceLayout::default()
        };
        assert!(host.fields().len() <= layout.fields.fields.len());
        for (device, field) in layout.fields.fields.iter_mut().zip(host.fields()) {
            let (width, quad, column) =
                (field.columns.len(), layout.stride as u32, field.columns.start as u32);
            *device = DeviceField { width: width as u32, quad, column, pad: 0 };
            layout.stride += quads(width);
        }
        layout.fields.count = host.fields().len() as u32;
        layout.fields.width = host.width() as u32;
        layout
    }

    /// Returns the fields without the states.
    pub fn row(&self) -> DeviceFields {
        DeviceFields { count: 1, width: self.fields.fields[0].width, ..self.fields }
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
    fn fields_of_a_record_begin_at_whole_groups_of_columns_and_are_dense_outside() {
        for dim in [1, 3, 4, 17, 64, 1024] {
            let layout = DeviceLayout::new(Some(&update(ADAM)), dim);
            let fields = &layout.fields.fields[..layout.fields.count as usize];
            assert_eq!((fields.len(), layout.fields.width as usize), (4, 4 * dim));
            for (i, field) in fields.iter().enumerate() {
                assert_eq!((field.quad as usize, field.column as usize), (i * quads(dim), i * dim));
            }
            assert_eq!((layout.stride, layout.row().width as usize), (4 * quads(dim), dim));
        }
    }

    #[test]
    fn a_state_that_is_one_number_a_row_takes_one_group() {
        let rule = Rule::RowWiseAdagrad(RowWiseAdagrad { initial_accumulator_value: 0.25, epsilon: 1e-7 });
        let layout = DeviceLayout::new(Some(&update(rule)), 10);
        assert_eq!((layout.stride, layout.fields.width, layout.first_state), (4, 11, 0.25));
        assert_eq!(DeviceLayout::new(None, 10).stride, 3);
    }
}
