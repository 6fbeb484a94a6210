//! Copies of a table's records in device memory, which a dump reads: of all records while training goes on, of a part at a time while it waits.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use sok_core::contract::frozen::{Frozen, RecordsCopy, epoch_since};
use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::{Contents, Freezing};
use sok_core::error::{Error, Result};
use sok_core::key::Key;
use sok_core::memory;
use sok_core::policy::commits::Commits;
use sok_core::row_type::RowType;

use super::{GpuTable, WAITING};
use crate::abi::{ChangedList, TABLE_THREADS, Use};
use crate::device::{Device, launch};
use crate::kernels::{CHANGES, SCORES, TABLE};
use crate::memory::{Buffer, Plain, Shared};

const WHAT: &str = "the records of a dump";

/// Number of bytes of a part.
const PART_BYTES: usize = 32 << 20;

/// Records of a table that are listed in device memory, and copies of them. They lie in one buffer, because each allocation takes the driver
/// long: first the values, which kernels write in groups of four columns, then uses, keys, and the numbers of the records.
struct DeviceRecords<'t> {
    device: Arc<Device>,
    memory: Buffer<u32>,
    /// Number of listed records.
    count: usize,
    /// Number of records for whose copies there is memory.
    part: usize,
    /// Floats of a record.
    width: usize,
    /// Of a table with columns: the columns, and the commits that ages are counted from.
    columns: Option<(&'static [Column], Commits)>,
    /// The table from which a read copies records. `None`: all records were copied before.
    source: Option<&'t GpuTable>,
    /// Pinned memory that parts come through.
    staging: RefCell<Option<Shared>>,
}

/// Words of a use, and of a key.
const USE: usize = size_of::<Use>() / 4;
const KEY: usize = size_of::<Key>() / 4;

impl<'t> DeviceRecords<'t> {
    /// Gets memory for a list of `count` records of a table, and for copies of `part` of them.
    fn new(table: &GpuTable, count: usize, part: usize) -> Result<DeviceRecords<'t>> {
        let width = table.layout.fields.width as usize;
        let columns = table.config.columns();
        let evictor = table.evictor.as_ref().filter(|_| !columns.is_empty());
        let uses = if evictor.is_some() { USE * part } else { 0 };
        // The last words are the number of records that were listed, and their numbers.
        let num_words = (width * part).next_multiple_of(4) + uses + KEY * count + 1 + count;
        Ok(DeviceRecords {
            device: table.device.clone(),
            memory: Buffer::uninit(&table.device.context, num_words)?,
            count,
            part,
            width,
            columns: evictor.map(|evictor| (columns, evictor.commits.clone())),
            source: None,
            staging: RefCell::default(),
        })
    }

    /// Address of the first use.
    fn uses(&self) -> u64 {
        self.memory.at((self.width * self.part).next_multiple_of(4))
    }

    /// Address of the first key.
    fn keys(&self) -> u64 {
        let uses = if self.columns.is_some() { USE * self.part } else { 0 };
        self.uses() + 4 * uses as u64
    }

    /// Address of the number of records that were listed, after which their numbers come.
    fn listed(&self) -> u64 {
        self.keys() + (4 * KEY * self.count) as u64
    }

    /// Checks that all records were listed. Waits for the device.
    fn check(&self, table: &str) -> Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        let listed = crate::memory::read::<u32>(&self.device.context, self.listed(), 1)?[0] as usize;
        if listed == self.count {
            return Ok(());
        }
        let count = self.count;
        Err(Error::Device(format!("table `{table}` has {count} rows, of which {listed} were found")))
    }

    /// Appends the records of `len` keys from `key` on, whose copies lie from `copy` on.
    fn append_records(&self, key: usize, copy: usize, len: usize, out: &mut Records) -> Result<()> {
        self.append(self.keys() + (4 * KEY * key) as u64, len, &mut out.keys)?;
        self.append(self.memory.at(self.width * copy), self.width * len, &mut out.values)?;
        let Some((columns, commits)) = &self.columns else { return Ok(()) };
        let mut uses = memory::with_capacity::<Use>(len, WHAT)?;
        self.append(self.uses() + (4 * USE * copy) as u64, len, &mut uses)?;
        for &column in *columns {
            out.column_mut(column).extend(uses.iter().map(|used| match column {
                Column::Scores => used.score,
                Column::Ages => commits.age(used.commit),
            }));
        }
        Ok(())
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

impl RecordsCopy for DeviceRecords<'_> {
    fn num_rows(&self) -> usize {
        self.count
    }

    fn read(&self, rows: Range<usize>, out: &mut Records) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let columns = self.columns.as_ref().map_or(&[][..], |(columns, _)| columns);
        out.reserve(rows.len(), self.width, columns, WHAT)?;
        let Some(table) = self.source else {
            return self.append_records(rows.start, rows.start, rows.len(), out);
        };
        for start in rows.clone().step_by(self.part) {
            let len = self.part.min(rows.end - start);
            table.copy_records(self, start, len)?;
            WAITING.synchronize()?;
            self.append_records(start, 0, len, out)?;
        }
        Ok(())
    }
}

