//! Tables and groups on the host.

mod absent;
mod accumulator;
pub(crate) mod admission;
mod changes;
mod eviction;
mod exact_sum;
mod expiry;
mod features;
mod find;
pub mod group;
mod lookup;
mod lookup_split;
mod merge;
mod missed_steps;
mod new_values;
mod pooling;
pub mod push;
mod room;
mod runs;
pub mod sharded;
mod sights;
mod stopwatch;
pub mod table;
mod table_contract;
mod update;
mod uses;
mod weight_gradient;
