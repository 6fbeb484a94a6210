//! Rows and gradients in a framework's arrays. Tables on the host compute in float32, so those of 16 bits are converted.

use crate::contract::gradients::{GradientRows, Keep};
use crate::contract::tensor::{DType, Element, Tensor, TensorMut};
use crate::error::{Error, Result};
use crate::memory;
use crate::pool::Pool;
use crate::row_type::{Bfloat16, Float16, Number};

/// Numbers that a thread converts at a time.
const PIECE: usize = 1 << 16;

/// Calls `with` with the rows of outputs as float32. Rows of 16 bits are then rounded to the nearest.
///
/// # Errors
/// That of `with`; [`Error::Argument`] if an output is of integers, [`Error::Memory`] without enough memory.
pub fn with_float_rows<R>(
    outputs: &mut [TensorMut],
    pool: &Pool,
    with: impl FnOnce(Vec<&mut [f32]>) -> Result<R>,
) -> Result<R> {
    let mut wide = Vec::with_capacity(outputs.len());
    for output in &*outputs {
        wide.push(room_for(output.dtype(), output.num_bytes() / output.dtype().size())?);
    }
    let rows = outputs.iter_mut().zip(&mut wide).map(|(output, wide)| match output.dtype() {
        DType::F32 => output.slice_mut(),
        _ => Ok(&mut wide[..]),
    });
    let result = with(rows.collect::<Result<_>>()?)?;
    for (output, wide) in outputs.iter_mut().zip(&wide) {
        match output.dtype() {
            DType::F16 => narrow::<Float16>(wide, output, pool)?,
            DType::BF16 => narrow::<Bfloat16>(wide, output, pool)?,
            _ => {}
        }
    }
    Ok(result)
}

/// Gradients of a push as float32.
pub struct FloatGradients {
    /// By feature.
    pub rows: Vec<GradientRows>,
    /// What keeps the gradients readable after the push, if the framework has given that.
    pub keep: Option<Keep>,
    /// The float32 copies that `rows` points to. Empty if `keep` owns them.
    pub wide: Vec<Vec<f32>>,
}

impl FloatGradients {
    /// Converts the gradients of a push. `keep`: what keeps them readable.
    ///
    /// # Errors
    /// [`Error::Argument`] if a gradient is of integers, [`Error::Memory`] without enough memory.
    pub fn of(gradients: &[&Tensor], keep: Option<Keep>, pool: &Pool) -> Result<FloatGradients> {
        let (mut rows, mut all_wide) = (Vec::with_capacity(gradients.len()), Vec::new());
        for gradient in gradients {
            let mut wide = room_for(gradient.dtype(), gradient.len())?;
            match gradient.dtype() {
                DType::F16 => widen::<Float16>(gradient, &mut wide, pool)?,
                DType::BF16 => widen::<Bfloat16>(gradient, &mut wide, pool)?,
                _ => {
                    rows.push(gradient.gradient_rows()?);
                    continue;
                }
            }
            rows.push(lent(&wide));
            all_wide.push(wide);
        }
        let keep: Option<Keep> = match keep {
            // All gradients were copied: the arrays of the framework may go now.
            Some(_) if all_wide.len() == rows.len() => Some(Box::new(std::mem::take(&mut all_wide))),
            Some(keep) if !all_wide.is_empty() => Some(Box::new((keep, std::mem::take(&mut all_wide)))),
            keep => keep,
        };
        Ok(FloatGradients { rows, keep, wide: all_wide })
    }
}

#[allow(unsafe_code)]
fn lent(wide: &[f32]) -> GradientRows {
    // SAFETY: `FloatGradients` has the floats until the push returns, or its `Keep` has them.
    unsafe { GradientRows::new(wide.as_ptr(), wide.len()) }
}

/// Memory for numbers of an array in float32; none if they are that already.
fn room_for(dtype: DType, len: usize) -> Result<Vec<f32>> {
    match dtype {
        DType::F32 => Ok(Vec::new()),
        DType::F16 | DType::BF16 => memory::filled(0.0, len, "rows or gradients in float32"),
        other => Err(Error::argument(format!("rows must be floats. Received: {}", other.name()))),
    }
}

