//! Makes the ids of a rank distinct, and orders the distinct keys by their owners.

#![allow(unsafe_code)]

use sok_core::contract::profile::StepPart;
use sok_core::error::Result;
use sok_core::exchange::buckets::Owners;
use sok_core::exchange::placement::Placement;

use super::{Started, Workspace};
use crate::abi::{FIND_THREADS, KeySlot, OwnerKind, REQUEST_BLOCK, REQUEST_THREADS, Request, Requests};
use crate::device::{Device, Stream, launch_next};
use crate::kernels::RANKS;
use crate::memory::{Buffer, words};

/// Memory with which a rank asks others for rows. Its calls share it.
pub struct Asking {
    /// A `Request` for each table.
    requests: Buffer<u32>,
    /// The sets of distinct keys, then the counts of first ids.
    sets: Option<Buffer<u32>>,
    merge_blocks: usize,
    /// The keys of a call that are made distinct ahead of it, and whether the call has others.
    copies: Option<Buffer<u64>>,
    differs: Buffer<u32>,
}

/// When ids are made distinct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// In the call.
    Now,
    /// Ahead of the call. Their keys are kept.
    Ahead,
    /// In the call, if they are not those that were made distinct ahead of it with the same memory.
    IfOthers,
}

/// Where the keys of a table that a rank asks for are written.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeysTo {
    /// Address of the keys.
    pub keys: u64,
    /// Address of where the keys of each owner start.
    pub starts: u64,
    /// Address that takes a copy of the ids, for an owner that pools their bags; otherwise 0.
    pub ids: u64,
    /// Address that takes the number of each id's row, for the same owner; otherwise 0.
    pub numbers: u64,
    /// Address that takes the number of ids of each key, u64, for a table whose policy counts ids; otherwise 0.
    pub id_counts: u64,
    /// Address that takes the highest score of each key, u64, for a table with the policy `Custom`; otherwise 0.
    pub scores: u64,
    /// Address of a u64 in memory of the host. It takes the number of distinct keys in its high half, and the number of ids.
    pub distinct: u64,
}

impl Asking {
    /// Memory for tables with these owners. `merge_blocks`: in how many blocks the batch of a rank is merged.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory.
    pub fn new(device: &Device, owners: &[Owners], merge_blocks: usize) -> Result<Asking> {
        let requests: Vec<Request> =
            owners.iter().map(|owners| parts_of(owners, &KeysTo::default()).request).collect();
        let requests = Buffer::from_slice(&device.context, words(&requests))?;
        let differs = Buffer::new(&device.context, 1)?;
        Ok(Asking { requests, sets: None, merge_blocks, copies: None, differs })
    }

    /// Address of the `Request` of each table in the last call.
    pub fn requests(&self) -> u64 {
        self.requests.address()
    }

    /// Number of bytes that are kept for later calls.
    pub fn num_bytes(&self) -> usize {
        let copies = self.copies.as_ref().map_or(0, Buffer::num_bytes);
        self.requests.num_bytes() + self.sets.as_ref().map_or(0, Buffer::num_bytes) + copies
    }
}

/// The parts of the memory that a table's request needs.
struct Parts {
    request: Request,
    slots: usize,
    counts: usize,
}

