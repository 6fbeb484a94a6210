"""After an error in a step a model is as it was before that step, and trains on: as if the batch had not been there."""

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers

import sok_keras as sok
from reference import BACKEND, FAST, ON_GPU, to_numpy

if ON_GPU:
    pytest.skip("a GPU tells errors a step late: test_gpu.py has that", allow_module_level=True)

BATCH, STEPS, BAD, IDS = 8, 5, 3, 10
ERRORS = {"full": sok.TableFullError, "outside": ValueError, "ticket": sok.TicketError}


def told(error):
    """TensorFlow knows no classes of ours: its own names them in its message."""
    if BACKEND != "tensorflow":
        return pytest.raises(error)
    import tensorflow as tf

    return pytest.raises((error, tf.errors.OpError), match=f"{error.__name__}|is outside|is full")


def features(bad=None):
    """Ids of two features over some batches, one of which has an id that is one too many, or outside; and targets."""
    random = np.random.default_rng(3)
    ids = [random.integers(0, IDS, (STEPS * BATCH, 2)).astype("int32") for _ in range(2)]
    for feature in ids:
        feature[:BATCH].flat[:IDS] = np.arange(IDS)  # all of them are met in the first batch
    if bad is not None:
        ids[bad][BAD * BATCH + 1, 0] = IDS + 1
    return ids, random.normal(size=(STEPS * BATCH, 1)).astype("float32")


def steps(data, start, end=None):
    ids, targets = data
    part = slice(start * BATCH, None if end is None else end * BATCH)
    return [feature[part] for feature in ids], targets[part]


def embedding(kind, name):
    if kind == "outside":
        config = sok.TableConfig(name, IDS, 4, initializer=keras.initializers.RandomUniform(seed=1))
        return sok.DistributedEmbedding(sok.FeatureConfig("f", config, input_shape=(BATCH, 2), output_shape=(BATCH, 4)))
    room = {"max_capacity": IDS, "check_mode": "raise"} if kind == "full" else {}
    return sok.DynamicEmbedding(4, keras.initializers.RandomUniform(seed=1), combiner="sum", name=name, **room)


def built(kinds=("free", "full"), optimizer=None, frozen=False, **options):
    """Two embeddings, batch normalisation, dropout, and a dense layer."""
    keras.utils.set_random_seed(5)
    inputs = [keras.Input((2,), batch_size=None, dtype="int32") for _ in kinds]
    embeddings = [embedding(kind, f"e{number}") for number, kind in enumerate(kinds)]
    if frozen:
        embeddings[-1].trainable = False
    rows = layers.Concatenate()([layer(i) for layer, i in zip(embeddings, inputs, strict=True)])
    hidden = layers.Dropout(0.3, seed=2)(layers.BatchNormalization()(layers.Dense(3)(rows)))
    model = keras.Model(inputs, layers.Dense(1, dtype="float32")(hidden))
    wrapped = sok.OptimizerWrapper(optimizer or optimizers.Adam(0.05))
    model.compile(wrapped, "mse", metrics=["mae"], **{**FAST, **options})
    return model


def tables_of(model):
    found = [layer for layer in model.layers if hasattr(layer, "trigger")]
    return [table for layer in found for table in layer._core.tables]


