//! A table in device memory.

#![allow(unsafe_code)]

mod contract;
mod record;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sok_core::contract::table::{CheckMode, OutOfVocabulary, Outcomes, TableConfig, TableStats};
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;
use sok_core::initializer::Initializer;
use sok_core::key::Key;

use crate::abi::{
    self, DISTINCT, DROPPED, FIND_THREADS, InitializerKind, NEW, Overflow, Parts, TABLE_THREADS, TAKEN,
};
use crate::device::{Device, Stream, launch, launch_next};
use crate::index::{Index, LOAD};
use crate::kernels::TABLE;
use crate::memory::{Arena, Buffer};

use record::RecordLayout;

/// The stream of operations that wait for their results: the default stream of the device.
const WAITING: Stream = Stream::DEFAULT;

/// Maximum number of floats that are copied to or from the device at once.
const PIECE: usize = 1 << 24;

/// Maximum number of times that the index grows for keys which find no slot.
const INDEX_TRIES: usize = 8;

/// Values of `Counters`: `taken`, `distinct` and `dropped`. The last two are counted since `GpuTable::count_steps`.
type Counts = [u32; 3];

/// An embedding table in the memory of a GPU.
pub struct GpuTable {
    pub(crate) config: TableConfig,
    pub(crate) device: Arc<Device>,
    pub(crate) update: Option<Update>,
    pub(crate) layout: RecordLayout,
    index: Index,
    arena: Arena,
    /// Record numbers that are given out again, before those from `fresh` on.
    released: Vec<u32>,
    released_on_device: Buffer<u32>,
    fresh: u32,
    /// Number of rows minus `Counters::taken`.
    len_before: i64,
    /// Upper bound of `Counters::taken`.
    pub(crate) most_taken: u64,
    /// Part of `Counters::taken` that `stats` contains.
    counted: u32,
    /// Whether there was no memory for the keys of later calls.
    is_short: bool,
    /// Number of record numbers that `reserve_soon` must get memory for; 0: none.
    numbers_soon: u64,
    /// The counts that the device last reported, without a wait for the device.
    reported: Counts,
    /// Keys that were admitted for steps, which count them as found.
    admitted: u64,
    /// Erased records that a step may still refer to, each with the number of the newest lookup that may refer to it; 0: none does.
    retired: Vec<(u64, u32)>,
    pub(crate) newest_lookup: u64,
    /// Increases when all record numbers become invalid. Gradients of earlier lookups are then dropped.
    pub(crate) generation: u64,
    stats: TableStats,
    /// Number of refused keys that the user must still be warned of.
    pub(crate) refused_to_warn: u64,
    /// Whether the descriptor on the device is out of date.
    pub(crate) has_moved: bool,
}

/// Device memory of a call that waits for its results.
pub(crate) struct Room {
    keys: Buffer<u64>,
    records: Buffer<u32>,
    overflow: Buffer<u32>,
    /// Of a piece: the index in `values` for each record that is written.
    places: Buffer<u32>,
    /// Values of a piece.
    values: Buffer<f32>,
    /// Maximum number of keys of a piece.
    piece: usize,
}

impl GpuTable {
    /// Creates an empty table.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration, [`Error::Device`] without memory for `initial_capacity`.
    pub fn new(device: &Arc<Device>, config: TableConfig) -> Result<GpuTable> {
        GpuTable::with_load(device, config, LOAD)
    }

    /// Creates an empty table, with an index that grows when this fraction of its slots is used.
    ///
    /// # Errors
    /// As `new`.
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
            reported: [0; 3],
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

    /// Returns the descriptor of the table for kernels. `kind`: index of the table's dim among the distinct dims of the group.
    pub(crate) fn descriptor(&self, kind: u32) -> abi::Table {
        abi::Table {
            index: self.index.descriptor(),
            initializer: initializer(&self.config),
            records: self.arena.address(),
            released: self.released_on_device.address(),
            last_key: self.config.vocabulary_size.map_or(u64::MAX, |size| size - 1),
            stride: self.layout.stride as u32,
            quads: abi::quads(self.config.dim) as u32,
            num_released: self.released.len() as u32,
            fresh: self.fresh,
            first_state: self.layout.first_state,
            missing: self.config.missing as u32,
            kind,
            pad: 0,
        }
    }

