//! Embedding tables on NVIDIA GPUs. Kernels are compiled at run time for the device in use. Building this crate does not need CUDA.
#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

mod abi;
mod cache;
mod delivery;
pub mod device;
pub mod gpu_group;
pub mod gpu_table;
mod index;
pub mod kernels;
mod loader;
pub mod memory;
pub mod nccl;
pub mod nvrtc;
pub mod peers;
mod profiler;
pub mod rule;
pub mod staging;
pub mod step;
