"""What goes wrong where tables lie outside Keras, one test or more for each pitfall that is known.

29 (DistributedDataParallel) and 30 (dense gradients across processes) come with ranks. More of 16 (two models on one table) is in
test_tickets.py; of 13 (shared tables) and 40 (copies of a layer) in test_equivalence.py; of 15 (states that were loaded) there too.
"""

import copy

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
    ROWS,
    STEPS,
    VOCABULARY,
    apply_gradients,
    assert_close,
    assert_same_weights,
    assert_trains_alike,
    batches,
    dense_layer,
    embedding_of,
    fit,
    fitted,
    gradients,
    our_embedding,
    raises,
    reference_embedding,
    rows_of,
    small_model,
    table_of,
    to_numpy,
    weights_of,
)

on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has this behavior")
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="only JAX has this behavior")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="only PyTorch has this behavior")

# Ids that no batch of `batches` holds.
UNKNOWN = np.full((BATCH, HOTNESS), 777, "int32")


def trains_alike(optimizer, **kwargs):
    return assert_trains_alike(lambda embedding, wrap: fitted(embedding, wrap(optimizer()), **kwargs))


def our_model(optimizer=None, embedding=None, **compile_arguments):
    model = small_model(embedding or our_embedding())
    model.compile(sok.OptimizerWrapper(optimizer or optimizers.SGD(0.5)), "mse", **{**FAST, **compile_arguments})
    return model


# ---- 1 to 5: what Keras does to gradients on their way

ACCUMULATING = {
    "sgd_of_three": (lambda: optimizers.SGD(0.5, gradient_accumulation_steps=3), 1),
    "adam_of_two": (lambda: optimizers.Adam(0.02, gradient_accumulation_steps=2), 1),
    "adam_of_two_on_a_shared_layer": (lambda: optimizers.Adam(0.02, gradient_accumulation_steps=2), 2),
    "clipnorm": (lambda: optimizers.SGD(0.5, gradient_accumulation_steps=2, clipnorm=0.02), 1),
    "global_clipnorm": (lambda: optimizers.SGD(0.5, gradient_accumulation_steps=2, global_clipnorm=0.02), 1),
    "clipvalue": (lambda: optimizers.SGD(0.5, gradient_accumulation_steps=2, clipvalue=0.002), 1),
}


@pytest.mark.parametrize("name", ACCUMULATING)
def test_pitfall_01_gradient_accumulation_updates_once_in_n_steps(name):
    """JAX runs the optimizer's step at each of them and selects afterwards; the others put it into a condition."""
    optimizer, calls = ACCUMULATING[name]
    trains_alike(optimizer, calls=calls, epochs=2)


def test_pitfall_02_dynamic_loss_scale_reaches_the_rows():
    def train(embedding, wrap):
        optimizer = optimizers.LossScaleOptimizer(
            wrap(optimizers.Adam(0.02)), initial_scale=2.0**10, dynamic_growth_steps=3
        )
        return fitted(embedding, optimizer, calls=2, epochs=2)

    model = assert_trains_alike(train)
    assert float(to_numpy(model.optimizer.dynamic_scale)) > 2.0**10


def test_pitfall_02_steps_skipped_for_overflow_leave_no_gradients_behind():
    """The scale starts so high that the first steps overflow: `LossScaleOptimizer` then never calls the wrapper."""

    def train(embedding, wrap):
        optimizer = optimizers.LossScaleOptimizer(
            wrap(optimizers.Adam(0.02)), initial_scale=2.0**90, dynamic_growth_steps=100
        )
        return fitted(embedding, optimizer, loss=lambda y, p: ops.square(y - p) * 2.0**44, epochs=3)

    model = assert_trains_alike(train)
    updates = int(to_numpy(model.optimizer.inner_optimizer.iterations))
    assert 0 < updates < 3 * STEPS
    assert table_of(model).stats().pending_pushes == 0


