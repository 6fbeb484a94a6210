//! Tables that are looked up together: the four calls of a training step on a GPU.
//!
//! The results are those of `sok_core::host::group`. A call enqueues work on the framework's stream and returns. The device finds
//! which pushes a ticket names, and writes it to memory that the host reads, at the latest when the next ticket comes.

#![allow(unsafe_code)]

mod absent;
mod calls;
mod commit;
pub mod general;
mod lookup;
mod missed_steps;
pub mod optimizer;
mod push;
pub mod sharded;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use sok_core::contract::binding::Binding;
use sok_core::contract::gradients::Keep;
use sok_core::contract::group::Group;
use sok_core::contract::table::TableConfig;
use sok_core::contract::ticket::{PushRing, RING};
use sok_core::error::{Error, Result};
use sok_core::policy::commits::BEFORE_FIRST_COMMIT;

use crate::abi::{
    self, COUNTS_WORDS, EXPONENTS, FAULT_WORDS, FaultKind, PREPARED_WORDS, REPORT_WORDS, RESOLVED_WORDS,
    Side, word_of,
};
use crate::device::Device;
use crate::gpu_table::sweep::SweepMemory;
use crate::gpu_table::uses::{InProgress, SortedIds};
use crate::gpu_table::{GpuTable, no_place};
use crate::memory::{Buffer, Shared};
use crate::peers::{Peers, Window, Windows};
use crate::step::{Saved, Workspace};

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
    /// The keys that other ranks read, and the rows that they write.
    window: Option<Window>,
    /// Whether a commit has counted the use of its rows.
    is_counted: AtomicBool,
    /// Whether a commit has inserted keys of its candidates, as far as the host knows.
    is_admitted: AtomicBool,
    /// Whether its rows must stay, because its gradients may still come or wait for a commit.
    is_open: AtomicBool,
    /// Number of its pushes that are committed and not applied yet, as far as the host knows.
    num_unapplied: AtomicU32,
}

impl SavedLookup {
    fn new(number: u64, saved: Saved) -> SavedLookup {
        SavedLookup {
            number,
            saved,
            sides: Mutex::default(),
            window: None,
            is_counted: AtomicBool::new(false),
            is_admitted: AtomicBool::new(false),
            is_open: AtomicBool::new(true),
            num_unapplied: AtomicU32::new(0),
        }
    }

    /// Whether this is the first time that a commit counts the use of its rows.
    fn count_once(&self) -> bool {
        !self.is_counted.swap(true, Relaxed)
    }

    /// Whether a commit may insert keys of the lookup.
    fn has_candidates(&self) -> bool {
        self.saved.has_candidates() && !self.is_admitted.load(Relaxed)
    }

    fn sides(&self) -> MutexGuard<'_, Vec<Side>> {
        self.sides.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl InProgress for SavedLookup {
    fn number(&self) -> u64 {
        self.number
    }

    fn ids(&self, number: usize, generation: u64) -> Option<SortedIds> {
        let is_used = self.is_open.load(Relaxed) || self.num_unapplied.load(Relaxed) > 0;
        let is_live = is_used && self.saved.generations.contains(&(number, generation));
        let sorted = if is_live { self.saved.sorted_of(number) } else { None };
        // After a commit has decided on the candidates, all numbers are those of records.
        let end = |ids: &SortedIds| if self.is_admitted.load(Relaxed) { u32::MAX } else { ids.end };
        sorted.map(|ids| SortedIds { end: end(&ids), ..ids })
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
    /// The lookups of the pushes whose rows must stay.
    lookups: Vec<Arc<SavedLookup>>,
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
    /// The accumulated gradients of earlier steps, and of the last commit of several pushes.
    combined: Option<Combined>,
    /// Number of the last commit, if the host has not read its report yet.
    unseen: Option<u64>,
    /// The only push that it may name.
    unseen_push: Option<u64>,
    /// An error of that report which nobody has heard of.
    unheard: Option<Error>,
    next_commit: u64,
    /// Number of the newest commit whose ticket is known to be valid, as policies count commits.
    num_commits: u64,
    /// By table: number of ids looked up to insert since the last commit.
    ids_since: Vec<u64>,
    sweep_memory: SweepMemory,
    /// `Report` of the last commit. Its counts are by descriptor.
    report: Shared,
    /// `Resolved` of the last commit.
    resolved: Buffer<u32>,
    /// `Prepared` of the step, by optimizer.
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
    /// The newest steps, unless they update the rows with gradients alone.
    missed: Option<missed_steps::MissedSteps>,
    /// Of an optimizer without a formula.
    pieces: general::Pieces,
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
        let workspace = Workspace::new(device, &tables)?;
        // An apply without a commit names no push.
        let resolved = Buffer::new(context, RESOLVED_WORDS)?;
        resolved.write(word_of!(Resolved, is_due), &[1])?;
        Ok(GpuGroup {
            binding: None,
            next_lookup: 1,
            lookups: VecDeque::new(),
            by_address: HashMap::new(),
            ring: PushRing::of(tables.iter().map(|table| &*table.config.name)),
            pushes_without_optimizer: 0,
            committed: Committed::Nothing,
            missed: None,
            pieces: general::Pieces::default(),
            carried: Vec::new(),
            combined: None,
            unseen: None,
            unseen_push: None,
            unheard: None,
            next_commit: 1,
            num_commits: BEFORE_FIRST_COMMIT,
            ids_since: vec![0; num_tables],
            sweep_memory: SweepMemory::default(),
            report: Shared::new(context, REPORT_WORDS + 2 * COUNTS_WORDS * num_tables)?,
            resolved,
            prepared: Buffer::new(context, workspace.num_optimizers() * PREPARED_WORDS)?,
            workspace,
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

    /// Returns an error that a kernel has reported, and clears it. The steps in progress have ended then. Does not wait for the device.
    pub fn take_fault(&mut self) -> Option<Error> {
        let fault = &self.workspace.fault;
        let kind = fault.get(word_of!(Fault, kind));
        if kind == FaultKind::None as u32 {
            return None;
        }
        let (table, id) = (fault.get(word_of!(Fault, table)) as usize, fault.get_wide(word_of!(Fault, id)));
        (0..FAULT_WORDS).for_each(|word| fault.set(word, 0));
        self.abandon_steps();
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

    /// Keeps pushes that were committed until they are applied.
    fn carry(&mut self, taken: Vec<(f32, Push)>) {
        for (_, push) in &taken {
            push.lookup.num_unapplied.fetch_add(1, Relaxed);
        }
        self.carried.extend(taken);
    }

    /// Drops the pushes that were committed, which are applied or dropped.
    fn drop_carried(&mut self) {
        for (_, push) in std::mem::take(&mut self.carried) {
            push.lookup.num_unapplied.fetch_sub(1, Relaxed);
            self.reuse(push);
        }
    }

    /// Drops lookups of combined pushes, whose rows need not stay any more.
    fn drop_combined(&mut self, lookups: Vec<Arc<SavedLookup>>) {
        for lookup in lookups {
            lookup.num_unapplied.fetch_sub(1, Relaxed);
            self.reuse_lookup(lookup);
        }
    }

    fn reuse_lookup(&mut self, lookup: Arc<SavedLookup>) {
        let Some(lookup) = Arc::into_inner(lookup) else { return };
        self.reuse_window(lookup.window);
        self.workspace.give_back(lookup.saved.memory);
    }

    fn reuse_window(&mut self, window: Option<Window>) {
        if let (Some(windows), Some(window)) = (&mut self.windows, window) {
            windows.give_back(window);
        }
    }
}
