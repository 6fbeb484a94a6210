"""Ranks whose layers compute in 16 bits. Gradients that numbers of 16 bits are leave the same rows as in float32."""

import keras
import numpy as np
from keras import ops
from seeds import draw_seeds_from

import sok_keras as sok


class Product(keras.layers.Layer):
    """Sum of products with coefficients, which are the gradients of the rows."""

    def call(self, rows, coefficients):
        return ops.sum(ops.cast(rows, "float32") * coefficients, axis=(1, 2), keepdims=True)[:, 0]


def trained(dtype, combiner):
    draw_seeds_from(0)
    ids, given = keras.Input((6,), dtype="int32"), keras.Input((1 if combiner else 6, 8))
    layer = sok.DynamicEmbedding(8, keras.initializers.RandomUniform(seed=1), dtype=dtype, combiner=combiner)
    rows = layer(ids)
    assert keras.backend.standardize_dtype(rows.dtype) == dtype
    if combiner:
        rows = keras.layers.Reshape((1, 8))(rows)
    model = keras.Model([ids, given], Product(dtype="float32")(rows, given))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.02)), loss=lambda _, products: ops.sum(products))
    random = np.random.default_rng(sok.rank())
    for _ in range(3):
        batch = random.integers(0, 50, (16, 6)).astype("int32")
        model.train_on_batch([batch, random.choice([-2.0, 0.5, 1.0], (16, *given.shape[1:]))], np.zeros((16, 1)))
    table = layer.get_table()
    found, is_there = table.find(np.arange(50))
    looked_up = ops.convert_to_numpy(
        ops.cast(layer(np.arange(48, dtype="int32").reshape(8, 6), training=False), "float32")
    )
    return found, is_there, looked_up


def main():
    sok.init(timeout=60)
    for combiner in (None, "sum"):
        rows, is_there, outputs = trained("float32", combiner)
        assert is_there.sum() > 40
        for dtype in ("bfloat16", "float16"):
            narrow, _, narrow_outputs = trained(dtype, combiner)
            np.testing.assert_array_equal(narrow, rows)
            np.testing.assert_array_equal(
                narrow_outputs, ops.convert_to_numpy(ops.cast(ops.cast(outputs, dtype), "float32"))
            )


if __name__ == "__main__":
    main()
