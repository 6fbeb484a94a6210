//! The memory of a lookup, divided into parts.

use sok_core::error::Result;

use super::sort_plan::{Scratch, SortPlan};
use super::{Feature, Workspace};
use crate::abi::{self, *};
use crate::memory::Buffer;

/// Hands out parts of a buffer.
pub(super) struct BumpAllocator {
    pub(super) base: u64,
    pub(super) at: usize,
}

impl BumpAllocator {
    /// Returns the address of the next part, which has this many words. Parts do not share a cache line.
    pub(super) fn take(&mut self, words: usize) -> u64 {
        let start = self.at;
        self.at += words.next_multiple_of(32);
        self.base + 4 * start as u64
    }
}

/// Addresses of what a lookup keeps of its candidates; 0 if a commit may insert no keys.
#[derive(Clone, Copy, Default)]
pub(super) struct CandidatePlaces {
    /// `Found::numbers`.
    pub(super) numbers: u64,
    /// The word in which a commit counts keys that have found no slot.
    pub(super) num_overflow: u64,
    /// `Admitting::num_listed`.
    pub(super) num_listed: u64,
    /// `Admitting::listed`.
    pub(super) listed: u64,
}

/// Addresses in the memory of a lookup.
pub(super) struct Places {
    pub(super) features: u64,
    pub(super) first_find: u64,
    pub(super) first_rows: u64,
    pub(super) zeros: u64,
    pub(super) overflow_count: u64,
    pub(super) sort_state: u64,
    /// The `Keys` of each dim. They follow the features; the sections of the sort follow them.
    pub(super) keys: u64,
    pub(super) sections: u64,
    pub(super) sides: u64,
    pub(super) sorted: u64,
    pub(super) named: u64,
    pub(super) kinds: Vec<Keys>,
    pub(super) kept: Kept,
    /// How many ids each stands for; 0 if each stands for itself.
    pub(super) id_counts: u64,
    /// `GivenScores::address`
    pub(super) given_scores: u64,
    pub(super) candidates: CandidatePlaces,
    pub(super) num_zeros: usize,
    pub(super) words: usize,
}

impl Workspace {
    /// Divides the memory of a lookup into parts. `plan`: the sort, if the lookup is saved. `has_candidates`: whether a commit may insert keys.
    pub(super) fn places(
        &self,
        base: u64,
        features: &[Feature],
        ids_by_kind: &[usize],
        plan: Option<&SortPlan>,
        has_candidates: bool,
    ) -> Places {
        let (n, save): (usize, _) = (ids_by_kind.iter().sum(), plan.is_some());
        let is_weighted = save && features.iter().any(Feature::is_weighted);
        let has_weights = save && features.iter().any(|f| f.weights.is_some());
        let mut parts = BumpAllocator { base, at: 0 };
        let descriptor = size_of::<abi::Feature>() / 4;
        let feature_words = features.len() * (descriptor + 2);
        let key_words = if save { ids_by_kind.len() * size_of::<Keys>() / 4 } else { 0 };
        let section_words = plan.map_or(0, |plan| plan.sections.len() * size_of::<Section>() / 4);
        let payload = parts.take(feature_words + key_words + section_words);
        let zeros = parts.take(0);
        let overflow_count = parts.take(32);
        let mut candidates = CandidatePlaces::default();
        if has_candidates {
            candidates.num_overflow = parts.take(1);
            candidates.num_listed = parts.take(plan.map_or(0, |plan| plan.sections.len()));
        }
        let sort_state = parts.take(plan.map_or(0, SortPlan::state_words));
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
        let has_counts = features.iter().any(|feature| feature.id_counts != 0);
        let id_counts = parts.take(if has_counts { n } else { 0 });
        let has_scores = features.iter().any(|feature| feature.scores.is_some());
        let given_scores = parts.take(if has_scores { n * size_of::<KeyScore>() / 4 } else { 0 });
        if has_candidates {
            candidates.numbers = parts.take(n);
            candidates.listed = parts.take(n * size_of::<Listed>() / 4);
        }
        let mut kinds = Vec::new();
        for ((ids, row), lists) in ids_by_kind.iter().zip(&self.rows).zip(&lists) {
            let ids = if save { *ids } else { 0 };
            let (hot, runs) = (ids / HOT + 2, ids / RUN + ids / HOT + 2);
            kinds.push(Keys {
                lists: *lists,
                singles: parts.take(2 * ids),
                several: parts.take(2 * ids + 4),
                hot: parts.take(4 * hot),
                runs: parts.take(4 * runs),
                partial: parts.take(if ids > 0 { 4 * runs * quads(row.dim) } else { 0 }),
                width: row.dim as u32,
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
            id_counts: if has_counts { id_counts } else { 0 },
            given_scores: if has_scores { given_scores } else { 0 },
            candidates,
            num_zeros,
            words: parts.at,
        }
    }

    /// Returns scratch memory: addresses for records, values and overflow ids of `n` ids, and the memory of the sort.
    pub(super) fn scratch(&mut self, n: usize, plan: Option<&SortPlan>) -> Result<([u64; 3], Scratch)> {
        let of_plan = |words: fn(&SortPlan) -> usize| plan.map_or(0, words);
        let (values, pairs) = if plan.is_some() { (n, 2 * n) } else { (0, 0) };
        let sizes =
            [n, values, n, of_plan(SortPlan::count_words), of_plan(SortPlan::published_words), pairs, pairs];
        let total: usize = sizes.iter().map(|s| s.next_multiple_of(32)).sum();
        if self.scratch.as_ref().is_none_or(|s| s.len() < total) {
            self.scratch = None;
            self.scratch = Some(Buffer::uninit(&self.device.context, total + total / 4)?);
        }
        let base = self.scratch.as_ref().map_or(0, Buffer::address);
        let mut parts = BumpAllocator { base, at: 0 };
        let [records, values, overflow, counts, published, first, second] =
            sizes.map(|size| parts.take(size));
        Ok(([records, values, overflow], Scratch { counts, published, pairs: [first, second] }))
    }
}

#[cfg(test)]
mod tests {
    use super::BumpAllocator;

    #[test]
    fn parts_of_a_buffer_do_not_share_lines() {
        let mut parts = BumpAllocator { base: 1 << 20, at: 0 };
        let taken: Vec<u64> = [1, 0, 33, 32].map(|words| parts.take(words)).into();
        assert_eq!(taken, [0, 128, 128, 384].map(|bytes| (1 << 20) + bytes));
        assert_eq!(parts.at, 128);
    }
}
