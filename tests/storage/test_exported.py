"""Exported graphs answer from their own tables, or raise: in this process, after their layer is gone, and beside other tables."""

import gc
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND

IDS = np.arange(3, dtype="int32").reshape(1, 3)
NOT_HERE = "not in this process.*load_model.*sok_keras.load"

on_torch = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's own")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="JAX' own")


def model_of(value):
    """Sums of three rows that all hold `value`."""
    ids = keras.Input((3,), dtype="int32", batch_size=1)
    model = keras.Model(ids, sok.DynamicEmbedding(4, combiner="sum")(ids))
    model.layers[1].get_table().assign(np.arange(100), np.full((100, 4), value, "float32"))
    model(IDS)
    return model


def exported(model, path):
    """Exports a model as this framework does; gives a function of ids."""
    if BACKEND == "tensorflow":
        model.export(path, format="tf_saved_model", verbose=False)
        return served(path)
    if BACKEND == "torch":
        model.export(f"{path}.pt2", format="torch", verbose=False)
        return served(path)
    import jax

    checks = [jax.export.DisabledSafetyCheck.custom_call("sok_lookup")]
    program = jax.export.export(jax.jit(lambda ids: model(ids)), disabled_checks=checks)(IDS)
    with open(path, "wb") as file:
        file.write(program.serialize())
    return served(path)


