"""Embedding variables as SparseOperationKit has them, for training loops instead of Keras layers."""

import collections
import dataclasses
import datetime
import itertools
import operator
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from sok_keras import backend, distributed, ragged, saved_rows, static_variables
from sok_keras.backend.insertion import Insertion
from sok_keras.core_initializers import core_initializer
from sok_keras.static_variables import Variable, keys_of
from sok_keras.table import Table, as_keys
from sok_keras.table_config import TableConfig
from sok_keras.variable_options import combiner_of, dtype_of, narrowed, table_config
from sok_keras.variable_tables import VariableTables, waiting

_numbers = itertools.count()
_FORMS = (
    "pairs of values and row splits, or dense ids of two axes",
    "sparse or ragged tensors of two axes",
)
# As many snapshots as a table has records of changes since.
_MAX_MARKS = 16


class DynamicVariable(backend.variables.TableVariable):
    """A variable that has a row for each id that it meets: SparseOperationKit's `DynamicVariable`.

    Its rows are in a table of the core. `lookup_sparse` reads it and inserts ids without a row. On TensorFlow it is a `tf.Variable`, which
    `tf.nn.embedding_lookup` reads, too, also in a `tf.function`: a `tf.GradientTape` gives `tf.IndexedSlices`, the distinct keys of each lookup
    and the sum of the gradients of each, which `OptimizerWrapper` applies. On JAX and PyTorch the gradient is that of a trigger: see `triggers`.

    Make the variables of a program before the first of them is used: their tables are made together then, and one native call looks up all.

    Example:

    >>> import tensorflow as tf, sok_keras as sok
    >>> v = sok.DynamicVariable(dimension=3, initializer="13")
    >>> optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    >>> with tf.GradientTape() as tape:
    ...     rows = tf.nn.embedding_lookup(v, tf.constant([0, 1, 2**40], tf.int64))
    ...     loss = tf.reduce_sum(rows)
    >>> gradients = tape.gradient(loss, [v])
    >>> step = optimizer.apply_gradients(zip(gradients, [v]))
    >>> v.shape, v.size.numpy().tolist(), v.table[2**40].tolist()
    (TensorShape([None, 3]), [3, 3], [12.0, 12.0, 12.0])

    Args:
        dimension: Number of floats in a row.
        initializer: `"random"` (None): uniform from -0.05 to 0.05; `"normal"`: with deviation 1; `"uniform"`: from 0 to 1; `"ones"`,
            `"zeros"`, or a number as a string; or a Keras initializer.
        var_type: `"hbm"` (None): a table that grows, on the GPU if the program uses one. `"hybrid"`: rows are in the memory of the host, and if there
            is a `max_capacity`, the least recently used ones go to make room.
        name: Name of the variable, and of its table in dumps.
        constraint: Must be None.
        trainable: Whether a tape watches it.
        key_type: `"int64"` or `"int32"`, or TensorFlow's: what ids may be.
        dtype: Must be `tf.float32`.
        mode: None: the ranks share the rows. `"localized:r"`: rank r has all of them.
        **kwargs: `init_capacity` and `max_capacity`, numbers of rows; `evict_strategy`, `"kLru"` or `"kLfu"`; `filter_ratio`, the probability with
            which an id gets a row in a step in which it comes: see `lookup_sparse`. HierarchicalKV's other options have no effect.

    Raises:
        ValueError: If an argument is another one.
    """

    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str | None = "hbm",
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = "int64",
        dtype: Any = "float32",
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(dimension, bool) or not hasattr(dimension, "__index__") or operator.index(dimension) < 1:
            raise ValueError(f"`dimension` must be a positive integer. Received: dimension={dimension!r}")
        dimension = operator.index(dimension)
        name = self._name_it(dimension, name or f"sok_dynamic_Variable_{next(_numbers)}", trainable)
        self.key_type = dtype_of("key_type", key_type, ("int64", "int32"))
        dtype_of("dtype", dtype, ("float32",))
        if constraint is not None:
            raise ValueError(f"`constraint` must be None. Received: constraint={constraint!r}")
        if kwargs.get("filter_ratio", 1.0) != 1.0 and not trainable:
            raise ValueError(
                f"`filter_ratio` must be 1.0 if `trainable` is False: rows come with training. Received: filter_ratio={kwargs['filter_ratio']!r}"
            )
        self._start(table_config(name, dimension, initializer, var_type or "hbm", mode, kwargs))

    def _name_it(self, dimension: int, name: str, trainable: bool) -> str:
        """Gives the variable a name that no other one has, and returns it."""
        name = _unique(name)
        backend.variables.TableVariable.__init__(self, dimension, name, trainable)
        weakref.finalize(self, _names.discard, name)  # also if an argument is refused later
        self.dimension = dimension
        return name

    def _fill(self) -> None:
        """Gives a new table the rows that it has from the start."""

    def _start(self, config: TableConfig) -> None:
        """Waits for a table. Raises a `ValueError` if the core has no formula for the initializer."""
        core_initializer(config.initializer, config.embedding_dim, config.vocabulary_size)
        self._config = dataclasses.replace(config, trainable=bool(self.trainable))
        self._tables: VariableTables | None = None
        # When changes began to be recorded, and the numbers of these snapshots.
        self._marks: collections.deque[tuple[datetime.datetime, int]] = collections.deque(maxlen=_MAX_MARKS)
        waiting.append(weakref.ref(self))

    @property
    def tables(self) -> VariableTables:
        """The tables that were made together with that of this variable."""
        if self._tables is None:
            if backend.name == "jax" and backend.framework.is_in_trace():  # type: ignore[attr-defined]
                raise ValueError(
                    f"{self.name} must have been used before a function that JAX traces uses it: call `sok_keras.triggers(variables)` first"
                )
            with backend.eager_scope():
                VariableTables.make()
        assert self._tables is not None
        return self._tables

    @property
    def filters(self) -> bool:
        """Whether an id gets its row by chance."""
        return self._config.admission is not None

    @property
    def table(self) -> Table:
        """The `Table` that has the rows."""
        return self.tables.core.tables[self.tables.number_of(self)]

    @property
    def size(self) -> Any:
        """Number of rows on this rank and `dimension`, int32 `(2,)`."""
        table = self.table
        return backend.variables.evaluated(lambda: [table.stats(local=True).size, self.dimension])

    def __repr__(self) -> str:
        size = 0 if self._tables is None else self.table.stats(local=True).size
        return f"<sok_keras.DynamicVariable {self.name!r} shape=(None, {self.dimension}) with {size} rows>"

    def changed_since(self, time: datetime.datetime) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of this rank that have changed, as `incremental_model_dump` does.

        Args:
            time: With a time zone. Rows count that have changed since the last call before it; if there was none, all do.

        Returns:
            Keys `(n,)` of the `key_type`, and rows `(n, dimension)` float32.
        """
        since = max((mark for mark in self._marks if mark[0] <= time), default=(None, None))[1]
        mark = datetime.datetime.now(datetime.timezone.utc), secrets.randbits(63)
        keys, rows, *_ = self.table._ready().changed(since, mark[1])
        self._marks.append(mark)
        return _of_type(keys, self), rows

    def saved_rows(self) -> dict[str, np.ndarray]:
        """Returns the rows of this rank and their optimizer states, for a `tf.train.Checkpoint`."""
        return saved_rows.rows_to_save(self.table)

    def take_saved_rows(self, arrays: dict[str, np.ndarray]) -> None:
        """Replaces all rows by what `saved_rows` has returned. All ranks call it.

        Args:
            arrays: NumPy arrays by name.
        """
        saved_rows.take(self.table, arrays)

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Returns the rows of ids, and inserts those without a row.

        Args:
            indices: Ids of the `key_type` or int32, of any shape.
            name: Ignored.

        Returns:
            `indices.shape + (dimension,)`, float32.
        """
        del name
        indices = self.keys_of(indices)
        if backend.name != "tensorflow":
            return _looked_up([self], [((indices,), None, "each", "sum", None)], None, True)[0]
        return _read([self], [(indices,)], [None], ["each"], ["sum"])[0]

    def keys_of(self, ids: Any) -> Any:
        """Returns ids as a tensor.

        Args:
            ids: Of any shape.

        Raises:
            ValueError: Unless they have the `key_type`, or are int32.
        """
        return keys_of(self, narrowed(ids))


