"""A rank that has its share of the batch in the notebook of HugeCTR's TensorFlow plugin, for each kind of embedding and of update."""

import functools
import itertools

import keras
import numpy as np
from keras import ops

import sok_keras as sok
from notebook import FIRST_FORWARD, NOTEBOOK_KEYS, NOTEBOOK_ROWS, SECOND_FORWARD
from one_table import train_step
from reference import to_numpy

STEPS = 6


def adam():
    return keras.optimizers.Adam(0.1, beta_1=0.9, beta_2=0.99, epsilon=1e-3)


def dense_rows(batches):
    """The rows of a dense variable after these batches."""
    variable, optimizer = keras.Variable(NOTEBOOK_ROWS), adam()
    optimizer.build([variable])
    for keys in batches:
        gradient = np.zeros_like(NOTEBOOK_ROWS)
        np.add.at(gradient, keys[keys >= 0], 1.0)
        optimizer.apply([ops.convert_to_tensor(gradient)], [variable])
    return to_numpy(variable)


def sum_of_rows(layer, keys):
    return ops.sum(layer(keys, training=True))


def main():
    sok.init(timeout=60)
    rank, size = sok.rank(), sok.world_size()
    own = slice(rank * 4 // size, (rank + 1) * 4 // size)
    kinds = {"distributed": "distributed", "localized": f"localized:{size - 1}"}
    # After the first step, batches lack keys that have moved.
    batches = [NOTEBOOK_KEYS, *(np.where(step % 3 == NOTEBOOK_KEYS, -1, NOTEBOOK_KEYS) for step in range(STEPS))]
    for (kind, placement), mode in itertools.product(kinds.items(), ("local", "global", "lazy_global")):
        table = sok.TableConfig("t", None, 4, combiner="sum", placement=placement, initial_value=NOTEBOOK_ROWS)
        layer = sok.DistributedEmbedding(sok.FeatureConfig("f", table, padding_key=-1))
        optimizer = sok.OptimizerWrapper(adam(), update_mode=mode, gradient_reduction="sum")
        layer.build()
        np.testing.assert_array_equal(to_numpy(layer(NOTEBOOK_KEYS[own])), FIRST_FORWARD[own])
        for step, keys in enumerate(batches):
            train_step(layer, optimizer, functools.partial(sum_of_rows, layer, keys[own]))
            if step == 0:
                found = to_numpy(layer(NOTEBOOK_KEYS[own], training=False))
                np.testing.assert_allclose(found, SECOND_FORWARD[own], rtol=2e-6)
        rows = layer.get_tables()["t"].find(np.arange(8))[0]
        if mode == "local":
            np.testing.assert_array_equal(rows[[3, 4, 5, 7]], NOTEBOOK_ROWS[[3, 4, 5, 7]])
            assert (rows[[0, 1, 2, 6]] < NOTEBOOK_ROWS[[0, 1, 2, 6]] - 0.2).all()
        else:
            np.testing.assert_allclose(rows, dense_rows(batches), rtol=1e-5, err_msg=f"{kind}, {mode}")


main()