def test_pitfall_02_a_loss_scale_optimizer_inside_is_refused():
    with pytest.raises(ValueError, match="goes around the wrapper"):
        sok.OptimizerWrapper(optimizers.LossScaleOptimizer(optimizers.Adam()))
    with pytest.raises(ValueError, match="must be a plain optimizer"):
        sok.OptimizerWrapper(sok.OptimizerWrapper(optimizers.Adam()))


def test_pitfall_03_static_loss_scale_of_the_inner_optimizer_reaches_the_rows():
    trains_alike(lambda: optimizers.Adam(0.02, loss_scale_factor=1024.0))


@pytest.mark.parametrize("argument", ["clipnorm", "global_clipnorm"])
def test_pitfall_04_norms_are_those_of_merged_rows(argument):
    trains_alike(lambda: optimizers.SGD(0.5, **{argument: 0.02}), calls=2)


@pytest.mark.parametrize("argument", ["clipnorm", "global_clipnorm"])
def test_pitfall_04_norms_of_two_tables_in_a_layer_are_those_of_two_variables(argument):
    def train(embed, optimizer):
        inputs = [keras.Input((HOTNESS,), dtype="int32") for _ in range(2)]
        model = keras.Model(inputs, dense_layer()(layers.Concatenate()(embed(inputs))))
        model.compile(optimizer, "mse", **FAST)
        return fit(model)

    class Sum(layers.Layer):
        def call(self, rows):
            return ops.sum(rows, axis=-2)

    configs = [sok.TableConfig(name, None, DIM, combiner="sum") for name in "ab"]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs])
    for table in layer.get_tables().values():
        table.assign(np.arange(VOCABULARY), ROWS)
    references = [reference_embedding() for _ in "ab"]
    train(layer, sok.OptimizerWrapper(optimizers.SGD(0.5, **{argument: 0.02})))
    train(
        lambda inputs: [Sum()(e(i)) for e, i in zip(references, inputs, strict=True)],
        optimizers.SGD(0.5, **{argument: 0.02}),
    )
    for table, reference in zip(layer.get_tables().values(), references, strict=True):
        assert_close(table.find(np.arange(VOCABULARY))[0], reference.embeddings)


def test_pitfall_05_clipvalue_is_applied_to_merged_rows():
    trains_alike(lambda: optimizers.Adam(0.02, clipvalue=0.001), calls=2)


# ---- 6 to 9: rows that are in the batch, and those that are not


def test_pitfall_06_weight_decay_of_touched_rows_equals_keras():
    trains_alike(lambda: optimizers.Adam(0.02, weight_decay=0.1))


def test_pitfall_06_weight_decay_leaves_other_rows_alone():
    model = our_model(optimizers.SGD(0.5, weight_decay=0.1))
    model.train_on_batch(np.zeros((BATCH, HOTNESS), "int32"), np.zeros((BATCH, 2)))
    rows = rows_of(embedding_of(model))
    assert (rows[0] != ROWS[0]).all()
    np.testing.assert_array_equal(rows[1:], ROWS[1:])


def test_pitfall_06_rows_can_be_excluded_from_weight_decay():
    def train(embedding, wrap):
        inner = optimizers.SGD(0.5, weight_decay=0.1)
        inner.exclude_from_weight_decay(var_names=["trigger", "embeddings"])
        return fitted(embedding, wrap(inner), **FAST)

    assert_trains_alike(train)


def test_pitfall_07_ema_averages_dense_variables_alone():
    """At the end of `fit` Keras overwrites variables by their averages; rows have none."""
    averaged = lambda: optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    ours = weights_of(fitted(our_embedding(), sok.OptimizerWrapper(averaged()), **FAST))
    rows, *_ = weights_of(fitted(reference_embedding(), optimizers.SGD(0.5), **FAST))
    _, *dense = weights_of(fitted(reference_embedding(), averaged(), **FAST))
    for mine, reference in zip(ours, [rows, *dense], strict=True):
        assert_close(mine, reference)


