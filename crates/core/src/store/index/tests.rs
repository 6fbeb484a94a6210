use std::collections::BTreeMap;

use super::segment::VISITS;
use super::*;
use crate::key::hash;

fn check(index: &Index, model: &BTreeMap<Key, RecordNumber>) {
    assert_eq!(index.len(), model.len());
    for (&key, &record) in model {
        assert_eq!(index.find(hash(key), key), record, "{key:#x}");
    }
    let mut seen = BTreeMap::new();
    assert_eq!(index.scan(0, |k, r| seen.insert(k, r).is_none()), None);
    assert_eq!(&seen, model);
}

/// Keys in patterns that hurt weak hashes, 0 and all ones among them.
fn patterns(n: u64) -> Vec<Key> {
    let mut keys: Vec<Key> = vec![0, u64::MAX];
    keys.extend((1..n).map(|i| i << 32));
    keys.extend((0..60).flat_map(|k| (1..n / 60).map(move |i| i << k)));
    keys.extend((0..64).map(|bit| 0x0123_4567_89ab_cdef ^ (1 << bit)));
    keys.extend(1..n);
    keys.sort_unstable();
    keys.dedup();
    keys
}

#[test]
fn finds_what_was_inserted_and_nothing_else_through_growth_and_erasure() {
    let keys = patterns(60_000);
    let mut index = Index::new(0).unwrap();
    let mut model = BTreeMap::new();
    for (number, &key) in keys.iter().enumerate() {
        assert_eq!(index.find(hash(key), key), NO_RECORD);
        index.insert(hash(key), key, number as u32 + 1).unwrap();
        model.insert(key, number as u32 + 1);
    }
    check(&index, &model);
    for &key in keys.iter().step_by(3) {
        assert_eq!(index.remove(hash(key), key), model.remove(&key));
        assert_eq!(index.remove(hash(key), key), None);
    }
    check(&index, &model);
}

#[test]
fn parts_hold_the_keys_of_their_prefix_and_join_again() {
    for n in [0, 3, 1000, 200_000u64] {
        let mut index = Index::new(0).unwrap();
        let mut model = BTreeMap::new();
        for key in 0..n {
            index.insert(hash(key), key, key as u32 + 1).unwrap();
            model.insert(key, key as u32 + 1);
        }
        index.deepen(4).unwrap();
        let (mut parts, joint) = index.split(4).unwrap();
        assert_eq!(parts.len(), 16);
        for key in n..2 * n {
            let part = &mut parts[(hash(key) >> 60) as usize];
            part.insert(hash(key), key, key as u32 + 1).unwrap();
            model.insert(key, key as u32 + 1);
        }
        for (&key, &record) in &model {
            assert_eq!(parts[(hash(key) >> 60) as usize].find(hash(key), key), record);
        }
        check(&joint.join(parts), &model);
    }
}

#[test]
fn marks_survive_growth() {
    let mut index = Index::new(0).unwrap();
    for key in 0..300_000u64 {
        *index.insert(hash(key), key, key as u32 + 1).unwrap() = key as u32;
    }
    for key in 0..300_000u64 {
        assert_eq!(index.find_mut(hash(key), key).map(|(r, m)| (r, *m)), Some((key as u32 + 1, key as u32)));
    }
}

/// The key whose hash this is: the finaliser's steps undone, last first.
fn key_of(hash: u64) -> Key {
    // Inverses of the finaliser's factors modulo 2^64.
    let mut h = hash;
    h ^= h >> 33;
    h = h.wrapping_mul(0x9cb4_b2f8_1293_37db);
    h ^= h >> 33;
    h = h.wrapping_mul(0x4f74_430c_22a5_4005);
    h ^ (h >> 33)
}

