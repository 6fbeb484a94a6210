"""A rank that trains beside tables that are not trained, with batches of which some are empty."""

import os
import sys

import keras
import numpy as np
from many_tables import sum_of_squares
from seeds import draw_seeds_from

import sok_keras as sok

STEPS, BATCH = 6, 8


def make_model(order):
    """`order`: for each layer whether its table is trained."""
    draw_seeds_from(0)
    ids = keras.Input((2,), dtype="int64")
    parts = [keras.layers.Dense(3, "tanh")(keras.ops.cast(ids, "float32") / 20)]
    for number, is_trained in enumerate(order):
        initializer = keras.initializers.RandomUniform(seed=number)
        layer = sok.DynamicEmbedding(4, combiner="sum", name=f"layer{number}", embeddings_initializer=initializer)
        layer.get_table().find_or_insert(np.arange(20))
        layer.trainable = is_trained
        parts.append(layer(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.05), gradient_reduction="sum")
    model.compile(optimizer, sum_of_squares)
    return model


def share(array, step):
    """The samples of this rank: all, half or none."""
    begin = step % 3 * BATCH // 2
    return array if sok.world_size() == 1 else array[:begin] if sok.rank() == 0 else array[begin:]


def main(folder):
    sok.init(timeout=30)
    arrays = {}
    for order in ((False,), (False, True), (True, False)):
        model = make_model(order)
        draw = np.random.default_rng(1)
        for step in range(STEPS):
            ids, targets = draw.integers(0, 20, (BATCH, 2)), draw.normal(size=(BATCH, 1)).astype("float32")
            model.train_on_batch(share(ids, step), share(targets, step))
            model.predict_on_batch(share(ids, step + 1))
            model(share(ids, step + 2), training=False)
        for number, variable in enumerate(v for v in model.trainable_variables if "trigger" not in v.path):
            arrays[f"{order} dense{number}"] = keras.ops.convert_to_numpy(variable)
    np.savez(os.path.join(folder, f"rank{sok.rank()}of{sok.world_size()}.npz"), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
