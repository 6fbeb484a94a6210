//! Inserts new keys into a table that grows from 1 Mi to 64 Mi rows of dim 64 with Adam's states, and into a table that has its
//! full size from the beginning. Medians of three runs; for the longest batch the maximum.

mod common;

use std::time::Instant;

use common::{ADAM, Bench, config, keep_samples, median, nth_key};
use sok_core::contract::table::{Contents, Table};
use sok_cuda::gpu_table::GpuTable;
use sok_cuda::memory::Buffer;

const BATCH: usize = 1 << 20;
const ROWS: usize = 64 << 20;

/// Fills a table. Returns the milliseconds of each batch, including a wait for it.
fn fill(bench: &Bench, dim: usize, initial_capacity: usize) -> Vec<f32> {
    let (context, stream) = (&bench.device.context, bench.stream());
    let mut table = GpuTable::new(&bench.device, config("t", dim, initial_capacity as u64)).unwrap();
    if dim > 1 {
        table.set_update_rule(Some(ADAM), false).unwrap();
    }
    table.reserve(initial_capacity as u64).unwrap();
    let records = Buffer::<u32>::new(context, BATCH).unwrap();
    let overflow = Buffer::<u32>::new(context, BATCH + 1).unwrap();
    let mut times = Vec::new();
    for batch in 0..ROWS / BATCH {
        let keys: Vec<u64> = (batch * BATCH..(batch + 1) * BATCH).map(|i| nth_key(i as u64)).collect();
        let keys = Buffer::from_slice(context, &keys).unwrap();
        overflow.zero(stream).unwrap();
        bench.device.synchronize().unwrap();
        let start = Instant::now();
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe {
            table.insert_on_device(keys.address(), records.address(), BATCH, overflow.address(), stream)
        }
        .unwrap();
        bench.device.synchronize().unwrap();
        times.push(start.elapsed().as_secs_f32() * 1e3);
    }
    assert_eq!(table.len().unwrap(), ROWS);
    times
}

fn main() {
    let bench = Bench::start("64 Mi fresh keys, dim 64 with Adam's states, batches of 1 Mi");
    println!("| table | whole, ms | longest batch, ms |\n|---|---|---|");
    fill(&bench, 64, ROWS);
    let mut whole = Vec::new();
    let tables = [
        ("of full size", 64, ROWS),
        ("grows from 1 Mi", 64, 1 << 20),
        ("dim 1, no states, of full size", 1, ROWS),
        ("dim 1, no states, grows from 1 Mi", 1, 1 << 20),
    ];
    for (name, dim, capacity) in tables {
        let runs = [(); 3].map(|()| fill(&bench, dim, capacity));
        whole.push(median(&runs.each_ref().map(|times| times.iter().sum())));
        let longest = runs.iter().flatten().copied().fold(0.0, f32::max);
        println!("| {name} | {:.1} | {longest:.1} |", whole[whole.len() - 1]);
        runs.iter().for_each(|times| keep_samples(&format!("growth, {name}"), "ms", times));
    }
    println!("\nratio {:.2} (to reach 1.6), longest batch at most 50 ms", whole[1] / whole[0]);
}
