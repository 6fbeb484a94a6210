//! This rank's part of a group.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::contract::table::TableConfig;
use crate::contract::ticket::PushRing;
use crate::error::{Error, Result};
use crate::exchange::buckets::Owners;
use crate::exchange::communicator::Communicator;
use crate::exchange::message::{Call, Tag};
use crate::exchange::placement::Placement;
use crate::fingerprint::fingerprint64;
use crate::host::group::HostGroup;
use crate::host::push::{Push, Spare};
use crate::host::sharded::requests::Requests;
use crate::host::sharded::sent::SentLookup;

/// This rank's part of a group.
pub struct ShardedGroup {
    /// The rows that this rank owns.
    pub(super) shard: HostGroup,
    pub(super) communicator: Arc<dyn Communicator>,
    /// Number of the layer, the same on all ranks.
    pub(super) layer: u32,
    /// Fingerprint of the tables. Ranks whose tables differ must not exchange rows.
    pub(super) tables: u64,
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
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration, placement or number of blocks, [`Error::Memory`].
    pub fn new(
        configs: Vec<(TableConfig, Placement)>,
        communicator: Arc<dyn Communicator>,
        layer: u32,
        merge_blocks: usize,
    ) -> Result<ShardedGroup> {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        if merge_blocks == 0 || !merge_blocks.is_multiple_of(world_size) {
            return Err(Error::argument(format!(
                "`merge_blocks` must be a multiple of the number of ranks, {world_size}. Received: {merge_blocks}"
            )));
        }
        let description: Vec<String> = configs.iter().map(|config| format!("{config:?}")).collect();
        let (mut requests, mut shards) = (Vec::new(), Vec::new());
        for (config, placement) in configs {
            config.validate()?;
            check_placement(&config, placement, world_size)?;
            let owners = Owners { placement, is_static: config.vocabulary_size.is_some(), rank, world_size };
            requests.push(Requests::new(owners, merge_blocks / world_size)?);
            shards.push(shard_of(config, &owners));
        }
        Ok(ShardedGroup {
            spare: shards.iter().map(|_| Spare::default()).collect(),
            shard: HostGroup::new(shards)?,
            communicator,
            layer,
            tables: fingerprint64(format!("{merge_blocks} {}", description.join(" ")).as_bytes()),
            requests,
            num_lookups: 0,
            num_commits: 0,
            lookups: VecDeque::new(),
            ring: PushRing::default(),
            pushes_without_optimizer: 0,
        })
    }

    /// The communicator with the other ranks.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    pub(super) fn tag(&self, call: Call, step: u64) -> Tag {
        Tag { call, layer: self.layer, step, round: 0 }
    }
}

fn check_placement(config: &TableConfig, placement: Placement, world_size: usize) -> Result<()> {
    let name = &config.name;
    match placement {
        Placement::Localized(rank) if rank >= world_size => Err(Error::argument(format!(
            "table `{name}`: `placement` must name a rank, 0 to {}. Received: localized:{rank}",
            world_size - 1
        ))),
        Placement::Replicated if config.vocabulary_size.is_none() => Err(Error::argument(format!(
            "table `{name}`: only a static table can be replicated. Set `vocabulary_size`, or leave `placement` away"
        ))),
        _ => Ok(()),
    }
}

/// The configuration of a rank's part of a table.
fn shard_of(config: TableConfig, owners: &Owners) -> TableConfig {
    let share = |rows: u64| match owners.placement {
        Placement::Distributed => rows.div_ceil(owners.world_size as u64),
        Placement::Localized(rank) if rank != owners.rank => 0,
        Placement::Localized(_) | Placement::Replicated => rows,
    };
    TableConfig {
        initial_capacity: share(config.initial_capacity),
        // A rank without keys needs no room, but the limit must be at least 1.
        max_capacity: config.max_capacity.map(|rows| share(rows).max(1)),
        ..config
    }
}
