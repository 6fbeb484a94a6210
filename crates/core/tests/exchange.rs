//! Ranks that exchange messages: as threads, and over TCP.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::{agree, broadcast, decide, exchange, gather, sum};
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Call, Tag};
use sok_core::exchange::tcp::TcpRank;
use sok_core::exchange::threads::ThreadRank;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);

fn tag(step: u64) -> Tag {
    Tag { call: Call::Gather, layer: 0, step, round: 0 }
}

/// An address of this host where nobody listens.
fn address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn tcp_world(world_size: usize, timeout: Duration) -> Vec<Arc<dyn Communicator>> {
    let address = address();
    let connect = |rank| TcpRank::connect(rank, world_size, &address, timeout).unwrap();
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || connect(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let places: Vec<_> = ranks.iter().map(|rank: &TcpRank| (rank.rank(), rank.local_rank())).collect();
    assert_eq!(places, (0..world_size).map(|rank| (rank, rank)).collect::<Vec<_>>());
    ranks.into_iter().map(|rank| Arc::new(rank) as Arc<dyn Communicator>).collect()
}

fn thread_world(world_size: usize, timeout: Duration) -> Vec<Arc<dyn Communicator>> {
    ThreadRank::world(world_size, timeout)
        .into_iter()
        .map(|rank| Arc::new(rank) as Arc<dyn Communicator>)
        .collect()
}

fn worlds(world_size: usize, timeout: Duration) -> [Vec<Arc<dyn Communicator>>; 2] {
    [thread_world(world_size, timeout), tcp_world(world_size, timeout)]
}

/// Runs `work` on all ranks, and returns what each returned, by rank.
fn on_all<T: Send>(world: &[Arc<dyn Communicator>], work: impl Fn(&dyn Communicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = world.iter().map(|rank| scope.spawn(|| work(&**rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn each_rank_gets_what_each_other_sends_it() {
    for world_size in 1..=4 {
        for world in worlds(world_size, LONG) {
            let received = on_all(&world, |rank| {
                // A message to itself, an empty one, and long ones.
                let part = |to: usize| vec![rank.rank() as u8 * 16 + to as u8; to * to * 100_000];
                let parts = || Ok((0..rank.world_size()).map(part).collect());
                (0..20).map(|step| exchange(rank, tag(step), parts()).unwrap()).collect::<Vec<_>>()
            });
            for (to, steps) in received.iter().enumerate() {
                for (from, message) in steps.iter().flat_map(|parts| parts.iter().enumerate()) {
                    assert!(
                        message.len() == to * to * 100_000
                            && message.iter().all(|&b| b as usize == from * 16 + to)
                    );
                }
            }
        }
    }
}

#[test]
fn messages_much_larger_than_buffers_cross() {
    let world = tcp_world(2, LONG);
    let large = 64 << 20;
    let received =
        on_all(&world, |rank| exchange(rank, tag(1), Ok(vec![vec![rank.rank() as u8; large]; 2])).unwrap());
    for parts in received {
        assert!(
            parts
                .iter()
                .enumerate()
                .all(|(from, part)| part.len() == large && part[large - 1] as usize == from)
        );
    }
}

#[test]
fn sums_have_the_same_bits_everywhere() {
    for world_size in 1..=4 {
        for world in worlds(world_size, LONG) {
            for len in [0, 1, 2, 1000] {
                let term = |rank: usize, i: usize| 0.1 + rank as f32 * 1e-3 + i as f32;
                let sums = on_all(&world, |rank| {
                    let mut floats: Vec<f32> = (0..len).map(|i| term(rank.rank(), i)).collect();
                    sum(rank, tag(len as u64), &mut floats).unwrap();
                    floats
                });
                let expected =
                    (0..len).map(|i| (1..world_size).fold(term(0, i), |s, rank| s + term(rank, i)));
                let expected: Vec<f32> = expected.collect();
                assert!(sums.iter().all(|sums| *sums == expected));
            }
        }
    }
}

#[test]
fn a_broadcast_comes_from_its_root_and_a_gather_from_all() {
    for world in worlds(3, LONG) {
        let got = on_all(&world, |rank| {
            let own = vec![rank.rank() as u8; rank.rank()];
            let all = gather(rank, tag(1), Ok(own.clone())).unwrap();
            (broadcast(rank, tag(2), 2, own).unwrap(), all)
        });
        assert!(got.iter().all(|(root, all)| *root == [2, 2] && *all == [vec![], vec![1], vec![2, 2]]));
        let wrong = on_all(&world, |rank| broadcast(rank, tag(3), 3, vec![]).unwrap_err().to_string());
        assert!(wrong.iter().all(|text| text == "`root` must be a rank, 0 to 2. Received: 3"));
    }
}

#[test]
fn an_error_of_one_rank_fails_the_call_on_all_and_the_next_call_succeeds() {
    for world in worlds(3, LONG) {
        let results = on_all(&world, |rank| {
            let own = if rank.rank() == 1 { Err(Error::argument("a bad id")) } else { Ok(7) };
            let failed = agree(rank, tag(4), own).unwrap_err().to_string();
            (failed, agree(rank, tag(5), Ok(8)).unwrap())
        });
        let texts: Vec<_> = results.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(
            texts,
            ["rank 1 failed in gather 4: a bad id", "a bad id", "rank 1 failed in gather 4: a bad id"]
        );
        assert!(results.iter().all(|(_, value)| *value == 8));
    }
}

/// What `late` and `others` return, where `late` runs on rank 1, and how long all took.
fn with_rank_1<T: Send>(
    world: &[Arc<dyn Communicator>],
    late: impl Fn(&dyn Communicator) -> T + Sync,
    others: impl Fn(&dyn Communicator) -> T + Sync,
) -> (Vec<T>, Duration) {
    let start = Instant::now();
    let results = on_all(world, |rank| if rank.rank() == 1 { late(rank) } else { others(rank) });
    (results, start.elapsed())
}

#[test]
fn a_rank_that_calls_something_else_is_named_within_the_timeout() {
    for world in worlds(3, SHORT) {
        let call = |step: u64| move |rank: &dyn Communicator| gather(rank, tag(step), Ok(vec![])).map(drop);
        on_all(&world, |rank| call(1)(rank).unwrap());
        let (results, time) = with_rank_1(&world, call(3), call(2));
        assert!(time < SHORT * 8, "{time:?}");
        let texts: Vec<_> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
        // Whoever gives up first tells the others.
        assert!(texts.iter().all(|text| text.contains("gather 2") && text.contains("gather 3")), "{texts:?}");
        assert!(texts[0].contains("rank 1 ") && texts[2].contains("rank 1 "), "{texts:?}");
        // A failure is final.
        let again = on_all(&world, |rank| call(9)(rank).unwrap_err().to_string());
        assert_eq!(again.len(), 3);
    }
}

#[test]
fn a_rank_that_does_nothing_is_named_within_the_timeout() {
    for world in worlds(3, SHORT) {
        let call = |rank: &dyn Communicator| gather(rank, tag(1), Ok(vec![])).map(drop);
        let (results, time) = with_rank_1(&world, |_| Ok(()), call);
        assert!(time < SHORT * 8, "{time:?}");
        for result in [&results[0], &results[2]] {
            let text = result.as_ref().unwrap_err().to_string();
            assert!(
                text.contains("rank 1 has sent nothing for gather 1 within 0.3 s")
                    || text.contains("gave up"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_rank_that_waits_for_another_one_is_not_blamed() {
    let timeout = Duration::from_secs(2);
    for world in worlds(4, timeout) {
        // Rank 3 sends nothing. Rank 2 waits for it, rank 1 for rank 2, and rank 0, which gives up first, for rank 1.
        let errors = on_all(&world, |rank| {
            std::thread::sleep(timeout / 20 * rank.rank() as u32);
            match rank.rank() {
                3 => String::new(),
                number => rank.receive(number + 1, tag(number as u64)).unwrap_err().to_string(),
            }
        });
        assert_eq!(
            errors[0],
            "rank 3 has sent nothing to rank 2, for which this rank waits in gather 0, within 2 s. It has sent nothing so far"
        );
        assert!(errors[..3].iter().all(|error| error.contains("rank 3 has sent nothing")), "{errors:?}");
        drop(world);
    }
}

#[test]
fn of_ranks_that_wait_for_each_other_the_one_that_is_waited_for_is_named() {
    for world in worlds(3, SHORT) {
        let errors = on_all(&world, |rank| {
            let next = (rank.rank() + 1) % 3;
            rank.receive(next, tag(rank.rank() as u64)).unwrap_err().to_string()
        });
        let is_named = |(rank, error): (usize, &String)| {
            error.starts_with(&format!("rank {} has sent nothing for gather {rank} within", (rank + 1) % 3))
        };
        // The others may have heard of the first failure before they gave up.
        assert!(errors.iter().enumerate().any(is_named), "{errors:?}");
    }
}

#[test]
fn the_end_of_a_rank_is_an_error_at_once_for_those_that_wait_for_it() {
    for make in [thread_world, tcp_world] {
        let mut world = make(3, LONG);
        on_all(&world, |rank| gather(rank, tag(1), Ok(vec![])).map(drop).unwrap());
        drop(world.remove(1));
        let start = Instant::now();
        let results = on_all(&world, |rank| gather(rank, tag(2), Ok(vec![])).unwrap_err().to_string());
        assert!(start.elapsed() < LONG / 3);
        let names =
            |text: &String| text.contains("rank 1 has ended") || text.contains("gave up: rank 1 has ended");
        assert!(results.iter().all(names), "{results:?}");
    }
}

#[test]
fn a_rank_that_has_sent_all_may_end() {
    for make in [thread_world, tcp_world] {
        let world = make(2, LONG);
        let mut world = world.into_iter();
        let (first, second) = (world.next().unwrap(), world.next().unwrap());
        second.send(0, tag(1), vec![5]).unwrap();
        drop(second);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(first.receive(1, tag(1)).unwrap(), [5]);
        assert!(first.receive(1, tag(2)).is_err());
    }
}

// ---- start-up

fn start(ranks: &[(usize, usize)], timeout: Duration) -> Vec<Result<()>> {
    let address = address();
    std::thread::scope(|scope| {
        let connect = |&(rank, world_size): &(usize, usize)| {
            let address = address.as_str();
            scope.spawn(move || TcpRank::connect(rank, world_size, address, timeout).map(drop))
        };
        let ranks: Vec<_> = ranks.iter().map(connect).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn texts(results: Vec<Result<()>>) -> Vec<String> {
    results.into_iter().map(|result| result.unwrap_err().to_string()).collect()
}

#[test]
fn a_start_up_without_all_ranks_names_the_missing_ones() {
    let texts = texts(start(&[(0, 4), (2, 4)], SHORT));
    assert!(texts[0].contains("rank 0 of 4 cannot start: ranks [1, 3] have not come to"), "{texts:?}");
    assert!(texts[1].contains("ranks [1, 3] have not come to"), "{texts:?}");
    let texts = self::texts(start(&[(1, 2)], SHORT));
    assert!(texts[0].contains("rank 1 of 2 cannot start: rank 0 cannot be reached at"), "{texts:?}");
}

#[test]
fn a_start_up_with_a_number_twice_fails_on_all_at_once() {
    let begin = Instant::now();
    let texts = texts(start(&[(0, 3), (1, 3), (1, 3)], LONG));
    assert!(begin.elapsed() < LONG / 3);
    assert!(texts.iter().all(|text| text.contains("two processes were started as rank 1")), "{texts:?}");
    let texts = self::texts(start(&[(0, 2), (1, 3)], LONG));
    assert!(
        texts.iter().all(|t| t.contains("rank 1 was started with world_size=3, rank 0 with world_size=2")),
        "{texts:?}"
    );
}

#[test]
fn wrong_arguments_are_named() {
    let connect = |rank, world_size, address| TcpRank::connect(rank, world_size, address, SHORT).map(drop);
    let text = connect(2, 2, "localhost:1").unwrap_err().to_string();
    assert_eq!(text, "`rank` must be below `world_size`. Received: rank=2, world_size=2");
    let text = connect(0, 2, "no port").unwrap_err().to_string();
    assert!(text.starts_with("`address` must be \"host:port\" of rank 0. Received: \"no port\""), "{text}");
}

#[test]
fn strangers_do_not_disturb_a_start_up() {
    let address = address();
    std::thread::scope(|scope| {
        let connect = |rank| {
            let address = address.as_str();
            scope.spawn(move || TcpRank::connect(rank, 2, address, LONG))
        };
        let first = connect(0);
        let mut stranger = loop {
            match std::net::TcpStream::connect(&address) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        std::io::Write::write_all(&mut stranger, b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let second = connect(1);
        assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
    });
}

// ---- decisions

/// The message of a rank that agrees.
fn yes() -> Vec<u8> {
    vec![0]
}

#[test]
fn those_that_are_left_decide_alike_when_a_rank_is_lost_while_it_votes() {
    // Rank 2 votes, but not to everyone, and ends.
    for (heard_by, is_decided) in [(vec![0], true), (vec![0, 1], true), (vec![], false)] {
        for make in [thread_world, tcp_world] {
            let mut world = make(3, LONG);
            on_all(&world, |rank| decide(rank, tag(1), Ok(1)).unwrap());
            let last = world.pop().unwrap();
            let start = Instant::now();
            let results = std::thread::scope(|scope| {
                let [first, second] = [&world[0], &world[1]];
                let first = scope.spawn(|| decide(&**first, tag(2), Ok(0)));
                heard_by.iter().for_each(|&to| last.send(to, tag(2), yes()).unwrap());
                // Rank 0 has all votes before rank 2 is lost, if it hears of it at all.
                second.send(0, tag(2), yes()).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                drop(last);
                let second = scope.spawn(|| {
                    let votes =
                        [0, 2].into_iter().try_for_each(|from| second.receive(from, tag(2)).map(drop));
                    match votes.and_then(|()| second.decide(tag(2))) {
                        Err(error) if !second.is_decided_by_others(tag(2)) => Err(error),
                        _ => Ok(1),
                    }
                });
                [first.join().unwrap(), second.join().unwrap()]
            });
            assert!(start.elapsed() < LONG / 3);
            assert!(results.iter().all(|result| result.is_ok() == is_decided), "{heard_by:?}: {results:?}");
        }
    }
}

#[test]
fn a_vote_against_is_no_decision_and_no_failure() {
    for world in worlds(3, LONG) {
        let results = on_all(&world, |rank| {
            let own = if rank.rank() == 1 { Err(Error::argument("no room")) } else { Ok(7) };
            let failed = decide(rank, tag(4), own).unwrap_err().to_string();
            (failed, rank.failure().is_none(), decide(rank, tag(5), Ok(8)).unwrap())
        });
        assert!(
            results.iter().all(|(text, goes_on, value)| text.contains("no room") && *goes_on && *value == 8)
        );
    }
}

#[test]
fn ranks_that_lose_one_at_any_moment_decide_alike() {
    for delay in (0..40).map(|i| i * 50) {
        let mut world = tcp_world(3, LONG);
        on_all(&world, |rank| decide(rank, tag(1), Ok(1)).unwrap());
        let last = world.pop().unwrap();
        let results = std::thread::scope(|scope| {
            let others: Vec<_> =
                world.iter().map(|rank| scope.spawn(|| decide(&**rank, tag(2), Ok(0)).is_ok())).collect();
            last.send(delay as usize / 50 % 2, tag(2), yes()).unwrap();
            std::thread::sleep(Duration::from_micros(delay));
            drop(last);
            others.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(results[0], results[1], "after {delay} us");
    }
}
