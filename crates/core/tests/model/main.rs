//! Tables, and groups of them on one rank and several, against a plain model. They are one program, so that the model is compiled once.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
mod eviction;
mod expiry;
mod group_model;
mod increments;
mod pooled_at_owner;
mod row_types;
mod sharded;
mod sharded_dump;
mod sharded_policies;
mod sharded_programs;
mod table_model;
