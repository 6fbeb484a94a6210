//! A table in device memory.

#![allow(unsafe_code)]

pub(crate) mod candidates;
mod capacity;
mod changes;
mod contract;
mod counts;
pub(crate) mod eviction;
pub(crate) mod expiry;
mod frozen;
mod keys;
pub(crate) mod missed_steps;
pub(crate) mod record;
mod records;
mod released;
pub(crate) mod sweep;
pub(crate) mod uses;

use std::sync::Arc;

use sok_core::contract::table::{OutOfVocabulary, TableConfig, TableStats};
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;
use sok_core::initializer::Initializer;

use crate::abi::{self, InitializerKind, Released, TableCounts, word_of};
use crate::device::{Device, Stream};
use crate::index::{Index, LOAD};
use crate::kernels::TABLE;
use crate::memory::{Arena, Buffer};

use candidates::Candidates;
use changes::Changes;
use eviction::Evictor;
use missed_steps::TakenSteps;
use record::{DeviceLayout, RowKind};
use released::Ring;

/// The stream of operations that wait for their results: the default stream of the device.
const WAITING: Stream = Stream::DEFAULT;

/// Maximum number of floats that are copied to or from the device at once.
const PIECE: usize = 1 << 24;

/// Addresses of so many records are reserved beside those of twice the maximum number of rows.
const SPARE_NUMBERS: usize = 4096;

/// An embedding table in the memory of a GPU.
pub struct GpuTable {
    pub(crate) config: TableConfig,
    pub(crate) device: Arc<Device>,
    pub(crate) update: Option<Update>,
    pub(crate) layout: DeviceLayout,
    index: Index,
    arena: Arena,
    /// Record numbers that are given out again.
    ring: Ring,
    /// Upper bound of `Counters::taken`.
    max_taken: u64,
    /// Upper bound of the number of rows.
    max_rows: u64,
    /// Parts of `Counters::taken`, `Counters::evicted` and `Counters::expired` that `stats` contains.
    counted: [u64; 3],
    /// Whether there was no memory for the keys of later calls.
    is_short: bool,
    /// Number of record numbers that `reserve_soon` must get memory for; 0: none.
    numbers_soon: u64,
    /// The counts that the device last reported, or that the host last read. The last four are counted since [`GpuTable::count_steps`].
    reported: TableCounts,
    /// Whether the host has read the counts after the last commit was enqueued. Its report is out of date then.
    is_recounted: bool,
    /// Keys that were admitted for steps, which count them as found.
    admitted: u64,
    /// Erased records that a step may still refer to, with the number of the newest lookup that may refer to them.
    retired: Vec<(u64, Vec<u32>)>,
    /// Erased records that no step refers to.
    reusable: Vec<u32>,
    pub(crate) newest_lookup: u64,
    /// Increases when all record numbers become invalid. Gradients of earlier lookups are then dropped.
    pub(crate) generation: u64,
    /// Whether the states were loaded, and no optimizer was bound or has updated the table since.
    pub(crate) has_loaded_states: bool,
    stats: TableStats,
    /// Number of refused keys that the user must still be warned of.
    pub(crate) refused_to_warn: u64,
    /// Whether the descriptor on the device is out of date.
    pub(crate) has_moved: bool,
    /// Of a table that ranks share: address of the row of the out-of-vocabulary key; 0 otherwise.
    pub(crate) out_of_vocabulary_row: u64,
    /// Uses of the rows, if the table has an eviction policy or a time to live.
    pub(crate) evictor: Option<Box<Evictor>>,
    /// Keys without a row that commits may insert, if the table has an admission policy or a lookup has left insertion to a commit.
    pub(crate) candidates: Option<Box<Candidates>>,
    /// How many steps of the optimizer records have taken, unless steps update the rows with gradients alone.
    taken: Option<Box<TakenSteps>>,
    /// What has changed since dumps of the table.
    changes: Option<Box<Changes>>,
}

