//! Which new keys of training get a row: those that have come often enough, or some by chance.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::key::{Key, hash};

/// What a count takes of a policy's memory, in bytes: more than on the host, and a third of what it may take on a device.
pub const BYTES_OF_COUNT: u64 = 64;
/// The highest threshold of a policy whose memory is limited. Counts from the threshold on are equal where the lowest are forgotten.
pub const MAX_LIMITED_THRESHOLD: u32 = 4095;

/// Which new keys of a step get a row. A sight of a key is an id of it in a lookup whose gradients are committed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Admission {
    /// Those with so many sights. Until then they are counted.
    Frequency {
        /// Number of sights from which on a key gets a row.
        threshold: u32,
        /// Whether all ids of a key in a step are one sight.
        #[serde(default)]
        once_per_step: bool,
        /// After so many steps all counts are halved, and rounded down. `None`: never.
        #[serde(default)]
        half_life: Option<u64>,
        /// Bytes for the counts, [`BYTES_OF_COUNT`] for each. At the end of a step the lowest are forgotten until the others fit, as
        /// [`Admission::max_counts`] says. `None`: as many as there are keys.
        #[serde(default)]
        memory: Option<u64>,
    },
    /// Each with this probability in each step in which it comes. Nothing is counted.
    Probability {
        /// The probability.
        probability: f64,
    },
}

impl Admission {
    /// Checks all fields.
    ///
    /// # Errors
    /// [`Error::Argument`] with the field, the rule and the value.
    pub fn validate(&self) -> Result<()> {
        match *self {
            Admission::Frequency { threshold: 0, .. } => {
                Err(Error::argument("`threshold` must be at least 1. Received: 0"))
            }
            Admission::Frequency { half_life: Some(0), .. } => {
                Err(Error::argument("`half_life` must be at least 1 step. Received: 0"))
            }
            Admission::Frequency { memory: Some(bytes), .. } if bytes < BYTES_OF_COUNT => {
                Err(Error::argument(format!(
                    "`memory` must be at least {BYTES_OF_COUNT} bytes. Received: {bytes}"
                )))
            }
            Admission::Frequency { threshold, memory: Some(_), .. } if threshold > MAX_LIMITED_THRESHOLD => {
                Err(Error::argument(format!(
                    "`threshold` must be at most {MAX_LIMITED_THRESHOLD} where `memory` is given. Received: {threshold}"
                )))
            }
            Admission::Probability { probability } if !(0.0..=1.0).contains(&probability) => {
                Err(Error::argument(format!("`probability` must be from 0 to 1. Received: {probability}")))
            }
            _ => Ok(()),
        }
    }

    /// Whether keys without a row are counted.
    pub fn counts(self) -> bool {
        matches!(self, Admission::Frequency { .. })
    }

    /// Whether it matters how many ids a key has in a step.
    pub fn counts_ids(self) -> bool {
        matches!(self, Admission::Frequency { once_per_step: false, .. })
    }

    /// Returns the number of sights of a key that has so many ids in a step.
    pub fn sights(self, num_ids: u64) -> u64 {
        if self.counts_ids() { num_ids } else { 1 }
    }

    /// Whether a key gets a row in a step. `sights`: its sights so far, with those of this step.
    pub fn admits(self, sights: u32, seed: u64, key: Key, step: u64) -> bool {
        match self {
            Admission::Frequency { threshold, .. } => sights >= threshold,
            Admission::Probability { probability } => draw(seed, key, step) < probability,
        }
    }

    /// Returns the number of counts that the policy's memory holds, if it is limited. Once a step ends with more, the lowest are forgotten: so
    /// many whole numbers of sights that at most 63 of 64 parts of this number stay.
    pub fn max_counts(self) -> Option<u64> {
        let Admission::Frequency { memory, .. } = self else { return None };
        memory.map(|bytes| bytes / BYTES_OF_COUNT)
    }

    /// Returns the policy of one of `num_owners` that share the memory.
    pub fn share(self, num_owners: u64) -> Admission {
        match self {
            Admission::Frequency { threshold, once_per_step, half_life, memory } => Admission::Frequency {
                threshold,
                once_per_step,
                half_life,
                memory: memory.map(|bytes| (bytes / BYTES_OF_COUNT).div_ceil(num_owners) * BYTES_OF_COUNT),
            },
            Admission::Probability { .. } => self,
        }
    }

