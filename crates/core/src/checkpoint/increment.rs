//! What an increment follows: an earlier part of a dump.

use std::collections::HashSet;
use std::path::Path;

use super::checksum::Checksum;
use super::manifest::Manifest;
use super::names::MANIFEST;
use super::table_entry::TableEntry;
use crate::contract::table::{Since, Table, no_changes};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::memory;

/// How an increment is written.
#[derive(Clone, Copy, Debug)]
pub struct IncrementOptions {
    /// Step of the part of the dump that it follows. Later parts are dropped. `None`: it follows the newest part.
    pub since: Option<u64>,
    /// Optimizer steps taken until now.
    pub step: u64,
    /// Whether optimizer states are written. The dump must have them, or not have them, too.
    pub states: bool,
    /// As in [`DumpOptions`](super::DumpOptions).
    #[doc(hidden)]
    pub shard_bytes: usize,
}

/// A part of a dump that an increment follows.
pub(super) struct Parent {
    pub manifest: Manifest,
    /// Number of the part; 0: the base.
    pub number: usize,
    /// By which tables know what has changed since.
    snapshot: Checksum,
}

impl Parent {
    /// Finds the part in the manifest of the dump in `path`.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no part of this step.
    pub fn new(path: &Path, manifest: Manifest, since: Option<u64>) -> Result<Parent> {
        let steps: Vec<u64> = manifest.parts().map(|part| part.step).collect();
        let number = match since {
            None => steps.len() - 1,
            Some(step) => steps.iter().rposition(|&of_part| of_part == step).ok_or_else(|| {
                Error::argument(format!(
                    "`since` must be the step of a part of the dump in {}, which has those of the steps {steps:?}. Received: {step}",
                    path.display()
                ))
            })?,
        };
        let snapshot = manifest.parts().nth(number).map(|part| part.snapshot());
        let snapshot = snapshot.expect("the part was found above").map_err(Error::State)?;
        Ok(Parent { manifest, number, snapshot })
    }

    /// Reads the manifest of the dump in `path`.
    ///
    /// # Errors
    /// As [`read_manifest`](super::read_manifest) and `new`.
    pub fn read(path: &Path, since: Option<u64>) -> Result<Parent> {
        Parent::new(path, Manifest::read(&path.join(MANIFEST))?.0, since)
    }

    /// Returns the indices of tables in the order of the dump.
    ///
    /// # Errors
    /// [`Error::DumpMismatch`] if the dump has other tables.
    pub fn order(&self, path: &Path, names: &[&str]) -> Result<Vec<usize>> {
        let entries = &self.manifest.tables;
        let order: Vec<usize> =
            entries.iter().filter_map(|entry| names.iter().position(|name| *name == entry.name)).collect();
        if order.len() != entries.len() || names.len() != entries.len() {
            let dumped: Vec<&str> = entries.iter().map(|entry| &*entry.name).collect();
            let what =
                format!("an increment must have the tables of the dump: expected {dumped:?}, got {names:?}");
            return Err(Error::dump_mismatch(path, what));
        }
        Ok(order)
    }

    /// Returns the time since which the increment has the changes of a table.
    ///
    /// # Errors
    /// [`Error::State`] if the table does not know it.
    pub fn since(&self, table: &dyn Table) -> Result<Since> {
        table.since(self.snapshot.0).ok_or_else(|| no_changes(&table.config().name))
    }

    /// Checks that arrays can follow those of the dump.
    ///
    /// # Errors
    /// [`Error::DumpMismatch`].
    pub fn check_arrays(&self, path: &Path, has_arrays: bool) -> Result<()> {
        if self.manifest.arrays.is_some() == has_arrays {
            return Ok(());
        }
        let what = "an increment of a dump of a model must be of the model, and one of a dump of layers or tables of these";
        Err(Error::dump_mismatch(path, what.to_string()))
    }

    /// Checks that rows of an entry can follow those of the dump.
    ///
    /// # Errors
    /// [`Error::DumpMismatch`].
    pub fn check(&self, path: &Path, later: &TableEntry) -> Result<()> {
        let dumped = self.manifest.tables.iter().find(|entry| entry.name == later.name);
        if dumped.is_some_and(|entry| entry.is_followed_by(later)) {
            return Ok(());
        }
        let what = format!(
            "an increment of table `{}` must have the dim, seed, optimizer states, scores and ages of the dump. Pass the `states` that the dump \
             was written with, or write the whole table by `dump`",
            later.name
        );
        Err(Error::dump_mismatch(path, what))
    }
}

/// Adds keys of a part of a dump to those of later parts.
///
/// # Errors
/// [`Error::Memory`].
pub(super) fn add_keys(keys: &mut HashSet<Key>, more: &[Key]) -> Result<()> {
    keys.try_reserve(more.len())
        .map_err(|_| memory::missing::<Key>(2 * more.len(), "the keys of increments"))?;
    keys.extend(more);
    Ok(())
}
