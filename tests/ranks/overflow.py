"""A rank whose gradients overflow in one step: all ranks skip it, and go on."""

import sys

import keras
import numpy as np
from seeds import draw_seeds_from
from train import share

import sok_keras as sok


def main(folder):
    del folder
    sok.init(timeout=30)
    draw_seeds_from(0)
    inputs = keras.Input((2,), dtype="int64")
    layer = sok.DynamicEmbedding(4, combiner="sum", seed=1, dtype="mixed_float16")
    hidden = keras.layers.Dense(3, dtype="mixed_float16")(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
    inner = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    model.compile(optimizer, "mse")
    ids, targets = np.arange(24).reshape(12, 2), np.ones((12, 1), "float32")
    scales, rows = [], []
    for step in range(4):
        own = share(targets).copy()
        if step == 1 and sok.rank() == sok.world_size() - 1:
            own[:] = np.inf
        model.train_on_batch(share(ids), own)
        scales.append(float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)))
        rows.append(layer.get_table().export().rows)
    assert scales == [8.0, 4.0, 4.0, 4.0], scales
    assert int(keras.ops.convert_to_numpy(inner.iterations)) == 3
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.isfinite(rows[3]).all() and (rows[2] != rows[1]).any()


if __name__ == "__main__":
    main(*sys.argv[1:])
