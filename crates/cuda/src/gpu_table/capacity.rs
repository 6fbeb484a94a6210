//! Room for keys: record numbers, memory, and bounds of what steps in progress may insert.

use sok_core::contract::table::CheckMode;
use sok_core::error::{Error, Result};

use super::{GpuTable, SPARE_NUMBERS};
use crate::abi::Released;
use crate::device::Stream;

/// Numbers of removed rows are given out again, instead of getting memory, if they are this part of all numbers.
const RECLAIMED: u64 = 8;

impl GpuTable {
    /// Returns for how many record numbers, record 0 included, there is memory.
    pub(crate) fn num_numbers(&self) -> u64 {
        let records = (self.arena.num_bytes() / (16 * self.layout.stride)) as u64;
        let scores = self.evictor.as_ref().map_or(u64::MAX, |evictor| evictor.num_numbers());
        let changes = self.changes.as_ref().map_or(u64::MAX, |changes| changes.num_numbers());
        let taken = self.taken.as_ref().map_or(u64::MAX, |taken| taken.num_numbers());
        records.min(scores).min(changes).min(taken)
    }

    /// Returns a number above all record numbers that are in use, or that work in progress on the device may take.
    pub(crate) fn max_numbers(&self) -> u64 {
        self.num_numbers().min(self.numbers_for(0))
    }

    /// Returns a number above all record numbers that were in use when the device last reported.
    pub(crate) fn known_numbers(&self) -> u64 {
        let Released { base, count, fresh, .. } = self.reported.released;
        self.max_numbers().min(fresh + (self.reported.taken - base).saturating_sub(count))
    }

    /// Returns the maximum number of record numbers, record 0 included, after `more` keys have been inserted.
    pub(super) fn numbers_for(&self, more: u64) -> u64 {
        let Released { base, count, fresh, .. } = self.reported.released;
        fresh + (self.max_taken + more - base).saturating_sub(count)
    }

    /// Gets memory for this many record numbers, and with `spare` for some more.
    pub(super) fn reserve_numbers(&mut self, numbers: u64, spare: bool) -> Result<()> {
        if numbers > u64::from(u32::MAX) {
            return Err(Error::Device(format!(
                "a table on a GPU has at most {} records. Received: room for {numbers}",
                u32::MAX
            )));
        }
        if let Some(evictor) = &mut self.evictor {
            evictor.reserve_numbers(&self.device, numbers as usize, spare)?;
        }
        if let Some(changes) = &mut self.changes {
            changes.reserve_numbers(numbers as usize, spare)?;
        }
        if let Some(taken) = &mut self.taken {
            taken.reserve_numbers(numbers as usize, spare)?;
        }
        self.arena.grow(numbers as usize * 16 * self.layout.stride, spare)
    }

    /// Returns whether this many new keys certainly fit into index and memory as they are.
    pub(crate) fn has_room(&self, new_keys: u64) -> bool {
        let rows = self.max_rows + new_keys;
        rows <= self.index.capacity() as u64 && self.numbers_for(new_keys) <= self.num_numbers()
    }

    /// Returns the maximum number of new keys of a call with this many ids.
    pub(crate) fn max_new(&self, ids: u64) -> u64 {
        let rows = self.max_rows;
        ids.min(self.config.vocabulary_size.unwrap_or(u64::MAX).max(rows) - rows)
    }

    /// Returns whether this many new keys might exceed the maximum capacity.
    pub(crate) fn may_refuse(&self, new_keys: u64) -> bool {
        self.max_rows + new_keys > self.config.capacity()
    }

    /// Returns whether a call with this many ids may insert first, and then have the device remove as many rows as are too many. For a while there
    /// must be memory for both. The host does not learn how many rows may go, so there must be enough for sure.
    pub(crate) fn may_exceed(&self, ids: u64) -> bool {
        let capacity = self.config.capacity();
        self.config.eviction.is_some()
            // Otherwise rows would go even if no key is new.
            && self.rows() <= capacity
            && ids <= capacity / 2 + SPARE_NUMBERS as u64
            && ids + self.max_used() <= capacity
    }

    /// Returns the number of new keys that the maximum capacity certainly allows; the largest number without a maximum.
    pub(crate) fn room_left(&self) -> u64 {
        self.config.max_capacity.map_or(u64::MAX, |capacity| capacity.saturating_sub(self.max_rows))
    }

