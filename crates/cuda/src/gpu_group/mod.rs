//! Tables that are looked up together: the four calls of a training step on a GPU.
//!
//! The results are those of `sok_core::host::group`. A call enqueues work on the framework's stream and returns. The device finds
//! which pushes a ticket names, and writes it to memory that the host reads, at the latest when the next ticket comes.

#![allow(unsafe_code)]

mod absent;
mod calls;
mod commit;
pub mod optimizer;
mod push;
pub mod sharded;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
use sok_core::contract::binding::Binding;
use sok_core::contract::gradients::Keep;
use sok_core::contract::group::Group;
use sok_core::contract::table::{Insertion, Outcomes, TableConfig};
use sok_core::contract::ticket::{PushRing, RING};
use sok_core::error::{Error, Result};

use crate::abi::{
    self, COUNTS_WORDS, EXPONENTS, FAULT_WORDS, FaultKind, PREPARED_WORDS, REPORT_WORDS, RESOLVED_WORDS,
    Side, TableCounts, word_of,
};
use crate::device::{Device, Stream, driver_error};
use crate::gpu_table::sweep::{SweepMemory, Sweeps};
use crate::gpu_table::uses::{InProgress, SortedIds};
use crate::gpu_table::{GpuTable, no_place};
use crate::memory::{Buffer, Shared, read};
use crate::peers::{Peers, Window, Windows};
use crate::step::{AbsentIds, Feature, KeyType, Remote, Saved, Started, Workspace};

use absent::{Absent, Inputs, KnownRecords};
pub use push::{LookupNumber, OutputGradients};

/// The gradients of a lookup, until they are applied or dropped.
struct Push {
    lookup: Arc<SavedLookup>,
    /// By feature: address of its gradients.
    rows: Vec<u64>,
    /// By feature: what its gradients are multiplied by. Empty if that is 1, or if the device knows it.
    factors: Vec<f32>,
    /// The memory of `rows`, if it is not the framework's.
    copy: Option<Buffer<u32>>,
    /// The merged gradients, if they have been merged.
    sums: Option<Buffer<u32>>,
    /// Memory for the merged gradients that other ranks read.
    window: Option<Window>,
    /// Whether `sums` or `window` has the merged gradients.
    is_merged: bool,
    _keep: Option<Keep>,
}

/// A lookup to which gradients may come.
struct SavedLookup {
    number: u64,
    saved: Saved,
    /// The sides that were last written to the device, those of a push.
    sides: Mutex<Vec<Side>>,
    absent: Mutex<Absent>,
    /// The keys that other ranks read, and the rows that they write.
    window: Option<Window>,
    /// Whether a commit has counted the use of its rows.
    is_counted: AtomicBool,
    /// Whether its gradients may still come and were not committed yet.
    is_open: AtomicBool,
}

impl SavedLookup {
    fn new(number: u64, saved: Saved) -> SavedLookup {
        SavedLookup {
            number,
            saved,
            sides: Mutex::default(),
            absent: Mutex::default(),
            window: None,
            is_counted: AtomicBool::new(false),
            is_open: AtomicBool::new(true),
        }
    }

    /// Whether this is the first time that a commit counts the use of its rows.
    fn count_once(&self) -> bool {
        !self.is_counted.swap(true, Relaxed)
    }

