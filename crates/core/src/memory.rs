//! Fallible allocations, for memory whose size depends on the user. The error says how many bytes were wanted, and for what.

use std::collections::HashSet;
use std::hash::Hash;
use std::io::ErrorKind;

use crate::error::{Error, Result};

/// The error that `len` values of `T` cannot be allocated.
pub fn missing<T>(len: usize, what: &'static str) -> Error {
    Error::memory(len.saturating_mul(size_of::<T>()), what, ErrorKind::OutOfMemory.into())
}

/// Reserves room for `more` values.
///
/// # Errors
/// [`Error::Memory`]. Nothing has changed then. The functions below fail alike.
pub fn reserve<T>(values: &mut Vec<T>, more: usize, what: &'static str) -> Result<()> {
    values.try_reserve(more).map_err(|_| missing::<T>(values.len().saturating_add(more), what))
}

/// An empty vector with room for so many values.
pub fn with_capacity<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| missing::<T>(len, what))?;
    Ok(values)
}

/// A vector with `len` times the same value.
pub fn filled<T: Clone>(value: T, len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = with_capacity(len, what)?;
    values.resize(len, value);
    Ok(values)
}

/// Resizes to `len`. New elements are `value`.
pub fn resize<T: Clone>(values: &mut Vec<T>, len: usize, value: T, what: &'static str) -> Result<()> {
    reserve(values, len.saturating_sub(values.len()), what)?;
    values.resize(len, value);
    Ok(())
}

/// Appends a value.
pub fn push<T>(values: &mut Vec<T>, value: T, what: &'static str) -> Result<()> {
    reserve(values, 1, what)?;
    values.push(value);
    Ok(())
}

/// Collects an iterator, whose length need not be known.
pub fn collect<T>(values: impl IntoIterator<Item = T>, what: &'static str) -> Result<Vec<T>> {
    let values = values.into_iter();
    let mut all = with_capacity(values.size_hint().0, what)?;
    for value in values {
        push(&mut all, value, what)?;
    }
    Ok(all)
}

/// A set of values that were seen before.
pub struct Seen<T>(HashSet<T>);

impl<T> Default for Seen<T> {
    fn default() -> Seen<T> {
        Seen(HashSet::new())
    }
}

impl<T: Eq + Hash> Seen<T> {
    /// Adds a value. Returns whether it was not in the set.
    pub fn insert(&mut self, value: T) -> Result<bool> {
        self.0.try_reserve(1).map_err(|_| missing::<T>(2 * self.0.len(), "the distinct keys of a call"))?;
        Ok(self.0.insert(value))
    }
}
