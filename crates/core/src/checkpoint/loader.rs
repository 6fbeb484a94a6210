//! A load: all that could fail is tried before the first table changes.

use std::borrow::Cow;
use std::io;
use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;

use super::checksum::BlockHasher;
use super::data_reader::DataReader;
use super::manifest::{MANIFEST, TableEntry};
use super::ranks::Ranks;
use super::reader::{DumpReader, with_snapshot};
use super::{CHUNK_BYTES, KEY_BYTES};
use crate::contract::record::{Field, RecordLayout};
use crate::contract::table::{Records, Table};
use crate::error::{Error, Result};
use crate::exchange::buckets::Owners;
use crate::exchange::collectives::{decide, gather};
use crate::formula::update::Update;
use crate::key::Key;
use crate::memory;

/// What memory is for.
const BUFFER: &str = "the rows of a dump";

/// What becomes of the rows that a table holds before a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// They go: the table is as it was dumped.
    #[default]
    Replace,
    /// They stay, but for the keys that the dump has as well.
    Merge,
}

#[derive(Clone, Copy, Debug)]
/// How a dump is loaded.
pub struct LoadOptions {
    /// What happens to rows that the table has already.
    pub mode: LoadMode,
    /// Load optimizer states too; without, the states of loaded rows are at their first values.
    pub states: bool,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions { mode: LoadMode::Replace, states: true }
    }
}

/// A table that takes rows from a dump.
pub struct Target<'a> {
    /// In the dump.
    pub name: &'a str,
    /// The table that takes the rows.
    pub table: &'a mut dyn Table,
    /// The optimizer of the table.
    pub binding: TargetBinding,
    /// If ranks share the table: it takes the rows that its rank owns.
    pub owners: Option<Owners>,
}

