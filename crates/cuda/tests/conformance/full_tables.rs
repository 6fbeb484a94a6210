//! Full tables on a GPU beside those of the host: which rows they remove.

use std::sync::Arc;

use sok_core::contract::records::Records;
use sok_core::contract::table::{CheckMode, Insertion, Outcomes, TableConfig};
use sok_core::error::Error;
use sok_core::formula::update::UpdateScalars;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};

use crate::POOL;
use crate::common::input::Input;
use crate::common::large::{SGD, plain_update, skewed_keys};
use crate::common::strategies::plain_config;
use crate::common::subject::{HostSubject, Subject, binding};
use crate::common::{Dice, bits, scan};
use crate::subject::GpuSubject;

/// Groups with the same optimizer. The one on the GPU does not wait for its commits.
fn on_host_and_gpu(configs: &[TableConfig]) -> [Box<dyn Subject>; 2] {
    let mut gpu = GpuSubject::new(configs);
    gpu.settles = false;
    let mut subjects: [Box<dyn Subject>; 2] = [Box::new(HostSubject::new(configs, &POOL)), Box::new(gpu)];
    subjects.iter_mut().for_each(|subject| subject.bind(binding(1, plain_update(SGD))).unwrap());
    subjects
}

/// Key number `number` of keys that are all over their range.
fn scattered(number: u64) -> u64 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 1
}

/// Makes step number `step` with the gradients of a lookup.
fn finish_step(subject: &mut dyn Subject, step: u64, lookup: u64, gradients: Vec<Vec<f32>>) {
    subject.push(step, lookup, &Arc::new(gradients), true, &[]).unwrap();
    subject.commit(&[(step, 1.0)], true).unwrap();
    subject.apply(UpdateScalars { learning_rate: 0.05, step, factor: 1.0 }, true).unwrap();
}

/// Tables with fewer and with more rows than a sweep samples. Loads and `set_step` make scores lower. The host waits for a sweep only where
/// removed rows are kept.
#[test]
#[ignore = "needs a GPU"]
fn full_tables_remove_the_rows_that_those_of_the_host_remove() {
    for (seed, (capacity, len)) in (1..).zip([(300, 50), (3000, 600), (60_000, 9000), (150_000, 20_000)]) {
        let scores =
            [Score::Lru, Score::Lfu { half_life: None }, Score::Lfu { half_life: Some(3) }, Score::Custom];
        let lifetime = Lifetime::Steps(9);
        let config = |(t, score): (usize, Score)| TableConfig {
            max_capacity: Some(capacity),
            eviction: Some(Eviction { score, counts_inference: t == 1, keeps_evicted: t == 2 }),
            time_to_live: (t % 2 == 0).then_some(TimeToLive { lifetime, keeps_expired: t == 2 }),
            out_of_vocabulary_key: (t == 3).then_some(5),
            check_mode: CheckMode::Count,
            ..plain_config(&format!("t{t}"), 3)
        };
        let configs: Vec<TableConfig> = scores.into_iter().enumerate().map(config).collect();
        let mut subjects = on_host_and_gpu(&configs);
        let (mut dice, mut fresh, mut number) = (Dice(seed), 1 << 40, 0);
        let (mut pending, mut late) = (Vec::new(), None);
        for step in 1..=40 {
            let mut key = || {
                fresh += 1;
                if dice.below(4) == 0 { fresh } else { skewed_keys(&mut dice, 1, 2 * capacity)[0] }
            };
            let keys: Vec<Vec<u64>> = configs.iter().map(|_| (0..len).map(|_| key()).collect()).collect();
            let input = |(t, keys): (usize, &Vec<u64>)| {
                let scores = (t == 3).then(|| keys.iter().map(|key| (key % 1000) as i64).collect());
                Input { scores, ..Input::plain(t, keys) }
            };
            let inputs: Vec<Input> = keys.iter().enumerate().map(input).collect();
            let saves = step % 5 != 4;
            let gradients = Arc::new(vec![vec![0.5; 3 * len]; configs.len()]);
            let looked_up =
                subjects.each_mut().map(|s| s.lookup(&inputs, Insertion::AtLookup, saves).unwrap());
            for (t, (host, gpu)) in looked_up[0].1.iter().zip(&looked_up[1].1).enumerate() {
                assert!(bits(host) == bits(gpu), "{capacity} rows, step {step}, table {t}");
            }
            if saves {
                pending.push(looked_up[0].0);
            }
            // Sometimes a lookup is ahead of the commit of the one before it. Some commits come before their updates: in the end so many
            // that not all keys fit. Some lookups have a second push, after the commit of the first one.
            while pending.len() > usize::from(step % 3 == 0) {
                let lookup = pending.remove(0);
                number += 1;
                let is_update = if step > 30 { step == 38 } else { number % 4 != 2 };
                let named: Vec<_> = late.into_iter().chain([number]).map(|number| (number, 1.0)).collect();
                late = (step % 7 == 0).then_some(number + 1);
                for subject in &mut subjects {
                    subject.push(number, lookup, &gradients, true, &[]).unwrap();
                    subject.commit(&named, is_update).unwrap();
                    let scalars = UpdateScalars { learning_rate: 0.05, step: number, factor: 1.0 };
                    subject.apply(scalars, is_update).unwrap();
                    late.map(|late| subject.push(late, lookup, &gradients, true, &[]).unwrap());
                }
                number = late.unwrap_or(number);
            }
            if step % 10 != 0 {
                continue;
            }
            let [mut host, mut gpu] = subjects.each_mut().map(|subject| subject.tables_mut());
            for (t, (host, gpu)) in host.iter_mut().zip(&mut gpu).enumerate() {
                let at = format!("{capacity} rows, step {step}, table {t}");
                assert!(scan(&**host, 4096) == scan(&**gpu, 4096), "{at}");
                let [of_host, of_gpu] = [&host, &gpu].map(|table| table.stats().unwrap());
                assert_eq!(of_host.outcomes, of_gpu.outcomes, "{at}");
                assert_eq!(of_host.dropped_gradients, of_gpu.dropped_gradients, "{at}");
                let Outcomes { evicted, expired, refused, .. } = of_host.outcomes;
                assert!(
                    step < 40 || (evicted > capacity / 4 && (capacity > 3000 || refused > 0)),
                    "{at}: {of_host:?}"
                );
                assert!(step < 40 || t != 2 || expired > 0, "{at}: {of_host:?}");
                for key in keys[t].iter().take(40).copied().chain(0..200) {
                    assert_eq!(host.explain(key).unwrap(), gpu.explain(key).unwrap(), "{at}, key {key}");
                }
                if t == 1 {
                    let removed = [&host, &gpu].map(|table| {
                        let since = table.epoch_of(7).map(|epoch| table.removed_since(epoch).unwrap());
                        let mut keys = since.unwrap_or_default();
                        keys.sort_unstable();
                        keys
                    });
                    assert!(removed[0] == removed[1], "{at}");
                    assert!(step < 40 || !removed[0].is_empty(), "{at}");
                    if step == 20 {
                        host.track(7).and(gpu.track(7)).unwrap();
                    }
                }
                if step < 40 {
                    let keys: Vec<u64> = host.keys().unwrap().into_iter().step_by(7).collect();
                    let lowered = Records {
                        values: vec![1.0; 3 * keys.len()],
                        scores: (0..keys.len() as u64).map(|i| i % 5).collect(),
                        ages: if t % 2 == 0 { vec![0; keys.len()] } else { Vec::new() },
                        keys,
                    };
                    host.restore(&lowered).and(gpu.restore(&lowered)).unwrap();
                }
                if t == 0 && step == 20 {
                    host.set_step(7).and(gpu.set_step(7)).unwrap();
                }
                if t == 2 {
                    let [of_host, of_gpu] = [host.take_evicted().unwrap(), gpu.take_evicted().unwrap()];
                    assert!(of_host == of_gpu && (step < 40 || !of_host.keys.is_empty()), "{at}");
                }
            }
        }
    }
}

