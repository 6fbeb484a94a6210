//! PyTorch: the four calls on its tensors, which Python keeps alive and has put where the tables are. A lookup's number alone is always
//! on the host, where a push finds it.

use pyo3::prelude::*;
use sok_core::contract::table::Insertion;
use sok_core::contract::tensor::{DType, StreamHandle, Tensor, TensorMut};
use sok_core::error::{Error, Result};

use crate::bridge::dlpack::{self, Device, View};
use crate::call::{self, Outputs};
use crate::error::{detached, guarded, to_python};
use crate::registry;

struct Tensors(Vec<Tensor>);

/// Tensors that Python made before the call.
impl Outputs for Tensors {
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<TensorMut> {
        let tensor =
            self.0.get(index).ok_or_else(|| Error::argument("the call has fewer outputs than its plan"))?;
        if tensor.dtype() != dtype || tensor.dims() != dims {
            return Err(Error::argument(format!(
                "output {index} must be {dtype:?} {dims:?}. Received: {:?} {:?}",
                tensor.dtype(),
                tensor.dims()
            )));
        }
        // SAFETY: Python made it for this call, and nobody else knows it before the call returns.
        Ok(unsafe { TensorMut::new(tensor.data().cast_mut(), dtype, dims, tensor.memory()) })
    }
}

