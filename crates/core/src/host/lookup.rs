//! One table's part of a lookup: finds or inserts the records of its features' ids, pools their rows, and keeps what the backward
//! pass needs.

use crate::contract::batch::{Bags, Feature, Keys};
use crate::contract::table::{Insertion, Outcomes};
use crate::error::Result;
use crate::host::absent::Absent;
use crate::host::features::{FeatureOutput, Mode, Role, is_plain, is_weighted, role, row_code};
use crate::host::find::{Distinct, NO_MARK, NoConsumer, Search, Whole};
use crate::host::pooling::{MissingRow, OUTSIDE, PADDING, PlainPooling, pool_bags};
use crate::host::runs::{KeyRuns, RowCode, sort_plain, sort_weighted};
use crate::host::table::HostTable;
use crate::host::weight_gradient::WeightTrace;
use crate::key::{Key, hash};
use crate::memory;
use crate::row_type::{Number, with_number};
use crate::simd::streaming_fence;
use crate::store::arena::{NO_RECORD, RecordNumber};
use crate::store::region::Region;

/// The result of a lookup for the backward pass and for statistics.
#[derive(Default)]
pub struct Looked {
    pub runs: Vec<KeyRuns>,
    /// Keys that a commit is to insert.
    pub absent: Option<Absent>,
    pub code: RowCode,
    /// Numbers of the features, in the order of `code`.
    pub features: Vec<usize>,
    pub traces: Vec<(usize, WeightTrace)>,
    pub outcomes: Outcomes,
    /// Number of ids that have no row and get none.
    pub absent_ids: u64,
}

impl Looked {
    pub fn num_ids(&self) -> usize {
        let absent = self.absent.as_ref().map(|absent| &absent.runs);
        self.runs.iter().chain(absent).map(KeyRuns::num_ids).sum()
    }

    pub fn num_bytes(&self) -> usize {
        let traces = self.traces.iter().map(|(_, trace)| trace.num_bytes());
        let absent = self.absent.iter().map(Absent::num_bytes);
        self.runs.iter().map(KeyRuns::num_bytes).chain(traces).chain(absent).sum()
    }
}

/// Memory that a thread reuses.
#[derive(Default)]
pub struct Scratch {
    records: Region<RecordNumber>,
    marks: Region<u32>,
    coefficients: Region<f32>,
    distinct: Distinct,
    active: List,
    silent: List,
}

const WHAT: &str = "the ids of a call";

/// Some ids of a feature.
#[derive(Default)]
struct List {
    positions: Vec<u32>,
    keys: Vec<Key>,
    records: Vec<RecordNumber>,
    marks: Vec<u32>,
}

impl List {
    /// Empties it and makes room for so many ids.
    fn start(&mut self, num_ids: usize) -> Result<()> {
        self.positions.clear();
        self.keys.clear();
        memory::reserve(&mut self.positions, num_ids, WHAT)?;
        memory::reserve(&mut self.keys, num_ids, WHAT)
    }

    fn push(&mut self, position: usize, key: Key) {
        self.positions.push(position as u32);
        self.keys.push(key);
    }

    /// `distinct`: whether to number the distinct keys.
    fn find(
        &mut self,
        table: &mut HostTable,
        insert: bool,
        mark: bool,
        distinct: &mut Distinct,
    ) -> Result<()> {
        memory::resize(&mut self.records, self.keys.len(), NO_RECORD, WHAT)?;
        memory::resize(&mut self.marks, self.keys.len(), NO_MARK, WHAT)?;
        let search = Search {
            index: &mut table.index,
            source: &mut Whole { arena: &mut table.arena, first: &table.first, journal: &mut table.journal },
            keys: Keys::U64(&self.keys),
            insert,
            distinct,
            records: &mut self.records,
            marks: &mut self.marks,
            consumer: NoConsumer,
        };
        search.start(mark)
    }

    fn scatter_records(&self, records: &mut [RecordNumber]) {
        let found = self.positions.iter().zip(&self.records);
        found.for_each(|(&position, &record)| records[position as usize] = record);
    }

    fn scatter_marks(&self, marks: &mut [u32]) {
        let found = self.positions.iter().zip(&self.marks);
        found.for_each(|(&position, &mark)| marks[position as usize] = mark);
    }
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::default();
}

