//! The table in the memory of the host. It is the default, and the reference for tables on other devices.

use crate::contract::batch::Feature;
use crate::contract::departures::Reason;
use crate::contract::record::RecordLayout;
use crate::contract::table::{CheckMode, Insertion, Missing, Outcomes, TableConfig, TableStats};
use crate::error::Result;
use crate::formula::update::{Update, UpdateScalars};
use crate::host::admission::Admitter;
use crate::host::changes::Changes;
use crate::host::eviction::{Evictor, Removable};
use crate::host::features::{Mode, Role, role};
use crate::host::find::{FirstRecord, Whole};
use crate::host::missed_steps::MissedSteps;
use crate::key::{Key, hash};
use crate::memory;
use crate::policy::sweep::Rank;
use crate::store::arena::{Arena, NO_RECORD, RecordNumber};
use crate::store::format::{Chance, RecordFormat};
use crate::store::index::Index;
use crate::store::journal::Journal;
use crate::store::record_set::RecordSet;

/// How many removals ahead buckets are prefetched.
const AHEAD: usize = 8;

/// A table in the memory of the host.
pub struct HostTable {
    pub(crate) config: TableConfig,
    pub(crate) first: FirstRecord,
    pub(crate) update: Option<Update>,
    pub(crate) index: Index,
    pub(crate) arena: Arena,
    /// Erased records that steps may still refer to, each with the number of the newest lookup that may do so.
    pub(crate) retired: Vec<(u64, RecordNumber)>,
    pub(crate) newest_lookup: u64,
    /// Number of the step in progress, from 1, which policies count. A commit ends it.
    pub(crate) step: u64,
    /// Uses of the rows, if the table has an eviction policy or a time to live.
    pub(crate) evictor: Option<Box<Evictor>>,
    /// Counts of keys without a row, if the table has an admission policy.
    pub(crate) admitter: Option<Box<Admitter>>,
    /// The steps that rows without gradients have missed, unless the update mode is local.
    pub(crate) missed: Option<Box<MissedSteps>>,
    /// What has changed since dumps, once there was one.
    pub(crate) changes: Option<Box<Changes>>,
    /// Increases when all record numbers become invalid. Gradients that were not applied yet are dropped then.
    pub(crate) generation: u64,
    /// Whether the states were loaded, and no optimizer was bound or has updated the table since.
    pub(crate) has_loaded_states: bool,
    pub(crate) stats: TableStats,
    /// Insertions of the current call.
    pub(crate) journal: Journal,
    /// Refused keys that the caller is to be warned of.
    pub(crate) refused_to_warn: u64,
}

impl HostTable {
    /// # Errors
    /// [`Error::Argument`] for an invalid configuration, [`Error::Memory`] if there is no memory for `initial_capacity`.
    pub fn new(config: TableConfig) -> Result<HostTable> {
        let room = config.initial_capacity as usize;
        HostTable::with_room(config, room)
    }

    /// Makes a table whose index has about the size that it would grow to with `num_rows` rows.
    ///
    /// # Errors
    /// The same as `new`.
    pub(crate) fn with_room(config: TableConfig, num_rows: usize) -> Result<HostTable> {
        config.validate()?;
        // `Index::new` has room at the lowest load at which a segment grows, .6, and rounds up. Grown segments have more.
        let room = (num_rows - num_rows / 5).max(config.initial_capacity as usize);
        let first = FirstRecord {
            seed: config.seed,
            initializer: config.initializer,
            layout: RecordLayout::new(config.dim, None),
            format: RecordFormat {
                row_type: config.row_type,
                dim: config.dim,
                rounds_by_chance: config.stochastic_rounding,
            },
        };
        let mut table = HostTable {
            index: Index::new(room)?,
            arena: Arena::new(first.format.width(0))?,
            first,
            update: None,
            retired: Vec::new(),
            newest_lookup: 0,
            step: 1,
            evictor: config.counting().map(|policy| Box::new(Evictor::new(policy, config.keeps_expired()))),
            admitter: config.admission.map(Admitter::new).transpose()?.map(Box::new),
            missed: None,
            changes: None,
            generation: 0,
            has_loaded_states: false,
            stats: TableStats::default(),
            journal: Journal::default(),
            refused_to_warn: 0,
            config,
        };
        table.arena.reserve(table.config.initial_capacity as usize)?;
        Ok(table)
    }

    /// Inserts a key that has no record. `fills`: whether the record gets its first values.
    pub(crate) fn insert_absent(&mut self, key: Key, fills: bool) -> Result<RecordNumber> {
        let (arena, first, journal) = (&mut self.arena, &self.first, &mut self.journal);
        let mut whole = Whole { arena, first, journal };
        let record = if fills { whole.make(key)? } else { whole.allocate(key)?.0 };
        self.index.insert(hash(key), key, record)?;
        Ok(record)
    }

