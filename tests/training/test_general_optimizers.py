"""An optimizer that the core has no formula for updates rows by its own `update_step`, as it updates a dense variable."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers
from test_formulas import (
    AROUND,
    NUM_KEYS,
    apply_of,
    assert_rows_move_as_variables,
    digest_of,
    normal,
    push_of,
    tables_of,
    threads,  # noqa: F401 (a fixture)
)

import sok_keras as sok
from reference import (
    BACKEND,
    FAST,
    apply_gradients,
    assert_close,
    assert_trains_alike,
    dense_layer,
    fit,
    fitted,
    our_embedding,
    reference_embedding,
    rows_of,
    small_model,
    table_of,
    to_numpy,
)


@keras.saving.register_keras_serializable(package="tests")
class TwoStates(optimizers.Optimizer):
    """A sum of absolute values that starts above 0, and a momentum."""

    def __init__(self, learning_rate=0.05, decay_of_momentum=0.7, first_sum=0.25, name="two_states", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.decay_of_momentum = decay_of_momentum
        self.first_sum = first_sum

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        constant = keras.initializers.Constant(self.first_sum)
        self.sums = self.add_optimizer_variables(variables, "sum", initializer=constant)
        self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        number = self._get_variable_index(variable)
        momentum, total = self.momentums[number], self.sums[number]
        rate, gradient = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        self.assign(momentum, self.decay_of_momentum * momentum + gradient)
        self.assign_add(total, ops.abs(gradient))
        self.assign_sub(variable, rate * momentum / ops.sqrt(total))

    def get_config(self):
        return {**super().get_config(), "decay_of_momentum": self.decay_of_momentum, "first_sum": self.first_sum}


@keras.saving.register_keras_serializable(package="tests")
class Renamed(TwoStates):
    """A class with the same states. It might have another formula."""


@keras.saving.register_keras_serializable(package="tests")
class OfIterations(optimizers.Optimizer):
    """The step shrinks with the number of updates. There is no state, and the variable is assigned by itself."""

    def update_step(self, gradient, variable, learning_rate):
        count = ops.cast(self.iterations + 1, variable.dtype)
        variable.assign(variable - ops.cast(learning_rate, variable.dtype) * gradient / ops.sqrt(count))


@keras.saving.register_keras_serializable(package="tests")
class OwnAdam(optimizers.Adam):
    """A subclass of an optimizer whose formula the core has. It might have another one."""


RULES = {
    "two_states": functools.partial(TwoStates, 0.05, decay_of_momentum=0.6, first_sum=0.5),
    "of_iterations": functools.partial(OfIterations, 0.3),
    "own_adam": functools.partial(OwnAdam, 0.02, beta_1=0.8, beta_2=0.95, epsilon=1e-3, amsgrad=True),
}
SCHEDULE_FREE = getattr(optimizers, "ScheduleFreeAdamW", None)
# A state starts at the row itself. On other backends Keras reads it after it has changed it.
if BACKEND == "jax" and SCHEDULE_FREE is not None:
    schedule_free = functools.partial(SCHEDULE_FREE, 0.05, beta_1=0.8, beta_2=0.95, epsilon=1e-3, warmup_steps=5)
    RULES |= {
        "schedule_free": schedule_free,
        "schedule_free_decay": functools.partial(schedule_free, weight_decay=0.3),
    }


@pytest.mark.parametrize("name", RULES)
def test_twenty_steps_equal_those_of_a_dense_variable(name):
    assert_rows_move_as_variables(RULES[name])


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["two_states", "of_iterations"])
def test_clipping_decay_and_accumulation_equal_keras(name, around):
    steps = 11 if "accumulation" in around else 7  # of eleven the last two are still on their way to an update
    assert_rows_move_as_variables(functools.partial(RULES[name], **AROUND[around]), steps)


def test_learning_rate_of_a_schedule_is_read_before_the_step():
    schedule = optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.5, 0.1, 0.02])
    assert_rows_move_as_variables(lambda: TwoStates(schedule), steps=8)


@pytest.mark.parametrize("name", RULES)
def test_fit_trains_as_with_a_dense_embedding(name):
    """Compiled on TensorFlow and JAX."""
    assert_trains_alike(lambda embedding, wrap: fitted(embedding, wrap(RULES[name]()), epochs=2))


@pytest.mark.parametrize("name", ["two_states"])
def test_a_step_without_a_graph_trains_as_with_a_dense_embedding(name):
    assert_trains_alike(lambda embedding, wrap: fitted(embedding, wrap(RULES[name]()), **FAST))


@pytest.mark.parametrize("sizes", [(1, 7), (16, 48), (1024, 4096)])
def test_size_of_the_pieces_does_not_matter(monkeypatch, sizes):
    """Also if steps have many pieces, which cut rows."""
    monkeypatch.setattr("sok_keras.general._SIZES", sizes)
    monkeypatch.setattr("sok_keras.general._SIZES_ON_GPU", [4 * size for size in sizes])  # whole groups of four floats
    assert_rows_move_as_variables(RULES["two_states"], steps=4)


def test_rows_outside_of_a_batch_and_their_states_stay():
    start = normal(np.random.default_rng(0), (NUM_KEYS, 8))
    layer = tables_of(start)
    push, apply = push_of(layer), apply_of(sok.OptimizerWrapper(TwoStates(0.1)), [layer.trigger])
    apply([push([np.array([1, 3, 1], "int32")], [np.ones((3, 8), "float32")])])
    table = layer.get_tables()["dim_8"].export(states=True)
    order = np.argsort(table.keys)
    moved = (table.rows[order] != start[0]).any(axis=1)
    assert moved.tolist() == [False, True, False, True, False]
    assert table.states["momentum"][order][:, 0].tolist() == [0, 2, 0, 1, 0]  # equal ids are summed
    assert table.states["sum"][order][:, 0].tolist() == [0.25, 2.25, 0.25, 1.25, 0.25]


def trained_digest():
    """Keys, rows and states after ten steps with duplicates and new rows on the way, of enough rows for many threads."""
    dynamic = sok.TableConfig("dynamic", None, 8, "uniform", combiner="mean", seed=11)
    static = sok.TableConfig("static", 3000, 5, keras.initializers.RandomNormal(0, 0.25), combiner="sqrtn", seed=12)
    layer = sok.DistributedEmbedding([sok.FeatureConfig(table.name, table) for table in (dynamic, static)])
    layer.build()
    optimizer = sok.OptimizerWrapper(TwoStates(0.03125, decay_of_momentum=0.75))
    push, apply = push_of(layer), apply_of(optimizer, [layer.trigger])
    random = np.random.default_rng(5)
    for _ in range(10):
        ids = [random.integers(0, 3000, (6000, 3)).astype("int32") for _ in range(2)]
        gradients = [(random.integers(-64, 65, (6000, dim)) / 64).astype("float32") for dim in (8, 5)]
        apply([push(ids, gradients)])
    return digest_of(layer)


def test_bits_do_not_depend_on_the_number_of_threads():
    found = set()
    for count in (1, 2, 3, 7):
        sok.backend.native.set_num_threads(count)
        found.add(trained_digest())
    sok.backend.native.set_num_threads(2)
    assert len(found) == 1


# ---- what is refused


class RowSums(optimizers.Optimizer):
    """The step of an element depends on its row."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient / (1 + ops.sum(ops.abs(gradient), axis=-1, keepdims=True)))


