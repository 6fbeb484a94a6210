//! What tables of any device do with rows that have a time to live. Each public function but the first is a test.

use std::collections::BTreeMap;
use std::sync::Arc;

use sok_core::checkpoint::{
    DumpOptions, DumpReader, LoadMode, LoadOptions, Target, TargetBinding, dump, read_manifest,
};
use sok_core::contract::records::Records;
use sok_core::contract::table::{Cursor, Explanation, Insertion, Outcomes, Table, TableConfig};
use sok_core::formula::update::UpdateScalars;
use sok_core::key::{Key, hash};
use sok_core::policy::clock;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};

use super::input::Input;
use super::large::{ADAM, SGD, plain_update};
use super::sharded::Directory;
use super::strategies::plain_config;
use super::subject::{Maker, OWNER, Subject, binding};

pub fn expiring(lifetime: Lifetime) -> TableConfig {
    TableConfig { time_to_live: Some(TimeToLive { lifetime, keeps_expired: true }), ..plain_config("t", 2) }
}

/// A group of one table that is trained.
struct Trained {
    subject: Box<dyn Subject>,
    num_steps: u64,
}

impl Trained {
    fn new(config: TableConfig, maker: &Maker) -> Trained {
        let mut subject = (maker.make)(&[config]).remove(0);
        subject.bind(binding(OWNER, plain_update(SGD))).unwrap();
        Trained { subject, num_steps: 0 }
    }

    /// Makes a step with these keys that is committed, and applied if it is an update.
    fn commit(&mut self, keys: &[Key], is_update: bool) {
        self.num_steps += 1;
        let number = self.num_steps;
        let (lookup, _) = self.subject.lookup(&[Input::plain(0, keys)], Insertion::AtLookup, true).unwrap();
        let dim = self.subject.table(0).config().dim;
        let gradients = Arc::new(vec![vec![1.0; dim * keys.len()]]);
        self.subject.push(number, lookup, &gradients, true, &[]).unwrap();
        self.subject.commit(&[(number, 1.0)], is_update).unwrap();
    }

    fn apply(&mut self) {
        let scalars = UpdateScalars { learning_rate: 0.1, step: self.num_steps, factor: 1.0 };
        self.subject.apply(scalars, true).unwrap();
    }

    fn train(&mut self, keys: &[Key]) {
        self.commit(keys, true);
        self.apply();
    }

    fn table(&mut self) -> &mut dyn Table {
        self.subject.table_mut(0)
    }

    fn keys(&mut self) -> Vec<Key> {
        let mut keys = self.subject.table(0).keys().unwrap();
        keys.sort_unstable();
        keys
    }

    fn ages(&mut self) -> BTreeMap<Key, u64> {
        let mut records = Records::default();
        assert_eq!(self.subject.table(0).scan(Cursor::default(), 99, &mut records).unwrap(), None);
        records.keys.into_iter().zip(records.ages).collect()
    }
}

pub fn a_row_goes_at_the_end_of_the_step_that_is_so_many_after_its_last_one(maker: &Maker) {
    let mut trained = Trained::new(expiring(Lifetime::Steps(3)), maker);
    trained.train(&[1, 2, 3]);
    trained.train(&[2]);
    trained.train(&[3]);
    // What is inserted outside of steps is as old as the last step.
    trained.table().assign(&[9], &[0.5, 0.5], true).unwrap();
    trained.train(&[4]);
    assert_eq!(trained.keys(), [2, 3, 4, 9]);
    trained.train(&[4]);
    assert_eq!(trained.keys(), [3, 4, 9]);
    trained.train(&[4]);
    assert_eq!(trained.keys(), [4]);
    let table = trained.table();
    let told = [1, 2, 3, 9].map(|key| table.explain(key).unwrap());
    assert_eq!(told, [4, 5, 6, 6].map(|step| Explanation::Expired { step }));
    let outcomes = Outcomes { hit: 4, inserted: 5, expired: 4, ..Outcomes::default() };
    assert_eq!(table.stats().unwrap().outcomes, outcomes);
    let gone = table.take_evicted().unwrap();
    assert_eq!(gone.keys, [1, 2, 3, 9]);
    assert_eq!(gone.values[6..], [0.5, 0.5]);
    assert!(table.take_evicted().unwrap().keys.is_empty());
    // A key that comes again starts anew, and an erased one is forgotten.
    trained.train(&[1]);
    assert_eq!(trained.table().explain(1).unwrap(), Explanation::Present { score: None });
    trained.table().erase(&[2]).unwrap();
    assert_eq!(trained.table().explain(2).unwrap(), Explanation::Absent);
}

