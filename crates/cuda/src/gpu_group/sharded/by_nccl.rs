//! What ranks exchange by NCCL, where they cannot reach each other's memory. The hosts know the numbers of keys, which they read from the
//! devices.

#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use sok_core::contract::profile::StepPart;
use sok_core::contract::table::TableConfig;
use sok_core::error::{Error, Result};
use sok_core::exchange::buckets::Owners;
use sok_core::host::sharded::counts_ids;
use sok_core::row_type::RowType;

use super::asked::TableRequest;
use super::layout::{GradientLayout, row_bytes};
use super::lent::Lent;
use super::request::RankRequest;
use super::transfers::{Conversation, MessagePart, Messages, Places, What};
use super::{ShardedGpuGroup, VERDICTS, rows_of_board};
use crate::abi::{PartCopy, RING};
use crate::device::Stream;
use crate::gpu_table::GpuTable;
use crate::memory::{Buffer, Shared};
use crate::nccl::{Nccl, Transfer};
use crate::step::CopyKernel;

/// For so long a wait for the device takes all of a core.
const BRIEF: Duration = Duration::from_millis(2);
const PAUSE: Duration = Duration::from_micros(50);

/// Keys that have come from other ranks, and room for the rows that they are answered with.
pub(super) struct ReceivedKeys {
    memory: Buffer<u32>,
    /// Address of the room for rows.
    of_rows: u64,
    /// By rank and table.
    pub places: Vec<Vec<Places>>,
}

/// Gradients that come from other ranks. By rank and table: where the gradient of the key with place 0 would be.
pub(super) struct ReceivedGradients {
    pub firsts: Vec<Vec<u64>>,
    pub memory: Lent,
}

/// Memory that is kept for later calls.
#[derive(Default)]
pub(super) struct Spares {
    /// The starts of the keys of all ranks, on the device and the host.
    starts: Option<(Buffer<u32>, Shared)>,
    /// Descriptors of copies.
    copies: Option<Buffer<u32>>,
}

impl ShardedGpuGroup {
    /// Gives all ranks the starts of the keys of each, and reads them. Waits for the device. `own`: address of this rank's.
    pub(super) fn gather_starts(&mut self, nccl: &Nccl, own: u64, stream: Stream) -> Result<Vec<Vec<u32>>> {
        let (rank, world_size, words) = (self.peers.rank(), self.peers.world_size(), self.num_starts());
        if self.spares.starts.is_none() {
            let context = self.peers.context();
            let on_device = Buffer::new(context, words * world_size)?;
            self.spares.starts = Some((on_device, Shared::new(context, words * world_size)?));
        }
        let (on_device, on_host) = self.spares.starts.as_ref().expect("made above");
        // SAFETY: Both have so many words.
        unsafe { stream.copy(on_device.at(rank * words), own, 4 * words) }?;
        // SAFETY: There is room for the starts of each rank.
        unsafe { nccl.all_gather(on_device.address(), 4 * words, stream) }?;
        // SAFETY: Both have so many words, and the host reads them when the copy has completed.
        unsafe { stream.copy(on_host.address(), on_device.address(), 4 * words * world_size) }?;
        self.wait_for(stream)?;
        let of_rank = |rank| (0..words).map(|word| on_host.get(rank * words + word)).collect();
        Ok((0..world_size).map(of_rank).collect())
    }

    /// Waits for the work on a stream, which may wait for other ranks.
    pub(super) fn wait_for(&self, stream: Stream) -> Result<()> {
        let start = Instant::now();
        while !stream.is_idle()? {
            if let Some(failure) = self.peers.communicator.failure() {
                return Err(failure);
            }
            if start.elapsed() > self.peers.communicator.timeout() {
                let seconds = self.peers.communicator.timeout().as_secs_f64();
                return Err(Error::State(format!(
                    "the GPU of rank {} has not done its work within {seconds} s. It may wait for other ranks",
                    self.peers.rank()
                )));
            }
            if start.elapsed() > BRIEF { std::thread::sleep(PAUSE) } else { std::hint::spin_loop() }
        }
        Ok(())
    }

    fn conversation<'a>(&'a self, starts: &'a [Vec<u32>]) -> Conversation<'a> {
        let row_bytes = self.shard.tables.iter().map(|table| row_bytes(table) / self.narrowing());
        let counts_ids = self.shard.tables.iter().map(|table| counts_ids(&table.config)).collect();
        let takes_scores = self.shard.tables.iter().map(|table| table.config.takes_scores()).collect();
        Conversation {
            owners: &self.owners,
            starts,
            row_bytes: row_bytes.collect(),
            counts_ids,
            takes_scores,
        }
    }

