//! What proptest draws: configurations, optimizers, keys, features.

use proptest::prelude::*;
use proptest::sample::select;
use sok_core::contract::batch::Combiner;
use sok_core::contract::table::{CheckMode, Missing, OutOfVocabulary, TableConfig};
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::initializer::Initializer;
use sok_core::key::Key;
use sok_core::policy::admission::Admission;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};
use sok_core::row_type::RowType;

use super::general::rules;
use super::input::{Ids, Input, KeyType, Shape};
use super::table::TableOp;

pub const DIMS: [usize; 8] = [1, 3, 8, 16, 17, 32, 64, 100];
pub const WEIGHTS: [f32; 8] = [0.0, 0.0, 1.0, 0.25, -1.5, 2.0, 0.5, 1.0];

/// Of one name and dim, all else as a user would have it.
pub fn plain_config(name: &str, dim: usize) -> TableConfig {
    TableConfig {
        name: name.into(),
        dim,
        vocabulary_size: None,
        initializer: Initializer::Uniform { minval: -0.05, maxval: 0.05 },
        seed: 7,
        missing: Missing::Initial,
        out_of_vocabulary: OutOfVocabulary::Raise,
        out_of_vocabulary_key: None,
        initial_capacity: 0,
        max_capacity: None,
        check_mode: CheckMode::Raise,
        eviction: None,
        time_to_live: None,
        admission: None,
        row_type: RowType::Float32,
        stochastic_rounding: false,
        trainable: true,
        optimizer: 0,
    }
}

fn initializer() -> impl Strategy<Value = Initializer> {
    select(vec![
        Initializer::Uniform { minval: -1.0, maxval: 0.5 },
        Initializer::Normal { mean: 0.1, stddev: 0.5 },
        Initializer::TruncatedNormal { mean: 0.0, stddev: 1.0, below: [0.25, 0.875] },
        Initializer::Debug,
        Initializer::Constant { value: 0.25 },
    ])
}

/// A table of any kind; its limits are within reach of `key`.
pub fn config() -> impl Strategy<Value = TableConfig> {
    let limits = (
        prop_oneof![5 => Just(None), 1 => (5..30u64).prop_map(Some)],
        prop_oneof![3 => Just(None), 1 => (1..30u64).prop_map(Some)],
        0..40u64,
    );
    let modes = (
        select(vec![Missing::Initial, Missing::Zeros]),
        select(vec![OutOfVocabulary::Zeros, OutOfVocabulary::Zeros, OutOfVocabulary::Raise]),
        select(vec![CheckMode::Warn, CheckMode::Count, CheckMode::Raise]),
        prop_oneof![2 => Just(None), 1 => key().prop_map(Some)],
        prop_oneof![1 => Just(None), 1 => eviction().prop_map(Some)],
        prop_oneof![3 => Just(None), 1 => admission().prop_map(Some)],
        prop_oneof![2 => Just(None), 1 => time_to_live().prop_map(Some)],
        row_type(),
        prop_oneof![7 => Just(true), 1 => Just(false)],
        prop_oneof![4 => Just(0), 1 => Just(1)],
    );
    (select(&DIMS), initializer(), any::<u64>(), limits, modes).prop_map(
        |(
            dim,
            initializer,
            seed,
            (vocabulary_size, max_capacity, initial),
            (
                missing,
                oov,
                check_mode,
                oov_key,
                eviction,
                admission,
                time_to_live,
                row_type,
                trainable,
                optimizer,
            ),
        )| {
            TableConfig {
                name: format!("d{dim}"),
                dim,
                vocabulary_size,
                initializer,
                seed,
                missing,
                out_of_vocabulary: oov,
                out_of_vocabulary_key: oov_key.filter(|&key| vocabulary_size.is_none_or(|size| key < size)),
                initial_capacity: initial.min(max_capacity.unwrap_or(initial)),
                max_capacity,
                check_mode,
                eviction: eviction.filter(|_| vocabulary_size.is_none() && max_capacity.is_some()),
                admission: admission.filter(|_| vocabulary_size.is_none()),
                time_to_live: time_to_live.filter(|_| vocabulary_size.is_none()),
                row_type: row_type.0,
                stochastic_rounding: row_type.1,
                trainable,
                optimizer,
            }
        },
    )
}

/// A type of rows, and whether updates round by chance.
fn row_type() -> impl Strategy<Value = (RowType, bool)> {
    let narrow = select(vec![RowType::Float16, RowType::Bfloat16]);
    prop_oneof![2 => Just((RowType::Float32, false)), 1 => (narrow, any::<bool>())]
}

/// Any policy.
pub fn eviction() -> impl Strategy<Value = Eviction> {
    let half_lives = vec![None, Some(1), Some(3)];
    let score = prop_oneof![
        Just(Score::Lru),
        Just(Score::Custom),
        select(half_lives).prop_map(|half_life| Score::Lfu { half_life })
    ];
    (score, any::<bool>(), any::<bool>()).prop_map(|(score, counts_inference, keeps_evicted)| Eviction {
        score,
        counts_inference,
        keeps_evicted,
    })
}

/// Any time to live in steps, of which some keys have their turn in each.
pub fn time_to_live() -> impl Strategy<Value = TimeToLive> {
    (select(vec![1, 2, 5, 9]), any::<bool>())
        .prop_map(|(steps, keeps_expired)| TimeToLive { lifetime: Lifetime::Steps(steps), keeps_expired })
}

