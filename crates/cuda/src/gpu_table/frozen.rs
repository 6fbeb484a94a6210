//! A copy of a table's records in device memory, which a dump reads beside steps.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use sok_core::contract::frozen::{Frozen, RecordsCopy};
use sok_core::contract::table::{Column, Contents, Records};
use sok_core::error::{Error, Result};
use sok_core::policy::commits::Commits;

use super::{GpuTable, WAITING};
use crate::abi::{ChangedList, TABLE_THREADS, Use};
use crate::device::{Device, launch};
use crate::kernels::{CHANGES, SCORES, TABLE};
use crate::memory::{Buffer, Plain, Shared};

const WHAT: &str = "the records of a dump";

/// Copied records, dense.
struct DeviceRecords {
    device: Arc<Device>,
    /// Number of records.
    count: usize,
    /// Floats of a record.
    width: usize,
    keys: Buffer<u64>,
    values: Buffer<f32>,
    /// Of a table with columns: the columns, the uses of the records, and the commits that ages are counted from.
    uses: Option<(&'static [Column], Buffer<Use>, Commits)>,
    /// Pinned memory that parts come through.
    staging: RefCell<Option<Shared>>,
}

impl DeviceRecords {
    /// Copies values to the host, and appends them to `out`.
    fn append<T: Plain>(&self, from: &Buffer<T>, range: Range<usize>, out: &mut Vec<T>) -> Result<()> {
        let size = size_of::<T>() / size_of::<u32>();
        let num_words = range.len() * size;
        let mut staging = self.staging.borrow_mut();
        if staging.as_ref().is_none_or(|staging| staging.len() < num_words) {
            *staging = None;
            *staging = Some(Shared::new(&self.device.context, num_words + num_words / 4)?);
        }
        let Some(staging) = &mut *staging else { return Ok(()) };
        staging.copy_beside(&self.device, from.at(range.start), num_words)?;
        // SAFETY: Only `copy_beside` has words written, and it waits.
        let words = &unsafe { staging.words() }[..num_words];
        // SAFETY: All bytes of plain values are valid.
        let (before, values, _) = unsafe { words.align_to::<T>() };
        assert!(before.is_empty() && values.len() == range.len(), "pinned memory is aligned to pages");
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
        let columns = self.uses.as_ref().map_or(&[][..], |(columns, ..)| columns);
        out.reserve(rows.len(), self.width, columns, WHAT)?;
        self.append(&self.keys, rows.clone(), &mut out.keys)?;
        self.append(&self.values, rows.start * self.width..rows.end * self.width, &mut out.values)?;
        let Some((columns, uses, commits)) = &self.uses else { return Ok(()) };
        let mut read = Vec::with_capacity(rows.len());
        self.append(uses, rows, &mut read)?;
        for &column in *columns {
            out.column_mut(column).extend(read.iter().map(|used| match column {
                Column::Scores => used.score,
                Column::Ages => commits.age(used.commit),
            }));
        }
        Ok(())
    }
}

impl GpuTable {
    /// Copies the contents in the memory of the device; without memory for that, to the host. `since`: as for `Table::freeze`. The device must
    /// be idle.
    pub(super) fn frozen(&self, since: Option<u64>) -> Result<Box<dyn Contents>> {
        let epoch =
            since.map(|snapshot| sok_core::contract::frozen::epoch_since(self, snapshot)).transpose()?;
        let count = epoch.map_or_else(|| self.len(), |epoch| self.count_changed(epoch.0))?;
        match self.room_for_copy(count) {
            Ok((records, numbers)) => {
                self.copy_records(&records, &numbers, epoch.map_or(0, |epoch| epoch.0))?;
                Ok(Box::new(Frozen::with(self, since, records)?))
            }
            Err(_) => Ok(Box::new(Frozen::of(self, since)?)),
        }
    }

    /// Gets memory for copies of this many records, and for their numbers.
    fn room_for_copy(&self, count: usize) -> Result<(DeviceRecords, Buffer<u32>)> {
        let (context, width) = (&self.device.context, self.layout.fields.width as usize);
        let columns = self.config.columns();
        let uses = match &self.evictor {
            Some(evictor) if !columns.is_empty() => {
                Some((columns, Buffer::uninit(context, count)?, evictor.commits.clone()))
            }
            _ => None,
        };
        let records = DeviceRecords {
            device: self.device.clone(),
            count,
            width,
            keys: Buffer::uninit(context, count)?,
            values: Buffer::uninit(context, count * width)?,
            uses,
            staging: RefCell::default(),
        };
        Ok((records, Buffer::uninit(context, count)?))
    }

    /// Copies the records that have changed since the start of an epoch. `numbers`: takes their numbers.
    fn copy_records(&self, to: &DeviceRecords, numbers: &Buffer<u32>, since: u32) -> Result<()> {
        if to.count == 0 {
            return Ok(());
        }
        let listed = Buffer::<u32>::new(&self.device.context, 1)?;
        let list =
            ChangedList { count: listed.address(), keys: to.keys.address(), records: numbers.address() };
        self.launch_list(since, list, 0, self.index.num_places())?;
        let (table, fields, n) = (self.alone(), self.layout.fields, to.count as u32);
        let (from, values) = (numbers.address(), to.values.address());
        let blocks = to.count.min(16 * self.device.multiprocessors as usize);
        if to.width == 4 * self.layout.stride {
            let copy = self.device.kernel(&CHANGES, "copy_records")?;
            // SAFETY: The arguments have the types of the kernel's parameters. All memory lives until the wait below.
            unsafe { launch!(copy, WAITING, blocks, TABLE_THREADS, table, from, values, n) }?;
        } else {
            let read = self.device.kernel(&TABLE, "read_records")?;
            // SAFETY: As above.
            unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, fields, from, values, n) }?;
        }
        if let Some((_, uses, _)) = &to.uses {
            let read = self.device.kernel(&SCORES, "read_uses")?;
            let (uses, blocks) = (uses.address(), to.count.div_ceil(TABLE_THREADS));
            // SAFETY: As above.
            unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, from, uses, n) }?;
        }
        let listed = listed.to_vec()?[0] as usize;
        if listed == to.count {
            return Ok(());
        }
        Err(Error::Device(format!(
            "table `{}` has {} rows, of which {listed} were found",
            self.config.name, to.count
        )))
    }
}
