//! The tiles, digits and memory of a sort.

use crate::abi::*;

/// The sections, digits and grids of a sort.
pub(super) struct SortPlan {
    pub sections: Vec<Section>,
    /// Ids of a tile for each thread, one of `SORT_ITEMS`.
    pub items: usize,
    pub tiles: usize,
    /// Number of blocks of `list_keys`.
    pub lists: usize,
    /// Rows of `Sort::published` in a pass: of tiles, and of groups of tiles.
    pub rows: usize,
    pub passes: usize,
    /// Bits of a digit.
    pub bits: u32,
}

/// Addresses of the memory that a sort needs besides its input and output.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    /// `Sort::counts`.
    pub counts: u64,
    /// `Sort::published`.
    pub published: u64,
    /// Output of the passes before the last one, in turn.
    pub pairs: [u64; 2],
}

impl SortPlan {
    /// Plans a sort. Numbers of ids, dims and tables of the sections must be set. `max_records`: a number above all record
    /// numbers. `likely_records`: the same, if work in progress inserts no new keys. `shared_bytes`: maximum shared memory of a
    /// block, which is that of a multiprocessor minus a kilobyte.
    ///
    /// The number of passes is the smallest that the bits of a digit allow. If `likely_records` need fewer passes, a digit has
    /// enough bits for these to suffice, and the device skips the others. The number of ids per thread is the one with which all
    /// blocks of a pass finish first, considering how many of them run at the same time.
    pub fn new(
        mut sections: Vec<Section>,
        max_records: u64,
        likely_records: u64,
        multiprocessors: usize,
        shared_bytes: usize,
    ) -> SortPlan {
        sections.retain(|s| s.count > 0);
        // The static shared memory of a kernel is less than a kilobyte.
        let fit = |items, bits| (shared_bytes + 1024) / (shared_by(items, bits) + 1024);
        let largest = SORT_ITEMS[SORT_ITEMS.len() - 1];
        let max_bits = if fit(largest, MAX_BITS) > 0 { MAX_BITS } else { MAX_BITS - 1 };
        let bits_of = |records: u64| (u64::BITS - records.saturating_sub(1).leading_zeros()).clamp(1, 32);
        let (all_bits, likely_bits) = (bits_of(max_records), bits_of(likely_records));
        let passes = all_bits.div_ceil(max_bits);
        let likely_passes = likely_bits.div_ceil(max_bits);
        let bits = all_bits.div_ceil(passes).max(likely_bits.div_ceil(likely_passes)).max(MIN_BITS);
        let time = |items: &usize| {
            let tile = items * SORT_THREADS;
            let tiles: usize = sections.iter().map(|s| (s.count as usize).div_ceil(tile)).sum();
            let at_once = multiprocessors * SORT_BLOCKS.min(fit(*items, bits)).max(1);
            tiles.div_ceil(at_once) * (items + BLOCK_ITEMS)
        };
        let items = SORT_ITEMS.into_iter().min_by_key(time).unwrap_or(largest);
        let (mut first, mut first_tile, mut first_list) = (0, 0, 0);
        for section in &mut sections {
            (section.first, section.first_tile, section.first_list) = (first, first_tile, first_list);
            first += section.count;
            first_tile += section.count.div_ceil((items * SORT_THREADS) as u32);
            first_list += section.count.div_ceil(LIST_BLOCK as u32);
        }
        let (tiles, lists) = (first_tile as usize, first_list as usize);
        let rows = tiles + 2 * (tiles / SORT_GROUP + sections.len() + 1);
        SortPlan { sections, items, tiles, lists, rows, passes: passes as usize, bits }
    }

    /// Number of values of a digit.
    fn digits(&self) -> usize {
        1 << self.bits
    }

    /// Number of words of `Sort::next` and `Sort::flags`, which must be zeros before the sort.
    pub fn state_words(&self) -> usize {
        SORT_STATE + self.passes * self.rows
    }

    /// Number of words of `Scratch::counts`, which must be zeros before the sort.
    pub fn count_words(&self) -> usize {
        self.sections.len() * self.passes * self.digits()
    }

