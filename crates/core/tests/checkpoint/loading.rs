//! Loading into tables that hold something, or are different.

use std::sync::Arc;

use sok_core::Error;
use sok_core::checkpoint::{
    Disk, DumpReader, LoadMode, LoadOptions, MANIFEST, Target, TargetBinding, dump, dump_with, load,
    read_manifest,
};
use sok_core::contract::table::{Contents, TableConfig};
use sok_core::formula::{Adam, Rule};
use sok_core::initializer::Initializer;

use crate::support::*;

#[test]
fn replace_drops_the_rows_before_and_merge_keeps_them() {
    let directory = Directory::new();
    let dumped = MapTable::new("t", 2, adam()).filled(0..10, 0.0);
    dump(&directory.dump(), &[&dumped], &[], &options(64)).unwrap();

    let mut replaced = MapTable::new("other", 2, adam()).filled(5..15, 500.0);
    let mut merged = replaced.clone();
    load_one(&directory.dump(), "t", &mut replaced, &LoadOptions::default()).unwrap();
    assert_eq!(replaced.records, dumped.records);

    let mut expected = merged.records.clone();
    expected.extend(dumped.records.clone());
    load_one(&directory.dump(), "t", &mut merged, &merge()).unwrap();
    assert_eq!(merged.records, expected);
}

#[test]
fn a_table_without_optimizer_takes_the_dump_s() {
    let directory = Directory::new();
    let dumped = MapTable::new("t", 2, row_wise()).filled(0..10, 0.0);
    dump(&directory.dump(), &[&dumped], &[], &options(64)).unwrap();

    let mut replaced = MapTable::new("t", 2, None).filled(5..15, 500.0);
    let mut merged = replaced.clone();
    load_one(&directory.dump(), "t", &mut replaced, &LoadOptions::default()).unwrap();
    assert_eq!((replaced.update, &replaced.records), (row_wise(), &dumped.records));

    load_one(&directory.dump(), "t", &mut merged, &merge()).unwrap();
    assert_eq!(merged.update, row_wise());
    assert_eq!(merged.records[&3], dumped.records[&3]);
    assert_eq!(merged.records[&12][2], 0.1, "the first value of a state that no dump brought");
}

#[test]
fn without_states_they_start_at_their_first_values() {
    let directory = Directory::new();
    let dumped = MapTable::new("t", 2, adam()).filled(0..10, 0.0);
    dump(&directory.dump(), &[&dumped], &[], &options(64)).unwrap();
    for mode in [LoadMode::Replace, LoadMode::Merge] {
        let mut other_rule = MapTable::new("t", 2, row_wise());
        load_one(&directory.dump(), "t", &mut other_rule, &without_states(mode)).unwrap();
        assert_eq!((other_rule.update, other_rule.rows()), (row_wise(), dumped.rows()));
        assert!(other_rule.records.values().all(|r| r[2..] == [0.1]));

        let mut no_rule = MapTable::new("t", 2, None);
        load_one(&directory.dump(), "t", &mut no_rule, &without_states(mode)).unwrap();
        assert_eq!((no_rule.update, &no_rule.records), (None, &dumped.rows()));
    }

    let rows_alone = MapTable::new("t", 2, None).filled(0..10, 0.0);
    dump(&directory.dump(), &[&rows_alone], &[], &options(64)).unwrap();
    for options in [LoadOptions::default(), merge()] {
        let mut target = MapTable::new("t", 2, row_wise());
        let report = load(&directory.dump(), &mut [("t", &mut target)], &options).unwrap();
        assert!(!report.tables[0].states);
        assert_eq!((target.update, target.rows()), (row_wise(), rows_alone.records.clone()));
        assert!(target.records.values().all(|r| r[2..] == [0.1]));
    }
}

#[test]
fn hyper_parameters_and_initializer_stay_the_table_s_own_and_the_seed_comes() {
    let directory = Directory::new();
    let dumped = MapTable::new("t", 2, adam()).filled(0..10, 0.0);
    dump(&directory.dump(), &[&dumped], &[], &options(64)).unwrap();
    let other = update(Rule::Adam(Adam { beta_1: 0.5, beta_2: 0.5, epsilon: 1.0, amsgrad: false }));
    let mut target = MapTable::new("t", 2, other);
    target.config.seed = 1;
    target.config.initializer = Initializer::Constant { value: 3.0 };
    let config = TableConfig { seed: dumped.config.seed, ..target.config.clone() };
    load_one(&directory.dump(), "t", &mut target, &LoadOptions::default()).unwrap();
    assert_eq!((target.update, &target.config, &target.records), (other, &config, &dumped.records));
}

