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

#![allow(unsafe_code)]

use crate::arena::{NO_RECORD, RecordNumber};
use crate::error::Result;
use crate::key::{Key, hash};
use crate::region::{Plain, Region};
use crate::simd::prefetch;

const SLOTS: usize = 4;
/// Buckets of a segment at most: 2 MiB, one huge page.
const MAX_BUCKETS: usize = 1 << 15;
/// A segment grows at a load between these: below the first, growth would waste memory; above the second, searches for keys
/// that are not there get long (three times slower at .8 than at .6).
const GROWTH_LOAD: (f64, f64) = (0.6, 0.8);
/// Splits that leave a segment's keys together are harmless until the directory is this much larger than what it names, or
/// the hash runs out of bits. Only keys made for that get there; their segment then doubles beyond its size.
const MAX_SPARSE_DIRECTORY: usize = 1 << 12;
const MAX_DEPTH: u32 = 48;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    keys: [Key; SLOTS],
    records: [RecordNumber; SLOTS],
    marks: [u32; SLOTS],
}

// SAFETY: integers: every bit pattern is a value, nothing to drop.
unsafe impl Plain for Bucket {}

impl Bucket {
    /// Slot of `key`, if it is here. An empty slot holds key 0 and record 0, so it says "not here" for key 0, rightly: no
    /// full slot comes after it.
    #[inline(always)]
    fn find(&self, key: Key) -> Option<usize> {
        let mut matches = 0;
        for slot in 0..SLOTS {
            matches |= u32::from(self.keys[slot] == key) << slot;
        }
        let slot = matches.trailing_zeros() as usize;
        (slot < SLOTS && self.records[slot & (SLOTS - 1)] != NO_RECORD).then_some(slot)
    }

    #[inline(always)]
    fn is_full(&self) -> bool {
        self.records[SLOTS - 1] != NO_RECORD
    }

    fn len(&self) -> usize {
        self.records.iter().take_while(|&&r| r != NO_RECORD).count()
    }
}

struct Segment {
    buckets: Region<Bucket>,
    len: u32,
    /// Keys at which it grows.
    limit: u32,
    /// Bits of the hash, after the index' own prefix, that its keys have in common.
    depth: u32,
}

impl Segment {
    fn new(num_buckets: usize, depth: u32, place: u64) -> Result<Segment> {
        // Successive multiples of the golden ratio spread evenly, whatever their number.
        let turn = (place as f64 * 0.618_033_988_749_895).fract();
        let load = GROWTH_LOAD.0 + (GROWTH_LOAD.1 - GROWTH_LOAD.0) * turn;
        let limit = ((num_buckets * SLOTS) as f64 * load) as u32;
        Ok(Segment { buckets: Region::new(num_buckets)?, len: 0, limit: limit.max(1), depth })
    }

    /// Puts in a key that is not there; a slot is free.
    fn place(&mut self, hash: u64, key: Key, record: RecordNumber, mark: u32) -> Slot {
        let mask = self.buckets.len() - 1;
        let mut at = hash as usize & mask;
        while self.buckets[at].is_full() {
            at = (at + 1) & mask;
        }
        let bucket = &mut self.buckets[at];
        let slot = bucket.len();
        (bucket.keys[slot], bucket.records[slot], bucket.marks[slot]) = (key, record, mark);
        self.len += 1;
        Slot { bucket: at as u32, slot: slot as u32 }
    }

    /// Empties a slot and pulls back what had overflowed past it, so that no search ends too early.
    fn remove(&mut self, at: Slot) {
        let mask = self.buckets.len() - 1;
        let (mut bucket, mut slot) = (at.bucket as usize, at.slot as usize);
        self.len -= 1;
        loop {
            let was_full = self.buckets[bucket].is_full();
            self.close_gap(bucket, slot);
            if !was_full {
                return;
            }
            // A key further on whose search passes this bucket must fill the gap.
            let mut next = bucket;
            let found = loop {
                next = (next + 1) & mask;
                if next == bucket {
                    return; // All buckets were full: the gap ends every search in time.
                }
                let here = &self.buckets[next];
                let distance = next.wrapping_sub(bucket) & mask;
                let passes = |&s: &usize| {
                    let home = hash(here.keys[s]) as usize & mask;
                    (next.wrapping_sub(home) & mask) >= distance
                };
                if let Some(found) = (0..here.len()).find(passes) {
                    break found;
                }
                if !here.is_full() {
                    return;
                }
            };
            let (key, record, mark) = {
                let here = &self.buckets[next];
                (here.keys[found], here.records[found], here.marks[found])
            };
            let gap = &mut self.buckets[bucket];
            let free = gap.len();
            (gap.keys[free], gap.records[free], gap.marks[free]) = (key, record, mark);
            (bucket, slot) = (next, found);
        }
    }

