//! Operations on a group beside its model: outputs, rows and states bit for bit.

use std::sync::Arc;

use proptest::prelude::*;
use sok_core::contract::binding::UpdateMode;
use sok_core::contract::table::{Insertion, OutOfVocabulary, Outcomes, Table, TableConfig, TableStats};
use sok_core::formula::update::{Update, UpdateScalars};

use super::group::Model;
use super::input::Input;
use super::strategies::{DIMS, input, scalars, table_op, update};
use super::subject::{Kept, Maker, OWNER, Subject, binding_of, mode_of};
use super::table::TableOp;
use super::{Dice, bits};

/// What happens to a group. `usize`s choose among what is there.
#[derive(Clone, Debug)]
pub enum Op {
    Lookup { inputs: Vec<Input>, insertion: Insertion, save: bool },
    Push { lookup: usize, hold: bool, seed: u64 },
    Commit { chosen: u64, weights: [f32; 3] },
    Apply { scalars: UpdateScalars, is_update: bool },
    Bind { is_other: bool, update: Update },
    Table { number: usize, op: TableOp },
}

/// A model and the groups that are to be like it.
pub struct Bench {
    pub model: Model,
    pub subjects: Vec<Box<dyn Subject>>,
    owner: u64,
    /// The newest lookup before which rows have changed.
    last_change: u64,
    has_modes: bool,
    num_ops: usize,
}

impl Bench {
    pub fn new(configs: &[TableConfig], update: Update, maker: &Maker) -> Bench {
        let mut configs = configs.to_vec();
        if maker.tells_late {
            configs.iter_mut().for_each(|c| c.out_of_vocabulary = OutOfVocabulary::Zeros);
        }
        if !maker.dims.is_empty() && configs.iter().all(|c| DIMS.contains(&c.dim)) {
            configs.iter_mut().for_each(|c| c.dim = maker.dims[c.dim % maker.dims.len()]);
        }
        let subjects = (maker.make)(&configs);
        let mut bench = Bench {
            model: Model::new(&configs),
            subjects,
            owner: OWNER,
            last_change: 0,
            has_modes: maker.has_modes,
            num_ops: 0,
        };
        bench.bind(false, update);
        bench
    }

    pub fn run(&mut self, op: &Op) {
        match op {
            Op::Lookup { inputs, insertion, save } => self.lookup(inputs, *insertion, *save),
            Op::Push { lookup, hold, seed } => self.push(*lookup, *hold, *seed),
            Op::Commit { chosen, weights } => self.commit(*chosen, weights),
            Op::Apply { scalars, is_update } => self.apply(scalars, *is_update),
            Op::Bind { is_other, update } => self.bind(*is_other, *update),
            Op::Table { number, op } => {
                let number = number % self.model.tables.len();
                self.model.find_rows_in_progress();
                let mut tables: Vec<&mut dyn Table> =
                    self.subjects.iter_mut().map(|s| s.table_mut(number)).collect();
                op.run(&mut self.model.tables[number], &mut tables);
            }
        }
        if matches!(op, Op::Apply { .. } | Op::Table { .. }) {
            self.last_change = self.model.lookups.last().map_or(self.last_change, |looked| looked.number);
        }
        self.num_ops += 1;
        // A check lets rows take the steps that they have missed.
        if self.model.mode != UpdateMode::LazyGlobal || self.num_ops.is_multiple_of(7) {
            self.check();
        }
    }

    pub fn check(&mut self) {
        for subject in &mut self.subjects {
            for (number, model) in self.model.tables.iter().enumerate() {
                model.check(subject.table(number));
            }
            check_recent_stats(&mut **subject);
        }
    }

    fn lookup(&mut self, inputs: &[Input], insertion: Insertion, save: bool) {
        let before = counts(&self.model);
        let expected = self.model.lookup(inputs, insertion, save);
        let number = self.model.lookups.last().map_or(0, |looked| looked.number);
        let after = counts(&self.model);
        for subject in &mut self.subjects {
            let untouched = stats(&mut **subject);
            let got = subject.lookup(inputs, insertion, save);
            let name = subject.name();
            match (&expected, got) {
                (Err(expected), Err(got)) => assert_eq!(got.to_string(), expected.to_string()),
                (Ok(expected), Ok((got_number, rows))) => {
                    assert_eq!(got_number, if save { number } else { 0 });
                    for (input, (expected, got)) in inputs.iter().zip(expected.iter().zip(&rows)) {
                        let mut expected = expected.clone();
                        subject.array_type().round(&mut expected);
                        check_rows(input, &expected, got, &name);
                    }
                }
                (expected, got) => panic!("expected {:?}, got {:?}", expected.is_ok(), got.map(|_| ())),
            }
            let call = format!("lookup, {insertion:?}, {save}, {:?}", expected.as_ref().map(|_| ()));
            check_growth(&mut **subject, &untouched, grown(&before, &after), &call);
        }
    }