/// Whose the states of a table are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TargetBinding {
    /// An optimizer's: it goes on with them, and the dump's must be of the same rule and layout.
    Bound,
    /// Nobody's yet: the dump's come in. Where it is known which update will be bound later, they must go on under it.
    Free(Option<Update>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
/// What a load has read.
pub struct LoadReport {
    /// Optimizer steps taken when the dump was written.
    pub step: u64,
    /// The tables, in the order of the targets.
    pub tables: Vec<LoadedTable>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
/// A table that was loaded.
pub struct LoadedTable {
    /// In the dump.
    pub name: String,
    /// Number of rows in the dump.
    pub num_rows: u64,
    /// Whether rows came with their optimizer states.
    pub states: bool,
    /// Whether keys without a row go on answering by the table's own seed, which is not the dump's: rows of both are in it.
    pub mixes_seeds: bool,
}

/// Loads tables of the dump in `path`, each by its name in the dump, into tables of the same dim and vocabulary: as
/// [`DumpReader::load`], where a table with an update rule is bound. Reads the next dump if that replaces this one meanwhile.
///
/// # Errors
/// As [`DumpReader::load`]; [`Error::DumpReplaced`] if new dumps keep taking the files away.
pub fn load(
    path: &Path,
    targets: &mut [(&str, &mut dyn Table)],
    options: &LoadOptions,
) -> Result<LoadReport> {
    with_snapshot(path, |dump| {
        let mut targets: Vec<_> = targets
            .iter_mut()
            .map(|(name, table)| {
                let binding = if table.update_rule().is_some() {
                    TargetBinding::Bound
                } else {
                    TargetBinding::Free(None)
                };
                Target { name, table: &mut **table, binding, owners: None }
            })
            .collect();
        dump.load(&mut targets, options, None)
    })
}

impl DumpReader {
    /// Checks that all ranks have opened the same dump.
    fn check_same(&self, Ranks { communicator, tag }: &Ranks) -> Result<()> {
        let own = serde_json::to_vec(self.manifest()).map_err(|e| Error::State(e.to_string()));
        let all = gather(&**communicator, *tag, own)?;
        if all.iter().any(|manifest| *manifest != all[0]) {
            return Err(Error::DumpReplaced { path: self.path.clone() });
        }
        Ok(())
    }

    /// Loads tables, each by its name in the dump, into tables of the same dim and vocabulary.
    ///
    /// The whole dump is verified first. `Replace` loads into fresh tables and swaps them in when all are complete, so what
    /// fails changes nothing. `Merge` writes into the tables themselves: only a disk that fails, or runs out of memory,
    /// between verification and the last row leaves a part of the dump in them.
    ///
    /// The seed comes with the rows; a merge into a table with rows leaves the table's own. Initializer and hyper-parameters
    /// stay the table's. [`TargetBinding`] says whose the states are.
    ///
    /// # Errors
    /// [`Error::DumpMismatch`] says what a table and the dump do not have in common; [`Error::TableFull`] if a merge does
    /// not fit; [`Error::CorruptDump`] as [`DumpReader::verify`]; [`Error::DumpReplaced`] if a new dump took a file away: then
    /// nothing has changed.
    ///
    /// `ranks`: those that read the dump together. If one of them fails, none changes its tables.
    pub fn load(
        &self,
        targets: &mut [Target],
        options: &LoadOptions,
        ranks: Option<&Ranks>,
    ) -> Result<LoadReport> {
        if let Some(ranks) = ranks {
            self.check_same(ranks)?;
        }
        let dump = match options.mode {
            LoadMode::Replace => Cow::Borrowed(self),
            LoadMode::Merge => self.holding_all()?,
        };
        let (mut loads, mut fresh) = (Vec::new(), Vec::new());
        let prepared = prepare(&dump, targets, options, &mut loads, &mut fresh);
        match ranks {
            // The ranks that are left after one is lost all have the rows of the dump, or none.
            Some(Ranks { communicator, tag }) => decide(&**communicator, tag.at(2), prepared)?,
            None => prepared?,
        }
        match options.mode {
            LoadMode::Replace => {
                let mut fresh = targets.iter_mut().zip(fresh);
                fresh.try_for_each(|(target, new)| target.table.replace_with(new))?;
            }
            LoadMode::Merge => {
                let mut pairs = loads.iter().zip(targets.iter_mut());
                pairs.try_for_each(|(load, target)| load.merge_into(&mut *target.table))?;
            }
        }
        let tables = loads.iter().zip(targets.iter()).map(|(load, target)| load.report(&*target.table));
        Ok(LoadReport { step: dump.manifest().step, tables: tables.collect() })
    }
}

/// Does all that may fail before the first table changes.
fn prepare<'a>(
    dump: &'a DumpReader,
    targets: &[Target],
    options: &LoadOptions,
    loads: &mut Vec<TableLoad<'a>>,
    fresh: &mut Vec<Box<dyn Table>>,
) -> Result<()> {
    for target in targets {
        loads.push(TableLoad::new(dump, target, options)?);
    }
    dump.verify()?;
    for (load, target) in loads.iter().zip(targets) {
        load.check_keys(&*target.table, options.mode)?;
    }
    if options.mode == LoadMode::Replace {
        for (load, target) in loads.iter().zip(targets) {
            fresh.push(load.load_fresh(&*target.table)?);
        }
    }
    Ok(())
}

/// What one table takes from the dump; it exists if the two go together.
struct TableLoad<'a> {
    dump: &'a DumpReader,
    entry: &'a TableEntry,
    /// The rule of the table after the load.
    update: Option<Update>,
    /// The layout of its records after the load.
    layout: RecordLayout,
    /// Whether the states come from the dump.
    states: bool,
    owners: Option<Owners>,
}

