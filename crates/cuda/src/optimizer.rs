//! Commit and apply: one call each for all groups of an optimizer.

use sok_core::error::{Error, Result};
use sok_core::host_group::Binding;

use crate::device::{Stream, launch, launch_next};
use crate::gpu_group::GpuGroup;
use crate::kernels::CONTROL;

use crate::memory::{read, words};

/// Groups that travel in a launch's parameters: few, more, as many as parameters hold.
const RESOLVED_AT_ONCE: [usize; 3] = [1, 60, 500];
const PREPARED_AT_ONCE: [usize; 2] = [1, 40];

/// Whether a step is an update, which only an optimizer that accumulates has to ask the device.
fn is_update(groups: &[&mut GpuGroup], address: Option<u64>) -> Result<bool> {
    let (Some(address), Some(group)) = (address, groups.first()) else { return Ok(true) };
    group.device().synchronize()?;
    Ok(read::<f32>(&group.device().context, address, 1)?[0] != 0.0)
}

/// Makes the rows that the named pushes missed, where their lookups left that to the commit. That waits for the device.
///
/// # Errors
/// [`Error::TableFull`] if a table refuses some and is asked to say so; a ticket that is wrong. Nothing has changed.
fn insert_absent(groups: &mut [&mut GpuGroup], tickets: &[u64], stream: Stream) -> Result<()> {
    if !groups.iter().any(|group| group.inserts_at_commit()) {
        return Ok(());
    }
    let named = groups.iter_mut().zip(tickets).map(|(group, ticket)| group.resolve(*ticket));
    let named = named.collect::<Result<Vec<_>>>()?;
    groups.iter_mut().zip(&named).try_for_each(|(group, named)| group.check_absent(named))?;
    groups.iter_mut().zip(&named).try_for_each(|(group, named)| group.insert_absent(named, stream))
}

/// Finds which pushes the tickets name, and with which weights. `norm_to`: takes the squared norm of all that is to be applied, if
/// `needs_norm`, else 0. `is_update_at`: of an optimizer that accumulates, where the device has whether this step is an update.
///
/// # Errors
/// [`Error::State`] for an optimizer that may not; tickets that the host can see are wrong. Nothing has changed.
pub fn commit(
    groups: &mut [&mut GpuGroup],
    bindings: &[Binding],
    tickets: &[u64],
    is_update_at: Option<u64>,
    norm_to: u64,
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
    insert_absent(groups, tickets, stream)?;
    let updates = is_update(groups, is_update_at)?;
    let at_once =
        RESOLVED_AT_ONCE.into_iter().find(|n| *n >= groups.len() && 64 * n < device.parameter_bytes);
    let Some(at_once) = at_once else {
        return Err(Error::argument(format!(
            "an optimizer has too many layers with tables for a GPU: {}",
            groups.len()
        )));
    };
    let mut committed = Vec::with_capacity(at_once);
    for (group, ticket) in groups.iter_mut().zip(tickets) {
        committed.push(group.begin_commit(*ticket, is_update_at.is_some(), stream)?);
    }
    let num_groups = groups.len() as u32;
    committed.resize(at_once, committed[0]);
    let needs_norm = updates && bindings.iter().any(|b| b.needs_norm || b.update.clipnorm.is_some());
    let no_norm_to = if needs_norm { 0 } else { norm_to };
    let [resolve, give] = device.kernels(&CONTROL, [&*format!("resolve<{at_once}>"), "give_norm"])?;
    launch_next!(resolve, stream, 1, 64, committed[0], num_groups, no_norm_to)?;
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
    launch!(give, stream, 1, 1, total, norm_to)
}

/// Updates the records of what is committed, or leaves it to add up. `scalars`: learning rate, step, is_update and factor on the
/// device; `triggers` and where their new values go, of each group.
///
/// # Errors
/// As `GpuGroup::check_owner`.
pub fn apply(
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
        preparations.push(group.preparation(&binding.update, scalars, trigger, new));
    }
    for chunk in preparations.chunks(PREPARED_AT_ONCE[1]) {
        let at_once = if chunk.len() == 1 { PREPARED_AT_ONCE[0] } else { PREPARED_AT_ONCE[1] };
        let prepare = device.kernel(&CONTROL, &format!("prepare<{at_once}>"))?;
        let mut all = words(chunk).to_vec();
        all.resize(words(&chunk[..1]).len() * at_once, 0);
        launch_next!(prepare, stream, chunk.len(), 128, all[0])?;
    }
    for (group, binding) in groups.iter_mut().zip(bindings) {
        if updates { group.update(&binding.update, scalars, stream)? } else { group.accumulate(stream)? }
    }
    Ok(())
}
