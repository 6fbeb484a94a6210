//! Records: a row and its optimizer states side by side, addressed by number, never moved to another number.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use crate::error::{Error, Result};
use crate::memory;
use crate::region::Region;

/// Number of a record. 0 is "none"; its memory is a row of zeros.
pub type RecordNumber = u32;
pub const NO_RECORD: RecordNumber = 0;

/// All records of a table. A record is `width` floats: the row first, then the states.
pub struct Arena {
    data: Region<f32>,
    width: usize,
    /// Smallest number that was never given out.
    next: RecordNumber,
    free: Vec<RecordNumber>,
}

impl Arena {
    /// # Errors
    /// [`Error::Memory`] if there is none for the row of zeros.
    pub fn new(width: usize) -> Result<Arena> {
        Ok(Arena { data: Region::new(width)?, width, next: 1, free: Vec::new() })
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn num_bytes(&self) -> usize {
        // Mapped memory counts as far as it was touched.
        self.data.num_bytes().min(self.next as usize * self.width * 4) + self.free.capacity() * 4
    }

    /// Room for `records` more without moving: address space, not memory.
    pub fn reserve(&mut self, records: usize) -> Result<()> {
        let end = (self.next as usize).checked_add(records).filter(|&end| end <= u32::MAX as usize);
        let Some(end) = end else {
            return Err(Error::State(format!("a table holds at most {} rows", u32::MAX - 1)));
        };
        let len = end.checked_mul(self.width).ok_or_else(|| memory::missing::<f32>(usize::MAX, "rows"))?;
        self.data.grow_amortized(len)
    }

    /// A number for a new record. Its memory holds what an erased record left there, or zeros.
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

    /// Takes back all numbers from `next` on; their memory is zero again.
    pub fn rewind(&mut self, next: RecordNumber) {
        let end = (self.next as usize * self.width).min(self.data.len());
        self.data[next as usize * self.width..end].fill(0.0);
        // Threads that shared the arena have given back those of their share that no key got.
        self.free.retain(|&number| number < next);
        self.next = next;
    }

    /// Room to `release` so many.
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

    /// The rows of all records, for loops that read many.
    #[inline(always)]
    pub fn rows<const D: usize>(&self) -> Rows<'_, D> {
        assert!(self.width >= D);
        let num_records = self.data.len() / self.width;
        Rows { base: self.data.as_ptr(), width: self.width, num_records, arena: PhantomData }
    }

    #[inline(always)]
    pub fn record_mut(&mut self, number: RecordNumber) -> &mut [f32] {
        &mut self.data[number as usize * self.width..][..self.width]
    }

    /// Where records lie, for prefetches.
    #[inline(always)]
    pub fn addresses(&self) -> Addresses {
        Addresses { base: self.data.as_ptr(), width: self.width }
    }

    /// For threads that work on different records at once.
    pub fn share(&mut self) -> SharedArena<'_> {
        SharedArena {
            base: self.data.as_mut_ptr(),
            len: self.data.len(),
            width: self.width,
            arena: PhantomData,
        }
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// The last erased numbers, for another to give out; their room stays for their return.
    pub fn drain_free(&mut self, count: usize) -> impl Iterator<Item = RecordNumber> {
        self.free.drain(self.free.len().saturating_sub(count)..)
    }

    /// All numbers below `next` were given out, by threads that shared the arena.
    pub fn advance(&mut self, next: RecordNumber) {
        assert!(next >= self.next && (next as usize) * self.width <= self.data.len());
        self.next = next;
    }

    /// The same records under the same numbers, `width` floats each: `fill` makes the new one of the old one.
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

/// Where records lie: no promise that they are there.
#[derive(Clone, Copy)]
pub struct Addresses {
    base: *const f32,
    width: usize,
}

impl Addresses {
    #[inline(always)]
    pub fn get(self, number: RecordNumber) -> *const f32 {
        self.base.wrapping_add(number as usize * self.width)
    }
}

/// The first `D` floats of each record. Division, multiplication and checks that slices would need a row are done once.
#[derive(Clone, Copy)]
pub struct Rows<'a, const D: usize> {
    base: *const f32,
    width: usize,
    num_records: usize,
    arena: PhantomData<&'a Arena>,
}

impl<'a, const D: usize> Rows<'a, D> {
    #[inline(always)]
    pub fn get(self, number: RecordNumber) -> &'a [f32; D] {
        assert!((number as usize) < self.num_records);
        // SAFETY: - the record is inside the arena, just checked, and at least `D` wide, checked when this was made.
        //         - the arena is borrowed for 'a: nobody writes to it.
        unsafe { &*self.base.add(number as usize * self.width).cast() }
    }
}

/// An arena in the hands of several threads.
#[derive(Clone, Copy)]
pub struct SharedArena<'a> {
    base: *mut f32,
    len: usize,
    width: usize,
    arena: PhantomData<&'a mut Arena>,
}

// SAFETY: what it gives access to is plain floats; who may touch which is the promise of `record_mut`'s caller.
unsafe impl Send for SharedArena<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedArena<'_> {}

impl<'a> SharedArena<'a> {
    /// # Safety
    /// As long as the slice lives, nobody else reads or writes record `number`.
    #[inline(always)]
    pub unsafe fn record_mut(&self, number: RecordNumber) -> &'a mut [f32] {
        let start = number as usize * self.width;
        assert!(start + self.width <= self.len);
        // SAFETY: - inside the arena: just checked; the arena is borrowed for 'a, so it neither goes nor moves.
        //         - alone: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), self.width) }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    #[inline(always)]
    pub fn addresses(&self) -> Addresses {
        Addresses { base: self.base, width: self.width }
    }
}
