//! How ranks that load a dump share its files: each file is read by one rank, which sends the records to their owners.

use std::ops::Range;

use super::ranks::Ranks;
use super::record_reader::RecordReader;
use crate::contract::table::Records;
use crate::error::{Error, Result};
use crate::exchange::buckets::Owners;
use crate::exchange::collectives::exchange;
use crate::exchange::message::{Reader, Writer};
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

/// Records of the table with a number.
struct Chunk {
    table: usize,
    records: Records,
}

/// Reads the files of this rank, one after the other. Returns the next chunk, if there is one.
fn next_chunk<'a>(
    parts: &mut impl Iterator<Item = Result<Part<'a>>>,
    now: &mut Option<Part<'a>>,
) -> Result<Option<Chunk>> {
    let mut records = Records::default();
    loop {
        if let Some(Part { table, reader }) = now
            && reader.next(&mut records)?
        {
            return Ok(Some(Chunk { table: *table, records }));
        }
        match parts.next().transpose()? {
            Some(part) => *now = Some(part),
            None => return Ok(None),
        }
    }
}

/// Reads files and calls `take` with the records of each chunk and the number of their table. The next chunk is read while `take` runs.
///
/// Without ranks, `parts` are all files. With ranks, `parts` are the files that this rank reads. Each record is sent to its owner, and `take`
/// is called with the records that this rank owns. `owners`: by number of a table.
///
/// # Errors
/// The errors of reading and of `take`. If one rank fails, all ranks return an error.
pub(super) fn for_each_chunk<'a>(
    parts: impl Iterator<Item = Result<Part<'a>>> + Send,
    owners: &[Option<Owners>],
    ranks: Option<&Ranks>,
    take: &mut dyn FnMut(usize, &Records) -> Result<()>,
) -> Result<()> {
    let (mut parts, mut now) = (parts, None);
    let (mut taken, mut is_last) = (Vec::new(), false);
    loop {
        // On another thread the next chunk is read.
        let (read, done) = std::thread::scope(|scope| {
            let reading = (!is_last).then(|| {
                let reader = std::thread::Builder::new().name("sok-reader".into());
                reader.spawn_scoped(scope, || next_chunk(&mut parts, &mut now))
            });
            let mut all = taken.iter();
            let done = all.try_for_each(|Chunk { table, records }| take(*table, records));
            let read = match reading {
                None => Ok(None),
                Some(Ok(reading)) => reading.join().expect("reading does not panic"),
                Some(Err(error)) => {
                    Err(Error::State(format!("cannot start a thread that reads a dump: {error}")))
                }
            };
            (read, done)
        });
        let chunk = done.and(read);
        match ranks {
            None => {
                taken = chunk?.into_iter().collect();
                is_last = taken.is_empty();
                if is_last {
                    return Ok(());
                }
            }
            Some(Ranks { communicator, tag }) => {
                is_last |= matches!(chunk, Ok(None));
                let world_size = communicator.world_size();
                let messages = chunk.and_then(|chunk| write_chunk(chunk, owners, world_size));
                let messages = exchange(&**communicator, tag.at(3), messages)?;
                let read = messages.iter().enumerate().map(|(from, message)| read_chunk(message, from));
                // Ranks that cannot read what has come say so in the next exchange.
                let read = read.collect::<Result<Vec<_>>>().inspect_err(|error| communicator.fail(error))?;
                let are_done = read.iter().all(Option::is_none);
                taken = read.into_iter().flatten().filter(|chunk| !chunk.records.keys.is_empty()).collect();
                if are_done {
                    return Ok(());
                }
            }
        }
    }
}

/// Writes the message to each rank: nothing after the last chunk, otherwise its part of the chunk.
fn write_chunk(chunk: Option<Chunk>, owners: &[Option<Owners>], world_size: usize) -> Result<Vec<Vec<u8>>> {
    let Some(Chunk { table, records: Records { keys, values } }) = chunk else {
        return Ok(vec![Vec::new(); world_size]);
    };
    let width = values.len().checked_div(keys.len()).unwrap_or(0);
    let owners = owners[table].filter(|owners| !owners.is_replicated());
    let message = |to: usize| {
        let is_of = |place: &usize| owners.is_none_or(|owners| owners.of(keys[*place]) == to);
        let places = memory::collect((0..keys.len()).filter(is_of), WHAT)?;
        let mut writer = Writer::default();
        writer.numbers(&[table as u64, places.len() as u64, width as u64])?;
        places.iter().try_for_each(|&place| writer.number(keys[place]))?;
        places.iter().try_for_each(|&place| writer.floats(&values[place * width..][..width]))?;
        Ok(writer.finish())
    };
    (0..world_size).map(message).collect()
}

fn read_chunk(message: &[u8], from: usize) -> Result<Option<Chunk>> {
    if message.is_empty() {
        return Ok(None);
    }
    let mut reader = Reader::new(message, from);
    let [table, count, width] = [reader.number()?, reader.number()?, reader.number()?].map(|n| n as usize);
    let mut records = Records::default();
    reader.numbers(count, &mut records.keys)?;
    memory::resize(&mut records.values, count * width, 0.0, WHAT)?;
    reader.floats(&mut records.values)?;
    reader.finish()?;
    Ok(Some(Chunk { table, records }))
}

#[cfg(test)]
mod tests {
    use super::*;

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
