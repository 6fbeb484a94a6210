//! Compaction: a dump with increments becomes one without.

use std::collections::HashSet;
use std::path::Path;
use std::time::SystemTime;

use super::files::{DirectoryLock, Disk, Files};
use super::increment::add_keys;
use super::manifest::Manifest;
use super::reader::DumpReader;
use super::record_reader::RecordReader;
use super::table_entry::TableEntry;
use super::writer::{Writer, array_tensors, check_is_there, write_and_place};
use super::{SHARD_BYTES, utc};
use crate::contract::record::RecordLayout;
use crate::contract::table::Records;
use crate::error::{Error, Result};
use crate::key::Key;

/// Rewrites the dump in `path` without increments: the rows of all parts, each once, and nothing of rows that have gone. The old files are
/// removed. A dump without increments stays as it is. Memory: the keys of the increments.
///
/// # Errors
/// As [`verify`](super::verify) and [`dump`](super::dump). The dump is unchanged then.
pub fn compact(path: &Path) -> Result<Manifest> {
    compact_with(&Disk, path)
}

/// As [`compact`], on other files.
#[doc(hidden)]
pub fn compact_with(files: &dyn Files, path: &Path) -> Result<Manifest> {
    check_is_there(path)?;
    let _lock = DirectoryLock::acquire(path)?;
    let dump = DumpReader::open(path)?;
    if dump.manifest().increments.is_empty() {
        return Ok(dump.manifest().clone());
    }
    dump.check_sizes()?;
    write_and_place(files, path, |writer| {
        let newest = dump.manifest().last().tables.iter().enumerate();
        let tables = newest.map(|(number, entry)| write_table(writer, &dump, number, entry));
        let tables = tables.collect::<Result<Vec<_>>>()?;
        let arrays = dump.arrays()?;
        let arrays = writer.write_arrays(&arrays, array_tensors(&arrays)?)?;
        let created = utc(SystemTime::now());
        let manifest = dump.manifest().compacted(created, tables, arrays).map_err(Error::State)?;
        let (_, aside) = writer.write_manifest(&manifest)?;
        Ok((manifest, aside))
    })
}

/// Writes the rows of a table from all parts of a dump. `number`: of the table. `newest`: its entry in the newest part.
fn write_table(
    writer: &mut Writer,
    dump: &DumpReader,
    number: usize,
    newest: &TableEntry,
) -> Result<TableEntry> {
    let layout = RecordLayout::new(newest.dim, newest.update.as_ref());
    let dumped = newest.states.iter().map(|state| (&*state.name, state.width));
    if !layout.states().iter().map(|state| (state.name, state.columns.len())).eq(dumped) {
        let what = format!("the states of table `{}` must be those of its optimizer", newest.name);
        return Err(Error::dump_mismatch(&dump.path, what));
    }
    let mut entry = TableEntry {
        num_rows: newest.total_rows(),
        total_rows: None,
        shards: Vec::new(),
        removed: Vec::new(),
        ..newest.clone()
    };
    let (later, parts) = (HashSet::new(), (0..dump.manifest().parts().count()).collect());
    let first = vec![0.0; layout.width()];
    let mut rows = Rows { dump, number, newest, layout: &layout, first: &first, later, parts, open: None };
    writer.write_rows(&mut entry, layout.fields(), layout.width(), SHARD_BYTES, |_, to| rows.next(to))?;
    Ok(entry)
}

/// The rows of a table from all parts of a dump, the newest part first.
struct Rows<'a> {
    dump: &'a DumpReader,
    number: usize,
    newest: &'a TableEntry,
    layout: &'a RecordLayout,
    /// A record of zeros.
    first: &'a [f32],
    /// Keys of the parts that were read, also those that have gone.
    later: HashSet<Key>,
    /// Numbers of the parts that were not opened yet.
    parts: Vec<usize>,
    open: Option<OpenPart<'a>>,
}

/// A part that is being read.
struct OpenPart<'a> {
    number: usize,
    entry: &'a TableEntry,
    /// Number of the next shard.
    shard: usize,
    reader: Option<RecordReader<'a>>,
}

impl<'a> Rows<'a> {
    /// Reads records. Returns false after the last ones.
    fn next(&mut self, to: &mut Records) -> Result<bool> {
        loop {
            let Some(part) = &mut self.open else {
                let Some(number) = self.parts.pop() else { return Ok(false) };
                let entry = self.dump.manifest().parts().nth(number).map(|part| &part.tables[self.number]);
                let entry = entry.expect("the parts were counted");
                self.open = Some(OpenPart { number, entry, shard: 0, reader: None });
                continue;
            };
            let Some(reader) = &mut part.reader else {
                let Some(shard) = part.entry.shards.get(part.shard) else {
                    self.end_part()?;
                    continue;
                };
                part.shard += 1;
                let (entry, fields) = (part.entry, self.layout.fields());
                let file = self.dump.open_file(shard, Some(&entry.name))?;
                let vocabulary = entry.vocabulary_size.map(|size| (size, &*entry.name));
                part.reader = Some(RecordReader::new(file, fields, self.first, entry.columns(), vocabulary)?);
                continue;
            };
            let Some(raw) = reader.next()? else {
                part.reader = None;
                continue;
            };
            let mut records = raw.decode()?;
            let later = &self.later;
            records.keep(|key| !later.contains(&key));
            part.entry.catch_up(self.newest, &mut records);
            if part.number > 0 {
                add_keys(&mut self.later, &records.keys)?;
            }
            *to = records;
            return Ok(true);
        }
    }

    /// Reads which keys went in the part that was read.
    fn end_part(&mut self) -> Result<()> {
        let Some(part) = self.open.take() else { return Ok(()) };
        for file in &part.entry.removed {
            let file = self.dump.open_file(file, Some(&part.entry.name))?;
            let mut reader = RecordReader::new(file, &[], &[], Vec::new(), None)?;
            while let Some(raw) = reader.next()? {
                add_keys(&mut self.later, &raw.decode()?.keys)?;
            }
        }
        Ok(())
    }
}
