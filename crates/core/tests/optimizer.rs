//! Each rule beside an independent statement of its formula in f64, every hyper-parameter off its default.

use sok_core::formula::update::{Update, UpdateScalars, clipnorm_factor};
use sok_core::formula::{
    Adadelta, Adagrad, Adam, Adamax, Ftrl, Lamb, Nadam, RmsProp, RowWiseAdagrad, RowWiseAdam, Rule, Sgd,
};
use sok_core::math::nadam_product;

#[path = "common/record_step.rs"]
mod record_step;

use record_step::update_record;

const SGD: Rule = Rule::Sgd(Sgd { momentum: 0.8, nesterov: false });
const ADAM: Rule = Rule::Adam(Adam { beta_1: 0.85, beta_2: 0.98, epsilon: 1e-3, amsgrad: false });
const ADAGRAD: Rule = Rule::Adagrad(Adagrad { initial_accumulator_value: 0.3, epsilon: 1e-3 });
const ROW_WISE: Rule = Rule::RowWiseAdagrad(RowWiseAdagrad { initial_accumulator_value: 0.3, epsilon: 1e-3 });
const RMSPROP: Rule = Rule::RmsProp(RmsProp { rho: 0.8, momentum: 0.0, epsilon: 1e-3, centered: false });
const FTRL: Rule = ftrl_of_power(-0.7);

const fn ftrl_of_power(learning_rate_power: f64) -> Rule {
    Rule::Ftrl(Ftrl {
        learning_rate_power,
        initial_accumulator_value: 0.3,
        l1_regularization_strength: 0.02,
        l2_regularization_strength: 0.03,
        l2_shrinkage_regularization_strength: 0.04,
        beta: 0.05,
    })
}

const ROW_WISE_ADAM: Rule = Rule::RowWiseAdam(RowWiseAdam { beta_1: 0.85, beta_2: 0.98, epsilon: 1e-3 });
const ADADELTA: Rule = Rule::Adadelta(Adadelta { rho: 0.8, epsilon: 1e-2 });
const ADAMAX: Rule = Rule::Adamax(Adamax { beta_1: 0.85, beta_2: 0.98, epsilon: 1e-3 });
const LAMB: Rule = Rule::Lamb(Lamb { beta_1: 0.85, beta_2: 0.98, epsilon: 1e-3 });
const NADAM: Rule = Rule::Nadam(Nadam { beta_1: 0.85, beta_2: 0.98, epsilon: 1e-3 });

const DIM: usize = 11;
const STEPS: u64 = 20;
const LEARNING_RATE: f32 = 0.07;
const TOLERANCE: f64 = 1e-6;

/// One record as a table of `DIM` columns keeps it: the row, then its states.
struct Record {
    values: Vec<f32>,
}

impl Record {
    fn new(rule: &Rule) -> Record {
        let mut values: Vec<f32> = (0..DIM).map(|c| 0.5 * (c as f32 * 1.7 + 0.3).sin()).collect();
        for state in rule.states(DIM) {
            values.extend(vec![state.initial; state.width]);
        }
        Record { values }
    }
}

fn gradient(step: u64) -> Vec<f32> {
    (0..DIM).map(|c| (step as f32 * 0.9 + c as f32 * 2.1).sin() * 1.5).collect()
}

fn scalars(step: u64) -> UpdateScalars {
    UpdateScalars { learning_rate: LEARNING_RATE, step, factor: 1.0 }
}

fn plain(rule: Rule) -> Update {
    Update { rule, weight_decay: None, clipvalue: None, clipnorm: None }
}

/// A formula in f64: value, states of the column, gradient, step; the learning rate as in the tests.
type Reference = fn(&mut f64, &mut [f64], f64, i32);

