//! A load: all that could fail is tried before the first table changes.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io;
use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;

use super::KEY_BYTES;
use super::compatible::{check_shape, check_states, list};
use super::data_file::DataFile;
use super::distribution::{Chunk, Chunks, Part, RawChunk, files_of_rank, for_each_chunk};
use super::increment::NewerKeys;
use super::manifest::Part as ManifestPart;
use super::names::MANIFEST;
use super::ranks::Ranks;
use super::reader::{DumpReader, with_snapshot};
use super::record_reader::RecordReader;
use super::table_entry::{ScoreEntry, TableEntry};
use crate::contract::record::RecordLayout;
use crate::contract::records::{Column, Records};
use crate::contract::table::Table;
use crate::error::{Error, Result};
use crate::exchange::buckets::Owners;
use crate::exchange::collectives::{agree, decide, gather};
use crate::exchange::message::{Reader, Writer};
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
    /// `Replace` loads into fresh tables and swaps them in when all are complete and every byte of the dump was verified, so what fails
    /// changes nothing. It reads each byte once. `Merge` verifies the whole dump first and then writes into the tables themselves: only
    /// a disk that fails, or runs out of memory, between verification and the last row leaves a part of the dump in them.
    ///
    /// A dump with increments loads as the whole dump of its newest part. After `Replace`, tables that have the name that they have in the
    /// dump record their changes ([`Table::track`]).
    ///
    /// The seed comes with the rows; a merge into a table with rows leaves the table's own. Initializer and hyper-parameters
    /// stay the table's. [`TargetBinding`] says whose the states are.
    ///
    /// # Errors
    /// [`Error::DumpMismatch`] says what a table and the dump do not have in common, or that the rows do not fit; [`Error::CorruptDump`] as
    /// [`DumpReader::verify`]; [`Error::DumpReplaced`] if a new dump took a file away. After an error, nothing has changed.
    ///
    /// A load removes no rows to make room. A rank may have more rows after it than its part of `max_capacity`; the next call with new keys
    /// removes them, if a policy does.
    ///
    /// `ranks`: the ranks that load together. Each reads a part of the files. If one rank fails, no rank changes its tables.
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
            LoadMode::Merge => agreed(ranks, 4, self.holding_all())?,
        };
        let chain = Chain::new(&dump, targets, options);
        let chain: Chain = agreed(ranks, 5, chain)?;
        let loads = chain.newest();
        let prepared = match options.mode {
            LoadMode::Replace => load_fresh(&dump, &chain, targets, ranks),
            LoadMode::Merge => check_merge(&dump, &chain, targets, ranks).map(|()| Vec::new()),
        };
        let fresh = match ranks {
            // The ranks that are left after one is lost all have the rows of the dump, or none.
            Some(Ranks { communicator, tag }) => decide(&**communicator, tag.at(2), prepared)?,
            None => prepared?,
        };
        match options.mode {
            LoadMode::Replace => {
                let snapshot = dump.manifest().snapshot();
                for ((target, new), load) in targets.iter_mut().zip(fresh).zip(loads) {
                    target.table.replace_with(new)?;
                    // A snapshot does not say which table of the dump it is of: a table of another name must not go on with it.
                    if load.is_whole() && load.table == load.entry.name {
                        // Without memory for that, the next dump of the table must be a whole one.
                        let _ = target.table.track(snapshot);
                    }
                }
            }
            LoadMode::Merge => merge(&chain, targets, ranks)?,
        }
        let tables = loads.iter().zip(targets.iter()).map(|(load, target)| load.report(&*target.table));
        Ok(LoadReport { step: dump.manifest().last().step, tables: tables.collect() })
    }

    /// Reads every byte of the files that are not of `loads`, and of those with counts that a newer part replaces. Ranks share them.
    fn verify_others(&self, loads: &[TableLoad], ranks: Option<&Ranks>) -> Result<()> {
        self.check_sizes()?;
        let is_other = |table: &Option<&str>| {
            table.is_none_or(|table| loads.iter().all(|load| load.entry.name != table))
        };
        let parts: Vec<_> = self.manifest().parts().collect();
        let older = parts[..parts.len() - 1].iter().flat_map(|part| part.tables);
        let replaced: HashSet<&str> =
            older.flat_map(TableEntry::sight_files).map(|file| &*file.file).collect();
        let is_left =
            |file: &DataFile, table: &Option<&str>| is_other(table) || replaced.contains(&*file.file);
        let files: Vec<_> = self.manifest().files().filter(|(file, table)| is_left(file, table)).collect();
        let sizes: Vec<u64> = files.iter().map(|(file, _)| file.bytes).collect();
        let (rank, world_size) = place_of(ranks);
        let own = files_of_rank(&sizes, rank, world_size);
        files[own].iter().try_for_each(|(entry, table)| self.open_file(entry, *table)?.verify())
    }
}

