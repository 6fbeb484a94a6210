//! A fuzzer that knows what a dump looks like. It changes fields of the manifest, bytes, sizes and kinds of files, and signs what it
//! changed anew, so that a change reaches the code behind the checksums. Whatever it makes is loaded whole or refused: without a panic,
//! in bounded time, and a table is as the dump has it or as it was.
//!
//! `SOK_FUZZ_SEED` and `SOK_FUZZ_ITERATIONS` choose another run; an assertion names the seed of the one case.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sok_core::Error;
use sok_core::checkpoint::{
    DumpReader, LoadMode, LoadOptions, MANIFEST, Target, TargetBinding, read_arrays, read_manifest, verify,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::support::*;

/// Files of the corpus: a few of what earlier runs found worth keeping, as bodies of manifests.
const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/checkpoint/corpus");
const SLOWEST: Duration = Duration::from_secs(10);

struct Random(u64);

impl Random {
    /// Splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// A value that some code may trip over.
fn absurd(random: &mut Random) -> Value {
    let numbers =
        [0, 1, 2, 3, 4, 13, 15, 50, 255, 1 << 20, 1 << 31, u32::MAX.into(), 1 << 53, 1 << 63, u64::MAX];
    let texts = [
        "",
        "a",
        "b",
        "t",
        "rows",
        "keys",
        "..",
        "/",
        "\0",
        "__metadata__",
        "F32",
        "F64",
        "I64",
        "F4",
        "F8_E4M3",
        "C64",
        "BOOL",
        "adam",
        "sgd",
        "ftrl",
        "float32",
        "manifest.json",
        "sok-0123456789abcdef-00000.safetensors",
        "0000000000000000",
    ];
    match random.below(9) {
        0 => Value::Null,
        1 => json!([]),
        2 => json!({}),
        3 => json!(random.next() as i64),
        4 => json!(f64::from_bits(random.next())),
        5 => json!(-1),
        6 | 7 => json!(random.of(&numbers)),
        _ => json!(random.of(&texts)),
    }
}

/// A place in a value, chosen by walking down.
fn some_place<'a>(value: &'a mut Value, random: &mut Random) -> &'a mut Value {
    if random.below(8) == 0 {
        return value;
    }
    let size = match &*value {
        Value::Array(items) => items.len(),
        Value::Object(fields) => fields.len(),
        _ => 0,
    };
    if size == 0 {
        return value;
    }
    let at = random.below(size);
    let child = match value {
        Value::Array(items) => &mut items[at],
        Value::Object(fields) => fields.values_mut().nth(at).unwrap(),
        _ => unreachable!("it has children"),
    };
    some_place(child, random)
}

/// One change of a manifest's body.
fn change(body: &mut Value, random: &mut Random) {
    let copy = some_place(&mut body.clone(), random).clone();
    let new = absurd(random);
    let place = some_place(body, random);
    match (random.below(6), &mut *place) {
        (0, Value::Array(items)) if !items.is_empty() => drop(items.remove(0)),
        (1, Value::Array(items)) if !items.is_empty() => items.push(items[0].clone()),
        (2, Value::Array(items)) => items.reverse(),
        (3, Value::Object(fields)) => {
            let name = fields.keys().next().cloned().unwrap_or_default();
            fields.remove(&name);
        }
        (4, place) => *place = copy,
        (_, Value::Number(number)) if random.below(2) == 0 => {
            *place = json!(
                number.as_u64().unwrap_or_default().wrapping_add(random.below(5) as u64).wrapping_sub(2)
            );
        }
        (_, place) => *place = new,
    }
}

/// Changes bytes or the size of a file; its bytes' checksums in the manifest are made to fit if `signs`.
fn change_file(path: &Path, body: &mut Value, random: &mut Random, signs: bool) {
    let Some((entry, file)) = some_file(path, body, random) else { return };
    let is_small = fs::symlink_metadata(&file).is_ok_and(|m| m.is_file() && m.len() < 1 << 20);
    let Some(mut bytes) = is_small.then(|| fs::read(&file).unwrap()) else { return };
    match random.below(4) {
        0 => bytes.truncate(random.below(bytes.len() + 1)),
        1 => bytes.extend(vec![0; random.below(100)]),
        _ => {
            for _ in 0..=random.below(8) {
                let at = random.below(bytes.len());
                bytes
                    .get_mut(at)
                    .into_iter()
                    .for_each(|byte| *byte = *random.of(&[0, 1, 0x7f, 0x80, 0xc0, 0xff]));
            }
        }
    }
    fs::write(&file, &bytes).unwrap();
    if signs {
        sign(entry, &bytes);
    }
}

