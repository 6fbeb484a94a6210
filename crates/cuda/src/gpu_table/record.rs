//! The layout of records in the memory of a GPU, in units of 16 bytes: the row, its key if updates round by chance, the states.

use sok_core::contract::record::RecordLayout;
use sok_core::contract::table::TableConfig;
use sok_core::formula::update::Update;
use sok_core::row_type::RowType;

use crate::abi::{DeviceField, DeviceFields, ROW_ARRAY_BITS, ROW_BY_CHANCE, ROW_DIM_BITS, quads};

/// The rows of a table, for which kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowKind {
    /// Number of columns.
    pub dim: usize,
    row_type: RowType,
    rounds_by_chance: bool,
}

impl RowKind {
    /// Returns the rows of a table.
    pub fn of(config: &TableConfig) -> RowKind {
        let TableConfig { dim, row_type, stochastic_rounding: rounds_by_chance, .. } = *config;
        RowKind { dim, row_type, rounds_by_chance }
    }

    /// Returns the code that is a template argument of kernels. The codes of rows of float32 are their dims.
    pub fn code(self) -> usize {
        let by_chance = if self.rounds_by_chance { ROW_BY_CHANCE } else { 0 };
        self.dim | (self.row_type as usize | by_chance) << ROW_DIM_BITS
    }

    /// Returns the code for kernels that read or write a framework's arrays of such rows, of numbers of this type.
    pub fn code_with(self, arrays: RowType) -> usize {
        self.code() | (arrays as usize) << (ROW_DIM_BITS + ROW_ARRAY_BITS)
    }

    /// Returns the same rows with whole groups of four columns.
    pub fn of_whole_quads(self) -> RowKind {
        RowKind { dim: 4 * quads(self.dim), ..self }
    }

    /// Where the states begin in a record.
    pub fn states(self) -> usize {
        (quads(self.dim) * self.row_type.num_bytes()).div_ceil(4) + usize::from(self.rounds_by_chance)
    }
}

/// The layout of a table's records in the memory of a GPU.
#[derive(Clone, Copy, Default)]
pub struct DeviceLayout {
    /// Units of a record.
    pub stride: usize,
    /// Initial value of the first state. The initial value of all others is 0.
    pub first_state: f32,
    /// The row and each state.
    pub fields: DeviceFields,
}

impl DeviceLayout {
    /// Returns the layout for rows with the states of this update; without an update there are none.
    pub fn new(update: Option<&Update>, row: RowKind) -> DeviceLayout {
        let host = RecordLayout::new(row.dim, update);
        let mut layout = DeviceLayout {
            first_state: host.states().first().map_or(0.0, |s| s.initial),
            ..DeviceLayout::default()
        };
        assert!(host.fields().len() <= layout.fields.fields.len());
        for (device, field) in layout.fields.fields.iter_mut().zip(host.fields()) {
            let (width, unit, column) =
                (field.columns.len(), layout.stride as u32, field.columns.start as u32);
            *device = DeviceField { width: width as u32, unit, column, pad: 0 };
            layout.stride = if column == 0 { row.states() } else { layout.stride + quads(width) };
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

    fn row(dim: usize, row_type: RowType, rounds_by_chance: bool) -> RowKind {
        RowKind { dim, row_type, rounds_by_chance }
    }

    fn update(rule: Rule) -> Update {
        Update { rule, weight_decay: None, clipvalue: None, clipnorm: None }
    }

    const ADAM: Rule = Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: true });

    #[test]
    fn fields_of_a_record_begin_at_whole_groups_of_columns_and_are_dense_outside() {
        for dim in [1, 3, 4, 17, 64, 1024] {
            let layout = DeviceLayout::new(Some(&update(ADAM)), row(dim, RowType::Float32, false));
            let fields = &layout.fields.fields[..layout.fields.count as usize];
            assert_eq!((fields.len(), layout.fields.width as usize), (4, 4 * dim));
            for (i, field) in fields.iter().enumerate() {
                assert_eq!((field.unit as usize, field.column as usize), (i * quads(dim), i * dim));
            }
            assert_eq!((layout.stride, layout.row().width as usize), (4 * quads(dim), dim));
        }
    }

    #[test]
    fn a_state_that_is_one_number_a_row_takes_one_group() {
        let rule = Rule::RowWiseAdagrad(RowWiseAdagrad { initial_accumulator_value: 0.25, epsilon: 1e-7 });
        let layout = DeviceLayout::new(Some(&update(rule)), row(10, RowType::Float32, false));
        assert_eq!((layout.stride, layout.fields.width, layout.first_state), (4, 11, 0.25));
        assert_eq!(DeviceLayout::new(None, row(10, RowType::Float32, false)).stride, 3);
    }

    #[test]
    fn rows_of_16_bits_take_half_and_their_key_a_unit() {
        for (dim, units) in [(1, 1), (8, 1), (9, 2), (12, 2), (13, 2), (17, 3), (64, 8)] {
            for (by_chance, key) in [(false, 0), (true, 1)] {
                let row = row(dim, RowType::Bfloat16, by_chance);
                let layout = DeviceLayout::new(Some(&update(ADAM)), row);
                let starts: Vec<_> = layout.fields.fields.iter().map(|field| field.unit as usize).collect();
                let first = units + key;
                assert_eq!(starts, [0, first, first + quads(dim), first + 2 * quads(dim)]);
                assert_eq!((row.states(), layout.stride), (first, first + 3 * quads(dim)));
                assert_eq!((row.of_whole_quads().states(), layout.fields.width as usize), (first, 4 * dim));
            }
        }
        assert_eq!(row(64, RowType::Float32, false).code(), 64);
        assert_eq!(row(64, RowType::Bfloat16, true).code(), 64 + (6 << 24));
        assert_eq!(row(64, RowType::Bfloat16, true).code_with(RowType::Float32), 64 + (6 << 24));
        assert_eq!(row(64, RowType::Float32, false).code_with(RowType::Float16), 64 + (8 << 24));
    }
}
