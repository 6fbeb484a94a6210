//! A plain, slow, obviously right model of tables and of a group of them, written from the contract; the strategies that draw
//! configurations and operations; and the comparison of a table with its model, bit for bit.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod expiry;
pub mod general;
pub mod group;
pub mod increments;
pub mod input;
pub mod large;
pub mod programs;
pub mod ranks;
pub mod record_step;
pub mod refusal;
pub mod sharded;
pub mod soak;
pub mod steps;
pub mod strategies;
pub mod subject;
pub mod suite;
pub mod table;
pub mod table_suite;

use std::collections::BTreeMap;

use proptest::test_runner::{Config as ProptestConfig, FileFailurePersistence};
use sok_core::contract::records::{Column, Records};
use sok_core::contract::table::{Contents, Cursor};
use sok_core::key::Key;

/// Random numbers from a seed, the same on every run (SplitMix64 of Steele, Lea and Flood).
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Between -1 and 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }
}

/// Bit patterns, all NaNs as one: which of two a sum keeps is the compiler's choice.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits()).collect()
}

/// Returns the bits of a record's values, then those of its score and of its age, as far as the table has them.
pub fn record_bits(values: &[f32], numbers: impl Iterator<Item = u64>) -> Vec<u32> {
    let numbers = numbers.flat_map(|number| [number as u32, (number >> 32) as u32]);
    bits(values).into_iter().chain(numbers).collect()
}

/// All records of a table as [`record_bits`], read `max` at a time; each comes once.
pub fn scan(table: &dyn Contents, max: usize) -> BTreeMap<Key, Vec<u32>> {
    let (mut records, mut cursor) = (Records::default(), Some(Cursor::default()));
    while let Some(at) = cursor {
        cursor = table.scan(at, max, &mut records).unwrap();
    }
    assert_eq!(records.values.len(), records.keys.len() * table.layout().width());
    for column in Column::ALL {
        let is_there = table.config().columns().contains(&column);
        assert_eq!(records.column(column).len(), if is_there { records.keys.len() } else { 0 });
    }
    let values = records.values.chunks_exact(table.layout().width()).enumerate();
    let numbers = |i: usize| Column::ALL.map(|column| records.column(column).get(i).copied());
    let values = values.map(|(i, values)| record_bits(values, numbers(i).into_iter().flatten()));
    let by_key: BTreeMap<_, _> = records.keys.iter().copied().zip(values).collect();
    assert_eq!(by_key.len(), records.keys.len(), "a record came twice");
    assert_eq!(by_key.len(), table.len().unwrap());
    by_key
}

/// The configuration of a random test: it tries `cases` cases, times the environment variable `SOK_TEST_TIMES`. The seeds of cases that
/// failed are kept beside the source.
pub fn random(cases: u32) -> ProptestConfig {
    let times = std::env::var("SOK_TEST_TIMES").map_or(1, |times| times.parse().expect("a number"));
    ProptestConfig {
        cases: cases * times,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    }
}

/// Room for output, full of what must not stay.
pub fn unwritten(len: usize) -> Vec<f32> {
    vec![123456.0; len]
}

/// The methods of a `Communicator` that a wrapper leaves to the one in its field `rank`: all but `send`, `receive` and `decide`.
#[macro_export]
macro_rules! delegate_to_rank {
    () => {
        fn rank(&self) -> usize {
            self.rank.rank()
        }

        fn world_size(&self) -> usize {
            self.rank.world_size()
        }

        fn timeout(&self) -> std::time::Duration {
            self.rank.timeout()
        }

        fn fail(&self, error: &sok_core::error::Error) {
            self.rank.fail(error);
        }

        fn is_decided_by_others(&self, tag: sok_core::exchange::message::Tag) -> bool {
            self.rank.is_decided_by_others(tag)
        }

        fn failure(&self) -> Option<sok_core::error::Error> {
            self.rank.failure()
        }

        fn on_failure(&self, hook: Box<dyn Fn() + Send + Sync>) {
            self.rank.on_failure(hook);
        }

        fn leave(&self) {
            self.rank.leave();
        }
    };
}

