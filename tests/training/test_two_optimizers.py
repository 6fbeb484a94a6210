"""Two optimizers in one model: each owns its layers."""

import keras
import numpy as np
import pytest
from keras import ops, optimizers

import sok_keras as sok
from dumped import contents_of
from reference import BACKEND, apply_gradients, gradients, raises, to_numpy

DIM, STEPS = 4, 4
IDS = np.array([[1, 2, 2], [5, 1, 9]], "int32")


def layers():
    return [sok.DynamicEmbedding(DIM, "normal", seed=seed, name=name) for seed, name in ((1, "wide"), (2, "deep"))]


def wrappers():
    return [sok.OptimizerWrapper(optimizers.Ftrl(0.1)), sok.OptimizerWrapper(optimizers.Adam(0.1))]


def step(layer_optimizers):
    """A step of layers, each with its own optimizer: their losses do not depend on each other."""
    every = [layer for layer, _ in layer_optimizers]
    variables = [layer.trainable_variables[0] for layer in every]
    found, _ = gradients(lambda: sum(ops.sum(ops.square(layer(IDS, training=True))) for layer in every), variables)
    for (layer, optimizer), gradient in zip(layer_optimizers, found, strict=True):
        apply_gradients(optimizer, [gradient], layer.trainable_variables)


def trained_alone(number):
    layer, optimizer = layers()[number], wrappers()[number]
    layer.build()
    for _ in range(STEPS):
        step([(layer, optimizer)])
    return contents_of(layer.get_table())


@pytest.mark.parametrize("first", ["own", "all", "all, and a step"])
def test_each_optimizer_trains_its_layer_as_if_alone(first):
    """Keras' PyTorch trainer builds the compiled optimizer with all variables, before or after the other one."""
    both, (ftrl, adam) = layers(), wrappers()
    for layer in both:
        layer.build()
    variables = [layer.trainable_variables[0] for layer in both]
    if first != "own":
        adam.build(variables)
    wide, deep = both
    for _ in range(STEPS):
        pairs = [(deep, adam), (wide, ftrl)] if first == "all, and a step" else [(wide, ftrl), (deep, adam)]
        step(pairs)
    for number, layer in enumerate(both):
        expected, found = trained_alone(number), contents_of(layer.get_table())
        assert set(found) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


def test_an_optimizer_whose_table_another_one_took_is_refused_when_it_has_its_gradient():
    (wide, _), (ftrl, adam) = layers(), wrappers()
    wide.build()
    adam.build(wide.trainable_variables)
    step([(wide, ftrl)])
    with raises(sok.SokError, "have been bound to another optimizer since"):
        step([(wide, adam)])


def wide_and_deep():
    inputs = keras.Input((3,), dtype="int32")
    rows = [layer(inputs) for layer in layers()]
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(ops.concatenate(rows, -1))
    model = keras.Model(inputs, outputs)
    model.wide_optimizer, compiled = wrappers()
    model.compile(compiled, "mse")
    return model


def train(model, steps):
    wide = model.get_layer("wide").trainable_variables
    others = [v for v in model.trainable_variables if all(v is not own for own in wide)]
    for _ in range(steps):
        variables = [*wide, *others]
        found, _ = gradients(lambda: ops.sum(ops.square(model(IDS, training=True) - 1.0)), variables)
        apply_gradients(model.wide_optimizer, found[: len(wide)], wide)
        apply_gradients(model.optimizer, found[len(wide) :], others)


def all_of(model):
    dense = model.variables + model.optimizer.variables + model.wide_optimizer.variables
    tables = [contents_of(model.get_layer(name).get_table()) for name in ("wide", "deep")]
    rows = [values for table in tables for values in table.values()]
    return rows + [to_numpy(v) for v in dense if not v.path.endswith("trigger")]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_dump_resumes_both_optimizers(tmp_path, steps_before):
    model = wide_and_deep()
    train(model, 2)
    sok.dump(tmp_path, model)
    resumed = wide_and_deep()
    train(resumed, steps_before)
    sok.load(tmp_path, resumed)
    for each in (model, resumed):
        train(each, 2)
    for expected, found in zip(all_of(model), all_of(resumed), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_optimizer_that_the_model_does_not_have_is_named(tmp_path):
    model = wide_and_deep()
    train(model, 1)
    sok.dump(tmp_path, model)
    resumed = wide_and_deep()
    del resumed.wide_optimizer
    with pytest.raises(sok.DumpMismatchError, match=r"expected `model\.wide_optimizer`"):
        sok.load(tmp_path, resumed)
    sok.load(tmp_path, resumed, states=False)


@pytest.mark.skipif(BACKEND != "torch", reason="a `train_step` of PyTorch")
def test_a_train_step_with_two_optimizers():
    class WideAndDeep(keras.Model):
        def __init__(self):
            super().__init__()
            self.wide, self.deep = layers()
            self.dense = keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.dense(ops.concatenate([self.wide(x, training=training), self.deep(x, training=training)], -1))[
                :, 0
            ]

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            of_wide = self.wide.trainable_variables
            others = [v for v in self.trainable_variables if all(v is not own for own in of_wide)]
            self.wide_optimizer.apply([v.value.grad for v in of_wide], of_wide)
            self.optimizer.apply([v.value.grad for v in others], others)
            return {"own_loss": loss}

    model = WideAndDeep()
    model.wide_optimizer, compiled = wrappers()
    model.compile(compiled, "mse")
    losses = model.fit(IDS, np.ones((2, 1)), epochs=9, verbose=0).history["own_loss"]
    assert losses[-1] < losses[0]
    states = [set(layer.get_table().export(states=True).states) for layer in (model.wide, model.deep)]
    assert states == [{"accumulator", "linear"}, {"momentum", "velocity"}]


def of_many(optimizer):
    model_of = keras.Sequential(
        [keras.Input((2,), dtype="int32"), sok.DynamicEmbedding(DIM, combiner="sum", seed=1, name="emb")]
    )
    model_of.add(keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=2), name="head"))
    model_of.compile(optimizer, "mse")
    for _ in range(STEPS):
        model_of.train_on_batch(np.array([[1, 2], [5, 1]], "int32"), np.ones((2, 1)))
    return contents_of(model_of.layers[0].get_table()), [
        to_numpy(variable) for variable in model_of.layers[1].trainable_variables
    ]


def test_keras_multi_optimizer_has_a_wrapper_for_tables():
    chosen = optimizers.OptimizerMap(default_optimizer=optimizers.Adam(0.1))
    chosen[".*emb.*"] = sok.OptimizerWrapper(optimizers.Adam(0.1))
    (rows, dense), (expected_rows, expected) = map(
        of_many, (optimizers.MultiOptimizer(chosen), sok.OptimizerWrapper(optimizers.Adam(0.1)))
    )
    assert rows.keys() == expected_rows.keys() and rows["keys"].tolist() == [1, 2, 5]
    for name, array in rows.items():
        np.testing.assert_allclose(array, expected_rows[name], rtol=1e-6)
    for one, other in zip(dense, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("wrong", [None, 3, "multi"])
def test_the_wrapper_takes_one_optimizer(wrong):
    if wrong == "multi":
        if not hasattr(optimizers, "MultiOptimizer"):
            pytest.skip("Keras has no MultiOptimizer")
        wrong = optimizers.MultiOptimizer(optimizers.OptimizerMap(default_optimizer=optimizers.SGD()))
    with pytest.raises(ValueError, match="`inner_optimizer` must be|Could not interpret optimizer"):
        sok.OptimizerWrapper(wrong)
