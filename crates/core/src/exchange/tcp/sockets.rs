//! Connections in forked children. A child that kept its parent's connections open would hide the parent's death from other ranks.
#![allow(unsafe_code)]

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use crate::fork::at_fork;

/// Connections that a child can close: those of the first so many ranks.
const MOST: usize = 4096;
static SOCKETS: [AtomicI32; MOST] = [const { AtomicI32::new(-1) }; MOST];

/// Closes these connections in children that this process forks from now on.
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