    fn absent(&self) -> MutexGuard<'_, Absent> {
        self.absent.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn sides(&self) -> MutexGuard<'_, Vec<Side>> {
        self.sides.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl InProgress for SavedLookup {
    fn ids(&self, number: usize, generation: u64) -> Vec<SortedIds> {
        let mut ids = Vec::new();
        let mut add = |saved: &Saved| {
            if saved.generations.contains(&(number, generation)) {
                ids.extend(saved.sorted_of(number).map(|(address, count)| SortedIds { address, count }));
            }
        };
        if self.is_open.load(Relaxed) {
            add(&self.saved);
            if let Absent::Inserted(lookup) = &*self.absent() {
                add(&lookup.saved);
            }
        }
        ids
    }
}

/// The pushes that are committed and not applied yet.
#[derive(Clone, Copy, Default, PartialEq)]
enum Committed {
    #[default]
    Nothing,
    /// The push with this number, which was the only pending one, if its ticket was valid and named it. `GpuGroup::carried`
    /// contains it as soon as the host knows that.
    Alone(u64),
    /// All of `GpuGroup::combined`.
    Combined,
}

/// The merged gradients of several pushes, as one push.
struct Combined {
    saved: Saved,
    sums: Buffer<u32>,
}

/// Sweeps of the tables of which a lookup has inserted too many keys.
struct SweepsOfTables {
    /// Index of each table, and how many rows are too many.
    tables: Vec<(usize, u64)>,
    sweeps: Sweeps,
}

/// Reads the counts of a table that a kernel has written, from a word on.
fn table_counts(from: &Shared, first: usize) -> TableCounts {
    TableCounts {
        taken: from.get(first + word_of!(TableCounts, taken)),
        pad: 0,
        distinct: from.get_wide(first + word_of!(TableCounts, distinct)),
        dropped: from.get_wide(first + word_of!(TableCounts, dropped)),
        unknown: from.get_wide(first + word_of!(TableCounts, unknown)),
    }
}

/// How the squared norms of all ranks are added.
struct SharedTotals {
    of: Arc<Peers>,
    peers: abi::Peers,
    norms: abi::SharedNorms,
    /// Number of the commit.
    commit: u64,
}

/// The tables of a layer on a GPU.
pub struct GpuGroup {
    tables: Vec<GpuTable>,
    workspace: Workspace,
    binding: Option<Binding>,
    next_lookup: u64,
    /// The newest saved lookups, oldest first.
    lookups: VecDeque<Arc<SavedLookup>>,
    /// Numbers of lookups by the address on the device that they were written to.
    by_address: HashMap<u64, u64>,
    /// Pushes that no ticket is known to have named.
    ring: PushRing<Push>,
    pushes_without_optimizer: u32,
    committed: Committed,
    /// Pushes, with their weights, that a ticket is known to have named, and that are not applied yet.
    carried: Vec<(f32, Push)>,
    /// Pushes of the keys that the commit in progress has inserted: the index of the push among those that are named, its weight, and the
    /// push of its absent keys.
    inserted: Vec<(usize, f32, Push)>,
    /// The accumulated gradients of earlier steps, and of the last commit of several pushes.
    combined: Option<Combined>,
    /// Number of the last commit, if the host has not read its report yet.
    unseen: Option<u64>,
    /// An error of that report which nobody has heard of.
    unheard: Option<Error>,
    next_commit: u64,
    /// By table: number of ids looked up to insert since the last commit.
    ids_since: Vec<u64>,
    /// `TableCounts` of each table before the last lookup that might insert too many keys; then those after it; then the number of such
    /// lookups so far.
    counts: Shared,
    num_noted: u64,
    /// Memory of sweeps, for later ones.
    sweep_memory: Option<SweepMemory>,
    /// Recorded after the sweeps of a lookup.
    swept: CudaEvent,
    /// `Report` of the last commit.
    report: Shared,
    /// `Resolved` of the last commit.
    resolved: Buffer<u32>,
    /// `Prepared` of the step.
    prepared: Buffer<u32>,
    /// Not 0 if a gradient of the push is not finite.
    is_bad: Buffer<u32>,
    /// Squared norms by table and exponent, then a float64 for each table.
    totals: Buffer<u64>,
    /// By table: the squared norm of its gradients.
    norms: Buffer<f32>,
    /// By table: the factor that clips by its norm.
    factors: Buffer<f32>,
    /// The squared norm of all gradients of an optimizer, in its first group.
    norm: Buffer<f64>,
    /// Memory of one record, for updates of records that are gone.
    nowhere: Buffer<u32>,
    /// Of ranks that share tables: where merged gradients go, which their owners read.
    windows: Option<Windows>,
    /// Of ranks that share tables.
    shared_totals: Option<SharedTotals>,
}

impl GpuGroup {
    /// Creates a group of empty tables.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration or more than 32 distinct dims, [`Error::Device`] without enough memory.
    pub fn new(device: &Arc<Device>, configs: Vec<TableConfig>) -> Result<GpuGroup> {
        let tables = configs.into_iter().map(|c| GpuTable::new(device, c)).collect::<Result<Vec<_>>>()?;
        GpuGroup::with_tables(device, tables)
    }

