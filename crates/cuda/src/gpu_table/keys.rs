//! Finding and inserting keys.

#![allow(unsafe_code)]

use std::collections::HashSet;

use sok_core::contract::table::Outcomes;
use sok_core::error::{Error, Result};
use sok_core::key::Key;

use super::sweep::Chosen;
use super::uses::UsedRecords;
use super::{GpuTable, Room, WAITING, no_place};
use crate::abi::{FIND_THREADS, NEW, Overflow, TABLE_THREADS};
use crate::device::{Stream, launch, launch_next};
use crate::kernels::TABLE;

/// Maximum number of times that the index grows for keys which find no slot.
const INDEX_TRIES: usize = 8;

impl Room {
    /// The records that the last `look_up` of this many keys has found.
    pub(crate) fn used(&self, num_keys: usize) -> UsedRecords {
        UsedRecords { address: self.records.address(), count: num_keys }
    }
}

/// What a lookup of keys does beside finding their records.
#[derive(Clone, Copy, PartialEq)]
enum LookUp {
    Find,
    /// Keys without a record get one.
    Insert,
    /// The same. In a table whose scores are steps, the score of each record becomes the step in progress.
    InsertAndScore,
}

impl GpuTable {
    /// Returns the record numbers of keys; 0 for a key without a record. With `insert`, keys without a record get one, and its
    /// number is returned with the `NEW` bit. `NEW` alone: the index has no slot for the key.
    pub(super) fn look_up(&self, room: &Room, keys: &[Key], insert: bool) -> Result<Vec<u32>> {
        room.keys.write(0, keys)?;
        room.overflow.write(0, &[0])?;
        let (at, records, overflow) = (room.keys.address(), room.records.address(), room.overflow.address());
        let look_up = if insert { LookUp::Insert } else { LookUp::Find };
        // SAFETY: The room has memory for all keys, and the call below waits.
        unsafe { self.launch_look_up(at, records, keys.len(), look_up, overflow, WAITING) }?;
        self.device.synchronize()?;
        room.records.read(0, keys.len())
    }

