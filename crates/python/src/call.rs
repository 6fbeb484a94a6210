//! The four calls of a training step as every bridge makes them: flat lists of tensors in, flat lists out.
//!
//! A *plan* says once, when a model is traced, what the tensors of a layer's call are; an *optimizer* says which layers
//! are updated together. Both are handles in a process-wide registry, so that a framework's op carries one integer.
//! Nothing here copies ids or rows, waits for the GIL or knows a framework.

use std::any::Any;

use sok_core::error::Result;

/// Element types that cross the border.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    I32,
    I64,
    U32,
    U64,
    F32,
}

/// A framework's tensor: dense, row-major, readable for the length of the call (longer, if a [`Keep`] goes with it).
#[derive(Clone, Debug)]
pub struct Tensor {
    pub data: *const u8,
    pub dtype: DType,
    pub dims: Vec<i64>,
}

/// Where results go. TensorFlow allocates when asked; XLA and PyTorch have allocated already and check the shape.
pub trait Outputs {
    /// Memory for output `index` with these dims, row-major; written by nobody else until the call returns.
    ///
    /// # Errors
    /// If the framework has no memory, or had prepared another shape.
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<*mut u8>;
}

/// Keeps a framework's gradient tensors readable until it is dropped, which any thread may do.
pub type Keep = Box<dyn Any + Send + Sync>;

/// Tensors in: for each feature of the plan its ids (two int32 tensors for low and high words), then row splits, then
/// weights, each only if the plan says so. `trigger` takes part for its data dependency alone; a bridge passes it on to
/// nobody.
///
/// Tensors out: 0 is the lookup's number as int32 `(2,)` (low word, high word), for `push`; then the rows of each feature.
///
/// `insert`: keys without a row get one. `save`: keep what `push` needs.
pub fn lookup(plan: i64, insert: bool, save: bool, inputs: &[Tensor], outputs: &mut dyn Outputs) -> Result<()> {
    todo!("{plan} {insert} {save} {} {}", inputs.len(), outputs as *mut _ as *mut u8 as usize)
}

/// Tensors in: the lookup's number, the output gradient of each feature, then the weights of each feature that has them
/// (for their shape). Tensors out: 0 is the ticket, float32 `(64, 2)`; then the gradient of each feature's weights.
///
/// With `keep` the gradients are held until they are applied; without, they are merged into the core's own memory now.
pub fn push(plan: i64, inputs: &[Tensor], keep: Option<Keep>, outputs: &mut dyn Outputs) -> Result<()> {
    todo!("{plan} {} {} {}", inputs.len(), keep.is_some(), outputs as *mut _ as *mut u8 as usize)
}

/// Tensors in: `is_update` float32 `(1,)` (0: the gradients are only accumulated), then a ticket for each layer of the
/// optimizer. Tensors out: 0 is the squared norm of all merged gradients, accumulated ones included, float32 `()`; 0 if
/// nothing asks for norms.
pub fn commit(optimizer: i64, inputs: &[Tensor], outputs: &mut dyn Outputs) -> Result<()> {
    todo!("{optimizer} {} {}", inputs.len(), outputs as *mut _ as *mut u8 as usize)
}

/// Tensors in: scalars float32 `(4,)` = learning rate, step (1-based), is_update, factor; what `commit` gave, for its data
/// dependency; a trigger `(64, 2)` for each layer. Tensors out: the new trigger of each layer.
pub fn apply(optimizer: i64, inputs: &[Tensor], outputs: &mut dyn Outputs) -> Result<()> {
    todo!("{optimizer} {} {}", inputs.len(), outputs as *mut _ as *mut u8 as usize)
}
