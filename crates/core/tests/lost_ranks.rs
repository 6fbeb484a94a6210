//! One rank of several processes is killed, stops or panics in the middle of a call. The other ranks report it within the timeout, keep
//! their rows, and all end after the same step.

mod common;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::input::Input;
use common::large::{ADAM, plain_update};
use common::programs::{POOLS, free_address};
use common::scan;
use common::sharded::{Directory, ShardedSubject, fill, restore, save};
use common::strategies::plain_config;
use common::subject::{OWNER, Subject, binding};
use serde::{Deserialize, Serialize};
use sok_core::checkpoint::{LoadMode, read_manifest, verify};
use sok_core::contract::table::{Insertion, TableConfig};
use sok_core::error::{Error, Result};
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Call, Tag};
use sok_core::exchange::placement::Placement;
use sok_core::exchange::tcp::TcpRank;
use sok_core::fingerprint::fingerprint64;
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::row_type::RowType;

const WORLD: usize = 3;
/// The rank that is lost.
const LOST: usize = 2;
/// The step in which it is lost.
const FATAL_STEP: u64 = 2;
const TIMEOUT: Duration = Duration::from_secs(2);
/// Holds the case of a process that is a rank.
const CASE: &str = "SOK_TEST_RANK";

/// How a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum How {
    Kill,
    Stop,
    Raise,
}

impl How {
    fn happen(self) {
        let signal = match self {
            How::Kill => libc::SIGKILL,
            How::Stop => libc::SIGSTOP,
            How::Raise => panic!("the program of this rank fails"),
        };
        // SAFETY: both signals act on the whole process, whatever it does.
        unsafe { libc::raise(signal) };
    }
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Part {
    Lookup,
    Push,
    Commit,
    Apply,
    Dump,
    Load,
}

impl Part {
    const ALL: [Part; 6] = [Part::Lookup, Part::Push, Part::Commit, Part::Apply, Part::Dump, Part::Load];

    /// Where it exchanges messages, and the number of that call in a step.
    fn call(self, step: u64) -> Option<(Call, u64)> {
        match self {
            Part::Lookup => Some((Call::Lookup, step)),
            Part::Commit => Some((Call::Commit, step)),
            // The first dump is made before the first step.
            Part::Dump => Some((Call::Dump, step + 1)),
            Part::Load => Some((Call::Load, step)),
            Part::Push | Part::Apply => None,
        }
    }

    /// The calls in which other ranks may learn that a rank was lost in this part. A rank that is behind is still in the call before. A
    /// rank that has all messages of this call is already in the call after.
    fn waiting_calls(self) -> &'static [&'static str] {
        match self {
            Part::Lookup => &CALLS[..3],
            Part::Push => &CALLS[1..3],
            Part::Commit => &CALLS[1..4],
            Part::Apply => &CALLS[2..4],
            Part::Dump => &CALLS[2..5],
            Part::Load => &CALLS[3..],
        }
    }
}

/// How errors name the calls that exchange messages, in the order of a program. `dump 3` and `load 2` end step 2, in which a rank is
/// lost. The first call is of step 1 and the last one of step 3.
const CALLS: [&str; 6] =
    ["load 1", "lookup 2 of layer 1", "commit 2 of layer 1", "dump 3", "load 2", "lookup 3 of layer 1"];

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Case {
    /// Where a rank is lost; `None`: nowhere.
    lost: Option<(Part, How)>,
    /// After how many messages of the call.
    point: usize,
    /// A norm adds two exchanges to a commit.
    clips: bool,
}

/// The arguments of a process that is a rank.
#[derive(Serialize, Deserialize)]
struct Start {
    case: Case,
    rank: usize,
    address: String,
    folder: String,
}

/// The results of a rank, which it writes when it ends.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    /// Its rows and states at the start, and after each update and each load.
    digests: Vec<u64>,
    /// The same at the end.
    now: u64,
    error: Option<String>,
    /// How long the call took that failed.
    seconds: f64,
    /// Number of the newest dump that this rank has seen to be complete.
    dumped: u64,
    /// By part: how many messages it sent and received in the step.
    num_messages: BTreeMap<String, usize>,
}

/// A rank that is lost at a given message of a call.
struct Fated {
    rank: TcpRank,
    case: Case,
    /// By part.
    num_messages: Mutex<BTreeMap<String, usize>>,
}

impl Fated {
    /// Counts a message, or what is decided after it.
    fn come_to(&self, tag: Tag) {
        for part in Part::ALL.into_iter().filter(|part| part.call(FATAL_STEP) == Some((tag.call, tag.step))) {
            let mut num_messages = self.num_messages.lock().unwrap();
            let number = num_messages.entry(format!("{part:?}")).or_default();
            let is_here = *number == self.case.point;
            *number += 1;
            drop(num_messages);
            if let Some((fatal, how)) = self.case.lost
                && fatal == part
                && is_here
            {
                how.happen();
            }
        }
    }
}

impl Communicator for Fated {
    delegate_to_rank!();

