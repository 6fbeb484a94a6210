//! The tables of a group as one rank has them, on the host or on a GPU.

use crate::contract::table::TableConfig;
use crate::error::{Error, Result};
use crate::exchange::buckets::Owners;
use crate::exchange::placement::Placement;
use crate::fingerprint::fingerprint64;
use crate::row_type::RowType;

/// This rank's shards of the tables of a group.
pub struct Shards {
    /// By table.
    pub owners: Vec<Owners>,
    /// By table: the configuration of the shard.
    pub configs: Vec<TableConfig>,
    /// Fingerprint of the tables. Ranks whose tables differ must not exchange rows.
    pub fingerprint: u64,
}

impl Shards {
    /// Shares tables among ranks. `merge_blocks`: in how many blocks of whole samples the batch of all ranks is merged. `row_type`: how
    /// rows travel.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration or placement, or if `merge_blocks` is no multiple of the number of ranks.
    pub fn new(
        configs: Vec<(TableConfig, Placement)>,
        rank: usize,
        world_size: usize,
        merge_blocks: usize,
        row_type: RowType,
    ) -> Result<Shards> {
        if merge_blocks == 0 || !merge_blocks.is_multiple_of(world_size) {
            return Err(Error::argument(format!(
                "`merge_blocks` must be a multiple of the number of ranks, {world_size}. Received: {merge_blocks}"
            )));
        }
        let description: Vec<String> = configs.iter().map(|config| format!("{config:?}")).collect();
        let (mut owners, mut shards) = (Vec::new(), Vec::new());
        for (config, placement) in configs {
            config.validate()?;
            check_placement(&config, placement, world_size)?;
            let of_table =
                Owners { placement, is_static: config.vocabulary_size.is_some(), rank, world_size };
            shards.push(shard_of(config, &of_table));
            owners.push(of_table);
        }
        let fingerprint =
            fingerprint64(format!("{merge_blocks} {row_type:?} {}", description.join(" ")).as_bytes());
        Ok(Shards { owners, configs: shards, fingerprint })
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
        admission: config.admission.map(|policy| match owners.placement {
            Placement::Distributed => policy.share(owners.world_size as u64),
            Placement::Localized(_) | Placement::Replicated => policy,
        }),
        ..config
    }
}
