//! Functions that give the same bits everywhere: built from + - * / and square root alone, without libm.
//!
//! `std`'s `ln`, `exp` and `powf` call the C library of the machine, whose last bits differ from one to the next and from
//! a GPU's. Nothing here is contracted either: Rust never fuses a multiplication with an addition.

/// Sum of the squares in eight lanes: element `c` goes to lane `c % 8`, in order, then the lanes are added as a tree. This
/// order is part of what a row-wise update means; a vector unit keeps it without a shuffle, a warp with three.
#[inline(always)]
pub fn sum_of_squares(values: &[f32]) -> f32 {
    let (blocks, rest) = values.as_chunks::<8>();
    let mut lanes = [0f32; 8];
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane += value * value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += value * value;
    }
    let [p0, p1, p2, p3, p4, p5, p6, p7] = lanes;
    ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7))
}

/// `x` within `[-limit, limit]`. NaN stays NaN, which `f32::min` and `f32::max` would swallow.
#[inline(always)]
pub fn clip(x: f32, limit: f32) -> f32 {
    let below = if x > limit { limit } else { x };
    if below < -limit { -limit } else { below }
}

/// The larger of two; `b` if it is NaN.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The absolute value. NaN stays NaN.
#[inline(always)]
pub fn absolute(x: f32) -> f32 {
    x.abs()
}

/// 1 above 0, -1 below, else `x` itself: a zero or NaN.
#[inline(always)]
pub fn sign(x: f32) -> f32 {
    let not_above = if x < 0.0 { -1.0 } else { x };
    if x > 0.0 { 1.0 } else { not_above }
}

/// The square root.
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    x.sqrt()
}

/// `x` to the power of `exponent`; its square root, if that `is_root`.
#[inline(always)]
pub fn raise(is_root: bool, x: f32, exponent: f32) -> f32 {
    if is_root { x.sqrt() } else { pow(x, exponent) }
}

/// `base` to the power of the count of a step.
pub fn power_of_step(base: f32, count: u64) -> f32 {
    whole_power(f64::from(base), count) as f32
}

/// The product of `1 - 0.96^i / 2` over the steps i from 1 to `count`: of the decays of Nadam's momentum, each over beta_1.
pub fn nadam_product(count: u64) -> f32 {
    /// From this step on the factors are 1 as f64.
    const LAST: u64 = 1000;
    if count >= LAST {
        return 9.010_186e-7;
    }
    let (mut product, mut power) = (1.0f64, 1.0f64);
    for _ in 0..count {
        power *= 0.96;
        product *= 1.0 - 0.5 * power;
    }
    product as f32
}

/// The constant in two parts: the upper ends in 32 zero bits, so that its product with a binary exponent is exact.
const LN_2_UPPER: f64 = f64::from_bits(0x3fe6_2e42_0000_0000);
const LN_2_LOWER: f64 = 4.749_325_039_031_672_6e-7;

/// 1/23, 1/21, ..., 1/3: |s| < 0.1716 in `ln`, so that the next term of the series, s^25/25, is below 2^-63 of the first.
const INVERSE_ODDS: [f64; 11] = {
    let mut coefficients = [0.0; 11];
    let mut n = 0;
    while n < 11 {
        coefficients[n] = 1.0 / (23 - 2 * n) as f64;
        n += 1;
    }
    coefficients
};

/// Natural logarithm of a positive, finite, not subnormal `x`, within 2 units in the last place.
pub fn ln(x: f64) -> f64 {
    // x = 2^exponent * m with m in [sqrt(1/2), sqrt(2)), the interval about 1 in which the series is shortest.
    const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
    let offset = x.to_bits().wrapping_sub(SQRT_HALF);
    let exponent = (offset as i64) >> 52;
    let m = f64::from_bits(x.to_bits().wrapping_sub((exponent as u64) << 52));
    // ln(m) = 2 atanh(s) = 2 (s + s^3/3 + s^5/5 + ...)
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let tail = horner(z, INVERSE_ODDS);
    let exponent = exponent as f64;
    let small = 2.0 * s * z * tail + exponent * LN_2_LOWER;
    exponent * LN_2_UPPER + (2.0 * s + small)
}

/// 1/13! to 1/0!: |r| < 0.35 in `exp`, so that the next term of the series, r^14/14!, is below 2^-57.
const INVERSE_FACTORIALS: [f64; 14] = {
    let mut coefficients = [1.0; 14];
    let mut factorial = 1.0;
    let mut n = 1;
    while n < 14 {
        factorial *= n as f64;
        coefficients[13 - n] = 1.0 / factorial;
        n += 1;
    }
    coefficients
};

/// e^x within 2 units in the last place of an f64, for `x` in `[-200, 200]`.
fn exp(x: f64) -> f64 {
    // Adding and taking away 1.5 * 2^52 rounds to the nearest integer.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let exponent = (x * std::f64::consts::LOG2_E + ROUND) - ROUND;
    let r = (x - exponent * LN_2_UPPER) - exponent * LN_2_LOWER;
    horner(r, INVERSE_FACTORIALS) * f64::from_bits(((exponent as i64 + 1023) as u64) << 52)
}