    fn send(&self, to: usize, tag: Tag, message: Vec<u8>) -> Result<()> {
        self.come_to(tag);
        self.rank.send(to, tag, message)
    }

    fn receive(&self, from: usize, tag: Tag) -> Result<Vec<u8>> {
        self.come_to(tag);
        self.rank.receive(from, tag)
    }

    fn decide(&self, tag: Tag) -> Result<()> {
        self.come_to(tag);
        self.rank.decide(tag)
    }
}

// ---- a rank

fn configs() -> Vec<(TableConfig, Placement)> {
    let fixed = |name| TableConfig { vocabulary_size: Some(40), ..plain_config(name, 3) };
    vec![
        (plain_config("dynamic", 4), Placement::Distributed),
        (fixed("static"), Placement::Distributed),
        (plain_config("one", 2), Placement::Localized(1)),
        (fixed("everywhere"), Placement::Replicated),
    ]
}

fn digest(subject: &mut ShardedSubject) -> u64 {
    let tables: Vec<_> = (0..subject.num_tables()).map(|table| scan(subject.table(table), 10)).collect();
    fingerprint64(format!("{tables:?}").as_bytes())
}

/// Makes a part of a step. Push and apply exchange nothing, so a rank is lost there before it begins.
fn make(part: Part, step: u64, subject: &mut ShardedSubject, start: &Start, lookup: &mut u64) -> Result<()> {
    if step == FATAL_STEP
        && start.rank == LOST
        && part.call(step).is_none()
        && let Some((fatal, how)) = start.case.lost
        && fatal == part
    {
        how.happen();
    }
    let folder = Path::new(&start.folder);
    match part {
        Part::Lookup => {
            let keys: Vec<u64> = (0..12).map(|key| key * 3 + start.rank as u64).collect();
            let inputs: Vec<Input> = (0..configs().len()).map(|table| Input::plain(table, &keys)).collect();
            *lookup = subject.lookup(&inputs, Insertion::AtLookup, true)?.0;
        }
        Part::Push => {
            let gradient =
                |(config, _): &(TableConfig, _)| vec![step as f32 - start.rank as f32; 12 * config.dim];
            let gradients = Arc::new(configs().iter().map(gradient).collect::<Vec<_>>());
            subject.push(step, *lookup, &gradients, false, &[])?;
        }
        Part::Commit => drop(subject.commit(&[(step, 1.0)], true)?),
        Part::Apply => subject.apply(UpdateScalars { learning_rate: 0.1, step, factor: 1.0 }, true)?,
        Part::Dump => save(&mut subject.group, &folder.join("dump"), true, step + 1)?,
        Part::Load => restore(&mut subject.group, &folder.join("base"), LoadMode::Replace, step)?,
    }
    Ok(())
}

fn run(start: &Start) -> Told {
    let tcp = TcpRank::connect(start.rank, WORLD, &start.address, TIMEOUT).unwrap();
    let case = Case { lost: start.case.lost.filter(|_| start.rank == LOST), ..start.case };
    let fated = Arc::new(Fated { rank: tcp, case, num_messages: Mutex::default() });
    let mut subject = ShardedSubject::new(&configs(), fated.clone(), WORLD, RowType::Float32, &POOLS[0]);
    let update = Update { clipnorm: start.case.clips.then_some(0.5), ..plain_update(ADAM) };
    subject.bind(binding(OWNER, update)).unwrap();
    // A lookup inserts nothing, so that what a step leaves behind is what it has updated.
    fill(&mut subject.group, 40);
    save(&mut subject.group, &Path::new(&start.folder).join("base"), true, 1).unwrap();
    let (mut digests, mut lookup) = (vec![digest(&mut subject)], 0);
    let (mut error, mut seconds, mut dumped) = (None, 0.0, 0);
    'steps: for step in 1..=3 {
        for part in Part::ALL {
            let begin = Instant::now();
            if let Err(failed) = make(part, step, &mut subject, start, &mut lookup) {
                (error, seconds) = (Some(failed), begin.elapsed().as_secs_f64());
                break 'steps;
            }
            match part {
                Part::Apply | Part::Load => digests.push(digest(&mut subject)),
                Part::Dump => dumped = step + 1,
                _ => {}
            }
        }
    }
    if error.is_some() {
        // After a failure every call fails, and the rows of this rank stay as they are.
        let again = save(&mut subject.group, &Path::new(&start.folder).join("dump"), true, 9);
        assert!(matches!(again, Err(Error::Rank { .. })), "{again:?}");
        assert!(make(Part::Lookup, 9, &mut subject, start, &mut lookup).is_err());
    }
    let num_messages = fated.num_messages.lock().unwrap().clone();
    Told {
        digests,
        now: digest(&mut subject),
        error: error.map(|e| e.to_string()),
        seconds,
        dumped,
        num_messages,
    }
}

#[test]
#[ignore = "a process that the other tests start"]
fn rank() {
    let Ok(start) = std::env::var(CASE) else { return };
    let start: Start = serde_json::from_str(&start).unwrap();
    let told = serde_json::to_vec(&run(&start)).unwrap();
    std::fs::write(Path::new(&start.folder).join(format!("told{}", start.rank)), told).unwrap();
}

