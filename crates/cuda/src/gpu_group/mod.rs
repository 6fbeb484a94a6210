//! Tables that are looked up together: the four calls of a training step on a GPU.
//!
//! As `sok_core::host_group`, but for time: a call puts work onto the framework's stream and returns. Which pushes a ticket names is
//! found on the device; the host learns it from memory that the device writes to, at the latest when the next ticket comes.

mod absent;
mod commit;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use sok_core::error::{Error, Result};
use sok_core::host_group::{Binding, check_owner};
use sok_core::push::Keep;
use sok_core::table::{Insertion, Outcomes, Table, TableConfig};
use sok_core::ticket::{PushRing, RING, mark};

use crate::device::{Device, Stream};
use crate::gpu_table::{GpuTable, no_place};
use crate::layout::{EXPONENTS, Gradients, NewTicket, Prepared, REPORT, RESOLVED, Side};
use crate::memory::{Buffer, Shared, read};
use crate::step::{AbsentIds, Feature, KeyType, Saved, Workspace};

use absent::{Absent, Inputs, KnownRecords};

/// A lookup's number as the caller has it.
#[derive(Clone, Copy, Debug)]
pub enum LookupNumber {
    Known(u64),
    /// Two words on the device, where the lookup wrote them.
    At(u64),
}

/// The gradients of a lookup's outputs, float32 `(bags, dim)` of each feature on the device.
pub struct OutputGradients {
    pub rows: Vec<u64>,
    /// With it the rows stay where they are until they are applied; without, they are merged or copied at once.
    pub keep: Option<Keep>,
    /// A gradient that is not finite makes the ticket NaN.
    pub check_finite: bool,
}

/// The gradients of a lookup until a ticket names them.
struct Push {
    lookup: Arc<SavedLookup>,
    rows: Vec<u64>,
    /// What holds `rows`, if it is not the framework.
    copy: Option<Buffer<u32>>,
    /// Merged gradients, if they are.
    sums: Option<Buffer<u32>>,
    _keep: Option<Keep>,
}

struct SavedLookup {
    number: u64,
    saved: Saved,
    /// Where the device takes gradients and records from: those of the push that it was told of last.
    sides: Mutex<Vec<Side>>,
    absent: Mutex<Absent>,
}

impl SavedLookup {
    fn new(number: u64, saved: Saved) -> SavedLookup {
        SavedLookup { number, saved, sides: Mutex::default(), absent: Mutex::default() }
    }

    fn absent(&self) -> MutexGuard<'_, Absent> {
        self.absent.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn sides(&self) -> MutexGuard<'_, Vec<Side>> {
        self.sides.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// What is committed and not applied yet.
#[derive(Clone, Copy, Default, PartialEq)]
enum Committed {
    #[default]
    Nothing,
    /// The one push that was pending, if its ticket was good and named it; `GpuGroup::carried` has it once that is known.
    Alone(u64),
    /// All of `GpuGroup::combined`.
    Combined,
}

/// Several pushes as one.
struct Combined {
    saved: Saved,
    sums: Buffer<u32>,
}

pub struct GpuGroup {
    tables: Vec<GpuTable>,
    workspace: Workspace,
    binding: Option<Binding>,
    next_lookup: u64,
    lookups: VecDeque<Arc<SavedLookup>>,
    /// By address of their number: lookups whose caller has it on the device.
    by_address: HashMap<u64, u64>,
    ring: PushRing<Push>,
    pushes_without_optimizer: u32,
    committed: Committed,
    /// Pushes that a ticket is known to have named, and that are not applied yet.
    carried: Vec<(f32, Push)>,
    /// What earlier steps have accumulated, and the last commit of several pushes.
    combined: Option<Combined>,
    /// Of the last commit that the host has not looked at yet.
    unseen: Option<u64>,
    next_commit: u64,
    /// Ids looked up to insert, by table: since the last commit.
    ids_since: Vec<u64>,
    report: Shared,
    resolved: Buffer<u32>,
    prepared: Buffer<u32>,
    is_bad: Buffer<u32>,
    totals: Buffer<u64>,
    norms: Buffer<f32>,
    factors: Buffer<f32>,
    norm: Buffer<f64>,
    nowhere: Buffer<u32>,
}

impl GpuGroup {
    pub fn new(device: &Arc<Device>, configs: Vec<TableConfig>) -> Result<GpuGroup> {
        let tables = configs.into_iter().map(|c| GpuTable::new(device, c)).collect::<Result<Vec<_>>>()?;
        GpuGroup::with_tables(device, tables)
    }

