//! The tables of a layer, and the four calls of a training step on the CPU.
//!
//! `lookup` finds rows and remembers their records. `push` takes the gradients of a lookup by its number. `commit` reads from a
//! ticket which pushes count. `apply` updates the records. See `docs/architecture.md`, "One training step".

mod apply;
pub(in crate::host) mod calls;
mod commit;
mod general;
mod lookup;
pub(in crate::host) mod push;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::contract::binding::Binding;
use crate::contract::table::TableConfig;
use crate::contract::ticket::PushRing;
use crate::error::Result;
use crate::host::accumulator::Accumulator;
use crate::host::lookup_split::SplitScratch;
use crate::host::new_values::NewValues;
use crate::host::push::{Push, SavedLookup, Spare};
use crate::host::stopwatch::Stopwatch;
use crate::host::table::HostTable;
use crate::policy::commits::BEFORE_FIRST_COMMIT;

pub use self::apply::ApplyScalars;

/// The tables of a layer, and the lookups and pushes that are in progress.
pub struct HostGroup {
    pub(in crate::host) tables: Vec<HostTable>,
    binding: Option<Binding>,
    next_lookup: u64,
    lookups: VecDeque<Arc<SavedLookup>>,
    /// The oldest lookup whose gradients may still come, although its push is not in `ring`.
    pub(in crate::host) oldest_needed: Option<u64>,
    ring: PushRing<Push>,
    committed: Vec<(f32, Push)>,
    /// Number of commits that tables with policies have seen.
    num_commits: u64,
    accumulators: Vec<Accumulator>,
    /// Squared norm of the committed gradients, by table.
    norms: Vec<f32>,
    pushes_without_optimizer: u32,
    /// Of an optimizer without a formula.
    new_values: NewValues,
    /// By table.
    spare: Vec<Spare>,
    split: SplitScratch,
    pub(in crate::host) stopwatch: Stopwatch,
}

impl HostGroup {
    /// A group of empty tables.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for an invalid configuration, [`Error::Memory`](crate::Error::Memory).
    pub fn new(configs: Vec<TableConfig>) -> Result<HostGroup> {
        let tables = configs.into_iter().map(HostTable::new).collect::<Result<Vec<_>>>()?;
        Ok(HostGroup {
            accumulators: tables.iter().map(|_| Accumulator::default()).collect(),
            norms: vec![0.0; tables.len()],
            binding: None,
            next_lookup: 1,
            lookups: VecDeque::new(),
            oldest_needed: None,
            ring: PushRing::of(tables.iter().map(|table| &*table.config.name)),
            committed: Vec::new(),
            num_commits: BEFORE_FIRST_COMMIT,
            pushes_without_optimizer: 0,
            new_values: NewValues::default(),
            spare: tables.iter().map(|_| Spare::default()).collect(),
            split: SplitScratch::default(),
            stopwatch: Stopwatch::default(),
            tables,
        })
    }
}
