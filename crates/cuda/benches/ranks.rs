//! A training step over tables that ranks share, one rank for each GPU, beside the same step on one GPU with the same batch a rank.
//! Each step has other ids, of which one in a hundred is new.
//!
//!     ranks [name ...]          SOK_RANKS: number of ranks (2)

mod common;

use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::dense::Dense;
use common::{ADAM, Bench, config, draw_row, keep_samples, key_of, median, time_in_a_row, unit};
use sok_core::contract::batch::Combiner;
use sok_core::contract::binding::Binding;
use sok_core::contract::group::Group;
use sok_core::contract::profile::StepPart;
use sok_core::contract::table::{Insertion, TableConfig};
use sok_core::exchange::collectives::gather;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Call, Tag};
use sok_core::exchange::placement::Placement;
use sok_core::exchange::tcp::TcpRank;
use sok_core::formula::update::Update;
use sok_core::formula::{Formula, RowWiseAdagrad, Rule};
use sok_core::key::Key;
use sok_core::row_type::RowType;
use sok_cuda::gpu_group::sharded::{self, ShardedGpuGroup};
use sok_cuda::gpu_group::{GpuGroup, LookupNumber, OutputGradients, optimizer};
use sok_cuda::memory::Buffer;
use sok_cuda::nccl::{Nccl, Transfer};
use sok_cuda::peers::{Exchange, Peers};
use sok_cuda::step::{Bags, Feature, Ids, KeyType};

struct Work {
    name: &'static str,
    /// By table: ids of a sample.
    hotness: &'static [usize],
    samples: usize,
    dim: usize,
    vocabulary: u64,
    is_zipf: bool,
    update: Update,
    /// Whether each table is on one rank.
    is_localized: bool,
}

/// Ids of a sample in each table of MLPerf's DCNv2.
const DCN: [usize; 26] = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1];

fn works() -> Vec<Work> {
    let row_wise = Update { rule: Rule::RowWiseAdagrad(RowWiseAdagrad::VARIANTS[0]), ..ADAM };
    let zipf = |name, samples| Work {
        name,
        hotness: &[1; 26],
        samples,
        dim: 64,
        vocabulary: 1_000_000,
        is_zipf: true,
        update: ADAM,
        is_localized: false,
    };
    let dcn = |name, is_localized| Work {
        name,
        hotness: &DCN,
        samples: 6912,
        dim: 128,
        vocabulary: 1_000_000,
        is_zipf: true,
        update: row_wise,
        is_localized,
    };
    vec![
        zipf("26 x 65,536, dim 64, Zipf, Adam", 65_536),
        zipf("26 x 16,384, dim 64, Zipf, Adam", 16_384),
        dcn("DCNv2: 26 tables, 214 ids x 6,912, dim 128, Zipf, row-wise Adagrad", false),
        dcn("DCNv2, each table on one rank", true),
        // The planner's constants were not fitted to these (`shapes.rs`).
        Work {
            hotness: &[1; 12],
            dim: 128,
            vocabulary: 2_000_000,
            ..zipf("12 x 32,768, dim 128, Zipf", 32_768)
        },
        Work { hotness: &[1; 40], dim: 32, vocabulary: 500_000, ..zipf("40 x 8,192, dim 32, Zipf", 8_192) },
        Work {
            hotness: &[10; 16],
            dim: 16,
            vocabulary: 3_000_000,
            ..zipf("16 x 10 ids x 8,192, dim 16, sum, Zipf", 8_192)
        },
        Work {
            hotness: &[1; 6],
            dim: 32,
            vocabulary: 5_000_000,
            is_zipf: false,
            ..zipf("6 x 131,072, dim 32, uniform", 131_072)
        },
        Work { hotness: &[5; 4], dim: 256, ..zipf("4 x 5 ids x 16,384, dim 256, sum, Zipf", 16_384) },
    ]
}

const WARM: usize = 6;
const TIMED: usize = 20;

impl Work {
    fn num_ids(&self) -> usize {
        self.samples * self.hotness.iter().sum::<usize>()
    }

