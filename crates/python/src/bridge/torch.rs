//! PyTorch: the four calls over raw pointers, which Python takes from its tensors and keeps alive.

use pyo3::prelude::*;
use sok_core::error::{Error, Result};

use crate::call::{self, DType, OnGpu, Outputs, Tensor};
use crate::error::detached;

/// `(data_ptr, dtype, shape)` of a contiguous tensor.
type TensorTuple = (usize, u8, Vec<i64>);

/// Numbers of the element types on the border to Python.
const DTYPES: [DType; 5] = [DType::I32, DType::I64, DType::U32, DType::U64, DType::F32];

struct Pointers(Vec<Tensor>);

// SAFETY: addresses of memory that Python keeps alive for the call; no thread-local meaning.
unsafe impl Send for Pointers {}

fn tensors(tuples: Vec<TensorTuple>) -> Pointers {
    let tensor = |(data, dtype, dims): TensorTuple| Tensor {
        data: data as *const u8,
        dtype: DTYPES[usize::from(dtype) % DTYPES.len()],
        dims,
    };
    Pointers(tuples.into_iter().map(tensor).collect())
}

/// The number of a lookup stays on the host, so that a push finds it there.
fn on_gpu(stream: u64) -> OnGpu {
    OnGpu { stream, has_number: false }
}

/// Tensors that Python made before the call.
impl Outputs for Pointers {
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<*mut u8> {
        let tensor =
            self.0.get(index).ok_or_else(|| Error::argument("the call has fewer outputs than its plan"))?;
        if tensor.dtype != dtype || tensor.dims != dims {
            return Err(Error::argument(format!(
                "output {index} must be {dtype:?} {dims:?}. Received: {:?} {:?}",
                tensor.dtype, tensor.dims
            )));
        }
        Ok(tensor.data.cast_mut())
    }
}

#[pyfunction]
#[pyo3(signature = (plan, insert, save, inputs, outputs, stream=None))]
fn lookup(
    py: Python<'_>,
    plan: i64,
    insert: bool,
    save: bool,
    inputs: Vec<TensorTuple>,
    outputs: Vec<TensorTuple>,
    stream: Option<u64>,
) -> PyResult<()> {
    let (inputs, mut outputs) = (tensors(inputs), tensors(outputs));
    detached(py, move || {
        let inputs = inputs;
        call::lookup(plan, insert, save, &inputs.0, &mut outputs, stream.map(on_gpu))
    })
}

/// `keep`: what holds the gradients' memory; None merges them now.
#[pyfunction]
#[pyo3(signature = (plan, inputs, keep, outputs, stream=None))]
fn push(
    py: Python<'_>,
    plan: i64,
    inputs: Vec<TensorTuple>,
    keep: Option<Py<PyAny>>,
    outputs: Vec<TensorTuple>,
    stream: Option<u64>,
) -> PyResult<()> {
    let (inputs, mut outputs) = (tensors(inputs), tensors(outputs));
    detached(py, move || {
        let inputs = inputs;
        call::push(plan, &inputs.0, keep.map(|k| Box::new(k) as _), &mut outputs, stream.map(on_gpu))
    })
}

#[pyfunction]
#[pyo3(signature = (optimizer, inputs, outputs, stream=None))]
fn commit(
    py: Python<'_>,
    optimizer: i64,
    inputs: Vec<TensorTuple>,
    outputs: Vec<TensorTuple>,
    stream: Option<u64>,
) -> PyResult<()> {
    let (inputs, mut outputs) = (tensors(inputs), tensors(outputs));
    detached(py, move || {
        let inputs = inputs;
        call::commit(optimizer, &inputs.0, &mut outputs, stream.map(on_gpu))
    })
}

#[pyfunction]
#[pyo3(signature = (optimizer, inputs, outputs, stream=None))]
fn apply(
    py: Python<'_>,
    optimizer: i64,
    inputs: Vec<TensorTuple>,
    outputs: Vec<TensorTuple>,
    stream: Option<u64>,
) -> PyResult<()> {
    let (inputs, mut outputs) = (tensors(inputs), tensors(outputs));
    detached(py, move || {
        let inputs = inputs;
        call::apply(optimizer, &inputs.0, &mut outputs, stream.map(on_gpu))
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(lookup, module)?)?;
    module.add_function(wrap_pyfunction!(push, module)?)?;
    module.add_function(wrap_pyfunction!(commit, module)?)?;
    module.add_function(wrap_pyfunction!(apply, module)?)
}
