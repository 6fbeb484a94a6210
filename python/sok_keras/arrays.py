"""The arrays of a dump: the variables of a model and of its optimizers, bit for bit."""

import os
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from sok_keras import backend
from sok_keras.backend import native
from sok_keras.table_optimizers import distinct, variables_of

# Names of element types in safetensors.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}


def step_of(model: keras.Model) -> int:
    """Number of updates that the model's optimizer has made."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(ops.convert_to_numpy(optimizer.iterations))


def arrays_of(model: keras.Model, states: bool) -> list[tuple[str, str, list[int], np.ndarray]]:
    """Name, dtype, shape and bytes of the variables of a model and, with `states`, of its optimizers, without triggers.

    Names sort in the order of variables.

    Raises:
        ValueError: If a variable has a dtype that a dump cannot hold.
    """
    parts = {"model": _dense(model.variables)}
    if states:
        parts |= {part: optimizer.variables for part, optimizer in _optimizers_of(model).items() if optimizer.built}
    return [
        _to_array(f"{part}/{number:05d}/{variable.path}", variable)
        for part, variables in parts.items()
        for number, variable in enumerate(variables)
    ]


def _optimizers_of(model):
    """Returns the optimizers of a model by the first part of their arrays' names: `"optimizer"` for the compiled one, and
    `"optimizer.<attribute>"` for each other one that is an attribute of the model."""
    compiled = getattr(model, "optimizer", None)
    found = {} if compiled is None else {"optimizer": compiled}
    for name, value in vars(model).items():
        if isinstance(value, keras.optimizers.Optimizer) and all(value is not known for known in found.values()):
            found[f"optimizer.{name}"] = value
    return found


def _dense(variables):
    return [variable for variable in variables if not hasattr(variable, "sok_core")]


def _to_array(name, variable):
    value = np.asarray(backend.to_numpy(variable.value))
    if value.dtype.name not in _DTYPES:
        raise ValueError(
            f"A dump holds variables of the dtypes {', '.join(_DTYPES)}. Received: variable {variable.path!r} of dtype "
            f"{keras.backend.standardize_dtype(variable.dtype)}"
        )
    return name, _DTYPES[value.dtype.name], list(value.shape), np.ascontiguousarray(value).reshape(-1).view("uint8")


class Arrays:
    """The arrays of a dump, matched with the variables of a model before any is read.

    Args:
        path: The dump's directory, for error messages.
        tensors: `name`, `dtype` and `shape` of each array, from the manifest.
        model: The model to read into.
        states: Whether the optimizer's variables are read.

    Raises:
        DumpMismatchError: If number, shapes or dtypes differ from those of the model's variables. Integers may have another width,
            since counters differ between backends.
    """

    def __init__(self, path: Any, tensors: list[dict[str, Any]], model: keras.Model, states: bool) -> None:
        self._path = os.fspath(path)
        optimizers = _optimizers_of(model)
        parts = self._parts(tensors, optimizers)
        lost = sorted(part.partition(".")[2] for part in set(parts) - {"model", "optimizer"} - set(optimizers))
        if states and optimizers and lost:
            raise self._mismatch(
                f"the model must have the dump's optimizers as its attributes: expected `model.{lost[0]}`{_OPTIMIZER_HINT}"
            )
        # Pairs of a variable and the name of its array.
        self._pairs: list[tuple[Any, str]] = self._matched("model", _dense(model.variables), parts["model"])
        # Optimizers that are not built yet, with the names of their arrays in order.
        self._unbuilt: list[tuple[Any, list[str]]] = []
        for part, optimizer in optimizers.items() if states else ():
            if not parts[part]:
                continue
            own = _variables_of(optimizer, model, is_only=len(optimizers) == 1)
            pairs = self._matched(part, own, parts[part]) if own is not None else []
            if optimizer.built:
                self._pairs += pairs
            else:
                self._unbuilt.append((optimizer, [tensor["name"] for tensor in parts[part]]))
        self._values: list[tuple[Any, np.ndarray]] = []
        self._waiting: list[tuple[Any, dict[str, np.ndarray]]] = []

    def _parts(self, tensors, optimizers):
        parts: dict[str, list] = {"model": [], **{part: [] for part in optimizers}}
        for tensor in sorted(tensors, key=lambda tensor: tensor["name"]):
            part = tensor["name"].split("/", 1)[0]
            if part != "model" and part.partition(".")[0] != "optimizer":
                raise self._mismatch(f"arrays must be those of a model: got {tensor['name'][:100]!r}")
            parts.setdefault(part, []).append(tensor)
        return parts

    def _mismatch(self, what):
        return native.DumpMismatchError(f"{self._path}: {what}")

    def _matched(self, part, own, tensors):
        shapes = [tuple(tensor["shape"]) for tensor in tensors], [tuple(variable.shape) for variable in own]
        if shapes[0] != shapes[1]:
            pairs = enumerate(zip(*shapes, strict=False))
            first = next((number for number, (a, b) in pairs if a != b), min(map(len, shapes)))
            raise self._mismatch(
                f"the {part}'s variables must agree in number and shapes: expected {len(own)}, the dump has {len(tensors)}; they "
                f"differ from variable {first} on{_OPTIMIZER_HINT if part != 'model' else ''}"
            )
        for variable, tensor in zip(own, tensors, strict=True):
            self._check_dtype(variable, tensor["dtype"])
        return [(variable, tensor["name"]) for variable, tensor in zip(own, tensors, strict=True)]

    def _check_dtype(self, variable, stored):
        own = keras.backend.standardize_dtype(variable.value.dtype)
        dtype = _NAMES.get(stored, stored)
        if dtype != own and not (_is_integer(dtype) and _is_integer(own)):
            raise self._mismatch(
                f"variable {variable.path!r} must be of the dtype that the dump has: expected {dtype}, got {own}"
            )

    def read(self, reader: Any) -> None:
        """Reads and verifies the arrays. Changes no variable.

        Raises:
            CorruptDumpError: If a byte differs from what was written.
            DumpMismatchError: If an integer does not fit its variable.
        """
        stored = {name: _from_bytes(*array) for name, *array in reader.arrays()}
        self._values = [(variable, self._fitted(variable, name, stored[name])) for variable, name in self._pairs]
        self._waiting = [
            (optimizer, {str(number): stored[name] for number, name in enumerate(names)})
            for optimizer, names in self._unbuilt
        ]

    def _fitted(self, variable, name, array):
        dtype = keras.backend.standardize_dtype(variable.value.dtype)
        if not _is_integer(dtype) or array.dtype.name == dtype:
            return array
        limits = np.iinfo(dtype)
        if array.size and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
            raise self._mismatch(f"the integers of {name!r} must fit variable {variable.path!r}, which is {dtype}")
        return array.astype(dtype)

    def assign(self) -> None:
        """Sets the variables. Those of an optimizer that is not built yet are set when it is built."""
        for variable, array in self._values:
            variable.assign(backend.from_numpy(array))
        for optimizer, values in self._waiting:
            wait = getattr(_innermost(optimizer), "load_when_built", None)
            (wait or (lambda values, owner: owner.load_own_variables(values)))(values, optimizer)


_OPTIMIZER_HINT = ". Pass `states=False` to load rows and weights without the optimizer's"


def _is_integer(dtype):
    return dtype in _DTYPES and dtype.startswith(("int", "uint"))


def _from_bytes(dtype, shape, data):
    dtype = _NAMES[dtype]
    return np.frombuffer(data, getattr(ml_dtypes, dtype, dtype)).reshape(shape)


def _innermost(optimizer):
    """Returns the optimizer inside of a `LossScaleOptimizer`."""
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def expected_update(model: Any, table: Any) -> str | None:
    """Returns the update that the model's optimizer will bind to a table, as JSON. None if it binds none, or if that is not known.

    With several optimizers in a model, the first step shows which one trains a table.
    """
    wrappers = [_innermost(optimizer) for optimizer in _optimizers_of(model).values()]
    wrappers = [wrapper for wrapper in wrappers if hasattr(wrapper, "update_for")]
    trigger = table._core.trigger.variable
    is_trained = trigger is None or any(trigger is variable for variable in model.trainable_variables)
    if len(wrappers) != 1 or not is_trained:
        return None
    return table._core.update_of(table, wrappers[0].update_for(trigger))


def _variables_of(optimizer, model, is_only):
    """Returns the variables of an optimizer, or of a copy that is built for the same weights if it is not built yet.

    None if it is not known for which weights it will be built: there are others, or it cannot be copied. Its build checks then.
    """
    if optimizer.built:
        return optimizer.variables
    if not is_only:
        return None
    try:
        twin = type(optimizer).from_config(optimizer.get_config())
    except (TypeError, ValueError):
        return None  # a schedule that Keras cannot copy
    twin.build(_dense(model.trainable_variables))
    cores = [variable.sok_core for variable in model.trainable_variables if hasattr(variable, "sok_core")]
    others = distinct(other for core in cores for other in core.table_optimizers)
    for other in others:
        other.build([])
    return twin.variables + variables_of(others)
