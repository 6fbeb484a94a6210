//! Finds, or makes, the records of many keys at once.
//!
//! Every key costs one random line of the index and one of the records; what makes it fast is that many are on their way at
//! a time. Positions pass in blocks through stages that lie a block apart: hash and ask for the bucket; look into it and ask
//! for the row; settle the few keys that lie in a later bucket or nowhere; use the rows.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::arena::{Arena, NO_RECORD, RecordNumber, SharedArena};
use crate::batch::Keys;
use crate::error::Result;
use crate::index::{Index, Probe};
use crate::initializer::Initializer;
use crate::key::{Key, hash};
use crate::optimizer::StateSpec;
use crate::region::Region;
use crate::simd::{Kernel, dispatch, prefetch};

/// Positions a stage. At 16 and at 64 it is slower; a memory latency is about what 32 positions take.
const BLOCK: usize = 32;
/// Mark of a position that has no record.
pub const NO_MARK: u32 = u32::MAX;

/// How a record starts.
#[derive(Clone)]
pub struct FirstRecord {
    pub seed: u64,
    pub initializer: Initializer,
    pub dim: usize,
    pub states: Vec<StateSpec>,
}

impl FirstRecord {
    pub fn fill_row(&self, key: Key, row: &mut [f32]) {
        self.initializer.fill(self.seed, key, row);
    }

    /// `is_zero`: the record's memory was never used.
    pub fn fill(&self, key: Key, record: &mut [f32], is_zero: bool) {
        let (row, states) = record.split_at_mut(self.dim);
        self.fill_row(key, row);
        self.fill_states(states, is_zero);
    }

    pub fn fill_states(&self, mut rest: &mut [f32], is_zero: bool) {
        for state in &self.states {
            let (values, others) = rest.split_at_mut(state.width);
            if state.initial != 0.0 || !is_zero {
                values.fill(state.initial);
            }
            rest = others;
        }
    }
}

/// Where rows come from, and how new ones are made.
pub trait Source {
    /// Address of a row, to ask for it.
    fn address(&self, number: RecordNumber) -> *const f32;
    /// A new record for a key that is not there.
    fn add(&mut self, key: Key) -> Result<RecordNumber>;
}

/// A whole table in the hands of one thread.
pub struct Whole<'a> {
    pub arena: &'a mut Arena,
    pub first: &'a FirstRecord,
}

impl Source for Whole<'_> {
    #[inline(always)]
    fn address(&self, number: RecordNumber) -> *const f32 {
        self.arena.address(number)
    }

    #[inline(never)]
    fn add(&mut self, key: Key) -> Result<RecordNumber> {
        let unused = self.arena.next_unused();
        let number = self.arena.allocate()?;
        self.first.fill(key, self.arena.record_mut(number), number == unused);
        Ok(number)
    }
}

/// The part of a table whose keys share the top bits of their hash. Its new records have numbers of its own.
pub struct Part<'a> {
    pub arena: SharedArena<'a>,
    pub first: &'a FirstRecord,
    /// Numbers that were erased and may be used again.
    pub free: Vec<RecordNumber>,
    /// Numbers never used, taken in runs from all parts' common counter.
    pub unused: std::ops::Range<RecordNumber>,
    pub counter: &'a AtomicU32,
}

impl Part<'_> {
    /// Numbers taken at a time: neighbours in time are neighbours in memory.
    pub const RUN: u32 = 64;
}

impl Source for Part<'_> {
    #[inline(always)]
    fn address(&self, number: RecordNumber) -> *const f32 {
        self.arena.address(number)
    }

    #[allow(unsafe_code)]
    #[inline(never)]
    fn add(&mut self, key: Key) -> Result<RecordNumber> {
        let (number, is_zero) = match self.free.pop() {
            Some(number) => (number, false),
            None => {
                if self.unused.is_empty() {
                    let start = self.counter.fetch_add(Self::RUN, Relaxed);
                    self.unused = start..start + Self::RUN;
                }
                (self.unused.next().expect("just filled"), true)
            }
        };
        // SAFETY: - the number is this part's alone: `free` and `unused` are disjoint from those of the others.
        //         - no index names it yet, so no other thread reads it.
        let record = unsafe { self.arena.record_mut(number) };
        self.first.fill(key, record, is_zero);
        Ok(number)
    }
}

