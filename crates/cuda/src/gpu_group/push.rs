//! The push of a lookup's gradients.

#![allow(unsafe_code)]

use sok_core::contract::gradients::Keep;
use sok_core::contract::group::Group;
use sok_core::contract::ticket::{RING, mark};
use sok_core::error::{Error, Result};
use sok_core::row_type::RowType;

use super::{GpuGroup, Push, SavedLookup, sharded};
use crate::abi::{self, Gradients, NewTicket, NumberCopy, Side};
use crate::device::Stream;
use crate::memory::{Buffer, read};
use crate::peers::Window;
use crate::step::{NumberCopyKind, Saved, SavedFeature};

/// The number of a lookup, as the caller of a push has it.
#[derive(Clone, Copy, Debug)]
pub enum LookupNumber {
    /// The number itself.
    Known(u64),
    /// Address of the number on the device, two words that the lookup has written.
    At(u64),
}

/// The gradients of a lookup's outputs.
pub struct OutputGradients {
    /// By feature: address of its gradients on the device, `(bags, dim)`.
    pub rows: Vec<u64>,
    /// Type of their numbers, which must be that of the outputs.
    pub array_type: RowType,
    /// If given, the gradients stay where they are until they are applied. If not, they are merged or copied at once.
    pub keep: Option<Keep>,
    /// Whether a gradient that is not finite makes the ticket NaN.
    pub check_finite: bool,
}

impl GpuGroup {
    /// Returns the sides of a push. `factors`: by feature, empty if they are 1. `window`: where its merged gradients go instead of sums.
    pub(super) fn sides(
        &self,
        saved: &Saved,
        rows: &[u64],
        factors: &[f32],
        window: Option<&Window>,
    ) -> Vec<Side> {
        let mut sides = self.workspace.sides(&self.tables, saved, rows, self.nowhere.address());
        sides.iter_mut().zip(factors).for_each(|(side, factor)| side.scale *= factor);
        if let Some(window) = window {
            let firsts = sharded::GradientLayout::of(&self.tables, saved).merged;
            for side in &mut sides {
                let quads = abi::quads(self.tables[side.table as usize].config.dim);
                // The first row is that of record 1.
                side.records = window.address() + firsts[side.table as usize] as u64 - 16 * quads as u64;
                side.stride = quads as u32;
            }
        }
        sides
    }

    /// Returns the sides with which the gradients of weights are computed from the rows that have come from other ranks. `sides`: those of
    /// the push.
    fn row_sides(&self, lookup: &SavedLookup, sides: &[Side]) -> Vec<Side> {
        let (Some(window), Some(windows)) = (&lookup.window, &self.windows) else { return sides.to_vec() };
        let places = sharded::row_places(&self.tables, &lookup.saved, windows.world_size());
        let is_gone = |t: usize| {
            lookup.saved.generations.iter().any(|&(table, g)| table == t && self.tables[t].generation != g)
        };
        let side = |side: &Side| {
            let bytes = 16 * u64::from(side.stride);
            let records = window.address() + places[side.table as usize] as u64 - bytes;
            let stride = if is_gone(side.table as usize) { 0 } else { side.stride };
            Side { records, stride, ..*side }
        };
        sides.iter().map(side).collect()
    }

    /// Returns the number of the lookup that a gradient belongs to. Waits for the device if its address is not known.
    fn lookup_of(&mut self, number: LookupNumber) -> Result<u64> {
        match number {
            LookupNumber::Known(number) => Ok(number),
            LookupNumber::At(address) => match self.by_address.remove(&address) {
                Some(number) => Ok(number),
                // The framework has copied the number to another address.
                None => {
                    self.workspace.device.synchronize()?;
                    Ok(read::<u64>(&self.workspace.device.context, address, 1)?[0])
                }
            },
        }
    }