/// Device memory of a call that waits for its results.
pub(crate) struct Room {
    keys: Buffer<u64>,
    records: Buffer<u32>,
    overflow: Buffer<u32>,
    /// Of a piece: the index in `values` for each record that is written.
    places: Buffer<u32>,
    /// Values of a piece.
    values: Buffer<f32>,
    /// Maximum number of keys of a piece.
    piece: usize,
}

impl GpuTable {
    /// Creates an empty table.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration, [`Error::Device`] without memory for `initial_capacity`.
    pub fn new(device: &Arc<Device>, config: TableConfig) -> Result<GpuTable> {
        GpuTable::with_load(device, config, LOAD)
    }

    /// Creates an empty table, with an index that grows when this fraction of its slots is used.
    ///
    /// # Errors
    /// As `new`.
    pub fn with_load(device: &Arc<Device>, config: TableConfig, load: f64) -> Result<GpuTable> {
        config.validate()?;
        let layout = DeviceLayout::new(None, RowKind::of(&config));
        let rows = config.initial_capacity as usize;
        let mut table = GpuTable {
            index: Index::new(device, rows, load, WAITING)?,
            arena: arena(device, &config, layout.stride)?,
            ring: Ring::new(&device.context, 1)?,
            evictor: evictor(device, &config)?,
            candidates: GpuTable::first_candidates(device, &config)?,
            taken: None,
            changes: None,
            device: device.clone(),
            config,
            update: None,
            layout,
            max_taken: 0,
            max_rows: 0,
            counted: [0; 3],
            is_short: false,
            numbers_soon: 0,
            reported: counts_of_none(),
            is_recounted: false,
            admitted: 0,
            retired: Vec::new(),
            reusable: Vec::new(),
            newest_lookup: 0,
            generation: 0,
            has_loaded_states: false,
            stats: TableStats::default(),
            refused_to_warn: 0,
            has_moved: true,
            out_of_vocabulary_row: 0,
        };
        table.write_released()?;
        table.reserve_numbers(table.numbers_for(rows as u64), false)?;
        device.synchronize()?;
        Ok(table)
    }

    /// Returns the descriptor of the table for kernels. `kind`: index of the table's kind in its group.
    pub(crate) fn descriptor(&self, kind: u32) -> abi::Table {
        let mut table = abi::Table {
            index: self.index.descriptor(),
            initializer: initializer(&self.config),
            records: self.arena.address(),
            released: self.ring.address(),
            ring_mask: self.ring.mask(),
            last_key: self.config.vocabulary_size.map_or(u64::MAX, |size| size - 1),
            stride: self.layout.stride as u32,
            quads: abi::quads(self.config.dim) as u32,
            dim: self.config.dim as u32,
            states: RowKind::of(&self.config).states() as u32,
            row_type: self.config.row_type as u32,
            optimizer: self.config.optimizer as u32,
            first_state: self.layout.first_state,
            missing: self.config.missing as u32,
            kind,
            has_out_of_vocabulary_key: u32::from(self.config.out_of_vocabulary_key.is_some()),
            out_of_vocabulary_key: self.config.out_of_vocabulary_key.unwrap_or_default(),
            out_of_vocabulary_row: self.out_of_vocabulary_row,
            ..abi::Table::default()
        };
        if let Some(evictor) = &self.evictor {
            evictor.describe(&mut table);
        }
        if let Some(changes) = &self.changes {
            changes.describe(&mut table);
        }
        if let Some(taken) = &self.taken {
            (table.taken, table.now) = (taken.numbers.address(), taken.now);
        }
        if let Some(candidates) = &self.candidates {
            table.admission = candidates.admission();
        }
        table
    }

    /// Address of the record number of the out-of-vocabulary key, as the last lookup has found it.
    pub(crate) fn found_out_of_vocabulary(&self) -> u64 {
        self.index.counters.at(word_of!(Counters, out_of_vocabulary))
    }

