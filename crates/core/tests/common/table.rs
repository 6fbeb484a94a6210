//! The model of one table: a map from keys to records.

use std::collections::{BTreeMap, BTreeSet};

use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::{CheckMode, Cursor, Explanation, Missing, Outcomes, Table, TableConfig};
use sok_core::error::{Error, Result};
use sok_core::formula::update::{Update, UpdateScalars, update_with_formula};
use sok_core::initializer::philox;
use sok_core::key::{Key, hash};
use sok_core::policy::admission::Admission;
use sok_core::policy::eviction::Score;
use sok_core::policy::time_to_live::Lifetime;
use sok_core::row_type::{Bfloat16, Float16, Number, RowType};

use super::record_step::update_record;
use super::{Dice, bits, record_bits, scan, unwritten};

/// The number of the commit before the first one, as the host counts commits. Loaded rows may be older.
pub const BEFORE_FIRST_COMMIT: u64 = 1 << 40;

/// A key's row and states. `birth` tells it from a record that the key had before it was erased.
pub struct Record {
    pub birth: u64,
    pub values: Vec<f32>,
    pub score: u64,
    /// The newest commit that took gradients of the row.
    pub commit: u64,
}

pub struct ModelTable {
    pub config: TableConfig,
    pub update: Option<Update>,
    pub rows: BTreeMap<Key, Record>,
    births: u64,
    /// How often all records went at once.
    pub clears: u64,
    /// Whether the states were loaded, and no optimizer was bound or has updated the table since.
    pub has_loaded_states: bool,
    /// The step in progress.
    pub step: u64,
    /// Later commits were not applied yet.
    pub settled_commit: u64,
    newest_commit: u64,
    /// Keys of lookups whose gradients were not committed yet.
    pub in_progress: BTreeSet<Key>,
    /// Keys that went by themselves, with what is told of them.
    departures: Vec<(Key, Explanation)>,
    /// How often keys without a row have come.
    pub sights: BTreeMap<Key, u32>,
    kept: Records,
}

/// Rounds the row of a key after an update: column by column, each with 16 bits of a random word.
fn round_by_chance(config: &TableConfig, step: u64, key: Key, row: &mut [f32]) {
    let seed = [config.seed as u32, (config.seed >> 32) as u32];
    for (column, x) in row.iter_mut().enumerate() {
        let words = philox([key as u32, (key >> 32) as u32, column as u32 / 8, step as u32], seed);
        let draw = (words[column % 8 / 2] >> (16 * (column % 2))) as u16;
        *x = match config.row_type {
            RowType::Float16 => Float16::from_f32_by_chance(*x, draw).to_f32(),
            _ => Bfloat16::from_f32_by_chance(*x, draw).to_f32(),
        };
    }
}

/// What a method of a table answers; what it does not answer is empty.
#[derive(Debug, Default, PartialEq)]
pub struct Answer {
    rows: Vec<u32>,
    found: Vec<bool>,
    outcomes: Outcomes,
    erased: usize,
    /// Keys, the bits of rows, and scores.
    evicted: (Vec<Key>, Vec<u32>, Vec<u64>),
}

impl Answer {
    fn set_evicted(&mut self, gone: Records) {
        self.evicted = (gone.keys, bits(&gone.values), gone.scores);
    }
}

pub type Answered = Result<Answer, String>;

impl ModelTable {
    pub fn new(config: TableConfig) -> ModelTable {
        ModelTable {
            config,
            update: None,
            rows: BTreeMap::new(),
            births: 0,
            clears: 0,
            has_loaded_states: false,
            step: 1,
            settled_commit: BEFORE_FIRST_COMMIT,
            newest_commit: BEFORE_FIRST_COMMIT,
            in_progress: BTreeSet::new(),
            departures: Vec::new(),
            sights: BTreeMap::new(),
            kept: Records::default(),
        }
    }

    fn first_states(&self) -> Vec<f32> {
        let states = self.update.map(|u| u.rule.states(self.config.dim)).unwrap_or_default();
        states.iter().flat_map(|s| vec![s.initial; s.width]).collect()
    }

    pub fn first_row(&self, key: Key) -> Vec<f32> {
        let mut row = vec![0.0; self.config.dim];
        self.config.initializer.fill(self.config.seed, key, &mut row);
        self.config.row_type.round(&mut row);
        row
    }

    pub fn width(&self) -> usize {
        self.config.dim + self.first_states().len()
    }

