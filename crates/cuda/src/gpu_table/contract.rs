//! The contract of a table. A method that needs the state of the device waits for all earlier steps.

use std::any::Any;
use std::borrow::Cow;
use std::collections::HashSet;

use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::{
    Contents, Cursor, Epoch, Explanation, Freezing, Outcomes, Table, TableConfig, TableStats, not_kept,
};
use sok_core::error::{Error, Result};
use sok_core::formula::update::{Update, UpdateScalars, update_with_formula};
use sok_core::key::Key;
use sok_core::memory;

use super::record::{DeviceLayout, RowKind};
use super::released::Ring;
use super::{GpuTable, WAITING, arena, evictor};
use crate::abi::DeviceFields;
use crate::index::Index;
use crate::memory::Buffer;
use crate::step;

/// Checks that records on a GPU can have the states of an update: three at most, of which all but the first start at 0.
fn check_states(update: &Update, table: &str) -> Result<()> {
    let states = update.rule.states(1);
    if states.len() < DeviceFields::default().fields.len() && states.iter().skip(1).all(|s| s.initial == 0.0)
    {
        return Ok(());
    }
    let rule = "on a GPU a row has at most three states, and all but the first start at 0";
    let names: Vec<String> = states.iter().map(|s| format!("`{}` from {}", s.name, s.initial)).collect();
    Err(Error::Device(format!(
        "{rule}: use `storage=\"host\"` for table `{table}`. Received: {} with the states {}",
        update.rule.name(),
        names.join(", ")
    )))
}

impl Contents for GpuTable {
    fn config(&self) -> &TableConfig {
        &self.config
    }

    fn len(&self) -> Result<usize> {
        self.device.synchronize()?;
        let counts = self.counts()?;
        Ok((counts.taken - counts.gone) as usize)
    }

    fn update_rule(&self) -> Option<&Update> {
        self.update.as_ref()
    }

    fn step(&self) -> Result<u64> {
        let Some(evictor) = &self.evictor else {
            return Ok(self.candidates.as_ref().map_or(1, |candidates| candidates.step));
        };
        self.device.synchronize()?;
        evictor.read_step()
    }

    fn sights(&self) -> Result<Cow<'_, Records>> {
        let Some(candidates) = &self.candidates else { return Ok(Cow::default()) };
        self.device.synchronize()?;
        candidates.all_sights().map(Cow::Owned)
    }

    fn commit_times(&self) -> Vec<(u64, u64)> {
        self.evictor.as_ref().map_or_else(Vec::new, |evictor| evictor.commits.ages_by_time())
    }

    fn scan(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>> {
        self.device.synchronize()?;
        let (mut keys, mut records) = (Vec::new(), Vec::new());
        let next = self.index.entries(cursor.0 as usize, max, |key, record| {
            keys.push(key);
            records.push(record);
        })?;
        self.append(keys, &records, out)?;
        Ok(next.map(|next| Cursor(next as u64)))
    }

    fn epoch_of(&self, snapshot: u64) -> Option<Epoch> {
        self.changes.as_ref()?.epochs.find(snapshot).map(Epoch)
    }

    fn num_changed(&self, Epoch(epoch): Epoch) -> Result<usize> {
        self.device.synchronize()?;
        self.count_changed(epoch)
    }

    fn scan_changed(
        &self,
        Epoch(epoch): Epoch,
        cursor: Cursor,
        max: usize,
        out: &mut Records,
    ) -> Result<Option<Cursor>> {
        self.device.synchronize()?;
        let (keys, records, next) = self.list_changed(epoch, cursor.0 as usize, max)?;
        self.append(keys, &records, out)?;
        Ok(next.map(|next| Cursor(next as u64)))
    }

    fn for_scan(&self, since: Option<u64>) -> Result<Option<Box<dyn Contents + '_>>> {
        self.device.synchronize()?;
        self.listed(since)
    }

    fn removed_since(&self, Epoch(epoch): Epoch) -> Result<Vec<Key>> {
        self.device.synchronize()?;
        self.absent_of(self.known_changes()?.epochs.removed_since(epoch))
    }
}

impl Table for GpuTable {
    fn find(&self, keys: &[Key], rows: &mut [f32], found: &mut [bool]) -> Result<()> {
        self.check_len("rows", rows.len(), keys.len(), self.config.dim)?;
        if found.len() != keys.len() {
            return Err(Error::argument(format!(
                "table `{}`: `found` must hold one answer a key. Received: {} for {} keys",
                self.config.name,
                found.len(),
                keys.len()
            )));
        }
        self.device.synchronize()?;
        let room = self.room(keys.len(), self.config.dim)?;
        let records = self.look_up(&room, keys, false)?;
        self.read_rows(&room, keys, &records, rows)?;
        found.iter_mut().zip(records).for_each(|(found, record)| *found = record != 0);
        Ok(())
    }

