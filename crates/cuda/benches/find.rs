//! Finds and insertions with the workload of HierarchicalKV: 64 Mi rows of dim 64, and new random batches of 1 Mi keys, of which 60
//! % are in the table.
//!
//! `find_or_insert` first inserts records with initial values for the new keys of a batch. Then it copies the rows of the other keys.

mod common;

use common::{Bench, config, keep_samples, median, nth_key};
use sok_core::contract::table::{Contents, Table, TableConfig};
use sok_core::key::hash;
use sok_core::policy::admission::Admission;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};
use sok_cuda::gpu_table::GpuTable;
use sok_cuda::memory::Buffer;

const DIM: usize = 64;
const BATCH: usize = 1 << 20;
const CAPACITY: usize = 64 << 20;
const FRESH: usize = BATCH * 4 / 10;
const ROUNDS: usize = 24;
/// Speed of HierarchicalKV's `find_or_insert` in a full table, in Gkeys/s.
const HKV_FULL: f32 = 1.40;

/// Percentage of the capacity that is used; then in Gkeys/s, each for find and find_or_insert: HierarchicalKV's figures, and our
/// goals.
const LOADS: [(usize, [f32; 2], [f32; 2]); 3] =
    [(50, [4.68, 2.07], [8.0, 4.2]), (75, [4.63, 1.99], [8.0, 4.1]), (100, [4.63, 1.40], [7.6, 3.6])];