    pub fn is_outside(&self, key: Key) -> bool {
        self.config.vocabulary_size.is_some_and(|size| key >= size)
    }

    pub fn birth(&self, key: Key) -> Option<u64> {
        self.rows.get(&key).map(|record| record.birth)
    }

    pub fn life(&self, key: Key) -> (u64, Option<u64>) {
        (self.clears, self.birth(key))
    }

    /// The row of a key, or what a key without one answers.
    pub fn answer(&self, key: Key) -> Vec<f32> {
        let row_of = |key| self.rows.get(&key).map(|record| record.values[..self.config.dim].to_vec());
        if let Some(row) = row_of(key) {
            return row;
        }
        match self.config.out_of_vocabulary_key {
            _ if self.is_outside(key) => vec![0.0; self.config.dim],
            Some(shared) => row_of(shared).unwrap_or_else(|| self.first_row(shared)),
            None if self.config.missing == Missing::Zeros => vec![0.0; self.config.dim],
            None => self.first_row(key),
        }
    }

    pub fn outside_error(&self, feature: Option<&str>, keys: &[Key]) -> Result<()> {
        let Some(&key) = keys.iter().find(|&&key| self.is_outside(key)) else { return Ok(()) };
        let last = self.config.vocabulary_size.unwrap_or_default() - 1;
        Err(Error::OutOfVocabulary {
            table: self.config.name.clone(),
            feature: feature.map(String::from),
            id: key as i64,
            last,
        })
    }

    /// Distinct keys without a row, in order of first occurrence.
    pub fn absent(&self, keys: &[Key]) -> Vec<Key> {
        let mut seen = BTreeSet::new();
        keys.iter().copied().filter(|key| !self.rows.contains_key(key) && seen.insert(*key)).collect()
    }

    /// Rows that do not fit, if that is an error here. `used`: keys that the call itself uses.
    pub fn full_error(&self, new: &[Key], used: &[Key]) -> Result<()> {
        let (len, capacity) = (self.rows.len() as u64, self.config.capacity());
        let needed = (len + new.len() as u64).saturating_sub(capacity);
        let refused = needed.saturating_sub(self.removable(used).len() as u64).min(new.len() as u64);
        if refused == 0 || self.config.check_mode != CheckMode::Raise {
            return Ok(());
        }
        Err(Error::TableFull { table: self.config.name.clone(), refused, len, capacity })
    }

