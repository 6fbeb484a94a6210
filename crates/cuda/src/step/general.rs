//! The launches of an optimizer without a formula, whose own code computes new rows piece after piece.

#![allow(unsafe_code)]

use sok_core::contract::profile::StepPart;
use sok_core::error::Result;
use sok_core::row_type::RowType;

use super::{Saved, Workspace};
use crate::abi::{Piece, UPDATE_THREADS};
use crate::device::{Stream, launch};
use crate::kernels::GENERAL;

/// Blocks of a launch for each multiprocessor.
const BLOCKS: u32 = 8;

/// What the launches of a piece need of a group: its merged gradients, and the addresses of `Prepared` and of the factors of its tables,
/// or 0.
#[derive(Clone, Copy)]
pub struct Merged<'a> {
    /// The keys.
    pub saved: &'a Saved,
    /// Address of their sums.
    pub sums: u64,
    /// Address of the `Prepared` of the step.
    pub prepared: u64,
    /// Address of the factors that clip by the norms of tables, or 0.
    pub factors: u64,
}

impl Workspace {
    /// Enqueues adding the numbers of rows of a group to `piece.starts`, for the tables that the model's optimizer updates. `piece.launch`: the
    /// first launch of the group. Returns the first launch of the next group.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::error::Error::Device) if a kernel cannot be compiled or launched.
    pub fn count_rows(&self, merged: Merged, piece: Piece, stream: Stream) -> Result<u32> {
        let mut launch = piece.launch;
        for (kernel, kinds) in
            self.kernels_of_kinds(self.kinds_of(0), &GENERAL, RowType::Float32, |rows| {
                format!("count_rows<{rows}>")
            })?
        {
            let work = merged.saved.work(self, kinds, merged.prepared, merged.factors, merged.sums);
            let piece = Piece { launch, ..piece };
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch!(kernel, stream, 1, 1, work[0], piece) }?;
            launch += 1;
        }
        Ok(launch)
    }

    /// Enqueues `gather_piece` or `scatter_piece` for a group. `piece.launch` and the result: as in `count_rows`.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::error::Error::Device) if a kernel cannot be compiled or launched.
    pub fn visit_piece(&self, kernel: &str, merged: Merged, piece: Piece, stream: Stream) -> Result<u32> {
        let name = |rows: &str| format!("{kernel}<{}, {rows}>", merged.saved.source as u32);
        let kernels = self.kernels_of_kinds(self.kinds_of(0), &GENERAL, RowType::Float32, name)?;
        let started = self.profiler.start(stream)?;
        let mut launch = piece.launch;
        for (kernel, kinds) in kernels {
            let work = merged.saved.work(self, kinds, merged.prepared, merged.factors, merged.sums);
            let piece = Piece { launch, ..piece };
            let blocks = BLOCKS * self.device.multiprocessors;
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch!(kernel, stream, blocks, UPDATE_THREADS, work[0], piece) }?;
            launch += 1;
        }
        self.profiler.stop(StepPart::Update, started, stream)?;
        Ok(launch)
    }

    /// Enqueues filling the places of a piece beyond the last row. `first_state`: first value of the first state.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::error::Error::Device) if the kernel cannot be compiled or launched.
    pub fn fill_piece(&self, piece: Piece, first_state: f32, stream: Stream) -> Result<()> {
        let fill = self.device.kernel(&GENERAL, "fill_piece")?;
        let blocks = BLOCKS * self.device.multiprocessors;
        // SAFETY: The arguments have the types of the kernel's parameters. The caller keeps their memory.
        unsafe { launch!(fill, stream, blocks, UPDATE_THREADS, piece, first_state) }
    }

    /// Enqueues writing the number of the next piece to `next`, the address of an int32.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::error::Error::Device) if the kernel cannot be compiled or launched.
    pub fn next_piece(&self, piece: Piece, next: u64, stream: Stream) -> Result<()> {
        let write = self.device.kernel(&GENERAL, "next_piece")?;
        // SAFETY: The arguments have the types of the kernel's parameters. The caller keeps their memory.
        unsafe { launch!(write, stream, 1, 1, piece, next) }
    }
}
