"""Rows in the files that Keras itself writes: weights, whole models, Orbax checkpoints.

`ModelCheckpoint` and `BackupAndRestore` are in test_equivalence.py.
"""

import keras
import numpy as np
import pytest

import sok_keras as sok
from dumped import (
    LOAD,
    MIB,
    OPTIMIZERS,
    all_of,
    assert_equal,
    assert_tables_equal,
    compiled,
    contents_of,
    interrupted,
)
from reference import (
    DIM,
    batches,
    embedding_of,
    fit,
    our_embedding,
    small_model,
    table_of,
)

# ---- weights files


def test_rows_stay_out_of_weights_files_where_asked(tmp_path):
    layer = sok.DynamicEmbedding(DIM, seed=1, save_rows=False)
    model = fit(compiled(OPTIMIZERS["adam"](), layer))
    model.save_weights(tmp_path / "a.weights.h5")
    model.save(tmp_path / "a.keras")
    loaded = keras.models.load_model(tmp_path / "a.keras")
    assert len(table_of(loaded)) == 0
    rows = table_of(model).export().rows
    fit(model)
    model.load_weights(tmp_path / "a.weights.h5")
    assert (table_of(model).export().rows != rows).any()  # as they were
    sok.dump(tmp_path / "d", model)
    assert sok.read_manifest(tmp_path / "d").tables[0].num_rows == len(rows)


def test_weights_file_without_rows_is_refused_where_rows_are_wanted(tmp_path):
    without = small_model(sok.DynamicEmbedding(DIM, save_rows=False))
    without.save_weights(tmp_path / "a.weights.h5")
    with pytest.raises(ValueError, match="The file has no rows for layer .*it was saved with `save_rows=False`"):
        small_model(sok.DynamicEmbedding(DIM)).load_weights(tmp_path / "a.weights.h5")


def test_weights_file_of_another_dim_changes_nothing(tmp_path):
    def model(dim):
        layer = sok.DynamicEmbedding(dim, combiner="sum")
        layer.get_table().find_or_insert(np.arange(5))
        return keras.Sequential([keras.Input((3,), dtype="int32"), layer])

    model(DIM + 1).save_weights(tmp_path / "a.weights.h5")
    other = model(DIM)
    before = contents_of(table_of(other))
    with pytest.raises(ValueError, match=f"must be {DIM} wide. Received: {DIM + 1} in the file"):
        other.load_weights(tmp_path / "a.weights.h5")
    assert_equal(contents_of(table_of(other)).values(), before.values())


def test_weights_file_of_another_optimizer_brings_rows_alone(tmp_path):
    path, _ = interrupted("adam")
    model = fit(compiled(OPTIMIZERS["momentum"](), our_embedding()))
    embedding = embedding_of(model)
    store = {}
    embedding_of(keras.models.load_model(path / "model.keras")).save_own_variables(store)
    with pytest.warns(UserWarning, match="states of another optimizer .*: adam.*: the rows were loaded alone"):
        embedding.load_own_variables(store)
    states = embedding.get_table().export(states=True).states
    assert not any(state.any() for state in states.values())


@pytest.mark.parametrize("shards", [1, 10])
def test_weights_in_shards_bring_rows_and_states_back(tmp_path, monkeypatch, shards):
    monkeypatch.setattr(sok.rows_file, "_CHUNK_FLOATS", 1 << 11)
    model = compiled(OPTIMIZERS["adam"]())
    table_of(model).find_or_insert(np.arange(2000))
    fit(model)
    path = tmp_path / "model.weights.json"
    model.save_weights(path, max_shard_size=1.0 if shards == 1 else 16 / MIB)  # GiB: of 16 KiB
    assert len(list(tmp_path.glob("*.weights.h5"))) >= shards
    expected = all_of(model)
    fit(model, steps=1)
    model.load_weights(path)
    assert_equal(all_of(model), expected)
    assert_tables_equal(table_of(loaded_anew(path, OPTIMIZERS["adam"]())), table_of(model))


def loaded_anew(path, optimizer):
    model = compiled(optimizer)
    model.load_weights(path)
    return model


