//! TensorFlow ops, registered through TensorFlow's C API.
//!
//! Nothing links TensorFlow: each function is asked for by name in the library that Python has loaded already, so one
//! build serves every version, and a process without TensorFlow too. Kernels never wait for Python's lock.

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use sok_core::contract::table::Insertion;
use sok_core::contract::tensor::{DType, Memory, StreamHandle, Tensor, TensorMut, num_elements};
use sok_core::error::{Error, Result};

use super::{Failure, catch};
use crate::call::{self, Outputs};
use crate::error::{caught, guarded};

/// An object of TensorFlow's: the C API knows them by pointer alone.
type Object = *mut c_void;
/// What TensorFlow itself says went wrong.
/// A result whose error is a message for the user.
type MessageResult<T> = std::result::Result<T, String>;
type Create = extern "C" fn(Object) -> Object;
type Compute = extern "C" fn(Object, Object);
type Delete = extern "C" fn(Object);
type Shape = unsafe extern "C" fn(Object, Object);

/// A struct with a field for each function of the C API that is used, filled by name.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Api { $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Api {
            #[allow(non_snake_case)]
            fn load(library: Object) -> MessageResult<Api> {
                $(let $name = symbol(library, stringify!($name))?;)*
                $(
                    // SAFETY: - the address is that of a function: TensorFlow exports nothing else by this name.
                    //         - its type is as tensorflow/c/*.h have it, unchanged from 2.8 to 2.21.
                    let $name = unsafe {
                        std::mem::transmute::<Object, unsafe extern "C" fn($($argument),*) $(-> $result)?>($name)
                    };
                )*
                Ok(Api { $($name),* })
            }
        }
    };
}

functions! {
    TF_NewStatus: fn() -> Object;
    TF_DeleteStatus: fn(Object);
    TF_SetStatus: fn(Object, c_int, *const c_char);
    TF_GetCode: fn(Object) -> c_int;
    TF_Message: fn(Object) -> *const c_char;
    TF_NewOpDefinitionBuilder: fn(*const c_char) -> Object;
    TF_OpDefinitionBuilderAddAttr: fn(Object, *const c_char);
    TF_OpDefinitionBuilderAddInput: fn(Object, *const c_char);
    TF_OpDefinitionBuilderAddOutput: fn(Object, *const c_char);
    TF_OpDefinitionBuilderSetIsStateful: fn(Object, bool);
    TF_OpDefinitionBuilderSetShapeInferenceFunction: fn(Object, Shape);
    TF_ShapeInferenceContextSetUnknownShape: fn(Object, Object);
    TF_RegisterOpDefinition: fn(Object, Object);
    TF_NewKernelBuilder: fn(*const c_char, *const c_char, Option<Create>, Compute, Option<Delete>) -> Object;
    TF_KernelBuilder_HostMemory: fn(Object, *const c_char);
    TF_RegisterKernelBuilder: fn(*const c_char, Object, Object);
    TF_OpKernelConstruction_GetAttrInt64: fn(Object, *const c_char, *mut i64, Object);
    TF_OpKernelConstruction_GetAttrBool: fn(Object, *const c_char, *mut c_uchar, Object);
    TF_OpKernelConstruction_Failure: fn(Object, Object);
    TF_OpKernelContext_Failure: fn(Object, Object);
    TF_NumInputs: fn(Object) -> c_int;
    TF_GetInput: fn(Object, c_int, *mut Object, Object);
    TF_AllocateOutput: fn(Object, c_int, c_int, *const i64, c_int, usize, Object) -> Object;
    TF_DeleteTensor: fn(Object);
    TF_TensorType: fn(Object) -> c_int;
    TF_TensorData: fn(Object) -> Object;
    TF_NumDims: fn(Object) -> c_int;
    TF_Dim: fn(Object, c_int) -> i64;
}

static API: OnceLock<Api> = OnceLock::new();

fn api() -> &'static Api {
    API.get().expect("set before the first op is registered, and TensorFlow calls no other")
}

// ---- registration ------------------------------------------------------------------------------------------------

