//! Rules for rows that come and go. Tables on all devices share these functions.

pub mod admission;
pub mod clock;
pub mod commits;
pub mod eviction;
pub mod sweep;
pub mod time_to_live;