    /// Number of words of `Scratch::published`.
    pub fn published_words(&self) -> usize {
        self.passes * self.rows * self.digits()
    }
}

/// The time of a block that does not depend on its ids, in ids per thread.
const BLOCK_ITEMS: usize = 3;

/// Returns the bytes of dynamic shared memory of a block of a pass: for counts by warp and digit, or for the tile, and for the
/// start of each digit.
pub(super) fn shared_by(items: usize, bits: u32) -> usize {
    let counts = (SORT_THREADS / 32 * size_of::<u16>()) << bits;
    let tile = items * SORT_THREADS * size_of::<Sorted>();
    counts.max(tile) + (4 << bits)
}

#[cfg(test)]
mod tests {
    use super::{Section, SortPlan};

    fn plan(counts: &[u32], records: u64) -> SortPlan {
        let section = |&count: &u32| Section { count, ..Section::default() };
        SortPlan::new(counts.iter().map(section).collect(), records, records, 132, 227 << 10)
    }

    #[test]
    fn blocks_of_a_sort_take_as_many_ids_as_they_are_through_with_first() {
        let shape = |counts: &[u32]| {
            let plan = plan(counts, 1 << 20);
            (plan.items, plan.tiles)
        };
        assert_eq!(shape(&[]), (4, 0));
        assert_eq!(shape(&[1]), (4, 1));
        assert_eq!(shape(&[16_384; 26]), (4, 208));
        assert_eq!(shape(&[264 * 2048 + 1]), (8, 133));
        assert_eq!(shape(&[65_536; 26]), (13, 260));
        assert_eq!(shape(&[327_680; 8]), (10, 512));
        assert_eq!(shape(&[1 << 24]), (13, 2521));
    }

    #[test]
    fn fewer_blocks_run_at_once_where_they_have_less_memory_to_share() {
        let section = Section { count: 132 * 1536, ..Section::default() };
        let items =
            |kilobytes: usize| SortPlan::new(vec![section; 2], 1 << 20, 1 << 20, 132, kilobytes << 10).items;
        assert_eq!([items(227), items(99), items(31)], [4, 4, 8]);
    }

    #[test]
    fn sections_lie_side_by_side_and_no_block_is_of_two() {
        let plan = plan(&[3000, 0, 1, 5000], 1);
        let places: Vec<_> =
            plan.sections.iter().map(|s| [s.first, s.count, s.first_tile, s.first_list]).collect();
        assert_eq!(places, [[0, 3000, 0, 0], [3000, 1, 2, 2], [3001, 5000, 3, 3]]);
        assert_eq!((plan.tiles, plan.lists), (6, 6));
    }

    #[test]
    fn digits_are_as_few_as_their_bits_allow() {
        let shape = |records| {
            let plan = plan(&[1], records);
            (plan.passes, plan.bits)
        };
        assert_eq!(shape(0), (1, 9));
        assert_eq!(shape(1 << 11), (1, 11));
        assert_eq!(shape((1 << 11) + 1), (2, 9));
        assert_eq!(shape(1 << 20), (2, 10));
        assert_eq!(shape(1 << 22), (2, 11));
        assert_eq!(shape((1 << 22) + 1), (3, 9));
        assert_eq!(shape(1 << 31), (3, 11));
        let one = || vec![Section { count: 1, ..Section::default() }];
        let small = SortPlan::new(one(), 1 << 31, 1 << 31, 132, 63 << 10);
        assert_eq!((small.passes, small.bits), (4, 9));
        let likely = |most, records| {
            let plan = SortPlan::new(one(), most, records, 132, 227 << 10);
            (plan.passes, plan.bits)
        };
        assert_eq!(likely((1 << 22) + 1, 1 << 22), (3, 11));
        assert_eq!(likely((1 << 22) + 2, (1 << 22) + 1), (3, 9));
        assert_eq!(likely((1 << 11) + 1, 1 << 10), (2, 10));
        assert_eq!(likely(1 << 20, 1), (2, 10));
    }
}
