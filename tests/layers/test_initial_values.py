"""Tables that start with rows."""

import copy
import pickle

import keras
import numpy as np
import pytest

import sok_keras as sok
from sok_keras.layers import base

DIM = 3


def some_rows(count=7):
    return np.random.default_rng(0).normal(size=(count, DIM)).astype("float32")


def model_of(layer):
    ids = keras.Input((2,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile(sok.OptimizerWrapper("adam"), "mse")
    return model


def test_the_first_rows_are_those_that_were_given(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_ROWS_AT_ONCE", 3)
    rows = some_rows()
    stored = np.memmap(tmp_path / "rows", "float32", "w+", shape=rows.shape)
    stored[:] = rows
    layer = sok.DynamicEmbedding(DIM, initial_value=stored, combiner="sum", name="items")
    model = model_of(layer)
    contents = layer.get_table().export()
    np.testing.assert_array_equal(contents.keys, np.arange(7))
    np.testing.assert_array_equal(contents.rows, rows)
    model.fit(np.array([[0, 6], [2, 100]], "int32"), np.zeros((2, 1)), verbose=0)
    trained = layer.get_table().export()
    assert trained.keys.tolist() == [*range(7), 100]
    same = (trained.rows[:7] == rows).all(axis=1)
    assert same.tolist() == [key not in (0, 2, 6) for key in range(7)]
    np.testing.assert_array_equal(stored, rows)
    # A copy of the layer has no rows to start with, and a model that is loaded has those of the file.
    assert len(model_of(sok.DynamicEmbedding.from_config(layer.get_config())).layers[1].get_table()) == 0
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").get_layer("items").get_table().export()
    np.testing.assert_array_equal(loaded.rows, trained.rows)


def test_lists_and_rows_of_sixteen_bits():
    layer = sok.DynamicEmbedding(
        2, initial_value=[[1.0, 2.0], [3.001, 4.0]], embedding_dtype="bfloat16", max_capacity=2
    )
    layer.build()
    layer.build()
    assert layer.get_table()[[1, 0]].tolist() == [[3, 4], [1, 2]]


def test_other_shapes_are_refused():
    for value, shape in [(np.zeros((4, 2)), r"\(4, 2\)"), (np.zeros(3), r"\(3,\)")]:
        with pytest.raises(ValueError, match=rf"shape \(n, 3\). Received: shape {shape}"):
            sok.DynamicEmbedding(DIM, initial_value=value)
    with pytest.raises(ValueError, match="at most `max_capacity` rows, 6. Received: 7 rows"):
        sok.DynamicEmbedding(DIM, initial_value=some_rows(), max_capacity=6)


def test_tables_of_a_layer_start_with_their_rows():
    rows = some_rows()
    tables = [
        sok.TableConfig("users", np.int64(9), DIM, combiner="sum", initial_value=rows),
        sok.TableConfig("items", None, DIM, combiner="sum", initial_value=rows[:2]),
        sok.TableConfig("shops", 5, DIM, combiner="sum"),
    ]
    layer = sok.DistributedEmbedding({table.name: sok.FeatureConfig(table.name, table) for table in tables})
    layer.build()
    layer.build()
    users, items, shops = layer.get_tables().values()
    np.testing.assert_array_equal(users.find(np.arange(7))[0], rows)
    assert (len(users), items.keys().tolist(), len(shops)) == (7, [0, 1], 0)
    found = layer({name: np.array([[1, 0]], "int32") for name in ("users", "items", "shops")})
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found["users"])[0], rows[:2].sum(axis=0), rtol=1e-6)
    again = sok.DistributedEmbedding.from_config(layer.get_config())
    again.build()
    assert [len(table) for table in again.get_tables().values()] == [0, 0, 0]
    with pytest.raises(ValueError, match="at most `vocabulary_size` rows, 6. Received: 7 rows"):
        sok.TableConfig("users", 6, DIM, initial_value=rows)


def test_sizes_may_be_integers_of_numpy(tmp_path):
    policies = sok.policies
    layer = sok.DynamicEmbedding(
        np.int32(DIM),
        max_capacity=np.int64(8),
        initial_capacity=np.uint8(2),
        eviction=policies.LFU(half_life=np.int64(5)),
        admission=policies.Frequency(np.int64(2), memory=np.int64(640)),
        time_to_live=np.int64(50),
        name="items",
    )
    model_of(layer).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").get_layer("items")
    assert loaded.get_config() == layer.get_config() and loaded.max_capacity == 8


def test_rows_that_were_loaded_before_stay(tmp_path):
    rows = some_rows()
    saved = sok.DynamicEmbedding(DIM, name="items")
    saved.build()
    saved.get_table().assign([0, 50], rows[:2] + 9)
    sok.dump(tmp_path / "dump", saved)
    layer = sok.DynamicEmbedding(DIM, initial_value=rows, name="items")
    sok.load(tmp_path / "dump", layer)
    layer.build()
    assert layer.get_table().keys().tolist() == [0, 50]
    np.testing.assert_array_equal(layer.get_table()[[0, 50]], rows[:2] + 9)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_starts_with_the_rows_that_were_given(copied):
    rows = some_rows()
    for built in (False, True):
        layer = sok.DynamicEmbedding(DIM, initial_value=rows)
        if built:
            layer.build()
        again = copied(layer)
        again.build()
        np.testing.assert_array_equal(again.get_table().export().rows, rows)


def test_what_has_no_numbers_is_refused():
    with pytest.raises(ValueError, match="`initial_value` must have numbers"):
        sok.DynamicEmbedding(2, initial_value=[["a", "b"]])
    value = keras.Variable(np.ones((2, DIM)))
    layer = sok.DynamicEmbedding(DIM, initial_value=value)
    layer.build()
    assert (layer.get_table()[[0, 1]] == 1).all()
