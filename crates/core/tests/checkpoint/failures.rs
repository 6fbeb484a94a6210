//! Disks that fill up, processes that die, machines that lose power, and loads that meet a dump.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use sok_core::Error;
use sok_core::checkpoint::{
    After, Disk, DumpOptions, LoadOptions, MANIFEST, compact_with, dump, dump_with, load, verify,
};
use sok_core::contract::table::Table;
use sok_core::host::table::HostTable;

use crate::support::*;

#[test]
fn a_failing_operation_leaves_the_dump_that_was_there() {
    for overwrites in [false, true] {
        let operations = count_operations(overwrites);
        assert!(operations > 30, "{operations} operations");
        for at in 0..operations {
            let directory = Directory::new();
            let path = &directory.dump();
            if overwrites {
                dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
            }
            let before = overwrites.then(|| names(path));
            match dump_two(&BrokenDisk::new(Fault::Fails, at), path, 2.0) {
                // The last operations remove old files: the new dump is safe by then.
                Ok(_) => assert!(overwrites && salt_of(path) == 2.0, "operation {at}"),
                Err(Error::Io { path: named, source }) => {
                    assert!(named.starts_with(&directory.0), "{}", named.display());
                    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
                    let renamed = path.join(MANIFEST).exists() && salt_of(path) == 2.0;
                    match before {
                        Some(before) if !renamed => assert_eq!(names(path), before, "operation {at}"),
                        None if !renamed => {
                            assert!(!path.exists() || names(path).is_empty(), "operation {at}")
                        }
                        // Only the last sync, after which power may still be lost: both dumps stay.
                        _ => assert!(before.is_none_or(|before| {
                            names(path).is_superset(&(&before - &[MANIFEST.into()].into()))
                        })),
                    }
                }
                Err(other) => panic!("operation {at}: {other:?}"),
            }
            assert_old_or_new(path, overwrites.then_some(1.0), 2.0);
        }
    }
}

#[test]
fn a_loss_of_power_leaves_the_old_dump_or_the_new() {
    for overwrites in [false, true] {
        for at in 0..=count_operations(overwrites) {
            for names_too in [false, true] {
                let directory = Directory::new();
                let path = &directory.dump();
                if overwrites {
                    dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
                }
                let files = BrokenDisk::new(Fault::Power, at);
                let result = dump_two(&files, path, 2.0);
                files.lose_power(names_too);
                if result.is_ok() {
                    assert_eq!(salt_of(path), 2.0, "a dump that returned is safe");
                }
                assert_old_or_new(path, overwrites.then_some(1.0), 2.0);
            }
        }
    }
}

const KILL_AT: &str = "SOK_TEST_KILL_AT";
const KILL_IN: &str = "SOK_TEST_KILL_IN";

/// Not a test by itself: the process that the next test kills.
#[test]
fn child_that_is_killed() {
    let (Ok(at), Ok(path)) = (std::env::var(KILL_AT), std::env::var(KILL_IN)) else { return };
    let files = BrokenDisk::new(Fault::Kills, at.parse().unwrap());
    dump_two(&files, Path::new(&path), 2.0).unwrap();
}

#[test]
fn a_killed_process_leaves_the_old_dump_or_the_new() {
    for overwrites in [false, true] {
        let operations = count_operations(overwrites);
        for at in 0..=operations {
            let directory = Directory::new();
            let path = &directory.dump();
            if overwrites {
                dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
            }
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "failures::child_that_is_killed", "--test-threads=1"])
                .current_dir(&directory.0)
                .env(KILL_AT, at.to_string())
                .env(KILL_IN, path)
                .output()
                .unwrap()
                .status;
            assert_eq!(status.success(), at == operations, "operation {at}: {status}");
            assert_old_or_new(path, overwrites.then_some(1.0), 2.0);
        }
    }
}

/// By another process, at moments that nobody chose, over and over into one directory.
#[test]
fn a_process_killed_200_times_leaves_a_whole_dump() {
    let directory = Directory::new();
    let path = &directory.dump();
    dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
    let mut random = 1u64;
    for _ in 0..200 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "failures::child_that_dumps_on_and_on", "--test-threads=1"])
            .env(KILL_IN, path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(3_000 + (random >> 33) % 30_000));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!([1.0, 2.0, 3.0].contains(&salt_of(path)));
    }
    assert_old_or_new(path, Some(salt_of(path)), 2.0);
}

