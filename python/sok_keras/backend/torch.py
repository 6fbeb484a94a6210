"""The calls of a training step as PyTorch operations.

They hand contiguous tensors to the core, which reads their addresses from PyTorch's DLPack table; nothing is copied where tables and
model are on one device. The backward keeps the gradient tensors alive until they are applied, so that one pass merges and updates.

Eager calls go straight to the core; under `torch.compile` they are custom operators without side effects: trigger -> lookup -> push
-> ticket -> commit -> apply -> new trigger is a chain of data, which the compiler keeps in order.
"""

import contextlib
import functools

import ml_dtypes
import numpy as np
import torch

from sok_keras import _native
from sok_keras.backend.handles import optimizers, plans
from sok_keras.backend.leaving import note_thread, watch_exit
from sok_keras.backend.private_torch import get_device
from sok_keras.backend.torch_sums import GradientSums

_native.find_torch()
watch_exit()

_TICKET = (64, 2)

# A function whose result a compiler may take as it is while it traces.
constant = torch.compiler.assume_constant_result


def is_compiling():
    """Whether a compiler is tracing the caller, and nothing is computed."""
    return torch.compiler.is_compiling()


@constant
def _is_exporting():
    """Whether what is called now becomes a graph of `torch.export`. PyTorch 2.11 compiles the question itself to True."""
    return torch.compiler.is_exporting()


def is_tracing(value):
    """Whether what is called now becomes a graph."""
    del value
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def has_wide_integers():
    """Whether tensors hold 64-bit ids."""
    return True


