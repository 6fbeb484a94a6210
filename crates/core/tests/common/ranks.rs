//! Steps of the batch of all ranks, and each rank's part of them.

use std::ops::Range;

use sok_core::contract::batch::Combiner;
use sok_core::contract::table::{Insertion, Missing, OutOfVocabulary, TableConfig};
use sok_core::exchange::placement::Placement;
use sok_core::key::Key;

use super::Dice;
use super::input::{Ids, Input, KeyType, Shape};
use super::strategies::{WEIGHTS, plain_config};

/// What a step does with the gradients of its lookup.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It has none.
    Nothing,
    /// They wait for a later commit.
    Push,
    /// They are committed, with all that wait.
    Commit,
}

/// A step of the batch of all ranks.
#[derive(Clone)]
pub struct GlobalStep {
    pub inputs: Vec<Input>,
    pub insertion: Insertion,
    pub then: Then,
    /// Of each feature's output.
    pub gradients: Vec<Vec<f32>>,
    pub weight: f32,
    pub is_update: bool,
    pub erased: Vec<Key>,
}

/// Some bags of a feature.
pub fn part_of(input: &Input, bags: Range<usize>) -> Input {
    let all = input.bags();
    let ids = if bags.is_empty() { 0..0 } else { all[bags.start].start..all[bags.end - 1].end };
    let shape = match &input.shape {
        Shape::Each => Shape::Each,
        Shape::Fixed { hotness, .. } => Shape::Fixed { num_bags: bags.len(), hotness: *hotness },
        _ => {
            let ends = all[bags].iter().map(|bag| (bag.end - ids.start) as i64);
            Shape::RaggedI64(std::iter::once(0).chain(ends).collect())
        }
    };
    let weights = input.weights.as_ref().map(|weights| weights[ids.clone()].to_vec());
    let scores = input.scores.as_ref().map(|scores| scores[ids.clone()].to_vec());
    Input { shape, weights, scores, ids: Ids::new(KeyType::U64, &input.ids.keys()[ids]), ..input.clone() }
}

/// Which bags of a feature a rank has: equal shares, or shares of any size.
pub fn share(num_bags: usize, rank: usize, world_size: usize, is_even: bool) -> Range<usize> {
    let bound = |rank: usize| match rank {
        0 => 0,
        rank if rank == world_size => num_bags,
        // The first rank has nothing, the last one most.
        rank if !is_even => num_bags * (rank - 1) / (2 * world_size),
        rank => num_bags * rank / world_size,
    };
    bound(rank)..bound(rank + 1)
}

/// Tables of any kind, in any place; a rank that is not there is replaced by another one.
pub fn any_tables(dice: &mut Dice, num_tables: usize) -> Vec<(TableConfig, Placement)> {
    let mut table = |number| {
        let placement = dice.pick(&[Placement::Distributed, Placement::Localized(0), Placement::Replicated]);
        let is_static = placement == Placement::Replicated || dice.below(3) == 0;
        let config = TableConfig {
            vocabulary_size: is_static.then_some(60),
            out_of_vocabulary: OutOfVocabulary::Zeros,
            out_of_vocabulary_key: dice.pick(&[None, None, Some(3)]),
            missing: dice.pick(&[Missing::Initial, Missing::Zeros]),
            ..plain_config(&format!("t{number}"), dice.pick(&[1, 3, 16, 32]))
        };
        (config, placement)
    };
    (0..num_tables).map(&mut table).collect()
}

/// A feature of a table, with bags of any shape.
pub fn any_input(dice: &mut Dice, table: usize, num_bags: usize) -> Input {
    let hotness = dice.pick(&[0, 1, 2, 3, 9]);
    let (shape, num_ids) = match dice.below(3) {
        0 => (Shape::Each, num_bags),
        1 => (Shape::Fixed { num_bags, hotness }, num_bags * hotness),
        _ => {
            let lengths: Vec<i64> = (0..num_bags).map(|_| dice.below(5) as i64).collect();
            let ends = lengths.iter().scan(0, |sum, len| {
                *sum += len;
                Some(*sum)
            });
            let splits: Vec<i64> = std::iter::once(0).chain(ends).collect();
            let num_ids = splits[num_bags] as usize;
            (Shape::RaggedI64(splits), num_ids)
        }
    };
    let keys: Vec<Key> = (0..num_ids).map(|_| dice.below(70)).collect();
    let weights = (dice.below(3) == 0).then(|| (0..num_ids).map(|_| dice.pick(&WEIGHTS)).collect());
    let combiner = dice.pick(&[Combiner::Sum, Combiner::Mean, Combiner::Sqrtn]);
    let padding_key = dice.pick(&[None, Some(5)]);
    let scores = (dice.below(4) > 0).then(|| (0..num_ids).map(|_| dice.below(100) as i64 - 1).collect());
    Input { shape, combiner, weights, padding_key, scores, ..Input::plain(table, &keys) }
}

/// A step that learns from these features.
pub fn any_step(
    dice: &mut Dice,
    configs: &[(TableConfig, Placement)],
    inputs: Vec<Input>,
    num_bags: usize,
) -> GlobalStep {
    let inputs: Vec<Input> = inputs
        .into_iter()
        .map(|input| {
            let config = &configs[input.table].0;
            input.of_table(config)
        })
        .collect();
    let dim = |input: &Input| configs[input.table].0.dim;
    let gradients = inputs.iter().map(|input| dice.floats(num_bags * dim(input))).collect();
    let insertions = [Insertion::AtLookup, Insertion::AtLookup, Insertion::AtCommit, Insertion::Never];
    GlobalStep {
        gradients,
        insertion: dice.pick(&insertions),
        then: Then::Commit,
        weight: dice.pick(&[1.0, 0.5]),
        is_update: dice.below(4) > 0,
        erased: if dice.below(4) == 0 { (0..70).step_by(4).collect() } else { Vec::new() },
        inputs,
    }
}

pub fn any_steps(
    dice: &mut Dice,
    configs: &[(TableConfig, Placement)],
    num_bags: usize,
    num_steps: usize,
) -> Vec<GlobalStep> {
    let mut step = || {
        let tables: Vec<usize> = (0..5).map(|_| dice.below(configs.len() as u64) as usize).collect();
        let inputs = tables.into_iter().map(|table| any_input(dice, table, num_bags)).collect();
        any_step(dice, configs, inputs, num_bags)
    };
    (0..num_steps).map(|_| step()).collect()
}
