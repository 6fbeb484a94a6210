//! The ranks of a world: this process's connection with the others, and the collectives that Python calls.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sok_core::checkpoint::Ranks;
use sok_core::contract::tensor::StreamHandle;
use sok_core::error::{Error, Result};
use sok_core::exchange::collectives;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Call, Tag};
use sok_core::exchange::polled::PolledRank;
use sok_core::exchange::tcp::TcpRank;
use sok_core::exchange::threads::ThreadRank;
use sok_core::memory;
use sok_core::row_type::RowType;
use sok_cuda::device::{Device, Stream};
use sok_cuda::peers::{Exchange, PeerSum, Peers};

use crate::error::{detached, to_python};
use crate::mpi::{self, Handles};
use crate::numpy_out::{values, vector};

static WORLD: RwLock<Option<Arc<World>>> = RwLock::new(None);

/// The ranks that train together.
pub struct World {
    pub communicator: Arc<dyn Communicator>,
    local_rank: usize,
    pub merge_blocks: usize,
    /// How rows and gradients travel.
    pub row_type: RowType,
    num_layers: AtomicU32,
    /// The GPUs of all ranks, if they can exchange rows; asked for at the first layer on a GPU.
    peers: OnceLock<Option<Arc<Peers>>>,
    /// Adds gradients on the GPUs.
    sum: Mutex<Option<PeerSum>>,
    /// By kind of call: how many were made.
    num_calls: Mutex<HashMap<Call, u64>>,
}

impl World {
    /// Number of the next layer. Ranks make layers in the same order.
    pub fn next_layer(&self) -> u32 {
        self.num_layers.fetch_add(1, Relaxed) + 1
    }

    /// The GPUs of all ranks, if all ranks have one for their tables and these can exchange data. All ranks must call it. `gpu`: this
    /// rank's, for the layer of this number. `nccl`: paths of NCCL.
    pub fn peers(
        &self,
        gpu: Result<Option<Arc<Device>>>,
        nccl: &[PathBuf],
        layer: u32,
    ) -> Result<Option<(Arc<Peers>, Arc<Device>)>> {
        let tag = Tag { call: Call::Gather, layer, step: 0, round: 0 };
        let by_nccl = std::env::var("SOK_EXCHANGE").is_ok_and(|exchange| exchange == "nccl");
        let has = gpu.as_ref().map(|gpu| vec![gpu.is_some().into(), by_nccl.into()]).map_err(Error::clone);
        let have = collectives::gather(&*self.communicator, tag, has)?;
        let Some(gpu) = gpu?.filter(|_| have.iter().all(|has| has[0] == 1)) else { return Ok(None) };
        // As rank 0 says.
        let exchange = if have[0][1] == 1 { Exchange::Nccl } else { Exchange::Any };
        if let Some(peers) = self.peers.get() {
            return Ok(peers.clone().map(|peers| (peers, gpu)));
        }
        let connected = Peers::connect(self.communicator.clone(), &gpu, exchange, nccl, tag.at(1))?;
        let peers = match connected {
            Ok(peers) => Some(Arc::new(peers)),
            Err(why) if exchange == Exchange::Any => {
                log::warn!(
                    "tables are in the memory of the host, since GPUs of ranks cannot exchange rows: {why}"
                );
                None
            }
            Err(why) => return Err(Error::Device(format!("GPUs of ranks cannot exchange rows: {why}"))),
        };
        let sum = peers.as_ref().map(PeerSum::new).transpose();
        *self.sum.lock().unwrap_or_else(PoisonError::into_inner) =
            collectives::agree(&*self.communicator, tag.at(6), sum)?;
        Ok(self.peers.get_or_init(|| peers).clone().map(|peers| (peers, gpu)))
    }

    /// Tag of the next call of this kind that is of no layer.
    fn next_tag(&self, call: Call) -> Tag {
        let mut num_calls = self.num_calls.lock().unwrap_or_else(PoisonError::into_inner);
        let step = num_calls.entry(call).or_default();
        *step += 1;
        Tag { call, layer: 0, step: *step, round: 0 }
    }
}