/// Looks up all features of a table by one thread.
pub fn lookup_whole(
    table: &mut HostTable,
    features: &mut [FeatureOutput],
    mode: Mode,
    mut runs: KeyRuns,
) -> Result<Looked> {
    SCRATCH.with_borrow_mut(|scratch| {
        let positions = features.iter().map(|f| f.feature.keys.len()).sum();
        scratch.records.grow_amortized(positions)?;
        scratch.marks.grow_amortized(if mode.save { positions } else { 0 })?;
        let weighted = mode.save && is_weighted(features);
        scratch.coefficients.grow_amortized(if weighted { positions } else { 0 })?;
        scratch.distinct.start(positions)?;
        let mut looked = Looked {
            code: row_code(features)?,
            features: features.iter().map(|f| f.number).collect(),
            ..Looked::default()
        };
        let before = table.index.len();
        let mut start = 0;
        for feature in &mut *features {
            find_and_pool(table, feature, mode, weighted, scratch, start)?;
            start += feature.feature.keys.len();
        }
        if mode.inserts() && mode.save {
            settle_silent(table, features, scratch);
        }
        streaming_fence();
        let inserted = (table.index.len() - before) as u64;
        looked.outcomes = Outcomes { inserted, ..Outcomes::default() };
        if mode.save {
            looked.outcomes.hit = scratch.distinct.len() as u64 - inserted;
            sort(features, scratch, &mut runs, &mut looked)?;
            looked.runs.push(runs);
            looked.absent =
                Absent::find(&table.config, features, &scratch.records, &scratch.coefficients, mode)?;
        }
        looked.absent_ids = num_absent(features, &scratch.records, mode);
        Ok(looked)
    })
}

fn find_and_pool(
    table: &mut HostTable,
    output: &mut FeatureOutput,
    mode: Mode,
    weighted: bool,
    scratch: &mut Scratch,
    start: usize,
) -> Result<()> {
    if !is_plain(&output.feature, &table.config) {
        return general_lookup(table, output, mode, weighted, scratch, start);
    }
    with_number!(table.config.row_type, N => match table.config.dim {
        16 => plain_lookup::<16, N>(table, output, mode, weighted, scratch, start),
        32 => plain_lookup::<32, N>(table, output, mode, weighted, scratch, start),
        64 => plain_lookup::<64, N>(table, output, mode, weighted, scratch, start),
        128 => plain_lookup::<128, N>(table, output, mode, weighted, scratch, start),
        _ => plain_lookup::<0, N>(table, output, mode, weighted, scratch, start),
    })
}

/// Rows are pooled while they are in the cache.
fn plain_lookup<const D: usize, N: Number>(
    table: &mut HostTable,
    output: &mut FeatureOutput,
    mode: Mode,
    weighted: bool,
    scratch: &mut Scratch,
    start: usize,
) -> Result<()> {
    let feature = output.feature;
    let positions = start..start + feature.keys.len();
    let shared = table.shared_missing_row();
    let missing = MissingRow::new(&table.first, shared);
    let consumer = PlainPooling::<D, N>::new(&feature, output.rows, missing, mode.stream);
    let search = Search {
        index: &mut table.index,
        source: &mut Whole { arena: &mut table.arena, first: &table.first, journal: &mut table.journal },
        keys: feature.keys,
        insert: mode.inserts(),
        distinct: &mut scratch.distinct,
        records: &mut scratch.records[positions.clone()],
        marks: if mode.save { &mut scratch.marks[positions.clone()] } else { &mut [] },
        consumer,
    };
    search.start(mode.save)?;
    if weighted {
        scratch.coefficients[positions].fill(plain_coefficient(&feature));
    }
    Ok(())
}

/// The factor of a bag's gradient for each of its ids.
pub(crate) fn plain_coefficient(feature: &Feature) -> f32 {
    match feature.bags {
        Bags::Fixed { hotness, .. } => feature.combiner.scale(hotness as f32, hotness as f32),
        _ => 1.0,
    }
}

