//! Training steps over tables with policies, beside the same steps without one, in turns: with scores alone, over full tables, which remove
//! rows, with a time to live, noting changes for increments, counting keys that get no row yet, and under other update modes. One id in a hundred is new. Times are
//! means, since sweeps are rare: of rounds in which each full table sweeps. Then sweeps of one table, and reading what has changed.
//!
//!     policies [steps] [sweeps] [expiry] [changes]

mod common;

use std::time::Instant;

use common::training::{Gpu, Work, ids, normal, scalars, work};
use common::{Bench, Shape, config, fill, key_of, median, nth_key};
use sok_core::contract::binding::UpdateMode;
use sok_core::contract::group::Group;
use sok_core::contract::records::Records;
use sok_core::contract::table::{Contents, Cursor, Table, TableConfig};
use sok_core::policy::admission::Admission;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};
use sok_cuda::gpu_table::GpuTable;
use sok_cuda::memory::Buffer;

const WORKS: [Work; 2] = [
    work("26 x 65,536, dim 64, Zipf", 26, 65_536, 1, 400_000),
    work("26 x 16,384, dim 64, Zipf", 26, 16_384, 1, 400_000),
];
const LRU: Score = Score::Lru;
const LFU: Score = Score::Lfu { half_life: None };

struct Policy {
    name: &'static str,
    score: Option<Score>,
    is_full: bool,
    /// Time to live in steps.
    lifetime: Option<u64>,
    /// Whether the table was dumped, and notes what has changed since.
    is_tracked: bool,
    /// The new keys that get a row.
    admission: Option<Admission>,
    /// Which rows a step updates.
    mode: UpdateMode,
}

const NONE: Policy = Policy {
    name: "none",
    score: None,
    is_full: false,
    lifetime: None,
    is_tracked: false,
    admission: None,
    mode: UpdateMode::Local,
};
/// Keys that have come twice.
const TWICE: Admission =
    Admission::Frequency { threshold: 2, once_per_step: false, half_life: None, memory: None };
/// The same, of which the lowest counts are forgotten.
const TWICE_OF_FEW: Admission =
    Admission::Frequency { threshold: 2, once_per_step: false, half_life: None, memory: Some(64 * 2000) };
const POLICIES: [Policy; 11] = [
    NONE,
    Policy { name: "LRU, scores alone", score: Some(LRU), ..NONE },
    Policy { name: "LRU, full", score: Some(LRU), is_full: true, ..NONE },
    Policy { name: "LFU, full", score: Some(LFU), is_full: true, ..NONE },
    Policy { name: "time to live of 4,096 steps", lifetime: Some(4096), ..NONE },
    Policy { name: "changes since a dump", is_tracked: true, ..NONE },
    Policy { name: "admission of keys that come twice", admission: Some(TWICE), ..NONE },
    Policy { name: "the same with 2,000 counts", admission: Some(TWICE_OF_FEW), ..NONE },
    Policy { name: "scores that come with ids, full", score: Some(Score::Custom), is_full: true, ..NONE },
    Policy { name: "update mode lazy_global", mode: UpdateMode::LazyGlobal, ..NONE },
    Policy { name: "update mode global", mode: UpdateMode::Global, ..NONE },
];
const ROUNDS: usize = 5;
/// Number of policies for whose tables there is memory at the same time.
const AT_ONCE: usize = 4;

fn table(name: &str, work: &Work, policy: &Policy) -> TableConfig {
    let &Policy { score, is_full, lifetime, admission, .. } = policy;
    let time_to_live =
        lifetime.map(|steps| TimeToLive { lifetime: Lifetime::Steps(steps), keeps_expired: false });
    let eviction = score.map(|score| Eviction { score, counts_inference: false, keeps_evicted: false });
    let capacity = if is_full { work.vocabulary } else { 4 * work.vocabulary };
    TableConfig {
        max_capacity: score.map(|_| capacity),
        eviction,
        time_to_live,
        admission,
        ..config(name, work.dim, work.vocabulary)
    }
}

/// Inserts all keys by `Table::assign`, which no admission policy filters.
fn assign_all(group: &mut impl Group, work: &Work) {
    let keys: Vec<u64> = (0..work.vocabulary).map(key_of).collect();
    let rows = vec![0.0; work.dim * keys.len()];
    for table in group.tables_mut() {
        table.assign(&keys, &rows, true).unwrap();
    }
}