# Names of variables.
_names: set[str] = set()


def _unique(name: str) -> str:
    """Returns a name that no other variable has: names are those of tables in dumps."""
    found = next(
        one for one in itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1))) if one not in _names
    )
    _names.add(found)
    return found


def _picked(values: Sequence, numbers: list[int]) -> list:
    return [values[number] for number in numbers]


def _read(
    variables: Sequence[DynamicVariable],
    inputs: list,
    weights: list,
    axes: Sequence[str],
    combiners: Sequence[str],
    training: bool = True,
) -> list:
    """Looks up rows on TensorFlow, and inserts ids without one if `training`. The tables of the variables were made together."""
    trained = [variable.trainable for variable in variables]
    if any(trained) and not all(trained):
        # The optimizer takes the gradients of a lookup as a whole.
        rows: list = [None] * len(variables)
        for kind in (True, False):
            chosen = [number for number, learns in enumerate(trained) if learns == kind]
            some, (ids, floats) = _picked(variables, chosen), (_picked(inputs, chosen), _picked(weights, chosen))
            found = _read(some, ids, floats, _picked(axes, chosen), _picked(combiners, chosen), training)
            for number, row in zip(chosen, found, strict=True):
                rows[number] = row
        return rows
    tables, insertion = variables[0].tables, Insertion.AT_LOOKUP if training else Insertion.NEVER
    call = tables.call(variables, inputs, weights, axes, combiners, insertion)
    return backend.variables.read(variables, tables.layer.trigger.value, call, tables.steps)  # type: ignore[attr-defined]


