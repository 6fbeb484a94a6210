//! Ranks that are processes, connected by TCP: a connection for each pair.
//!
//! A frame is the length of its content, a header, and the content. A thread for each connection reads frames into the mailbox, so a
//! rank that sends never waits for one that sends, too.

mod frame;
mod hello;
mod rendezvous;
mod sockets;

use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::exchange::communicator::Communicator;
use crate::exchange::mailbox::Mailbox;
use crate::exchange::message::Tag;

use frame::{Frame, read_frame, write_frame};

/// A rank that is a process.
pub struct TcpRank {
    rank: usize,
    local_rank: usize,
    timeout: Duration,
    mailbox: Arc<Mailbox>,
    /// By rank; `None` for this one.
    streams: Vec<Option<Mutex<TcpStream>>>,
    readers: Vec<JoinHandle<()>>,
    process: u32,
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
        let mailbox = Arc::new(Mailbox::new(world_size));
        let mut readers = Vec::new();
        for (from, stream) in streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            stream.set_nodelay(true).map_err(no_thread)?;
            stream.set_read_timeout(None).map_err(no_thread)?;
            stream.set_write_timeout(Some(timeout)).map_err(no_thread)?;
            let (stream, mailbox) = (stream.try_clone().map_err(no_thread)?, mailbox.clone());
            let reader = std::thread::Builder::new().name(format!("sok-rank-{from}"));
            readers.push(reader.spawn(move || read_all(stream, from, &mailbox)).map_err(no_thread)?);
        }
        sockets::close_in_children(streams.iter().flatten());
        let streams = streams.into_iter().map(|stream| stream.map(Mutex::new)).collect();
        let process = std::process::id();
        Ok(TcpRank { rank, local_rank, timeout, mailbox, streams, readers, process })
    }

    /// Number of this rank among those on the same host, from 0.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::State(format!(
            "this process was forked from rank {}, whose connections it cannot use. Only the process that called `sok_keras.init` is \
             a rank",
            self.rank
        )))
    }

    fn write(&self, to: usize, frame: &Frame) -> std::io::Result<()> {
        let Some(stream) = &self.streams[to] else { return Ok(()) };
        write_frame(&mut *stream.lock().unwrap_or_else(PoisonError::into_inner), frame)
    }

    /// Sends to all others what they need not have: they may be gone.
    fn write_to_all(&self, frame: &Frame) {
        for to in (0..self.streams.len()).filter(|&to| to != self.rank) {
            let Some(stream) = &self.streams[to] else { continue };
            // A stream that another thread is writing to is stuck, or its rank is well and hears of the end of the connection.
            if let Ok(mut stream) = stream.try_lock() {
                let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
                let _ = write_frame(&mut *stream, frame);
                let _ = stream.set_write_timeout(Some(self.timeout));
            }
        }
    }
}

/// Puts the frames of a connection into the mailbox until it ends.
fn read_all(mut stream: TcpStream, from: usize, mailbox: &Mailbox) {
    loop {
        match read_frame(&mut stream) {
            Ok(Frame::Message(tag, content)) => mailbox.put(from, tag, content),
            Ok(Frame::Failure(why)) => {
                mailbox.fail(Error::Rank { rank: from, what: format!("gave up: {why}") })
            }
            Ok(Frame::End) => return mailbox.leave(from, "has ended its program".into()),
            Err(error) => return mailbox.lose(from, &format!("was lost ({error})")),
        }
    }
}

impl Communicator for TcpRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.streams.len()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        self.check_process()?;
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        self.write(to, &Frame::Message(tag, message)).map_err(|error| {
            let is_late =
                matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            let why = if is_late {
                format!("has taken nothing of {tag} within {} s", self.timeout.as_secs_f64())
            } else {
                format!("was lost ({error})")
            };
            self.mailbox.lose(to, &why);
            let error = self.failure().unwrap_or(Error::Rank { rank: to, what: why });
            self.fail(&error);
            error
        })
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        self.check_process()?;
        self.mailbox.take(from, tag, self.timeout).inspect_err(|error| self.fail(error))
    }

    fn fail(&self, error: &Error) {
        let is_first = self.mailbox.failure().is_none();
        self.mailbox.fail(error.clone());
        if is_first {
            self.write_to_all(&Frame::Failure(error.to_string()));
        }
    }

    fn failure(&self) -> Option<Error> {
        self.mailbox.failure()
    }
}

impl Drop for TcpRank {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The threads are the parent's.
            self.readers.drain(..).for_each(std::mem::forget);
            return;
        }
        self.write_to_all(&Frame::End);
        for stream in self.streams.iter().flatten() {
            let _ = stream.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
        }
        self.readers.drain(..).for_each(|reader| drop(reader.join()));
    }
}
