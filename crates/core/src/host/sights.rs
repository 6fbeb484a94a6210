//! Sights of keys without a row by the lookups of a commit.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::error::Result;
use crate::host::push::SavedTable;
use crate::host::table::HostTable;
use crate::key::Key;
use crate::memory;
use crate::policy::admission::Admission;

const WHAT: &str = "the sights of keys without a row";

/// Counts the keys without a row of these lookups, if the table has a policy that counts.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory).
pub(crate) fn count_sights(table: &mut HostTable, lookups: &[&SavedTable]) -> Result<()> {
    if !policy_of(table).is_some_and(Admission::counts) {
        return Ok(());
    }
    let seen = sights(table, lookups)?;
    table.admitter.as_mut().map_or(Ok(()), |admitter| admitter.count(seen))
}

/// Returns the number of distinct keys of these lookups that a commit would insert if it came now. Changes nothing.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory).
pub(crate) fn num_admitted(table: &HostTable, lookups: &[&SavedTable]) -> Result<usize> {
    let seen = sights(table, lookups)?;
    Ok(seen.into_iter().filter(|&(key, sights)| table.admits(key, sights)).count())
}

fn policy_of(table: &HostTable) -> Option<Admission> {
    table.admitter.as_ref().map(|admitter| admitter.policy)
}

/// The distinct keys of lookups that have no row, each with its sights.
fn sights(table: &HostTable, lookups: &[&SavedTable]) -> Result<Vec<(Key, u64)>> {
    let sights_of = |num_ids| policy_of(table).map_or(1, |policy| policy.sights(num_ids));
    let is_new = |(key, _): &(Key, u64)| table.is_absent(*key);
    let keys = lookups.iter().flat_map(|saved| saved.absent_keys()).filter(is_new);
    if lookups.len() == 1 {
        return memory::collect(keys.map(|(key, num_ids)| (key, sights_of(num_ids))), WHAT);
    }
    let is_once = !policy_of(table).is_some_and(Admission::counts_ids);
    let mut all: HashMap<Key, u64> = HashMap::new();
    for (key, num_ids) in keys {
        all.try_reserve(1).map_err(|_| memory::missing::<(Key, u64)>(2 * all.len(), WHAT))?;
        match all.entry(key) {
            Entry::Vacant(entry) => _ = entry.insert(sights_of(num_ids)),
            Entry::Occupied(entry) if !is_once => *entry.into_mut() += sights_of(num_ids),
            Entry::Occupied(_) => {}
        }
    }
    memory::collect(all, WHAT)
}
