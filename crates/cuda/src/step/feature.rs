//! A feature of a layer's call, as it lies in device memory.

use sok_core::contract::batch::Combiner;
use sok_core::contract::table::TableConfig;
use sok_core::error::{Error, Result};
use sok_core::key::Key;
use sok_core::row_type::RowType;

pub use crate::abi::{KeyType, ScoreType};

/// The ids of a feature in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    /// Address of the ids, or of their low words if `key_type` is `Words`.
    pub address: u64,
    /// Address of the high words if `key_type` is `Words`, otherwise 0.
    pub high: u64,
    /// Integer type of the ids.
    pub key_type: KeyType,
    /// Number of ids.
    pub len: usize,
}

/// The scores of a feature's ids in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// Address of a score for each id.
    pub address: u64,
    /// Their type.
    pub score_type: ScoreType,
}

/// Which ids are combined into one output row.
#[derive(Clone, Copy, Debug)]
pub enum Bags {
    /// None: each id has a row.
    Each,
    /// All bags have the same number of ids.
    Fixed {
        /// Number of output rows.
        num_bags: usize,
        /// Number of ids of each bag.
        hotness: usize,
    },
    /// Bags of different numbers of ids.
    Ragged {
        /// Address of the row splits, `(num_bags + 1,)`.
        splits: u64,
        /// Whether splits are int64; otherwise they are int32.
        wide: bool,
        /// Number of output rows.
        num_bags: usize,
    },
}

/// A feature of a call, as it lies in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Feature<'a> {
    /// Name for messages.
    pub name: &'a str,
    /// Index of the feature's table in the group.
    pub table: usize,
    /// The ids of all bags, one bag after the other.
    pub ids: Ids,
    /// How ids form bags.
    pub bags: Bags,
    /// How the rows of a bag become one row.
    pub combiner: Combiner,
    /// Address of the weights, float32 with one for each id.
    pub weights: Option<u64>,
    /// Whether ids are looked up after all others, without insertion and without gradients. Such features come last.
    pub is_silent: bool,
    /// Whether the rank that owns the table pools the bags, and merges their gradients. The ids have places, but no part in the sort.
    pub at_owner: bool,
    /// Address of a u64 for each id: how many ids it stands for. 0 if each stands for itself.
    pub id_counts: u64,
    /// The scores that come with the ids, for a table with the policy `Custom`.
    pub scores: Option<Scores>,
    /// The key that means "no id".
    pub padding_key: Option<Key>,
    /// Address of the output, `(bags, dim)`. Every element is written.
    pub rows: u64,
    /// Type of the numbers of the output and of its gradients, the same for all features of a call.
    pub array_type: RowType,
}

/// Returns the type of the numbers of a call's outputs.
pub(super) fn array_type_of(features: &[Feature]) -> RowType {
    features.first().map_or(RowType::Float32, |feature| feature.array_type)
}

