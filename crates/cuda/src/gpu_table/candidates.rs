//! Candidates: keys without a row that lookups of training have met. Commits count their sights, and insert those that the table admits.

#![allow(unsafe_code)]

use std::sync::Arc;

use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::{Insertion, TableConfig};
use sok_core::error::Result;
use sok_core::initializer::Initializer;
use sok_core::key::Key;
use sok_core::policy::admission::{Admission, sum_of_sights};
use sok_core::row_type::RowType;

use super::{GpuTable, WAITING};
use crate::abi::{self, CANDIDATE, Candidate, Forgetting, TABLE_THREADS, TableCounts};
use crate::device::{Device, Stream, launch};
use crate::kernels::ADMISSION;
use crate::memory::Buffer;

/// Floats of a `Candidate`.
const WIDTH: usize = size_of::<Candidate>() / 4;

/// The candidates of a table.
pub(crate) struct Candidates {
    /// `None`: all keys are admitted.
    policy: Option<Admission>,
    /// Number of the step in progress, from 1, as far as the host knows: reports of later commits were not read. Without a policy, steps are not
    /// counted.
    pub step: u64,
    /// Whether the commit in progress may insert no more keys than the host has inserted.
    pub is_closed: bool,
    /// The records of the keys are `Candidate`s.
    table: GpuTable,
    /// Number of ids looked up since the last commit.
    ids_since: u64,
    /// A `Forgetting`, if the policy's memory is limited.
    forgetting: Option<Buffer<u32>>,
}

impl Candidates {
    /// Makes memory for the candidates of a table.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory.
    pub fn new(device: &Arc<Device>, of: &TableConfig) -> Result<Box<Candidates>> {
        let config = TableConfig {
            dim: WIDTH,
            initializer: Initializer::Constant { value: 0.0 },
            vocabulary_size: None,
            out_of_vocabulary_key: None,
            initial_capacity: 0,
            max_capacity: None,
            eviction: None,
            admission: None,
            time_to_live: None,
            row_type: RowType::Float32,
            stochastic_rounding: false,
            optimizer: 0,
            ..of.clone()
        };
        let mut table = GpuTable::new(device, config)?;
        // A report that was enqueued before does not have its counts.
        table.is_recounted = true;
        let policy = of.admission;
        let forgetting = policy
            .and_then(Admission::max_counts)
            .map(|_| {
                // They are launched much later, in the middle of a commit.
                device.kernels(&ADMISSION, ["choose_forgotten", "forget_lowest"])?;
                Buffer::new(&device.context, size_of::<Forgetting>() / 4)
            })
            .transpose()?;
        Ok(Box::new(Candidates { policy, step: 1, is_closed: false, table, ids_since: 0, forgetting }))
    }

    /// Returns the descriptor of the candidates for the kernels of a group.
    pub fn descriptor(&self) -> abi::Table {
        abi::Table { row_type: CANDIDATE, ..self.table.descriptor(0) }
    }

    /// Returns which keys the kernels admit.
    pub fn admission(&self) -> abi::Admission {
        let everything = 1 << 53;
        let (threshold, chance) = match self.policy {
            Some(Admission::Frequency { threshold, .. }) => (threshold, everything),
            Some(Admission::Probability { probability }) => {
                (0, (probability * everything as f64).ceil() as u64)
            }
            None => (0, everything),
        };
        abi::Admission {
            step: self.step,
            chance,
            threshold,
            counts_ids: self.policy.is_some_and(Admission::counts_ids).into(),
            is_closed: self.is_closed.into(),
            pad: 0,
        }
    }

    /// Notes that the device has the current descriptor.
    pub fn note_described(&mut self) {
        self.table.has_moved = false;
    }

    /// Whether the descriptor on the device is out of date.
    pub fn has_moved(&self) -> bool {
        self.table.has_moved
    }

    pub fn num_bytes(&self) -> usize {
        self.table.index.num_bytes() + self.table.arena.num_bytes() + self.table.ring.num_bytes()
    }

    /// Returns a number above those of all candidates, and the same as far as the device has reported.
    pub fn max_numbers(&self) -> (u64, u64) {
        (self.table.max_numbers(), self.table.known_numbers())
    }

    // ---- room for the candidates of lookups

    /// Whether there is memory for the candidates of this many ids.
    pub fn has_room(&self, ids: u64) -> bool {
        self.table.has_room(ids)
    }

