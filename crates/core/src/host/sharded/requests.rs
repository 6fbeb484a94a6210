//! The distinct ids of a call, which are sent to the ranks that own them.

use crate::contract::batch::{Feature, Keys};
use crate::contract::table::TableConfig;
use crate::error::Result;
use crate::exchange::buckets::{Buckets, Owners};
use crate::host::features::{FeatureOutput, Role, is_plain, role};
use crate::host::find::{Distinct, NO_MARK, NoConsumer, Search, Source};
use crate::host::pooling::{OUTSIDE, PADDING};
use crate::key::Key;
use crate::memory;
use crate::store::arena::{Addresses, RecordNumber};
use crate::store::index::Index;
use crate::store::region::Region;

const WHAT: &str = "the ids of a call";
/// Known keys are forgotten when there are more than this, and many more than a call has.
const MANY_KEYS: usize = 1 << 20;

/// Numbers keys. Hot keys stay from call to call, so that they need not be inserted again.
struct KnownKeys {
    index: Index,
    /// By number; 0 is no key's.
    keys: Vec<Key>,
}

/// Gives the next number to a new key.
struct NextNumber<'a>(&'a mut Vec<Key>);

impl Source for NextNumber<'_> {
    #[inline(always)]
    fn addresses(&self) -> Addresses {
        Addresses::NONE
    }

    #[inline(always)]
    fn add(&mut self, key: Key) -> Result<RecordNumber> {
        memory::push(self.0, key, WHAT)?;
        Ok(self.0.len() as RecordNumber - 1)
    }
}

impl KnownKeys {
    fn new() -> Result<KnownKeys> {
        Ok(KnownKeys { index: Index::new(0)?, keys: vec![0] })
    }

    /// Writes the number of each key among the distinct ones to `marks`.
    fn number(
        &mut self,
        keys: &[Key],
        distinct: &mut Distinct,
        records: &mut [u32],
        marks: &mut [u32],
    ) -> Result<()> {
        let source = &mut NextNumber(&mut self.keys);
        let (keys, consumer) = (Keys::U64(keys), NoConsumer);
        Search { index: &mut self.index, source, keys, insert: true, distinct, records, marks, consumer }
            .start(true)
    }

    fn forget_if_many(&mut self, num_ids: usize) -> Result<()> {
        if self.keys.len() > MANY_KEYS.max(8 * num_ids) {
            *self = KnownKeys::new()?;
        }
        Ok(())
    }
}

/// Ids with their positions among all ids of a table's features.
#[derive(Default)]
struct Ids {
    keys: Vec<Key>,
    positions: Vec<u32>,
    records: Vec<u32>,
    marks: Vec<u32>,
}

impl Ids {
    fn start(&mut self) {
        self.keys.clear();
        self.positions.clear();
    }

    fn push(&mut self, key: Key, position: usize) -> Result<()> {
        memory::push(&mut self.keys, key, WHAT)?;
        memory::push(&mut self.positions, position as u32, WHAT)
    }

    /// Adds the ids at `positions` of a feature whose first one is number `start`.
    fn extend(&mut self, feature: &Feature, positions: std::ops::Range<usize>, start: usize) -> Result<()> {
        let before = self.keys.len();
        memory::resize(&mut self.keys, before + positions.len(), 0, WHAT)?;
        feature.keys.load(positions.start, &mut self.keys[before..]);
        memory::reserve(&mut self.positions, positions.len(), WHAT)?;
        self.positions.extend(positions.map(|position| (start + position) as u32));
        Ok(())
    }

    fn make_room(&mut self) -> Result<()> {
        memory::resize(&mut self.records, self.keys.len(), 0, WHAT)?;
        memory::resize(&mut self.marks, self.keys.len(), NO_MARK, WHAT)
    }
}

/// The ids of one table in this rank's calls.
pub struct Requests {
    pub owners: Owners,
    known: KnownKeys,
    /// By block of the batch.
    distinct: Vec<Distinct>,
    silent_distinct: Distinct,
    active: Ids,
    /// Ids of weight 0. Their rows are needed for the gradients of their weights alone.
    silent: Ids,
    /// Of each id: the row that it reads among those received, or a number that stands for no row.
    pub rows: Region<RecordNumber>,
    /// Of each id: which key its gradient is for, or [`NO_MARK`].
    pub marks: Region<u32>,
}

