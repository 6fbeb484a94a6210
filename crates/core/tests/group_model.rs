//! A group of tables beside its model: outputs, rows and states bit for bit, with one thread and with many.

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use common::group::{Ids, Input, KeyType, Model, Shape};
use common::strategies::{DIMS, WEIGHTS, config, input, plain_config, rules, scalars, table_op, update};
use common::table::TableOp;
use common::{Dice, bits, scan, unwritten};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use sok_core::batch::Combiner;
use sok_core::error::{Error, Result};
use sok_core::host_group::{ApplyScalars, Binding, HostGroup};
use sok_core::key::Key;
use sok_core::optimizer::{Rule, Update, UpdateScalars, clipnorm_factor};
use sok_core::pool::Pool;
use sok_core::push::{GradientRows, Keep, OutputGradients};
use sok_core::table::{CheckMode, Missing, OutOfVocabulary, Outcomes, Table, TableConfig};
use sok_core::ticket::{Named, TICKET_LEN};

static POOLS: LazyLock<[Pool; 4]> = LazyLock::new(|| [1, 2, 3, 7].map(|threads| Pool::new(threads).unwrap()));

/// Gradients of a push, kept alive by whoever holds the `Arc`.
type Kept = Arc<Vec<Vec<f32>>>;

/// A group, and the threads it is to use.
struct Subject {
    group: HostGroup,
    pool: &'static Pool,
    /// By number of the push.
    tickets: BTreeMap<u64, Vec<f32>>,
    held: Vec<Kept>,
}

impl Subject {
    fn new(configs: &[TableConfig], pool: &'static Pool) -> Subject {
        let group = HostGroup::new(configs.to_vec()).unwrap();
        Subject { group, pool, tickets: BTreeMap::new(), held: Vec::new() }
    }

    fn lookup(&mut self, inputs: &[Input], insert: bool, save: bool) -> Result<(u64, Vec<Vec<f32>>)> {
        let dim = |table: usize| self.group.table(table).config().dim;
        let mut outputs: Vec<Vec<f32>> =
            inputs.iter().map(|i| unwritten(i.bags().len() * dim(i.table))).collect();
        let features: Vec<_> = inputs.iter().map(Input::feature).collect();
        let room = outputs.iter_mut().map(|o| &mut o[..]).collect();
        let number = self.group.lookup(&features, insert, save, room, self.pool)?;
        Ok((number, outputs))
    }

    /// Gives the gradients of weights, of each feature that has them.
    fn push(
        &mut self,
        number: u64,
        lookup: u64,
        gradients: &Kept,
        hold: bool,
        ids: &[usize],
    ) -> Result<Vec<Vec<f32>>> {
        let mut weights: Vec<Vec<f32>> = ids.iter().map(|n| unwritten(*n)).collect();
        let mut ticket = unwritten(TICKET_LEN);
        let room = weights.iter_mut().map(|w| &mut w[..]).collect();
        let keep = hold.then(|| Box::new(gradients.clone()) as Keep);
        let output = OutputGradients { rows: lend(gradients), keep, check_finite: true };
        self.group.push(lookup, output, room, &mut ticket, self.pool)?;
        self.tickets.insert(number, ticket);
        if hold {
            self.held.push(gradients.clone());
        }
        Ok(weights)
    }

    fn ticket(&self, named: &[(u64, f32)]) -> Vec<f32> {
        let mut sum = vec![0.0; TICKET_LEN];
        for (number, weight) in named {
            sum.iter_mut().zip(&self.tickets[number]).for_each(|(s, t)| *s += weight * t);
        }
        sum
    }

    fn commit(&mut self, named: &[(u64, f32)], is_update: bool) -> Result<f64> {
        let resolved = self.group.resolve(&self.ticket(named))?;
        let expected: Vec<_> = named.iter().map(|&(number, weight)| Named { number, weight }).collect();
        assert_eq!(resolved, expected);
        self.group.commit(&resolved, is_update, self.pool)
    }

    fn apply(&mut self, update: UpdateScalars, is_update: bool) -> Result<()> {
        let binding = *self.group.binding().unwrap();
        self.group.apply(&binding, &ApplyScalars { update, is_update }, self.pool)
    }

    fn tables(&mut self) -> Vec<&mut dyn Table> {
        self.group.tables_mut().collect()
    }
}

const OWNER: u64 = 1;

fn lend(gradients: &Kept) -> Vec<GradientRows> {
    // SAFETY: nobody writes to them; they live until the call returns, or as the `Keep` that `push` makes of them.
    gradients.iter().map(|g| unsafe { GradientRows::new(g.as_ptr(), g.len()) }).collect()
}

fn binding(owner: u64, update: Update) -> Binding {
    Binding { owner, update, needs_norm: update.clipnorm.is_some() }
}

