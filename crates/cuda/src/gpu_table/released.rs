//! The numbers of removed rows, which are given out again, and the keys that sweeps and expiries have removed, in rings on the device.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use sok_core::contract::departures::Reason;
use sok_core::contract::table::Explanation;
use sok_core::error::Result;
use sok_core::key::Key;
use sok_core::policy::sweep::Rank;

use super::GpuTable;
use crate::abi::{NO_SWEEP, RELEASED, Released, Removal, SWEEP_NOTES, SweepNote, UnlistedRow};
use crate::memory::{Buffer, Plain, words};

/// Minimum number of places of the ring of a table that sweeps.
const MIN_PLACES: u64 = 1 << 12;
/// Number of removed keys that are remembered.
const REMEMBERED: u64 = 1 << 20;

/// The ring of a table.
pub(super) struct Ring {
    numbers: Buffer<u32>,
    /// Of a table that sweeps.
    departed: Option<Departed>,
}

/// What sweeps write beside the numbers.
struct Departed {
    /// By place in the ring: the key of the row.
    keys: Buffer<Key>,
    /// By place in the ring: the word of the row's changes, if the table notes changes.
    changes: Option<Buffer<u32>>,
    /// By number of the sweep.
    notes: Buffer<SweepNote>,
    /// Number of the next sweep.
    next: u64,
    /// Number of the first sweep of which the host has not read the keys.
    first_unread: u64,
    /// Why rows went: of each sweep that the host has not read.
    reasons: VecDeque<Reason>,
    /// Place of its first key.
    unread_from: u64,
    /// How many rows the sweeps have removed at most whose ends are not known.
    unreported: u64,
    /// The part of these of which the next report tells.
    told_by_report: u64,
    /// Sweeps whose numbers may not be given out yet, with the newest lookup that may refer to them.
    waiting: VecDeque<(u64, u64)>,
    /// The newest sweep whose numbers may be given out.
    usable: Option<u64>,
}

/// Rows that a sweep has removed.
struct Removed {
    reason: Reason,
    /// The step in progress.
    step: u64,
    keys: Vec<Key>,
    /// Numbers of their records, if the table keeps removed rows; otherwise empty.
    records: Vec<u32>,
    /// Words of their changes, if the table notes changes; otherwise empty.
    changes: Vec<u32>,
}

/// Adds expired rows for which the ring had no room.
fn add_unlisted(all: &mut Vec<Removed>, unlisted: &[UnlistedRow]) {
    for &UnlistedRow { key, step, record, change } in unlisted {
        let of_step = |removed: &Removed| removed.reason == Reason::Expired && removed.step == step;
        let place = all.iter().position(of_step).unwrap_or_else(|| {
            let none =
                Removed { reason: Reason::Expired, step, keys: vec![], records: vec![], changes: vec![] };
            all.push(none);
            all.len() - 1
        });
        all[place].keys.push(key);
        all[place].records.push(record);
        all[place].changes.push(change);
    }
}

impl Ring {
    /// A ring with so many places.
    pub fn new(context: &Arc<CudaContext>, places: usize) -> Result<Ring> {
        Ok(Ring { numbers: Buffer::uninit(context, places.max(1))?, departed: None })
    }

    /// A ring for sweeps, with so many places, a power of two. `notes_changes`: whether the table notes changes.
    fn for_sweeps(context: &Arc<CudaContext>, places: usize, notes_changes: bool) -> Result<Ring> {
        let departed = Departed {
            keys: Buffer::uninit(context, places)?,
            changes: notes_changes.then(|| Buffer::uninit(context, places)).transpose()?,
            notes: Buffer::new(context, SWEEP_NOTES)?,
            next: 0,
            first_unread: 0,
            reasons: VecDeque::new(),
            unread_from: 0,
            unreported: 0,
            told_by_report: 0,
            waiting: VecDeque::new(),
            usable: None,
        };
        Ok(Ring { numbers: Buffer::uninit(context, places)?, departed: Some(departed) })
    }

    pub fn address(&self) -> u64 {
        self.numbers.address()
    }

    fn places(&self) -> u64 {
        self.numbers.len() as u64
    }

    /// The bits of a place that are its place in the ring.
    pub fn mask(&self) -> u64 {
        if self.departed.is_some() { self.places() - 1 } else { u64::MAX }
    }

