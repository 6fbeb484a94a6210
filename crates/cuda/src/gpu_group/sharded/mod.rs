//! A group on GPUs whose tables are shared by many ranks. The GPUs read and write each other's memory.
//!
//! The results are those of `sok_core::host::sharded`. A rank has two groups. The shard has the rows that the rank owns. The front has
//! this rank's lookups and pushes; its tables have no rows.
//!
//! A lookup of the front makes ids distinct and orders the keys by owner. The owners read the keys where they are, look them up as one
//! feature for each table and rank, and write the rows to the memory of the rank that asked, which pools them; or they pool the bags themselves. A push merges gradients
//! to one for each key. The commit is agreed on by the devices; then the owners update their records, and read the gradients of all ranks
//! where they are. The host exchanges what it knows before each lookup and each commit: numbers of ids, windows and pending pushes. So
//! in a steady step the host reads nothing from a device.

#![allow(unsafe_code)]

mod ahead;
mod asked;
mod at_owner;
mod by_nccl;
mod calls;
mod commit;
mod layout;
mod lent;
mod lookup;
mod request;
mod transfers;

use std::collections::VecDeque;
use std::sync::Arc;

use sok_core::contract::table::TableConfig;
use sok_core::error::{Error, Result};
use sok_core::exchange::buckets::Owners;
use sok_core::exchange::collectives::gather;
use sok_core::exchange::message::{Call, Reader, Tag, Writer};
use sok_core::exchange::placement::Placement;
use sok_core::host::sharded::Shards;
use sok_core::row_type::RowType;

use super::{GpuGroup, LookupNumber, OutputGradients, SharedTotals};
use crate::abi::{self, EXPONENTS, MAX_CLASSES, MAX_RANKS, RING};
use crate::device::{Device, Stream};
use crate::memory::{Buffer, Shared};
use crate::peers::{FLAG_BYTES, Mapping, Peers, Window, WindowName, Windows};
use crate::step::{Asking, Workspace};

use ahead::AheadLookups;
use asked::TableRequest;
use at_owner::PooledBags;
use by_nccl::Spares;
use layout::row_bytes;
use lent::Lending;

pub use commit::commit;
pub(super) use layout::{GradientLayout, row_places};

/// What this rank serves of a saved lookup.
struct Served {
    /// Number of the lookup.
    number: u64,
    /// By rank and table.
    requests: Vec<Vec<TableRequest>>,
    /// By table and rank, as the features of the shard's lookup.
    features: Vec<(usize, usize)>,
    /// By feature: where its keys begin among those of the rank, as the host knows them.
    begins: Vec<u64>,
    /// By feature: the same on the device, zeros if the host knows them; then the place of its first key among all keys.
    begins_on_device: Buffer<u32>,
    /// What this rank has pooled for others.
    pooled: Option<PooledBags>,
    /// With NCCL, by rank: where its keys start.
    starts: Vec<Vec<u32>>,
}

/// This rank's part of a group on GPUs.
pub struct ShardedGpuGroup {
    front: GpuGroup,
    shard: GpuGroup,
    peers: Arc<Peers>,
    /// Number of the layer, the same on all ranks.
    layer: u32,
    /// Fingerprint of the tables.
    tables: u64,
    /// How NCCL moves rows and gradients. Ranks that reach each other's memory move float32.
    row_type: RowType,
    /// By table.
    owners: Vec<Owners>,
    asking: Asking,
    /// Lookups whose ids are made distinct ahead of them.
    ahead: AheadLookups,
    /// By table: as `KeysTo::distinct`.
    distinct: Shared,
    /// Where this rank pools bags for others, as soon as it does.
    pooling: Option<Workspace>,
    /// Flags, verdicts and norms, which other ranks write.
    board: Window,
    /// By rank: its board, if this rank reaches it.
    boards: Vec<Option<Arc<Mapping>>>,
    on_device: abi::Peers,
    /// The ticket of the shard's pushes, float32 `(64, 2)`, and one that is not read.
    tickets: Buffer<f32>,
    /// Groups of four columns between the out-of-vocabulary rows of tables.
    row_stride: usize,
    /// Memory of lookups that are gone, see [`Served::begins_on_device`].
    spare_begins: Vec<Buffer<u32>>,
    /// Other memory for later calls, with NCCL.
    spares: Spares,
    /// Memory for gradients of other ranks.
    lending: Lending,
    num_lookups: u64,
    num_commits: u64,
    /// Saved lookups, oldest first.
    served: VecDeque<Served>,
}

