//! A commit of all ranks.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::Arc;

use sok_core::contract::binding::Binding;
use sok_core::contract::gradients::Keep;
use sok_core::contract::group::Group;
use sok_core::contract::ticket::{RING, mark};
use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::{agree, gather};
use sok_core::exchange::message::{Call, Reader, Writer};
use sok_core::row_type::RowType;

use super::asked::TableRequest;
use super::at_owner::PooledMerge;
use super::by_nccl::ReceivedGradients;
use super::layout::{GradientLayout, row_bytes};
use super::{ShardedGpuGroup, VERDICTS};
use crate::abi::{self, AgreedPush, Agreement};
use crate::device::{Stream, launch_next};
use crate::gpu_group::optimizer::Agreed;
use crate::gpu_group::{Committed, GpuGroup, LookupNumber, OutputGradients, Push, optimizer};
use crate::kernels::RANKS;
use crate::memory::read;
use crate::peers::{Mapping, WindowName};

/// Numbers of pushes for which `agree` is instantiated.
const AGREED_AT_ONCE: [usize; 2] = [1, 64];

/// A push of all ranks that waits for a ticket.
struct Pending {
    /// Number of the push, and of its lookup.
    number: u64,
    lookup: u64,
    /// By rank: its merged gradients, if this rank reaches them.
    windows: Vec<Option<Arc<Mapping>>>,
}

/// The gradients of a push of all ranks.
struct GradientsOfRanks {
    /// By rank and table: where the gradient of the key with place 0 is.
    firsts: Vec<Vec<u64>>,
    /// Keeps the gradients.
    keep: Keep,
    /// Those of pooled bags are merged as soon as all ranks have come.
    merge: Option<PooledMerge>,
}

/// Commits groups of one optimizer, as `optimizer::commit`. All ranks must call it.
///
/// # Errors
/// The same, and [`Error::Rank`].
///
/// # Safety
/// The same.
pub unsafe fn commit(
    groups: &mut [&mut ShardedGpuGroup],
    bindings: &[Binding],
    tickets: &[u64],
    is_update_at: Option<u64>,
    norm_to: u64,
    stream: Stream,
) -> Result<()> {
    // SAFETY: The caller guarantees it.
    let committed = unsafe { commit_of_ranks(groups, bindings, tickets, is_update_at, norm_to, stream) };
    committed.inspect_err(|_| groups.iter().for_each(|group| group.shard.abandon_steps()))
}

/// Does the work of `commit`.
///
/// # Safety
/// As `commit`.
unsafe fn commit_of_ranks(
    groups: &mut [&mut ShardedGpuGroup],
    bindings: &[Binding],
    tickets: &[u64],
    is_update_at: Option<u64>,
    norm_to: u64,
    stream: Stream,
) -> Result<()> {
    let Some(first) = groups.first_mut() else { return Ok(()) };
    let communicator = first.peers.communicator.clone();
    let tag = first.tag(Call::Commit, first.num_commits + 1);
    groups.iter_mut().for_each(|group| group.num_commits += 1);
    let message = write_pending(groups, bindings, is_update_at.is_some());
    let messages = gather(&*communicator, tag, message)?;
    let done = read_pending(groups, &messages, is_update_at.is_some()).and_then(|(pending, refuses)| {
        // SAFETY: The caller guarantees it.
        unsafe { agree_on(groups, tickets, &pending, stream) }?;
        Ok(refuses)
    });
    let refuses = done.inspect_err(|error| communicator.fail(error))?;
    let shard_tickets: Vec<u64> = groups.iter().map(|group| group.tickets.address()).collect();
    let is_refused = Cell::new(false);
    let vote =
        |vote: Result<()>| agree(&*communicator, tag.at(1), vote).inspect_err(|_| is_refused.set(true));
    let mut shards: Vec<&mut GpuGroup> = groups
        .iter_mut()
        .map(|group| {
            let commit = group.num_commits;
            group.shard.shared_totals.iter_mut().for_each(|totals| totals.commit = commit);
            &mut group.shard
        })
        .collect();
    let agreed = Some(Agreed { refuses, vote: &vote });
    // SAFETY: The tickets are in memory of the groups. The caller guarantees the rest.
    let committed = unsafe {
        optimizer::commit_together(
            &mut shards,
            bindings,
            &shard_tickets,
            is_update_at,
            norm_to,
            agreed,
            stream,
        )
    };
    if let Err(error) = &committed {
        if !is_refused.get() {
            // Other ranks go on with the step.
            communicator.fail(error);
        }
        // The pushes wait for another ticket.
        groups.iter_mut().for_each(|group| group.front.unseen = None);
    }
    committed
}