    /// Whether all counts are halved after this many steps.
    pub fn halves_after(self, steps: u64) -> bool {
        matches!(self, Admission::Frequency { half_life: Some(every), .. } if steps.is_multiple_of(every))
    }
}

/// Returns a number of sights with more sights. It stays at the highest number that fits.
pub fn sum_of_sights(sights: u32, more: u64) -> u32 {
    sights.saturating_add(u32::try_from(more).unwrap_or(u32::MAX))
}

/// Returns the highest count that is forgotten, if there are more than `max` counts. `num_by_count`: how many counts have each value from 0 on;
/// the last number is of all higher values together. That of 0 is 0.
pub fn highest_forgotten(num_by_count: &[u64], max: u64) -> Option<u32> {
    let mut left: u64 = num_by_count.iter().sum();
    if left <= max {
        return None;
    }
    let stays = max - max / 64;
    let highest = num_by_count.iter().position(|num| {
        left -= num;
        left <= stays
    });
    highest.map(|count| count as u32)
}

/// A number in `[0, 1)` that depends on nothing else.
fn draw(seed: u64, key: Key, step: u64) -> f64 {
    let bits = hash(hash(hash(seed) ^ key).wrapping_add(hash(step)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_admitted_at_its_threshold() {
        let each =
            Admission::Frequency { threshold: 3, once_per_step: false, half_life: Some(4), memory: None };
        let once = Admission::Frequency { threshold: 3, once_per_step: true, half_life: None, memory: None };
        assert_eq!((each.sights(5), once.sights(5)), (5, 1));
        assert_eq!([2, 3, 4].map(|sights| each.admits(sights, 0, 7, 1)), [false, true, true]);
        assert!(each.halves_after(8) && !each.halves_after(9) && !once.halves_after(8));
    }

    #[test]
    fn the_lowest_counts_are_forgotten_if_there_are_too_many() {
        assert_eq!(highest_forgotten(&[0, 5, 3, 2], 10), None);
        assert_eq!(highest_forgotten(&[0, 5, 3, 2], 9), Some(1));
        assert_eq!(highest_forgotten(&[0, 5, 3, 2], 4), Some(2));
        assert_eq!(highest_forgotten(&[0, 5, 3, 2], 1), Some(3));
        // More than are too many go, so that this is rare.
        assert_eq!(highest_forgotten(&[0, 1, 1, 640], 641), Some(3));
        let policy =
            Admission::Frequency { threshold: 3, once_per_step: false, half_life: None, memory: Some(1000) };
        assert_eq!((policy.max_counts(), policy.share(4).max_counts()), (Some(15), Some(4)));
    }

    #[test]
    fn keys_are_admitted_by_chance_anew_in_each_step() {
        let some = Admission::Probability { probability: 0.25 };
        let admitted = |step| {
            (0..10_000).filter(|&key| some.admits(0, 5, key, step)).collect::<std::collections::BTreeSet<_>>()
        };
        let (first, second) = (admitted(1), admitted(2));
        for admitted in [&first, &second] {
            assert!((2350..2650).contains(&admitted.len()), "{}", admitted.len());
        }
        let both = first.intersection(&second).count();
        assert!((540..710).contains(&both), "{both}");
        let [never, always] = [0.0, 1.0].map(|probability| Admission::Probability { probability });
        assert!((0..1000).all(|key| always.admits(0, 5, key, 1) && !never.admits(0, 5, key, 1)));
    }

    #[test]
    fn wrong_fields_are_refused() {
        let frequency = |threshold, half_life, memory| Admission::Frequency {
            threshold,
            once_per_step: false,
            half_life,
            memory,
        };
        let chance = |probability| Admission::Probability { probability };
        for wrong in [
            frequency(0, None, None),
            frequency(1, Some(0), None),
            frequency(1, None, Some(63)),
            frequency(4096, None, Some(64)),
            chance(-0.1),
            chance(1.5),
            chance(f64::NAN),
        ] {
            assert!(wrong.validate().is_err(), "{wrong:?}");
        }
        for right in [
            frequency(1, None, None),
            frequency(4096, Some(1), None),
            frequency(4095, None, Some(64)),
            chance(0.0),
            chance(1.0),
        ] {
            right.validate().unwrap();
        }
    }
}
