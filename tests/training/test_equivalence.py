"""Training with our layers is training with `keras.layers.Embedding`: same rows, same dense weights, same losses.

Cases that are pitfalls of Keras have their test in test_pitfalls.py: accumulation, clipping, loss scale, EMA, schedules and more.
"""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers

import sok_keras as sok
from reference import (
    BACKEND,
    BATCH,
    DIM,
    FAST,
    HOTNESS,
    ON_GPU,
    ROWS,
    STEPS,
    VOCABULARY,
    apply_gradients,
    assert_close,
    assert_same_weights,
    assert_trains_alike,
    batches,
    dense_layer,
    fit,
    fitted,
    model_gradients,
    our_embedding,
    reference_embedding,
    rows_of,
    small_model,
    table_of,
    to_numpy,
    weights_of,
)

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.5),
    "momentum": lambda: optimizers.SGD(0.2, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.2, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.02),
    "amsgrad": lambda: optimizers.Adam(0.02, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.02, weight_decay=0.05),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.02),
    "rmsprop_centered_with_momentum": lambda: optimizers.RMSprop(0.02, centered=True, momentum=0.5),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01),
}


def our_fitted(optimizer=None, **kwargs):
    return fitted(our_embedding(), sok.OptimizerWrapper(optimizer or optimizers.Adam(0.02)), **{**FAST, **kwargs})


# ---- DynamicEmbedding in a model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_updates_rows_as_dense_variables(name):
    # PyTorch's power is less exact on a GPU.
    tolerance = 1e-5 if ON_GPU and name == "ftrl" else 1e-6
    train = lambda embedding, wrap: fitted(embedding, wrap(OPTIMIZERS[name]()), **FAST)
    assert_trains_alike(train, tolerance=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS if BACKEND == "tensorflow" else ["sgd", "adam"])
def test_fit_by_default_compile_equals_keras(name):
    """On TensorFlow in a graph; the others ran so above, where `FAST` says nothing to them."""
    assert_trains_alike(lambda embedding, wrap: fitted(embedding, wrap(OPTIMIZERS[name]()), epochs=2))


def test_large_batch_that_is_shared_among_threads_equals_keras():
    """150,000 ids of 64 floats: the core's threads work while the framework's own wait for the call, or run the next."""
    hotness, num_samples, dim = 50, 3000, 64
    random = np.random.default_rng(6)
    rows = random.normal(size=(500, dim)).astype("float32")
    ids = random.integers(0, len(rows), (2 * num_samples, hotness)).astype("int32")
    targets = random.normal(size=(2 * num_samples, 2)).astype("float32")

    def train(embedding, optimizer):
        inputs = keras.Input((hotness,), dtype="int32")
        model = keras.Model(inputs, dense_layer()(layers.Flatten()(embedding(inputs))))
        model.compile(optimizer, "mse")
        model.fit(ids, targets, batch_size=num_samples, epochs=2, shuffle=False, verbose=0)
        return model, rows_of(embedding, rows)

    ours, our_rows = train(our_embedding(rows), sok.OptimizerWrapper(optimizers.SGD(0.1)))
    theirs, their_rows = train(reference_embedding(rows), optimizers.SGD(0.1))
    assert table_of(ours).stats().native_calls == 4 * 4  # of four steps
    assert np.abs(our_rows - rows).max() > 0.01
    assert_close(our_rows, their_rows)
    for mine, reference in zip(ours.layers[-1].weights, theirs.layers[-1].weights, strict=True):
        assert_close(mine, reference)


def test_two_calls_with_equal_ids_and_gradients_count_twice():
    """Identical operands: a compiler may merge the calls, or their pushes."""

    def train(embedding, wrap):
        inputs = keras.Input((HOTNESS,), dtype="int32")
        rows = layers.Add()([layers.Flatten()(embedding(inputs)), layers.Flatten()(embedding(inputs))])
        model = keras.Model(inputs, dense_layer()(rows))
        model.compile(wrap(optimizers.SGD(0.3)), "mse")
        return fit(model)

    assert_trains_alike(train)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.skipif(BACKEND != "torch", reason="JAX does by default, TensorFlow goes on without (pitfall 25)")
