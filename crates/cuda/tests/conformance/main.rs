//! Compares tables on a GPU with the model that the host's tables are compared with. Rows and states must be bit-identical.
//!
//! Needs a GPU: `cargo test -p sok-cuda --test conformance -- --ignored`.

#[path = "../../../core/tests/common/mod.rs"]
mod common;
mod faults;
mod full_tables;
mod ranks;
mod streams;
mod subject;

use std::sync::{Arc, LazyLock};

use common::general::rules;
use common::input::{Input, Shape};
use common::large::{SGD, any_update, plain_update, run_large, skewed_keys};
use common::steps::{op, run_all};
use common::strategies::{config, plain_config, table_or_rule_op, update};
use common::subject::{HostSubject, Maker, Subject, binding};
use common::table::ModelTable;
use common::{Dice, bits, scan, unwritten};
use proptest::prelude::*;
use sok_core::contract::batch::Combiner;
use sok_core::contract::binding::Binding;
use sok_core::contract::table::{Contents, Explanation, Insertion, OutOfVocabulary, Table, TableConfig};
use sok_core::error::Error;
use sok_core::formula::update::UpdateScalars;
use sok_core::host::table::HostTable;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::pool::Pool;
use sok_core::row_type::RowType;
use sok_cuda::gpu_table::GpuTable;
use sok_cuda::memory::Buffer;
use subject::{DEVICE, GpuSubject};

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(2).unwrap());

const GPU: Maker = Maker { make: group_on_gpu, tells_late: true, dims: &[3, 64], has_modes: true };
const EVERY_DIM: [usize; 9] = [1, 3, 8, 17, 64, 100, 128, 257, 1024];
/// With arrays of 16 bits.
const FLOAT16: Maker = Maker { make: with_arrays_of_float16, ..GPU };
const BFLOAT16: Maker = Maker { make: with_arrays_of_bfloat16, ..GPU };

fn group_on_gpu(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(GpuSubject::new(configs))]
}

fn with_arrays_of_float16(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(GpuSubject::new(configs).with_arrays(RowType::Float16))]
}

fn with_arrays_of_bfloat16(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(GpuSubject::new(configs).with_arrays(RowType::Bfloat16))]
}

fn table_on_gpu(config: TableConfig) -> Box<dyn Table> {
    Box::new(GpuTable::new(&DEVICE, config).unwrap())
}

