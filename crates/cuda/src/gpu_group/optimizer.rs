//! Commit and apply of all groups of an optimizer, in one call each.

#![allow(unsafe_code)]

use sok_core::contract::binding::Binding;
use sok_core::contract::group::Group;
use sok_core::error::{Error, Result};

use crate::abi::Preparation;
use crate::device::{Stream, launch, launch_next};
use crate::gpu_group::GpuGroup;
use crate::kernels::CONTROL;
use crate::memory::read;
use crate::rule;

/// Numbers of groups for which `resolve` is instantiated. The groups travel in the parameters of the launch.
const RESOLVED_AT_ONCE: [usize; 3] = [1, 60, 500];
/// Numbers of groups for which `prepare` is instantiated.
const PREPARED_AT_ONCE: [usize; 2] = [1, 40];

/// Returns whether a step is an update. With an `address`, for an optimizer that accumulates, waits for the device and reads it
/// there.
fn is_update(groups: &[&mut GpuGroup], address: Option<u64>) -> Result<bool> {
    let (Some(address), Some(group)) = (address, groups.first()) else { return Ok(true) };
    group.device().synchronize()?;
    Ok(read::<f32>(&group.device().context, address, 1)?[0] != 0.0)
}

/// What ranks that commit together agree on.
#[derive(Clone, Copy)]
pub(crate) struct Agreed<'a> {
    /// Whether a table of any rank might not have room for all keys.
    pub refuses: bool,
    /// Is called before the host inserts keys, where errors may be found until then. Returns its argument if all ranks have called it
    /// without an error, an error otherwise.
    pub vote: &'a dyn Fn(Result<()>) -> Result<()>,
}

