//! From a key to the number of its record: open addressing over buckets of one cache line.
//!
//! A bucket has four keys, their record numbers and their marks (what a step notes about a key, in the line that it reads
//! anyway). It is filled from slot 0 up, so a bucket whose last slot is empty ends a search. Record number 0 is "empty":
//! zeroed memory is an empty index, and no key is special.
//!
//! Buckets lie in segments of at most 2 MiB, found by the top bits of the hash through a directory (extendible hashing:
//! Fagin, Nievergelt, Pippenger, Strong, 1979). A full segment doubles, or at full size splits in two, so that growth never
//! stops for more than one segment; segments take their turns at different loads, so that they do not all grow at once.
//! Bits below the directory's choose the bucket.
//!
//! Adversarial keys cost at most a constant times random ones. [`segment`] handles keys that share a bucket. Keys that share the
//! directory's bits would split their segment again and again: where a split would leave them together, the segment doubles instead.

#![allow(unsafe_code)]

mod segment;
#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::simd::prefetch;
use crate::store::arena::{NO_RECORD, RecordNumber};
use segment::{Bucket, Segment};

const SLOTS: usize = 4;
/// Buckets of a segment at most: 2 MiB, one huge page.
const MAX_BUCKETS: usize = 1 << 15;
/// A segment grows at a load between these: below the first, growth would waste memory; above the second, searches for keys
/// that are not there get long (three times slower at .8 than at .6).
const GROWTH_LOAD: (f64, f64) = (0.6, 0.8);
/// A split leaves each half at least one `SMALLEST_HALF`th of the keys, else the segment doubles beyond `MAX_BUCKETS`. Random keys leave
/// half, give or take some hundred of 80,000. Adversarial keys stay together, and so do keys that come in the order of their hashes.
const SMALLEST_HALF: usize = 8;
/// Directory entries a segment at most. Adversarial keys could make one segment much deeper than the others; segments of random keys
/// differ in depth by at most two.
const MAX_SPARSE_DIRECTORY: usize = 1 << 6;
const MAX_DEPTH: u32 = 48;

/// An index, or the part of one whose hashes start with the same `prefix_bits`.
pub struct Index {
    prefix_bits: u32,
    /// Bits of the hash after the prefix that number the directory's entries.
    depth: u32,
    directory: Vec<Entry>,
    /// In the order of their hashes.
    segments: Vec<Segment>,
    len: usize,
    /// Times that places lost their meaning.
    growths: u32,
}

/// Where the buckets of some hashes lie: what a search needs of a segment, in one read.
#[derive(Clone, Copy)]
struct Entry {
    buckets: *mut Bucket,
    mask: u32,
    segment: u32,
}

// SAFETY: the address of memory that the segment beside it owns; who follows it says why he may.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// The directory as searches read it, good until the index grows.
#[derive(Clone, Copy)]
pub struct Directory {
    entries: *const Entry,
    shift: u32,
    mask: usize,
}

impl Directory {
    /// Prefetches the first bucket of a key with this hash, and says which it is.
    ///
    /// # Safety
    /// The index is still there and has not grown since it gave this directory.
    #[inline(always)]
    pub unsafe fn prefetch(self, hash: u64) -> Place {
        // SAFETY: `mask` is the number of entries less one; the caller promises that they are still there.
        let entry = unsafe { *self.entries.wrapping_add((hash >> self.shift) as usize & self.mask) };
        let bucket = entry.buckets.wrapping_add(hash as usize & entry.mask as usize);
        prefetch(bucket);
        Place(bucket)
    }
}

/// The first bucket of a key, until the index grows.
#[derive(Clone, Copy)]
pub struct Place(*mut Bucket);

impl Default for Place {
    fn default() -> Place {
        Place(std::ptr::null_mut())
    }
}

impl Place {
    /// Record and mark of `key` if they are in this bucket; if not, prefetches the next one.
    ///
    /// # Safety
    /// A directory gave the place, its index has not grown since, and only the caller has the index.
    #[inline(always)]
    pub unsafe fn probe(self, key: Key) -> Option<(RecordNumber, *mut u32)> {
        // SAFETY: `Directory::prefetch` names buckets of the index; the caller promises that it is there and his.
        let bucket = unsafe { &mut *self.0 };
        match bucket.find(key) {
            Some(slot) => Some((bucket.records[slot], &raw mut bucket.marks[slot])),
            None => {
                prefetch(self.0.wrapping_add(1));
                None
            }
        }
    }
}