/// Runs rule and formula side by side and compares rows and states.
fn check(rule: Rule, formula: Reference) {
    rule.validate().unwrap();
    let mut record = Record::new(&rule);
    let mut expected: Vec<f64> = record.values.iter().map(|v| f64::from(*v)).collect();
    let start = expected.clone();
    for step in 1..=STEPS {
        let gradient = gradient(step);
        update_record(&plain(rule), &scalars(step), &mut record.values, &gradient);
        for column in 0..DIM {
            let mut states: Vec<f64> = expected[column..].iter().step_by(DIM).skip(1).copied().collect();
            formula(&mut expected[column], &mut states, f64::from(gradient[column]), step as i32);
            for (value, state) in expected[column..].iter_mut().step_by(DIM).skip(1).zip(states) {
                *value = state;
            }
        }
    }
    assert_ne!(start[..DIM], expected[..DIM]);
    assert_close(&rule, &record.values, &expected);
}

/// Relative to the largest number of the row or state: what is small there was made by steps as large as that one.
fn assert_close(rule: &Rule, got: &[f32], expected: &[f64]) {
    for (block, (got, expected)) in got.chunks(DIM).zip(expected.chunks(DIM)).enumerate() {
        let scale = expected.iter().fold(0.0, |max: f64, value| max.max(value.abs()));
        for (column, (got, expected)) in got.iter().zip(expected).enumerate() {
            let difference = (f64::from(*got) - expected).abs() / scale;
            assert!(
                difference < TOLERANCE,
                "{rule:?}: block {block}, column {column}: {got} is {difference:e} off {expected}"
            );
        }
    }
}

const LR: f64 = LEARNING_RATE as f64;

#[test]
fn sgd_follows_its_formula() {
    check(Rule::Sgd(Sgd { momentum: 0.0, nesterov: false }), |x, _, g, _| *x -= LR * g);
    check(SGD, |x, s, g, _| {
        s[0] = 0.8 * s[0] - LR * g;
        *x += s[0];
    });
    check(Rule::Sgd(Sgd { momentum: 0.8, nesterov: true }), |x, s, g, _| {
        s[0] = 0.8 * s[0] - LR * g;
        *x += 0.8 * s[0] - LR * g;
    });
}

/// Kingma and Ba, with the bias corrections in the step size.
fn adam(x: &mut f64, s: &mut [f64], g: f64, step: i32, second_moment: impl Fn(&mut [f64]) -> f64) {
    // The betas as float32 variables, as Keras has them.
    let power = |beta: f32| f64::from(beta).powi(step);
    s[0] = 0.85 * s[0] + 0.15 * g;
    s[1] = 0.98 * s[1] + 0.02 * g * g;
    let alpha = LR * (1.0 - power(0.98)).sqrt() / (1.0 - power(0.85));
    *x -= alpha * s[0] / (second_moment(s).sqrt() + 1e-3);
}

#[test]
fn adam_follows_its_formula() {
    check(ADAM, |x, s, g, step| adam(x, s, g, step, |s| s[1]));
    let amsgrad = Rule::Adam(Adam { beta_1: 0.85, beta_2: 0.98, epsilon: 1e-3, amsgrad: true });
    check(amsgrad, |x, s, g, step| {
        adam(x, s, g, step, |s| {
            s[2] = s[2].max(s[1]);
            s[2]
        })
    });
}

#[test]
fn adagrad_follows_its_formula() {
    check(ADAGRAD, |x, s, g, _| {
        s[0] += g * g;
        *x -= LR * g / (s[0] + 1e-3).sqrt();
    });
}

#[test]
fn row_wise_adagrad_follows_its_formula() {
    let mut record = Record::new(&ROW_WISE);
    let mut expected: Vec<f64> = record.values.iter().map(|v| f64::from(*v)).collect();
    for step in 1..=STEPS {
        let gradient = gradient(step);
        update_record(&plain(ROW_WISE), &scalars(step), &mut record.values, &gradient);
        expected[DIM] += gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / DIM as f64;
        for column in 0..DIM {
            expected[column] -= LR * f64::from(gradient[column]) / (expected[DIM] + 1e-3).sqrt();
        }
    }
    assert_close(&ROW_WISE, &record.values, &expected);
}

