//! Records outside of a table, in the order of a scan.

use crate::error::Result;
use crate::key::Key;
use crate::memory;

/// Complete records, in the layout of [`Table::layout`](crate::contract::table::Table::layout).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Records {
    /// The keys.
    pub keys: Vec<Key>,
    /// `(keys.len(), width)`, row-major.
    pub values: Vec<f32>,
    /// `(keys.len(),)`, or empty if the table has no scores.
    pub scores: Vec<u64>,
    /// `(keys.len(),)`: how many commits ago each row was trained last; or empty if rows have no time to live.
    pub ages: Vec<u64>,
}

/// A number that each record has beside its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// [`Records::scores`].
    Scores,
    /// [`Records::ages`].
    Ages,
}

impl Column {
    /// All columns.
    pub const ALL: [Column; 2] = [Column::Scores, Column::Ages];

    /// Returns the name of its tensor in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Column::Scores => "scores",
            Column::Ages => "ages",
        }
    }
}

impl Records {
    /// Returns the numbers of a column.
    pub fn column(&self, column: Column) -> &Vec<u64> {
        match column {
            Column::Scores => &self.scores,
            Column::Ages => &self.ages,
        }
    }

    /// Returns the numbers of a column.
    pub fn column_mut(&mut self, column: Column) -> &mut Vec<u64> {
        match column {
            Column::Scores => &mut self.scores,
            Column::Ages => &mut self.ages,
        }
    }

    /// Keeps the records of the keys that `is_kept` names.
    pub fn keep(&mut self, is_kept: impl Fn(Key) -> bool) {
        let width = self.values.len().checked_div(self.keys.len()).unwrap_or(0);
        let mut kept = 0;
        for record in 0..self.keys.len() {
            if is_kept(self.keys[record]) {
                self.keys[kept] = self.keys[record];
                self.values.copy_within(record * width..(record + 1) * width, kept * width);
                for column in [&mut self.scores, &mut self.ages].into_iter().filter(|c| !c.is_empty()) {
                    column[kept] = column[record];
                }
                kept += 1;
            }
        }
        self.truncate(kept);
    }

    /// Drops all records after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        let width = self.values.len().checked_div(self.keys.len()).unwrap_or(0);
        self.keys.truncate(len);
        self.values.truncate(len * width);
        self.scores.truncate(len);
        self.ages.truncate(len);
    }

    /// Makes room for `more` records of `width` floats.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn reserve(
        &mut self,
        more: usize,
        width: usize,
        columns: &[Column],
        what: &'static str,
    ) -> Result<()> {
        memory::reserve(&mut self.keys, more, what)?;
        memory::reserve(&mut self.values, more.saturating_mul(width), what)?;
        columns.iter().try_for_each(|column| memory::reserve(self.column_mut(*column), more, what))
    }

    /// Number of bytes of memory.
    pub fn num_bytes(&self) -> usize {
        let numbers = self.keys.capacity() + self.scores.capacity() + self.ages.capacity();
        8 * numbers + 4 * self.values.capacity()
    }
}
