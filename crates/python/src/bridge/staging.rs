//! Tables on the host for a model on the GPU, where the framework does not copy tensors: the call copies them and waits.

use sok_core::error::Result;
use sok_core::memory;
use sok_cuda::device::Stream;
use sok_cuda::staging;

use super::size_of;
use crate::call::{DType, Outputs, Tensor, num_elements};

/// Outputs on the host, and their places on the device.
struct Staged<'a> {
    outputs: &'a mut dyn Outputs,
    results: Vec<(*mut u8, Vec<u64>, usize)>,
}

impl Outputs for Staged<'_> {
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<*mut u8> {
        let to = self.outputs.output(index, dtype, dims)?;
        let num_bytes = num_elements(dims) * size_of(dtype);
        let mut room = room_for(num_bytes)?;
        let address = room.as_mut_ptr().cast();
        self.results.push((to, room, num_bytes));
        Ok(address)
    }
}

fn room_for(num_bytes: usize) -> Result<Vec<u64>> {
    memory::filled(0, num_bytes.div_ceil(8).max(1), "tensors on their way between host and GPU")
}

/// Runs a call of the host on copies of tensors from the device.
pub fn run(
    stream: u64,
    tensors: &[Tensor],
    outputs: &mut dyn Outputs,
    call: impl FnOnce(&[Tensor], &mut dyn Outputs) -> Result<()>,
) -> Result<()> {
    let stream = Stream(stream as _);
    staging::wait(stream)?;
    let num_bytes = |t: &Tensor| t.len() * size_of(t.dtype);
    let mut copies = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let mut copy = room_for(num_bytes(tensor))?;
        staging::to_host(&mut copy, tensor.data as u64, num_bytes(tensor))?;
        copies.push(copy);
    }
    let on_host: Vec<Tensor> = tensors
        .iter()
        .zip(&copies)
        .map(|(t, copy)| Tensor { data: copy.as_ptr().cast(), dtype: t.dtype, dims: t.dims.clone() })
        .collect();
    let mut staged = Staged { outputs, results: Vec::new() };
    call(&on_host, &mut staged)?;
    let mut results = staged.results.iter();
    results.try_for_each(|(to, room, bytes)| staging::to_device(*to as u64, room, *bytes, stream))?;
    staging::wait(stream)
}