/// What keys have in common, and the hash of each by its number.
type Attack = (&'static str, fn(u64) -> u64);

const ATTACKS: [Attack; 5] = [
    ("top bits", |number| 0x5a5a_5a5a_5a00_0000 | number),
    ("bucket", |number| (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & !0xff_ffff) | 0x15_5555),
    ("top bits and bucket", |number| 0x5a5a_0000_0000_0000 | number << 24 | 0x15_5555),
    ("one of few buckets", |number| {
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & !0xff_ffff) | (number % 64) << 8
    }),
    ("all but an eighth after each split", |number| {
        let share = (number % 1000 + 1) as f64 / 1000.0;
        let ones = ((share.ln() / 0.875f64.ln()) as u32).clamp(1, 16);
        u64::MAX << (64 - ones) | number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (ones + 1)
    }),
];
const CRAFTED: u64 = 100_000;

fn crafted(attack: fn(u64) -> u64) -> Vec<Key> {
    (0..CRAFTED).map(|number| key_of(attack(number))).collect()
}

/// Buckets looked at while `work` runs.
fn visits(work: impl FnOnce()) -> u64 {
    VISITS.set(0);
    work();
    VISITS.get()
}

/// Buckets looked at to insert keys, each looked for before; and by the insertion that looked at most.
fn insert_all(index: &mut Index, keys: &[Key]) -> (u64, u64) {
    let mut total = (0, 0);
    for (number, &key) in keys.iter().enumerate() {
        let cost = visits(|| {
            assert_eq!(index.find(hash(key), key), NO_RECORD);
            index.insert(hash(key), key, number as u32 + 1).unwrap();
        });
        total = (total.0 + cost, total.1.max(cost));
    }
    total
}

fn find_all(index: &Index, keys: &[Key]) -> u64 {
    visits(|| keys.iter().for_each(|&key| assert_ne!(index.find(hash(key), key), NO_RECORD)))
}

fn remove_all(index: &mut Index, keys: &[Key]) -> u64 {
    visits(|| keys.iter().for_each(|&key| assert!(index.remove(hash(key), key).is_some())))
}

#[test]
fn keys_made_to_collide_cost_at_most_five_times_what_others_do() {
    for others in [0, 150_000] {
        let before: Vec<Key> = (1 << 40..(1 << 40) + others).collect();
        let costs = |keys: &[Key]| {
            let mut index = Index::new(0).unwrap();
            insert_all(&mut index, &before);
            let (inserted, most) = insert_all(&mut index, keys);
            let found = find_all(&index, keys);
            assert_eq!(index.len(), keys.len() + before.len());
            assert!(index.num_bytes() < 64 << 20, "{} bytes", index.num_bytes());
            assert!(index.directory.len() <= MAX_SPARSE_DIRECTORY * (index.segments.len() + 1));
            let removed = remove_all(&mut index, keys);
            assert_eq!(index.len(), before.len());
            [inserted, most, found, removed]
        };
        let random = costs(&(0..CRAFTED).collect::<Vec<_>>());
        for (what, attack) in ATTACKS {
            let attacked = costs(&crafted(attack));
            println!("{what}, beside {others}: {attacked:?} for {random:?}");
            for (attacked, random) in attacked.into_iter().zip(random) {
                assert!(attacked <= 5 * random, "{what}, beside {others}: {attacked} for {random}");
            }
        }
    }
}

#[test]
fn keys_made_to_collide_are_held_beside_others() {
    for (_, attack) in ATTACKS {
        let (mut index, mut model) = (Index::new(0).unwrap(), BTreeMap::new());
        let crafted = crafted(attack);
        let both = crafted.iter().copied().zip(1 << 40..).flat_map(|(key, other)| [key, other]);
        for (number, key) in both.enumerate() {
            let number = number as u32 + 1;
            *index.insert(hash(key), key, number).unwrap() = number;
            model.insert(key, number);
        }
        check(&index, &model);
        for key in crafted.iter().step_by(2) {
            assert_eq!(index.remove(hash(*key), *key), model.remove(key));
        }
        check(&index, &model);
        index.deepen(4).unwrap();
        let (parts, joint) = index.split(4).unwrap();
        let mut index = joint.join(parts);
        check(&index, &model);
        for (&key, &number) in &model {
            assert_eq!(index.find_mut(hash(key), key).map(|(r, m)| (r, *m)), Some((number, number)));
        }
    }
}

