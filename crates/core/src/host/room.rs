//! Which ids are in a table's vocabulary, and which new keys it has room for.

use crate::contract::batch::Feature;
use crate::contract::table::{CheckMode, Insertion, OutOfVocabulary, Outcomes};
use crate::error::{Error, Result};
use crate::host::absent::Absent;
use crate::host::features::{FeatureOutput, Mode, Role, role};
use crate::host::lookup::Looked;
use crate::host::table::HostTable;
use crate::key::{Key, hash};
use crate::memory;
use crate::store::arena::RecordNumber;
use crate::store::record_set::RecordSet;

/// # Errors
/// [`Error::OutOfVocabulary`] for an id outside a static table. Changes nothing.
pub fn check_vocabulary(table: &HostTable, feature: &Feature) -> Result<()> {
    let config = &table.config;
    let Some(size) = config.vocabulary_size else { return Ok(()) };
    if config.out_of_vocabulary == OutOfVocabulary::Zeros {
        return Ok(());
    }
    let outside = |&position: &usize| {
        let key = feature.keys.get(position);
        key >= size && feature.padding_key != Some(key)
    };
    match (0..feature.keys.len()).find(outside) {
        None => Ok(()),
        Some(position) => Err(Error::OutOfVocabulary {
            table: config.name.clone(),
            feature: Some(feature.name.to_string()),
            id: feature.keys.get(position) as i64,
            last: size - 1,
        }),
    }
}

/// The ids of features that insert and get gradients.
fn active_keys<'a>(table: &'a HostTable, features: &'a [Feature]) -> impl Iterator<Item = Key> + 'a {
    features.iter().flat_map(move |feature| {
        let positions = 0..feature.keys.len();
        let is_active = |&position: &usize| matches!(role(feature, &table.config, position), Role::Active);
        positions.filter(is_active).map(|position| feature.keys.get(position))
    })
}

/// Distinct keys that a training batch would insert, in order of first occurrence.
fn new_keys(table: &HostTable, features: &[Feature]) -> Result<Vec<Key>> {
    distinct(active_keys(table, features).filter(|key| table.is_absent(*key)))
}

/// Adds the records of keys to `used`, the records that a sweep must not remove.
pub fn add_used(table: &HostTable, keys: impl Iterator<Item = Key>, used: &mut RecordSet) {
    keys.for_each(|key| used.insert(table.index.find(hash(key), key)));
}

/// Checks that a table has room for this number of new keys, or can make it. `used`: adds the records that a sweep must not remove.
/// Changes nothing.
///
/// # Errors
/// [`Error::TableFull`] if the table's check mode is to raise.
pub fn check_capacity(
    table: &HostTable,
    num_new: usize,
    used: impl Fn(&HostTable, &mut RecordSet),
) -> Result<()> {
    let needed = table.num_too_many(num_new as u64);
    if needed == 0 || table.config.check_mode != CheckMode::Raise {
        return Ok(());
    }
    let removable = table.removable(&|set| used(table, set))?;
    let refused = needed.saturating_sub(removable.map_or(0, |removable| removable.len())).min(num_new as u64);
    if refused == 0 {
        return Ok(());
    }
    let (len, capacity) = (table.index.len() as u64, table.config.capacity());
    Err(Error::TableFull { table: table.config.name.clone(), refused, len, capacity })
}

/// Calls `lookup` for a table. If the new keys do not fit, undoes the lookup, removes rows, and calls `lookup` again. Most calls fit, so
/// the new keys are not listed first.
pub fn lookup_with_room(
    table: &mut HostTable,
    outputs: &mut [FeatureOutput],
    mode: Mode,
    mut lookup: impl FnMut(&mut HostTable, &mut [FeatureOutput], Mode) -> Result<Looked>,
) -> Result<Looked> {
    if !mode.inserts() || table.room() > 0 {
        let looked = lookup(table, outputs, mode)?;
        if !table.journal.is_full {
            return Ok(looked);
        }
        table.undo();
        table.begin();
    }
    let features: Vec<Feature> = outputs.iter().map(|output| output.feature).collect();
    let new = new_keys(table, &features)?;
    let used = |table: &HostTable, used: &mut _| add_used(table, active_keys(table, &features), used);
    check_capacity(table, new.len(), used)?;
    let inserted = insert_with_room(table, &new, used)?;
    let mut looked = lookup(table, outputs, Mode { insertion: Insertion::Never, ..mode })?;
    // Keys that the call has just inserted are hits of the lookup.
    looked.outcomes.hit = looked.outcomes.hit.saturating_sub(inserted.inserted);
    looked.outcomes += inserted;
    Ok(looked)
}

/// Removes rows to make room for new keys, then inserts the keys that fit, as [`insert_fitting`].
pub fn insert_with_room(
    table: &mut HostTable,
    new_keys: &[Key],
    used: impl Fn(&HostTable, &mut RecordSet),
) -> Result<Outcomes> {
    let evicted = table.make_room(new_keys.len() as u64, &used)?;
    Ok(Outcomes { evicted, ..insert_fitting(table, new_keys)? })
}

/// Inserts the new keys that fit, and counts the others as refused.
pub fn insert_fitting(table: &mut HostTable, new_keys: &[Key]) -> Result<Outcomes> {
    let num_fitting = new_keys.len().min(table.room() as usize);
    for &key in &new_keys[..num_fitting] {
        table.insert_absent(key, true)?;
    }
    Ok(Outcomes {
        inserted: num_fitting as u64,
        refused: (new_keys.len() - num_fitting) as u64,
        ..Outcomes::default()
    })
}

/// Inserts keys that a lookup did not find. Keys that the table does not admit or has no room for get no row. Returns the record of each key.
pub fn insert(table: &mut HostTable, absent: &Absent) -> Result<(Vec<RecordNumber>, Outcomes)> {
    let what = "the keys of a step";
    let mut new = memory::collect(absent.keys.iter().copied().filter(|key| table.is_absent(*key)), what)?;
    let mut records = memory::with_capacity(absent.keys.len(), what)?;
    let num_new = new.len();
    new.retain(|key| table.admits(*key, 0));
    let filtered = (num_new - new.len()) as u64;
    let outcomes = Outcomes { filtered, ..insert_fitting(table, &new)? };
    records.extend(absent.keys.iter().map(|&key| table.index.find(hash(key), key)));
    Ok((records, outcomes))
}

/// Distinct values, in order of first occurrence.
pub fn distinct<T: Copy + Eq + std::hash::Hash>(values: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let (mut seen, mut all) = (memory::Seen::default(), Vec::new());
    for value in values {
        if seen.insert(value)? {
            memory::push(&mut all, value, "the keys of a call")?;
        }
    }
    Ok(all)
}
