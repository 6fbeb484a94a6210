//! This rank's side of a lookup.

use std::sync::Arc;

use super::at_owner::{pooling_owner, write_features};
use super::group::ShardedGroup;
use super::owned::counts_ids;
use super::pool::{NumberedIds, pool_table};
use super::received::ReceivedRows;
use super::requests::Request;
use super::sent::{SentLookup, SentTable};
use super::serve::{LookupMode, Served};
use crate::contract::batch::Feature;
use crate::contract::profile::StepPart;
use crate::contract::table::Insertion;
use crate::contract::ticket::RING;
use crate::error::Result;
use crate::exchange::collectives::exchange;
use crate::exchange::message::{Call, Tag};
use crate::host::features::FeatureOutput;
use crate::host::lookup::Looked;
use crate::host::push::{SavedLookup, SavedTable};
use crate::memory;
use crate::pool::{FirstError, Pool, run_if_large};

/// A table's part of a lookup that runs.
struct TableCall<'a> {
    number: usize,
    features: Vec<FeatureOutput<'a>>,
    request: Request,
    /// The rank that pools the bags, if that is not this one.
    pooling_owner: Option<usize>,
}

impl ShardedGroup {
    /// Looks up the rows of all features of a layer's call, as [`HostGroup::lookup`](crate::host::group::HostGroup::lookup). All ranks
    /// must call it.
    ///
    /// # Errors
    /// The same, and [`Error::Rank`](crate::Error::Rank). Nothing has changed then.
    pub fn lookup(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        outputs: Vec<&mut [f32]>,
        pool: &Pool,
    ) -> Result<u64> {
        let looked = self.look_up(features, insertion, save, outputs, pool);
        looked.inspect_err(|_| self.shard.abandon_steps_after(insertion))
    }

    fn look_up(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        outputs: Vec<&mut [f32]>,
        pool: &Pool,
    ) -> Result<u64> {
        self.num_lookups += 1;
        let tag = self.tag(Call::Lookup, self.num_lookups);
        let mode = LookupMode { insertion, save };
        let start = self.shard.stopwatch.start();
        let calls = self.make_requests(features, save, outputs, pool);
        self.shard.stopwatch.stop(StepPart::Distinct, start);
        let (calls, messages) = match calls {
            Ok(calls) => {
                let messages = self.write_requests(mode, &calls);
                (calls, messages)
            }
            Err(error) => (Vec::new(), Err(error)),
        };
        let asked = self.exchange(tag, messages)?;
        let tables: Vec<usize> = calls.iter().map(|call| call.number).collect();
        let before = self.shard.stats_before_lookup();
        let (replies, served) = match self.serve(&asked, &tables, mode, pool) {
            Ok((replies, served)) => (Ok(replies), Some(served)),
            Err(error) => (Err(error), None),
        };
        drop(asked);
        let replies = match self.exchange(tag.at(1), replies) {
            Ok(replies) => replies,
            Err(error) => {
                if served.is_some() {
                    self.shard.undo_lookup(&before, save);
                }
                return Err(error);
            }
        };
        let Served { number, pooled } = served.unwrap_or_default();
        let start = self.shard.stopwatch.start();
        let (saved, sent) = self.pool_rows(calls, &replies, save, pool)?;
        self.shard.stopwatch.stop(StepPart::Pool, start);
        if save {
            let num_bags = memory::collect(features.iter().map(Feature::num_bags), "the features of a call")?;
            self.save(SentLookup {
                saved: Arc::new(SavedLookup::new(number, num_bags, saved)),
                tables: sent,
                pooled,
            });
        }
        Ok(number)
    }

    /// Exchanges messages, and measures how long that takes.
    pub(super) fn exchange(&mut self, tag: Tag, messages: Result<Vec<Vec<u8>>>) -> Result<Vec<Vec<u8>>> {
        let start = self.shard.stopwatch.start();
        let received = exchange(&*self.communicator, tag, messages);
        self.shard.stopwatch.stop(StepPart::Exchange, start);
        received
    }

