"""The policies of ten other systems, with their defaults, as ours. docs/policies.md has them as a table.

A test says with what argument a table of ours does what the system does, and where it differs.
"""

import datetime

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import FAST

DIM = 4
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


def make(**policies):
    """A layer with these policies, its model and its table."""
    layer = sok.DynamicEmbedding(DIM, seed=5, **policies)
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse", **FAST)
    return layer, model, layer.get_table()


def train(model, *ids):
    model.train_on_batch(np.array(ids, "int32"), np.ones((len(ids), 1)))


def read(layer, key):
    """What a lookup outside of training answers."""
    return keras.ops.convert_to_numpy(layer(np.array([key], "int32"), training=False))


def states(table, *keys):
    return [table.explain(key).state for key in keys]


def scores(table):
    contents = table.export(scores=True)
    return dict(zip(contents.keys.tolist(), contents.scores.tolist(), strict=True))


@pytest.fixture
def clock():
    """Stops the clock. A call sets how much time has passed."""
    sok.policies.set_clock(START)
    yield lambda passed: sok.policies.set_clock(START + passed)
    sok.policies.set_clock(None)


def check_expiry(clock, time_to_live):
    """Rows that training has not used for longer go, in some of the steps that follow; rows that it has used stay."""
    _, model, table = make(time_to_live=time_to_live)
    train(model, *range(1000))
    clock(time_to_live * 0.9)
    train(model, *range(500))
    for _ in range(20):
        train(model, 0)
    assert len(table) == 1000
    clock(time_to_live * 1.1)
    for _ in range(150):
        train(model, 0)
    gone = set(range(1000)) - set(table.keys().tolist())
    assert gone and gone <= set(range(500, 1000))
    assert states(table, min(gone), 0) == ["expired", "present"]


def test_dynamicemb():
    """A full table evicts the lowest score. The strategies STEP and LFU are ours; TIMESTAMP, its default, is STEP with another unit. It
    admits ids whose count is at or above the threshold, and answers the others with their first values. Off by default."""
    _, model, table = make()
    train(model, 1, 2, 3)
    assert states(table, 1, 2, 3) == ["present"] * 3 and table.stats().evicted == 0
    _, model, table = make(max_capacity=4, eviction="lru")
    for ids in ([1, 2], [3, 4], [1], [5]):
        train(model, *ids)
    assert states(table, 1, 2, 3, 4, 5) == ["present", "evicted", "present", "present", "present"]
    assert scores(table) == {1: 3, 3: 2, 4: 2, 5: 4}
    _, model, table = make(max_capacity=4, eviction="lfu")
    for ids in ([1, 1, 2], [3, 4, 4], [2], [5]):
        train(model, *ids)
    assert states(table, 3) == ["evicted"] and scores(table) == {1: 2, 2: 2, 4: 2, 5: 1}
    layer, model, table = make(admission=sok.policies.Frequency(3))
    initial = read(layer, 7)
    train(model, 7, 7)
    np.testing.assert_array_equal(read(layer, 7), initial)
    assert initial.any() and states(table, 7) == ["filtered"]
    train(model, 7)
    assert states(table, 7) == ["present"]