/// Writes which pushes of this rank wait for a ticket, and whether its tables might not have room for the keys that these insert.
fn write_pending(
    groups: &mut [&mut ShardedGpuGroup],
    bindings: &[Binding],
    accumulates: bool,
) -> Result<Vec<u8>> {
    let mut writer = Writer::default();
    writer.numbers(&[groups.len() as u64, accumulates.into()])?;
    for (group, binding) in groups.iter_mut().zip(bindings) {
        group.check()?;
        group.shard.check_owner(binding)?;
        group.settle_front()?;
        let numbers: Vec<u64> = group.front.ring.numbers().collect();
        writer.numbers(&[group.tables, numbers.len() as u64])?;
        for (number, push) in numbers.into_iter().zip(group.front.ring.iter_mut()) {
            let window = push.window.as_mut().expect("a push of a front has a window");
            group.peers.send(&mut [window])?;
            writer.numbers(&[number, push.lookup.number])?;
            window.name().write(&mut writer)?;
        }
        group.peers.write_freed(&mut writer)?;
        let is_named = |number: u64| group.front.ring.iter().any(|push| push.lookup.number == number);
        let lookups = group.shard.lookups.iter().filter(|lookup| is_named(lookup.number));
        let lookups: Vec<_> = lookups.cloned().collect();
        writer.numbers(&[group.shard.may_refuse_candidates(&lookups)?.into()])?;
    }
    Ok(writer.finish())
}

/// Reads the pushes of all ranks, which must be the same, by group; and whether a table of a rank might not have room for their keys.
fn read_pending(
    groups: &mut [&mut ShardedGpuGroup],
    messages: &[Vec<u8>],
    accumulates: bool,
) -> Result<(Vec<Vec<Pending>>, bool)> {
    let mut readers: Vec<Reader> =
        messages.iter().enumerate().map(|(rank, message)| Reader::new(message, rank)).collect();
    for (rank, reader) in readers.iter_mut().enumerate() {
        if [reader.number()?, reader.number()?] != [groups.len() as u64, accumulates.into()] {
            return groups[0].differs(rank, "commits other layers than this rank");
        }
    }
    let (mut all, mut refuses) = (Vec::new(), false);
    for group in groups.iter() {
        let numbers: Vec<u64> = group.front.ring.numbers().collect();
        let own = numbers.iter().zip(group.front.ring.iter());
        let new = |(&number, push): (&u64, &Push)| Pending {
            number,
            lookup: push.lookup.number,
            windows: Vec::new(),
        };
        let mut pending: Vec<Pending> = own.map(new).collect();
        for (rank, reader) in readers.iter_mut().enumerate() {
            if [reader.number()?, reader.number()?] != [group.tables, pending.len() as u64] {
                return group.differs(rank, "applies the gradients of other lookups than this rank");
            }
            for (pending, push) in pending.iter_mut().zip(group.front.ring.iter()) {
                if [reader.number()?, reader.number()?] != [pending.number, pending.lookup] {
                    return group.differs(rank, "applies the gradients of other lookups than this rank");
                }
                let name = WindowName::read(reader)?;
                pending.windows.push(group.peers.memory_of(rank, name, push.window.as_ref())?);
            }
            group.peers.read_freed(rank, reader)?;
            refuses |= reader.number()? != 0;
        }
        all.push(pending);
    }
    readers.into_iter().try_for_each(Reader::finish)?;
    Ok((all, refuses))
}