    /// Creates a group of these tables.
    ///
    /// # Errors
    /// [`Error::Argument`] for more than 32 distinct dims, [`Error::Device`] without enough memory.
    pub fn with_tables(device: &Arc<Device>, tables: Vec<GpuTable>) -> Result<GpuGroup> {
        let (context, num_tables) = (&device.context, tables.len());
        let widest = tables.iter().map(|t| t.config.dim).max().unwrap_or(1);
        Ok(GpuGroup {
            workspace: Workspace::new(device, &tables)?,
            binding: None,
            next_lookup: 1,
            lookups: VecDeque::new(),
            by_address: HashMap::new(),
            ring: PushRing::default(),
            pushes_without_optimizer: 0,
            committed: Committed::Nothing,
            carried: Vec::new(),
            inserted: Vec::new(),
            combined: None,
            unseen: None,
            unheard: None,
            next_commit: 1,
            ids_since: vec![0; num_tables],
            counts: Shared::new(context, 2 * COUNTS_WORDS * num_tables + 2)?,
            num_noted: 0,
            sweep_memory: None,
            swept: context
                .new_event(Some(CU_EVENT_DISABLE_TIMING))
                .map_err(driver_error("making an event"))?,
            report: Shared::new(context, REPORT_WORDS + COUNTS_WORDS * num_tables)?,
            resolved: Buffer::new(context, RESOLVED_WORDS)?,
            prepared: Buffer::new(context, PREPARED_WORDS)?,
            is_bad: Buffer::new(context, 1)?,
            totals: Buffer::new(context, num_tables * (EXPONENTS + 1))?,
            norms: Buffer::new(context, num_tables)?,
            factors: Buffer::new(context, num_tables)?,
            norm: Buffer::new(context, 1)?,
            nowhere: Buffer::new(context, 16 * (widest + 4))?,
            windows: None,
            shared_totals: None,
            tables,
        })
    }

    /// Returns a table by its index in the group.
    pub fn gpu_table(&self, number: usize) -> &GpuTable {
        &self.tables[number]
    }

    /// Returns an error that a kernel has reported, and clears it. Does not wait for the device.
    pub fn take_fault(&mut self) -> Option<Error> {
        let fault = &self.workspace.fault;
        let kind = fault.get(word_of!(Fault, kind));
        if kind == FaultKind::None as u32 {
            return None;
        }
        let (table, id) = (fault.get(word_of!(Fault, table)) as usize, fault.get_wide(word_of!(Fault, id)));
        (0..FAULT_WORDS).for_each(|word| fault.set(word, 0));
        let config = &self.tables.get(table)?.config;
        Some(match kind {
            _ if kind == FaultKind::OutsideVocabulary as u32 => Error::OutOfVocabulary {
                table: config.name.clone(),
                feature: None,
                id: id as i64,
                last: config.vocabulary_size.unwrap_or_default().wrapping_sub(1),
            },
            _ if kind == FaultKind::BadSplits as u32 => Error::argument(format!(
                "row_splits of a call before, for table `{}`: they must start at 0, never fall and end at the number of ids. \
                 Wrong at row {id}",
                config.name
            )),
            _ if kind == FaultKind::NoPlace as u32 => no_place(&config.name),
            _ if kind == FaultKind::WrongLookup as u32 => Error::Ticket {
                tables: self.names(),
                what: "a gradient came with the number of another lookup than the device has. Nothing is known to be wrong before \
                       this step, which has used the wrong rows"
                    .into(),
            },
            kind => Error::Device(format!("a GPU has reported {kind}, which no kernel reports")),
        })
    }

    fn check_fault(&mut self) -> Result<()> {
        self.take_fault().map_or(Ok(()), Err)
    }

    /// As `check_fault`. A group that ranks share raises faults where all ranks hear of them: before a lookup or a commit.
    fn check_own_fault(&mut self) -> Result<()> {
        let is_shared = self.windows.is_some() || self.shared_totals.is_some();
        if is_shared { Ok(()) } else { self.check_fault() }
    }

    // ---- lookup

    /// Enqueues the lookup of all features of a layer's call. Returns the number of the lookup for `push`, or 0 without `save`.
    /// `number_to`: address on the device that takes the number.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, and [`Error::TableFull`] if the check mode is `Raise`: nothing has
    /// changed. [`Error::Device`] without enough memory: no row has changed, but a table that is near its `max_capacity` may have
    /// inserted the new keys. Errors that the device has found in earlier calls.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    pub unsafe fn lookup(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        stream: Stream,
    ) -> Result<u64> {
        // SAFETY: The caller guarantees it.
        unsafe { self.look_up(features, insertion, save, number_to, None, true, stream) }
    }