/// This rank, and the number of ranks.
fn place_of(ranks: Option<&Ranks>) -> (usize, usize) {
    ranks.map_or((0, 1), |ranks| (ranks.communicator.rank(), ranks.communicator.world_size()))
}

/// Returns `result` if it is `Ok` on all ranks. `round`: of the tag.
fn agreed<T>(ranks: Option<&Ranks>, round: u8, result: Result<T>) -> Result<T> {
    match ranks {
        Some(Ranks { communicator, tag }) => agree(&**communicator, tag.at(round), result),
        None => result,
    }
}

/// The parts of a dump, as tables take them.
struct Chain<'a> {
    /// By part, oldest first: by target.
    parts: Vec<Vec<TableLoad<'a>>>,
}

impl<'a> Chain<'a> {
    fn new(dump: &'a DumpReader, targets: &[Target], options: &LoadOptions) -> Result<Chain<'a>> {
        let of_part = |part: ManifestPart<'a>| {
            let loads = targets.iter().map(|target| TableLoad::new(dump, part.tables, target, options));
            loads.collect::<Result<Vec<_>>>()
        };
        Ok(Chain { parts: dump.manifest().parts().map(of_part).collect::<Result<_>>()? })
    }

    /// What tables take of the newest part, which has their state after the load.
    fn newest(&self) -> &[TableLoad<'a>] {
        self.parts.last().expect("a dump has a base")
    }

    /// Reads the records of all tables, each key from the newest part that has it. Calls `take` with the index of a table and records of it
    /// that this rank owns. If not `with_values`, only keys are read.
    fn read(
        &self,
        with_values: bool,
        ranks: Option<&Ranks>,
        mut take: impl FnMut(usize, &Records) -> Result<()>,
    ) -> Result<()> {
        let newest = self.newest();
        let mut newer: Vec<NewerKeys> = newest.iter().map(|_| NewerKeys::default()).collect();
        for (number, loads) in self.parts.iter().enumerate().rev() {
            read_all(loads, Files::Rows { with_values }, ranks, |table, mut records| {
                let (entry, newest) = (loads[table].entry, newest[table].entry);
                newer[table].take_rows(entry, newest, number == 0, &mut records)?;
                take(table, &records)
            })?;
            if number > 0 {
                read_all(loads, Files::Removed, ranks, |table, records| newer[table].add(&records.keys))?;
            }
        }
        Ok(())
    }

    /// Compares the number of rows of each table, over all parts, with the manifest. `num_rows`: by table, the rows of this rank.
    fn check_rows(&self, num_rows: &[usize], ranks: Option<&Ranks>) -> Result<()> {
        if self.parts.len() == 1 {
            return Ok(());
        }
        let of_rank: Vec<u64> = num_rows.iter().map(|rows| *rows as u64).collect();
        let totals = totals(self.newest(), &of_rank, ranks, 8)?;
        let mut loads = self.newest().iter().zip(totals);
        loads.try_for_each(|(load, total)| check_total(load.dump, load.entry, total))
    }
}

/// Sums a number of each table over the ranks that share it. `round`: of the tag.
fn totals(loads: &[TableLoad], of_rank: &[u64], ranks: Option<&Ranks>, round: u8) -> Result<Vec<u64>> {
    let mut totals = of_rank.to_vec();
    let Some(Ranks { communicator, tag }) = ranks else { return Ok(totals) };
    // Ranks may have their targets in other orders.
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_unstable_by_key(|&load| (&loads[load].entry.name, &loads[load].table));
    order.retain(|&number| loads[number].num_ranks() > 1);
    let mut writer = Writer::default();
    let written = order.iter().try_for_each(|&number| writer.numbers(&[of_rank[number]]));
    let all = gather(&**communicator, tag.at(round), written.map(|()| writer.finish()))?;
    order.iter().for_each(|&number| totals[number] = 0);
    for (rank, message) in all.iter().enumerate() {
        let mut reader = Reader::new(message, rank);
        for &number in &order {
            totals[number] = totals[number].saturating_add(reader.number()?);
        }
    }
    Ok(totals)
}

/// Returns the maximum number of rows of each table, over all ranks.
fn capacities(loads: &[TableLoad], targets: &[Target], ranks: Option<&Ranks>) -> Result<Vec<u64>> {
    let own: Vec<u64> = targets.iter().map(|target| target.table.config().capacity()).collect();
    totals(loads, &own, ranks, 12)
}

