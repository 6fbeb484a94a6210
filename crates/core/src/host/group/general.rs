//! The update of an optimizer without a formula: rows and states go to arrays of the framework, and new values come back.
//! `contract/general.rs` says how rows become pieces.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{ApplyScalars, HostGroup};
use crate::contract::binding::Binding;
use crate::contract::general::{Gather, Scatter, piece_number};
use crate::contract::group::Group;
use crate::contract::tensor::{Tensor, TensorMut};
use crate::error::{Error, Result};
use crate::formula::update::{Conditioning, UpdateScalars};
use crate::formula::{Rule, StateSpec};
use crate::host::merge::{MergedGradients, RecordGradients, StoredGradients};
use crate::host::new_values::NewValues;
use crate::host::table::HostTable;
use crate::pool::{Pool, num_pieces, run_if_large};
use crate::simd::prefetch;
use crate::store::arena::{Arena, NO_RECORD, SharedArena};
use crate::store::format::{Chance, RecordFormat};

/// How many records are prefetched ahead.
const AHEAD: usize = 16;
/// Floats that a thread gathers as one task.
const TASK: usize = 1 << 14;

/// Writes a piece of the rows of these groups, as [`Group::gather`].
///
/// # Errors
/// The same.
pub(super) fn gather(groups: &mut [&mut HostGroup], gather: Gather<'_>, pool: &Pool) -> Result<()> {
    let Gather { bindings, scalars, piece, mut to, .. } = gather;
    let (scalars, number) = (ApplyScalars::read(scalars)?, piece_number(piece)?);
    let states = states_of(bindings, to.len().checked_sub(2))?;
    let mut to = to.iter_mut().map(TensorMut::slice_mut).collect::<Result<Vec<&mut [f32]>>>()?;
    let size = check_lengths(to.iter().map(|to| to.len()))?;
    let piece = floats_of(number, size);
    let mut start = 0;
    for (group, binding) in groups.iter_mut().zip(bindings) {
        group.prepare_gather(binding, &scalars, pool)?;
        let end = start + group.new_values.len();
        if let Some((own, places)) = common(&piece, start..end) {
            let to = to.iter_mut().map(|to| &mut to[places.clone()]).collect();
            group.gather_floats(binding, &scalars, own, to, pool);
        }
        start = end;
    }
    let num_used = start.clamp(piece.start, piece.end) - piece.start;
    let zeros = [0.0, 0.0].into_iter();
    for (to, first) in to.iter_mut().zip(zeros.chain(states.iter().map(|state| state.initial))) {
        to[num_used..].fill(first);
    }
    Ok(())
}

/// Takes the new values of a piece, as [`Group::scatter`].
///
/// # Errors
/// The same.
pub(super) fn scatter(groups: &mut [&mut HostGroup], scatter: Scatter<'_>) -> Result<()> {
    let Scatter { bindings, piece, from, mut next, .. } = scatter;
    let number = piece_number(piece)?;
    states_of(bindings, from.len().checked_sub(1))?;
    let from = from.into_iter().map(Tensor::slice).collect::<Result<Vec<&[f32]>>>()?;
    let piece = floats_of(number, check_lengths(from.iter().map(|from| from.len()))?);
    let mut start = 0;
    for group in groups.iter_mut() {
        let end = start + group.new_values.len();
        if let Some((own, places)) = common(&piece, start..end) {
            group.new_values.take(own, from.iter().map(|from| &from[places.clone()]));
        }
        start = end;
    }
    let is_last = number == 0 || piece.end >= start;
    next.slice_mut::<i32>()?[0] = if is_last { 0 } else { number as i32 + 1 };
    Ok(())
}

/// The states of the optimizer's rule.
fn states_of(bindings: &[Binding], num_arrays: Option<usize>) -> Result<Vec<StateSpec>> {
    let rule = bindings.first().map(|binding| binding.update.rule).filter(Rule::is_general);
    let rule = rule.ok_or_else(|| Error::State("the core has the formula of this optimizer".into()))?;
    let states = rule.states(1);
    if num_arrays != Some(states.len()) {
        return Err(Error::argument(format!(
            "`{}` has {} states. Received: arrays of {num_arrays:?}",
            rule.name(),
            states.len()
        )));
    }
    Ok(states)
}

