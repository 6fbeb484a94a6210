//! Looks up one large table by all threads. Ids are partitioned by the top bits of their hash, so each part has its own keys and its own
//! part of the index. The order of a key's ids stays.
//!
//! First, chunks of bags are partitioned into lists. Then each part looks up its lists of all chunks. Then each chunk brings its records
//! back into the order of its ids. All three steps read and write memory sequentially.

use std::ops::Range;
use std::sync::atomic::{AtomicI64, AtomicU32};

use crate::contract::batch::{Bags, Feature, Keys};
use crate::contract::table::Outcomes;
use crate::error::Result;
use crate::host::absent::Absent;
use crate::host::features::{FeatureOutput, Mode, Role, is_plain, is_weighted, role, row_code};
use crate::host::find::{Distinct, NO_MARK, NoConsumer, Part, Search};
use crate::host::lookup::{Looked, num_absent, plain_coefficient, trace};
use crate::host::pooling::{MissingRow, OUTSIDE, PADDING, PlainPooling, PoolRange, pool_bags};
use crate::host::runs::{KeyRuns, RowCode};
use crate::host::table::HostTable;
use crate::key::{Key, hash};
use crate::memory;
use crate::pool::{FirstError, Pool};
use crate::row_type::{Number, with_number};
use crate::simd::{dispatch, streaming_fence};
use crate::store::arena::RecordNumber;
use crate::store::index::{Index, Joint};
use crate::store::journal::Log;
use crate::store::region::Region;

/// Number of parts, so that threads finish at about the same time.
const PART_BITS: u32 = 4;
const PARTS: usize = 1 << PART_BITS;
/// A part has a list of ids that it may insert, and one of ids of weight 0, which it looks up afterwards.
const LISTS: usize = 2 * PARTS;
/// "Lists" of ids that are not looked up.
const PADDING_LIST: u8 = LISTS as u8;
const OUTSIDE_LIST: u8 = LISTS as u8 + 1;
/// Minimal number of ids in a chunk, so that its lists are long, and maximal number of chunks for each thread.
const MIN_CHUNK: usize = 1 << 12;
const CHUNKS: usize = 8;

const WHAT: &str = "the ids of a call";

/// Memory that is reused.
#[derive(Default)]
pub struct SplitScratch {
    /// List and record of each id, in the order of the call.
    lists: Region<u8>,
    records: Region<RecordNumber>,
    coefficients: Region<f32>,
    dealt: Dealt,
    distinct: [Distinct; PARTS],
}

/// Arrays over all ids in partitioned order: by chunk, then by list.
#[derive(Default)]
struct Dealt {
    keys: Region<Key>,
    /// Its gradient row.
    rows: Region<u32>,
    coefficients: Region<f32>,
    records: Region<RecordNumber>,
    /// Its index among the distinct keys of its part.
    marks: Region<u32>,
}

impl SplitScratch {
    fn grow(&mut self, num_ids: usize, is_saved: bool, is_weighted: bool) -> Result<()> {
        let saved = if is_saved { num_ids } else { 0 };
        let weighted = if is_weighted { num_ids } else { 0 };
        self.lists.grow_amortized(num_ids)?;
        self.records.grow_amortized(num_ids)?;
        self.coefficients.grow_amortized(weighted)?;
        self.dealt.keys.grow_amortized(num_ids)?;
        self.dealt.rows.grow_amortized(saved)?;
        self.dealt.coefficients.grow_amortized(weighted)?;
        self.dealt.records.grow_amortized(num_ids)?;
        self.dealt.marks.grow_amortized(saved)
    }

    pub fn num_bytes(&self) -> usize {
        let Dealt { keys, rows, coefficients, records, marks } = &self.dealt;
        let by_dealt_id = keys.num_bytes()
            + rows.num_bytes()
            + coefficients.num_bytes()
            + records.num_bytes()
            + marks.num_bytes();
        let by_id = self.lists.num_bytes() + self.records.num_bytes() + self.coefficients.num_bytes();
        by_id + by_dealt_id + self.distinct.iter().map(Distinct::num_bytes).sum::<usize>()
    }
}

/// Some bags of a feature.
struct Chunk {
    feature: usize,
    bags: Range<usize>,
    /// Positions in the feature.
    positions: Range<usize>,
    /// Range among all ids of the call.
    ids: Range<usize>,
    /// Starts of its lists, and the end of the last one.
    starts: [u32; LISTS + 1],
}

