//! The structs of tickets and commits, and of the preparation of an update.

#![allow(unsafe_code)]

use super::constants::{NUM_SCALARS, RING};
use super::macros::{InCuda, struct_text};
use super::structs::Conditioning;
use crate::memory::Plain;

structs! {
    /// The ticket of a push.
    pub struct NewTicket {
        /// Output, float32 `(64, 2)`.
        pub ticket: u64 as "float*",
        /// Not 0 if a gradient is not finite; `write_ticket` resets it. Null if gradients are not checked.
        pub is_bad: u64 as "u32*",
        /// Row of the ticket that names the push.
        pub row: u32,
        pub mark: f32,
        /// The number of the lookup in memory of the framework, as two words; null if the host knows the number.
        pub number: u64 as "const u32*",
        /// Value that `number` must have.
        pub expected: [u32; 2],
        pub fault: u64 as "Fault*",
    }

    /// The result of a commit, in memory of the device.
    pub struct Resolved {
        /// Whether the tickets of all groups of the optimizer were valid.
        pub is_due: u32,
        pub pad: u32,
        /// By row of the ticket: the weight of the push; 0 if it is not named.
        pub weights: [f32; RING],
    }

    /// The result of a commit, in memory that the host reads. In kernels it is the head of `Report`; the counts of tables follow.
    pub struct ReportHead {
        /// Number of the commit, written last.
        pub commit: u64,
        /// As in `Resolved`.
        pub is_due: u32,
        /// A wrong row of the ticket, if there is one.
        pub bad_row: u32,
        /// The weight of that row.
        pub bad_weight: f32,
        pub pad: u32,
        /// Bit r is set if row r names a push.
        pub named: u64,
        /// As in `Resolved`.
        pub weights: [f32; RING],
    }

    /// A commit of a group.
    pub struct Committed {
        pub ticket: u64 as "const float*",
        pub resolved: u64 as "Resolved*",
        pub report: u64 as "Report*",
        pub tables: u64 as "const Table*",
        /// Number of the commit.
        pub commit: u64,
        /// Number of the oldest pending push.
        pub oldest: u64,
        /// Bit b is set if push `oldest + b` is pending.
        pub pending: u64,
        pub num_tables: u32,
        pub pad: u32,
    }

    /// Parameters of `prepare` for one group.
    pub struct Preparation {
        /// Learning rate, step, is_update, factor.
        pub scalars: u64 as "const float*",
        pub resolved: u64 as "const Resolved*",
        /// Output.
        pub prepared: u64 as "Prepared*",
        /// float32 `(64, 2)`
        pub trigger: u64 as "const float*",
        /// Output, float32 `(64, 2)`; or null.
        pub new_trigger: u64 as "float*",
        /// Tables that learn that a commit is settled.
        pub tables: u64 as "const Table*",
        /// Number of that commit.
        pub commit: u64,
        /// `prepare` fills in the factor and the learning rate.
        pub conditioning: Conditioning,
        /// Scalars of the formula.
        pub formula: [f32; NUM_SCALARS],
        /// Row of the push that is applied. `RING`: the sums of several pushes are applied, which already contain the weights.
        pub row: u32,
        /// 0 if rows of no table have a time to live, or the step does not update.
        pub num_tables: u32,
        pub pad: u32,
    }
}
