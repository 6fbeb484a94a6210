"""Variables of TensorFlow whose rows are in tables of the core."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

import sok_keras.backend.tensorflow as framework
from sok_keras.backend.private_tensorflow import (
    ResourceVariable,
    restore_by,
    should_record_backprop,
    tracing_type,
    variable_accessed,
)
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


class Call(NamedTuple):
    """A lookup of variables whose tables were made together.

    Attributes:
        plan: The plan of the lookup.
        inputs: For each variable ids of any shape, or those of bags `(n,)` and row splits `(rows + 1,)`.
        weights: For each variable those of its ids, or None.
        combiners: How the rows of bags are combined.
        insertion: When ids without a row get one.
    """

    plan: object
    inputs: list
    weights: list
    combiners: list
    insertion: object

    def rows(self, trigger):
        """Looks up rows of which no gradients come."""
        return framework.lookup(self.plan, trigger, False, self.inputs, self.weights, self.insertion)

    def lookup(self, trigger):
        """Looks up rows, a list of tensors. Returns them and the number of the lookup."""
        return framework.lookup_to_push(self.plan, trigger, self.inputs, self.weights, self.insertion)

    def push(self, number, gradients):
        """Hands the gradients of the rows of a lookup to the tables. Returns the ticket."""
        return framework.push(self.plan, number, gradients, self.weights)

    def merged(self, gradients):
        """Returns for each variable distinct ids, each with the sum of its gradients."""
        of_all = list(zip(self.inputs, self.weights, self.combiners, gradients, strict=True))
        if self.plan.gpu is not None:
            # Where the gradients are, TensorFlow's own operations merge them.
            return [merged_bags(*of_one) for of_one in of_all]
        return framework.merge_gradients(of_all)


class RowGradients:
    """Gradients of the rows of a saved lookup. They were not pushed to the tables yet.

    Attributes:
        call: The lookup.
        number: Its number.
        variables: Its variables.
        gradients: Those of the rows of each.
        step: Number of optimizer steps before the lookup.
    """

    def __init__(self, call, number, variables, gradients, step):
        self.call, self.number, self.variables, self.gradients, self.step = call, number, variables, gradients, step
        self._slices = None

    def slices(self):
        """Returns for each variable distinct ids, sums of gradients and the dense shape, which are computed when one of them is first asked for."""
        if self._slices is None:
            first = self.gradients[0]
            # A graph inside of this one, as `tf.cond` makes, may ask first.
            place = first.graph.as_default() if tf.is_symbolic_tensor(first) else tf.init_scope()
            with place:
                merged = zip(self.variables, self.call.merged(self.gradients), strict=True)
                self._slices = [
                    (tf.cast(keys, variable.key_type), rows, shape_of(variable)) for variable, (keys, rows) in merged
                ]
        return self._slices

    def made(self, gradient, variable):
        """Whether a gradient of a variable is one of these."""
        return isinstance(gradient, LookupSlices) and gradient.of_rows is self and gradient.variable is variable


class VariableSlices(tf.IndexedSlices):
    """The gradient of a variable of this package. What a program makes of it is a plain `tf.IndexedSlices`, and has no `variable`."""

    def __init__(self, variable, values, indices, dense_shape):
        super().__init__(values, indices, dense_shape)
        self.variable = variable


class LookupSlices(tf.IndexedSlices):
    """The gradient of a variable that was looked up. Its keys and rows are computed when a program reads them.

    What a program makes of it is a plain `tf.IndexedSlices`.
    """

    def __init__(self, of_rows, number):
        self.of_rows, self._number = of_rows, number

    def __reduce__(self):
        return tf.IndexedSlices, (self.values, self.indices, self.dense_shape)

    @property
    def variable(self):
        return self.of_rows.variables[self._number]

    @property
    def _indices(self):
        return self.of_rows.slices()[self._number][0]

    @property
    def _values(self):
        return self.of_rows.slices()[self._number][1]

    @property
    def _dense_shape(self):
        return self.of_rows.slices()[self._number][2]


def shape_of(variable):
    """The dense shape of the gradient of a variable that grows."""
    return tf.constant([-1, variable.dimension], tf.int64)


def shape_of_slices(slices):
    """Returns the number of rows of the variable whose gradient this is, or -1 if it grows, and that of columns. None: it is not known."""
    lengths = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
    return None if lengths is None else int(lengths[0]), slices.values.shape[-1]


class Steps:
    """Counts the optimizer steps of tables, and the lookups that were saved since the last one.

    Attributes:
        number: Number of the steps so far.
        num_saved: Number of the lookups that were saved since the last one.
    """

    # Rows of saved lookups are not evicted, and the tables keep a limited number of lookups.
    MAX_SAVED = 8

    def __init__(self):
        self.number = self.num_saved = 0

    def save(self):
        """Counts a lookup. Returns whether it may be saved."""
        self.num_saved += 1
        return self.num_saved <= self.MAX_SAVED

    def end(self):
        """Notes an optimizer step: lookups before it are forgotten."""
        self.number += 1
        self.num_saved = 0


def read(variables, trigger, call, steps):
    """Returns the rows of a `Call`, a tensor for each variable, differentiable in the variables.

    Where a tape will ask for gradients, the tables keep the lookup. If the optimizer is given the gradients of the backward pass as they are, the
    tables take them without a second lookup.

    Args:
        variables: `TableVariable`s.
        trigger: The trigger of their tables.
        call: The lookup.
        steps: The `Steps` of the tables.
    """
    for variable in variables:
        variable_accessed(variable)
    value = tf.stop_gradient(tf.convert_to_tensor(trigger))
    handles = [variable.handle for variable in variables]
    is_saved, step = should_record_backprop(handles) and steps.save(), steps.number

    @tf.custom_gradient
    def differentiable(*handles):
        del handles
        rows, number = call.lookup(value) if is_saved else (call.rows(value), None)

        def backward(*upstream):
            # Where functions call each other, TensorFlow may run the backward pass first: these gradients need not depend on rows. The rows must
            # become an input of its graph.
            with tf.control_dependencies([tf.identity(rows[0])]):
                gradients = [tf.identity(tf.convert_to_tensor(gradient)) for gradient in upstream]
            if is_saved:
                of_rows = RowGradients(call, number, variables, gradients, step)
                return [LookupSlices(of_rows, place) for place in range(len(variables))]
            merged = zip(variables, call.merged(gradients), strict=True)
            return [
                VariableSlices(variable, rows, tf.cast(keys, variable.key_type), shape_of(variable))
                for variable, (keys, rows) in merged
            ]

        return rows, backward

    return differentiable(*handles)


def taken(given, steps):
    """Pushes the gradients of saved lookups to the tables.

    It pushes those of a lookup if all of them are given, unchanged, and no optimizer step came after the lookup.

    Args:
        given: Pairs of a gradient and its variable, whose tables were made together.
        steps: The `Steps` of the tables.

    Returns:
        The sum of the tickets, or None, and the other pairs.
    """
    ticket, left = None, list(given)
    for of_rows in {gradient.of_rows: None for gradient, _ in given if isinstance(gradient, LookupSlices)}:
        own = [pair for pair in left if of_rows.made(*pair)]
        is_whole = len(own) == len({id(variable) for _, variable in own}) == len(of_rows.variables)
        if not is_whole or of_rows.step != steps.number:
            continue
        pushed = of_rows.call.push(of_rows.number, of_rows.gradients)
        ticket = pushed if ticket is None else ticket + pushed
        left = [pair for pair in left if not of_rows.made(*pair)]
    return ticket, left


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
