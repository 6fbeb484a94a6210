"""What the README and the docstrings show runs as it stands there."""

import doctest
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import sok_keras as sok

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_of_the_readme_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a dump
    exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), {})


def test_readme_shows_python():
    assert BLOCKS


def test_files_and_targets_of_the_readme_are_there():
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)\b", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def examples():
    """The doctests of all public names, methods included."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    public = {name: getattr(sok, name) for name in sok.__all__}
    for module in (sok.callbacks, sok.exporters, sok.importers, sok.optimizers, sok.planner, sok.policies):
        public |= {
            name: value
            for name, value in vars(module).items()
            if getattr(value, "__module__", "").startswith(module.__name__)
        }
    return [test for name, value in public.items() for test in finder.find(value, name) if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example_of_a_docstring_runs(example, tmp_path):
    if (
        "import tensorflow" in "".join(line.source for line in example.examples)
        and keras.backend.backend() != "tensorflow"
    ):
        pytest.skip("the example is one of TensorFlow")
    # What an example takes for granted.
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(sok.DynamicEmbedding(4, combiner="sum")(inputs)))
    x, y = np.ones((4, 3), "int32"), np.ones((4, 1))
    example.globs = {"keras": keras, "np": np, "sok": sok, "model": model, "x": x, "y": y, "tmp_path": tmp_path}
    told = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert not told, "".join(told)


def test_docstrings_of_the_layers_and_the_optimizer_show_examples():
    shown = {example.name for example in examples()}
    assert {"DynamicEmbedding", "DistributedEmbedding", "OptimizerWrapper"} <= shown
