//! A training step of Adam over several tables: find, gather or pool, sort, lists, merge and update, against the figures of
//! FBGEMM's plain arrays on the same kind of GPU; and a check, bit by bit, against the host's tables.
//!
//!     step [check] [a_zipf] [a_uniform] [b] [c] [d]

use std::ffi::c_void;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUevent_flags_enum::{CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING};
use sok_core::batch::{Bags, Combiner, Feature, Keys};
use sok_core::host_group::{ApplyScalars, Binding, HostGroup};
use sok_core::initializer::Initializer;
use sok_core::key::hash;
use sok_core::optimizer::{Rule, Update, UpdateScalars};
use sok_core::pool::Pool;
use sok_core::push::{GradientRows, OutputGradients};
use sok_core::table::{CheckMode, Missing, OutOfVocabulary, TableConfig};
use sok_cuda::device::{Device, Kernel};
use sok_cuda::kernels::{BACKWARD, FORWARD, SORT};
use sok_cuda::layout::{self, Call, Homeless, Table};
use sok_cuda::memory::Buffer;
use sok_cuda::rule;

struct Work {
    name: &'static str,
    tables: usize,
    samples: usize,
    hotness: usize,
    vocabulary: u64,
    dim: usize,
    zipf: bool,
    fbgemm: f32,
    goal: f32,
}

const WORKS: [Work; 5] = [
    Work {
        name: "a_zipf",
        tables: 26,
        samples: 65_536,
        hotness: 1,
        vocabulary: 1_000_000,
        dim: 64,
        zipf: true,
        fbgemm: 2.24,
        goal: 0.70,
    },
    Work {
        name: "a_uniform",
        tables: 26,
        samples: 65_536,
        hotness: 1,
        vocabulary: 1_000_000,
        dim: 64,
        zipf: false,
        fbgemm: 3.24,
        goal: 1.15,
    },
    Work {
        name: "b",
        tables: 26,
        samples: 16_384,
        hotness: 1,
        vocabulary: 1_000_000,
        dim: 64,
        zipf: true,
        fbgemm: 1.20,
        goal: 0.27,
    },
    Work {
        name: "c",
        tables: 8,
        samples: 16_384,
        hotness: 20,
        vocabulary: 4_000_000,
        dim: 64,
        zipf: true,
        fbgemm: 2.28,
        goal: 0.74,
    },
    Work {
        name: "d",
        tables: 10,
        samples: 104_857,
        hotness: 1,
        vocabulary: 1_680_000,
        dim: 128,
        zipf: true,
        fbgemm: 1.70,
        goal: 0.75,
    },
];

macro_rules! launch {
    ($kernel:expr, $stream:expr, $blocks:expr, $threads:expr, $($value:expr),*) => {
        match [$((&$value as *const _ as *mut c_void)),*] {
            // SAFETY: the values' types are the kernel's parameters, as written beside it; buffers live until the end.
            mut list => unsafe { Kernel::launch(&$kernel, $stream.cu_stream(), $blocks as u32, $threads as u32, &mut list).unwrap() },
        }
    };
}

fn key_of(table: usize, row: u64) -> u64 {
    hash((table as u64 + 1) << 40 | row)
}