/// What is asked for a table in a call.
pub struct Request {
    /// Distinct in each block of the batch.
    pub keys: Buckets,
    /// Number of ids of each key.
    pub counts: Vec<u32>,
    /// The highest score of each key, as [`Scores::Sent`](crate::contract::batch::Scores::Sent), if a feature has scores.
    pub scores: Option<Vec<u64>>,
    /// Distinct keys that are only read.
    pub silent: Buckets,
    /// The place among `silent` of the key whose row stands for missing ones, if the table has one.
    pub out_of_vocabulary: Option<u32>,
}

impl Request {
    /// Number of rows that come back.
    pub fn num_rows(&self) -> usize {
        self.keys.len() + self.silent.len()
    }
}

impl Requests {
    /// `blocks`: in how many blocks a rank's batch is merged.
    pub fn new(owners: Owners, blocks: usize) -> Result<Requests> {
        Ok(Requests {
            owners,
            known: KnownKeys::new()?,
            distinct: (0..blocks).map(|_| Distinct::default()).collect(),
            silent_distinct: Distinct::default(),
            active: Ids::default(),
            silent: Ids::default(),
            rows: Region::new(0)?,
            marks: Region::new(0)?,
        })
    }

    pub fn num_bytes(&self) -> usize {
        let known = self.known.index.num_bytes() + self.known.keys.capacity() * size_of::<Key>();
        let distinct: usize = self.distinct.iter().map(Distinct::num_bytes).sum();
        known + distinct + self.rows.num_bytes() + self.marks.num_bytes()
    }

    /// Numbers the ids of a call. `reads_silent`: whether the rows of ids of weight 0 are needed.
    pub fn collect(
        &mut self,
        config: &TableConfig,
        features: &[FeatureOutput],
        reads_silent: bool,
    ) -> Result<Request> {
        let num_ids = features.iter().map(|output| output.feature.keys.len()).sum();
        self.known.forget_if_many(num_ids)?;
        self.rows.grow_amortized(num_ids)?;
        self.marks.grow_amortized(num_ids)?;
        let bounds = self.separate(config, features)?;
        self.active.make_room()?;
        // Block by block: the index remembers the number of a key in one block at a time.
        let (mut keys, mut counts, mut firsts) = (Vec::new(), Vec::new(), Vec::new());
        for (block, distinct) in self.distinct.iter_mut().enumerate() {
            let ids = bounds[block]..bounds[block + 1];
            distinct.start(ids.len())?;
            let Ids { keys: of_ids, records, marks, .. } = &mut self.active;
            let (of_ids, records) = (&of_ids[ids.clone()], &mut records[ids.clone()]);
            self.known.number(of_ids, distinct, records, &mut marks[ids.clone()])?;
            firsts.push(keys.len() as u32);
            memory::reserve(&mut keys, distinct.len(), WHAT)?;
            memory::reserve(&mut counts, distinct.len(), WHAT)?;
            let mut add = |(number, count): (RecordNumber, u32)| {
                keys.push(self.known.keys[number as usize]);
                counts.push(count);
            };
            if config.max_capacity.is_none() {
                distinct.iter().for_each(add);
            } else {
                number_by_first_occurrence(&mut marks[ids], distinct)?.into_iter().for_each(&mut add);
            }
        }
        let keys = Buckets::new(&keys, &self.owners)?;
        for (block, first) in firsts.into_iter().enumerate() {
            for id in bounds[block]..bounds[block + 1] {
                let place = keys.places()[(first + self.active.marks[id]) as usize];
                let position = self.active.positions[id] as usize;
                (self.rows[position], self.marks[position]) = (place + 1, place);
            }
        }
        let mut sorted = memory::filled(0, counts.len(), WHAT)?;
        keys.places().iter().zip(&counts).for_each(|(&place, &count)| sorted[place as usize] = count);
        let (silent, out_of_vocabulary) = self.collect_silent(config, reads_silent, keys.len())?;
        let scores = self.highest_scores(features, keys.len())?;
        Ok(Request { keys, counts: sorted, scores, silent, out_of_vocabulary })
    }

