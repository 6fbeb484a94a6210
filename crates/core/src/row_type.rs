//! The types of the numbers of rows: in tables, and in messages between ranks. Arithmetic is float32 in any case.
#![allow(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::simd::{narrow_to_halves, widen_halves};

/// The type of the numbers of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u32)]
pub enum RowType {
    /// 32 bits. Nothing is rounded.
    #[default]
    Float32 = 0,
    /// IEEE's 16 bits: 10 bits of a fraction, up to 65,504.
    Float16 = 1,
    /// The upper 16 bits of a float32: 7 bits of a fraction.
    Bfloat16 = 2,
}

/// Runs an expression with a name for the [`Number`] of a row type.
macro_rules! with_number {
    ($row_type:expr, $N:ident => $body:expr) => {
        match $row_type {
            $crate::row_type::RowType::Float32 => {
                type $N = f32;
                $body
            }
            $crate::row_type::RowType::Float16 => {
                type $N = $crate::row_type::Float16;
                $body
            }
            $crate::row_type::RowType::Bfloat16 => {
                type $N = $crate::row_type::Bfloat16;
                $body
            }
        }
    };
}
pub(crate) use with_number;

impl RowType {
    /// All types.
    pub const ALL: [RowType; 3] = [RowType::Float32, RowType::Float16, RowType::Bfloat16];

    /// Number of bytes of a number.
    pub const fn num_bytes(self) -> usize {
        match self {
            RowType::Float32 => 4,
            RowType::Float16 | RowType::Bfloat16 => 2,
        }
    }

    /// Returns its name, as NumPy and Keras have it.
    pub const fn name(self) -> &'static str {
        match self {
            RowType::Float32 => "float32",
            RowType::Float16 => "float16",
            RowType::Bfloat16 => "bfloat16",
        }
    }

    /// Writes numbers as bytes of this type, little-endian, each rounded to the nearest.
    pub fn write(self, row: &[f32], to: &mut [u8]) {
        match self {
            RowType::Float32 => {
                row.iter().zip(to.as_chunks_mut().0).for_each(|(x, to)| *to = x.to_le_bytes());
            }
            RowType::Float16 => write_halves(row, to, |x| Float16::from_f32(x).0),
            RowType::Bfloat16 => write_halves(row, to, |x| Bfloat16::from_f32(x).0),
        }
    }

    /// Reads numbers from bytes of this type.
    pub fn read(self, bytes: &[u8], row: &mut [f32]) {
        match self {
            RowType::Float32 => {
                row.iter_mut()
                    .zip(bytes.as_chunks().0)
                    .for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
            }
            RowType::Float16 => read_halves(bytes, row, |bits| Float16(bits).to_f32()),
            RowType::Bfloat16 => read_halves(bytes, row, |bits| Bfloat16(bits).to_f32()),
        }
    }

    /// Rounds numbers to the nearest ones of this type.
    pub fn round(self, row: &mut [f32]) {
        with_number!(self, N => row.iter_mut().for_each(|x| *x = N::from_f32(*x).to_f32()));
    }
}

fn write_halves(row: &[f32], to: &mut [u8], bits: impl Fn(f32) -> u16) {
    row.iter().zip(to.as_chunks_mut().0).for_each(|(x, to)| *to = bits(*x).to_le_bytes());
}

fn read_halves(bytes: &[u8], row: &mut [f32], number: impl Fn(u16) -> f32) {
    row.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, bytes)| *x = number(u16::from_le_bytes(*bytes)));
}

/// A number of a row.
pub trait Number: Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    /// Its type.
    const ROW_TYPE: RowType;

    /// Returns the same number as float32.
    fn to_f32(self) -> f32;

    /// Calls `with` with a row in float32, which is not copied if it is that already.
    #[inline(always)]
    fn with_f32<const D: usize>(row: &[Self; D], with: impl FnOnce(&[f32; D])) {
        with(&Self::widened(row));
    }

    /// Returns a row in float32.
    #[inline(always)]
    fn widened<const D: usize>(row: &[Self; D]) -> [f32; D] {
        std::array::from_fn(|k| row[k].to_f32())
    }

    /// Reads numbers as float32.
    #[inline(always)]
    fn widen(row: &[Self], to: &mut [f32]) {
        to.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_f32());
    }

    /// Writes numbers, each rounded as by `from_f32`.
    #[inline(always)]
    fn narrow(row: &[f32], to: &mut [Self]) {
        to.iter_mut().zip(row).for_each(|(to, x)| *to = Self::from_f32(*x));
    }

    /// Rounds to the nearest, ties to even.
    fn from_f32(x: f32) -> Self;

    /// Rounds to one of the two nearest, up with a probability in proportion to the distance from the lower one. `draw`: 16 random bits.
    fn from_f32_by_chance(x: f32, draw: u16) -> Self;
}

