//! Handles of MPI: communicators, types, messages, requests.

use std::ffi::{c_int, c_void};

/// What a handle is in C. All handles of a library are the same.
pub trait Handle: Copy + Send + 'static {
    /// The handle that mpi4py tells as a number.
    fn of_number(number: usize) -> Self;
}

/// MPICH, and what descends from it.
impl Handle for c_int {
    fn of_number(number: usize) -> c_int {
        // mpi4py widens it, with its sign.
        number as c_int
    }
}

/// Open MPI, and libraries with the standard ABI.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Pointer(*mut c_void);

// SAFETY: only functions of MPI follow it, and MPI lets all threads use a handle: its thread level is `MPI_THREAD_MULTIPLE`.
unsafe impl Send for Pointer {}

impl Handle for Pointer {
    fn of_number(number: usize) -> Pointer {
        Pointer(std::ptr::with_exposed_provenance_mut(number))
    }
}