/// What happens to a group. `usize`s choose among what is there.
#[derive(Clone, Debug)]
enum Op {
    Lookup { inputs: Vec<Input>, insert: bool, save: bool },
    Push { lookup: usize, hold: bool, seed: u64 },
    Commit { chosen: u64, weights: [f32; 3] },
    Apply { scalars: UpdateScalars, is_update: bool },
    Bind { is_other: bool, update: Update },
    Table { number: usize, op: TableOp },
}

/// A model and the groups that are to be like it, one a pool.
struct Bench {
    model: Model,
    subjects: Vec<Subject>,
    owner: u64,
}

impl Bench {
    fn new(configs: &[TableConfig], update: Update, pools: &'static [Pool]) -> Bench {
        let subjects = pools.iter().map(|pool| Subject::new(configs, pool)).collect();
        let mut bench = Bench { model: Model::new(configs), subjects, owner: OWNER };
        bench.bind(false, update);
        bench
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Lookup { inputs, insert, save } => self.lookup(inputs, *insert, *save),
            Op::Push { lookup, hold, seed } => self.push(*lookup, *hold, *seed),
            Op::Commit { chosen, weights } => self.commit(*chosen, weights),
            Op::Apply { scalars, is_update } => self.apply(scalars, *is_update),
            Op::Bind { is_other, update } => self.bind(*is_other, *update),
            Op::Table { number, op } => {
                let number = number % self.model.tables.len();
                let mut tables: Vec<&mut dyn Table> =
                    self.subjects.iter_mut().map(|s| s.group.table_mut(number)).collect();
                op.run(&mut self.model.tables[number], &mut tables);
            }
        }
        self.check();
    }

    fn check(&mut self) {
        for subject in &mut self.subjects {
            for (model, table) in self.model.tables.iter().zip(subject.tables()) {
                model.check(table);
            }
        }
    }

    fn lookup(&mut self, inputs: &[Input], insert: bool, save: bool) {
        let before = counts(&self.model);
        let expected = self.model.lookup(inputs, insert, save);
        let number = self.model.lookups.last().map_or(0, |looked| looked.number);
        let after = counts(&self.model);
        for subject in &mut self.subjects {
            let untouched = stats(subject);
            let got = subject.lookup(inputs, insert, save);
            let threads = subject.pool.threads();
            match (&expected, got) {
                (Err(expected), Err(got)) => assert_eq!(got.to_string(), expected.to_string()),
                (Ok(expected), Ok((got_number, rows))) => {
                    assert_eq!(got_number, if save { number } else { 0 });
                    for (input, (expected, got)) in inputs.iter().zip(expected.iter().zip(&rows)) {
                        check_rows(input, expected, got, threads);
                    }
                }
                (expected, got) => panic!("expected {:?}, got {:?}", expected.is_ok(), got.map(|_| ())),
            }
            assert_eq!(grown(&untouched, &stats(subject)), grown(&before, &after));
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
        let gradients: Vec<_> = looked.inputs.iter().map(|i| dice.floats(i.bags().len() * dim(i))).collect();
        let weighted = || looked.inputs.iter().enumerate().filter(|(_, input)| input.weights.is_some());
        let ids: Vec<usize> = weighted().map(|(_, input)| input.ids.keys().len()).collect();
        let expected: Vec<_> =
            weighted().map(|(f, _)| self.model.weight_gradients(lookup, f, &gradients[f])).collect();
        let lookup_number = looked.number;
        let number = self.model.push(lookup, &gradients);
        for subject in &mut self.subjects {
            let kept: Kept = Arc::new(gradients.clone());
            let got = subject.push(number, lookup_number, &kept, hold, &ids).unwrap();
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
        self.model.commit(&named);
        for subject in &mut self.subjects {
            subject.commit(&named, true).unwrap();
            assert_eq!(subject.group.pending_pushes(), self.model.pushes.len());
        }
    }

    fn apply(&mut self, scalars: &UpdateScalars, is_update: bool) {
        self.model.apply(scalars, is_update);
        for subject in &mut self.subjects {
            subject.apply(*scalars, is_update).unwrap();
            if subject.group.pending_pushes() == 0 {
                subject
                    .held
                    .drain(..)
                    .for_each(|kept| assert_eq!(Arc::strong_count(&kept), 1, "it was let go"));
            }
        }
    }

    fn bind(&mut self, is_other: bool, update: Update) {
        self.owner += u64::from(is_other);
        self.model.bind(self.owner, update);
        for subject in &mut self.subjects {
            subject.group.bind(binding(self.owner, update)).unwrap();
        }
    }
}

/// Names the first bag that differs.
fn check_rows(input: &Input, expected: &[f32], got: &[f32], threads: usize) {
    let (bags, keys) = (input.bags(), input.ids.keys());
    let dim = expected.len() / bags.len().max(1);
    assert_eq!(expected.len(), got.len());
    for (number, bag) in bags.into_iter().enumerate() {
        let (expected, got) = (&expected[number * dim..][..dim], &got[number * dim..][..dim]);
        assert!(
            bits(expected) == bits(got),
            "{threads} threads, table {}, {} ids, {:?}, padding {:?}, bag {number}: keys {:?}, weights {:?}\nexpected {expected:?}\ngot {got:?}",
            input.table,
            keys.len(),
            input.combiner,
            input.padding_key,
            &keys[bag.clone()],
            input.weights.as_ref().map(|w| &w[bag]),
        );
    }
}

/// Outcomes and dropped gradients of each table.
type Counts = Vec<(Outcomes, u64)>;

fn counts(model: &Model) -> Counts {
    model.outcomes.iter().copied().zip(model.dropped.iter().copied()).collect()
}

fn stats(subject: &Subject) -> Counts {
    let stats = (0..subject.group.num_tables()).map(|t| subject.group.table(t).stats());
    stats.map(|s| (s.outcomes, s.dropped_gradients)).collect()
}

fn grown(before: &Counts, after: &Counts) -> Vec<[u64; 4]> {
    let of = |(o, dropped): &(Outcomes, u64)| [o.hit, o.inserted, o.refused, *dropped];
    let difference = |(b, a): (&_, &_)| std::array::from_fn(|i| of(a)[i] - of(b)[i]);
    before.iter().zip(after).map(difference).collect()
}

fn op() -> impl Strategy<Value = Op> {
    let inputs = prop::collection::vec(input(4), 1..6);
    let weights = prop::array::uniform3(prop::sample::select(vec![1.0, 0.5, -2.0, 0.3]));
    let group_op = table_op()
        .prop_filter("its own update is of table_model.rs", |op| !matches!(op, TableOp::Update { .. }));
    prop_oneof![
        8 => (inputs, prop::bool::weighted(0.7), prop::bool::weighted(0.85))
            .prop_map(|(inputs, insert, save)| Op::Lookup { inputs, insert, save }),
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
fn resolve(op: &Op, bench: &Bench) -> Op {
    match op.clone() {
        Op::Push { lookup: usize::MAX, hold, seed } => {
            Op::Push { lookup: bench.model.lookups.len().saturating_sub(1), hold, seed }
        }
        Op::Lookup { mut inputs, insert, save } => {
            inputs.iter_mut().for_each(|i| i.table %= bench.model.tables.len());
            Op::Lookup { inputs, insert, save }
        }
        op => op,
    }
}

fn run_all(configs: &[TableConfig], update: Update, ops: &[Op], pools: &'static [Pool]) {
    let mut bench = Bench::new(configs, update, pools);
    for op in ops {
        bench.run(&resolve(op, &bench));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_list_of_steps_leaves_a_group_as_its_model(
        configs in prop::collection::vec(config(), 1..5),
        update in update(),
        ops in prop::collection::vec(op(), 1..30),
    ) {
        run_all(&configs, update, &ops, &POOLS[2..3]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        max_shrink_iters: 64,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn calls_that_go_to_threads_give_the_same_bits_with_any_number_of_them(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let configs: Vec<TableConfig> = (0..1 + dice.below(4)).map(|_| large_config(&mut dice)).collect();
        let update = any_update(&mut dice);
        let ops = large_ops(&mut dice, configs.len());
        run_all(&configs, update, &ops, &POOLS[..]);
    }
}

fn large_config(dice: &mut Dice) -> TableConfig {
    TableConfig {
        vocabulary_size: dice.pick(&[None, None, None, Some(700)]),
        out_of_vocabulary: OutOfVocabulary::Zeros,
        missing: dice.pick(&[Missing::Initial, Missing::Zeros]),
        max_capacity: dice.pick(&[None, None, Some(500)]),
        check_mode: CheckMode::Count,
        ..plain_config("large", dice.pick(&DIMS))
    }
}

fn any_update(dice: &mut Dice) -> Update {
    let (weight_decay, clipvalue) = (dice.pick(&[None, Some(0.1)]), dice.pick(&[None, Some(0.5)]));
    Update { rule: dice.pick(&rules()), weight_decay, clipvalue, clipnorm: None }
}

/// Ids of which some come thousands of times.
fn skewed_keys(dice: &mut Dice, len: usize, range: u64) -> Vec<Key> {
    let spread =
        |dice: &mut Dice| ((dice.float().abs().powi(5) * range as f32) as u64) << dice.pick(&[0, 0, 0, 32]);
    (0..len).map(|_| spread(dice)).collect()
}

fn ragged(dice: &mut Dice, len: usize) -> Shape {
    let mut splits: Vec<i64> = (0..len / 3).map(|_| dice.below(len as u64 + 1) as i64).collect();
    splits.extend([0, len as i64]);
    splits.sort_unstable();
    if dice.below(2) == 0 {
        Shape::RaggedI64(splits)
    } else {
        Shape::RaggedI32(splits.iter().map(|s| *s as i32).collect())
    }
}

fn large_input(dice: &mut Dice, table: usize) -> Input {
    let len = dice.below(4000) as usize;
    let hotness = 1 + dice.below(4) as usize;
    let (num_bags, mut len) = (len / hotness, len);
    let shape = match dice.below(3) {
        0 => Shape::Each,
        1 => {
            len = num_bags * hotness;
            Shape::Fixed { num_bags, hotness }
        }
        _ => ragged(dice, len),
    };
    let range = dice.pick(&[10, 1000, 100_000]);
    let kind = dice.pick(&[KeyType::I64, KeyType::U64, KeyType::I32, KeyType::U32, KeyType::Words]);
    let ids = Ids::new(kind, &skewed_keys(dice, len, range));
    let weights = (dice.below(3) == 0).then(|| (0..len).map(|_| dice.pick(&WEIGHTS)).collect());
    let combiner = dice.pick(&[Combiner::Sum, Combiner::Mean, Combiner::Sqrtn]);
    let padding_key = dice.pick(&[None, None, Some(0), Some(3)]);
    Input { name: format!("f{table}"), table, ids, shape, combiner, weights, padding_key }
}

/// Steps with some erasing between them.
fn large_ops(dice: &mut Dice, num_tables: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    for _ in 0..4 {
        let inputs = (0..1 + dice.below(4)).map(|_| dice.below(num_tables as u64) as usize);
        let inputs: Vec<usize> = inputs.collect();
        let inputs = inputs.into_iter().map(|table| large_input(dice, table)).collect();
        let scalars =
            UpdateScalars { learning_rate: 0.1, step: 1 + dice.below(3), factor: dice.pick(&[1.0, 0.5]) };
        ops.push(Op::Lookup { inputs, insert: dice.below(4) > 0, save: true });
        ops.push(Op::Push { lookup: usize::MAX, hold: dice.below(2) == 0, seed: dice.next() });
        if dice.below(3) == 0 {
            ops.push(Op::Push { lookup: usize::MAX, hold: dice.below(2) == 0, seed: dice.next() });
        }
        if dice.below(2) == 0 {
            let keys = skewed_keys(dice, 50, 1000);
            ops.push(Op::Table { number: dice.below(4) as usize, op: TableOp::Erase(keys) });
        }
        ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0, 0.5, 2.0] });
        ops.push(Op::Apply { scalars, is_update: dice.below(4) > 0 });
    }
    ops
}

/// Features of three tables; the first two are most of the call, with hot keys, and their output is larger than the cache.
fn huge_inputs(dice: &mut Dice) -> Vec<Input> {
    let shapes = [
        Shape::Each,
        Shape::Fixed { num_bags: 5000, hotness: 3 },
        ragged(dice, 12_000),
        Shape::Fixed { num_bags: 0, hotness: 5 },
        Shape::Each,
    ];
    let parts = [(0, 30_000), (0, 15_000), (0, 12_000), (1, 0), (1, 2500)];
    let input = |((table, len), shape): ((usize, usize), &Shape)| {
        let keys = skewed_keys(dice, len, 40_000);
        Input { shape: shape.clone(), combiner: Combiner::Mean, ..Input::plain(table, &keys) }
    };
    parts.into_iter().zip(&shapes).map(input).collect()
}

fn large_steps(inputs: impl Fn(&mut Dice) -> Vec<Input>) -> Vec<Op> {
    let mut dice = Dice(5);
    let mut ops = Vec::new();
    for step in 1..3 {
        ops.push(Op::Lookup { inputs: inputs(&mut dice), insert: true, save: true });
        ops.push(Op::Push { lookup: usize::MAX, hold: step == 1, seed: dice.next() });
        ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0; 3] });
        let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
        ops.push(Op::Apply { scalars, is_update: true });
        ops.push(Op::Table { number: 0, op: TableOp::Erase((0..20_000).step_by(3).collect()) });
    }
    ops
}

