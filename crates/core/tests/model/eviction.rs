//! Rows that a full table removes.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::common::Dice;
use crate::common::input::Input;
use crate::common::large::{SGD, plain_update};
use crate::common::sharded::Directory;
use crate::common::strategies::plain_config;
use crate::common::subject::{HostSubject, Subject, binding};
use sok_core::checkpoint::{DumpOptions, LoadOptions, dump, load, read_manifest};
use sok_core::contract::records::Records;
use sok_core::contract::table::{
    CheckMode, Contents, Cursor, Explanation, Insertion, Outcomes, Table, TableConfig,
};
use sok_core::error::Error;
use sok_core::formula::update::UpdateScalars;
use sok_core::host::table::HostTable;
use sok_core::key::Key;
use sok_core::policy::admission::Admission;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::pool::Pool;

fn evicting(score: Score, max_capacity: u64) -> TableConfig {
    let eviction = Some(Eviction { score, counts_inference: false, keeps_evicted: true });
    TableConfig { max_capacity: Some(max_capacity), eviction, ..plain_config("t", 2) }
}

fn insert(table: &mut HostTable, keys: &[Key]) -> Outcomes {
    table.find_or_insert(keys, &mut vec![0.0; keys.len() * 2]).unwrap()
}

fn sorted_keys(table: &HostTable) -> Vec<Key> {
    let mut keys = table.keys().unwrap();
    keys.sort_unstable();
    keys
}

#[test]
fn the_least_used_rows_go_first_and_of_equal_ones_those_with_the_lowest_key() {
    let mut table = HostTable::new(evicting(Score::Lfu { half_life: None }, 4)).unwrap();
    insert(&mut table, &[9, 8, 7, 7, 1, 1, 1]);
    let outcomes = insert(&mut table, &[3, 4]);
    assert_eq!(outcomes, Outcomes { inserted: 2, evicted: 2, ..Outcomes::default() });
    assert_eq!(sorted_keys(&table), [1, 3, 4, 7]);
    assert_eq!(table.explain(7).unwrap(), Explanation::Present { score: Some(2) });
    assert_eq!(table.explain(8).unwrap(), Explanation::Evicted { step: 1 });
    assert_eq!(table.explain(5).unwrap(), Explanation::Absent);
    let evicted = table.take_evicted().unwrap();
    assert_eq!((evicted.keys, evicted.scores), (vec![8, 9], vec![1, 1]));
    assert!(table.take_evicted().unwrap().keys.is_empty());
}

#[test]
fn rows_that_the_call_itself_uses_stay_and_what_does_not_fit_is_an_error() {
    let mut table = HostTable::new(evicting(Score::Lru, 3)).unwrap();
    insert(&mut table, &[1, 2, 3]);
    insert(&mut table, &[1, 4, 3]);
    assert_eq!(sorted_keys(&table), [1, 3, 4]);
    let refused = table.find_or_insert(&[1, 5, 6, 7], &mut [0.0; 8]).unwrap_err();
    assert!(matches!(refused, Error::TableFull { refused: 1, len: 3, capacity: 3, .. }), "{refused}");
    assert_eq!(sorted_keys(&table), [1, 3, 4]);
}

#[test]
fn without_an_error_the_first_new_keys_fit() {
    let config = TableConfig { check_mode: CheckMode::Count, ..evicting(Score::Lru, 3) };
    let mut table = HostTable::new(config).unwrap();
    insert(&mut table, &[1, 2, 3]);
    let outcomes = insert(&mut table, &[9, 1, 8, 7]);
    assert_eq!(outcomes, Outcomes { hit: 1, inserted: 2, evicted: 2, refused: 1, ..Outcomes::default() });
    assert_eq!(sorted_keys(&table), [1, 8, 9]);
}

#[test]
fn an_erased_key_was_never_there() {
    let mut table = HostTable::new(evicting(Score::Lru, 2)).unwrap();
    insert(&mut table, &[1, 2]);
    insert(&mut table, &[3]);
    assert_eq!(table.explain(1).unwrap(), Explanation::Evicted { step: 1 });
    table.erase(&[1]).unwrap();
    assert_eq!(table.explain(1).unwrap(), Explanation::Absent);
    assert!(table.take_evicted().unwrap().keys.is_empty());
}

#[test]
fn a_policy_needs_a_dynamic_table_with_a_limit() {
    let without_limit = TableConfig { max_capacity: None, ..evicting(Score::Lru, 2) };
    let fixed = TableConfig { vocabulary_size: Some(9), ..evicting(Score::Lru, 2) };
    let never = evicting(Score::Lfu { half_life: Some(0) }, 2);
    let errors =
        [without_limit, fixed, never].map(|config| HostTable::new(config).err().unwrap().to_string());
    assert_eq!(errors[0], "table `t`: `eviction` needs `max_capacity`");
    assert!(errors[1].contains("`eviction` is for dynamic tables"), "{}", errors[1]);
    assert!(errors[2].contains("`half_life` must be at least 1 step"), "{}", errors[2]);
    let table_without = || HostTable::new(plain_config("t", 2)).unwrap();
    assert!(table_without().take_evicted().unwrap_err().to_string().contains("does not keep the rows"));
    assert_eq!(table_without().explain(3).unwrap(), Explanation::Absent);
}

/// A continuous form of Zipf's law with exponent 1.05: key k is drawn where k + 1 is the whole part of a number with the density
/// x^-1.05 between 1 and `num_keys + 1`.
struct Zipf {
    num_keys: u64,
}

