//! The index of a table on the device: buckets, stash and counters; it grows by moving entries into a larger one.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, LazyLock};

use sok_core::error::Result;

use crate::device::{Device, Stream, launch};
use crate::kernels::TABLE;
use crate::layout::{self, BUCKET, COUNTERS, Moving, PLACES, STASH, TABLE_THREADS};
use crate::memory::Buffer;

/// Buckets that are read at once.
const AT_ONCE: usize = 1 << 18;
/// Places of an index that are used before it grows.
pub const LOAD: f64 = 0.7;

pub struct Index {
    device: Arc<Device>,
    buckets: Buffer<u32>,
    stash: Buffer<u32>,
    pub counters: Buffer<u32>,
    num_buckets: usize,
    load: f64,
}

/// What the process mixes into the hash of keys, drawn from the system's randomness. The order of a table's entries on a GPU depends on
/// it, as it does on the order in which blocks run; no result does.
fn secret() -> u64 {
    static SECRET: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
    *SECRET
}

fn buckets_for(keys: usize, load: f64) -> usize {
    ((keys as f64 / load / PLACES as f64).ceil() as usize).max(64)
}

impl Index {
    /// Room for `keys` at this load.
    pub fn new(device: &Arc<Device>, keys: usize, load: f64, stream: Stream) -> Result<Index> {
        let num_buckets = buckets_for(keys, load);
        let context = &device.context;
        let index = Index {
            buckets: Buffer::uninit(context, num_buckets * BUCKET)?,
            stash: Buffer::new(context, STASH)?,
            counters: Buffer::new(context, COUNTERS)?,
            device: device.clone(),
            num_buckets,
            load,
        };
        let descriptor = index.descriptor();
        let clear = device.kernel(&TABLE, "clear_index")?;
        launch!(clear, stream, num_buckets.div_ceil(TABLE_THREADS), TABLE_THREADS, descriptor)?;
        Ok(index)
    }

    /// Keys that fit before it grows.
    pub fn capacity(&self) -> usize {
        (self.num_buckets as f64 * PLACES as f64 * self.load) as usize
    }

    pub fn load(&self) -> f64 {
        self.load
    }

    pub fn num_bytes(&self) -> usize {
        self.buckets.num_bytes() + self.stash.num_bytes() + self.counters.num_bytes()
    }

    pub fn descriptor(&self) -> layout::Index {
        layout::Index {
            buckets: self.buckets.address(),
            stash: self.stash.address(),
            counters: self.counters.address(),
            secret: secret(),
            num_buckets: self.num_buckets as u32,
            pad: 0,
        }
    }

    /// An index for `keys` with the entries of this one, of which there are at most `len`; it takes over the counters.
    pub fn grown(&self, keys: usize, len: usize, stream: Stream) -> Result<Index> {
        let (device, context) = (&self.device, &self.device.context);
        let grown = Index::new(device, keys, self.load, stream)?;
        let room = (len / 16).max(4096);
        let homeless = Buffer::<u32>::uninit(context, 2 + 3 * room)?;
        let count = Buffer::<u32>::new(context, 1)?;
        let moving = Moving {
            count: count.address(),
            keys: homeless.address(),
            records: homeless.at(2 * room),
            room: room as u32,
            pad: 0,
        };
        let (from, to) = (self.descriptor(), grown.descriptor());
        let [moves, settles] = device.kernels(&TABLE, ["move_entries", "settle_entries"])?;
        let blocks = (self.num_buckets + STASH / 3).div_ceil(TABLE_THREADS);
        launch!(moves, stream, blocks, TABLE_THREADS, from, to, moving)?;
        launch!(settles, stream, device.multiprocessors * 4, TABLE_THREADS, to, moving)?;
        device.synchronize()?;
        if count.read(0, 1)?[0] as usize > room {
            // Keys were made for it.
            return self.grown(2 * keys, len, stream);
        }
        let mut counters = self.counters.read(0, COUNTERS)?;
        counters[32] = grown.counters.read(32, 1)?[0];
        grown.counters.write(0, &counters)?;
        Ok(grown)
    }

    /// Visits up to `max` keys and their record numbers, from place `start` on. Gives the place to go on from; none at the end.
    pub fn entries(
        &self,
        start: usize,
        max: usize,
        mut visit: impl FnMut(u64, u32),
    ) -> Result<Option<usize>> {
        let wide = |words: &[u32]| u64::from(words[0]) | u64::from(words[1]) << 32;
        let (in_buckets, in_stash) = (self.num_buckets * PLACES, STASH / 3);
        let (mut place, mut left) = (start, max);
        while place < in_buckets && left > 0 {
            let first = place / PLACES;
            let count = (left / PLACES + 1).min(AT_ONCE).min(self.num_buckets - first);
            let buckets = self.buckets.read(first * BUCKET, count * BUCKET)?;
            while place < (first + count) * PLACES && left > 0 {
                let (bucket, at) = (&buckets[(place / PLACES - first) * BUCKET..][..BUCKET], place % PLACES);
                if bucket[2 * PLACES + at] != 0 {
                    visit(wide(&bucket[2 * at..]), bucket[2 * PLACES + at]);
                    left -= 1;
                }
                place += 1;
            }
        }
        if place < in_buckets {
            return Ok(Some(place));
        }
        let stash = self.stash.read(0, STASH)?;
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