    pub fn with_tables(device: &Arc<Device>, tables: Vec<GpuTable>) -> Result<GpuGroup> {
        let (context, num_tables) = (&device.context, tables.len());
        let widest = tables.iter().map(|t| t.config.dim).max().unwrap_or(1);
        Ok(GpuGroup {
            workspace: Workspace::new(device, &tables)?,
            binding: None,
            next_lookup: 1,
            lookups: VecDeque::new(),
            by_address: HashMap::new(),
            ring: PushRing::default(),
            pushes_without_optimizer: 0,
            committed: Committed::Nothing,
            carried: Vec::new(),
            combined: None,
            unseen: None,
            next_commit: 1,
            ids_since: vec![0; num_tables],
            report: Shared::new(context, REPORT + 3 * num_tables)?,
            resolved: Buffer::new(context, RESOLVED)?,
            prepared: Buffer::new(context, size_of::<Prepared>() / 4)?,
            is_bad: Buffer::new(context, 1)?,
            totals: Buffer::new(context, num_tables * (EXPONENTS + 1))?,
            norms: Buffer::new(context, num_tables)?,
            factors: Buffer::new(context, num_tables)?,
            norm: Buffer::new(context, 1)?,
            nowhere: Buffer::new(context, 16 * (widest + 4))?,
            tables,
        })
    }

    pub fn num_tables(&self) -> usize {
        self.tables.len()
    }

    pub fn table(&self, number: usize) -> &dyn Table {
        &self.tables[number]
    }

    pub fn gpu_table(&self, number: usize) -> &GpuTable {
        &self.tables[number]
    }

    pub fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        &mut self.tables[number]
    }

    pub fn tables_mut(&mut self) -> impl Iterator<Item = &mut dyn Table> {
        self.tables.iter_mut().map(|t| t as &mut dyn Table)
    }

    pub fn names(&self) -> String {
        self.tables.iter().map(|t| format!("`{}`", t.config.name)).collect::<Vec<_>>().join(", ")
    }

    /// Waits for the last commit.
    ///
    /// # Errors
    /// What the device found in it.
    pub fn pending_pushes(&mut self) -> Result<usize> {
        self.settle()?;
        Ok(self.ring.len())
    }

    /// Those of the last commit too, if the host has not heard of it.
    pub fn known_pushes(&self) -> usize {
        self.ring.len()
    }

    /// Memory that steps keep.
    pub fn step_bytes(&self) -> usize {
        let lookups = self.lookups.iter().map(|l| l.saved.memory.num_bytes() + l.absent().num_bytes());
        let sums = self.ring.iter().flat_map(|p| p.sums.iter().chain(&p.copy)).map(Buffer::num_bytes);
        let combined = self.combined.iter().map(|c| c.saved.memory.num_bytes() + c.sums.num_bytes());
        lookups.chain(sums).chain(combined).sum::<usize>() + self.workspace.num_bytes()
    }

    /// Keys refused since this was last asked, by table, where the check mode says to warn.
    pub fn take_refused(&mut self) -> Vec<(String, u64)> {
        let take = |t: &mut GpuTable| (t.config.name.clone(), std::mem::take(&mut t.refused_to_warn));
        self.tables.iter_mut().map(take).filter(|(_, refused)| *refused > 0).collect()
    }

    /// What went wrong on the device, once.
    pub fn take_fault(&mut self) -> Option<Error> {
        let fault = &self.workspace.fault;
        let kind = fault.get(1);
        if kind == 0 {
            return None;
        }
        let (table, id) = (fault.get(3) as usize, fault.get_wide(4));
        (0..6).for_each(|word| fault.set(word, 0));
        let config = &self.tables.get(table)?.config;
        Some(match kind {
            1 => Error::OutOfVocabulary {
                table: config.name.clone(),
                feature: None,
                id: id as i64,
                last: config.vocabulary_size.unwrap_or_default().wrapping_sub(1),
            },
            2 => Error::argument(format!(
                "row_splits of a call before, for table `{}`: they must start at 0, never fall and end at the number of ids. \
                 Wrong at row {id}",
                config.name
            )),
            3 => no_place(&config.name),
            _ => Error::Ticket {
                tables: self.names(),
                what: "a gradient came with the number of another lookup than the device has. Nothing is known to be wrong before \
                       this step, which has used the wrong rows"
                    .into(),
            },
        })
    }

