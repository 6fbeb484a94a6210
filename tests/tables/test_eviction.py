"""Tables at `max_capacity` that remove rows by a policy."""

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, FAST, ON_GPU, apply_gradients, model_gradients, raises
from sok_keras import rows_file

DIM, CAPACITY = 4, 12


def make_layer(eviction="lru", **kwargs):
    return sok.DynamicEmbedding(DIM, max_capacity=CAPACITY, eviction=eviction, **kwargs)


def make_model(layer):
    inputs = keras.Input((None,), dtype="int32")
    rows = keras.layers.GlobalAveragePooling1D()(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(rows))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse", **FAST)
    return model


def train(model, ids):
    ids = np.atleast_2d(np.asarray(ids, "int32"))
    model.train_on_batch(ids, np.ones((len(ids), 1)))


def scores_of(table):
    contents = table.export(scores=True)
    return dict(zip(contents.keys.tolist(), contents.scores.tolist(), strict=True))


class Reference:
    """What a table with a policy does in steps whose new ids are inserted by the commit: a dictionary with sorting."""

    def __init__(self, eviction, half_life=None):
        self.eviction, self.half_life = eviction, half_life
        self.scores, self.step, self.gone = {}, 1, []

    def train(self, ids):
        ids = np.ravel(ids).tolist()
        new = [key for key in dict.fromkeys(ids) if key not in self.scores]
        needed = len(self.scores) + len(new) - CAPACITY
        if needed > 0:
            may_go = sorted((score, key % 2**64, key) for key, score in self.scores.items() if key not in ids)
            for _, _, key in may_go[:needed]:
                del self.scores[key]
                self.gone.append(key)
        for key in ids:
            uses = self.scores.get(key, 0) + 1
            self.scores[key] = self.step if self.eviction == "lru" else uses
        if self.half_life and self.step % self.half_life == 0:
            self.scores = {key: score // 2 for key, score in self.scores.items()}
        self.step += 1


@pytest.mark.parametrize("eviction, half_life", [("lru", None), ("lfu", None), ("lfu", 3)])
def test_training_removes_the_rows_that_a_dictionary_with_sorting_would(eviction, half_life):
    policy = sok.policies.LFU(half_life=half_life) if half_life else eviction
    layer = make_layer(policy)
    model, table, reference = make_model(layer), layer.get_table(), Reference(eviction, half_life)
    random = np.random.default_rng(5)
    for _ in range(30):
        ids = random.zipf(1.3, (2, 4)) % 50 - 10
        train(model, ids)
        reference.train(ids)
        assert scores_of(table) == reference.scores
    stats = table.stats()
    assert len(reference.gone) > 30 and stats.evicted == len(reference.gone)
    assert stats.inserted - stats.evicted == stats.size == len(table)
    assert table.step == 31


def test_rows_of_a_step_stay_and_a_batch_that_does_not_fit_changes_nothing():
    layer = make_layer()
    model, table = make_model(layer), layer.get_table()
    train(model, np.arange(CAPACITY))
    before = table.export(states=True, scores=True)
    with raises(sok.TableFullError, "is full: no room for 1 of the new keys", table):
        train(model, np.arange(CAPACITY + 1))
    after = table.export(states=True, scores=True)
    for one, other in zip(before[:2], after[:2], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(before.scores, after.scores)
    if BACKEND == "jax" and ON_GPU:
        return  # a step that fails on a GPU leaves no values in the variables of JAX
    train(model, np.arange(1, CAPACITY + 1))
    assert table.keys().tolist() == list(range(1, CAPACITY + 1))


@pytest.mark.parametrize("count_inference", [False, True])
def test_inference_counts_if_asked(count_inference):
    layer = make_layer(sok.policies.LFU(count_inference=count_inference))
    layer.get_table().find_or_insert([1, 2])
    make_model(layer).predict(np.array([[1, 1, 3]], "int32"), verbose=0)
    assert scores_of(layer.get_table()) == {1: 3 if count_inference else 1, 2: 1}
    layer.get_table().find([1])
    assert scores_of(layer.get_table())[1] == (3 if count_inference else 1), "`find` counts nothing"


def test_a_key_is_explained_and_its_row_can_be_taken():
    layer = make_layer(sok.policies.LRU(keep_evicted=True))
    table = layer.get_table()
    table.assign(np.arange(CAPACITY), np.repeat(np.arange(CAPACITY, dtype="float32"), DIM).reshape(-1, DIM))
    table.find_or_insert([100, -1])
    assert table.explain(0) == sok.Explanation("evicted", step=1)
    assert table.explain(2) == sok.Explanation("present", score=1)
    assert table.explain(55) == sok.Explanation("absent")
    evicted = table.take_evicted()
    assert evicted.keys.tolist() == [0, 1] and evicted.scores.tolist() == [1, 1]
    assert evicted.rows.tolist() == [[0.0] * DIM, [1.0] * DIM]
    assert len(table.take_evicted().keys) == 0
    table.erase([1])
    assert table.explain(1).state == "absent", "an erased key is not remembered"
    with pytest.raises(TypeError, match="`explain` takes one key"):
        table.explain([1, 2])
    with pytest.raises(sok.SokError, match="does not keep the rows that it removes"):
        make_layer().get_table().take_evicted()
    assert sok.DynamicEmbedding(DIM).get_table().explain(3).state == "absent"


def saved_by(kind, model, path):
    """A model that goes on where `model` stands."""
    if kind == "dump":
        sok.dump(path / "dump", model)
        other = make_model(make_layer("lfu"))
        other.optimizer.build(other.trainable_variables)
        sok.load(path / "dump", other)
        assert sok.read_manifest(path / "dump").tables[0].score == "lfu"
    elif kind == "weights":
        model.save_weights(path / "w.weights.h5")
        other = make_model(make_layer("lfu"))
        other.load_weights(path / "w.weights.h5")
    else:
        model.save(path / "model.keras")
        other = keras.models.load_model(path / "model.keras")
    return other


@pytest.mark.parametrize("kind", ["dump", "weights", "model"])
def test_scores_and_step_go_along(kind, tmp_path):
    layer = make_layer("lfu")
    model = make_model(layer)
    random = np.random.default_rng(3)
    for _ in range(5):
        train(model, random.integers(0, 30, (2, 4)))
    other = saved_by(kind, model, tmp_path)
    twin = other.layers[1].get_table()
    assert scores_of(twin) == scores_of(layer.get_table()) and twin.step == layer.get_table().step == 6
    for _ in range(5):
        ids = random.integers(0, 30, (2, 4))
        train(model, ids)
        train(other, ids)
    assert scores_of(twin) == scores_of(layer.get_table())


def test_scores_of_another_kind_stay_behind(tmp_path):
    layer = make_layer("lfu")
    layer.get_table().find_or_insert([7, 7, 8])
    sok.dump(tmp_path / "dump", [layer.get_table()])
    other = make_layer("lru", name=layer.name)
    sok.load(tmp_path / "dump", [other.get_table()])
    assert scores_of(other.get_table()) == {7: 1, 8: 1}
    store = {}
    rows_file.save(layer._core, store)
    rows_file.load(other._core, store)
    assert scores_of(other.get_table()) == {7: 1, 8: 1}
    del store["0.scores.000000"]
    with pytest.raises(ValueError, match="must have uint64 scores of the 2 keys"):
        rows_file.load(make_layer("lfu")._core, store)


def test_new_tables_refuse_rows_of_another_width():
    fresh = sok.backend.native.FreshTables(make_layer()._core.group, [1], [None])
    with pytest.raises(ValueError, match=f"`values` must hold {DIM} numbers a key"):
        fresh.add(0, np.arange(2), np.ones((2, DIM + 1), "float32"), [])


def test_policies_are_part_of_a_config():
    for policy in (sok.policies.LRU(count_inference=True), sok.policies.LFU(half_life=9), None):
        layer = sok.DynamicEmbedding(DIM, max_capacity=9, eviction=policy)
        assert sok.DynamicEmbedding.from_config(layer.get_config()).eviction == policy
        config = sok.TableConfig("t", None, DIM, max_capacity=9, eviction=policy)
        assert sok.TableConfig.from_config(config.get_config()).eviction == policy
    assert make_layer("lfu").eviction == sok.policies.LFU()
    both = {
        name: sok.FeatureConfig(
            name, sok.TableConfig(name, None, DIM, max_capacity=2, eviction=eviction), (1,), (1, DIM)
        )
        for name, eviction in (("a", "lru"), ("b", None))
    }
    tables = sok.DistributedEmbedding(both).get_tables()
    tables["a"].find_or_insert([1, 2]), tables["a"].find_or_insert([3])
    tables["b"].find_or_insert([1, 2])
    assert len(tables["a"]) == 2
    with pytest.raises(sok.TableFullError):
        tables["b"].find_or_insert([3])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"eviction": "fifo"}, '`eviction` must be "lru", "lfu"'),
        ({"eviction": 3}, "Received: eviction=3"),
        ({"eviction": "lru", "max_capacity": None}, "`eviction` needs `max_capacity`"),
    ],
)
def test_a_wrong_policy_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sok.DynamicEmbedding(DIM, **{"max_capacity": 9, **arguments})


