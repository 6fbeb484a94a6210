//! Bags of a table on one rank, which that rank pools for others.

#![allow(unsafe_code)]

use sok_core::contract::profile::StepPart;
use sok_core::error::Result;
use sok_core::row_type::RowType;

use super::{Bags, Feature, Saved, Started, Workspace};
use crate::abi::{FIND_THREADS, NumberCopy, Pooled, PooledFeature, Side};
use crate::device::{Stream, launch_next};
use crate::gpu_table::GpuTable;
use crate::kernels::AT_OWNER;
use crate::memory::words;

/// Where the gradients of a pooled feature are, and where their sums go.
#[derive(Clone, Copy, Debug)]
pub struct PooledGradients {
    /// Address of the gradients of the bags, `(bags, dim)`.
    pub bags: u64,
    /// Address of the sum of row 1.
    pub sums: u64,
}

/// What becomes of numbers that are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberCopyKind {
    /// They have four bytes, and stay as they are.
    Words,
    /// They are float32, and are rounded to this type.
    Narrow(RowType),
    /// They are of this type, and become float32.
    Widen(RowType),
}

impl NumberCopyKind {
    fn kernel_name(self) -> String {
        match self {
            NumberCopyKind::Words
            | NumberCopyKind::Narrow(RowType::Float32)
            | NumberCopyKind::Widen(RowType::Float32) => "copy_all".into(),
            NumberCopyKind::Narrow(to) => format!("narrow_all<{}>", to as u32),
            NumberCopyKind::Widen(from) => format!("widen_all<{}>", from as u32),
        }
    }
}

impl Workspace {
    /// Enqueues copying numbers.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory, or if a kernel cannot be compiled or launched.
    pub fn copy_all(&mut self, copies: &[NumberCopy], kind: NumberCopyKind, stream: Stream) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        let list = self.take_memory(words(copies).len())?;
        self.deliver(list.address(), words(copies), (0, 0), None, stream)?;
        let copy = self.device.kernel(&AT_OWNER, &kind.kernel_name())?;
        let (at, blocks) = (list.address(), (8 * self.device.multiprocessors).div_ceil(copies.len() as u32));
        let all = blocks as usize * copies.len();
        // SAFETY: The arguments have the types of the kernel's parameters. The caller keeps the memory that they point to.
        unsafe { launch_next!(copy, stream, all, 256, at, blocks) }?;
        self.give_back(list);
        Ok(())
    }

    /// Enqueues checking row splits, and copying them for the owners of tables. `to`: by feature, the address that takes them as u32
    /// `(bags + 1,)`; 0 for features that keep theirs.
    ///
    /// # Errors
    /// As `copy_all`.
    pub fn share_splits(&mut self, started: &Started, to: &[u64], stream: Stream) -> Result<()> {
        if to.iter().all(|to| *to == 0) {
            return Ok(());
        }
        let list = self.take_memory(words(to).len())?;
        self.deliver(list.address(), words(to), (0, 0), None, stream)?;
        let share = self.device.kernel(&AT_OWNER, "share_splits")?;
        let (call, at, fault) = (started.call, list.address(), self.fault.address());
        let blocks = (2 * self.device.multiprocessors).div_ceil(to.len() as u32);
        let all = blocks as usize * to.len();
        // SAFETY: The arguments have the types of the kernel's parameters. The caller keeps the memory that they point to.
        unsafe { launch_next!(share, stream, all, 256, call, at, fault, blocks) }?;
        self.give_back(list);
        Ok(())
    }

    /// Enqueues what `find` does, for ids of other ranks that have numbered their rows. `owner`: the workspace of the tables. `records`:
    /// address of the records of the keys that it has looked up. `features`: of the call.
    ///
    /// # Errors
    /// As `copy_all`.
    pub fn number_pooled(
        &mut self,
        owner: &Workspace,
        started: &mut Started,
        features: &[PooledFeature],
        records: u64,
        stream: Stream,
    ) -> Result<()> {
        let list = self.take_memory(words(features).len())?;
        self.deliver(list.address(), words(features), (0, 0), None, stream)?;
        let number = self.device.kernel(&AT_OWNER, "number_pooled")?;
        // No key is inserted here, so the list of those that found no room is free.
        let rows = started.found.overflow.ids;
        started.call.tables = owner.tables();
        started.active = Some(rows);
        let pooled = Pooled { features: list.address(), records, rows };
        let (call, found, blocks) = (started.call, started.found, started.find_blocks);
        let measured = self.profiler.start(stream)?;
        // SAFETY: The arguments have the types of the kernel's parameters. Groups and windows keep the memory that they point to.
        unsafe { launch_next!(number, stream, blocks, FIND_THREADS, call, found, pooled) }?;
        self.profiler.stop(StepPart::Find, measured, stream)?;
        self.give_back(list);
        Ok(())
    }

    /// Enqueues merging the gradients of pooled bags. `gradients`: by feature.
    ///
    /// # Errors
    /// As `copy_all`.
    pub fn merge_pooled(
        &self,
        tables: &[GpuTable],
        saved: &Saved,
        gradients: &[PooledGradients],
        stream: Stream,
    ) -> Result<()> {
        let rows: Vec<u64> = gradients.iter().map(|gradients| gradients.bags).collect();
        let mut sides = self.sides(tables, saved, &rows, 0);
        for (side, gradients) in sides.iter_mut().zip(gradients) {
            let quads = crate::abi::quads(tables[side.table as usize].config.dim);
            *side = Side { records: gradients.sums - 16 * quads as u64, stride: quads as u32, ..*side };
        }
        self.deliver_sides(saved, &sides, stream)?;
        self.merge(saved, None, stream)
    }
}

/// Whether a feature has row splits that the owner of its table needs.
pub fn shares_splits(feature: &Feature) -> bool {
    feature.at_owner && matches!(feature.bags, Bags::Ragged { num_bags: 1.., .. })
}
