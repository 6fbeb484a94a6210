//! Sweeps: the device chooses and removes the rows that go to make room. The host does not wait for that.

#![allow(unsafe_code)]

use std::sync::Weak;

use sok_core::contract::departures::Reason;
use sok_core::contract::table::Outcomes;
use sok_core::error::Result;
use sok_core::policy::eviction::sweep_size;

use super::uses::{Closing, SortedIds, UsedRecords};
use super::{GpuTable, WAITING};
use crate::abi::{
    Choice, FLOOR_RECORDS, MAX_SWEEPS, RANK_BINS, Ranked, SAMPLES, SWEEP_THREADS, Sorted, Sweep,
    TABLE_THREADS, Used, word_of,
};
use crate::delivery::deliver;
use crate::device::{Device, Stream, launch_next, launch_together};
use crate::kernels::SWEEP;
use crate::memory::{self, Buffer, words};

/// Words of a `Choice` in the memory of sweeps.
const CHOICE_WORDS: usize = size_of::<Choice>().div_ceil(128) * 32;
/// Words of a sweep that start and end as zeros.
const ZERO_WORDS: usize = CHOICE_WORDS + RANK_BINS;
/// Words before those: the counter of blocks.
const HEAD: usize = 32;
/// Records that a block of `choose_rows` reads.
const PER_BLOCK: u64 = 4096;

/// A sweep of a table that has not been enqueued.
pub(crate) struct PlannedSweep {
    /// Number of the table in its group.
    pub table: usize,
    /// Without the addresses in the memory of sweeps.
    sweep: Sweep,
    /// Without the index of the sweep.
    used: Vec<Used>,
    /// Upper bound of the record numbers, exclusive.
    numbers: u64,
    /// Memory that `used` refers to.
    _lent: Option<Buffer<u32>>,
}

impl PlannedSweep {
    /// Takes over that the sweep was enqueued. `table`: the one that it sweeps.
    pub fn note_in(&self, table: &mut GpuTable) {
        table.note_sweep(Reason::Evicted, self.sweep.removal.sweep, self.sweep.most);
    }

    /// Enqueues clearing the floors of the table. This sweep has left the rows that it chose out of them, and those rows may stay.
    fn clear_floors(&self, stream: Stream) -> Result<()> {
        // SAFETY: The table has floors of so many record numbers.
        unsafe { stream.fill(self.sweep.floor_scores, 0, floor_bytes(self.numbers as usize)) }
    }

    /// Words of the memory that need not be zeros: marks, samples and rows with low ranks.
    fn scratch_words(&self) -> [usize; 3] {
        let ranked = size_of::<Ranked>() / 4;
        let words =
            [(self.numbers as usize).div_ceil(32), ranked * SAMPLES, ranked * self.sweep.low_room as usize];
        // Marks are written 16 bytes at a time.
        words.map(|words| words.next_multiple_of(32))
    }
}

/// Memory of sweeps.
#[derive(Default)]
pub(crate) struct SweepMemory {
    memory: Option<Buffer<u32>>,
    /// For how many sweeps there are zeros at the start.
    num_zeros: usize,
}

/// Enqueued sweeps.
struct Sweeps {
    /// Address of the `Sweep`s, and their number.
    at: u64,
    num: usize,
    /// Blocks of a launch for each sweep.
    blocks: u32,
    /// Address of the first `Choice`.
    choices: u64,
}