#[test]
fn a_merge_leaves_the_seed_of_a_table_with_rows_and_says_so() {
    let directory = Directory::new();
    let dumped = MapTable::new("t", 2, None).filled(0..10, 0.0);
    dump(&directory.dump(), &[&dumped], &[], &options(64)).unwrap();
    for (keys, seed, mixes_seeds) in [(0..0, u64::MAX, false), (5..6, 1, true)] {
        let mut table = MapTable::new("t", 2, None).filled(keys, 0.0);
        table.config.seed = 1;
        let report = load(&directory.dump(), &mut [("t", &mut table)], &merge()).unwrap();
        assert_eq!((table.config.seed, report.tables[0].mixes_seeds), (seed, mixes_seeds));
    }
}

#[test]
fn states_of_a_table_that_no_optimizer_is_bound_to_are_the_dump_s_unless_they_could_not_go_on() {
    let directory = Directory::new();
    let path = &directory.dump();
    let dumped = MapTable::new("t", 2, adam()).filled(0..10, 0.0);
    dump(path, &[&dumped], &[], &options(64)).unwrap();
    let reader = DumpReader::open(path).unwrap();
    let load_as = |table: &mut MapTable, expected, options: &LoadOptions| {
        reader.load(
            &mut [Target { name: "t", table, binding: TargetBinding::Free(expected), owners: None }],
            options,
            None,
        )
    };
    // States of an earlier load go with their rows.
    let mut table = MapTable::new("t", 2, row_wise()).filled(3..5, 1.0);
    load_as(&mut table, None, &LoadOptions::default()).unwrap();
    assert_eq!((table.update, &table.records), (adam(), &dumped.records));
    load_as(&mut table, adam(), &merge()).unwrap();

    for options in [LoadOptions::default(), merge()] {
        let mut table = MapTable::new("t", 2, None).filled(3..5, 1.0);
        let before = table.records.clone();
        let error = load_as(&mut table, row_wise(), &options).unwrap_err();
        assert!(
            matches!(&error, Error::DumpMismatch { what, .. } if what.contains("states=False")),
            "{error}"
        );
        assert_eq!((table.update, &table.records), (None, &before));
        load_as(&mut table, row_wise(), &without_states(options.mode)).unwrap();
        assert_eq!((table.update, table.records[&7].len()), (None, 2));
    }
}

#[test]
fn a_key_that_is_twice_in_a_dump_is_found_in_either_mode() {
    let directory = Directory::new();
    let path = &directory.dump();
    let table = MapTable::new("t", 1, None).filled([1, 2, 3], 0.0);
    let manifest = dump(path, &[&table], &[], &options(1)).unwrap();
    // The second shard's key becomes the first one's, all checksums made anew.
    let [first, second] = [0, 1].map(|i| manifest.tables[0].shards[i].file.clone());
    std::fs::copy(path.join(&first), path.join(&second)).unwrap();
    forge_manifest(path, |body| {
        let shards = body["tables"][0]["shards"].as_array_mut().unwrap();
        shards[1] = shards[0].clone();
        shards[1]["file"] = second.clone().into();
    });
    for options in [LoadOptions::default(), merge()] {
        let mut target = MapTable::new("t", 1, None).filled([9], 5.0);
        let before = target.records.clone();
        let what = corrupt(load_one(path, "t", &mut target, &options), &path.join(MANIFEST));
        assert!(what.contains("its keys must be 3 different ones"), "{what}");
        assert_eq!(target.records, before);
    }
}

#[test]
fn a_dump_of_more_files_than_are_held_open_loads_and_verifies() {
    let directory = Directory::new();
    let path = &directory.dump();
    let table = MapTable::new("t", 1, None).filled(0..600, 0.0);
    dump_with(BrokenDisk::counting(), path, &[&table], &[], &options(1)).unwrap();
    let reader = DumpReader::open(path).unwrap();
    for options in [LoadOptions::default(), merge()] {
        let mut target = table.empty_twin();
        load_one(path, "t", &mut target, &options).unwrap();
        assert_eq!(target.records, table.records);
    }
    // A new dump takes away those that were not open: it is said, and what reads anew finds the new one whole.
    let new = MapTable::new("t", 1, None).filled(0..500, 7.0);
    dump_with(BrokenDisk::counting(), path, &[&new], &[], &options(1)).unwrap();
    let mut target = table.empty_twin();
    for options in [LoadOptions::default(), merge()] {
        let mut targets =
            [Target { name: "t", table: &mut target, binding: TargetBinding::Free(None), owners: None }];
        let error = reader.load(&mut targets, &options, None).unwrap_err();
        assert!(matches!(error, Error::DumpReplaced { .. }), "{error:?}");
        assert!(target.records.is_empty());
    }
    load_one(path, "t", &mut target, &LoadOptions::default()).unwrap();
    assert_eq!(target.records, new.records);
}

