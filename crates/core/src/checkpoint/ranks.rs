//! A dump that all ranks write: each its part of the tables, rank 0 the arrays and the manifest.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::files::{DirectoryLock, Disk, Files};
use super::increment::Parent;
use super::manifest::{Manifest, read_whole};
use super::names::MANIFEST;
use super::table_entry::TableEntry;
use super::writer::{
    Array, DumpOptions, Writer, array_tensors, check_names, check_overwrite, create_directory, new_manifest,
    remove_leftovers, unique,
};
use crate::contract::table::Contents;
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
/// As [`dump`](super::dump), and [`Error::Rank`]. An old dump is unchanged then, unless rank 0 is lost when it replaces the manifest.
pub fn dump_of_ranks(
    path: &Path,
    tables: &[(&dyn Contents, Owners)],
    arrays: &[Array],
    options: &DumpOptions,
    ranks: &Ranks,
) -> Result<Manifest> {
    let Ranks { communicator, tag } = ranks;
    let (communicator, rank) = (&**communicator, ranks.communicator.rank());
    let prepared = if rank == 0 { prepare(path, tables, arrays, options).map(Some) } else { Ok(None) };
    let (lock, begun) = match prepared {
        Ok(Some((lock, message))) => (Some(lock), Ok(message)),
        Ok(None) => (None, Ok(Vec::new())),
        Err(error) => (None, Err(error)),
    };
    let begun = gather(communicator, *tag, begun)?;
    let begun = Begun::read(path, &begun[0])?;
    let mut writer = Writer::new(Arc::new(Disk), path, begun.unique.wrapping_add(rank as u64));
    let checked = begun.parent_of(path, options).and_then(|parent| {
        let Some(parent) = parent else { return Ok((parent, tables.to_vec())) };
        let names: Vec<&str> = tables.iter().map(|(table, _)| &*table.config().name).collect();
        let ordered: Vec<_> = parent.order(path, &names)?.into_iter().map(|number| tables[number]).collect();
        parent.check_tables(path, ordered.iter().map(|(table, _)| *table), options.states)?;
        Ok((Some(parent), ordered))
    });
    // Ranks without a record of their changes are heard of before any rank writes.
    let (parent, tables) = agree_on(communicator, tag.at(6), checked)?;
    let (parent, tables) = (parent.as_ref(), &*tables);
    let written = write_tables(&mut writer, path, tables, options, parent);
    let mut aside = None;
    let placed = gather(communicator, tag.at(1), written).and_then(|entries| {
        let finished = match rank {
            0 => finish(&mut writer, path, &entries, arrays, options, parent),
            _ => Ok((Vec::new(), None)),
        };
        let bytes = finished.map(|(bytes, path)| {
            aside = path;
            bytes
        });
        let manifests = gather(communicator, tag.at(2), bytes)?;
        let manifest = Manifest::from_bytes(&path.join(MANIFEST), &manifests[0]);
        let vote = manifest.as_ref().map(drop).map_err(Error::clone);
        place(path, aside.as_deref(), vote, ranks)?;
        manifest
    });
    let manifest = match placed {
        Ok(manifest) => manifest,
        Err(error) => {
            // If a rank is lost, others may still write. The next dump removes what is not needed.
            if communicator.failure().is_none() {
                writer.remove_created();
            }
            return Err(error);
        }
    };
    let synced = if rank == 0 { Disk.sync_dir(path).map_err(|e| Error::io(path, e)) } else { Ok(()) };
    match agree(communicator, tag.at(5), synced) {
        // A rank that is lost now does not take the dump back.
        Err(error) if communicator.failure().is_none() => return Err(error),
        _ => {}
    }
    if lock.is_some() {
        remove_leftovers(&Disk, path, &manifest);
    }
    Ok(manifest)
}

/// Puts the manifest in place, if all ranks vote for it. `aside`: where rank 0 has written it.
///
/// Rank 0 alone decides. The ranks that are left after one is lost all return what it has decided.
fn place(path: &Path, aside: Option<&Path>, vote: Result<()>, ranks: &Ranks) -> Result<()> {
    let Ranks { communicator, tag } = ranks;
    let communicator = &**communicator;
    let placed = agree(communicator, tag.at(3), vote).and_then(|()| {
        let Some(aside) = aside else { return Ok(()) };
        communicator.decide(*tag)?;
        let manifest = path.join(MANIFEST);
        Disk.rename(aside, &manifest).map_err(|e| Error::io(&manifest, e))
    });
    let is_placed = aside.is_some() && placed.is_ok();
    let is_decided = || communicator.failure().is_some() && communicator.is_decided_by_others(*tag);
    match agree(communicator, tag.at(4), placed) {
        Err(error) if !is_placed && !is_decided() => Err(error),
        _ => Ok(()),
    }
}

