//! The index of a table on the device: buckets, stash and counters. It grows by moving its entries to a larger index.

#![allow(unsafe_code)]

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, LazyLock};

use sok_core::error::Result;

use crate::abi::{
    self, BUCKET_WORDS, COUNTERS_WORDS, Moving, SLOTS, STASH, STASH_WORDS, STASHED, TABLE_THREADS,
};
use crate::device::{Device, Stream, launch};
use crate::kernels::TABLE;
use crate::memory::Buffer;

/// Maximum number of buckets that are copied to the host at once.
const AT_ONCE: usize = 1 << 18;
/// Fraction of the slots that may be used before the index grows.
pub const LOAD: f64 = 0.7;

/// Owner of the device memory of an index.
pub struct Index {
    device: Arc<Device>,
    buckets: Buffer<u32>,
    stash: Buffer<u32>,
    pub counters: Buffer<u32>,
    num_buckets: usize,
    load: f64,
}

/// Returns the secret that the process mixes into the hash of keys. It comes from the random numbers of the system. The order of a
/// table's entries on a GPU depends on the secret, and on the order in which blocks run. No result depends on it.
fn secret() -> u64 {
    static SECRET: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
    *SECRET
}

/// Returns the number of buckets of an index for this many keys: at least 64.
fn buckets_for(keys: usize, load: f64) -> usize {
    ((keys as f64 / load / SLOTS as f64).ceil() as usize).max(64)
}

impl Index {
    /// Creates an empty index that has room for `keys` at this load.
    pub fn new(device: &Arc<Device>, keys: usize, load: f64, stream: Stream) -> Result<Index> {
        let num_buckets = buckets_for(keys, load);
        let context = &device.context;
        let index = Index {
            buckets: Buffer::uninit(context, num_buckets * BUCKET_WORDS)?,
            stash: Buffer::new(context, STASH_WORDS)?,
            counters: Buffer::new(context, COUNTERS_WORDS)?,
            device: device.clone(),
            num_buckets,
            load,
        };
        let descriptor = index.descriptor();
        let clear = device.kernel(&TABLE, "clear_index")?;
        // SAFETY: The arguments have the types of the kernel's parameters. The index, or a buffer that lives until the wait below,
        // owns the memory that they point to.
        unsafe { launch!(clear, stream, num_buckets.div_ceil(TABLE_THREADS), TABLE_THREADS, descriptor) }?;
        Ok(index)
    }

    /// Returns the number of keys that fit before the index must grow.
    pub fn capacity(&self) -> usize {
        (self.num_buckets as f64 * SLOTS as f64 * self.load) as usize
    }

    pub fn load(&self) -> f64 {
        self.load
    }

    pub fn num_bytes(&self) -> usize {
        self.buckets.num_bytes() + self.stash.num_bytes() + self.counters.num_bytes()
    }

    pub fn descriptor(&self) -> abi::Index {
        abi::Index {
            buckets: self.buckets.address(),
            stash: self.stash.address(),
            counters: self.counters.address(),
            secret: secret(),
            num_buckets: self.num_buckets as u32,
            pad: 0,
        }
    }

    /// Returns a larger index, for `keys`, with the entries and counters of this one. `len`: maximum number of these entries. Waits
    /// for the device.
    pub fn grown(&self, keys: usize, len: usize, stream: Stream) -> Result<Index> {
        let (device, context) = (&self.device, &self.device.context);
        let grown = Index::new(device, keys, self.load, stream)?;
        let room = (len / 16).max(4096);
        let overflow = Buffer::<u32>::uninit(context, 2 + 3 * room)?;
        let count = Buffer::<u32>::new(context, 1)?;
        let moving = Moving {
            count: count.address(),
            keys: overflow.address(),
            records: overflow.at(2 * room),
            room: room as u32,
            pad: 0,
        };
        let (from, to) = (self.descriptor(), grown.descriptor());
        let [moves, settles] = device.kernels(&TABLE, ["move_entries", "settle_entries"])?;
        let blocks = (self.num_buckets + STASH).div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. The index, or a buffer that lives until the wait below,
        // owns the memory that they point to.
        unsafe { launch!(moves, stream, blocks, TABLE_THREADS, from, to, moving) }?;
        // SAFETY: The arguments have the types of the kernel's parameters. The index, or a buffer that lives until the wait below,
        // owns the memory that they point to.
        unsafe { launch!(settles, stream, device.multiprocessors * 4, TABLE_THREADS, to, moving) }?;
        device.synchronize()?;
        if count.read(0, 1)?[0] as usize > room {
            // Only keys that were crafted to collide come here.
            return self.grown(2 * keys, len, stream);
        }
        let mut counters = self.counters.read(0, COUNTERS_WORDS)?;
        counters[STASHED] = grown.counters.read(STASHED, 1)?[0];
        grown.counters.write(0, &counters)?;
        Ok(grown)
    }

    /// Number of places that `list_changed` examines: of buckets, and of slots of the stash.
    pub fn num_places(&self) -> usize {
        self.num_buckets + STASH
    }

    /// Visits up to `max` keys and their record numbers, from slot `start` on; the slots of the stash come last. Returns the slot
    /// at which to continue, or `None` at the end.
    pub fn entries(
        &self,
        start: usize,
        max: usize,
        mut visit: impl FnMut(u64, u32),
    ) -> Result<Option<usize>> {
        let wide = |words: &[u32]| u64::from(words[0]) | u64::from(words[1]) << 32;
        let (in_buckets, in_stash) = (self.num_buckets * SLOTS, STASH);
        let (mut place, mut left) = (start, max);
        while place < in_buckets && left > 0 {
            let first = place / SLOTS;
            let count = (left / SLOTS + 1).min(AT_ONCE).min(self.num_buckets - first);
            let buckets = self.buckets.read(first * BUCKET_WORDS, count * BUCKET_WORDS)?;
            while place < (first + count) * SLOTS && left > 0 {
                let (bucket, at) =
                    (&buckets[(place / SLOTS - first) * BUCKET_WORDS..][..BUCKET_WORDS], place % SLOTS);
                if bucket[2 * SLOTS + at] != 0 {
                    visit(wide(&bucket[2 * at..]), bucket[2 * SLOTS + at]);
                    left -= 1;
                }
                place += 1;
            }
        }
        if place < in_buckets {
            return Ok(Some(place));
        }
        let stash = self.stash.read(0, STASH_WORDS)?;
        while place < in_buckets + in_stash && left > 0 {
            let at = place - in_buckets;
            if stash[2 * in_stash + at] != 0 {
                visit(wide(&stash[2 * at..]), stash[2 * in_stash + at]);
                left -= 1;
            }
            place += 1;
        }
        let is_more = (place..in_buckets + in_stash).any(|p| stash[2 * in_stash + p - in_buckets] != 0);
        Ok(is_more.then_some(place))
    }
}
