"""Variables with a fixed number of rows, dealt out to the ranks, as SparseOperationKit has them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from sok_keras import backend, distributed
from sok_keras.backend.exchange import exchange_parts
from sok_keras.core_initializers import core_initializer
from sok_keras.feature_config import FeatureConfig
from sok_keras.layers.distributed_embedding import DistributedEmbedding
from sok_keras.table import Table
from sok_keras.table_config import TableConfig
from sok_keras.variable_options import owner_of, rows_or_shape

_numbers = itertools.count()
# In the name of a table, between that of a variable and that of an optimizer's state of its rows.
STATE_OF = "#"
# Rows of which first values are computed at once.
_AT_ONCE = 1 << 20


class Variable(backend.shards.ShardVariable):
    """A `tf.Variable` that has this rank's part of the rows of a table: SparseOperationKit's `Variable`.

    Row `i` is row `i // size` of rank `i % size`, where `size` is the number of ranks. `lookup_sparse` and `all2all_dense_embedding` read rows of all ranks.
    A `tf.GradientTape` gives `tf.IndexedSlices` of the rows that this rank has, with the gradients of all ranks added up, so each rank
    trains its own part with any optimizer of Keras or TensorFlow. `OptimizerWrapper` takes it together with `DynamicVariable`s and dense variables.

    Example:

    >>> import tensorflow as tf, numpy as np, sok_keras as sok
    >>> v = sok.Variable(np.arange(15 * 2).reshape(15, 2), dtype=tf.float32)
    >>> rows = sok.lookup_sparse(v, tf.ragged.constant([[1, 1], [4]], dtype=tf.int64), combiners="sum")
    >>> v.shape, rows.numpy().tolist()
    (TensorShape([15, 2]), [[4.0, 6.0], [8.0, 9.0]])

    Args:
        initial_value: All rows, `(num_rows, dimension)`; each rank keeps its own. Every rank gives the same. None: `shape` and `initializer` are given.
        trainable: Whether a tape watches it.
        name: Name of the variable.
        dtype: Must be `tf.float32`.
        mode: None or `"distributed"`: as above. `"localized:r"`: rank r has all rows, and the others none.
        initializer: A Keras initializer: the first values of a row are a function of its number, whatever the number of ranks. Or a
            function of `shape` and `dtype` that returns the rows of this rank; it is called with their shape.
        shape: `(num_rows, dimension)` of the whole table, if there is no `initial_value`.

    Raises:
        NotImplementedError: On another backend than TensorFlow.
        ValueError: If an argument is another one, or r is no rank.
    """

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool = True,
        *,
        name: str | None = None,
        dtype: Any = "float32",
        mode: str | None = None,
        initializer: Any = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        value, self.global_shape = rows_or_shape(initial_value, shape, dtype)
        self.key_type = "int64"
        self.mode = mode or "distributed"
        self.num_gpus = distributed.world_size()
        self.target_gpu = owner_of(self.mode)
        name = name or f"sok_static_Variable_{next(_numbers)}"
        rows = value[self._own()].astype("float32") if value is not None else self._first_rows(name, initializer)
        super().__init__(rows, name, trainable)

    @property
    def num_rows(self) -> int:
        """Number of rows on all ranks."""
        return self.global_shape[0]

    def _own(self) -> slice:
        """The rows that this rank has."""
        if self.target_gpu < 0:
            return slice(distributed.rank(), None, self.num_gpus)
        return slice(None) if self.target_gpu == distributed.rank() else slice(0)

    def own_ids(self) -> np.ndarray:
        """Returns the numbers of the rows that this rank has, int64, in their order."""
        return np.arange(self.num_rows)[self._own()]

    def key_map(self, ids: Any) -> Any:
        """Returns the numbers by which the ranks know the rows that they have."""
        return ids // self.num_gpus if self.target_gpu < 0 else ids

    def owners(self, ids: Any) -> Any:
        """Returns the rank that has each row."""
        return ids % self.num_gpus if self.target_gpu < 0 else ids * 0 + self.target_gpu

    def _first_rows(self, name: str, initializer: Any) -> np.ndarray:
        ids, dimension = self.own_ids(), self.global_shape[1]
        if initializer is None or isinstance(initializer, str | keras.initializers.Initializer):
            initializer = keras.initializers.get("uniform" if initializer is None else initializer)
            core_initializer(initializer, dimension, self.num_rows)
            table = _table_of(name, self.global_shape, "distributed", initializer)
            rows = np.empty((len(ids), dimension), "float32")
            for start in range(0, len(ids), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                rows[some] = table.find(ids[some], local=True)[0]
            return rows
        rows = keras.ops.convert_to_numpy(initializer(shape=(len(ids), dimension), dtype="float32"))
        if rows.shape != (len(ids), dimension):
            raise ValueError(
                f"`initializer` must return the rows of this rank, {(len(ids), dimension)}. Received: an array {rows.shape}"
            )
        return rows.astype("float32")

    def as_table(self, state: str | None = None, values: Any = None) -> Table:
        """Returns a table with a copy of the rows, as dumps have it.

        Args:
            state: Name of an optimizer's state, whose values the table gets instead of the rows.
            values: The state on this rank, of the shape of its rows.
        """
        placement = "distributed" if self.target_gpu < 0 else self.mode
        name = self.name.removesuffix(":0") + ("" if state is None else STATE_OF + state)
        table = _table_of(name, self.global_shape, placement, keras.initializers.Zeros())
        table.assign(self.own_ids(), self.numpy() if state is None else keras.ops.convert_to_numpy(values))
        return table

    def take(self, table: Table, state: Any = None) -> None:
        """Overwrites the rows with those of a table. All ranks call it.

        Args:
            table: As `as_table` returns it.
            state: The state of an optimizer that is overwritten instead of the rows. None: the rows.

        Raises:
            ValueError: If the table does not have all rows. They stay as they are then.
        """
        contents = table.export(local=True)
        num_own, error = len(self.own_ids()), None
        if len(contents.keys) != num_own:
            error = ValueError(f"{self.name} must get all its rows. Received: {len(contents.keys)} of {num_own}")
        distributed.agree(error)
        if state is None:
            self.assign_rows(contents.keys, contents.rows)
        else:
            state.assign(contents.rows[np.argsort(contents.keys)])

    def assign_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Overwrites rows. All ranks call it; rows go to the ranks that have them.

        Args:
            ids: Numbers of rows, `(n,)`.
            rows: `(n, dimension)`. Of equal numbers, the last row counts.

        Raises:
            ValueError: If there is no such row, or `rows` is of another shape.
        """
        dimension = self.global_shape[1]
        wrong = ids[(ids < 0) | (ids >= self.num_rows)]
        error = None
        if len(wrong):
            error = ValueError(
                f"Ids of {self.name} must be at least 0 and less than {self.num_rows}. Received: {wrong[0]}"
            )
        elif rows.shape != (len(ids), dimension):
            error = ValueError(f"Rows must have the shape {(len(ids), dimension)}. Received: shape {rows.shape}")
        distributed.agree(error)
        rows = rows.astype("float32")
        if self.num_gpus > 1:
            owners = self.owners(ids)
            order, counts = np.argsort(owners, kind="stable"), np.bincount(owners, minlength=self.num_gpus)
            ids, rows, *_ = exchange_parts([ids[order], rows[order]], [counts, counts])
        last = len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1]
        if len(last):
            backend.shards.assigned(self, self.key_map(ids[last]), rows[last])


