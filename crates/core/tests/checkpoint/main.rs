//! Dumps: what comes back, what is refused, and what is left when the disk or the process fails.

mod broken_disk;
mod damage;
mod failures;
mod foreign;
mod fuzz;
mod loading;
mod map_table;
mod support;

use std::borrow::Cow;
use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use safetensors::{Dtype, SafeTensors};
use sok_core::Error;
use sok_core::checkpoint::{
    Array, BLOCK_BYTES, CHUNK_BYTES, Disk, DumpOptions, LOAD_BYTES, LoadOptions, MANIFEST, dump, dump_with,
    load, read_arrays, read_manifest, verify,
};
use sok_core::contract::table::Contents;
use sok_core::formula::{Adam, Rule};
use sok_core::key::Key;
use support::*;

#[test]
fn every_key_and_float_comes_back() {
    let directory = Directory::new();
    let keys = [0, 1, 7, (1 << 63) - 1, 1 << 63, Key::MAX - 1, Key::MAX];
    let mut table = MapTable::new("movies", 5, adam()).filled(keys, 0.0);
    let odd = [f32::NAN, f32::NEG_INFINITY, -0.0, f32::MIN_POSITIVE / 2.0, f32::MAX];
    table.records.get_mut(&7).unwrap()[..5].copy_from_slice(&odd);
    let manifest = dump(&directory.dump(), &[&table], &[], &options(1 << 30)).unwrap();

    let mut back = table.empty_twin();
    let report = load(&directory.dump(), &mut [("movies", &mut back)], &LoadOptions::default()).unwrap();
    let bits = |t: &MapTable| -> Vec<_> { t.records.iter().map(|(k, r)| (*k, bits_of(r))).collect() };
    assert_eq!(bits(&back), bits(&table));
    assert_eq!((report.step, report.tables[0].num_rows, report.tables[0].states), (7, 7, true));

    assert_eq!(read_manifest(&directory.dump()).unwrap(), manifest);
    let entry = &manifest.tables[0];
    assert_eq!((entry.dim, entry.seed, entry.num_rows), (5, u64::MAX, 7));
    assert_eq!((entry.dtype.name(), entry.update, entry.vocabulary_size), ("float32", adam(), None));
    assert_eq!(
        entry.states.iter().map(|s| (s.name.as_str(), s.width)).collect::<Vec<_>>(),
        [("momentum", 5), ("velocity", 5)]
    );
    assert_eq!((manifest.step, manifest.arrays, manifest.created.len()), (7, None, 20));
}

