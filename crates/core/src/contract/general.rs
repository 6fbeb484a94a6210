//! The update of an optimizer without a formula: its own code makes the step on arrays of the framework.
//!
//! All rows that a step is to change, of all tables of the optimizer, are one long row of floats. It is cut into pieces of equal size,
//! wherever that cuts: each element of a row is updated by itself. `gather` writes a piece, the optimizer computes on it, `scatter` takes
//! the new values. On the host the records change in the apply, when all pieces have come; a device writes each piece to them at once.

use crate::contract::binding::Binding;
use crate::contract::tensor::{StreamHandle, Tensor, TensorMut};
use crate::error::{Error, Result};

/// Asks for a piece. Places beyond the last row get zeros, and the first values of states.
pub struct Gather<'a> {
    /// The binding of each group.
    pub bindings: &'a [Binding],
    /// The same as in the apply.
    pub scalars: &'a Tensor,
    /// int32 `(1,)`: number of the piece, from 1. 0: none, all places are beyond the last row.
    pub piece: &'a Tensor,
    /// Receive the merged gradients, after factor and clipping; the rows, after weight decay; and each state. float32 `(size,)`.
    pub to: Vec<TensorMut>,
    /// The stream on which the tensors are ready.
    pub stream: StreamHandle,
}

/// Brings the new values of a piece.
pub struct Scatter<'a> {
    /// The binding of each group.
    pub bindings: &'a [Binding],
    /// int32 `(1,)`: number of the piece.
    pub piece: &'a Tensor,
    /// The rows, then each state. float32 `(size,)`.
    pub from: Vec<&'a Tensor>,
    /// Receives the number of the next piece, int32 `(1,)`. 0: this was the last one.
    pub next: TensorMut,
    /// The stream on which the tensors are ready.
    pub stream: StreamHandle,
}

/// Reads the number of a piece from host memory.
///
/// # Errors
/// [`Error::Argument`] unless it is one number and not negative.
pub fn piece_number(piece: &Tensor) -> Result<usize> {
    match piece.slice::<i32>()? {
        &[number] if number >= 0 => Ok(number as usize),
        other => Err(Error::argument(format!("a piece has a number from 0 on. Received: {other:?}"))),
    }
}
