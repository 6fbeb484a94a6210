//! A sum that does not depend on the order of its terms: norms are then the same whatever the threads, slots or device.

/// Sum of float32 numbers that are not negative: their mantissas as integers, one total an exponent. Exact for 2^40 terms.
#[derive(Clone)]
pub struct ExactSum {
    totals: Box<[u64; 256]>,
}

impl Default for ExactSum {
    fn default() -> Self {
        ExactSum { totals: Box::new([0; 256]) }
    }
}

impl ExactSum {
    #[inline]
    pub fn add(&mut self, term: f32) {
        let bits = term.to_bits() & 0x7fff_ffff;
        let exponent = (bits >> 23) as usize;
        let hidden = u32::from(exponent > 0) << 23;
        // Infinity and NaN have an exponent of their own, 255, and at least the hidden bit.
        self.totals[exponent] += u64::from(bits & 0x7f_ffff | hidden);
    }

    pub fn merge(&mut self, other: &ExactSum) {
        self.add_totals(other.totals());
    }

    /// The totals, by exponent.
    pub fn totals(&self) -> &[u64] {
        &self.totals[..]
    }

    /// Adds totals that another sum has.
    pub fn add_totals(&mut self, totals: &[u64]) {
        self.totals.iter_mut().zip(totals).for_each(|(a, b)| *a += b);
    }

    /// The sum, from the smallest exponent up. NaN if a term was NaN or infinite.
    pub fn total(&self) -> f64 {
        if self.totals[255] > 0 {
            return f64::NAN;
        }
        let power = |exponent: usize| f64::from_bits((1023 - 127 - 23 + exponent.max(1) as u64) << 52);
        self.totals.iter().enumerate().map(|(exponent, &total)| total as f64 * power(exponent)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_order_gives_the_same_bits_and_the_right_sum() {
        let terms: Vec<f32> =
            (0..10_000u32).map(|i| (i as f32 * 0.37).powi(1 + (i % 7) as i32) * 1e-6).collect();
        let sum = |terms: &mut dyn Iterator<Item = &f32>| {
            let mut sum = ExactSum::default();
            terms.for_each(|&t| sum.add(t));
            sum.total()
        };
        let forward = sum(&mut terms.iter());
        assert_eq!(forward.to_bits(), sum(&mut terms.iter().rev()).to_bits());
        let plain: f64 = terms.iter().map(|&t| f64::from(t)).sum();
        assert!((forward / plain - 1.0).abs() < 1e-12);
        assert_eq!(
            sum(&mut [1.5f32, f32::MIN_POSITIVE, 1e-45].iter()),
            1.5 + f64::from(f32::MIN_POSITIVE) + f64::from(1e-45f32)
        );
        assert!(sum(&mut [1.0f32, f32::INFINITY].iter()).is_nan());
    }
}