#[test]
fn row_wise_adam_follows_its_formula() {
    let mut record = Record::new(&ROW_WISE_ADAM);
    let mut expected: Vec<f64> = record.values.iter().map(|v| f64::from(*v)).collect();
    for step in 1..=STEPS {
        let gradient = gradient(step);
        update_record(&plain(ROW_WISE_ADAM), &scalars(step), &mut record.values, &gradient);
        let mean = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / DIM as f64;
        expected[2 * DIM] = 0.98 * expected[2 * DIM] + 0.02 * mean;
        let power = |beta: f32| f64::from(beta).powi(step as i32);
        let alpha = LR * (1.0 - power(0.98)).sqrt() / (1.0 - power(0.85));
        for column in 0..DIM {
            expected[DIM + column] = 0.85 * expected[DIM + column] + 0.15 * f64::from(gradient[column]);
            expected[column] -= alpha * expected[DIM + column] / (expected[2 * DIM].sqrt() + 1e-3);
        }
    }
    assert_close(&ROW_WISE_ADAM, &record.values, &expected);
}

/// Zeiler 2012, algorithm 1, with a learning rate.
#[test]
fn adadelta_follows_its_formula() {
    check(ADADELTA, |x, s, g, _| {
        s[0] = 0.8 * s[0] + 0.2 * g * g;
        let delta = (s[1] + 1e-2).sqrt() / (s[0] + 1e-2).sqrt() * g;
        s[1] = 0.8 * s[1] + 0.2 * delta * delta;
        *x -= LR * delta;
    });
}

/// Kingma and Ba, section 7.1.
#[test]
fn adamax_follows_its_formula() {
    check(ADAMAX, |x, s, g, step| {
        s[0] = 0.85 * s[0] + 0.15 * g;
        s[1] = (0.98 * s[1]).max(g.abs());
        *x -= LR / (1.0 - f64::from(0.85f32).powi(step)) * s[0] / (s[1] + 1e-3);
    });
}

/// Dozat 2016, with the decay of Keras.
#[test]
fn nadam_follows_its_formula() {
    check(NADAM, |x, s, g, step| {
        let decay = |step: i32| 0.85 * (1.0 - 0.5 * 0.96f64.powi(step));
        let product: f64 = (1..=step).map(decay).product();
        s[0] = 0.85 * s[0] + 0.15 * g;
        s[1] = 0.98 * s[1] + 0.02 * g * g;
        let of_momentum = decay(step + 1) * s[0] / (1.0 - product * decay(step + 1));
        let of_gradient = (1.0 - decay(step)) * g / (1.0 - product);
        let velocity = s[1] / (1.0 - f64::from(0.98f32).powi(step));
        *x -= LR * (of_momentum + of_gradient) / (velocity.sqrt() + 1e-3);
    });
}

/// You et al., algorithm 2: the step of a row is as long as the row, times the learning rate.
#[test]
fn lamb_follows_its_formula() {
    let mut record = Record::new(&LAMB);
    let mut expected: Vec<f64> = record.values.iter().map(|v| f64::from(*v)).collect();
    let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
    for step in 1..=STEPS {
        let gradient = gradient(step);
        update_record(&plain(LAMB), &scalars(step), &mut record.values, &gradient);
        let (row, states) = expected.split_at_mut(DIM);
        let (momentum, velocity) = states.split_at_mut(DIM);
        let correction = |beta: f32| 1.0 - f64::from(beta).powi(step as i32);
        let mut directions = Vec::new();
        for column in 0..DIM {
            let g = f64::from(gradient[column]);
            momentum[column] = 0.85 * momentum[column] + 0.15 * g;
            velocity[column] = 0.98 * velocity[column] + 0.02 * g * g;
            let root = (velocity[column] / correction(0.98)).sqrt();
            directions.push(momentum[column] / correction(0.85) / (root + 1e-3));
        }
        let ratio = norm(row) / norm(&directions);
        row.iter_mut().zip(&directions).for_each(|(x, direction)| *x -= ratio * LR * direction);
    }
    assert_close(&LAMB, &record.values, &expected);
}

