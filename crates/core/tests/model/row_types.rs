//! Tables whose rows have 16 bits, and dumps of them. The random programs of the other tests have such tables, too.

use crate::common::sharded::Directory;
use crate::common::strategies::plain_config;
use crate::common::{Dice, bits};
use sok_core::checkpoint::{DumpOptions, LoadOptions, dump, load, read_manifest};
use sok_core::contract::records::Records;
use sok_core::contract::table::{Contents, Cursor, Table, TableConfig};
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::formula::{Adam, Formula, Rule};
use sok_core::host::table::HostTable;
use sok_core::key::Key;
use sok_core::row_type::RowType;

const DIM: usize = 16;
const KEYS: u64 = 500;
const ADAM: Update =
    Update { rule: Rule::Adam(Adam::VARIANTS[0]), weight_decay: None, clipvalue: None, clipnorm: None };

fn config(row_type: RowType) -> TableConfig {
    TableConfig { row_type, ..plain_config("t", DIM) }
}

fn empty(config: TableConfig) -> HostTable {
    let mut table = HostTable::new(config).unwrap();
    table.set_update_rule(Some(ADAM), false).unwrap();
    table
}

/// A table after some steps.
fn trained(config: TableConfig, num_steps: u64) -> HostTable {
    let (mut table, mut dice) = (empty(config), Dice(5));
    let keys: Vec<Key> = (0..KEYS).map(|key| key << 33).collect();
    table.find_or_insert(&keys, &mut vec![0.0; keys.len() * DIM]).unwrap();
    for step in 1..=num_steps {
        let scalars = UpdateScalars { learning_rate: 0.01, step, factor: 1.0 };
        table.update(&keys, &dice.floats(keys.len() * DIM), &scalars).unwrap();
    }
    table
}

/// All records by key.
fn records(table: &dyn Contents) -> Vec<(Key, Vec<f32>)> {
    let mut all = Records::default();
    assert_eq!(table.scan(Cursor::default(), usize::MAX, &mut all).unwrap(), None);
    let values = all.values.chunks_exact(table.layout().width()).map(<[f32]>::to_vec);
    let mut records: Vec<_> = all.keys.iter().copied().zip(values).collect();
    records.sort_by_key(|(key, _)| *key);
    records
}

#[test]
fn dumps_are_loaded_across_types_with_one_rounding() {
    for from in RowType::ALL {
        let directory = Directory::new(&format!("types-{}", from.name()));
        let dumped = trained(config(from), 3);
        dump(&directory.0, &[&dumped], &[], &DumpOptions::default()).unwrap();
        let manifest = read_manifest(&directory.0).unwrap();
        assert_eq!((manifest.tables[0].dtype, manifest.version > 5), (from, from != RowType::Float32));
        let rows = &manifest.tables[0].shards[0].tensors[1];
        assert_eq!(rows.dtype.bitsize(), 8 * from.num_bytes());
        for to in RowType::ALL {
            let mut loaded = empty(config(to));
            load(&directory.0, &mut [("t", &mut loaded)], &LoadOptions::default()).unwrap();
            let (dumped, loaded) = (records(&dumped), records(&loaded));
            assert_eq!(dumped.len(), loaded.len());
            for ((key, mut expected), (loaded_key, got)) in dumped.into_iter().zip(loaded) {
                to.round(&mut expected[..DIM]);
                assert_eq!((key, bits(&expected)), (loaded_key, bits(&got)), "{from:?} to {to:?}");
            }
        }
    }
}

#[test]
fn rows_of_16_bits_take_half_the_memory_and_states_the_same() {
    // The first number of a new arena is that of no record.
    let num_floats = (KEYS + 1) * DIM as u64;
    let bytes = |row_type| {
        let (with, without) = (trained(config(row_type), 1), HostTable::new(config(row_type)).unwrap());
        with.stats().unwrap().bytes - without.stats().unwrap().bytes
    };
    let saved = bytes(RowType::Float32) - bytes(RowType::Bfloat16);
    assert!((num_floats * 2 - 64..=num_floats * 2).contains(&saved), "{saved}");
    assert_eq!(bytes(RowType::Float16), bytes(RowType::Bfloat16));
}

/// Trains a table of a row type, and one of float32. Returns the mean difference of their rows.
fn mean_difference(row_type: RowType, stochastic_rounding: bool) -> f64 {
    let steps = 60;
    let wide = records(&trained(config(RowType::Float32), steps));
    let narrow = records(&trained(TableConfig { stochastic_rounding, ..config(row_type) }, steps));
    let pairs = wide.iter().zip(&narrow).flat_map(|((_, wide), (_, narrow))| wide[..DIM].iter().zip(narrow));
    let differences: Vec<f64> = pairs.map(|(x, y)| f64::from(*y) - f64::from(*x)).collect();
    differences.iter().map(|d| d.abs()).sum::<f64>() / differences.len() as f64
}

#[test]
fn what_is_rounded_stays_near_float32() {
    // A row of about 0.3 has steps of 2^-12 to 2^-10 in float16 and bfloat16; 60 roundings add up like a random walk.
    let (half, brain) = (mean_difference(RowType::Float16, false), mean_difference(RowType::Bfloat16, false));
    assert!(half < 0.001 && brain < 0.006, "{half} {brain}");
    let (half, brain) = (mean_difference(RowType::Float16, true), mean_difference(RowType::Bfloat16, true));
    assert!(half < 0.001 && brain < 0.008, "{half} {brain}");
}

/// The mean value of rows of ones after many steps that are each a tenth of a bfloat16's distance to its neighbour.
fn mean_after_small_steps(stochastic_rounding: bool) -> f64 {
    let mut table = HostTable::new(TableConfig { stochastic_rounding, ..config(RowType::Bfloat16) }).unwrap();
    let rule = Rule::Sgd(sok_core::formula::Sgd { momentum: 0.0, nesterov: false });
    let sgd = Update { rule, weight_decay: None, clipvalue: None, clipnorm: None };
    table.set_update_rule(Some(sgd), false).unwrap();
    let keys: Vec<Key> = (0..KEYS).collect();
    table.assign(&keys, &vec![1.0; keys.len() * DIM], true).unwrap();
    for step in 1..=100 {
        let scalars = UpdateScalars { learning_rate: 0.1 / 128.0, step, factor: 1.0 };
        table.update(&keys, &vec![-1.0; keys.len() * DIM], &scalars).unwrap();
    }
    let rows = records(&table);
    rows.iter().flat_map(|(_, row)| row).map(|x| f64::from(*x)).sum::<f64>() / (KEYS * DIM as u64) as f64
}

#[test]
fn small_steps_are_lost_to_the_nearest_and_kept_by_chance() {
    assert_eq!(mean_after_small_steps(false), 1.0);
    let mean = mean_after_small_steps(true);
    assert!((mean - (1.0 + 10.0 / 128.0)).abs() < 0.001, "{mean}");
}
