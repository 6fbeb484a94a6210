//! Finds or inserts the records of many keys at once.
//!
//! Each key reads one random cache line of the index and one of the records, so many reads must be in flight at a time. Keys are
//! processed in blocks, in stages that are a block apart: compute hashes and prefetch buckets; read the buckets and prefetch rows;
//! resolve the few keys that are in a later bucket or absent; use the rows.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering::Relaxed};

use crate::contract::batch::Keys;
use crate::contract::record::RecordLayout;
use crate::error::Result;
use crate::initializer::Initializer;
use crate::key::{Key, hash};
use crate::memory;
use crate::row_type::RowType;
use crate::simd::{Kernel, dispatch, prefetch};
use crate::store::arena::{Addresses, Arena, NO_RECORD, RecordNumber, SharedArena};
use crate::store::format::RecordFormat;
use crate::store::index::{Directory, Index, Place};
use crate::store::journal::{self, Journal, Log};
use crate::store::region::Region;

/// Keys in a block. 16 and 64 are slower: 32 keys take about as long as one access to memory.
const BLOCK: usize = 32;
/// Mark of a key without a record.
pub const NO_MARK: u32 = u32::MAX;

/// Computes the first values of new records.
#[derive(Clone)]
pub struct FirstRecord {
    pub seed: u64,
    pub initializer: Initializer,
    pub layout: RecordLayout,
    pub format: RecordFormat,
}

impl FirstRecord {
    /// Computes the first values of a row, as the table would store them.
    pub fn fill_row(&self, key: Key, row: &mut [f32]) {
        self.initializer.fill(self.seed, key, row);
        if self.format.row_type != RowType::Float32 {
            self.format.row_type.round(row);
        }
    }

    /// `is_zero`: whether the memory of the record is zero.
    pub fn fill(&self, key: Key, record: &mut [f32], is_zero: bool) {
        if self.format.row_type == RowType::Float32 {
            self.initializer.fill(self.seed, key, &mut record[..self.format.dim]);
        } else {
            self.fill_narrow(key, record);
        }
        self.layout.fill_states(&mut record[self.format.states_start()..], is_zero);
    }

    fn fill_narrow(&self, key: Key, record: &mut [f32]) {
        ROW.with_borrow_mut(|row| {
            row.resize(self.format.dim, 0.0);
            self.initializer.fill(self.seed, key, row);
            self.format.write_row(record, row);
        });
        self.format.write_key(record, key);
    }
}

thread_local! {
    /// First values, before they are rounded.
    static ROW: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Access to rows, and insertion of new ones.
pub trait Source {
    /// Addresses of rows, for prefetches. Valid until a record is added.
    fn addresses(&self) -> Addresses;
    /// Makes a record for a key that has none. Returns [`NO_RECORD`] if there is no room for it.
    fn add(&mut self, key: Key) -> Result<RecordNumber>;
}

/// A whole table, used by one thread.
pub struct Whole<'a> {
    pub arena: &'a mut Arena,
    pub first: &'a FirstRecord,
    pub journal: &'a mut Journal,
}

impl Whole<'_> {
    /// Allocates a record and notes it in the journal. Returns whether its memory is zero, too.
    #[inline(always)]
    pub fn allocate(&mut self, key: Key) -> Result<(RecordNumber, bool)> {
        let unused = self.arena.next_unused();
        self.journal.reserve()?;
        let number = self.arena.allocate()?;
        self.journal.push(key, number);
        Ok((number, number == unused))
    }

    /// Makes a record with its first values.
    pub fn make(&mut self, key: Key) -> Result<RecordNumber> {
        let (number, is_zero) = self.allocate(key)?;
        self.first.fill(key, self.arena.record_mut(number), is_zero);
        Ok(number)
    }
}

impl Source for Whole<'_> {
    #[inline(always)]
    fn addresses(&self) -> Addresses {
        self.arena.addresses()
    }

    #[inline(never)]
    fn add(&mut self, key: Key) -> Result<RecordNumber> {
        if self.journal.take_room() { self.make(key) } else { Ok(NO_RECORD) }
    }
}

/// The part of a table whose keys share the top bits of their hash. It takes record numbers for itself.
pub struct Part<'a> {
    pub arena: SharedArena<'a>,
    pub first: &'a FirstRecord,
    /// Numbers of erased records that may be reused.
    pub free: Vec<RecordNumber>,
    /// Unused numbers, taken in runs from a counter that all parts share.
    pub unused: Range<RecordNumber>,
    pub counter: &'a AtomicU32,
    /// Number of keys that all parts together may still insert, if that may not be enough. Negative if keys found no room.
    pub room: Option<&'a AtomicI64>,
    pub log: Log,
}

