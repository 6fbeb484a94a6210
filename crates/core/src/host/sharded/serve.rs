//! The owner's side of a lookup: the rows that all ranks ask for.

use super::group::ShardedGroup;
use crate::contract::batch::{Bags, Combiner, Feature, Keys};
use crate::contract::table::{Insertion, Table};
use crate::error::{Error, Result};
use crate::exchange::message::{Reader, Writer};
use crate::key::Key;
use crate::memory;
use crate::pool::Pool;

const WHAT: &str = "the keys of other ranks";

/// What all ranks must say alike about a lookup.
#[derive(Clone, Copy, PartialEq)]
pub struct LookupMode {
    /// When keys without a row get one.
    pub insertion: Insertion,
    /// Whether a push may follow.
    pub save: bool,
}

impl LookupMode {
    /// Returns it as a number, for messages.
    pub fn code(self) -> u64 {
        let insertion = match self.insertion {
            Insertion::AtLookup => 0,
            Insertion::AtCommit => 1,
            Insertion::Never => 2,
        };
        insertion | u64::from(self.save) << 8
    }
}

/// What the ranks ask of a table.
struct Asked {
    table: usize,
    /// One rank after the other.
    keys: Vec<Key>,
    silent: Vec<Key>,
    /// By rank: number of keys, and of silent ones.
    counts: Vec<(usize, usize)>,
}

impl ShardedGroup {
    /// Begins the message of a lookup to another rank.
    pub(super) fn write_header(&self, mode: LookupMode, tables: &[usize], writer: &mut Writer) -> Result<()> {
        writer.numbers(&[self.tables, mode.code(), tables.len() as u64])?;
        tables.iter().try_for_each(|&table| writer.number(table as u64))
    }

    fn check_header(
        &self,
        mode: LookupMode,
        tables: &[usize],
        from: usize,
        reader: &mut Reader,
    ) -> Result<()> {
        let differs = |what: &str| {
            Err(Error::Rank {
                rank: from,
                what: format!("looks up {what}. All ranks must make the same calls"),
            })
        };
        if reader.number()? != self.tables {
            return differs("in a layer whose tables differ from this rank's");
        }
        if reader.number()? != mode.code() {
            return differs("with another `training` or another gradient tape than this rank");
        }
        if reader.number()? != tables.len() as u64 {
            return differs("other features than this rank");
        }
        for &table in tables {
            if reader.number()? != table as u64 {
                return differs("other features than this rank");
            }
        }
        Ok(())
    }

    /// Looks up what all ranks ask for. `tables`: those of the call. Returns the message to each rank, and the number of the shard's
    /// lookup.
    pub(super) fn serve(
        &mut self,
        requests: &[Vec<u8>],
        tables: &[usize],
        mode: LookupMode,
        pool: &Pool,
    ) -> Result<(Vec<Vec<u8>>, u64)> {
        let asked = self.read_requests(requests, tables, mode)?;
        let dim = |asked: &Asked| self.shard.tables[asked.table].config.dim;
        let rows = asked.iter().map(|asked| memory::filled(0.0, asked.keys.len() * dim(asked), WHAT));
        let mut rows = rows.collect::<Result<Vec<_>>>()?;
        let features: Vec<Feature> = asked.iter().map(feature_of).collect();
        let outputs = rows.iter_mut().map(|rows| &mut rows[..]).collect();
        let before = self.shard.stats_before_lookup();
        self.shard.oldest_needed = self.oldest_needed();
        let number = self.shard.lookup(&features, mode.insertion, mode.save, outputs, pool)?;
        let replies = self.write_replies(&asked, &rows);
        if replies.is_err() {
            self.shard.undo_lookup(&before, mode.save);
        }
        Ok((replies?, number))
    }

    fn read_requests(&self, requests: &[Vec<u8>], tables: &[usize], mode: LookupMode) -> Result<Vec<Asked>> {
        let mut asked: Vec<Asked> = tables
            .iter()
            .map(|&table| Asked { table, keys: Vec::new(), silent: Vec::new(), counts: Vec::new() })
            .collect();
        for (from, request) in requests.iter().enumerate() {
            let mut reader = Reader::new(request, from);
            self.check_header(mode, tables, from, &mut reader)?;
            for asked in &mut asked {
                let (keys, silent) = (reader.number()? as usize, reader.number()? as usize);
                reader.numbers(keys, &mut asked.keys)?;
                reader.numbers(silent, &mut asked.silent)?;
                asked.counts.push((keys, silent));
            }
            reader.finish()?;
        }
        Ok(asked)
    }

    /// `rows`: those of the keys, by table.
    fn write_replies(&self, asked: &[Asked], rows: &[Vec<f32>]) -> Result<Vec<Vec<u8>>> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        let mut writers: Vec<Writer> = (0..world_size).map(|_| Writer::default()).collect();
        for (to, writer) in writers.iter_mut().enumerate() {
            let bytes = |asked: &Asked| {
                let (keys, silent) = asked.counts[to];
                (keys + silent) * 4 * self.shard.tables[asked.table].config.dim + (keys + silent) / 8 + 8
            };
            // With a byte for the exchange.
            writer.reserve(asked.iter().map(bytes).sum::<usize>() + 1)?;
        }
        for (asked, rows) in asked.iter().zip(rows) {
            let (table, owners) = (&self.shard.tables[asked.table], &self.requests[asked.table].owners);
            let dim = table.config.dim;
            let mut silent_rows = memory::filled(0.0, asked.silent.len() * dim, WHAT)?;
            let mut is_found = memory::filled(true, asked.silent.len(), WHAT)?;
            table.find(&asked.silent, &mut silent_rows, &mut is_found)?;
            let tells_missing = table.config.out_of_vocabulary_key.is_some();
            let (mut start, mut silent_start) = (0, 0);
            for (to, (&(keys, silent), writer)) in asked.counts.iter().zip(&mut writers).enumerate() {
                let (keys, silent) = (start..start + keys, silent_start..silent_start + silent);
                (start, silent_start) = (keys.end, silent.end);
                if owners.is_replicated() && to != rank {
                    continue; // It reads its own rows.
                }
                writer.floats(&rows[keys.start * dim..keys.end * dim])?;
                writer.floats(&silent_rows[silent.start * dim..silent.end * dim])?;
                if tells_missing {
                    let keys = asked.keys[keys].iter().map(|&key| table.is_absent(key));
                    write_bits(keys.chain(is_found[silent].iter().map(|found| !found)), writer)?;
                }
            }
        }
        Ok(writers.into_iter().map(Writer::finish).collect())
    }
}

fn feature_of(asked: &Asked) -> Feature<'_> {
    Feature {
        name: "of other ranks",
        table: asked.table,
        keys: Keys::U64(&asked.keys),
        bags: Bags::Each,
        combiner: Combiner::Sum,
        weights: None,
        padding_key: None,
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