fn general_lookup(
    table: &mut HostTable,
    output: &mut FeatureOutput,
    mode: Mode,
    weighted: bool,
    scratch: &mut Scratch,
    start: usize,
) -> Result<()> {
    let feature = output.feature;
    let positions = start..start + feature.keys.len();
    let Scratch { records, marks, coefficients, distinct, active, silent } = scratch;
    let records = &mut records[positions.clone()];
    classify(table, &feature, records, active, silent)?;
    active.find(table, mode.inserts(), mode.save, distinct)?;
    active.scatter_records(records);
    if mode.save {
        // Only for the gradients of their weights.
        silent.find(table, false, false, distinct)?;
        silent.scatter_records(records);
        let marks = &mut marks[positions.clone()];
        marks.fill(NO_MARK);
        active.scatter_marks(marks);
    }
    let coefficients = if weighted { &mut coefficients[positions] } else { &mut [] };
    with_number!(table.config.row_type, N => {
        let mut missing = MissingRow::new(&table.first, table.shared_missing_row());
        let (bags, rows) = (0..feature.num_bags(), table.arena.rows::<N>());
        pool_bags(&feature, bags, &rows, records, &mut missing, output.rows, coefficients);
    });
    Ok(())
}

/// Finds the records of ids of weight 0 after all features have inserted: the gradients of their weights need them.
fn settle_silent(table: &HostTable, features: &[FeatureOutput], scratch: &mut Scratch) {
    let mut start = 0;
    for FeatureOutput { feature, .. } in features {
        let positions = start..start + feature.keys.len();
        start = positions.end;
        let (Some(weights), records) = (feature.weights, &mut scratch.records[positions]) else { continue };
        for (position, record) in records.iter_mut().enumerate() {
            if weights[position] == 0.0 && *record == NO_RECORD {
                let key = feature.keys.get(position);
                *record = table.index.find(hash(key), key);
            }
        }
    }
}

/// Separates ids by their role. Ids that are not looked up get a reserved record number.
fn classify(
    table: &HostTable,
    feature: &Feature,
    records: &mut [RecordNumber],
    active: &mut List,
    silent: &mut List,
) -> Result<()> {
    active.start(records.len())?;
    silent.start(if feature.weights.is_some() { records.len() } else { 0 })?;
    for (position, record) in records.iter_mut().enumerate() {
        match role(feature, &table.config, position) {
            Role::Active => active.push(position, feature.keys.get(position)),
            Role::Silent => silent.push(position, feature.keys.get(position)),
            Role::Padding => *record = PADDING,
            Role::Outside => *record = OUTSIDE,
        }
    }
    Ok(())
}

/// Sorts the ids by key, and keeps what the gradients of weights need.
fn sort(
    features: &[FeatureOutput],
    scratch: &Scratch,
    runs: &mut KeyRuns,
    looked: &mut Looked,
) -> Result<()> {
    let is_weighted = is_weighted(features);
    runs.start(scratch.distinct.iter(), is_weighted)?;
    let mut start = 0;
    for (local, output) in features.iter().enumerate() {
        let feature = &output.feature;
        let positions = start..start + feature.keys.len();
        let (marks, records) = (&scratch.marks[positions.clone()], &scratch.records[positions.clone()]);
        let first_row = looked.code.encode(local, 0);
        if is_weighted {
            sort_weighted(feature, marks, &scratch.coefficients[positions.clone()], first_row, runs);
        } else {
            sort_plain(feature, marks, first_row, runs);
        }
        trace(output, records, looked)?;
        start = positions.end;
    }
    Ok(())
}

/// Number of ids that were looked up, have no row and get none. `records`: by feature and id.
pub(crate) fn num_absent(features: &[FeatureOutput], records: &[RecordNumber], mode: Mode) -> u64 {
    if mode.insertion == Insertion::AtCommit {
        return 0; // The commit counts the ids that it has no room for.
    }
    let mut start = 0;
    let absent = features.iter().map(|FeatureOutput { feature, .. }| {
        start += feature.keys.len();
        num_absent_of(feature, &records[start - feature.keys.len()..start])
    });
    absent.sum()
}

fn num_absent_of(feature: &Feature, records: &[RecordNumber]) -> u64 {
    let Some(weights) = feature.weights else {
        return records.iter().filter(|&&record| record == NO_RECORD).count() as u64;
    };
    let is_absent = |(record, weight): &(&RecordNumber, &f32)| **record == NO_RECORD && **weight != 0.0;
    records.iter().zip(weights).filter(is_absent).count() as u64
}

pub(crate) fn trace(output: &FeatureOutput, records: &[RecordNumber], looked: &mut Looked) -> Result<()> {
    if output.feature.weights.is_some() {
        looked.traces.push((output.number, WeightTrace::new(&output.feature, records)?));
    }
    Ok(())
}
