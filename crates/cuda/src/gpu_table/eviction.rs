//! Scores of a table's rows.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use sok_core::contract::departures::Departures;
use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::TableConfig;
use sok_core::error::Result;
use sok_core::key::Key;
use sok_core::policy::commits::Commits;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::Lifetime;

use super::sweep::{SweepMemory, floor_bytes};
use super::uses::InProgress;
use super::{GpuTable, WAITING, numbers_of};
use crate::abi::{self, FLOOR_RECORDS, Progress, Scoring, Sweep, TABLE_THREADS, Use, word_of};
use crate::device::{Device, Stream, launch, launch_next};
use crate::kernels::SCORES;
use crate::memory::{Arena, Buffer};

/// The uses of a table's rows, and what it has removed.
pub(crate) struct Evictor {
    /// How uses are counted.
    pub policy: Eviction,
    /// The score of each record.
    scores: Arena,
    /// The newest commit of each record, if rows have a time to live.
    newest_commits: Option<Arena>,
    /// A bit for each record that has no row.
    vacant: Arena,
    /// The key of each record.
    keys: Arena,
    /// The score and the key of the floor of each group of records, if rows are evicted.
    floors: Option<[Arena; 2]>,
    /// A `Progress`.
    on_device: Buffer<u64>,
    /// Number of the step in progress, from 1, as far as the host knows: reports of later commits were not read.
    pub step: u64,
    /// Updated when the host reads a report. `settled` may already be the commit in progress.
    pub commits: Commits,
    /// When the commit in progress was made, if the times of commits will contain it.
    pub time_to_note: Option<u64>,
    /// Number of the table in its group.
    pub number: usize,
    /// The saved lookups of the table. References to those that the group has forgotten are dead.
    pub lookups: Vec<Weak<dyn InProgress>>,
    pub departures: Departures,
    /// Memory of sweeps of this table alone.
    pub sweep_memory: SweepMemory,
}

impl Evictor {
    pub fn new(device: &Arc<Device>, config: &TableConfig, policy: Eviction) -> Result<Evictor> {
        let numbers = numbers_of(config);
        let what = || format!("the scores of table `{}`", config.name);
        let arena = |bytes: usize| Arena::new(&device.context, numbers.saturating_mul(bytes), what());
        let floor = || Arena::new(&device.context, floor_bytes(numbers), what());
        let floors = || -> Result<[Arena; 2]> { Ok([floor()?, floor()?]) };
        let evictor = Evictor {
            policy,
            scores: arena(size_of::<u64>())?,
            newest_commits: config.time_to_live.map(|_| arena(size_of::<u64>())).transpose()?,
            vacant: Arena::new(&device.context, vacant_bytes(numbers), what())?,
            keys: arena(size_of::<Key>())?,
            floors: config.eviction.map(|_| floors()).transpose()?,
            on_device: Buffer::new(&device.context, size_of::<Progress>() / 8)?,
            step: 1,
            commits: Commits::default(),
            time_to_note: None,
            number: 0,
            lookups: Vec::new(),
            departures: Departures::default(),
            sweep_memory: SweepMemory::default(),
        };
        evictor.write_progress()?;
        Ok(evictor)
    }

    /// For how many record numbers there is memory.
    pub fn num_numbers(&self) -> u64 {
        let of_words = self.arenas_of_words().map(|arena| arena.num_bytes() / size_of::<u64>());
        let of_floors =
            self.floors.iter().flatten().map(|arena| arena.num_bytes() / size_of::<u64>() * FLOOR_RECORDS);
        of_words.chain(of_floors).min().unwrap_or(0).min(8 * self.vacant.num_bytes()) as u64
    }

    /// Gets memory for this many record numbers.
    pub fn reserve_numbers(&mut self, device: &Device, numbers: usize, spare: bool) -> Result<()> {
        self.scores.grow(numbers * size_of::<u64>(), spare)?;
        if let Some(commits) = &mut self.newest_commits {
            commits.grow(numbers * size_of::<u64>(), spare)?;
        }
        self.keys.grow(numbers * size_of::<Key>(), spare)?;
        grow_with_zeros(&mut self.vacant, device, vacant_bytes(numbers), spare)?;
        let Some([scores, keys]) = &mut self.floors else { return Ok(()) };
        keys.grow(floor_bytes(numbers), spare)?;
        grow_with_zeros(scores, device, floor_bytes(numbers), spare)
    }

    /// The memory with 64 bits for each record.
    fn arenas_of_words(&self) -> impl Iterator<Item = &Arena> {
        [&self.scores, &self.keys].into_iter().chain(&self.newest_commits)
    }

    pub fn num_bytes(&self) -> usize {
        let sweeps = self.sweep_memory.num_bytes();
        let of_words: usize = self.arenas_of_words().map(Arena::num_bytes).sum();
        let floors: usize = self.floors.iter().flatten().map(Arena::num_bytes).sum();
        of_words + self.vacant.num_bytes() + floors + self.departures.num_bytes() + sweeps
    }

