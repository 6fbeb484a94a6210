//! Sends file descriptors to processes on the same host.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::mem::{MaybeUninit, size_of};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A socket that receives descriptors. Its name is in the abstract namespace, so no file is left behind.
///
/// A thread receives them as they come, because a socket holds few messages: else ranks that send to each other would wait for each other.
pub struct Channel {
    inbox: Arc<Inbox>,
    name: String,
    timeout: Duration,
    receiver: Option<JoinHandle<()>>,
    process: u32,
}

/// Two numbers that say what a descriptor is of.
pub type Key = [u64; 2];

/// What has come and was not taken.
struct Inbox {
    socket: UnixDatagram,
    state: Mutex<State>,
    has_come: Condvar,
}

#[derive(Default)]
struct State {
    descriptors: HashMap<Key, OwnedFd>,
    has_ended: bool,
}

/// How often the thread looks whether the channel is closed.
const PATIENCE: Duration = Duration::from_secs(1);

/// The number that comes with a descriptor.
const NUMBER_BYTES: usize = 16;

/// Room for the control message of one descriptor.
#[repr(C)]
union Control {
    _header: libc::cmsghdr,
    bytes: [u8; 64],
}

impl Channel {
    /// Opens a channel. `timeout`: how long `send` and `receive` wait.
    pub fn open(timeout: Duration) -> IoResult<Channel> {
        let mut tries = 0u32;
        let (socket, name) = loop {
            let name = format!("sok_keras-{}-{}", std::process::id(), unique(tries));
            match UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name)?) {
                Ok(socket) => break (socket, name),
                Err(error) if error.kind() == ErrorKind::AddrInUse && tries < 100 => tries += 1,
                Err(error) => return Err(error),
            }
        };
        socket.set_read_timeout(Some(PATIENCE))?;
        let inbox = Arc::new(Inbox { socket, state: Mutex::default(), has_come: Condvar::new() });
        let of_thread = inbox.clone();
        let thread = std::thread::Builder::new().name("sok-memory".into());
        let receiver = Some(thread.spawn(move || of_thread.receive_all())?);
        Ok(Channel { inbox, name, timeout, receiver, process: std::process::id() })
    }

    /// Its name, by which others send to it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a descriptor.
    pub fn send(&self, to: &str, key: Key, descriptor: &OwnedFd) -> IoResult<()> {
        // A socket that is connected receives from its peer alone, so that of the channel is not.
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(self.timeout))?;
        socket.connect_addr(&SocketAddr::from_abstract_name(to)?)?;
        let mut content = [0; NUMBER_BYTES];
        content[..8].copy_from_slice(&key[0].to_le_bytes());
        content[8..].copy_from_slice(&key[1].to_le_bytes());
        let mut part = libc::iovec { iov_base: content.as_mut_ptr().cast(), iov_len: NUMBER_BYTES };
        let mut control = Control { bytes: [0; 64] };
        let mut message = message(&mut part, &mut control);
        let int = size_of::<RawFd>() as u32;
        // SAFETY: The function only computes.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(int) } as usize;
        // SAFETY: The function only computes.
        let header = unsafe { libc::CMSG_FIRSTHDR(&message) };
        // SAFETY: The control buffer has room for a header, to which nothing else refers.
        let header = unsafe { &mut *header };
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = libc::SCM_RIGHTS;
        // SAFETY: The function only computes.
        header.cmsg_len = unsafe { libc::CMSG_LEN(int) } as usize;
        // SAFETY: The header is in the control buffer, which has room for the descriptor after it.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: As above.
        unsafe { data.cast::<RawFd>().write_unaligned(descriptor.as_raw_fd()) };
        loop {
            // SAFETY: The message and what it points to live until the call returns.
            let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
            let error = IoError::last_os_error();
            if sent >= 0 {
                return Ok(());
            }
            if error.kind() != ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Waits for a descriptor.
    pub fn receive(&self, key: Key) -> IoResult<OwnedFd> {
        let state = self.inbox.state();
        let is_missing = |state: &mut State| !state.descriptors.contains_key(&key);
        let waited = self.inbox.has_come.wait_timeout_while(state, self.timeout, is_missing);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.descriptors.remove(&key).ok_or_else(|| IoError::from(ErrorKind::TimedOut))
    }

    /// Closes a descriptor, if it has come.
    pub fn forget(&self, key: Key) {
        self.inbox.state().descriptors.remove(&key);
    }
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receive_all(&self) {
        while !self.state().has_ended {
            if let Ok((key, descriptor)) = receive(&self.socket) {
                self.state().descriptors.insert(key, descriptor);
                self.has_come.notify_all();
            }
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let Some(receiver) = self.receiver.take() else { return };
        if self.process != std::process::id() {
            // The thread is the parent's.
            std::mem::forget(receiver);
            return;
        }
        self.inbox.state().has_ended = true;
        let _ = self.inbox.socket.shutdown(Shutdown::Both);
        let _ = receiver.join();
    }
}

/// Waits for a message, for `PATIENCE` at most.
fn receive(socket: &UnixDatagram) -> IoResult<(Key, OwnedFd)> {
    let mut content = [0; NUMBER_BYTES];
    let mut part = libc::iovec { iov_base: content.as_mut_ptr().cast(), iov_len: NUMBER_BYTES };
    let mut control = Control { bytes: [0; 64] };
    let mut message = message(&mut part, &mut control);
    message.msg_controllen = size_of::<Control>();
    // SAFETY: The message and what it points to live until the call returns.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) };
    if received < 0 {
        return Err(IoError::last_os_error());
    }
    // SAFETY: The kernel has written the control buffer up to its length.
    let header = unsafe { libc::CMSG_FIRSTHDR(&message) };
    // SAFETY: A header that is not null is in the control buffer.
    let header = unsafe { header.as_ref() };
    let is_whole = received as usize == NUMBER_BYTES;
    let header = header.filter(|header| header.cmsg_type == libc::SCM_RIGHTS && is_whole);
    let header = header.ok_or_else(|| IoError::from(ErrorKind::InvalidData))?;
    // SAFETY: The header is followed by its data.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: A control message of this type has a descriptor.
    let descriptor = unsafe { data.cast::<RawFd>().read_unaligned() };
    // SAFETY: The kernel has made the descriptor for this process.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let number = |at: usize| u64::from_le_bytes(content[at..at + 8].try_into().expect("eight bytes"));
    Ok(([number(0), number(8)], descriptor))
}

fn message(part: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: Zero is a valid value of each field.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = (control as *mut Control).cast();
    message
}

/// A number that no other channel of this process has.
fn unique(tries: u32) -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Relaxed) << 32 | u64::from(tries)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn a_descriptor_arrives_by_its_key() {
        let [a, b] = [(); 2].map(|()| Channel::open(Duration::from_secs(5)).unwrap());
        let mut file = std::fs::File::from(memory_file());
        file.write_all(b"rows").unwrap();
        a.send(b.name(), [4, 0], &memory_file()).unwrap();
        a.send(b.name(), [3, u64::MAX], &OwnedFd::from(file)).unwrap();
        let received = b.receive([3, u64::MAX]).unwrap();
        let (mut received, mut text) = (std::fs::File::from(received), String::new());
        received.rewind().unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "rows");
        b.receive([4, 0]).unwrap();
    }

    #[test]
    fn ranks_that_send_many_at_once_do_not_wait_for_each_other() {
        let channels = [(); 3].map(|()| Channel::open(Duration::from_secs(5)).unwrap());
        for number in 0..100 {
            for (from, channel) in channels.iter().enumerate() {
                for (to, other) in channels.iter().enumerate().filter(|(to, _)| *to != from) {
                    channel.send(other.name(), [from as u64, number], &memory_file()).unwrap();
                    assert_ne!(from, to);
                }
            }
        }
        for (to, channel) in channels.iter().enumerate() {
            for from in (0..3).filter(|from| *from != to) {
                (0..100).rev().for_each(|number| drop(channel.receive([from as u64, number]).unwrap()));
            }
        }
    }

    #[test]
    fn nobody_waits_for_ever() {
        let channel = Channel::open(Duration::from_millis(50)).unwrap();
        assert!(channel.receive([0, 0]).is_err());
        assert!(channel.send("sok_keras-nobody", [0, 0], &memory_file()).is_err());
    }

    fn memory_file() -> OwnedFd {
        // SAFETY: The name is a string that ends with a zero byte.
        let descriptor = unsafe { libc::memfd_create(c"test".as_ptr(), 0) };
        assert!(descriptor >= 0);
        // SAFETY: The descriptor was just made.
        unsafe { OwnedFd::from_raw_fd(descriptor) }
    }
}