    /// Waits for all that was started. Gives what went wrong in it, once.
    pub fn take_failure(&mut self) -> Option<Error> {
        let waited = self.workspace.device.synchronize();
        waited.and_then(|()| self.settle()).err().or_else(|| self.take_fault())
    }

    fn check_fault(&mut self) -> Result<()> {
        self.take_fault().map_or(Ok(()), Err)
    }

    // ---- lookup

    /// Puts the lookup of all features of a layer's call onto the stream. Gives its number, for `push`; 0 without `save`.
    /// `number_to`: where the number goes on the device.
    ///
    /// # Errors
    /// Lengths that do not add up, a table that is full and asked to say so: nothing has changed. No memory: no row has changed, but a
    /// table that may come to its `max_capacity` may have got the new keys. Errors that the device found in calls before.
    pub fn lookup(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        stream: Stream,
    ) -> Result<u64> {
        self.check_fault()?;
        for feature in features {
            feature.validate()?;
            if feature.table >= self.tables.len() {
                return Err(Error::argument("no such table in the group"));
            }
        }
        self.workspace.enter(stream)?;
        let insert = insertion == Insertion::AtLookup;
        let mut inserts = vec![insert; self.tables.len()];
        if insert {
            self.make_room(features, None, &mut inserts, save, stream)?;
        }
        // What is not learned from counts its new keys apart: the device counts hits of those that learn alone.
        let counts_apart = insert && !save;
        if counts_apart {
            self.workspace.device.synchronize()?;
            self.tables.iter_mut().try_for_each(GpuTable::count_steps)?;
        }
        let number = if save { self.next_lookup } else { 0 };
        let to = number_to.map(|to| (to, number));
        let inputs = (insertion == Insertion::AtCommit && save)
            .then(|| Inputs::keep(&mut self.workspace, &self.tables, features, stream))
            .transpose()?;
        let absent = AbsentIds { count: inputs.as_ref().map_or(0, Inputs::count_address), known: 0 };
        let saved = self.workspace.lookup(&mut self.tables, features, &inserts, absent, save, to, stream)?;
        if let Some(inputs) = &inputs {
            inputs.keep_records(self.workspace.found_records(), stream)?;
        }
        self.tables.iter_mut().for_each(GpuTable::reserve_soon);
        let mut takes_part = vec![false; self.tables.len()];
        features.iter().for_each(|f| takes_part[f.table] = true);
        self.tables.iter_mut().zip(takes_part).filter(|(_, takes)| *takes).for_each(|(t, _)| t.count_call());
        if counts_apart {
            self.workspace.device.synchronize()?;
            for table in &mut self.tables {
                let inserted = table.count_inserted()?;
                table.note(Outcomes { inserted, ..Outcomes::default() });
            }
        }
        if let Some(saved) = saved {
            let lookup = SavedLookup::new(number, saved);
            if let Some(inputs) = inputs {
                *lookup.absent() = Absent::Waiting(inputs);
            }
            self.save(lookup);
            number_to.map(|to| self.by_address.insert(to, number));
        }
        Ok(number)
    }

