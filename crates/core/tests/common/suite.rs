//! What every group of tables must do, on any device. Each function is a test.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sok_core::contract::batch::Combiner;
use sok_core::contract::binding::Binding;
use sok_core::contract::profile::{PartTime, StepPart};
use sok_core::contract::table::{
    CheckMode, Explanation, Insertion, Missing, OutOfVocabulary, Outcomes, TableConfig,
};
use sok_core::error::Error;
use sok_core::formula::update::{Update, UpdateScalars, clipnorm_factor};
use sok_core::formula::{Rule, Sgd};
use sok_core::key::Key;
use sok_core::policy::eviction::{Eviction, Score};

use super::group::Model;
use super::input::{Input, Shape};
use super::large::{ADAGRAD, ADAM, SGD, huge_inputs, large_steps, plain_update};
use super::steps::{Bench, Op, run_all};
use super::strategies::{WEIGHTS, plain_config};
use super::subject::{Maker, OWNER, Subject, binding, own_scalars};
use super::table::{ModelTable, TableOp};
use super::{Dice, scan};

pub fn a_call_of_sixty_thousand_ids_follows_the_model_with_any_number_of_threads(maker: &Maker) {
    let configs = [plain_config("hot", 32), plain_config("cold", 17)];
    run_all(&configs, plain_update(ADAM), &large_steps(huge_inputs), maker);
}

pub fn weights_and_padding_in_a_large_call_follow_the_model(maker: &Maker) {
    let weighted = |dice: &mut Dice| {
        let mut inputs = huge_inputs(dice);
        for input in &mut inputs {
            input.weights = Some((0..input.ids.keys().len()).map(|_| dice.pick(&WEIGHTS)).collect());
            input.padding_key = Some(1);
        }
        inputs
    };
    let configs = [plain_config("hot", 16), plain_config("cold", 3)];
    run_all(&configs, plain_update(ADAGRAD), &large_steps(weighted), maker);
}

pub fn a_key_that_is_all_of_a_large_call_is_summed_in_runs_of_64(maker: &Maker) {
    let one = |_: &mut Dice| vec![Input::plain(0, &[9; 30_001]), Input::plain(0, &[9; 1001])];
    run_all(&[plain_config("t", 8)], plain_update(SGD), &large_steps(one), maker);
}

pub fn bags_of_no_ids_are_zeros(maker: &Maker) {
    let shapes = [Shape::Fixed { num_bags: 3, hotness: 0 }, Shape::RaggedI32(vec![0, 0, 0]), Shape::Each];
    for combiner in [Combiner::Sum, Combiner::Mean, Combiner::Sqrtn] {
        let inputs = shapes.clone().map(|shape| Input { shape, combiner, ..Input::plain(0, &[]) });
        let ops = [Op::Lookup { inputs: inputs.to_vec(), insertion: Insertion::AtLookup, save: true }];
        run_all(&[plain_config("t", 16)], plain_update(SGD), &ops, maker);
    }
}

// ---- capacity, vocabulary, missing

/// A bound group of the tables, and what is in them.
fn group(configs: &[TableConfig], maker: &Maker) -> Box<dyn Subject> {
    let mut subject = (maker.make)(configs).remove(0);
    subject.bind(binding(OWNER, plain_update(SGD))).unwrap();
    subject
}

fn contents(subject: &mut dyn Subject) -> Vec<BTreeMap<Key, Vec<u32>>> {
    (0..subject.num_tables()).map(|table| scan(subject.table(table), 10)).collect()
}

/// The error of a training lookup, which changed nothing.
fn refused(subject: &mut dyn Subject, inputs: &[Input]) -> Error {
    let before = contents(subject);
    let error = subject.lookup(inputs, Insertion::AtLookup, true).map(|_| ()).expect_err("it is refused");
    assert_eq!(contents(subject), before);
    error
}

fn limited(check_mode: CheckMode, maker: &Maker) -> Box<dyn Subject> {
    let small = TableConfig { max_capacity: Some(3), check_mode, ..plain_config("small", 2) };
    let mut subject = group(&[plain_config("large", 2), small], maker);
    subject.lookup(&[Input::plain(1, &[10, 11])], Insertion::AtLookup, true).unwrap();
    subject
}

const NEW_KEYS: [Key; 6] = [5, 10, 4, 5, 3, 3];

pub fn a_batch_that_does_not_fit_raises_and_changes_no_table(maker: &Maker) {
    let mut subject = limited(CheckMode::Raise, maker);
    let inputs = [Input::plain(0, &[1, 2]), Input::plain(1, &NEW_KEYS)];
    let error = refused(&mut *subject, &inputs);
    assert!(matches!(&error, Error::TableFull { refused: 2, len: 2, capacity: 3, .. }));
    assert_eq!(
        error.to_string(),
        "table `small` is full: no room for 2 of the new keys, it holds 2 of at most 3 rows. Raise `max_capacity`, or set \
         `check_mode=\"warn\"` or \"count\" to go on without them. Under an eviction policy the rows of the batch and of steps in \
         progress stay"
    );
    subject.lookup(&[Input::plain(1, &[10, 5, 5])], Insertion::AtLookup, true).unwrap();
}

