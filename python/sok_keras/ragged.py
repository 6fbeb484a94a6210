"""Ragged and sparse ids: their tensors, their weights, and rows in their shape.

TensorFlow has tensors of both forms, PyTorch has nested tensors, and every backend takes values with row splits.
"""

from typing import Any, NamedTuple

import numpy as np

# Maximal number of bags of a sparse tensor. Its shape may claim any number, whatever values it has.
_MAX_BAGS = 2**31 - 1


class Ragged(NamedTuple):
    """Ids of bags: values and row splits.

    Attributes:
        values: Ids `(n,)`, or two words of them.
        row_splits: `(bags + 1,)`. Bag i has the values from `row_splits[i]` to `row_splits[i + 1]`.
        is_nested: Whether they are of a nested tensor of PyTorch.
    """

    values: Any
    row_splits: Any
    is_nested: bool = False

    @property
    def shape(self) -> tuple[int | None, None]:
        (num_splits,) = self.row_splits.shape
        return (None if num_splits is None else num_splits - 1, None)


def from_parts(parts: dict[str, Any]) -> Ragged:
    """Returns the ids of `{"values", "row_splits"}`."""
    values, row_splits = (
        part if hasattr(part, "shape") or isinstance(part, dict) else np.asarray(part)
        for part in (parts["values"], parts["row_splits"])
    )
    return Ragged(values, row_splits)


def from_nested(value: Any, feature: str) -> Ragged:
    """Returns the ids of a nested tensor of PyTorch.

    Raises:
        ValueError: If it is not jagged, has gaps between its rows, or has not two axes.
    """
    import torch

    if value.layout is not torch.jagged or value.dim() != 2 or value.lengths() is not None:
        raise ValueError(
            "Nested tensors of ids must have `layout=torch.jagged`, two axes and no gaps; `layer.preprocess` takes others. Received: "
            f"layout {value.layout}, {value.dim()} axes (feature {feature!r})"
        )
    return Ragged(value.values(), value.offsets(), is_nested=True)


def in_order(value: Any, feature: str, reduces: bool) -> Any:
    """Returns a sparse tensor with its values in row-major order, and anything else as it is. `reduces`: whether the last axis is combined.

    Raises:
        ValueError: If two values have the same place, a value is outside the shape, or the shape has more than 2^31 - 1 rows. A
            `tf.function` raises `tf.errors.InvalidArgumentError` when it runs.
    """
    import tensorflow as tf

    if not isinstance(value, tf.SparseTensor):
        return value
    message = (
        f"A sparse tensor must have one value in a place, within its shape, and at most {_MAX_BAGS} rows. Received: another of shape "
        f"{value.shape} (feature {feature!r})"
    )
    outer = value.dense_shape[:-1] if reduces else value.dense_shape
    is_small = tf.reduce_prod(tf.cast(outer, "float64")) <= _MAX_BAGS
    is_within = tf.reduce_all((value.indices >= 0) & (value.indices < value.dense_shape))
    value = _checked(tf, is_small & is_within, lambda: tf.sparse.reorder(value), message)
    return _checked(tf, _ascends(tf, value), lambda: value.with_values(tf.identity(value.values)), message)


def _ascends(tf: Any, value: Any) -> Any:
    """Whether places ascend strictly in row-major order."""
    later = tf.zeros_like(value.indices[1:, 0], "bool")
    for axis in reversed(range(value.indices.shape[1])):
        step = value.indices[1:, axis] - value.indices[:-1, axis]
        later = (step > 0) | ((step == 0) & later)
    return tf.reduce_all(later)


def _checked(tf: Any, agrees: Any, make: Any, message: str) -> Any:
    """Returns `make()` if `agrees`, and raises an error with `message` otherwise."""
    if tf.executing_eagerly():
        if not agrees:
            raise ValueError(message)
        return make()
    with tf.control_dependencies([tf.debugging.Assert(agrees, [f"ValueError: {message}"])]):
        return make()


