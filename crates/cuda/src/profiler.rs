//! Measures the parts of steps on a GPU by events on its streams, while somebody wants their times.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaContext, CudaEvent};
use sok_core::contract::profile::{Profile, StepPart};
use sok_core::error::Result;

use crate::device::{Stream, driver_error};

/// Runs whose events are kept until they are read. Reading them waits for the device.
const MAX_RUNS: usize = 1 << 12;

/// The event at the start of a part. `None` while nothing is measured.
pub type Started = Option<CudaEvent>;

/// The runs that were measured, and their events.
#[derive(Default)]
struct Runs {
    profile: Profile,
    /// A part, and the events at its start and its end.
    unread: Vec<(StepPart, CudaEvent, CudaEvent)>,
    spare: Vec<CudaEvent>,
}

/// Records events around the parts of steps, if it is switched on.
pub struct Profiler {
    context: Arc<CudaContext>,
    runs: RefCell<Option<Runs>>,
}

impl Profiler {
    /// Creates a profiler that is switched off.
    pub fn new(context: &Arc<CudaContext>) -> Profiler {
        Profiler { context: context.clone(), runs: RefCell::default() }
    }

    /// Switches it on or off. What it has measured before is dropped.
    pub fn switch(&mut self, is_on: bool) {
        *self.runs.get_mut() = is_on.then(Runs::default);
    }

    /// Whether it is switched on.
    pub fn is_on(&self) -> bool {
        self.runs.borrow().is_some()
    }

    /// Enqueues the start of a part.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if an event cannot be recorded.
    pub fn start(&self, stream: Stream) -> Result<Started> {
        let mut runs = self.runs.borrow_mut();
        runs.as_mut().map(|runs| self.mark(runs, stream)).transpose()
    }

    /// Enqueues the end of a part. `started`: as `start` returned it, for the same stream.
    ///
    /// # Errors
    /// As `start`, and the error of a launch that has failed.
    pub fn stop(&self, part: StepPart, started: Started, stream: Stream) -> Result<()> {
        let mut runs = self.runs.borrow_mut();
        let (Some(runs), Some(started)) = (runs.as_mut(), started) else { return Ok(()) };
        let ended = self.mark(runs, stream)?;
        runs.unread.push((part, started, ended));
        if runs.unread.len() < MAX_RUNS { Ok(()) } else { runs.read() }
    }

    /// Returns the times since the profiler was switched on, or since the last call. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a launch has failed.
    pub fn take(&mut self) -> Result<Profile> {
        let Some(runs) = self.runs.get_mut() else { return Ok(Profile::default()) };
        runs.read()?;
        Ok(std::mem::take(&mut runs.profile))
    }

    fn mark(&self, runs: &mut Runs, stream: Stream) -> Result<CudaEvent> {
        let event = match runs.spare.pop() {
            Some(event) => event,
            None => {
                self.context.new_event(Some(CU_EVENT_DEFAULT)).map_err(driver_error("making an event"))?
            }
        };
        stream.record(&event)?;
        Ok(event)
    }
}

impl Runs {
    /// Adds the times of all runs to the profile.
    fn read(&mut self) -> Result<()> {
        for (part, started, ended) in self.unread.drain(..) {
            let milliseconds = started.elapsed_ms(&ended).map_err(driver_error("measuring a step"))?;
            self.profile.add(part, Duration::from_secs_f64(f64::from(milliseconds) / 1e3));
            self.spare.extend([started, ended]);
        }
        Ok(())
    }
}
