"""Ragged and sparse tensors, which exist on TensorFlow alone: their ids, their weights, and rows back in their shape."""

from typing import Any

# Bags of a sparse tensor at most, whose number its shape says and not its values.
_MAX_BAGS = 2**31 - 1


def in_order(value: Any, feature: str, reduces: bool) -> Any:
    """A sparse tensor with its values in row-major order; all else as it is. `reduces`: along the last axis.

    Raises:
        ValueError: If two values are in one place, one is outside the shape, or the shape is of more rows than memory may hold. In a
            `tf.function` a `tf.errors.InvalidArgumentError`, when it runs.
    """
    import tensorflow as tf

    if not isinstance(value, tf.SparseTensor):
        return value
    told = (
        f"A sparse tensor must have one value in a place, within its shape, and at most {_MAX_BAGS} rows. Received: another of shape "
        f"{value.shape} (feature {feature!r})"
    )
    outer = value.dense_shape[:-1] if reduces else value.dense_shape
    is_small = tf.reduce_prod(tf.cast(outer, "float64")) <= _MAX_BAGS
    is_within = tf.reduce_all((value.indices >= 0) & (value.indices < value.dense_shape))
    value = _checked(tf, is_small & is_within, lambda: tf.sparse.reorder(value), told)
    return _checked(tf, _ascends(tf, value), lambda: value.with_values(tf.identity(value.values)), told)


def _ascends(tf: Any, value: Any) -> Any:
    """Whether each place is after the one before, in row-major order."""
    later = tf.zeros_like(value.indices[1:, 0], "bool")
    for axis in reversed(range(value.indices.shape[1])):
        step = value.indices[1:, axis] - value.indices[:-1, axis]
        later = (step > 0) | ((step == 0) & later)
    return tf.reduce_all(later)


def _checked(tf: Any, agrees: Any, make: Any, told: str) -> Any:
    """What `make` makes, or an error before that."""
    if tf.executing_eagerly():
        if not agrees:
            raise ValueError(told)
        return make()
    with tf.control_dependencies([tf.debugging.Assert(agrees, [f"ValueError: {told}"])]):
        return make()


def bags_of(value: Any) -> tuple:
    """`(flat ids, row splits)` of the bags along the last axis; a sparse tensor is one that `in_order` gave."""
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
    """What a ragged or sparse tensor holds, without its places; a dense one as it is."""
    return value.flat_values if hasattr(value, "flat_values") else getattr(value, "values", value)


def flat_weights(ids: Any, weights: Any, told: str) -> Any:
    """Flat weights in the order of the ids.

    Args:
        ids: A ragged, sparse or dense tensor.
        weights: One of the same kind.
        told: What to say if they are not in the places of the ids.

    Raises:
        ValueError: If they are not; in a `tf.function` a `tf.errors.InvalidArgumentError`, when it runs.
    """
    import tensorflow as tf

    of_ids, of_weights = _places(tf, ids), _places(tf, weights)
    pairs = zip(of_ids, of_weights, strict=False)
    agree = tf.reduce_all([len(of_ids) == len(of_weights), *(_are_equal(tf, *pair) for pair in pairs)])
    return _checked(tf, agree, lambda: tf.identity(flat_of(weights)), told)


def _places(tf: Any, value: Any) -> Any:
    """Tensors that say where the numbers of `value` are."""
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
    """Rows `(n, dim)` of a lookup in the outer axes of its ids.

    Args:
        value: The ids, ragged or sparse.
        rows: A row a bag, if `axis` is `"ragged"`; a row an id, if it is `"each"`; if it is `"last"`, a row for each of the
            inner axes that a ragged tensor may have, dense, below its ragged ones.
        axis: As `layers.base.axis_of` says.

    Returns:
        Of ragged ids with an outer ragged axis a `RaggedTensor`, else a dense one. Where sparse ids have no id, zeros.
    """
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
