//! Groups that ranks share: one rank beside the model, and many ranks beside one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::input::Input;
use crate::common::large::{ADAGRAD, SGD, any_update, plain_update, run_large};
use crate::common::programs::{POOLS, Program, program, thread_world};
use crate::common::ranks::{GlobalStep, Then, any_steps, any_tables};
use crate::common::refusal;
use crate::common::sharded::{ShardedSubject, TIMEOUT};
use crate::common::steps::{op, run_all};
use crate::common::strategies::{config, plain_config, update};
use crate::common::subject::{Maker, OWNER, Subject, binding};
use crate::common::{Dice, random, scan};
use proptest::prelude::*;
use sok_core::contract::table::{Insertion, TableConfig};
use sok_core::error::{Error, Result};
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::Tag;
use sok_core::exchange::placement::{Placement, owner};
use sok_core::exchange::threads::ThreadRank;
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::key::Key;
use sok_core::row_type::RowType;

const ALONE: Maker = Maker { make: alone, tells_late: false, dims: &[], has_modes: true };

/// One rank alone must be as a group without ranks.
fn alone(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    POOLS.iter().map(|pool| Box::new(ShardedSubject::alone(configs, pool)) as Box<dyn Subject>).collect()
}

suite!(ALONE);

proptest! {
    #![proptest_config(random(300))]

    #[test]
    fn any_list_of_steps_leaves_one_rank_as_its_model(
        configs in prop::collection::vec(config(), 1..5),
        update in update(),
        ops in prop::collection::vec(op(), 1..30),
    ) {
        run_all(&configs, update, &ops, &ALONE);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 64, ..random(24) })]

    #[test]
    fn large_calls_leave_one_rank_as_its_model(seed in any::<u64>()) {
        run_large(seed, &ALONE);
    }
}

// ---- many ranks