impl Feature<'_> {
    /// Returns the feature under another name.
    pub fn named<'a>(&self, name: &'a str) -> Feature<'a> {
        let Feature { table, ids, bags, combiner, weights, padding_key, .. } = *self;
        let Feature { is_silent, at_owner, id_counts, scores, rows, array_type, .. } = *self;
        Feature {
            name,
            table,
            ids,
            bags,
            combiner,
            weights,
            is_silent,
            at_owner,
            id_counts,
            scores,
            padding_key,
            rows,
            array_type,
        }
    }

    /// Number of output rows. Without bags, it is the number of ids.
    pub fn num_bags(&self) -> usize {
        match self.bags {
            Bags::Each => self.ids.len,
            Bags::Fixed { num_bags, .. } | Bags::Ragged { num_bags, .. } => num_bags,
        }
    }

    /// Returns the factor of the sum of a bag, if all bags have the same number of ids; otherwise 1.
    pub(super) fn scale(&self) -> f32 {
        match self.bags {
            Bags::Fixed { hotness, .. } => self.combiner.scale(hotness as f32, hotness as f32),
            _ => 1.0,
        }
    }

    /// Returns whether the factor of a gradient may differ from id to id.
    pub(super) fn is_weighted(&self) -> bool {
        let differs = match self.bags {
            Bags::Each | Bags::Fixed { hotness: 1, .. } => false,
            Bags::Fixed { .. } => self.padding_key.is_some(),
            Bags::Ragged { .. } => true,
        };
        self.weights.is_some() || (self.combiner != Combiner::Sum && differs)
    }

    /// Returns the number of splits that are kept for the gradients of the feature's weights.
    pub(super) fn num_kept_splits(&self) -> usize {
        match self.bags {
            Bags::Ragged { num_bags, .. } if self.weights.is_some() => num_bags + 1,
            _ => 0,
        }
    }

    /// Checks that the table of the feature takes scores, if there are some.
    ///
    /// # Errors
    /// [`Error::Argument`] if it does not.
    pub fn check_scores(&self, config: &TableConfig) -> Result<()> {
        if self.scores.is_some() { config.check_takes_scores(self.name) } else { Ok(()) }
    }

    /// Checks the lengths of ids and bags.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are too many ids, or ids and bags do not agree.
    pub fn validate(&self) -> Result<()> {
        let fail = |what: String| Err(Error::argument(format!("feature `{}`: {what}", self.name)));
        if self.ids.len > u32::MAX as usize / 4 {
            return fail(format!("a batch holds at most {} ids. Received: {}", u32::MAX / 4, self.ids.len));
        }
        match self.bags {
            Bags::Fixed { num_bags, hotness } if num_bags.checked_mul(hotness) != Some(self.ids.len) => {
                fail(format!("{} ids do not make {num_bags} bags of {hotness}", self.ids.len))
            }
            Bags::Ragged { num_bags: 0, .. } if self.ids.len > 0 => {
                fail(format!("row_splits of no bags must come without ids. Received: {}", self.ids.len))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feature(bags: Bags, combiner: Combiner, weights: bool, padding_key: Option<Key>) -> Feature<'static> {
        let ids = Ids { address: 0, high: 0, key_type: KeyType::Wide, len: 12 };
        Feature {
            name: "f",
            table: 0,
            ids,
            bags,
            combiner,
            weights: weights.then_some(1),
            padding_key,
            is_silent: false,
            at_owner: false,
            id_counts: 0,
            scores: None,
            rows: 0,
            array_type: RowType::Float32,
        }
    }

    #[test]
    fn a_coefficient_an_id_is_kept_only_where_it_differs_from_id_to_id() {
        let fixed = Bags::Fixed { num_bags: 3, hotness: 4 };
        let ragged = Bags::Ragged { splits: 1, wide: true, num_bags: 5 };
        let is_weighted =
            |bags, combiner, weights, padding| feature(bags, combiner, weights, padding).is_weighted();
        assert!(!is_weighted(Bags::Each, Combiner::Mean, false, Some(0)));
        assert!(!is_weighted(fixed, Combiner::Mean, false, None));
        assert!(!is_weighted(ragged, Combiner::Sum, false, Some(0)));
        assert!(!is_weighted(Bags::Fixed { num_bags: 12, hotness: 1 }, Combiner::Mean, false, Some(0)));
        assert!(is_weighted(fixed, Combiner::Mean, false, Some(0)));
        assert!(is_weighted(ragged, Combiner::Sqrtn, false, None));
        assert!(is_weighted(Bags::Each, Combiner::Sum, true, None));
        assert_eq!(feature(fixed, Combiner::Mean, false, None).scale(), 0.25);
        assert_eq!(feature(fixed, Combiner::Sqrtn, false, None).scale(), 0.5);
        assert_eq!(feature(ragged, Combiner::Mean, false, None).scale(), 1.0);
    }

    #[test]
    fn lengths_that_do_not_add_up_are_refused() {
        let wrong = feature(Bags::Fixed { num_bags: 5, hotness: 4 }, Combiner::Sum, false, None);
        assert_eq!(wrong.validate().unwrap_err().to_string(), "feature `f`: 12 ids do not make 5 bags of 4");
        let none = feature(Bags::Ragged { splits: 1, wide: true, num_bags: 0 }, Combiner::Sum, false, None);
        assert!(none.validate().unwrap_err().to_string().contains("no bags must come without ids"));
        assert!(feature(Bags::Each, Combiner::Sum, false, None).validate().is_ok());
    }
}
