//! Lookups without insertion, as in evaluation: an unknown id gets the row that its table has for missing keys, and no record.

mod common;

use common::{Bench, Shape, config, draw_row, fill, keep_samples, key_of, median, time_in_a_row, unit};
use sok_core::contract::table::Insertion;
use sok_core::row_type::RowType;
use sok_cuda::gpu_group::GpuGroup;
use sok_cuda::memory::Buffer;

const DIM: usize = 64;
const VOCABULARY: u64 = 1_000_000;
const ROWS: Shape = Shape { tables: 26, samples: 65_536, hotness: 1, dim: DIM, array_type: RowType::Float32 };
const BAGS: Shape = Shape { tables: 8, samples: 16_384, hotness: 20, dim: DIM, array_type: RowType::Float32 };
/// Name, shape, and whether ids have weights.
const WORKS: [(&str, Shape, bool); 3] = [
    ("26 x 65,536", ROWS, false),
    ("8 x 20 ids x 16,384, sum", BAGS, false),
    ("8 x 20 ids x 16,384, weighted sum", BAGS, true),
];
/// Percentages of unknown ids.
const UNKNOWN: [usize; 3] = [0, 1, 50];
const WARM: usize = 4;
const TIMED: usize = 20;

fn time(bench: &Bench, name: &str, shape: Shape, is_weighted: bool, unknown: usize) {
    let (context, num_bags) = (&bench.device.context, shape.tables * shape.samples);
    let key = |i: usize| {
        let beyond = if i % 100 < unknown { VOCABULARY } else { 0 };
        key_of(beyond + draw_row(unit(i as u64), VOCABULARY, true))
    };
    let ids: Vec<u64> = (0..num_bags * shape.hotness).map(key).collect();
    let on_device = Buffer::from_slice(context, &ids).unwrap();
    let weights = Buffer::from_slice(context, &vec![0.5f32; ids.len()]).unwrap();
    let rows = Buffer::<f32>::new(context, num_bags * DIM).unwrap();
    let configs = (0..shape.tables).map(|t| config(&format!("t{t}"), DIM, VOCABULARY)).collect();
    let mut group = GpuGroup::new(&bench.device, configs).unwrap();
    fill(bench, &mut group, shape, VOCABULARY, rows.address());
    let features =
        shape.features(on_device.address(), is_weighted.then(|| weights.address()), rows.address());
    let mut look_up = |(): &()| {
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe { group.lookup(&features, Insertion::Never, false, None, bench.stream()) }.unwrap();
    };
    [(); WARM].iter().for_each(&mut look_up);
    let times = time_in_a_row(bench, &[(); TIMED], look_up);
    let now = median(&times);
    println!("| {name} | {unknown} % | {now:.3} | {:.1} |", ids.len() as f32 / now / 1e6);
    keep_samples(&format!("lookup {name}, {unknown} % unknown"), "ms", &times);
}

fn main() {
    let bench = Bench::start("a lookup that does not learn, dim 64, Zipf");
    println!("| work | unknown ids | ms | Gids/s |\n|---|---|---|---|");
    for (name, shape, is_weighted) in WORKS {
        UNKNOWN.into_iter().for_each(|unknown| time(&bench, name, shape, is_weighted, unknown));
    }
}