    fn highest_scores(&self, features: &[FeatureOutput], num_keys: usize) -> Result<Option<Vec<u64>>> {
        if features.iter().all(|output| output.feature.scores.is_none()) {
            return Ok(None);
        }
        let mut highest = memory::filled(0, num_keys, WHAT)?;
        let mut start = 0;
        for FeatureOutput { feature, .. } in features {
            let marks = &self.marks[start..start + feature.keys.len()];
            start += feature.keys.len();
            let Some(scores) = &feature.scores else { continue };
            for (position, &mark) in marks.iter().enumerate().filter(|(_, mark)| **mark != NO_MARK) {
                let highest: &mut u64 = &mut highest[mark as usize];
                *highest = (*highest).max(scores.sent(position));
            }
        }
        Ok(Some(highest))
    }

    /// Separates ids by their role, block by block. Returns where the active ids of each block start.
    fn separate(&mut self, config: &TableConfig, features: &[FeatureOutput]) -> Result<Vec<usize>> {
        self.active.start();
        self.silent.start();
        let blocks = self.distinct.len();
        let mut bounds = vec![0];
        for block in 0..blocks {
            let mut start = 0;
            for FeatureOutput { feature, .. } in features {
                let num_bags = feature.num_bags();
                let bags = num_bags * block / blocks..num_bags * (block + 1) / blocks;
                if !bags.is_empty() {
                    let positions = feature.bag(bags.start).start..feature.bag(bags.end - 1).end;
                    if is_plain(feature, config) {
                        self.active.extend(feature, positions, start)?;
                    } else {
                        self.separate_roles(config, feature, positions, start)?;
                    }
                }
                start += feature.keys.len();
            }
            bounds.push(self.active.keys.len());
        }
        Ok(bounds)
    }

    fn separate_roles(
        &mut self,
        config: &TableConfig,
        feature: &Feature,
        positions: std::ops::Range<usize>,
        start: usize,
    ) -> Result<()> {
        for position in positions {
            let key = feature.keys.get(position);
            let at = start + position;
            self.marks[at] = NO_MARK;
            match role(feature, config, position) {
                Role::Active => self.active.push(key, at)?,
                Role::Silent => self.silent.push(key, at)?,
                Role::Padding => self.rows[at] = PADDING,
                Role::Outside => self.rows[at] = OUTSIDE,
            }
        }
        Ok(())
    }

    /// `first`: how many rows come before.
    fn collect_silent(
        &mut self,
        config: &TableConfig,
        is_read: bool,
        first: usize,
    ) -> Result<(Buckets, Option<u32>)> {
        if !is_read {
            self.silent.positions.iter().for_each(|&position| self.rows[position as usize] = OUTSIDE);
            self.silent.start();
        }
        // The last id has no position: it is there for its row alone.
        self.silent.keys.extend(config.out_of_vocabulary_key);
        self.silent.make_room()?;
        let Ids { keys, positions, records, marks } = &mut self.silent;
        self.silent_distinct.start(keys.len())?;
        self.known.number(keys, &mut self.silent_distinct, records, marks)?;
        let distinct = self.silent_distinct.iter().map(|(number, _)| self.known.keys[number as usize]);
        let buckets = Buckets::new(&memory::collect(distinct, WHAT)?, &self.owners)?;
        for (&position, &mark) in positions.iter().zip(&*marks) {
            self.rows[position as usize] = first as u32 + buckets.places()[mark as usize] + 1;
        }
        let last = || buckets.places()[marks[marks.len() - 1] as usize];
        let out_of_vocabulary = config.out_of_vocabulary_key.map(|_| last());
        Ok((buckets, out_of_vocabulary))
    }
}

/// Numbers the distinct keys anew, in the order in which they come: a table that is nearly full takes the first ones. The search itself
/// numbers keys that it did not know after those that it knew.
fn number_by_first_occurrence(marks: &mut [u32], distinct: &Distinct) -> Result<Vec<(RecordNumber, u32)>> {
    let keys = memory::collect(distinct.iter(), WHAT)?;
    let mut numbers = memory::filled(NO_MARK, keys.len(), WHAT)?;
    let mut ordered = memory::with_capacity(keys.len(), WHAT)?;
    for mark in marks {
        let number = &mut numbers[*mark as usize];
        if *number == NO_MARK {
            *number = ordered.len() as u32;
            ordered.push(keys[*mark as usize]);
        }
        *mark = *number;
    }
    Ok(ordered)
}
