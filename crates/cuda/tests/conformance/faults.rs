//! Each call of the driver fails once. An operation must then return an error or the correct result.
//!
//! Needs the driver of `tests/faults/driver.c` in front of the real one, and a GPU that nothing else uses.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_long};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use libloading::Library;
use sok_core::contract::records::Records;
use sok_core::contract::table::{Contents, Cursor, Insertion, Table, TableConfig};
use sok_core::error::{Error, Result};
use sok_core::formula::update::UpdateScalars;
use sok_core::policy::eviction::{Eviction, Score};
use sok_cuda::gpu_table::GpuTable;

use crate::common::input::{Input, Shape};
use crate::common::large::{ADAGRAD, ADAM, plain_update};
use crate::common::strategies::plain_config;
use crate::common::subject::{OWNER, Subject, binding};
use crate::common::{bits, unwritten};
use crate::subject::{DEVICE, GpuSubject};

/// Maximum number of calls of the driver in an operation.
const MAX_CALLS: i64 = 2000;

struct FaultyDriver {
    arm: extern "C" fn(c_long),
    disarm: extern "C" fn() -> *const c_char,
}

static DRIVER: LazyLock<FaultyDriver> = LazyLock::new(|| {
    // SAFETY: The library is already loaded.
    let library = Box::leak(Box::new(unsafe { Library::new("libcuda.so") }.unwrap()));
    // SAFETY: driver.c defines a function of this type.
    let arm = unsafe { library.get(b"sok_fault_arm\0") };
    // SAFETY: driver.c defines a function of this type.
    let disarm = unsafe { library.get(b"sok_fault_disarm\0") };
    FaultyDriver {
        arm: *arm.expect("the driver of tests/faults/driver.c is in front"),
        disarm: *disarm.unwrap(),
    }
});

/// Runs `operation` while call number `call` of the driver, counted from 0, fails. Returns the name of the function that failed, if
/// there were so many calls.
fn with_fault<T>(call: i64, operation: impl FnOnce() -> Result<T>) -> (Result<T>, Option<String>) {
    (DRIVER.arm)(call);
    let result = catch_unwind(AssertUnwindSafe(operation)).unwrap_or_else(|panic| {
        // The test subject also copies to and from the device, and panics if that fails.
        let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(message.contains("`Result::unwrap()` on an `Err` value: Device("), "{message}");
        Err(Error::State(message))
    });
    let name = (DRIVER.disarm)();
    // SAFETY: The name is a static text, or null.
    let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
    (result, name)
}

/// Runs an operation on new subjects until each call of the driver has failed once. A result that is not an error must be the same
/// as without a fault.
fn fail_each_call<S, T: PartialEq + std::fmt::Debug>(
    name: &str,
    mut make: impl FnMut() -> S,
    mut operation: impl FnMut(&mut S) -> Result<T>,
) {
    let expected = operation(&mut make()).unwrap();
    let (mut errors, mut harmless) = (0, BTreeMap::<String, usize>::new());
    for call in 0..MAX_CALLS {
        let mut subject = make();
        let (result, failed) = with_fault(call, || operation(&mut subject));
        let Some(failed) = failed else {
            assert_eq!(result.unwrap(), expected);
            println!("{name}: {errors} calls are errors; harmless: {harmless:?}");
            return;
        };
        match result {
            Err(_) => errors += 1,
            Ok(got) => {
                assert_eq!(got, expected, "{name}: {failed}, call {call}, failed in silence");
                *harmless.entry(failed).or_default() += 1;
            }
        }
    }
    panic!("{name} takes more than {MAX_CALLS} calls");
}

const KEYS: u64 = 3000;

fn filled() -> GpuTable {
    let mut table = GpuTable::new(&DEVICE, plain_config("t", 3)).unwrap();
    table.set_update_rule(Some(plain_update(ADAM)), false).unwrap();
    let keys: Vec<u64> = (0..KEYS).collect();
    table.assign(&keys, &(0..3 * KEYS).map(|i| i as f32).collect::<Vec<_>>(), true).unwrap();
    table
}

fn evicting(name: &str, dim: usize, max_capacity: u64) -> TableConfig {
    let eviction = Some(Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: true });
    TableConfig { max_capacity: Some(max_capacity), eviction, ..plain_config(name, dim) }
}

/// A table that must remove rows to insert others.
fn full() -> GpuTable {
    let mut table = GpuTable::new(&DEVICE, evicting("t", 3, KEYS)).unwrap();
    let keys: Vec<u64> = (0..KEYS).collect();
    table.assign(&keys, &vec![1.0; keys.len() * 3], true).unwrap();
    table
}

fn contents(table: &dyn Table) -> Result<Vec<(u64, Vec<u32>)>> {
    let (mut records, mut cursor) = (Records::default(), Some(Cursor::default()));
    while let Some(at) = cursor {
        cursor = table.scan(at, 1000, &mut records)?;
    }
    let values = records.values.chunks(table.layout().width()).map(bits);
    let mut all: Vec<_> = records.keys.into_iter().zip(values).collect();
    all.sort_unstable();
    Ok(all)
}