    /// Whether the table has a policy. Others do not count steps.
    pub(crate) fn has_policy(&self) -> bool {
        self.evictor.is_some() || self.admitter.is_some()
    }

    /// Ends the step in progress, by this commit of the group.
    pub(crate) fn end_step(&mut self, commit: u64) {
        self.expire(commit);
        if let Some(evictor) = self.evictor.as_mut().filter(|_| self.config.trainable) {
            evictor.end_step(self.step);
        }
        if let Some(admitter) = self.admitter.as_mut().filter(|_| self.config.trainable) {
            admitter.end_step(self.step);
        }
        if self.has_policy() {
            // A damaged file may bring any number.
            self.step = self.step.saturating_add(1);
        }
    }

    /// Starts a call that may insert.
    pub(crate) fn begin(&mut self) {
        self.journal.begin(self.arena.next_unused(), self.room());
        if let Some(evictor) = &mut self.evictor {
            evictor.begin();
        }
        if let Some(admitter) = &mut self.admitter {
            admitter.begin();
        }
        if let Some(changes) = &mut self.changes {
            changes.epochs.begin();
        }
        if self.newest_lookup == 0 {
            self.release_retired(1);
        }
    }

    /// The chance by which an update rounds.
    pub(crate) fn chance(&self, scalars: &UpdateScalars) -> Chance {
        Chance { seed: self.config.seed, step: scalars.step as u32 }
    }

    /// Number of rows that the table has room for.
    pub(crate) fn room(&self) -> u64 {
        self.config.capacity().saturating_sub(self.index.len() as u64)
    }

    /// Number of rows that must go before so many new ones fit. A load may have left more rows than there is room for: these go, too.
    pub(crate) fn num_too_many(&self, num_new: u64) -> u64 {
        if num_new == 0 {
            return 0;
        }
        (self.index.len() as u64 + num_new).saturating_sub(self.config.capacity())
    }