fn plain_update(rule: Rule) -> Update {
    Update { rule, weight_decay: None, clipvalue: None, clipnorm: None }
}

#[test]
fn a_call_of_sixty_thousand_ids_follows_the_model_with_any_number_of_threads() {
    let configs = [plain_config("hot", 32), plain_config("cold", 17)];
    run_all(&configs, plain_update(rules()[3]), &large_steps(huge_inputs), &POOLS[..]);
}

#[test]
fn weights_and_padding_in_a_large_call_follow_the_model() {
    let weighted = |dice: &mut Dice| {
        let mut inputs = huge_inputs(dice);
        for input in &mut inputs {
            input.weights = Some((0..input.ids.keys().len()).map(|_| dice.pick(&WEIGHTS)).collect());
            input.padding_key = Some(1);
        }
        inputs
    };
    let configs = [plain_config("hot", 16), plain_config("cold", 3)];
    run_all(&configs, plain_update(rules()[5]), &large_steps(weighted), &POOLS[..]);
}

#[test]
fn a_key_that_is_all_of_a_large_call_is_summed_in_runs_of_64() {
    let one = |_: &mut Dice| vec![Input::plain(0, &[9; 30_001]), Input::plain(0, &[9; 1001])];
    run_all(&[plain_config("t", 8)], plain_update(rules()[0]), &large_steps(one), &POOLS[..]);
}