suite!(GPU, #[ignore = "needs a GPU"]);
table_suite!(table_on_gpu, #[ignore = "needs a GPU"]);
expiry_suite!(GPU, #[ignore = "needs a GPU"]);
increments_suite!(GPU, #[ignore = "needs a GPU"]);

proptest! {
    #![proptest_config(ProptestConfig { cases: ranks::number("SOK_TEST_CASES", 120) as u32, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    #[ignore = "needs a GPU"]
    fn any_list_of_calls_leaves_a_table_as_its_model(
        config in config(),
        ops in prop::collection::vec(table_or_rule_op(), 1..25),
    ) {
        let (mut table, mut model) = (table_on_gpu(config.clone()), ModelTable::new(config));
        for op in ops {
            op.run(&mut model, &mut [&mut *table]);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn any_list_of_steps_leaves_a_group_as_its_model(
        configs in prop::collection::vec(config(), 1..5),
        update in update(),
        ops in prop::collection::vec(op(), 1..30),
    ) {
        run_all(&configs, update, &ops, &GPU);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn any_list_of_steps_with_arrays_of_16_bits_leaves_a_group_as_its_model(
        configs in prop::collection::vec(config(), 1..5),
        update in update(),
        ops in prop::collection::vec(op(), 1..30),
        is_float16 in any::<bool>(),
    ) {
        run_all(&configs, update, &ops, if is_float16 { &FLOAT16 } else { &BFLOAT16 });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn large_calls_leave_a_group_as_its_model() {
    for seed in 0..24 {
        println!("seed {seed}");
        run_large(seed, [&GPU, &BFLOAT16, &FLOAT16][seed as usize % 3]);
    }
}

#[test]
#[ignore = "needs a GPU, takes minutes"]
fn soak_ten_million_ids_with_every_mix_of_policies() {
    common::soak::ten_million_ids(&GPU);
}

/// The host has not read the report of that commit: nobody asks it to.
#[test]
#[ignore = "needs a GPU"]
fn a_lookup_evicts_by_the_scores_of_the_commit_before_it() {
    let eviction = Some(Eviction {
        score: Score::Lfu { half_life: None },
        counts_inference: false,
        keeps_evicted: false,
    });
    let config = TableConfig { max_capacity: Some(4), eviction, ..plain_config("t", 1) };
    let mut subject = GpuSubject::new(&[config]);
    subject.settles = false;
    subject.bind(binding(1, plain_update(SGD))).unwrap();
    for (step, keys) in (1..).zip([[3, 4], [3, 4], [3, 4], [1, 2], [1, 2]]) {
        let (lookup, _) = subject.lookup(&[Input::plain(0, &keys)], Insertion::AtLookup, true).unwrap();
        subject.push(step, lookup, &Arc::new(vec![vec![1.0; 2]]), true, &[]).unwrap();
        subject.commit(&[(step, 1.0)], true).unwrap();
        subject.apply(UpdateScalars { learning_rate: 0.05, step, factor: 1.0 }, true).unwrap();
    }
    subject.lookup(&[Input::plain(0, &[9])], Insertion::AtLookup, true).unwrap();
    let mut keys = subject.table(0).keys().unwrap();
    keys.sort_unstable();
    assert_eq!(keys, [2, 3, 4, 9]);
    assert_eq!(subject.table(0).explain(1).unwrap(), Explanation::Evicted { step: 6 });
}

/// Frameworks give a gradient the type of its rows, so only a direct call gets this error.
#[test]
#[ignore = "needs a GPU"]
fn gradients_of_another_type_than_their_rows_are_refused() {
    let mut subject = GpuSubject::new(&[plain_config("t", 3)]);
    subject.bind(binding(1, plain_update(SGD))).unwrap();
    let (lookup, _) = subject.lookup(&[Input::plain(0, &[1, 2])], Insertion::AtLookup, true).unwrap();
    let before = scan(subject.table(0), 10);
    let mut subject = subject.with_arrays(RowType::Bfloat16);
    let gradients = Arc::new(vec![vec![1.0; 6]]);
    let error = subject.push(1, lookup, &gradients, true, &[]).unwrap_err();
    assert!(error.to_string().contains("the type of its rows, float32. Received: bfloat16"), "{error}");
    assert_eq!((scan(subject.table(0), 10) == before, subject.pending_pushes()), (true, 0));
    let mut subject = subject.with_arrays(RowType::Float32);
    subject.push(1, lookup, &gradients, true, &[]).unwrap();
    subject.commit(&[(1, 1.0)], true).unwrap();
    subject.apply(UpdateScalars { learning_rate: 0.5, step: 1, factor: 1.0 }, true).unwrap();
    assert!(scan(subject.table(0), 10) != before);
}

/// A dump copies a part of the records at a time, and reads it through pinned memory.
#[test]
#[ignore = "needs a GPU"]
fn a_table_of_several_parts_is_scanned_as_a_whole() {
    let eviction = Some(Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: false });
    let config = TableConfig { max_capacity: Some(1 << 20), eviction, ..plain_config("t", 64) };
    let mut table = table_on_gpu(config);
    table.set_update_rule(Some(plain_update(SGD)), false).unwrap();
    let keys: Vec<u64> = (0..300_000).map(|key| key * key).collect();
    table.find_or_insert(&keys, &mut vec![0.0; 64 * keys.len()]).unwrap();
    let expected = scan(&*table, 4096);
    assert_eq!(expected.len(), keys.len());
    let contents = table.for_scan(None).unwrap().unwrap();
    for max in [700, 200_000] {
        assert!(scan(&*contents, max) == expected, "{max} records at once");
    }
}

/// Sorts of two and three passes, with every tile size, and with so many tiles that the look-back goes over several groups. Also
/// with a small table beside a large one.
#[test]
#[ignore = "needs a GPU"]
fn millions_of_ids_of_a_table_follow_the_host() {
    for (len, range) in [(20_000, 1000), (300_000, 1000), (700_000, 1 << 20), (4_000_000, 1 << 24)] {
        let mut dice = Dice(range);
        let configs = [plain_config("a", 1), plain_config("b", 3), plain_config("c", 1)];
        let mut subjects: [Box<dyn Subject>; 2] =
            [Box::new(HostSubject::new(&configs, &POOL)), Box::new(GpuSubject::new(&configs))];
        let binding = Binding::new(1, any_update(&mut dice), false);
        subjects.iter_mut().for_each(|subject| subject.bind(binding.clone()).unwrap());
        for step in 1..=3 {
            let many: Vec<u64> = (0..len).map(|_| dice.below(range)).collect();
            let keys = [skewed_keys(&mut dice, 1001, 5000), skewed_keys(&mut dice, 70_001, 5000), many];
            let inputs: Vec<Input> = [1, 2, 0, 2].map(|k: usize| Input::plain(k, &keys[k])).into();
            let gradients = inputs.iter().map(|i| dice.floats(i.ids.keys().len() * configs[i.table].dim));
            let gradients = Arc::new(gradients.collect::<Vec<_>>());
            let rows = subjects.each_mut().map(|subject| {
                let (number, rows) = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
                subject.push(number, number, &gradients, true, &[]).unwrap();
                subject.commit(&[(number, 1.0)], true).unwrap();
                subject.apply(UpdateScalars { learning_rate: 0.05, step, factor: 1.0 }, true).unwrap();
                rows
            });
            for (feature, (host, gpu)) in rows[0].iter().zip(&rows[1]).enumerate() {
                assert!(bits(host) == bits(gpu), "{len} ids, step {step}, feature {feature}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn ten_million_operations_leave_it_as_the_host_table() {
    let seed = 20261121;
    println!("seed {seed}");
    let mut dice = Dice(seed);
    let config = TableConfig { initial_capacity: 1000, ..plain_config("t", 3) };
    let mut host = HostTable::new(config.clone()).unwrap();
    let mut gpu = GpuTable::new(&DEVICE, config).unwrap();
    let before = gpu.stats().unwrap();
    for round in 0..200u64 {
        let range = 20_000 << (round / 20);
        let keys: Vec<u64> =
            (0..50_000).map(|_| dice.below(range).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let mut rows = [unwritten(3 * keys.len()), unwritten(3 * keys.len())];
        let mut found = [vec![false; keys.len()], vec![false; keys.len()]];
        match dice.below(6) {
            0 => assert_eq!(host.erase(&keys).unwrap(), gpu.erase(&keys).unwrap()),
            1 => {
                let values = dice.floats(3 * keys.len());
                assert_eq!(
                    host.assign(&keys, &values, true).unwrap(),
                    gpu.assign(&keys, &values, true).unwrap()
                );
            }
            2 => {
                host.find(&keys, &mut rows[0], &mut found[0]).unwrap();
                gpu.find(&keys, &mut rows[1], &mut found[1]).unwrap();
            }
            _ => {
                let outcomes = host.find_or_insert(&keys, &mut rows[0]).unwrap();
                assert_eq!(gpu.find_or_insert(&keys, &mut rows[1]).unwrap(), outcomes);
            }
        }
        assert_eq!(found[0], found[1], "round {round}");
        assert!(bits(&rows[0]) == bits(&rows[1]), "round {round}");
    }
    assert!(scan(&host, 100_000) == scan(&gpu, 100_000));
    let after = gpu.stats().unwrap();
    assert!(after.capacity > 100 * before.capacity && after.bytes > before.bytes, "it has grown");
}

#[test]
#[ignore = "needs a GPU"]
fn no_key_is_lost_at_load_98_of_the_index() {
    let config = TableConfig { initial_capacity: 1_000_000, ..plain_config("t", 1) };
    let mut gpu = GpuTable::with_load(&DEVICE, config, 0.98).unwrap();
    let capacity = gpu.stats().unwrap().capacity;
    let keys: Vec<u64> = (0..capacity).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let rows: Vec<f32> = (0..capacity).map(|i| i as f32).collect();
    for (keys, rows) in keys.chunks(100_000).zip(rows.chunks(100_000)) {
        assert_eq!(gpu.assign(keys, rows, true).unwrap().inserted, keys.len() as u64);
    }
    assert_eq!(gpu.len().unwrap() as u64, capacity);
    println!("room for {capacity} keys at load 0.98, then for {}", gpu.stats().unwrap().capacity);
    let (mut got, mut found) = (unwritten(keys.len()), vec![false; keys.len()]);
    gpu.find(&keys, &mut got, &mut found).unwrap();
    assert!(found.iter().all(|f| *f) && got == rows);
}

/// Returns the key that has this public hash.
fn key_of_hash(hash: u64) -> u64 {
    let mut h = hash;
    for inverse in [0x9cb4_b2f8_1293_37db, 0x4f74_430c_22a5_4005] {
        h ^= h >> 33;
        h = h.wrapping_mul(inverse);
    }
    h ^ h >> 33
}

/// Under a public hash, all crafted keys would have the same two buckets of the index.
#[test]
#[ignore = "needs a GPU"]
fn keys_made_against_the_public_hash_are_inserted_like_others() {
    assert_eq!(sok_core::key::hash(key_of_hash(12345)), 12345);
    let crafted: Vec<u64> = (0..100_000).map(|i| key_of_hash(0x1234_5678_0000_0000 | i << 1)).collect();
    let others: Vec<u64> = (0..100_000).map(|i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    for _ in 0..3 {
        let times = [&others, &crafted].map(|keys| {
            let mut gpu = GpuTable::new(&DEVICE, plain_config("t", 3)).unwrap();
            let (mut rows, mut found) = (unwritten(3 * keys.len()), vec![false; keys.len()]);
            let start = std::time::Instant::now();
            for (keys, rows) in keys.chunks(10_000).zip(rows.chunks_mut(30_000)) {
                assert_eq!(gpu.find_or_insert(keys, rows).unwrap().inserted, keys.len() as u64);
            }
            let time = start.elapsed();
            gpu.find(keys, &mut rows, &mut found).unwrap();
            assert!(found.iter().all(|f| *f));
            time
        });
        println!("others {:?}, crafted {:?}", times[0], times[1]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn an_id_outside_a_static_table_is_told_at_the_next_call() {
    let config = TableConfig {
        vocabulary_size: Some(10),
        out_of_vocabulary: OutOfVocabulary::Raise,
        ..plain_config("fixed", 2)
    };
    let mut subject = GpuSubject::new(&[config]);
    let error = subject.lookup(&[Input::plain(0, &[2, 10])], Insertion::AtLookup, true).unwrap_err();
    assert!(matches!(error, Error::OutOfVocabulary { id: 10, last: 9, .. }), "{error}");
    let (_, rows) = subject.lookup(&[Input::plain(0, &[2, 9])], Insertion::AtLookup, true).unwrap();
    assert!(rows[0].iter().all(|x| *x != 123456.0));
    assert_eq!(scan(subject.table(0), 10).into_keys().collect::<Vec<_>>(), [2, 9]);
}

#[test]
#[ignore = "needs a GPU"]
fn every_dim_and_rule_gives_the_hosts_bits() {
    for (i, rule) in rules().into_iter().enumerate() {
        let chosen = if i == 3 { &EVERY_DIM[..] } else { &[EVERY_DIM[i % 9], 64][..] };
        let configs: Vec<TableConfig> =
            chosen.iter().map(|dim| plain_config(&format!("d{dim}"), *dim)).collect();
        let mut dice = Dice(i as u64);
        // Single ids only, bags only, or both.
        let inputs = |dice: &mut Dice, step: u64| {
            let keys = |dice: &mut Dice, n| {
                (0..n)
                    .map(|i| {
                        let range = [20, 400, 1 << 40][i % 3];
                        dice.below(range)
                    })
                    .collect::<Vec<u64>>()
            };
            let input = |(table, dice): (usize, &mut Dice)| {
                let plain = Input::plain(table, &keys(dice, 699));
                let is_of_bags = step == 2 || step == 3 && table % 2 == 0;
                let shape = Shape::Fixed { num_bags: 233, hotness: 3 };
                if is_of_bags { Input { shape, ..plain } } else { plain }
            };
            (0..configs.len()).map(|t| input((t, dice))).collect::<Vec<_>>()
        };
        let mut ops = Vec::new();
        for step in 1..5 {
            use common::steps::Op;
            ops.push(Op::Lookup {
                inputs: inputs(&mut dice, step),
                insertion: Insertion::AtLookup,
                save: true,
            });
            ops.push(Op::Push { lookup: usize::MAX, hold: step % 2 == 1, seed: dice.next() });
            ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0; 3] });
            let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
            ops.push(Op::Apply { scalars, is_update: true });
        }
        // A rule has code of its own, as have arrays of each type.
        let array_type = RowType::ALL[i % 3];
        run_all(&configs, common::large::plain_update(rule), &ops, &all_dims_with(array_type));
    }
}

fn all_dims_with(array_type: RowType) -> Maker {
    let maker = match array_type {
        RowType::Float32 => GPU,
        RowType::Float16 => FLOAT16,
        RowType::Bfloat16 => BFLOAT16,
    };
    Maker { dims: &[], ..maker }
}

/// Weights, padding, bags of any length and unknown ids, at dims with every number of lanes per row, also with lanes without
/// columns.
#[test]
#[ignore = "needs a GPU"]
fn any_bags_follow_the_model_at_every_dim() {
    use common::steps::Op;
    let configs: Vec<TableConfig> =
        EVERY_DIM.iter().map(|dim| plain_config(&format!("d{dim}"), *dim)).collect();
    let combiners = [Combiner::Sum, Combiner::Mean, Combiner::Sqrtn];
    let mut dice = Dice(29);
    let mut ops = Vec::new();
    for step in 1..=3 {
        let mut inputs = || {
            let input = |table: usize| {
                let shape = match (table + step) % 3 {
                    0 => Shape::Each,
                    1 => Shape::Fixed { num_bags: 60, hotness: 5 },
                    _ => common::large::ragged(&mut dice, 300),
                };
                let keys: Vec<u64> = (0..300).map(|_| dice.below([10, 100, 1 << 40][step - 1])).collect();
                let weights = (0..300).map(|_| dice.pick(&common::strategies::WEIGHTS)).collect::<Vec<f32>>();
                let weights = (table != 4).then_some(weights);
                let (combiner, padding_key) = (combiners[(table / 3 + step) % 3], Some(3));
                Input { shape, combiner, weights, padding_key, ..Input::plain(table, &keys) }
            };
            (0..configs.len()).map(input).collect::<Vec<_>>()
        };
        ops.push(Op::Lookup { inputs: inputs(), insertion: Insertion::Never, save: false });
        ops.push(Op::Lookup {
            inputs: inputs(),
            insertion: if step == 3 { Insertion::Never } else { Insertion::AtLookup },
            save: true,
        });
        ops.push(Op::Push { lookup: usize::MAX, hold: step == 1, seed: dice.next() });
        ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0; 3] });
        let scalars = UpdateScalars { learning_rate: 0.05, step: step as u64, factor: 1.0 };
        ops.push(Op::Apply { scalars, is_update: true });
    }
    for array_type in RowType::ALL {
        let update = common::large::plain_update(common::large::SGD);
        run_all(&configs, update, &ops, &all_dims_with(array_type));
    }
}

/// This test takes nearly all memory of the device, so it must run alone.
#[test]
#[ignore = "needs a GPU for itself"]
fn memory_that_is_missing_is_told_and_changes_nothing() {
    let mut gpu = GpuTable::new(&DEVICE, plain_config("large", 1024)).unwrap();
    let keys: Vec<u64> = (0..300_000).collect();
    let mut rows = unwritten(1024 * keys.len());
    gpu.find_or_insert(&keys[..1000], &mut rows[..1024 * 1000]).unwrap();
    let before = scan(&gpu, 10_000);
    let (free, _) = DEVICE.context.mem_get_info().unwrap();
    let taken = Buffer::<u8>::uninit(&DEVICE.context, free - (700 << 20)).unwrap();
    let error = gpu.find_or_insert(&keys, &mut rows).unwrap_err();
    let Error::Device(message) = &error else { panic!("{error}") };
    println!("{message}");
    for part in
        ["table `large` wants ", "bytes of GPU memory", "are free", "XLA_PYTHON_CLIENT", "max_capacity"]
    {
        assert!(message.contains(part), "{message}");
    }
    assert!(scan(&gpu, 10_000) == before);
    drop(taken);
    gpu.find_or_insert(&keys, &mut rows).unwrap();
    assert_eq!(gpu.len().unwrap(), keys.len());
}
