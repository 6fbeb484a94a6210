//! The inputs of a lookup, as the tests make them.

use sok_core::contract::batch::{Bags, Combiner, Feature, Keys, Scores, Splits};
use sok_core::contract::table::TableConfig;
use sok_core::key::Key;

#[derive(Clone, Copy, Debug)]
pub enum KeyType {
    I64,
    U64,
    I32,
    U32,
    Words,
}

/// Ids in the type in which a framework has them.
#[derive(Clone, Debug)]
pub enum Ids {
    I64(Vec<i64>),
    U64(Vec<u64>),
    I32(Vec<i32>),
    U32(Vec<u32>),
    Words(Vec<i32>, Vec<i32>),
}

impl Ids {
    /// 32-bit types keep the lower half.
    pub fn new(kind: KeyType, keys: &[Key]) -> Ids {
        match kind {
            KeyType::I64 => Ids::I64(keys.iter().map(|k| *k as i64).collect()),
            KeyType::U64 => Ids::U64(keys.to_vec()),
            KeyType::I32 => Ids::I32(keys.iter().map(|k| *k as i32).collect()),
            KeyType::U32 => Ids::U32(keys.iter().map(|k| *k as u32).collect()),
            KeyType::Words => Ids::Words(
                keys.iter().map(|k| *k as i32).collect(),
                keys.iter().map(|k| (k >> 32) as i32).collect(),
            ),
        }
    }

    pub fn keys(&self) -> Vec<Key> {
        match self {
            Ids::I64(ids) => ids.iter().map(|&i| i as u64).collect(),
            Ids::U64(ids) => ids.clone(),
            Ids::I32(ids) => ids.iter().map(|&i| i64::from(i) as u64).collect(),
            Ids::U32(ids) => ids.iter().map(|&i| u64::from(i)).collect(),
            Ids::Words(low, high) => {
                low.iter().zip(high).map(|(l, h)| (*h as u64) << 32 | *l as u32 as u64).collect()
            }
        }
    }

    pub fn lend(&self) -> Keys<'_> {
        match self {
            Ids::I64(ids) => Keys::I64(ids),
            Ids::U64(ids) => Keys::U64(ids),
            Ids::I32(ids) => Keys::I32(ids),
            Ids::U32(ids) => Keys::U32(ids),
            Ids::Words(low, high) => Keys::Words { low, high },
        }
    }
}

#[derive(Clone, Debug)]
pub enum Shape {
    Each,
    Fixed { num_bags: usize, hotness: usize },
    RaggedI64(Vec<i64>),
    RaggedI32(Vec<i32>),
}

/// A feature that owns what it holds.
#[derive(Clone, Debug)]
pub struct Input {
    pub name: String,
    pub table: usize,
    pub ids: Ids,
    pub shape: Shape,
    pub combiner: Combiner,
    pub weights: Option<Vec<f32>>,
    pub padding_key: Option<Key>,
    pub scores: Option<Vec<i64>>,
}

impl Input {
    /// As many ids as `keys`, one row each, nothing special.
    pub fn plain(table: usize, keys: &[Key]) -> Input {
        let ids = Ids::new(KeyType::U64, keys);
        let (name, combiner) = (format!("f{table}"), Combiner::Sum);
        Input {
            name,
            table,
            ids,
            shape: Shape::Each,
            combiner,
            weights: None,
            padding_key: None,
            scores: None,
        }
    }

    /// Without scores, unless the table takes them.
    pub fn of_table(mut self, config: &TableConfig) -> Input {
        self.scores = self.scores.filter(|_| config.takes_scores());
        self
    }

    pub fn feature(&self) -> Feature<'_> {
        Feature {
            name: &self.name,
            table: self.table,
            keys: self.ids.lend(),
            bags: match &self.shape {
                Shape::Each => Bags::Each,
                Shape::Fixed { num_bags, hotness } => Bags::Fixed { num_bags: *num_bags, hotness: *hotness },
                Shape::RaggedI64(splits) => Bags::Ragged(Splits::I64(splits)),
                Shape::RaggedI32(splits) => Bags::Ragged(Splits::I32(splits)),
            },
            combiner: self.combiner,
            weights: self.weights.as_deref(),
            padding_key: self.padding_key,
            id_counts: None,
            scores: self.scores.as_deref().map(Scores::I64),
        }
    }

    /// Positions of each bag.
    pub fn bags(&self) -> Vec<std::ops::Range<usize>> {
        match &self.shape {
            Shape::Each => (0..self.ids.keys().len()).map(|i| i..i + 1).collect(),
            Shape::Fixed { num_bags, hotness } => {
                (0..*num_bags).map(|b| b * hotness..(b + 1) * hotness).collect()
            }
            Shape::RaggedI64(splits) => splits.windows(2).map(|w| w[0] as usize..w[1] as usize).collect(),
            Shape::RaggedI32(splits) => splits.windows(2).map(|w| w[0] as usize..w[1] as usize).collect(),
        }
    }

    pub fn weight(&self, position: usize) -> f32 {
        self.weights.as_ref().map_or(1.0, |w| w[position])
    }

    /// Positions of a bag without padding.
    pub fn there<'a>(
        &'a self,
        keys: &'a [Key],
        bag: &std::ops::Range<usize>,
    ) -> impl Iterator<Item = usize> + 'a {
        bag.clone().filter(|&p| self.padding_key != Some(keys[p]))
    }

    pub fn is_each(&self) -> bool {
        matches!(self.shape, Shape::Each)
    }

    /// What a bag's sum is multiplied by.
    pub fn scale(&self, weights: &[f32]) -> f32 {
        let divisor = match self.combiner {
            _ if self.is_each() => return 1.0,
            Combiner::Sum => return 1.0,
            Combiner::Mean => weights.iter().fold(0.0, |s, w| s + w),
            Combiner::Sqrtn => weights.iter().fold(0.0, |s, w| s + w * w).sqrt(),
        };
        if divisor == 0.0 { 0.0 } else { 1.0 / divisor }
    }
}

impl Input {
    /// Gradient of each weight of a bag in f64, and a bound of its rounding in f32.
    pub fn through_combiner(&self, rows: &[Vec<f32>], gradient: &[f32], weights: &[f64]) -> Vec<(f64, f64)> {
        let products =
            |row: &Vec<f32>| row.iter().zip(gradient).map(|(x, g)| f64::from(*x) * f64::from(*g)).collect();
        let products: Vec<Vec<f64>> = rows.iter().map(products).collect();
        let d: Vec<f64> = products.iter().map(|p| p.iter().sum()).collect();
        let size: f64 = products.iter().flatten().map(|p| p.abs()).sum();
        let (s, q): (f64, f64) = (weights.iter().sum(), weights.iter().map(|w| w * w).sum());
        let total: f64 = weights.iter().zip(&d).filter(|(w, _)| **w != 0.0).map(|(w, d)| w * d).sum();
        let bound = 1e-4 * (1.0 + size) * (1.0 + q) * if s == 0.0 { 1.0 } else { 1.0 + 1.0 / (s * s) };
        let of_id = |(w, d): (&f64, &f64)| match self.combiner {
            _ if self.is_each() => *d,
            Combiner::Sum => *d,
            Combiner::Mean if s == 0.0 => 0.0,
            Combiner::Mean => (d - total / s) / s,
            Combiner::Sqrtn if q == 0.0 => 0.0,
            Combiner::Sqrtn => d / q.sqrt() - w * total / q.powf(1.5),
        };
        weights.iter().zip(&d).map(of_id).map(|g| (g, bound)).collect()
    }
}
