//! Embedding tables for recommender models: rules, arithmetic and files. No CUDA, no Python, no framework.
//!
//! The host table here is the default and the oracle that every device is held against.
//! `docs/architecture.md` follows one batch; `docs/contract.md` says what holds on every device.
#![deny(unsafe_code)]

mod absent;
mod accumulator;
mod arena;
pub mod batch;
pub mod checkpoint;
pub mod error;
mod exact_sum;
mod find;
pub mod fork;
pub mod host_group;
pub mod host_table;
mod index;
pub mod initializer;
mod journal;
pub mod key;
mod lookup;
mod lookup_split;
pub mod math;
pub mod memory;
mod merge;
pub mod optimizer;
pub mod pool;
mod pooling;
pub mod push;
mod region;
mod runs;
mod simd;
pub mod table;
pub mod ticket;
mod update;
mod weight_gradient;

pub use error::{Error, Result};
