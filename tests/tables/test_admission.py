"""Tables that give a row only to ids that have come often enough, or by chance."""

import collections

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import FAST, ON_GPU

DIM = 4
Frequency, Probability = sok.policies.Frequency, sok.policies.Probability


def make_layer(admission, **kwargs):
    return sok.DynamicEmbedding(DIM, admission=admission, seed=3, **kwargs)


def make_model(layer, optimizer=None):
    inputs = keras.Input((None,), dtype="int32")
    rows = keras.layers.GlobalAveragePooling1D()(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(rows))
    model.compile(sok.OptimizerWrapper(optimizer or keras.optimizers.Adam(0.1)), "mse", **FAST)
    return model


def train(model, ids):
    ids = np.atleast_2d(np.asarray(ids, "int32"))
    model.train_on_batch(ids, np.ones((len(ids), 1)))


class Reference:
    """What a table with `Frequency` does, in a dictionary."""

    def __init__(self, threshold, once_per_step=False, half_life=None, memory=None):
        self.threshold, self.once_per_step, self.half_life = threshold, once_per_step, half_life
        self.max_counts = memory and memory // 64
        self.keys, self.sights, self.step = set(), collections.Counter(), 1
        self.filtered = self.dropped = 0

    def train(self, ids):
        counts = collections.Counter(np.ravel(ids).tolist())
        for key, num_ids in counts.items():
            if key in self.keys:
                continue
            self.sights[key] += 1 if self.once_per_step else num_ids
            if self.sights[key] >= self.threshold:
                self.keys.add(key)
                del self.sights[key]
            else:
                self.filtered += 1
                self.dropped += num_ids
        if self.half_life and self.step % self.half_life == 0:
            self.sights = collections.Counter({key: n // 2 for key, n in self.sights.items() if n // 2})
        if self.max_counts and len(self.sights) > self.max_counts:
            counts = sorted(self.sights.values(), reverse=True)
            forgotten = counts[self.max_counts - self.max_counts // 64]
            self.sights = collections.Counter({key: n for key, n in self.sights.items() if n > forgotten})
        self.step += 1


@pytest.mark.parametrize(
    "policy",
    [
        {"threshold": 1},
        {"threshold": 3},
        {"threshold": 3, "once_per_step": True},
        {"threshold": 4, "half_life": 3},
        {"threshold": 4, "memory": 64 * 6},
    ],
)
def test_ids_get_a_row_when_they_have_come_often_enough(policy):
    layer, reference = make_layer(Frequency(**policy)), Reference(**policy)
    model, table, random = make_model(layer), layer.get_table(), np.random.default_rng(0)
    for _ in range(10):
        ids = random.zipf(1.3, (6, 5)) % 60
        train(model, ids)
        reference.train(ids)
        assert set(table.keys().tolist()) == reference.keys
        for key in range(60):
            explained = table.explain(key)
            if key in reference.keys:
                assert explained.state == "present"
            elif reference.sights[key]:
                assert explained == sok.Explanation("filtered", sights=reference.sights[key])
            else:
                assert explained.state == "absent"
    stats = table.stats()
    assert (stats.inserted, stats.filtered, stats.dropped_gradients) == (
        len(reference.keys),
        reference.filtered,
        reference.dropped,
    )
    assert (stats.filtered == 0) == (policy["threshold"] == 1)


@pytest.mark.parametrize("training", [True, None])
def test_a_row_learns_from_the_step_that_admits_it_and_answers_as_missing_before(training):
    layer = make_layer(Frequency(2), missing="zeros")
    table = layer.get_table()
    inputs = keras.Input((1,), dtype="int32")
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(layer(inputs, training=training))
    model = keras.Model(inputs, outputs)
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), "mse", **FAST)
    ids, targets = np.array([[1], [2], [2]], "int32"), np.ones((3, 1, 1), "float32")
    assert (keras.ops.convert_to_numpy(layer(ids, training=True)) == 0).all()
    assert len(table) == 0, "a lookup whose gradients nobody applies counts no sight"
    model.train_on_batch(ids, targets)
    assert table.keys().tolist() == [2]
    first = sok.DynamicEmbedding(DIM, seed=3).get_table().find_or_insert([2])[0]
    learnt = table.find([2])[0] - first
    # The output was 0 and the target 1: each of two ids of the mean over three gets 2 / 3 of a gradient.
    np.testing.assert_allclose(learnt, np.full((1, DIM), 4 / 3), rtol=1e-5)


def test_a_skipped_step_counts_nothing():
    layer = make_layer(Frequency(2))
    inputs = keras.Input((), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    optimizer = keras.optimizers.LossScaleOptimizer(sok.OptimizerWrapper("sgd"), initial_scale=1.0)
    model.compile(optimizer, "mse", **FAST)
    model.train_on_batch(np.array([1, 2], "int32"), np.array([1.0, np.inf], "float32"))
    assert layer.get_table().explain(1).state == "absent"
    model.train_on_batch(np.array([1, 2], "int32"), np.ones(2, "float32"))
    assert layer.get_table().explain(1) == sok.Explanation("filtered", sights=1)


def test_chance_admits_the_same_ids_in_each_run():
    def keys_after(steps, probability=0.25):
        layer = make_layer(Probability(probability))
        model = make_model(layer)
        for _ in range(steps):
            train(model, np.arange(1000).reshape(100, 10))
        assert layer.get_table().stats().filtered >= 1000 - len(layer.get_table())
        return layer.get_table().keys().tolist()

    once, twice = keys_after(1), keys_after(2)
    assert once == keys_after(1) and set(once) < set(twice)
    assert 190 < len(once) < 310 and 380 < len(twice) < 500
    assert keys_after(2, 0.0) == [] and len(keys_after(1, 1)) == 1000


def test_erased_keys_start_anew_and_explicit_keys_are_inserted():
    layer = make_layer(Frequency(3))
    model, table = make_model(layer), layer.get_table()
    train(model, [5, 5, 6])
    table.erase([5])
    assert table.explain(5).state == "absent"
    train(model, [5, 5, 6])
    assert table.explain(5).sights == 2 and table.explain(6).sights == 2
    table.assign([5], np.ones((1, DIM), "float32"))
    table.find_or_insert([7])
    assert table.keys().tolist() == [5, 7]
    table.erase([5])
    assert table.explain(5).state == "absent", "its count went when it got a row"
    table.clear()
    assert table.explain(6).state == "absent"


def test_filtered_ids_neither_fill_a_table_nor_evict_rows():
    layer = make_layer(Frequency(3), max_capacity=2, eviction="lru")
    model, table = make_model(layer), layer.get_table()
    train(model, [1, 1, 1, 2, 2, 2])
    for key in range(10, 20):
        train(model, [key, 1])
    assert table.keys().tolist() == [1, 2] and table.stats().evicted == 0
    train(model, [10, 10, 1])
    assert table.keys().tolist() == [1, 10] and table.explain(2).state == "evicted"


def test_frozen_and_served_models_count_nothing():
    layer = make_layer(Frequency(2))
    model, table = make_model(layer), layer.get_table()
    model.predict(np.array([[1, 2]], "int32"), verbose=0)
    assert table.explain(1).state == "absent" and table.stats().unknown_ids == 2
    layer.trainable = False
    model.compile(sok.OptimizerWrapper("sgd"), "mse", **FAST)
    train(model, [1, 1, 2])
    assert table.explain(1).state == table.explain(2).state == "absent" and table.stats().filtered == 0


@pytest.mark.parametrize("admission", [Frequency(3, half_life=5), Frequency(3, memory=6400), Probability(0.5)])
def test_policies_are_saved_with_the_layer(admission, tmp_path):
    layer = make_layer(admission)
    model = make_model(layer)
    train(model, [1, 1, 1])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded.layers[1].admission == admission
    assert loaded.layers[1].get_table().keys().tolist() == layer.get_table().keys().tolist()
    config = sok.TableConfig.from_config(sok.TableConfig("t", None, 2, admission=admission).get_config())
    assert config.admission == admission


def test_a_step_goes_on_with_many_tables_of_which_some_admit():
    tables = [sok.TableConfig(f"t{i}", None, DIM, admission=Frequency(i) if i else None) for i in range(4)]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(f"f{i}", table) for i, table in enumerate(tables)])
    inputs = [keras.Input((2,), dtype="int32") for _ in tables]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(layer(inputs))))
    model.compile(sok.OptimizerWrapper("adam"), "mse", **FAST)
    ids = np.array([[1, 1], [1, 2]], "int32")
    model.train_on_batch([ids] * 4, np.ones((2, 1)))
    assert [table.keys().tolist() for table in layer.get_tables().values()] == [[1, 2], [1, 2], [1], [1]]


