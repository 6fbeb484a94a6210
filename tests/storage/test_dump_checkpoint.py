"""The callback that writes dumps while a model trains."""

import os

import keras
import pytest

import sok_keras as sok
from dumped import OPTIMIZERS, assert_tables_equal, compiled, rewrite_manifest
from reference import (
    STEPS,
    fit,
    our_embedding,
    table_of,
    to_numpy,
)


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


def test_dump_checkpoint_removes_what_a_run_that_was_interrupted_has_left(tmp_path):
    callback = lambda **arguments: sok.callbacks.DumpCheckpoint(tmp_path, **arguments)
    model = lambda: compiled(OPTIMIZERS["momentum"](), our_embedding(name="e"))
    fit(model(), epochs=2, callbacks=[callback(keep=2)])
    fit(model(), callbacks=[callback(keep=1, base_every=9)])
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{2 * STEPS}"]
    assert len(sok.read_manifest(tmp_path / f"step-{2 * STEPS}").increments) == 1


def test_dump_checkpoint_leaves_a_dump_that_it_went_on_from_if_other_files_are_there(tmp_path):
    model = lambda: compiled(OPTIMIZERS["momentum"](), our_embedding(name="e"))
    fit(model(), callbacks=[sok.callbacks.DumpCheckpoint(tmp_path)])
    (tmp_path / f"step-{STEPS}" / "notes.txt").write_text("mine")
    fit(model(), epochs=2, callbacks=[sok.callbacks.DumpCheckpoint(tmp_path)])
    assert sok.read_manifest(tmp_path / f"step-{STEPS}").step == STEPS


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


# ---- what is another's


def saves(path, **arguments):
    """Two epochs, of which the dump of one is kept."""
    return fit(
        compiled(OPTIMIZERS["momentum"]()), epochs=2, callbacks=[sok.callbacks.DumpCheckpoint(path, **arguments)]
    )


def test_dump_checkpoint_leaves_files_of_others_and_their_directory(tmp_path):
    class Notes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for path in tmp_path.glob("step-*"):
                (path / "notes.txt").write_text("mine")
                (path / "sok-0123456789abcdef-00000.safetensors.bak").write_text("mine")

    fit(
        compiled(OPTIMIZERS["momentum"]()),
        epochs=2,
        callbacks=[sok.callbacks.DumpCheckpoint(tmp_path), Notes()],
    )
    old = tmp_path / f"step-{STEPS}"
    assert sorted(path.name for path in old.iterdir()) == ["notes.txt", "sok-0123456789abcdef-00000.safetensors.bak"]
    assert sok.callbacks.DumpCheckpoint(tmp_path).dumps() == [str(tmp_path / f"step-{2 * STEPS}")]


def foreign_file(path):
    (path / "notes.txt").write_text("mine")


def foreign_directory(path):
    (path / "plots").mkdir()


def damaged_manifest(path):
    (path / "manifest.json").write_text("{}")


def other_manifest(path):
    for file in path.iterdir():
        file.unlink()
    (path / "manifest.json").write_text('{"name": "somebody else\'s"}')


@pytest.mark.parametrize("change", [foreign_file, foreign_directory, damaged_manifest, other_manifest])
def test_dump_checkpoint_leaves_what_it_did_not_write_and_does_not_know(tmp_path, change):
    saves(tmp_path)
    old = tmp_path / f"step-{2 * STEPS}"
    change(old)
    before = sorted(path.name for path in old.iterdir())
    fit(
        compiled(OPTIMIZERS["momentum"]()),
        steps=1,
        epochs=2,
        callbacks=[sok.callbacks.DumpCheckpoint(tmp_path, restore=False)],
    )
    assert sorted(path.name for path in old.iterdir()) == before


def test_dump_checkpoint_removes_whole_dumps_of_earlier_runs(tmp_path):
    saves(tmp_path)
    fit(
        compiled(OPTIMIZERS["momentum"]()),
        steps=1,
        callbacks=[sok.callbacks.DumpCheckpoint(tmp_path, restore=False)],
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_dump_checkpoint_follows_no_link(tmp_path):
    ours, elsewhere = tmp_path / "ours", tmp_path / "elsewhere"
    saves(elsewhere)
    ours.mkdir()
    (ours / "step-99").symlink_to(elsewhere / f"step-{2 * STEPS}", target_is_directory=True)
    kept = sorted(path.name for path in (ours / "step-99").iterdir())
    model = saves(ours)  # neither restored from the link nor removed through it
    assert int(to_numpy(model.optimizer.iterations)) == 2 * STEPS
    assert sorted(path.name for path in (ours / "step-99").iterdir()) == kept
    sok.verify(elsewhere / f"step-{2 * STEPS}")

    (ours / f"step-{2 * STEPS + 1}").symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(sok.DumpError, match="a symbolic link leads elsewhere"):
        fit(model, steps=1, callbacks=[sok.callbacks.DumpCheckpoint(ours, restore=False)])
    assert sorted(path.name for path in elsewhere.iterdir()) == [f"step-{2 * STEPS}"]


def test_dump_checkpoint_removes_no_directory_that_a_link_has_replaced(tmp_path):
    class Replaces(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                (tmp_path / "ours" / f"step-{STEPS}").rename(tmp_path / "moved")
                (tmp_path / "ours" / f"step-{STEPS}").symlink_to(tmp_path / "moved", target_is_directory=True)

    callbacks = [sok.callbacks.DumpCheckpoint(tmp_path / "ours"), Replaces()]
    fit(compiled(OPTIMIZERS["momentum"]()), epochs=2, callbacks=callbacks)
    assert not sok.verify(tmp_path / "moved")
