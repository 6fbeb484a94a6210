"""The calls of a training step as TensorFlow ops.

The ops are written in Rust (`crates/python/src/bridge/tensorflow.rs`). They are stateful: inside a `tf.function`
they run in program order, and none is dropped or merged.
"""

import importlib.util
import types

import numpy as np
import tensorflow as tf

from sok_keras.backend.insertion import Insertion
from sok_keras.backend.leaving import note_thread, watch_exit
from sok_keras.backend.private_tensorflow import op_wrappers, should_record_backprop

NATIVE = "sok_keras._native"


def _load_ops():
    """Returns Python wrappers of the ops in the native module.

    `tf.load_op_library` finds the ops that a library registers while it is loaded. So TensorFlow must load the native module first; a
    later `import` uses the same file, already loaded.
    """
    ops = tf.load_op_library(importlib.util.find_spec(NATIVE).origin)
    return ops if hasattr(ops, "sok_lookup") else _late_ops()


def _late_ops():
    """Does the same for a native module that was imported before. TensorFlow has no public API for that."""
    importlib.import_module(NATIVE).register_tensorflow()
    calls = ("Lookup", "Push", "Commit", "Gather", "Scatter", "Apply", "SumGradients")
    names = ["SokMergeGradients", *(f"Sok{device}{call}" for device in ("", "Gpu") for call in calls)]
    ops = types.ModuleType("sok_keras_ops")
    exec(op_wrappers(names), ops.__dict__)
    ops._IS_TENSORFLOW_PLUGIN = True  # AutoGraph leaves it as it is
    return ops


_ops = _load_ops()
watch_exit()


def lookup(plan, trigger, learns, inputs, weights, insertion):
    """Rows of each feature, differentiable in `trigger` and `weights`.

    The gradient of `trigger` is the ticket of the push that the backward pass makes. A lookup that cannot be differentiated later
    keeps nothing.

    Args:
        plan: The layer's plan: has `handle` and `output_shapes(inputs)`.
        trigger: The layer's trigger or its value, `(64, 2)` float32.
        learns: Whether gradients are computed. If not, nothing is differentiable.
        inputs: A tuple for each feature: its ids, then its row splits if it is ragged.
        weights: A float32 tensor or None for each feature.
        insertion: When keys without a row get one. `AT_COMMIT` has an effect only if a tape records, which is decided when a
            `tf.function` is traced.

    Returns:
        A list with a tensor for each feature, of the plan's `row_dtype`.
    """
    groups = zip(inputs, weights, strict=True)
    tensors = [tf.convert_to_tensor(tensor) for group in groups for tensor in _flat(*group)]
    trigger = tf.convert_to_tensor(trigger)  # a tape watches a variable once it is read
    if not learns:
        save, (trigger, *tensors) = False, [tf.stop_gradient(tensor) for tensor in (trigger, *tensors)]
    else:
        # An eager call outside of a tape cannot be differentiated later. A graph can.
        save = should_record_backprop([trigger, *tensors]) or (
            insertion == Insertion.AT_LOOKUP and not tf.executing_eagerly()
        )
    _, rows = _lookup(plan, trigger, inputs, tensors, insertion, save)
    return rows


def lookup_to_push(plan, trigger, inputs, weights, insertion):
    """Rows of each feature as `lookup` gives them, and the number of the lookup, by which `push` takes their gradients."""
    groups = zip(inputs, weights, strict=True)
    tensors = [tf.stop_gradient(tensor) for group in groups for tensor in _flat(*group)]
    number, rows = _lookup(plan, tf.stop_gradient(trigger), inputs, tensors, insertion, True)
    return rows, number


