//! The launch that notes which rows an update changes.

#![allow(unsafe_code)]

use sok_core::error::Result;
use sok_core::row_type::RowType;

use super::{Saved, Workspace};
use crate::abi::UPDATE_THREADS;
use crate::device::{Stream, launch_next};
use crate::kernels::CHANGES;

impl Workspace {
    /// Enqueues noting that the rows of all keys change, in tables that note changes. The first call loads the kernels in any case, so that
    /// steps do not wait for the compiler when the first dump is made. `prepared`: address of the `Prepared` of the step.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn note_updated(&self, saved: &Saved, prepared: u64, stream: Stream) -> Result<()> {
        let is_first = !self.is_ready_to_note.replace(true);
        if !self.notes_changes && !is_first {
            return Ok(());
        }
        let name = |rows: &str| format!("note_updated<{}, {rows}>", saved.source as u32);
        let kernels = self.kernels_by_kinds(&CHANGES, RowType::Float32, name)?;
        if is_first {
            self.device.kernels(&CHANGES, ["list_changed", "copy_records"])?;
        }
        if !self.notes_changes {
            return Ok(());
        }
        for (kernel, kinds) in kernels {
            let num_ids = saved.ids_by_kind[kinds.clone()].iter().copied().max().unwrap_or(0);
            let work = saved.work(self, kinds, prepared, 0, 0);
            let blocks = num_ids.div_ceil(UPDATE_THREADS).clamp(1, 8 * self.device.multiprocessors as usize);
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch_next!(kernel, stream, blocks, UPDATE_THREADS, work[0]) }?;
        }
        Ok(())
    }
}
