//! Lookups that were sent to the owners of their keys.

use std::sync::Arc;

use crate::host::push::SavedLookup;
use crate::host::sharded::received::ReceivedRows;
use crate::host::sharded::requests::Request;

/// A lookup that was sent to the owners. Its distinct keys have no records here: their numbers are rows of `ReceivedRows`.
pub struct SentLookup {
    pub saved: Arc<SavedLookup>,
    /// By table of `saved`.
    pub tables: Vec<SentTable>,
}

/// A table's part of a lookup that was sent.
pub struct SentTable {
    pub request: Request,
    /// Kept for the gradients of weights.
    pub rows: Option<ReceivedRows>,
}
