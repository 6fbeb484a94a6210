"""Embedding variables as SparseOperationKit has them, for training loops with `tf.GradientTape` instead of Keras layers."""

import collections
import datetime
import itertools
import operator
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from sok_keras import backend, distributed, ragged, static_variables
from sok_keras.backend.insertion import Insertion
from sok_keras.feature_config import FeatureConfig
from sok_keras.layers.distributed_embedding import DistributedEmbedding
from sok_keras.static_variables import Variable, keys_of
from sok_keras.table import Table, as_keys
from sok_keras.table_config import TableConfig

_COMBINERS = {"sum": "sum", "mean": "mean", "average": "mean", "sqrtn": "sqrtn"}
# Options of HierarchicalKV that have no effect here: the memory of a table and its index is the core's.
_WITHOUT_EFFECT = ("max_hbm_for_vectors", "max_load_factor", "max_bucket_size", "block_size", "device_id", "io_by_cpu")
_numbers = itertools.count()
# As many snapshots as a table has records of changes since.
_MAX_MARKS = 16


class DynamicVariable(backend.variables.TableVariable):
    """A variable of TensorFlow that has a row for each id that it meets: SparseOperationKit's `DynamicVariable`.

    Its rows are in a table of the core. `lookup_sparse` and `tf.nn.embedding_lookup` read it and insert ids without a row, also in a
    `tf.function`. A `tf.GradientTape` gives `tf.IndexedSlices`: the distinct keys of each lookup, and the sum of the gradients of each.
    `OptimizerWrapper` applies them.

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
        var_type: `"hbm"`: a table that grows, on the GPU if the program uses one. `"hybrid"`: rows are in the memory of the host, and if there
            is a `max_capacity`, the least recently used ones go to make room.
        name: Name of the variable, and of its table in dumps.
        constraint: Must be None.
        trainable: Whether a tape watches it.
        key_type: `tf.int64` or `tf.int32`: what ids may be.
        dtype: Must be `tf.float32`.
        mode: None: the ranks share the rows. `"localized:r"`: rank r has all of them.
        **kwargs: `init_capacity` and `max_capacity`, numbers of rows; `evict_strategy`, `"kLru"` or `"kLfu"`. HierarchicalKV's other options
            have no effect.

    Raises:
        NotImplementedError: On another backend than TensorFlow.
        ValueError: If an argument is another one.
    """

    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str = "hbm",
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
        name = _unique(name or f"sok_dynamic_Variable_{next(_numbers)}")
        super().__init__(dimension, name, trainable)
        weakref.finalize(self, _names.discard, name)  # also if an argument is refused below
        self.dimension = dimension
        self.key_type = _dtype("key_type", key_type, ("int64", "int32"))
        _dtype("dtype", dtype, ("float32",))
        if constraint is not None:
            raise ValueError(f"`constraint` must be None. Received: constraint={constraint!r}")
        self._config = _table_config(name, dimension, initializer, var_type, mode, kwargs)
        self._tables: _Tables | None = None
        # When changes began to be recorded, and the numbers of these snapshots.
        self._marks: collections.deque[tuple[datetime.datetime, int]] = collections.deque(maxlen=_MAX_MARKS)
        _waiting.append(weakref.ref(self))

    @property
    def tables(self) -> "_Tables":
        """The tables that were made together with that of this variable."""
        if self._tables is None:
            with backend.eager_scope():
                _Tables.make()
        assert self._tables is not None
        return self._tables

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
        """Returns keys and rows as `incremental_model_dump` does."""
        since = max((mark for mark in self._marks if mark[0] <= time), default=(None, None))[1]
        mark = datetime.datetime.now(datetime.timezone.utc), secrets.randbits(63)
        keys, rows, *_ = self.table._ready().changed(since, mark[1])
        self._marks.append(mark)
        return _of_type(keys, self), rows

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Returns the rows of ids, `indices.shape + (dimension,)`, and inserts those without a row."""
        del name
        indices = self.keys_of(indices)

        def gradient(upstream: Any) -> Any:
            return backend.variables.merged(indices, upstream, self.dimension)

        return _read([self], [(indices,)], [None], ["each"], ["sum"], [gradient])[0]

    def keys_of(self, ids: Any) -> Any:
        """Returns ids as a tensor. Raises a `ValueError` unless they have the type of keys."""
        return keys_of(self, ids)


# Variables without tables.
_waiting: list[weakref.ref] = []
# Names of variables.
_names: set[str] = set()


def _unique(name: str) -> str:
    """Returns a name that no other variable has: names are those of tables in dumps."""
    found = next(
        one for one in itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1))) if one not in _names
    )
    _names.add(found)
    return found


class _Tables:
    """The tables of variables that were made before one of them was used. One native call looks them all up."""

    def __init__(self, variables: list[DynamicVariable]) -> None:
        configs = [variable._config for variable in variables]
        self._numbers = {id(variable): number for number, variable in enumerate(variables)}
        self.layer = DistributedEmbedding([FeatureConfig(config.name, config) for config in configs], name="variables")
        self.layer.build()
        self.core = self.layer._core

    @classmethod
    def make(cls) -> None:
        """Makes the tables of all variables that have none yet."""
        variables = [variable for variable in (reference() for reference in _waiting) if variable is not None]
        by_storage: dict[str, list[DynamicVariable]] = {variable._config.storage: [] for variable in variables}
        for variable in variables:
            by_storage[variable._config.storage].append(variable)
        for together in by_storage.values():
            tables = cls(together)
            for variable in together:
                variable._tables = tables
            _waiting[:] = [one for one in _waiting if one() is not None and one()._tables is None]  # type: ignore[union-attr]

    def number_of(self, variable: DynamicVariable) -> int:
        return self._numbers[id(variable)]

    def lookup(
        self,
        variables: Sequence[DynamicVariable],
        inputs: list,
        weights: list,
        axes: Sequence[str],
        combiners: Sequence[str],
    ) -> Callable:
        """Returns a function of the trigger, of whether gradients will come, and of when ids are inserted: it looks up rows."""
        features = tuple(
            (variable.name, self.number_of(variable), False, axis, weight is not None, False, combiner, None)
            for variable, weight, axis, combiner in zip(variables, weights, axes, combiners, strict=True)
        )
        plan = self.core.plan(features, check_finite=False)

        def call(trigger: Any, learns: bool, insertion: Insertion) -> list:
            return backend.lookup(plan, trigger, learns, inputs, weights, insertion)

        return call


def _read(
    variables: Sequence[DynamicVariable],
    inputs: list,
    weights: list,
    axes: Sequence[str],
    combiners: Sequence[str],
    gradients: list,
) -> list:
    """Looks up rows, and inserts ids without one. The tables of the variables were made together."""
    tables = variables[0].tables
    lookup = tables.lookup(variables, inputs, weights, axes, combiners)

    def rows(trigger: Any) -> list:
        return list(lookup(trigger, False, Insertion.AT_LOOKUP))

    return backend.variables.read(variables, tables.layer.trigger.value, rows, gradients)


def all2all_dense_embedding(param: DynamicVariable | Variable, indices: Any) -> Any:
    """Looks up ids of any shape, without combining rows.

    Example:

    >>> import tensorflow as tf, sok_keras as sok
    >>> v = sok.Variable([[1.0], [2.0], [3.0]])
    >>> sok.all2all_dense_embedding(v, tf.constant([[2, 0]])).numpy().tolist()
    [[[3.0], [1.0]]]

    Args:
        param: The variable. All ranks call it with a `Variable`.
        indices: Ids.

    Returns:
        Rows, `indices.shape + (dimension,)`.

    Raises:
        TypeError: If `param` is no variable of this package.
        ValueError: If ids have another dtype.
        InvalidArgumentError: If a `Variable` has no such row; with many ranks a `SokError`, or in a graph an `UnknownError`, on all of them.
    """
    _check_variable(param)
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
        sp_ids: For each variable ids of two axes, a `tf.SparseTensor` with its values in order, or a `tf.RaggedTensor`.
        sp_weights: For each variable None, or weights of the form of the ids. They get no gradient. None: all are 1.
        combiners: For each variable `"sum"`, `"mean"` (also `"average"`) or `"sqrtn"`, in any case. None: `"mean"`.
        use_low_frequency_filter: Must be False: admission is a policy of layers, `sok_keras.policies.Probability`.
        hotness: Not needed; accepted for programs that were written for SparseOperationKit 1.

    Returns:
        A tensor `(rows, dimension)`, or a list of them if `params` is a list. A row without ids is zeros.

    Raises:
        TypeError: If `params` are no variables of this package, or ids are neither sparse nor ragged.
        ValueError: If the lists are of different lengths, or a combiner or the dtype of ids is another one.
    """
    del hotness
    if use_low_frequency_filter:
        raise ValueError(
            "`use_low_frequency_filter` must be False: layers have `admission=sok_keras.policies.Probability(...)`. Received: True"
        )
    is_list = isinstance(params, list | tuple)
    variables = list(params) if is_list else [params]
    if not variables or not all(isinstance(variable, DynamicVariable | Variable) for variable in variables):
        raise TypeError(
            f"`params` must be `sok_keras.DynamicVariable`s or `sok_keras.Variable`s. Received: {params!r:.200}"
        )
    given = {"sp_ids": sp_ids, "sp_weights": sp_weights, "combiners": combiners}
    lists = {name: _as_list(name, value, is_list, len(variables)) for name, value in given.items()}
    rows: list = [None] * len(variables)
    groups: dict[_Tables | None, list[int]] = {}
    for number, variable in enumerate(variables):
        tables = variable.tables if isinstance(variable, DynamicVariable) else None
        groups.setdefault(tables, []).append(number)
    for numbers in groups.values():
        chosen = [[values[number] for number in numbers] for values in (variables, *lists.values())]
        for number, row in zip(numbers, _lookup_together(*chosen), strict=True):
            rows[number] = row
    return rows if is_list else rows[0]


