//! Absent ids: a lookup has found no record for them, and a commit inserts their keys.
//!
//! Such a lookup keeps its inputs and the records that it found. The commit looks the ids without a record up again, inserts their
//! keys, and applies their gradients as those of one more push.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, OnceLock};

use sok_core::contract::group::Group;
use sok_core::contract::table::Outcomes;
use sok_core::contract::ticket::{Named, RING, TICKET_LEN};
use sok_core::error::{Error, Result};
use sok_core::key::Key;
use sok_core::policy::admission::Admission;

use super::{GpuGroup, Push, SavedLookup};
use crate::abi::AbsentId;
use crate::device::Stream;
use crate::gpu_table::{self, GpuTable, Room};
use crate::memory::{Buffer, read};
use crate::step::{AbsentIds, Bags, Feature, KeyType, Workspace};

/// The absent ids of a saved lookup.
#[derive(Default)]
pub(super) enum Absent {
    /// No commit will insert them.
    #[default]
    None,
    /// A commit may insert them, from these inputs.
    Waiting(Inputs),
    /// A commit has inserted them, by this lookup.
    Inserted(Arc<SavedLookup>),
}

impl Absent {
    pub fn num_bytes(&self) -> usize {
        match self {
            Absent::None => 0,
            Absent::Waiting(inputs) => inputs.memory.num_bytes(),
            Absent::Inserted(lookup) => lookup.saved.memory.num_bytes(),
        }
    }
}

/// Copies of a lookup's inputs, because the memory of the framework may be gone when the commit comes.
pub(super) struct Inputs {
    /// A head, the list of the absent ids, the record number of each id, and the tensors of the features. The first word of the head is
    /// the number of absent ids.
    pub memory: Buffer<u32>,
    features: Vec<Feature<'static>>,
    /// By feature: the place of its first id in the call.
    first_ids: Vec<usize>,
    num_ids: usize,
    /// By table: whether a commit may insert its keys.
    are_later: Vec<bool>,
    /// The absent ids, by place, once the host has read them.
    absent: OnceLock<Vec<AbsentId>>,
}

/// The keys of a table that pushes may insert.
struct AbsentKeys {
    /// The records that they have meanwhile.
    room: Room,
    num_keys: usize,
    /// How many of them have none and get one.
    num_new: u64,
}

/// Whether a commit has counted the sights of its keys.
#[derive(Clone, Copy, PartialEq)]
enum Sights {
    Counted,
    ToCount,
}

/// Words before the list. The first is the number of absent ids; it has a cache line of its own.
const HEAD: usize = 32;
/// Words of a listed id.
const LISTED: usize = size_of::<AbsentId>() / 4;

impl Inputs {
    /// Enqueues copying a lookup's inputs. `are_later`: by table, whether a commit may insert its keys.
    pub fn keep(
        workspace: &mut Workspace,
        tables: &[GpuTable],
        features: &[Feature],
        are_later: Vec<bool>,
        stream: Stream,
    ) -> Result<Inputs> {
        // Silent features come last, and their ids are never inserted.
        let features = &features[..features.iter().take_while(|f| !f.is_silent).count()];
        let num_ids: usize = features.iter().map(|f| f.ids.len).sum();
        let start = (HEAD + (LISTED + 1) * num_ids).next_multiple_of(2);
        let num_words = start + features.iter().map(num_input_words).sum::<usize>();
        let memory = workspace.take_memory(num_words)?;
        stream_zero(&memory, stream)?;
        let mut at = start;
        let mut copied = Vec::with_capacity(features.len());
        for feature in features {
            copied.push(copy_feature(feature, &memory, &mut at, stream)?);
        }
        let first_ids = workspace.first_ids(tables, features);
        Ok(Inputs { memory, features: copied, first_ids, num_ids, are_later, absent: OnceLock::new() })
    }

    /// Address of the word in which the lookup counts its absent ids.
    pub fn count_address(&self) -> u64 {
        self.memory.address()
    }

    /// Address of the list of its absent ids.
    pub fn list_address(&self) -> u64 {
        self.memory.at(HEAD)
    }

    fn known_address(&self) -> u64 {
        self.memory.at(self.first_record())
    }

    fn first_record(&self) -> usize {
        HEAD + LISTED * self.num_ids
    }