def served(path):
    """The program in a file, as a function of ids."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        loaded = tf.saved_model.load(path)
        return lambda ids: loaded.serve(ids)
    if BACKEND == "torch":
        import torch

        program = torch.export.load(f"{path}.pt2").module()
        return lambda ids: program(torch.as_tensor(ids)).detach()
    import jax

    with open(path, "rb") as file:
        return jax.export.deserialize(bytearray(file.read())).call


def paths():
    """Where a process of its own finds this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def in_another_process(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=paths()
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A model, its exported program, and where that lies."""
    path = str(tmp_path_factory.mktemp("exported") / "program")
    model = model_of(1.0)
    return model, exported(model, path), path


def test_graph_answers_from_its_own_tables_as_they_are(program):
    model, serve, path = program
    others = [model_of(2.0), keras.models.clone_model(model)]
    np.testing.assert_array_equal(serve(IDS), np.full((1, 4), 3.0))
    model.layers[1].get_table().assign([0], np.full((1, 4), 5.0))
    want = np.full((1, 4), 7.0)
    for again in (serve, served(path)):
        np.testing.assert_array_equal(again(IDS), want)
    model.layers[1].get_table().assign([0], np.ones((1, 4)))
    assert len(others) == 2


def test_graph_of_unknown_ids_inserts_nothing_and_keeps_nothing(program):
    model, serve, _ = program
    before = model.layers[1].get_table().stats()
    for _ in range(3):
        serve(IDS + 1000)
    after = model.layers[1].get_table().stats()
    assert after.size == before.size
    assert after.pending_pushes == before.pending_pushes


def test_graph_raises_when_its_layer_is_gone(tmp_path):
    model = model_of(1.0)
    serve = exported(model, str(tmp_path / "program"))
    others = [model_of(2.0) for _ in range(3)]
    del model
    keras.backend.clear_session()
    gc.collect()
    with pytest.raises(Exception, match=NOT_HERE):
        serve(IDS)
    assert len(others) == 3


def test_model_that_was_loaded_has_tables_of_its_own(program, tmp_path):
    model, serve, _ = program
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.layers[1].get_table().assign(np.arange(100), np.full((100, 4), 9.0))
    np.testing.assert_array_equal(serve(IDS), np.full((1, 4), 3.0))


BESIDE_OTHERS = """
from test_exported import *
others = [model_of(float(value)) for value in range(2, 5)]
others[0](IDS)
try:
    print("answered", np.asarray(served(sys.argv[1])(IDS)))
except Exception as error:
    print(type(error).__name__, error)
"""

WITHOUT_US = """
import sys
import numpy as np
ids = np.arange(3, dtype="int32").reshape(1, 3)
try:
    if "{backend}" == "tensorflow":
        import tensorflow as tf
        loaded = tf.saved_model.load(sys.argv[1])
        answer = loaded.serve(ids)
    elif "{backend}" == "torch":
        import torch
        answer = torch.export.load(sys.argv[1] + ".pt2").module()(torch.as_tensor(ids))
    else:
        import jax
        answer = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call(ids)
    print("answered", np.asarray(answer))
except Exception as error:
    print(error)
assert "sok_keras" not in sys.modules
"""


def test_graph_raises_in_another_process_beside_other_tables(program):
    done = in_another_process(BESIDE_OTHERS, program[2])
    assert "answered" not in done.stdout
    assert "exported from another process" in done.stdout, done.stderr
    assert "keras.models.load_model" in done.stdout


def test_graph_raises_where_the_package_is_not_imported(program):
    done = in_another_process(WITHOUT_US.replace("{backend}", BACKEND), program[2])
    assert "answered" not in done.stdout
    assert "lookup" in (done.stdout + done.stderr).lower()


def test_number_of_a_plan_is_no_other_processs():
    code = "import sok_keras as sok; print(sok.DynamicEmbedding(2)._core.plan((('f', 0, False, 'each', False, False, 'sum', None),)).handle)"
    core = sok.DynamicEmbedding(2)._core
    numbers = {int(in_another_process(code).stdout) for _ in range(1)}
    for name in "abc":
        numbers.add(core.plan(((name, 0, False, "each", False, False, "sum", None),)).handle)
    assert len(numbers) == 4
    assert all(0 < number < 2**63 for number in numbers)
    assert max(numbers) > 2**48


# ---- formats that cannot hold tables

FORMATS = {
    "onnx": "ONNX cannot hold",
    "openvino": "(OpenVINO|a SavedModel of JAX) cannot hold",
    "litert": "LiteRT cannot hold",
    "tf_saved_model": "a SavedModel of (JAX|PyTorch) cannot hold",
}
NEEDS = {("openvino", b): ["openvino"] for b in ("tensorflow", "jax", "torch")} | {
    ("onnx", "jax"): ["jax2onnx", "flax"],
    ("litert", "torch"): ["litert_torch"],
    ("tf_saved_model", "jax"): ["tensorflow"],
    ("tf_saved_model", "torch"): ["tensorflow"],
    ("onnx", "torch"): [],
}
SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "litert": ".tflite", "tf_saved_model": ""}


@pytest.mark.parametrize(
    "kind", [k for k in FORMATS if (k, BACKEND) not in {("litert", "jax"), ("tf_saved_model", "tensorflow")}]
)
def test_format_that_cannot_hold_tables_is_refused(kind, tmp_path):
    for module in NEEDS.get((kind, BACKEND), []):
        pytest.importorskip(module)
    model = model_of(1.0)
    path = str(tmp_path / f"model{SUFFIX[kind]}")
    with pytest.raises(Exception, match=f"{FORMATS[kind]} embedding tables.*load_model"):
        model.export(path, format=kind, verbose=False, input_signature=[keras.InputSpec("int32", (1, 3), name="ids")])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(IDS)), np.full((1, 4), 3.0))


@pytest.mark.parametrize("tracer", sorted(sok.export_guard._TRACERS))
def test_layer_knows_who_traces_it(tracer):
    """By the name of a module, which stands in a frame above the layer's."""
    names = {"__name__": f"{tracer}.inner", "check": sok.export_guard.check_format}
    exec("def trace(): return check('rows')", names)
    with pytest.raises(sok.SokError, match="cannot hold embedding tables.*layer 'rows'"):
        names["trace"]()
    assert sok.export_guard.check_format("rows")


def test_modules_that_trace_bear_the_names_we_know():
    """If this fails, Keras has moved them: see `export_guard.py`."""
    import importlib

    for name, function in {"onnx": "export_onnx", "openvino": "export_openvino", "litert": "export_litert"}.items():
        assert hasattr(importlib.import_module(f"keras.src.export.{name}"), function)


@on_tensorflow
def test_converter_of_tensorflow_lite_refuses():
    import tensorflow as tf

    model = model_of(1.0)
    graph = tf.function(lambda ids: model(ids)).get_concrete_function(tf.TensorSpec((1, 3), "int32"))
    with pytest.raises(Exception, match="SokLookup"):
        tf.lite.TFLiteConverter.from_concrete_functions([graph], model).convert()


@on_jax
def test_export_of_jax_refuses_by_default():
    import jax

    model = model_of(1.0)
    program = jax.export.export(jax.jit(lambda ids: model(ids)))
    with pytest.raises(ValueError, match="sok_lookup"):
        program(IDS)


@on_torch
@pytest.mark.filterwarnings("ignore")
def test_jit_trace_answers_from_its_own_tables(tmp_path):
    import torch

    model = model_of(1.0)
    traced = torch.jit.trace(model, (torch.as_tensor(IDS),))
    traced.save(tmp_path / "traced.pt")
    for function in (traced, torch.jit.load(tmp_path / "traced.pt")):
        np.testing.assert_array_equal(function(torch.as_tensor(IDS)).detach(), np.full((1, 4), 3.0))
        function(torch.as_tensor(IDS + 2000))
    assert len(model.layers[1].get_table()) == 100
    code = """
import test_exported, torch, sys
other = test_exported.model_of(2.0)
try:
    print("answered", torch.jit.load(sys.argv[1])(torch.as_tensor(test_exported.IDS)))
except Exception as error:
    print(error)
"""
    done = in_another_process(code, tmp_path / "traced.pt")
    assert "exported from another process" in done.stdout, done.stdout + done.stderr