/// The entry and the path of one of the files that a body names.
fn some_file<'a>(
    path: &Path,
    body: &'a mut Value,
    random: &mut Random,
) -> Option<(&'a mut Value, std::path::PathBuf)> {
    let is_arrays = random.below(3) == 0;
    let entry = if is_arrays {
        body.get_mut("arrays")?
    } else {
        let shards = body.get_mut("tables")?.get_mut(random.below(2))?.get_mut("shards")?.as_array_mut()?;
        let at = random.below(shards.len());
        shards.get_mut(at)?
    };
    let name =
        entry.get("file")?.as_str().filter(|name| name.starts_with("sok-") && !name.contains(['/', '\0']))?;
    let file = path.join(name);
    Some((entry, file))
}

/// Makes an entry's checksums those of the file's bytes, by the header that the file itself has.
fn sign(entry: &mut Value, bytes: &[u8]) -> Option<()> {
    let length = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?) as usize;
    let first = length.checked_add(8)?;
    *entry.get_mut("header")? = json!(format!("{:016x}", xxh3_64(bytes.get(..first)?)));
    *entry.get_mut("bytes")? = json!(bytes.len());
    let mut start = first;
    for tensor in entry.get_mut("tensors")?.as_array_mut()? {
        let shape = tensor.get("shape")?.as_array()?.iter().map(|n| n.as_u64().unwrap_or(0));
        let width = if tensor.get("dtype")?.as_str()? == "I64" { 8 } else { 4 };
        let end = start.checked_add(shape.product::<u64>().checked_mul(width)? as usize)?;
        let blocks = bytes.get(start..end)?.chunks(1 << 20).map(|block| format!("{:016x}", xxh3_64(block)));
        *tensor.get_mut("blocks")? = json!(blocks.collect::<String>());
        start = end;
    }
    Some(())
}

/// Another kind of file, or none.
fn change_kind(path: &Path, body: &mut Value, random: &mut Random) {
    let Some((_, file)) = some_file(path, body, random) else { return };
    if fs::remove_file(&file).is_err() {
        return;
    }
    match random.below(4) {
        0 => std::os::unix::fs::symlink("/dev/zero", &file).unwrap(),
        1 => fs::create_dir(&file).unwrap(),
        2 => fs::File::create(&file).unwrap().set_len(1 << (10 + random.below(32))).unwrap(),
        _ => {}
    }
}

fn write_body(path: &Path, body: &str) {
    let signed = format!("{{\"body\": {body}, \"xxh3\": \"{:016x}\"}}\n", xxh3_64(body.as_bytes()));
    fs::write(path.join(MANIFEST), signed).unwrap();
}

/// All ways to read it: each gives what it promises, or an error of the right class.
fn read_all_ways(path: &Path, random: &mut Random) {
    let of_our_class = |error: Error| match error {
        Error::CorruptDump { .. } | Error::DumpMismatch { .. } | Error::TableFull { .. } => {
            assert!(error.to_string().len() < 5000);
        }
        error => panic!("of another class: {error:?}"),
    };
    let _ = read_manifest(path).map_err(of_our_class);
    let _ = verify(path).map_err(of_our_class);
    let _ = read_arrays(path).map_err(of_our_class);
    let mode = *random.of(&[LoadMode::Replace, LoadMode::Merge]);
    let binding = *random.of(&[TargetBinding::Free(None), TargetBinding::Free(adam()), TargetBinding::Bound]);
    let mut tables = two_tables(3.0);
    if random.below(4) == 0 {
        tables = tables.map(|t| t.with_vocabulary(50));
        tables.iter_mut().for_each(|t| t.records.retain(|key, _| *key < 50));
    }
    let before = tables.clone();
    let [a, b] = &mut tables;
    let mut targets = [
        Target { name: "a", table: a, binding, owners: None },
        Target { name: "b", table: b, binding: TargetBinding::Bound, owners: None },
    ];
    let options = LoadOptions { mode, states: random.below(4) > 0 };
    let result = DumpReader::open(path).and_then(|dump| dump.load(&mut targets, &options, None));
    match result {
        Ok(report) => {
            let rows = [tables[0].records.len(), tables[1].records.len()];
            let loaded = report.tables.iter().map(|t| t.num_rows as usize);
            assert!(loaded.zip(rows).all(|(n, rows)| if mode == LoadMode::Merge {
                n <= rows
            } else {
                n == rows
            }));
        }
        Err(error) => {
            of_our_class(error);
            assert!(before.iter().zip(&tables).all(|(x, y)| bits(x) == bits(y) && x.update == y.update));
        }
    }
}

