//! Memory that is not there is an error, and the table is as it was: the n-th large allocation of a call fails, for every n.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::SeqCst};

use sok_core::checkpoint::{DumpOptions, LoadMode, LoadOptions, dump, load, verify};
use sok_core::contract::batch::{Bags, Combiner, Feature, Keys};
use sok_core::contract::binding::Binding;
use sok_core::contract::gradients::GradientRows;
use sok_core::contract::group::Group;
use sok_core::contract::records::Records;
use sok_core::contract::table::{
    CheckMode, Contents, Cursor, Explanation, Insertion, Missing, OutOfVocabulary, Table, TableConfig,
};
use sok_core::contract::ticket::TICKET_LEN;
use sok_core::error::{Error, Result};
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::formula::{Adam, Rule};
use sok_core::host::group::{ApplyScalars, HostGroup};
use sok_core::host::push::OutputGradients;
use sok_core::host::table::HostTable;
use sok_core::initializer::Initializer;
use sok_core::policy::admission::Admission;
use sok_core::pool::Pool;
use sok_core::row_type::RowType;

/// Smaller ones do not fail on Linux. Those of a step are larger than what it keeps for each of its parts, whatever its batch.
const LARGE: usize = 4096;
const LARGE_IN_STEP: usize = 1 << 15;

/// Allocations of so many bytes count.
static SMALLEST: AtomicUsize = AtomicUsize::new(LARGE);

/// Large allocations that still succeed; below 0: all do.
static LEFT: AtomicI64 = AtomicI64::new(-1);
static FAILED: AtomicU64 = AtomicU64::new(0);

/// Who lets allocations fail does so alone.
static ALONE: Mutex<()> = Mutex::new(());

struct Failing;

fn fails(size: usize) -> bool {
    let is_last = size >= SMALLEST.load(SeqCst) && LEFT.load(SeqCst) >= 0 && LEFT.fetch_sub(1, SeqCst) == 0;
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
        out_of_vocabulary_key: None,
        initial_capacity: 0,
        max_capacity: None,
        check_mode: CheckMode::Raise,
        eviction: None,
        time_to_live: None,
        admission: None,
        row_type: RowType::Float32,
        stochastic_rounding: false,
        trainable: true,
        optimizer: 0,
    }
}

fn contents(table: &dyn Table) -> BTreeMap<u64, Vec<u32>> {
    let (mut records, mut cursor) = (Records::default(), Some(Cursor::default()));
    while let Some(at) = cursor {
        cursor = table.scan(at, 1000, &mut records).unwrap();
    }
    let rows = records.values.chunks(table.layout().width()).map(|r| r.iter().map(|x| x.to_bits()).collect());
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
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    SMALLEST.store(LARGE, SeqCst);
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
    assert_many_failed();
    std::fs::remove_dir_all(dir).unwrap();
}

/// So many that each kind of allocation was among them.
fn assert_many_failed() {
    let failed = FAILED.load(SeqCst);
    println!("{failed} allocations failed");
    assert!(failed >= 1000, "{failed}");
}

/// A group with an optimizer, and what its steps bring.
struct Steps {
    group: HostGroup,
    pool: Pool,
    ids: Vec<u64>,
    ones: Vec<f32>,
    rows: Vec<f32>,
    weight_gradients: Vec<f32>,
}

const SCALARS: UpdateScalars = UpdateScalars { learning_rate: 0.1, step: 1, factor: 1.0 };