    /// Score and key of the rows that may go, in the order in which they would.
    fn removable(&self, used: &[Key]) -> Vec<(u64, Key)> {
        if self.config.eviction.is_none() {
            return Vec::new();
        }
        let may_go = |(key, record): &(&Key, &Record)| {
            record.commit <= self.settled_commit
                && !self.in_progress.contains(key)
                && !used.contains(key)
                && self.config.out_of_vocabulary_key != Some(**key)
        };
        let rows = self.rows.iter().filter(may_go).map(|(key, record)| (record.score, *key));
        rows.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Makes room for so many new keys, as far as the policy allows. Returns how many rows went.
    pub fn evict(&mut self, num_new: usize, used: &[Key]) -> u64 {
        let capacity = self.config.capacity();
        let needed = (self.rows.len() as u64 + num_new as u64).saturating_sub(capacity);
        if needed == 0 || num_new == 0 {
            return 0;
        }
        let mut going = self.removable(used);
        going.truncate(needed.max(capacity / 64) as usize);
        self.remove(&going, Explanation::Evicted { step: self.step })
    }

    /// Removes rows, scores and keys in their order. Returns their number.
    fn remove(&mut self, going: &[(u64, Key)], why: Explanation) -> u64 {
        for &(score, key) in going {
            let record = self.rows.remove(&key).unwrap();
            self.departures.push((key, why));
            let keeps = match why {
                Explanation::Expired { .. } => self.config.keeps_expired(),
                _ => self.config.eviction.is_some_and(|policy| policy.keeps_evicted),
            };
            if keeps {
                self.kept.keys.push(key);
                self.kept.values.extend(&record.values[..self.config.dim]);
                self.kept.scores.push(score);
            }
        }
        going.len() as u64
    }

    /// Removes the rows whose time is over at the end of a step that this commit ends.
    fn expire(&mut self, commit: u64) -> u64 {
        let Some(lifetime) = self.config.time_to_live.map(|time_to_live| time_to_live.lifetime) else {
            return 0;
        };
        let Lifetime::Steps(steps) = lifetime else { panic!("models have no clock") };
        let Some(part) = lifetime.part_due(self.step, self.config.seed) else { return 0 };
        let is_over = |(key, record): &(&Key, &Record)| {
            record.commit + steps <= commit
                && record.commit <= self.settled_commit
                && part.contains(hash(**key))
                && self.config.out_of_vocabulary_key != Some(**key)
        };
        let rows = self.rows.iter().filter(is_over).map(|(key, record)| (record.score, *key));
        let going: Vec<_> = rows.collect::<BTreeSet<_>>().into_iter().collect();
        self.remove(&going, Explanation::Expired { step: self.step })
    }

    /// Counts a use by `num_ids` ids of a key.
    pub fn count_use(&mut self, key: Key, num_ids: u64) {
        let Some(policy) = self.config.counting() else { return };
        if let Some(record) = self.rows.get_mut(&key) {
            match policy.score {
                Score::Lru => record.score = self.step,
                Score::Lfu { .. } => record.score += num_ids,
                Score::Custom => {}
            }
        }
    }

    /// Replaces the scores of keys that have a row.
    pub fn give_scores(&mut self, scores: &BTreeMap<Key, u64>) {
        for (key, score) in scores {
            if let Some(record) = self.rows.get_mut(key) {
                record.score = *score;
            }
        }
    }

    pub fn count_uses(&mut self, keys: &[Key]) {
        keys.iter().for_each(|key| self.count_use(*key, 1));
    }

    /// Whether a key gets a row that has come so often, with this step.
    pub fn admits(&self, key: Key, sights: u32) -> bool {
        self.config.admission.is_none_or(|policy| policy.admits(sights, self.config.seed, key, self.step))
    }

    /// Ends the step in progress by a commit. Returns how many rows went.
    pub fn end_step(&mut self, commit: u64) -> u64 {
        self.newest_commit = commit;
        let expired = if self.config.trainable { self.age(commit) } else { 0 };
        if self.config.counting().is_some() || self.config.admission.is_some() {
            self.step += 1;
        }
        expired
    }

    /// Does at the end of a step what time does to a table that training changes. Returns how many rows went.
    fn age(&mut self, commit: u64) -> u64 {
        let expired = self.expire(commit);
        if self.config.admission.is_some_and(|policy| policy.halves_after(self.step)) {
            self.sights.values_mut().for_each(|count| *count /= 2);
            self.sights.retain(|_, count| *count > 0);
        }
        self.forget_lowest();
        let score = self.config.eviction.map(|policy| policy.score);
        if let Some(Score::Lfu { half_life: Some(every) }) = score
            && self.step.is_multiple_of(every)
        {
            self.rows.values_mut().for_each(|record| record.score /= 2);
        }
        expired
    }

    /// Forgets the lowest counts of keys without a row, if there are more than the policy's memory holds.
    fn forget_lowest(&mut self) {
        let Some(Admission::Frequency { threshold, memory: Some(bytes), .. }) = self.config.admission else {
            return;
        };
        let max = (bytes / 64) as usize;
        if self.sights.len() <= max {
            return;
        }
        let mut counts: Vec<u32> = self.sights.values().map(|&count| count.min(threshold)).collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let highest = counts[max - max / 64];
        self.sights.retain(|_, count| (*count).min(threshold) > highest);
    }

    /// Makes room, then inserts as `insert_fitting`.
    pub fn insert(&mut self, keys: &[Key]) -> Outcomes {
        let evicted = self.evict(self.absent(keys).len(), keys);
        Outcomes { evicted, ..self.insert_fitting(keys) }
    }

    fn first_score(&self) -> u64 {
        match self.config.counting().map(|policy| policy.score) {
            Some(Score::Lru) => self.step,
            _ => 0,
        }
    }

    /// One after the other until the table is full. How all `keys` ended.
    pub fn insert_fitting(&mut self, keys: &[Key]) -> Outcomes {
        let distinct: BTreeSet<Key> = keys.iter().copied().collect();
        let mut outcomes = Outcomes::default();
        let new = self.absent(keys);
        outcomes.hit = (distinct.len() - new.len()) as u64;
        for key in new {
            if self.rows.len() as u64 >= self.config.capacity() {
                outcomes.refused += 1;
                continue;
            }
            outcomes.inserted += 1;
            self.make(key);
        }
        outcomes
    }

    fn make(&mut self, key: Key) {
        self.births += 1;
        let values = [self.first_row(key), self.first_states()].concat();
        let record =
            Record { birth: self.births, values, score: self.first_score(), commit: self.settled_commit };
        self.rows.insert(key, record);
        self.sights.remove(&key);
    }

    fn check_insert(&self, keys: &[Key], insert: bool) -> Result<()> {
        self.outside_error(None, keys)?;
        self.full_error(if insert { self.absent(keys) } else { vec![] }.as_slice(), keys)
    }

    /// `insert`, or how the keys end where none may be inserted.
    fn locate(&mut self, keys: &[Key], insert: bool) -> Result<Outcomes> {
        self.check_insert(keys, insert)?;
        if insert {
            return Ok(self.insert(keys));
        }
        Ok(self.only_find(keys))
    }

    fn only_find(&self, keys: &[Key]) -> Outcomes {
        let distinct: BTreeSet<Key> = keys.iter().copied().collect();
        let refused = self.absent(keys).len() as u64;
        Outcomes { hit: distinct.len() as u64 - refused, refused, ..Outcomes::default() }
    }

    fn assign(&mut self, keys: &[Key], rows: &[f32], insert: bool) -> Result<Outcomes> {
        let outcomes = self.locate(keys, insert)?;
        for (key, row) in keys.iter().zip(rows.chunks_exact(self.config.dim)) {
            if let Some(record) = self.rows.get_mut(key) {
                record.values[..row.len()].copy_from_slice(row);
                self.config.row_type.round(&mut record.values[..row.len()]);
            }
        }
        Ok(outcomes)
    }

    fn restore(&mut self, records: &Records) -> Result<()> {
        self.outside_error(None, &records.keys)?;
        for key in self.absent(&records.keys) {
            self.make(key);
        }
        for (key, values) in records.keys.iter().zip(records.values.chunks_exact(self.width())) {
            if let Some(record) = self.rows.get_mut(key) {
                record.values.copy_from_slice(values);
                self.config.row_type.round(&mut record.values[..self.config.dim]);
                record.commit = record.commit.max(self.settled_commit);
            }
        }
        for (key, score) in records.keys.iter().zip(&records.scores) {
            if let Some(record) = self.rows.get_mut(key) {
                record.score = *score;
            }
        }
        for (key, age) in records.keys.iter().zip(&records.ages) {
            // Rows of later commits are in use.
            if let Some(record) = self.rows.get_mut(key).filter(|record| record.commit <= self.settled_commit)
            {
                record.commit = (self.newest_commit - age).min(self.settled_commit);
            }
        }
        Ok(())
    }

    fn update(&mut self, keys: &[Key], gradients: &[f32], scalars: &UpdateScalars) -> Result<Outcomes> {
        let update = update_with_formula(self.update, &self.config.name)?;
        let mut terms: BTreeMap<Key, Vec<Vec<f32>>> = BTreeMap::new();
        for (key, gradient) in keys.iter().zip(gradients.chunks_exact(self.config.dim)) {
            terms.entry(*key).or_default().push(gradient.to_vec());
        }
        let outcomes = self.only_find(keys);
        for (key, terms) in terms {
            self.step(key, &merge(&terms), &update, scalars);
        }
        Ok(outcomes)
    }

    /// One optimizer step of a record, if the key has one.
    pub fn step(&mut self, key: Key, gradient: &[f32], update: &Update, scalars: &UpdateScalars) {
        let Some(record) = self.rows.get_mut(&key) else { return };
        update_record(update, scalars, &mut record.values, gradient);
        let row = &mut record.values[..self.config.dim];
        if self.config.stochastic_rounding {
            round_by_chance(&self.config, scalars.step, key, row);
        } else {
            self.config.row_type.round(row);
        }
    }

    /// Forgets the rows that went.
    fn forget(&mut self) {
        self.departures.clear();
        self.sights.clear();
        self.kept = Records::default();
    }

    pub fn set_update_rule(&mut self, update: Option<Update>, keep_states: bool) {
        let states = |u: Option<Update>| u.map(|u| (u.rule.name(), u.rule.states(self.config.dim)));
        let is_same = states(self.update) == states(update);
        self.update = update;
        self.has_loaded_states = false;
        if is_same && keep_states {
            return;
        }
        let first = self.first_states();
        for record in self.rows.values_mut() {
            record.values.truncate(self.config.dim);
            record.values.extend(&first);
        }
    }

    pub fn check(&self, table: &dyn Table) {
        let expected: BTreeMap<Key, Vec<u32>> =
            self.rows.iter().map(|(key, record)| (*key, self.bits_of(record))).collect();
        let got = scan(table, 7.max(expected.len() / 3));
        if got != expected {
            let wrong = expected.iter().find(|(k, v)| got.get(k) != Some(v)).map(|(k, v)| (k, v, got.get(k)));
            let more: Vec<_> = got.keys().filter(|k| !expected.contains_key(k)).collect();
            panic!(
                "table `{}`: key, expected, got: {wrong:x?}; not to be there: {more:x?}",
                self.config.name
            );
        }
        assert_eq!(table.stats().unwrap().size, expected.len() as u64);
        assert_eq!(table.step().unwrap(), self.step);
        for key in self.departures.iter().rev().take(5).map(|gone| gone.0).chain(0..8) {
            assert_eq!(table.explain(key).unwrap(), self.explain(key), "key {key}");
        }
    }

    fn bits_of(&self, record: &Record) -> Vec<u32> {
        let number = |column: &Column| match column {
            Column::Scores => record.score,
            Column::Ages => self.newest_commit.saturating_sub(record.commit),
        };
        record_bits(&record.values, self.config.columns().iter().map(number))
    }

    fn explain(&self, key: Key) -> Explanation {
        let gone = self.departures.iter().rev().find(|gone| gone.0 == key);
        match (self.rows.get(&key), gone) {
            (Some(record), _) => Explanation::Present { score: self.config.eviction.map(|_| record.score) },
            (None, _) if self.sights.contains_key(&key) => {
                Explanation::Filtered { sights: self.sights[&key] }
            }
            (None, Some(&(_, why))) => why,
            (None, None) => Explanation::Absent,
        }
    }
}

/// Sums of runs of 64, each in its order, then the sum of those in theirs.
pub fn merge(terms: &[Vec<f32>]) -> Vec<f32> {
    let runs: Vec<Vec<f32>> = terms.chunks(64).map(sum_in_order).collect();
    sum_in_order(&runs)
}

fn sum_in_order(rows: &[Vec<f32>]) -> Vec<f32> {
    let mut sum = rows[0].clone();
    rows[1..].iter().for_each(|row| add(&mut sum, row));
    sum
}

pub fn add(sum: &mut [f32], row: &[f32]) {
    sum.iter_mut().zip(row).for_each(|(s, x)| *s += x);
}

/// A call of a method of `Table`. Rows and gradients come from seeds.
#[derive(Clone, Debug)]
pub enum TableOp {
    Find(Vec<Key>),
    FindOrInsert(Vec<Key>),
    Assign {
        keys: Vec<Key>,
        seed: u64,
        insert: bool,
    },
    Update {
        keys: Vec<Key>,
        seed: u64,
        scalars: UpdateScalars,
    },
    Erase(Vec<Key>),
    Clear,
    Restore {
        keys: Vec<Key>,
        seed: u64,
    },
    /// All records through `scan`, `fresh`, `restore` and `replace_with`.
    Reload,
    TakeEvicted,
    Rule {
        update: Option<Update>,
        keep_states: bool,
    },
}

impl TableOp {
    /// On the model and on tables that are to be like it.
    pub fn run(&self, model: &mut ModelTable, tables: &mut [&mut dyn Table]) {
        let expected = self.on_model(model).map_err(|e| e.to_string());
        for table in tables {
            let got = self.on_table(*table).map_err(|e| e.to_string());
            assert_eq!(got, expected, "{self:?}");
            model.check(*table);
        }
    }