fn bits(table: &MapTable) -> Vec<(u64, Vec<u32>)> {
    table.records.iter().map(|(k, r)| (*k, r.iter().map(|v| v.to_bits()).collect())).collect()
}

/// The names in a body of the corpus are `@0`, `@1`, ...: those of the dump at hand take their place.
fn body_of(corpus: &[String], names: &[String], whole: &Value, random: &mut Random) -> Value {
    if corpus.is_empty() || random.below(4) > 0 {
        return whole.clone();
    }
    let named = |text: String, (n, name): (usize, &String)| {
        text.replace(&format!("\"@{n}\""), &format!("\"{name}\""))
    };
    let text = names.iter().enumerate().fold(random.of(corpus).clone(), named);
    serde_json::from_str(&text).unwrap_or_else(|_| whole.clone())
}

fn corpus() -> Vec<String> {
    let mut files: Vec<_> = fs::read_dir(CORPUS).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

fn fuzz(seed: u64, iterations: u64) {
    let corpus = corpus();
    assert!(!corpus.is_empty());
    for case in 0..iterations {
        let mut random = Random(seed.wrapping_add(case));
        let directory = Directory::new();
        let path = &directory.dump();
        dump_two(&BrokenDisk::counting(), path, 2.0).unwrap();
        let text = fs::read_to_string(path.join(MANIFEST)).unwrap();
        let whole: Value = serde_json::from_str(&text).unwrap();
        let names: Vec<_> = named_files(path).into_iter().filter(|name| name != MANIFEST).collect();
        let mut body = body_of(&corpus, &names, &whole["body"], &mut random);
        for _ in 0..=random.below(3) {
            match random.below(8) {
                0 | 1 => change_file(path, &mut body, &mut random, true),
                2 => change_file(path, &mut body, &mut random, false),
                3 => change_kind(path, &mut body, &mut random),
                _ => change(&mut body, &mut random),
            }
        }
        write_body(path, &body.to_string());
        let started = Instant::now();
        let done = std::panic::catch_unwind(|| read_all_ways(path, &mut Random(seed ^ case)));
        let kept = std::env::temp_dir().join(format!("sok-fuzz-{}.json", seed.wrapping_add(case)));
        if done.is_err() || started.elapsed() > SLOWEST {
            fs::write(&kept, body.to_string()).unwrap();
            panic!(
                "SOK_FUZZ_SEED={} SOK_FUZZ_ITERATIONS=1; its manifest is {}",
                seed.wrapping_add(case),
                kept.display()
            );
        }
    }
}

fn of_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

#[test]
fn changed_dumps_are_whole_or_refused() {
    fuzz(of_environment("SOK_FUZZ_SEED", 1), of_environment("SOK_FUZZ_ITERATIONS", 600));
}

#[test]
#[ignore = "an hour"]
fn soak_changed_dumps_are_whole_or_refused() {
    let started = Instant::now();
    let mut seed = of_environment("SOK_FUZZ_SEED", 1 << 32);
    let seconds = of_environment("SOK_FUZZ_SECONDS", 3600);
    let first = seed;
    while started.elapsed() < Duration::from_secs(seconds) {
        fuzz(seed, 1000);
        seed += 1000;
        println!("{} dumps", seed - first);
    }
}