    pub fn num_bytes(&self) -> usize {
        let departed = self.departed.as_ref().map_or(0, |departed| {
            let changes = departed.changes.as_ref().map_or(0, Buffer::num_bytes);
            departed.keys.num_bytes() + changes + departed.notes.num_bytes()
        });
        self.numbers.num_bytes() + departed
    }

    /// Notes that a report was enqueued, which tells of all sweeps so far.
    pub fn expect_report(&mut self) {
        if let Some(departed) = &mut self.departed {
            departed.told_by_report = departed.unreported;
        }
    }

    /// Takes over that the report has come.
    pub fn learn_from_report(&mut self) {
        if let Some(departed) = &mut self.departed {
            departed.unreported -= std::mem::take(&mut departed.told_by_report);
        }
    }

    /// Takes over that all counts are known.
    pub fn learn(&mut self) {
        if let Some(departed) = &mut self.departed {
            (departed.unreported, departed.told_by_report) = (0, 0);
        }
    }

    /// Lets the numbers be given out that sweeps have removed before the lookup `oldest`, when no older one can refer to them.
    pub fn forget_lookups(&mut self, oldest: u64) {
        let Some(departed) = &mut self.departed else { return };
        while let Some((sweep, _)) = departed.waiting.pop_front_if(|(_, newest)| *newest < oldest) {
            departed.usable = Some(sweep);
        }
    }

    /// Writes these numbers to the first places. All keys of sweeps were read.
    fn restart(&mut self, numbers: &[u32]) -> Result<()> {
        self.numbers.write(0, numbers)?;
        if let Some(departed) = &mut self.departed {
            (departed.unread_from, departed.usable) = (numbers.len() as u64, None);
            departed.waiting.clear();
        }
        Ok(())
    }

    /// Reads the numbers from place `from` to place `to`.
    fn read(&self, from: u64, to: u64) -> Result<Vec<u32>> {
        read_places(&self.numbers, self.mask(), from, to)
    }
}

/// Reads the values of a ring from place `from` to place `to`.
fn read_places<T: Plain>(ring: &Buffer<T>, mask: u64, from: u64, to: u64) -> Result<Vec<T>> {
    let (len, start) = ((to - from) as usize, (from & mask) as usize);
    let before_end = len.min(ring.len() - start);
    let mut values = ring.read(start, before_end)?;
    if before_end < len {
        values.extend(ring.read(0, len - before_end)?);
    }
    Ok(values)
}

impl GpuTable {
    /// Returns how many numbers are in the ring, as far as is known.
    fn num_released(&self) -> u64 {
        let Released { base, first, count, end, .. } = self.reported.released;
        end - first - (self.reported.taken - base).min(count)
    }

    /// Returns whether the ring has places for the rows of a sweep, of which there are up to `most`.
    pub(crate) fn ring_has_room(&self, most: u64) -> bool {
        let Some(departed) = &self.ring.departed else { return false };
        let (places, more) = (self.ring.places(), departed.unreported + most);
        let unread = self.reported.released.end.saturating_sub(departed.unread_from) + more;
        // Otherwise nobody needs the oldest ones.
        let reads_all = self.changes.is_some() || places < REMEMBERED + more;
        self.num_released() + more <= places
            && (!reads_all || unread <= places)
            && departed.next - departed.first_unread < SWEEP_NOTES as u64
            && (self.changes.is_none() || departed.changes.is_some())
    }

    /// Gets places in the ring for the rows of a sweep, of which there are up to `most`. The device must be idle, and its counts known.
    pub(crate) fn make_room_in_ring(&mut self, most: u64) -> Result<()> {
        self.take_departures()?;
        match self.larger_ring(most)? {
            Some(ring) => self.release_into(Some(ring)),
            None => Ok(()),
        }
    }

    /// Returns a ring with room for a sweep, unless the table has one. The host has read what sweeps have removed.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory.
    pub(super) fn larger_ring(&self, most: u64) -> Result<Option<Ring>> {
        // The next sweep may come before the report of this one.
        if self.ring_has_room(2 * most) {
            return Ok(None);
        }
        let len = self.num_released() + self.reusable.len() as u64;
        let places = (len + 4 * most).max(self.max_numbers().min(REMEMBERED)).max(MIN_PLACES);
        let places = places.next_power_of_two() as usize;
        Ring::for_sweeps(&self.device.context, places, self.changes.is_some()).map(Some)
    }