    /// How many times a float32 is as large as a number of a row in a message.
    fn narrowing(&self) -> usize {
        RowType::Float32.num_bytes() / self.row_type.num_bytes()
    }

    /// How rows and gradients are copied to messages, and from there.
    fn copies_of_rows(&self) -> (CopyKernel, CopyKernel) {
        match self.row_type {
            RowType::Float32 => (CopyKernel::Copy, CopyKernel::Copy),
            // `new` has refused float16.
            RowType::Float16 | RowType::Bfloat16 => (CopyKernel::Narrow, CopyKernel::Widen),
        }
    }

    /// By table: number of bytes of a row in memory.
    fn row_bytes(&self) -> Vec<usize> {
        self.shard.tables.iter().map(row_bytes).collect()
    }

    /// Enqueues sending this rank's keys to their owners, and receiving those that this rank owns.
    pub(super) fn receive_keys(
        &mut self,
        nccl: &Nccl,
        requests: &[RankRequest],
        starts: &[Vec<u32>],
        stream: Stream,
    ) -> Result<ReceivedKeys> {
        self.shard.workspace.enter(stream)?;
        let conversation = self.conversation(starts);
        let (sent, keys) = (conversation.asks(What::Keys), conversation.serves(What::Keys));
        let rows = conversation.serves(What::Rows).widened(self.narrowing());
        let row_bytes = self.row_bytes();
        let (sent_counts, counts) = (conversation.asks(What::IdCounts), conversation.serves(What::IdCounts));
        let (sent_scores, scores) = (conversation.asks(What::Scores), conversation.serves(What::Scores));
        let [key_bytes, count_bytes, score_bytes] =
            [keys.bytes, counts.bytes, scores.bytes].map(|bytes| bytes.next_multiple_of(16));
        let bytes = key_bytes + count_bytes + score_bytes + rows.bytes;
        let memory = self.shard.workspace.take_memory(bytes / 4)?;
        let of_counts = memory.address() + key_bytes as u64;
        let of_scores = of_counts + count_bytes as u64;
        let of_rows = of_scores + score_bytes as u64;
        let mut places = vec![vec![Places::default(); row_bytes.len()]; starts.len()];
        for part in &keys.parts {
            places[part.rank][part.table].keys = first_of(part, memory.address(), 8);
        }
        for part in &counts.parts {
            places[part.rank][part.table].id_counts = first_of(part, of_counts, 8);
        }
        for part in &scores.parts {
            places[part.rank][part.table].scores = first_of(part, of_scores, 8);
        }
        for part in &rows.parts {
            places[part.rank][part.table].rows = first_of(part, of_rows, row_bytes[part.table]);
        }
        let own = &requests[self.peers.rank()].places;
        let has = |takes: fn(&TableConfig) -> bool| self.shard.tables.iter().any(|t| takes(&t.config));
        let (has_counts, has_scores) = (has(counts_ids), has(TableConfig::takes_scores));
        self.exchange_numbers(nccl, (&sent, |t| own[t].keys), (&keys, memory.address()), stream)?;
        if has_counts {
            let from = (&sent_counts, |t: usize| own[t].id_counts);
            self.exchange_numbers(nccl, from, (&counts, of_counts), stream)?;
        }
        if has_scores {
            let from = (&sent_scores, |t: usize| own[t].scores);
            self.exchange_numbers(nccl, from, (&scores, of_scores), stream)?;
        }
        Ok(ReceivedKeys { memory, of_rows, places })
    }

    /// Enqueues sending numbers of 8 bytes, and receiving others. `sent`: the messages, and by table the address of its first number.
    /// `received`: the messages, and the address that takes them.
    fn exchange_numbers(
        &mut self,
        nccl: &Nccl,
        (sent, from): (&Messages, impl Fn(usize) -> u64),
        (received, to): (&Messages, u64),
        stream: Stream,
    ) -> Result<()> {
        let own = |part: &MessagePart| from(part.table) + (8 * part.begin) as u64;
        let packed = self.pack(CopyKernel::Copy, sent, own, stream)?;
        // SAFETY: Both have the bytes of these messages. They are reused by later work of the stream.
        unsafe { self.exchange(nccl, &sent.transfers(packed.address()), &received.transfers(to), stream) }?;
        self.shard.workspace.give_back(packed);
        Ok(())
    }

