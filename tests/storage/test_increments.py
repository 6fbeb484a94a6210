"""Dumps with increments."""

import os

import keras
import numpy as np
import pytest

import sok_keras as sok
from once import once_on
from small_model import contents, make_model, train


def assert_same(one, other):
    for mine, others in zip(contents(one), contents(other), strict=True):
        np.testing.assert_array_equal(mine, others)


def loaded(path, **arguments):
    model = make_model(**arguments)
    report = sok.load(path, model)
    return model, report


def test_a_dump_with_increments_loads_as_a_whole_one(tmp_path):
    model = make_model()
    train(model, *range(50))
    sok.dump(tmp_path / "d", model)
    for step in range(3):
        train(model, step, 100 + step)
        model.get_layer("ids").get_table().erase(np.array([40 + step]))
        manifest = sok.dump_increment(tmp_path / "d", model)
        assert [part.step for part in manifest.increments] == list(range(2, step + 3))
        entry = manifest.increments[-1].tables[0]
        assert (entry.num_rows, entry.num_removed) == (2, 1)
    sok.verify(tmp_path / "d")
    assert sok.read_manifest(tmp_path / "d") == manifest and manifest.version == 4
    again, report = loaded(tmp_path / "d")
    assert report.step == 4 and report.tables == {"ids": 50} and report.variables
    assert_same(again, model)
    np.testing.assert_allclose(train(again, 1, 2), train(model, 1, 2), rtol=1e-6)
    assert_same(again, model)
    # The model that has loaded it goes on with the chain.
    sok.dump_increment(tmp_path / "d", again)
    assert_same(loaded(tmp_path / "d")[0], model)
    compacted = sok.compact(tmp_path / "d")
    assert compacted.increments == () and compacted.step == 5 and compacted.tables[0].num_rows == 50
    assert_same(loaded(tmp_path / "d")[0], model)
    train(again, 7)
    assert len(sok.dump_increment(tmp_path / "d", again).increments) == 1
    assert_same(loaded(tmp_path / "d")[0], again)


def test_an_increment_since_an_older_part_takes_the_place_of_later_ones(tmp_path):
    model = make_model()
    train(model, 1, 2, 3)
    sok.dump(tmp_path, model)
    for key in (4, 5, 6):
        train(model, key)
        sok.dump_increment(tmp_path, model)
    manifest = sok.dump_increment(tmp_path, model, since=2)
    assert [part.step for part in manifest.increments] == [2, 4]
    assert manifest.increments[1].tables[0].num_rows == 2
    assert_same(loaded(tmp_path)[0], model)
    with pytest.raises(ValueError, match=r"Its parts have the steps \[1, 2, 4\]"):
        sok.dump_increment(tmp_path, model, since=3)
    for since in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="`since` must be None or the step of a part"):
            sok.dump_increment(tmp_path, model, since=since)


def test_scores_and_ages_go_on(tmp_path):
    policies = {"eviction": sok.policies.LFU(half_life=2), "max_capacity": 100, "time_to_live": 50}
    model = make_model(**policies)
    train(model, 1, 1, 1, 1, 2)
    sok.dump(tmp_path, model)
    for _ in range(3):
        train(model, 3)
    sok.dump_increment(tmp_path, model)

    def numbers(model):
        _, _, _, columns = model.get_layer("ids").get_table()._native.export(False)
        return {name: numbers.tolist() for name, numbers in columns}

    again, _ = loaded(tmp_path, **policies)
    assert numbers(again) == numbers(model) == {"scores": [1, 0, 1], "ages": [3, 3, 0]}


def test_rows_without_states_are_for_serving(tmp_path):
    model = make_model()
    train(model, 1, 2)
    sok.dump(tmp_path, model, states=False)
    train(model, 2, 3)
    with pytest.raises(
        sok.DumpMismatchError, match="Pass the `states` and use the policies that the dump was written with"
    ):
        sok.dump_increment(tmp_path, model)
    manifest = sok.dump_increment(tmp_path, model, states=False)
    assert manifest.increments[0].tables[0].states == ()
    layer = sok.DynamicEmbedding(4, name="ids")
    sok.load(tmp_path, layer)
    expected = model.get_layer("ids").get_table().export()
    np.testing.assert_array_equal(layer.get_table().export().rows, expected.rows)


