//! The launches of a training step over the tables of a layer, on a framework's stream.
//!
//! In a steady step nothing waits for the device or copies to it. Descriptors travel in the parameters of launches. A grid is an
//! upper bound where only the device knows how much work there is. Memory of completed steps is reused by later ones.

#![allow(unsafe_code)]

mod backward;
mod feature;
mod sort;
mod update_once;

use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
use cudarc::driver::{CudaEvent, CudaStream};
use sok_core::error::{Error, Result};

use crate::abi::{self, *};
use crate::device::{Device, Stream, driver_error, launch_next};
use crate::gpu_table::GpuTable;
use crate::kernels::{CONTROL, FORWARD};
use crate::memory::{Buffer, Shared, words};

/// Payload size of `deliver` in words that every device can take in the parameters of a launch.
const FEW: usize = 960;
/// Larger payload sizes, for devices that take them. There are several, because unused words of a payload take time too.
const MORE: [usize; 2] = [2016, 8128];

pub use feature::{Bags, Feature, Ids, KeyType};
pub use update_once::update_once;

use sort::{Plan, Scratch, SortKernels};

/// What a lookup keeps for its gradients. Fields of type `u64` are addresses in `memory`.
pub struct Saved {
    /// Device memory of everything that is kept.
    pub memory: Buffer<u32>,
    /// A `Side` for each feature; then, if gradients are copied, a `Gradients` for each feature; then, if one of them has weights,
    /// for each feature the address that takes the gradients of its weights.
    sides: u64,
    sorted: u64,
    named: u64,
    kept: Kept,
    entries: u64,
    call: Call,
    rows_blocks: usize,
    kinds: Vec<Keys>,
    ids_by_kind: Vec<usize>,
    shift: u32,
    source: Source,
    /// Whether a gradient row may be read several times.
    again: bool,
    /// The features of the call, in order. Empty for combined pushes.
    pub features: Vec<SavedFeature>,
    /// The index of each table that takes part, and its generation at the lookup.
    pub generations: Vec<(usize, u64)>,
}

/// What a lookup keeps of a feature on the host.
#[derive(Clone, Copy)]
pub struct SavedFeature {
    /// Index of the feature's table in the group.
    pub table: usize,
    /// Number of gradient rows.
    pub num_bags: usize,
    /// Number of ids of all bags.
    pub num_ids: usize,
    /// Number of columns of a gradient row.
    pub dim: usize,
    /// As `abi::Feature::scale`.
    scale: f32,
}

impl Saved {
    /// Returns the number of words for the merged gradients of all keys, if every id has a key of its own.
    fn sum_words(&self, dims: &[usize]) -> usize {
        self.ids_by_kind.iter().zip(dims).map(|(ids, dim)| ids * 4 * quads(*dim)).sum()
    }

    /// Returns whether a table has lost its records since the lookup.
    pub fn is_stale(&self, tables: &[GpuTable]) -> bool {
        self.generations.iter().any(|&(table, generation)| tables[table].generation != generation)
    }

    /// Returns whether ids have coefficients of their own.
    pub fn is_weighted(&self) -> bool {
        self.named != 0
    }

    /// Returns whether the gradients of all bags take at most half the memory that the merged gradients of keys may take.
    pub fn has_few_gradients(&self) -> bool {
        let words =
            |of: fn(&SavedFeature) -> usize| self.features.iter().map(|f| of(f) * f.dim).sum::<usize>();
        2 * words(|f| f.num_bags) <= words(|f| f.num_ids)
    }

    /// Returns whether kernels can read gradient rows at these addresses. If the dim is a multiple of 4, they read four floats at
    /// once, so the address must be a multiple of 16.
    pub fn is_aligned(&self, rows: &[u64]) -> bool {
        self.features.iter().zip(rows).all(|(f, row)| f.dim % 4 != 0 || row % 16 == 0)
    }

    /// Returns the `Work` parameter of a merge or an update, in words. The arguments are addresses; `prepared` and `factors` may be
    /// 0 for kernels that do not read them.
    fn work(&self, workspace: &Workspace, prepared: u64, factors: u64, sums: u64) -> Vec<u32> {
        let start = WorkHead {
            sides: self.sides,
            tables: workspace.tables(),
            entries: self.entries,
            sorted: self.sorted,
            named: self.named,
            prepared,
            factors,
            shift: self.shift,
            pad: 0,
        };
        let mut all = words(&[start]).to_vec();
        let mut at = sums;
        for ((keys, ids), dim) in self.kinds.iter().zip(&self.ids_by_kind).zip(&workspace.dims) {
            all.extend_from_slice(words(&[Keys { sums: at, ..*keys }]));
            at += (ids * 16 * quads(*dim)) as u64;
        }
        all
    }
}