    /// Room for all keys that the call may bring. Where a table might have to refuse some, inserts those that fit, in their order, and
    /// has the lookup insert none: that waits for the device.
    ///
    /// `known`: of ids with a record there, none is inserted.
    fn make_room(
        &mut self,
        features: &[Feature],
        known: Option<&KnownRecords>,
        inserts: &mut [bool],
        save: bool,
        stream: Stream,
    ) -> Result<()> {
        let mut ids = vec![0u64; self.tables.len()];
        features.iter().for_each(|f| ids[f.table] += f.ids.len as u64);
        let new = |tables: &[GpuTable], t: usize| tables[t].most_new(ids[t]);
        let soon = |tables: &[GpuTable], t: usize| tables[t].most_new_soon(ids[t]);
        let refuses = |tables: &[GpuTable], t: usize| tables[t].may_refuse(new(tables, t));
        let all = 0..self.tables.len();
        let is_tight =
            |tables: &[GpuTable], t: usize| !tables[t].has_room(new(tables, t)) || refuses(tables, t);
        if all.clone().any(|t| is_tight(&self.tables, t)) {
            self.settle()?;
            let is_tight_soon =
                |t: usize| !self.tables[t].has_room(soon(&self.tables, t)) || refuses(&self.tables, t);
            if all.clone().any(is_tight_soon) {
                self.workspace.device.synchronize()?;
                self.tables.iter_mut().try_for_each(GpuTable::learn)?;
                for t in all.clone() {
                    let (most, soon) = (new(&self.tables, t), soon(&self.tables, t));
                    if !self.tables[t].has_room(soon) && !refuses(&self.tables, t) {
                        self.tables[t].make_room(most, soon, stream)?;
                    }
                }
                self.admit(features, known, &ids, inserts, save)?;
            }
        }
        for t in all {
            if inserts[t] {
                self.tables[t].expect(ids[t]);
                self.ids_since[t] += ids[t];
            }
        }
        Ok(())
    }

    fn admit(
        &mut self,
        features: &[Feature],
        known: Option<&KnownRecords>,
        ids: &[u64],
        inserts: &mut [bool],
        save: bool,
    ) -> Result<()> {
        let full: Vec<usize> = (0..self.tables.len())
            .filter(|&t| ids[t] > 0 && self.tables[t].may_refuse(self.tables[t].most_new(ids[t])))
            .collect();
        if full.is_empty() {
            return Ok(());
        }
        self.tables.iter_mut().try_for_each(GpuTable::count_steps)?;
        let mut new = Vec::new();
        for &t in &full {
            let keys = self.active_keys(features, known, t)?;
            let room = self.tables[t].room(keys.len(), 0)?;
            let absent = self.tables[t].absent(&room, &keys)?;
            self.tables[t].check_capacity(absent.len() as u64)?;
            new.push((room, absent));
        }
        for (t, (room, new)) in full.into_iter().zip(new) {
            let outcomes = self.tables[t].admit(&room, &new)?;
            self.tables[t].note(outcomes);
            if save {
                self.tables[t].take_hits(outcomes.inserted);
            }
            inserts[t] = false;
        }
        Ok(())
    }

    /// Keys of a table that training would insert, as they come. Nothing may be under way.
    fn active_keys(
        &self,
        features: &[Feature],
        known: Option<&KnownRecords>,
        table: usize,
    ) -> Result<Vec<u64>> {
        let mut keys = Vec::new();
        for (number, feature) in features.iter().enumerate().filter(|(_, f)| f.table == table) {
            let records = known.map(|known| known.of_feature(number));
            let is_known = |i: usize| records.is_some_and(|records| records[i] != 0);
            let active = self.active_keys_of(feature)?.into_iter();
            keys.extend(active.filter(|(i, _)| !is_known(*i)).map(|(_, key)| key));
        }
        Ok(keys)
    }

    /// Keys of a feature that training would insert, with their positions.
    fn active_keys_of(&self, feature: &Feature) -> Result<Vec<(usize, u64)>> {
        let (context, ids) = (&self.workspace.device.context, feature.ids);
        let keys: Vec<u64> = match ids.key_type {
            KeyType::Wide => read::<u64>(context, ids.address, ids.len)?,
            KeyType::Signed => {
                read::<i32>(context, ids.address, ids.len)?.into_iter().map(|k| i64::from(k) as u64).collect()
            }
            KeyType::Unsigned => {
                read::<u32>(context, ids.address, ids.len)?.into_iter().map(u64::from).collect()
            }
            KeyType::Words => {
                let (low, high) =
                    (read::<u32>(context, ids.address, ids.len)?, read::<u32>(context, ids.high, ids.len)?);
                low.into_iter().zip(high).map(|(l, h)| u64::from(l) | u64::from(h) << 32).collect()
            }
        };
        let weights = feature.weights.map(|w| read::<f32>(context, w, ids.len)).transpose()?;
        let config = &self.tables[feature.table].config;
        let is_active = |&(i, key): &(usize, u64)| {
            feature.padding_key != Some(key)
                && config.is_in_vocabulary(key)
                && weights.as_ref().is_none_or(|w| w[i] != 0.0)
        };
        Ok(keys.into_iter().enumerate().filter(is_active).collect())
    }

