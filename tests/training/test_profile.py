"""The times of the parts of training steps."""

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import sok_keras as sok
from reference import BACKEND

STEPS, BATCH = 4, 32
IDS = np.random.default_rng(0).integers(0, 1000, (STEPS * BATCH, 3)).astype("int32")
TARGETS = np.zeros((STEPS * BATCH, 1), "float32")


def built(**options):
    inputs = keras.Input((3,), dtype="int32")
    rows = [layers.Flatten()(sok.DynamicEmbedding(4, name=name)(inputs)) for name in ("a", "b")]
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(rows)))
    model.compile(sok.OptimizerWrapper(optimizers.Adam(1e-3, **options)), "mse")
    return model


def fit(model, **options):
    model.fit(IDS, TARGETS, batch_size=BATCH, verbose=0, **options)


def test_profile_counts_the_parts_of_all_layers():
    model = built()
    fit(model)
    with sok.Profile(model) as profile:
        fit(model)
    assert {"find", "update"} <= profile.parts.keys() <= {"find", "pool", "sort", "merge", "update"}
    for name in ("find", "update"):
        runs, seconds = profile.parts[name]
        assert runs == 2 * STEPS, "two layers"
        assert 0 < seconds < 60
    text = str(profile).splitlines()
    assert text[0].split() == ["part", "runs", "ms", "a", "run"]
    assert [line.split()[0] for line in text[1:]] == list(profile.parts)


def test_profile_names_norms_and_insertions_at_the_commit():
    model = built(global_clipnorm=1.0)
    model.train_on_batch(IDS[:BATCH], TARGETS[:BATCH])
    with sok.Profile(model) as profile:
        fit(model)
    assert {"merge", "norm"} <= profile.parts.keys()


def test_profile_of_nothing_has_no_parts():
    model = built()
    with sok.Profile(model) as profile:
        pass
    assert profile.parts == {}
    assert str(profile) == "part      runs   ms a run"


def test_profile_measures_again():
    model = built()
    with sok.Profile(model) as profile:
        fit(model)
    first = profile.parts
    with profile:
        fit(model, epochs=2)
    assert profile.parts["update"].runs == 2 * first["update"].runs


def test_an_error_in_the_block_ends_the_measurement_and_comes_through():
    model = built()
    with pytest.raises(KeyError, match="mine"), sok.Profile(model):
        fit(model)
        raise KeyError("mine")
    with sok.Profile(model) as profile:
        fit(model)
    assert profile.parts["update"].runs == 2 * STEPS


def test_error_of_a_step_is_raised_by_its_class_and_ends_the_measurement():
    layer = sok.DynamicEmbedding(4, max_capacity=2, check_mode="raise")
    profile = sok.Profile(layer)
    with pytest.raises(Exception, match="max_capacity"), profile:
        layer(np.array([1, 2, 3], "int32"), training=True)
        layer.get_table().synchronize()
    with profile:
        pass


def test_two_profiles_cannot_measure_the_same_tables():
    model = built()
    with sok.Profile(model):
        with pytest.raises(sok.SokError, match="Another `Profile`"), sok.Profile(model.get_layer("b")):
            pass
        fit(model)


@pytest.mark.parametrize("source", [None, [], 3, "table", "dense"])
def test_profile_needs_tables(source):
    if source == "table":
        layer = sok.DynamicEmbedding(4)
        layer.build()
        source = layer.get_table()
    source = layers.Dense(1) if source == "dense" else source
    with pytest.raises(ValueError, match="with tables. Received"):
        sok.Profile(source)


@pytest.mark.skipif(BACKEND != "jax", reason="on other backends a step has run when its call returns")
def test_profile_waits_for_steps_in_flight():
    model = built()
    fit(model)
    with sok.Profile(model) as profile:
        for _ in range(3):
            model.train_on_batch(IDS[:BATCH], TARGETS[:BATCH])
    assert profile.parts["update"].runs == 6
