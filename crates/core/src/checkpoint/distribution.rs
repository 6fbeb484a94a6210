//! How ranks that load a dump share its files: each file is read by one rank, which sends the records to their owners.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver};
use std::thread::{Builder, Scope};

use super::ranks::Ranks;
use super::record_reader::{RawRecords, RecordReader};
use crate::contract::records::{Column, Records};
use crate::error::{Error, Result};
use crate::exchange::buckets::{Buckets, Owners};
use crate::exchange::collectives::{agree, exchange};
use crate::exchange::communicator::Communicator;
use crate::exchange::message::{Reader, Tag, Writer};
use crate::exchange::placement::Placement;
use crate::memory;

const WHAT: &str = "the rows of a dump";

/// A file of the dump.
pub(super) struct Part<'a> {
    /// Number of its table, the same on all ranks.
    pub table: usize,
    pub reader: RecordReader<'a>,
}

/// Returns the indices of the files that a rank reads. `sizes`: of all files, in bytes. Each rank reads neighbours, of about equally many
/// bytes.
pub(super) fn files_of_rank(sizes: &[u64], rank: usize, world_size: usize) -> Range<usize> {
    let total: u128 = sizes.iter().map(|&size| u128::from(size)).sum();
    let mut before: u128 = 0;
    let of_file = sizes.iter().map(|&size| {
        let middle = before + u128::from(size) / 2;
        before += u128::from(size);
        (middle * world_size as u128 / total.max(1)).min(world_size as u128 - 1) as usize
    });
    let of_file: Vec<usize> = of_file.collect();
    of_file.partition_point(|&of| of < rank)..of_file.partition_point(|&of| of <= rank)
}

/// Records of the table with a number, the same on all ranks.
pub(super) struct Chunk {
    pub table: usize,
    pub records: Records,
}

/// A chunk by owner.
struct Split {
    own: Chunk,
    /// By rank. The one to this rank is empty.
    messages: Vec<Vec<u8>>,
}

/// Reads chunks and calls `take` with each. The next chunks are read and decoded while `take` runs.
///
/// Without ranks, `raw` is what all files have. With ranks, it is what the files have that this rank reads. Each record is sent to its
/// owner, and `take` is called with the records that this rank owns. `owners`: by number of a table.
///
/// # Errors
/// The errors of reading and of `take`. If one rank fails, all ranks return an error.
pub(super) fn for_each_chunk<R: Send>(
    raw: impl Iterator<Item = Result<R>> + Send,
    decode: impl Fn(R) -> Result<Chunk> + Send,
    owners: &[Option<Owners>],
    ranks: Option<&Ranks>,
    take: &mut dyn FnMut(Chunk) -> Result<()>,
) -> Result<()> {
    let Some(Ranks { communicator, tag }) = ranks else {
        return std::thread::scope(|scope| {
            let raw = ahead(scope, "sok-reader", raw)?;
            let chunks = ahead(scope, "sok-decoder", raw.into_iter().map(move |raw| decode(raw?)))?;
            chunks.into_iter().try_for_each(|chunk| take(chunk?))
        });
    };
    let (communicator, tag) = (&**communicator, tag.at(3));
    let failure = OnceLock::new();
    std::thread::scope(|scope| {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let all = Owners { placement: Placement::Replicated, is_static: false, rank, world_size };
        let splits = ahead(scope, "sok-reader", raw).and_then(|raw| {
            let split_chunk = move |raw: Result<R>| {
                let chunk = decode(raw?)?;
                let owners = owners[chunk.table].unwrap_or(all);
                split(chunk, &owners)
            };
            ahead(scope, "sok-decoder", raw.into_iter().map(split_chunk))
        });
        let owned = splits.and_then(|splits| {
            let failure = &failure;
            ahead(scope, "sok-exchange", Exchanges { communicator, tag, splits, failure, are_done: false })
        });
        // The others are in their first exchange.
        let owned = owned.or_else(|error| agree(communicator, tag, Err(error)))?;
        let mut taken = Ok(());
        for chunks in owned {
            // The others hear of a failure in the next exchange.
            let chunks = chunks.map_err(|error| failure.get().cloned().unwrap_or(error))?;
            if taken.is_ok() {
                taken = chunks.into_iter().try_for_each(&mut *take);
                if let Err(error) = &taken {
                    failure.get_or_init(|| error.clone());
                }
            }
        }
        agree(communicator, tag, taken)
    })
}