pub fn many_rows_go_part_by_part(maker: &Maker) {
    const STEPS: u64 = 64;
    let mut trained = Trained::new(expiring(Lifetime::Steps(STEPS)), maker);
    let all: Vec<Key> = (0..20_000).collect();
    trained.train(&all);
    let mut before = all.len();
    for number in 2..=STEPS + 16 {
        trained.train(&[1 << 40]);
        let len = trained.table().len().unwrap() - 1;
        let expected = if number <= STEPS { before } else { before - before.min(1) };
        assert!(len <= expected && before - len < 2 * all.len() / 16, "step {number}: {before} to {len}");
        before = len;
    }
    assert_eq!(trained.keys(), [1 << 40]);
}

/// More rows than a device lists at once.
pub fn many_rows_of_one_part_go_at_once(maker: &Maker) {
    const STEPS: u64 = 1024;
    let config = expiring(Lifetime::Steps(STEPS));
    let part = Lifetime::Steps(STEPS).part_due(1 + STEPS, config.seed).unwrap();
    let mut trained = Trained::new(config, maker);
    let all: Vec<Key> = (0..).filter(|&key| part.contains(hash(key))).take(6000).collect();
    trained.train(&all);
    for _ in 0..STEPS - 1 {
        trained.train(&[1 << 40]);
    }
    assert_eq!(trained.table().len().unwrap(), all.len() + 1);
    trained.train(&[1 << 40]);
    assert_eq!(trained.keys(), [1 << 40]);
    assert_eq!(trained.table().take_evicted().unwrap().keys, all);
    assert_eq!(trained.table().explain(all[5999]).unwrap(), Explanation::Expired { step: STEPS + 1 });
    // Their memory is used again.
    trained.train(&all);
    assert_eq!(trained.table().len().unwrap(), all.len() + 1);
}

pub fn a_table_whose_rows_come_and_go_stays_small(maker: &Maker) {
    let time_to_live = Some(TimeToLive { lifetime: Lifetime::Steps(2), keeps_expired: false });
    let mut trained = Trained::new(TableConfig { time_to_live, ..plain_config("t", 64) }, maker);
    let mut bytes = Vec::new();
    for step in 0..300 {
        trained.train(&(2000 * step..2000 * (step + 1)).collect::<Vec<Key>>());
        bytes.push(trained.table().stats().unwrap().bytes);
    }
    assert_eq!(trained.table().len().unwrap(), 4000);
    // The keys of 400,000 rows that went are remembered, but their records are used again.
    assert!(bytes[299] < bytes[99] + 400_000 * 16, "{} bytes, then {}", bytes[99], bytes[299]);
}

/// Gradients of an earlier lookup come when the row is gone.
pub fn a_kept_row_is_as_it_went(maker: &Maker) {
    let mut trained = Trained::new(expiring(Lifetime::Steps(2)), maker);
    trained.train(&[7]);
    let mut before = ([0.0; 2], [false]);
    trained.table().find(&[7], &mut before.0, &mut before.1).unwrap();
    trained.train(&[1]);
    let lookups = [1, 7]
        .map(|key| trained.subject.lookup(&[Input::plain(0, &[key])], Insertion::AtLookup, true).unwrap().0);
    for lookup in lookups {
        trained.num_steps += 1;
        let number = trained.num_steps;
        trained.subject.push(number, lookup, &Arc::new(vec![vec![1.0; 2]]), true, &[]).unwrap();
        trained.subject.commit(&[(number, 1.0)], true).unwrap();
        trained.apply();
        assert_eq!(trained.keys(), [1]);
    }
    let gone = trained.table().take_evicted().unwrap();
    assert_eq!((gone.keys, gone.values), (vec![7], before.0.to_vec()));
    assert_eq!(trained.keys(), [1]);
}

