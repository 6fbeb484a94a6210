//! Finds and insertions in HierarchicalKV's shape: 64 Mi rows of dim 64, batches of 1 Mi keys drawn afresh, 60 % there.
//!
//!     find [--capacity MI] [--load PERCENT]

use std::ffi::c_void;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
use sok_core::initializer::Initializer;
use sok_core::key::hash;
use sok_cuda::device::{Device, Kernel};
use sok_cuda::kernels::TABLE;
use sok_cuda::layout::{self, Index, Table};
use sok_cuda::memory::Buffer;

const DIM: usize = 64;
const BATCH: usize = 1 << 20;
const BLOCK: u32 = 256;

macro_rules! launch {
    ($kernel:expr, $stream:expr, $n:expr, $($value:expr),*) => {
        match [$((&$value as *const _ as *mut c_void)),*] {
            // SAFETY: the values' types are the kernel's parameters', as written in table.cu; buffers live until the end.
            mut list => unsafe { Kernel::launch(&$kernel, $stream, ($n as u32).div_ceil(BLOCK), BLOCK, &mut list).unwrap() },
        }
    };
}

fn median(mut times: Vec<f32>) -> f32 {
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

fn nth_key(i: u64) -> u64 {
    hash(i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0)
}

fn main() {
    let option = |name: &str, default: usize| {
        let mut all = std::env::args().skip_while(|a| a != name);
        all.nth(1).map_or(default, |v| v.parse().unwrap())
    };
    let capacity = option("--capacity", 64) << 20;
    let load = option("--load", 80);
    let device = Device::open(0, &[]).unwrap();
    println!(
        "# {} sm_{} capacity {} Mi, index load at capacity {load} %",
        device.context.name().unwrap(),
        device.arch,
        capacity >> 20
    );
    let [clear, look_up, insert, find_rows_4, find_rows_8, find_rows_6, gather] = device
        .kernels(
            &TABLE,
            [
                "clear_index",
                "look_up<64, false>",
                "look_up<64, true>",
                "find_rows<64, 4>",
                "find_rows<64, 8>",
                "find_rows<64, 6>",
                "gather_rows<64, 4>",
            ],
        )
        .unwrap();
    let context = &device.context;
    let num_buckets = (capacity * 100 / load).div_ceil(5);
    let records = Buffer::<f32>::new(context, (capacity + 1) * DIM + BATCH * DIM * 40).unwrap();
    let out = Buffer::<f32>::new(context, BATCH * DIM).unwrap();
    let found = Buffer::<u32>::new(context, BATCH).unwrap();
    let dirt = Buffer::<u8>::new(context, 256 << 20).unwrap();
    let stream = context.new_stream().unwrap();
    let raw = stream.cu_stream();
    let keys_of = |range: std::ops::Range<u64>| {
        Buffer::from_slice(context, &range.map(nth_key).collect::<Vec<_>>()).unwrap()
    };

    for percent in [50, 75, 100] {
        let buckets = Buffer::<u64>::new(context, num_buckets * 8).unwrap();
        let stash = Buffer::<u32>::new(context, 3 * 1024).unwrap();
        let mut start = vec![0u32; 128];
        start[0] = 1;
        let counters = Buffer::from_slice(context, &start).unwrap();
        let free = Buffer::<u32>::new(context, BATCH * 64).unwrap();
        let index = Index {
            buckets: buckets.address(),
            stash: stash.address(),
            counters: counters.address(),
            free: free.address(),
            num_buckets: num_buckets as u32,
            pad: 0,
        };
        let initializer = layout::Initializer { seed: 7, kind: 1, a: -0.05, b: 0.1, pad: 0 };
        let table = Table {
            index,
            initializer,
            records: records.address(),
            stride: 16,
            first: 0,
            first_state: 0.0,
            pad: 0,
        };
        launch!(clear, raw, num_buckets, buckets.address(), num_buckets as u32);
        // Insertions of batches with 60 % known keys are timed last, on the way to the load.
        let stored = (capacity * percent / 100).max(24 * BATCH);
        let timed = 24usize;
        let fresh = BATCH * 4 / 10;
        let filled = (stored - timed * fresh) as u64;
        let mut at = 0;
        while at < filled {
            let keys = keys_of(at..(at + BATCH as u64).min(filled));
            launch!(insert, raw, keys.len(), table, keys.address(), found.address(), keys.len() as u32);
            at += keys.len() as u64;
            context.synchronize().unwrap();
        }
        let timer = || context.new_event(Some(CU_EVENT_DEFAULT)).unwrap();
        let (begin, middle, end) = (timer(), timer(), timer());
        let (mut index_times, mut whole_times) = (Vec::new(), Vec::new());
        let mix = |round: usize, fresh_from: u64| {
            let known = (0..BATCH - fresh).map(|i| nth_key(hash((round * BATCH + i) as u64) % filled));
            let mut keys: Vec<u64> =
                known.chain((fresh_from..fresh_from + fresh as u64).map(nth_key)).collect();
            for i in (1..BATCH).rev() {
                keys.swap(i, hash((i + round * 77) as u64) as usize % (i + 1));
            }
            Buffer::from_slice(context, &keys).unwrap()
        };
        let batches: Vec<_> = (0..timed).map(|round| mix(round, filled + (round * fresh) as u64)).collect();
        for keys in &batches {
            dirt.fill(1, &stream).unwrap();
            begin.record(&stream).unwrap();
            launch!(insert, raw, BATCH, table, keys.address(), found.address(), BATCH as u32);
            middle.record(&stream).unwrap();
            launch!(gather, raw, BATCH, table, found.address(), out.address(), BATCH as u32, 1u32);
            end.record(&stream).unwrap();
            context.synchronize().unwrap();
            index_times.push(begin.elapsed_ms(&middle).unwrap());
            whole_times.push(begin.elapsed_ms(&end).unwrap());
        }
        let rate = |ms: f32| BATCH as f32 / ms / 1e6;
        let counts = counters.to_vec().unwrap();
        let got = found.to_vec().unwrap();
        let lost = got.iter().filter(|&&r| r & 0x7fff_ffff == 0).count();
        let (next, unused, stashed, homeless) = (counts[0], counts[32], counts[64], counts[96]);
        println!(
            "load {percent}: find_or_insert {:.2} Gkeys/s (index {:.2}), next {next} unused {unused} stashed {stashed} homeless {homeless} lost of the last {lost}",
            rate(median(whole_times)),
            rate(median(index_times)),
        );
        let batches: Vec<_> = (0..24).map(|round| mix(round + 100, 1 << 40)).collect();
        for (name, kernel) in
            [("find_rows<4>", find_rows_4), ("find_rows<8>", find_rows_8), ("find_rows<6>", find_rows_6)]
        {
            let mut times = Vec::new();
            for keys in &batches {
                begin.record(&stream).unwrap();
                launch!(
                    kernel,
                    raw,
                    BATCH,
                    table,
                    keys.address(),
                    out.address(),
                    found.address(),
                    BATCH as u32
                );
                end.record(&stream).unwrap();
                context.synchronize().unwrap();
                times.push(begin.elapsed_ms(&end).unwrap());
            }
            print!("  {name} {:.2}", rate(median(times)));
        }
        let mut times = Vec::new();
        for keys in &batches {
            begin.record(&stream).unwrap();
            launch!(look_up, raw, BATCH, table, keys.address(), found.address(), BATCH as u32);
            end.record(&stream).unwrap();
            context.synchronize().unwrap();
            times.push(begin.elapsed_ms(&end).unwrap());
        }
        println!("  index alone {:.2} Gkeys/s", rate(median(times)));
        // Every stored key has a record of its own, with its own row.
        let mut seen = vec![false; next as usize];
        let initializer = Initializer::Uniform { minval: -0.05, maxval: 0.05 };
        let total = filled + (timed * fresh) as u64;
        let mut stored_keys = 0;
        let mut row = [0f32; DIM];
        for from in (0..total).step_by(BATCH) {
            let range = from..(from + BATCH as u64).min(total);
            let keys = keys_of(range.clone());
            launch!(
                find_rows_4,
                raw,
                keys.len(),
                table,
                keys.address(),
                out.address(),
                found.address(),
                keys.len() as u32
            );
            let numbers = found.to_vec().unwrap();
            for &number in numbers[..keys.len()].iter().filter(|&&number| number > 0) {
                assert!(number < next && !std::mem::replace(&mut seen[number as usize], true));
                stored_keys += 1;
            }
            if from % (BATCH as u64 * 16) == 0 {
                let rows = out.to_vec().unwrap();
                for (i, key) in range.enumerate().step_by(101).filter(|(i, _)| numbers[*i] > 0) {
                    initializer.fill(7, nth_key(key), &mut row);
                    assert_eq!(
                        rows[i * DIM..][..DIM].iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                        row.map(f32::to_bits)
                    );
                }
            }
        }
        assert_eq!(stored_keys, next - 1 - unused);
        println!("  {} of {total} keys without a place", total - u64::from(stored_keys));
    }
    let _: &CudaContext = context;
    println!("all keys found, each with its row");
}