/// Returns whether a table might not have room for all keys that the pending pushes insert.
///
/// # Errors
/// Errors of the last commit.
fn may_refuse(groups: &mut [&mut GpuGroup]) -> Result<bool> {
    for group in groups.iter_mut() {
        let lookups = group.pending_lookups();
        if group.may_refuse_candidates(&lookups)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Inserts the keys of the named pushes in tables that might not have room for all of them. Waits for the device.
///
/// # Errors
/// [`Error::TableFull`] if a table refuses keys and its check mode is `Raise`, [`Error::Ticket`]. Nothing has changed then.
fn insert_absent(groups: &mut [&mut GpuGroup], tickets: &[u64], agreed: Option<Agreed>) -> Result<()> {
    let named = groups.iter_mut().zip(tickets).map(|(group, ticket)| group.resolve(*ticket));
    let named = named.collect::<Result<Vec<_>>>().and_then(|named| {
        groups.iter_mut().zip(&named).try_for_each(|(group, named)| group.check_absent(named))?;
        Ok(named)
    });
    if let Some(Agreed { vote, .. }) = agreed {
        vote(named.as_ref().map(drop).map_err(Error::clone))?;
    }
    let named = named?;
    groups.iter_mut().zip(&named).try_for_each(|(group, named)| group.insert_absent(named))
}

/// Finds which pushes the tickets name, and with which weights. `tickets`: by group, the address of its ticket. `is_update_at`:
/// address of a float32 that is 0 if the step is not an update; only for an optimizer that accumulates. `norm_to`: address of a
/// float32 that takes the squared norm of all gradients to apply, or 0 if no binding needs it.
///
/// # Errors
/// [`Error::State`] for an optimizer that may not update the tables, [`Error::TableFull`], and [`Error::Ticket`] if the host reads
/// the tickets, because keys are inserted. Nothing has changed then. Errors that the device has found in earlier calls.
///
/// # Safety
/// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
pub unsafe fn commit(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    tickets: &[u64],
    is_update_at: Option<u64>,
    norm_to: u64,
    stream: Stream,
) -> Result<()> {
    // SAFETY: The caller guarantees it.
    unsafe { commit_together(groups, bindings, tickets, is_update_at, norm_to, None, stream) }
}

/// As `commit`. `agreed`: `None` if only these groups commit.
///
/// # Errors
/// As `commit`, and the error of the vote.
///
/// # Safety
/// As `commit`.
pub(crate) unsafe fn commit_together(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    tickets: &[u64],
    is_update_at: Option<u64>,
    norm_to: u64,
    agreed: Option<Agreed>,
    stream: Stream,
) -> Result<()> {
    // SAFETY: The caller guarantees it.
    let committed =
        unsafe { enqueue_commit(groups, bindings, tickets, is_update_at, norm_to, agreed, stream) };
    committed.inspect_err(|_| groups.iter().for_each(|group| group.abandon_steps()))
}

/// Does the work of `commit_together`.
///
/// # Safety
/// As `commit`.
unsafe fn enqueue_commit(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    tickets: &[u64],
    is_update_at: Option<u64>,
    norm_to: u64,
    agreed: Option<Agreed>,
    stream: Stream,
) -> Result<()> {
    let Some(first) = groups.first() else { return Ok(()) };
    let device = first.device().clone();
    for (group, binding) in groups.iter().zip(bindings) {
        group.check_owner(binding)?;
    }
    for (group, binding) in groups.iter_mut().zip(bindings) {
        group.take_over(binding)?;
    }
    groups.iter_mut().for_each(|group| {
        group.forget_pieces();
        group.open_tables();
    });
    if agreed.map_or_else(|| may_refuse(groups), |agreed| Ok(agreed.refuses))? {
        insert_absent(groups, tickets, agreed)?;
    }
    groups.iter_mut().try_for_each(|group| group.make_room_for_candidates(stream))?;
    let updates = is_update(groups, is_update_at)?;
    let needs_norm = updates && bindings.iter().any(|b| b.needs_norm || b.clips_norms());
    let no_norm_to = if needs_norm { 0 } else { norm_to };
    // SAFETY: The caller guarantees it.
    unsafe { resolve(groups, tickets, is_update_at.is_some(), no_norm_to, stream) }?;
    for group in groups.iter_mut() {
        group.take_committed(stream)?;
        group.end_step(stream)?;
    }
    for group in groups.iter_mut() {
        group.combine(stream)?;
    }
    if !needs_norm {
        return Ok(());
    }
    let norm = groups[0].norm();
    let total = norm.address();
    norm.zero(stream)?;
    for group in groups.iter_mut() {
        group.add_norm(total, stream)?;
    }
    let give = device.kernel(&CONTROL, "give_norm")?;
    // SAFETY: The arguments have the types of the kernel's parameters. Groups or caller keep the memory that they point to.
    unsafe { launch!(give, stream, 1, 1, total, norm_to) }
}

/// Enqueues finding which pushes the tickets name. `norm_to`: address of a float32 that is set to 0, or 0.
///
/// # Errors
/// [`Error::Argument`] for too many groups. Errors that the device has found in earlier calls.
///
/// # Safety
/// As `commit`.
pub(crate) unsafe fn resolve(
    groups: &mut [&mut GpuGroup],
    tickets: &[u64],
    accumulates: bool,
    norm_to: u64,
    stream: Stream,
) -> Result<()> {
    let device = groups[0].device().clone();
    let at_once =
        RESOLVED_AT_ONCE.into_iter().find(|n| *n >= groups.len() && 64 * n < device.parameter_bytes);
    let Some(at_once) = at_once else {
        return Err(Error::argument(format!(
            "an optimizer has too many layers with tables for a GPU: {}",
            groups.len()
        )));
    };
    groups.iter_mut().try_for_each(|group| group.prepare_commit())?;
    let mut committed = Vec::with_capacity(at_once);
    for (group, ticket) in groups.iter_mut().zip(tickets) {
        committed.push(group.begin_commit(*ticket, accumulates, stream)?);
    }
    let num_groups = groups.len() as u32;
    committed.resize(at_once, committed[0]);
    let resolve = device.kernel(&CONTROL, &format!("resolve<{at_once}>"))?;
    // SAFETY: The arguments have the types of the kernel's parameters. Groups or caller keep the memory that they point to.
    unsafe { launch_next!(resolve, stream, 1, 64, committed[0], num_groups, norm_to) }
}

/// Updates the records of the committed gradients, or only accumulates these. `scalars`: address of learning rate, step, is_update
/// and factor of each optimizer, float32 `(rows, 4)`. `triggers`: by group, the address of its trigger and the address that takes the new value, float32
/// `(64, 2)`.
///
/// # Errors
/// As `Group::check_owner`, and [`Error::Device`] if a kernel cannot be compiled or launched.
///
/// # Safety
/// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
pub unsafe fn apply(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    scalars: u64,
    accumulates: bool,
    triggers: &[(u64, u64)],
    stream: Stream,
) -> Result<()> {
    let Some(first) = groups.first() else { return Ok(()) };
    let device = first.device().clone();
    for (group, binding) in groups.iter().zip(bindings) {
        group.check_owner(binding)?;
    }
    let updates = is_update(groups, accumulates.then_some(scalars + 8))?;
    let mut preparations = Vec::with_capacity(groups.len());
    for ((group, binding), &(trigger, new)) in groups.iter_mut().zip(bindings).zip(triggers) {
        group.enter(stream)?;
        let preparation = group.preparation(&binding.update, updates, scalars, trigger, new);
        preparations.push((rule::type_name(&binding.update.rule), preparation));
    }
    for (group, binding) in groups.iter().zip(bindings) {
        let others = group.other_preparations(binding, scalars);
        preparations.extend(others.map(|(update, preparation)| (rule::type_name(&update.rule), preparation)));
    }
    let of_one_rule = preparations.chunk_by(|(one, _), (other, _)| one == other);
    for chunk in of_one_rule.flat_map(|same| same.chunks(PREPARED_AT_ONCE[1])) {
        let at_once = if chunk.len() == 1 { PREPARED_AT_ONCE[0] } else { PREPARED_AT_ONCE[1] };
        let prepare = device.kernel(&CONTROL, &format!("prepare<{at_once}, {}>", chunk[0].0))?;
        let mut all: Vec<Preparation> = chunk.iter().map(|(_, preparation)| *preparation).collect();
        all.resize(at_once, Preparation::default());
        // SAFETY: The arguments have the types of the kernel's parameters. Groups or caller keep the memory that they point to.
        unsafe { launch_next!(prepare, stream, chunk.len(), 128, all[0]) }?;
    }
    for (group, binding) in groups.iter_mut().zip(bindings) {
        if updates { group.update(binding, scalars, stream)? } else { group.accumulate(stream)? }
    }
    Ok(())
}
