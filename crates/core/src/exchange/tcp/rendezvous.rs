//! How ranks find each other. Rank 0 listens at an address that all know. When all have come, it tells each where the others are, and
//! each connects to all lower ones.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::hello::{Answer, Hello, PROTOCOL, Peer, hear, say};
use super::sockets::abort;
use crate::error::{Error, Result};

/// How long a stranger may take to say who it is.
const STRANGER: Duration = Duration::from_secs(5);
/// How much longer the others wait than rank 0, so that they hear its reason.
const GRACE: Duration = Duration::from_secs(2);
/// How long the address may be in use by a rank that looks for rank 0 and has met itself, or by an earlier rank 0 that ends.
const IN_USE: Duration = Duration::from_secs(1);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// The connections of a rank, by rank, and its number among the ranks of its host.
type Met = (Vec<Option<TcpStream>>, usize);

/// A start-up as one rank sees it.
struct Meeting<'a> {
    rank: usize,
    world_size: usize,
    address: &'a str,
    timeout: Duration,
    deadline: Instant,
    host: String,
}

/// Connects a rank with all others.
///
/// # Errors
/// As [`TcpRank::connect`](super::TcpRank::connect).
pub(super) fn meet(rank: usize, world_size: usize, address: &str, timeout: Duration) -> Result<Met> {
    let (deadline, host) = (Instant::now() + timeout, host());
    let meeting = Meeting { rank, world_size, address, timeout, deadline, host };
    if world_size == 1 {
        return Ok((vec![None], 0));
    }
    if rank == 0 { meeting.receive_all() } else { meeting.join() }
}

/// Identifies this host, also among containers that share a name or a kernel.
fn host() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default().trim().to_string();
    format!("{} {}", read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/random/boot_id"))
}

