//! NumPy arrays for results. NumPy allocates them, and raises `MemoryError` if there is no memory.

use numpy::ndarray::Dimension;
use numpy::{Element, PyArray, PyArray1, PyArray2, PyArrayMethods, dtype};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// `(len,)`, zeros.
pub fn vector<'py, T: Element>(py: Python<'py>, len: usize) -> PyResult<Bound<'py, PyArray1<T>>> {
    Ok(zeros::<T>(py, (len,))?.cast_into()?)
}

/// `(rows, columns)`, zeros, row-major.
pub fn matrix<'py, T: Element>(
    py: Python<'py>,
    rows: usize,
    columns: usize,
) -> PyResult<Bound<'py, PyArray2<T>>> {
    Ok(zeros::<T>(py, (rows, columns))?.cast_into()?)
}

/// `numpy.zeros` and not `numpy.empty`, since Rust must not read uninitialised memory. Fresh memory is zero at no cost.
fn zeros<'py, T: Element>(py: Python<'py>, shape: impl IntoPyObject<'py>) -> PyResult<Bound<'py, PyAny>> {
    static ZEROS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    ZEROS.import(py, "numpy", "zeros")?.call1((shape, dtype::<T>(py)))
}

/// The elements of a new array.
pub fn values<'a, T: Element, D: Dimension>(
    array: &'a mut Bound<'_, PyArray<T, D>>,
) -> PyResult<&'a mut [T]> {
    // SAFETY: no other code has the array before the call returns it, and `&mut` makes this the only access here.
    Ok(unsafe { array.as_slice_mut() }?)
}
