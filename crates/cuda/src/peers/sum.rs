//! Sums of vectors of all ranks, such as the gradients of dense variables.

#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::gather;
use sok_core::exchange::message::{Reader, Tag, Writer};

use super::{FLAG_BYTES, Mapping, Peers, Window, WindowName};
use crate::abi::{self, Flag, MAX_RANKS, SharedSum};
use crate::device::{Stream, driver_error, launch_next};
use crate::kernels::RANKS;

/// Adds vectors of all ranks on their GPUs.
pub struct PeerSum {
    peers: Arc<Peers>,
    /// Flags, which other ranks set.
    flags: Window,
    /// The vector and the sums.
    vectors: Window,
    /// By rank: flags, and vectors.
    of_ranks: Vec<[Arc<Mapping>; 2]>,
    num_calls: u64,
    /// The stream of the last call.
    last: Option<Stream>,
    /// Recorded on the last stream when calls move to another.
    moved: CudaEvent,
}

impl PeerSum {
    /// Without vectors yet.
    ///
    /// # Errors
    /// [`Error::Device`] without enough memory.
    pub fn new(peers: &Arc<Peers>) -> Result<PeerSum> {
        let (flags, vectors) = (peers.window(FLAG_BYTES)?, peers.window(1)?);
        let made = peers.context().new_event(Some(CU_EVENT_DISABLE_TIMING));
        let moved = made.map_err(driver_error("making an event"))?;
        let (of_ranks, peers) = (Vec::new(), peers.clone());
        Ok(PeerSum { peers, flags, vectors, of_ranks, num_calls: 0, last: None, moved })
    }

    /// Enqueues adding a vector of `len` floats over all ranks: the same bits on all of them. They are added in the order of the ranks,
    /// or with NCCL in its own. All ranks must call it.
    ///
    /// # Errors
    /// [`Error::Rank`] if another rank has another number of floats, or fails; [`Error::Device`] without enough memory.
    ///
    /// # Safety
    /// `from` and `to` are addresses of `len` floats on this device, which live until the stream has completed the call.
    pub unsafe fn sum(&mut self, from: u64, to: u64, len: usize, tag: Tag, stream: Stream) -> Result<()> {
        self.peers.take_failure().map_or(Ok(()), Err)?;
        let quads = len.div_ceil(4);
        let bytes = if self.peers.nccl().is_some() { 0 } else { 32 * quads };
        let message = self.write(len, bytes);
        let messages = gather(&*self.peers.communicator, tag, message)?;
        self.num_calls += 1;
        let done = self.read(len, &messages).and_then(|()| {
            // SAFETY: The caller guarantees it.
            unsafe { self.enqueue(from, to, len, quads, stream) }
        });
        done.inspect_err(|error| self.peers.communicator.fail(error))
    }

    fn write(&mut self, len: usize, bytes: usize) -> Result<Vec<u8>> {
        if self.vectors.num_bytes() < bytes {
            // No rank reads the old one any more: all have seen the sums of the last call.
            self.peers.device.synchronize()?;
            self.vectors = self.peers.window(bytes)?;
        }
        self.peers.send(&mut [&mut self.flags, &mut self.vectors])?;
        let mut writer = Writer::default();
        writer.number(len as u64)?;
        self.flags.name().write(&mut writer)?;
        self.vectors.name().write(&mut writer)?;
        Ok(writer.finish())
    }

    fn read(&mut self, len: usize, messages: &[Vec<u8>]) -> Result<()> {
        let mut of_ranks = Vec::with_capacity(messages.len());
        for (rank, message) in messages.iter().enumerate() {
            let mut reader = Reader::new(message, rank);
            let of_rank = reader.number()?;
            if of_rank != len as u64 {
                let what =
                    format!("sums {of_rank} numbers, this rank {len}. All ranks must train the same model");
                return Err(Error::Rank { rank, what });
            }
            let (flags, vectors) = (WindowName::read(&mut reader)?, WindowName::read(&mut reader)?);
            reader.finish()?;
            if self.peers.nccl().is_none() {
                let flags = self.peers.address(rank, flags, Some(&self.flags))?;
                of_ranks.push([flags, self.peers.address(rank, vectors, Some(&self.vectors))?]);
            }
        }
        self.of_ranks = of_ranks;
        Ok(())
    }

    unsafe fn enqueue(&mut self, from: u64, to: u64, len: usize, quads: usize, stream: Stream) -> Result<()> {
        self.peers.context().bind_to_thread().map_err(driver_error("using the GPU"))?;
        if let Some(last) = self.last.replace(stream).filter(|last| *last != stream) {
            last.record(&self.moved)?;
            stream.wait(&self.moved)?;
        }
        if let Some(nccl) = self.peers.nccl() {
            // SAFETY: The caller guarantees it.
            return unsafe { nccl.sum(from, to, len, stream) };
        }
        let flags: Vec<u64> = self.of_ranks.iter().map(|[flags, _]| flags.address()).collect();
        let peers = self.peers.on_device(&flags);
        let mut sum = SharedSum { vectors: [0; MAX_RANKS], quads: quads as u64 };
        sum.vectors.iter_mut().zip(&self.of_ranks).for_each(|(to, [_, vectors])| *to = vectors.address());
        let own = self.vectors.address();
        let device = &self.peers.device;
        let [meet, add] = device.kernels(&RANKS, ["meet", "add_vectors"])?;
        let call = self.num_calls;
        let gather_at = |flag: Flag, peers: abi::Peers| {
            let flag = flag as u32;
            // SAFETY: The arguments have the types of the kernel's parameters. Windows keep the memory that they point to.
            unsafe { launch_next!(meet, stream, 1, MAX_RANKS, peers, flag, call) }
        };
        // SAFETY: The caller guarantees that `from` has so many floats; the window has room for them.
        unsafe { stream.copy(own, from, 4 * len) }?;
        gather_at(Flag::Parts, peers)?;
        let blocks = 2 * device.multiprocessors;
        // SAFETY: The arguments have the types of the kernel's parameters. Windows keep the memory that they point to.
        unsafe { launch_next!(add, stream, blocks, 256, peers, sum) }?;
        gather_at(Flag::Sums, peers)?;
        // SAFETY: The caller guarantees that `to` has room for so many floats; the sums follow the vector.
        unsafe { stream.copy(to, own + 16 * quads as u64, 4 * len) }
    }
}
