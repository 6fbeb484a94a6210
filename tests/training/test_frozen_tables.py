"""`TableConfig(trainable=False)`: one table of a layer stays as it is."""

import keras
import numpy as np
import pytest
from keras import layers

import sok_keras as sok
from reference import assert_close, to_numpy

DIM = 4
IDS = np.random.default_rng(0).integers(0, 9, (32, 3)).astype("int32")
TARGETS = IDS.sum(1, keepdims=True).astype("float32")


def two_tables(trainable, weighted=False, **policies):
    configs = [
        sok.TableConfig("learns", None, DIM, "normal", combiner="sum", seed=1, **policies),
        sok.TableConfig("frozen", None, DIM, "normal", combiner="sum", seed=2, trainable=trainable, **policies),
    ]
    features = {config.name: sok.FeatureConfig(config.name, config) for config in configs}
    return sok.DistributedEmbedding(features, name="both")


def model_of(layer):
    inputs = {name: keras.Input((3,), dtype="int32", name=name) for name in ("learns", "frozen")}
    rows = layer(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([rows["learns"], rows["frozen"]])))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    return model


def fit(model):
    return model.fit({"learns": IDS, "frozen": IDS}, TARGETS, epochs=3, verbose=0).history["loss"]


def test_a_frozen_table_keeps_its_rows_and_gets_none():
    layer = two_tables(trainable=False)
    layer.build()
    known = np.ones((3, DIM), "float32")
    layer.get_tables()["frozen"].assign([0, 1, 2], known)
    losses = fit(model_of(layer))
    assert losses[-1] < losses[0]
    contents = layer.get_tables()["frozen"].export()
    assert contents.keys.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(contents.rows, known)
    assert layer.get_tables()["learns"].export().keys.tolist() == list(range(9))
    assert layer.get_tables()["frozen"].stats().dropped_gradients == 0


@pytest.mark.parametrize("trainable", [True, False])
def test_the_policies_of_a_frozen_table_do_nothing_to_its_rows(trainable):
    layer = two_tables(
        trainable, time_to_live=2, eviction=sok.policies.LFU(half_life=1, count_inference=True), max_capacity=50
    )
    layer.build()
    table, unused = layer.get_tables()["frozen"], np.array([[20, 21]], "int32")
    table.assign(unused[0], np.ones((2, DIM), "float32"))
    for _ in range(4):
        layer({"learns": unused, "frozen": unused}, training=False)
    fit(model_of(layer))
    if trainable:
        assert set(table.keys().tolist()) == set(range(9))
        return
    contents = table.export(scores=True)
    assert contents.keys.tolist() == [20, 21] and contents.scores.tolist() == [4, 4]
    assert table.stats().expired == 0 and table.explain(20).state == "present"


def test_the_other_tables_learn_as_if_all_did():
    """With rows that do not move, both train alike."""
    frozen, free = two_tables(trainable=False), two_tables(trainable=True)
    results = []
    for layer in (frozen, free):
        rows = layer({"learns": IDS, "frozen": IDS}, training=True)
        assert_close(rows["learns"], layer.get_tables()["learns"].find(IDS)[0].reshape(*IDS.shape, DIM).sum(1), 1e-5)
        results.append(to_numpy(rows["learns"]))
    assert_close(results[0], results[1])
    assert len(frozen.get_tables()["frozen"]) == 0 and len(free.get_tables()["frozen"]) == 9
    # An id without a row answers by its first value, as where it has one.
    assert_close(
        frozen({"learns": IDS, "frozen": IDS})["frozen"], to_numpy(free({"learns": IDS, "frozen": IDS})["frozen"])
    )


def test_a_layer_whose_tables_are_all_frozen_trains_with_others():
    config = sok.TableConfig("frozen", None, DIM, combiner="sum", trainable=False)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("f", config))
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(
        inputs,
        layers.Dense(1)(layers.Concatenate()([layer(inputs), sok.DynamicEmbedding(DIM, combiner="sum")(inputs)])),
    )
    model.compile(sok.OptimizerWrapper("adam"), "mse")
    model.fit(IDS, TARGETS, verbose=0)
    assert len(layer.get_tables()["frozen"]) == 0


@pytest.mark.parametrize("trainable", [True, False])
def test_configs_and_dumps_keep_it(trainable, tmp_path):
    layer = two_tables(trainable)
    twin = type(layer).from_config(layer.get_config())
    assert twin.get_config() == layer.get_config()
    assert twin.feature_configs["frozen"].table.trainable is trainable
    model = model_of(layer)
    fit(model)
    sok.dump(tmp_path / "d", model)
    again = model_of(two_tables(trainable))
    sok.load(tmp_path / "d", again)
    x = {"learns": IDS, "frozen": IDS}
    assert_close(again.predict(x, verbose=0), model.predict(x, verbose=0))
    model.save(tmp_path / "m.keras")
    assert_close(keras.models.load_model(tmp_path / "m.keras").predict(x, verbose=0), model.predict(x, verbose=0))
