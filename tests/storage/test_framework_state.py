"""What each framework saves by itself: rows come along, into another process's model too, or it raises."""

import copy
import io
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, FAST

IDS = np.arange(12, dtype="int32").reshape(4, 3)

on_torch = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's own")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__()
        self.rows, self.dense = sok.DynamicEmbedding(4, combiner="sum", name="rows", **kwargs), keras.layers.Dense(1)

    def call(self, ids):
        return self.dense(self.rows(ids))


def functional(**kwargs):
    ids = keras.Input((3,), dtype="int32")
    rows = sok.DynamicEmbedding(4, combiner="sum", name="rows", **kwargs)(ids)
    return keras.Model(ids, keras.layers.Dense(1, name="dense")(rows))


def sequential(**kwargs):
    rows = sok.DynamicEmbedding(4, combiner="sum", name="rows", **kwargs)
    return keras.Sequential([keras.Input((3,), dtype="int32"), rows, keras.layers.Dense(1, name="dense")], name="model")


def nested(**kwargs):
    ids = keras.Input((3,), dtype="int32")
    return keras.Model(ids, keras.layers.Dense(1, name="top")(functional(**kwargs)(ids)))


KINDS = {"functional": functional, "sequential": sequential, "subclassed": Subclassed, "nested": nested}


def trained(make=functional, steps=1, **kwargs):
    model = make(**kwargs)
    model.compile(sok.OptimizerWrapper("adam"), "mse", **FAST)
    model.fit(IDS, np.ones((4, 1)), epochs=steps, verbose=0)
    return model


def rows_layer(model):
    return next(layer for layer in model._flatten_layers() if isinstance(layer, sok.DynamicEmbedding))


def contents(model):
    return rows_layer(model).get_table().export(states=True)


def assert_same_rows(one, other):
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(one.rows, other.rows)
    assert one.states.keys() == other.states.keys()
    for name in one.states:
        np.testing.assert_array_equal(one.states[name], other.states[name])


def paths():
    """Where a process of its own finds this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def in_another_process(code, *arguments):
    """Runs code after this file's own definitions; gives what it prints."""
    code = f"from test_framework_state import *\nkeras.utils.set_random_seed(1)\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=paths()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- PyTorch


def through_a_file(state):
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@on_torch
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=["strict", "not", "assign"])
def test_state_dict_brings_rows_and_states(kind, options):
    keras.backend.clear_session()  # names count anew
    model = trained(KINDS[kind])
    state = through_a_file(model.state_dict())
    keras.backend.clear_session()
    other = trained(KINDS[kind], 2)
    before = contents(model)
    other.load_state_dict(state, **options)
    assert_same_rows(contents(other), before)
    if "assign" not in options:  # which Keras does not hear of
        np.testing.assert_array_equal(other.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    other.fit(IDS, np.ones((4, 1)), verbose=0)
    model.fit(IDS, np.ones((4, 1)), verbose=0)
    if "assign" not in options:
        np.testing.assert_array_equal(contents(other).keys, contents(model).keys)


@on_torch
def test_state_dict_of_an_earlier_step_brings_its_rows():
    model = trained()
    state, before = copy.deepcopy(model.state_dict()), contents(model)
    model.fit(IDS, np.ones((4, 1)), verbose=0)
    model.load_state_dict(state)
    assert_same_rows(contents(model), before)


@on_torch
def test_state_dict_goes_to_another_process(tmp_path):
    import torch

    model = trained()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    code = """
import torch
model = trained(steps=3)
model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
print(model.predict(IDS, verbose=0).tobytes().hex())
"""
    answers = in_another_process(code, tmp_path / "state.pt")
    assert answers.strip().endswith(model.predict(IDS, verbose=0).tobytes().hex())


@on_torch
def test_torch_save_of_a_model_brings_rows(tmp_path):
    import torch

    model = trained()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same_rows(contents(loaded), contents(model))
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))


@on_torch
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", ["save_rows", "keep_vars", "removed"])
def test_state_dict_without_rows_raises_and_changes_no_table(how, strict):
    model = trained(save_rows=how != "save_rows")
    state = model.state_dict(keep_vars=how == "keep_vars")
    if how == "removed":
        state = {name: value for name, value in state.items() if ".rows." not in name}
    assert not [name for name in state if ".rows." in name]
    keras.backend.clear_session()
    other = trained(functional)
    before = contents(other)
    with pytest.raises(RuntimeError, match="has no rows for layer 'rows'"):
        other.load_state_dict(state, strict=strict)
    assert_same_rows(contents(other), before)
    other.predict(IDS, verbose=0)


@on_torch
def test_layer_that_saves_no_rows_says_so_when_it_loads():
    model = trained(save_rows=False)
    before = contents(model)
    state = model.state_dict()
    with pytest.warns(UserWarning, match="has no rows for layer 'rows'.*stay as they are"):
        model.load_state_dict(state)
    assert_same_rows(contents(model), before)
    model.fit(IDS, np.ones((4, 1)), verbose=0)


@on_torch
@pytest.mark.parametrize("damage", ["wider", "missing", "text"])
def test_state_dict_with_damaged_rows_changes_no_table(damage):
    import torch

    model = trained()
    state = model.state_dict()
    (values,) = [name for name in state if ".rows.0.values" in name]
    if damage == "wider":
        state[values] = torch.cat([state[values]] * 2, 1)
    elif damage == "missing":
        del state[values]
    else:
        state[values] = torch.zeros(3, dtype=torch.uint8)
    before = contents(model)
    with pytest.raises(RuntimeError, match="rows/trigger"):
        model.load_state_dict(state)
    assert_same_rows(contents(model), before)