/// Any policy of admission.
pub fn admission() -> impl Strategy<Value = Admission> {
    let frequency = (
        1..6u32,
        any::<bool>(),
        select(vec![None, Some(1), Some(3)]),
        select(vec![None, None, Some(64), Some(400), Some(1000)]),
    )
        .prop_map(|(threshold, once_per_step, half_life, memory)| Admission::Frequency {
            threshold,
            once_per_step,
            half_life,
            memory,
        });
    prop_oneof![3 => frequency, 1 => select(vec![0.0, 0.3, 1.0]).prop_map(|probability| Admission::Probability { probability })]
}

/// Few, so that they come again and again; the ends of all integer types; and patterns that hurt weak hashes.
pub fn key() -> impl Strategy<Value = Key> {
    prop_oneof![
        16 => 0..40u64,
        2 => select(vec![0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 31, u64::from(u32::MAX), 1 << 32]),
        1 => (0..20u64).prop_map(|i| i << 32),
    ]
}

pub fn keys(most: usize) -> impl Strategy<Value = Vec<Key>> {
    prop::collection::vec(key(), 0..most)
}

/// Any rule, with and without decay and clipping by value.
pub fn update() -> impl Strategy<Value = Update> {
    let limits = (select(vec![None, Some(0.1)]), select(vec![None, Some(0.5)]));
    (select(rules()), limits).prop_map(|(rule, (weight_decay, clipvalue))| Update {
        rule,
        weight_decay,
        clipvalue,
        clipnorm: None,
    })
}

pub fn scalars() -> impl Strategy<Value = UpdateScalars> {
    (select(vec![0.1, 0.01]), 1..5u64, select(vec![1.0, 0.5, 1.0 / 3.0]))
        .prop_map(|(learning_rate, step, factor)| UpdateScalars { learning_rate, step, factor })
}

/// What may happen to a table between steps.
pub fn table_op() -> impl Strategy<Value = TableOp> {
    prop_oneof![
        2 => keys(80).prop_map(TableOp::Find),
        3 => keys(80).prop_map(TableOp::FindOrInsert),
        2 => (keys(60), any::<u64>(), any::<bool>()).prop_map(|(keys, seed, insert)| TableOp::Assign { keys, seed, insert }),
        3 => (keys(200), any::<u64>(), scalars()).prop_map(|(keys, seed, scalars)| TableOp::Update { keys, seed, scalars }),
        3 => keys(30).prop_map(TableOp::Erase),
        1 => Just(TableOp::Clear),
        1 => (keys(30), any::<u64>()).prop_map(|(keys, seed)| TableOp::Restore { keys, seed }),
        1 => Just(TableOp::Reload),
        1 => Just(TableOp::TakeEvicted),
    ]
}

/// The same, and other optimizers.
pub fn table_or_rule_op() -> impl Strategy<Value = TableOp> {
    let rule = (prop::option::weighted(0.9, update()), any::<bool>());
    prop_oneof![
        15 => table_op(),
        2 => rule.prop_map(|(update, keep_states)| TableOp::Rule { update, keep_states }),
    ]
}

/// How many of `keys` make bags, and which.
fn shape(keys: &mut Vec<Key>, (kind, hotness, cuts): (u8, usize, Vec<usize>)) -> Shape {
    match kind {
        0 => Shape::Each,
        1 if hotness == 0 => {
            keys.clear();
            Shape::Fixed { num_bags: cuts.len(), hotness }
        }
        1 => {
            let num_bags = keys.len() / hotness;
            keys.truncate(num_bags * hotness);
            Shape::Fixed { num_bags, hotness }
        }
        kind => {
            let mut splits: Vec<usize> = cuts.iter().map(|cut| cut % (keys.len() + 1)).collect();
            splits.extend([0, keys.len()]);
            splits.sort_unstable();
            match kind {
                2 => Shape::RaggedI32(splits.iter().map(|s| *s as i32).collect()),
                _ => Shape::RaggedI64(splits.iter().map(|s| *s as i64).collect()),
            }
        }
    }
}

/// A feature of one of the tables.
pub fn input(num_tables: usize) -> impl Strategy<Value = Input> {
    let kinds = select(vec![KeyType::I64, KeyType::U64, KeyType::I32, KeyType::U32, KeyType::Words]);
    let combiner = select(vec![Combiner::Sum, Combiner::Mean, Combiner::Sqrtn]);
    let shapes = (0..4u8, 0..5usize, prop::collection::vec(0..100usize, 0..12));
    let weights = prop::option::of(prop::collection::vec(select(&WEIGHTS), 90));
    let padding = prop::option::weighted(0.3, key());
    let scores = prop::option::weighted(0.8, prop::collection::vec(-2..9i64, 90));
    let hot = (key(), prop_oneof![4 => Just(0), 1 => 0..300usize]);
    (0..num_tables, kinds, keys(70), hot, shapes, combiner, weights, (padding, scores)).prop_map(
        |(table, kind, mut keys, (hot, times), shapes, combiner, weights, (padding_key, scores))| {
            keys.extend(vec![hot; times]);
            let shape = shape(&mut keys, shapes);
            let ids = Ids::new(kind, &keys);
            let weights = weights.map(|w| w.into_iter().cycle().take(keys.len()).collect());
            let scores = scores.map(|s| s.into_iter().cycle().take(keys.len()).collect());
            Input { name: format!("f{table}"), table, ids, shape, combiner, weights, padding_key, scores }
        },
    )
}