#[test]
#[ignore = "needs a GPU, and a driver that fails"]
fn a_driver_that_fails_is_told_by_every_method_of_a_table() {
    let keys: Vec<u64> = (KEYS - 500..KEYS + 500).collect();
    let many: Vec<u64> = (0..20 * KEYS).collect();
    fail_each_call("len", filled, |table| table.len());
    fail_each_call("stats", filled, |table| table.stats().map(|s| (s.size, s.outcomes)));
    fail_each_call("scan", filled, |table| contents(table));
    fail_each_call("find", filled, |table| {
        let (mut rows, mut found) = (unwritten(3 * keys.len()), vec![false; keys.len()]);
        table.find(&keys, &mut rows, &mut found)?;
        Ok((bits(&rows), found))
    });
    for keys in [&keys, &many] {
        fail_each_call("find_or_insert", filled, |table| {
            let mut rows = unwritten(3 * keys.len());
            let outcomes = table.find_or_insert(keys, &mut rows)?;
            Ok((outcomes, bits(&rows), table.len()?))
        });
    }
    fail_each_call("find_or_insert in a full table", full, |table| {
        let mut rows = unwritten(3 * keys.len());
        let outcomes = table.find_or_insert(&keys, &mut rows)?;
        Ok((outcomes, bits(&rows), contents(table)?, table.take_evicted()?.keys))
    });
    fail_each_call("assign", filled, |table| {
        table.assign(&keys, &vec![5.0; 3 * keys.len()], true)?;
        contents(table)
    });
    fail_each_call("erase", filled, |table| Ok((table.erase(&keys)?, contents(table)?)));
    fail_each_call("clear", filled, |table| {
        table.clear()?;
        contents(table)
    });
    fail_each_call("update", filled, |table| {
        let scalars = UpdateScalars { learning_rate: 0.1, step: 1, factor: 1.0 };
        table.update(&keys, &vec![1.0; 3 * keys.len()], &scalars)?;
        contents(table)
    });
    fail_each_call("set_update_rule", filled, |table| {
        table.set_update_rule(Some(plain_update(ADAGRAD)), false)?;
        contents(table)
    });
    fail_each_call("replace_with", filled, |table| {
        let mut records = Records::default();
        table.scan(Cursor::default(), usize::MAX, &mut records)?;
        let mut fresh = table.fresh(table.update_rule().copied(), 0)?;
        fresh.restore(&records)?;
        table.replace_with(fresh)?;
        contents(table)
    });
}

#[test]
#[ignore = "needs a GPU, and a driver that fails"]
fn a_driver_that_fails_is_told_by_every_call_of_a_step() {
    let make = || {
        let mut subject = GpuSubject::new(&[plain_config("a", 3), plain_config("b", 64)]);
        subject.bind(binding(OWNER, plain_update(ADAM))).unwrap();
        subject.lookup(&[Input::plain(0, &[1, 2])], Insertion::AtLookup, false).unwrap();
        subject
    };
    let make_full = || {
        let mut subject = GpuSubject::new(&[evicting("a", 3, 500), evicting("b", 64, 600)]);
        subject.bind(binding(OWNER, plain_update(ADAM))).unwrap();
        let keys: Vec<u64> = (1000..1500).collect();
        let inputs = [Input::plain(0, &keys), Input::plain(1, &keys)];
        subject.lookup(&inputs, Insertion::AtLookup, false).unwrap();
        subject
    };
    let keys: Vec<u64> = (0..3000).map(|i| i * i % 701).collect();
    let bags = Shape::Fixed { num_bags: 1000, hotness: 3 };
    let inputs = [Input { shape: bags, ..Input::plain(0, &keys) }, Input::plain(1, &keys)];
    let makers: [(_, &dyn Fn() -> GpuSubject); 2] = [("step", &make), ("step of full tables", &make_full)];
    let kinds = [
        (Insertion::AtLookup, true, true),
        (Insertion::AtLookup, false, true),
        (Insertion::AtCommit, true, true),
        (Insertion::AtCommit, false, false),
    ];
    for ((what, make), (insertion, hold, is_update)) in
        makers.into_iter().flat_map(|made| kinds.map(|kind| (made, kind)))
    {
        fail_each_call(&format!("{what}, {insertion:?}, {hold}, {is_update}"), make, |subject| {
            let (lookup, rows) = subject.lookup(&inputs, insertion, true)?;
            let gradients = rows.iter().map(|rows| vec![1.0; rows.len()]).collect();
            subject.push(1, lookup, &std::sync::Arc::new(gradients), hold, &[])?;
            subject.commit(&[(1, 1.0)], is_update)?;
            subject.apply(UpdateScalars { learning_rate: 0.1, step: 1, factor: 1.0 }, is_update)?;
            let rows: Vec<_> = rows.iter().map(|rows| bits(rows)).collect();
            Ok((rows, contents(subject.table(0))?, contents(subject.table(1))?))
        });
    }
}