    /// Enqueues a lookup of `n` keys. `keys`: `(n,)` u64. `records`: takes the record numbers, `(n,)` u32, as `look_up` returns
    /// them. `overflow`: a word with the value 0, and room for a word for each key.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    unsafe fn launch_look_up(
        &self,
        keys: u64,
        records: u64,
        n: usize,
        how: LookUp,
        overflow: u64,
        stream: Stream,
    ) -> Result<()> {
        let [look_up, settle] = self.device.kernels(&TABLE, ["look_up", "settle_keys"])?;
        let (table, count) = (self.alone(), n as u32);
        let inserts = u32::from(how != LookUp::Find);
        let scores = u32::from(how == LookUp::InsertAndScore);
        let overflow = Overflow { count: overflow, ids: overflow + 4 };
        let blocks = n.div_ceil(FIND_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe {
            launch!(
                look_up,
                stream,
                blocks,
                FIND_THREADS,
                table,
                keys,
                records,
                count,
                inserts,
                scores,
                overflow
            )
        }?;
        if inserts == 1 {
            let blocks = 4 * self.device.multiprocessors;
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe {
                launch_next!(settle, stream, blocks, TABLE_THREADS, table, keys, records, scores, overflow)
            }?;
        }
        Ok(())
    }

    /// Enqueues the insertion of keys without a record. `keys`, `records` and `overflow` are as for `launch_look_up`. All keys must
    /// be within the vocabulary. If the table has an eviction policy, a use of each record is counted, and rows beyond the maximum capacity are
    /// removed. Waits only if memory must grow.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough memory, [`Error::Argument`] if there may be more keys than a full table can make room for. No
    /// key has changed then.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    pub unsafe fn insert_on_device(
        &mut self,
        keys: u64,
        records: u64,
        n: usize,
        overflow: u64,
        stream: Stream,
    ) -> Result<()> {
        let ids = n as u64;
        let fills = |table: &GpuTable| table.may_refuse(table.max_new(ids));
        let removed = self.most_swept(ids);
        let is_tight = |table: &GpuTable| {
            let lacks_ring = fills(table) && !(table.may_exceed(ids) && table.ring_has_room(removed));
            !table.has_room(table.max_new(ids)) || lacks_ring
        };
        let keeps = self.config.keeps_removed() || self.config.out_of_vocabulary_key.is_some();
        if is_tight(self) || (keeps && fills(self)) {
            self.device.synchronize()?;
            self.learn()?;
            if fills(self) && (keeps || !self.may_exceed(ids)) {
                return Err(Error::argument(
                    "a full table must have an eviction policy that keeps no rows, no out-of-vocabulary key, and room for twice as many keys",
                ));
            }
            if !self.has_room(self.max_new(ids)) {
                self.make_room(self.max_new(ids), self.max_new_soon(ids), stream)?;
            }
            if fills(self) && !self.ring_has_room(removed) {
                self.make_room_in_ring(removed)?;
            }
        }
        let exceeds = fills(self);
        // While keys are inserted, a thread may meet a record whose first score and change are not written yet.
        let counts_later = self.counts_ids() || self.changes.is_some();
        let how = if counts_later { LookUp::Insert } else { LookUp::InsertAndScore };
        self.expect(ids);
        let used = UsedRecords { address: records, count: n };
        let planned = if exceeds { self.plan_sweep(0, ids, 0, used, None, None)? } else { None };
        let (device, planned) = (self.device.clone(), planned.as_slice());
        if let Some(evictor) = self.evictor.as_mut().filter(|_| exceeds) {
            evictor.sweep_memory.prepare(&device, planned, stream)?;
        }
        // SAFETY: The caller guarantees it.
        unsafe { self.launch_look_up(keys, records, n, how, overflow, stream) }?;
        if let Some(evictor) = self.evictor.as_mut().filter(|_| exceeds) {
            evictor.sweep_memory.sweep(&device, planned, |_| (), stream)?;
        }
        planned.iter().for_each(|planned| planned.note_in(self));
        if counts_later {
            // SAFETY: The caller guarantees it.
            unsafe { self.count_records(records, 0, n, stream) }?;
        }
        self.reserve_soon();
        Ok(())
    }

    pub(super) fn check_keys(&self, keys: &[Key]) -> Result<()> {
        match keys.iter().find(|&&key| !self.config.is_in_vocabulary(key)) {
            None => Ok(()),
            Some(&key) => Err(Error::OutOfVocabulary {
                table: self.config.name.clone(),
                feature: None,
                id: key as i64,
                last: self.config.vocabulary_size.unwrap_or_default().wrapping_sub(1),
            }),
        }
    }

    /// Returns the distinct keys without a record, in the order of their first positions. The device must be idle.
    pub(crate) fn absent(&self, room: &Room, keys: &[Key]) -> Result<Vec<Key>> {
        let records = self.look_up(room, keys, false)?;
        let mut seen = HashSet::new();
        let absent = keys.iter().zip(records).filter(|(_, record)| *record == 0).map(|(key, _)| *key);
        Ok(absent.filter(|key| seen.insert(*key)).collect())
    }

    /// Removes the rows that `sweep_for` has chosen for new keys, and inserts as many of the keys as fit, in their order. The device must be
    /// idle.
    pub(crate) fn admit(
        &mut self,
        room: &Room,
        new_keys: &[Key],
        chosen: Option<Chosen>,
    ) -> Result<Outcomes> {
        let evicted = self.end_sweep(chosen)?;
        let left = self.config.capacity().saturating_sub(self.rows()) as usize;
        let admitted = new_keys.len().min(left);
        self.insert(room, &new_keys[..admitted])?;
        self.forget_sights(&new_keys[..admitted])?;
        let refused = (new_keys.len() - admitted) as u64;
        Ok(Outcomes { inserted: admitted as u64, refused, evicted, ..Outcomes::default() })
    }

    /// Returns the record number of each key. Keys without a record get one; the table must have room for them. The index grows if keys find no
    /// slot. Also returns how many keys were new. The device must be idle.
    pub(super) fn insert(&mut self, room: &Room, keys: &[Key]) -> Result<(Vec<u32>, u64)> {
        if keys.is_empty() {
            return Ok((Vec::new(), 0));
        }
        let most = self.max_new(keys.len() as u64);
        self.make_room(most, most, WAITING)?;
        let mut inserted = 0;
        for _ in 0..INDEX_TRIES {
            let mut records = self.look_up(room, keys, true)?;
            inserted += self.count_inserted()?;
            if !records.contains(&NEW) {
                records.iter_mut().for_each(|record| *record &= !NEW);
                return Ok((records, inserted));
            }
            let larger = self.index.capacity() * 5 / 4;
            self.index = self.index.grown(larger, self.rows() as usize, WAITING)?;
            self.has_moved = true;
        }
        Err(no_place(&self.config.name))
    }

    /// Returns the record number of each key, 0 if it has none. With `insert`, keys without a record get one as far as they fit.
    /// The device must be idle.
    pub(super) fn locate(&mut self, room: &Room, keys: &[Key], insert: bool) -> Result<(Vec<u32>, Outcomes)> {
        self.check_keys(keys)?;
        let mut outcomes = Outcomes::default();
        let most = self.max_new(keys.len() as u64);
        // Otherwise it matters how many keys are new.
        if insert && self.has_room(most) && !self.may_refuse(most) {
            let (records, inserted) = self.insert(room, keys)?;
            self.forget_sights(keys)?;
            outcomes.inserted = inserted;
            outcomes.hit = num_distinct(&records, inserted) - inserted;
            return Ok((records, outcomes));
        }
        let new = self.absent(room, keys)?;
        if insert {
            let num_new = new.len() as u64;
            let chosen = self.sweep_for(num_new, room.used(keys.len()))?;
            let chosen = self.check_sweep(num_new, chosen)?;
            outcomes = self.admit(room, &new, chosen)?;
        } else {
            outcomes.refused = new.len() as u64;
        }
        let records = self.look_up(room, keys, false)?;
        outcomes.hit = num_distinct(&records, outcomes.inserted) - outcomes.inserted;
        Ok((records, outcomes))
    }
}

/// Returns the number of distinct records, without record 0. `new`: how many of them are new; a new one comes at least once.
fn num_distinct(records: &[u32], new: u64) -> u64 {
    if new == records.len() as u64 {
        return new;
    }
    records.iter().filter(|record| **record != 0).collect::<HashSet<_>>().len() as u64
}
