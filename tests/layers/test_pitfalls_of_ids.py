"""Pitfalls 17 and 18: ids. Their numbers are those of test_pitfalls.py."""

import keras
import numpy as np
import pytest
from keras import optimizers

import sok_keras as sok
from reference import (
    BACKEND,
    DIM,
    HOTNESS,
    dense_layer,
)

on_jax = pytest.mark.skipif(BACKEND != "jax", reason="only JAX has this behavior")


# ---- 17 and 18: ids

WIDE = 2**40 + 5


@on_jax
def test_pitfall_17_wide_ids_are_refused_where_jax_would_cut_them():
    with pytest.raises(ValueError, match="JAX_ENABLE_X64=1"):
        sok.DynamicEmbedding(DIM)(keras.Input((HOTNESS,), dtype="int64"))
    with pytest.raises(ValueError, match="preprocess"):
        sok.DynamicEmbedding(DIM)(np.array([WIDE]))


@on_jax
def test_pitfall_17_wide_ids_train_in_two_words():
    layer = sok.DynamicEmbedding(DIM, combiner="sum")
    words = {word: keras.Input((2,), dtype="int32", name=word) for word in ("low", "high")}
    model = keras.Model(words, dense_layer()(layer(words)))
    model.compile(sok.OptimizerWrapper(optimizers.SGD(0.1)), "mse")
    model.fit(layer.preprocess(np.array([[WIDE, 5], [-1, 5]])), np.zeros((2, 2)), verbose=0)
    assert layer.get_table().export().keys.tolist() == [-1, 5, WIDE]


def test_pitfall_17_wide_ids_stay_wide():
    layer = sok.DynamicEmbedding(DIM)
    if BACKEND == "jax":
        import jax

        with jax.enable_x64(True):
            layer(np.array([WIDE, -1, 5]), training=True)
    else:
        layer(np.array([WIDE, -1, 5]), training=True)
    assert layer.get_table().export().keys.tolist() == [-1, 5, WIDE]


def test_pitfall_18_float_ids_are_refused_with_the_remedy():
    """`keras.Input` makes float32 by default, in which 2**24 + 1 is 2**24."""
    with pytest.raises(ValueError, match=r'keras.Input\(shape, dtype="int64"\)'):
        sok.DynamicEmbedding(DIM)(keras.Input((HOTNESS,)))
    with pytest.raises(ValueError, match="Ids must be integers"):
        sok.DynamicEmbedding(DIM)(np.zeros((2, 3), "float32"))
