//! What ranks ask of a table, and the rows that its owner has for them.

use std::ops::Range;
use std::sync::OnceLock;

use super::at_owner::{AskedFeature, PooledBags};
use super::received::ReceivedRows;
use crate::contract::batch::{Bags, Combiner, Feature, Keys, Scores};
use crate::contract::table::{Table, TableConfig};
use crate::error::{Error, Result};
use crate::exchange::message::{Reader, Writer};
use crate::host::push::SavedLookup;
use crate::host::runs::KeyRuns;
use crate::host::table::HostTable;
use crate::key::Key;
use crate::memory;

const WHAT: &str = "the keys of other ranks";

/// Whether ranks send the number of ids of each key that they ask for.
pub fn counts_ids(config: &TableConfig) -> bool {
    config.eviction.is_some_and(|policy| policy.score.counts_ids())
        || config.admission.is_some_and(|policy| policy.counts_ids())
}

/// What the ranks ask of a table.
pub struct Asked {
    pub table: usize,
    /// One rank after the other.
    pub keys: Vec<Key>,
    /// Number of ids of each key, if a policy of the table counts ids.
    id_counts: Option<Vec<u32>>,
    /// The score of each key, as [`Scores::Sent`], if the policy of the table takes scores.
    scores: Option<Vec<u64>>,
    silent: Vec<Key>,
    /// By rank: where its keys end, and its silent ones.
    ends: Vec<(usize, usize)>,
    /// By rank: the features whose bags are pooled here. If there are none, rows are sent.
    pooled: Vec<Vec<AskedFeature>>,
}

impl Asked {
    pub fn new(table: usize, config: &TableConfig) -> Asked {
        Asked {
            table,
            keys: Vec::new(),
            id_counts: counts_ids(config).then(Vec::new),
            scores: config.takes_scores().then(Vec::new),
            silent: Vec::new(),
            ends: Vec::new(),
            pooled: Vec::new(),
        }
    }

    /// Reads what the next rank asks.
    pub fn read(&mut self, from: usize, reader: &mut Reader) -> Result<()> {
        let (keys, silent) = (reader.number()? as usize, reader.number()? as usize);
        let features = reader.number()? as usize;
        reader.numbers(keys, &mut self.keys)?;
        if let Some(id_counts) = &mut self.id_counts {
            let counts = reader.words(keys)?;
            memory::reserve(id_counts, keys, WHAT)?;
            id_counts.extend(counts);
        }
        if let Some(scores) = &mut self.scores {
            match reader.number()? {
                0 => memory::resize(scores, self.keys.len(), 0, WHAT)?,
                _ => reader.numbers(keys, scores)?,
            }
        }
        reader.numbers(silent, &mut self.silent)?;
        self.ends.push((self.keys.len(), self.silent.len()));
        let features = (0..features).map(|_| AskedFeature::read(keys, from, reader));
        self.pooled.push(features.collect::<Result<_>>()?);
        Ok(())
    }

    /// The keys of all ranks, as a feature of the shard.
    pub fn feature(&self) -> Feature<'_> {
        Feature {
            name: "of other ranks",
            table: self.table,
            keys: Keys::U64(&self.keys),
            bags: Bags::Each,
            combiner: Combiner::Sum,
            weights: None,
            padding_key: None,
            id_counts: self.id_counts.as_deref(),
            scores: self.scores.as_deref().map(Scores::Sent),
        }
    }

    fn keys_of(&self, rank: usize) -> Range<usize> {
        rank.checked_sub(1).map_or(0, |before| self.ends[before].0)..self.ends[rank].0
    }

    /// The keys of ids of weight 0, of all ranks.
    pub fn silent(&self) -> &[Key] {
        &self.silent
    }

    fn silent_of(&self, rank: usize) -> Range<usize> {
        rank.checked_sub(1).map_or(0, |before| self.ends[before].1)..self.ends[rank].1
    }

    /// Number of ids whose bags are pooled here for a rank.
    pub fn num_pooled_ids(&self, rank: usize) -> usize {
        self.pooled[rank].iter().map(AskedFeature::num_ids).sum()
    }

    /// The ranks whose bags are pooled here.
    pub fn pooled_ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.pooled.len()).filter(|&rank| !self.pooled[rank].is_empty())
    }
}

/// The rows that an owner has for the ranks.
pub struct OwnedRows<'a> {
    pub asked: &'a Asked,
    pub table: &'a HostTable,
    /// Of the keys of all ranks.
    rows: Vec<f32>,
    silent: Vec<f32>,
    /// Whether each silent key has a row.
    is_found: Vec<bool>,
    /// By rank: the bags that were pooled for it.
    pooled: Vec<OnceLock<PooledBags>>,
}