    /// Of positive numbers, as accumulators are.
    fn records(keys: &[Key], width: usize, seed: u64, config: &TableConfig) -> Records {
        let mut dice = Dice(seed);
        let values = dice.floats(keys.len() * width).into_iter().map(f32::abs).collect();
        let has_scores = config.eviction.is_some() && dice.below(2) == 0;
        let scores = if has_scores { keys.iter().map(|_| dice.below(9)).collect() } else { Vec::new() };
        let has_ages = config.time_to_live.is_some() && dice.below(2) == 0;
        let ages = if has_ages { keys.iter().map(|_| dice.below(9)).collect() } else { Vec::new() };
        Records { keys: keys.to_vec(), values, scores, ages }
    }

    fn on_model(&self, model: &mut ModelTable) -> Result<Answer> {
        let dim = model.config.dim;
        let mut answer = Answer::default();
        match self {
            TableOp::Find(keys) => {
                answer.rows = keys.iter().flat_map(|k| bits(&model.answer(*k))).collect();
                answer.found = keys.iter().map(|k| model.rows.contains_key(k)).collect();
            }
            TableOp::FindOrInsert(keys) => {
                answer.outcomes = model.locate(keys, true)?;
                model.count_uses(keys);
                answer.rows = keys.iter().flat_map(|k| bits(&model.answer(*k))).collect();
            }
            TableOp::Assign { keys, seed, insert } => {
                answer.outcomes = model.assign(keys, &Dice(*seed).floats(keys.len() * dim), *insert)?;
            }
            TableOp::Update { keys, seed, scalars } => {
                answer.outcomes = model.update(keys, &Dice(*seed).floats(keys.len() * dim), scalars)?;
            }
            TableOp::Erase(keys) => {
                answer.erased = keys.iter().filter(|k| model.rows.remove(k).is_some()).count();
                model.departures.retain(|gone| !keys.contains(&gone.0));
                model.sights.retain(|key, _| !keys.contains(key));
                model.kept.keep(|key| !keys.contains(&key));
            }
            TableOp::Clear => {
                model.rows.clear();
                model.clears += 1;
                model.forget();
            }
            TableOp::Restore { keys, seed } => {
                model.restore(&Self::records(keys, model.width(), *seed, &model.config))?;
            }
            TableOp::Reload => {
                model.has_loaded_states = true;
                model.clears += 1;
                model.forget();
                let first_score = model.first_score();
                for record in model.rows.values_mut() {
                    model.births += 1;
                    record.birth = model.births;
                    // A dump holds the scores of rows with an eviction policy.
                    if model.config.eviction.is_none() {
                        record.score = first_score;
                    }
                    // A dump holds the ages of rows with a time to live. No row is in use after the load.
                    if model.config.time_to_live.is_none() || record.commit > model.settled_commit {
                        record.commit = model.settled_commit;
                    }
                }
            }
            TableOp::TakeEvicted => {
                if !model.config.keeps_removed() {
                    return Err(Error::State(format!(
                        "table `{}` does not keep the rows that it removes. Set `keep_evicted=True` in its eviction policy, or `keep_expired=True` in its `TimeToLive`",
                        model.config.name
                    )));
                }
                answer.set_evicted(std::mem::take(&mut model.kept));
            }
            TableOp::Rule { update, keep_states } => model.set_update_rule(*update, *keep_states),
        }
        Ok(answer)
    }

