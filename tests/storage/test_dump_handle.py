"""Dumps that are written while training goes on."""

import os
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest

import sok_keras as sok
from small_model import contents, make_model, train
from sok_keras import dump_handle, pending_dumps


def assert_holds(path, expected):
    again = make_model()
    sok.load(path, again)
    for mine, others in zip(contents(again), expected, strict=True):
        np.testing.assert_array_equal(mine, others)


@pytest.fixture
def slow(monkeypatch):
    """Dumps that are not written before this event."""
    may_write = threading.Event()
    write = dump_handle._write

    def later(*arguments):
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(dump_handle, "_write", later)
    yield may_write
    may_write.set()


def test_a_dump_is_of_the_step_at_which_it_was_called(tmp_path, slow):
    model = make_model()
    train(model, *range(50))
    before = contents(model)
    handle = sok.dump(tmp_path / "d", model, wait=False)
    assert not handle.done() and handle.progress == 0
    with pytest.raises(TimeoutError, match="is not written within 0.01 s"):
        handle.result(0.01)
    for step in range(3):
        train(model, step, 100 + step)
        model.get_layer("ids").get_table().erase(np.array([40 + step]))
    slow.set()
    manifest = handle.result()
    assert handle.done() and handle.progress == 1 and handle.result() is manifest
    assert (manifest.step, manifest.tables[0].num_rows) == (1, 50)
    assert sok.read_manifest(tmp_path / "d") == manifest
    assert_holds(tmp_path / "d", before)
    # What has changed meanwhile is in the next increment.
    entry = sok.dump_increment(tmp_path / "d", model).increments[0].tables[0]
    assert (entry.num_rows, entry.num_removed) == (6, 3)
    assert_holds(tmp_path / "d", contents(model))


def test_an_increment_is_written_while_training_goes_on(tmp_path, slow):
    model = make_model()
    slow.set()
    train(model, *range(50))
    sok.dump(tmp_path, model, wait=False).result()
    slow.clear()
    train(model, 3, 70)
    before = contents(model)
    handle = sok.dump_increment(tmp_path, model, wait=False)
    train(model, 4, 71)
    slow.set()
    entry = handle.result().increments[0].tables[0]
    assert entry.num_rows == 2
    assert_holds(tmp_path, before)
    assert sok.dump_increment(tmp_path, model).increments[1].tables[0].num_rows == 2
    assert_holds(tmp_path, contents(model))


def test_what_is_known_at_once_is_raised_at_once(tmp_path):
    model = make_model()
    train(model, 1)
    sok.dump(tmp_path / "d", model)
    with pytest.raises(ValueError, match="`overwrite` must be True"):
        sok.dump(tmp_path / "d", model, overwrite=False, wait=False)
    model.get_layer("ids").get_table().clear()
    with pytest.raises(sok.UnknownChangesError):
        sok.dump_increment(tmp_path / "d", model, wait=False)
    with pytest.raises(FileNotFoundError):
        sok.dump_increment(tmp_path / "none", model, wait=False)


def test_an_error_is_raised_by_the_result_or_warned_of(tmp_path):
    model = make_model()
    train(model, 1)
    (tmp_path / "file").write_text("no directory")
    handle = sok.dump(tmp_path / "file", model, wait=False)
    for _ in range(2):
        with pytest.raises(OSError, match="file"):
            handle.result()
    handle = sok.dump(tmp_path / "file", model, wait=False)
    while not handle.done():
        time.sleep(0.01)
    with pytest.warns(UserWarning, match="The dump to .* has failed"):
        del handle
    # The tables go on as if there had been no dump.
    train(model, 2)
    sok.dump(tmp_path / "d", model)
    assert_holds(tmp_path / "d", contents(model))


def fit(model, directory, epochs, **arguments):
    callback = sok.callbacks.DumpCheckpoint(directory, **arguments)
    ids = np.arange(24, dtype="int32") % 11
    model.fit(ids, np.ones((24, 1)), batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])
    return callback