impl Steps {
    fn new(threads: usize, admission: Option<Admission>) -> Steps {
        let mut group = HostGroup::new(vec![TableConfig { admission, ..config("t") }]).unwrap();
        let rule = Rule::Adam(Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false });
        let update = Update { rule, weight_decay: None, clipvalue: None, clipnorm: Some(0.5) };
        group.bind(Binding::new(1, update, true)).unwrap();
        let n = 12_000;
        let ids = (0..n).map(|i| i * i % 7919).collect();
        let (ones, zeros) = (vec![1.0; 4 * n as usize], vec![0.0; 4 * n as usize]);
        let pool = Pool::new(threads).unwrap();
        Steps { group, pool, ids, ones, rows: zeros, weight_gradients: vec![0.0; n as usize] }
    }

    /// Of ids from `start` on.
    fn lookup(&mut self, start: u64, insertion: Insertion) -> Result<u64> {
        self.ids.iter_mut().for_each(|id| *id = *id % 7919 + start);
        let feature = Feature {
            name: "f",
            table: 0,
            keys: Keys::U64(&self.ids),
            bags: Bags::Each,
            combiner: Combiner::Sum,
            weights: Some(&self.ones[..self.ids.len()]),
            padding_key: None,
            id_counts: None,
            scores: None,
        };
        self.group.lookup(&[feature], insertion, true, vec![&mut self.rows], &self.pool)
    }

    fn push(&mut self, lookup: u64, ticket: &mut [f32]) -> Result<()> {
        // SAFETY: they live as long as the call, and nobody writes to them.
        let rows = vec![unsafe { GradientRows::new(self.ones.as_ptr(), self.ones.len()) }];
        let gradients = OutputGradients { rows, keep: None, check_finite: true };
        self.group.push(lookup, gradients, vec![&mut self.weight_gradients], ticket, &self.pool).map(drop)
    }

    fn commit(&mut self, ticket: &[f32], is_update: bool) -> Result<()> {
        let named = self.group.resolve(ticket)?;
        self.group.check_absent(&named)?;
        self.group.commit(&named, is_update, &self.pool).map(drop)
    }

    fn apply(&mut self, is_update: bool) -> Result<()> {
        let binding = self.group.binding().unwrap().clone();
        self.group.apply(&binding, &ApplyScalars::new(SCALARS, is_update), &self.pool)
    }
}

/// A call of a step that fails leaves rows and states; the step then goes on from its lookup.
#[test]
fn a_step_without_memory_changes_nothing_and_the_next_one_goes_on() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    SMALLEST.store(LARGE_IN_STEP, SeqCst);
    for (round, insertion) in
        [Insertion::AtLookup, Insertion::AtCommit].into_iter().cycle().take(12).enumerate()
    {
        let (mut start, is_update) = (0, round % 4 < 2);
        let frequency =
            Admission::Frequency { threshold: 3, once_per_step: false, half_life: None, memory: None };
        let admission = (round >= 8).then_some(frequency);
        for call in 0..4 {
            let mut failures = 0;
            loop {
                let mut steps = Steps::new(1 + round % 8 / 4, admission);
                start += 10_000;
                let mut ticket = vec![0.0; TICKET_LEN];
                // An earlier step, so that gradients are there to be added to.
                let lookup = steps.lookup(0, Insertion::AtLookup).unwrap();
                steps.push(lookup, &mut ticket).unwrap();
                steps.commit(&ticket, is_update).unwrap();
                steps.apply(is_update).unwrap();
                let before = contents(steps.group.table(0));
                let arm = |at: usize| LEFT.store(if at == call { failures } else { -1 }, SeqCst);
                let done = (|| {
                    arm(0);
                    let lookup = steps.lookup(start, insertion)?;
                    arm(1);
                    steps.push(lookup, &mut ticket)?;
                    arm(2);
                    steps.commit(&ticket, is_update)?;
                    arm(3);
                    steps.apply(is_update)
                })();
                LEFT.store(-1, SeqCst);
                match done {
                    Ok(()) => break,
                    Err(Error::Memory { .. }) => failures += 1,
                    Err(other) => panic!("call {call}, allocation {failures}: {other}"),
                }
                // What a lookup or a commit made before the call that failed stays, with its first value.
                let after = contents(steps.group.table(0));
                assert!(before.iter().all(|(key, record)| after.get(key) == Some(record)), "call {call}");
                let at_lookup = insertion == Insertion::AtLookup && admission.is_none();
                let makes = if at_lookup { 0 } else { 2 };
                if call <= makes {
                    let explained = |id: &u64| steps.group.table(0).explain(*id).unwrap();
                    assert!(steps.ids.iter().all(|id| explained(id) == Explanation::Absent), "call {call}");
                }
                assert_eq!(after.len() > before.len(), call > makes, "call {call}, allocation {failures}");
                let lookup = steps.lookup(start, insertion).unwrap();
                steps.push(lookup, &mut ticket).unwrap();
                steps.commit(&ticket, true).unwrap();
                steps.apply(true).unwrap();
                assert!(contents(steps.group.table(0)).len() > before.len());
            }
            println!("round {round}, call {call}: {failures} failures");
        }
    }
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
