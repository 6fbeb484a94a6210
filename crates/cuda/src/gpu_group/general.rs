//! The update of an optimizer without a formula, over several groups: rows and states go to arrays of the framework, and new values come
//! back. `contract/general.rs` of the core says how rows become pieces.

#![allow(unsafe_code)]

use sok_core::contract::binding::Binding;
use sok_core::contract::group::Group;
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;

use super::{Committed, GpuGroup, Push};
use crate::abi::{PIECE_ARRAYS, Piece, Preparation};
use crate::device::{Stream, launch};
use crate::kernels::CONTROL;
use crate::memory::Buffer;
use crate::rule;
use crate::step::general::Merged;

/// Where the rows of each launch of a step begin, in the first group of an optimizer.
#[derive(Default)]
pub(super) struct Pieces {
    /// `Piece::starts`.
    starts: Option<Buffer<u64>>,
    /// Number of launches, if the step has gathered a piece.
    num_launches: Option<u32>,
}

/// Enqueues writing a piece of the rows of these groups. `scalars`: as in [`apply`](super::optimizer::apply). `number`: address of the
/// number of the piece, an int32. `to`: addresses that take `size` float32 each: gradients, rows, and each state.
///
/// # Errors
/// [`Error::State`] for an optimizer with a formula, or one that may not update the tables; [`Error::Argument`] for other arrays;
/// [`Error::Device`] if a kernel cannot be compiled or launched.
///
/// # Safety
/// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
pub unsafe fn gather(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    scalars: u64,
    number: u64,
    to: &[u64],
    size: usize,
    stream: Stream,
) -> Result<()> {
    let Some(binding) = bindings.first() else { return Ok(()) };
    let states = binding.update.rule.states(1);
    check(binding, to, 2 + states.len(), size)?;
    // SAFETY: The caller guarantees it.
    unsafe { begin(groups, bindings, scalars, stream) }?;
    let piece = piece_of(groups, number, to, size);
    let mut launch = 0;
    for (group, binding) in groups.iter().zip(bindings) {
        if let Some(merged) = group.merged(&binding.update) {
            let piece = Piece { launch, ..piece };
            launch = group.workspace.visit_piece("gather_piece", merged, piece, stream)?;
        }
    }
    let first_state = states.first().map_or(0.0, |state| state.initial);
    groups[0].workspace.fill_piece(piece, first_state, stream)
}

/// Enqueues writing the new values of a piece to the records, and the number of the next piece to `next`, the address of an int32. `from`:
/// addresses of `size` float32 each: rows, and each state.
///
/// # Errors
/// As `gather`, and [`Error::State`] if the step has gathered nothing.
///
/// # Safety
/// As `gather`.
pub unsafe fn scatter(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    number: u64,
    from: &[u64],
    size: usize,
    next: u64,
    stream: Stream,
) -> Result<()> {
    let Some(binding) = bindings.first() else { return Ok(()) };
    check(binding, from, 1 + binding.update.rule.states(1).len(), size)?;
    if groups[0].pieces.num_launches.is_none() {
        return Err(Error::State("a scatter comes without the gather of its step".into()));
    }
    let piece = piece_of(groups, number, from, size);
    let mut launch = 0;
    for (group, binding) in groups.iter_mut().zip(bindings) {
        group.workspace.enter_apply(stream)?;
        if let Some(merged) = group.merged(&binding.update) {
            let piece = Piece { launch, ..piece };
            launch = group.workspace.visit_piece("scatter_piece", merged, piece, stream)?;
        }
    }
    groups[0].workspace.next_piece(piece, next, stream)
}

fn check(binding: &Binding, arrays: &[u64], expected: usize, size: usize) -> Result<()> {
    if !binding.update.rule.is_general() {
        return Err(Error::State("the core has the formula of this optimizer".into()));
    }
    if arrays.len() != expected || arrays.iter().any(|address| address % 16 != 0) || !size.is_multiple_of(4) {
        return Err(Error::argument(format!(
            "a piece of `{}` has {expected} aligned arrays of a multiple of 4 floats. Received: {} of {size}",
            binding.update.rule.name(),
            arrays.len()
        )));
    }
    Ok(())
}

