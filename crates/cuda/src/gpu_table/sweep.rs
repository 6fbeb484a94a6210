//! Sweeps: the device chooses and erases the rows that tables remove to make room.

#![allow(unsafe_code)]

use std::sync::{Arc, Weak};

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
    _out_of_vocabulary: Option<Buffer<u32>>,
}

/// Memory of sweeps.
pub(crate) struct SweepMemory {
    on_device: Buffer<u32>,
    /// As many words, which the host reads.
    results: Shared,
}

impl SweepMemory {
    fn new(device: &Device, num_words: usize) -> Result<SweepMemory> {
        let on_device = Buffer::uninit(&device.context, num_words)?;
        Ok(SweepMemory { on_device, results: Shared::new(&device.context, num_words)? })
    }

    pub fn num_bytes(&self) -> usize {
        self.on_device.num_bytes()
    }
}

/// Sweeps of several tables that have been enqueued together.
pub(crate) struct Sweeps {
    device: Arc<Device>,
    memory: Buffer<u32>,
    sweeps: Vec<Sweep>,
    /// Address of what the host reads: the choices, then the listed rows.
    results_at: u64,
    results: Shared,
    /// Blocks of a launch for each sweep.
    blocks: u32,
    _out_of_vocabulary: Vec<Buffer<u32>>,
}

/// Parts of the memory of sweeps.
struct Places {
    sweeps: Vec<Sweep>,
    used: Vec<Used>,
    /// Address of the first word that starts as zero.
    zeros: u64,
    results: u64,
    num_words: usize,
}

impl Places {
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
        }
        Places { sweeps, used, zeros, results, num_words: at }
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
        let num_words = Places::new(0, &planned).num_words;
        let SweepMemory { on_device: memory, results: on_host } =
            match spare.filter(|spare| spare.on_device.len() >= num_words) {
                Some(spare) => spare,
                None => SweepMemory::new(device, num_words + num_words / 4)?,
            };
        let Places { sweeps, used, zeros, results, .. } = Places::new(memory.address(), &planned);
        let descriptors = [words(&sweeps), words(&used)].concat();
        // SAFETY: The memory begins with room for the descriptors, and the driver copies what is in pageable memory before it returns.
        unsafe {
            stream.copy_to_device(memory.address(), descriptors.as_ptr().cast(), 4 * descriptors.len())
        }?;
        // The lists are read whole, whatever their lengths.
        let num_zeros = 4 * num_words - (zeros - memory.address()) as usize;
        // SAFETY: The memory has so many words.
        unsafe { stream.fill(zeros, 0, num_zeros) }?;
        let most = 8 * device.multiprocessors as usize / sweeps.len().max(1);
        let numbers = sweeps.iter().map(|sweep| sweep.numbers as usize).max().unwrap_or(0);
        let blocks = numbers.div_ceil(TABLE_THREADS).clamp(1, most.max(1)) as u32;
        let names = ["mark_used", "measure_rows", "count_ranks", "list_chosen"];
        let [mark, measure, count, list] = device.kernels(&SCORES, names)?;
        let at = memory.address();
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
            results: on_host,
            blocks,
            _out_of_vocabulary: planned
                .into_iter()
                .filter_map(|planned| planned._out_of_vocabulary)
                .collect(),
        })
    }

    /// Reads what the sweeps have found. They must have completed.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn read(&mut self) -> Result<()> {
        let last = self.sweeps.last().map_or(0, |sweep| match sweep.listed_scores {
            0 => sweep.listed_records + 4 * sweep.wanted,
            scores => scores + 8 * sweep.wanted,
        });
        let num_words = last.saturating_sub(self.results_at) as usize / 4;
        self.results.copy_beside(&self.device, self.results_at, num_words)
    }

    fn words_at(&self, address: u64) -> &[u32] {
        // SAFETY: Only `read` has words written, and it waits.
        let words = unsafe { self.results.words() };
        &words[((address - self.results_at) / 4) as usize..]
    }

    /// Returns how many rows of a table may go. `number`: that of its sweep.
    pub fn num_removable(&self, number: usize) -> u64 {
        wide(&self.words_at(self.sweeps[number].choice)[..2])[0]
    }

    /// Enqueues erasing the chosen rows.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn erase(&self, stream: Stream) -> Result<()> {
        let erase = self.device.kernel(&TABLE, "erase_chosen")?;
        let (at, blocks) = (self.memory.address(), self.blocks);
        // SAFETY: The arguments have the types of the kernel's parameters. Tables and `Sweeps` keep the memory that they point to.
        unsafe { launch_next!(erase, stream, self.sweeps.len() * blocks as usize, TABLE_THREADS, at, blocks) }
    }

    /// Returns the memory, for later sweeps on the same stream.
    pub fn into_memory(self) -> SweepMemory {
        SweepMemory { on_device: self.memory, results: self.results }
    }
}

