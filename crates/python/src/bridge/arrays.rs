//! Calls on arrays of any framework in the memory of a GPU, which Python names by their addresses.

#![allow(unsafe_code)]

use pyo3::prelude::*;
use sok_core::contract::tensor::{DType, Memory, StreamHandle, Tensor};
use sok_core::error::{Error, Result};

use crate::call;
use crate::error::detached;

/// Address, dtype and shape of an array of integers.
type Array = (usize, String, Vec<i64>);

fn tensor_of((address, dtype, dims): Array) -> Result<Tensor> {
    let dtype = match &*dtype {
        "int32" => DType::I32,
        "uint32" => DType::U32,
        "int64" => DType::I64,
        "uint64" => DType::U64,
        _ => return Err(Error::argument(format!("ids must be integers. Received: {dtype}"))),
    };
    // SAFETY: Python gives the address of an array of its framework, and keeps the array.
    Ok(unsafe { Tensor::new(std::ptr::with_exposed_provenance(address), dtype, dims, Memory::Device) })
}

/// Tells the ids of a later training lookup, see [`call::prefetch`]. `keep`: holds the arrays. `stream`: on which they are ready; None if
/// they are.
#[pyfunction]
#[pyo3(signature = (plan, arrays, keep, stream))]
pub fn prefetch(
    py: Python<'_>,
    plan: i64,
    arrays: Vec<Array>,
    keep: Py<PyAny>,
    stream: Option<u64>,
) -> PyResult<()> {
    detached(py, || {
        let tensors = arrays.into_iter().map(tensor_of).collect::<Result<Vec<_>>>()?;
        // SAFETY: A stream of the framework that has the arrays.
        let stream = stream.map(|stream| unsafe { StreamHandle::new(stream) });
        call::prefetch(plan, &tensors, Box::new(keep), stream)
    })
}
