//! What the standard library cannot do with the connections of a rank.
#![allow(unsafe_code)]

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use crate::fork::at_fork;

/// Connections that a child can close: those of the first so many ranks.
const MOST: usize = 4096;
static SOCKETS: [AtomicI32; MOST] = [const { AtomicI32::new(-1) }; MOST];

/// Closes these connections in children that this process forks from now on. A child that kept them open would hide its parent's death
/// from other ranks.
pub(super) fn close_in_children<'a>(streams: impl Iterator<Item = &'a TcpStream>) {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| at_fork(None, None, Some(close_all)));
    SOCKETS.iter().for_each(|socket| socket.store(-1, Relaxed));
    SOCKETS.iter().zip(streams).for_each(|(socket, stream)| socket.store(stream.as_raw_fd(), Relaxed));
}

extern "C" fn close_all() {
    for socket in &SOCKETS {
        let socket = socket.swap(-1, Relaxed);
        if socket >= 0 {
            // The other end of the connection stays the parent's: `shutdown` would end it, `close` does not.
            // SAFETY: a copy of the parent's descriptor. The child uses no connection of the parent: `check_process`.
            unsafe { libc::close(socket) };
        }
    }
}

/// Ends a connection at once, so that its port is free. A connection that is merely closed keeps it for a minute.
pub(super) fn abort(stream: TcpStream) {
    let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
    let (value, len) = (&raw const at_once, size_of::<libc::linger>() as libc::socklen_t);
    // SAFETY: The stream owns an open descriptor. `SO_LINGER` takes a `linger`, whose address and size are passed.
    // If it fails, the system frees the port a minute later.
    unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value.cast(), len) };
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_that_was_connected_with_itself_can_be_listened_at() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        // Linux gives clients the even ports first, one after the other.
        let address = ("127.0.0.1", port & !1);
        let own = (0..100_000).find_map(|_| {
            let stream = TcpStream::connect(address).ok()?;
            (stream.local_addr().ok() == stream.peer_addr().ok()).then_some(stream)
        });
        abort(own.expect("a client is given its own port in the end"));
        TcpListener::bind(address).unwrap();
    }
}
