//! Scores of a table's rows, and the rows that it removes to make room.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use sok_core::contract::departures::Departures;
use sok_core::contract::table::TableConfig;
use sok_core::error::Result;
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score, sweep_size};
use sok_core::policy::sweep::{Rank, lowest};

use super::{GpuTable, WAITING};
use crate::abi::{self, Lowest, RANK_BINS, Removable, Sweep, TABLE_THREADS, Use};
use crate::device::{Device, Stream, launch, launch_next};
use crate::kernels::SCORES;
use crate::memory::{Arena, Buffer, words};

/// So many rows are ranked by the host, beside those that go.
const FEW: u64 = 1 << 14;

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
}

/// Records that a call uses.
#[derive(Clone, Copy)]
pub(crate) struct UsedRecords {
    /// Address of their numbers, u32.
    pub address: u64,
    pub count: usize,
}

/// The rows that a sweep may remove.
pub(crate) struct Candidates {
    /// Memory of `Sweep::marks`.
    _marks: Buffer<u32>,
    sweep: Sweep,
    all: Removable,
}

impl UsedRecords {
    pub const NONE: UsedRecords = UsedRecords { address: 0, count: 0 };
}

impl Candidates {
    pub fn len(&self) -> u64 {
        self.all.count
    }
}

impl Evictor {
    pub fn new(device: &Arc<Device>, config: &TableConfig, policy: Eviction) -> Result<Evictor> {
        let numbers = (config.capacity() as usize).saturating_mul(2).saturating_add(2);
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
        self.uses.num_bytes() + self.keys.num_bytes() + self.departures.num_bytes()
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
    /// The rows that a sweep may remove to make room for new keys: all but the row of the out-of-vocabulary key, those of lookups whose
    /// gradients were not applied yet, and the used ones. `None` without an eviction policy, or if no room is needed. The device must be
    /// idle, and its counts known.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn candidates(&self, new_keys: u64, used: UsedRecords) -> Result<Option<Candidates>> {
        let Some(evictor) = self.evictor.as_ref().filter(|_| self.needed(new_keys) > 0) else {
            return Ok(None);
        };
        let context = &self.device.context;
        let numbers = self.numbers_in_use();
        let marks = Buffer::<u32>::new(context, numbers.div_ceil(32) as usize)?;
        if let Some(key) = self.config.out_of_vocabulary_key {
            let record = Buffer::<u32>::new(context, 2)?;
            let key = Buffer::from_slice(context, &[key])?;
            // SAFETY: The buffers live until the wait below.
            unsafe { self.launch_look_up(key.address(), record.address(), 1, false, record.at(1), WAITING) }?;
            // SAFETY: As above.
            unsafe { self.mark(record.address(), 1, 1, &marks) }?;
            self.device.synchronize()?;
        }
        // SAFETY: The caller has memory for the records.
        unsafe { self.mark(used.address, 1, used.count, &marks) }?;
        for lookup in evictor.lookups.iter().filter_map(Weak::upgrade) {
            for SortedIds { address, count } in lookup.ids(evictor.number, self.generation) {
                // SAFETY: The lookup keeps the memory until the wait below. The record comes first in a `Sorted`.
                unsafe { self.mark(address, 2, count, &marks) }?;
            }
            self.device.synchronize()?;
        }
        let sweep = Sweep {
            uses: evictor.uses.address(),
            keys: evictor.keys.address(),
            marks: marks.address(),
            settled_commit: evictor.settled_commit,
            numbers: numbers as u32,
            pad: 0,
        };
        let all = Removable { count: 0, lowest: u64::MAX, highest: 0 };
        let on_device = Buffer::from_slice(context, words(&[all]))?;
        let measure = self.device.kernel(&SCORES, "measure_rows")?;
        let (blocks, to) = (self.sweep_blocks(), on_device.address());
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below.
        unsafe { launch_next!(measure, WAITING, blocks, TABLE_THREADS, sweep, to) }?;
        let found: Vec<u64> = wide(&on_device.to_vec()?);
        let all = Removable { count: found[0], lowest: found[1], highest: found[2] };
        Ok(Some(Candidates { _marks: marks, sweep, all }))
    }

    /// Number of rows that must go before so many new keys fit.
    fn needed(&self, new_keys: u64) -> u64 {
        (self.rows() + new_keys).saturating_sub(self.config.capacity())
    }

    /// A number above those of all records that have been in use. The counts of the device must be known.
    fn numbers_in_use(&self) -> u64 {
        u64::from(self.fresh) + u64::from(self.counted).saturating_sub(self.released.len() as u64)
    }

    fn sweep_blocks(&self) -> usize {
        (self.numbers_in_use() as usize)
            .div_ceil(TABLE_THREADS)
            .clamp(1, 8 * self.device.multiprocessors as usize)
    }