class ScalarState(optimizers.Optimizer):
    """Keeps one number for a variable."""

    def build(self, variables):
        super().build(variables)
        self.counts = [self.add_variable((), name=f"{v.name}_count") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient)


class Noisy(optimizers.Optimizer):
    """Adds noise to gradients."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * (gradient + keras.random.normal(gradient.shape)))


class FromVariable(TwoStates):
    """A state starts at twice the values of the variable."""

    def build(self, variables):
        super().build(variables)
        for momentum, variable in zip(self.momentums, variables, strict=True):
            momentum.assign(2 * variable)


class Unmakeable(optimizers.Optimizer):
    """Its config does not say what the constructor asks for."""

    def __init__(self, rate_of_rates):
        super().__init__(rate_of_rates)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (optimizers.Muon, "needs the whole variable"),
        (optimizers.Adafactor, "needs the whole variable"),
        (functools.partial(RowSums, 0.1), "needs the whole variable: its `update_step` moves parts"),
        (functools.partial(ScalarState, 0.1), r"needs the whole variable: its state `count` has the shape \(\)"),
        (functools.partial(Noisy, 0.1), "moves parts of a variable otherwise"),
        (FromVariable, "state `momentum` does not start at the same value everywhere"),
        pytest.param(
            SCHEDULE_FREE,
            "needs the whole variable: its `update_step` moves parts",
            marks=pytest.mark.skipif(
                BACKEND == "jax" or SCHEDULE_FREE is None, reason="one of the formulas above, if Keras has it"
            ),
        ),
        (functools.partial(Unmakeable, 0.1), "cannot be made anew from its config"),
        (functools.partial(optimizers.Optimizer, 0.1), "`update_step` cannot be called"),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_with_the_reason(make, reason):
    with pytest.raises(ValueError, match=rf"`inner_optimizer` must compute each element.*Received: .*{reason}"):
        sok.OptimizerWrapper(make())


# ---- saving


def made():
    model = small_model(our_embedding())
    model.compile(sok.OptimizerWrapper(TwoStates(0.05)), "mse", **FAST)
    return model


def states_of(model):
    table = table_of(model).export(states=True)
    order = np.argsort(table.keys)
    return {"row": table.rows[order], **{name: state[order] for name, state in table.states.items()}}


def assert_same_rows_and_states(model, other):
    for (name, one), (of_other, two) in zip(states_of(model).items(), states_of(other).items(), strict=True):
        assert name == of_other
        np.testing.assert_array_equal(one, two)


def test_keras_file_goes_on_bit_equal(tmp_path):
    model = fit(made())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        fit(each)
    assert set(states_of(loaded)) == {"row", "momentum", "sum"}
    assert_same_rows_and_states(model, loaded)


def test_dump_has_the_states_under_the_names_of_keras_and_goes_on_bit_equal(tmp_path):
    model = fit(made())
    sok.dump(tmp_path / "dump", model)
    manifest = sok.read_manifest(tmp_path / "dump")
    assert "momentum" in str(manifest)
    loaded = made()
    sok.load(tmp_path / "dump", loaded)
    for each in (model, loaded):
        fit(each)
    assert_same_rows_and_states(model, loaded)


def test_states_of_another_class_are_not_taken(tmp_path):
    model = fit(made())
    sok.dump(tmp_path / "dump", model)
    other = small_model(our_embedding())
    other.compile(sok.OptimizerWrapper(Renamed(0.05)), "mse", **FAST)
    fit(other)
    with pytest.raises(sok.SokError, match="expected tests>TwoStates, got tests>Renamed"):
        sok.load(tmp_path / "dump", other)


# ---- steps that do not count


def test_overflow_under_a_loss_scale_skips_the_step():
    start = normal(np.random.default_rng(0), (NUM_KEYS, 8))
    layer = tables_of(start)
    optimizer = optimizers.LossScaleOptimizer(sok.OptimizerWrapper(TwoStates(0.1)), initial_scale=4.0)
    optimizer.build([layer.trigger])
    push, before = push_of(layer), digest_of(layer)
    apply = apply_of(optimizer, [layer.trigger])
    ids = [np.arange(NUM_KEYS, dtype="int32")]
    ticket = push(ids, [np.ones((NUM_KEYS, 8), "float32")])
    apply([ticket * float("nan")])
    assert digest_of(layer) == before
    apply([push(ids, [np.ones((NUM_KEYS, 8), "float32")])])
    assert digest_of(layer) != before


@pytest.mark.skipif(BACKEND == "jax", reason="`apply` is compiled there, so nothing of Python runs in a step")
def test_a_step_that_fails_changes_nothing_and_the_next_one_counts(monkeypatch):
    start = normal(np.random.default_rng(0), (NUM_KEYS, 8))
    moved = []
    for fails in (False, True):
        layer = tables_of(start)
        optimizer = sok.OptimizerWrapper(TwoStates(0.1))
        push, ids, given = push_of(layer), [np.arange(NUM_KEYS, dtype="int32")], [np.ones((NUM_KEYS, 8), "float32")]
        optimizer.build([layer.trigger])
        before = digest_of(layer)
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(TwoStates, "update_step", lambda *arguments: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    apply_gradients(optimizer, [push(ids, given)], [layer.trigger])
            assert digest_of(layer) == before
        apply_gradients(optimizer, [push(ids, given)], [layer.trigger])
        moved.append(digest_of(layer))
    assert moved[0] == moved[1]


def test_a_refused_key_gets_no_update():
    table = sok.TableConfig("t", None, 4, combiner="sum", max_capacity=2, check_mode="count")
    layer = sok.DistributedEmbedding([sok.FeatureConfig("f", table)])
    layer.build()
    push, apply = push_of(layer), apply_of(sok.OptimizerWrapper(TwoStates(0.1)), [layer.trigger])
    for _ in range(2):
        apply([push([np.arange(5, dtype="int32")], [np.ones((5, 4), "float32")])])
    contents = layer.get_tables()["t"].export(states=True)
    assert len(contents.keys) == 2
    assert_close(contents.states["sum"], np.full((2, 4), 2.25, "float32"))


def test_two_layers_and_a_dense_variable_in_one_model():
    """Tables of several groups make one long row."""

    def train(first, second, optimizer):
        inputs = [keras.Input((3,), dtype="int32") for _ in range(2)]
        rows = [layers.Flatten()(layer(i)) for layer, i in zip((first, second), inputs, strict=True)]
        model = keras.Model(inputs, dense_layer()(layers.Concatenate()(rows)))
        model.compile(optimizer, "mse")
        random = np.random.default_rng(3)
        ids = [random.integers(0, 9, (48, 3)).astype("int32") for _ in inputs]
        model.fit(ids, random.normal(size=(48, 2)).astype("float32"), batch_size=16, shuffle=False, verbose=0)
        return model

    starts = normal(np.random.default_rng(0), (9, 6), (9, 3))
    ours = [our_embedding(rows) for rows in starts]
    theirs = [reference_embedding(rows) for rows in starts]
    mine = train(*ours, sok.OptimizerWrapper(TwoStates(0.05)))
    plain = train(*theirs, TwoStates(0.05))
    for layer, other, rows in zip(ours, theirs, starts, strict=True):
        assert_close(rows_of(layer, rows), rows_of(other, rows))
    for one, other in zip(mine.layers[-1].weights, plain.layers[-1].weights, strict=True):
        assert_close(to_numpy(one), to_numpy(other))


def test_a_model_with_an_optimizer_of_the_program_that_runs_is_saved(tmp_path):
    """Keras gives no module for such a class."""
    made = type("Signs", (keras.optimizers.SGD,), {"__module__": "__main__"})
    ids = keras.Input((2,), dtype="int32")
    rows = sok.DynamicEmbedding(2, combiner="sum")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile(sok.OptimizerWrapper(made(0.1)), "mse")
    model.fit(np.arange(8).reshape(4, 2), np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Signs": made})
    assert isinstance(again.optimizer.inner_optimizer, made)
    np.testing.assert_allclose(
        again.predict(np.array([[1, 2]]), verbose=0), model.predict(np.array([[1, 2]]), verbose=0)
    )


@pytest.mark.skipif(
    BACKEND != "jax" or SCHEDULE_FREE is None, reason="ScheduleFreeAdamW is refused on other backends than JAX"
)
def test_rows_that_are_excluded_from_weight_decay_move_as_a_variable():
    """A state starts at the row."""

    def made(excluded):
        inner = schedule_free(weight_decay=0.3)
        inner.exclude_from_weight_decay(var_names=[excluded])
        return inner

    start, *gradients = normal(np.random.default_rng(2), *[(NUM_KEYS, 8)] * 7)
    layer, theirs = tables_of([start]), keras.Variable(start, name="rows")
    ours, plain = apply_of(sok.OptimizerWrapper(made("trigger")), [layer.trigger]), apply_of(made("rows"), [theirs])
    push = push_of(layer)
    for gradient in gradients:
        ours([push([np.arange(NUM_KEYS, dtype="int32")], [gradient])])
        plain([ops.convert_to_tensor(gradient)])
    assert_close(layer.get_tables()["dim_8"].export().rows, theirs)


@pytest.mark.skipif(
    BACKEND != "jax" or SCHEDULE_FREE is None, reason="ScheduleFreeAdamW is refused on other backends than JAX"
)
def test_a_state_that_starts_at_the_row_needs_rows_of_float32():
    layer = sok.DynamicEmbedding(4, embedding_dtype="bfloat16")
    layer.build()
    with pytest.raises(ValueError, match="needs rows of float32"):
        sok.OptimizerWrapper(schedule_free()).build([layer.trigger])


class WithoutConfig(optimizers.Optimizer):
    """Its `get_config` is Keras' own, which does not know `scale`."""

    def __init__(self, learning_rate, scale=1.0, powers=(1,), **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.scale, self.powers = scale, powers

    def update_step(self, gradient, variable, learning_rate):
        for power in self.powers:
            moved = ops.cast(learning_rate, variable.dtype) * self.scale * gradient**power
            self.assign_sub(variable, moved)


def test_hyper_parameters_that_the_config_lacks_count():
    def optimizer():
        return WithoutConfig(0.1, scale=2.0, powers=(1, 2))

    assert_trains_alike(lambda embedding, wrap: fitted(embedding, wrap(optimizer())), tolerance=1e-5)


@pytest.mark.parametrize("make", [lambda: optimizers.SGD(0.01, loss_scale_factor=8.0), lambda: TwoStates(0.1)])
def test_a_loss_scale_optimizer_takes_the_place_of_a_loss_scale(make):
    """It sets the factor of the optimizer that it is around to None."""

    def train(embedding, wrap):
        return fitted(embedding, optimizers.LossScaleOptimizer(wrap(make()), initial_scale=4.0))

    assert_trains_alike(train, tolerance=1e-5)
