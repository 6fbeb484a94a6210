//! What uses rows of a table: calls, and lookups of training.

/// Sorted ids of a lookup, on the device.
#[derive(Clone, Copy)]
pub(crate) struct SortedIds {
    /// Address of the first `Sorted`.
    pub address: u64,
    /// Their number, or an upper bound.
    pub count: usize,
    /// Address of their number, if the device alone knows it; otherwise 0.
    pub counted: u64,
    /// Numbers from this one on are not those of records.
    pub end: u32,
}

/// A commit whose report the host has not read. If its ticket is valid and names its only push, lookups up to `newest_lookup` are no longer in
/// progress.
#[derive(Clone, Copy)]
pub(crate) struct Closing {
    /// Address of its `Resolved`.
    pub resolved: u64,
    /// Row of the ticket that names the push.
    pub row: u32,
    /// Number of the push's lookup if its gradients are applied, otherwise of the one before.
    pub newest_lookup: u64,
}

/// A lookup of training.
pub(crate) trait InProgress: Send + Sync {
    /// Its number in the group.
    fn number(&self) -> u64;

    /// The ids that it looked up in a table, if their rows must stay. `number`: of the table in its group.
    fn ids(&self, number: usize, generation: u64) -> Option<SortedIds>;
}

/// Records that a call uses.
#[derive(Clone, Copy)]
pub(crate) struct UsedRecords {
    /// Address of their numbers, u32.
    pub address: u64,
    pub count: usize,
}

impl UsedRecords {
    pub const NONE: UsedRecords = UsedRecords { address: 0, count: 0 };
}
