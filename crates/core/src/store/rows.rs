//! Rows by number, wherever they lie.

use std::marker::PhantomData;

use crate::row_type::Number;

/// Number of a record. 0 means "no record"; its memory is a row of zeros.
pub type RecordNumber = u32;
pub const NO_RECORD: RecordNumber = 0;

/// An array of rows that pooling can read. Row 0 must be zeros.
pub trait Rows {
    /// Type of a number of a row.
    type Number: Number;

    /// Returns a row. It may be longer than the dim of the table.
    fn row(&self, number: RecordNumber) -> &[Self::Number];

    /// Returns all rows, for loops with a constant dim.
    fn with_dim<const D: usize>(&self) -> RowsWithDim<'_, Self::Number, D>;
}

/// The first `D` numbers of each row. Their width is checked once, not for each row.
#[derive(Clone, Copy)]
pub struct RowsWithDim<'a, N, const D: usize> {
    base: *const N,
    stride: usize,
    num_rows: usize,
    rows: PhantomData<&'a [N]>,
}

impl<'a, N: Number, const D: usize> RowsWithDim<'a, N, D> {
    /// `rows`: one row after the other, each of `stride` numbers.
    #[inline(always)]
    pub fn new(rows: &'a [N], stride: usize) -> RowsWithDim<'a, N, D> {
        assert!(stride >= D);
        RowsWithDim { base: rows.as_ptr(), stride, num_rows: rows.len() / stride, rows: PhantomData }
    }

    /// Returns a row.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn get(self, number: RecordNumber) -> &'a [N; D] {
        assert!((number as usize) < self.num_rows);
        // SAFETY: - the row is inside the slice, just checked, and at least `D` wide, checked when this was made.
        //         - the slice is borrowed for 'a: nobody writes to it.
        unsafe { &*self.base.wrapping_add(number as usize * self.stride).cast() }
    }
}