    /// Moves the bucket's last key into `slot`.
    fn close_gap(&mut self, bucket: usize, slot: usize) {
        let bucket = &mut self.buckets[bucket];
        let last = bucket.len() - 1;
        bucket.keys[slot] = bucket.keys[last];
        bucket.records[slot] = bucket.records[last];
        bucket.marks[slot] = bucket.marks[last];
        (bucket.keys[last], bucket.records[last], bucket.marks[last]) = (0, NO_RECORD, 0);
    }

    fn entries(&self) -> impl Iterator<Item = (Key, RecordNumber, u32)> {
        self.buckets.iter().flat_map(|b| (0..b.len()).map(|s| (b.keys[s], b.records[s], b.marks[s])))
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    bucket: u32,
    slot: u32,
}

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
    /// Asks for the first bucket of a key with this hash, and says which it is.
    ///
    /// # Safety
    /// The index is still there and has not grown since it gave this directory.
    #[inline(always)]
    pub unsafe fn prefetch(self, hash: u64) -> Place {
        // SAFETY: `mask` is the number of entries less one; the caller promises that they are still there.
        let entry = unsafe { *self.entries.add((hash >> self.shift) as usize & self.mask) };
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
    /// Record and mark of `key` if they are in this bucket; if not, asks for the next one.
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
        let make = |place| Segment::new(buckets, depth, place as u64);
        let segments = (0..segments).map(make).collect::<Result<_>>()?;
        Ok(Index::of(prefix_bits, depth, segments))
    }

    fn of(prefix_bits: u32, depth: u32, segments: Vec<Segment>) -> Index {
        let len = segments.iter().map(|s| s.len as usize).sum();
        let mut index = Index { prefix_bits, depth, directory: Vec::new(), segments, len, growths: 0 };
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
        self.segments.iter().map(|s| s.buckets.num_bytes()).sum::<usize>() + size_of_val(&self.directory[..])
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

    /// Asks for the first bucket of a key with this hash.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        // SAFETY: `&self`: it does not grow meanwhile.
        unsafe { self.directory().prefetch(hash) };
    }

    #[inline]
    fn slot_of(&self, segment: usize, hash: u64, key: Key) -> Option<Slot> {
        let buckets = &self.segments[segment].buckets;
        let mask = buckets.len() - 1;
        let home = hash as usize & mask;
        let mut at = home;
        loop {
            let bucket = &buckets[at];
            if let Some(slot) = bucket.find(key) {
                return Some(Slot { bucket: at as u32, slot: slot as u32 });
            }
            at = (at + 1) & mask;
            if !bucket.is_full() || at == home {
                return None;
            }
        }
    }

    #[inline]
    pub fn find(&self, hash: u64, key: Key) -> RecordNumber {
        let segment = self.segment_of(hash);
        let slot = self.slot_of(segment, hash, key);
        slot.map_or(NO_RECORD, |s| self.segments[segment].buckets[s.bucket as usize].records[s.slot as usize])
    }

    /// Record and mark of a key.
    #[inline]
    pub fn find_mut(&mut self, hash: u64, key: Key) -> Option<(RecordNumber, &mut u32)> {
        let segment = self.segment_of(hash);
        let slot = self.slot_of(segment, hash, key)?;
        let bucket = &mut self.segments[segment].buckets[slot.bucket as usize];
        Some((bucket.records[slot.slot as usize], &mut bucket.marks[slot.slot as usize]))
    }

    /// Adds a key that is not there; gives its mark.
    ///
    /// # Errors
    /// Without memory to grow; then nothing has changed.
    #[inline(never)]
    pub fn insert(&mut self, hash: u64, key: Key, record: RecordNumber) -> Result<&mut u32> {
        let mut segment = self.segment_of(hash);
        while self.segments[segment].len >= self.segments[segment].limit {
            self.grow(segment)?;
            segment = self.segment_of(hash);
        }
        self.len += 1;
        let slot = self.segments[segment].place(hash, key, record, 0);
        Ok(&mut self.segments[segment].buckets[slot.bucket as usize].marks[slot.slot as usize])
    }

