"""Each private name of Keras or a framework that the package uses, and what breaks without it."""

import importlib.util

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers

from reference import BACKEND
from sok_keras.backend import private_keras

of_backend = {
    name: pytest.mark.skipif(name != BACKEND, reason=f"a private name of {name} or of Keras' {name} backend")
    for name in ("tensorflow", "jax", "torch")
}


def test_layers_within_layers_are_found():
    """Else dumps would miss the tables of nested layers."""
    inner = keras.Sequential([layers.Dense(2, name="inner")])
    names = [layer.name for layer in private_keras.flatten_layers(keras.Sequential([keras.Input((3,)), inner]))]
    assert "inner" in names


def test_value_of_a_variable_is_read_past_scopes():
    """Else tables would wait for a value of a traced step, and not for the step that was started."""
    variable = keras.Variable(np.ones(3, "float32"))
    with keras.StatelessScope(state_mapping=[(variable, ops.zeros(3))]):
        assert float(ops.sum(private_keras.value_of(variable))) == 3.0


def test_open_scopes_are_known():
    """Else a symbolic call would insert placeholder ids, and a traced step of JAX could not choose its updates."""
    assert private_keras.get_stateless_scope() is None
    with keras.StatelessScope() as scope:
        assert private_keras.get_stateless_scope() is scope

    class Asks(layers.Layer):
        def call(self, x):
            answers.append(private_keras.in_symbolic_scope())
            return x

    answers = []
    keras.Model(inputs := keras.Input((2,)), Asks()(inputs))
    Asks()(np.zeros((1, 2), "float32"))
    assert answers[0] and not answers[-1]


def test_metrics_of_fit_and_evaluate_come_from_one_method():
    """Else those of many ranks would be those of one."""

    def extend(extended, result):
        assert extended is model
        assert {"loss"} <= result().keys()
        return {"loss": len(told.append(1) or told)}

    told, x = [], np.ones((4, 1), "float32")
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    private_keras.extend_metrics_result(model, extend)
    private_keras.extend_metrics_result(model, extend)
    assert model.fit(x, x, epochs=2, verbose=0).history["loss"] == [1, 2]
    assert model.evaluate(x, x, verbose=0) == 3


def test_fit_starts_at_the_epoch_and_batch_that_a_callback_sets():
    """Else a restart would train batches twice."""

    class Resumes(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            private_keras.resume_fit(self.model, 1, 2)

        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    epochs, x = [], np.ones((6, 1), "float32")
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x, batch_size=2, epochs=3, verbose=0, callbacks=[Resumes()])
    assert epochs == [1, 2] and int(ops.convert_to_numpy(model.optimizer.iterations)) == 1 + 3
    assert private_keras.start_epoch(model) == 1
    private_keras.forget_epoch(model)
    model.fit(x, x, batch_size=2, verbose=0)
    assert int(ops.convert_to_numpy(model.optimizer.iterations)) == 4 + 3


def test_weight_decay_of_a_variable_can_be_switched_off():
    """Else rows would decay where the user excluded them."""
    optimizer = optimizers.SGD(0.1, weight_decay=0.1)
    both = [keras.Variable(np.ones(3, "float32"), name=name) for name in ("kept", "excluded")]
    optimizer.exclude_from_weight_decay(var_names=["excluded"])
    assert [private_keras.uses_weight_decay(optimizer, variable) for variable in both] == [True, False]


def test_accumulated_gradients_and_calls_are_read():
    """Else tables would update in another step than dense variables, and the global norm would miss earlier steps."""
    optimizer = optimizers.SGD(0.1, gradient_accumulation_steps=2)
    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer.apply([ops.ones(3)], [variable])
    assert float(ops.sum(private_keras.accumulated_gradient(optimizer, variable))) == 3.0
    assert int(private_keras.steps_of(optimizer).value) == 1
    private_keras.count_step(optimizer)
    assert int(private_keras.steps_of(optimizer).value) == 2


def test_clip_of_an_optimizer_is_replaced():
    """Else dense variables would be clipped by a norm without the rows."""
    optimizer = optimizers.SGD(1.0, global_clipnorm=1.0)
    variable = keras.Variable(np.zeros(4, "float32"))
    with private_keras.clipping_by(optimizer, ops.convert_to_tensor(0.25)):
        optimizer.apply([ops.ones(4)], [variable])
    np.testing.assert_allclose(ops.convert_to_numpy(variable), -0.25)
    optimizer.apply([ops.ones(4)], [variable])
    np.testing.assert_allclose(ops.convert_to_numpy(variable), -0.75)


def test_an_optimizer_runs_in_a_stateless_scope():
    """Else optimizers that the core has no formula for could not update rows on TensorFlow."""
    optimizer = optimizers.SGD(0.5, momentum=0.5)
    private_keras.make_stateless(optimizer)
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([variable])
    momentum = optimizer.variables[-1]
    given = [ops.convert_to_tensor(np.full(2, x, "float32")) for x in (1.0, 2.0)]
    mapping = [
        *zip((variable, momentum), given, strict=True),
        (private_keras.rate_of(optimizer), ops.convert_to_tensor(0.25)),
    ]
    with keras.StatelessScope(mapping) as scope:
        optimizer.update_step(ops.ones(2), variable, 0.25)
        assert float(optimizer.learning_rate) == 0.25
    new = [ops.convert_to_numpy(scope.get_current_value(each)) for each in (variable, momentum)]
    np.testing.assert_allclose(new, [[1.75] * 2, [0.75] * 2])
    assert not ops.convert_to_numpy(variable.value).any() and float(optimizer.learning_rate) == 0.5


