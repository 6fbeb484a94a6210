//! Two threads that write and sync files while the caller reads and encodes the next rows.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread::{self, JoinHandle};

use super::files::Files;
use crate::error::{Error, Result};

/// Capacity of the queue of writes.
const QUEUED_PIECES: usize = 8;

/// Capacity of the queue of syncs. The operating system holds the bytes of these files in memory.
const QUEUED_FILES: usize = 1;

/// A file that is open for writing.
pub(super) struct OutputFile {
    file: File,
    path: PathBuf,
}

impl OutputFile {
    /// Creates a file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(files: &dyn Files, path: &Path) -> Result<Arc<OutputFile>> {
        let file = files.create(path).map_err(|e| Error::io(path, e))?;
        Ok(Arc::new(OutputFile { file, path: path.into() }))
    }
}

/// An entry of the queue of writes.
enum Job {
    Write { file: Arc<OutputFile>, bytes: Vec<u8>, offset: u64 },
    Sync(Arc<OutputFile>),
}

/// Queues writes and syncs. They are made in the order in which they were queued.
pub(super) struct Output {
    files: Arc<dyn Files>,
    /// `None` until the first write is queued.
    threads: Option<Threads>,
}

struct Threads {
    jobs: SyncSender<Job>,
    /// Buffers of completed writes, for the next ones.
    buffers: Receiver<Vec<u8>>,
    writing: JoinHandle<Result<()>>,
    syncing: JoinHandle<Result<()>>,
}

impl Output {
    pub fn new(files: Arc<dyn Files>) -> Output {
        Output { files, threads: None }
    }

    /// Queues a write of bytes at `offset`. `fill` must replace the contents of the buffer that it is given with these bytes.
    ///
    /// # Errors
    /// The error of `fill`, and [`Error::Io`] if an earlier write or sync has failed.
    pub fn write(
        &mut self,
        file: &Arc<OutputFile>,
        offset: u64,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = self.threads()?.buffers.try_recv().unwrap_or_default();
        fill(&mut bytes)?;
        self.send(Job::Write { file: file.clone(), bytes, offset })
    }

    /// Queues a sync of a file, after the writes that were queued before.
    ///
    /// # Errors
    /// [`Error::Io`] if an earlier write or sync has failed.
    pub fn sync(&mut self, file: Arc<OutputFile>) -> Result<()> {
        self.send(Job::Sync(file))
    }

    /// Waits until the queues are empty, and ends the threads.
    ///
    /// # Errors
    /// [`Error::Io`] if a write or sync has failed.
    pub fn finish(&mut self) -> Result<()> {
        let Some(Threads { jobs, writing, syncing, .. }) = self.threads.take() else { return Ok(()) };
        drop(jobs);
        let joined = |thread: JoinHandle<Result<()>>| {
            thread
                .join()
                .unwrap_or_else(|_| Err(Error::State("a thread that writes a dump has panicked".into())))
        };
        let written = joined(writing);
        joined(syncing).and(written)
    }

    fn threads(&mut self) -> Result<&mut Threads> {
        match &mut self.threads {
            Some(threads) => Ok(threads),
            none => Ok(none.insert(Threads::start(&self.files)?)),
        }
    }

    fn send(&mut self, job: Job) -> Result<()> {
        match self.threads()?.jobs.send(job) {
            Ok(()) => Ok(()),
            // The thread has ended, because a write or sync has failed.
            Err(_) => self.finish(),
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // A successful dump has called `finish`. A dump that failed has returned its first error.
        let _ = self.finish();
    }
}

impl Threads {
    fn start(files: &Arc<dyn Files>) -> Result<Threads> {
        let (jobs, next_job) = mpsc::sync_channel(QUEUED_PIECES);
        let (written, buffers) = mpsc::channel();
        let (complete, next_file) = mpsc::sync_channel(QUEUED_FILES);
        let (writer, syncer) = (files.clone(), files.clone());
        let syncing = spawn("sok-dump-sync", move || sync_all(&*syncer, next_file))?;
        let writing = spawn("sok-dump-write", move || write_all(&*writer, next_job, &written, &complete))?;
        Ok(Threads { jobs, buffers, writing, syncing })
    }
}

fn spawn(name: &str, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<JoinHandle<Result<()>>> {
    let failed = |e| Error::State(format!("a dump cannot start a thread: {e}"));
    thread::Builder::new().name(name.into()).spawn(work).map_err(failed)
}

/// The thread that writes, until the queue is closed. `written`: takes the buffers. `complete`: the queue of syncs.
fn write_all(
    files: &dyn Files,
    jobs: Receiver<Job>,
    written: &Sender<Vec<u8>>,
    complete: &SyncSender<Arc<OutputFile>>,
) -> Result<()> {
    for job in jobs {
        match job {
            Job::Write { file, bytes, offset } => {
                files.write_at(&file.file, &bytes, offset).map_err(|e| Error::io(&file.path, e))?;
                // `finish` has closed this channel if it waits for the last writes.
                let _ = written.send(bytes);
            }
            Job::Sync(file) => {
                if complete.send(file).is_err() {
                    // The thread that syncs has ended with an error, which `finish` returns.
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// The thread that syncs, until the queue is closed.
fn sync_all(files: &dyn Files, complete: Receiver<Arc<OutputFile>>) -> Result<()> {
    complete.into_iter().try_for_each(|file| files.sync(&file.file).map_err(|e| Error::io(&file.path, e)))
}