def _as_list(name: str, value: Any, is_list: bool, length: int) -> list:
    if value is None or not is_list:
        return [value[0] if isinstance(value, list | tuple) and len(value) == 1 else value] * length
    if name == "combiners" and isinstance(value, str):
        return [value] * length
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ValueError(f"`{name}` must be a list as long as `params`, {length}. Received: {value!r:.200}")
    return list(value)


def _lookup_together(variables: list, ids: list, weights: list, combiners: list) -> list:
    bags = [_bags_of(variable, value) for variable, value in zip(variables, ids, strict=True)]
    floats = [_flat_weights(*pair) for pair in zip(weights, ids, strict=True)]
    names = [_combiner(value) for value in combiners]
    if isinstance(variables[0], Variable):
        return static_variables.combined(variables, bags, floats, names)
    gradients = [_gradient_of(*of_one) for of_one in zip(variables, bags, floats, names, strict=True)]
    inputs = [(one.ids, one.row_splits) for one in bags]
    return _read(variables, inputs, floats, ["ragged"] * len(bags), names, gradients)


def _bags_of(variable: DynamicVariable | Variable, ids: Any) -> Any:
    bags = backend.variables.bags_of(ids)
    if bags is None:
        raise TypeError(f"`sp_ids` must be sparse or ragged tensors of two axes. Received: {ids!r:.200}")
    keys_of(variable, bags.ids)
    return bags


