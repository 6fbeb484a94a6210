"""Names of Keras that are not public. Other modules use them through this one.

`tests/backends/test_private_names.py` says what breaks without each.
"""

import contextlib
import types

import keras
from keras import ops
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving import saving_lib

__all__ = [
    "EXPORTERS",
    "accumulated_gradient",
    "clipping_by",
    "count_step",
    "extend_metrics_result",
    "flatten_layers",
    "forget_epoch",
    "get_stateless_scope",
    "in_symbolic_scope",
    "innermost",
    "make_stateless",
    "rate_of",
    "resume_fit",
    "row_states_of",
    "start_epoch",
    "steps_of",
    "uses_weight_decay",
    "value_of",
    "wrap_saving",
]

# Modules that trace a layer for a format that cannot hold tables.
EXPORTERS = {
    "keras.src.export.onnx": "ONNX",
    "keras.src.export.openvino": "OpenVINO",
    "keras.src.export.litert": "LiteRT",
    "keras.src.backend.torch.export": "a SavedModel of PyTorch",
}


def flatten_layers(layer):
    """A layer and the layers in it."""
    return layer._flatten_layers()


def wrap_saving(wrap):
    """Replaces the functions by which Keras writes a model, or its weights, to a path: `save(model, filepath, ...)` by `wrap(save)`."""
    for name in ("save_model", "save_weights_only"):
        setattr(saving_lib, name, wrap(getattr(saving_lib, name)))


def value_of(variable):
    """The framework's tensor of a variable, whatever scope is open."""
    return variable._value


def uses_weight_decay(optimizer, variable):
    """Whether weight decay was not switched off for a variable."""
    return optimizer._use_weight_decay(variable)


def steps_of(optimizer):
    """The variable that counts the calls of an optimizer. `iterations` counts its updates, where gradients are accumulated."""
    return optimizer._iterations


def rate_of(optimizer):
    """The variable of a constant learning rate; otherwise a schedule or a function."""
    return optimizer._learning_rate


def innermost(optimizer):
    """Returns the optimizer that wrappers such as `LossScaleOptimizer` have inside."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def row_states_of(optimizer, variable):
    """The variables of an optimizer that have the shape of one that it trains, by name: none before it is built."""
    optimizer = innermost(optimizer)
    trained = getattr(optimizer, "_trainable_variables", [])
    place = next((place for place, one in enumerate(trained) if one is variable), None)
    if place is None:
        return {}
    others = ("_trainable_variables", "_variables", "_accumulated_gradients")
    lists = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) == len(trained) and name not in others
    }
    shape = tuple(variable.shape)
    states = {name.strip("_"): value[place] for name, value in lists.items()}
    return {name: state for name, state in states.items() if tuple(getattr(state, "shape", ())) == shape}


def make_stateless(optimizer):
    """Lets an optimizer that is not built yet run in a `StatelessScope`. TensorFlow's looks for its own variables in those of Keras, which
    have none there."""
    for name in ("_var_key", "assign", "assign_add", "assign_sub"):
        if getattr(type(optimizer), name) is getattr(keras.optimizers.Optimizer, name):
            setattr(optimizer, name, types.MethodType(getattr(BaseOptimizer, name), optimizer))


def count_step(optimizer):
    """Counts a call without gradients."""
    optimizer._iterations.assign_add(1)


def accumulated_gradient(optimizer, variable):
    """The sum of a variable's gradients since the last update."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


@contextlib.contextmanager
def clipping_by(optimizer, clip):
    """Within, the optimizer clips by this factor: the global norm counts rows that it does not see. None: by its own."""
    if clip is None:
        yield
        return
    optimizer._clip_gradients = lambda grads: [g if g is None else g * ops.cast(clip, g.dtype) for g in grads]
    try:
        yield
    finally:
        del optimizer._clip_gradients


def start_epoch(model):
    """The epoch at which `fit` starts, if a callback has set one; otherwise 0."""
    return model._initial_epoch or 0


def forget_epoch(model):
    """Lets the next `fit` start where its own `initial_epoch` says."""
    model._initial_epoch = None


def extend_metrics_result(model, extend):
    """Lets `fit` and `evaluate` report what `extend(model, result)` returns. `result`: a function that computes the results of the metrics.
    Extends a model once."""
    original = model._get_metrics_result_or_logs
    if hasattr(original, "sok_extend"):
        return

    def get_metrics_result_or_logs(logs):
        return extend(model, lambda: original(logs))

    get_metrics_result_or_logs.sok_extend = extend
    model._get_metrics_result_or_logs = get_metrics_result_or_logs


def resume_fit(model, epoch, batches):
    """Lets the `fit` that has just called `on_train_begin` go on in an epoch, after so many of its batches.

    Until then the train function only draws batches. If this `fit` is interrupted meanwhile, the next one trains as ever.
    """
    model._initial_epoch = epoch
    size = model.steps_per_execution
    train_function, history, left = model.train_function, model.history, -(-batches // size)
    if not left:
        return

    def draw(*arguments):
        nonlocal left
        left -= 1
        is_of_this_fit = model.history is history  # each `fit` has its own
        if not left or not is_of_this_fit:
            model.train_function = train_function
        if not is_of_this_fit:
            return train_function(*arguments)
        *state, data = arguments
        if keras.backend.backend() != "torch":  # whose trainer draws them itself
            for _ in range(size):
                next(data)
        return ({}, *state) if state else {}

    model.train_function = draw
