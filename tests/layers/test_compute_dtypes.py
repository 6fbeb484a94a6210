"""Layers that compute in 16 bits: the core gives rows and takes gradients in the compute dtype, and computes in float32."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import sok_keras as sok
from products import Product, product_model
from reference import FAST, rows_of, to_numpy

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
IDS = np.array([[5, 1, 5], [9, 9, 2], [0, 3, 1], [7, 5, 0]], "int32")
WEIGHTS = np.random.default_rng(3).uniform(-1, 1, IDS.shape).astype("float32")


def layer_of(dim, dtype="float32", **options):
    layer = sok.DynamicEmbedding(dim, dtype=dtype, seed=1, name="e", **options)
    rows = np.random.default_rng(dim).normal(size=(10, dim)).astype("float32")
    layer.get_table().assign(np.arange(10), rows)
    return layer


def numbers(tensor):
    return to_numpy(ops.cast(tensor, "float32"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", ["{}", "mixed_{}"])
@pytest.mark.parametrize("dim", [1, 3, 8, 64])
@pytest.mark.parametrize("combiner", [None, "sum", "mean", "sqrtn"])
def test_rows_are_those_of_float32_rounded_once(dtype, policy, dim, combiner):
    weights = [WEIGHTS] if combiner else []
    expected = layer_of(dim, combiner=combiner)(IDS, *weights)
    layer = layer_of(dim, policy.format(dtype), combiner=combiner)
    rows = layer(IDS, *weights)
    assert keras.backend.standardize_dtype(rows.dtype) == dtype
    np.testing.assert_array_equal(numbers(rows), to_numpy(expected).astype(DTYPES[dtype]).astype("float32"))
    assert {plan.row_dtype for plan in layer._core._plans.values()} == {dtype}


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_the_range_and_those_that_are_no_numbers_are_rounded_as_numpy_rounds_them(dtype):
    rows = np.array([[1e5, -1e-7, 65519.0], [np.inf, np.nan, 3e38]], "float32")
    layer = sok.DynamicEmbedding(3, dtype=dtype)
    layer.get_table().assign([0, 1], rows)
    with np.errstate(over="ignore"):
        expected = rows.astype(DTYPES[dtype]).astype("float32")
    np.testing.assert_array_equal(numbers(layer(np.array([0, 1], "int32"))), expected)


def trained(dim, dtype, optimizer, coefficients, combiner=None, embedding_dtype="float32"):
    layer = layer_of(dim, dtype, combiner=combiner, embedding_dtype=embedding_dtype)
    model = product_model(layer, optimizer, IDS.shape[1], coefficients.shape[1:], **FAST)
    model.fit([IDS, coefficients], np.zeros(len(IDS)), batch_size=2, epochs=3, shuffle=False, verbose=0)
    return rows_of(layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "combiner", "embedding_dtype"), [(3, None, "float32"), (8, "mean", "bfloat16")])
def test_gradients_are_merged_and_applied_in_float32(dtype, dim, combiner, embedding_dtype):
    """Gradients that numbers of 16 bits are leave the same bits."""
    shape = (len(IDS), 1 if combiner else IDS.shape[1], dim)
    coefficients = np.random.default_rng(1).normal(size=shape).astype(DTYPES[dtype]).astype("float32")
    rows = [
        trained(dim, compute, keras.optimizers.Adam(0.02), coefficients, combiner, embedding_dtype)
        for compute in ("float32", dtype)
    ]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_weights_are_float32(dtype):
    """The gradients of rows are ones here, in any dtype."""

    def gradient(compute):
        layer = layer_of(4, compute, combiner="sum")
        inputs = [keras.Input(IDS.shape[1:], dtype="int32"), keras.Input((1,))]
        scaled = keras.layers.Dense(IDS.shape[1], use_bias=False, dtype="float32", kernel_initializer="ones", name="d")
        outputs = Product(dtype="float32")(
            keras.layers.Reshape((1, 4))(layer(inputs[0], scaled(inputs[1]))), ops.ones((1, 1, 4))
        )
        model = keras.Model(inputs, outputs)
        model.compile(
            sok.OptimizerWrapper(keras.optimizers.SGD(0.5)), loss=lambda _, products: ops.sum(products), **FAST
        )
        model.fit([IDS, WEIGHTS[:, :1]], np.zeros(len(IDS)), batch_size=4, verbose=0)
        return to_numpy(model.get_layer("d").kernel)

    np.testing.assert_allclose(gradient(dtype), gradient("float32"), rtol=1e-5)


def test_float64_layers_cast_rows_of_float32():
    layer = layer_of(3, "float64")
    np.testing.assert_array_equal(numbers(layer(IDS)), to_numpy(layer_of(3)(IDS)))
    assert {plan.row_dtype for plan in layer._core._plans.values()} == {"float32"}
