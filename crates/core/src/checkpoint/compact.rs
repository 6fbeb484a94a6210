//! Compaction: a dump with increments becomes one without.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::files::{DirectoryLock, Disk, Files};
use super::increment::NewerKeys;
use super::loader::check_total;
use super::manifest::Manifest;
use super::reader::DumpReader;
use super::record_reader::RecordReader;
use super::table_entry::TableEntry;
use super::writer::{RowsWriter, Writer, array_tensors, write_and_place};
use super::{SHARD_BYTES, utc};
use crate::contract::record::RecordLayout;
use crate::error::{Error, Result};

/// Rewrites the dump in `path` without increments: the rows of all parts, each once, and nothing of rows that were removed. Files of counts
/// stay as the newest part has them. The other old files are removed. A dump without increments stays as it is. Memory: the keys of the increments.
///
/// # Errors
/// As [`verify`](super::verify) and [`dump`](super::dump). The dump is unchanged then.
pub fn compact(path: &Path) -> Result<Manifest> {
    compact_with(Arc::new(Disk), path)
}

/// As [`compact`], on other files.
#[doc(hidden)]
pub fn compact_with(files: Arc<dyn Files>, path: &Path) -> Result<Manifest> {
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
        let manifest = dump.manifest().compacted(utc(SystemTime::now()), tables, arrays);
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
    // These files stay: the newest part has all counts.
    for file in newest.sight_files() {
        dump.open_file(file, Some(&newest.name))?.verify()?;
    }
    let entry = TableEntry {
        num_rows: newest.total_rows(),
        total_rows: None,
        shards: Vec::new(),
        removed: Vec::new(),
        ..newest.clone()
    };
    let (fields, first) = (layout.fields(), vec![0.0; layout.width()]);
    let mut rows = RowsWriter::new(writer, entry, fields, layout.width(), SHARD_BYTES);
    let (mut newer, mut got) = (NewerKeys::default(), 0);
    for (place, part) in dump.manifest().parts().enumerate().collect::<Vec<_>>().into_iter().rev() {
        let entry = &part.tables[number];
        for shard in &entry.shards {
            let file = dump.open_file(shard, Some(&entry.name))?;
            let vocabulary = entry.vocabulary_size.map(|size| (size, &*entry.name));
            let mut reader =
                RecordReader::new(file, fields, entry.dtype, &first, entry.columns(), vocabulary)?;
            while let Some(raw) = reader.next()? {
                let mut records = raw.decode()?;
                newer.take_rows(entry, newest, place == 0, &mut records)?;
                got += records.keys.len() as u64;
                if got > newest.total_rows() {
                    check_total(dump, newest, got)?;
                }
                rows.add(&records)?;
            }
        }
        for file in &entry.removed {
            let file = dump.open_file(file, Some(&entry.name))?;
            let mut reader = RecordReader::new(file, &[], entry.dtype, &[], Vec::new(), None)?;
            while let Some(raw) = reader.next()? {
                newer.add(&raw.decode()?.keys)?;
            }
        }
    }
    check_total(dump, newest, got)?;
    rows.finish()
}