/// What all tasks of the call share.
struct Call<'a> {
    features: Vec<Feature<'a>>,
    code: RowCode,
    mode: Mode,
    is_weighted: bool,
}

/// As `lookup_whole`, by all threads. `spare` holds old runs whose memory is reused.
pub fn lookup_split(
    table: &mut HostTable,
    outputs: &mut [FeatureOutput],
    mode: Mode,
    scratch: &mut SplitScratch,
    spare: &mut Vec<KeyRuns>,
    pool: &Pool,
) -> Result<Looked> {
    let features: Vec<Feature> = outputs.iter().map(|o| o.feature).collect();
    let call =
        Call { features, code: row_code(outputs)?, mode, is_weighted: mode.save && is_weighted(outputs) };
    let num_ids = call.features.iter().map(|f| f.keys.len()).sum();
    scratch.grow(num_ids, mode.save, call.is_weighted)?;
    table.arena.reserve(num_ids + PARTS * Part::RUN as usize)?;
    table.index.deepen(PART_BITS)?;

    let mut chunks = chunks(&call.features, (num_ids / (pool.threads() * CHUNKS)).max(MIN_CHUNK))?;
    deal(table, &call, &mut chunks, scratch, pool)?;
    let before = table.index.len();
    let (mut parts, joint) = take_parts(table, &chunks, scratch, spare)?;
    let found = find_in_parts(table, &call, &mut parts, pool);
    let (indexes, mut left): (Vec<_>, Vec<_>) = parts.into_iter().map(PartWork::finish).unzip();
    let distinct: usize = left.iter().map(|l| l.num_distinct).sum();
    let inserted = (give_back(table, joint.join(indexes), &mut left) - before) as u64;
    found?;
    pool_chunks(table, &call, &chunks, outputs, scratch, pool)?;
    let mut looked =
        Looked { code: call.code, features: outputs.iter().map(|o| o.number).collect(), ..Looked::default() };
    looked.outcomes = Outcomes { inserted, ..Outcomes::default() };
    if mode.save {
        looked.outcomes.hit = distinct as u64 - inserted;
        looked.runs = sort_parts(&call, &chunks, left, scratch, pool)?;
        let mut start = 0;
        for output in outputs.iter() {
            let records = &scratch.records[start..start + output.feature.keys.len()];
            start += records.len();
            trace(output, records, &mut looked)?;
        }
        looked.absent = Absent::find(&table.config, outputs, &scratch.records, &scratch.coefficients, mode)?;
    }
    looked.absent_ids = num_absent(outputs, &scratch.records, mode);
    Ok(looked)
}

/// Chunks of about `size` ids or empty bags.
fn chunks(features: &[Feature], size: usize) -> Result<Vec<Chunk>> {
    let mut chunks = Vec::new();
    let mut first = 0;
    for (number, feature) in features.iter().enumerate() {
        let (mut start, mut positions) = (0, 0..0);
        for bag in 0..feature.num_bags() {
            positions.end = feature.bag(bag).end;
            let is_last = bag + 1 == feature.num_bags();
            if positions.len() >= size || bag + 1 - start >= size || is_last {
                let ids = first..first + positions.len();
                first = ids.end;
                let chunk = Chunk {
                    feature: number,
                    bags: start..bag + 1,
                    positions: positions.clone(),
                    ids,
                    starts: [0; LISTS + 1],
                };
                memory::push(&mut chunks, chunk, WHAT)?;
                (start, positions.start) = (bag + 1, positions.end);
            }
        }
    }
    Ok(chunks)
}

/// Splits a slice into pieces of these lengths.
fn cut<T>(mut rest: &mut [T], lengths: impl Iterator<Item = usize>) -> Result<Vec<&mut [T]>> {
    let pieces = lengths.map(|length| {
        // Arrays that the call does not need are empty.
        let length = length.min(rest.len());
        let (piece, others) = std::mem::take(&mut rest).split_at_mut(length);
        rest = others;
        piece
    });
    memory::collect(pieces, WHAT)
}

// ---- partition

struct DealTask<'a> {
    chunk: &'a mut Chunk,
    lists: &'a mut [u8],
    keys: &'a mut [Key],
    rows: &'a mut [u32],
}

