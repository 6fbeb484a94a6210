"""Ranks whose layers compute in 16 bits. Gradients that numbers of 16 bits are leave the same rows as in float32."""

import keras
import ml_dtypes
import numpy as np
from keras import ops
from seeds import draw_seeds_from

import sok_keras as sok
from products import product_model

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
HOTNESS, DIM, VOCABULARY = 6, 8, 48


def trained(dtype, combiner):
    """Rows of the table after three steps, and as the layer gives them."""
    draw_seeds_from(0)
    layer = sok.DynamicEmbedding(DIM, keras.initializers.RandomUniform(seed=1), dtype=dtype, combiner=combiner)
    shape = (1 if combiner else HOTNESS, DIM)
    model = product_model(layer, keras.optimizers.Adam(0.02), HOTNESS, shape)
    random = np.random.default_rng(sok.rank())
    for _ in range(3):
        ids = random.integers(0, VOCABULARY, (16, HOTNESS)).astype("int32")
        model.train_on_batch([ids, random.choice([-2.0, 0.5, 1.0], (16, *shape))], np.zeros((16, 1)))
    rows, is_there = layer.get_table().find(np.arange(VOCABULARY))
    assert is_there.all()
    outputs = layer(np.arange(VOCABULARY, dtype="int32").reshape(-1, HOTNESS), training=False)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    return rows, ops.convert_to_numpy(ops.cast(outputs, "float32"))


def main():
    sok.init(timeout=60)
    for combiner in (None, "sum"):
        rows, outputs = trained("float32", combiner)
        for dtype in DTYPES:
            narrow_rows, narrow_outputs = trained(dtype, combiner)
            np.testing.assert_array_equal(narrow_rows, rows)
            np.testing.assert_array_equal(narrow_outputs, outputs.astype(DTYPES[dtype]).astype("float32"))


if __name__ == "__main__":
    main()
