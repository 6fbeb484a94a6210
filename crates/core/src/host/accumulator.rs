//! Adds the merged gradients of several pushes to one sum for each record.

use std::collections::HashMap;

use crate::error::Result;
use crate::host::merge::{MergedGradients, RecordGradients, StoredGradients};
use crate::host::push::{Push, PushedGradients};
use crate::memory;
use crate::store::arena::{NO_RECORD, RecordNumber};

const WHAT: &str = "accumulated gradients";

/// Sums of one table, in the order in which their records were added.
#[derive(Default)]
pub struct Accumulator {
    places: HashMap<RecordNumber, u32>,
    records: Vec<RecordNumber>,
    /// `(records, dim)`
    sums: Vec<f32>,
    /// Generation of the table when they were added.
    generation: u64,
}

impl Accumulator {
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub fn clear(&mut self) {
        self.places.clear();
        self.records.clear();
        self.sums.clear();
    }

    pub fn num_bytes(&self) -> usize {
        self.sums.capacity() * 4 + self.records.capacity() * 4 + self.places.capacity() * 8
    }

    /// The sums, if the table still has this generation.
    pub fn stored(&self, generation: u64) -> Option<RecordGradients<'_, StoredGradients<'_>>> {
        let (records, sums) = (&self.records[..], &self.sums[..]);
        let is_any = self.generation == generation && !self.is_empty();
        let gradients = StoredGradients { num_keys: records.len(), sums, weight: 1.0 };
        is_any.then_some(RecordGradients { records, gradients })
    }

    /// Makes room for the gradients that pushes have for table `number`.
    ///
    /// # Errors
    /// [`crate::Error::Memory`]. Nothing has changed then.
    pub fn reserve(&mut self, number: usize, pushes: &[(f32, Push)]) -> Result<()> {
        let tables = pushes.iter().flat_map(|(_, push)| &push.lookup.tables);
        let (mut num_keys, mut num_floats) = (0, 0);
        for table in tables.filter(|table| table.number == number) {
            let keys: usize = table.runs().map(|(_, records)| records.len()).sum();
            (num_keys, num_floats) = (num_keys + keys, num_floats + keys * table.dim);
        }
        let no_places = |_| memory::missing::<(RecordNumber, u32)>(2 * num_keys, WHAT);
        self.places.try_reserve(num_keys).map_err(no_places)?;
        memory::reserve(&mut self.records, num_keys, WHAT)?;
        memory::reserve(&mut self.sums, num_floats, WHAT)
    }

    /// Adds the gradients that a push has for table `number` of this generation.
    pub fn add_push(&mut self, number: usize, generation: u64, push: &Push, weight: f32) {
        for (at, table) in push.lookup.tables.iter().enumerate() {
            if table.number != number || table.generation != generation {
                continue;
            }
            if self.generation != generation {
                self.clear();
                self.generation = generation;
            }
            match &push.gradients {
                PushedGradients::Held { rows, .. } => {
                    table.hold(rows, weight).iter().for_each(|held| self.add(held, table.dim));
                }
                PushedGradients::Merged(tables) => {
                    for ((_, records), sums) in table.runs().zip(&tables[at]) {
                        let gradients = StoredGradients { num_keys: records.len(), sums, weight };
                        self.add(&RecordGradients { records, gradients }, table.dim);
                    }
                }
            }
        }
    }

    fn add(&mut self, added: &RecordGradients<impl MergedGradients>, dim: usize) {
        let mut merged = vec![0.0; dim];
        let records = added.records.iter().enumerate();
        for (key, &record) in records.filter(|(_, record)| **record != NO_RECORD) {
            added.gradients.merge::<0>(key, &mut merged);
            let next = self.records.len() as u32;
            let place = *self.places.entry(record).or_insert(next);
            if place == next {
                self.records.push(record);
                self.sums.extend_from_slice(&merged);
            } else {
                let sum = &mut self.sums[place as usize * dim..][..dim];
                sum.iter_mut().zip(&merged).for_each(|(s, g)| *s += *g);
            }
        }
    }
}