    fn save(&mut self, saved: SavedLookup) {
        self.next_lookup += 1;
        for (table, _) in &saved.saved.generations {
            self.tables[*table].newest_lookup = saved.number;
        }
        self.lookups.push_back(Arc::new(saved));
        if self.lookups.len() as u64 > RING {
            self.forget_lookups(self.lookups[1].number);
        }
    }

    /// Drops the lookups older than `oldest`; their memory serves the next ones.
    fn forget_lookups(&mut self, oldest: u64) {
        while self.lookups.front().is_some_and(|l| l.number < oldest) {
            if let Some(lookup) = self.lookups.pop_front() {
                self.reuse_lookup(lookup);
            }
        }
        self.by_address.retain(|_, number| *number >= oldest);
        let carried = self.carried.iter().map(|(_, push)| push);
        let needed = self.ring.iter().chain(carried).map(|push| push.lookup.number);
        let oldest = needed.chain(self.lookups.front().map(|l| l.number)).min().unwrap_or(self.next_lookup);
        if self.combined.is_none() {
            self.tables.iter_mut().for_each(|t| t.forget_lookups(oldest));
        }
    }

    fn reuse(&mut self, push: Push) {
        push.sums.into_iter().chain(push.copy).for_each(|memory| self.workspace.give_back(memory));
        self.reuse_lookup(push.lookup);
    }

