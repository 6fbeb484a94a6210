//! Rules for rows that come and go. Tables on all devices share these functions.

pub mod admission;
pub mod eviction;
pub mod sweep;