pub fn rows_of_pending_commits_and_the_row_of_unknown_keys_stay(maker: &Maker) {
    let config = TableConfig { out_of_vocabulary_key: Some(7), ..expiring(Lifetime::Steps(1)) };
    let mut trained = Trained::new(config, maker);
    trained.train(&[1, 7]);
    trained.commit(&[1], false);
    // Not applied yet.
    trained.commit(&[2], true);
    assert_eq!(trained.keys(), [1, 2, 7]);
    trained.apply();
    trained.train(&[3]);
    assert_eq!(trained.keys(), [3, 7]);
}

/// The clock belongs to the process, so one test uses it.
pub fn a_row_goes_when_its_time_is_over_by_a_clock_that_never_goes_back(maker: &Maker) {
    const DAY: u64 = 86_400_000;
    let mut trained = Trained::new(expiring(Lifetime::Milliseconds(30 * DAY)), maker);
    let train_for = |trained: &mut Trained, steps: u64, keys: &[Key]| {
        (0..steps).for_each(|_| trained.train(keys));
    };
    clock::set(Some(1000 * DAY));
    train_for(&mut trained, 1, &[1, 2]);
    clock::set(Some(1020 * DAY));
    train_for(&mut trained, 1, &[2]);
    // All parts have their turn.
    clock::set(Some(1029 * DAY));
    train_for(&mut trained, 4096, &[3]);
    assert_eq!(trained.keys(), [1, 2, 3]);
    clock::set(Some(900 * DAY));
    train_for(&mut trained, 4096, &[3]);
    assert_eq!(trained.keys(), [1, 2, 3]);
    clock::set(Some(1031 * DAY));
    train_for(&mut trained, 4096, &[3]);
    assert_eq!(trained.keys(), [2, 3]);
    // The times of commits go with a dump.
    let directory = Directory::new("times");
    dump_of(&mut trained, &directory);
    let mut again = loaded(&directory, expiring(Lifetime::Milliseconds(30 * DAY)), maker);
    assert_eq!(again.table().commit_times(), trained.table().commit_times());
    clock::set(Some(1051 * DAY));
    for trained in [&mut trained, &mut again] {
        train_for(trained, 4096, &[4]);
        assert_eq!(trained.keys(), [3, 4]);
    }
    clock::set(None);
}

pub fn a_table_with_both_policies_removes_by_both(maker: &Maker) {
    let eviction =
        Eviction { score: Score::Lfu { half_life: None }, counts_inference: false, keeps_evicted: true };
    let config =
        TableConfig { max_capacity: Some(3), eviction: Some(eviction), ..expiring(Lifetime::Steps(4)) };
    let mut trained = Trained::new(config, maker);
    trained.train(&[1, 1, 2]);
    trained.train(&[3, 3]);
    trained.train(&[4]);
    assert_eq!(trained.table().explain(2).unwrap(), Explanation::Evicted { step: 3 });
    trained.train(&[4]);
    trained.train(&[4]);
    assert_eq!(trained.keys(), [3, 4]);
    let gone = trained.table().take_evicted().unwrap();
    assert_eq!((gone.keys, gone.scores), (vec![2, 1], vec![1, 2]));
}

fn dump_of(trained: &mut Trained, directory: &Directory) {
    let options = DumpOptions { overwrite: true, ..DumpOptions::default() };
    dump(&directory.0, &[trained.subject.table(0)], &[], &options).unwrap();
}

