//! Dumps with increments.

use std::fs;

use crate::common::Dice;
use crate::common::increments::Trained;
use crate::common::programs::POOLS;
use crate::common::sharded::Directory;
use crate::common::strategies::plain_config;
use crate::common::subject::{HostSubject, Maker, Subject};
use sok_core::checkpoint::{
    After, DumpOptions, DumpReader, LoadMode, LoadOptions, Manifest, Target, TargetBinding, compact, dump,
    read_manifest,
};
use sok_core::contract::table::{Contents, TableConfig};
use sok_core::error::{Error, Result};
use sok_core::host::table::HostTable;

const HOST: Maker = Maker { make: on_host, tells_late: false, dims: &[], has_modes: true };

fn on_host(configs: &[TableConfig]) -> Vec<Box<dyn Subject>> {
    vec![Box::new(HostSubject::new(configs, &POOLS[1]))]
}

increments_suite!(HOST);

#[test]
fn what_does_not_belong_to_a_chain_is_refused() {
    let directory = Directory::new("foreign");
    let path = &directory.0;
    let mut dice = Dice(7);
    let mut trained = Trained::new(&HOST);
    assert!(matches!(trained.increment(path, None), Err(Error::Io { .. })));
    trained.train(&mut dice);
    trained.dump(path);
    let unknown = |result: Result<Manifest>| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains("has no record of its changes since that dump"), "{error}");
    };
    unknown(Trained::new(&HOST).increment(path, None));
    trained.train(&mut dice);
    trained.increment(path, None).unwrap();
    let error = trained.increment(path, Some(77)).unwrap_err().to_string();
    assert!(error.contains("Its parts have the steps [1, 2]. Received: 77"), "{error}");
    // Other states, and other tables.
    let options =
        DumpOptions { after: Some(After::Newest), step: 1, states: false, ..DumpOptions::default() };
    let error = dump(path, &trained.subject.tables(), &[], &options).unwrap_err();
    assert!(matches!(error, Error::DumpMismatch { .. }), "{error}");
    let options = DumpOptions { states: true, ..options };
    let error = dump(path, &trained.subject.tables(), &[], &options).unwrap_err().to_string();
    assert!(
        error.contains("the dump holds the variables of a model, so an increment must be of the model"),
        "{error}"
    );
    let error = dump(path, &trained.subject.tables()[1..], &[], &options).unwrap_err().to_string();
    assert!(error.contains("an increment must have the tables of the dump"), "{error}");
    // A cleared table has lost track.
    trained.subject.table_mut(0).clear().unwrap();
    unknown(trained.increment(path, None));

    // Parts that are missing, in the wrong place, or of another dump.
    trained.dump(path);
    for _ in 0..3 {
        trained.train(&mut dice);
        trained.increment(path, None).unwrap();
    }
    let whole = read_manifest(path).unwrap();
    let refused_with = |change: &dyn Fn(&mut Manifest), expected: &str| {
        let mut manifest = whole.clone();
        change(&mut manifest);
        fs::write(path.join("manifest.json"), rendered(&manifest)).unwrap();
        let error = read_manifest(path).unwrap_err();
        assert!(matches!(error, Error::CorruptDump { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    let refused = |change: &dyn Fn(&mut Manifest), number: usize| {
        refused_with(change, &format!("increment {number} must follow the part with checksum"));
    };
    refused(&|manifest| drop(manifest.increments.remove(0)), 1);
    refused(&|manifest| drop(manifest.increments.remove(1)), 2);
    refused(&|manifest| manifest.increments.swap(1, 2), 2);
    refused(&|manifest| manifest.increments[0].step += 1, 2);
    let last = |manifest: &mut Manifest, total| manifest.increments[2].tables[0].total_rows = Some(total);
    refused_with(&|manifest| last(manifest, 1 << 60), "rows after increment 3, as its files have");
    refused_with(&|manifest| manifest.increments[2].arrays = None, "increment 3 must have arrays");
    // Fewer rows than there are is found at the load.
    let mut manifest = whole.clone();
    last(&mut manifest, 1);
    fs::write(path.join("manifest.json"), rendered(&manifest)).unwrap();
    let error = Trained::new(&HOST).load(path, LoadMode::Replace).unwrap_err();
    assert!(error.to_string().contains("the parts of the dump must hold 1 rows together"), "{error}");
}

#[test]
fn a_table_that_was_loaded_under_another_name_does_not_go_on() {
    let directory = Directory::new("other");
    let mut subject = HostSubject::new(&[plain_config("a", 2)], &POOLS[0]);
    subject.table_mut(0).assign(&[1], &[1.0; 2], true).unwrap();
    dump(&directory.0, &subject.tables(), &[], &DumpOptions::default()).unwrap();
    for name in ["a", "b"] {
        let mut table = HostTable::new(plain_config(name, 2)).unwrap();
        let target =
            Target { name: "a", table: &mut table, binding: TargetBinding::Free(None), owners: None };
        let reader = DumpReader::open(&directory.0).unwrap();
        reader.load(&mut [target], &LoadOptions::default(), None).unwrap();
        assert_eq!(table.epoch_of(reader.manifest().snapshot()).is_some(), name == "a");
    }
}

/// The bytes of a manifest with the right checksum.
fn rendered(manifest: &Manifest) -> Vec<u8> {
    let body = serde_json::to_string_pretty(manifest).unwrap();
    let checksum = sok_core::checkpoint::Checksum::of(body.as_bytes());
    format!("{{\"body\": {body}, \"xxh3\": \"{checksum}\"}}\n").into_bytes()
}

#[test]
fn forged_dims_and_totals_are_errors_of_a_compaction() {
    let directory = Directory::new("forged");
    let mut subject = HostSubject::new(&[plain_config("a", 2)], &POOLS[0]);
    subject.table_mut(0).assign(&[1, 2], &[1.0; 4], true).unwrap();
    let snapshot = dump(&directory.0, &subject.tables(), &[], &DumpOptions::default()).unwrap().snapshot();
    subject.table_mut(0).track(snapshot).unwrap();
    subject.table_mut(0).assign(&[2, 3], &[2.0; 4], true).unwrap();
    let options = DumpOptions { after: Some(After::Newest), ..DumpOptions::default() };
    let whole = dump(&directory.0, &subject.tables(), &[], &options).unwrap();
    let compacted = |manifest: &Manifest| {
        fs::write(directory.0.join("manifest.json"), rendered(manifest)).unwrap();
        compact(&directory.0).map(drop).map_err(|error| error.to_string())
    };
    for total in [1, 2, 4] {
        let mut manifest = whole.clone();
        manifest.increments[0].tables[0].total_rows = Some(total);
        let error = compacted(&manifest).unwrap_err();
        assert!(error.contains(&format!("must hold {total} rows together")), "{error}");
    }
    for dim in [0, 1 << 50, usize::MAX / 4] {
        let mut manifest = whole.clone();
        let (base, increment) = (&mut manifest.tables[0], &mut manifest.increments[0].tables[0]);
        for entry in [base, increment] {
            (entry.dim, entry.num_rows, entry.total_rows) = (dim, 0, entry.total_rows.map(|_| 0));
            entry.shards.clear();
        }
        let error = compacted(&manifest).unwrap_err();
        assert!(error.contains("the dim of table `a` must be between 1 and 1048576"), "{error}");
    }
    compacted(&whole).unwrap();
}