/// Checks that the parts of a dump hold as many rows of a table as its newest entry says.
///
/// # Errors
/// [`Error::CorruptDump`].
pub(super) fn check_total(dump: &DumpReader, newest: &TableEntry, got: u64) -> Result<()> {
    let expected = newest.total_rows();
    if got == expected {
        return Ok(());
    }
    let what = format!(
        "table `{}`: the parts of the dump must hold {expected} rows together: got {got}",
        newest.name
    );
    Err(Error::corrupt_dump(dump.path.join(MANIFEST), what))
}

/// Which files of tables are read.
#[derive(Clone, Copy)]
enum Files {
    /// Those with rows; of these the keys alone if not `with_values`.
    Rows { with_values: bool },
    /// Those with keys that were removed.
    Removed,
    /// Those with keys that have no row.
    Sights,
}

/// Reads files of all tables. Calls `take` with the index of a table and records of it that this rank owns.
fn read_all<'a>(
    loads: &'a [TableLoad<'a>],
    which: Files,
    ranks: Option<&Ranks>,
    mut take: impl FnMut(usize, Records) -> Result<()>,
) -> Result<()> {
    // Ranks may have their targets in other orders.
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_unstable_by_key(|&load| (&loads[load].entry.name, &loads[load].table));
    let mut files: Vec<(usize, &'a DataFile)> = Vec::new();
    for (place, &load) in order.iter().enumerate() {
        let of_table = match which {
            Files::Rows { .. } => &*loads[load].entry.shards,
            Files::Removed => &*loads[load].entry.removed,
            Files::Sights => loads[load].entry.sight_files(),
        };
        files.extend(of_table.iter().map(|file| (place, file)));
    }
    let sizes: Vec<u64> = files.iter().map(|(_, shard)| shard.bytes).collect();
    let (rank, world_size) = place_of(ranks);
    let own = files.drain(files_of_rank(&sizes, rank, world_size)).collect::<Vec<_>>();
    let parts = own.into_iter().map(|(place, shard)| {
        let reader = loads[order[place]].reader(shard, which)?;
        Ok(Part { table: place, reader })
    });
    let owners: Vec<_> = order.iter().map(|&load| loads[load].owners).collect();
    let mut take = |chunk: Chunk| take(order[chunk.table], chunk.records);
    for_each_chunk(Chunks::of(parts), RawChunk::decode, &owners, ranks, &mut take)
}

/// Loads all tables into fresh ones.
fn load_fresh(
    dump: &DumpReader,
    chain: &Chain,
    targets: &[Target],
    ranks: Option<&Ranks>,
) -> Result<Vec<Box<dyn Table>>> {
    let loads = chain.newest();
    let capacities = capacities(loads, targets, ranks)?;
    let made = dump.verify_others(loads, ranks).and_then(|()| {
        let all = loads.iter().zip(targets).zip(capacities);
        let fresh = all.map(|((load, target), capacity)| {
            load.check_capacity(load.entry.total_rows(), capacity)?;
            load.fresh(&*target.table)
        });
        fresh.collect::<Result<Vec<_>>>()
    });
    let mut fresh = agreed(ranks, 6, made)?;
    let mut num_rows = vec![0; fresh.len()];
    chain.read(true, ranks, |table, records| {
        num_rows[table] += records.keys.len();
        fresh[table].restore(records)
    })?;
    chain.check_rows(&num_rows, ranks)?;
    read_all(loads, Files::Sights, ranks, |table, sights| fresh[table].restore_sights(&sights))?;
    // This may fail on one rank alone, so nothing is exchanged after it.
    for ((load, table), expected) in loads.iter().zip(&fresh).zip(num_rows) {
        let got = table.len()?;
        if got != expected {
            return Err(load.keys_come_twice(format!("got {got}")));
        }
    }
    Ok(fresh)
}

/// Does all that may fail before a merge changes the first table: the whole dump is verified, its keys must be different ones, and there
/// must be room for them.
fn check_merge(dump: &DumpReader, chain: &Chain, targets: &[Target], ranks: Option<&Ranks>) -> Result<()> {
    let loads = chain.newest();
    let verified = dump
        .verify_others(&[], ranks)
        .and_then(|()| loads.iter().map(TableLoad::room_for_keys).collect::<Result<Vec<_>>>());
    let mut keys = agreed(ranks, 6, verified)?;
    let lens = targets.iter().map(|target| target.table.len().map(|len| len as u64));
    let lens = agreed(ranks, 9, lens.collect::<Result<Vec<_>>>())?;
    let lens = totals(loads, &lens, ranks, 10)?;
    let capacities = capacities(loads, targets, ranks)?;
    // Only where not all keys of the dump would fit, it matters how many of them are new.
    let fits = |number: usize| {
        let dumped = loads[number].entry.total_rows();
        loads[number].check_capacity(lens[number].saturating_add(dumped), capacities[number]).is_ok()
    };
    let mut num_new = vec![0u64; loads.len()];
    chain.read(false, ranks, |number, records| {
        memory::reserve(&mut keys[number], records.keys.len(), BUFFER)?;
        keys[number].extend(&records.keys);
        if !fits(number) {
            num_new[number] += num_absent(&*targets[number].table, &records.keys)?;
        }
        Ok(())
    })?;
    chain.check_rows(&keys.iter().map(Vec::len).collect::<Vec<_>>(), ranks)?;
    let num_new = totals(loads, &num_new, ranks, 11)?;
    for (number, load) in loads.iter().enumerate() {
        load.check_distinct(&mut keys[number])?;
        if num_new[number] > 0 {
            load.check_capacity(lens[number].saturating_add(num_new[number]), capacities[number])?;
        }
    }
    Ok(())
}

/// Returns how many of these keys have no row.
fn num_absent(table: &dyn Table, keys: &[Key]) -> Result<u64> {
    let mut rows = memory::filled(0.0, keys.len() * table.config().dim, BUFFER)?;
    let mut found = memory::filled(false, keys.len(), BUFFER)?;
    table.find(keys, &mut rows, &mut found)?;
    Ok(found.iter().filter(|found| !**found).count() as u64)
}

/// Writes the records of all tables into the targets.
fn merge(chain: &Chain, targets: &mut [Target], ranks: Option<&Ranks>) -> Result<()> {
    let mut begun = chain.newest().iter().zip(targets.iter_mut());
    let begun = begun.try_for_each(|(load, target)| load.begin_merge(&mut *target.table));
    agreed(ranks, 7, begun)?;
    chain.read(true, ranks, |table, records| targets[table].table.restore(records))
}

/// What one table takes from the dump; it exists if the two go together.
struct TableLoad<'a> {
    dump: &'a DumpReader,
    entry: &'a TableEntry,
    /// Name of the table that takes the rows.
    table: String,
    /// The rule of the table after the load.
    update: Option<Update>,
    /// The layout of its records after the load.
    layout: RecordLayout,
    /// The values of a record before its fields are read.
    first: Vec<f32>,
    /// Whether the states come from the dump.
    states: bool,
    /// The columns that come from the dump.
    columns: Vec<Column>,
    /// Whether policies of the table count steps from that of the dump.
    takes_step: bool,
    /// Whether the table removes rows to make room.
    evicts: bool,
    owners: Option<Owners>,
}