#[test]
fn bags_of_no_ids_are_zeros() {
    let shapes = [Shape::Fixed { num_bags: 3, hotness: 0 }, Shape::RaggedI32(vec![0, 0, 0]), Shape::Each];
    for combiner in [Combiner::Sum, Combiner::Mean, Combiner::Sqrtn] {
        let inputs = shapes.clone().map(|shape| Input { shape, combiner, ..Input::plain(0, &[]) });
        let ops = [Op::Lookup { inputs: inputs.to_vec(), insert: true, save: true }];
        run_all(&[plain_config("t", 16)], plain_update(rules()[0]), &ops, &POOLS[..1]);
    }
}

// ---- capacity, vocabulary, missing

/// A bound group of the tables, and what is in them.
fn group(configs: &[TableConfig]) -> Subject {
    let mut subject = Subject::new(configs, &POOLS[0]);
    subject.group.bind(binding(OWNER, plain_update(rules()[0]))).unwrap();
    subject
}

fn contents(subject: &mut Subject) -> Vec<BTreeMap<Key, Vec<u32>>> {
    subject.tables().iter().map(|table| scan(*table, 10)).collect()
}

/// The error of a training lookup, which changed nothing.
fn refused(subject: &mut Subject, inputs: &[Input]) -> Error {
    let before = contents(subject);
    let error = subject.lookup(inputs, true, true).map(|_| ()).expect_err("it is refused");
    assert_eq!(contents(subject), before);
    error
}

