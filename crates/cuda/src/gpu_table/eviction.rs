//! Scores of a table's rows, and the rows that it removes to make room.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use sok_core::contract::departures::Departures;
use sok_core::contract::table::TableConfig;
use sok_core::error::Result;
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score, sweep_size};
use sok_core::policy::sweep::Rank;

use super::{GpuTable, SPARE_NUMBERS, WAITING};
use crate::abi::{self, Choice, RANK_BINS, RANK_BITS, Sorted, Sweep, TABLE_THREADS, Use};
use crate::device::{Device, Stream, launch, launch_next};
use crate::kernels::SCORES;
use crate::memory::{Arena, Buffer, read};

/// Sorted ids of a lookup, on the device.
#[derive(Clone, Copy)]
pub(crate) struct SortedIds {
    /// Address of the first `Sorted`.
    pub address: u64,
    pub count: usize,
}

/// A lookup of training.
pub(crate) trait InProgress: Send + Sync {
    /// The ids that it looked up in a table, if their gradients may still come and were not committed yet. `number`: of the table in
    /// its group.
    fn ids(&self, number: usize, generation: u64) -> Vec<SortedIds>;
}

/// The scores of a table, and what it has removed.
pub(crate) struct Evictor {
    pub policy: Eviction,
    /// A `Use` for each record.
    uses: Arena,
    /// The key of each record.
    keys: Arena,
    /// Number of the step in progress, from 1.
    on_device: Buffer<u64>,
    /// The same, as far as the host knows: reports of later commits were not read.
    pub step: u64,
    /// The newest commit of the group whose gradients were applied or dropped.
    pub settled_commit: u64,
    /// Number of the table in its group.
    number: usize,
    /// The saved lookups of the table. References to those that the group has forgotten are dead.
    lookups: Vec<Weak<dyn InProgress>>,
    pub departures: Departures,
    /// Memory of a sweep, for the next one.
    scratch: Option<Buffer<u32>>,
}

/// Records that a call uses.
#[derive(Clone, Copy)]
pub(crate) struct UsedRecords {
    /// Address of their numbers, u32.
    pub address: u64,
    pub count: usize,
}

impl UsedRecords {
    pub const NONE: UsedRecords = UsedRecords { address: 0, count: 0 };
}

/// A sweep that has been enqueued: the device chooses rows.
pub(crate) struct Sweeping {
    memory: Buffer<u32>,
    sweep: Sweep,
}

impl Evictor {
    pub fn new(device: &Arc<Device>, config: &TableConfig, policy: Eviction) -> Result<Evictor> {
        let numbers = (config.capacity() as usize).saturating_mul(2).saturating_add(SPARE_NUMBERS);
        let what = || format!("the scores of table `{}`", config.name);
        let arena = |bytes: usize| Arena::new(&device.context, numbers.saturating_mul(bytes), what());
        Ok(Evictor {
            policy,
            uses: arena(size_of::<Use>())?,
            keys: arena(size_of::<Key>())?,
            on_device: Buffer::from_slice(&device.context, &[1])?,
            step: 1,
            settled_commit: 0,
            number: 0,
            lookups: Vec::new(),
            departures: Departures::default(),
            scratch: None,
        })
    }

    /// For how many record numbers there is memory.
    pub fn num_numbers(&self) -> u64 {
        (self.uses.num_bytes() / size_of::<Use>()).min(self.keys.num_bytes() / size_of::<Key>()) as u64
    }

    /// Gets memory for this many record numbers.
    pub fn reserve_numbers(&mut self, numbers: usize, spare: bool) -> Result<()> {
        self.uses.grow(numbers * size_of::<Use>(), spare)?;
        self.keys.grow(numbers * size_of::<Key>(), spare)
    }

    pub fn num_bytes(&self) -> usize {
        let scratch = self.scratch.as_ref().map_or(0, Buffer::num_bytes);
        self.uses.num_bytes() + self.keys.num_bytes() + self.departures.num_bytes() + scratch
    }

    /// Fills in the fields of a descriptor.
    pub fn describe(&self, table: &mut abi::Table) {
        (table.uses, table.keys, table.step) =
            (self.uses.address(), self.keys.address(), self.on_device.address());
        table.has_steps = matches!(self.policy.score, Score::Lru).into();
    }

    /// Reads the number of the step in progress. The device must be idle.
    pub fn read_step(&self) -> Result<u64> {
        Ok(self.on_device.read(0, 1)?[0])
    }

    /// Goes on counting steps from a number. The device must be idle.
    pub fn set_step(&mut self, step: u64) -> Result<()> {
        self.step = step;
        self.on_device.write(0, &[step])
    }

    /// Adds a lookup, whose rows stay until their gradients are applied or dropped.
    pub fn add_lookup(&mut self, number: usize, lookup: Weak<dyn InProgress>) {
        self.lookups.retain(|lookup| lookup.strong_count() > 0);
        self.number = number;
        self.lookups.push(lookup);
    }
}

