//! From records to output rows: a copy of each row, or the combination of a bag.
//!
//! A bag's sum starts with its first row and adds the others in order, in float32. With weights, each row is multiplied first. The sum
//! is multiplied by the combiner's scale. Padding and ids of weight 0 are left out, whatever their rows hold. A bag of nothing else is
//! zeros.

use std::ops::Range;

use crate::contract::batch::{Bags, Feature, Keys};
use crate::host::find::{Consumer, FirstRecord, Whole};
use crate::key::Key;
use crate::row_type::Number;
use crate::simd::{Kernel, copy_streaming, prefetch_slice, stream_row};
use crate::store::arena::{NO_RECORD, RecordNumber};
use crate::store::rows::{Rows, RowsWithDim};

/// How many rows are prefetched ahead, where the search has not done so.
const AHEAD: usize = 24;
/// Record number that stands for padding.
pub const PADDING: RecordNumber = u32::MAX;
/// Record number that stands for an id outside the vocabulary: a row of zeros.
pub const OUTSIDE: RecordNumber = u32::MAX - 1;

/// The row of a key without a record.
pub struct MissingRow<'a, N> {
    first: &'a FirstRecord,
    /// Whether all keys have the same row. If not, each has its first values.
    is_shared: bool,
    row: Vec<N>,
    /// The first values of a key.
    values: Vec<f32>,
}

impl<'a, N: Number> MissingRow<'a, N> {
    /// `shared`: the row of all keys without a record, if they have the same. `N` must be able to hold its numbers.
    pub fn new(first: &'a FirstRecord, shared: Option<Vec<f32>>) -> Self {
        let (is_shared, dim) = (shared.is_some(), first.layout.dim());
        let row =
            shared.map_or_else(|| vec![N::default(); dim], |row| row.into_iter().map(N::from_f32).collect());
        MissingRow { first, is_shared, row, values: vec![0.0; if is_shared { 0 } else { dim }] }
    }

    /// Floats in a row.
    pub fn dim(&self) -> usize {
        self.row.len()
    }

    /// The row of a record, or of a key without one.
    #[inline(always)]
    fn or<'r, const D: usize, const MAY_MISS: bool>(
        &'r mut self,
        rows: RowsWithDim<'r, N, D>,
        record: RecordNumber,
        keys: Keys,
        position: usize,
    ) -> &'r [N; D] {
        if MAY_MISS && record == NO_RECORD {
            return self.get(keys.get(position)).first_chunk().expect("rows are as wide as the dim");
        }
        rows.get(record)
    }

    #[cold]
    #[inline(never)]
    pub fn get(&mut self, key: Key) -> &[N] {
        if !self.is_shared {
            self.first.fill_row(key, &mut self.values);
            self.row.iter_mut().zip(&self.values).for_each(|(to, x)| *to = N::from_f32(*x));
        }
        &self.row
    }
}

/// Pools bags of equal length without weights. `D`: the dim, or 0 if it is not constant.
pub struct PlainPooling<'a, const D: usize, N> {
    keys: Keys<'a>,
    hotness: usize,
    scale: f32,
    /// The next bag to pool. `output` starts with it.
    next_bag: usize,
    num_bags: usize,
    /// `(bags, dim)`
    output: &'a mut [f32],
    missing: MissingRow<'a, N>,
    /// Whether the output is larger than the cache.
    stream: bool,
    sum: Vec<f32>,
}

impl<'a, const D: usize, N: Number> PlainPooling<'a, D, N> {
    pub fn new(
        feature: &Feature<'a>,
        output: &'a mut [f32],
        missing: MissingRow<'a, N>,
        stream: bool,
    ) -> Self {
        let (hotness, scale) = match feature.bags {
            Bags::Fixed { hotness, .. } => (hotness, feature.combiner.scale(hotness as f32, hotness as f32)),
            _ => (1, 1.0),
        };
        let sum = vec![0.0; missing.first.layout.dim()];
        let (next_bag, num_bags, keys) = (0, feature.num_bags(), feature.keys);
        PlainPooling { keys, hotness, scale, next_bag, num_bags, output, missing, stream, sum }
    }

    /// Pools all bags that end before id `settled`. `may_miss`: some ids may have no record.
    #[inline(always)]
    pub fn pool_up_to<const PREFETCH: bool>(
        &mut self,
        rows: &impl Rows<Number = N>,
        records: &[RecordNumber],
        settled: usize,
        may_miss: bool,
    ) {
        let end = settled.checked_div(self.hotness).map_or(self.num_bags, |full| full.min(self.num_bags));
        if end <= self.next_bag {
            return;
        }
        let dim = if D > 0 { D } else { self.sum.len() };
        let bags = self.next_bag..end;
        let output = std::mem::take(&mut self.output);
        let (now, later) = output.split_at_mut(bags.len() * dim);
        self.output = later;
        self.next_bag = end;
        if D > 0 {
            let (rows, now) = (rows.with_dim::<D>(), now.as_chunks_mut().0);
            if may_miss {
                self.pool_constant::<PREFETCH, true>(rows, records, bags, now);
            } else {
                self.pool_constant::<PREFETCH, false>(rows, records, bags, now);
            }
            return;
        }
        for (bag, row) in bags.zip(now.chunks_exact_mut(dim)) {
            let start = bag * self.hotness;
            if PREFETCH {
                for record in records[start..].iter().skip(AHEAD).take(self.hotness) {
                    prefetch_slice(&rows.row(*record)[..dim]);
                }
            }
            self.pool_any(rows, &records[start..start + self.hotness], start, row);
        }
    }

