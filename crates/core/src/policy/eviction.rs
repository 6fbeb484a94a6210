//! Which rows a full table removes: those with the lowest scores. A use of a row changes its score.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What the score of a row counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Score {
    /// The step of the last use, so the least recently used rows go first.
    Lru,
    /// The number of ids that have used the row, so the least frequently used rows go first.
    Lfu {
        /// After so many steps all scores are halved, and rounded down. `None`: never.
        half_life: Option<u64>,
    },
    /// The number that came with the ids in the last lookup that used the row, the highest of them.
    Custom,
}

impl Score {
    /// Whether the score of a row depends on the number of ids that use it.
    pub fn counts_ids(self) -> bool {
        matches!(self, Score::Lfu { .. })
    }

    /// Whether scores of both count the same.
    pub fn is_same_kind(self, other: Score) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// How a table at `max_capacity` makes room for new rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Eviction {
    /// The score of a row. Rows with the lowest go first, and of equal ones those with the lowest key, as an unsigned integer.
    pub score: Score,
    /// Whether lookups that are not of training use rows, too.
    #[serde(default)]
    pub counts_inference: bool,
    /// Whether rows that were removed are kept until they are taken.
    #[serde(default)]
    pub keeps_evicted: bool,
}

impl Eviction {
    /// Checks all fields.
    ///
    /// # Errors
    /// [`Error::Argument`] with the field, the rule and the value.
    pub fn validate(&self) -> Result<()> {
        match self.score {
            Score::Lfu { half_life: Some(0) } => {
                Err(Error::argument("`half_life` must be at least 1 step. Received: 0"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the score of a row that `num_ids` ids use in step `step`.
    pub fn score_after_use(&self, score: u64, step: u64, num_ids: u64) -> u64 {
        match self.score {
            Score::Lru => step,
            Score::Lfu { .. } => score.saturating_add(num_ids),
            Score::Custom => score,
        }
    }

    /// Returns the score of a new row in step `step`, before its first use.
    pub fn first_score(&self, step: u64) -> u64 {
        match self.score {
            Score::Lru => step,
            Score::Lfu { .. } | Score::Custom => 0,
        }
    }

    /// Whether all scores are halved after this many steps.
    pub fn halves_after(&self, steps: u64) -> bool {
        matches!(self.score, Score::Lfu { half_life: Some(every) } if steps.is_multiple_of(every))
    }
}

/// Returns the number of rows that a sweep removes if a table of `capacity` rows needs room for `needed`. Removing more than is needed
/// makes sweeps rare.
pub fn sweep_size(needed: u64, capacity: u64) -> u64 {
    needed.max(capacity / 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eviction(score: Score) -> Eviction {
        Eviction { score, counts_inference: false, keeps_evicted: false }
    }

    #[test]
    fn a_use_sets_the_step_or_adds_the_ids() {
        let (lru, lfu) = (eviction(Score::Lru), eviction(Score::Lfu { half_life: Some(10) }));
        assert_eq!((lru.first_score(7), lfu.first_score(7)), (7, 0));
        assert_eq!((lru.score_after_use(3, 9, 5), lfu.score_after_use(3, 9, 5)), (9, 8));
        assert_eq!(lfu.score_after_use(u64::MAX - 1, 9, 5), u64::MAX);
        assert!(lfu.halves_after(20) && !lfu.halves_after(21) && !lru.halves_after(20));
        let custom = eviction(Score::Custom);
        assert_eq!((custom.first_score(7), custom.score_after_use(3, 9, 5)), (0, 3));
        assert!(eviction(Score::Lfu { half_life: Some(0) }).validate().is_err());
    }

    #[test]
    fn a_sweep_removes_a_64th_unless_more_is_needed() {
        assert_eq!([sweep_size(3, 6400), sweep_size(300, 6400), sweep_size(1, 5)], [100, 300, 1]);
    }
}
