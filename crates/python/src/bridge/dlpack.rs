//! PyTorch's tensors and streams as its DLPack table of functions shows them: a tensor in 0.1 µs, where its attributes take 0.5.
//! The layout is that of DLPack's `dlpack.h`, version 1; the table came with 1.2.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{self, NonNull};

use pyo3::exceptions::{PyImportError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyCapsule;

use sok_core::contract::tensor::{DType, Memory, StreamHandle, Tensor};

use crate::error::guarded;

const MAJOR_VERSION: u32 = 1;
const CAPSULE: &CStr = c"dlpack_exchange_api";
const CPU: c_int = 1;
const CUDA: c_int = 2;
const CUDA_HOST: c_int = 3;
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;

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

/// Borrows; a Python exception is set where it gives another number than 0.
type TensorFromObject = unsafe extern "C" fn(object: *mut c_void, out: *mut DlTensor) -> c_int;
type CurrentStream = unsafe extern "C" fn(kind: c_int, id: i32, out: *mut *mut c_void) -> c_int;

/// `DLPackExchangeAPI`. Functions that are not called here are pointers alone.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    /// Of an earlier version.
    previous: *const Table,
    allocator: *const c_void,
    managed_from_object: *const c_void,
    object_from_managed: *const c_void,
    tensor_from_object: Option<TensorFromObject>,
    current_stream: Option<CurrentStream>,
}

/// What is called of the table. PyTorch's functions stay for the life of the process.
struct Functions {
    tensor_from_object: TensorFromObject,
    current_stream: CurrentStream,
}

static FUNCTIONS: PyOnceLock<Functions> = PyOnceLock::new();

/// Finds PyTorch's table.
///
/// # Errors
/// `ImportError` if it has none that is known here.
#[pyfunction]
pub fn find_torch(py: Python<'_>) -> PyResult<()> {
    guarded(|| functions(py).map(|_| ()))
}

fn functions(py: Python<'_>) -> PyResult<&Functions> {
    FUNCTIONS.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let version = torch.getattr("__version__")?;
        let needs = format!(
            "sok_keras needs PyTorch 2.10 or newer, which speaks DLPack {MAJOR_VERSION}. Received: {version}"
        );
        let Some(capsule) = torch.getattr("Tensor")?.getattr_opt("__dlpack_c_exchange_api__")? else {
            return Err(PyImportError::new_err(needs));
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let mut table = capsule.pointer_checked(Some(CAPSULE))?.cast::<Table>();
        // SAFETY: whatever its version, a table begins with it and with one of an earlier version, if there is one.
        while unsafe { table.as_ref() }.major > MAJOR_VERSION {
            // SAFETY: as above.
            let previous = unsafe { table.as_ref() }.previous;
            table = NonNull::new(previous.cast_mut()).ok_or_else(|| PyImportError::new_err(needs.clone()))?;
        }
        // SAFETY: the capsule keeps it; of a version that has these fields, if it is this one.
        match unsafe { table.as_ref() } {
            &Table {
                major: MAJOR_VERSION,
                tensor_from_object: Some(tensor_from_object),
                current_stream: Some(current_stream),
                ..
            } => Ok(Functions { tensor_from_object, current_stream }),
            _ => Err(PyImportError::new_err(needs)),
        }
    })
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Gpu(i32),
    Other,
}

/// What is known of a tensor.
pub struct View<'a, 'py> {
    shown: DlTensor,
    object: &'a Bound<'py, PyAny>,
}

impl<'a, 'py> View<'a, 'py> {
    /// # Errors
    /// `TypeError` if it is no tensor, or has no memory that DLPack can name.
    pub fn of(object: &'a Bound<'py, PyAny>) -> PyResult<View<'a, 'py>> {
        let mut shown = DlTensor {
            data: ptr::null_mut(),
            device: DlDevice { kind: 0, id: 0 },
            ndim: 0,
            dtype: DlDType { code: 0, bits: 0, lanes: 0 },
            shape: ptr::null(),
            strides: ptr::null(),
            byte_offset: 0,
        };
        let function = functions(object.py())?.tensor_from_object;
        // SAFETY: the object lives and the GIL is held; an object that is no tensor of PyTorch's is refused by the function.
        if unsafe { function(object.as_ptr().cast(), &mut shown) } != 0 {
            let error = PyTypeError::new_err(
                "it must be a tensor of PyTorch, in memory of the host or of a CUDA GPU",
            );
            error.set_cause(object.py(), Some(PyErr::fetch(object.py())));
            return Err(error);
        }
        let view = View { shown, object };
        // Tensors that stand for others, as those of a compiler, have an address of nothing.
        if view.shown.data.is_null() && !view.dims().contains(&0) {
            return Err(PyTypeError::new_err(format!(
                "a tensor must have memory of its own. Received: {}",
                object.get_type()
            )));
        }
        Ok(view)
    }

