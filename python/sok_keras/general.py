"""Optimizers that the core has no formula for: their own `update_step` updates the rows.

The rows that a step is to change, of all tables, are one long row of floats. It is cut into pieces of one size, so that a compiler sees
fixed shapes whatever the number of rows. `gather` gives a piece, `update_step` computes on it, `scatter` takes the new values; they are in
the records after the core's `apply`. So an optimizer must compute each element of a variable by itself.
"""

import re
import types
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from sok_keras import backend
from sok_keras.backend.private_keras import make_stateless, rate_of, steps_of

# Floats of a piece. Any size is right for any number of rows. A piece costs as much as some thousand floats of arithmetic, and places without
# rows cost as much as others.
_SIZES = tuple(1 << bits for bits in (12, 14, 16, 18, 20))
# The same on a GPU, where the host asks after each piece whether there is another one.
_SIZES_ON_GPU = tuple(1 << bits for bits in (18, 20, 22, 24))
# Pieces in which a step may come before larger ones pay.
_MANY = 4

# Those of Keras' arguments that the wrapper sees to. Two of them would give a copy of the optimizer more states.
_OF_WRAPPER = {
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}

# Hyper-parameters of such types a copy shares with its optimizer, whose config may lack them.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), np.generic, np.ndarray)

_NUM_STEPS, _SHAPE = 3, (4, 3)


class _State(NamedTuple):
    """A state of each element.

    Attributes:
        name: Its name in tables.
        initial: What it starts at.
        is_relative: Whether it starts at the element itself. Tables have what it is above that, which starts at 0.
    """

    name: str
    initial: float
    is_relative: bool = False


class GeneralUpdate:
    """The update of rows by an optimizer's own `update_step`.

    Args:
        optimizer: A Keras optimizer that is not built.

    Raises:
        ValueError: If the optimizer does not compute each element of a variable by itself, from its gradient, its states and
            `iterations`, or if it cannot be made anew by `from_config(get_config())`. The message says why.
    """

    def __init__(self, optimizer: Any) -> None:
        self.states = _states_of(optimizer)
        _check_is_elementwise(optimizer)
        # As it is now: later it is built.
        self._optimizer = _copied(optimizer)
        self._pieces: list = []
        # Floats of the rows, at most, in the last step that was not traced.
        self._last_floats = 0

    @property
    def rule(self) -> dict[str, Any]:
        """The rule in the core: class of the optimizer, and its states."""
        name = keras.saving.get_registered_name(type(self._optimizer))
        states = [{"name": state.name, "initial": state.initial} for state in self.states]
        return {"name": "general", "class": name, "states": states}

    def build(self, gpu: int | None, decays: list[float], row_types: list[str]) -> None:
        """Makes the variables that stand for a piece of the rows and its states.

        Args:
            gpu: Where the tables are; None: on the host.
            decays: The weight decay of the rows of each layer.
            row_types: Types of the rows of all tables.

        Raises:
            ValueError: If a state starts at the row, and rows are rounded or do not decay alike.
        """
        if any(state.is_relative for state in self.states):
            if len(set(decays)) > 1:
                raise ValueError(
                    f"{_name_of_class(self._optimizer)} must decay the rows of all layers, or of none, since its states start at the rows. Received: "
                    f"weight decays {decays}"
                )
            if set(row_types) != {"float32"}:
                raise ValueError(
                    f"{_name_of_class(self._optimizer)} needs rows of float32, since its states start at the rows. Received: {sorted(set(row_types))}"
                )
        sizes = _SIZES if gpu is None else _SIZES_ON_GPU
        self._pieces = [_Piece(self._optimizer, self.states, decays[0], size) for size in sizes]

    def run(self, tables: Any, scalars: Any, after: Any, is_update: Any) -> Any:
        """Computes the new values of all rows that the commit has named. They are written to the records by `apply`.

        Args:
            tables: The optimizer in the core: `handle` and `gpu`, and `cores` with the tables.
            scalars: float32 `(4,)`, as `apply` is given them: learning rate, step from 1 on, is_update, factor.
            after: What `commit` returned.
            is_update: float32 `(1,)`. If it is 0, gradients are only accumulated, so there is nothing to do.

        Returns:
            A float32 scalar that is there when all pieces have been computed.
        """
        is_traced = backend.is_tracing(scalars)
        piece = self._piece_for(_traced_floats(tables) if is_traced else self._last_floats)

        def step(number):
            gradients, *arrays = backend.gather(tables, piece.size, 2 + len(self.states), scalars, after, number)
            return (backend.scatter(tables, number, piece.updated(gradients, arrays, scalars)),)

        number = ops.cast(is_update, "int32")
        if is_traced:
            (number,) = ops.while_loop(lambda number: number[0] > 0, step, (number,))
            return ops.cast(number[0], "float32")
        num_pieces = 0
        try:
            while int(number[0]) > 0:
                num_pieces = int(number[0])
                (number,) = step(number)
        except BaseException:
            backend.native.drop_committed(tables.handle)  # the step ends here, and its gradients with it
            raise
        self._last_floats = num_pieces * piece.size
        return ops.cast(number[0], "float32")

    def _piece_for(self, num_floats: int | None) -> Any:
        """The piece for a step whose rows have so many floats. None: nobody knows."""
        if num_floats is None:
            return self._pieces[-2]
        return next((piece for piece in self._pieces if num_floats <= _MANY * piece.size), self._pieces[-1])


