//! A piece of the index: a power of two of buckets, searched linearly from the one that a key's hash names.
//!
//! The hash is public, so keys can be made that all name one bucket. A segment whose searches get longer than random keys make them
//! becomes *keyed*: its keys are placed by a hash that only this process knows, and a scan gives them in the order of the public hash.
//! So nothing that leaves the process depends on the secret.

use std::hash::{BuildHasher, RandomState};
use std::sync::{LazyLock, Mutex, PoisonError};

use super::{GROWTH_LOAD, SLOTS};
use crate::error::Result;
use crate::key::{Key, hash};
use crate::simd::prefetch;
use crate::store::arena::{NO_RECORD, RecordNumber};
use crate::store::region::{Plain, Region};

/// See [`Segment::is_attacked`].
const MAX_EXCESS: u32 = 1 << 14;

/// How many homes ahead `for_each_ending` prefetches buckets.
const AHEAD: usize = 8;

/// SipHash under a key that the system draws once a process.
static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Bucket {
    keys: [Key; SLOTS],
    pub records: [RecordNumber; SLOTS],
    pub marks: [u32; SLOTS],
}

// SAFETY: integers: every bit pattern is a value, nothing to drop.
unsafe impl Plain for Bucket {}

impl Bucket {
    /// Slot of `key`, if it is here. An empty slot holds key 0 and record 0, so it says "not here" for key 0, rightly: no
    /// full slot comes after it.
    #[inline(always)]
    pub fn find(&self, key: Key) -> Option<usize> {
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

#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    bucket: u32,
    slot: u32,
}

/// Slots of a keyed segment by the public hash of their keys, for scans.
#[derive(Default)]
struct Order {
    /// `(slots,)`: its memory is there from the start, since a scan takes none.
    slots: Region<u32>,
    is_current: bool,
}

pub(super) struct Segment {
    pub buckets: Region<Bucket>,
    pub len: u32,
    /// Keys at which it grows.
    pub limit: u32,
    /// Bits of the hash, after the index' own prefix, that its keys have in common.
    pub depth: u32,
    /// Full buckets that insertions passed, less eight an insertion; never below 0.
    pub excess: u32,
    /// Of a keyed segment.
    order: Option<Mutex<Order>>,
}

impl Segment {
    pub fn new(num_buckets: usize, depth: u32, place: u64, is_keyed: bool) -> Result<Segment> {
        // Successive multiples of the golden ratio spread evenly, whatever their number.
        let turn = (place as f64 * 0.618_033_988_749_895).fract();
        let load = GROWTH_LOAD.0 + (GROWTH_LOAD.1 - GROWTH_LOAD.0) * turn;
        let limit = ((num_buckets * SLOTS) as f64 * load) as u32;
        let order = || Ok(Mutex::new(Order { slots: Region::new(num_buckets * SLOTS)?, is_current: false }));
        let order = is_keyed.then(order).transpose()?;
        let buckets = Region::new(num_buckets)?;
        Ok(Segment { buckets, len: 0, limit: limit.max(1), depth, excess: 0, order })
    }

    pub fn is_keyed(&self) -> bool {
        self.order.is_some()
    }

    pub fn num_bytes(&self) -> usize {
        let order = self.order.as_ref().map(|o| o.lock().unwrap_or_else(PoisonError::into_inner));
        self.buckets.num_bytes() + order.map_or(0, |o| o.slots.num_bytes())
    }

    /// Bucket at which the search for a key with this hash starts.
    #[inline(always)]
    fn home(&self, hash: u64) -> usize {
        let place = if self.is_keyed() { keyed(hash) } else { hash };
        place as usize & (self.buckets.len() - 1)
    }

