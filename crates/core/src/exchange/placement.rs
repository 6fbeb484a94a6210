//! Which rank owns a key.

use serde::{Deserialize, Serialize};

use crate::key::{Key, hash};

/// Where the rows of a table are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Each key on one rank, see [`owner`].
    #[default]
    Distributed,
    /// All keys on this rank.
    Localized(usize),
    /// All keys on every rank.
    Replicated,
}

/// Returns the rank that owns a key of a distributed table: `key % world_size` of a static table; of a dynamic table a hash of the key,
/// scaled to the number of ranks.
///
/// The hash is multiplied once more (Fibonacci hashing, Knuth, The Art of Computer Programming 3, 6.4), because a table's index uses
/// the bits of [`hash`] itself: keys of one owner must not share them.
#[inline(always)]
pub fn owner(key: Key, is_static: bool, world_size: usize) -> usize {
    if is_static {
        return (key % world_size as u64) as usize;
    }
    let mixed = hash(key).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    ((mixed * world_size as u64) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_share_keys_evenly_whatever_the_keys_have_in_common() {
        for world_size in [1, 2, 3, 7, 8, 64] {
            for stride in [1u64, 2, 8, 1 << 20, 1 << 40] {
                let mut counts = vec![0u64; world_size];
                (0..64_000u64).for_each(|i| counts[owner(i.wrapping_mul(stride), false, world_size)] += 1);
                let even = 64_000 / world_size as u64;
                assert!(
                    counts.iter().all(|&n| n.abs_diff(even) < even / 6 + 1),
                    "{world_size} {stride}: {counts:?}"
                );
            }
        }
    }

    #[test]
    fn keys_of_an_owner_have_all_low_and_all_high_bits_of_the_hash() {
        for world_size in [2, 8] {
            let mine: Vec<u64> =
                (0..100_000).filter(|&k| owner(k, false, world_size) == 1).map(hash).collect();
            for bits in [0, 60] {
                let mut counts = [0usize; 16];
                mine.iter().for_each(|h| counts[(h >> bits) as usize & 15] += 1);
                let even = mine.len() / 16;
                assert!(counts.iter().all(|&n| n.abs_diff(even) < even / 5), "{counts:?}");
            }
        }
    }

    #[test]
    fn owners_never_change() {
        let owners: Vec<usize> = [0, 1, 2, 3, u64::MAX, 1 << 63].map(|key| owner(key, false, 5)).to_vec();
        assert_eq!(owners, [0, 2, 3, 1, 3, 3]);
        assert_eq!([0, 1, 7].map(|key| owner(key, true, 3)), [0, 1, 1]);
    }
}
