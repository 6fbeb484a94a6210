//! Bags of a localized table that its owner pools for another rank, where pooled bags are fewer bytes than rows.
//!
//! The rank sends its distinct keys, and for each id the number of its key. The owner looks up the keys of all ranks, pools the rows, and
//! keeps the sorted ids. The commit sends the gradients of the bags, and the owner merges them. Pooling and merging have the same order as
//! on the rank itself, so the results have the same bits.

use super::pool::{NumberedIds, pool_table};
use super::received::ReceivedRows;
use super::requests::{Request, Requests};
use crate::contract::batch::{Bags, Combiner, Feature, Keys, Splits};
use crate::error::{Error, Result};
use crate::exchange::message::{Reader, Writer};
use crate::exchange::placement::Placement;
use crate::host::features::FeatureOutput;
use crate::host::find::NO_MARK;
use crate::host::lookup::Looked;
use crate::host::pooling::{OUTSIDE, PADDING};
use crate::host::push::{OutputGradients, SavedLookup, SavedTable, Spare, merge_push};
use crate::host::runs::KeyRuns;
use crate::host::table::HostTable;
use crate::key::Key;
use crate::memory;
use crate::pool::Pool;
use crate::store::region::Region;

const WHAT: &str = "the bags of other ranks";

/// Returns the owner of a localized table, if it is another rank and its pooled bags are fewer bytes than the rows.
///
/// Returns `None` for features with weights, because the gradients of the weights need the rows.
pub fn pooling_owner(
    requests: &Requests,
    request: &Request,
    features: &[FeatureOutput],
    dim: usize,
    save: bool,
) -> Option<usize> {
    let Placement::Localized(owner) = requests.owners.placement else { return None };
    let is_asked = owner != requests.owners.rank && !request.keys.is_empty();
    if !is_asked || features.iter().any(|output| output.feature.weights.is_some()) {
        return None;
    }
    let num_bags: usize = features.iter().map(|output| output.feature.num_bags()).sum();
    let of_gradients = if save { request.keys.len() } else { 0 };
    let of_rows = 4 * dim * (request.num_rows() + of_gradients);
    let of_bags = 4 * dim * num_bags * (1 + usize::from(save));
    (of_bags + bytes_of_ids(features) < of_rows).then_some(owner)
}

/// Number of bytes that [`write_features`] writes.
fn bytes_of_ids(features: &[FeatureOutput]) -> usize {
    let bytes = |FeatureOutput { feature, .. }: &FeatureOutput| {
        let splits = if let Bags::Ragged(splits) = feature.bags { splits.len() } else { 0 };
        4 * (feature.keys.len() + splits) + 32
    };
    features.iter().map(bytes).sum()
}

/// Writes the bags of features for the owner that pools them. `rows`: number of each id's row.
pub fn write_features(features: &[FeatureOutput], rows: &[u32], writer: &mut Writer) -> Result<()> {
    writer.reserve(bytes_of_ids(features))?;
    let mut start = 0;
    for FeatureOutput { feature, .. } in features {
        let positions = start..start + feature.keys.len();
        start = positions.end;
        let kind = match feature.bags {
            Bags::Each => 0,
            Bags::Fixed { .. } => 1,
            Bags::Ragged(_) => 2,
        };
        let sizes = [feature.num_bags(), feature.keys.len()].map(|size| size as u64);
        writer.numbers(&[feature.combiner as u64, kind, sizes[0], sizes[1]])?;
        if let Bags::Ragged(splits) = feature.bags {
            let splits = (0..splits.len()).map(|index| splits.get(index) as u32);
            writer.words(&memory::collect(splits, WHAT)?)?;
        }
        writer.words(&rows[positions])?;
    }
    Ok(())
}

enum AskedBags {
    Each,
    Fixed { num_bags: usize, hotness: usize },
    Ragged(Vec<i32>),
}

