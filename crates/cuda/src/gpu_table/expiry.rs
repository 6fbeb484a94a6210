//! Rows that go because training has not used them for long.

#![allow(unsafe_code)]

use sok_core::contract::departures::Reason;
use sok_core::contract::table::Outcomes;
use sok_core::error::Result;
use sok_core::policy::clock;
use sok_core::policy::sweep::Rank;

use super::{GpuTable, WAITING};
use crate::abi::{ExpiredHead, ExpiredRow, Expiry, TABLE_THREADS, word_of};
use crate::device::{Device, launch};
use crate::kernels::EXPIRY;
use crate::memory::{Buffer, Shared};

/// Words before the rows of a list.
const HEAD: usize = size_of::<ExpiredHead>() / 4;
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

/// A commit that removes rows whose time is over, until the host has read which.
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
        self.on_host.get(word_of!(ExpiredHead, count)) as usize
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
    /// Returns what a commit that ends this step removes, without the number of the table, if rows have a time to live and a part of the keys is
    /// due. `commit`: number of the commit, as policies count. `call`: its number in the group. `is_valid`: whether its ticket is known to
    /// be valid. Without memory for a list of the rows, they stay until their part is due again.
    pub(crate) fn plan_expiry(
        &mut self,
        commit: u64,
        step: u64,
        call: u64,
        is_valid: bool,
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
        let list = evictor.expired.as_ref()?;
        evictor.unread = Some(Unread { commit: call, step });
        Some(Expiry {
            newest,
            ending: part.ending,
            mask: part.mask(),
            list: list.on_device.address(),
            given: list.on_host.address(),
            capacity: list.capacity as u32,
            table: 0,
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

    /// Returns the last commit that removes rows whose time is over, if the host has not asked for it yet.
    pub(crate) fn take_unread(&mut self) -> Option<Unread> {
        self.evictor.as_mut()?.unread.take()
    }

    /// The memory where the list of such rows will be.
    pub(crate) fn expired_list(&self) -> Option<&Shared> {
        Some(&self.evictor.as_ref()?.expired.as_ref()?.on_host)
    }

    /// Takes over which rows a commit has removed, once it has written the list.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory). The rows are gone nevertheless.
    pub(crate) fn take_expired(&mut self, unread: &Unread) -> Result<()> {
        let Some(list) = self.evictor.as_mut().and_then(|evictor| evictor.expired.take()) else {
            return Ok(());
        };
        let taken = if list.count() == 0 { Ok(()) } else { self.take_list(&list, unread) };
        if let Some(evictor) = &mut self.evictor {
            evictor.expired = Some(list);
        }
        taken
    }

    /// As `take_expired`. `list`: the rows.
    fn take_list(&mut self, list: &ExpiredList, unread: &Unread) -> Result<()> {
        let (count, listed) = (list.count(), list.rows());
        self.note(Outcomes { expired: count as u64, ..Outcomes::default() });
        // If not all keys are known that went, no increment can have them.
        let unlisted = self.list_unlisted(count - listed.len()).inspect_err(|_| self.forget_changes())?;
        self.reserve_removed(count).inspect_err(|_| self.forget_changes())?;
        let rows = || listed.iter().chain(&unlisted);
        self.note_removed(rows().map(|row| (row.key, row.change)));
        self.retire(rows().map(|row| row.record));
        if self.config.keeps_expired() {
            let mut rows: Vec<&ExpiredRow> = rows().collect();
            rows.sort_unstable_by_key(|row| (row.score, row.key));
            self.keep_expired(&rows)?;
        }
        if let Some(evictor) = &mut self.evictor {
            evictor.departures.trim();
            let keys = rows().map(|row| row.key).collect();
            evictor.departures.remember(Reason::Expired, unread.step, keys)?;
        }
        Ok(())
    }

    /// Keeps expired rows until they are taken. Gradients that still come for a row change its record, so it is read now.
    fn keep_expired(&mut self, rows: &[&ExpiredRow]) -> Result<()> {
        let records: Vec<u32> = rows.iter().map(|row| row.record).collect();
        let values = self.read_records(self.layout.row(), &records)?;
        let ranks = rows.iter().map(|&&ExpiredRow { key, score, .. }| Rank { score, key });
        let dim = self.config.dim;
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        evictor
            .departures
            .keep(ranks.zip(values.chunks_exact(dim)), dim, |from: &[f32], to| to.copy_from_slice(from))
    }

    /// Returns the rows of the last commit that were not listed. Waits for the device if there are some.
    fn list_unlisted(&self, count: usize) -> Result<Vec<ExpiredRow>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        self.device.synchronize()?;
        let words = Buffer::<u64>::new(&self.device.context, (HEAD + ROW * count) / 2)?;
        let list = self.device.kernel(&EXPIRY, "list_unlisted")?;
        let (table, to, capacity) = (self.alone(), words.address(), count as u32);
        let blocks = self.device.blocks_for(self.max_numbers() as usize, 1);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or buffer live until the wait below.
        unsafe { launch!(list, WAITING, blocks, TABLE_THREADS, table, to, capacity) }?;
        self.device.synchronize()?;
        crate::memory::read(&self.device.context, words.at(HEAD / 2), count)
    }

    /// Gives out the numbers of removed rows again. The device must be idle.
    ///
    /// # Errors
    /// As `take_expired`.
    pub(super) fn reclaim(&mut self) -> Result<()> {
        self.count_steps()?;
        self.release()
    }
}
