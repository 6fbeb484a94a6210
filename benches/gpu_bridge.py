"""What a framework adds to a step on the GPU: lookup, push, commit and apply of 26 tables x 65,536 ids of dim 64, Adam, dense layers left
out, under JAX's jit, PyTorch eager or a tf.function.

    KERAS_BACKEND=torch python benches/gpu_bridge.py [ms of the native step, held, merged] [--turns 1]

Prints rows of a table, a way of making steps each, over batches of ids drawn afresh, one in a hundred new; medians. Tables have room for
all of them: none grows. With --dtype bfloat16 the framework gets rows and gives gradients of 16 bits; with --cast it converts those of float32.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import statistics
import time

import keras
import numpy as np

import sok_keras as sok
from sok_keras.backend.insertion import Insertion
from turns import is_live, print_columns, turns

parser = argparse.ArgumentParser()
parser.add_argument("native", nargs="*", type=float)
parser.add_argument("--turns", type=int, default=1)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--cast", action="store_true")
arguments = parser.parse_args()

TABLES, SAMPLES, DIM, ROWS = 26, 65_536, 64, 1_000_000
# Steps: before a measurement, alone, in a row; and how often so many in a row.
WARM, ALONE, IN_A_ROW, TIMES = 5, 20, 100, 1 if is_live() else 3
BACKEND = keras.backend.backend()


def draw(step):
    """Zipf 1.05 over the rows of each table; one in a hundred is new."""
    random = np.random.default_rng(step)
    u = random.random((TABLES, SAMPLES))
    rows = ((ROWS**-0.05 - 1) * u + 1) ** (1 / -0.05)
    ids = np.clip(rows.astype("int64"), 1, ROWS) - 1
    ids[:, 7::100] = ROWS + step * SAMPLES + np.arange(7, SAMPLES, 100)
    return ids.astype("int32")


def make(num_steps):
    capacity = ROWS + num_steps * -(-SAMPLES // 100)
    tables = [sok.TableConfig(f"t{t}", None, DIM, combiner="sum", initial_capacity=capacity) for t in range(TABLES)]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(t.name, t) for t in tables])
    layer.build()
    for table in layer.get_tables().values():
        for start in range(0, ROWS, 250_000):
            table.find_or_insert(np.arange(start, start + 250_000))
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.01))
    optimizer.build(layer.trainable_variables)
    features = tuple((f"t{t}", t, False, "each", False, False, "sum", None) for t in range(TABLES))
    return layer, layer._core.plan(features, "float32" if arguments.cast else arguments.dtype), optimizer._tables


def torch_step(plan, tables, gradients):
    import torch

    dtype = getattr(torch, arguments.dtype)

    one, scalars = torch.ones(1, device="cuda"), torch.tensor([0.01, 1.0, 1.0, 1.0], device="cuda")
    of_loss = torch.ones((), device="cuda")
    given = [torch.as_tensor(g, device="cuda").to(dtype) for g in gradients]

    class Loss(torch.autograd.Function):
        """Where the gradients come from; `autograd.grad` given 26 of them takes as long as all the rest of the host's step."""

        @staticmethod
        def forward(ctx, *rows):
            return rows[0].new_empty(())

        @staticmethod
        def backward(ctx, _):
            return tuple(given)

    def step(ids, trigger):
        rows = sok.backend.lookup(plan, trigger, True, [(i,) for i in ids], [None] * TABLES, Insertion.AT_LOOKUP)
        (ticket,) = torch.autograd.grad(Loss.apply(*(row.to(dtype) for row in rows)), [trigger], of_loss)
        norm = sok.backend.commit(tables, one, [ticket])
        return sok.backend.apply(tables, scalars, norm, [trigger.detach()])[0].requires_grad_()

    trigger = torch.zeros(64, 2, device="cuda", requires_grad=True)
    return step, trigger, lambda ids: [torch.as_tensor(i, device="cuda") for i in ids]


def jax_step(plan, tables, gradients):
    import jax
    import jax.numpy as jnp

    # The loss is half the sum of the squared rows, so the gradients are the rows. Passing separate arrays to the compiled function would
    # add host time.
    del gradients
    scalars = jnp.asarray([0.01, 1.0, 1.0, 1.0], "float32")

    @jax.jit
    def step(ids, trigger):
        def lookup(trigger):
            rows = sok.backend.lookup(plan, trigger, True, [(i,) for i in ids], [None] * TABLES, Insertion.AT_LOOKUP)
            return [row.astype(arguments.dtype) for row in rows]

        rows, backward = jax.vjp(lookup, trigger)
        (ticket,) = backward(rows)
        norm = sok.backend.commit(tables, jnp.ones(1), [ticket])
        return sok.backend.apply(tables, scalars, norm, [trigger])[0]

    return step, jnp.zeros((64, 2)), lambda ids: [jnp.asarray(i) for i in ids]


