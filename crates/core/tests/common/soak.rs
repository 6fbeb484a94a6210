//! Many steps of groups whose tables have policies.

use sok_core::contract::table::{Outcomes, TableConfig};
use sok_core::policy::admission::Admission;
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};

use super::Dice;
use super::large::{any_update, large_config, large_ops};
use super::steps::{Bench, Op, resolve};
use super::subject::Maker;

/// Gives a dynamic table an admission policy and a time to live, one of them, or none.
pub fn add_policies(dice: &mut Dice, config: &mut TableConfig) {
    if config.vocabulary_size.is_some() {
        return;
    }
    let frequency = Admission::Frequency {
        threshold: 1 + dice.below(4) as u32,
        once_per_step: dice.below(2) == 0,
        half_life: dice.pick(&[None, Some(3)]),
        memory: dice.pick(&[None, Some(64 * 500)]),
    };
    let by_chance = Admission::Probability { probability: 0.4 };
    config.admission = dice.pick(&[None, Some(frequency), Some(by_chance)]);
    let lifetime = Lifetime::Steps(dice.pick(&[1, 3, 6]));
    let time_to_live = TimeToLive { lifetime, keeps_expired: dice.below(2) == 0 };
    config.time_to_live = dice.pick(&[None, Some(time_to_live)]);
}

/// Ten million ids, of tables with every mix of policies, leave a group as its model. Every outcome is frequent. `SOK_TEST_PART=1/4`: a
/// quarter of them, the second one.
pub fn ten_million_ids(maker: &Maker) {
    let part = std::env::var("SOK_TEST_PART").unwrap_or_else(|_| "0/1".into());
    let (part, parts) = part.split_once('/').expect("a part of how many");
    let (part, parts): (usize, usize) = (part.parse().unwrap(), parts.parse().unwrap());
    let (mut num_ids, mut seen) = (0, Outcomes::default());
    for seed in (part as u64..).step_by(parts) {
        let mut dice = Dice(seed);
        let mut configs: Vec<TableConfig> = (0..1 + dice.below(4)).map(|_| large_config(&mut dice)).collect();
        configs.iter_mut().for_each(|config| add_policies(&mut dice, config));
        let mut bench = Bench::new(&configs, any_update(&mut dice), maker);
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
        println!("seed {seed}: {num_ids} ids");
        if num_ids >= 10_000_000 / parts {
            break;
        }
    }
    let Outcomes { hit, inserted, filtered, evicted, expired, refused } = seen;
    println!("{num_ids} ids: {seen:?}");
    // The groups of a part are few: its counts scatter.
    let least = if parts == 1 { 10_000 } else { 100 };
    assert!(
        [hit, inserted, filtered, evicted, expired, refused].iter().all(|count| *count > least),
        "{seen:?}"
    );
}
