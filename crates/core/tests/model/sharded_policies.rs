//! Tables of several ranks whose rows come and go: each rank's part follows a model that sees the ids of all ranks.

use std::sync::Arc;

use crate::common::group::Model;
use crate::common::input::Input;
use crate::common::large::{SGD, large_config, large_input, plain_update, skewed_keys};
use crate::common::programs::{POOLS, thread_world};
use crate::common::sharded::ShardedSubject;
use crate::common::soak::add_policies;
use crate::common::strategies::WEIGHTS;
use crate::common::subject::{OWNER, Subject, binding};
use crate::common::table::TableOp;
use crate::common::{Dice, random};
use proptest::prelude::*;
use sok_core::contract::binding::UpdateMode;
use sok_core::contract::table::{Insertion, Outcomes, TableConfig};
use sok_core::exchange::buckets::Owners;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::placement::Placement;
use sok_core::formula::update::UpdateScalars;
use sok_core::key::Key;
use sok_core::row_type::RowType;

/// A step of all ranks.
struct Step {
    insertion: Insertion,
    /// By rank. Each looks up the same features, with ids of its own.
    inputs: Vec<Vec<Input>>,
    /// Whether a loss scale skips the step.
    is_skipped: bool,
    /// Keys that are erased after it.
    erased: Vec<Key>,
}

fn any_step(dice: &mut Dice, configs: &[TableConfig], world_size: usize) -> Step {
    let tables: Vec<usize> =
        (0..1 + dice.below(4)).map(|_| dice.below(configs.len() as u64) as usize).collect();
    let mut inputs_of_rank = || {
        let inputs = tables.iter().map(|&table| Input { weights: None, ..large_input(dice, table) });
        inputs
            .map(|input| {
                let config = &configs[input.table];
                input.of_table(config)
            })
            .collect()
    };
    let mut inputs: Vec<Vec<Input>> = (0..world_size).map(|_| inputs_of_rank()).collect();
    for feature in 0..tables.len() {
        // What a feature has is the same on all ranks.
        let first = inputs[0][feature].clone();
        let weighted = dice.below(3) == 0;
        for input in inputs.iter_mut().map(|inputs| &mut inputs[feature]) {
            (input.combiner, input.padding_key) = (first.combiner, first.padding_key);
            let num_ids = input.ids.keys().len();
            input.weights = weighted.then(|| (0..num_ids).map(|_| dice.pick(&WEIGHTS)).collect());
        }
    }
    let insertion =
        dice.pick(&[Insertion::AtLookup, Insertion::AtCommit, Insertion::AtCommit, Insertion::Never]);
    let erased = if dice.below(3) == 0 { skewed_keys(dice, 20, 1000) } else { Vec::new() };
    Step { insertion, inputs, is_skipped: dice.below(5) == 0, erased }
}

/// The ids of a rank's feature whose keys a rank owns.
fn owned(input: &Input, config: &TableConfig, owners: &Owners) -> Input {
    let keys = input.ids.keys();
    let is_own = |&position: &usize| {
        let key = keys[position];
        let has_weight = input.weights.as_ref().is_none_or(|weights| weights[position] != 0.0);
        let is_id = input.padding_key != Some(key) && has_weight && config.is_in_vocabulary(key);
        is_id && owners.of(key) == owners.rank
    };
    let positions: Vec<usize> = (0..keys.len()).filter(is_own).collect();
    let own_keys: Vec<Key> = positions.iter().map(|&position| keys[position]).collect();
    let scores = |scores: &Vec<i64>| positions.iter().map(|&position| scores[position]).collect();
    Input { scores: input.scores.as_ref().map(scores), ..Input::plain(input.table, &own_keys) }
}