@pytest.mark.parametrize("threshold", [0, -1, 1.5, True, "3", 2**32, None])
def test_thresholds_are_checked(threshold):
    with pytest.raises(ValueError, match="`threshold` must be an int from 1"):
        Frequency(threshold)


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan"), True, "0.5", None])
def test_probabilities_are_checked(probability):
    with pytest.raises(ValueError, match="`probability` must be a float from 0 to 1"):
        Probability(probability)


def test_memory_may_have_a_unit():
    assert Frequency(2, memory="64MB") == Frequency(2, memory=64 << 20)
    assert Frequency(2, memory="3 KB").get_config()["memory"] == 3072


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="`admission` must be"):
        make_layer("frequency")
    with pytest.raises(ValueError, match="`half_life` must be a positive integer"):
        Frequency(2, half_life=0)
    with pytest.raises(ValueError, match="`memory` must be an int from 64 bytes to"):
        Frequency(2, memory=63)
    with pytest.raises(ValueError, match="`memory` must be an int from 64 bytes to"):
        Frequency(2, memory=2**64)
    for memory in ("64", "64mb", "1.5MB", "32B", "-1KB", "", "99999999999GB"):
        with pytest.raises(
            ValueError, match=f"a string of an int and KB, MB or GB, or None. Received: memory='{memory}'"
        ):
            Frequency(2, memory=memory)
    with pytest.raises(ValueError, match="`threshold` must be at most 4095 where `memory` is given"):
        Frequency(4096, memory=64)
    with pytest.raises(ValueError, match="`once_per_step` must be True or False"):
        Frequency(2, once_per_step=1)
    with pytest.raises(ValueError, match="`admission` is for dynamic tables"):
        sok.TableConfig("t", 10, 2, admission=Frequency(2))