    /// Removes a key; gives the record that it had.
    pub fn remove(&mut self, hash: u64, key: Key) -> Option<RecordNumber> {
        let segment = self.segment_of(hash);
        let slot = self.slot_of(segment, hash, key)?;
        let record = self.segments[segment].buckets[slot.bucket as usize].records[slot.slot as usize];
        self.segments[segment].remove(slot);
        self.len -= 1;
        Some(record)
    }

    /// Makes room in a segment.
    #[cold]
    fn grow(&mut self, at: usize) -> Result<()> {
        self.growths += 1;
        let num_buckets = self.segments[at].buckets.len();
        if num_buckets < MAX_BUCKETS {
            return self.double(at);
        }
        if self.segments[at].depth == self.depth {
            let sparse = (self.directory.len() * 2) / (self.segments.len() + 1);
            if sparse > MAX_SPARSE_DIRECTORY || self.prefix_bits + self.depth >= MAX_DEPTH {
                return self.double(at);
            }
            self.depth += 1;
        }
        self.split_segment(at, num_buckets)
    }

    fn double(&mut self, at: usize) -> Result<()> {
        let old = &self.segments[at];
        let mut new = Segment::new(old.buckets.len() * 2, old.depth, at as u64)?;
        for (key, record, mark) in old.entries() {
            new.place(hash(key), key, record, mark);
        }
        self.segments[at] = new;
        self.number_directory();
        Ok(())
    }

    /// Two segments of `num_buckets` for one, each with the keys of one value of the next bit of the hash.
    fn split_segment(&mut self, at: usize, num_buckets: usize) -> Result<()> {
        let depth = self.segments[at].depth + 1;
        // The halves grow at loads of their own, and so do their halves.
        let place = |half| (self.segments.len() + half) as u64;
        let mut halves =
            [Segment::new(num_buckets, depth, place(0))?, Segment::new(num_buckets, depth, place(1))?];
        for (key, record, mark) in self.segments[at].entries() {
            let hash = hash(key);
            let half = (hash << self.prefix_bits) << (depth - 1) >> 63;
            halves[half as usize].place(hash, key, record, mark);
        }
        let [low, high] = halves;
        self.segments[at] = low;
        self.segments.insert(at + 1, high);
        self.number_directory();
        Ok(())
    }

