"""`out_of_vocabulary_key`: one row for all unknown ids."""

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, assert_close, to_numpy

DIM, SIZE, OTHER = 3, 10, 7
WIDE = 2**40


def dynamic(**options):
    return sok.DynamicEmbedding(DIM, "normal", seed=1, out_of_vocabulary_key=OTHER, **options)


def static(padding_key=None, **options):
    table = sok.TableConfig("t", SIZE, DIM, "normal", combiner="sum", out_of_vocabulary_key=OTHER, **options)
    return sok.DistributedEmbedding(sok.FeatureConfig("f", table, padding_key=padding_key))


def rows_of(table, keys):
    return table.find(keys)[0]


def test_unknown_ids_of_a_dynamic_table_have_the_row_of_the_key():
    for missing in ("initial", "zeros"):
        layer = dynamic(missing=missing)
        ids = np.array([5, OTHER, 9], "int32")
        first = to_numpy(layer(ids, training=False))
        assert_close(first, np.tile(first[1], (3, 1)))
        assert first.any() and len(layer.get_table()) == 0
        layer.get_table().assign([OTHER, 5], np.array([[1, 2, 3], [4, 5, 6]]))
        assert_close(layer(ids, training=False), np.array([[4, 5, 6], [1, 2, 3], [1, 2, 3]]))
        rows, found = layer.get_table().find([5, 2**63])
        assert_close(rows, np.array([[4, 5, 6], [1, 2, 3]]))
        assert found.tolist() == [True, False]


def test_training_makes_rows_of_their_own():
    layer = dynamic()
    rows = to_numpy(layer(np.array([5, 9], "int32"), training=True))
    assert not np.allclose(rows[0], rows[1]) and layer.get_table().export().keys.tolist() == [5, 9]


@pytest.mark.filterwarnings("ignore:.*is full")
def test_ids_without_room_have_the_row_of_the_key():
    layer = dynamic(max_capacity=2, check_mode="count")
    layer.build()
    layer.get_table().assign([OTHER], np.full((1, DIM), 2.0))
    rows = to_numpy(layer(np.array([5, 8, 9], "int32"), training=True))
    assert_close(rows[1:], np.full((2, DIM), 2.0))
    assert layer.get_table().export().keys.tolist() == [5, OTHER]


DTYPES = ["int8", "int32", "int64", "uint32", "uint64", "words"]


def as_dtype(ids, dtype):
    if dtype == "words":
        return sok.ids.split_words(np.array(ids, "int64"))
    if dtype in ("int64", "uint64") and BACKEND == "jax":
        pytest.skip("JAX without x64 takes 64-bit ids as two words")
    return np.array(ids, "int64").astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_outside_a_static_table_are_the_key(dtype):
    layer = static()
    unsigned = dtype.startswith("u")
    large = {"int8": 100, "int32": 2**31 - 1, "uint32": 2**32 - 1}.get(dtype, WIDE + 2)
    ids = as_dtype([[2, SIZE], [SIZE - 1, 10 if unsigned else -1], [large, 0]], dtype)
    rows = to_numpy(layer(ids, training=True))
    table = layer.get_tables()["t"]
    assert table.export().keys.tolist() == [0, 2, OTHER, SIZE - 1]
    of = dict(zip([0, 2, OTHER, SIZE - 1], rows_of(table, [0, 2, OTHER, SIZE - 1]), strict=True))
    assert_close(rows, np.stack([of[2] + of[OTHER], of[SIZE - 1] + of[OTHER], of[OTHER] + of[0]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_outside_a_static_table_stays_padding(dtype):
    padding = 11 if dtype.startswith("u") else -1
    layer = static(padding)
    rows = to_numpy(layer(as_dtype([[2, padding], [padding, SIZE + 2]], dtype), training=True))
    assert_close(rows, rows_of(layer.get_tables()["t"], [2, OTHER]))


def test_fit_trains_the_row_of_ids_outside():
    layer = static(optimizer=None)
    inputs = keras.Input((2,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    ids = np.array([[12, -4], [99, 1]], "int32")
    before = rows_of(layer.get_tables()["t"], [OTHER])
    model.fit(ids, np.ones((2, 1)), verbose=0)
    after = rows_of(layer.get_tables()["t"], [OTHER])
    assert not np.allclose(before, after)
    known = np.where((ids < 0) | (ids >= SIZE), OTHER, ids)
    assert_close(model.predict(ids, verbose=0), model.predict(known, verbose=0))


@pytest.mark.parametrize(
    ("size", "key", "options", "says"),
    [
        (SIZE, SIZE, {}, "0 to 9"),
        (SIZE, -1, {}, "0 to 9"),
        (None, 2**64, {}, "a 64-bit integer"),
        (None, "other", {}, "a 64-bit integer"),
        (SIZE, 3, {"out_of_vocabulary": "zeros"}, "`out_of_vocabulary` must not be given"),
    ],
)
def test_keys_that_cannot_be_are_refused(size, key, options, says):
    with pytest.raises(ValueError, match=says):
        sok.TableConfig("t", size, DIM, out_of_vocabulary_key=key, **options)


def test_configs_and_copies_keep_the_key():
    for layer in (dynamic(), static(), sok.DynamicEmbedding(DIM, out_of_vocabulary_key=2**64 - 1)):
        twin = type(layer).from_config(layer.get_config())
        assert twin.get_config() == layer.get_config()
    assert static().get_config()["tables"][0]["out_of_vocabulary_key"] == OTHER
    layer = sok.DynamicEmbedding(DIM, "normal", out_of_vocabulary_key=-1)
    layer.build()
    assert_close(rows_of(layer.get_table(), [2**64 - 1]), rows_of(layer.get_table(), [4]))