fn bits_of(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn hyper_parameters_come_back_to_the_bit() {
    let directory = Directory::new();
    // The shortest decimal of each has 16 or 17 digits.
    for value in [0.1 + 0.2 + 0.6, 1.0 - f64::EPSILON / 2.0, 0.899_999_999_999_999_9, 1e-7 / 3.0, 2.0 / 3.0] {
        let rule =
            Rule::Adam(Adam { beta_1: value, beta_2: value / 3.0, epsilon: value * 1e-7, amsgrad: true });
        let table = MapTable::new("t", 1, update(rule));
        dump(&directory.dump(), &[&table], &[], &options(1 << 30)).unwrap();
        assert_eq!(read_manifest(&directory.dump()).unwrap().tables[0].update, table.update);
    }
}

#[test]
fn shards_are_of_bounded_size_and_together_the_table() {
    let directory = Directory::new();
    let table = MapTable::new("t", 3, row_wise()).filled(0..1000, 0.5);
    let record_bytes = 8 + 4 * 4;
    for (shard_bytes, shards) in [(1, 1000), (record_bytes * 300, 4), (record_bytes * 1000, 1)] {
        let files = BrokenDisk::counting();
        let manifest =
            dump_with(files.clone(), &directory.dump(), &[&table], &[], &options(shard_bytes)).unwrap();
        assert_eq!(manifest.tables[0].shards.len(), shards);
        let rows: Vec<_> = manifest.tables[0].shards.iter().map(|s| s.num_rows()).collect();
        assert!(rows.iter().all(|&r| r == 1 || r * record_bytes as u64 <= shard_bytes as u64));
        assert_eq!(rows.iter().sum::<u64>(), 1000);

        let mut back = table.empty_twin();
        load_one(&directory.dump(), "t", &mut back, &LoadOptions::default()).unwrap();
        assert_eq!(back.records, table.records);
        assert_eq!(names(&directory.dump()), named_files(&directory.dump()));
    }
}

#[test]
fn empty_tables_and_empty_dumps_are_dumps() {
    let directory = Directory::new();
    let table = MapTable::new("t", 3, adam());
    let manifest = dump(&directory.dump(), &[&table], &[], &options(1)).unwrap();
    assert!(manifest.tables[0].shards.is_empty());
    let mut target = MapTable::new("t", 3, None).filled(0..9, 0.0);
    load_one(&directory.dump(), "t", &mut target, &LoadOptions::default()).unwrap();
    assert!(target.is_empty().unwrap());

    dump(&directory.dump(), &[], &[], &DumpOptions::default()).unwrap();
    verify(&directory.dump()).unwrap();
    assert!(read_arrays(&directory.dump()).unwrap().is_empty());
}

#[test]
fn stock_safetensors_reads_a_shard() {
    let directory = Directory::new();
    let table = MapTable::new("movies", 3, row_wise()).filled([4, Key::MAX], 0.0);
    let manifest = dump(&directory.dump(), &[&table], &[], &options(1 << 30)).unwrap();
    let bytes = fs::read(directory.dump().join(&manifest.tables[0].shards[0].file)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
    };
    let keys = file.tensor("keys").unwrap();
    assert_eq!((keys.dtype(), keys.shape()), (Dtype::I64, &[2][..]));
    assert_eq!(keys.data(), [4i64.to_le_bytes(), (-1i64).to_le_bytes()].concat());
    let records: Vec<_> = table.records.values().collect();
    assert_eq!(file.tensor("rows").unwrap().shape(), [2, 3]);
    assert_eq!(floats("rows"), [&records[0][..3], &records[1][..3]].concat());
    assert_eq!(file.tensor("state.accumulator").unwrap().shape(), [2, 1]);
    assert_eq!(floats("state.accumulator"), [records[0][3], records[1][3]]);
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    assert_eq!(metadata.metadata().as_ref().unwrap()["table"], "movies");
}

#[test]
fn arrays_come_back_with_their_dtypes_and_shapes() {
    let directory = Directory::new();
    let big: Vec<u8> = (0..2 * BLOCK_BYTES + CHUNK_BYTES + 3).map(|i| (i % 251) as u8).collect();
    let array = |name: &str, dtype: &str, shape: &[usize], data: &[u8]| Array {
        name: name.into(),
        dtype: dtype.into(),
        shape: shape.into(),
        data: Cow::Owned(data.into()),
    };
    let arrays = [
        array("none", "F64", &[0, 4], &[]),
        array("scalar", "BOOL", &[], &[1]),
        array("größe/\"0\"", "BF16", &[2, 3], &[9; 12]),
        array("step", "I64", &[1], &[7; 8]),
        array("big", "U8", &[big.len()], &big),
    ];
    dump(&directory.dump(), &[], &arrays, &options(1 << 30)).unwrap();
    let back = read_arrays(&directory.dump()).unwrap();
    let order: Vec<_> = back.iter().map(|a| a.name.as_str()).collect();
    assert_eq!(order, ["none", "step", "größe/\"0\"", "scalar", "big"], "widest first: each lies aligned");
    assert!(arrays.iter().all(|a| back.contains(a)));

    let file = read_manifest(&directory.dump()).unwrap().arrays.unwrap().file;
    let bytes = fs::read(directory.dump().join(file)).unwrap();
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().tensor("big").unwrap().data(), big);
}

