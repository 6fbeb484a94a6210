//! Ranks that are processes and have a transport beside TCP. Start-up, and news of ranks that fail or end, come by TCP. Messages come by
//! the transport, which whoever waits for one polls.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::exchange::communicator::Communicator;
use crate::exchange::mailbox::Wait;
use crate::exchange::message::Tag;
use crate::exchange::tcp::TcpRank;
use crate::exchange::transport::{Transport, Unsent};

/// A rank that is a process, with a transport.
pub struct PolledRank {
    shared: Arc<Shared>,
    helper: Mutex<Option<JoinHandle<()>>>,
}

/// What the threads of a rank share.
struct Shared {
    tcp: TcpRank,
    /// `None` after the rank has left.
    transport: Mutex<Option<Box<dyn Transport>>>,
    /// By rank: how many messages were sent to it.
    sent: Vec<AtomicU64>,
    work: Mutex<Work>,
    changed: Condvar,
}

/// What the helper is to do.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    /// To look now and then: others may wait for this rank to take a message.
    Look,
    /// To look often: messages are on their way while this rank calculates.
    Send,
    End,
}

/// Between two looks of the helper while messages are on their way, and otherwise.
const OFTEN: Duration = Duration::from_millis(1);
const SELDOM: Duration = Duration::from_millis(100);
/// How long a rank that has failed waits at its end for those that take its messages.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