@pytest.mark.parametrize("module", private_keras.EXPORTERS)
def test_exporters_have_these_names(module):
    """Else an export would succeed whose graph cannot run."""
    if module == "keras.src.export.litert" and int(keras.__version__.split(".")[1]) < 13:
        pytest.skip("Keras has this exporter since 3.13")
    assert importlib.util.find_spec(module if "torch" not in module or BACKEND == "torch" else "keras.src") is not None


@of_backend["torch"]
def test_device_of_keras_is_known():
    """Else tables would not be where the model runs."""
    from sok_keras.backend import private_torch

    with keras.device("cpu"):
        assert str(private_torch.get_device()) == "cpu"


@of_backend["torch"]
def test_hooks_of_state_dicts_are_listed():
    """Else a layer would write its rows twice."""
    import torch

    from sok_keras.backend import private_torch

    def hook(module, state, prefix, metadata):
        del module, state, prefix, metadata

    module = torch.nn.Linear(1, 1)
    module.register_state_dict_post_hook(hook)
    assert list(private_torch.state_dict_hooks(module)) == [hook]


@of_backend["jax"]
@pytest.mark.parametrize("name", ["_make_function", "_get_jax_state", "jax_state_sync", "fit", "evaluate", "predict"])
def test_trainer_has_the_methods_that_are_wrapped(name):
    """Else an error in a step would leave a model without its weights."""
    from sok_keras.backend import private_jax

    assert callable(getattr(private_jax.JAXTrainer, name))


@of_backend["jax"]
def test_jax_says_whether_it_has_started():
    """Else each rank would take memory of every GPU."""
    import jax

    from sok_keras.backend import private_jax

    jax.devices()
    assert private_jax.backends_are_initialized()


@of_backend["jax"]
def test_the_function_that_is_traced_knows_its_values():
    """Else XLA could sum gradients before, or without, the lookups of tables that are not trained, in which other ranks wait."""
    import jax

    from sok_keras.backend import private_jax

    outer, inner = [], []

    def step(x):
        def loss(x):
            inner.append(x)
            outer.append(jax.lax.stop_gradient(x) + 1)
            return x

        gradient = jax.grad(loss)(x)
        inner.append(private_jax.is_traced_now(inner[0]))
        outer.append(private_jax.is_traced_now(outer[0]))
        return gradient

    jax.jit(step)(1.0)
    assert (inner[1], outer[1]) == (False, True)


@of_backend["jax"]
def test_a_trace_is_known_also_where_arguments_are_concrete():
    """Else a lookup in a function that JAX differentiates would leave its gradients out."""
    import jax

    from sok_keras.backend import private_jax

    found = []

    def ask(x):
        found.append(private_jax.trace_state_clean())
        return x

    ask(1.0), jax.grad(ask)(1.0), jax.jit(ask)(1.0)
    assert found == [True, False, False]


@of_backend["jax"]
def test_the_group_of_jax_is_known():
    """Else ranks of `jax.distributed` could not tell their address without computing, which takes a GPU."""
    from sok_keras.backend import private_jax

    state = private_jax.distributed_state
    assert {"client", "process_id", "num_processes", "coordinator_address"} <= set(dir(state))


@of_backend["tensorflow"]
def test_tapes_are_seen():
    """Else lookups would keep nothing for their gradients, or always."""
    import tensorflow as tf

    from sok_keras.backend import private_tensorflow

    x = tf.constant(1.0)
    assert not private_tensorflow.should_record_backprop([x])
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert private_tensorflow.should_record_backprop([x])


@of_backend["tensorflow"]
def test_wrappers_of_registered_ops_are_made():
    """Else the ops of a module that was imported before could not be called."""
    from sok_keras.backend import private_tensorflow

    assert b"def add_v2(" in private_tensorflow.op_wrappers(["AddV2"])


@of_backend["tensorflow"]
def test_checkpoint_calls_what_restores_a_variable(tmp_path):
    """Else weights of other tables would come in silence."""
    import tensorflow as tf

    from sok_keras.backend import private_tensorflow

    variable, seen = tf.Variable([1.0, 2.0]), []
    path = tf.train.Checkpoint(v=variable).write(str(tmp_path / "c"))
    other = tf.Variable([0.0, 0.0])
    private_tensorflow.restore_by(other, lambda tensors: seen.extend(tensors.values()))
    tf.train.Checkpoint(v=other).read(path)
    assert [list(tensor.numpy()) for tensor in seen] == [[1.0, 2.0]]
    assert list(other.numpy()) == [0.0, 0.0]
    assert issubclass(tf.Variable, private_tensorflow.Trackable)


@of_backend["tensorflow"]
def test_a_variable_without_a_value_is_watched_and_read_by_its_own_method():
    """Else variables over tables would get no gradient, or `tf.nn.embedding_lookup` would read an empty array."""
    import tensorflow as tf

    from sok_keras.backend import private_tensorflow

    class Rows(private_tensorflow.ResourceVariable):
        def sparse_read(self, indices, name=None):
            private_tensorflow.variable_accessed(self)
            return tf.ones((*indices.shape, 2))

    rows = Rows(tf.zeros((0, 2)), shape=tf.TensorShape([None, 2]))
    with tf.GradientTape() as tape:
        assert tf.nn.embedding_lookup(rows, tf.constant([1, 2])).shape == (2, 2)
    assert tape.watched_variables() == (rows,)
