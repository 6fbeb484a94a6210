//! Ranks that load a dump read each of its bytes once. In a program of its own: what a process reads is counted for all its threads.

mod common;

use std::sync::Arc;

use common::sharded::{Directory, TIMEOUT, fill, restore, save};
use common::strategies::plain_config;
use sok_core::checkpoint::LoadMode;
use sok_core::contract::group::Group;
use sok_core::exchange::placement::Placement;
use sok_core::exchange::threads::ThreadRank;
use sok_core::host::sharded::ShardedGroup;
use sok_core::row_type::RowType;

const ROWS: u64 = 20_000;

fn on_ranks(world_size: usize, work: impl Fn(&mut ShardedGroup) + Sync) {
    std::thread::scope(|scope| {
        for rank in ThreadRank::world(world_size, TIMEOUT) {
            let work = &work;
            scope.spawn(move || {
                let configs =
                    ["a", "b"].map(|name| (plain_config(name, 16), Placement::Distributed)).to_vec();
                work(
                    &mut ShardedGroup::new(configs, Arc::new(rank), 1, world_size, RowType::Float32).unwrap(),
                );
            });
        }
    });
}

/// Bytes that this process has read from files.
fn bytes_read() -> u64 {
    let counts = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = counts.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

#[test]
fn ranks_read_each_byte_once() {
    let directory = Directory::new("once");
    on_ranks(3, |group| {
        fill(group, ROWS);
        save(group, &directory.0, true, 1).unwrap();
    });
    let all: u64 =
        std::fs::read_dir(&directory.0).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    let manifest = std::fs::metadata(directory.0.join("manifest.json")).unwrap().len();
    for world_size in [1, 2, 4] {
        let before = bytes_read();
        on_ranks(world_size, |group| {
            restore(group, &directory.0, LoadMode::Replace, 1).unwrap();
            let len: usize = (0..2).map(|table| group.table(table).len().unwrap()).sum();
            assert!(len > 0 && len < 2 * ROWS as usize + 1);
        });
        // Each rank reads the manifest. A little is read to look at what is counted.
        let expected = all + (world_size as u64 - 1) * manifest;
        let read = bytes_read() - before;
        assert!(read.abs_diff(expected) < 10_000, "{world_size} ranks: {read} of {expected}");
    }
}