#[test]
fn lamb_takes_a_step_of_its_own_length_where_a_row_or_its_gradient_is_zero() {
    let mut zero_row = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    update_record(&plain(LAMB), &scalars(1), &mut zero_row, &[3.0, -2.0]);
    assert!((zero_row[0] + LEARNING_RATE).abs() < 1e-4 && (zero_row[1] - LEARNING_RATE).abs() < 1e-4);
    let mut no_gradient = [1.0, 2.0, 0.0, 0.0, 0.0, 0.0];
    update_record(&plain(LAMB), &scalars(1), &mut no_gradient, &[0.0, 0.0]);
    assert_eq!(no_gradient[..2], [1.0, 2.0]);
}

#[test]
fn the_product_of_nadams_decays_ends_where_its_factors_are_one() {
    assert_eq!((nadam_product(0), nadam_product(1)), (1.0, 0.52));
    assert_eq!(nadam_product(999), nadam_product(1000));
    assert_eq!(nadam_product(1000), nadam_product(u64::MAX));
}

/// Hinton's slides, with momentum on the increments and, centred, the variance instead of the second moment.
fn rmsprop<const MOMENTUM: bool, const CENTERED: bool>(x: &mut f64, s: &mut [f64], g: f64, _: i32) {
    s[0] = 0.8 * s[0] + 0.2 * g * g;
    let mut variance = s[0];
    if CENTERED {
        let average = s.last_mut().unwrap();
        *average = 0.8 * *average + 0.2 * g;
        variance -= *average * *average;
    }
    let mut change = LR * g / (variance + 1e-3).sqrt();
    if MOMENTUM {
        s[1] = 0.6 * s[1] + change;
        change = s[1];
    }
    *x -= change;
}

#[test]
fn rmsprop_follows_its_formula() {
    let rule = |momentum, centered| Rule::RmsProp(RmsProp { rho: 0.8, momentum, epsilon: 1e-3, centered });
    check(rule(0.0, false), rmsprop::<false, false>);
    check(rule(0.6, false), rmsprop::<true, false>);
    check(rule(0.0, true), rmsprop::<false, true>);
    check(rule(0.6, true), rmsprop::<true, true>);
}

/// McMahan et al. 2013, algorithm 1, with Keras' shrinkage and power.
fn ftrl(x: &mut f64, s: &mut [f64], g: f64, power: f64) {
    let (l1, l2, shrinkage, beta) = (0.02, 0.03, 0.04, 0.05);
    let old = s[0];
    s[0] += g * g;
    let sigma = (s[0].powf(power) - old.powf(power)) / LR;
    s[1] += g + 2.0 * shrinkage * *x - sigma * *x;
    let quadratic = s[0].powf(power) / LR + 2.0 * (l2 + beta / (2.0 * LR));
    *x = if s[1].abs() <= l1 { 0.0 } else { (s[1].signum() * l1 - s[1]) / quadratic };
}

#[test]
fn ftrl_follows_its_formula() {
    check(FTRL, |x, s, g, _| ftrl(x, s, g, 0.7));
    check(ftrl_of_power(-0.5), |x, s, g, _| ftrl(x, s, g, 0.5));
}

#[test]
fn row_wise_adagrad_of_one_column_is_adagrad() {
    let stepped = |rule, gradient| {
        let mut record = [0.7, 0.3];
        update_record(&plain(rule), &scalars(1), &mut record, &[gradient]);
        record
    };
    for gradient in gradient(3) {
        assert_eq!(stepped(ROW_WISE, gradient), stepped(ADAGRAD, gradient));
    }
}

#[test]
fn row_wise_adam_of_one_column_is_adam() {
    for gradient in gradient(3) {
        let (mut row_wise, mut adam) = ([0.7, 0.3, 0.2], [0.7, 0.3, 0.2]);
        update_record(&plain(ROW_WISE_ADAM), &scalars(4), &mut row_wise, &[gradient]);
        update_record(&plain(ADAM), &scalars(4), &mut adam, &[gradient]);
        assert_eq!(row_wise, adam);
    }
}

