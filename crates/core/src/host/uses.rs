//! Uses of rows by lookups.

use crate::host::eviction::{Evictor, InProgress};
use crate::host::push::{SavedLookup, SavedTable};
use crate::host::table::HostTable;
use crate::key::{Key, hash};
use crate::simd::prefetch;
use crate::store::arena::NO_RECORD;
use crate::store::record_set::RecordSet;
use crate::store::scores::{Scores, Use};

/// How many uses are prefetched ahead.
const AHEAD: usize = 16;

impl InProgress for SavedLookup {
    fn add_rows(&self, number: usize, generation: u64, rows: &mut RecordSet) {
        let is_own = |saved: &&SavedTable| saved.number == number && saved.generation == generation;
        let own = self.tables.iter().filter(|_| self.is_open()).filter(is_own);
        own.flat_map(SavedTable::runs)
            .flat_map(|(_, records)| records)
            .for_each(|&record| rows.insert(record));
    }
}

/// Counts a use of the rows of a lookup in the step in progress.
pub(crate) fn count_uses(table: &mut HostTable, saved: &SavedTable) {
    let step = table.step;
    if let Some(evictor) = &mut table.evictor {
        let Evictor { policy, scores, .. } = &mut **evictor;
        for_each_use(scores, saved, |used, num_ids| {
            used.score = policy.score_after_use(used.score, step, num_ids);
        });
        saved.runs().for_each(|(_, records)| table.touch(records));
    }
}

/// As a commit with this number takes a push of a lookup: keeps its rows in use until the gradients are applied. `is_first`: whether
/// their use is counted, because no commit has taken a push of the lookup before.
pub(crate) fn take_uses(table: &mut HostTable, saved: &SavedTable, commit: u64, is_first: bool) {
    let step = table.step;
    if let Some(evictor) = &mut table.evictor {
        let Evictor { policy, scores, .. } = &mut **evictor;
        for_each_use(scores, saved, |used, num_ids| {
            if is_first {
                used.score = policy.score_after_use(used.score, step, num_ids);
            }
            used.commit = commit;
        });
        saved.runs().for_each(|(_, records)| table.touch(records));
    }
}

/// Gives rows the highest of the scores that come for their keys. `given`: by lookup, keys, which may come several times, and scores. Keys
/// without a row are passed over.
pub(crate) fn give_scores(table: &mut HostTable, given: &[&[(Key, u64)]]) {
    let HostTable { evictor: Some(evictor), index, changes, .. } = table else { return };
    let scores = &mut evictor.scores;
    let all = || given.iter().flat_map(|of_lookup| of_lookup.chunks(AHEAD));
    let find = |scores: &Scores, some: &[(Key, u64)]| {
        some.iter().for_each(|(key, _)| index.prefetch(hash(*key)));
        let mut records = [NO_RECORD; AHEAD];
        for (record, (key, _)) in records.iter_mut().zip(some) {
            *record = index.find(hash(*key), *key);
            if let Some(used) = scores.uses().get(*record as usize) {
                prefetch(used);
            }
        }
        records
    };
    for some in all() {
        for record in find(scores, some).into_iter().filter(|record| *record != NO_RECORD) {
            scores.set_score(record, 0);
            if let Some(changes) = changes {
                changes.touch(&[record]);
            }
        }
    }
    for some in all() {
        let records = find(scores, some);
        for (&record, (_, given)) in records.iter().zip(some).filter(|(record, _)| **record != NO_RECORD) {
            let used = scores.use_mut(record);
            used.score = used.score.max(*given);
        }
    }
}

fn for_each_use(scores: &mut Scores, saved: &SavedTable, mut visit: impl FnMut(&mut Use, u64)) {
    for (runs, records) in saved.runs() {
        for (i, (&record, ids)) in records.iter().zip(runs.ranges()).enumerate() {
            if let Some(later) = records.get(i + AHEAD).and_then(|&later| scores.uses().get(later as usize)) {
                prefetch(later);
            }
            if record != NO_RECORD {
                visit(scores.use_mut(record), saved.num_ids(runs, ids));
            }
        }
    }
}
