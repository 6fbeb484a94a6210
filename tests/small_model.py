"""A model with one dynamic table and a dense layer, which tests dump and load."""

import keras
import numpy as np
from keras import layers

import sok_keras as sok


def make_model(**arguments):
    """`arguments`: of the `DynamicEmbedding`."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((), dtype="int32")
    layer = sok.DynamicEmbedding(4, name="ids", seed=1, **arguments)
    model = keras.Model(ids, layers.Dense(1, name="dense")(layer(ids)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    return model


def train(model, *ids):
    """Makes a step with these ids."""
    return model.train_on_batch(np.array(ids, "int32"), np.ones((len(ids), 1)))


def contents(model):
    """Copies of the keys, rows and states of the table, and of the dense variables."""
    rows = model.get_layer("ids").get_table().export(states=True)
    dense = [keras.ops.convert_to_numpy(v).copy() for v in model.get_layer("dense").variables]
    return [rows.keys, rows.rows, *(rows.states[name] for name in sorted(rows.states)), *dense]
