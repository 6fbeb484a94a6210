"""The calls of a training step as XLA FFI calls.

The handlers are written in Rust (`crates/python/src/bridge/xla.rs`). Calls declare no side effect: trigger ->
lookup -> push -> ticket -> commit -> apply -> new trigger is a chain of data, which XLA keeps in order. So
rematerialisation works, and a gradient that nobody asked for is never pushed. The exception is a lookup of an empty batch
without gradients, with ranks.
"""

import contextlib
import functools
import glob
import os
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from sok_keras import _native
from sok_keras.backend.insertion import Insertion
from sok_keras.backend.jax_trainer import chosen_updates, guard_trainer, traced_scope
from sok_keras.backend.leaving import note_thread, watch_exit
from sok_keras.backend.private_jax import backends_are_initialized, is_traced_now, trace_state_clean

_process = os.getpid()

guard_trainer()
for _platform, _targets in _native.xla_targets().items():
    for _name, _target in _targets.items():
        jax.ffi.register_ffi_target(_name, _target, platform=_platform)


class _Call(NamedTuple):
    """What is known of a lookup when it is traced."""

    plan: int
    shapes: tuple
    dtype: str
    insertion: Insertion
    scope: int


def lookup(plan, trigger, learns, inputs, weights, insertion):
    """Rows of each feature, differentiable in `trigger` and `weights`.

    The gradient of `trigger` is the ticket of the push that the backward pass makes.

    Args:
        plan: The layer's plan: has `handle` and `output_shapes(inputs)`.
        trigger: Value of the layer's trigger, `(64, 2)` float32. By it data says that the lookup comes after the last update.
        learns: Whether gradients are computed. If not, nothing is differentiable.
        inputs: A tuple for each feature: its ids (without x64 the low and the high words), then its row splits if it is
            ragged.
        weights: A float32 array or None for each feature.
        insertion: When keys without a row get one. `AT_COMMIT` has an effect only if the call is differentiated.

    Returns:
        A list with an array for each feature, of the plan's `row_dtype`.
    """
    note_thread()
    shapes = tuple(tuple(shape) for shape in plan.output_shapes(inputs))
    call = _Call(plan.handle, shapes, plan.row_dtype, insertion, traced_scope())
    inputs, weights = tuple(map(tuple, inputs)), tuple(weights)
    if not any(map(is_tracing, jax.tree.leaves((trigger, weights, inputs)))):
        return list(_compiled(call)(trigger, weights, inputs))
    before = _last_lookup.number()
    if not learns:
        arguments = jax.lax.stop_gradient((trigger, weights, inputs))
        # `before` may be a result of a call that JAX differentiates. `| 0` has no derivative, so JAX does not differentiate this call, too.
        before = None if before is None else before | 0
        number, rows = _run(call, *arguments, save=False, before=before)
    else:
        number, rows = _lookup(call, trigger, weights, inputs, before)
    _last_lookup.set(number, learns)
    return list(rows)


def prefetch(plan, inputs):
    """Tells the ids of a later lookup. `inputs`: as `lookup`; the plan has no weights."""
    device = jax.config.jax_default_device or jax.local_devices()[0]
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    arrays = jax.block_until_ready(jax.device_put([array for ids in inputs for array in ids], device))
    described = [(array.unsafe_buffer_pointer(), str(array.dtype), list(array.shape)) for array in arrays]
    _native.prefetch(plan.handle, described, arrays, None)


class _LastLookup:
    """The number of the last lookup of what is traced, if there are ranks: the next lookup depends on it.

    XLA starts calls that do not depend on each other in any order. A call waits for the other ranks, so ranks with other orders would
    wait for each other for ever.
    """

    def __init__(self):
        self._found = []  # pairs of a trace and a number, the newest last
        self._without_gradients = None  # the newest number of a lookup that computes none

    def number(self):
        if _native.ranks() is None:
            return None
        trace = get_opaque_trace_state(convention="flax")
        return next((number for other, number in reversed(self._found) if other == trace), None)

    def set(self, number, learns):
        if _native.ranks() is not None:
            if not learns:
                self._without_gradients = number
            trace = get_opaque_trace_state(convention="flax")
            others = [(other, found) for other, found in self._found if other != trace]
            self._found = [*others[-3:], (trace, number)]

    def without_gradients(self):
        """The number of the newest lookup that computes no gradients, as a list, if the function that is traced may use it."""
        number = self._without_gradients
        return [number] if is_tracing(number) and is_traced_now(number) else []


