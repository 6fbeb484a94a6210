"""A rank that looks up and trains rows, which travel in the type that is asked for."""

import os
import sys

import keras
import ml_dtypes
import numpy as np
from seeds import draw_seeds_from

import sok_keras as sok


def main(folder, dtype):
    sok.init(timeout=30, exchange_dtype=dtype)
    draw_seeds_from(0)
    layer = sok.DynamicEmbedding(8, keras.initializers.RandomUniform(seed=1))
    model = keras.Sequential([keras.Input((1,), dtype="int32"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), "mse")
    ids, table = np.arange(64, dtype="int32"), layer.get_table()
    table.find_or_insert(ids)

    exact, found = table.find(ids)
    assert found.all()
    is_own = np.isin(ids, table.keys(local=True))
    assert 0 < is_own.sum() < len(ids)
    travelled = exact.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else "float32").astype("float32")
    rows = keras.ops.convert_to_numpy(layer(ids[:, None], training=False))[:, 0]
    np.testing.assert_array_equal(rows, np.where(is_own[:, None], exact, travelled))
    assert (dtype == "float32") == bool((rows == exact).all())

    model.train_on_batch(ids[:, None], np.linspace(-1, 1, len(ids))[:, None])
    trained = table.find(ids)[0]
    if sok.rank() == 0:
        np.savez(os.path.join(folder, dtype), before=exact, after=trained)


if __name__ == "__main__":
    main(*sys.argv[1:])
