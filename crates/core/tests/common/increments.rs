//! Dumps with increments, of tables of any device. Each public function is a test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use sok_core::checkpoint::{
    After, Array, DumpOptions, DumpReader, LoadMode, LoadOptions, Manifest, Target, TargetBinding, compact,
    dump, freeze, read_manifest, verify,
};
use sok_core::contract::table::{Contents, Insertion, Table, TableConfig};
use sok_core::error::{Error, Result};
use sok_core::formula::update::UpdateScalars;
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score};
use sok_core::policy::time_to_live::{Lifetime, TimeToLive};
use sok_core::row_type::RowType;

use super::input::Input;
use super::large::{ADAM, SGD, plain_update};
use super::sharded::Directory;
use super::strategies::plain_config;
use super::subject::{Maker, OWNER, Subject, binding};
use super::{Dice, scan};

const KEYS: u64 = 60;

fn configs() -> Vec<TableConfig> {
    let evicting = |score| Some(Eviction { score, counts_inference: false, keeps_evicted: false });
    let time_to_live = |steps| Some(TimeToLive { lifetime: Lifetime::Steps(steps), keeps_expired: false });
    vec![
        plain_config("plain", 3),
        TableConfig { vocabulary_size: Some(KEYS), ..plain_config("static", 2) },
        TableConfig {
            max_capacity: Some(30),
            eviction: evicting(Score::Lfu { half_life: Some(3) }),
            ..plain_config("counted", 2)
        },
        TableConfig {
            max_capacity: Some(40),
            eviction: evicting(Score::Lru),
            time_to_live: time_to_live(7),
            ..plain_config("expiring", 2)
        },
        TableConfig { row_type: RowType::Bfloat16, stochastic_rounding: true, ..plain_config("narrow", 3) },
    ]
}

/// Tables that are trained.
pub struct Trained {
    maker: Maker,
    pub subject: Box<dyn Subject>,
    num_pushes: u64,
    step: u64,
}

type Rows = Vec<(u64, BTreeMap<Key, Vec<u32>>)>;

impl Trained {
    pub fn new(maker: &Maker) -> Trained {
        let mut subject = (maker.make)(&configs()).remove(0);
        subject.bind(binding(OWNER, plain_update(ADAM))).unwrap();
        Trained { maker: Maker { ..*maker }, subject, num_pushes: 0, step: 0 }
    }

    /// Tables with the rows of a dump, in another process.
    pub fn loaded(&self, path: &Path) -> Trained {
        let mut trained = Trained::new(&self.maker);
        trained.load(path, LoadMode::Replace).unwrap();
        trained
    }

    /// Makes a step with some keys in each table.
    pub fn train(&mut self, dice: &mut Dice) {
        self.num_pushes += 1;
        self.step += 1;
        let number = self.num_pushes;
        let mut inputs = Vec::new();
        for table in 0..configs().len() {
            let keys: Vec<Key> = (0..1 + dice.below(9)).map(|_| dice.below(KEYS)).collect();
            inputs.push(Input::plain(table, &keys));
        }
        let (lookup, rows) = self.subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
        let gradients = Arc::new(rows.iter().map(|rows| dice.floats(rows.len())).collect());
        self.subject.push(number, lookup, &gradients, true, &[]).unwrap();
        let is_update = dice.below(5) > 0;
        self.subject.commit(&[(number, 1.0)], is_update).unwrap();
        let scalars = UpdateScalars { learning_rate: 0.1, step: number, factor: 1.0 };
        self.subject.apply(scalars, is_update).unwrap();
    }

    /// Changes rows outside of training.
    fn change(&mut self, dice: &mut Dice) {
        for table in self.subject.tables_mut() {
            let keys: Vec<Key> = (0..3).map(|_| dice.below(KEYS)).collect();
            let mut rows = dice.floats(keys.len() * table.config().dim);
            match dice.below(3) {
                0 => drop(table.assign(&keys, &rows, dice.below(2) == 0)),
                1 => _ = table.erase(&keys).unwrap(),
                _ => drop(table.find_or_insert(&keys, &mut rows)),
            }
        }
    }

    fn track(&mut self, manifest: &Manifest) {
        let snapshot = manifest.snapshot();
        self.subject.tables_mut().into_iter().for_each(|table| table.track(snapshot).unwrap());
    }

    fn contents(&mut self) -> Rows {
        self.subject.tables().into_iter().map(|table| (table.step().unwrap(), scan(table, 7))).collect()
    }

    pub fn dump(&mut self, path: &Path) -> Manifest {
        let options = DumpOptions { step: self.step, shard_bytes: 400, ..DumpOptions::default() };
        let arrays = self.arrays();
        let manifest = dump(path, &self.subject.tables(), &arrays, &options).unwrap();
        self.track(&manifest);
        manifest
    }