impl GpuTable {
    /// Enqueues choosing the rows with the lowest scores, to make room for new keys. The row of the out-of-vocabulary key stays, and so do
    /// those of lookups whose gradients were not applied yet, and the used ones. `None` without an eviction policy, or if no room is
    /// needed. The device must be idle, and its counts known.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn start_sweep(
        &mut self,
        new_keys: u64,
        used: UsedRecords,
        stream: Stream,
    ) -> Result<Option<Sweeping>> {
        let needed = (self.rows() + new_keys).saturating_sub(self.config.capacity());
        let wanted = sweep_size(needed, self.config.capacity()).min(self.rows());
        let numbers =
            u64::from(self.fresh) + u64::from(self.counted).saturating_sub(self.released.len() as u64);
        let Some(evictor) = self.evictor.as_mut().filter(|_| needed > 0) else { return Ok(None) };
        let keeps = evictor.policy.keeps_evicted;
        let (_, words) = sweep_places(0, numbers, wanted, keeps);
        let memory = match evictor.scratch.take().filter(|memory| memory.len() >= words) {
            Some(memory) => memory,
            None => Buffer::uninit(&self.device.context, words + words / 4)?,
        };
        let (places, _) = sweep_places(memory.address(), numbers, wanted, keeps);
        let sweep = Sweep {
            uses: evictor.uses.address(),
            keys: evictor.keys.address(),
            settled_commit: evictor.settled_commit,
            wanted,
            numbers: numbers as u32,
            ..places
        };
        // SAFETY: The first parts of the memory, up to the listed keys, are within it.
        unsafe { stream.fill(memory.address(), 0, (sweep.listed_keys - memory.address()) as usize) }?;
        self.mark_used(&sweep, used, stream)?;
        let names = ["measure_rows", "count_ranks", "list_chosen"];
        let [measure, count, list] = self.device.kernels(&SCORES, names)?;
        let blocks = (numbers as usize).div_ceil(TABLE_THREADS).min(8 * self.device.multiprocessors as usize);
        // SAFETY: The arguments have the types of the kernel's parameters. Table and `Sweeping` keep the memory that they point to.
        unsafe { launch_next!(measure, stream, blocks, TABLE_THREADS, sweep) }?;
        for _ in 0..u128::BITS.div_ceil(RANK_BITS as u32) {
            // SAFETY: As above.
            unsafe { launch_next!(count, stream, blocks, TABLE_THREADS, sweep) }?;
        }
        // SAFETY: As above.
        unsafe { launch_next!(list, stream, blocks, TABLE_THREADS, sweep) }?;
        Ok(Some(Sweeping { memory, sweep }))
    }

    /// Enqueues marking the rows that must stay.
    fn mark_used(&self, sweep: &Sweep, used: UsedRecords, stream: Stream) -> Result<()> {
        let kernel = self.device.kernel(&SCORES, "mark_records")?;
        let mark = |records: u64, stride: u32, count: usize| {
            let (n, to) = (count as u32, sweep.marks);
            let blocks = count.div_ceil(TABLE_THREADS);
            // SAFETY: The arguments have the types of the kernel's parameters. Caller or lookup keep the memory of the records.
            unsafe { launch!(kernel, stream, blocks, TABLE_THREADS, records, stride, n, to) }
        };
        mark(used.address, 1, used.count)?;
        if let Some(key) = self.config.out_of_vocabulary_key {
            let room = self.room(1, 0)?;
            let found = self.look_up(&room, &[key], false)?;
            mark(room.used(1).address, 1, found.len())?;
            self.device.synchronize()?;
        }
        let Some(evictor) = &self.evictor else { return Ok(()) };
        for lookup in evictor.lookups.iter().filter_map(Weak::upgrade) {
            // A group gives the memory of a lookup to later work of the same stream alone. The number comes first in a `Sorted`.
            for SortedIds { address, count } in lookup.ids(evictor.number, self.generation) {
                mark(address, (size_of::<Sorted>() / 4) as u32, count)?;
            }
        }
        Ok(())
    }

    /// Returns how many rows may go. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn num_removable(&self, sweeping: Option<&Sweeping>) -> Result<u64> {
        let Some(Sweeping { sweep, .. }) = sweeping else { return Ok(0) };
        self.device.synchronize()?;
        Ok(read::<u64>(&self.device.context, sweep.choice, 1)?[0])
    }

    /// Removes the rows that a sweep has chosen. Returns how many went. The device must be idle, and its counts known.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory). Nothing has changed then, unless a device
    /// has failed.
    pub(crate) fn end_sweep(&mut self, sweeping: Option<Sweeping>, stream: Stream) -> Result<u64> {
        let Some(Sweeping { memory, sweep }) = sweeping else { return Ok(0) };
        let context = self.device.context.clone();
        let count = read::<u64>(&context, sweep.choice, 1)?[0].min(sweep.wanted) as usize;
        let keys = read::<Key>(&context, sweep.listed_keys, count)?;
        let records = read::<u32>(&context, sweep.listed_records, count)?;
        let (dim, width) = (self.config.dim, self.layout.fields.width as usize);
        let mut kept = Vec::new();
        if sweep.listed_scores != 0 {
            let scores = read::<u64>(&context, sweep.listed_scores, count)?;
            let ranks = scores.into_iter().zip(&keys).map(|(score, &key)| Rank { score, key });
            kept = ranks.zip(records.iter().copied()).collect();
            kept.sort_unstable();
        }
        let of_kept: Vec<u32> = kept.iter().map(|(_, record)| *record).collect();
        let values = if kept.is_empty() { Vec::new() } else { self.read_records(&of_kept)? };
        let room = self.room_to_release(count)?;
        let Some(evictor) = &mut self.evictor else { return Ok(0) };
        let rows = kept.iter().map(|(rank, _)| *rank).zip(values.chunks_exact(width).map(|v| &v[..dim]));
        evictor.departures.trim();
        evictor.departures.keep(rows, dim)?;
        evictor.departures.remember(evictor.step, keys.into_iter())?;
        // The numbers of the records are known. So the kernel may write them anywhere.
        self.launch_erase(sweep.listed_keys, sweep.listed_records, count, stream)?;
        self.retire(&records, room)?;
        if let Some(evictor) = &mut self.evictor {
            evictor.scratch = Some(memory);
        }
        Ok(count as u64)
    }

    /// Counts a use of the record of each id. `records`: their address, u32; ids with 0 are passed over.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    ///
    /// # Safety
    /// The address is of memory on this device, with this many numbers, that lives until the stream has completed the call.
    pub(crate) unsafe fn count_records(&self, records: u64, count: usize, stream: Stream) -> Result<()> {
        if self.evictor.is_none() {
            return Ok(());
        }
        let kernel = self.device.kernel(&SCORES, "count_records")?;
        let (table, n) = (self.alone(), count as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory.
        unsafe { launch!(kernel, stream, count.div_ceil(TABLE_THREADS), TABLE_THREADS, table, records, n) }
    }

    /// Enqueues halving all scores. `resolved`: address of the `Resolved` of a commit, which must have been valid.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn halve_scores(&self, resolved: u64, stream: Stream) -> Result<()> {
        let halve = self.device.kernel(&SCORES, "halve_scores")?;
        let (table, numbers) = (self.alone(), self.max_numbers() as u32);
        let blocks =
            (numbers as usize).div_ceil(TABLE_THREADS).clamp(1, 8 * self.device.multiprocessors as usize);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory.
        unsafe { launch_next!(halve, stream, blocks, TABLE_THREADS, table, numbers, resolved) }
    }

    /// Returns the scores of records. The device must be idle.
    pub(super) fn read_scores(&self, records: &[u32]) -> Result<Vec<u64>> {
        if self.evictor.is_none() || records.is_empty() {
            return Ok(Vec::new());
        }
        let on_device = Buffer::from_slice(&self.device.context, records)?;
        let scores = Buffer::<u64>::uninit(&self.device.context, records.len())?;
        let read = self.device.kernel(&SCORES, "read_scores")?;
        let (table, from, to, n) =
            (self.alone(), on_device.address(), scores.address(), records.len() as u32);
        let blocks = records.len().div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below.
        unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, from, to, n) }?;
        scores.to_vec()
    }

    /// Sets the scores of records. Of equal records the last one wins. Records 0 are passed over. The device must be idle.
    pub(super) fn write_scores(&self, records: &[u32], scores: &[u64]) -> Result<()> {
        if self.evictor.is_none() || scores.is_empty() {
            return Ok(());
        }
        let last: HashMap<u32, u64> =
            records.iter().copied().zip(scores.iter().copied()).filter(|(record, _)| *record != 0).collect();
        let (records, scores): (Vec<u32>, Vec<u64>) = last.into_iter().unzip();
        let (at, from) = (
            Buffer::from_slice(&self.device.context, &records)?,
            Buffer::from_slice(&self.device.context, &scores)?,
        );
        let write = self.device.kernel(&SCORES, "write_scores")?;
        let (table, at, from, n) = (self.alone(), at.address(), from.address(), records.len() as u32);
        let blocks = records.len().div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below.
        unsafe { launch!(write, WAITING, blocks, TABLE_THREADS, table, at, from, n) }?;
        self.device.synchronize()
    }
}

/// Divides the memory of a sweep, which begins at `base`, into parts. Those before the listed keys start as zeros. Returns them, and the
/// number of words.
fn sweep_places(base: u64, numbers: u64, wanted: u64, keeps: bool) -> (Sweep, usize) {
    let mut at = 0;
    let mut take = |words: u64| {
        let start = at;
        at += words.next_multiple_of(32);
        base + 4 * start
    };
    let sweep = Sweep {
        choice: take(size_of::<Choice>() as u64 / 4),
        bins: take(RANK_BINS as u64),
        marks: take(numbers.div_ceil(32)),
        listed_keys: take(2 * wanted),
        listed_records: take(wanted),
        listed_scores: if keeps { take(2 * wanted) } else { 0 },
        ..Sweep::default()
    };
    (sweep, at as usize)
}
