//! A launch of NCCL waits until all ranks have made theirs, and has no limit of its own. So a thread watches the oldest one.

use std::sync::{Arc, PoisonError};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
use cudarc::driver::{CudaContext, CudaEvent};
use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::gather;
use sok_core::exchange::message::{Call, Tag};

use super::Nccl;
use crate::device::{Stream, driver_error};

/// A launch is looked at so many times within the timeout.
const LOOKS: u32 = 8;

/// The oldest launch that may not have completed.
pub(super) struct Watched {
    /// Before the launch.
    begun: CudaEvent,
    /// After the launch.
    done: CudaEvent,
    /// Counts the launches that were watched.
    number: u64,
}

impl Watched {
    pub fn new(context: &Arc<CudaContext>) -> Result<Watched> {
        let event =
            || context.new_event(Some(CU_EVENT_DISABLE_TIMING)).map_err(driver_error("making an event"));
        Ok(Watched { begun: event()?, done: event()?, number: 0 })
    }

    /// Notes that a launch follows on the stream. Returns whether it is watched: not if an earlier one is, for which it waits as well.
    pub fn begin(&mut self, stream: Stream) -> Result<bool> {
        let is_free = self.done.is_complete();
        if is_free {
            self.number += 1;
            stream.record(&self.begun)?;
        }
        Ok(is_free)
    }

    /// Notes that the launch is on the stream.
    pub fn end(&self, stream: Stream) -> Result<()> {
        stream.record(&self.done)
    }

    /// Returns the number of the launch that has begun and not completed, if there is one.
    fn waiting(&self) -> Option<u64> {
        (!self.done.is_complete() && self.begun.is_complete()).then_some(self.number)
    }
}

/// Starts the thread, which ends with the connection.
///
/// # Errors
/// [`Error::State`] if the thread cannot be started.
pub(super) fn watch(nccl: &Arc<Nccl>) -> Result<()> {
    let timeout = nccl.communicator.timeout();
    let pause = (timeout / LOOKS).min(Duration::from_secs(1));
    let nccl = Arc::downgrade(nccl);
    let look = move || {
        let mut waits: Option<(u64, Instant)> = None;
        loop {
            sleep(pause);
            let Some(nccl) = nccl.upgrade() else { return };
            if nccl.communicator.failure().is_some() || nccl.context.bind_to_thread().is_err() {
                return;
            }
            let number = nccl.watched.lock().unwrap_or_else(PoisonError::into_inner).waiting();
            let seen = waits.filter(|(seen, _)| Some(*seen) == number);
            waits = seen.or_else(|| number.map(|number| (number, Instant::now())));
            if waits.is_some_and(|(_, since)| since.elapsed() > timeout) {
                return give_up(&nccl);
            }
        }
    };
    let started = Builder::new().name("sok-nccl".into()).spawn(look);
    started
        .map(drop)
        .map_err(|error| Error::State(format!("cannot start a thread that watches NCCL: {error}")))
}

/// Makes the communicator of the hosts fail, with the name of a rank whose GPU does not wait.
fn give_up(nccl: &Nccl) {
    let communicator = &*nccl.communicator;
    let tag = Tag { call: Call::Wait, layer: 0, step: 0, round: 0 };
    let all_wait =
        || Error::State("the GPUs of all ranks have waited for each other longer than the timeout".into());
    communicator.fail(&gather(communicator, tag, Ok(Vec::new())).err().unwrap_or_else(all_wait));
}
