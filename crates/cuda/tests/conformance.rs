//! Tables on a GPU beside the model that the host's are held against: rows and states bit for bit.
//!
//! Needs a GPU: `cargo test -p sok-cuda --test conformance -- --ignored`.

#[path = "../../core/tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use common::group::{Ids, Input, Shape};
use common::large::{any_update, large_config, large_ops, skewed_keys};
use common::steps::{op, run_all};
use common::strategies::{config, plain_config, table_or_rule_op, update};
use common::subject::{HostSubject, Kept, Maker, Subject, sum_of_tickets};
use common::table::ModelTable;
use common::{Dice, bits, scan, unwritten};
use cudarc::driver::CudaEvent;
use proptest::prelude::*;
use sok_core::batch::Combiner;
use sok_core::error::{Error, Result};
use sok_core::host_group::Binding;
use sok_core::host_table::HostTable;
use sok_core::optimizer::{Rule, Update, UpdateScalars};
use sok_core::pool::Pool;
use sok_core::push::Keep;
use sok_core::table::{OutOfVocabulary, Table, TableConfig};
use sok_core::ticket::TICKET_LEN;
use sok_cuda::device::{Device, Stream};
use sok_cuda::gpu_group::{GpuGroup, LookupNumber, OutputGradients};
use sok_cuda::gpu_table::GpuTable;
use sok_cuda::memory::{Buffer, Plain, times_asked};
use sok_cuda::nvrtc::Source;
use sok_cuda::optimizer;
use sok_cuda::step::{Bags, Feature, KeyType};

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(2).unwrap());
static DEVICE: LazyLock<Arc<Device>> = LazyLock::new(|| Device::shared(0, &[]).unwrap());

const GPU: Maker = Maker { make: group_on_gpu, tells_late: true, dims: &[3, 64] };
const ALL_DIMS: Maker = Maker { dims: &[], ..GPU };

fn group_on_gpu(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(GpuSubject::new(configs))]
}

fn table_on_gpu(config: TableConfig) -> Box<dyn Table> {
    Box::new(GpuTable::new(&DEVICE, config).unwrap())
}

/// A group, and streams that take turns.
struct GpuSubject {
    group: GpuGroup,
    streams: Vec<Arc<cudarc::driver::CudaStream>>,
    calls: usize,
    tickets: BTreeMap<u64, Vec<f32>>,
    held: Vec<Kept>,
    /// Inputs of calls that may still run.
    inputs: Vec<Box<dyn std::any::Any>>,
}

fn on_device<T: Plain>(values: &[T]) -> Buffer<T> {
    Buffer::from_slice(&DEVICE.context, values).unwrap()
}

impl GpuSubject {
    fn new(configs: &[TableConfig]) -> GpuSubject {
        GpuSubject {
            group: GpuGroup::new(&DEVICE, configs.to_vec()).unwrap(),
            streams: (0..3).map(|_| DEVICE.context.new_stream().unwrap()).collect(),
            calls: 0,
            tickets: BTreeMap::new(),
            held: Vec::new(),
            inputs: Vec::new(),
        }
    }

    fn stream(&mut self) -> Stream {
        self.calls += 1;
        Stream(self.streams[self.calls % self.streams.len()].cu_stream())
    }

    fn keep<T: Plain + 'static>(&mut self, values: &[T]) -> u64 {
        let buffer = on_device(values);
        let address = buffer.address();
        self.inputs.push(Box::new(buffer));
        address
    }

    fn ids(&mut self, ids: &Ids) -> sok_cuda::step::Ids {
        let (address, high, key_type, len) = match ids {
            Ids::I64(ids) => (self.keep(ids), 0, KeyType::Wide, ids.len()),
            Ids::U64(ids) => (self.keep(ids), 0, KeyType::Wide, ids.len()),
            Ids::I32(ids) => (self.keep(ids), 0, KeyType::Signed, ids.len()),
            Ids::U32(ids) => (self.keep(ids), 0, KeyType::Unsigned, ids.len()),
            Ids::Words(low, high) => (self.keep(low), self.keep(high), KeyType::Words, low.len()),
        };
        sok_cuda::step::Ids { address, high, key_type, len }
    }
}

impl Subject for GpuSubject {
    fn name(&self) -> String {
        "GPU".into()
    }