def triggers(params: Any) -> list:
    """Returns the triggers of variables, on JAX and PyTorch: the Keras variables by which tables learn.

    A lookup depends on the trigger of its tables. The gradient of the trigger stands for those of all rows that were looked up, and
    `OptimizerWrapper` applies it. Variables that were made together have one trigger. A loop gives the optimizer triggers in place of variables.

    On PyTorch a trigger's `value` has the gradient. On JAX `lookup_sparse` takes the values of triggers as an argument, in which a function is
    differentiated, and `stateless_apply` returns their new values.

    `docs/variables.md` has a loop of each.

    Args:
        params: A `DynamicVariable` or `Variable`, or a list of them.

    Raises:
        NotImplementedError: On TensorFlow, where a tape gives the gradients of variables.
        TypeError: If `params` are no variables of this package.
    """
    if backend.name == "tensorflow":
        raise NotImplementedError(
            "A `tf.GradientTape` gives the gradients of variables. Received: triggers on TensorFlow"
        )
    variables = _as_variables(params)
    tables = {id(variable.tables): variable.tables for variable in variables}
    return [one.layer.trigger for one in tables.values()]


def all2all_dense_embedding(param: DynamicVariable | Variable, indices: Any, *, triggers: Any = None) -> Any:
    """Looks up ids of any shape, without combining rows.

    Example:

    >>> import tensorflow as tf, sok_keras as sok
    >>> v = sok.Variable([[1.0], [2.0], [3.0]])
    >>> sok.all2all_dense_embedding(v, tf.constant([[2, 0]])).numpy().tolist()
    [[[3.0], [1.0]]]

    Args:
        param: The variable. All ranks call it with a `Variable`.
        indices: Ids.
        triggers: As for `lookup_sparse`.

    Returns:
        Rows, `indices.shape + (dimension,)`.

    Raises:
        TypeError: If `param` is no variable of this package.
        ValueError: If ids have another dtype.
        InvalidArgumentError: If a `Variable` has no such row; with many ranks a `SokError`, or in a graph an `UnknownError`, on all of them.
    """
    _check_variable(param)
    if backend.name != "tensorflow":
        inputs = ((param.keys_of(indices),), None, "each", "sum", None)
        return _looked_up([param], [inputs], _values_of(triggers, 1)[0], True)[0]
    _refuse_triggers(triggers)
    if isinstance(param, DynamicVariable):
        return param.sparse_read(indices)
    return static_variables.read(param, keys_of(param, indices))