    /// Enqueues sending the rows of other ranks' keys to them, and receiving this rank's.
    pub(super) fn return_rows(
        &mut self,
        nccl: &Nccl,
        requests: &[RankRequest],
        starts: &[Vec<u32>],
        received: ReceivedKeys,
        stream: Stream,
    ) -> Result<()> {
        let conversation = self.conversation(starts);
        let (sent, coming) = (conversation.serves(What::Rows), conversation.asks(What::Rows));
        let (row_bytes, (to_message, from_message)) = (self.row_bytes(), self.copies_of_rows());
        let packed = self.shard.workspace.take_memory(coming.bytes / 4)?;
        let narrowed = match to_message {
            CopyKernel::Copy => None,
            _ => Some(self.convert(to_message, received.of_rows, sent.bytes, stream)?),
        };
        let from = narrowed.as_ref().map_or(received.of_rows, Buffer::address);
        let (from, to) = (sent.transfers(from), coming.transfers(packed.address()));
        // SAFETY: Both have the bytes of these messages. They are reused by later work of the stream.
        unsafe { self.exchange(nccl, &from, &to, stream) }?;
        let own = &requests[self.peers.rank()].places;
        let copy = |part: &MessagePart| PartCopy {
            from: packed.address() + part.offset as u64,
            to: own[part.table].rows + (part.begin * row_bytes[part.table]) as u64,
            words: part.bytes as u64 / 8,
        };
        let copies: Vec<PartCopy> = coming.parts.iter().map(copy).collect();
        self.copy_parts(from_message, &copies, stream)?;
        self.shard.workspace.give_back(packed);
        narrowed.into_iter().for_each(|memory| self.shard.workspace.give_back(memory));
        self.shard.workspace.give_back(received.memory);
        Ok(())
    }

    /// Enqueues sending the merged gradients of a push to the owners of their keys, and receiving those that this rank owns. `own`: the
    /// address of this rank's. `None` if the lookup is gone.
    pub(super) fn receive_gradients(
        &mut self,
        nccl: &Nccl,
        lookup: u64,
        own: u64,
        stream: Stream,
    ) -> Result<Option<ReceivedGradients>> {
        let rank = self.peers.rank();
        let Some(served) = self.served.iter().find(|served| served.number == lookup) else { return Ok(None) };
        let conversation = self.conversation(&served.starts);
        let (sent, coming) = (conversation.asks(What::Gradients), conversation.serves(What::Gradients));
        let (row_bytes, (to_message, from_message)) = (self.row_bytes(), self.copies_of_rows());
        let sizes: Vec<_> = served.requests[rank].iter().map(TableRequest::sizes).collect();
        let places = GradientLayout::new(&self.shard.tables, &sizes).merged;
        let mut firsts = vec![vec![0u64; row_bytes.len()]; served.starts.len()];
        firsts[rank] = places.into_iter().map(|place| own + place as u64).collect();
        let widened = coming.widened(self.narrowing());
        let memory = self.lending.lend(self.peers.context(), widened.bytes / 4)?;
        let address = memory.address();
        for part in &widened.parts {
            firsts[part.rank][part.table] = first_of(part, address, row_bytes[part.table]);
        }
        let own = |part: &MessagePart| firsts[rank][part.table] + (part.begin * row_bytes[part.table]) as u64;
        if to_message == CopyKernel::Narrow {
            self.round_replicated(&sent, own, stream)?;
        }
        let packed = self.pack(to_message, &sent, own, stream)?;
        let narrow = match from_message {
            CopyKernel::Copy => None,
            _ => Some(self.shard.workspace.take_memory(coming.bytes / 4)?),
        };
        let to = narrow.as_ref().map_or(address, Buffer::address);
        // SAFETY: Both have the bytes of these messages. They are reused by later work of the stream.
        unsafe { self.exchange(nccl, &sent.transfers(packed.address()), &coming.transfers(to), stream) }?;
        self.shard.workspace.give_back(packed);
        if let Some(narrow) = narrow {
            let all = PartCopy { from: narrow.address(), to: address, words: coming.bytes as u64 / 8 };
            self.copy_parts(from_message, &[all], stream)?;
            self.shard.workspace.give_back(narrow);
        }
        Ok(Some(ReceivedGradients { firsts, memory }))
    }

    /// Enqueues gathering the parts of messages, which are at `from`. Returns the messages.
    fn pack(
        &mut self,
        kernel: CopyKernel,
        messages: &Messages,
        from: impl Fn(&MessagePart) -> u64,
        stream: Stream,
    ) -> Result<Buffer<u32>> {
        let packed = self.shard.workspace.take_memory(messages.bytes / 4)?;
        let copy = |part: &MessagePart| PartCopy {
            from: from(part),
            to: packed.address() + part.offset as u64,
            words: part.bytes as u64 / 8,
        };
        let copies: Vec<PartCopy> = messages.parts.iter().map(copy).collect();
        self.copy_parts(kernel, &copies, stream)?;
        Ok(packed)
    }