    fn lookup(&mut self, inputs: &[Input], insert: bool, save: bool) -> Result<(u64, Vec<Vec<f32>>)> {
        let rows: Vec<Buffer<f32>> = inputs
            .iter()
            .map(|i| on_device(&unwritten(i.bags().len() * self.group.table(i.table).config().dim)))
            .collect();
        let mut features = Vec::new();
        for (input, rows) in inputs.iter().zip(&rows) {
            let ids = self.ids(&input.ids);
            let bags = match &input.shape {
                Shape::Each => Bags::Each,
                Shape::Fixed { num_bags, hotness } => Bags::Fixed { num_bags: *num_bags, hotness: *hotness },
                Shape::RaggedI64(s) => {
                    Bags::Ragged { splits: self.keep(s), wide: true, num_bags: s.len() - 1 }
                }
                Shape::RaggedI32(s) => {
                    Bags::Ragged { splits: self.keep(s), wide: false, num_bags: s.len() - 1 }
                }
            };
            features.push(Feature {
                name: &input.name,
                table: input.table,
                ids,
                bags,
                combiner: input.combiner,
                weights: input.weights.as_ref().map(|w| self.keep(w)),
                padding_key: input.padding_key,
                rows: rows.address(),
            });
        }
        let stream = self.stream();
        let number = self.group.lookup(&features, insert, save, None, stream)?;
        DEVICE.synchronize()?;
        self.inputs.clear();
        if let Some(fault) = self.group.take_fault() {
            return Err(fault);
        }
        Ok((number, rows.iter().map(|r| r.to_vec().unwrap()).collect()))
    }

    fn push(
        &mut self,
        number: u64,
        lookup: u64,
        gradients: &Kept,
        hold: bool,
        ids: &[usize],
    ) -> Result<Vec<Vec<f32>>> {
        // A framework's row of a batch of one may begin anywhere.
        let before = usize::from(number.is_multiple_of(3));
        let given = |g: &Vec<f32>| on_device(&[&[7.0][..before], g].concat());
        let rows: Vec<Buffer<f32>> = gradients.iter().map(given).collect();
        let weights: Vec<Buffer<f32>> = ids.iter().map(|n| on_device(&unwritten(*n))).collect();
        let weighted = self.group.weighted_features(lookup);
        let weight_gradients: Vec<_> =
            weighted.iter().copied().zip(weights.iter().map(Buffer::address)).collect();
        let ticket = on_device(&unwritten(TICKET_LEN));
        let addresses = rows.iter().map(|rows| rows.at(before)).collect();
        let lens: Vec<usize> = gradients.iter().map(Vec::len).collect();
        let (keep, merged_at_once) =
            if hold { (Some(Box::new((gradients.clone(), rows)) as Keep), None) } else { (None, Some(rows)) };
        let output = OutputGradients { rows: addresses, keep, check_finite: true };
        let stream = self.stream();
        self.group.push(
            LookupNumber::Known(lookup),
            output,
            &lens,
            &weight_gradients,
            ticket.address(),
            stream,
        )?;
        self.tickets.insert(number, ticket.to_vec()?);
        drop(merged_at_once);
        if hold {
            self.held.push(gradients.clone());
        }
        weights.iter().map(Buffer::to_vec).collect()
    }

    fn ticket(&self, number: u64) -> &[f32] {
        &self.tickets[&number]
    }

    fn commit(&mut self, named: &[(u64, f32)], is_update: bool) -> Result<f64> {
        let ticket = on_device(&sum_of_tickets(&self.tickets, named));
        let (norm, flag) = (on_device(&[-1.0f32]), on_device(&[f32::from(u8::from(is_update))]));
        let binding = self.binding().unwrap();
        let (accumulates, stream) = ((!is_update).then(|| flag.address()), self.stream());
        let tickets = [ticket.address()];
        optimizer::commit(&mut [&mut self.group], &[binding], &tickets, accumulates, norm.address(), stream)?;
        let norm = norm.to_vec()?[0];
        self.group.settle()?;
        Ok(f64::from(norm))
    }

    fn apply_by(&mut self, binding: &Binding, update: UpdateScalars, is_update: bool) -> Result<()> {
        let flag = f32::from(u8::from(is_update));
        let scalars = on_device(&[update.learning_rate, update.step as f32, flag, update.factor]);
        let (trigger, new) = (on_device(&[0.5f32; TICKET_LEN]), on_device(&[0.0f32; TICKET_LEN]));
        let (triggers, stream) = ([(trigger.address(), new.address())], self.stream());
        optimizer::apply(&mut [&mut self.group], &[*binding], scalars.address(), true, &triggers, stream)?;
        let new = new.to_vec()?;
        assert!(new[0] == 0.5 || new[0] == 1.5, "{}", new[0]);
        assert_eq!(new[1..], [0.5; TICKET_LEN - 1]);
        Ok(())
    }