    /// Gets memory for the candidates of this many ids. Erases those without sights that are not marked. The device must be idle, except that
    /// marks may be under way on the default stream.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device).
    pub fn make_room(&mut self, ids: u64, stream: Stream) -> Result<()> {
        self.table.count_steps()?;
        self.forget_unseen()?;
        let (rows, capacity) = (self.table.rows(), self.table.index.capacity() as u64);
        // Otherwise each of the next calls would look for candidates without sights again.
        let soon = if 2 * rows > capacity { capacity + 1 - rows } else { 0 };
        self.table.make_room(ids, self.table.max_new_soon(ids).max(soon), stream)
    }

    /// Notes a lookup that may add the keys of this many ids.
    pub fn expect(&mut self, ids: u64) {
        self.table.expect(ids);
        self.ids_since += ids;
    }

    /// Gets memory for later calls.
    pub fn reserve_soon(&mut self) {
        self.table.reserve_soon();
    }

    /// Notes that a commit was enqueued.
    pub fn expect_report(&mut self) {
        self.table.expect_report();
        self.ids_since = 0;
    }

    /// Takes over the counts of a commit's report.
    pub fn learn_from(&mut self, counts: TableCounts) {
        self.table.learn_from(counts, self.ids_since);
    }

    fn forget_unseen(&mut self) -> Result<()> {
        let (keys, _) = self.list(true)?;
        if !keys.is_empty() {
            self.table.remove(&keys)?;
        }
        Ok(())
    }

    /// Returns the keys with sights and their sights; or with `forgotten` the keys without. The device must be idle.
    fn list(&self, forgotten: bool) -> Result<(Vec<Key>, Vec<u32>)> {
        let (device, most) = (&self.table.device, self.table.max_numbers() as usize);
        let list = device.kernel(&ADMISSION, "list_candidates")?;
        let context = &device.context;
        let (count, keys) = (Buffer::<u32>::new(context, 1)?, Buffer::<Key>::uninit(context, most)?);
        let sights = Buffer::<u32>::uninit(context, if forgotten { 0 } else { most })?;
        let (descriptor, blocks) = (self.descriptor(), device.blocks_for(most, 1) as usize);
        let (forgotten, count_at, keys_at, sights_at) =
            (u32::from(forgotten), count.address(), keys.address(), sights.address());
        // SAFETY: The arguments have the types of the kernel's parameters. The buffers have room for all candidates, and the call below waits.
        unsafe {
            launch!(list, WAITING, blocks, TABLE_THREADS, descriptor, forgotten, count_at, keys_at, sights_at)
        }?;
        device.synchronize()?;
        let listed = count.read(0, 1)?[0] as usize;
        Ok((keys.read(0, listed)?, if forgotten == 0 { sights.read(0, listed)? } else { Vec::new() }))
    }

    // ---- steps

    /// Ends the step in progress. Returns whether the descriptor of the table has changed.
    pub fn end_step(&mut self) -> bool {
        self.step += u64::from(self.policy.is_some());
        matches!(self.policy, Some(Admission::Probability { .. }))
    }

