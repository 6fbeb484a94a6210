//! Dumps that ranks write together, loaded by another number of ranks.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::scan;
use crate::common::sharded::{Directory, TIMEOUT, fill, restore, save, save_increment, track};
use crate::common::strategies::plain_config;
use sok_core::checkpoint::{After, LoadMode, read_manifest, verify};
use sok_core::contract::binding::Binding;
use sok_core::contract::group::Group;
use sok_core::contract::table::{CheckMode, TableConfig};
use sok_core::error::{Error, Result};
use sok_core::exchange::placement::Placement;
use sok_core::exchange::threads::ThreadRank;
use sok_core::formula::update::Update;
use sok_core::formula::{Adam, Formula, Rule};
use sok_core::host::sharded::ShardedGroup;
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};
use sok_core::row_type::RowType;

const ADAM: Update =
    Update { rule: Rule::Adam(Adam::VARIANTS[0]), weight_decay: None, clipvalue: None, clipnorm: None };

fn configs() -> Vec<(TableConfig, Placement)> {
    let eviction = Some(Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: false });
    let time_to_live = Some(TimeToLive { lifetime: Lifetime::Steps(1000), keeps_expired: false });
    let fixed = |name| TableConfig { vocabulary_size: Some(300), ..plain_config(name, 3) };
    vec![
        (plain_config("dynamic", 4), Placement::Distributed),
        (fixed("static"), Placement::Distributed),
        (plain_config("one", 2), Placement::Localized(0)),
        (fixed("everywhere"), Placement::Replicated),
        (
            TableConfig { max_capacity: Some(500), eviction, ..plain_config("scored", 3) },
            Placement::Distributed,
        ),
        (TableConfig { time_to_live, ..plain_config("expiring", 2) }, Placement::Distributed),
        (TableConfig { row_type: RowType::Float16, ..plain_config("narrow", 3) }, Placement::Distributed),
    ]
}

/// Records of each table, those of all ranks together.
type Contents = Vec<BTreeMap<Key, Vec<u32>>>;