@on_torch
def test_state_dict_holds_rows_once_where_a_model_holds_variables_twice():
    state = trained(sequential).state_dict()
    keys = [value for name, value in state.items() if name.endswith(".rows.0.keys.000000")]
    assert len(keys) == 2
    assert keys[0].data_ptr() == keys[1].data_ptr()


@on_torch
def test_trigger_in_a_module_of_the_users_brings_rows():
    import torch

    class Module(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.register_parameter("mine", layer.trigger.value)

    model, other = trained(), trained(steps=2)
    Module(rows_layer(other)).load_state_dict(Module(rows_layer(model)).state_dict())
    assert_same_rows(contents(other), contents(model))


# ---- TensorFlow


@on_tensorflow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_brings_rows_and_states(kind, tmp_path):
    import tensorflow as tf

    model = trained(KINDS[kind])
    path = tf.train.Checkpoint(model=model).save(tmp_path / "c")
    other = trained(KINDS[kind], 2)
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    assert_same_rows(contents(other), contents(model))
    np.testing.assert_array_equal(other.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    other.fit(IDS, np.ones((4, 1)), verbose=0)
    model.fit(IDS, np.ones((4, 1)), verbose=0)
    assert_same_rows(contents(other), contents(model))


@on_tensorflow
def test_checkpoint_manager_goes_back_to_each_of_its_checkpoints(tmp_path):
    import tensorflow as tf

    model, were = trained(), {}
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), tmp_path, max_to_keep=3)
    for _ in range(3):
        model.fit(IDS + 7 * len(were), np.ones((4, 1)), verbose=0)
        were[manager.save()] = contents(model)
    for path, before in were.items():
        manager.checkpoint.restore(path)
        assert_same_rows(contents(model), before)
    model.predict(IDS, verbose=0)


@on_tensorflow
def test_asynchronous_checkpoint_holds_the_rows_of_when_it_was_asked_for(tmp_path):
    """Once: a Keras variable (3.15) makes a `tf.Variable` anew in each, and TensorFlow refuses the second."""
    import tensorflow as tf

    model = trained()
    checkpoint, before = tf.train.Checkpoint(model=model), contents(model)
    checkpoint.write(tmp_path / "c", options=tf.train.CheckpointOptions(enable_async=True))
    model.fit(IDS + 5, np.ones((4, 1)), verbose=0)
    checkpoint.sync()
    tf.train.Checkpoint(model=model).read(tmp_path / "c")
    assert_same_rows(contents(model), before)


@on_tensorflow
@pytest.mark.parametrize("built", [True, False])
def test_checkpoint_goes_to_another_process(tmp_path, built):
    import tensorflow as tf

    model = trained(Subclassed)
    path = tf.train.Checkpoint(model=model).save(tmp_path / "c")
    code = f"""
import tensorflow as tf
model = trained(Subclassed, 3) if {built} else Subclassed()
tf.train.Checkpoint(model=model).restore(sys.argv[1])
print(model.predict(IDS, verbose=0).tobytes().hex())
"""
    answers = in_another_process(code, path)
    assert answers.strip().endswith(model.predict(IDS, verbose=0).tobytes().hex())


@on_tensorflow
def test_checkpoint_of_the_variables_alone_raises_when_it_comes_to_other_tables(tmp_path):
    import tensorflow as tf

    model = trained()
    path = tf.train.Checkpoint(variables=model.trainable_variables).save(tmp_path / "c")
    other = trained(steps=2)
    tf.train.Checkpoint(variables=other.trainable_variables).restore(path)
    with pytest.raises(sok.SokError, match="weights of other tables were set"):
        other.predict(IDS, verbose=0)
    tf.train.Checkpoint(variables=model.trainable_variables).restore(path)
    model.predict(IDS, verbose=0)


@on_tensorflow
def test_checkpoint_without_rows_raises_and_changes_no_table(tmp_path):
    import tensorflow as tf

    path = tf.train.Checkpoint(model=trained(save_rows=False)).save(tmp_path / "c")
    other = trained()
    before = contents(other)
    with pytest.raises(ValueError, match="checkpoint has no rows for layer 'rows'"):
        tf.train.Checkpoint(model=other).restore(path)
    assert_same_rows(contents(other), before)


@on_tensorflow
def test_checkpoint_of_a_layer_that_saves_no_rows_says_so(tmp_path):
    import tensorflow as tf

    model = trained(save_rows=False)
    checkpoint = tf.train.Checkpoint(model=model)
    path, before = checkpoint.save(tmp_path / "c"), contents(model)
    with pytest.warns(UserWarning, match="stay as they are"):
        checkpoint.restore(path)
    assert_same_rows(contents(model), before)


@on_tensorflow
def test_checkpoint_in_a_graph_holds_the_rows_of_when_it_runs(tmp_path):
    import tensorflow as tf

    model = trained()
    checkpoint = tf.train.Checkpoint(model=model)
    write = tf.function(lambda: checkpoint.write(str(tmp_path / "c")))
    write()
    model.fit(IDS + 5, np.ones((4, 1)), verbose=0)
    write()
    before = contents(model)
    model.fit(IDS + 7, np.ones((4, 1)), verbose=0)
    checkpoint.read(str(tmp_path / "c"))
    assert_same_rows(contents(model), before)


# ---- JAX has no way of its own: variables are arrays in the user's hands


def test_variables_of_another_model_raise():
    model, other = trained(), trained(steps=2)
    for mine, theirs in zip(other.trainable_variables, model.trainable_variables, strict=True):
        mine.assign(theirs.value)
    with pytest.raises(sok.SokError, match="weights of other tables were set"):
        other.predict(IDS, verbose=0)
