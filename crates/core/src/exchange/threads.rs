//! Ranks that are threads of one process. One rank alone is a communicator without others.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::exchange::communicator::Communicator;
use crate::exchange::mailbox::{Mailbox, Wait};
use crate::exchange::message::Tag;

/// A rank that is a thread.
pub struct ThreadRank {
    rank: usize,
    mailboxes: Arc<Vec<Mailbox>>,
    timeout: Duration,
}

impl ThreadRank {
    /// Makes all ranks of a world.
    pub fn world(world_size: usize, timeout: Duration) -> Vec<ThreadRank> {
        let mailboxes = Arc::new((0..world_size).map(|_| Mailbox::new(world_size)).collect::<Vec<_>>());
        (0..world_size).map(|rank| ThreadRank { rank, mailboxes: mailboxes.clone(), timeout }).collect()
    }
}

impl Communicator for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.mailboxes.len()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        if let Some(failure) = self.mailboxes[self.rank].failure_in(tag) {
            return Err(failure);
        }
        self.mailboxes[to].put(self.rank, tag, message);
        Ok(())
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        let tell = || self.mailboxes.iter().for_each(|mailbox| mailbox.note_wait(self.rank, from));
        let message = self.mailboxes[self.rank].take(Wait::new(from, tag, self.timeout), tell);
        message.inspect_err(|error| self.fail(error))
    }

    fn fail(&self, error: &Error) {
        for (rank, mailbox) in self.mailboxes.iter().enumerate() {
            let is_own = rank == self.rank;
            let what = || format!("gave up: {error}");
            mailbox.fail(if is_own { error.clone() } else { Error::Rank { rank: self.rank, what: what() } });
        }
        for (rank, decided) in self.mailboxes.iter().enumerate() {
            let decisions = decided.decisions();
            self.mailboxes.iter().for_each(|mailbox| mailbox.hear(rank, decisions.clone()));
        }
    }

    fn decide(&self, tag: Tag) -> Result<()> {
        self.mailboxes[self.rank].decide(tag)
    }

    fn is_decided_by_others(&self, tag: Tag) -> bool {
        self.mailboxes[self.rank].is_decided_by_others(self.rank, tag, self.timeout / 4)
    }

    fn failure(&self) -> Option<Error> {
        self.mailboxes[self.rank].failure()
    }

    fn on_failure(&self, hook: Box<dyn Fn() + Send + Sync>) {
        self.mailboxes[self.rank].on_failure(hook);
    }

    fn leave(&self) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.leave(self.rank, "has ended".into(), 0));
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        self.leave();
    }
}