pub fn what_fits_goes_in_by_first_occurrence_and_the_rest_is_counted(maker: &Maker) {
    for (mode, warnings) in [(CheckMode::Warn, vec![("small".to_string(), 2)]), (CheckMode::Count, vec![])] {
        let mut subject = limited(mode, maker);
        // The second feature's keys come after the first one's.
        subject
            .lookup(
                &[Input::plain(1, &NEW_KEYS[..3]), Input::plain(1, &NEW_KEYS[3..])],
                Insertion::AtLookup,
                true,
            )
            .unwrap();
        let keys: Vec<Key> = contents(&mut *subject)[1].keys().copied().collect();
        assert_eq!(keys, [5, 10, 11]);
        let expected = Outcomes { hit: 1, inserted: 3, refused: 2, ..Outcomes::default() };
        assert_eq!(subject.table(1).stats().unwrap().outcomes, expected);
        let dropped = if subject.is_sharded() { 2 } else { 3 };
        assert_eq!(subject.table(1).stats().unwrap().dropped_gradients, dropped);
        assert_eq!(subject.take_refused(), warnings);
        assert_eq!(subject.take_refused(), []);
    }
}

pub fn ids_outside_a_static_table_raise_and_change_nothing_or_are_zeros_that_nobody_keeps(maker: &Maker) {
    let fixed = |out_of_vocabulary| TableConfig {
        vocabulary_size: Some(10),
        out_of_vocabulary,
        ..plain_config("fixed", 2)
    };
    let inputs = [Input::plain(0, &[1]), Input::plain(1, &[2, 9, 10]), Input::plain(1, &[-3i64 as u64])];
    if !maker.tells_late {
        ids_outside_raise(&[plain_config("other", 2), fixed(OutOfVocabulary::Raise)], &inputs, maker);
    }
    let mut subject = group(&[plain_config("other", 2), fixed(OutOfVocabulary::Zeros)], maker);
    let (_, rows) = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
    assert_eq!((&rows[1][4..], &rows[2][..]), (&[0.0, 0.0][..], &[0.0, 0.0][..]));
    assert_eq!(contents(&mut *subject)[1].keys().copied().collect::<Vec<_>>(), [2, 9]);
}

fn ids_outside_raise(configs: &[TableConfig], inputs: &[Input], maker: &Maker) {
    let mut subject = group(configs, maker);
    assert_eq!(
        refused(&mut *subject, inputs).to_string(),
        "id 10 of feature `f1` is outside table `fixed`, whose ids are 0 to 9 (`vocabulary_size=10`). Set \
         `out_of_vocabulary=\"zeros\"` to answer such ids with zeros, or leave `vocabulary_size` away for a dynamic table"
    );
    assert!(matches!(refused(&mut *subject, &inputs[2..]), Error::OutOfVocabulary { id: -3, last: 9, .. }));
}

pub fn a_key_without_a_row_answers_as_missing_says_and_is_never_stored(maker: &Maker) {
    for missing in [Missing::Initial, Missing::Zeros] {
        let mut subject = group(&[TableConfig { missing, ..plain_config("t", 4) }], maker);
        let evaluated = subject.lookup(&[Input::plain(0, &[8])], Insertion::Never, true).unwrap().1;
        assert_eq!(contents(&mut *subject)[0].len(), 0);
        let inserted = subject.lookup(&[Input::plain(0, &[8])], Insertion::AtLookup, true).unwrap().1;
        assert_eq!(evaluated == inserted, missing == Missing::Initial);
        assert!(missing == Missing::Initial || evaluated[0] == [0.0; 4]);
    }
}