/// A test of each function of [`suite`], on what `$maker` makes.
#[macro_export]
macro_rules! suite {
    ($maker:expr $(, #[$attribute:meta])?) => {
        $crate::suite!(@ $maker, [$(#[$attribute])?] a_call_of_sixty_thousand_ids_follows_the_model_with_any_number_of_threads weights_and_padding_in_a_large_call_follow_the_model a_key_that_is_all_of_a_large_call_is_summed_in_runs_of_64 bags_of_no_ids_are_zeros a_batch_that_does_not_fit_raises_and_changes_no_table what_fits_goes_in_by_first_occurrence_and_the_rest_is_counted ids_outside_a_static_table_raise_and_change_nothing_or_are_zeros_that_nobody_keeps a_key_without_a_row_answers_as_missing_says_and_is_never_stored keys_without_a_row_answer_with_the_row_of_the_out_of_vocabulary_key a_commit_makes_the_rows_that_its_pushes_missed_and_no_others a_commit_that_does_not_fit_raises_and_changes_no_table a_commit_inserts_what_fits_by_first_occurrence_and_drops_the_rest rows_made_by_a_commit_learn_from_that_very_step an_id_of_weight_zero_never_inserts_but_its_weight_gets_its_gradient an_id_of_weight_zero_adds_nothing_to_its_bag_whatever_its_row_holds gradients_of_weights_are_zeros_where_the_table_has_lost_its_rows an_id_of_weight_zero_sees_what_the_call_inserts_wherever_it_stands_and_however_many_threads_there_are a_subset_of_pushes_counts_with_its_weights_and_older_ones_are_dropped pushes_older_than_the_oldest_named_one_are_gone pushes_are_added_in_their_order_also_if_a_lookup_was_without_the_key a_commit_does_not_evict_the_rows_of_its_own_keys rows_have_the_highest_score_of_the_last_lookup_that_brought_some rows_assigned_between_steps_learn_in_later_ones of_seventy_pushes_that_nobody_applied_the_newest_64_can_be optimizers_without_states_each_make_their_own_step an_optimizer_may_not_update_records_that_have_another_ones_states accumulated_steps_are_applied_as_their_sum a_row_inserted_again_gets_no_gradient_of_its_former_life_even_an_accumulated_one a_second_push_without_an_optimizer_is_refused a_gradient_that_is_not_finite_makes_a_ticket_that_is_not the_norm_is_that_of_merged_rows_and_clips_each_table_by_its_own the_norm_is_that_of_tables_of_the_models_optimizer parts_of_steps_are_measured_only_while_somebody_asks);
    };
    (@ $maker:expr, $attributes:tt $($name:ident)*) => { $($crate::suite!(@one $maker, $attributes $name);)* };
    (@one $maker:expr, [$(#[$attribute:meta])?] $name:ident) => {
        #[test]
        $(#[$attribute])?
        fn $name() {
            $crate::common::suite::$name(&$maker);
        }
    };
}

/// A test of each function of [`table_suite`], on tables that `$make` makes.
#[macro_export]
macro_rules! table_suite {
    ($make:expr $(, #[$attribute:meta])?) => {
        $crate::table_suite!(@ $make, [$(#[$attribute])?] keys_that_hurt_weak_hashes_are_found_and_erased_like_others a_million_keys_in_a_row_are_found_and_half_of_them_erased a_scan_gives_each_record_once_however_it_is_cut lengths_that_do_not_fit_are_refused_and_change_nothing a_fresh_table_takes_the_records_over_with_their_states);
    };
    (@ $make:expr, $attributes:tt $($name:ident)*) => { $($crate::table_suite!(@one $make, $attributes $name);)* };
    (@one $make:expr, [$(#[$attribute:meta])?] $name:ident) => {
        #[test]
        $(#[$attribute])?
        fn $name() {
            $crate::common::table_suite::$name($make);
        }
    };
}

/// A test of each function of [`expiry`], on what `$maker` makes.
#[macro_export]
macro_rules! expiry_suite {
    ($maker:expr $(, #[$attribute:meta])?) => {
        $crate::expiry_suite!(@ $maker, [$(#[$attribute])?] a_row_goes_at_the_end_of_the_step_that_is_so_many_after_its_last_one many_rows_go_part_by_part many_rows_of_one_part_go_at_once a_table_whose_rows_come_and_go_stays_small a_kept_row_is_as_it_went rows_of_pending_commits_and_the_row_of_unknown_keys_stay a_row_goes_when_its_time_is_over_by_a_clock_that_never_goes_back a_table_with_both_policies_removes_by_both ages_go_with_a_dump rows_that_are_loaded_while_gradients_accumulate_may_go rows_go_whether_changes_are_noted_or_not a_kept_row_has_the_score_that_it_went_with);
    };
    (@ $maker:expr, $attributes:tt $($name:ident)*) => { $($crate::expiry_suite!(@one $maker, $attributes $name);)* };
    (@one $maker:expr, [$(#[$attribute:meta])?] $name:ident) => {
        #[test]
        $(#[$attribute])?
        fn $name() {
            $crate::common::expiry::$name(&$maker);
        }
    };
}

/// A test of each function of [`increments`], on what `$maker` makes.
#[macro_export]
macro_rules! increments_suite {
    ($maker:expr $(, #[$attribute:meta])?) => {
        $crate::increments_suite!(@ $maker, [$(#[$attribute])?] a_chain_loads_as_the_whole_dump_would a_frozen_dump_is_of_its_step_whatever_comes_later an_increment_has_what_has_changed_and_no_more rows_that_the_first_lookup_of_a_table_removes_are_known a_merge_of_a_chain_leaves_rows_that_went_from_it an_optimizer_without_states_changes_no_row nothing_of_an_erased_row_is_left_after_compaction);
    };
    (@ $maker:expr, $attributes:tt $($name:ident)*) => { $($crate::increments_suite!(@one $maker, $attributes $name);)* };
    (@one $maker:expr, [$(#[$attribute:meta])?] $name:ident) => {
        #[test]
        $(#[$attribute])?
        fn $name() {
            $crate::common::increments::$name(&$maker);
        }
    };
}
