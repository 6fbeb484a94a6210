//! Messages that have come and that no call has taken yet.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::exchange::message::{Call, Tag};

/// The messages to one rank.
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
    /// Are called at a failure.
    hooks: Mutex<Vec<Hook>>,
}

type Hook = Box<dyn Fn() + Send + Sync>;

struct State {
    messages: HashMap<(usize, Tag), VecDeque<Vec<u8>>>,
    /// By rank: the tag of its last message.
    last: Vec<Option<Tag>>,
    /// By rank: why no more messages will come.
    gone: Vec<Option<Gone>>,
    /// By rank: how many of its messages have come beside the connection.
    beside: Vec<u64>,
    failure: Option<Error>,
    /// What this rank has decided.
    decisions: Decisions,
    /// By rank: what it had decided when it failed.
    heard: Vec<Option<Decisions>>,
}

/// A rank that sends no more.
struct Gone {
    why: String,
    /// How many messages it has sent beside the connection. They may come later than the news that it is gone.
    beside: u64,
}

/// By call and layer: the number of the newest one that is known to be agreed on by all ranks.
pub(super) type Decisions = HashMap<(Call, u32), u64>;

impl Mailbox {
    pub fn new(world_size: usize) -> Mailbox {
        let state = State {
            messages: HashMap::new(),
            last: vec![None; world_size],
            gone: (0..world_size).map(|_| None).collect(),
            beside: vec![0; world_size],
            failure: None,
            decisions: Decisions::new(),
            heard: vec![None; world_size],
        };
        Mailbox { state: Mutex::new(state), changed: Condvar::new(), hooks: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message.
    pub fn put(&self, from: usize, tag: Tag, message: Vec<u8>) {
        self.state().push(from, tag, message);
        self.changed.notify_all();
    }

    /// Adds a message that came beside the connection.
    pub fn put_beside(&self, from: usize, tag: Tag, message: Vec<u8>) {
        let mut state = self.state();
        state.push(from, tag, message);
        state.beside[from] += 1;
        self.changed.notify_all();
    }

    /// Notes that a rank sends no more messages. Calls that wait for one of them fail; others go on. `beside`: how many messages it has
    /// sent beside the connection, which are still waited for.
    pub fn leave(&self, from: usize, why: String, beside: u64) {
        self.state().gone[from].get_or_insert(Gone { why, beside });
        self.changed.notify_all();
    }

    /// Waits until a rank is gone, or the mailbox fails. Returns why the rank is gone, if it is.
    pub fn wait_gone(&self, from: usize, patience: Duration) -> Option<String> {
        let state = self.state();
        let is_here = |state: &mut State| state.gone[from].is_none() && state.failure.is_none();
        let waited = self.changed.wait_timeout_while(state, patience, is_here);
        waited.unwrap_or_else(PoisonError::into_inner).0.gone[from].as_ref().map(|gone| gone.why.clone())
    }

    /// Notes that a rank is lost. Returns the error with which all calls are to fail.
    pub fn lose(&self, from: usize, why: &str) -> Error {
        let what = format!("{why}{}", self.state().last_seen(from));
        self.leave(from, why.into(), 0);
        Error::Rank { rank: from, what }
    }

    /// Makes all calls fail, now and later. The first error counts.
    pub fn fail(&self, error: Error) {
        self.state().failure.get_or_insert(error);
        self.changed.notify_all();
        self.hooks().iter().for_each(|hook| hook());
    }

    /// Calls `hook` at every failure, and at once if there was one.
    pub fn on_failure(&self, hook: Hook) {
        let mut hooks = self.hooks();
        if self.failure().is_some() {
            hook();
        }
        hooks.push(hook);
    }

    fn hooks(&self) -> MutexGuard<'_, Vec<Hook>> {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that all ranks agree on a call, unless the mailbox has failed.
    pub fn decide(&self, tag: Tag) -> Result<()> {
        let mut state = self.state();
        match state.failure_in(tag) {
            Some(failure) => Err(failure),
            None => {
                state.decisions.insert((tag.call, tag.layer), tag.step);
                Ok(())
            }
        }
    }

    /// What this rank has decided. It decides nothing more once the mailbox has failed.
    pub fn decisions(&self) -> Decisions {
        self.state().decisions.clone()
    }

    /// Notes what another rank had decided when it failed.
    pub fn hear(&self, from: usize, decisions: Decisions) {
        self.state().heard[from] = Some(decisions);
        self.changed.notify_all();
    }

    /// Whether another rank than `own` has decided on a call. Waits for each that is not gone to say so.
    pub fn is_decided_by_others(&self, own: usize, tag: Tag, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.state();
        loop {
            let heard = || state.heard.iter().flatten();
            let newest = |decisions: &Decisions| decisions.get(&(tag.call, tag.layer)).copied();
            if heard().filter_map(newest).any(|step| step >= tag.step) {
                return true;
            }
            let is_silent =
                |rank: usize| rank != own && state.heard[rank].is_none() && state.gone[rank].is_none();
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !(0..state.heard.len()).any(is_silent) {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn failure(&self) -> Option<Error> {
        self.state().failure.clone()
    }

    /// The failure as a call is to raise it: with the call, unless the failure names it.
    pub fn failure_in(&self, tag: Tag) -> Option<Error> {
        self.state().failure_in(tag)
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
            if let Some(error) = state.why_none(from, tag, timeout, deadline) {
                return Err(error);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes a message that has come.
    pub fn pop(&self, from: usize, tag: Tag) -> Option<Vec<u8>> {
        self.state().pop(from, tag)
    }

    /// Why a message that has not come will not come within the timeout, which ends at `deadline`.
    pub fn why_none(&self, from: usize, tag: Tag, timeout: Duration, deadline: Instant) -> Option<Error> {
        self.state().why_none(from, tag, timeout, deadline)
    }
}

impl State {
    fn push(&mut self, from: usize, tag: Tag, message: Vec<u8>) {
        self.last[from] = Some(tag);
        self.messages.entry((from, tag)).or_default().push_back(message);
    }

    fn why_none(&self, from: usize, tag: Tag, timeout: Duration, deadline: Instant) -> Option<Error> {
        if let Some(failure) = self.failure_in(tag) {
            return Some(failure);
        }
        let gone = self.gone[from].as_ref().filter(|gone| gone.beside <= self.beside[from]);
        if let Some(Gone { why, .. }) = gone {
            let what = format!("{why}, while this rank waits for it in {tag}{}", self.last_seen(from));
            return Some(Error::Rank { rank: from, what });
        }
        if Instant::now() < deadline {
            return None;
        }
        let (seconds, last) = (timeout.as_secs_f64(), self.last_seen(from));
        Some(Error::Rank { rank: from, what: format!("has sent nothing for {tag} within {seconds} s{last}") })
    }

    fn pop(&mut self, from: usize, tag: Tag) -> Option<Vec<u8>> {
        let messages = self.messages.get_mut(&(from, tag))?;
        let message = messages.pop_front();
        if messages.is_empty() {
            self.messages.remove(&(from, tag));
        }
        message
    }

    fn failure_in(&self, tag: Tag) -> Option<Error> {
        match self.failure.clone()? {
            Error::Rank { rank, what } if !what.contains(&tag.to_string()) => {
                Some(Error::Rank { rank, what: format!("{what}. This rank is in {tag}") })
            }
            failure => Some(failure),
        }
    }

    /// Where a rank was last seen, for messages.
    fn last_seen(&self, rank: usize) -> String {
        self.last[rank]
            .map_or(". It has sent nothing so far".into(), |tag| format!(". It was last seen in {tag}"))
    }
}