def test_a_policy_of_a_static_table_or_with_a_wrong_half_life_is_refused():
    with pytest.raises(ValueError, match="`eviction` is for dynamic tables"):
        sok.TableConfig("t", 10, DIM, max_capacity=9, eviction="lru")
    for argument in ("count_inference", "keep_evicted"):
        with pytest.raises(ValueError, match=f"`{argument}` must be True or False. Received: {argument}='yes'"):
            sok.policies.LRU(**{argument: "yes"})
    for half_life in (0, -1, 2.5, True, 2**64):
        with pytest.raises(ValueError, match="`half_life` must be a positive integer of 64 bits or None"):
            sok.policies.LFU(half_life=half_life)


# ---- steps that fail


def attempt(model, ids):
    """Whether a step succeeds."""
    try:
        train(model, ids)
    except Exception as error:
        assert "is full" in str(error), error
        return False
    return True


@pytest.mark.skipif(ON_GPU, reason="a GPU tells some errors a step late")
@pytest.mark.parametrize("cause", ["another table", "the user's loss"])
def test_steps_that_fail_do_not_keep_their_rows_for_ever(cause):
    """The lookups of several steps that fail use all rows of the table."""
    inputs = [keras.Input((None,), dtype="int32") for _ in range(2)]
    evicting, full = make_layer(name="evicting"), sok.DynamicEmbedding(DIM, max_capacity=2, name="full")
    rows = [keras.layers.GlobalAveragePooling1D()(layer(i)) for layer, i in zip((evicting, full), inputs, strict=True)]
    fails = []

    def loss(targets, predictions):
        if fails:
            raise RuntimeError("the user's")
        return keras.ops.mean(keras.ops.square(targets - predictions))

    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(rows)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), loss, run_eagerly=BACKEND != "jax")
    if BACKEND == "jax" and cause == "the user's loss":
        pytest.skip("JAX calls a loss where it traces")

    def step(first, other=0):
        ids = np.arange(first, first + 5, dtype="int32")[None]
        model.train_on_batch([ids, np.full((1, 1), other, "int32")], np.ones((1, 1)))

    step(0)
    full.get_table().find_or_insert([1])
    for number in range(1, 4):
        if cause == "the user's loss":
            fails.append(True)
        with pytest.raises(Exception, match="is full|the user's"):
            step(100 * number, 0 if fails else 10 * number)
            evicting.get_table().synchronize()
            full.get_table().synchronize()
    fails.clear()
    outcomes = []
    for number in range(4, 9):
        try:
            step(100 * number)
            evicting.get_table().synchronize()
            outcomes.append(True)
        except Exception as error:
            assert "is full" in str(error), error
            outcomes.append(False)
    assert outcomes.count(False) <= 1 and all(outcomes[1:]), outcomes
    assert set(range(800, 805)) <= set(evicting.get_table().keys().tolist())


