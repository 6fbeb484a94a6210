//! All threads look up one large table together: ids are dealt out by the top bits of their hash, so that each part has keys,
//! index and distinct keys of its own, and the order of a key's ids stays.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;

use crate::arena::RecordNumber;
use crate::batch::{Bags, Feature};
use crate::error::{Error, Result};
use crate::find::{Distinct, Nobody, Part, Search};
use crate::host_table::HostTable;
use crate::index::Index;
use crate::key::hash;
use crate::lookup::{
    FeatureOutput, Looked, Mode, classify, count_dropped, is_plain, is_weighted, plain_coefficient, row_code,
    trace,
};
use crate::pool::Pool;
use crate::pooling::{MissingRow, PlainPooling, PoolRange, pool_bags};
use crate::region::Region;
use crate::runs::{KeyRuns, RowCode};
use crate::simd::{dispatch, streaming_fence};
use crate::table::Outcomes;

/// Parts: enough for the threads to finish at the same time.
const PART_BITS: u32 = 4;
const PARTS: usize = 1 << PART_BITS;
/// Ids, or bags, that one task takes.
const CHUNK: usize = 1 << 14;

/// Positions of a chunk, part after part.
#[derive(Default)]
struct Dealt {
    positions: Vec<u32>,
    ends: [usize; PARTS],
}

impl Dealt {
    fn new(feature: &Feature, list: &[u32]) -> Dealt {
        let part_of =
            |position: u32| (hash(feature.keys.get(position as usize)) >> (64 - PART_BITS)) as usize;
        let mut places = [0; PARTS];
        list.iter().for_each(|&position| places[part_of(position)] += 1);
        let mut start = 0;
        for place in &mut places {
            start += std::mem::replace(place, start);
        }
        let mut positions = vec![0; list.len()];
        for &position in list {
            let place = &mut places[part_of(position)];
            positions[*place] = position;
            *place += 1;
        }
        Dealt { positions, ends: places }
    }

    fn part(&self, part: usize) -> &[u32] {
        let start = if part == 0 { 0 } else { self.ends[part - 1] };
        &self.positions[start..self.ends[part]]
    }
}

/// A chunk of a feature's ids.
struct Deal {
    feature: usize,
    active: Dealt,
    silent: Dealt,
}

/// What one thread has of the table.
struct PartWork {
    number: usize,
    index: Index,
    free: Vec<RecordNumber>,
    unused: Range<RecordNumber>,
    distinct: Distinct,
    marks: Region<u32>,
    runs: KeyRuns,
}

/// The call, as all its tasks see it.
struct Call<'a> {
    features: Vec<Feature<'a>>,
    /// Where the positions of each feature start among all.
    starts: Vec<usize>,
    records: Region<AtomicU32>,
    mode: Mode,
}

impl Call<'_> {
    fn records_of(&self, feature: usize) -> &[AtomicU32] {
        &self.records[self.starts[feature]..self.starts[feature + 1]]
    }
}

/// The first error of many tasks.
#[derive(Default)]
struct FirstError(Mutex<Option<Error>>);

impl FirstError {
    fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            self.0.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
        }
    }

    fn into_result(self) -> Result<()> {
        self.0.into_inner().unwrap_or_else(|e| e.into_inner()).map_or(Ok(()), Err)
    }
}

/// As `lookup_whole`, with all threads. `spare` holds old runs whose memory is used again.
pub fn lookup_split(
    table: &mut HostTable,
    outputs: &mut [FeatureOutput],
    mode: Mode,
    spare: &mut Vec<KeyRuns>,
    pool: &Pool,
) -> Result<Looked> {
    let code = row_code(outputs)?;
    let features: Vec<Feature> = outputs.iter().map(|o| o.feature).collect();
    let mut starts = vec![0];
    features.iter().for_each(|f| starts.push(starts[starts.len() - 1] + f.keys.len()));
    let num_positions = starts[features.len()];
    let call = Call { features, starts, records: Region::new(num_positions)?, mode };
    let weighted = mode.save && is_weighted(outputs);
    let mut coefficients = Region::<f32>::new(if weighted { num_positions } else { 0 })?;
    table.arena.reserve(num_positions + PARTS * Part::RUN as usize)?;
    table.index.deepen(PART_BITS)?;

    let deals = deal(table, &call, pool);
    let before = table.index.len();
    let mut parts = take_parts(table, spare)?;
    let found = find_in_parts(table, &call, &deals, &mut parts, pool);
    let inserted = (give_back(table, &mut parts) - before) as u64;
    found?;
    pool_in_chunks(table, &call, outputs, &mut coefficients, pool);
    let mut looked =
        Looked { code, features: outputs.iter().map(|o| o.number).collect(), ..Looked::default() };
    looked.outcomes = Outcomes { inserted, ..Outcomes::default() };
    if mode.save {
        let distinct: usize = parts.iter().map(|p| p.distinct.len()).sum();
        looked.outcomes.hit = distinct as u64 - inserted;
        sort_parts(&call, &deals, &coefficients, code, &mut parts, pool)?;
        for (number, output) in outputs.iter().enumerate() {
            trace(table, output, call.records_of(number), &mut looked);
            looked.dropped_gradients += count_dropped(&output.feature, call.records_of(number));
        }
        looked.runs = parts.into_iter().map(|p| p.runs).collect();
    }
    Ok(looked)
}

