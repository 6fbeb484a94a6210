//! Rows that go because training has not used them for long.

use super::table::HostTable;
use crate::contract::departures::Reason;
use crate::contract::table::Outcomes;
use crate::error::Result;
use crate::key::Key;
use crate::memory;
use crate::policy::clock;
use crate::policy::sweep::Rank;
use crate::policy::time_to_live::Part;
use crate::store::arena::RecordNumber;

/// How many entries are prefetched ahead.
const AHEAD: usize = 16;
const WHAT: &str = "the rows whose time to live is over";

impl HostTable {
    /// Ends a step by a commit: removes the rows whose time to live is over, of the part of the keys that is due.
    pub(crate) fn expire(&mut self, commit: u64) {
        let Some(evictor) = &mut self.evictor else { return };
        evictor.commits.newest = commit;
        let Some(time_to_live) = self.config.time_to_live else { return };
        let (lifetime, now) = (time_to_live.lifetime, clock::now());
        let newest = lifetime.newest_past(commit, now, &evictor.commits.times);
        lifetime.note(commit, now, &mut evictor.commits.times);
        let due = lifetime.part_due(self.step, self.config.seed).filter(|_| self.config.trainable);
        let (Some(newest), Some(part)) = (newest, due) else { return };
        // Rows of commits whose gradients were not applied yet stay.
        let newest = newest.min(evictor.commits.settled);
        // Without memory for a list of these rows, they stay until their part is due again.
        if let Ok(expired) = self.remove_older(part, newest) {
            self.note(Outcomes { expired, ..Outcomes::default() }, 0);
        }
    }

    /// Removes the rows of a part that no commit after `newest` has trained. Returns how many went.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory). Nothing has changed then.
    fn remove_older(&mut self, part: Part, newest: u64) -> Result<u64> {
        let Some(evictor) = &mut self.evictor else { return Ok(0) };
        evictor.begin();
        let out_of_vocabulary = self.config.out_of_vocabulary_key;
        let mut entries: Vec<(Key, RecordNumber)> = Vec::new();
        let mut listed = Ok(());
        self.index.for_each_ending(part.ending, part.bits, |key, record| {
            if listed.is_ok() {
                listed = memory::push(&mut entries, (key, record), WHAT);
            }
        });
        listed?;
        let mut going: Vec<(Rank, RecordNumber)> = Vec::new();
        for (place, &(key, record)) in entries.iter().enumerate() {
            if let Some(&(_, later)) = entries.get(place + AHEAD) {
                evictor.scores.prefetch(later);
            }
            let used = evictor.scores.get(record);
            if used.commit <= newest && Some(key) != out_of_vocabulary {
                memory::push(&mut going, (Rank { score: used.score, key }, record), WHAT)?;
            }
        }
        if going.is_empty() {
            return Ok(0);
        }
        if self.config.keeps_expired() {
            going.sort_unstable_by_key(|(rank, _)| *rank);
        }
        self.remove(Reason::Expired, &going)?;
        Ok(going.len() as u64)
    }
}
