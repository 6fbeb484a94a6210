//! Measures the parts of steps on the host, while somebody wants their times.

use std::time::Instant;

use crate::contract::profile::{Profile, StepPart};

/// A clock that stands still until it is switched on.
#[derive(Default)]
pub struct Stopwatch {
    profile: Option<Profile>,
}

impl Stopwatch {
    pub fn switch(&mut self, is_on: bool) {
        self.profile = is_on.then(Profile::default);
    }

    pub fn is_on(&self) -> bool {
        self.profile.is_some()
    }

    /// Returns the times since the stopwatch was switched on, or since the last call.
    pub fn take(&mut self) -> Profile {
        self.profile.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns when a part starts, for `stop`.
    pub fn start(&self) -> Option<Instant> {
        self.profile.as_ref().map(|_| Instant::now())
    }

    pub fn stop(&mut self, part: StepPart, start: Option<Instant>) {
        if let (Some(profile), Some(start)) = (&mut self.profile, start) {
            profile.add(part, start.elapsed());
        }
    }
}
