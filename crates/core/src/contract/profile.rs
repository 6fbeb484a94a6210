//! The times of the parts of training steps.

use std::time::Duration;

/// A part of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPart {
    /// Finds the records of ids, and inserts keys at the lookup. On the host it contains `Pool` and `Sort`: one pass does all three.
    Find,
    /// Writes the output rows: copies of rows, or combinations of bags.
    Pool,
    /// Sorts ids by their records. On a GPU it runs beside `Pool`.
    Sort,
    /// Merges gradients to one for each key. Gradients that stay where they are until they are applied are merged in `Update`. On a
    /// GPU the sort before several pushes are merged is left out.
    Merge,
    /// Inserts keys at the commit. On a GPU that is a `Find` and a `Sort`.
    Insert,
    /// Computes norms of gradients.
    Norm,
    /// Updates records.
    Update,
    /// Makes the ids of a rank distinct, before they go to other ranks.
    Distinct,
    /// Exchanges ids, rows and gradients with other ranks, and waits for them.
    Exchange,
}

impl StepPart {
    /// All parts, in the order of a step.
    pub const ALL: [StepPart; 9] = [
        StepPart::Find,
        StepPart::Pool,
        StepPart::Sort,
        StepPart::Merge,
        StepPart::Insert,
        StepPart::Norm,
        StepPart::Update,
        StepPart::Distinct,
        StepPart::Exchange,
    ];

    /// Returns the name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            StepPart::Find => "find",
            StepPart::Pool => "pool",
            StepPart::Sort => "sort",
            StepPart::Merge => "merge",
            StepPart::Insert => "insert",
            StepPart::Norm => "norm",
            StepPart::Update => "update",
            StepPart::Distinct => "distinct",
            StepPart::Exchange => "exchange",
        }
    }
}

/// How often a part has run, and how long in all: on the host by its clock, on a GPU by the GPU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartTime {
    /// Number of runs.
    pub runs: u64,
    /// The time of all runs.
    pub time: Duration,
}

/// The times of all parts since they are measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    times: [PartTime; StepPart::ALL.len()],
}

impl Profile {
    /// Adds a run of a part.
    pub fn add(&mut self, part: StepPart, time: Duration) {
        let of_part = &mut self.times[part as usize];
        of_part.runs += 1;
        of_part.time += time;
    }

    /// Adds the times of another profile.
    pub fn add_all(&mut self, other: &Profile) {
        for (of_part, more) in self.times.iter_mut().zip(&other.times) {
            of_part.runs += more.runs;
            of_part.time += more.time;
        }
    }

    /// Returns the times of a part.
    pub fn get(&self, part: StepPart) -> PartTime {
        self.times[part as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_times_of_a_part_are_added_up() {
        let mut profile = Profile::default();
        profile.add(StepPart::Norm, Duration::from_millis(2));
        profile.add(StepPart::Norm, Duration::from_millis(3));
        assert_eq!(profile.get(StepPart::Norm), PartTime { runs: 2, time: Duration::from_millis(5) });
        assert!(
            StepPart::ALL
                .into_iter()
                .all(|part| part == StepPart::Norm || profile.get(part) == PartTime::default())
        );
        assert!(StepPart::ALL.iter().enumerate().all(|(number, part)| *part as usize == number));
    }
}
