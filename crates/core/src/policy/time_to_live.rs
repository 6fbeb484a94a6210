//! When rows go that training no longer uses.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::key::hash;

/// How long a row stays after the last step that has trained it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimeToLive {
    /// The time.
    pub lifetime: Lifetime,
    /// Whether rows that went are kept until they are taken.
    #[serde(default)]
    pub keeps_expired: bool,
}

/// A number of steps, or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// A number of steps.
    Steps(u64),
    /// A number of milliseconds.
    Milliseconds(u64),
}

/// A cycle, in which each part of the keys is swept once, has at most `1 << CYCLE_BITS` steps and `1 << PART_BITS` parts. So a sweep of a table
/// of 64 Mi rows removes 131,072 rows at most, by and large.
const CYCLE_BITS: u32 = 12;
const PART_BITS: u32 = 9;

/// The keys that one sweep looks at: those whose hashes end with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The last bits of the hashes.
    pub ending: u64,
    /// How many these are.
    pub bits: u32,
}

impl Part {
    /// The bits of a hash that `ending` is compared with.
    pub fn mask(self) -> u64 {
        low_bits(self.bits)
    }

    /// Whether a key with this hash belongs to the part.
    pub fn contains(self, hash: u64) -> bool {
        hash & self.mask() == self.ending
    }
}

impl Lifetime {
    /// Checks that the time is not 0.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn validate(self) -> Result<()> {
        match self {
            Lifetime::Steps(0) | Lifetime::Milliseconds(0) => {
                Err(Error::argument("`time_to_live` must be at least one step, or a millisecond"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the newest commit since which this time has passed, as a commit is made now. `now`: in milliseconds.
    pub fn newest_past(self, commit: u64, now: u64, times: &CommitTimes) -> Option<u64> {
        match self {
            Lifetime::Steps(steps) => commit.checked_sub(steps),
            Lifetime::Milliseconds(lifetime) => times.newest_past(now, lifetime),
        }
    }

    /// Notes that a commit is made now, if times of commits are needed.
    pub fn note(self, commit: u64, now: u64, times: &mut CommitTimes) {
        if let Lifetime::Milliseconds(lifetime) = self {
            times.note(commit, now, lifetime);
        }
    }

    /// Returns the keys that are swept at the end of a step of a table with this seed. All keys have their turn within a quarter of the
    /// lifetime if that is a number of steps, else within 4096 steps. Tables with other seeds are swept in other steps.
    pub fn part_due(self, step: u64, seed: u64) -> Option<Part> {
        let cycle_bits = match self {
            Lifetime::Steps(steps) => (steps / 4).max(1).ilog2().min(CYCLE_BITS),
            Lifetime::Milliseconds(_) => CYCLE_BITS,
        };
        let bits = cycle_bits.min(PART_BITS);
        let (turn, idle_bits) = (step.wrapping_add(hash(seed)), cycle_bits - bits);
        let is_due = turn & low_bits(idle_bits) == 0;
        is_due.then_some(Part { ending: turn >> idle_bits & low_bits(bits), bits })
    }
}

fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}

/// When commits were made, to within two 1024ths of a lifetime. The number of entries does not grow with that of the commits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CommitTimes {
    /// Times in milliseconds, each with the newest commit that was made until then. Neither decreases.
    entries: VecDeque<(u64, u64)>,
}

/// Commits within this fraction of the lifetime may share an entry, and count as made at the time of the last one.
const RESOLUTION: u64 = 1024;

impl CommitTimes {
    /// Returns the newest commit that was made at least `lifetime` milliseconds before. A clock that was set back counts as standing still
    /// until it has passed its latest time.
    pub fn newest_past(&self, now: u64, lifetime: u64) -> Option<u64> {
        let now = self.latest(now);
        self.entries.iter().take_while(|entry| now - entry.0 >= lifetime).last().map(|entry| entry.1)
    }

    /// Notes that a commit is made now, and forgets commits that `newest_past` will not return.
    pub fn note(&mut self, commit: u64, now: u64, lifetime: u64) {
        let now = self.latest(now);
        let before_last = self.entries.len().checked_sub(2).map(|at| self.entries[at].0);
        match self.entries.back_mut() {
            Some(last) if before_last.is_some_and(|before| now - before <= lifetime / RESOLUTION) => {
                *last = (now, commit);
            }
            _ => self.entries.push_back((now, commit)),
        }
        while self.entries.get(1).is_some_and(|entry| now - entry.0 >= lifetime) {
            self.entries.pop_front();
        }
    }

    fn latest(&self, now: u64) -> u64 {
        self.entries.back().map_or(now, |last| last.0.max(now))
    }

    /// Times in milliseconds, each with the number of a commit.
    pub fn entries(&self) -> impl Iterator<Item = (u64, u64)> {
        self.entries.iter().copied()
    }

    /// Takes entries that `entries` gave.
    pub fn set(&mut self, entries: VecDeque<(u64, u64)>) {
        self.entries = entries;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_its_turn_once_in_a_cycle() {
        for (lifetime, cycle, parts) in [
            (Lifetime::Steps(1), 1, 1),
            (Lifetime::Steps(7), 1, 1),
            (Lifetime::Steps(100), 16, 16),
            (Lifetime::Steps(5000), 1024, 512),
            (Lifetime::Steps(u64::MAX), 4096, 512),
            (Lifetime::Milliseconds(1), 4096, 512),
        ] {
            for seed in [0, 1, u64::MAX] {
                let due: Vec<Part> = (77..77 + cycle).filter_map(|s| lifetime.part_due(s, seed)).collect();
                assert_eq!(due.len(), parts, "{lifetime:?}");
                for key in 0..1000 {
                    assert_eq!(due.iter().filter(|part| part.contains(hash(key))).count(), 1);
                }
            }
        }
    }

    /// Makes a commit. Returns the newest one that is past then.
    fn note(times: &mut CommitTimes, commit: u64, now: u64, lifetime: u64) -> Option<u64> {
        let past = times.newest_past(now, lifetime);
        times.note(commit, now, lifetime);
        assert_eq!(times.newest_past(now, lifetime), past);
        past
    }

    #[test]
    fn a_commit_is_past_after_its_time_and_the_list_stays_short() {
        let mut times = CommitTimes::default();
        let made = |commit: u64| 1_000_000 + 3 * commit;
        for commit in 1..20_000 {
            let past = note(&mut times, commit, made(commit), 30_000);
            let exact =
                (made(commit) - 30_000).checked_sub(1_000_000).map(|since| since / 3).filter(|&c| c > 0);
            // Never too early, and late by two thousandths of the time at most.
            assert!(past <= exact, "{commit}: {past:?}, {exact:?}");
            assert!(past.unwrap_or(0) + 22 >= exact.unwrap_or(0), "{commit}: {past:?}, {exact:?}");
            assert!(times.entries.len() <= 2100);
        }
    }

    #[test]
    fn a_clock_that_is_set_back_makes_no_commit_older() {
        let mut times = CommitTimes::default();
        let mut note = |commit, now| note(&mut times, commit, now, 50);
        assert_eq!(note(1, 1000), None);
        assert_eq!(note(2, 1049), None);
        assert_eq!(note(3, 10), None);
        assert_eq!(note(4, 1050), Some(1));
        assert_eq!(note(5, 900), Some(1));
        assert_eq!(note(6, 5000), Some(5));
        let mut other = CommitTimes::default();
        other.set(times.entries().collect());
        assert_eq!(other, times);
    }
}
