//! Numbers that must never change: dumps, ranks and devices agree because each of them gives these bits.
//!
//! The expected values were made by other programs: the hash, Philox and the draws in Python (NumPy float32, the quantile of
//! `statistics.NormalDist`), the functions with mpmath at 40 digits.

use sok_core::initializer::{Initializer, philox, two_deviations};
use sok_core::key::{Key, hash};
use sok_core::math::{clip, ln, normal_quantile, pow, sum_of_squares, whole_power};

const SEED: u64 = 0x0123_4567_89ab_cdef;

#[test]
fn keys_hash_to_the_same_bits_for_ever() {
    for (key, expected) in [
        (0, 0),
        (1, 0xb456_bcfc_34c2_cb2c),
        (2, 0x3abf_2a20_6506_83e7),
        (1 << 32, 0xba3a_9e16_0a5f_1419),
        (1 << 63, 0x8f78_0810_af31_a493),
        (u64::MAX, 0x64b5_720b_4b82_5f21),
    ] {
        assert_eq!(hash(key), expected, "key {key}");
    }
}

/// The vectors of `kat_vectors` in Random123, the authors' own library.
#[test]
fn philox_gives_its_known_answers() {
    for (counter, key, expected) in [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(philox(counter, key), expected);
    }
}

fn row_of(initializer: Initializer, key: Key, dim: usize) -> Vec<f32> {
    let mut row = vec![f32::NAN; dim];
    initializer.fill(SEED, key, &mut row);
    row
}

fn assert_bits(initializer: Initializer, expected: [(Key, [u32; 6]); 3]) {
    for (key, bits) in expected {
        let row = row_of(initializer, key, 6);
        assert_eq!(row.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits, "{initializer:?}, key {key}");
    }
}

#[test]
fn uniform_rows_keep_their_bits() {
    assert_bits(
        Initializer::Uniform { minval: -0.05, maxval: 0.05 },
        [
            (0, [0x3cb4_33a2, 0x3cde_8f02, 0xbd2b_c09a, 0xbb0c_4ce0, 0x3d44_2fff, 0xbbff_2c98]),
            (1, [0x3c92_86a6, 0xbc92_6ca4, 0xbc2b_32b4, 0x3ca1_ec52, 0x3d34_ffa1, 0x3bbb_2130]),
            (u64::MAX, [0xbbe3_ea68, 0xbcea_aed0, 0x3c3a_7840, 0xbd28_3466, 0x3cdd_4e1a, 0xbcbf_5c07]),
        ],
    );
}

#[test]
fn normal_rows_keep_their_bits() {
    assert_bits(
        Initializer::Normal { mean: 0.5, stddev: 2.0 },
        [
            (0, [0x3fd5_2fcb, 0x3ffe_8ff8, 0xc013_4361, 0x3ec9_060b, 0x4092_1c8c, 0x3ddb_5201]),
            (1, [0x3fb6_eb37, 0xbedb_5209, 0xbcf5_93ed, 0x3fc4_86d8, 0x4069_1189, 0x3f49_8b23]),
            (u64::MAX, [0x3e19_1bfb, 0xbf8b_54a5, 0x3f8a_0d82, 0xc00c_2295, 0x3ffd_44f9, 0xbf3f_57bf]),
        ],
    );
}

#[test]
fn truncated_normal_rows_keep_their_bits() {
    assert_bits(
        truncated(0.5, 2.0),
        [
            (0, [0x3fcd_a3b7, 0x3ff4_4048, 0xc004_3665, 0x3ecb_86fc, 0x407c_038f, 0x3e00_3017]),
            (1, [0x3fb1_21a7, 0xbec4_30cb, 0xbbae_ae8d, 0x3fbd_f891, 0x4055_6626, 0x3f46_2cfc]),
            (u64::MAX, [0x3e29_987c, 0xbf80_0f5d, 0x3f86_982d, 0xbffc_b12a, 0x3ff3_0d5c, 0xbf2e_ef7d]),
        ],
    );
}

/// A normal distribution that is cut at two standard deviations.
fn truncated(mean: f32, stddev: f32) -> Initializer {
    Initializer::TruncatedNormal { mean, stddev, below: two_deviations() }
}

#[test]
fn constant_rows_are_constant() {
    assert_eq!(row_of(Initializer::Constant { value: -1.5 }, 7, 3), [-1.5; 3]);
}