fn chunks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(CHUNK)).map(move |c| c * CHUNK..((c + 1) * CHUNK).min(len))
}

fn deal(table: &HostTable, call: &Call, pool: &Pool) -> Vec<Deal> {
    let places = call
        .features
        .iter()
        .enumerate()
        .flat_map(|(f, feature)| chunks(feature.keys.len()).map(move |c| (f, c)));
    let places: Vec<_> = places.collect();
    let mut deals: Vec<Option<Deal>> = places.iter().map(|_| None).collect();
    let tasks: Vec<_> = places.into_iter().zip(&mut deals).collect();
    pool.run(tasks, |((number, positions), deal)| {
        let feature = &call.features[number];
        let (mut active, mut silent) = (Vec::new(), Vec::new());
        if is_plain(feature, table) {
            active.extend(positions.start as u32..positions.end as u32);
        } else {
            classify(table, feature, positions, call.records_of(number), &mut active, &mut silent);
        }
        let (active, silent) = (Dealt::new(feature, &active), Dealt::new(feature, &silent));
        *deal = Some(Deal { feature: number, active, silent });
    });
    deals.into_iter().flatten().collect()
}

/// Takes the table's index apart, and deals out the numbers of erased records.
fn take_parts(table: &mut HostTable, spare: &mut Vec<KeyRuns>) -> Result<Vec<PartWork>> {
    let index = std::mem::replace(&mut table.index, Index::new(0)?).split(PART_BITS);
    let mut free = table.arena.take_free();
    let share = free.len().div_ceil(PARTS);
    let part = |(number, index)| PartWork {
        number,
        index,
        free: free.split_off(free.len().saturating_sub(share)),
        unused: 0..0,
        distinct: Distinct::default(),
        marks: Region::default(),
        runs: spare.pop().unwrap_or_default(),
    };
    Ok(index.into_iter().enumerate().map(part).collect())
}

/// Puts the index together again; gives its length.
fn give_back(table: &mut HostTable, parts: &mut [PartWork]) -> usize {
    let indexes = parts.iter_mut().map(|p| p.index.take()).collect();
    table.index = Index::join(indexes);
    for part in parts {
        part.free.drain(..).chain(part.unused.clone()).for_each(|number| table.arena.release(number));
    }
    table.index.len()
}

fn find_in_parts(
    table: &mut HostTable,
    call: &Call,
    deals: &[Deal],
    parts: &mut [PartWork],
    pool: &Pool,
) -> Result<()> {
    let counter = AtomicU32::new(table.arena.next_unused());
    let arena = table.arena.share();
    let (first, error) = (&table.first, FirstError::default());
    pool.run(parts.iter_mut().collect(), |part| {
        let (free, unused) = (std::mem::take(&mut part.free), part.unused.clone());
        let mut source = Part { arena, first, free, unused, counter: &counter };
        error.note(find_in_part(call, deals, part, &mut source));
        (part.free, part.unused) = (source.free, source.unused);
    });
    table.arena.advance(counter.into_inner());
    error.into_result()
}

fn find_in_part(call: &Call, deals: &[Deal], part: &mut PartWork, source: &mut Part) -> Result<()> {
    let num_active = deals.iter().map(|d| d.active.part(part.number).len()).sum();
    part.distinct.start(if call.mode.save { num_active } else { 0 })?;
    part.marks.grow(if call.mode.save { num_active } else { 0 })?;
    let mut start = 0;
    for deal in deals {
        let active = deal.active.part(part.number);
        let end = start + if call.mode.save { active.len() } else { 0 };
        let search = Search {
            index: &mut part.index,
            source: &mut *source,
            keys: call.features[deal.feature].keys,
            positions: active,
            insert: call.mode.insert,
            distinct: &mut part.distinct,
            records: call.records_of(deal.feature),
            marks: &mut part.marks[start..end],
            consumer: Nobody,
        };
        search.start(call.mode.save)?;
        start = end;
    }
    // Ids of weight 0 see what the whole call inserts.
    for deal in deals {
        let search = Search {
            index: &mut part.index,
            source: &mut *source,
            keys: call.features[deal.feature].keys,
            positions: deal.silent.part(part.number),
            insert: false,
            distinct: &mut part.distinct,
            records: call.records_of(deal.feature),
            marks: &mut [],
            consumer: Nobody,
        };
        search.start(false)?;
    }
    Ok(())
}

