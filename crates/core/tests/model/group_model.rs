//! A group of tables on the host beside its model, with one thread and with many.

use std::sync::LazyLock;

use crate::common::large::run_large;
use crate::common::random;
use crate::common::steps::{op, run_all};
use crate::common::strategies::{config, update};
use crate::common::subject::{HostSubject, Maker, Subject};
use proptest::prelude::*;
use sok_core::contract::table::TableConfig;
use sok_core::pool::Pool;

static POOLS: LazyLock<[Pool; 4]> = LazyLock::new(|| [1, 2, 3, 7].map(|threads| Pool::new(threads).unwrap()));

/// A group for each number of threads; of the first is what is asked of one alone.
const HOST: Maker = Maker { make: all_threads, tells_late: false, dims: &[], has_modes: true };
const THREE_THREADS: Maker = Maker { make: three_threads, tells_late: false, dims: &[], has_modes: true };

fn all_threads(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    POOLS.iter().map(|pool| Box::new(HostSubject::new(configs, pool)) as Box<dyn Subject>).collect()
}

fn three_threads(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(HostSubject::new(configs, &POOLS[2]))]
}

suite!(HOST);

proptest! {
    #![proptest_config(random(300))]

    #[test]
    fn any_list_of_steps_leaves_a_group_as_its_model(
        configs in prop::collection::vec(config(), 1..5),
        update in update(),
        ops in prop::collection::vec(op(), 1..30),
    ) {
        run_all(&configs, update, &ops, &THREE_THREADS);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 64, ..random(24) })]

    #[test]
    fn calls_that_go_to_threads_give_the_same_bits_with_any_number_of_them(seed in any::<u64>()) {
        run_large(seed, &HOST);
    }
}

#[test]
#[ignore = "takes minutes"]
fn soak_ten_million_ids_with_every_mix_of_policies() {
    crate::common::soak::ten_million_ids(&THREE_THREADS);
}
