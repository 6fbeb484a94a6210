//! What carries messages beside TCP, on clusters that have something faster.

use std::time::Instant;

use crate::error::Result;
use crate::exchange::message::Tag;

/// A message that another rank has not taken yet.
#[derive(Clone, Copy, Debug)]
pub struct Unsent {
    /// The rank.
    pub to: usize,
    /// Tag of the message.
    pub tag: Tag,
    /// When it was sent.
    pub since: Instant,
}

/// Carries messages between ranks. It has no threads: messages move while it is called, and no call waits.
pub trait Transport: Send {
    /// Starts to send a message. Messages of a rank to another one come in the order in which they were sent.
    ///
    /// # Errors
    /// [`Error`](crate::Error) if the transport fails, as in all methods.
    fn send(&mut self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()>;

    /// Moves messages. Gives those that have come to `put`, with the rank that sent them.
    ///
    /// # Errors
    /// As `send`, and [`Error::Memory`](crate::Error::Memory) for a message that there is no memory for.
    fn progress(&mut self, put: &mut dyn FnMut(usize, Tag, Vec<u8>)) -> Result<()>;

    /// The message that was sent first among those that are not taken yet.
    fn unsent(&self) -> Option<Unsent>;

    /// Says once that this rank sends no more. Returns whether all have said so.
    ///
    /// # Errors
    /// As `send`.
    fn have_all_left(&mut self) -> Result<bool>;

    /// Ends the processes of all ranks, because some do not end by themselves.
    fn end_all(&mut self);
}
