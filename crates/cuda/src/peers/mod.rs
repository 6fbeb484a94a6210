//! The GPUs of ranks that share tables. They read and write each other's memory, if they are of one host and can, or exchange data by NCCL.

mod channel;
mod sum;
mod window;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaContext;
use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::gather;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Reader, Tag, Writer};

use crate::abi::{self, Flag, MAX_RANKS, RankState, word_of};
use crate::device::Device;
use crate::memory::Shared;
use crate::nccl::Nccl;

use channel::Channel;
pub use sum::PeerSum;
pub use window::Mapping;

/// What the GPUs of ranks exchange data by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Each other's memory if all reach it, otherwise NCCL.
    Any,
    /// Each other's memory.
    Memory,
    /// NCCL.
    Nccl,
}

/// The GPUs of all ranks, and the memory that they share.
pub struct Peers {
    /// The connection with all ranks.
    pub communicator: Arc<dyn Communicator>,
    device: Arc<Device>,
    channel: Channel,
    /// By rank: the name of its channel.
    channels: Vec<String>,
    /// The memory of other ranks that is mapped here, by rank and number of the window.
    imports: Mutex<HashMap<(usize, u64), Arc<Mapping>>>,
    /// Numbers of windows that were freed, and that others have not been told of.
    freed: Freed,
    /// A `RankState`, which waiting kernels read and write.
    state: Arc<Shared>,
    /// If they cannot reach each other's memory.
    nccl: Option<Arc<Nccl>>,
}

/// Number of bytes of the flags that the ranks set for a rank: a `u64` by `Flag` and by the rank that sets it. There is room for 16 flags.
pub const FLAG_BYTES: usize = 8 * 16 * MAX_RANKS;

type Freed = Arc<Mutex<Vec<u64>>>;

/// Memory of this rank that all ranks can reach.
pub struct Window {
    number: u64,
    mapping: Arc<Mapping>,
    /// For ranks that do not have it yet; `None` after it was sent.
    descriptor: Option<OwnedFd>,
    freed: Freed,
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.descriptor.is_none() {
            self.freed.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
        }
    }
}

impl Window {
    /// Address in this process.
    pub fn address(&self) -> u64 {
        self.mapping.address()
    }

    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.mapping.num_bytes()
    }

    /// How other ranks name it.
    pub fn name(&self) -> WindowName {
        WindowName { number: self.number, bytes: self.num_bytes() as u64 }
    }
}

/// The name of a window in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowName {
    number: u64,
    bytes: u64,
}

impl WindowName {
    /// Appends it to a message.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn write(self, writer: &mut Writer) -> Result<()> {
        writer.numbers(&[self.number, self.bytes])
    }

    /// Reads it from a message.
    ///
    /// # Errors
    /// [`Error::Rank`] for a message that is too short.
    pub fn read(reader: &mut Reader) -> Result<WindowName> {
        Ok(WindowName { number: reader.number()?, bytes: reader.number()? })
    }
}

impl Peers {
    /// Connects the ranks, with rounds 0 to 4 of the tag. `exchange`: what they are to use. `nccl`: paths of NCCL that the caller knows.
    /// If they cannot be connected, returns the reason on all of them.
    ///
    /// # Errors
    /// [`Error::Rank`] if another rank fails or makes another call, [`Error::Device`].
    pub fn connect(
        communicator: Arc<dyn Communicator>,
        device: &Arc<Device>,
        exchange: Exchange,
        nccl: &[PathBuf],
        tag: Tag,
    ) -> Result<std::result::Result<Peers, String>> {
        let no_channel = |error| Error::Device(format!("cannot share GPU memory with other ranks: {error}"));
        let opened = Channel::open(communicator.timeout()).map_err(no_channel).and_then(|channel| {
            let state = Shared::new(&device.context, size_of::<RankState>() / 4)?;
            Ok((channel, Arc::new(state)))
        });
        let hello =
            opened.as_ref().map(|(channel, _)| format!("{}\n{}", host(), channel.name()).into_bytes());
        let hellos = gather(&*communicator, tag, hello.map_err(Error::clone))?;
        let (channel, state) = opened?;
        let hellos: Vec<String> = hellos.iter().map(|h| String::from_utf8_lossy(h).into_owned()).collect();
        let (hosts, channels): (Vec<&str>, Vec<&str>) =
            hellos.iter().map(|hello| hello.split_once('\n').unwrap_or_default()).unzip();
        if hosts.len() > MAX_RANKS {
            return Ok(Err(format!("there are {} ranks, more than {MAX_RANKS}", hosts.len())));
        }
        let are_together = hosts.iter().all(|other| *other == hosts[0]);
        let aborted = state.clone();
        communicator.on_failure(Box::new(move || aborted.set(word_of!(RankState, is_aborted), 1)));
        let mut peers = Peers {
            nccl: None,
            channels: channels.into_iter().map(String::from).collect(),
            device: device.clone(),
            channel,
            imports: Mutex::default(),
            freed: Freed::default(),
            state,
            communicator,
        };
        if are_together && exchange != Exchange::Nccl {
            let can_share = peers.try_sharing(tag.at(1))?;
            let all = gather(&*peers.communicator, tag.at(2), Ok(vec![u8::from(can_share)]))?;
            if all.iter().all(|can_share| can_share == &[1]) {
                return Ok(Ok(peers));
            }
        }
        if exchange == Exchange::Memory {
            return Ok(Err("not all GPUs reach each other's memory".into()));
        }
        let connected = Nccl::connect(&peers.communicator, &device.context, nccl, tag.at(3))?;
        Ok(connected.map(|nccl| {
            peers.nccl = Some(nccl);
            peers
        }))
    }