/// `base` to the power of a finite `exponent`, within 1 unit in the last place. NaN for a negative base, whatever the
/// exponent: what is raised here are sums of squares.
pub fn pow(base: f32, exponent: f32) -> f32 {
    if exponent == 0.0 || base == 1.0 {
        return 1.0;
    }
    if base.is_nan() || base < 0.0 {
        return f32::NAN;
    }
    if base == 0.0 || base == f32::INFINITY {
        return if (base == 0.0) == (exponent > 0.0) { 0.0 } else { f32::INFINITY };
    }
    // Beyond e^200 and e^-200 an f32 is infinite or zero anyway.
    exp((f64::from(exponent) * ln(f64::from(base))).clamp(-200.0, 200.0)) as f32
}

/// `base` to a whole power, by squaring: multiplications alone.
pub fn whole_power(base: f64, exponent: u64) -> f64 {
    let mut power = 1.0;
    let mut square = base;
    let mut rest = exponent;
    while rest > 0 {
        if rest & 1 == 1 {
            power *= square;
        }
        square *= square;
        rest >>= 1;
    }
    power
}

/// The `p` quantile of the standard normal distribution, for `p` strictly between 0 and 1, to about 1 part in 10^16: routine
/// PPND16 of M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37 (1988).
#[inline(always)]
pub fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 { central_quantile(q) } else { tail_quantile(p, q) }
}

/// At `p = 0.5 + q`, for |q| <= 0.425, where 85 of 100 draws fall.
#[inline(always)]
fn central_quantile(q: f64) -> f64 {
    let r = 0.180625 - q * q;
    let numerator = horner(
        r,
        [
            2.509_080_928_730_122_7e3,
            3.343_057_558_358_813e4,
            6.726_577_092_700_87e4,
            4.592_195_393_154_987e4,
            1.373_169_376_550_946e4,
            1.971_590_950_306_551_3e3,
            1.331_416_678_917_843_8e2,
            3.387_132_872_796_366_5e0,
        ],
    );
    let denominator = horner(
        r,
        [
            5.226_495_278_852_854e3,
            2.872_908_573_572_194_3e4,
            3.930_789_580_009_271e4,
            2.121_379_430_158_659_7e4,
            5.394_196_021_424_751e3,
            6.871_870_074_920_579e2,
            4.231_333_070_160_091e1,
            1.0,
        ],
    );
    q * numerator / denominator
}

fn tail_quantile(p: f64, q: f64) -> f64 {
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let r = (-ln(tail)).sqrt();
    let magnitude = if r <= 5.0 { near_tail_quantile(r - 1.6) } else { far_tail_quantile(r - 5.0) };
    if q < 0.0 { -magnitude } else { magnitude }
}

fn near_tail_quantile(r: f64) -> f64 {
    let numerator = horner(
        r,
        [
            7.745_450_142_783_414e-4,
            2.272_384_498_926_918_4e-2,
            2.417_807_251_774_506e-1,
            1.270_458_252_452_368_4,
            3.647_848_324_763_204_5,
            5.769_497_221_460_691,
            4.630_337_846_156_546,
            1.423_437_110_749_683_5,
        ],
    );
    let denominator = horner(
        r,
        [
            1.050_750_071_644_416_9e-9,
            5.475_938_084_995_345e-4,
            1.519_866_656_361_645_7e-2,
            1.481_039_764_274_800_8e-1,
            6.897_673_349_851e-1,
            1.676_384_830_183_803_8,
            2.053_191_626_637_759,
            1.0,
        ],
    );
    numerator / denominator
}

fn far_tail_quantile(r: f64) -> f64 {
    let numerator = horner(
        r,
        [
            2.010_334_399_292_288_1e-7,
            2.711_555_568_743_487_6e-5,
            1.242_660_947_388_078_4e-3,
            2.653_218_952_657_612_4e-2,
            2.965_605_718_285_048_7e-1,
            1.784_826_539_917_291_3,
            5.463_784_911_164_114,
            6.657_904_643_501_103,
        ],
    );
    let denominator = horner(
        r,
        [
            2.044_263_103_389_939_8e-15,
            1.421_511_758_316_446e-7,
            1.846_318_317_510_054_8e-5,
            7.868_691_311_456_133e-4,
            1.487_536_129_085_061_5e-2,
            1.369_298_809_227_358e-1,
            5.998_322_065_558_88e-1,
            1.0,
        ],
    );
    numerator / denominator
}

/// A polynomial, its coefficients from the highest power down.
#[inline(always)]
fn horner<const N: usize>(x: f64, coefficients: [f64; N]) -> f64 {
    let mut sum = 0.0;
    for coefficient in coefficients {
        sum = sum * x + coefficient;
    }
    sum
}