#[test]
fn a_column_does_not_depend_on_the_width_of_its_row() {
    for initializer in [
        Initializer::Uniform { minval: -1.0, maxval: 1.0 },
        Initializer::Normal { mean: 0.0, stddev: 1.0 },
        truncated(0.0, 1.0),
    ] {
        let widest = row_of(initializer, 3, 40);
        for dim in 0..40 {
            assert_eq!(row_of(initializer, 3, dim), widest[..dim]);
        }
    }
}

/// A million draws over keys and columns: mean, standard deviation, least and greatest.
fn moments(initializer: Initializer) -> [f64; 4] {
    let draws: Vec<f64> = (0..62_500).flat_map(|key| row_of(initializer, key, 16)).map(f64::from).collect();
    let mean = draws.iter().sum::<f64>() / draws.len() as f64;
    let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
    let least = draws.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = draws.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    [mean, variance.sqrt(), least, greatest]
}

fn assert_near(got: f64, expected: f64, tolerance: f64) {
    assert!((got - expected).abs() <= tolerance, "{got} is not {expected} within {tolerance:e}");
}

#[test]
fn uniform_draws_fill_their_range_evenly() {
    let [mean, stddev, least, greatest] = moments(Initializer::Uniform { minval: 1.0, maxval: 3.0 });
    assert_near(mean, 2.0, 0.003);
    assert_near(stddev, 2.0 / 12f64.sqrt(), 0.002);
    assert!((1.0..1.0001).contains(&least) && (2.9999..=3.0).contains(&greatest));
}

#[test]
fn normal_draws_have_their_mean_and_deviation() {
    let [mean, stddev, least, greatest] = moments(Initializer::Normal { mean: 1.0, stddev: 2.0 });
    assert_near(mean, 1.0, 0.01);
    assert_near(stddev, 2.0, 0.007);
    // A million draws reach beyond four deviations and not beyond seven.
    assert!((-13.0..-7.0).contains(&least) && (9.0..15.0).contains(&greatest));
}

#[test]
fn truncated_normal_draws_stay_within_two_deviations() {
    let [mean, stddev, least, greatest] = moments(truncated(1.0, 2.0));
    assert_near(mean, 1.0, 0.01);
    // What `VarianceScaling` divides by.
    assert_near(stddev, 2.0 * 0.879_625_661_034_239_8, 0.006);
    assert!((-3.0..-2.999).contains(&least) && (4.999..=5.0).contains(&greatest));
}

#[test]
fn draws_stay_within_their_bounds() {
    // From the mean to one standard deviation above it.
    let below = [0.5, 0.841_344_746_068_542_9];
    let [mean, _, least, greatest] = moments(Initializer::TruncatedNormal { mean: 1.0, stddev: 2.0, below });
    // The density at the mean less that one deviation above it, over the share between them.
    assert_near(mean, 1.0 + 2.0 * 0.459_862_195_5, 0.003);
    assert!((1.0..1.001).contains(&least) && (2.999..=3.0).contains(&greatest));
    // Seven deviations from the mean and more.
    let [.., least, greatest] =
        moments(Initializer::TruncatedNormal { mean: 0.0, stddev: 1.0, below: [1.0 - 1.28e-12, 1.0] });
    assert!((6.99..7.01).contains(&least) && (7.5..9.0).contains(&greatest), "{least}, {greatest}");
}

#[test]
fn debug_rows_say_their_key() {
    assert_eq!(row_of(Initializer::Debug, 1_234_567, 3), [34_567.0; 3]);
}

#[test]
fn wrong_initializers_are_told_by_name_rule_and_value() {
    for (initializer, message) in [
        (Initializer::Constant { value: f32::NAN }, "`value` must be finite. Received: NaN"),
        (
            Initializer::Uniform { minval: 1.0, maxval: -1.0 },
            "`minval` must not be above `maxval`. Received: minval=1, maxval=-1",
        ),
        (
            Initializer::Uniform { minval: -3e38, maxval: 3e38 },
            "`maxval - minval` must be finite. Received: inf",
        ),
        (Initializer::Normal { mean: 0.0, stddev: -0.5 }, "`stddev` must not be negative. Received: -0.5"),
        (truncated(f32::INFINITY, 1.0), "`mean` must be finite. Received: inf"),
        (
            Initializer::TruncatedNormal { mean: 0.0, stddev: 1.0, below: [0.5, 0.5] },
            "a part of the normal distribution must be between the bounds. Received: the shares below them 0.5 and 0.5",
        ),
    ] {
        assert_eq!(initializer.validate().unwrap_err().to_string(), message);
    }
    Initializer::Uniform { minval: 0.5, maxval: 0.5 }.validate().unwrap();
    truncated(0.0, 0.0).validate().unwrap();
}