    /// Raises the upper bounds of taken numbers and of rows for a call that inserts the missing keys of this many ids.
    pub(crate) fn expect(&mut self, ids: u64) {
        let new = self.max_new(ids);
        self.max_taken += new;
        // Rows beyond the capacity are gone at the end of the call.
        self.max_rows = (self.max_rows + new).min(self.config.capacity().max(self.max_rows));
    }

    /// Returns the maximum number of new keys of this call and two more calls with this many ids, as far as the capacity allows.
    /// With room for them, a call need not wait for the number of keys that the calls before it have inserted. If there was no
    /// memory for that, returns the number for this call alone.
    pub(crate) fn max_new_soon(&self, ids: u64) -> u64 {
        if self.is_short {
            return self.max_new(ids);
        }
        let rows = self.max_rows;
        self.max_new(3 * ids).min(self.config.capacity().max(rows) - rows).max(self.max_new(ids))
    }

    /// Makes room for `new_keys` new keys, on the stream. The device must be idle. If there is memory, the index gets room for the `soon` keys
    /// of later calls too. Their records get memory in `reserve_soon`, unless enough numbers of removed rows can be given out again.
    pub(crate) fn make_room(&mut self, new_keys: u64, soon: u64, stream: Stream) -> Result<()> {
        (self.is_short, self.numbers_soon) = (false, 0);
        let is_short = self.numbers_for(new_keys.max(soon)) > self.num_numbers();
        if is_short && self.reusable.len() as u64 >= self.num_numbers() / RECLAIMED {
            self.reclaim()?;
        }
        let rows = self.max_rows;
        let keys = self.index.capacity() as u64;
        if rows + soon > keys {
            let most = self.config.capacity().saturating_add(soon);
            let larger = (rows + soon).max((2 * keys).min(most)) as usize;
            match self.index.grown(larger, rows as usize, stream) {
                Ok(grown) => (self.index, self.has_moved) = (grown, true),
                Err(_) => {
                    self.is_short = true;
                    if rows + new_keys > keys {
                        self.index = self.index.grown((rows + new_keys) as usize, rows as usize, stream)?;
                        self.has_moved = true;
                    }
                }
            }
        }
        let is_later = soon > new_keys && !self.is_short;
        if let Err(error) = self.reserve_numbers(self.numbers_for(new_keys), !is_later) {
            self.reclaim()?;
            if self.numbers_for(new_keys) > self.num_numbers() {
                return Err(error);
            }
        }
        if is_later {
            self.numbers_soon = self.numbers_for(soon);
        }
        Ok(())
    }

    /// Gets memory for the records of later calls, after `make_room`. It is called when the launches of the call are enqueued,
    /// because it takes 0.12 ms for each GB (H200), for which the device need not wait.
    pub(crate) fn reserve_soon(&mut self) {
        let numbers = std::mem::take(&mut self.numbers_soon);
        self.is_short |= self.reserve_numbers(numbers, true).is_err();
    }

    /// Gets memory for the records of this many more rows. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough memory. Nothing has changed then.
    pub fn reserve(&mut self, rows: u64) -> Result<()> {
        self.wait()?;
        self.reserve_numbers(self.numbers_for(rows), false)
    }

    /// Number of bytes of the index for each of its slots. The index grows when a fraction `LOAD` of the slots is used.
    pub fn bytes_a_slot(&self) -> f64 {
        self.index.num_bytes() as f64 * self.index.load() / self.index.capacity() as f64
    }

    /// Checks that this many new keys fit when `removable` rows have gone.
    ///
    /// # Errors
    /// [`Error::TableFull`] if they do not, and the check mode is `Raise`.
    pub(crate) fn check_capacity(&self, new_keys: u64, removable: u64) -> Result<()> {
        let (len, capacity) = (self.rows(), self.config.capacity());
        let refused = (len + new_keys).saturating_sub(capacity.saturating_add(removable)).min(new_keys);
        if refused == 0 || self.config.check_mode != CheckMode::Raise {
            return Ok(());
        }
        Err(Error::TableFull { table: self.config.name.clone(), refused, len, capacity })
    }
}