    fn push(&mut self, lookup: usize, hold: bool, seed: u64) {
        if self.model.lookups.is_empty() {
            return;
        }
        let lookup = lookup % self.model.lookups.len();
        let looked = &self.model.lookups[lookup];
        let dim = |input: &Input| self.model.tables[input.table].config.dim;
        let mut dice = Dice(seed);
        let floats = |i: &Input| {
            let mut floats = dice.floats(i.bags().len() * dim(i));
            self.subjects.iter().for_each(|subject| subject.array_type().round(&mut floats));
            floats
        };
        let gradients: Vec<_> = looked.inputs.iter().map(floats).collect();
        let weighted = || looked.inputs.iter().enumerate().filter(|(_, input)| input.weights.is_some());
        let ids: Vec<usize> = weighted().map(|(_, input)| input.ids.keys().len()).collect();
        let expected: Vec<_> =
            weighted().map(|(f, _)| self.model.weight_gradients(lookup, f, &gradients[f])).collect();
        let lookup_number = looked.number;
        let number = self.model.push(lookup, &gradients);
        for subject in &mut self.subjects {
            let kept: Kept = Arc::new(gradients.clone());
            let got = subject.push(number, lookup_number, &kept, hold, &ids).unwrap();
            if subject.is_sharded() && lookup_number <= self.last_change {
                continue;
            }
            for (expected, got) in expected.iter().flatten().zip(got.iter().flatten()) {
                let Some((expected, bound)) = expected else { continue };
                // Rows that are no numbers make gradients that are none.
                let is_close = !bound.is_finite() || (expected - f64::from(*got)).abs() <= *bound;
                assert!(is_close, "weight's gradient: {got} for {expected}");
            }
        }
    }

    /// Commits pushes that wait, by the bits of `chosen`.
    fn commit(&mut self, chosen: u64, weights: &[f32; 3]) {
        let is_chosen = |i: &usize| chosen >> (i % 64) & 1 == 1;
        let pending = &self.model.pushes;
        let named: Vec<(u64, f32)> =
            (0..pending.len()).filter(is_chosen).map(|i| (pending[i].number, weights[i % 3])).collect();
        let before = counts(&self.model);
        let expected = self.model.commit(&named).map_err(|e| e.to_string());
        let after = counts(&self.model);
        for subject in &mut self.subjects {
            let untouched = stats(&mut **subject);
            let got = subject.commit(&named, true).map(|_| ()).map_err(|e| e.to_string());
            assert_eq!(got, expected);
            assert_eq!(subject.pending_pushes(), self.model.pushes.len());
            check_growth(
                &mut **subject,
                &untouched,
                grown(&before, &after),
                &format!("commit, {expected:?}"),
            );
        }
    }

    fn apply(&mut self, scalars: &UpdateScalars, is_update: bool) {
        self.model.apply(scalars, is_update);
        for subject in &mut self.subjects {
            subject.apply(*scalars, is_update).unwrap();
            if subject.pending_pushes() == 0 {
                let held = subject.take_held();
                held.into_iter().for_each(|kept| assert_eq!(Arc::strong_count(&kept), 1, "it was let go"));
            }
        }
    }

    fn bind(&mut self, is_other: bool, update: Update) {
        self.owner += u64::from(is_other);
        let mode = mode_of(&update, self.has_modes);
        self.model.bind(self.owner, update, mode);
        for subject in &mut self.subjects {
            let configs = self.model.tables.iter().map(|table| &table.config);
            subject.bind(binding_of(configs, self.owner, update, mode)).unwrap();
        }
    }
}

/// Names the first bag that differs.
fn check_rows(input: &Input, expected: &[f32], got: &[f32], name: &str) {
    let (bags, keys) = (input.bags(), input.ids.keys());
    let dim = expected.len() / bags.len().max(1);
    assert_eq!(expected.len(), got.len());
    for (number, bag) in bags.into_iter().enumerate() {
        let (expected, got) = (&expected[number * dim..][..dim], &got[number * dim..][..dim]);
        assert!(
            bits(expected) == bits(got),
            "{name}, table {}, {} ids, {:?}, padding {:?}, bag {number}: keys {:?}, weights {:?}\nexpected {expected:?}\ngot {got:?}",
            input.table,
            keys.len(),
            input.combiner,
            input.padding_key,
            &keys[bag.clone()],
            input.weights.as_ref().map(|w| &w[bag]),
        );
    }
}

