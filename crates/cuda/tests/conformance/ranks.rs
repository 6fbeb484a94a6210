//! Groups that ranks share: one rank as a group of one process, and several ranks, each a process, beside the ranks on the host.
//!
//! `SOK_TEST_RANKS` says how many ranks there are, `SOK_TEST_GPUS` on how many GPUs, `SOK_TEST_CASES` how many seeds are tried, and
//! `SOK_TEST_FIRST` the first one.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use sok_core::contract::table::{CheckMode, Insertion, TableConfig};
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::placement::Placement;
use sok_core::exchange::tcp::TcpRank;
use sok_core::formula::update::UpdateScalars;
use sok_core::policy::admission::Admission;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};
use sok_core::row_type::RowType;
use sok_cuda::device::Stream;
use sok_cuda::gpu_group::sharded::ShardedGpuGroup;
use sok_cuda::peers::Peers;

use crate::common::large::{any_update, run_large};
use crate::common::ranks::{GlobalStep, any_steps, any_tables, part_of, share};
use crate::common::refusal;
use crate::common::sharded::ShardedSubject;
use crate::common::subject::{Maker, OWNER, Subject, binding};
use crate::common::{Dice, bits, scan};
use crate::subject::{DEVICE, GpuSubject, HAS_POOLED, Tested, on_device, peers_of};
use crate::{POOL, suite};

const ALONE: Maker = Maker { make: alone, tells_late: true, dims: &[3, 64], has_modes: true };

fn alone(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(GpuSubject::alone(configs))]
}