    /// Enqueues copying the records that the lookup found. `found`: address of the record number of each id.
    #[allow(unsafe_code)]
    pub fn keep_records(&self, found: u64, stream: Stream) -> Result<()> {
        // SAFETY: `found` has a word for each id, and so has the memory after its head.
        unsafe { stream.copy(self.known_address(), found, 4 * self.num_ids) }
    }

    /// Returns the absent ids, by place. The device must be idle.
    fn absent_ids(&self) -> Result<&[AbsentId]> {
        if let Some(absent) = self.absent.get() {
            return Ok(absent);
        }
        let context = self.memory.context();
        let num_absent = self.memory.read(0, 1)?[0] as usize;
        let mut absent = read::<AbsentId>(context, self.list_address(), num_absent)?;
        absent.sort_unstable_by_key(|id| id.place);
        Ok(self.absent.get_or_init(|| absent))
    }

    /// Returns the absent ids of a feature. The device must be idle.
    fn absent_ids_of(&self, number: usize) -> Result<&[AbsentId]> {
        let ids = self.absent_ids()?;
        let first = self.first_ids[number];
        let before = |place: usize| ids.partition_point(|id| (id.place as usize) < place);
        Ok(&ids[before(first)..before(first + self.features[number].ids.len)])
    }

    /// The numbers of the features of a table.
    fn features_of(&self, table: usize) -> impl Iterator<Item = usize> {
        (0..self.features.len()).filter(move |number| self.features[*number].table == table)
    }

    /// Returns the number of absent ids of a table. The device must be idle.
    pub fn num_absent_of(&self, table: usize) -> Result<u64> {
        self.features_of(table).map(|number| Ok(self.absent_ids_of(number)?.len() as u64)).sum()
    }

    /// Returns the keys of the absent ids of a table, in the order of the ids. The device must be idle.
    pub fn absent_keys_of(&self, table: usize) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        for number in self.features_of(table) {
            keys.extend(self.absent_ids_of(number)?.iter().map(|id| id.key));
        }
        Ok(keys)
    }

    /// Returns the absent ids of a table, in their order: the key, and how many ids it stands for. The device must be idle.
    fn counted_ids_of(&self, table: usize) -> Result<Vec<(Key, u64)>> {
        let mut counted = Vec::new();
        for number in self.features_of(table) {
            let (feature, ids) = (&self.features[number], self.absent_ids_of(number)?);
            if feature.id_counts == 0 || ids.is_empty() {
                counted.extend(ids.iter().map(|id| (id.key, 1)));
                continue;
            }
            let counts = read::<u64>(self.memory.context(), feature.id_counts, feature.ids.len)?;
            let count_of = |id: &AbsentId| counts[id.place as usize - self.first_ids[number]];
            counted.extend(ids.iter().map(|id| (id.key, count_of(id))));
        }
        Ok(counted)
    }

    /// Enqueues marking all ids of a feature as found, so that the commit inserts none of them.
    #[allow(unsafe_code)]
    fn pass_over(&self, number: usize, stream: Stream) -> Result<()> {
        let (first, num_ids) = (self.first_ids[number], self.features[number].ids.len);
        // SAFETY: The range is the feature's part of the records.
        unsafe { stream.fill(self.memory.at(self.first_record() + first), 0xff, 4 * num_ids) }
    }
}

#[allow(unsafe_code)]
fn stream_zero(memory: &Buffer<u32>, stream: Stream) -> Result<()> {
    // SAFETY: The range is the head, which all inputs have.
    unsafe { stream.fill(memory.address(), 0, 4 * HEAD) }
}

/// Returns the number of words that `copy_feature` takes for a feature. Each tensor takes an even number.
fn num_input_words(feature: &Feature) -> usize {
    let wide = |words: usize| words.next_multiple_of(2);
    let id_words = if feature.ids.key_type == KeyType::Wide { 2 } else { 1 };
    let high = if feature.ids.high == 0 { 0 } else { wide(feature.ids.len) };
    let id_counts = if feature.id_counts == 0 { 0 } else { 2 * feature.ids.len };
    let weights = if feature.weights.is_none() { 0 } else { wide(feature.ids.len) };
    wide(id_words * feature.ids.len) + high + id_counts + weights + wide(split_words(feature))
}

fn split_words(feature: &Feature) -> usize {
    match feature.bags {
        Bags::Ragged { wide, num_bags, .. } => (num_bags + 1) * if wide { 2 } else { 1 },
        Bags::Each | Bags::Fixed { .. } => 0,
    }
}