def _traced_floats(tables: Any) -> int | None:
    """How many floats the rows of a step have at most, as far as the calls that were traced tell."""
    counts = [core.most_floats for core in tables.cores]
    return None if None in counts else sum(counts)


class _Piece:
    """A copy of an optimizer for one variable, which stands for a piece of the rows."""

    def __init__(self, optimizer: Any, of_elements: list[_State], decay: float, size: int) -> None:
        self.size = size
        self._is_relative = [False, *(state.is_relative for state in of_elements)]
        self._decay = decay
        self._copy = _copied(optimizer)
        make_stateless(self._copy)
        self._row = keras.Variable(np.zeros(size, "float32"), dtype="float32", name="rows")
        self._states = _built(self._copy, self._row)

    def updated(self, gradients: Any, arrays: list, scalars: Any) -> list:
        """The new row and states after a step.

        Args:
            gradients: float32 `(size,)`.
            arrays: The row and each state, float32 `(size,)`.
            scalars: float32, begins with the learning rate and the step from 1 on.
        """
        variables, count, rate = [self._row, *self._states], steps_of(self._copy), rate_of(self._copy)
        if any(self._is_relative):
            # The row has decayed since the last step, its states have not.
            row = arrays[0] / (1 - self._decay * scalars[0])
            arrays = [row + x if is_relative else x for x, is_relative in zip(arrays, self._is_relative, strict=True)]
        mapping = [*zip(variables, arrays, strict=True), (count, ops.cast(scalars[1], count.dtype) - 1)]
        if isinstance(rate, keras.Variable):
            mapping.append((rate, scalars[0]))
        with keras.StatelessScope(mapping) as scope:
            self._copy.update_step(gradients, self._row, scalars[0])
        new = [scope.get_current_value(variable) for variable in variables]
        return [x - new[0] if is_relative else x for x, is_relative in zip(new, self._is_relative, strict=True)]


# ---- what an optimizer is


def _copied(optimizer: Any) -> Any:
    """An optimizer of the same formula, not built, with a constant learning rate and without what the wrapper sees to."""
    config = optimizer.get_config()
    if "learning_rate" in config:
        config["learning_rate"] = 0.01
    copy = type(optimizer).from_config(config)
    of_keras = vars(keras.optimizers.Optimizer(0.01))
    for name, value in vars(optimizer).items():
        if name not in of_keras and (isinstance(value, _PLAIN) or _is_plain_function(value)):
            setattr(copy, name, value)
    for name, value in _OF_WRAPPER.items():
        setattr(copy, name, value)
    return copy


def _is_plain_function(value: Any) -> bool:
    """Whether it is a function that cannot read the optimizer that it was made in."""
    return isinstance(value, types.FunctionType) and not value.__closure__


def _built(optimizer: Any, variable: Any) -> list:
    """Builds an optimizer for a variable. Returns the variables that it has made."""
    before = {id(each) for each in optimizer.variables}
    optimizer.build([variable])
    return [each for each in optimizer.variables if id(each) not in before]


def _name_of_class(optimizer: Any) -> str:
    cls = type(optimizer)
    return f"{cls.__module__}.{cls.__name__}"