fn limited(check_mode: CheckMode) -> Subject {
    let small = TableConfig { max_capacity: Some(3), check_mode, ..plain_config("small", 2) };
    let mut subject = group(&[plain_config("large", 2), small]);
    subject.lookup(&[Input::plain(1, &[10, 11])], true, true).unwrap();
    subject
}

const NEW_KEYS: [Key; 6] = [5, 10, 4, 5, 3, 3];

#[test]
fn a_batch_that_does_not_fit_raises_and_changes_no_table() {
    let mut subject = limited(CheckMode::Raise);
    let inputs = [Input::plain(0, &[1, 2]), Input::plain(1, &NEW_KEYS)];
    let error = refused(&mut subject, &inputs);
    assert!(matches!(&error, Error::TableFull { refused: 2, len: 2, capacity: 3, .. }));
    assert_eq!(
        error.to_string(),
        "table `small` is full: no room for 2 of the new keys, it holds 2 of at most 3 rows. Raise `max_capacity`, or set \
         `check_mode=\"warn\"` or \"count\" to go on without them"
    );
    subject.lookup(&[Input::plain(1, &[10, 5, 5])], true, true).unwrap();
}

#[test]
fn what_fits_goes_in_by_first_occurrence_and_the_rest_is_counted() {
    for (mode, warnings) in [(CheckMode::Warn, vec![("small".to_string(), 2)]), (CheckMode::Count, vec![])] {
        let mut subject = limited(mode);
        // The second feature's keys come after the first one's.
        subject
            .lookup(&[Input::plain(1, &NEW_KEYS[..3]), Input::plain(1, &NEW_KEYS[3..])], true, true)
            .unwrap();
        let keys: Vec<Key> = contents(&mut subject)[1].keys().copied().collect();
        assert_eq!(keys, [5, 10, 11]);
        let expected = Outcomes { hit: 1, inserted: 3, refused: 2, ..Outcomes::default() };
        assert_eq!(subject.group.table(1).stats().outcomes, expected);
        assert_eq!(subject.group.table(1).stats().dropped_gradients, 3);
        assert_eq!(subject.group.take_refused(), warnings);
        assert_eq!(subject.group.take_refused(), []);
    }
}