impl Meeting<'_> {
    fn error(&self, what: String) -> Error {
        Error::State(format!("rank {} of {} cannot start: {what}", self.rank, self.world_size))
    }

    fn seconds(&self) -> f64 {
        self.timeout.as_secs_f64()
    }

    fn resolve(&self) -> Result<Vec<SocketAddr>> {
        let found = self.address.to_socket_addrs().map(Vec::from_iter);
        let wrong =
            |why| format!("`address` must be \"host:port\" of rank 0. Received: {:?}{why}", self.address);
        match found {
            Ok(found) if !found.is_empty() => Ok(found),
            Ok(_) => Err(Error::argument(wrong(String::new()))),
            Err(error) => Err(Error::argument(wrong(format!(" ({error})")))),
        }
    }

    /// Where to listen. A host may know its own name by a loopback address, at which other hosts do not reach it.
    fn listening(&self, mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let host =
            self.address.rsplit_once(':').map_or(self.address, |(host, _)| host).trim_matches(['[', ']']);
        let is_name = host != "localhost" && host.parse::<IpAddr>().is_err();
        for address in addresses.iter_mut().filter(|address| is_name && address.ip().is_loopback()) {
            let any =
                if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
            address.set_ip(any);
        }
        addresses
    }

    // ---- rank 0

    fn receive_all(&self) -> Result<Met> {
        let listener = self.listen()?;
        let mut come: BTreeMap<usize, (TcpStream, Hello)> = BTreeMap::new();
        let all_come = self.accept(&listener, self.world_size - 1, |stream| {
            let deadline = self.deadline.min(Instant::now() + STRANGER);
            let Ok(hello) = hear::<Hello>(&stream, deadline) else { return Ok(false) };
            match self.objection(&hello, &come) {
                None => {
                    come.insert(hello.rank, (stream, hello));
                    Ok(true)
                }
                Some(objection) => {
                    let _ = say(&stream, &Answer::Refused(objection.clone()));
                    Err(self.error(objection))
                }
            }
        });
        let missing = || (1..self.world_size).filter(|rank| !come.contains_key(rank)).collect::<Vec<_>>();
        let result = all_come.and_then(|all| {
            let late = || {
                format!("ranks {:?} have not come to {} within {} s", missing(), self.address, self.seconds())
            };
            if all { Ok(()) } else { Err(self.error(late())) }
        });
        if let Err(error) = result {
            come.values().for_each(|(stream, _)| drop(say(stream, &Answer::Refused(error.to_string()))));
            return Err(error);
        }
        self.welcome(come)
    }

    fn listen(&self) -> Result<TcpListener> {
        let (addresses, deadline) = (self.listening(self.resolve()?), Instant::now() + IN_USE);
        loop {
            match TcpListener::bind(&addresses[..]) {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                    std::thread::sleep(PAUSE);
                }
                Err(error) => {
                    return Err(self.error(format!("it cannot listen at {}: {error}", self.address)));
                }
            }
        }
    }

    /// Why a rank cannot take part, if it cannot.
    fn objection(&self, hello: &Hello, come: &BTreeMap<usize, (TcpStream, Hello)>) -> Option<String> {
        let Hello { protocol, rank, world_size, .. } = hello;
        if protocol != PROTOCOL {
            Some(format!("rank {rank} has another version of sok_keras: {protocol:?}, not {PROTOCOL:?}"))
        } else if *world_size != self.world_size {
            let own = self.world_size;
            Some(format!(
                "rank {rank} was started with world_size={world_size}, rank 0 with world_size={own}"
            ))
        } else if come.contains_key(rank) || *rank == 0 {
            Some(format!("two processes were started as rank {rank}"))
        } else if rank >= world_size {
            Some(format!("a process was started as rank {rank} of {world_size}"))
        } else {
            None
        }
    }

    fn welcome(&self, come: BTreeMap<usize, (TcpStream, Hello)>) -> Result<Met> {
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut addresses = vec![here];
        let mut hosts = vec![self.host.clone()];
        for (stream, hello) in come.values() {
            let seen = stream.peer_addr().map_err(|e| self.error(format!("a connection has ended: {e}")))?;
            addresses.push(SocketAddr::new(seen.ip(), hello.port));
            hosts.push(hello.host.clone());
        }
        let answer = Answer::Welcome { token: token(), addresses, hosts };
        let mut streams = vec![None];
        for (rank, (stream, _)) in come {
            say(&stream, &answer).map_err(|e| self.error(format!("rank {rank} has ended meanwhile: {e}")))?;
            streams.push(Some(stream));
        }
        Ok((streams, 0))
    }

    // ---- the others

    fn join(&self) -> Result<Met> {
        let to_root = self.connect(&self.resolve()?, "rank 0")?;
        let cannot = |error| self.error(format!("it cannot listen: {error}"));
        let own = SocketAddr::new(to_root.local_addr().map_err(cannot)?.ip(), 0);
        let listener = TcpListener::bind(&self.listening(vec![own])[..]).map_err(cannot)?;
        let hello = Hello {
            protocol: PROTOCOL.into(),
            rank: self.rank,
            world_size: self.world_size,
            port: listener.local_addr().map_err(cannot)?.port(),
            host: self.host.clone(),
        };
        let answer = say(&to_root, &hello).and_then(|()| hear::<Answer>(&to_root, self.deadline + GRACE));
        let (token, mut addresses, hosts) = match answer {
            Ok(Answer::Welcome { token, addresses, hosts }) => (token, addresses, hosts),
            Ok(Answer::Refused(why)) => return Err(self.error(why)),
            Err(error) => {
                let how = if is_late(&error) {
                    format!("within {} s", self.seconds())
                } else {
                    format!("({error})")
                };
                return Err(self.error(format!("rank 0 at {} has not answered {how}", self.address)));
            }
        };
        let root = to_root.peer_addr().map_err(cannot)?.ip();
        addresses.iter_mut().for_each(|address| *address = reachable(*address, root));
        let mut streams: Vec<Option<TcpStream>> = (0..self.world_size).map(|_| None).collect();
        streams[0] = Some(to_root);
        for (other, address) in addresses.iter().enumerate().take(self.rank).skip(1) {
            let stream = self.connect(&[*address], &format!("rank {other}"))?;
            let said = say(&stream, &Peer { token, rank: self.rank });
            said.map_err(|error| self.error(format!("rank {other} has ended meanwhile: {error}")))?;
            streams[other] = Some(stream);
        }
        self.accept_higher(&listener, token, &mut streams)?;
        let local_rank = hosts.iter().take(self.rank).filter(|host| **host == self.host).count();
        Ok((streams, local_rank))
    }

    fn accept_higher(
        &self,
        listener: &TcpListener,
        token: u64,
        streams: &mut [Option<TcpStream>],
    ) -> Result<()> {
        let all_come = self.accept(listener, self.world_size - 1 - self.rank, |stream| {
            let deadline = self.deadline.min(Instant::now() + STRANGER);
            let Ok(peer) = hear::<Peer>(&stream, deadline) else { return Ok(false) };
            let is_expected = peer.token == token && streams.get(peer.rank).is_some_and(Option::is_none);
            if is_expected {
                streams[peer.rank] = Some(stream);
            }
            Ok(is_expected)
        })?;
        if all_come {
            return Ok(());
        }
        let missing: Vec<_> =
            (self.rank + 1..self.world_size).filter(|&rank| streams[rank].is_none()).collect();
        Err(self.error(format!("ranks {missing:?} have not connected within {} s", self.seconds())))
    }

    // ---- both

    /// Gives new connections to `take` until it has accepted `wanted` of them. Returns false if they have not come in time.
    fn accept(
        &self,
        listener: &TcpListener,
        wanted: usize,
        mut take: impl FnMut(TcpStream) -> Result<bool>,
    ) -> Result<bool> {
        let cannot = |error| self.error(format!("it cannot take connections: {error}"));
        listener.set_nonblocking(true).map_err(cannot)?;
        let mut accepted = 0;
        while accepted < wanted {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(cannot)?;
                    accepted += usize::from(take(stream)?);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= self.deadline {
                        return Ok(false);
                    }
                    std::thread::sleep(PAUSE);
                }
                Err(error) => return Err(cannot(error)),
            }
        }
        Ok(true)
    }

    /// Connects to the first of these addresses that answers. Tries again until the deadline: the other may not listen yet.
    fn connect(&self, addresses: &[SocketAddr], whom: &str) -> Result<TcpStream> {
        loop {
            let mut last = None;
            for address in addresses {
                let left =
                    self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
                match TcpStream::connect_timeout(address, left) {
                    Ok(stream) if !is_own(&stream) => return Ok(stream),
                    Ok(stream) => abort(stream),
                    Err(error) => last = Some(error),
                }
            }
            if Instant::now() >= self.deadline {
                let why = last.map(|error| format!(" ({error})")).unwrap_or_default();
                let (at, seconds) = (addresses.first(), self.seconds());
                let at = at.map_or_else(|| self.address.into(), SocketAddr::to_string);
                return Err(self.error(format!("{whom} cannot be reached at {at} within {seconds} s{why}")));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// Whether a connection is to itself. TCP allows that where nobody listens and the port is one of those given to clients.
fn is_own(stream: &TcpStream) -> bool {
    stream.local_addr().ok() == stream.peer_addr().ok()
}

/// An address on rank 0's host that rank 0 knows by a name of its own only.
fn reachable(address: SocketAddr, root: IpAddr) -> SocketAddr {
    if address.ip().is_loopback() { SocketAddr::new(root, address.port()) } else { address }
}

fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// A number that another start-up does not have.
fn token() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}