/// The length of all arrays.
fn check_lengths(mut lengths: impl Iterator<Item = usize>) -> Result<usize> {
    let first = lengths.next().unwrap_or(0);
    match lengths.find(|length| *length != first) {
        None if first > 0 => Ok(first),
        other => Err(Error::argument(format!(
            "the arrays of a piece must be equally long, and not empty. Received: {first} and {other:?}"
        ))),
    }
}

/// Returns which floats of all rows are in a piece.
fn floats_of(number: usize, size: usize) -> Range<usize> {
    // Number 0 means none: a range that no row reaches.
    let start = number.checked_sub(1).map_or(usize::MAX - size, |place| place * size);
    start..start + size
}

/// Returns the floats that are in a piece and in a group: which of the group's rows, and which of the piece.
fn common(piece: &Range<usize>, group: Range<usize>) -> Option<(Range<usize>, Range<usize>)> {
    let (start, end) = (piece.start.max(group.start), piece.end.min(group.end));
    let from = |start_of: usize| start - start_of..end - start_of;
    (start < end).then(|| (from(group.start), from(piece.start)))
}

impl HostGroup {
    /// Merges the committed gradients, unless this was done, and makes room for new values.
    fn prepare_gather(&mut self, binding: &Binding, scalars: &ApplyScalars, pool: &Pool) -> Result<()> {
        self.check_owner(binding)?;
        if self.new_values.is_begun() {
            return Ok(());
        }
        let mut ends = Vec::with_capacity(self.tables.len());
        if scalars.is_update {
            self.merge_committed(pool)?;
            let mut end = 0;
            for (number, table) in self.tables.iter().enumerate() {
                end += self
                    .without_formula(number, table, binding)
                    .iter()
                    .map(|s| s.records.len())
                    .sum::<usize>()
                    * table.config.dim;
                ends.push(end);
            }
        }
        self.new_values.begin(ends, 1 + binding.update.rule.states(1).len())
    }

    /// The gradients to apply to a table, if its optimizer has no formula.
    fn without_formula<'a>(
        &'a self,
        number: usize,
        table: &HostTable,
        binding: &Binding,
    ) -> Vec<RecordGradients<'a, StoredGradients<'a>>> {
        let is_general = binding.update_of(&table.config).rule.is_general();
        if is_general { self.stored(number, table.generation) } else { Vec::new() }
    }

    /// Writes gradients, rows and states to `to`, for these floats of the group's rows.
    fn gather_floats(
        &self,
        binding: &Binding,
        scalars: &ApplyScalars,
        floats: Range<usize>,
        to: Vec<&mut [f32]>,
        pool: &Pool,
    ) {
        let num_floats = floats.len();
        let mut parts: Vec<_> = to.into_iter().map(|to| to.chunks_mut(TASK)).collect();
        let starts = floats.clone().step_by(TASK);
        let tasks: Vec<_> = starts
            .map(|start| (start, parts.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()))
            .collect();
        let tables = self.tables.iter().enumerate().map(|(number, table)| {
            let scalars = self.clipped(number, &binding.update, &scalars.rows[0]);
            let conditioning = binding.update.conditioning(&scalars);
            let gradients = self.without_formula(number, table, binding);
            TableRows { table, gradients, conditioning, floats: self.new_values.of_table(number) }
        });
        let tables: Vec<TableRows> = tables.collect();
        run_if_large(num_floats / 16, tasks, pool, |(start, mut to): (usize, Vec<&mut [f32]>)| {
            let floats = start..start + to[0].len();
            tables.iter().for_each(|table| table.gather(&floats, &mut to));
        });
    }

    /// Writes the new values to the records.
    ///
    /// # Errors
    /// [`Error::State`] if some have not come. Nothing has changed then.
    pub(super) fn apply_new_values(&mut self, scalars: &UpdateScalars, pool: &Pool) -> Result<()> {
        let new = &self.new_values;
        if !new.is_complete() {
            return Err(Error::State(format!(
                "the optimizer has not brought the new rows of the tables {}: {} of {} numbers have come",
                self.names(),
                new.num_come(),
                new.len()
            )));
        }
        let mut tables = std::mem::take(&mut self.tables);
        let mut tasks = Vec::new();
        for (number, table) in tables.iter_mut().enumerate() {
            let mut floats = self.new_values.of_table(number);
            if floats.is_empty() {
                continue;
            }
            let (format, generation, chance) = (table.first.format, table.generation, table.chance(scalars));
            let arena = table.arena.share();
            for gradients in self.stored(number, generation) {
                let num_keys = gradients.records.len();
                for keys in gradients.gradients.pieces(num_pieces(num_keys, num_keys, pool)) {
                    let start = floats.start + keys.start * format.dim;
                    tasks.push((arena, format, chance, &gradients.records[keys], start));
                }
                floats.start += num_keys * format.dim;
            }
        }
        let new = &self.new_values;
        // SAFETY: - the tables are borrowed mutably: nobody else has their arenas.
        //         - the records of all tasks are distinct: keys of a table are distinct over its gradients, and pieces are.
        run_if_large(new.len() / 16, tasks, pool, |(arena, format, chance, records, start)| unsafe {
            write_records(arena, format, &chance, records, new, start);
        });
        self.tables = tables;
        Ok(())
    }
}