pub fn keys_without_a_row_answer_with_the_row_of_the_out_of_vocabulary_key(maker: &Maker) {
    for missing in [Missing::Initial, Missing::Zeros] {
        let config = TableConfig { missing, out_of_vocabulary_key: Some(8), ..plain_config("t", 6) };
        let mut subject = group(&[config], maker);
        let answers = |subject: &mut dyn Subject, insertion| {
            let bags = Input { weights: Some(vec![1.0, 2.0]), ..Input::plain(0, &[8, 10]) };
            let inputs = [Input::plain(0, &[8, 9, 10]), bags];
            let rows = subject.lookup(&inputs, insertion, true).unwrap().1;
            assert_eq!(rows[1][6..], rows[0][12..].iter().map(|x| 2.0 * x).collect::<Vec<_>>());
            rows[0].clone()
        };
        let first = answers(&mut *subject, Insertion::Never);
        assert_eq!((&first[6..12], &first[12..]), (&first[..6], &first[..6]));
        assert_eq!(contents(&mut *subject)[0].len(), 0);
        subject.table_mut(0).assign(&[8], &[7.0; 6], true).unwrap();
        assert_eq!(answers(&mut *subject, Insertion::Never), [7.0; 18]);
        let (mut rows, mut found) = ([0.0; 12], [true; 2]);
        subject.table(0).find(&[8, 11], &mut rows, &mut found).unwrap();
        assert_eq!((rows, found), ([7.0; 12], [true, false]));
        // Rows that are made start with first values of their own.
        let inserted = answers(&mut *subject, Insertion::AtLookup);
        assert!(
            inserted[6..12] != inserted[12..] && inserted[6..12] != [7.0; 6] && inserted[..6] == [7.0; 6]
        );
    }
    let outside =
        TableConfig { vocabulary_size: Some(8), out_of_vocabulary_key: Some(8), ..plain_config("t", 2) };
    assert!(outside.validate().unwrap_err().to_string().contains("must be in the vocabulary. Received: 8"));
}

// ---- rows that a commit makes

/// A lookup that leaves insertion to the commit, and a push of ones for it; `number`: of the push.
fn look_up_and_push(subject: &mut dyn Subject, number: u64, inputs: &[Input]) {
    let (lookup, rows) = subject.lookup(inputs, Insertion::AtCommit, true).unwrap();
    let ones = rows.iter().map(|rows| vec![1.0; rows.len()]).collect();
    let hold = number.is_multiple_of(2);
    subject.push(number, lookup, &Arc::new(ones), hold, &[]).unwrap();
}

fn keys_of(subject: &mut dyn Subject, table: usize) -> Vec<Key> {
    contents(subject)[table].keys().copied().collect()
}

