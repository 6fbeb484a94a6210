//! The launches that give rows the scores that come with ids.

#![allow(unsafe_code)]

use sok_core::error::Result;

use super::uses::Taking;
use super::{Saved, Started, Workspace};
use crate::abi::{Call, FIND_THREADS, RING};
use crate::device::{Stream, launch_next};
use crate::gpu_table::GpuTable;
use crate::kernels::GIVEN;

/// Stands for all tables.
const ALL: u32 = u32::MAX;

/// The scores that came with the ids of a lookup.
#[derive(Clone, Copy)]
pub(super) struct GivenScores {
    /// Address of a `KeyScore` for each id; 0 if none came.
    pub address: u64,
    /// Blocks of `find_records`.
    pub blocks: usize,
}

impl Workspace {
    /// Enqueues keeping the scores that come with the ids of a lookup. `begins`: as for `keep_id_counts`.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn keep_scores(&self, started: &Started, begins: Option<u64>, stream: Stream) -> Result<()> {
        let (to, blocks) = (started.places.given_scores, started.find_blocks);
        if to == 0 {
            return Ok(());
        }
        let keep = self.device.kernel(&GIVEN, "keep_scores")?;
        let (call, begins) = (started.call, begins.unwrap_or(0));
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and windows keep the memory that they point to.
        unsafe { launch_next!(keep, stream, blocks, FIND_THREADS, call, begins, to) }
    }

    /// Enqueues giving rows the scores that came with the ids of a lookup, if a commit takes its first push.
    ///
    /// # Errors
    /// As `keep_scores`.
    pub fn give_scores(
        &self,
        tables: &[GpuTable],
        saved: &Saved,
        taking: Taking,
        stream: Stream,
    ) -> Result<()> {
        if saved.given.address == 0 || !taking.is_first {
            return Ok(());
        }
        let takes_scores = |&&(table, _): &&(usize, u64)| tables[table].config.takes_scores();
        let takers = saved.generations.iter().filter(takes_scores);
        let (live, gone): (Vec<_>, Vec<_>) =
            takers.partition(|&&(table, generation)| tables[table].generation == generation);
        let chosen: Vec<u32> =
            if gone.is_empty() { vec![ALL] } else { live.iter().map(|(table, _)| *table as u32).collect() };
        let named = (taking.resolved, taking.row);
        chosen.into_iter().try_for_each(|table| self.give(saved.call, saved.given, table, named, stream))
    }

    /// Enqueues giving rows the scores that came with a lookup that is not one of training, where the policy of a table asks for that.
    ///
    /// # Errors
    /// As `keep_scores`.
    pub fn give_inference_scores(
        &self,
        tables: &[GpuTable],
        started: &Started,
        stream: Stream,
    ) -> Result<()> {
        let given = GivenScores { address: started.places.given_scores, blocks: started.find_blocks };
        for (number, table) in tables.iter().enumerate().filter(|_| given.address != 0) {
            if table.config.takes_scores() && table.config.eviction.is_some_and(|p| p.counts_inference) {
                self.give(started.call, given, number as u32, (0, RING as u32), stream)?;
            }
        }
        Ok(())
    }

    /// `table`: which table, or `ALL`. `resolved`, `row`: as for `Taking`.
    fn give(
        &self,
        call: Call,
        given: GivenScores,
        table: u32,
        (resolved, row): (u64, u32),
        stream: Stream,
    ) -> Result<()> {
        self.join(stream)?;
        let GivenScores { address: given, blocks } = given;
        let tables = self.tables();
        for kernel in self.device.kernels(&GIVEN, ["reset_scores", "raise_scores"])? {
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup keep the memory that they point to.
            unsafe {
                launch_next!(kernel, stream, blocks, FIND_THREADS, call, tables, table, given, resolved, row)
            }?;
        }
        Ok(())
    }
}
