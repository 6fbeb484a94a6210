//! What a lookup keeps for its backward pass, and the gradients of a push.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::contract::gradients::{GradientRows, Keep};
use crate::error::Result;
use crate::host::lookup::Looked;
use crate::host::merge::{HeldGradients, MergedGradients, RecordGradients, is_finite, merge};
use crate::host::runs::KeyRuns;
use crate::host::table::HostTable;
use crate::key::Key;
use crate::pool::{Pool, num_pieces, run_if_large};
use crate::store::arena::RecordNumber;
use crate::store::region::Region;

/// Number of floats that a thread checks for values that are not finite, as one task.
const FINITE_PIECE: usize = 1 << 16;

/// The gradients of a lookup's outputs.
pub struct OutputGradients {
    /// By feature.
    pub rows: Vec<GradientRows>,
    /// If given, the gradients stay where they are until they are applied. If not, they are merged at once.
    pub keep: Option<Keep>,
    /// Whether a gradient that is not finite makes the ticket NaN, so that a loss scale notices the overflow. The check reads every
    /// gradient once more, so only layers that compute in float16 ask for it.
    pub check_finite: bool,
}

impl OutputGradients {
    /// Gradients that live as long as they are used. `rows`: by feature.
    #[allow(unsafe_code)]
    pub(in crate::host) fn owned(rows: Vec<Vec<f32>>) -> OutputGradients {
        // SAFETY: a `Vec` keeps its floats where they are when it is moved, and nobody writes to these. A group drops `keep` after them.
        let lent = rows.iter().map(|row| unsafe { GradientRows::new(row.as_ptr(), row.len()) }).collect();
        OutputGradients { rows: lent, keep: Some(Box::new(rows)), check_finite: false }
    }

    pub(crate) fn are_finite(&self, pool: &Pool) -> bool {
        let num_floats: usize = self.rows.iter().map(|r| r.get().len()).sum();
        let pieces = self.rows.iter().flat_map(|r| r.get().chunks(FINITE_PIECE)).collect();
        let all = AtomicBool::new(true);
        run_if_large(num_floats / 16, pieces, pool, |piece| {
            if !is_finite(piece) {
                all.store(false, Relaxed);
            }
        });
        all.into_inner()
    }
}

/// What a lookup remembers.
pub struct SavedLookup {
    /// Number of the lookup.
    pub number: u64,
    /// By feature.
    pub num_bags: Vec<usize>,
    /// The tables that took part.
    pub tables: Vec<SavedTable>,
    /// Whether a commit has counted the use of its rows.
    is_counted: AtomicBool,
    /// Whether its rows must stay, because its gradients may still come or wait for a commit.
    is_open: AtomicBool,
}

impl SavedLookup {
    /// What a lookup of these tables remembers.
    pub fn new(number: u64, num_bags: Vec<usize>, tables: Vec<SavedTable>) -> SavedLookup {
        let (is_counted, is_open) = (AtomicBool::new(false), AtomicBool::new(true));
        SavedLookup { number, num_bags, tables, is_counted, is_open }
    }

    /// Whether its rows must stay, because its gradients may still come or wait for a commit.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Relaxed)
    }

    /// Sets whether its rows must stay. Gradients may also come to a lookup whose rows need not.
    pub fn set_open(&self, is_open: bool) {
        self.is_open.store(is_open, Relaxed);
    }

    /// Whether this is the first time that a commit counts the use of its rows.
    pub fn count_once(&self) -> bool {
        !self.is_counted.swap(true, Relaxed)
    }
}

/// A table's part of a lookup.
pub struct SavedTable {
    /// Index of the table in the group.
    pub number: usize,
    /// Floats in a row.
    pub dim: usize,
    /// Generation of the table at the lookup.
    pub generation: u64,
    /// Its records and runs.
    pub looked: Looked,
    /// Number of ids that each id of the only feature represents. Empty: each represents one.
    pub id_counts: Vec<u32>,
    /// Keys of ids with their scores, for the policy `Custom`. A key may come several times.
    pub scores: Vec<(Key, u64)>,
}

impl SavedTable {
    /// Number of ids in a range of sorted ids.
    pub fn num_ids(&self, runs: &KeyRuns, ids: Range<u32>) -> u64 {
        match &self.id_counts[..] {
            [] => u64::from(ids.end - ids.start),
            // There is one feature then, with a bag for each id. So a row code is the index of an id.
            counts => {
                let ids = &runs.rows()[ids.start as usize..ids.end as usize];
                ids.iter().map(|&id| u64::from(counts[id as usize])).sum()
            }
        }
    }

    /// The keys that a commit is to insert, each with the number of its ids.
    pub fn absent_keys(&self) -> impl Iterator<Item = (Key, u64)> {
        self.looked.absent.iter().flat_map(|absent| {
            absent
                .keys
                .iter()
                .zip(absent.runs.ranges())
                .map(|(&key, ids)| (key, self.num_ids(&absent.runs, ids)))
        })
    }

