"""Variables with a fixed number of rows on JAX and PyTorch, for training loops instead of Keras layers."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from sok_keras import distributed
from sok_keras.table_config import TableConfig
from sok_keras.variable_options import owner_of, rows_or_shape
from sok_keras.variables import DynamicVariable

_numbers = itertools.count()
# Rows that a new table gets at once.
_AT_ONCE = 1 << 20


class Variable(DynamicVariable):
    """A variable with a fixed number of rows, which the ranks share: SparseOperationKit's `Variable` on JAX and PyTorch.

    Its rows are in a table of the core, as those of a `DynamicVariable`, and are trained in the same way: the rows of a batch move, unless the
    `update_mode` of the `OptimizerWrapper` says otherwise. An id that is not the number of a row is an error.

    Example:

    >>> import keras, numpy as np, sok_keras as sok
    >>> v = sok.Variable(np.arange(4.0).reshape(2, 2))
    >>> tuple(v.shape)
    (2, 2)

    Args:
        initial_value: All rows, `(num_rows, dimension)`, or a function that returns them. Every rank gives the same. None: `shape` and `initializer`
            are given.
        trainable: Whether lookups learn.
        name: Name of the variable, and of its table in dumps.
        dtype: Must be float32.
        mode: None or `"distributed"`: the ranks share the rows. `"localized:r"`: rank r has all of them.
        initializer: A Keras initializer, or a function of `shape` and `dtype` that returns all rows. None: `"uniform"`.
        shape: `(num_rows, dimension)`, if there is no `initial_value`.

    Raises:
        ValueError: If an argument is another one.
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
        rows, (num_rows, dimension) = rows_or_shape(initial_value, shape, dtype)
        owner_of(mode)
        if (
            rows is None
            and callable(initializer)
            and not isinstance(initializer, keras.initializers.Initializer | type)
        ):
            rows = keras.ops.convert_to_numpy(initializer(shape=(num_rows, dimension), dtype="float32"))
            initializer = None
            if rows.shape != (num_rows, dimension):
                raise ValueError(
                    f"`initializer` must return rows {(num_rows, dimension)}. Received: an array {rows.shape}"
                )
        name = self._name_it(dimension, name or f"sok_static_Variable_{next(_numbers)}", trainable)
        self.shape, self.key_type = (num_rows, dimension), "int64"
        placement = mode or "distributed"
        initializer = keras.initializers.get(initializer or "uniform")
        config = TableConfig(name, num_rows, dimension, initializer, combiner="sum", placement=placement)
        self._first_rows = None if rows is None else rows.astype("float32")
        self._start(config)

    def _fill(self) -> None:
        num_rows = self.shape[0]
        for start in range(0, num_rows, _AT_ONCE):
            # The ranks share the work.
            ids = np.arange(start + distributed.rank(), min(start + _AT_ONCE, num_rows), distributed.world_size())
            if self._first_rows is None:
                self.table.find_or_insert(ids)
            else:
                self.table.assign(ids, self._first_rows[ids])
        self._first_rows = None

    def __repr__(self) -> str:
        return f"<sok_keras.Variable {self.name!r} shape={self.shape}>"

    def numpy(self) -> np.ndarray:
        """Returns all rows of all ranks, float32. With many ranks all call it."""
        return self.table.find(np.arange(self.shape[0]))[0]
