//! PyTorch's tensors and streams as its DLPack table of functions shows them: a tensor in 50 ns, where its attributes take 500.
//! The layout is that of DLPack's `dlpack.h`, version 1; the table came with 1.2.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{self, NonNull};

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyCapsule;

use crate::bridge;
use crate::call::{DType, Tensor};

const MAJOR_VERSION: u32 = 1;
const CAPSULE: &CStr = c"dlpack_exchange_api";
const CPU: c_int = 1;
const CUDA: c_int = 2;
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct DlDevice {
    kind: c_int,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLPackExchangeAPI`. Functions that are not called here are pointers alone.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocator: *const c_void,
    managed_from_object: *const c_void,
    object_from_managed: *const c_void,
    /// Borrows; a Python exception is set where it gives another number than 0.
    tensor_from_object: Option<unsafe extern "C" fn(object: *mut c_void, out: *mut DlTensor) -> c_int>,
    current_stream: unsafe extern "C" fn(kind: c_int, id: i32, out: *mut *mut c_void) -> c_int,
}

/// The table, in memory that its capsule keeps.
struct Exchange {
    table: NonNull<Table>,
    _capsule: Py<PyCapsule>,
}

// SAFETY: the table is never written again; its functions are called by those who hold the GIL.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

static EXCHANGE: PyOnceLock<Exchange> = PyOnceLock::new();

fn exchange(py: Python<'_>) -> PyResult<&Table> {
    let exchange = EXCHANGE.get_or_try_init(py, || {
        let capsule = py.import("torch")?.getattr("Tensor")?.getattr("__dlpack_c_exchange_api__")?;
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let table = capsule.pointer_checked(Some(CAPSULE))?.cast::<Table>();
        // SAFETY: whatever its version, the table begins with it.
        let major = unsafe { *table.cast::<u32>().as_ptr() };
        if major != MAJOR_VERSION {
            return Err(PyRuntimeError::new_err(format!(
                "PyTorch must speak DLPack {MAJOR_VERSION}. Received: {major}"
            )));
        }
        Ok(Exchange { table, _capsule: capsule.unbind() })
    })?;
    // SAFETY: - of this version, by the check above; the capsule keeps it.
    //         - the static keeps the capsule.
    Ok(unsafe { exchange.table.as_ref() })
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Gpu(i32),
    Other,
}

/// What is known of a tensor for as long as its object lives and nobody resizes it.
pub struct View {
    pub tensor: Tensor,
    pub device: Device,
    pub is_dense: bool,
}

impl View {
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<View> {
        let function = exchange(object.py())?
            .tensor_from_object
            .ok_or_else(|| PyRuntimeError::new_err("PyTorch shows no tensors through DLPack's table"))?;
        let mut shown = DlTensor {
            data: ptr::null_mut(),
            device: DlDevice { kind: 0, id: 0 },
            ndim: 0,
            dtype: DlDType { code: 0, bits: 0, lanes: 0 },
            shape: ptr::null(),
            strides: ptr::null(),
            byte_offset: 0,
        };
        // SAFETY: the object lives and the GIL is held; an object that is no tensor of PyTorch's is refused by the function.
        if unsafe { function(object.as_ptr().cast(), &mut shown) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the function has filled it in; shape and strides live as long as the tensor.
        unsafe { View::read(&shown) }
    }

    /// # Safety
    /// `shown` is of a tensor that lives.
    unsafe fn read(shown: &DlTensor) -> PyResult<View> {
        let DlDType { code, bits, lanes } = shown.dtype;
        let dtype = match (code, bits, lanes) {
            (INT, 32, 1) => DType::I32,
            (INT, 64, 1) => DType::I64,
            (UINT, 32, 1) => DType::U32,
            (UINT, 64, 1) => DType::U64,
            (FLOAT, 32, 1) => DType::F32,
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "a tensor must be int32, int64, uint32, uint64 or float32. Received: DLPack type ({code}, {bits}, {lanes})"
                )));
            }
        };
        let device = match shown.device {
            DlDevice { kind: CPU, .. } => Device::Cpu,
            DlDevice { kind: CUDA, id } => Device::Gpu(id),
            _ => Device::Other,
        };
        let ndim = shown.ndim as usize;
        // SAFETY: `ndim` numbers each; null, if at all, where there are none.
        let (dims, strides) = unsafe { (numbers(shown.shape, ndim), numbers(shown.strides, ndim)) };
        let data = shown.data.cast::<u8>().wrapping_add(shown.byte_offset as usize);
        let is_dense = shown.strides.is_null() || is_row_major(dims, strides);
        Ok(View {
            tensor: Tensor { data: bridge::address(data), dtype, dims: dims.to_vec() },
            device,
            is_dense,
        })
    }
}

/// # Safety
/// `len` numbers live at `at`, unless it is null.
unsafe fn numbers<'a>(at: *const i64, len: usize) -> &'a [i64] {
    if at.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(at, len) }
}

fn is_row_major(dims: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    let fits = dims.iter().zip(strides).rev().all(|(&dim, &stride)| {
        let fits = dim == 1 || stride == expected;
        expected *= dim;
        fits
    });
    fits || dims.contains(&0)
}

/// The stream on which PyTorch's tensors are ready on this GPU.
pub fn current_stream(py: Python<'_>, gpu: i32) -> PyResult<u64> {
    let mut stream = ptr::null_mut();
    // SAFETY: the GIL is held, and there is room for the stream.
    if unsafe { (exchange(py)?.current_stream)(CUDA, gpu, &mut stream) } != 0 {
        return Err(PyErr::fetch(py));
    }
    Ok(stream as u64)
}