    /// Returns the descriptor for kernels of a single table.
    fn alone(&self) -> abi::Table {
        self.descriptor(0)
    }

    /// Returns whether an id outside the vocabulary is an error.
    pub(crate) fn refuses(&self) -> bool {
        self.config.vocabulary_size.is_some() && self.config.out_of_vocabulary == OutOfVocabulary::Raise
    }

    /// Returns for how many record numbers, record 0 included, there is memory.
    pub(crate) fn num_numbers(&self) -> u64 {
        (self.arena.num_bytes() / (16 * self.layout.stride)) as u64
    }

    /// Returns a number above all record numbers that are in use, or that work in progress on the device may take.
    pub(crate) fn most_numbers(&self) -> u64 {
        self.num_numbers().min(self.numbers_for(0))
    }

    /// Returns a number above all record numbers that were in use when the device last reported.
    pub(crate) fn known_numbers(&self) -> u64 {
        let taken = u64::from(self.reported[0]).saturating_sub(self.released.len() as u64);
        self.most_numbers().min(u64::from(self.fresh) + taken)
    }

    /// Returns the maximum number of record numbers, record 0 included, after `more` keys have been inserted.
    fn numbers_for(&self, more: u64) -> u64 {
        u64::from(self.fresh) + (self.most_taken + more).saturating_sub(self.released.len() as u64)
    }

    /// Gets memory for this many record numbers, and with `spare` for some more.
    fn reserve_numbers(&mut self, numbers: u64, spare: bool) -> Result<()> {
        if numbers > u64::from(u32::MAX) {
            return Err(Error::Device(format!(
                "a table on a GPU has at most {} records. Received: room for {numbers}",
                u32::MAX
            )));
        }
        self.arena.grow(numbers as usize * 16 * self.layout.stride, spare)
    }

    /// Returns an upper bound of the number of rows.
    fn most_rows(&self) -> u64 {
        (self.len_before + self.most_taken as i64) as u64
    }

    /// Returns whether this many new keys certainly fit into index and memory as they are.
    pub(crate) fn has_room(&self, new_keys: u64) -> bool {
        let rows = self.most_rows() + new_keys;
        rows <= self.index.capacity() as u64 && self.numbers_for(new_keys) <= self.num_numbers()
    }

    /// Returns the maximum number of new keys of a call with this many ids.
    pub(crate) fn most_new(&self, ids: u64) -> u64 {
        let rows = self.most_rows();
        ids.min(self.config.vocabulary_size.unwrap_or(u64::MAX).max(rows) - rows)
    }

    /// Returns whether this many new keys might exceed the maximum capacity.
    pub(crate) fn may_refuse(&self, new_keys: u64) -> bool {
        self.most_rows() + new_keys > self.config.capacity()
    }

    /// Raises the upper bound of taken numbers for a call that inserts the missing keys of this many ids.
    pub(crate) fn expect(&mut self, ids: u64) {
        self.most_taken += self.most_new(ids);
    }

    /// Returns the maximum number of new keys of this call and two more calls with this many ids, as far as the capacity allows.
    /// With room for them, a call need not wait for the number of keys that the calls before it have inserted. If there was no
    /// memory for that, returns the number for this call alone.
    pub(crate) fn most_new_soon(&self, ids: u64) -> u64 {
        if self.is_short {
            return self.most_new(ids);
        }
        let rows = self.most_rows();
        self.most_new(3 * ids).min(self.config.capacity().max(rows) - rows).max(self.most_new(ids))
    }

    /// Makes room for `new_keys` new keys, on the stream. If there is memory, the index gets room for the `soon` keys of later
    /// calls too. Their records get memory in `reserve_soon`.
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

    /// Gets memory for the records of later calls, after `make_room`. It is called when the launches of the call are enqueued,
    /// because it takes 0.12 ms for each GB (H200), for which the device need not wait.
    pub(crate) fn reserve_soon(&mut self) {
        let numbers = std::mem::take(&mut self.numbers_soon);
        self.is_short |= self.reserve_numbers(numbers, true).is_err();
    }

