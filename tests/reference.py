"""What our layers are held against: Keras' own embedding with a dense gradient, and the plain optimizer."""

import contextlib
import re

import keras
import numpy as np
import pytest
from keras import layers, ops

import sok_keras as sok

BACKEND = keras.backend.backend()
ON_GPU = sok.backend.gpu(required=True) is not None

VOCABULARY, DIM, BATCH, HOTNESS, STEPS = 12, 4, 24, 3, 4
ROWS = (np.random.default_rng(0).normal(size=(VOCABULARY, DIM)) * 0.3).astype("float32")

# Tracing a tf.function takes as long as a hundred eager steps of these models. What does not depend on the graph is trained
# without one on TensorFlow; JAX and PyTorch run as they do by default.
FAST = {"run_eagerly": True} if BACKEND == "tensorflow" else {}


class RefEmbedding(layers.Embedding):
    """`keras.layers.Embedding` with a dense gradient.

    The stock layer's gradient is `IndexedSlices` on TensorFlow, which Keras 3 does not de-duplicate: Adam, Adagrad and RMSprop
    then see `sum(g ** 2)` of the repeated ids instead of `sum(g) ** 2`.
    """

    def call(self, inputs, training=None):
        return ops.take(ops.convert_to_tensor(self.embeddings) * 1.0, inputs, axis=0)


def reference_embedding(rows=ROWS):
    layer = RefEmbedding(*rows.shape)
    layer.build()
    layer.embeddings.assign(rows)
    return layer


def our_embedding(rows=ROWS, **kwargs):
    layer = sok.DynamicEmbedding(rows.shape[1], **kwargs)
    layer.get_table().assign(np.arange(len(rows)), rows)
    return layer


def dense_layer(units=2, seed=3):
    return layers.Dense(units, kernel_initializer=keras.initializers.RandomNormal(0, 0.3, seed=seed), dtype="float32")


def small_model(embedding, calls=1):
    """Ids -> embedding (called so often, on ids of their own) -> dense layer."""
    inputs = [keras.Input((HOTNESS,), dtype="int32") for _ in range(calls)]
    rows = layers.Concatenate()([layers.Flatten()(embedding(i)) for i in inputs]) if calls > 1 else embedding(inputs[0])
    return keras.Model(inputs if calls > 1 else inputs[0], dense_layer()(layers.Flatten()(rows)))


def batches(steps=STEPS, calls=1):
    """Ids, one array a call, and targets. Every id is in every batch: rows that are not do not move with us, and do with
    Keras' dense gradients where the optimizer has momentum."""
    random = np.random.default_rng(1)
    columns = [
        np.r_[random.permutation(VOCABULARY), random.integers(0, VOCABULARY, BATCH - VOCABULARY)]
        for _ in range(steps * HOTNESS)
    ]
    ids = (
        np.reshape(columns, (steps, HOTNESS, BATCH)).transpose(0, 2, 1).reshape(steps * BATCH, HOTNESS).astype("int32")
    )
    targets = random.normal(size=(steps * BATCH, 2)).astype("float32")
    return [np.roll(ids, 5 * call, axis=1)[:, :: 1 - 2 * (call % 2)].copy() for call in range(calls)], targets


def fit(model, epochs=1, steps=STEPS, **kwargs):
    ids, targets = batches(steps, len(model.inputs))
    kwargs = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0, **kwargs}
    model.fit(ids if len(ids) > 1 else ids[0], targets, **kwargs)
    return model


def fitted(embedding, optimizer, *, calls=1, epochs=1, loss="mse", **compile_arguments):
    model = small_model(embedding, calls)
    model.compile(optimizer, loss, **compile_arguments)
    return fit(model, epochs)


def to_numpy(value):
    return np.array(ops.convert_to_numpy(value))


def rows_of(embedding, rows=ROWS):
    if isinstance(embedding, sok.DynamicEmbedding):
        return embedding.get_table().find(np.arange(len(rows)))[0]
    return to_numpy(embedding.embeddings)


def weights_of(model):
    """Rows of embeddings and variables of other layers, in the order of the layers."""
    weights = []
    for layer in model.layers:
        is_embedding = isinstance(layer, sok.DynamicEmbedding | RefEmbedding)
        weights += [rows_of(layer)] if is_embedding else [to_numpy(v) for v in layer.weights]
    return weights


