//! Rows with a time to live.

use crate::common::expiry::expiring;
use crate::common::programs::POOLS;
use crate::common::subject::{HostSubject, Maker, Subject};
use sok_core::contract::table::{Table, TableConfig};
use sok_core::host::table::HostTable;
use sok_core::policy::time_to_live::Lifetime;

const HOST: Maker = Maker { make: on_host, tells_late: false, dims: &[], has_modes: true };

fn on_host(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(HostSubject::new(configs, &POOLS[0]))]
}

expiry_suite!(HOST);

#[test]
fn wrong_times_are_refused() {
    let error = |config: TableConfig| HostTable::new(config).err().unwrap().to_string();
    for lifetime in [Lifetime::Steps(0), Lifetime::Milliseconds(0)] {
        assert!(error(expiring(lifetime)).contains("`time_to_live` must be at least one step"));
    }
    let fixed = TableConfig { vocabulary_size: Some(9), ..expiring(Lifetime::Steps(2)) };
    assert!(error(fixed).contains("`time_to_live` is for dynamic tables"));
    let without = TableConfig { time_to_live: None, ..expiring(Lifetime::Steps(2)) };
    let mut table = HostTable::new(without).unwrap();
    assert!(table.take_evicted().unwrap_err().to_string().contains("does not keep the rows"));
}
