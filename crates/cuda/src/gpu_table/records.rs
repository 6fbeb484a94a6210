//! Reading, writing and releasing records.

#![allow(unsafe_code)]

use std::collections::HashMap;

use sok_core::contract::records::Records;
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;
use sok_core::key::Key;
use sok_core::memory;

use super::candidates::Candidates;
use super::eviction::Evictor;
use super::record::{DeviceLayout, RowKind};
use super::released::Ring;
use super::{GpuTable, PIECE, Room, WAITING, arena, counts_of_none};
use crate::abi::{self, DeviceFields, TABLE_THREADS};
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

    /// Writes these fields of records. Of equal records the last one wins. Records 0 are skipped. `num_new`: how many records are new.
    pub(super) fn write(
        &self,
        room: &Room,
        fields: DeviceFields,
        records: &[u32],
        num_new: u64,
        values: &[f32],
    ) -> Result<()> {
        let last: Option<HashMap<u32, usize>> = (num_new != records.len() as u64)
            .then(|| records.iter().enumerate().filter(|(_, r)| **r != 0).map(|(i, r)| (*r, i)).collect());
        let write = self.device.kernel(&TABLE, "write_records")?;
        let (piece, width) = (room.piece, fields.width as usize);
        for (number, (of_piece, values)) in
            records.chunks(piece).zip(values.chunks(piece * width)).enumerate()
        {
            let wins = |(i, record): &(usize, &u32)| {
                last.as_ref().is_none_or(|last| last.get(record) == Some(&(number * piece + i)))
            };
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
        self.ring.forget_lookups(oldest);
    }

    /// Keeps the numbers of erased records until no lookup refers to them.
    pub(super) fn retire(&mut self, records: impl Iterator<Item = u32>) {
        match self.newest_lookup {
            0 => self.reusable.extend(records),
            newest => self.retired.push((newest, records.collect())),
        }
    }

    /// Removes keys. Returns how many there were. The device must be idle, and its counts known.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(super) fn remove(&mut self, keys: &[Key]) -> Result<usize> {
        let context = self.device.context.clone();
        let on_device = Buffer::from_slice(&context, keys)?;
        let erased = Buffer::<u32>::uninit(&context, keys.len())?;
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
        self.count_gone(erased.len() as u64)?;
        self.retire(erased.iter().copied());
        self.release()?;
        Ok(erased.len())
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
        let numbers = self.known_numbers() as u32;
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

    /// Empties the table, which takes over this index, this memory, this ring, these scores and these candidates.
    pub(super) fn reset(
        &mut self,
        index: Index,
        arena: Arena,
        ring: Ring,
        evictor: Option<Box<Evictor>>,
        candidates: Option<Box<Candidates>>,
    ) {
        (self.index, self.arena, self.ring) = (index, arena, ring);
        (self.evictor, self.candidates) = (evictor, candidates);
        self.changes = None;
        self.retired.clear();
        self.reusable.clear();
        (self.reported, self.counted) = (counts_of_none(), [0; 3]);
        (self.max_taken, self.max_rows, self.numbers_soon) = (0, 0, 0);
        // The report of an earlier commit tells of what is gone.
        self.is_recounted = true;
        self.generation += 1;
        self.has_moved = true;
    }
}
