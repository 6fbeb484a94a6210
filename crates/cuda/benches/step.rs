//! A training step of Adam over the tables of a layer: lookup, push, commit and apply, with gradients that are held, or merged at
//! the push. The comparison is with FBGEMM's plain arrays. Each step has other ids, of which one in a hundred is new. In the end
//! the rows are compared with the host's. Steps follow each other without a wait, as in training, with four steps between two
//! events. The time of the host for a step is measured separately,
//! where rows are not compared.
//!
//!     step [name ...]

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use common::training::{Gpu, Work, ids, normal, scalars, work};
use common::{Bench, fill, keep_samples, median, time_in_a_row};
use sok_core::contract::batch::{self, Combiner};
use sok_core::contract::gradients::GradientRows;
use sok_core::contract::group::Group;
use sok_core::contract::table::Insertion;
use sok_core::host::group::{ApplyScalars, HostGroup};
use sok_core::key::Key;
use sok_core::pool::Pool;
use sok_core::row_type::RowType;
use sok_cuda::memory::Buffer;

const WORKS: [Work; 12] = [
    Work { fbgemm: 2.24, goals: [0.70, 0.80], ..work("26 x 65,536, dim 64, Zipf", 26, 65_536, 1, 1_000_000) },
    Work {
        row_type: (RowType::Bfloat16, false),
        goals: [0.60, 0.0],
        ..work("26 x 65,536, dim 64, Zipf, bfloat16", 26, 65_536, 1, 1_000_000)
    },
    Work {
        row_type: (RowType::Bfloat16, true),
        ..work("26 x 65,536, dim 64, Zipf, bfloat16 by chance", 26, 65_536, 1, 1_000_000)
    },
    Work {
        row_type: (RowType::Float16, false),
        ..work("26 x 65,536, dim 64, Zipf, float16", 26, 65_536, 1, 1_000_000)
    },
    Work {
        array_type: RowType::Bfloat16,
        ..work("26 x 65,536, dim 64, Zipf, arrays of bfloat16", 26, 65_536, 1, 1_000_000)
    },
    Work {
        row_type: (RowType::Bfloat16, false),
        array_type: RowType::Bfloat16,
        goals: [0.60, 0.0],
        ..work("26 x 65,536, dim 64, Zipf, rows and arrays of bfloat16", 26, 65_536, 1, 1_000_000)
    },
    Work {
        row_type: (RowType::Float16, false),
        array_type: RowType::Float16,
        ..work("26 x 65,536, dim 64, Zipf, rows and arrays of float16", 26, 65_536, 1, 1_000_000)
    },
    Work {
        zipf: false,
        fbgemm: 3.24,
        goals: [1.15, 1.40],
        ..work("26 x 65,536, dim 64, uniform", 26, 65_536, 1, 1_000_000)
    },
    Work { fbgemm: 1.20, goals: [0.27, 0.31], ..work("26 x 16,384, dim 64, Zipf", 26, 16_384, 1, 1_000_000) },
    Work {
        fbgemm: 2.28,
        goals: [0.74, 0.84],
        ..work("8 x 20 ids x 16,384, dim 64, sum, Zipf", 8, 16_384, 20, 4_000_000)
    },
    Work {
        weighted: true,
        ..work("8 x 20 ids x 16,384, dim 64, weighted sum, Zipf", 8, 16_384, 20, 4_000_000)
    },
    Work {
        dim: 128,
        fbgemm: 1.70,
        goals: [0.75, 0.85],
        ..work("10 x 104,857, dim 128, Zipf", 10, 104_857, 1, 1_680_000)
    },
];

const WARM: usize = 5;
const TIMED: usize = 20;
const HOST_TIMED: usize = 200;