def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    *,
    hotness: Any = None,
    triggers: Any = None,
    training: bool = True,
) -> Any:
    """Looks up ids in several variables and combines their rows, as `tf.nn.embedding_lookup_sparse` does for one.

    One native call looks up all variables whose tables were made together. Ids without a row get one; a `Variable` has a fixed number of rows, and another id is an error.

    Example:

    >>> import tensorflow as tf, sok_keras as sok
    >>> v = sok.DynamicVariable(dimension=2, initializer="1")
    >>> sok.lookup_sparse(v, tf.ragged.constant([[3, 5], [], [3]], dtype=tf.int64), combiners="sum").numpy().tolist()
    [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]

    Args:
        params: A `DynamicVariable` or `Variable`, or a list of them; one may come several times.
        sp_ids: For each variable ids of two axes. On TensorFlow a `tf.SparseTensor` with its values in order, or a `tf.RaggedTensor`. On JAX and
            PyTorch a pair of values `(n,)` and row splits `(rows + 1,)`, int32 or int64, or dense ids `(rows, hotness)`, of which -1 stands for none.
        sp_weights: For each variable None, or weights of the form of the ids; for a pair, those of its values. None: all are 1. They have
            gradients on JAX and PyTorch, if the variable is trainable.
        combiners: For each variable `"sum"`, `"mean"` (also `"average"`) or `"sqrtn"`, in any case. None: `"mean"`.
        use_low_frequency_filter: Must be True in training if a variable has a `filter_ratio` below 1: an id without a row gets one with this probability
            when the optimizer applies the step. Until then it is a row of zeros, which `"mean"` counts. Its gradient is applied if it gets its row in
            this step, and dropped if not. Other variables have a ratio of 1.
        hotness: Not needed; accepted for programs that were written for SparseOperationKit 1.
        triggers: On JAX and PyTorch: the values of `triggers(params)`, in their order. A function that JAX traces must be given them. None:
            their present values.
        training: Whether ids without a row get one. If not, they answer as those of a table in inference.

    Returns:
        A tensor `(rows, dimension)`, or a list of them if `params` is a list. A row without ids is zeros.

    Raises:
        TypeError: If `params` are no variables of this package, or ids are of another form.
        ValueError: If the lists are of different lengths, or a combiner or the dtype of ids is another one. If `triggers` are given on TensorFlow, or
            not given in a function that JAX traces.
    """
    del hotness
    is_list, variables = isinstance(params, list | tuple), _as_variables(params)
    _check_filter(variables, use_low_frequency_filter, training)
    given = {"sp_ids": sp_ids, "sp_weights": sp_weights, "combiners": combiners}
    lists = {name: _as_list(name, value, is_list, len(variables)) for name, value in given.items()}
    rows: list = [None] * len(variables)
    groups: dict[VariableTables | None, list[int]] = {}
    for number, variable in enumerate(variables):
        tables = variable.tables if isinstance(variable, DynamicVariable) else None
        groups.setdefault(tables, []).append(number)
    values = _values_of(triggers, len(groups))
    if backend.name == "tensorflow":
        _refuse_triggers(triggers)
    for numbers, value in zip(groups.values(), values, strict=True):
        chosen = [[values[number] for number in numbers] for values in (variables, *lists.values())]
        of_group = _lookup_together(chosen[0], chosen[1], chosen[2], chosen[3], value, training)
        for number, row in zip(numbers, of_group, strict=True):
            rows[number] = row
    return rows if is_list else rows[0]


def _as_variables(params: Any) -> list:
    variables = list(params) if isinstance(params, list | tuple) else [params]
    if not variables or not all(isinstance(variable, DynamicVariable | Variable) for variable in variables):
        raise TypeError(
            f"`params` must be `sok_keras.DynamicVariable`s or `sok_keras.Variable`s. Received: {params!r:.200}"
        )
    return variables


def _check_filter(variables: list, use_low_frequency_filter: bool, training: bool) -> None:
    for variable in variables:
        if isinstance(variable, DynamicVariable) and variable.filters and training and not use_low_frequency_filter:
            raise ValueError(
                f"`use_low_frequency_filter` must be True for {variable.name}, whose `filter_ratio` is below 1. Received: False"
            )