pub fn a_commit_makes_the_rows_that_its_pushes_missed_and_no_others(maker: &Maker) {
    let mut subject = group(&[plain_config("t", 2)], maker);
    for (number, keys) in [(1, [1, 2]), (2, [2, 3]), (3, [3, 4]), (4, [5, 5])] {
        look_up_and_push(&mut *subject, number, &[Input::plain(0, &keys)]);
        assert_eq!(keys_of(&mut *subject, 0), Vec::<Key>::new());
    }
    subject.commit(&[(2, 1.0), (4, 0.5)], true).unwrap();
    assert_eq!(keys_of(&mut *subject, 0), [2, 3, 5]);
    subject.apply(SCALARS, true).unwrap();
    // Push 1 is dropped. Push 3 is still there: key 3 has a row by now.
    subject.commit(&[(3, 1.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(keys_of(&mut *subject, 0), [2, 3, 4, 5]);
    let stats = subject.table(0).stats().unwrap();
    assert_eq!(stats.outcomes, Outcomes { inserted: 4, ..Outcomes::default() });
    assert_eq!(stats.dropped_gradients, 0);
}

pub fn a_commit_that_does_not_fit_raises_and_changes_no_table(maker: &Maker) {
    let mut subject = limited(CheckMode::Raise, maker);
    look_up_and_push(&mut *subject, 1, &[Input::plain(0, &[7]), Input::plain(1, &NEW_KEYS)]);
    let before = contents(&mut *subject);
    let error = subject.commit(&[(1, 1.0)], true).expect_err("two keys do not fit");
    assert!(matches!(&error, Error::TableFull { refused: 2, len: 2, capacity: 3, .. }), "{error}");
    assert_eq!((contents(&mut *subject), subject.pending_pushes()), (before, 1));
    subject.table_mut(1).erase(&[10, 11]).unwrap();
    subject.commit(&[(1, 1.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    // The gradient of key 10 went with its row.
    assert_eq!((keys_of(&mut *subject, 0), keys_of(&mut *subject, 1)), (vec![7], vec![3, 4, 5]));
}

pub fn a_commit_inserts_what_fits_by_first_occurrence_and_drops_the_rest(maker: &Maker) {
    for (mode, warnings) in [(CheckMode::Warn, vec![("small".to_string(), 2)]), (CheckMode::Count, vec![])] {
        let mut subject = limited(mode, maker);
        look_up_and_push(
            &mut *subject,
            1,
            &[Input::plain(1, &NEW_KEYS[..3]), Input::plain(1, &NEW_KEYS[3..])],
        );
        assert_eq!(subject.take_refused(), []);
        subject.commit(&[(1, 1.0)], true).unwrap();
        subject.apply(SCALARS, true).unwrap();
        assert_eq!(keys_of(&mut *subject, 1), [5, 10, 11]);
        let stats = subject.table(1).stats().unwrap();
        assert_eq!(stats.outcomes, Outcomes { hit: 1, inserted: 3, refused: 2, ..Outcomes::default() });
        assert_eq!(stats.dropped_gradients, if subject.is_sharded() { 2 } else { 3 });
        assert_eq!(subject.take_refused(), warnings);
    }
}

/// Bags with weights and padding, several features of a table and several tables: as if the lookup had inserted, since what it
/// answers is what it would have inserted.
pub fn rows_made_by_a_commit_learn_from_that_very_step(maker: &Maker) {
    let configs = [plain_config("a", 16), plain_config("b", 3)];
    for (rule, hold) in [(ADAM, true), (ADAM, false), (ADAGRAD, true)] {
        let mut dice = Dice(11);
        let mut ops = Vec::new();
        for step in 1..4 {
            let mut inputs = huge_inputs(&mut dice);
            inputs[1].weights = Some((0..15_000).map(|_| dice.pick(&WEIGHTS)).collect());
            inputs[2].padding_key = Some(1);
            ops.push(Op::Lookup { inputs, insertion: Insertion::AtCommit, save: true });
            ops.push(Op::Push { lookup: usize::MAX, hold, seed: dice.next() });
            ops.push(Op::Table { number: 0, op: TableOp::Erase((0..20_000).step_by(3).collect()) });
            ops.push(Op::Commit { chosen: u64::MAX, weights: [1.0; 3] });
            let scalars = UpdateScalars { learning_rate: 0.05, step, factor: 1.0 };
            ops.push(Op::Apply { scalars, is_update: step != 2 });
        }
        run_all(&configs, plain_update(rule), &ops, maker);
    }
}

pub fn an_id_of_weight_zero_never_inserts_but_its_weight_gets_its_gradient(maker: &Maker) {
    let mut subject = group(&[plain_config("t", 2)], maker);
    let inputs = [Input { weights: Some(vec![0.0, 1.0]), ..Input::plain(0, &[1, 2]) }];
    let (lookup, _) = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
    assert_eq!(contents(&mut *subject)[0].keys().copied().collect::<Vec<_>>(), [2]);
    let kept = Arc::new(vec![vec![1.0, 2.0, 3.0, 4.0]]);
    let weights = subject.push(1, lookup, &kept, false, &[2]).unwrap();
    let row = ModelTable::new(plain_config("t", 2)).first_row(1);
    assert!((weights[0][0] - (row[0] + 2.0 * row[1])).abs() < 1e-6 && weights[0][0] != 0.0);
}

pub fn an_id_of_weight_zero_adds_nothing_to_its_bag_whatever_its_row_holds(maker: &Maker) {
    let mut subject = group(&[plain_config("t", 2)], maker);
    subject.table_mut(0).assign(&[1, 2], &[f32::NAN, f32::INFINITY, 3.0, 4.0], true).unwrap();
    let input = |shape, combiner, weights: &[f32]| Input {
        shape,
        combiner,
        weights: Some(weights.to_vec()),
        ..Input::plain(0, &[1, 2])
    };
    let bag = Shape::Fixed { num_bags: 1, hotness: 2 };
    let inputs = [
        input(bag.clone(), Combiner::Sum, &[0.0, 2.0]),
        input(bag.clone(), Combiner::Mean, &[-0.0, 2.0]),
        input(bag, Combiner::Sqrtn, &[0.0, 0.0]),
        input(Shape::Each, Combiner::Sum, &[0.0, 1.0]),
        input(Shape::RaggedI32(vec![0, 1, 2]), Combiner::Mean, &[0.0, -2.0]),
    ];
    for save in [false, true] {
        let insertion = if save { Insertion::AtLookup } else { Insertion::Never };
        let (lookup, rows) = subject.lookup(&inputs, insertion, save).unwrap();
        let expected: [&[f32]; 5] =
            [&[6.0, 8.0], &[3.0, 4.0], &[0.0, 0.0], &[0.0, 0.0, 3.0, 4.0], &[0.0, 0.0, 3.0, 4.0]];
        assert_eq!(rows, expected);
        if save {
            let kept = Arc::new(expected.map(|rows| vec![1.0; rows.len()]).to_vec());
            let weights = subject.push(1, lookup, &kept, false, &[2; 5]).unwrap();
            assert_eq!(weights.iter().map(|of| of[1]).collect::<Vec<_>>(), [7.0, 0.0, 0.0, 7.0, 0.0]);
        }
    }
}

pub fn gradients_of_weights_are_zeros_where_the_table_has_lost_its_rows(maker: &Maker) {
    let mut subject = group(&[plain_config("t", 2)], maker);
    let inputs = [Input { weights: Some(vec![2.0, 0.0]), ..Input::plain(0, &[1, 2]) }];
    let kept = Arc::new(vec![vec![1.0, 2.0, 3.0, 4.0]]);
    for number in [1, 2] {
        let (lookup, _) = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
        subject.table_mut(0).clear().unwrap();
        assert_eq!(subject.push(number, lookup, &kept, false, &[2]).unwrap(), [[0.0, 0.0]]);
        subject.commit(&[(number, 1.0)], true).unwrap();
        subject.apply(SCALARS, true).unwrap();
    }
}

pub fn an_id_of_weight_zero_sees_what_the_call_inserts_wherever_it_stands_and_however_many_threads_there_are(
    maker: &Maker,
) {
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
        Op::Lookup { inputs: vec![first, second, third], insertion: Insertion::AtLookup, save: true },
        Op::Push { lookup: 0, hold: false, seed: 1 },
    ];
    run_all(&[config], plain_update(SGD), &ops, maker);
}

// ---- tickets

const SCALARS: UpdateScalars = UpdateScalars { learning_rate: 0.5, step: 1, factor: 1.0 };

/// `count` pushes of a gradient of ones, push number q to key q.
fn pushes(subject: &mut dyn Subject, count: u64) {
    for number in 1..=count {
        let (lookup, _) = subject.lookup(&[Input::plain(0, &[number])], Insertion::AtLookup, true).unwrap();
        subject.push(number, lookup, &Arc::new(vec![vec![1.0]]), number % 2 == 0, &[]).unwrap();
    }
}

/// How far the rows of keys have moved from zero.
fn moved(subject: &mut dyn Subject) -> Vec<(Key, f32)> {
    let contents = contents(subject);
    contents[0].iter().map(|(k, v)| (*k, f32::from_bits(v[0]))).filter(|(_, x)| *x != 0.0).collect()
}

fn zeros_group(maker: &Maker) -> Box<dyn Subject> {
    let initializer = sok_core::initializer::Initializer::Constant { value: 0.0 };
    group(&[TableConfig { initializer, ..plain_config("t", 1) }], maker)
}

/// The ticket is refused; nothing has changed.
fn refuse_ticket(subject: &mut dyn Subject, named: &[(u64, f32)]) {
    let (before, pending) = (contents(subject), subject.pending_pushes());
    let error = subject.commit(named, true).expect_err("a push of it is gone");
    assert!(matches!(&error, Error::Ticket { tables, .. } if tables == "`t`"), "{error}");
    assert!(
        error
            .to_string()
            .contains("gone: applied before, older than the newest 64 backward passes, or of other tables"),
        "{error}"
    );
    assert_eq!((contents(subject), subject.pending_pushes()), (before, pending));
}

pub fn a_subset_of_pushes_counts_with_its_weights_and_older_ones_are_dropped(maker: &Maker) {
    let mut subject = zeros_group(maker);
    pushes(&mut *subject, 5);
    subject.commit(&[(2, 3.0), (4, -0.5)], true).unwrap();
    assert_eq!(subject.pending_pushes(), 2);
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(moved(&mut *subject), [(2, -1.5), (4, 0.25)]);
    refuse_ticket(&mut *subject, &[(2, 1.0)]);
    refuse_ticket(&mut *subject, &[(1, 1.0)]);
    refuse_ticket(&mut *subject, &[(3, 1.0), (4, 1.0)]);
    subject.commit(&[(3, 1.0), (5, 2.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(moved(&mut *subject), [(2, -1.5), (3, -0.5), (4, 0.25), (5, -1.0)]);
}

pub fn pushes_older_than_the_oldest_named_one_are_gone(maker: &Maker) {
    let mut subject = zeros_group(maker);
    pushes(&mut *subject, 3);
    // Push 1 and 2 leak when 3 alone is named.
    subject.commit(&[(3, 1.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    refuse_ticket(&mut *subject, &[(2, 1.0)]);
    assert_eq!(moved(&mut *subject), [(3, -0.5)]);
}

/// Key 1 had no row at the lookup, and has the lowest rank of all rows at the commit.
pub fn a_commit_does_not_evict_the_rows_of_its_own_keys(maker: &Maker) {
    let eviction = Some(Eviction { score: Score::Lru, counts_inference: false, keeps_evicted: false });
    let mut subject =
        group(&[TableConfig { max_capacity: Some(2), eviction, ..plain_config("t", 1) }], maker);
    let inputs = [Input::plain(0, &[1, 2])];
    let (lookup, _) = subject.lookup(&inputs, Insertion::AtCommit, true).unwrap();
    subject.table_mut(0).assign(&[1, 3], &[0.0; 2], true).unwrap();
    subject.push(1, lookup, &Arc::new(vec![vec![1.0; 2]]), true, &[]).unwrap();
    subject.commit(&[(1, 1.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(contents(&mut *subject)[0].keys().copied().collect::<Vec<_>>(), [1, 2]);
}

/// A row that a commit inserts gets its score, too. A negative score counts as 0.
pub fn rows_have_the_highest_score_of_the_last_lookup_that_brought_some(maker: &Maker) {
    let eviction = Some(Eviction { score: Score::Custom, counts_inference: false, keeps_evicted: false });
    let custom = TableConfig { max_capacity: Some(3), eviction, ..plain_config("t", 1) };
    let mut subject = group(&[custom, plain_config("u", 1)], maker);
    let mut number = 0;
    let mut step = |subject: &mut dyn Subject, keys: &[Key], scores: Option<&[i64]>, insertion| {
        number += 1;
        let inputs = [Input { scores: scores.map(<[i64]>::to_vec), ..Input::plain(0, keys) }];
        let (lookup, _) = subject.lookup(&inputs, insertion, true).unwrap();
        subject.push(number, lookup, &Arc::new(vec![vec![1.0; keys.len()]]), true, &[]).unwrap();
        subject.commit(&[(number, 1.0)], true).unwrap();
        subject.apply(SCALARS, true).unwrap();
    };
    let scores = |subject: &mut dyn Subject| {
        let of = |key| match subject.table(0).explain(key).unwrap() {
            Explanation::Present { score } => score,
            _ => None,
        };
        [1, 2, 3, 4].map(of)
    };
    let subject = &mut *subject;
    step(subject, &[1, 2, 1], Some(&[7, 9, 5]), Insertion::AtLookup);
    assert_eq!(scores(subject), [Some(7), Some(9), None, None]);
    step(subject, &[1, 3], Some(&[2, -1]), Insertion::AtCommit);
    assert_eq!(scores(subject), [Some(2), Some(9), Some(0), None]);
    step(subject, &[1, 2, 3], None, Insertion::AtLookup);
    assert_eq!(scores(subject), [Some(2), Some(9), Some(0), None]);
    step(subject, &[4], Some(&[i64::MAX]), Insertion::AtCommit);
    assert_eq!(scores(subject), [Some(2), Some(9), None, Some(i64::MAX as u64)]);
    let inputs = [Input { scores: Some(vec![1]), ..Input::plain(1, &[1]) }];
    let error = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap_err();
    assert!(
        error.to_string().contains("`scores` are for tables with the eviction policy `Custom`"),
        "{error}"
    );
}

/// The first push of the key is the one whose lookup came first. The sum in another order is 0.
pub fn pushes_are_added_in_their_order_also_if_a_lookup_was_without_the_key(maker: &Maker) {
    let mut subject = zeros_group(maker);
    let inputs = [Input::plain(0, &[9])];
    let (without, _) = subject.lookup(&inputs, Insertion::AtCommit, true).unwrap();
    subject.table_mut(0).assign(&[9], &[0.0], true).unwrap();
    let (with, _) = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
    for (number, lookup, gradient) in [(1, with, 1e8), (2, with, -1e8), (3, without, 1.0)] {
        subject.push(number, lookup, &Arc::new(vec![vec![gradient]]), true, &[]).unwrap();
    }
    subject.commit(&[(1, 1.0), (2, 1.0), (3, 1.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(moved(&mut *subject), [(9, -0.5)]);
}

/// What a step has told of the table's size is older than what was inserted since.
pub fn rows_assigned_between_steps_learn_in_later_ones(maker: &Maker) {
    let mut subject = zeros_group(maker);
    let every_fifth = |first: Key| (first..3000).step_by(5);
    for step in 1..=5 {
        let keys: Vec<Key> =
            every_fifth(u64::from(step > 1)).chain(every_fifth(u64::from(step > 1))).collect();
        let (lookup, _) = subject.lookup(&[Input::plain(0, &keys)], Insertion::AtLookup, true).unwrap();
        subject.push(step, lookup, &Arc::new(vec![vec![1.0; keys.len()]]), true, &[]).unwrap();
        subject.commit(&[(step, 1.0)], true).unwrap();
        subject.apply(SCALARS, true).unwrap();
        if step == 1 {
            let all: Vec<Key> = (0..3000).collect();
            subject.table_mut(0).assign(&all, &vec![0.0; all.len()], true).unwrap();
        }
    }
    assert_eq!(moved(&mut *subject), every_fifth(1).map(|key| (key, -4.0)).collect::<Vec<_>>());
}

pub fn of_seventy_pushes_that_nobody_applied_the_newest_64_can_be(maker: &Maker) {
    let mut subject = zeros_group(maker);
    pushes(&mut *subject, 70);
    assert_eq!(subject.pending_pushes(), 64);
    refuse_ticket(&mut *subject, &[(6, 1.0)]);
    // Push 6 and push 70 share a row of the ticket.
    refuse_ticket(&mut *subject, &[(6, 1.0), (70, 1.0)]);
    subject.commit(&[(7, 1.0), (70, 2.0)], true).unwrap();
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(moved(&mut *subject), [(7, -0.5), (70, -1.0)]);
}

pub fn optimizers_without_states_each_make_their_own_step(maker: &Maker) {
    let mut subject = zeros_group(maker);
    pushes(&mut *subject, 2);
    let own = subject.binding().unwrap();
    let clipped = Update { clipvalue: Some(0.25), ..own.update };
    let other = Binding { owner: own.owner + 1, update: clipped, ..own.clone() };
    for (number, binding) in [(1, other), (2, own)] {
        subject.commit(&[(number, 1.0)], true).unwrap();
        subject.apply_by(&binding, SCALARS, true).unwrap();
    }
    assert_eq!(moved(&mut *subject), [(1, -0.125), (2, -0.5)]);
}

pub fn an_optimizer_may_not_update_records_that_have_another_ones_states(maker: &Maker) {
    let mut subject = zeros_group(maker);
    pushes(&mut *subject, 2);
    let own = subject.binding().unwrap();
    let rule = Rule::Sgd(Sgd { momentum: 0.9, nesterov: false });
    let other = Binding { owner: own.owner + 1, update: Update { rule, ..own.update }, ..own.clone() };
    for (bound, refused) in [(own.clone(), other.clone()), (other, own)] {
        subject.bind(bound.clone()).unwrap();
        let error = subject.apply_by(&refused, SCALARS, true).unwrap_err();
        assert!(error.to_string().contains("have been bound to another optimizer since"), "{error}");
        assert_eq!(subject.binding().unwrap().owner, bound.owner);
    }
}

pub fn accumulated_steps_are_applied_as_their_sum(maker: &Maker) {
    let mut subject = zeros_group(maker);
    pushes(&mut *subject, 3);
    for (number, is_update) in [(1, false), (2, false), (3, true)] {
        subject.commit(&[(number, 1.0)], is_update).unwrap();
        subject.apply(UpdateScalars { factor: 0.5, ..SCALARS }, is_update).unwrap();
        assert_eq!(moved(&mut *subject).len(), if is_update { 3 } else { 0 });
    }
    assert_eq!(moved(&mut *subject), [(1, -0.25), (2, -0.25), (3, -0.25)]);
}

/// Steps enough for every memory of the erased record to be given up, were it not still owed a gradient.
pub fn a_row_inserted_again_gets_no_gradient_of_its_former_life_even_an_accumulated_one(maker: &Maker) {
    let mut subject = zeros_group(maker);
    pushes(&mut *subject, 1);
    subject.commit(&[(1, 1.0)], false).unwrap();
    subject.apply(SCALARS, false).unwrap();
    assert_eq!(subject.table_mut(0).erase(&[1]).unwrap(), 1);
    for number in 2..70 {
        let (lookup, _) = subject.lookup(&[Input::plain(0, &[2])], Insertion::AtLookup, true).unwrap();
        subject.push(number, lookup, &Arc::new(vec![vec![0.0]]), false, &[]).unwrap();
        subject.commit(&[(number, 1.0)], false).unwrap();
        subject.lookup(&[Input::plain(0, &[1, 3])], Insertion::AtLookup, true).unwrap();
    }
    subject.apply(SCALARS, true).unwrap();
    assert_eq!(contents(&mut *subject)[0].len(), 3);
    assert_eq!(moved(&mut *subject), []);
}

pub fn a_second_push_without_an_optimizer_is_refused(maker: &Maker) {
    let mut subject = (maker.make)(&[plain_config("a", 1), plain_config("b", 1)]).remove(0);
    let (lookup, _) = subject.lookup(&[Input::plain(1, &[3])], Insertion::AtLookup, true).unwrap();
    let kept = Arc::new(vec![vec![1.0]]);
    subject.push(1, lookup, &kept, false, &[]).unwrap();
    let error = subject.push(2, lookup, &kept, false, &[]).unwrap_err();
    assert!(matches!(&error, Error::UnwrappedOptimizer { tables } if tables == "`a`, `b`"));
    assert_eq!(
        error.to_string(),
        "the tables `a`, `b` were trained a second time, but no optimizer has updated them: the gradients would pile up \
         and no row would move. Compile with `sok_keras.OptimizerWrapper(optimizer)`"
    );
    subject.bind(binding(OWNER, plain_update(SGD))).unwrap();
    subject.push(2, lookup, &kept, false, &[]).unwrap();
}

pub fn a_gradient_that_is_not_finite_makes_a_ticket_that_is_not(maker: &Maker) {
    let mut subject = zeros_group(maker);
    let (lookup, _) = subject.lookup(&[Input::plain(0, &[1, 2])], Insertion::AtLookup, true).unwrap();
    for (number, bad) in [(1, f32::INFINITY), (2, f32::NAN)] {
        subject.push(number, lookup, &Arc::new(vec![vec![1.0, bad]]), false, &[]).unwrap();
        assert!(subject.ticket(number).iter().any(|x| x.is_nan()));
    }
    subject.push(3, lookup, &Arc::new(vec![vec![1.0, 2.0]]), false, &[]).unwrap();
    assert!(subject.ticket(3).iter().all(|x| x.is_finite()));
}

// ---- norms

pub fn parts_of_steps_are_measured_only_while_somebody_asks(maker: &Maker) {
    let clipped = Update { clipnorm: Some(0.75), ..plain_update(SGD) };
    for (update, expected) in [
        (plain_update(SGD), vec![StepPart::Find, StepPart::Update]),
        (clipped, vec![StepPart::Find, StepPart::Merge, StepPart::Norm, StepPart::Update]),
    ] {
        for mut subject in (maker.make)(&[plain_config("a", 8)]) {
            subject.bind(Binding::new(1, update, false)).unwrap();
            for (number, is_measured) in [(1, false), (2, true), (3, true), (4, false)] {
                subject.measure(is_measured);
                let inputs = [Input::plain(0, &[1, 2, 1, number])];
                let (lookup, rows) = subject.lookup(&inputs, Insertion::AtLookup, true).unwrap();
                subject.push(number, lookup, &Arc::new(rows), true, &[]).unwrap();
                subject.commit(&[(number, 1.0)], true).unwrap();
                subject.apply(SCALARS, true).unwrap();
                let profile = subject.take_profile();
                for part in StepPart::ALL {
                    let PartTime { runs, time } = profile.get(part);
                    let is_expected = is_measured && expected.contains(&part);
                    // Gradients for other ranks are merged once more by their owner.
                    assert!(
                        !is_expected || (1..=2).contains(&runs) && time > Duration::ZERO,
                        "{part:?}: {profile:?}"
                    );
                    assert!(is_measured || runs == 0, "{part:?}: {profile:?}");
                }
            }
        }
    }
}

/// Commits two pushes and compares the norm, then the rows clipped by it, with the model's.
pub fn the_norm_is_that_of_merged_rows_and_clips_each_table_by_its_own(maker: &Maker) {
    let clipped = Update { clipnorm: Some(0.75), ..plain_update(SGD) };
    for hold in [false, true] {
        for pushes in [1, 2] {
            clip(clipped, hold, pushes, 0, maker);
        }
    }
}

/// A table with an optimizer of its own does not count, and is not clipped.
pub fn the_norm_is_that_of_tables_of_the_models_optimizer(maker: &Maker) {
    let clipped = Update { clipnorm: Some(0.75), ..plain_update(SGD) };
    for hold in [false, true] {
        for pushes in [1, 2] {
            clip(clipped, hold, pushes, 1, maker);
        }
    }
}

/// `optimizer`: of the second table.
fn clip(update: Update, hold: bool, pushes: u64, optimizer: usize, maker: &Maker) {
    let configs = [plain_config("a", 8), TableConfig { optimizer, ..plain_config("b", 17) }];
    let mut bench = Bench::new(&configs, update, maker);
    let inputs = vec![Input::plain(0, &[1, 2, 1, 3]), Input::plain(1, &[5, 5, 6])];
    for seed in 1..=pushes {
        bench.run(&Op::Lookup { inputs: inputs.clone(), insertion: Insertion::AtLookup, save: true });
        bench.run(&Op::Push { lookup: seed as usize - 1, hold, seed });
    }
    let named: Vec<(u64, f32)> = (1..=pushes).map(|number| (number, 0.5)).collect();
    bench.model.commit(&named).unwrap();
    let norms: Vec<f64> = (0..2).map(|table| bench.model.squared_norm(table)).collect();
    let scalars = UpdateScalars { factor: 2.0, ..SCALARS };
    let factor = |norm: &f64| scalars.factor * clipnorm_factor(*norm as f32 * 4.0, 0.75);
    let mut each: Vec<_> =
        norms.iter().map(|norm| UpdateScalars { factor: factor(norm), ..scalars }).collect();
    assert!(each.iter().all(|s| s.factor < 2.0), "both tables are clipped");
    if optimizer > 0 {
        each[1] = own_scalars(scalars);
    }
    let total = bench.model.total_squared_norm();
    bench.model.apply_each(&each, true);
    for subject in &mut bench.subjects {
        let norm = subject.commit(&named, true).unwrap();
        assert!((norm / total - 1.0).abs() < 1e-6);
        subject.apply(scalars, true).unwrap();
        check_close(&bench.model, &mut **subject);
    }
}

fn check_close(model: &Model, subject: &mut dyn Subject) {
    for (model, got) in model.tables.iter().zip(contents(subject)) {
        for (key, record) in &model.rows {
            let got = got[key].iter().map(|b| f32::from_bits(*b));
            assert!(record.values.iter().zip(got).all(|(a, b)| (a - b).abs() < 1e-6), "key {key}");
        }
    }
}
