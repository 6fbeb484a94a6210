//! Numbers and times of commits, from which a table computes the ages of its rows.

use super::time_to_live::CommitTimes;

/// The first commit has the next number. A row of a dump may be older than all commits of the process, and gets a smaller number.
pub const BEFORE_FIRST_COMMIT: u64 = 1 << 40;

/// The newest commits of a group, and when commits were made.
#[derive(Clone)]
pub struct Commits {
    /// Number of the newest commit.
    pub newest: u64,
    /// Number of the newest commit whose gradients were applied or dropped.
    pub settled: u64,
    /// When commits were made, if rows have a time to live in milliseconds.
    pub times: CommitTimes,
}

impl Default for Commits {
    fn default() -> Commits {
        Commits { newest: BEFORE_FIRST_COMMIT, settled: BEFORE_FIRST_COMMIT, times: CommitTimes::default() }
    }
}

impl Commits {
    /// Continues the numbers of a table that this one will replace, but not its times: otherwise rows that are loaded after a pause would
    /// expire at once.
    pub fn go_on_from(&mut self, other: &Commits) {
        (self.newest, self.settled) = (other.newest, other.settled);
    }

    /// Returns the number of commits that were made after this one.
    pub fn age(&self, commit: u64) -> u64 {
        self.newest.saturating_sub(commit)
    }

    /// Returns the commit after which so many others were made.
    fn before(&self, age: u64) -> u64 {
        self.newest.saturating_sub(age)
    }

    /// Returns the commit of a row that gets an age. `commit`: what it has. A row whose commit is not settled is in use, and keeps it; no other
    /// row may get such a commit.
    pub fn with_age(&self, commit: u64, age: u64) -> u64 {
        if commit > self.settled { commit } else { self.before(age).min(self.settled) }
    }

    /// Returns times in milliseconds, each with the age of a commit, as `Table::commit_times`.
    pub fn ages_by_time(&self) -> Vec<(u64, u64)> {
        self.times.entries().map(|(time, commit)| (time, self.age(commit))).collect()
    }

    /// Replaces the times of commits by those that `ages_by_time` has returned.
    pub fn set_ages_by_time(&mut self, ages: &[(u64, u64)]) {
        let commits = ages.iter().map(|&(time, age)| (time, self.before(age)));
        self.times.set(commits.collect());
    }
}