fn time(bench: &Bench, work: &Work) {
    let gradients = normal(work.samples * work.dim * work.tables);
    // As many as a full table takes between two sweeps.
    let steps = (work.vocabulary as usize / 64).div_ceil(work.samples / 100) + 1;
    let batches: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let threads = (0..(ROUNDS + 1) * steps).map(|step| scope.spawn(move || ids(work, step)));
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let upload = |batch: &Vec<u64>| Buffer::from_slice(&bench.device.context, batch).unwrap();
    let numbers = scalars(0);
    let numbers = [numbers.learning_rate, numbers.step as f32, 1.0, numbers.factor];
    let numbers = Buffer::from_slice(&bench.device.context, &numbers).unwrap();
    let inputs: Vec<_> = batches.iter().map(upload).collect();
    // There is memory for a few of them at the same time.
    for (part, policies) in POLICIES[1..].chunks(AT_ONCE).enumerate() {
        let policies: Vec<&Policy> = std::iter::once(&POLICIES[0]).chain(policies).collect();
        time_beside(bench, work, &policies, part == 0, (&gradients, &numbers), inputs.chunks(steps));
    }
}

/// Times steps over tables with these policies, in turns, of which the first is none.
fn time_beside<'a>(
    bench: &Bench,
    work: &Work,
    policies: &[&Policy],
    prints_first: bool,
    (gradients, numbers): (&[f32], &Buffer<f32>),
    rounds: impl Iterator<Item = &'a [Buffer<u64>]>,
) {
    let make = |policy: &&Policy| {
        let configs = (0..work.tables).map(|t| table(&format!("t{t}"), work, policy));
        let mut gpu = Gpu::with_tables(bench, work, configs.collect(), gradients);
        if policy.admission.is_some() {
            assign_all(&mut gpu.group, work);
        } else {
            fill(bench, &mut gpu.group, work.shape(), work.vocabulary, gpu.rows.address());
        }
        gpu.set_mode(policy.mode);
        if policy.score == Some(Score::Custom) {
            gpu.give_scores();
        }
        if policy.is_tracked {
            gpu.group.tables_mut().into_iter().for_each(|table| table.track(1).unwrap());
        }
        gpu
    };
    let mut subjects: Vec<_> = policies.iter().map(make).collect();
    let mut times = vec![Vec::new(); policies.len()];
    for (round, inputs) in rounds.enumerate() {
        for (gpu, times) in subjects.iter_mut().zip(&mut times) {
            bench.device.synchronize().unwrap();
            let start = bench.mark();
            inputs.iter().for_each(|ids| gpu.step(ids, numbers, true));
            let end = bench.mark();
            bench.device.synchronize().unwrap();
            if round > 0 {
                times.push(start.elapsed_ms(&end).unwrap() / inputs.len() as f32);
            }
        }
    }
    let all = policies.iter().zip(&mut subjects).zip(&times).skip(usize::from(!prints_first));
    for ((Policy { name, .. }, gpu), times_of) in all {
        gpu.group.settle_tables();
        let ratios: Vec<f32> = times_of.iter().zip(&times[0]).map(|(mine, plain)| mine / plain).collect();
        let outcomes = (0..work.tables).map(|t| gpu.group.table(t).stats().unwrap().outcomes);
        let removed: u64 = outcomes.map(|outcomes| outcomes.evicted + outcomes.expired).sum();
        println!("| {} | {name} | {:.3} | {:.3} | {removed} |", work.name, median(times_of), median(&ratios));
    }
}

/// Times `find_or_insert` of one new key in a full table, which sweeps.
fn time_sweeps(bench: &Bench, rows: u64) {
    for (name, score) in [("LRU", LRU), ("LFU", LFU)] {
        let work = Work { dim: 4, vocabulary: rows, ..WORKS[0].clone() };
        let mut table = GpuTable::new(
            &bench.device,
            table("t", &work, &Policy { score: Some(score), is_full: true, ..NONE }),
        )
        .unwrap();
        let keys: Vec<u64> = (0..rows).map(nth_key).collect();
        for some in keys.chunks(1 << 22) {
            table.assign(some, &vec![0.0; 4 * some.len()], true).unwrap();
        }
        let mut new = rows;
        let mut times = Vec::new();
        for _ in 0..5 {
            // Fill the room that the last sweep has made.
            let room = rows - table.len().unwrap() as u64;
            let more: Vec<u64> = (new..new + room).map(nth_key).collect();
            table.assign(&more, &vec![0.0; 4 * more.len()], true).unwrap();
            new += room;
            let start = Instant::now();
            table.assign(&[nth_key(new)], &[0.0; 4], true).unwrap();
            times.push(start.elapsed().as_secs_f32() * 1e3);
            new += 1;
        }
        println!("| {rows} | {name} | {:.2} |", median(&times[1..]));
    }
}