def test_shard_that_is_smaller_than_a_piece_of_a_table_is_refused(tmp_path):
    model = small_model(sok.DynamicEmbedding(DIM))
    table_of(model).find_or_insert(np.arange(10**5))
    with pytest.raises(ValueError, match="exceeds the maximum shard size.*increase the `max_shard_size`"):
        model.save_weights(tmp_path / "model.weights.json", max_shard_size=1 / 1024)
    assert len(table_of(model)) == 10**5


# ---- weights without their rows


def assert_rows_are_missed(model, table):
    """Told once, by the next call; the rows are as they were."""
    size = len(table._native)
    with pytest.raises(
        sok.SokError, match="weights of other tables were set, without their rows: those of '.* as they were"
    ):
        model.predict(batches()[0][0][:2], verbose=0)
    assert len(table) == size


def test_weights_are_looked_at_wherever_they_lie():
    given, model = fit(compiled(OPTIMIZERS["adam"]())), compiled(OPTIMIZERS["adam"]())
    triggers = [next(v for v in m.trainable_variables if v.path.endswith("trigger")) for m in (given, model)]
    triggers[1].assign(triggers[0].value)
    assert_rows_are_missed(model, table_of(model))


def test_weights_of_another_model_do_not_bring_its_rows():
    """`clone_model` and `set_weights` make a copy of a model of Keras' own layers."""
    model = fit(compiled(OPTIMIZERS["adam"]()))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert_rows_are_missed(clone, table_of(clone))
    clone.set_weights(model.get_weights())
    clone.layers[1].set_embedding_tables({clone.layers[1].name: table_of(model).export()[:2]})
    np.testing.assert_array_equal(*(m.predict(batches()[0][0], verbose=0) for m in (clone, model)))


@pytest.mark.parametrize("way", LOAD)
def test_rows_that_are_loaded_later_go_with_the_weights(way):
    path, _ = interrupted("adam")
    model = compiled(OPTIMIZERS["adam"]())
    model.set_weights(fit(compiled(OPTIMIZERS["adam"]())).get_weights())
    LOAD[way](model, path)
    model.predict(batches()[0][0], verbose=0)


# ---- Orbax


def orbax(path, **options):
    pytest.importorskip("orbax.checkpoint")
    return keras.callbacks.OrbaxCheckpoint(path, monitor="loss", **options)


@pytest.mark.parametrize("on_background", [True, False])
def test_training_resumed_from_an_orbax_checkpoint_equals_training_that_never_stopped(tmp_path, on_background):
    _, expected = interrupted("adam")
    fit(compiled(OPTIMIZERS["adam"](), our_embedding()), callbacks=[orbax(tmp_path, save_on_background=on_background)])
    assert_equal(all_of(fit(keras.models.load_model(tmp_path))), expected)


def test_orbax_checkpoint_of_the_middle_of_an_epoch_holds_its_step(tmp_path):
    model = fit(
        compiled(OPTIMIZERS["adam"](), our_embedding()), callbacks=[orbax(tmp_path, save_freq=2, max_to_keep=None)]
    )
    half = keras.models.load_model(tmp_path)
    assert_equal(all_of(half), all_of(model))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "4"]


@pytest.mark.parametrize("options", [{"save_weights_only": True}, {}], ids=["weights_only", "whole"])
def test_orbax_checkpoint_that_is_loaded_as_weights_brings_no_rows(tmp_path, options):
    """Keras asks layers for files at `load_model` alone."""
    made = lambda: compiled(OPTIMIZERS["adam"](), sok.DynamicEmbedding(DIM, name="same"))
    fit(made(), callbacks=[orbax(tmp_path, **options)])
    model = made()
    model.load_weights(tmp_path)
    assert_rows_are_missed(model, table_of(model))


def test_rows_are_once_in_a_keras_file(tmp_path):
    """Keras asks for a layer's variables and for its files."""
    import zipfile

    path, _ = interrupted("adam")
    with zipfile.ZipFile(path / "model.keras") as file:
        assert not [name for name in file.namelist() if "assets" in name]
