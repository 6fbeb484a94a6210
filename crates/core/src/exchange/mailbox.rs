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
    /// By rank: for which rank it has waited for half the timeout, as it said after its last message.
    waits: Vec<Option<usize>>,
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

/// A call that waits for a message.
pub(super) struct Wait {
    from: usize,
    tag: Tag,
    timeout: Duration,
    begin: Instant,
    /// Whether the other ranks were told of it.
    is_told: bool,
}

impl Wait {
    pub fn new(from: usize, tag: Tag, timeout: Duration) -> Wait {
        Wait { from, tag, timeout, begin: Instant::now(), is_told: false }
    }

    /// Whether half the timeout is over, for the first time that it is asked after. The other ranks are to be told then: one that waits
    /// for this rank must not blame it.
    pub fn is_to_be_told(&mut self) -> bool {
        self.left_of(self.timeout / 2).is_zero() && !std::mem::replace(&mut self.is_told, true)
    }

    fn left_of(&self, time: Duration) -> Duration {
        time.saturating_sub(self.begin.elapsed())
    }
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
            waits: vec![None; world_size],
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

    /// Notes that rank `who` has waited for half the timeout for a message of rank `from`.
    pub fn note_wait(&self, who: usize, from: usize) {
        let mut state = self.state();
        state.waits[who] = Some(from).filter(|from| *from < state.last.len());
    }

    /// Waits for a message. Calls `tell` once if half the timeout is over.
    ///
    /// # Errors
    /// [`Error::Rank`] if the mailbox fails, if the sender is gone, or after the timeout.
    pub fn take(&self, mut wait: Wait, tell: impl Fn()) -> Result<Vec<u8>> {
        let mut state = self.state();
        loop {
            if let Some(message) = state.pop(wait.from, wait.tag) {
                return Ok(message);
            }
            if let Some(error) = state.why_none(&wait) {
                return Err(error);
            }
            if wait.is_to_be_told() {
                drop(state);
                tell();
                state = self.state();
                continue;
            }
            let left = wait.left_of(if wait.is_told { wait.timeout } else { wait.timeout / 2 });
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes a message that has come.
    pub fn pop(&self, from: usize, tag: Tag) -> Option<Vec<u8>> {
        self.state().pop(from, tag)
    }

    /// Why a message that has not come will not come within the timeout.
    pub fn why_none(&self, wait: &Wait) -> Option<Error> {
        self.state().why_none(wait)
    }
}

impl State {
    fn push(&mut self, from: usize, tag: Tag, message: Vec<u8>) {
        self.last[from] = Some(tag);
        self.waits[from] = None;
        self.messages.entry((from, tag)).or_default().push_back(message);
    }

    fn why_none(&self, wait: &Wait) -> Option<Error> {
        let Wait { from, tag, .. } = *wait;
        if let Some(failure) = self.failure_in(tag) {
            return Some(failure);
        }
        let gone = self.gone[from].as_ref().filter(|gone| gone.beside <= self.beside[from]);
        if let Some(Gone { why, .. }) = gone {
            let what = format!("{why}, while this rank waits for it in {tag}{}", self.last_seen(from));
            return Some(Error::Rank { rank: from, what });
        }
        if !wait.left_of(wait.timeout).is_zero() {
            return None;
        }
        let (rank, waits_for_it) = self.to_blame(from);
        let (seconds, last) = (wait.timeout.as_secs_f64(), self.last_seen(rank));
        let whom = match waits_for_it {
            None => format!("for {tag}"),
            Some(other) => format!("to rank {other}, for which this rank waits in {tag},"),
        };
        Some(Error::Rank { rank, what: format!("has sent nothing {whom} within {seconds} s{last}") })
    }

    /// The rank to blame if `from` has sent nothing: `from` may wait for another rank, and that one for a third. Returns also the rank
    /// that waits for it, if this one does not. If ranks wait for each other in a circle, `from` is to blame.
    fn to_blame(&self, from: usize) -> (usize, Option<usize>) {
        let mut chain = vec![from];
        while let Some(next) = self.waits[chain[chain.len() - 1]] {
            if chain.contains(&next) {
                return (from, None);
            }
            chain.push(next);
        }
        (chain[chain.len() - 1], chain.len().checked_sub(2).map(|last| chain[last]))
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
