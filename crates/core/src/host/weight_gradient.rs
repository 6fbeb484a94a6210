//! The gradient of the loss with respect to the weights of a feature's ids, through the combiner.

use crate::contract::batch::{Bags, Combiner, Feature};
use crate::error::Result;
use crate::host::pooling::{MissingRow, OUTSIDE, PADDING};
use crate::key::Key;
use crate::memory;
use crate::row_type::Number;
use crate::store::arena::{NO_RECORD, RecordNumber};
use crate::store::rows::Rows;

/// What a lookup keeps of a feature with weights. Rows are read again when the gradient is computed, so a row that was updated in between
/// counts as it is then.
pub struct WeightTrace {
    combiner: Combiner,
    is_each: bool,
    bag_ends: Vec<u32>,
    weights: Vec<f32>,
    records: Vec<RecordNumber>,
    /// Positions of ids without a record, ascending, with their keys.
    missing: Vec<(u32, Key)>,
}

impl WeightTrace {
    pub fn new(feature: &Feature, records: &[RecordNumber]) -> Result<WeightTrace> {
        let (without, what) = ((0..records.len()).filter(|&p| records[p] == NO_RECORD), "the weights of ids");
        Ok(WeightTrace {
            combiner: feature.combiner,
            is_each: matches!(feature.bags, Bags::Each),
            bag_ends: memory::collect((0..feature.num_bags()).map(|b| feature.bag(b).end as u32), what)?,
            weights: memory::collect(feature.weights.unwrap_or_default().iter().copied(), what)?,
            missing: memory::collect(without.map(|p| (p as u32, feature.keys.get(p))), what)?,
            records: memory::collect(records.iter().copied(), what)?,
        })
    }

    pub fn num_ids(&self) -> usize {
        self.records.len()
    }

    pub fn num_bytes(&self) -> usize {
        self.bag_ends.len() * 4 + self.weights.len() * 8 + self.missing.len() * 16
    }

    /// `source`: the rows of the records. `rows`: gradient of the output, `(bags, dim)`. `gradients`: one for each id.
    ///
    /// With d the product of an id's row and its bag's gradient, w the weights, s = sum of w, q = sum of w^2:
    /// sum d; mean (d - sum(w d) / s) / s; sqrtn d / sqrt(q) - w sum(w d) / q^1.5. Zero where s or q is.
    pub fn gradients<R: Rows>(
        &self,
        source: &R,
        mut missing_row: MissingRow<R::Number>,
        rows: &[f32],
        gradients: &mut [f32],
    ) {
        let dim = missing_row.dim();
        let mut missing = self.missing.iter();
        let mut start = 0;
        for (&end, gradient) in self.bag_ends.iter().zip(rows.chunks_exact(dim)) {
            let end = end as usize;
            for (position, product) in (start..end).zip(&mut gradients[start..end]) {
                let row = match self.records[position] {
                    PADDING | OUTSIDE => source.row(NO_RECORD),
                    NO_RECORD => missing.next().map_or(&[][..], |&(_, key)| missing_row.get(key)),
                    record => source.row(record),
                };
                *product = row.iter().zip(gradient).map(|(x, g)| x.to_f32() * g).sum();
            }
            self.through_combiner(start..end, &mut gradients[start..end]);
            start = end;
        }
    }

    fn through_combiner(&self, bag: std::ops::Range<usize>, products: &mut [f32]) {
        if self.is_each || self.combiner == Combiner::Sum {
            return;
        }
        let counts = |p: &usize| self.records[*p] != PADDING;
        let weights = &self.weights;
        let sum: f32 = bag.clone().filter(counts).map(|p| weights[p]).sum();
        let squares: f32 = bag.clone().filter(counts).map(|p| weights[p] * weights[p]).sum();
        let adds = |p: &usize| counts(p) && weights[*p] != 0.0;
        let total: f32 = bag.clone().filter(adds).map(|p| weights[p] * products[p - bag.start]).sum();
        let scale = self.combiner.scale(sum, squares);
        for position in bag.clone() {
            let product = &mut products[position - bag.start];
            *product = match self.combiner {
                _ if !counts(&position) => 0.0,
                Combiner::Mean => (*product - total * scale) * scale,
                _ => (*product - weights[position] * total * scale * scale) * scale,
            };
        }
    }
}