    /// Reads from the device how many numbers are taken. The device must be idle.
    pub(crate) fn learn(&mut self) -> Result<()> {
        self.most_taken = u64::from(self.index.counters.read(TAKEN, 1)?[0]);
        Ok(())
    }

    /// Takes over the counts of a report from the device. `since`: number of ids looked up to insert since that report.
    pub(crate) fn learn_from(&mut self, counts: Counts, since: u64) {
        // Keys may have been inserted outside a step since the report was written.
        let taken = counts[0].max(self.counted);
        self.most_taken = u64::from(taken);
        self.expect(since);
        self.reported = [taken, counts[1], counts[2]];
    }

    /// Adds the counts of steps to the statistics, and resets them on the device. The device must be idle.
    pub(crate) fn count_steps(&mut self) -> Result<()> {
        let counters = self.index.counters.read(0, abi::COUNTERS_WORDS)?;
        let inserted = u64::from(counters[TAKEN] - self.counted);
        self.stats.outcomes.inserted += inserted;
        self.stats.outcomes.hit += u64::from(counters[DISTINCT]).saturating_sub(inserted + self.admitted);
        self.stats.dropped_gradients += u64::from(counters[DROPPED]);
        self.admitted = 0;
        self.index.counters.write(DROPPED, &[0])?;
        self.index.counters.write(DISTINCT, &[0])?;
        self.counted = counters[TAKEN];
        self.reported = [self.counted, 0, 0];
        self.most_taken = u64::from(counters[TAKEN]);
        Ok(())
    }

    /// Resets the distinct keys and dropped gradients on the device, after launches that were not steps. The device must be idle.
    pub(crate) fn forget_counts(&mut self) -> Result<()> {
        self.index.counters.write(DROPPED, &[0])?;
        self.index.counters.write(DISTINCT, &[0])
    }

    /// Resets the distinct keys on the device, after a launch that was not a step. The device must be idle.
    pub(crate) fn forget_distinct(&mut self) -> Result<()> {
        self.index.counters.write(DISTINCT, &[0])
    }

    /// Returns the number of keys inserted since the numbers were last counted. The caller adds it to the statistics. The device
    /// must be idle.
    pub(crate) fn count_inserted(&mut self) -> Result<u64> {
        self.learn()?;
        let inserted = self.most_taken as u32 - self.counted;
        self.counted = self.most_taken as u32;
        self.reported[0] = self.counted;
        Ok(u64::from(inserted))
    }

    /// Adds outcomes to the statistics.
    pub(crate) fn note(&mut self, outcomes: Outcomes) {
        self.stats.outcomes += outcomes;
        if self.config.check_mode == CheckMode::Warn {
            self.refused_to_warn += outcomes.refused;
        }
    }

    /// Prevents keys from being counted as hits. They were admitted for the next lookup, which will count them as found.
    pub(crate) fn take_hits(&mut self, admitted: u64) {
        self.admitted += admitted;
    }

    /// Counts a call of a step that uses the table.
    pub(crate) fn count_call(&mut self) {
        self.stats.native_calls += 1;
    }

    /// Waits for the device, and adds the counts of steps to the statistics.
    fn wait(&mut self) -> Result<()> {
        self.device.synchronize()?;
        self.count_steps()
    }

    /// Allocates device memory for this many keys, and for a piece of `width` floats for each key. Also loads the kernels. A call
    /// does this before it changes anything.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough memory, or a kernel cannot be compiled.
    pub(crate) fn room(&self, num_keys: usize, width: usize) -> Result<Room> {
        let context = &self.device.context;
        let gather = format!("gather_rows<{}, 4>", self.config.dim);
        self.device.kernels(&TABLE, ["look_up", "settle_keys", "fill_missing", "write_records", &gather])?;
        let piece = (PIECE / width.max(1)).clamp(1, num_keys.max(1));
        Ok(Room {
            keys: Buffer::uninit(context, num_keys)?,
            records: Buffer::uninit(context, num_keys)?,
            overflow: Buffer::uninit(context, 1 + num_keys)?,
            places: Buffer::uninit(context, piece)?,
            values: Buffer::uninit(context, piece * width)?,
            piece,
        })
    }

