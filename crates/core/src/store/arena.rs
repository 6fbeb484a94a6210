//! Storage of records. A record is a row and its optimizer states, as `format.rs` says, and keeps its number for life.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use crate::error::{Error, Result};
use crate::memory;
use crate::row_type::Number;
use crate::store::format::numbers;
use crate::store::region::Region;
use crate::store::rows::{Rows, RowsWithDim};

pub use crate::store::rows::{NO_RECORD, RecordNumber};

/// All records of a table. A record has `width` words.
pub struct Arena {
    data: Region<f32>,
    width: usize,
    /// Smallest number that was never used.
    next: RecordNumber,
    free: Vec<RecordNumber>,
}

impl Arena {
    /// # Errors
    /// [`Error::Memory`] if there is no memory for the row of zeros.
    pub fn new(width: usize) -> Result<Arena> {
        Ok(Arena { data: Region::new(width)?, width, next: 1, free: Vec::new() })
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn num_bytes(&self) -> usize {
        // Mapped memory counts only where it was touched.
        self.data.num_bytes().min(self.next as usize * self.width * 4) + self.free.capacity() * 4
    }

    /// Reserves address space for `records` more.
    pub fn reserve(&mut self, records: usize) -> Result<()> {
        let end = (self.next as usize).checked_add(records).filter(|&end| end <= u32::MAX as usize);
        let Some(end) = end else {
            return Err(Error::State(format!("a table holds at most {} rows", u32::MAX - 1)));
        };
        let len = end.checked_mul(self.width).ok_or_else(|| memory::missing::<f32>(usize::MAX, "rows"))?;
        self.data.grow_amortized(len)
    }

    /// Takes a number for a new record. Its memory has the contents of an erased record, or zeros.
    #[inline]
    pub fn allocate(&mut self) -> Result<RecordNumber> {
        if let Some(number) = self.free.pop() {
            return Ok(number);
        }
        self.reserve(1)?;
        self.next += 1;
        Ok(self.next - 1)
    }

    pub fn next_unused(&self) -> RecordNumber {
        self.next
    }

    /// Frees all numbers from `next` on, and zeroes their memory.
    pub fn rewind(&mut self, next: RecordNumber) {
        let end = (self.next as usize * self.width).min(self.data.len());
        self.data[next as usize * self.width..end].fill(0.0);
        // Threads that shared the arena have returned the numbers that they did not use.
        self.free.retain(|&number| number < next);
        self.next = next;
    }

    /// Reserves room to `release` so many.
    pub fn reserve_free(&mut self, records: usize) -> Result<()> {
        memory::reserve(&mut self.free, records, "the numbers of erased rows")
    }

    pub fn release(&mut self, number: RecordNumber) {
        self.free.push(number);
    }

    #[inline(always)]
    pub fn record(&self, number: RecordNumber) -> &[f32] {
        let start = number as usize * self.width;
        &self.data[start..start + self.width]
    }

    #[inline(always)]
    pub fn record_mut(&mut self, number: RecordNumber) -> &mut [f32] {
        &mut self.data[number as usize * self.width..][..self.width]
    }

    /// Addresses of records, for prefetches.
    #[inline(always)]
    pub fn addresses(&self) -> Addresses {
        Addresses { base: self.data.as_ptr(), width: self.width }
    }

    /// The rows, whose numbers must have this type.
    #[inline(always)]
    pub fn rows<N: Number>(&self) -> ArenaRows<'_, N> {
        ArenaRows { arena: self, number: PhantomData }
    }

    /// Shares the arena between threads that use different records.
    pub fn share(&mut self) -> SharedArena<'_> {
        SharedArena {
            base: self.data.as_mut_ptr(),
            len: self.data.len(),
            width: self.width,
            arena: PhantomData,
        }
    }

    /// The numbers of erased records.
    pub fn free(&self) -> &[RecordNumber] {
        &self.free
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Hands out the last erased numbers. Room for their return stays reserved.
    pub fn drain_free(&mut self, count: usize) -> impl Iterator<Item = RecordNumber> {
        self.free.drain(self.free.len().saturating_sub(count)..)
    }

    /// Marks all numbers below `next` as used, by threads that shared the arena.
    pub fn advance(&mut self, next: RecordNumber) {
        assert!(next >= self.next && (next as usize) * self.width <= self.data.len());
        self.next = next;
    }

    /// Copies all records to an arena of `width`, under the same numbers. `fill` converts each record.
    pub fn with_width(&self, width: usize, fill: impl Fn(&[f32], &mut [f32])) -> Result<Arena> {
        let mut new = Arena::new(width)?;
        new.reserve(self.next as usize)?;
        new.next = self.next;
        new.free = memory::with_capacity(self.free.capacity(), "the numbers of erased rows")?;
        new.free.extend_from_slice(&self.free);
        for number in 1..self.next {
            fill(self.record(number), new.record_mut(number));
        }
        Ok(new)
    }
}

/// Addresses of records. They may be out of range.
#[derive(Clone, Copy)]
pub struct Addresses {
    base: *const f32,
    width: usize,
}

impl Addresses {
    /// Addresses of nothing, where no rows are read.
    pub const NONE: Addresses = Addresses { base: std::ptr::null(), width: 0 };

    #[inline(always)]
    pub fn get(self, number: RecordNumber) -> *const f32 {
        self.base.wrapping_add(number as usize * self.width)
    }
}

/// The rows of an arena whose numbers have this type.
pub struct ArenaRows<'a, N> {
    arena: &'a Arena,
    number: PhantomData<N>,
}

impl<N: Number> Rows for ArenaRows<'_, N> {
    type Number = N;

    #[inline(always)]
    fn row(&self, number: RecordNumber) -> &[N] {
        numbers(self.arena.record(number))
    }

    #[inline(always)]
    fn with_dim<const D: usize>(&self) -> RowsWithDim<'_, N, D> {
        let stride = self.arena.width * (size_of::<f32>() / size_of::<N>());
        RowsWithDim::new(numbers(&self.arena.data), stride)
    }
}

/// An arena that several threads share.
#[derive(Clone, Copy)]
pub struct SharedArena<'a> {
    base: *mut f32,
    len: usize,
    width: usize,
    arena: PhantomData<&'a mut Arena>,
}

// SAFETY: it gives access to plain floats. The callers of `record_mut` promise that no two threads use the same record.
unsafe impl Send for SharedArena<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedArena<'_> {}

impl<'a> SharedArena<'a> {
    /// # Safety
    /// While the slice lives, no other thread reads or writes record `number`.
    #[inline(always)]
    pub unsafe fn record_mut(&self, number: RecordNumber) -> &'a mut [f32] {
        let start = number as usize * self.width;
        assert!(start + self.width <= self.len);
        // SAFETY: - inside the arena: just checked; the arena is borrowed for 'a, so it neither goes nor moves.
        //         - alone: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.wrapping_add(start), self.width) }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    #[inline(always)]
    pub fn addresses(&self) -> Addresses {
        Addresses { base: self.base, width: self.width }
    }
}