    /// Enqueues marking records. `stride`: of their numbers, in words.
    ///
    /// # Safety
    /// The addresses are of memory on this device that lives until the call has completed.
    unsafe fn mark(&self, records: u64, stride: u32, count: usize, marks: &Buffer<u32>) -> Result<()> {
        let mark = self.device.kernel(&SCORES, "mark_records")?;
        let (n, to) = (count as u32, marks.address());
        // SAFETY: The arguments have the types of the kernel's parameters. The caller keeps the memory.
        unsafe {
            launch!(mark, WAITING, count.div_ceil(TABLE_THREADS), TABLE_THREADS, records, stride, n, to)
        }
    }

    /// Removes the rows with the lowest scores of these, to make room for new keys. Returns how many went. The device must be idle, and
    /// its counts known.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory). Nothing has changed then, unless a device
    /// has failed.
    pub(crate) fn sweep(&mut self, new_keys: u64, candidates: Option<&Candidates>) -> Result<u64> {
        let Some(candidates) = candidates else { return Ok(0) };
        let count = sweep_size(self.needed(new_keys), self.config.capacity());
        let going = self.lowest(candidates, count)?;
        let dim = self.config.dim;
        let keeps = self.evictor.as_ref().is_some_and(|evictor| evictor.policy.keeps_evicted);
        let records: Vec<u32> = going.iter().map(|(_, record)| *record).collect();
        let values = if keeps && !records.is_empty() { self.read_records(&records)? } else { Vec::new() };
        let keys: Vec<Key> = going.iter().map(|(rank, _)| rank.key).collect();
        if let Some(evictor) = &mut self.evictor {
            let width = self.layout.fields.width as usize;
            let rows = keeps.then(|| values.chunks_exact(width).map(|record| &record[..dim]));
            evictor.departures.trim();
            evictor.departures.remember(evictor.step, going.iter().map(|(rank, _)| *rank), dim, rows)?;
        }
        let removed = if keys.is_empty() { Ok(0) } else { self.remove(&keys) };
        if let (Err(_), Some(evictor)) = (&removed, &mut self.evictor) {
            evictor.departures.take_back(keys.len(), keeps);
        }
        Ok(removed? as u64)
    }

    /// The candidates with the lowest ranks, in their order.
    fn lowest(&self, candidates: &Candidates, count: u64) -> Result<Vec<(Rank, u32)>> {
        let Candidates { sweep, all, .. } = candidates;
        let count = count.min(all.count);
        if count == 0 {
            return Ok(Vec::new());
        }
        let (highest, listed) = self.highest_of(candidates, count)?;
        let context = &self.device.context;
        let listed = listed as usize;
        let number = Buffer::<u32>::new(context, 1)?;
        let (scores, keys) =
            (Buffer::<u64>::uninit(context, listed)?, Buffer::<u64>::uninit(context, listed)?);
        let records = Buffer::<u32>::uninit(context, listed)?;
        let out = Lowest {
            count: number.address(),
            scores: scores.address(),
            keys: keys.address(),
            records: records.address(),
        };
        let list = self.device.kernel(&SCORES, "list_lowest")?;
        let (blocks, sweep) = (self.sweep_blocks(), *sweep);
        let (score, key) = ((highest >> 64) as u64, highest as u64);
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below, and have room for all
        // rows up to the highest rank.
        unsafe { launch!(list, WAITING, blocks, TABLE_THREADS, sweep, score, key, out) }?;
        self.device.synchronize()?;
        let ranks = scores.read(0, listed)?.into_iter().zip(keys.read(0, listed)?);
        let rows: Vec<(Rank, u32)> =
            ranks.map(|(score, key)| Rank { score, key }).zip(records.read(0, listed)?).collect();
        lowest(count, || rows.iter().copied())
    }

    /// Returns a rank up to which there are at least `count` candidates, and few more; and their number.
    fn highest_of(&self, candidates: &Candidates, count: u64) -> Result<(u128, u64)> {
        let Candidates { sweep, all, .. } = candidates;
        let mut low = u128::from(all.lowest) << 64;
        let mut high = u128::from(all.highest) << 64 | u128::from(u64::MAX);
        let (mut below, mut inside) = (0, all.count);
        let kernel = self.device.kernel(&SCORES, "count_ranks")?;
        let bins = Buffer::<u32>::new(&self.device.context, RANK_BINS)?;
        while below + inside > count + FEW && low < high {
            let shift = (u128::BITS - (high - low).leading_zeros()).saturating_sub(RANK_BINS.ilog2());
            bins.zero(WAITING)?;
            let (blocks, sweep, to) = (self.sweep_blocks(), *sweep, bins.address());
            let (score, key) = ((low >> 64) as u64, low as u64);
            // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below.
            unsafe { launch!(kernel, WAITING, blocks, TABLE_THREADS, sweep, score, key, shift, to) }?;
            for (bin, num_rows) in bins.to_vec()?.into_iter().enumerate() {
                if below + u64::from(num_rows) >= count {
                    low += (bin as u128) << shift;
                    high = low + ((1 << shift) - 1);
                    inside = num_rows.into();
                    break;
                }
                below += u64::from(num_rows);
            }
        }
        Ok((high, below + inside))
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

/// Pairs of words as numbers of 64 bits.
fn wide(words: &[u32]) -> Vec<u64> {
    words.chunks_exact(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32).collect()
}
