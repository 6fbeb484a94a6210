//! Steps whose calls do not wait for the device, on one stream and on several.

use std::sync::Arc;

use cudarc::driver::CudaEvent;
use sok_core::contract::batch::Combiner;
use sok_core::contract::binding::Binding;
use sok_core::contract::gradients::Keep;
use sok_core::contract::group::Group;
use sok_core::contract::table::{Insertion, TableConfig};
use sok_core::contract::ticket::TICKET_LEN;
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::formula::{Rule, Sgd};
use sok_core::row_type::RowType;
use sok_cuda::device::{Order, Stream};
use sok_cuda::gpu_group::optimizer;
use sok_cuda::gpu_group::{GpuGroup, LookupNumber, OutputGradients};
use sok_cuda::memory::{Buffer, times_asked};
use sok_cuda::nvrtc::Source;
use sok_cuda::step::{Bags, Feature, KeyType};

use crate::POOL;
use crate::common::input::{Input, Shape};
use crate::common::large::{any_update, skewed_keys};
use crate::common::strategies::plain_config;
use crate::common::subject::{HostSubject, Subject};
use crate::common::{Dice, bits, scan, unwritten};
use crate::subject::{DEVICE, on_device};

const DELAY: Source = Source {
    name: "delay.cu",
    text: "extern \"C\" __global__ void delay(unsigned long long cycles) {
  for (const long long start = clock64(); clock64() - start < cycles;) {}
}",
    headers: || &[],
};

/// Of an optimizer whose formula the core has, since these steps gather no pieces.
fn any_formula(dice: &mut Dice) -> Update {
    std::iter::repeat_with(|| any_update(dice)).find(|update| !update.rule.is_general()).unwrap()
}

/// Makes later work on the stream wait for this many cycles of the device.
#[allow(unsafe_code)]
fn pause(stream: Stream, cycles: u64) {
    let delay = DEVICE.kernel(&DELAY, "delay").unwrap();
    // SAFETY: The kernel has this one parameter, and accesses no memory.
    unsafe { delay.launch(stream, (1, 1, 0), Order::After, &mut [(&raw const cycles).cast_mut().cast()]) }
        .unwrap();
}

/// Delays the stream by up to a tenth of a millisecond.
fn lag(stream: Stream, dice: &mut Dice) {
    pause(stream, dice.pick(&[0u64, 0, 20_000, 200_000]));
}

/// A step with one feature for each table. None of its calls waits for the device, so its arrays live until all calls have
/// completed.
struct Flight {
    ids: Vec<Buffer<u64>>,
    gradients: Vec<Buffer<f32>>,
    rows: Vec<Buffer<f32>>,
    /// Number of ids of each bag.
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

