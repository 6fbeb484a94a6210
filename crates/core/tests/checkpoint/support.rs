//! Directories, short calls, and the dump that all damages and failures are tried on.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use sok_core::checkpoint::{
    Array, DumpOptions, Files, LoadMode, LoadOptions, MANIFEST, Manifest, dump_with, load, read_arrays,
    read_manifest,
};
use sok_core::key::Key;
use sok_core::{Error, Result};

pub use crate::broken_disk::{BrokenDisk, Fault};
pub use crate::map_table::{MapTable, adam, row_wise, update};

/// A directory of its own, gone at the end of the test.
pub struct Directory(pub PathBuf);

impl Directory {
    pub fn new() -> Directory {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("sok-checkpoint-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    /// Where the dump goes; made by the dump.
    pub fn dump(&self) -> PathBuf {
        self.0.join("dump")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn names(path: &Path) -> BTreeSet<String> {
    fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

/// What a dump consists of.
pub fn named_files(path: &Path) -> BTreeSet<String> {
    let manifest = read_manifest(path).unwrap();
    let shards = manifest.tables.iter().flat_map(|t| &t.shards).chain(&manifest.arrays);
    shards.map(|s| s.file.clone()).chain([MANIFEST.to_owned()]).collect()
}

pub fn options(shard_bytes: usize) -> DumpOptions<'static> {
    DumpOptions { step: 7, shard_bytes, ..DumpOptions::default() }
}

pub fn merge() -> LoadOptions {
    LoadOptions { mode: LoadMode::Merge, states: true }
}

pub fn without_states(mode: LoadMode) -> LoadOptions {
    LoadOptions { mode, states: false }
}

pub fn load_one(path: &Path, name: &str, table: &mut MapTable, options: &LoadOptions) -> Result<()> {
    load(path, &mut [(name, table)], options).map(drop)
}

/// The text of the `DumpMismatch` that a load must give, on a table that must not change.
pub fn mismatch(path: &Path, name: &str, table: &MapTable, options: &LoadOptions) -> String {
    let mut target = table.clone();
    let error = load_one(path, name, &mut target, options).unwrap_err();
    assert_eq!(target.records, table.records);
    assert_eq!(target.update, table.update);
    match error {
        Error::DumpMismatch { path: named, what } => {
            assert_eq!(named, path);
            what
        }
        other => panic!("expected a mismatch, got {other:?}"),
    }
}

/// Asserts the error of damage in `file`; returns its text.
pub fn corrupt<T: std::fmt::Debug>(result: Result<T>, file: &Path) -> String {
    match result.unwrap_err() {
        Error::CorruptDump { path, what } => {
            assert_eq!(path, file, "{what}");
            what
        }
        other => panic!("expected damage in {}, got {other:?}", file.display()),
    }
}

pub fn f32_array(name: &str, values: &[f32]) -> Array<'static> {
    let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Array { name: name.into(), dtype: "F32".into(), shape: vec![values.len()], data: Cow::Owned(data) }
}

/// Puts another body into a manifest, with a checksum that fits.
pub fn forge_manifest(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let file = path.join(MANIFEST);
    let mut whole: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut whole["body"]);
    let body = serde_json::to_string(&whole["body"]).unwrap();
    let checksum = xxhash_rust::xxh3::xxh3_64(body.as_bytes());
    fs::write(file, format!("{{\"body\": {body}, \"xxh3\": \"{checksum:016x}\"}}\n")).unwrap();
}

/// Two tables in several shards, and arrays; `salt` tells old from new.
pub fn two_tables(salt: f32) -> [MapTable; 2] {
    let keys = (0..13).map(|k| k * k).chain([Key::MAX, 1 << 63]);
    let a = MapTable::new("a", 3, adam()).filled(keys, salt);
    [a, MapTable::new("b", 1, row_wise()).filled(20..25, salt)]
}

pub fn dump_two(files: &Arc<impl Files + 'static>, path: &Path, salt: f32) -> Result<Manifest> {
    let [a, b] = two_tables(salt);
    // A record of `a` is 44 bytes: five of them a shard.
    dump_with(files.clone(), path, &[&a, &b], &[f32_array("dense", &[salt, 2.0])], &options(230))
}

/// The salt of the dump in `path`: all of it must be of one salt.
pub fn salt_of(path: &Path) -> f32 {
    let mut tables = two_tables(0.0).map(|t| t.empty_twin());
    let [a, b] = &mut tables;
    load(path, &mut [("a", a), ("b", b)], &LoadOptions::default()).unwrap();
    let arrays = read_arrays(path).unwrap();
    let salt = f32::from_le_bytes(arrays[0].data[..4].try_into().unwrap());
    for (expected, got) in two_tables(salt).iter().zip(&tables) {
        assert_eq!(expected.records, got.records);
        assert_eq!(expected.update, got.update);
    }
    salt
}

/// After a failure: the dump there is `old` or `new`; the next one works and leaves nothing of the failed one.
pub fn assert_old_or_new(path: &Path, old: Option<f32>, new: f32) {
    match old {
        Some(old) => assert!([old, new].contains(&salt_of(path))),
        None if path.join(MANIFEST).exists() => assert_eq!(salt_of(path), new),
        None => assert!(matches!(read_manifest(path), Err(Error::Io { .. }))),
    }
    dump_two(&BrokenDisk::counting(), path, 99.0).unwrap();
    assert_eq!(salt_of(path), 99.0);
    assert_eq!(names(path), named_files(path));
}

/// Operations of a dump, over another or not.
pub fn count_operations(overwrites: bool) -> usize {
    let directory = Directory::new();
    if overwrites {
        dump_two(&BrokenDisk::counting(), &directory.dump(), 1.0).unwrap();
    }
    let files = BrokenDisk::counting();
    dump_two(&files, &directory.dump(), 2.0).unwrap();
    assert!(files.unsynced_bytes.lock().unwrap().is_empty());
    files.count.load(Relaxed)
}