    fn bind(&mut self, binding: Binding) -> Result<()> {
        self.group.bind(binding)
    }

    fn binding(&self) -> Option<Binding> {
        self.group.binding().copied()
    }

    fn num_tables(&self) -> usize {
        self.group.num_tables()
    }

    fn table(&self, number: usize) -> &dyn Table {
        self.group.table(number)
    }

    fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        self.group.table_mut(number)
    }

    fn pending_pushes(&mut self) -> usize {
        self.group.pending_pushes()
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        self.group.take_refused()
    }

    fn take_held(&mut self) -> Vec<Kept> {
        std::mem::take(&mut self.held)
    }
}

suite!(GPU, #[ignore = "needs a GPU"]);
table_suite!(table_on_gpu, #[ignore = "needs a GPU"]);

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

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
}

#[test]
#[ignore = "needs a GPU"]
fn large_calls_leave_a_group_as_its_model() {
    for seed in 0..24 {
        println!("seed {seed}");
        let mut dice = Dice(seed);
        let configs: Vec<TableConfig> = (0..1 + dice.below(4)).map(|_| large_config(&mut dice)).collect();
        let update = any_update(&mut dice);
        let ops = large_ops(&mut dice, configs.len());
        run_all(&configs, update, &ops, &GPU);
    }
}

/// Sorts of two and three passes, of every size of block, and of so many blocks that they tell each other in groups of groups; a small table beside.
#[test]
#[ignore = "needs a GPU"]
fn millions_of_ids_of_a_table_follow_the_host() {
    for (len, range) in [(20_000, 1000), (300_000, 1000), (700_000, 1 << 20), (4_000_000, 1 << 24)] {
        let mut dice = Dice(range);
        let configs = [plain_config("a", 1), plain_config("b", 3), plain_config("c", 1)];
        let mut subjects: [Box<dyn Subject>; 2] =
            [Box::new(HostSubject::new(&configs, &POOL)), Box::new(GpuSubject::new(&configs))];
        let binding = Binding { owner: 1, update: any_update(&mut dice), needs_norm: false };
        subjects.iter_mut().for_each(|subject| subject.bind(binding).unwrap());
        for step in 1..=3 {
            let many: Vec<u64> = (0..len).map(|_| dice.below(range)).collect();
            let keys = [skewed_keys(&mut dice, 1001, 5000), skewed_keys(&mut dice, 70_001, 5000), many];
            let inputs: Vec<Input> = [1, 2, 0, 2].map(|k: usize| Input::plain(k, &keys[k])).into();
            let gradients = inputs.iter().map(|i| dice.floats(i.ids.keys().len() * configs[i.table].dim));
            let gradients = Arc::new(gradients.collect::<Vec<_>>());
            let rows = subjects.each_mut().map(|subject| {
                let (number, rows) = subject.lookup(&inputs, true, true).unwrap();
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
    let before = gpu.stats();
    for round in 0..200u64 {
        let range = 20_000 << (round / 20);
        let keys: Vec<u64> =
            (0..50_000).map(|_| dice.below(range).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let mut rows = [unwritten(3 * keys.len()), unwritten(3 * keys.len())];
        let mut found = [vec![false; keys.len()], vec![false; keys.len()]];
        match dice.below(6) {
            0 => assert_eq!(host.erase(&keys), gpu.erase(&keys)),
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
    let after = gpu.stats();
    assert!(after.capacity > 100 * before.capacity && after.bytes > before.bytes, "it has grown");
}

#[test]
#[ignore = "needs a GPU"]
fn no_key_is_lost_at_load_98_of_the_index() {
    let config = TableConfig { initial_capacity: 1_000_000, ..plain_config("t", 1) };
    let mut gpu = GpuTable::with_load(&DEVICE, config, 0.98).unwrap();
    let capacity = gpu.stats().capacity;
    let keys: Vec<u64> = (0..capacity).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let rows: Vec<f32> = (0..capacity).map(|i| i as f32).collect();
    for (keys, rows) in keys.chunks(100_000).zip(rows.chunks(100_000)) {
        assert_eq!(gpu.assign(keys, rows, true).unwrap().inserted, keys.len() as u64);
    }
    assert_eq!(gpu.len() as u64, capacity);
    println!("room for {capacity} keys at load 0.98, then for {}", gpu.stats().capacity);
    let (mut got, mut found) = (unwritten(keys.len()), vec![false; keys.len()]);
    gpu.find(&keys, &mut got, &mut found).unwrap();
    assert!(found.iter().all(|f| *f) && got == rows);
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
    let error = subject.lookup(&[Input::plain(0, &[2, 10])], true, true).unwrap_err();
    assert!(matches!(error, Error::OutOfVocabulary { id: 10, last: 9, .. }), "{error}");
    let (_, rows) = subject.lookup(&[Input::plain(0, &[2, 9])], true, true).unwrap();
    assert!(rows[0].iter().all(|x| *x != 123456.0));
    assert_eq!(scan(subject.table(0), 10).into_keys().collect::<Vec<_>>(), [2, 9]);
}

#[test]
#[ignore = "needs a GPU"]
fn every_dim_and_rule_gives_the_hosts_bits() {
    let dims = [1, 3, 8, 17, 64, 100, 128, 257, 1024];
    for (i, rule) in common::strategies::rules().into_iter().enumerate() {
        let chosen = if i == 3 { &dims[..] } else { &[dims[i % 9], 64][..] };
        let configs: Vec<TableConfig> =
            chosen.iter().map(|dim| plain_config(&format!("d{dim}"), *dim)).collect();
        let mut dice = Dice(i as u64);
        // Rows alone, bags alone, both.
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
            ops.push(Op::Lookup { inputs: inputs(&mut dice, step), insert: true, save: true });
            ops.push(Op::Push { lookup: usize::MAX, hold: step % 2 == 1, seed: dice.next() });
            ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0; 3] });
            let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
            ops.push(Op::Apply { scalars, is_update: true });
        }
        run_all(&configs, common::large::plain_update(rule), &ops, &ALL_DIMS);
    }
}

/// Weights, padding, bags of any length, ids that nobody knows: lanes of all numbers, some of them without columns.
#[test]
#[ignore = "needs a GPU"]
fn any_bags_follow_the_model_at_every_dim() {
    use common::steps::Op;
    let dims = [1, 3, 8, 17, 64, 100, 128, 257, 1024];
    let configs: Vec<TableConfig> = dims.iter().map(|dim| plain_config(&format!("d{dim}"), *dim)).collect();
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
        ops.push(Op::Lookup { inputs: inputs(), insert: false, save: false });
        ops.push(Op::Lookup { inputs: inputs(), insert: step != 3, save: true });
        ops.push(Op::Push { lookup: usize::MAX, hold: step == 1, seed: dice.next() });
        ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0; 3] });
        let scalars = UpdateScalars { learning_rate: 0.05, step: step as u64, factor: 1.0 };
        ops.push(Op::Apply { scalars, is_update: true });
    }
    run_all(&configs, common::large::plain_update(common::strategies::rules()[0]), &ops, &ALL_DIMS);
}