#[test]
fn states_have_the_names_of_keras_variables() {
    let names = |rule: Rule| rule.states(DIM).iter().map(|s| s.name).collect::<Vec<_>>();
    assert_eq!(names(Rule::Sgd(Sgd { momentum: 0.0, nesterov: true })), [""; 0]);
    assert_eq!(names(SGD), ["momentum"]);
    assert_eq!(names(ADAM), ["momentum", "velocity"]);
    let amsgrad = Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: true });
    assert_eq!(names(amsgrad), ["momentum", "velocity", "velocity_hat"]);
    assert_eq!(names(ADAGRAD), ["accumulator"]);
    assert_eq!(names(RMSPROP), ["velocity"]);
    let rmsprop = Rule::RmsProp(RmsProp { rho: 0.9, momentum: 0.1, epsilon: 1e-7, centered: true });
    assert_eq!(names(rmsprop), ["velocity", "momentum", "average_gradient"]);
    assert_eq!(names(FTRL), ["accumulator", "linear"]);
    assert_eq!(names(ADADELTA), ["accumulated_grad", "accumulated_delta_var"]);
    assert_eq!(names(ADAMAX), ["momentum", "norm"]);
    assert_eq!(names(NADAM), ["momentum", "velocity"]);
    assert_eq!(names(ROW_WISE_ADAM), ["momentum", "velocity"]);
}

#[test]
fn states_start_as_in_keras() {
    for rule in [ADAGRAD, FTRL] {
        let accumulator = rule.states(DIM)[0];
        assert_eq!((accumulator.width, accumulator.initial), (DIM, 0.3));
    }
    let accumulator = ROW_WISE.states(DIM)[0];
    assert_eq!((accumulator.name, accumulator.width, accumulator.initial), ("accumulator", 1, 0.3));
    for state in ADAM.states(DIM) {
        assert_eq!((state.width, state.initial), (DIM, 0.0));
    }
}

#[test]
fn the_name_is_the_one_in_configurations() {
    for rule in [SGD, ADAM, ADAGRAD, ROW_WISE, RMSPROP, FTRL] {
        let json = serde_json::to_value(rule).unwrap();
        assert_eq!(json["name"], rule.name());
        assert_eq!(serde_json::from_value::<Rule>(json).unwrap(), rule);
    }
}

fn one_column(update: &Update, scalars: &UpdateScalars, x: f32, gradient: f32) -> f32 {
    let conditioning = update.conditioning(scalars);
    // SGD without momentum and a learning rate of 1: the value less the gradient.
    conditioning.value(x) - conditioning.gradient(gradient)
}

#[test]
fn the_gradient_is_scaled_then_clipped_by_value() {
    let update = Update { clipvalue: Some(0.5), ..plain(SGD) };
    let scalars = UpdateScalars { learning_rate: 1.0, step: 1, factor: 0.25 };
    for (gradient, expected) in [(1.0, 0.25), (4.0, 0.5), (-4.0, -0.5), (f32::INFINITY, 0.5)] {
        assert_eq!(one_column(&update, &scalars, 0.0, gradient), -expected);
    }
    assert!(one_column(&update, &scalars, 0.0, f32::NAN).is_nan());
    assert_eq!(one_column(&plain(SGD), &scalars, 0.0, 1e30), -0.25e30);
}

#[test]
fn weight_decay_takes_its_share_of_the_value_before_the_step() {
    let update = Update { weight_decay: Some(0.1), ..plain(SGD) };
    let scalars = UpdateScalars { learning_rate: 0.5, step: 1, factor: 1.0 };
    assert_eq!(one_column(&update, &scalars, 2.0, 0.0), 2.0 - 2.0 * 0.1 * 0.5);
    assert_eq!(one_column(&plain(SGD), &scalars, f32::INFINITY, 0.0), f32::INFINITY);
}

#[test]
fn clipnorm_scales_down_and_never_up() {
    assert_eq!(clipnorm_factor(16.0, 1.0), 0.25);
    assert_eq!(clipnorm_factor(16.0, 4.0), 1.0);
    assert_eq!(clipnorm_factor(16.0, 5.0), 1.0);
    assert_eq!(clipnorm_factor(0.0, 1.0), 1.0);
    assert_eq!(clipnorm_factor(f32::INFINITY, 1.0), 0.0);
    assert!(clipnorm_factor(f32::NAN, 1.0).is_nan());
}