    /// Enqueues copying all messages, of `bytes` bytes in the end. Returns the copies.
    fn convert(
        &mut self,
        kernel: CopyKernel,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<Buffer<u32>> {
        let memory = self.shard.workspace.take_memory(bytes / 4)?;
        let all = PartCopy { from, to: memory.address(), words: bytes as u64 / 8 };
        self.copy_parts(kernel, &[all], stream)?;
        Ok(memory)
    }

    /// Enqueues rounding this rank's own gradients of replicated tables: all ranks must get the same ones. They are at `own`.
    fn round_replicated(
        &mut self,
        sent: &Messages,
        own: impl Fn(&MessagePart) -> u64,
        stream: Stream,
    ) -> Result<()> {
        let first = sent.parts.first().map(|part| part.rank);
        let parts = sent.parts.iter().filter(|part| Some(part.rank) == first);
        let replicated = parts.filter(|part| self.owners[part.table].is_replicated());
        let round =
            |part: &MessagePart| PartCopy { from: own(part), to: own(part), words: part.bytes as u64 / 8 };
        let copies: Vec<PartCopy> = replicated.map(round).collect();
        self.copy_parts(CopyKernel::Round, &copies, stream)
    }

    fn copy_parts(&mut self, kernel: CopyKernel, copies: &[PartCopy], stream: Stream) -> Result<()> {
        let words = size_of_val(copies) / 4;
        if self.spares.copies.as_ref().is_none_or(|memory| memory.len() < words) {
            self.shard.workspace.device.synchronize()?;
            self.spares.copies = Some(Buffer::uninit(self.peers.context(), words.next_power_of_two())?);
        }
        let to = self.spares.copies.as_ref().map_or(0, Buffer::address);
        self.shard.workspace.copy_parts(kernel, copies, to, stream)
    }

    /// Enqueues an exchange, and measures it.
    ///
    /// # Safety
    /// As `Nccl::exchange`.
    unsafe fn exchange(
        &self,
        nccl: &Nccl,
        sends: &[Transfer],
        receives: &[Transfer],
        stream: Stream,
    ) -> Result<()> {
        let measured = self.shard.workspace.profiler.start(stream)?;
        // SAFETY: The caller guarantees it.
        unsafe { nccl.exchange(sends, receives, stream) }?;
        self.shard.workspace.profiler.stop(StepPart::Exchange, measured, stream)
    }

    /// Gives all ranks the rows that answer for missing ones, from their owners' boards.
    pub(super) fn broadcast_out_of_vocabulary(&self, nccl: &Nccl, stream: Stream) -> Result<()> {
        let rows = self.board.address() + rows_of_board(self.owners.len()) as u64;
        let part = |(number, (table, owners)): (usize, (&GpuTable, &Owners))| {
            let key = table.config.out_of_vocabulary_key.filter(|_| !owners.is_replicated())?;
            let address = rows + (16 * self.row_stride * number) as u64;
            Some(Transfer { rank: owners.of(key), address, bytes: row_bytes(table) })
        };
        let parts = self.shard.tables.iter().zip(&self.owners).enumerate().filter_map(part);
        // SAFETY: The board has a row for each table.
        unsafe { nccl.broadcast(&parts.collect::<Vec<_>>(), stream) }
    }

    /// Enqueues exchanging verdicts on a commit. When they have come, all ranks know it, before they go on.
    pub(super) fn gather_verdicts(&self, nccl: &Nccl, stream: Stream) -> Result<()> {
        let measured = self.shard.workspace.profiler.start(stream)?;
        let verdicts = self.board.address() + VERDICTS as u64;
        // SAFETY: The board has a verdict of each rank.
        unsafe { nccl.all_gather(verdicts, 4 * (RING + 1), stream) }?;
        // SAFETY: The board has flags of each rank, which are not used otherwise.
        unsafe { nccl.all_gather(self.board.address(), 8, stream) }?;
        self.shard.workspace.profiler.stop(StepPart::Exchange, measured, stream)
    }
}

/// Returns where what belongs to the key with place 0 would be, before the first one. `address`: of the messages. `bytes`: for a key.
fn first_of(part: &MessagePart, address: u64, bytes: usize) -> u64 {
    (address + part.offset as u64).wrapping_sub((part.begin * bytes) as u64)
}