    pub fn increment(&mut self, path: &Path, since: Option<u64>) -> Result<Manifest> {
        let after = Some(since.map_or(After::Newest, After::Step));
        let options = DumpOptions { after, step: self.step, shard_bytes: 400, ..DumpOptions::default() };
        let arrays = self.arrays();
        let manifest = dump(path, &self.subject.tables(), &arrays, &options)?;
        self.track(&manifest);
        Ok(manifest)
    }

    fn arrays(&self) -> Vec<Array<'static>> {
        let data = self.step.to_le_bytes().to_vec().into();
        vec![Array { name: "step".into(), dtype: "U64".into(), shape: vec![], data }]
    }

    pub fn load(&mut self, path: &Path, mode: LoadMode) -> Result<()> {
        let reader = DumpReader::open(path)?;
        let configs = configs();
        let tables = self.subject.tables_mut().into_iter().zip(&configs);
        let mut targets: Vec<Target> = tables
            .map(|(table, config)| Target {
                name: &config.name,
                table,
                binding: TargetBinding::Bound,
                owners: None,
            })
            .collect();
        let report = reader.load(&mut targets, &LoadOptions { mode, states: true }, None)?;
        assert_eq!(reader.arrays()?[0].data[..], report.step.to_le_bytes());
        self.step = report.step;
        Ok(())
    }
}

/// Checks that tables have the rows of others.
fn same(loaded: &mut Trained, trained: &mut Trained, seed: u64) {
    for (table, (got, expected)) in loaded.contents().iter().zip(trained.contents()).enumerate() {
        assert_eq!(got.0, expected.0, "seed {seed}, table {table}, step");
        assert!(got.1.keys().eq(expected.1.keys()), "seed {seed}, table {table}, keys");
        for (key, record) in &expected.1 {
            assert_eq!(&got.1[key], record, "seed {seed}, table {table}, key {key}");
        }
    }
}

pub fn a_chain_loads_as_the_whole_dump_would(maker: &Maker) {
    for seed in 0..6 {
        let mut dice = Dice(seed);
        let directory = Directory::new(&format!("chain{seed}"));
        let path = &directory.0;
        let mut trained = Trained::new(maker);
        trained.change(&mut dice);
        trained.dump(path);
        for _ in 0..20 {
            for _ in 0..dice.below(6) {
                if dice.below(4) == 0 { trained.change(&mut dice) } else { trained.train(&mut dice) }
            }
            match dice.below(8) {
                0 => drop(trained.dump(path)),
                1 => drop(compact(path).unwrap()),
                2 => {
                    // Later parts go.
                    let manifest = read_manifest(path).unwrap();
                    let parts: Vec<u64> = std::iter::once(manifest.step)
                        .chain(manifest.increments.iter().map(|increment| increment.step))
                        .collect();
                    let parent = dice.pick(&parts);
                    // Tables forget old dumps.
                    if let Ok(manifest) = trained.increment(path, Some(parent)) {
                        let last = parts.iter().rposition(|step| *step == parent).unwrap();
                        assert_eq!(manifest.increments.len(), last + 1);
                    }
                }
                3 => {
                    trained.increment(path, None).unwrap();
                    // Another process goes on.
                    trained = trained.loaded(path);
                }
                _ => drop(trained.increment(path, None).unwrap()),
            }
            trained.increment(path, None).unwrap();
            verify(path).unwrap();
            same(&mut trained.loaded(path), &mut trained, seed);
        }
        let files = || fs::read_dir(path).unwrap().count();
        let named: usize = read_manifest(path).unwrap().increments.len();
        assert!(files() > named, "files of dropped parts are gone, those of others are there");
        let manifest = compact(path).unwrap();
        assert!(manifest.increments.is_empty());
        same(&mut trained.loaded(path), &mut trained, seed);
        trained.train(&mut dice);
        trained.increment(path, None).unwrap();
        same(&mut trained.loaded(path), &mut trained, seed);
    }
}