struct Op {
    /// Of the op on tables on the host, and on a GPU. An op with one name is for the host alone.
    names: [&'static CStr; 2],
    attrs: &'static [&'static CStr],
    inputs: &'static [&'static CStr],
    outputs: &'static [&'static CStr],
    create: [Create; 2],
}

/// Stateful, so that TensorFlow neither drops, merges nor reorders them. Tensors come in the order of [`crate::call`].
const OPS: [Op; 8] = [
    Op {
        names: [c"SokLookup", c"SokGpuLookup"],
        attrs: &[
            c"T: list({int32, int64, uint32, uint64, float}) >= 1",
            c"N: int >= 1",
            c"plan: int",
            c"insertion: int",
            c"save: bool",
            c"dtype: {half, bfloat16, float} = DT_FLOAT",
        ],
        inputs: &[c"tensors: T", c"trigger: float"],
        outputs: &[c"number: int32", c"rows: N * dtype"],
        create: [create_lookup::<false>, create_lookup::<true>],
    },
    Op {
        names: [c"SokPush", c"SokGpuPush"],
        attrs: &[c"N: int >= 1", c"M: int >= 0", c"plan: int", c"dtype: {half, bfloat16, float}"],
        inputs: &[c"number: int32", c"gradients: N * dtype", c"weights: M * float"],
        outputs: &[c"ticket: float", c"weight_gradients: M * float"],
        create: [create_push::<false>, create_push::<true>],
    },
    Op {
        names: [c"SokCommit", c"SokGpuCommit"],
        attrs: &[c"N: int >= 1", c"optimizer: int"],
        inputs: &[c"is_update: float", c"tickets: N * float"],
        outputs: &[c"sum_of_squares: float"],
        create: [create_commit::<false>, create_commit::<true>],
    },
    Op {
        names: [c"SokGather", c"SokGpuGather"],
        attrs: &[c"N: int >= 2", c"optimizer: int", c"size: int"],
        inputs: &[c"scalars: float", c"after: float", c"piece: int32"],
        outputs: &[c"arrays: N * float"],
        create: [create_gather::<false>, create_gather::<true>],
    },
    Op {
        names: [c"SokScatter", c"SokGpuScatter"],
        attrs: &[c"N: int >= 1", c"optimizer: int"],
        inputs: &[c"piece: int32", c"arrays: N * float"],
        outputs: &[c"next: int32"],
        create: [create_scatter::<false>, create_scatter::<true>],
    },
    Op {
        names: [c"SokApply", c"SokGpuApply"],
        attrs: &[c"N: int >= 1", c"optimizer: int"],
        inputs: &[c"scalars: float", c"sum_of_squares: float", c"triggers: N * float"],
        outputs: &[c"new_triggers: N * float"],
        create: [create_apply::<false>, create_apply::<true>],
    },
    Op {
        names: [c"SokSumGradients", c"SokGpuSumGradients"],
        attrs: &[],
        inputs: &[c"gradients: float", c"after: float"],
        outputs: &[c"sums: float", c"then: float"],
        create: [create_sum_gradients::<false>, create_sum_gradients::<true>],
    },
    Op {
        names: [c"SokMergeGradients"; 2],
        attrs: &[c"T: list({int32, int64, uint32, uint64, float}) >= 1", c"N: int >= 1"],
        inputs: &[c"forms: int32", c"tensors: T"],
        outputs: &[c"keys: N * int64", c"rows: N * float"],
        create: [create_merge_gradients; 2],
    },
];

/// Registers the ops with the TensorFlow of this process, once. Later calls return the same result.
///
/// For a process that imported this module before TensorFlow, or without `tf.load_op_library`.
#[pyfunction]
pub fn register_tensorflow(py: Python<'_>) -> PyResult<()> {
    guarded(|| py.detach(register).map_err(PyRuntimeError::new_err))
}

/// Registers the ops while the dynamic loader loads this library: `tf.load_op_library` makes wrappers for just those ops
/// that appear meanwhile. Does nothing in a process without TensorFlow.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        // An error cannot be reported here; `register_tensorflow` reports it.
        let _ = std::panic::catch_unwind(register);
    }
    at_load
};

