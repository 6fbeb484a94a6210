//! The launches that count uses of rows.

#![allow(unsafe_code)]

use std::cell::Cell;

use sok_core::error::Result;

use super::{Feature, Saved, Started, Workspace};
use crate::abi::{Expiry, FIND_THREADS, LIST_BLOCK, LIST_THREADS, Section, TABLE_THREADS};
use crate::device::{Stream, launch, launch_next};
use crate::gpu_table::GpuTable;
use crate::gpu_table::eviction::Evictor;
use crate::gpu_table::expiry::PlannedExpiry;
use crate::gpu_table::uses::UsedRecords;
use crate::kernels::{EXPIRY, RANKS, SCORES};
use crate::memory::words;

/// Numbers of tables for which `expire_rows` is instantiated.
const EXPIRED_AT_ONCE: [usize; 2] = [1, 32];

/// A commit that takes a push of a lookup.
#[derive(Clone, Copy)]
pub struct Taking {
    /// Number of the commit.
    pub commit: u64,
    /// Address of its `Resolved`.
    pub resolved: u64,
    /// Row of the ticket that names the push, or `RING` if it is known to be named.
    pub row: u32,
    /// Whether no commit has taken a push of the lookup before.
    pub is_first: bool,
}

impl Workspace {
    /// Enqueues counting the uses of the rows of a lookup, and noting that a commit takes their gradients.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn take_uses(
        &self,
        tables: &[GpuTable],
        saved: &Saved,
        taking: Taking,
        stream: Stream,
    ) -> Result<()> {
        let counts = |section: &Section| tables[section.table as usize].evictor.is_some();
        let live = saved.live_sections(tables, counts);
        if !live.is_empty() {
            self.join(stream)?;
        }
        live.into_iter().try_for_each(|(number, sections)| {
            self.take_uses_of(saved, saved.section_address(number), sections, taking, stream)
        })
    }

    /// `address`: of these sections.
    fn take_uses_of(
        &self,
        saved: &Saved,
        address: u64,
        sections: &[Section],
        taking: Taking,
        stream: Stream,
    ) -> Result<()> {
        let take = self.device.kernel(&SCORES, "take_uses")?;
        let blocks: u32 = sections.iter().map(|section| section.count.div_ceil(LIST_BLOCK as u32)).sum();
        let Taking { commit, resolved, row, is_first } = taking;
        let (tables, num, first_block, sorted, is_first) = (
            self.tables(),
            sections.len() as u32,
            sections.first().map_or(0, |section| section.first_list),
            saved.sorted,
            u32::from(is_first),
        );
        let of_keys = saved.of_keys();
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup keep the memory that they point to.
        unsafe {
            launch!(
                take,
                stream,
                blocks,
                LIST_THREADS,
                tables,
                address,
                num,
                first_block,
                sorted,
                resolved,
                row,
                is_first,
                commit,
                of_keys
            )
        }
    }

    /// Enqueues copying how many ids each id stands for, where features tell. `begins`: address, by feature, of where its ids begin there;
    /// otherwise they begin at `Feature::id_counts`.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory, or if a kernel cannot be compiled or launched.
    pub fn keep_id_counts(
        &mut self,
        started: &Started,
        features: &[Feature],
        begins: Option<u64>,
        stream: Stream,
    ) -> Result<()> {
        if started.places.id_counts == 0 {
            return Ok(());
        }
        let from: Vec<u64> = features.iter().map(|feature| feature.id_counts).collect();
        let list = self.take_memory(words(&from).len())?;
        self.deliver(list.address(), words(&from), (0, 0), None, stream)?;
        let keep = self.device.kernel(&RANKS, "keep_id_counts")?;
        let (call, blocks, from, begins, to) = (
            started.call,
            started.find_blocks,
            list.address(),
            begins.unwrap_or(0),
            started.places.id_counts,
        );
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and windows keep the memory that they point to.
        unsafe { launch_next!(keep, stream, blocks, FIND_THREADS, call, from, begins, to) }?;
        self.give_back(list);
        Ok(())
    }

    /// Enqueues work on scores beside later work on the stream, up to `join_uses`.
    ///
    /// # Errors
    /// Those of `enqueue`, and [`Error::Device`](sok_core::Error::Device) if the streams cannot be ordered.
    pub(crate) fn beside(&self, stream: Stream, enqueue: impl FnOnce(Stream) -> Result<()>) -> Result<()> {
        self.join(stream)?;
        let side = Stream::of_cudarc(&self.side);
        stream.record(&self.fork)?;
        side.wait(&self.fork)?;
        enqueue(side)?;
        side.record(&self.counted)?;
        self.is_counting.set(true);
        Ok(())
    }

    /// Enqueues counting a use by each id of a lookup that is not one of training, where the policy of a table asks for that.
    ///
    /// # Errors
    /// As `take_uses`.
    pub fn count_inference(&self, tables: &[GpuTable], started: &Started, stream: Stream) -> Result<()> {
        for (number, table) in tables.iter().enumerate() {
            if table.evictor.as_ref().is_some_and(|evictor| evictor.policy.counts_inference) {
                let UsedRecords { address, count } = started.records_of(number);
                // SAFETY: The scratch memory has a record for each id, and the memory of the lookup a count.
                unsafe { table.count_records(address, started.id_counts_of(number), count, stream) }?;
            }
        }
        Ok(())
    }

    /// Enqueues removing the rows whose time to live is over. `resolved`: address of the `Resolved` of the commit. `enqueued`: counts the tables for
    /// which that was done, also if there is an error.
    ///
    /// # Errors
    /// As `take_uses`.
    pub(crate) fn expire(
        &self,
        planned: &[PlannedExpiry],
        resolved: u64,
        enqueued: &Cell<usize>,
        stream: Stream,
    ) -> Result<()> {
        for some in planned.chunks(EXPIRED_AT_ONCE[1]) {
            let at_once = if some.len() == 1 { EXPIRED_AT_ONCE[0] } else { EXPIRED_AT_ONCE[1] };
            let expire = self.device.kernel(&EXPIRY, &format!("expire_rows<{at_once}>"))?;
            let numbers = some.iter().map(|planned| planned.numbers).max();
            let blocks = self.device.blocks_for(numbers.unwrap_or(0), some.len());
            let mut all: Vec<Expiry> = some.iter().map(|planned| planned.expiry).collect();
            all.resize(at_once, Expiry::default());
            let (on_device, launched) = (self.tables(), some.len() * blocks as usize);
            // SAFETY: The arguments have the types of the kernel's parameters. Tables and workspace keep the memory that they point to.
            unsafe {
                launch_next!(expire, stream, launched, TABLE_THREADS, on_device, resolved, all[0], blocks)
            }?;
            enqueued.update(|before| before + some.len());
        }
        Ok(())
    }

    /// Enqueues ending the step of each table. `resolved`: address of the `Resolved` of the commit. `ended`: returns the number of the step
    /// that it ends.
    ///
    /// # Errors
    /// As `take_uses`.
    pub(crate) fn end_steps(
        &self,
        tables: &[GpuTable],
        resolved: u64,
        ended: impl Fn(&Evictor) -> u64,
        stream: Stream,
    ) -> Result<()> {
        let mut evictors =
            tables.iter().filter_map(|table| Some((table, table.evictor.as_deref()?))).peekable();
        if evictors.peek().is_none() {
            return Ok(());
        }
        for (table, evictor) in evictors {
            if table.config.trainable && evictor.policy.halves_after(ended(evictor)) {
                table.halve_scores(resolved, stream)?;
            }
        }
        let end = self.device.kernel(&SCORES, "end_steps")?;
        let (on_device, n) = (self.tables(), tables.len() as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. The workspace keeps the memory that they point to.
        unsafe { launch!(end, stream, 1, TABLE_THREADS, on_device, n, resolved) }
    }
}