/// Enqueues copying the tensors of a feature to `memory`, from word `at` on. Returns the feature with these tensors.
fn copy_feature(
    feature: &Feature,
    memory: &Buffer<u32>,
    at: &mut usize,
    stream: Stream,
) -> Result<Feature<'static>> {
    let mut copy = |from: u64, words: usize| copy_words(memory, at, from, words, stream);
    let mut ids = feature.ids;
    let id_words = if ids.key_type == KeyType::Wide { 2 } else { 1 };
    ids.address = copy(ids.address, id_words * ids.len)?;
    if ids.high != 0 {
        ids.high = copy(ids.high, ids.len)?;
    }
    let id_counts = if feature.id_counts == 0 { 0 } else { copy(feature.id_counts, 2 * ids.len)? };
    let weights = feature.weights.map(|weights| copy(weights, ids.len)).transpose()?;
    let bags = match feature.bags {
        Bags::Ragged { splits, wide, num_bags } => {
            Bags::Ragged { splits: copy(splits, split_words(feature))?, wide, num_bags }
        }
        bags => bags,
    };
    Ok(Feature { ids, bags, weights, id_counts, at_owner: false, rows: 0, ..feature.named("of a lookup") })
}

#[allow(unsafe_code)]
fn copy_words(memory: &Buffer<u32>, at: &mut usize, from: u64, words: usize, stream: Stream) -> Result<u64> {
    let to = memory.at(*at);
    *at += words.next_multiple_of(2);
    assert!(*at <= memory.len(), "as `num_input_words` says");
    if words > 0 {
        // SAFETY: The tensor has this many words, since its length was checked. The destination is within the memory, as checked
        // above.
        unsafe { stream.copy(to, from, 4 * words)? };
    }
    Ok(to)
}

impl GpuGroup {
    /// Returns whether there is a pending push whose lookup has left insertion to the commit.
    pub(crate) fn inserts_at_commit(&self) -> bool {
        self.ring.iter().any(|push| !matches!(*push.lookup.absent(), Absent::None))
    }

    /// Returns the pushes that a ticket names. `ticket`: its address on the device. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Ticket`] if one of them is not pending.
    pub(crate) fn resolve(&mut self, ticket: u64) -> Result<Vec<Named>> {
        self.check_fault()?;
        self.settle()?;
        self.workspace.device.synchronize()?;
        let ticket = read::<f32>(&self.workspace.device.context, ticket, TICKET_LEN)?;
        self.ring.resolve(&ticket).map_err(|what| Error::Ticket { tables: self.names(), what })
    }

    /// Checks that the tables have room for the absent keys of these pushes. Adds the counts of steps to the statistics, and
    /// changes nothing else. The device must be idle.
    ///
    /// # Errors
    /// [`Error::TableFull`] if a table does not have room for all of them, and its check mode is `Raise`.
    pub(crate) fn check_absent(&mut self, named: &[Named]) -> Result<()> {
        self.tables.iter_mut().try_for_each(GpuTable::count_steps)?;
        for table in 0..self.tables.len() {
            let Some(AbsentKeys { room, num_keys, num_new }) =
                self.absent_keys(named, table, Sights::ToCount)?
            else {
                continue;
            };
            let table = &mut self.tables[table];
            let sweeps = table.sweep_for(num_new, room.used(num_keys))?;
            let removable = sweeps.as_ref().map_or(0, |sweeps| sweeps.num_removable(0));
            table.forget_sweep(sweeps);
            table.check_capacity(num_new, removable)?;
        }
        Ok(())
    }

    /// Looks up the keys of a table that these pushes may insert. `None` if the table has room for all of them in any case.
    fn absent_keys(&self, named: &[Named], table: usize, sights: Sights) -> Result<Option<AbsentKeys>> {
        if !self.tables[table].may_refuse(self.max_absent(named, table)?) {
            return Ok(None);
        }
        let seen = self.sights(named, table)?;
        let keys: Vec<Key> = seen.iter().map(|(key, _)| *key).collect();
        let more: HashMap<Key, u64> = seen.into_iter().filter(|_| sights == Sights::ToCount).collect();
        let table = &self.tables[table];
        let room = table.room(keys.len(), 0)?;
        let absent = table.absent(&room, &keys)?.into_iter();
        let num_new = absent.filter(|key| table.admits(*key, more.get(key).copied().unwrap_or(0))).count();
        Ok(Some(AbsentKeys { room, num_keys: keys.len(), num_new: num_new as u64 }))
    }