/// Bags of a feature that one task pools.
struct PoolTask<'a> {
    feature: usize,
    bags: Range<usize>,
    rows: &'a mut [f32],
    coefficients: &'a mut [f32],
}

fn pool_in_chunks(
    table: &HostTable,
    call: &Call,
    outputs: &mut [FeatureOutput],
    coefficients: &mut [f32],
    pool: &Pool,
) {
    let dim = table.config.dim;
    let (mut tasks, mut rest) = (Vec::new(), coefficients);
    for (number, output) in outputs.iter_mut().enumerate() {
        let feature = &call.features[number];
        for (bags, rows) in chunks(feature.num_bags()).zip(output.rows.chunks_mut(CHUNK * dim)) {
            let ids = feature.bag(bags.end - 1).end - feature.bag(bags.start).start;
            let (mine, others) = rest.split_at_mut(ids.min(rest.len()));
            rest = others;
            tasks.push(PoolTask { feature: number, bags, rows, coefficients: mine });
        }
    }
    pool.run(tasks, |task| {
        let feature = &call.features[task.feature];
        if !is_plain(feature, table) {
            let mut missing = MissingRow::new(table.config.missing, &table.first);
            let records = call.records_of(task.feature);
            return pool_bags(
                feature,
                task.bags,
                &table.arena,
                records,
                &mut missing,
                task.rows,
                task.coefficients,
            );
        }
        match dim {
            16 => pool_plain::<16>(table, call, task),
            32 => pool_plain::<32>(table, call, task),
            64 => pool_plain::<64>(table, call, task),
            128 => pool_plain::<128>(table, call, task),
            _ => pool_plain::<0>(table, call, task),
        }
    });
}

fn pool_plain<const D: usize>(table: &HostTable, call: &Call, task: PoolTask) {
    let feature = &call.features[task.feature];
    let missing = MissingRow::new(table.config.missing, &table.first);
    let pooling = PlainPooling::<D>::new(feature, task.bags, task.rows, missing, call.mode.stream);
    dispatch(PoolRange { pooling, arena: &table.arena, records: call.records_of(task.feature) });
    streaming_fence();
    task.coefficients.fill(plain_coefficient(feature));
}

/// Puts the ids of each part in the order of their keys.
fn sort_parts(
    call: &Call,
    deals: &[Deal],
    coefficients: &[f32],
    code: RowCode,
    parts: &mut [PartWork],
    pool: &Pool,
) -> Result<()> {
    let bags: Vec<BagOf> = call.features.iter().map(BagOf::new).collect();
    let error = FirstError::default();
    pool.run(parts.iter_mut().collect(), |part| {
        error.note(part.runs.start(&part.distinct, !coefficients.is_empty()).map(|()| {
            let mut marks = part.marks.iter();
            for deal in deals {
                let (bag_of, start) = (&bags[deal.feature], call.starts[deal.feature]);
                for (&position, &key) in deal.active.part(part.number).iter().zip(&mut marks) {
                    if key == crate::find::NO_MARK {
                        continue;
                    }
                    let row = code.encode(deal.feature, bag_of.get(position));
                    match coefficients.get(start + position as usize) {
                        Some(&coefficient) => part.runs.add_weighted(key, row, coefficient),
                        None => _ = part.runs.add(key, row),
                    }
                }
            }
        }));
    });
    error.into_result()
}

/// The bag of a position.
enum BagOf {
    Each,
    Fixed(u32),
    Ragged(Vec<u32>),
}

impl BagOf {
    fn new(feature: &Feature) -> BagOf {
        match feature.bags {
            Bags::Each => BagOf::Each,
            Bags::Fixed { hotness, .. } => BagOf::Fixed(hotness as u32),
            Bags::Ragged(_) => {
                let bags = 0..feature.num_bags();
                BagOf::Ragged(
                    bags.flat_map(|b| std::iter::repeat_n(b as u32, feature.bag(b).len())).collect(),
                )
            }
        }
    }

    #[inline(always)]
    fn get(&self, position: u32) -> usize {
        match self {
            BagOf::Each => position as usize,
            BagOf::Fixed(hotness) => (position / hotness) as usize,
            BagOf::Ragged(bags) => bags[position as usize] as usize,
        }
    }
}
