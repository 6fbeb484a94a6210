//! Merges the gradients of a layer's output to one gradient for each distinct key. All devices use the same order: (feature, position),
//! in float32, summed over runs of 64 ids counted from the key's first one, then over the runs.

use std::ops::Range;

use crate::host::runs::{KeyRuns, RowCode};
use crate::simd::{Kernel, dispatch, prefetch_slice};
use crate::store::arena::RecordNumber;

/// Ids in a run. On a GPU, a warp sums a run.
const RUN: usize = 64;
/// How many gradient rows are prefetched ahead.
const AHEAD: usize = 64;

/// A merged gradient for each distinct key.
pub trait MergedGradients: Sync {
    /// Ranges of keys of about equal work.
    fn pieces(&self, num_pieces: usize) -> Vec<Range<usize>>;
    /// Writes the gradient of `key` to `sum`, which has dim elements. `D`: the dim, or 0 if it is not constant.
    fn merge<const D: usize>(&self, key: usize, sum: &mut [f32]);
}

/// The gradients of keys that the table has records for.
pub struct RecordGradients<'a, G> {
    /// Of each key; [`NO_RECORD`](crate::store::arena::NO_RECORD) for one that the table refused.
    pub records: &'a [RecordNumber],
    pub gradients: G,
}

/// The gradients of a table's features in the framework's memory, which are merged when they are read.
pub struct HeldGradients<'a> {
    pub runs: &'a KeyRuns,
    pub code: RowCode,
    /// `(bags, dim)` of each feature.
    pub rows: Vec<&'a [f32]>,
    pub dim: usize,
    /// Weight of the push.
    pub weight: f32,
}

impl HeldGradients<'_> {
    #[inline(always)]
    fn row<const D: usize>(&self, code: u32) -> &[f32] {
        let dim = if D > 0 { D } else { self.dim };
        let (feature, bag) = self.code.decode(code);
        let start = bag * dim;
        &self.rows[feature][start..start + dim]
    }

    /// Sums the gradients of some ids, in order. `W`: whether each has a coefficient.
    #[inline(always)]
    fn sum_run<const D: usize, const W: bool>(&self, ids: Range<usize>, sum: &mut [f32]) {
        let dim = if D > 0 { D } else { self.dim };
        let rows = self.runs.rows();
        let coefficients = if W { self.runs.coefficients().unwrap_or_default() } else { &[] };
        let sum = &mut sum[..dim];
        let mut is_first = true;
        for place in ids {
            if let Some(&later) = rows.get(place + AHEAD) {
                prefetch_slice(self.row::<D>(later));
            }
            let row = self.row::<D>(rows[place]);
            let coefficient = if W { coefficients[place] } else { 1.0 };
            if std::mem::take(&mut is_first) {
                for k in 0..dim {
                    sum[k] = if W { row[k] * coefficient } else { row[k] };
                }
            } else {
                for k in 0..dim {
                    sum[k] += if W { row[k] * coefficient } else { row[k] };
                }
            }
        }
    }

    #[inline(always)]
    fn sum_ids<const D: usize, const W: bool>(&self, ids: Range<usize>, sum: &mut [f32]) {
        let first = ids.start..ids.end.min(ids.start + RUN);
        self.sum_run::<D, W>(first.clone(), sum);
        if first.end < ids.end {
            self.sum_further_runs::<D, W>(first.end..ids.end, sum);
        }
    }

    /// A key with more ids than a run.
    #[inline(never)]
    fn sum_further_runs<const D: usize, const W: bool>(&self, ids: Range<usize>, sum: &mut [f32]) {
        let (mut constant, mut any) = ([0f32; D], vec![0f32; if D > 0 { 0 } else { self.dim }]);
        for start in ids.clone().step_by(RUN) {
            let run: &mut [f32] = if D > 0 { &mut constant } else { &mut any };
            self.sum_run::<D, W>(start..ids.end.min(start + RUN), run);
            sum.iter_mut().zip(&*run).for_each(|(s, r)| *s += *r);
        }
    }
}

impl MergedGradients for HeldGradients<'_> {
    fn pieces(&self, num_pieces: usize) -> Vec<Range<usize>> {
        let (ends, num_ids) = (self.runs.ends(), self.runs.num_ids());
        // The record of a key costs about as much as the gradient rows of two ids.
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
        let ends = self.runs.ends();
        let ids = if key == 0 { 0 } else { ends[key - 1] as usize }..ends[key] as usize;
        if self.runs.coefficients().is_some() {
            self.sum_ids::<D, true>(ids, sum);
        } else {
            self.sum_ids::<D, false>(ids, sum);
        }
        if self.weight != 1.0 {
            sum.iter_mut().for_each(|s| *s *= self.weight);
        }
    }
}

/// Gradients that are merged already.
pub struct StoredGradients<'a> {
    pub num_keys: usize,
    /// `(keys, dim)`
    pub sums: &'a [f32],
    pub weight: f32,
}

impl MergedGradients for StoredGradients<'_> {
    fn pieces(&self, num_pieces: usize) -> Vec<Range<usize>> {
        let num_keys = self.num_keys;
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
        // The largest exponent says so. A maximum of integers vectorises; a test with an early exit does not.
        let largest = |values: &[f32]| values.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
        self.0.chunks(4096).all(|chunk| largest(chunk) < 0x7f80_0000)
    }
}

pub fn is_finite(values: &[f32]) -> bool {
    dispatch(AllFinite(values))
}