// ---- the test

fn spawn(case: Case, rank: usize, address: &str, folder: &Path) -> Child {
    let said = File::create(folder.join(format!("said{rank}"))).unwrap();
    let folder = folder.to_str().unwrap().to_string();
    let start = Start { case, rank, address: address.into(), folder };
    Command::new(std::env::current_exe().unwrap())
        .args(["rank", "--exact", "--ignored", "--nocapture"])
        .env(CASE, serde_json::to_string(&start).unwrap())
        .stdout(said.try_clone().unwrap())
        .stderr(said)
        .spawn()
        .unwrap()
}

/// Runs a case. Returns the results of the ranks that were not lost.
fn run_world(case: Case, folder: &Path) -> Vec<Told> {
    std::fs::create_dir_all(folder).unwrap();
    let address = free_address();
    let mut ranks: Vec<Child> = (0..WORLD).map(|rank| spawn(case, rank, &address, folder)).collect();
    let is_left = |rank: usize| case.lost.is_none() || rank != LOST;
    let mut told = Vec::new();
    for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| is_left(*rank)) {
        let status = process.wait().unwrap();
        let said = || std::fs::read_to_string(folder.join(format!("said{rank}"))).unwrap();
        assert!(status.success(), "{case:?}: rank {rank}: {}", said());
        told.push(
            serde_json::from_slice(&std::fs::read(folder.join(format!("told{rank}"))).unwrap()).unwrap(),
        );
    }
    if case.lost.is_some() {
        ranks[LOST].kill().unwrap();
        ranks[LOST].wait().unwrap();
        assert!(!folder.join(format!("told{LOST}")).exists(), "{case:?}: it was not lost");
    }
    told
}

/// Runs a case, and compares the remaining ranks with those of a run in which no rank was lost.
fn check(case: Case, whole: &[Told], folder: &Path) {
    let (part, how) = case.lost.unwrap();
    let told = run_world(case, folder);
    for (rank, told) in told.iter().enumerate() {
        let error = told.error.as_deref().unwrap_or_default();
        let is_named = part.waiting_calls().iter().any(|call| error.contains(call));
        assert!(error.contains("rank 2 ") && is_named, "{case:?}: rank {rank}: {error}");
        let limit = if how == How::Stop { TIMEOUT * 2 } else { TIMEOUT };
        assert!(told.seconds < limit.as_secs_f64(), "{case:?}: rank {rank}: {told:?}");
        let made = told.digests.len();
        assert_eq!(told.digests, whole[rank].digests[..made], "{case:?}: rank {rank}");
        assert_eq!(told.now, told.digests[made - 1], "{case:?}: rank {rank} has lost something");
    }
    assert_eq!(told[0].digests.len(), told[1].digests.len(), "{case:?}: {told:?}");
    // If the dump has failed on the remaining ranks, the dump before it is still complete.
    let dump = folder.join("dump");
    verify(&dump).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let dumped = read_manifest(&dump).unwrap().step;
    assert!(told.iter().all(|told| told.dumped == dumped), "{case:?}: dump {dumped}: {told:?}");
}

/// Runs cases, some at a time.
fn check_all(cases: Vec<Case>, whole: &[Vec<Told>; 2], at_a_time: usize, folder: &Path) {
    let cases = Mutex::new(cases.into_iter().enumerate().collect::<VecDeque<_>>());
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                while let Some((number, case)) = { cases.lock().unwrap().pop_front() } {
                    let folder = folder.join(format!("{:?}{number}", case.lost.unwrap().1));
                    check(case, &whole[usize::from(case.clips)], &folder);
                }
            });
        }
    });
}

#[test]
fn a_rank_lost_at_any_message_of_any_call_is_named_in_time_and_leaves_the_others_alike() {
    let directory = Directory::new("lost");
    let whole = [false, true].map(|clips| {
        let case = Case { lost: None, point: 0, clips };
        let told = run_world(case, &directory.0.join(format!("whole{clips}")));
        assert!(told.iter().all(|told| told.error.is_none() && told.digests.len() == 7), "{told:?}");
        told
    });
    let cases_of = |how: How| {
        let mut cases = Vec::new();
        for clips in [false, true] {
            for part in Part::ALL.into_iter().filter(|part| !clips || *part == Part::Commit) {
                let num_messages = &whole[usize::from(clips)][LOST].num_messages;
                let last = num_messages.get(&format!("{part:?}")).map_or(0, |number| number - 1);
                let points = match how {
                    How::Kill => (0..=last).collect(),
                    _ if last == 0 => vec![0],
                    _ => vec![0, last / 2, last],
                };
                cases.extend(points.into_iter().map(|point| Case { lost: Some((part, how)), point, clips }));
            }
        }
        cases
    };
    // A case with a stopped rank spends its time waiting, so many of them run at once.
    check_all(cases_of(How::Stop), &whole, 10, &directory.0);
    check_all([How::Kill, How::Raise].into_iter().flat_map(cases_of).collect(), &whole, 3, &directory.0);
}