def _values_of(triggers: Any, length: int) -> list:
    """Returns the value of the trigger of each of so many sets of tables, or None for its present one."""
    if triggers is None:
        return [None] * length
    values = list(triggers) if isinstance(triggers, list | tuple) else [triggers]
    if len(values) != length:
        raise ValueError(
            f"`triggers` must be the values of the {length} triggers of `params`. Received: {len(values)} values"
        )
    return [getattr(value, "value", value) for value in values]


def _refuse_triggers(triggers: Any) -> None:
    if triggers is not None:
        raise ValueError("`triggers` must be None on TensorFlow, where a tape gives the gradients of variables")


def _as_list(name: str, value: Any, is_list: bool, length: int) -> list:
    if value is None or not is_list:
        return [value[0] if isinstance(value, list | tuple) and len(value) == 1 else value] * length
    if name == "combiners" and isinstance(value, str):
        return [value] * length
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ValueError(f"`{name}` must be a list as long as `params`, {length}. Received: {value!r:.200}")
    return list(value)


def _lookup_together(variables: list, ids: list, weights: list, combiners: list, trigger: Any, training: bool) -> list:
    bags = [_bags_of(variable, value) for variable, value in zip(variables, ids, strict=True)]
    names = [combiner_of(value) for value in combiners]
    if backend.name != "tensorflow":
        floats = [_same_weights(*pair) for pair in zip(weights, bags, strict=True)]
        of_bags = zip(bags, floats, names, strict=True)
        given = [(one.inputs, weight, one.axis, name, one.padding_key) for one, weight, name in of_bags]
        return _looked_up(variables, given, trigger, training)
    floats = [_flat_weights(*pair) for pair in zip(weights, ids, strict=True)]
    if isinstance(variables[0], Variable):
        return static_variables.combined(variables, bags, floats, names)
    inputs = [(one.ids, one.row_splits) for one in bags]
    return _read(variables, inputs, floats, ["ragged"] * len(bags), names, training)


def _looked_up(variables: list, inputs: list, trigger: Any, training: bool) -> list:
    """Looks up rows of variables whose tables were made together, on JAX and PyTorch.

    Args:
        variables: The variables.
        inputs: For each a tuple of tensors, weights or None, the axis, the combiner, and the id that stands for none.
        trigger: The value of their trigger, or None for its present one.
        training: Whether ids without a row get one.
    """
    tables = variables[0].tables
    rows: list = [None] * len(variables)
    if trigger is None:
        trigger = tables.present_trigger()
    for learns in (True, False):
        chosen = [number for number, variable in enumerate(variables) if variable.trainable == learns]
        if not chosen:
            continue
        tensors, weights, axes, combiners, padding_keys = zip(*(inputs[number] for number in chosen), strict=True)
        plan = tables.plan([variables[number] for number in chosen], list(weights), axes, combiners, padding_keys)
        insertion = Insertion.AT_LOOKUP if training else Insertion.NEVER
        found = tables.lookup(plan, list(tensors), list(weights), trigger, learns, insertion)
        for number, row in zip(chosen, found, strict=True):
            rows[number] = row
    return rows


def _bags_of(variable: DynamicVariable | Variable, ids: Any) -> Any:
    if not backend.has_wide_integers():
        ids = tuple(map(narrowed, ids)) if isinstance(ids, tuple | list) else narrowed(ids)
    bags = backend.variables.bags_of(ids)
    if bags is None:
        raise TypeError(f"`sp_ids` must be {_FORMS[backend.name == 'tensorflow']}. Received: {ids!r:.200}")
    keys_of(variable, bags.ids)
    return bags


def _flat_weights(weights: Any, ids: Any) -> Any:
    if weights is None:
        return None
    if type(weights) is not type(ids):
        raise TypeError(f"`sp_weights` must be sparse or ragged tensors, as the ids are. Received: {weights!r:.200}")
    message = "`sp_weights` must have values in the places of the ids. Received: others"
    return keras.ops.cast(ragged.flat_numbers(ids, weights, message), "float32")


def _same_weights(weights: Any, bags: Any) -> Any:
    """Returns weights of the form of ids, on JAX and PyTorch."""
    if weights is None:
        return None
    weights = keras.ops.cast(keras.ops.convert_to_tensor(weights), "float32")
    if tuple(weights.shape) != tuple(bags.ids.shape):
        raise ValueError(
            f"`sp_weights` must have the shape of the ids, {tuple(bags.ids.shape)}. Received: {tuple(weights.shape)}"
        )
    return weights


