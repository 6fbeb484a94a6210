//! Memory of a table on the host: records by number, and numbers by key.

pub mod arena;
pub mod format;
pub mod index;
pub mod journal;
pub mod record_set;
pub mod region;
pub mod rows;
pub mod scores;
pub mod sights;