/// The distinct keys of a batch, numbered as they come: their records and how often each came.
#[derive(Default)]
pub struct Distinct {
    /// Record number | count << 32.
    entries: Region<u64>,
    len: usize,
}

impl Distinct {
    /// Starts anew, with room for as many distinct keys as there are positions.
    pub fn start(&mut self, positions: usize) -> Result<()> {
        self.len = 0;
        self.entries.grow_amortized(positions)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn iter(&self) -> impl Iterator<Item = (RecordNumber, u32)> {
        self.entries[..self.len].iter().map(|&e| (e as u32, (e >> 32) as u32))
    }

    /// Number of the key with this record. The mark, which lies beside the key in the index, remembers it: it is right if
    /// the entry that it names is this record's, so marks of former batches need no clearing.
    #[inline(always)]
    fn number(&mut self, record: RecordNumber, mark: &mut u32) -> u32 {
        let number = *mark as usize;
        if number < self.len && self.entries[number] as u32 == record {
            self.entries[number] += 1 << 32;
            return number as u32;
        }
        let number = self.len;
        self.entries[number] = u64::from(record) | 1 << 32;
        self.len += 1;
        *mark = number as u32;
        number as u32
    }
}

/// Which positions of a feature are looked up.
pub trait Positions: Copy {
    fn len(&self) -> usize;
    fn get(&self, index: usize) -> usize;
    fn load(&self, keys: &Keys, start: usize, block: &mut [Key]);
}

/// All of them, from 0.
#[derive(Clone, Copy)]
pub struct All(pub usize);

impl Positions for All {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }
    #[inline(always)]
    fn get(&self, index: usize) -> usize {
        index
    }
    #[inline(always)]
    fn load(&self, keys: &Keys, start: usize, block: &mut [Key]) {
        keys.load(start, block);
    }
}

impl Positions for &[u32] {
    #[inline(always)]
    fn len(&self) -> usize {
        <[u32]>::len(self)
    }
    #[inline(always)]
    fn get(&self, index: usize) -> usize {
        self[index] as usize
    }
    #[inline(always)]
    fn load(&self, keys: &Keys, start: usize, block: &mut [Key]) {
        for (key, &position) in block.iter_mut().zip(&self[start..]) {
            *key = keys.get(position as usize);
        }
    }
}

/// Uses rows as soon as they are there.
pub trait Consumer<S> {
    /// Bytes of a row to ask for ahead; 0: the rows are not read now.
    fn row_bytes(&self) -> usize;
    /// The records of all positions below `settled` are known.
    fn settled(&mut self, source: &mut S, records: &[AtomicU32], settled: usize);
}

/// Leaves the rows for later.
pub struct Nobody;

impl<S> Consumer<S> for Nobody {
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        0
    }
    #[inline(always)]
    fn settled(&mut self, _: &mut S, _: &[AtomicU32], _: usize) {}
}

/// One search: over which positions, and where its results go.
pub struct Search<'a, S, P, C> {
    pub index: &'a mut Index,
    pub source: &'a mut S,
    pub keys: Keys<'a>,
    pub positions: P,
    /// Makes records for keys that have none.
    pub insert: bool,
    pub distinct: &'a mut Distinct,
    /// By position in the feature: the record's number, or [`NO_RECORD`].
    pub records: &'a [AtomicU32],
    /// By index into `positions`: the number of the key among the distinct ones, or [`NO_MARK`]. Empty without marks.
    pub marks: &'a mut [u32],
    pub consumer: C,
}