def _flat_weights(weights: Any, ids: Any) -> Any:
    if weights is None:
        return None
    if type(weights) is not type(ids):
        raise TypeError(f"`sp_weights` must be sparse or ragged tensors, as the ids are. Received: {weights!r:.200}")
    message = "`sp_weights` must have values in the places of the ids. Received: others"
    return keras.ops.cast(ragged.flat_numbers(ids, weights, message), "float32")


def _combiner(name: Any) -> str:
    known = _COMBINERS.get(name.lower() if isinstance(name, str) else "") if name is not None else "mean"
    if known is None:
        raise ValueError(f"`combiners` must be of {sorted(_COMBINERS)}. Received: {name!r}")
    return known


def _gradient_of(variable: DynamicVariable, bags: Any, weights: Any, combiner: str) -> Callable:
    def gradient(upstream: Any) -> Any:
        of_ids = backend.variables.of_ids(upstream, bags, weights, combiner)
        return backend.variables.merged(bags.ids, of_ids, variable.dimension)

    return gradient


def with_triggers(gradients: list, variables: list) -> tuple[list, list]:
    """Hands the gradients of `DynamicVariable`s to their tables.

    Returns:
        Gradients and variables, with the ticket and the trigger of tables in place of their variables.
    """
    kept: list[tuple] = []
    groups: dict[_Tables, list[tuple]] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(variable, DynamicVariable):
            groups.setdefault(variable.tables, []).append((gradient, variable))
        else:
            kept.append((gradient, variable))
    for tables, pairs in groups.items():
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        kept.append((_ticket_of(tables, given) if given else None, tables.layer.trigger))
    return [gradient for gradient, _ in kept], [variable for _, variable in kept]


