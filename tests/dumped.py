"""Models and layers that the tests of dumps write, change and compare."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from keras import optimizers

import sok_keras as sok
from reference import BACKEND, DIM, FAST, fit, our_embedding, small_model, table_of, to_numpy

MIB = 2**20
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.02),
    "amsgrad": lambda: optimizers.Adam(0.02, amsgrad=True),
    "momentum": lambda: optimizers.SGD(0.2, momentum=0.9),
}


def compiled(optimizer, embedding=None, arguments=FAST):
    model = small_model(embedding or sok.DynamicEmbedding(DIM, seed=1))
    model.compile(sok.OptimizerWrapper(optimizer), "mse", **arguments)
    return model


def contents_of(table):
    contents = table.export(states=True)
    return {"keys": contents.keys, "rows": contents.rows, **contents.states}


def all_of(model):
    """Everything that training goes on from."""
    dense = [v for v in model.variables + model.optimizer.variables if not v.path.endswith("trigger")]
    return [*contents_of(table_of(model)).values(), *map(to_numpy, dense)]


def assert_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def assert_tables_equal(table, other):
    assert_equal(contents_of(table).values(), contents_of(other).values())


def filled(layer=None, num_keys=20, seed=0):
    """A dynamic layer with keys of all sizes."""
    layer = layer or sok.DynamicEmbedding(DIM, seed=1, name="filled")
    random = np.random.default_rng(seed)
    keys = random.integers(-(2**63), 2**63, num_keys)
    layer.get_table().assign(keys, random.normal(size=(num_keys, DIM)))
    return layer


def two_tables(name=None):
    configs = [sok.TableConfig("dynamic", None, DIM, seed=1), sok.TableConfig("static", 9, 3, seed=1)]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs], name=name)
    for table in layer.get_tables().values():
        table.find_or_insert(np.arange(9))
    return layer


def xxh3(text):
    """The checksum, by a dump of the text: its only block has it."""
    data = np.frombuffer(text.encode(), "uint8")
    with tempfile.TemporaryDirectory() as path:
        manifest = json.loads(
            sok.backend.native.dump((path, [], [("text", "U8", [len(data)], data)], (True, 0, True, None)))
        )
    return manifest["arrays"]["tensors"][0]["blocks"]


def rewrite_manifest(dump, change):
    """Well written, so that its checksum is right. `change(body)` is in place."""
    manifest = dump / "manifest.json"
    body = json.loads(manifest.read_text())["body"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    manifest.write_text(f'{{"body": {text}, "xxh3": "{xxh3(text)}"}}\n')


def run(code, backend=BACKEND):
    environment = {**os.environ, "KERAS_BACKEND": backend}
    code = f"import sys\nsys.path[:0] = {sys.path!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


SAVE = {
    "dump": lambda model, path: sok.dump(path / "dump", model),
    "weights": lambda model, path: model.save_weights(path / "model.weights.h5"),
    "keras": lambda model, path: model.save(path / "model.keras"),
}
LOAD = {
    "dump": lambda model, path: sok.load(path / "dump", model),
    "weights": lambda model, path: model.load_weights(path / "model.weights.h5"),
}


@functools.cache
def interrupted(name, in_graph=False):
    """`(path, all_of)`: what training wrote halfway, and what it came to in the end."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="sok_"))
    model = fit(compiled(OPTIMIZERS[name](), our_embedding(), {} if in_graph else FAST))
    for save in SAVE.values():
        save(model, path)
    return path, all_of(fit(model))
