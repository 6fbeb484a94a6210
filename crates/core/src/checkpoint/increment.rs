//! What an increment follows: an earlier part of a dump.

use std::collections::HashSet;
use std::path::Path;

use super::manifest::Manifest;
use super::table_entry::TableEntry;
use crate::contract::frozen::epoch_since;
use crate::contract::records::Records;
use crate::contract::table::{Contents, Epoch};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::memory;

/// Which part of a dump an increment follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The newest one.
    Newest,
    /// The newest one of this step. Later parts are removed from the dump.
    Step(u64),
}

/// A part of a dump that an increment follows.
pub(super) struct Parent {
    pub manifest: Manifest,
    /// Number of the part; 0: the base.
    pub number: usize,
    /// Identifies the state of the tables in this part.
    pub snapshot: u64,
}

impl Parent {
    /// Finds the part in the manifest of the dump in `path`.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no part of this step.
    pub fn new(path: &Path, manifest: Manifest, after: After) -> Result<Parent> {
        let parts: Vec<_> = manifest.parts().collect();
        let number = match after {
            After::Newest => parts.len() - 1,
            After::Step(step) => parts.iter().rposition(|part| part.step == step).ok_or_else(|| {
                let steps: Vec<u64> = parts.iter().map(|part| part.step).collect();
                Error::argument(format!(
                    "`since` must be the step of a part of the dump in {}. Its parts have the steps {steps:?}. Received: {step}",
                    path.display()
                ))
            })?,
        };
        let snapshot = parts[number].snapshot().0;
        Ok(Parent { manifest, number, snapshot })
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

    /// Returns the epoch whose changes the increment has.
    ///
    /// # Errors
    /// [`Error::UnknownChanges`].
    pub fn epoch(&self, table: &dyn Contents) -> Result<Epoch> {
        epoch_since(table, self.snapshot)
    }

    /// Checks each table: it must have a record of its changes since this part, and the layout of the dumped table. `states`: whether the
    /// increment has optimizer states.
    ///
    /// # Errors
    /// [`Error::UnknownChanges`], [`Error::DumpMismatch`].
    pub fn check_tables<'a>(
        &self,
        path: &Path,
        tables: impl Iterator<Item = &'a dyn Contents>,
        states: bool,
    ) -> Result<()> {
        for (table, dumped) in tables.zip(&self.manifest.tables) {
            self.epoch(table)?;
            if !dumped.is_followed_by(&TableEntry::of(table, states)?) {
                let what = format!(
                    "an increment of table `{}` must have the dim, row type, seed, optimizer states, scores, ages and counts of the dump. Pass the \
                     `states` and use the policies that the dump was written with, or write a whole dump by `dump`",
                    dumped.name
                );
                return Err(Error::dump_mismatch(path, what));
            }
        }
        Ok(())
    }

    /// Checks that an increment has arrays if the dump has some.
    ///
    /// # Errors
    /// [`Error::DumpMismatch`].
    pub fn check_arrays(&self, path: &Path, has_arrays: bool) -> Result<()> {
        let what = match (self.manifest.arrays.is_some(), has_arrays) {
            (true, false) => "the dump holds the variables of a model, so an increment must be of the model",
            (false, true) => {
                "the dump holds no variables, so an increment must be of its layers or tables, not of a model"
            }
            _ => return Ok(()),
        };
        Err(Error::dump_mismatch(path, what.to_string()))
    }
}

/// Keys of newer parts of a dump, while its parts are read from the newest to the base.
#[derive(Default)]
pub(super) struct NewerKeys(HashSet<Key>);

impl NewerKeys {
    /// Drops records whose keys newer parts have, and brings the others to the newest step. `entry`: of the table in the part. `newest`: in
    /// the newest part. `is_base`: whether this is the last part to be read.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn take_rows(
        &mut self,
        entry: &TableEntry,
        newest: &TableEntry,
        is_base: bool,
        records: &mut Records,
    ) -> Result<()> {
        if !self.0.is_empty() {
            records.keep(|key| !self.0.contains(&key));
        }
        entry.catch_up(newest, records);
        if is_base { Ok(()) } else { self.add(&records.keys) }
    }

    /// Adds keys that were removed before a part was written.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn add(&mut self, keys: &[Key]) -> Result<()> {
        let no_memory = |_| memory::missing::<Key>(2 * keys.len(), "the keys of increments");
        self.0.try_reserve(keys.len()).map_err(no_memory)?;
        self.0.extend(keys);
        Ok(())
    }
}
