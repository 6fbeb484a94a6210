//! Memory that is not there is an error, and the table is as it was: the n-th large allocation of a call fails, for every n.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};

use sok_core::checkpoint::{DumpOptions, LoadMode, LoadOptions, dump, load, verify};
use sok_core::error::{Error, Result};
use sok_core::host_table::HostTable;
use sok_core::initializer::Initializer;
use sok_core::table::{CheckMode, Cursor, Missing, OutOfVocabulary, Records, Table, TableConfig};

/// Smaller ones do not fail on Linux.
const LARGE: usize = 4096;

/// Large allocations that still succeed; below 0: all do.
static LEFT: AtomicI64 = AtomicI64::new(-1);
static FAILED: AtomicU64 = AtomicU64::new(0);

struct Failing;

fn fails(size: usize) -> bool {
    let is_last = size >= LARGE && LEFT.load(SeqCst) >= 0 && LEFT.fetch_sub(1, SeqCst) == 0;
    FAILED.fetch_add(u64::from(is_last), SeqCst);
    is_last
}

// SAFETY: the system's allocator, which may say no.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        if fails(layout.size()) { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        if fails(layout.size()) { std::ptr::null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: passed on.
        if fails(size) { std::ptr::null_mut() } else { unsafe { System.realloc(old, layout, size) } }
    }
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

fn config(name: &str) -> TableConfig {
    TableConfig {
        name: name.into(),
        dim: 4,
        vocabulary_size: None,
        initializer: Initializer::Uniform { minval: -1.0, maxval: 1.0 },
        seed: 7,
        missing: Missing::Initial,
        out_of_vocabulary: OutOfVocabulary::Raise,
        initial_capacity: 0,
        max_capacity: None,
        check_mode: CheckMode::Raise,
    }
}

fn contents(table: &dyn Table) -> BTreeMap<u64, Vec<u32>> {
    let (mut records, mut cursor) = (Records::default(), Some(Cursor::default()));
    while let Some(at) = cursor {
        cursor = table.scan(at, 1000, &mut records).unwrap();
    }
    let rows = records.values.chunks(table.record_width()).map(|r| r.iter().map(|x| x.to_bits()).collect());
    records.keys.into_iter().zip(rows).collect()
}

/// Lets the first large allocation of `call` fail, then the second, and so on until none is left to. Each time `check` looks on.
fn fail_each(what: &str, mut call: impl FnMut() -> Result<()>, mut check: impl FnMut()) {
    for n in 0.. {
        LEFT.store(n, SeqCst);
        let done = call();
        LEFT.store(-1, SeqCst);
        match done {
            Ok(()) => return,
            Err(Error::Memory { .. }) => check(),
            Err(other) => panic!("{what}, allocation {n}: {other}"),
        }
    }
}

/// Keys from `start` on.
fn keys(start: u64, len: u64) -> Vec<u64> {
    (start..start + len).collect()
}

#[test]
fn a_call_without_memory_changes_nothing_and_the_next_one_goes_on() {
    const N: u64 = 3000;
    let dir = std::env::temp_dir().join(format!("sok_no_memory_{}", std::process::id()));
    for round in 0..20u64 {
        let mut table = HostTable::new(config("t")).unwrap();
        let (old, new, more) = (keys(0, N), keys(N, N), keys(10 * N * (round + 1), N));
        let (mut rows, mut found) = (vec![0.0; 4 * N as usize], vec![false; N as usize]);
        let table_ref = std::cell::RefCell::new(&mut table);
        let step = |what: &str, call: &mut dyn FnMut(&mut HostTable) -> Result<()>| {
            let before = contents(&**table_ref.borrow());
            fail_each(
                what,
                || call(&mut table_ref.borrow_mut()),
                || assert_eq!(contents(&**table_ref.borrow()), before, "{what}"),
            );
        };
        step("find_or_insert", &mut |t| t.find_or_insert(&old, &mut rows).map(drop));
        step("find", &mut |t| t.find(&old, &mut rows, &mut found));
        step("assign", &mut |t| t.assign(&new, &rows, true).map(drop));
        step("grow", &mut |t| t.find_or_insert(&more, &mut rows).map(drop));
        step("dump", &mut |t| dump(&dir, &[&*t], &[], &DumpOptions::default()).map(drop));
        step("verify", &mut |_| verify(&dir));
        step("erase", &mut |t| t.erase(&new).map(drop));
        for mode in [LoadMode::Merge, LoadMode::Replace] {
            let options = LoadOptions { mode, ..LoadOptions::default() };
            step("load", &mut |t| load(&dir, &mut [("t", t as &mut dyn Table)], &options).map(drop));
        }
        step("clear", &mut |t| t.clear());
        assert!(table.is_empty().unwrap());
    }
    let failed = FAILED.load(SeqCst);
    println!("{failed} allocations failed");
    assert!(failed >= 1000, "{failed}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn rows_and_capacities_beyond_all_memory_are_refused() {
    let refused = |config| HostTable::new(config).err().expect("there is no such memory").to_string();
    let text = refused(TableConfig { dim: 1 << 40, ..config("t") });
    assert_eq!(text, "table `t`: `embedding_dim` must be between 1 and 1048576. Received: 1099511627776");
    assert!(HostTable::new(TableConfig { dim: TableConfig::MAX_DIM, ..config("t") }).is_ok());
    let most =
        TableConfig { dim: TableConfig::MAX_DIM, initial_capacity: TableConfig::MAX_ROWS, ..config("t") };
    assert!(matches!(HostTable::new(most), Err(Error::Memory { .. })));
}
