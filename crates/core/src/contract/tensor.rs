//! Tensors of a framework, read and written in place.

use crate::error::{Error, Result};
use crate::row_type::{Bfloat16, Float16, RowType};

/// Element types of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// int32
    I32,
    /// int64
    I64,
    /// uint32
    U32,
    /// uint64
    U64,
    /// float16
    F16,
    /// bfloat16
    BF16,
    /// float32
    F32,
}

impl DType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 => 8,
        }
    }

    /// Returns its name, as NumPy and Keras have it.
    pub fn name(self) -> &'static str {
        match self {
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::U32 => "uint32",
            DType::U64 => "uint64",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::F32 => "float32",
        }
    }

    /// Returns the element type of arrays of rows of this type.
    pub fn of(row_type: RowType) -> DType {
        match row_type {
            RowType::Float32 => DType::F32,
            RowType::Float16 => DType::F16,
            RowType::Bfloat16 => DType::BF16,
        }
    }

    /// Returns the type of rows of such elements; `None` for integers.
    pub fn row_type(self) -> Option<RowType> {
        RowType::ALL.into_iter().find(|row_type| DType::of(*row_type) == self)
    }
}

/// A type that tensors can have elements of.
pub trait Element: Copy {
    /// The element type of such tensors.
    const DTYPE: DType;
}

macro_rules! element {
    ($($element:ty: $dtype:ident),+) => {
        $(impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        })+
    };
}
element! { i32: I32, i64: I64, u32: U32, u64: U64, Float16: F16, Bfloat16: BF16, f32: F32 }

/// The memory that a tensor is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Memory of the host.
    Host,
    /// Memory of a device.
    Device,
}

/// A tensor that a call reads: dense and row-major.
#[derive(Clone, Debug)]
pub struct Tensor {
    data: *mut u8,
    dtype: DType,
    dims: Vec<i64>,
    memory: Memory,
}

/// A tensor that a call writes: dense and row-major.
#[derive(Debug)]
pub struct TensorMut(Tensor);

/// The stream of a device on which the tensors of a call are ready.
#[derive(Clone, Copy, Debug)]
pub struct StreamHandle(u64);

/// Returns the number of elements of a tensor with these dims. It cannot overflow, because the framework has allocated the tensor.
pub fn num_elements(dims: &[i64]) -> usize {
    dims.iter().product::<i64>() as usize
}

#[allow(unsafe_code)]
mod memory {
    use super::{DType, Element, Memory, StreamHandle, Tensor, TensorMut};
    use crate::contract::gradients::GradientRows;
    use crate::error::Result;

    // SAFETY: the elements are read-only, and the caller of `new` promises how long they live.
    unsafe impl Send for Tensor {}
    // SAFETY: as above.
    unsafe impl Sync for Tensor {}
    // SAFETY: nothing else uses the elements, and the caller of `new` promises how long they live.
    unsafe impl Send for TensorMut {}

    impl Tensor {
        /// Makes a tensor of elements that a framework owns.
        ///
        /// # Safety
        /// As many elements of this type as the dims say are readable at `data`, in this memory. Nobody writes to them until the
        /// call that receives the tensor returns. For gradients that are given with a `Keep`, both hold until that is dropped.
        pub unsafe fn new(data: *const u8, dtype: DType, dims: Vec<i64>, memory: Memory) -> Tensor {
            // Some frameworks pass null for an empty tensor, and Rust must not make a slice of null.
            let data = if data.is_null() { std::ptr::dangling::<u64>().cast() } else { data };
            Tensor { data: data.cast_mut(), dtype, dims, memory }
        }

        /// Returns the elements.
        ///
        /// # Errors
        /// [`Error::Argument`](crate::Error::Argument) for another type, [`Error::Device`](crate::Error::Device) for memory of a device.
        pub fn slice<T: Element>(&self) -> Result<&[T]> {
            self.check(T::DTYPE, Memory::Host)?;
            if self.is_empty() {
                return Ok(&[]);
            }
            // SAFETY: the promise of `new`'s caller; type and memory are checked.
            Ok(unsafe { std::slice::from_raw_parts(self.data.cast(), self.len()) })
        }

