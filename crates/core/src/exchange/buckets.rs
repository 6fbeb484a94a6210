//! The keys of a call, sorted by the rank that owns them.

use std::ops::Range;

use crate::error::Result;
use crate::exchange::placement::{Placement, owner};
use crate::key::Key;
use crate::memory;

const WHAT: &str = "the keys of a call";

/// The owners of a table's keys, as one rank sees them.
#[derive(Clone, Copy, Debug)]
pub struct Owners {
    /// Where the rows of the table are.
    pub placement: Placement,
    /// Whether the table has a fixed vocabulary.
    pub is_static: bool,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
}

impl Owners {
    /// Returns the rank whose row of `key` this rank reads.
    #[inline(always)]
    pub fn of(&self, key: Key) -> usize {
        match self.placement {
            Placement::Distributed => owner(key, self.is_static, self.world_size),
            Placement::Localized(rank) => rank,
            Placement::Replicated => self.rank,
        }
    }

    /// Whether another rank has all keys.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.placement, Placement::Localized(rank) if rank != self.rank)
    }

    /// Whether each rank has all keys.
    pub fn is_replicated(&self) -> bool {
        self.placement == Placement::Replicated
    }
}

/// Keys, those of rank 0 first. Keys of the same rank are in the order in which they came.
#[derive(Debug, Default)]
pub struct Buckets {
    keys: Vec<Key>,
    /// `(world_size + 1,)`: where the keys of each rank start.
    starts: Vec<usize>,
    /// Index of each key among the sorted ones, in the order in which they came.
    places: Vec<u32>,
    is_replicated: bool,
}

impl Buckets {
    /// Sorts keys by their owners, by counting.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(keys: &[Key], owners: &Owners) -> Result<Buckets> {
        let mut starts = memory::filled(0, owners.world_size + 1, WHAT)?;
        keys.iter().for_each(|&key| starts[owners.of(key) + 1] += 1);
        for rank in 0..owners.world_size {
            starts[rank + 1] += starts[rank];
        }
        let mut ends = memory::collect(starts.iter().copied(), WHAT)?;
        let (mut sorted, mut places) =
            (memory::filled(0, keys.len(), WHAT)?, memory::with_capacity(keys.len(), WHAT)?);
        for &key in keys {
            let end = &mut ends[owners.of(key)];
            sorted[*end] = key;
            places.push(*end as u32);
            *end += 1;
        }
        Ok(Buckets { keys: sorted, starts, places, is_replicated: owners.is_replicated() })
    }

    /// Whether they are of a replicated table.
    pub fn is_replicated(&self) -> bool {
        self.is_replicated
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Index of each key among the sorted ones, in the order in which they came.
    pub fn places(&self) -> &[u32] {
        &self.places
    }

    /// All keys, sorted.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// The keys that are sent to a rank: those that it owns. A replicated table's go to all ranks, so that all make the same changes.
    pub fn sent_to(&self, rank: usize) -> Range<usize> {
        if self.is_replicated { 0..self.keys.len() } else { self.received_from(rank) }
    }

    /// The keys whose rows this rank reads from a rank.
    pub fn received_from(&self, rank: usize) -> Range<usize> {
        self.starts.get(rank).map_or(0..0, |&start| start..self.starts[rank + 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(placement: Placement, is_static: bool) -> Owners {
        Owners { placement, is_static, rank: 1, world_size: 3 }
    }

    #[test]
    fn keys_go_to_their_owners_and_come_back_in_order() {
        let keys = [7, 3, 4, 0, 9, 2, 1 << 40, 5];
        for placement in [Placement::Distributed, Placement::Localized(2), Placement::Replicated] {
            for is_static in [false, true] {
                let owners = owners(placement, is_static);
                let buckets = Buckets::new(&keys, &owners).unwrap();
                let back: Vec<Key> = buckets.places().iter().map(|&p| buckets.keys()[p as usize]).collect();
                assert_eq!(back, keys);
                let mut num_read = 0;
                for rank in 0..3 {
                    let read = buckets.received_from(rank);
                    num_read += read.len();
                    let of_rank: Vec<Key> = keys.into_iter().filter(|&key| owners.of(key) == rank).collect();
                    assert_eq!(&buckets.keys()[read.clone()], of_rank);
                    let sent = buckets.sent_to(rank);
                    assert!(if owners.is_replicated() { sent == (0..8) } else { sent == read });
                }
                assert_eq!(num_read, keys.len());
            }
        }
        let none = Buckets::new(&[], &owners(Placement::Distributed, false)).unwrap();
        assert!(none.is_empty() && none.sent_to(2).is_empty());
    }

    #[test]
    fn a_static_key_is_owned_by_its_remainder() {
        let buckets = Buckets::new(&[5, 3, 1, 4], &owners(Placement::Distributed, true)).unwrap();
        assert_eq!((buckets.keys(), buckets.places()), (&[3, 1, 4, 5][..], &[3, 0, 1, 2][..]));
    }
}
