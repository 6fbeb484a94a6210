//! The functions of MPI that are called here, found by name in the library that mpi4py has loaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use libloading::os::unix::Library;
use sok_core::error::{Error, Result};

use super::handle::Handle;

type Send<H> = unsafe extern "C" fn(*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int;
type Receive<H> = unsafe extern "C" fn(*mut c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int;
type Probe<H> = unsafe extern "C" fn(c_int, c_int, H, *mut c_int, *mut H, *mut Status) -> c_int;
type ReceiveMatched<H> = unsafe extern "C" fn(*mut c_void, c_int, H, *mut H, *mut H) -> c_int;
type Test<H> = unsafe extern "C" fn(*mut H, *mut c_int, *mut Status) -> c_int;
type Barrier<H> = unsafe extern "C" fn(H, *mut H) -> c_int;
type Abort<H> = unsafe extern "C" fn(H, c_int) -> c_int;
type Finalized = unsafe extern "C" fn(*mut c_int) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;

/// Room for an `MPI_Status`, whose fields differ between libraries. It has 20 bytes in MPICH and 24 in Open MPI.
#[repr(C, align(16))]
struct Status([u8; 256]);

/// Room for the text of an error. The longest one of MPICH has 1024 bytes.
const TEXT: usize = 8192;

/// A library, with the communicator of the ranks.
pub struct Mpi<H> {
    communicator: H,
    byte: H,
    any_source: c_int,
    send: Send<H>,
    receive: Receive<H>,
    probe: Probe<H>,
    receive_matched: ReceiveMatched<H>,
    test: Test<H>,
    barrier: Barrier<H>,
    abort: Abort<H>,
    finalized: Finalized,
    error_string: ErrorString,
    /// Holds the functions in memory.
    _library: Library,
}

impl<H: Handle> Mpi<H> {
    /// Finds the functions among those that mpi4py's module `module` uses.
    ///
    /// # Errors
    /// [`Error::State`] if the module is not loaded, or a function is missing.
    pub fn of_module(module: &Path, communicator: usize, byte: usize, any_source: c_int) -> Result<Mpi<H>> {
        // A module that was loaded already: no code runs. Names are looked up in the libraries that it depends on, too.
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
        // SAFETY: nothing is loaded, so no initialization runs.
        let library = unsafe { Library::open(Some(module), flags) };
        let library = library
            .map_err(|error| Error::State(format!("cannot open the MPI library of mpi4py: {error}")))?;
        Ok(Mpi {
            communicator: H::of_number(communicator),
            byte: H::of_number(byte),
            any_source,
            // SAFETY: the types of all of these are those of the MPI standard, for handles of this kind.
            send: unsafe { find(&library, c"MPI_Isend") }?,
            // SAFETY: as above.
            receive: unsafe { find(&library, c"MPI_Irecv") }?,
            // SAFETY: as above.
            probe: unsafe { find(&library, c"MPI_Improbe") }?,
            // SAFETY: as above.
            receive_matched: unsafe { find(&library, c"MPI_Imrecv") }?,
            // SAFETY: as above.
            test: unsafe { find(&library, c"MPI_Test") }?,
            // SAFETY: as above.
            barrier: unsafe { find(&library, c"MPI_Ibarrier") }?,
            // SAFETY: as above.
            abort: unsafe { find(&library, c"MPI_Abort") }?,
            // SAFETY: as above.
            finalized: unsafe { find(&library, c"MPI_Finalized") }?,
            // SAFETY: as above.
            error_string: unsafe { find(&library, c"MPI_Error_string") }?,
            _library: library,
        })
    }

    /// Starts to send bytes. Returns the request.
    ///
    /// # Safety
    /// The bytes stay where they are, unchanged, until `is_done` says so of the request.
    pub unsafe fn send(&self, bytes: &[u8], to: usize, tag: c_int) -> Result<H> {
        let (start, len) = (bytes.as_ptr().cast(), bytes.len() as c_int);
        // A request is written before it is read.
        let mut request = self.byte;
        // SAFETY: a buffer of `len` bytes, which the caller keeps.
        let code = unsafe {
            (self.send)(start, len, self.byte, to as c_int, tag, self.communicator, &raw mut request)
        };
        self.check("MPI_Isend", code).map_err(|why| unreachable(to, &why))?;
        Ok(request)
    }

    /// Starts to receive `len` bytes. Returns the request.
    ///
    /// # Safety
    /// There is room for them at `to`, which nobody else uses until `is_done` says so of the request.
    pub unsafe fn receive(&self, to: *mut u8, len: usize, from: usize, tag: c_int) -> Result<H> {
        let mut request = self.byte;
        // SAFETY: the caller's promise.
        let code = unsafe {
            let from = from as c_int;
            (self.receive)(to.cast(), len as c_int, self.byte, from, tag, self.communicator, &raw mut request)
        };
        self.check("MPI_Irecv", code).map_err(|why| unreachable(from, &why))?;
        Ok(request)
    }

    /// Starts to receive a message with this tag that has come from any rank, if one has. Returns the request.
    ///
    /// # Safety
    /// As `receive`. The message is not longer than `len` bytes.
    pub unsafe fn receive_any(&self, to: *mut u8, len: usize, tag: c_int) -> Result<Option<H>> {
        let (mut flag, mut message, mut request) = (0, self.byte, self.byte);
        let mut status = Status([0; 256]);
        // SAFETY: all addresses are of variables of the types that the function writes.
        let code = unsafe {
            let (from, to) = (self.any_source, self.communicator);
            (self.probe)(from, tag, to, &raw mut flag, &raw mut message, &raw mut status)
        };
        self.check("MPI_Improbe", code).map_err(Error::State)?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: the caller's promise; the message is the one that was found.
        let code = unsafe {
            (self.receive_matched)(to.cast(), len as c_int, self.byte, &raw mut message, &raw mut request)
        };
        self.check("MPI_Imrecv", code).map_err(Error::State)?;
        Ok(Some(request))
    }

    /// Says that this rank has come to the barrier of all. Returns the request, which is done when all have.
    pub fn barrier(&self) -> Result<H> {
        let mut request = self.byte;
        // SAFETY: the address of a variable of the type that the function writes.
        let code = unsafe { (self.barrier)(self.communicator, &raw mut request) };
        self.check("MPI_Ibarrier", code).map_err(Error::State)?;
        Ok(request)
    }

    /// Whether a request is done. It must not be asked for again then.
    pub fn is_done(&self, request: &mut H) -> Result<bool> {
        let (mut flag, mut status) = (0, Status([0; 256]));
        // SAFETY: a request of this library that was not done before.
        let code = unsafe { (self.test)(request, &raw mut flag, &raw mut status) };
        self.check("MPI_Test", code).map_err(Error::State)?;
        Ok(flag != 0)
    }

    /// Whether `MPI_Finalize` was called. No other function may be called after it.
    pub fn is_finalized(&self) -> bool {
        let mut flag = 0;
        // SAFETY: may be called at any time.
        let code = unsafe { (self.finalized)(&raw mut flag) };
        code != 0 || flag != 0
    }

    /// Ends all processes, and this one.
    pub fn abort(&self) {
        // SAFETY: the communicator lives, since MPI is not finalized.
        unsafe { (self.abort)(self.communicator, 1) };
    }

    fn check(&self, function: &str, code: c_int) -> std::result::Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut len) = ([0; TEXT], 0);
        // SAFETY: more room than the longest text of any library needs. The last byte stays 0.
        unsafe { (self.error_string)(code, text.as_mut_ptr(), &raw mut len) };
        // SAFETY: it ends with a 0.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Err(format!("{function} failed: {}", text.to_string_lossy()))
    }
}

fn unreachable(rank: usize, why: &str) -> Error {
    Error::Rank { rank, what: format!("cannot be reached: {why}") }
}

/// The function with this name.
///
/// # Safety
/// `F` is its type.
unsafe fn find<F: Copy>(library: &Library, name: &CStr) -> Result<F> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    let missing = |error| Error::State(format!("the MPI library of mpi4py has not all functions: {error}"));
    found.map(|function| *function).map_err(missing)
}