def test_dynamicemb_customized():
    """DynamicEmb's score strategy CUSTOMIZED: the lowest scores of the user's own go. `set_score` gives one to all ids of the next batch, we
    take one for each id."""
    layer = sok.DynamicEmbedding(DIM, max_capacity=2, eviction=sok.policies.Custom())
    ids, given = (keras.Input((), dtype="int32") for _ in range(2))
    model = keras.Model([ids, given], keras.layers.Dense(1)(layer(ids, scores=given)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse", **FAST)
    for key, score in ((1, 20), (2, 10), (3, 15), (1, 5)):
        model.train_on_batch([np.array([key], "int32"), np.array([score], "int32")], np.ones((1, 1)))
    assert scores(layer.get_table()) == {1: 5, 3: 15} and states(layer.get_table(), 2) == ["evicted"]


def test_tzrec():
    """TorchEasyRec: scores are steps; without eviction a table stops at its capacity; ids that have no row read 0."""
    layer, model, table = make(max_capacity=3, check_mode="count", missing="zeros")
    for ids in ([1, 2], [3], [4]):
        train(model, *ids)
    assert states(table, 1, 2, 3, 4) == ["present", "present", "present", "absent"]
    assert table.stats().refused == 1 and not read(layer, 4).any()


def test_torchrec_mpzch(clock):
    """Managed collisions of zero collision hashing: a row expires after hours unseen; new ids opt in by chance; the others share one row.
    It removes an expired row when its place is needed, we in one of the next 4,096 steps."""
    check_expiry(clock, datetime.timedelta(hours=24))
    layer, model, table = make(admission=sok.policies.Probability(0.3), out_of_vocabulary_key=0)
    table.assign([0], np.full((1, DIM), 9.0, "float32"))
    train(model, *range(1, 200))
    admitted = set(table.keys().tolist()) - {0}
    assert 30 < len(admitted) < 90
    refused = min(set(range(1, 200)) - admitted)
    np.testing.assert_array_equal(read(layer, refused)[0], table[[0]][0])


def test_torchrec_mch():
    """Managed collisions: LFU or LRU, which must be chosen; ids without a row share one. It evicts each so many steps, we when a table is
    full. DistanceLFU weighs a count by its age, which a half-life does too."""
    layer, model, table = make(max_capacity=4, eviction=sok.policies.LFU(half_life=2), out_of_vocabulary_key=0)
    table.assign([0], np.ones((1, DIM), "float32"))
    for ids in ([1, 1, 1, 1], [2, 2], [3, 3], [3], [4]):
        train(model, *ids)
    assert "evicted" in states(table, 0, 1, 2, 3) and states(table, 3, 4) == ["present"] * 2
    np.testing.assert_array_equal(read(layer, 999), read(layer, 0))


def test_fbgemm_key_value(clock):
    """Rows go after minutes unseen, or those with the lowest counts, which decay daily. It sweeps in the background, we a part of the
    keys in each step."""
    check_expiry(clock, datetime.timedelta(minutes=90))
    steps_a_day = 3
    _, model, table = make(max_capacity=3, eviction=sok.policies.LFU(half_life=steps_a_day))
    for _ in range(steps_a_day):
        train(model, 1, 1, 2)
    assert scores(table) == {1: 3, 2: 1}


def test_deeprec():
    """A row goes when no gradient has come for `steps_to_live` steps. An id has its row once it has come `filter_freq` times, and reads
    `default_value_no_permission` = 0.0 until then. It removes rows when a checkpoint is saved, we in each step."""
    layer, model, table = make(time_to_live=2, admission=sok.policies.Frequency(2), missing="zeros")
    train(model, 1, 2, 2)
    assert states(table, 1, 2) == ["filtered", "present"]
    assert not read(layer, 1).any()
    model.predict(np.array([2], "int32"), verbose=0)  # a lookup without a gradient keeps no row
    for _ in range(3):
        train(model, 3)
    assert states(table, 2, 3) == ["expired", "present"]


def test_monolith(clock):
    """A row goes days after its last update. An id is admitted by its count, or by a chance with which 95 % have a row once they have come k
    times: 1 - 0.05^(1/k). Its chance is for each id, ours for each step in which ids come."""
    check_expiry(clock, datetime.timedelta(days=30))
    k = 4
    _, model, table = make(admission=sok.policies.Probability(1 - 0.05 ** (1 / k)))
    for _ in range(k):
        train(model, *range(1000))
    assert 920 < len(table) < 975


@pytest.mark.parametrize("kept", ["newest", "most frequent"])
def test_tfra(kept):
    """`restrict` keeps so many of the newest or the most frequent rows, when it is called."""
    _, model, table = make(max_capacity=100, eviction="lru" if kept == "newest" else "lfu")
    for ids in ([1, 1, 1], [2, 2], [3], [4]):
        train(model, *ids)

    def restrict(num_reserved, trigger):
        if len(table) > trigger:
            contents = table.export(scores=True)
            order = np.lexsort((contents.keys, contents.scores))
            table.erase(contents.keys[order[: len(table) - num_reserved]])

    restrict(2, trigger=4)
    assert len(table) == 4
    restrict(2, trigger=3)
    assert table.keys().tolist() == ([3, 4] if kept == "newest" else [1, 2])


def test_recis():
    """The filter hook removes ids that training has not seen for `filter_step` steps. Unknown ids read zeros; reading inserts none."""
    layer, model, table = make(time_to_live=3, missing="zeros")
    for ids in ([1, 2], [2], [2], [2]):
        train(model, *ids)
    assert states(table, 1, 2) == ["expired", "present"]
    assert not read(layer, 1).any() and len(table) == 1


def test_ascend_recsdk(clock):
    """A row goes after seconds unseen. An id gets its row when its count is above `admit_threshold`: ours is at or above, so one more."""
    check_expiry(clock, datetime.timedelta(seconds=600))
    admit_threshold = 2
    layer, model, table = make(admission=sok.policies.Frequency(admit_threshold + 1), missing="zeros")
    train(model, 1, 1)
    assert states(table, 1) == ["filtered"] and not read(layer, 1).any()
    train(model, 1)
    assert states(table, 1) == ["present"]


# What each system does if nothing is said: of all but two, nothing. MCH has no default.
DEFAULTS = {
    "DynamicEmb": {"max_capacity": 8, "eviction": "lru"},  # score strategy TIMESTAMP
    "TorchEasyRec": {"max_capacity": 8, "check_mode": "count", "missing": "zeros"},
    "TorchRec MPZCH": {},  # neither eviction nor opt-in
    "FBGEMM key-value": {},
    "DeepRec": {},  # steps_to_live and filter_freq are 0
    "Monolith": {"time_to_live": datetime.timedelta(days=36_500)},  # threshold 0
    "TFRA": {},  # restrict policies remove rows when they are called
    "RecIS": {"missing": "zeros"},
    "Ascend RecSDK": {"missing": "zeros"},  # admit_threshold is -1, the time 0
}


@pytest.mark.parametrize("system", DEFAULTS)
def test_defaults_keep_each_id_that_there_is_room_for(system, clock):
    layer, model, table = make(**DEFAULTS[system])
    train(model, 1, 2, 3)
    clock(datetime.timedelta(days=3650))
    for _ in range(20):
        train(model, 4)
    assert states(table, 1, 2, 3, 4) == ["present"] * 4
    stats = table.stats()
    assert (stats.filtered, stats.evicted, stats.expired, stats.refused) == (0, 0, 0, 0)
    assert read(layer, 99).any() == ("missing" not in DEFAULTS[system])
    train(model, *range(10, 18))
    evicts, refuses = "eviction" in DEFAULTS[system], "check_mode" in DEFAULTS[system]
    stats = table.stats()
    assert (stats.evicted, stats.refused) == (4 * evicts, 4 * refuses)
