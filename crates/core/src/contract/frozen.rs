//! A copy of what a dump reads of a table, in host memory.

use crate::contract::table::{Contents, Cursor, Epoch, Records, TableConfig};
use crate::error::{Error, Result};
use crate::formula::update::Update;
use crate::key::Key;
use crate::memory;

const WHAT: &str = "a copy of a table, which is dumped while training goes on";

/// The only epoch of a copy that has one.
const EPOCH: Epoch = Epoch(0);

/// A copy of a table's records, or of what has changed since a snapshot.
pub struct Frozen {
    config: TableConfig,
    update: Option<Update>,
    /// Number of rows of the table.
    len: usize,
    step: u64,
    commit_times: Vec<(u64, u64)>,
    records: Records,
    /// The snapshot since which the records have changed, and the keys that were removed since.
    changes: Option<(u64, Vec<Key>)>,
}

impl Frozen {
    /// Copies the contents of a table. `since`: as for [`Table::freeze`](super::table::Table::freeze).
    ///
    /// # Errors
    /// As `freeze`.
    pub fn of(table: &dyn Contents, since: Option<u64>) -> Result<Frozen> {
        let config = table.config();
        let epoch = since.map(|snapshot| {
            let unknown = || Error::UnknownChanges { table: config.name.clone() };
            table.epoch_of(snapshot).ok_or_else(unknown)
        });
        let epoch = epoch.transpose()?;
        let num_rows = epoch.map_or_else(|| table.len(), |epoch| table.num_changed(epoch))?;
        let mut records = Records::default();
        records.reserve(num_rows, table.layout().width(), config.columns(), WHAT)?;
        let mut cursor = Some(Cursor::default());
        while let Some(here) = cursor {
            let left = (num_rows - records.keys.len()).max(1);
            cursor = match epoch {
                None => table.scan(here, left, &mut records)?,
                Some(epoch) => table.scan_changed(epoch, here, left, &mut records)?,
            };
        }
        let changes = match (since, epoch) {
            (Some(snapshot), Some(epoch)) => Some((snapshot, table.removed_since(epoch)?)),
            _ => None,
        };
        Ok(Frozen {
            config: config.clone(),
            update: table.update_rule().copied(),
            len: table.len()?,
            step: table.step()?,
            commit_times: table.commit_times(),
            records,
            changes,
        })
    }

    /// Appends up to `max` records from a cursor on.
    fn copy(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>> {
        let records = &self.records;
        let (start, width) = (cursor.0 as usize, self.layout().width());
        let end = records.keys.len().min(start.saturating_add(max));
        out.reserve(end - start, width, self.config.columns(), WHAT)?;
        out.keys.extend_from_slice(&records.keys[start..end]);
        out.values.extend_from_slice(&records.values[start * width..end * width]);
        for &column in self.config.columns() {
            out.column_mut(column).extend_from_slice(&records.column(column)[start..end]);
        }
        Ok((end < records.keys.len()).then_some(Cursor(end as u64)))
    }

    fn known_changes(&self) -> Result<&(u64, Vec<Key>)> {
        self.changes.as_ref().ok_or_else(|| Error::UnknownChanges { table: self.config.name.clone() })
    }
}

impl Contents for Frozen {
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

    fn scan(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>> {
        if self.changes.is_some() {
            return Err(Error::State(format!(
                "the copy of table `{}` has its changes alone",
                self.config.name
            )));
        }
        self.copy(cursor, max, out)
    }

    fn epoch_of(&self, snapshot: u64) -> Option<Epoch> {
        self.changes.as_ref().filter(|(since, _)| *since == snapshot).map(|_| EPOCH)
    }

    fn num_changed(&self, _since: Epoch) -> Result<usize> {
        self.known_changes().map(|_| self.records.keys.len())
    }

    fn scan_changed(
        &self,
        _since: Epoch,
        cursor: Cursor,
        max: usize,
        out: &mut Records,
    ) -> Result<Option<Cursor>> {
        self.known_changes()?;
        self.copy(cursor, max, out)
    }

    fn removed_since(&self, _since: Epoch) -> Result<Vec<Key>> {
        let (_, removed) = self.known_changes()?;
        memory::collect(removed.iter().copied(), WHAT)
    }
}