pub fn a_frozen_dump_is_of_its_step_whatever_comes_later(maker: &Maker) {
    for seed in 0..4 {
        let mut dice = Dice(100 + seed);
        let directory = Directory::new(&format!("frozen{seed}"));
        let path = &directory.0;
        let mut trained = Trained::new(maker);
        let go_on = |trained: &mut Trained, dice: &mut Dice| {
            for _ in 0..1 + dice.below(4) {
                if dice.below(3) == 0 { trained.change(dice) } else { trained.train(dice) }
            }
        };
        for number in 0..12 {
            go_on(&mut trained, &mut dice);
            let after = Some(After::Newest).filter(|_| number > 0 && dice.below(3) > 0);
            let options =
                DumpOptions { after, step: trained.step, shard_bytes: 400, ..DumpOptions::default() };
            let arrays = trained.arrays();
            let frozen = freeze(path, &mut trained.subject.tables_mut(), &options, None).unwrap();
            let (expected, num_written) = (trained.contents(), AtomicU64::new(0));
            go_on(&mut trained, &mut dice);
            let contents: Vec<&dyn Contents> = frozen.contents.iter().map(|table| &**table).collect();
            let num_rows = frozen.num_rows;
            let options = DumpOptions { num_written: Some(&num_written), ..options };
            let manifest = dump(path, &contents, &arrays, &options).unwrap();
            assert_eq!(num_written.into_inner(), num_rows);
            let renamed = |table: &mut dyn Table| table.rename_snapshot(frozen.snapshot, manifest.snapshot());
            trained.subject.tables_mut().into_iter().for_each(renamed);
            assert_eq!(trained.loaded(path).contents(), expected, "seed {seed}, dump {number}");
            // What came meanwhile is in the next increment.
            trained.increment(path, None).unwrap();
            same(&mut trained.loaded(path), &mut trained, seed);
        }
        // Of the epochs that a table remembers, the one whose changes are copied is the oldest.
        go_on(&mut trained, &mut dice);
        for other in 0..15 {
            trained.subject.tables_mut().into_iter().for_each(|table| table.track(other).unwrap());
        }
        let options =
            DumpOptions { after: Some(After::Newest), step: trained.step, ..DumpOptions::default() };
        let frozen = freeze(path, &mut trained.subject.tables_mut(), &options, None).unwrap();
        let contents: Vec<&dyn Contents> = frozen.contents.iter().map(|table| &**table).collect();
        dump(path, &contents, &trained.arrays(), &options).unwrap();
        same(&mut trained.loaded(path), &mut trained, seed);
        trained.subject.table_mut(1).clear().unwrap();
        let error = freeze(path, &mut trained.subject.tables_mut(), &options, None).err().unwrap();
        assert!(matches!(error, Error::UnknownChanges { .. }), "{error}");
    }
}

pub fn an_increment_has_what_has_changed_and_no_more(maker: &Maker) {
    let directory = Directory::new("small");
    let config = plain_config("t", 2);
    let mut subject = (maker.make)(&[config]).remove(0);
    let keys: Vec<Key> = (0..10_000).collect();
    subject.table_mut(0).assign(&keys, &vec![0.5; 20_000], true).unwrap();
    let base = dump(&directory.0, &subject.tables(), &[], &DumpOptions::default()).unwrap();
    subject.table_mut(0).track(base.snapshot()).unwrap();
    subject.table_mut(0).assign(&keys[..100], &[1.0; 200], true).unwrap();
    subject.table_mut(0).erase(&keys[200..210]).unwrap();
    // A row that comes and goes between two dumps is in none.
    subject.table_mut(0).assign(&[1 << 40], &[1.0; 2], true).unwrap();
    subject.table_mut(0).erase(&[1 << 40]).unwrap();
    let options = DumpOptions { after: Some(After::Newest), step: 1, ..DumpOptions::default() };
    let manifest = dump(&directory.0, &subject.tables(), &[], &options).unwrap();
    let entry = &manifest.increments[0].tables[0];
    assert_eq!((entry.num_rows, entry.total_rows()), (100, 9990));
    assert_eq!(entry.removed.iter().map(|file| file.num_rows()).sum::<u64>(), 10);
    let bytes: u64 = entry.shards.iter().chain(&entry.removed).map(|file| file.bytes).sum();
    assert!(bytes < 100 * 16 + 10 * 8 + 400, "{bytes}");
}

