//! Training steps of Adam over the tables of a layer.

use sok_core::contract::binding::{Binding, UpdateMode};
use sok_core::contract::group::Group;
use sok_core::contract::table::{Insertion, TableConfig};
use sok_core::formula::update::UpdateScalars;
use sok_core::key::Key;
use sok_core::row_type::RowType;
use sok_cuda::gpu_group::optimizer;
use sok_cuda::gpu_group::{GpuGroup, LookupNumber, OutputGradients};
use sok_cuda::memory::Buffer;
use sok_cuda::step::{ScoreType, Scores};

use super::{ADAM, Bench, Shape, config, draw_row, key_of, unit};

/// What is looked up.
#[derive(Clone)]
pub struct Work {
    pub name: &'static str,
    pub tables: usize,
    pub samples: usize,
    pub hotness: usize,
    pub vocabulary: u64,
    pub dim: usize,
    pub zipf: bool,
    /// Whether ids have weights, which get gradients too.
    pub weighted: bool,
    /// Type of the rows, and whether updates round them by chance.
    pub row_type: (RowType, bool),
    /// Type of the arrays of rows and gradients.
    pub array_type: RowType,
    /// FBGEMM's milliseconds; 0 if unknown.
    pub fbgemm: f32,
    /// Milliseconds that we want to reach, with held and with merged gradients.
    pub goals: [f32; 2],
}

pub const fn work(
    name: &'static str,
    tables: usize,
    samples: usize,
    hotness: usize,
    vocabulary: u64,
) -> Work {
    Work {
        name,
        tables,
        samples,
        hotness,
        vocabulary,
        dim: 64,
        zipf: true,
        weighted: false,
        row_type: (RowType::Float32, false),
        array_type: RowType::Float32,
        fbgemm: 0.0,
        goals: [0.0; 2],
    }
}

impl Work {
    pub fn shape(&self) -> Shape {
        let Work { tables, samples, hotness, dim, array_type, .. } = *self;
        Shape { tables, samples, hotness, dim, array_type }
    }

    pub fn configs(&self, initial_capacity: u64) -> Vec<TableConfig> {
        let (row_type, stochastic_rounding) = self.row_type;
        let table = |t| TableConfig {
            row_type,
            stochastic_rounding,
            ..config(&format!("t{t}"), self.dim, initial_capacity)
        };
        (0..self.tables).map(table).collect()
    }
}

/// Returns the ids of a step, one table after the other. One in a hundred belongs to a row that no earlier step used.
pub fn ids(work: &Work, step: usize) -> Vec<Key> {
    let of_table = work.samples * work.hotness;
    let draw = |i: usize| {
        if i % 100 == 7 {
            return key_of(work.vocabulary + (step * of_table + i % of_table) as u64);
        }
        let u = unit((step as u64 + 1) << 32 | i as u64);
        key_of(draw_row(u, work.vocabulary, work.zipf))
    };
    (0..of_table * work.tables).map(draw).collect()
}

pub fn normal(n: usize) -> Vec<f32> {
    let pair = |i: usize| (unit(2 * i as u64 + 77), unit(2 * i as u64 + 78));
    let draw = |i| ((-2.0 * pair(i).0.ln()).sqrt() * (std::f64::consts::TAU * pair(i).1).cos()) as f32;
    let some: Vec<f32> = (0..n.min(1 << 20)).map(draw).collect();
    some.into_iter().cycle().take(n).collect()
}

/// Copies numbers to the device, rounded to this type.
fn array_of(bench: &Bench, numbers: &[f32], array_type: RowType) -> Buffer<u8> {
    let mut bytes = vec![0; numbers.len() * array_type.num_bytes()];
    array_type.write(numbers, &mut bytes);
    Buffer::from_slice(&bench.device.context, &bytes).unwrap()
}

/// A group on a GPU, and the tensors of its steps.
pub struct Gpu<'a> {
    pub bench: &'a Bench,
    pub work: &'a Work,
    pub group: GpuGroup,
    pub binding: Binding,
    pub rows: Buffer<f32>,
    /// Numbers of the arrays' type.
    gradients: Buffer<u8>,
    weights: Buffer<f32>,
    /// Of each id, if ids come with scores.
    scores: Option<Buffer<i64>>,
    weight_gradients: Buffer<f32>,
    ticket: Buffer<f32>,
    norm: Buffer<f32>,
    triggers: [Buffer<f32>; 2],
}

