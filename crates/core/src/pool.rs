//! The threads that share a step's work. What they compute does not depend on how many they are.

use std::sync::{Arc, Mutex, RwLock};

use crate::error::{Error, Result};

/// Below this many ids a call is done by its own thread: waking others takes as long.
pub(crate) const SMALL_CALL: usize = 2048;
/// Pieces of work a thread: enough to even out.
const PIECES: usize = 4;

static THREADS: RwLock<Option<Arc<Pool>>> = RwLock::new(None);

/// Threads that take tasks from a common list.
pub struct Pool {
    threads: usize,
    /// None with one thread: the caller works alone.
    workers: Option<rayon::ThreadPool>,
}

impl Pool {
    pub fn new(threads: usize) -> Result<Pool> {
        if threads == 0 {
            return Err(Error::argument("the number of threads must be at least 1. Received: 0"));
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

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work` on each task, in the order of the list as threads get free. The caller waits.
    /// (`broadcast` over a shared list wakes threads in half the time that a parallel iterator takes.)
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

pub(crate) fn run_if_large<T: Send>(num_ids: usize, tasks: Vec<T>, pool: &Pool, work: impl Fn(T) + Sync) {
    if num_ids < SMALL_CALL { tasks.into_iter().for_each(work) } else { pool.run(tasks, work) }
}

/// Pieces for `mine` of `total` work, so that all pieces are alike.
pub(crate) fn num_pieces(mine: usize, total: usize, pool: &Pool) -> usize {
    if pool.threads() == 1 {
        return 1;
    }
    (mine * pool.threads() * PIECES).div_ceil(total.max(1)).max(1)
}

/// The process' pool: as many threads as `SOK_NUM_THREADS` says, else as the process may use cores.
pub fn global() -> Result<Arc<Pool>> {
    if let Some(pool) = THREADS.read().unwrap_or_else(|e| e.into_inner()).as_ref() {
        return Ok(pool.clone());
    }
    let threads = match std::env::var("SOK_NUM_THREADS") {
        Ok(text) => text.trim().parse().map_err(|_| {
            Error::argument(format!("SOK_NUM_THREADS must be a positive integer. Received: {text:?}"))
        })?,
        Err(_) => std::thread::available_parallelism().map_or(1, usize::from),
    };
    set_num_threads(threads)
}

/// From the next call on, steps use `threads` threads.
pub fn set_num_threads(threads: usize) -> Result<Arc<Pool>> {
    let pool = Arc::new(Pool::new(threads)?);
    *THREADS.write().unwrap_or_else(|e| e.into_inner()) = Some(pool.clone());
    Ok(pool)
}