    /// Notes which rows the call has inserted, and gives them their first scores.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn start_new_rows(&mut self) -> Result<()> {
        if let Some(changes) = &mut self.changes {
            changes.reserve(self.arena.next_unused())?;
            changes.start(self.journal.iter().map(|(_, record)| record));
        }
        if let Some(missed) = &mut self.missed {
            missed.start(self.arena.next_unused(), self.journal.iter().map(|(_, record)| record))?;
        }
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        evictor.start(self.step, self.arena.next_unused(), self.journal.iter())
    }

    /// Returns the rows that a sweep may remove; `None` without an eviction policy. These rows stay: that of the out-of-vocabulary key, the
    /// rows of lookups whose gradients were not applied, and the rows that `used` adds.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn removable(&self, used: &dyn Fn(&mut RecordSet)) -> Result<Option<Removable<'_>>> {
        let Some(evictor) = self.evictor.as_ref().filter(|_| self.config.eviction.is_some()) else {
            return Ok(None);
        };
        let next = self.arena.next_unused();
        let mut excluded = RecordSet::new(next)?;
        let retired = self.retired.iter().map(|(_, record)| record);
        self.arena.free().iter().chain(retired).for_each(|&record| excluded.insert(record));
        if let Some(key) = self.config.out_of_vocabulary_key {
            excluded.insert(self.index.find(hash(key), key));
        }
        evictor.add_rows_in_progress(self.generation, &mut excluded);
        used(&mut excluded);
        Ok(Some(Removable { evictor, excluded, next }))
    }

    /// Removes rows until there is room for `num_new` more, as far as the eviction policy allows. Returns how many went.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn make_room(
        &mut self,
        num_new: u64,
        used: &dyn Fn(&HostTable, &mut RecordSet),
    ) -> Result<u64> {
        let needed = self.num_too_many(num_new);
        if needed == 0 {
            return Ok(0);
        }
        let Some(removable) = self.removable(&|set| used(self, set))? else { return Ok(0) };
        let going = removable.lowest(needed, self.config.capacity())?;
        self.remove(Reason::Evicted, &going)?;
        self.journal.room = self.room();
        Ok(going.len() as u64)
    }

    /// Removes rows of a table that counts their uses, and remembers them, in their order.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    pub(crate) fn remove(&mut self, reason: Reason, going: &[(Rank, RecordNumber)]) -> Result<()> {
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        self.arena.reserve_free(self.retired.len() + going.len())?;
        memory::reserve(&mut self.retired, going.len(), "the numbers of removed rows")?;
        if let Some(changes) = &mut self.changes {
            changes.epochs.reserve_removed(going.len())?;
        }
        evictor.remember(reason, self.step, going, &self.arena, self.first.format)?;
        for (place, (rank, record)) in going.iter().enumerate() {
            if let Some((later, _)) = going.get(place + AHEAD) {
                self.index.prefetch(hash(later.key));
            }
            self.index.remove(hash(rank.key), rank.key);
            self.retired.push((self.newest_lookup, *record));
        }
        if let Some(changes) = &mut self.changes {
            changes.remove_all(going);
        }
        Ok(())
    }

    /// Undoes a call: removes the keys that it inserted, and inserts those that it removed.
    pub(crate) fn undo(&mut self) {
        let unused = self.journal.unused;
        for (key, record) in self.journal.take() {
            self.index.remove(hash(key), key);
            if record < unused {
                self.arena.release(record);
            }
        }
        self.arena.rewind(unused);
        if let Some(changes) = &mut self.changes {
            changes.epochs.undo();
        }
        if let Some(evictor) = &mut self.evictor
            && !evictor.undo(&mut self.index, &mut self.retired)
        {
            // A row is lost that no list of changes has.
            self.changes = None;
        }
        if let Some(admitter) = &mut self.admitter {
            admitter.undo();
        }
    }

    /// Returns the row that lookups return for every key without a record. `None`: each key has its own first values.
    pub(crate) fn shared_missing_row(&self) -> Option<Vec<f32>> {
        let zeros = || vec![0.0; self.config.dim];
        let Some(key) = self.config.out_of_vocabulary_key else {
            return (self.config.missing == Missing::Zeros).then(zeros);
        };
        let mut row = zeros();
        match self.index.find(hash(key), key) {
            NO_RECORD => self.first.fill_row(key, &mut row),
            record => self.first.format.read_row(self.arena.record(record), &mut row),
        }
        Some(row)
    }

    /// Whether a key without a row gets one now, after so many more sights.
    pub(crate) fn admits(&self, key: Key, more: u64) -> bool {
        self.admitter.as_ref().is_none_or(|admitter| admitter.admits(self.config.seed, key, more, self.step))
    }

    /// Forgets the counts of the keys that this call has inserted.
    pub(crate) fn forget_inserted(&mut self) {
        if let Some(admitter) = &mut self.admitter {
            admitter.forget(self.journal.iter().map(|(key, _)| key));
        }
    }

    pub(crate) fn is_absent(&self, key: Key) -> bool {
        self.index.find(hash(key), key) == NO_RECORD
    }

    /// Notes that rows change, or their uses. A table that nobody has dumped notes nothing.
    pub(crate) fn touch(&mut self, records: &[RecordNumber]) {
        if let Some(changes) = &mut self.changes {
            changes.touch(records);
        }
    }

    /// Frees erased records that only lookups before `oldest` refer to.
    pub(crate) fn release_retired(&mut self, oldest: u64) {
        let arena = &mut self.arena;
        self.retired.retain(|&(lookup, record)| {
            let is_needed = lookup >= oldest;
            if !is_needed {
                arena.release(record);
            }
            is_needed
        });
    }

    pub(crate) fn note(&mut self, outcomes: Outcomes, dropped_gradients: u64) {
        self.stats.outcomes += outcomes;
        self.stats.dropped_gradients += dropped_gradients;
        if self.config.check_mode == CheckMode::Warn {
            self.refused_to_warn += outcomes.refused;
        }
    }

    /// Counts ids without a row, of a lookup outside of training.
    pub(crate) fn note_unknown(&mut self, ids: u64) {
        self.stats.unknown_ids += ids;
    }

    /// Returns the mode in which this table takes part in a lookup. With an admission policy a commit inserts, since it knows all sights of
    /// a step.
    pub(crate) fn own_mode(&self, mode: Mode) -> Mode {
        match mode.insertion {
            Insertion::AtLookup if self.admitter.is_some() => {
                Mode { insertion: if mode.save { Insertion::AtCommit } else { Insertion::Never }, ..mode }
            }
            _ => mode,
        }
    }

    /// Counts a use by each id of a feature that is not looked up for training, if the policy asks for that.
    pub(crate) fn count_inference(&mut self, feature: &Feature) {
        let HostTable { evictor: Some(evictor), step, config, index, changes, .. } = self else { return };
        if !evictor.policy.counts_inference {
            return;
        }
        let is_active = |position: &usize| matches!(role(feature, config, *position), Role::Active);
        let record_of = |position: usize| {
            let key = feature.keys.get(position);
            index.find(hash(key), key)
        };
        let num_ids = |position: usize| feature.id_counts.map_or(1, |counts| u64::from(counts[position]));
        let active = || (0..feature.keys.len()).filter(is_active);
        let uses = active().map(|position| (record_of(position), num_ids(position)));
        evictor.count_ids(
            *step,
            uses.inspect(|(record, _)| {
                if let Some(changes) = changes {
                    changes.touch(&[*record]);
                }
            }),
        );
    }

    /// Counts a call of a step.
    pub(crate) fn count_call(&mut self) {
        self.stats.native_calls += 1;
    }
}