fn narrow<N: Number + Element>(wide: &[f32], output: &mut TensorMut, pool: &Pool) -> Result<()> {
    let pieces = wide.chunks(PIECE).zip(output.slice_mut::<N>()?.chunks_mut(PIECE)).collect();
    pool.run(pieces, |(from, to)| N::narrow(from, to));
    Ok(())
}

fn widen<N: Number + Element>(gradient: &Tensor, wide: &mut [f32], pool: &Pool) -> Result<()> {
    let pieces = gradient.slice::<N>()?.chunks(PIECE).zip(wide.chunks_mut(PIECE)).collect();
    pool.run(pieces, |(from, to)| N::widen(from, to));
    Ok(())
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::contract::tensor::Memory;
    use crate::row_type::RowType;

    fn tensor<T: Element>(numbers: &[T]) -> Tensor {
        let dims = vec![numbers.len() as i64];
        // SAFETY: the tests keep the numbers until they drop the tensor.
        unsafe { Tensor::new(numbers.as_ptr().cast(), T::DTYPE, dims, Memory::Host) }
    }

    fn output<T: Element>(numbers: &mut [T]) -> TensorMut {
        let dims = [numbers.len() as i64];
        // SAFETY: as above.
        unsafe { TensorMut::new(numbers.as_mut_ptr().cast(), T::DTYPE, &dims, Memory::Host) }
    }

    /// Enough for several pieces.
    fn numbers() -> Vec<f32> {
        (0..PIECE as i32 + 100).map(|i| (i - 1000) as f32 * 0.37).collect()
    }

    #[test]
    fn rows_are_rounded_to_the_type_of_their_array() {
        let (pool, rows) = (Pool::new(2).unwrap(), numbers());
        let (mut wide, mut half, mut brief) =
            (vec![0f32; rows.len()], vec![Float16(1); rows.len()], vec![Bfloat16(1); rows.len()]);
        let mut outputs = [output(&mut wide), output(&mut half), output(&mut brief)];
        let write = |all: Vec<&mut [f32]>| {
            all.into_iter().for_each(|to| to.copy_from_slice(&rows));
            Ok(7)
        };
        assert_eq!(with_float_rows(&mut outputs, &pool, write).unwrap(), 7);
        assert_eq!(wide, rows);
        for (i, x) in rows.iter().enumerate() {
            assert_eq!((half[i], brief[i]), (Float16::from_f32(*x), Bfloat16::from_f32(*x)));
        }
    }

    #[test]
    fn a_call_that_fails_writes_no_rows() {
        let mut brief = vec![Bfloat16(9); 3];
        let failed = with_float_rows(&mut [output(&mut brief)], &Pool::new(1).unwrap(), |mut rows| {
            rows[0].fill(1.0);
            Err::<(), _>(Error::argument("no"))
        });
        assert_eq!((failed.unwrap_err().to_string().as_str(), brief), ("no", vec![Bfloat16(9); 3]));
        let mut ids = [1i32];
        let of_integers = with_float_rows(&mut [output(&mut ids)], &Pool::new(1).unwrap(), |_| Ok(()));
        assert_eq!(of_integers.unwrap_err().to_string(), "rows must be floats. Received: int32");
    }

    #[test]
    fn gradients_live_as_long_as_what_keeps_them() {
        let (pool, given) = (Pool::new(2).unwrap(), numbers());
        let half: Vec<Float16> = given.iter().map(|x| Float16::from_f32(*x)).collect();
        let tensors = [&tensor(&given), &tensor(&half)];
        let mut rounded = given.clone();
        RowType::Float16.round(&mut rounded);
        for keeps in [true, false] {
            let held = Arc::new(());
            let keep = keeps.then(|| Box::new(held.clone()) as Keep);
            let FloatGradients { rows, keep, wide } = FloatGradients::of(&tensors, keep, &pool).unwrap();
            assert_eq!((rows[0].get(), rows[1].get()), (&given[..], &rounded[..]));
            assert_eq!((keep.is_some(), wide.len()), (keeps, usize::from(!keeps)));
            drop(keep);
            assert_eq!(Arc::strong_count(&held), 1);
        }
        let ids = [1i64];
        let of_integers = FloatGradients::of(&[&tensor(&ids)], None, &pool).err().unwrap();
        assert_eq!(of_integers.to_string(), "rows must be floats. Received: int64");
    }
}