def _ticket_of(tables: _Tables, given: list) -> Any:
    for gradient, variable in given:
        if not hasattr(gradient, "indices"):
            raise TypeError(
                f"The gradient of {variable.name} must be `tf.IndexedSlices`. Received: {type(gradient).__name__}"
            )
    inputs = [(variable.keys_of(gradient.indices),) for gradient, variable in given]
    variables, none = [variable for _, variable in given], [None] * len(given)
    lookup = tables.lookup(variables, inputs, none, ["each"] * len(given), ["sum"] * len(given))
    rows = [keras.ops.convert_to_tensor(gradient.values) for gradient, _ in given]
    # A row that has gone since the forward pass gets no gradient.
    return backend.variables.ticket_of(
        lambda trigger: lookup(trigger, True, Insertion.NEVER), tables.layer.trigger.value, rows
    )


def filter_variables(variables: Sequence) -> tuple[list, list]:
    """Separates `DynamicVariable`s and `Variable`s from others, in their order.

    Returns:
        The variables of this package, and the other variables.
    """
    own = [variable for variable in variables if isinstance(variable, DynamicVariable | Variable)]
    return own, [variable for variable in variables if not isinstance(variable, DynamicVariable | Variable)]


def export(var: DynamicVariable | Variable) -> tuple[Any, Any]:
    """Copies the keys and rows that this rank has of a variable.

    Returns:
        Keys `(n,)`, ascending, of the variable's `key_type`; and rows `(n, dimension)` float32. The keys of a `Variable` are the numbers of its rows.
    """
    _check_variable(var)
    if isinstance(var, Variable):
        return keras.ops.convert_to_tensor(var.own_ids()), keras.ops.convert_to_tensor(var)
    contents = var.table.export(local=True)
    keys = _of_type(contents.keys, var)
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


def _dtype(argument: str, value: Any, allowed: tuple[str, ...]) -> str:
    name = value if isinstance(value, str) else getattr(value, "name", repr(value))
    if name not in allowed:
        raise ValueError(f"`{argument}` must be one of {', '.join(allowed)}. Received: {argument}={value!r}")
    return name


def _initializer(initializer: Any) -> Any:
    if not isinstance(initializer, str) and initializer is not None:
        return keras.initializers.get(initializer)
    known = {
        "": keras.initializers.RandomUniform(),
        "random": keras.initializers.RandomUniform(),
        "normal": keras.initializers.RandomNormal(stddev=1.0),
        "uniform": keras.initializers.RandomUniform(0.0, 1.0),
        "ones": keras.initializers.Constant(1.0),
        "zeros": keras.initializers.Constant(0.0),
    }
    found = known.get(initializer or "")
    if found is not None:
        return found
    try:
        return keras.initializers.Constant(float(initializer))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(
            f"`initializer` must be one of {sorted(known)[1:]}, a number as a string, or a Keras initializer. Received: "
            f"initializer={initializer!r}"
        ) from error


def _table_config(
    name: str, dimension: int, initializer: Any, var_type: str, mode: str | None, options: dict[str, Any]
) -> TableConfig:
    if var_type not in ("hbm", "hybrid"):
        raise ValueError(f'`var_type` must be "hbm" or "hybrid". Received: var_type={var_type!r}')
    if options.get("filter_ratio", 1.0) != 1.0:
        raise ValueError(
            "`filter_ratio` must be 1.0: layers have `admission=sok_keras.policies.Probability(...)`. Received: "
            f"filter_ratio={options['filter_ratio']!r}"
        )
    unknown = sorted(
        set(options) - {"filter_ratio", "init_capacity", "max_capacity", "evict_strategy", *_WITHOUT_EFFECT}
    )
    if unknown:
        raise ValueError(f"Options of a variable must be those of HierarchicalKV. Received: {unknown}")
    ignored = sorted(set(options) & set(_WITHOUT_EFFECT))
    if ignored:
        warnings.warn(f"{ignored} have no effect: the memory of rows and index grows with the rows", stacklevel=3)
    first, most = options.get("init_capacity", 0), options.get("max_capacity")
    if most is not None and first > most:
        raise ValueError(
            f"`init_capacity` must be at most `max_capacity`. Received: init_capacity={first}, max_capacity={most}"
        )
    strategy = options.get("evict_strategy", "kLru")
    if strategy not in ("kLru", "kLfu"):
        raise ValueError(f'`evict_strategy` must be "kLru" or "kLfu". Received: evict_strategy={strategy!r}')
    evicts = var_type == "hybrid" and most is not None
    return TableConfig(
        name,
        None,
        dimension,
        _initializer(initializer),
        combiner="sum",
        initial_capacity=first,
        max_capacity=most,
        eviction=("lru" if strategy == "kLru" else "lfu") if evicts else None,
        storage="host" if var_type == "hybrid" else "auto",
        placement="distributed" if mode is None else mode,
    )
