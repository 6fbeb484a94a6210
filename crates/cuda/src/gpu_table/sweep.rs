//! Sweeps: the device chooses and erases the rows that tables remove to make room.

#![allow(unsafe_code)]

use std::sync::{Arc, Weak};

use sok_core::contract::departures::Reason;
use sok_core::error::Result;
use sok_core::key::Key;
use sok_core::policy::eviction::sweep_size;
use sok_core::policy::sweep::Rank;

use super::uses::{SortedIds, UsedRecords};
use super::{GpuTable, WAITING};
use crate::abi::{Choice, RANK_BINS, RANK_BITS, Sorted, Sweep, TABLE_THREADS, Used};
use crate::device::{Device, Stream, launch_next};
use crate::kernels::{SCORES, TABLE};
use crate::memory::{Buffer, Shared, words};

/// Words of a `Choice` in the memory of sweeps.
const CHOICE_WORDS: usize = size_of::<Choice>().div_ceil(128) * 32;

/// A sweep of a table that has not been enqueued.
pub(crate) struct PlannedSweep {
    /// Without the addresses in the memory of sweeps.
    sweep: Sweep,
    /// Without `Used::marks`.
    used: Vec<Used>,
    keeps: bool,
    /// Memory that `used` refers to.
    lent: Option<Buffer<u32>>,
}

/// Memory of sweeps.
pub(crate) struct SweepMemory {
    on_device: Buffer<u32>,
    /// First the descriptors that are copied to the device, then the results that come from there.
    on_host: Shared,
}

impl SweepMemory {
    /// Memory for these numbers of words on the device and on the host.
    fn new(device: &Device, [on_device, on_host]: [usize; 2]) -> Result<SweepMemory> {
        Ok(SweepMemory {
            on_device: Buffer::uninit(&device.context, on_device + on_device / 4)?,
            on_host: Shared::new(&device.context, on_host + on_host / 4)?,
        })
    }

    fn holds(&self, [on_device, on_host]: [usize; 2]) -> bool {
        self.on_device.len() >= on_device && self.on_host.len() >= on_host
    }

    pub fn num_bytes(&self) -> usize {
        self.on_device.num_bytes() + 4 * self.on_host.len()
    }
}

/// Sweeps of several tables that have been enqueued together.
pub(crate) struct Sweeps {
    device: Arc<Device>,
    memory: SweepMemory,
    sweeps: Vec<Sweep>,
    /// Address of what the host reads: the choices, then the listed rows.
    results_at: u64,
    /// Number of its words.
    num_results: usize,
    /// Blocks of a launch for each sweep.
    blocks: u32,
    _lent: Vec<Buffer<u32>>,
}

/// Rows that a sweep has chosen. Scores and words of changes are empty if nobody needs them.
struct Listed<'a> {
    keys: &'a [Key],
    records: &'a [u32],
    scores: &'a [u64],
    changes: &'a [u32],
}

/// What a table has to do when its chosen rows are erased.
pub(crate) struct Going {
    /// Memory for the numbers that are given out again.
    room: Buffer<u32>,
    /// `Departures::lens` before these rows were added.
    lens: [usize; 2],
}

/// Parts of the memory of sweeps.
struct Places {
    base: u64,
    sweeps: Vec<Sweep>,
    used: Vec<Used>,
    /// Address of the first word that starts as zero.
    zeros: u64,
    results: u64,
    num_words: usize,
}

impl Places {
    /// Words on the device, and on the host.
    fn sizes(&self) -> [usize; 2] {
        let descriptors = (size_of_val(&self.sweeps[..]) + size_of_val(&self.used[..])) / 4;
        [self.num_words, descriptors.max(self.num_results())]
    }

    fn num_results(&self) -> usize {
        self.num_words - ((self.results - self.base) / 4) as usize
    }

