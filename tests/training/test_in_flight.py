"""JAX returns from a step before it has run. Whatever Python asks of tables comes after the steps that were started."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import ops, optimizers

import sok_keras as sok
from reference import (
    BACKEND,
    BATCH,
    FAST,
    ON_GPU,
    apply_gradients,
    batches,
    gradients,
    our_embedding,
    small_model,
    to_numpy,
)

if BACKEND != "jax":
    pytest.skip("the steps of the other backends have run when they return", allow_module_level=True)

import jax
import jax.numpy as jnp

DIM = 4
IDS = np.array([1, 2], "int32")


def slow_zero():
    """0, after some tenths of a second."""
    steps = 120_000 if ON_GPU else 60
    return 0 * jax.lax.fori_loop(0, steps, lambda _, a: jnp.tanh(a @ a), jnp.full((600, 600), 1e-3))[0, 0]


class Training:
    """A layer and a slow step of it, `rows -= 1`. The user has its state, not the variables."""

    def __init__(self, optimizer=None, **options):
        self.layer = sok.DynamicEmbedding(DIM, "zeros", name="layer", **options)
        self.layer.build()
        self.table = self.layer.get_table()
        self.optimizer = sok.OptimizerWrapper(optimizer or optimizers.SGD(1.0))
        self.optimizer.build(self.layer.trainable_variables)
        self.state = [self.layer.trigger.value], [v.value for v in self.optimizer.variables]
        self.step = jax.jit(self._step)
        jax.block_until_ready(self.step.lower(*self.state, IDS).compile())
        self.step(*self.state, IDS)  # a first one, so that the rows are there
        self.table.synchronize()

    def _step(self, trainable, state, ids):
        ids = ids + slow_zero().astype("int32")

        def loss(values):
            with keras.StatelessScope(state_mapping=list(zip(self.layer.trainable_variables, values, strict=True))):
                return ops.sum(self.layer(ids, training=True))

        return self.optimizer.stateless_apply(state, jax.grad(loss)(trainable), trainable)

    def start(self, ids=IDS):
        """Gives the new trigger, which is yet to come."""
        self.state = self.step(*self.state, np.asarray(ids, "int32"))
        trigger = self.state[0][0]
        assert not trigger.is_ready(), "else there is nothing to wait for"
        return trigger


def rows_of(table):
    return table._native.find(IDS.astype("int64"))[0]  # without waiting


READS = {
    "len": lambda layer, _: len(layer.get_table()),
    "find": lambda layer, _: layer.get_table().find([1]),
    "find_or_insert": lambda layer, _: layer.get_table().find_or_insert([1]),
    "export": lambda layer, _: layer.get_table().export(),
    "stats": lambda layer, _: layer.get_table().stats(),
    "synchronize": lambda layer, _: layer.get_table().synchronize(),
    "get_embedding_tables": lambda layer, _: layer.get_embedding_tables(),
    "dump": lambda layer, path: sok.dump(path / "d", layer),
    "weights_file": lambda layer, _: layer.save_own_variables({}),
    "assets": lambda layer, path: layer.save_assets(path),
    "deepcopy": lambda layer, _: copy.deepcopy(layer),
    "pickle": lambda layer, _: pickle.dumps(layer),
}
WRITES = {
    "assign": lambda layer, _: layer.get_table().assign([1, 2], np.full((2, DIM), 7.0)),
    "set_embedding_tables": lambda layer, _: layer.set_embedding_tables({"layer": (IDS, np.full((2, DIM), 7.0))}),
    "load_replaces": lambda layer, path: sok.load(path / "old", layer),
    "weights_file_is_loaded": lambda layer, path: layer.load_own_variables(pickle.loads((path / "w").read_bytes())),
}


@pytest.mark.parametrize("name", READS)
def test_reads_see_the_steps_that_were_started(name, tmp_path):
    training = Training()
    trigger = training.start()
    READS[name](training.layer, tmp_path)
    assert trigger.is_ready()
    np.testing.assert_array_equal(rows_of(training.table), np.full((2, DIM), -2.0))


@pytest.mark.parametrize("name", WRITES)
def test_writes_come_after_the_steps_that_were_started(name, tmp_path):
    training = Training()
    training.table.assign(IDS, np.full((2, DIM), 7.0))
    sok.dump(tmp_path / "old", training.layer)
    store = {}
    training.layer.save_own_variables(store)
    (tmp_path / "w").write_bytes(pickle.dumps(store))
    trigger = training.start()
    WRITES[name](training.layer, tmp_path)
    assert trigger.is_ready()
    np.testing.assert_array_equal(rows_of(training.table), np.full((2, DIM), 7.0))


@pytest.mark.parametrize(
    "remove", [lambda table: table.clear(), lambda table: table.erase(IDS)], ids=["clear", "erase"]
)
def test_rows_are_removed_after_the_steps_that_were_started(remove):
    training = Training()
    training.start()
    remove(training.table)
    assert len(training.table) == 0


def test_optimizer_is_bound_after_the_steps_of_the_one_before():
    """Else their update would find states that are no longer its own."""
    training = Training(optimizers.SGD(1.0, momentum=0.5))
    training.start()
    second = sok.OptimizerWrapper(optimizers.SGD(1.0, momentum=0.5))
    second.build(training.layer.trainable_variables)
    np.testing.assert_array_equal(training.table.find(IDS)[0], np.full((2, DIM), -2.5))
    assert not training.table.export(states=True).states["momentum"].any()


def test_frozen_layer_looks_up_after_the_steps_that_were_started():
    """Another model may still train its tables."""
    training = Training()
    layer = training.layer
    layer.trigger.assign(training.start())
    layer.trainable = False
    np.testing.assert_array_equal(to_numpy(layer(IDS)), np.full((2, DIM), -2.0))

    def lookup(trigger):
        with keras.StatelessScope(state_mapping=[(layer.trigger, trigger)]):
            return layer(IDS)

    # On a CPU it would do so anyway; elsewhere only data says so.
    traced = jax.make_jaxpr(lookup)(layer.trigger.value).jaxpr
    assert any(given is traced.invars[0] for equation in traced.eqns for given in equation.invars)


class DumpInTheMiddle(keras.callbacks.Callback):
    """By the user's own name of the model: `self.model` would fetch its variables from the trainer."""

    def __init__(self, model, path):
        super().__init__()
        self.its, self.path = model, path

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            sok.dump(self.path, self.its)


