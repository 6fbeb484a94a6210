//! The clock of policies, which tests set.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

/// No time was set.
const NOT_SET: u64 = u64::MAX;
static SET: AtomicU64 = AtomicU64::new(NOT_SET);

/// Milliseconds since 1970, or the time that was set.
pub fn now() -> u64 {
    match SET.load(Relaxed) {
        NOT_SET => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64),
        set => set,
    }
}

/// Stops the clock of the process at a time in milliseconds since 1970. `None`: it follows that of the system again.
pub fn set(now: Option<u64>) {
    SET.store(now.unwrap_or(NOT_SET), Relaxed);
}