def bags_of(value: Any) -> tuple:
    """Returns `(flat ids, row splits)` of the bags along the last axis. A sparse tensor must come from `in_order`."""
    if isinstance(value, Ragged):
        return value.values, value.row_splits
    import tensorflow as tf

    if isinstance(value, tf.RaggedTensor):
        return value.flat_values, value.nested_row_splits[-1]
    shape = value.dense_shape
    row = value.indices[:, 0]
    for axis in range(1, value.shape.rank - 1):
        row = row * shape[axis] + value.indices[:, axis]
    bags = tf.RaggedTensor.from_value_rowids(value.values, row, nrows=tf.reduce_prod(shape[:-1]), validate=False)
    return bags.values, bags.row_splits


def flat_of(value: Any) -> Any:
    """Returns the values of a ragged or sparse tensor, and a dense one as it is."""
    if isinstance(value, Ragged):
        return value.values
    return value.flat_values if hasattr(value, "flat_values") else getattr(value, "values", value)


def _rows_of_bags(value: Ragged, rows: Any) -> Any:
    if not value.is_nested:
        return {"values": rows, "row_splits": value.row_splits}
    import torch

    return torch.nested.nested_tensor_from_jagged(rows, value.row_splits)


def dense_mask(value: Any, mask: Any) -> Any:
    """A dense tensor of bool: `mask`, `(n,)`, at the places of a sparse tensor's values, in their order, and False elsewhere."""
    import tensorflow as tf

    return tf.scatter_nd(value.indices, mask, value.dense_shape)


def flat_numbers(ids: Any, numbers: Any, message: str) -> Any:
    """Flat numbers, one for each id, in the order of the ids.

    Args:
        ids: A ragged, sparse or dense tensor.
        numbers: One of the same kind.
        message: Message of the error.

    Raises:
        ValueError: If numbers and ids have values in different places. A `tf.function` raises `tf.errors.InvalidArgumentError` when it
            runs.
    """
    import tensorflow as tf

    of_ids, of_numbers = _places(tf, ids), _places(tf, numbers)
    pairs = zip(of_ids, of_numbers, strict=False)
    agree = tf.reduce_all([len(of_ids) == len(of_numbers), *(_are_equal(tf, *pair) for pair in pairs)])
    return _checked(tf, agree, lambda: tf.identity(flat_of(numbers)), message)


def _places(tf: Any, value: Any) -> Any:
    """Returns tensors that say where the values of `value` are."""
    if isinstance(value, tf.RaggedTensor):
        return value.nested_row_splits
    return [value.indices if isinstance(value, tf.SparseTensor) else tf.shape(value)]


def _are_equal(tf: Any, one: Any, other: Any) -> Any:
    if not one.shape.is_compatible_with(other.shape):
        return tf.constant(False)
    one, other = tf.cast(one, "int64"), tf.cast(other, "int64")
    have_one_shape = tf.reduce_all(tf.equal(tf.shape(one), tf.shape(other)))
    return tf.cond(have_one_shape, lambda: tf.reduce_all(tf.equal(one, other)), lambda: tf.constant(False))


def rows_like(value: Any, rows: Any, axis: str) -> Any:
    """Gives the rows of a lookup, `(n, dim)`, the outer axes of its ids.

    Args:
        value: The ids, ragged or sparse.
        rows: One row for each bag if `axis` is `"ragged"`, one for each id if it is `"each"`. If it is `"last"`, the innermost axis
            of a ragged tensor, which is dense, was combined.
        axis: As `layers.base.axis_of` says.

    Returns:
        A `RaggedTensor` for ragged ids with an outer ragged axis, else a dense tensor. It has zeros where sparse ids have no id.
        Rows of `Ragged` ids that are not combined are of the form of the ids: `{"values", "row_splits"}` or a nested tensor.
    """
    if isinstance(value, Ragged):
        return rows if axis == "ragged" else _rows_of_bags(value, rows)
    import tensorflow as tf

    if isinstance(value, tf.RaggedTensor):
        if axis != "ragged":
            return value.with_flat_values(rows)
        return tf.RaggedTensor.from_nested_row_splits(rows, value.nested_row_splits[:-1], validate=False)
    outer = slice(None) if axis == "each" else slice(-1)
    dim = rows.shape[-1]
    shape = tf.concat([value.dense_shape[outer], [dim]], 0)
    rows = tf.scatter_nd(value.indices, rows, shape) if axis == "each" else tf.reshape(rows, shape)
    rows.set_shape((*value.shape[outer], dim))
    return rows
