//! Lookups that do not learn, as in evaluation: ids that nobody has seen answer what their table says, and get no record.

mod common;

use common::{Bench, config, draw_row, keep_samples, key_of, median, unit};
use cudarc::driver::CudaEvent;
use sok_core::batch::Combiner;
use sok_cuda::gpu_group::GpuGroup;
use sok_cuda::memory::Buffer;
use sok_cuda::step::{Bags, Feature, Ids, KeyType};

struct Work {
    name: &'static str,
    tables: usize,
    samples: usize,
    hotness: usize,
    weighted: bool,
}

const WORKS: [Work; 3] = [
    Work { name: "26 x 65,536", tables: 26, samples: 65_536, hotness: 1, weighted: false },
    Work { name: "8 x 20 ids x 16,384, sum", tables: 8, samples: 16_384, hotness: 20, weighted: false },
    Work {
        name: "8 x 20 ids x 16,384, weighted sum",
        tables: 8,
        samples: 16_384,
        hotness: 20,
        weighted: true,
    },
];

/// Ids in a hundred that no table knows.
const UNKNOWN: [usize; 3] = [0, 1, 50];
const DIM: usize = 64;
const VOCABULARY: u64 = 1_000_000;
const TIMED: usize = 20;
const IN_A_ROW: usize = 4;

struct Inputs<'a> {
    work: &'a Work,
    ids: Buffer<u64>,
    weights: Buffer<f32>,
    rows: Buffer<f32>,
}

impl Inputs<'_> {
    fn features(&self) -> Vec<Feature<'static>> {
        let Work { tables, samples: num_bags, hotness, weighted, .. } = *self.work;
        let len = num_bags * hotness;
        let feature = |t: usize| Feature {
            name: "f",
            table: t,
            ids: Ids { address: self.ids.at(t * len), high: 0, key_type: KeyType::Wide, len },
            bags: if hotness == 1 { Bags::Each } else { Bags::Fixed { num_bags, hotness } },
            combiner: Combiner::Sum,
            weights: weighted.then(|| self.weights.at(t * len)),
            padding_key: None,
            rows: self.rows.at(t * num_bags * DIM),
        };
        (0..tables).map(feature).collect()
    }
}

/// A group that knows the whole vocabulary.
fn filled(bench: &Bench, inputs: &Inputs) -> GpuGroup {
    let configs = (0..inputs.work.tables).map(|t| config(&format!("t{t}"), DIM, VOCABULARY)).collect();
    let mut group = GpuGroup::new(&bench.device, configs).unwrap();
    let keys: Vec<u64> = (0..VOCABULARY).map(key_of).collect();
    for some in keys.chunks(inputs.work.samples) {
        let ids = Buffer::from_slice(&bench.device.context, some).unwrap();
        let mut features = inputs.features();
        for feature in &mut features {
            feature.ids = Ids { address: ids.address(), len: some.len(), ..feature.ids };
            (feature.bags, feature.weights) = (Bags::Each, None);
        }
        group.lookup(&features, true, false, None, bench.stream()).unwrap();
        bench.device.synchronize().unwrap();
    }
    group
}

fn time(bench: &Bench, work: &Work, unknown: usize) {
    let (context, of_table) = (&bench.device.context, work.samples * work.hotness);
    let key = |i: usize| {
        let beyond = if i % 100 < unknown { VOCABULARY } else { 0 };
        key_of(beyond + draw_row(unit(i as u64), VOCABULARY, true))
    };
    let ids: Vec<u64> = (0..of_table * work.tables).map(key).collect();
    let inputs = Inputs {
        work,
        ids: Buffer::from_slice(context, &ids).unwrap(),
        weights: Buffer::from_slice(context, &vec![0.5; ids.len()]).unwrap(),
        rows: Buffer::new(context, work.tables * work.samples * DIM).unwrap(),
    };
    let (mut group, features) = (filled(bench, &inputs), inputs.features());
    let mut look_up = || {
        group.lookup(&features, false, false, None, bench.stream()).unwrap();
    };
    (0..IN_A_ROW).for_each(|_| look_up());
    let mut marks = vec![bench.mark()];
    for _ in 0..TIMED / IN_A_ROW {
        (0..IN_A_ROW).for_each(|_| look_up());
        marks.push(bench.mark());
    }
    bench.device.synchronize().unwrap();
    let time = |m: &[CudaEvent]| m[0].elapsed_ms(&m[1]).unwrap() / IN_A_ROW as f32;
    let times: Vec<f32> = marks.windows(2).map(time).collect();
    let (name, now) = (work.name, median(&times));
    let rate = ids.len() as f32 / now / 1e6;
    println!("| {name} | {unknown} % | {now:.3} | {rate:.1} |");
    keep_samples(&format!("lookup {name}, {unknown} % unknown"), "ms", &times);
}

fn main() {
    let bench = Bench::start("a lookup that does not learn, dim 64, Zipf");
    println!("| work | unknown ids | ms | Gids/s |\n|---|---|---|---|");
    for work in &WORKS {
        UNKNOWN.into_iter().for_each(|unknown| time(&bench, work, unknown));
    }
}
