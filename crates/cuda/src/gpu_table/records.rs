//! Reading, writing and releasing records.

#![allow(unsafe_code)]

use std::collections::{HashMap, HashSet};

use sok_core::contract::records::Records;
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;
use sok_core::key::Key;
use sok_core::memory;

use super::candidates::Candidates;
use super::eviction::Evictor;
use super::record::{DeviceLayout, RowKind};
use super::{GpuTable, PIECE, Room, WAITING, arena};
use crate::abi::{self, DISTINCT, DeviceFields, TABLE_THREADS, TAKEN, TableCounts};
use crate::device::{Stream, launch, launch_next};
use crate::index::Index;
use crate::kernels::TABLE;
use crate::memory::{Arena, Buffer};

impl GpuTable {
    /// Enqueues a find of `n` keys, which copies the rows of keys that have a record. `rows`: float32 `(n, dim)`; other rows are
    /// not written. `found`: takes the record numbers, `(n,)` u32; 0 for a key without a record.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    pub unsafe fn launch_find(
        &self,
        keys: u64,
        rows: u64,
        found: u64,
        n: usize,
        stream: Stream,
    ) -> Result<()> {
        let find =
            self.device.kernel(&TABLE, &format!("find_rows<{}, 4>", RowKind::of(&self.config).code()))?;
        let (table, count) = (self.alone(), n as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe {
            launch!(find, stream, n.div_ceil(TABLE_THREADS), TABLE_THREADS, table, keys, rows, found, count)
        }
    }

    /// Enqueues a copy of the rows of `n` records. `records`: as `launch_look_up` writes them. `rows`: float32 `(n, dim)`; rows of
    /// keys without a record are not written. `skips`: rows of new records are not written either.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    pub unsafe fn launch_gather(
        &self,
        records: u64,
        rows: u64,
        n: usize,
        skips: bool,
        stream: Stream,
    ) -> Result<()> {
        let gather =
            self.device.kernel(&TABLE, &format!("gather_rows<{}, 4>", RowKind::of(&self.config).code()))?;
        let (table, count, skips) = (self.alone(), n as u32, u32::from(skips));
        let blocks = n.div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe { launch_next!(gather, stream, blocks, TABLE_THREADS, table, records, rows, count, skips) }
    }

    /// Copies the rows of keys to the host. `records`: their record numbers; a key with 0 gets the row of a missing key.
    pub(super) fn read_rows(
        &self,
        room: &Room,
        keys: &[Key],
        records: &[u32],
        rows: &mut [f32],
    ) -> Result<()> {
        let width = self.config.dim;
        let fill = self.device.kernel(&TABLE, "fill_missing")?;
        let pieces = keys.chunks(room.piece).zip(records.chunks(room.piece));
        for ((keys, records), rows) in pieces.zip(rows.chunks_mut(room.piece * width)) {
            room.keys.write(0, keys)?;
            room.records.write(0, records)?;
            let (from, to, n, dim) =
                (room.records.address(), room.values.address(), keys.len() as u32, width as u32);
            // SAFETY: The room has memory for the piece, and the call below waits.
            unsafe { self.launch_gather(from, to, keys.len(), false, WAITING) }?;
            let (table, at) = (self.alone(), room.keys.address());
            let blocks = keys.len().div_ceil(TABLE_THREADS).clamp(1, 4096);
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe { launch!(fill, WAITING, blocks, TABLE_THREADS, table, at, from, to, n, dim) }?;
            self.device.synchronize()?;
            rows.copy_from_slice(&room.values.read(0, rows.len())?);
        }
        Ok(())
    }

    pub(super) fn check_len(&self, what: &str, len: usize, num_keys: usize, width: usize) -> Result<()> {
        if len == num_keys * width {
            return Ok(());
        }
        Err(Error::argument(format!(
            "table `{}`: `{what}` must hold {width} numbers a key. Received: {len} numbers for {num_keys} keys",
            self.config.name
        )))
    }

    /// Writes these fields of records. Of equal records the last one wins. Records 0 are skipped.
    pub(super) fn write(
        &self,
        room: &Room,
        fields: DeviceFields,
        records: &[u32],
        values: &[f32],
    ) -> Result<()> {
        let last: HashMap<u32, usize> =
            records.iter().enumerate().filter(|(_, r)| **r != 0).map(|(i, r)| (*r, i)).collect();
        let write = self.device.kernel(&TABLE, "write_records")?;
        let (piece, width) = (room.piece, fields.width as usize);
        for (number, (of_piece, values)) in
            records.chunks(piece).zip(values.chunks(piece * width)).enumerate()
        {
            let wins = |(i, record): &(usize, &u32)| last.get(record) == Some(&(number * piece + i));
            let (places, records): (Vec<u32>, Vec<u32>) =
                of_piece.iter().enumerate().filter(wins).map(|(i, record)| (i as u32, *record)).unzip();
            room.places.write(0, &places)?;
            room.records.write(0, &records)?;
            room.values.write(0, values)?;
            let (to, from) = (room.records.address(), room.places.address());
            let (table, values_at, n) = (self.alone(), room.values.address(), records.len() as u32);
            let blocks = records.len().min(8192);
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe { launch!(write, WAITING, blocks, TABLE_THREADS, table, fields, to, from, values_at, n) }?;
            // SAFETY: The room has the records, and the call below waits.
            unsafe { self.note_changes(to, records.len(), WAITING) }?;
            self.device.synchronize()?;
        }
        Ok(())
    }

    /// Frees erased records that only lookups older than `oldest` refer to.
    pub(crate) fn forget_lookups(&mut self, oldest: u64) {
        let is_over = |entry: &mut (u64, Vec<u32>)| entry.0 < oldest;
        self.retired.extract_if(.., is_over).for_each(|(_, records)| self.reusable.extend(records));
    }

    /// Keeps the numbers of erased records until no lookup refers to them.
    pub(super) fn retire(&mut self, records: impl Iterator<Item = u32>) {
        match self.newest_lookup {
            0 => self.reusable.extend(records),
            newest => self.retired.push((newest, records.collect())),
        }
    }

    /// Allocates device memory for the numbers that may be given out again after `more` records are erased.
    pub(super) fn room_to_release(&mut self, more: usize) -> Result<Buffer<u32>> {
        let len = self.released.len() + self.reusable.len() + more;
        let spare = if self.evictor.is_some() { len / 2 } else { 0 };
        match self.spare_released.take().filter(|spare| spare.len() >= len) {
            Some(spare) => Ok(spare),
            None => Buffer::uninit(&self.device.context, (len + spare).max(1)),
        }
    }

    /// Enqueues writing to the device which numbers may be given out again, and resetting `Counters::taken`. The counts of the device must
    /// be known.
    pub(super) fn release(&mut self, room: Buffer<u32>, stream: Stream) -> Result<()> {
        let taken = self.counted as usize;
        let given_out = taken.min(self.released.len());
        let mut released = self.released.split_off(given_out);
        released.append(&mut self.reusable);
        self.fresh += (taken - given_out) as u32;
        self.len_before += taken as i64;
        (self.counted, self.max_taken, self.reported) = (0, 0, TableCounts::default());
        (self.released, self.has_moved) = (released, true);
        self.released_copy.clone_from(&self.released);
        // SAFETY: The room has a word for each number. The list stays as it is until the next call, which follows a wait.
        unsafe {
            stream.copy_to_device(
                room.address(),
                self.released_copy.as_ptr().cast(),
                4 * self.released_copy.len(),
            )
        }?;
        let before = std::mem::replace(&mut self.released_on_device, room);
        self.spare_released = self.evictor.is_some().then_some(before);
        // SAFETY: The word is one of the counters.
        unsafe { stream.fill(self.index.counters.at(TAKEN), 0, 4) }
    }

    /// Removes keys. Returns how many there were. The device must be idle, and its counts known.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(super) fn remove(&mut self, keys: &[Key]) -> Result<usize> {
        let context = self.device.context.clone();
        let on_device = Buffer::from_slice(&context, keys)?;
        let erased = Buffer::<u32>::uninit(&context, keys.len())?;
        let room = self.room_to_release(keys.len())?;
        self.reserve_removed(keys.len())?;
        let erase = self.device.kernel(&TABLE, "erase_keys")?;
        let (table, from, to, n) = (self.alone(), on_device.address(), erased.address(), keys.len() as u32);
        let blocks = keys.len().div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe { launch!(erase, WAITING, blocks, TABLE_THREADS, table, from, to, n) }?;
        let erased = erased.to_vec()?.into_iter().zip(keys.iter().copied());
        let (erased, keys): (Vec<u32>, Vec<Key>) = erased.filter(|(record, _)| *record != 0).unzip();
        let words = self.read_changes(&erased)?;
        self.note_removed(keys.into_iter().zip(words));
        self.end_erasing(&erased, room, WAITING)?;
        self.device.synchronize()?;
        Ok(erased.len())
    }

    /// Undoes the insertions of the last lookup. `keys`: among others, those that it has inserted. `before`: the counts before it. `taken`:
    /// how many record numbers were given out after it. `were_hits`: as `are_hits` of `count_taken`. The device must be idle.
    pub(crate) fn undo_insertions(
        &mut self,
        keys: &[Key],
        before: TableCounts,
        taken: u32,
        were_hits: bool,
    ) -> Result<()> {
        self.count_taken(taken, were_hits);
        let inserted = u64::from(taken - before.taken);
        self.stats.outcomes.inserted -= inserted;
        if were_hits {
            self.admitted -= inserted;
        }
        let released = self.released.len() as u32;
        let number =
            |at: u32| self.released.get(at as usize).copied().unwrap_or_else(|| self.fresh + (at - released));
        let numbers: HashSet<u32> = (before.taken..taken).map(number).collect();
        let room = self.room(keys.len(), 0)?;
        let records = self.look_up(&room, keys, false)?;
        let new = keys.iter().zip(records).filter(|(_, record)| numbers.contains(record));
        let new: Vec<Key> = new.map(|(key, _)| *key).collect();
        self.remove(&new)?;
        let distinct = [before.distinct as u32, (before.distinct >> 32) as u32];
        self.index.counters.write(DISTINCT, &distinct)
    }

    /// Takes back the records of erased keys. The counts of the device must be known. `room`: as `room_to_release` returns it.
    pub(super) fn end_erasing(&mut self, erased: &[u32], room: Buffer<u32>, stream: Stream) -> Result<()> {
        self.retire(erased.iter().copied());
        self.len_before -= erased.len() as i64;
        self.release(room, stream)
    }

    /// Returns these fields of records, dense. Waits for the device.
    pub(super) fn read_records(&self, fields: DeviceFields, records: &[u32]) -> Result<Vec<f32>> {
        let width = fields.width as usize;
        let piece = (PIECE / width).max(1);
        let context = &self.device.context;
        let on_device = Buffer::uninit(context, piece.min(records.len()))?;
        let values = Buffer::<f32>::uninit(context, piece.min(records.len()) * width)?;
        let read = self.device.kernel(&TABLE, "read_records")?;
        let mut all = memory::with_capacity(records.len() * width, "the records of a table")?;
        for records in records.chunks(piece) {
            on_device.write(0, records)?;
            let (table, from, to, n) =
                (self.alone(), on_device.address(), values.address(), records.len() as u32);
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe {
                launch!(read, WAITING, records.len().min(8192), TABLE_THREADS, table, fields, from, to, n)
            }?;
            self.device.synchronize()?;
            all.extend(values.read(0, records.len() * width)?);
        }
        Ok(all)
    }

    /// Appends records to those of a scan. The device must be idle.
    pub(super) fn append(&self, keys: Vec<Key>, records: &[u32], out: &mut Records) -> Result<()> {
        let values =
            if records.is_empty() { Vec::new() } else { self.read_records(self.layout.fields, records)? };
        self.read_columns(records, out)?;
        out.keys.extend(keys);
        out.values.extend(values);
        Ok(())
    }

    /// Copies all records to the layout of another update. Rows are kept, and states get their initial values.
    pub(super) fn lay_out(&mut self, update: Option<&Update>) -> Result<()> {
        let layout = DeviceLayout::new(update, RowKind::of(&self.config));
        let mut arena = arena(&self.device, &self.config, layout.stride)?;
        let numbers = self.fresh + (self.counted as usize).saturating_sub(self.released.len()) as u32;
        let kept =
            self.num_numbers().max(u64::from(numbers)).min(u64::from(numbers) + self.config.initial_capacity);
        arena.grow(kept as usize * 16 * layout.stride, false)?;
        let from = self.alone();
        let to = abi::Table {
            records: arena.address(),
            stride: layout.stride as u32,
            first_state: layout.first_state,
            ..from
        };
        let lay_out = self.device.kernel(&TABLE, "lay_out")?;
        // Record 0 belongs to no key, and may have no memory yet.
        if numbers > 1 {
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe {
                launch!(lay_out, WAITING, (numbers as usize).min(8192), TABLE_THREADS, from, to, numbers)
            }?;
            self.device.synchronize()?;
        }
        (self.arena, self.layout, self.has_moved) = (arena, layout, true);
        Ok(())
    }

    /// Empties the table, which takes over this index, this memory, these scores and these candidates.
    pub(super) fn reset(
        &mut self,
        index: Index,
        arena: Arena,
        evictor: Option<Box<Evictor>>,
        candidates: Option<Box<Candidates>>,
    ) {
        (self.index, self.arena, self.evictor, self.candidates) = (index, arena, evictor, candidates);
        self.changes = None;
        self.released.clear();
        self.retired.clear();
        self.reusable.clear();
        (self.fresh, self.len_before, self.max_taken, self.counted) = (1, 0, 0, 0);
        self.reported = TableCounts::default();
        self.numbers_soon = 0;
        self.generation += 1;
        self.has_moved = true;
    }
}