def snapshot(model):
    """Variables, and of each table its keys, rows and states."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    dense = {f"{n} {v.path}": to_numpy(v.value) for n, v in enumerate(variables) if not hasattr(v, "sok_core")}
    return dense, [table.export(states=True) for table in tables_of(model)]


def assert_same(ours, theirs, *, forward=True):
    """`forward`: also what a forward pass changes."""
    for (name, mine), other in zip(ours[0].items(), theirs[0].values(), strict=True):
        if forward or not any(part in name for part in ("moving_", "seed", "total", "count")):
            np.testing.assert_array_equal(mine, other, err_msg=name)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(mine.keys, other.keys)
        np.testing.assert_array_equal(mine.rows, other.rows)
        for state in other.states:
            np.testing.assert_array_equal(mine.states[state], other.states[state])


def fit(model, data, start, end=None, **options):
    inputs, targets = steps(data, start, end)
    model.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0, **options)


def without_metrics(snapshot):
    """What a call counts in metrics is of the call."""
    variables, tables = snapshot
    return {n: v for n, v in variables.items() if not n.endswith(("total", "count"))}, tables


def assert_fit_fails_and_goes_on(make, bad, error):
    data, model, reference = features(bad), make(), make()
    with told(error):
        fit(model, data, 0)
    fit(reference, data, 0, BAD)
    assert_same(snapshot(model), snapshot(reference), forward=BACKEND == "jax")
    if BACKEND == "jax":
        fit(model, data, BAD + 1)
        fit(reference, data, BAD + 1)
        assert_same(snapshot(model), snapshot(reference))


def assert_bad_step_changes_nothing(model, error=ValueError):
    data = features(1)
    fit(model, data, 0, BAD)
    before = without_metrics(snapshot(model))
    with told(error):
        fit(model, data, BAD)
    assert_same(without_metrics(snapshot(model)), before, forward=BACKEND == "jax")
    fit(model, data, BAD + 1)


@pytest.mark.parametrize(("bad", "kind"), [(0, "full"), (1, "outside")])
def test_fit_goes_on_after_a_bad_batch_as_if_it_had_not_been_there(kind, bad):
    """The other layer's lookup, before or after, does not matter."""
    kinds = ("free", kind) if bad else (kind, "free")
    assert_fit_fails_and_goes_on(lambda: built(kinds), bad, ERRORS[kind])


CALLS = {
    "fit": lambda model, x, y: model.fit(x, y, batch_size=BATCH, verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(x, y, batch_size=BATCH, verbose=0),
    "predict": lambda model, x, y: model.predict(x, batch_size=BATCH, verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x),
}


@pytest.fixture(scope="module")
def model_of_calls():
    return built(("free", "outside"))


@pytest.mark.parametrize("call", CALLS)
def test_an_id_outside_is_told_once_and_changes_nothing(model_of_calls, call):
    model, run = model_of_calls, CALLS[call]
    good, bad = steps(features(), BAD, BAD + 1), steps(features(1), BAD, BAD + 1)
    run(model, *good)
    before = without_metrics(snapshot(model))
    with told(ValueError):
        run(model, *bad)
    assert_same(without_metrics(snapshot(model)), before, forward=BACKEND == "jax")
    run(model, *good)


def test_rows_that_an_earlier_lookup_of_the_step_inserted_stay_without_states():
    """They are as they would be when the next batch that has them comes."""
    data, model = features(1), built(("free", "outside"))
    data[0][0][BAD * BATCH, 0] = 77
    with told(ValueError):
        fit(model, data, 0)
    untrained, (table, _) = built(("free", "outside")), tables_of(model)
    first, _ = tables_of(untrained)[0].find_or_insert([77])
    np.testing.assert_array_equal(table.find([77])[0], first)


def test_error_of_a_frozen_layer_leaves_the_others_as_they_were():
    assert_bad_step_changes_nothing(built(("free", "outside"), frozen=True))


def test_accumulated_and_clipped_gradients_are_as_before_the_bad_step():
    adam = optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1)
    assert_bad_step_changes_nothing(built(("free", "outside"), adam))


def test_loss_scale_is_as_before_the_bad_step():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert_bad_step_changes_nothing(built(("free", "outside")))
    finally:
        keras.config.set_dtype_policy("float32")


class Strange(sok.OptimizerWrapper):
    """Names a push that never was."""

    def apply(self, grads, trainable_variables=None):
        strange = np.zeros((64, 2), "float32")
        strange[63] = 2.0**-20 * np.array([1.0, 0.9])
        return super().apply([g + strange if g.shape == (64, 2) else g for g in grads], trainable_variables)


def test_error_of_a_ticket_changes_neither_rows_nor_variables():
    data, model = features(), built(("free", "free"))
    fit(model, data, 0, 2)
    before = snapshot(model)[1]
    dense = [to_numpy(v) for v in model.trainable_variables if not hasattr(v, "sok_core")]
    model.compile(Strange(optimizers.SGD(0.1)), "mse", **FAST)
    with told(sok.TicketError):
        fit(model, data, 2)
    for mine, other in zip(tables_of(model), before, strict=True):
        np.testing.assert_array_equal(mine.export().rows, other.rows)
    for mine, other in zip((v for v in model.trainable_variables if not hasattr(v, "sok_core")), dense, strict=True):
        np.testing.assert_array_equal(to_numpy(mine), other)
    model.compile(sok.OptimizerWrapper(optimizers.SGD(0.1)), "mse", **FAST)
    fit(model, data, 2)


