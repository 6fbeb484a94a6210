"""Tables with an optimizer of their own."""

import keras
import numpy as np
import pytest
from keras import optimizers

import sok_keras as sok
from one_table import train_step
from reference import FAST

DIM = 3
IDS = np.array([[1, 2], [2, 5], [7, 1]], "int32")


def decaying():
    return optimizers.schedules.ExponentialDecay(0.4, 1, 0.7)


# Of each table, by name; None is the model's, Adam.
OPTIMIZERS = {
    "own": lambda: optimizers.SGD(decaying(), momentum=0.9, weight_decay=0.01),
    "rows": lambda: sok.optimizers.RowWiseAdagrad(0.2, clipvalue=0.5),
    "model": lambda: None,
}


def layer_of(optimizer_of, trainable=True):
    """A layer with a table for each name. `optimizer_of`: what makes each optimizer, by name."""
    features = {
        name: sok.FeatureConfig(
            name, sok.TableConfig(name, None, DIM, optimizer=make(), seed=number, combiner="sum", trainable=trainable)
        )
        for number, (name, make) in enumerate(optimizer_of.items())
    }
    return sok.DistributedEmbedding(features)


def loss_of(layer, names, scale=1.0):
    """A loss whose gradients differ from column to column, and a feature's from another's."""

    def loss():
        rows = layer({name: IDS + number for number, name in enumerate(names)}, training=True)
        weights = keras.ops.convert_to_tensor(scale * np.arange(1, DIM + 1, dtype="float32"))
        return sum(
            keras.ops.sum(keras.ops.sin(rows[name] * (2 + number)) * weights) for number, name in enumerate(names)
        )

    return loss


def contents(table):
    exported = table.export(states=True)
    order = np.argsort(exported.keys)
    return [
        exported.keys[order],
        exported.rows[order],
        *(exported.states[name][order] for name in sorted(exported.states)),
    ]


def assert_same(table, other):
    for one, others in zip(contents(table), contents(other), strict=True):
        np.testing.assert_array_equal(one, others)


def test_each_table_is_updated_as_in_a_layer_of_its_own():
    names = list(OPTIMIZERS)
    layer = layer_of(OPTIMIZERS)
    wrapper = sok.OptimizerWrapper(optimizers.Adam(0.05))
    for _ in range(4):
        train_step(layer, wrapper, loss_of(layer, names))
    for number, name in enumerate(names):
        alone = layer_of({each: (lambda: None) for each in names})
        of_table = sok.OptimizerWrapper(OPTIMIZERS[name]() or optimizers.Adam(0.05))
        for _ in range(4):
            train_step(alone, of_table, loss_of(alone, names))
        assert_same(layer.get_tables()[name], alone.get_tables()[name])
        assert len(contents(layer.get_tables()[name])) == 2 + [1, 1, 2][number]


def test_the_models_clipping_counts_its_tables_alone():
    names = list(OPTIMIZERS)
    layer, alone = layer_of(OPTIMIZERS), layer_of({"model": lambda: None})
    for each, of_layer in ((layer, names), (alone, ["model"])):
        wrapper = sok.OptimizerWrapper(optimizers.SGD(0.1, global_clipnorm=0.5))

        def loss(each=each, of_layer=of_layer):
            rows = each({name: IDS for name in of_layer}, training=True)
            return sum(keras.ops.sum(rows[name] * 3.0) for name in of_layer)

        train_step(each, wrapper, loss)
    # The first values of the third table and of the first one differ.
    first = [
        sok.DistributedEmbedding({"model": sok.FeatureConfig("model", sok.TableConfig("model", None, DIM, seed=seed))})
        for seed in (2, 0)
    ]
    keys = np.unique(IDS)
    change = [
        trained.get_tables()["model"].find(keys)[0] - new.get_tables()["model"].find(keys)[0]
        for trained, new in zip((layer, alone), first, strict=True)
    ]
    np.testing.assert_allclose(change[0], change[1], atol=1e-6)
    assert np.abs(change[0]).max() > 1e-3


def test_accumulated_gradients_are_one_step():
    names = ["own", "model"]
    chosen = {name: OPTIMIZERS[name] for name in names}
    layer, twice = layer_of(chosen), layer_of(chosen)
    wrapper = sok.OptimizerWrapper(optimizers.Adam(0.05, gradient_accumulation_steps=2))
    of_twice = sok.OptimizerWrapper(optimizers.Adam(0.05))
    for _ in range(2):
        for _ in range(2):
            train_step(layer, wrapper, loss_of(layer, names))
        train_step(twice, of_twice, loss_of(twice, names))
    for name in names:
        for one, other in zip(contents(layer.get_tables()[name]), contents(twice.get_tables()[name]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def make_model(optimizer=None):
    keras.utils.set_random_seed(1)
    ids = keras.Input((2,), dtype="int32")
    shared = optimizers.Nadam(decaying()) if optimizer is None else optimizer
    tables = [
        sok.TableConfig(name, None, DIM, seed=number, optimizer=own)
        for number, (name, own) in enumerate((("a", shared), ("b", shared), ("c", None)))
    ]
    features = {table.name: sok.FeatureConfig(table.name, table) for table in tables}
    rows = sok.DistributedEmbedding(features, name="tables")({name: ids for name in features})
    alone = sok.DynamicEmbedding(DIM, combiner="sum", optimizer="adagrad", seed=4, name="alone")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.ops.concatenate([*rows.values(), alone], axis=-1)))
    model.compile(sok.OptimizerWrapper(optimizers.Adam(0.05)), "mse", **FAST)
    return model