/// How a lookup treats absent ids, whose keys a commit inserts. Fields are addresses on the device; 0 for none.
#[derive(Clone, Copy, Default)]
pub struct AbsentIds {
    /// A word that takes the number of absent ids.
    pub count: u64,
    /// By place of an id: the record that an earlier lookup of the same features found. Only ids without one are looked up.
    pub known: u64,
}

/// Hands out parts of a buffer.
struct Parts {
    base: u64,
    at: usize,
}

impl Parts {
    /// Returns the address of the next part, which has this many words. Parts do not share a cache line.
    fn take(&mut self, words: usize) -> u64 {
        let start = self.at;
        self.at += words.next_multiple_of(32);
        self.base + 4 * start as u64
    }
}

/// Addresses in the memory of a lookup.
struct Places {
    features: u64,
    first_find: u64,
    first_rows: u64,
    zeros: u64,
    overflow_count: u64,
    sort_state: u64,
    /// The `Keys` of each dim. They follow the features; the sections of the sort follow them.
    keys: u64,
    sections: u64,
    sides: u64,
    sorted: u64,
    named: u64,
    kinds: Vec<Keys>,
    kept: Kept,
    num_zeros: usize,
    words: usize,
}

/// Descriptors and grids for the launches of a lookup.
struct Payload {
    /// Descriptors of the features; then the first block of each in `find_records`; then the first block of each in `make_rows`.
    words: Vec<u32>,
    find_blocks: usize,
    rows_blocks: usize,
    /// The instantiation of `make_rows`.
    bags: BagKind,
}

/// Memory, streams and events that the steps of a group share.
pub struct Workspace {
    /// The device of all tables of the group.
    pub device: Arc<Device>,
    /// Distinct dims, ascending.
    dims: Vec<usize>,
    /// By table: the index of its dim in `dims`.
    kinds: Vec<usize>,
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
    /// By index in `SORT_ITEMS`.
    sort_kernels: [OnceCell<SortKernels>; SORT_ITEMS.len()],
    /// The stream of the last call.
    last: Option<Stream>,
    /// Memory of completed steps, for later ones.
    memories: Vec<Buffer<u32>>,
    /// The `Fault` that kernels write.
    pub fault: Shared,
}

/// Maximum number of buffers of completed steps that are kept for later ones.
const SPARE_MEMORIES: usize = 6;

impl Workspace {
    /// Creates the workspace of a group with these tables.
    ///
    /// # Errors
    /// [`Error::Argument`] for more than 32 distinct dims, [`Error::Device`] if the device does not have enough memory.
    pub fn new(device: &Arc<Device>, tables: &[GpuTable]) -> Result<Workspace> {
        let context = &device.context;
        let mut dims: Vec<usize> = tables.iter().map(|t| t.config.dim).collect();
        dims.sort_unstable();
        dims.dedup();
        if dims.len() > 32 {
            return Err(Error::argument(format!(
                "the tables of a layer on a GPU have at most 32 different dims. Received: {}",
                dims.len()
            )));
        }
        let kind = |t: &GpuTable| dims.iter().position(|d| *d == t.config.dim).unwrap_or_default();
        let kinds: Vec<usize> = tables.iter().map(kind).collect();
        let failed = driver_error("making a stream");
        let event = || context.new_event(Some(CU_EVENT_DISABLE_TIMING)).map_err(&failed);
        Ok(Workspace {
            tables_on_device: Buffer::new(context, tables.len())?,
            scratch: None,
            // The sort has a high priority, because its launches are short and later launches wait for them.
            side: context.new_stream_with_priority(-5).map_err(&failed)?,
            fork: event()?,
            join: event()?,
            moved: event()?,
            is_forked: Cell::new(false),
            sort_kernels: Default::default(),
            last: None,
            memories: Vec::new(),
            fault: Shared::new(context, FAULT_WORDS)?,
            device: device.clone(),
            dims,
            kinds,
        })
    }

    /// Returns the dims as template arguments of kernels.
    fn dim_list(&self) -> String {
        self.dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
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
        self.device.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        if let Some(last) = self.last.filter(|last| *last != stream) {
            last.record(&self.moved)?;
            stream.wait(&self.moved)?;
        }
        self.last = Some(stream);
        Ok(())
    }

