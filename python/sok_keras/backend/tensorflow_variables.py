"""Variables of TensorFlow whose rows are in tables of the core."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from sok_keras.backend.private_tensorflow import ResourceVariable, variable_accessed


class TableVariable(ResourceVariable):
    """A variable `(None, dimension)` whose rows are read by `sparse_read` alone.

    TensorFlow sees an empty variable: tapes watch it, and `tf.nn.embedding_lookup` reads it by `sparse_read`.
    """

    def __init__(self, dimension, name, trainable):
        with tf.init_scope():
            super().__init__(
                np.zeros((0, dimension), "float32"),
                shape=tf.TensorShape([None, dimension]),
                name=name,
                trainable=trainable,
            )

    def sparse_read(self, indices, name=None):
        raise NotImplementedError

    def _serialize_to_tensors(self):
        raise NotImplementedError(
            f"{self.name} has its rows in a table, which `sok_keras.dump(path, variable.table)` saves"
        )


class Bags(NamedTuple):
    """Ids that are combined row by row.

    Attributes:
        ids: `(n,)`.
        row_splits: `(rows + 1,)` int64.
        rows: `(n,)` int64: the row of each id.
    """

    ids: tf.Tensor
    row_splits: tf.Tensor
    rows: tf.Tensor


def bags_of(ids):
    """Returns the `Bags` of a sparse or ragged tensor of two axes; None for anything else. Values of a sparse tensor must be in order."""
    if isinstance(ids, tf.RaggedTensor) and ids.ragged_rank == 1 and ids.shape.rank == 2:
        return Bags(ids.values, tf.cast(ids.row_splits, tf.int64), tf.cast(ids.value_rowids(), tf.int64))
    if isinstance(ids, tf.SparseTensor) and ids.dense_shape.shape[0] == 2:
        rows = ids.indices[:, 0]
        return Bags(ids.values, tf.RaggedTensor.from_value_rowids(rows, rows, ids.dense_shape[0]).row_splits, rows)
    return None


def flat_weights(weights):
    """Returns the weights of a sparse or ragged tensor, `(n,)` float32; None for anything else."""
    if isinstance(weights, tf.RaggedTensor):
        return tf.cast(weights.flat_values, tf.float32)
    return tf.cast(weights.values, tf.float32) if isinstance(weights, tf.SparseTensor) else None


def read(variables, trigger, rows, gradients):
    """Returns what `rows` returns, differentiable in variables.

    Args:
        variables: `TableVariable`s.
        trigger: The trigger of their tables, which `rows` takes as a tensor.
        rows: A function of the trigger: a tensor for each variable.
        gradients: For each variable a function of the gradient of its tensor: the `tf.IndexedSlices` of keys and rows.
    """
    for variable in variables:
        if variable.trainable:
            variable_accessed(variable)
    value = tf.stop_gradient(tf.convert_to_tensor(trigger))

    @tf.custom_gradient
    def call(*handles):
        del handles

        def backward(*upstream):
            return [of(tf.convert_to_tensor(gradient)) for of, gradient in zip(gradients, upstream, strict=True)]

        return rows(value), backward

    return call(*(variable.handle for variable in variables))


def merged(ids, gradients, dimension):
    """The gradient of a variable: distinct keys, each with the sum of its gradients. `gradients`: those of the ids, in any shape."""
    keys, places = tf.unique(tf.reshape(ids, [-1]))
    rows = tf.math.unsorted_segment_sum(tf.reshape(gradients, [-1, dimension]), places, tf.size(keys))
    return tf.IndexedSlices(rows, keys, tf.constant([-1, dimension], tf.int64))


def of_ids(gradients, bags, weights, combiner):
    """The gradient of each id, `(n, dimension)`, of the gradients of rows that were combined."""
    factors = tf.ones_like(bags.ids, tf.float32) if weights is None else weights
    if combiner != "sum":
        terms = factors if combiner == "mean" else tf.square(factors)
        num_rows = tf.shape(gradients)[0]
        sums = tf.math.unsorted_segment_sum(terms, bags.rows, num_rows)
        divisors = sums if combiner == "mean" else tf.sqrt(sums)
        factors *= tf.gather(tf.math.divide_no_nan(1.0, divisors), bags.rows)
    return tf.gather(gradients, bags.rows) * factors[:, tf.newaxis]


def ticket_of(lookup, trigger, gradients):
    """Hands gradients of rows to tables. Returns the ticket.

    Args:
        lookup: A function of the trigger that looks up the rows for training.
        trigger: The trigger of the tables.
        gradients: Those of the rows.
    """
    value = tf.convert_to_tensor(trigger)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(value)
        rows = lookup(value)
    return tape.gradient(rows, value, output_gradients=gradients)


def evaluated(function):
    """Returns two integers that a function computes now, or whenever a graph runs, as int32 `(2,)`."""
    if tf.executing_eagerly():
        return tf.constant(function(), tf.int32)
    numbers = tf.numpy_function(lambda: np.asarray(function(), "int32"), [], tf.int32)
    numbers.set_shape((2,))
    return numbers
