//! Damage and lies: a file that is not as it was written is named, and nothing of it is loaded.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sok_core::Error;
use sok_core::checkpoint::{
    BLOCK_BYTES, LoadOptions, MANIFEST, dump, load, read_arrays, read_manifest, verify,
};
use sok_core::contract::table::Contents;

use crate::support::*;

/// As `fs::write`, but in place: a file cut to nothing first is one that ext4 hurries to the disk.
fn overwrite(file: &Path, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(file).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

/// Damages `file` in all the ways of `damages`, and asserts that each is found and loads nothing.
fn assert_damage_is_found(path: &Path, file: &str, damages: impl Iterator<Item = Vec<u8>>) -> usize {
    let file = &path.join(file);
    let whole = fs::read(file).unwrap();
    let before = two_tables(77.0);
    let mut count = 0;
    for damaged in damages {
        overwrite(file, &damaged);
        for options in [LoadOptions::default(), merge()] {
            let mut tables = before.clone();
            let [a, b] = &mut tables;
            corrupt(load(path, &mut [("a", a), ("b", b)], &options), file);
            assert!(before.iter().zip(&tables).all(|(x, y)| x.records == y.records && x.update == y.update));
        }
        corrupt(verify(path), file);
        count += 1;
    }
    overwrite(file, &whole);
    verify(path).unwrap();
    count
}

#[test]
fn a_flipped_bit_at_any_byte_of_any_file_is_found() {
    let directory = Directory::new();
    let path = &directory.dump();
    dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
    let mut count = 0;
    for name in named_files(path) {
        let whole = fs::read(path.join(&name)).unwrap();
        let flips = (0..whole.len()).map(|i| {
            let mut damaged = whole.clone();
            damaged[i] ^= 1 << (i % 8);
            damaged
        });
        count += assert_damage_is_found(path, &name, flips);
    }
    assert!(count > 3000, "{count} bytes");
}

#[test]
fn files_that_are_shorter_or_longer_are_found() {
    let directory = Directory::new();
    let path = &directory.dump();
    dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
    for name in named_files(path) {
        let whole = fs::read(path.join(&name)).unwrap();
        let cuts = (0..whole.len()).map(|n| whole[..n].to_vec());
        let longer = [&b"\0"[..], b"\n", b" {}", &whole].map(|tail| [&whole, tail].concat());
        assert_damage_is_found(path, &name, cuts.chain(longer));
    }
}

#[test]
fn a_file_that_is_gone_is_named() {
    let directory = Directory::new();
    let path = &directory.dump();
    let manifest = dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
    let shard = path.join(&manifest.tables[1].shards[0].file);
    fs::remove_file(&shard).unwrap();
    assert!(corrupt(verify(path), &shard).contains("not there"));
    let arrays = path.join(manifest.arrays.unwrap().file);
    fs::write(&arrays, "short").unwrap();
    fs::write(&shard, "short").unwrap();
    corrupt(read_arrays(path), &arrays);
    let nowhere = directory.0.join("nowhere");
    assert!(matches!(verify(&nowhere), Err(Error::Io { path, .. }) if path == nowhere.join(MANIFEST)));
}

#[test]
fn damage_in_a_large_file_names_its_block() {
    let directory = Directory::new();
    let path = &directory.dump();
    let table = MapTable::new("t", 64, None).filled(0..40_000, 0.0);
    let manifest = dump(path, &[&table], &[], &options(1 << 30)).unwrap();
    let shard = &manifest.tables[0].shards[0];
    assert_eq!(shard.tensors[1].blocks.0.len(), 10);
    let file = path.join(&shard.file);
    let mut bytes = fs::read(&file).unwrap();
    let header = bytes.len() - 40_000 * (8 + 256);
    for at in (0..bytes.len()).step_by(99_991) {
        bytes[at] ^= 0x80;
        overwrite(&file, &bytes);
        bytes[at] ^= 0x80;
        let what = corrupt(verify(path), &file);
        let place = at.checked_sub(header).map(|at| match at.checked_sub(320_000) {
            None => "block 0 of `keys`".into(),
            Some(at) => format!("block {} of `rows`", at / BLOCK_BYTES),
        });
        assert!(what.contains(&place.unwrap_or("header".into())), "byte {at}: {what}");
    }
}

/// A manifest whose checksum fits can still lie: it must be refused, without a panic or an attempt to believe it.
#[test]
fn lies_in_a_manifest_are_found() {
    let directory = Directory::new();
    let path = &directory.dump();
    let huge = u64::MAX;
    type Change = Box<dyn Fn(&mut serde_json::Value)>;
    let shard = |change: fn(&mut serde_json::Value)| -> Change {
        Box::new(move |body| change(&mut body["tables"][0]["shards"][0]))
    };
    let lies: Vec<(&str, Change)> = vec![
        ("more rows", Box::new(|body| body["tables"][0]["num_rows"] = 16.into())),
        ("other dim", Box::new(|body| body["tables"][0]["dim"] = 4.into())),
        ("huge dim", Box::new(move |body| body["tables"][0]["dim"] = huge.into())),
        ("other width", Box::new(|body| body["tables"][0]["states"][1]["width"] = 0.into())),
        ("no states", Box::new(|body| body["tables"][0]["states"] = serde_json::json!([]))),
        ("table twice", Box::new(|body| body["tables"][1]["name"] = "a".into())),
        (
            "shard twice",
            Box::new(|body| body["tables"][0]["shards"][1] = body["tables"][0]["shards"][0].clone()),
        ),
        ("shard missing", Box::new(|body| drop(body["tables"][0]["shards"].as_array_mut().unwrap().pop()))),
        ("a file elsewhere", shard(|s| s["file"] = "../../etc/passwd".into())),
        ("the manifest as shard", shard(|s| s["file"] = MANIFEST.into())),
        ("other size", shard(|s| s["bytes"] = 1.into())),
        ("no tensors", shard(|s| s["tensors"] = serde_json::json!([]))),
        ("tensor twice", shard(|s| s["tensors"][1] = s["tensors"][0].clone())),
        ("other dtype", shard(|s| s["tensors"][1]["dtype"] = "I32".into())),
        ("no blocks", shard(|s| s["tensors"][1]["blocks"] = "".into())),
        ("one block more", shard(|s| s["tensors"][1]["blocks"] = "0".repeat(32).into())),
        (
            "huge tensor",
            Box::new(move |body| {
                for (tensor, shape) in
                    [(0, vec![huge]), (1, vec![huge, 3]), (2, vec![huge, 3]), (3, vec![huge, 3])]
                {
                    body["tables"][0]["shards"][0]["tensors"][tensor]["shape"] = shape.into();
                }
            }),
        ),
        (
            "rows as counts",
            Box::new(|body| {
                let table = &mut body["tables"][0];
                let shard = table["shards"].as_array_mut().unwrap().pop();
                table["num_rows"] = 10.into();
                table["sights"] = serde_json::json!({"step": 1, "files": [shard]});
                body["version"] = 5.into();
            }),
        ),
        ("huge array", Box::new(move |body| body["arrays"]["tensors"][0]["shape"] = vec![1u64 << 59].into())),
        (
            "array of half a byte",
            Box::new(|body| {
                body["arrays"]["tensors"][0]["dtype"] = "F4".into();
                body["arrays"]["tensors"][0]["shape"] = vec![1].into();
            }),
        ),
    ];
    for (name, lie) in lies {
        dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
        forge_manifest(path, lie);
        let what = corrupt(verify(path), &path.join(MANIFEST));
        corrupt(read_arrays(path), &path.join(MANIFEST));
        println!("{name}: {what}");
    }

    // One that only the file itself gives away.
    dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
    forge_manifest(path, |body| body["arrays"]["tensors"][0]["name"] = "sense".into());
    let file = path.join(read_manifest(path).unwrap().arrays.unwrap().file);
    assert!(corrupt(verify(path), &file).contains("header"));

    // And two that only the keys give away.
    let forged = MapTable::new("t", 1, None).filled([3, 100], 0.0);
    let manifest = dump(path, &[&forged], &[], &options(1 << 30)).unwrap();
    forge_manifest(path, |body| body["tables"][0]["vocabulary_size"] = 50.into());
    let file = path.join(&manifest.tables[0].shards[0].file);
    for options in [LoadOptions::default(), merge()] {
        let mut target = MapTable::new("t", 1, None).with_vocabulary(50);
        let what = corrupt(load_one(path, "t", &mut target, &options), &file);
        assert_eq!(what, "table `t`: keys must be below `vocabulary_size` 50: got 100");
        assert!(target.is_empty().unwrap());
    }

    let a = MapTable::new("a", 1, None).filled([1, 2], 0.0);
    let b = MapTable::new("b", 1, None).filled([1, 5], 0.0);
    dump(path, &[&a, &b], &[], &options(1 << 30)).unwrap();
    forge_manifest(path, |body| {
        let shard = body["tables"][1]["shards"][0].clone();
        body["tables"][0]["shards"].as_array_mut().unwrap().push(shard);
        body["tables"][0]["num_rows"] = 4.into();
        body["tables"].as_array_mut().unwrap().pop();
    });
    // The borrowed shard's header names table `b`.
    assert!(matches!(verify(path), Err(Error::CorruptDump { .. })));
}

#[test]
fn random_manifests_do_not_panic() {
    let directory = Directory::new();
    let path = &directory.dump();
    dump_two(&BrokenDisk::counting(), path, 1.0).unwrap();
    let whole = fs::read(path.join(MANIFEST)).unwrap();
    let body_end = whole.len() - ", \"xxh3\": \"0123456789abcdef\"}\n".len();
    let mut random = 1u64;
    for _ in 0..2000 {
        let mut body = whole["{\"body\": ".len()..body_end].to_vec();
        for _ in 0..3 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) as usize % body.len();
            body[at] = b"0123456789,:\"[]{}-e.nz "[(random >> 20) as usize % 23];
        }
        let checksum = xxhash_rust::xxh3::xxh3_64(&body);
        let bytes =
            [b"{\"body\": ", &body[..], format!(", \"xxh3\": \"{checksum:016x}\"}}\n").as_bytes()].concat();
        overwrite(&path.join(MANIFEST), &bytes);
        let _ = verify(path);
        let _ = read_arrays(path);
        let mut tables = two_tables(0.0);
        let [a, b] = &mut tables;
        let _ = load(path, &mut [("a", a), ("b", b)], &LoadOptions::default());
    }
}
