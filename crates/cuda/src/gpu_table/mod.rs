//! A table in device memory.

mod contract;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sok_core::error::{Error, Result};
use sok_core::initializer::Initializer;
use sok_core::key::Key;
use sok_core::optimizer::Update;
use sok_core::table::{CheckMode, Missing, OutOfVocabulary, Outcomes, TableConfig, TableStats};

use crate::device::{Device, Stream, launch, launch_next};
use crate::index::{Index, LOAD};
use crate::kernels::TABLE;
use crate::layout::{self, DISTINCT, DROPPED, FIND_THREADS, Homeless, NEW, Parts, TABLE_THREADS, TAKEN};
use crate::memory::{Arena, Buffer};
use crate::rule::RecordLayout;

/// The stream of operations that wait for their results: the device's default one.
const WAITING: Stream = Stream::DEFAULT;

/// Numbers that are copied to or from the device at once.
const PIECE: usize = 1 << 24;

/// Growths of an index that is to hold keys which find no place.
const INDEX_TRIES: usize = 8;

/// Record numbers taken; distinct keys and dropped gradients since the statistics were told.
type Counts = [u32; 3];

pub struct GpuTable {
    pub(crate) config: TableConfig,
    pub(crate) device: Arc<Device>,
    pub(crate) update: Option<Update>,
    pub(crate) layout: RecordLayout,
    index: Index,
    arena: Arena,
    /// Record numbers to give out again, then those from `fresh` on.
    released: Vec<u32>,
    released_on_device: Buffer<u32>,
    fresh: u32,
    /// Rows when no number had been taken.
    len_before: i64,
    /// No more record numbers are taken than this.
    pub(crate) most_taken: u64,
    /// Taken numbers that the statistics know of.
    counted: u32,
    /// There was no memory for keys of later calls.
    is_short: bool,
    /// Record numbers that `reserve_soon` is to get memory for.
    numbers_soon: u64,
    /// As the device has told without being waited for.
    told: Counts,
    /// Keys that steps count as found, and that were admitted for them.
    admitted: u64,
    /// Erased records that a step may still refer to, each with the number of the newest lookup that may.
    retired: Vec<(u64, u32)>,
    pub(crate) newest_lookup: u64,
    /// Grows when all record numbers lose their meaning: gradients on their way are then dropped.
    pub(crate) generation: u64,
    stats: TableStats,
    /// Outcomes that the caller is to be warned of.
    pub(crate) refused_to_warn: u64,
    /// The kernels must be told anew where things are.
    pub(crate) has_moved: bool,
}

/// Device memory of a call that waits.
pub(crate) struct Room {
    keys: Buffer<u64>,
    records: Buffer<u32>,
    homeless: Buffer<u32>,
    /// Of a piece: which of its values go into `records`, and the values.
    places: Buffer<u32>,
    values: Buffer<f32>,
    /// Keys of a piece.
    piece: usize,
}

impl GpuTable {
    /// # Errors
    /// [`Error::Argument`] for a configuration that cannot be, [`Error::Device`] without room for `initial_capacity`.
    pub fn new(device: &Arc<Device>, config: TableConfig) -> Result<GpuTable> {
        GpuTable::with_load(device, config, LOAD)
    }

    /// With an index that grows when this part of its places is used.
    pub fn with_load(device: &Arc<Device>, config: TableConfig, load: f64) -> Result<GpuTable> {
        config.validate()?;
        let layout = RecordLayout::new(None, config.dim);
        let rows = config.initial_capacity as usize;
        let mut table = GpuTable {
            index: Index::new(device, rows, load, WAITING)?,
            arena: arena(device, &config, layout.stride)?,
            released: Vec::new(),
            released_on_device: Buffer::new(&device.context, 1)?,
            device: device.clone(),
            config,
            update: None,
            layout,
            fresh: 1,
            len_before: 0,
            most_taken: 0,
            counted: 0,
            is_short: false,
            numbers_soon: 0,
            told: [0; 3],
            admitted: 0,
            retired: Vec::new(),
            newest_lookup: 0,
            generation: 0,
            stats: TableStats::default(),
            refused_to_warn: 0,
            has_moved: true,
        };
        table.reserve_numbers(table.numbers_for(rows as u64), false)?;
        device.synchronize()?;
        Ok(table)
    }

