//! What ranks say when they meet: a line of JSON each.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Changes whenever ranks of another version would not understand each other.
pub(super) const PROTOCOL: &str = "sok_keras ranks 2";
/// Longest line. Far above what a thousand ranks need.
const LONGEST: usize = 1 << 20;

/// A rank presents itself to rank 0.
#[derive(Serialize, Deserialize)]
pub(super) struct Hello {
    pub protocol: String,
    pub rank: usize,
    pub world_size: usize,
    /// Port on which it takes the connections of higher ranks.
    pub port: u16,
    /// Identifies its host.
    pub host: String,
}

/// The answer of rank 0, when all have come.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Answer {
    Welcome {
        /// Proves to other ranks that a connection is of this start-up.
        token: u64,
        /// By rank: where it takes connections, as rank 0 sees it.
        addresses: Vec<SocketAddr>,
        /// By rank: its host.
        hosts: Vec<String>,
    },
    Refused(String),
}

/// A rank presents itself to a lower one.
#[derive(Serialize, Deserialize)]
pub(super) struct Peer {
    pub token: u64,
    pub rank: usize,
}

/// Sends a line.
pub(super) fn say(mut stream: &TcpStream, what: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// Reads a line, byte by byte: what follows belongs to others.
pub(super) fn hear<T: DeserializeOwned>(mut stream: &TcpStream, deadline: Instant) -> std::io::Result<T> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < LONGEST {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        if stream.read(&mut byte)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if byte == *b"\n" {
            return serde_json::from_slice(&line).map_err(Into::into);
        }
        line.push(byte[0]);
    }
    Err(ErrorKind::InvalidData.into())
}
