//! The features of a table in a lookup.

use crate::contract::batch::{Bags, Combiner, Feature, Scores};
use crate::contract::table::{Insertion, OutOfVocabulary, TableConfig};
use crate::error::{Error, Result};
use crate::host::runs::RowCode;
use crate::key::Key;
use crate::memory;

/// A feature of the call, and its output.
pub struct FeatureOutput<'a> {
    /// Index of the feature in the call.
    pub number: usize,
    pub feature: Feature<'a>,
    /// `(bags, dim)`
    pub rows: &'a mut [f32],
}

#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// When keys without a record get one.
    pub insertion: Insertion,
    /// Whether to keep what `push` needs.
    pub save: bool,
    /// Whether the output of the call is larger than the cache.
    pub stream: bool,
}

impl Mode {
    /// Whether the lookup itself inserts.
    pub fn inserts(self) -> bool {
        self.insertion == Insertion::AtLookup
    }
}

/// Whether all ids of a feature are active, and none needs a coefficient.
pub(crate) fn is_plain(feature: &Feature, config: &TableConfig) -> bool {
    let lenient = config.vocabulary_size.is_some() && config.out_of_vocabulary == OutOfVocabulary::Zeros;
    feature.weights.is_none()
        && feature.padding_key.is_none()
        && !lenient
        && !matches!(feature.bags, Bags::Ragged(_))
}

/// How an id takes part in the call.
pub(crate) enum Role {
    /// It is looked up, may be inserted, and its row gets a gradient.
    Active,
    /// It has weight 0: it neither inserts nor changes a row, and adds nothing to its bag.
    Silent,
    Padding,
    Outside,
}

#[inline(always)]
pub(crate) fn role(feature: &Feature, config: &TableConfig, position: usize) -> Role {
    let key = feature.keys.get(position);
    if feature.padding_key == Some(key) {
        Role::Padding
    } else if !config.is_in_vocabulary(key) {
        Role::Outside
    } else if feature.weights.is_some_and(|w| w[position] == 0.0) {
        Role::Silent
    } else {
        Role::Active
    }
}

/// Appends the keys of the active ids of a feature that have a score, each with its score.
///
/// # Errors
/// [`Error::Memory`].
pub(crate) fn add_given_scores(
    config: &TableConfig,
    feature: &Feature,
    scores: &Scores,
    to: &mut Vec<(Key, u64)>,
) -> Result<()> {
    memory::reserve(to, scores.len(), "the scores of a call")?;
    for position in 0..scores.len() {
        let sent = scores.sent(position);
        if sent > 0 && matches!(role(feature, config, position), Role::Active) {
            to.push((feature.keys.get(position), sent - 1));
        }
    }
    Ok(())
}

/// How gradient rows of these features are numbered.
///
/// # Errors
/// [`Error::Argument`] if there are too many.
pub(crate) fn row_code(features: &[FeatureOutput]) -> Result<RowCode> {
    let max_bags = features.iter().map(|f| f.feature.num_bags()).max().unwrap_or(0);
    RowCode::new(features.len(), max_bags).ok_or_else(|| {
        Error::argument(format!(
            "{} features of {max_bags} rows on one table are too many for one call",
            features.len()
        ))
    })
}

/// Whether ids have coefficients.
pub(crate) fn is_weighted(features: &[FeatureOutput]) -> bool {
    features.iter().any(|f| {
        let feature = &f.feature;
        let is_scaled = feature.combiner != Combiner::Sum && !matches!(feature.bags, Bags::Each);
        feature.weights.is_some() || is_scaled
    })
}