/// What a table of another process loads of a dump.
fn loaded(directory: &Directory, config: TableConfig, maker: &Maker) -> Trained {
    let mut trained = Trained::new(config, maker);
    trained.train(&[1 << 50]); // it has made other steps
    let mut targets =
        [Target { name: "t", table: trained.table(), binding: TargetBinding::Bound, owners: None }];
    let options = LoadOptions { mode: LoadMode::Replace, states: true };
    DumpReader::open(&directory.0).unwrap().load(&mut targets, &options, None).unwrap();
    trained
}

pub fn ages_go_with_a_dump(maker: &Maker) {
    let directory = Directory::new("ages");
    let mut trained = Trained::new(expiring(Lifetime::Steps(6)), maker);
    for keys in [&[1u64, 2, 3][..], &[2], &[3], &[4]] {
        trained.train(keys);
    }
    dump_of(&mut trained, &directory);
    assert_eq!(read_manifest(&directory.0).unwrap().version, 3);
    let mut again = loaded(&directory, expiring(Lifetime::Steps(6)), maker);
    assert_eq!(again.ages(), BTreeMap::from([(1, 3), (2, 2), (3, 1), (4, 0)]));
    assert_eq!(again.ages(), trained.ages());
    assert_eq!(again.table().step().unwrap(), 5);
    for number in 5..12 {
        trained.train(&[9]);
        again.train(&[9]);
        assert_eq!(trained.keys(), again.keys(), "step {number}");
    }
    assert_eq!(again.keys(), [9]);
    // A table without a time to live takes the rows alone, and one with a time takes rows without ages as trained by the last step.
    let without = TableConfig { time_to_live: None, ..expiring(Lifetime::Steps(6)) };
    assert_eq!(loaded(&directory, without.clone(), maker).keys(), [1, 2, 3, 4]);
    let plain = Directory::new("no-ages");
    dump_of(&mut loaded(&directory, without, maker), &plain);
    let mut again = loaded(&plain, expiring(Lifetime::Steps(6)), maker);
    assert!(again.ages().into_values().eq([0; 4]));
}

/// A row is in use by the gradients that are not applied yet, not because of its age.
pub fn rows_that_are_loaded_while_gradients_accumulate_may_go(maker: &Maker) {
    let eviction = Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: false };
    let config =
        TableConfig { max_capacity: Some(3), eviction: Some(eviction), ..expiring(Lifetime::Steps(100)) };
    let mut trained = Trained::new(config, maker);
    trained.train(&[1]);
    trained.commit(&[2], false);
    let loaded = Records { keys: vec![5], values: vec![0.5; 2], scores: vec![0], ages: vec![0] };
    trained.table().restore(&loaded).unwrap();
    trained.commit(&[6], true);
    assert_eq!(trained.keys(), [1, 2, 6]);
    trained.apply();
    assert_eq!(trained.keys(), [1, 2, 6]);
}

/// After a dump, a table notes changes until its optimizer has other states.
pub fn rows_go_whether_changes_are_noted_or_not(maker: &Maker) {
    let mut trained = Trained::new(expiring(Lifetime::Steps(1)), maker);
    trained.train(&[1]);
    trained.table().track(1).unwrap();
    trained.train(&[2]);
    assert_eq!(trained.keys(), [2]);
    trained.subject.bind(binding(OWNER, plain_update(ADAM))).unwrap();
    trained.train(&[3]);
    trained.train(&[4]);
    assert_eq!(trained.keys(), [4]);
    assert!(trained.table().epoch_of(1).is_none());
}

/// Scores are halved at the end of the step in which the row goes, after it has gone.
pub fn a_kept_row_has_the_score_that_it_went_with(maker: &Maker) {
    let score = Score::Lfu { half_life: Some(2) };
    let eviction = Some(Eviction { score, counts_inference: false, keeps_evicted: false });
    let config = TableConfig { max_capacity: Some(9), eviction, ..expiring(Lifetime::Steps(1)) };
    let mut trained = Trained::new(config, maker);
    trained.train(&[1, 1, 1, 1, 1, 1]);
    trained.train(&[2]);
    let gone = trained.table().take_evicted().unwrap();
    assert_eq!((gone.keys, gone.scores), (vec![1], vec![6]));
}
