//! A copy of a table's records in device memory, which a dump reads beside steps.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use sok_core::contract::frozen::{Frozen, RecordsCopy, epoch_since};
use sok_core::contract::table::{Column, Contents, Records};
use sok_core::error::{Error, Result};
use sok_core::key::Key;
use sok_core::memory;
use sok_core::policy::commits::Commits;

use super::{GpuTable, WAITING};
use crate::abi::{ChangedList, TABLE_THREADS, Use};
use crate::device::{Device, launch};
use crate::kernels::{CHANGES, SCORES, TABLE};
use crate::memory::{Buffer, Plain, Shared};

const WHAT: &str = "the records of a dump";

/// Copied records in device memory. They lie in one buffer, because each allocation takes the driver long: first the values, which kernels
/// write in groups of four columns, then uses, keys, and the numbers of the records.
struct DeviceRecords {
    device: Arc<Device>,
    memory: Buffer<u32>,
    /// Number of records.
    count: usize,
    /// Floats of a record.
    width: usize,
    /// Of a table with columns: the columns, and the commits that ages are counted from.
    columns: Option<(&'static [Column], Commits)>,
    /// Pinned memory that parts come through.
    staging: RefCell<Option<Shared>>,
}

/// Words of a use, and of a key.
const USE: usize = size_of::<Use>() / 4;
const KEY: usize = size_of::<Key>() / 4;

impl DeviceRecords {
    /// Gets memory for this many records of a table.
    fn new(table: &GpuTable, count: usize) -> Result<DeviceRecords> {
        let width = table.layout.fields.width as usize;
        let columns = table.config.columns();
        let evictor = table.evictor.as_ref().filter(|_| !columns.is_empty());
        let uses = if evictor.is_some() { USE * count } else { 0 };
        // The last words are the numbers, and the number of those that are listed.
        let num_words = (width * count).next_multiple_of(4) + uses + KEY * count + 1 + count;
        Ok(DeviceRecords {
            device: table.device.clone(),
            memory: Buffer::uninit(&table.device.context, num_words)?,
            count,
            width,
            columns: evictor.map(|evictor| (columns, evictor.commits.clone())),
            staging: RefCell::default(),
        })
    }

    /// Address of the first use.
    fn uses(&self) -> u64 {
        self.memory.at((self.width * self.count).next_multiple_of(4))
    }

    /// Address of the first key.
    fn keys(&self) -> u64 {
        let uses = if self.columns.is_some() { USE * self.count } else { 0 };
        self.uses() + 4 * uses as u64
    }

    /// Address of the number of listed records, after which their numbers come.
    fn listed(&self) -> u64 {
        self.keys() + (4 * KEY * self.count) as u64
    }

    /// Copies `len` values to the host, and appends them to `out`.
    fn append<T: Plain>(&self, from: u64, len: usize, out: &mut Vec<T>) -> Result<()> {
        let num_words = len * size_of::<T>() / 4;
        let mut staging = self.staging.borrow_mut();
        if staging.as_ref().is_none_or(|staging| staging.len() < num_words) {
            *staging = None;
            *staging = Some(Shared::new(&self.device.context, num_words + num_words / 4)?);
        }
        let Some(staging) = &mut *staging else { return Ok(()) };
        staging.copy_beside(&self.device, from, num_words)?;
        // SAFETY: Only `copy_beside` has words written, and it waits.
        let words = &unsafe { staging.words() }[..num_words];
        // SAFETY: All bytes of plain values are valid.
        let (before, values, _) = unsafe { words.align_to::<T>() };
        assert!(before.is_empty() && values.len() == len, "pinned memory is aligned to pages");
        out.extend_from_slice(values);
        Ok(())
    }
}

impl RecordsCopy for DeviceRecords {
    fn num_rows(&self) -> usize {
        self.count
    }

    fn read(&self, rows: Range<usize>, out: &mut Records) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let (start, len) = (rows.start, rows.len());
        let columns = self.columns.as_ref().map_or(&[][..], |(columns, _)| columns);
        out.reserve(len, self.width, columns, WHAT)?;
        self.append(self.keys() + (4 * KEY * start) as u64, len, &mut out.keys)?;
        self.append(self.memory.at(self.width * start), self.width * len, &mut out.values)?;
        let Some((columns, commits)) = &self.columns else { return Ok(()) };
        let mut uses = memory::with_capacity::<Use>(len, WHAT)?;
        self.append(self.uses() + (4 * USE * start) as u64, len, &mut uses)?;
        for &column in *columns {
            out.column_mut(column).extend(uses.iter().map(|used| match column {
                Column::Scores => used.score,
                Column::Ages => commits.age(used.commit),
            }));
        }
        Ok(())
    }
}

impl GpuTable {
    /// Copies the contents in the memory of the device; without memory for that, to the host. `since`: as for `Table::freeze`. The device
    /// must be idle, and its counts known.
    pub(super) fn frozen(&self, since: Option<u64>) -> Result<Box<dyn Contents>> {
        let epoch = since.map(|snapshot| epoch_since(self, snapshot)).transpose()?;
        let count = epoch.map_or(Ok(self.rows() as usize), |epoch| self.count_changed(epoch.0))?;
        let Ok(records) = DeviceRecords::new(self, count) else {
            return Ok(Box::new(Frozen::of(self, since)?));
        };
        self.copy_records(&records, epoch.map_or(0, |epoch| epoch.0))?;
        Ok(Box::new(Frozen::with(self, since, records)?))
    }

    /// Copies the records that have changed since the start of an epoch.
    fn copy_records(&self, to: &DeviceRecords, since: u32) -> Result<()> {
        if to.count == 0 {
            return Ok(());
        }
        // SAFETY: The word is in the memory of the copies.
        unsafe { WAITING.fill(to.listed(), 0, 4) }?;
        let numbers = to.listed() + 4;
        let list = ChangedList { count: to.listed(), keys: to.keys(), records: numbers };
        self.launch_list(since, list, 0, self.index.num_places())?;
        let (table, fields, n) = (self.alone(), self.layout.fields, to.count as u32);
        let values = to.memory.address();
        let blocks = to.count.min(16 * self.device.multiprocessors as usize);
        if to.width == 4 * self.layout.stride {
            let copy = self.device.kernel(&CHANGES, "copy_records")?;
            // SAFETY: The arguments have the types of the kernel's parameters. All memory lives until the wait below.
            unsafe { launch!(copy, WAITING, blocks, TABLE_THREADS, table, numbers, values, n) }?;
        } else {
            let read = self.device.kernel(&TABLE, "read_records")?;
            // SAFETY: As above.
            unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, fields, numbers, values, n) }?;
        }
        if to.columns.is_some() {
            let read = self.device.kernel(&SCORES, "read_uses")?;
            let (uses, blocks) = (to.uses(), to.count.div_ceil(TABLE_THREADS));
            // SAFETY: As above.
            unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, numbers, uses, n) }?;
        }
        let listed = crate::memory::read::<u32>(&self.device.context, to.listed(), 1)?[0] as usize;
        if listed == to.count {
            return Ok(());
        }
        let name = &self.config.name;
        Err(Error::Device(format!("table `{name}` has {} rows, of which {listed} were found", to.count)))
    }
}