#[test]
fn mismatches_say_the_rule_and_what_came() {
    let directory = Directory::new();
    let path = &directory.dump();
    let movies = MapTable::new("movies", 4, adam()).filled(0..10, 0.0);
    let users = MapTable::new("users", 4, None).with_vocabulary(100).filled(0..10, 0.0);
    dump(path, &[&movies, &users], &[], &options(64)).unwrap();
    let text = |name: &str, table: &MapTable| mismatch(path, name, table, &LoadOptions::default());

    let table = |dim, update| MapTable::new("t", dim, update).filled(0..3, 1.0);
    assert_eq!(
        text("users", &table(8, None).with_vocabulary(100)),
        "`embedding_dim` of table `users` must be the dump's: expected 4, got 8"
    );
    assert_eq!(
        text("users", &table(4, None)),
        "`vocabulary_size` of table `users` must be the dump's: expected 100, got None (a dynamic table)"
    );
    assert_eq!(
        text("users", &table(4, None).with_vocabulary(50)),
        "`vocabulary_size` of table `users` must be the dump's: expected 100, got 50"
    );
    assert_eq!(
        text("movies", &table(4, None).with_vocabulary(50)),
        "`vocabulary_size` of table `movies` must be the dump's: expected None (a dynamic table), got 50"
    );
    assert_eq!(
        text("films", &table(4, None)),
        "a table must be in the dump: got `films`, the dump holds `movies`, `users`"
    );
    assert_eq!(
        text("movies", &table(4, row_wise())),
        "the optimizer of table `movies` must be the dump's: expected adam, got row_wise_adagrad. \
         Pass `states=False` to load the rows without optimizer states"
    );
    let amsgrad = update(Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: true }));
    assert_eq!(
        text("movies", &table(4, amsgrad)),
        "the states of table `movies` must be the dump's: expected `momentum` of width 4, `velocity` of width 4; \
         got `momentum` of width 4, `velocity` of width 4, `velocity_hat` of width 4. \
         Pass `states=False` to load the rows without optimizer states"
    );
    // A dump of several ranks may hold a few rows more than `max_capacity`: each rank rounds its part up.
    let whole = &directory.0.join("whole");
    dump(whole, &[&movies], &[], &options(1 << 20)).unwrap();
    let mut narrow = table(4, adam()).with_max_capacity(9);
    let expected =
        "table `movies`: `max_capacity` must be at least the rows after the load: expected 10, got 9";
    assert_eq!(mismatch(whole, "movies", &narrow, &LoadOptions::default()), expected);
    // 3 rows there, 10 come, 3 of them the same: 10 in the end.
    let error = load_one(whole, "movies", &mut narrow, &merge()).unwrap_err();
    assert!(error.to_string().contains(expected), "{error:?}");
    assert_eq!(narrow.len().unwrap(), 3);
    let mut wide = table(4, adam()).with_max_capacity(10);
    load_one(whole, "movies", &mut wide, &merge()).unwrap();
    assert_eq!(wide.len().unwrap(), 10);
}

#[test]
fn one_table_that_does_not_go_together_keeps_all_from_loading() {
    let directory = Directory::new();
    dump_two(&Arc::new(Disk), &directory.dump(), 1.0).unwrap();
    for options in [LoadOptions::default(), merge()] {
        let mut a = MapTable::new("a", 3, adam()).filled(0..2, 5.0);
        let mut b = MapTable::new("b", 2, row_wise());
        let before = a.records.clone();
        load(&directory.dump(), &mut [("a", &mut a), ("b", &mut b)], &options).unwrap_err();
        assert_eq!(a.records, before);
    }
}

#[test]
fn other_versions_are_a_mismatch_not_damage() {
    let directory = Directory::new();
    let path = &directory.dump();
    type Change = fn(&mut serde_json::Value);
    let changes: [(Change, &str); 7] = [
        (|body| body["version"] = 7.into(), "this release reads dumps of versions 1 to 6: got version 7"),
        (
            |body| body["tables"][0]["sights"] = serde_json::json!({"step": 1, "files": []}),
            "not as version 1 has it: `scores`, `ages`, `increments`, `sights` and rows of 16 bits came later",
        ),
        (
            |body| body["tables"][0]["scores"] = serde_json::json!({"score": "lru", "step": 1}),
            "not as version 1 has it: `scores`, `ages`, `increments`, `sights` and rows of 16 bits came later",
        ),
        (|body| body["format"] = "else".into(), "`format` must be `sok_keras dump`: got `else`"),
        (
            |body| body["tables"][0]["dtype"] = "float16".into(),
            "not as version 1 has it: `scores`, `ages`, `increments`, `sights` and rows of 16 bits came later",
        ),
        (|body| body["tables"][0]["dtype"] = "float8".into(), "unknown variant `float8`"),
        (|body| body["tables"][0]["update"]["rule"]["name"] = "lion".into(), "not as version 1 has it"),
    ];
    for (change, expected) in changes {
        dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
        forge_manifest(path, change);
        let error = read_manifest(path).unwrap_err();
        assert!(matches!(error, Error::DumpMismatch { .. }), "{error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("{}: ", path.join(MANIFEST).display())) && text.contains(expected),
            "{text}"
        );
    }
}
