//! The sources of the kernels, embedded in the library, and the headers that they include.

use std::sync::LazyLock;

use sok_core::formula;

use crate::abi;
use crate::nvrtc::Source;

fn headers() -> &'static [(&'static str, String)] {
    static HEADERS: LazyLock<Vec<(&str, String)>> = LazyLock::new(|| {
        let files = [
            ("types.cuh", include_str!("../kernels/types.cuh")),
            ("math.cuh", include_str!("../kernels/math.cuh")),
            ("initializer.cuh", include_str!("../kernels/initializer.cuh")),
            ("index.cuh", include_str!("../kernels/index.cuh")),
            ("lists.cuh", include_str!("../kernels/lists.cuh")),
            ("merged.cuh", include_str!("../kernels/merged.cuh")),
            ("optimizer.cuh", include_str!("../kernels/optimizer.cuh")),
            ("peers.cuh", include_str!("../kernels/peers.cuh")),
            ("records.cuh", include_str!("../kernels/records.cuh")),
            ("removal.cuh", include_str!("../kernels/removal.cuh")),
            ("rows.cuh", include_str!("../kernels/rows.cuh")),
            ("sort.cuh", include_str!("../kernels/sort.cuh")),
            ("stage.cuh", include_str!("../kernels/stage.cuh")),
            ("step.cuh", include_str!("../kernels/step.cuh")),
        ];
        let made = [("abi.cuh", abi::header()), ("formulas.cuh", formula::device_header())];
        files.map(|(name, text)| (name, text.to_string())).into_iter().chain(made).collect()
    });
    &HEADERS
}

/// Operations on one table: find, insert, erase, copy records, grow the index.
pub const TABLE: Source = Source { name: "table.cu", text: include_str!("../kernels/table.cu"), headers };
/// The radix sort of a call's ids by their records.
pub const SORT: Source = Source { name: "sort.cu", text: include_str!("../kernels/sort.cu"), headers };
/// Lists the distinct keys of sorted ids.
pub const KEYS: Source = Source { name: "keys.cu", text: include_str!("../kernels/keys.cu"), headers };
/// The forward pass: finds or inserts the records of a call's ids, and pools their rows.
pub const FORWARD: Source =
    Source { name: "forward.cu", text: include_str!("../kernels/forward.cu"), headers };
/// The backward pass: merges gradients and updates records.
pub const BACKWARD: Source =
    Source { name: "backward.cu", text: include_str!("../kernels/backward.cu"), headers };
/// Scores of records: their uses.
pub const SCORES: Source = Source { name: "scores.cu", text: include_str!("../kernels/scores.cu"), headers };
/// Sweeps: full tables remove the rows with the lowest scores.
pub const SWEEP: Source = Source { name: "sweep.cu", text: include_str!("../kernels/sweep.cu"), headers };
/// Scores that come with ids.
pub const GIVEN: Source = Source { name: "given.cu", text: include_str!("../kernels/given.cu"), headers };
/// The steps that rows without gradients have missed.
pub const MISSED: Source = Source { name: "missed.cu", text: include_str!("../kernels/missed.cu"), headers };
/// Keys without a row: their sights, and which of them a commit inserts.
pub const ADMISSION: Source =
    Source { name: "admission.cu", text: include_str!("../kernels/admission.cu"), headers };
/// Rows that go because training has not used them for long.
pub const EXPIRY: Source = Source { name: "expiry.cu", text: include_str!("../kernels/expiry.cu"), headers };
/// Which rows have changed since a dump.
pub const CHANGES: Source =
    Source { name: "changes.cu", text: include_str!("../kernels/changes.cu"), headers };
/// Gradients of the weights of ids.
pub const WEIGHTS: Source =
    Source { name: "weights.cu", text: include_str!("../kernels/weights.cu"), headers };
/// Descriptors, tickets, norms and scalars of a step.
pub const CONTROL: Source =
    Source { name: "control.cu", text: include_str!("../kernels/control.cu"), headers };
/// What ranks that share tables do for each other, in each other's memory.
pub const RANKS: Source = Source { name: "ranks.cu", text: include_str!("../kernels/ranks.cu"), headers };
/// The update of an optimizer without a formula: copies rows and states to arrays of the framework and back.
pub const GENERAL: Source =
    Source { name: "general.cu", text: include_str!("../kernels/general.cu"), headers };
/// What the owner of a table does for bags of other ranks.
pub const AT_OWNER: Source =
    Source { name: "at_owner.cu", text: include_str!("../kernels/at_owner.cu"), headers };