pub fn rows_that_the_first_lookup_of_a_table_removes_are_known(maker: &Maker) {
    const ROWS: u64 = 30;
    let full = |name, keeps_evicted| TableConfig {
        max_capacity: Some(ROWS),
        eviction: Some(Eviction { score: Score::Lru, counts_inference: false, keeps_evicted }),
        ..plain_config(name, 2)
    };
    for (number, is_cleared, keeps) in
        [(0, false, false), (1, false, false), (1, true, false), (1, false, true)]
    {
        let configs = [full("a", keeps), full("b", keeps)];
        let mut subject = (maker.make)(&configs).remove(0);
        subject.bind(binding(OWNER, plain_update(ADAM))).unwrap();
        if is_cleared {
            // The other table has had lookups.
            subject.table_mut(1 - number).assign(&[1], &[1.0; 2], true).unwrap();
            subject.lookup(&[Input::plain(1 - number, &[1])], Insertion::AtLookup, true).unwrap();
            subject.table_mut(number).clear().unwrap();
        }
        let keys: Vec<Key> = (0..ROWS).collect();
        subject.table_mut(number).assign(&keys, &vec![1.0; 2 * keys.len()], true).unwrap();
        subject.table_mut(number).track(7).unwrap();
        subject.lookup(&[Input::plain(number, &[100, 101])], Insertion::AtLookup, true).unwrap();
        assert_eq!(subject.table_mut(number).erase(&[29]).unwrap(), 1);
        let left = scan(subject.table(number), 7);
        let mut gone: Vec<Key> = keys.into_iter().filter(|key| !left.contains_key(key)).collect();
        let of_case = format!("table {number}, cleared {is_cleared}, keeps {keeps}");
        let epoch = subject.table(number).epoch_of(7).unwrap();
        assert_eq!(subject.table(number).removed_since(epoch).unwrap(), gone, "{of_case}");
        assert_eq!(gone, [0, 1, 29], "{of_case}");
        if keeps {
            gone.retain(|key| *key != 29);
            let evicted = subject.table_mut(number).take_evicted().unwrap();
            assert_eq!((evicted.keys, evicted.values), (gone, vec![1.0; 4]), "{of_case}");
        }
    }
}

pub fn a_merge_of_a_chain_leaves_rows_that_went_from_it(maker: &Maker) {
    let directory = Directory::new("merge");
    let mut dice = Dice(5);
    let mut trained = Trained::new(maker);
    let set = |trained: &mut Trained, keys: &[Key], value: f32| {
        for table in trained.subject.tables_mut() {
            let rows = vec![value; keys.len() * table.config().dim];
            table.assign(keys, &rows, true).unwrap();
        }
    };
    set(&mut trained, &[1, 2, 3], 1.0);
    trained.dump(&directory.0);
    trained.subject.tables_mut().into_iter().for_each(|table| assert_eq!(table.erase(&[2]).unwrap(), 1));
    set(&mut trained, &[3], 3.0);
    trained.increment(&directory.0, None).unwrap();
    let mut other = Trained::new(maker);
    set(&mut other, &[2, 3, 9], 7.0);
    other.load(&directory.0, LoadMode::Merge).unwrap();
    for table in other.subject.tables_mut() {
        let dim = table.config().dim;
        let (mut rows, mut found) = (vec![0.0; 4 * dim], [false; 4]);
        table.find(&[1, 2, 3, 9], &mut rows, &mut found).unwrap();
        assert_eq!(found, [true; 4]);
        assert_eq!(rows.chunks(dim).map(|row| row[0]).collect::<Vec<_>>(), [1.0, 7.0, 3.0, 7.0]);
    }
    other.train(&mut dice);
}

pub fn an_optimizer_without_states_changes_no_row(maker: &Maker) {
    let directory = Directory::new("sgd");
    let mut subject = (maker.make)(&[plain_config("a", 2)]).remove(0);
    subject.table_mut(0).assign(&[1], &[1.0; 2], true).unwrap();
    let snapshot = dump(&directory.0, &subject.tables(), &[], &DumpOptions::default()).unwrap().snapshot();
    subject.table_mut(0).track(snapshot).unwrap();
    subject.table_mut(0).set_update_rule(Some(plain_update(SGD)), true).unwrap();
    assert!(subject.table(0).epoch_of(snapshot).is_some());
    subject.table_mut(0).set_update_rule(Some(plain_update(ADAM)), true).unwrap();
    assert!(subject.table(0).epoch_of(snapshot).is_none());
}

pub fn nothing_of_an_erased_row_is_left_after_compaction(maker: &Maker) {
    let directory = Directory::new("privacy");
    let key: Key = 0x1234_5678_9abc_def0;
    let value = f32::from_bits(0x4321_dead);
    let mut trained = Trained::new(maker);
    let mut dice = Dice(9);
    let row = |table: &dyn Table| vec![value; table.config().dim];
    let table = trained.subject.table_mut(0);
    let values = row(&*table);
    table.assign(&[key], &values, true).unwrap();
    trained.dump(&directory.0);
    trained.train(&mut dice);
    trained.increment(&directory.0, None).unwrap();
    assert_eq!(trained.subject.table_mut(0).erase(&[key]).unwrap(), 1);
    trained.increment(&directory.0, None).unwrap();
    let occurs = || {
        let needles = [key.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()];
        let files = fs::read_dir(&directory.0).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
        let files: Vec<Vec<u8>> = files.collect();
        needles.map(|needle| files.iter().any(|file| file.windows(needle.len()).any(|bytes| bytes == needle)))
    };
    assert_eq!(occurs(), [true, true]);
    compact(&directory.0).unwrap();
    assert_eq!(occurs(), [false, false]);
    assert_eq!(trained.loaded(&directory.0).contents(), trained.contents());
}
