//! Lookups that one of several ranks refuses, while others would remove rows for them.

use std::sync::Arc;

use sok_core::contract::table::{CheckMode, Insertion, Outcomes, TableConfig};
use sok_core::exchange::placement::Placement;
use sok_core::formula::update::UpdateScalars;
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score};

use super::input::Input;
use super::large::{SGD, plain_update};
use super::strategies::plain_config;
use super::subject::{OWNER, Subject, binding};
use super::{bits, scan};

/// Number of rows of the first table that each rank has room for.
const ROOM: u64 = 100;
const NUM_STEPS: u64 = 6;

/// What a rank has seen: bits of rows, and of the tables' records; the keys that went.
#[derive(Debug, PartialEq)]
pub struct Seen {
    rows: Vec<Vec<u32>>,
    records: [std::collections::BTreeMap<Key, Vec<u32>>; 2],
    evicted: Vec<Key>,
}

/// A table of all ranks that removes rows, and one of the last rank that refuses keys.
pub fn configs(world_size: usize) -> [(TableConfig, Placement); 2] {
    let lru = Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: true };
    let roomy = TableConfig {
        max_capacity: Some(ROOM * world_size as u64),
        check_mode: CheckMode::Count,
        eviction: Some(lru),
        ..plain_config("roomy", 3)
    };
    let small =
        TableConfig { max_capacity: Some(8), check_mode: CheckMode::Raise, ..plain_config("small", 5) };
    [(roomy, Placement::Distributed), (small, Placement::Localized(world_size - 1))]
}

/// Trains, and makes lookups between a lookup and its push that the last rank refuses.
pub fn run(subject: &mut dyn Subject, rank: usize) -> Vec<Seen> {
    subject.bind(binding(OWNER, plain_update(SGD))).unwrap();
    let seen: Vec<Seen> = (1..=NUM_STEPS).map(|number| step(subject, rank as u64, number)).collect();
    assert!(seen.iter().any(|seen| !seen.evicted.is_empty()), "rank {rank}: no row had to go");
    seen
}

fn step(subject: &mut dyn Subject, rank: u64, number: u64) -> Seen {
    // Each rank has keys of its own.
    let keys = |from: u64, count: u64| -> Vec<Key> {
        (from..from + count).map(|key| rank << 40 | number << 20 | key).collect()
    };
    let few = [Input::plain(0, &keys(0, 50)), Input::plain(1, &[1, 2, 3])];
    let many = [Input::plain(0, &keys(1000, 70)), Input::plain(1, &keys(0, 9))];
    let gradients = Arc::new(vec![vec![0.5; 50 * 3], vec![0.25; 3 * 5]]);
    let contents = |subject: &mut dyn Subject| [0, 1].map(|table| scan(subject.table(table), 100));
    let outcomes = |subject: &mut dyn Subject| -> [Outcomes; 2] {
        [0, 1].map(|table| subject.table(table).stats().unwrap().outcomes)
    };
    let (lookup, rows) = subject.lookup(&few, Insertion::AtLookup, true).unwrap();
    let before = (contents(subject), outcomes(subject));
    for save in [true, false] {
        assert!(subject.lookup(&many, Insertion::AtLookup, save).is_err(), "rank {rank}, step {number}");
        assert_eq!((contents(subject), outcomes(subject)), before, "rank {rank}, step {number}, save {save}");
    }
    subject.push(number, lookup, &gradients, true, &[]).unwrap();
    subject.commit(&[(number, 1.0)], true).unwrap();
    subject.apply(UpdateScalars { learning_rate: 0.1, step: number, factor: 1.0 }, true).unwrap();
    Seen {
        rows: rows.iter().map(|rows| bits(rows)).collect(),
        records: contents(subject),
        evicted: subject.table_mut(0).take_evicted().unwrap().keys,
    }
}
