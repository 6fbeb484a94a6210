//! The inputs of a layer's call: its features, in the buffers of the framework.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::key::Key;

/// The ids of a feature, in any integer type.
#[derive(Clone, Copy, Debug)]
pub enum Keys<'a> {
    /// Signed, 64 bits.
    I64(&'a [i64]),
    /// Unsigned, 64 bits.
    U64(&'a [u64]),
    /// Signed, 32 bits, extended with their sign.
    I32(&'a [i32]),
    /// Unsigned, 32 bits.
    U32(&'a [u32]),
    /// 64-bit ids in two words each, for JAX without 64-bit integers.
    Words {
        /// Lower 32 bits.
        low: &'a [i32],
        /// Upper 32 bits.
        high: &'a [i32],
    },
}

impl<'a> Keys<'a> {
    /// Number of ids.
    pub fn len(&self) -> usize {
        match self {
            Keys::I64(ids) => ids.len(),
            Keys::U64(ids) => ids.len(),
            Keys::I32(ids) => ids.len(),
            Keys::U32(ids) => ids.len(),
            Keys::Words { low, .. } => low.len(),
        }
    }

    /// Whether there are no ids.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the ids at these positions.
    pub fn slice(&self, range: Range<usize>) -> Keys<'a> {
        match self {
            Keys::I64(ids) => Keys::I64(&ids[range]),
            Keys::U64(ids) => Keys::U64(&ids[range]),
            Keys::I32(ids) => Keys::I32(&ids[range]),
            Keys::U32(ids) => Keys::U32(&ids[range]),
            Keys::Words { low, high } => Keys::Words { low: &low[range.clone()], high: &high[range] },
        }
    }

    /// Returns the key of the id at this position.
    #[inline(always)]
    pub fn get(&self, position: usize) -> Key {
        match self {
            Keys::I64(ids) => ids[position] as u64,
            Keys::U64(ids) => ids[position],
            Keys::I32(ids) => ids[position] as i64 as u64,
            Keys::U32(ids) => u64::from(ids[position]),
            Keys::Words { low, high } => join_words(low[position], high[position]),
        }
    }

    /// Copies the keys of the ids from `start` on to `block`. The type is matched once for each block, not for each key.
    #[inline(always)]
    pub fn load(&self, start: usize, block: &mut [Key]) {
        macro_rules! each {
            ($ids:expr, $key:expr) => {
                block.iter_mut().zip(&$ids[start..]).for_each(|(to, &id)| *to = $key(id))
            };
        }
        match self {
            Keys::I64(ids) => each!(ids, |id| id as u64),
            Keys::U64(ids) => each!(ids, |id| id),
            Keys::I32(ids) => each!(ids, |id| id as i64 as u64),
            Keys::U32(ids) => each!(ids, u64::from),
            Keys::Words { low, high } => {
                let words = low[start..].iter().zip(&high[start..]);
                block.iter_mut().zip(words).for_each(|(to, (&l, &h))| *to = join_words(l, h));
            }
        }
    }
}

#[inline(always)]
fn join_words(low: i32, high: i32) -> Key {
    u64::from(low as u32) | u64::from(high as u32) << 32
}

/// Bounds of the bags in the ids of a feature, from 0 to the number of ids.
#[derive(Clone, Copy, Debug)]
pub enum Splits<'a> {
    /// 64 bits.
    I64(&'a [i64]),
    /// 32 bits.
    I32(&'a [i32]),
}

impl Splits<'_> {
    /// Number of splits: one more than there are bags.
    pub fn len(&self) -> usize {
        match self {
            Splits::I64(splits) => splits.len(),
            Splits::I32(splits) => splits.len(),
        }
    }

    /// Whether there are no splits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the split at this index.
    #[inline(always)]
    pub fn get(&self, index: usize) -> i64 {
        match self {
            Splits::I64(splits) => splits[index],
            Splits::I32(splits) => i64::from(splits[index]),
        }
    }
}

/// The scores that come with the ids of a feature. Negative ones count as 0.
#[derive(Clone, Copy, Debug)]
pub enum Scores<'a> {
    /// 64 bits.
    I64(&'a [i64]),
    /// 32 bits.
    I32(&'a [i32]),
    /// As a rank sends them: each plus 1; 0 for an id without a score.
    Sent(&'a [u64]),
}

impl Scores<'_> {
    /// Number of ids.
    pub fn len(&self) -> usize {
        match self {
            Scores::I64(scores) => scores.len(),
            Scores::I32(scores) => scores.len(),
            Scores::Sent(scores) => scores.len(),
        }
    }

    /// Whether there are no ids.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the score of an id plus 1, or 0 if it has none.
    #[inline(always)]
    pub fn sent(&self, position: usize) -> u64 {
        match self {
            Scores::I64(scores) => scores[position].max(0) as u64 + 1,
            Scores::I32(scores) => scores[position].max(0) as u64 + 1,
            Scores::Sent(scores) => scores[position],
        }
    }
}

/// Which ids are combined to one output row.
#[derive(Clone, Copy, Debug)]
pub enum Bags<'a> {
    /// No ids are combined: one row for each id.
    Each,
    /// All bags have the same number of ids.
    Fixed {
        /// Number of bags.
        num_bags: usize,
        /// Ids in each.
        hotness: usize,
    },
    /// Bag `i` has the ids at `splits[i]..splits[i + 1]`.
    Ragged(Splits<'a>),
}

/// How the rows of a bag become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Combiner {
    /// The sum of the rows, each multiplied by its weight.
    Sum = 0,
    /// That sum, divided by the sum of the weights.
    Mean = 1,
    /// That sum, divided by the square root of the sum of the squared weights.
    Sqrtn = 2,
}

impl Combiner {
    /// Returns the factor of a bag's weighted sum. It is 0 where the division would be by 0.
    #[inline(always)]
    pub fn scale(self, sum_of_weights: f32, sum_of_squared_weights: f32) -> f32 {
        let divisor = match self {
            Combiner::Sum => return 1.0,
            Combiner::Mean => sum_of_weights,
            Combiner::Sqrtn => sum_of_squared_weights.sqrt(),
        };
        if divisor == 0.0 { 0.0 } else { 1.0 / divisor }
    }
}

/// One feature of a call.
#[derive(Clone, Copy, Debug)]
pub struct Feature<'a> {
    /// Name, for messages.
    pub name: &'a str,
    /// Index of its table in the group.
    pub table: usize,
    /// The ids.
    pub keys: Keys<'a>,
    /// Which ids are combined.
    pub bags: Bags<'a>,
    /// How they are combined.
    pub combiner: Combiner,
    /// A weight for each id, by which its row is multiplied, also if `bags` is `Each`. `None`: all weights are 1.
    pub weights: Option<&'a [f32]>,
    /// The key that means "no id", if there is one.
    pub padding_key: Option<Key>,
    /// Number of ids that each id represents: a rank that sends its distinct ids counts them. `None`: each represents one. LFU reads it.
    pub id_counts: Option<&'a [u32]>,
    /// A score for each id, for a table with the policy `Custom`. `None`: scores stay as they are.
    pub scores: Option<Scores<'a>>,
}

impl Feature<'_> {
    /// Number of rows of its output.
    pub fn num_bags(&self) -> usize {
        match &self.bags {
            Bags::Each => self.keys.len(),
            Bags::Fixed { num_bags, .. } => *num_bags,
            Bags::Ragged(splits) => splits.len().saturating_sub(1),
        }
    }

    /// Returns the positions of the ids of a bag.
    #[inline(always)]
    pub fn bag(&self, index: usize) -> Range<usize> {
        match &self.bags {
            Bags::Each => index..index + 1,
            Bags::Fixed { hotness, .. } => index * hotness..(index + 1) * hotness,
            Bags::Ragged(splits) => splits.get(index) as usize..splits.get(index + 1) as usize,
        }
    }

    /// Checks the number of ids, and that the lengths of all arrays agree.
    ///
    /// # Errors
    /// [`Error::Argument`] for too many ids, or for lengths that do not agree.
    pub fn validate(&self) -> Result<()> {
        let num_keys = self.keys.len();
        let fail = |what: String| Err(Error::argument(format!("feature `{}`: {what}", self.name)));
        if num_keys > u32::MAX as usize / 2 {
            return fail(format!("a batch holds at most {} ids. Received: {num_keys}", u32::MAX / 2));
        }
        if let Keys::Words { low, high } = &self.keys
            && low.len() != high.len()
        {
            return fail(format!(
                "`low` and `high` must be equally long. Received: {} and {}",
                low.len(),
                high.len()
            ));
        }
        if let Some(weights) = self.weights
            && weights.len() != num_keys
        {
            return fail(format!(
                "`weights` must hold one number an id. Received: {} weights for {num_keys} ids",
                weights.len()
            ));
        }
        if let Some(scores) = &self.scores
            && scores.len() != num_keys
        {
            return fail(format!(
                "`scores` must hold one number an id. Received: {} scores for {num_keys} ids",
                scores.len()
            ));
        }
        match &self.bags {
            Bags::Fixed { num_bags, hotness } if num_bags.checked_mul(*hotness) != Some(num_keys) => {
                fail(format!("{num_keys} ids do not make {num_bags} bags of {hotness}"))
            }
            Bags::Ragged(splits) => validate_splits(splits, num_keys).or_else(fail),
            _ => Ok(()),
        }
    }
}

