//! PyTorch: the four calls on its tensors, which Python keeps alive and has put on one device.

use pyo3::prelude::*;
use sok_core::error::{Error, Result};

use crate::bridge::dlpack::{self, Device, View};
use crate::call::{self, DType, OnGpu, Outputs, Tensor};
use crate::error::{detached, to_python};
use crate::registry;

struct Tensors(Vec<Tensor>);

// SAFETY: addresses of memory that Python keeps alive for the call; no thread-local meaning.
unsafe impl Send for Tensors {}

/// Tensors that Python made before the call.
impl Outputs for Tensors {
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

/// Dense tensors, all on one device.
fn tensors_on(device: Device, objects: &[Bound<'_, PyAny>]) -> PyResult<Tensors> {
    let tensor = |object| {
        let view = View::of(object)?;
        if view.device != device || !view.is_dense {
            return Err(to_python(Error::argument(format!(
                "tensors must be dense, on {device:?}. Received: one on {:?}{}",
                view.device,
                if view.is_dense { "" } else { ", not dense" }
            ))));
        }
        Ok(view.tensor)
    };
    Ok(Tensors(objects.iter().map(tensor).collect::<PyResult<_>>()?))
}

/// Where the tables are, as the model's device tells: a lookup's number stays on the host, where a push finds it.
fn place(py: Python<'_>, gpu: Option<i32>) -> PyResult<(Device, Option<OnGpu>)> {
    let Some(gpu) = gpu else { return Ok((Device::Cpu, None)) };
    Ok((Device::Gpu(gpu), Some(OnGpu { stream: dlpack::current_stream(py, gpu)?, has_number: false })))
}

/// Whether tensors are dense and on this GPU (None: the host), so that a call may be given them.
#[pyfunction]
#[pyo3(signature = (tensors, gpu))]
fn are_at(tensors: Vec<Bound<'_, PyAny>>, gpu: Option<i32>) -> PyResult<bool> {
    let device = gpu.map_or(Device::Cpu, Device::Gpu);
    for tensor in &tensors {
        let view = View::of(tensor)?;
        if view.device != device || !view.is_dense {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Shape, rows of each feature in it, features.
type Piece = (Vec<i64>, Vec<i64>, Vec<usize>);

/// What memory the rows of a lookup take: a piece holds matrices of one width, one below the other, or the rows
/// of one feature alone.
#[pyfunction]
fn pieces_of_rows(plan: i64, tensors: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Piece>> {
    let plan = registry::plan(plan).map_err(to_python)?;
    let tensors = tensors.iter().map(|t| Ok(View::of(t)?.tensor)).collect::<PyResult<Vec<_>>>()?;
    let mut pieces: Vec<Piece> = Vec::new();
    for (feature, dims) in call::row_dims(&plan, &tensors).map_err(to_python)?.into_iter().enumerate() {
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
    Ok(pieces)
}

/// `number`: two int32 on the host. `gpu`: where all other tensors are; None: on the host.
#[pyfunction]
#[pyo3(signature = (plan, insert, save, inputs, number, rows, gpu))]
#[expect(clippy::too_many_arguments, reason = "a call from Python, where they have names")]
fn lookup(
    py: Python<'_>,
    plan: i64,
    insert: bool,
    save: bool,
    inputs: Vec<Bound<'_, PyAny>>,
    number: Bound<'_, PyAny>,
    rows: Vec<Bound<'_, PyAny>>,
    gpu: Option<i32>,
) -> PyResult<()> {
    let (device, on_gpu) = place(py, gpu)?;
    let inputs = tensors_on(device, &inputs)?;
    let mut outputs = tensors_on(Device::Cpu, &[number])?;
    outputs.0.extend(tensors_on(device, &rows)?.0);
    detached(py, move || {
        let (inputs, mut outputs) = (inputs, outputs);
        call::lookup(plan, insert, save, &inputs.0, &mut outputs, on_gpu)
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
    let (device, on_gpu) = place(py, gpu)?;
    let mut numbered = tensors_on(Device::Cpu, &[number])?;
    numbered.0.extend(tensors_on(device, &inputs)?.0);
    let outputs = tensors_on(device, &outputs)?;
    detached(py, move || {
        let (inputs, mut outputs) = (numbered, outputs);
        call::push(plan, &inputs.0, keep.map(|k| Box::new(k) as _), &mut outputs, on_gpu)
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
    let (device, on_gpu) = place(py, gpu)?;
    let (inputs, outputs) = (tensors_on(device, &inputs)?, tensors_on(device, &outputs)?);
    detached(py, move || {
        let (inputs, mut outputs) = (inputs, outputs);
        call::commit(optimizer, &inputs.0, &mut outputs, on_gpu)
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
    let (device, on_gpu) = place(py, gpu)?;
    let (inputs, outputs) = (tensors_on(device, &inputs)?, tensors_on(device, &outputs)?);
    detached(py, move || {
        let (inputs, mut outputs) = (inputs, outputs);
        call::apply(optimizer, &inputs.0, &mut outputs, on_gpu)
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(are_at, module)?)?;
    module.add_function(wrap_pyfunction!(pieces_of_rows, module)?)?;
    module.add_function(wrap_pyfunction!(lookup, module)?)?;
    module.add_function(wrap_pyfunction!(push, module)?)?;
    module.add_function(wrap_pyfunction!(commit, module)?)?;
    module.add_function(wrap_pyfunction!(apply, module)?)
}
