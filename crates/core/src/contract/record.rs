//! The layout of a record: its row and its optimizer states, as named fields.

use std::ops::Range;

use crate::formula::update::Update;

/// Name of the field that holds the row.
pub const ROW: &str = "row";

/// A named part of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// [`ROW`], or the name of a state.
    pub name: &'static str,
    /// The floats of the record that belong to the field.
    pub columns: Range<usize>,
    /// First value of each float of a state. The first values of a row come from the table's initializer.
    pub initial: f32,
}

/// The fields of a table's records. The row comes first, then the states in the order of the update rule.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordLayout {
    fields: Vec<Field>,
}

impl RecordLayout {
    /// Returns the layout of records with rows of `dim` floats and the states of `update`.
    pub fn new(dim: usize, update: Option<&Update>) -> RecordLayout {
        let states = update.map(|u| u.rule.states(dim)).unwrap_or_default();
        let states = states.iter().map(|s| (s.name, s.width, s.initial));
        let mut end = 0;
        let fields = std::iter::once((ROW, dim, 0.0)).chain(states).map(|(name, width, initial)| {
            let start = end;
            end += width;
            Field { name, columns: start..end, initial }
        });
        RecordLayout { fields: fields.collect() }
    }

    /// Returns all fields, in the order of the record.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Returns the fields after the row.
    pub fn states(&self) -> &[Field] {
        &self.fields[1..]
    }

    /// Returns the number of floats of a row.
    pub fn dim(&self) -> usize {
        self.fields[0].columns.len()
    }

    /// Returns the number of floats of a record.
    pub fn width(&self) -> usize {
        self.fields.last().map_or(0, |field| field.columns.end)
    }

    /// Returns the number of floats of all states.
    pub fn num_state_floats(&self) -> usize {
        self.width() - self.dim()
    }

    /// Returns a record with a row of zeros and the first values of the states.
    pub fn first_record(&self) -> Vec<f32> {
        let mut record = vec![0.0; self.width()];
        self.fill_states(&mut record[self.dim()..], true);
        record
    }

    /// Sets the states of a record to their first values. `states`: all of them. `is_zero`: whether they are 0 now.
    pub fn fill_states(&self, states: &mut [f32], is_zero: bool) {
        let mut rest = states;
        for state in self.states() {
            let (values, others) = rest.split_at_mut(state.columns.len());
            if state.initial != 0.0 || !is_zero {
                values.fill(state.initial);
            }
            rest = others;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formula::{RowWiseAdagrad, Rule};

    #[test]
    fn states_follow_the_row_and_start_at_their_first_values() {
        let rule = Rule::RowWiseAdagrad(RowWiseAdagrad { initial_accumulator_value: 0.5, epsilon: 1e-7 });
        let update = Update { rule, weight_decay: None, clipvalue: None, clipnorm: None };
        let layout = RecordLayout::new(3, Some(&update));
        let found: Vec<_> = layout.fields().iter().map(|f| (f.name, f.columns.clone())).collect();
        assert_eq!(found, [(ROW, 0..3), ("accumulator", 3..4)]);
        assert_eq!((layout.dim(), layout.width(), layout.states().len()), (3, 4, 1));
        let mut record = [1.0, 2.0, 3.0, 9.0];
        layout.fill_states(&mut record[3..], false);
        assert_eq!(record, [1.0, 2.0, 3.0, 0.5]);
    }

    #[test]
    fn a_record_without_an_update_is_its_row() {
        let layout = RecordLayout::new(8, None);
        assert_eq!((layout.width(), layout.fields().len()), (8, 1));
    }
}