def test_tables_that_admit_are_on_the_gpu_of_the_model():
    assert (make_layer(Frequency(2))._core.gpu is not None) == ON_GPU


def test_statistics_count_the_ids_that_were_kept_out():
    model = make_model(make_layer(Frequency(2)))
    history = model.fit(
        np.array([[1, 1, 2]], "int32"), np.ones((1, 1)), verbose=0, callbacks=[sok.callbacks.TableStatistics()]
    )
    assert (history.history["new_rows"], history.history["filtered_rows"]) == ([1], [1])


def test_a_weights_file_brings_the_step(tmp_path):
    layer = make_layer(Probability(0.5))
    model = make_model(layer)
    train(model, [1, 2])
    model.save_weights(tmp_path / "m.weights.h5")
    other = make_model(make_layer(Probability(0.5)))
    other.load_weights(tmp_path / "m.weights.h5")
    assert other.layers[1].get_table().step == layer.get_table().step == 2


def explained(table, keys=range(60)):
    return {key: table.explain(key) for key in keys}


@pytest.mark.parametrize(
    "policy", [Frequency(4, half_life=5), Frequency(3, once_per_step=True), Frequency(4, memory=640), Probability(0.2)]
)
def test_counting_goes_on_after_a_load(policy, tmp_path):
    layers = [make_layer(policy) for _ in range(2)]
    first, second = map(make_model, layers)
    random = np.random.default_rng(1)
    batches = [random.zipf(1.3, (6, 5)) % 60 for _ in range(12)]
    for number, ids in enumerate(batches[:7]):
        train(first, ids)
        if number == 3:
            handle = sok.dump(tmp_path / "while training", first, wait=False)
            expected = explained(layers[0].get_table())
            sok.dump(tmp_path, first)
    handle.result()
    sok.load(tmp_path / "while training", second)
    assert explained(layers[1].get_table()) == expected
    sok.dump_increment(tmp_path, first)
    train(second, [[1, 2, 3]])  # what it has counted goes
    sok.load(tmp_path, second)
    tables = [layer.get_table() for layer in layers]
    states = {explanation.state for explanation in explained(tables[0]).values()}
    assert {"present", "absent" if isinstance(policy, Probability) else "filtered"} <= states
    assert explained(tables[1]) == explained(tables[0])
    for ids in batches[7:]:
        for model in (first, second):
            train(model, ids)
        assert explained(tables[1]) == explained(tables[0])
    assert not sok.compact(tmp_path).increments
    sok.verify(tmp_path)
    third = make_layer(policy)
    sok.load(tmp_path, make_model(third))
    sok.load(tmp_path, second)
    assert explained(third.get_table()) == explained(tables[1])


