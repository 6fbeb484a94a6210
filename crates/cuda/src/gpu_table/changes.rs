//! Which rows of a table have changed, and which keys were removed, since dumps of it.

#![allow(unsafe_code)]

use std::sync::Arc;

use sok_core::contract::epochs::Epochs;
use sok_core::contract::table::TableConfig;
use sok_core::error::{Error, Result};
use sok_core::key::Key;
use sok_core::memory;

use super::{GpuTable, WAITING, numbers_of};
use crate::abi::{self, ChangedList, SLOTS, TABLE_THREADS};
use crate::device::{Device, Stream, launch};
use crate::kernels::CHANGES;
use crate::memory::{Arena, Buffer};

/// The changes of a table in device memory.
pub(super) struct Changes {
    /// By record, as [`Epochs`] says. The word of a record without a row has no meaning.
    words: Arena,
    pub epochs: Epochs,
}

impl Changes {
    /// Starts the first epoch, with memory for this many record numbers.
    fn new(device: &Arc<Device>, config: &TableConfig, numbers: usize, snapshot: u64) -> Result<Changes> {
        let what = format!("the changes of table `{}`", config.name);
        let mut words =
            Arena::new(&device.context, numbers_of(config).saturating_mul(size_of::<u32>()), what)?;
        words.grow(numbers * size_of::<u32>(), true)?;
        // On the default stream the fill would wait for the copies of a dump.
        let stream = Stream::of_cudarc(&device.copies);
        // SAFETY: The range has physical memory.
        unsafe { stream.fill(words.address(), 0, words.num_bytes()) }?;
        stream.synchronize()?;
        Ok(Changes { words, epochs: Epochs::new(snapshot) })
    }

    /// Address of the words.
    pub fn address(&self) -> u64 {
        self.words.address()
    }

    pub fn num_bytes(&self) -> usize {
        self.words.num_bytes() + self.epochs.num_bytes()
    }

    /// For how many record numbers there is memory.
    pub fn num_numbers(&self) -> u64 {
        (self.words.num_bytes() / size_of::<u32>()) as u64
    }

    /// Gets memory for this many record numbers.
    pub fn reserve_numbers(&mut self, numbers: usize, spare: bool) -> Result<()> {
        self.words.grow(numbers * size_of::<u32>(), spare)
    }

    /// Fills in the fields of a descriptor.
    pub fn describe(&self, table: &mut abi::Table) {
        (table.changes, table.epoch) = (self.address(), self.epochs.now());
    }
}

impl GpuTable {
    pub(super) fn known_changes(&self) -> Result<&Changes> {
        let unknown = || Error::UnknownChanges { table: self.config.name.clone() };
        self.changes.as_deref().ok_or_else(unknown)
    }

    /// Starts an epoch. No step may be in progress.
    pub(super) fn start_epoch(&mut self, snapshot: u64) -> Result<()> {
        match &mut self.changes {
            Some(changes) => changes.epochs.start(snapshot),
            None => {
                let numbers = self.num_numbers().max(1) as usize;
                self.changes = Some(Box::new(Changes::new(&self.device, &self.config, numbers, snapshot)?));
            }
        }
        self.has_moved = true;
        Ok(())
    }

    /// Notes no changes any more, until the next dump.
    pub(super) fn forget_changes(&mut self) {
        // Steps in progress use the memory. A device that has failed raises that elsewhere.
        let _ = self.device.synchronize();
        (self.changes, self.has_moved) = (None, true);
    }

    /// Makes room for as many keys that are removed.
    pub(super) fn reserve_removed(&mut self, num_keys: usize) -> Result<()> {
        self.changes.as_mut().map_or(Ok(()), |changes| changes.epochs.reserve_removed(num_keys))
    }

    /// Notes that keys were removed, for which there is room. `removed`: each with the word of its record.
    pub(super) fn note_removed(&mut self, removed: impl Iterator<Item = (Key, u32)>) {
        if let Some(changes) = &mut self.changes {
            removed.for_each(|(key, word)| changes.epochs.remove(key, word));
        }
    }