@pytest.mark.parametrize("arguments", [{"save_freq": 2, "keep": 2}, {"save_freq": 4, "increments_every": 1, "keep": 9}])
def test_a_callback_writes_what_it_would_if_it_waited(arguments, tmp_path):
    models = {wait: make_model() for wait in (True, False)}
    written = {}
    for wait, model in models.items():
        callback = fit(model, tmp_path / str(wait), 2, wait=wait, **arguments)
        manifests = [sok.read_manifest(path) for path in callback.dumps()]
        written[wait] = [(m.step, [part.step for part in m.increments]) for m in manifests]
        assert_holds(callback.dumps()[-1], contents(model))
    assert written[True] == written[False]
    again = make_model()
    fit(again, tmp_path / "False", 1, wait=False)
    assert int(again.optimizer.iterations) == 18


def test_a_callback_raises_the_error_of_a_dump(tmp_path):
    model = make_model()
    (tmp_path / "step-2").write_text("no directory")
    with pytest.raises(OSError, match="step-2"):
        fit(model, tmp_path, 1, save_freq=2, wait=False)


def test_the_interpreter_waits_for_a_dump_at_its_end(tmp_path):
    program = """
import sys
import numpy as np
import sok_keras as sok
table = sok.DynamicEmbedding(8, name="ids").get_table()
table.assign(np.arange(200_000), np.ones((200_000, 8), "float32"))
sok.dump(sys.argv[1], table, wait=False)
"""
    subprocess.run([sys.executable, "-c", program, os.fspath(tmp_path)], check=True, timeout=200)
    assert sok.verify(tmp_path) is None
    assert sok.read_manifest(tmp_path).tables[0].num_rows == 200_000


@pytest.mark.parametrize("call", [sok.verify, sok.compact, lambda path: sok.load(path, make_model())])
def test_calls_for_a_dump_wait_until_it_is_written(tmp_path, slow, call):
    handle = sok.dump(tmp_path / "d", make_model(), wait=False)
    threading.Timer(0.2, slow.set).start()
    call(tmp_path / "d")
    assert handle.done()


def test_a_thread_that_does_not_start_leaves_nothing_to_wait_for(tmp_path, monkeypatch):
    model = make_model()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            sok.dump(tmp_path / "d", model, wait=False)
    assert not pending_dumps._writing
    sok.dump(tmp_path / "d", model)


def test_a_dump_waits_for_another_one_of_the_process_to_the_same_directory(tmp_path, slow):
    model = make_model()
    train(model, *range(20))
    handle = sok.dump(tmp_path / "d", model, wait=False)
    threading.Timer(0.2, slow.set).start()
    train(model, 100)
    assert [part.tables[0].num_rows for part in sok.dump_increment(tmp_path / "d", model).increments] == [1]
    assert handle.done()
    assert not pending_dumps._writing
    assert_holds(tmp_path / "d", contents(model))


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_new", [True, False])
def test_an_interrupted_fit_goes_on_with_the_dump_that_was_being_written(tmp_path, slow, is_new):
    model, ids = make_model(), np.arange(32, dtype="int32")

    def fit(callback, *others):
        model.fit(ids, np.ones((32, 1)), batch_size=4, shuffle=False, verbose=0, callbacks=[callback, *others])

    def make():
        return sok.callbacks.DumpCheckpoint(tmp_path, save_freq=4, keep=3, wait=False)

    callback = make()
    with pytest.raises(KeyboardInterrupt):
        fit(callback, Interrupt())
    threading.Timer(0.2, slow.set).start()
    callback = make() if is_new else callback
    fit(callback)
    # Four batches before the interruption, and the four after them.
    assert int(model.optimizer.iterations) == 8
    assert [os.path.basename(path) for path in callback.dumps()] == ["step-4", "step-8"]


@pytest.mark.parametrize("arguments", [{"increments_every": 1, "base_every": 2}, {"base_every": 3}])
def test_whole_dumps_come_as_often_after_a_restart(tmp_path, arguments):
    ids = np.arange(64, dtype="int32")

    def fit(path, *others):
        callback = sok.callbacks.DumpCheckpoint(path, save_freq=4, keep=9, **arguments)
        model = make_model()
        model.fit(ids, np.ones((64, 1)), batch_size=4, shuffle=False, verbose=0, callbacks=[callback, *others])
        return [os.path.basename(path) for path in callback.dumps()]

    expected = fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "two", Interrupt())
    assert fit(tmp_path / "two") == expected