fn tensors_at(device: Device, objects: &[Bound<'_, PyAny>]) -> PyResult<Tensors> {
    Ok(Tensors(objects.iter().map(|object| View::of(object)?.tensor_at(device)).collect::<PyResult<_>>()?))
}

fn device_of(gpu: Option<i32>) -> Device {
    gpu.map_or(Device::Cpu, Device::Gpu)
}

/// The device of a call's tensors, and for a GPU the stream on which they are ready.
fn device_and_stream(py: Python<'_>, gpu: Option<i32>) -> PyResult<(Device, StreamHandle)> {
    let stream = gpu.map(|gpu| dlpack::current_stream(py, gpu)).transpose()?;
    Ok((device_of(gpu), stream.unwrap_or(StreamHandle::NONE)))
}

/// Runs a call of the core on tensors of PyTorch, without the GIL.
fn on_tensors(
    py: Python<'_>,
    inputs: &[Bound<'_, PyAny>],
    outputs: &[Bound<'_, PyAny>],
    gpu: Option<i32>,
    call: impl FnOnce(&[Tensor], &mut Tensors, StreamHandle) -> Result<()> + Send,
) -> PyResult<()> {
    guarded(|| {
        let (device, stream) = device_and_stream(py, gpu)?;
        let (inputs, mut outputs) = (tensors_at(device, inputs)?, tensors_at(device, outputs)?);
        detached(py, move || {
            // The whole wrapper moves to the call, which may run on another thread.
            let inputs = inputs;
            call(&inputs.0, &mut outputs, stream)
        })
    })
}

/// Whether tensors are dense and on this GPU (None: the host), so that a call may be given them.
#[pyfunction]
#[pyo3(signature = (tensors, gpu))]
fn are_at(tensors: Vec<Bound<'_, PyAny>>, gpu: Option<i32>) -> PyResult<bool> {
    // What cannot be looked at is elsewhere: PyTorch has devices that DLPack has no name for.
    let is_at = |tensor| View::of(tensor).is_ok_and(|view| view.is_at(device_of(gpu)));
    guarded(|| Ok(tensors.iter().all(is_at)))
}

/// Shape, rows of each feature in it, features.
type Piece = (Vec<i64>, Vec<i64>, Vec<usize>);

/// What memory the rows of a lookup take: a piece holds matrices of one width, one below the other, or the rows
/// of one feature alone.
#[pyfunction]
fn pieces_of_rows(plan: i64, tensors: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Piece>> {
    guarded(|| {
        let plan = registry::plan(plan).map_err(to_python)?;
        let tensors = tensors.iter().map(|t| View::of(t)?.tensor()).collect::<PyResult<Vec<_>>>()?;
        Ok(pieces(call::row_dims(&plan, &tensors).map_err(to_python)?))
    })
}

/// `rows`: shape of each feature's.
fn pieces(rows: Vec<Vec<i64>>) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (feature, dims) in rows.into_iter().enumerate() {
        let joins = |shape: &[i64]| dims.len() == 2 && shape.len() == 2 && shape[1] == dims[1];
        if let Some((shape, lengths, features)) = pieces.iter_mut().find(|(shape, ..)| joins(shape)) {
            shape[0] += dims[0];
            lengths.push(dims[0]);
            features.push(feature);
        } else {
            let length = dims[0];
            pieces.push((dims, vec![length], vec![feature]));
        }
    }
    pieces
}

/// `number`: two int32 on the host. `gpu`: where all other tensors are; None: on the host.
#[pyfunction]
#[pyo3(signature = (plan, insertion, save, inputs, number, rows, gpu))]
#[expect(clippy::too_many_arguments, reason = "a call from Python, where they have names")]
fn lookup(
    py: Python<'_>,
    plan: i64,
    insertion: i64,
    save: bool,
    inputs: Vec<Bound<'_, PyAny>>,
    number: Bound<'_, PyAny>,
    rows: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    guarded(|| {
        let (device, stream) = device_and_stream(py, gpu)?;
        let inputs = tensors_at(device, &inputs)?;
        let mut outputs = tensors_at(Device::Cpu, &[number])?;
        outputs.0.extend(tensors_at(device, &rows)?.0);
        detached(py, move || {
            let (inputs, mut outputs) = (inputs, outputs);
            call::lookup(plan, Insertion::from_number(insertion)?, save, &inputs.0, &mut outputs, stream)
        })
    })
}

/// `keep`: what holds the gradients' memory; None merges them now.
#[pyfunction]
#[pyo3(signature = (plan, number, inputs, keep, outputs, gpu))]
fn push(
    py: Python<'_>,
    plan: i64,
    number: Bound<'_, PyAny>,
    inputs: Vec<Bound<'_, PyAny>>,
    keep: Option<Py<PyAny>>,
    outputs: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    guarded(|| {
        let (device, stream) = device_and_stream(py, gpu)?;
        let mut numbered = tensors_at(Device::Cpu, &[number])?;
        numbered.0.extend(tensors_at(device, &inputs)?.0);
        let outputs = tensors_at(device, &outputs)?;
        detached(py, move || {
            let (inputs, mut outputs) = (numbered, outputs);
            call::push(plan, &inputs.0, keep.map(|k| Box::new(k) as _), &mut outputs, stream)
        })
    })
}

#[pyfunction]
#[pyo3(signature = (optimizer, inputs, outputs, gpu))]
fn commit(
    py: Python<'_>,
    optimizer: i64,
    inputs: Vec<Bound<'_, PyAny>>,
    outputs: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    on_tensors(py, &inputs, &outputs, gpu, |inputs, outputs, stream| {
        call::commit(optimizer, inputs, outputs, stream)
    })
}

#[pyfunction]
#[pyo3(signature = (optimizer, size, inputs, outputs, gpu))]
fn gather_piece(
    py: Python<'_>,
    optimizer: i64,
    size: usize,
    inputs: Vec<Bound<'_, PyAny>>,
    outputs: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    on_tensors(py, &inputs, &outputs, gpu, |inputs, outputs, stream| {
        call::gather(optimizer, outputs.0.len(), size, inputs, outputs, stream)
    })
}

#[pyfunction]
#[pyo3(signature = (optimizer, inputs, outputs, gpu))]
fn scatter_piece(
    py: Python<'_>,
    optimizer: i64,
    inputs: Vec<Bound<'_, PyAny>>,
    outputs: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    on_tensors(py, &inputs, &outputs, gpu, |inputs, outputs, stream| {
        call::scatter(optimizer, inputs, outputs, stream)
    })
}

#[pyfunction]
#[pyo3(signature = (optimizer, inputs, outputs, gpu))]
fn apply(
    py: Python<'_>,
    optimizer: i64,
    inputs: Vec<Bound<'_, PyAny>>,
    outputs: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    on_tensors(py, &inputs, &outputs, gpu, |inputs, outputs, stream| {
        call::apply(optimizer, inputs, outputs, stream)
    })
}

/// `inputs` and `outputs`: as [`call::sum_gradients`].
#[pyfunction]
#[pyo3(signature = (inputs, outputs, gpu))]
fn sum_gradients(
    py: Python<'_>,
    inputs: Vec<Bound<'_, PyAny>>,
    outputs: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    on_tensors(py, &inputs, &outputs, gpu, |inputs, outputs, stream| {
        call::sum_gradients(inputs, outputs, stream)
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dlpack::find_torch, module)?)?;
    module.add_function(wrap_pyfunction!(are_at, module)?)?;
    module.add_function(wrap_pyfunction!(pieces_of_rows, module)?)?;
    module.add_function(wrap_pyfunction!(lookup, module)?)?;
    module.add_function(wrap_pyfunction!(push, module)?)?;
    module.add_function(wrap_pyfunction!(commit, module)?)?;
    module.add_function(wrap_pyfunction!(gather_piece, module)?)?;
    module.add_function(wrap_pyfunction!(scatter_piece, module)?)?;
    module.add_function(wrap_pyfunction!(sum_gradients, module)?)?;
    module.add_function(wrap_pyfunction!(apply, module)?)
}