#[test]
fn logarithms_are_exact_to_the_last_places() {
    for (x, expected) in [
        (1e-10, -23.025_850_929_940_457),
        (0.3, -1.203_972_804_325_936),
        (0.707_106_781_186_547_5, -0.346_573_590_279_972_75),
        (0.75, -0.287_682_072_451_780_9),
        (1.0000001, 9.999_999_505_838_704e-8),
        (3.0, 1.098_612_288_668_109_8),
        (1e300, 690.775_527_898_213_7),
    ] {
        assert_near(ln(x) / expected, 1.0, 4e-16);
    }
    assert_eq!(ln(1.0), 0.0);
}

#[test]
fn quantiles_are_those_of_the_normal_distribution() {
    for (p, expected) in [
        (1e-9, -5.997_807_015_007_687),
        (0.001, -3.090_232_306_167_813_6),
        (0.0227, -2.000_929_388_101_572_3),
        (0.25, -0.674_489_750_196_081_7),
        (0.9, 1.281_551_565_544_600_6),
        // 1 - p has lost seven digits: an error of the argument, not of the formula.
        (0.99999999, 5.612_001_243_305_505),
    ] {
        assert_near(normal_quantile(p) / expected, 1.0, 2e-15);
    }
    assert_eq!(normal_quantile(0.5), 0.0);
}

/// The distance in representable numbers.
fn ulps(a: f32, b: f32) -> u32 {
    a.to_bits().abs_diff(b.to_bits())
}

#[test]
fn powers_are_within_one_unit_in_the_last_place() {
    for base in [1e-45f32, 1e-30, 3.7e-8, 0.1, 0.99999, 1.00001, 2.0, 3.5, 1e10, 3e38] {
        for exponent in [-2.0f32, -0.9, -0.5, 0.01, 0.3, 0.5, 0.7, 1.0, 1.25, 3.0] {
            let expected = f64::from(base).powf(f64::from(exponent)) as f32;
            let got = pow(base, exponent);
            assert!(ulps(got, expected) <= 1, "{base}^{exponent} is {expected}, not {got}");
        }
    }
}

#[test]
fn powers_at_the_edges_are_those_of_ieee() {
    for (base, exponent, expected) in [
        (0.0, 0.5, 0.0),
        (0.0, 0.0, 1.0),
        (0.0, -0.5, f32::INFINITY),
        (f32::INFINITY, 0.5, f32::INFINITY),
        (f32::INFINITY, -0.5, 0.0),
        (1.0, 3e38, 1.0),
        (2.0, 3e38, f32::INFINITY),
        (2.0, -3e38, 0.0),
    ] {
        assert_eq!(pow(base, exponent), expected, "{base}^{exponent}");
    }
    assert!(pow(f32::NAN, 0.5).is_nan() && pow(-1.0, 0.5).is_nan());
}

#[test]
fn whole_powers_are_those_of_repeated_multiplication() {
    assert_eq!(whole_power(3.0, 0), 1.0);
    assert_eq!(whole_power(3.0, 13), 1_594_323.0);
    assert_eq!(whole_power(0.5, 1000), 2f64.powi(-1000));
    assert_eq!(whole_power(0.9, u64::MAX), 0.0);
}

#[test]
fn squares_are_summed_in_eight_lanes() {
    // 2^24 swallows a 1 that is added to it alone, but not the 2 that two lanes make before they meet it.
    let mut values = vec![0.0; 16];
    values[0] = 4096.0;
    values[8] = 1.0;
    assert_eq!(sum_of_squares(&values), 16_777_216.0);
    values[8] = 0.0;
    values[1] = 1.0;
    values[5] = 1.0;
    assert_eq!(sum_of_squares(&values), 16_777_218.0);
    for len in 0..40u16 {
        let values: Vec<f32> = (0..len).map(f32::from).collect();
        let expected: u32 = (0..u32::from(len)).map(|i| i * i).sum();
        assert_eq!(sum_of_squares(&values), expected as f32);
    }
}

#[test]
fn clip_keeps_nan() {
    assert_eq!([-3.0, -1.0, 0.5, 2.0].map(|x| clip(x, 1.0)), [-1.0, -1.0, 0.5, 1.0]);
    assert!(clip(f32::NAN, 1.0).is_nan());
    assert_eq!(clip(f32::NEG_INFINITY, f32::INFINITY), f32::NEG_INFINITY);
}