/// Parts of a board, in bytes: flags, verdicts, norms, and out-of-vocabulary rows.
const VERDICTS: usize = FLAG_BYTES;
const NORMS: usize = VERDICTS + 4 * (RING + 1) * MAX_RANKS;

fn rows_of_board(num_tables: usize) -> usize {
    NORMS + 8 * MAX_RANKS * num_tables * EXPONENTS
}

impl ShardedGpuGroup {
    /// Makes this rank's part of a group of empty tables. All ranks must call it with the same arguments. `row_type`: how NCCL moves rows
    /// and gradients; ranks that reach each other's memory move float32.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration, placement or number of blocks, [`Error::Device`] without enough memory,
    /// [`Error::Rank`] if another rank fails.
    pub fn new(
        device: &Arc<Device>,
        configs: Vec<(TableConfig, Placement)>,
        peers: &Arc<Peers>,
        layer: u32,
        merge_blocks: usize,
        row_type: RowType,
    ) -> Result<ShardedGpuGroup> {
        let tag = Tag { call: Call::Lookup, layer, step: 0, round: 0 };
        let made = ShardedGpuGroup::alone(device, configs, peers, layer, merge_blocks, row_type);
        let name = made.as_ref().map_err(Error::clone).and_then(|group| {
            let mut writer = Writer::default();
            group.board.name().write(&mut writer)?;
            Ok(writer.finish())
        });
        let names = gather(&*peers.communicator, tag, name)?;
        let mut group = made?;
        for (rank, name) in names.iter().enumerate() {
            let name = WindowName::read(&mut Reader::new(name, rank))?;
            let board = peers.memory_of(rank, name, Some(&group.board));
            group.boards.push(group.fatal(board)?);
        }
        let flags: Vec<u64> = group.boards.iter().flatten().map(|board| board.address()).collect();
        let flags = if peers.nccl().is_some() { Vec::new() } else { flags };
        group.on_device = peers.on_device(&flags);
        group.shard.shared_totals = Some(group.shared_totals());
        Ok(group)
    }

    /// A group that does not know the boards of others yet.
    fn alone(
        device: &Arc<Device>,
        configs: Vec<(TableConfig, Placement)>,
        peers: &Arc<Peers>,
        layer: u32,
        merge_blocks: usize,
        row_type: RowType,
    ) -> Result<ShardedGpuGroup> {
        let world_size = peers.world_size();
        if row_type == RowType::Float16 {
            return Err(Error::argument("GPUs move rows as float32 or bfloat16. Received: float16"));
        }
        if merge_blocks + world_size > MAX_CLASSES {
            return Err(Error::argument(format!(
                "tables on GPUs are merged in at most {} blocks. Received: merge_blocks={merge_blocks}",
                MAX_CLASSES - world_size
            )));
        }
        let Shards { owners, configs, fingerprint } =
            Shards::new(configs, peers.rank(), world_size, merge_blocks, row_type)?;
        let without_rows = |config: &TableConfig| TableConfig {
            initial_capacity: 0,
            eviction: None,
            admission: None,
            time_to_live: None,
            // Rows come from their owners in float32.
            row_type: RowType::Float32,
            stochastic_rounding: false,
            optimizer: 0,
            ..config.clone()
        };
        let mut front = GpuGroup::new(device, configs.iter().map(without_rows).collect())?;
        front.windows = Some(Windows::new(peers));
        let mut shard = GpuGroup::new(device, configs)?;
        shard.workspace = Workspace::of_whole_quads(device, &shard.tables)?;
        let num_tables = owners.len();
        let widest = shard.tables.iter().map(row_bytes).max().unwrap_or(0);
        let rows = rows_of_board(num_tables);
        let mut board = peers.window(rows + num_tables * widest)?;
        peers.send(&mut [&mut board])?;
        for (number, table) in shard.tables.iter_mut().enumerate() {
            if table.config.out_of_vocabulary_key.is_some() {
                table.out_of_vocabulary_row = board.address() + (rows + number * widest) as u64;
            }
        }
        Ok(ShardedGpuGroup {
            asking: Asking::new(device, &owners, merge_blocks / world_size)?,
            ahead: AheadLookups::new(device, merge_blocks / world_size)?,
            row_stride: widest / 16,
            distinct: Shared::new(&device.context, 2 * num_tables.max(1))?,
            pooling: None,
            spare_begins: Vec::new(),
            spares: Spares::default(),
            lending: Lending::default(),
            tickets: Buffer::new(&device.context, 4 * RING)?,
            on_device: abi::Peers::default(),
            boards: Vec::new(),
            peers: peers.clone(),
            row_type,
            tables: fingerprint,
            num_lookups: 0,
            num_commits: 0,
            served: VecDeque::new(),
            front,
            shard,
            layer,
            owners,
            board,
        })
    }