fn register() -> MessageResult<()> {
    static OUTCOME: Mutex<Option<MessageResult<()>>> = Mutex::new(None);
    let mut outcome = OUTCOME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(outcome) = &*outcome {
        return outcome.clone();
    }
    let library = loaded_framework().ok_or("TensorFlow is not loaded in this process")?;
    outcome.insert(register_in(library)).clone()
}

fn register_in(library: Object) -> MessageResult<()> {
    let loaded = Api::load(library)?;
    let api = API.get_or_init(|| loaded);
    for op in &OPS {
        let [on_host, on_gpu] = op.names;
        define(api, op, on_host)?;
        for device in [c"CPU", c"GPU"] {
            add_kernel(api, op, on_host, device, false)?;
        }
        if on_gpu != on_host {
            define(api, op, on_gpu)?;
            add_kernel(api, op, on_gpu, c"GPU", true)?;
        }
    }
    Ok(())
}

/// TensorFlow's core library, if Python has loaded it. It is bound locally, so names are found in no other way.
fn loaded_framework() -> Option<Object> {
    let names =
        [c"libtensorflow_framework.so.2", c"libtensorflow_framework.so.3", c"libtensorflow_framework.so"];
    names.iter().find_map(|name| {
        // SAFETY: - the name ends with a zero byte.
        //         - NOLOAD runs no foreign code: it only looks among the loaded libraries.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!library.is_null()).then_some(library)
    })
}

fn symbol(library: Object, name: &str) -> MessageResult<Object> {
    let c_name = CString::new(name).expect("an identifier has no zero byte");
    // SAFETY: - `library` comes from dlopen and is never closed.
    //         - the name ends with a zero byte and is only read during the call.
    let address = unsafe { libc::dlsym(library, c_name.as_ptr()) };
    if address.is_null() { Err(format!("this TensorFlow has no function {name}")) } else { Ok(address) }
}

/// Shapes stay unknown here: the C API lets a shape function read neither numbers nor inputs, so Python sets them.
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "the calls of a builder have one contract")]
fn define(api: &Api, op: &Op, name: &CStr) -> MessageResult<()> {
    let status = Status::new();
    // SAFETY: - every string is static and ends with a zero byte; TensorFlow copies it.
    //         - `builder` is live and this function's own until TF_RegisterOpDefinition takes it, whatever it says.
    //         - TF_ShapeInferenceContextSetUnknownShape has the type of a shape function.
    unsafe {
        let builder = (api.TF_NewOpDefinitionBuilder)(name.as_ptr());
        for attr in op.attrs {
            (api.TF_OpDefinitionBuilderAddAttr)(builder, attr.as_ptr());
        }
        for input in op.inputs {
            (api.TF_OpDefinitionBuilderAddInput)(builder, input.as_ptr());
        }
        for output in op.outputs {
            (api.TF_OpDefinitionBuilderAddOutput)(builder, output.as_ptr());
        }
        (api.TF_OpDefinitionBuilderSetIsStateful)(builder, true);
        let unknown = api.TF_ShapeInferenceContextSetUnknownShape;
        (api.TF_OpDefinitionBuilderSetShapeInferenceFunction)(builder, unknown);
        (api.TF_RegisterOpDefinition)(builder, status.0);
    }
    status.check()
}

/// On a GPU each tensor of ours is asked for in host memory if the tables are there; else the lookup's number alone, so that a push
/// finds it.
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "the calls of a builder have one contract")]
fn add_kernel(api: &Api, op: &Op, name: &CStr, device: &CStr, is_on_gpu: bool) -> MessageResult<()> {
    let status = Status::new();
    // SAFETY: - every string ends with a zero byte; TensorFlow copies it.
    //         - the callbacks have the types that the C API asks for, and live as long as the process.
    //         - `builder` is live and this function's own until TF_RegisterKernelBuilder takes it.
    unsafe {
        let builder = (api.TF_NewKernelBuilder)(
            name.as_ptr(),
            device.as_ptr(),
            Some(op.create[usize::from(is_on_gpu)]),
            compute,
            Some(delete),
        );
        if device == c"GPU" {
            for tensor in op.inputs.iter().chain(op.outputs) {
                let argument = argument_name(tensor);
                if !is_on_gpu || argument.as_c_str() == c"number" {
                    (api.TF_KernelBuilder_HostMemory)(builder, argument.as_ptr());
                }
            }
        }
        (api.TF_RegisterKernelBuilder)(name.as_ptr(), builder, status.0);
    }
    status.check()
}

