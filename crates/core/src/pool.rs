//! The thread pool of a step. Results do not depend on the number of threads.

use std::sync::{Arc, Mutex, Once, PoisonError};

use crate::error::{Error, Result};
use crate::fork::{PerProcess, at_fork};

/// A call with fewer ids runs on the thread of its caller, because waking other threads takes as long as the call.
pub(crate) const SMALL_CALL: usize = 2048;
/// Number of pieces of work for each thread. There are several, so that threads finish at about the same time.
const PIECES: usize = 4;

/// Maximal number of threads. It is more than machines have cores, and fewer than a process may start.
pub const MAX_THREADS: usize = 1024;

static POOL: PerProcess<Arc<Pool>> = PerProcess::new();

/// Threads that take tasks from a shared list.
pub struct Pool {
    threads: usize,
    /// `None` with one thread: the caller does all work.
    workers: Option<rayon::ThreadPool>,
}

impl Pool {
    /// Makes a pool of this number of threads.
    ///
    /// # Errors
    /// [`Error::Argument`] unless the number is 1 to [`MAX_THREADS`], [`Error::State`] if the system has no threads left.
    pub fn new(threads: usize) -> Result<Pool> {
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(wrong_number("the number of threads", &threads.to_string()));
        }
        let build = || {
            rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("sok-{i}")).build()
        };
        let workers = (threads > 1)
            .then(build)
            .transpose()
            .map_err(|e| Error::State(format!("cannot start {threads} threads: {e}")))?;
        Ok(Pool { threads, workers })
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work` on each task. Free threads take tasks in the order of the list. The caller waits.
    ///
    /// `broadcast` over a shared list wakes threads in half the time that a parallel iterator takes.
    pub fn run<T: Send>(&self, tasks: Vec<T>, work: impl Fn(T) + Sync) {
        match &self.workers {
            Some(workers) if tasks.len() > 1 => {
                let tasks = Mutex::new(tasks.into_iter());
                let next = || tasks.lock().unwrap_or_else(|e| e.into_inner()).next();
                workers.broadcast(|_| {
                    while let Some(task) = next() {
                        work(task);
                    }
                });
            }
            _ => tasks.into_iter().for_each(work),
        }
    }
}

/// Runs `work` on each task, as [`Pool::run`]. A call with few ids runs on the thread of its caller.
pub(crate) fn run_if_large<T: Send>(num_ids: usize, tasks: Vec<T>, pool: &Pool, work: impl Fn(T) + Sync) {
    if num_ids < SMALL_CALL { tasks.into_iter().for_each(work) } else { pool.run(tasks, work) }
}

/// Returns the number of pieces into which `mine` is divided, where `mine` is a part of `total` work. All pieces of the total then
/// have about the same size.
pub(crate) fn num_pieces(mine: usize, total: usize, pool: &Pool) -> usize {
    if pool.threads() == 1 {
        return 1;
    }
    (mine * pool.threads() * PIECES).div_ceil(total.max(1)).max(1)
}

/// Keeps the first error of many tasks.
#[derive(Default)]
pub(crate) struct FirstError(Mutex<Option<Error>>);

impl FirstError {
    /// Keeps the error of `result` if it is the first one.
    pub fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// Returns the first error, if there was one.
    pub fn into_result(self) -> Result<()> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// Returns the pool of the process. It has `SOK_NUM_THREADS` threads, or one for each core that the process may use. A forked child
/// makes its own.
///
/// # Errors
/// As [`Pool::new`]; [`Error::Argument`] for a wrong `SOK_NUM_THREADS`.
pub fn global() -> Result<Arc<Pool>> {
    if let Some(pool) = POOL.get() {
        return Ok(pool);
    }
    let threads = match std::env::var_os("SOK_NUM_THREADS") {
        Some(text) => parse_threads("SOK_NUM_THREADS", &text.to_string_lossy())?,
        None => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
    };
    set_num_threads(threads)
}

/// Sets the number of threads of later calls. Returns their pool.
///
/// # Errors
/// As [`Pool::new`].
pub fn set_num_threads(threads: usize) -> Result<Arc<Pool>> {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| at_fork(None, None, Some(forget_pool)));
    let pool = Arc::new(Pool::new(threads)?);
    POOL.set(pool.clone());
    Ok(pool)
}

/// Parses a number of threads. `what` names it in the error.
///
/// # Errors
/// [`Error::Argument`] unless the text is an integer from 1 to [`MAX_THREADS`].
pub fn parse_threads(what: &str, text: &str) -> Result<usize> {
    let threads = text.trim().parse().ok().filter(|threads| (1..=MAX_THREADS).contains(threads));
    threads.ok_or_else(|| wrong_number(what, text))
}

fn wrong_number(what: &str, received: &str) -> Error {
    Error::argument(format!("{what} must be an integer from 1 to {MAX_THREADS}. Received: {received}"))
}

#[allow(unsafe_code)]
extern "C" fn forget_pool() {
    // SAFETY: called in a child that was just forked, which has one thread: the one that forked, outside of any call.
    unsafe { POOL.forget() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_threads_are_1_to_1024() {
        for (text, threads) in [("1", 1), (" 4\n", 4), ("1024", 1024)] {
            assert_eq!(parse_threads("n", text).unwrap(), threads);
        }
        for text in ["0", "-1", "1025", "18446744073709551616", "1e3", "4.0", "", "many"] {
            let error = parse_threads("SOK_NUM_THREADS", text).unwrap_err().to_string();
            assert_eq!(error, format!("SOK_NUM_THREADS must be an integer from 1 to 1024. Received: {text}"));
        }
        assert!(Pool::new(0).is_err() && Pool::new(1025).is_err());
    }
}
