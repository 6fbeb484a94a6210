//! Sights of keys without a row by the lookups of a commit.

use std::collections::{HashMap, HashSet};

use crate::error::Result;
use crate::host::push::SavedTable;
use crate::host::table::HostTable;
use crate::key::Key;
use crate::memory;
use crate::policy::admission::Admission;

const WHAT: &str = "the sights of keys without a row";
/// Admits every key at once.
const EVERY: Admission = Admission::Probability { probability: 1.0 };

/// Counts the keys without a row of these lookups, if the table has a policy that counts.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory).
pub(crate) fn count_sights(table: &mut HostTable, lookups: &[&SavedTable]) -> Result<()> {
    let Some(policy) = table.admitter.as_ref().map(|admitter| admitter.policy) else { return Ok(()) };
    if !policy.counts() {
        return Ok(());
    }
    let seen = sights(table, policy, lookups)?;
    table.admitter.as_mut().map_or(Ok(()), |admitter| admitter.count(seen.into_iter()))
}

/// Returns the number of distinct keys of these lookups that a commit would insert if it came now. Changes nothing.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory).
pub(crate) fn num_admitted(table: &HostTable, lookups: &[&SavedTable]) -> Result<usize> {
    let policy = table.admitter.as_ref().map_or(EVERY, |admitter| admitter.policy);
    let mut counts: HashMap<Key, u64> = HashMap::new();
    for (key, sights) in sights(table, policy, lookups)? {
        counts.try_reserve(1).map_err(|_| memory::missing::<(Key, u64)>(2 * counts.len(), WHAT))?;
        *counts.entry(key).or_default() += sights;
    }
    Ok(counts.into_iter().filter(|&(key, sights)| table.admits(key, sights)).count())
}

/// The keys of lookups that have no row, each with its sights. A key that several lookups have may come several times.
fn sights(table: &HostTable, policy: Admission, lookups: &[&SavedTable]) -> Result<Vec<(Key, u64)>> {
    let (mut seen, mut all) = (HashSet::new(), Vec::new());
    let is_once = !policy.counts_ids() && lookups.len() > 1;
    for (key, num_ids) in lookups.iter().flat_map(|saved| saved.absent_keys()) {
        if !table.is_absent(key) {
            continue;
        }
        if is_once {
            seen.try_reserve(1).map_err(|_| memory::missing::<Key>(2 * seen.len(), WHAT))?;
            if !seen.insert(key) {
                continue;
            }
        }
        memory::push(&mut all, (key, policy.sights(num_ids)), WHAT)?;
    }
    Ok(all)
}
