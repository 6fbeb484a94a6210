//! What a dump takes from tables at its step, so that it can be written while training goes on.

use std::path::Path;

use super::increment::Parent;
use super::manifest::Manifest;
use super::names::MANIFEST;
use super::ranks::{Ranks, agree_on};
use super::writer::{DumpOptions, check_overwrite, unique};
use crate::contract::table::{Contents, Table};
use crate::error::Result;

/// Copies of tables, and the name of the epochs that the tables have begun with.
pub struct FrozenTables {
    /// In the order of the tables.
    pub contents: Vec<Box<dyn Contents>>,
    /// Stands for the snapshot of the dump until that is complete ([`Table::rename_snapshot`]).
    pub snapshot: u64,
}

impl FrozenTables {
    /// Number of rows that a dump of them writes.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn num_rows(&self, options: &DumpOptions, path: &Path) -> Result<u64> {
        let parent = parent_of(path, options)?;
        let rows = self.contents.iter().map(|table| match &parent {
            None => table.len(),
            Some(parent) => table.num_changed(parent.epoch(&**table)?),
        });
        rows.map(|rows| rows.map(|rows| rows as u64)).sum()
    }
}

/// Copies what a dump with these options reads of tables, and begins an epoch in each. `ranks`: those that write the dump together.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) for a dump that is there without `overwrite`. Of an increment: [`Error::Io`](crate::Error::Io) if there is no dump, [`Error::UnknownChanges`](crate::Error::UnknownChanges) if a table
/// has no record of its changes since. [`Error::Memory`](crate::Error::Memory) or [`Error::Device`](crate::Error::Device) without enough
/// memory for the copies. If one rank fails, all do.
pub fn freeze(
    path: &Path,
    tables: &mut [&mut dyn Table],
    options: &DumpOptions,
    ranks: Option<&Ranks>,
) -> Result<FrozenTables> {
    let is_first = ranks.is_none_or(|ranks| ranks.communicator.rank() == 0);
    let checked = if is_first && options.after.is_none() { check_overwrite(path, options) } else { Ok(()) };
    let frozen = checked.and_then(|()| parent_of(path, options)).and_then(|parent| {
        let since = parent.map(|parent| parent.snapshot());
        tables.iter_mut().map(|table| table.freeze(since)).collect::<Result<Vec<_>>>()
    });
    let contents = match ranks {
        Some(Ranks { communicator, tag }) => agree_on(&**communicator, tag.at(7), frozen)?,
        None => frozen?,
    };
    let snapshot = unique();
    // Without memory for that, the next dump must be a whole one.
    tables.iter_mut().for_each(|table| drop(table.track(snapshot)));
    Ok(FrozenTables { contents, snapshot })
}

/// The part of the dump in `path` that an increment follows.
fn parent_of(path: &Path, options: &DumpOptions) -> Result<Option<Parent>> {
    let Some(after) = options.after else { return Ok(None) };
    Parent::new(path, Manifest::read(&path.join(MANIFEST))?.0, after).map(Some)
}
