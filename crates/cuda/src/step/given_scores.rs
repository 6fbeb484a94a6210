//! The launches that give rows the scores that come with ids.

#![allow(unsafe_code)]

use sok_core::error::Result;

use super::uses::Taking;
use super::{Saved, Started, Workspace};
use crate::abi::{Call, FIND_THREADS, RING};
use crate::device::{Kernel, Stream, launch_next};
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
        // The commit needs the others. They are compiled here, where an error changes nothing.
        let [keep, _, _] = self.device.kernels(&GIVEN, ["keep_scores", "reset_scores", "raise_scores"])?;
        let (call, begins) = (started.call, begins.unwrap_or(0));
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and windows keep the memory that they point to.
        unsafe { launch_next!(keep, stream, blocks, FIND_THREADS, call, begins, to) }
    }

    /// Enqueues giving rows the highest of the scores that came with the ids of lookups of which a commit takes the first pushes.
    ///
    /// # Errors
    /// As `keep_scores`.
    pub fn give_scores(
        &self,
        tables: &[GpuTable],
        lookups: &[(&Saved, Taking)],
        stream: Stream,
    ) -> Result<()> {
        let scored = || lookups.iter().filter(|(saved, taking)| saved.given.address != 0 && taking.is_first);
        if scored().next().is_none() {
            return Ok(());
        }
        for kernel in self.device.kernels(&GIVEN, ["reset_scores", "raise_scores"])? {
            for (saved, taking) in scored() {
                let named = (taking.resolved, taking.row);
                for table in takers(tables, saved) {
                    self.give(kernel, saved.call, saved.given, table, named, stream)?;
                }
            }
        }
        Ok(())
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
        if given.address == 0 {
            return Ok(());
        }
        let counts = |table: &&GpuTable| table.config.eviction.is_some_and(|p| p.counts_inference);
        let takers =
            tables.iter().enumerate().filter(|(_, table)| table.config.takes_scores() && counts(table));
        for (number, _) in takers {
            for kernel in self.device.kernels(&GIVEN, ["reset_scores", "raise_scores"])? {
                self.give(kernel, started.call, given, number as u32, (0, RING as u32), stream)?;
            }
        }
        Ok(())
    }

    /// `kernel`: resets scores, or raises them. `table`: which table, or `ALL`. `resolved`, `row`: as for `Taking`.
    fn give(
        &self,
        kernel: Kernel,
        call: Call,
        given: GivenScores,
        table: u32,
        (resolved, row): (u64, u32),
        stream: Stream,
    ) -> Result<()> {
        self.join(stream)?;
        let GivenScores { address: given, blocks } = given;
        let tables = self.tables();
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup keep the memory that they point to.
        unsafe {
            launch_next!(kernel, stream, blocks, FIND_THREADS, call, tables, table, given, resolved, row)
        }
    }
}

/// Returns the tables that take the scores of a lookup: `ALL`, or one by one those that still have its rows.
fn takers(tables: &[GpuTable], saved: &Saved) -> Vec<u32> {
    let takes_scores = |&&(table, _): &&(usize, u64)| tables[table].config.takes_scores();
    let all = saved.generations.iter().filter(takes_scores);
    let is_live = |&&(table, generation): &&(usize, u64)| tables[table].generation == generation;
    if all.clone().all(|taker| is_live(&taker)) {
        return vec![ALL];
    }
    all.filter(is_live).map(|(table, _)| *table as u32).collect()
}
