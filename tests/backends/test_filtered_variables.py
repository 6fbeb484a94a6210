"""Variables of TensorFlow whose ids get their rows by chance."""

import keras
import numpy as np
import pytest
from test_variables import DIM, rows_of, variable

import sok_keras as sok
from reference import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="variables of TensorFlow")

if BACKEND == "tensorflow":
    import tensorflow as tf


@pytest.mark.parametrize("changes", [False, True], ids=["as it came", "changed"])
def test_ids_get_their_rows_by_chance_with_a_filter(changes):
    """Beside a variable without a filter. `changes`: whether the program changes the gradient before it applies it."""
    v, other = variable(initializer="3", filter_ratio=0.3), variable(initializer="3")
    sok.assign(v, [5], np.full((1, DIM), 8.0))
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    ids = tf.RaggedTensor.from_tensor(tf.reshape(tf.range(1000, dtype=tf.int64), (500, 2)))

    def step():
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse([v, other], [ids, ids], combiners=["mean", "sum"], use_low_frequency_filter=True)
            loss = tf.reduce_sum(rows[0]) + tf.reduce_sum(rows[1])
        gradients = tape.gradient(loss, [v, other])
        if changes:
            gradients = [tf.IndexedSlices(2 * one.values, one.indices, one.dense_shape) for one in gradients]
        optimizer.apply_gradients(zip(gradients, [v, other], strict=True))
        return rows[0].numpy()

    first = step()
    assert (first[2] == 4).all() and not np.delete(first, 2, axis=0).any()  # `"mean"` counts a row of zeros
    admitted, factor = rows_of(v), 2 if changes else 1
    assert 200 < len(admitted) < 400 and v.table.stats().filtered == 1000 - len(admitted)
    assert all((np.array(row) == (8 if key == 5 else 3) - 0.5 * factor).all() for key, row in admitted.items())
    assert len(rows_of(other)) == 1000
    step()
    assert set(admitted) < set(rows_of(v)) and 430 < len(rows_of(v)) < 600
    with pytest.raises(ValueError, match="`use_low_frequency_filter` must be True"):
        sok.lookup_sparse(v, ids)
    before = len(rows_of(v))
    sok.lookup_sparse(v, ids, training=False)
    assert len(rows_of(v)) == before