/// A copy that the device is making.
struct Copying {
    records: DeviceRecords<'static>,
    since: Option<u64>,
}

impl Freezing for Copying {
    fn finish(self: Box<Self>, table: &dyn Contents) -> Result<Box<dyn Contents>> {
        self.records.check(&table.config().name)?;
        Ok(Box::new(Frozen::with(table, self.since, self.records)?))
    }
}

impl GpuTable {
    /// Begins a copy of the contents in the memory of the device; without memory for that, makes one on the host. `since`: as for
    /// `Table::freeze`. No step may be in progress, and the counts must be known.
    pub(super) fn begin_copy(&self, since: Option<u64>) -> Result<Box<dyn Freezing>> {
        let epoch = since.map(|snapshot| epoch_since(self, snapshot)).transpose()?;
        let count = epoch.map_or(Ok(self.rows() as usize), |epoch| self.count_changed(epoch.0))?;
        let Ok(records) = DeviceRecords::new(self, count, count) else {
            return Ok(Box::new(Frozen::of(self, since)?));
        };
        self.list_records(&records, epoch.map_or(0, |epoch| epoch.0))?;
        self.copy_records(&records, 0, count)?;
        Ok(Box::new(Copying { records, since }))
    }

    /// Lists the records of the contents in device memory. A read copies the next part of them to a dense buffer. `None` without memory for
    /// the list. `since`: as for `Table::freeze`. The device must be idle.
    pub(super) fn listed(&self, since: Option<u64>) -> Result<Option<Box<dyn Contents + '_>>> {
        let epoch = since.map(|snapshot| epoch_since(self, snapshot)).transpose()?;
        let count = epoch.map_or_else(|| self.len(), |epoch| self.count_changed(epoch.0))?;
        let part = PART_BYTES / (4 * self.layout.fields.width as usize);
        let Ok(records) = DeviceRecords::new(self, count, part.clamp(1, count.max(1))) else {
            return Ok(None);
        };
        self.list_records(&records, epoch.map_or(0, |epoch| epoch.0))?;
        records.check(&self.config.name)?;
        let records = DeviceRecords { source: Some(self), ..records };
        Ok(Some(Box::new(Frozen::with(self, since, records)?)))
    }

    /// Enqueues listing the records that have changed since the start of an epoch.
    fn list_records(&self, to: &DeviceRecords, since: u32) -> Result<()> {
        if to.count == 0 {
            return Ok(());
        }
        // SAFETY: The word is in the memory of the list.
        unsafe { WAITING.fill(to.listed(), 0, 4) }?;
        let list = ChangedList { count: to.listed(), keys: to.keys(), records: to.listed() + 4 };
        self.launch_list(since, list, 0, self.index.num_places())
    }

    /// Enqueues copying `len` of the listed records from `first` on.
    fn copy_records(&self, to: &DeviceRecords, first: usize, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let numbers = to.listed() + 4 * (1 + first) as u64;
        let (table, fields, n) = (self.alone(), self.layout.fields, len as u32);
        let values = to.memory.address();
        let blocks = len.min(16 * self.device.multiprocessors as usize);
        if to.width == 4 * self.layout.stride && self.config.row_type == RowType::Float32 {
            let copy = self.device.kernel(&CHANGES, "copy_records")?;
            // SAFETY: The arguments have the types of the kernel's parameters. All memory lives until the caller has waited.
            unsafe { launch!(copy, WAITING, blocks, TABLE_THREADS, table, numbers, values, n) }?;
        } else {
            let read = self.device.kernel(&TABLE, "read_records")?;
            // SAFETY: As above.
            unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, fields, numbers, values, n) }?;
        }
        if to.columns.is_some() {
            let read = self.device.kernel(&SCORES, "read_uses")?;
            let (uses, blocks) = (to.uses(), len.div_ceil(TABLE_THREADS));
            // SAFETY: As above.
            unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, numbers, uses, n) }?;
        }
        Ok(())
    }
}