def test_an_erased_key_leaves_no_count_in_a_compacted_dump(tmp_path):
    secret = 0x1234_5678
    layer = make_layer(Frequency(3))
    model, table = make_model(layer), layer.get_table()
    train(model, [[secret, 5]])
    sok.dump(tmp_path, model)
    found = [path for path in tmp_path.iterdir() if secret.to_bytes(8, "little") in path.read_bytes()]
    assert len(found) == 1
    table.erase([secret])
    sok.dump_increment(tmp_path, model)
    sok.compact(tmp_path)
    assert not any(secret.to_bytes(8, "little") in path.read_bytes() for path in tmp_path.iterdir())
    sok.load(tmp_path, model)
    assert (table.explain(secret).state, table.explain(5).state) == ("absent", "filtered")


def test_a_merge_and_a_table_without_the_policy_take_no_counts(tmp_path):
    layer = make_layer(Frequency(3))
    model = make_model(layer)
    train(model, [[7, 7, 8]])
    sok.dump(tmp_path, model)
    plain = make_layer(None)
    sok.load(tmp_path, make_model(plain))
    assert plain.get_table().explain(7).state == "absent"
    other = make_layer(Frequency(3))
    made = make_model(other)
    other.get_table().assign([9], np.zeros((1, DIM)))
    sok.load(tmp_path, made, mode="merge")
    assert other.get_table().explain(7).state == "absent"
    sok.load(tmp_path, made)
    assert other.get_table().explain(7).state == "filtered"


@pytest.mark.parametrize("part", ["base", "increment"])
def test_damaged_counts_are_found(part, tmp_path):
    layer = make_layer(Frequency(3))
    model, table = make_model(layer), layer.get_table()
    keys = {"base": 0x1234_5678, "increment": 0x2345_6789}
    train(model, [[keys["base"], 5]])
    sok.dump(tmp_path, model)
    table.erase([keys["base"]])
    train(model, [[keys["increment"], 5]])
    sok.dump_increment(tmp_path, model)
    before = explained(table, keys.values())
    key = keys[part].to_bytes(8, "little")
    (damaged,) = (
        path
        for path in tmp_path.iterdir()
        if key in path.read_bytes() and path.suffix == ".safetensors" and b'"scores"' in path.read_bytes()
    )
    damaged.write_bytes(damaged.read_bytes().replace(key, bytes(8)))
    for call in (
        lambda: sok.load(tmp_path, model),
        lambda: sok.load(tmp_path, model, mode="merge"),
        lambda: sok.verify(tmp_path),
    ):
        with pytest.raises(sok.CorruptDumpError, match="block 0 of `keys`"):
            call()
    assert explained(table, keys.values()) == before
    if part == "increment":  # compaction drops the counts of the base
        with pytest.raises(sok.CorruptDumpError, match="block 0 of `keys`"):
            sok.compact(tmp_path)
        assert len(sok.read_manifest(tmp_path).increments) == 1