#[test]
fn ids_outside_a_static_table_raise_and_change_nothing_or_are_zeros_that_nobody_keeps() {
    let fixed = |out_of_vocabulary| TableConfig {
        vocabulary_size: Some(10),
        out_of_vocabulary,
        ..plain_config("fixed", 2)
    };
    let inputs = [Input::plain(0, &[1]), Input::plain(1, &[2, 9, 10]), Input::plain(1, &[-3i64 as u64])];
    let mut subject = group(&[plain_config("other", 2), fixed(OutOfVocabulary::Raise)]);
    assert_eq!(
        refused(&mut subject, &inputs).to_string(),
        "id 10 of feature `f1` is outside table `fixed`, whose ids are 0 to 9 (`vocabulary_size=10`). Set \
         `out_of_vocabulary=\"zeros\"` to answer such ids with zeros, or leave `vocabulary_size` away for a dynamic table"
    );
    assert!(matches!(refused(&mut subject, &inputs[2..]), Error::OutOfVocabulary { id: -3, last: 9, .. }));

    let mut subject = group(&[plain_config("other", 2), fixed(OutOfVocabulary::Zeros)]);
    let (_, rows) = subject.lookup(&inputs, true, true).unwrap();
    assert_eq!((&rows[1][4..], &rows[2][..]), (&[0.0, 0.0][..], &[0.0, 0.0][..]));
    assert_eq!(contents(&mut subject)[1].keys().copied().collect::<Vec<_>>(), [2, 9]);
}

#[test]
fn a_key_without_a_row_answers_as_missing_says_and_is_never_stored() {
    for missing in [Missing::Initial, Missing::Zeros] {
        let mut subject = group(&[TableConfig { missing, ..plain_config("t", 4) }]);
        let evaluated = subject.lookup(&[Input::plain(0, &[8])], false, true).unwrap().1;
        assert_eq!(contents(&mut subject)[0].len(), 0);
        let inserted = subject.lookup(&[Input::plain(0, &[8])], true, true).unwrap().1;
        assert_eq!(evaluated == inserted, missing == Missing::Initial);
        assert!(missing == Missing::Initial || evaluated[0] == [0.0; 4]);
    }
}

#[test]
fn an_id_of_weight_zero_never_inserts_but_its_weight_gets_its_gradient() {
    let mut subject = group(&[plain_config("t", 2)]);
    let inputs = [Input { weights: Some(vec![0.0, 1.0]), ..Input::plain(0, &[1, 2]) }];
    let (lookup, _) = subject.lookup(&inputs, true, true).unwrap();
    assert_eq!(contents(&mut subject)[0].keys().copied().collect::<Vec<_>>(), [2]);
    let kept = Arc::new(vec![vec![1.0, 2.0, 3.0, 4.0]]);
    let weights = subject.push(1, lookup, &kept, false, &[2]).unwrap();
    let row = common::table::ModelTable::new(plain_config("t", 2)).first_row(1);
    assert!((weights[0][0] - (row[0] + 2.0 * row[1])).abs() < 1e-6 && weights[0][0] != 0.0);
}

#[test]
fn an_id_of_weight_zero_sees_what_the_call_inserts_wherever_it_stands_and_however_many_threads_there_are() {
    // Key 1 comes with weight 0 first and far behind, in the same feature and in the next one, with weight 1.
    let mut keys: Vec<Key> = (0..40_000).map(|i| 2 + i % 50).collect();
    let mut weights = vec![1.0; keys.len()];
    (keys[0], weights[0]) = (1, 0.0);
    *keys.last_mut().unwrap() = 1;
    let first = Input { weights: Some(weights), ..Input::plain(0, &keys) };
    let second = Input { weights: Some(vec![0.0, 0.0]), ..Input::plain(0, &[77, 78]) };
    let third = Input::plain(0, &[77]);
    let initializer = sok_core::initializer::Initializer::Constant { value: -0.5 };
    let config = TableConfig { missing: Missing::Zeros, initializer, ..plain_config("t", 4) };
    let ops = [
        Op::Lookup { inputs: vec![first, second, third], insert: true, save: true },
        Op::Push { lookup: 0, hold: false, seed: 1 },
    ];
    run_all(&[config], plain_update(rules()[0]), &ops, &POOLS[..]);
}

// ---- tickets

const SCALARS: UpdateScalars = UpdateScalars { learning_rate: 0.5, step: 1, factor: 1.0 };

/// `count` pushes of a gradient of ones, push number q to key q.
fn pushes(subject: &mut Subject, count: u64) {
    for number in 1..=count {
        let (lookup, _) = subject.lookup(&[Input::plain(0, &[number])], true, true).unwrap();
        subject.push(number, lookup, &Arc::new(vec![vec![1.0]]), number % 2 == 0, &[]).unwrap();
    }
}

/// How far the rows of keys have moved from zero.
fn moved(subject: &mut Subject) -> Vec<(Key, f32)> {
    let contents = contents(subject);
    contents[0].iter().map(|(k, v)| (*k, f32::from_bits(v[0]))).filter(|(_, x)| *x != 0.0).collect()
}