def is_dense(value):
    """Whether a tensor is dense: neither sparse nor jagged, and with memory unless Keras infers shapes."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.layout is torch.strided and (not value.is_meta or get_device() == "meta")


def gpu(required=False):
    """Number of the GPU that models run on; None for the CPU. `required`: whether the user requires a GPU."""
    del required
    device = torch.device(get_device())
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _plan(handle):
    """Returns the plan of a handle in a graph.

    Raises:
        SokError: If the handle is of another process, or of a layer that no longer exists.
    """
    plan = plans.get(handle)
    return _native.check_plan(handle) if plan is None else plan


def _optimizer(handle):
    """Returns the optimizer of a handle in a graph. Raises as `_plan`."""
    optimizer = optimizers.get(handle)
    return _native.check_optimizer(handle) if optimizer is None else optimizer


def _device_of(gpu):
    """Device of the tables."""
    return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def _at(device, tensors):
    """Moves tensors to the device of the tables, contiguous, with lazy negation resolved."""

    def moved(tensor):
        return (tensor if tensor.device == device else tensor.detach().to(device)).resolve_neg().contiguous()

    # DLPack ignores lazy negation.
    is_there = _native.are_at(tensors, device.index) and not any(map(torch.Tensor.is_neg, tensors))
    return tensors if is_there else [moved(tensor) for tensor in tensors]


def _back(tensors, like):
    """Results where the model is."""
    return tensors if tensors[0].device == like.device else [tensor.to(like.device) for tensor in tensors]


def _new_number():
    return torch.empty(2, dtype=torch.int32, device="cpu")


def _new(device, shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=device)


def _row_dtype(plan):
    """Dtype of the rows of a plan."""
    return getattr(torch, plan.row_dtype)


def _new_rows(device, plan, tensors):
    """Memory for the rows of each feature, matrices of a width in one piece: to ask for each takes longer than to look its rows up.

    The piece lives as long as one of them does.
    """
    rows = [None] * plan.num_features
    for shape, lengths, features in _native.pieces_of_rows(plan.handle, tensors):
        memory = _new(device, shape, _row_dtype(plan))
        # No views to autograd: each may be changed in place.
        parts = [memory] if len(features) == 1 else torch.unsafe_split_with_sizes(memory, lengths)
        for feature, part in zip(features, parts, strict=True):
            rows[feature] = part
    return rows


def _new_rows_apart(device, plan, tensors):
    """The same, each with memory of its own."""
    return [_new(device, shape, _row_dtype(plan)) for shape in plan.shapes_of(tensors)]


# ---- the four calls


def _lookup(trigger, tensors, plan, insertion, save, apart=False):
    plan = _plan(plan)
    device = _device_of(plan.gpu)
    tensors = _at(device, tensors)
    # On the host glibc keeps freed memory of up to 32 MiB for the next step, but maps larger pieces anew: a step took three times as long.
    new_rows = _new_rows_apart if apart or plan.gpu is None else _new_rows
    number, rows = _new_number(), new_rows(device, plan, tensors)
    _native.lookup(plan.handle, insertion, save, tensors, number, rows, device.index)
    return [number, *_back(rows, trigger)]


def _push(number, gradients, weights, plan, keep):
    like, plan = gradients[0], _plan(plan)
    device = _device_of(plan.gpu)
    gradients, weights = _at(device, gradients), _at(device, weights)
    found = [_new(device, shape) for shape in (_TICKET, *(weight.shape for weight in weights))]
    _native.push(plan.handle, number, [*gradients, *weights], gradients if keep else None, found, device.index)
    return _back(found, like)


def _commit(is_update, tickets, optimizer):
    device = _device_of(_optimizer(optimizer).gpu)
    norm = _new(device, ())
    _native.commit(optimizer, _at(device, [is_update, *tickets]), [norm], device.index)
    return _back([norm], tickets[0])[0]


def _gather(scalars, after, piece, optimizer, size, num_arrays):
    device = _device_of(_optimizer(optimizer).gpu)
    arrays = [_new(device, (size,)) for _ in range(num_arrays)]
    _native.gather_piece(optimizer, size, _at(device, [scalars, after, piece]), arrays, device.index)
    return _back(arrays, scalars)


def _scatter(piece, arrays, optimizer):
    device = _device_of(_optimizer(optimizer).gpu)
    following = torch.empty(1, dtype=torch.int32, device=device)
    _native.scatter_piece(optimizer, _at(device, [piece, *arrays]), [following], device.index)
    return _back([following], piece)[0]


def _apply(scalars, sum_of_squares, triggers, optimizer):
    device = _device_of(_optimizer(optimizer).gpu)
    new = [_new(device, _TICKET) for _ in triggers]
    _native.apply(optimizer, _at(device, [scalars, sum_of_squares, *triggers]), new, device.index)
    return _back(new, triggers[0])


def _sum_gradients(gradients, then):
    on_gpu = gradients.is_cuda and _native.sums_on_gpus()
    device = _device_of(gradients.device.index if on_gpu else None)
    inputs = [tensor.contiguous() for tensor in _at(device, [gradients.detach(), then])]
    sums = [torch.empty_like(tensor) for tensor in inputs]
    _native.sum_gradients(inputs, sums, device.index)
    return _back(sums, gradients)


# ---- custom operators for the compiler, with functions that infer shapes

_library = torch.library.Library("sok_keras", "DEF")
_library.define("lookup(Tensor trigger, Tensor[] tensors, int plan, int insertion, bool save) -> Tensor[]")
_library.define("push(Tensor number, Tensor[] gradients, Tensor[] weights, int plan) -> Tensor[]")
_library.define("commit(Tensor is_update, Tensor[] tickets, int optimizer) -> Tensor")
_library.define("apply(Tensor scalars, Tensor sum_of_squares, Tensor[] triggers, int optimizer) -> Tensor[]")
_library.define("sum_gradients(Tensor gradients, Tensor then) -> Tensor[]")
_KEY = "CompositeExplicitAutograd"
# To a compiler each tensor has its memory, and may be given that of a gradient when the call is over: so nothing is kept of it.
_library.impl("lookup", functools.partial(_lookup, apart=True), _KEY)
_library.impl("push", lambda number, gradients, weights, plan: _push(number, gradients, weights, plan, False), _KEY)
_library.impl("commit", _commit, _KEY)
_library.impl("apply", _apply, _KEY)
_library.impl("sum_gradients", _sum_gradients, _KEY)


@torch.library.register_fake("sok_keras::lookup", lib=_library)
def _(trigger, tensors, plan, insertion, save):
    del insertion, save
    plan = _plan(plan)
    rows = [trigger.new_empty(shape, dtype=_row_dtype(plan)) for shape in plan.shapes_of(tensors)]
    return [_new_number(), *rows]


@torch.library.register_fake("sok_keras::push", lib=_library)
def _(number, gradients, weights, plan):
    del number, plan
    return [gradients[0].new_empty(_TICKET, dtype=torch.float32), *(torch.empty_like(weight) for weight in weights)]


@torch.library.register_fake("sok_keras::commit", lib=_library)
def _(is_update, tickets, optimizer):
    del is_update, optimizer
    return tickets[0].new_empty(())


@torch.library.register_fake("sok_keras::apply", lib=_library)
def _(scalars, sum_of_squares, triggers, optimizer):
    del scalars, sum_of_squares, optimizer
    return [torch.empty_like(trigger) for trigger in triggers]


@torch.library.register_fake("sok_keras::sum_gradients", lib=_library)
def _(gradients, then):
    return [torch.empty_like(gradients), torch.empty_like(then)]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, plan, insertion, save, tensors, places, *weights):
        # Of `tensors` those at `places` are the weights, which autograd must be given by themselves.
        tensors = list(tensors)
        for place, weight in zip(places, weights, strict=True):
            tensors[place] = weight
        call = torch.ops.sok_keras.lookup if torch.compiler.is_compiling() else _lookup
        number, *rows = call(trigger, tensors, plan, insertion, save)
        ctx.plan = plan
        ctx.save_for_backward(number, *weights)
        return tuple(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        number, *weights = ctx.saved_tensors
        if torch.compiler.is_compiling():
            ticket, *found = torch.ops.sok_keras.push(number, list(gradients), weights, ctx.plan)
        else:
            ticket, *found = _push(number, gradients, weights, ctx.plan, True)
        return ticket, None, None, None, None, None, *found


def lookup(plan, trigger, learns, inputs, weights, insertion):
    """Rows of each feature, differentiable in `trigger` and `weights`.

    Args:
        plan: The layer's plan: has `handle` and `output_shapes(inputs)`.
        trigger: Value of the layer's trigger, `(64, 2)` float32.
        learns: Whether gradients are computed. If not, nothing is differentiable.
        inputs: A tuple for each feature: its ids.
        weights: A float32 tensor or None for each feature.
        insertion: When keys without a row get one. `AT_COMMIT` has an effect only if a gradient is recorded.

    Returns:
        A list with a tensor for each feature, of the plan's `row_dtype`.
    """
    if not torch.compiler.is_compiling():
        note_thread()
    if inputs[0][0].is_meta:  # Keras asks for shapes alone
        shapes = plan.output_shapes(inputs)
        return [torch.empty(shape, dtype=_row_dtype(plan), device="meta") for shape in shapes]
    # An exported graph is never differentiated, so its lookups must keep nothing for a backward pass.
    learns = learns and not (_is_exporting() or torch.jit.is_tracing())
    tensors, places, given = [], [], []
    for ids, weight in zip(inputs, weights, strict=True):
        tensors += ids
        if weight is not None:
            places.append(len(tensors))
            tensors.append(None)
            given.append(weight if learns else weight.detach())
    trigger = trigger if learns else trigger.detach()
    records = torch.is_grad_enabled() and (trigger.requires_grad or any(weight.requires_grad for weight in given))
    if torch.jit.is_tracing():  # its graph can only hold calls of registered operators
        for place, weight in zip(places, given, strict=True):
            tensors[place] = weight
        return torch.ops.sok_keras.lookup(trigger, tensors, plan.handle, int(insertion), False)[1:]
    return list(_Lookup.apply(trigger, plan.handle, int(insertion), records, tuple(tensors), tuple(places), *given))


def prefetch(plan, inputs):
    """Tells the ids of a later lookup. `inputs`: as `lookup`; the plan has no weights."""
    device = _device_of(plan.gpu)
    tensors = _at(device, [tensor for ids in inputs for tensor in ids])
    arrays = [(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    _native.prefetch(plan.handle, arrays, tensors, torch.cuda.current_stream(device).cuda_stream)


def commit(tables, is_update, tickets):
    """Squared norm of all merged gradients that `tickets` name: a float32 scalar."""
    call = torch.ops.sok_keras.commit if torch.compiler.is_compiling() else _commit
    return call(is_update, list(tickets), tables.handle)


def gather(tables, size, num_arrays, scalars, after, piece):
    """Arrays `(size,)` of a piece of the rows to update: gradients, rows, and each state. `after`: what must be computed before."""
    return _gather(scalars, after, piece, tables.handle, size, num_arrays)


def scatter(tables, piece, arrays):
    """Takes the new rows and states of a piece; gives the number of the next one, `(1,)` int32, or 0."""
    return _scatter(piece, list(arrays), tables.handle)


def apply(tables, scalars, sum_of_squares, triggers):
    """Updates the rows; gives the new value of each trigger."""
    call = torch.ops.sok_keras.apply if torch.compiler.is_compiling() else _apply
    return list(call(scalars, sum_of_squares, list(triggers), tables.handle))


def sum_gradients(gradients, then, after=()):
    """Sums a vector over all ranks. Returns the sums, and `then`, which is there only after them. `after`: what must be computed before."""
    del after  # calls are made in the order of the program
    call = torch.ops.sok_keras.sum_gradients if torch.compiler.is_compiling() else _sum_gradients
    return call(gradients, then)


def watch_gradients(variables, divisor):
    """Returns what sums the variables' gradients over all ranks during the backward pass, and divides them. None over NCCL."""
    if not _native.sums_beside_calls():
        return None
    return GradientSums(variables, lambda flat: _sum_gradients(flat, flat.new_zeros(1))[0] / divisor)


