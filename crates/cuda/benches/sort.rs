//! Our radix sort: right, and how fast. Pairs of words, of so many bits, Zipf-like.

use std::ffi::c_void;

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
use sok_core::key::hash;
use sok_cuda::device::Device;
use sok_cuda::kernels::SORT;
use sok_cuda::layout;
use sok_cuda::memory::Buffer;

fn main() {
    let (digit_bits, threads, items) = (
        layout::DIGIT_BITS as u32,
        layout::SORT_THREADS as u32,
        (layout::SORT_TILE / layout::SORT_THREADS) as u32,
    );
    let digits = 1usize << digit_bits;
    let device = Device::open(0, &[]).unwrap();
    let [count_2, count_3, count_4, pass] = device
        .kernels(&SORT, ["count_digits<2>", "count_digits<3>", "count_digits<4>", "sort_pass"])
        .unwrap();
    let context = &device.context;
    let stream = context.new_stream().unwrap();
    let raw = stream.cu_stream();
    println!("# {digit_bits} bits a digit, {threads} threads, {items} items");
    for (n, bits) in [
        (425_984u32, 25u32),
        (1_048_570, 25),
        (1_703_936, 18),
        (1_703_936, 26),
        (1_703_936, 27),
        (2_621_440, 26),
        (1000, 20),
        (5, 9),
    ] {
        let passes = bits.div_ceil(digit_bits).max(2);
        let count = match passes {
            2 => count_2,
            3 => count_3,
            _ => count_4,
        };
        let key = |i: u32| {
            let u = (hash(u64::from(i) * 77 + 5) >> 11) as f64 / (1u64 << 53) as f64;
            (u.powi(4) * (1u64 << bits) as f64) as u32
        };
        let host: Vec<u32> = (0..n).map(key).collect();
        let keys = Buffer::from_slice(context, &host).unwrap();
        let values = Buffer::from_slice(context, &(0..n).collect::<Vec<_>>()).unwrap();
        let pairs: Vec<[Buffer<u32>; 2]> = (0..2)
            .map(|_| [Buffer::new(context, n as usize).unwrap(), Buffer::new(context, n as usize).unwrap()])
            .collect();
        let tiles = n.div_ceil(threads * items);
        let state = Buffer::<u32>::new(context, 32 + 4 * digits).unwrap();
        let told = Buffer::<u32>::new(context, passes as usize * tiles as usize * digits).unwrap();
        let run = || {
            state.fill(0, &stream).unwrap();
            let blocks = (n.div_ceil(threads * 8)).min(2 * device.multiprocessors);
            let args = (keys.address(), n, state.address(), told.address());
            let mut list = [
                &raw const args.0 as *mut c_void,
                &raw const args.1 as *mut c_void,
                &raw const args.2 as *mut c_void,
                &raw const args.3 as *mut c_void,
            ];
            // SAFETY: the parameters of sort.cu; buffers live.
            unsafe { count.launch(raw, blocks, threads, &mut list).unwrap() };
            for number in 0..passes {
                let (from, to) = (&pairs[(number + 1) as usize % 2], &pairs[number as usize % 2]);
                let (from_keys, from_values) = if number == 0 {
                    (keys.address(), values.address())
                } else {
                    (from[0].address(), from[1].address())
                };
                let args = (
                    from_keys,
                    from_values,
                    to[0].address(),
                    to[1].address(),
                    n,
                    state.address(),
                    told.address(),
                    number,
                );
                let mut list = [
                    &raw const args.0 as *mut c_void,
                    &raw const args.1 as *mut c_void,
                    &raw const args.2 as *mut c_void,
                    &raw const args.3 as *mut c_void,
                    &raw const args.4 as *mut c_void,
                    &raw const args.5 as *mut c_void,
                    &raw const args.6 as *mut c_void,
                    &raw const args.7 as *mut c_void,
                ];
                // SAFETY: as above.
                unsafe { pass.launch(raw, tiles, threads, &mut list).unwrap() };
            }
        };
        let (begin, end) = (
            context.new_event(Some(CU_EVENT_DEFAULT)).unwrap(),
            context.new_event(Some(CU_EVENT_DEFAULT)).unwrap(),
        );
        let mut times = Vec::new();
        for _ in 0..25 {
            begin.record(&stream).unwrap();
            run();
            end.record(&stream).unwrap();
            context.synchronize().unwrap();
            times.push(begin.elapsed_ms(&end).unwrap() * 1e3);
        }
        times.sort_by(f32::total_cmp);
        let last = &pairs[(passes - 1) as usize % 2];
        let (sorted_keys, sorted_values) = (last[0].to_vec().unwrap(), last[1].to_vec().unwrap());
        let mut expected: Vec<u32> = (0..n).collect();
        expected.sort_by_key(|&i| host[i as usize]);
        let right = sorted_values == expected
            && sorted_keys.iter().zip(&expected).all(|(k, &i)| *k == host[i as usize]);
        println!(
            "{n} pairs of {bits} bits, {passes} passes: {:.1} us with the clearing, {}",
            times[12],
            if right { "right" } else { "WRONG" }
        );
    }
}
