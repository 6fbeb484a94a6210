//! Finds, or makes, the records of many keys at once.
//!
//! Every key costs one random line of the index and one of the records; what makes it fast is that many are on their way at
//! a time. Positions pass in blocks through stages that lie a block apart: hash and ask for the bucket; look into it and ask
//! for the row; settle the few keys that lie in a later bucket or nowhere; use the rows.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::arena::{Addresses, Arena, NO_RECORD, RecordNumber, SharedArena};
use crate::batch::Keys;
use crate::error::Result;
use crate::index::{Directory, Index, Place};
use crate::initializer::Initializer;
use crate::journal::{self, Journal, Log};
use crate::key::{Key, hash};
use crate::memory;
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
    /// Where rows lie, to ask for them; until a record is added.
    fn addresses(&self) -> Addresses;
    /// A new record for a key that is not there.
    fn add(&mut self, key: Key) -> Result<RecordNumber>;
}

/// A whole table in the hands of one thread.
pub struct Whole<'a> {
    pub arena: &'a mut Arena,
    pub first: &'a FirstRecord,
    pub journal: &'a mut Journal,
}

impl Source for Whole<'_> {
    #[inline(always)]
    fn addresses(&self) -> Addresses {
        self.arena.addresses()
    }

    #[inline(never)]
    fn add(&mut self, key: Key) -> Result<RecordNumber> {
        let unused = self.arena.next_unused();
        self.journal.reserve()?;
        let number = self.arena.allocate()?;
        self.journal.push(key, number);
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
    pub unused: Range<RecordNumber>,
    pub counter: &'a AtomicU32,
    pub log: Log,
}

impl Part<'_> {
    /// Numbers taken at a time: neighbours in time are neighbours in memory.
    pub const RUN: u32 = 64;
}

impl Source for Part<'_> {
    #[inline(always)]
    fn addresses(&self) -> Addresses {
        self.arena.addresses()
    }

    #[allow(unsafe_code)]
    #[inline(never)]
    fn add(&mut self, key: Key) -> Result<RecordNumber> {
        memory::reserve(&mut self.log, 1, journal::WHAT)?;
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
        self.log.push((key, number));
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

    pub fn num_bytes(&self) -> usize {
        self.entries.num_bytes()
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = (RecordNumber, u32)> {
        self.entries[..self.len].iter().map(|&e| (e as u32, (e >> 32) as u32))
    }

    fn numbering(&mut self) -> Numbering<'_> {
        Numbering { entries: &mut self.entries, len: self.len }
    }
}

/// [`Distinct`] in registers.
struct Numbering<'a> {
    entries: &'a mut [u64],
    len: usize,
}

impl Numbering<'_> {
    /// Number of the key with this record. The mark, which lies beside the key in the index, remembers it: it is right if
    /// the entry that it names is this record's, so marks of former batches need no clearing.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn number(&mut self, record: RecordNumber, mark: &mut u32) -> u32 {
        let number = *mark;
        if (number as usize) < self.len {
            // SAFETY: `len` never passes the end: the write below is checked.
            let entry = unsafe { self.entries.get_unchecked_mut(number as usize) };
            if *entry as u32 == record {
                *entry += 1 << 32;
                return number;
            }
        }
        self.entries[self.len] = u64::from(record) | 1 << 32;
        *mark = self.len as u32;
        self.len += 1;
        *mark
    }
}

/// Uses rows as soon as they are there.
pub trait Consumer<S> {
    /// Bytes of a row to ask for ahead; 0: the rows are not read now.
    fn row_bytes(&self) -> usize;
    /// The records of all positions below `settled` are known. `may_miss`: some of them may have none.
    fn settled(&mut self, source: &mut S, records: &[RecordNumber], settled: usize, may_miss: bool);
}

/// Leaves the rows for later.
pub struct Nobody;

impl<S> Consumer<S> for Nobody {
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        0
    }
    #[inline(always)]
    fn settled(&mut self, _: &mut S, _: &[RecordNumber], _: usize, _: bool) {}
}

/// One search: for which keys, and where its results go.
pub struct Search<'a, S, C> {
    pub index: &'a mut Index,
    pub source: &'a mut S,
    pub keys: Keys<'a>,
    /// Makes records for keys that have none.
    pub insert: bool,
    pub distinct: &'a mut Distinct,
    /// `(keys,)`: the record's number, or [`NO_RECORD`].
    pub records: &'a mut [RecordNumber],
    /// `(keys,)`: the number of the key among the distinct ones, or [`NO_MARK`]. Empty without marks.
    pub marks: &'a mut [u32],
    pub consumer: C,
}

/// The keys of a block on their way: from the first stage to the third.
#[derive(Clone, Copy)]
struct Block {
    keys: [Key; BLOCK],
    places: [Place; BLOCK],
}

/// Record and mark of a key, on their way to its number.
#[derive(Clone, Copy)]
struct Found {
    record: RecordNumber,
    mark: *mut u32,
}

impl Default for Found {
    fn default() -> Found {
        Found { record: NO_RECORD, mark: std::ptr::null_mut() }
    }
}

/// What the first bucket of a key did not settle: its number in the block.
struct Late {
    numbers: [u8; BLOCK],
    len: usize,
}