/// Times steps of a few ids that examine all rows for expired ones of a part of the keys, over steps that do not: first while no row is old
/// enough, then while all rows of the part go.
fn time_expiry(bench: &Bench, rows: u64) {
    const STEPS: usize = 1024;
    let work = Work { tables: 1, samples: 1024, dim: 4, vocabulary: rows, ..WORKS[0].clone() };
    let gradients = normal(work.samples * work.dim);
    let inputs = Buffer::from_slice(&bench.device.context, &ids(&work, 0)).unwrap();
    let numbers = Buffer::from_slice(&bench.device.context, &[0.01, 1.0, 1.0, 1.0]).unwrap();
    let all = Shape { samples: 1 << 20, ..work.shape() };
    let [plain, expiring] = [None, Some(STEPS as u64)].map(|lifetime| {
        let policy = Policy { lifetime, ..NONE };
        let mut gpu = Gpu::with_tables(bench, &work, vec![table("t", &work, &policy)], &gradients);
        let room = Buffer::<f32>::new(&bench.device.context, all.samples * work.dim).unwrap();
        fill(bench, &mut gpu.group, all, rows, room.address());
        bench.device.synchronize().unwrap();
        let mut marks = vec![bench.mark()];
        for _ in 0..STEPS + 128 {
            gpu.step(&inputs, &numbers, true);
            marks.push(bench.mark());
        }
        bench.device.synchronize().unwrap();
        let times: Vec<f32> = marks.windows(2).map(|m| m[0].elapsed_ms(&m[1]).unwrap()).collect();
        gpu.group.settle_tables();
        (times, gpu.group.table(0).len().unwrap() as u64)
    });
    let [of_plain, looking, removing] =
        [&plain.0[16..], &expiring.0[16..STEPS - 1], &expiring.0[STEPS + 2..]].map(median);
    let removed = (plain.1 - expiring.1) / 129;
    println!("| {rows} | none | {:.3} |", looking - of_plain);
    println!("| {rows} | {removed} | {:.3} |", removing - of_plain);
}

/// Times reading what has changed in one row of a hundred, and reading all rows.
fn time_changes(bench: &Bench, rows: u64) {
    let work = Work { dim: 4, vocabulary: rows, ..WORKS[0].clone() };
    let mut table = GpuTable::new(&bench.device, table("t", &work, &NONE)).unwrap();
    let keys: Vec<u64> = (0..rows).map(nth_key).collect();
    for some in keys.chunks(1 << 22) {
        table.assign(some, &vec![0.0; 4 * some.len()], true).unwrap();
    }
    table.track(1).unwrap();
    let changed = &keys[..keys.len() / 100];
    table.assign(changed, &vec![1.0; 4 * changed.len()], true).unwrap();
    let since = table.epoch_of(1).unwrap();
    let milliseconds = |read: &dyn Fn() -> usize, expected: usize| {
        let times: Vec<f32> = (0..4)
            .map(|_| {
                let start = Instant::now();
                assert_eq!(read(), expected);
                start.elapsed().as_secs_f32() * 1e3
            })
            .collect();
        median(&times[1..])
    };
    let read = |scan: &dyn Fn(Cursor, &mut Records) -> Option<Cursor>| {
        let (mut cursor, mut found) = (Some(Cursor::default()), 0);
        while let Some(at) = cursor {
            let mut records = Records::default();
            cursor = scan(at, &mut records);
            found += records.keys.len();
        }
        found
    };
    const CHUNK: usize = 1 << 16;
    let counting = milliseconds(&|| table.num_changed(since).unwrap(), changed.len());
    let of_changed = |at, records: &mut Records| table.scan_changed(since, at, CHUNK, records).unwrap();
    let of_all = |at, records: &mut Records| table.scan(at, CHUNK, records).unwrap();
    let reading = milliseconds(&|| read(&of_changed), changed.len());
    let whole = milliseconds(&|| read(&of_all), keys.len());
    println!("| {rows} | {} | {counting:.2} | {reading:.1} | {whole:.1} |", changed.len());
}

fn main() {
    let parts: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let is_wanted = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    let bench = Bench::start("a training step of Adam over tables with policies");
    if is_wanted("steps") {
        println!("| work | policy | ms | over none | rows removed |\n|---|---|---|---|---|");
        WORKS.iter().for_each(|work| time(&bench, work));
    }
    if is_wanted("sweeps") {
        println!("\n| rows of the table | policy | ms of a call that sweeps |\n|---|---|---|");
        [1 << 20, 1 << 24, 1 << 26].into_iter().for_each(|rows| time_sweeps(&bench, rows));
    }
    if is_wanted("expiry") {
        println!(
            "\n| rows of the table | rows that expire in a step | ms over a step without a time to live |\n|---|---|---|"
        );
        [1 << 20, 1 << 26].into_iter().for_each(|rows| time_expiry(&bench, rows));
    }
    if is_wanted("changes") {
        println!(
            "\n| rows of the table | changed | ms to count them | ms to read their records | ms to read all records |\n|---|---|---|---|---|"
        );
        [1 << 20, 1 << 24, 1 << 26].into_iter().for_each(|rows| time_changes(&bench, rows));
    }
}