def test_dump_in_the_middle_of_an_epoch_is_that_of_its_step(tmp_path):
    def compiled():
        model = small_model(our_embedding())
        model.compile(sok.OptimizerWrapper(optimizers.Adam(0.02)), "mse", **FAST)
        return model

    (ids,), targets = batches()
    model, half = compiled(), compiled()
    model.fit(
        ids, targets, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[DumpInTheMiddle(model, tmp_path / "d")]
    )
    assert sok.load(tmp_path / "d", half).step == 2
    half.fit(ids[2 * BATCH :], targets[2 * BATCH :], batch_size=BATCH, shuffle=False, verbose=0)
    for mine, other in zip(half.layers[-1].weights, model.layers[-1].weights, strict=True):
        np.testing.assert_array_equal(to_numpy(mine), to_numpy(other))
    np.testing.assert_array_equal(*(m.layers[1].get_table().export().rows for m in (half, model)))


# ---- errors


told_by_jax = pytest.mark.skipif(ON_GPU, reason="what a GPU finds is no error of JAX's: test_gpu.py has it")


def assert_told(table, error, match):
    """By its own class, with JAX's as the cause; once, and the table goes on."""
    with pytest.raises(error, match=f"^{match}") as caught:
        table.find(IDS)
    assert type(caught.value) is error
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError | ValueError)
    assert f"{error.__name__}: " in str(caught.value.__cause__)
    table.find(IDS)


def test_weights_of_other_tables_are_noticed_though_they_are_yet_to_come():
    given, training = Training(), Training()
    training.layer.trigger.assign(given.start())
    with pytest.raises(sok.SokError, match="weights of other tables were set, without their rows"):
        training.table.find(IDS)
    np.testing.assert_array_equal(training.table.find(IDS)[0], np.full((2, DIM), -1.0))


@told_by_jax
def test_full_table_is_told_by_its_class():
    training = Training(max_capacity=2)
    training.layer.trigger.assign(training.start([1, 3]))
    assert_told(training.table, sok.TableFullError, "table `layer` is full")
    np.testing.assert_array_equal(rows_of(training.table), np.full((2, DIM), -1.0))
    training.state[0][0] = training.layer.trigger.value
    training.state = training.state[0], [v.value for v in training.optimizer.variables]
    training.start()
    np.testing.assert_array_equal(training.table.find(IDS)[0], np.full((2, DIM), -2.0))


@told_by_jax
def test_optimizer_that_was_replaced_is_told_by_its_class():
    training = Training(optimizers.SGD(1.0, momentum=0.5))
    sok.OptimizerWrapper(optimizers.SGD(1.0, momentum=0.5)).build(training.layer.trainable_variables)
    training.layer.trigger.assign(training.start())
    assert_told(training.table, sok.SokError, ".*bound to another optimizer")


def later(layer, call):
    """Sets the layer's trigger to what comes of `call(trigger)`, if anything."""
    layer.trigger.assign(jax.jit(lambda trigger: call(trigger + slow_zero()))(layer.trigger.value))


@told_by_jax
def test_id_outside_a_vocabulary_is_told_by_its_class():
    """Another table of the step only knows what JAX says."""
    layer, other = sok.DistributedEmbedding(sok.FeatureConfig("f", sok.TableConfig("t", 3, DIM))), our_embedding()
    layer.build()
    other.build()

    def call(trigger):
        with keras.StatelessScope(state_mapping=[(layer.trigger, trigger)]):
            return trigger + ops.sum(layer(np.array([5], "int32")))

    later(layer, call)
    other.trigger.assign(layer.trigger.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: id 5 of feature `f`"):
        other.get_table().find(IDS)
    other.get_table().find(IDS)
    assert_told(layer.get_tables()["t"], ValueError, "id 5 of feature `f` is outside table")


@told_by_jax
def test_gradient_that_is_applied_twice_is_told_by_its_class():
    layer = our_embedding()
    layer.build()
    optimizer = sok.OptimizerWrapper(optimizers.SGD(1.0))
    optimizer.build(layer.trainable_variables)
    (ticket,) = gradients(lambda: ops.sum(layer(IDS, training=True)), layer.trainable_variables)[0]
    apply_gradients(optimizer, [ticket], layer.trainable_variables)
    before = layer.get_table().export().rows
    state = [v.value for v in optimizer.variables]
    later(layer, lambda trigger: optimizer.stateless_apply(state, [ticket + 0 * trigger], [trigger])[0][0])
    assert_told(layer.get_table(), sok.TicketError, ".*push is gone")
    np.testing.assert_array_equal(layer.get_table().export().rows, before)
