//! The numbers of removed rows, which are given out again, and the keys that sweeps have removed, in rings on the device.

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
use crate::abi::{NO_SWEEP, RELEASED, Released, SWEEP_NOTES, Sweep, SweepNote};
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
        if self.ring_has_room(most) {
            return Ok(());
        }
        let len = self.num_released() + self.reusable.len() as u64;
        let places = (len + 4 * most).max(self.config.capacity().min(REMEMBERED)).max(MIN_PLACES);
        let places = places.next_power_of_two() as usize;
        let ring = Ring::for_sweeps(&self.device.context, places, self.changes.is_some())?;
        self.release_into(Some(ring))
    }

    /// Fills in the number of a sweep, and what it needs of the ring. There must be places for the rows that it removes.
    pub(super) fn number_sweep(&self, sweep: &mut Sweep) {
        let Some(departed) = &self.ring.departed else { return };
        let number = departed.next;
        let usable = if self.newest_lookup == 0 { Some(number) } else { departed.usable };
        // Without the note of that sweep, the numbers have to wait for another one.
        let has_note = |usable: &u64| number - usable < SWEEP_NOTES as u64;
        (sweep.number, sweep.usable) = (number, usable.filter(has_note).unwrap_or(NO_SWEEP));
        (sweep.released, sweep.ring_mask) = (self.ring.numbers.address(), self.ring.mask());
        (sweep.departed_keys, sweep.notes) = (departed.keys.address(), departed.notes.address());
        if let (Some(changes), Some(words)) = (&self.changes, &departed.changes) {
            (sweep.changes, sweep.departed_changes) = (changes.address(), words.address());
        }
    }

    /// Takes over that a sweep was enqueued.
    pub(crate) fn note_sweep(&mut self, sweep: &Sweep) {
        let Some(departed) = &mut self.ring.departed else { return };
        departed.next = sweep.number + 1;
        departed.unreported += sweep.most;
        match self.newest_lookup {
            0 => departed.usable = Some(sweep.number),
            newest => departed.waiting.push_back((sweep.number, newest)),
        }
    }

    /// Returns whether sweeps were enqueued of which the host does not know what they have removed.
    pub(crate) fn has_unread_sweeps(&self) -> bool {
        self.ring.departed.as_ref().is_some_and(|departed| departed.first_unread < departed.next)
    }

    /// Returns the sweeps that the host has not read, the place of the first key that is still there, and the keys from it on. The sweeps must have
    /// completed.
    fn read_sweeps(&self) -> Result<(Vec<SweepNote>, u64, Vec<Key>)> {
        let Some(departed) = &self.ring.departed else { return Ok(Default::default()) };
        let (first, next) = (departed.first_unread, departed.next);
        let notes = read_places(&departed.notes, SWEEP_NOTES as u64 - 1, first, next)?;
        let end = notes.last().map_or(departed.unread_from, |note| note.end);
        // Nobody needs all of them if the oldest may be overwritten.
        let start = departed.unread_from.max(end.saturating_sub(self.ring.places()));
        Ok((notes, start, read_places(&departed.keys, self.ring.mask(), start, end)?))
    }

    /// Takes over which rows sweeps have removed. They must have completed.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device), [`Error::Memory`](sok_core::Error::Memory). The rows are gone nevertheless.
    pub(crate) fn take_departures(&mut self) -> Result<()> {
        let (notes, start, keys) = self.read_sweeps()?;
        let Some(&SweepNote { end, .. }) = notes.last() else { return Ok(()) };
        let mask = self.ring.mask();
        let Some(departed) = &mut self.ring.departed else { return Ok(()) };
        (departed.first_unread, departed.unread_from) = (departed.next, end);
        if keys.is_empty() {
            return Ok(());
        }
        let words = match (&self.changes, &departed.changes) {
            (Some(_), Some(words)) => read_places(words, mask, start, end)?,
            // An increment must have all keys whose words are not known. No epoch has the word 0.
            (Some(_), None) => vec![0; keys.len()],
            (None, _) => Vec::new(),
        };
        // If not all keys are known that went, no increment can have them.
        self.reserve_removed(keys.len()).inspect_err(|_| self.forget_changes())?;
        self.note_removed(keys.iter().copied().zip(words));
        if self.evictor.as_ref().is_some_and(|evictor| evictor.policy.keeps_evicted) {
            let records = self.ring.read(start, end)?;
            self.keep_departed(&keys, &records)?;
        }
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        let mut at = start;
        for note in notes.into_iter().filter(|note| note.end > start) {
            let some = &keys[(at - start) as usize..(note.end - start) as usize];
            evictor.departures.remember(Reason::Evicted, note.step, some.to_vec())?;
            at = note.end;
        }
        evictor.departures.trim();
        Ok(())
    }

    /// Says why a key without a row has none. The device must be idle.
    pub(super) fn explain_absent(&self, key: Key) -> Result<Explanation> {
        let Some(evictor) = &self.evictor else { return Ok(Explanation::Absent) };
        let known = evictor.departures.explain(key);
        let (notes, start, keys) = self.read_sweeps()?;
        let Some(place) = keys.iter().rposition(|&departed| departed == key) else { return Ok(known) };
        let of_key = notes.iter().find(|note| note.end > start + place as u64);
        let evicted = of_key.map_or(0, |note| note.step);
        // A row that has expired in the same step went at its end.
        Ok(match known {
            Explanation::Expired { step } if step >= evicted => known,
            _ => Explanation::Evicted { step: evicted },
        })
    }

    /// Keeps the rows that have gone until they are taken. Their numbers must not have been given out yet.
    fn keep_departed(&mut self, keys: &[Key], records: &[u32]) -> Result<()> {
        let values = self.read_records(self.layout.row(), records)?;
        let uses = self.read_uses(records)?;
        let ranks = uses.iter().zip(keys).map(|(used, &key)| Rank { score: used.score, key });
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
    fn release_into(&mut self, ring: Option<Ring>) -> Result<()> {
        let (taken, Released { base, first, count, end, fresh }) =
            (self.reported.taken, self.reported.released);
        let of_ring = (taken - base).min(count);
        let mut numbers = self.ring.read(first + of_ring, end)?;
        let waiting = numbers.split_off((count - of_ring) as usize);
        if !waiting.is_empty() {
            self.retired.push((self.newest_lookup, waiting));
        }
        numbers.append(&mut self.reusable);
        if let Some(ring) = ring {
            self.ring = ring;
        }
        self.ring.restart(&numbers)?;
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
