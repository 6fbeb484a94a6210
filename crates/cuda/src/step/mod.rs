//! The launches of a training step over the tables of a layer, on a framework's stream.
//!
//! In a steady step nothing waits for the device or copies to it. Descriptors travel in the parameters of launches. A grid is an
//! upper bound where only the device knows how much work there is. Memory of completed steps is reused by later ones.

#![allow(unsafe_code)]

mod admission;
mod at_owner;
mod backward;
mod changes;
mod distinct;
mod feature;
pub mod general;
mod given_scores;
mod lookup;
mod missed_steps;
mod places;
mod saved;
mod serving;
mod sort;
mod sort_plan;
mod update_once;
mod uses;

use std::cell::{Cell, OnceCell};
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
use cudarc::driver::{CudaEvent, CudaStream};
use sok_core::error::{Error, Result};
use sok_core::row_type::RowType;

use crate::abi::{self, *};
use crate::delivery::deliver;
use crate::device::{Device, Kernel, Stream, driver_error};
use crate::gpu_table::GpuTable;
use crate::gpu_table::record::RowKind;
use crate::memory::{Buffer, Shared, words};
use crate::nvrtc::Source;
use crate::profiler::Profiler;

pub use admission::AdmissionPart;
pub use at_owner::{NumberCopyKind, PooledGradients, shares_splits};
pub use backward::By;
pub use distinct::{Asking, KeysTo, When};
pub use feature::{Bags, Feature, Ids, KeyType, ScoreType, Scores};
pub use lookup::{LookupOptions, RowSource, Started};
pub use serving::{CopyKernel, Remote};

pub use saved::{Saved, SavedFeature};
pub use update_once::update_once;
pub use uses::Taking;

use places::BumpAllocator;
use sort::SortKernels;

/// Memory, streams and events that the steps of a group share.
pub struct Workspace {
    /// The device of all tables of the group.
    pub device: Arc<Device>,
    /// The rows of each kind of tables. Tables with the same rows and the same optimizer are of one kind. In the order of the optimizers, then
    /// of the codes of rows.
    rows: Vec<RowKind>,
    /// By optimizer: its kinds.
    kinds_of_optimizers: Vec<Range<usize>>,
    /// Whether rows and gradients outside of records have whole groups of four columns, as those have that ranks send each other.
    has_whole_quads: bool,
    /// By table: its kind.
    kinds: Vec<usize>,
    /// Descriptors of the tables; then, by table, that of its candidates.
    tables_on_device: Buffer<abi::Table>,
    scratch: Option<Buffer<u32>>,
    /// The second stream, on which ids are sorted.
    side: Arc<CudaStream>,
    /// Recorded on the framework's stream before a sort.
    fork: CudaEvent,
    /// Recorded on the second stream after a sort.
    join: CudaEvent,
    /// Recorded on the last stream when the framework changes to another.
    moved: CudaEvent,
    /// Whether a sort is on the second stream that the framework's stream has not waited for.
    is_forked: Cell<bool>,
    /// Recorded on the second stream after uses of rows were counted there.
    counted: CudaEvent,
    /// Whether the framework's stream has not waited for that.
    is_counting: Cell<bool>,
    /// By index in `SORT_ITEMS`.
    sort_kernels: [OnceCell<SortKernels>; SORT_ITEMS.len()],
    /// The stream of the last call.
    last: Option<Stream>,
    /// Memory of completed steps, for later ones.
    memories: Vec<Buffer<u32>>,
    /// The `Fault` that kernels write.
    pub fault: Shared,
    /// Whether one of the tables notes changes.
    notes_changes: bool,
    /// Whether the kernels that note changes and list them were loaded.
    is_ready_to_note: Cell<bool>,
    /// Measures the parts of steps.
    pub(crate) profiler: Profiler,
}

/// Returns the number of descriptors of these tables, those of their candidates included.
pub(crate) fn num_described(tables: &[GpuTable]) -> usize {
    let have_candidates = tables.iter().any(|table| table.candidates.is_some());
    if have_candidates { 2 * tables.len() } else { tables.len() }
}