    /// Divides the memory, which begins at `base`: descriptors; bins and marks; choices; listed rows.
    fn new(base: u64, planned: &[PlannedSweep]) -> Places {
        let mut at = 0;
        let mut take = |words: usize| {
            let start = at;
            at += words.next_multiple_of(32);
            base + 4 * start as u64
        };
        let num_used: usize = planned.iter().map(|planned| planned.used.len()).sum();
        take((planned.len() * size_of::<Sweep>() + num_used * size_of::<Used>()) / 4);
        let zeros = take(0);
        let mut sweeps: Vec<Sweep> = planned.iter().map(|planned| planned.sweep).collect();
        let mut used = Vec::with_capacity(num_used);
        for (sweep, planned) in sweeps.iter_mut().zip(planned) {
            sweep.bins = take(RANK_BINS);
            sweep.marks = take((sweep.numbers as usize).div_ceil(32));
            used.extend(planned.used.iter().map(|used| Used { marks: sweep.marks, ..*used }));
        }
        let results = take(0);
        sweeps.iter_mut().for_each(|sweep| sweep.choice = take(CHOICE_WORDS));
        for (sweep, planned) in sweeps.iter_mut().zip(planned) {
            let wanted = sweep.wanted as usize;
            sweep.listed_keys = take(2 * wanted);
            sweep.listed_records = take(wanted);
            sweep.listed_scores = if planned.keeps { take(2 * wanted) } else { 0 };
            sweep.listed_changes = if sweep.changes == 0 { 0 } else { take(wanted) };
        }
        Places { base, sweeps, used, zeros, results, num_words: at }
    }
}

impl Sweeps {
    /// Enqueues choosing the rows. `spare`: memory of earlier sweeps.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn start(
        device: &Arc<Device>,
        spare: Option<SweepMemory>,
        planned: Vec<PlannedSweep>,
        stream: Stream,
    ) -> Result<Sweeps> {
        let sizes = Places::new(0, &planned).sizes();
        let mut memory = match spare.filter(|spare| spare.holds(sizes)) {
            Some(spare) => spare,
            None => SweepMemory::new(device, sizes)?,
        };
        let at = memory.on_device.address();
        let places = Places::new(at, &planned);
        let num_results = places.num_results();
        let Places { sweeps, used, zeros, results, num_words, .. } = places;
        memory.on_host.copy_to(at, &[words(&sweeps), words(&used)].concat(), stream)?;
        // The lists are read whole, whatever their lengths.
        let num_zeros = 4 * num_words - (zeros - at) as usize;
        // SAFETY: The memory has so many words.
        unsafe { stream.fill(zeros, 0, num_zeros) }?;
        let numbers = sweeps.iter().map(|sweep| sweep.numbers as usize).max().unwrap_or(0);
        let blocks = device.blocks_for(numbers, sweeps.len());
        let names = ["mark_used", "measure_rows", "count_ranks", "list_chosen"];
        let [mark, measure, count, list] = device.kernels(&SCORES, names)?;
        let used_at = at + size_of_val(&sweeps[..]) as u64;
        let launched = sweeps.len() * blocks as usize;
        // SAFETY: The arguments have the types of the kernel's parameters. Tables, lookups and `Sweeps` keep the memory that they point to.
        unsafe { launch_next!(mark, stream, used.len() * blocks as usize, TABLE_THREADS, used_at, blocks) }?;
        // SAFETY: As above.
        unsafe { launch_next!(measure, stream, launched, TABLE_THREADS, at, blocks) }?;
        for _ in 0..u128::BITS.div_ceil(RANK_BITS as u32) {
            // SAFETY: As above.
            unsafe { launch_next!(count, stream, launched, TABLE_THREADS, at, blocks) }?;
        }
        // SAFETY: As above.
        unsafe { launch_next!(list, stream, launched, TABLE_THREADS, at, blocks) }?;
        Ok(Sweeps {
            device: device.clone(),
            memory,
            sweeps,
            results_at: results,
            num_results,
            blocks,
            _lent: planned.into_iter().filter_map(|planned| planned.lent).collect(),
        })
    }

    /// Reads what the sweeps have found. They must have completed.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn read(&mut self) -> Result<()> {
        self.memory.on_host.copy_beside(&self.device, self.results_at, self.num_results)
    }

    fn words_at(&self, address: u64) -> &[u32] {
        // SAFETY: Only `read` has words written, and it waits.
        let words = unsafe { self.memory.on_host.words() };
        &words[((address - self.results_at) / 4) as usize..]
    }

    /// Returns how many rows of a table may go. `number`: that of its sweep.
    pub fn num_removable(&self, number: usize) -> u64 {
        wide(&self.words_at(self.sweeps[number].choice)[..2])[0]
    }

    /// The chosen rows of a table.
    fn listed(&self, number: usize) -> Listed<'_> {
        let sweep = self.sweeps[number];
        let count = self.num_removable(number).min(sweep.wanted) as usize;
        let words =
            |address: u64, len: usize| if address == 0 { &[] } else { &self.words_at(address)[..len] };
        Listed {
            keys: wide(words(sweep.listed_keys, 2 * count)),
            records: words(sweep.listed_records, count),
            scores: wide(words(sweep.listed_scores, 2 * count)),
            changes: words(sweep.listed_changes, count),
        }
    }

    /// Enqueues erasing the chosen rows.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn erase(&self, stream: Stream) -> Result<()> {
        let erase = self.device.kernel(&TABLE, "erase_chosen")?;
        let (at, blocks) = (self.memory.on_device.address(), self.blocks);
        // SAFETY: The arguments have the types of the kernel's parameters. Tables and `Sweeps` keep the memory that they point to.
        unsafe { launch_next!(erase, stream, self.sweeps.len() * blocks as usize, TABLE_THREADS, at, blocks) }
    }

    /// Returns the memory, for later sweeps on the same stream.
    pub fn into_memory(self) -> SweepMemory {
        self.memory
    }
}

