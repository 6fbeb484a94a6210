//! Ranks that are processes, connected by TCP: a connection for each pair.
//!
//! A frame is the length of its content, a header, and the content. A thread for each connection reads frames into the mailbox, so a
//! rank that sends never waits for one that sends, too.

mod frame;
mod hello;
mod rendezvous;
mod sockets;

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::exchange::communicator::Communicator;
use crate::exchange::mailbox::{Mailbox, Wait};
use crate::exchange::message::Tag;

use frame::{Frame, read_frame, write_frame};

/// A rank that is a process.
pub struct TcpRank {
    rank: usize,
    local_rank: usize,
    connections: Arc<Connections>,
    readers: Vec<JoinHandle<()>>,
    process: u32,
}

/// What the threads of a rank share.
struct Connections {
    mailbox: Mailbox,
    timeout: Duration,
    /// By rank; `None` for this one.
    streams: Vec<Option<Mutex<TcpStream>>>,
    /// Whether the others have been told of a failure.
    has_told: Mutex<bool>,
    has_left: AtomicBool,
}

impl TcpRank {
    /// Connects this rank with all others. `address`: host and port of rank 0, which listens there.
    ///
    /// # Errors
    /// [`Error::Argument`] for a rank that is not below `world_size`, or an address that cannot be resolved. [`Error::State`] if not all
    /// ranks have come within the timeout, if two have the same number, or if they do not agree on their number.
    pub fn connect(rank: usize, world_size: usize, address: &str, timeout: Duration) -> Result<TcpRank> {
        if rank >= world_size {
            return Err(Error::argument(format!(
                "`rank` must be below `world_size`. Received: rank={rank}, world_size={world_size}"
            )));
        }
        let (streams, local_rank) = rendezvous::meet(rank, world_size, address, timeout)?;
        let no_thread = |e| Error::State(format!("cannot prepare the connections between ranks: {e}"));
        sockets::close_in_children(streams.iter().flatten());
        let (mut to_read, mut to_write) = (Vec::new(), Vec::new());
        for (from, stream) in streams.into_iter().enumerate() {
            if let Some(stream) = &stream {
                stream.set_nodelay(true).map_err(no_thread)?;
                stream.set_read_timeout(None).map_err(no_thread)?;
                stream.set_write_timeout(Some(timeout)).map_err(no_thread)?;
                to_read.push((from, stream.try_clone().map_err(no_thread)?));
            }
            to_write.push(stream.map(Mutex::new));
        }
        let (has_told, has_left) = (Mutex::new(false), AtomicBool::new(false));
        let (mailbox, streams) = (Mailbox::new(world_size), to_write);
        let connections = Arc::new(Connections { mailbox, timeout, streams, has_told, has_left });
        let mut readers = Vec::new();
        for (from, stream) in to_read {
            let connections = connections.clone();
            let reader = std::thread::Builder::new().name(format!("sok-rank-{from}"));
            readers.push(reader.spawn(move || connections.read_all(stream, from)).map_err(no_thread)?);
        }
        let process = std::process::id();
        Ok(TcpRank { rank, local_rank, connections, readers, process })
    }

    /// Number of this rank among those on the same host, from 0.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The messages that have come.
    pub(super) fn mailbox(&self) -> &Mailbox {
        &self.connections.mailbox
    }

    /// Tells all others that this rank has waited for half the timeout for rank `from`.
    pub(super) fn tell_wait(&self, from: usize) {
        self.connections.mailbox.note_wait(self.rank, from);
        (0..self.world_size()).for_each(|to| self.connections.write_soon(to, &Frame::Wait(from as u64)));
    }

    /// Leaves the others. `beside`: by rank, how many messages it has sent beside the connections.
    pub(super) fn leave_with(&self, beside: &[u64]) {
        if !self.is_fork() {
            self.connections.leave(beside);
        }
    }

    /// Whether this process is a fork of the one that is a rank.
    pub(super) fn is_fork(&self) -> bool {
        self.process != std::process::id()
    }

    /// Checks that this process is the rank, and has not left.
    ///
    /// # Errors
    /// [`Error::State`].
    pub(super) fn check(&self) -> Result<()> {
        if self.connections.has_left.load(Relaxed) {
            return Err(Error::State("this process has left the other ranks, as it does at its end".into()));
        }
        if !self.is_fork() {
            return Ok(());
        }
        Err(Error::State(format!(
            "this process was forked from rank {}, whose connections it cannot use. Only the process that called `sok_keras.init` is \
             a rank",
            self.rank
        )))
    }
}

impl Connections {
    fn write(&self, to: usize, frame: &Frame) -> std::io::Result<()> {
        let Some(stream) = &self.streams[to] else { return Ok(()) };
        write_frame(&mut *stream.lock().unwrap_or_else(PoisonError::into_inner), frame)
    }

