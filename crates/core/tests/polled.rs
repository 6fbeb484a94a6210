//! Ranks with a transport beside TCP. The transport of these tests brings messages late, or never.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::{decide, exchange, gather};
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Call, Tag};
use sok_core::exchange::polled::PolledRank;
use sok_core::exchange::tcp::TcpRank;
use sok_core::exchange::transport::{Transport, Unsent};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);

/// A message, and when it comes.
type Late = (Instant, usize, Tag, Vec<u8>);

/// What all ranks of a world share.
struct Wire {
    delay: Duration,
    inboxes: Vec<Mutex<VecDeque<Late>>>,
    num_left: AtomicUsize,
    is_broken: AtomicBool,
    were_ended: AtomicBool,
}

struct WireRank {
    rank: usize,
    wire: Arc<Wire>,
    unsent: Vec<Unsent>,
    has_left: bool,
}

impl Transport for WireRank {
    fn send(&mut self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        let since = Instant::now();
        self.unsent.push(Unsent { to, tag, since });
        self.wire.inboxes[to].lock().unwrap().push_back((since + self.wire.delay, self.rank, tag, message));
        Ok(())
    }

    fn progress(&mut self, put: &mut dyn FnMut(usize, Tag, Vec<u8>)) -> Result<()> {
        if self.wire.is_broken.load(SeqCst) {
            return Err(Error::State("a cable is broken".into()));
        }
        let mut inbox = self.wire.inboxes[self.rank].lock().unwrap();
        while inbox.front().is_some_and(|(when, ..)| Instant::now() >= *when) {
            let (_, from, tag, message) = inbox.pop_front().unwrap();
            put(from, tag, message);
        }
        drop(inbox);
        let (rank, wire) = (self.rank, &self.wire);
        self.unsent.retain(|unsent| {
            let inbox = wire.inboxes[unsent.to].lock().unwrap();
            inbox.iter().any(|(_, from, tag, _)| (*from, *tag) == (rank, unsent.tag))
        });
        Ok(())
    }

    fn unsent(&self) -> Option<Unsent> {
        self.unsent.first().copied()
    }

    fn have_all_left(&mut self) -> Result<bool> {
        self.wire.num_left.fetch_add(usize::from(!std::mem::replace(&mut self.has_left, true)), SeqCst);
        Ok(self.wire.num_left.load(SeqCst) == self.wire.inboxes.len())
    }

    fn end_all(&mut self) {
        self.wire.were_ended.store(true, SeqCst);
    }
}

fn tag(step: u64) -> Tag {
    Tag { call: Call::Gather, layer: 0, step, round: 0 }
}

