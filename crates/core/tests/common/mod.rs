//! A plain, slow, obviously right model of tables and of a group of them, written from the contract; the strategies that draw
//! configurations and operations; and the comparison of a table with its model, bit for bit.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod group;
pub mod strategies;
pub mod table;

use std::collections::BTreeMap;

use sok_core::key::Key;
use sok_core::table::{Cursor, Records, Table};

/// Random numbers from a seed, the same on every run (SplitMix64 of Steele, Lea and Flood).
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Between -1 and 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }
}

/// Bit patterns, all NaNs as one: which of two a sum keeps is the compiler's choice.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits()).collect()
}

/// All records of a table, read `max` at a time; each comes once.
pub fn scan(table: &dyn Table, max: usize) -> BTreeMap<Key, Vec<u32>> {
    let (mut records, mut cursor) = (Records::default(), Some(Cursor::default()));
    while let Some(at) = cursor {
        cursor = table.scan(at, max, &mut records);
    }
    assert_eq!(records.values.len(), records.keys.len() * table.record_width());
    let values = records.values.chunks_exact(table.record_width()).map(bits);
    let by_key: BTreeMap<_, _> = records.keys.iter().copied().zip(values).collect();
    assert_eq!(by_key.len(), records.keys.len(), "a record came twice");
    assert_eq!(by_key.len(), table.len());
    by_key
}

/// Room for output, full of what must not stay.
pub fn unwritten(len: usize) -> Vec<f32> {
    vec![123456.0; len]
}
