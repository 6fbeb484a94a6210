//! Dumps: tables and arrays in a directory, as one manifest and files that the stock `safetensors` library reads.
//!
//! Three promises. A dump is the old one or the new one, whenever the process is killed. A byte that changed
//! anywhere is an error that names its file, found before anything is loaded. Memory beside the tables does not grow with
//! their size, except for keys: a merge holds all keys of the dump, and a reader of increments holds the keys of the increments.
//! `docs/checkpoint_format.md` draws the files byte by byte.

mod checksum;
mod compact;
mod compatible;
mod data_file;
mod data_reader;
mod distribution;
mod files;
mod freeze;
mod increment;
mod loader;
mod manifest;
mod names;
mod open;
mod output;
mod ranks;
mod reader;
mod record_reader;
mod table_entry;
mod writer;

use std::time::SystemTime;

pub use checksum::{BLOCK_BYTES, Blocks, Checksum};
pub use compact::{compact, compact_with};
pub use data_file::{DataFile, Tensor};
pub use files::{Disk, Files};
pub use freeze::{FrozenTables, freeze};
pub use increment::After;
pub use loader::{LoadMode, LoadOptions, LoadReport, LoadedTable, Target, TargetBinding, load};
pub use manifest::{Increment, Manifest, VERSION};
pub use names::MANIFEST;
pub use ranks::{Ranks, dump_of_ranks};
pub use reader::{DumpReader, read_arrays, read_manifest, verify};
pub use table_entry::{AgeEntry, ScoreEntry, StateEntry, TableEntry};
pub use writer::{Array, DumpOptions, dump, dump_with};

/// Data in a shard at most: few files for a large table, and still a piece that copies in seconds.
pub const SHARD_BYTES: usize = 1 << 30;
/// Records, or their bytes, on their way between a table and a file: long enough that calls cost nothing, short enough
/// for a processor's cache.
pub const CHUNK_BYTES: usize = 4 << 20;

/// Records that a load reads at once: several blocks, which threads read and check side by side.
pub const LOAD_BYTES: usize = 16 << 20;

const KEY_BYTES: usize = size_of::<crate::key::Key>();
/// Bytes of a number of a column.
const NUMBER_BYTES: usize = 8;

/// `2026-01-31T23:59:59Z`, by the proleptic Gregorian calendar; 1970 for a clock before it.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days: years begin in March, so that the
    // leap day is the last one; 719_468 days lie between 0000-03-01 and 1970-01-01; an era is 400 years.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn utc_knows_leap_days_and_centuries() {
        // Second column: `date -u -d @<seconds> +%FT%TZ`.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (68_169_599, "1972-02-28T23:59:59Z"),
            (68_169_600, "1972-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }
}