impl SweepMemory {
    pub fn num_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, Buffer::num_bytes)
    }

    /// Gets the memory and the kernels for these sweeps.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn prepare(&mut self, device: &Device, planned: &[PlannedSweep], stream: Stream) -> Result<()> {
        device.kernels(&SWEEP, ["choose_rows", "remove_chosen"])?;
        planned.chunks(MAX_SWEEPS).try_for_each(|some| self.reserve(device, some, stream).map(drop))
    }

    /// Returns the address of memory for these sweeps. The stream uses the memory that was there before.
    fn reserve(&mut self, device: &Device, planned: &[PlannedSweep], stream: Stream) -> Result<u64> {
        let num = planned.len().max(self.num_zeros);
        let scratch: usize = planned.iter().flat_map(PlannedSweep::scratch_words).sum();
        let needed = HEAD + ZERO_WORDS * num + descriptor_words(planned) + scratch;
        match &self.memory {
            Some(memory) if num == self.num_zeros && memory.len() >= needed => Ok(memory.address()),
            _ => {
                let memory = Buffer::<u32>::uninit(&device.context, needed + scratch / 4)?;
                // SAFETY: The memory has so many words.
                unsafe { stream.fill(memory.address(), 0, 4 * (HEAD + ZERO_WORDS * num)) }?;
                if self.memory.is_some() {
                    stream.synchronize()?;
                }
                self.num_zeros = num;
                Ok(self.memory.insert(memory).address())
            }
        }
    }

    /// Enqueues choosing the rows that go.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    fn choose(&mut self, device: &Device, planned: &[PlannedSweep], stream: Stream) -> Result<Sweeps> {
        let base = self.reserve(device, planned, stream)?;
        let bins = base + 4 * HEAD as u64;
        let choices = bins + (4 * RANK_BINS * self.num_zeros) as u64;
        let at = bins + (4 * ZERO_WORDS * self.num_zeros) as u64;
        let mut next = at + 4 * descriptor_words(planned) as u64;
        let mut take = |words: usize| {
            next += 4 * words as u64;
            next - 4 * words as u64
        };
        let (mut sweeps, mut used) = (Vec::new(), Vec::new());
        for (i, planned) in planned.iter().enumerate() {
            let [marks, samples, low] = planned.scratch_words().map(&mut take);
            let bins = bins + (4 * RANK_BINS * i) as u64;
            let choice = choices + (4 * CHOICE_WORDS * i) as u64;
            sweeps.push(Sweep { marks, samples, low, bins, choice, ..planned.sweep });
            used.extend(planned.used.iter().map(|used| Used { sweep: i as u32, ..*used }));
        }
        deliver(device, at, &[words(&sweeps), words(&used)].concat(), (0, 0), None, stream)?;
        let choose = device.kernel(&SWEEP, "choose_rows")?;
        let numbers: u64 = planned.iter().map(|planned| planned.numbers).sum();
        let blocks = numbers.div_ceil(PER_BLOCK).clamp(1, u64::from(device.multiprocessors));
        let used_at = at + size_of_val(&sweeps[..]) as u64;
        let (num_sweeps, num_used) = (sweeps.len() as u32, used.len() as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. Tables, lookups and this memory are what they point to, and the
        // caller keeps them. Each multiprocessor has room for a block.
        unsafe {
            launch_together!(choose, stream, blocks, SWEEP_THREADS, at, num_sweeps, used_at, num_used, base)
        }?;
        let most = planned.iter().map(|planned| planned.sweep.most).max().unwrap_or(0);
        Ok(Sweeps {
            at,
            num: planned.len(),
            blocks: device.blocks_for(most as usize, planned.len()),
            choices,
        })
    }

    /// Enqueues removing the rows that were chosen.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    fn remove(&mut self, device: &Device, sweeps: &Sweeps, stream: Stream) -> Result<()> {
        let remove = device.kernel(&SWEEP, "remove_chosen")?;
        let &Sweeps { at, num, blocks, .. } = sweeps;
        // SAFETY: The arguments have the types of the kernel's parameters. The table and this keep the memory that they point to.
        unsafe { launch_next!(remove, stream, num * blocks as usize, TABLE_THREADS, at, blocks) }
    }

    /// Enqueues choosing and removing rows. Calls `enqueued` for each sweep of which that was done.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn sweep(
        &mut self,
        device: &Device,
        planned: &[PlannedSweep],
        mut enqueued: impl FnMut(&PlannedSweep),
        stream: Stream,
    ) -> Result<()> {
        for some in planned.chunks(MAX_SWEEPS) {
            let chosen = self.choose(device, some, stream);
            let removed = chosen.and_then(|sweeps| self.remove(device, &sweeps, stream));
            removed.inspect_err(|_| self.forget(some, stream))?;
            some.iter().for_each(&mut enqueued);
        }
        Ok(())
    }

    /// Takes over that sweeps may have chosen rows that were not removed.
    fn forget(&mut self, planned: &[PlannedSweep], stream: Stream) {
        self.num_zeros = 0;
        // Nothing more can be done if this fails, too.
        planned.iter().for_each(|planned| drop(planned.clear_floors(stream)));
    }
}