    /// Fills in the fields of a descriptor.
    pub fn describe(&self, table: &mut abi::Table) {
        table.scores = self.scores.address();
        table.commits = self.commits();
        (table.vacant, table.keys) = (self.vacant.address(), self.keys.address());
        table.progress = self.on_device.address();
        table.scoring = self.scoring();
        table.floor_scores = if self.policy.score == Score::Lru { 0 } else { self.floors()[0] };
    }

    /// A sweep of the table's records, without what depends on the call.
    pub fn sweep(&self) -> Sweep {
        Sweep {
            scores: self.scores.address(),
            commits: self.commits(),
            vacant: self.vacant.address(),
            keys: self.keys.address(),
            floor_scores: self.floors()[0],
            floor_keys: self.floors()[1],
            progress: self.on_device.address(),
            scoring: self.scoring(),
            ..Sweep::default()
        }
    }

    /// Address of the commits of records, or 0.
    fn commits(&self) -> u64 {
        self.newest_commits.as_ref().map_or(0, Arena::address)
    }

    /// Addresses of the scores and the keys of floors, or zeros.
    fn floors(&self) -> [u64; 2] {
        self.floors.as_ref().map_or([0; 2], |floors| floors.each_ref().map(Arena::address))
    }

    /// What scores are, a `Scoring`.
    fn scoring(&self) -> u32 {
        let scoring = match self.policy.score {
            Score::Lru => Scoring::Steps,
            Score::Lfu { .. } => Scoring::Ids,
            Score::Custom => Scoring::Given,
        };
        scoring as u32
    }

    /// Enqueues that the next sweep examines all rows.
    pub fn clear_floors(&self, stream: Stream) -> Result<()> {
        let Some([scores, _]) = &self.floors else { return Ok(()) };
        // SAFETY: The range has physical memory.
        unsafe { stream.fill(scores.address(), 0, scores.num_bytes()) }
    }

    /// Reads the number of the step in progress. The device must be idle.
    pub fn read_step(&self) -> Result<u64> {
        Ok(self.on_device.read(word_of!(Progress, step) / 2, 1)?[0])
    }

    /// Goes on counting steps from a number. The device must be idle.
    pub fn set_step(&mut self, step: u64) -> Result<()> {
        if step < self.read_step()? {
            // A new row gets the lower step as its score, which floors do not allow for.
            self.clear_floors(WAITING)?;
        }
        self.step = step;
        self.write_progress()
    }

    /// Continues the commits of the table that this one will replace. The device must be idle.
    pub fn go_on_from(&mut self, other: &Evictor) -> Result<()> {
        self.commits.go_on_from(&other.commits);
        self.write_progress()
    }

    /// Writes to the device how far the steps are. It must be idle.
    pub fn write_progress(&self) -> Result<()> {
        self.on_device.write(word_of!(Progress, step) / 2, &[self.step])?;
        self.write_settled()
    }

    /// Writes to the device which commit is settled. A commit may be counting its step there meanwhile.
    pub fn write_settled(&self) -> Result<()> {
        self.on_device.write(word_of!(Progress, settled_commit) / 2, &[self.commits.settled])
    }

    /// Takes over that the ticket of the commit in progress was valid. `commit`: its number. `lifetime`: of rows.
    pub fn end_step(&mut self, commit: u64, lifetime: Option<Lifetime>) {
        self.step = self.step.saturating_add(1);
        self.commits.newest = commit;
        if let (Some(lifetime), Some(now)) = (lifetime, self.time_to_note.take()) {
            lifetime.note(commit, now, &mut self.commits.times);
        }
    }

    /// Takes over that no commit is in progress whose ticket was valid.
    pub fn refuse_commit(&mut self) {
        self.time_to_note = None;
        self.commits.settled = self.commits.settled.min(self.commits.newest);
    }

    /// Adds a lookup, whose rows stay until their gradients are applied or dropped.
    pub fn add_lookup(&mut self, number: usize, lookup: Weak<dyn InProgress>) {
        self.lookups.retain(|lookup| lookup.strong_count() > 0);
        self.number = number;
        self.lookups.push(lookup);
    }
}

/// Grows an arena to `bytes` bytes. Fills the added memory with zeros.
fn grow_with_zeros(arena: &mut Arena, device: &Device, bytes: usize, spare: bool) -> Result<()> {
    let before = arena.num_bytes();
    arena.grow(bytes, spare)?;
    let more = arena.num_bytes() - before;
    if more > 0 {
        // On the default stream the fill would wait for steps.
        let stream = Stream::of_cudarc(&device.copies);
        // SAFETY: The range has physical memory.
        unsafe { stream.fill(arena.address() + before as u64, 0, more) }?;
        stream.synchronize()?;
    }
    Ok(())
}