/// A piece in launches for all of its rows.
fn piece_of(groups: &[&mut GpuGroup], number: u64, arrays: &[u64], size: usize) -> Piece {
    let pieces = &groups[0].pieces;
    let mut addresses = [0; PIECE_ARRAYS];
    addresses[..arrays.len()].copy_from_slice(arrays);
    Piece {
        number,
        starts: pieces.starts.as_ref().map_or(0, Buffer::address),
        arrays: addresses,
        quads: (size / 4) as u64,
        num_arrays: arrays.len() as u32,
        launch: pieces.num_launches.unwrap_or(0),
    }
}

/// Merges the committed gradients of all groups and counts their rows, unless the step has done so.
///
/// # Safety
/// `scalars` as in `gather`.
unsafe fn begin(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    scalars: u64,
    stream: Stream,
) -> Result<()> {
    for (group, binding) in groups.iter_mut().zip(bindings) {
        group.check_owner(binding)?;
        group.workspace.enter_apply(stream)?;
    }
    if groups[0].pieces.num_launches.is_some() {
        return Ok(());
    }
    for (group, binding) in groups.iter_mut().zip(bindings) {
        // SAFETY: The caller guarantees it.
        unsafe { group.prepare_pieces(&binding.update, scalars, stream) }?;
    }
    let most: usize = groups.iter().map(|group| group.workspace.num_launches(0)).sum();
    if groups[0].pieces.starts.as_ref().is_none_or(|starts| starts.len() <= most) {
        groups[0].pieces.starts = Some(Buffer::new(&groups[0].device().context, most + 1)?);
    }
    let piece = piece_of(groups, 0, &[], 0);
    let mut launch = 0;
    for (group, binding) in groups.iter().zip(bindings) {
        if let Some(merged) = group.merged(&binding.update) {
            launch = group.workspace.count_rows(merged, Piece { launch, ..piece }, stream)?;
        }
    }
    if launch == 0 {
        let starts = groups[0].pieces.starts.as_ref();
        starts.map_or(Ok(()), |starts| starts.zero(stream))?;
    }
    groups[0].pieces.num_launches = Some(launch);
    Ok(())
}

impl GpuGroup {
    /// Forgets what the gathers of a step have found.
    pub(super) fn forget_pieces(&mut self) {
        self.pieces.num_launches = None;
    }

    /// Enqueues merging the committed gradients, and preparing what the launches of pieces read.
    ///
    /// # Safety
    /// `scalars` as in `gather`.
    unsafe fn prepare_pieces(&mut self, update: &Update, scalars: u64, stream: Stream) -> Result<()> {
        self.workspace.describe(&mut self.tables, stream)?;
        self.drop_stale(stream)?;
        if let Committed::Alone(_) = self.committed {
            self.merge_alone(stream)?;
            if let Some(push) = self.alone() {
                self.refresh_sides(push, stream)?;
            }
        }
        if let Some(clipnorm) = update.clipnorm {
            let factors = self.factors.address();
            self.workspace.clip_factors(&self.norms, scalars, clipnorm, factors, stream)?;
        }
        let name = format!("prepare<1, {}>", rule::type_name(&update.rule));
        let prepare = self.device().kernel(&CONTROL, &name)?;
        let preparation: Preparation = self.preparation(update, false, scalars, 0, 0);
        // SAFETY: The arguments have the types of the kernel's parameters. Groups or caller keep the memory that they point to.
        unsafe { launch!(prepare, stream, 1, 128, preparation) }
    }

    /// The merged gradients that the step is to apply, if there are any.
    fn merged(&self, update: &Update) -> Option<Merged<'_>> {
        let (saved, sums) = match (self.committed, &self.combined, self.alone()) {
            (Committed::Alone(_), _, Some(Push { lookup, sums: Some(sums), .. })) => {
                (&lookup.saved, sums.address())
            }
            (Committed::Nothing | Committed::Combined, Some(combined), _) => {
                (&combined.saved, combined.sums.address())
            }
            _ => return None,
        };
        let factors = if update.clipnorm.is_some() { self.factors.address() } else { 0 };
        Some(Merged { saved, sums, prepared: self.prepared.address(), factors })
    }
}
