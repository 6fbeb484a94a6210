"""What tables cost in `model.fit`: the example's DeepFM with a tower of 10 x 1024, batches of 16,384, against the same model whose embedding
output is fed as an input.

    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python benches/gpu_fit.py FOLDER_OF_EXAMPLES [--turns 1]

Prints a row of a table, ms a step: medians over epochs.
"""

import argparse
import statistics
import sys
import time
from unittest import mock

import keras
import numpy as np

from turns import print_columns, turns

parser = argparse.ArgumentParser()
parser.add_argument("examples")
parser.add_argument("--turns", type=int, default=1)
arguments = parser.parse_args()
sys.path.insert(0, arguments.examples)

import criteo_deepfm as example

BATCH, BATCHES, EPOCHS, TOWER, ROWS = 16_384, 24, 6, [1024] * 10, 1_000_000
NUM_IDS = example.criteo.NUM_CATEGORICAL


class Clock(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.times.append(1e3 * (time.perf_counter() - self.start) / BATCHES)

    times = None


def fit(model, inputs, labels):
    clock = Clock()
    clock.times = []
    model.fit(inputs, labels, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[clock])
    return statistics.median(clock.times[2:])


def fed_model():
    """The example's model with rows where its ids come in."""
    real = keras.Input

    def fake(shape, dtype, name):
        return (
            real((NUM_IDS, example.ROW_DIM), dtype="float32", name=name)
            if name == "ids"
            else real(shape, dtype=dtype, name=name)
        )

    with mock.patch.object(keras, "Input", fake):
        return example.build_model(lambda rows: rows, TOWER, keras.optimizers.Adam(1e-3))


def main():
    if keras.backend.backend() == "torch":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True
    random = np.random.default_rng(0)
    num = BATCH * BATCHES
    dense = random.normal(size=(num, example.criteo.NUM_DENSE)).astype("float32")
    ids = ((ROWS**-0.05 - 1) * random.random((num, NUM_IDS)) + 1) ** (1 / -0.05)
    ids = ids.astype("int64")
    labels = random.integers(0, 2, (num, 1)).astype("float32")
    rows = random.normal(size=(num, NUM_IDS, example.ROW_DIM)).astype("float32")
    fed_rows = fed_model()
    model = example.build_model(example.sok_embeddings, TOWER, example.sok_wrap(keras.optimizers.Adam(1e-3)))
    for _ in turns(arguments.turns):
        fed = fit(fed_rows, [dense, rows], labels)
        with_tables = fit(model, [dense, ids], labels)
        print_columns(["framework", "with tables, ms", "fed, ms", "above, ms"])
        print(f"| {keras.backend.backend()} | {with_tables:.2f} | {fed:.2f} | {with_tables - fed:.2f} |")


main()