suite!(ALONE, #[ignore = "needs a GPU"]);

#[test]
#[ignore = "needs a GPU"]
fn large_calls_leave_one_rank_as_its_model() {
    for seed in 0..12 {
        println!("seed {seed}");
        run_large(seed, &ALONE);
    }
}

pub fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Starts this test program once for each rank, to run another test.
fn run_ranks(test: &str) {
    let (ranks, gpus) = (number("SOK_TEST_RANKS", 2), number("SOK_TEST_GPUS", 1));
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", test, "--nocapture"])
            .env("SOK_TEST_RANK", rank.to_string())
            .env("SOK_TEST_RANKS", ranks.to_string())
            .env("SOK_TEST_PORT", port.to_string())
            .env("CUDA_VISIBLE_DEVICES", (rank % gpus).to_string())
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    let all: Vec<bool> = children.into_iter().map(|mut child| child.wait().unwrap().success()).collect();
    assert!(all.iter().all(|is_good| *is_good), "{all:?}");
}

/// Connects this process, if it is a rank that another test has started.
fn connect(timeout: Duration) -> Option<Arc<dyn Communicator>> {
    let rank = std::env::var("SOK_TEST_RANK").ok()?.parse().unwrap();
    let address = format!("127.0.0.1:{}", number("SOK_TEST_PORT", 0));
    Some(Arc::new(TcpRank::connect(rank, number("SOK_TEST_RANKS", 2), &address, timeout).unwrap()))
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_have_the_bits_of_ranks_on_the_host() {
    run_ranks("ranks::one_rank");
}

/// NCCL alone waits without a limit, and is there with a GPU for each rank.
#[test]
#[ignore = "needs a GPU"]
fn a_gpu_that_waits_in_vain_is_an_error_of_the_rank_that_does_not_come() {
    if number("SOK_TEST_GPUS", 1) > 1 {
        run_ranks("ranks::one_that_waits");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn one_that_waits() {
    const WAIT: Duration = Duration::from_secs(4);
    let Some(communicator) = connect(WAIT) else { return };
    let peers = peers_of(communicator.clone());
    let Some(nccl) = peers.nccl() else { return };
    let (from, to) = (on_device(&[1f32; 1000]), on_device(&[0f32; 1000]));
    let stream = DEVICE.context.new_stream().unwrap();
    // SAFETY: The buffers have 1000 floats, and live until the device is idle.
    let sum = || unsafe { nccl.sum(from.address(), to.address(), 1000, Stream::of_cudarc(&stream)) };
    sum().unwrap();
    DEVICE.synchronize().unwrap();
    // A launch that completes is no wait, however long ago it was.
    std::thread::sleep(WAIT * 3 / 2);
    assert!(communicator.failure().is_none());
    let start = Instant::now();
    if communicator.rank() == 0 {
        sum().unwrap();
        let _ = DEVICE.synchronize();
    } else {
        while communicator.failure().is_none() && start.elapsed() < 4 * WAIT {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let failure = communicator.failure().unwrap().to_string();
    assert!(start.elapsed() < 3 * WAIT, "{:?}", start.elapsed());
    assert!(communicator.rank() != 0 || failure.contains("rank 1 "), "{failure}");
    assert!(failure.contains("wait of a GPU"), "{failure}");
}

#[test]
#[ignore = "needs a GPU"]
fn one_rank() {
    let Some(communicator) = connect(Duration::from_secs(60)) else { return };
    let ranks = communicator.world_size();
    let peers = Arc::new(peers_of(communicator.clone()));
    let first = number("SOK_TEST_FIRST", 0) as u64;
    for seed in first..first + number("SOK_TEST_CASES", 24) as u64 {
        let mut dice = Dice(seed);
        let is_even = seed % 3 != 2;
        let merge_blocks = ranks * if is_even { dice.pick(&[1, 2, 3]) } else { 1 };
        let mut configs = any_tables(&mut dice, 4);
        if seed % 2 == 1 {
            // Half of these tables are full soon.
            let capacity = if seed % 4 == 3 { 40 } else { 1000 };
            for (config, _) in &mut configs {
                (config.max_capacity, config.check_mode) = (Some(capacity), CheckMode::Count);
                let is_dynamic = config.vocabulary_size.is_none();
                config.eviction = any_eviction(&mut dice).filter(|_| is_dynamic);
                let lifetime = Lifetime::Steps(1 + dice.below(4));
                config.time_to_live = (is_dynamic && lifetime != Lifetime::Steps(4))
                    .then_some(TimeToLive { lifetime, keeps_expired: false });
            }
        }
        // Fewer rows go where fewer come.
        let mut dice_of_admission = Dice(1000 + seed);
        for (config, _) in configs.iter_mut().filter(|_| seed % 8 != 3) {
            config.admission =
                any_admission(&mut dice_of_admission).filter(|_| config.vocabulary_size.is_none());
        }
        let mut update = any_update(&mut dice);
        update.clipnorm = dice.pick(&[None, Some(0.5)]).filter(|_| update.clipvalue.is_none());
        let steps = any_steps(&mut dice, &configs, 6 * ranks, 6);
        // Ranks that reach each other's memory move float32. The host rounds pooled bags, and rows for missing keys where they are read.
        let row_type = match peers.nccl() {
            Some(_) => dice.pick(&[RowType::Float32, RowType::Bfloat16]),
            None => RowType::Float32,
        };
        if row_type == RowType::Bfloat16 {
            for (config, placement) in &mut configs {
                config.out_of_vocabulary_key = None;
                if matches!(placement, Placement::Localized(_)) {
                    *placement = Placement::Distributed;
                }
            }
        }
        let host = ShardedSubject::new(&configs, communicator.clone(), merge_blocks, row_type, &POOL);
        let gpu = ShardedGpuGroup::new(&DEVICE, configs.clone(), &peers, 2, merge_blocks, row_type).unwrap();
        let array_type = RowType::ALL[seed as usize % 3];
        let gpu = GpuSubject::of(Tested::Shared(Box::new(gpu))).with_arrays(array_type);
        println!("rank {}, seed {seed}, {merge_blocks} blocks", communicator.rank());
        follow(&configs, update, &steps, Box::new(host), Box::new(gpu), &peers, is_even);
    }
    // Localized tables are on rank 0. A few cases may have none with bags.
    let pools = communicator.rank() == 0 && ranks > 1 && peers.nccl().is_none();
    assert!(HAS_POOLED.load(Relaxed) == pools || number("SOK_TEST_CASES", 24) < 24);
    for has_happened in [&HAS_EVICTED, &HAS_EXPIRED, &HAS_FILTERED] {
        assert!(has_happened.load(Relaxed) || number("SOK_TEST_CASES", 24) < 24);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_lookup_that_one_rank_refuses_changes_no_rank() {
    run_ranks("ranks::one_of_which_one_refuses");
}

#[test]
#[ignore = "needs a GPU"]
fn one_of_which_one_refuses() {
    let Some(communicator) = connect(Duration::from_secs(60)) else { return };
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let peers = Arc::new(peers_of(communicator.clone()));
    let configs = refusal::configs(ranks);
    let mut host = ShardedSubject::new(&configs, communicator, ranks, RowType::Float32, &POOL);
    let gpu = ShardedGpuGroup::new(&DEVICE, configs.to_vec(), &peers, 2, ranks, RowType::Float32).unwrap();
    let mut gpu = GpuSubject::of(Tested::Shared(Box::new(gpu)));
    // All ranks run the steps on the host, then on the GPU.
    assert_eq!(refusal::run(&mut host, rank), refusal::run(&mut gpu, rank), "rank {rank}");
}

fn any_eviction(dice: &mut Dice) -> Option<Eviction> {
    let score = dice.pick(&[
        Score::Lru,
        Score::Lfu { half_life: None },
        Score::Lfu { half_life: Some(2) },
        Score::Custom,
    ]);
    let (counts_inference, keeps_evicted) = (dice.below(2) == 0, false);
    (dice.below(4) > 0).then_some(Eviction { score, counts_inference, keeps_evicted })
}

fn any_admission(dice: &mut Dice) -> Option<Admission> {
    let (threshold, once_per_step) = (1 + dice.below(4) as u32, dice.below(2) == 0);
    let (half_life, memory) = (dice.pick(&[None, Some(3)]), dice.pick(&[None, Some(64 * 20)]));
    let frequency = Admission::Frequency { threshold, once_per_step, half_life, memory };
    dice.pick(&[None, None, Some(frequency), Some(Admission::Probability { probability: 0.3 })])
}

/// Whether this rank has removed rows to make room, or because their time was over, and whether it has kept keys out.
static HAS_EVICTED: AtomicBool = AtomicBool::new(false);
static HAS_EXPIRED: AtomicBool = AtomicBool::new(false);
static HAS_FILTERED: AtomicBool = AtomicBool::new(false);

/// Runs steps on this rank's share of each batch, on the host and on the GPU.
fn follow(
    configs: &[(TableConfig, Placement)],
    update: sok_core::formula::update::Update,
    steps: &[GlobalStep],
    host: Box<dyn Subject>,
    gpu: Box<dyn Subject>,
    peers: &Peers,
    is_even: bool,
) {
    let (rank, world_size) = (peers.rank(), peers.world_size());
    let mut subjects = [host, gpu];
    subjects.iter_mut().for_each(|subject| subject.bind(binding(OWNER, update)).unwrap());
    for (number, step) in (1..).zip(steps) {
        let bags: Vec<_> =
            step.inputs.iter().map(|input| share(input.bags().len(), rank, world_size, is_even)).collect();
        let inputs: Vec<_> =
            step.inputs.iter().zip(&bags).map(|(input, bags)| part_of(input, bags.clone())).collect();
        let array_type = subjects[1].array_type();
        let gradients =
            step.inputs.iter().zip(&bags).zip(&step.gradients).map(|((input, bags), gradients)| {
                let dim = configs[input.table].0.dim;
                let mut gradients = gradients[bags.start * dim..bags.end * dim].to_vec();
                array_type.round(&mut gradients);
                gradients
            });
        // In some steps each rank has a weight of its own.
        let weight = if number % 3 == 0 { step.weight * (1 + rank) as f32 } else { step.weight };
        let kept = Arc::new(gradients.collect::<Vec<_>>());
        let weighted = inputs.iter().filter(|input| input.weights.is_some());
        let ids: Vec<usize> = weighted.map(|input| input.ids.keys().len()).collect();
        let seen = subjects.each_mut().map(|subject| {
            let (lookup, mut outputs) = subject.lookup(&inputs, step.insertion, true).unwrap();
            if let Some(insertion) =
                [Some(Insertion::Never), Some(Insertion::AtLookup), None][number as usize % 3]
            {
                // Nothing is saved, while a lookup waits for its gradients.
                outputs.extend(subject.lookup(&inputs, insertion, false).unwrap().1);
            }
            let weights = subject.push(number, lookup, &kept, number % 2 == 0, &ids).unwrap();
            let norm = subject.commit(&[(number, weight)], step.is_update).unwrap() as f32;
            let scalars = UpdateScalars { learning_rate: 0.1, step: number, factor: 1.0 };
            subject.apply(scalars, step.is_update).unwrap();
            for table in 0..configs.len() {
                subject.table_mut(table).erase(&step.erased).unwrap();
            }
            let of_table = |table| {
                let table = subject.table(table);
                (table.stats().unwrap().outcomes, table.step().unwrap(), scan(table, 100))
            };
            let tables: Vec<_> = (0..configs.len()).map(of_table).collect();
            (outputs, weights, norm, tables)
        });
        let [host, gpu] = seen;
        for (feature, (mut host, gpu)) in host.0.into_iter().zip(&gpu.0).enumerate() {
            array_type.round(&mut host);
            assert_eq!(bits(&host), bits(gpu), "rank {rank}, step {number}, output {feature}");
        }
        for (feature, (host, gpu)) in host.1.iter().zip(&gpu.1).enumerate() {
            let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * (1.0 + a.abs());
            assert!(host.iter().zip(gpu).all(is_near), "rank {rank}, step {number}, weights {feature}");
        }
        assert_eq!(host.2.to_bits(), gpu.2.to_bits(), "rank {rank}, step {number}, norm");
        for (table, (host, gpu)) in host.3.iter().zip(&gpu.3).enumerate() {
            assert_eq!(host, gpu, "rank {rank}, step {number}, table {table}");
            HAS_EVICTED.fetch_or(gpu.0.evicted > 0, Relaxed);
            HAS_EXPIRED.fetch_or(gpu.0.expired > 0, Relaxed);
            HAS_FILTERED.fetch_or(gpu.0.filtered > 0, Relaxed);
        }
    }
}
