//! This rank's side of a lookup.

use std::sync::Arc;

use super::group::ShardedGroup;
use super::received::ReceivedRows;
use super::requests::{Request, Requests};
use super::sent::{SentLookup, SentTable};
use super::serve::LookupMode;
use crate::contract::batch::Feature;
use crate::contract::profile::StepPart;
use crate::contract::table::Insertion;
use crate::contract::ticket::RING;
use crate::error::Result;
use crate::exchange::collectives::exchange;
use crate::exchange::message::{Call, Reader, Tag, Writer};
use crate::host::features::{FeatureOutput, is_plain, is_weighted, row_code};
use crate::host::lookup::{Looked, plain_coefficient, trace};
use crate::host::pooling::{MissingRow, PlainPooling, PoolRange, pool_bags};
use crate::host::push::{SavedLookup, SavedTable};
use crate::host::runs::{KeyRuns, sort_plain, sort_weighted};
use crate::host::table::HostTable;
use crate::memory;
use crate::pool::{FirstError, Pool, run_if_large};
use crate::simd::{dispatch, streaming_fence};
use crate::store::region::Region;

/// A table's part of a lookup that runs.
struct TableCall<'a> {
    number: usize,
    features: Vec<FeatureOutput<'a>>,
    request: Request,
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
        let (replies, number) = match self.serve(&asked, &tables, mode, pool) {
            Ok((replies, number)) => (Ok(replies), Some(number)),
            Err(error) => (Err(error), None),
        };
        drop(asked);
        let replies = match self.exchange(tag.at(1), replies) {
            Ok(replies) => replies,
            Err(error) => {
                if number.is_some() {
                    self.shard.undo_lookup(&before, save);
                }
                return Err(error);
            }
        };
        let (number, start) = (number.unwrap_or_default(), self.shard.stopwatch.start());
        let (saved, sent) = self.pool_rows(calls, &replies, save, pool)?;
        self.shard.stopwatch.stop(StepPart::Pool, start);
        if save {
            let num_bags = memory::collect(features.iter().map(Feature::num_bags), "the features of a call")?;
            self.save(SentLookup {
                saved: Arc::new(SavedLookup { number, num_bags, tables: saved }),
                tables: sent,
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
            if let Some(request) = request {
                calls.push(TableCall { number, features, request: request? });
            }
        }
        Ok(calls)
    }

    fn write_requests(&self, mode: LookupMode, calls: &[TableCall]) -> Result<Vec<Vec<u8>>> {
        let tables: Vec<usize> = calls.iter().map(|call| call.number).collect();
        let message = |to: usize| {
            let mut writer = Writer::default();
            self.write_header(mode, &tables, &mut writer)?;
            for TableCall { request, .. } in calls {
                let (keys, silent) = (request.keys.sent_to(to), request.silent.received_from(to));
                writer.numbers(&[keys.len() as u64, silent.len() as u64])?;
                writer.numbers(&request.keys.keys()[keys])?;
                writer.numbers(&request.silent.keys()[silent])?;
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
        let mut received = self.read_rows(&calls, replies)?;
        let num_ids =
            calls.iter().flat_map(|call| &call.features).map(|output| output.feature.keys.len()).sum();
        let error = FirstError::default();
        let mut looked: Vec<Looked> = calls.iter().map(|_| Looked::default()).collect();
        let mut requests: Vec<Option<&mut Requests>> = self.requests.iter_mut().map(Some).collect();
        let mut tasks = Vec::new();
        for ((call, rows), looked) in calls.iter_mut().zip(&received).zip(&mut looked) {
            let (Some(requests), spare) = (requests[call.number].take(), &mut self.spare[call.number]) else {
                continue;
            };
            tasks.push((
                &self.shard.tables[call.number],
                requests,
                call,
                rows,
                spare.runs.pop().unwrap_or_default(),
                looked,
            ));
        }
        run_if_large(num_ids, tasks, pool, |(table, requests, call, rows, runs, looked)| {
            error.note(
                pool_table(table, requests, call, rows, save.then_some(runs)).map(|done| *looked = done),
            );
        });
        error.into_result()?;
        let (mut saved, mut sent) = (Vec::new(), Vec::new());
        for (call, looked) in calls.into_iter().zip(looked) {
            let rows = received.remove(0);
            let rows = (!looked.traces.is_empty()).then_some(rows);
            saved.push(SavedTable::new(call.number, &self.shard.tables[call.number], looked));
            sent.push(SentTable { request: call.request, rows });
        }
        Ok((saved, sent))
    }

    fn read_rows(&self, calls: &[TableCall], replies: &[Vec<u8>]) -> Result<Vec<ReceivedRows>> {
        let dim = |call: &TableCall| self.shard.tables[call.number].config.dim;
        let rows = calls.iter().map(|call| ReceivedRows::new(&call.request, dim(call)));
        let mut rows = rows.collect::<Result<Vec<_>>>()?;
        let mut missing: Vec<Vec<u32>> = calls.iter().map(|_| Vec::new()).collect();
        for (from, reply) in replies.iter().enumerate() {
            let mut reader = Reader::new(reply, from);
            for ((call, rows), missing) in calls.iter().zip(&mut rows).zip(&mut missing) {
                let is_replicated = self.requests[call.number].owners.is_replicated();
                if !is_replicated || from == self.communicator.rank() {
                    missing.extend(rows.read(&call.request, from, &mut reader)?);
                }
            }
            reader.finish()?;
        }
        for ((call, rows), missing) in calls.iter().zip(&mut rows).zip(&missing) {
            if let Some(place) = call.request.out_of_vocabulary {
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

/// Pools the features of a table. `runs`: memory for the sorted ids, if a push may follow.
fn pool_table(
    table: &HostTable,
    requests: &mut Requests,
    call: &mut TableCall,
    rows: &ReceivedRows,
    runs: Option<KeyRuns>,
) -> Result<Looked> {
    let features = &mut call.features;
    let num_ids = features.iter().map(|output| output.feature.keys.len()).sum();
    let weighted = runs.is_some() && is_weighted(features);
    let mut coefficients = Region::new(0)?;
    coefficients.grow_amortized(if weighted { num_ids } else { 0 })?;
    let mut start = 0;
    for output in features.iter_mut() {
        let ids = start..start + output.feature.keys.len();
        start = ids.end;
        let coefficients = if weighted { &mut coefficients[ids.clone()] } else { &mut [] };
        pool_feature(table, output, rows, &requests.rows[ids], coefficients);
    }
    streaming_fence();
    let Some(mut runs) = runs else { return Ok(Looked::default()) };
    let mut looked = Looked {
        code: row_code(features)?,
        features: features.iter().map(|output| output.number).collect(),
        ..Looked::default()
    };
    let counts = call.request.counts.iter().enumerate();
    runs.start(counts.map(|(place, &count)| (place as u32 + 1, count)), weighted)?;
    let mut start = 0;
    for (local, output) in features.iter().enumerate() {
        let ids = start..start + output.feature.keys.len();
        start = ids.end;
        let first_row = looked.code.encode(local, 0);
        if weighted {
            sort_weighted(
                &output.feature,
                &requests.marks[ids.clone()],
                &coefficients[ids.clone()],
                first_row,
                &mut runs,
            );
        } else {
            sort_plain(&output.feature, &requests.marks[ids.clone()], first_row, &mut runs);
        }
        trace(output, &requests.rows[ids], &mut looked)?;
    }
    looked.runs.push(runs);
    Ok(looked)
}

fn pool_feature(
    table: &HostTable,
    output: &mut FeatureOutput,
    rows: &ReceivedRows,
    numbers: &[u32],
    coefficients: &mut [f32],
) {
    match table.config.dim {
        _ if !is_plain(&output.feature, &table.config) => {
            let (bags, mut missing) = (0..output.feature.num_bags(), MissingRow::new(&table.first, None));
            pool_bags(&output.feature, bags, rows, numbers, &mut missing, output.rows, coefficients);
        }
        16 => pool_plain::<16>(table, output, rows, numbers, coefficients),
        32 => pool_plain::<32>(table, output, rows, numbers, coefficients),
        64 => pool_plain::<64>(table, output, rows, numbers, coefficients),
        128 => pool_plain::<128>(table, output, rows, numbers, coefficients),
        _ => pool_plain::<0>(table, output, rows, numbers, coefficients),
    }
}

fn pool_plain<const D: usize>(
    table: &HostTable,
    output: &mut FeatureOutput,
    rows: &ReceivedRows,
    numbers: &[u32],
    coefficients: &mut [f32],
) {
    let missing = MissingRow::new(&table.first, None);
    let pooling = PlainPooling::<D>::new(&output.feature, output.rows, missing, false);
    dispatch(PoolRange { pooling, rows, records: numbers });
    coefficients.fill(plain_coefficient(&output.feature));
}