impl Index {
    pub fn new(capacity: usize) -> Result<Index> {
        Index::part(0, capacity)
    }

    fn part(prefix_bits: u32, capacity: usize) -> Result<Index> {
        let buckets = (capacity as f64 / GROWTH_LOAD.0 / SLOTS as f64).ceil() as usize;
        let segments = buckets.div_ceil(MAX_BUCKETS).max(1).next_power_of_two();
        let buckets = buckets.div_ceil(segments).max(1).next_power_of_two();
        let depth = segments.trailing_zeros();
        let mut made = memory::with_capacity(segments, "the index of a table")?;
        for place in 0..segments {
            made.push(Segment::new(buckets, depth, place as u64, false)?);
        }
        let directory = memory::with_capacity(segments, "the index of a table")?;
        Ok(Index::of(prefix_bits, depth, made, directory))
    }

    /// `directory`: empty, with room for `2^depth` entries.
    fn of(prefix_bits: u32, depth: u32, segments: Vec<Segment>, directory: Vec<Entry>) -> Index {
        let len = segments.iter().map(|s| s.len as usize).sum();
        let mut index = Index { prefix_bits, depth, directory, segments, len, growths: 0 };
        index.number_directory();
        index
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Keys that fit before a segment grows.
    pub fn capacity(&self) -> usize {
        self.segments.iter().map(|s| s.limit as usize).sum()
    }

    pub fn num_bytes(&self) -> usize {
        self.segments.iter().map(Segment::num_bytes).sum::<usize>() + size_of_val(&self.directory[..])
    }

    /// How far a hash is shifted to number its entry. By 63 at most: with one entry the mask leaves 0 of any.
    fn shift(&self) -> u32 {
        (64 - self.prefix_bits - self.depth).min(63)
    }

    fn segment_of(&self, hash: u64) -> usize {
        let entry = (hash >> self.shift()) as usize & (self.directory.len() - 1);
        self.directory[entry].segment as usize
    }

    /// How often places lost their meaning.
    #[inline(always)]
    pub fn growths(&self) -> u32 {
        self.growths
    }

    #[inline(always)]
    pub fn directory(&self) -> Directory {
        Directory { entries: self.directory.as_ptr(), shift: self.shift(), mask: self.directory.len() - 1 }
    }

    /// Prefetches the first bucket of a key with this hash.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        // SAFETY: `&self`: it does not grow meanwhile.
        unsafe { self.directory().prefetch(hash) };
    }

    #[inline]
    pub fn find(&self, hash: u64, key: Key) -> RecordNumber {
        let segment = &self.segments[self.segment_of(hash)];
        segment.find(hash, key).map_or(NO_RECORD, |slot| segment.record(slot))
    }

    /// Mark of a key.
    #[inline]
    pub fn mark(&self, hash: u64, key: Key) -> Option<u32> {
        let segment = &self.segments[self.segment_of(hash)];
        segment.find(hash, key).map(|slot| segment.mark(slot))
    }

    /// Calls `visit` for each key and its mark.
    pub fn for_each_mark(&mut self, mut visit: impl FnMut(Key, &mut u32)) {
        self.segments.iter_mut().for_each(|segment| segment.for_each_mark(&mut visit));
    }

    /// Record and mark of a key.
    #[inline]
    pub fn find_mut(&mut self, hash: u64, key: Key) -> Option<(RecordNumber, &mut u32)> {
        let segment = self.segment_of(hash);
        let segment = &mut self.segments[segment];
        let slot = segment.find(hash, key)?;
        Some((segment.record(slot), segment.mark_mut(slot)))
    }

