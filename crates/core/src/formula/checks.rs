//! What hyper-parameters may be.

use crate::error::{Error, Result};

/// Fails unless `holds` and `value` is finite as the float32 that it becomes.
pub(crate) fn check(name: &str, value: f64, holds: bool, rule: &str) -> Result<()> {
    if holds && (value as f32).is_finite() {
        return Ok(());
    }
    Err(Error::argument(format!("`{name}` must be {rule}. Received: {value}")))
}

pub(crate) fn check_not_negative(name: &str, value: f64) -> Result<()> {
    check(name, value, value >= 0.0, "finite and not negative")
}

pub(crate) fn check_not_positive(name: &str, value: f64) -> Result<()> {
    check(name, value, value <= 0.0, "finite and not positive")
}

pub(crate) fn check_fraction(name: &str, value: f64) -> Result<()> {
    check(name, value, (0.0..=1.0).contains(&value), "between 0 and 1")
}

/// The hyper-parameters of Adam and of formulas that keep its two moments.
pub(crate) fn check_moments(beta_1: f64, beta_2: f64, epsilon: f64) -> Result<()> {
    check_below_one("beta_1", beta_1)?;
    check_below_one("beta_2", beta_2)?;
    check_not_negative("epsilon", epsilon)
}

/// Below 1 also as a float32: Adam divides by `1 - beta` to the power of the step.
pub(crate) fn check_below_one(name: &str, value: f64) -> Result<()> {
    check(name, value, value >= 0.0 && (value as f32) < 1.0, "at least 0 and below 1 as a float32")
}