/// Maximum number of rows of a kernel. The time that the compiler takes grows faster than their number.
const ROWS_OF_A_KERNEL: usize = 8;

/// Maximum number of buffers of completed steps that are kept for later ones.
const SPARE_MEMORIES: usize = 6;

impl Workspace {
    /// Creates the workspace of a group with these tables.
    ///
    /// # Errors
    /// [`Error::Argument`] for more than 32 kinds of tables, [`Error::Device`] if the device does not have enough memory.
    pub fn new(device: &Arc<Device>, tables: &[GpuTable]) -> Result<Workspace> {
        let context = &device.context;
        let kind_of = |table: &GpuTable| (table.config.optimizer, RowKind::of(&table.config));
        let mut all: Vec<(usize, RowKind)> = tables.iter().map(kind_of).collect();
        all.sort_unstable_by_key(|(optimizer, row)| (*optimizer, row.code()));
        all.dedup();
        if all.len() > 32 {
            return Err(Error::argument(format!(
                "the tables of a layer on a GPU have at most 32 different dims, types of rows and optimizers. Received: {}",
                all.len()
            )));
        }
        let position = |table| all.iter().position(|kind| *kind == kind_of(table)).unwrap_or_default();
        let kinds: Vec<usize> = tables.iter().map(position).collect();
        let num_optimizers = all.last().map_or(0, |(optimizer, _)| *optimizer) + 1;
        let first_of = |optimizer| all.partition_point(|(of, _)| *of < optimizer);
        let kinds_of_optimizers = (0..num_optimizers).map(|of| first_of(of)..first_of(of + 1)).collect();
        let failed = driver_error("making a stream");
        let event = || context.new_event(Some(CU_EVENT_DISABLE_TIMING)).map_err(&failed);
        Ok(Workspace {
            tables_on_device: Buffer::new(context, 2 * tables.len())?,
            scratch: None,
            // The sort has a high priority, because its launches are short and later launches wait for them.
            side: context.new_stream_with_priority(-5).map_err(&failed)?,
            fork: event()?,
            join: event()?,
            moved: event()?,
            is_forked: Cell::new(false),
            counted: event()?,
            is_counting: Cell::new(false),
            sort_kernels: Default::default(),
            last: None,
            memories: Vec::new(),
            fault: Shared::new(context, FAULT_WORDS)?,
            notes_changes: false,
            is_ready_to_note: Cell::new(false),
            profiler: Profiler::new(context),
            device: device.clone(),
            rows: all.into_iter().map(|(_, row)| row).collect(),
            kinds_of_optimizers,
            kinds,
            has_whole_quads: false,
        })
    }

    /// Creates the workspace of a group whose outputs and gradients have whole groups of four columns: `(bags, 4 * quads(dim))`.
    ///
    /// # Errors
    /// As `new`.
    pub fn of_whole_quads(device: &Arc<Device>, tables: &[GpuTable]) -> Result<Workspace> {
        Ok(Workspace { has_whole_quads: true, ..Workspace::new(device, tables)? })
    }