const DELAY: Source = Source {
    name: "delay.cu",
    text: "extern \"C\" __global__ void delay(unsigned long long cycles) {
  for (const long long start = clock64(); clock64() - start < cycles;) {}
}",
    headers: &[],
};

/// Lets what comes after on the stream wait for so many cycles of the device.
#[allow(unsafe_code)]
fn pause(stream: Stream, cycles: u64) {
    let delay = DEVICE.kernel(&DELAY, "delay").unwrap();
    // SAFETY: its one parameter; it reads and writes nothing.
    unsafe { delay.launch(stream, (1, 1, 0), false, &mut [(&raw const cycles).cast_mut().cast()]) }.unwrap();
}

/// For up to a tenth of a millisecond.
fn lag(stream: Stream, dice: &mut Dice) {
    pause(stream, dice.pick(&[0u64, 0, 20_000, 200_000]));
}

/// A step of one feature a table, none of whose calls waits for the device: its arrays live until all have run.
struct Flight {
    ids: Vec<Buffer<u64>>,
    gradients: Vec<Buffer<f32>>,
    rows: Vec<Buffer<f32>>,
    /// Ids of each bag.
    hotness: usize,
    /// Ticket, norm, scalars, trigger and new trigger.
    small: [Buffer<f32>; 5],
}