impl<'a> TableLoad<'a> {
    fn new(dump: &'a DumpReader, target: &Target, options: &LoadOptions) -> Result<TableLoad<'a>> {
        let mismatch = |what: String| Error::dump_mismatch(&dump.path, what);
        let (name, table) = (target.name, &*target.table);
        let tables = &dump.manifest().tables;
        let entry = tables.iter().find(|t| t.name == name).ok_or_else(|| {
            let names: Vec<_> = tables.iter().map(|t| format!("`{}`", t.name)).collect();
            mismatch(format!("a table must be in the dump: got `{name}`, the dump holds {}", list(&names)))
        })?;
        check_shape(entry, table).map_err(mismatch)?;

        let replaces_all = options.mode == LoadMode::Replace || table.is_empty()?;
        let (own, expected) = match target.binding {
            TargetBinding::Bound => (table.update_rule().copied(), None),
            TargetBinding::Free(expected) => {
                (table.update_rule().copied().filter(|_| !replaces_all), expected)
            }
        };
        let dumped = entry.update.filter(|_| options.states);
        if let Some(update) = dumped {
            for goes_on in [own, expected, Some(update)].iter().flatten() {
                check_states(entry, goes_on, &update).map_err(mismatch)?;
            }
        }
        let update = own.or(dumped);
        let layout = RecordLayout::new(entry.dim, update.as_ref());
        let owners = target.owners;
        Ok(TableLoad { dump, entry, update, layout, states: dumped.is_some(), owners })
    }

    fn report(&self, table: &dyn Table) -> LoadedTable {
        LoadedTable {
            name: self.entry.name.clone(),
            num_rows: self.entry.num_rows,
            states: self.states,
            mixes_seeds: table.config().seed != self.entry.seed,
        }
    }

    /// A dump's keys must be different, and have a place in the table. Reads them only if there is a doubt: a fresh table tells by
    /// its size that keys came twice.
    fn check_keys(&self, table: &dyn Table, mode: LoadMode) -> Result<()> {
        let (config, dumped) = (table.config(), self.entry.num_rows);
        let (len, capacity) = (table.len()? as u64, config.capacity());
        // A rank's part is counted when it is loaded.
        if mode == LoadMode::Replace && dumped > capacity && self.owners.is_none() {
            let what =
                format!("`max_capacity` must be at least the dump's rows: expected {dumped}, got {capacity}");
            return Err(Error::dump_mismatch(&self.dump.path, self.of_table(what)));
        }
        let is_merge = mode == LoadMode::Merge;
        let may_overflow = is_merge && len.saturating_add(dumped) > capacity;
        if config.vocabulary_size.is_none() && !is_merge {
            return Ok(());
        }
        let (mut num_new, mut keys) = (0, self.room_for_keys(is_merge)?);
        let (mut rows, mut found) = (Vec::new(), Vec::new());
        self.for_each_chunk(&[], |file, records| {
            if let Some(key) = records.keys.iter().find(|key| !config.is_in_vocabulary(**key)) {
                let size = config.vocabulary_size.unwrap_or_default();
                return Err(file.corrupt(
                    self.of_table(format!("keys must be below `vocabulary_size` {size}: got {key}")),
                ));
            }
            if is_merge {
                keys.extend(&records.keys);
            }
            if may_overflow {
                let own =
                    memory::collect(records.keys.iter().copied().filter(|key| self.owns(*key)), BUFFER)?;
                memory::resize(&mut rows, own.len() * config.dim, 0.0, BUFFER)?;
                memory::resize(&mut found, own.len(), false, BUFFER)?;
                table.find(&own, &mut rows, &mut found)?;
                num_new += found.iter().filter(|found| !**found).count() as u64;
            }
            Ok(())
        })?;
        self.check_distinct(&mut keys)?;
        if len.saturating_add(num_new) > capacity {
            let refused = len.saturating_add(num_new) - capacity;
            return Err(Error::TableFull { table: config.name.clone(), refused, len, capacity });
        }
        Ok(())
    }

    /// Room for all keys of the dump, if the machine has it.
    fn room_for_keys(&self, is_needed: bool) -> Result<Vec<Key>> {
        let (mut keys, count) = (Vec::new(), if is_needed { self.entry.num_rows as usize } else { 0 });
        let no_memory =
            |_| Error::memory(count * KEY_BYTES, "the keys of a dump", io::ErrorKind::OutOfMemory.into());
        keys.try_reserve_exact(count).map_err(no_memory)?;
        Ok(keys)
    }

    fn check_distinct(&self, keys: &mut [Key]) -> Result<()> {
        keys.par_sort_unstable();
        match keys.array_windows().find(|[key, next]| key == next) {
            None => Ok(()),
            Some([key, _]) => Err(self.keys_come_twice(format!("{key} comes twice"))),
        }
    }

    fn keys_come_twice(&self, got: String) -> Error {
        let what = format!("its keys must be {} different ones: {got}", self.entry.num_rows);
        Error::corrupt_dump(self.dump.path.join(MANIFEST), self.of_table(what))
    }

    fn load_fresh(&self, table: &dyn Table) -> Result<Box<dyn Table>> {
        let world_size =
            self.owners.filter(|owners| !owners.is_replicated()).map_or(1, |owners| owners.world_size);
        let mut fresh = table.fresh(self.update, (self.entry.num_rows as usize).div_ceil(world_size))?;
        fresh.set_seed(self.entry.seed);
        let expected = self.restore_into(&mut *fresh)?;
        let got = fresh.len()?;
        if got != expected {
            return Err(self.keys_come_twice(format!("got {got}")));
        }
        Ok(fresh)
    }

    fn merge_into(&self, table: &mut dyn Table) -> Result<()> {
        if table.is_empty()? {
            table.set_seed(self.entry.seed);
        }
        if !Update::share_states(table.update_rule(), self.update.as_ref(), self.entry.dim) {
            table.set_update_rule(self.update, true)?;
        }
        self.restore_into(table).map(drop)
    }

    /// Returns the number of records.
    fn restore_into(&self, table: &mut dyn Table) -> Result<usize> {
        // Without the states of the dump, records have their first values.
        let fields = if self.states { self.layout.fields() } else { &self.layout.fields()[..1] };
        let mut num_records = 0;
        self.for_each_chunk(fields, |_, records| {
            if self.owners.is_some() {
                records.keep(|key| self.owns(key));
            }
            num_records += records.keys.len();
            table.restore(records)
        })?;
        Ok(num_records)
    }

    fn owns(&self, key: Key) -> bool {
        self.owners.is_none_or(|owners| owners.of(key) == owners.rank)
    }

    /// Reads the keys and `fields` of all shards, chunk by chunk, into records of the table's layout. The fields are the dump's
    /// tensors from tensor 1 on. Other fields get their first values. Each byte is hashed once more, so what is loaded is what was
    /// verified.
    fn for_each_chunk(
        &self,
        fields: &[Field],
        mut then: impl FnMut(&DataReader, &mut Records) -> Result<()>,
    ) -> Result<()> {
        let first = self.first_record();
        let width = if fields.is_empty() { 0 } else { first.len() };
        let chunk_rows = (CHUNK_BYTES / (KEY_BYTES + 4 * first.len())).max(1);
        let (mut records, mut bytes) = (Records::default(), Vec::new());
        for shard in &self.entry.shards {
            let file = self.dump.open_file(shard, Some(&self.entry.name))?;
            let mut hashers: Vec<_> = (0..=fields.len()).map(|_| BlockHasher::new()).collect();
            let num_rows = shard.num_rows() as usize;
            for start in (0..num_rows).step_by(chunk_rows) {
                let rows = chunk_rows.min(num_rows - start);
                let mut read = |tensor: usize, row_bytes: usize, bytes: &mut Vec<u8>| {
                    memory::resize(bytes, rows * row_bytes, 0, BUFFER)?;
                    file.read(tensor, (start * row_bytes) as u64, bytes)?;
                    hashers[tensor].update(bytes);
                    Ok(())
                };
                read(0, KEY_BYTES, &mut bytes)?;
                memory::reserve(&mut records.keys, rows, BUFFER)?;
                memory::reserve(&mut records.values, rows * width, BUFFER)?;
                read_keys(&bytes, &mut records.keys);
                fill_records(&mut records.values, rows, &first[..width]);
                for (tensor, field) in (1..).zip(fields) {
                    read(tensor, 4 * field.columns.len(), &mut bytes)?;
                    read_field(&bytes, width, field, &mut records.values);
                }
                then(&file, &mut records)?;
            }
            if hashers
                .into_iter()
                .zip(&shard.tensors)
                .any(|(hasher, tensor)| hasher.finish() != tensor.blocks)
            {
                return Err(file.corrupt("it must not change while it is loaded".into()));
            }
        }
        Ok(())
    }

    /// Zeros for the row, then the states' first values.
    fn first_record(&self) -> Vec<f32> {
        let mut record = vec![0.0; self.layout.width()];
        self.layout.fill_states(&mut record, true);
        record
    }

    fn of_table(&self, what: String) -> String {
        format!("table `{}`: {what}", self.entry.name)
    }
}

/// What no option bridges.
fn check_shape(entry: &TableEntry, table: &dyn Table) -> Result<(), String> {
    let config = table.config();
    let name = &entry.name;
    if config.dim != entry.dim {
        let (expected, got) = (entry.dim, config.dim);
        return Err(format!(
            "`embedding_dim` of table `{name}` must be the dump's: expected {expected}, got {got}"
        ));
    }
    if config.vocabulary_size != entry.vocabulary_size {
        let show = |size: Option<u64>| size.map_or("None (a dynamic table)".into(), |n| format!("{n}"));
        let (expected, got) = (show(entry.vocabulary_size), show(config.vocabulary_size));
        return Err(format!(
            "`vocabulary_size` of table `{name}` must be the dump's: expected {expected}, got {got}"
        ));
    }
    Ok(())
}

/// Whether the dump's states are what its update says, and go on under `update`.
fn check_states(entry: &TableEntry, update: &Update, dumped: &Update) -> Result<(), String> {
    let name = &entry.name;
    let hint = "Pass `states=False` to load the rows without optimizer states";
    dumped
        .validate()
        .map_err(|e| format!("table `{name}`: the optimizer of the dump must be valid: {e}. {hint}"))?;
    let (expected, got) = (dumped.rule.name(), update.rule.name());
    if expected != got {
        return Err(format!(
            "the optimizer of table `{name}` must be the dump's: expected {expected}, got {got}. {hint}"
        ));
    }
    let specs = update.rule.states(entry.dim);
    let got: Vec<_> = specs.iter().map(|s| (s.name, s.width)).collect();
    let expected: Vec<_> = entry.states.iter().map(|s| (s.name.as_str(), s.width)).collect();
    if expected != got {
        let show = |states: &[(&str, usize)]| {
            list(&states.iter().map(|(name, width)| format!("`{name}` of width {width}")).collect::<Vec<_>>())
        };
        let (expected, got) = (show(&expected), show(&got));
        return Err(format!(
            "the states of table `{name}` must be the dump's: expected {expected}; got {got}. {hint}"
        ));
    }
    Ok(())
}

fn list(items: &[String]) -> String {
    if items.is_empty() { "none".into() } else { items.join(", ") }
}

fn read_keys(bytes: &[u8], keys: &mut Vec<Key>) {
    keys.clear();
    keys.extend(bytes.as_chunks().0.iter().map(|bytes| Key::from_le_bytes(*bytes)));
}

/// As many copies of `first` as there are rows.
fn fill_records(values: &mut Vec<f32>, rows: usize, first: &[f32]) {
    values.clear();
    for _ in 0..rows {
        values.extend_from_slice(first);
    }
}

/// Fills one field of records of `width` floats.
fn read_field(bytes: &[u8], width: usize, field: &Field, values: &mut [f32]) {
    let parts = bytes.as_chunks().0.chunks_exact(field.columns.len().max(1));
    for (record, part) in values.chunks_exact_mut(width).zip(parts) {
        for (value, bytes) in record[field.columns.clone()].iter_mut().zip(part) {
            *value = f32::from_le_bytes(*bytes);
        }
    }
}