def _refused(optimizer: Any, reason: str) -> ValueError:
    return ValueError(
        "`inner_optimizer` must compute each element of a variable by itself, or be one that the core has a formula for. Received: "
        f"{_name_of_class(optimizer)}, {reason}"
    )


def _states_of(optimizer: Any) -> list[_State]:
    """The states of each element. Raises a `ValueError` if one is no such state."""
    start = np.random.default_rng(0).normal(size=_SHAPE).astype("float32")
    variable = keras.Variable(start, dtype="float32", name="rows")
    try:
        made = _built(_copied(optimizer), variable)
    except Exception as error:
        raise _refused(optimizer, f"which cannot be made anew from its config: {error}") from error
    states: list[_State] = []
    for state in made:
        name = _name_of(state, len(states))
        if tuple(state.shape) != _SHAPE:
            raise _refused(
                optimizer,
                f"whose formula needs the whole variable: its state `{name}` has the shape {tuple(state.shape)}",
            )
        values = backend.to_numpy(state.value)
        if (values == start).all():
            states.append(_State(f"{name}_above_row", 0.0, is_relative=True))
            continue
        if (values != values.flat[0]).any():
            raise _refused(optimizer, f"whose state `{name}` does not start at the same value everywhere")
        states.append(_State(name, float(values.flat[0])))
    if len({state.name for state in states}) < len(states):
        states = [state._replace(name=f"state_{number}") for number, state in enumerate(states)]
    return states


def _name_of(state: Any, number: int) -> str:
    """The name that the optimizer has given a state, without that of the variable."""
    name = state.name.removeprefix("rows_")
    # Keras numbers variables without a name through the process.
    return f"state_{number}" if re.fullmatch(r"variable(_\d+)?", name) else name


def _check_is_elementwise(optimizer: Any) -> None:
    """Raises a `ValueError` unless parts of a variable move as the whole variable does, and its elements in any order."""
    flat = keras.Variable(np.zeros(_SHAPE, "float32").ravel(), dtype="float32", name="rows")
    if len(_built(_copied(optimizer), flat)) != len(_states_of(optimizer)):
        raise _refused(
            optimizer,
            "whose formula needs the whole variable: a variable of one dimension has other states than one of two",
        )
    random = np.random.default_rng(1)
    start, *gradients = random.normal(size=(1 + _NUM_STEPS, *_SHAPE)).astype("float32")
    try:
        whole = _moved_by_keras(optimizer, start, gradients)
        parts = _moved_in_parts(optimizer, start, gradients, random.permutation(start.size))
    except Exception as error:
        raise _refused(optimizer, f"whose `update_step` cannot be called for rows of a table: {error}") from error
    if not np.allclose(whole, parts, rtol=1e-5, atol=1e-5):
        raise _refused(
            optimizer,
            "whose formula needs the whole variable: its `update_step` moves parts of a variable otherwise than `apply` moves the whole. Or it "
            "reads a state after it has changed it",
        )


def _moved_by_keras(optimizer: Any, start: np.ndarray, gradients: list) -> np.ndarray:
    """The values of a variable after some steps of the optimizer as Keras makes them."""
    variable = keras.Variable(start, dtype="float32", name="rows")
    copy = _copied(optimizer)
    copy.build([variable])
    for gradient in gradients:
        copy.apply([ops.convert_to_tensor(gradient)], [variable])
    return backend.to_numpy(variable.value)


def _moved_in_parts(optimizer: Any, start: np.ndarray, gradients: list, order: np.ndarray) -> np.ndarray:
    """The values after the same steps, in another order and in two pieces."""
    rate, decay = float(ops.convert_to_numpy(_copied(optimizer).learning_rate)), optimizer.weight_decay or 0.0
    new = np.empty(start.size, "float32")
    for places in np.split(order, 2):
        states = _states_of(optimizer)
        piece = _Piece(optimizer, states, decay, len(places))
        arrays = [start.ravel()[places], *(np.full(len(places), state.initial, "float32") for state in states)]
        for number, gradient in enumerate(gradients):
            arrays[0] = arrays[0] - arrays[0] * decay * rate
            given = [ops.convert_to_tensor(array, dtype="float32") for array in (gradient.ravel()[places], *arrays)]
            scalars = ops.convert_to_tensor(np.array([rate, number + 1], "float32"))
            arrays = [backend.to_numpy(array) for array in piece.updated(given[0], given[1:], scalars)]
        new[places] = arrays[0]
    return new.reshape(start.shape)