    fn start(&self, group: &mut GpuGroup, binding: &Binding, holds: bool, mut next: impl FnMut() -> Stream) {
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
                combiner: Combiner::Sum,
                weights: None,
                padding_key: None,
                is_silent: false,
                at_owner: false,
                id_counts: 0,
                scores: None,
                rows: self.rows[table].address(),
                array_type: RowType::Float32,
            }
        };
        let features: Vec<Feature> = (0..self.ids.len()).map(feature).collect();
        let [ticket, norm, numbers, trigger, new] = self.small.each_ref().map(Buffer::address);
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        let lookup = unsafe { group.lookup(&features, Insertion::AtLookup, true, None, next()) }.unwrap();
        let output = OutputGradients {
            rows: self.gradients.iter().map(Buffer::address).collect(),
            array_type: RowType::Float32,
            keep: holds.then(|| Box::new(()) as Keep),
            check_finite: false,
        };
        let lens: Vec<usize> = self.gradients.iter().map(Buffer::len).collect();
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe { group.push(LookupNumber::Known(lookup), output, &lens, &[], ticket, next()) }.unwrap();
        let groups = &mut [group];
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe { optimizer::commit(groups, std::slice::from_ref(binding), &[ticket], None, norm, next()) }
            .unwrap();
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe {
            optimizer::apply(groups, std::slice::from_ref(binding), numbers, false, &[(trigger, new)], next())
        }
        .unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn calls_on_streams_that_lag_come_in_order() {
    for seed in 0..6 {
        println!("seed {seed}");
        let mut dice = Dice(seed);
        let configs = [plain_config("a", 3), plain_config("b", 64)];
        let binding = Binding::new(1, any_formula(&mut dice), seed % 2 == 0);
        let mut host = HostSubject::new(&configs, &POOL);
        let mut group = GpuGroup::new(&DEVICE, configs.to_vec()).unwrap();
        host.bind(binding.clone()).unwrap();
        group.bind(binding.clone()).unwrap();
        let streams: Vec<_> = (0..3).map(|_| DEVICE.context.new_stream().unwrap()).collect();
        let next = |dice: &mut Dice| {
            let stream = Stream::of_cudarc(&streams[dice.below(3) as usize]);
            lag(stream, dice);
            stream
        };
        let (mut flights, mut expected) = (Vec::new(), Vec::new());
        for step in 1..=12 {
            // Gradients of bags are copied unless they are held.
            let hotness = [1, 3][dice.below(2) as usize];
            let num_bags = 3003 / hotness;
            let keys: Vec<Vec<u64>> = (0..2).map(|_| skewed_keys(&mut dice, 3003, 5000)).collect();
            let gradients: Vec<Vec<f32>> =
                configs.iter().map(|config| dice.floats(num_bags * config.dim)).collect();
            let shape = Shape::Fixed { num_bags, hotness };
            let input = |table: usize| Input { shape: shape.clone(), ..Input::plain(table, &keys[table]) };
            let inputs: Vec<Input> = (0..2).map(input).collect();
            let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
            let (number, rows) = host.lookup(&inputs, Insertion::AtLookup, true).unwrap();
            let kept = Arc::new(gradients.clone());
            host.push(number, number, &kept, true, &[]).unwrap();
            let norm = host.commit(&[(number, 1.0)], true).unwrap();
            host.apply(scalars, true).unwrap();
            expected.push((rows, norm as f32));

            let flight = Flight::new(&keys, &gradients, hotness, scalars);
            flight.start(&mut group, &binding, step % 3 != 0, || next(&mut dice));
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
        let binding = Binding::new(1, any_formula(&mut dice), false);
        group.bind(binding.clone()).unwrap();
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
                len = group.table(0).len().unwrap();
                before = times_asked();
            }
            flight.start(&mut group, &binding, holds, || Stream::of_cudarc(&stream));
        }
        assert_eq!(times_asked(), before, "held: {holds}, ids a bag: {hotness}");
        DEVICE.synchronize().unwrap();
        assert!(group.table(0).len().unwrap() > len, "later steps bring new keys");
    }
}

/// Some ids of each step are new. The maximum number of new keys of two steps exceeds the room of the table, first in its index,
/// then in the memory for records.
#[test]
#[ignore = "needs a GPU"]
fn steps_near_a_tables_size_do_not_wait() {
    const IDS: u64 = 1000;
    const DIM: usize = 1024;
    let config = TableConfig { initial_capacity: 4 * IDS, ..plain_config("t", DIM) };
    let mut group = GpuGroup::new(&DEVICE, vec![config]).unwrap();
    let rule = Rule::Sgd(Sgd { momentum: 0.0, nesterov: false });
    let update = Update { rule, weight_decay: None, clipvalue: None, clipnorm: None };
    let binding = Binding::new(1, update, false);
    group.bind(binding.clone()).unwrap();
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
        flight.start(&mut group, &binding, true, || {
            calls += 1;
            // The lookup is enqueued, after the pause that the previous step enqueued after its own lookup.
            if calls == 2 {
                waits.push(slept.take().is_some_and(|nap| nap.is_complete()));
                pause(Stream::of_cudarc(&stream), 40_000_000);
                slept = Some(stream.record_event(None).unwrap());
            }
            Stream::of_cudarc(&stream)
        });
    }
    DEVICE.synchronize().unwrap();
    assert!(group.table(0).len().unwrap() > 3 * IDS as usize, "later steps bring new keys");
    // The first steps request memory, one makes the table grow, and the host may be delayed for as long as a pause. Without room
    // for later calls in index and memory, half of all steps would wait.
    assert!(waits[5..].iter().filter(|w| **w).count() <= 4, "{waits:?}");
}