    /// NCCL, if GPUs exchange data by it.
    pub fn nccl(&self) -> Option<&Nccl> {
        self.nccl.as_deref()
    }

    /// Whether this rank can map memory of all others.
    fn try_sharing(&self, tag: Tag) -> Result<bool> {
        let mut window = self.window(1).ok();
        let sent = window.as_mut().map(|window| self.send(&mut [window])).is_some_and(|sent| sent.is_ok());
        let mut writer = Writer::default();
        let none = WindowName { number: u64::MAX, bytes: 0 };
        window.as_ref().filter(|_| sent).map_or(none, Window::name).write(&mut writer)?;
        let names = gather(&*self.communicator, tag, Ok(writer.finish()))?;
        let mut can_share = true;
        for (rank, name) in names.iter().enumerate() {
            let name = WindowName::read(&mut Reader::new(name, rank))?;
            can_share &= name != none && self.address(rank, name, window.as_ref()).is_ok();
        }
        self.imports().clear();
        Ok(can_share)
    }

    fn imports(&self) -> MutexGuard<'_, HashMap<(usize, u64), Arc<Mapping>>> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// Context of this rank's device.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.device.context
    }

    /// Allocates memory that all ranks can reach once it has been sent.
    ///
    /// # Errors
    /// [`Error::Device`] if the device does not have enough memory.
    pub fn window(&self, bytes: usize) -> Result<Window> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = &self.device.context;
        let (mapping, descriptor) = if self.nccl.is_some() {
            (Mapping::private(context, bytes)?, None)
        } else {
            let (mapping, descriptor) = Mapping::new(context, bytes)?;
            (mapping, Some(descriptor))
        };
        let number = NEXT.fetch_add(1, Relaxed);
        Ok(Window { number, mapping: Arc::new(mapping), descriptor, freed: self.freed.clone() })
    }

    /// Sends windows to all other ranks, unless they have them already. To be called before a message names the windows.
    ///
    /// # Errors
    /// [`Error::Device`] if they cannot be sent.
    pub fn send(&self, windows: &mut [&mut Window]) -> Result<()> {
        for window in windows {
            let Some(descriptor) = window.descriptor.take() else { continue };
            for (rank, name) in self.channels.iter().enumerate() {
                if rank != self.rank() {
                    let sent = self.channel.send(name, [self.rank() as u64, window.number], &descriptor);
                    sent.map_err(|e| {
                        Error::Device(format!("cannot share GPU memory with rank {rank}: {e}"))
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Returns the memory of a rank, by its name in a message. `own`: the window, if it is this rank's.
    ///
    /// # Errors
    /// [`Error::Rank`] if it has not been sent, [`Error::Device`] if it cannot be mapped.
    pub fn address(&self, rank: usize, name: WindowName, own: Option<&Window>) -> Result<Arc<Mapping>> {
        if rank == self.rank() {
            let own = own.filter(|own| own.number == name.number);
            return own.map(|own| own.mapping.clone()).ok_or_else(|| Error::State("a window is gone".into()));
        }
        let mut imports = self.imports();
        if let Some(mapping) = imports.get(&(rank, name.number)) {
            return Ok(mapping.clone());
        }
        let no_memory =
            |error| Error::Rank { rank, what: format!("has not shared its GPU memory ({error})") };
        let descriptor = self.channel.receive([rank as u64, name.number]).map_err(no_memory)?;
        let mapping = Arc::new(Mapping::import(&self.device.context, &descriptor, name.bytes as usize)?);
        imports.insert((rank, name.number), mapping.clone());
        Ok(mapping)
    }

    /// Returns the memory of a rank, as `address`; `None` for that of another one with NCCL.
    ///
    /// # Errors
    /// As `address`.
    pub fn memory_of(
        &self,
        rank: usize,
        name: WindowName,
        own: Option<&Window>,
    ) -> Result<Option<Arc<Mapping>>> {
        let is_out_of_reach = self.nccl.is_some() && rank != self.rank();
        if is_out_of_reach { Ok(None) } else { self.address(rank, name, own).map(Some) }
    }

    /// Appends the windows of this rank that were freed to a message.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn write_freed(&self, writer: &mut Writer) -> Result<()> {
        let freed = std::mem::take(&mut *self.freed.lock().unwrap_or_else(PoisonError::into_inner));
        writer.number(freed.len() as u64)?;
        writer.numbers(&freed)
    }

    /// Reads the windows that another rank has freed, and unmaps them.
    ///
    /// # Errors
    /// [`Error::Rank`] for a message that is too short.
    pub fn read_freed(&self, from: usize, reader: &mut Reader) -> Result<()> {
        let (count, mut freed) = (reader.number()? as usize, Vec::new());
        reader.numbers(count, &mut freed)?;
        let mut imports = self.imports();
        for number in freed {
            imports.remove(&(from, number));
            self.channel.forget([from as u64, number]);
        }
        Ok(())
    }

    /// What kernels need. `flags`: by rank, the address of its flags; none with NCCL.
    pub fn on_device(&self, flags: &[u64]) -> abi::Peers {
        let mut of_ranks = [0; MAX_RANKS];
        of_ranks[..flags.len()].copy_from_slice(flags);
        abi::Peers {
            flags: of_ranks,
            state: self.state.address(),
            timeout: self.communicator.timeout().as_nanos() as u64,
            rank: self.rank() as u32,
            world_size: self.world_size() as u32,
        }
    }

    /// Returns the failure of a rank that a kernel has waited for in vain, and tells the other ranks of it.
    pub fn take_failure(&self) -> Option<Error> {
        if self.state.get(word_of!(RankState, is_aborted)) == 0 {
            return None;
        }
        let silent = self.state.get(word_of!(RankState, silent)) as usize;
        if silent > 0 && self.communicator.failure().is_none() {
            let call = self.state.get_wide(word_of!(RankState, call));
            let what = match self.state.get(word_of!(RankState, flag)) {
                flag if flag <= Flag::Rows as u32 => format!("lookup {call}"),
                flag if flag <= Flag::Norms as u32 => format!("commit {call}"),
                _ => format!("sum of gradients {call}"),
            };
            let seconds = self.communicator.timeout().as_secs_f64();
            let what = format!("has done nothing on its GPU for {what} within {seconds} s");
            self.communicator.fail(&Error::Rank { rank: silent - 1, what });
        }
        self.communicator.failure()
    }
}

/// Windows that later calls reuse.
pub struct Windows {
    peers: Arc<Peers>,
    spare: VecDeque<Window>,
    /// Windows that other ranks may still read or write.
    resting: Vec<Window>,
}

/// Maximum number of windows that are kept for later calls.
const SPARE_WINDOWS: usize = 8;

impl Windows {
    /// Without windows.
    pub fn new(peers: &Arc<Peers>) -> Windows {
        Windows { peers: peers.clone(), spare: VecDeque::new(), resting: Vec::new() }
    }

    /// Returns a window of at least this many bytes.
    ///
    /// # Errors
    /// As [`Peers::window`].
    pub fn take(&mut self, bytes: usize) -> Result<Window> {
        let fits = self.spare.iter().enumerate().filter(|(_, window)| window.num_bytes() >= bytes);
        match fits.min_by_key(|(_, window)| window.num_bytes()).map(|(i, _)| i) {
            Some(i) => Ok(self.spare.remove(i).expect("the index is of the queue")),
            None => self.peers.window(bytes + bytes / 4),
        }
    }

    /// Takes a window back. Other ranks may still use it in what is under way.
    pub fn give_back(&mut self, window: Window) {
        self.resting.push(window);
    }

    /// Lets later calls reuse the windows that were taken back: the ranks meet on the stream, after all that used these.
    pub fn end_rest(&mut self) {
        self.spare.extend(self.resting.drain(..));
        let surplus = self.spare.len().saturating_sub(SPARE_WINDOWS);
        self.spare.drain(..surplus);
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.peers.world_size()
    }

    /// Number of bytes that are kept for later calls.
    pub fn num_bytes(&self) -> usize {
        self.spare.iter().chain(&self.resting).map(Window::num_bytes).sum()
    }
}

/// What tells this host from others: its boot and its name.
fn host() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default().trim().to_string();
    format!("{} {}", read("/proc/sys/kernel/random/boot_id"), read("/proc/sys/kernel/hostname"))
}
