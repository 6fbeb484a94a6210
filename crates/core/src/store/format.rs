//! How a record lies in the memory of the host: its row in the type of the table, its key if updates need it, its states as float32.
#![allow(unsafe_code)]

use crate::initializer::philox;
use crate::key::Key;
use crate::row_type::{Number, RowType, with_number};

/// Words of a key.
const KEY_WORDS: usize = 2;
/// Columns that share the random words of rounding by chance.
const COLUMNS: usize = 8;

/// The format of a table's records. A record is an array of 32-bit words, which a slice of float32 holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordFormat {
    pub row_type: RowType,
    pub dim: usize,
    /// Whether updates round by chance, for which a record has its key.
    pub rounds_by_chance: bool,
}

/// The chance by which an update rounds: a function of seed, step, key and column.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chance {
    /// Seed of the table.
    pub seed: u64,
    /// Number of the update, from 1. First values are drawn with 0.
    pub step: u32,
}

impl RecordFormat {
    /// Words of a record whose states have so many floats.
    pub fn width(self, num_state_floats: usize) -> usize {
        self.states_start() + num_state_floats
    }

    /// Bytes of a row.
    pub fn row_bytes(self) -> usize {
        self.dim * self.row_type.num_bytes()
    }

    /// Words of a row. The last one may be half used.
    #[inline(always)]
    pub fn row_words(self) -> usize {
        if self.row_type == RowType::Float32 { self.dim } else { self.dim.div_ceil(2) }
    }

    /// Words before the first state.
    #[inline(always)]
    pub fn states_start(self) -> usize {
        self.row_words() + if self.rounds_by_chance { KEY_WORDS } else { 0 }
    }

    /// Reads the row of a record.
    #[inline(always)]
    pub fn read_row(self, record: &[f32], row: &mut [f32]) {
        with_number!(self.row_type, N => read_numbers::<N>(record, row));
    }

    /// Writes the row of a record, rounded to the nearest.
    #[inline(always)]
    pub fn write_row(self, record: &mut [f32], row: &[f32]) {
        with_number!(self.row_type, N => {
            N::narrow(row, &mut numbers_mut::<N>(record)[..row.len()]);
        });
    }

    /// Writes the row of a record after an update.
    #[inline(always)]
    pub fn write_updated(self, record: &mut [f32], row: &[f32], chance: &Chance) {
        if !self.rounds_by_chance {
            return self.write_row(record, row);
        }
        let key = self.key(record);
        with_number!(self.row_type, N => {
            let columns = numbers_mut::<N>(record).chunks_mut(COLUMNS).zip(row.chunks(COLUMNS));
            for (group, (to, row)) in columns.enumerate() {
                let draws = chance.draws(key, group as u32);
                to.iter_mut().zip(row).zip(draws).for_each(|((to, x), draw)| *to = N::from_f32_by_chance(*x, draw));
            }
        });
    }

    /// Writes the key of a record, if it has one.
    pub fn write_key(self, record: &mut [f32], key: Key) {
        if self.rounds_by_chance {
            let at = self.row_words();
            record[at] = f32::from_bits(key as u32);
            record[at + 1] = f32::from_bits((key >> 32) as u32);
        }
    }

    fn key(self, record: &[f32]) -> Key {
        let at = self.row_words();
        Key::from(record[at].to_bits()) | Key::from(record[at + 1].to_bits()) << 32
    }

    /// Reads row and states of a record.
    pub fn read(self, record: &[f32], values: &mut [f32]) {
        let (row, states) = values.split_at_mut(self.dim);
        self.read_row(record, row);
        states.copy_from_slice(&record[self.states_start()..]);
    }

    /// Writes a record whole. The row is rounded to the nearest.
    pub fn write(self, record: &mut [f32], key: Key, values: &[f32]) {
        let (row, states) = values.split_at(self.dim);
        self.write_row(record, row);
        self.write_key(record, key);
        record[self.states_start()..].copy_from_slice(states);
    }
}

impl Chance {
    /// Returns 16 random bits for each of eight columns of a row.
    fn draws(&self, key: Key, group: u32) -> [u16; COLUMNS] {
        let seed = [self.seed as u32, (self.seed >> 32) as u32];
        let words = philox([key as u32, (key >> 32) as u32, group, self.step], seed);
        std::array::from_fn(|column| (words[column / 2] >> (column % 2 * 16)) as u16)
    }
}

#[inline(always)]
fn read_numbers<N: Number>(record: &[f32], row: &mut [f32]) {
    N::widen(&numbers::<N>(record)[..row.len()], row);
}

/// The words of a record as numbers of a row.
#[inline(always)]
pub fn numbers<N: Number>(words: &[f32]) -> &[N] {
    let len = words.len() * (size_of::<f32>() / size_of::<N>());
    // SAFETY: - numbers are f32, or 16 bits of which all patterns are values; their alignment is that of f32 or less.
    //         - they cover the same memory, which is borrowed as long.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) }
}

#[inline(always)]
fn numbers_mut<N: Number>(words: &mut [f32]) -> &mut [N] {
    let len = words.len() * (size_of::<f32>() / size_of::<N>());
    // SAFETY: as in `numbers`; all bits of a float are values, too.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_all_formats_are_read_as_they_were_written() {
        for (row_type, rounds_by_chance) in
            [(RowType::Float32, false), (RowType::Float16, false), (RowType::Bfloat16, true)]
        {
            for dim in [1, 2, 7, 16] {
                let format = RecordFormat { row_type, dim, rounds_by_chance };
                let mut record = vec![9.0; format.width(3)];
                let values: Vec<f32> = (0..dim + 3).map(|x| x as f32 - 2.5).collect();
                format.write(&mut record, u64::MAX - 5, &values);
                let mut read = vec![0.0; dim + 3];
                format.read(&record, &mut read);
                assert_eq!(read, values);
                if rounds_by_chance {
                    assert_eq!(format.key(&record), u64::MAX - 5);
                }
            }
        }
    }

    #[test]
    fn rounding_by_chance_depends_on_seed_step_key_and_column() {
        let format = RecordFormat { row_type: RowType::Bfloat16, dim: 32, rounds_by_chance: true };
        let rounded = |seed, step, key| {
            let mut record = vec![0.0; format.width(0)];
            format.write_key(&mut record, key);
            format.write_updated(&mut record, &[1.003; 32], &Chance { seed, step });
            let mut row = vec![0.0; 32];
            format.read_row(&record, &mut row);
            row
        };
        let one = rounded(1, 1, 1);
        assert_eq!(one, rounded(1, 1, 1));
        assert!(one.contains(&1.0) && one.contains(&(1.0 + 1.0 / 128.0)));
        for other in [rounded(2, 1, 1), rounded(1, 2, 1), rounded(1, 1, 1 << 40)] {
            assert_ne!(one, other);
        }
    }
}
