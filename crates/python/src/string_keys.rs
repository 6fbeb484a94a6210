//! Keys of strings.

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use sok_core::fingerprint::fingerprint64;

use crate::error::detached;
use crate::numpy_out::{values, vector};

/// The key of each string, `(n,)` int64. String i has the bytes from `starts[i]` to `ends[i]` of `data`.
#[pyfunction]
fn string_keys<'py>(
    py: Python<'py>,
    data: &[u8],
    starts: PyReadonlyArray1<'_, i64>,
    ends: PyReadonlyArray1<'_, i64>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let (starts, ends) = (starts.as_slice()?, ends.as_slice()?);
    let outside = || PyValueError::new_err("A string must lie within `data`");
    let mut keys = vector::<i64>(py, starts.len())?;
    let into = values(&mut keys)?;
    let has_all = detached(py, || {
        Ok(into.iter_mut().zip(starts.iter().zip(ends)).all(|(key, (&start, &end))| {
            let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
            let bytes = range.and_then(|(start, end)| data.get(start..end));
            bytes.is_some_and(|bytes| {
                *key = fingerprint64(bytes) as i64;
                true
            })
        }))
    })?;
    if has_all && starts.len() == ends.len() { Ok(keys) } else { Err(outside()) }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(string_keys, module)?)
}