impl PolledRank {
    /// Makes a rank of one that is connected by TCP.
    ///
    /// # Errors
    /// [`Error::State`] if the system gives no thread.
    pub fn new(tcp: TcpRank, transport: Box<dyn Transport>) -> Result<PolledRank> {
        let sent = (0..tcp.world_size()).map(|_| AtomicU64::new(0)).collect();
        let (transport, work) = (Mutex::new(Some(transport)), Mutex::new(Work::Look));
        let shared = Arc::new(Shared { tcp, transport, sent, work, changed: Condvar::new() });
        let helper = std::thread::Builder::new().name("sok-messages".into());
        let helping = shared.clone();
        let helper = helper.spawn(move || helping.help());
        let helper =
            helper.map_err(|e| Error::State(format!("cannot prepare the messages of ranks: {e}")))?;
        Ok(PolledRank { shared, helper: Mutex::new(Some(helper)) })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Moves messages, unless another thread does so.
    fn try_progress(&self) {
        match self.transport.try_lock() {
            Ok(transport) => drop(self.progress_with(transport)),
            Err(TryLockError::Poisoned(poisoned)) => drop(self.progress_with(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Moves messages. Returns what is not taken yet.
    fn progress(&self) -> Option<Unsent> {
        self.progress_with(lock(&self.transport))
    }

    fn progress_with(&self, mut guard: MutexGuard<'_, Option<Box<dyn Transport>>>) -> Option<Unsent> {
        let transport = guard.as_mut()?;
        let mailbox = self.tcp.mailbox();
        let moved = transport.progress(&mut |from, tag, message| mailbox.put_beside(from, tag, message));
        let unsent = transport.unsent();
        drop(guard);
        if let Err(error) = moved {
            self.tcp.fail(&error);
        }
        self.check_time(unsent);
        unsent
    }

    /// Fails if another rank has not taken a message within the timeout.
    fn check_time(&self, unsent: Option<Unsent>) {
        let timeout = self.tcp.timeout();
        if let Some(Unsent { to, tag, since }) = unsent
            && since.elapsed() > timeout
            && self.tcp.failure().is_none()
        {
            let what = format!("has taken nothing of {tag} within {} s", timeout.as_secs_f64());
            self.tcp.fail(&Error::Rank { rank: to, what });
        }
    }

    /// Moves messages until the rank leaves, also while no call waits: a message that is large needs its sender until it is taken.
    fn help(&self) {
        let mut work = lock(&self.work);
        while *work != Work::End {
            let pause = if *work == Work::Send { OFTEN } else { SELDOM };
            let (woken, time) =
                self.changed.wait_timeout(work, pause).unwrap_or_else(PoisonError::into_inner);
            work = woken;
            if *work == Work::End || !time.timed_out() {
                continue;
            }
            // A message that is sent from here on says so again.
            *work = Work::Look;
            drop(work);
            let unsent = self.progress();
            work = lock(&self.work);
            if unsent.is_some() && *work == Work::Look {
                *work = Work::Send;
            }
        }
    }

    /// Moves messages until `is_done`, which is given what is not taken yet.
    fn progress_until(&self, mut is_done: impl FnMut(Option<Unsent>) -> bool) {
        let pause = Pause::new();
        while !is_done(self.progress()) {
            pause.wait();
        }
    }

    /// Whether this rank has failed, and then for so long.
    fn has_failed_for(&self, patience: Duration, since: &mut Option<Instant>) -> bool {
        self.tcp.failure().is_some() && since.get_or_insert_with(Instant::now).elapsed() >= patience
    }

    /// Waits until all have left: only then may the transport end. After a failure some may never leave. They are ended then.
    fn wait_for_all(&self) {
        let mut failed = None;
        let has_left = |unsent: Option<Unsent>| {
            let mut transport = lock(&self.transport);
            let Some(transport) = transport.as_mut() else { return true };
            match transport.have_all_left() {
                Ok(all) => all && unsent.is_none(),
                Err(error) => {
                    self.tcp.fail(&error);
                    false
                }
            }
        };
        let mut are_all_here = false;
        self.progress_until(|unsent| {
            are_all_here = has_left(unsent);
            are_all_here || self.has_failed_for(self.tcp.timeout(), &mut failed)
        });
        if !are_all_here && let Some(transport) = lock(&self.transport).as_mut() {
            transport.end_all();
        }
    }
}

impl Communicator for PolledRank {
    fn rank(&self) -> usize {
        self.shared.tcp.rank()
    }

    fn world_size(&self) -> usize {
        self.shared.tcp.world_size()
    }

    fn timeout(&self) -> Duration {
        self.shared.tcp.timeout()
    }

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        let shared = &*self.shared;
        shared.tcp.check()?;
        if let Some(failure) = shared.tcp.mailbox().failure_in(tag) {
            return Err(failure);
        }
        let is_on_its_way = {
            let mut guard = lock(&shared.transport);
            let Some(transport) = guard.as_mut() else { return shared.tcp.check() };
            transport.send(to, tag, message).inspect_err(|error| self.fail(error))?;
            shared.sent[to].fetch_add(1, Relaxed);
            transport.unsent().is_some()
        };
        if is_on_its_way {
            let mut work = lock(&shared.work);
            if *work == Work::Look {
                *work = Work::Send;
                shared.changed.notify_all();
            }
        }
        Ok(())
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        let shared = &*self.shared;
        let (mut wait, pause) = (Wait::new(from, tag, self.timeout()), Pause::new());
        loop {
            shared.tcp.check()?;
            // Asked before the last look: a message that came before a failure counts.
            let why_none = shared.tcp.mailbox().why_none(&wait);
            shared.try_progress();
            if let Some(message) = shared.tcp.mailbox().pop(from, tag) {
                return Ok(message);
            }
            if let Some(error) = why_none {
                self.fail(&error);
                return Err(error);
            }
            if wait.is_to_be_told() {
                shared.tcp.tell_wait(from);
            }
            pause.wait();
        }
    }

    fn fail(&self, error: &Error) {
        self.shared.tcp.fail(error);
    }

    fn decide(&self, tag: Tag) -> Result<()> {
        self.shared.tcp.decide(tag)
    }

    fn is_decided_by_others(&self, tag: Tag) -> bool {
        self.shared.tcp.is_decided_by_others(tag)
    }

    fn failure(&self) -> Option<Error> {
        self.shared.tcp.failure()
    }

    fn on_failure(&self, hook: Box<dyn Fn() + Send + Sync>) {
        self.shared.tcp.on_failure(hook);
    }

    /// Waits until all ranks have left. After a failure it waits for the timeout at most, and ends them then.
    fn leave(&self) {
        let shared = &*self.shared;
        if shared.tcp.is_fork() {
            return;
        }
        let Some(helper) = lock(&self.helper).take() else { return };
        let mut failed = None;
        shared.progress_until(|unsent| unsent.is_none() || shared.has_failed_for(AFTER_FAILURE, &mut failed));
        let sent: Vec<u64> = shared.sent.iter().map(|sent| sent.load(Relaxed)).collect();
        shared.tcp.leave_with(&sent);
        shared.wait_for_all();
        *lock(&shared.work) = Work::End;
        shared.changed.notify_all();
        drop(helper.join());
        *lock(&shared.transport) = None;
    }
}

impl Drop for PolledRank {
    fn drop(&mut self) {
        if self.shared.tcp.is_fork() {
            // The thread is the parent's, and so is the transport.
            let helper = self.helper.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(helper.take());
            std::mem::forget(self.shared.clone());
            return;
        }
        self.leave();
    }
}

/// Waits between two polls. A short wait ends without delay; a long one leaves the core to others, since there may be more ranks than cores.
struct Pause {
    since: Instant,
}

impl Pause {
    /// For so long a thread polls without sleeping.
    const BRIEF: Duration = Duration::from_micros(500);
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(1);

    fn new() -> Pause {
        Pause { since: Instant::now() }
    }

    fn wait(&self) {
        let waited = self.since.elapsed();
        if waited < Pause::BRIEF {
            std::thread::yield_now();
        } else {
            // A small part of what it has waited already.
            std::thread::sleep((waited / 16).clamp(Pause::SHORTEST, Pause::LONGEST));
        }
    }
}
