//! The distinct keys of a lookup: their records, and the gradient rows that will be merged for each.

use std::ops::Range;

use crate::contract::batch::{Bags, Feature};
use crate::error::Result;
use crate::host::find::NO_MARK;
use crate::store::arena::RecordNumber;
use crate::store::region::Region;

/// Distinct keys of a table, or of a part of it, with their ids in the order (feature, position).
#[derive(Default)]
pub struct KeyRuns {
    num_keys: usize,
    num_ids: usize,
    /// `(num_keys,)`
    records: Region<u32>,
    /// `(num_keys,)`: end of a key's ids.
    ends: Region<u32>,
    /// `(num_ids,)`: the gradient row of each id as a [`RowCode`], sorted by key.
    rows: Region<u32>,
    /// `(num_ids,)`: factor of the gradient row. Empty if all are 1.
    coefficients: Region<f32>,
    is_weighted: bool,
}

/// The gradient rows of several features of a table as one number: feature | bag.
#[derive(Clone, Copy, Default)]
pub struct RowCode {
    /// Bits of the bag; 32 if there is one feature.
    shift: u32,
}

impl RowCode {
    /// `None` if features and bags do not fit into 32 bits.
    pub fn new(num_features: usize, max_bags: usize) -> Option<RowCode> {
        if num_features == 1 {
            return Some(RowCode { shift: 32 });
        }
        let shift = usize::BITS - max_bags.leading_zeros();
        (shift < 32 && num_features <= 1 << (32 - shift)).then_some(RowCode { shift })
    }

    #[inline(always)]
    pub fn encode(self, feature: usize, bag: usize) -> u32 {
        ((feature as u64) << self.shift | bag as u64) as u32
    }

    #[inline(always)]
    pub fn decode(self, code: u32) -> (usize, usize) {
        let code = u64::from(code);
        ((code >> self.shift) as usize, (code & ((1 << self.shift) - 1)) as usize)
    }
}

impl KeyRuns {
    pub fn num_keys(&self) -> usize {
        self.num_keys
    }

    pub fn num_ids(&self) -> usize {
        self.num_ids
    }

    pub fn num_bytes(&self) -> usize {
        self.records.num_bytes()
            + self.ends.num_bytes()
            + self.rows.num_bytes()
            + self.coefficients.num_bytes()
    }

    pub fn records(&self) -> &[RecordNumber] {
        &self.records[..self.num_keys]
    }

    /// Ends of the keys' ids.
    pub fn ends(&self) -> &[u32] {
        &self.ends[..self.num_keys]
    }

    /// By key: which of the sorted ids are its own.
    #[inline(always)]
    pub fn ranges(&self) -> impl Iterator<Item = Range<u32>> {
        let mut start = 0;
        self.ends().iter().map(move |&end| std::mem::replace(&mut start, end)..end)
    }

    #[inline(always)]
    pub fn rows(&self) -> &[u32] {
        &self.rows[..self.num_ids]
    }

    /// `None`: all are 1.
    #[inline(always)]
    pub fn coefficients(&self) -> Option<&[f32]> {
        self.is_weighted.then(|| &self.coefficients[..self.num_ids])
    }

    /// First half of a counting sort: stores the keys and computes the range of each key's ids. `add` then stores the ids in order. The
    /// runs are complete after the last one.
    ///
    /// `keys`: record and number of ids of each distinct key.
    pub fn start(
        &mut self,
        keys: impl ExactSizeIterator<Item = (RecordNumber, u32)>,
        is_weighted: bool,
    ) -> Result<()> {
        self.num_keys = keys.len();
        self.is_weighted = is_weighted;
        self.records.grow_amortized(self.num_keys)?;
        self.ends.grow_amortized(self.num_keys)?;
        let mut end = 0;
        for (key, (record, count)) in keys.enumerate() {
            (self.records[key], self.ends[key]) = (record, end);
            end += count;
        }
        self.num_ids = end as usize;
        self.rows.grow_amortized(self.num_ids)?;
        if is_weighted { self.coefficients.grow_amortized(self.num_ids) } else { Ok(()) }
    }

    /// Adds an id of distinct key number `key`.
    #[inline(always)]
    pub fn add(&mut self, key: u32, row: u32) -> usize {
        let end = &mut self.ends[key as usize];
        let place = *end as usize;
        self.rows[place] = row;
        *end += 1;
        place
    }

    #[inline(always)]
    pub fn add_weighted(&mut self, key: u32, row: u32, coefficient: f32) {
        let place = self.add(key, row);
        self.coefficients[place] = coefficient;
    }
}

/// Adds the ids of a feature whose coefficients are all 1. `marks`: number of the key of each id, or [`NO_MARK`].
pub fn sort_plain(feature: &Feature, marks: &[u32], first_row: u32, runs: &mut KeyRuns) {
    let mut add = |bag: usize, marks: &[u32]| {
        for &key in marks.iter().filter(|&&key| key != NO_MARK) {
            runs.add(key, first_row + bag as u32);
        }
    };
    match feature.bags {
        Bags::Each | Bags::Fixed { hotness: 1, .. } => {
            marks.iter().enumerate().for_each(|(bag, mark)| add(bag, std::slice::from_ref(mark)));
        }
        Bags::Fixed { hotness, .. } => {
            marks.chunks(hotness.max(1)).enumerate().for_each(|(bag, marks)| add(bag, marks))
        }
        Bags::Ragged(_) => (0..feature.num_bags()).for_each(|bag| add(bag, &marks[feature.bag(bag)])),
    }
}

/// Adds the ids of a feature with their coefficients.
pub fn sort_weighted(
    feature: &Feature,
    marks: &[u32],
    coefficients: &[f32],
    first_row: u32,
    runs: &mut KeyRuns,
) {
    for bag in 0..feature.num_bags() {
        for position in feature.bag(bag).filter(|&position| marks[position] != NO_MARK) {
            runs.add_weighted(marks[position], first_row + bag as u32, coefficients[position]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_codes_come_back() {
        for (features, bags) in [(1, u32::MAX as usize), (2, 1), (26, 16_384), (200, 1 << 20), (3, 0)] {
            let code = RowCode::new(features, bags).unwrap();
            for feature in [0, features - 1] {
                for bag in [0, bags.saturating_sub(1)] {
                    assert_eq!(code.decode(code.encode(feature, bag)), (feature, bag));
                }
            }
        }
        assert!(RowCode::new(1 << 20, 1 << 20).is_none());
    }
}
