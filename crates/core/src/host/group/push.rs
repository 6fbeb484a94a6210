//! The push of a group: gradients that wait for a ticket to name them.

use super::HostGroup;
use crate::contract::group::{AnyGroup, Group};
use crate::contract::profile::StepPart;
use crate::contract::ticket::{RING, write_ticket};
use crate::error::{Error, Result};
use crate::host::pooling::MissingRow;
use crate::host::push::{OutputGradients, Push, PushedGradients, SavedLookup, SavedTable, merge_push};
use crate::host::table::HostTable;
use crate::pool::Pool;
use crate::row_type::with_number;

impl HostGroup {
    /// Takes the gradients of a lookup's outputs. Writes the ticket, `(64, 2)`, and the gradients of weights, `(ids,)` for each
    /// feature with weights. Returns the number of the push.
    ///
    /// # Errors
    /// [`Error::UnwrappedOptimizer`] at the second push to a group that no optimizer is bound to; [`Error::Ticket`] if the lookup no
    /// longer exists; [`Error::Argument`] for other lengths. Nothing has changed then.
    pub fn push(
        &mut self,
        lookup: u64,
        gradients: OutputGradients,
        weight_gradients: Vec<&mut [f32]>,
        ticket: &mut [f32],
        pool: &Pool,
    ) -> Result<u64> {
        let saved = self.lookups.iter().find(|l| l.number == lookup).cloned();
        let saved = saved.ok_or_else(|| gone_lookup(self))?;
        check_gradients(&saved, &gradients, &self.tables)?;
        if self.binding.is_none() && self.pushes_without_optimizer > 0 {
            return Err(Error::UnwrappedOptimizer { tables: self.names() });
        }
        if !weight_gradients.is_empty() {
            // A step may have come since the lookup.
            self.catch_up_tables();
        }
        self.write_weight_gradients(&saved, &gradients, weight_gradients)?;
        let is_all_finite = !gradients.check_finite || gradients.are_finite(pool);
        let OutputGradients { rows, keep, .. } = gradients;
        let gradients = match keep {
            Some(keep) => PushedGradients::Held { rows, _keep: keep },
            None => {
                let start = self.stopwatch.start();
                let merged = merge_push(&saved, &rows, &mut self.spare, pool)?;
                self.stopwatch.stop(StepPart::Merge, start);
                PushedGradients::Merged(merged)
            }
        };
        saved.tables.iter().for_each(|table| self.tables[table.number].count_call());
        self.pushes_without_optimizer += u32::from(self.binding.is_none());
        let (number, fallen) = self.ring.add(Push { lookup: saved, gradients });
        if let Some(push) = fallen {
            self.reuse(push);
        }
        write_ticket(number, is_all_finite, ticket);
        Ok(number)
    }

    /// Keeps the rows of a lookup in use, because a push of it waits elsewhere.
    pub(in crate::host) fn reopen_lookup(&self, number: u64) {
        self.lookups.iter().filter(|lookup| lookup.number == number).for_each(|lookup| lookup.set_open(true));
    }

    /// Drops a push that no commit has taken.
    pub(in crate::host) fn cancel_push(&mut self, number: u64) {
        if let Some(push) = self.ring.remove(number) {
            self.reuse(push);
        }
    }

    fn write_weight_gradients<'a>(
        &self,
        saved: &'a SavedLookup,
        gradients: &OutputGradients,
        weight_gradients: Vec<&mut [f32]>,
    ) -> Result<()> {
        let traces_of =
            |table: &'a SavedTable| table.looked.traces.iter().map(move |(f, trace)| (*f, table, trace));
        let traces = saved.tables.iter().flat_map(traces_of);
        let mut traces: Vec<_> = traces.collect();
        traces.sort_unstable_by_key(|&(feature, ..)| feature);
        if traces.len() != weight_gradients.len() {
            return Err(Error::argument(format!(
                "{} features have weights. Received: room for {} gradients",
                traces.len(),
                weight_gradients.len()
            )));
        }
        for ((feature, saved, trace), written) in traces.into_iter().zip(weight_gradients) {
            let table = &self.tables[saved.number];
            if saved.generation == table.generation && written.len() == trace.num_ids() {
                let rows = gradients.rows[feature].get();
                with_number!(table.config.row_type, N => {
                    let missing = MissingRow::new(&table.first, table.shared_missing_row());
                    trace.gradients(&table.arena.rows::<N>(), missing, rows, written);
                });
            } else {
                written.fill(0.0);
            }
        }
        Ok(())
    }
}

/// The error for a push of a lookup that no longer exists.
pub(in crate::host) fn gone_lookup(group: &AnyGroup) -> Error {
    Error::Ticket {
        tables: group.names(),
        what: format!(
            "a gradient comes for a lookup that is gone: older than the newest {RING}, or from before a load"
        ),
    }
}

pub(in crate::host) fn check_gradients(
    saved: &SavedLookup,
    gradients: &OutputGradients,
    tables: &[HostTable],
) -> Result<()> {
    let (rows, num_features) = (&gradients.rows, saved.num_bags.len());
    if rows.len() != num_features {
        return Err(Error::argument(format!(
            "a push brings the gradient of each feature. Received: {} of {num_features}",
            rows.len()
        )));
    }
    for table in &saved.tables {
        for &feature in &table.looked.features {
            let (expected, received) = (saved.num_bags[feature] * table.dim, rows[feature].get().len());
            if received != expected {
                return Err(Error::argument(format!(
                    "the gradient of a feature of table `{}` must hold {expected} numbers. Received: {received}",
                    tables[table.number].config.name
                )));
            }
        }
    }
    Ok(())
}
