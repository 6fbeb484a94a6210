//! Calls that are large enough for many threads, many blocks, and several runs of a key.

use sok_core::contract::batch::Combiner;
use sok_core::contract::table::{CheckMode, Insertion, Missing, OutOfVocabulary, TableConfig};
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::formula::{Adagrad, Adam, Formula, Rule, Sgd};
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::row_type::RowType;

use super::Dice;
use super::general::rules;
use super::input::{Ids, Input, KeyType, Shape};
use super::steps::{Op, run_all};
use super::strategies::{DIMS, WEIGHTS, plain_config};
use super::subject::Maker;
use super::table::TableOp;

pub fn large_config(dice: &mut Dice) -> TableConfig {
    let vocabulary_size = dice.pick(&[None, None, None, Some(700)]);
    let max_capacity = dice.pick(&[None, None, Some(500), Some(3000)]);
    let score = dice.pick(&[
        Score::Lru,
        Score::Lfu { half_life: None },
        Score::Lfu { half_life: Some(2) },
        Score::Custom,
    ]);
    let eviction =
        Eviction { score, counts_inference: dice.below(2) == 0, keeps_evicted: dice.below(2) == 0 };
    let may_evict = vocabulary_size.is_none() && max_capacity.is_some() && dice.below(3) > 0;
    let (row_type, stochastic_rounding) = dice.pick(&[
        (RowType::Float32, false),
        (RowType::Float32, false),
        (RowType::Float16, false),
        (RowType::Bfloat16, true),
    ]);
    TableConfig {
        row_type,
        stochastic_rounding,
        optimizer: dice.pick(&[0, 0, 0, 1]),
        vocabulary_size,
        out_of_vocabulary: OutOfVocabulary::Zeros,
        out_of_vocabulary_key: dice.pick(&[None, None, Some(0), Some(3)]),
        missing: dice.pick(&[Missing::Initial, Missing::Zeros]),
        max_capacity,
        eviction: may_evict.then_some(eviction),
        check_mode: CheckMode::Count,
        ..plain_config("large", dice.pick(&DIMS))
    }
}

pub fn any_update(dice: &mut Dice) -> Update {
    let (weight_decay, clipvalue) = (dice.pick(&[None, Some(0.1)]), dice.pick(&[None, Some(0.5)]));
    Update { rule: dice.pick(&rules()), weight_decay, clipvalue, clipnorm: None }
}

/// Ids of which some come thousands of times.
pub fn skewed_keys(dice: &mut Dice, len: usize, range: u64) -> Vec<Key> {
    let spread =
        |dice: &mut Dice| ((dice.float().abs().powi(5) * range as f32) as u64) << dice.pick(&[0, 0, 0, 32]);
    (0..len).map(|_| spread(dice)).collect()
}

pub fn ragged(dice: &mut Dice, len: usize) -> Shape {
    let mut splits: Vec<i64> = (0..len / 3).map(|_| dice.below(len as u64 + 1) as i64).collect();
    splits.extend([0, len as i64]);
    splits.sort_unstable();
    if dice.below(2) == 0 {
        Shape::RaggedI64(splits)
    } else {
        Shape::RaggedI32(splits.iter().map(|s| *s as i32).collect())
    }
}

pub fn large_input(dice: &mut Dice, table: usize) -> Input {
    let len = dice.below(4000) as usize;
    let hotness = 1 + dice.below(4) as usize;
    let (num_bags, mut len) = (len / hotness, len);
    let shape = match dice.below(3) {
        0 => Shape::Each,
        1 => {
            len = num_bags * hotness;
            Shape::Fixed { num_bags, hotness }
        }
        _ => ragged(dice, len),
    };
    let range = dice.pick(&[10, 1000, 100_000]);
    let kind = dice.pick(&[KeyType::I64, KeyType::U64, KeyType::I32, KeyType::U32, KeyType::Words]);
    let ids = Ids::new(kind, &skewed_keys(dice, len, range));
    let weights = (dice.below(3) == 0).then(|| (0..len).map(|_| dice.pick(&WEIGHTS)).collect());
    let combiner = dice.pick(&[Combiner::Sum, Combiner::Mean, Combiner::Sqrtn]);
    let padding_key = dice.pick(&[None, None, Some(0), Some(3)]);
    let scores = (dice.below(4) > 0).then(|| (0..len).map(|_| dice.below(100) as i64 - 1).collect());
    Input { name: format!("f{table}"), table, ids, shape, combiner, weights, padding_key, scores }
}