def with_triggers(gradients: list, variables: list) -> tuple[list, list]:
    """Hands the gradients of `DynamicVariable`s to their tables.

    Returns:
        Gradients and variables, with the ticket and the trigger of tables in place of their variables.

    Raises:
        ValueError: If a gradient is that of another variable.
    """
    kept: list[tuple] = []
    groups: dict[VariableTables, list[tuple]] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        other = getattr(gradient, "variable", variable)
        if other is not variable:
            raise ValueError(
                f"Each gradient must be that of the variable beside it. Received: the gradient of {other.name} for {variable.name}"
            )
        if isinstance(variable, DynamicVariable):
            groups.setdefault(variable.tables, []).append((gradient, variable))
        else:
            kept.append((gradient, variable))
    for tables, pairs in groups.items():
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        kept.append((_ticket_of(tables, given) if given else None, tables.layer.trigger))
    return [gradient for gradient, _ in kept], [variable for _, variable in kept]


def _ticket_of(tables: VariableTables, given: list) -> Any:
    if backend.name != "tensorflow":
        raise TypeError(
            "On JAX and PyTorch an optimizer takes `sok_keras.triggers(variables)` and their gradients. Received: the variable "
            f"{given[0][1].name}"
        )
    ticket, given = backend.variables.taken(given, tables.steps)  # type: ignore[attr-defined]
    tables.steps.end()
    for gradient, variable in given:
        if not hasattr(gradient, "indices"):
            raise TypeError(
                f"The gradient of {variable.name} must be `tf.IndexedSlices`. Received: {type(gradient).__name__}"
            )
        num_rows, columns = backend.variables.shape_of_slices(gradient)  # type: ignore[attr-defined]
        if num_rows not in (None, -1) or columns not in (None, variable.dimension):
            raise ValueError(
                f"The gradient of {variable.name} must have rows of {variable.dimension} floats, and not be that of a variable with a fixed number of rows. "
                f"Received: `tf.IndexedSlices` of {num_rows} rows of {columns} floats"
            )
    # A row that has gone since the forward pass gets no gradient. An id that gets its row by chance may get it now.
    for filters, insertion in ((False, Insertion.NEVER), (True, Insertion.AT_COMMIT)):
        pairs = [(gradient, variable) for gradient, variable in given if variable.filters == filters]
        if not pairs:
            continue
        inputs = [(variable.keys_of(gradient.indices),) for gradient, variable in pairs]
        variables, none = [variable for _, variable in pairs], [None] * len(pairs)
        call = tables.call(variables, inputs, none, ["each"] * len(pairs), ["sum"] * len(pairs), insertion)
        rows = [keras.ops.convert_to_tensor(gradient.values) for gradient, _ in pairs]
        found = call.push(call.lookup(tables.layer.trigger.value)[1], rows)
        ticket = found if ticket is None else ticket + found
    return ticket


def filter_variables(variables: Sequence) -> tuple[list, list]:
    """Separates `DynamicVariable`s and `Variable`s from others, in their order.

    Args:
        variables: Variables of any kind.

    Returns:
        The variables of this package, and the other variables.
    """
    own = [variable for variable in variables if isinstance(variable, DynamicVariable | Variable)]
    return own, [variable for variable in variables if not isinstance(variable, DynamicVariable | Variable)]


def export(var: DynamicVariable | Variable) -> tuple[Any, Any]:
    """Copies the keys and rows that this rank has of a variable.

    Args:
        var: The variable.

    Returns:
        Keys `(n,)`, ascending, of the variable's `key_type`; and rows `(n, dimension)` float32. The keys of a `Variable` are the numbers of its rows.
        NumPy arrays on JAX without x64, whose arrays do not hold all keys.
    """
    _check_variable(var)
    if isinstance(var, Variable):
        return keras.ops.convert_to_tensor(var.own_ids()), keras.ops.convert_to_tensor(var)
    contents = var.table.export(local=True)
    keys = _of_type(contents.keys, var)
    if not backend.has_wide_integers():
        return keys, contents.rows
    return keras.ops.convert_to_tensor(keys), keras.ops.convert_to_tensor(contents.rows)