    /// Sends what the other need not have: it may be gone.
    fn write_soon(&self, to: usize, frame: &Frame) {
        if let Some(mut stream) = self.streams[to].as_ref().and_then(lock_soon) {
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
            let _ = write_frame(&mut *stream, frame);
            let _ = stream.set_write_timeout(Some(self.timeout));
        }
    }

    /// Fails, and tells all others once.
    fn fail(&self, error: Error) {
        self.mailbox.fail(error);
        if let Ok(mut has_told) = self.has_told.try_lock() {
            self.tell_failure(&mut has_told);
        } // Else another thread tells them.
    }

    /// Tells all others of a failure, with what this rank has decided.
    fn tell_failure(&self, has_told: &mut bool) {
        if let Some(failure) = self.mailbox.failure()
            && !std::mem::replace(has_told, true)
        {
            let frame = Frame::Failure(failure.to_string(), self.mailbox.decisions());
            (0..self.streams.len()).for_each(|to| self.write_soon(to, &frame));
        }
    }

    /// Makes all calls fail because a rank is lost.
    fn lose(&self, from: usize, why: &str) {
        self.fail(self.mailbox.lose(from, why));
    }

    /// Tells all others once that this rank sends no more. They must hear of a failure first, and of the rank that is to blame. `beside`:
    /// by rank, how many messages it has sent beside the connections.
    fn leave(&self, beside: &[u64]) {
        if self.has_left.swap(true, Relaxed) {
            return;
        }
        self.tell_failure(&mut self.has_told.lock().unwrap_or_else(PoisonError::into_inner));
        for (to, beside) in beside.iter().enumerate() {
            self.write_soon(to, &Frame::End(*beside));
        }
    }

    /// Puts the frames of a connection into the mailbox until it ends.
    fn read_all(&self, mut stream: TcpStream, from: usize) {
        loop {
            match read_frame(&mut stream) {
                Ok(Frame::Message(tag, content)) => self.mailbox.put(from, tag, content),
                Ok(Frame::Wait(for_rank)) => self.mailbox.note_wait(from, for_rank as usize),
                Ok(Frame::Failure(why, decisions)) => {
                    self.mailbox.hear(from, decisions);
                    self.fail(Error::Rank { rank: from, what: format!("gave up: {why}") });
                }
                Ok(Frame::End(beside)) => {
                    return self.mailbox.leave(from, "has ended its program".into(), beside);
                }
                Err(error) => return self.lose(from, &format!("was lost ({error})")),
            }
        }
    }
}

/// Locks a stream, unless another thread is stuck writing to it.
fn lock_soon(stream: &Mutex<TcpStream>) -> Option<MutexGuard<'_, TcpStream>> {
    let deadline = Instant::now() + Duration::from_millis(100);
    loop {
        match stream.try_lock() {
            Ok(stream) => return Some(stream),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() > deadline => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

impl Communicator for TcpRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.connections.streams.len()
    }

    fn timeout(&self) -> Duration {
        self.connections.timeout
    }

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        self.check()?;
        if let Some(failure) = self.connections.mailbox.failure_in(tag) {
            return Err(failure);
        }
        self.connections.write(to, &Frame::Message(tag, message)).map_err(|error| {
            let is_late =
                matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            let why = if is_late {
                format!("has taken nothing of {tag} within {} s", self.timeout().as_secs_f64())
            } else {
                // What it had to say before it closed the connection, and whom it blames, may still be unread.
                let why = self.connections.mailbox.wait_gone(to, self.timeout() / 4);
                why.unwrap_or_else(|| format!("was lost ({error})"))
            };
            self.connections.lose(to, &why);
            self.connections.mailbox.failure_in(tag).unwrap_or(Error::Rank { rank: to, what: why })
        })
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        self.check()?;
        let wait = Wait::new(from, tag, self.timeout());
        let message = self.connections.mailbox.take(wait, || self.tell_wait(from));
        message.inspect_err(|error| self.fail(error))
    }

    fn fail(&self, error: &Error) {
        self.connections.fail(error.clone());
    }

    fn decide(&self, tag: Tag) -> Result<()> {
        self.connections.mailbox.decide(tag)
    }

    fn is_decided_by_others(&self, tag: Tag) -> bool {
        self.connections.mailbox.is_decided_by_others(self.rank, tag, self.timeout() / 4)
    }

    fn failure(&self) -> Option<Error> {
        self.connections.mailbox.failure()
    }

    fn on_failure(&self, hook: Box<dyn Fn() + Send + Sync>) {
        self.connections.mailbox.on_failure(hook);
    }

    fn leave(&self) {
        self.leave_with(&vec![0; self.world_size()]);
    }
}

impl Drop for TcpRank {
    fn drop(&mut self) {
        if self.is_fork() {
            // The threads are the parent's.
            self.readers.drain(..).for_each(std::mem::forget);
            return;
        }
        self.leave();
        for stream in self.connections.streams.iter().flatten() {
            let _ = stream.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
        }
        self.readers.drain(..).for_each(|reader| drop(reader.join()));
    }
}
