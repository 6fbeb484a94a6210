//! Device memory for gradients of other ranks.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaContext;
use sok_core::error::Result;

use crate::memory::Buffer;

/// Device memory that later calls reuse when it is dropped.
pub(super) struct Lent {
    memory: Option<Buffer<u32>>,
    to: Arc<Mutex<Vec<Buffer<u32>>>>,
}

impl Lent {
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, Buffer::address)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut spares = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        spares.extend(self.memory.take());
        if spares.len() > SPARES {
            let smallest = spares.iter().enumerate().min_by_key(|(_, spare)| spare.len()).map(|(i, _)| i);
            smallest.map(|i| spares.swap_remove(i));
        }
    }
}

/// Maximum number of buffers that are kept for later calls.
const SPARES: usize = 4;

/// Lends memory, and keeps what has come back.
#[derive(Default)]
pub(super) struct Lending {
    spares: Arc<Mutex<Vec<Buffer<u32>>>>,
}

impl Lending {
    /// Returns memory of at least this many words.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::error::Error::Device) without enough memory.
    pub fn lend(&self, context: &Arc<CudaContext>, words: usize) -> Result<Lent> {
        let spare = {
            let mut spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = spares.iter().position(|spare| spare.len() >= words);
            fits.map(|i| spares.swap_remove(i))
        };
        let memory = match spare {
            Some(spare) => spare,
            None => Buffer::uninit(context, words + words / 4)?,
        };
        Ok(Lent { memory: Some(memory), to: self.spares.clone() })
    }

    /// Number of bytes that are kept for later calls.
    pub fn num_bytes(&self) -> usize {
        let spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
        spares.iter().map(Buffer::num_bytes).sum()
    }
}