#[test]
fn a_lookup_that_one_rank_refuses_changes_no_rank() {
    for world_size in 1..=4 {
        let configs = refusal::configs(world_size);
        std::thread::scope(|scope| {
            for communicator in thread_world(world_size) {
                let configs = &configs;
                scope.spawn(move || {
                    let rank = communicator.rank();
                    let row_type = RowType::Float32;
                    let mut subject =
                        ShardedSubject::new(configs, communicator, world_size, row_type, &POOLS[0]);
                    refusal::run(&mut subject, rank);
                });
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 0, ..random(60) })]

    #[test]
    fn any_number_of_ranks_with_equal_shares_has_the_bits_of_one(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let configs = any_tables(&mut dice, 4);
        let mut update = any_update(&mut dice);
        update.clipnorm = dice.pick(&[None, Some(0.5)]).filter(|_| update.clipvalue.is_none());
        let steps = any_steps(&mut dice, &configs, 24, 6);
        let program = program(&configs, update, &steps);
        let one = program.run(thread_world(1));
        for world_size in 2..=4 {
            one.check_same(&program.run(thread_world(world_size)), &format!("{world_size} ranks"));
        }
    }

    #[test]
    fn ranks_with_uneven_shares_agree_with_one_within_rounding(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let configs = any_tables(&mut dice, 4);
        let update = plain_update(dice.pick(&[SGD, ADAGRAD]));
        let num_bags = 1 + dice.below(9) as usize;
        let steps = any_steps(&mut dice, &configs, num_bags, 6);
        let program = |world_size: usize, is_even: bool| Program {
            merge_blocks: world_size,
            is_even,
            ..program(&configs, update, &steps)
        };
        let one = program(1, true).run(thread_world(1));
        for world_size in 2..=4 {
            let many = program(world_size, false).run(thread_world(world_size));
            let pairs = one.outputs.iter().flatten().flatten().zip(many.outputs.iter().flatten().flatten());
            for (one, many) in pairs {
                assert!((one - many).abs() <= 2e-3 * (1.0 + one.abs()), "{one}, with {world_size} ranks {many}");
            }
            for (one, many) in one.tables.iter().zip(&many.tables) {
                assert!(one.keys().eq(many.keys()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 0, ..random(24) })]

    // That they are rounded is tested below. `run` compares the replicas of a table with each other.
    #[test]
    fn ranks_that_exchange_bfloat16_are_near_those_that_exchange_float32(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let configs = any_tables(&mut dice, 4);
        let mut steps = any_steps(&mut dice, &configs, 24, 3);
        steps.iter_mut().flat_map(|step| &mut step.inputs).for_each(|input| input.weights = None);
        let program = program(&configs, plain_update(SGD), &steps);
        let world_size = dice.pick(&[2, 3, 4]);
        let exact = program.run(thread_world(world_size));
        let rounded = Program { row_type: RowType::Bfloat16, ..program }.run(thread_world(world_size));
        let outputs = exact.outputs.iter().flatten().flatten().zip(rounded.outputs.iter().flatten().flatten());
        for (exact, rounded) in outputs {
            prop_assert!((exact - rounded).abs() <= 0.1 * (1.0 + exact.abs()), "{exact}, rounded {rounded}");
        }
        for (exact, rounded) in exact.tables.iter().zip(&rounded.tables) {
            prop_assert!(exact.keys().eq(rounded.keys()));
        }
    }
}

#[test]
fn what_travels_is_rounded_and_what_stays_is_not() {
    let configs = [(plain_config("t", 16), Placement::Distributed)];
    let keys: Vec<Key> = (0..24).collect();
    let mut dice = Dice(3);
    let step = |dice: &mut Dice| GlobalStep {
        inputs: vec![Input::plain(0, &keys)],
        gradients: vec![dice.floats(24 * 16)],
        insertion: Insertion::AtLookup,
        then: Then::Commit,
        weight: 1.0,
        is_update: true,
        erased: Vec::new(),
    };
    let steps = [step(&mut dice)];
    let update = plain_update(SGD);
    let two =
        Program { row_type: RowType::Bfloat16, ..program(&configs, update, &steps) }.run(thread_world(2));
    let one = program(&configs, update, &steps).run(thread_world(1));
    let mut rounded_step = step(&mut Dice(3));
    for (key, row) in rounded_step.gradients[0].chunks_exact_mut(16).enumerate() {
        // The first half of the batch is rank 0's.
        let travels = owner(key as Key, false, 2) != key / 12;
        let looked_up = (&one.outputs[0][0][key * 16..][..16], &two.outputs[0][0][key * 16..][..16]);
        let mut expected = looked_up.0.to_vec();
        if travels {
            RowType::Bfloat16.round(&mut expected);
            RowType::Bfloat16.round(row);
            assert_ne!(looked_up.0, looked_up.1, "key {key}");
        }
        assert_eq!(expected, looked_up.1, "key {key}");
    }
    let expected = program(&configs, update, &[rounded_step]).run(thread_world(1));
    assert!(expected.tables == two.tables);
}

// ---- a rank that is lost

/// A rank that is lost after some calls of its communicator.
struct MortalRank {
    /// Gone once it is lost.
    rank: Mutex<Option<ThreadRank>>,
    calls_left: AtomicUsize,
}

impl MortalRank {
    fn call<T>(&self, call: impl FnOnce(&ThreadRank) -> Result<T>) -> Result<T> {
        let mut rank = self.rank.lock().unwrap();
        if self.calls_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err() {
            drop(rank.take());
        }
        rank.as_ref().map_or(Err(Error::State("this rank is lost".into())), call)
    }
}

impl Communicator for MortalRank {
    fn rank(&self) -> usize {
        2
    }

    fn world_size(&self) -> usize {
        3
    }

    fn timeout(&self) -> Duration {
        TIMEOUT
    }

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        self.call(|rank| rank.send(to, tag, message))
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        self.call(|rank| rank.receive(from, tag))
    }

    fn fail(&self, _error: &Error) {}

    fn decide(&self, tag: Tag) -> Result<()> {
        self.call(|rank| rank.decide(tag))
    }

    fn is_decided_by_others(&self, _tag: Tag) -> bool {
        false
    }

    fn failure(&self) -> Option<Error> {
        self.rank.lock().unwrap().is_none().then(|| Error::State("this rank is lost".into()))
    }

    fn on_failure(&self, _hook: Box<dyn Fn() + Send + Sync>) {}

    fn leave(&self) {
        drop(self.rank.lock().unwrap().take());
    }
}

/// What a rank's table has after each step that it made.
fn steps_of_rank(communicator: Arc<dyn Communicator>, clipnorm: Option<f32>) -> Vec<BTreeMap<Key, Vec<u32>>> {
    let rank = communicator.rank();
    let config = (plain_config("t", 2), Placement::Distributed);
    let mut subject = ShardedSubject::new(&[config], communicator, 3, RowType::Float32, &POOLS[0]);
    let update = Update { clipnorm, ..plain_update(SGD) };
    subject.bind(binding(OWNER, update)).unwrap();
    let mut after = vec![BTreeMap::new()];
    for step in 1..=3 {
        let inputs = [Input::plain(0, &(0..20).map(|key| key * 7 + rank as u64).collect::<Vec<_>>())];
        let made = subject.lookup(&inputs, Insertion::AtLookup, true).and_then(|(lookup, rows)| {
            subject.push(step, lookup, &Arc::new(rows), false, &[])?;
            subject.commit(&[(step, 1.0)], true)?;
            subject.apply(UpdateScalars { learning_rate: 0.1, step, factor: 1.0 }, true)
        });
        if made.is_err() {
            break;
        }
        after.push(scan(subject.table(0), 10));
    }
    // Rows that a lookup of a step that was not made has inserted have their first values.
    after.push(scan(subject.table(0), 10));
    after
}

#[test]
fn a_rank_lost_at_any_message_leaves_the_others_after_the_same_step() {
    for clipnorm in [None, Some(0.5)] {
        let run = |calls: usize| -> Vec<Vec<BTreeMap<Key, Vec<u32>>>> {
            let mut world = ThreadRank::world(3, TIMEOUT);
            let (last, calls_left) = (Mutex::new(world.pop()), AtomicUsize::new(calls));
            let mut ranks: Vec<Arc<dyn Communicator>> = Vec::new();
            world.into_iter().for_each(|rank| ranks.push(Arc::new(rank)));
            ranks.push(Arc::new(MortalRank { rank: last, calls_left }));
            std::thread::scope(|scope| {
                let steps = |rank| steps_of_rank(rank, clipnorm);
                let ranks: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || steps(rank))).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        let whole = run(usize::MAX);
        assert!(whole.iter().all(|steps| steps.len() == 5));
        let mut reached = BTreeMap::new();
        for calls in 0..90 {
            let steps = run(calls);
            assert_eq!(steps[0].len(), steps[1].len(), "lost after {calls} calls");
            *reached.entry(steps[0].len() - 2).or_insert(0) += 1;
            for rank in 0..2 {
                let made = steps[rank].len() - 2;
                assert!(steps[rank][..=made] == whole[rank][..=made], "lost after {calls} calls");
                // Of rows that were there, none has changed since.
                let (last, now) = (&steps[rank][made], &steps[rank][made + 1]);
                assert!(last.iter().all(|(key, row)| now[key] == *row), "lost after {calls} calls");
            }
        }
        assert_eq!(reached.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3], "{reached:?}");
    }
}
