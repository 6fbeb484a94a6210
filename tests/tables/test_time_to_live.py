"""Rows that go after a time without training."""

import datetime

import keras
import numpy as np
import pytest
from keras import layers

import sok_keras as sok
from reference import ON_GPU

DAY = datetime.timedelta(days=1)
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


def model_of(layer):
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, layers.Dense(1)(layer(ids)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    return model


def train(model, *ids):
    model.train_on_batch(np.array(ids, "int32"), np.ones((len(ids), 1)))


@pytest.fixture
def clock():
    sok.policies.set_clock(START)
    yield sok.policies.set_clock
    sok.policies.set_clock(None)


def test_rows_go_after_steps_without_training():
    policy = sok.policies.TimeToLive(3, keep_expired=True)
    layer = sok.DynamicEmbedding(4, time_to_live=policy)
    model = model_of(layer)
    for ids in ([1, 2, 3], [2], [3], [4]):
        train(model, *ids)
    table = layer.get_table()
    assert table.keys().tolist() == [2, 3, 4]
    assert table.explain(1) == ("expired", None, 4, None)
    assert table.explain(2) == ("present", None, None, None)
    model.predict(np.array([2, 2], "int32"), verbose=0)  # inference keeps no row
    train(model, 4)
    stats = table.stats()
    assert (stats.inserted, stats.evicted, stats.expired, stats.size) == (4, 0, 2, 2)
    gone = table.take_evicted()
    assert gone.keys.tolist() == [1, 2] and gone.rows.shape == (2, 4)
    assert gone.scores.tolist() == [1, 2]  # the steps of their last use
    train(model, 1)
    assert table.explain(1).state == "present"


def test_rows_go_after_a_time_without_training(clock):
    layer = sok.DynamicEmbedding(4, time_to_live=30 * DAY, seed=1)
    model = model_of(layer)
    table = layer.get_table()
    train(model, *range(2000))
    clock(START + 20 * DAY)
    train(model, *range(1000))
    assert len(table) == 2000
    clock(START + 31 * DAY)
    for _ in range(64):  # some parts of the keys have their turn
        train(model, 1)
    expired = set(range(2000)) - set(table.keys().tolist())
    assert 0 < len(expired) < 100 and min(expired) >= 1000
    assert table.explain(min(expired)).state == "expired"
    clock(START - 1000 * DAY)
    for _ in range(64):
        train(model, 2)
    assert all(table.find(np.arange(1000))[1])


def test_a_layer_comes_back_from_its_configuration():
    for time_to_live in (7, 2 * DAY, sok.policies.TimeToLive(DAY / 7, keep_expired=True)):
        layer = sok.DynamicEmbedding(4, time_to_live=time_to_live)
        again = sok.DynamicEmbedding.from_config(layer.get_config())
        assert again.time_to_live == layer.time_to_live
        config = sok.TableConfig("t", None, 4, time_to_live=time_to_live)
        assert sok.TableConfig.from_config(config.get_config()).time_to_live == config.time_to_live
    policy = sok.policies.TimeToLive(datetime.timedelta(microseconds=12_345_678))
    assert policy.time_to_live == datetime.timedelta(milliseconds=12_345)


def test_a_model_comes_back_from_its_file(tmp_path):
    model = model_of(sok.DynamicEmbedding(4, time_to_live=5))
    train(model, 1, 2)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    (layer,) = (layer for layer in again.layers if isinstance(layer, sok.DynamicEmbedding))
    assert layer.time_to_live.time_to_live == 5
    assert layer.get_table().keys().tolist() == [1, 2]
    for _ in range(6):
        train(again, 3)
    assert layer.get_table().keys().tolist() == [3]


def test_ages_and_times_of_commits_go_with_a_weights_file(tmp_path, clock):
    def make(time_to_live):
        layer = sok.DynamicEmbedding(4, time_to_live=time_to_live, name="ids")
        model = model_of(layer)
        train(model, 9)
        return model, layer.get_table()

    def ages_of(table):
        keys, _, _, columns = table._native.export(False)
        return dict(zip(keys.tolist(), dict(columns)["ages"].tolist(), strict=True))

    model, table = make(30 * DAY)
    clock(START + 20 * DAY)
    train(model, 1, 2)
    clock(START + 21 * DAY)
    train(model, 2)
    model.save_weights(tmp_path / "w.weights.h5")
    assert ages_of(table) == {1: 1, 2: 0, 9: 2}
    for time_to_live in (30 * DAY, 4, None):
        again, loaded = make(time_to_live)
        again.load_weights(tmp_path / "w.weights.h5")
        assert loaded.keys().tolist() == [1, 2, 9]
        if time_to_live is not None:
            assert ages_of(loaded) == ages_of(table) and loaded.step == table.step
        if time_to_live == 30 * DAY:
            assert loaded._native.commit_times() == table._native.commit_times() != []
        if time_to_live == 4:
            for left in ([1, 2, 3, 9], [1, 2, 3], [2, 3], [3]):
                train(again, 3)
                assert loaded.keys().tolist() == left


def test_ages_go_with_a_dump(tmp_path):
    model = model_of(sok.DynamicEmbedding(4, time_to_live=3, name="ids"))
    train(model, 1, 2)
    train(model, 2)
    sok.dump(tmp_path / "d", model)
    assert sok.read_manifest(tmp_path / "d").version == 3
    layer = sok.DynamicEmbedding(4, time_to_live=3, name="ids")
    again = model_of(layer)
    for _ in range(5):
        train(again, 9)
    sok.load(tmp_path / "d", again)
    assert layer.get_table().keys().tolist() == [1, 2] and layer.get_table().step == 3
    train(again, 3)
    assert layer.get_table().keys().tolist() == [1, 2, 3]
    train(again, 3)
    assert layer.get_table().keys().tolist() == [2, 3]
    train(again, 3)
    assert layer.get_table().keys().tolist() == [3]


def test_statistics_have_expired_rows():
    model = model_of(sok.DynamicEmbedding(4, time_to_live=1))
    history = model.fit(
        np.arange(8, dtype="int32"),
        np.ones((8, 1)),
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[sok.callbacks.TableStatistics()],
    )
    assert history.history["expired_rows"] == [6] and history.history["rows"] == [2]


@pytest.mark.parametrize(
    "value",
    [0, -1, True, 1.5, 2**64, np.timedelta64(30, "ns"), "30 days", DAY * 0, -DAY, datetime.timedelta(microseconds=999)],
)
def test_wrong_times_are_refused(value):
    with pytest.raises(ValueError, match="`time_to_live` must be a positive number of steps"):
        sok.DynamicEmbedding(4, time_to_live=value)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="`keep_expired` must be True or False"):
        sok.policies.TimeToLive(3, keep_expired=1)
    with pytest.raises(ValueError, match="`time_to_live` is for dynamic tables"):
        sok.TableConfig("t", 10, 4, time_to_live=3)
    for now in (datetime.datetime(2026, 1, 1), datetime.datetime(1950, 1, 1, tzinfo=datetime.timezone.utc)):
        with pytest.raises(ValueError, match="`now` must have a time zone and not be before 1970"):
            sok.policies.set_clock(now)
    with pytest.raises(TypeError, match="`now` must be a `datetime` with a time zone or None. Received: now='noon'"):
        sok.policies.set_clock("noon")
    with pytest.raises(sok.SokError, match="does not keep the rows that it removes"):
        sok.DynamicEmbedding(4, time_to_live=3).get_table().take_evicted()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_tables_are_on_the_gpu():
    assert sok.DynamicEmbedding(4, time_to_live=3)._core.gpu is not None
