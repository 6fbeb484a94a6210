//! Rows that go because training has not used them for long.

#![allow(unsafe_code)]

use sok_core::contract::departures::Reason;
use sok_core::error::Result;
use sok_core::policy::clock;
use sok_core::policy::time_to_live::Part;

use super::{GpuTable, WAITING};
use crate::abi::{Expiry, TABLE_THREADS, UnlistedRow};
use crate::device::launch;
use crate::kernels::EXPIRY;
use crate::memory::Buffer;

/// Minimum and maximum number of rows of a part for which the ring gets room. The host lists the rows beyond it.
const ROOM: [u64; 2] = [1 << 12, 1 << 19];

/// An expiry of a table that has not been enqueued.
pub(crate) struct PlannedExpiry {
    pub expiry: Expiry,
    /// Upper bound of the record numbers, exclusive.
    pub numbers: usize,
}

impl GpuTable {
    /// Makes room in the ring for the rows that a commit removes which ends the step in progress. Waits for the device if there is none.
    /// Without memory for that, rows stay until their part is due again.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if the device has failed.
    pub(crate) fn prepare_expiry(&mut self) -> Result<()> {
        let step = self.evictor.as_deref().map(|evictor| evictor.step);
        let Some(part) = step.and_then(|step| self.part_due(step)) else { return Ok(()) };
        let room = self.room_for(part);
        if !self.ring_has_room(room) {
            self.device.synchronize()?;
            self.learn()?;
            self.take_departures()?;
            // Without memory, the rows stay.
            if let Ok(Some(ring)) = self.larger_ring(room) {
                self.release_into(Some(ring))?;
            }
        }
        Ok(())
    }

    /// Returns which keys are due at the end of a step.
    fn part_due(&self, step: u64) -> Option<Part> {
        let due = self.config.time_to_live?.lifetime.part_due(step, self.config.seed);
        due.filter(|_| self.config.trainable)
    }

    /// Returns for how many rows of a part the ring has room.
    fn room_for(&self, part: Part) -> u64 {
        let expected = self.max_numbers() >> part.bits;
        let [least, most] = ROOM;
        (expected + expected / 4).clamp(least, most)
    }

    /// Returns what a commit that ends this step removes from table `number` of its group, if rows have a time to live and a part of the keys is
    /// due. `commit`: number of the commit, as policies count. `is_valid`: whether its ticket is known to be valid.
    pub(crate) fn plan_expiry(
        &mut self,
        number: usize,
        commit: u64,
        step: u64,
        is_valid: bool,
    ) -> Option<PlannedExpiry> {
        let lifetime = self.config.time_to_live?.lifetime;
        let evictor = self.evictor.as_mut()?;
        let now = clock::now();
        let newest = lifetime.newest_past(commit, now, &evictor.commits.times);
        if is_valid {
            lifetime.note(commit, now, &mut evictor.commits.times);
        } else {
            evictor.time_to_note = Some(now);
        }
        let newest = newest?.min(evictor.commits.settled);
        let part = self.part_due(step)?;
        // The commit may have raised the upper bound of numbers since, or may have swept. Rows beyond the room go, too.
        let rooms = std::iter::successors(Some(self.room_for(part)), |room| Some(room / 2));
        let room = rooms.take_while(|room| *room > 0).find(|room| self.ring_has_room(*room))?;
        let removal = self.next_removal();
        let (ending, mask) = (part.ending, part.mask());
        let expiry = Expiry { newest, ending, mask, removal, room: room as u32, table: number as u32 };
        Some(PlannedExpiry { expiry, numbers: self.max_numbers() as usize })
    }

    /// Takes over that an expiry was enqueued.
    pub(crate) fn note_expiry(&mut self, expiry: &Expiry) {
        self.note_sweep(Reason::Expired, expiry.removal.sweep, expiry.room.into());
    }

    /// Returns up to `count` expired rows for which the ring had no room. `takes`: whether they are not returned again. The device must be idle.
    pub(super) fn read_unlisted(&self, count: u64, takes: bool) -> Result<Vec<UnlistedRow>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let context = &self.device.context;
        let rows = Buffer::<UnlistedRow>::uninit(context, count as usize)?;
        let num_found = Buffer::<u32>::new(context, 1)?;
        let list = self.device.kernel(&EXPIRY, "list_unlisted")?;
        let (table, to, counter) = (self.alone(), rows.address(), num_found.address());
        let (room, takes) = (count as u32, u32::from(takes));
        let blocks = self.device.blocks_for(self.max_numbers() as usize, 1);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or buffer live until the wait below.
        unsafe { launch!(list, WAITING, blocks, TABLE_THREADS, table, to, counter, room, takes) }?;
        self.device.synchronize()?;
        let found = u64::from(num_found.to_vec()?[0]).min(count);
        rows.read(0, found as usize)
    }

    /// Gives out the numbers of removed rows again. The device must be idle.
    ///
    /// # Errors
    /// As `take_departures`.
    pub(super) fn reclaim(&mut self) -> Result<()> {
        self.count_steps()?;
        self.release()
    }
}
