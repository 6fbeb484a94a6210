//! NCCL between the GPUs of ranks that cannot reach each other's memory.
//!
//! Its calls do not block. A rank that is lost, or for which a GPU waits longer than the timeout, makes the communicator of the hosts fail,
//! which aborts that of NCCL: then its launches end.

#![allow(unsafe_code)]

mod library;
mod watch;

use std::ffi::c_int;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::gather;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::Tag;

use crate::device::{Stream, driver_error};
use library::{BYTE, Config, FLOAT, Handle, IN_PROGRESS, Library, SUM, UniqueId};
use watch::{Watched, watch};

/// How long ranks wait for each other at least while NCCL connects them, which takes seconds.
const CONNECTING: Duration = Duration::from_secs(60);

/// For so long a wait for NCCL does not sleep.
const BRIEF: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(100);

/// First byte of the message of a rank that has NCCL. Its GPU and the number of NCCL follow, else the reason.
const HAS_NCCL: u8 = 1;

/// Bytes that go to another rank, or come from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The other rank.
    pub rank: usize,
    /// Address on this device.
    pub address: u64,
    /// Number of bytes, above 0.
    pub bytes: usize,
}

/// The GPUs of all ranks, connected by NCCL.
pub struct Nccl {
    library: Library,
    context: Arc<CudaContext>,
    communicator: Arc<dyn Communicator>,
    handle: Mutex<Connection>,
    watched: Mutex<Watched>,
}

/// NCCL's communicator; null after it was aborted.
struct Connection(Handle);

// SAFETY: NCCL lets any thread use a communicator, one at a time.
unsafe impl Send for Connection {}

impl Nccl {
    /// Connects the GPUs of all ranks. `None` on all of them if two ranks have the same GPU, or one cannot load NCCL; with the reason.
    ///
    /// # Errors
    /// [`Error::Rank`] if another rank fails, [`Error::Device`] if NCCL cannot connect the ranks.
    pub fn connect(
        communicator: &Arc<dyn Communicator>,
        context: &Arc<CudaContext>,
        known: &[PathBuf],
        tag: Tag,
    ) -> Result<std::result::Result<Arc<Nccl>, String>> {
        let loaded = Library::load(known).and_then(|library| {
            let id = if communicator.rank() == 0 { unique_id(&library)? } else { UniqueId([0; 128]) };
            Ok((library, id))
        });
        let hello = uuid(context).map(|gpu| match &loaded {
            Ok((_, id)) => [&[HAS_NCCL][..], &gpu, &id.0].concat(),
            Err(error) => [&[!HAS_NCCL], error.to_string().as_bytes()].concat(),
        });
        let hellos = gather(&**communicator, tag, hello)?;
        if let Some((rank, why)) = hellos.iter().enumerate().find(|(_, hello)| hello[0] != HAS_NCCL) {
            return Ok(Err(format!("rank {rank}: {}", String::from_utf8_lossy(&why[1..]))));
        }
        let (library, _) = loaded?;
        let (gpus, ids): (Vec<&[u8]>, Vec<&[u8]>) =
            hellos.iter().map(|hello| hello[1..].split_at(16)).unzip();
        if (1..gpus.len()).any(|rank| gpus[..rank].contains(&gpus[rank])) {
            return Ok(Err("several ranks have the same GPU, which NCCL does not allow".into()));
        }
        let strange = |_| Error::Rank { rank: 0, what: "has sent no number of NCCL".into() };
        let id = ids[0].try_into().map_err(strange)?;
        let nccl = Arc::new(Nccl {
            library,
            context: context.clone(),
            communicator: communicator.clone(),
            handle: Mutex::new(Connection(null_mut())),
            watched: Mutex::new(Watched::new(context)?),
        });
        nccl.init(UniqueId(id)).and_then(|()| watch(&nccl)).inspect_err(|error| {
            communicator.fail(error);
            nccl.abort();
        })?;
        let to_abort = Arc::downgrade(&nccl);
        communicator.on_failure(Box::new(move || {
            to_abort.upgrade().iter().for_each(|nccl| nccl.abort());
        }));
        Ok(Ok(nccl))
    }

    fn init(&self, id: UniqueId) -> Result<()> {
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        let (rank, world_size) = (self.communicator.rank() as c_int, self.communicator.world_size() as c_int);
        let mut connection = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let mut config = Config::nonblocking();
        // SAFETY: Handle and configuration may be written.
        let result = unsafe { (self.library.init)(&mut connection.0, world_size, id, rank, &mut config) };
        self.library.check(result)?;
        self.wait(&connection)
    }

    /// Waits until what was started is enqueued. After an error, the failure of the communicator of the hosts aborts: kernels must see that
    /// first.
    fn wait(&self, connection: &Connection) -> Result<()> {
        let start = Instant::now();
        let timeout = self.communicator.timeout().max(CONNECTING);
        loop {
            let mut state = 0;
            // SAFETY: The communicator is alive, and the number may be written.
            let asked = unsafe { (self.library.async_error)(connection.0, &mut state) };
            if let Err(error) = self.library.check(asked).and_then(|()| self.library.check(state)) {
                break Err(error);
            }
            if state != IN_PROGRESS {
                break Ok(());
            }
            if let Some(failure) = self.communicator.failure() {
                break Err(failure);
            }
            if start.elapsed() > timeout {
                break Err(Error::State(
                    "NCCL has not connected the GPUs of all ranks within the timeout".into(),
                ));
            }
            if start.elapsed() > BRIEF { std::thread::sleep(PAUSE) } else { std::thread::yield_now() }
        }
    }

