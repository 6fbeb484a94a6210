//! Rows with a time to live.

mod common;

use std::sync::Arc;

use common::group::Input;
use common::large::{SGD, plain_update};
use common::programs::POOLS;
use common::strategies::plain_config;
use common::subject::{HostSubject, OWNER, Subject, binding};
use sok_core::contract::table::{Explanation, Insertion, Outcomes, Table, TableConfig};
use sok_core::formula::update::UpdateScalars;
use sok_core::host::table::HostTable;
use sok_core::key::Key;
use sok_core::policy::clock;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};

fn expiring(lifetime: Lifetime) -> TableConfig {
    TableConfig { time_to_live: Some(TimeToLive { lifetime, keeps_expired: true }), ..plain_config("t", 2) }
}

fn subject(config: TableConfig) -> HostSubject {
    let mut subject = HostSubject::new(&[config], &POOLS[0]);
    subject.bind(binding(OWNER, plain_update(SGD))).unwrap();
    subject
}

/// Trains the rows of keys.
fn train(subject: &mut HostSubject, number: u64, keys: &[Key]) {
    let (lookup, _) = subject.lookup(&[Input::plain(0, keys)], Insertion::AtLookup, true).unwrap();
    let gradients = Arc::new(vec![vec![1.0; 2 * keys.len()]]);
    subject.push(number, lookup, &gradients, true, &[]).unwrap();
    subject.commit(&[(number, 1.0)], true).unwrap();
    subject.apply(UpdateScalars { learning_rate: 0.1, step: number, factor: 1.0 }, true).unwrap();
}

fn keys(subject: &HostSubject) -> Vec<Key> {
    let mut keys = subject.table(0).keys().unwrap();
    keys.sort_unstable();
    keys
}

#[test]
fn a_row_goes_at_the_end_of_the_step_that_is_so_many_after_its_last_one() {
    let mut subject = subject(expiring(Lifetime::Steps(3)));
    train(&mut subject, 1, &[1, 2, 3]);
    train(&mut subject, 2, &[2]);
    train(&mut subject, 3, &[3]);
    // What is inserted outside of steps is as old as the last step.
    subject.table_mut(0).assign(&[9], &[0.5, 0.5], true).unwrap();
    train(&mut subject, 4, &[4]);
    assert_eq!(keys(&subject), [2, 3, 4, 9]);
    train(&mut subject, 5, &[4]);
    assert_eq!(keys(&subject), [3, 4, 9]);
    train(&mut subject, 6, &[4]);
    assert_eq!(keys(&subject), [4]);
    let table = subject.table_mut(0);
    let told = [1, 2, 3, 9].map(|key| table.explain(key).unwrap());
    assert_eq!(told, [4, 5, 6, 6].map(|step| Explanation::Expired { step }));
    let outcomes = Outcomes { hit: 4, inserted: 5, expired: 4, ..Outcomes::default() };
    assert_eq!(table.stats().unwrap().outcomes, outcomes);
    let gone = table.take_evicted().unwrap();
    assert_eq!(gone.keys, [1, 2, 3, 9]);
    assert_eq!(gone.values[6..], [0.5, 0.5]);
    assert!(table.take_evicted().unwrap().keys.is_empty());
    // A key that comes again starts anew, and an erased one is forgotten.
    train(&mut subject, 7, &[1]);
    assert_eq!(subject.table(0).explain(1).unwrap(), Explanation::Present { score: None });
    subject.table_mut(0).erase(&[2]).unwrap();
    assert_eq!(subject.table(0).explain(2).unwrap(), Explanation::Absent);
}

#[test]
fn many_rows_go_part_by_part() {
    const STEPS: u64 = 64;
    let mut subject = subject(expiring(Lifetime::Steps(STEPS)));
    let all: Vec<Key> = (0..20_000).collect();
    train(&mut subject, 1, &all);
    let mut before = all.len();
    for number in 2..=STEPS + 16 {
        train(&mut subject, number, &[1 << 40]);
        let len = subject.table(0).len().unwrap() - 1;
        let expected = if number <= STEPS { before } else { before - before.min(1) };
        assert!(len <= expected && before - len < 2 * all.len() / 16, "step {number}: {before} to {len}");
        before = len;
    }
    assert_eq!(keys(&subject), [1 << 40]);
}