    /// By table. Tables on one rank are dealt out so that ranks have about as many ids each.
    fn placements(&self, ranks: usize) -> Vec<Placement> {
        if !self.is_localized {
            return vec![Placement::Distributed; self.hotness.len()];
        }
        let mut tables: Vec<usize> = (0..self.hotness.len()).collect();
        tables.sort_by_key(|&table| std::cmp::Reverse(self.hotness[table]));
        let (mut loads, mut placements) = (vec![0; ranks], vec![Placement::Distributed; tables.len()]);
        for table in tables {
            let rank = (0..ranks).min_by_key(|&rank| loads[rank]).unwrap();
            loads[rank] += self.hotness[table];
            placements[table] = Placement::Localized(rank);
        }
        placements
    }

    fn num_floats(&self) -> usize {
        self.samples * self.hotness.len() * self.dim
    }

    /// The ids of a step, one table after the other.
    fn ids(&self, step: usize) -> Vec<Key> {
        let mut ids = Vec::with_capacity(self.num_ids());
        for i in 0..self.num_ids() {
            let number = (step as u64 + 1) << 32 | i as u64;
            ids.push(match i % 100 {
                7 => key_of(self.vocabulary + number),
                _ => key_of(draw_row(unit(number), self.vocabulary, self.is_zipf)),
            });
        }
        ids
    }

    fn features(&self, ids: u64, rows: u64) -> Vec<Feature<'static>> {
        let (mut first, mut features) = (0, Vec::new());
        for (table, &hotness) in self.hotness.iter().enumerate() {
            let (num_bags, len) = (self.samples, self.samples * hotness);
            features.push(Feature {
                name: "f",
                table,
                ids: Ids { address: ids + 8 * first as u64, high: 0, key_type: KeyType::Wide, len },
                bags: if hotness == 1 { Bags::Each } else { Bags::Fixed { num_bags, hotness } },
                combiner: Combiner::Sum,
                weights: None,
                padding_key: None,
                is_silent: false,
                at_owner: false,
                id_counts: 0,
                scores: None,
                rows: rows + (4 * table * self.samples * self.dim) as u64,
                array_type: RowType::Float32,
            });
            first += len;
        }
        features
    }
}

/// The tables of a rank, or of one GPU alone.
enum Tables {
    Alone(Box<GpuGroup>),
    Shared(Box<ShardedGpuGroup>),
}

struct Steps<'a> {
    bench: &'a Bench,
    work: &'a Work,
    tables: Tables,
    binding: Binding,
    rows: Buffer<f32>,
    gradients: Buffer<f32>,
    ticket: Buffer<f32>,
    norm: Buffer<f32>,
    scalars: Buffer<f32>,
    triggers: [Buffer<f32>; 2],
    how: How<'a>,
}

/// How steps are made.
#[derive(Clone, Copy, Default)]
struct How<'a> {
    /// Whether the ids of the next step are told.
    knows_next: bool,
    /// Work between a lookup and its gradients.
    dense: Option<&'a Dense>,
}

