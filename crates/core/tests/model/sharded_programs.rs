//! Programs over many ranks have the bits of the same program in one process.

use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::general::rules;
use crate::common::large::{ADAM, any_update, plain_update};
use crate::common::programs::{Program, Seen, program, tcp_world, thread_world};
use crate::common::ranks::{GlobalStep, Then, any_input, any_step, any_steps, any_tables};
use crate::common::sharded::{Directory, TIMEOUT};
use crate::common::{Dice, random};
use proptest::prelude::*;
use sok_core::contract::batch::Combiner;
use sok_core::contract::table::TableConfig;
use sok_core::error::Result;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::Tag;
use sok_core::exchange::placement::Placement;
use sok_core::exchange::threads::ThreadRank;
use sok_core::formula::update::Update;
use sok_core::policy::admission::Admission;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};

const NUM_TABLES: usize = 26;

/// Clips by the norm every other rule, and lets the others decay and clip by value.
fn updates() -> impl Iterator<Item = Update> {
    rules().into_iter().enumerate().map(|(number, rule)| match number % 2 {
        0 => Update { clipnorm: Some(0.5), ..plain_update(rule) },
        _ => Update { weight_decay: Some(0.1), clipvalue: Some(0.5), ..plain_update(rule) },
    })
}

/// Random tables. Localized tables are assigned to the ranks in turn.
fn tables(dice: &mut Dice, num_tables: usize) -> Vec<(TableConfig, Placement)> {
    let mut tables = any_tables(dice, num_tables);
    for (number, (config, placement)) in tables.iter_mut().enumerate() {
        if let Placement::Localized(home) = placement {
            *home = number;
        }
        if config.vocabulary_size.is_none() && dice.below(2) == 0 {
            // There is room for all keys, so scores do not depend on the number of ranks.
            let scores = [
                Score::Lru,
                Score::Custom,
                Score::Lfu { half_life: None },
                Score::Lfu { half_life: Some(3) },
            ];
            let (score, counts_inference) = (dice.pick(&scores), dice.below(2) == 0);
            config.max_capacity = Some(1000);
            config.eviction = Some(Eviction { score, counts_inference, keeps_evicted: false });
        }
        if config.vocabulary_size.is_none() && dice.below(3) == 0 {
            let lifetime = Lifetime::Steps(dice.pick(&[1, 2, 5, 9]));
            config.time_to_live = Some(TimeToLive { lifetime, keeps_expired: false });
        }
        if config.vocabulary_size.is_none() && dice.below(3) == 0 {
            let (threshold, once_per_step) = (1 + dice.below(4) as u32, dice.below(2) == 0);
            let half_life = dice.pick(&[None, Some(3)]);
            let frequency = Admission::Frequency { threshold, once_per_step, half_life, memory: None };
            config.admission =
                Some(dice.pick(&[frequency, frequency, Admission::Probability { probability: 0.3 }]));
        }
    }
    tables
}

/// Steps of a feature for each of 26 tables. Of four commits one does not update, so its gradients are accumulated.
fn hundred_steps(
    dice: &mut Dice,
    configs: &[(TableConfig, Placement)],
    num_bags: usize,
    num_steps: usize,
) -> Vec<GlobalStep> {
    let mut step = || {
        let inputs = (0..NUM_TABLES).map(|table| any_input(dice, table, num_bags)).collect();
        any_step(dice, configs, inputs, num_bags)
    };
    (0..num_steps).map(|_| step()).collect()
}

#[test]
fn a_hundred_steps_over_tcp_have_the_bits_of_one_process_for_every_optimizer() {
    for (number, update) in updates().enumerate() {
        let mut dice = Dice(number as u64);
        let configs = tables(&mut dice, NUM_TABLES);
        let steps = hundred_steps(&mut dice, &configs, 12, 100);
        let program = program(&configs, update, &steps);
        let one = program.run(tcp_world(1));
        for world_size in 2..=4 {
            let what = format!("{world_size} ranks, {:?}", update.rule);
            one.check_same(&program.run(tcp_world(world_size)), &what);
        }
    }
}

/// Sums of these are exact, so their order does not matter: gradients are multiples of 1/8, and no combiner divides.
fn make_exact(dice: &mut Dice, steps: &mut [GlobalStep]) {
    for step in steps {
        step.inputs.iter_mut().for_each(|input| input.combiner = Combiner::Sum);
        for gradient in step.gradients.iter_mut().flatten() {
            *gradient = dice.below(17) as f32 / 8.0 - 1.0;
        }
    }
}

#[test]
fn uneven_and_empty_batches_over_tcp_have_the_bits_of_one_process_where_sums_are_exact() {
    for (number, update) in updates().enumerate() {
        let mut dice = Dice(100 + number as u64);
        let configs = tables(&mut dice, NUM_TABLES);
        // Of seven bags and four ranks, two ranks have none.
        let mut steps = hundred_steps(&mut dice, &configs, 7, 20);
        make_exact(&mut dice, &mut steps);
        let program =
            |merge_blocks, is_even| Program { merge_blocks, is_even, ..program(&configs, update, &steps) };
        let one = program(1, true).run(tcp_world(1));
        for world_size in 2..=4 {
            let what = format!("{world_size} ranks, {:?}", update.rule);
            one.check_same(&program(world_size, false).run(tcp_world(world_size)), &what);
        }
    }
}