    /// Without `MAY_MISS` no function is called in between, so sums stay in registers.
    #[inline(always)]
    fn pool_constant<const PREFETCH: bool, const MAY_MISS: bool>(
        &mut self,
        rows: RowsWithDim<'_, N, D>,
        records: &[RecordNumber],
        bags: Range<usize>,
        output: &mut [[f32; D]],
    ) {
        let (hotness, stream, scale, keys) = (self.hotness, self.stream, self.scale, self.keys);
        let (start, end) = (bags.start * hotness, bags.end * hotness);
        let ids = records[start..end].iter().enumerate();
        let mut later = records[start..].iter().skip(AHEAD);
        let mut found = ids.map(|(i, record)| {
            if PREFETCH && let Some(record) = later.next() {
                prefetch_slice(rows.get(*record));
            }
            (start + i, *record)
        });
        let missing = &mut self.missing;
        if hotness == 1 {
            // A bag of one id is its row, whatever the combiner: the scale is 1.
            for ((position, record), output) in found.zip(output) {
                let row = missing.or::<D, MAY_MISS>(rows, record, keys, position);
                N::with_f32(row, |row| store_row(output, row, stream));
            }
            return;
        }
        for output in output {
            let mut sum = match found.next() {
                Some((position, record)) if hotness > 0 => {
                    N::widened(missing.or::<D, MAY_MISS>(rows, record, keys, position))
                }
                _ => [0.0; D],
            };
            for _ in 1..hotness {
                let Some((position, record)) = found.next() else { break };
                let row = N::widened(missing.or::<D, MAY_MISS>(rows, record, keys, position));
                for k in 0..D {
                    sum[k] += row[k];
                }
            }
            if scale != 1.0 {
                sum.iter_mut().for_each(|s| *s *= scale);
            }
            store_row(output, &sum, stream);
        }
    }

    #[inline(always)]
    fn row<'s>(
        &'s mut self,
        rows: &'s impl Rows<Number = N>,
        record: RecordNumber,
        position: usize,
    ) -> &'s [N] {
        if record == NO_RECORD {
            return self.missing.get(self.keys.get(position));
        }
        rows.row(record)
    }

    #[inline(always)]
    fn pool_any(
        &mut self,
        rows: &impl Rows<Number = N>,
        bag: &[RecordNumber],
        start: usize,
        output: &mut [f32],
    ) {
        let mut sum = std::mem::take(&mut self.sum);
        sum.fill(0.0);
        for (i, &record) in bag.iter().enumerate() {
            let row = self.row(rows, record, start + i);
            let terms = sum.iter_mut().zip(row);
            if i == 0 {
                terms.for_each(|(s, x)| *s = x.to_f32());
            } else {
                terms.for_each(|(s, x)| *s += x.to_f32());
            }
        }
        if self.scale != 1.0 {
            sum.iter_mut().for_each(|s| *s *= self.scale);
        }
        store(output, &sum, self.stream);
        self.sum = sum;
    }
}

#[inline(always)]
fn store_row<const D: usize>(output: &mut [f32; D], row: &[f32; D], stream: bool) {
    if stream { stream_row(output, row) } else { *output = *row }
}

#[inline(always)]
fn store(output: &mut [f32], row: &[f32], stream: bool) {
    if stream { copy_streaming(output, row) } else { output.copy_from_slice(row) }
}

impl<const D: usize, N: Number> Consumer<Whole<'_>> for PlainPooling<'_, D, N> {
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        (if D > 0 { D } else { self.sum.len() }) * size_of::<N>()
    }

    #[inline(always)]
    fn settled(&mut self, source: &mut Whole<'_>, records: &[RecordNumber], settled: usize, may_miss: bool) {
        self.pool_up_to::<false>(&source.arena.rows(), records, settled, may_miss);
    }
}