def assert_close(ours, theirs, tolerance=1e-6):
    """Equal within float32 rounding, relative to the largest number."""
    ours, theirs = to_numpy(ours), to_numpy(theirs)
    assert ours.shape == theirs.shape
    scale = np.abs(theirs).max(initial=1e-30)
    assert np.abs(ours - theirs).max(initial=0) <= tolerance * scale


def assert_same_weights(ours, theirs, tolerance=1e-6):
    for mine, reference in zip(weights_of(ours), weights_of(theirs), strict=True):
        assert_close(mine, reference, tolerance)


def assert_trains_alike(train, *, moves=True, tolerance=1e-6):
    """Runs `train(embedding, wrap)`, which gives a model, with our layer and with Keras'. Gives our model."""
    ours = train(our_embedding(), sok.OptimizerWrapper)
    theirs = train(reference_embedding(), lambda optimizer: optimizer)
    assert_same_weights(ours, theirs, tolerance)
    if getattr(ours, "history", None) is not None:
        # Keras sums the losses of batches in float32.
        np.testing.assert_allclose(ours.history.history["loss"], theirs.history.history["loss"], rtol=10 * tolerance)
    if moves:
        assert np.abs(rows_of(embedding_of(ours)) - ROWS).max() > 1e-3
    return ours


def embedding_of(model):
    return next(layer for layer in model.layers if isinstance(layer, sok.DynamicEmbedding))


def table_of(model):
    return embedding_of(model).get_table()


# ---- custom loops


def tensor(value):
    return ops.convert_to_tensor(value)


def gradients(function, variables, tensors=()):
    """Gradients of the scalar `function(*tensors)`: a list for the Keras variables, then one for the tensors."""
    values = [v.value for v in variables]
    if BACKEND == "tensorflow":
        return _tape_gradients(function, values, list(tensors))
    if BACKEND == "torch":
        return _autograd_gradients(function, values, list(tensors))
    import jax

    def pure(values, tensors):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*tensors)

    return jax.grad(pure, argnums=(0, 1))(values, list(tensors))


def _tape_gradients(function, values, tensors):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        result = function(*tensors)
    found = tape.gradient(result, values + tensors)
    return found[: len(values)], found[len(values) :]


def _autograd_gradients(function, values, tensors):
    import torch

    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    found = list(torch.autograd.grad(function(*tensors), values + tensors, allow_unused=True))
    return found[: len(values)], found[len(values) :]


def model_gradients(model, ids, targets):
    """Gradients of the mean squared error for the trainable variables."""
    loss = lambda: ops.mean(ops.square(model(tensor(ids), training=True) - tensor(targets)))
    return gradients(loss, model.trainable_variables)[0]


def apply_gradients(optimizer, found, variables):
    if BACKEND != "torch":
        return optimizer.apply(found, variables)
    import torch

    with torch.no_grad():
        return optimizer.apply(found, variables)


# ---- errors


@contextlib.contextmanager
def raises(error, match, table=None):
    """Expects an error of a native call, its class and its text.

    PyTorch raises the class itself. TensorFlow and JAX know no classes of ours: theirs name ours in front of the text. JAX's come
    when a result is read, or at the call, if JAX had no reason to put it off; from the table they come by their own class. So do all
    that a GPU finds.
    """
    if BACKEND == "torch" and table is not None and table._core.gpu is not None:
        with pytest.raises(error, match=f"(?s){match}"):
            yield
            table.synchronize()
    elif BACKEND == "torch":
        with pytest.raises(error, match=f"(?s){match}"):
            yield
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        if table is not None and table._core.gpu is not None:
            with pytest.raises((error, tf.errors.OpError), match=f"(?s){match}"):
                yield
                table.synchronize()
            return
        with pytest.raises(tf.errors.OpError, match=f"(?s){error.__name__}: .*{match}"):
            yield
    elif table is None:
        with pytest.raises(_jax_errors(), match=f"(?s){error.__name__}: .*{match}"):
            yield
    else:
        try:
            yield
        except error as told:
            assert re.search(f"(?s){match}", str(told))
            if not str(told).startswith(error.__name__):
                return  # by the table, which waited for it in the call
        except _jax_errors() as told:
            assert re.search(f"(?s){error.__name__}: .*{match}", str(told))
        with pytest.raises(error, match=f"(?s)^(?!.*{error.__name__}: ).*{match}"):
            table.synchronize()


def _jax_errors():
    import jax

    return jax.errors.JaxRuntimeError, ValueError  # the latter where XLA runs the call at once
