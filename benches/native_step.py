"""A training step through the native entry points that the bridges call: lookup, push, commit, apply. They are those of PyTorch's
bridge, on tensors that share NumPy's memory, whatever Keras' backend is.
"""

import json
import os

import numpy as np
import torch

import work

os.environ.setdefault("KERAS_BACKEND", work.BACKENDS[0])

from sok_keras.backend import native
from sok_keras.backend.insertion import Insertion

RULES = {
    "sgd": {"name": "sgd", "momentum": 0.0, "nesterov": False},
    "adam": {"name": "adam", "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False},
}


class NativeStep:
    """Dynamic tables with a feature each, of `samples` bags, and all that a step needs. `limits`: by table, what else its configuration
    says. `scores`: whether ids come with scores. `mode`: which rows a step updates."""

    def __init__(self, num_tables, dim, rule="adam", samples=work.BATCH, limits=None, scores=False, mode="local"):
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
            "trainable": True,
        }
        limits = limits or [{}] * num_tables
        self.group = native.Group([json.dumps({"name": f"t{t}", **config, **limit}) for t, limit in enumerate(limits)])
        self.tables = [native.Table(self.group, number) for number in range(num_tables)]
        self._scores = torch.arange(samples).reshape(-1, 1) if scores else None
        features = [(f"f{t}", t, False, "last", False, scores, "sum", None) for t in range(num_tables)]
        self.plan = native.Plan(self.group, features)
        update = {"rule": RULES[rule], "weight_decay": None, "clipvalue": None, "clipnorm": None}
        self.optimizer = native.Optimizer([self.group], [json.dumps(update)], False, False, mode=mode)
        random = np.random.default_rng(0)
        # One array: NumPy asks for huge pages where it is large, as the C program does.
        rows = np.zeros((num_tables, samples, dim), "float32")
        gradients = random.normal(size=rows.shape).astype("float32") * 1e-3
        number, squares, update = np.zeros(2, "int32"), np.zeros((), "float32"), np.ones(1, "float32")
        ticket, trigger, new_trigger = (np.zeros((64, 2), "float32") for _ in range(3))
        self.scalars = np.array([1e-3, 0, 1, 1], "float32")
        self._number, *self._rows = map(torch.from_numpy, (number, *rows))
        self._gradients, self._ticket = [*map(torch.from_numpy, gradients)], torch.from_numpy(ticket)
        scalars, squares, update, trigger, self._new_trigger = map(
            torch.from_numpy, (self.scalars, squares, update, trigger, new_trigger)
        )
        self._committed = [update, self._ticket], [squares]
        self._applied = [scalars, squares, trigger]

    def fill(self, sizes):
        """Inserts so many rows, numbered over all tables, in a scattered order."""
        start = 0
        for table, count in zip(self.tables, sizes, strict=True):
            table.find_or_insert(work.scattered(start, count))
            start += count

    def take(self, batches):
        """The batches that steps take in turn: row numbers `(samples, bag)` for each feature."""
        scores = [] if self._scores is None else [self._scores]
        self._batches = [
            [t for feature in batch for t in (torch.from_numpy(work.raw(feature)), *scores)] for batch in batches
        ]

    def lookup(self, number, trains=True):
        ids = self._batches[number % len(self._batches)]
        insertion = Insertion.AT_LOOKUP if trains else Insertion.NEVER
        native.lookup(self.plan.handle, insertion, trains, ids, self._number, self._rows, None)

    def update(self, number, way="held"):
        """`"held"`: the gradients stay where they are until apply; `"merged"`: they are merged at push."""
        keep = object() if way == "held" else None
        native.push(self.plan.handle, self._number, self._gradients, keep, [self._ticket], None)
        native.commit(self.optimizer.handle, *self._committed, None)
        self.scalars[1] = number + 1
        native.apply(self.optimizer.handle, self._applied, [self._new_trigger], None)

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
