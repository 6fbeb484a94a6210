"""Variables of TensorFlow whose rows are in tables of the core."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from sok_keras.backend.private_tensorflow import ResourceVariable, restore_by, tracing_type, variable_accessed
from sok_keras.backend.tensorflow_state import eagerly, packed, snapshot, unpacked


class TableVariable(ResourceVariable):
    """A variable `(None, dimension)` whose rows are read by `sparse_read` alone.

    TensorFlow sees an empty variable: tapes watch it, and `tf.nn.embedding_lookup` reads it by `sparse_read`, which a subclass defines.
    """

    def __init__(self, dimension, name, trainable):
        with tf.init_scope():
            super().__init__(
                np.zeros((0, dimension), "float32"),
                shape=tf.TensorShape([None, dimension]),
                name=name,
                trainable=trainable,
            )

    def __tf_tracing_type__(self, signature_context):
        return tracing_type(self, signature_context)

    def _refuse(self, *arguments, **named):
        """Stands for methods that would see an empty variable."""
        del arguments, named
        raise NotImplementedError(
            f"{self.name} has its rows in a table. Read them by `lookup_sparse` or `tf.nn.embedding_lookup`, write them by "
            "`sok_keras.assign`, and save them by `sok_keras.dump(path, [variable])` or a `tf.train.Checkpoint`"
        )

    value = read_value = numpy = assign = assign_add = assign_sub = gather_nd = to_proto = _refuse
    scatter_sub = scatter_add = scatter_update = scatter_max = scatter_min = scatter_mul = scatter_div = _refuse
    batch_scatter_update = scatter_nd_sub = scatter_nd_add = scatter_nd_update = _refuse
    __deepcopy__ = __copy__ = __reduce__ = __reduce_ex__ = _dense_var_to_tensor = _refuse

    # A checkpoint has the rows of this rank as one string. A subclass defines `saved_rows` and `take_saved_rows`.

    def _serialize_to_tensors(self):
        return {"rows": eagerly(lambda: tf.constant(packed(self.saved_rows())), [], tf.string)}

    def _restore_from_tensors(self, tensors):
        eagerly(lambda rows: self.take_saved_rows(unpacked(rows.numpy())), [tensors["rows"]])

    def _copy_trackable_to_cpu(self, object_map):
        snapshot(self, object_map)


class Bags(NamedTuple):
    """Ids that are combined row by row.

    Attributes:
        ids: `(n,)`.
        row_splits: `(rows + 1,)` int64.
    """

    ids: tf.Tensor
    row_splits: tf.Tensor

    def rows(self):
        """Returns the row of each id, `(n,)` int64."""
        places = tf.range(tf.size(self.ids, tf.int64))
        return tf.searchsorted(self.row_splits, places, side="right", out_type=tf.int64) - 1


def bags_of(ids):
    """Returns the `Bags` of a sparse or ragged tensor of two axes; None for anything else.

    Raises:
        InvalidArgumentError: If the values of a sparse tensor are not in the order of its rows. A graph raises it when it runs.
    """
    if isinstance(ids, tf.RaggedTensor) and ids.ragged_rank == 1 and ids.shape.rank == 2:
        return Bags(ids.values, tf.cast(ids.row_splits, tf.int64))
    if isinstance(ids, tf.SparseTensor) and ids.dense_shape.shape[0] == 2:
        rows = ids.indices[:, 0]
        message = "Values of sparse ids must be in the order of their rows, as `tf.sparse.reorder` puts them"
        with tf.control_dependencies([tf.debugging.assert_non_negative(rows[1:] - rows[:-1], message)]):
            splits = tf.searchsorted(rows, tf.range(ids.dense_shape[0] + 1), out_type=tf.int64)
        return Bags(ids.values, splits)
    return None


def read(variables, trigger, rows, gradients):
    """Returns what `rows` returns, differentiable in variables.

    Args:
        variables: `TableVariable`s.
        trigger: The trigger of their tables, which `rows` takes as a tensor.
        rows: A function of the trigger: a tensor for each variable.
        gradients: A function of the gradients of all tensors: a list of the `tf.IndexedSlices` of each variable.
    """
    for variable in variables:
        variable_accessed(variable)
    value = tf.stop_gradient(tf.convert_to_tensor(trigger))

    @tf.custom_gradient
    def call(*handles):
        del handles

        def backward(*upstream):
            return gradients([tf.convert_to_tensor(gradient) for gradient in upstream])

        return rows(value), backward

    return call(*(variable.handle for variable in variables))


def merged(ids, gradients, dimension, num_rows=-1):
    """The gradient of a variable: distinct ids, each with the sum of its gradients.

    Args:
        ids: Numbers of rows, or keys, in any shape.
        gradients: Those of the ids.
        dimension: Number of floats in a row.
        num_rows: Number of rows of the variable; -1: it grows.
    """
    keys, places = tf.unique(tf.reshape(ids, [-1]))
    rows = tf.math.unsorted_segment_sum(tf.reshape(gradients, [-1, dimension]), places, tf.size(keys))
    return tf.IndexedSlices(rows, keys, tf.constant([num_rows, dimension], tf.int64))


def merged_bags(inputs, weights, combiner, gradients):
    """Returns distinct ids, each with the sum of its gradients.

    Args:
        inputs: Ids of any shape, or those of bags `(n,)` and row splits `(rows + 1,)`.
        weights: Those of the ids, or None.
        combiner: How the rows of bags were combined.
        gradients: Those of the rows.
    """
    ids, *splits = inputs
    if splits:
        gradients = of_ids(gradients, Bags(ids, *splits), weights, combiner)
    found = merged(ids, gradients, gradients.shape[-1])
    return found.indices, found.values


def slices(keys, rows, key_type, dimension):
    """The gradient of a variable that grows."""
    return tf.IndexedSlices(rows, tf.cast(keys, key_type), tf.constant([-1, dimension], tf.int64))


def factors_of(bags, weights, combiner, num_rows):
    """By what the row of each id is multiplied, float32 `(n,)`, before the rows of a bag are added up. `num_rows`: number of bags."""
    factors, rows = tf.ones_like(bags.ids, tf.float32) if weights is None else weights, bags.rows()
    if combiner == "sum":
        return factors
    terms = factors if combiner == "mean" else tf.square(factors)
    sums = tf.math.unsorted_segment_sum(terms, rows, num_rows)
    divisors = sums if combiner == "mean" else tf.sqrt(sums)
    return factors * tf.gather(tf.math.divide_no_nan(1.0, divisors), rows)


def of_ids(gradients, bags, weights, combiner):
    """The gradient of each id, `(n, dimension)`, of the gradients of rows that were combined."""
    factors = factors_of(bags, weights, combiner, tf.shape(gradients)[0])
    return tf.gather(gradients, bags.rows()) * factors[:, tf.newaxis]


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


def dense(gradient):
    """Returns a gradient as a tensor. It may be `tf.IndexedSlices`."""
    return tf.convert_to_tensor(gradient)


def keep_trigger(trigger):
    """Leaves a trigger as it is when a checkpoint of an optimizer has one: the checkpoint brings rows by their variables."""
    restore_by(trigger, lambda tensors: None)


def evaluated(function):
    """Returns two integers that a function computes now, or whenever a graph runs, as int32 `(2,)`."""
    if tf.executing_eagerly():
        return tf.constant(function(), tf.int32)
    numbers = tf.numpy_function(lambda: np.asarray(function(), "int32"), [], tf.int32)
    numbers.set_shape((2,))
    return numbers
