//! A group of GPU tables, as a subject of the test suites.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};

use cudarc::driver::CudaStream;
use sok_core::contract::binding::Binding;
use sok_core::contract::gradients::Keep;
use sok_core::contract::group::Group;
use sok_core::contract::profile::Profile;
use sok_core::contract::table::{Contents, Insertion, Table, TableConfig};
use sok_core::contract::ticket::TICKET_LEN;
use sok_core::error::{Error, Result};
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Call, Tag};
use sok_core::exchange::placement::Placement;
use sok_core::exchange::threads::ThreadRank;
use sok_core::formula::update::UpdateScalars;
use sok_core::row_type::{Bfloat16, Float16, Number, RowType};
use sok_cuda::device::{Device, Stream};
use sok_cuda::gpu_group::sharded::{self, ShardedGpuGroup};
use sok_cuda::gpu_group::{GpuGroup, LookupNumber, OutputGradients};
use sok_cuda::gpu_group::{general, optimizer};
use sok_cuda::memory::{Buffer, Plain};
use sok_cuda::peers::{Exchange, Peers};
use sok_cuda::step::{Bags, Feature, KeyType, ScoreType, Scores};

use crate::common::general::{NUM_STATES, step_piece};
use crate::common::input::{Ids, Input, Shape};
use crate::common::sharded::TIMEOUT;
use crate::common::subject::{Kept, Subject, scalar_rows, sum_of_tickets};
use crate::common::unwritten;

pub static DEVICE: LazyLock<Arc<Device>> = LazyLock::new(|| Device::shared(0, &[]).unwrap());

/// A group of one process, or one that ranks share.
pub enum Tested {
    One(Box<GpuGroup>),
    Shared(Box<ShardedGpuGroup>),
}

impl Tested {
    fn group(&self) -> &dyn Group {
        match self {
            Tested::One(group) => &**group,
            Tested::Shared(group) => &**group,
        }
    }

    fn group_mut(&mut self) -> &mut dyn Group {
        match self {
            Tested::One(group) => &mut **group,
            Tested::Shared(group) => &mut **group,
        }
    }

    fn take_fault(&mut self) -> Option<Error> {
        match self {
            Tested::One(group) => group.take_fault(),
            Tested::Shared(group) => group.take_fault(),
        }
    }
}

/// Whether this rank has pooled bags for others.
pub static HAS_POOLED: AtomicBool = AtomicBool::new(false);

/// A group, whose calls go to several streams in turn.
pub struct GpuSubject {
    group: Tested,
    streams: Vec<Arc<CudaStream>>,
    calls: usize,
    /// By number of a lookup: the indices of its features that have weights.
    weighted: BTreeMap<u64, Vec<usize>>,
    tickets: BTreeMap<u64, Vec<f32>>,
    held: Vec<Kept>,
    /// Inputs of calls that may not have completed.
    inputs: Vec<Arc<dyn Any + Send + Sync>>,
    /// Whether a commit waits for its report.
    pub settles: bool,
    /// The type of the arrays of rows and gradients.
    array_type: RowType,
}

/// An array of rows or gradients.
enum Array {
    Float32(Buffer<f32>),
    Float16(Buffer<u16>),
    Bfloat16(Buffer<u16>),
}

impl Array {
    /// `floats`: numbers of this type.
    fn new(floats: &[f32], array_type: RowType) -> Array {
        match array_type {
            RowType::Float32 => Array::Float32(on_device(floats)),
            RowType::Float16 => {
                Array::Float16(on_device(&floats.iter().map(|x| Float16::from_f32(*x).0).collect::<Vec<_>>()))
            }
            RowType::Bfloat16 => Array::Bfloat16(on_device(
                &floats.iter().map(|x| Bfloat16::from_f32(*x).0).collect::<Vec<_>>(),
            )),
        }
    }

    fn at(&self, number: usize) -> u64 {
        match self {
            Array::Float32(array) => array.at(number),
            Array::Float16(array) | Array::Bfloat16(array) => array.at(number),
        }
    }