    /// Returns what the next sweep writes about the rows that it removes. There must be places for them in the ring.
    pub(super) fn next_removal(&self) -> Removal {
        let Some(departed) = &self.ring.departed else { return Removal::default() };
        let sweep = departed.next;
        let usable = if self.newest_lookup == 0 { Some(sweep) } else { departed.usable };
        // Without the note of that sweep, the numbers have to wait for another one.
        let has_note = |usable: &u64| sweep - usable < SWEEP_NOTES as u64;
        Removal {
            numbers: self.ring.address(),
            keys: departed.keys.address(),
            // The ring of a table that has noted changes before still has room for them.
            changes: departed.changes.as_ref().filter(|_| self.changes.is_some()).map_or(0, Buffer::address),
            mask: self.ring.mask(),
            notes: departed.notes.address(),
            sweep,
            usable: usable.filter(has_note).unwrap_or(NO_SWEEP),
        }
    }

    /// Takes over that a sweep was enqueued. `sweep`: its number. `most`: how many rows it removes at most.
    pub(super) fn note_sweep(&mut self, reason: Reason, sweep: u64, most: u64) {
        let Some(departed) = &mut self.ring.departed else { return };
        departed.next = sweep + 1;
        departed.reasons.push_back(reason);
        departed.unreported += most;
        match self.newest_lookup {
            0 => departed.usable = Some(sweep),
            newest => departed.waiting.push_back((sweep, newest)),
        }
    }

    /// Returns whether sweeps were enqueued of which the host does not know what they have removed.
    pub(crate) fn has_unread_sweeps(&self) -> bool {
        self.ring.departed.as_ref().is_some_and(|departed| departed.first_unread < departed.next)
    }

    /// Returns whether there are expired rows that the host has not read, and must read before their numbers are given out or used up.
    pub(crate) fn has_unread_expiry(&self) -> bool {
        let reasons = || self.ring.departed.iter().flat_map(|departed| &departed.reasons);
        self.reported.unlisted > 0
            || self.config.keeps_expired() && reasons().any(|&reason| reason == Reason::Expired)
    }

    /// Returns what sweeps have removed that the host has not read, in the order of the sweeps, and the place of the next row. They must have
    /// completed.
    fn read_removed(&self) -> Result<(Vec<Removed>, u64)> {
        let Some(departed) = &self.ring.departed else { return Ok((Vec::new(), 0)) };
        let mask = self.ring.mask();
        let notes =
            read_places(&departed.notes, SWEEP_NOTES as u64 - 1, departed.first_unread, departed.next)?;
        let end = notes.last().map_or(departed.unread_from, |note| note.end);
        let keeps = self.config.keeps_removed();
        // Nobody needs all of them if the oldest may be overwritten.
        let needed = if keeps || self.changes.is_some() { u64::MAX } else { REMEMBERED };
        let mut at = departed.unread_from.max(end.saturating_sub(needed.min(self.ring.places())));
        let keys = read_places(&departed.keys, mask, at, end)?;
        let records = if keeps { self.ring.read(at, end)? } else { Vec::new() };
        let changes = match (&self.changes, &departed.changes) {
            (Some(_), Some(words)) => read_places(words, mask, at, end)?,
            // An increment must have all keys whose words are not known. No epoch has the word 0.
            (Some(_), None) => vec![0; keys.len()],
            (None, _) => Vec::new(),
        };
        let start = at;
        let mut all = Vec::new();
        for (&reason, note) in departed.reasons.iter().zip(notes).filter(|(_, note)| note.end > start) {
            let places = (at - start) as usize..(note.end - start) as usize;
            let of = |all: &[u32]| all.get(places.clone()).map_or(Vec::new(), <[u32]>::to_vec);
            let (records, changes) = (of(&records), of(&changes));
            all.push(Removed { reason, step: note.step, keys: keys[places].to_vec(), records, changes });
            at = note.end;
        }
        Ok((all, end))
    }

    /// Takes over which rows sweeps have removed. They must have completed.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory). The rows are gone nevertheless.
    pub(crate) fn take_departures(&mut self) -> Result<()> {
        let (all, end) = self.read_removed()?;
        if let Some(departed) = &mut self.ring.departed {
            (departed.first_unread, departed.unread_from) = (departed.next, end);
            departed.reasons.clear();
        }
        // If not all keys are known that went, no increment can have them.
        self.take_removed(all).inspect_err(|_| self.forget_changes())
    }

