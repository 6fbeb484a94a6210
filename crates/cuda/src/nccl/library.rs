//! The functions of NCCL that are called here. The library is loaded at run time. `SOK_NCCL` is the path of the one that the user chooses.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;

use libloading::os::unix;
use sok_core::error::{Error, Result};

use crate::loader;

const NAME: &str = "libnccl.so.2";
/// The first version whose calls do not block where that is asked for.
const OLDEST: c_int = 21400;

/// `ncclResult_t`: the call has done what it should.
pub(super) const SUCCESS: c_int = 0;
/// `ncclResult_t`: the call goes on in the background.
pub(super) const IN_PROGRESS: c_int = 7;
/// `ncclDataType_t` of bytes and of floats.
pub(super) const BYTE: c_int = 1;
pub(super) const FLOAT: c_int = 7;
/// `ncclRedOp_t` of sums.
pub(super) const SUM: c_int = 0;

/// `ncclComm_t`.
pub(super) type Handle = *mut c_void;
/// `cudaStream_t`, which is the driver's.
pub(super) type CudaStream = *mut c_void;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of NCCL 2.14. Later versions take it by its size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// A communicator whose calls do not block.
    pub fn nonblocking() -> Config {
        Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: OLDEST as c_uint, blocking: 0 }
    }
}

type Receive = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, CudaStream) -> c_int;
type Send = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, CudaStream) -> c_int;
type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, CudaStream) -> c_int;
type Broadcast =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CudaStream) -> c_int;
type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CudaStream) -> c_int;

/// A loaded library.
pub struct Library {
    pub(super) unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub(super) init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
    pub(super) abort: unsafe extern "C" fn(Handle) -> c_int,
    pub(super) async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    pub(super) group_start: unsafe extern "C" fn() -> c_int,
    pub(super) group_end: unsafe extern "C" fn() -> c_int,
    pub(super) send: Send,
    pub(super) receive: Receive,
    pub(super) all_gather: Gather,
    pub(super) broadcast: Broadcast,
    pub(super) all_reduce: Reduce,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    _library: unix::Library,
}

impl Library {
    /// Finds and loads the library. `known`: paths of the library that the caller knows.
    ///
    /// # Errors
    /// [`Error::Device`] with the paths that were tried if none can be loaded, or if the library is too old.
    pub fn load(known: &[PathBuf]) -> Result<Library> {
        // SAFETY: NCCL's initializers only set up its own state.
        match unsafe { loader::open(&[NAME], "SOK_NCCL", known) } {
            Ok(library) => Library::bind(library),
            Err(tried) => Err(Error::Device(format!(
                "NCCL was not found. Tried {tried}. Install `nvidia-nccl-cu12` or `nvidia-nccl-cu13`, or set SOK_NCCL to the path of {NAME}"
            ))),
        }
    }

    fn bind(library: unix::Library) -> Result<Library> {
        fn symbol<T: Copy>(library: &unix::Library, name: &str) -> Result<T> {
            // SAFETY: The caller gives the type that the function has in nccl.h.
            unsafe { loader::symbol(library, "NCCL", name) }
        }
        let version: unsafe extern "C" fn(*mut c_int) -> c_int = symbol(&library, "ncclGetVersion")?;
        let mut number = 0;
        // SAFETY: The number may be written.
        unsafe { version(&mut number) };
        if number < OLDEST {
            return Err(Error::Device(format!("NCCL 2.14 or newer is needed. Found version {number}")));
        }
        Ok(Library {
            unique_id: symbol(&library, "ncclGetUniqueId")?,
            init: symbol(&library, "ncclCommInitRankConfig")?,
            abort: symbol(&library, "ncclCommAbort")?,
            async_error: symbol(&library, "ncclCommGetAsyncError")?,
            group_start: symbol(&library, "ncclGroupStart")?,
            group_end: symbol(&library, "ncclGroupEnd")?,
            send: symbol(&library, "ncclSend")?,
            receive: symbol(&library, "ncclRecv")?,
            all_gather: symbol(&library, "ncclAllGather")?,
            broadcast: symbol(&library, "ncclBroadcast")?,
            all_reduce: symbol(&library, "ncclAllReduce")?,
            error_string: symbol(&library, "ncclGetErrorString")?,
            _library: library,
        })
    }

    /// Turns a result into an error. A call that goes on in the background is none.
    ///
    /// # Errors
    /// [`Error::Device`] with the text of NCCL.
    pub(super) fn check(&self, result: c_int) -> Result<()> {
        if result == SUCCESS || result == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: Any number may be asked for.
        let text = unsafe { (self.error_string)(result) };
        // SAFETY: NCCL has a text, which lives for ever, for each number.
        let text = unsafe { CStr::from_ptr(text) };
        Err(Error::Device(format!("NCCL between the GPUs of ranks failed: {}", text.to_string_lossy())))
    }
}
