"""The callback that writes dumps while a model trains."""

import os

import pytest

import sok_keras as sok
from reference import (
    STEPS,
    fit,
    table_of,
    to_numpy,
)
from test_persistence import OPTIMIZERS, assert_tables_equal, compiled, rewrite_manifest


def test_dump_checkpoint_writes_every_few_batches_and_keeps_the_newest(tmp_path):
    callback = sok.callbacks.DumpCheckpoint(tmp_path, save_freq=3, keep=2)
    fit(compiled(OPTIMIZERS["momentum"]()), epochs=3, callbacks=[callback])
    assert [os.path.basename(path) for path in callback.dumps()] == ["step-9", "step-12"]
    assert sok.read_manifest(callback.dumps()[-1]).step == 12


def test_dump_checkpoint_restores_only_if_asked(tmp_path):
    fit(compiled(OPTIMIZERS["momentum"]()), callbacks=[sok.callbacks.DumpCheckpoint(tmp_path)])
    model = compiled(OPTIMIZERS["momentum"]())
    fit(model, callbacks=[sok.callbacks.DumpCheckpoint(tmp_path, restore=False)])
    assert int(to_numpy(model.optimizer.iterations)) == STEPS


def test_dump_checkpoint_removes_older_dumps_first_though_their_run_went_further(tmp_path):
    fit(compiled(OPTIMIZERS["momentum"]()), epochs=2, callbacks=[sok.callbacks.DumpCheckpoint(tmp_path, keep=2)])
    model = compiled(OPTIMIZERS["momentum"]())
    fit(model, callbacks=[sok.callbacks.DumpCheckpoint(tmp_path, restore=False)])
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{STEPS}"]
    sok.load(tmp_path / f"step-{STEPS}", again := compiled(OPTIMIZERS["momentum"]()))
    assert_tables_equal(table_of(again), table_of(model))


def test_dump_checkpoint_goes_on_from_the_dump_that_was_written_last(tmp_path):
    callback = lambda **arguments: sok.callbacks.DumpCheckpoint(tmp_path, keep=5, **arguments)
    fit(compiled(OPTIMIZERS["momentum"]()), epochs=2, callbacks=[callback()])
    fit(compiled(OPTIMIZERS["momentum"]()), steps=1, callbacks=[callback(restore=False)])
    names = [os.path.basename(path) for path in callback().dumps()]
    assert names == [f"step-{STEPS}", f"step-{2 * STEPS}", "step-1"]
    model = compiled(OPTIMIZERS["momentum"]())
    fit(model, steps=1, callbacks=[callback()])
    assert int(to_numpy(model.optimizer.iterations)) == 2


def test_dump_checkpoint_keeps_what_its_run_wrote_though_the_clock_was_set_back(tmp_path):
    fit(compiled(OPTIMIZERS["momentum"]()), epochs=2, callbacks=[sok.callbacks.DumpCheckpoint(tmp_path, keep=2)])
    for path in sorted(tmp_path.iterdir()):
        rewrite_manifest(path, lambda body: body.update(created="2999-01-01T00:00:00Z"))
    fit(compiled(OPTIMIZERS["momentum"]()), steps=1, callbacks=[callback := sok.callbacks.DumpCheckpoint(tmp_path)])
    assert callback.dumps() == [str(tmp_path / f"step-{2 * STEPS + 1}")]


def test_dump_checkpoint_does_not_go_on_from_an_older_dump_where_one_is_damaged(tmp_path):
    callback = lambda **arguments: sok.callbacks.DumpCheckpoint(tmp_path, keep=2, **arguments)
    fit(compiled(OPTIMIZERS["momentum"]()), epochs=2, callbacks=[callback()])
    damaged = tmp_path / f"step-{2 * STEPS}" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(sok.CorruptDumpError, match=str(damaged)):
        fit(compiled(OPTIMIZERS["momentum"]()), callbacks=[callback()])
    fit(compiled(OPTIMIZERS["momentum"]()), callbacks=[callback(restore=False)])  # it goes on all the same
    assert not sok.verify(tmp_path / f"step-{STEPS}")


def test_dump_checkpoint_passes_over_unfinished_dumps(tmp_path):
    (tmp_path / "step-99").mkdir()
    assert sok.callbacks.DumpCheckpoint(tmp_path).dumps() == []


@pytest.mark.parametrize("arguments", [{"save_freq": 0}, {"save_freq": "batch"}, {"keep": 0}, {"keep": 1.5}])
def test_dump_checkpoint_refuses_arguments_without_meaning(arguments):
    (argument,) = arguments
    with pytest.raises(ValueError, match=f"`{argument}` must be .*positive.*Received: {argument}="):
        sok.callbacks.DumpCheckpoint("nowhere", **arguments)
