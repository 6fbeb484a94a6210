//! Sends file descriptors to processes on the same host.

#![allow(unsafe_code)]

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// A socket that receives descriptors. Its name is in the abstract namespace, so no file is left behind.
pub struct Channel {
    socket: UnixDatagram,
    name: String,
}

/// The number that comes with a descriptor.
const NUMBER_BYTES: usize = 16;

/// Room for the control message of one descriptor.
#[repr(C)]
union Control {
    _header: libc::cmsghdr,
    bytes: [u8; 64],
}

impl Channel {
    /// Opens a channel. `timeout`: how long `receive` waits.
    pub fn open(timeout: Duration) -> IoResult<Channel> {
        let mut tries = 0u32;
        loop {
            let name = format!("sok_keras-{}-{}", std::process::id(), unique(tries));
            match UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name)?) {
                Ok(socket) => {
                    socket.set_read_timeout(Some(timeout))?;
                    socket.set_write_timeout(Some(timeout))?;
                    return Ok(Channel { socket, name });
                }
                Err(error) if error.kind() == ErrorKind::AddrInUse && tries < 100 => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Its name, by which others send to it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a descriptor, with two numbers that say what it is of.
    pub fn send(&self, to: &str, numbers: [u64; 2], descriptor: &OwnedFd) -> IoResult<()> {
        // A socket that is connected receives from its peer alone, so that of the channel is not.
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(self.socket.write_timeout()?)?;
        socket.connect_addr(&SocketAddr::from_abstract_name(to)?)?;
        let mut content = [0; NUMBER_BYTES];
        content[..8].copy_from_slice(&numbers[0].to_le_bytes());
        content[8..].copy_from_slice(&numbers[1].to_le_bytes());
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
        // SAFETY: The message and what it points to live until the call returns.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        if sent < 0 { Err(IoError::last_os_error()) } else { Ok(()) }
    }

    /// Waits for a descriptor. Returns it with its numbers.
    pub fn receive(&self) -> IoResult<([u64; 2], OwnedFd)> {
        let mut content = [0; NUMBER_BYTES];
        let mut part = libc::iovec { iov_base: content.as_mut_ptr().cast(), iov_len: NUMBER_BYTES };
        let mut control = Control { bytes: [0; 64] };
        let mut message = message(&mut part, &mut control);
        message.msg_controllen = size_of::<Control>();
        let received = loop {
            // SAFETY: The message and what it points to live until the call returns.
            let received =
                unsafe { libc::recvmsg(self.socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) };
            let error = IoError::last_os_error();
            if received >= 0 {
                break received as usize;
            }
            if error.kind() != ErrorKind::Interrupted {
                return Err(error);
            }
        };
        // SAFETY: The kernel has written the control buffer up to its length.
        let header = unsafe { libc::CMSG_FIRSTHDR(&message) };
        // SAFETY: A header that is not null is in the control buffer.
        let header = unsafe { header.as_ref() };
        let header = header.filter(|h| h.cmsg_type == libc::SCM_RIGHTS && received == NUMBER_BYTES);
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
    fn a_descriptor_arrives_with_its_numbers() {
        let [a, b] = [(); 2].map(|()| Channel::open(Duration::from_secs(5)).unwrap());
        let mut file = std::fs::File::from(memory_file());
        file.write_all(b"rows").unwrap();
        let file = OwnedFd::from(file);
        a.send(b.name(), [3, u64::MAX], &file).unwrap();
        a.send(b.name(), [4, 0], &file).unwrap();
        let (numbers, received) = b.receive().unwrap();
        assert_eq!(numbers, [3, u64::MAX]);
        let (mut received, mut text) = (std::fs::File::from(received), String::new());
        received.rewind().unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "rows");
        assert_eq!(b.receive().unwrap().0, [4, 0]);
    }

    #[test]
    fn descriptors_arrive_from_several_channels() {
        let [a, b, c] = [(); 3].map(|()| Channel::open(Duration::from_secs(5)).unwrap());
        a.send(b.name(), [0, 0], &memory_file()).unwrap();
        b.send(c.name(), [1, 0], &memory_file()).unwrap();
        c.send(a.name(), [2, 0], &memory_file()).unwrap();
        a.send(c.name(), [0, 0], &memory_file()).unwrap();
        c.send(b.name(), [2, 0], &memory_file()).unwrap();
        let from = |channel: &Channel| channel.receive().unwrap().0[0];
        assert_eq!([from(&a), from(&b), from(&b), from(&c), from(&c)], [2, 0, 2, 1, 0]);
    }

    #[test]
    fn nobody_waits_for_ever() {
        let channel = Channel::open(Duration::from_millis(50)).unwrap();
        assert!(channel.receive().is_err());
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