fn unit(i: u64) -> f64 {
    ((hash(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Ids of a step, table after table.
fn ids(work: &Work, seed: u64) -> Vec<u64> {
    let of_table = work.samples * work.hotness;
    let draw = |i: usize| {
        let u = unit(seed << 32 | i as u64);
        let v = work.vocabulary as f64;
        let row = if work.zipf { ((v.powf(-0.05) - 1.0) * u + 1.0).powf(1.0 / -0.05) } else { u * v + 1.0 };
        key_of(i / of_table, (row as u64).clamp(1, work.vocabulary) - 1)
    };
    (0..of_table * work.tables).map(draw).collect()
}

fn normal(n: usize) -> Vec<f32> {
    let pair = |i: usize| (unit(2 * i as u64 + 77), unit(2 * i as u64 + 78));
    (0..n)
        .map(|i| ((-2.0 * pair(i).0.ln()).sqrt() * (std::f64::consts::TAU * pair(i).1).cos()) as f32)
        .collect()
}

const RATE: f32 = 0.01;
const ADAM: Update = Update {
    rule: Rule::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false },
    weight_decay: None,
    clipvalue: None,
    clipnorm: None,
};
const BLOCK: usize = 128;

struct Kernels {
    find: Kernel,
    settle: Kernel,
    forward: Kernel,
    count: Kernel,
    pass: Kernel,
    list: Kernel,
    apply: Kernel,
}

struct Step<'a> {
    device: &'a Device,
    work: &'a Work,
    update: Update,
    kernels: Kernels,
    stream: std::sync::Arc<CudaStream>,
    side: std::sync::Arc<CudaStream>,
    tables: Vec<Table>,
    counters: Buffer<u32>,
    records: Vec<Buffer<f32>>,
    _memory: Vec<Buffer<u64>>,
    tables_on_device: Buffer<Table>,
    rows: Buffer<f32>,
    gradients: Buffer<f32>,
    pairs: Vec<Buffer<u32>>,
    state: Buffer<u32>,
    told: Buffer<u32>,
    lists: layout::Keys,
    homeless: Homeless,
    num_ids: usize,
    passes: u32,
    step: u64,
}

struct Plan {
    call: Call,
    find_blocks: usize,
    forward_blocks: usize,
    _features: Buffer<layout::Feature>,
    _maps: [Buffer<u32>; 2],
}

impl<'a> Step<'a> {
    fn new(device: &'a Device, work: &'a Work, update: Update, gradients: &[f32]) -> Step<'a> {
        let context = &device.context;
        let (dim, (stride, first_state)) = (work.dim, rule::record_layout(&update.rule, work.dim));
        let forward = format!("{}<{dim}>", if work.hotness == 1 { "gather" } else { "pool" });
        let names = [&format!("find_records<{dim}, true>"), &format!("settle_records<{dim}>"), &*forward];
        let [find, settle, forward] = device.kernels(&FORWARD, names).unwrap();
        let again = work.hotness > 1;
        let updating = format!("update<{dim}, {}, {again}>", rule::type_name(&update.rule));
        let [list, apply] = device.kernels(&BACKWARD, ["list_keys", &updating]).unwrap();
        let [count, pass] = device.kernels(&SORT, ["count_digits<3>", "sort_pass"]).unwrap();
        let n = work.samples * work.hotness * work.tables;
        let mut memory = Vec::new();
        let mut take = |words: usize| {
            memory.push(Buffer::<u64>::new(context, words).unwrap());
            memory.last().unwrap().address()
        };
        let capacity = work.vocabulary as usize + 4096;
        let num_buckets = (capacity as f64 / 0.75 / 5.0) as usize + 1;
        let mut start = vec![0u32; 128 * work.tables];
        start.iter_mut().step_by(128).for_each(|next| *next = 1);
        let counters = Buffer::from_slice(context, &start).unwrap();
        let records: Vec<_> =
            (0..work.tables).map(|_| Buffer::<f32>::new(context, capacity * 4 * stride).unwrap()).collect();
        let tables: Vec<Table> = (0..work.tables)
            .map(|t| Table {
                index: layout::Index {
                    buckets: take(num_buckets * 8),
                    stash: take(1024 * 2),
                    counters: counters.address() + 512 * t as u64,
                    free: take(capacity),
                    num_buckets: num_buckets as u32,
                    pad: 0,
                },
                initializer: layout::Initializer { seed: t as u64, kind: 1, a: -0.05, b: 0.1, pad: 0 },
                records: records[t].address(),
                stride: stride as u32,
                first: (t * capacity) as u32,
                first_state,
                pad: 0,
            })
            .collect();
        let passes = 3;
        assert!(work.tables * capacity <= 1 << 27);
        let lists = layout::Keys {
            lists: 0,
            singles: take(n),
            several: take(2 * n),
            hot: take(2 * (n / layout::HOT + 2)),
            runs: take(2 * (n / layout::RUN + n / layout::HOT + 2)),
            partial: take((n / layout::RUN + n / layout::HOT + 2) * rule::quads(dim) * 2),
        };
        let state = Buffer::<u32>::new(context, 64 + 32 + 4 * 512).unwrap();
        let homeless = Homeless { count: state.address() + 8, ids: take(n / 2 + 1) };
        let lists = layout::Keys { lists: state.address(), ..lists };
        Step {
            device,
            work,
            update,
            kernels: Kernels { find, settle, forward, count, pass, list, apply },
            stream: context.new_stream_with_priority(0).unwrap(),
            side: context.new_stream_with_priority(-5).unwrap(),
            tables_on_device: Buffer::from_slice(context, &tables).unwrap(),
            tables,
            counters,
            records,
            _memory: memory,
            rows: Buffer::new(context, work.samples * work.tables * work.dim).unwrap(),
            gradients: Buffer::from_slice(context, gradients).unwrap(),
            pairs: (0..6).map(|_| Buffer::new(context, n).unwrap()).collect(),
            told: Buffer::new(context, passes as usize * n.div_ceil(512 * 12) * 512).unwrap(),
            state,
            lists,
            homeless,
            num_ids: n,
            passes,
            step: 0,
        }
    }

    /// The features as the kernels see them; ids table after table.
    fn plan(&self, ids: u64, samples: usize, hotness: usize) -> Plan {
        let (dim, of_table, context) = (self.work.dim, samples * hotness, &self.device.context);
        let find_blocks = of_table.div_ceil(BLOCK);
        let groups = 256 / lanes(dim);
        let forward_blocks = samples.div_ceil(if hotness == 1 { 4 * groups } else { groups });
        let feature = |(t, table): (usize, &Table)| layout::Feature {
            ids: ids + (t * of_table * 8) as u64,
            rows: self.rows.address() + (t * samples * dim * 4) as u64,
            gradients: self.gradients.address() + (t * samples * dim * 4) as u64,
            records: table.records,
            stride: table.stride,
            first_record: table.first,
            table: t as u32,
            num_bags: samples as u32,
            hotness: hotness as u32,
            first_id: (t * of_table) as u32,
            first_find: (t * find_blocks) as u32,
            first_forward: (t * forward_blocks) as u32,
        };
        let features: Vec<_> = self.tables.iter().enumerate().map(feature).collect();
        let by_block = |blocks| {
            (0..features.len() as u32).flat_map(|f| std::iter::repeat_n(f, blocks)).collect::<Vec<_>>()
        };
        let (find, forward) = (by_block(find_blocks), by_block(forward_blocks));
        let on_device = Buffer::from_slice(context, &features).unwrap();
        let maps =
            [Buffer::from_slice(context, &find).unwrap(), Buffer::from_slice(context, &forward).unwrap()];
        let call = Call {
            tables: self.tables_on_device.address(),
            features: on_device.address(),
            find_features: maps[0].address(),
            forward_features: maps[1].address(),
            num_features: features.len() as u32,
            shift: usize::BITS - samples.leading_zeros(),
        };
        Plan {
            call,
            find_blocks: find.len(),
            forward_blocks: forward.len(),
            _features: on_device,
            _maps: maps,
        }
    }

    fn fill(&self) {
        // Every key but one in twenty.
        let rows: Vec<u64> =
            (0..self.work.vocabulary).filter(|r| !hash(r * 977).is_multiple_of(20)).collect();
        let most = self.num_ids / self.work.tables;
        for chunk in rows.chunks(most) {
            let keys: Vec<u64> =
                (0..self.work.tables).flat_map(|t| chunk.iter().map(move |&r| key_of(t, r))).collect();
            let ids = Buffer::from_slice(&self.device.context, &keys).unwrap();
            let plan = self.plan(ids.address(), chunk.len(), 1);
            self.find(&plan);
            self.device.context.synchronize().unwrap();
        }
    }

    fn find(&self, plan: &Plan) {
        let call = plan.call;
        let Kernels { find, settle, .. } = &self.kernels;
        let (records, names) = (self.pairs[0].address(), self.pairs[1].address());
        self.state.fill(0, &self.stream).unwrap();
        launch!(find, self.stream, plan.find_blocks, BLOCK, call, records, names, self.homeless);
        launch!(
            settle,
            self.stream,
            4 * self.device.multiprocessors,
            BLOCK,
            call,
            records,
            names,
            self.homeless
        );
    }

    fn run(&mut self, plan: &Plan, marks: Option<&mut Vec<cudarc::driver::CudaEvent>>) {
        self.step += 1;
        let call = plan.call;
        let (work, n) = (self.work, self.num_ids as u32);
        let Kernels { forward, count, pass, list, apply, .. } = &self.kernels;
        let p = |i: usize| self.pairs[i].address();
        let mut marks = marks;
        let mut mark = |stream: &CudaStream| {
            if let Some(marks) = &mut marks {
                let event = self.device.context.new_event(Some(CU_EVENT_DEFAULT)).unwrap();
                event.record(stream).unwrap();
                marks.push(event);
            }
        };
        mark(&self.stream);
        self.find(plan);
        mark(&self.stream);
        let fork = self.stream.record_event(Some(CU_EVENT_DISABLE_TIMING)).unwrap();
        self.side.wait(&fork).unwrap();
        let state = self.state.address() + 64 * 4;
        launch!(count, self.side, (n / 4096).clamp(1, 264), 512, p(0), n, state, self.told.address());
        for number in 0..self.passes {
            let (from, to) = if number == 0 {
                (0, 2)
            } else if number % 2 == 1 {
                (2, 4)
            } else {
                (4, 2)
            };
            launch!(
                pass,
                self.side,
                n.div_ceil(512 * 12),
                512,
                p(from),
                p(from + 1),
                p(to),
                p(to + 1),
                n,
                state,
                self.told.address(),
                number
            );
        }
        let sorted = if self.passes % 2 == 1 { 2 } else { 4 };
        launch!(list, self.side, n.div_ceil(4096), 1024, self.lists, p(sorted), p(sorted + 1), n);
        let join = self.side.record_event(Some(CU_EVENT_DISABLE_TIMING)).unwrap();
        launch!(forward, self.stream, plan.forward_blocks, 256, call, p(0));
        mark(&self.stream);
        self.stream.wait(&join).unwrap();
        mark(&self.stream);
        let now = UpdateScalars { learning_rate: RATE, step: self.step, factor: 1.0 };
        let update_work = layout::Work {
            call,
            keys: self.lists,
            gradient_rows: p(sorted + 1),
            conditioning: rule::conditioning(&self.update, &now),
            scalars: rule::scalars(&self.update.rule, &now),
        };
        let groups = 128 / lanes(work.dim);
        let most = self.num_ids / (groups * 8) * 9 / 8 + self.num_ids / (groups * layout::HOT) + 16;
        launch!(apply, self.stream, most, 128, update_work);
        mark(&self.stream);
    }
}

/// Lanes that share a row.
fn lanes(dim: usize) -> usize {
    rule::quads(dim).next_power_of_two().min(32)
}

fn median(mut times: Vec<f32>) -> f32 {
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

fn time(device: &Device, work: &Work) {
    let gradients =
        normal(1 << 20).into_iter().cycle().take(work.samples * work.tables * work.dim).collect::<Vec<_>>();
    let mut step = Step::new(device, work, ADAM, &gradients);
    step.fill();
    let batches: Vec<_> =
        (0..20).map(|seed| Buffer::from_slice(&device.context, &ids(work, seed)).unwrap()).collect();
    let (mut whole, mut parts) = (Vec::new(), vec![Vec::new(); 4]);
    let before = step.counters.to_vec().unwrap();
    for (number, batch) in batches.iter().enumerate() {
        let plan = step.plan(batch.address(), work.samples, work.hotness);
        device.context.synchronize().unwrap();
        let begin = device.context.new_event(Some(CU_EVENT_DEFAULT)).unwrap();
        let end = device.context.new_event(Some(CU_EVENT_DEFAULT)).unwrap();
        let stream = step.stream.clone();
        begin.record(&stream).unwrap();
        step.run(&plan, None);
        end.record(&stream).unwrap();
        device.context.synchronize().unwrap();
        if number >= 4 {
            whole.push(begin.elapsed_ms(&end).unwrap());
        }
        let mut marks = Vec::new();
        step.run(&plan, Some(&mut marks));
        device.context.synchronize().unwrap();
        if number >= 4 {
            for (part, pair) in parts.iter_mut().zip(marks.windows(2)) {
                part.push(pair[0].elapsed_ms(&pair[1]).unwrap() * 1e3);
            }
        }
    }
    let new: u32 = step.counters.to_vec().unwrap().iter().zip(&before).step_by(128).map(|(a, b)| a - b).sum();
    let lists = step.state.to_vec().unwrap();
    let parts: Vec<_> = parts.into_iter().map(|p| format!("{:.0}", median(p))).collect();
    let ms = median(whole);
    println!(
        "{}: {ms:.3} ms (goal {}, FBGEMM {} = x{:.2}); again, all keys known: find, gather, wait, update us: {}; new a step {}, singles {} several {} hot {} runs {} homeless {}",
        work.name,
        work.goal,
        work.fbgemm,
        work.fbgemm / ms,
        parts.join(" "),
        new / 20,
        lists[0],
        lists[1],
        lists[33],
        lists[32],
        lists[2],
    );
}

/// A few steps of small tables, bit by bit.
fn check(device: &Device) {
    let adam = |amsgrad| Rule::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad };
    let rms = |momentum, centered| Rule::RmsProp { rho: 0.9, momentum, epsilon: 1e-7, centered };
    let ftrl = |learning_rate_power| Rule::Ftrl {
        learning_rate_power,
        initial_accumulator_value: 0.1,
        l1_regularization_strength: 0.01,
        l2_regularization_strength: 0.02,
        l2_shrinkage_regularization_strength: 0.03,
        beta: 0.1,
    };
    let (initial_accumulator_value, epsilon) = (0.1, 1e-7);
    let rules = [
        adam(false),
        adam(true),
        Rule::Sgd { momentum: 0.0, nesterov: false },
        Rule::Sgd { momentum: 0.9, nesterov: false },
        Rule::Sgd { momentum: 0.9, nesterov: true },
        Rule::Adagrad { initial_accumulator_value, epsilon },
        Rule::RowWiseAdagrad { initial_accumulator_value, epsilon },
        rms(0.0, false),
        rms(0.9, true),
        ftrl(-0.5),
        ftrl(-0.3),
    ];
    let of_dims = [
        (64, 1),
        (64, 5),
        (128, 1),
        (128, 20),
        (1, 1),
        (3, 4),
        (8, 1),
        (17, 3),
        (100, 1),
        (257, 2),
        (1024, 1),
    ];
    let cases = of_dims.iter().map(|&(dim, hotness)| (dim, hotness, rules[0]));
    let cases =
        cases.chain(rules[1..].iter().flat_map(|&rule| [(64, 1, rule), (17, 3, rule), (257, 1, rule)]));
    for (number, (dim, hotness, rule)) in cases.enumerate() {
        let work = Work {
            name: "check",
            tables: 3,
            samples: 2048,
            hotness,
            vocabulary: 3000,
            dim,
            zipf: number % 2 == 0,
            fbgemm: 0.0,
            goal: 0.0,
        };
        let gradients = normal(work.samples * work.tables * dim);
        let update = Update {
            rule,
            weight_decay: (number % 3 == 1).then_some(0.01),
            clipvalue: (number % 3 == 2).then_some(0.7),
            clipnorm: None,
        };
        let mut step = Step::new(device, &work, update, &gradients);
        let config = |t: usize| TableConfig {
            name: format!("t{t}"),
            dim,
            vocabulary_size: None,
            initializer: Initializer::Uniform { minval: -0.05, maxval: 0.05 },
            seed: t as u64,
            missing: Missing::Initial,
            out_of_vocabulary: OutOfVocabulary::Raise,
            initial_capacity: 0,
            max_capacity: None,
            check_mode: CheckMode::Raise,
        };
        let mut group = HostGroup::new((0..3).map(config).collect()).unwrap();
        let pool = Pool::new(4).unwrap();
        let binding = Binding { owner: 1, update, needs_norm: false };
        group.bind(binding).unwrap();
        let of_rows = work.samples * dim;
        for number in 0..4 {
            let keys = ids(&work, 50 + number);
            let features: Vec<_> = keys
                .chunks(work.samples * hotness)
                .enumerate()
                .map(|(table, keys)| Feature {
                    name: "f",
                    table,
                    keys: Keys::U64(keys),
                    bags: Bags::Fixed { num_bags: work.samples, hotness },
                    combiner: Combiner::Sum,
                    weights: None,
                    padding_key: None,
                })
                .collect();
            let mut expected = vec![0f32; 3 * of_rows];
            let lookup =
                group.lookup(&features, true, true, expected.chunks_mut(of_rows).collect(), &pool).unwrap();
            let batch = Buffer::from_slice(&device.context, &keys).unwrap();
            let plan = step.plan(batch.address(), work.samples, hotness);
            step.run(&plan, None);
            let rows = step.rows.to_vec().unwrap();
            let wrong = rows.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(
                wrong,
                0,
                "{}, dim {dim}, {hotness} a bag, step {number}: outputs differ",
                rule::type_name(&rule)
            );
            // SAFETY: the gradients outlive the group's use of them.
            let held = gradients
                .chunks(of_rows)
                .map(|g| unsafe { GradientRows::new(g.as_ptr(), g.len()) })
                .collect();
            let mut ticket = [0f32; 128];
            let output = OutputGradients { rows: held, keep: None, check_finite: false };
            group.push(lookup, output, vec![], &mut ticket, &pool).unwrap();
            let named = group.resolve(&ticket).unwrap();
            group.commit(&named, true, &pool).unwrap();
            let scalars = UpdateScalars { learning_rate: RATE, step: number + 1, factor: 1.0 };
            group.apply(&binding, &ApplyScalars { update: scalars, is_update: true }, &pool).unwrap();
        }
        // Every record, states included.
        let counts = step.counters.to_vec().unwrap();
        let mut compared = 0;
        for t in 0..3 {
            let mut all = sok_core::table::Records::default();
            group.table(t).scan(Default::default(), 1 << 20, &mut all);
            assert_eq!(
                all.keys.len() as u32,
                counts[128 * t] - 1 - counts[128 * t + 32],
                "keys of table {t}"
            );
            let records = step.records[t].to_vec().unwrap();
            for chunk in (0..all.keys.len()).step_by(work.samples) {
                let mut keys = vec![0u64; work.samples * 3];
                let part = &all.keys[chunk..(chunk + work.samples).min(all.keys.len())];
                keys[t * work.samples..][..part.len()].copy_from_slice(part);
                (0..3)
                    .filter(|&u| u != t)
                    .for_each(|u| keys[u * work.samples..][..work.samples].fill(key_of(u, 0)));
                keys[t * work.samples + part.len()..(t + 1) * work.samples].fill(part[0]);
                let ids = Buffer::from_slice(&device.context, &keys).unwrap();
                let plan = step.plan(ids.address(), work.samples, 1);
                step.find(&plan);
                let numbers = step.pairs[0].to_vec().unwrap();
                let stride = 4 * step.tables[t].stride as usize;
                let widths: Vec<usize> =
                    std::iter::once(dim).chain(rule.states(dim).iter().map(|s| s.width)).collect();
                let width: usize = widths.iter().sum();
                for i in 0..part.len() {
                    let number = (numbers[t * work.samples + i] - step.tables[t].first) as usize;
                    let (mut got, mut expected) =
                        (&records[number * stride..][..stride], &all.values[(chunk + i) * width..][..width]);
                    for &width in &widths {
                        let same =
                            got.iter().zip(&expected[..width]).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "{}, dim {dim}, {hotness} a bag: a record of table {t} differs\n{:?}\n{:?}",
                            rule::type_name(&rule),
                            &got[..width.min(8)],
                            &expected[..width.min(8)]
                        );
                        (got, expected) = (&got[4 * rule::quads(width)..], &expected[width..]);
                    }
                    compared += 1;
                }
            }
        }
        println!(
            "{}, dim {dim}, {hotness} a bag: 4 steps, {compared} records with their states equal the host's bit for bit",
            rule::type_name(&rule)
        );
    }
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    let device = Device::open(0, &[]).unwrap();
    println!("# {}", device.context.name().unwrap());
    if is_wanted("check") {
        check(&device);
    }
    WORKS.iter().filter(|w| is_wanted(w.name)).for_each(|work| time(&device, work));
}