def test_jit_compile_true_equals_keras(monkeypatch):
    """Keras then compiles the whole `train_step`; here without Inductor, whose C++ takes a minute and knows nothing of us."""
    import torch

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def train(embedding, wrap):
        return fitted(embedding, wrap(optimizers.Adam(0.02)), jit_compile=isinstance(embedding, sok.DynamicEmbedding))

    assert assert_trains_alike(train).jit_compile


def test_rematerialised_layer_equals_keras_where_keras_can():
    """On TensorFlow and JAX `RematScope` breaks every layer that is called with `training`, `Dropout` too: keras/src/layers/layer.py
    passes it to the backend's remat as a keyword, which neither takes."""
    if BACKEND != "torch":
        with keras.RematScope(mode="full"):
            dropout = layers.Dropout(0.1)
        with pytest.raises(Exception):  # noqa: B017 (which one, differs by backend and Keras version)
            inputs = keras.Input((HOTNESS,))
            model = keras.Model(inputs, dense_layer()(dropout(inputs)))
            model.compile("sgd", "mse")
            model.fit(np.zeros((4, HOTNESS)), np.zeros((4, 2)), verbose=0)
        return

    def train(embedding, wrap):
        with keras.RematScope(mode="full"):
            embedding = type(embedding).from_config(embedding.get_config())
        if isinstance(embedding, sok.DynamicEmbedding):
            embedding.get_table().assign(np.arange(VOCABULARY), ROWS)
        else:
            embedding.build()
            embedding.embeddings.assign(ROWS)
        return fitted(embedding, wrap(optimizers.Adam(0.02)))

    assert_trains_alike(train)


def test_learning_rate_callbacks_set_the_wrapped_optimizer():
    def train(embedding, wrap):
        model = small_model(embedding)
        model.compile(wrap(optimizers.SGD(0.4)), "mse", **FAST)
        return fit(model, 2, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)])

    model = assert_trains_alike(train)
    assert float(to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.1)


# ---- saving