/// Hits, inserted and refused keys, dropped gradients and unknown ids of each table.
type Counts = Vec<[u64; 5]>;

fn counts(model: &Model) -> Counts {
    let of = |t: usize| {
        let Outcomes { hit, inserted, refused, .. } = model.outcomes[t];
        [hit, inserted, refused, model.dropped[t], model.unknown[t]]
    };
    (0..model.tables.len()).map(of).collect()
}

fn stats(subject: &mut dyn Subject) -> Counts {
    let stats = (0..subject.num_tables()).map(|t| subject.unsettled(t).stats().unwrap());
    stats.map(counts_of).collect()
}

fn counts_of(stats: TableStats) -> [u64; 5] {
    let Outcomes { hit, inserted, refused, .. } = stats.outcomes;
    [hit, inserted, refused, stats.dropped_gradients, stats.unknown_ids]
}

/// Checks by how much the counts of a subject have grown.
fn check_growth(subject: &mut dyn Subject, before: &Counts, expected: Counts, call: &str) {
    for (table, (mut got, mut expected)) in
        grown(before, &stats(subject)).into_iter().zip(expected).enumerate()
    {
        if subject.is_sharded() {
            for count in [3, 4] {
                assert!(got[count] <= expected[count] && (got[count] > 0) == (expected[count] > 0));
                (got[count], expected[count]) = (0, 0);
            }
        }
        assert_eq!(got, expected, "{call}, table {table}");
    }
}

fn grown(before: &Counts, after: &Counts) -> Counts {
    let difference = |(b, a): (&[u64; 5], &[u64; 5])| std::array::from_fn(|i| a[i] - b[i]);
    before.iter().zip(after).map(difference).collect()
}

/// Statistics that do not wait for the device may lag behind those that do, but count nothing twice.
fn check_recent_stats(subject: &mut dyn Subject) {
    for t in 0..subject.num_tables() {
        let recent = counts_of(subject.unsettled(t).recent_stats());
        let now = counts_of(subject.unsettled(t).stats().unwrap());
        assert!(recent.iter().zip(now).all(|(recent, now)| *recent <= now), "table {t}: {recent:?}, {now:?}");
    }
}

pub fn op() -> impl Strategy<Value = Op> {
    let inputs = prop::collection::vec(input(4), 1..6);
    let insertion = prop_oneof![
        5 => Just(Insertion::AtLookup),
        3 => Just(Insertion::AtCommit),
        2 => Just(Insertion::Never),
    ];
    let weights = prop::array::uniform3(prop::sample::select(vec![1.0, 0.5, -2.0, 0.3]));
    let group_op = table_op()
        .prop_filter("its own update is of model/table_model.rs", |op| !matches!(op, TableOp::Update { .. }));
    prop_oneof![
        8 => (inputs, insertion, prop::bool::weighted(0.85))
            .prop_map(|(inputs, insertion, save)| Op::Lookup { inputs, insertion, save }),
        8 => (prop_oneof![3 => Just(usize::MAX), 1 => any::<usize>()], any::<bool>(), any::<u64>())
            .prop_map(|(lookup, hold, seed)| Op::Push { lookup, hold, seed }),
        4 => (prop_oneof![2 => Just(u64::MAX), 1 => any::<u64>()], weights)
            .prop_map(|(chosen, weights)| Op::Commit { chosen, weights }),
        5 => (scalars(), prop::bool::weighted(0.8)).prop_map(|(scalars, is_update)| Op::Apply { scalars, is_update }),
        1 => (any::<bool>(), update()).prop_map(|(is_other, update)| Op::Bind { is_other, update }),
        4 => (0..4usize, group_op).prop_map(|(number, op)| Op::Table { number, op }),
    ]
}

/// `usize::MAX` means the newest lookup, and tables are counted round.
pub fn resolve(op: &Op, bench: &Bench) -> Op {
    match op.clone() {
        Op::Push { lookup: usize::MAX, hold, seed } => {
            Op::Push { lookup: bench.model.lookups.len().saturating_sub(1), hold, seed }
        }
        Op::Lookup { mut inputs, insertion, save } => {
            inputs.iter_mut().for_each(|i| i.table %= bench.model.tables.len());
            let own = |input: Input| {
                let config = &bench.model.tables[input.table].config;
                input.of_table(config)
            };
            let inputs = inputs.into_iter().map(own).collect();
            Op::Lookup { inputs, insertion, save }
        }
        op => op,
    }
}

pub fn run_all(configs: &[TableConfig], update: Update, ops: &[Op], maker: &Maker) {
    let mut bench = Bench::new(configs, update, maker);
    for op in ops {
        bench.run(&resolve(op, &bench));
    }
    bench.check();
}