impl Part<'_> {
    /// How many numbers are taken at a time, so that keys inserted together are close in memory.
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
        if self.room.is_some_and(|room| room.fetch_sub(1, Relaxed) <= 0) {
            return Ok(NO_RECORD);
        }
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

/// The distinct keys of a batch, numbered in order of first occurrence: their records and numbers of ids.
#[derive(Default)]
pub struct Distinct {
    /// Record number | count << 32.
    entries: Region<u64>,
    len: usize,
}

impl Distinct {
    /// Empties it and makes room for as many distinct keys as ids.
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
    /// Number of the key with this record. The mark beside the key in the index holds it. A mark is valid if the entry that it names
    /// has this record, so marks of earlier batches need not be cleared.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn number(&mut self, record: RecordNumber, mark: &mut u32) -> u32 {
        let number = *mark;
        if (number as usize) < self.len {
            // SAFETY: `len` is never beyond the end: the write below is checked.
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

/// Uses rows as soon as their records are known.
pub trait Consumer<S> {
    /// Bytes of a row to prefetch. 0: rows are not read now.
    fn row_bytes(&self) -> usize;
    /// Called when the records of all ids before `settled` are known. `may_miss`: some of them may have none.
    fn settled(&mut self, source: &mut S, records: &[RecordNumber], settled: usize, may_miss: bool);
}

/// Does not use the rows.
pub struct NoConsumer;

impl<S> Consumer<S> for NoConsumer {
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        0
    }
    #[inline(always)]
    fn settled(&mut self, _: &mut S, _: &[RecordNumber], _: usize, _: bool) {}
}

/// A search: its keys, and its results.
pub struct Search<'a, S, C> {
    pub index: &'a mut Index,
    pub source: &'a mut S,
    pub keys: Keys<'a>,
    /// Whether to insert keys without a record.
    pub insert: bool,
    pub distinct: &'a mut Distinct,
    /// `(keys,)`: the record's number, or [`NO_RECORD`].
    pub records: &'a mut [RecordNumber],
    /// `(keys,)`: index of the key among the distinct ones, or [`NO_MARK`]. Empty without marks.
    pub marks: &'a mut [u32],
    pub consumer: C,
}

/// The keys of a block between the first and the third stage.
#[derive(Clone, Copy)]
struct Block {
    keys: [Key; BLOCK],
    places: [Place; BLOCK],
}

/// Record and mark of a key that is not numbered yet.
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

/// Index in its block of a key that is not in its first bucket.
struct Late {
    numbers: [u8; BLOCK],
    len: usize,
}

impl<S: Source, C: Consumer<S>> Search<'_, S, C> {
    /// `MARK`: whether to number the distinct keys.
    #[inline(always)]
    pub fn run<const MARK: bool>(mut self) -> Result<()> {
        let num = self.keys.len();
        // At least one block, because empty bags are written too.
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
                // Before an insertion, because growth would move the marks.
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

    /// Prefetches the buckets of a block's keys.
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

    /// Searches the first bucket of each key. Adds keys that are not in it to `late`.
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

    /// Numbers the keys that were in their first bucket.
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

    /// Returns false if the key has no record.
    #[inline(never)]
    fn settle<const MARK: bool>(&mut self, index: usize, key: Key) -> Result<bool> {
        let hash = hash(key);
        let (record, mark) = match self.index.find_mut(hash, key) {
            Some(found) => found,
            None => {
                let record = if self.insert { self.source.add(key)? } else { NO_RECORD };
                if record == NO_RECORD {
                    if MARK {
                        self.marks[index] = NO_MARK;
                    }
                    self.records[index] = NO_RECORD;
                    return Ok(false);
                }
                (record, self.index.insert(hash, key, record)?)
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

/// Finds the buckets of the keys in flight again after the index has grown.
#[allow(unsafe_code)]
#[cold]
#[inline(never)]
fn find_places(index: &Index, blocks: &mut [Block; 3]) {
    for block in blocks {
        for (place, &key) in block.places.iter_mut().zip(&block.keys) {
            // SAFETY: the directory is the current one.
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
    /// `mark`: whether to number the distinct keys in `marks`.
    pub fn start(self, mark: bool) -> Result<()> {
        if mark { dispatch(Marked(self)) } else { dispatch(Unmarked(self)) }
    }
}
