//! What a rank asks for in a lookup, with where it is in the rank's window.

use std::sync::Arc;

use super::asked::TableRequest;
use super::layout::PooledAddresses;
use super::transfers::Places;
use crate::peers::Mapping;

/// What a rank asks for.
pub(super) struct RankRequest {
    /// By table.
    pub tables: Vec<TableRequest>,
    /// By table: where its keys and rows are, in its window. With NCCL known of this rank alone.
    pub places: Vec<Places>,
    /// By table: the addresses of what its owner pools.
    pub pooled: Vec<PooledAddresses>,
    /// The window, unless NCCL is used and it is another rank's.
    pub window: Option<Arc<Mapping>>,
    /// By table: how many more rows the rank's shard has room for.
    pub room: Vec<u64>,
    /// Whether the rank asks for the rows of ids of weight 0.
    pub asks_silent: bool,
}
