//! Definitions that host and kernels share: constants, enums, and structs that kernels take by value or read from memory.
//!
//! Each is written once, in this folder. The macros define it in Rust. [`header`] returns the same definitions for CUDA, with
//! assertions that structs and fields have the same sizes as in Rust. An address is a number in Rust. In CUDA it is a pointer, of
//! the type after `as`. Fields named `pad` fill a struct, so that it has no hidden padding.

#[macro_use]
mod macros;
mod commits;
mod constants;
mod policies;
mod ranks;
mod structs;

use std::mem::offset_of;

use sok_core::contract::batch::Combiner;
use sok_core::contract::table::Missing;
use sok_core::row_type::RowType;

pub use self::commits::*;
pub use self::constants::*;
pub use self::policies::*;
pub use self::ranks::*;
pub use self::structs::*;
use macros::enum_text;

/// Sizes of structs, in 32-bit words.
pub const BUCKET_WORDS: usize = size_of::<Bucket>() / 4;
pub const STASH_WORDS: usize = size_of::<Stash>() / 4;
pub const COUNTERS_WORDS: usize = size_of::<Counters>() / 4;
pub const COUNTS_WORDS: usize = size_of::<TableCounts>() / 4;
pub const LISTS_WORDS: usize = size_of::<Lists>() / 4;
pub const RESOLVED_WORDS: usize = size_of::<Resolved>() / 4;
pub const REPORT_WORDS: usize = size_of::<ReportHead>() / 4;
pub const FAULT_WORDS: usize = size_of::<Fault>() / 4;
pub const PREPARED_WORDS: usize = size_of::<Prepared>() / 4;

/// Positions of counts in [`Counters`], in 32-bit words.
pub const GONE_ROWS: usize = offset_of!(Counters, gone) / 4;
pub const RELEASED: usize = offset_of!(Counters, released) / 4;
pub const STASHED: usize = offset_of!(Counters, stashed) / 4;
pub const DROPPED: usize = offset_of!(Counters, dropped) / 4;
pub const DISTINCT: usize = offset_of!(Counters, distinct) / 4;
pub const UNKNOWN: usize = offset_of!(Counters, unknown) / 4;
pub const FILTERED: usize = offset_of!(Counters, filtered) / 4;

/// Returns the offset of a field in a struct, in 32-bit words.
macro_rules! word_of {
    ($struct:ident, $field:ident) => {
        std::mem::offset_of!($crate::abi::$struct, $field) / 4
    };
}
pub(crate) use word_of;

/// Returns all definitions as a CUDA header. `u32`, `u64` and `float4` must be defined before it.
pub fn header() -> String {
    let mut text = "#pragma once\n".to_string();
    constants::constants(&mut text);
    constants::enums(&mut text);
    enum_text(
        &mut text,
        "Combiner",
        &[("SUM", Combiner::Sum as u32), ("MEAN", Combiner::Mean as u32), ("SQRTN", Combiner::Sqrtn as u32)],
    );
    enum_text(
        &mut text,
        "Missing",
        &[("INITIAL", Missing::Initial as u32), ("ZEROS", Missing::Zeros as u32)],
    );
    let types = RowType::ALL.map(|of| (of.name().to_uppercase(), of as u32));
    enum_text(&mut text, "RowType", &types.each_ref().map(|(name, value)| (name.as_str(), *value)));
    // The kernels define `Report` around `ReportHead`.
    text.push_str("struct Report;\nstruct Use;\nstruct Progress;\n");
    structs::structs(&mut text);
    commits::structs(&mut text);
    policies::structs(&mut text);
    ranks::structs(&mut text);
    text
}

/// Returns the number of groups of four columns of a row of this dim.
pub fn quads(dim: usize) -> usize {
    dim.div_ceil(4)
}

/// Returns the number of lanes that share a row of this dim: a power of two, at most a warp.
pub fn lanes(dim: usize) -> usize {
    quads(dim).next_power_of_two().min(32)
}