    fn reuse_lookup(&mut self, lookup: Arc<SavedLookup>) {
        let Some(lookup) = Arc::into_inner(lookup) else { return };
        self.workspace.give_back(lookup.saved.memory);
        match lookup.absent.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Absent::Waiting(inputs) => self.workspace.give_back(inputs.memory),
            Absent::Inserted(lookup) => self.reuse_lookup(lookup),
            Absent::None => {}
        }
    }

    // ---- push

    fn lookup_of(&mut self, number: LookupNumber) -> Result<u64> {
        match number {
            LookupNumber::Known(number) => Ok(number),
            LookupNumber::At(address) => match self.by_address.remove(&address) {
                Some(number) => Ok(number),
                // The framework has moved it.
                None => {
                    self.workspace.device.synchronize()?;
                    Ok(read::<u64>(&self.workspace.device.context, address, 1)?[0])
                }
            },
        }
    }

    /// Takes the gradients of a lookup's outputs. `ticket`: float32 `(64, 2)`; `weight_gradients`: float32 `(ids,)` of each feature
    /// that has weights, in their order: all on the device.
    ///
    /// # Errors
    /// As `HostGroup::push`.
    pub fn push(
        &mut self,
        number: LookupNumber,
        gradients: OutputGradients,
        gradient_lens: &[usize],
        weight_gradients: &[(usize, u64)],
        ticket: u64,
        stream: Stream,
    ) -> Result<()> {
        self.check_fault()?;
        let lookup = self.lookup_of(number)?;
        let saved = self.lookups.iter().find(|l| l.number == lookup).cloned().ok_or_else(|| Error::Ticket {
            tables: self.names(),
            what: format!("a gradient comes for a lookup that is gone: older than the newest {RING}, or from before a load"),
        })?;
        self.check_gradients(&saved.saved, gradient_lens)?;
        if self.binding.is_none() && self.pushes_without_optimizer > 0 {
            return Err(Error::UnwrappedOptimizer { tables: self.names() });
        }
        self.workspace.enter(stream)?;
        self.workspace.describe(&mut self.tables, stream)?;
        let workspace = &mut self.workspace;
        let is_bad = if gradients.check_finite { self.is_bad.address() } else { 0 };
        let given = gradients.rows.iter().zip(gradient_lens);
        let given: Vec<_> = given.map(|(from, len)| Gradients { from: *from, count: *len as u64 }).collect();
        let number_of = self.ring.next_number();
        let ticket = NewTicket {
            ticket,
            is_bad,
            row: (number_of % RING) as u32,
            mark: mark(number_of),
            number: if let LookupNumber::At(address) = number { address } else { 0 },
            expected: [lookup as u32, (lookup >> 32) as u32],
            fault: workspace.fault.address(),
        };
        let (mut rows, mut copied, mut copy, mut sums) = (gradients.rows, &[][..], None, None);
        // Norms are of merged gradients.
        let is_merged_anyway = self.binding.is_some_and(|b| b.needs_norm || b.update.clipnorm.is_some());
        // Those of keys that a commit is to insert cannot be merged yet.
        let is_later = !matches!(*saved.absent(), Absent::None);
        let is_cheaper = !is_merged_anyway && saved.saved.has_few_gradients();
        let copies = gradients.keep.is_none() && (is_later || is_cheaper) || !saved.saved.is_aligned(&rows);
        if copies {
            let (memory, places) = workspace.take_copy(&saved.saved)?;
            (rows, copied, copy) = (places, &given, Some(memory));
        }
        if gradients.check_finite {
            workspace.check_finite(&given, &self.is_bad, stream)?;
        }
        let sides = workspace.sides(&self.tables, &saved.saved, &rows, self.nowhere.address());
        let mut products = vec![0; if weight_gradients.is_empty() { 0 } else { sides.len() }];
        weight_gradients.iter().for_each(|(feature, to)| products[*feature] = *to);
        let written = workspace.write_ticket(&saved.saved, &sides, copied, &products, &ticket, stream);
        // A ticket that is not written has not told what was found.
        written.or_else(|error| self.is_bad.zero(stream).and(Err(error)))?;
        *saved.sides() = sides;
        if copies {
            workspace.copy_gradients(&saved.saved, stream)?;
        }
        if !weight_gradients.is_empty() {
            workspace.weight_gradients(&saved.saved, copied.len(), stream)?;
        }
        if gradients.keep.is_none() && !copies {
            let merged = workspace.take_sums(&saved.saved)?;
            workspace.merge(&saved.saved, merged.address(), stream)?;
            sums = Some(merged);
        }
        saved.saved.generations.iter().for_each(|(t, _)| self.tables[*t].count_call());
        self.pushes_without_optimizer += u32::from(self.binding.is_none());
        let push = Push { lookup: saved, rows, copy, sums, _keep: gradients.keep };
        if let (_, Some(fallen)) = self.ring.add(push) {
            self.reuse(fallen);
        }
        Ok(())
    }

    fn check_gradients(&self, saved: &Saved, lens: &[usize]) -> Result<()> {
        if lens.len() != saved.features.len() {
            return Err(Error::argument(format!(
                "a push brings the gradient of each feature. Received: {} of {}",
                lens.len(),
                saved.features.len()
            )));
        }
        match saved.features.iter().zip(lens).find(|(f, len)| f.num_bags * f.dim != **len) {
            None => Ok(()),
            Some((f, len)) => Err(Error::argument(format!(
                "the gradient of a feature of table `{}` must hold {} numbers. Received: {len}",
                self.tables[f.table].config.name,
                f.num_bags * f.dim
            ))),
        }
    }

    // ---- binding

    /// As `HostGroup::bind`.
    pub fn bind(&mut self, binding: Binding) -> Result<()> {
        let (binding, keeps_states) = binding.after(self.binding.as_ref())?;
        for table in &mut self.tables {
            table.set_update_rule(Some(binding.update), keeps_states)?;
        }
        self.binding = Some(binding);
        self.pushes_without_optimizer = 0;
        Ok(())
    }

    /// Whether this optimizer may update the tables now. Changes nothing.
    ///
    /// # Errors
    /// [`Error::State`] if another optimizer has been bound since, or the records lost their states.
    pub fn check_owner(&self, binding: &Binding) -> Result<()> {
        let tables = self.tables.iter().map(|t| t as &dyn Table);
        check_owner(self.binding.as_ref(), binding, tables)
    }

    /// As `HostGroup::take_over`.
    pub fn take_over(&mut self, binding: &Binding) -> Result<()> {
        self.check_owner(binding)?;
        if self.binding.is_some_and(|b| b.owner == binding.owner) { Ok(()) } else { self.bind(*binding) }
    }

    pub fn binding(&self) -> Option<&Binding> {
        self.binding.as_ref()
    }
}