/// Runs large calls on random tables, and compares these with their model.
pub fn run_large(seed: u64, maker: &Maker) {
    let mut dice = Dice(seed);
    let configs: Vec<TableConfig> = (0..1 + dice.below(4)).map(|_| large_config(&mut dice)).collect();
    let update = any_update(&mut dice);
    let ops = large_ops(&mut dice, configs.len());
    run_all(&configs, update, &ops, maker);
}

/// Steps with some erasing between them.
pub fn large_ops(dice: &mut Dice, num_tables: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    for _ in 0..4 {
        let inputs = (0..1 + dice.below(4)).map(|_| dice.below(num_tables as u64) as usize);
        let inputs: Vec<usize> = inputs.collect();
        let inputs = inputs.into_iter().map(|table| large_input(dice, table)).collect();
        let scalars =
            UpdateScalars { learning_rate: 0.1, step: 1 + dice.below(3), factor: dice.pick(&[1.0, 0.5]) };
        ops.push(Op::Lookup {
            inputs,
            insertion: dice.pick(&[
                Insertion::AtLookup,
                Insertion::AtLookup,
                Insertion::AtCommit,
                Insertion::Never,
            ]),
            save: true,
        });
        ops.push(Op::Push { lookup: usize::MAX, hold: dice.below(2) == 0, seed: dice.next() });
        if dice.below(3) == 0 {
            ops.push(Op::Push { lookup: usize::MAX, hold: dice.below(2) == 0, seed: dice.next() });
        }
        if dice.below(2) == 0 {
            let keys = skewed_keys(dice, 50, 1000);
            ops.push(Op::Table { number: dice.below(4) as usize, op: TableOp::Erase(keys) });
        }
        ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0, 0.5, 2.0] });
        ops.push(Op::Apply { scalars, is_update: dice.below(4) > 0 });
    }
    ops
}

/// Features of three tables; the first two are most of the call, with hot keys, and their output is larger than the cache.
pub fn huge_inputs(dice: &mut Dice) -> Vec<Input> {
    let shapes = [
        Shape::Each,
        Shape::Fixed { num_bags: 5000, hotness: 3 },
        ragged(dice, 12_000),
        Shape::Fixed { num_bags: 0, hotness: 5 },
        Shape::Each,
    ];
    let parts = [(0, 30_000), (0, 15_000), (0, 12_000), (1, 0), (1, 2500)];
    let input = |((table, len), shape): ((usize, usize), &Shape)| {
        let keys = skewed_keys(dice, len, 40_000);
        Input { shape: shape.clone(), combiner: Combiner::Mean, ..Input::plain(table, &keys) }
    };
    parts.into_iter().zip(&shapes).map(input).collect()
}

pub fn large_steps(inputs: impl Fn(&mut Dice) -> Vec<Input>) -> Vec<Op> {
    let mut dice = Dice(5);
    let mut ops = Vec::new();
    for step in 1..3 {
        ops.push(Op::Lookup { inputs: inputs(&mut dice), insertion: Insertion::AtLookup, save: true });
        ops.push(Op::Push { lookup: usize::MAX, hold: step == 1, seed: dice.next() });
        ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0; 3] });
        let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
        ops.push(Op::Apply { scalars, is_update: true });
        ops.push(Op::Table { number: 0, op: TableOp::Erase((0..20_000).step_by(3).collect()) });
    }
    ops
}

pub const SGD: Rule = Rule::Sgd(Sgd::VARIANTS[0]);
pub const ADAM: Rule = Rule::Adam(Adam::VARIANTS[0]);
pub const ADAGRAD: Rule = Rule::Adagrad(Adagrad::VARIANTS[0]);

pub fn plain_update(rule: Rule) -> Update {
    Update { rule, weight_decay: None, clipvalue: None, clipnorm: None }
}