impl Number for f32 {
    const ROW_TYPE: RowType = RowType::Float32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn with_f32<const D: usize>(row: &[f32; D], with: impl FnOnce(&[f32; D])) {
        with(row);
    }

    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn from_f32_by_chance(x: f32, _draw: u16) -> f32 {
        x
    }
}

/// The bits of a number that is not finite begin here.
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 0x8000_0000;

const BFLOAT16_NAN: u16 = 0x7fff;

/// The bits of a bfloat16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bfloat16(pub u16);

impl Number for Bfloat16 {
    const ROW_TYPE: RowType = RowType::Bfloat16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    // The kernels of GPUs have the same steps, here and below.
    #[inline(always)]
    fn from_f32(x: f32) -> Bfloat16 {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        // Rounding could carry a NaN over to zero. So every NaN becomes the same one, as on a GPU.
        Bfloat16(if bits & !SIGN > INFINITY { BFLOAT16_NAN } else { rounded })
    }

    #[inline(always)]
    fn from_f32_by_chance(x: f32, draw: u16) -> Bfloat16 {
        let bits = x.to_bits();
        if bits & !SIGN >= INFINITY {
            return Bfloat16::from_f32(x);
        }
        Bfloat16((bits.wrapping_add(u32::from(draw)) >> 16) as u16)
    }
}

/// The bits of a float16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Float16(pub u16);

/// Bits of a float32 that a float16 has not.
const CUT_BITS: u32 = 13;
/// What the exponents of both types differ by.
const EXPONENTS: u32 = 127 - 15;
/// Float32 bits of the smallest normal float16, 2^-14. Smaller ones are multiples of 2^-24.
const SMALLEST_NORMAL: u32 = (EXPONENTS + 1) << 23;
/// Float32 bits of 2^16, beyond the largest float16.
const TOO_LARGE: u32 = (EXPONENTS + 31) << 23;
const FLOAT16_INFINITY: u32 = 0x7c00;
const FLOAT16_NAN: u32 = 0x7fff;

impl Float16 {
    /// Puts a sign, and the bits of a magnitude below [`TOO_LARGE`], together. `magnitude`: float32 bits of x without its sign.
    #[inline(always)]
    fn with_sign(x: f32, magnitude: u32, bits: u32) -> Float16 {
        let bits = if magnitude >= TOO_LARGE { FLOAT16_INFINITY } else { bits };
        let bits = if magnitude > INFINITY { FLOAT16_NAN } else { bits };
        Float16(((x.to_bits() & SIGN) >> 16 | bits) as u16)
    }
}

#[inline(always)]
fn bits_of(row: &[Float16]) -> &[u16] {
    // SAFETY: `Float16` is transparent.
    unsafe { std::slice::from_raw_parts(row.as_ptr().cast(), row.len()) }
}

#[inline(always)]
fn bits_of_mut(row: &mut [Float16]) -> &mut [u16] {
    // SAFETY: as above, and all bits are values.
    unsafe { std::slice::from_raw_parts_mut(row.as_mut_ptr().cast(), row.len()) }
}

// Nothing here reads or makes a subnormal float32, which some frameworks' threads take for zero. F16C does not heed their mode.
impl Number for Float16 {
    const ROW_TYPE: RowType = RowType::Float16;

    #[inline(always)]
    fn widened<const D: usize>(row: &[Float16; D]) -> [f32; D] {
        let mut floats = [0.0; D];
        Float16::widen(row, &mut floats);
        floats
    }

    #[inline(always)]
    fn widen(row: &[Float16], to: &mut [f32]) {
        let done = widen_halves(bits_of(row), to);
        to[done..].iter_mut().zip(&row[done..]).for_each(|(to, x)| *to = x.to_f32());
    }