/// A feature that is pooled for another rank.
pub struct AskedFeature {
    combiner: Combiner,
    bags: AskedBags,
    /// Of each id: number of its row among those asked for, from 1, or one that stands for no row.
    rows: Vec<u32>,
}

impl AskedFeature {
    /// Reads what [`write_features`] has written of a feature. `num_keys`: how many the rank asks for.
    pub fn read(num_keys: usize, from: usize, reader: &mut Reader) -> Result<AskedFeature> {
        let is_wrong = || Error::Rank {
            rank: from,
            what: "asks for bags with an invalid combiner, bound or row".into(),
        };
        let [combiner, kind] = [reader.number()?, reader.number()?];
        let [num_bags, num_ids] = [reader.number()? as usize, reader.number()? as usize];
        let combiner = [Combiner::Sum, Combiner::Mean, Combiner::Sqrtn]
            .into_iter()
            .find(|known| *known as u64 == combiner)
            .ok_or_else(is_wrong)?;
        let bags = match kind {
            0 => AskedBags::Each,
            1 => AskedBags::Fixed { num_bags, hotness: num_ids.checked_div(num_bags).unwrap_or(0) },
            2 => {
                let splits = reader.words(num_bags.saturating_add(1))?;
                AskedBags::Ragged(splits.into_iter().map(|split| split as i32).collect())
            }
            _ => return Err(is_wrong()),
        };
        let asked = AskedFeature { combiner, bags, rows: reader.words(num_ids)? };
        let is_row = |&row: &u32| (1..=num_keys).contains(&(row as usize)) || row >= OUTSIDE;
        let feature = asked.feature();
        if feature.validate().is_err() || feature.num_bags() != num_bags || !asked.rows.iter().all(is_row) {
            return Err(is_wrong());
        }
        Ok(asked)
    }

    pub fn num_ids(&self) -> usize {
        self.rows.len()
    }

    fn feature(&self) -> Feature<'_> {
        let stands_for_none = self.rows.iter().any(|&row| row >= OUTSIDE);
        Feature {
            name: "of another rank",
            table: 0,
            // Pooling reads rows by number. These keys are not looked up; one of them says whether there is padding.
            keys: Keys::U32(&self.rows),
            bags: match &self.bags {
                AskedBags::Each => Bags::Each,
                AskedBags::Fixed { num_bags, hotness } => {
                    Bags::Fixed { num_bags: *num_bags, hotness: *hotness }
                }
                AskedBags::Ragged(splits) => Bags::Ragged(Splits::I32(splits)),
            },
            combiner: self.combiner,
            weights: None,
            padding_key: stands_for_none.then_some(Key::from(PADDING)),
            id_counts: None,
            scores: None,
        }
    }
}

/// A table's bags that are pooled for another rank.
#[derive(Default)]
pub struct PooledBags {
    /// `(bags, dim)` of each feature, one after the other.
    pub outputs: Vec<f32>,
    /// For the backward pass.
    looked: Looked,
    /// By feature.
    num_bags: Vec<usize>,
}

impl PooledBags {
    /// Pools the bags of `features`. `rows`: those asked for, of which the first `num_keys` get gradients.
    pub fn pool(
        table: &HostTable,
        features: &[AskedFeature],
        rows: &ReceivedRows,
        num_keys: usize,
        runs: Option<KeyRuns>,
    ) -> Result<PooledBags> {
        let numbers =
            memory::collect(features.iter().flat_map(|feature| feature.rows.iter().copied()), WHAT)?;
        let features: Vec<Feature> = features.iter().map(AskedFeature::feature).collect();
        let num_bags: Vec<usize> = features.iter().map(Feature::num_bags).collect();
        let dim = table.config.dim;
        let mut outputs = memory::filled(0.0, num_bags.iter().sum::<usize>().saturating_mul(dim), WHAT)?;
        let (mut rest, mut with_outputs) = (&mut outputs[..], Vec::new());
        for (number, feature) in features.into_iter().enumerate() {
            let (rows, others) = rest.split_at_mut(num_bags[number] * dim);
            rest = others;
            with_outputs.push(FeatureOutput { number, feature, rows });
        }
        let marks = numbers.iter().map(|&row| if row >= OUTSIDE { NO_MARK } else { row - 1 });
        let marks = memory::collect(marks, WHAT)?;
        let mut counts = memory::filled(0, num_keys, WHAT)?;
        marks.iter().filter(|&&mark| mark != NO_MARK).for_each(|&mark| counts[mark as usize] += 1);
        let ids = NumberedIds { rows: &numbers, marks: &marks, counts: &counts };
        let looked = pool_table(table, &mut with_outputs, ids, rows, runs)?;
        Ok(PooledBags { outputs, looked, num_bags })
    }