/// So many rows that a sweep takes samples. Few of them may go, or none: then the samples are few, or there are none.
#[test]
#[ignore = "needs a GPU"]
fn full_tables_whose_rows_are_in_use_remove_those_that_are_not() {
    const CAPACITY: u64 = 100_000;
    for (score, check_mode, free) in [
        (Score::Lru, CheckMode::Raise, 0),
        (Score::Lru, CheckMode::Count, 0),
        (Score::Lfu { half_life: None }, CheckMode::Raise, 3),
        (Score::Lfu { half_life: None }, CheckMode::Count, 3),
        (Score::Lru, CheckMode::Count, 700),
        (Score::Custom, CheckMode::Count, 40_000),
    ] {
        let at = format!("{score:?}, {check_mode:?}, {free} rows may go");
        let config = TableConfig {
            max_capacity: Some(CAPACITY),
            eviction: Some(Eviction { score, counts_inference: false, keeps_evicted: false }),
            check_mode,
            ..plain_config("t", 3)
        };
        let configs = [config];
        let mut subjects = on_host_and_gpu(&configs);
        let input = |keys: &[u64]| {
            let scores = (score == Score::Custom).then(|| keys.iter().map(|key| (key % 9) as i64).collect());
            Input { scores, ..Input::plain(0, keys) }
        };
        let keys: Vec<u64> = (0..CAPACITY).map(scattered).collect();
        let fresh: Vec<u64> = (CAPACITY..CAPACITY + 1000).map(scattered).collect();
        let results = subjects.each_mut().map(|subject| {
            let (first, _) = subject.lookup(&[input(&keys)], Insertion::AtLookup, true).unwrap();
            finish_step(&mut **subject, 1, first, vec![vec![0.5; 3 * keys.len()]]);
            subject.lookup(&[input(&keys[free..])], Insertion::AtLookup, true).unwrap();
            let result = subject.lookup(&[input(&fresh)], Insertion::AtLookup, false).map(|(_, rows)| rows);
            // A GPU reports a full table with the next call.
            let result = result.and_then(|rows| {
                subject.lookup(&[input(&fresh[..1])], Insertion::AtLookup, false).map(|_| rows)
            });
            let mut tables = subject.tables_mut();
            (result, scan(&*tables[0], 4096), tables.remove(0).stats().unwrap().outcomes)
        });
        let [(of_host, host, counts), (of_gpu, gpu, gpu_counts)] = results;
        let is_refused = free < 1000 && check_mode == CheckMode::Raise;
        assert_eq!(matches!(of_host, Err(Error::TableFull { .. })), is_refused, "{at}");
        assert_eq!(matches!(of_gpu, Err(Error::TableFull { .. })), is_refused, "{at}");
        if !is_refused {
            assert!(
                of_host
                    .unwrap()
                    .iter()
                    .map(|rows| bits(rows))
                    .eq(of_gpu.unwrap().iter().map(|rows| bits(rows))),
                "{at}"
            );
            assert_eq!(counts, gpu_counts, "{at}");
            assert_eq!(counts.evicted, free.min(CAPACITY as usize / 64) as u64, "{at}");
        }
        assert!(host == gpu, "{at}");
    }
}