fn main() {
    let bench = Bench::start("find and find_or_insert, 1 Mi keys, 60 % there, dim 64, 64 Mi rows");
    println!(
        "| rows | find, Gkeys/s | HierarchicalKV | ratio | to reach | find_or_insert | HierarchicalKV | ratio | to reach | index, bytes a slot |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let buffers = Buffers::new(&bench);
    for (percent, peer, goal) in LOADS {
        let filled = (CAPACITY * percent / 100 - ROUNDS * FRESH) as u64;
        let mut table = GpuTable::new(&bench.device, config("t", DIM, CAPACITY as u64)).unwrap();
        fill(&bench, &buffers, &mut table, filled);
        let mut finds = Vec::new();
        for round in 0..ROUNDS {
            let keys = batch(&bench, round, filled, 1 << 40);
            finds.push(buffers.time(&bench, || {
                let (out, found) = (buffers.out.address(), buffers.found.address());
                // SAFETY: The buffers are on this device, and live until it has been waited for.
                unsafe { table.launch_find(keys.address(), out, found, BATCH, bench.stream()) }.unwrap();
            }));
        }
        let inserts = time_inserts(&bench, &buffers, &mut table, filled);
        assert_eq!(table.len().unwrap(), CAPACITY * percent / 100);
        let (find, insert) = (median(&finds), median(&inserts));
        let index = table.bytes_a_slot() - 8.0;
        println!(
            "| {percent} % | {find:.2} | {:.2} | {:.2} | {:.1} | {insert:.2} | {:.2} | {:.2} | {:.1} | {index:.1} |",
            peer[0],
            find / peer[0],
            goal[0],
            peer[1],
            insert / peer[1],
            goal[1]
        );
        keep_samples(&format!("find {percent} %"), "Gkeys/s", &finds);
        keep_samples(&format!("find_or_insert {percent} %"), "Gkeys/s", &inserts);
    }
    println!(
        "\n| rows | policy | find_or_insert, Gkeys/s | HierarchicalKV | ratio | to reach | rows removed |\n|---|---|---|---|---|---|---|"
    );
    for (name, full) in full_tables() {
        let mut table = GpuTable::new(&bench.device, full).unwrap();
        fill(&bench, &buffers, &mut table, CAPACITY as u64);
        let inserts = time_inserts(&bench, &buffers, &mut table, CAPACITY as u64);
        // A sweep makes room for several calls, so the mean counts: of the time for a key.
        // The first call may compile kernels.
        let timed = &inserts[1..];
        let mean = timed.len() as f32 / timed.iter().map(|speed| 1.0 / speed).sum::<f32>();
        let removed = table.stats().unwrap().outcomes.evicted;
        println!("| 100 % | {name} | {mean:.2} | {HKV_FULL:.2} | {:.2} | 2.2 | {removed} |", mean / HKV_FULL);
        keep_samples(&format!("find_or_insert, full, {name}"), "Gkeys/s", &inserts);
    }
}

/// A table at its capacity with each policy.
fn full_tables() -> Vec<(&'static str, TableConfig)> {
    let with = |score| {
        let eviction = Some(Eviction { score, counts_inference: false, keeps_evicted: false });
        let max_capacity = Some(CAPACITY as u64);
        TableConfig { max_capacity, eviction, ..config("t", DIM, CAPACITY as u64) }
    };
    let twice = Admission::Frequency { threshold: 2, once_per_step: false, half_life: None, memory: None };
    let time_to_live = TimeToLive { lifetime: Lifetime::Steps(4096), keeps_expired: false };
    vec![
        ("LRU", with(Score::Lru)),
        ("LFU", with(Score::Lfu { half_life: None })),
        ("Custom", with(Score::Custom)),
        ("LRU, keys that come twice", TableConfig { admission: Some(twice), ..with(Score::Lru) }),
        ("LRU, 4,096 steps to live", TableConfig { time_to_live: Some(time_to_live), ..with(Score::Lru) }),
    ]
}

/// Memory of the calls.
struct Buffers {
    out: Buffer<f32>,
    found: Buffer<u32>,
    overflow: Buffer<u32>,
    dirt: Buffer<u32>,
}

impl Buffers {
    fn new(bench: &Bench) -> Buffers {
        let context = &bench.device.context;
        Buffers {
            out: Buffer::new(context, BATCH * DIM).unwrap(),
            found: Buffer::new(context, BATCH).unwrap(),
            overflow: Buffer::new(context, BATCH + 1).unwrap(),
            dirt: Buffer::new(context, 64 << 20).unwrap(),
        }
    }

    /// Returns the speed of a call, in Gkeys/s. The caches have other data before.
    fn time(&self, bench: &Bench, call: impl FnOnce()) -> f32 {
        self.dirt.zero(bench.stream()).unwrap();
        self.overflow.zero(bench.stream()).unwrap();
        let begin = bench.mark();
        call();
        let end = bench.mark();
        bench.device.synchronize().unwrap();
        BATCH as f32 / 1e6 / begin.elapsed_ms(&end).unwrap()
    }

    fn insert(&self, bench: &Bench, table: &mut GpuTable, keys: &Buffer<u64>) {
        let (found, overflow) = (self.found.address(), self.overflow.address());
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe { table.insert_on_device(keys.address(), found, keys.len(), overflow, bench.stream()) }
            .unwrap();
    }
}

fn fill(bench: &Bench, buffers: &Buffers, table: &mut GpuTable, rows: u64) {
    for (step, start) in (0..rows).step_by(BATCH).enumerate() {
        let keys: Vec<u64> = (start..(start + BATCH as u64).min(rows)).map(nth_key).collect();
        let keys = Buffer::from_slice(&bench.device.context, &keys).unwrap();
        buffers.overflow.zero(bench.stream()).unwrap();
        table.set_step(1 + step as u64).unwrap();
        buffers.insert(bench, table, &keys);
        bench.device.synchronize().unwrap();
    }
}

/// Returns a batch of known and new keys, mixed. The table had `filled` rows first.
fn batch(bench: &Bench, round: usize, filled: u64, fresh_from: u64) -> Buffer<u64> {
    let mut fresh = fresh_from..fresh_from + FRESH as u64;
    let draw = |i: usize| match i % 5 {
        1 | 3 => nth_key(fresh.next().unwrap_or(fresh_from)),
        _ => nth_key(hash((round * BATCH + i) as u64) % filled),
    };
    Buffer::from_slice(&bench.device.context, &(0..BATCH).map(draw).collect::<Vec<u64>>()).unwrap()
}

/// Inserts the new keys of batches, and copies the rows of the others. Returns the speeds.
fn time_inserts(bench: &Bench, buffers: &Buffers, table: &mut GpuTable, filled: u64) -> Vec<f32> {
    let steps = CAPACITY / BATCH;
    let time = |round: usize| {
        let keys = batch(bench, round, filled, filled + (round * FRESH) as u64);
        table.set_step((1 + steps + round) as u64).unwrap();
        buffers.time(bench, || {
            buffers.insert(bench, table, &keys);
            let (found, out) = (buffers.found.address(), buffers.out.address());
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            unsafe { table.launch_gather(found, out, BATCH, true, bench.stream()) }.unwrap();
        })
    };
    (0..ROUNDS).map(time).collect()
}