fn deal(
    table: &HostTable,
    call: &Call,
    chunks: &mut [Chunk],
    scratch: &mut SplitScratch,
    pool: &Pool,
) -> Result<()> {
    let lengths = chunks.iter().map(|c| c.ids.len());
    let lists = cut(&mut scratch.lists, lengths.clone())?;
    let keys = cut(&mut scratch.dealt.keys, lengths.clone())?;
    let rows = cut(if call.mode.save { &mut scratch.dealt.rows } else { &mut [] }, lengths)?;
    let pieces = lists.into_iter().zip(keys).zip(rows);
    let tasks = chunks.iter_mut().zip(pieces);
    let tasks = tasks.map(|(chunk, ((lists, keys), rows))| DealTask { chunk, lists, keys, rows });
    let tasks = memory::collect(tasks, WHAT)?;
    pool.run(tasks, |task: DealTask| {
        let feature = &call.features[task.chunk.feature];
        let keys = feature.keys.slice(task.chunk.positions.clone());
        if is_plain(feature, &table.config) {
            choose_plain(&keys, task.lists);
        } else {
            choose(table, feature, task.chunk.positions.start, task.lists);
        }
        let mut places = [0u32; LISTS + 2];
        task.lists.iter().for_each(|&list| places[list as usize] += 1);
        let mut start = 0;
        places.iter_mut().for_each(|place| start += std::mem::replace(place, start));
        task.chunk.starts.copy_from_slice(&places[..=LISTS]);
        let bags = task.chunk.bags.clone();
        let code = |bag| call.code.encode(task.chunk.feature, bag);
        match feature.bags {
            Bags::Each | Bags::Fixed { hotness: 1, .. } => {
                place(&keys, task.lists, bags.map(code), &mut places, task.keys, task.rows)
            }
            Bags::Fixed { hotness, .. } => {
                let rows = bags.flat_map(|bag| std::iter::repeat_n(code(bag), hotness));
                place(&keys, task.lists, rows, &mut places, task.keys, task.rows);
            }
            Bags::Ragged(_) => {
                let rows = bags.flat_map(|bag| std::iter::repeat_n(code(bag), feature.bag(bag).len()));
                place(&keys, task.lists, rows, &mut places, task.keys, task.rows);
            }
        }
    });
    Ok(())
}

fn part_of(key: Key) -> u8 {
    (hash(key) >> (64 - PART_BITS)) as u8
}

fn choose_plain(keys: &Keys, lists: &mut [u8]) {
    let mut block = [0; 64];
    for (number, lists) in lists.chunks_mut(block.len()).enumerate() {
        keys.load(number * block.len(), &mut block[..lists.len()]);
        lists.iter_mut().zip(&block).for_each(|(list, &key)| *list = part_of(key));
    }
}

fn choose(table: &HostTable, feature: &Feature, first: usize, lists: &mut [u8]) {
    for (i, list) in lists.iter_mut().enumerate() {
        let key = feature.keys.get(first + i);
        *list = match role(feature, &table.config, first + i) {
            Role::Active => part_of(key),
            Role::Silent => part_of(key) + PARTS as u8,
            Role::Padding => PADDING_LIST,
            Role::Outside => OUTSIDE_LIST,
        };
    }
}

fn place(
    keys: &Keys,
    lists: &[u8],
    rows: impl Iterator<Item = u32>,
    places: &mut [u32; LISTS + 2],
    dealt_keys: &mut [Key],
    dealt_rows: &mut [u32],
) {
    let mut block = [0; 64];
    let mut rows = rows;
    for (number, lists) in lists.chunks(block.len()).enumerate() {
        keys.load(number * block.len(), &mut block[..lists.len()]);
        for ((&list, &key), row) in lists.iter().zip(&block).zip(&mut rows) {
            let place = &mut places[list as usize];
            if let Some(dealt) = dealt_keys.get_mut(*place as usize) {
                *dealt = key;
            }
            if let Some(dealt) = dealt_rows.get_mut(*place as usize) {
                *dealt = row;
            }
            *place += 1;
        }
    }
}

// ---- find

/// A part's list of a chunk.
struct Piece<'a> {
    keys: &'a [Key],
    rows: &'a [u32],
    records: &'a mut [RecordNumber],
    marks: &'a mut [u32],
}

