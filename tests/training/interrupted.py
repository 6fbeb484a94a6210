"""A process that trains until it is stopped: `python interrupted.py ROUNDS FOLDER`. It says on its output where it is, and
`test_interrupts.py` stops it. After each stop it shows that the model is whole."""

import contextlib
import os
import signal
import sys

import keras
import numpy as np
from keras import layers, optimizers

import sok_keras as sok

BATCH, HOTNESS = 256, 4


def built(width=256):
    inputs = keras.Input((HOTNESS,), dtype="int32")
    rows = layers.Flatten()(sok.DynamicEmbedding(16, "zeros", name="ids")(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(width, activation="relu")(rows)))
    model.compile(sok.OptimizerWrapper(optimizers.Adam(1e-3)), "mse")
    return model


def data(steps):
    random = np.random.default_rng(0)
    ids = random.integers(0, 3000, (steps * BATCH, HOTNESS)).astype("int32")
    return ids, random.normal(size=(steps * BATCH, 1)).astype("float32")


def steps_of(model):
    """As the optimizer of the dense weights has counted them, and as the tables have."""
    trigger = model.get_layer("ids").trigger
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations)), int(keras.ops.convert_to_numpy(trigger)[0, 0])


def assert_whole(model, other, folder):
    """It can be read, dumped, verified, and gives the same where it is loaded."""
    ids, _ = data(1)
    before = model.predict_on_batch(ids)
    assert np.isfinite(before).all()
    sok.dump(folder, model)
    sok.verify(folder)
    sok.load(folder, other)
    np.testing.assert_array_equal(other.predict_on_batch(ids), before)
    dense, tables = steps_of(model)
    assert dense == tables or keras.backend.backend() != "jax"


def ignore_presses():
    """A second press may be on its way."""
    while signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def restore_grad_mode():
    """Ctrl-C in the exit of Keras' `torch.no_grad()` leaves gradients off: two in five hundred presses do."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_grad_enabled(True)


def train_and_be_stopped(model, inputs, targets):
    # A shell starts what runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print("fit", flush=True)
        model.fit(inputs, targets, batch_size=BATCH, epochs=10**6, verbose=0)
    except KeyboardInterrupt:
        ignore_presses()
        restore_grad_mode()
        print("stopped", flush=True)


def main(rounds, folder):
    keras.utils.set_random_seed(1)
    model, other, (inputs, targets) = built(), built(), data(20)
    other.build((None, HOTNESS))
    other.optimizer.build(other.trainable_variables)
    for _ in range(rounds):
        train_and_be_stopped(model, inputs, targets)
        assert_whole(model, other, folder)
        print("whole", *steps_of(model), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    if keras.backend.backend() == "jax":
        # Keras gives callbacks to a `ThreadPoolExecutor` there. Ctrl-C while `fit` asks for a result may leave the lock of the future
        # taken: two processes of a hundred then wait for that thread when the interpreter ends.
        os._exit(0)
