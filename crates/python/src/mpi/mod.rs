//! MPI between ranks, for processes that `mpirun` started and that have mpi4py.
//!
//! Nothing is linked: the functions are those of the library that mpi4py has loaded, so any MPI serves that mpi4py was built for.

mod envelope;
mod functions;
mod handle;
mod request;
mod transport;

use std::ffi::c_int;
use std::path::PathBuf;

use sok_core::error::{Error, Result};
use sok_core::exchange::transport::Transport;

use functions::Mpi;
use handle::Pointer;
use transport::MpiTransport;

/// What mpi4py tells: the file of its module, the size of a handle in bytes, the communicator, the type of a byte, and the number that
/// stands for any source. Handles are numbers, whatever they are in C. The communicator returns its errors, and nobody else uses it.
pub type Handles = (PathBuf, usize, usize, usize, c_int);

/// Makes the transport of rank `rank`.
///
/// # Errors
/// [`Error::State`] if mpi4py's library is not one that this module can call.
pub fn transport(handles: Handles, rank: usize) -> Result<Box<dyn Transport>> {
    let (module, size, communicator, byte, any_source) = handles;
    if size == size_of::<c_int>() {
        let mpi = Mpi::<c_int>::of_module(&module, communicator, byte, any_source)?;
        Ok(Box::new(MpiTransport::new(mpi, rank)))
    } else if size == size_of::<Pointer>() {
        let mpi = Mpi::<Pointer>::of_module(&module, communicator, byte, any_source)?;
        Ok(Box::new(MpiTransport::new(mpi, rank)))
    } else {
        Err(Error::State(format!("handles of this MPI have {size} bytes, not 4 or 8")))
    }
}
