//! The owner's side of a lookup: the rows that all ranks ask for.

use super::group::ShardedGroup;
use super::owned::{Asked, OwnedRows};
use crate::contract::batch::Feature;
use crate::contract::profile::StepPart;
use crate::contract::table::Insertion;
use crate::error::{Error, Result};
use crate::exchange::message::{Reader, Writer};
use crate::host::push::SavedLookup;
use crate::memory;
use crate::pool::{FirstError, Pool, run_if_large};

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

/// What the owner keeps of a lookup.
#[derive(Default)]
pub(super) struct Served {
    /// Number of the shard's lookup.
    pub number: u64,
    /// By rank: the bags that were pooled for it.
    pub pooled: Vec<SavedLookup>,
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

    /// Looks up the keys of all ranks. `tables`: numbers of the call's tables. Returns the message to each rank.
    pub(super) fn serve(
        &mut self,
        requests: &[Vec<u8>],
        tables: &[usize],
        mode: LookupMode,
        pool: &Pool,
    ) -> Result<(Vec<Vec<u8>>, Served)> {
        let asked = self.read_requests(requests, tables, mode)?;
        let dim = |asked: &Asked| self.shard.tables[asked.table].config.dim;
        let rows = asked
            .iter()
            .map(|asked| memory::filled(0.0, asked.keys.len() * dim(asked), "the rows of all ranks"));
        let mut rows = rows.collect::<Result<Vec<_>>>()?;
        let features: Vec<Feature> = asked.iter().map(Asked::feature).collect();
        let outputs = rows.iter_mut().map(|rows| &mut rows[..]).collect();
        let before = self.shard.stats_before_lookup();
        self.shard.oldest_needed = self.oldest_needed();
        let number = self.shard.lookup(&features, mode.insertion, mode.save, outputs, pool)?;
        let answered = self.answer(&asked, rows, mode.save, pool);
        if answered.is_err() {
            self.shard.undo_lookup(&before, mode.save);
        }
        let (replies, pooled) = answered?;
        Ok((replies, Served { number, pooled }))
    }

    /// Pools bags for other ranks, and writes the message to each rank. `rows`: rows of the keys of all ranks, by table.
    fn answer(
        &mut self,
        asked: &[Asked],
        rows: Vec<Vec<f32>>,
        save: bool,
        pool: &Pool,
    ) -> Result<(Vec<Vec<u8>>, Vec<SavedLookup>)> {
        for asked in asked {
            self.shard.tables[asked.table].catch_up_keys(asked.silent().iter().copied())?;
        }
        let tables = asked.iter().map(|asked| &self.shard.tables[asked.table]).zip(rows).zip(asked);
        let owned = tables.map(|((table, rows), asked)| OwnedRows::new(asked, table, rows));
        let owned = owned.collect::<Result<Vec<_>>>()?;
        let (mut tasks, mut num_ids) = (Vec::new(), 0);
        for owned in &owned {
            for rank in owned.asked.pooled_ranks() {
                let runs = save.then(|| self.spare[owned.asked.table].runs.pop().unwrap_or_default());
                tasks.push((owned, rank, runs));
                num_ids += owned.asked.num_pooled_ids(rank);
            }
        }
        let (error, start) = (FirstError::default(), self.shard.stopwatch.start());
        run_if_large(num_ids, tasks, pool, |(owned, rank, runs)| error.note(owned.pool(rank, runs)));
        self.shard.stopwatch.stop(StepPart::Pool, start);
        error.into_result()?;
        let replies = self.write_replies(&owned)?;
        let none = || SavedLookup::new(0, Vec::new(), Vec::new());
        let mut saved: Vec<SavedLookup> = (0..self.communicator.world_size()).map(|_| none()).collect();
        if save {
            owned.into_iter().for_each(|owned| owned.save(&mut saved));
        }
        Ok((replies, saved))
    }

    fn read_requests(&self, requests: &[Vec<u8>], tables: &[usize], mode: LookupMode) -> Result<Vec<Asked>> {
        let mut asked: Vec<Asked> =
            tables.iter().map(|&table| Asked::new(table, &self.shard.tables[table].config)).collect();
        for (from, request) in requests.iter().enumerate() {
            let mut reader = Reader::new(request, from);
            self.check_header(mode, tables, from, &mut reader)?;
            asked.iter_mut().try_for_each(|asked| asked.read(from, &mut reader))?;
            reader.finish()?;
        }
        Ok(asked)
    }

    fn write_replies(&self, owned: &[OwnedRows]) -> Result<Vec<Vec<u8>>> {
        let rank = self.communicator.rank();
        let reply = |to: usize| {
            let mut writer = self.writer_to(to);
            // With a byte for the exchange.
            writer.reserve(owned.iter().map(|owned| owned.num_bytes(to)).sum::<usize>() + 1)?;
            for owned in owned {
                // Each rank reads its own rows of a replicated table.
                if to == rank || !self.requests[owned.asked.table].owners.is_replicated() {
                    owned.write(to, &mut writer)?;
                }
            }
            Ok(writer.finish())
        };
        (0..self.communicator.world_size()).map(reply).collect()
    }
}
