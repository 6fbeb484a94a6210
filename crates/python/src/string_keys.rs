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
    if starts.len() != ends.len() {
        return Err(PyValueError::new_err("`starts` and `ends` must be as long as each other"));
    }
    let mut keys = vector::<i64>(py, starts.len())?;
    let into = values(&mut keys)?;
    let bytes_of = |start: i64, end: i64| data.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?);
    let all_within = detached(py, || {
        for ((key, &start), &end) in into.iter_mut().zip(starts).zip(ends) {
            match bytes_of(start, end) {
                Some(bytes) => *key = fingerprint64(bytes) as i64,
                None => return Ok(false),
            }
        }
        Ok(true)
    })?;
    if all_within { Ok(keys) } else { Err(PyValueError::new_err("A string must lie within `data`")) }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(string_keys, module)?)
}