/// Starts a thread that computes values ahead, until there are no more, one is an error, or nobody takes them. One waits while the next is
/// computed.
fn ahead<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    values: impl Iterator<Item = Result<T>> + Send + 'scope,
) -> Result<Receiver<Result<T>>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let send_all = move || {
        for value in values {
            let is_last = value.is_err();
            if sender.send(value).is_err() || is_last {
                return;
            }
        }
    };
    let started = Builder::new().name(name.into()).spawn_scoped(scope, send_all);
    started.map_err(|error| Error::State(format!("cannot start a thread that loads a dump: {error}")))?;
    Ok(receiver)
}

/// A chunk as it is in a file.
pub(super) struct RawChunk<'a> {
    table: usize,
    records: RawRecords<'a>,
}

impl RawChunk<'_> {
    /// # Errors
    /// As [`RawRecords::decode`].
    pub fn decode(self) -> Result<Chunk> {
        Ok(Chunk { table: self.table, records: self.records.decode()? })
    }
}

/// The chunks of files, one file after the other.
pub(super) struct Chunks<'a, I> {
    parts: I,
    now: Option<Part<'a>>,
}

impl<'a, I: Iterator<Item = Result<Part<'a>>>> Chunks<'a, I> {
    pub fn of(parts: I) -> Chunks<'a, I> {
        Chunks { parts, now: None }
    }
}

impl<'a, I: Iterator<Item = Result<Part<'a>>>> Iterator for Chunks<'a, I> {
    type Item = Result<RawChunk<'a>>;

    fn next(&mut self) -> Option<Result<RawChunk<'a>>> {
        loop {
            if let Some(Part { table, reader }) = &mut self.now {
                match reader.next().transpose() {
                    Some(records) => {
                        return Some(records.map(|records| RawChunk { table: *table, records }));
                    }
                    None => self.now = None,
                }
            }
            match self.parts.next()? {
                Ok(part) => self.now = Some(part),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Splits a chunk by the owners of its records. A rank keeps its own records, and writes the others into messages.
fn split(chunk: Chunk, owners: &Owners) -> Result<Split> {
    let Chunk { table, records } = &chunk;
    let width = records.values.len().checked_div(records.keys.len()).unwrap_or(0);
    let buckets = Buckets::new(&records.keys, owners)?;
    let mut sorted = memory::filled(0, buckets.len(), WHAT)?;
    buckets.places().iter().zip(0..).for_each(|(&place, index)| sorted[place as usize] = index);
    let values_of = |index: usize| &records.values[index * width..][..width];
    let message = |to: usize| {
        let of_rank = buckets.sent_to(to);
        let mut writer = Writer::default();
        if to != owners.rank {
            let columns = Column::ALL.map(|column| !records.column(column).is_empty());
            let num_columns = columns.iter().filter(|is_there| **is_there).count();
            writer.reserve(40 + of_rank.len() * (8 + 4 * width + 8 * num_columns))?;
            writer.numbers(&[*table as u64, of_rank.len() as u64, width as u64])?;
            writer.numbers(&columns.map(u64::from))?;
            writer.numbers(&buckets.keys()[of_rank.clone()])?;
            sorted[of_rank.clone()].iter().try_for_each(|&index| writer.rows(values_of(index)))?;
            for (column, _) in Column::ALL.into_iter().zip(columns).filter(|(_, is_there)| *is_there) {
                let numbers = records.column(column);
                sorted[of_rank.clone()].iter().try_for_each(|&index| writer.number(numbers[index]))?;
            }
        }
        Ok(writer.finish())
    };
    let messages = (0..owners.world_size).map(message).collect::<Result<_>>()?;
    let own = buckets.sent_to(owners.rank);
    if own.len() == buckets.len() {
        return Ok(Split { own: chunk, messages });
    }
    let keys = memory::copied(&buckets.keys()[own.clone()], WHAT)?;
    let mut values = memory::with_capacity(own.len() * width, WHAT)?;
    sorted[own.clone()].iter().for_each(|&index| values.extend_from_slice(values_of(index)));
    let mut own_records = Records { keys, values, ..Records::default() };
    for column in Column::ALL {
        let numbers =
            sorted[own.clone()].iter().filter_map(|&index| records.column(column).get(index).copied());
        *own_records.column_mut(column) = memory::collect(numbers, WHAT)?;
    }
    Ok(Split { own: Chunk { table: *table, records: own_records }, messages })
}

/// Exchanges chunks between ranks until no rank has more.
struct Exchanges<'a> {
    communicator: &'a dyn Communicator,
    tag: Tag,
    splits: Receiver<Result<Split>>,
    /// The error of `take`.
    failure: &'a OnceLock<Error>,
    are_done: bool,
}

impl Exchanges<'_> {
    fn exchange(&mut self) -> Result<Vec<Chunk>> {
        let split = self.splits.recv().ok().transpose();
        let (own, messages) = match self.failure.get().map_or(split, |error| Err(error.clone())) {
            Ok(Some(Split { own, messages })) => (Some(own), Ok(messages)),
            Ok(None) => (None, Ok(vec![Vec::new(); self.communicator.world_size()])),
            Err(error) => (None, Err(error)),
        };
        let messages = exchange(self.communicator, self.tag, messages)?;
        let received = messages.iter().enumerate().filter(|(_, message)| !message.is_empty());
        let received = received.map(|(from, message)| read_chunk(message, from)).collect::<Result<Vec<_>>>();
        // The others cannot wait for an exchange that this rank does not reach.
        let received = received.inspect_err(|error| self.communicator.fail(error))?;
        self.are_done = own.is_none() && received.is_empty();
        Ok(own.into_iter().chain(received).filter(|chunk| !chunk.records.keys.is_empty()).collect())
    }
}

