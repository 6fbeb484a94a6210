//! Gradients by key: the gradient of a variable as a framework shows it, distinct keys and the sum of the gradients of each.

use std::ops::Range;

use crate::contract::batch::Combiner;
use crate::error::{Error, Result};
use crate::key::{Key, hash};
use crate::memory;
use crate::pool::{FirstError, Pool};

const WHAT: &str = "the gradients of a variable";
/// A free slot of `Places`.
const FREE: u32 = u32::MAX;

/// The ids of one variable in a call, and the gradients of their rows.
pub struct BagGradients<'a> {
    /// The ids.
    pub keys: Vec<Key>,
    /// Where each bag begins in the keys, and the number of keys. Without, each key is a bag.
    pub splits: Option<&'a [i64]>,
    /// How the rows of a bag were combined.
    pub combiner: Combiner,
    /// One weight for each key. Without, all are 1.
    pub weights: Option<&'a [f32]>,
    /// `(bags, dim)`
    pub gradients: &'a [f32],
    /// Number of floats of a row.
    pub dim: usize,
}

/// The gradient of one variable.
#[derive(Default)]
pub struct KeyGradients {
    /// Distinct keys, in the order in which they come first.
    pub keys: Vec<Key>,
    /// For each key the sum of its gradients, `(keys, dim)`.
    pub rows: Vec<f32>,
}

/// Sums up the gradients of equal keys of each variable.
///
/// # Errors
/// [`Error::Argument`] if lengths do not agree or splits are wrong, [`Error::Memory`].
pub fn merge_by_key(of_variables: &[BagGradients], pool: &Pool) -> Result<Vec<KeyGradients>> {
    let mut merged = Vec::new();
    merged.resize_with(of_variables.len(), KeyGradients::default);
    let error = FirstError::default();
    pool.run(of_variables.iter().zip(&mut merged).collect(), |(bags, to)| {
        error.note(bags.merge().map(|merged| *to = merged));
    });
    error.into_result()?;
    Ok(merged)
}

impl BagGradients<'_> {
    fn num_bags(&self) -> usize {
        self.splits.map_or(self.keys.len(), |splits| splits.len().saturating_sub(1))
    }

    fn check(&self) -> Result<()> {
        let (num_keys, num_bags) = (self.keys.len(), self.num_bags());
        let are_splits = self.splits.is_none_or(|splits| {
            let ends = splits.first() == Some(&0) && splits.last() == Some(&(num_keys as i64));
            ends && splits.is_sorted()
        });
        if !are_splits {
            return Err(Error::argument(
                "row_splits must start at 0, never fall and end at the number of ids",
            ));
        }
        if self.gradients.len() != num_bags * self.dim || self.weights.is_some_and(|w| w.len() != num_keys) {
            return Err(Error::argument(format!(
                "gradients must hold {} numbers for each of {num_bags} bags, and weights one for each of {num_keys} ids. Received: {} \
                 numbers, and {} weights",
                self.dim,
                self.gradients.len(),
                self.weights.map_or(num_keys, <[f32]>::len)
            )));
        }
        Ok(())
    }

    /// The keys of a bag.
    fn bag(&self, number: usize) -> Range<usize> {
        self.splits.map_or(number..number + 1, |splits| splits[number] as usize..splits[number + 1] as usize)
    }

    fn merge(&self) -> Result<KeyGradients> {
        self.check()?;
        let mut places = Places::new(self.keys.len())?;
        let of_keys = self.keys.iter().map(|&key| places.of(key));
        let of_keys = memory::collect(of_keys, WHAT)?;
        let mut rows = memory::filled(0.0, places.keys.len() * self.dim, WHAT)?;
        for number in 0..self.num_bags() {
            let bag = self.bag(number);
            let gradient = &self.gradients[number * self.dim..][..self.dim];
            let weight = |i: usize| self.weights.map_or(1.0, |weights| weights[i]);
            let (sum, squares) = bag.clone().map(weight).fold((0.0, 0.0), |(s, q), w| (s + w, q + w * w));
            let scale = self.combiner.scale(sum, squares);
            for i in bag {
                let factor = weight(i) * scale;
                let row = &mut rows[of_keys[i] as usize * self.dim..][..self.dim];
                row.iter_mut().zip(gradient).for_each(|(to, from)| *to += factor * from);
            }
        }
        Ok(KeyGradients { keys: places.keys, rows })
    }
}

