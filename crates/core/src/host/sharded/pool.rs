//! Pools rows that came from their owners, or that an owner pools for another rank.

use super::received::ReceivedRows;
use crate::error::Result;
use crate::host::features::{FeatureOutput, is_plain, is_weighted, row_code};
use crate::host::lookup::{Looked, plain_coefficient, trace};
use crate::host::pooling::{MissingRow, PlainPooling, PoolRange, pool_bags};
use crate::host::runs::{KeyRuns, sort_plain, sort_weighted};
use crate::host::table::HostTable;
use crate::simd::{dispatch, streaming_fence};
use crate::store::arena::RecordNumber;
use crate::store::region::Region;

/// The ids of a table's features, one feature after the other.
#[derive(Clone, Copy)]
pub struct NumberedIds<'a> {
    /// Of each id: the row that it reads, or a number that stands for no row.
    pub rows: &'a [RecordNumber],
    /// Of each id: which key its gradient is for, or [`NO_MARK`](crate::host::find::NO_MARK).
    pub marks: &'a [u32],
    /// Of each key: number of its ids.
    pub counts: &'a [u32],
}

/// Pools the features of a table. `runs`: memory for the sorted ids, if a push may follow.
pub fn pool_table(
    table: &HostTable,
    features: &mut [FeatureOutput],
    ids: NumberedIds,
    rows: &ReceivedRows,
    runs: Option<KeyRuns>,
) -> Result<Looked> {
    let num_ids = features.iter().map(|output| output.feature.keys.len()).sum();
    let weighted = runs.is_some() && is_weighted(features);
    let mut coefficients = Region::new(0)?;
    coefficients.grow_amortized(if weighted { num_ids } else { 0 })?;
    let mut start = 0;
    for output in features.iter_mut() {
        let positions = start..start + output.feature.keys.len();
        start = positions.end;
        let coefficients = if weighted { &mut coefficients[positions.clone()] } else { &mut [] };
        pool_feature(table, output, rows, &ids.rows[positions], coefficients);
    }
    streaming_fence();
    match runs {
        Some(runs) => sort(features, ids, weighted.then_some(&coefficients[..]), runs),
        None => Ok(Looked::default()),
    }
}

/// Sorts the ids by key, for the backward pass.
fn sort(
    features: &[FeatureOutput],
    ids: NumberedIds,
    coefficients: Option<&[f32]>,
    mut runs: KeyRuns,
) -> Result<Looked> {
    let mut looked = Looked {
        code: row_code(features)?,
        features: features.iter().map(|output| output.number).collect(),
        ..Looked::default()
    };
    let counts = ids.counts.iter().enumerate();
    runs.start(counts.map(|(place, &count)| (place as u32 + 1, count)), coefficients.is_some())?;
    let mut start = 0;
    for (local, output) in features.iter().enumerate() {
        let positions = start..start + output.feature.keys.len();
        start = positions.end;
        let (marks, first_row) = (&ids.marks[positions.clone()], looked.code.encode(local, 0));
        match coefficients {
            Some(coefficients) => {
                sort_weighted(&output.feature, marks, &coefficients[positions.clone()], first_row, &mut runs)
            }
            None => sort_plain(&output.feature, marks, first_row, &mut runs),
        }
        trace(output, &ids.rows[positions], &mut looked)?;
    }
    looked.runs.push(runs);
    Ok(looked)
}

fn pool_feature(
    table: &HostTable,
    output: &mut FeatureOutput,
    rows: &ReceivedRows,
    numbers: &[RecordNumber],
    coefficients: &mut [f32],
) {
    match table.config.dim {
        _ if !is_plain(&output.feature, &table.config) => {
            let (bags, mut missing) = (0..output.feature.num_bags(), MissingRow::new(&table.first, None));
            pool_bags(&output.feature, bags, rows, numbers, &mut missing, output.rows, coefficients);
        }
        16 => pool_plain::<16>(table, output, rows, numbers, coefficients),
        32 => pool_plain::<32>(table, output, rows, numbers, coefficients),
        64 => pool_plain::<64>(table, output, rows, numbers, coefficients),
        128 => pool_plain::<128>(table, output, rows, numbers, coefficients),
        _ => pool_plain::<0>(table, output, rows, numbers, coefficients),
    }
}

fn pool_plain<const D: usize>(
    table: &HostTable,
    output: &mut FeatureOutput,
    rows: &ReceivedRows,
    numbers: &[RecordNumber],
    coefficients: &mut [f32],
) {
    let missing = MissingRow::new(&table.first, None);
    let pooling = PlainPooling::<D, _>::new(&output.feature, output.rows, missing, false);
    dispatch(PoolRange { pooling, rows, records: numbers });
    coefficients.fill(plain_coefficient(&output.feature));
}
