"""A rank that trains variables of TensorFlow by its share of each batch."""

import datetime
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import sok_keras as sok

STEPS, BATCH = 20, 12


def main(folder):
    sok.init(timeout=60)
    rank, world_size = sok.rank(), sok.world_size()
    variables = [
        sok.DynamicVariable(3, initializer="1", name="spread"),
        sok.DynamicVariable(2, initializer="2", name="whole", mode="localized:0"),
    ]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1), gradient_reduction="sum")

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def step(ids):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(variables, [ids, ids], combiners=["sum", "mean"])
            loss = tf.add_n([tf.reduce_sum(tf.square(row)) for row in rows])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return rows

    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        lengths = draw.integers(0, 4, BATCH)
        batch = tf.RaggedTensor.from_row_lengths(draw.integers(0, 40, lengths.sum()), lengths)
        step(batch[rank * BATCH // world_size : (rank + 1) * BATCH // world_size])
    own = [sok.export(variable) for variable in variables]
    assert own[1][0].shape[0] == 0 or rank == 0
    arrays = {}
    for variable in variables:
        contents = variable.table.export(states=True)
        arrays |= {f"{variable.name} keys": contents.keys, f"{variable.name} rows": contents.rows}
    keys, rows = sok.incremental_model_dump(variables[:1], datetime.datetime.now(datetime.timezone.utc))
    order = np.argsort(keys[0])
    np.testing.assert_array_equal(keys[0][order], arrays[f"{variables[0].name} keys"])
    np.testing.assert_array_equal(rows[0][order], arrays[f"{variables[0].name} rows"])
    np.savez(os.path.join(folder, f"rank{rank}of{world_size}.npz"), **arrays)
    # Each rank saves its rows.
    checkpoint = tf.train.Checkpoint(variables=variables)
    saved = checkpoint.save(os.path.join(folder, f"checkpoint{rank}of{world_size}"))
    step(tf.ragged.constant([[1, 1000], [2000]], dtype=tf.int64))
    checkpoint.restore(saved)
    for variable in variables:
        contents = variable.table.export(states=True)
        np.testing.assert_array_equal(contents.keys, arrays[f"{variable.name} keys"])
        np.testing.assert_array_equal(contents.rows, arrays[f"{variable.name} rows"])
        assert set(contents.states) == {"accumulator"}


main(sys.argv[1])