    fn abort_connection(&self, connection: &mut Connection) {
        let handle = std::mem::replace(&mut connection.0, null_mut());
        if !handle.is_null() && self.context.bind_to_thread().is_ok() {
            // SAFETY: The communicator is alive, and nobody uses it from here on.
            unsafe { (self.library.abort)(handle) };
        }
    }

    /// Ends all launches of NCCL that wait for other ranks.
    fn abort(&self) {
        self.abort_connection(&mut self.handle.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Enqueues the calls of `enqueue` on a stream, as one.
    fn group(&self, stream: Stream, enqueue: impl FnOnce(Handle) -> c_int) -> Result<()> {
        self.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        let connection = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.0.is_null() {
            let gone = || Error::State("the GPUs of the ranks are not connected any more".into());
            return Err(self.communicator.failure().unwrap_or_else(gone));
        }
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let is_watched = watched.begin(stream)?;
        // SAFETY: The call has no condition.
        let started = unsafe { (self.library.group_start)() };
        let enqueued = self.library.check(started).and_then(|()| self.library.check(enqueue(connection.0)));
        // SAFETY: A group was started by this thread.
        let ended = unsafe { (self.library.group_end)() };
        let done = enqueued.and_then(|()| self.library.check(ended)).and_then(|()| self.wait(&connection));
        let done = done.and_then(|()| if is_watched { watched.end(stream) } else { Ok(()) });
        drop((watched, connection));
        done.inspect_err(|error| self.communicator.fail(error))
    }

    /// Enqueues sending bytes to other ranks and receiving theirs. Between two ranks, what the one sends in its order is what the other
    /// receives in its own.
    ///
    /// # Errors
    /// [`Error::Device`] if NCCL fails, or the failure of the ranks.
    ///
    /// # Safety
    /// The addresses have so many bytes on this device until the stream has completed the call.
    pub unsafe fn exchange(&self, sends: &[Transfer], receives: &[Transfer], stream: Stream) -> Result<()> {
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        self.group(stream, |handle| {
            for &Transfer { rank, address, bytes } in sends {
                // SAFETY: The caller guarantees it.
                let sent = unsafe {
                    (self.library.send)(address as _, bytes, BYTE, rank as c_int, handle, stream.raw())
                };
                if self.library.check(sent).is_err() {
                    return sent;
                }
            }
            for &Transfer { rank, address, bytes } in receives {
                // SAFETY: As above.
                let received = unsafe {
                    (self.library.receive)(address as _, bytes, BYTE, rank as c_int, handle, stream.raw())
                };
                if self.library.check(received).is_err() {
                    return received;
                }
            }
            0
        })
    }

    /// Enqueues giving all ranks the part of each: `of_ranks` is the address of all parts, by rank, with `bytes` bytes each.
    ///
    /// # Errors
    /// As `exchange`.
    ///
    /// # Safety
    /// As `exchange`.
    pub unsafe fn all_gather(&self, of_ranks: u64, bytes: usize, stream: Stream) -> Result<()> {
        let own = of_ranks + (self.communicator.rank() * bytes) as u64;
        // SAFETY: The caller guarantees it. A rank's own part is where it belongs.
        self.group(stream, |handle| unsafe {
            (self.library.all_gather)(own as _, of_ranks as _, bytes, BYTE, handle, stream.raw())
        })
    }

    /// Enqueues giving all ranks the bytes of one, for several parts: `rank` of each is the one that has them.
    ///
    /// # Errors
    /// As `exchange`.
    ///
    /// # Safety
    /// As `exchange`.
    pub unsafe fn broadcast(&self, parts: &[Transfer], stream: Stream) -> Result<()> {
        self.group(stream, |handle| {
            let mut result = 0;
            for &Transfer { rank, address, bytes } in parts {
                // SAFETY: The caller guarantees it.
                result = unsafe {
                    let (from, to) = (address as _, address as _);
                    (self.library.broadcast)(from, to, bytes, BYTE, rank as c_int, handle, stream.raw())
                };
                if self.library.check(result).is_err() {
                    break;
                }
            }
            result
        })
    }

    /// Enqueues adding `len` floats over all ranks.
    ///
    /// # Errors
    /// As `exchange`.
    ///
    /// # Safety
    /// As `exchange`.
    pub unsafe fn sum(&self, from: u64, to: u64, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: The caller guarantees it.
        self.group(stream, |handle| unsafe {
            (self.library.all_reduce)(from as _, to as _, len, FLOAT, SUM, handle, stream.raw())
        })
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread().map(|()| self.context.synchronize());
        self.abort();
    }
}

fn unique_id(library: &Library) -> Result<UniqueId> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: The number may be written.
    library.check(unsafe { (library.unique_id)(&mut id) })?;
    Ok(id)
}

/// What tells this GPU from all others.
fn uuid(context: &CudaContext) -> Result<Vec<u8>> {
    let uuid = context.uuid().map_err(driver_error("asking the GPU what it is"))?;
    Ok(uuid.bytes.iter().map(|&byte| byte as u8).collect())
}