/// Enqueues what the devices of all ranks do until the shards have tickets.
///
/// # Safety
/// As `commit`.
unsafe fn agree_on(
    groups: &mut [&mut ShardedGpuGroup],
    tickets: &[u64],
    pending: &[Vec<Pending>],
    stream: Stream,
) -> Result<()> {
    let mut fronts: Vec<&mut GpuGroup> = groups.iter_mut().map(|group| &mut group.front).collect();
    // SAFETY: The caller guarantees it.
    unsafe { optimizer::resolve(&mut fronts, tickets, false, 0, stream) }?;
    for front in fronts {
        front.committed = Committed::Nothing;
        front.merge_pushes(stream)?;
    }
    for (group, pending) in groups.iter_mut().zip(pending) {
        if group.writes_sides_anew(pending) {
            for push in pending {
                group.learn_begins(push.lookup, stream)?;
            }
        }
        let first = group.shard.ring.next_number();
        let (mut pushes, mut merges) = (Vec::new(), Vec::new());
        for pending in pending {
            let (push, merge) = group.push_to_shard(pending, stream)?;
            pushes.push(push);
            merges.extend(merge);
        }
        group.agree(&pushes, stream)?;
        for merge in &merges {
            group.merge_pooled(merge, stream)?;
        }
        if group.writes_sides_anew(pending) {
            group.learn_factors(pending, first, stream)?;
        }
    }
    Ok(())
}

impl GpuGroup {
    /// Enqueues merging the pending pushes that have not been merged, to their windows.
    fn merge_pushes(&mut self, stream: Stream) -> Result<()> {
        for push in self.ring.iter().filter(|push| !push.is_merged) {
            self.refresh_sides(push, stream)?;
            self.workspace.merge(&push.lookup.saved, None, stream)?;
        }
        self.ring.iter_mut().for_each(|push| push.is_merged = true);
        Ok(())
    }
}

impl ShardedGpuGroup {
    /// Reads where the keys of each rank begin in a lookup. Waits for the device.
    fn learn_begins(&mut self, lookup: u64, stream: Stream) -> Result<()> {
        let Some(served) = self.served.iter_mut().find(|served| served.number == lookup) else {
            return Ok(());
        };
        stream.synchronize()?;
        let begins = served.begins_on_device.read(0, served.begins.len())?;
        served.begins.iter_mut().zip(begins).for_each(|(begin, more)| *begin += u64::from(more));
        served.begins_on_device.zero(stream)
    }

    /// Whether the commit of the shard writes sides of pushes to the device again, over what `agree` has written there.
    fn writes_sides_anew(&self, pending: &[Pending]) -> bool {
        let shares_lookup = |k: usize| pending[..k].iter().any(|other| other.lookup == pending[k].lookup);
        (0..pending.len()).any(shares_lookup)
    }

    /// Reads by what the gradients of each rank are multiplied, if the ranks' weights differ. Waits for the device. `first`: number of the
    /// first of these pushes to the shard.
    fn learn_factors(&mut self, pending: &[Pending], first: u64, stream: Stream) -> Result<()> {
        let world_size = self.peers.world_size();
        self.wait_for(stream)?;
        let words = world_size * (RING as usize + 1);
        let verdicts = read::<f32>(self.peers.context(), self.board.address() + VERDICTS as u64, words)?;
        for (number, push) in (first..).zip(pending) {
            let row = (push.number % RING) as usize;
            let weights: Vec<f32> =
                (0..world_size).map(|rank| verdicts[rank * (RING as usize + 1) + row]).collect();
            let is_common = weights.iter().all(|weight| weight.to_bits() == weights[0].to_bits());
            let served = self.served.iter().find(|served| served.number == push.lookup);
            if let (false, Some(served), Some(of_shard)) =
                (is_common, served, self.shard.ring.get_mut(number))
            {
                of_shard.factors = served.features.iter().map(|&(_, rank)| weights[rank]).collect();
            }
        }
        Ok(())
    }