impl<'a> Gpu<'a> {
    pub fn new(bench: &'a Bench, work: &'a Work, gradients: &[f32]) -> Gpu<'a> {
        Gpu::with_tables(bench, work, work.configs(work.vocabulary * 11 / 10), gradients)
    }

    pub fn with_tables(
        bench: &'a Bench,
        work: &'a Work,
        configs: Vec<TableConfig>,
        gradients: &[f32],
    ) -> Gpu<'a> {
        let context = &bench.device.context;
        let mut group = GpuGroup::new(&bench.device, configs).unwrap();
        let weights = normal(if work.weighted { work.samples * work.hotness * work.tables } else { 0 });
        let binding = Binding::new(1, ADAM, false);
        group.bind(binding.clone()).unwrap();
        Gpu {
            group,
            binding,
            rows: Buffer::new(context, gradients.len()).unwrap(),
            gradients: array_of(bench, gradients, work.array_type),
            weights: Buffer::from_slice(context, &weights).unwrap(),
            scores: None,
            weight_gradients: Buffer::new(context, weights.len()).unwrap(),
            ticket: Buffer::new(context, 128).unwrap(),
            norm: Buffer::new(context, 1).unwrap(),
            triggers: [Buffer::new(context, 128).unwrap(), Buffer::new(context, 128).unwrap()],
            bench,
            work,
        }
    }

    /// Sets which rows a step updates.
    pub fn set_mode(&mut self, mode: UpdateMode) {
        self.binding = Binding { mode, ..self.binding.clone() };
        self.group.bind(self.binding.clone()).unwrap();
    }

    /// Lets the ids of later steps come with scores.
    pub fn give_scores(&mut self) {
        let len = self.work.samples * self.work.hotness * self.work.tables;
        let scores: Vec<i64> = (0..len as i64).collect();
        self.scores = Some(Buffer::from_slice(&self.bench.device.context, &scores).unwrap());
    }

    pub fn step(&mut self, ids: &Buffer<u64>, scalars: &Buffer<f32>, hold: bool) {
        let stream = self.bench.stream();
        let weights = self.work.weighted.then(|| self.weights.address());
        let mut features = self.work.shape().features(ids.address(), weights, self.rows.address());
        if let Some(scores) = &self.scores {
            let of_table = self.work.samples * self.work.hotness;
            for (t, feature) in features.iter_mut().enumerate() {
                feature.scores =
                    Some(Scores { address: scores.at(t * of_table), score_type: ScoreType::Wide });
            }
        }
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        let number =
            unsafe { self.group.lookup(&features, Insertion::AtLookup, true, None, stream) }.unwrap();
        let len = self.work.samples * self.work.dim;
        let array_type = self.work.array_type;
        let row_bytes = len * array_type.num_bytes();
        let rows: Vec<u64> = (0..self.work.tables).map(|t| self.gradients.at(t * row_bytes)).collect();
        let keep = hold.then(|| Box::new(()) as _);
        let gradients = OutputGradients { rows, array_type, keep, check_finite: false };
        let lens = vec![len; self.work.tables];
        let of_table = self.work.samples * self.work.hotness;
        let weighted = (0..self.work.tables).filter(|_| self.work.weighted);
        let weight_gradients: Vec<_> =
            weighted.map(|t| (t, self.weight_gradients.at(t * of_table))).collect();
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe {
            self.group.push(
                LookupNumber::Known(number),
                gradients,
                &lens,
                &weight_gradients,
                self.ticket.address(),
                stream,
            )
        }
        .unwrap();
        let groups = &mut [&mut self.group];
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe {
            optimizer::commit(
                groups,
                std::slice::from_ref(&self.binding),
                &[self.ticket.address()],
                None,
                self.norm.address(),
                stream,
            )
        }
        .unwrap();
        let triggers = [(self.triggers[0].address(), self.triggers[1].address())];
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe {
            optimizer::apply(
                groups,
                std::slice::from_ref(&self.binding),
                scalars.address(),
                false,
                &triggers,
                stream,
            )
        }
        .unwrap();
    }
}

pub fn scalars(step: usize) -> UpdateScalars {
    UpdateScalars { learning_rate: 0.01, step: step as u64 + 1, factor: 1.0 }
}