#[test]
fn wrong_arguments_of_a_dump_change_nothing() {
    let directory = Directory::new();
    let [a, b] = two_tables(0.0);
    let refused = |tables: &[&dyn Contents], arrays: &[Array]| match dump(
        &directory.dump(),
        tables,
        arrays,
        &DumpOptions::default(),
    )
    .unwrap_err()
    {
        Error::Argument(text) => text,
        other => panic!("{other:?}"),
    };
    assert!(refused(&[&a, &b, &a], &[]).contains("`a` comes twice"));
    let dense = f32_array("dense", &[1.0]);
    assert!(refused(&[], &[dense.clone(), dense.clone()]).contains("`dense` comes twice"));
    assert!(
        refused(&[], &[Array { dtype: "float32".into(), ..dense.clone() }]).contains("Received: float32")
    );
    assert!(refused(&[], &[Array { shape: vec![2], ..dense.clone() }]).contains("Received: 4 bytes"));
    assert!(
        refused(&[], &[Array { name: "__metadata__".into(), ..dense.clone() }]).contains("safetensors' own")
    );
    assert!(!directory.dump().exists());

    dump_two(&Arc::new(Disk), &directory.dump(), 1.0).unwrap();
    let before = names(&directory.dump());
    let options = DumpOptions { overwrite: false, ..DumpOptions::default() };
    let error = dump(&directory.dump(), &[&a, &b], &[], &options).unwrap_err();
    assert!(matches!(&error, Error::Argument(text) if text.contains("`overwrite`")), "{error}");
    assert_eq!((names(&directory.dump()), salt_of(&directory.dump())), (before, 1.0));
}

#[test]
fn overwriting_removes_the_old_dump_and_nothing_else() {
    let directory = Directory::new();
    dump_two(&Arc::new(Disk), &directory.dump(), 1.0).unwrap();
    for own in ["notes.txt", "model.safetensors", "sok-notes", "sok-0123456789abcdef-x.safetensors"] {
        fs::write(directory.dump().join(own), "mine").unwrap();
    }
    fs::write(directory.dump().join("sok-0123456789abcdef-00001.safetensors"), "a killed dump's").unwrap();
    fs::write(directory.dump().join("sok-0123456789abcdef-manifest.json"), "a killed dump's").unwrap();
    dump_two(&Arc::new(Disk), &directory.dump(), 2.0).unwrap();
    assert_eq!(salt_of(&directory.dump()), 2.0);
    let others: Vec<_> =
        names(&directory.dump()).difference(&named_files(&directory.dump())).cloned().collect();
    assert_eq!(others, ["model.safetensors", "notes.txt", "sok-0123456789abcdef-x.safetensors", "sok-notes"]);
}

#[test]
fn directories_above_a_dump_are_made() {
    let directory = Directory::new();
    let path = directory.0.join("runs/1/epoch-3");
    dump_two(&Arc::new(Disk), &path, 1.0).unwrap();
    assert_eq!(salt_of(&path), 1.0);
    let error = dump_two(&Arc::new(Disk), &path.join(MANIFEST).join("inside"), 1.0).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path: named, .. } if named.starts_with(path.join(MANIFEST))),
        "{error}"
    );
}

#[test]
fn a_second_dump_into_the_same_directory_is_told_to_wait() {
    let directory = Directory::new();
    dump_two(&Arc::new(Disk), &directory.dump(), 1.0).unwrap();
    let lock = File::open(directory.dump()).unwrap();
    lock.lock().unwrap();
    let error = dump_two(&Arc::new(Disk), &directory.dump(), 2.0).unwrap_err();
    assert!(matches!(&error, Error::State(text) if text.contains("another is at work")), "{error}");
    assert_eq!(salt_of(&directory.dump()), 1.0, "readers do not wait");
    lock.unlock().unwrap();
    dump_two(&Arc::new(Disk), &directory.dump(), 2.0).unwrap();
}

#[test]
fn buffers_do_not_grow_with_the_table() {
    let directory = Directory::new();
    // 23 MB of records, 12 MB of an array.
    let table = MapTable::new("t", 24, adam()).filled(0..75_000, 0.0);
    let array = f32_array("dense", &vec![1.0; 3 << 20]);
    let files = BrokenDisk::counting();
    dump_with(files.clone(), &directory.dump(), &[&table], &[array], &options(9 << 20)).unwrap();
    assert!(files.largest_write.load(Relaxed) <= CHUNK_BYTES, "{}", files.largest_write.load(Relaxed));
    assert!(table.largest_chunk.replace(0) <= CHUNK_BYTES);

    let mut back = table.empty_twin();
    load_one(&directory.dump(), "t", &mut back, &LoadOptions::default()).unwrap();
    assert!(back.largest_chunk.get() <= LOAD_BYTES);
    assert_eq!(back.records, table.records);
}