def _lookup(plan, trigger, inputs, tensors, insertion, save):
    note_thread()
    op = _ops.sok_gpu_lookup if plan.gpu is not None else _ops.sok_lookup
    number, rows = op(
        tensors=tensors,
        trigger=trigger,
        N=len(inputs),
        plan=plan.handle,
        insertion=int(insertion),
        save=save,
        dtype=plan.row_dtype,
    )
    if not tf.executing_eagerly():
        for row, shape in zip(rows, plan.output_shapes(inputs), strict=True):
            row.set_shape(shape)
    return number, list(rows)


@tf.RegisterGradient("SokGpuLookup")
@tf.RegisterGradient("SokLookup")
def _push(op, _, *gradients):
    """Hands the gradients of the rows to the tables. The trigger's gradient is the ticket.

    If the lookup saved nothing, because its graph was traced outside of a tape, the push fails when it runs. It cannot raise here:
    TensorFlow builds the backward graph as soon as a function is called under a tape.
    """
    *tensors, _ = op.inputs
    weights = [tensor for tensor in tensors if tensor.dtype == tf.float32]
    call = _ops.sok_gpu_push if op.type == "SokGpuLookup" else _ops.sok_push
    ticket, weight_gradients = _pushed(call, op.get_attr("plan"), op.outputs[0], gradients, weights)
    for gradient, weight in zip(weight_gradients, weights, strict=True):
        gradient.set_shape(weight.shape)
    found = iter(weight_gradients)
    return [*(next(found) if tensor.dtype == tf.float32 else None for tensor in tensors), ticket]


def push(plan, number, gradients, weights):
    """Hands the gradients of the rows of a lookup to the tables. Returns the ticket.

    Args:
        plan: That of the lookup.
        number: The lookup's number.
        gradients: For each feature those of its rows.
        weights: Those of the lookup: a float32 tensor or None for each feature.
    """
    call = _ops.sok_gpu_push if plan.gpu is not None else _ops.sok_push
    given = [weight for weight in weights if weight is not None]
    return _pushed(call, plan.handle, number, gradients, given)[0]


def _pushed(call, plan, number, gradients, weights):
    gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]  # tf.gather gives IndexedSlices
    ticket, weight_gradients = call(number=number, gradients=gradients, weights=weights, plan=plan)
    ticket.set_shape((64, 2))
    return ticket, weight_gradients


def merge_gradients(of_variables):
    """Returns distinct ids of each variable, int64 `(k,)`, and the sums of their gradients, `(k, dim)`. Computed on the host.

    Args:
        of_variables: For each a tuple of inputs, weights, combiner and gradients, as for `tensorflow_variables.merged_bags`.
    """
    forms, tensors = [], []
    for inputs, weights, combiner, gradients in of_variables:
        combined = len(inputs) > 1 and 1 + ("sum", "mean", "sqrtn").index(combiner)
        forms.append([int(combined), int(weights is not None)])
        tensors += [tensor for tensor in (*inputs, weights, gradients) if tensor is not None]
    keys, rows = _ops.sok_merge_gradients(forms=np.asarray(forms, "int32"), tensors=tensors, N=len(forms))
    if not tf.executing_eagerly():
        for one, row, (*_, gradients) in zip(keys, rows, of_variables, strict=True):
            one.set_shape((None,))
            row.set_shape((None, gradients.shape[-1]))
    return list(zip(keys, rows, strict=True))


def commit(tables, is_update, tickets):
    """Squared norm of all merged gradients that `tickets` name: a float32 scalar."""
    op = _ops.sok_gpu_commit if tables.gpu is not None else _ops.sok_commit
    sum_of_squares = op(is_update=is_update, tickets=tickets, optimizer=tables.handle)
    sum_of_squares.set_shape(())
    return sum_of_squares


def gather(tables, size, num_arrays, scalars, after, piece):
    """Arrays `(size,)` of a piece of the rows to update: gradients, rows, and each state. `after`: what must be computed before."""
    op = _ops.sok_gpu_gather if tables.gpu is not None else _ops.sok_gather
    arrays = op(scalars=scalars, after=after, piece=piece, N=num_arrays, optimizer=tables.handle, size=size)
    for array in arrays:
        array.set_shape((size,))
    return list(arrays)