    /// Gives the gradients of all ranks to the shard, as a push of its own.
    fn push_to_shard(
        &mut self,
        pending: &Pending,
        stream: Stream,
    ) -> Result<(AgreedPush, Option<PooledMerge>)> {
        let gradients = self.gradients_of(pending, stream)?;
        let gone = || Error::Ticket {
            tables: self.shard.names(),
            what: format!("gradients come for a lookup that is gone: older than the newest {RING}"),
        };
        let GradientsOfRanks { firsts, keep, merge } = gradients.ok_or_else(gone)?;
        let served = self.served.iter().find(|served| served.number == pending.lookup).ok_or_else(gone)?;
        let tables = &self.shard.tables;
        let address = |(&(table, rank), begin): (&(usize, usize), &u64)| {
            firsts[rank][table].wrapping_add(begin * row_bytes(&tables[table]) as u64)
        };
        let rows: Vec<u64> = served.features.iter().zip(&served.begins).map(address).collect();
        let (begins, num_sides) = (served.begins_on_device.address(), served.features.len() as u32);
        let lookup =
            self.shard.lookups.iter().find(|lookup| lookup.number == pending.lookup).ok_or_else(gone)?;
        let sides = lookup.saved.sides_address();
        let lens: Vec<usize> =
            lookup.saved.features.iter().map(|feature| feature.num_bags * feature.dim).collect();
        let number = self.shard.ring.next_number();
        let array_type = RowType::Float32;
        let gradients = OutputGradients { rows, array_type, keep: Some(keep), check_finite: false };
        let unread = self.tickets.at(2 * RING as usize);
        // SAFETY: The gradients are in windows, which their ranks reuse after this rank has applied them. The ticket is of this group.
        unsafe {
            self.shard.push(LookupNumber::Known(pending.lookup), gradients, &lens, &[], unread, stream)
        }?;
        let push = AgreedPush {
            sides,
            begins,
            num_sides,
            row: (pending.number % RING) as u32,
            shard_row: (number % RING) as u32,
            shard_mark: mark(number),
        };
        Ok((push, merge))
    }

    /// Returns the gradients of a push. `None` if the lookup is gone.
    fn gradients_of(&mut self, pending: &Pending, stream: Stream) -> Result<Option<GradientsOfRanks>> {
        let own = &pending.windows[self.peers.rank()];
        let peers = self.peers.clone();
        if let Some(nccl) = peers.nccl() {
            let own = own.as_ref().map_or(0, |window| window.address());
            let received = self.receive_gradients(nccl, pending.lookup, own, stream)?;
            let of_ranks = |received: ReceivedGradients| {
                let keep = Box::new((received.memory, pending.windows.clone()));
                GradientsOfRanks { firsts: received.firsts, keep, merge: None }
            };
            return Ok(received.map(of_ranks));
        }
        let Some(served) = self.served.iter().find(|served| served.number == pending.lookup) else {
            return Ok(None);
        };
        let address = |window: &Option<Arc<Mapping>>| window.as_ref().map_or(0, |window| window.address());
        let windows: Vec<u64> = pending.windows.iter().map(address).collect();
        let of_rank = |requests: &Vec<TableRequest>| {
            let sizes: Vec<_> = requests.iter().map(TableRequest::sizes).collect();
            GradientLayout::new(&self.shard.tables, &sizes)
        };
        let layouts: Vec<GradientLayout> = served.requests.iter().map(of_rank).collect();
        let of_rank = |(layout, window): (&GradientLayout, &u64)| {
            layout.merged.iter().map(|place| window + *place as u64).collect()
        };
        let mut firsts: Vec<Vec<u64>> = layouts.iter().zip(&windows).map(of_rank).collect();
        let pooled = self.pooled_merge(served, &layouts, &windows, &mut firsts)?;
        let (merge, memory) = pooled.unzip();
        Ok(Some(GradientsOfRanks { firsts, keep: Box::new((memory, pending.windows.clone())), merge }))
    }

    /// Enqueues agreeing with all ranks on the pushes, and writing the ticket of the shard.
    fn agree(&mut self, pushes: &[AgreedPush], stream: Stream) -> Result<()> {
        let at_once = AGREED_AT_ONCE.into_iter().find(|n| *n >= pushes.len()).expect("a ring has 64 pushes");
        let agree = self.shard.workspace.device.kernel(&RANKS, &format!("agree<{at_once}>"))?;
        let mut all = pushes.to_vec();
        all.resize(at_once, AgreedPush::default());
        let agreement = Agreement {
            resolved: self.front.resolved.address(),
            verdicts: self.on_boards(VERDICTS),
            tables: self.shard.workspace.tables(),
            ticket: self.tickets.address(),
            num_pushes: pushes.len() as u32,
            pad: 0,
        };
        let (peers, commit) = (self.on_device, self.num_commits);
        if let Some(nccl) = self.peers.nccl() {
            let write = self.shard.workspace.device.kernel(&RANKS, "write_verdict")?;
            // SAFETY: As below.
            unsafe { launch_next!(write, stream, 1, abi::RING, peers, agreement) }?;
            self.gather_verdicts(nccl, stream)?;
        }
        // SAFETY: The arguments have the types of the kernel's parameters. Groups and windows keep the memory that they point to.
        unsafe { launch_next!(agree, stream, 1, abi::RING, peers, commit, agreement, all[0]) }
    }
}
