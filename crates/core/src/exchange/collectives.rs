//! Exchanges between all ranks.
//!
//! An exchange also carries errors: a rank that cannot do its part sends its error in place of its message, so all ranks fail in the
//! same call, and the next call finds them together.

use crate::error::{Error, Result};
use crate::exchange::communicator::Communicator;
use crate::exchange::message::{Reader, Tag, Writer};
use crate::memory;

/// First byte of a message that has an error in place of its content.
const ERROR: u8 = 1;

/// Sends a message to each rank, and returns the message from each rank. `parts`: by rank; the one to this rank is returned as it is.
/// If a rank has an error in place of its parts, all ranks fail.
///
/// # Errors
/// The error in `parts`. [`Error::Rank`] if another rank has an error, or as [`Communicator::receive`].
pub fn exchange(
    communicator: &dyn Communicator,
    tag: Tag,
    parts: Result<Vec<Vec<u8>>>,
) -> Result<Vec<Vec<u8>>> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    // Each rank starts with the one after it, so that not all send to the same one at first.
    let others = || (1..world_size).map(|i| (rank + i) % world_size);
    let mut parts = match parts {
        Ok(parts) => parts,
        Err(error) => {
            others().try_for_each(|to| communicator.send(to, tag, error_message(&error)))?;
            // The messages of this call must not be taken for those of a later one.
            others().try_for_each(|from| communicator.receive(from, tag).map(drop))?;
            return Err(error);
        }
    };
    for to in others() {
        let mut message = std::mem::take(&mut parts[to]);
        // Others may have their message already, so this rank cannot leave the call alone.
        let has_room = memory::push(&mut message, 0, "a message to another rank");
        has_room.inspect_err(|error| communicator.fail(error))?;
        communicator.send(to, tag, message)?;
    }
    let mut failed = None;
    for from in others() {
        let mut message = communicator.receive(from, tag)?;
        if message.pop() == Some(ERROR) {
            let what = format!("failed in {tag}: {}", String::from_utf8_lossy(&message));
            failed.get_or_insert(Error::Rank { rank: from, what });
        }
        parts[from] = message;
    }
    failed.map_or(Ok(parts), Err)
}

fn error_message(error: &Error) -> Vec<u8> {
    let mut message = error.to_string().into_bytes();
    message.push(ERROR);
    message
}

/// Returns `result` if it is `Ok` on all ranks.
///
/// # Errors
/// As [`exchange`].
pub fn agree<T>(communicator: &dyn Communicator, tag: Tag, result: Result<T>) -> Result<T> {
    let (value, parts) = match result {
        Ok(value) => (Some(value), Ok(vec![Vec::new(); communicator.world_size()])),
        Err(error) => (None, Err(error)),
    };
    exchange(communicator, tag, parts)?;
    Ok(value.expect("an error would have been returned"))
}

/// Returns `result` if it is `Ok` on all ranks, as [`agree`]. The ranks that are left after one is lost all return the same: `Ok` if any
/// of them has heard that all agree.
///
/// Each rank says once, when it fails, on what it knows all ranks to agree, and decides no more by itself. So if none of those that are
/// left knew, none will. Only a second rank that is lost meanwhile may have known alone.
///
/// # Errors
/// As [`exchange`].
pub fn decide<T>(communicator: &dyn Communicator, tag: Tag, result: Result<T>) -> Result<T> {
    let value =
        result.map_err(|error| agree::<T>(communicator, tag, Err(error)).err().expect("it was an error"))?;
    let agreed = agree(communicator, tag, Ok(())).and_then(|()| communicator.decide(tag));
    match agreed {
        Err(error) if communicator.failure().is_none() || !communicator.is_decided_by_others(tag) => {
            Err(error)
        }
        _ => Ok(value),
    }
}

/// Returns the bytes of each rank.
///
/// # Errors
/// As [`exchange`].
pub fn gather(communicator: &dyn Communicator, tag: Tag, bytes: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let parts = bytes.map(|bytes| vec![bytes; communicator.world_size()]);
    exchange(communicator, tag, parts)
}

/// Returns the bytes of rank `root`.
///
/// # Errors
/// As [`exchange`], and [`Error::Argument`] on all ranks for a root that is no rank.
pub fn broadcast(communicator: &dyn Communicator, tag: Tag, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    if root >= world_size {
        return Err(Error::argument(format!(
            "`root` must be a rank, 0 to {}. Received: {root}",
            world_size - 1
        )));
    }
    let mut parts = vec![Vec::new(); world_size];
    if rank == root {
        parts.fill(bytes);
    }
    exchange(communicator, tag, Ok(parts)).map(|mut parts| parts.swap_remove(root))
}

/// Replaces each number by its sum over all ranks, added in the order of the ranks: the same bits on all of them.
///
/// Each rank sums a part of the numbers and sends its sums to all, so a rank sends each number twice, whatever the number of ranks.
/// Uses two rounds of the tag.
///
/// # Errors
/// As [`exchange`], and [`Error::Rank`] if another rank has another number of floats.
pub fn sum(communicator: &dyn Communicator, tag: Tag, floats: &mut [f32]) -> Result<()> {
    let (len, world_size) = (floats.len(), communicator.world_size());
    let bounds = |rank: usize| len * rank / world_size..len * (rank + 1) / world_size;
    let parts = (0..world_size).map(|to| message_of(&floats[bounds(to)])).collect();
    let received = exchange(communicator, tag, parts)?;
    let own = bounds(communicator.rank());
    let mut sums = vec![0.0; own.len()];
    let mut terms = vec![0.0; own.len()];
    for (from, message) in received.iter().enumerate() {
        read_floats(message, from, if from == 0 { &mut sums } else { &mut terms })?;
        if from > 0 {
            sums.iter_mut().zip(&terms).for_each(|(sum, term)| *sum += term);
        }
    }
    let received = gather(communicator, tag.at(tag.round + 1), message_of(&sums))?;
    for (from, message) in received.iter().enumerate() {
        let of_rank = bounds(from);
        read_floats(message, from, &mut floats[of_rank])?;
    }
    Ok(())
}

fn message_of(floats: &[f32]) -> Result<Vec<u8>> {
    let mut writer = Writer::default();
    writer.floats(floats)?;
    Ok(writer.finish())
}

fn read_floats(message: &[u8], from: usize, to: &mut [f32]) -> Result<()> {
    let mut reader = Reader::new(message, from);
    reader.floats(to)?;
    reader.finish()
}