    fn dims(&self) -> &[i64] {
        // SAFETY: `ndim` numbers, which live as long as the tensor.
        unsafe { numbers(self.shown.shape, self.shown.ndim) }
    }

    fn device(&self) -> Device {
        match self.shown.device {
            // Pinned memory is the host's.
            DlDevice { kind: CPU | CUDA_HOST, .. } => Device::Cpu,
            DlDevice { kind: CUDA, id } => Device::Gpu(id),
            _ => Device::Other,
        }
    }

    /// What PyTorch calls contiguous: row-major, whatever the strides of axes of one or no element are.
    fn is_dense(&self) -> bool {
        // SAFETY: as `dims`; null where there are none.
        let strides = unsafe { numbers(self.shown.strides, self.shown.ndim) };
        let mut expected = 1;
        let fits = self.dims().iter().zip(strides).rev().all(|(&dim, &stride)| {
            let fits = dim == 1 || stride == expected;
            expected *= dim;
            fits
        });
        fits || self.dims().contains(&0)
    }

    /// Whether a call may be given it.
    pub fn is_at(&self, device: Device) -> bool {
        self.device() == device && self.is_dense()
    }

    /// # Errors
    /// `TypeError` if its elements are of a type that no call takes; `ValueError` if it is elsewhere, or not dense.
    pub fn tensor_at(&self, device: Device) -> PyResult<Tensor> {
        if !self.is_at(device) {
            return Err(PyValueError::new_err(format!(
                "a tensor must be dense, on {device:?}. Received: one on {:?}{}",
                self.device(),
                if self.is_dense() { "" } else { ", not dense" }
            )));
        }
        self.tensor()
    }

    pub fn tensor(&self) -> PyResult<Tensor> {
        let DlDType { code, bits, lanes } = self.shown.dtype;
        let dtype = match (code, bits, lanes) {
            (INT, 32, 1) => DType::I32,
            (INT, 64, 1) => DType::I64,
            (UINT, 32, 1) => DType::U32,
            (UINT, 64, 1) => DType::U64,
            (FLOAT, 16, 1) => DType::F16,
            (BFLOAT, 16, 1) => DType::BF16,
            (FLOAT, 32, 1) => DType::F32,
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "a tensor must be int32, int64, uint32, uint64, float16, bfloat16 or float32. Received: {}",
                    self.object.getattr("dtype")?
                )));
            }
        };
        let data = self.shown.data.cast::<u8>().wrapping_add(self.shown.byte_offset as usize);
        let memory = if let Device::Gpu(_) = self.device() { Memory::Device } else { Memory::Host };
        // SAFETY: what DLPack says of a tensor, which Python keeps alive until the call returns.
        Ok(unsafe { Tensor::new(data, dtype, self.dims().to_vec(), memory) })
    }
}

/// # Safety
/// `len` numbers live at `at`, unless it is null.
unsafe fn numbers<'a>(at: *const i64, len: i32) -> &'a [i64] {
    if at.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(at, len as usize) }
}

/// The stream on which PyTorch's tensors are ready on this GPU.
pub fn current_stream(py: Python<'_>, gpu: i32) -> PyResult<StreamHandle> {
    let mut stream = ptr::null_mut();
    // SAFETY: the GIL is held, and there is room for the stream.
    if unsafe { (functions(py)?.current_stream)(CUDA, gpu, &mut stream) } != 0 {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: PyTorch's streams live as long as the process.
    Ok(unsafe { StreamHandle::new(stream as u64) })
}