    /// `kind`: place of its dim among those of the group.
    pub(crate) fn descriptor(&self, kind: u32) -> layout::Table {
        layout::Table {
            index: self.index.descriptor(),
            initializer: initializer(&self.config),
            records: self.arena.address(),
            released: self.released_on_device.address(),
            last_key: self.config.vocabulary_size.map_or(u64::MAX, |size| size - 1),
            stride: self.layout.stride as u32,
            quads: layout::quads(self.config.dim) as u32,
            num_released: self.released.len() as u32,
            fresh: self.fresh,
            first_state: self.layout.first_state,
            missing: u32::from(self.config.missing == Missing::Zeros),
            kind,
            pad: 0,
        }
    }

    fn alone(&self) -> layout::Table {
        self.descriptor(0)
    }

    pub(crate) fn refuses(&self) -> bool {
        self.config.vocabulary_size.is_some() && self.config.out_of_vocabulary == OutOfVocabulary::Raise
    }

    /// Record numbers that it may use, as memory stands.
    pub(crate) fn num_numbers(&self) -> u64 {
        (self.arena.num_bytes() / (16 * self.layout.stride)) as u64
    }

    /// More than any record number that is in use, or that what is under way may take.
    pub(crate) fn most_numbers(&self) -> u64 {
        self.num_numbers().min(self.numbers_for(0))
    }

    /// More than any record number that is in use, as far as the device has told.
    pub(crate) fn known_numbers(&self) -> u64 {
        let taken = u64::from(self.told[0]).saturating_sub(self.released.len() as u64);
        self.most_numbers().min(u64::from(self.fresh) + taken)
    }

    /// Record numbers that are in use at most when so many more keys have come.
    fn numbers_for(&self, more: u64) -> u64 {
        u64::from(self.fresh) + (self.most_taken + more).saturating_sub(self.released.len() as u64)
    }

    fn reserve_numbers(&mut self, numbers: u64, spare: bool) -> Result<()> {
        if numbers > u64::from(u32::MAX) {
            return Err(Error::Device(format!(
                "a table on a GPU has at most {} records. Received: room for {numbers}",
                u32::MAX
            )));
        }
        self.arena.grow(numbers as usize * 16 * self.layout.stride, spare)
    }

    /// Rows that there are at most.
    fn most_rows(&self) -> u64 {
        (self.len_before + self.most_taken as i64) as u64
    }

    /// Whether this many new keys fit in any case as memory stands.
    pub(crate) fn has_room(&self, new_keys: u64) -> bool {
        let rows = self.most_rows() + new_keys;
        rows <= self.index.capacity() as u64 && self.numbers_for(new_keys) <= self.num_numbers()
    }

    /// Distinct keys that a call with so many ids brings at most.
    pub(crate) fn most_new(&self, ids: u64) -> u64 {
        let rows = self.most_rows();
        ids.min(self.config.vocabulary_size.unwrap_or(u64::MAX).max(rows) - rows)
    }

    /// Whether so many new keys may not be allowed to fit.
    pub(crate) fn may_refuse(&self, new_keys: u64) -> bool {
        self.most_rows() + new_keys > self.config.capacity()
    }

    /// A call with so many ids inserts those that are not there.
    pub(crate) fn expect(&mut self, ids: u64) {
        self.most_taken += self.most_new(ids);
    }

    /// Distinct keys that a call with so many ids and two more like it bring at most, and the table may hold. With room for them, a call
    /// need not wait to hear what those before it brought. Where there was no memory for them, those of this call alone.
    pub(crate) fn most_new_soon(&self, ids: u64) -> u64 {
        if self.is_short {
            return self.most_new(ids);
        }
        let rows = self.most_rows();
        self.most_new(3 * ids).min(self.config.capacity().max(rows) - rows).max(self.most_new(ids))
    }