fn validate_splits(splits: &Splits, num_keys: usize) -> Result<(), String> {
    let rule = "row_splits must start at 0, never fall and end at the number of ids";
    if splits.is_empty() {
        return Err(format!("{rule}. Received: no row_splits"));
    }
    if splits.get(0) != 0 {
        return Err(format!("{rule}. Received: a start at {}", splits.get(0)));
    }
    if let Some(i) = (1..splits.len()).find(|&i| splits.get(i) < splits.get(i - 1)) {
        return Err(format!("{rule}. Received: {} after {} at row {i}", splits.get(i), splits.get(i - 1)));
    }
    let end = splits.get(splits.len() - 1);
    if end != num_keys as i64 {
        return Err(format!("{rule}. Received: an end at {end} for {num_keys} ids"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ragged<'a>(keys: &'a [i64], splits: &'a [i32]) -> Feature<'a> {
        Feature {
            name: "ads",
            table: 0,
            keys: Keys::I64(keys),
            bags: Bags::Ragged(Splits::I32(splits)),
            combiner: Combiner::Sum,
            weights: None,
            padding_key: None,
            id_counts: None,
            scores: None,
        }
    }

    #[test]
    fn splits_that_do_not_add_up_are_named() {
        let text = |splits: &[i32]| ragged(&[1, 2, 3], splits).validate().unwrap_err().to_string();
        assert!(text(&[]).ends_with("Received: no row_splits"));
        assert!(text(&[1, 3]).ends_with("Received: a start at 1"));
        assert!(text(&[0, 2, 1, 3]).ends_with("Received: 1 after 2 at row 2"));
        assert!(text(&[0, 2]).ends_with("Received: an end at 2 for 3 ids"));
        assert!(ragged(&[1, 2, 3], &[0, 0, 3]).validate().is_ok());
    }

    #[test]
    fn keys_extend_as_their_type_says() {
        assert_eq!(Keys::I32(&[-1]).get(0), u64::MAX);
        assert_eq!(Keys::U32(&[u32::MAX]).get(0), u64::from(u32::MAX));
        assert_eq!(Keys::I64(&[-1]).get(0), Keys::U64(&[u64::MAX]).get(0));
        let id = -(1i64 << 40) + 5;
        let words = Keys::Words { low: &[id as i32], high: &[(id >> 32) as i32] };
        assert_eq!(words.get(0), id as u64);
        let mut block = [0; 1];
        words.load(0, &mut block);
        assert_eq!(block[0], id as u64);
    }
}
