//! How many steps of the optimizer the records of a table have taken.

#![allow(unsafe_code)]

use std::sync::Arc;

use sok_core::contract::table::TableConfig;
use sok_core::error::Result;

use super::{GpuTable, numbers_of};
use crate::abi::TABLE_THREADS;
use crate::device::{Device, Stream, launch};
use crate::kernels::MISSED;
use crate::memory::Arena;

/// How many steps the records of a table have taken.
pub(crate) struct TakenSteps {
    /// By record.
    pub numbers: Arena,
    /// Address of the number of steps so far.
    pub now: u64,
}

impl TakenSteps {
    fn new(device: &Arc<Device>, config: &TableConfig, now: u64) -> Result<TakenSteps> {
        let what = format!("the steps of table `{}`", config.name);
        let most = numbers_of(config).saturating_mul(size_of::<u32>());
        Ok(TakenSteps { numbers: Arena::new(&device.context, most, what)?, now })
    }

    pub fn num_bytes(&self) -> usize {
        self.numbers.num_bytes()
    }

    /// For how many record numbers there is memory.
    pub fn num_numbers(&self) -> u64 {
        (self.numbers.num_bytes() / size_of::<u32>()) as u64
    }

    /// Gets memory for this many record numbers.
    pub fn reserve_numbers(&mut self, numbers: usize, spare: bool) -> Result<()> {
        self.numbers.grow(numbers * size_of::<u32>(), spare)
    }
}

impl GpuTable {
    /// Gets memory for the steps that records take. `now`: address of the number of steps so far.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory.
    pub(crate) fn new_taken_steps(&self, now: u64) -> Result<Box<TakenSteps>> {
        let mut taken = TakenSteps::new(&self.device, &self.config, now)?;
        taken.reserve_numbers(self.num_records(), false)?;
        Ok(Box::new(taken))
    }

    /// Begins to count the steps that records take, or stops.
    pub(crate) fn count_taken_steps(&mut self, taken: Option<Box<TakenSteps>>) {
        self.has_moved |= taken.is_some() || self.taken.is_some();
        self.taken = taken;
    }

    /// For how many records there is memory.
    pub(super) fn num_records(&self) -> usize {
        self.arena.num_bytes() / (16 * self.layout.stride)
    }

    /// Gets memory for the steps that so many records take.
    pub(super) fn reserve_taken_steps(&mut self, records: usize) -> Result<()> {
        self.taken.as_mut().map_or(Ok(()), |taken| taken.reserve_numbers(records, false))
    }

    /// Enqueues noting that no row has missed a step.
    pub(crate) fn start_rows(&self, stream: Stream) -> Result<()> {
        if self.taken.is_none() {
            return Ok(());
        }
        let start = self.device.kernel(&MISSED, "start_rows")?;
        let (table, numbers) = (self.alone(), self.num_records() as u32);
        let blocks = self.device.blocks_for(numbers as usize, 1) as usize;
        // SAFETY: The arguments have the types of the kernel's parameters. The table keeps the memory that they point to.
        unsafe { launch!(start, stream, blocks, TABLE_THREADS, table, numbers) }
    }

    /// Whether the steps that records take are counted.
    pub(crate) fn counts_taken_steps(&self) -> bool {
        self.taken.is_some()
    }
}
