//! Training steps of Adam of shapes to which the planner's constants were not fitted, and the bytes of a table with as many rows as it has room
//! for. `benches/planner.py` compares them with its predictions.
//!
//!     shapes

mod common;

use common::training::{Gpu, Work, ids, normal, scalars, work};
use common::{ADAM, Bench, config, fill, median, time_in_a_row};
use sok_core::contract::table::Table;
use sok_cuda::gpu_table::GpuTable;
use sok_cuda::memory::Buffer;

const WORKS: [Work; 5] = [
    Work { dim: 128, ..work("12 x 32,768, dim 128, Zipf", 12, 32_768, 1, 2_000_000) },
    Work { dim: 32, ..work("40 x 8,192, dim 32, Zipf", 40, 8_192, 1, 500_000) },
    Work { dim: 16, ..work("16 x 10 ids x 8,192, dim 16, sum, Zipf", 16, 8_192, 10, 3_000_000) },
    Work { dim: 32, zipf: false, ..work("6 x 131,072, dim 32, uniform", 6, 131_072, 1, 5_000_000) },
    Work { dim: 256, ..work("4 x 5 ids x 16,384, dim 256, sum, Zipf", 4, 16_384, 5, 1_000_000) },
];
const WARM: usize = 5;
const TIMED: usize = 20;

fn time(bench: &Bench, work: &Work) -> f32 {
    let gradients = normal(work.samples * work.dim * work.tables);
    let mut gpu = Gpu::new(bench, work, &gradients);
    fill(bench, &mut gpu.group, work.shape(), work.vocabulary, gpu.rows.address());
    let context = &bench.device.context;
    let input = |step: usize| {
        let now = scalars(step);
        let numbers = [now.learning_rate, now.step as f32, 1.0, now.factor];
        let ids = Buffer::from_slice(context, &ids(work, step)).unwrap();
        (ids, Buffer::from_slice(context, &numbers).unwrap())
    };
    let inputs: Vec<_> = (0..WARM + TIMED).map(input).collect();
    for (ids, numbers) in &inputs[..WARM] {
        gpu.step(ids, numbers, true);
    }
    median(&time_in_a_row(bench, &inputs[WARM..], |(ids, numbers)| gpu.step(ids, numbers, true)))
}

fn main() {
    let bench = Bench::start("steps of other shapes, 1 % new keys");
    println!("| work | ms | rows of a table | bytes of a table |\n|---|---|---|---|");
    for work in &WORKS {
        let ms = time(&bench, work);
        let config = config("t", work.dim, work.vocabulary);
        let mut table = GpuTable::new(&bench.device, config).unwrap();
        table.set_update_rule(Some(ADAM), false).unwrap();
        table.reserve(work.vocabulary).unwrap();
        println!("| {} | {ms:.3} | {} | {} |", work.name, work.vocabulary, table.stats().unwrap().bytes);
    }
}
