"""What one row costs: `model(x)` and `predict` of one row of 26 features, tables against `keras.layers.Embedding`; and how long the first
step of 400 tables of 32 different dims waits for its kernels.

    KERAS_BACKEND=torch python benches/gpu_latency.py

Prints two tables: ms of a call, medians of calls in turn; seconds of the first and the second step, with no kernel kept on disk and with all.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np

import sok_keras as sok

FEATURES, DIM, SIZE, CALLS = 26, 16, 1000, 200
TABLES, DIMS = 400, [4 * (1 + number) for number in range(32)]
BACKEND = keras.backend.backend()


def model_of(embed):
    inputs = [keras.Input((1,), dtype="int32", name=f"f{number}") for number in range(FEATURES)]
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()(embed(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    return model


def sok_rows(inputs):
    tables = [sok.TableConfig(f"t{number}", None, DIM, combiner="sum") for number in range(FEATURES)]
    return sok.DistributedEmbedding([sok.FeatureConfig(table.name, table) for table in tables])(inputs)


def one_by_one(inputs):
    return [sok.DynamicEmbedding(DIM, combiner="sum", name=f"table{i}")(x) for i, x in enumerate(inputs)]


def keras_rows(inputs):
    return [keras.layers.Flatten()(keras.layers.Embedding(SIZE, DIM)(x)) for x in inputs]


def latency():
    models = {
        "keras.layers.Embedding": model_of(keras_rows),
        "DistributedEmbedding": model_of(sok_rows),
        "26 x DynamicEmbedding": model_of(one_by_one),
    }
    row = [np.full((1, 1), number, "int32") for number in range(FEATURES)]
    times = {}
    for _ in range(CALLS):
        for name, model in models.items():
            for how, call in (("model(x)", model), ("predict", lambda x, m=model: m.predict(x, verbose=0))):
                start = time.perf_counter()
                keras.ops.convert_to_numpy(call(row))
                times.setdefault((name, how), []).append(1e3 * (time.perf_counter() - start))
    print(f"\n| {BACKEND}: one row | model(x), ms | predict, ms |\n|---|---|---|")
    for name in models:
        cells = [f"{statistics.median(times[name, how][CALLS // 2 :]):.2f}" for how in ("model(x)", "predict")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def first_steps():
    """Prints seconds of the first and the second step of many tables."""
    tables = [sok.TableConfig(f"t{i}", None, DIMS[i % len(DIMS)], combiner="sum") for i in range(TABLES)]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(table.name, table) for table in tables])
    inputs = [keras.Input((1,), dtype="int32") for _ in range(TABLES)]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(layer(inputs))))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(1e-3)), "mse", run_eagerly=BACKEND == "torch")
    ids = [np.arange(8, dtype="int32")[:, None] for _ in range(TABLES)]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        model.train_on_batch(ids, np.zeros((8, 1)))
        seconds.append(f"{time.perf_counter() - start:.2f}")
    print(" | ".join(seconds), flush=True)


def first_steps_in_processes():
    print(f"\n| {BACKEND}: {TABLES} tables of {len(DIMS)} dims | first step, s | second step, s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("no kernel on disk", "all kernels on disk"):
            command = [sys.executable, __file__, "first_steps"]
            output = subprocess.run(
                command, env=os.environ | {"SOK_CACHE": folder}, check=True, capture_output=True, text=True
            )
            print(f"| {name} | {output.stdout.strip()} |", flush=True)
            print(output.stderr[-1500:], file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:] == ["first_steps"]:
        first_steps()
    else:
        latency()
        first_steps_in_processes()
