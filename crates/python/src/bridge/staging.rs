//! Tables on the host for a model on the GPU, where the framework does not copy tensors: the call copies them and waits.

use sok_core::contract::tensor::{DType, Memory, StreamHandle, Tensor, TensorMut, num_elements};
use sok_core::error::Result;
use sok_core::memory;
use sok_cuda::staging;

use crate::call::Outputs;

/// Outputs on the host, and their places on the device.
struct Staged<'a> {
    outputs: &'a mut dyn Outputs,
    results: Vec<(TensorMut, Vec<u64>)>,
}

impl Outputs for Staged<'_> {
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<TensorMut> {
        let to = self.outputs.output(index, dtype, dims)?;
        let mut room = room_for(num_elements(dims) * dtype.size())?;
        let address = room.as_mut_ptr().cast();
        self.results.push((to, room));
        // SAFETY: there is room for so many, which nobody else uses until it is copied to the device.
        Ok(unsafe { TensorMut::new(address, dtype, dims, Memory::Host) })
    }
}

fn room_for(num_bytes: usize) -> Result<Vec<u64>> {
    memory::filled(0, num_bytes.div_ceil(8).max(1), "tensors on their way between host and GPU")
}

/// Runs a call of the host on copies of tensors from the device.
pub fn run(
    stream: StreamHandle,
    tensors: &[Tensor],
    outputs: &mut dyn Outputs,
    call: impl FnOnce(&[Tensor], &mut dyn Outputs) -> Result<()>,
) -> Result<()> {
    staging::wait(stream)?;
    let mut copies = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let mut copy = room_for(tensor.num_bytes())?;
        staging::to_host(&mut copy, tensor)?;
        copies.push(copy);
    }
    let on_host = |(tensor, copy): (&Tensor, &Vec<u64>)| {
        let dims = tensor.dims().to_vec();
        // SAFETY: as many bytes as the tensor has, which live until the call returns.
        unsafe { Tensor::new(copy.as_ptr().cast(), tensor.dtype(), dims, Memory::Host) }
    };
    let on_host: Vec<Tensor> = tensors.iter().zip(&copies).map(on_host).collect();
    let mut staged = Staged { outputs, results: Vec::new() };
    call(&on_host, &mut staged)?;
    staged.results.iter().try_for_each(|(to, room)| staging::to_device(to, room, stream))
}