/// Bytes of a bit for each record.
fn vacant_bytes(numbers: usize) -> usize {
    size_of::<u32>() * numbers.div_ceil(32)
}

impl GpuTable {
    /// Counts a use of the record of each id. `records`: their address, u32; ids with 0 are passed over. `counts`: address of how many ids
    /// each stands for, u32; or 0.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    ///
    /// # Safety
    /// The address is of memory on this device, with this many numbers, that lives until the stream has completed the call.
    pub(crate) unsafe fn count_records(
        &self,
        records: u64,
        counts: u64,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        if self.evictor.is_none() {
            return Ok(());
        }
        let kernel = self.device.kernel(&SCORES, "count_records")?;
        let (table, n) = (self.alone(), count as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory.
        unsafe {
            launch!(kernel, stream, count.div_ceil(TABLE_THREADS), TABLE_THREADS, table, records, counts, n)
        }
    }

    /// Returns whether scores are numbers of ids.
    pub(super) fn counts_ids(&self) -> bool {
        self.evictor.as_ref().is_some_and(|evictor| matches!(evictor.policy.score, Score::Lfu { .. }))
    }

    /// Enqueues halving all scores. `resolved`: address of the `Resolved` of a commit, which must have been valid.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn halve_scores(&self, resolved: u64, stream: Stream) -> Result<()> {
        let halve = self.device.kernel(&SCORES, "halve_scores")?;
        let (table, numbers) = (self.alone(), self.max_numbers() as u32);
        let blocks =
            (numbers as usize).div_ceil(TABLE_THREADS).clamp(1, 8 * self.device.multiprocessors as usize);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory.
        unsafe { launch_next!(halve, stream, blocks, TABLE_THREADS, table, numbers, resolved) }
    }

    /// Appends the numbers of records to the columns of a table that has some. The device must be idle.
    pub(super) fn read_columns(&self, records: &[u32], out: &mut Records) -> Result<()> {
        let (Some(evictor), columns) = (&self.evictor, self.config.columns()) else { return Ok(()) };
        if columns.is_empty() || records.is_empty() {
            return Ok(());
        }
        let uses = self.read_uses(records)?;
        for &column in columns {
            out.column_mut(column).extend(uses.iter().map(|used| match column {
                Column::Scores => used.score,
                Column::Ages => evictor.commits.age(used.commit),
            }));
        }
        Ok(())
    }

    /// Makes records as young as new ones, unless they are younger, and sets the numbers of columns. `records`: by record of `from`. Of
    /// equal records the last one wins. Records 0 are passed over. The device must be idle.
    pub(super) fn write_columns(&self, records: &[u32], from: &Records) -> Result<()> {
        let (Some(evictor), columns) = (&self.evictor, self.config.columns()) else { return Ok(()) };
        if columns.is_empty() {
            return Ok(());
        }
        let last: HashMap<u32, usize> =
            records.iter().copied().enumerate().filter(|(_, r)| *r != 0).map(|(i, r)| (r, i)).collect();
        let (records, places): (Vec<u32>, Vec<usize>) = last.into_iter().unzip();
        let mut uses = self.read_uses(&records)?;
        for (used, &place) in uses.iter_mut().zip(&places) {
            used.commit = used.commit.max(evictor.commits.settled);
            for column in Column::ALL {
                match (column, from.column(column).get(place)) {
                    (_, None) => {}
                    (Column::Scores, Some(&score)) => used.score = score,
                    (Column::Ages, Some(&age)) => used.commit = evictor.commits.with_age(used.commit, age),
                }
            }
        }
        let (at, from) = (
            Buffer::from_slice(&self.device.context, &records)?,
            Buffer::from_slice(&self.device.context, &uses)?,
        );
        let write = self.device.kernel(&SCORES, "write_uses")?;
        let (table, at, from, n) = (self.alone(), at.address(), from.address(), records.len() as u32);
        let blocks = records.len().div_ceil(TABLE_THREADS);
        // Kernels do not lower floors where scores are steps.
        if table.floor_scores == 0 {
            evictor.clear_floors(WAITING)?;
        }
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below.
        unsafe { launch!(write, WAITING, blocks, TABLE_THREADS, table, at, from, n) }?;
        self.device.synchronize()
    }

    /// Returns the uses of records. The device must be idle.
    pub(super) fn read_uses(&self, records: &[u32]) -> Result<Vec<Use>> {
        let on_device = Buffer::from_slice(&self.device.context, records)?;
        let uses = Buffer::<Use>::uninit(&self.device.context, records.len())?;
        let read = self.device.kernel(&SCORES, "read_uses")?;
        let (table, from, to, n) = (self.alone(), on_device.address(), uses.address(), records.len() as u32);
        let blocks = records.len().div_ceil(TABLE_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers live until the wait below.
        unsafe { launch!(read, WAITING, blocks, TABLE_THREADS, table, from, to, n) }?;
        uses.to_vec()
    }
}
