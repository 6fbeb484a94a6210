"""A training step through the native entry points that the bridges call: lookup, push, commit, apply."""

import json
import os

import numpy as np

import work

os.environ.setdefault("KERAS_BACKEND", work.BACKENDS[0])

from sok_keras.backend import native

RULES = {
    "sgd": {"name": "sgd", "momentum": 0.0, "nesterov": False},
    "adam": {"name": "adam", "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False},
}
_DTYPES = {"int32": 0, "int64": 1, "float32": 4}


def _address(array):
    return array.ctypes.data, _DTYPES[array.dtype.name], list(array.shape)


class NativeStep:
    """Dynamic tables with a feature each, of `samples` bags, and all that a step needs."""

    def __init__(self, num_tables, dim, rule="adam", samples=work.BATCH):
        config = {
            "dim": dim,
            "vocabulary_size": None,
            "initializer": {"kind": "uniform", "minval": -0.05, "maxval": 0.05},
            "seed": 1,
            "missing": "initial",
            "out_of_vocabulary": "raise",
            "initial_capacity": 0,
            "max_capacity": None,
            "check_mode": "raise",
        }
        self.group = native.Group([json.dumps({"name": f"t{t}", **config}) for t in range(num_tables)])
        self.tables = [native.Table(self.group, number) for number in range(num_tables)]
        features = [(f"f{t}", t, False, "last", False, "sum", None) for t in range(num_tables)]
        self.plan = native.Plan(self.group, features)
        update = {"rule": RULES[rule], "weight_decay": None, "clipvalue": None, "clipnorm": None}
        self.optimizer = native.Optimizer([self.group], [json.dumps(update)], False, False)
        random = np.random.default_rng(0)
        # One array: NumPy asks for huge pages where it is large, as the C program does.
        rows = np.zeros((num_tables, samples, dim), "float32")
        gradients = random.normal(size=rows.shape).astype("float32") * 1e-3
        number, squares, update = np.zeros(2, "int32"), np.zeros((), "float32"), np.ones(1, "float32")
        ticket, trigger, new_trigger = (np.zeros((64, 2), "float32") for _ in range(3))
        self.scalars = np.array([1e-3, 0, 1, 1], "float32")
        # Only addresses are passed; these keep what is behind them.
        self._kept = [rows, gradients, number, squares, update, ticket, trigger, new_trigger]
        self._looked_up = [_address(number), *map(_address, rows)]
        self._pushed = [_address(number), *map(_address, gradients)], [_address(ticket)]
        self._committed = [_address(update), _address(ticket)], [_address(squares)]
        self._applied = [_address(self.scalars), _address(squares), _address(trigger)], [_address(new_trigger)]

    def fill(self, sizes):
        """Inserts so many rows, numbered over all tables, in a scattered order."""
        start = 0
        for table, count in zip(self.tables, sizes, strict=True):
            table.find_or_insert(work.scattered(start, count))
            start += count

    def take(self, batches):
        """The batches that steps take in turn: row numbers `(samples, bag)` for each feature."""
        self._ids = [[work.raw(feature) for feature in batch] for batch in batches]
        self._batches = [[_address(feature) for feature in batch] for batch in self._ids]

    def lookup(self, number, trains=True):
        native.lookup(self.plan.handle, trains, trains, self._batches[number % len(self._batches)], self._looked_up)

    def update(self, number, way="held"):
        """`"held"`: the gradients stay where they are until apply; `"merged"`: they are merged at push."""
        inputs, outputs = self._pushed
        native.push(self.plan.handle, inputs, object() if way == "held" else None, outputs)
        native.commit(self.optimizer.handle, *self._committed)
        self.scalars[1] = number + 1
        native.apply(self.optimizer.handle, *self._applied)

    def run(self, number, way="held"):
        """One step; `"fwd"` looks up alone, without insertion."""
        self.lookup(number, trains=way != "fwd")
        if way != "fwd":
            self.update(number, way)


def criteo_step(case, dim, rule="adam"):
    """The step that most benches take: `work.batches` over 26 tables that hold all their ids."""
    step = NativeStep(len(work.sizes()), dim, rule)
    step.fill(work.sizes())
    step.take(map(work.features_of, work.batches(case)))
    return step
