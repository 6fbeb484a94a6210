//! What the benches share: the device and what is written above a table of figures, keys, times.
#![allow(dead_code, reason = "each bench uses its part")]

use std::io::Write;
use std::process::Command;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaEvent, CudaStream};
use sok_core::initializer::Initializer;
use sok_core::key::hash;
use sok_core::optimizer::{Rule, Update};
use sok_core::table::{CheckMode, Missing, OutOfVocabulary, TableConfig};
use sok_cuda::device::{Device, Stream};

pub struct Bench {
    pub device: Arc<Device>,
    pub stream: Arc<CudaStream>,
}

impl Bench {
    /// Prints what the figures depend on.
    pub fn start(what: &str) -> Bench {
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
        println!("\n## {what}\n{name}, driver {driver}, commit {commit}, {date}; medians of CUDA events\n");
        let stream = device.context.new_stream().unwrap();
        Bench { device, stream }
    }

    pub fn stream(&self) -> Stream {
        Stream(self.stream.cu_stream())
    }

    pub fn mark(&self) -> CudaEvent {
        let event = self.device.context.new_event(Some(CU_EVENT_DEFAULT)).unwrap();
        event.record(&self.stream).unwrap();
        event
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

/// One of so many rows: row r as likely as 1 / (r + 1)^1.05, or all alike.
pub fn draw_row(u: f64, rows: u64, zipf: bool) -> u64 {
    let n = rows as f64;
    let row = if zipf { ((n.powf(-0.05) - 1.0) * u + 1.0).powf(1.0 / -0.05) } else { u * n + 1.0 };
    (row as u64).clamp(1, rows) - 1
}

pub fn key_of(row: u64) -> u64 {
    hash(row + 1)
}

pub const ADAM: Update = Update {
    rule: Rule::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false },
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
        initial_capacity,
        max_capacity: None,
        check_mode: CheckMode::Raise,
    }
}