/// Keys in the order of a scan that stops each `chunk` entries.
fn scanned(index: &Index, chunk: usize) -> Vec<Key> {
    let (mut keys, mut cursor) = (Vec::new(), Some(0));
    while let Some(at) = cursor {
        let mut left = chunk;
        cursor = index.scan(at, |key, _| {
            let goes_on = left > 0;
            left = left.saturating_sub(1);
            keys.extend(goes_on.then_some(key));
            goes_on
        });
    }
    keys
}

#[test]
fn a_scan_of_keyed_segments_is_the_same_in_each_process_and_at_each_stop() {
    for (what, attack) in ATTACKS {
        let (mut index, keys) = (Index::new(0).unwrap(), crafted(attack));
        insert_all(&mut index, &keys);
        let all = scanned(&index, usize::MAX);
        assert_eq!(scanned(&index, 777), all, "{what}");
        let mut start = 0;
        for segment in &index.segments {
            let mine = &all[start..start + segment.len as usize];
            start += mine.len();
            // Where the order were that of the secret, it would not be this one.
            assert!(!segment.is_keyed() || mine.is_sorted_by_key(|&key| hash(key)), "{what}");
        }
        assert_eq!(index.segments.iter().any(Segment::is_keyed), what.contains("bucket"), "{what}");
    }
}

#[test]
fn keys_that_nobody_made_are_placed_by_the_public_hash() {
    let mut index = Index::new(0).unwrap();
    for (number, key) in patterns(200_000).into_iter().enumerate() {
        index.insert(hash(key), key, number as u32 + 1).unwrap();
    }
    assert!(index.segments.len() > 4 && !index.segments.iter().any(Segment::is_keyed));
}

#[test]
fn chance_makes_no_excess() {
    // At the highest load, where runs are longest, each key goes and another comes, again and again.
    for num_buckets in [16, 128, 1 << 10, 1 << 13, 1 << 15] {
        let mut segment = Segment::new(num_buckets, 0, 0, false).unwrap();
        let len = (num_buckets * SLOTS) as u64 * 4 / 5;
        let (mut most, mut total) = (0, 0);
        for key in 0..len + 1_000_000 {
            let (_, passed) = segment.place(hash(key), key, 1, 0);
            assert!(!segment.is_attacked(passed));
            most = most.max(segment.excess);
            total += if key >= len { passed } else { 0 };
            if let Some(old) = key.checked_sub(len) {
                let slot = segment.find(hash(old), old).unwrap();
                segment.remove(slot);
            }
        }
        println!("{num_buckets} buckets: excess {most}, mean {}", total as f64 / 1e6);
        assert!(most < 1_000, "{num_buckets} buckets: {most}");
    }
}

#[test]
fn keys_whose_hashes_end_with_some_bits_are_each_visited_once() {
    let mut index = Index::new(0).unwrap();
    for num_keys in [0u64, 1, 50, 3000, 100_000, 400_000] {
        let keys = index.len() as u64..num_keys;
        keys.for_each(|key| _ = index.insert(hash(key * 7), key * 7, key as u32 + 1).unwrap());
        for bits in [0, 1, 3, 8] {
            let mut all = Vec::new();
            for ending in 0..1 << bits {
                index.for_each_ending(ending, bits, |key, record| {
                    assert_eq!((hash(key) & ((1 << bits) - 1), u64::from(record)), (ending, key / 7 + 1));
                    all.push(key);
                });
            }
            all.sort_unstable();
            assert!(all.into_iter().eq((0..num_keys).map(|key| key * 7)), "{num_keys} keys, {bits} bits");
        }
    }
}
