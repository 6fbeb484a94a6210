//! Rows that go because training has not used them for long.

#![allow(unsafe_code)]

use sok_core::contract::departures::Reason;
use sok_core::contract::table::Outcomes;
use sok_core::error::Result;
use sok_core::policy::clock;
use sok_core::policy::sweep::Rank;

use super::{GpuTable, WAITING};
use crate::abi::{ExpiredCounts, ExpiredRow, Expiry, TABLE_THREADS, word_of};
use crate::device::{Device, launch};
use crate::kernels::EXPIRY;
use crate::memory::{Buffer, Shared};

/// Words before the rows of a list.
const HEAD: usize = size_of::<ExpiredCounts>() / 4;
/// Words of a row in a list.
const ROW: usize = size_of::<ExpiredRow>() / 4;
/// Minimum and maximum room of a list. The rows beyond it are found by another look at all records.
const ROOM: [usize; 2] = [1 << 12, 1 << 19];

/// A list of expired rows on the device, and the copy of it that the host reads.
pub(crate) struct ExpiredList {
    on_device: Buffer<u32>,
    on_host: Shared,
    capacity: usize,
}

/// What a commit expires, until the host has read it.
pub(crate) struct Unread {
    /// Number of the commit in the group.
    pub commit: u64,
    /// The step that it ended.
    step: u64,
}

impl ExpiredList {
    fn new(device: &Device, capacity: usize) -> Result<ExpiredList> {
        let words = HEAD + ROW * capacity;
        let on_device = Buffer::new(&device.context, words)?;
        Ok(ExpiredList { on_device, on_host: Shared::new(&device.context, words)?, capacity })
    }

    pub fn num_bytes(&self) -> usize {
        self.on_device.num_bytes() + 4 * self.on_host.len()
    }

    fn count(&self) -> usize {
        self.on_host.get(word_of!(ExpiredCounts, count)) as usize
    }

    /// The listed rows. Nothing on the device may write to them.
    fn rows(&self) -> &[ExpiredRow] {
        // SAFETY: The caller guarantees it.
        let words = unsafe { self.on_host.words() };
        let words = &words[HEAD..][..ROW * self.count().min(self.capacity)];
        // SAFETY: The words of a row are numbers.
        let (before, rows, after) = unsafe { words.align_to() };
        assert!(before.is_empty() && after.is_empty(), "the list begins at a multiple of 8 bytes");
        rows
    }
}

impl GpuTable {
    /// Returns what a commit that ends this step expires, if rows have a time to live and a part of the keys is due. `commit`: number of the
    /// commit, as policies count. `call`: its number in the group. `is_valid`: whether its ticket is known to be valid. `number`: of the
    /// table in its group. Without memory for a list of the rows, they stay until their part is due again.
    pub(crate) fn plan_expiry(
        &mut self,
        commit: u64,
        step: u64,
        call: u64,
        is_valid: bool,
        number: usize,
    ) -> Option<Expiry> {
        let lifetime = self.config.time_to_live?.lifetime;
        let evictor = self.evictor.as_mut()?;
        let now = clock::now();
        let newest = lifetime.newest_past(commit, now, &evictor.commits.times);
        if is_valid {
            lifetime.note(commit, now, &mut evictor.commits.times);
        } else {
            evictor.time_to_note = Some(now);
        }
        let part = lifetime.part_due(step, self.config.seed)?;
        let newest = newest?.min(evictor.commits.settled);
        let expected = (self.max_numbers() >> part.bits) as usize;
        self.reserve_list(expected + expected / 4).ok()?;
        let evictor = self.evictor.as_mut()?;
        evictor.unread = Some(Unread { commit: call, step });
        let list = evictor.expired.as_ref()?;
        let row_at = |base: u64| base + 4 * HEAD as u64;
        Some(Expiry {
            newest,
            ending: part.ending,
            mask: part.mask(),
            counts: list.on_device.address(),
            rows: row_at(list.on_device.address()),
            given_counts: list.on_host.address(),
            given_rows: row_at(list.on_host.address()),
            capacity: list.capacity as u32,
            table: number as u32,
        })
    }

