//! The push: gradients that wait for a ticket to name them. No other rank is asked.

use super::group::ShardedGroup;
use super::sent::SentLookup;
use crate::contract::gradients::GradientRows;
use crate::contract::group::Group;
use crate::contract::profile::StepPart;
use crate::contract::ticket::write_ticket;
use crate::error::{Error, Result};
use crate::host::group::push::{check_gradients, gone_lookup};
use crate::host::pooling::MissingRow;
use crate::host::push::{OutputGradients, Push, PushedGradients, SavedTable, Spare, merge_push};
use crate::host::weight_gradient::WeightTrace;
use crate::pool::Pool;
use crate::row_type::RowType;
use crate::store::region::Region;

impl ShardedGroup {
    /// Takes the gradients of a lookup's outputs, as [`HostGroup::push`](crate::host::group::HostGroup::push).
    ///
    /// # Errors
    /// The same.
    pub fn push(
        &mut self,
        lookup: u64,
        gradients: OutputGradients,
        weight_gradients: Vec<&mut [f32]>,
        ticket: &mut [f32],
        pool: &Pool,
    ) -> Result<()> {
        let sent = self.lookups.iter().find(|sent| sent.saved.number == lookup);
        let sent = sent.ok_or_else(|| gone_lookup(self))?;
        check_gradients(&sent.saved, &gradients, &self.shard.tables)?;
        if self.binding().is_none() && self.pushes_without_optimizer > 0 {
            return Err(Error::UnwrappedOptimizer { tables: self.names() });
        }
        self.write_weight_gradients(sent, &gradients, weight_gradients)?;
        let saved = sent.saved.clone();
        let is_all_finite = !gradients.check_finite || gradients.are_finite(pool);
        let OutputGradients { rows, keep, .. } = gradients;
        let gradients = match keep {
            Some(keep) => PushedGradients::Held { rows, _keep: keep },
            None => {
                let start = self.shard.stopwatch.start();
                let merged = merge_sent(sent, &rows, self.row_type, &mut self.spare, pool)?;
                self.shard.stopwatch.stop(StepPart::Merge, start);
                PushedGradients::Merged(merged)
            }
        };
        self.pushes_without_optimizer += u32::from(self.binding().is_none());
        let (number, fallen) = self.ring.add(Push { lookup: saved, gradients });
        if let Some(push) = fallen {
            self.reuse(push);
        }
        write_ticket(number, is_all_finite, ticket);
        Ok(())
    }

    fn write_weight_gradients(
        &self,
        sent: &SentLookup,
        gradients: &OutputGradients,
        weight_gradients: Vec<&mut [f32]>,
    ) -> Result<()> {
        let tables = sent.saved.tables.iter().zip(&sent.tables);
        let traces = tables.flat_map(|(saved, sent)| {
            saved
                .looked
                .traces
                .iter()
                .map(move |(feature, trace)| (*feature, saved, sent.rows.as_ref(), trace))
        });
        let mut traces: Vec<(usize, &SavedTable, _, &WeightTrace)> = traces.collect();
        traces.sort_unstable_by_key(|&(feature, ..)| feature);
        if traces.len() != weight_gradients.len() {
            return Err(Error::argument(format!(
                "{} features have weights. Received: room for {} gradients",
                traces.len(),
                weight_gradients.len()
            )));
        }
        for ((feature, saved, rows, trace), written) in traces.into_iter().zip(weight_gradients) {
            let table = &self.shard.tables[saved.number];
            match rows {
                Some(rows) if saved.generation == table.generation && written.len() == trace.num_ids() => {
                    let missing = MissingRow::new(&table.first, None);
                    trace.gradients(rows, missing, gradients.rows[feature].get(), written);
                }
                _ => written.fill(0.0),
            }
        }
        Ok(())
    }

    pub(super) fn reuse(&mut self, push: Push) {
        if let PushedGradients::Merged(tables) = push.gradients {
            let tables = push.lookup.tables.iter().zip(tables);
            tables.for_each(|(table, sums)| self.spare[table.number].keep_sums(sums));
        }
        self.reuse_lookup(push.lookup);
    }
}

/// Merges the gradients of a lookup, by table. Gradients of bags that an owner pools are copied instead, one region for each feature,
/// because the owner merges them.
pub(super) fn merge_sent(
    sent: &SentLookup,
    rows: &[GradientRows],
    row_type: RowType,
    spare: &mut [Spare],
    pool: &Pool,
) -> Result<Vec<Vec<Region<f32>>>> {
    let mut merged = merge_push(&sent.saved, rows, spare, pool)?;
    for ((saved, sent), merged) in sent.saved.tables.iter().zip(&sent.tables).zip(&mut merged) {
        if sent.request.keys.is_replicated() {
            // All ranks must get the same gradients, also this one.
            row_type.round(&mut merged[0][..sent.request.keys.len() * saved.dim]);
        }
        if sent.pooling_owner.is_none() {
            continue;
        }
        for &feature in &saved.looked.features {
            let (rows, mut copy) = (rows[feature].get(), spare[saved.number].sums.pop().unwrap_or_default());
            copy.grow_amortized(rows.len())?;
            copy[..rows.len()].copy_from_slice(rows);
            merged.push(copy);
        }
    }
    Ok(merged)
}