/// Runs `work` on a group of each rank. Returns what each rank returned, and the contents in the end.
fn on_ranks<T: Send>(world_size: usize, work: impl Fn(&mut ShardedGroup) -> T + Sync) -> (Vec<T>, Contents) {
    let world = ThreadRank::world(world_size, TIMEOUT);
    let ranks: Vec<(T, Contents)> = std::thread::scope(|scope| {
        let run = |rank: ThreadRank| {
            let mut group =
                ShardedGroup::new(configs(), Arc::new(rank), 1, world_size, RowType::Float32).unwrap();
            group.bind(Binding::new(1, ADAM, false)).unwrap();
            let done = work(&mut group);
            (done, (0..group.num_tables()).map(|table| scan(group.table(table), 100)).collect())
        };
        let ranks: Vec<_> = world.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let mut all: Contents = configs().iter().map(|_| BTreeMap::new()).collect();
    let mut done = Vec::new();
    for (of_rank, contents) in ranks {
        done.push(of_rank);
        all.iter_mut().zip(contents).for_each(|(all, part)| all.extend(part));
    }
    (done, all)
}

#[test]
fn a_dump_of_any_number_of_ranks_is_loaded_by_any_other() {
    for dumping in 1..=4 {
        let directory = Directory::new(&format!("any{dumping}"));
        let (saved, dumped) = on_ranks(dumping, |group| {
            fill(group, 300);
            save(group, &directory.0, true, 1)
        });
        assert!(saved.iter().all(Result::is_ok), "{saved:?}");
        verify(&directory.0).unwrap();
        let manifest = read_manifest(&directory.0).unwrap();
        assert!(manifest.tables.iter().all(|table| table.num_rows == 300));
        for loading in 1..=4 {
            for mode in [LoadMode::Replace, LoadMode::Merge] {
                let (loaded, contents) = on_ranks(loading, |group| restore(group, &directory.0, mode, 1));
                assert!(loaded.iter().all(Result::is_ok), "{loaded:?}");
                assert!(contents == dumped, "{dumping} ranks dumped, {loading} loaded");
            }
        }
    }
}

#[test]
fn ranks_of_any_number_go_on_with_a_chain() {
    let directory = Directory::new("chain");
    let path = &directory.0;
    let change = |group: &mut ShardedGroup, from: Key| {
        for table in group.tables_mut() {
            // A rank erases what it has.
            table.erase(&(from..from + 30).collect::<Vec<_>>()).unwrap();
        }
        for table in 0..group.num_tables() {
            let (owners, dim) = (group.owners(table).unwrap(), group.table(table).config().dim);
            let keys: Vec<Key> =
                (from + 20..from + 60).filter(|&key| owners.of(key) == owners.rank).collect();
            group.table_mut(table).assign(&keys, &vec![from as f32; dim * keys.len()], true).unwrap();
        }
    };
    let (_, mut expected) = on_ranks(3, |group| {
        fill(group, 300);
        save(group, path, true, 1).unwrap();
        track(group, path);
        change(group, 10);
        save_increment(group, path, After::Newest, 2).unwrap();
    });
    for (number, world_size) in [2, 1, 4, 3].into_iter().enumerate() {
        let (_, contents) = on_ranks(world_size, |group| restore(group, path, LoadMode::Replace, 1).unwrap());
        assert!(contents == expected, "loaded by {world_size}");
        let (_, merged) = on_ranks(world_size, |group| restore(group, path, LoadMode::Merge, 1).unwrap());
        assert!(merged == expected, "merged by {world_size}");
        (_, expected) = on_ranks(world_size, |group| {
            restore(group, path, LoadMode::Replace, 1).unwrap();
            change(group, 40 * (number as u64 + 1));
            save_increment(group, path, After::Newest, 3 + number as u64).unwrap();
        });
        verify(path).unwrap();
    }
    // Ranks that mean other parts write nothing.
    let (refused, _) = on_ranks(2, |group| {
        restore(group, path, LoadMode::Replace, 1).unwrap();
        let after = if group.communicator().rank() == 0 { After::Newest } else { After::Step(2) };
        save_increment(group, path, after, 8).map_err(|error| error.to_string())
    });
    let error = refused[1].as_ref().unwrap_err();
    assert!(error.contains("rank 0 dumps something else than this rank"), "{error}");
    assert!(refused[0].is_err());
    let manifest = read_manifest(path).unwrap();
    assert_eq!(manifest.increments.len(), 5);
    let rows: Vec<u64> = manifest.increments.iter().map(|increment| increment.tables[0].num_rows).collect();
    assert_eq!(rows, [40; 5], "rows of all ranks");
    let (refused, _) =
        on_ranks(2, |group| save_increment(group, path, After::Newest, 9).map_err(|error| error.to_string()));
    assert!(refused.iter().all(|error| error.as_ref().unwrap_err().contains("has no record of its changes")));
}

#[test]
fn an_error_of_one_rank_is_told_to_all_and_leaves_the_old_dump() {
    let directory = Directory::new("error");
    let (_, dumped) = on_ranks(2, |group| {
        fill(group, 300);
        save(group, &directory.0, true, 1).unwrap();
    });
    let before = std::fs::read(directory.0.join("manifest.json")).unwrap();
    let (refused, _) = on_ranks(2, |group| save(group, &directory.0, false, 1).map_err(|e| e.to_string()));
    assert!(refused[0].as_ref().unwrap_err().contains("`overwrite` must be True"));
    assert!(refused[1].as_ref().unwrap_err().starts_with("rank 0 failed in dump 1: `overwrite`"));
    // Rank 1 writes to another place, where rank 0 has made no directory.
    let (failed, _) = on_ranks(2, |group| {
        fill(group, 300);
        let elsewhere = directory.0.join("elsewhere");
        let path = if group.communicator().rank() == 0 { &directory.0 } else { &elsewhere };
        save(group, path, true, 1)
    });
    assert!(
        matches!(&failed[0], Err(Error::Rank { rank: 1, what }) if what.contains("that all ranks reach"))
    );
    assert!(matches!(&failed[1], Err(Error::State(what)) if what.contains("that all ranks reach")));
    assert_eq!(std::fs::read(directory.0.join("manifest.json")).unwrap(), before);
    verify(&directory.0).unwrap();
    let named: usize =
        read_manifest(&directory.0).unwrap().tables.iter().map(|table| table.shards.len()).sum();
    assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), named + 1, "what was written is removed");
    let (_, contents) = on_ranks(3, |group| restore(group, &directory.0, LoadMode::Replace, 1).unwrap());
    assert!(contents == dumped);
}

#[test]
fn ranks_that_dump_into_different_directories_leave_the_old_dump() {
    let directory = Directory::new("different");
    let (_, dumped) = on_ranks(2, |group| {
        fill(group, 300);
        save(group, &directory.0, true, 1).unwrap();
    });
    let elsewhere = directory.0.join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let (failed, _) = on_ranks(2, |group| {
        fill(group, 300);
        let path = if group.communicator().rank() == 0 { &directory.0 } else { &elsewhere };
        save(group, path, true, 1).map_err(|e| e.to_string())
    });
    assert!(failed[0].as_ref().unwrap_err().starts_with("rank 1 dumps into another directory"), "{failed:?}");
    assert!(failed[1].is_err());
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0, "what was written is removed");
    let (_, contents) = on_ranks(2, |group| restore(group, &directory.0, LoadMode::Replace, 1).unwrap());
    assert!(contents == dumped);
}

#[test]
fn a_load_that_one_rank_refuses_changes_no_rank() {
    let directory = Directory::new("load");
    on_ranks(2, |group| {
        fill(group, 300);
        save(group, &directory.0, true, 1).unwrap();
    });
    let (failed, contents) = on_ranks(2, |group| {
        if group.communicator().rank() == 1 {
            // Its states are not those of the dump.
            let rule = Update { rule: Rule::variants()[0], ..ADAM };
            group.table_mut(0).set_update_rule(Some(rule), false).unwrap();
        }
        restore(group, &directory.0, LoadMode::Replace, 1)
    });
    assert!(failed.iter().all(Result::is_err), "{failed:?}");
    assert!(contents.iter().all(BTreeMap::is_empty));
}