    /// Makes later work on the stream wait for the sort of the last lookup.
    fn join(&self, stream: Stream) -> Result<()> {
        if self.is_forked.take() { stream.wait(&self.join) } else { Ok(()) }
    }

    /// Returns the payload size of `deliver` for this many words. It may be smaller, which takes several launches.
    fn delivered_at_once(&self, words: usize) -> usize {
        if words <= FEW || self.device.parameter_bytes <= 4096 {
            return FEW;
        }
        MORE.into_iter().find(|room| words <= *room).unwrap_or(MORE[1])
    }

    /// Enqueues writing words to the device. `zeros`: address and number of words that are set to 0. `number`: an address, and the
    /// number of a lookup that is written there.
    fn deliver(
        &self,
        to: u64,
        values: &[u32],
        zeros: (u64, usize),
        number: Option<(u64, u64)>,
        stream: Stream,
    ) -> Result<()> {
        let room = self.delivered_at_once(values.len());
        let deliver = self.device.kernel(&CONTROL, &format!("deliver<{room}>"))?;
        let mut payload = vec![0u32; room];
        for (i, chunk) in values.chunks(room).enumerate() {
            payload[..chunk.len()].copy_from_slice(chunk);
            let (number_to, number) = number.filter(|_| i == 0).unwrap_or_default();
            let (zeros, num_zeros) = if i == 0 { zeros } else { (0, 0) };
            let delivery = Delivery {
                to: to + 4 * (i * room) as u64,
                zeros,
                count: chunk.len() as u32,
                num_zeros: num_zeros as u32,
                number_to,
                number: [number as u32, (number >> 32) as u32],
                pad: [0; 2],
            };
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point
            // to.
            unsafe { launch_next!(deliver, stream, 1, 1024, delivery, payload[0]) }?;
        }
        Ok(())
    }