def assign(var: DynamicVariable | Variable, indices: Any, values: Any) -> DynamicVariable | Variable:
    """Overwrites rows of a variable, and inserts keys without one. With many ranks all call it; rows go to the owners of their keys.

    Args:
        var: The variable.
        indices: Keys `(n,)`; those of a `Variable` are the numbers of its rows.
        values: Rows `(n, dimension)`.

    Returns:
        The variable.

    Raises:
        ValueError: If a key is outside of the variable's `key_type`, or a `Variable` has no such row.
        RankError: If another rank raises an error.
    """
    _check_variable(var)
    error: Exception | None = None
    try:
        keys, rows = as_keys(keras.ops.convert_to_numpy(indices)), keras.ops.convert_to_numpy(values)
        _of_type(keys, var)
    except (TypeError, ValueError) as raised:
        error = raised
    distributed.agree(error)
    if isinstance(var, Variable):
        var.assign_rows(keys, rows)
    else:
        var.table.assign(keys, rows)
    return var


def incremental_model_dump(sok_vars: Sequence[DynamicVariable], time_threshold: Any) -> tuple[list, list]:
    """Copies the rows of all ranks that were made or changed since a time, as SparseOperationKit does.

    The first call of a variable gives all its rows, and each call begins to record changes, which takes 4 bytes a row. A call gives the rows
    that have changed since the newest call at or before `time_threshold`. Rows that have gone are not told of; `dump_increment` has them.

    Example:

    >>> import tensorflow as tf, datetime, sok_keras as sok
    >>> v = sok.assign(sok.DynamicVariable(2), [1, 2], np.zeros((2, 2)))
    >>> keys, rows = sok.incremental_model_dump([v], datetime.datetime.now(datetime.timezone.utc))
    >>> threshold = datetime.datetime.now(datetime.timezone.utc)
    >>> v = sok.assign(v, [2], np.ones((1, 2)))
    >>> keys, rows = sok.incremental_model_dump([v], threshold)
    >>> keys[0].tolist(), rows[0].tolist()
    ([2], [[1.0, 1.0]])

    Args:
        sok_vars: Variables. With many ranks all call it.
        time_threshold: A `datetime` with a time zone, or a list with one for each variable.

    Returns:
        For each variable its keys `(n,)`, and for each its rows `(n, dimension)`, as NumPy arrays; those of rank 0 come first.

    Raises:
        TypeError: If a variable is not a `DynamicVariable`, or a time is not a `datetime` with a time zone.
        ValueError: If the list is of another length.
    """
    times = list(time_threshold) if isinstance(time_threshold, list | tuple) else [time_threshold] * len(sok_vars)
    if len(times) != len(sok_vars):
        raise ValueError(
            f"`time_threshold` must have a time for each of {len(sok_vars)} variables. Received: {len(times)}"
        )
    for variable, time in zip(sok_vars, times, strict=True):
        if not isinstance(variable, DynamicVariable):
            raise TypeError(f"`sok_vars` must be `sok_keras.DynamicVariable`s. Received: {type(variable).__name__}")
        if not isinstance(time, datetime.datetime) or time.tzinfo is None:
            raise TypeError(f"`time_threshold` must be a `datetime` with a time zone. Received: {time!r}")
    found = [variable.changed_since(time) for variable, time in zip(sok_vars, times, strict=True)]
    return [keys for keys, _ in found], [rows for _, rows in found]


def _of_type(keys: np.ndarray, var: DynamicVariable | Variable) -> np.ndarray:
    """Returns keys in the type of a variable's keys."""
    narrow = keys.astype(var.key_type)
    if (narrow != keys).any():
        raise ValueError(f"Keys of {var.name} must be {var.key_type}. Received: {keys[narrow != keys][0]}")
    return narrow


def _check_variable(var: Any) -> None:
    if not isinstance(var, DynamicVariable | Variable):
        raise TypeError(
            f"`var` must be a `sok_keras.DynamicVariable` or `sok_keras.Variable`. Received: {type(var).__name__}"
        )