    /// As `lookup`. `remote`: completes the features on the device, if their numbers of ids are upper bounds. Then no table may refuse keys.
    /// `exceeds`: whether tables that remove rows may insert first.
    ///
    /// # Safety
    /// As `lookup`.
    #[expect(clippy::too_many_arguments, reason = "all of them are chosen apart")]
    unsafe fn look_up(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        remote: Option<&Remote>,
        exceeds: bool,
        stream: Stream,
    ) -> Result<u64> {
        self.check_own_fault()?;
        for feature in features {
            feature.validate()?;
            if feature.table >= self.tables.len() {
                return Err(Error::argument("no such table in the group"));
            }
        }
        self.workspace.enter(stream)?;
        let insert = insertion == Insertion::AtLookup;
        let mut inserts = vec![insert; self.tables.len()];
        let mut exceeding = Vec::new();
        if insert {
            exceeding = self.make_room(features, None, &mut inserts, save, exceeds, stream)?;
        }
        // A lookup that inserts but is not saved counts its new keys here, because the device counts hits only of saved lookups.
        let counts_apart = insert && !save;
        if counts_apart {
            self.workspace.device.synchronize()?;
            self.tables.iter_mut().try_for_each(GpuTable::count_steps)?;
        }
        let number = if save { self.next_lookup } else { 0 };
        let to = number_to.map(|to| (to, number));
        let inputs = (insertion == Insertion::AtCommit && save)
            .then(|| Inputs::keep(&mut self.workspace, &self.tables, features, stream))
            .transpose()?;
        let absent = AbsentIds {
            count: inputs.as_ref().map_or(0, Inputs::count_address),
            known: 0,
            are_unknown: inputs.is_none() && !insert,
        };
        let (workspace, tables) = (&mut self.workspace, &mut self.tables);
        let mut started = workspace.start(tables, features, &inserts, absent, save, to, None, stream)?;
        if let Some(remote) = remote {
            workspace.connect(&mut started, remote, save, stream)?;
        }
        if !exceeding.is_empty() {
            workspace.note_counts(self.counts.address(), 0, 0, stream)?;
        }
        workspace.find(&started, tables, &inserts, stream)?;
        if !exceeding.is_empty() {
            self.num_noted += 1;
            let [after, flag] =
                [1, 2].map(|n| self.counts.address() + (4 * n * COUNTS_WORDS * tables.len()) as u64);
            workspace.note_counts(after, flag, self.num_noted, stream)?;
        }
        if features.iter().any(|f| f.is_silent) {
            workspace.find_silent(&started, stream)?;
        }
        let sweeps = self.start_sweeps(&started, &exceeding, save, stream)?;
        // The host removes rows meanwhile.
        self.workspace.sort_ids(&started, stream)?;
        self.workspace.write_rows(&started, features, stream)?;
        if !self.end_sweeps(sweeps, stream)? {
            self.workspace.device.synchronize()?;
            self.undo_insertions(features, &inserts, save)?;
            self.workspace.forget(started);
            // SAFETY: The caller guarantees it.
            return unsafe { self.look_up(features, insertion, save, number_to, remote, false, stream) };
        }
        let (workspace, tables) = (&mut self.workspace, &mut self.tables);
        if !save {
            workspace.count_inference(tables, &started, stream)?;
        }
        let saved = workspace.end(started, tables, features);
        if let Some(inputs) = &inputs {
            inputs.keep_records(self.workspace.found_records(), stream)?;
        }
        self.tables.iter_mut().for_each(GpuTable::reserve_soon);
        let mut takes_part = vec![false; self.tables.len()];
        features.iter().for_each(|f| takes_part[f.table] = true);
        self.tables.iter_mut().zip(takes_part).filter(|(_, takes)| *takes).for_each(|(t, _)| t.count_call());
        if counts_apart {
            self.workspace.device.synchronize()?;
            for table in &mut self.tables {
                let inserted = table.count_inserted()?;
                table.note(Outcomes { inserted, ..Outcomes::default() });
            }
        }
        if let Some(saved) = saved {
            let lookup = SavedLookup::new(number, saved);
            if let Some(inputs) = inputs {
                *lookup.absent() = Absent::Waiting(inputs);
            }
            self.save(lookup);
            number_to.map(|to| self.by_address.insert(to, number));
        }
        Ok(number)
    }

