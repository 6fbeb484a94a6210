//! Every change that a dump makes to the disk goes through here, so that tests can count the changes and break them.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Error, Result};

/// What a dump does to a file system. Several threads call it at once.
pub trait Files: Send + Sync {
    /// Creates a directory and those above it.
    ///
    /// # Errors
    /// The error of the operating system.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// A new, empty file, open for writing; a file that is there already is an error.
    ///
    /// # Errors
    /// The error of the operating system.
    fn create(&self, path: &Path) -> io::Result<File>;

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// The error of the operating system.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// At return the file's bytes stay through a loss of power.
    ///
    /// # Errors
    /// The error of the operating system.
    fn sync(&self, file: &File) -> io::Result<()>;

    /// Puts `from` in the place of `to`, at once.
    ///
    /// # Errors
    /// The error of the operating system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The error of the operating system.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// At return the names in the directory stay through a loss of power.
    ///
    /// # Errors
    /// The error of the operating system.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// The machine's own file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Files for Disk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).open(path)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)?;
        start_writing(file, bytes.len(), offset);
        Ok(())
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            // Some network file systems keep names in order by themselves and refuse to sync a directory.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
            result => result,
        }
    }
}

/// Has the operating system write bytes of a file to the disk from now on. Otherwise it keeps them until the sync, and the disk is idle meanwhile.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
fn start_writing(file: &File, len: usize, offset: u64) {
    use std::os::fd::AsRawFd;
    let (offset, len) = (offset as libc::off64_t, len as libc::off64_t);
    // SAFETY: The call changes no memory. What it returns does not matter: the sync follows.
    unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
}

#[cfg(not(target_os = "linux"))]
fn start_writing(_: &File, _: usize, _: u64) {}

/// Keeps two dumps out of one directory: the second would remove the first one's unfinished files as leftovers.
///
/// The kernel gives it back when the process ends, however it ends.
pub(super) struct DirectoryLock(File);

impl DirectoryLock {
    pub fn acquire(path: &Path) -> Result<DirectoryLock> {
        let directory = File::open(path).map_err(|e| Error::io(path, e))?;
        match directory.try_lock() {
            Err(TryLockError::WouldBlock) => Err(Error::State(format!(
                "only one dump at a time may write to {}: another is at work",
                path.display()
            ))),
            // A file system without locks still takes dumps; there the one writer is the caller's promise.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(DirectoryLock(directory)),
        }
    }
}

impl Drop for DirectoryLock {
    /// A forked child may hold the descriptor as well: closing ours alone would leave the directory locked.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}