def bind_gpu(number):
    """Makes this process use one of the GPUs that it sees."""
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def after(done, gradients):
    """A scope in which variables are assigned after `done` is computed, so that a failed commit changes no variable."""
    del done, gradients  # a failed call ends the step
    return contextlib.nullcontext()


def eager_scope():
    """A scope in which assignments happen now, also while a step is traced. What it makes can be trained."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def wait(trigger):
    """Nothing is under way on the host when a call has returned; tables on a GPU wait for it themselves."""
    del trigger


def at_hand(value, fetches=False):
    """A value as a NumPy array; None if it is traced, or if it would have to be fetched from another device and that is not asked."""
    if isinstance(value, torch.Tensor):
        is_here = (fetches or value.device.type == "cpu") and not torch.compiler.is_compiling()
        return value.detach().cpu().numpy() if is_here else None
    return value if isinstance(value, np.ndarray) else None


# In NumPy these dtypes are those of ml_dtypes, which PyTorch does not know. They are converted as integers of the same size.
_OTHER_FLOATS = {
    torch.bfloat16: (torch.uint16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def to_numpy(value):
    """A value of a variable, bit for bit."""
    value = value.detach().resolve_conj().resolve_neg().cpu()
    if value.dtype not in _OTHER_FLOATS:
        return value.numpy()
    bits, dtype = _OTHER_FLOATS[value.dtype]
    return value.contiguous().view(bits).numpy().view(dtype)


def from_numpy(array):
    """Converts an array to what a variable can be set to."""
    for float_dtype, (bits, dtype) in _OTHER_FLOATS.items():
        if array.dtype == dtype:
            return torch.from_numpy(array.view(f"uint{8 * array.itemsize}").copy()).view(bits).view(float_dtype)
    return array