def scatter(tables, piece, arrays):
    """Takes the new rows and states of a piece; gives the number of the next one, `(1,)` int32, or 0."""
    op = _ops.sok_gpu_scatter if tables.gpu is not None else _ops.sok_scatter
    following = op(piece=piece, arrays=arrays, optimizer=tables.handle)
    following.set_shape((1,))
    return following


def apply(tables, scalars, sum_of_squares, triggers):
    """Updates the rows; gives the new value of each trigger."""
    op = _ops.sok_gpu_apply if tables.gpu is not None else _ops.sok_apply
    new_triggers = op(scalars=scalars, sum_of_squares=sum_of_squares, triggers=triggers, optimizer=tables.handle)
    for trigger in new_triggers:
        trigger.set_shape((64, 2))
    return list(new_triggers)


def sum_gradients(gradients, then, after=()):
    """Sums a vector over all ranks. Returns the sums, and `then`, which is there only after them. `after`: what must be computed before."""
    on_gpus = importlib.import_module(NATIVE).sums_on_gpus()
    op = _ops.sok_gpu_sum_gradients if on_gpus else _ops.sok_sum_gradients
    with tf.control_dependencies(after):
        sums, later = op(gradients=gradients, after=then)
    sums.set_shape(gradients.shape)
    later.set_shape(then.shape)
    return sums, later


def prefetch(plan, inputs):
    """Does nothing: TensorFlow does not say where a tensor is on a GPU."""


def watch_gradients(variables, divisor):
    """Nothing can start during the backward pass: TensorFlow runs calls in the order of one stream."""
    del variables, divisor


def bind_gpu(number):
    """Makes this process use one of the GPUs that it sees."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[number % len(gpus)], "GPU")


def _flat(inputs, weights):
    return inputs if weights is None else (*inputs, weights)


def is_dense(value):
    """Whether a tensor is of a known form. All forms of TensorFlow are."""
    del value
    return True


def gpu(required=False):
    """Number of the GPU that models run on; None for the CPU. `required`: whether the user requires a GPU.

    Unless required, it is None if TensorFlow does not export the two symbols that lead to its GPU stream.
    """
    if not required and not importlib.import_module(NATIVE).tensorflow_has_stream():
        return None
    if not tf.config.list_logical_devices("GPU"):
        return None
    # TensorFlow counts the GPUs that a process may use from 0. The driver counts all that the process sees.
    return int(tf.config.get_visible_devices("GPU")[0].name.rpartition(":")[2])


def constant(function):
    """Marks a function whose result a compiler may take as a constant."""
    return function


def is_compiling():
    """Whether a compiler traces the caller, which then must not call the core."""
    return False


def is_tracing(value):
    """Whether what is called now becomes a graph."""
    del value
    return not tf.executing_eagerly()


def has_wide_integers():
    """Whether tensors hold 64-bit ids."""
    return True


def after(done, gradients):
    """A scope in which variables are assigned after `done` is computed, so that a failed commit changes no variable."""
    del gradients
    return tf.control_dependencies(done)


def eager_scope():
    """A scope in which assignments happen now, also while a step is traced."""
    return tf.init_scope()


def wait(trigger):
    """Does nothing: a call on the host has ended when it returns, and tables on a GPU wait themselves."""
    del trigger


def at_hand(value, fetches=False):
    """A value as a NumPy array; None if it is traced."""
    del fetches  # a value is always at hand
    if isinstance(value, tf.Variable | tf.Tensor):
        return value.numpy() if tf.executing_eagerly() and hasattr(value, "numpy") else None
    return value if isinstance(value, np.ndarray) else None


def to_numpy(value):
    """A value of a variable, bit for bit."""
    return np.asarray(value)


def from_numpy(array):
    """Converts an array to what a variable can be set to."""
    return array
