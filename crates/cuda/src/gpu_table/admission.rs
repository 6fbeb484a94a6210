//! Which new keys of training get a row. The host counts the keys without one, in the commits, which wait for the device anyway.

use std::collections::HashSet;

use sok_core::contract::table::{Insertion, TableConfig};
use sok_core::error::Result;
use sok_core::host::admission::Admitter;
use sok_core::key::Key;

use super::GpuTable;

/// Decides which keys without a row get one.
pub(crate) struct Admission {
    pub admitter: Admitter,
    /// Number of the step in progress, from 1, as far as the host knows: reports of later commits were not read.
    pub step: u64,
}

impl Admission {
    /// `None` if the table admits all keys.
    pub fn new(config: &TableConfig) -> Result<Option<Box<Admission>>> {
        let new = |policy| Ok(Box::new(Admission { admitter: Admitter::new(policy)?, step: 1 }));
        config.admission.map(new).transpose()
    }

    /// Ends the step in progress.
    pub fn end_step(&mut self) {
        self.admitter.end_step(self.step);
        self.step += 1;
    }
}

impl GpuTable {
    /// Returns when a lookup of this table inserts. With an admission policy a commit inserts, since it knows all sights of a step.
    pub(crate) fn own_insertion(&self, insertion: Insertion, save: bool) -> Insertion {
        match insertion {
            Insertion::AtLookup if self.admission.is_some() && save => Insertion::AtCommit,
            Insertion::AtLookup if self.admission.is_some() => Insertion::Never,
            _ => insertion,
        }
    }

    /// Whether a key without a row gets one now, after so many more sights.
    pub(crate) fn admits(&self, key: Key, more: u64) -> bool {
        let Some(Admission { admitter, step }) = self.admission.as_deref() else { return true };
        admitter.admits(self.config.seed, key, more, *step)
    }

    /// Whether keys without a row are counted.
    pub(crate) fn counts_sights(&self) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.admitter.policy.counts())
    }

    /// Adds sights of distinct keys, of which those with a row are left out. The device must be idle.
    ///
    /// # Errors
    /// [`Error::Memory`](sok_core::Error::Memory), [`Error::Device`](sok_core::Error::Device).
    pub(crate) fn count_sights(&mut self, mut seen: Vec<(Key, u64)>) -> Result<()> {
        let keys: Vec<Key> = seen.iter().map(|(key, _)| *key).collect();
        let room = self.room(keys.len(), 0)?;
        let absent: HashSet<Key> = self.absent(&room, &keys)?.into_iter().collect();
        seen.retain(|(key, _)| absent.contains(key));
        self.admission.as_mut().map_or(Ok(()), |admission| admission.admitter.count(seen))
    }

    /// Forgets the counts of keys.
    pub(crate) fn forget_sights(&mut self, keys: &[Key]) {
        if let Some(admission) = &mut self.admission {
            admission.admitter.forget(keys.iter().copied());
        }
    }
}
