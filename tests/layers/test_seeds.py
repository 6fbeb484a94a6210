"""The seed belongs to the rows: whatever brings rows brings it, so that ids without a row answer as they did."""

import copy
import pickle
import warnings

import keras
import numpy as np
import pytest

import sok_keras as sok
from dumped import contents_of, run
from reference import DIM, small_model

UNKNOWN = np.arange(10**6, 10**6 + 5)
KINDS = ("dynamic", "distributed")


def seedless(kind):
    """A layer whose seeds are drawn; with rows."""
    if kind == "dynamic":
        return sok.DynamicEmbedding(DIM)
    configs = [sok.TableConfig("one", None, DIM), sok.TableConfig("two", None, DIM), sok.TableConfig("static", 9, DIM)]
    return sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs])


def tables_of(layer):
    return [layer.get_table()] if isinstance(layer, sok.DynamicEmbedding) else list(layer.get_tables().values())


def filled(layer):
    for table in tables_of(layer):
        table.find_or_insert(np.arange(3))
    return layer


def model_of(layer):
    if isinstance(layer, sok.DynamicEmbedding):
        model = small_model(layer)
    else:
        inputs = [keras.Input((3,), dtype="int32") for _ in range(3)]
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()(layer(inputs))))
    model.compile(sok.OptimizerWrapper("adam"), "mse")
    return model


def layer_of(model):
    return next(layer for layer in model.layers if isinstance(layer, sok.DynamicEmbedding | sok.DistributedEmbedding))


def answers(layer):
    """Rows of unknown ids of each table; a static one is asked for those that it has no row of."""
    ids = [UNKNOWN if table.vocabulary_size is None else np.arange(3, 9) for table in tables_of(layer)]
    return [table.find(keys)[0] for table, keys in zip(tables_of(layer), ids, strict=True)]


def assert_same_answers(layer, other):
    for mine, theirs in zip(answers(layer), answers(other), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_array_equal(mine, theirs)


def loaded(load):
    """Of what loads into a model, the model."""
    return lambda path, model: (load(path, model), model)[1]


WAYS = {
    "dump": ("model.dump", sok.dump, loaded(sok.load)),
    "weights": (
        "model.weights.h5",
        lambda path, model: model.save_weights(path),
        loaded(lambda path, model: model.load_weights(path)),
    ),
    "keras": (
        "model.keras",
        lambda path, model: model.save(path),
        lambda path, _: keras.models.load_model(path),
    ),
}
SECOND_PROCESS = """
import pathlib, numpy as np, test_seeds as t
t.keras.utils.set_random_seed(99)
path = pathlib.Path({path!r})
for way, (name, _, load) in t.WAYS.items():
    model = load(path / name, t.model_of(t.seedless({kind!r})))
    np.savez(path / f"{{way}}.npz", *t.answers(t.layer_of(model)))
print("done")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_answer_in_a_second_process_as_in_the_first(tmp_path, kind):
    model = model_of(filled(seedless(kind)))
    for name, save, _ in WAYS.values():
        save(tmp_path / name, model)
    run(SECOND_PROCESS.format(kind=kind, path=str(tmp_path)))
    for way in WAYS:
        with np.load(tmp_path / f"{way}.npz") as theirs:
            for mine, other in zip(answers(layer_of(model)), theirs.values(), strict=True):
                np.testing.assert_array_equal(mine, other, err_msg=way)


@pytest.mark.parametrize("kind", KINDS)
def test_seed_that_came_with_rows_goes_on_with_every_copy(tmp_path, kind):
    first = filled(seedless(kind))
    sok.dump(tmp_path / "d", first)
    model = model_of(seedless(kind))
    layer = layer_of(model)
    sok.load(tmp_path / "d", layer)
    model.save(tmp_path / "m.keras")
    copies = [
        layer,
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        type(layer).from_config(layer.get_config()),
        layer_of(keras.models.clone_model(model)),
        layer_of(keras.models.load_model(tmp_path / "m.keras")),
    ]
    for twin in copies:
        assert_same_answers(twin, first)


def test_seed_that_was_given_stays_in_the_config():
    layer = sok.DistributedEmbedding(sok.FeatureConfig("f", sok.TableConfig("t", None, DIM, seed=-3)))
    assert layer.get_config()["tables"][0]["seed"] == -3
    assert_same_answers(type(layer).from_config(layer.get_config()), layer)


def test_new_rows_start_from_the_seed_that_came(tmp_path):
    first, second = filled(seedless("dynamic")), seedless("dynamic")
    sok.dump(tmp_path / "d", first)
    sok.load(tmp_path / "d", second)
    np.testing.assert_array_equal(
        second.get_table().find_or_insert(UNKNOWN)[0], first.get_table().find_or_insert(UNKNOWN)[0]
    )


def test_merge_of_another_seed_is_said_unless_the_table_is_empty(tmp_path):
    first, empty, other = filled(seedless("dynamic")), seedless("dynamic"), seedless("dynamic")
    sok.dump(tmp_path / "d", first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sok.load(tmp_path / "d", empty, mode="merge")
        sok.load(tmp_path / "d", empty, mode="merge")
    assert_same_answers(empty, first)
    other.get_table().find_or_insert([77])
    before = answers(other)
    with pytest.warns(UserWarning, match="Rows of another seed were merged into .*the table's own seed"):
        sok.load(tmp_path / "d", other, mode="merge")
    np.testing.assert_array_equal(answers(other), before)


def test_weights_file_of_before_seeds_were_stored_loads():
    layer, old = seedless("dynamic"), filled(seedless("dynamic"))
    contents = old.get_table().export()
    store = {"trigger": np.zeros((64, 2)), "update_rule": np.zeros(0, "uint8")}
    store |= {"0.keys.000000": contents.keys, "0.values.000000": contents.rows}
    before = answers(layer)
    layer.load_own_variables(store)
    np.testing.assert_array_equal(contents_of(layer.get_table())["rows"], contents.rows)
    np.testing.assert_array_equal(answers(layer), before)
