//! The type in which rows and gradients travel between ranks.

/// The type of numbers of rows and gradients in messages to other ranks. Tables and sums are float32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowType {
    /// 32 bits. Nothing is rounded.
    #[default]
    Float32,
    /// Rounded to the nearest bfloat16, ties to even.
    Bfloat16,
}

impl RowType {
    /// Number of bytes of a number.
    pub const fn num_bytes(self) -> usize {
        match self {
            RowType::Float32 => 4,
            RowType::Bfloat16 => 2,
        }
    }

    /// Rounds numbers to values that this type can hold.
    pub fn round(self, rows: &mut [f32]) {
        if self == RowType::Bfloat16 {
            rows.iter_mut().for_each(|x| *x = from_bfloat16(to_bfloat16(*x)));
        }
    }
}

/// Rounds to the nearest bfloat16, ties to even. The kernels of GPUs have the same steps.
#[inline(always)]
pub fn to_bfloat16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    // Rounding could carry a NaN over to zero, and cutting could leave infinity. The quiet bit prevents both.
    if bits & 0x7fff_ffff > 0x7f80_0000 { (bits >> 16) as u16 | 0x40 } else { rounded }
}

/// Returns the same number as float32.
#[inline(always)]
pub fn from_bfloat16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_seven_bits_stay_and_others_are_rounded_to_the_nearest() {
        for x in [0.0, -0.0, 1.0, -1.5, 0.0078125, 127.0, f32::INFINITY, f32::NEG_INFINITY, 1e-40] {
            let exact = f32::from_bits(x.to_bits() & 0xffff_0000);
            assert_eq!(from_bfloat16(to_bfloat16(exact)).to_bits(), exact.to_bits());
        }
        // 1 + 2^-8 is half-way between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and 1 + 2^-6: to even.
        let rounded = |x: f32| from_bfloat16(to_bfloat16(x));
        let unit = 1.0 / 256.0;
        assert_eq!(rounded(1.0 + unit), 1.0);
        assert_eq!(rounded(1.0 + 3.0 * unit), 1.0 + 4.0 * unit);
        assert_eq!(rounded(1.0 + unit + f32::EPSILON), 1.0 + 2.0 * unit);
        assert_eq!(rounded(f32::MAX), f32::INFINITY);
    }

    #[test]
    fn a_nan_stays_one() {
        for bits in [0x7fc0_0000, 0x7f80_0001, 0xff80_0001, 0x7fff_ffff] {
            assert!(from_bfloat16(to_bfloat16(f32::from_bits(bits))).is_nan());
        }
    }
}