    /// Adds a key that is not there; gives its mark.
    ///
    /// # Errors
    /// Without memory to grow; then nothing has changed.
    #[inline(never)]
    pub fn insert(&mut self, hash: u64, key: Key, record: RecordNumber) -> Result<&mut u32> {
        let mut at = self.segment_of(hash);
        while self.segments[at].len >= self.segments[at].limit {
            self.grow(at)?;
            at = self.segment_of(hash);
        }
        self.len += 1;
        let (mut slot, passed) = self.segments[at].place(hash, key, record, 0);
        if self.segments[at].is_attacked(passed) && self.defend(at) {
            slot = self.segments[at].find(hash, key).expect("it was just placed");
        }
        Ok(self.segments[at].mark_mut(slot))
    }

    /// Places a segment's keys by the secret. False: there is no memory for it now; the next long search tries again.
    #[cold]
    fn defend(&mut self, at: usize) -> bool {
        let Ok(keyed) = self.segments[at].to_keyed() else { return false };
        self.growths += 1;
        self.segments[at] = keyed;
        self.number_directory();
        true
    }

    /// Removes a key; gives the record that it had.
    pub fn remove(&mut self, hash: u64, key: Key) -> Option<RecordNumber> {
        let segment = self.segment_of(hash);
        let segment = &mut self.segments[segment];
        let slot = segment.find(hash, key)?;
        let record = segment.record(slot);
        segment.remove(slot);
        self.len -= 1;
        Some(record)
    }

    /// Makes room in a segment.
    #[cold]
    fn grow(&mut self, at: usize) -> Result<()> {
        self.growths += 1;
        if self.may_split(at) {
            let halves = self.halves(at)?;
            let len = self.segments[at].len as usize;
            if halves.iter().all(|half| half.len as usize * SMALLEST_HALF >= len) {
                return self.split_segment(at, halves);
            }
        }
        self.segments[at] = self.segments[at].to_doubled(at as u64)?;
        self.number_directory();
        Ok(())
    }

    fn may_split(&self, at: usize) -> bool {
        let segment = &self.segments[at];
        let sparse = (self.directory.len() * 2) / (self.segments.len() + 1);
        let has_bits = self.prefix_bits + self.depth < MAX_DEPTH && sparse <= MAX_SPARSE_DIRECTORY;
        segment.buckets.len() >= MAX_BUCKETS && (segment.depth < self.depth || has_bits)
    }

    /// Two segments for one, each with the keys of one value of the next bit of the hash.
    fn halves(&self, at: usize) -> Result<[Segment; 2]> {
        let segment = &self.segments[at];
        let bit = self.prefix_bits + segment.depth;
        let mut num_buckets = [segment.buckets.len(); 2];
        if segment.buckets.len() > MAX_BUCKETS {
            let ones = segment.count_ones(bit);
            num_buckets = [segment.len as usize - ones, ones].map(|len| buckets_for(len).max(MAX_BUCKETS));
        }
        // The halves grow at loads of their own, and so do their halves.
        let place = [0, 1].map(|half| (self.segments.len() + half) as u64);
        segment.to_halves(bit, num_buckets, place)
    }

    /// Puts its halves in the place of a segment.
    fn split_segment(&mut self, at: usize, halves: [Segment; 2]) -> Result<()> {
        let depth = self.depth.max(halves[0].depth);
        memory::reserve(&mut self.segments, 1, "the index of a table")?;
        self.reserve_directory(depth)?;
        self.depth = depth;
        let [low, high] = halves;
        self.segments[at] = low;
        self.segments.insert(at + 1, high);
        self.number_directory();
        Ok(())
    }

    fn reserve_directory(&mut self, depth: u32) -> Result<()> {
        let more = (1usize << depth).saturating_sub(self.directory.len());
        memory::reserve(&mut self.directory, more, "the index of a table")
    }

    /// Writes the directory anew from the segments, which stand in its order; there is room for it.
    fn number_directory(&mut self) {
        self.directory.clear();
        for (number, segment) in self.segments.iter().enumerate() {
            let mask = segment.buckets.len() as u32 - 1;
            let entry = Entry { buckets: segment.buckets.base(), mask, segment: number as u32 };
            self.directory.extend(std::iter::repeat_n(entry, 1 << (self.depth - segment.depth)));
        }
    }

