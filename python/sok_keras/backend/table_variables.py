"""Variables of JAX and PyTorch whose rows are in tables of the core: what `tensorflow_variables` and `tensorflow_shards` are on TensorFlow."""

from typing import Any, NamedTuple

import keras
import numpy as np

# Stands for "no id" in dense ids.
_PADDING = -1


class TableVariable:
    """A name for rows that functions look up. It is no array: the gradients of its rows are in the ticket of its tables."""

    def __init__(self, dimension, name, trainable):
        self.name = name
        self.trainable = trainable
        self.shape = (None, dimension)

    def _refuse(self, *arguments):
        """Stands for copies, which would share the rows."""
        del arguments
        raise NotImplementedError(
            f"{self.name} has its rows in a table. Save them by `sok_keras.dump(path, [variable])`"
        )

    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = _refuse


class ShardVariable:
    """Refuses to be made: `sok_keras.Variable` has its rows in a table here."""

    def __init__(self, *arguments):
        del arguments
        raise NotImplementedError(
            f"This class is a variable of TensorFlow; use `sok_keras.Variable`. Received: KERAS_BACKEND={keras.backend.backend()!r}"
        )


class Bags(NamedTuple):
    """Ids that are combined row by row.

    Attributes:
        ids: `(n,)`, or `(rows, hotness)`.
        row_splits: `(rows + 1,)`; None with dense ids, of which -1 is none.
    """

    ids: Any
    row_splits: Any

    @property
    def inputs(self):
        return (self.ids,) if self.row_splits is None else (self.ids, self.row_splits)

    @property
    def axis(self):
        return "last" if self.row_splits is None else "ragged"

    @property
    def padding_key(self):
        return _PADDING if self.row_splits is None else None


def bags_of(ids):
    """Returns the `Bags` of dense ids `(rows, hotness)`, or of a pair of values `(n,)` and row splits `(rows + 1,)`; None for anything else."""
    if isinstance(ids, tuple | list) and len(ids) == 2 and all(hasattr(part, "shape") for part in ids):
        values, row_splits = map(keras.ops.convert_to_tensor, ids)
        are_splits = (
            keras.backend.standardize_dtype(row_splits.dtype) in ("int32", "int64") and 0 not in row_splits.shape
        )
        return Bags(values, row_splits) if are_splits and len(values.shape) == len(row_splits.shape) == 1 else None
    if isinstance(ids, tuple | list) or not hasattr(ids, "shape") or len(ids.shape) != 2:
        return None
    return Bags(keras.ops.convert_to_tensor(ids), None)


def dense(gradient):
    """Returns a gradient as it is."""
    return gradient


def keep_trigger(trigger):
    """Does nothing: on these frameworks, no checkpoint restores the variables that an optimizer trains."""


def evaluated(function):
    """Returns two integers that a function computes, int32 `(2,)`."""
    return keras.ops.convert_to_tensor(np.asarray(function(), "int32"))
