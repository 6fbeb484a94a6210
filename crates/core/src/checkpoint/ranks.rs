//! A dump that all ranks write: each its part of the tables, rank 0 the arrays and the manifest.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::files::{DirectoryLock, Disk, Files};
use super::manifest::{MANIFEST, Manifest, TableEntry};
use super::utc;
use super::writer::{
    Array, DumpOptions, Writer, array_tensors, check_names, check_overwrite, create_directory,
    remove_leftovers, unique,
};
use crate::contract::table::Table;
use crate::error::{Error, Result};
use crate::exchange::buckets::Owners;
use crate::exchange::collectives::{agree, gather};
use crate::exchange::communicator::Communicator;
use crate::exchange::message::{Reader, Tag};

/// The ranks that write or read a dump together.
pub struct Ranks {
    /// The connection with the others.
    pub communicator: Arc<dyn Communicator>,
    /// Names the call; its rounds are used from 0 on.
    pub tag: Tag,
}

/// Writes the tables of all ranks into the directory `path`, which all must reach. `tables`: this rank's part of each, in the same order
/// on all ranks. `arrays`: those of rank 0 are written.
///
/// # Errors
/// As [`dump`](super::dump), and [`Error::Rank`]. An old dump is unchanged then, unless a rank is lost after the manifest was replaced.
pub fn dump_of_ranks(
    path: &Path,
    tables: &[(&dyn Table, Owners)],
    arrays: &[Array],
    options: &DumpOptions,
    ranks: &Ranks,
) -> Result<Manifest> {
    let Ranks { communicator, tag } = ranks;
    let (communicator, rank) = (&**communicator, ranks.communicator.rank());
    let prepared = if rank == 0 { prepare(path, tables, arrays, options).map(Some) } else { Ok(None) };
    let (lock, begun) = match prepared {
        Ok(Some((lock, unique))) => (Some(lock), Ok(unique.to_le_bytes().to_vec())),
        Ok(None) => (None, Ok(Vec::new())),
        Err(error) => (None, Err(error)),
    };
    let begun = gather(communicator, *tag, begun)?;
    let unique = Reader::new(&begun[0], 0).number()?;
    let mut writer = Writer::new(&Disk, path, unique.wrapping_add(rank as u64));
    let written = write_tables(&mut writer, path, tables, options);
    let result = gather(communicator, tag.at(1), written).and_then(|entries| {
        let manifest =
            if rank == 0 { finish(&mut writer, path, &entries, arrays, options) } else { Ok(Vec::new()) };
        gather(communicator, tag.at(2), manifest)
    });
    let manifests = match result {
        Ok(manifests) => manifests,
        Err(error) => {
            // If a rank is lost, the manifest may have been replaced. The next dump removes what is not needed.
            if communicator.failure().is_none() {
                writer.remove_created();
            }
            return Err(error);
        }
    };
    let manifest = Manifest::from_bytes(&path.join(MANIFEST), &manifests[0])?;
    let synced = if rank == 0 { Disk.sync_dir(path).map_err(|e| Error::io(path, e)) } else { Ok(()) };
    agree(communicator, tag.at(3), synced)?;
    if lock.is_some() {
        remove_leftovers(&Disk, path, &manifest);
    }
    Ok(manifest)
}

/// Checks what can be checked before anything is written, and keeps other dumps out of the directory.
fn prepare(
    path: &Path,
    tables: &[(&dyn Table, Owners)],
    arrays: &[Array],
    options: &DumpOptions,
) -> Result<(DirectoryLock, u64)> {
    check_names(tables.iter().map(|(table, _)| *table), arrays)?;
    array_tensors(arrays)?;
    create_directory(&Disk, path)?;
    let lock = DirectoryLock::acquire(path)?;
    check_overwrite(path, options)?;
    Ok((lock, unique()))
}

/// Writes this rank's part of the tables. Returns their entries.
fn write_tables(
    writer: &mut Writer,
    path: &Path,
    tables: &[(&dyn Table, Owners)],
    options: &DumpOptions,
) -> Result<Vec<u8>> {
    if !path.is_dir() {
        return Err(Error::State(format!(
            "{} must be a directory that all ranks reach: this rank does not find it",
            path.display()
        )));
    }
    let mut entries = Vec::new();
    for (table, owners) in tables {
        entries.push(if owners.is_replicated() && owners.rank > 0 {
            // Rank 0 writes the same rows.
            TableEntry { num_rows: 0, ..TableEntry::of(*table, options.states)? }
        } else {
            writer.write_table(*table, options)?
        });
    }
    serde_json::to_vec(&entries).map_err(|e| Error::State(e.to_string()))
}

/// Writes the arrays and the manifest, and puts it in place. Returns its bytes.
fn finish(
    writer: &mut Writer,
    path: &Path,
    entries: &[Vec<u8>],
    arrays: &[Array],
    options: &DumpOptions,
) -> Result<Vec<u8>> {
    let mut merged: Vec<TableEntry> = Vec::new();
    for (from, bytes) in entries.iter().enumerate() {
        let entries: Vec<TableEntry> = serde_json::from_slice(bytes).map_err(|e| Error::Rank {
            rank: from,
            what: format!("wrote tables that cannot be read: {e}"),
        })?;
        if from == 0 {
            merged = entries;
            continue;
        }
        if entries.len() != merged.len() {
            let what = "dumps other tables than this rank. All ranks must make the same calls".into();
            return Err(Error::Rank { rank: from, what });
        }
        for (table, entry) in merged.iter_mut().zip(entries) {
            table.num_rows += entry.num_rows;
            table.shards.extend(entry.shards);
        }
    }
    let arrays = writer.write_arrays(arrays, array_tensors(arrays)?)?;
    let manifest = Manifest::new(options.step, utc(SystemTime::now()), merged, arrays);
    let (bytes, aside) = writer.write_manifest(&manifest)?;
    let manifest_path = path.join(MANIFEST);
    Disk.rename(&aside, &manifest_path).map_err(|e| Error::io(&manifest_path, e))?;
    Ok(bytes)
}
