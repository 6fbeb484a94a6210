//! Messages of ranks over MPI.
//!
//! A short message is an envelope and the content behind it. The content of a longer one follows in pieces, which MPI writes where they
//! are to be. MPI keeps the order of messages with the same tag from the same rank, so the next pieces are those of the last envelope.

use std::ffi::c_int;
use std::time::Instant;

use sok_core::error::{Error, Result};
use sok_core::exchange::message::Tag;
use sok_core::exchange::transport::{Transport, Unsent};
use sok_core::memory;

use super::envelope::Envelope;
use super::functions::Mpi;
use super::handle::Handle;
use super::request::{Landing, Moving};

/// Longest content that is sent with its envelope. It is copied, which takes less time than a second message.
const SHORT: usize = 32 << 10;
/// MPI's tags of envelopes and of pieces.
const ENVELOPE: c_int = 1;
const CONTENT: c_int = 2;

/// Carries messages by MPI.
pub struct MpiTransport<H> {
    mpi: Mpi<H>,
    rank: usize,
    landing: Landing<H>,
    /// In the order in which their envelopes came.
    incoming: Vec<Incoming<H>>,
    /// In the order in which they were sent.
    outgoing: Vec<Outgoing<H>>,
    end: End<H>,
}

struct Incoming<H> {
    from: usize,
    tag: Tag,
    content: Moving<H>,
}

struct Outgoing<H> {
    what: Unsent,
    envelope: Moving<H>,
    content: Moving<H>,
}

/// The barrier at the end.
enum End<H> {
    NotYet,
    Waiting(H),
    AllHere,
}

impl<H: Handle> MpiTransport<H> {
    pub fn new(mpi: Mpi<H>, rank: usize) -> MpiTransport<H> {
        let landing = Landing::new(Envelope::BYTES + SHORT);
        MpiTransport { mpi, rank, landing, incoming: Vec::new(), outgoing: Vec::new(), end: End::NotYet }
    }

    /// Checks that MPI may be called.
    fn check(&mut self) -> Result<()> {
        if !self.mpi.is_finalized() {
            return Ok(());
        }
        self.outgoing.clear();
        Err(Error::State("`MPI.Finalize` was called before this rank had left the others".into()))
    }

    fn take_envelopes(&mut self) -> Result<()> {
        // SAFETY: ranks send no longer ones: `send`.
        while let Some(bytes) = unsafe { self.landing.next(&self.mpi, ENVELOPE) }? {
            let strange = || Error::State("another rank has sent bytes that are no message".into());
            let Envelope { len, tag, from } = Envelope::from_bytes(bytes).ok_or_else(strange)?;
            let content = if len <= SHORT {
                Moving::here(memory::copied(&bytes[Envelope::BYTES..][..len], "a message of another rank")?)
            } else {
                Moving::receive(&self.mpi, len, from, CONTENT)?
            };
            self.incoming.push(Incoming { from, tag, content });
        }
        Ok(())
    }

    /// Gives the messages that are whole to `put`, those of a rank in their order.
    fn take_messages(&mut self, put: &mut dyn FnMut(usize, Tag, Vec<u8>)) -> Result<()> {
        let mut late = Vec::new();
        let mut at = 0;
        while at < self.incoming.len() {
            let Incoming { from, tag, content } = &mut self.incoming[at];
            if !late.contains(from) && content.is_done(&self.mpi)? {
                put(*from, *tag, content.take()?);
                self.incoming.remove(at);
            } else {
                late.push(*from);
                at += 1;
            }
        }
        Ok(())
    }

    fn forget_sent(&mut self) -> Result<()> {
        let mut at = 0;
        while at < self.outgoing.len() {
            let Outgoing { envelope, content, .. } = &mut self.outgoing[at];
            if envelope.is_done(&self.mpi)? && content.is_done(&self.mpi)? {
                self.outgoing.remove(at);
            } else {
                at += 1;
            }
        }
        Ok(())
    }
}

impl<H: Handle> Transport for MpiTransport<H> {
    fn send(&mut self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        self.check()?;
        let what = Unsent { to, tag, since: Instant::now() };
        let envelope = Envelope { len: message.len(), tag, from: self.rank }.to_bytes();
        let mut first = memory::with_capacity(Envelope::BYTES + SHORT.min(message.len()), "a message")?;
        first.extend(envelope);
        let is_short = message.len() <= SHORT;
        if is_short {
            first.extend(&message);
        }
        let envelope = Moving::send(&self.mpi, first, to, ENVELOPE)?;
        let content =
            if is_short { Moving::here(Vec::new()) } else { Moving::send(&self.mpi, message, to, CONTENT)? };
        self.outgoing.push(Outgoing { what, envelope, content });
        self.forget_sent()
    }

    fn progress(&mut self, put: &mut dyn FnMut(usize, Tag, Vec<u8>)) -> Result<()> {
        self.check()?;
        self.take_envelopes()?;
        self.take_messages(put)?;
        self.forget_sent()
    }

    fn unsent(&self) -> Option<Unsent> {
        self.outgoing.first().map(|outgoing| outgoing.what)
    }

    fn have_all_left(&mut self) -> Result<bool> {
        if self.mpi.is_finalized() {
            return Ok(true);
        }
        if let End::NotYet = self.end {
            self.end = End::Waiting(self.mpi.barrier()?);
        }
        if let End::Waiting(request) = &mut self.end
            && self.mpi.is_done(request)?
        {
            self.end = End::AllHere;
        }
        Ok(matches!(self.end, End::AllHere))
    }

    fn end_all(&mut self) {
        if !self.mpi.is_finalized() {
            log::warn!("rank {}: other ranks do not end. MPI ends all", self.rank);
            self.mpi.abort();
        }
    }
}