    /// What a lookup remembers of a table.
    pub fn new(number: usize, table: &HostTable, looked: Looked) -> SavedTable {
        SavedTable {
            number,
            dim: table.config.dim,
            generation: table.generation,
            looked,
            id_counts: Vec::new(),
            scores: Vec::new(),
        }
    }

    /// Runs of its keys, with their records. Runs of absent keys come last.
    pub fn runs(&self) -> impl Iterator<Item = (&KeyRuns, &[RecordNumber])> {
        let absent = self.looked.absent.iter().map(|absent| (&absent.runs, absent.records()));
        self.looked.runs.iter().map(|runs| (runs, runs.records())).chain(absent)
    }

    fn held_gradients<'a>(&'a self, rows: &'a [GradientRows], weight: f32) -> Vec<HeldGradients<'a>> {
        let (code, dim) = (self.looked.code, self.dim);
        let rows: Vec<&[f32]> = self.looked.features.iter().map(|&f| rows[f].get()).collect();
        self.runs().map(|(runs, _)| HeldGradients { runs, code, rows: rows.clone(), dim, weight }).collect()
    }

    /// The gradients of its features, not merged yet.
    pub fn hold<'a>(
        &'a self,
        rows: &'a [GradientRows],
        weight: f32,
    ) -> Vec<RecordGradients<'a, HeldGradients<'a>>> {
        let records = self.runs().map(|(_, records)| records);
        let held = self.held_gradients(rows, weight).into_iter();
        records.zip(held).map(|(records, gradients)| RecordGradients { records, gradients }).collect()
    }
}

/// Gradients of a push.
pub enum PushedGradients {
    /// Where the framework has them.
    Held {
        /// By feature.
        rows: Vec<GradientRows>,
        /// Keeps them readable.
        _keep: Keep,
    },
    /// `(keys, dim)` at least, by table of the lookup and run of the table.
    Merged(Vec<Vec<Region<f32>>>),
}

/// The gradients of a lookup until a ticket names them.
pub struct Push {
    /// The lookup.
    pub lookup: Arc<SavedLookup>,
    /// Its gradients.
    pub gradients: PushedGradients,
}

/// Memory of finished steps for later ones, of one table.
#[derive(Default)]
pub struct Spare {
    /// For lookups.
    pub runs: Vec<KeyRuns>,
    /// For merges.
    pub sums: Vec<Region<f32>>,
}

impl Spare {
    /// Keeps as much as two steps need.
    pub fn keep_runs(&mut self, runs: Vec<KeyRuns>) {
        let most = 2 * runs.len();
        self.runs.extend(runs);
        self.runs.truncate(most);
    }

    /// Keeps as much as two steps need.
    pub fn keep_sums(&mut self, sums: Vec<Region<f32>>) {
        let most = 2 * sums.len();
        self.sums.extend(sums);
        self.sums.truncate(most);
    }

    /// Bytes of memory.
    pub fn num_bytes(&self) -> usize {
        self.runs.iter().map(KeyRuns::num_bytes).chain(self.sums.iter().map(Region::num_bytes)).sum()
    }
}

/// Merges gradients, by table of the lookup and run of the table.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory).
pub fn merge_push(
    lookup: &SavedLookup,
    rows: &[GradientRows],
    spare: &mut [Spare],
    pool: &Pool,
) -> Result<Vec<Vec<Region<f32>>>> {
    let mut merged = Vec::new();
    for table in &lookup.tables {
        let spare = &mut spare[table.number].sums;
        let mut room = |runs: &KeyRuns| {
            let mut sums = spare.pop().unwrap_or_default();
            sums.grow_amortized(runs.num_keys() * table.dim).map(|()| sums)
        };
        merged.push(table.runs().map(|(runs, _)| room(runs)).collect::<Result<Vec<_>>>()?);
    }
    let held = lookup.tables.iter().map(|table| table.held_gradients(rows, 1.0));
    let held: Vec<Vec<HeldGradients>> = held.collect();
    let num_ids: usize = held.iter().flatten().map(|h| h.runs.num_ids()).sum();
    let mut tasks = Vec::new();
    for (held, sums) in held.iter().flatten().zip(merged.iter_mut().flatten()) {
        let mut rest = &mut sums[..];
        for keys in held.pieces(num_pieces(held.runs.num_ids(), num_ids, pool)) {
            let (mine, others) = rest.split_at_mut(keys.len() * held.dim);
            rest = others;
            tasks.push((held, keys, mine));
        }
    }
    run_if_large(num_ids, tasks, pool, |(held, keys, sums)| merge(held, keys, sums));
    Ok(merged)
}
