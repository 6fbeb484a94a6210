//! What every table must do, on any device. Each function is a test.

use std::collections::BTreeMap;

use sok_core::contract::records::Records;
use sok_core::contract::table::{Cursor, Outcomes, Table, TableConfig};
use sok_core::formula::update::Update;
use sok_core::key::Key;

use super::large::ADAM;
use super::strategies::plain_config;
use super::{bits, scan};

pub type MakeTable = fn(TableConfig) -> Box<dyn Table>;

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
fn number_rows(table: &mut dyn Table, keys: &[Key]) {
    let rows: Vec<f32> = (0..keys.len()).map(|i| i as f32).collect();
    let outcomes = table.assign(keys, &rows, true).unwrap();
    assert_eq!(outcomes, Outcomes { inserted: keys.len() as u64, ..Outcomes::default() });
}

/// Keys of which `is_there` have the row of their number, the others none.
fn check_numbers(table: &dyn Table, keys: &[Key], is_there: impl Fn(usize) -> bool) {
    let (mut rows, mut found) = (vec![0.0; keys.len()], vec![false; keys.len()]);
    table.find(keys, &mut rows, &mut found).unwrap();
    for i in 0..keys.len() {
        assert_eq!(found[i], is_there(i), "key {:#x}", keys[i]);
        assert!(!found[i] || rows[i] == i as f32, "key {:#x} has row {}", keys[i], rows[i]);
    }
    assert_eq!(table.len().unwrap(), (0..keys.len()).filter(|i| is_there(*i)).count());
}

/// Inserts all, erases every other, inserts those again.
fn fill_erase_refill(keys: &[Key], make: MakeTable) {
    let mut table = make(plain_config("keys", 1));
    number_rows(&mut *table, keys);
    check_numbers(&*table, keys, |_| true);
    let others: Vec<Key> = keys.iter().copied().step_by(2).collect();
    assert_eq!(table.erase(&others).unwrap(), others.len());
    assert_eq!(table.erase(&others).unwrap(), 0);
    check_numbers(&*table, keys, |i| i % 2 == 1);
    let rows: Vec<f32> = (0..keys.len()).step_by(2).map(|i| i as f32).collect();
    assert_eq!(table.assign(&others, &rows, true).unwrap().inserted, others.len() as u64);
    check_numbers(&*table, keys, |_| true);
}

pub fn keys_that_hurt_weak_hashes_are_found_and_erased_like_others(make: MakeTable) {
    fill_erase_refill(&hurtful_keys(), make);
}

pub fn a_million_keys_in_a_row_are_found_and_half_of_them_erased(make: MakeTable) {
    fill_erase_refill(&(0..1_000_000).collect::<Vec<Key>>(), make);
}

pub fn a_scan_gives_each_record_once_however_it_is_cut(make: MakeTable) {
    let keys = hurtful_keys();
    let mut table = make(plain_config("keys", 1));
    number_rows(&mut *table, &keys);
    let expected: BTreeMap<Key, Vec<u32>> =
        keys.iter().enumerate().map(|(i, k)| (*k, bits(&[i as f32]))).collect();
    for max in [97, 1000, keys.len() - 1, keys.len(), usize::MAX] {
        assert_eq!(scan(&*table, max), expected);
    }
}

/// Texts of calls that must fail and change nothing.
fn failures(table: &mut dyn Table) -> Vec<String> {
    let mut rows = [0.0; 7];
    let records = Records { keys: vec![1, 2, 9], values: vec![0.5; 7], ..Records::default() };
    let results = [
        table.find(&[1, 2], &mut rows, &mut [false; 2]),
        table.find(&[1, 2], &mut rows[..6], &mut [false; 1]),
        table.find_or_insert(&[8, 9], &mut rows).map(drop),
        table.assign(&[8, 9], &rows, true).map(drop),
        table.restore(&records),
    ];
    results.into_iter().map(|r| r.expect_err("lengths that do not fit are refused").to_string()).collect()
}

pub fn lengths_that_do_not_fit_are_refused_and_change_nothing(make: MakeTable) {
    let mut table = make(plain_config("t", 3));
    table.assign(&[1, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], true).unwrap();
    let before = scan(&*table, 10);
    let texts = failures(&mut *table);
    assert_eq!(texts[0], "table `t`: `rows` must hold 3 numbers a key. Received: 7 numbers for 2 keys");
    assert_eq!(scan(&*table, 10), before);
}

pub fn a_fresh_table_takes_the_records_over_with_their_states(make: MakeTable) {
    let mut table = make(plain_config("t", 2));
    number_rows_of_two(&mut *table);
    let update = adam();
    let mut fresh = table.fresh(Some(update), 1000).unwrap();
    assert_eq!((fresh.len().unwrap(), fresh.layout().width()), (0, 6));
    let records = Records { keys: vec![5], values: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], ..Records::default() };
    fresh.restore(&records).unwrap();
    table.replace_with(fresh).unwrap();
    assert_eq!(table.update_rule(), Some(&update));
    let mut got = Records::default();
    assert_eq!(table.scan(Cursor::default(), 10, &mut got).unwrap(), None);
    assert_eq!(got, records);
}

fn number_rows_of_two(table: &mut dyn Table) {
    table.assign(&[1, 2], &[1.0, 2.0, 3.0, 4.0], true).unwrap();
}

fn adam() -> Update {
    let rule = ADAM;
    Update { rule, weight_decay: None, clipvalue: None, clipnorm: None }
}