/// Not a test by itself: the process that the test above kills.
#[test]
fn child_that_dumps_on_and_on() {
    let (Ok(path), Err(_)) = (std::env::var(KILL_IN), std::env::var(KILL_AT)) else { return };
    for number in 0.. {
        dump_two(&Arc::new(Disk), Path::new(&path), 2.0 + (number % 2) as f32).unwrap();
    }
}

#[test]
fn a_load_beside_dumps_finds_one_or_the_other() {
    let directory = Directory::new();
    let path = &directory.dump();
    dump_two(&Arc::new(Disk), path, 0.0).unwrap();
    std::thread::scope(|scope| {
        let dumps = scope
            .spawn(|| (1..30).try_for_each(|salt| dump_two(&Arc::new(Disk), path, salt as f32).map(drop)));
        while !dumps.is_finished() {
            let mut tables = two_tables(0.0).map(|t| t.empty_twin());
            let [a, b] = &mut tables;
            load(path, &mut [("a", a), ("b", b)], &LoadOptions::default()).unwrap();
            let salt = tables[0].records[&0][0];
            assert!(
                two_tables(salt).iter().zip(&tables).all(|(expected, got)| expected.records == got.records)
            );
        }
        dumps.join().unwrap().unwrap();
    });
}

/// A table of three rows in the dump at `path`. Its first row has changed since, and its last one is gone.
fn changed_table(path: &Path) -> HostTable {
    let mut table = HostTable::new(MapTable::new("t", 2, None).config).unwrap();
    table.assign(&[1, 2, 3], &[1.0; 6], true).unwrap();
    let snapshot = dump(path, &[&table], &[], &options(1 << 20)).unwrap().snapshot();
    table.track(snapshot).unwrap();
    table.assign(&[1], &[2.0; 2], true).unwrap();
    table.erase(&[3]).unwrap();
    table
}

/// The first floats of rows 1, 2 and 3 in the dump at `path`.
fn rows_of(path: &Path) -> [Option<f32>; 3] {
    let mut table = HostTable::new(MapTable::new("t", 2, None).config).unwrap();
    load(path, &mut [("t", &mut table)], &LoadOptions::default()).unwrap();
    let (mut rows, mut found) = ([0.0; 6], [false; 3]);
    table.find(&[1, 2, 3], &mut rows, &mut found).unwrap();
    std::array::from_fn(|row| found[row].then_some(rows[2 * row]))
}

#[test]
fn a_disk_that_fails_leaves_a_chain_as_it_was_or_the_next_one() {
    let increment = DumpOptions { after: Some(After::Newest), step: 1, ..DumpOptions::default() };
    let before = [Some(1.0); 3];
    let after = [Some(2.0), Some(1.0), None];
    for compacts in [false, true] {
        let act = |files: &Arc<BrokenDisk>, path: &Path| {
            let table = changed_table(path);
            if compacts {
                dump(path, &[&table], &[], &increment).unwrap();
                compact_with(files.clone(), path)
            } else {
                dump_with(files.clone(), path, &[&table], &[], &increment)
            }
        };
        let counting = BrokenDisk::counting();
        let directory = Directory::new();
        act(&counting, &directory.dump()).unwrap();
        let num_operations = counting.count.load(Relaxed);
        assert!(num_operations > 8, "{num_operations}");
        for at in 0..=num_operations {
            for (fault, names_too) in [(Fault::Fails, false), (Fault::Power, false), (Fault::Power, true)] {
                let directory = Directory::new();
                let path = &directory.dump();
                let files = BrokenDisk::new(fault, at);
                let result = act(&files, path);
                if fault == Fault::Power {
                    files.lose_power(names_too);
                }
                verify(path).unwrap();
                let rows = rows_of(path);
                let is_old = rows == if compacts { after } else { before };
                assert!(rows == after || is_old && result.is_err(), "operation {at}: {rows:?}");
            }
        }
    }
}
