//! Allocations that may fail, for memory whose size depends on the user. The error has the number of bytes, and `what` they are
//! for.

use std::collections::HashSet;
use std::hash::Hash;
use std::io::ErrorKind;

use crate::error::{Error, Result};

/// Makes the error for `len` values of `T` that cannot be allocated.
pub fn missing<T>(len: usize, what: &'static str) -> Error {
    Error::memory(len.saturating_mul(size_of::<T>()), what, ErrorKind::OutOfMemory.into())
}

/// Reserves room for `more` values.
///
/// # Errors
/// [`Error::Memory`]. Nothing has changed then. The functions below fail in the same way.
pub fn reserve<T>(values: &mut Vec<T>, more: usize, what: &'static str) -> Result<()> {
    values.try_reserve(more).map_err(|_| missing::<T>(values.len().saturating_add(more), what))
}

/// Makes an empty vector with room for `len` values.
///
/// # Errors
/// [`Error::Memory`]
pub fn with_capacity<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| missing::<T>(len, what))?;
    Ok(values)
}

/// Makes a vector of `len` copies of `value`.
///
/// # Errors
/// [`Error::Memory`]
pub fn filled<T: Clone>(value: T, len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = with_capacity(len, what)?;
    values.resize(len, value);
    Ok(values)
}

/// Resizes a vector to `len` elements. New elements are `value`.
///
/// # Errors
/// [`Error::Memory`]
pub fn resize<T: Clone>(values: &mut Vec<T>, len: usize, value: T, what: &'static str) -> Result<()> {
    reserve(values, len.saturating_sub(values.len()), what)?;
    values.resize(len, value);
    Ok(())
}

/// Appends a value.
///
/// # Errors
/// [`Error::Memory`]
pub fn push<T>(values: &mut Vec<T>, value: T, what: &'static str) -> Result<()> {
    reserve(values, 1, what)?;
    values.push(value);
    Ok(())
}

/// Collects an iterator into a vector. The length of the iterator need not be known.
///
/// # Errors
/// [`Error::Memory`]
pub fn collect<T>(values: impl IntoIterator<Item = T>, what: &'static str) -> Result<Vec<T>> {
    let values = values.into_iter();
    let mut all = with_capacity(values.size_hint().0, what)?;
    for value in values {
        push(&mut all, value, what)?;
    }
    Ok(all)
}

/// Copies a slice.
///
/// # Errors
/// [`Error::Memory`]
pub fn copied<T: Copy>(values: &[T], what: &'static str) -> Result<Vec<T>> {
    let mut all = with_capacity(values.len(), what)?;
    all.extend_from_slice(values);
    Ok(all)
}

/// The set of values that were seen before.
pub struct Seen<T>(HashSet<T>);

impl<T> Default for Seen<T> {
    fn default() -> Seen<T> {
        Seen(HashSet::new())
    }
}

impl<T: Eq + Hash> Seen<T> {
    /// Adds a value. Returns whether it was not in the set.
    ///
    /// # Errors
    /// [`Error::Memory`]
    pub fn insert(&mut self, value: T) -> Result<bool> {
        self.0.try_reserve(1).map_err(|_| missing::<T>(2 * self.0.len(), "the distinct keys of a call"))?;
        Ok(self.0.insert(value))
    }
}