impl Workspace {
    /// Enqueues what `find` does for records, for the places of keys among those that are asked for: writes the distinct keys of each table
    /// of a call to `to`, by owner, and gives each id the place of its key plus 1 in place of a record. `asks_silent`: also of ids of
    /// weight 0, which only a call itself can.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory, or if a kernel cannot be compiled or launched.
    #[expect(clippy::too_many_arguments, reason = "all of them are chosen apart")]
    pub fn ask(
        &self,
        asking: &mut Asking,
        started: &mut Started,
        owners: &[Owners],
        to: &[KeysTo],
        asks_silent: bool,
        when: When,
        stream: Stream,
    ) -> Result<()> {
        let measured = self.profiler.start(stream)?;
        let world_size = owners.first().map_or(1, |owners| owners.world_size);
        let sets_of_table = asking.merge_blocks + usize::from(asks_silent);
        let classes = world_size * (asking.merge_blocks + 1);
        let mut parts: Vec<Parts> = owners.iter().zip(to).map(|(owners, to)| parts_of(owners, to)).collect();
        let (mut num_slots, mut num_blocks, mut num_counts) = (0, 0, 0);
        for section in &started.sections {
            let Parts { request, slots, counts } = &mut parts[section.table as usize];
            request.first = section.first;
            request.num_ids = section.count;
            request.num_blocks = section.count.div_ceil(REQUEST_BLOCK as u32);
            request.num_slots = (section.count + section.count / 4).max(1);
            request.first_block = num_blocks;
            (*slots, *counts) = (num_slots, num_counts);
            num_slots += sets_of_table * (request.num_slots as usize + 1);
            num_counts += classes * request.num_blocks as usize;
            num_blocks += request.num_blocks;
        }
        let slot_words = num_slots * size_of::<KeySlot>() / 4;
        if asking.sets.as_ref().is_none_or(|sets| sets.len() < slot_words + num_counts) {
            asking.sets = None;
            let words = slot_words + num_counts;
            asking.sets = Some(Buffer::uninit(&self.device.context, words + words / 4)?);
        }
        let sets = asking.sets.as_ref().map_or(0, Buffer::address);
        let address = |Parts { request, slots, counts }: &Parts| Request {
            slots: sets + (slots * size_of::<KeySlot>()) as u64,
            counts: sets + 4 * (slot_words + counts) as u64,
            ..*request
        };
        let requests: Vec<Request> = parts.iter().map(address).collect();
        let num_ids = started.sections.iter().map(|section| section.count as usize).sum();
        if when == When::Ahead {
            if asking.copies.as_ref().is_none_or(|copies| copies.len() < num_ids) {
                asking.copies = None;
                asking.copies = Some(Buffer::uninit(&self.device.context, num_ids + num_ids / 4)?);
            }
            asking.differs.zero(stream)?;
        }
        if when != When::IfOthers {
            self.deliver(asking.requests.address(), words(&requests), (0, 0), None, stream)?;
        }
        let is_kept = when != When::Now;
        let all = Requests {
            requests: asking.requests.address(),
            num_tables: owners.len() as u32,
            world_size: world_size as u32,
            merge_blocks: asking.merge_blocks as u32,
            asks_silent: asks_silent.into(),
            // No id overflows where there is no index.
            active: if asks_silent { started.found.overflow.ids } else { 0 },
            copies: asking.copies.as_ref().filter(|_| is_kept).map_or(0, Buffer::address),
            differs: if when == When::IfOthers { asking.differs.address() } else { 0 },
            given: started.places.given_scores,
        };
        let names =
            ["clear_slots", "claim_keys", "count_firsts", "place_firsts", "write_keys", "number_rows"];
        let [clear, claim, count, place, write, number] = self.device.kernels(&RANKS, names)?;
        let (call, found, slots, num_slots) =
            (started.call, started.found, started.found.records, num_slots as u32);
        let clear_blocks = num_slots.div_ceil(1024).min(16 * self.device.multiprocessors);
        if when == When::IfOthers {
            let compare = self.device.kernel(&RANKS, "compare_keys")?;
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point to.
            unsafe { launch_next!(compare, stream, started.find_blocks, FIND_THREADS, call, all) }?;
        }
        // SAFETY: The arguments have the types of the kernel's parameters. `asking` keeps the memory that they point to.
        unsafe { launch_next!(clear, stream, clear_blocks, 256, sets, num_slots, all) }?;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point to.
        unsafe { launch_next!(claim, stream, started.find_blocks, FIND_THREADS, call, found, all) }?;
        // SAFETY: As above.
        unsafe { launch_next!(count, stream, num_blocks, REQUEST_THREADS, slots, all) }?;
        // SAFETY: As above.
        unsafe { launch_next!(place, stream, owners.len(), REQUEST_THREADS, all) }?;
        // SAFETY: As above.
        unsafe { launch_next!(write, stream, num_blocks, REQUEST_THREADS, slots, all) }?;
        // SAFETY: As above.
        unsafe { launch_next!(number, stream, num_blocks, REQUEST_THREADS, slots, all) }?;
        started.active = asks_silent.then_some(started.found.overflow.ids);
        self.profiler.stop(StepPart::Distinct, measured, stream)
    }
}

/// A table without ids.
fn parts_of(owners: &Owners, to: &KeysTo) -> Parts {
    let (owner, home) = match owners.placement {
        Placement::Distributed if owners.is_static => (OwnerKind::Remainder, 0),
        Placement::Distributed => (OwnerKind::Hashed, 0),
        Placement::Localized(rank) => (OwnerKind::One, rank),
        Placement::Replicated => (OwnerKind::Every, owners.rank),
    };
    let request = Request {
        keys: to.keys,
        starts: to.starts,
        ids: to.ids,
        numbers: to.numbers,
        id_counts: to.id_counts,
        scores: to.scores,
        distinct: to.distinct,
        num_slots: 1,
        owner: owner as u32,
        home: home as u32,
        ..Request::default()
    };
    Parts { request, slots: 0, counts: 0 }
}
