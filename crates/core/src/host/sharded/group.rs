//! This rank's part of a group.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::contract::table::TableConfig;
use crate::contract::ticket::PushRing;
use crate::error::Result;
use crate::exchange::communicator::Communicator;
use crate::exchange::message::{Call, Reader, Tag, Writer};
use crate::exchange::placement::Placement;
use crate::host::group::HostGroup;
use crate::host::push::{Push, Spare};
use crate::host::sharded::requests::Requests;
use crate::host::sharded::sent::SentLookup;
use crate::host::sharded::shards::Shards;
use crate::row_type::RowType;

/// This rank's part of a group.
pub struct ShardedGroup {
    /// The rows that this rank owns.
    pub(super) shard: HostGroup,
    pub(super) communicator: Arc<dyn Communicator>,
    /// Number of the layer, the same on all ranks.
    pub(super) layer: u32,
    /// Fingerprint of the tables. Ranks whose tables differ must not exchange rows.
    pub(super) tables: u64,
    /// How rows and gradients travel to other ranks.
    pub(super) row_type: RowType,
    /// By table.
    pub(super) requests: Vec<Requests>,
    pub(super) num_lookups: u64,
    pub(super) num_commits: u64,
    pub(super) lookups: VecDeque<SentLookup>,
    pub(super) ring: PushRing<Push>,
    /// By table.
    pub(super) spare: Vec<Spare>,
    pub(super) pushes_without_optimizer: u32,
}

impl ShardedGroup {
    /// Makes this rank's part of a group of empty tables. All ranks must call it with the same arguments, except for their communicator.
    ///
    /// `merge_blocks`: in how many blocks of whole samples the batch of all ranks is merged, a multiple of the number of ranks.
    /// `row_type`: how rows and gradients travel to other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration, placement or number of blocks, [`Error::Memory`].
    pub fn new(
        configs: Vec<(TableConfig, Placement)>,
        communicator: Arc<dyn Communicator>,
        layer: u32,
        merge_blocks: usize,
        row_type: RowType,
    ) -> Result<ShardedGroup> {
        let Shards { owners, configs, fingerprint } =
            Shards::new(configs, communicator.rank(), communicator.world_size(), merge_blocks, row_type)?;
        let blocks = merge_blocks / communicator.world_size();
        let requests = owners.into_iter().map(|owners| Requests::new(owners, blocks));
        let ring = PushRing::of(configs.iter().map(|config| &*config.name));
        Ok(ShardedGroup {
            spare: configs.iter().map(|_| Spare::default()).collect(),
            shard: HostGroup::new(configs)?,
            communicator,
            layer,
            tables: fingerprint,
            row_type,
            requests: requests.collect::<Result<_>>()?,
            num_lookups: 0,
            num_commits: 0,
            lookups: VecDeque::new(),
            ring,
            pushes_without_optimizer: 0,
        })
    }

    /// The communicator with the other ranks.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// Returns the type of rows in messages between this rank and `rank`: float32 if it is this rank itself.
    fn row_type_with(&self, rank: usize) -> RowType {
        if rank == self.communicator.rank() { RowType::Float32 } else { self.row_type }
    }

    /// Begins a message to a rank.
    pub(super) fn writer_to(&self, rank: usize) -> Writer {
        Writer::new(self.row_type_with(rank))
    }

    /// Reads a message of a rank.
    pub(super) fn reader_of<'a>(&self, message: &'a [u8], rank: usize) -> Reader<'a> {
        Reader::new(message, rank).with_row_type(self.row_type_with(rank))
    }

    pub(super) fn tag(&self, call: Call, step: u64) -> Tag {
        Tag { call, layer: self.layer, step, round: 0 }
    }
}
