//! From the gradients of a layer's output to one gradient a distinct key, in the one order that all devices keep:
//! (feature, position), float32, sums over runs of 64 ids counted from the key's own first, then over the runs.

use std::ops::Range;

use crate::arena::RecordNumber;
use crate::runs::{KeyRuns, RowCode};
use crate::simd::{Kernel, dispatch, prefetch_slice};

/// Ids a run. A run is what one warp sums on a GPU.
const RUN: usize = 64;
/// Gradient rows asked for ahead.
const AHEAD: usize = 64;

/// One merged gradient a distinct key.
pub trait MergedGradients: Sync {
    fn records(&self) -> &[RecordNumber];
    /// Keys in pieces of about equal work.
    fn pieces(&self, num_pieces: usize) -> Vec<Range<usize>>;
    /// Writes the gradient of `key` to `sum`, which is as long as the dim. `D`: the dim, or 0.
    fn merge<const D: usize>(&self, key: usize, sum: &mut [f32]);
}

/// The gradients of a table's features as the framework holds them, merged as they are asked for.
pub struct HeldGradients<'a> {
    pub runs: &'a KeyRuns,
    pub code: RowCode,
    /// `(bags, dim)` of each feature.
    pub rows: Vec<&'a [f32]>,
    pub dim: usize,
    /// With which the push counts.
    pub weight: f32,
}

impl HeldGradients<'_> {
    #[inline(always)]
    fn row<const D: usize>(&self, code: u32) -> &[f32] {
        let dim = if D > 0 { D } else { self.dim };
        let (feature, bag) = self.code.decode(code);
        &self.rows[feature][bag * dim..][..dim]
    }

    #[inline(always)]
    fn add_row<const D: usize>(&self, place: usize, is_first: bool, sum: &mut [f32]) {
        let row = self.row::<D>(self.runs.rows()[place]);
        let terms = sum.iter_mut().zip(row);
        match (self.runs.coefficients(), is_first) {
            (None, true) => terms.for_each(|(s, g)| *s = *g),
            (None, false) => terms.for_each(|(s, g)| *s += *g),
            (Some(c), true) => terms.for_each(|(s, g)| *s = *g * c[place]),
            (Some(c), false) => terms.for_each(|(s, g)| *s += *g * c[place]),
        }
    }
}

impl MergedGradients for HeldGradients<'_> {
    fn records(&self) -> &[RecordNumber] {
        self.runs.records()
    }

    fn pieces(&self, num_pieces: usize) -> Vec<Range<usize>> {
        let (ends, num_ids) = (self.runs.ends(), self.runs.num_ids());
        // A key costs about as much as two ids: its record against their gradient rows.
        let work = |key: usize| if key == 0 { 0 } else { ends[key - 1] as usize + 2 * key };
        let total = num_ids + 2 * ends.len();
        let bound = |piece: usize| {
            let wanted = total * piece / num_pieces;
            let (mut low, mut high) = (0, ends.len());
            while low < high {
                let middle = (low + high) / 2;
                if work(middle) < wanted { low = middle + 1 } else { high = middle }
            }
            low
        };
        (0..num_pieces)
            .map(|p| bound(p)..if p + 1 == num_pieces { ends.len() } else { bound(p + 1) })
            .filter(|keys| !keys.is_empty())
            .collect()
    }

    #[inline(always)]
    fn merge<const D: usize>(&self, key: usize, sum: &mut [f32]) {
        let (ends, rows) = (self.runs.ends(), self.runs.rows());
        let (start, end) = (if key == 0 { 0 } else { ends[key - 1] as usize }, ends[key] as usize);
        let mut run = [0f32; D];
        let mut long_run = Vec::new();
        for place in start..end {
            prefetch_slice(self.row::<D>(rows[(place + AHEAD).min(rows.len() - 1)]));
            let in_run = (place - start) % RUN;
            if place - start < RUN {
                self.add_row::<D>(place, in_run == 0, sum);
                continue;
            }
            // Only keys with more than 64 ids come here.
            let run: &mut [f32] = if D > 0 {
                &mut run
            } else {
                long_run.resize(self.dim, 0.0);
                &mut long_run
            };
            self.add_row::<D>(place, in_run == 0, run);
            if in_run == RUN - 1 || place + 1 == end {
                sum.iter_mut().zip(&*run).for_each(|(s, r)| *s += *r);
            }
        }
        sum.iter_mut().for_each(|s| *s *= self.weight);
    }
}

/// Gradients that were merged before.
pub struct StoredGradients<'a> {
    pub records: &'a [RecordNumber],
    /// `(keys, dim)`
    pub sums: &'a [f32],
    pub weight: f32,
}

impl MergedGradients for StoredGradients<'_> {
    fn records(&self) -> &[RecordNumber] {
        self.records
    }

    fn pieces(&self, num_pieces: usize) -> Vec<Range<usize>> {
        let num_keys = self.records.len();
        (0..num_pieces)
            .map(|p| num_keys * p / num_pieces..num_keys * (p + 1) / num_pieces)
            .filter(|keys| !keys.is_empty())
            .collect()
    }

    #[inline(always)]
    fn merge<const D: usize>(&self, key: usize, sum: &mut [f32]) {
        let row = &self.sums[key * sum.len()..][..sum.len()];
        sum.iter_mut().zip(row).for_each(|(s, g)| *s = *g * self.weight);
    }
}

/// Merges `keys` of a push into `sums`, `(keys, dim)`.
pub struct Merge<'a, const D: usize> {
    pub gradients: &'a HeldGradients<'a>,
    pub keys: Range<usize>,
    pub sums: &'a mut [f32],
}

impl<const D: usize> Kernel for Merge<'_, D> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let dim = if D > 0 { D } else { self.gradients.dim };
        for (key, sum) in self.keys.zip(self.sums.chunks_exact_mut(dim)) {
            if D > 0 {
                let mut local = [0f32; D];
                self.gradients.merge::<D>(key, &mut local);
                sum.copy_from_slice(&local);
            } else {
                self.gradients.merge::<D>(key, sum);
            }
        }
    }
}

pub fn merge(gradients: &HeldGradients, keys: Range<usize>, sums: &mut [f32]) {
    match gradients.dim {
        16 => dispatch(Merge::<16> { gradients, keys, sums }),
        32 => dispatch(Merge::<32> { gradients, keys, sums }),
        64 => dispatch(Merge::<64> { gradients, keys, sums }),
        128 => dispatch(Merge::<128> { gradients, keys, sums }),
        _ => dispatch(Merge::<0> { gradients, keys, sums }),
    }
}

struct AllFinite<'a>(&'a [f32]);

impl Kernel for AllFinite<'_> {
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        // The largest exponent says it; a maximum of integers vectorises, a test with an early end does not.
        let largest = |values: &[f32]| values.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
        self.0.chunks(4096).all(|chunk| largest(chunk) < 0x7f80_0000)
    }
}

pub fn is_finite(values: &[f32]) -> bool {
    dispatch(AllFinite(values))
}