    /// Makes room for all keys that the call may insert. If a table might have to refuse keys, waits for the device, inserts the
    /// keys that fit, in their order, and resets `inserts` of the table, so that the lookup inserts none. Returns the tables of which the
    /// lookup may insert too many keys.
    ///
    /// `known`: ids that have a record there are not inserted. `exceeds`: whether tables that remove rows may insert first.
    fn make_room(
        &mut self,
        features: &[Feature],
        known: Option<&KnownRecords>,
        inserts: &mut [bool],
        save: bool,
        exceeds: bool,
        stream: Stream,
    ) -> Result<Vec<usize>> {
        let mut ids = vec![0u64; self.tables.len()];
        features.iter().filter(|f| !f.is_silent).for_each(|f| ids[f.table] += f.ids.len as u64);
        let new = |tables: &[GpuTable], t: usize| tables[t].max_new(ids[t]);
        let soon = |tables: &[GpuTable], t: usize| tables[t].max_new_soon(ids[t]);
        let may_exceed: Vec<bool> =
            self.tables.iter().zip(&ids).map(|(table, ids)| exceeds && table.may_exceed(*ids)).collect();
        let refuses = |tables: &[GpuTable], t: usize| !may_exceed[t] && tables[t].may_refuse(new(tables, t));
        let all = 0..self.tables.len();
        let is_tight =
            |tables: &[GpuTable], t: usize| !tables[t].has_room(new(tables, t)) || refuses(tables, t);
        if all.clone().any(|t| is_tight(&self.tables, t)) {
            self.settle()?;
            let is_tight_soon =
                |t: usize| !self.tables[t].has_room(soon(&self.tables, t)) || refuses(&self.tables, t);
            if all.clone().any(is_tight_soon) {
                self.workspace.device.synchronize()?;
                self.tables.iter_mut().try_for_each(GpuTable::learn)?;
                for t in all.clone() {
                    let (most, soon) = (new(&self.tables, t), soon(&self.tables, t));
                    if !self.tables[t].has_room(soon) && !refuses(&self.tables, t) {
                        match self.tables[t].make_room(most, soon, stream) {
                            // There may be memory for fewer rows.
                            Err(_) if may_exceed[t] => {
                                return self.make_room(features, known, inserts, save, false, stream);
                            }
                            made => made?,
                        }
                    }
                }
                let full: Vec<usize> =
                    all.clone().filter(|&t| ids[t] > 0 && refuses(&self.tables, t)).collect();
                if !full.is_empty() && may_exceed.contains(&true) {
                    // What `admit` does could not be undone.
                    return self.make_room(features, known, inserts, save, false, stream);
                }
                self.admit(features, known, &full, inserts, save)?;
            }
        }
        let mut exceeding = Vec::new();
        for t in all {
            if inserts[t] {
                if may_exceed[t] && ids[t] > 0 && self.tables[t].may_refuse(new(&self.tables, t)) {
                    exceeding.push(t);
                }
                self.tables[t].expect(ids[t]);
                self.ids_since[t] += ids[t];
            }
        }
        Ok(exceeding)
    }

    /// Enqueues choosing the rows to remove from tables of which a lookup has inserted too many keys. Waits until they are inserted.
    fn start_sweeps(
        &mut self,
        started: &Started,
        exceeding: &[usize],
        save: bool,
        stream: Stream,
    ) -> Result<Option<SweepsOfTables>> {
        if exceeding.is_empty() {
            return Ok(None);
        }
        self.wait_for(&self.counts, 2 * COUNTS_WORDS * self.tables.len(), self.num_noted)?;
        // The report of the last commit has come before: which lookups are closed, and the step.
        self.settle_for_tables();
        let (mut tables, mut planned) = (Vec::new(), Vec::new());
        for &t in exceeding {
            let taken = self.counts_noted(self.tables.len() + t).taken;
            let table = &mut self.tables[t];
            let excess = table.excess(taken);
            if excess > 0 {
                table.count_taken(taken, save);
                tables.push((t, excess));
                planned.extend(table.plan_sweep(
                    0,
                    started.records_of(t),
                    Some(table.found_out_of_vocabulary()),
                )?);
            } else {
                table.max_taken = taken.into();
            }
        }
        if planned.is_empty() {
            return Ok(None);
        }
        let sweeps = Sweeps::start(&self.workspace.device, self.sweep_memory.take(), planned, stream)?;
        stream.record(&self.swept)?;
        Ok(Some(SweepsOfTables { tables, sweeps }))
    }