impl Zipf {
    const POWER: f64 = 1.0 - 1.05;

    fn below(&self, x: f64) -> f64 {
        (x.powf(Self::POWER) - 1.0) / ((self.num_keys as f64 + 1.0).powf(Self::POWER) - 1.0)
    }

    fn share(&self, key: Key) -> f64 {
        self.below(key as f64 + 2.0) - self.below(key as f64 + 1.0)
    }

    fn draw(&self, dice: &mut Dice) -> Key {
        let uniform = (dice.next() >> 11) as f64 / (1u64 << 53) as f64;
        let most = (self.num_keys as f64 + 1.0).powf(Self::POWER) - 1.0;
        ((1.0 + uniform * most).powf(1.0 / Self::POWER) as u64).min(self.num_keys) - 1
    }
}

/// The share of the ids for which a table of a fifth of the keys has a row after 5,000 steps of training, of what the best choice of rows has.
fn kept(score: Score, admission: Option<Admission>) -> f64 {
    const KEYS: u64 = 50_000;
    const STEPS: u64 = 5000;
    const IDS: usize = 1000;
    static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(1).unwrap());
    let zipf = Zipf { num_keys: KEYS };
    // Else the order of keys would be that of their shares.
    let scattered = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let number_of: BTreeMap<Key, u64> = (0..KEYS).map(|number| (scattered(number), number)).collect();
    let eviction = Some(Eviction { score, counts_inference: false, keeps_evicted: false });
    let config = TableConfig { dim: 1, eviction, admission, ..evicting(score, KEYS / 5) };
    let mut subject = HostSubject::new(&[config], &POOL);
    subject.bind(binding(0, plain_update(SGD))).unwrap();
    let (mut dice, gradients) = (Dice(5), Arc::new(vec![vec![0.0; IDS]]));
    for step in 1..=STEPS {
        let keys: Vec<Key> = (0..IDS).map(|_| scattered(zipf.draw(&mut dice))).collect();
        let (lookup, _) = subject.lookup(&[Input::plain(0, &keys)], Insertion::AtCommit, true).unwrap();
        subject.push(step, lookup, &gradients, true, &[]).unwrap();
        subject.commit(&[(step, 1.0)], true).unwrap();
        subject.apply(UpdateScalars { learning_rate: 0.1, step, factor: 1.0 }, true).unwrap();
    }
    let table = subject.table(0);
    assert!(table.stats().unwrap().outcomes.evicted > 1000);
    let kept: f64 = table.keys().unwrap().into_iter().map(|key| zipf.share(number_of[&key])).sum();
    kept / zipf.below(table.len().unwrap() as f64 + 1.0)
}

#[test]
fn a_table_of_a_fifth_of_the_keys_keeps_the_hot_ones() {
    let lfu = Score::Lfu { half_life: None };
    let often = |threshold, memory| {
        Some(Admission::Frequency { threshold, once_per_step: false, half_life: None, memory })
    };
    // A count of a key without a row takes 64 bytes.
    let few = Some(64 * 5000);
    for (score, admission, least) in [
        (lfu, None, 0.965),
        (lfu, often(3, None), 0.98),
        (lfu, often(10, None), 0.99),
        (lfu, often(10, few), 0.99),
        (Score::Lru, None, 0.93),
        (Score::Lru, often(10, None), 0.97),
        (Score::Lru, often(10, few), 0.97),
    ] {
        let kept = kept(score, admission);
        assert!(kept >= least, "{score:?}, {admission:?}: {kept}");
    }
}

#[test]
fn scores_go_with_a_dump() {
    let directory = Directory::new("scores");
    let path = &directory.0;
    let options = |overwrite| DumpOptions { overwrite, ..DumpOptions::default() };
    let plain = HostTable::new(plain_config("t", 2)).unwrap();
    dump(path, &[&plain], &[], &options(true)).unwrap();
    assert_eq!(read_manifest(path).unwrap().version, 1);

    let mut table = HostTable::new(evicting(Score::Lfu { half_life: None }, 100)).unwrap();
    table.set_step(7).unwrap();
    insert(&mut table, &[1, 1, 2, 3, 3, 3]);
    dump(path, &[&table], &[], &options(true)).unwrap();
    assert_eq!(read_manifest(path).unwrap().version, 2);

    let scores = |table: &HostTable| {
        let mut records = Records::default();
        table.scan(Cursor::default(), 10, &mut records).unwrap();
        let mut scores: Vec<_> = records.keys.into_iter().zip(records.scores).collect();
        scores.sort_unstable();
        (scores, table.step().unwrap())
    };
    let loaded = |score| {
        let mut loaded = HostTable::new(evicting(score, 3)).unwrap();
        load(path, &mut [("t", &mut loaded)], &LoadOptions::default()).unwrap();
        scores(&loaded)
    };
    assert_eq!(loaded(Score::Lfu { half_life: Some(5) }), (vec![(1, 2), (2, 1), (3, 3)], 7));
    assert_eq!(loaded(Score::Lru), (vec![(1, 1), (2, 1), (3, 1)], 1), "another kind of score");
    let mut without = HostTable::new(plain_config("t", 2)).unwrap();
    load(path, &mut [("t", &mut without)], &LoadOptions::default()).unwrap();
    assert_eq!((without.len().unwrap(), scores(&without).0), (3, vec![]));
}