    /// Writes the directory anew from the segments, which stand in its order.
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
        self.depth = self.depth.max(bits);
        while let Some(at) = self.segments.iter().position(|s| s.depth < bits) {
            // Halves may be unequal: each must hold what the whole held.
            self.split_segment(at, self.segments[at].buckets.len())?;
        }
        self.number_directory();
        Ok(())
    }

    /// Takes the index apart into `2^bits` by the top bits of the hash, for as many threads; `join` puts it together.
    pub fn split(self, bits: u32) -> Vec<Index> {
        assert!(
            self.prefix_bits == 0 && self.segments.iter().all(|s| s.depth >= bits),
            "`deepen` came before"
        );
        let mut segments = self.segments.into_iter();
        let mut rest = segments.next();
        let parts = 1u64 << bits;
        let mut taken = 0u64; // in units of 2^-(depth) of the hash range
        let unit = |s: &Segment| 1u64 << (self.depth - s.depth);
        let per_part = 1u64 << (self.depth - bits);
        let mut result = Vec::with_capacity(parts as usize);
        for part in 0..parts {
            let mut mine = Vec::new();
            while taken < (part + 1) * per_part {
                let mut segment = rest.take().expect("segments cover the range of hashes");
                taken += unit(&segment);
                segment.depth -= bits;
                mine.push(segment);
                rest = segments.next();
            }
            result.push(Index::of(bits, self.depth - bits, mine));
        }
        result
    }

    pub fn join(parts: Vec<Index>) -> Index {
        let bits = parts[0].prefix_bits;
        let depth = bits + parts.iter().map(|p| p.depth).max().unwrap_or(0);
        let mut segments: Vec<Segment> = parts.into_iter().flat_map(|p| p.segments).collect();
        segments.iter_mut().for_each(|s| s.depth += bits);
        Index::of(0, depth, segments)
    }

    /// Calls `visit` for the keys from `start` (a count of slots) on until it says stop; gives where to go on.
    pub fn scan(&self, start: u64, mut visit: impl FnMut(Key, RecordNumber) -> bool) -> Option<u64> {
        let mut passed = 0u64;
        for segment in &self.segments {
            let slots = (segment.buckets.len() * SLOTS) as u64;
            let first = start.saturating_sub(passed).min(slots);
            for slot in first..slots {
                let bucket = &segment.buckets[slot as usize / SLOTS];
                let record = bucket.records[slot as usize % SLOTS];
                if record != NO_RECORD && !visit(bucket.keys[slot as usize % SLOTS], record) {
                    return Some(passed + slot);
                }
            }
            passed += slots;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn check(index: &Index, model: &BTreeMap<Key, RecordNumber>) {
        assert_eq!(index.len(), model.len());
        for (&key, &record) in model {
            assert_eq!(index.find(hash(key), key), record, "{key:#x}");
        }
        let mut seen = BTreeMap::new();
        assert_eq!(index.scan(0, |k, r| seen.insert(k, r).is_none()), None);
        assert_eq!(&seen, model);
    }

    /// Keys in patterns that hurt weak hashes, 0 and all ones among them.
    fn patterns(n: u64) -> Vec<Key> {
        let mut keys: Vec<Key> = vec![0, u64::MAX];
        keys.extend((1..n).map(|i| i << 32));
        keys.extend((0..60).flat_map(|k| (1..n / 60).map(move |i| i << k)));
        keys.extend((0..64).map(|bit| 0x0123_4567_89ab_cdef ^ (1 << bit)));
        keys.extend(1..n);
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    #[test]
    fn finds_what_was_inserted_and_nothing_else_through_growth_and_erasure() {
        let keys = patterns(60_000);
        let mut index = Index::new(0).unwrap();
        let mut model = BTreeMap::new();
        for (number, &key) in keys.iter().enumerate() {
            assert_eq!(index.find(hash(key), key), NO_RECORD);
            index.insert(hash(key), key, number as u32 + 1).unwrap();
            model.insert(key, number as u32 + 1);
        }
        check(&index, &model);
        for &key in keys.iter().step_by(3) {
            assert_eq!(index.remove(hash(key), key), model.remove(&key));
            assert_eq!(index.remove(hash(key), key), None);
        }
        check(&index, &model);
    }

    #[test]
    fn parts_hold_the_keys_of_their_prefix_and_join_again() {
        for n in [0, 3, 1000, 200_000u64] {
            let mut index = Index::new(0).unwrap();
            let mut model = BTreeMap::new();
            for key in 0..n {
                index.insert(hash(key), key, key as u32 + 1).unwrap();
                model.insert(key, key as u32 + 1);
            }
            index.deepen(4).unwrap();
            let mut parts = index.split(4);
            assert_eq!(parts.len(), 16);
            for key in n..2 * n {
                let part = &mut parts[(hash(key) >> 60) as usize];
                part.insert(hash(key), key, key as u32 + 1).unwrap();
                model.insert(key, key as u32 + 1);
            }
            for (&key, &record) in &model {
                assert_eq!(parts[(hash(key) >> 60) as usize].find(hash(key), key), record);
            }
            check(&Index::join(parts), &model);
        }
    }

    #[test]
    fn marks_survive_growth() {
        let mut index = Index::new(0).unwrap();
        for key in 0..300_000u64 {
            *index.insert(hash(key), key, key as u32 + 1).unwrap() = key as u32;
        }
        for key in 0..300_000u64 {
            assert_eq!(
                index.find_mut(hash(key), key).map(|(r, m)| (r, *m)),
                Some((key as u32 + 1, key as u32))
            );
        }
    }

    /// The key whose hash this is: the finaliser's steps undone, last first.
    fn key_of(hash: u64) -> Key {
        // Inverses of the finaliser's factors modulo 2^64.
        let mut h = hash;
        h ^= h >> 33;
        h = h.wrapping_mul(0x9cb4_b2f8_1293_37db);
        h ^= h >> 33;
        h = h.wrapping_mul(0x4f74_430c_22a5_4005);
        h ^ (h >> 33)
    }

    #[test]
    fn keys_that_were_made_to_share_a_directory_entry_are_held_too() {
        const COUNT: u64 = 400_000;
        let (mut index, mut model) = (Index::new(0).unwrap(), BTreeMap::new());
        for low in 0..COUNT {
            let key = key_of(0x5a5a_5a5a_5a00_0000 | low);
            assert_eq!(hash(key) >> 24, 0x5a_5a5a_5a5a);
            index.insert(hash(key), key, low as u32 + 1).unwrap();
            model.insert(key, low as u32 + 1);
        }
        check(&index, &model);
        assert!(index.directory.len() <= MAX_SPARSE_DIRECTORY * (index.segments.len() + 1));
        assert!(index.num_bytes() < 64 << 20);
    }
}
