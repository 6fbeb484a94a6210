//! The counts of a table: those of the device, and the statistics that contain them.

use sok_core::contract::table::{CheckMode, Outcomes, TableStats};
use sok_core::error::Result;

use super::GpuTable;
use crate::abi::{COUNTERS_WORDS, DISTINCT, DROPPED, FILTERED, TAKEN, TableCounts, UNKNOWN};
use crate::memory::Buffer;

impl GpuTable {
    /// Reads from the device how many numbers are taken. The device must be idle.
    pub(crate) fn learn(&mut self) -> Result<()> {
        self.max_taken = u64::from(self.index.counters.read(TAKEN, 1)?[0]);
        Ok(())
    }

    /// Notes that a commit was enqueued, whose report has the counts of now.
    pub(crate) fn expect_report(&mut self) {
        self.is_recounted = false;
    }

    /// Takes over the counts of a commit's report. `since`: number of ids looked up to insert since that commit.
    pub(crate) fn learn_from(&mut self, counts: TableCounts, since: u64) {
        let counts = if self.is_recounted { TableCounts::default() } else { counts };
        // Keys may have been inserted outside a step since the report was written.
        let taken = counts.taken.max(self.counted);
        self.max_taken = u64::from(taken);
        self.expect(since);
        self.reported = TableCounts { taken, ..counts };
    }

    /// Reads the counts from the device, which must be idle.
    pub(super) fn counts(&self) -> Result<TableCounts> {
        let words = self.index.counters.read(0, COUNTERS_WORDS)?;
        let wide = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        let (distinct, dropped, unknown) = (wide(DISTINCT), wide(DROPPED), wide(UNKNOWN));
        Ok(TableCounts { taken: words[TAKEN], pad: 0, distinct, dropped, unknown, filtered: wide(FILTERED) })
    }

    /// Adds the counts of steps to the statistics, and resets them on the device. The device must be idle.
    pub(crate) fn count_steps(&mut self) -> Result<()> {
        let counts = self.counts()?;
        let inserted = u64::from(counts.taken - self.counted);
        self.stats.outcomes.inserted += inserted;
        self.stats.outcomes.hit += counts.distinct.saturating_sub(inserted + self.admitted);
        self.stats.dropped_gradients += counts.dropped;
        self.stats.unknown_ids += counts.unknown;
        self.stats.outcomes.filtered += counts.filtered;
        self.admitted = 0;
        self.forget_counts()?;
        [UNKNOWN, FILTERED].into_iter().try_for_each(|at| self.index.counters.write(at, &[0; 2]))?;
        self.counted = counts.taken;
        self.reported = TableCounts { taken: self.counted, ..TableCounts::default() };
        self.is_recounted = true;
        self.max_taken = u64::from(counts.taken);
        Ok(())
    }

    /// Takes back what the device has counted since `before`, in a call that has inserted nothing. The device must be idle.
    pub(crate) fn undo_counts(&mut self, before: TableCounts) -> Result<()> {
        let counts = [(DISTINCT, before.distinct), (DROPPED, before.dropped), (UNKNOWN, before.unknown)];
        let write =
            |(at, count): (usize, u64)| self.index.counters.write(at, &[count as u32, (count >> 32) as u32]);
        counts.into_iter().try_for_each(write)
    }

    /// Resets the distinct keys and dropped gradients on the device, after launches that were not steps. The device must be idle.
    pub(crate) fn forget_counts(&mut self) -> Result<()> {
        self.index.counters.write(DROPPED, &[0; 2])?;
        self.forget_distinct()
    }

    /// Resets the distinct keys on the device, after a launch that was not a step. The device must be idle.
    pub(crate) fn forget_distinct(&mut self) -> Result<()> {
        self.index.counters.write(DISTINCT, &[0; 2])
    }

    /// Returns the number of keys inserted since the numbers were last counted. The caller adds it to the statistics. The device
    /// must be idle.
    pub(crate) fn count_inserted(&mut self) -> Result<u64> {
        self.learn()?;
        let inserted = self.max_taken as u32 - self.counted;
        self.counted = self.max_taken as u32;
        self.reported.taken = self.counted;
        Ok(u64::from(inserted))
    }

    /// Takes over that the device has given out so many record numbers. `are_hits`: whether the lookups that inserted count their new keys as
    /// found.
    pub(crate) fn count_taken(&mut self, taken: u32, are_hits: bool) {
        let inserted = u64::from(taken - self.counted);
        self.stats.outcomes.inserted += inserted;
        if are_hits {
            self.admitted += inserted;
        }
        (self.counted, self.max_taken) = (taken, taken.into());
        self.reported = TableCounts { taken, ..TableCounts::default() };
        self.is_recounted = true;
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
        let inserted = u64::from(counts.taken.saturating_sub(self.counted));
        let mut stats = TableStats {
            size: (self.len_before + i64::from(counts.taken)) as u64,
            capacity: self.index.capacity() as u64,
            bytes: (self.index.num_bytes()
                + self.arena.num_bytes()
                + self.released_on_device.num_bytes()
                + self.spare_released.as_ref().map_or(0, Buffer::num_bytes)
                + self.evictor.as_ref().map_or(0, |evictor| evictor.num_bytes())
                + self.taken.as_ref().map_or(0, |taken| taken.num_bytes())
                + self.candidates.as_ref().map_or(0, |candidates| candidates.num_bytes())
                + self.changes.as_ref().map_or(0, |changes| changes.num_bytes())) as u64,
            ..self.stats
        };
        stats.outcomes.inserted += inserted;
        stats.outcomes.hit += counts.distinct.saturating_sub(inserted + self.admitted);
        stats.dropped_gradients += counts.dropped;
        stats.unknown_ids += counts.unknown;
        stats.outcomes.filtered += counts.filtered;
        stats
    }
}