/// Numbers distinct keys in the order in which they come first.
struct Places {
    keys: Vec<Key>,
    /// By hash: the number of a key, or `FREE`. At most half of them are used.
    slots: Vec<u32>,
}

impl Places {
    /// With room for so many keys.
    fn new(num_keys: usize) -> Result<Places> {
        let slots = memory::filled(FREE, (2 * num_keys).next_power_of_two(), WHAT)?;
        Ok(Places { keys: memory::with_capacity(num_keys, WHAT)?, slots })
    }

    fn of(&mut self, key: Key) -> u32 {
        let mask = self.slots.len() - 1;
        let mut at = hash(key) as usize & mask;
        loop {
            match self.slots[at] {
                FREE => {
                    self.slots[at] = self.keys.len() as u32;
                    self.keys.push(key);
                    return self.slots[at];
                }
                place if self.keys[place as usize] == key => return place,
                _ => at = (at + 1) & mask,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(bags: BagGradients) -> Result<(Vec<Key>, Vec<f32>)> {
        let mut merged = merge_by_key(&[bags], &Pool::new(1).unwrap())?;
        Ok(merged.pop().map(|merged| (merged.keys, merged.rows)).unwrap())
    }

    fn bags<'a>(keys: &[Key], splits: Option<&'a [i64]>, gradients: &'a [f32]) -> BagGradients<'a> {
        BagGradients {
            keys: keys.to_vec(),
            splits,
            combiner: Combiner::Sum,
            weights: None,
            gradients,
            dim: 2,
        }
    }

    #[test]
    fn gradients_of_equal_keys_are_summed() {
        let each = bags(&[7, 3, 7], None, &[1.0, 2.0, 10.0, 20.0, 100.0, 200.0]);
        assert_eq!(one(each).unwrap(), (vec![7, 3], vec![101.0, 202.0, 10.0, 20.0]));
        let splits = [0, 3, 3, 4];
        let gradients = [1.0, 2.0, 50.0, 60.0, 10.0, 20.0];
        let sum = || bags(&[5, 6, 5, 6], Some(&splits), &gradients);
        assert_eq!(one(sum()).unwrap(), (vec![5, 6], vec![2.0, 4.0, 11.0, 22.0]));
        let weights = [1.0, 2.0, 1.0, 3.0];
        let mean = BagGradients { combiner: Combiner::Mean, weights: Some(&weights), ..sum() };
        assert_eq!(one(mean).unwrap(), (vec![5, 6], vec![0.5, 1.0, 10.5, 21.0]));
        let sqrtn = BagGradients { combiner: Combiner::Sqrtn, weights: Some(&[0.0; 4]), ..sum() };
        assert_eq!(one(sqrtn).unwrap(), (vec![5, 6], vec![0.0; 4]));
        assert_eq!(one(bags(&[], Some(&[0]), &[])).unwrap(), (vec![], vec![]));
        let many: Vec<Key> = (0..1000).map(|key| (key % 300) << 32).collect();
        let (keys, rows) = one(bags(&many, None, &[1.0; 2000])).unwrap();
        assert_eq!((keys.len(), rows[..200].iter().all(|&x| x == 4.0)), (300, true));
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let gradients = [0.0; 4];
        for splits in [&[0, 2][..], &[0, 2, 1, 3], &[1, 3], &[]] {
            assert!(one(bags(&[1, 2, 3], Some(splits), &gradients)).is_err(), "{splits:?}");
        }
        assert!(one(bags(&[1], None, &gradients)).is_err());
        assert!(one(BagGradients { weights: Some(&[1.0]), ..bags(&[1, 2], None, &gradients) }).is_err());
    }
}