    /// Returns the rows of some kinds as template arguments of kernels. `arrays`: type of the framework's arrays that they read or write.
    fn row_list(&self, kinds: Range<usize>, arrays: RowType) -> String {
        let row = |row: &RowKind| if self.has_whole_quads { row.of_whole_quads() } else { *row };
        self.rows[kinds].iter().map(|of| row(of).code_with(arrays).to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Returns the kernels of a launch and the kinds that each processes. `name`: of the kernel for a list of rows. There are several
    /// if the group has many. They are compiled in parallel.
    fn kernels_by_kinds(
        &self,
        source: &Source,
        arrays: RowType,
        name: impl Fn(&str) -> String,
    ) -> Result<Vec<(Kernel, Range<usize>)>> {
        self.kernels_of_kinds(0..self.rows.len(), source, arrays, name)
    }

    /// As `kernels_by_kinds`, for some kinds.
    fn kernels_of_kinds(
        &self,
        kinds: Range<usize>,
        source: &Source,
        arrays: RowType,
        name: impl Fn(&str) -> String,
    ) -> Result<Vec<(Kernel, Range<usize>)>> {
        let starts = kinds.clone().step_by(ROWS_OF_A_KERNEL);
        let parts = starts.map(|start| start..kinds.end.min(start + ROWS_OF_A_KERNEL));
        let names: Vec<String> = parts.clone().map(|kinds| name(&self.row_list(kinds, arrays))).collect();
        Ok(self.device.kernels_apart(source, &names)?.into_iter().zip(parts).collect())
    }

    /// Returns the number of launches for the kinds of an optimizer.
    pub fn num_launches(&self, optimizer: usize) -> usize {
        self.kinds_of(optimizer).len().div_ceil(ROWS_OF_A_KERNEL)
    }

    /// Returns the kinds of the tables that an optimizer updates.
    fn kinds_of(&self, optimizer: usize) -> Range<usize> {
        self.kinds_of_optimizers.get(optimizer).cloned().unwrap_or_default()
    }

    /// Returns the number of optimizers that update the tables, that of the model among them.
    pub fn num_optimizers(&self) -> usize {
        self.kinds_of_optimizers.len()
    }

    /// Returns the parameter of a launch that processes these kinds.
    fn kinds_of_launch(&self, kinds: &Range<usize>) -> abi::Kinds {
        abi::Kinds { first: kinds.start as u32, has_others: (kinds.len() < self.rows.len()).into() }
    }

    /// Address of the table descriptors on the device, by table of the group.
    pub fn tables(&self) -> u64 {
        self.tables_on_device.address()
    }

    /// Number of bytes of device memory that is kept for later steps.
    pub fn num_bytes(&self) -> usize {
        self.memories.iter().chain(&self.scratch).map(Buffer::num_bytes).sum()
    }

    /// Selects the stream for the following work of the group. That work comes after all earlier work of the group, also if it was
    /// on another stream.
    ///
    /// # Errors
    /// [`Error::Device`] if the streams cannot be ordered.
    pub fn enter(&mut self, stream: Stream) -> Result<()> {
        self.enter_apply(stream)?;
        self.join_uses(stream)
    }

    /// As `enter`, for an apply. It runs beside the count of uses of its commit.
    ///
    /// # Errors
    /// As `enter`.
    pub fn enter_apply(&mut self, stream: Stream) -> Result<()> {
        self.device.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        if let Some(last) = self.last.filter(|last| *last != stream) {
            last.record(&self.moved)?;
            stream.wait(&self.moved)?;
        }
        self.last = Some(stream);
        Ok(())
    }

    /// Enqueues work of a later call on another stream than the group's, beside what that one does, with scratch memory of its own.
    ///
    /// # Errors
    /// Those of `enqueue`, and [`Error::Device`] if the device cannot be used.
    pub fn aside<T>(
        &mut self,
        scratch: &mut Option<Buffer<u32>>,
        enqueue: impl FnOnce(&mut Workspace) -> Result<T>,
    ) -> Result<T> {
        self.device.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        std::mem::swap(&mut self.scratch, scratch);
        // The sort of the last lookup is waited for by the group's stream alone.
        let is_forked = self.is_forked.take();
        let done = enqueue(self);
        self.is_forked.set(is_forked);
        std::mem::swap(&mut self.scratch, scratch);
        done
    }

    /// Makes the scratch memory of work that was done aside that of the next call. Returns the old one in its place.
    pub fn take_scratch(&mut self, scratch: &mut Option<Buffer<u32>>) {
        std::mem::swap(&mut self.scratch, scratch);
    }

    /// The stream of the last call.
    pub fn last_stream(&self) -> Option<Stream> {
        self.last
    }

    /// Makes later work on the stream wait for the count of uses.
    ///
    /// # Errors
    /// [`Error::Device`] if the streams cannot be ordered.
    pub fn join_uses(&self, stream: Stream) -> Result<()> {
        if self.is_counting.take() { stream.wait(&self.counted) } else { Ok(()) }
    }

    /// Makes later work on the stream wait for the sort of the last lookup.
    fn join(&self, stream: Stream) -> Result<()> {
        if self.is_forked.take() { stream.wait(&self.join) } else { Ok(()) }
    }

    /// Enqueues writing words to the device, as `delivery::deliver`.
    fn deliver(
        &self,
        to: u64,
        values: &[u32],
        zeros: (u64, usize),
        number: Option<(u64, u64)>,
        stream: Stream,
    ) -> Result<()> {
        deliver(&self.device, to, values, zeros, number, stream)
    }

    /// Writes the descriptors of all tables to the device if one of them is out of date.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn describe(&mut self, tables: &mut [GpuTable], stream: Stream) -> Result<()> {
        if !tables.iter().any(|t| t.has_moved || t.candidates.as_ref().is_some_and(|c| c.has_moved())) {
            return Ok(());
        }
        self.join(stream)?;
        let num_tables = tables.len();
        let mut descriptors: Vec<_> =
            tables.iter().enumerate().map(|(t, table)| table.descriptor(self.kinds[t] as u32)).collect();
        self.notes_changes = descriptors.iter().any(|table| table.changes != 0);
        if num_described(tables) > num_tables {
            for (t, table) in tables.iter_mut().enumerate() {
                let Some(candidates) = &mut table.candidates else {
                    descriptors.push(abi::Table::default());
                    continue;
                };
                candidates.note_described();
                descriptors[t].candidates = (num_tables + t) as u32;
                descriptors.push(candidates.descriptor());
            }
        }
        self.deliver(self.tables_on_device.address(), words(&descriptors), (0, 0), None, stream)?;
        tables.iter_mut().for_each(|t| t.has_moved = false);
        Ok(())
    }

    /// Returns device memory of at least this many words: that of a completed step, or newly allocated.
    ///
    /// # Errors
    /// [`Error::Device`] if the device does not have enough memory.
    pub fn take_memory(&mut self, words: usize) -> Result<Buffer<u32>> {
        let fits = self.memories.iter().enumerate().filter(|(_, m)| m.len() >= words);
        match fits.min_by_key(|(_, m)| m.len()).map(|(i, _)| i) {
            Some(i) => Ok(self.memories.swap_remove(i)),
            None => Buffer::uninit(&self.device.context, words + words / 4),
        }
    }

    /// Returns memory for the merged gradients of a push.
    ///
    /// # Errors
    /// As `take_memory`.
    pub fn take_sums(&mut self, saved: &Saved) -> Result<Buffer<u32>> {
        let words = saved.sum_words(&self.rows);
        self.take_memory(words)
    }

    /// Returns memory for a copy of a push's gradients, and the address for each feature.
    ///
    /// # Errors
    /// As `take_memory`.
    pub fn take_copy(&mut self, saved: &Saved) -> Result<(Buffer<u32>, Vec<u64>)> {
        let words = |f: &SavedFeature| (f.num_bags * f.dim * saved.array_type.num_bytes()).div_ceil(4);
        let places = |base| {
            let mut parts = BumpAllocator { base, at: 0 };
            let rows: Vec<u64> = saved.features.iter().map(|f| parts.take(words(f))).collect();
            (rows, parts.at)
        };
        let memory = self.take_memory(places(0).1)?;
        let (rows, _) = places(memory.address());
        Ok((memory, rows))
    }

    /// Takes back the memory of a step whose work is on the stream. Later work that reuses it comes after that on the stream.
    pub fn give_back(&mut self, memory: Buffer<u32>) {
        self.memories.push(memory);
        if self.memories.len() > SPARE_MEMORIES {
            let smallest = self.memories.iter().enumerate().min_by_key(|(_, m)| m.len()).map(|(i, _)| i);
            smallest.map(|i| self.memories.swap_remove(i));
        }
    }
}
