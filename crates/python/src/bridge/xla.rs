//! XLA FFI handlers, which JAX calls.
//!
//! Written against the C structs of `xla/ffi/api/c_api.h` (`jax.ffi.include_dir()` has it), without linking XLA: each call
//! brings the functions that it may use. XLA has every result's memory ready and counts on nothing being kept.

use std::ffi::{c_char, c_int, c_void};
use std::mem;
use std::ptr;
use std::slice;

use pyo3::ffi::PyCapsule_New;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sok_core::contract::table::Insertion;
use sok_core::contract::tensor::{DType, Memory, StreamHandle, Tensor, TensorMut};
use sok_core::error::{Error, Result};

use super::{Failure, catch, staging};
use crate::call::{self, Outputs};
use crate::error::{caught, guarded};
use crate::ranks;
use crate::registry;
use crate::scope::{self, Scope};

// ---- the C structs, as far as they are read ----------------------------------------------------------------------

/// The version that handlers report. XLA takes any from 0.1 to its own; the structs below are those of 0.1, to which later
/// ones only append.
const MAJOR: c_int = 0;
const MINOR: c_int = 1;

const METADATA: c_int = 1;
const EXECUTE: c_int = 3;
const SCALAR: c_int = 3;

/// `XLA_FFI_Error`, which XLA makes and frees.
type XlaError = *mut c_void;
type Handler = unsafe extern "C" fn(*mut CallFrame) -> XlaError;

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct Version {
    struct_size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
    traits: u32,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct ErrorArguments {
    struct_size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct Api {
    struct_size: usize,
    extension: *mut Extension,
    version: Version,
    internal: *const c_void,
    create_error: unsafe extern "C" fn(*mut ErrorArguments) -> XlaError,
    get_message: *const c_void,
    destroy_error: unsafe extern "C" fn(*mut DestroyArguments),
    register_handler: *const c_void,
    get_stream: unsafe extern "C" fn(*mut StreamArguments) -> XlaError,
}

#[repr(C)]
struct DestroyArguments {
    struct_size: usize,
    extension: *mut Extension,
    error: XlaError,
}

#[repr(C)]
struct StreamArguments {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    stream: *mut c_void,
}

#[repr(C)]
struct Buffer {
    struct_size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut u8,
    rank: i64,
    dims: *const i64,
}

/// Arguments and results have one layout.
#[repr(C)]
struct Buffers {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    kinds: *const c_int,
    items: *const *const Buffer,
}

#[repr(C)]
struct Name {
    data: *const u8,
    size: usize,
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

#[repr(C)]
struct Attributes {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    kinds: *const c_int,
    names: *const *const Name,
    items: *const *const Scalar,
}

#[repr(C)]
struct CallFrame {
    struct_size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

// ---- handlers ----------------------------------------------------------------------------------------------------

const ON_CPU: [(&str, Handler); 9] = [
    ("sok_lookup", lookup::<false>),
    ("sok_push", push::<false>),
    ("sok_commit", commit::<false>),
    ("sok_gather", gather::<false>),
    ("sok_scatter", scatter::<false>),
    ("sok_apply", apply::<false>),
    ("sok_sum_gradients", sum_gradients::<false>),
    ("sok_verdict", verdict),
    ("sok_finish", finish),
];
const ON_GPU: [(&str, Handler); 7] = [
    ("sok_lookup", lookup::<true>),
    ("sok_push", push::<true>),
    ("sok_commit", commit::<true>),
    ("sok_gather", gather::<true>),
    ("sok_scatter", scatter::<true>),
    ("sok_apply", apply::<true>),
    ("sok_sum_gradients", sum_gradients::<true>),
];

/// By platform: name and handler of each call, for `jax.ffi.register_ffi_target(name, capsule, platform=platform)`.
#[pyfunction]
pub fn xla_targets(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    guarded(|| {
        let platforms = PyDict::new(py);
        for (platform, handlers) in [("cpu", &ON_CPU[..]), ("CUDA", &ON_GPU[..])] {
            let targets = PyDict::new(py);
            for &(name, handler) in handlers {
                targets.set_item(name, capsule(py, handler)?)?;
            }
            platforms.set_item(platform, targets)?;
        }
        Ok(platforms)
    })
}

/// Without a name, as `jax.ffi.pycapsule` makes them; PyO3's own constructors ask for one.
fn capsule(py: Python<'_>, handler: Handler) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: - the pointer is not null: it is a function's.
    //         - name and destructor may be null; a function needs none.
    let capsule = unsafe { PyCapsule_New(handler as *mut c_void, ptr::null(), None) };
    // SAFETY: a new reference, or null with Python's error set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Operands: the tensors of the plan, then the trigger, then, if the call `follows` another one, that one's number. Results: number, rows.
unsafe extern "C" fn lookup<const GPU: bool>(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe {
        handle(frame, GPU, |execution| {
            let plan = execution.attribute("plan")?;
            let found = registry::plan(plan)?;
            let call = |execution: &mut Execution, scope: Option<&Scope>| {
                let insertion = Insertion::from_number(execution.attribute("insertion")?)?;
                let save = execution.flag("save")?;
                let mut tensors = execution.tensors()?;
                let num_last = 1 + usize::from(execution.flag("follows")?);
                let num_tensors = tensors.len().checked_sub(num_last);
                tensors.truncate(
                    num_tensors
                        .ok_or_else(|| Error::argument("sok_lookup needs its trigger: got no operand"))?,
                );
                scope.map_or(Ok(()), |scope| scope.finish_before_lookup(&found.group))?;
                execution.run(tensors, found.group.memory, |tensors, outputs, stream| {
                    call::lookup(plan, insertion, save, tensors, outputs, stream)
                })
            };
            execution.in_scope(call, || (), |error| latch_plan(plan, error))
        })
    }
}

/// Operands: number, gradients, weights. Results: ticket, gradients of the weights.
unsafe extern "C" fn push<const GPU: bool>(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe {
        handle(frame, GPU, |execution| {
            let plan = execution.attribute("plan")?;
            let call = |execution: &mut Execution, _: Option<&Scope>| {
                let (tensors, group) = (execution.tensors()?, registry::plan(plan)?.group.clone());
                execution.run(tensors, group.memory, |tensors, outputs, stream| {
                    call::push(plan, tensors, None, outputs, stream)
                })
            };
            execution.in_scope(call, || (), |error| latch_plan(plan, error))
        })
    }
}

/// Operands: is_update, tickets. Result: sum of squares.
unsafe extern "C" fn commit<const GPU: bool>(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe { handle(frame, GPU, |execution| execution.of_optimizer(call::commit)) }
}

/// Operands: scalars, what comes before, number of the piece. Results: gradients, rows, states.
unsafe extern "C" fn gather<const GPU: bool>(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe {
        handle(frame, GPU, |execution| {
            let num_arrays = execution.frame.results.size as usize;
            let size = execution.attribute("size")? as usize;
            execution.of_optimizer(|optimizer, tensors, outputs, stream| {
                call::gather(optimizer, num_arrays, size, tensors, outputs, stream)
            })
        })
    }
}

/// Operands: number of the piece, rows, states. Result: number of the next piece. Where the scope has failed it is 0, which ends the loop.
unsafe extern "C" fn scatter<const GPU: bool>(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe { handle(frame, GPU, |execution| execution.of_optimizer(call::scatter)) }
}

/// Operands: scalars, sum of squares, triggers. Results: new triggers. In a scope `sok_finish` makes the update.
unsafe extern "C" fn apply<const GPU: bool>(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe {
        handle(frame, GPU, |execution| {
            let optimizer = execution.attribute("optimizer")?;
            let call = |execution: &mut Execution, scope: Option<&Scope>| {
                let (tensors, memory) = (execution.tensors()?, memory_of(optimizer)?);
                if let Some(scope) = scope {
                    scope.add_update(optimizer, call::prepare_apply(optimizer, &tensors, execution)?);
                    return Ok(());
                }
                execution.run(tensors, memory, |tensors, outputs, stream| {
                    call::apply(optimizer, tensors, outputs, stream)
                })
            };
            let dropped = || call::drop_committed(optimizer).unwrap_or_default();
            execution.in_scope(call, dropped, |error| latch_optimizer(optimizer, error))
        })
    }
}

/// Operands: vector, a tensor to pass on, and whatever must be computed before. Results: sums over all ranks, the other tensor.
unsafe extern "C" fn sum_gradients<const GPU: bool>(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe {
        handle(frame, GPU, |execution| {
            let call = |execution: &mut Execution, _: Option<&Scope>| {
                let mut tensors = execution.tensors()?;
                tensors.truncate(2);
                let memory = if ranks::sums_on_gpus() { Memory::Device } else { Memory::Host };
                execution.run(tensors, memory, |tensors, outputs, stream| {
                    call::sum_gradients(tensors, outputs, stream)
                })
            };
            execution.in_scope(call, || (), |_| ())
        })
    }
}

/// Operands: whatever must be computed before. Result: int32, 1 if no call of the scope has failed, else 0.
unsafe extern "C" fn verdict(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe {
        handle(frame, false, |execution| {
            let scope = scope::scope(execution.attribute("scope")?)?;
            execution.output(0, DType::I32, &[])?.slice_mut::<i32>()?[0] = i32::from(!scope.has_failed());
            Ok(())
        })
    }
}

/// The end of a step. Operands: its verdict, the triggers. Results: the triggers.
unsafe extern "C" fn finish(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, passed on.
    unsafe {
        handle(frame, false, |execution| {
            let scope = scope::scope(execution.attribute("scope")?)?;
            for (number, trigger) in execution.tensors()?.iter().skip(1).enumerate() {
                let mut place = execution.output(number, DType::F32, trigger.dims())?;
                place.slice_mut::<f32>()?.copy_from_slice(trigger.slice()?);
            }
            scope.finish().unwrap_or_else(|error| scope.fail(error));
            Ok(())
        })
    }
}

/// JAX raises an error where a result is read, which may be never: `fit` can return as if nothing were. So the tables
/// remember it for the next call from Python.
fn latch_plan(plan: i64, error: &Error) {
    if let Ok(plan) = registry::plan(plan) {
        call::latch(&plan, error);
    }
}

fn latch_optimizer(optimizer: i64, error: &Error) {
    if let Ok(optimizer) = registry::optimizer(optimizer) {
        optimizer.groups.iter().for_each(|group| group.latch(error));
    }
}

/// Where the tables of an optimizer are.
fn memory_of(optimizer: i64) -> Result<Memory> {
    let optimizer = registry::optimizer(optimizer)?;
    Ok(optimizer.groups.first().map_or(Memory::Host, |group| group.memory))
}

/// What all handlers share: they answer XLA's query for their metadata, work in the execute stage only, and report errors.
///
/// # Safety
/// `frame` and all that it points to must be as XLA passes them to a handler.
unsafe fn handle(
    frame: *mut CallFrame,
    on_gpu: bool,
    body: impl FnOnce(&mut Execution) -> Result<()>,
) -> XlaError {
    // SAFETY: the frame is live and unchanged during the call (XLA's contract, passed on by the caller).
    let frame = unsafe { &*frame };
    // SAFETY: extensions are a list that ends with null; a first one, if any, is live.
    if let Some(extension) = unsafe { frame.extension.as_ref() }
        && extension.kind == METADATA
    {
        // SAFETY: an extension of this kind is the base of a `MetadataExtension`, whose metadata is ours to fill.
        unsafe { describe(frame.extension.cast()) };
        return ptr::null_mut();
    }
    if frame.stage != EXECUTE {
        return ptr::null_mut();
    }
    let memory = if on_gpu { Memory::Device } else { Memory::Host };
    match catch(|| body(&mut Execution { frame, memory })) {
        Ok(()) => ptr::null_mut(),
        // SAFETY: the API outlives the call.
        Err(failure) => report(unsafe { &*frame.api }, &failure),
    }
}

/// Version 0.1 and no traits: a call that may take a CUDA graph's place must always launch the same work, and ours do not.
///
/// # Safety
/// `extension` and its metadata must be live, and written by nobody else.
unsafe fn describe(extension: *mut MetadataExtension) {
    // SAFETY: live and unshared: the caller's contract.
    let extension = unsafe { &*extension };
    // SAFETY: as above.
    let metadata = unsafe { &mut *extension.metadata };
    (metadata.version.major, metadata.version.minor, metadata.traits) = (MAJOR, MINOR, 0);
}

fn report(api: &Api, failure: &Failure) -> XlaError {
    let struct_size = mem::size_of::<ErrorArguments>();
    let message = failure.message.as_ptr();
    let mut arguments =
        ErrorArguments { struct_size, extension: ptr::null_mut(), message, code: failure.code };
    // SAFETY: the struct is filled as the header asks; the message ends with a zero byte and is copied.
    unsafe { (api.create_error)(&mut arguments) }
}

/// A call in its execute stage: all that the frame points to is live and complete.
struct Execution<'a> {
    frame: &'a CallFrame,
    /// Of the buffers.
    memory: Memory,
}

impl Execution<'_> {
    fn tensors(&self) -> Result<Vec<Tensor>> {
        let buffers = (0..self.frame.arguments.size as usize).map(|index| item(&self.frame.arguments, index));
        buffers.map(|buffer| self.tensor(buffer?)).collect()
    }

    fn tensor(&self, buffer: &Buffer) -> Result<Tensor> {
        let dims = match buffer.rank {
            0 => Vec::new(),
            // SAFETY: `rank` numbers are readable at `dims`.
            rank => unsafe { slice::from_raw_parts(buffer.dims, rank as usize) }.to_vec(),
        };
        // SAFETY: XLA's buffers are dense, and live until the call returns.
        Ok(unsafe { Tensor::new(buffer.data, dtype(buffer.dtype)?, dims, self.memory) })
    }

    /// A call on tables in this memory.
    fn run(
        &mut self,
        tensors: Vec<Tensor>,
        tables: Memory,
        call: impl FnOnce(&[Tensor], &mut dyn Outputs, StreamHandle) -> Result<()>,
    ) -> Result<()> {
        match (self.memory, tables) {
            (Memory::Host, _) => call(&tensors, self, StreamHandle::NONE),
            (Memory::Device, Memory::Device) => {
                let stream = self.stream()?;
                call(&tensors, self, stream)
            }
            (Memory::Device, Memory::Host) => {
                let stream = self.stream()?;
                let on_host = |tensors: &[Tensor], outputs: &mut dyn Outputs| {
                    call(tensors, outputs, StreamHandle::NONE)
                };
                staging::run(stream, &tensors, self, on_host)
            }
        }
    }

    /// A call that belongs to a scope, if any: there it never fails, but writes zeros and is `skipped` where the scope has failed.
    /// Errors of other calls are given to `latch`.
    fn in_scope(
        &mut self,
        call: impl FnOnce(&mut Self, Option<&Scope>) -> Result<()>,
        skipped: impl FnOnce(),
        latch: impl FnOnce(&Error),
    ) -> Result<()> {
        let handle = self.attribute("scope")?;
        if handle == 0 {
            return call(self, None).inspect_err(latch);
        }
        let scope = scope::scope(handle)?;
        if !scope.has_failed() {
            match caught(|| call(self, Some(&scope))) {
                Ok(()) => return Ok(()),
                Err(error) => scope.fail(error),
            }
        }
        skipped();
        self.write_zeros()
    }

    /// A call of an optimizer, as `in_scope`.
    fn of_optimizer(
        &mut self,
        call: impl FnOnce(i64, &[Tensor], &mut dyn Outputs, StreamHandle) -> Result<()>,
    ) -> Result<()> {
        let optimizer = self.attribute("optimizer")?;
        let run = |execution: &mut Execution, _: Option<&Scope>| {
            let (tensors, memory) = (execution.tensors()?, memory_of(optimizer)?);
            execution
                .run(tensors, memory, |tensors, outputs, stream| call(optimizer, tensors, outputs, stream))
        };
        self.in_scope(run, || (), |error| latch_optimizer(optimizer, error))
    }

    fn write_zeros(&mut self) -> Result<()> {
        for index in 0..self.frame.results.size as usize {
            let result = self.tensor(item(&self.frame.results, index)?)?;
            // SAFETY: a result is writable, by us alone until the call returns. A scope is on the host.
            unsafe { result.data().cast_mut().write_bytes(0, result.num_bytes()) };
        }
        Ok(())
    }

    fn stream(&self) -> Result<StreamHandle> {
        // SAFETY: the API outlives the call.
        let api = unsafe { &*self.frame.api };
        let mut arguments = StreamArguments {
            struct_size: mem::size_of::<StreamArguments>(),
            extension: ptr::null_mut(),
            context: self.frame.context,
            stream: ptr::null_mut(),
        };
        // SAFETY: the struct is filled as the header asks.
        let error = unsafe { (api.get_stream)(&mut arguments) };
        if error.is_null() {
            // SAFETY: XLA's streams live as long as its client, which is that of the process.
            return Ok(unsafe { StreamHandle::new(arguments.stream as u64) });
        }
        let mut destroy = DestroyArguments {
            struct_size: mem::size_of::<DestroyArguments>(),
            extension: ptr::null_mut(),
            error,
        };
        // SAFETY: an error of XLA's, which is given back once.
        unsafe { (api.destroy_error)(&mut destroy) };
        Err(Error::Device("XLA has no stream for this call".into()))
    }

    fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.attribute(name)? != 0)
    }

    /// An attribute of type int64 or bool.
    fn attribute(&self, name: &str) -> Result<i64> {
        let attributes = &self.frame.attributes;
        let index =
            (0..attributes.size as usize).find(|&index| attribute_name(attributes, index) == name.as_bytes());
        let index = index.ok_or_else(|| Error::argument(format!("attribute `{name}` is missing")))?;
        let wrong = || Error::argument(format!("attribute `{name}` must be an int64 or a bool"));
        // SAFETY: `index` is below `size`, the length of the array.
        if unsafe { *attributes.kinds.wrapping_add(index) } != SCALAR {
            return Err(wrong());
        }
        // SAFETY: `index` is below `size`.
        let scalar = unsafe { *attributes.items.wrapping_add(index) };
        // SAFETY: an attribute of this kind is a live `Scalar`.
        let scalar = unsafe { &*scalar };
        match scalar.dtype {
            // SAFETY: the dtype (S64) says what lies there.
            5 => Ok(unsafe { *scalar.value.cast::<i64>() }),
            // SAFETY: the dtype (PRED) says what lies there: one byte.
            1 => Ok(i64::from(unsafe { *scalar.value.cast::<u8>() })),
            _ => Err(wrong()),
        }
    }
}

impl Outputs for Execution<'_> {
    fn output(&mut self, index: usize, dtype: DType, dims: &[i64]) -> Result<TensorMut> {
        let ready = self.tensor(item(&self.frame.results, index)?)?;
        if ready.dtype() != dtype || ready.dims() != dims {
            return Err(Error::argument(format!(
                "result {index} of the call is {dtype:?} {dims:?}, but {:?} {:?} was traced",
                ready.dtype(),
                ready.dims()
            )));
        }
        // SAFETY: a result is writable, by us alone until the call returns.
        Ok(unsafe { TensorMut::new(ready.data().cast_mut(), dtype, dims, ready.memory()) })
    }
}

