//! Embedding tables on NVIDIA GPUs. Kernels are compiled at run time for the very device; nothing here needs CUDA to build.
#![deny(unsafe_code)]

mod cache;
pub mod device;
pub mod gpu_group;
pub mod gpu_table;
mod index;
pub mod kernels;
mod layout;
pub mod memory;
pub mod nvrtc;
pub mod optimizer;
mod rule;
pub mod staging;
pub mod step;
