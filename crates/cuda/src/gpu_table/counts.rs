//! The counts of a table: those of the device, and the statistics that contain them.

use sok_core::contract::table::{CheckMode, Outcomes, TableStats};
use sok_core::error::Result;

use super::GpuTable;
use crate::abi::{Counters, DISTINCT, DROPPED, FILTERED, GONE_ROWS, TableCounts, UNKNOWN};
use crate::memory;

impl GpuTable {
    /// Reads the counts from the device, which must be idle.
    pub(crate) fn learn(&mut self) -> Result<()> {
        self.reported = self.counts()?;
        self.is_recounted = true;
        (self.max_taken, self.max_rows) = (self.reported.taken, self.rows());
        self.ring.learn();
        Ok(())
    }

    /// Notes that a commit was enqueued, whose report has the counts of now.
    pub(crate) fn expect_report(&mut self) {
        self.is_recounted = false;
        self.ring.expect_report();
    }

    /// Takes over the counts of a commit's report. `since`: number of ids looked up to insert since that commit.
    pub(crate) fn learn_from(&mut self, counts: TableCounts, since: u64) {
        if self.is_recounted {
            return;
        }
        self.reported = counts;
        (self.max_taken, self.max_rows) = (counts.taken, self.rows());
        self.ring.learn_from_report();
        self.expect(since);
    }

    /// Reads the counts from the device, which must be idle.
    pub(super) fn counts(&self) -> Result<TableCounts> {
        let all = memory::read::<Counters>(&self.device.context, self.index.counters.address(), 1)?;
        let Counters { taken, gone, evicted, expired, unlisted, released, .. } = all[0];
        let Counters { distinct, dropped, unknown, filtered, .. } = all[0];
        Ok(TableCounts {
            taken,
            gone,
            evicted,
            expired,
            unlisted,
            released,
            distinct,
            dropped,
            unknown,
            filtered,
        })
    }

    /// Adds the counts of steps to the statistics, and resets them on the device. Takes over which rows sweeps have removed. The device must
    /// be idle.
    pub(crate) fn count_steps(&mut self) -> Result<()> {
        self.learn()?;
        let TableCounts { taken, evicted, expired, distinct, dropped, unknown, filtered, .. } = self.reported;
        let inserted = taken - self.counted[0];
        self.stats.outcomes.inserted += inserted;
        self.stats.outcomes.hit += distinct.saturating_sub(inserted + self.admitted);
        self.stats.outcomes.evicted += evicted - self.counted[1];
        self.stats.outcomes.expired += expired - self.counted[2];
        self.stats.dropped_gradients += dropped;
        self.stats.unknown_ids += unknown;
        self.stats.outcomes.filtered += filtered;
        self.admitted = 0;
        self.forget_counts()?;
        [UNKNOWN, FILTERED].into_iter().try_for_each(|at| self.index.counters.write(at, &[0; 2]))?;
        self.counted = [taken, evicted, expired];
        let (unknown, filtered) = (0, 0);
        self.reported = TableCounts { unknown, filtered, ..self.reported };
        self.take_departures()
    }

    /// Resets the distinct keys and dropped gradients on the device, after launches that were not steps. The device must be idle.
    pub(crate) fn forget_counts(&mut self) -> Result<()> {
        self.index.counters.write(DROPPED, &[0; 2])?;
        self.reported.dropped = 0;
        self.forget_distinct()
    }

    /// Resets the distinct keys on the device, after a launch that was not a step. The device must be idle.
    pub(crate) fn forget_distinct(&mut self) -> Result<()> {
        self.reported.distinct = 0;
        self.index.counters.write(DISTINCT, &[0; 2])
    }

    /// Returns the number of keys inserted since the numbers were last counted. The caller adds it to the statistics. The device
    /// must be idle.
    pub(crate) fn count_inserted(&mut self) -> Result<u64> {
        self.learn()?;
        Ok(self.reported.taken - std::mem::replace(&mut self.counted[0], self.reported.taken))
    }

    /// Returns the number of rows that sweeps have removed since that was last counted, as `count_inserted`.
    pub(super) fn count_evicted(&mut self) -> Result<u64> {
        self.learn()?;
        Ok(self.reported.evicted - std::mem::replace(&mut self.counted[1], self.reported.evicted))
    }

    /// Takes over that the host has removed rows. The device must be idle, and its counts known.
    pub(super) fn count_gone(&mut self, rows: u64) -> Result<()> {
        self.reported.gone += rows;
        self.max_rows = self.rows();
        let gone = self.reported.gone;
        self.index.counters.write(GONE_ROWS, &[gone as u32, (gone >> 32) as u32])
    }

    /// Adds outcomes to the statistics.
    pub(crate) fn note(&mut self, outcomes: Outcomes) {
        self.stats.outcomes += outcomes;
        if self.config.check_mode == CheckMode::Warn {
            self.refused_to_warn += outcomes.refused;
        }
    }

    /// Prevents keys from being counted as hits. They were admitted for the next lookup, which will count them as found.
    pub(crate) fn take_hits(&mut self, admitted: u64) {
        self.admitted += admitted;
    }

    /// Counts a call of a step that uses the table.
    pub(crate) fn count_call(&mut self) {
        self.stats.native_calls += 1;
    }

    /// Waits for the device, and adds the counts of steps to the statistics.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.device.synchronize()?;
        self.count_steps()
    }

    /// Returns the statistics, with these counts of the device added.
    pub(super) fn stats_of(&self, counts: TableCounts) -> TableStats {
        let inserted = counts.taken - self.counted[0];
        let mut stats = TableStats {
            size: counts.taken - counts.gone,
            capacity: self.index.capacity() as u64,
            bytes: (self.index.num_bytes()
                + self.arena.num_bytes()
                + self.ring.num_bytes()
                + self.evictor.as_ref().map_or(0, |evictor| evictor.num_bytes())
                + self.taken.as_ref().map_or(0, |taken| taken.num_bytes())
                + self.candidates.as_ref().map_or(0, |candidates| candidates.num_bytes())
                + self.changes.as_ref().map_or(0, |changes| changes.num_bytes())) as u64,
            ..self.stats
        };
        stats.outcomes.inserted += inserted;
        stats.outcomes.hit += counts.distinct.saturating_sub(inserted + self.admitted);
        stats.outcomes.evicted += counts.evicted - self.counted[1];
        stats.outcomes.expired += counts.expired - self.counted[2];
        stats.dropped_gradients += counts.dropped;
        stats.unknown_ids += counts.unknown;
        stats.outcomes.filtered += counts.filtered;
        stats
    }
}