impl GpuTable {
    /// Returns a sweep that chooses the rows with the lowest scores, to make room for new keys. The row of the out-of-vocabulary key stays,
    /// and so do those of lookups whose gradients were not applied yet, and the used ones. `None` without an eviction policy, or if no
    /// room is needed. The counts of the device must be known. `out_of_vocabulary`: address of the record number of that key, if work on the
    /// stream has found it; otherwise the device must be idle.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn plan_sweep(
        &self,
        new_keys: u64,
        used: UsedRecords,
        out_of_vocabulary: Option<u64>,
    ) -> Result<Option<PlannedSweep>> {
        let needed = (self.rows() + new_keys).saturating_sub(self.config.capacity());
        let evicts = self.config.eviction.is_some() && needed > 0;
        let Some(evictor) = self.evictor.as_ref().filter(|_| evicts) else { return Ok(None) };
        let numbers =
            u64::from(self.fresh) + u64::from(self.counted).saturating_sub(self.released.len() as u64);
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
                all_used.push(Used { counted, end, ..used });
            }
        }
        let sweep = Sweep {
            index: self.index.descriptor(),
            wanted: sweep_size(needed, self.config.capacity()).min(self.rows()),
            numbers: numbers as u32,
            changes: self.changes.as_ref().map_or(0, |changes| changes.address()),
            ..evictor.sweep()
        };
        Ok(Some(PlannedSweep { sweep, used: all_used, keeps: evictor.policy.keeps_evicted, lent }))
    }

    /// Chooses rows to make room for new keys, as `plan_sweep`. Gets the memory for those that may fit. The device must be idle.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn sweep_for(&mut self, new_keys: u64, used: UsedRecords) -> Result<Option<Sweeps>> {
        if self.config.eviction.is_none() || !self.may_refuse(new_keys) {
            return Ok(None);
        }
        // The index may grow, and a sweep erases from the one that it has seen.
        let most = new_keys.min(self.config.capacity());
        self.make_room(most, most, WAITING)?;
        let Some(planned) = self.plan_sweep(new_keys, used, None)? else { return Ok(None) };
        let spare = self.evictor.as_mut().and_then(|evictor| evictor.sweep_memory.take());
        let mut sweeps = Sweeps::start(&self.device, spare, vec![planned], WAITING)?;
        self.device.synchronize()?;
        sweeps.read()?;
        Ok(Some(sweeps))
    }

    /// Takes back the memory of `sweep_for`.
    pub(crate) fn forget_sweep(&mut self, sweeps: Option<Sweeps>) {
        if let (Some(evictor), Some(sweeps)) = (&mut self.evictor, sweeps) {
            evictor.sweep_memory = Some(sweeps.into_memory());
        }
    }

    /// Removes the rows that `sweep_for` has chosen. Returns how many went. The device must be idle.
    ///
    /// # Errors
    /// As `begin_going`.
    pub(crate) fn end_own_sweep(&mut self, sweeps: Option<Sweeps>) -> Result<u64> {
        let Some(sweeps) = sweeps else { return Ok(0) };
        let going = self.begin_going(&sweeps, 0)?;
        sweeps.erase(WAITING)?;
        let evicted = self.end_going(&sweeps, 0, going, WAITING)?;
        self.device.synchronize()?;
        self.forget_sweep(Some(sweeps));
        Ok(evicted)
    }

    /// Remembers the chosen rows, which are to be erased. `number`: of the table's sweep, which was read.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory). Nothing has changed then.
    pub(crate) fn begin_going(&mut self, sweeps: &Sweeps, number: usize) -> Result<Going> {
        let Listed { keys, records, scores, .. } = sweeps.listed(number);
        let room = self.room_to_release(records.len())?;
        let values =
            if scores.is_empty() { Vec::new() } else { self.read_records(self.layout.row(), records)? };
        let dim = self.config.dim;
        self.reserve_removed(keys.len())?;
        let mut lens = [0; 2];
        if let Some(evictor) = &mut self.evictor {
            evictor.departures.trim();
            lens = evictor.departures.lens();
            let ranks = scores.iter().zip(keys).map(|(&score, &key)| Rank { score, key });
            let mut rows: Vec<(Rank, &[f32])> = ranks.zip(values.chunks_exact(dim)).collect();
            rows.sort_unstable_by_key(|(rank, _)| *rank);
            evictor.departures.keep(rows.into_iter(), dim, |from, to| to.copy_from_slice(from))?;
            let remembered = evictor.departures.remember(Reason::Evicted, evictor.step, keys.to_vec());
            remembered.inspect_err(|_| evictor.departures.take_back(lens))?;
        }
        Ok(Going { room, lens })
    }

    /// Undoes `begin_going`.
    pub(crate) fn cancel_going(&mut self, going: &Going) {
        if let Some(evictor) = &mut self.evictor {
            evictor.departures.take_back(going.lens);
        }
    }

    /// Takes over that the chosen rows are erased. Returns how many went. Only work on the stream may use the table meanwhile.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn end_going(
        &mut self,
        sweeps: &Sweeps,
        number: usize,
        going: Going,
        stream: Stream,
    ) -> Result<u64> {
        let Listed { keys, records, changes, .. } = sweeps.listed(number);
        self.note_removed(keys.iter().copied().zip(changes.iter().copied()));
        self.end_erasing(records, going.room, stream)?;
        Ok(records.len() as u64)
    }
}

/// Pairs of words as numbers of 64 bits.
fn wide(words: &[u32]) -> &[u64] {
    // SAFETY: Every pair of words is a number.
    let (before, numbers, after) = unsafe { words.align_to() };
    assert!(before.is_empty() && after.is_empty(), "parts of the memory begin at multiples of 32 words");
    numbers
}