    fn find_or_insert(&mut self, keys: &[Key], rows: &mut [f32]) -> Result<Outcomes> {
        self.check_len("rows", rows.len(), keys.len(), self.config.dim)?;
        self.wait()?;
        let room = self.room(keys.len(), self.config.dim)?;
        let (records, outcomes) = self.locate(&room, keys, true)?;
        self.note(outcomes);
        // SAFETY: The room has the records of the keys, and the call below waits.
        unsafe { self.count_records(room.used(keys.len()).address, 0, keys.len(), WAITING) }?;
        self.device.synchronize()?;
        self.read_rows(&room, keys, &records, rows)?;
        Ok(outcomes)
    }

    fn assign(&mut self, keys: &[Key], rows: &[f32], insert: bool) -> Result<Outcomes> {
        self.check_len("rows", rows.len(), keys.len(), self.config.dim)?;
        self.wait()?;
        let room = self.room(keys.len(), self.config.dim)?;
        let (records, outcomes) = self.locate(&room, keys, insert)?;
        self.write(&room, self.layout.row(), &records, outcomes.inserted, rows)?;
        self.note(outcomes);
        Ok(outcomes)
    }

    fn update(&mut self, keys: &[Key], gradients: &[f32], scalars: &UpdateScalars) -> Result<Outcomes> {
        self.check_len("gradients", gradients.len(), keys.len(), self.config.dim)?;
        let update = update_with_formula(self.update, &self.config.name)?;
        self.wait()?;
        let refused = self.absent(&self.room(keys.len(), 0)?, keys)?.len() as u64;
        let context = self.device.context.clone();
        let ids = Buffer::from_slice(&context, keys)?;
        let gradients = Buffer::from_slice(&context, gradients)?;
        step::update_once(self, &update, &ids, &gradients, scalars)?;
        let distinct: HashSet<Key> = keys.iter().copied().collect();
        Ok(Outcomes { hit: distinct.len() as u64 - refused, refused, ..Outcomes::default() })
    }

    fn erase(&mut self, keys: &[Key]) -> Result<usize> {
        self.wait()?;
        if let Some(evictor) = &mut self.evictor {
            evictor.departures.forget(keys)?;
        }
        self.forget_sights(keys)?;
        if keys.is_empty() { Ok(0) } else { self.remove(keys) }
    }

    fn clear(&mut self) -> Result<()> {
        self.wait()?;
        let index = Index::new(&self.device, 0, self.index.load(), WAITING)?;
        let arena = arena(&self.device, &self.config, self.layout.stride)?;
        let mut candidates = GpuTable::first_candidates(&self.device, &self.config)?;
        if let (Some(empty), Some(candidates)) = (&mut candidates, &self.candidates) {
            empty.step = candidates.step;
        }
        let ring = Ring::new(&self.device.context, 1)?;
        let mut empty = evictor(&self.device, &self.config)?;
        if let (Some(empty), Some(evictor)) = (&mut empty, &mut self.evictor) {
            empty.step = evictor.read_step()?;
            empty.commits = std::mem::take(&mut evictor.commits);
            empty.write_progress()?;
        }
        self.reset(index, arena, ring, empty, candidates);
        self.write_released()
    }

    fn explain(&self, key: Key) -> Result<Explanation> {
        self.device.synchronize()?;
        let room = self.room(1, 0)?;
        let records = self.look_up(&room, &[key], false)?;
        if records[0] != 0 {
            let has_score = self.config.eviction.is_some();
            let score = if has_score { Some(self.read_uses(&records)?[0].score) } else { None };
            return Ok(Explanation::Present { score });
        }
        match self.candidates.as_ref().map_or(Ok(0), |candidates| candidates.sights(key))? {
            0 => self.explain_absent(key),
            sights => Ok(Explanation::Filtered { sights }),
        }
    }

    fn take_evicted(&mut self) -> Result<Records> {
        self.wait()?;
        match &mut self.evictor {
            Some(evictor) if self.config.keeps_removed() => Ok(evictor.departures.take_kept()),
            _ => Err(not_kept(&self.config.name)),
        }
    }

    fn set_step(&mut self, step: u64) -> Result<()> {
        self.wait()?;
        if let Some(candidates) = &mut self.candidates {
            candidates.step = step;
            self.has_moved = true;
        }
        self.evictor.as_mut().map_or(Ok(()), |evictor| evictor.set_step(step))
    }

