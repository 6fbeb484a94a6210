//! A table on the host beside its model, through the methods of `Table`.

use crate::common::random;
use crate::common::strategies::{config, table_or_rule_op};
use crate::common::table::ModelTable;
use proptest::prelude::*;
use sok_core::contract::table::{Table, TableConfig};
use sok_core::host::table::HostTable;

fn host(config: TableConfig) -> Box<dyn Table> {
    Box::new(HostTable::new(config).unwrap())
}

table_suite!(host);

proptest! {
    #![proptest_config(random(400))]

    #[test]
    fn any_list_of_calls_leaves_a_table_as_its_model(config in config(), ops in prop::collection::vec(table_or_rule_op(), 1..25)) {
        let (mut table, mut model) = (host(config.clone()), ModelTable::new(config));
        for op in ops {
            op.run(&mut model, &mut [&mut *table]);
        }
    }
}