        /// Returns the elements as gradients. They stay readable for as long as the caller of `new` has promised.
        ///
        /// # Errors
        /// As `slice`.
        pub fn gradient_rows(&self) -> Result<GradientRows> {
            let floats = self.slice::<f32>()?;
            // SAFETY: the promise of `new`'s caller.
            Ok(unsafe { GradientRows::new(floats.as_ptr(), floats.len()) })
        }
    }

    impl TensorMut {
        /// Makes a tensor of memory that a framework owns.
        ///
        /// # Safety
        /// There is room at `data` for as many elements of this type as the dims say, in this memory. Nobody else uses it until the
        /// call that receives the tensor returns.
        pub unsafe fn new(data: *mut u8, dtype: DType, dims: &[i64], memory: Memory) -> TensorMut {
            // SAFETY: the caller's promise.
            TensorMut(unsafe { Tensor::new(data, dtype, dims.to_vec(), memory) })
        }

        /// Returns the elements, which may have no value yet.
        ///
        /// # Errors
        /// As [`Tensor::slice`].
        pub fn slice_mut<T: Element>(&mut self) -> Result<&mut [T]> {
            self.0.check(T::DTYPE, Memory::Host)?;
            if self.0.is_empty() {
                return Ok(&mut []);
            }
            // SAFETY: the promise of `new`'s caller; type and memory are checked.
            Ok(unsafe { std::slice::from_raw_parts_mut(self.0.data.cast(), self.0.len()) })
        }
    }

    impl StreamHandle {
        /// No stream, for a call whose tensors are all on the host.
        pub const NONE: StreamHandle = StreamHandle(0);

        /// Makes a handle of the number that a framework gives.
        ///
        /// # Safety
        /// `handle` is a stream of the device that has the tensors. The stream lives as long as the process.
        pub unsafe fn new(handle: u64) -> StreamHandle {
            StreamHandle(handle)
        }

        /// Returns the handle as a number.
        pub fn get(self) -> u64 {
            self.0
        }
    }
}

impl Tensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements along each axis.
    pub fn dims(&self) -> &[i64] {
        &self.dims
    }

    /// The memory of the elements.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        num_elements(&self.dims)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all elements.
    pub fn num_bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Address of the first element.
    pub fn data(&self) -> *const u8 {
        self.data
    }

    /// Returns the address of the first element in the memory of a device.
    ///
    /// # Errors
    /// [`Error::Argument`] for another type, [`Error::Device`] for memory of the host.
    pub fn address(&self, dtype: DType) -> Result<u64> {
        self.check(dtype, Memory::Device)?;
        Ok(self.data as u64)
    }

    fn check(&self, dtype: DType, memory: Memory) -> Result<()> {
        if self.dtype != dtype {
            return Err(Error::argument(format!(
                "a tensor must be {}. Received: {}",
                dtype.name(),
                self.dtype.name()
            )));
        }
        if self.memory != memory {
            let (expected, received) = (memory.name(), self.memory.name());
            return Err(Error::Device(format!(
                "a tensor must be in memory of {expected}. Received: of {received}"
            )));
        }
        Ok(())
    }
}

impl TensorMut {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The memory of the elements.
    pub fn memory(&self) -> Memory {
        self.0.memory
    }

    /// Bytes of all elements.
    pub fn num_bytes(&self) -> usize {
        self.0.num_bytes()
    }

    /// Returns the address of the first element in the memory of a device.
    ///
    /// # Errors
    /// As [`Tensor::address`].
    pub fn address(&self, dtype: DType) -> Result<u64> {
        self.0.address(dtype)
    }
}

impl Memory {
    fn name(self) -> &'static str {
        match self {
            Memory::Host => "the host",
            Memory::Device => "a GPU",
        }
    }
}