/// What one thread uses of the table.
struct PartWork<'a> {
    index: Index,
    active: Vec<Piece<'a>>,
    silent: Vec<Piece<'a>>,
    distinct: &'a mut Distinct,
    left: Left,
}

/// What remains of a part when its index is merged.
struct Left {
    /// Numbers of erased records that were not reused.
    free: Vec<RecordNumber>,
    unused: Range<RecordNumber>,
    /// Journal of the part's insertions.
    log: Log,
    num_distinct: usize,
    runs: KeyRuns,
}

impl PartWork<'_> {
    fn finish(self) -> (Index, Left) {
        (self.index, Left { num_distinct: self.distinct.len(), ..self.left })
    }
}

/// Splits the table's index into parts, and distributes the numbers of erased records. Allocates all memory first.
fn take_parts<'a>(
    table: &mut HostTable,
    chunks: &[Chunk],
    scratch: &'a mut SplitScratch,
    spare: &mut Vec<KeyRuns>,
) -> Result<(Vec<PartWork<'a>>, Joint)> {
    let pieces = deal_pieces(chunks, &mut scratch.dealt)?;
    let share = table.arena.num_free().div_ceil(PARTS);
    let room = |_| memory::with_capacity(share, "the numbers of erased rows");
    let free = (0..PARTS).map(room).collect::<Result<Vec<Vec<_>>>>()?;
    // Parts return the numbers that they have not used.
    table.arena.reserve_free(PARTS * Part::RUN as usize)?;
    table.journal.reserve_others(PARTS)?;
    let (indexes, joint) = table.index.split(PART_BITS)?;
    let mut part = |(((index, distinct), (active, silent)), mut free): (((_, _), _), Vec<_>)| {
        free.extend(table.arena.drain_free(share));
        let runs = spare.pop().unwrap_or_default();
        let left = Left { free, unused: 0..0, log: Vec::new(), num_distinct: 0, runs };
        PartWork { index, active, silent, distinct, left }
    };
    let parts = indexes.into_iter().zip(&mut scratch.distinct).zip(pieces).zip(free);
    Ok((parts.map(&mut part).collect(), joint))
}

/// The lists of a part in all chunks: ids that it may insert, and ids of weight 0.
type Pieces<'a> = (Vec<Piece<'a>>, Vec<Piece<'a>>);

fn deal_pieces<'a>(chunks: &[Chunk], dealt: &'a mut Dealt) -> Result<Vec<Pieces<'a>>> {
    let room =
        |_| Ok((memory::with_capacity(chunks.len(), WHAT)?, memory::with_capacity(chunks.len(), WHAT)?));
    let mut parts = (0..PARTS).map(room).collect::<Result<Vec<Pieces>>>()?;
    let lengths = chunks.iter().map(|c| c.ids.len());
    let records = cut(&mut dealt.records, lengths.clone())?;
    let marks = cut(&mut dealt.marks, lengths)?;
    for (chunk, (records, marks)) in chunks.iter().zip(records.into_iter().zip(marks)) {
        let lists = chunk.starts.windows(2).map(|w| (w[1] - w[0]) as usize);
        let pieces = cut(records, lists.clone())?.into_iter().zip(cut(marks, lists)?);
        for (list, (records, marks)) in pieces.enumerate() {
            let start = chunk.ids.start + chunk.starts[list] as usize;
            let ids = start..start + records.len();
            let rows = dealt.rows.get(ids.clone()).unwrap_or_default();
            let piece = Piece { keys: &dealt.keys[ids], rows, records, marks };
            let part = &mut parts[list % PARTS];
            if list < PARTS { part.0.push(piece) } else { part.1.push(piece) }
        }
    }
    Ok(parts)
}

/// Merges the parts of the index. Returns its length.
fn give_back(table: &mut HostTable, index: Index, left: &mut [Left]) -> usize {
    table.index = index;
    for left in left {
        table.journal.append(std::mem::take(&mut left.log));
        left.free.drain(..).chain(left.unused.clone()).for_each(|number| table.arena.release(number));
    }
    table.index.len()
}