    /// Adds what the backward pass needs to a lookup's tables.
    pub fn save(self, number: usize, table: &HostTable, saved: &mut SavedLookup) {
        let mut looked = self.looked;
        looked.features.iter_mut().for_each(|feature| *feature += saved.num_bags.len());
        saved.num_bags.extend(self.num_bags);
        saved.tables.push(SavedTable::new(number, table, looked));
    }
}

/// Reads the gradients of bags that were pooled for a rank, and merges them to one for each of its keys. Returns them by table.
pub fn merge_bags(
    pooled: &SavedLookup,
    reader: &mut Reader,
    spare: &mut [Spare],
    pool: &Pool,
) -> Result<Vec<Vec<Region<f32>>>> {
    let mut rows = Vec::new();
    for table in &pooled.tables {
        for &feature in &table.looked.features {
            let mut of_feature = Vec::new();
            reader.append_rows(pooled.num_bags[feature] * table.dim, &mut of_feature)?;
            rows.push(of_feature);
        }
    }
    let gradients = OutputGradients::owned(rows);
    merge_push(pooled, &gradients.rows, spare, pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with a feature of two keys, and the result of reading it.
    fn read(numbers: [u64; 4], splits: &[u32], rows: &[u32]) -> Result<AskedFeature> {
        let mut writer = Writer::default();
        writer.numbers(&numbers).unwrap();
        writer.words(splits).unwrap();
        writer.words(rows).unwrap();
        let message = writer.finish();
        AskedFeature::read(2, 1, &mut Reader::new(&message, 1))
    }

    #[test]
    fn features_of_each_kind_are_read() {
        assert_eq!(read([0, 0, 3, 3], &[], &[1, 2, PADDING]).unwrap().feature().num_bags(), 3);
        assert_eq!(read([1, 1, 2, 4], &[], &[1, 2, OUTSIDE, 1]).unwrap().num_ids(), 4);
        let ragged = read([2, 2, 2, 3], &[0, 0, 3], &[2, 2, 1]).unwrap();
        assert_eq!([0, 1].map(|bag| ragged.feature().bag(bag)), [0..0, 0..3]);
    }

    #[test]
    fn invalid_features_are_errors_that_name_the_rank() {
        let invalid = [
            read([3, 0, 1, 1], &[], &[1]),            // the combiner
            read([0, 3, 1, 1], &[], &[1]),            // the kind
            read([0, 0, 2, 1], &[], &[1]),            // two bags of one id
            read([0, 1, 2, 3], &[], &[1, 1, 1]),      // two equal bags of three ids
            read([0, 2, 2, 2], &[0, 2, 1], &[1, 1]),  // splits that fall
            read([0, 2, 1, 1], &[0, 1 << 31], &[1]),  // a negative split
            read([0, 2, u64::MAX, 1], &[0, 1], &[1]), // more splits than there are
            read([0, 0, 1, 1], &[], &[0]),            // no row
            read([0, 0, 1, 1], &[], &[3]),            // a row that was not asked for
            read([0, 0, 2, 2], &[], &[1]),            // fewer ids than said
        ];
        for (number, read) in invalid.into_iter().enumerate() {
            let error = read.err().unwrap_or_else(|| panic!("feature {number} is read")).to_string();
            assert!(error.contains("rank 1"), "{error}");
        }
    }
}
