"""Masks, dtypes and nesting of what layers take and return."""

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import tensor, to_numpy

DIM = 4


# ---- masks, dtypes, nesting


@pytest.mark.parametrize("combiner", [None, "sum"])
def test_mask_zero_masks_ids_of_zero_unless_they_are_combined(combiner):
    layer = sok.DynamicEmbedding(DIM, mask_zero=True, combiner=combiner)
    mask = layer.compute_mask(tensor(np.array([[0, 3]], "int32")))
    assert mask is None if combiner else to_numpy(mask).tolist() == [[False, True]]


def test_rows_come_in_the_compute_dtype():
    layer = sok.DynamicEmbedding(DIM, dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(layer(np.array([1], "int32")).dtype) == "bfloat16"
    assert layer.get_table().export().rows.dtype == np.float32


@pytest.mark.parametrize("form", ["single", "list", "tuple", "nested"])
def test_output_is_nested_as_the_features(form):
    table = sok.TableConfig("t", None, DIM, combiner="sum")
    a, b = (sok.FeatureConfig(name, table) for name in "ab")
    x, y = np.zeros((2, 3), "int32"), np.zeros((2, 1, 3), "int32")
    configs, inputs = {
        "single": (a, x),
        "list": ([a, b], [x, y]),
        "tuple": ((a, b), (x, y)),
        "nested": ({"k": [a], "l": {"m": b}}, {"k": [x], "l": {"m": y}}),
    }[form]
    shapes = lambda tree: keras.tree.map_structure(lambda leaf: tuple(leaf.shape), tree)
    got = shapes(sok.DistributedEmbedding(configs)(inputs))
    first, second = (2, DIM), (2, 1, DIM)
    assert (
        got
        == {
            "single": first,
            "list": [first, second],
            "tuple": (first, second),
            "nested": {"k": [first], "l": {"m": second}},
        }[form]
    )


def test_static_and_dynamic_tables_of_a_layer_answer_by_their_own_rules():
    static = sok.TableConfig("static", 3, 2, "ones", out_of_vocabulary="zeros", combiner="sum")
    dynamic = sok.TableConfig("dynamic", None, 5, "ones", combiner="sum")
    layer = sok.DistributedEmbedding([sok.FeatureConfig("s", static), sok.FeatureConfig("d", dynamic)])
    ids = np.array([[0, 2, 3, -1]], "int32")
    rows, others = layer([ids, ids], training=True)
    np.testing.assert_array_equal(to_numpy(rows), np.full((1, 2), 2.0))
    np.testing.assert_array_equal(to_numpy(others), np.full((1, 5), 4.0))