#[test]
fn training_goes_on_from_a_dump_of_any_number_of_ranks_as_if_it_had_never_stopped() {
    let mut dice = Dice(1);
    let configs = tables(&mut dice, 8);
    let update = Update { clipnorm: Some(0.5), ..plain_update(ADAM) };
    let mut steps = any_steps(&mut dice, &configs, 24, 15);
    // The last commit before the dump updates: a dump holds no gradients.
    steps[4].is_update = true;
    let (before, after) = steps.split_at(5);
    let whole = program(&configs, update, &steps).run(thread_world(1));
    let after_dump = Seen { outputs: whole.outputs[5..].to_vec(), norms: whole.norms[5..].to_vec(), ..whole };
    for dumping in 1..=4 {
        let directory = Directory::new(&format!("goes-on-{dumping}"));
        let dump = Program { dump: Some(&directory.0), ..program(&configs, update, before) };
        dump.run(thread_world(dumping));
        for loading in 1..=4 {
            let load = Program { load: Some(&directory.0), first: 6, ..program(&configs, update, after) };
            let what = format!("{dumping} ranks dumped, {loading} loaded");
            after_dump.check_same(&load.run(thread_world(loading)), &what);
        }
    }
}

// ---- random programs over a transport that delays and reorders messages

/// A rank whose messages leave late, at the latest when it waits for one, and in any order.
struct LateRank {
    rank: ThreadRank,
    state: Mutex<Late>,
}

struct Late {
    dice: Dice,
    messages: Vec<(usize, Tag, Vec<u8>)>,
}

impl LateRank {
    fn world(world_size: usize, dice: &mut Dice) -> Vec<Arc<dyn Communicator>> {
        let late = |rank| LateRank {
            rank,
            state: Mutex::new(Late { dice: Dice(dice.next()), messages: Vec::new() }),
        };
        ThreadRank::world(world_size, TIMEOUT)
            .into_iter()
            .map(late)
            .map(|rank| Arc::new(rank) as Arc<dyn Communicator>)
            .collect()
    }

    /// Sends one of the held-back messages, chosen at random.
    fn send_any(&self, late: &mut Late) -> Result<()> {
        let number = late.dice.below(late.messages.len() as u64) as usize;
        let (to, tag, message) = late.messages.swap_remove(number);
        self.rank.send(to, tag, message)
    }
}

impl Communicator for LateRank {
    delegate_to_rank!();

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        let mut late = self.state.lock().unwrap();
        late.messages.push((to, tag, message));
        if late.dice.below(3) == 0 { self.send_any(&mut late) } else { Ok(()) }
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        let mut late = self.state.lock().unwrap();
        while !late.messages.is_empty() {
            for _ in 0..late.dice.below(4) {
                std::thread::yield_now();
            }
            self.send_any(&mut late)?;
        }
        drop(late);
        self.rank.receive(from, tag)
    }

    fn decide(&self, tag: Tag) -> Result<()> {
        self.rank.decide(tag)
    }
}

/// Lookups alone, lookups whose gradients wait, and whole steps. The last one is whole and updates.
fn any_program(dice: &mut Dice, configs: &[(TableConfig, Placement)]) -> Vec<GlobalStep> {
    let num_steps = 2 + dice.below(6) as usize;
    let mut steps = any_steps(dice, configs, 12, num_steps);
    for step in &mut steps {
        step.then = dice.pick(&[Then::Nothing, Then::Push, Then::Commit, Then::Commit]);
    }
    let last = steps.last_mut().unwrap();
    (last.then, last.is_update) = (Then::Commit, true);
    steps
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 0, ..random(100) })]

    #[test]
    fn programs_with_dumps_between_any_numbers_of_ranks_have_the_bits_of_one_process(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let num_tables = 1 + dice.below(6) as usize;
        let configs = tables(&mut dice, num_tables);
        let update = any_update(&mut dice);
        let parts: Vec<_> = (0..1 + dice.below(3)).map(|_| any_program(&mut dice, &configs)).collect();
        let whole = program(&configs, update, &parts.concat()).run(thread_world(1));
        let directory = Directory::new(&format!("program-{seed}"));
        let path: &Path = &directory.0;
        let (mut seen, mut first) = (Seen::default(), 1);
        for (number, steps) in parts.iter().enumerate() {
            let world_size = dice.pick(&[1, 2, 3, 4]);
            let part = Program {
                first,
                load: (number > 0).then_some(path),
                dump: (number + 1 < parts.len()).then_some(path),
                ..program(&configs, update, steps)
            };
            let part = part.run(LateRank::world(world_size, &mut dice));
            seen.outputs.extend(part.outputs);
            seen.norms.extend(part.norms);
            seen.tables = part.tables;
            first += steps.len() as u64;
        }
        whole.check_same(&seen, "the program in parts");
    }
}
