//! Zeroed arrays that grow in place, for indexes, records, and memory that steps keep.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Types for which all bytes, also zeros, are valid, and that need no drop.
///
/// # Safety
/// The implementor promises both.
pub unsafe trait Plain {}
// SAFETY: numbers: every bit pattern is a value, nothing to drop.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}

const HUGE_PAGE: usize = 2 << 20;
/// Alignment to cache lines, so that records of 16 floats never straddle one.
const ALIGN: usize = 64;

/// A zeroed array. From 2 MiB on it is a mapping aligned for huge pages, which save a quarter of the time of random reads. Growth then
/// moves page tables instead of bytes.
pub struct Region<T: Plain> {
    base: NonNull<T>,
    len: usize,
    /// Size in bytes from `base` on.
    bytes: usize,
}

// SAFETY: a Region owns its memory as a Vec does.
unsafe impl<T: Plain + Send> Send for Region<T> {}
// SAFETY: shared access gives `&[T]` alone.
unsafe impl<T: Plain + Sync> Sync for Region<T> {}

impl<T: Plain> Default for Region<T> {
    fn default() -> Self {
        Region { base: NonNull::dangling(), len: 0, bytes: 0 }
    }
}

impl<T: Plain> Region<T> {
    /// # Errors
    /// [`Error::Memory`] if the system has no memory.
    pub fn new(len: usize) -> Result<Region<T>> {
        let mut region = Region::default();
        region.resize(len)?;
        Ok(region)
    }

    /// Grows to at least `len` elements, with capacity for as many again, so that growing step by step is cheap. Old elements stay and
    /// new ones are zero. The array may move.
    pub fn grow_amortized(&mut self, len: usize) -> Result<()> {
        if len <= self.len { Ok(()) } else { self.resize(len.max(self.len.saturating_mul(2)).max(64)) }
    }

    /// Address of the first element. Valid until it grows.
    pub fn base(&self) -> *mut T {
        self.base.as_ptr()
    }

    pub fn num_bytes(&self) -> usize {
        self.bytes
    }

    fn resize(&mut self, len: usize) -> Result<()> {
        let wanted = len
            .checked_mul(size_of::<T>())
            .filter(|&bytes| bytes <= isize::MAX as usize - 2 * HUGE_PAGE)
            .ok_or_else(|| out_of_memory(usize::MAX))?;
        let bytes = if wanted >= HUGE_PAGE {
            wanted.next_multiple_of(HUGE_PAGE)
        } else {
            wanted.next_multiple_of(ALIGN)
        };
        if bytes == self.bytes {
            self.len = len;
            return Ok(());
        }
        let base = if self.bytes >= HUGE_PAGE {
            remap(self.base.as_ptr().cast(), self.bytes, bytes)?
        } else {
            let new = allocate(bytes)?;
            // SAFETY: - both are at least `self.bytes` long: the new one is larger.
            //         - they do not overlap: `new` was just allocated.
            unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr().cast::<u8>(), new, self.bytes) };
            release(self.base.as_ptr().cast(), self.bytes);
            new
        };
        self.base = NonNull::new(base.cast()).expect("allocations are checked for null");
        (self.len, self.bytes) = (len, bytes);
        Ok(())
    }
}

impl<T: Plain> Drop for Region<T> {
    fn drop(&mut self) {
        release(self.base.as_ptr().cast(), self.bytes);
    }
}

impl<T: Plain> Deref for Region<T> {
    type Target = [T];
    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: - `base` has room for `len` values of T, aligned to at least 64 bytes (or dangling with `len` 0).
        //         - all of it was zeroed, which is a value of T: `Plain`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Region<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` makes it the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

fn out_of_memory(bytes: usize) -> Error {
    let source = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
    Error::memory(bytes, "rows and their index", source)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGN).expect("64 is a power of two and the size is below isize::MAX")
}

