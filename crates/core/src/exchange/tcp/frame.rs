//! Frames of a connection: 8 bytes length of the content, 16 bytes tag with the kind in byte 2, the content.

use std::borrow::Cow;
use std::io::{ErrorKind, IoSlice, Read, Write};

use crate::exchange::mailbox::Decisions;
use crate::exchange::message::Tag;
use crate::memory;

/// What ranks send each other.
pub(super) enum Frame {
    /// A message.
    Message(Tag, Vec<u8>),
    /// The sender has waited for half the timeout for the rank with this number.
    Wait(u64),
    /// The sender has failed, and why, and what it knows to be agreed on.
    Failure(String, Decisions),
    /// The sender sends no more. So many messages it has sent to this rank beside the connection.
    End(u64),
}

const HEADER: usize = 8 + Tag::BYTES;
/// Place of the frame's kind in the header.
const KIND: usize = 8 + 2;
const MESSAGE: u8 = 0;
const FAILURE: u8 = 1;
const END: u8 = 2;
const WAIT: u8 = 3;

pub(super) fn write_frame(stream: &mut impl Write, frame: &Frame) -> std::io::Result<()> {
    let (kind, tag, content) = match frame {
        Frame::Message(tag, content) => (MESSAGE, tag.to_bytes(), Cow::Borrowed(&content[..])),
        Frame::Failure(why, decisions) => {
            (FAILURE, [0; Tag::BYTES], Cow::Owned(failure_to_bytes(why, decisions)))
        }
        Frame::End(beside) => (END, [0; Tag::BYTES], Cow::Owned(beside.to_le_bytes().to_vec())),
        Frame::Wait(rank) => (WAIT, [0; Tag::BYTES], Cow::Owned(rank.to_le_bytes().to_vec())),
    };
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&(content.len() as u64).to_le_bytes());
    header[8..].copy_from_slice(&tag);
    header[KIND] = kind;
    // One packet for a short message.
    let written = stream.write_vectored(&[IoSlice::new(&header), IoSlice::new(&content)])?;
    if written < HEADER {
        stream.write_all(&header[written..])?;
    }
    stream.write_all(&content[written.saturating_sub(HEADER)..])
}

pub(super) fn read_frame(stream: &mut impl Read) -> std::io::Result<Frame> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => std::io::Error::other("its connection is closed"),
        _ => error,
    })?;
    let (length, rest) = header.split_first_chunk().expect("a header is longer");
    let content = read_content(stream, u64::from_le_bytes(*length))?;
    let mut tag: [u8; Tag::BYTES] = rest.try_into().expect("the rest of a header is a tag");
    let kind = std::mem::take(&mut tag[KIND - 8]);
    let strange = || std::io::Error::new(ErrorKind::InvalidData, "it sent bytes that are no frame");
    let number = |content: Vec<u8>| content.try_into().map(u64::from_le_bytes).map_err(|_| strange());
    match kind {
        MESSAGE => Ok(Frame::Message(Tag::from_bytes(tag).ok_or_else(strange)?, content)),
        FAILURE => failure_from_bytes(&content).ok_or_else(strange),
        END => Ok(Frame::End(number(content)?)),
        WAIT => Ok(Frame::Wait(number(content)?)),
        _ => Err(strange()),
    }
}

/// Number of decisions, a tag for each, text.
fn failure_to_bytes(why: &str, decisions: &Decisions) -> Vec<u8> {
    let mut bytes = (decisions.len() as u64).to_le_bytes().to_vec();
    for (&(call, layer), &step) in decisions {
        bytes.extend(Tag { call, layer, step, round: 0 }.to_bytes());
    }
    bytes.extend(why.as_bytes());
    bytes
}

fn failure_from_bytes(bytes: &[u8]) -> Option<Frame> {
    let (count, mut rest) = bytes.split_first_chunk()?;
    let mut decisions = Decisions::new();
    for _ in 0..u64::from_le_bytes(*count) {
        let (tag, after) = rest.split_first_chunk()?;
        let Tag { call, layer, step, .. } = Tag::from_bytes(*tag)?;
        decisions.insert((call, layer), step);
        rest = after;
    }
    Some(Frame::Failure(String::from_utf8_lossy(rest).into_owned(), decisions))
}

fn read_content(stream: &mut impl Read, length: u64) -> std::io::Result<Vec<u8>> {
    // Memory that is not written to takes no pages, so a wrong length costs none.
    let mut content =
        memory::with_capacity(length as usize, "a message of another rank").map_err(std::io::Error::other)?;
    if stream.take(length).read_to_end(&mut content)? as u64 == length {
        return Ok(content);
    }
    Err(std::io::Error::other("its connection is closed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::message::Call;

    #[test]
    fn frames_come_back() {
        let tag = Tag { call: Call::Lookup, layer: 3, step: 9, round: 1 };
        let mut stream = Vec::new();
        let decisions = Decisions::from([((Call::Commit, 3), 8), ((Call::Load, 0), 1 << 40)]);
        let failure = Frame::Failure("why".into(), decisions.clone());
        let frames = [Frame::Message(tag, vec![7; 1000]), failure, Frame::Wait(5), Frame::End(3)];
        frames.iter().for_each(|frame| write_frame(&mut stream, frame).unwrap());
        let mut rest = &stream[..];
        assert!(matches!(read_frame(&mut rest), Ok(Frame::Message(t, c)) if t == tag && c == [7; 1000]));
        assert!(
            matches!(read_frame(&mut rest), Ok(Frame::Failure(why, d)) if why == "why" && d == decisions)
        );
        assert!(matches!(read_frame(&mut rest), Ok(Frame::Wait(5))));
        assert!(matches!(read_frame(&mut rest), Ok(Frame::End(3))));
        assert!(read_frame(&mut rest).is_err());
        assert!(read_frame(&mut &stream[..500]).is_err());
        assert!(read_frame(&mut &[0xff; 64][..]).is_err());
    }
}