#[test]
fn a_table_without_room_is_an_error_on_all_ranks_which_go_on() {
    let directory = Directory::new("no-room");
    let group_of = |rank: ThreadRank, max_capacity| {
        let config =
            TableConfig { max_capacity, check_mode: CheckMode::Count, ..plain_config("of rank 0", 2) };
        let placed = vec![(config, Placement::Localized(0))];
        let mut group = ShardedGroup::new(placed, Arc::new(rank), 1, 2, RowType::Float32).unwrap();
        group.bind(Binding::new(1, ADAM, false)).unwrap();
        group
    };
    let on_two = |work: &(dyn Fn(ThreadRank) -> Result<()> + Sync)| -> Vec<Result<()>> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ThreadRank::world(2, TIMEOUT)
                .into_iter()
                .map(|rank| scope.spawn(move || work(rank)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    let dumped = on_two(&|rank| {
        let mut group = group_of(rank, None);
        fill(&mut group, 100);
        save(&mut group, &directory.0, true, 1)
    });
    assert!(dumped.iter().all(Result::is_ok));
    let loaded = on_two(&|rank| {
        let mut group = group_of(rank, Some(40));
        let refused = restore(&mut group, &directory.0, LoadMode::Replace, 1);
        assert!(group.table(0).is_empty().unwrap());
        save(&mut group, &directory.0.join("later"), true, 2).unwrap();
        refused
    });
    for loaded in loaded {
        let Err(Error::DumpMismatch { what, .. }) = loaded else { panic!("{loaded:?}") };
        // Rank 1 has room for a row that it will never own. The dump has four files, as of four ranks.
        assert!(what.contains("must be at least the rows after the load: expected 97, got 41"), "{what}");
    }
}

/// Hashes do not give each rank as many keys as its part of a full table has room for.
#[test]
fn a_full_table_is_loaded_by_any_number_of_ranks_which_then_remove_what_is_too_much() {
    for eviction in
        [None, Some(Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: false })]
    {
        let directory = Directory::new(if eviction.is_some() { "full-lru" } else { "full" });
        let config = TableConfig {
            max_capacity: Some(101),
            check_mode: CheckMode::Count,
            eviction,
            ..plain_config("full", 2)
        };
        let placed = || vec![(config.clone(), Placement::Distributed)];
        let on = |ranks: usize, work: &(dyn Fn(&mut ShardedGroup) -> Result<usize> + Sync)| -> usize {
            let group_of = |rank: ThreadRank| {
                let mut group =
                    ShardedGroup::new(placed(), Arc::new(rank), 1, ranks, RowType::Float32).unwrap();
                group.bind(Binding::new(1, ADAM, false)).unwrap();
                work(&mut group).unwrap()
            };
            std::thread::scope(|scope| {
                let ranks = ThreadRank::world(ranks, TIMEOUT).into_iter();
                let ranks: Vec<_> = ranks.map(|rank| scope.spawn(move || group_of(rank))).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).sum()
            })
        };
        let rows = on(3, &|group| {
            fill(group, 1000);
            save(group, &directory.0, true, 1)?;
            group.table(0).len()
        });
        // Three parts of 34.
        assert_eq!(rows, 102);
        for (step, ranks) in [(2, 2), (3, 5), (4, 1), (5, 4)] {
            let loaded = on(ranks, &|group| {
                restore(group, &directory.0, LoadMode::Replace, step)?;
                let len = group.table(0).len()?;
                // All keys have rows: nothing goes.
                let keys = group.table(0).keys()?;
                group.table_mut(0).find_or_insert(&keys, &mut vec![0.0; 2 * keys.len()])?;
                assert_eq!(group.table(0).len()?, len);
                save(group, &directory.0, true, step)?;
                Ok(len)
            });
            assert_eq!(loaded, rows, "{ranks} ranks");
        }
        let rows = on(5, &|group| {
            restore(group, &directory.0, LoadMode::Replace, 6)?;
            let (before, owners) = (group.table(0).len()?, group.owners(0).unwrap());
            let new: Vec<u64> = (5000..5200).filter(|key| owners.of(*key) == owners.rank).take(3).collect();
            let outcomes = group.table_mut(0).find_or_insert(&new, &mut [0.0; 6])?;
            // A fifth of 101 rows, rounded up.
            let room = if eviction.is_some() { 3 } else { 21usize.saturating_sub(before).min(3) as u64 };
            assert_eq!((outcomes.inserted, outcomes.refused), (room, 3 - room));
            group.table(0).len()
        });
        assert!(eviction.is_none() || rows <= 5 * 21, "{rows}");
    }
}