    /// Enqueues the push of a lookup's gradients. `gradient_lens`: by feature, the number of numbers of its gradients.
    /// `weight_gradients`: for features with weights, the index of the feature and the address that takes the gradients of its
    /// weights, float32 `(ids,)`. `ticket`: address that takes the ticket, float32 `(64, 2)`.
    ///
    /// # Errors
    /// As `HostGroup::push`, and [`Error::Device`] without enough memory.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    /// With a `Keep`, gradients live until it is dropped.
    pub unsafe fn push(
        &mut self,
        number: LookupNumber,
        gradients: OutputGradients,
        gradient_lens: &[usize],
        weight_gradients: &[(usize, u64)],
        ticket: u64,
        stream: Stream,
    ) -> Result<()> {
        self.check_own_fault()?;
        let lookup = self.lookup_of(number)?;
        let saved = self.lookups.iter().find(|l| l.number == lookup).cloned().ok_or_else(|| Error::Ticket {
            tables: self.names(),
            what: format!("a gradient comes for a lookup that is gone: older than the newest {RING}, or from before a load"),
        })?;
        self.check_gradients(&saved.saved, gradients.array_type, gradient_lens)?;
        if self.binding.is_none() && self.pushes_without_optimizer > 0 {
            return Err(Error::UnwrappedOptimizer { tables: self.names() });
        }
        self.workspace.enter(stream)?;
        self.workspace.describe(&mut self.tables, stream)?;
        if !weight_gradients.is_empty() {
            // A step may have come since the lookup.
            self.catch_up_tables()?;
        }
        let bytes = || sharded::GradientLayout::of(&self.tables, &saved.saved).bytes;
        let window = self.windows.as_mut().map(|windows| windows.take(bytes())).transpose()?;
        let workspace = &mut self.workspace;
        let is_bad = if gradients.check_finite { self.is_bad.address() } else { 0 };
        let given = gradients.rows.iter().zip(gradient_lens);
        let given: Vec<_> = given.map(|(from, len)| Gradients { from: *from, count: *len as u64 }).collect();
        let number_of = self.ring.next_number();
        let ticket = NewTicket {
            ticket,
            is_bad,
            row: (number_of % RING) as u32,
            mark: mark(number_of),
            number: if let LookupNumber::At(address) = number { address } else { 0 },
            expected: [lookup as u32, (lookup >> 32) as u32],
            fault: workspace.fault.address(),
        };
        let (mut rows, mut copied, mut copy, mut sums) = (gradients.rows, &[][..], None, None);
        // A norm is computed from merged gradients.
        let is_merged_anyway = self.binding.as_ref().is_some_and(|b| b.needs_norm || b.clips_norms());
        // Gradients of keys that a commit may insert cannot be merged yet.
        let is_later = saved.has_candidates();
        let is_cheaper = !is_merged_anyway && saved.saved.has_few_gradients();
        let copies = gradients.keep.is_none() && (is_later || is_cheaper) || !saved.saved.is_aligned(&rows);
        if copies {
            let (memory, places) = workspace.take_copy(&saved.saved)?;
            (rows, copied, copy) = (places, &given, Some(memory));
        }
        if gradients.check_finite {
            workspace.check_finite(&given, saved.saved.array_type, &self.is_bad, stream)?;
        }
        let sides = self.sides(&saved.saved, &rows, &[], window.as_ref());
        let reads_rows = window.is_some() && !weight_gradients.is_empty();
        let row_sides = if reads_rows { self.row_sides(&saved, &sides) } else { sides.clone() };
        let workspace = &mut self.workspace;
        let mut products = vec![0; if weight_gradients.is_empty() { 0 } else { sides.len() }];
        weight_gradients.iter().for_each(|(feature, to)| products[*feature] = *to);
        let written = workspace.write_ticket(&saved.saved, &row_sides, copied, &products, &ticket, stream);
        // Writing the ticket resets `is_bad`. If that fails, it is reset here.
        written.or_else(|error| self.is_bad.zero(stream).and(Err(error)))?;
        if copies {
            workspace.copy_gradients(&saved.saved, stream)?;
        }
        if !weight_gradients.is_empty() {
            // The row of that key may have come or gone since the lookup.
            workspace.find_out_of_vocabulary(&self.tables, stream)?;
            workspace.weight_gradients(&saved.saved, copied.len(), stream)?;
        }
        if let Some(window) = &window {
            self.share_bags(&saved.saved, &given, window, stream)?;
        }
        let workspace = &mut self.workspace;
        if reads_rows {
            workspace.deliver_sides(&saved.saved, &sides, stream)?;
        }
        *saved.sides() = sides;
        let mut is_merged = false;
        if gradients.keep.is_none() && !copies {
            if window.is_none() {
                sums = Some(workspace.take_sums(&saved.saved)?);
            }
            workspace.merge(&saved.saved, sums.as_ref().map(Buffer::address), stream)?;
            is_merged = true;
        }
        saved.saved.generations.iter().for_each(|(t, _)| self.tables[*t].count_call());
        self.pushes_without_optimizer += u32::from(self.binding.is_none());
        let (keep, factors) = (gradients.keep, Vec::new());
        let push = Push { lookup: saved, rows, factors, copy, sums, window, is_merged, _keep: keep };
        if let (_, Some(fallen)) = self.ring.add(push) {
            self.reuse(fallen);
        }
        Ok(())
    }

    /// Enqueues copying the gradients of bags to a window, if the owner of their table merges them. `given`: by feature.
    fn share_bags(
        &mut self,
        saved: &Saved,
        given: &[Gradients],
        window: &Window,
        stream: Stream,
    ) -> Result<()> {
        let places = sharded::GradientLayout::of(&self.tables, saved).bags;
        let mut places: Vec<_> = places.into_iter().map(Vec::into_iter).collect();
        let pooled = saved.features.iter().zip(given).filter(|(feature, _)| feature.at_owner);
        let copy = |(feature, from): (&SavedFeature, &Gradients)| {
            let place = places[feature.table].next().expect("a window has room for each feature");
            NumberCopy { from: from.from, to: window.address() + place as u64, count: from.count }
        };
        let copies: Vec<NumberCopy> = pooled.map(copy).collect();
        self.workspace.copy_all(&copies, NumberCopyKind::Widen(saved.array_type), stream)
    }

    fn check_gradients(&self, saved: &Saved, array_type: RowType, lens: &[usize]) -> Result<()> {
        if array_type != saved.array_type {
            let (expected, received) = (saved.array_type.name(), array_type.name());
            return Err(Error::argument(format!(
                "the gradients of a lookup must have the type of its rows, {expected}. Received: {received}"
            )));
        }
        if lens.len() != saved.features.len() {
            return Err(Error::argument(format!(
                "a push brings the gradient of each feature. Received: {} of {}",
                lens.len(),
                saved.features.len()
            )));
        }
        match saved.features.iter().zip(lens).find(|(f, len)| f.num_bags * f.dim != **len) {
            None => Ok(()),
            Some((f, len)) => Err(Error::argument(format!(
                "the gradient of a feature of table `{}` must hold {} numbers. Received: {len}",
                self.tables[f.table].config.name,
                f.num_bags * f.dim
            ))),
        }
    }
}