    fn floats(&self) -> Vec<f32> {
        match self {
            Array::Float32(array) => array.to_vec().unwrap(),
            Array::Float16(array) => {
                array.to_vec().unwrap().into_iter().map(|x| Float16(x).to_f32()).collect()
            }
            Array::Bfloat16(array) => {
                array.to_vec().unwrap().into_iter().map(|x| Bfloat16(x).to_f32()).collect()
            }
        }
    }
}

pub fn on_device<T: Plain>(values: &[T]) -> Buffer<T> {
    Buffer::from_slice(&DEVICE.context, values).unwrap()
}

/// Connects the GPUs of ranks, by NCCL if `SOK_EXCHANGE` says so.
pub fn peers_of(communicator: Arc<dyn Communicator>) -> Peers {
    let tag = Tag { call: Call::Barrier, layer: u32::MAX, step: 0, round: 0 };
    let by_nccl = std::env::var("SOK_EXCHANGE").is_ok_and(|exchange| exchange == "nccl");
    let exchange = if by_nccl { Exchange::Nccl } else { Exchange::Memory };
    Peers::connect(communicator, &DEVICE, exchange, &[], tag).unwrap().unwrap()
}

impl GpuSubject {
    pub fn new(configs: &[TableConfig]) -> GpuSubject {
        GpuSubject::of(Tested::One(Box::new(GpuGroup::new(&DEVICE, configs.to_vec()).unwrap())))
    }

    /// The only rank of its world.
    pub fn alone(configs: &[TableConfig]) -> GpuSubject {
        let configs = configs.iter().map(|config| (config.clone(), Placement::Distributed)).collect();
        let peers = Arc::new(peers_of(Arc::new(ThreadRank::world(1, TIMEOUT).remove(0))));
        GpuSubject::of(Tested::Shared(Box::new(
            ShardedGpuGroup::new(&DEVICE, configs, &peers, 1, 1, RowType::Float32).unwrap(),
        )))
    }

    pub fn of(group: Tested) -> GpuSubject {
        GpuSubject {
            group,
            streams: (0..3).map(|_| DEVICE.context.new_stream().unwrap()).collect(),
            calls: 0,
            weighted: BTreeMap::new(),
            tickets: BTreeMap::new(),
            held: Vec::new(),
            inputs: Vec::new(),
            settles: true,
            array_type: RowType::Float32,
        }
    }

    /// With arrays of this type.
    pub fn with_arrays(self, array_type: RowType) -> GpuSubject {
        GpuSubject { array_type, ..self }
    }

    fn stream(&mut self) -> Stream {
        self.calls += 1;
        Stream::of_cudarc(&self.streams[self.calls % self.streams.len()])
    }

