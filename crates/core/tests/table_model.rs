//! A table beside its model, through the methods of `Table`.

mod common;

use std::collections::BTreeMap;

use common::strategies::{config, plain_config, table_op, update};
use common::table::{TableOp, table_and_model};
use common::{bits, scan};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use sok_core::host_table::HostTable;
use sok_core::key::Key;
use sok_core::table::{Cursor, Outcomes, Records, Table};

fn op() -> impl Strategy<Value = TableOp> {
    let rule = (prop::option::weighted(0.9, update()), any::<bool>());
    prop_oneof![
        15 => table_op(),
        2 => rule.prop_map(|(update, keep_states)| TableOp::Rule { update, keep_states }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_list_of_calls_leaves_a_table_as_its_model(config in config(), ops in prop::collection::vec(op(), 1..25)) {
        let (mut table, mut model) = table_and_model(&config);
        for op in ops {
            op.run(&mut model, &mut [&mut table]);
        }
    }
}

/// Keys in which a weak hash sees no difference.
fn hurtful_keys() -> Vec<Key> {
    let mut keys: Vec<Key> = (0..20_000).map(|i| i << 32).collect();
    keys.extend((0..64).flat_map(|k| (1..300u64).map(move |i| i.wrapping_mul(1 << k))));
    keys.extend((0..64).map(|bit| 0x0123_4567_89ab_cdef ^ (1 << bit)));
    keys.extend((0..64).map(|bit| !(1u64 << bit)));
    keys.extend([0, u64::MAX]);
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// Row `[i]` for key number `i`.
fn number_rows(table: &mut HostTable, keys: &[Key]) {
    let rows: Vec<f32> = (0..keys.len()).map(|i| i as f32).collect();
    let outcomes = table.assign(keys, &rows, true).unwrap();
    assert_eq!(outcomes, Outcomes { inserted: keys.len() as u64, ..Outcomes::default() });
}

/// Keys of which `is_there` have the row of their number, the others none.
fn check_numbers(table: &HostTable, keys: &[Key], is_there: impl Fn(usize) -> bool) {
    let (mut rows, mut found) = (vec![0.0; keys.len()], vec![false; keys.len()]);
    table.find(keys, &mut rows, &mut found).unwrap();
    for i in 0..keys.len() {
        assert_eq!(found[i], is_there(i), "key {:#x}", keys[i]);
        assert!(!found[i] || rows[i] == i as f32, "key {:#x} has row {}", keys[i], rows[i]);
    }
    assert_eq!(table.len(), (0..keys.len()).filter(|i| is_there(*i)).count());
}

/// Inserts all, erases every other, inserts those again.
fn fill_erase_refill(keys: &[Key]) {
    let mut table = HostTable::new(plain_config("keys", 1)).unwrap();
    number_rows(&mut table, keys);
    check_numbers(&table, keys, |_| true);
    let others: Vec<Key> = keys.iter().copied().step_by(2).collect();
    assert_eq!(table.erase(&others), others.len());
    assert_eq!(table.erase(&others), 0);
    check_numbers(&table, keys, |i| i % 2 == 1);
    let rows: Vec<f32> = (0..keys.len()).step_by(2).map(|i| i as f32).collect();
    assert_eq!(table.assign(&others, &rows, true).unwrap().inserted, others.len() as u64);
    check_numbers(&table, keys, |_| true);
}

#[test]
fn keys_that_hurt_weak_hashes_are_found_and_erased_like_others() {
    fill_erase_refill(&hurtful_keys());
}

#[test]
fn a_million_keys_in_a_row_are_found_and_half_of_them_erased() {
    fill_erase_refill(&(0..1_000_000).collect::<Vec<Key>>());
}

#[test]
fn a_scan_gives_each_record_once_however_it_is_cut() {
    let keys = hurtful_keys();
    let mut table = HostTable::new(plain_config("keys", 1)).unwrap();
    number_rows(&mut table, &keys);
    let expected: BTreeMap<Key, Vec<u32>> =
        keys.iter().enumerate().map(|(i, k)| (*k, bits(&[i as f32]))).collect();
    for max in [97, 1000, keys.len() - 1, keys.len(), usize::MAX] {
        assert_eq!(scan(&table, max), expected);
    }
}

/// Texts of calls that must fail and change nothing.
fn failures(table: &mut HostTable) -> Vec<String> {
    let mut rows = [0.0; 7];
    let records = Records { keys: vec![1, 2, 9], values: vec![0.5; 7] };
    let results = [
        table.find(&[1, 2], &mut rows, &mut [false; 2]),
        table.find(&[1, 2], &mut rows[..6], &mut [false; 1]),
        table.find_or_insert(&[8, 9], &mut rows).map(drop),
        table.assign(&[8, 9], &rows, true).map(drop),
        table.restore(&records),
    ];
    results.into_iter().map(|r| r.expect_err("lengths that do not fit are refused").to_string()).collect()
}

#[test]
fn lengths_that_do_not_fit_are_refused_and_change_nothing() {
    let mut table = HostTable::new(plain_config("t", 3)).unwrap();
    table.assign(&[1, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], true).unwrap();
    let before = scan(&table, 10);
    let texts = failures(&mut table);
    assert_eq!(texts[0], "table `t`: `rows` must hold 3 numbers a key. Received: 7 numbers for 2 keys");
    assert_eq!(scan(&table, 10), before);
}

#[test]
fn a_fresh_table_takes_the_records_over_with_their_states() {
    let mut table = HostTable::new(plain_config("t", 2)).unwrap();
    number_rows_of_two(&mut table);
    let update = adam();
    let mut fresh = table.fresh(Some(update)).unwrap();
    assert_eq!((fresh.len(), fresh.record_width()), (0, 6));
    let records = Records { keys: vec![5], values: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0] };
    fresh.restore(&records).unwrap();
    table.replace_with(fresh).unwrap();
    assert_eq!(table.update_rule(), Some(&update));
    let mut got = Records::default();
    assert_eq!(table.scan(Cursor::default(), 10, &mut got), None);
    assert_eq!(got, records);
}

fn number_rows_of_two(table: &mut HostTable) {
    table.assign(&[1, 2], &[1.0, 2.0, 3.0, 4.0], true).unwrap();
}

fn adam() -> sok_core::optimizer::Update {
    let rule = common::strategies::rules()[3];
    sok_core::optimizer::Update { rule, weight_decay: None, clipvalue: None, clipnorm: None }
}