impl<'a> Steps<'a> {
    fn new(bench: &'a Bench, work: &'a Work, mut tables: Tables, how: How<'a>) -> Steps<'a> {
        let context = &bench.device.context;
        let binding = Binding::new(1, work.update, false);
        tables.group().bind(binding.clone()).unwrap();
        let gradients: Vec<f32> = (0..work.num_floats()).map(|i| unit(i as u64) as f32 - 0.5).collect();
        Steps {
            bench,
            work,
            tables,
            binding,
            rows: Buffer::new(context, work.num_floats()).unwrap(),
            gradients: Buffer::from_slice(context, &gradients).unwrap(),
            ticket: Buffer::new(context, 128).unwrap(),
            norm: Buffer::new(context, 1).unwrap(),
            scalars: Buffer::from_slice(context, &[0.01, 1.0, 1.0, 1.0]).unwrap(),
            triggers: [Buffer::new(context, 128).unwrap(), Buffer::new(context, 128).unwrap()],
            how,
        }
    }

    /// Tells the ranks the ids of the next step.
    fn prefetch(&mut self, ids: &Buffer<u64>) {
        let features = self.work.features(ids.address(), 0);
        if let Tables::Shared(group) = &mut self.tables {
            // SAFETY: The buffer is on this device, and lives until it has been waited for.
            unsafe { group.prefetch(&features, Box::new(()), None) }.unwrap();
        }
    }

    fn step(&mut self, ids: &Buffer<u64>) {
        let stream = self.bench.stream();
        let features = self.work.features(ids.address(), self.rows.address());
        let len = self.work.samples * self.work.dim;
        let rows: Vec<u64> = (0..features.len()).map(|table| self.gradients.at(table * len)).collect();
        let lens = vec![len; features.len()];
        let array_type = RowType::Float32;
        let output = OutputGradients { rows, array_type, keep: Some(Box::new(())), check_finite: false };
        let (ticket, norm) = (self.ticket.address(), self.norm.address());
        let (bindings, tickets, scalars) = ([self.binding.clone()], [ticket], self.scalars.address());
        let triggers = [(self.triggers[0].address(), self.triggers[1].address())];
        let dense = self.how.dense;
        match &mut self.tables {
            Tables::Alone(group) => {
                // SAFETY: The buffers are on this device, and live until it has been waited for.
                let number =
                    unsafe { group.lookup(&features, Insertion::AtLookup, true, None, stream) }.unwrap();
                dense.iter().for_each(|dense| dense.run());
                // SAFETY: As above.
                unsafe { group.push(LookupNumber::Known(number), output, &lens, &[], ticket, stream) }
                    .unwrap();
                // SAFETY: As above.
                unsafe { optimizer::commit(&mut [group], &bindings, &tickets, None, norm, stream) }.unwrap();
                // SAFETY: As above.
                unsafe { optimizer::apply(&mut [group], &bindings, scalars, false, &triggers, stream) }
                    .unwrap();
            }
            Tables::Shared(group) => {
                // SAFETY: The buffers are on this device, and live until it has been waited for.
                let number =
                    unsafe { group.lookup(&features, Insertion::AtLookup, true, None, stream) }.unwrap();
                dense.iter().for_each(|dense| dense.run());
                // SAFETY: As above.
                unsafe { group.push(LookupNumber::Known(number), output, &lens, &[], ticket, stream) }
                    .unwrap();
                // SAFETY: As above.
                unsafe { sharded::commit(&mut [group], &bindings, &tickets, None, norm, stream) }.unwrap();
                let shard = group.shard_mut();
                // SAFETY: As above.
                unsafe { optimizer::apply(&mut [shard], &bindings, scalars, false, &triggers, stream) }
                    .unwrap();
            }
        }
    }

    /// Inserts the keys of the vocabulary, of which each rank asks for a part.
    fn fill(&mut self, rank: usize, ranks: usize) {
        let keys: Vec<Key> = (0..self.work.vocabulary).skip(rank).step_by(ranks).map(key_of).collect();
        for some in keys.chunks(self.work.samples) {
            let ids = Buffer::from_slice(&self.bench.device.context, some).unwrap();
            let feature = |table: usize| Feature {
                table,
                ids: Ids { address: ids.address(), high: 0, key_type: KeyType::Wide, len: some.len() },
                bags: Bags::Each,
                rows: self.rows.at(table * self.work.samples * self.work.dim),
                ..self.work.features(0, 0)[0]
            };
            let features: Vec<Feature> = (0..self.work.hotness.len()).map(feature).collect();
            let stream = self.bench.stream();
            match &mut self.tables {
                // SAFETY: The buffers are on this device, and live until it has been waited for.
                Tables::Alone(group) => unsafe {
                    group.lookup(&features, Insertion::AtLookup, false, None, stream)
                },
                // SAFETY: As above.
                Tables::Shared(group) => unsafe {
                    group.lookup(&features, Insertion::AtLookup, false, None, stream)
                },
            }
            .unwrap();
            self.bench.device.synchronize().unwrap();
        }
    }

    /// Milliseconds a step, and microseconds of the host for one.
    fn time(&mut self, first_step: usize) -> (Vec<f32>, f32) {
        let upload =
            |step| Buffer::from_slice(&self.bench.device.context, &self.work.ids(first_step + step)).unwrap();
        let inputs: Vec<Buffer<u64>> = (0..WARM + TIMED).map(upload).collect();
        inputs[..WARM].iter().for_each(|ids| self.step(ids));
        let bench = self.bench;
        let next: Vec<_> = (WARM..inputs.len()).map(|i| (&inputs[i], inputs.get(i + 1))).collect();
        if self.how.knows_next {
            self.prefetch(&inputs[WARM]);
        }
        let times = time_in_a_row(bench, &next, |(ids, next)| {
            if let Some(next) = next.filter(|_| self.how.knows_next) {
                self.prefetch(next);
            }
            self.step(ids);
        });
        let host: Vec<f32> = inputs
            .iter()
            .map(|ids| {
                bench.device.synchronize().unwrap();
                let start = Instant::now();
                self.step(ids);
                start.elapsed().as_secs_f32() * 1e6
            })
            .collect();
        (times, median(&host))
    }

    /// Microseconds of each part of a step.
    fn parts(&mut self, first_step: usize) -> String {
        self.tables.group().measure(true);
        const STEPS: usize = 8;
        for step in 0..STEPS {
            let ids =
                Buffer::from_slice(&self.bench.device.context, &self.work.ids(first_step + step)).unwrap();
            self.step(&ids);
        }
        let profile = self.tables.group().take_profile().unwrap();
        self.tables.group().measure(false);
        let text = |part: StepPart| {
            let times = profile.get(part);
            format!(
                "{} {:.0} in {}",
                part.name(),
                times.time.as_secs_f64() * 1e6 / STEPS as f64,
                times.runs as usize / STEPS
            )
        };
        StepPart::ALL
            .into_iter()
            .filter(|part| profile.get(*part).runs > 0)
            .map(text)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl Tables {
    fn group(&mut self) -> &mut dyn Group {
        match self {
            Tables::Alone(group) => &mut **group,
            Tables::Shared(group) => &mut **group,
        }
    }
}

fn variable(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// The ranks of this run, as one of them sees them.
struct Ranks {
    bench: Bench,
    communicator: Arc<dyn Communicator>,
    rank: usize,
    ranks: usize,
    /// Number of the last meeting, and of the last layer.
    meetings: u64,
    layers: u32,
}

impl Ranks {
    fn meet(&mut self) {
        self.meetings += 1;
        let tag = Tag { call: Call::Barrier, layer: 9, step: self.meetings, round: 0 };
        gather(&*self.communicator, tag, Ok(Vec::new())).unwrap();
    }

    fn connect(&self, exchange: Exchange, layer: u32) -> Result<Arc<Peers>, String> {
        let tag = Tag { call: Call::Barrier, layer, step: 0, round: 0 };
        let peers = Peers::connect(self.communicator.clone(), &self.bench.device, exchange, &[], tag);
        peers.unwrap().map(Arc::new)
    }

    fn group(&mut self, work: &Work, configs: &[TableConfig], peers: &Arc<Peers>) -> Box<ShardedGpuGroup> {
        self.layers += 1;
        let configs = configs.iter().cloned().zip(work.placements(self.ranks)).collect();
        let group = ShardedGpuGroup::new(
            &self.bench.device,
            configs,
            peers,
            self.layers,
            self.ranks,
            RowType::Float32,
        );
        Box::new(group.unwrap())
    }

    /// Times a step of all ranks. Returns it, the time of the host, and the parts of a step.
    fn time(
        &mut self,
        work: &Work,
        configs: &[TableConfig],
        peers: &Arc<Peers>,
        name: &str,
        how: How,
    ) -> (f32, f32, String) {
        let (rank, ranks) = (self.rank, self.ranks);
        let group = self.group(work, configs, peers);
        let bench = &self.bench;
        let mut steps = Steps::new(bench, work, Tables::Shared(group), how);
        steps.fill(rank, ranks);
        let tag = Tag { call: Call::Barrier, layer: 7, step: self.layers.into(), round: 0 };
        gather(&*self.communicator, tag, Ok(Vec::new())).unwrap();
        let (times, host) = steps.time(rank << 20);
        keep_samples(&format!("ranks {}, {ranks} GPUs, {name}", work.name), "ms", &times);
        let parts = steps.parts((rank << 20) + 1000);
        drop(steps);
        self.meet();
        (median(&times), host, parts)
    }

    /// GB/s that leave each rank while its owners write rows, for this many bytes. Keys are distinct and known.
    fn rows_per_second(&mut self, peers: &Arc<Peers>, bytes: usize) -> f64 {
        let (rank, ranks) = (self.rank, self.ranks);
        // Of the keys of a rank one in `ranks` is its own.
        let samples = bytes / 256 / 8 * ranks / (ranks - 1);
        let work = Work {
            name: "rows",
            hotness: &[1; 8],
            samples,
            dim: 64,
            vocabulary: (samples * ranks) as u64,
            is_zipf: true,
            update: ADAM,
            is_localized: false,
        };
        let configs: Vec<_> =
            (0..8).map(|t| config(&format!("t{t}"), 64, work.vocabulary * 11 / 10)).collect();
        let mut group = self.group(&work, &configs, peers);
        let context = &self.bench.device.context;
        let keys: Vec<Key> = (0..samples).map(|i| key_of((i * ranks + rank) as u64)).collect();
        let ids = Buffer::from_slice(context, &keys.repeat(8)).unwrap();
        let rows = Buffer::<f32>::uninit(context, work.num_floats()).unwrap();
        let features = work.features(ids.address(), rows.address());
        let mut times = Vec::new();
        for turn in 0..16 {
            self.meet();
            group.shard_mut().measure(turn > 0);
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            unsafe { group.lookup(&features, Insertion::AtLookup, false, None, self.bench.stream()) }
                .unwrap();
            self.bench.device.synchronize().unwrap();
            let profile = group.shard_mut().take_profile().unwrap();
            let exchanges =
                if peers.nccl().is_some() { profile.get(StepPart::Exchange) } else { Default::default() };
            times.push((profile.get(StepPart::Pool).time + exchanges.time).as_secs_f32());
        }
        bytes as f64 / f64::from(median(&times[4..])) / 1e9
    }

    /// GB/s that leave each rank in NCCL's own exchange of this many bytes.
    fn nccl_per_second(&mut self, nccl: &Nccl, bytes: usize) -> f64 {
        let part = bytes / (self.ranks - 1) / 256 * 256;
        let context = &self.bench.device.context;
        let (from, to) = (
            Buffer::<u8>::new(context, part * self.ranks).unwrap(),
            Buffer::<u8>::new(context, part * self.ranks).unwrap(),
        );
        let transfers = |memory: &Buffer<u8>| -> Vec<Transfer> {
            let others = (0..self.ranks).filter(|&other| other != self.rank);
            others.map(|rank| Transfer { rank, address: memory.at(rank * part), bytes: part }).collect()
        };
        let (sends, receives) = (transfers(&from), transfers(&to));
        // SAFETY: The buffers have so many bytes, and live until the device has been waited for.
        let call = |_: &()| unsafe { nccl.exchange(&sends, &receives, self.bench.stream()) }.unwrap();
        let times = time_in_a_row(&self.bench, &[(); 40], call);
        (part * (self.ranks - 1)) as f64 / f64::from(median(&times[2..])) / 1e6
    }
}

fn run(rank: usize, ranks: usize, port: usize) {
    let address = format!("127.0.0.1:{port}");
    let communicator: Arc<dyn Communicator> =
        Arc::new(TcpRank::connect(rank, ranks, &address, Duration::from_secs(120)).unwrap());
    let bench = Bench::start_for(rank == 0, &format!("a training step on {ranks} GPUs that share tables"));
    let dense = Dense::new(&bench, 1.0);
    let mut world = Ranks { bench: bench.clone(), communicator, rank, ranks, meetings: 0, layers: 0 };
    let memory = world.connect(Exchange::Memory, 8).expect("GPUs reach each other");
    let nccl = world.connect(Exchange::Nccl, 6);
    if rank == 0 {
        println!(
            "| work, per rank | one GPU, ms | ranks, ms | next known, ms | by NCCL, ms | host, µs: one, ranks, by NCCL |"
        );
        println!("|---|---|---|---|---|---|");
    }
    let chosen: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|c| name.contains(c.as_str()));
    for work in works().iter().filter(|work| is_chosen(work.name)) {
        let configs: Vec<_> = (0..work.hotness.len())
            .map(|t| config(&format!("t{t}"), work.dim, work.vocabulary * 11 / 10))
            .collect();
        let alone = |how: How, name: &str| -> (f32, f32) {
            if rank > 0 {
                return (0.0, 0.0);
            }
            let group = GpuGroup::new(&bench.device, configs.clone()).unwrap();
            let mut steps = Steps::new(&bench, work, Tables::Alone(Box::new(group)), how);
            steps.fill(0, 1);
            let (times, host) = steps.time(0);
            keep_samples(&format!("ranks {}, one GPU, {name}", work.name), "ms", &times);
            (median(&times), host)
        };
        let (next, with_dense) = (
            How { knows_next: true, dense: None },
            dense.as_ref().map(|dense| How { knows_next: true, dense: Some(dense) }),
        );
        let (one, one_host) = alone(How::default(), "alone");
        let one_dense = with_dense.map(|how| alone(how, "dense").0);
        world.meet();
        let (many, host, parts) = world.time(work, &configs, &memory, "memory", How::default());
        let (ahead, ..) = world.time(work, &configs, &memory, "next known", next);
        let many_dense = with_dense.map(|how| world.time(work, &configs, &memory, "dense", how).0);
        let many_dense_alone = with_dense.map(|how| {
            world.time(work, &configs, &memory, "dense, unknown", How { knows_next: false, ..how }).0
        });
        let by_nccl = nccl.as_ref().ok().map(|nccl| world.time(work, &configs, nccl, "NCCL", How::default()));
        if rank == 0 {
            let (nccl, nccl_host, nccl_parts) = by_nccl.unwrap_or_default();
            println!(
                "| {} | {one:.3} | {many:.3} | {ahead:.3} | {nccl:.3} | {one_host:.0}, {host:.0}, {nccl_host:.0} |",
                work.name
            );
            println!("  parts of a step on ranks, µs: {parts}");
            println!("  parts of a step by NCCL, µs: {nccl_parts}");
            if let (Some(one), Some(many), Some(unknown)) = (one_dense, many_dense, many_dense_alone) {
                let gain = |many: f32| ranks as f32 * one / many;
                println!(
                    "  beside dense work: one {one:.3} ms, ranks {many:.3} ms, {:.2} times the samples; next ids not known {unknown:.3} ms, {:.2}",
                    gain(many),
                    gain(unknown)
                );
            }
        }
    }
    if ranks > 1 && is_chosen("exchange") {
        for bytes in [16 << 20, 64 << 20] {
            let by_memory = world.rows_per_second(&memory, bytes);
            let [rows, all] = match &nccl {
                Ok(nccl) => [
                    world.rows_per_second(nccl, bytes),
                    world.nccl_per_second(nccl.nccl().expect("connected by it"), bytes),
                ],
                Err(_) => [0.0; 2],
            };
            if rank == 0 {
                println!(
                    "rows of {} MiB to other ranks, found rows to rows there: {by_memory:.0} GB/s, by NCCL {rows:.0} GB/s; \
                     NCCL's exchange alone {all:.0} GB/s",
                    bytes >> 20
                );
            }
        }
    }
    world.meet();
}

fn main() {
    let ranks = variable("SOK_RANKS").unwrap_or(2);
    if let (Some(rank), Some(port)) = (variable("SOK_BENCH_RANK"), variable("SOK_BENCH_PORT")) {
        return run(rank, ranks, port);
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(std::env::args().skip(1))
            .env("SOK_BENCH_RANK", rank.to_string())
            .env("SOK_BENCH_PORT", port.to_string())
            .env("CUDA_VISIBLE_DEVICES", (rank % variable("SOK_GPUS").unwrap_or(ranks)).to_string())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    let all = children.into_iter().map(|mut child| child.wait().unwrap().success()).collect::<Vec<_>>();
    assert!(all.iter().all(|is_good| *is_good), "{all:?}");
}