    /// Removes the chosen rows. Returns whether enough may go; if not, none goes.
    fn end_sweeps(&mut self, sweeps: Option<SweepsOfTables>, stream: Stream) -> Result<bool> {
        let Some(SweepsOfTables { tables, mut sweeps }) = sweeps else { return Ok(true) };
        self.swept.synchronize().map_err(driver_error("waiting for the GPU"))?;
        sweeps.read()?;
        let mut all = tables.iter().enumerate();
        let may_go = all.all(|(number, (_, excess))| sweeps.num_removable(number) >= *excess);
        if may_go {
            let mut going = Vec::new();
            for (number, (t, _)) in tables.iter().enumerate() {
                match self.tables[*t].begin_going(&sweeps, number) {
                    Ok(of_table) => going.push(of_table),
                    Err(error) => {
                        let begun = tables.iter().zip(&going);
                        begun.for_each(|((t, _), going)| self.tables[*t].cancel_going(going));
                        return Err(error);
                    }
                }
            }
            sweeps.erase(stream)?;
            for (number, ((t, _), going)) in tables.into_iter().zip(going).enumerate() {
                let evicted = self.tables[t].end_going(&sweeps, number, going, stream)?;
                self.tables[t].note(Outcomes { evicted, ..Outcomes::default() });
            }
        }
        self.sweep_memory = Some(sweeps.into_memory());
        Ok(may_go)
    }

    /// Removes the keys that the last lookup has inserted. The device must be idle.
    fn undo_insertions(&mut self, features: &[Feature], inserts: &[bool], save: bool) -> Result<()> {
        for (t, _) in inserts.iter().enumerate().filter(|(_, inserts)| **inserts) {
            let keys = self.active_keys(features, None, t)?;
            let (before, after) = (self.counts_noted(t), self.counts_noted(self.tables.len() + t));
            self.tables[t].undo_insertions(&keys, before, after.taken, save)?;
        }
        Ok(())
    }

    fn counts_noted(&self, number: usize) -> TableCounts {
        table_counts(&self.counts, number * COUNTS_WORDS)
    }

    /// For tables that might have to refuse keys: inserts the keys that fit, and resets `inserts`. The device must be idle.
    fn admit(
        &mut self,
        features: &[Feature],
        known: Option<&KnownRecords>,
        full: &[usize],
        inserts: &mut [bool],
        save: bool,
    ) -> Result<()> {
        if full.is_empty() {
            return Ok(());
        }
        self.tables.iter_mut().try_for_each(GpuTable::count_steps)?;
        let mut new = Vec::new();
        for &t in full {
            let keys = self.active_keys(features, known, t)?;
            let room = self.tables[t].room(keys.len(), 0)?;
            let absent = self.tables[t].absent(&room, &keys)?;
            let num_new = absent.len() as u64;
            // A commit has removed rows before.
            let table = &mut self.tables[t];
            let sweeps = match known {
                None => table.sweep_for(num_new, room.used(keys.len()))?,
                Some(_) => None,
            };
            table.check_capacity(num_new, sweeps.as_ref().map_or(0, |sweeps| sweeps.num_removable(0)))?;
            new.push((room, absent, sweeps));
        }
        for (&t, (room, new, sweeps)) in full.iter().zip(new) {
            let outcomes = self.tables[t].admit(&room, &new, sweeps)?;
            self.tables[t].note(outcomes);
            if save {
                self.tables[t].take_hits(outcomes.inserted);
            }
            inserts[t] = false;
        }
        Ok(())
    }

    /// Returns the keys of a table that a lookup with insertion would insert if they are missing, in the order of the ids. `known`:
    /// ids with a record there are left out. The device must be idle.
    fn active_keys(
        &self,
        features: &[Feature],
        known: Option<&KnownRecords>,
        table: usize,
    ) -> Result<Vec<u64>> {
        let mut keys = Vec::new();
        let of_table = |f: &Feature| f.table == table && !f.is_silent;
        for (number, feature) in features.iter().enumerate().filter(|(_, f)| of_table(f)) {
            let records = known.map(|known| known.of_feature(number));
            let is_known = |i: usize| records.is_some_and(|records| records[i] != 0);
            let active = self.active_keys_of(feature)?.into_iter();
            keys.extend(active.filter(|(i, _)| !is_known(*i)).map(|(_, key)| key));
        }
        Ok(keys)
    }