    /// Enqueues noting that the rows of records change. `records`: address of their numbers, u32; 0 is passed over.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// The address is of memory on this device, with this many numbers, that lives until the stream has completed the call.
    pub(super) unsafe fn note_changes(&self, records: u64, count: usize, stream: Stream) -> Result<()> {
        if self.changes.is_none() || count == 0 {
            return Ok(());
        }
        let note = self.device.kernel(&CHANGES, "note_changes")?;
        let (table, n) = (self.alone(), count as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory.
        unsafe { launch!(note, stream, count.div_ceil(TABLE_THREADS), TABLE_THREADS, table, records, n) }
    }

    /// Returns the words of records; none if the table does not note changes. Waits for the device.
    pub(super) fn read_changes(&self, records: &[u32]) -> Result<Vec<u32>> {
        if self.changes.is_none() || records.is_empty() {
            return Ok(Vec::new());
        }
        let on_device = Buffer::from_slice(&self.device.context, records)?;
        let words = Buffer::<u32>::uninit(&self.device.context, records.len())?;
        let read = self.device.kernel(&CHANGES, "read_changes")?;
        let (table, from, to, n) = (self.alone(), on_device.address(), words.address(), records.len() as u32);
        let blocks = records.len().div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below.
        unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, from, to, n) }?;
        words.to_vec()
    }

    /// Returns the number of rows that have changed since the start of an epoch. The device must be idle.
    pub(super) fn count_changed(&self, since: u32) -> Result<usize> {
        self.known_changes()?;
        let count = Buffer::<u32>::new(&self.device.context, 1)?;
        let list = ChangedList { count: count.address(), ..ChangedList::default() };
        self.launch_list(since, list, 0, self.index.num_places())?;
        Ok(count.to_vec()?[0] as usize)
    }

    /// Returns up to `max` keys whose rows have changed since the start of an epoch, and their records. `start`: place in the index. Returns
    /// also the place at which to continue, or `None` at the end. The device must be idle.
    pub(super) fn list_changed(
        &self,
        since: u32,
        start: usize,
        max: usize,
    ) -> Result<(Vec<Key>, Vec<u32>, Option<usize>)> {
        self.known_changes()?;
        let (places, room) = (self.index.num_places(), max.max(SLOTS));
        let context = &self.device.context;
        let (keys, records) = (Buffer::<u64>::uninit(context, room)?, Buffer::<u32>::uninit(context, room)?);
        let count = Buffer::<u32>::new(context, 1)?;
        let (mut at, mut found) = (start, 0);
        // A part of the index is examined that surely fits, until less than half of the room is left.
        while at < places && 2 * found <= room {
            let examined = ((room - found) / SLOTS).clamp(1, places - at);
            let list =
                ChangedList { count: count.address(), keys: keys.address(), records: records.address() };
            self.launch_list(since, list, at, examined)?;
            found = count.to_vec()?[0] as usize;
            at += examined;
        }
        Ok((keys.read(0, found)?, records.read(0, found)?, (at < places).then_some(at)))
    }

    /// Enqueues listing the changed rows of a part of the index.
    pub(super) fn launch_list(
        &self,
        since: u32,
        list: ChangedList,
        first: usize,
        places: usize,
    ) -> Result<()> {
        let kernel = self.device.kernel(&CHANGES, "list_changed")?;
        let (table, first, n) = (self.alone(), first as u32, places as u32);
        let blocks = places.div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. The list has room for all slots, and the caller waits.
        unsafe { launch!(kernel, WAITING, blocks, TABLE_THREADS, table, since, list, first, n) }
    }

    /// Returns those of some keys that have no row, ascending. The device must be idle.
    pub(super) fn absent_of(&self, keys: impl Iterator<Item = Key>) -> Result<Vec<Key>> {
        let keys = memory::collect(keys, "the keys that were removed since a dump")?;
        let records = self.look_up(&self.room(keys.len(), 0)?, &keys, false)?;
        let mut absent: Vec<Key> =
            keys.into_iter().zip(records).filter(|(_, record)| *record == 0).map(|(key, _)| key).collect();
        absent.sort_unstable();
        absent.dedup();
        Ok(absent)
    }
}