    fn make_requests<'a>(
        &mut self,
        features: &[Feature<'a>],
        save: bool,
        outputs: Vec<&'a mut [f32]>,
        pool: &Pool,
    ) -> Result<Vec<TableCall<'a>>> {
        self.shard.check_features(features, &outputs)?;
        let mut by_table: Vec<Vec<FeatureOutput>> = self.requests.iter().map(|_| Vec::new()).collect();
        for (number, (feature, rows)) in features.iter().zip(outputs).enumerate() {
            by_table[feature.table].push(FeatureOutput { number, feature: *feature, rows });
        }
        let num_ids = features.iter().map(|feature| feature.keys.len()).sum();
        let mut made: Vec<Option<Result<Request>>> = by_table.iter().map(|_| None).collect();
        let tables = self.shard.tables.iter().zip(&mut self.requests).zip(&by_table).zip(&mut made);
        let tasks: Vec<_> = tables.filter(|((_, features), _)| !features.is_empty()).collect();
        run_if_large(num_ids, tasks, pool, |(((table, requests), features), made)| {
            *made = Some(requests.collect(&table.config, features, save));
        });
        let mut calls = Vec::new();
        for (number, (features, request)) in by_table.into_iter().zip(made).enumerate() {
            let Some(request) = request.transpose()? else { continue };
            let (requests, dim) = (&self.requests[number], self.shard.tables[number].config.dim);
            let pooling_owner = pooling_owner(requests, &request, &features, dim, save);
            calls.push(TableCall { number, features, request, pooling_owner });
        }
        Ok(calls)
    }

    fn write_requests(&self, mode: LookupMode, calls: &[TableCall]) -> Result<Vec<Vec<u8>>> {
        let tables: Vec<usize> = calls.iter().map(|call| call.number).collect();
        let message = |to: usize| {
            let mut writer = self.writer_to(to);
            self.write_header(mode, &tables, &mut writer)?;
            for TableCall { number, request, features, pooling_owner } in calls {
                let (keys, silent) = (request.keys.sent_to(to), request.silent.received_from(to));
                let pooled = if *pooling_owner == Some(to) { &features[..] } else { &[] };
                writer.numbers(&[keys.len() as u64, silent.len() as u64, pooled.len() as u64])?;
                writer.numbers(&request.keys.keys()[keys.clone()])?;
                if counts_ids(&self.shard.tables[*number].config) {
                    writer.words(&request.counts[keys.clone()])?;
                }
                if self.shard.tables[*number].config.takes_scores() {
                    writer.number(request.scores.is_some().into())?;
                    request.scores.iter().try_for_each(|scores| writer.numbers(&scores[keys.clone()]))?;
                }
                writer.numbers(&request.silent.keys()[silent])?;
                write_features(pooled, &self.requests[*number].rows, &mut writer)?;
            }
            Ok(writer.finish())
        };
        (0..self.communicator.world_size()).map(message).collect()
    }

    /// Writes the outputs from the rows that came. Returns what a push needs, by table.
    fn pool_rows(
        &mut self,
        mut calls: Vec<TableCall>,
        replies: &[Vec<u8>],
        save: bool,
        pool: &Pool,
    ) -> Result<(Vec<SavedTable>, Vec<SentTable>)> {
        let received = self.read_rows(&mut calls, replies)?;
        let num_ids =
            calls.iter().flat_map(|call| &call.features).map(|output| output.feature.keys.len()).sum();
        let error = FirstError::default();
        let mut looked: Vec<Looked> = calls.iter().map(|_| Looked::default()).collect();
        let mut tasks = Vec::new();
        for ((call, rows), looked) in calls.iter_mut().zip(&received).zip(&mut looked) {
            if call.pooling_owner.is_some() {
                looked.features = call.features.iter().map(|output| output.number).collect();
                continue;
            }
            let (table, requests) = (&self.shard.tables[call.number], &self.requests[call.number]);
            let runs = save.then(|| self.spare[call.number].runs.pop().unwrap_or_default());
            tasks.push((table, requests, call, rows, runs, looked));
        }
        run_if_large(num_ids, tasks, pool, |(table, requests, call, rows, runs, looked)| {
            let ids =
                NumberedIds { rows: &requests.rows, marks: &requests.marks, counts: &call.request.counts };
            let pooled = pool_table(table, &mut call.features, ids, rows, runs);
            error.note(pooled.map(|done| *looked = done));
        });
        error.into_result()?;
        let (mut saved, mut sent) = (Vec::new(), Vec::new());
        for ((call, looked), rows) in calls.into_iter().zip(looked).zip(received) {
            let rows = (!looked.traces.is_empty()).then_some(rows);
            saved.push(SavedTable::new(call.number, &self.shard.tables[call.number], looked));
            sent.push(SentTable { request: call.request, pooling_owner: call.pooling_owner, rows });
        }
        Ok((saved, sent))
    }

    /// Reads the rows that came, and writes the outputs that owners have pooled.
    fn read_rows(&self, calls: &mut [TableCall], replies: &[Vec<u8>]) -> Result<Vec<ReceivedRows>> {
        let dim = |call: &TableCall| self.shard.tables[call.number].config.dim;
        let rows = calls.iter().map(|call| match call.pooling_owner {
            Some(_) => Ok(ReceivedRows::default()),
            None => ReceivedRows::new(&call.request, dim(call)),
        });
        let mut rows = rows.collect::<Result<Vec<_>>>()?;
        let mut missing: Vec<Vec<u32>> = calls.iter().map(|_| Vec::new()).collect();
        for (from, reply) in replies.iter().enumerate() {
            let mut reader = self.reader_of(reply, from);
            for ((call, rows), missing) in calls.iter_mut().zip(&mut rows).zip(&mut missing) {
                if let Some(owner) = call.pooling_owner {
                    if from == owner {
                        call.features.iter_mut().try_for_each(|output| reader.rows(output.rows))?;
                    }
                    continue;
                }
                let is_replicated = self.requests[call.number].owners.is_replicated();
                if !is_replicated || from == self.communicator.rank() {
                    missing.extend(rows.read(&call.request, from, &mut reader)?);
                }
            }
            reader.finish()?;
        }
        for ((call, rows), missing) in calls.iter().zip(&mut rows).zip(&missing) {
            if let Some(place) = call.request.out_of_vocabulary.filter(|_| call.pooling_owner.is_none()) {
                rows.overwrite(missing, call.request.keys.len() as u32 + place + 1);
            }
        }
        Ok(rows)
    }

    fn save(&mut self, lookup: SentLookup) {
        self.lookups.push_back(lookup);
        if self.lookups.len() as u64 > RING {
            self.forget_lookups(self.lookups[1].saved.number);
        }
    }

    /// The oldest lookup whose gradients wait for a ticket.
    pub(super) fn oldest_needed(&self) -> Option<u64> {
        self.ring.iter().map(|push| push.lookup.number).min()
    }

    /// Drops the lookups before `oldest` whose gradients do not wait for a ticket. Later lookups reuse their memory.
    pub(super) fn forget_lookups(&mut self, oldest: u64) {
        let oldest = self.oldest_needed().map_or(oldest, |needed| needed.min(oldest));
        while self.lookups.front().is_some_and(|lookup| lookup.saved.number < oldest) {
            if let Some(lookup) = self.lookups.pop_front() {
                lookup.pooled.into_iter().for_each(|pooled| self.reuse_lookup(Arc::new(pooled)));
                self.reuse_lookup(lookup.saved);
            }
        }
    }

    pub(super) fn reuse_lookup(&mut self, lookup: Arc<SavedLookup>) {
        for table in Arc::into_inner(lookup).into_iter().flat_map(|lookup| lookup.tables) {
            self.spare[table.number].keep_runs(table.looked.runs);
        }
    }
}