/// The world of this process, if it has been made.
pub fn world() -> Option<Arc<World>> {
    WORLD.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The ranks of a dump or a load, if there are any.
pub fn ranks_for(call: Call) -> Option<Ranks> {
    let world = world()?;
    Some(Ranks { communicator: world.communicator.clone(), tag: world.next_tag(call) })
}

fn required() -> Result<Arc<World>> {
    world().ok_or_else(|| Error::State("this call needs other ranks: call `sok_keras.init` first".into()))
}

/// Adds what other ranks have to a vector, in place.
pub fn sum_gradients(floats: &mut [f32]) -> Result<()> {
    let world = required()?;
    collectives::sum(&*world.communicator, world.next_tag(Call::Gradients), floats)
}

/// Whether GPUs add gradients, because they can exchange data.
pub fn sums_on_gpus() -> bool {
    world().is_some_and(|world| world.peers.get().is_some_and(Option::is_some))
}

/// Whether a rank may start sums while another thread makes other calls. NCCL needs all calls in the same order on all ranks.
#[pyfunction]
fn sums_beside_calls() -> bool {
    let peers = world().and_then(|world| world.peers.get().cloned().flatten());
    peers.is_none_or(|peers| peers.nccl().is_none())
}

/// Enqueues adding a vector on the GPUs of all ranks.
pub fn sum_on_gpus(from: u64, to: u64, len: usize, stream: StreamHandle) -> Result<()> {
    let world = required()?;
    let tag = world.next_tag(Call::Gradients);
    let mut sum = world.sum.lock().unwrap_or_else(PoisonError::into_inner);
    let sum = sum.as_mut().ok_or_else(|| Error::State("the GPUs of the ranks are not connected".into()))?;
    // SAFETY: The addresses are of tensors of this length, which their framework keeps until the stream has completed the call.
    unsafe { sum.sum(from, to, len, tag, Stream::of(stream)) }
}

/// Enqueues copying a vector on the GPU.
pub fn copy_on_gpu(from: u64, to: u64, len: usize, stream: StreamHandle) -> Result<()> {
    // SAFETY: The addresses are of tensors of this length, which their framework keeps until the stream has completed the call.
    unsafe { Stream::of(stream).copy(to, from, 4 * len) }
}

/// Whether GPUs add gradients.
#[pyfunction]
#[pyo3(name = "sums_on_gpus")]
fn py_sums_on_gpus() -> bool {
    sums_on_gpus()
}

/// Connects this process with the other ranks. `place`: its rank, the number of ranks, and the address of rank 0. `mpi`: what carries their
/// messages, if not TCP. `narrows`: whether rows and gradients travel as bfloat16.
#[pyfunction]
#[pyo3(signature = (place, timeout, merge_blocks, mpi=None, narrows=false))]
fn connect_ranks(
    py: Python<'_>,
    place: (usize, usize, String),
    timeout: f64,
    merge_blocks: Option<usize>,
    mpi: Option<Handles>,
    narrows: bool,
) -> PyResult<()> {
    detached(py, || {
        if world().is_some() {
            return Err(Error::State("`sok_keras.init` was called before".into()));
        }
        let (rank, world_size, address) = place;
        let timeout = Duration::try_from_secs_f64(timeout).ok().filter(|timeout| !timeout.is_zero());
        let timeout =
            timeout.ok_or_else(|| Error::argument("`timeout` must be a positive number of seconds"))?;
        let row_type = if narrows { RowType::Bfloat16 } else { RowType::Float32 };
        let merge_blocks = merge_blocks.unwrap_or(world_size);
        if world_size == 0 || merge_blocks == 0 || !merge_blocks.is_multiple_of(world_size) {
            return Err(Error::argument(format!(
                "`merge_blocks` must be a multiple of the number of ranks. Received: merge_blocks={merge_blocks}, \
                 world_size={world_size}"
            )));
        }
        let (communicator, local_rank): (Arc<dyn Communicator>, usize) = if world_size == 1 {
            (Arc::new(ThreadRank::world(1, timeout).remove(0)), 0)
        } else {
            let transport = mpi.map(|handles| mpi::transport(handles, rank)).transpose()?;
            let rank = TcpRank::connect(rank, world_size, &address, timeout)?;
            let local_rank = rank.local_rank();
            match transport {
                None => (Arc::new(rank), local_rank),
                Some(transport) => (Arc::new(PolledRank::new(rank, transport)?), local_rank),
            }
        };
        let (num_layers, num_calls) = (AtomicU32::new(0), Mutex::default());
        let (peers, sum) = (OnceLock::new(), Mutex::default());
        let world =
            World { communicator, local_rank, merge_blocks, row_type, num_layers, peers, sum, num_calls };
        *WORLD.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(world));
        Ok(())
    })
}

