"""Who makes rows: `training=True` at lookup; `training=None` the commit that applies a gradient; `training=False` nobody."""

import keras
import numpy as np
import pytest
from keras import ops, optimizers

import sok_keras as sok
from reference import BACKEND, DIM, apply_gradients, dense_layer, gradients, raises, to_numpy

IDS = np.array([[4, 7], [7, 9]], "int32")


def made(kind, **options):
    """A built layer of one table, and its table."""
    if kind == "dynamic":
        layer = sok.DynamicEmbedding(DIM, combiner="mean", seed=5, **options)
        layer.build()
        return layer, layer.get_table()
    config = sok.TableConfig("t", None, DIM, "uniform", seed=5, **options)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("f", config))
    layer.build()
    return layer, layer.get_tables()["t"]


def keys_of(table):
    return table.export().keys.tolist()


def step(layer, optimizer, ids, training=None, dense=None):
    """A hand-written step of the layer, and of a dense layer behind it."""
    variables = layer.trainable_variables + (dense.trainable_variables if dense else [])
    head = dense or (lambda rows: rows)
    found, _ = gradients(lambda: ops.sum(ops.square(head(layer(ids, training=training)) - 1.0)), variables)
    apply_gradients(optimizer, found, variables)


@pytest.fixture(params=["dynamic", "distributed"])
def kind(request):
    return request.param


def test_no_lookup_inserts_without_training(kind):
    layer, table = made(kind)
    layer(IDS)
    gradients(lambda: ops.sum(layer(IDS)), layer.trainable_variables)
    assert keys_of(table) == []


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch records outside of training too")
def test_a_model_in_evaluation_inserts_nothing_though_autograd_records():
    layer, table = made("dynamic")
    inputs = keras.Input((2,), dtype="int32")
    model = keras.Model(inputs, dense_layer()(layer(inputs)))
    model(IDS)
    model.eval()
    assert model(IDS).requires_grad
    assert keys_of(table) == []


def test_the_commit_makes_the_rows_and_counts_them(kind):
    layer, table = made(kind)
    optimizer = sok.OptimizerWrapper(optimizers.SGD(0.0))
    step(layer, optimizer, IDS)
    assert keys_of(table) == [4, 7, 9]
    step(layer, optimizer, np.array([[9, 3]], "int32"))
    stats = table.stats()
    assert (stats.size, stats.inserted, stats.hits, stats.dropped_gradients) == (4, 4, 1, 0)


@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_a_row_that_a_commit_makes_starts_from_its_first_value(kind, missing):
    layer, table = made(kind, missing=missing)
    answer = to_numpy(layer(IDS))
    assert answer.any() == (missing == "initial")
    step(layer, sok.OptimizerWrapper(optimizers.SGD(0.0)), IDS)
    _, twin = made(kind, missing=missing)
    np.testing.assert_array_equal(table.find([4, 7, 9])[0], twin.find_or_insert([4, 7, 9])[0])


def test_training_none_and_true_train_the_same_rows(kind):
    """With first values as answers, the step that makes a row is that of a lookup that inserts."""
    rows = []
    for training in (None, True):
        layer, table = made(kind)
        optimizer = sok.OptimizerWrapper(optimizers.Adam(0.1, global_clipnorm=0.5))
        for ids in (IDS, IDS[::-1] + 3, IDS):
            step(layer, optimizer, ids, training)
        rows.append(table.export(states=True))
    np.testing.assert_array_equal(rows[0].keys, rows[1].keys)
    np.testing.assert_array_equal(rows[0].rows, rows[1].rows)
    for name, states in rows[0].states.items():
        np.testing.assert_array_equal(states, rows[1].states[name])


def test_an_evaluation_drops_gradients_of_missing_rows(kind):
    layer, table = made(kind)
    step(layer, sok.OptimizerWrapper(optimizers.SGD(0.1)), IDS, training=False)
    assert keys_of(table) == [] and table.stats().dropped_gradients == 4


def test_accumulated_gradients_make_rows_too(kind):
    layer, table = made(kind)
    optimizer = sok.OptimizerWrapper(optimizers.SGD(0.1, gradient_accumulation_steps=2))
    step(layer, optimizer, IDS)
    first = table.find([4])[0]
    assert keys_of(table) == [4, 7, 9]
    step(layer, optimizer, np.array([[4, 5]], "int32"))
    assert keys_of(table) == [4, 5, 7, 9] and (table.find([4])[0] != first).any()


class WithoutTraining(keras.Model):
    """Its `call` takes no `training`, so that none reaches the layer, also in `fit`."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dense = layer, dense_layer()

    def call(self, inputs):
        return self.dense(self.layer(inputs))


def test_a_step_that_is_skipped_makes_no_rows(kind):
    layer, table = made(kind)
    model = WithoutTraining(layer)
    model.compile(optimizers.LossScaleOptimizer(sok.OptimizerWrapper(optimizers.SGD(0.1))), "mse")
    model.fit(IDS, np.full((2, 2), np.inf), verbose=0)
    assert keys_of(table) == []
    model.fit(IDS, np.zeros((2, 2)), verbose=0)
    assert keys_of(table) == [4, 7, 9]


@pytest.mark.parametrize("traced", [False, True] if BACKEND == "tensorflow" else [False])
def test_a_refusal_raises_in_the_commit_before_anything_changes(kind, traced):
    layer, table = made(kind, max_capacity=3)
    dense = dense_layer()
    dense.build((None, DIM))
    optimizer = sok.OptimizerWrapper(optimizers.Adam(0.1))
    step(layer, optimizer, IDS, dense=dense)
    run = step
    if traced:
        import tensorflow as tf

        run = tf.function(step)
    before, weights = table.export(states=True), [to_numpy(v) for v in dense.weights + optimizer.variables]
    with raises(sok.TableFullError, "`?(layer/)?.*` is full: no room for 1 of the new keys", table):
        run(layer, optimizer, np.array([[4, 100]], "int32"), dense=dense)
    after = table.export(states=True)
    np.testing.assert_array_equal(after.keys, before.keys)
    np.testing.assert_array_equal(after.rows, before.rows)
    for value, variable in zip(weights, dense.weights + optimizer.variables, strict=True):
        np.testing.assert_array_equal(to_numpy(variable), value)
    run(layer, optimizer, IDS, dense=dense)
    assert (table.export().rows != before.rows).any()


def test_what_does_not_fit_is_refused_and_its_gradients_are_dropped(kind):
    layer, table = made(kind, max_capacity=2, check_mode="count")
    step(layer, sok.OptimizerWrapper(optimizers.SGD(0.1)), IDS)
    stats = table.stats()
    assert keys_of(table) == [4, 7]
    assert (stats.inserted, stats.refused, stats.dropped_gradients) == (2, 1, 1)
