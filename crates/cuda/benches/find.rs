//! Finds and insertions with the workload of HierarchicalKV: 64 Mi rows of dim 64, and new random batches of 1 Mi keys, of which 60
//! % are in the table.
//!
//! `find_or_insert` first inserts records with initial values for the new keys of a batch. Then it copies the rows of the other keys.

mod common;

use common::{Bench, config, keep_samples, median, nth_key};
use sok_core::contract::table::Contents;
use sok_core::key::hash;
use sok_cuda::gpu_table::GpuTable;
use sok_cuda::memory::Buffer;

const DIM: usize = 64;
const BATCH: usize = 1 << 20;
const CAPACITY: usize = 64 << 20;
const FRESH: usize = BATCH * 4 / 10;
const ROUNDS: usize = 24;

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
    let (context, stream) = (&bench.device.context, bench.stream());
    let out = Buffer::<f32>::new(context, BATCH * DIM).unwrap();
    let found = Buffer::<u32>::new(context, BATCH).unwrap();
    let overflow = Buffer::<u32>::new(context, BATCH + 1).unwrap();
    let dirt = Buffer::<u32>::new(context, 64 << 20).unwrap();
    for (percent, peer, goal) in LOADS {
        let mut table = GpuTable::new(&bench.device, config("t", DIM, CAPACITY as u64)).unwrap();
        let filled = (CAPACITY * percent / 100 - ROUNDS * FRESH) as u64;
        let mut insert = |keys: &Buffer<u64>| {
            overflow.zero(stream).unwrap();
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            unsafe {
                table.insert_on_device(
                    keys.address(),
                    found.address(),
                    keys.len(),
                    overflow.address(),
                    stream,
                )
            }
            .unwrap();
        };
        for start in (0..filled).step_by(BATCH) {
            let keys: Vec<u64> = (start..(start + BATCH as u64).min(filled)).map(nth_key).collect();
            insert(&Buffer::from_slice(context, &keys).unwrap());
            bench.device.synchronize().unwrap();
        }
        // Known keys and new keys are mixed.
        let batch = |round: usize, fresh_from: u64| {
            let mut fresh = fresh_from..fresh_from + FRESH as u64;
            let draw = |i: usize| match i % 5 {
                1 | 3 => nth_key(fresh.next().unwrap_or(fresh_from)),
                _ => nth_key(hash((round * BATCH + i) as u64) % filled),
            };
            Buffer::from_slice(context, &(0..BATCH).map(draw).collect::<Vec<u64>>()).unwrap()
        };
        let mut finds = Vec::new();
        for round in 0..ROUNDS {
            let keys = batch(round, 1 << 40);
            dirt.zero(stream).unwrap();
            let begin = bench.mark();
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            unsafe { table.launch_find(keys.address(), out.address(), found.address(), BATCH, stream) }
                .unwrap();
            let end = bench.mark();
            bench.device.synchronize().unwrap();
            finds.push(BATCH as f32 / 1e6 / begin.elapsed_ms(&end).unwrap());
        }
        let mut inserts = Vec::new();
        for round in 0..ROUNDS {
            let keys = batch(round, filled + (round * FRESH) as u64);
            dirt.zero(stream).unwrap();
            overflow.zero(stream).unwrap();
            let begin = bench.mark();
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            unsafe {
                table.insert_on_device(keys.address(), found.address(), BATCH, overflow.address(), stream)
            }
            .unwrap();
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            unsafe { table.launch_gather(found.address(), out.address(), BATCH, true, stream) }.unwrap();
            let end = bench.mark();
            bench.device.synchronize().unwrap();
            inserts.push(BATCH as f32 / 1e6 / begin.elapsed_ms(&end).unwrap());
        }
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
}
