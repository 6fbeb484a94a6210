//! Memory that grows with what a user asks for: where there is none, an error says how much was wanted, and for what.

use std::collections::HashSet;
use std::hash::Hash;
use std::io::ErrorKind;

use crate::error::{Error, Result};

/// That `len` values of `T` cannot be had.
pub fn missing<T>(len: usize, what: &'static str) -> Error {
    Error::memory(len.saturating_mul(size_of::<T>()), what, ErrorKind::OutOfMemory.into())
}

/// Room for `more` values.
///
/// # Errors
/// [`Error::Memory`]; then nothing has changed. So for all below.
pub fn reserve<T>(values: &mut Vec<T>, more: usize, what: &'static str) -> Result<()> {
    values.try_reserve(more).map_err(|_| missing::<T>(values.len().saturating_add(more), what))
}

/// No values yet, and room for so many.
pub fn with_capacity<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| missing::<T>(len, what))?;
    Ok(values)
}

/// `len` times the same value.
pub fn filled<T: Clone>(value: T, len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = with_capacity(len, what)?;
    values.resize(len, value);
    Ok(values)
}

/// Makes it `len` long; what is new is `value`.
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

/// All values of an iterator, whose length need not be known.
pub fn collect<T>(values: impl IntoIterator<Item = T>, what: &'static str) -> Result<Vec<T>> {
    let values = values.into_iter();
    let mut all = with_capacity(values.size_hint().0, what)?;
    for value in values {
        push(&mut all, value, what)?;
    }
    Ok(all)
}

/// Values that came already.
pub struct Seen<T>(HashSet<T>);

impl<T> Default for Seen<T> {
    fn default() -> Seen<T> {
        Seen(HashSet::new())
    }
}

impl<T: Eq + Hash> Seen<T> {
    /// Whether it is the first of its kind.
    pub fn insert(&mut self, value: T) -> Result<bool> {
        self.0.try_reserve(1).map_err(|_| missing::<T>(2 * self.0.len(), "the distinct keys of a call"))?;
        Ok(self.0.insert(value))
    }
}