#[test]
fn adam_still_steps_after_a_long_training() {
    let mut record = Record::new(&ADAM);
    let before = record.values.clone();
    update_record(&plain(ADAM), &scalars(u64::MAX), &mut record.values, &gradient(1));
    assert!(record.values.iter().zip(&before).all(|(after, before)| after.is_finite() && after != before));
}

#[test]
fn wrong_hyper_parameters_are_told_by_name_rule_and_value() {
    let sgd = |momentum| Rule::Sgd(Sgd { momentum, nesterov: false });
    let adam = |beta_1, beta_2, epsilon| Rule::Adam(Adam { beta_1, beta_2, epsilon, amsgrad: false });
    let adagrad =
        |initial_accumulator_value| Rule::Adagrad(Adagrad { initial_accumulator_value, epsilon: 1e-7 });
    let rmsprop = |rho, momentum| Rule::RmsProp(RmsProp { rho, momentum, epsilon: 1e-7, centered: false });
    let ftrl = |learning_rate_power, beta| {
        Rule::Ftrl(Ftrl {
            learning_rate_power,
            initial_accumulator_value: 0.1,
            l1_regularization_strength: 0.0,
            l2_regularization_strength: 0.0,
            l2_shrinkage_regularization_strength: 0.0,
            beta,
        })
    };
    for (rule, message) in [
        (sgd(1.5), "`momentum` must be between 0 and 1. Received: 1.5"),
        (sgd(f64::NAN), "`momentum` must be between 0 and 1. Received: NaN"),
        (adam(1.0, 0.9, 1e-7), "`beta_1` must be at least 0 and below 1 as a float32. Received: 1"),
        (
            adam(0.9, 1.0 - 1e-12, 1e-7),
            "`beta_2` must be at least 0 and below 1 as a float32. Received: 0.999999999999",
        ),
        (adam(0.9, 0.9, -1e-7), "`epsilon` must be finite and not negative. Received: -0.0000001"),
        (adam(0.9, 0.9, f64::INFINITY), "`epsilon` must be finite and not negative. Received: inf"),
        (adagrad(-0.1), "`initial_accumulator_value` must be finite and not negative. Received: -0.1"),
        (rmsprop(-0.1, 0.0), "`rho` must be between 0 and 1. Received: -0.1"),
        (rmsprop(0.9, 2.0), "`momentum` must be between 0 and 1. Received: 2"),
        (ftrl(0.5, 0.0), "`learning_rate_power` must be finite and not positive. Received: 0.5"),
        (ftrl(-0.5, -1.0), "`beta` must be finite and not negative. Received: -1"),
    ] {
        assert_eq!(rule.validate().unwrap_err().to_string(), message);
    }
}

#[test]
fn wrong_clipping_and_decay_are_told_by_name_rule_and_value() {
    let update = plain(SGD);
    for (update, message) in [
        (
            Update { weight_decay: Some(-0.5), ..update },
            "`weight_decay` must be finite and not negative. Received: -0.5",
        ),
        (Update { clipvalue: Some(0.0), ..update }, "`clipvalue` must be finite and above 0. Received: 0"),
        (
            Update { clipnorm: Some(f32::INFINITY), ..update },
            "`clipnorm` must be finite and above 0. Received: inf",
        ),
        (
            Update { clipnorm: Some(1.0), clipvalue: Some(2.0), ..update },
            "Only one of `clipnorm` and `clipvalue` can be set. Received: clipnorm=1, clipvalue=2",
        ),
        (
            Update { rule: Rule::Sgd(Sgd { momentum: -1.0, nesterov: false }), ..update },
            "`momentum` must be between 0 and 1. Received: -1",
        ),
    ] {
        assert_eq!(update.validate().unwrap_err().to_string(), message);
    }
    let all = Update { weight_decay: Some(0.0), clipnorm: Some(1.0), ..update };
    all.validate().unwrap();
}