/// Ends the connections, also if layers still hold them. Other ranks that wait for this one fail at once.
#[pyfunction]
fn leave_ranks(py: Python<'_>) -> PyResult<()> {
    detached(py, || {
        let world = WORLD.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(world) = world {
            world.communicator.leave();
        }
        Ok(())
    })
}

/// Rank, number of ranks, rank among those on this host, and number of merge blocks. `None` before `connect_ranks`.
#[pyfunction]
fn ranks() -> Option<(usize, usize, usize, usize)> {
    let world = world()?;
    let communicator = &world.communicator;
    Some((communicator.rank(), communicator.world_size(), world.local_rank, world.merge_blocks))
}

/// Waits until all ranks have come here.
#[pyfunction]
fn barrier(py: Python<'_>) -> PyResult<()> {
    detached(py, || {
        let world = required()?;
        collectives::agree(&*world.communicator, world.next_tag(Call::Barrier), Ok(()))
    })
}

/// The bytes of each rank, by rank.
#[pyfunction]
fn gather<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let bytes = memory::copied(bytes, "the bytes of a call").map_err(to_python)?;
    let gathered = detached(py, || {
        let world = required()?;
        collectives::gather(&*world.communicator, world.next_tag(Call::Gather), Ok(bytes))
    })?;
    Ok(gathered.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
}

/// Sends bytes to each rank. Returns those from each rank. `error`: what this rank fails with, in place of its bytes.
#[pyfunction]
#[pyo3(signature = (parts, error))]
fn exchange<'py>(
    py: Python<'py>,
    parts: Vec<Vec<u8>>,
    error: Option<String>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let received = detached(py, || {
        let world = required()?;
        let (expected, received) = (world.communicator.world_size(), parts.len());
        let parts = match error {
            Some(error) => Err(Error::State(error)),
            None if expected != received => Err(Error::argument(format!(
                "`parts` must hold bytes for each rank. Received: {received} for {expected} ranks"
            ))),
            None => Ok(parts),
        };
        collectives::exchange(&*world.communicator, world.next_tag(Call::Table), parts)
    })?;
    Ok(received.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
}

/// The bytes of rank `root`.
#[pyfunction]
fn broadcast<'py>(py: Python<'py>, bytes: &[u8], root: usize) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = memory::copied(bytes, "the bytes of a call").map_err(to_python)?;
    let bytes = detached(py, || {
        let world = required()?;
        collectives::broadcast(&*world.communicator, world.next_tag(Call::Broadcast), root, bytes)
    })?;
    Ok(PyBytes::new(py, &bytes))
}

/// The sum of each number over all ranks.
#[pyfunction]
fn sum<'py>(py: Python<'py>, floats: PyReadonlyArray1<'_, f32>) -> PyResult<Bound<'py, PyArray1<f32>>> {
    let mut floats = memory::copied(floats.as_slice()?, "the numbers of a call").map_err(to_python)?;
    detached(py, || {
        let world = required()?;
        collectives::sum(&*world.communicator, world.next_tag(Call::Reduce), &mut floats)
    })?;
    let mut sums = vector(py, floats.len())?;
    values(&mut sums)?.copy_from_slice(&floats);
    Ok(sums)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(sums_beside_calls, module)?)?;
    module.add_function(wrap_pyfunction!(connect_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(py_sums_on_gpus, module)?)?;
    module.add_function(wrap_pyfunction!(leave_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(ranks, module)?)?;
    module.add_function(wrap_pyfunction!(barrier, module)?)?;
    module.add_function(wrap_pyfunction!(gather, module)?)?;
    module.add_function(wrap_pyfunction!(broadcast, module)?)?;
    module.add_function(wrap_pyfunction!(exchange, module)?)?;
    module.add_function(wrap_pyfunction!(sum, module)?)
}