/// `rows` of `rows: N * float`.
fn argument_name(spec: &CStr) -> CString {
    let name = spec.to_bytes().split(|&byte| byte == b':').next().expect("split gives one part at least");
    CString::new(name).expect("part of a string without a zero byte")
}

// ---- kernels -----------------------------------------------------------------------------------------------------

/// One op of a graph.
struct Kernel {
    call: Call,
    /// Its tensors and tables are there.
    is_on_gpu: bool,
}

/// Its attributes, read once.
enum Call {
    Lookup { plan: i64, insertion: Insertion, save: bool },
    Push { plan: i64, num_gradients: usize },
    Commit { optimizer: i64 },
    Gather { optimizer: i64, num_arrays: usize, size: usize },
    Scatter { optimizer: i64 },
    Apply { optimizer: i64 },
    SumGradients,
    MergeGradients,
}

extern "C" fn create_lookup<const GPU: bool>(construction: Object) -> Object {
    create(construction, GPU, |attrs| {
        Ok(Call::Lookup {
            plan: attrs.int(c"plan")?,
            insertion: Insertion::from_number(attrs.int(c"insertion")?)?,
            save: attrs.bool(c"save")?,
        })
    })
}

extern "C" fn create_push<const GPU: bool>(construction: Object) -> Object {
    create(construction, GPU, |attrs| {
        Ok(Call::Push { plan: attrs.int(c"plan")?, num_gradients: attrs.int(c"N")? as usize })
    })
}

extern "C" fn create_commit<const GPU: bool>(construction: Object) -> Object {
    create(construction, GPU, |attrs| Ok(Call::Commit { optimizer: attrs.int(c"optimizer")? }))
}

extern "C" fn create_gather<const GPU: bool>(construction: Object) -> Object {
    create(construction, GPU, |attrs| {
        Ok(Call::Gather {
            optimizer: attrs.int(c"optimizer")?,
            num_arrays: attrs.int(c"N")? as usize,
            size: attrs.int(c"size")? as usize,
        })
    })
}

extern "C" fn create_scatter<const GPU: bool>(construction: Object) -> Object {
    create(construction, GPU, |attrs| Ok(Call::Scatter { optimizer: attrs.int(c"optimizer")? }))
}

extern "C" fn create_apply<const GPU: bool>(construction: Object) -> Object {
    create(construction, GPU, |attrs| Ok(Call::Apply { optimizer: attrs.int(c"optimizer")? }))
}

extern "C" fn create_sum_gradients<const GPU: bool>(construction: Object) -> Object {
    create(construction, GPU, |_| Ok(Call::SumGradients))
}

extern "C" fn create_merge_gradients(construction: Object) -> Object {
    create(construction, false, |_| Ok(Call::MergeGradients))
}

fn create(construction: Object, is_on_gpu: bool, read: impl FnOnce(&Attrs) -> Result<Call>) -> Object {
    match catch(|| read(&Attrs(construction))) {
        Ok(call) => Box::into_raw(Box::new(Kernel { call, is_on_gpu })).cast(),
        Err(failure) => {
            let status = Status::of(&failure);
            // SAFETY: both objects are live: the first for the length of this callback, the second until the line below.
            unsafe { (api().TF_OpKernelConstruction_Failure)(construction, status.0) };
            ptr::null_mut()
        }
    }
}

