//! What a lookup keeps for the gradients of its rows.

use std::mem::offset_of;
use std::ops::Range;

use sok_core::row_type::RowType;

use super::Workspace;
use super::given_scores::GivenScores;
use super::places::CandidatePlaces;
use crate::abi::*;
use crate::gpu_table::GpuTable;
use crate::gpu_table::record::RowKind;
use crate::gpu_table::uses::SortedIds;
use crate::memory::{Buffer, words};

/// What a lookup keeps for its gradients. Fields of type `u64` are addresses in `memory`.
pub struct Saved {
    /// Device memory of everything that is kept.
    pub memory: Buffer<u32>,
    /// A `Side` for each feature; then, if gradients are copied, a `Gradients` for each feature; then, if one of them has weights,
    /// for each feature the address that takes the gradients of its weights.
    pub(super) sides: u64,
    pub(super) sorted: u64,
    /// Address of the sections of the sort, and the sections.
    pub(super) sections: (u64, Vec<Section>),
    pub(super) named: u64,
    pub(super) kept: Kept,
    pub(super) id_counts: u64,
    pub(super) given: GivenScores,
    pub(super) candidates: CandidatePlaces,
    /// Address of the `Keys` of each kind.
    pub(super) keys: u64,
    pub(super) entries: u64,
    pub(super) call: Call,
    pub(super) rows_blocks: usize,
    pub(super) kinds: Vec<Keys>,
    pub(super) ids_by_kind: Vec<usize>,
    pub(super) shift: u32,
    pub(super) source: Source,
    /// Type of the numbers of the outputs and of their gradients.
    pub array_type: RowType,
    /// Whether a gradient row may be read several times.
    pub(super) again: bool,
    /// Whether the numbers of ids of the features are upper bounds.
    pub(super) is_bounded: bool,
    /// The features of the call, in order. Empty for combined pushes.
    pub features: Vec<SavedFeature>,
    /// The index of each table that takes part, and its generation at the lookup.
    pub generations: Vec<(usize, u64)>,
}

/// What a lookup keeps of a feature on the host.
#[derive(Clone, Copy)]
pub struct SavedFeature {
    /// Index of the feature's table in the group.
    pub table: usize,
    /// Number of gradient rows.
    pub num_bags: usize,
    /// Number of ids of all bags.
    pub num_ids: usize,
    /// Number of columns of a gradient row.
    pub dim: usize,
    /// As `Feature::at_owner`.
    pub at_owner: bool,
    /// As `abi::Feature::scale`.
    pub(super) scale: f32,
}

impl Saved {
    /// Returns the number of words for the merged gradients of all keys, if every id has a key of its own.
    pub(super) fn sum_words(&self, rows: &[RowKind]) -> usize {
        self.ids_by_kind.iter().zip(rows).map(|(ids, row)| ids * 4 * quads(row.dim)).sum()
    }

    /// Returns whether a table has lost its records since the lookup.
    pub fn is_stale(&self, tables: &[GpuTable]) -> bool {
        self.generations.iter().any(|&(table, generation)| tables[table].generation != generation)
    }

    /// The sorted ids of a table.
    pub(crate) fn sorted_of(&self, table: usize) -> Option<SortedIds> {
        let (at, sections) = &self.sections;
        let number = sections.iter().position(|section| section.table as usize == table)?;
        let section = &sections[number];
        let counted = at + (number * size_of::<Section>() + offset_of!(Section, count)) as u64;
        Some(SortedIds {
            address: self.sorted + u64::from(section.first) * size_of::<Sorted>() as u64,
            count: section.count as usize,
            counted: if self.is_bounded { counted } else { 0 },
            end: if section.first_candidate == 0 { u32::MAX } else { section.first_candidate },
        })
    }

    /// Returns whether a commit may insert keys of the lookup.
    pub fn has_candidates(&self) -> bool {
        self.candidates.numbers != 0
    }

    /// Returns the maximum number of candidates of a table.
    pub fn max_candidates(&self, table: usize) -> u64 {
        let of_table = |s: &&Section| s.table as usize == table && s.first_candidate != 0;
        self.sections.1.iter().filter(of_table).map(|section| u64::from(section.count)).sum()
    }

    /// Address of the `Side` of each feature.
    pub fn sides_address(&self) -> u64 {
        self.sides
    }

    /// Returns whether ids have coefficients of their own.
    pub fn is_weighted(&self) -> bool {
        self.named != 0
    }

    /// Returns whether the gradients of all bags are at most half as many as the merged gradients of keys may be.
    pub fn has_few_gradients(&self) -> bool {
        let numbers =
            |of: fn(&SavedFeature) -> usize| self.features.iter().map(|f| of(f) * f.dim).sum::<usize>();
        2 * numbers(|f| f.num_bags) <= numbers(|f| f.num_ids)
    }

    /// Returns whether kernels can read gradient rows at these addresses. If the dim is a multiple of 4, they read four numbers at
    /// once, so the address must be a multiple of as many bytes.
    pub fn is_aligned(&self, rows: &[u64]) -> bool {
        let bytes = 4 * self.array_type.num_bytes() as u64;
        self.features.iter().zip(rows).all(|(f, row)| f.dim % 4 != 0 || row % bytes == 0)
    }

    /// Returns the `Work` parameter of a merge or an update of some kinds, in words. The other arguments are addresses; `prepared` and `factors` may be
    /// 0 for kernels that do not read them.
    pub(super) fn work(
        &self,
        workspace: &Workspace,
        kinds: Range<usize>,
        prepared: u64,
        factors: u64,
        sums: u64,
    ) -> Vec<u32> {
        let start = WorkHead {
            sides: self.sides,
            tables: workspace.tables(),
            entries: self.entries,
            sorted: self.sorted,
            named: self.named,
            prepared,
            factors,
            shift: self.shift,
            is_placed: 0,
        };
        let mut all = words(&[start]).to_vec();
        let mut at = sums;
        let all_kinds = self.kinds.iter().zip(&self.ids_by_kind).zip(&workspace.rows);
        for (kind, ((keys, ids), row)) in all_kinds.enumerate() {
            if kinds.contains(&kind) {
                all.extend_from_slice(words(&[Keys { sums: at, ..*keys }]));
            }
            at += (ids * 16 * quads(row.dim)) as u64;
        }
        all
    }
}