/// A rank that loads a dump of another number of ranks may get more rows than its capacity. There are so many that a sweep takes samples.
#[test]
#[ignore = "needs a GPU"]
fn tables_with_more_rows_than_their_capacity_remove_those_that_tables_of_the_host_remove() {
    const CAPACITY: u64 = 70_000;
    const LEN: u64 = 120_000;
    let config = |(t, score): (usize, Score)| TableConfig {
        max_capacity: Some(CAPACITY),
        eviction: Some(Eviction { score, counts_inference: false, keeps_evicted: t == 1 }),
        ..plain_config(&format!("t{t}"), 3)
    };
    let configs: Vec<TableConfig> =
        [Score::Lru, Score::Lfu { half_life: None }].into_iter().enumerate().map(config).collect();
    let mut subjects = on_host_and_gpu(&configs);
    let loaded = Records {
        keys: (0..LEN).map(scattered).collect(),
        values: (0..3 * LEN).map(|i| i as f32).collect(),
        scores: (0..LEN).map(|i| i * 7 % 1000).collect(),
        ages: Vec::new(),
    };
    for subject in &mut subjects {
        subject.tables_mut().iter_mut().for_each(|table| table.restore(&loaded).unwrap());
        assert_eq!(subject.table(0).len().unwrap() as u64, LEN);
    }
    for step in 1..=3 {
        let first = if step == 2 { 0 } else { step * LEN };
        let keys: Vec<u64> = (first..first + 500).map(scattered).collect();
        let inputs = [Input::plain(0, &keys), Input::plain(1, &keys)];
        let rows = subjects.each_mut().map(|subject| {
            let (lookup, rows) = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
            finish_step(&mut **subject, step, lookup, vec![vec![0.5; 3 * keys.len()]; 2]);
            rows
        });
        for (host, gpu) in rows[0].iter().zip(&rows[1]) {
            assert!(bits(host) == bits(gpu), "step {step}");
        }
        let [host, gpu] = subjects.each_mut().map(|subject| subject.tables_mut());
        for (t, (host, gpu)) in host.into_iter().zip(gpu).enumerate() {
            assert!(scan(&*host, 4096) == scan(&*gpu, 4096), "step {step}, table {t}");
            let [of_host, of_gpu] = [&host, &gpu].map(|table| table.stats().unwrap().outcomes);
            assert_eq!(of_host, of_gpu, "step {step}, table {t}");
            assert!(of_host.evicted > LEN - CAPACITY && host.len().unwrap() as u64 <= CAPACITY);
            if t == 1 {
                let [of_host, of_gpu] = [host.take_evicted().unwrap(), gpu.take_evicted().unwrap()];
                assert!(of_host == of_gpu && (step > 1 || !of_host.keys.is_empty()), "step {step}");
            }
        }
    }
}

/// A GPU finds such an id after the lookup has returned.
#[test]
#[ignore = "needs a GPU"]
fn an_id_outside_of_a_table_lets_the_rows_of_the_table_beside_it_go() {
    let eviction = Some(Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: false });
    let evicting = TableConfig { max_capacity: Some(12), eviction, ..plain_config("evicting", 3) };
    let fixed = TableConfig { vocabulary_size: Some(10), ..plain_config("static", 3) };
    for mut subject in on_host_and_gpu(&[evicting, fixed]) {
        let mut look_up = |first: u64, other: u64| {
            let keys: Vec<u64> = (first..first + 12).collect();
            let inputs = [Input::plain(0, &keys), Input::plain(1, &[other])];
            subject.lookup(&inputs, Insertion::AtLookup, true).map(drop)
        };
        look_up(0, 9).unwrap();
        let error = look_up(0, 10).unwrap_err();
        assert!(matches!(error, Error::OutOfVocabulary { id: 10, .. }), "{error}");
        look_up(100, 9).unwrap();
        assert!(scan(subject.table(0), 100).into_keys().eq(100..112));
    }
}
