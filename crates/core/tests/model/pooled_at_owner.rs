//! Bags of a localized table are pooled by its owner where that moves fewer bytes than their rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::common::Dice;
use crate::common::input::{Input, Shape};
use crate::common::large::{ADAGRAD, plain_update};
use crate::common::programs::{program, thread_world};
use crate::common::ranks::{GlobalStep, Then};
use crate::common::sharded::TIMEOUT;
use crate::common::strategies::plain_config;
use sok_core::contract::batch::Combiner;
use sok_core::contract::table::{Insertion, OutOfVocabulary, TableConfig};
use sok_core::error::Result;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::Tag;
use sok_core::exchange::placement::Placement;
use sok_core::exchange::threads::ThreadRank;

const DIM: usize = 16;
const NUM_BAGS: usize = 24;

/// A rank that counts the bytes that it sends to others.
struct CountingRank {
    rank: ThreadRank,
    sent: Arc<AtomicUsize>,
}

impl Communicator for CountingRank {
    delegate_to_rank!();

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        if to != self.rank() {
            self.sent.fetch_add(message.len(), Relaxed);
        }
        self.rank.send(to, tag, message)
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        self.rank.receive(from, tag)
    }

    fn decide(&self, tag: Tag) -> Result<()> {
        self.rank.decide(tag)
    }
}

fn table(out_of_vocabulary_key: Option<u64>) -> (TableConfig, Placement) {
    let config = TableConfig {
        vocabulary_size: Some(400),
        out_of_vocabulary: OutOfVocabulary::Zeros,
        out_of_vocabulary_key,
        ..plain_config("t", DIM)
    };
    (config, Placement::Localized(1))
}

/// Two features of bags of about `hotness` ids. Some ids are padding, and some are outside of the vocabulary.
fn step(dice: &mut Dice, hotness: usize, insertion: Insertion) -> GlobalStep {
    let keys: Vec<u64> = (0..NUM_BAGS * hotness).map(|_| dice.below(440)).collect();
    let fixed = Shape::Fixed { num_bags: NUM_BAGS, hotness };
    let ends = (0..=NUM_BAGS).map(|bag| (bag * hotness - bag % 2 * (hotness / 2)) as i64);
    let mut ends: Vec<i64> = ends.collect();
    ends[NUM_BAGS] = keys.len() as i64;
    let plain = |shape| Input { shape, combiner: Combiner::Mean, ..Input::plain(0, &keys) };
    let inputs = vec![plain(fixed), Input { padding_key: Some(7), ..plain(Shape::RaggedI64(ends)) }];
    let gradients = inputs.iter().map(|_| dice.floats(NUM_BAGS * DIM)).collect();
    GlobalStep {
        inputs,
        insertion,
        then: Then::Commit,
        gradients,
        weight: 0.5,
        is_update: true,
        erased: Vec::new(),
    }
}

/// Runs steps on two ranks of equal shares. Returns the bytes that they sent to each other.
fn bytes_sent(config: &(TableConfig, Placement), steps: &[GlobalStep]) -> usize {
    let configs = [config.clone()];
    let program = program(&configs, plain_update(ADAGRAD), steps);
    let sent = Arc::new(AtomicUsize::new(0));
    let ranks = ThreadRank::world(2, TIMEOUT).into_iter();
    let world =
        ranks.map(|rank| Arc::new(CountingRank { rank, sent: sent.clone() }) as Arc<dyn Communicator>);
    let seen = program.run(world.collect());
    program.run(thread_world(1)).check_same(&seen, "two ranks");
    sent.load(Relaxed)
}

fn num_distinct(step: &GlobalStep) -> usize {
    // In blocks of two bags, of which rank 0 has the first six.
    let bags = |block: usize| 2 * block..2 * block + 2;
    let keys = |block| {
        let of_input = |input: &Input| {
            let (all, keys) = (input.bags(), input.ids.keys());
            bags(block).flat_map(|bag| keys[all[bag].clone()].to_vec()).collect::<Vec<_>>()
        };
        let keys = step.inputs.iter().flat_map(of_input).filter(|key| *key < 400);
        keys.collect::<std::collections::BTreeSet<_>>().len()
    };
    (0..6).map(keys).sum()
}

#[test]
fn large_bags_are_pooled_at_the_owner() {
    for out_of_vocabulary_key in [None, Some(3)] {
        for insertion in [Insertion::AtLookup, Insertion::AtCommit, Insertion::Never] {
            let mut dice = Dice(7);
            let steps: Vec<_> = (0..3).map(|_| step(&mut dice, 60, insertion)).collect();
            let sent = bytes_sent(&table(out_of_vocabulary_key), &steps);
            let rows: usize = steps.iter().map(|step| 2 * 4 * DIM * num_distinct(step)).sum();
            let keys: usize = steps.iter().map(|step| 8 * num_distinct(step)).sum();
            let ids: usize =
                steps.iter().flat_map(|step| &step.inputs).map(|i| 4 * i.ids.keys().len() / 2).sum();
            // Bags of rank 0, both ways, and what is said beside them.
            let bags = 3 * 2 * 2 * 4 * DIM * NUM_BAGS / 2;
            assert!(sent < keys + ids + bags + 3000, "{sent} bytes, {keys} + {ids} + {bags} expected");
            assert!(sent < rows / 2, "{sent} bytes, of which rows would be {rows}");
        }
    }
}

#[test]
fn rows_of_small_bags_and_of_ids_with_weights_travel() {
    let mut dice = Dice(8);
    let mut steps = vec![step(&mut dice, 60, Insertion::AtLookup)];
    let num_ids = steps[0].inputs[0].ids.keys().len();
    steps[0].inputs[0].weights = Some(vec![0.5; num_ids]);
    let small = vec![step(&mut dice, 2, Insertion::AtLookup)];
    for steps in [steps, small] {
        let sent = bytes_sent(&table(None), &steps);
        assert!(sent >= 2 * 4 * DIM * (num_distinct(&steps[0]) - 12), "{sent} bytes");
    }
}