/// The rows of a table that a step is to change.
struct TableRows<'a> {
    table: &'a HostTable,
    gradients: Vec<RecordGradients<'a, StoredGradients<'a>>>,
    conditioning: Conditioning,
    /// Which floats of the group's rows they have.
    floats: Range<usize>,
}

impl TableRows<'_> {
    /// Writes the part of `floats` that is of this table.
    fn gather(&self, floats: &Range<usize>, to: &mut [&mut [f32]]) {
        let dim = self.table.config.dim;
        let mut start = self.floats.start;
        for gradients in &self.gradients {
            let end = start + gradients.records.len() * dim;
            if let Some((own, places)) = common(floats, start..end) {
                self.gather_floats(gradients, own, to, places.start);
            }
            start = end;
        }
    }

    /// Writes `floats` of one set of gradients. `place`: where the first one goes in `to`.
    fn gather_floats(
        &self,
        RecordGradients { records, gradients }: &RecordGradients<StoredGradients>,
        floats: Range<usize>,
        to: &mut [&mut [f32]],
        mut place: usize,
    ) {
        let (dim, arena, format) = (self.table.config.dim, &self.table.arena, self.table.first.format);
        let mut row = vec![0.0; dim];
        let mut start = floats.start;
        while start < floats.end {
            let (key, column) = (start / dim, start % dim);
            let end = floats.end.min((key + 1) * dim);
            if let Some(&record) = records.get(key + AHEAD) {
                prefetch_record(arena, record);
            }
            let places = place..place + end - start;
            match records[key] {
                NO_RECORD => to.iter_mut().for_each(|to| to[places.clone()].fill(0.0)),
                record => {
                    let sums = gradients.sums[start..end].iter();
                    let record = arena.record(record);
                    format.read_row(record, &mut row);
                    let columns = column..column + end - start;
                    let row = row[columns.clone()].iter();
                    let states = record[format.states_start()..].chunks_exact(dim);
                    for (to, sum) in to[0][places.clone()].iter_mut().zip(sums) {
                        *to = self.conditioning.gradient(*sum * gradients.weight);
                    }
                    for (to, x) in to[1][places.clone()].iter_mut().zip(row) {
                        *to = self.conditioning.value(*x);
                    }
                    for (to, state) in to[2..].iter_mut().zip(states) {
                        to[places.clone()].copy_from_slice(&state[columns.clone()]);
                    }
                }
            }
            place = places.end;
            start = end;
        }
    }
}

fn prefetch_record(arena: &Arena, record: u32) {
    let (start, bytes) = (arena.addresses().get(record).cast::<u8>(), arena.width() * 4);
    (0..bytes).step_by(64).for_each(|offset| prefetch(start.wrapping_add(offset)));
}

/// Writes new values to records. `start`: index of the first record's first value in `new`.
///
/// # Safety
/// Until it returns, no other thread reads or writes the records.
unsafe fn write_records(
    arena: SharedArena,
    format: RecordFormat,
    chance: &Chance,
    records: &[u32],
    new: &NewValues,
    start: usize,
) {
    let dim = format.dim;
    for (place, &record) in records.iter().enumerate().filter(|(_, record)| **record != NO_RECORD) {
        let start = start + place * dim;
        // SAFETY: the caller's promise.
        let record = unsafe { arena.record_mut(record) };
        format.write_updated(record, new.field(0, start..start + dim), chance);
        for (state, to) in record[format.states_start()..].chunks_exact_mut(dim).enumerate() {
            to.copy_from_slice(new.field(1 + state, start..start + dim));
        }
    }
}