/// What rank 0 tells all ranks before they write.
struct Begun {
    /// For the names of files.
    unique: u64,
    /// Of an increment: the number of its parent, and the manifest.
    parent: Option<(u64, Manifest)>,
}

impl Begun {
    fn read(path: &Path, message: &[u8]) -> Result<Begun> {
        let mut reader = Reader::new(message, 0);
        let (unique, number) = (reader.number()?, reader.number()?);
        if number == WHOLE {
            return Ok(Begun { unique, parent: None });
        }
        let manifest = Manifest::from_bytes(&path.join(MANIFEST), &message[2 * size_of::<u64>()..])?;
        Ok(Begun { unique, parent: Some((number, manifest)) })
    }

    /// Returns the parent of an increment.
    ///
    /// # Errors
    /// [`Error::Rank`] if rank 0 writes something else than this rank.
    fn parent_of(self, path: &Path, options: &DumpOptions) -> Result<Option<Parent>> {
        let parent = match (options.after, self.parent) {
            (None, None) => return Ok(None),
            (Some(after), Some((number, manifest))) => {
                Some(Parent::new(path, manifest, after)?).filter(|parent| parent.number as u64 == number)
            }
            _ => None,
        };
        let what = "dumps something else than this rank. All ranks must make the same calls";
        parent.map(Some).ok_or_else(|| Error::Rank { rank: 0, what: what.into() })
    }
}

/// In place of the number of a parent.
const WHOLE: u64 = u64::MAX;

/// Checks what can be checked before anything is written, and keeps other dumps out of the directory. Returns the message of rank 0.
fn prepare(
    path: &Path,
    tables: &[(&dyn Contents, Owners)],
    arrays: &[Array],
    options: &DumpOptions,
) -> Result<(DirectoryLock, Vec<u8>)> {
    check_names(tables.iter().map(|(table, _)| *table), arrays)?;
    array_tensors(arrays)?;
    let Some(after) = options.after else {
        create_directory(&Disk, path)?;
        let lock = DirectoryLock::acquire(path)?;
        check_overwrite(path, options)?;
        return Ok((lock, [unique(), WHOLE].map(u64::to_le_bytes).concat()));
    };
    let lock = DirectoryLock::acquire(path)?;
    let manifest = path.join(MANIFEST);
    let bytes = read_whole(&manifest)?;
    let parent = Parent::new(path, Manifest::from_bytes(&manifest, &bytes)?, after)?;
    parent.check_arrays(path, !arrays.is_empty())?;
    let mut message = [unique(), parent.number as u64].map(u64::to_le_bytes).concat();
    message.extend(bytes);
    Ok((lock, message))
}

/// Returns `result` if it is `Ok` on all ranks.
pub(super) fn agree_on<T>(communicator: &dyn Communicator, tag: Tag, result: Result<T>) -> Result<T> {
    let vote = agree(communicator, tag, result.as_ref().map(drop).map_err(Error::clone));
    vote.and(result)
}

/// Writes this rank's part of the tables. Returns their entries.
fn write_tables(
    writer: &mut Writer,
    path: &Path,
    tables: &[(&dyn Contents, Owners)],
    options: &DumpOptions,
    parent: Option<&Parent>,
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
            let total_rows = parent.map(|_| 0);
            TableEntry { num_rows: 0, total_rows, ..TableEntry::of(*table, options.states)? }
        } else {
            writer.write_table(*table, options, parent)?
        });
    }
    writer.finish()?;
    serde_json::to_vec(&entries).map_err(|e| Error::State(e.to_string()))
}

/// Writes the arrays, and the manifest aside. Returns its bytes, and where it is.
fn finish(
    writer: &mut Writer,
    path: &Path,
    entries: &[Vec<u8>],
    arrays: &[Array],
    options: &DumpOptions,
    parent: Option<&Parent>,
) -> Result<(Vec<u8>, Option<PathBuf>)> {
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
        for shard in entries.iter().flat_map(TableEntry::files) {
            let file = path.join(&shard.file);
            if !file.is_file() {
                let what = format!("dumps into another directory: {} is not there", file.display());
                return Err(Error::Rank { rank: from, what });
            }
        }
        for (table, entry) in merged.iter_mut().zip(entries) {
            table.num_rows += entry.num_rows;
            table.total_rows = table.total_rows.map(|rows| rows + entry.total_rows());
            table.shards.extend(entry.shards);
            table.removed.extend(entry.removed);
            if let (Some(merged), Some(sights)) = (&mut table.sights, entry.sights) {
                merged.files.extend(sights.files);
            }
        }
    }
    let arrays = writer.write_arrays(arrays, array_tensors(arrays)?)?;
    let manifest = new_manifest(options, parent, merged, arrays);
    let (bytes, aside) = writer.write_manifest(&manifest)?;
    Ok((bytes, Some(aside)))
}
