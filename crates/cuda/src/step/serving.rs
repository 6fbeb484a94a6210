//! A lookup whose ids are those that ranks ask for: how many there are is known to the device alone.

#![allow(unsafe_code)]

use sok_core::contract::profile::StepPart;
use sok_core::error::Result;

use super::{Started, Workspace};
use crate::abi::{EXPONENTS, Flag, MAX_RANKS, PartCopy, Peers, Serving, SharedNorms, SharedRows};
use crate::device::{Stream, launch, launch_next};
use crate::kernels::RANKS;
use crate::memory::words;
use crate::nccl::Nccl;

/// Where the keys that all ranks ask for are. The features of the lookup are one for each table and rank, with room for all ids of a rank.
pub struct Remote {
    /// The ranks.
    pub peers: Peers,
    /// Number of the call.
    pub call: u64,
    /// Address of this rank's requests, see [`Asking`](super::Asking).
    pub requests: u64,
    /// By rank: address of where the keys of each owner start, `(tables, 2 * ranks + 1)`.
    pub starts: [u64; MAX_RANKS],
    /// Whether the features of ids of weight 0 follow.
    pub has_silent: bool,
    /// Address that takes, by feature, where its keys begin among those of the rank.
    pub begins: u64,
    /// Address that takes, by feature, the place of its first key among all keys.
    pub firsts: u64,
}

/// How parts of messages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKernel {
    /// Words of 8 bytes, unchanged.
    Copy,
    /// From float32 to bfloat16.
    Narrow,
    /// From bfloat16 to float32.
    Widen,
    /// From float32 to float32 that bfloat16 can hold.
    Round,
}

impl CopyKernel {
    fn name(self) -> &'static str {
        match self {
            CopyKernel::Copy => "copy_parts",
            CopyKernel::Narrow => "narrow_parts",
            CopyKernel::Widen => "widen_parts",
            CopyKernel::Round => "round_parts",
        }
    }
}

impl Workspace {
    /// Enqueues waiting for the keys of all ranks, and completing the features of a lookup that read them. With `save`, also its sections.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
    pub fn connect(&self, started: &mut Started, remote: &Remote, save: bool, stream: Stream) -> Result<()> {
        let serving = Serving {
            features: started.call.features,
            sections: if save { started.places.sections } else { 0 },
            first_find: started.places.first_find,
            tables: started.call.tables,
            requests: remote.requests,
            starts: remote.starts,
            begins: remote.begins,
            firsts: remote.firsts,
            num_tables: started.sections.len() as u32,
            has_silent: remote.has_silent.into(),
        };
        started.is_bounded = true;
        let (peers, call) = (remote.peers, remote.call);
        let connect = self.device.kernel(&RANKS, "connect")?;
        let measured = self.profiler.start(stream)?;
        // SAFETY: The arguments have the types of the kernel's parameters. Groups and windows keep the memory that they point to.
        unsafe { launch_next!(connect, stream, 1, 256, peers, call, serving) }?;
        self.profiler.stop(StepPart::Exchange, measured, stream)
    }

    /// Enqueues telling all ranks that this one has come as far as a call, and waiting for them.
    ///
    /// # Errors
    /// As `connect`.
    pub fn meet(&self, peers: &Peers, flag: Flag, call: u64, stream: Stream) -> Result<()> {
        let (peers, flag) = (*peers, flag as u32);
        let meet = self.device.kernel(&RANKS, "meet")?;
        let measured = self.profiler.start(stream)?;
        // SAFETY: The arguments have the types of the kernel's parameters. Groups and windows keep the memory that they point to.
        unsafe { launch_next!(meet, stream, 1, MAX_RANKS, peers, flag, call) }?;
        self.profiler.stop(StepPart::Exchange, measured, stream)
    }

    /// Enqueues copying parts of messages by one of the kernels that do. `descriptors`: address of memory for the list of copies.
    ///
    /// # Errors
    /// As `connect`.
    pub fn copy_parts(
        &self,
        kernel: CopyKernel,
        copies: &[PartCopy],
        descriptors: u64,
        stream: Stream,
    ) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        self.deliver(descriptors, words(copies), (0, 0), None, stream)?;
        let copy = self.device.kernel(&RANKS, kernel.name())?;
        let blocks = (8 * self.device.multiprocessors).div_ceil(copies.len() as u32);
        let all = blocks as usize * copies.len();
        // SAFETY: The arguments have the types of the kernel's parameters. Groups keep the memory that they point to.
        unsafe { launch_next!(copy, stream, all, 256, descriptors, blocks) }
    }

    /// Enqueues giving all ranks the rows of the out-of-vocabulary keys that this rank owns.
    ///
    /// # Errors
    /// As `connect`.
    pub fn share_out_of_vocabulary(&self, peers: &Peers, rows: &SharedRows, stream: Stream) -> Result<()> {
        let (peers, rows) = (*peers, *rows);
        let share = self.device.kernel(&RANKS, "share_out_of_vocabulary")?;
        // SAFETY: The arguments have the types of the kernel's parameters. Groups and windows keep the memory that they point to.
        unsafe { launch_next!(share, stream, rows.num_tables, 32, peers, rows) }
    }

    /// Enqueues adding the squared norms of all ranks to this rank's, by table and exponent. `nccl`: what moves them, if ranks do not reach
    /// each other's memory.
    ///
    /// # Errors
    /// As `connect`.
    pub fn share_norms(
        &self,
        peers: &Peers,
        nccl: Option<&Nccl>,
        norms: &SharedNorms,
        commit: u64,
        stream: Stream,
    ) -> Result<()> {
        let (peers, norms) = (*peers, *norms);
        let [send, add] = self.device.kernels(&RANKS, ["send_norms", "add_norms"])?;
        let blocks = norms.num_tables;
        // SAFETY: The arguments have the types of the kernel's parameters. Groups and windows keep the memory that they point to.
        unsafe { launch!(send, stream, blocks, 256, peers, norms) }?;
        if let Some(nccl) = nccl {
            let bytes = 8 * norms.num_tables as usize * EXPONENTS;
            // SAFETY: The board of this rank has norms of each rank.
            unsafe { nccl.all_gather(norms.of_ranks[peers.rank as usize], bytes, stream) }?;
        }
        // SAFETY: As above.
        unsafe { launch!(add, stream, 1, 1024, peers, commit, norms) }
    }
}