def _table_of(name: str, shape: Sequence[int], placement: str, initializer: Any) -> Table:
    config = TableConfig(name, shape[0], shape[1], initializer, placement=placement, storage="host")
    layer = DistributedEmbedding([FeatureConfig(name, config)], name="variables")
    layer.build()
    return layer._core.tables[0]


def keys_of(variable: Any, ids: Any) -> Any:
    """Returns ids as a tensor. Raises a `ValueError` unless they have the type of a variable's keys."""
    ids = keras.ops.convert_to_tensor(ids)
    if keras.backend.standardize_dtype(ids.dtype) not in ("int32", variable.key_type):
        raise ValueError(f"Ids of {variable.name} must be {variable.key_type}. Received: ids of dtype {ids.dtype}")
    return ids


def rows_of(variables: Sequence[Variable], ids: Sequence[Any]) -> tuple[list, list]:
    """Reads rows of all ranks, which all call it.

    Args:
        variables: Variables.
        ids: For each the numbers of rows, a tensor of any shape; n is their number.

    Returns:
        For each variable the distinct rows that were asked for, `(d, dimension)`, and the place of each id among them, `(n,)`.

    Raises:
        InvalidArgumentError: If a variable has no such row; with many ranks a `SokError`, or in a graph an `UnknownError`, on all of them.
    """
    found = [backend.shards.distinct(one) for one in ids]
    rows = backend.shards.rows_of(variables, [one for one, _ in found], distributed.world_size())
    return rows, [places for _, places in found]


def read(variable: Variable, ids: Any) -> Any:
    """Rows of ids, `ids.shape + (dimension,)`."""
    (rows,), (places,) = rows_of([variable], [ids])
    return backend.shards.take(rows, places, ids)


def combined(variables: list, bags: list, weights: list, combiners: list) -> list:
    """Rows of ids, combined by bags, `(num_bags, dimension)` for each variable."""
    rows, places = rows_of(variables, [one.ids for one in bags])
    combine: Callable = backend.shards.pooled
    return [combine(*of_one) for of_one in zip(rows, places, bags, weights, combiners, strict=True)]