    /// Returns the descriptor for kernels of a single table.
    fn alone(&self) -> abi::Table {
        self.descriptor(0)
    }

    /// Returns whether an id outside the vocabulary is an error.
    pub(crate) fn refuses(&self) -> bool {
        self.config.vocabulary_size.is_some() && self.config.out_of_vocabulary == OutOfVocabulary::Raise
    }

    /// Allocates device memory for this many keys, and for a piece of `width` floats for each key. Also loads the kernels. A call
    /// does this before it changes anything.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough memory, or a kernel cannot be compiled.
    pub(crate) fn room(&self, num_keys: usize, width: usize) -> Result<Room> {
        let context = &self.device.context;
        let gather = format!("gather_rows<{}, 4>", RowKind::of(&self.config).code());
        self.device.kernels(&TABLE, ["look_up", "settle_keys", "fill_missing", "write_records", &gather])?;
        let piece = (PIECE / width.max(1)).clamp(1, num_keys.max(1));
        Ok(Room {
            keys: Buffer::uninit(context, num_keys)?,
            records: Buffer::uninit(context, num_keys)?,
            overflow: Buffer::uninit(context, 1 + num_keys)?,
            places: Buffer::uninit(context, piece)?,
            values: Buffer::uninit(context, piece * width)?,
            piece,
        })
    }

    /// Returns the number of rows, as far as is known.
    fn rows(&self) -> u64 {
        self.reported.taken - self.reported.gone
    }
}

/// The error for a key that finds no slot in the index.
pub(crate) fn no_place(table: &str) -> Error {
    Error::Device(format!(
        "table `{table}` has no slot for a key: more than a thousand keys share their two buckets in the index"
    ))
}

/// Number of records for which a table reserves addresses. A load may bring twice as many rows as there is room for, and a call then inserts
/// before rows go. Numbers of erased records are not reused while steps may refer to them.
fn numbers_of(config: &TableConfig) -> usize {
    let rows = config.capacity().min(config.vocabulary_size.unwrap_or(u64::MAX)) as usize;
    rows.saturating_mul(3).saturating_add(SPARE_NUMBERS)
}

/// The counts of an empty table. Record 0 belongs to no key.
fn counts_of_none() -> TableCounts {
    TableCounts { released: Released { fresh: 1, ..Released::default() }, ..TableCounts::default() }
}

/// Reserves addresses for the records of a table.
fn arena(device: &Arc<Device>, config: &TableConfig, stride: usize) -> Result<Arena> {
    let most = numbers_of(config).saturating_mul(16 * stride);
    Arena::new(&device.context, most, format!("table `{}`", config.name))
}

/// The uses of an empty table.
fn evictor(device: &Arc<Device>, config: &TableConfig) -> Result<Option<Box<Evictor>>> {
    let evictor = config.counting().map(|policy| Evictor::new(device, config, policy));
    Ok(evictor.transpose()?.map(Box::new))
}

fn initializer(config: &TableConfig) -> abi::Initializer {
    const WHOLE: [f64; 2] = [0.0, 1.0];
    let (kind, a, b, [low, high]) = match config.initializer {
        Initializer::Constant { value } => (InitializerKind::Constant, value, 0.0, WHOLE),
        Initializer::Uniform { minval, maxval } => (InitializerKind::Uniform, minval, maxval - minval, WHOLE),
        Initializer::Normal { mean, stddev } => (InitializerKind::Normal, mean, stddev, WHOLE),
        Initializer::TruncatedNormal { mean, stddev, below } => {
            (InitializerKind::Normal, mean, stddev, below)
        }
        Initializer::Debug => (InitializerKind::Debug, 0.0, 0.0, WHOLE),
    };
    abi::Initializer { seed: config.seed, below: low, between: high - low, kind: kind as u32, a, b, pad: 0 }
}