    fn set_commit_times(&mut self, times: &[(u64, u64)]) {
        if let Some(evictor) = &mut self.evictor {
            evictor.commits.set_ages_by_time(times);
        }
    }

    fn stats(&self) -> Result<TableStats> {
        self.device.synchronize()?;
        Ok(self.stats_of(self.counts()?))
    }

    fn recent_stats(&self) -> TableStats {
        self.stats_of(self.reported)
    }

    fn set_seed(&mut self, seed: u64) {
        (self.config.seed, self.has_moved) = (seed, true);
    }

    fn has_loaded_states(&self) -> bool {
        self.has_loaded_states
    }

    fn set_update_rule(&mut self, update: Option<Update>, keep_states: bool) -> Result<()> {
        if let Some(update) = &update {
            update.validate()?;
            check_states(update, &self.config.name)?;
        }
        self.wait()?;
        let dim = self.config.dim;
        let layout = DeviceLayout::new(update.as_ref(), RowKind::of(&self.config));
        let have_none = self.layout.fields.count == 1 && layout.fields.count == 1;
        let share_them = keep_states && Update::share_states(self.update.as_ref(), update.as_ref(), dim);
        if have_none || share_them {
            (self.layout, self.has_moved) = (layout, true);
        } else {
            self.lay_out(update.as_ref())?;
            self.changes = None;
        }
        self.update = update;
        self.has_loaded_states = false;
        Ok(())
    }

    fn track(&mut self, snapshot: u64) -> Result<()> {
        self.start_epoch(snapshot)
    }

    fn keys(&self) -> Result<Vec<Key>> {
        self.device.synchronize()?;
        let mut keys = memory::with_capacity(self.len()?, "the keys of a table")?;
        self.index.entries(0, usize::MAX, |key, _| keys.push(key))?;
        Ok(keys)
    }

    fn restore(&mut self, records: &Records) -> Result<()> {
        self.check_len(
            "values",
            records.values.len(),
            records.keys.len(),
            self.layout.fields.width as usize,
        )?;
        for column in Column::ALL.into_iter().filter(|column| !records.column(*column).is_empty()) {
            self.check_len(column.name(), records.column(column).len(), records.keys.len(), 1)?;
        }
        self.wait()?;
        let room = self.room(records.keys.len(), self.layout.fields.width as usize)?;
        self.check_keys(&records.keys)?;
        let (located, inserted) = self.insert(&room, &records.keys)?;
        self.forget_sights(&records.keys)?;
        self.write(&room, self.layout.fields, &located, inserted, &records.values)?;
        self.write_columns(&located, records)
    }

    fn restore_sights(&mut self, sights: &Records) -> Result<()> {
        self.device.synchronize()?;
        self.candidates.as_mut().map_or(Ok(()), |candidates| candidates.restore(sights))
    }

    fn fresh(&self, update: Option<Update>, num_rows: usize) -> Result<Box<dyn Table>> {
        let mut table = GpuTable::with_load(&self.device, self.config.clone(), self.index.load())?;
        table.set_update_rule(update, false)?;
        table.reserve(num_rows as u64)?;
        if let (Some(evictor), Some(own)) = (&mut table.evictor, &self.evictor) {
            evictor.go_on_from(own)?;
        }
        Ok(Box::new(table))
    }

    fn replace_with(&mut self, other: Box<dyn Table>) -> Result<()> {
        let mut other = *other.into_any().downcast::<GpuTable>().map_err(|_| {
            Error::State(format!("table `{}` takes records of a GPU table alone", self.config.name))
        })?;
        self.wait()?;
        other.wait()?;
        other.release()?;
        self.reserve_taken_steps(other.num_records())?;
        let GpuTable { config, index, arena, layout, update, ring, reported, evictor, candidates, .. } =
            other;
        self.reset(index, arena, ring, evictor, candidates);
        (self.config.seed, self.has_loaded_states) = (config.seed, true);
        (self.layout, self.update, self.reported) = (layout, update, reported);
        (self.max_taken, self.max_rows) = (reported.taken, self.rows());
        self.counted = [reported.taken, reported.evicted, reported.expired];
        self.start_rows(WAITING)?;
        self.device.synchronize()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn rename_snapshot(&mut self, from: u64, to: u64) {
        if let Some(changes) = &mut self.changes {
            changes.epochs.rename(from, to);
        }
    }

    fn settle(&mut self) -> Result<()> {
        self.wait()
    }

    fn freeze(&mut self, since: Option<u64>) -> Result<Box<dyn Freezing>> {
        self.begin_copy(since)
    }
}