    #[inline]
    pub fn find(&self, hash: u64, key: Key) -> Option<Slot> {
        let mask = self.buckets.len() - 1;
        let home = self.home(hash);
        let mut at = home;
        loop {
            count_visits(1);
            let bucket = &self.buckets[at];
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
    pub fn record(&self, at: Slot) -> RecordNumber {
        self.buckets[at.bucket as usize].records[at.slot as usize]
    }

    #[inline]
    pub fn mark(&self, at: Slot) -> u32 {
        self.buckets[at.bucket as usize].marks[at.slot as usize]
    }

    #[inline]
    pub fn mark_mut(&mut self, at: Slot) -> &mut u32 {
        &mut self.buckets[at.bucket as usize].marks[at.slot as usize]
    }

    /// Puts in a key that is not there, where a slot is free; gives its place, and the full buckets that lie before it.
    #[inline]
    pub fn place(&mut self, hash: u64, key: Key, record: RecordNumber, mark: u32) -> (Slot, usize) {
        let mask = self.buckets.len() - 1;
        let home = self.home(hash);
        let mut at = home;
        while self.buckets[at].is_full() {
            at = (at + 1) & mask;
        }
        let passed = at.wrapping_sub(home) & mask;
        count_visits(passed + 1);
        let bucket = &mut self.buckets[at];
        let slot = bucket.len();
        (bucket.keys[slot], bucket.records[slot], bucket.marks[slot]) = (key, record, mark);
        self.len += 1;
        self.excess = (self.excess + passed as u32).saturating_sub(8);
        self.forget_order();
        (Slot { bucket: at as u32, slot: slot as u32 }, passed)
    }

    /// Whether searches are longer than random keys make them: the one search of an insertion that `passed` so many full buckets, or
    /// the searches of many insertions in sum.
    ///
    /// Random keys pass 2.8 buckets in the mean at the highest load, so that their excess is soon 0 again: in a million insertions it
    /// reached 523 in a segment of 128 buckets, 200 in larger ones (the test `chance_makes_no_excess`).
    #[inline]
    pub fn is_attacked(&self, passed: usize) -> bool {
        // The first comparison spares most keys the logarithm.
        let is_long = passed > 8 && passed > longest_search(self.len as usize, self.buckets.len());
        (is_long || self.excess > MAX_EXCESS) && !self.is_keyed()
    }

    /// The same entries, placed by the secret.
    pub fn to_keyed(&self) -> Result<Segment> {
        let mut keyed = Segment::new(self.buckets.len(), self.depth, 0, true)?;
        keyed.limit = self.limit;
        for (key, record, mark) in self.entries() {
            keyed.place(hash(key), key, record, mark);
        }
        Ok(keyed)
    }

    /// The same entries among twice as many buckets. `place`: as for `new`.
    pub fn to_doubled(&self, place: u64) -> Result<Segment> {
        let mut doubled = Segment::new(self.buckets.len() * 2, self.depth, place, self.is_keyed())?;
        let mut passed = 0;
        for (key, record, mark) in self.entries() {
            passed = passed.max(doubled.place(hash(key), key, record, mark).1);
        }
        if doubled.is_attacked(passed) { doubled.to_keyed() } else { Ok(doubled) }
    }

    /// Two segments, each with the keys of one value of bit `bit` (from the top) of their hash. `place`: as for `new`, of each.
    pub fn to_halves(&self, bit: u32, num_buckets: [usize; 2], place: [u64; 2]) -> Result<[Segment; 2]> {
        let half =
            |half: usize| Segment::new(num_buckets[half], self.depth + 1, place[half], self.is_keyed());
        let mut halves = [half(0)?, half(1)?];
        let mut passed = [0; 2];
        for (key, record, mark) in self.entries() {
            let hash = hash(key);
            let half = (hash << bit >> 63) as usize;
            passed[half] = passed[half].max(halves[half].place(hash, key, record, mark).1);
        }
        for (half, passed) in halves.iter_mut().zip(passed) {
            if half.is_attacked(passed) {
                *half = half.to_keyed()?;
            }
        }
        Ok(halves)
    }

    /// Keys that have a 1 as bit `bit` (from the top) of their hash.
    pub fn count_ones(&self, bit: u32) -> usize {
        self.entries().filter(|(key, ..)| hash(*key) << bit >> 63 == 1).count()
    }

    /// Empties a slot and pulls back what had overflowed past it, so that no search ends too early.
    pub fn remove(&mut self, at: Slot) {
        let mask = self.buckets.len() - 1;
        let (mut bucket, mut slot) = (at.bucket as usize, at.slot as usize);
        self.len -= 1;
        self.forget_order();
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
                count_visits(1);
                let here = &self.buckets[next];
                let distance = next.wrapping_sub(bucket) & mask;
                let passes =
                    |&s: &usize| (next.wrapping_sub(self.home(hash(here.keys[s]))) & mask) >= distance;
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

    /// Calls `visit` for each key and its mark.
    pub fn for_each_mark(&mut self, mut visit: impl FnMut(Key, &mut u32)) {
        for bucket in self.buckets.iter_mut() {
            (0..bucket.len()).for_each(|slot| visit(bucket.keys[slot], &mut bucket.marks[slot]));
        }
    }

    fn entries(&self) -> impl Iterator<Item = (Key, RecordNumber, u32)> {
        self.buckets.iter().flat_map(|b| (0..b.len()).map(|s| (b.keys[s], b.records[s], b.marks[s])))
    }

    pub fn num_slots(&self) -> usize {
        self.buckets.len() * SLOTS
    }

    /// Calls `visit` for the entries from place `start` on until it says stop; gives where to go on. A place is below `num_slots`.
    pub fn scan(&self, start: usize, mut visit: impl FnMut(Key, RecordNumber) -> bool) -> Option<usize> {
        let entry = |slot: usize| {
            let bucket = &self.buckets[slot / SLOTS];
            (bucket.keys[slot % SLOTS], bucket.records[slot % SLOTS])
        };
        let mut goes_on = |slot: usize| match entry(slot) {
            (_, NO_RECORD) => true,
            (key, record) => visit(key, record),
        };
        let Some(order) = &self.order else {
            return (start..self.num_slots()).find(|&slot| !goes_on(slot));
        };
        let mut order = order.lock().unwrap_or_else(PoisonError::into_inner);
        order.bring_up(self);
        (start..self.len as usize).find(|&place| !goes_on(order.slots[place] as usize))
    }

    /// Calls `visit` for the entries whose hashes end with these bits.
    pub fn for_each_ending(&self, ending: u64, bits: u32, mut visit: impl FnMut(Key, RecordNumber)) {
        let (num_buckets, step) = (self.buckets.len(), 1usize << bits);
        if self.is_keyed() || num_buckets < step {
            let entries = self.entries();
            let wanted = entries.filter(|(key, _, _)| hash(*key) & (step as u64 - 1) == ending);
            return wanted.for_each(|(key, record, _)| visit(key, record));
        }
        for home in (ending as usize..num_buckets).step_by(step) {
            if let Some(later) = self.buckets.get(home + AHEAD * step) {
                prefetch(later);
            }
            let mut at = home;
            loop {
                let bucket = &self.buckets[at];
                for slot in 0..bucket.len() {
                    // A bucket of the way may be the home of others that end with these bits.
                    if self.home(hash(bucket.keys[slot])) == home {
                        visit(bucket.keys[slot], bucket.records[slot]);
                    }
                }
                at = (at + 1) & (num_buckets - 1);
                if !bucket.is_full() || at == home {
                    break;
                }
            }
        }
    }

    #[inline(always)]
    fn forget_order(&mut self) {
        if let Some(order) = &mut self.order {
            order.get_mut().unwrap_or_else(PoisonError::into_inner).is_current = false;
        }
    }
}

/// The hash that only this process knows, of a public hash. Few segments are keyed, so it is kept out of the code of searches.
#[cold]
#[inline(never)]
fn keyed(hash: u64) -> u64 {
    SECRET.hash_one(hash)
}

impl Order {
    /// Sorts the slots anew if the segment has changed since.
    fn bring_up(&mut self, segment: &Segment) {
        if std::mem::replace(&mut self.is_current, true) {
            return;
        }
        let full = segment.buckets.iter().enumerate();
        let full = full.flat_map(|(at, bucket)| (0..bucket.len()).map(move |slot| at * SLOTS + slot));
        self.slots.iter_mut().zip(full).for_each(|(to, slot)| *to = slot as u32);
        let hash_of = |slot: &u32| hash(segment.buckets[*slot as usize / SLOTS].keys[*slot as usize % SLOTS]);
        self.slots[..segment.len as usize].sort_unstable_by_key(hash_of);
    }
}

/// Full buckets that the search for a random key passes at most: all but one in 2^64 pass fewer.
///
/// A search that passes s of N buckets lies in a run of m >= s full ones, which 4 m of the 4 N a keys chose (a: the load). By
/// Chernoff's bound the probability is at most exp(-m r) for each place where the run may begin, r = 4 (a - 1 - ln a). Summed over
/// m >= s it is exp(-s r) / (1 - exp(-r)), at most 12 exp(-s r) for loads up to .8. For s = 48 / r that is below 2^-65: s is
/// 518 at a load of .8, 108 at .6, 25 at .3.
fn longest_search(len: usize, num_buckets: usize) -> usize {
    let load = len as f64 / (num_buckets * SLOTS) as f64;
    (48.0 / (SLOTS as f64 * (load - 1.0 - load.ln()))) as usize
}

#[cfg(test)]
thread_local! {
    /// Buckets looked at, for tests of what a search costs.
    pub(super) static VISITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[inline(always)]
fn count_visits(_buckets: usize) {
    #[cfg(test)]
    VISITS.set(VISITS.get() + _buckets as u64);
}
