//! What else may lie under the name of a dump's file: nothing is followed, waited for, or believed.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use sok_core::Error;
use sok_core::checkpoint::{LoadOptions, MANIFEST, load, read_arrays, read_manifest, verify};

use crate::support::*;

/// Puts something else in the place of `file`.
type Swap = fn(&Path);

const SWAPS: [(&str, Swap); 6] = [
    ("a FIFO", |file| assert!(Command::new("mkfifo").arg(file).status().unwrap().success())),
    ("a symbolic link", |file| symlink("/dev/zero", file).unwrap()),
    ("a symbolic link", |file| symlink(file.with_extension("aside"), file).unwrap()),
    ("a directory", |file| fs::create_dir(file).unwrap()),
    // A path of a socket is at most 108 bytes long: it is made elsewhere, and moved.
    ("a socket", |file| {
        let short = Directory::new();
        drop(UnixListener::bind(short.0.join("s")).unwrap());
        fs::rename(short.0.join("s"), file).unwrap();
    }),
    ("of ", |file| File::create(file).unwrap().set_len(1 << 42).unwrap()),
];

fn assert_refused(path: &Path, file: &Path, got: &str) {
    let started = Instant::now();
    let mut tables = two_tables(0.0);
    let [a, b] = &mut tables;
    let results = [
        verify(path).err(),
        load(path, &mut [("a", a), ("b", b)], &LoadOptions::default()).err(),
        read_arrays(path).err(),
        read_manifest(path).err().filter(|_| file.ends_with(MANIFEST)),
    ];
    let told: Vec<_> = results.into_iter().flatten().collect();
    assert!(told.len() >= if file.ends_with(MANIFEST) { 4 } else { 2 }, "{told:?}");
    for error in told {
        match &error {
            Error::CorruptDump { path, what } => assert!(
                path == file && what.contains(got) || what.contains("at most 1073741824 bytes"),
                "{error}"
            ),
            _ => panic!("{error:?}"),
        }
    }
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(two_tables(0.0).iter().zip(&tables).all(|(x, y)| x.records == y.records));
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    for (got, swap) in SWAPS {
        let directory = Directory::new();
        let path = &directory.dump();
        dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
        for name in named_files(path) {
            let (file, aside) = (path.join(&name), path.join(&name).with_extension("aside"));
            fs::rename(&file, &aside).unwrap();
            swap(&file);
            assert_refused(path, &file, got);
            if file.is_dir() && !file.is_symlink() { fs::remove_dir(&file) } else { fs::remove_file(&file) }
                .unwrap();
            fs::rename(&aside, &file).unwrap();
            verify(path).unwrap();
        }
    }
}

fn write_manifest(path: &Path, body: &[u8]) {
    let checksum = format!(", \"xxh3\": \"{:016x}\"}}\n", xxhash_rust::xxh3::xxh3_64(body));
    fs::write(path.join(MANIFEST), [b"{\"body\": ", body, checksum.as_bytes()].concat()).unwrap();
}

#[test]
fn manifests_that_are_deep_or_huge_or_of_absurd_names_are_refused_at_once() {
    let directory = Directory::new();
    let path = &directory.dump();
    dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
    let long = "n".repeat(8 << 20);
    let head = "\"format\": \"sok_keras dump\", \"version\": 1";
    let bodies = [
        "[".repeat(4 << 20),
        "{\"a\":".repeat(1 << 20),
        format!("{{{head}, \"tables\": {}", "[".repeat(1 << 20)),
        format!("{{{head}, \"{long}\": 1}}"),
        format!("{{{head}, \"step\": 1e999}}"),
        format!("{{{head}, \"step\": {}}}", "9".repeat(1 << 20)),
        format!("{{\"format\": \"{long}\", \"version\": 1}}"),
        "{\"format\": \"\\ud800\", \"version\": 1}".into(),
    ];
    for body in bodies {
        write_manifest(path, body.as_bytes());
        let started = Instant::now();
        let error = verify(path).unwrap_err();
        assert!(matches!(error, Error::DumpMismatch { .. }), "{error:?}");
        assert!(error.to_string().len() < 4000 && started.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn absurd_names_in_a_manifest_are_names_or_refused() {
    let directory = Directory::new();
    let path = &directory.dump();
    let names = ["\0", "..", "/", "a\nb", "\u{202e}", "\u{10ffff}", "__metadata__", "", &"n".repeat(1 << 20)];
    for name in names {
        for place in ["table", "tensor", "file"] {
            dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
            forge_manifest(path, |body| match place {
                "table" => body["tables"][0]["name"] = name.into(),
                "tensor" => body["arrays"]["tensors"][0]["name"] = name.into(),
                _ => body["arrays"]["file"] = name.into(),
            });
            let error = verify(path).unwrap_err();
            assert!(matches!(error, Error::CorruptDump { .. }), "{place} {name:?}: {error:?}");
            assert!(error.to_string().len() < 4000);
        }
    }
}
