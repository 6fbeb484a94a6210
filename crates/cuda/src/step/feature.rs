//! A feature of a layer's call, as it lies in device memory.

use sok_core::batch::Combiner;
use sok_core::error::{Error, Result};
use sok_core::key::Key;

/// Integer types of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    Wide,
    Signed,
    Unsigned,
    /// 64-bit ids in two words each.
    Words,
}

/// The ids of a feature in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    pub address: u64,
    /// Of the high words, if they come apart.
    pub high: u64,
    pub key_type: KeyType,
    pub len: usize,
}

/// Which ids are combined into one output row.
#[derive(Clone, Copy, Debug)]
pub enum Bags {
    /// None: a row an id.
    Each,
    Fixed {
        num_bags: usize,
        hotness: usize,
    },
    /// `splits`: `(num_bags + 1,)`, int64 if `wide`, else int32.
    Ragged {
        splits: u64,
        wide: bool,
        num_bags: usize,
    },
}

/// A feature of a call, as it lies in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Feature<'a> {
    pub name: &'a str,
    /// Number of its table in the group.
    pub table: usize,
    pub ids: Ids,
    pub bags: Bags,
    pub combiner: Combiner,
    /// float32, one an id.
    pub weights: Option<u64>,
    pub padding_key: Option<Key>,
    /// float32 `(bags, dim)`, all of it written.
    pub rows: u64,
}

impl Feature<'_> {
    pub fn num_bags(&self) -> usize {
        match self.bags {
            Bags::Each => self.ids.len,
            Bags::Fixed { num_bags, .. } | Bags::Ragged { num_bags, .. } => num_bags,
        }
    }

    /// What is the same for all ids, where it is.
    pub(super) fn scale(&self) -> f32 {
        match self.bags {
            Bags::Fixed { hotness, .. } => self.combiner.scale(hotness as f32, hotness as f32),
            _ => 1.0,
        }
    }

    /// Whether what a gradient is multiplied by differs from id to id.
    pub(super) fn is_weighted(&self) -> bool {
        let differs = match self.bags {
            Bags::Each | Bags::Fixed { hotness: 1, .. } => false,
            Bags::Fixed { .. } => self.padding_key.is_some(),
            Bags::Ragged { .. } => true,
        };
        self.weights.is_some() || (self.combiner != Combiner::Sum && differs)
    }

    /// Splits that are kept for the gradients of its weights.
    pub(super) fn num_kept_splits(&self) -> usize {
        match self.bags {
            Bags::Ragged { num_bags, .. } if self.weights.is_some() => num_bags + 1,
            _ => 0,
        }
    }

    /// # Errors
    /// [`Error::Argument`] if lengths do not add up.
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
            rows: 0,
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