fn world(world_size: usize, timeout: Duration, delay: Duration) -> (Vec<PolledRank>, Arc<Wire>) {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let wire = Arc::new(Wire {
        delay,
        inboxes: (0..world_size).map(|_| Mutex::default()).collect(),
        num_left: AtomicUsize::new(0),
        is_broken: AtomicBool::new(false),
        were_ended: AtomicBool::new(false),
    });
    let connect = |rank| {
        let tcp = TcpRank::connect(rank, world_size, &address, timeout).unwrap();
        let transport = WireRank { rank, wire: wire.clone(), unsent: Vec::new(), has_left: false };
        PolledRank::new(tcp, Box::new(transport)).unwrap()
    };
    let ranks = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || connect(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (ranks, wire.clone())
}

/// Runs `work` on all ranks, and ends them. Returns what each returned, by rank.
fn on_all<T: Send>(world: Vec<PolledRank>, work: impl Fn(&PolledRank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = world.into_iter().map(|rank| scope.spawn(move || work(&rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn messages_cross_and_ranks_end() {
    for delay in [Duration::ZERO, Duration::from_millis(3)] {
        let (world, wire) = world(3, LONG, delay);
        let received = on_all(world, |rank| {
            let part = |to: usize| vec![rank.rank() as u8 * 16 + to as u8; to * 1000];
            (0..20)
                .map(|step| exchange(rank, tag(step), Ok((0..3).map(part).collect())).unwrap())
                .collect::<Vec<_>>()
        });
        for (to, steps) in received.iter().enumerate() {
            for (from, message) in steps.iter().flat_map(|parts| parts.iter().enumerate()) {
                assert_eq!(*message, vec![from as u8 * 16 + to as u8; to * 1000]);
            }
        }
        assert!(!wire.were_ended.load(SeqCst));
    }
}

#[test]
fn threads_get_their_own_messages_in_whatever_order_they_come() {
    let (world, _) = world(2, LONG, Duration::ZERO);
    on_all(world, |rank| {
        let other = 1 - rank.rank();
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                scope.spawn(move || {
                    let tag = |step| Tag { layer: thread, ..tag(step) };
                    let message = |step: u64| vec![thread as u8; step as usize];
                    (0..50).for_each(|step| rank.send(other, tag(step), message(step)).unwrap());
                    // The last first.
                    for step in (0..50).rev() {
                        assert_eq!(rank.receive(other, tag(step)).unwrap(), message(step));
                    }
                });
            }
        });
    });
}

#[test]
fn what_a_rank_has_sent_before_its_end_comes_after_the_news_of_it() {
    let (mut world, _) = world(2, LONG, Duration::from_millis(300));
    let second = world.pop().unwrap();
    let begin = Instant::now();
    second.send(0, tag(1), vec![5]).unwrap();
    let leaving = std::thread::spawn(move || drop(second));
    let first = &world[0];
    assert_eq!(first.receive(1, tag(1)).unwrap(), [5]);
    let text = first.receive(1, tag(2)).unwrap_err().to_string();
    assert!(
        text.contains("rank 1 has ended its program, while this rank waits for it in gather 2"),
        "{text}"
    );
    assert!(text.contains("last seen in gather 1"), "{text}");
    assert!(begin.elapsed() < LONG / 3);
    drop(world);
    leaving.join().unwrap();
}

#[test]
fn a_rank_that_does_not_send_or_take_is_named_within_the_timeout() {
    let (mut world, wire) = world(2, SHORT, Duration::ZERO);
    let second = world.pop().unwrap();
    let first = world.pop().unwrap();
    let begin = Instant::now();
    let text = first.receive(1, tag(4)).unwrap_err().to_string();
    assert!(text.contains("rank 1 has sent nothing for gather 4 within 0.3 s"), "{text}");
    // It is final, and the other has heard of it.
    let later = first.send(1, tag(5), vec![]).unwrap_err().to_string();
    assert_eq!(later, format!("{text}. This rank is in gather 5"));
    assert!(second.receive(0, tag(4)).unwrap_err().to_string().contains("gave up"));
    // The second one never ends.
    drop(first);
    assert!(wire.were_ended.load(SeqCst));
    assert!(begin.elapsed() < SHORT * 20, "{:?}", begin.elapsed());
    drop(second);

    let (mut world, _) = self::world(2, SHORT, LONG);
    let second = world.pop().unwrap();
    world[0].send(1, tag(7), vec![1]).unwrap();
    std::thread::sleep(SHORT * 3);
    let text = world[0].failure().unwrap().to_string();
    assert!(text.contains("rank 1 has taken nothing of gather 7 within 0.3 s"), "{text}");
    std::thread::scope(|scope| {
        scope.spawn(|| drop(second));
        scope.spawn(|| drop(world));
    });
}

#[test]
fn a_broken_transport_fails_all_ranks_at_once() {
    let (world, wire) = world(3, Duration::from_secs(2), LONG);
    let begin = Instant::now();
    let texts = std::thread::scope(|scope| {
        let world = &world;
        let wait = |rank: usize| move || gather(&world[rank], tag(1), Ok(vec![])).unwrap_err().to_string();
        let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(wait(rank))).collect();
        std::thread::sleep(Duration::from_millis(50));
        wire.is_broken.store(true, SeqCst);
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(texts.iter().all(|text| text.contains("a cable is broken")), "{texts:?}");
    assert!(begin.elapsed() < LONG / 3);
    std::thread::scope(|scope| world.into_iter().for_each(|rank| drop(scope.spawn(|| drop(rank)))));
}

#[test]
fn ranks_decide_alike_and_send_no_more_after_they_have_left() {
    let (world, _) = world(3, LONG, Duration::from_millis(1));
    on_all(world, |rank| {
        assert_eq!(decide(rank, tag(1), Ok(7)).unwrap(), 7);
        rank.leave();
        let text = rank.send((rank.rank() + 1) % 3, tag(2), vec![]).unwrap_err().to_string();
        assert!(text.contains("has left the other ranks"), "{text}");
        assert!(rank.receive((rank.rank() + 1) % 3, tag(2)).is_err());
    });
}
