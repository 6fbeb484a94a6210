//! What a transport between ranks does.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::exchange::message::Tag;

/// A rank's connections to all others. Threads may use it at the same time, for different tags.
///
/// A failure is final: once a rank is lost, or has not answered within the timeout, every later call fails with the same error, and the
/// other ranks hear of it. A call therefore ends on every rank within the timeout, with or without an error.
pub trait Communicator: Send + Sync {
    /// Number of this rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// How long a call waits for another rank.
    fn timeout(&self) -> Duration;

    /// Sends a message to another rank.
    ///
    /// # Errors
    /// [`Error::Rank`] if the other rank is lost or takes nothing within the timeout, or if this communicator has failed before.
    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()>;

    /// Waits for the message with this tag from another rank.
    ///
    /// # Errors
    /// As `send`, and [`Error::Rank`] if the message does not come within the timeout.
    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>>;

    /// Makes this communicator fail, and tells all other ranks.
    fn fail(&self, error: &Error);

    /// Notes that this rank knows that all ranks agree on the call with this tag.
    ///
    /// # Errors
    /// The failure, if it has failed before. Others may have been told by then that this rank does not know.
    fn decide(&self, tag: Tag) -> Result<()>;

    /// Whether another rank has decided on the call with this tag. To be asked after a failure. Waits a quarter of the timeout at most for
    /// what the others say.
    fn is_decided_by_others(&self, tag: Tag) -> bool;

    /// Returns the error with which it has failed, if it has.
    fn failure(&self) -> Option<Error>;

    /// Calls `hook` when it fails, from any thread; at once if it has failed. It may be called several times.
    fn on_failure(&self, hook: Box<dyn Fn() + Send + Sync>);

    /// Sends no more, and says so to the others: those that wait for this rank fail at once. What was sent before still reaches them.
    /// Nothing is done if it was called before.
    fn leave(&self);
}