    #[inline(always)]
    fn narrow(row: &[f32], to: &mut [Float16]) {
        let done = narrow_to_halves(row, bits_of_mut(to));
        to[done..].iter_mut().zip(&row[done..]).for_each(|(to, x)| *to = Float16::from_f32(*x));
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        let (sign, magnitude) = (u32::from(self.0 & 0x8000) << 16, u32::from(self.0 & 0x7fff));
        let normal = (magnitude << CUT_BITS) + (EXPONENTS << 23);
        let small = f32::from_bits((magnitude << CUT_BITS) + SMALLEST_NORMAL);
        let small = (small - f32::from_bits(SMALLEST_NORMAL)).to_bits();
        let other = INFINITY | magnitude << CUT_BITS;
        let bits = if magnitude < 1 << 10 { small } else { normal };
        f32::from_bits(sign | if magnitude >= FLOAT16_INFINITY { other } else { bits })
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Float16 {
        let magnitude = x.to_bits() & !SIGN;
        // The last bit of one half is 2^-24, so this sum is rounded to a multiple of it.
        let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let even = (1 << (CUT_BITS - 1)) - 1 + (magnitude >> CUT_BITS & 1);
        let normal = (magnitude.wrapping_add(even) >> CUT_BITS).wrapping_sub(EXPONENTS << 10);
        let bits = if magnitude < SMALLEST_NORMAL { small } else { normal };
        Float16::with_sign(x, magnitude, bits)
    }

    #[inline(always)]
    fn from_f32_by_chance(x: f32, draw: u16) -> Float16 {
        let magnitude = x.to_bits() & !SIGN;
        let draw = u32::from(draw) >> (16 - CUT_BITS);
        // Both terms are multiples of 2^-13 / 2^10 at least, and below 2^10 + 1: their sum is cut to a whole number.
        let small =
            (f32::from_bits(magnitude) * 16_777_216.0 + draw as i32 as f32 * (1.0 / 8192.0)) as i32 as u32;
        let normal = (magnitude.wrapping_add(draw) >> CUT_BITS).wrapping_sub(EXPONENTS << 10);
        let bits = if magnitude < SMALLEST_NORMAL { small } else { normal };
        Float16::with_sign(x, magnitude, bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All float16 that are finite and not negative, ascending, as float64.
    fn all_float16() -> Vec<f64> {
        let value = |bits: u16| {
            let (exponent, fraction) = (i32::from(bits >> 10), f64::from(bits & 0x3ff));
            if exponent == 0 {
                fraction * 2f64.powi(-24)
            } else {
                (1024.0 + fraction) * 2f64.powi(exponent - 25)
            }
        };
        (0..0x7c00).map(value).collect()
    }

    #[test]
    fn each_float16_is_the_number_that_ieee_says() {
        for (bits, expected) in (0u16..).zip(all_float16()) {
            for (bits, expected) in [(bits, expected), (bits | 0x8000, -expected)] {
                let x = Float16(bits).to_f32();
                assert_eq!((f64::from(x), x.is_sign_negative()), (expected, bits >= 0x8000), "{bits:x}");
                assert_eq!(Float16::from_f32(x), Float16(bits));
                for draw in [0, 1, u16::MAX] {
                    assert_eq!(Float16::from_f32_by_chance(x, draw), Float16(bits), "{bits:x}");
                }
            }
        }
        assert_eq!(Float16(0x7c00).to_f32(), f32::INFINITY);
        assert!(Float16(0x7e00).to_f32().is_nan() && Float16(0xfc01).to_f32().is_nan());
    }

    #[test]
    fn between_two_float16_the_nearer_one_is_taken_and_the_even_one_of_two() {
        let all = all_float16();
        for (bits, pair) in (0u16..).zip(all.windows(2)) {
            let middle = ((pair[0] + pair[1]) / 2.0) as f32;
            let (below, above) = (f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1));
            let even = bits + (bits & 1);
            let rounded = [below, middle, above].map(|x| Float16::from_f32(x).0);
            assert_eq!(rounded, [bits, even, bits + 1], "{bits:x}");
        }
        for (x, expected) in [(65_519.0, 0x7bff), (65_520.0, 0x7c00), (1e30, 0x7c00), (f32::INFINITY, 0x7c00)]
        {
            assert_eq!((Float16::from_f32(x).0, Float16::from_f32(-x).0), (expected, expected | 0x8000));
        }
        assert_eq!(Float16::from_f32(1e-30), Float16(0));
    }

    /// By F16C where the processor has it.
    #[test]
    fn rows_are_converted_as_their_numbers_are() {
        let halves: Vec<Float16> = (0..=u16::MAX).map(Float16).collect();
        let mut floats = vec![0.0; halves.len()];
        for len in [halves.len(), 1003, 7] {
            Float16::widen(&halves[..len], &mut floats[..len]);
            for (x, half) in floats[..len].iter().zip(&halves) {
                assert!(
                    x.to_bits() == half.to_f32().to_bits() || x.is_nan() && half.to_f32().is_nan(),
                    "{half:?}"
                );
            }
        }
        let some = |i: u32| f32::from_bits(i.wrapping_mul(2_654_435_761));
        let near = halves.windows(2).map(|pair| (pair[0].to_f32() + pair[1].to_f32()) / 2.0);
        let floats: Vec<f32> =
            (0..300_003).map(some).chain(near).chain([f32::NAN, 1e-40, -1e-40, 65_520.0]).collect();
        let mut rounded = vec![Float16(0); floats.len()];
        Float16::narrow(&floats, &mut rounded);
        for (x, half) in floats.iter().zip(&rounded) {
            assert_eq!(*half, Float16::from_f32(*x), "{x} {:x}", x.to_bits());
        }
        assert_eq!(Float16::widened(&[Float16(0x3c00); 11]), [1.0; 11]);
    }

    #[test]
    fn bfloat16_are_rounded_to_the_nearest() {
        for x in [0.0, -0.0, 1.0, -1.5, 0.0078125, 127.0, f32::INFINITY, f32::NEG_INFINITY, 1e-40] {
            let exact = f32::from_bits(x.to_bits() & 0xffff_0000);
            assert_eq!(Bfloat16::from_f32(exact).to_f32().to_bits(), exact.to_bits());
        }
        // 1 + 2^-8 is half-way between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and 1 + 2^-6: to even.
        let rounded = |x: f32| Bfloat16::from_f32(x).to_f32();
        let unit = 1.0 / 256.0;
        assert_eq!(rounded(1.0 + unit), 1.0);
        assert_eq!(rounded(1.0 + 3.0 * unit), 1.0 + 4.0 * unit);
        assert_eq!(rounded(1.0 + unit + f32::EPSILON), 1.0 + 2.0 * unit);
        assert_eq!(rounded(f32::MAX), f32::INFINITY);
    }

    #[test]
    fn a_nan_stays_one() {
        for bits in [0x7fc0_0000, 0x7f80_0001, 0xff80_0001, 0x7fff_ffff] {
            let x = f32::from_bits(bits);
            for row_type in RowType::ALL {
                with_number!(row_type, N => {
                    assert!(N::from_f32(x).to_f32().is_nan());
                    assert!(N::from_f32_by_chance(x, 7).to_f32().is_nan());
                });
            }
        }
    }

    /// The mean of a number that is rounded with every draw.
    fn mean<N: Number>(x: f32) -> f64 {
        let rounded = (0..=u16::MAX).map(|draw| f64::from(N::from_f32_by_chance(x, draw).to_f32()));
        rounded.sum::<f64>() / 65_536.0
    }

    #[test]
    fn the_mean_of_rounding_by_chance_is_the_number() {
        for x in [1.0f32, 1.2345, -0.001_234, 6e-5, 3.1e-7, -5.9e-8, 1e-9, 60_000.5] {
            // Float16 has 13 bits of chance, beside what a smaller number loses.
            let error = f64::from(x.abs()) * 2f64.powi(-23) + 2f64.powi(-24 - 13);
            assert!((mean::<Float16>(x) - f64::from(x)).abs() <= error, "{x} {}", mean::<Float16>(x));
            assert!((mean::<Bfloat16>(x) - f64::from(x)).abs() <= error, "{x} {}", mean::<Bfloat16>(x));
        }
        assert_eq!(Float16::from_f32_by_chance(65_535.0, 0), Float16(0x7bff));
        assert_eq!(Float16::from_f32_by_chance(65_535.0, u16::MAX), Float16(0x7c00));
        assert_eq!(Float16::from_f32_by_chance(70_000.0, 0), Float16(0x7c00));
    }
}