impl<S: Source, P: Positions, C: Consumer<S>> Search<'_, S, P, C> {
    /// `MARK`: numbers the distinct keys.
    #[inline(always)]
    pub fn run<const MARK: bool>(mut self) -> Result<()> {
        let num = self.positions.len();
        let blocks = num.div_ceil(BLOCK);
        let (mut keys, mut hashes) = ([[0; BLOCK]; 3], [[0; BLOCK]; 3]);
        let (mut late, mut num_late) = ([0u8; BLOCK], 0);
        for b in 0..blocks + 3 {
            if b < blocks {
                let (start, end) = (b * BLOCK, ((b + 1) * BLOCK).min(num));
                let (keys, hashes) = (&mut keys[b % 3], &mut hashes[b % 3]);
                self.positions.load(&self.keys, start, &mut keys[..end - start]);
                for (hash_of, &key) in hashes.iter_mut().zip(&*keys).take(end - start) {
                    *hash_of = hash(key);
                    self.index.prefetch(*hash_of);
                }
            }
            if b >= 2 {
                for &i in &late[..num_late] {
                    let (key, hash) = (keys[(b - 2) % 3][i as usize], hashes[(b - 2) % 3][i as usize]);
                    self.settle::<MARK>((b - 2) * BLOCK + i as usize, key, hash)?;
                }
            }
            num_late = 0;
            if b >= 1 && b <= blocks {
                let (start, end) = ((b - 1) * BLOCK, (b * BLOCK).min(num));
                let (keys, hashes) = (&keys[(b - 1) % 3], &hashes[(b - 1) % 3]);
                for i in 0..end - start {
                    if !self.probe::<MARK>(start + i, keys[i], hashes[i]) {
                        late[num_late] = i as u8;
                        num_late += 1;
                    }
                }
            }
            if b >= 3 {
                self.consumer.settled(self.source, self.records, ((b - 2) * BLOCK).min(num));
            }
        }
        Ok(())
    }

    /// Looks into the first bucket; false if that does not settle it.
    #[inline(always)]
    fn probe<const MARK: bool>(&mut self, index: usize, key: Key, hash: u64) -> bool {
        match self.index.probe(hash, key) {
            Probe::Found(record, mark) => {
                if MARK {
                    self.marks[index] = self.distinct.number(record, mark);
                }
                self.note(index, record);
                true
            }
            Probe::Further => {
                self.index.prefetch_further(hash);
                false
            }
            Probe::Absent => false,
        }
    }

    #[inline]
    fn settle<const MARK: bool>(&mut self, index: usize, key: Key, hash: u64) -> Result<()> {
        let (record, mark) = match self.index.find_mut(hash, key) {
            Some(found) => found,
            None if self.insert => {
                let record = self.source.add(key)?;
                (record, self.index.insert(hash, key, record)?)
            }
            None => {
                if MARK {
                    self.marks[index] = NO_MARK;
                }
                self.note(index, NO_RECORD);
                return Ok(());
            }
        };
        if MARK {
            self.marks[index] = self.distinct.number(record, mark);
        }
        self.note(index, record);
        Ok(())
    }

    #[inline(always)]
    fn note(&mut self, index: usize, record: RecordNumber) {
        self.records[self.positions.get(index)].store(record, Relaxed);
        let row = self.source.address(record).cast::<u8>();
        let mut offset = 0;
        while offset < self.consumer.row_bytes() {
            prefetch(row.wrapping_add(offset));
            offset += 64;
        }
    }
}

struct Marked<'a, S, P, C>(Search<'a, S, P, C>);
struct Unmarked<'a, S, P, C>(Search<'a, S, P, C>);

impl<S: Source, P: Positions, C: Consumer<S>> Kernel for Marked<'_, S, P, C> {
    type Output = Result<()>;
    #[inline(always)]
    fn run(self) -> Result<()> {
        self.0.run::<true>()
    }
}

impl<S: Source, P: Positions, C: Consumer<S>> Kernel for Unmarked<'_, S, P, C> {
    type Output = Result<()>;
    #[inline(always)]
    fn run(self) -> Result<()> {
        self.0.run::<false>()
    }
}

impl<S: Source, P: Positions, C: Consumer<S>> Search<'_, S, P, C> {
    /// `mark`: numbers the distinct keys, in `marks`.
    pub fn start(self, mark: bool) -> Result<()> {
        if mark { dispatch(Marked(self)) } else { dispatch(Unmarked(self)) }
    }
}
