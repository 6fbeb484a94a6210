//! Keys without a record that a commit is to insert, with the gradient rows of their ids.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::contract::table::{Insertion, TableConfig};
use crate::error::Result;
use crate::host::features::{FeatureOutput, Mode, Role, is_weighted, role, row_code};
use crate::host::runs::{KeyRuns, RowCode};
use crate::key::Key;
use crate::memory;
use crate::store::arena::{NO_RECORD, RecordNumber};

const WHAT: &str = "the absent keys of a call";

/// Absent keys of a table in a lookup.
pub struct Absent {
    /// Distinct, in order of first occurrence.
    pub keys: Vec<Key>,
    /// Their ids.
    pub runs: KeyRuns,
    /// Record of each key after the commit, or [`NO_RECORD`] if it got none.
    records: OnceLock<Vec<RecordNumber>>,
}

/// An id of an absent key.
struct AbsentId {
    /// Index of its key among the absent keys.
    key: u32,
    row: u32,
    coefficient: f32,
}

impl Absent {
    /// The absent keys of a lookup. `None` if there are none, or if no commit is to insert them.
    ///
    /// `records` and `coefficients`: of all ids, one feature after the other. `coefficients` is empty if ids have none.
    pub(crate) fn find(
        config: &TableConfig,
        features: &[FeatureOutput],
        records: &[RecordNumber],
        coefficients: &[f32],
        mode: Mode,
    ) -> Result<Option<Absent>> {
        let num_ids = features.iter().map(|f| f.feature.keys.len()).sum();
        if mode.insertion != Insertion::AtCommit || !records[..num_ids].contains(&NO_RECORD) {
            return Ok(None);
        }
        let is_weighted = is_weighted(features);
        let coefficients = is_weighted.then_some(coefficients);
        let (keys, ids) = list(config, features, records, coefficients, row_code(features)?)?;
        let mut counts = memory::filled(0, keys.len(), WHAT)?;
        ids.iter().for_each(|id| counts[id.key as usize] += 1);
        let mut runs = KeyRuns::default();
        runs.start(counts.into_iter().map(|count| (NO_RECORD, count)), is_weighted)?;
        for id in ids {
            if is_weighted {
                runs.add_weighted(id.key, id.row, id.coefficient);
            } else {
                runs.add(id.key, id.row);
            }
        }
        Ok((!keys.is_empty()).then_some(Absent { keys, runs, records: OnceLock::new() }))
    }

    /// Records of the keys. Empty before `settle`.
    pub fn records(&self) -> &[RecordNumber] {
        self.records.get().map_or(self.runs.records(), |records| records)
    }

    pub fn is_settled(&self) -> bool {
        self.records.get().is_some()
    }

    /// Stores the record of each key. A second push of the same lookup uses them.
    pub fn settle(&self, records: Vec<RecordNumber>) {
        self.records.get_or_init(|| records);
    }

    /// Number of ids of keys that got no record.
    pub fn num_dropped_ids(&self) -> u64 {
        let dropped =
            self.records().iter().zip(self.runs.ranges()).filter(|(record, _)| **record == NO_RECORD);
        dropped.map(|(_, ids)| u64::from(ids.end - ids.start)).sum()
    }

    pub fn num_bytes(&self) -> usize {
        self.runs.num_bytes() + self.keys.len() * (size_of::<Key>() + size_of::<RecordNumber>())
    }
}

/// Finds the absent keys, and their ids in the order (feature, position).
fn list(
    config: &TableConfig,
    features: &[FeatureOutput],
    records: &[RecordNumber],
    coefficients: Option<&[f32]>,
    code: RowCode,
) -> Result<(Vec<Key>, Vec<AbsentId>)> {
    let (mut keys, mut ids, mut numbers) = (Vec::new(), Vec::new(), HashMap::new());
    let mut start = 0;
    for (local, FeatureOutput { feature, .. }) in features.iter().enumerate() {
        for bag in 0..feature.num_bags() {
            for position in feature.bag(bag) {
                let is_absent = records[start + position] == NO_RECORD
                    && matches!(role(feature, config, position), Role::Active);
                if !is_absent {
                    continue;
                }
                let key = feature.keys.get(position);
                numbers.try_reserve(1).map_err(|_| memory::missing::<(Key, u32)>(2 * numbers.len(), WHAT))?;
                let number = *numbers.entry(key).or_insert(keys.len() as u32);
                if number as usize == keys.len() {
                    memory::push(&mut keys, key, WHAT)?;
                }
                let coefficient = coefficients.map_or(1.0, |c| c[start + position]);
                let id = AbsentId { key: number, row: code.encode(local, bag), coefficient };
                memory::push(&mut ids, id, WHAT)?;
            }
        }
        start += feature.keys.len();
    }
    Ok((keys, ids))
}