fn find_in_parts(table: &mut HostTable, call: &Call, parts: &mut [PartWork], pool: &Pool) -> Result<()> {
    let counter = AtomicU32::new(table.arena.next_unused());
    let room = AtomicI64::new(table.journal.room as i64);
    let num_ids: usize = parts.iter().flat_map(|part| &part.active).map(|piece| piece.keys.len()).sum();
    // Threads that count the same number would slow each other down.
    let room_of_parts = (table.journal.room < num_ids as u64).then_some(&room);
    let arena = table.arena.share();
    let (first, error) = (&table.first, FirstError::default());
    pool.run(parts.iter_mut().collect(), |part: &mut PartWork| {
        let (free, unused) = (std::mem::take(&mut part.left.free), part.left.unused.clone());
        let log = std::mem::take(&mut part.left.log);
        let mut source = Part { arena, first, free, unused, counter: &counter, room: room_of_parts, log };
        error.note(find_in_part(call.mode, part, &mut source));
        if call.mode.save && !call.is_weighted {
            // Done now, while the marks are in the cache.
            error.note(sort_part(part));
        }
        (part.left.free, part.left.unused, part.left.log) = (source.free, source.unused, source.log);
    });
    table.arena.advance(counter.into_inner());
    table.journal.is_full |= room.into_inner() < 0;
    error.into_result()
}

fn find_in_part(mode: Mode, part: &mut PartWork, source: &mut Part) -> Result<()> {
    let num_active = part.active.iter().map(|piece| piece.keys.len()).sum();
    part.distinct.start(if mode.save { num_active } else { 0 })?;
    let PartWork { index, active, silent, distinct, .. } = part;
    let mut find = |piece: &mut Piece, insert, mark| {
        let (keys, records, marks) = (Keys::U64(piece.keys), &mut *piece.records, &mut *piece.marks);
        Search { index, source, keys, insert, distinct, records, marks, consumer: NoConsumer }.start(mark)
    };
    active.iter_mut().try_for_each(|piece| find(piece, mode.inserts(), mode.save))?;
    if mode.save {
        // Ids of weight 0 come last: the gradients of their weights need rows that the whole call inserts.
        silent.iter_mut().try_for_each(|piece| find(piece, false, false))?;
    }
    Ok(())
}

// ---- pool

/// Bags that one task pools.
struct PoolTask<'a> {
    chunk: &'a Chunk,
    rows: &'a mut [f32],
    records: &'a mut [RecordNumber],
    coefficients: &'a mut [f32],
    dealt_coefficients: &'a mut [f32],
}

fn pool_chunks(
    table: &HostTable,
    call: &Call,
    chunks: &[Chunk],
    outputs: &mut [FeatureOutput],
    scratch: &mut SplitScratch,
    pool: &Pool,
) -> Result<()> {
    let dim = table.config.dim;
    let mut rows = memory::with_capacity(chunks.len(), WHAT)?;
    for (number, output) in outputs.iter_mut().enumerate() {
        let chunks = chunks.iter().filter(|c| c.feature == number);
        rows.extend(cut(output.rows, chunks.map(|c| c.bags.len() * dim))?);
    }
    let lengths = chunks.iter().map(|c| c.ids.len());
    let records = cut(&mut scratch.records, lengths.clone())?;
    let weighted = |values| cut(if call.is_weighted { values } else { &mut [] }, lengths.clone());
    let coefficients = weighted(&mut scratch.coefficients)?;
    let dealt_coefficients = weighted(&mut scratch.dealt.coefficients)?;
    let pieces = rows.into_iter().zip(records).zip(coefficients.into_iter().zip(dealt_coefficients));
    let tasks = chunks.iter().zip(pieces);
    let tasks = tasks.map(|(chunk, ((rows, records), (coefficients, dealt_coefficients)))| PoolTask {
        chunk,
        rows,
        records,
        coefficients,
        dealt_coefficients,
    });
    let (lists, found) = (&scratch.lists, &scratch.dealt.records);
    pool.run(memory::collect(tasks, WHAT)?, |mut task: PoolTask| {
        let ids = task.chunk.ids.clone();
        let lists = &lists[ids.clone()];
        take_back(lists, &task.chunk.starts, &found[ids], task.records);
        with_number!(table.config.row_type, N => match dim {
            16 => pool_chunk::<16, N>(table, call, &mut task),
            32 => pool_chunk::<32, N>(table, call, &mut task),
            64 => pool_chunk::<64, N>(table, call, &mut task),
            128 => pool_chunk::<128, N>(table, call, &mut task),
            _ => pool_chunk::<0, N>(table, call, &mut task),
        });
        deal_coefficients(lists, &task.chunk.starts, task.coefficients, task.dealt_coefficients);
    });
    Ok(())
}

