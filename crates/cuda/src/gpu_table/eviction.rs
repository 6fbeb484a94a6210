//! Scores of a table's rows.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use sok_core::contract::departures::Departures;
use sok_core::contract::table::TableConfig;
use sok_core::error::Result;
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score};

use super::sweep::SweepMemory;
use super::uses::InProgress;
use super::{GpuTable, SPARE_NUMBERS, WAITING};
use crate::abi::{self, Sweep, TABLE_THREADS, Use};
use crate::device::{Device, Stream, launch, launch_next};
use crate::kernels::SCORES;
use crate::memory::{Arena, Buffer};

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
    pub number: usize,
    /// The saved lookups of the table. References to those that the group has forgotten are dead.
    pub lookups: Vec<Weak<dyn InProgress>>,
    pub departures: Departures,
    /// Memory of a sweep, for the next one.
    pub sweep_memory: Option<SweepMemory>,
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
            sweep_memory: None,
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
        let sweeps = self.sweep_memory.as_ref().map_or(0, SweepMemory::num_bytes);
        self.uses.num_bytes() + self.keys.num_bytes() + self.departures.num_bytes() + sweeps
    }

    /// Fills in the fields of a descriptor.
    pub fn describe(&self, table: &mut abi::Table) {
        (table.uses, table.keys, table.step) =
            (self.uses.address(), self.keys.address(), self.on_device.address());
        table.has_steps = matches!(self.policy.score, Score::Lru).into();
    }

    /// A sweep of the table's records, without what depends on the call.
    pub fn sweep(&self) -> Sweep {
        Sweep {
            uses: self.uses.address(),
            keys: self.keys.address(),
            settled_commit: self.settled_commit,
            ..Sweep::default()
        }
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
    /// Counts a use of the record of each id. `records`: their address, u32; ids with 0 are passed over. `counts`: address of how many ids
    /// each stands for, u32; or 0.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    ///
    /// # Safety
    /// The address is of memory on this device, with this many numbers, that lives until the stream has completed the call.
    pub(crate) unsafe fn count_records(
        &self,
        records: u64,
        counts: u64,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        if self.evictor.is_none() {
            return Ok(());
        }
        let kernel = self.device.kernel(&SCORES, "count_records")?;
        let (table, n) = (self.alone(), count as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory.
        unsafe {
            launch!(kernel, stream, count.div_ceil(TABLE_THREADS), TABLE_THREADS, table, records, counts, n)
        }
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
