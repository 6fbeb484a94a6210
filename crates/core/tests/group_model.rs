//! A group of tables on the host beside its model, with one thread and with many.

mod common;

use std::sync::LazyLock;

use common::Dice;
use common::large::{any_update, large_config, large_ops};
use common::steps::{Bench, Op, op, resolve, run_all};
use common::strategies::{config, update};
use common::subject::{HostSubject, Maker, Subject};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use sok_core::contract::table::{Outcomes, TableConfig};
use sok_core::policy::admission::Admission;
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};
use sok_core::pool::Pool;

static POOLS: LazyLock<[Pool; 4]> = LazyLock::new(|| [1, 2, 3, 7].map(|threads| Pool::new(threads).unwrap()));

/// A group for each number of threads; of the first is what is asked of one alone.
const HOST: Maker = Maker { make: all_threads, tells_late: false, admits: true, dims: &[] };
const THREE_THREADS: Maker = Maker { make: three_threads, tells_late: false, admits: true, dims: &[] };

fn all_threads(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    POOLS.iter().map(|pool| Box::new(HostSubject::new(configs, pool)) as Box<dyn Subject>).collect()
}

fn three_threads(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(HostSubject::new(configs, &POOLS[2]))]
}

suite!(HOST);

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_list_of_steps_leaves_a_group_as_its_model(
        configs in prop::collection::vec(config(), 1..5),
        update in update(),
        ops in prop::collection::vec(op(), 1..30),
    ) {
        run_all(&configs, update, &ops, &THREE_THREADS);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        max_shrink_iters: 64,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn calls_that_go_to_threads_give_the_same_bits_with_any_number_of_them(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let configs: Vec<TableConfig> = (0..1 + dice.below(4)).map(|_| large_config(&mut dice)).collect();
        let update = any_update(&mut dice);
        let ops = large_ops(&mut dice, configs.len());
        run_all(&configs, update, &ops, &HOST);
    }
}

/// Gives a dynamic table an admission policy and a time to live, one of them, or none.
fn add_policies(dice: &mut Dice, config: &mut TableConfig) {
    if config.vocabulary_size.is_some() {
        return;
    }
    let frequency = Admission::Frequency {
        threshold: 1 + dice.below(4) as u32,
        once_per_step: dice.below(2) == 0,
        half_life: dice.pick(&[None, Some(3)]),
    };
    let by_chance = Admission::Probability { probability: 0.4 };
    config.admission = dice.pick(&[None, Some(frequency), Some(by_chance)]);
    let lifetime = Lifetime::Steps(dice.pick(&[1, 3, 6]));
    let time_to_live = TimeToLive { lifetime, keeps_expired: dice.below(2) == 0 };
    config.time_to_live = dice.pick(&[None, Some(time_to_live)]);
}

#[test]
#[ignore = "takes minutes"]
fn soak_ten_million_ids_with_every_mix_of_policies() {
    let (mut num_ids, mut seen) = (0, Outcomes::default());
    for seed in 0.. {
        let mut dice = Dice(seed);
        let mut configs: Vec<TableConfig> = (0..1 + dice.below(4)).map(|_| large_config(&mut dice)).collect();
        configs.iter_mut().for_each(|config| add_policies(&mut dice, config));
        let mut bench = Bench::new(&configs, any_update(&mut dice), &THREE_THREADS);
        for _ in 0..5 {
            for op in large_ops(&mut dice, configs.len()) {
                if let Op::Lookup { inputs, .. } = &op {
                    num_ids += inputs.iter().map(|input| input.ids.lend().len()).sum::<usize>();
                }
                bench.run(&resolve(&op, &bench));
            }
        }
        for table in 0..configs.len() {
            seen += bench.subjects[0].table(table).stats().unwrap().outcomes;
        }
        if num_ids >= 10_000_000 {
            break;
        }
    }
    let Outcomes { hit, inserted, filtered, evicted, expired, refused } = seen;
    println!("{num_ids} ids: {seen:?}");
    assert!(
        [hit, inserted, filtered, evicted, expired, refused].iter().all(|count| *count > 10_000),
        "{seen:?}"
    );
}