RUNS = {
    "jax": [{"steps_per_execution": 2}, {"run_eagerly": True}],
    "tensorflow": [{"run_eagerly": False}],
    "torch": [{"run_eagerly": True}],
}


@pytest.mark.parametrize("options", RUNS[BACKEND], ids=str)
def test_fit_goes_on_however_it_is_run(options):
    assert_bad_step_changes_nothing(built(("free", "outside"), **options))


# ---- what is JAX's alone

jax_alone = pytest.mark.skipif(BACKEND != "jax", reason="a compiled step of JAX owns the weights meanwhile")


class Trains(keras.Model):
    """A model of a user's own, with a step of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = embedding("full", "mine"), layers.Dense(1)

    def call(self, inputs, training=None):
        return self.dense(self.embedding(inputs[0], training=training))

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "mine": ops.sum(data[0][0])}, state


@jax_alone
def test_a_step_of_the_users_own_is_guarded_too():
    def make():
        keras.utils.set_random_seed(5)
        model = Trains()
        model.compile(sok.OptimizerWrapper(optimizers.Adam(0.05)), "mse")
        return model

    data, model, reference = features(0), make(), make()
    with told(sok.TableFullError):
        fit(model, data, 0)
    fit(reference, data, 0, BAD)
    for mine, other in zip(model.variables, reference.variables, strict=True):
        if not hasattr(mine, "sok_core"):
            np.testing.assert_array_equal(to_numpy(mine), to_numpy(other))
    (mine,), (other,) = ([m.embedding.get_table().export(states=True)] for m in (model, reference))
    np.testing.assert_array_equal(mine.rows, other.rows)


@jax_alone
def test_error_of_the_last_step_is_told_at_the_end_of_fit_and_only_there():
    data, model = features(1), built(("free", "outside"))
    with told(ValueError):
        fit(model, data, BAD, BAD + 1)
    fit(model, features(), 0, 1)


class Late(layers.Layer):
    """Gives its ids long after its rows are known."""

    def call(self, rows, ids):
        import jax

        start = jax.lax.stop_gradient(ops.zeros((512, 512)) + ops.sum(rows))
        product = jax.lax.fori_loop(0, 200, lambda _, product: product @ product, start)
        return ids + ops.cast(0 * ops.max(ops.nan_to_num(product, posinf=0.0, neginf=0.0)), ids.dtype)


@jax_alone
def test_no_error_of_a_failed_step_is_left_for_the_next_fit():
    data = features(0)
    data[0][1][...] = data[0][0]
    early, late = embedding("outside", "early"), embedding("outside", "late")
    inputs = [keras.Input((2,), batch_size=None, dtype="int32") for _ in range(2)]
    rows = early(inputs[0])
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([rows, late(Late()(rows, inputs[1]))])))
    model.compile(sok.OptimizerWrapper(optimizers.SGD(0.1)), "mse")
    with told(ValueError):
        fit(model, data, BAD)
    fit(model, data, 0, 2)


@jax_alone
def test_models_without_tables_are_left_alone():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    from sok_keras.backend import jax_trainer

    assert model not in jax_trainer._scopes


@jax_alone
@pytest.mark.parametrize("name", ["_make_function", "_get_jax_state", "jax_state_sync", "fit", "predict_on_batch"])
def test_names_of_the_trainer_that_we_need_are_there(name):
    from keras.src.backend.jax.trainer import JAXTrainer

    assert hasattr(JAXTrainer, name), (
        f"Keras' trainer for JAX has no `{name}` any more: sok_keras/backend/jax_trainer.py wraps it, so that a step that fails "
        "loses no weights. Find what took its place"
    )


@jax_alone
def test_state_of_the_trainer_has_the_names_that_we_write():
    model = built(("free",))
    fit(model, steps_of_one := (features()[0][:1], features()[1]), 0, 1)
    assert len(steps_of_one) == 2
    missing = {"_jax_state", "_jax_state_synced"} - vars(model).keys()
    assert not missing, (
        f"Keras' trainer for JAX keeps no {missing} any more; `jax_trainer._keep` writes them for `jax_state_sync`"
    )


@jax_alone
def test_a_trainer_without_those_names_is_warned_of():
    from sok_keras.backend import jax_trainer

    with pytest.warns(UserWarning, match="has no _make_function, .*jax_state_sync"):
        jax_trainer.guard_trainer(type("Trainer", (), {}))