    /// Enqueues what a step ends with, if its tickets are valid: halves all sights if the step ends a half-life, and forgets the lowest if the
    /// policy's memory may not hold all. `resolved`: address of the `Resolved` of its commit.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn age(&self, step: u64, resolved: u64, stream: Stream) -> Result<()> {
        if !self.table.config.trainable {
            return Ok(());
        }
        let device = &self.table.device;
        let most = self.table.max_numbers();
        let (descriptor, blocks) = (self.descriptor(), device.blocks_for(most as usize, 1) as usize);
        if self.policy.is_some_and(|policy| policy.halves_after(step)) {
            let halve = device.kernel(&ADMISSION, "halve_sights")?;
            // SAFETY: The arguments have the types of the kernel's parameters. The group keeps the memory that they point to.
            unsafe { launch!(halve, stream, blocks, TABLE_THREADS, descriptor, resolved) }?;
        }
        let (Some(Admission::Frequency { threshold: top, .. }), Some(forgetting)) =
            (self.policy, &self.forgetting)
        else {
            return Ok(());
        };
        let max = self.policy.and_then(Admission::max_counts).filter(|&max| most > max);
        let Some(max) = max.and_then(|max| u32::try_from(max).ok()) else { return Ok(()) };
        let (stays, forgetting) = (max - max / 64, forgetting.address());
        let [choose, forget] = device.kernels(&ADMISSION, ["choose_forgotten", "forget_lowest"])?;
        // SAFETY: As above.
        unsafe {
            launch!(choose, stream, blocks, TABLE_THREADS, descriptor, resolved, top, max, stays, forgetting)
        }?;
        // SAFETY: As above.
        unsafe { launch!(forget, stream, blocks, TABLE_THREADS, descriptor, resolved, top, forgetting) }
    }

    // ---- sights, for the host. The device must be idle.

    /// Whether a key without a row gets one, with so many sights. `seed`: of the table.
    pub fn admits(&self, seed: u64, key: Key, sights: u32, more: u64) -> bool {
        self.policy.is_none_or(|policy| policy.admits(sum_of_sights(sights, more), seed, key, self.step))
    }

    /// Whether it matters how many ids a key has in a step.
    pub fn counts_ids(&self) -> bool {
        self.policy.is_some_and(Admission::counts_ids)
    }

    /// Returns the number of sights of a key.
    pub fn sights(&self, key: Key) -> Result<u32> {
        let room = self.table.room(1, 0)?;
        let found = self.table.look_up(&room, &[key], false)?;
        if found[0] == 0 {
            return Ok(0);
        }
        Ok(self.table.read_records(self.table.layout.fields, &found)?[0].to_bits())
    }

    /// Returns the keys that have sights, and as scores their sights.
    pub fn all_sights(&self) -> Result<Records> {
        let (keys, sights) = self.list(false)?;
        let mut all = Records::default();
        all.reserve(keys.len(), 0, &[Column::Scores], "the sights of keys without a row")?;
        all.keys.extend(keys);
        all.scores.extend(sights.into_iter().map(u64::from));
        Ok(all)
    }

    /// Takes sights of keys, as `all_sights` returns them.
    pub fn restore(&mut self, sights: &Records) -> Result<()> {
        if !self.policy.is_some_and(Admission::counts) || sights.keys.is_empty() {
            return Ok(());
        }
        let counts = sights.scores.iter().map(|&count| u32::try_from(count).unwrap_or(u32::MAX));
        self.table.wait()?;
        self.write(&sights.keys, counts, true)
    }

    /// Forgets the sights of keys.
    pub fn forget(&mut self, keys: &[Key]) -> Result<()> {
        if keys.is_empty() || !self.policy.is_some_and(Admission::counts) {
            return Ok(());
        }
        self.write(keys, std::iter::repeat(0), false)
    }

    fn write(&mut self, keys: &[Key], sights: impl Iterator<Item = u32>, insert: bool) -> Result<()> {
        let room = self.table.room(keys.len(), WIDTH)?;
        let (records, num_new) = if insert {
            let (records, outcomes) = self.table.locate(&room, keys, true)?;
            (records, outcomes.inserted)
        } else {
            (self.table.look_up(&room, keys, false)?, 0)
        };
        let words = |(&key, sights): (&Key, u32)| [sights, 0, 0, 0, key as u32, (key >> 32) as u32, 0, 0];
        let values: Vec<f32> = keys.iter().zip(sights).flat_map(words).map(f32::from_bits).collect();
        self.table.write(&room, self.table.layout.fields, &records, num_new, &values)
    }
}

impl GpuTable {
    /// Returns when a lookup of this table inserts. With an admission policy a commit inserts, since it knows all sights of a step.
    pub(crate) fn own_insertion(&self, insertion: Insertion, save: bool) -> Insertion {
        match insertion {
            Insertion::AtLookup if self.config.admission.is_some() && save => Insertion::AtCommit,
            Insertion::AtLookup if self.config.admission.is_some() => Insertion::Never,
            _ => insertion,
        }
    }

    /// Makes memory for candidates, if a lookup is the first one that has some.
    ///
    /// # Errors
    /// As `Candidates::new`.
    pub(crate) fn candidates_mut(&mut self) -> Result<&mut Candidates> {
        let candidates = match self.candidates.take() {
            Some(candidates) => candidates,
            None => {
                self.has_moved = true;
                Candidates::new(&self.device, &self.config)?
            }
        };
        Ok(self.candidates.insert(candidates))
    }

    /// Returns the candidates of a new table, if a policy counts them.
    pub(super) fn first_candidates(
        device: &Arc<Device>,
        config: &TableConfig,
    ) -> Result<Option<Box<Candidates>>> {
        config.admission.map(|_| Candidates::new(device, config)).transpose()
    }

    /// Forgets the sights of keys. The device must be idle.
    pub(crate) fn forget_sights(&mut self, keys: &[Key]) -> Result<()> {
        self.candidates.as_mut().map_or(Ok(()), |candidates| candidates.forget(keys))
    }
}
