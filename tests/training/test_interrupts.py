"""Ctrl-C in the middle of a long `fit`, and the end of the interpreter while a step is under way."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from reference import BACKEND, ON_GPU

HERE = pathlib.Path(__file__).parent


def started(*command):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def hears(process, word):
    """Waits for a line that begins so."""
    for line in process.stdout:
        if line.startswith(word):
            return line.split()[1:]
    raise AssertionError(process.stderr.read())


@contextlib.contextmanager
def ctrl_c(process):
    """Presses Ctrl-C, and again every three seconds until the block ends. Gives a list of the moments.

    Frameworks lose some: Python drops exceptions in `__del__` and in callbacks of its garbage collector. Of a hundred presses
    TensorFlow loses three or four in the `__del__` of its functions, with Keras' own `Embedding` too. Keras imports JAX where it is
    installed, whose callback of the collector loses one in a hundred, under PyTorch too.
    """
    moments, is_over = [], threading.Event()

    def press():
        moments.append(time.monotonic())
        process.send_signal(signal.SIGINT)
        if not is_over.wait(3.0):
            press()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield moments
    finally:
        is_over.set()
        thread.join()


# Of some hundred presses one crashes TensorFlow, with Keras' own `Embedding` too.
MANY = 50 if BACKEND == "tensorflow" else 300


# Only a machine that does nothing else can be held to seconds.
@pytest.mark.parametrize(("rounds", "seconds"), [(5, None), pytest.param(MANY, 2.0, marks=pytest.mark.soak)])
def test_ctrl_c_stops_fit_and_fit_goes_on(rounds, seconds, tmp_path):
    """At random moments: while a step is compiled, called, computed, or its result is stored."""
    process = started(HERE / "interrupted.py", rounds, tmp_path / "dump")
    moments, steps, presses = random.Random(rounds), [0], 0
    try:
        for number in range(rounds):
            hears(process, "fit")
            # The first moments are those in which everything is compiled.
            time.sleep(moments.uniform(0.0, 0.3) if number else 8.0)
            with ctrl_c(process) as pressed:
                hears(process, "stopped")
            assert seconds is None or time.monotonic() - pressed[-1] < seconds
            presses += len(pressed)
            steps.append(int(hears(process, "whole")[0]))
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert steps == sorted(steps)
    assert steps[-1] > steps[1], "it went on"
    assert seconds is None or presses <= 1.1 * rounds, "few presses are lost"


LEAVING = f"""
import sys, threading, time
sys.path.insert(0, {str(HERE)!r})
import keras
from interrupted import BATCH, built, data

keras.utils.set_random_seed(1)
model, (ids, targets) = built(), data(20)
model.fit(ids[:BATCH], targets[:BATCH], batch_size=BATCH, verbose=0)

def train(callbacks=()):
    model.fit(ids, targets, batch_size=BATCH, epochs=10**6, verbose=0, callbacks=list(callbacks))

def by_hand():
    while True:
        model.train_on_batch(ids[:BATCH], targets[:BATCH])

def raises(error):
    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                raise error
    return Raises()

def in_a_thread(work, seconds):
    threading.Thread(target=work, daemon=True).start()
    time.sleep(seconds)

"""
soak = pytest.mark.soak
LEAVES = [
    pytest.param("model.train_on_batch(ids[:BATCH], targets[:BATCH])", 0, id="end of the script", marks=soak),
    pytest.param("train([raises(SystemExit(3))])", 3, id="sys.exit"),
    pytest.param("train([raises(KeyError('mine'))])", 1, id="error", marks=soak),
    pytest.param("in_a_thread(train, 0.0)", 0, id="thread that begins", marks=soak),
    pytest.param("in_a_thread(train, 0.5)", 0, id="thread in fit"),
    pytest.param("in_a_thread(by_hand, 0.5)", 0, id="thread in a loop", marks=soak),
]


def assert_leaves(code, expected):
    process = started("-c", code)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == expected, errors
    assert not any(word in errors for word in ("terminate", "FATAL", "Fatal", "panicked", "Segmentation")), errors


@pytest.mark.parametrize(("code", "expected"), LEAVES)
def test_leaving_the_interpreter_in_a_step_aborts_nothing(code, expected):
    assert_leaves(LEAVING + code, expected)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [0.02 * number for number in range(40)])
def test_leaving_the_interpreter_at_any_moment_of_a_thread_aborts_nothing(seconds):
    assert_leaves(f"{LEAVING}in_a_thread(train, {seconds})", 0)


# Steps that take a while: JAX returns long before they are done.
LEAVING_A_SLOW_STEP = """
import sys
import jax, jax.numpy as jnp, keras, numpy as np
from keras import ops
import sok_keras as sok

layer = sok.DynamicEmbedding(4, "zeros")
layer.build()
optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
optimizer.build(layer.trainable_variables)

@jax.jit
def step(trainable, state, ids):
    ids = ids + (0 * jax.lax.fori_loop(0, 30, lambda _, a: jnp.tanh(a @ a), jnp.full((600, 600), 1e-3))[0, 0]).astype("int32")

    def loss(values):
        with keras.StatelessScope(state_mapping=list(zip(layer.trainable_variables, values, strict=True))):
            return ops.sum(layer(ids, training=True))

    return optimizer.stateless_apply(state, jax.grad(loss)(trainable), trainable)

state = [layer.trigger.value], [v.value for v in optimizer.variables]
for _ in range(5):
    state = step(*state, np.arange(1000, dtype="int32"))
assert not state[0][0].is_ready()
"""


@pytest.mark.skipif(BACKEND != "jax" or ON_GPU, reason="the steps of others have run when they return")
@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("sys.exit(3)", 3),
        pytest.param("raise KeyError", 1, marks=soak),
        pytest.param("del layer, optimizer", 0, marks=soak),
    ],
)
def test_leaving_the_interpreter_while_jax_computes_aborts_nothing(last, expected):
    assert_leaves(LEAVING_A_SLOW_STEP + last, expected)
