//! A copy of what a dump reads of a table.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;

use crate::contract::records::{Column, Records};
use crate::contract::table::{Contents, Cursor, Epoch, Freezing, TableConfig};
use crate::error::{Error, Result};
use crate::formula::update::Update;
use crate::key::Key;
use crate::memory;

const WHAT: &str = "a copy of a table, which is dumped while training goes on";

impl<R: RecordsCopy + 'static> Freezing for Frozen<R> {
    fn finish(self: Box<Self>, _table: &dyn Contents) -> Result<Box<dyn Contents>> {
        Ok(self)
    }
}

/// The only epoch of a copy that has one.
const EPOCH: Epoch = Epoch(0);

/// Copied records, wherever they are.
pub trait RecordsCopy: Send {
    /// Number of records.
    fn num_rows(&self) -> usize;

    /// Appends some records to `out`.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Device`].
    fn read(&self, rows: Range<usize>, out: &mut Records) -> Result<()>;
}

impl RecordsCopy for Records {
    fn num_rows(&self) -> usize {
        self.keys.len()
    }

    fn read(&self, rows: Range<usize>, out: &mut Records) -> Result<()> {
        let width = self.values.len().checked_div(self.keys.len()).unwrap_or(0);
        let columns = Column::ALL.into_iter().filter(|column| !self.column(*column).is_empty());
        let columns: Vec<Column> = columns.collect();
        out.reserve(rows.len(), width, &columns, WHAT)?;
        out.keys.extend_from_slice(&self.keys[rows.clone()]);
        out.values.extend_from_slice(&self.values[rows.start * width..rows.end * width]);
        for column in columns {
            out.column_mut(column).extend_from_slice(&self.column(column)[rows.clone()]);
        }
        Ok(())
    }
}

/// A copy of a table's records, or of what has changed since a snapshot.
pub struct Frozen<R> {
    config: TableConfig,
    update: Option<Update>,
    /// Number of rows of the table.
    len: usize,
    step: u64,
    commit_times: Vec<(u64, u64)>,
    sights: Records,
    num_records: usize,
    /// `None` once they are freed.
    records: RefCell<Option<R>>,
    /// The snapshot since which the records have changed, and the keys that were removed since.
    changes: Option<(u64, Vec<Key>)>,
}

/// Returns the epoch that began with a snapshot.
///
/// # Errors
/// [`Error::UnknownChanges`].
pub fn epoch_since(table: &dyn Contents, snapshot: u64) -> Result<Epoch> {
    let unknown = || Error::UnknownChanges { table: table.config().name.clone() };
    table.epoch_of(snapshot).ok_or_else(unknown)
}

impl Frozen<Records> {
    /// Copies the contents of a table to host memory. `since`: as for [`Table::freeze`](super::table::Table::freeze).
    ///
    /// # Errors
    /// As `freeze`.
    pub fn of(table: &dyn Contents, since: Option<u64>) -> Result<Frozen<Records>> {
        let epoch = since.map(|snapshot| epoch_since(table, snapshot)).transpose()?;
        let num_rows = epoch.map_or_else(|| table.len(), |epoch| table.num_changed(epoch))?;
        let mut records = Records::default();
        records.reserve(num_rows, table.layout().width(), table.config().columns(), WHAT)?;
        let mut cursor = Some(Cursor::default());
        while let Some(here) = cursor {
            let left = (num_rows - records.keys.len()).max(1);
            cursor = match epoch {
                None => table.scan(here, left, &mut records)?,
                Some(epoch) => table.scan_changed(epoch, here, left, &mut records)?,
            };
        }
        Frozen::with(table, since, records)
    }
}

impl<R: RecordsCopy> Frozen<R> {
    /// Contents with records that were copied from a table. `since`: as for `freeze`.
    ///
    /// # Errors
    /// As `freeze`.
    pub fn with(table: &dyn Contents, since: Option<u64>, records: R) -> Result<Frozen<R>> {
        let removed = |snapshot| Ok((snapshot, table.removed_since(epoch_since(table, snapshot)?)?));
        Ok(Frozen {
            config: table.config().clone(),
            update: table.update_rule().copied(),
            len: table.len()?,
            step: table.step()?,
            commit_times: table.commit_times(),
            sights: table.sights()?.into_owned(),
            num_records: records.num_rows(),
            records: RefCell::new(Some(records)),
            changes: since.map(removed).transpose()?,
        })
    }

    /// Appends up to `max` records from a cursor on.
    fn read(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>> {
        let start = cursor.0 as usize;
        let end = self.num_records.min(start.saturating_add(max));
        let records = self.records.borrow();
        let freed = || Error::State(format!("the copy of table `{}` is freed", self.config.name));
        records.as_ref().ok_or_else(freed)?.read(start..end, out)?;
        Ok((end < self.num_records).then_some(Cursor(end as u64)))
    }

    fn known_changes(&self) -> Result<&(u64, Vec<Key>)> {
        self.changes.as_ref().ok_or_else(|| Error::UnknownChanges { table: self.config.name.clone() })
    }
}

impl<R: RecordsCopy> Contents for Frozen<R> {
    fn config(&self) -> &TableConfig {
        &self.config
    }

    fn len(&self) -> Result<usize> {
        Ok(self.len)
    }

    fn update_rule(&self) -> Option<&Update> {
        self.update.as_ref()
    }

    fn step(&self) -> Result<u64> {
        Ok(self.step)
    }

    fn commit_times(&self) -> Vec<(u64, u64)> {
        self.commit_times.clone()
    }

    fn sights(&self) -> Result<Cow<'_, Records>> {
        Ok(Cow::Borrowed(&self.sights))
    }

    fn scan(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>> {
        if self.changes.is_some() {
            return Err(Error::State(format!(
                "the copy of table `{}` has its changes alone",
                self.config.name
            )));
        }
        self.read(cursor, max, out)
    }

    fn epoch_of(&self, snapshot: u64) -> Option<Epoch> {
        self.changes.as_ref().filter(|(since, _)| *since == snapshot).map(|_| EPOCH)
    }

    fn num_changed(&self, _since: Epoch) -> Result<usize> {
        self.known_changes().map(|_| self.num_records)
    }

    fn scan_changed(
        &self,
        _since: Epoch,
        cursor: Cursor,
        max: usize,
        out: &mut Records,
    ) -> Result<Option<Cursor>> {
        self.known_changes()?;
        self.read(cursor, max, out)
    }

    fn removed_since(&self, _since: Epoch) -> Result<Vec<Key>> {
        let (_, removed) = self.known_changes()?;
        memory::collect(removed.iter().copied(), WHAT)
    }

    fn free_copy(&self) {
        *self.records.borrow_mut() = None;
    }
}