def test_keras_file_continues_bit_equal(tmp_path):
    model = our_fitted()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert table_of(loaded) is not table_of(model)
    for again in (model, loaded):
        fit(again)
    for one, other in zip(weights_of(model), weights_of(loaded), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(to_numpy(loaded.optimizer.iterations)) == 2 * STEPS


def test_weights_file_of_the_middle_of_an_epoch_holds_its_step(tmp_path):
    """Only TensorFlow and JAX with steps in flight could go wrong here: a save must wait for the steps before it."""
    path = str(tmp_path / "{batch:02d}.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_freq=2, save_weights_only=True)
    model = small_model(our_embedding())
    model.compile(sok.OptimizerWrapper(optimizers.Adam(0.02)), "mse", **FAST)
    fit(model, callbacks=[checkpoint])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["02.weights.h5", "04.weights.h5"]

    half = small_model(our_embedding())
    half.compile(sok.OptimizerWrapper(optimizers.Adam(0.02)), "mse", **FAST)
    half.load_weights(tmp_path / "02.weights.h5")
    ids, targets = batches()
    half.fit(ids[0][2 * BATCH :], targets[2 * BATCH :], batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_weights(half, model, tolerance=0)


def test_backup_and_restore_goes_on_as_if_never_interrupted(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def made():
        model = small_model(our_embedding())
        model.compile(sok.OptimizerWrapper(optimizers.Adam(0.02)), "mse", **FAST)
        return model

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)

    whole = fit(made(), 4)
    with pytest.raises(KeyboardInterrupt):
        fit(made(), 4, callbacks=[backup(), Interrupt()])
    resumed = fit(made(), 4, callbacks=[backup()])
    assert_same_weights(resumed, whole, tolerance=0)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"]
)
def test_copied_layer_has_a_table_of_its_own_with_the_same_rows(copied):
    layer = our_embedding()
    layer.build()
    twin = copied(layer)
    assert_close(rows_of(twin), ROWS, 0)
    twin.get_table().assign([0], np.zeros((1, DIM)))
    assert_close(rows_of(layer), ROWS, 0)


# ---- custom training


class CustomStep(keras.Model):
    """A `train_step` that asks for gradients of the dense weights too, which it throws away, and halves those that it applies."""

    def train_step(self, *arguments):
        return getattr(self, f"_{BACKEND}_step")(*arguments)

    def _is_dense(self):
        return [variable.path.endswith(("kernel", "bias")) for variable in self.trainable_variables]

    def _tensorflow_step(self, data):
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(*data, self(data[0], training=True))
        tape.gradient(
            loss, [v.value for v, dense in zip(self.trainable_weights, self._is_dense(), strict=True) if dense]
        )
        found = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients([(0.5 * g, v) for g, v in zip(found, self.trainable_weights, strict=True)])
        return {"loss": loss}

    def _torch_step(self, data):
        import torch

        self.zero_grad()
        loss = self.compute_loss(*data, self(data[0], training=True))
        dense = [v.value for v, dense in zip(self.trainable_weights, self._is_dense(), strict=True) if dense]
        torch.autograd.grad(loss, dense, retain_graph=True)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([0.5 * v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return {"loss": loss}

    def _jax_step(self, state, data):
        import jax

        trainable, other, optimizer, metrics = state

        def loss_of(values):
            return self.compute_loss_and_updates(
                values, other, metrics, *data, None, training=True, optimizer_variables=optimizer
            )

        def loss_of_dense(dense):
            dense = iter(dense)
            return loss_of(
                [next(dense) if is_dense else v for v, is_dense in zip(trainable, self._is_dense(), strict=True)]
            )[0]

        extra = jax.grad(loss_of_dense)(
            [v for v, is_dense in zip(trainable, self._is_dense(), strict=True) if is_dense]
        )
        (_, aux), found = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        unused = 0.0 * sum(jax.numpy.sum(g) for g in extra)  # else it would be dead code
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, [0.5 * g + unused for g in found], trainable)
        return {"loss": aux[0]}, (trainable, other, optimizer, metrics)


def test_custom_train_step_with_extra_gradients_and_user_scaling_equals_keras():
    def train(embedding, wrap):
        plain = small_model(embedding)
        model = CustomStep(plain.inputs, plain.outputs)
        model.compile(wrap(optimizers.Adam(0.02)), "mse")
        return fit(model)

    assert table_of(assert_trains_alike(train)).stats().pending_pushes <= 1


def custom_loop(step_of):
    """Trains with a loop of the user's own; `step_of(model, optimizer)` gives a step `(ids, targets)`."""

    def train(embedding, wrap):
        model, optimizer = small_model(embedding), wrap(optimizers.Adam(0.02))
        optimizer.build(model.trainable_variables)
        step = step_of(model, optimizer)
        (ids,), targets = batches()
        for start in range(0, len(ids), BATCH):
            step(ids[start : start + BATCH], targets[start : start + BATCH])
        return model

    return train


def eager_step(model, optimizer):
    def step(ids, targets):
        apply_gradients(optimizer, model_gradients(model, ids, targets), model.trainable_variables)

    return step


def traced_step(model, optimizer):
    """The eager step in a `tf.function`."""
    import tensorflow as tf

    return tf.function(eager_step(model, optimizer))


def jitted_step(model, optimizer):
    """A pure step under `jax.jit` with its state donated, as JAX users write it."""
    import jax

    def loss_of(trainable, ids, targets):
        outputs, _ = model.stateless_call(trainable, [], ids, training=True)
        return ops.mean(ops.square(outputs - targets))

    @jax.jit
    def pure(trainable, state, ids, targets):
        found = jax.grad(loss_of)(trainable, ids, targets)
        return optimizer.stateless_apply(state, found, trainable)

    def step(ids, targets):
        values = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
        for variables, new in zip(
            (model.trainable_variables, optimizer.variables), pure(*values, ids, targets), strict=True
        ):
            for variable, value in zip(variables, new, strict=True):
                variable.assign(value)

    return step


def compiled_step(model, optimizer):
    """The forward pass by `torch.compile`, which may break its graph at our calls."""
    import torch

    forward = torch.compile(lambda ids: model(ids, training=True), fullgraph=False, backend="aot_eager")

    def step(ids, targets):
        loss = torch.mean((forward(ops.convert_to_tensor(ids)) - ops.convert_to_tensor(targets)) ** 2)
        found = torch.autograd.grad(loss, [v.value for v in model.trainable_variables])
        apply_gradients(optimizer, found, model.trainable_variables)

    return step


COMPILED_STEPS = {"tensorflow": traced_step, "jax": jitted_step, "torch": compiled_step}


@pytest.mark.parametrize("step_of", [eager_step, COMPILED_STEPS[BACKEND]], ids=lambda step: step.__name__)
def test_custom_loop_equals_keras(step_of):
    assert_trains_alike(custom_loop(step_of))