impl GpuTable {
    /// Returns a sweep that chooses the rows with the lowest scores, to make room for new keys. The row of the out-of-vocabulary key stays,
    /// and so do those of lookups whose gradients were not applied yet, and the used ones. `None` without an eviction policy, or if no
    /// room is needed. The counts of the device must be known.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn plan_sweep(&self, new_keys: u64, used: UsedRecords) -> Result<Option<PlannedSweep>> {
        let needed = (self.rows() + new_keys).saturating_sub(self.config.capacity());
        let Some(evictor) = self.evictor.as_ref().filter(|_| needed > 0) else { return Ok(None) };
        let numbers =
            u64::from(self.fresh) + u64::from(self.counted).saturating_sub(self.released.len() as u64);
        let numbers_at = |records: u64, words: usize, count: usize| Used {
            records,
            stride: words as u32,
            count: count as u32,
            ..Used::default()
        };
        let mut all_used = vec![numbers_at(used.address, 1, used.count)];
        let mut out_of_vocabulary = None;
        if let Some(key) = self.config.out_of_vocabulary_key {
            let found = self.look_up(&self.room(1, 0)?, &[key], false)?;
            let record = Buffer::from_slice(&self.device.context, &found)?;
            all_used.push(numbers_at(record.address(), 1, 1));
            out_of_vocabulary = Some(record);
        }
        for lookup in evictor.lookups.iter().filter_map(Weak::upgrade) {
            // A group gives the memory of a lookup to later work of the same stream alone. The number comes first in a `Sorted`.
            for SortedIds { address, count } in lookup.ids(evictor.number, self.generation) {
                all_used.push(numbers_at(address, size_of::<Sorted>() / 4, count));
            }
        }
        let sweep = Sweep {
            index: self.index.descriptor(),
            wanted: sweep_size(needed, self.config.capacity()).min(self.rows()),
            numbers: numbers as u32,
            ..evictor.sweep()
        };
        Ok(Some(PlannedSweep {
            sweep,
            used: all_used,
            keeps: evictor.policy.keeps_evicted,
            _out_of_vocabulary: out_of_vocabulary,
        }))
    }

    /// Chooses rows to make room for new keys, as `plan_sweep`. The device must be idle.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn sweep_for(&mut self, new_keys: u64, used: UsedRecords) -> Result<Option<Sweeps>> {
        let Some(planned) = self.plan_sweep(new_keys, used)? else { return Ok(None) };
        let scratch = self.evictor.as_mut().and_then(|evictor| evictor.scratch.take());
        let mut sweeps = Sweeps::start(&self.device, scratch, vec![planned], WAITING)?;
        self.device.synchronize()?;
        sweeps.read()?;
        Ok(Some(sweeps))
    }

    /// Removes the rows that `sweep_for` has chosen. Returns how many went. The device must be idle.
    ///
    /// # Errors
    /// As `end_sweep`.
    pub(crate) fn end_own_sweep(&mut self, sweeps: Option<Sweeps>) -> Result<u64> {
        let Some(sweeps) = sweeps else { return Ok(0) };
        let evicted = self.end_sweep(&sweeps, 0, WAITING)?;
        sweeps.erase(WAITING)?;
        self.device.synchronize()?;
        if let Some(evictor) = &mut self.evictor {
            evictor.scratch = Some(sweeps.into_memory());
        }
        Ok(evicted)
    }

    /// Takes over that the chosen rows are erased. Returns how many went. `number`: of the table's sweep, which was read. Only work on the
    /// stream may use the table meanwhile.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory).
    pub(crate) fn end_sweep(&mut self, sweeps: &Sweeps, number: usize, stream: Stream) -> Result<u64> {
        let sweep = sweeps.sweeps[number];
        let count = sweeps.num_removable(number).min(sweep.wanted) as usize;
        let keys = wide(&sweeps.words_at(sweep.listed_keys)[..2 * count]).to_vec();
        let records = &sweeps.words_at(sweep.listed_records)[..count];
        if sweep.listed_scores != 0 {
            let scores = wide(&sweeps.words_at(sweep.listed_scores)[..2 * count]);
            self.keep_rows(keys.iter().copied().zip(scores.iter().copied()), records)?;
        }
        let room = self.room_to_release(count)?;
        if let Some(evictor) = &mut self.evictor {
            evictor.departures.trim();
            evictor.departures.remember(evictor.step, keys)?;
        }
        self.retire(records, room, stream)?;
        Ok(count as u64)
    }

    /// Keeps rows that go, until they are taken.
    fn keep_rows(&mut self, rows: impl Iterator<Item = (Key, u64)>, records: &[u32]) -> Result<()> {
        let ranks = rows.map(|(key, score)| Rank { score, key });
        let mut going: Vec<(Rank, u32)> = ranks.zip(records.iter().copied()).collect();
        going.sort_unstable();
        let records: Vec<u32> = going.iter().map(|(_, record)| *record).collect();
        let values = if records.is_empty() { Vec::new() } else { self.read_records(&records)? };
        let (dim, width) = (self.config.dim, self.layout.fields.width as usize);
        let values = values.chunks_exact(width).map(|values| &values[..dim]);
        let rows = going.iter().map(|(rank, _)| *rank).zip(values);
        self.evictor.as_mut().map_or(Ok(()), |evictor| evictor.departures.keep(rows, dim))
    }
}

/// Pairs of words as numbers of 64 bits.
fn wide(words: &[u32]) -> &[u64] {
    // SAFETY: Every pair of words is a number.
    let (before, numbers, after) = unsafe { words.align_to() };
    assert!(before.is_empty() && after.is_empty(), "parts of the memory begin at multiples of 32 words");
    numbers
}
