//! A table that is plain enough to be right.

use std::cell::Cell;
use std::collections::BTreeMap;

use sok_core::Result;
use sok_core::contract::frozen::Frozen;
use sok_core::contract::records::Records;
use sok_core::contract::table::{
    CheckMode, Contents, Cursor, Freezing, Missing, OutOfVocabulary, Outcomes, Table, TableConfig, TableStats,
};
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::formula::{Adam, RowWiseAdagrad, Rule};
use sok_core::initializer::Initializer;
use sok_core::key::Key;
use sok_core::row_type::RowType;

#[derive(Clone, Debug)]
pub struct MapTable {
    pub config: TableConfig,
    pub update: Option<Update>,
    pub records: BTreeMap<Key, Vec<f32>>,
    /// The largest chunk that anybody asked for or brought, in bytes.
    pub largest_chunk: Cell<usize>,
}

impl MapTable {
    pub fn new(name: &str, dim: usize, update: Option<Update>) -> MapTable {
        let config = TableConfig {
            name: name.into(),
            dim,
            vocabulary_size: None,
            initializer: Initializer::Uniform { minval: -0.05, maxval: 0.05 },
            seed: u64::MAX,
            missing: Missing::Initial,
            out_of_vocabulary: OutOfVocabulary::Raise,
            out_of_vocabulary_key: None,
            initial_capacity: 0,
            max_capacity: None,
            check_mode: CheckMode::Raise,
            eviction: None,
            time_to_live: None,
            admission: None,
            row_type: RowType::Float32,
            stochastic_rounding: false,
            trainable: true,
            optimizer: 0,
        };
        MapTable { config, update, records: BTreeMap::new(), largest_chunk: Cell::new(0) }
    }

    /// Records whose every float tells of its key, place and `salt`.
    pub fn filled(mut self, keys: impl IntoIterator<Item = Key>, salt: f32) -> MapTable {
        let width = self.layout().width();
        for key in keys {
            let value = |i: usize| salt + (key % 1009) as f32 + i as f32 / 64.0;
            self.records.insert(key, (0..width).map(value).collect());
        }
        self
    }

    pub fn with_vocabulary(mut self, size: u64) -> MapTable {
        self.config.vocabulary_size = Some(size);
        self
    }

    pub fn with_max_capacity(mut self, rows: u64) -> MapTable {
        self.config.max_capacity = Some(rows);
        self
    }

    pub fn empty_twin(&self) -> MapTable {
        MapTable { records: BTreeMap::new(), ..self.clone() }
    }

    pub fn rows(&self) -> BTreeMap<Key, Vec<f32>> {
        self.records.iter().map(|(k, r)| (*k, r[..self.config.dim].to_vec())).collect()
    }

    pub fn note_chunk(&self, keys: usize) {
        let bytes = keys * (8 + 4 * self.layout().width());
        self.largest_chunk.set(self.largest_chunk.get().max(bytes));
    }
}

impl Contents for MapTable {
    fn config(&self) -> &TableConfig {
        &self.config
    }

    fn len(&self) -> Result<usize> {
        Ok(self.records.len())
    }

    fn update_rule(&self) -> Option<&Update> {
        self.update.as_ref()
    }

    fn scan(&self, cursor: Cursor, max: usize, out: &mut Records) -> Result<Option<Cursor>> {
        self.note_chunk(max);
        let mut left = self.records.range(cursor.0..);
        for (key, record) in left.by_ref().take(max) {
            out.keys.push(*key);
            out.values.extend(record);
        }
        Ok(left.next().map(|(key, _)| Cursor(*key)))
    }
}

impl Table for MapTable {
    fn find(&self, keys: &[Key], rows: &mut [f32], found: &mut [bool]) -> Result<()> {
        for ((key, row), found) in keys.iter().zip(rows.chunks_mut(self.config.dim)).zip(found) {
            let record = self.records.get(key);
            *found = record.is_some();
            row.copy_from_slice(&record.map_or(vec![0.0; row.len()], |r| r[..row.len()].to_vec()));
        }
        Ok(())
    }

    fn set_seed(&mut self, seed: u64) {
        self.config.seed = seed;
    }

    fn has_loaded_states(&self) -> bool {
        false
    }

    fn set_update_rule(&mut self, update: Option<Update>, keep_states: bool) -> Result<()> {
        assert!(keep_states && self.update.is_none(), "what a load asks for");
        self.update = update;
        for record in self.records.values_mut() {
            for spec in update.iter().flat_map(|u| u.rule.states(self.config.dim)) {
                record.extend(vec![spec.initial; spec.width]);
            }
        }
        Ok(())
    }

    fn keys(&self) -> Result<Vec<Key>> {
        Ok(self.records.keys().copied().collect())
    }

    fn restore(&mut self, records: &Records) -> Result<()> {
        self.note_chunk(records.keys.len());
        let width = self.layout().width();
        assert_eq!(records.values.len(), records.keys.len() * width);
        for (key, record) in records.keys.iter().zip(records.values.chunks(width)) {
            assert!(self.config.is_in_vocabulary(*key), "{key} is outside the vocabulary");
            self.records.insert(*key, record.to_vec());
        }
        assert!(self.records.len() as u64 <= self.config.capacity(), "the table overflows");
        Ok(())
    }

    fn fresh(&self, update: Option<Update>, _: usize) -> Result<Box<dyn Table>> {
        Ok(Box::new(MapTable { update, ..self.empty_twin() }))
    }

    fn replace_with(&mut self, other: Box<dyn Table>) -> Result<()> {
        let other = other.into_any().downcast::<MapTable>().expect("made by `fresh`");
        assert_eq!(TableConfig { seed: other.config.seed, ..self.config.clone() }, other.config);
        *self = *other;
        Ok(())
    }

    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any> {
        self
    }

    fn find_or_insert(&mut self, _: &[Key], _: &mut [f32]) -> Result<Outcomes> {
        unreachable!("no dump trains")
    }

    fn assign(&mut self, _: &[Key], _: &[f32], _: bool) -> Result<Outcomes> {
        unreachable!("no dump assigns")
    }

    fn update(&mut self, _: &[Key], _: &[f32], _: &UpdateScalars) -> Result<Outcomes> {
        unreachable!("no dump trains")
    }

    fn erase(&mut self, _: &[Key]) -> Result<usize> {
        unreachable!("no dump erases")
    }

    fn clear(&mut self) -> Result<()> {
        unreachable!("no dump clears")
    }

    fn stats(&self) -> Result<TableStats> {
        Ok(self.recent_stats())
    }

    fn recent_stats(&self) -> TableStats {
        TableStats::default()
    }

    fn freeze(&mut self, since: Option<u64>) -> Result<Box<dyn Freezing>> {
        Ok(Box::new(Frozen::of(self, since)?))
    }
}

pub fn update(rule: Rule) -> Option<Update> {
    Some(Update { rule, weight_decay: Some(0.004), clipvalue: None, clipnorm: None })
}

pub fn adam() -> Option<Update> {
    update(Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false }))
}

pub fn row_wise() -> Option<Update> {
    update(Rule::RowWiseAdagrad(RowWiseAdagrad { initial_accumulator_value: 0.1, epsilon: 1e-7 }))
}