    /// Returns the keys of a table that these pushes may insert, each once, in the order of their ids, with their sights. Some may have a row
    /// meanwhile.
    fn sights(&self, named: &[Named], table: usize) -> Result<Vec<(Key, u64)>> {
        let policy = self.tables[table].admission.as_ref().map(|admission| admission.admitter.policy);
        let counts_ids = policy.is_some_and(Admission::counts_ids);
        let (mut seen, mut places) = (Vec::<(Key, u64)>::new(), HashMap::new());
        for lookup in self.lookups_of(named) {
            let Absent::Waiting(inputs) = &*lookup.absent() else { continue };
            if !self.may_insert(&lookup, inputs, table) {
                continue;
            }
            for (key, num_ids) in inputs.counted_ids_of(table)? {
                match places.entry(key) {
                    Entry::Vacant(place) => {
                        place.insert(seen.len());
                        seen.push((key, if counts_ids { num_ids } else { 1 }));
                    }
                    Entry::Occupied(place) if counts_ids => seen[*place.get()].1 += num_ids,
                    Entry::Occupied(_) => {}
                }
            }
        }
        Ok(seen)
    }

    /// Counts the sights of the absent keys of these pushes, in tables with an admission policy that counts.
    fn count_sights(&mut self, named: &[Named]) -> Result<()> {
        for table in 0..self.tables.len() {
            if self.tables[table].counts_sights() {
                let seen = self.sights(named, table)?;
                self.tables[table].count_sights(seen)?;
            }
        }
        Ok(())
    }

    /// Removes rows to make room for the absent keys of these pushes.
    fn make_room_for_absent(&mut self, named: &[Named]) -> Result<()> {
        for number in 0..self.tables.len() {
            if self.tables[number].config.eviction.is_none() {
                continue;
            }
            let Some(AbsentKeys { room, num_keys, num_new }) =
                self.absent_keys(named, number, Sights::Counted)?
            else {
                continue;
            };
            let table = &mut self.tables[number];
            let sweeps = table.sweep_for(num_new, room.used(num_keys))?;
            let evicted = table.end_own_sweep(sweeps)?;
            table.note(Outcomes { evicted, ..Outcomes::default() });
        }
        Ok(())
    }

    /// Returns the maximum number of absent keys of a table in these pushes.
    fn max_absent(&self, named: &[Named], table: usize) -> Result<u64> {
        let mut most = 0;
        for lookup in self.lookups_of(named) {
            if let Absent::Waiting(inputs) = &*lookup.absent() {
                most += inputs.num_absent_of(table)?;
            }
        }
        Ok(most)
    }

    /// The lookups of pushes, each once.
    fn lookups_of(&self, named: &[Named]) -> Vec<Arc<SavedLookup>> {
        let mut lookups: Vec<Arc<SavedLookup>> = Vec::new();
        for push in named.iter().filter_map(|n| self.ring.get(n.number)) {
            if !lookups.iter().any(|lookup| Arc::ptr_eq(lookup, &push.lookup)) {
                lookups.push(push.lookup.clone());
            }
        }
        lookups
    }

    /// Whether a commit may insert keys of a table that a lookup has kept.
    fn may_insert(&self, lookup: &SavedLookup, inputs: &Inputs, table: usize) -> bool {
        inputs.are_later[table] && self.has_records_of(lookup, table)
    }

    /// Returns whether a table took part in a lookup and still has its records.
    fn has_records_of(&self, lookup: &SavedLookup, table: usize) -> bool {
        lookup.saved.generations.iter().any(|&(t, g)| t == table && self.tables[t].generation == g)
    }

    /// Inserts the absent keys of these pushes, in the order of the pushes, as far as there is room. Their gradients count in the commit that
    /// follows. The device must be idle, and `check_absent` must have succeeded.
    pub(crate) fn insert_absent(&mut self, named: &[Named], stream: Stream) -> Result<()> {
        self.workspace.enter(stream)?;
        self.admissions().for_each(|admission| admission.admitter.begin());
        let inserted = self.insert_counted(named, stream);
        inserted.inspect_err(|_| self.admissions().for_each(|admission| admission.admitter.undo()))
    }

    fn admissions(&mut self) -> impl Iterator<Item = &mut gpu_table::admission::Admission> {
        self.tables.iter_mut().filter_map(|table| table.admission.as_deref_mut())
    }