    fn on_table(&self, table: &mut dyn Table) -> Result<Answer> {
        let dim = table.config().dim;
        let mut answer = Answer::default();
        match self {
            TableOp::Find(keys) => {
                let mut rows = unwritten(keys.len() * dim);
                answer.found = vec![false; keys.len()];
                table.find(keys, &mut rows, &mut answer.found)?;
                answer.rows = bits(&rows);
            }
            TableOp::FindOrInsert(keys) => {
                let mut rows = unwritten(keys.len() * dim);
                answer.outcomes = table.find_or_insert(keys, &mut rows)?;
                answer.rows = bits(&rows);
            }
            TableOp::Assign { keys, seed, insert } => {
                answer.outcomes = table.assign(keys, &Dice(*seed).floats(keys.len() * dim), *insert)?;
            }
            TableOp::Update { keys, seed, scalars } => {
                answer.outcomes = table.update(keys, &Dice(*seed).floats(keys.len() * dim), scalars)?;
            }
            TableOp::Erase(keys) => answer.erased = table.erase(keys)?,
            TableOp::Clear => table.clear()?,
            TableOp::Restore { keys, seed } => {
                let config = table.config().clone();
                table.restore(&Self::records(keys, table.layout().width(), *seed, &config))?;
            }
            TableOp::Reload => reload(table)?,
            TableOp::TakeEvicted => answer.set_evicted(table.take_evicted()?),
            TableOp::Rule { update, keep_states } => table.set_update_rule(*update, *keep_states)?,
        }
        Ok(answer)
    }
}

fn reload(table: &mut dyn Table) -> Result<()> {
    let mut records = Records::default();
    assert_eq!(table.scan(Cursor::default(), usize::MAX, &mut records)?, None);
    let mut fresh = table.fresh(table.update_rule().copied(), 0)?;
    fresh.set_step(table.step().unwrap()).unwrap();
    fresh.restore(&records)?;
    table.replace_with(fresh)
}
