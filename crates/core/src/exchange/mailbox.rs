//! Messages that have come and that no call has taken yet.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::exchange::message::Tag;

/// The messages to one rank.
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    messages: HashMap<(usize, Tag), VecDeque<Vec<u8>>>,
    /// By rank: the tag of its last message.
    last: Vec<Option<Tag>>,
    /// By rank: why no more messages will come.
    gone: Vec<Option<String>>,
    failure: Option<Error>,
}

impl Mailbox {
    pub fn new(world_size: usize) -> Mailbox {
        let (messages, last, gone) = (HashMap::new(), vec![None; world_size], vec![None; world_size]);
        Mailbox { state: Mutex::new(State { messages, last, gone, failure: None }), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message.
    pub fn put(&self, from: usize, tag: Tag, message: Vec<u8>) {
        let mut state = self.state();
        state.last[from] = Some(tag);
        state.messages.entry((from, tag)).or_default().push_back(message);
        self.changed.notify_all();
    }

    /// Notes that a rank sends no more messages. Calls that wait for one of them fail; others go on.
    pub fn leave(&self, from: usize, why: String) {
        self.state().gone[from].get_or_insert(why);
        self.changed.notify_all();
    }

    /// Makes all calls fail because a rank is lost.
    pub fn lose(&self, from: usize, why: &str) {
        let what = format!("{why}{}", self.state().last_seen(from));
        self.fail(Error::Rank { rank: from, what });
    }

    /// Makes all calls fail, now and later. The first error counts.
    pub fn fail(&self, error: Error) {
        self.state().failure.get_or_insert(error);
        self.changed.notify_all();
    }

    pub fn failure(&self) -> Option<Error> {
        self.state().failure.clone()
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// [`Error::Rank`] if the mailbox fails, if the sender is gone, or after `timeout`.
    pub fn take(&self, from: usize, tag: Tag, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            if let Some(message) = state.pop(from, tag) {
                return Ok(message);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if let Some(why) = &state.gone[from] {
                let what = format!("{why}, while this rank waits for it in {tag}{}", state.last_seen(from));
                return Err(Error::Rank { rank: from, what });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (seconds, last) = (timeout.as_secs_f64(), state.last_seen(from));
                let what = format!("has sent nothing for {tag} within {seconds} s{last}");
                return Err(Error::Rank { rank: from, what });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl State {
    fn pop(&mut self, from: usize, tag: Tag) -> Option<Vec<u8>> {
        let messages = self.messages.get_mut(&(from, tag))?;
        let message = messages.pop_front();
        if messages.is_empty() {
            self.messages.remove(&(from, tag));
        }
        message
    }

    /// Where a rank was last seen, for messages.
    fn last_seen(&self, rank: usize) -> String {
        self.last[rank]
            .map_or(". It has sent nothing so far".into(), |tag| format!(". It was last seen in {tag}"))
    }
}