    /// Makes room for new keys, in the order of the stream, and in the index for those that come `soon` if there is memory; their
    /// records get it in `reserve_soon`.
    pub(crate) fn make_room(&mut self, new_keys: u64, soon: u64, stream: Stream) -> Result<()> {
        (self.is_short, self.numbers_soon) = (false, 0);
        let rows = self.most_rows();
        let keys = self.index.capacity() as u64;
        if rows + soon > keys {
            let larger = (rows + soon).max(2 * keys) as usize;
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
        self.reserve_numbers(self.numbers_for(new_keys), !is_later)?;
        if is_later {
            self.numbers_soon = self.numbers_for(soon);
        }
        Ok(())
    }

    /// Memory for the records of keys that come soon, once the call that made room is on its way: it takes 0.12 ms a GB (H200), for
    /// which the device need not wait.
    pub(crate) fn reserve_soon(&mut self) {
        let numbers = std::mem::take(&mut self.numbers_soon);
        self.is_short |= self.reserve_numbers(numbers, true).is_err();
    }

    /// Learns how many numbers are taken: reads the counters, so nothing may be under way.
    pub(crate) fn learn(&mut self) -> Result<()> {
        self.most_taken = u64::from(self.index.counters.read(TAKEN, 1)?[0]);
        Ok(())
    }

    /// As a report from the device has it; `since`: ids looked up after it.
    pub(crate) fn learn_from(&mut self, counts: Counts, since: u64) {
        // Keys may have been inserted without a step since the report was written.
        let taken = counts[0].max(self.counted);
        self.most_taken = u64::from(taken);
        self.expect(since);
        self.told = [taken, counts[1], counts[2]];
    }

    /// Adds to the statistics what steps have counted on the device. Nothing may be under way.
    pub(crate) fn count_steps(&mut self) -> Result<()> {
        let counters = self.index.counters.read(0, layout::COUNTERS)?;
        let inserted = u64::from(counters[TAKEN] - self.counted);
        self.stats.outcomes.inserted += inserted;
        self.stats.outcomes.hit += u64::from(counters[DISTINCT]).saturating_sub(inserted + self.admitted);
        self.stats.dropped_gradients += u64::from(counters[DROPPED]);
        self.admitted = 0;
        self.index.counters.write(DROPPED, &[0])?;
        self.index.counters.write(DISTINCT, &[0])?;
        self.counted = counters[TAKEN];
        self.told = [self.counted, 0, 0];
        self.most_taken = u64::from(counters[TAKEN]);
        Ok(())
    }

    /// Drops what launches have counted that were no steps. Nothing may be under way.
    pub(crate) fn forget_counts(&mut self) -> Result<()> {
        self.index.counters.write(DROPPED, &[0])?;
        self.index.counters.write(DISTINCT, &[0])
    }

    /// Drops the distinct keys that a launch has counted that was no step. Nothing may be under way.
    pub(crate) fn forget_distinct(&mut self) -> Result<()> {
        self.index.counters.write(DISTINCT, &[0])
    }

    /// The number of keys inserted since `count_steps`; the statistics are told by the caller.
    pub(crate) fn count_inserted(&mut self) -> Result<u64> {
        self.learn()?;
        let inserted = self.most_taken as u32 - self.counted;
        self.counted = self.most_taken as u32;
        self.told[0] = self.counted;
        Ok(u64::from(inserted))
    }

    pub(crate) fn note(&mut self, outcomes: Outcomes) {
        self.stats.outcomes += outcomes;
        if self.config.check_mode == CheckMode::Warn {
            self.refused_to_warn += outcomes.refused;
        }
    }

    /// Keys that a lookup is about to count as found are no hits: they were admitted for it.
    pub(crate) fn take_hits(&mut self, admitted: u64) {
        self.admitted += admitted;
    }

    /// One call of a step touched the table.
    pub(crate) fn count_call(&mut self) {
        self.stats.native_calls += 1;
    }

    /// Waits for all that is under way, and learns what it has done.
    fn wait(&mut self) -> Result<()> {
        self.device.synchronize()?;
        self.count_steps()
    }

    /// Device memory for so many keys, and for `width` numbers a key, piece by piece; and the kernels. Taken before a call changes
    /// anything.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not so much.
    pub(crate) fn room(&self, num_keys: usize, width: usize) -> Result<Room> {
        let context = &self.device.context;
        let gather = format!("gather_rows<{}, 4>", self.config.dim);
        self.device.kernels(&TABLE, ["look_up", "settle_keys", "fill_missing", "write_records", &gather])?;
        let piece = (PIECE / width.max(1)).clamp(1, num_keys.max(1));
        Ok(Room {
            keys: Buffer::uninit(context, num_keys)?,
            records: Buffer::uninit(context, num_keys)?,
            homeless: Buffer::uninit(context, 1 + num_keys)?,
            places: Buffer::uninit(context, piece)?,
            values: Buffer::uninit(context, piece * width)?,
            piece,
        })
    }

    /// Numbers of the records of keys; 0 where there is none. With `insert`, with the NEW bit where there was none.
    fn look_up(&self, room: &Room, keys: &[Key], insert: bool) -> Result<Vec<u32>> {
        room.keys.write(0, keys)?;
        room.homeless.write(0, &[0])?;
        let (at, records, homeless) = (room.keys.address(), room.records.address(), room.homeless.address());
        self.launch_look_up(at, records, keys.len(), insert, homeless, WAITING)?;
        self.device.synchronize()?;
        room.records.read(0, keys.len())
    }

    /// Looks keys up, `homeless`: a zero and room for a word a key.
    pub fn launch_look_up(
        &self,
        keys: u64,
        records: u64,
        n: usize,
        insert: bool,
        homeless: u64,
        stream: Stream,
    ) -> Result<()> {
        let [look_up, settle] = self.device.kernels(&TABLE, ["look_up", "settle_keys"])?;
        let (table, count, inserts) = (self.alone(), n as u32, u32::from(insert));
        let homeless = Homeless { count: homeless, ids: homeless + 4 };
        let blocks = n.div_ceil(FIND_THREADS);
        launch!(look_up, stream, blocks, FIND_THREADS, table, keys, records, count, inserts, homeless)?;
        if insert {
            let blocks = 4 * self.device.multiprocessors;
            launch_next!(settle, stream, blocks, TABLE_THREADS, table, keys, records, homeless)?;
        }
        Ok(())
    }

    /// Gives keys that are not there a record, on a stream; `records` and `homeless` as for `launch_look_up`. Waits only where memory
    /// must grow. `n` new keys at most, all within the vocabulary.
    ///
    /// # Errors
    /// [`Error::Device`] without memory for them; no key has changed.
    pub fn insert_on_device(
        &mut self,
        keys: u64,
        records: u64,
        n: usize,
        homeless: u64,
        stream: Stream,
    ) -> Result<()> {
        let ids = n as u64;
        if !self.has_room(self.most_new(ids)) {
            self.device.synchronize()?;
            self.learn()?;
            self.make_room(self.most_new(ids), self.most_new_soon(ids), stream)?;
        }
        self.expect(ids);
        self.launch_look_up(keys, records, n, true, homeless, stream)?;
        self.reserve_soon();
        Ok(())
    }

    /// Copies the rows of keys that are there; `found`: their record numbers.
    pub fn launch_find(&self, keys: u64, rows: u64, found: u64, n: usize, stream: Stream) -> Result<()> {
        let find = self.device.kernel(&TABLE, &format!("find_rows<{}, 4>", self.config.dim))?;
        let (table, count) = (self.alone(), n as u32);
        launch!(find, stream, n.div_ceil(TABLE_THREADS), TABLE_THREADS, table, keys, rows, found, count)
    }

    /// Copies the rows of records; with `skips`, not those of new ones.
    pub fn launch_gather(
        &self,
        records: u64,
        rows: u64,
        n: usize,
        skips: bool,
        stream: Stream,
    ) -> Result<()> {
        let gather = self.device.kernel(&TABLE, &format!("gather_rows<{}, 4>", self.config.dim))?;
        let (table, count, skips) = (self.alone(), n as u32, u32::from(skips));
        let blocks = n.div_ceil(TABLE_THREADS);
        launch_next!(gather, stream, blocks, TABLE_THREADS, table, records, rows, count, skips)
    }

    /// Memory for so many rows.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not so much; nothing has changed.
    pub fn reserve(&mut self, rows: u64) -> Result<()> {
        self.wait()?;
        self.reserve_numbers(self.numbers_for(rows), false)
    }

    /// Memory of the index for each of its places, the key's among them. `LOAD` of the places are used before it grows.
    pub fn bytes_a_place(&self) -> f64 {
        self.index.num_bytes() as f64 * self.index.load() / self.index.capacity() as f64
    }

    /// Rows of keys whose records are known.
    fn read_rows(&self, room: &Room, keys: &[Key], records: &[u32], rows: &mut [f32]) -> Result<()> {
        let width = self.config.dim;
        let fill = self.device.kernel(&TABLE, "fill_missing")?;
        let pieces = keys.chunks(room.piece).zip(records.chunks(room.piece));
        for ((keys, records), rows) in pieces.zip(rows.chunks_mut(room.piece * width)) {
            room.keys.write(0, keys)?;
            room.records.write(0, records)?;
            let (from, to, n, dim) =
                (room.records.address(), room.values.address(), keys.len() as u32, width as u32);
            self.launch_gather(from, to, keys.len(), false, WAITING)?;
            let (table, at) = (self.alone(), room.keys.address());
            let blocks = keys.len().div_ceil(TABLE_THREADS).clamp(1, 4096);
            launch!(fill, WAITING, blocks, TABLE_THREADS, table, at, from, to, n, dim)?;
            self.device.synchronize()?;
            rows.copy_from_slice(&room.values.read(0, rows.len())?);
        }
        Ok(())
    }

    fn stats_of(&self, [taken, distinct, dropped]: Counts) -> TableStats {
        let inserted = u64::from(taken.saturating_sub(self.counted));
        let mut stats = TableStats {
            size: (self.len_before + i64::from(taken)) as u64,
            capacity: self.index.capacity() as u64,
            bytes: (self.index.num_bytes() + self.arena.num_bytes() + self.released_on_device.num_bytes())
                as u64,
            ..self.stats
        };
        stats.outcomes.inserted += inserted;
        stats.outcomes.hit += u64::from(distinct).saturating_sub(inserted + self.admitted);
        stats.dropped_gradients += u64::from(dropped);
        stats
    }

    fn check_len(&self, what: &str, len: usize, num_keys: usize, width: usize) -> Result<()> {
        if len == num_keys * width {
            return Ok(());
        }
        Err(Error::argument(format!(
            "table `{}`: `{what}` must hold {width} numbers a key. Received: {len} numbers for {num_keys} keys",
            self.config.name
        )))
    }

    fn check_keys(&self, keys: &[Key]) -> Result<()> {
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

    /// Keys without a record, distinct, in the order in which they come. Nothing may be under way.
    pub(crate) fn absent(&self, room: &Room, keys: &[Key]) -> Result<Vec<Key>> {
        let records = self.look_up(room, keys, false)?;
        let mut seen = HashSet::new();
        let absent = keys.iter().zip(records).filter(|(_, record)| *record == 0).map(|(key, _)| *key);
        Ok(absent.filter(|key| seen.insert(*key)).collect())
    }

    /// # Errors
    /// [`Error::TableFull`] if so many new keys do not fit and the check mode asks for it.
    pub(crate) fn check_capacity(&self, new_keys: u64) -> Result<()> {
        let (len, capacity) = (self.rows(), self.config.capacity());
        let refused = (len + new_keys).saturating_sub(capacity);
        if refused == 0 || self.config.check_mode != CheckMode::Raise {
            return Ok(());
        }
        Err(Error::TableFull { table: self.config.name.clone(), refused, len, capacity })
    }

    /// Inserts the new keys that fit, in their order. Nothing may be under way.
    pub(crate) fn admit(&mut self, room: &Room, new_keys: &[Key]) -> Result<Outcomes> {
        let left = self.config.capacity().saturating_sub(self.rows()) as usize;
        let admitted = new_keys.len().min(left);
        self.insert(room, &new_keys[..admitted])?;
        let refused = (new_keys.len() - admitted) as u64;
        Ok(Outcomes { inserted: admitted as u64, refused, ..Outcomes::default() })
    }

    /// Gives keys that are not there a record.
    fn insert(&mut self, room: &Room, keys: &[Key]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.make_room(keys.len() as u64, keys.len() as u64, WAITING)?;
        let mut homeless = keys.to_vec();
        for _ in 0..INDEX_TRIES {
            let records = self.look_up(room, &homeless, true)?;
            self.count_inserted()?;
            homeless =
                homeless.into_iter().zip(records).filter(|(_, r)| *r == NEW).map(|(key, _)| key).collect();
            if homeless.is_empty() {
                return Ok(());
            }
            let larger = self.index.capacity() * 5 / 4;
            self.index = self.index.grown(larger, self.rows() as usize, WAITING)?;
            self.has_moved = true;
        }
        Err(no_place(&self.config.name))
    }

    /// Rows, as far as is known.
    fn rows(&self) -> u64 {
        (self.len_before + i64::from(self.counted)) as u64
    }

    /// Record of each key; with `insert`, those without get one as far as there is room. Nothing may be under way.
    fn locate(&mut self, room: &Room, keys: &[Key], insert: bool) -> Result<(Vec<u32>, Outcomes)> {
        self.check_keys(keys)?;
        let new = self.absent(room, keys)?;
        let mut outcomes = Outcomes::default();
        if insert {
            self.check_capacity(new.len() as u64)?;
            outcomes = self.admit(room, &new)?;
        } else {
            outcomes.refused = new.len() as u64;
        }
        let records = self.look_up(room, keys, false)?;
        let distinct: HashSet<u32> = records.iter().copied().filter(|&r| r != 0).collect();
        outcomes.hit = distinct.len() as u64 - outcomes.inserted;
        Ok((records, outcomes))
    }

    /// Writes columns of records, of which the last of equal ones wins.
    fn write(&self, room: &Room, parts: Parts, records: &[u32], values: &[f32]) -> Result<()> {
        let last: HashMap<u32, usize> =
            records.iter().enumerate().filter(|(_, r)| **r != 0).map(|(i, r)| (*r, i)).collect();
        let write = self.device.kernel(&TABLE, "write_records")?;
        let (piece, width) = (room.piece, parts.width as usize);
        for (number, (of_piece, values)) in
            records.chunks(piece).zip(values.chunks(piece * width)).enumerate()
        {
            let wins = |(i, record): &(usize, &u32)| last.get(record) == Some(&(number * piece + i));
            let (places, records): (Vec<u32>, Vec<u32>) =
                of_piece.iter().enumerate().filter(wins).map(|(i, record)| (i as u32, *record)).unzip();
            room.places.write(0, &places)?;
            room.records.write(0, &records)?;
            room.values.write(0, values)?;
            let (to, from) = (room.records.address(), room.places.address());
            let (table, values_at, n) = (self.alone(), room.values.address(), records.len() as u32);
            let blocks = records.len().min(8192);
            launch!(write, WAITING, blocks, TABLE_THREADS, table, parts, to, from, values_at, n)?;
            self.device.synchronize()?;
        }
        Ok(())
    }

    /// Records of lookups older than `oldest` are no longer referred to.
    pub(crate) fn forget_lookups(&mut self, oldest: u64) {
        self.retired.iter_mut().filter(|(lookup, _)| *lookup < oldest).for_each(|(lookup, _)| *lookup = 0);
    }

    /// Device memory for the numbers that may be given out again once `more` records are erased.
    fn room_to_release(&self, more: usize) -> Result<Buffer<u32>> {
        Buffer::uninit(&self.device.context, (self.released.len() + self.retired.len() + more).max(1))
    }

    /// Tells the device which numbers may be given out again. Nothing may be under way.
    fn release(&mut self, room: Buffer<u32>) -> Result<()> {
        let taken = self.counted as usize;
        let given_out = taken.min(self.released.len());
        let mut released = self.released.split_off(given_out);
        let retired = std::mem::take(&mut self.retired);
        let (free, needed): (Vec<_>, Vec<_>) = retired.into_iter().partition(|(lookup, _)| *lookup == 0);
        released.extend(free.into_iter().map(|(_, record)| record));
        self.fresh += (taken - given_out) as u32;
        self.len_before += taken as i64;
        (self.counted, self.most_taken, self.told) = (0, 0, [0; 3]);
        (self.released, self.retired, self.has_moved) = (released, needed, true);
        room.write(0, &self.released)?;
        self.released_on_device = room;
        self.index.counters.write(TAKEN, &[0])
    }

    fn erase_waiting(&mut self, keys: &[Key]) -> Result<usize> {
        self.wait()?;
        let context = &self.device.context;
        let on_device = Buffer::from_slice(context, keys)?;
        let erased = Buffer::<u32>::uninit(context, keys.len())?;
        let room = self.room_to_release(keys.len())?;
        let erase = self.device.kernel(&TABLE, "erase_keys")?;
        let (index, from, to, n) =
            (self.index.descriptor(), on_device.address(), erased.address(), keys.len() as u32);
        launch!(erase, WAITING, keys.len().div_ceil(TABLE_THREADS), TABLE_THREADS, index, from, to, n)?;
        let erased: Vec<u32> = erased.to_vec()?.into_iter().filter(|&record| record != 0).collect();
        self.retired.extend(erased.iter().map(|&record| (self.newest_lookup, record)));
        self.release(room)?;
        self.len_before -= erased.len() as i64;
        Ok(erased.len())
    }

    fn read_records(&self, records: &[u32]) -> Result<Vec<f32>> {
        let (parts, n) = (self.layout.parts, records.len() as u32);
        let on_device = Buffer::from_slice(&self.device.context, records)?;
        let values = Buffer::<f32>::uninit(&self.device.context, records.len() * parts.width as usize)?;
        let read = self.device.kernel(&TABLE, "read_records")?;
        let (table, from, to) = (self.alone(), on_device.address(), values.address());
        launch!(read, WAITING, records.len().min(8192), TABLE_THREADS, table, parts, from, to, n)?;
        values.to_vec()
    }

    fn lay_out(&mut self, update: Option<&Update>) -> Result<()> {
        let layout = RecordLayout::new(update, self.config.dim);
        let mut arena = arena(&self.device, &self.config, layout.stride)?;
        let numbers = self.fresh + (self.counted as usize).saturating_sub(self.released.len()) as u32;
        let kept =
            self.num_numbers().max(u64::from(numbers)).min(u64::from(numbers) + self.config.initial_capacity);
        arena.grow(kept as usize * 16 * layout.stride, false)?;
        let from = self.alone();
        let to = layout::Table {
            records: arena.address(),
            stride: layout.stride as u32,
            first_state: layout.first_state,
            ..from
        };
        let lay_out = self.device.kernel(&TABLE, "lay_out")?;
        // Number 0 is nobody's, and may have no memory yet.
        if numbers > 1 {
            launch!(lay_out, WAITING, (numbers as usize).min(8192), TABLE_THREADS, from, to, numbers)?;
            self.device.synchronize()?;
        }
        (self.arena, self.layout, self.has_moved) = (arena, layout, true);
        Ok(())
    }

    fn reset(&mut self, index: Index, arena: Arena) {
        (self.index, self.arena) = (index, arena);
        self.released.clear();
        self.retired.clear();
        (self.fresh, self.len_before, self.most_taken, self.counted, self.told) = (1, 0, 0, 0, [0; 3]);
        self.numbers_soon = 0;
        self.generation += 1;
        self.has_moved = true;
    }
}

pub(crate) fn no_place(table: &str) -> Error {
    Error::Device(format!(
        "table `{table}` has no place for a key: more than a thousand keys share their two places in the index"
    ))
}

fn arena(device: &Arc<Device>, config: &TableConfig, stride: usize) -> Result<Arena> {
    let rows = config.capacity().min(config.vocabulary_size.unwrap_or(u64::MAX)) as usize;
    // Erased records' numbers wait for steps that may refer to them, so there may be more records than rows.
    let most = (rows.saturating_mul(2) + 2).saturating_mul(16 * stride);
    Arena::new(&device.context, most, format!("table `{}`", config.name))
}

fn initializer(config: &TableConfig) -> layout::Initializer {
    let (kind, a, b) = match config.initializer {
        Initializer::Constant { value } => (0, value, 0.0),
        Initializer::Uniform { minval, maxval } => (1, minval, maxval - minval),
        Initializer::Normal { mean, stddev } => (2, mean, stddev),
        Initializer::TruncatedNormal { mean, stddev } => (3, mean, stddev),
    };
    layout::Initializer { seed: config.seed, kind, a, b, pad: 0 }
}