    /// Returns the keys of a feature that a lookup with insertion would insert if they are missing, with their positions.
    fn active_keys_of(&self, feature: &Feature) -> Result<Vec<(usize, u64)>> {
        let (context, ids) = (&self.workspace.device.context, feature.ids);
        let keys: Vec<u64> = match ids.key_type {
            KeyType::Wide => read::<u64>(context, ids.address, ids.len)?,
            KeyType::Signed => {
                read::<i32>(context, ids.address, ids.len)?.into_iter().map(|k| i64::from(k) as u64).collect()
            }
            KeyType::Unsigned => {
                read::<u32>(context, ids.address, ids.len)?.into_iter().map(u64::from).collect()
            }
            KeyType::Words => {
                let (low, high) =
                    (read::<u32>(context, ids.address, ids.len)?, read::<u32>(context, ids.high, ids.len)?);
                low.into_iter().zip(high).map(|(l, h)| u64::from(l) | u64::from(h) << 32).collect()
            }
        };
        let weights = feature.weights.map(|w| read::<f32>(context, w, ids.len)).transpose()?;
        let config = &self.tables[feature.table].config;
        let is_active = |&(i, key): &(usize, u64)| {
            feature.padding_key != Some(key)
                && config.is_in_vocabulary(key)
                && weights.as_ref().is_none_or(|w| w[i] != 0.0)
        };
        Ok(keys.into_iter().enumerate().filter(is_active).collect())
    }

    /// Adds a saved lookup, and drops the oldest one if there are too many.
    fn save(&mut self, saved: SavedLookup) {
        self.next_lookup += 1;
        let saved = Arc::new(saved);
        for (number, _) in &saved.saved.generations {
            let table = &mut self.tables[*number];
            table.newest_lookup = saved.number;
            if let Some(evictor) = &mut table.evictor {
                let lookup: Weak<SavedLookup> = Arc::downgrade(&saved);
                evictor.add_lookup(*number, lookup);
            }
        }
        self.lookups.push_back(saved);
        if self.lookups.len() as u64 > RING {
            self.forget_lookups(self.lookups[1].number);
        }
    }

    /// Drops the lookups older than `oldest`. Later lookups reuse their memory.
    fn forget_lookups(&mut self, oldest: u64) {
        while self.lookups.front().is_some_and(|l| l.number < oldest) {
            if let Some(lookup) = self.lookups.pop_front() {
                self.reuse_lookup(lookup);
            }
        }
        self.by_address.retain(|_, number| *number >= oldest);
        let carried = self.carried.iter().map(|(_, push)| push);
        let needed = self.ring.iter().chain(carried).map(|push| push.lookup.number);
        let oldest = needed.chain(self.lookups.front().map(|l| l.number)).min().unwrap_or(self.next_lookup);
        if self.combined.is_none() {
            self.tables.iter_mut().for_each(|t| t.forget_lookups(oldest));
        }
    }

    /// Drops a push. Later steps reuse its memory.
    fn reuse(&mut self, push: Push) {
        self.reuse_window(push.window);
        push.sums.into_iter().chain(push.copy).for_each(|memory| self.workspace.give_back(memory));
        self.reuse_lookup(push.lookup);
    }

    fn reuse_lookup(&mut self, lookup: Arc<SavedLookup>) {
        let Some(lookup) = Arc::into_inner(lookup) else { return };
        self.reuse_window(lookup.window);
        self.workspace.give_back(lookup.saved.memory);
        match lookup.absent.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Absent::Waiting(inputs) => self.workspace.give_back(inputs.memory),
            Absent::Inserted(lookup) => self.reuse_lookup(lookup),
            Absent::None => {}
        }
    }

    /// Forgets the newest saved lookup, because other ranks have refused it.
    fn undo_lookup(&mut self) {
        if let Some(lookup) = self.lookups.pop_back() {
            self.next_lookup = lookup.number;
            self.reuse_lookup(lookup);
        }
    }

    fn reuse_window(&mut self, window: Option<Window>) {
        if let (Some(windows), Some(window)) = (&mut self.windows, window) {
            windows.give_back(window);
        }
    }
}