    /// Makes the index ready for `split`: no segment spans two parts.
    pub fn deepen(&mut self, bits: u32) -> Result<()> {
        while let Some(at) = self.segments.iter().position(|s| s.depth < bits) {
            // Halves may be unequal: each must hold what the whole held.
            self.growths += 1;
            self.split_segment(at, self.halves(at)?)?;
        }
        Ok(())
    }

    /// Takes the index apart into `2^bits` by the top bits of the hash, for as many threads, and leaves an empty one. The [`Joint`]
    /// puts the parts together.
    ///
    /// # Errors
    /// Without memory for that; then nothing has changed.
    pub fn split(&mut self, bits: u32) -> Result<(Vec<Index>, Joint)> {
        assert!(
            self.prefix_bits == 0 && self.segments.iter().all(|s| s.depth >= bits),
            "`deepen` came before"
        );
        let joint = Joint::with_room_for(self)?;
        let mut rooms = self.rooms(bits)?;
        let whole = std::mem::replace(self, Index::new(0)?);
        let mut taken = 0; // in units of 2^-depth of the range of hashes
        for mut segment in whole.segments {
            let part = taken >> (whole.depth - bits);
            taken += 1 << (whole.depth - segment.depth);
            segment.depth -= bits;
            rooms[part].0.push(segment);
        }
        let depth = whole.depth - bits;
        let parts =
            rooms.into_iter().map(|(segments, directory)| Index::of(bits, depth, segments, directory));
        Ok((parts.collect(), joint))
    }

    /// Room for the segments and the directory of each part.
    fn rooms(&self, bits: u32) -> Result<Vec<(Vec<Segment>, Vec<Entry>)>> {
        let mut counts = vec![0; 1 << bits];
        let per_part = 1 << (self.depth - bits);
        let first = |at: usize| self.directory[at * per_part].segment as usize;
        for (part, count) in counts.iter_mut().enumerate() {
            let end = if part + 1 == 1 << bits { self.segments.len() } else { first(part + 1) };
            *count = end - first(part);
        }
        let room = |count: usize| {
            let what = "the index of a table";
            Ok((memory::with_capacity(count, what)?, memory::with_capacity(per_part, what)?))
        };
        counts.into_iter().map(room).collect()
    }

    /// Calls `visit` for the keys from `start` (a count of places) on until it says stop; gives where to go on.
    pub fn scan(&self, start: u64, mut visit: impl FnMut(Key, RecordNumber) -> bool) -> Option<u64> {
        let mut passed = 0u64;
        for segment in &self.segments {
            let places = segment.num_slots() as u64;
            let first = start.saturating_sub(passed).min(places) as usize;
            if let Some(place) = segment.scan(first, &mut visit) {
                return Some(passed + place as u64);
            }
            passed += places;
        }
        None
    }
}

impl Index {
    /// Calls `visit` for the entries whose hashes end with these bits, in no order.
    pub fn for_each_ending(&self, ending: u64, bits: u32, mut visit: impl FnMut(Key, RecordNumber)) {
        self.segments.iter().for_each(|segment| segment.for_each_ending(ending, bits, &mut visit));
    }
}

/// Memory in which the parts of an index become one again. It is allocated while an error can still be returned.
pub struct Joint {
    segments: Vec<Segment>,
    directory: Vec<Entry>,
}

impl Joint {
    /// For parts that meanwhile grow to twice their segments and four times the directory: one call of a step brings no more.
    fn with_room_for(index: &Index) -> Result<Joint> {
        let what = "the index of a table";
        let segments = memory::with_capacity(2 * index.segments.len() + 64, what)?;
        Ok(Joint { segments, directory: memory::with_capacity(4 << index.depth, what)? })
    }

    pub fn join(mut self, parts: Vec<Index>) -> Index {
        let bits = parts[0].prefix_bits;
        let depth = bits + parts.iter().map(|p| p.depth).max().unwrap_or(0);
        self.segments.extend(parts.into_iter().flat_map(|p| p.segments));
        self.segments.iter_mut().for_each(|s| s.depth += bits);
        Index::of(0, depth, self.segments, self.directory)
    }
}

/// Buckets that hold so many keys before they grow.
fn buckets_for(len: usize) -> usize {
    ((len as f64 / GROWTH_LOAD.0 / SLOTS as f64).ceil() as usize).max(1).next_power_of_two()
}
