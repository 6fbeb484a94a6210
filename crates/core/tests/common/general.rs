//! An optimizer without a formula, as a framework would run it: pieces are gathered, computed and scattered.

use sok_core::contract::binding::Binding;
use sok_core::contract::general::{Gather, Scatter};
use sok_core::contract::group::Group;
use sok_core::contract::tensor::{DType, Element, Memory, StreamHandle, Tensor, TensorMut};
use sok_core::error::Result;
use sok_core::formula::{General, GeneralState, Rule};

use super::record_step::step_element;

pub const NUM_STATES: usize = 2;

/// Its step of an element is [`step_element`].
pub const GENERAL: Rule = Rule::General(General {
    class: "tests>General",
    states: &[GeneralState { name: "momentum", initial: 0.25 }, GeneralState { name: "sum", initial: 0.0 }],
});

/// All rules of the core, and one that it has no formula for.
pub fn rules() -> Vec<Rule> {
    let mut rules = Rule::variants();
    rules.push(GENERAL);
    rules
}

/// The optimizer's step on a piece. `arrays`: gradients, rows, and each state.
pub fn step_piece(arrays: &mut [Vec<f32>], learning_rate: f32) {
    let [gradients, rows, momenta, sums] = arrays else { panic!("a piece has four arrays") };
    for (i, gradient) in gradients.iter().enumerate() {
        step_element(&mut rows[i], [&mut momenta[i], &mut sums[i]], *gradient, learning_rate);
    }
}

#[allow(unsafe_code)]
fn tensor<T: Element>(values: &[T], dtype: DType) -> Tensor {
    // SAFETY: the callers keep the values until the call returns.
    unsafe { Tensor::new(values.as_ptr().cast(), dtype, vec![values.len() as i64], Memory::Host) }
}

#[allow(unsafe_code)]
fn tensor_mut<T: Element>(values: &mut [T], dtype: DType) -> TensorMut {
    let dims = [values.len() as i64];
    // SAFETY: the callers keep the values until the call returns, and do not use them meanwhile.
    unsafe { TensorMut::new(values.as_mut_ptr().cast(), dtype, &dims, Memory::Host) }
}

/// Computes the new values of all rows of a group on the host. `size`: floats of a piece.
pub fn update_pieces(group: &mut dyn Group, binding: &Binding, scalars: &[f32], size: usize) -> Result<()> {
    let (bindings, stream) = ([binding.clone()], StreamHandle::NONE);
    let mut number = [1i32];
    while number[0] > 0 {
        let mut arrays = vec![vec![f32::NAN; size]; 2 + NUM_STATES];
        let (of_scalars, piece) = (tensor(scalars, DType::F32), tensor(&number, DType::I32));
        let to = arrays.iter_mut().map(|array| tensor_mut(array, DType::F32)).collect();
        group.gather(
            Vec::new(),
            Gather { bindings: &bindings, scalars: &of_scalars, piece: &piece, to, stream },
        )?;
        step_piece(&mut arrays, scalars[0]);
        let mut next = [-1i32];
        let from: Vec<Tensor> = arrays[1..].iter().map(|array| tensor(array, DType::F32)).collect();
        let scatter = Scatter {
            bindings: &bindings,
            piece: &piece,
            from: from.iter().collect(),
            next: tensor_mut(&mut next, DType::I32),
            stream,
        };
        group.scatter(Vec::new(), scatter)?;
        number = next;
    }
    Ok(())
}
