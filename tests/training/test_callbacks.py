"""Keras' callbacks with tables: the best epoch, and training that goes on where it was interrupted."""

import json
import os

import keras
import numpy as np
import pytest

import sok_keras as sok
from dumped import all_of, assert_equal, compiled
from reference import STEPS, fit, table_of, to_numpy

SGD = lambda: keras.optimizers.SGD(0.2, momentum=0.9)


class Losses(keras.callbacks.Callback):
    """Replaces a metric by given numbers, and keeps the table after each epoch."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.tables = numbers, []

    def on_epoch_end(self, epoch, logs=None):
        logs["loss"] = self.numbers[epoch]
        self.tables.append(table_of(self.model).export())


class Stop(Exception):
    pass


class StopAfter(keras.callbacks.Callback):
    """Raises after a number of batches, as if the process died."""

    def __init__(self, count):
        super().__init__()
        self.left = count

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Stop


# ---- EarlyStopping


def test_early_stopping_of_keras_that_restores_weights_is_refused_before_training():
    model = compiled(SGD())
    with pytest.raises(ValueError, match=r"Use `sok_keras.callbacks.EarlyStopping\(restore_best_weights=True\)`"):
        fit(model, callbacks=[keras.callbacks.EarlyStopping("loss", restore_best_weights=True)])
    assert len(table_of(model)) == 0 and int(to_numpy(model.optimizer.iterations)) == 0
    fit(model, callbacks=[keras.callbacks.EarlyStopping("loss")])  # restores nothing


def test_early_stopping_of_keras_is_as_ever_for_models_without_tables():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, verbose=0, callbacks=[callback])
    assert callback.best_weights is not None


@pytest.mark.parametrize(("losses", "best"), [([3, 1, 2, 2, 2], 1), ([3, 2, 1], 2), ([1, 2, 3, 3], 0)])
@pytest.mark.parametrize("where", ["temporary", "given"])
def test_early_stopping_restores_the_rows_of_the_best_epoch(losses, best, where, tmp_path):
    path = tmp_path / "best" if where == "given" else None
    keep = Losses(losses)
    callback = sok.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True, path=path)
    model = compiled(SGD())
    fit(model, epochs=len(losses), callbacks=[keep, callback])
    assert callback.best_epoch == best
    np.testing.assert_array_equal(table_of(model).export().rows, keep.tables[best].rows)
    if len(losses) > best + 1:
        assert not np.array_equal(keep.tables[-1].rows, keep.tables[best].rows)
    assert int(to_numpy(model.optimizer.iterations)) == STEPS * (best + 1)
    if path is not None:
        assert sok.read_manifest(path).step == STEPS * (best + 1)
    fit(model)  # training goes on


def test_early_stopping_without_restoring_writes_nothing(tmp_path):
    callback = sok.callbacks.EarlyStopping("loss", patience=1, path=tmp_path / "best")
    model = compiled(SGD())
    fit(model, epochs=4, callbacks=[Losses([3, 1, 2, 2]), callback])
    assert callback.stopped_epoch == 2 and not (tmp_path / "best").exists()


# ---- DumpCheckpoint(monitor=...)


@pytest.mark.parametrize(("mode", "step"), [("min", 2), ("max", 3), ("auto", 2)])
def test_only_the_best_epochs_are_dumped(mode, step, tmp_path):
    callback = sok.callbacks.DumpCheckpoint(tmp_path, monitor="loss", mode=mode, save_best_only=True)
    fit(compiled(SGD()), epochs=4, callbacks=[Losses([3, 1, 5, 2]), callback])
    assert [os.path.basename(path) for path in callback.dumps()] == [f"step-{step * STEPS}"]


def test_a_metric_that_is_not_there_is_a_warning_and_no_dump(tmp_path):
    callback = sok.callbacks.DumpCheckpoint(tmp_path, monitor="auc", mode="max", save_best_only=True)
    with pytest.warns(UserWarning, match=r"`save_best_only` needs the metric 'auc', and the logs have \['loss'\]"):
        fit(compiled(SGD()), callbacks=[callback])
    assert callback.dumps() == []


@pytest.mark.parametrize(
    "arguments",
    [{"monitor": "loss"}, {"save_best_only": True}, {"monitor": 3, "save_best_only": True}, {"mode": "best"}],
)
def test_arguments_that_mean_nothing_are_refused(arguments, tmp_path):
    with pytest.raises(ValueError, match=r"`(monitor|mode)` must be.*Received"):
        sok.callbacks.DumpCheckpoint(tmp_path, **arguments)


# ---- going on


def train(model, epochs, callbacks=()):
    """Trains on the same batches in each epoch, in the same order."""
    fit(model, epochs, callbacks=list(callbacks))


def test_ranks_do_not_share_the_files_of_backup_and_restore(tmp_path, monkeypatch):
    model = compiled(SGD())
    train(model, 1)
    callback = keras.callbacks.BackupAndRestore(tmp_path)
    callback.set_model(model)
    monkeypatch.setattr("sok_keras.distributed.world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"must be used by one process alone.*DumpCheckpoint"):
        callback.on_train_begin()


@pytest.mark.parametrize("stop", [1, STEPS - 1, STEPS, STEPS + 2, 2 * STEPS + 1])
@pytest.mark.parametrize("kind", ["ours", "keras"])
def test_a_restart_goes_on_at_the_next_batch(kind, stop, tmp_path):
    def callback():
        if kind == "ours":
            return sok.callbacks.DumpCheckpoint(tmp_path / "dumps", save_freq=1, keep=2)
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)

    expected = compiled(SGD())
    train(expected, 3)
    with pytest.raises(Stop):
        train(compiled(SGD()), 3, [callback(), StopAfter(stop)])
    model = compiled(SGD())
    train(model, 3, [callback()])
    assert int(to_numpy(model.optimizer.iterations)) == 3 * STEPS
    assert_equal(all_of(model), all_of(expected))


@pytest.mark.parametrize("stop", [1, 2])
def test_a_restart_that_is_interrupted_while_it_draws_batches_leaves_no_trace(stop, tmp_path):
    """The next `fit`, of the same model and without the callback, trains all batches of all epochs."""
    callback = lambda: sok.callbacks.DumpCheckpoint(tmp_path, save_freq=1)
    with pytest.raises(Stop):
        train(compiled(SGD()), 3, [callback(), StopAfter(STEPS + 3)])
    model = compiled(SGD())
    with pytest.raises(Stop):
        train(model, 3, [callback(), StopAfter(stop)])
    train(model, 2)
    assert int(to_numpy(model.optimizer.iterations)) == STEPS + 3 + 2 * STEPS


def test_a_fit_after_one_that_has_ended_starts_anew(tmp_path):
    callback = lambda: sok.callbacks.DumpCheckpoint(tmp_path, save_freq=2)
    model = compiled(SGD())
    train(model, 2, [callback()])
    assert not (tmp_path / "sok-progress.json").exists()
    again = compiled(SGD())
    train(again, 2, [callback()])
    assert int(to_numpy(again.optimizer.iterations)) == 4 * STEPS
    train(again, 1)  # without the callback, too
    assert int(to_numpy(again.optimizer.iterations)) == 5 * STEPS


def test_the_best_metric_outlives_a_restart(tmp_path):
    def callback():
        return sok.callbacks.DumpCheckpoint(tmp_path, monitor="loss", mode="min", save_best_only=True, keep=9)

    with pytest.raises(Stop):
        train(compiled(SGD()), 4, [Losses([3, 1, 2, 2]), callback(), StopAfter(2 * STEPS + 1)])
    model = compiled(SGD())
    train(model, 4, [Losses([None, None, 2, 0.5]), callback()])
    names = [os.path.basename(path) for path in callback().dumps()]
    assert names == [f"step-{STEPS}", f"step-{2 * STEPS}", f"step-{4 * STEPS}"]  # 2 is no better than 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        "[" * 100_000,
        '{"step-2": 3}',
        '{"step-2": {"epoch": -1, "batches": 0, "best": null}}',
        '{"step-2": {"epoch": 1}}',
    ],
)
def test_a_damaged_progress_starts_at_epoch_0(text, tmp_path):
    train(compiled(SGD()), 1, [sok.callbacks.DumpCheckpoint(tmp_path, save_freq=2)])
    (tmp_path / "sok-progress.json").write_text(text)
    model = compiled(SGD())
    train(model, 1, [sok.callbacks.DumpCheckpoint(tmp_path, save_freq=100)])
    assert int(to_numpy(model.optimizer.iterations)) == STEPS // 2 * 2 + STEPS


def test_progress_holds_the_dumps_that_are_kept(tmp_path):
    with pytest.raises(Stop):
        train(compiled(SGD()), 3, [sok.callbacks.DumpCheckpoint(tmp_path, save_freq=1, keep=2), StopAfter(STEPS + 1)])
    entries = json.loads((tmp_path / "sok-progress.json").read_text())
    expected = {"epoch": 1, "batches": 0, "trained": STEPS, "since_base": 0, "best": None}
    assert entries[f"step-{STEPS}"] == expected
    assert {f"step-{STEPS}"} <= set(entries) and len(entries) <= 3
    assert not list(tmp_path.glob(".sok-progress*"))