    /// The group that has the rows of this rank.
    pub fn shard_mut(&mut self) -> &mut GpuGroup {
        &mut self.shard
    }

    /// Returns an error that a kernel has reported, and clears it, as `GpuGroup::take_fault`.
    pub fn take_fault(&mut self) -> Option<Error> {
        let of_ranks = self.peers.take_failure().or_else(|| self.front.take_fault());
        of_ranks.inspect(|_| self.shard.abandon_steps()).or_else(|| self.shard.take_fault())
    }

    /// Reads the report of the last commit, as `GpuGroup::settle`.
    ///
    /// # Errors
    /// The same.
    pub fn settle(&mut self) -> Result<()> {
        self.settle_front()?;
        self.shard.settle()
    }

    /// Reads the report of the front, which has the ticket of this rank. If the ticket was wrong, the shard has committed nothing.
    ///
    /// # Errors
    /// As `settle`.
    fn settle_front(&mut self) -> Result<()> {
        self.front.settle().inspect_err(|_| {
            // The shard's own report would take the pushes that still wait for steps in progress.
            self.shard.settle_later();
            self.shard.abandon_steps();
        })
    }

    /// Enqueues the push of a lookup's gradients, as `GpuGroup::push`. No other rank is asked.
    ///
    /// # Errors
    /// The same.
    ///
    /// # Safety
    /// The same.
    pub unsafe fn push(
        &mut self,
        number: LookupNumber,
        gradients: OutputGradients,
        gradient_lens: &[usize],
        weight_gradients: &[(usize, u64)],
        ticket: u64,
        stream: Stream,
    ) -> Result<()> {
        self.follow_generations();
        // SAFETY: The caller guarantees it.
        unsafe { self.front.push(number, gradients, gradient_lens, weight_gradients, ticket, stream) }
    }

    fn shared_totals(&self) -> SharedTotals {
        let norms = abi::SharedNorms {
            totals: self.shard.totals.address(),
            requests: self.asking.requests(),
            of_ranks: self.on_boards(NORMS),
            num_tables: self.owners.len() as u32,
            pad: 0,
        };
        SharedTotals { of: self.peers.clone(), peers: self.on_device, norms, commit: 0 }
    }

    /// By rank: the address of a part of its board. NCCL takes what other ranks are to have from this rank's own board.
    fn on_boards(&self, part: usize) -> [u64; MAX_RANKS] {
        let mut addresses = [0; MAX_RANKS];
        for (address, board) in addresses.iter_mut().zip(&self.boards) {
            *address = board.as_ref().map_or(self.board.address(), |board| board.address()) + part as u64;
        }
        addresses
    }

    fn tag(&self, call: Call, step: u64) -> Tag {
        Tag { call, layer: self.layer, step, round: 0 }
    }

    /// Notes in the front which tables have lost their records.
    fn follow_generations(&mut self) {
        for (front, shard) in self.front.tables.iter_mut().zip(&self.shard.tables) {
            front.generation = shard.generation;
        }
    }

    /// The error of a rank that was lost, or that a kernel has waited for in vain; or of an earlier call.
    fn check(&mut self) -> Result<()> {
        self.take_fault().map_or(Ok(()), Err)
    }

    /// Fails on all ranks: after the hosts have exchanged what a call needs, no rank can leave it alone.
    fn fatal<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.peers.communicator.fail(error))
    }

    fn differs<T>(&self, rank: usize, what: &str) -> Result<T> {
        Err(Error::Rank { rank, what: format!("{what}. All ranks must make the same calls") })
    }
}