def test_what_is_not_known_is_an_error(tmp_path):
    model = make_model()
    train(model, 1)
    with pytest.raises(FileNotFoundError):
        sok.dump_increment(tmp_path / "none", model)
    with pytest.raises(FileNotFoundError):
        sok.compact(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    sok.dump(tmp_path / "d", model)
    other = make_model()
    train(other, 1)
    with pytest.raises(sok.UnknownChangesError, match="has no record of its changes since that dump"):
        sok.dump_increment(tmp_path / "d", other)
    with pytest.raises(sok.DumpMismatchError, match="an increment must have the tables of the dump"):
        sok.dump_increment(tmp_path / "d", sok.DynamicEmbedding(4, name="others"))
    with pytest.raises(sok.DumpMismatchError, match="the dump holds the variables of a model"):
        sok.dump_increment(tmp_path / "d", model.get_layer("ids"))


def test_a_callback_writes_a_whole_dump_where_no_increment_is_possible(tmp_path):
    """As after a table was cleared."""

    class Clear(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                self.model.get_layer("ids").get_table().clear()

    model = make_model()
    callback = sok.callbacks.DumpCheckpoint(tmp_path, increments_every=2, keep=9)
    ids, ones = np.arange(20, dtype="int32"), np.ones((20, 1))
    with pytest.warns(UserWarning, match="A whole dump is written instead of an increment: .* has no record"):
        model.fit(ids, ones, batch_size=4, shuffle=False, verbose=0, callbacks=[callback, Clear()])
    steps = [[m.step, *(part.step for part in m.increments)] for m in map(sok.read_manifest, callback.dumps())]
    assert steps == [[2], [4], [5]]
    assert_same(loaded(callback.dumps()[-1])[0], model)


@once_on("torch")
def test_twenty_increments_have_hardly_more_bytes_than_what_has_changed(tmp_path):
    num_rows, dim = 1_000_000, 8
    table = sok.DynamicEmbedding(dim, name="ids").get_table()
    table.assign(np.arange(num_rows), np.zeros((num_rows, dim), "float32"))
    sok.dump(tmp_path, table)
    draw, before = np.random.default_rng(1), set(os.listdir(tmp_path))
    for number in range(20):
        changed = draw.choice(num_rows, num_rows // 100, replace=False)
        table.assign(changed, np.full((len(changed), dim), number, "float32"))
        removed = changed[: num_rows // 1000]
        table.erase(removed)
        sok.dump_increment(tmp_path, table)
        new = set(os.listdir(tmp_path)) - before
        before |= new
        num_bytes = sum(os.path.getsize(tmp_path / name) for name in new)
        least = (len(changed) - len(removed)) * (8 + 4 * dim) + 8 * len(removed)
        assert num_bytes <= 1.1 * least
    again = sok.DynamicEmbedding(dim, name="ids").get_table()
    sok.load(tmp_path, again)
    one, other = table.export(), again.export()
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(one.rows, other.rows)


def fit(model, directory, epochs, **arguments):
    callback = sok.callbacks.DumpCheckpoint(directory, **arguments)
    ids = np.arange(24, dtype="int32") % 11
    model.fit(ids, np.ones((24, 1)), batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])
    return callback


def test_a_callback_writes_increments_between_dumps(tmp_path):
    model = make_model()
    callback = fit(model, tmp_path, 2, increments_every=2)
    (path,) = callback.dumps()
    manifest = sok.read_manifest(path)
    assert manifest.step == 12 and manifest.increments == ()
    callback = fit(model, tmp_path, 1, save_freq=4, base_every=3, keep=2)
    manifests = [sok.read_manifest(path) for path in callback.dumps()]
    assert [(m.step, [part.step for part in m.increments]) for m in manifests] == [(12, [16])]
    # The chain that was restored counts.
    callback = fit(model, tmp_path, 1, save_freq=4, base_every=2, keep=2)
    assert [sok.read_manifest(path).step for path in callback.dumps()] == [12, 20]


def test_a_fit_goes_on_from_an_increment(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise KeyboardInterrupt

    whole = make_model()
    fit(whole, tmp_path / "whole", 2)
    model = make_model()
    ids, ones = np.arange(24, dtype="int32") % 11, np.ones((24, 1))
    arguments = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        callback = sok.callbacks.DumpCheckpoint(tmp_path / "cut", save_freq=3, increments_every=1)
        model.fit(ids, ones, callbacks=[callback, Stop()], **arguments)
    (path,) = callback.dumps()
    manifest = sok.read_manifest(path)
    assert (manifest.step, [part.step for part in manifest.increments]) == (3, [4, 5])
    again = make_model()
    again.fit(ids, ones, callbacks=[sok.callbacks.DumpCheckpoint(tmp_path / "cut", increments_every=1)], **arguments)
    assert_same(again, whole)


@pytest.mark.parametrize("name", ["increments_every", "base_every"])
def test_wrong_arguments_of_the_callback_are_refused(name, tmp_path):
    for value in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"`{name}` must be None or a positive integer"):
            sok.callbacks.DumpCheckpoint(tmp_path, **{name: value})
    with pytest.raises(ValueError, match="must be None if `save_best_only` is True"):
        sok.callbacks.DumpCheckpoint(tmp_path, monitor="loss", save_best_only=True, **{name: 2})


def test_parts_of_a_table_have_the_steps_that_its_policies_count(tmp_path):
    inputs = keras.Input((), dtype="int32")
    layer = sok.DynamicEmbedding(4, max_capacity=50, eviction="lru", seed=1, name="e")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(sok.OptimizerWrapper("sgd"), "mse")
    for step in range(1, 4):
        model.train_on_batch(np.arange(step, step + 2, dtype="int32"), np.ones((2, 1)))
        (sok.dump if step == 1 else sok.dump_increment)(tmp_path, layer)
        if step == 2:
            rows = layer.get_table().export()
    manifest = sok.read_manifest(tmp_path)
    assert (manifest.step, [part.step for part in manifest.increments]) == (1, [2, 3])
    with pytest.raises(ValueError, match=r"7"):
        sok.dump_increment(tmp_path, layer, since=7)
    manifest = sok.dump_increment(tmp_path, layer, since=2)
    assert [part.step for part in manifest.increments] == [2, 3]
    assert manifest.increments[1].tables[0].num_rows == 2
    other = sok.DynamicEmbedding(4, max_capacity=50, eviction="lru", name="e")
    assert sok.load(tmp_path, other).step == 3
    assert set(rows.keys.tolist()) < set(other.get_table().keys().tolist())


@pytest.mark.parametrize("name, value", [("states", "no"), ("states", 1), ("wait", None), ("wait", "no")])
def test_flags_of_dumps_are_booleans(tmp_path, name, value):
    layer = sok.DynamicEmbedding(2, name="e")
    for call in (sok.dump, sok.dump_increment):
        with pytest.raises(ValueError, match=f"`{name}` must be True or False. Received: {name}={value!r}"):
            call(tmp_path, layer, **{name: value})
    with pytest.raises(ValueError, match="`overwrite` must be True or False. Received: overwrite='x'"):
        sok.dump(tmp_path, layer, overwrite="x")
    with pytest.raises(ValueError, match="`states` must be True or False. Received: states=2"):
        sok.load(tmp_path, layer, states=2)
    with pytest.raises(ValueError, match="`scores` must be True or False"):
        layer.get_table().export(scores="x")
    for name in ("wait", "restore"):
        with pytest.raises(ValueError, match=f"`{name}` must be True or False"):
            sok.callbacks.DumpCheckpoint(tmp_path, **{name: "no"})
    for path in (None, 3, b"bytes"):
        with pytest.raises(TypeError, match="`path` must be a string or an `os.PathLike` of strings"):
            sok.dump(path, layer)
        with pytest.raises(TypeError, match="`path` must be"):
            sok.compact(path)
    with pytest.raises(ValueError, match="`since` must be None or the step of a part"):
        sok.dump_increment(tmp_path, layer, since=10**30)