impl Iterator for Exchanges<'_> {
    type Item = Result<Vec<Chunk>>;

    fn next(&mut self) -> Option<Result<Vec<Chunk>>> {
        (!self.are_done).then(|| self.exchange())
    }
}

fn read_chunk(message: &[u8], from: usize) -> Result<Chunk> {
    let mut reader = Reader::new(message, from);
    let mut number = || reader.number().map(|number| number as usize);
    let (table, count, width) = (number()?, number()?, number()?);
    let columns = [number()? == 1, number()? == 1];
    let mut records = Records::default();
    reader.numbers(count, &mut records.keys)?;
    reader.append_rows(count.saturating_mul(width), &mut records.values)?;
    for (column, is_there) in Column::ALL.into_iter().zip(columns) {
        reader.numbers(if is_there { count } else { 0 }, records.column_mut(column))?;
    }
    reader.finish()?;
    Ok(Chunk { table, records })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::exchange::message::Call;
    use crate::exchange::threads::ThreadRank;
    use crate::key::Key;

    const WIDTH: usize = 3;
    const KEYS_OF_CHUNK: usize = 5;
    const TABLES: [Option<Placement>; 4] =
        [Some(Placement::Distributed), Some(Placement::Localized(0)), Some(Placement::Replicated), None];

    /// Chunk `number` of a rank, which no other is equal to.
    fn chunk(rank: usize, number: usize) -> Chunk {
        let first = (rank * 1000 + number * KEYS_OF_CHUNK) as Key;
        let keys: Vec<Key> = (first..).take(KEYS_OF_CHUNK).collect();
        let values = keys.iter().flat_map(|&key| [key as f32, 1.0, 2.0]).collect();
        let scores =
            if number.is_multiple_of(2) { keys.iter().map(|&key| score(key)).collect() } else { vec![] };
        let ages = scores.iter().map(|score| score + 1).collect();
        Chunk { table: number % TABLES.len(), records: Records { keys, values, scores, ages } }
    }

    fn score(key: Key) -> u64 {
        key << 40 | 5
    }

    fn owners(placement: Placement, rank: usize, world_size: usize) -> Owners {
        Owners { placement, is_static: false, rank, world_size }
    }

    /// What fails on a rank: the reading of its chunk with a number, or the use of so many records.
    #[derive(Clone, Copy)]
    enum Failure {
        Read(usize),
        Take(usize),
    }

    /// Ranks with so many chunks load them. Returns, of each rank, the result, how often it took each key, by table, and whether a later
    /// call of all ranks went well.
    #[expect(clippy::type_complexity)]
    fn load(
        num_chunks: &[usize],
        failures: &[(usize, Failure)],
    ) -> Vec<(Result<()>, BTreeMap<(usize, Key), usize>, bool)> {
        let world_size = num_chunks.len();
        let run = |rank: usize, communicator: Arc<ThreadRank>| {
            let failures =
                || failures.iter().filter(move |failure| failure.0 == rank).map(|failure| failure.1);
            let fails = |number: usize| failures().any(|f| matches!(f, Failure::Read(at) if at == number));
            let chunks = (0..num_chunks[rank]).map(|number| {
                if fails(number) { Err(Error::State("read".into())) } else { Ok(chunk(rank, number)) }
            });
            let owners =
                TABLES.map(|placement| placement.map(|placement| owners(placement, rank, world_size)));
            let (mut taken, mut num_taken) = (BTreeMap::new(), 0);
            let tag = Tag { call: Call::Load, layer: 0, step: 1, round: 0 };
            let ranks = Ranks { communicator: communicator.clone(), tag };
            let result =
                for_each_chunk(chunks, Ok, &owners, Some(&ranks), &mut |Chunk { table, records }| {
                    let mut scores = records.scores.iter();
                    assert_eq!(scores.len(), if table.is_multiple_of(2) { records.keys.len() } else { 0 });
                    let ages: Vec<u64> = records.scores.iter().map(|score| score + 1).collect();
                    assert_eq!(records.ages, ages);
                    for (key, values) in records.keys.iter().zip(records.values.chunks(WIDTH)) {
                        assert_eq!(values, [*key as f32, 1.0, 2.0]);
                        assert!(scores.next().is_none_or(|found| *found == score(*key)));
                        *taken.entry((table, *key)).or_insert(0) += 1;
                        num_taken += 1;
                        if failures().any(|f| matches!(f, Failure::Take(at) if at == num_taken)) {
                            return Err(Error::State("take".into()));
                        }
                    }
                    Ok(())
                });
            let later = agree(&*communicator, Tag { step: 2, ..tag }, Ok(()));
            (result, taken, later.is_ok())
        };
        let world = ThreadRank::world(world_size, Duration::from_secs(20));
        std::thread::scope(|scope| {
            let start = |(rank, communicator)| scope.spawn(move || run(rank, Arc::new(communicator)));
            let ranks: Vec<_> = world.into_iter().enumerate().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn each_record_reaches_its_owner_once() {
        for num_chunks in [&[9][..], &[8, 0], &[3, 12, 5], &[0, 0, 0]] {
            let world_size = num_chunks.len();
            let loaded = load(num_chunks, &[]);
            for (rank, (result, taken, later)) in loaded.into_iter().enumerate() {
                assert!(result.is_ok() && later, "{result:?}");
                let mut expected = BTreeMap::new();
                for (from, &count) in num_chunks.iter().enumerate() {
                    for Chunk { table, records } in (0..count).map(|number| chunk(from, number)) {
                        let is_own = |key| {
                            TABLES[table]
                                .is_none_or(|placement| owners(placement, rank, world_size).of(key) == rank)
                        };
                        let own = records.keys.into_iter().filter(|&key| is_own(key));
                        expected.extend(own.map(|key| ((table, key), 1)));
                    }
                }
                assert_eq!(taken, expected, "rank {rank} of {num_chunks:?}");
            }
        }
    }

    #[test]
    fn a_failure_of_one_rank_is_an_error_on_all() {
        for place in 0..12 {
            for failure in [Failure::Read(place), Failure::Take(3 * place + 1)] {
                for failures in [&[(1, failure)][..], &[(1, failure), (2, Failure::Take(7))]] {
                    let loaded = load(&[13, 12, 2], failures);
                    assert!(loaded.iter().all(|(result, _, later)| result.is_err() && *later));
                    let what = if matches!(failure, Failure::Read(_)) { "read" } else { "take" };
                    if failures.len() == 1 {
                        assert!(matches!(&loaded[1].0, Err(Error::State(error)) if error == what));
                        assert!(matches!(&loaded[0].0, Err(Error::Rank { rank: 1, .. })));
                    }
                }
            }
        }
        let last = load(&[1, 1], &[(0, Failure::Take(1))]);
        assert!(last.iter().all(|(result, _, later)| result.is_err() && *later));
    }

    #[test]
    fn each_file_is_read_by_one_rank() {
        for sizes in [vec![], vec![5], vec![0, 0], vec![1, 1, 1, 1000], vec![1 << 60; 9], vec![3; 100]] {
            for world_size in [1, 2, 3, 7] {
                let ranges: Vec<_> =
                    (0..world_size).map(|rank| files_of_rank(&sizes, rank, world_size)).collect();
                let all: Vec<usize> = ranges.iter().cloned().flatten().collect();
                assert_eq!(all, (0..sizes.len()).collect::<Vec<_>>());
            }
        }
        let counts = |world_size| -> Vec<usize> {
            (0..world_size).map(|rank| files_of_rank(&[3; 100], rank, world_size).len()).collect()
        };
        assert_eq!((counts(2), counts(4)), (vec![50, 50], vec![25; 4]));
    }
}