    /// Returns the record numbers of keys; 0 for a key without a record. With `insert`, keys without a record get one, and its
    /// number is returned with the `NEW` bit. `NEW` alone: the index has no slot for the key.
    fn look_up(&self, room: &Room, keys: &[Key], insert: bool) -> Result<Vec<u32>> {
        room.keys.write(0, keys)?;
        room.overflow.write(0, &[0])?;
        let (at, records, overflow) = (room.keys.address(), room.records.address(), room.overflow.address());
        // SAFETY: The room has memory for all keys, and the call below waits.
        unsafe { self.launch_look_up(at, records, keys.len(), insert, overflow, WAITING) }?;
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
    pub unsafe fn launch_look_up(
        &self,
        keys: u64,
        records: u64,
        n: usize,
        insert: bool,
        overflow: u64,
        stream: Stream,
    ) -> Result<()> {
        let [look_up, settle] = self.device.kernels(&TABLE, ["look_up", "settle_keys"])?;
        let (table, count, inserts) = (self.alone(), n as u32, u32::from(insert));
        let overflow = Overflow { count: overflow, ids: overflow + 4 };
        let blocks = n.div_ceil(FIND_THREADS);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe {
            launch!(look_up, stream, blocks, FIND_THREADS, table, keys, records, count, inserts, overflow)
        }?;
        if insert {
            let blocks = 4 * self.device.multiprocessors;
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe { launch_next!(settle, stream, blocks, TABLE_THREADS, table, keys, records, overflow) }?;
        }
        Ok(())
    }

    /// Enqueues the insertion of keys without a record. `keys`, `records` and `overflow` are as for `launch_look_up`. All keys must
    /// be within the vocabulary. Waits only if memory must grow.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough memory. No key has changed then.
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
        if !self.has_room(self.most_new(ids)) {
            self.device.synchronize()?;
            self.learn()?;
            self.make_room(self.most_new(ids), self.most_new_soon(ids), stream)?;
        }
        self.expect(ids);
        // SAFETY: The caller guarantees it.
        unsafe { self.launch_look_up(keys, records, n, true, overflow, stream) }?;
        self.reserve_soon();
        Ok(())
    }

