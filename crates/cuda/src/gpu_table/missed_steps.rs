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
pub(super) struct TakenSteps {
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
    /// Begins to count the steps that records take. `now`: address of the number of steps so far; `None`: they are not counted.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory.
    pub(crate) fn count_taken_steps(&mut self, now: Option<u64>, stream: Stream) -> Result<()> {
        let taken = now.map(|now| TakenSteps::new(&self.device, &self.config, now)).transpose()?;
        (self.taken, self.has_moved) = (taken.map(Box::new), true);
        self.start_rows(stream)
    }

    /// Enqueues noting that no row has missed a step.
    pub(super) fn start_rows(&mut self, stream: Stream) -> Result<()> {
        let numbers = (self.arena.num_bytes() / (16 * self.layout.stride)) as u64;
        let Some(taken) = &mut self.taken else { return Ok(()) };
        taken.reserve_numbers(numbers as usize, false)?;
        let start = self.device.kernel(&MISSED, "start_rows")?;
        let (table, numbers) = (self.alone(), numbers as u32);
        let blocks = self.device.blocks_for(numbers as usize, 1) as usize;
        // SAFETY: The arguments have the types of the kernel's parameters. The table keeps the memory that they point to.
        unsafe { launch!(start, stream, blocks, TABLE_THREADS, table, numbers) }
    }

    /// Whether the steps that records take are counted.
    pub(crate) fn counts_taken_steps(&self) -> bool {
        self.taken.is_some()
    }
}
