//! Finds the rows with the lowest scores without sorting the table.

use crate::error::Result;
use crate::memory;

const WHAT: &str = "the rows that a full table removes";
/// Bits of a rank that one pass over the rows resolves.
const BITS: u32 = 12;
/// So many rows are ranked by a selection in memory.
const SMALL: u64 = 1 << 14;

/// A row's place in the order of removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Its score.
    pub score: u64,
    /// Its key, which decides between equal scores.
    pub key: u64,
}

impl Rank {
    fn number(self) -> u128 {
        u128::from(self.score) << 64 | u128::from(self.key)
    }
}

/// The rows whose ranks lie in a range, ends included.
#[derive(Clone, Copy)]
struct Window {
    low: u128,
    high: u128,
    num_rows: u64,
}

impl Window {
    const EMPTY: Window = Window { low: u128::MAX, high: 0, num_rows: 0 };

    fn add(&mut self, rank: u128) {
        self.low = self.low.min(rank);
        self.high = self.high.max(rank);
        self.num_rows += 1;
    }
}

/// Returns the `count` rows with the lowest ranks, in their order, or all if there are not more.
///
/// `rows`: returns all rows with their ranks, which are distinct. It is called several times.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory).
pub fn lowest<T: Copy, I: Iterator<Item = (Rank, T)>>(
    count: u64,
    rows: impl Fn() -> I,
) -> Result<Vec<(Rank, T)>> {
    let mut all = Window::EMPTY;
    rows().for_each(|(rank, _)| all.add(rank.number()));
    let count = count.min(all.num_rows);
    if count == 0 {
        return Ok(Vec::new());
    }
    let highest = if count == all.num_rows { all.high } else { select(all, count, &rows)? };
    let mut found = memory::with_capacity(count as usize, WHAT)?;
    found.extend(rows().filter(|(rank, _)| rank.number() <= highest));
    found.sort_unstable_by_key(|(rank, _)| *rank);
    Ok(found)
}

/// Returns the rank of row number `nth` of a window, counted from 1 in the order of ranks.
fn select<T, I: Iterator<Item = (Rank, T)>>(
    mut window: Window,
    mut nth: u64,
    rows: &impl Fn() -> I,
) -> Result<u128> {
    let ranks_in =
        |low, high| rows().map(|(rank, _)| rank.number()).filter(move |r| (low..=high).contains(r));
    while window.num_rows > SMALL {
        let shift = (u128::BITS - (window.high - window.low).leading_zeros()).saturating_sub(BITS);
        let mut bins = memory::filled(Window::EMPTY, 1 << BITS, WHAT)?;
        ranks_in(window.low, window.high)
            .for_each(|rank| bins[((rank - window.low) >> shift) as usize].add(rank));
        for bin in bins {
            if nth <= bin.num_rows {
                window = bin;
                break;
            }
            nth -= bin.num_rows;
        }
    }
    let mut ranks = memory::with_capacity(window.num_rows as usize, WHAT)?;
    ranks.extend(ranks_in(window.low, window.high));
    Ok(*ranks.select_nth_unstable(nth as usize - 1).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rows: &[(Rank, u32)], count: u64) {
        let mut expected = rows.to_vec();
        expected.sort_unstable();
        expected.truncate(count as usize);
        assert_eq!(lowest(count, || rows.iter().copied()).unwrap(), expected);
    }

    #[test]
    fn the_lowest_rows_are_those_of_a_sort() {
        type Ranks = fn(u64) -> Rank;
        let mix = |i: u64| crate::key::hash(i);
        let ranks: [Ranks; 5] = [
            |i| Rank { score: 1, key: i },
            |i| Rank { score: crate::key::hash(i), key: 0 },
            |i| Rank { score: crate::key::hash(i) % 3, key: crate::key::hash(i) },
            |i| Rank { score: i / 1000, key: u64::MAX - i },
            |i| Rank { score: if i == 7 { u64::MAX } else { 0 }, key: i << 40 },
        ];
        for rank in ranks {
            for num_rows in [0, 1, 5, 1000, 100_000] {
                let rows: Vec<_> = (0..num_rows).map(|i| (rank(i), mix(i) as u32)).collect();
                for count in
                    [0, 1, 2, num_rows / 64, num_rows / 2, num_rows.saturating_sub(1), num_rows, num_rows + 9]
                {
                    check(&rows, count);
                }
            }
        }
    }
}