    /// Enqueues a find of `n` keys, which copies the rows of keys that have a record. `rows`: float32 `(n, dim)`; other rows are
    /// not written. `found`: takes the record numbers, `(n,)` u32; 0 for a key without a record.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    pub unsafe fn launch_find(
        &self,
        keys: u64,
        rows: u64,
        found: u64,
        n: usize,
        stream: Stream,
    ) -> Result<()> {
        let find = self.device.kernel(&TABLE, &format!("find_rows<{}, 4>", self.config.dim))?;
        let (table, count) = (self.alone(), n as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe {
            launch!(find, stream, n.div_ceil(TABLE_THREADS), TABLE_THREADS, table, keys, rows, found, count)
        }
    }

    /// Enqueues a copy of the rows of `n` records. `records`: as `launch_look_up` writes them. `rows`: float32 `(n, dim)`; rows of
    /// keys without a record are not written. `skips`: rows of new records are not written either.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    ///
    /// # Safety
    /// The addresses are of memory on this device, with the stated lengths, that lives until the stream has completed the call.
    pub unsafe fn launch_gather(
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
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe { launch_next!(gather, stream, blocks, TABLE_THREADS, table, records, rows, count, skips) }
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
    pub fn bytes_a_place(&self) -> f64 {
        self.index.num_bytes() as f64 * self.index.load() / self.index.capacity() as f64
    }

    /// Copies the rows of keys to the host. `records`: their record numbers; a key with 0 gets the row of a missing key.
    fn read_rows(&self, room: &Room, keys: &[Key], records: &[u32], rows: &mut [f32]) -> Result<()> {
        let width = self.config.dim;
        let fill = self.device.kernel(&TABLE, "fill_missing")?;
        let pieces = keys.chunks(room.piece).zip(records.chunks(room.piece));
        for ((keys, records), rows) in pieces.zip(rows.chunks_mut(room.piece * width)) {
            room.keys.write(0, keys)?;
            room.records.write(0, records)?;
            let (from, to, n, dim) =
                (room.records.address(), room.values.address(), keys.len() as u32, width as u32);
            // SAFETY: The room has memory for the piece, and the call below waits.
            unsafe { self.launch_gather(from, to, keys.len(), false, WAITING) }?;
            let (table, at) = (self.alone(), room.keys.address());
            let blocks = keys.len().div_ceil(TABLE_THREADS).clamp(1, 4096);
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe { launch!(fill, WAITING, blocks, TABLE_THREADS, table, at, from, to, n, dim) }?;
            self.device.synchronize()?;
            rows.copy_from_slice(&room.values.read(0, rows.len())?);
        }
        Ok(())
    }

    /// Returns the statistics, with these counts of the device added.
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

    /// Returns the distinct keys without a record, in the order of their first positions. The device must be idle.
    pub(crate) fn absent(&self, room: &Room, keys: &[Key]) -> Result<Vec<Key>> {
        let records = self.look_up(room, keys, false)?;
        let mut seen = HashSet::new();
        let absent = keys.iter().zip(records).filter(|(_, record)| *record == 0).map(|(key, _)| *key);
        Ok(absent.filter(|key| seen.insert(*key)).collect())
    }

    /// Checks that this many new keys fit.
    ///
    /// # Errors
    /// [`Error::TableFull`] if they do not, and the check mode is `Raise`.
    pub(crate) fn check_capacity(&self, new_keys: u64) -> Result<()> {
        let (len, capacity) = (self.rows(), self.config.capacity());
        let refused = (len + new_keys).saturating_sub(capacity);
        if refused == 0 || self.config.check_mode != CheckMode::Raise {
            return Ok(());
        }
        Err(Error::TableFull { table: self.config.name.clone(), refused, len, capacity })
    }

    /// Inserts as many of the new keys as fit, in their order. The device must be idle.
    pub(crate) fn admit(&mut self, room: &Room, new_keys: &[Key]) -> Result<Outcomes> {
        let left = self.config.capacity().saturating_sub(self.rows()) as usize;
        let admitted = new_keys.len().min(left);
        self.insert(room, &new_keys[..admitted])?;
        let refused = (new_keys.len() - admitted) as u64;
        Ok(Outcomes { inserted: admitted as u64, refused, ..Outcomes::default() })
    }

    /// Inserts keys without a record. The index grows if keys find no slot.
    fn insert(&mut self, room: &Room, keys: &[Key]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.make_room(keys.len() as u64, keys.len() as u64, WAITING)?;
        let mut overflow = keys.to_vec();
        for _ in 0..INDEX_TRIES {
            let records = self.look_up(room, &overflow, true)?;
            self.count_inserted()?;
            overflow =
                overflow.into_iter().zip(records).filter(|(_, r)| *r == NEW).map(|(key, _)| key).collect();
            if overflow.is_empty() {
                return Ok(());
            }
            let larger = self.index.capacity() * 5 / 4;
            self.index = self.index.grown(larger, self.rows() as usize, WAITING)?;
            self.has_moved = true;
        }
        Err(no_place(&self.config.name))
    }

    /// Returns the number of rows when numbers were last counted.
    fn rows(&self) -> u64 {
        (self.len_before + i64::from(self.counted)) as u64
    }

    /// Returns the record number of each key, 0 if it has none. With `insert`, keys without a record get one as far as they fit.
    /// The device must be idle.
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

    /// Writes these parts of records. Of equal records the last one wins. Records 0 are skipped.
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
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe { launch!(write, WAITING, blocks, TABLE_THREADS, table, parts, to, from, values_at, n) }?;
            self.device.synchronize()?;
        }
        Ok(())
    }

    /// Frees erased records that only lookups older than `oldest` refer to.
    pub(crate) fn forget_lookups(&mut self, oldest: u64) {
        self.retired.iter_mut().filter(|(lookup, _)| *lookup < oldest).for_each(|(lookup, _)| *lookup = 0);
    }

    /// Allocates device memory for the numbers that may be given out again after `more` records are erased.
    fn room_to_release(&self, more: usize) -> Result<Buffer<u32>> {
        Buffer::uninit(&self.device.context, (self.released.len() + self.retired.len() + more).max(1))
    }

    /// Writes to the device which numbers may be given out again, and resets `Counters::taken`. The device must be idle.
    fn release(&mut self, room: Buffer<u32>) -> Result<()> {
        let taken = self.counted as usize;
        let given_out = taken.min(self.released.len());
        let mut released = self.released.split_off(given_out);
        let retired = std::mem::take(&mut self.retired);
        let (free, needed): (Vec<_>, Vec<_>) = retired.into_iter().partition(|(lookup, _)| *lookup == 0);
        released.extend(free.into_iter().map(|(_, record)| record));
        self.fresh += (taken - given_out) as u32;
        self.len_before += taken as i64;
        (self.counted, self.most_taken, self.reported) = (0, 0, [0; 3]);
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
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe {
            launch!(erase, WAITING, keys.len().div_ceil(TABLE_THREADS), TABLE_THREADS, index, from, to, n)
        }?;
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
        // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
        unsafe { launch!(read, WAITING, records.len().min(8192), TABLE_THREADS, table, parts, from, to, n) }?;
        values.to_vec()
    }

    /// Copies all records to the layout of another update. Rows are kept, and states get their initial values.
    fn lay_out(&mut self, update: Option<&Update>) -> Result<()> {
        let layout = RecordLayout::new(update, self.config.dim);
        let mut arena = arena(&self.device, &self.config, layout.stride)?;
        let numbers = self.fresh + (self.counted as usize).saturating_sub(self.released.len()) as u32;
        let kept =
            self.num_numbers().max(u64::from(numbers)).min(u64::from(numbers) + self.config.initial_capacity);
        arena.grow(kept as usize * 16 * layout.stride, false)?;
        let from = self.alone();
        let to = abi::Table {
            records: arena.address(),
            stride: layout.stride as u32,
            first_state: layout.first_state,
            ..from
        };
        let lay_out = self.device.kernel(&TABLE, "lay_out")?;
        // Record 0 belongs to no key, and may have no memory yet.
        if numbers > 1 {
            // SAFETY: The arguments have the types of the kernel's parameters. Table or caller keep the memory that they point to.
            unsafe {
                launch!(lay_out, WAITING, (numbers as usize).min(8192), TABLE_THREADS, from, to, numbers)
            }?;
            self.device.synchronize()?;
        }
        (self.arena, self.layout, self.has_moved) = (arena, layout, true);
        Ok(())
    }

    /// Empties the table, which takes over this index and this memory.
    fn reset(&mut self, index: Index, arena: Arena) {
        (self.index, self.arena) = (index, arena);
        self.released.clear();
        self.retired.clear();
        (self.fresh, self.len_before, self.most_taken, self.counted, self.reported) = (1, 0, 0, 0, [0; 3]);
        self.numbers_soon = 0;
        self.generation += 1;
        self.has_moved = true;
    }
}