    /// Writes the descriptors of all tables to the device if one of them is out of date.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn describe(&mut self, tables: &mut [GpuTable], stream: Stream) -> Result<()> {
        if !tables.iter().any(|t| t.has_moved) {
            return Ok(());
        }
        self.join(stream)?;
        let descriptors: Vec<_> =
            tables.iter().enumerate().map(|(t, table)| table.descriptor(self.kinds[t] as u32)).collect();
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
        let words = saved.sum_words(&self.dims);
        self.take_memory(words)
    }

    /// Returns memory for a copy of a push's gradients, and the address for each feature.
    ///
    /// # Errors
    /// As `take_memory`.
    pub fn take_copy(&mut self, saved: &Saved) -> Result<(Buffer<u32>, Vec<u64>)> {
        let places = |base| {
            let mut parts = Parts { base, at: 0 };
            let rows: Vec<u64> = saved.features.iter().map(|f| parts.take(f.num_bags * f.dim)).collect();
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

    /// Divides the memory of a lookup into parts. `plan`: the sort, if the lookup is saved.
    fn places(&self, base: u64, features: &[Feature], ids_by_kind: &[usize], plan: Option<&Plan>) -> Places {
        let (n, save): (usize, _) = (ids_by_kind.iter().sum(), plan.is_some());
        let is_weighted = save && features.iter().any(Feature::is_weighted);
        let has_weights = save && features.iter().any(|f| f.weights.is_some());
        let mut parts = Parts { base, at: 0 };
        let descriptor = size_of::<abi::Feature>() / 4;
        let feature_words = features.len() * (descriptor + 2);
        let key_words = if save { ids_by_kind.len() * size_of::<Keys>() / 4 } else { 0 };
        let section_words = plan.map_or(0, |plan| plan.sections.len() * size_of::<Section>() / 4);
        let payload = parts.take(feature_words + key_words + section_words);
        let zeros = parts.take(0);
        let overflow_count = parts.take(32);
        let sort_state = parts.take(plan.map_or(0, Plan::state_words));
        let lists: Vec<u64> =
            ids_by_kind.iter().map(|_| parts.take(if save { LISTS_WORDS } else { 0 })).collect();
        let num_zeros = parts.at - ((zeros - base) / 4) as usize;
        let side_words = (size_of::<Side>() + size_of::<Gradients>() + size_of::<u64>()) / 4;
        let sides = parts.take(if save { features.len() * side_words } else { 0 });
        let mut of_ids = |is_there: bool, words: usize| parts.take(if is_there { words * n } else { 0 });
        let (sorted, named) = (of_ids(save, 2), of_ids(is_weighted, 2));
        let mut kept = Kept {
            keys: of_ids(has_weights, 2),
            weights: of_ids(has_weights, 1),
            records: of_ids(has_weights, 1),
            splits: 0,
        };
        kept.splits = parts.take(features.iter().filter(|_| save).map(Feature::num_kept_splits).sum());
        let mut kinds = Vec::new();
        for ((ids, dim), lists) in ids_by_kind.iter().zip(&self.dims).zip(&lists) {
            let ids = if save { *ids } else { 0 };
            let (hot, runs) = (ids / HOT + 2, ids / RUN + ids / HOT + 2);
            kinds.push(Keys {
                lists: *lists,
                singles: parts.take(2 * ids),
                several: parts.take(2 * ids + 4),
                hot: parts.take(4 * hot),
                runs: parts.take(4 * runs),
                partial: parts.take(if ids > 0 { 4 * runs * quads(*dim) } else { 0 }),
                ..Keys::default()
            });
        }
        Places {
            features: payload,
            first_find: payload + (features.len() * descriptor * 4) as u64,
            first_rows: payload + (features.len() * (descriptor + 1) * 4) as u64,
            zeros,
            overflow_count,
            sort_state,
            keys: payload + 4 * feature_words as u64,
            sections: payload + 4 * (feature_words + key_words) as u64,
            sides,
            sorted,
            named: if is_weighted { named } else { 0 },
            kinds,
            kept,
            num_zeros,
            words: parts.at,
        }
    }

    /// Enqueues the lookup of all features of a call. `inserts`: by table, whether keys without a record get one. `number`: an
    /// address, and the number of the lookup that is written there. With `save`, returns what `push` needs.
    ///
    /// If no feature has memory for rows, none are written. Coefficients of ids are then not computed either.
    ///
    /// # Errors
    /// [`Error::Argument`] if features, rows and ids are too many for one call. [`Error::Device`] without enough memory, or if a
    /// kernel cannot be compiled or launched.
    #[expect(clippy::too_many_arguments, reason = "all of them are chosen apart")]
    pub fn lookup(
        &mut self,
        tables: &mut [GpuTable],
        features: &[Feature],
        inserts: &[bool],
        absent: AbsentIds,
        save: bool,
        number: Option<(u64, u64)>,
        stream: Stream,
    ) -> Result<Option<Saved>> {
        self.join(stream)?;
        self.describe(tables, stream)?;
        let mut ids_by_kind = vec![0; self.dims.len()];
        features.iter().for_each(|f| ids_by_kind[self.kinds[f.table]] += f.ids.len);
        let n: usize = ids_by_kind.iter().sum();
        let most_bags = features.iter().map(Feature::num_bags).max().unwrap_or(0);
        let shift = usize::BITS - most_bags.leading_zeros();
        if n > u32::MAX as usize / 4 || (features.len() as u64) << shift > 1 << 32 {
            return Err(Error::argument(format!(
                "{} features of {most_bags} rows with {n} ids are too many for one call",
                features.len()
            )));
        }
        let (plan, first_ids) = self.plan(tables, features);
        let plan = save.then_some(&plan);
        let num_words = self.places(0, features, &ids_by_kind, plan).words;
        let memory = self.take_memory(num_words)?;
        let places = self.places(memory.address(), features, &ids_by_kind, plan);
        let Payload { words: mut payload, find_blocks, rows_blocks, bags } =
            self.payload(tables, features, &first_ids, inserts);
        if let Some(plan) = plan {
            payload.extend_from_slice(words(&places.kinds));
            payload.extend_from_slice(words(&plan.sections));
        }
        self.deliver(places.features, &payload, (places.zeros, places.num_zeros), number, stream)?;

        let call = Call {
            tables: self.tables_on_device.address(),
            features: places.features,
            first_find: places.first_find,
            first_rows: places.first_rows,
            num_features: features.len() as u32,
            shift,
        };
        let ([records, values, overflow], scratch) = self.scratch(n, plan)?;
        let found = Found {
            records,
            values: if save { values } else { 0 },
            named: places.named,
            zeros: scratch.counts,
            num_zeros: plan.map_or(0, Plan::count_words) as u32,
            pad: 0,
            overflow: Overflow { count: places.overflow_count, ids: overflow },
            fault: self.fault.address(),
            absent: absent.count,
            known: absent.known,
        };
        let rows_name = format!("make_rows<{}, {}>", bags as u32, self.dim_list());
        let names = ["find_records", "settle_records", &rows_name];
        let [find, settle, make_rows] = self.device.kernels(&FORWARD, names)?;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point to.
        unsafe { launch_next!(find, stream, find_blocks, FIND_THREADS, call, found) }?;
        if inserts.contains(&true) {
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point
            // to.
            unsafe {
                launch_next!(settle, stream, 8 * self.device.multiprocessors, FIND_THREADS, call, found)
            }?;
        }
        if let Some(plan) = plan.filter(|_| n > 0) {
            self.sort_beside(plan, &places, [records, values], scratch, stream)?;
        }
        let (named, kept) = (places.named, places.kept);
        let rows = Rows { records, named, kept, fault: self.fault.address() };
        if features.iter().any(|f| f.rows != 0) {
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point
            // to.
            unsafe { launch_next!(make_rows, stream, rows_blocks, ROWS_THREADS, call, rows) }?;
        }
        if !save {
            self.give_back(memory);
            return Ok(None);
        }
        let mut taking_part: Vec<usize> = features.iter().map(|f| f.table).collect();
        taking_part.sort_unstable();
        taking_part.dedup();
        let feature = |f: &Feature| SavedFeature {
            table: f.table,
            num_bags: f.num_bags(),
            num_ids: f.ids.len,
            dim: tables[f.table].config.dim,
            scale: f.scale(),
        };
        Ok(Some(Saved {
            memory,
            sides: places.sides,
            sorted: places.sorted,
            named,
            kept,
            entries: 0,
            call,
            rows_blocks,
            ids_by_kind,
            shift,
            source: if named == 0 { Source::Rows } else { Source::WeightedRows },
            again: features.iter().any(|f| !matches!(f.bags, Bags::Each | Bags::Fixed { hotness: 1, .. })),
            features: features.iter().map(feature).collect(),
            generations: taking_part.iter().map(|&t| (t, tables[t].generation)).collect(),
            kinds: places.kinds,
        }))
    }

    /// Returns the descriptors of the features, and the grids. `first_ids`: as `first_ids` returns them.
    fn payload(
        &self,
        tables: &[GpuTable],
        features: &[Feature],
        first_ids: &[usize],
        inserts: &[bool],
    ) -> Payload {
        let (mut descriptors, mut first_find, mut first_rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut find_blocks, mut rows_blocks, mut first_split, mut bags) = (0, 0, 0, BagKind::Each);
        for (feature, first_id) in features.iter().zip(first_ids) {
            let table = &tables[feature.table];
            let (splits, wide, hotness) = match feature.bags {
                Bags::Each => (0, false, 1),
                Bags::Fixed { hotness, .. } => (0, false, hotness),
                Bags::Ragged { splits, wide, .. } => (splits, wide, 0),
            };
            let is_static = table.config.vocabulary_size.is_some();
            let has_roles = is_static || feature.weights.is_some() || feature.padding_key.is_some();
            // Without weights, a bag of one id has the same row with every combiner.
            let is_gather = hotness == 1 && feature.weights.is_none();
            let may_miss = has_roles || !inserts[feature.table];
            bags = bags.max(match (is_gather, may_miss) {
                (true, _) => BagKind::Each,
                (false, false) => BagKind::Summed,
                (false, true) => BagKind::Any,
            });
            let num_bags = feature.num_bags();
            descriptors.push(abi::Feature {
                ids: feature.ids.address,
                high: feature.ids.high,
                splits,
                weights: feature.weights.unwrap_or(0),
                rows: feature.rows,
                records: table.descriptor(0).records,
                padding_key: feature.padding_key.unwrap_or(0),
                stride: table.layout.stride as u32,
                table: feature.table as u32,
                kind: self.kinds[feature.table] as u32,
                num_ids: feature.ids.len as u32,
                num_bags: num_bags as u32,
                hotness: hotness as u32,
                key_type: feature.ids.key_type as u32,
                combiner: feature.combiner as u32,
                has_padding: u32::from(feature.padding_key.is_some()),
                wide_splits: u32::from(wide),
                has_roles: u32::from(has_roles),
                inserts: u32::from(inserts[feature.table]),
                refuses: u32::from(table.refuses()),
                is_gather: u32::from(is_gather),
                pools: u32::from(!matches!(feature.bags, Bags::Each)),
                scale: feature.scale(),
                first_id: *first_id as u32,
                first_split: first_split as u32,
            });
            first_split += feature.num_kept_splits();
            first_find.push(find_blocks as u32);
            first_rows.push(rows_blocks as u32);
            find_blocks += feature.ids.len.div_ceil(FIND_THREADS);
            let groups = ROWS_THREADS / lanes(table.config.dim);
            rows_blocks += num_bags.div_ceil(if is_gather { ROWS_THREADS } else { groups });
        }
        let mut words = words(&descriptors).to_vec();
        words.extend(first_find);
        words.extend(first_rows);
        Payload { words, find_blocks, rows_blocks, bags }
    }

    /// Returns the sort of a call, with a section for each table in order, and for each feature the place of its first id.
    fn plan(&self, tables: &[GpuTable], features: &[Feature]) -> (Plan, Vec<usize>) {
        let mut ids = vec![0; tables.len()];
        features.iter().for_each(|f| ids[f.table] += f.ids.len);
        let mut next = vec![0; tables.len()];
        let (mut sections, mut at, mut most_records, mut likely_records) = (Vec::new(), 0, 0, 0);
        for t in (0..tables.len()).filter(|&t| ids[t] > 0) {
            next[t] = at;
            at += ids[t];
            most_records = most_records.max(tables[t].most_numbers());
            likely_records = likely_records.max(tables[t].known_numbers());
            sections.push(Section {
                count: ids[t] as u32,
                kind: self.kinds[t] as u32,
                table: t as u32,
                ..Section::default()
            });
        }
        let place = |f: &Feature| {
            next[f.table] += f.ids.len;
            next[f.table] - f.ids.len
        };
        let first_ids = features.iter().map(place).collect();
        (self.sort_plan(sections, most_records, likely_records), first_ids)
    }

    fn sort_plan(&self, sections: Vec<Section>, most_records: u64, likely_records: u64) -> Plan {
        let multiprocessors = self.device.multiprocessors as usize;
        Plan::new(sections, most_records, likely_records, multiprocessors, self.device.shared_bytes)
    }

    /// Address of the record numbers that the last lookup found, u32 by place of an id. Valid until the next lookup.
    pub fn found_records(&self) -> u64 {
        self.scratch.as_ref().map_or(0, Buffer::address)
    }

    /// Returns, for each feature, the place of its first id in the call.
    pub fn first_ids(&self, tables: &[GpuTable], features: &[Feature]) -> Vec<usize> {
        self.plan(tables, features).1
    }

    /// Returns scratch memory: addresses for records, values and overflow ids of `n` ids, and the memory of the sort.
    fn scratch(&mut self, n: usize, plan: Option<&Plan>) -> Result<([u64; 3], Scratch)> {
        let of_plan = |words: fn(&Plan) -> usize| plan.map_or(0, words);
        let (values, pairs) = if plan.is_some() { (n, 2 * n) } else { (0, 0) };
        let sizes = [n, values, n, of_plan(Plan::count_words), of_plan(Plan::published_words), pairs, pairs];
        let total: usize = sizes.iter().map(|s| s.next_multiple_of(32)).sum();
        if self.scratch.as_ref().is_none_or(|s| s.len() < total) {
            self.scratch = None;
            self.scratch = Some(Buffer::uninit(&self.device.context, total + total / 4)?);
        }
        let base = self.scratch.as_ref().map_or(0, Buffer::address);
        let mut parts = Parts { base, at: 0 };
        let [records, values, overflow, counts, published, first, second] =
            sizes.map(|size| parts.take(size));
        Ok(([records, values, overflow], Scratch { counts, published, pairs: [first, second] }))
    }

    /// Sorts ids by their records and lists the distinct ones, on the second stream, after the work that is on `stream` so far.
    fn sort_beside(
        &self,
        plan: &Plan,
        places: &Places,
        ids: [u64; 2],
        scratch: Scratch,
        stream: Stream,
    ) -> Result<()> {
        let side = Stream::of_cudarc(&self.side);
        stream.record(&self.fork)?;
        side.wait(&self.fork)?;
        self.sort(plan, places, ids, scratch, side)?;
        side.record(&self.join)?;
        self.is_forked.set(true);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Parts;

    #[test]
    fn parts_of_a_buffer_do_not_share_lines() {
        let mut parts = Parts { base: 1 << 20, at: 0 };
        let taken: Vec<u64> = [1, 0, 33, 32].map(|words| parts.take(words)).into();
        assert_eq!(taken, [0, 128, 128, 384].map(|bytes| (1 << 20) + bytes));
        assert_eq!(parts.at, 128);
    }
}
