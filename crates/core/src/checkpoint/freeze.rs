//! Copies of tables, from which a dump is written while training goes on.

use std::path::Path;

use super::increment::Parent;
use super::manifest::Manifest;
use super::names::MANIFEST;
use super::ranks::{Ranks, agree_on};
use super::writer::{DumpOptions, check_overwrite, unique};
use crate::contract::frozen::epoch_since;
use crate::contract::table::{Contents, Table};
use crate::error::Result;

/// Copies of tables for a dump.
pub struct FrozenTables {
    /// In the order of the tables.
    pub contents: Vec<Box<dyn Contents>>,
    /// Number of rows that a dump of them writes.
    pub num_rows: u64,
    /// Number of the snapshot with which the tables have started an epoch. [`Table::rename_snapshot`] replaces it by that of the dump.
    pub snapshot: u64,
}

/// Copies the rows that a dump with these options writes, and starts an epoch in each table. `ranks`: all ranks that write the dump.
///
/// # Errors
/// If one rank fails, all do.
/// - [`Error::Argument`](crate::Error::Argument) if there is a dump in `path` and `overwrite` is false.
/// - Of an increment, [`Error::Io`](crate::Error::Io) if there is no dump, and [`Error::UnknownChanges`](crate::Error::UnknownChanges) if a
///   table has no record of its changes since.
/// - [`Error::Memory`](crate::Error::Memory) or [`Error::Device`](crate::Error::Device) without enough memory for the copies.
pub fn freeze(
    path: &Path,
    tables: &mut [&mut dyn Table],
    options: &DumpOptions,
    ranks: Option<&Ranks>,
) -> Result<FrozenTables> {
    let (snapshot, is_whole) = (unique(), options.after.is_none());
    let is_first = ranks.is_none_or(|ranks| ranks.communicator.rank() == 0);
    let checked = if is_first && is_whole { check_overwrite(path, options) } else { Ok(()) };
    let frozen = checked.and_then(|()| parent_of(path, options)).and_then(|parent| {
        if let Some(parent) = &parent {
            check_parent(path, parent, tables, options)?;
        }
        let since = parent.map(|parent| parent.snapshot);
        tables.iter_mut().try_for_each(|table| table.settle())?;
        let begun = tables.iter_mut().map(|table| table.freeze(since)).collect::<Result<Vec<_>>>()?;
        if is_whole {
            // The first epoch of a table needs memory, which the host requests while a device copies.
            start_epochs(tables, snapshot);
        }
        let copies = begun.into_iter().zip(&*tables);
        let contents = copies.map(|(copy, table)| copy.finish(&**table)).collect::<Result<Vec<_>>>()?;
        let num_rows = contents.iter().map(|table| match since {
            None => table.len(),
            Some(snapshot) => table.num_changed(epoch_since(&**table, snapshot)?),
        });
        let num_rows = num_rows.sum::<Result<usize>>()? as u64;
        Ok((contents, num_rows))
    });
    let (contents, num_rows) = match ranks {
        Some(Ranks { communicator, tag }) => agree_on(&**communicator, tag.at(7), frozen)?,
        None => frozen?,
    };
    if !is_whole {
        // Starting an epoch can remove the oldest one, whose changes `finish` still reads.
        start_epochs(tables, snapshot);
    }
    Ok(FrozenTables { contents, num_rows, snapshot })
}

/// Starts an epoch in each table. A table without memory for its changes writes no increment next; the dump itself needs none.
fn start_epochs(tables: &mut [&mut dyn Table], snapshot: u64) {
    tables.iter_mut().for_each(|table| drop(table.track(snapshot)));
}

/// Checks that an increment of these tables may follow a part of the dump.
fn check_parent(
    path: &Path,
    parent: &Parent,
    tables: &[&mut dyn Table],
    options: &DumpOptions,
) -> Result<()> {
    let names: Vec<&str> = tables.iter().map(|table| &*table.config().name).collect();
    let order = parent.order(path, &names)?;
    let contents = order.into_iter().map(|number| &*tables[number] as &dyn Contents);
    parent.check_tables(path, contents, options.states)
}

/// The part of the dump in `path` that an increment follows.
fn parent_of(path: &Path, options: &DumpOptions) -> Result<Option<Parent>> {
    let Some(after) = options.after else { return Ok(None) };
    Parent::new(path, Manifest::read(&path.join(MANIFEST))?.0, after).map(Some)
}