/// The error for a key that finds no slot in the index.
pub(crate) fn no_place(table: &str) -> Error {
    Error::Device(format!(
        "table `{table}` has no place for a key: more than a thousand keys share their two places in the index"
    ))
}

/// Reserves addresses for the records of a table.
fn arena(device: &Arc<Device>, config: &TableConfig, stride: usize) -> Result<Arena> {
    let rows = config.capacity().min(config.vocabulary_size.unwrap_or(u64::MAX)) as usize;
    // Numbers of erased records are not reused while steps may refer to them, so there may be more records than rows.
    let most = (rows.saturating_mul(2) + 2).saturating_mul(16 * stride);
    Arena::new(&device.context, most, format!("table `{}`", config.name))
}

fn initializer(config: &TableConfig) -> abi::Initializer {
    let (kind, a, b) = match config.initializer {
        Initializer::Constant { value } => (InitializerKind::Constant, value, 0.0),
        Initializer::Uniform { minval, maxval } => (InitializerKind::Uniform, minval, maxval - minval),
        Initializer::Normal { mean, stddev } => (InitializerKind::Normal, mean, stddev),
        Initializer::TruncatedNormal { mean, stddev } => (InitializerKind::TruncatedNormal, mean, stddev),
    };
    abi::Initializer { seed: config.seed, kind: kind as u32, a, b, pad: 0 }
}