_last_lookup = _LastLookup()


@functools.lru_cache(maxsize=4096)
def _compiled(call):
    """The lookup as a function of arrays that nobody differentiates. An eager FFI call alone takes JAX longer."""
    return jax.jit(lambda trigger, weights, inputs: _run(call, trigger, weights, inputs, save=False)[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(call, trigger, weights, inputs, before):
    return _run(call, trigger, weights, inputs, save=False, before=before)


def _lookup_to_differentiate(call, trigger, weights, inputs, before):
    number, rows = _run(call, trigger, weights, inputs, save=True, before=before)
    return (number, rows), (number, weights)


def _push(call, residuals, gradients):
    (number, weights), (_, gradients) = residuals, gradients
    given = [weight for weight in weights if weight is not None]
    results = [_float32(64, 2), *(_float32(*weight.shape) for weight in given)]
    push = _ffi("sok_push", results)
    ticket, *found = push(number, *gradients, *given, plan=np.int64(call.plan), scope=call.scope)
    found = iter(found)
    return ticket, tuple(None if weight is None else next(found) for weight in weights), None, None


_lookup.defvjp(_lookup_to_differentiate, _push)


def commit(tables, is_update, tickets):
    """Squared norm of all merged gradients that `tickets` name: a float32 scalar."""
    call = _ffi("sok_commit", [_float32()])
    (sum_of_squares,) = call(is_update, *tickets, optimizer=np.int64(tables.handle), scope=traced_scope())
    return sum_of_squares


def gather(tables, size, num_arrays, scalars, after, piece):
    """Arrays `(size,)` of a piece of the rows to update: gradients, rows, and each state. `after`: what must be computed before."""
    call = _ffi("sok_gather", [_float32(size) for _ in range(num_arrays)])
    return call(scalars, after, piece, optimizer=np.int64(tables.handle), size=np.int64(size), scope=traced_scope())


def scatter(tables, piece, arrays):
    """Takes the new rows and states of a piece; gives the number of the next one, `(1,)` int32, or 0."""
    call = _ffi("sok_scatter", [jax.ShapeDtypeStruct((1,), "int32")])
    (following,) = call(piece, *arrays, optimizer=np.int64(tables.handle), scope=traced_scope())
    return following


def apply(tables, scalars, sum_of_squares, triggers):
    """Updates the rows; gives the new value of each trigger."""
    call = _ffi("sok_apply", [_float32(64, 2) for _ in triggers])
    return list(call(scalars, sum_of_squares, *triggers, optimizer=np.int64(tables.handle), scope=traced_scope()))


def sum_gradients(gradients, then, after=()):
    """Sums a vector over all ranks. Returns the sums, and `then`, which is there only after them. `after`: what must be computed before.

    XLA computes the gradients of an empty batch without its lookups. If it summed them first, or left out a lookup of tables that are not
    trained, other ranks would wait in that lookup for ever.
    """
    results = [_float32(*gradients.shape), _float32(*then.shape)]
    before = [*after, *_last_lookup.without_gradients()]
    return _ffi("sok_sum_gradients", results)(gradients, then, *before, scope=traced_scope())


def watch_gradients(variables, divisor):
    """Nothing can start during the backward pass: XLA runs calls in the order of one stream."""
    del variables, divisor


def bind_gpu(number):
    """Makes this process use one of the GPUs that it sees."""
    if jax.config.read("jax_cuda_visible_devices") not in (None, "", "all"):
        return  # jax.distributed has chosen one
    if not backends_are_initialized():
        # JAX takes memory of every GPU that it sees, so it must see one. The driver reads the variable when it starts.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))] if seen is None else seen.split(",")
        if len(gpus) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        return
    devices = [device for device in jax.local_devices() if device.platform in ("gpu", "cuda")]
    if devices:
        jax.config.update("jax_default_device", devices[number % len(devices)])


def _run(call, trigger, weights, inputs, save, before=None):
    """Returns the lookup's number, which the push needs, and the rows of each feature. `before`: what must be computed before."""
    groups = zip(inputs, weights, strict=True)
    tensors = [tensor for ids, weight in groups for tensor in (*ids, weight) if tensor is not None]
    rows = [jax.ShapeDtypeStruct(shape, call.dtype) for shape in call.shapes]
    results = [jax.ShapeDtypeStruct((2,), "int32"), *rows]
    plan, insertion = np.int64(call.plan), np.int64(call.insertion)
    # XLA leaves out a call whose results are empty or unused. The other ranks, with samples in their batches, wait in it.
    stays = not save and _native.ranks() is not None and any(0 in shape for shape in call.shapes)
    number, *rows = _ffi("sok_lookup", results, stays)(
        *tensors,
        trigger,
        *([] if before is None else [before]),
        plan=plan,
        insertion=insertion,
        save=save,
        scope=call.scope,
        follows=before is not None,
    )
    return number, rows


def _ffi(name, results, stays=False):
    """`stays`: whether XLA keeps a call whose results nobody uses."""
    return jax.ffi.ffi_call(name, results, has_side_effect=stays, vmap_method="sequential")


def _float32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def is_dense(value):
    """Whether an array is dense."""
    return not type(value).__module__.startswith("jax.experimental.sparse")


def gpu(required=False):
    """Number of the GPU that models run on; None for the CPU. `required`: whether the user requires a GPU."""
    del required
    device = jax.config.jax_default_device or jax.local_devices()[0]
    platform = device if isinstance(device, str) else device.platform
    if platform not in ("gpu", "cuda"):
        return None
    return 0 if isinstance(device, str) else device.local_hardware_id or 0


def constant(function):
    """A function whose result a compiler may take as it is while it traces."""
    return function


def is_compiling():
    """Whether a compiler is tracing the caller, and nothing may be asked of the core meanwhile."""
    return False


def is_tracing(value):
    """Whether what is called now becomes a graph."""
    return isinstance(value, jax.core.Tracer)


def is_in_trace():
    """Whether JAX traces or differentiates what is called now, also if its arguments are concrete."""
    return not trace_state_clean()


def has_wide_integers():
    """Whether arrays hold 64-bit ids: JAX cuts them to 32 bits unless x64 is on."""
    return jax.config.jax_enable_x64


def after(done, gradients):
    """A scope in which variables are assigned only if the calls that led to `done` and to the gradients have succeeded."""
    if any(map(is_tracing, done)):
        return chosen_updates([*done, *gradients])
    jax.block_until_ready(done)  # a failed call ends the step here
    return contextlib.nullcontext()


def eager_scope():
    """A scope in which assignments happen now, also while a step is traced."""
    return contextlib.nullcontext()


def wait(trigger):
    """Waits for all that was started; gives the error of the step that was to make `trigger`, a value or None.

    A step's results are in the hands of a trainer, or of the user, so all arrays that live are waited for. A forked child waits for
    nothing: the threads that compute stay in the parent, and so do those that hold JAX's locks.
    """
    if os.getpid() != _process:
        return None
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # the next read of the array raises it
            array.block_until_ready()
    if trigger is None or trigger.is_deleted():
        return None
    try:
        trigger.block_until_ready()
    except Exception as error:  # its class depends on the status that the failed call gave
        return error
    return None


def at_hand(value, fetches=False):
    """Returns a value as a NumPy array. None if it is traced or its step failed, or if it is not on the host yet, unless `fetches`."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and not value.is_deleted():
        with contextlib.suppress(Exception):  # the next read of the array raises it
            if fetches or (value.is_ready() and _is_on_host(value)):
                return np.asarray(value)
            value.copy_to_host_async()  # a later fetch does not wait
    return value if isinstance(value, np.ndarray) else None


def _is_on_host(value):
    return all(device.platform == "cpu" for device in value.devices())


def to_numpy(value):
    """A value of a variable, bit for bit."""
    return np.asarray(value)


def from_numpy(array):
    """Converts an array to what a variable can be set to."""
    return array


watch_exit(wait)