    fn keep<T: Plain + 'static>(&mut self, values: &[T]) -> u64 {
        let buffer = on_device(values);
        let address = buffer.address();
        self.inputs.push(Arc::new(buffer));
        address
    }

    /// Tells a group of ranks the ids of the next lookup, or others, or both, or none.
    fn prefetch(&mut self, features: &[Feature], stream: Stream) {
        let other = |this: &mut GpuSubject, feature: &Feature| {
            let keys: Vec<u64> = (0..feature.ids.len as u64).map(|i| i % 5).collect();
            let (address, len) = (this.keep(&keys), keys.len());
            let ids = sok_cuda::step::Ids { address, high: 0, key_type: KeyType::Wide, len };
            Feature { ids, ..feature.named("other") }
        };
        let others: Vec<Feature> = features.iter().map(|feature| other(self, feature)).collect();
        let Tested::Shared(group) = &mut self.group else { return };
        let told: &[&[Feature]] = match self.calls % 4 {
            0 => &[],
            1 => &[features],
            2 => &[&others],
            _ => &[&others, features],
        };
        for features in told {
            // SAFETY: The buffers are on this device.
            unsafe { group.prefetch(features, Box::new(self.inputs.clone()), Some(stream)) }.unwrap();
        }
    }

    /// `narrow`: as int32, if they fit.
    fn scores(&mut self, scores: &[i64], narrow: bool) -> Scores {
        match scores.iter().map(|&score| i32::try_from(score)).collect::<std::result::Result<Vec<i32>, _>>() {
            Ok(scores) if narrow => Scores { address: self.keep(&scores), score_type: ScoreType::Narrow },
            _ => Scores { address: self.keep(scores), score_type: ScoreType::Wide },
        }
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

/// Computes the new values of all rows of a group by the tests' optimizer without a formula. `size`: floats of a piece.
fn update_pieces(
    group: &mut GpuGroup,
    binding: &Binding,
    scalars: u64,
    size: usize,
    stream: Stream,
) -> Result<()> {
    let learning_rate = sok_cuda::memory::read::<f32>(&DEVICE.context, scalars, 1)?[0];
    let (mut number, next) = (1, on_device(&[u32::MAX]));
    while number != 0 {
        let piece = on_device(&[number]);
        let to: Vec<Buffer<f32>> = (0..2 + NUM_STATES).map(|_| on_device(&unwritten(size))).collect();
        let addresses: Vec<u64> = to.iter().map(Buffer::address).collect();
        let (groups, bindings) = (&mut [&mut *group], std::slice::from_ref(binding));
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe { general::gather(groups, bindings, scalars, piece.address(), &addresses, size, stream) }?;
        let mut arrays = to.iter().map(Buffer::to_vec).collect::<Result<Vec<_>>>()?;
        step_piece(&mut arrays, learning_rate);
        let from: Vec<Buffer<f32>> = arrays[1..].iter().map(|array| on_device(array)).collect();
        let addresses: Vec<u64> = from.iter().map(Buffer::address).collect();
        let to_next = next.address();
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe { general::scatter(groups, bindings, piece.address(), &addresses, size, to_next, stream) }?;
        number = next.to_vec()?[0];
    }
    Ok(())
}

impl Subject for GpuSubject {
    fn name(&self) -> String {
        "GPU".into()
    }

    fn is_sharded(&self) -> bool {
        matches!(self.group, Tested::Shared(_))
    }

    fn array_type(&self) -> RowType {
        self.array_type
    }

    fn lookup(&mut self, inputs: &[Input], insertion: Insertion, save: bool) -> Result<(u64, Vec<Vec<f32>>)> {
        let dim = |input: &Input| self.group.group().table(input.table).config().dim;
        let array = |input: &Input| Array::new(&unwritten(input.bags().len() * dim(input)), self.array_type);
        let rows: Vec<Array> = inputs.iter().map(array).collect();
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
                is_silent: false,
                at_owner: false,
                id_counts: 0,
                scores: input.scores.as_ref().map(|scores| self.scores(scores, input.table % 2 == 1)),
                rows: rows.at(0),
                array_type: self.array_type,
            });
        }
        let stream = self.stream();
        self.prefetch(&features, stream);
        let number = match &mut self.group {
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            Tested::One(group) => unsafe { group.lookup(&features, insertion, save, None, stream) },
            // SAFETY: As above.
            Tested::Shared(group) => unsafe {
                let number = group.lookup(&features, insertion, save, None, stream);
                HAS_POOLED.fetch_or(group.has_pooled(), Relaxed);
                number
            },
        }?;
        DEVICE.synchronize()?;
        self.inputs.clear();
        if let Some(fault) = self.group.take_fault() {
            return Err(fault);
        }
        let weighted = (0..inputs.len()).filter(|&f| inputs[f].weights.is_some()).collect();
        self.weighted.insert(number, weighted);
        Ok((number, rows.iter().map(Array::floats).collect()))
    }

    fn push(
        &mut self,
        number: u64,
        lookup: u64,
        gradients: &Kept,
        hold: bool,
        ids: &[usize],
    ) -> Result<Vec<Vec<f32>>> {
        // The only row of a framework's batch may begin at an address that is not a multiple of 16.
        let before = usize::from(number.is_multiple_of(3));
        let given = |g: &Vec<f32>| Array::new(&[&[7.0][..before], g].concat(), self.array_type);
        let rows: Vec<Array> = gradients.iter().map(given).collect();
        let weights: Vec<Buffer<f32>> = ids.iter().map(|n| on_device(&unwritten(*n))).collect();
        let weighted = self.weighted.get(&lookup).into_iter().flatten().copied();
        let weight_gradients: Vec<_> = weighted.zip(weights.iter().map(Buffer::address)).collect();
        let ticket = on_device(&unwritten(TICKET_LEN));
        let addresses = rows.iter().map(|rows| rows.at(before)).collect();
        let lens: Vec<usize> = gradients.iter().map(Vec::len).collect();
        let (keep, merged_at_once) =
            if hold { (Some(Box::new((gradients.clone(), rows)) as Keep), None) } else { (None, Some(rows)) };
        let array_type = self.array_type;
        let output = OutputGradients { rows: addresses, array_type, keep, check_finite: true };
        let stream = self.stream();
        let (address, to) = (ticket.address(), LookupNumber::Known(lookup));
        match &mut self.group {
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            Tested::One(group) => unsafe {
                group.push(to, output, &lens, &weight_gradients, address, stream)
            },
            // SAFETY: As above.
            Tested::Shared(group) => unsafe {
                group.push(to, output, &lens, &weight_gradients, address, stream)
            },
        }?;
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
        let (bindings, to) = ([binding], norm.address());
        match &mut self.group {
            // SAFETY: The buffers are on this device, and live until it has been waited for.
            Tested::One(group) => unsafe {
                optimizer::commit(&mut [group], &bindings, &tickets, accumulates, to, stream)
            },
            // SAFETY: As above.
            Tested::Shared(group) => unsafe {
                sharded::commit(&mut [group], &bindings, &tickets, accumulates, to, stream)
            },
        }?;
        let norm = norm.to_vec()?[0];
        match &mut self.group {
            _ if !self.settles => {}
            Tested::One(group) => group.settle()?,
            Tested::Shared(group) => group.settle()?,
        }
        Ok(f64::from(norm))
    }

    fn apply_by(&mut self, binding: &Binding, update: UpdateScalars, is_update: bool) -> Result<()> {
        let scalars = on_device(&scalar_rows(update, is_update));
        let (trigger, new) = (on_device(&[0.5f32; TICKET_LEN]), on_device(&[0.0f32; TICKET_LEN]));
        let (triggers, stream) = ([(trigger.address(), new.address())], self.stream());
        let group = match &mut self.group {
            Tested::One(group) => group,
            Tested::Shared(group) => group.shard_mut(),
        };
        if binding.update.rule.is_general() && is_update {
            // A size that cuts rows.
            update_pieces(group, binding, scalars.address(), 64, stream)?;
        }
        // SAFETY: The buffers are on this device, and live until it has been waited for.
        unsafe {
            optimizer::apply(
                &mut [group],
                std::slice::from_ref(binding),
                scalars.address(),
                true,
                &triggers,
                stream,
            )
        }?;
        let new = new.to_vec()?;
        assert!(new[0] == 0.5 || new[0] == 1.5, "{}", new[0]);
        assert_eq!(new[1..], [0.5; TICKET_LEN - 1]);
        Ok(())
    }

    fn bind(&mut self, binding: Binding) -> Result<()> {
        self.group.group_mut().bind(binding)
    }

    fn binding(&self) -> Option<Binding> {
        self.group.group().binding().cloned()
    }

    fn num_tables(&self) -> usize {
        self.group.group().num_tables()
    }

    fn table(&mut self, number: usize) -> &dyn Table {
        let group = self.group.group_mut();
        group.settle_tables();
        group.table(number)
    }

    fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        self.group.group_mut().table_mut(number)
    }

    fn tables(&mut self) -> Vec<&dyn Contents> {
        let group = self.group.group_mut();
        group.settle_tables();
        (0..group.num_tables()).map(|number| group.table(number) as &dyn Contents).collect()
    }

    fn tables_mut(&mut self) -> Vec<&mut dyn Table> {
        self.group.group_mut().tables_mut()
    }

    fn pending_pushes(&mut self) -> usize {
        self.group.group_mut().pending_pushes(true).unwrap()
    }

    fn measure(&mut self, is_on: bool) {
        self.group.group_mut().measure(is_on);
    }

    fn take_profile(&mut self) -> Profile {
        self.group.group_mut().take_profile().unwrap()
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        self.group.group_mut().take_refused()
    }

    fn take_held(&mut self) -> Vec<Kept> {
        std::mem::take(&mut self.held)
    }
}