impl<'a> OwnedRows<'a> {
    /// `rows`: rows of the keys that are not silent. The rows of silent keys are read here.
    pub fn new(asked: &'a Asked, table: &'a HostTable, rows: Vec<f32>) -> Result<OwnedRows<'a>> {
        let mut silent = memory::filled(0.0, asked.silent.len() * table.config.dim, WHAT)?;
        let mut is_found = memory::filled(true, asked.silent.len(), WHAT)?;
        table.find(&asked.silent, &mut silent, &mut is_found)?;
        let pooled = asked.pooled.iter().map(|_| OnceLock::new()).collect();
        Ok(OwnedRows { asked, table, rows, silent, is_found, pooled })
    }

    /// Number of bytes that are sent to a rank.
    pub fn num_bytes(&self, rank: usize) -> usize {
        if let Some(bags) = self.pooled[rank].get() {
            return 4 * bags.outputs.len();
        }
        let num_rows = self.asked.keys_of(rank).len() + self.asked.silent_of(rank).len();
        num_rows * 4 * self.table.config.dim + num_rows / 8 + 8
    }

    /// The rows of a rank's keys, and of its silent ones.
    fn rows_of(&self, rank: usize) -> [&[f32]; 2] {
        let (keys, silent, dim) =
            (self.asked.keys_of(rank), self.asked.silent_of(rank), self.table.config.dim);
        [&self.rows[keys.start * dim..keys.end * dim], &self.silent[silent.start * dim..silent.end * dim]]
    }

    /// Whether each of a rank's keys has no row.
    fn are_missing(&self, rank: usize) -> impl Iterator<Item = bool> {
        let keys = self.asked.keys[self.asked.keys_of(rank)].iter().map(|&key| self.table.is_absent(key));
        keys.chain(self.is_found[self.asked.silent_of(rank)].iter().map(|found| !found))
    }

    fn has_out_of_vocabulary_key(&self) -> bool {
        self.table.config.out_of_vocabulary_key.is_some()
    }

    /// Writes the bags that were pooled for a rank, or its rows.
    pub fn write(&self, rank: usize, writer: &mut Writer) -> Result<()> {
        if let Some(bags) = self.pooled[rank].get() {
            return writer.rows(&bags.outputs);
        }
        self.rows_of(rank).into_iter().try_for_each(|rows| writer.rows(rows))?;
        if self.has_out_of_vocabulary_key() {
            write_bits(self.are_missing(rank), writer)?;
        }
        Ok(())
    }

    /// Pools the bags of a rank. `runs`: memory for the sorted ids, if a push may follow.
    pub fn pool(&self, rank: usize, runs: Option<KeyRuns>) -> Result<()> {
        let mut rows = ReceivedRows::copied(self.rows_of(rank), self.table.config.dim)?;
        let num_keys = self.asked.keys_of(rank).len();
        if self.has_out_of_vocabulary_key() {
            // Its key is the only silent one: no id has a weight.
            if self.asked.silent_of(rank).len() != 1 {
                let what = "asks for bags without an out-of-vocabulary key, which the table has";
                return Err(Error::Rank { rank, what: what.into() });
            }
            let missing =
                self.are_missing(rank).zip(1u32..).filter_map(|(missing, row)| missing.then_some(row));
            rows.overwrite(&memory::collect(missing, WHAT)?, num_keys as u32 + 1);
        }
        let bags = PooledBags::pool(self.table, &self.asked.pooled[rank], &rows, num_keys, runs)?;
        let _ = self.pooled[rank].set(bags);
        Ok(())
    }

    /// Adds what the backward pass needs of the pooled bags to `saved`, by rank.
    pub fn save(self, saved: &mut [SavedLookup]) {
        for (pooled, saved) in self.pooled.into_iter().zip(saved) {
            if let Some(bags) = pooled.into_inner() {
                bags.save(self.asked.table, self.table, saved);
            }
        }
    }
}

fn write_bits(bits: impl Iterator<Item = bool>, writer: &mut Writer) -> Result<()> {
    let (mut word, mut len) = (0u64, 0);
    for bit in bits {
        word |= u64::from(bit) << (len % 64);
        len += 1;
        if len % 64 == 0 {
            writer.number(std::mem::take(&mut word))?;
        }
    }
    if len % 64 == 0 { Ok(()) } else { writer.number(word) }
}