#[test]
fn rows_of_pending_commits_and_the_row_of_unknown_keys_stay() {
    let config = TableConfig { out_of_vocabulary_key: Some(7), ..expiring(Lifetime::Steps(1)) };
    let mut subject = subject(config);
    train(&mut subject, 1, &[1, 7]);
    let (lookup, _) = subject.lookup(&[Input::plain(0, &[1])], Insertion::AtLookup, true).unwrap();
    subject.push(2, lookup, &Arc::new(vec![vec![1.0; 2]]), true, &[]).unwrap();
    subject.commit(&[(2, 1.0)], false).unwrap();
    // Not applied yet.
    let (lookup, _) = subject.lookup(&[Input::plain(0, &[2])], Insertion::AtLookup, true).unwrap();
    subject.push(3, lookup, &Arc::new(vec![vec![1.0; 2]]), true, &[]).unwrap();
    subject.commit(&[(3, 1.0)], true).unwrap();
    assert_eq!(keys(&subject), [1, 2, 7]);
    subject.apply(UpdateScalars { learning_rate: 0.1, step: 3, factor: 1.0 }, true).unwrap();
    train(&mut subject, 4, &[3]);
    assert_eq!(keys(&subject), [3, 7]);
}

/// The clock belongs to the process, so one test uses it.
#[test]
fn a_row_goes_when_its_time_is_over_by_a_clock_that_never_goes_back() {
    const DAY: u64 = 86_400_000;
    let mut subject = subject(expiring(Lifetime::Milliseconds(30 * DAY)));
    let mut number = 0;
    let mut train_for = |subject: &mut HostSubject, steps: u64, keys: &[Key]| {
        for _ in 0..steps {
            number += 1;
            train(subject, number, keys);
        }
    };
    clock::set(Some(1000 * DAY));
    train_for(&mut subject, 1, &[1, 2]);
    clock::set(Some(1020 * DAY));
    train_for(&mut subject, 1, &[2]);
    // All parts have their turn.
    clock::set(Some(1029 * DAY));
    train_for(&mut subject, 4096, &[3]);
    assert_eq!(keys(&subject), [1, 2, 3]);
    clock::set(Some(900 * DAY));
    train_for(&mut subject, 4096, &[3]);
    assert_eq!(keys(&subject), [1, 2, 3]);
    clock::set(Some(1031 * DAY));
    train_for(&mut subject, 4096, &[3]);
    assert_eq!(keys(&subject), [2, 3]);
    clock::set(Some(1051 * DAY));
    train_for(&mut subject, 4096, &[4]);
    assert_eq!(keys(&subject), [3, 4]);
    clock::set(None);
}

#[test]
fn a_table_with_both_policies_removes_by_both() {
    let eviction =
        Eviction { score: Score::Lfu { half_life: None }, counts_inference: false, keeps_evicted: true };
    let config =
        TableConfig { max_capacity: Some(3), eviction: Some(eviction), ..expiring(Lifetime::Steps(4)) };
    let mut subject = subject(config);
    train(&mut subject, 1, &[1, 1, 2]);
    train(&mut subject, 2, &[3, 3]);
    train(&mut subject, 3, &[4]);
    assert_eq!(subject.table(0).explain(2).unwrap(), Explanation::Evicted { step: 3 });
    train(&mut subject, 4, &[4]);
    train(&mut subject, 5, &[4]);
    assert_eq!(keys(&subject), [3, 4]);
    let gone = subject.table_mut(0).take_evicted().unwrap();
    assert_eq!((gone.keys, gone.scores), (vec![2, 1], vec![1, 2]));
}

#[test]
fn wrong_times_are_refused() {
    let error = |config: TableConfig| HostTable::new(config).err().unwrap().to_string();
    for lifetime in [Lifetime::Steps(0), Lifetime::Milliseconds(0)] {
        assert!(error(expiring(lifetime)).contains("`time_to_live` must be at least one step"));
    }
    let fixed = TableConfig { vocabulary_size: Some(9), ..expiring(Lifetime::Steps(2)) };
    assert!(error(fixed).contains("`time_to_live` is for dynamic tables"));
    let without = TableConfig { time_to_live: None, ..expiring(Lifetime::Steps(2)) };
    let mut table = HostTable::new(without).unwrap();
    assert!(table.take_evicted().unwrap_err().to_string().contains("does not keep the rows"));
}