impl<S: Source, C: Consumer<S>> Search<'_, S, C> {
    /// `MARK`: numbers the distinct keys.
    #[inline(always)]
    pub fn run<const MARK: bool>(mut self) -> Result<()> {
        let num = self.keys.len();
        // One at least: bags of no ids are written too.
        let num_blocks = num.div_ceil(BLOCK).max(1);
        let range = |b: usize| (b * BLOCK).min(num)..((b + 1) * BLOCK).min(num);
        let mut blocks = [Block { keys: [0; BLOCK], places: [Place::default(); BLOCK] }; 3];
        let mut found = [Found::default(); BLOCK];
        let mut late = Late { numbers: [0; BLOCK], len: 0 };
        let mut directory = self.index.directory();
        let mut may_miss = false;
        for b in 0..num_blocks + 3 {
            if b < num_blocks {
                self.ask(range(b), directory, &mut blocks[b % 3]);
            }
            if MARK && (2..num_blocks + 2).contains(&b) {
                // Before anything is inserted: growth would move the marks.
                self.number_block(range(b - 2), &mut found);
            }
            if late.len > 0 {
                let growths = self.index.growths();
                for &i in &late.numbers[..late.len] {
                    let key = blocks[(b + 1) % 3].keys[i as usize]; // that is, of b - 2
                    may_miss |= !self.settle::<MARK>((b - 2) * BLOCK + i as usize, key)?;
                }
                late.len = 0;
                if growths != self.index.growths() {
                    directory = self.index.directory();
                    find_places(self.index, &mut blocks);
                }
            }
            if b >= 1 && b <= num_blocks {
                self.probe_block::<MARK>(range(b - 1), &blocks[(b + 2) % 3], &mut found, &mut late);
            }
            if b >= 3 {
                self.consumer.settled(self.source, self.records, range(b - 3).end, may_miss);
            }
        }
        Ok(())
    }

    /// Asks for the buckets of a block's keys.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn ask(&mut self, range: Range<usize>, directory: Directory, block: &mut Block) {
        let len = range.len().min(BLOCK);
        self.keys.load(range.start, &mut block.keys[..len]);
        for (place, &key) in block.places[..len].iter_mut().zip(&block.keys) {
            // SAFETY: `run` takes the directory anew when the index has grown.
            *place = unsafe { directory.prefetch(hash(key)) };
        }
    }

    /// Looks into the first bucket of each key; notes in `late` which of them that does not settle.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn probe_block<const MARK: bool>(
        &mut self,
        range: Range<usize>,
        block: &Block,
        found: &mut [Found; BLOCK],
        late: &mut Late,
    ) {
        let (row_bytes, addresses) = (self.consumer.row_bytes(), self.source.addresses());
        let entries = self.distinct.entries.as_ptr();
        let mut num_late = 0;
        let keys = block.places.iter().zip(&block.keys).zip(&mut self.records[range]);
        for (i, (((&place, &key), to), found)) in keys.zip(found).enumerate() {
            // SAFETY: `find_places` renews the places when the index has grown, which is ours alone.
            let Some((record, mark)) = (unsafe { place.probe(key) }) else {
                late.numbers[num_late & (BLOCK - 1)] = i as u8;
                num_late += 1;
                continue;
            };
            if MARK {
                *found = Found { record, mark };
                // SAFETY: `probe` gives a mark of the index.
                prefetch(entries.wrapping_add(unsafe { *mark } as usize));
            }
            *to = record;
            prefetch_row(addresses.get(record), row_bytes);
        }
        late.len = num_late;
    }

    /// Numbers the keys that a block's first look found.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn number_block(&mut self, range: Range<usize>, found: &mut [Found; BLOCK]) {
        let mut numbering = self.distinct.numbering();
        for (to, found) in self.marks[range].iter_mut().zip(found) {
            let Found { record, mark } = std::mem::take(found);
            if record != NO_RECORD {
                // SAFETY: the index has not grown since the probe that gave the mark, and is ours alone.
                *to = numbering.number(record, unsafe { &mut *mark });
            }
        }
        self.distinct.len = numbering.len;
    }

    /// False: the key has no record.
    #[inline(never)]
    fn settle<const MARK: bool>(&mut self, index: usize, key: Key) -> Result<bool> {
        let hash = hash(key);
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
                self.records[index] = NO_RECORD;
                return Ok(false);
            }
        };
        if MARK {
            let mut numbering = self.distinct.numbering();
            self.marks[index] = numbering.number(record, mark);
            self.distinct.len = numbering.len;
        }
        self.records[index] = record;
        prefetch_row(self.source.addresses().get(record), self.consumer.row_bytes());
        Ok(true)
    }
}

/// After the index has grown: where the keys on their way are now.
#[allow(unsafe_code)]
#[cold]
#[inline(never)]
fn find_places(index: &Index, blocks: &mut [Block; 3]) {
    for block in blocks {
        for (place, &key) in block.places.iter_mut().zip(&block.keys) {
            // SAFETY: the directory is of this moment.
            *place = unsafe { index.directory().prefetch(hash(key)) };
        }
    }
}

#[inline(always)]
fn prefetch_row(row: *const f32, bytes: usize) {
    let mut offset = 0;
    while offset < bytes {
        prefetch(row.cast::<u8>().wrapping_add(offset));
        offset += 64;
    }
}

struct Marked<'a, S, C>(Search<'a, S, C>);
struct Unmarked<'a, S, C>(Search<'a, S, C>);

impl<S: Source, C: Consumer<S>> Kernel for Marked<'_, S, C> {
    type Output = Result<()>;
    #[inline(always)]
    fn run(self) -> Result<()> {
        self.0.run::<true>()
    }
}

impl<S: Source, C: Consumer<S>> Kernel for Unmarked<'_, S, C> {
    type Output = Result<()>;
    #[inline(always)]
    fn run(self) -> Result<()> {
        self.0.run::<false>()
    }
}

impl<S: Source, C: Consumer<S>> Search<'_, S, C> {
    /// `mark`: numbers the distinct keys, in `marks`.
    pub fn start(self, mark: bool) -> Result<()> {
        if mark { dispatch(Marked(self)) } else { dispatch(Unmarked(self)) }
    }
}
