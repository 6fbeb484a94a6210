//! A disk that counts what is done to it, breaks when told, and knows what a loss of power would take.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use sok_core::checkpoint::{Disk, Files};

/// What happens at the operation whose number has come.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    None,
    /// It fails, a write after half of its bytes; what comes later works.
    Fails,
    /// The process dies, in a write after half of its bytes.
    Kills,
    /// It fails, and so does all that comes later.
    Power,
}

/// A disk that counts, and breaks at one operation. It never waits for the machine: what is synced is only noted.
pub struct BrokenDisk {
    at: usize,
    fault: Fault,
    pub count: AtomicUsize,
    pub largest_write: AtomicUsize,
    /// What a loss of power may take: bytes not synced, by inode, and names not synced, in order.
    pub unsynced_bytes: Mutex<HashMap<u64, PathBuf>>,
    unsynced_names: Mutex<Vec<Name>>,
}

enum Name {
    Created(PathBuf),
    Renamed { from: PathBuf, to: PathBuf, before: Option<Vec<u8>> },
    Removed { path: PathBuf, before: Vec<u8> },
}

impl BrokenDisk {
    pub fn new(fault: Fault, at: usize) -> Arc<BrokenDisk> {
        Arc::new(BrokenDisk {
            at,
            fault,
            count: AtomicUsize::new(0),
            largest_write: AtomicUsize::new(0),
            unsynced_bytes: Mutex::default(),
            unsynced_names: Mutex::default(),
        })
    }

    pub fn counting() -> Arc<BrokenDisk> {
        BrokenDisk::new(Fault::None, usize::MAX)
    }

    /// Counts an operation; `half` is what a broken one does before it breaks.
    fn step(&self, half: impl FnOnce()) -> io::Result<()> {
        let number = self.count.fetch_add(1, Relaxed);
        let breaks = match self.fault {
            Fault::Power => number >= self.at,
            _ => number == self.at,
        };
        if !breaks {
            return Ok(());
        }
        half();
        if self.fault == Fault::Kills {
            std::process::abort();
        }
        Err(io::ErrorKind::StorageFull.into())
    }

    /// Takes all bytes that were not synced, and all names if `names`.
    pub fn lose_power(&self, names: bool) {
        for path in self.unsynced_bytes.lock().unwrap().values() {
            let _ = File::options().write(true).open(path).map(|f| f.set_len(0));
        }
        for name in self.unsynced_names.lock().unwrap().iter().rev().filter(|_| names) {
            match name {
                Name::Created(path) => fs::remove_file(path).unwrap(),
                Name::Removed { path, before } => fs::write(path, before).unwrap(),
                Name::Renamed { from, to, before } => {
                    fs::rename(to, from).unwrap();
                    before.iter().for_each(|bytes| fs::write(to, bytes).unwrap());
                }
            }
        }
    }
}

impl Files for BrokenDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step(|| ())?;
        Disk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.step(|| ())?;
        let file = Disk.create(path)?;
        self.unsynced_names.lock().unwrap().push(Name::Created(path.into()));
        self.unsynced_bytes.lock().unwrap().insert(file.metadata()?.ino(), path.into());
        Ok(file)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.largest_write.fetch_max(bytes.len(), Relaxed);
        self.step(|| Disk.write_at(file, &bytes[..bytes.len() / 2], offset).unwrap())?;
        Disk.write_at(file, bytes, offset)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.step(|| ())?;
        self.unsynced_bytes.lock().unwrap().remove(&file.metadata()?.ino());
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|| ())?;
        let before = fs::read(to).ok();
        Disk.rename(from, to)?;
        for path in self.unsynced_bytes.lock().unwrap().values_mut().filter(|p| *p == from) {
            *path = to.into();
        }
        self.unsynced_names.lock().unwrap().push(Name::Renamed { from: from.into(), to: to.into(), before });
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step(|| ())?;
        let before = fs::read(path)?;
        Disk.remove(path)?;
        self.unsynced_names.lock().unwrap().push(Name::Removed { path: path.into(), before });
        Ok(())
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        self.step(|| ())?;
        self.unsynced_names.lock().unwrap().clear();
        Ok(())
    }
}
