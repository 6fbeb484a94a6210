//! Rows by number, wherever they lie.

use std::marker::PhantomData;

/// Number of a record. 0 means "no record"; its memory is a row of zeros.
pub type RecordNumber = u32;
pub const NO_RECORD: RecordNumber = 0;

/// An array of rows that pooling can read. Row 0 must be zeros.
pub trait Rows {
    /// Returns a row. It may be longer than the dim of the table.
    fn row(&self, number: RecordNumber) -> &[f32];

    /// Returns all rows, for loops with a constant dim.
    fn with_dim<const D: usize>(&self) -> RowsWithDim<'_, D>;
}

/// The first `D` floats of each row. Their width is checked once, not for each row.
#[derive(Clone, Copy)]
pub struct RowsWithDim<'a, const D: usize> {
    base: *const f32,
    stride: usize,
    num_rows: usize,
    rows: PhantomData<&'a [f32]>,
}

impl<'a, const D: usize> RowsWithDim<'a, D> {
    /// `rows`: one row after the other, each of `stride` floats.
    #[inline(always)]
    pub fn new(rows: &'a [f32], stride: usize) -> RowsWithDim<'a, D> {
        assert!(stride >= D);
        RowsWithDim { base: rows.as_ptr(), stride, num_rows: rows.len() / stride, rows: PhantomData }
    }

    /// Returns a row.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn get(self, number: RecordNumber) -> &'a [f32; D] {
        assert!((number as usize) < self.num_rows);
        // SAFETY: - the row is inside the slice, just checked, and at least `D` wide, checked when this was made.
        //         - the slice is borrowed for 'a: nobody writes to it.
        unsafe { &*self.base.wrapping_add(number as usize * self.stride).cast() }
    }
}