fn attribute_name(attributes: &Attributes, index: usize) -> &[u8] {
    // SAFETY: the caller keeps `index` below `size`, the length of the array.
    let name = unsafe { *attributes.names.wrapping_add(index) };
    // SAFETY: names are live.
    let name = unsafe { &*name };
    // SAFETY: a name is `size` readable bytes, live as long as the attributes.
    unsafe { slice::from_raw_parts(name.data, name.size) }
}

fn item(buffers: &Buffers, index: usize) -> Result<&Buffer> {
    if index >= buffers.size as usize {
        return Err(Error::argument(format!("the call has {} buffers: no {index}", buffers.size)));
    }
    // SAFETY: `index` is below `size`, the length of the array: checked above.
    let buffer = unsafe { *buffers.items.wrapping_add(index) };
    // SAFETY: XLA knows no kind of argument or result but buffers; they live as long as the frame.
    Ok(unsafe { &*buffer })
}

/// From `XLA_FFI_DataType`.
fn dtype(number: c_int) -> Result<DType> {
    match number {
        4 => Ok(DType::I32),
        5 => Ok(DType::I64),
        8 => Ok(DType::U32),
        9 => Ok(DType::U64),
        10 => Ok(DType::F16),
        11 => Ok(DType::F32),
        16 => Ok(DType::BF16),
        _ => {
            let rule = "tensors must be int32, int64, uint32, uint64, float16, bfloat16 or float32";
            Err(Error::argument(format!("{rule}: got XLA's dtype number {number}")))
        }
    }
}