@pytest.mark.parametrize(
    "optimizer", [lambda: optimizers.Adam(0.02), lambda: optimizers.SGD(0.2, momentum=0.9)], ids=["adam", "momentum"]
)
def test_pitfall_08_rows_outside_the_batch_keep_still(optimizer):
    """Keras' dense gradient moves them too, by their momentum. Nor do their states move."""
    model = fit(our_model(optimizer()))
    before = table_of(model).export(states=True)
    model.train_on_batch(np.full((BATCH, HOTNESS), 5, "int32"), np.zeros((BATCH, 2)))
    after = table_of(model).export(states=True)
    for now, then in zip([after.rows, *after.states.values()], [before.rows, *before.states.values()], strict=True):
        assert (now != then).any(axis=1).tolist() == [key == 5 for key in range(VOCABULARY)]


@pytest.mark.parametrize(
    "optimizer", [lambda: optimizers.Adagrad(0.1), lambda: optimizers.Adam(0.02)], ids=["adagrad", "adam"]
)
def test_pitfall_09_gradients_of_equal_ids_are_summed_before_they_are_squared(optimizer):
    def train(embedding, wrap):
        model = small_model(embedding)
        model.compile(wrap(optimizer()), "mse", **FAST)
        for _ in range(3):
            model.train_on_batch(np.full((BATCH, HOTNESS), 5, "int32"), np.ones((BATCH, 2)))
        return model

    assert_trains_alike(train)


# ---- 10 to 13: who inserts, who learns


class WithoutTraining(keras.Model):
    """Its `call` takes no `training`, so that none reaches the layers."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.dense = embedding, dense_layer()

    def call(self, inputs):
        return self.dense(ops.reshape(self.embedding(inputs), (-1, HOTNESS * DIM)))


def test_pitfall_10_model_whose_call_has_no_training_learns():
    def train(embedding, wrap):
        model = WithoutTraining(embedding)
        model.compile(wrap(optimizers.Adam(0.02)), "mse")
        (ids,), targets = batches()
        model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
        return model

    assert_trains_alike(train)


def test_pitfall_10_model_whose_call_has_no_training_inserts_in_fit_alone():
    layer = sok.DynamicEmbedding(DIM)
    model = WithoutTraining(layer)
    model.compile(sok.OptimizerWrapper(optimizers.Adam(0.02)), "mse", **FAST)
    model.predict(UNKNOWN, verbose=0)
    assert len(layer.get_table()) == 0
    model.fit(UNKNOWN, np.zeros((BATCH, 2)), verbose=0)
    assert layer.get_table().export().keys.tolist() == [777]


def test_pitfall_11_evaluate_and_predict_do_not_insert():
    model = fit(our_model())
    targets = np.zeros((BATCH, 2))
    model.evaluate(UNKNOWN, targets, verbose=0)
    model.predict(UNKNOWN, verbose=0)
    model.test_on_batch(UNKNOWN, targets)
    model.predict_on_batch(UNKNOWN)
    stats = table_of(model).stats()
    assert (stats.size, stats.pending_pushes) == (VOCABULARY, 0)


@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_pitfall_11_unknown_id_answers_what_missing_says(missing):
    layer = sok.DynamicEmbedding(DIM, missing=missing, seed=3)
    answer = to_numpy(layer(np.array([777], "int32"), training=False))
    assert len(layer.get_table()) == 0
    inserted, _ = layer.get_table().find_or_insert([777])
    np.testing.assert_array_equal(answer, inserted if missing == "initial" else np.zeros((1, DIM)))


def test_pitfall_11_gradient_of_an_evaluation_updates_known_rows_alone():
    """`training=False` under a recorded gradient, as in adversarial training: what has no row gets none, and that is counted."""
    layer = our_embedding()
    layer.build()
    ids = np.array([5, 777], "int32")
    (found,) = gradients(lambda: ops.sum(layer(ids, training=False)), layer.trainable_variables)[0]
    apply_gradients(sok.OptimizerWrapper(optimizers.SGD(1.0)), [found], layer.trainable_variables)
    expected = ROWS.copy()
    expected[5] -= 1.0
    assert_close(layer.get_table().export().rows, expected)
    assert layer.get_table().stats().dropped_gradients == 1


def test_pitfall_12_frozen_layer_neither_learns_nor_inserts_nor_pushes():
    """TensorFlow watches the trigger even when Keras drops it from the trainable weights."""
    model = our_model()
    embedding_of(model).trainable = False
    model.compile(sok.OptimizerWrapper(optimizers.SGD(0.5)), "mse")
    fit(model)
    model.train_on_batch(UNKNOWN, np.zeros((BATCH, 2)))
    stats = table_of(model).stats()
    np.testing.assert_array_equal(table_of(model).export().rows, ROWS)
    assert (stats.pending_pushes, stats.native_calls) == (0, STEPS + 1)


def test_pitfall_13_layer_that_is_called_twice_gets_both_gradients():
    trains_alike(lambda: optimizers.Adam(0.02), calls=2)


# ---- 14 to 16: which optimizer


def test_pitfall_14_unwrapped_optimizer_is_told():
    """Else pushes would pile up and no row would ever move."""
    model = small_model(our_embedding())
    model.compile(optimizers.Adam(0.02), "mse", **FAST)
    with raises(sok.UnwrappedOptimizerError, r"OptimizerWrapper\(optimizer\)", table_of(model)):
        fit(model)


def test_pitfall_15_recompiled_model_starts_with_new_states():
    def train(embedding, wrap):
        model = small_model(embedding)
        for rate in (0.02, 0.05):
            model.compile(wrap(optimizers.Adam(rate)), "mse", **FAST)
            fit(model)
        return model

    assert_trains_alike(train)


def test_pitfall_16_two_models_train_one_layer():
    def train(embedding, wrap):
        models = [small_model(embedding) for _ in range(2)]
        for model in models:
            model.compile(wrap(optimizers.SGD(0.3)), "mse", **FAST)
        for model in models * 2:
            fit(model)
        return models[1]

    assert_trains_alike(train)


def test_pitfall_16_second_optimizer_with_states_is_refused():
    """Two would each write its moments over the other's."""
    layer = our_embedding()
    first, second = our_model(optimizers.Adam(0.02), layer), our_model(optimizers.Adam(0.02), layer)
    fit(first)
    fit(second)
    before = layer.get_table().export().rows
    with raises(sok.SokError, "bound to another optimizer", layer.get_table()):
        fit(first)
    np.testing.assert_array_equal(layer.get_table().export().rows, before)