/// Bytes of a score or a key for each group of records.
pub(super) fn floor_bytes(numbers: usize) -> usize {
    size_of::<u64>() * numbers.div_ceil(FLOOR_RECORDS)
}

/// Words of the descriptors of sweeps.
fn descriptor_words(planned: &[PlannedSweep]) -> usize {
    let num_used: usize = planned.iter().map(|planned| planned.used.len()).sum();
    let bytes = planned.len() * size_of::<Sweep>() + num_used * size_of::<Used>();
    (bytes / 4).next_multiple_of(32)
}

/// A sweep of one table that has chosen rows, which are not removed yet.
pub(crate) struct Chosen {
    planned: PlannedSweep,
    sweeps: Sweeps,
    /// Number of rows that may go, or a smaller number that is enough for the new keys.
    pub num_removable: u64,
}

impl GpuTable {
    /// Returns a sweep of table `number` of a group, if the table has an eviction policy. The sweep removes the rows with the lowest scores if the
    /// table has too many rows after `inserted` keys have been inserted, with `new_keys` more.
    ///
    /// These rows stay: that of the out-of-vocabulary key, rows of lookups whose gradients were not applied yet, and rows of `used`. There must be
    /// room in the ring for `most_swept` rows.
    ///
    /// `number`: 0 if the table sweeps alone. `inserted`: an upper bound. `closing`: a commit whose report the host has not read.
    /// `out_of_vocabulary`: address of the record number of that key, if work on the stream finds it; otherwise the device must be idle.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn plan_sweep(
        &self,
        number: usize,
        inserted: u64,
        new_keys: u64,
        used: UsedRecords,
        closing: Option<Closing>,
        out_of_vocabulary: Option<u64>,
    ) -> Result<Option<PlannedSweep>> {
        let Some(evictor) = &self.evictor else { return Ok(None) };
        let numbers_at = |records: u64, words: usize, count: usize| Used {
            records,
            stride: words as u32,
            count: count as u32,
            end: u32::MAX,
            ..Used::default()
        };
        let mut all_used = vec![numbers_at(used.address, 1, used.count)];
        let mut lent = None;
        if let (Some(key), None) = (self.config.out_of_vocabulary_key, out_of_vocabulary) {
            let found = self.look_up(&self.room(1, 0)?, &[key], false)?;
            lent = Some(Buffer::from_slice(&self.device.context, &found)?);
        }
        let of_lent = lent.as_ref().map(Buffer::address);
        let address = out_of_vocabulary.filter(|_| self.config.out_of_vocabulary_key.is_some()).or(of_lent);
        all_used.extend(address.map(|address| numbers_at(address, 1, 1)));
        for lookup in evictor.lookups.iter().filter_map(Weak::upgrade) {
            // A group gives the memory of a lookup to later work of the same stream alone. The number comes first in a `Sorted`.
            if let Some(ids) = lookup.ids(evictor.number, self.generation) {
                let SortedIds { address, count, counted, end } = ids;
                let used = numbers_at(address, size_of::<Sorted>() / 4, count);
                let closing = closing.filter(|closing| lookup.number() <= closing.newest_lookup);
                let (resolved, row) = closing.map_or((0, 0), |closing| (closing.resolved, closing.row));
                all_used.push(Used { counted, end, resolved, row, ..used });
            }
        }
        let (capacity, numbers) = (self.config.capacity(), self.max_numbers());
        let sweep = Sweep {
            index: self.index.descriptor(),
            low_room: (capacity / 16 + 1024).min(numbers),
            capacity,
            most: self.most_swept(inserted + new_keys),
            new_keys,
            removal: self.next_removal(),
            changes: self.changes.as_ref().map_or(0, |changes| changes.address()),
            ..evictor.sweep()
        };
        Ok(Some(PlannedSweep { table: number, sweep, used: all_used, numbers, _lent: lent }))
    }

    /// Returns how many rows a sweep removes at most, for so many new keys.
    pub(crate) fn most_swept(&self, new_keys: u64) -> u64 {
        let capacity = self.config.capacity();
        // A sweep that has failed, or a load, may have left too many rows.
        sweep_size(new_keys + self.rows().saturating_sub(capacity), capacity)
    }

    /// Returns how many rows must stay at most, because lookups are in progress.
    pub(crate) fn max_used(&self) -> u64 {
        let Some(evictor) = &self.evictor else { return 0 };
        let lookups = evictor.lookups.iter().filter_map(Weak::upgrade);
        let ids = lookups.filter_map(|lookup| lookup.ids(evictor.number, self.generation));
        ids.map(|ids| ids.count as u64).sum::<u64>() + 1
    }

    /// Chooses rows to make room for new keys, as `plan_sweep`. Gets the memory for those that may fit. The device must be idle, and its
    /// counts known.
    pub(crate) fn sweep_for(&mut self, new_keys: u64, used: UsedRecords) -> Result<Option<Chosen>> {
        let is_full = new_keys > 0 && self.rows() + new_keys > self.config.capacity();
        if self.config.eviction.is_none() || !is_full {
            return Ok(None);
        }
        // The index may grow, and a sweep erases from the one that it has seen.
        let most = new_keys.min(self.config.capacity());
        self.make_room(most, most, WAITING)?;
        let removed = self.most_swept(new_keys);
        if !self.ring_has_room(removed) {
            self.make_room_in_ring(removed)?;
        }
        let Some(planned) = self.plan_sweep(0, 0, new_keys, used, None, None)? else { return Ok(None) };
        let device = self.device.clone();
        let Some(evictor) = &mut self.evictor else { return Ok(None) };
        let sweeps = evictor.sweep_memory.choose(&device, std::slice::from_ref(&planned), WAITING)?;
        let at = sweeps.choices + 4 * word_of!(Choice, count) as u64;
        let read = device.synchronize().and_then(|()| memory::read::<u64>(&device.context, at, 1));
        let num_removable =
            read.inspect_err(|_| evictor.sweep_memory.forget(std::slice::from_ref(&planned), WAITING))?[0];
        Ok(Some(Chosen { planned, sweeps, num_removable }))
    }

    /// Checks that so many new keys fit when the chosen rows have gone.
    ///
    /// # Errors
    /// As `check_capacity`. The rows stay then.
    pub(crate) fn check_sweep(&mut self, new_keys: u64, chosen: Option<Chosen>) -> Result<Option<Chosen>> {
        let removable = chosen.as_ref().map_or(0, |chosen| chosen.num_removable);
        match self.check_capacity(new_keys, removable) {
            Ok(()) => Ok(chosen),
            Err(error) => self.cancel_sweep(chosen).and(Err(error)),
        }
    }

    /// Leaves the rows where they are that `sweep_for` has chosen. The device must be idle.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn cancel_sweep(&mut self, chosen: Option<Chosen>) -> Result<()> {
        if let Some(chosen) = &chosen {
            let num_listed = chosen.sweeps.choices + 4 * word_of!(Choice, num_listed) as u64;
            // SAFETY: The word is in the memory of the sweep.
            unsafe { WAITING.fill(num_listed, 0, 4) }?;
            chosen.planned.clear_floors(WAITING)?;
        }
        self.end_sweep(chosen).map(drop)
    }

    /// Removes the rows that `sweep_for` has chosen. Returns how many went. The device must be idle.
    ///
    /// # Errors
    /// As `take_departures`.
    pub(crate) fn end_sweep(&mut self, chosen: Option<Chosen>) -> Result<u64> {
        let (Some(chosen), Some(evictor)) = (chosen, &mut self.evictor) else { return Ok(0) };
        let memory = &mut evictor.sweep_memory;
        memory
            .remove(&self.device, &chosen.sweeps, WAITING)
            .inspect_err(|_| memory.forget(std::slice::from_ref(&chosen.planned), WAITING))?;
        chosen.planned.note_in(self);
        self.device.synchronize()?;
        let evicted = self.count_evicted()?;
        if let Err(error) = self.take_departures() {
            self.note(Outcomes { evicted, ..Outcomes::default() });
            return Err(error);
        }
        Ok(evicted)
    }
}