fn allocate(bytes: usize) -> Result<*mut u8> {
    if bytes >= HUGE_PAGE {
        return map(bytes);
    }
    if bytes == 0 {
        return Ok(ALIGN as *mut u8);
    }
    // SAFETY: the size is not zero.
    let base = unsafe { alloc_zeroed(layout(bytes)) };
    if base.is_null() { Err(out_of_memory(bytes)) } else { Ok(base) }
}

fn release(base: *mut u8, bytes: usize) {
    if bytes >= HUGE_PAGE {
        unmap(base, bytes);
    } else if bytes > 0 {
        // SAFETY: `allocate` made it with the same layout, and there are no references to it.
        unsafe { dealloc(base, layout(bytes)) };
    }
}

/// A zeroed mapping, aligned for huge pages. It uses memory only where it is touched.
fn map(bytes: usize) -> Result<*mut u8> {
    let base = reserve(bytes, libc::PROT_READ | libc::PROT_WRITE)?;
    #[cfg(target_os = "linux")]
    // SAFETY: advice on our own mapping, which affects only speed.
    unsafe {
        libc::madvise(base.cast(), bytes, libc::MADV_HUGEPAGE)
    };
    Ok(base)
}

/// Reserves address space of `bytes`, aligned to 2 MiB: maps more and unmaps both ends.
fn reserve(bytes: usize, protection: libc::c_int) -> Result<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new private mapping at an address that the system chooses.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), bytes + HUGE_PAGE, protection, flags, -1, 0) };
    if map == libc::MAP_FAILED {
        let source = std::io::Error::last_os_error();
        return Err(Error::memory(bytes, "rows and their index", source));
    }
    let map = map.cast::<u8>();
    let head = map.align_offset(HUGE_PAGE);
    // SAFETY: `head` is at most HUGE_PAGE, so this stays inside the mapping.
    let base = unsafe { map.add(head) };
    unmap(map, head);
    // SAFETY: `base + bytes` is inside the mapping or its end.
    let tail = unsafe { base.add(bytes) };
    unmap(tail, HUGE_PAGE - head);
    Ok(base)
}

fn unmap(base: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: a part of our own mapping, to which there are no references.
        unsafe { libc::munmap(base.cast(), bytes) };
    }
}

/// Moves the pages of a mapping to a larger range of addresses. New pages are zero.
#[cfg(target_os = "linux")]
fn remap(old: *mut u8, old_bytes: usize, bytes: usize) -> Result<*mut u8> {
    let new = reserve(bytes, libc::PROT_NONE)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: - `old` is a mapping of ours of `old_bytes`; nobody refers to it: the caller has `&mut`.
    //         - `new` is address space that was reserved for this, `bytes` long.
    let moved = unsafe { libc::mremap(old.cast(), old_bytes, bytes, flags, new) };
    if moved == libc::MAP_FAILED {
        let source = std::io::Error::last_os_error();
        unmap(new, bytes);
        return Err(Error::memory(bytes, "rows and their index", source));
    }
    Ok(new)
}

#[cfg(not(target_os = "linux"))]
fn remap(old: *mut u8, old_bytes: usize, bytes: usize) -> Result<*mut u8> {
    let new = map(bytes)?;
    // SAFETY: both mappings are `old_bytes` long at least and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(old, new, old_bytes) };
    unmap(old, old_bytes);
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_keeps_what_was_there_and_zeroes_the_rest() {
        let mut region = Region::<u64>::default();
        let mut len = 1;
        for step in 0..24u64 {
            region.grow_amortized(len).unwrap();
            assert_eq!(region.as_ptr() as usize % ALIGN, 0);
            assert!(region[len / 2..].iter().skip(1).all(|&x| x == 0), "step {step}");
            region[len - 1] = step + 1;
            len *= 2;
        }
        for step in 0..24 {
            assert_eq!(region[(1 << step) - 1], step as u64 + 1);
        }
    }

    #[test]
    fn memory_that_no_machine_has_is_an_error() {
        assert!(matches!(Region::<u64>::new(usize::MAX / 8), Err(Error::Memory { .. })));
        assert!(matches!(Region::<u64>::new(usize::MAX / 64), Err(Error::Memory { .. })));
    }
}