    /// Counts the sights of absent keys, and inserts those that are admitted.
    fn insert_counted(&mut self, named: &[Named], stream: Stream) -> Result<()> {
        self.count_sights(named)?;
        self.make_room_for_absent(named)?;
        for (index, named) in named.iter().enumerate() {
            let Some(push) = self.ring.get(named.number) else { continue };
            let (lookup, rows, factors) = (push.lookup.clone(), push.rows.clone(), push.factors.clone());
            if let Some(lookup) = self.look_up_absent(&lookup, stream)? {
                self.take_uses(&lookup, RING as u32, self.num_commits + 1, stream)?;
                let push = Push {
                    lookup,
                    rows,
                    factors,
                    copy: None,
                    sums: None,
                    window: None,
                    is_merged: false,
                    _keep: None,
                };
                self.inserted.push((index, named.weight, push));
            }
        }
        Ok(())
    }

    /// Returns the lookup of the ids that another one did not find, or `None` if it found all. Inserts the keys, unless an earlier
    /// call has inserted them.
    fn look_up_absent(&mut self, lookup: &SavedLookup, stream: Stream) -> Result<Option<Arc<SavedLookup>>> {
        let mut absent = lookup.absent();
        match &*absent {
            Absent::None => Ok(None),
            Absent::Inserted(inserted) => Ok(Some(inserted.clone())),
            Absent::Waiting(inputs) if inputs.absent_ids()?.is_empty() => Ok(None),
            Absent::Waiting(inputs) => {
                let saved = self.insert_inputs(lookup, inputs, stream)?;
                let inserted = Arc::new(SavedLookup::new(lookup.number, saved));
                let before = std::mem::replace(&mut *absent, Absent::Inserted(inserted.clone()));
                if let Absent::Waiting(inputs) = before {
                    self.workspace.give_back(inputs.memory);
                }
                Ok(Some(inserted))
            }
        }
    }

    /// Looks up the absent ids of a lookup and inserts their keys. Waits for the device.
    fn insert_inputs(
        &mut self,
        lookup: &SavedLookup,
        inputs: &Inputs,
        stream: Stream,
    ) -> Result<crate::step::Saved> {
        for (number, feature) in inputs.features.iter().enumerate() {
            if !self.may_insert(lookup, inputs, feature.table) {
                inputs.pass_over(number, stream)?;
            }
        }
        let mut inserts: Vec<bool> =
            (0..self.tables.len()).map(|table| self.may_insert(lookup, inputs, table)).collect();
        self.make_room(&inputs.features, Some(inputs), &mut inserts, false, false, &mut None, stream)?;
        // `make_rows` computes the coefficients of weighted ids, so it needs memory for rows.
        let (features, rows) = self.with_rows(&inputs.features, lookup.saved.is_weighted())?;
        let absent = AbsentIds { known: inputs.known_address(), ..AbsentIds::default() };
        let saved =
            self.workspace.lookup(&mut self.tables, &features, &inserts, absent, true, None, stream)?;
        self.tables.iter_mut().for_each(GpuTable::reserve_soon);
        self.workspace.device.synchronize()?;
        rows.into_iter().for_each(|rows| self.workspace.give_back(rows));
        for table in &mut self.tables {
            let inserted = table.count_inserted()?;
            table.note(Outcomes { inserted, ..Outcomes::default() });
            table.forget_distinct()?;
        }
        self.check_fault()?;
        saved.ok_or_else(|| Error::State("a lookup that is saved was not".into()))
    }

    /// Returns the features, with memory for their rows if `wanted`.
    fn with_rows(
        &mut self,
        features: &[Feature<'static>],
        wanted: bool,
    ) -> Result<(Vec<Feature<'static>>, Option<Buffer<u32>>)> {
        if !wanted {
            return Ok((features.to_vec(), None));
        }
        let dims = features.iter().map(|f| self.tables[f.table].config.dim.next_multiple_of(4));
        let words: Vec<usize> = features.iter().zip(dims).map(|(f, dim)| f.num_bags() * dim).collect();
        let memory = self.workspace.take_memory(words.iter().sum::<usize>().max(1))?;
        let mut at = 0;
        let place = |(feature, words): (&Feature<'static>, &usize)| {
            at += words;
            Feature { rows: memory.at(at - words), ..*feature }
        };
        let features = features.iter().zip(&words).map(place).collect();
        Ok((features, Some(memory)))
    }
}