# ---- 19 to 22: JAX runs what data asks for, later


def test_pitfall_19_no_call_of_a_step_is_dropped_as_dead_code():
    model = our_model(run_eagerly=False)
    fit(model)
    assert table_of(model).stats().native_calls == 4 * STEPS


def test_pitfall_20_steps_of_two_layers_keep_their_order():
    """Many short steps, none of which is waited for; Adam tells if one runs before its turn."""

    def train(make, wrap):
        first, second = make(), make()
        inputs = keras.Input((HOTNESS,), dtype="int32")
        rows = layers.Concatenate()([layers.Flatten()(layer(inputs)) for layer in (first, second)])
        model = keras.Model(inputs, dense_layer()(rows))
        model.compile(wrap(optimizers.Adam(0.02)), "mse")
        return fit(model, steps=30)

    assert_same_weights(
        train(our_embedding, sok.OptimizerWrapper), train(reference_embedding, lambda optimizer: optimizer)
    )


def test_pitfall_21_error_of_a_step_is_raised_when_the_table_is_read_at_the_latest():
    """JAX returns from `fit` without it. A table that is full stays readable, and as it was."""
    layer = our_embedding(max_capacity=VOCABULARY)
    model = our_model(embedding=layer)
    with raises(sok.TableFullError, "is full: no room for 1 of the new keys", layer.get_table()):
        model.fit(UNKNOWN, np.zeros((BATCH, 2)), batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(layer.get_table().export().rows, ROWS)


def test_pitfall_22_table_read_in_the_middle_of_an_epoch_is_that_of_its_step():
    class Record(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rows = []

        def on_train_batch_end(self, batch, logs=None):
            # On JAX `self.model` fetches the variables of the step, on which the table waits.
            self.rows.append(np.array(weights_of(self.model)[0]))

    def rows_of_steps(embedding, optimizer):
        model, record = small_model(embedding), Record()
        model.compile(optimizer, "mse", **FAST)
        fit(model, callbacks=[record])
        return np.array(record.rows)

    ours = rows_of_steps(our_embedding(), sok.OptimizerWrapper(optimizers.SGD(0.5)))
    assert_close(ours, rows_of_steps(reference_embedding(), optimizers.SGD(0.5)))


# ---- 23 to 28: how trainers run a step


@on_jax
def test_pitfall_23_more_than_one_jax_device_is_refused():
    """A plain call would run on each device with all data: each push twice."""
    layer = sok.DynamicEmbedding(DIM)
    with (
        keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope(),
        pytest.raises(sok.DeviceError, match=r"2 devices.*torchrun"),
    ):
        layer.build()


@on_tensorflow
def test_pitfall_24_mirrored_strategy_is_refused():
    """Each replica would apply the gradients of all."""
    import tensorflow as tf

    layer = sok.DynamicEmbedding(DIM)
    with (
        tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
        pytest.raises(sok.DeviceError, match=r"2 devices.*torchrun"),
    ):
        layer.build()


@on_tensorflow
def test_pitfall_25_model_is_trained_without_xla_on_tensorflow():
    """Ops of TensorFlow's C API have no XLA kernel. Keras says so and goes on without."""
    with pytest.warns(UserWarning, match="jit_compile"):
        model = our_model(run_eagerly=False, jit_compile=True)
    assert model.jit_compile is False
    fit(model)


@on_jax
def test_pitfall_26_layer_does_not_switch_off_jit_for_the_model():
    assert fit(our_model()).jit_compile is True


def test_pitfall_27_building_a_model_inserts_no_made_up_ids():
    """PyTorch builds subclassed models by calling them, on ones, for real."""
    model = WithoutTraining(sok.DynamicEmbedding(DIM))
    model.compile(sok.OptimizerWrapper(optimizers.SGD(0.1)), "mse", **FAST)
    model.fit(UNKNOWN, np.zeros((BATCH, 2)), verbose=0)
    assert model.embedding.get_table().export().keys.tolist() == [777]


@pytest.mark.skipif(BACKEND == "torch", reason="Keras' own limit: the next test")
def test_pitfall_28_several_steps_per_execution_equal_keras():
    trains_alike(lambda: optimizers.Adam(0.02), steps_per_execution=2)


@on_torch
def test_pitfall_28_keras_refuses_several_steps_per_execution_on_torch():
    model = our_model(steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution"):
        fit(model)


# ---- 31 to 40


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def test_pitfall_31_mixed_precision_equals_keras(mixed_float16):
    """Keras merges gradients in float16 (11 bits), we in float32; so the bound is that of float16."""
    model = assert_trains_alike(
        lambda embedding, wrap: fitted(embedding, wrap(optimizers.SGD(0.5)), epochs=2), tolerance=2e-3
    )
    assert isinstance(model.optimizer, optimizers.LossScaleOptimizer)
    assert model.layers[1].trigger.dtype == "float32"
    assert keras.backend.standardize_dtype(model.layers[1](np.zeros((1, 1), "int32")).dtype) == "float16"


def test_pitfall_32_set_weights_does_not_bring_rows_back():
    """A limit of ours: `EarlyStopping(restore_best_weights=True)` keeps what `get_weights` gives, and rows are not in it."""
    model = fit(our_model())
    weights = model.get_weights()
    fit(model)
    rows = table_of(model).export().rows
    with pytest.warns(
        UserWarning, match="earlier step were set, but the rows of .* are no Keras weights and stay as they are"
    ):
        model.set_weights(weights)
    np.testing.assert_array_equal(table_of(model).export().rows, rows)
    model.set_weights(model.get_weights())  # of this step: nothing to tell


@pytest.mark.parametrize(
    "make", [lambda: sok.DynamicEmbedding(DIM), lambda: one_table_layer()], ids=["dynamic", "distributed"]
)
def test_pitfall_33_no_attribute_is_a_table(make):
    """Keras reads every attribute of a layer at every save."""
    layer = make()
    assert not [name for name in dir(layer) if isinstance(getattr(layer, name, None), sok.Table)]


def one_table_layer():
    return sok.DistributedEmbedding({"f": sok.FeatureConfig("f", sok.TableConfig("t", None, DIM))})


def test_pitfall_34_model_with_embeddings_alone_trainable_counts_its_steps():
    def train(embedding, wrap):
        model = small_model(embedding)
        model.layers[-1].trainable = False
        model.compile(wrap(optimizers.Adam(0.02)), "mse", **FAST)
        return fit(model)

    assert int(to_numpy(assert_trains_alike(train).optimizer.iterations)) == STEPS


def test_pitfall_35_regularizer_of_the_matrix_is_refused():
    """It would see the trigger."""
    for argument in ("embeddings_regularizer", "embeddings_constraint"):
        with pytest.raises((TypeError, ValueError), match=argument):
            sok.DynamicEmbedding(DIM, **{argument: None})


def test_pitfall_35_activity_regularizer_equals_keras():
    def train(embedding, wrap):
        embedding.activity_regularizer = keras.regularizers.L2(0.1)
        return fitted(embedding, wrap(optimizers.SGD(0.5)), **FAST)

    assert_trains_alike(train)


RUNS = {
    "last_batch_is_partial": lambda model: fit(model, batch_size=20),
    "train_on_batch": lambda model: [
        model.train_on_batch(batches()[0][0][start : start + BATCH], batches()[1][start : start + BATCH])
        for start in range(0, STEPS * BATCH, BATCH)
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_pitfall_36_shapes_may_change_from_step_to_step(name):
    def train(embedding, wrap):
        model = small_model(embedding)
        model.compile(wrap(optimizers.SGD(0.5)), "mse")
        RUNS[name](model)
        return model

    assert_trains_alike(train)


def test_pitfall_36_run_eagerly_equals_keras():
    trains_alike(lambda: optimizers.SGD(0.5), run_eagerly=True)


def test_pitfall_37_schedule_counts_steps_and_adam_counts_updates():
    schedule = lambda: optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    trains_alike(lambda: optimizers.Adam(schedule(), gradient_accumulation_steps=2), epochs=2)


def test_pitfall_38_hyper_parameters_reach_the_core():
    trains_alike(lambda: optimizers.Adam(0.02, beta_1=0.8, beta_2=0.9, epsilon=1e-3), **FAST)


def test_pitfall_39_frameworks_track_the_trigger_alone():
    """TensorFlow wraps lists and dicts that are set as attributes, and would save what is in them."""
    layer = one_table_layer()
    layer.build()
    assert [variable.name for variable in layer.variables] == ["trigger"]
    assert type(layer.feature_configs) is dict


def test_pitfall_40_clone_has_a_table_of_its_own():
    model = fit(our_model())
    clone = keras.models.clone_model(model)
    assert (len(table_of(clone)), len(table_of(model))) == (0, VOCABULARY)


def test_pitfall_40_deepcopy_of_a_model_copies_rows():
    model = fit(our_model())
    twin = copy.deepcopy(model)
    assert_same_weights(twin, model, tolerance=0)
    table_of(twin).clear()
    assert len(table_of(model)) == VOCABULARY


def test_pitfall_40_layers_of_one_name_do_not_share():
    first, second = (sok.DynamicEmbedding(DIM, name="same") for _ in range(2))
    first.get_table().find_or_insert([1])
    assert (len(first.get_table()), len(second.get_table())) == (1, 0)
