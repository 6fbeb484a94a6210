//! Dense work: products of matrices by cuBLAS, as in the layers of a model.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use libloading::Library;
use sok_cuda::memory::Buffer;

use super::Bench;

type Gemm = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    u64,
    c_int,
    *const f32,
    u64,
    c_int,
) -> c_int;

/// Samples of a batch, and units of a layer.
const ROWS: usize = 16_384;
const UNITS: usize = 1024;

pub struct Dense {
    handle: *mut c_void,
    gemm: Gemm,
    inputs: Buffer<f32>,
    weights: Buffer<f32>,
    outputs: Buffer<f32>,
    /// Number of layers that take as long as the work is to take.
    layers: usize,
    _library: Library,
}

impl Dense {
    /// Work of so many milliseconds, or `None` without cuBLAS.
    pub fn new(bench: &Bench, milliseconds: f32) -> Option<Dense> {
        let names = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];
        // SAFETY: cuBLAS's initializers only set up its own state.
        let library = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        // SAFETY: The type is that of cublas_v2.h.
        let create =
            unsafe { library.get::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>(b"cublasCreate_v2") };
        let mut handle = std::ptr::null_mut();
        // SAFETY: The handle may be written.
        assert_eq!(unsafe { create.unwrap()(&mut handle) }, 0);
        type SetStream = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
        // SAFETY: The type is that of cublas_v2.h.
        let set_stream = unsafe { library.get::<SetStream>(b"cublasSetStream_v2") }.unwrap();
        // SAFETY: The stream lives as long as the bench.
        assert_eq!(unsafe { set_stream(handle, bench.stream.cu_stream().cast()) }, 0);
        type SetMode = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
        // SAFETY: The type is that of cublas_v2.h.
        let set_mode = unsafe { library.get::<SetMode>(b"cublasSetMathMode") }.unwrap();
        const TF32: c_int = 3;
        // SAFETY: The handle is alive.
        assert_eq!(unsafe { set_mode(handle, TF32) }, 0);
        // SAFETY: The type is that of cublas_v2.h.
        let gemm = *unsafe { library.get::<Gemm>(b"cublasSgemm_v2") }.unwrap();
        let context = &bench.device.context;
        let (inputs, weights) =
            (Buffer::new(context, ROWS * UNITS).ok()?, Buffer::new(context, UNITS * UNITS).ok()?);
        let outputs = Buffer::new(context, ROWS * UNITS).ok()?;
        let mut dense = Dense { handle, gemm, inputs, weights, outputs, layers: 10, _library: library };
        dense.run();
        bench.device.synchronize().unwrap();
        let marks = [bench.mark(), {
            dense.run();
            bench.mark()
        }];
        bench.device.synchronize().unwrap();
        let of_layer = marks[0].elapsed_ms(&marks[1]).unwrap() / dense.layers as f32;
        dense.layers = (milliseconds / of_layer).round() as usize;
        Some(dense)
    }

    /// Enqueues the work.
    pub fn run(&self) {
        let (rows, units) = (ROWS as c_int, UNITS as c_int);
        for _ in 0..self.layers {
            // SAFETY: The matrices have these dims. The scalars are read at once.
            let done = unsafe {
                (self.gemm)(
                    self.handle,
                    0,
                    0,
                    units,
                    rows,
                    units,
                    &1.0,
                    self.weights.address(),
                    units,
                    self.inputs.address(),
                    units,
                    &0.0,
                    self.outputs.address(),
                    units,
                )
            };
            assert_eq!(done, 0);
        }
    }
}
