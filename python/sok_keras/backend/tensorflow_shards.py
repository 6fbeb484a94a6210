"""Variables of TensorFlow of whose rows each rank has a part."""

import tensorflow as tf

from sok_keras.backend.exchange import exchange_parts
from sok_keras.backend.private_tensorflow import ResourceVariable, tracing_type, variable_accessed
from sok_keras.backend.tensorflow_variables import VariableSlices, factors_of, merged


class ShardVariable(ResourceVariable):
    """A variable that has the rows of this rank. Optimizers of TensorFlow and Keras train it like another one."""

    def __init__(self, rows, name, trainable):
        with tf.init_scope():
            super().__init__(rows, name=name, trainable=trainable)

    def __tf_tracing_type__(self, signature_context):
        return tracing_type(self, signature_context)


def distinct(ids):
    """Returns the distinct ids of a tensor of any shape, int64 `(d,)`, and the place of each id among them, int32 `(n,)`."""
    return tf.unique(tf.cast(tf.reshape(ids, [-1]), tf.int64))


def pooled(rows, places, bags, weights, combiner):
    """Combines the rows of ids, `(num_bags, dim)`. `places`: of each id among `rows`."""
    weights = None if weights is None else tf.stop_gradient(weights)
    num_bags = tf.size(bags.row_splits) - 1
    if weights is None and combiner == "sum":
        return tf.sparse.segment_sum(rows, places, bags.rows(), num_segments=num_bags)
    factors = factors_of(bags, weights, combiner, num_bags)
    of_ids = tf.gather(rows, places) * factors[:, tf.newaxis]
    return tf.math.unsorted_segment_sum(of_ids, bags.rows(), num_bags)


def rows_of(variables, ids, num_ranks):
    """Returns the rows of distinct ids, `(d, dim)` for each variable, differentiable in the variables. All ranks call it.

    The gradient of a variable is `tf.IndexedSlices` of the rows that this rank has, with the gradients of all ranks added up.

    Args:
        variables: `ShardVariable`s of float32 with `num_rows`, `owners(ids)` and `key_map(ids)`.
        ids: For each variable the numbers of the rows, int64 `(d,)`.
        num_ranks: Number of ranks.

    Raises:
        InvalidArgumentError: If a variable has no such row. A graph raises it when it runs.
    """
    for variable in variables:
        variable_accessed(variable)
    pairs = list(zip(variables, ids, strict=True))
    wrong = [tf.boolean_mask(one, (one < 0) | (one >= variable.num_rows)) for variable, one in pairs]
    checks = (
        []
        if num_ranks > 1
        else [
            tf.debugging.assert_equal(tf.size(of), 0, _outside(variable))
            for variable, of in zip(variables, wrong, strict=True)
        ]
    )
    with tf.control_dependencies([check for check in checks if check is not None]):
        own_numbers = [variable.key_map(tf.identity(one)) for variable, one in pairs]
    orders, sent = zip(*(_by_owner(variable.owners(one), num_ranks) for variable, one in pairs), strict=True)

    @tf.custom_gradient
    def call(*handles):
        asked = [_in_order(one, order) for one, order in zip(own_numbers, orders, strict=True)]
        asked, received = _exchange(asked, sent, num_ranks, wrong, [_outside(variable) for variable in variables])
        own = [
            tf.raw_ops.ResourceGather(resource=handle, indices=one, dtype=tf.float32)
            for handle, one in zip(handles, asked, strict=True)
        ]
        answers, _ = _exchange(own, received, num_ranks)
        places = [None if order is None else tf.math.invert_permutation(order) for order in orders]
        rows = [_in_order(answer, place) for answer, place in zip(answers, places, strict=True)]

        def backward(*upstream):
            dense = map(tf.convert_to_tensor, upstream)
            gradients = [_in_order(one, order) for one, order in zip(dense, orders, strict=True)]
            gradients, _ = _exchange(gradients, sent, num_ranks)
            triples = zip(asked, gradients, variables, strict=True)
            if num_ranks > 1:
                found = ((v, merged(one, gradient, v.shape[1], v.shape[0])) for one, gradient, v in triples)
                return [VariableSlices(v, slices.values, slices.indices, slices.dense_shape) for v, slices in found]
            # They are distinct. A tensor of the forward pass must go through an op of the backward pass.
            return [
                VariableSlices(v, gradient, tf.identity(one), tf.constant(v.shape.as_list(), tf.int64))
                for one, gradient, v in triples
            ]

        return rows, backward

    return call(*(variable.handle for variable in variables))


def take(rows, places, ids):
    """Returns the rows at the places of ids of any shape, `ids.shape + (dim,)`."""
    found = tf.gather(rows, places)
    found = tf.reshape(found, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))
    found.set_shape(ids.shape.concatenate(rows.shape[1:]))
    return found


def _by_owner(owners, num_ranks):
    """Returns the places of rows by the rank that has them, int32 `(d,)`, and how many each has, int64 `(ranks,)`.

    With one rank the places are None: rows are in this order already.
    """
    if num_ranks == 1:
        return None, tf.size(owners, tf.int64)[tf.newaxis]
    parts = tf.dynamic_partition(tf.range(tf.size(owners)), tf.cast(owners, tf.int32), num_ranks)
    return tf.concat(parts, 0), tf.stack([tf.size(part, tf.int64) for part in parts])


def _in_order(array, places):
    """Returns the rows of an array at these places; all of them, if there are none."""
    return array if places is None else tf.gather(array, places)


def assigned(variable, rows, values):
    """Overwrites rows of a variable, which this rank has."""
    with tf.init_scope():
        variable.scatter_update(tf.IndexedSlices(values, rows))


def _outside(variable):
    return f"Ids of {variable.name} must be at least 0 and less than {variable.num_rows}"


def _exchange(arrays, counts, num_ranks, wrong=(), messages=()):
    """Sends parts of arrays to the ranks. All ranks call it.

    Args:
        arrays: Tensors `(n, ...)`; the part for rank 0 comes first. All ranks give as many, of the same dtypes and row shapes.
        counts: For each array the lengths of its parts, int64 `(ranks,)`.
        num_ranks: Number of ranks.
        wrong: Tensors that must be empty on all ranks.
        messages: What is wrong with what is in them.

    Returns:
        The arrays of received parts, that of rank 0 first, and the lengths of these parts.
    """
    if num_ranks == 1:
        return arrays, counts
    num = len(arrays)

    def call(*values):
        found = zip(messages, values[2 * num :], strict=True)
        error = next((f"{message}. Received: {one[0]}" for message, one in found if len(one)), None)
        return exchange_parts(values[:num], values[num : 2 * num], error)

    types = [array.dtype for array in arrays]
    received = tf.numpy_function(call, [*arrays, *counts, *wrong], [*types, *(tf.int64 for _ in arrays)])
    for one, array in zip(received, arrays, strict=False):
        one.set_shape([None, *array.shape[1:]])
    for one in received[num:]:
        one.set_shape([num_ranks])
    return received[:num], received[num:]