/// Runs the same steps on the host and compares the rows.
fn check(gpu: &Gpu, batches: &[Vec<Key>], gradients: &[f32]) {
    let (work, pool) = (gpu.work, Pool::new(16).unwrap());
    let mut host = HostGroup::new(work.configs(0)).unwrap();
    host.bind(gpu.binding.clone()).unwrap();
    let (of_table, len) = (work.samples * work.hotness, work.samples * work.dim);
    let gradients = Arc::new(gradients.to_vec());
    let weights = normal(if work.weighted { of_table * work.tables } else { 0 });
    let mut weight_gradients = vec![0f32; weights.len()];
    for (step, ids) in batches.iter().enumerate() {
        let feature = |t: usize| batch::Feature {
            name: "f",
            table: t,
            keys: batch::Keys::U64(&ids[t * of_table..][..of_table]),
            bags: if work.hotness == 1 {
                batch::Bags::Each
            } else {
                batch::Bags::Fixed { num_bags: work.samples, hotness: work.hotness }
            },
            combiner: Combiner::Sum,
            weights: work.weighted.then(|| &weights[t * of_table..][..of_table]),
            padding_key: None,
            id_counts: None,
            scores: None,
        };
        let features: Vec<_> = (0..work.tables).map(feature).collect();
        let mut rows = vec![0f32; gradients.len()];
        let number =
            host.lookup(&features, Insertion::AtLookup, true, rows.chunks_mut(len).collect(), &pool).unwrap();
        let lent = gradients.chunks(len);
        // SAFETY: Nothing writes to the gradients, and `keep` shares ownership of them.
        let lent = lent.map(|g| unsafe { GradientRows::new(g.as_ptr(), g.len()) }).collect();
        let given = sok_core::host::push::OutputGradients {
            rows: lent,
            keep: Some(Box::new(gradients.clone())),
            check_finite: false,
        };
        let mut ticket = vec![0f32; 128];
        host.push(number, given, weight_gradients.chunks_mut(of_table).collect(), &mut ticket, &pool)
            .unwrap();
        let named = host.resolve(&ticket).unwrap();
        host.commit(&named, true, &pool).unwrap();
        host.apply(&gpu.binding, &ApplyScalars::new(scalars(step), true), &pool).unwrap();
    }
    for t in 0..work.tables {
        let keys: HashSet<Key> =
            batches.iter().flat_map(|ids| &ids[t * of_table..][..of_table]).copied().collect();
        let keys: Vec<Key> = keys.into_iter().collect();
        let mut rows = [vec![0f32; keys.len() * work.dim], vec![0f32; keys.len() * work.dim]];
        let mut found = vec![false; keys.len()];
        host.table(t).find(&keys, &mut rows[0], &mut found).unwrap();
        gpu.group.table(t).find(&keys, &mut rows[1], &mut found).unwrap();
        assert!(found.iter().all(|f| *f) && rows[0] == rows[1], "table {t} differs from the host's");
    }
}

fn time(bench: &Bench, work: &Work, checks: bool) {
    let mut gradients = normal(work.samples * work.dim * work.tables);
    work.array_type.round(&mut gradients);
    let batches: Vec<Vec<Key>> = std::thread::scope(|scope| {
        let threads = (0..2 * (WARM + TIMED)).map(|step| scope.spawn(move || ids(work, step)));
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut gpu = Gpu::new(bench, work, &gradients);
    fill(bench, &mut gpu.group, work.shape(), work.vocabulary, gpu.rows.address());
    let upload = |values: &[f32]| Buffer::from_slice(&bench.device.context, values).unwrap();
    for (part, (how, hold)) in [("held", true), ("merged", false)].into_iter().enumerate() {
        let first = part * (WARM + TIMED);
        let on_device = |(i, batch): (usize, &Vec<Key>)| {
            let now = scalars(first + i);
            let numbers = [now.learning_rate, now.step as f32, 1.0, now.factor];
            (Buffer::from_slice(&bench.device.context, batch).unwrap(), upload(&numbers))
        };
        let inputs: Vec<_> = batches[first..first + WARM + TIMED].iter().enumerate().map(on_device).collect();
        for (ids, numbers) in &inputs[..WARM] {
            gpu.step(ids, numbers, hold);
        }
        let times = time_in_a_row(bench, &inputs[WARM..], |(ids, numbers)| gpu.step(ids, numbers, hold));
        // The check repeats all steps on the host, so there are no others before it.
        let host = if checks { "–".into() } else { time_host(&mut gpu, &inputs, hold) };
        let now = median(&times);
        let (name, fbgemm, goal) = (work.name, work.fbgemm, work.goals[part]);
        let peer = match work.fbgemm {
            0.0 => "– | – | –".into(),
            _ => format!("{fbgemm:.2} | {:.2} | {goal:.2}", fbgemm / now),
        };
        println!("| {name} | {how} | {now:.3} | {peer} | {host} |");
        keep_samples(&format!("step {name}, {how}"), "ms", &times);
    }
    if checks {
        check(&gpu, &batches, &gradients);
    }
}

/// Returns the microseconds that the host takes for a step on an idle device, the median of many.
fn time_host(gpu: &mut Gpu, inputs: &[(Buffer<u64>, Buffer<f32>)], hold: bool) -> String {
    let time = |(ids, numbers): &(Buffer<u64>, Buffer<f32>)| {
        gpu.bench.device.synchronize().unwrap();
        let start = Instant::now();
        gpu.step(ids, numbers, hold);
        start.elapsed().as_secs_f32() * 1e6
    };
    let times: Vec<f32> = inputs.iter().cycle().take(HOST_TIMED).map(time).collect();
    format!("{:.1}", median(&times))
}

fn main() {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let checks = std::env::var_os("SOK_UNCHECKED").is_none();
    let bench = Bench::start("a training step of Adam, 1 % new keys");
    println!(
        "| work | gradients | ms | FBGEMM, ms | FBGEMM / ours | to reach | host, µs |\n|---|---|---|---|---|---|---|"
    );
    for work in &WORKS {
        if chosen.is_empty() || chosen.iter().any(|c| work.name.contains(c.as_str())) {
            time(&bench, work, checks);
        }
    }
    if checks {
        println!("\nall rows equal the host's, bit for bit");
    }
}