def tensorflow_step(plan, tables, gradients):
    import tensorflow as tf

    # A tensor that a tf.function takes costs 15 to 30 µs of the host, whatever becomes of it: so all ids are one, and the gradients are
    # the rows themselves, as for JAX. `tf.unstack` of int64 runs on the CPU and copies; slices do not.
    scalars = tf.constant([0.01, 1.0, 1.0, 1.0])

    @tf.function
    def step(ids, trigger):
        with tf.GradientTape() as tape:
            tape.watch(trigger)
            rows = sok.backend.lookup(
                plan, trigger, True, [(ids[t],) for t in range(TABLES)], [None] * TABLES, Insertion.AT_LOOKUP
            )
            rows = [tf.cast(row, arguments.dtype) for row in rows]
        ticket = tape.gradient(rows, trigger, output_gradients=rows)
        norm = sok.backend.commit(tables, tf.ones(1), [ticket])
        return sok.backend.apply(tables, scalars, norm, [trigger])[0]

    # TensorFlow keeps int32 in host memory.
    return step, tf.zeros((64, 2)), lambda ids: tf.constant(ids.astype("int64"))


def ways():
    """How a backend's steps are made, by name."""
    if BACKEND != "torch":
        return {BACKEND: contextlib.nullcontext}
    import torch

    # PyTorch hands a backward on a GPU to a thread of its own and waits for it: twice a step a thread is woken. A model pays that once,
    # whatever its layers are.
    return {
        "torch": contextlib.nullcontext,
        "torch, backward in the caller's thread": lambda: torch.autograd.set_multithreading_enabled(False),
    }


def main():
    layer, plan, tables = make(arguments.turns * len(ways()) * (WARM + 2 * ALONE + TIMES * IN_A_ROW))
    random = np.random.default_rng(0)
    gradients = [random.normal(size=(SAMPLES, DIM)).astype("float32") for _ in range(TABLES)]
    step, trigger, on_device = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}[BACKEND](
        plan, tables, gradients
    )
    numbers = itertools.count()
    native = dict(zip(("held", "merged"), arguments.native, strict=False))
    how = "merged" if BACKEND == "jax" else "held"

    def batches(count):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            return [on_device(ids) for ids in pool.map(draw, itertools.islice(numbers, count))]

    def read(value):
        return float(np.asarray(keras.ops.convert_to_numpy(value))[0, 0])

    def alone():
        nonlocal trigger
        times = []
        for ids in batches(WARM + ALONE):
            read(trigger)
            layer.get_tables()["t0"].synchronize()
            # Else the step takes 0.3 ms less or more, as the processor has rested or not.
            time.sleep(0.002)
            start = time.perf_counter()
            trigger = step(ids, trigger)
            read(trigger)
            times.append(1e3 * (time.perf_counter() - start))
        return times[WARM:]

    def in_a_row(steps):
        """As training does: what the host does is hidden behind the device."""
        nonlocal trigger
        all_ids = batches(steps)
        read(trigger)
        start = time.perf_counter()
        for ids in all_ids:
            trigger = step(ids, trigger)
        read(trigger)
        return 1e3 * (time.perf_counter() - start) / steps

    def measure(name, way):
        with way():
            times = alone()
            in_a_row(ALONE)  # frameworks get more memory for steps that overlap
            in_rows = [in_a_row(IN_A_ROW) for _ in range(TIMES)]
        row = statistics.median(in_rows)
        above = f"{1e3 * (row - native[how]):.0f}" if how in native else ""
        dtype = f"{arguments.dtype}, cast" if arguments.cast else arguments.dtype
        name = name if dtype == "float32" else f"{name}, {dtype}"
        print(f"| {name} | {how} | {row:.3f} | {statistics.median(times):.3f} | {above} |")
        if path := os.environ.get("SOK_SAMPLES"):
            with open(path, "a") as file:
                print(f"{name} step in a row [ms]: {in_rows}", file=file)
                print(f"{name} step alone [ms]: {times}", file=file)

    for _ in turns(arguments.turns):
        print_columns(["framework", "gradients", "in a row, ms", "alone, ms", "µs above native"])
        for name, way in ways().items():
            measure(name, way)


main()
