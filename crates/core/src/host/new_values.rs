//! New rows and states that an optimizer without a formula has computed, until they are applied.

use std::ops::Range;

use crate::error::Result;
use crate::store::region::Region;

/// The new values of all rows that a step changes, until its apply.
#[derive(Default)]
pub struct NewValues {
    /// Floats of the rows up to the end of each table. `None`: the step has gathered nothing yet.
    ends: Option<Vec<usize>>,
    /// The rows, then each state, `(1 + states, floats)`.
    values: Region<f32>,
    /// How many floats of the rows have come, from the first on.
    num_come: usize,
}

impl NewValues {
    /// Forgets the values of a step. Their memory stays for the next.
    pub fn forget(&mut self) {
        (self.ends, self.num_come) = (None, 0);
    }

    /// Bytes of memory.
    pub fn num_bytes(&self) -> usize {
        self.values.num_bytes()
    }

    /// Begins a step. `ends`: floats of the rows up to the end of each table. `num_fields`: a row and its states.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub fn begin(&mut self, ends: Vec<usize>, num_fields: usize) -> Result<()> {
        self.values.grow_amortized(ends.last().copied().unwrap_or(0) * num_fields)?;
        (self.ends, self.num_come) = (Some(ends), 0);
        Ok(())
    }

    /// Whether the step has begun.
    pub fn is_begun(&self) -> bool {
        self.ends.is_some()
    }

    /// Takes the values of some floats of the rows. `from`: the rows, then each state.
    pub fn take<'a>(&mut self, floats: Range<usize>, from: impl Iterator<Item = &'a [f32]>) {
        let len = self.len();
        for (field, from) in from.enumerate() {
            self.values[field * len + floats.start..field * len + floats.end].copy_from_slice(from);
        }
        if floats.start <= self.num_come {
            self.num_come = self.num_come.max(floats.end);
        }
    }

    /// How many floats of the rows have come, from the first on.
    pub fn num_come(&self) -> usize {
        self.num_come
    }

    /// Whether all have come.
    pub fn is_complete(&self) -> bool {
        self.is_begun() && self.num_come == self.len()
    }

    /// Number of floats of the rows.
    pub fn len(&self) -> usize {
        self.ends.as_ref().and_then(|ends| ends.last().copied()).unwrap_or(0)
    }

    /// Returns which floats of all rows a table has.
    pub fn of_table(&self, number: usize) -> Range<usize> {
        let ends = self.ends.as_deref().unwrap_or_default();
        let end = |number: usize| ends.get(number).copied().unwrap_or(0);
        number.checked_sub(1).map_or(0, end)..end(number)
    }

    /// The new values of a field for some floats of the rows.
    pub fn field(&self, number: usize, floats: Range<usize>) -> &[f32] {
        let start = number * self.len();
        &self.values[start + floats.start..start + floats.end]
    }
}