/// Pools bags of any length, with weights, padding, or ids without a record.
///
/// `records`: of the ids from the first id of the first bag. `coefficients`: receives the factor of the bag's gradient for each id, or
/// is empty.
pub fn pool_bags<R: Rows>(
    feature: &Feature,
    bags: Range<usize>,
    rows: &R,
    records: &[RecordNumber],
    missing: &mut MissingRow<R::Number>,
    output: &mut [f32],
    coefficients: &mut [f32],
) {
    let dim = missing.first.layout.dim();
    let base = if bags.is_empty() { 0 } else { feature.bag(bags.start).start };
    for (bag, sum) in bags.zip(output.chunks_exact_mut(dim)) {
        let mut is_first = true;
        let (mut weights, mut squares) = (0.0f32, 0.0f32);
        for position in feature.bag(bag) {
            let record = records[position - base];
            if record == PADDING {
                continue;
            }
            let weight = feature.weights.map_or(1.0, |w| w[position]);
            if weight == 0.0 {
                continue;
            }
            weights += weight;
            squares += weight * weight;
            let row = match record {
                OUTSIDE => rows.row(NO_RECORD),
                NO_RECORD => missing.get(feature.keys.get(position)),
                record => rows.row(record),
            };
            let terms = sum.iter_mut().zip(row);
            if std::mem::take(&mut is_first) {
                terms.for_each(|(s, x)| *s = weight * x.to_f32());
            } else {
                terms.for_each(|(s, x)| *s += weight * x.to_f32());
            }
        }
        let scale = match feature.bags {
            Bags::Each => 1.0,
            _ => feature.combiner.scale(weights, squares),
        };
        if is_first {
            sum.fill(0.0);
        } else if scale != 1.0 {
            sum.iter_mut().for_each(|s| *s *= scale);
        }
        if coefficients.is_empty() {
            continue;
        }
        for position in feature.bag(bag) {
            coefficients[position - base] = feature.weights.map_or(1.0, |w| w[position]) * scale;
        }
    }
}

/// Pools plain bags whose records are known.
pub struct PoolRange<'a, 'b, const D: usize, R: Rows> {
    pub pooling: PlainPooling<'a, D, R::Number>,
    pub rows: &'b R,
    pub records: &'b [RecordNumber],
}

impl<const D: usize, R: Rows> Kernel for PoolRange<'_, '_, D, R> {
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let may_miss = self.records.contains(&NO_RECORD);
        self.pooling.pool_up_to::<true>(self.rows, self.records, self.records.len(), may_miss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::batch::Combiner;
    use crate::contract::record::RecordLayout;
    use crate::initializer::Initializer;
    use crate::row_type::{RowType, with_number};
    use crate::store::arena::Arena;
    use crate::store::format::RecordFormat;

    const DIM: usize = 16;

    /// Rows one after the other, without states.
    struct Buffer(Vec<f32>);

    impl Rows for Buffer {
        type Number = f32;

        fn row(&self, number: RecordNumber) -> &[f32] {
            &self.0[number as usize * DIM..][..DIM]
        }

        fn with_dim<const D: usize>(&self) -> RowsWithDim<'_, f32, D> {
            RowsWithDim::new(&self.0, DIM)
        }
    }

    fn pooled<R: Rows>(row_type: RowType, rows: &R, records: &[RecordNumber]) -> [Vec<f32>; 3] {
        let keys: Vec<u64> = records.iter().map(|&record| u64::from(record)).collect();
        let feature = Feature {
            name: "f",
            table: 0,
            keys: Keys::U64(&keys),
            bags: Bags::Fixed { num_bags: records.len() / 2, hotness: 2 },
            combiner: Combiner::Mean,
            weights: None,
            padding_key: None,
            id_counts: None,
            scores: None,
        };
        let initializer = Initializer::Constant { value: 1.0 };
        let format = RecordFormat { row_type, dim: DIM, rounds_by_chance: false };
        let first = FirstRecord { seed: 0, initializer, layout: RecordLayout::new(DIM, None), format };
        let missing = || MissingRow::new(&first, None);
        let [mut constant, mut any, mut bags] = [(); 3].map(|()| vec![9.0; records.len() / 2 * DIM]);
        let pooling = PlainPooling::<DIM, _>::new(&feature, &mut constant, missing(), false);
        PoolRange { pooling, rows, records }.run();
        let pooling = PlainPooling::<0, _>::new(&feature, &mut any, missing(), false);
        PoolRange { pooling, rows, records }.run();
        pool_bags(&feature, 0..records.len() / 2, rows, records, &mut missing(), &mut bags, &mut []);
        [constant, any, bags]
    }

    #[test]
    fn rows_of_a_buffer_are_pooled_as_those_of_an_arena() {
        let records = [1, 2, 5, NO_RECORD, 3, 3, 4, 1];
        let expected: Vec<f32> = [1.5, 3.0, 3.0, 2.5].iter().flat_map(|mean| [*mean; DIM]).collect();
        let buffer = (0..=5u8).flat_map(|number| [f32::from(number); DIM]).collect();
        let of_buffer = pooled(RowType::Float32, &Buffer(buffer), &records);
        assert_eq!(of_buffer, [&expected, &expected, &expected].map(Clone::clone));
        for row_type in RowType::ALL {
            let format = RecordFormat { row_type, dim: DIM, rounds_by_chance: false };
            let mut arena = Arena::new(format.width(2 * DIM)).unwrap();
            for number in 1..=5u8 {
                let record = arena.allocate().unwrap();
                format.write_row(arena.record_mut(record), &[f32::from(number); DIM]);
            }
            with_number!(row_type, N => assert_eq!(pooled(row_type, &arena.rows::<N>(), &records), of_buffer));
        }
    }
}
