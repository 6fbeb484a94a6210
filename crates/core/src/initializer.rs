//! The first values of rows. A value depends on seed, key and column alone, so it is the same on every device and every rank, and
//! in any order of calls.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::key::Key;
use crate::math::normal_quantile;

/// How the first values of a row are computed. `VarianceScaling` comes as the uniform or truncated normal distribution that it
/// means.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Initializer {
    /// The same value in every column of every row.
    Constant {
        /// The value.
        value: f32,
    },
    /// The uniform distribution over an interval.
    Uniform {
        /// Lower end, included.
        minval: f32,
        /// Upper end.
        maxval: f32,
    },
    /// The normal distribution.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        stddev: f32,
    },
    /// The normal distribution, cut at two bounds.
    TruncatedNormal {
        /// Mean.
        mean: f32,
        /// Standard deviation of the normal distribution that is cut.
        stddev: f32,
        /// Shares of that distribution below the lower and below the upper bound. Without them, the bounds are two standard deviations from
        /// the mean.
        #[serde(default = "two_deviations")]
        below: [f64; 2],
    },
    /// The key modulo [`DEBUG_KEYS`] in every column, which shows whose row a row is.
    Debug,
}

/// Different keys of [`Initializer::Debug`], whose values are exact.
pub const DEBUG_KEYS: u64 = 100_000;

/// Shares of a normal distribution below -2 and below 2 standard deviations.
pub const fn two_deviations() -> [f64; 2] {
    [0.022_750_131_948_179_21, 0.977_249_868_051_820_8]
}

impl Initializer {
    /// Checks the parameters.
    ///
    /// # Errors
    /// [`Error::Argument`] with the parameter, the rule and the value.
    pub fn validate(&self) -> Result<()> {
        match *self {
            Initializer::Constant { value } => check_finite("value", value),
            Initializer::Uniform { minval, maxval } => {
                check_finite("minval", minval)?;
                check_finite("maxval", maxval)?;
                if minval > maxval {
                    return Err(Error::argument(format!(
                        "`minval` must not be above `maxval`. Received: minval={minval}, maxval={maxval}"
                    )));
                }
                // Otherwise the widest draws would be infinite.
                check_finite("maxval - minval", maxval - minval)
            }
            Initializer::Normal { mean, stddev } => check_normal(mean, stddev),
            Initializer::TruncatedNormal { mean, stddev, below: [low, high] } => {
                check_normal(mean, stddev)?;
                if low >= 0.0 && low < high && high <= 1.0 {
                    return Ok(());
                }
                Err(Error::argument(format!(
                    "a part of the normal distribution must be between the bounds. Received: the shares below them {low} and {high}"
                )))
            }
            Initializer::Debug => Ok(()),
        }
    }

    /// Writes the first values of the row of `key`, columns `0..row.len()`.
    pub fn fill(&self, seed: u64, key: Key, row: &mut [f32]) {
        match *self {
            Initializer::Constant { value } => row.fill(value),
            Initializer::Uniform { minval, maxval } => {
                let span = maxval - minval;
                draw(seed, key, row, |word| minval + span * unit_f32(word));
            }
            Initializer::Normal { mean, stddev } => {
                let (mean, stddev) = (f64::from(mean), f64::from(stddev));
                draw(seed, key, row, |word| (mean + stddev * normal_quantile(unit_f64(word))) as f32);
            }
            Initializer::TruncatedNormal { mean, stddev, below: [low, high] } => {
                let (mean, stddev) = (f64::from(mean), f64::from(stddev));
                draw(seed, key, row, |word| {
                    // The largest number below 1.
                    let p = (low + unit_f64(word) * (high - low)).min(1.0 - f64::EPSILON / 2.0);
                    (mean + stddev * normal_quantile(p)) as f32
                });
            }
            Initializer::Debug => row.fill((key % DEBUG_KEYS) as f32),
        }
    }
}

/// Makes a float in `[0, 1)` of the upper 24 bits. A float32 holds 24 bits, so neighbours have the same distance everywhere.
#[inline(always)]
fn unit_f32(word: u32) -> f32 {
    // The number fits into a signed integer. Vector units convert signed integers in one instruction.
    (word >> 8) as i32 as f32 * (1.0 / 16_777_216.0)
}

/// Makes a float of all bits. It is strictly between 0 and 1, and symmetric about one half.
#[inline(always)]
fn unit_f64(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}

fn check_normal(mean: f32, stddev: f32) -> Result<()> {
    check_finite("mean", mean)?;
    check_finite("stddev", stddev)?;
    if stddev < 0.0 {
        return Err(Error::argument(format!("`stddev` must not be negative. Received: {stddev}")));
    }
    Ok(())
}

fn check_finite(name: &str, value: f32) -> Result<()> {
    if value.is_finite() {
        return Ok(());
    }
    Err(Error::argument(format!("`{name}` must be finite. Received: {value}")))
}

/// Sets each column to `value` of its random word, which is word `column % 4` of the counter `(key, column / 4)` under `seed`.
#[inline(always)]
fn draw(seed: u64, key: Key, row: &mut [f32], value: impl Fn(u32) -> f32) {
    let words =
        |group| philox([key as u32, (key >> 32) as u32, group, 0], [seed as u32, (seed >> 32) as u32]);
    let (groups, rest) = row.as_chunks_mut::<4>();
    let mut group = 0;
    for columns in groups {
        *columns = words(group).map(&value);
        group += 1;
    }
    if !rest.is_empty() {
        for (column, word) in rest.iter_mut().zip(words(group)) {
            *column = value(word);
        }
    }
}

/// Returns four random words of a counter, by Philox4x32-10 of J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
/// (SC 2011). It is a bijection of the counter, needs no state, and its output passes BigCrush.
///
/// The counters of a row do not depend on each other, so a core overlaps their multiplications. Vector intrinsics for four counters
/// at a time gained less than a third.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let product_0 = 0xd251_1f53 * u64::from(c0);
        let product_2 = 0xcd9e_8d57 * u64::from(c2);
        c0 = (product_2 >> 32) as u32 ^ c1 ^ k0;
        c1 = product_2 as u32;
        c2 = (product_0 >> 32) as u32 ^ c3 ^ k1;
        c3 = product_0 as u32;
        // The golden ratio minus 1, and the square root of 3 minus 1, as fractions of 2^32.
        k0 = k0.wrapping_add(0x9e37_79b9);
        k1 = k1.wrapping_add(0xbb67_ae85);
    }
    [c0, c1, c2, c3]
}
