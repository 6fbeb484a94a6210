//! Lookups that were sent to the owners of their keys.

use std::sync::Arc;

use crate::host::push::{SavedLookup, SavedTable};
use crate::host::sharded::received::ReceivedRows;
use crate::host::sharded::requests::Request;
use crate::store::region::Region;

/// A lookup that was sent to the owners. Its distinct keys have no records here: their numbers are rows of `ReceivedRows`.
pub struct SentLookup {
    pub saved: Arc<SavedLookup>,
    /// By table of `saved`.
    pub tables: Vec<SentTable>,
    /// By rank: the bags that this rank has pooled for it.
    pub pooled: Vec<SavedLookup>,
}

/// A table's part of a lookup that was sent.
pub struct SentTable {
    pub request: Request,
    /// The rank that pools the bags, if that is not this one.
    pub pooling_owner: Option<usize>,
    /// Kept for the gradients of weights.
    pub rows: Option<ReceivedRows>,
}

impl SentLookup {
    /// What is known of each table: what was saved, what was sent, and its merged gradients.
    fn tables_with<'a>(
        &self,
        merged: &'a [Vec<Region<f32>>],
    ) -> impl Iterator<Item = (&SavedTable, &SentTable, &'a [Region<f32>])> {
        let tables = self.saved.tables.iter().zip(&self.tables).zip(merged);
        tables.map(|((saved, sent), merged)| (saved, sent, &merged[..]))
    }

    /// The gradients of the keys that rank `to` owns, by table. `merged`: by table.
    pub fn gradients_of_keys<'a>(
        &self,
        to: usize,
        merged: &'a [Vec<Region<f32>>],
    ) -> impl Iterator<Item = &'a [f32]> {
        self.tables_with(merged).map(move |(saved, sent, merged)| match sent.pooling_owner {
            Some(_) => &[][..],
            None => {
                let keys = sent.request.keys.sent_to(to);
                &merged[0][keys.start * saved.dim..keys.end * saved.dim]
            }
        })
    }

    /// The gradients of the bags that rank `to` pools, by table and feature.
    pub fn gradients_of_bags<'a>(
        &self,
        to: usize,
        merged: &'a [Vec<Region<f32>>],
    ) -> impl Iterator<Item = &'a [f32]> {
        let pooled = self.tables_with(merged).filter(move |(_, sent, _)| sent.pooling_owner == Some(to));
        pooled.flat_map(|(saved, _, merged)| {
            let num_floats =
                saved.looked.features.iter().map(|&feature| self.saved.num_bags[feature] * saved.dim);
            merged.iter().zip(num_floats).map(|(rows, num_floats)| &rows[..num_floats])
        })
    }
}
