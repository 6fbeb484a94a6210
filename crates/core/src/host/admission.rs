//! Which ids a table takes, and which new keys it has room for.

use crate::contract::batch::Feature;
use crate::contract::table::{CheckMode, OutOfVocabulary, Outcomes};
use crate::error::{Error, Result};
use crate::host::absent::Absent;
use crate::host::features::{Role, role};
use crate::host::table::HostTable;
use crate::key::{Key, hash};
use crate::memory;
use crate::store::arena::{NO_RECORD, RecordNumber};

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

/// Distinct keys that a training batch would insert, in order of first occurrence. `None` if they fit in any case.
pub fn new_keys(table: &HostTable, features: &[&Feature]) -> Result<Option<Vec<Key>>> {
    let capacity = table.config.capacity();
    let positions: usize = features.iter().map(|f| f.keys.len()).sum();
    if table.index.len() as u64 + positions as u64 <= capacity {
        return Ok(None);
    }
    let mut seen = memory::Seen::default();
    let mut new = Vec::new();
    for feature in features {
        for position in 0..feature.keys.len() {
            let key = feature.keys.get(position);
            let is_active = matches!(role(feature, &table.config, position), Role::Active);
            if is_active && table.index.find(hash(key), key) == NO_RECORD && seen.insert(key)? {
                memory::push(&mut new, key, "the keys of a call")?;
            }
        }
    }
    Ok(Some(new))
}

/// # Errors
/// [`Error::TableFull`] if the table's check mode is to raise.
pub fn check_capacity(table: &HostTable, new_keys: &[Key]) -> Result<()> {
    let (len, capacity) = (table.index.len() as u64, table.config.capacity());
    let refused = (len + new_keys.len() as u64).saturating_sub(capacity);
    if refused == 0 || table.config.check_mode != CheckMode::Raise {
        return Ok(());
    }
    Err(Error::TableFull { table: table.config.name.clone(), refused, len, capacity })
}

/// Inserts the new keys that fit, and counts the others as refused. The lookup itself then inserts nothing.
pub fn admit(table: &mut HostTable, new_keys: &[Key]) -> Result<Outcomes> {
    let room = table.config.capacity().saturating_sub(table.index.len() as u64) as usize;
    let admitted = new_keys.len().min(room);
    for &key in &new_keys[..admitted] {
        table.insert_absent(key, true)?;
    }
    Ok(Outcomes {
        inserted: admitted as u64,
        refused: (new_keys.len() - admitted) as u64,
        ..Outcomes::default()
    })
}

/// Inserts keys that a lookup did not find, as far as there is room. Returns the record of each.
pub fn insert(table: &mut HostTable, absent: &Absent) -> Result<(Vec<RecordNumber>, Outcomes)> {
    let what = "the keys of a step";
    let new = memory::collect(absent.keys.iter().copied().filter(|key| table.is_absent(*key)), what)?;
    let mut records = memory::with_capacity(absent.keys.len(), what)?;
    let outcomes = admit(table, &new)?;
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