impl Flight {
    fn new(keys: &[Vec<u64>], gradients: &[Vec<f32>], hotness: usize, scalars: UpdateScalars) -> Flight {
        let numbers = [scalars.learning_rate, scalars.step as f32, 1.0, scalars.factor];
        Flight {
            ids: keys.iter().map(|k| on_device(k)).collect(),
            gradients: gradients.iter().map(|g| on_device(g)).collect(),
            rows: gradients.iter().map(|g| on_device(&unwritten(g.len()))).collect(),
            hotness,
            small: [
                on_device(&unwritten(TICKET_LEN)),
                on_device(&[-1.0f32]),
                on_device(&numbers),
                on_device(&[0.5f32; TICKET_LEN]),
                on_device(&[0.0f32; TICKET_LEN]),
            ],
        }
    }

    fn start(&self, group: &mut GpuGroup, binding: Binding, holds: bool, mut next: impl FnMut() -> Stream) {
        let feature = |table: usize| {
            let len = self.ids[table].len();
            Feature {
                name: "f",
                table,
                ids: sok_cuda::step::Ids {
                    address: self.ids[table].address(),
                    high: 0,
                    key_type: KeyType::Wide,
                    len,
                },
                bags: Bags::Fixed { num_bags: len / self.hotness, hotness: self.hotness },
                combiner: sok_core::batch::Combiner::Sum,
                weights: None,
                padding_key: None,
                rows: self.rows[table].address(),
            }
        };
        let features: Vec<Feature> = (0..self.ids.len()).map(feature).collect();
        let [ticket, norm, numbers, trigger, new] = self.small.each_ref().map(Buffer::address);
        let lookup = group.lookup(&features, true, true, None, next()).unwrap();
        let output = OutputGradients {
            rows: self.gradients.iter().map(Buffer::address).collect(),
            keep: holds.then(|| Box::new(()) as Keep),
            check_finite: false,
        };
        let lens: Vec<usize> = self.gradients.iter().map(Buffer::len).collect();
        group.push(LookupNumber::Known(lookup), output, &lens, &[], ticket, next()).unwrap();
        let groups = &mut [group];
        optimizer::commit(groups, &[binding], &[ticket], None, norm, next()).unwrap();
        optimizer::apply(groups, &[binding], numbers, false, &[(trigger, new)], next()).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn calls_on_streams_that_lag_come_in_order() {
    for seed in 0..6 {
        println!("seed {seed}");
        let mut dice = Dice(seed);
        let configs = [plain_config("a", 3), plain_config("b", 64)];
        let binding = Binding { owner: 1, update: any_update(&mut dice), needs_norm: seed % 2 == 0 };
        let mut host = HostSubject::new(&configs, &POOL);
        let mut group = GpuGroup::new(&DEVICE, configs.to_vec()).unwrap();
        host.bind(binding).unwrap();
        group.bind(binding).unwrap();
        let streams: Vec<_> = (0..3).map(|_| DEVICE.context.new_stream().unwrap()).collect();
        let next = |dice: &mut Dice| {
            let stream = Stream(streams[dice.below(3) as usize].cu_stream());
            lag(stream, dice);
            stream
        };
        let (mut flights, mut expected) = (Vec::new(), Vec::new());
        for step in 1..=12 {
            // Those of bags are copied where they are not held.
            let hotness = [1, 3][dice.below(2) as usize];
            let num_bags = 3003 / hotness;
            let keys: Vec<Vec<u64>> = (0..2).map(|_| skewed_keys(&mut dice, 3003, 5000)).collect();
            let gradients: Vec<Vec<f32>> =
                configs.iter().map(|config| dice.floats(num_bags * config.dim)).collect();
            let shape = Shape::Fixed { num_bags, hotness };
            let input = |table: usize| Input { shape: shape.clone(), ..Input::plain(table, &keys[table]) };
            let inputs: Vec<Input> = (0..2).map(input).collect();
            let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
            let (number, rows) = host.lookup(&inputs, true, true).unwrap();
            let kept = Arc::new(gradients.clone());
            host.push(number, number, &kept, true, &[]).unwrap();
            let norm = host.commit(&[(number, 1.0)], true).unwrap();
            host.apply(scalars, true).unwrap();
            expected.push((rows, norm as f32));

            let flight = Flight::new(&keys, &gradients, hotness, scalars);
            flight.start(&mut group, binding, step % 3 != 0, || next(&mut dice));
            flights.push(flight);
        }
        DEVICE.synchronize().unwrap();
        for (step, (flight, (rows, norm))) in flights.iter().zip(&expected).enumerate() {
            for (got, rows) in flight.rows.iter().zip(rows) {
                assert!(bits(&got.to_vec().unwrap()) == bits(rows), "rows of step {step}");
            }
            if binding.needs_norm {
                assert_eq!(flight.small[1].to_vec().unwrap()[0], *norm, "norm of step {step}");
            }
        }
        group.settle().unwrap();
        for table in 0..2 {
            assert!(scan(host.table(table), 1000) == scan(group.table(table), 1000), "table {table}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_steady_step_asks_for_no_memory() {
    let configs = [3, 64, 64].map(|dim| TableConfig { initial_capacity: 100_000, ..plain_config("t", dim) });
    let mut dice = Dice(1);
    for (holds, hotness) in [(true, 1), (false, 1), (true, 4), (false, 4)] {
        let mut group = GpuGroup::new(&DEVICE, configs.to_vec()).unwrap();
        let binding = Binding { owner: 1, update: any_update(&mut dice), needs_norm: false };
        group.bind(binding).unwrap();
        let flights: Vec<Flight> = (1..=20)
            .map(|step| {
                let keys = configs.each_ref().map(|_| skewed_keys(&mut dice, 4000, 50_000));
                let gradients = configs.each_ref().map(|config| dice.floats(4000 / hotness * config.dim));
                Flight::new(
                    &keys,
                    &gradients,
                    hotness,
                    UpdateScalars { learning_rate: 0.05, step, factor: 1.0 },
                )
            })
            .collect();
        let stream = DEVICE.context.new_stream().unwrap();
        let (mut before, mut len) = (0, 0);
        for (step, flight) in flights.iter().enumerate() {
            if step == 5 {
                len = group.table(0).len();
                before = times_asked();
            }
            flight.start(&mut group, binding, holds, || Stream(stream.cu_stream()));
        }
        assert_eq!(times_asked(), before, "held: {holds}, ids a bag: {hotness}");
        DEVICE.synchronize().unwrap();
        assert!(group.table(0).len() > len, "later steps bring new keys");
    }
}

/// Some ids of each step are new, and all that may be new, with those of the step before, come to be more than the table has room for:
/// first in its index, then in memory for records.
#[test]
#[ignore = "needs a GPU"]
fn steps_near_a_tables_size_do_not_wait() {
    const IDS: u64 = 1000;
    const DIM: usize = 1024;
    let config = TableConfig { initial_capacity: 4 * IDS, ..plain_config("t", DIM) };
    let mut group = GpuGroup::new(&DEVICE, vec![config]).unwrap();
    let rule = Rule::Sgd { momentum: 0.0, nesterov: false };
    let update = Update { rule, weight_decay: None, clipvalue: None, clipnorm: None };
    let binding = Binding { owner: 1, update, needs_norm: false };
    group.bind(binding).unwrap();
    let mut dice = Dice(1);
    let gradients = dice.floats(IDS as usize * DIM);
    let flights: Vec<Flight> = (1..=40)
        .map(|step| {
            let key = |i| if i < 30 { 1_000_000 + 30 * step + i } else { (IDS * step + i) % (2 * IDS - 100) };
            let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
            Flight::new(&[(0..IDS).map(key).collect()], std::slice::from_ref(&gradients), 1, scalars)
        })
        .collect();
    let stream = DEVICE.context.new_stream().unwrap();
    let (mut slept, mut waits) = (None::<CudaEvent>, Vec::new());
    for flight in &flights {
        let mut calls = 0;
        flight.start(&mut group, binding, true, || {
            calls += 1;
            // The lookup is on its way, behind the nap that the step before took after its own.
            if calls == 2 {
                waits.push(slept.take().is_some_and(|nap| nap.is_complete()));
                pause(Stream(stream.cu_stream()), 40_000_000);
                slept = Some(stream.record_event(None).unwrap());
            }
            Stream(stream.cu_stream())
        });
    }
    DEVICE.synchronize().unwrap();
    assert!(group.table(0).len() > 3 * IDS as usize, "later steps bring new keys");
    // The first steps ask for memory, one makes the table grow, and a host may be held up for as long as a nap. Without room for later
    // calls in index and memory, half of all steps wait.
    assert!(waits[5..].iter().filter(|w| **w).count() <= 4, "{waits:?}");
}

/// Takes nearly all memory of the device, so it runs alone.
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
    assert_eq!(gpu.len(), keys.len());
}
