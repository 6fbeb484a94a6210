//! What a rank asks owners for, as its header of a lookup says it.

use sok_core::contract::batch::Combiner;
use sok_core::error::{Error, Result};
use sok_core::exchange::message::{Reader, Writer};
use sok_core::key::Key;
use sok_core::row_type::RowType;

use crate::step::{Bags, Feature, Ids, KeyType};

/// What a rank asks for of a table.
#[derive(Clone, Debug, Default)]
pub(super) struct TableRequest {
    pub num_ids: usize,
    /// By feature, if the owner pools the bags; otherwise empty.
    pub bags: Vec<AskedBags>,
}

impl TableRequest {
    pub fn is_pooled(&self) -> bool {
        !self.bags.is_empty()
    }

    /// Number of ids, and of bags of each feature that the owner pools.
    pub fn sizes(&self) -> (usize, Vec<usize>) {
        (self.num_ids, self.bags.iter().map(|bags| bags.num_bags).collect())
    }
}

/// The bags of a feature that the owner of its table pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AskedBags {
    pub num_bags: usize,
    pub num_ids: usize,
    kind: BagsKind,
    combiner: Combiner,
    padding_key: Option<Key>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BagsKind {
    Each,
    Fixed,
    Ragged,
}

impl AskedBags {
    fn of(feature: &Feature) -> AskedBags {
        AskedBags {
            num_bags: feature.num_bags(),
            num_ids: feature.ids.len,
            kind: match feature.bags {
                Bags::Each => BagsKind::Each,
                Bags::Fixed { .. } => BagsKind::Fixed,
                Bags::Ragged { .. } => BagsKind::Ragged,
            },
            combiner: feature.combiner,
            padding_key: feature.padding_key,
        }
    }

    /// Number of row splits.
    pub fn num_splits(&self) -> usize {
        if self.kind == BagsKind::Ragged && self.num_bags > 0 { self.num_bags + 1 } else { 0 }
    }

    fn write(&self, writer: &mut Writer) -> Result<()> {
        let padding = [u64::from(self.padding_key.is_some()), self.padding_key.unwrap_or(0)];
        let sizes = [self.num_bags as u64, self.num_ids as u64];
        writer.numbers(&[self.kind as u64, self.combiner as u64, sizes[0], sizes[1], padding[0], padding[1]])
    }

    fn read(from: usize, reader: &mut Reader) -> Result<AskedBags> {
        let is_wrong =
            || Error::Rank { rank: from, what: "asks for bags with an invalid combiner or number".into() };
        let [kind, combiner] = [reader.number()?, reader.number()?];
        let [num_bags, num_ids] = [reader.number()? as usize, reader.number()? as usize];
        let [has_padding, padding_key] = [reader.number()?, reader.number()?];
        let kinds = [BagsKind::Each, BagsKind::Fixed, BagsKind::Ragged];
        let kind = kinds.into_iter().find(|known| *known as u64 == kind).ok_or_else(is_wrong)?;
        let combiners = [Combiner::Sum, Combiner::Mean, Combiner::Sqrtn];
        let combiner = combiners.into_iter().find(|known| *known as u64 == combiner).ok_or_else(is_wrong)?;
        let bags = AskedBags {
            num_bags,
            num_ids,
            kind,
            combiner,
            padding_key: (has_padding != 0).then_some(padding_key),
        };
        let is_valid =
            bags.feature(0, [0; 3]).validate().is_ok() && (kind != BagsKind::Each || num_bags == num_ids);
        if is_valid { Ok(bags) } else { Err(is_wrong()) }
    }