fn zeros_group() -> Subject {
    let initializer = sok_core::initializer::Initializer::Constant { value: 0.0 };
    group(&[TableConfig { initializer, ..plain_config("t", 1) }])
}

/// The ticket is refused; nothing has changed.
fn refuse_ticket(subject: &mut Subject, named: &[(u64, f32)]) {
    let (before, pending) = (contents(subject), subject.group.pending_pushes());
    let error = subject.commit(named, true).expect_err("a push of it is gone");
    assert!(matches!(&error, Error::Ticket { tables, .. } if tables == "`t`"), "{error}");
    assert!(
        error.to_string().contains("gone: applied before, or older than the newest 64 backward passes"),
        "{error}"
    );
    assert_eq!((contents(subject), subject.group.pending_pushes()), (before, pending));
}

#[test]
fn a_subset_of_pushes_counts_with_its_weights_and_older_ones_are_dropped() {
    let mut subject = zeros_group();
    pushes(&mut subject, 5);
    subject.commit(&[(2, 3.0), (4, -0.5)], true).unwrap();
    assert_eq!(subject.group.pending_pushes(), 2);
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(moved(&mut subject), [(2, -1.5), (4, 0.25)]);
    refuse_ticket(&mut subject, &[(2, 1.0)]);
    refuse_ticket(&mut subject, &[(1, 1.0)]);
    refuse_ticket(&mut subject, &[(3, 1.0), (4, 1.0)]);
    subject.commit(&[(3, 1.0), (5, 2.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(moved(&mut subject), [(2, -1.5), (3, -0.5), (4, 0.25), (5, -1.0)]);
}

#[test]
fn pushes_older_than_the_oldest_named_one_are_gone() {
    let mut subject = zeros_group();
    pushes(&mut subject, 3);
    // Push 1 and 2 leak when 3 alone is named.
    subject.commit(&[(3, 1.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    refuse_ticket(&mut subject, &[(2, 1.0)]);
    assert_eq!(moved(&mut subject), [(3, -0.5)]);
}

#[test]
fn of_seventy_pushes_that_nobody_applied_the_newest_64_can_be() {
    let mut subject = zeros_group();
    pushes(&mut subject, 70);
    assert_eq!(subject.group.pending_pushes(), 64);
    refuse_ticket(&mut subject, &[(6, 1.0)]);
    // Push 6 and push 70 share a row of the ticket.
    refuse_ticket(&mut subject, &[(6, 1.0), (70, 1.0)]);
    subject.commit(&[(7, 1.0), (70, 2.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(moved(&mut subject), [(7, -0.5), (70, -1.0)]);
}

#[test]
fn optimizers_without_states_each_make_their_own_step() {
    let mut subject = zeros_group();
    pushes(&mut subject, 2);
    let own = *subject.group.binding().unwrap();
    let clipped = Update { clipvalue: Some(0.25), ..own.update };
    let other = Binding { owner: own.owner + 1, update: clipped, ..own };
    for (number, binding) in [(1, other), (2, own)] {
        subject.commit(&[(number, 1.0)], true).unwrap();
        subject
            .group
            .apply(&binding, &ApplyScalars { update: SCALARS, is_update: true }, subject.pool)
            .unwrap();
    }
    assert_eq!(moved(&mut subject), [(1, -0.125), (2, -0.5)]);
}

#[test]
fn an_optimizer_may_not_update_records_that_have_another_ones_states() {
    let mut subject = zeros_group();
    pushes(&mut subject, 2);
    let own = *subject.group.binding().unwrap();
    let rule = Rule::Sgd { momentum: 0.9, nesterov: false };
    let other = Binding { owner: own.owner + 1, update: Update { rule, ..own.update }, ..own };
    for (bound, refused) in [(own, other), (other, own)] {
        subject.group.bind(bound).unwrap();
        let scalars = ApplyScalars { update: SCALARS, is_update: true };
        let error = subject.group.apply(&refused, &scalars, subject.pool).unwrap_err();
        assert!(error.to_string().contains("have been bound to another optimizer since"), "{error}");
        assert_eq!(subject.group.binding().unwrap().owner, bound.owner);
    }
}

#[test]
fn accumulated_steps_are_applied_as_their_sum() {
    let mut subject = zeros_group();
    pushes(&mut subject, 3);
    for (number, is_update) in [(1, false), (2, false), (3, true)] {
        subject.commit(&[(number, 1.0)], is_update).unwrap();
        subject.apply(UpdateScalars { factor: 0.5, ..SCALARS }, is_update).unwrap();
        assert_eq!(moved(&mut subject).len(), if is_update { 3 } else { 0 });
    }
    assert_eq!(moved(&mut subject), [(1, -0.25), (2, -0.25), (3, -0.25)]);
}

/// Steps enough for every memory of the erased record to be given up, were it not still owed a gradient.
#[test]
fn a_row_inserted_again_gets_no_gradient_of_its_former_life_even_an_accumulated_one() {
    let mut subject = zeros_group();
    pushes(&mut subject, 1);
    subject.commit(&[(1, 1.0)], false).unwrap();
    subject.apply(SCALARS, false).unwrap();
    assert_eq!(subject.group.table_mut(0).erase(&[1]), 1);
    for number in 2..70 {
        let (lookup, _) = subject.lookup(&[Input::plain(0, &[2])], true, true).unwrap();
        subject.push(number, lookup, &Arc::new(vec![vec![0.0]]), false, &[]).unwrap();
        subject.commit(&[(number, 1.0)], false).unwrap();
        subject.lookup(&[Input::plain(0, &[1, 3])], true, true).unwrap();
    }
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(contents(&mut subject)[0].len(), 3);
    assert_eq!(moved(&mut subject), []);
}

#[test]
fn a_second_push_without_an_optimizer_is_refused() {
    let mut subject = Subject::new(&[plain_config("a", 1), plain_config("b", 1)], &POOLS[0]);
    let (lookup, _) = subject.lookup(&[Input::plain(1, &[3])], true, true).unwrap();
    let kept = Arc::new(vec![vec![1.0]]);
    subject.push(1, lookup, &kept, false, &[]).unwrap();
    let error = subject.push(2, lookup, &kept, false, &[]).unwrap_err();
    assert!(matches!(&error, Error::UnwrappedOptimizer { tables } if tables == "`a`, `b`"));
    assert_eq!(
        error.to_string(),
        "the tables `a`, `b` were trained a second time, but no optimizer has updated them: the gradients would pile up \
         and no row would move. Compile with `sok_keras.OptimizerWrapper(optimizer)`"
    );
    subject.group.bind(binding(OWNER, plain_update(rules()[0]))).unwrap();
    subject.push(2, lookup, &kept, false, &[]).unwrap();
}

#[test]
fn a_gradient_that_is_not_finite_makes_a_ticket_that_is_not() {
    let mut subject = zeros_group();
    let (lookup, _) = subject.lookup(&[Input::plain(0, &[1, 2])], true, true).unwrap();
    for (number, bad) in [(1, f32::INFINITY), (2, f32::NAN)] {
        subject.push(number, lookup, &Arc::new(vec![vec![1.0, bad]]), false, &[]).unwrap();
        assert!(subject.tickets[&number].iter().any(|x| x.is_nan()));
    }
}

// ---- norms

/// Commits two pushes and compares the norm, then the rows clipped by it, with the model's.
#[test]
fn the_norm_is_that_of_merged_rows_and_clips_each_table_by_its_own() {
    let clipped = Update { clipnorm: Some(0.75), ..plain_update(rules()[0]) };
    for hold in [false, true] {
        for pushes in [1, 2] {
            clip(clipped, hold, pushes);
        }
    }
}

fn clip(update: Update, hold: bool, pushes: u64) {
    let configs = [plain_config("a", 8), plain_config("b", 17)];
    let mut bench = Bench::new(&configs, update, &POOLS[..]);
    let inputs = vec![Input::plain(0, &[1, 2, 1, 3]), Input::plain(1, &[5, 5, 6])];
    for seed in 1..=pushes {
        bench.run(&Op::Lookup { inputs: inputs.clone(), insert: true, save: true });
        bench.run(&Op::Push { lookup: seed as usize - 1, hold, seed });
    }
    let named: Vec<(u64, f32)> = (1..=pushes).map(|number| (number, 0.5)).collect();
    bench.model.commit(&named);
    let norms: Vec<f64> = (0..2).map(|table| bench.model.squared_norm(table)).collect();
    let scalars = UpdateScalars { factor: 2.0, ..SCALARS };
    let factor = |norm: &f64| scalars.factor * clipnorm_factor(*norm as f32 * 4.0, 0.75);
    let each: Vec<_> = norms.iter().map(|norm| UpdateScalars { factor: factor(norm), ..scalars }).collect();
    assert!(each.iter().all(|s| s.factor < 2.0), "both tables are clipped");
    bench.model.apply_each(&each, true);
    for subject in &mut bench.subjects {
        let norm = subject.commit(&named, true).unwrap();
        assert!((norm / norms.iter().sum::<f64>() - 1.0).abs() < 1e-6);
        subject.apply(scalars, true).unwrap();
        check_close(&bench.model, subject);
    }
}

fn check_close(model: &Model, subject: &mut Subject) {
    for (model, got) in model.tables.iter().zip(contents(subject)) {
        for (key, record) in &model.rows {
            let got = got[key].iter().map(|b| f32::from_bits(*b));
            assert!(record.values.iter().zip(got).all(|(a, b)| (a - b).abs() < 1e-6), "key {key}");
        }
    }
}