def tables_of(model):
    return [*model.get_layer("tables").get_tables().values(), model.get_layer("alone").get_table()]


def train(model, steps=3):
    return [float(model.train_on_batch(IDS, np.ones((3, 1)))) for _ in range(steps)]


def test_a_saved_model_goes_on_with_the_optimizers_of_its_tables(tmp_path):
    model = make_model()
    train(model)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    losses = train(model), train(again)
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for one, other in zip(tables_of(model), tables_of(again), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("trains_first", [False, True])
def test_a_dump_is_loaded_with_the_steps_of_the_optimizers(tmp_path, trains_first):
    model, again = make_model(), make_model()
    train(model)
    sok.dump(tmp_path / "d", model)
    entries = {table.name: table.optimizer for table in sok.read_manifest(tmp_path / "d").tables}
    assert entries == {"tables/a": "nadam", "tables/b": "nadam", "tables/c": "adam", "alone": "adagrad"}
    if trains_first:
        train(again, 1)
    sok.load(tmp_path / "d", again)
    np.testing.assert_allclose(train(model), train(again), rtol=1e-6)
    for one, other in zip(tables_of(model), tables_of(again), strict=True):
        assert_same(one, other)


def test_a_dump_with_states_of_another_optimizer_is_refused(tmp_path):
    model, other = make_model(), make_model("sgd")
    train(model, 1)
    sok.dump(tmp_path / "d", model)
    with pytest.raises(sok.DumpMismatchError):
        sok.load(tmp_path / "d", other)


def test_fit_updates_tables_by_their_own_optimizers():
    models = [make_model(), make_model()]
    for model in models:
        model.fit(np.tile(IDS, (4, 1)), np.ones((12, 1)), batch_size=3, epochs=2, shuffle=False, verbose=0)
    step = make_model()
    for _ in range(8):
        train(step, 1)
    for one, other, third in zip(*(tables_of(model) for model in (*models, step)), strict=True):
        assert_same(one, other)
        for each, others in zip(contents(one), contents(third), strict=True):
            np.testing.assert_allclose(each, others, rtol=1e-5)


def test_the_models_optimizer_may_have_no_formula():
    class Signs(optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))

    names = ["own", "model"]
    layer = layer_of({name: OPTIMIZERS[name] for name in names})
    twin = layer_of({name: (lambda: None) for name in names})
    wrappers = [sok.OptimizerWrapper(Signs(0.25)), sok.OptimizerWrapper(OPTIMIZERS["own"]())]
    first = layer.get_tables()["model"].find(np.unique(IDS + 1))[0]
    for _ in range(2):
        for each, wrapper in zip((layer, twin), wrappers, strict=True):
            train_step(each, wrapper, loss_of(each, names))
    assert_same(layer.get_tables()["own"], twin.get_tables()["own"])
    change = layer.get_tables()["model"].find(np.unique(IDS + 1))[0] - first
    np.testing.assert_allclose(change, np.round(change / 0.25) * 0.25, atol=1e-6)
    assert np.abs(change).max() > 0.2


def test_an_optimizer_of_two_layers_is_refused():
    shared = optimizers.SGD(0.1)
    layers = [sok.DynamicEmbedding(DIM, optimizer=shared) for _ in range(2)]
    for layer in layers:
        layer.build()
    with pytest.raises(ValueError, match="not of several layers"):
        sok.OptimizerWrapper("adam").build([layer.trigger for layer in layers])
    with pytest.raises(ValueError, match="or also the model's"):
        sok.OptimizerWrapper(shared).build([layers[0].trigger])


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (optimizers.Adam(global_clipnorm=1.0), "`global_clipnorm` must be set in the model's optimizer"),
        (optimizers.Adam(gradient_accumulation_steps=2), "`gradient_accumulation_steps` must be set"),
        (optimizers.Adam(use_ema=True), "`use_ema` must be set"),
        (sok.OptimizerWrapper("adam"), "Received: optimizer=OptimizerWrapper"),
        (optimizers.Muon(), "Received: optimizer=Muon"),
        ("no optimizer", "no optimizer"),
    ],
)
def test_optimizers_that_a_table_cannot_have_are_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        sok.TableConfig("t", None, DIM, optimizer=optimizer)
    with pytest.raises(ValueError, match=message):
        sok.DynamicEmbedding(DIM, optimizer=optimizer)