/// Runs the steps on a rank, and on a model of its part of the tables. Returns what has become of its keys.
fn follow(configs: &[TableConfig], steps: &[Step], communicator: Arc<dyn Communicator>) -> Outcomes {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let placed: Vec<_> = configs.iter().map(|config| (config.clone(), Placement::Distributed)).collect();
    let mut subject =
        ShardedSubject::new(&placed, communicator, world_size, RowType::Float32, &POOLS[rank % 2]);
    subject.bind(binding(OWNER, plain_update(SGD))).unwrap();
    let shards: Vec<TableConfig> =
        (0..configs.len()).map(|table| subject.table(table).config().clone()).collect();
    let mut model = Model::new(&shards);
    model.bind(OWNER, plain_update(SGD), UpdateMode::Local);
    let owners: Vec<Owners> = configs
        .iter()
        .map(|config| {
            let is_static = config.vocabulary_size.is_some();
            Owners { placement: Placement::Distributed, is_static, rank, world_size }
        })
        .collect();
    let zeros = |inputs: &[Input]| -> Vec<Vec<f32>> {
        inputs.iter().map(|i| vec![0.0; i.bags().len() * configs[i.table].dim]).collect()
    };
    let (mut number, mut num_erased) = (0, vec![0; configs.len()]);
    for step in steps {
        let (lookup, _) = subject.lookup(&step.inputs[rank], step.insertion, true).unwrap();
        let of_rank = |inputs: &Vec<Input>| {
            let own = |input: &Input| owned(input, &configs[input.table], &owners[input.table]);
            inputs.iter().map(own).collect::<Vec<_>>()
        };
        let own: Vec<Input> = step.inputs.iter().flat_map(of_rank).collect();
        model.lookup(&own, step.insertion, true).unwrap();
        if !step.is_skipped {
            number += 1;
            let weighted = step.inputs[rank].iter().filter(|input| input.weights.is_some());
            let num_weights: Vec<usize> = weighted.map(|input| input.ids.keys().len()).collect();
            let gradients = Arc::new(zeros(&step.inputs[rank]));
            subject.push(number, lookup, &gradients, true, &num_weights).unwrap();
            let last = model.lookups.len() - 1;
            let of_model = model.push(last, &zeros(&own));
            subject.commit(&[(number, 1.0)], true).unwrap();
            model.commit(&[(of_model, 1.0)]).unwrap();
            let scalars = UpdateScalars { learning_rate: 0.1, step: number, factor: 1.0 };
            subject.apply(scalars, true).unwrap();
            model.apply(&scalars, true);
        }
        model.find_rows_in_progress();
        for (table, owners) in owners.iter().enumerate() {
            let keys: Vec<Key> = step.erased.iter().copied().filter(|&key| owners.of(key) == rank).collect();
            let size = model.tables[table].rows.len();
            TableOp::Erase(keys).run(&mut model.tables[table], &mut [subject.table_mut(table)]);
            num_erased[table] += (size - model.tables[table].rows.len()) as u64;
        }
    }
    let mut seen = Outcomes::default();
    for (table, model_table) in model.tables.iter().enumerate() {
        model_table.check(subject.table(table));
        let stats = subject.table(table).stats().unwrap();
        assert_eq!(stats.outcomes, model.outcomes[table], "rank {rank}, table {table}");
        let Outcomes { inserted, evicted, expired, .. } = stats.outcomes;
        assert_eq!(
            inserted - evicted - expired - num_erased[table],
            stats.size,
            "rank {rank}, table {table}"
        );
        seen += stats.outcomes;
    }
    seen
}

/// Tables with any policies, and steps of their ranks. Returns the number of ids, and what has become of keys.
fn run(seed: u64, num_steps: usize) -> (usize, Outcomes) {
    let mut dice = Dice(seed);
    let world_size = 1 + dice.below(4) as usize;
    let mut configs: Vec<TableConfig> = (0..1 + dice.below(3)).map(|_| large_config(&mut dice)).collect();
    for config in &mut configs {
        add_policies(&mut dice, config);
        config.optimizer = 0;
    }
    let steps: Vec<Step> = (0..num_steps).map(|_| any_step(&mut dice, &configs, world_size)).collect();
    let inputs = steps.iter().flat_map(|step| &step.inputs).flatten();
    let num_ids = inputs.map(|input| input.ids.keys().len()).sum();
    let mut seen = Outcomes::default();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = thread_world(world_size)
            .into_iter()
            .map(|communicator| scope.spawn(|| follow(&configs, &steps, communicator)))
            .collect();
        ranks.into_iter().for_each(|rank| seen += rank.join().expect("a rank follows its model"));
    });
    (num_ids, seen)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 0, ..random(30) })]

    #[test]
    fn each_rank_follows_a_model_of_its_part(seed in any::<u64>()) {
        run(seed, 8);
    }
}

#[test]
fn ten_million_ids_of_one_to_four_ranks_follow_models() {
    let (mut num_ids, mut seen) = (0, Outcomes::default());
    for seed in 0.. {
        let (more, outcomes) = run(seed, 20);
        num_ids += more;
        seen += outcomes;
        if num_ids >= 10_000_000 {
            break;
        }
    }
    let Outcomes { hit, inserted, filtered, evicted, expired, refused } = seen;
    assert!(
        [hit, inserted, filtered, evicted, expired, refused].iter().all(|count| *count > 10_000),
        "{seen:?}"
    );
}