    /// Makes room in the list of expired rows, which the host has read.
    fn reserve_list(&mut self, rows: usize) -> Result<()> {
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        let [least, most] = ROOM;
        let rows = rows.clamp(least, most);
        if evictor.expired.as_ref().is_none_or(|list| list.capacity < rows) {
            evictor.expired = Some(ExpiredList::new(&self.device, (rows + rows / 2).min(most))?);
        }
        Ok(())
    }

    /// The commit whose expired rows the host has not read, and the memory where their list will be.
    pub(crate) fn unread(&self) -> Option<(u64, &Shared)> {
        let evictor = self.evictor.as_ref()?;
        Some((evictor.unread.as_ref()?.commit, &evictor.expired.as_ref()?.on_host))
    }

    /// Takes over which rows the last commit has expired, once it has written the list.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory).
    pub(crate) fn take_expired(&mut self) -> Result<()> {
        let Some(list) = self.evictor.as_ref().and_then(|evictor| evictor.expired.as_ref()) else {
            return Ok(());
        };
        let (count, num_listed) = (list.count(), list.rows().len());
        let others = if count > num_listed { self.list_unlisted(count - num_listed)? } else { Vec::new() };
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        let (Some(unread), Some(list)) = (evictor.unread.take(), &evictor.expired) else { return Ok(()) };
        if count == 0 {
            return Ok(());
        }
        let rows = || list.rows().iter().chain(&others);
        let (keys, records) = (rows().map(|row| row.key).collect(), rows().map(|row| row.record).collect());
        evictor.departures.trim();
        evictor.departures.remember(Reason::Expired, unread.step, keys)?;
        if self.config.keeps_expired() {
            let mut rows: Vec<ExpiredRow> = rows().copied().collect();
            rows.sort_unstable_by_key(|row| (row.score, row.key));
            evictor.kept.push(rows);
        }
        self.retired.push((self.newest_lookup, records));
        self.len_before -= count as i64;
        self.note(Outcomes { expired: count as u64, ..Outcomes::default() });
        Ok(())
    }

    /// Returns the rows of the last commit that were not listed. Waits for the device.
    fn list_unlisted(&self, count: usize) -> Result<Vec<ExpiredRow>> {
        self.device.synchronize()?;
        let counts = Buffer::<ExpiredCounts>::new(&self.device.context, 1)?;
        let rows = Buffer::<ExpiredRow>::uninit(&self.device.context, count)?;
        let list = self.device.kernel(&EXPIRY, "list_unlisted")?;
        let (table, counts_at, rows_at, capacity) =
            (self.alone(), counts.address(), rows.address(), count as u32);
        let most = 8 * self.device.multiprocessors as usize;
        let blocks = (self.max_numbers() as usize).div_ceil(TABLE_THREADS).clamp(1, most);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or buffer live until the wait below.
        unsafe { launch!(list, WAITING, blocks, TABLE_THREADS, table, counts_at, rows_at, capacity) }?;
        rows.to_vec()
    }

    /// Reads the expired rows that are kept until they are taken. Until then their records must not be given out again. The device must be
    /// idle.
    ///
    /// # Errors
    /// As `take_expired`.
    pub(super) fn read_kept(&mut self) -> Result<()> {
        let kept = self.evictor.as_mut().map(|evictor| std::mem::take(&mut evictor.kept)).unwrap_or_default();
        for rows in kept {
            let records: Vec<u32> = rows.iter().map(|row| row.record).collect();
            let values = self.read_records(self.layout.row(), &records)?;
            let ranks = rows.iter().map(|&ExpiredRow { key, score, .. }| Rank { score, key });
            if let Some(evictor) = &mut self.evictor {
                let dim = self.config.dim;
                evictor.departures.keep(ranks.zip(values.chunks_exact(dim)), dim)?;
            }
        }
        Ok(())
    }

    /// Gives out the numbers of expired rows again, instead of getting memory for others. The device must be idle.
    ///
    /// # Errors
    /// As `take_expired`.
    pub(super) fn reclaim(&mut self) -> Result<()> {
        if self.retired.iter().any(|(lookup, _)| *lookup == 0) {
            self.count_steps()?;
            let room = self.room_to_release(0)?;
            self.release(room, WAITING)?;
            self.device.synchronize()?;
        }
        Ok(())
    }
}