impl<'a> TableLoad<'a> {
    /// `tables`: of a part of the dump.
    fn new(
        dump: &'a DumpReader,
        tables: &'a [TableEntry],
        target: &Target,
        options: &LoadOptions,
    ) -> Result<TableLoad<'a>> {
        let mismatch = |what: String| Error::dump_mismatch(&dump.path, what);
        let (name, table) = (target.name, &*target.table);
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
        let first = layout.first_record();
        let (table, config) = (table.config().name.clone(), table.config());
        let is_same = |scores: &ScoreEntry| {
            config.eviction.is_some_and(|eviction| eviction.score.is_same_kind(scores.score))
        };
        // Scores and ages count the steps of the dumped table. Rows that stay in a merge count other steps.
        let is_taken = |column: &Column| match column {
            _ if !replaces_all => false,
            Column::Scores => entry.scores.as_ref().is_some_and(is_same),
            Column::Ages => config.time_to_live.is_some(),
        };
        let columns: Vec<Column> = entry.columns().into_iter().filter(is_taken).collect();
        // A merge leaves a table its own counts of keys, which it may have without having rows.
        let takes_sights =
            options.mode == LoadMode::Replace && entry.sights.is_some() && config.admission.is_some();
        let takes_step = takes_sights || !columns.is_empty();
        let states = dumped.is_some();
        let evicts = config.eviction.is_some();
        Ok(TableLoad {
            dump,
            entry,
            table,
            update,
            layout,
            first,
            states,
            columns,
            takes_step,
            evicts,
            owners,
        })
    }

    /// Whether the table has all that the dump has, and nothing else.
    fn is_whole(&self) -> bool {
        self.layout.states().len() == self.entry.states.len() && (self.states || self.entry.states.is_empty())
    }

    fn report(&self, table: &dyn Table) -> LoadedTable {
        LoadedTable {
            name: self.entry.name.clone(),
            num_rows: self.entry.total_rows(),
            states: self.states,
            mixes_seeds: table.config().seed != self.entry.seed,
        }
    }

    /// The number of ranks that share the rows of the table.
    fn num_ranks(&self) -> usize {
        self.owners.filter(|owners| !owners.is_replicated()).map_or(1, |owners| owners.world_size)
    }

    /// Checks that a table takes so many rows, over all ranks. One rank may get more of them than its part. `capacity`: that of all ranks.
    fn check_capacity(&self, num_rows: u64, capacity: u64) -> Result<()> {
        let parts = self.dump.manifest().parts().flat_map(|part| part.tables);
        let num_files = parts.filter(|table| table.name == self.entry.name).map(|table| table.shards.len());
        // The parts of the ranks that wrote the dump were rounded up. A rank with rows has written a file at least.
        let rounded = num_files.max().unwrap_or(0).saturating_sub(1) as u64;
        // A table that removes rows gets rid of what is too much by itself.
        let (of_rows, least) = match self.evicts {
            true => ("half the rows", num_rows.div_ceil(2)),
            false => ("the rows", num_rows.saturating_sub(rounded)),
        };
        if least <= capacity {
            return Ok(());
        }
        let what = format!(
            "`max_capacity` must be at least {of_rows} after the load: expected {least}, got {capacity}"
        );
        Err(Error::dump_mismatch(&self.dump.path, self.of_table(what)))
    }

    /// Room for all keys that this rank takes of the dump, if the machine has it.
    fn room_for_keys(&self) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        let count = self.num_rows_of_rank();
        let no_memory =
            |_| Error::memory(count * KEY_BYTES, "the keys of a dump", io::ErrorKind::OutOfMemory.into());
        keys.try_reserve_exact(count).map_err(no_memory)?;
        Ok(keys)
    }

    fn num_rows_of_rank(&self) -> usize {
        (self.entry.total_rows() as usize).div_ceil(self.num_ranks())
    }

    fn check_distinct(&self, keys: &mut [Key]) -> Result<()> {
        keys.par_sort_unstable();
        match keys.array_windows().find(|[key, next]| key == next) {
            None => Ok(()),
            Some([key, _]) => Err(self.keys_come_twice(format!("{key} comes twice"))),
        }
    }

    fn keys_come_twice(&self, got: String) -> Error {
        let what = format!("its keys must be {} different ones: {got}", self.entry.total_rows());
        Error::corrupt_dump(self.dump.path.join(MANIFEST), self.of_table(what))
    }

    /// Makes an empty table for the rows.
    fn fresh(&self, table: &dyn Table) -> Result<Box<dyn Table>> {
        let mut fresh = table.fresh(self.update, self.num_rows_of_rank())?;
        fresh.set_seed(self.entry.seed);
        self.set_step(&mut *fresh)?;
        Ok(fresh)
    }

    /// Sets the step that policies count from, and the times of the dump's commits.
    fn set_step(&self, table: &mut dyn Table) -> Result<()> {
        let ages = self.entry.ages.as_ref().filter(|_| self.columns.contains(&Column::Ages));
        if let Some(ages) = ages {
            table.set_commit_times(&ages.times);
        }
        let step = self.entry.step().filter(|_| self.takes_step);
        step.map_or(Ok(()), |step| table.set_step(step))
    }

    fn begin_merge(&self, table: &mut dyn Table) -> Result<()> {
        if table.is_empty()? {
            table.set_seed(self.entry.seed);
            self.set_step(table)?;
        }
        if !Update::share_states(table.update_rule(), self.update.as_ref(), self.entry.dim) {
            table.set_update_rule(self.update, true)?;
        }
        Ok(())
    }

    /// Reads the records of a file of the table, in the table's layout. Without the states of the dump, records have their first ones.
    fn reader(&'a self, file: &'a DataFile, which: Files) -> Result<RecordReader<'a>> {
        let (fields, columns) = match which {
            Files::Rows { with_values: true } => {
                let fields = self.layout.fields();
                (if self.states { fields } else { &fields[..1] }, self.columns.clone())
            }
            Files::Rows { with_values: false } | Files::Removed => (&[][..], Vec::new()),
            Files::Sights => (&[][..], vec![Column::Scores]),
        };
        let file = self.dump.open_file(file, Some(&self.entry.name))?;
        let vocabulary = self.entry.vocabulary_size.map(|size| (size, &*self.entry.name));
        RecordReader::new(file, fields, self.entry.dtype, &self.first, columns, vocabulary)
    }

    fn of_table(&self, what: String) -> String {
        format!("table `{}`: {what}", self.entry.name)
    }
}
