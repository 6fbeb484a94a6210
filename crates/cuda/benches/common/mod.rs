//! Code that the benches share: the device, the heading of a table of figures, keys and times.
#![allow(dead_code, reason = "each bench uses its part")]

pub mod dense;
pub mod training;

use std::io::Write;
use std::process::Command;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaEvent, CudaStream};
use sok_core::contract::batch::Combiner;
use sok_core::contract::table::{CheckMode, Insertion, Missing, OutOfVocabulary, TableConfig};
use sok_core::formula::update::Update;
use sok_core::formula::{Adam, Rule};
use sok_core::initializer::Initializer;
use sok_core::key::hash;
use sok_core::row_type::RowType;
use sok_cuda::device::{Device, Stream};
use sok_cuda::gpu_group::GpuGroup;
use sok_cuda::memory::Buffer;
use sok_cuda::step::{Bags, Feature, Ids, KeyType};

#[derive(Clone)]
pub struct Bench {
    pub device: Arc<Device>,
    pub stream: Arc<CudaStream>,
}

impl Bench {
    /// Opens the device and prints what the figures depend on.
    pub fn start(what: &str) -> Bench {
        Bench::start_for(true, what)
    }

    /// As `start`. Prints only if `prints`.
    pub fn start_for(prints: bool, what: &str) -> Bench {
        let device = Device::shared(0, &[]).unwrap();
        let ask = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output().ok();
            output.map_or_else(String::new, |o| String::from_utf8_lossy(&o.stdout).trim().to_string())
        };
        let driver = ask("nvidia-smi", &["--query-gpu=driver_version", "--format=csv,noheader"]);
        let commit =
            std::env::var("SOK_COMMIT").unwrap_or_else(|_| ask("git", &["rev-parse", "--short", "HEAD"]));
        let date = ask("date", &["-u", "+%F"]);
        let name = device.context.name().unwrap();
        if !prints {
            return Bench { stream: device.context.new_stream().unwrap(), device };
        }
        println!("\n## {what}\n{name}, driver {driver}, commit {commit}, {date}; medians of CUDA events\n");
        let stream = device.context.new_stream().unwrap();
        Bench { device, stream }
    }

    pub fn stream(&self) -> Stream {
        Stream::of_cudarc(&self.stream)
    }

    pub fn mark(&self) -> CudaEvent {
        let event = self.device.context.new_event(Some(CU_EVENT_DEFAULT)).unwrap();
        event.record(&self.stream).unwrap();
        event
    }
}

/// Number of calls between two events. An event after each call would prevent the next call from being prepared while the call
/// runs. In training there are no such events.
const IN_A_ROW: usize = 4;

/// Runs `call` on each of `inputs`, with `IN_A_ROW` calls between two events. Returns the milliseconds per call.
pub fn time_in_a_row<T>(bench: &Bench, inputs: &[T], mut call: impl FnMut(&T)) -> Vec<f32> {
    let mut marks = vec![bench.mark()];
    for row in inputs.chunks(IN_A_ROW) {
        row.iter().for_each(&mut call);
        marks.push(bench.mark());
    }
    bench.device.synchronize().unwrap();
    let time = |m: &[CudaEvent]| m[0].elapsed_ms(&m[1]).unwrap() / IN_A_ROW as f32;
    marks.windows(2).map(time).collect()
}

/// The shape of a call with one feature for each table.
#[derive(Clone, Copy)]
pub struct Shape {
    pub tables: usize,
    pub samples: usize,
    pub hotness: usize,
    pub dim: usize,
    /// Type of the arrays of rows and gradients.
    pub array_type: RowType,
}

impl Shape {
    /// Returns the features of a call. `ids`, `weights` and `rows` are addresses of contiguous arrays, one table after the other.
    pub fn features(self, ids: u64, weights: Option<u64>, rows: u64) -> Vec<Feature<'static>> {
        let Shape { tables, samples: num_bags, hotness, dim, array_type } = self;
        let len = num_bags * hotness;
        let feature = |t: usize| Feature {
            name: "f",
            table: t,
            ids: Ids { address: ids + (t * len * 8) as u64, high: 0, key_type: KeyType::Wide, len },
            bags: if hotness == 1 { Bags::Each } else { Bags::Fixed { num_bags, hotness } },
            combiner: Combiner::Sum,
            weights: weights.map(|weights| weights + (t * len * 4) as u64),
            padding_key: None,
            is_silent: false,
            at_owner: false,
            id_counts: 0,
            scores: None,
            rows: rows + (t * num_bags * dim * array_type.num_bytes()) as u64,
            array_type,
        };
        (0..tables).map(feature).collect()
    }
}

/// Inserts keys of the first `vocabulary` rows into each table.
pub fn fill(bench: &Bench, group: &mut GpuGroup, shape: Shape, vocabulary: u64, rows: u64) {
    let keys: Vec<u64> = (0..vocabulary).map(key_of).collect();
    for some in keys.chunks(shape.samples) {
        let all = Buffer::from_slice(&bench.device.context, &some.repeat(shape.tables)).unwrap();
        let shape = Shape { samples: some.len(), hotness: 1, ..shape };
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe {
            group.lookup(
                &shape.features(all.address(), None, rows),
                Insertion::AtLookup,
                false,
                None,
                bench.stream(),
            )
        }
        .unwrap();
    }
}

pub fn median(times: &[f32]) -> f32 {
    let mut times = times.to_vec();
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

/// Appends raw samples to the file that `SOK_SAMPLES` names.
pub fn keep_samples(name: &str, unit: &str, samples: &[f32]) {
    let Some(path) = std::env::var_os("SOK_SAMPLES") else { return };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
    writeln!(file, "{name} [{unit}]: {samples:?}").unwrap();
}

pub fn nth_key(i: u64) -> u64 {
    hash(i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0)
}

pub fn unit(i: u64) -> f64 {
    ((hash(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Returns one of `rows` rows for a `u` between 0 and 1. With `zipf`, the probability of row r is proportional to 1 / (r + 1)^1.05;
/// otherwise all rows have the same probability.
pub fn draw_row(u: f64, rows: u64, zipf: bool) -> u64 {
    let n = rows as f64;
    let row = if zipf { ((n.powf(-0.05) - 1.0) * u + 1.0).powf(1.0 / -0.05) } else { u * n + 1.0 };
    (row as u64).clamp(1, rows) - 1
}

pub fn key_of(row: u64) -> u64 {
    hash(row + 1)
}

pub const ADAM: Update = Update {
    rule: Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false }),
    weight_decay: None,
    clipvalue: None,
    clipnorm: None,
};

pub fn config(name: &str, dim: usize, initial_capacity: u64) -> TableConfig {
    TableConfig {
        name: name.into(),
        dim,
        vocabulary_size: None,
        initializer: Initializer::Uniform { minval: -0.05, maxval: 0.05 },
        seed: 7,
        missing: Missing::Initial,
        out_of_vocabulary: OutOfVocabulary::Raise,
        out_of_vocabulary_key: None,
        initial_capacity,
        max_capacity: None,
        check_mode: CheckMode::Raise,
        eviction: None,
        admission: None,
        row_type: RowType::Float32,
        stochastic_rounding: false,
        trainable: true,
        optimizer: 0,
        time_to_live: None,
    }
}