/// Position of the next id of each list.
fn places(starts: &[u32; LISTS + 1]) -> [u32; LISTS] {
    let mut places = [0; LISTS];
    places.copy_from_slice(&starts[..LISTS]);
    places
}

/// Records of a chunk in the order of its ids.
fn take_back(lists: &[u8], starts: &[u32; LISTS + 1], dealt: &[RecordNumber], records: &mut [RecordNumber]) {
    let mut places = places(starts);
    for (&list, record) in lists.iter().zip(records) {
        *record = match places.get_mut(list as usize) {
            Some(place) => {
                *place += 1;
                dealt[*place as usize - 1]
            }
            None if list == PADDING_LIST => PADDING,
            None => OUTSIDE,
        };
    }
}

fn deal_coefficients(lists: &[u8], starts: &[u32; LISTS + 1], coefficients: &[f32], dealt: &mut [f32]) {
    let mut places = places(starts);
    for (&list, &coefficient) in lists.iter().zip(coefficients) {
        if let Some(place) = places.get_mut(list as usize) {
            dealt[*place as usize] = coefficient;
            *place += 1;
        }
    }
}

fn pool_chunk<const D: usize, N: Number>(table: &HostTable, call: &Call, task: &mut PoolTask) {
    let feature = &call.features[task.chunk.feature];
    let bags = task.chunk.bags.clone();
    let mut missing = MissingRow::new(&table.first, table.shared_missing_row());
    let rows = table.arena.rows::<N>();
    if !is_plain(feature, &table.config) {
        pool_bags(feature, bags, &rows, task.records, &mut missing, task.rows, task.coefficients);
        return;
    }
    let keys = feature.keys.slice(task.chunk.positions.clone());
    let alike = match feature.bags {
        Bags::Fixed { hotness, .. } => Bags::Fixed { num_bags: bags.len(), hotness },
        other => other,
    };
    let chunk = Feature { keys, bags: alike, ..*feature };
    let pooling = PlainPooling::<D, N>::new(&chunk, task.rows, missing, call.mode.stream);
    dispatch(PoolRange { pooling, rows: &rows, records: task.records });
    streaming_fence();
    task.coefficients.fill(plain_coefficient(feature));
}

// ---- sort

/// Sorts the ids of a part by key.
fn sort_part(part: &mut PartWork) -> Result<()> {
    let runs = &mut part.left.runs;
    runs.start(part.distinct.iter(), false)?;
    for piece in &part.active {
        for (&row, &key) in piece.rows.iter().zip(&*piece.marks) {
            if key != NO_MARK {
                runs.add(key, row);
            }
        }
    }
    Ok(())
}

/// Makes the runs of all parts. If ids have coefficients, which pooling computes, they are sorted now.
fn sort_parts(
    call: &Call,
    chunks: &[Chunk],
    mut left: Vec<Left>,
    scratch: &SplitScratch,
    pool: &Pool,
) -> Result<Vec<KeyRuns>> {
    let error = FirstError::default();
    if call.is_weighted {
        let parts = left.iter_mut().map(|l| &mut l.runs).zip(&scratch.distinct).enumerate();
        pool.run(parts.collect(), |(part, (runs, distinct)): (usize, (&mut KeyRuns, &Distinct))| {
            error.note(runs.start(distinct.iter(), true).map(|()| {
                for chunk in chunks {
                    let first = chunk.ids.start;
                    let list = first + chunk.starts[part] as usize..first + chunk.starts[part + 1] as usize;
                    let dealt = &scratch.dealt;
                    let ids = dealt.marks[list.clone()].iter().zip(&dealt.rows[list.clone()]);
                    for ((&key, &row), &coefficient) in ids.zip(&dealt.coefficients[list]) {
                        if key != NO_MARK {
                            runs.add_weighted(key, row, coefficient);
                        }
                    }
                }
            }));
        });
    }
    error.into_result()?;
    Ok(left.into_iter().map(|l| l.runs).collect())
}