def test_a_commit_that_is_refused_lets_the_rows_of_its_lookups_go():
    """All rows are in use by a lookup whose gradient no commit has taken."""
    layer = make_layer()
    model = make_model(layer)
    table, variables = layer.get_table(), model.trainable_variables

    def backward_pass(first):
        return model_gradients(
            model, np.arange(first, first + CAPACITY, dtype="int32")[None], np.ones((1, 1), "float32")
        )

    applied = backward_pass(0)
    apply_gradients(model.optimizer, applied, variables)
    backward_pass(0)
    with raises(sok.TicketError, "push is gone", table):
        apply_gradients(model.optimizer, applied, variables)
    apply_gradients(model.optimizer, backward_pass(100), variables)
    assert table.keys().tolist() == list(range(100, 100 + CAPACITY))


def test_a_call_outside_of_training_keeps_no_rows_from_going():
    layer = make_layer()
    model = make_model(layer)
    train(model, np.arange(CAPACITY))
    rows = model(np.arange(CAPACITY, dtype="int32")[None], training=False)
    train(model, np.arange(100, 100 + CAPACITY))
    assert layer.get_table().keys().tolist() == list(range(100, 100 + CAPACITY))
    del rows


def test_the_policies_module_has_what_it_documents_alone():
    assert set(sok.policies.__all__) == {"LFU", "LRU", "Custom", "Frequency", "Probability", "TimeToLive", "set_clock"}


def test_statistics_count_the_rows_that_went():
    layer = make_layer()
    model = make_model(layer)
    ids = np.arange(3 * CAPACITY, dtype="int32").reshape(3, CAPACITY)
    history = model.fit(
        ids,
        np.ones((3, 1)),
        batch_size=1,
        shuffle=False,
        verbose=0,
        callbacks=[sok.callbacks.TableStatistics(per_table=True)],
    ).history
    assert history["evicted_rows"] == history[f"{layer.name}/evicted"] == [2 * CAPACITY]
    assert history["new_rows"] == [3 * CAPACITY]