extern "C" fn delete(kernel: Object) {
    if !kernel.is_null() {
        // SAFETY: - `create` made it from a box of this type.
        //         - TensorFlow deletes a kernel once, when nothing computes with it any more.
        let kernel = unsafe { Box::from_raw(kernel.cast::<Kernel>()) };
        // An error cannot be reported here.
        let _ = caught(|| {
            drop(kernel);
            Ok(())
        });
    }
}

extern "C" fn compute(kernel: Object, context: Object) {
    // SAFETY: - `create` made it; TensorFlow computes with no kernel whose creation failed (a null pointer).
    //         - it lives until `delete`, and is only read meanwhile, by any number of threads.
    let kernel = unsafe { &*kernel.cast::<Kernel>() };
    if let Err(failure) = catch(|| kernel.run(&mut Context(context))) {
        let status = Status::of(&failure);
        // SAFETY: both objects are live: the first for the length of this callback, the second until the line below.
        unsafe { (api().TF_OpKernelContext_Failure)(context, status.0) };
    }
}

impl Kernel {
    fn run(&self, context: &mut Context) -> Result<()> {
        let mut held = context.inputs()?;
        let memory = |index| self.memory_of_input(index);
        let tensors = held.iter().enumerate().map(|(index, held)| held.view(memory(index)));
        let tensors = tensors.collect::<Result<Vec<Tensor>>>()?;
        let stream = if self.is_on_gpu { context.stream()? } else { StreamHandle::NONE };
        let outputs = &mut KernelOutputs { kernel: self, context };
        match self.call {
            Call::Lookup { plan, insertion, save } => {
                let trigger = tensors.len() - 1;
                call::lookup(plan, insertion, save, &tensors[..trigger], outputs, stream)
            }
            Call::Push { plan, num_gradients } => {
                let gradients: Vec<Held> = held.drain(1..=num_gradients).collect();
                call::push(plan, &tensors, Some(Box::new(gradients)), outputs, stream)
            }
            Call::Commit { optimizer } => call::commit(optimizer, &tensors, outputs, stream),
            Call::Gather { optimizer, num_arrays, size } => {
                call::gather(optimizer, num_arrays, size, &tensors, outputs, stream)
            }
            Call::Scatter { optimizer } => call::scatter(optimizer, &tensors, outputs, stream),
            Call::Apply { optimizer } => call::apply(optimizer, &tensors, outputs, stream),
            Call::SumGradients => call::sum_gradients(&tensors, outputs, stream),
            Call::MergeGradients => call::merge_gradients(&tensors, outputs),
        }
    }
}

/// The number of a lookup is in host memory, all else where the tables are.
impl Kernel {
    fn memory_of_input(&self, index: usize) -> Memory {
        let is_number = matches!(self.call, Call::Push { .. }) && index == 0;
        if self.is_on_gpu && !is_number { Memory::Device } else { Memory::Host }
    }

    fn memory_of_output(&self, index: usize) -> Memory {
        let is_number = matches!(self.call, Call::Lookup { .. }) && index == 0;
        if self.is_on_gpu && !is_number { Memory::Device } else { Memory::Host }
    }
}

/// The outputs of a kernel, which TensorFlow allocates.
struct KernelOutputs<'a> {
    kernel: &'a Kernel,
    context: &'a Context,
}

impl Outputs for KernelOutputs<'_> {
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<TensorMut> {
        let (data, memory) =
            (self.context.allocate_output(index, dtype, dims)?, self.kernel.memory_of_output(index));
        // SAFETY: TensorFlow has allocated it for this call.
        Ok(unsafe { TensorMut::new(data, dtype, dims, memory) })
    }
}

// ---- TensorFlow's objects ----------------------------------------------------------------------------------------

/// A `TF_OpKernelConstruction`, live during `create`.
struct Attrs(Object);

impl Attrs {
    fn int(&self, name: &CStr) -> Result<i64> {
        let (status, mut value) = (Status::new(), 0);
        // SAFETY: - the objects are live, the name ends with a zero byte.
        //         - `value` is of the type that is written.
        unsafe { (api().TF_OpKernelConstruction_GetAttrInt64)(self.0, name.as_ptr(), &mut value, status.0) };
        status.check().map_err(Error::State)?;
        Ok(value)
    }

