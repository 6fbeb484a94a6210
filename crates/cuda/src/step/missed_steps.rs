//! The launches with which rows take the steps that they have missed.

#![allow(unsafe_code)]

use sok_core::error::Result;
use sok_core::formula::update::Update;
use sok_core::row_type::RowType;

use super::{By, Saved, Started, Workspace};
use crate::abi::{FIND_THREADS, Missed, PER_SUM, UPDATE_THREADS};
use crate::device::{Stream, launch_next};
use crate::gpu_table::GpuTable;
use crate::kernels::MISSED;
use crate::rule;

impl Workspace {
    /// Enqueues that the rows of a lookup, which have gradients, take the steps before this one that they have missed. It precedes their update
    /// by an optimizer.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn begin_steps(&self, saved: &Saved, by: &By, missed: Missed, stream: Stream) -> Result<()> {
        self.join(stream)?;
        let rule = rule::type_name(&by.update.rule);
        let name = |rows: &str| format!("begin_steps<{}, {rule}, {rows}>", saved.source as u32);
        for (kernel, kinds) in
            self.kernels_of_kinds(self.kinds_of(by.optimizer), &MISSED, RowType::Float32, name)?
        {
            let work = saved.work(self, kinds.clone(), by.prepared, 0, 0);
            let blocks = self.blocks_in_turns(saved, kinds, PER_SUM);
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch_next!(kernel, stream, blocks, UPDATE_THREADS, work[0], missed) }?;
        }
        Ok(())
    }

    /// Enqueues noting a step of all optimizers, if the tickets were valid. The arguments are addresses, as the kernel has them.
    ///
    /// # Errors
    /// As `begin_steps`.
    pub fn note_step(
        &self,
        resolved: u64,
        prepared: u64,
        steps: u64,
        now: u64,
        stream: Stream,
    ) -> Result<()> {
        let note = self.device.kernel(&MISSED, "note_step")?;
        let num_optimizers = self.num_optimizers() as u32;
        // SAFETY: The arguments have the types of the kernel's parameters. The group keeps the memory that they point to.
        unsafe {
            launch_next!(note, stream, 1, UPDATE_THREADS, resolved, prepared, num_optimizers, steps, now)
        }
    }

    /// Enqueues that the rows of all ids of a lookup, in the tables of an optimizer, take the steps that they have missed.
    ///
    /// # Errors
    /// As `begin_steps`.
    pub fn catch_up_found(
        &self,
        started: &Started,
        optimizer: usize,
        update: &Update,
        missed: Missed,
        stream: Stream,
    ) -> Result<()> {
        let rule = rule::type_name(&update.rule);
        let name = |rows: &str| format!("catch_up_found<{rule}, {rows}>");
        for (kernel, kinds) in
            self.kernels_of_kinds(self.kinds_of(optimizer), &MISSED, RowType::Float32, name)?
        {
            let (call, records, kinds, blocks) =
                (started.call, started.found.records, self.kinds_of_launch(&kinds), started.find_blocks);
            // SAFETY: As above.
            unsafe { launch_next!(kernel, stream, blocks, FIND_THREADS, call, records, kinds, missed) }?;
        }
        Ok(())
    }

    /// Enqueues that all rows of a table take the steps that they have missed. `number`: of the table.
    ///
    /// # Errors
    /// As `begin_steps`.
    pub fn catch_up_all(
        &self,
        tables: &[GpuTable],
        number: usize,
        update: &Update,
        missed: Missed,
        stream: Stream,
    ) -> Result<()> {
        let (kind, table) = (self.kinds[number], &tables[number]);
        let rows = self.row_list(kind..kind + 1, RowType::Float32);
        let name = format!("catch_up_all<{}, {rows}>", rule::type_name(&update.rule));
        let kernel = self.device.kernel(&MISSED, &name)?;
        let numbers = table.max_numbers() as usize;
        let blocks = numbers.div_ceil(UPDATE_THREADS).clamp(1, 16 * self.device.multiprocessors as usize);
        let table = table.descriptor(kind as u32);
        // SAFETY: As above.
        unsafe { launch_next!(kernel, stream, blocks, UPDATE_THREADS, table, missed) }
    }
}