    /// The feature that the owner pools. The addresses are those of its ids, row splits and pooled rows.
    pub fn feature(&self, table: usize, [ids, splits, rows]: [u64; 3]) -> Feature<'static> {
        let num_bags = self.num_bags;
        Feature {
            name: "of another rank",
            table,
            ids: Ids { address: ids, high: 0, key_type: KeyType::Wide, len: self.num_ids },
            bags: match self.kind {
                BagsKind::Each => Bags::Each,
                BagsKind::Fixed => {
                    Bags::Fixed { num_bags, hotness: self.num_ids.checked_div(num_bags).unwrap_or(0) }
                }
                BagsKind::Ragged => Bags::Ragged { splits, wide: false, num_bags },
            },
            combiner: self.combiner,
            weights: None,
            padding_key: self.padding_key,
            is_silent: false,
            at_owner: false,
            id_counts: 0,
            scores: None,
            rows,
            array_type: RowType::Float32,
        }
    }
}

/// Writes which bags of a table its owner is to pool.
pub(super) fn write_bags(bags: &[AskedBags], writer: &mut Writer) -> Result<()> {
    writer.numbers(&[bags.len() as u64])?;
    bags.iter().try_for_each(|bags| bags.write(writer))
}

/// Reads what `write_bags` has written. `num_ids`: of the table.
pub(super) fn read_bags(num_ids: usize, from: usize, reader: &mut Reader) -> Result<Vec<AskedBags>> {
    let num_features = reader.number()?;
    let bags = (0..num_features).map(|_| AskedBags::read(from, reader)).collect::<Result<Vec<_>>>()?;
    let is_whole = bags.iter().try_fold(0usize, |sum, bags| sum.checked_add(bags.num_ids)) == Some(num_ids);
    if !bags.is_empty() && !is_whole {
        let what = "asks for bags that do not hold all ids of their table".into();
        return Err(Error::Rank { rank: from, what });
    }
    Ok(bags)
}

/// What this rank asks for, by table.
pub(super) fn requests_of(num_tables: usize, features: &[Feature]) -> Vec<TableRequest> {
    let mut requests = vec![TableRequest::default(); num_tables];
    for feature in features.iter().filter(|feature| feature.table < num_tables) {
        let request = &mut requests[feature.table];
        request.num_ids += feature.ids.len;
        request.bags.extend(feature.at_owner.then(|| AskedBags::of(feature)));
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bags(kind: BagsKind, num_bags: usize, num_ids: usize, padding_key: Option<Key>) -> AskedBags {
        AskedBags { num_bags, num_ids, kind, combiner: Combiner::Mean, padding_key }
    }

    fn sent(bags: &[AskedBags], num_ids: usize) -> Result<Vec<AskedBags>> {
        let mut writer = Writer::default();
        write_bags(bags, &mut writer).unwrap();
        let message = writer.finish();
        read_bags(num_ids, 1, &mut Reader::new(&message, 1))
    }

    #[test]
    fn bags_are_read_as_they_were_written() {
        let all = [
            bags(BagsKind::Each, 3, 3, None),
            bags(BagsKind::Fixed, 2, 8, Some(0)),
            bags(BagsKind::Ragged, 4, 5, Some(u64::MAX)),
            bags(BagsKind::Ragged, 0, 0, None),
        ];
        assert_eq!(sent(&all, 16).unwrap(), all);
        assert_eq!(sent(&[], 16).unwrap(), []);
        assert_eq!(all.map(|bags| bags.num_splits()), [0, 0, 5, 0]);
        let of_features =
            all.map(|bags| bags.feature(0, [64, 128, 256])).map(|feature| AskedBags::of(&feature));
        assert_eq!(of_features, all);
    }

    #[test]
    fn invalid_bags_are_errors_that_name_the_rank() {
        let invalid = [
            (bags(BagsKind::Each, 3, 4, None), 4),
            (bags(BagsKind::Fixed, 3, 4, None), 4),
            (bags(BagsKind::Ragged, 0, 4, None), 4),
            (bags(BagsKind::Ragged, 2, 4, None), 5),
            (bags(BagsKind::Ragged, 1, usize::MAX, None), usize::MAX),
        ];
        for (number, (bags, num_ids)) in invalid.into_iter().enumerate() {
            let error = sent(&[bags], num_ids).err().unwrap_or_else(|| panic!("bags {number} are read"));
            assert!(error.to_string().contains("rank 1"), "{error}");
        }
    }
}