    fn bool(&self, name: &CStr) -> Result<bool> {
        let (status, mut value) = (Status::new(), 0);
        // SAFETY: - the objects are live, the name ends with a zero byte.
        //         - `value` is of the type that is written.
        unsafe { (api().TF_OpKernelConstruction_GetAttrBool)(self.0, name.as_ptr(), &mut value, status.0) };
        status.check().map_err(Error::State)?;
        Ok(value != 0)
    }
}

/// A `TF_OpKernelContext`, live during `compute`.
struct Context(Object);

/// `OpKernelContext::eigen_device<Eigen::GpuDevice>() const` and `EigenGpuStreamDevice::stream() const`, which GPU builds of
/// TensorFlow export. The C API gives a stream to pluggable devices alone.
const EIGEN_DEVICE: &str = "_ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v";
const EIGEN_STREAM: &str = "_ZNK10tensorflow20EigenGpuStreamDevice6streamEv";
/// Place of `stream` in the table of virtual functions of `Eigen::StreamInterface`.
const STREAM_SLOT: usize = 2;

type EigenDevice = unsafe extern "C" fn(Object) -> *const *const *const Object;
type EigenStream = unsafe extern "C" fn(*const *const Object) -> *const Object;

/// Addresses of the two.
fn stream_symbols() -> MessageResult<(usize, usize)> {
    let find = || -> MessageResult<(usize, usize)> {
        let library = loaded_framework().ok_or("TensorFlow is not loaded in this process")?;
        Ok((symbol(library, EIGEN_DEVICE)? as usize, symbol(library, EIGEN_STREAM)? as usize))
    };
    static SYMBOLS: OnceLock<MessageResult<(usize, usize)>> = OnceLock::new();
    SYMBOLS.get_or_init(find).clone()
}

/// Whether this TensorFlow lets kernels of ours onto its GPU stream.
#[pyfunction]
pub fn tensorflow_has_stream() -> PyResult<bool> {
    guarded(|| Ok(stream_symbols().is_ok()))
}

impl Context {
    /// TensorFlow's own stream, on which the tensors are ready.
    #[expect(
        clippy::multiple_unsafe_ops_per_block,
        reason = "a chain of pointers: each is checked before the next is read"
    )]
    fn stream(&self) -> Result<StreamHandle> {
        let (device, stream) = stream_symbols().map_err(|what| {
            Error::Device(format!("{what}, so tables on a GPU cannot be used here: use `storage=\"host\"`"))
        })?;
        // SAFETY: - functions of these types, by their mangled names.
        //         - a `TF_OpKernelContext` is an `OpKernelContext`, whose device is a GPU: this kernel is for no other.
        //         - the first field of `Eigen::GpuDevice` is its `StreamInterface*`, whose first is its table of virtual functions; that
        //           the stream's function stands there is checked before it is called.
        unsafe {
            let device: EigenDevice = std::mem::transmute(device);
            let interface = device(self.0).as_ref().copied().filter(|i| !i.is_null());
            let interface = interface.filter(|i| *(**i).add(STREAM_SLOT) as usize == stream);
            let Some(interface) = interface else {
                return Err(Error::Device(
                    "this TensorFlow keeps its GPU stream elsewhere: use `storage=\"host\"`".into(),
                ));
            };
            let stream: EigenStream = std::mem::transmute(stream);
            Ok(StreamHandle::new(*stream(interface) as u64))
        }
    }

    fn inputs(&self) -> Result<Vec<Held>> {
        // SAFETY: the context is live.
        let count = unsafe { (api().TF_NumInputs)(self.0) };
        (0..count).map(|index| self.input(index)).collect()
    }

    fn input(&self, index: c_int) -> Result<Held> {
        let (status, mut tensor) = (Status::new(), ptr::null_mut());
        // SAFETY: - the objects are live; an index that is out of range becomes a status.
        //         - the tensor written is a new reference, which `Held` gives back.
        unsafe { (api().TF_GetInput)(self.0, index, &mut tensor, status.0) };
        status.check().map_err(Error::State)?;
        Ok(Held(tensor))
    }
}

