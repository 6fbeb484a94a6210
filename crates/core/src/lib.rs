//! Embedding tables for recommender models: rules, arithmetic and files. No CUDA, no Python, no framework.
//!
//! The table on the host is the default, and the reference for every device.
//! `docs/architecture.md` follows one batch; `docs/contract.md` says what holds on every device.
#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod checkpoint;
pub mod contract;
pub mod error;
pub mod exchange;
pub mod fingerprint;
pub mod fork;
pub mod formula;
pub mod host;
pub mod initializer;
pub mod key;
pub mod math;
pub mod memory;
pub mod policy;
pub mod pool;
pub mod row_type;
mod simd;
mod store;

pub use error::{Error, Result};
