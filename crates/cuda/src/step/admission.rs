//! The launches with which a commit inserts candidates of lookups.

#![allow(unsafe_code)]

use sok_core::error::Result;

use super::{Saved, Workspace};
use crate::abi::{
    AbsentId, Admitting, FIND_THREADS, IdCounts, LIST_THREADS, Overflow, RING, Section, TABLE_THREADS,
};
use crate::device::{Stream, launch_next};
use crate::gpu_table::GpuTable;
use crate::kernels::ADMISSION;
use crate::memory::{Buffer, read};

/// A part of an admission, which processes one lookup.
#[derive(Clone, Copy, PartialEq)]
pub enum AdmissionPart {
    /// Counts the sights of candidates. Needed only if the commit takes pushes of several lookups.
    Count,
    /// Inserts the keys that are admitted. `is_counted`: whether `Count` was enqueued before, for all lookups of the commit.
    Admit {
        /// See above.
        is_counted: bool,
    },
    /// Ends the decision on candidates of several lookups.
    End,
}

impl Workspace {
    /// Enqueues a part of an admission for a lookup. `resolved`: address of the `Resolved` of the commit. `row`: of the ticket that names a
    /// push of the lookup, or `RING` if one is known to be named.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn admit(
        &self,
        tables: &[GpuTable],
        saved: &Saved,
        (resolved, row): (u64, u32),
        part: AdmissionPart,
        stream: Stream,
    ) -> Result<()> {
        self.join(stream)?;
        let [count, admit, settle, end] = self
            .device
            .kernels(&ADMISSION, ["count_sights", "admit_candidates", "settle_admitted", "end_admission"])?;
        let has_candidates = |section: &Section| section.first_candidate != 0;
        for (number, sections) in saved.live_sections(tables, has_candidates) {
            let is_counted = part == AdmissionPart::Admit { is_counted: true };
            let head = self.admitting(saved, number, sections, (resolved, row), is_counted);
            let kernel = match part {
                AdmissionPart::Count => count,
                AdmissionPart::Admit { .. } => admit,
                AdmissionPart::End => end,
            };
            let all_blocks = sections.len() * head.blocks as usize;
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup keep the memory that they point to.
            unsafe { launch_next!(kernel, stream, all_blocks, FIND_THREADS, head) }?;
            if let AdmissionPart::Admit { .. } = part {
                let blocks = 4 * self.device.multiprocessors;
                // SAFETY: As above.
                unsafe { launch_next!(settle, stream, blocks, TABLE_THREADS, head) }?;
            }
        }
        Ok(())
    }

    /// Enqueues marking the candidates of a table that a lookup refers to, which must not be erased.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn mark_candidates(&self, saved: &Saved, table: usize, stream: Stream) -> Result<()> {
        let sections = &saved.sections.1;
        let of_table = |section: &Section| section.table as usize == table && section.first_candidate != 0;
        let Some(number) = sections.iter().position(of_table) else { return Ok(()) };
        let count = self.device.kernel(&ADMISSION, "count_sights")?;
        let head = self.admitting(saved, number, &sections[number..=number], (0, RING as u32), false);
        let blocks = head.blocks as usize;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup keep the memory that they point to.
        unsafe { launch_next!(count, stream, blocks, FIND_THREADS, head) }
    }

    /// Returns the parameters of a launch for some sections of a lookup, from section `number` on.
    fn admitting(
        &self,
        saved: &Saved,
        number: usize,
        sections: &[Section],
        (resolved, row): (u64, u32),
        is_counted: bool,
    ) -> Admitting {
        let most = sections.iter().map(|section| section.count as usize).max().unwrap_or(0);
        Admitting {
            tables: self.tables(),
            kinds: saved.keys,
            sections: saved.section_address(number),
            sorted: saved.sorted,
            listed: saved.candidates.listed,
            num_listed: saved.candidates.num_listed + 4 * number as u64,
            resolved,
            overflow: Overflow { count: saved.candidates.num_overflow, ids: saved.candidates.numbers },
            of_keys: saved.of_keys(),
            fault: self.fault.address(),
            num_sections: sections.len() as u32,
            blocks: self.device.blocks_for(most, sections.len()),
            row,
            is_counted: is_counted.into(),
        }
    }

    /// Returns the ids of the candidates of a table in a lookup that no commit has taken, by place. The device must be idle.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory, or if a kernel cannot be compiled or launched.
    pub fn absent_ids(&self, saved: &Saved, table: usize, stream: Stream) -> Result<Vec<AbsentId>> {
        let sections = &saved.sections.1;
        let of_table = |section: &Section| section.table as usize == table && section.first_candidate != 0;
        let Some(number) = sections.iter().position(of_table) else { return Ok(Vec::new()) };
        let most = sections[number].count as usize;
        let context = &self.device.context;
        let count = Buffer::<u32>::new(context, 1)?;
        let listed = Buffer::<u32>::uninit(context, most * size_of::<AbsentId>() / 4)?;
        let list = self.device.kernel(&ADMISSION, "list_absent")?;
        let (tables, section) = (self.tables(), saved.section_address(number));
        let (numbers, counts, num_listed, to) =
            (saved.candidates.numbers, saved.id_counts, count.address(), listed.address());
        let blocks = most.div_ceil(LIST_THREADS).clamp(1, 8 * self.device.multiprocessors as usize);
        // SAFETY: The arguments have the types of the kernel's parameters. The list has room for all ids, and the call below waits.
        unsafe {
            launch_next!(list, stream, blocks, LIST_THREADS, tables, section, numbers, counts, num_listed, to)
        }?;
        stream.synchronize()?;
        let mut absent = read::<AbsentId>(context, to, count.read(0, 1)?[0] as usize)?;
        absent.sort_unstable_by_key(|id| id.place);
        Ok(absent)
    }
}

impl Saved {
    /// Returns the sections that `counts` selects, in parts that a launch can process, each with the number of its first section: all sections,
    /// or one by one those whose tables still have the records of the lookup.
    pub(super) fn live_sections(
        &self,
        tables: &[GpuTable],
        counts: impl Fn(&Section) -> bool,
    ) -> Vec<(usize, &[Section])> {
        let sections = &self.sections.1[..];
        let is_gone = |section: &Section| {
            let of_table =
                |&(table, g): &(usize, u64)| table == section.table as usize && tables[table].generation != g;
            self.generations.iter().any(of_table)
        };
        if !sections.iter().any(&counts) {
            return Vec::new();
        }
        if !sections.iter().any(is_gone) {
            return vec![(0, sections)];
        }
        let live = (0..sections.len()).filter(|&n| counts(&sections[n]) && !is_gone(&sections[n]));
        live.map(|n| (n, std::slice::from_ref(&sections[n]))).collect()
    }

    /// Address of a section by its number.
    pub(super) fn section_address(&self, number: usize) -> u64 {
        self.sections.0 + (number * size_of::<Section>()) as u64
    }

    /// How many ids each sorted id stands for.
    pub(super) fn of_keys(&self) -> IdCounts {
        IdCounts { features: self.call.features, counts: self.id_counts, shift: self.call.shift, pad: 0 }
    }
}