impl Context {
    fn allocate_output(&self, index: usize, dtype: DType, dims: &[i64]) -> Result<*mut u8> {
        let (status, type_number) = (Status::new(), type_number(dtype));
        let num_bytes = num_elements(dims) * dtype.size();
        let (index, num_dims) = (index as c_int, dims.len() as c_int);
        // SAFETY: - the objects are live; an index that is out of range becomes a status.
        //         - `num_dims` numbers are readable at `dims`, and are copied.
        let tensor = unsafe {
            (api().TF_AllocateOutput)(
                self.0,
                index,
                type_number,
                dims.as_ptr(),
                num_dims,
                num_bytes,
                status.0,
            )
        };
        status.check().map_err(Error::State)?;
        // The context holds the memory: the reference may go at the end of this line.
        Ok(Held(tensor).data())
    }
}

/// A reference to a `TF_Tensor`: while it is held, TensorFlow neither frees nor reuses the memory.
struct Held(Object);

// SAFETY: the references of a tensor are counted atomically, and a held tensor's memory is written by nobody.
unsafe impl Send for Held {}
// SAFETY: as above; through `&Held` it is only read.
unsafe impl Sync for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: this is the owner of one reference, and gives it back once.
        unsafe { (api().TF_DeleteTensor)(self.0) }
    }
}

impl Held {
    fn view(&self, memory: Memory) -> Result<Tensor> {
        // SAFETY: TensorFlow's tensors are dense, and this one is held until the call returns, or with the gradients.
        Ok(unsafe { Tensor::new(self.data(), self.dtype()?, self.dims(), memory) })
    }

    fn data(&self) -> *mut u8 {
        // SAFETY: the tensor is live.
        unsafe { (api().TF_TensorData)(self.0) }.cast()
    }

    fn dims(&self) -> Vec<i64> {
        // SAFETY: the tensor is live.
        let num_dims = unsafe { (api().TF_NumDims)(self.0) };
        // SAFETY: the tensor is live and has that many dims.
        (0..num_dims).map(|index| unsafe { (api().TF_Dim)(self.0, index) }).collect()
    }

    fn dtype(&self) -> Result<DType> {
        // SAFETY: the tensor is live.
        let number = unsafe { (api().TF_TensorType)(self.0) };
        let known = [DType::I32, DType::I64, DType::U32, DType::U64, DType::F16, DType::BF16, DType::F32];
        known.into_iter().find(|&dtype| type_number(dtype) == number).ok_or_else(|| {
            let rule = "tensors must be int32, int64, uint32, uint64, float16, bfloat16 or float32";
            Error::argument(format!("{rule}: got TensorFlow's dtype number {number}"))
        })
    }
}

/// `TF_DataType`.
fn type_number(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 1,
        DType::I32 => 3,
        DType::I64 => 9,
        DType::BF16 => 14,
        DType::F16 => 19,
        DType::U32 => 22,
        DType::U64 => 23,
    }
}

/// A `TF_Status`.
struct Status(Object);

impl Status {
    fn new() -> Status {
        // SAFETY: takes nothing; `drop` deletes what it gives.
        Status(unsafe { (api().TF_NewStatus)() })
    }

    fn of(failure: &Failure) -> Status {
        let status = Status::new();
        // SAFETY: the status is live; the message ends with a zero byte and is copied.
        unsafe { (api().TF_SetStatus)(status.0, failure.code, failure.message.as_ptr()) };
        status
    }

    fn check(&self) -> MessageResult<()> {
        // SAFETY: the status is live.
        if unsafe { (api().TF_GetCode)(self.0) } == 0 {
            return Ok(());
        }
        // SAFETY: the status is live.
        let message = unsafe { (api().TF_Message)(self.0) };
        // SAFETY: - it ends with a zero byte.
        //         - it lives as long as the status; it is copied here.
        Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: this is the owner, and deletes once.
        unsafe { (api().TF_DeleteStatus)(self.0) }
    }
}