    /// Records which rows were removed: `all`, and expired rows for which the ring had no room.
    fn take_removed(&mut self, mut all: Vec<Removed>) -> Result<()> {
        let unlisted = self.read_unlisted(self.reported.unlisted, true)?;
        self.reported.unlisted = 0;
        self.retire(unlisted.iter().map(|row| row.record));
        add_unlisted(&mut all, &unlisted);
        self.reserve_removed(all.iter().map(|removed| removed.keys.len()).sum())?;
        for removed in &all {
            self.note_removed(removed.keys.iter().copied().zip(removed.changes.iter().copied()));
        }
        for removed in all {
            self.keep_removed(&removed)?;
            let Some(evictor) = &mut self.evictor else { continue };
            evictor.departures.remember(removed.reason, removed.step, removed.keys)?;
        }
        self.evictor.iter_mut().for_each(|evictor| evictor.departures.trim());
        Ok(())
    }

    /// Says why a key without a row has none. The device must be idle.
    pub(super) fn explain_absent(&self, key: Key) -> Result<Explanation> {
        let Some(evictor) = &self.evictor else { return Ok(Explanation::Absent) };
        let mut all = self.read_removed()?.0;
        add_unlisted(&mut all, &self.read_unlisted(self.counts()?.unlisted, false)?);
        let of_key = all.iter().filter(|removed| removed.keys.contains(&key));
        let newest = of_key.max_by_key(|removed| (removed.step, removed.reason));
        Ok(newest
            .map_or_else(|| evictor.departures.explain(key), |&Removed { reason, step, .. }| reason.at(step)))
    }

    /// Keeps rows that have gone until they are taken, if the table does that. Their numbers must not have been given out yet.
    fn keep_removed(&mut self, removed: &Removed) -> Result<()> {
        let keeps = match removed.reason {
            Reason::Evicted => self.config.eviction.is_some_and(|policy| policy.keeps_evicted),
            Reason::Expired => self.config.keeps_expired(),
        };
        if !keeps {
            return Ok(());
        }
        let values = self.read_records(self.layout.row(), &removed.records)?;
        let uses = self.read_uses(&removed.records)?;
        let ranks = uses.iter().zip(&removed.keys).map(|(used, &key)| Rank { score: used.score, key });
        let dim = self.config.dim;
        let mut rows: Vec<(Rank, &[f32])> = ranks.zip(values.chunks_exact(dim)).collect();
        rows.sort_unstable_by_key(|(rank, _)| *rank);
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        evictor.departures.keep(rows.into_iter(), dim, |from, to| to.copy_from_slice(from))
    }

    /// Lets the numbers of removed rows that no lookup refers to be given out. The device must be idle, and its counts known.
    pub(super) fn release(&mut self) -> Result<()> {
        self.take_departures()?;
        let len = self.num_released() + self.reusable.len() as u64;
        let context = &self.device.context;
        let ring = match &self.ring.departed {
            _ if len <= self.ring.places() => None,
            None => Some(Ring::new(context, (len + len / 2) as usize)?),
            Some(_) => {
                let places = (2 * len).next_power_of_two() as usize;
                Some(Ring::for_sweeps(context, places, self.changes.is_some())?)
            }
        };
        self.release_into(ring)
    }

    /// As `release`, into a new ring, which has room for all numbers, or into the one that the table has.
    pub(super) fn release_into(&mut self, ring: Option<Ring>) -> Result<()> {
        let (taken, Released { base, first, count, end, fresh }) =
            (self.reported.taken, self.reported.released);
        let of_ring = (taken - base).min(count);
        let mut numbers = self.ring.read(first + of_ring, end)?;
        let waiting = numbers.split_off((count - of_ring) as usize);
        if !waiting.is_empty() {
            self.retired.push((self.newest_lookup, waiting));
        }
        numbers.append(&mut self.reusable);
        match ring {
            Some(mut ring) => {
                ring.restart(&numbers)?;
                self.ring = ring;
            }
            None => self.ring.restart(&numbers)?,
        }
        let len = numbers.len() as u64;
        let fresh = fresh + (taken - base - of_ring);
        self.reported.released = Released { base: taken, first: 0, count: len, end: len, fresh };
        self.has_moved = true;
        self.write_released()
    }

    /// Writes to the device which numbers may be given out. It must be idle.
    pub(super) fn write_released(&self) -> Result<()> {
        self.index.counters.write(RELEASED, words(&[self.reported.released]))
    }
}
