"""A row moves as a Keras variable does under the same gradient, whatever the optimizer; and by the same bits everywhere."""

import functools
import hashlib
import os

import keras
import numpy as np
import pytest
from keras import ops, optimizers

import sok_keras as sok
from reference import BACKEND, apply_gradients, assert_close, to_numpy

STEPS, NUM_KEYS = 20, 5
# A whole number of vector units, and one with a rest.
DIMS = (8, 17)

# No hyper-parameter at its default, and 0.1 nowhere that 0.9 could be meant.
RULES = {
    "sgd": functools.partial(optimizers.SGD, 0.3),
    "sgd_momentum": functools.partial(optimizers.SGD, 0.05, momentum=0.8),
    "sgd_nesterov": functools.partial(optimizers.SGD, 0.05, momentum=0.7, nesterov=True),
    "adam": functools.partial(optimizers.Adam, 0.02, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "adam_amsgrad": functools.partial(optimizers.Adam, 0.02, beta_1=0.7, beta_2=0.6, epsilon=1e-4, amsgrad=True),
    "adamw": functools.partial(optimizers.AdamW, 0.03, weight_decay=0.07, beta_1=0.85, beta_2=0.9, epsilon=1e-2),
    "adamw_amsgrad": functools.partial(
        optimizers.AdamW, 0.03, weight_decay=0.2, beta_1=0.6, beta_2=0.7, epsilon=1e-2, amsgrad=True
    ),
    "adagrad": functools.partial(optimizers.Adagrad, 0.2, initial_accumulator_value=0.3, epsilon=1e-2),
    "row_wise_adagrad": functools.partial(
        sok.optimizers.RowWiseAdagrad, 0.2, initial_accumulator_value=0.3, epsilon=1e-2
    ),
    "rmsprop": functools.partial(optimizers.RMSprop, 0.02, rho=0.8, epsilon=1e-2),
    "rmsprop_momentum": functools.partial(optimizers.RMSprop, 0.02, rho=0.8, momentum=0.6, epsilon=1e-2),
    "rmsprop_centered": functools.partial(optimizers.RMSprop, 0.02, rho=0.7, epsilon=1e-2, centered=True),
    "rmsprop_centered_momentum": functools.partial(
        optimizers.RMSprop, 0.02, rho=0.7, momentum=0.5, epsilon=1e-2, centered=True
    ),
    "adadelta": functools.partial(optimizers.Adadelta, 0.8, rho=0.8, epsilon=1e-2),
    "adamax": functools.partial(optimizers.Adamax, 0.02, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "nadam": functools.partial(optimizers.Nadam, 0.02, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "row_wise_adam": functools.partial(sok.optimizers.RowWiseAdam, 0.02, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "lion": functools.partial(optimizers.Lion, 0.02, beta_1=0.8, beta_2=0.95),
    "ftrl": functools.partial(optimizers.Ftrl, 0.2, initial_accumulator_value=0.3),
    "ftrl_power": functools.partial(
        optimizers.Ftrl, 0.2, learning_rate_power=-0.7, initial_accumulator_value=0.2, beta=0.3
    ),
    "ftrl_power_zero": functools.partial(
        optimizers.Ftrl, 0.02, learning_rate_power=0.0, l2_regularization_strength=0.2
    ),
    "ftrl_all": functools.partial(
        optimizers.Ftrl,
        0.2,
        learning_rate_power=-0.7,
        initial_accumulator_value=0.2,
        l1_regularization_strength=0.3,
        l2_regularization_strength=0.2,
        l2_shrinkage_regularization_strength=0.1,
        beta=0.3,
    ),
}

# What stands around a formula. `accumulation_`: the mean of three gradients, clipped.
AROUND = {
    "weight_decay": {"weight_decay": 0.3},
    "clipvalue": {"clipvalue": 0.4},
    "clipnorm": {"clipnorm": 0.7},
    "global_clipnorm": {"global_clipnorm": 0.9},
    "norms_that_do_not_clip": {"global_clipnorm": 1e4},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation_clipvalue_decay": {"gradient_accumulation_steps": 3, "clipvalue": 0.4, "weight_decay": 0.3},
    "accumulation_clipnorm_decay": {"gradient_accumulation_steps": 3, "clipnorm": 0.7, "weight_decay": 0.3},
    "accumulation_global_clipnorm_decay": {
        "gradient_accumulation_steps": 3,
        "global_clipnorm": 0.9,
        "weight_decay": 0.3,
    },
}


def tables_of(arrays):
    """A layer with a dynamic table for each array of rows; keys are 0, 1, ..."""
    configs = [sok.TableConfig(f"dim_{rows.shape[1]}", None, rows.shape[1], combiner="sum") for rows in arrays]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs])
    for table, rows in zip(layer.get_tables().values(), arrays, strict=True):
        table.assign(np.arange(len(rows)), rows)
    layer.build()
    return layer


def push_of(layer):
    """`push(ids, gradients, *weights)`: a backward pass that hands each row of output its given gradient, exactly; the ticket."""
    trigger = layer.trigger

    def loss(ids, given, *weights):
        rows = layer(ids, *weights, training=True)
        return sum(ops.sum(r * g) for r, g in zip(rows, given, strict=True))

    if BACKEND == "jax":
        import jax

        def pure(value, *arguments):
            with keras.StatelessScope(state_mapping=[(trigger, value)]):
                return loss(*arguments)

        compiled = jax.jit(jax.grad(pure))
        return lambda *arguments: compiled(trigger.value, *arguments)
    if BACKEND == "torch":
        import torch

        return lambda *arguments: torch.autograd.grad(loss(*map(tensors, arguments)), trigger.value)[0]
    import tensorflow as tf

    def push(*arguments):
        with tf.GradientTape() as tape:
            value = loss(*arguments)
        return tape.gradient(value, trigger.value)

    return push


def apply_of(optimizer, variables):
    """`apply(gradients)`: the optimizer's step; compiled on JAX, which else compiles Keras' conditions anew at each step."""
    if BACKEND != "jax":
        return lambda gradients: apply_gradients(optimizer, gradients, variables)
    import jax

    optimizer.build(variables)
    compiled = jax.jit(optimizer.stateless_apply)

    def apply(gradients):
        states = [v.value for v in optimizer.variables]
        for each, new in zip(
            (variables, optimizer.variables), compiled(states, gradients, [v.value for v in variables]), strict=True
        ):
            for variable, value in zip(each, new, strict=True):
                variable.assign(value)

    return apply


def tensors(arrays):
    return [ops.convert_to_tensor(array) for array in arrays]


def normal(random, *shapes):
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def assert_rows_move_as_variables(optimizer, steps=STEPS):
    """Two tables and a dense variable under ours, three variables under Keras'."""
    random = np.random.default_rng(0)
    shapes = [*((NUM_KEYS, dim) for dim in DIMS), (3, 4)]
    starts = normal(random, *shapes)
    layer = tables_of(starts[:2])
    dense, *theirs = [keras.Variable(start) for start in (starts[2], *starts)]
    ours = apply_of(sok.OptimizerWrapper(optimizer()), [layer.trigger, dense])
    plain = apply_of(optimizer(), theirs)
    push, keys = push_of(layer), [np.arange(NUM_KEYS, dtype="int32")] * 2
    for _ in range(steps):
        found = normal(random, *shapes)
        ours([push(keys, found[:2]), *tensors(found[2:])])
        plain(tensors(found))
    tables = [table.export().rows for table in layer.get_tables().values()]
    for mine, reference, start in zip([*tables, to_numpy(dense)], theirs, starts, strict=True):
        assert_close(mine, reference)
        assert np.abs(to_numpy(reference) - start).max() > 1e-2


@pytest.mark.parametrize("name", RULES)
def test_twenty_steps_of_a_formula_equal_keras(name):
    assert_rows_move_as_variables(RULES[name])


@pytest.mark.parametrize("mode", ["global", "lazy_global"])
@pytest.mark.parametrize("name", [*RULES, "sgd_decay", "adam_global_clipnorm"])
def test_fifty_sparse_steps_of_all_rows_equal_a_dense_variable(name, mode):
    """Each step has gradients of some rows alone. The others have zeros in the gradient of the variable."""
    more = {
        "sgd_decay": functools.partial(optimizers.SGD, 0.1, weight_decay=0.3),
        "adam_global_clipnorm": functools.partial(RULES["adam"], global_clipnorm=0.9),
    }
    optimizer = {**RULES, **more}[name]
    random = np.random.default_rng(0)
    shapes = [(NUM_KEYS, dim) for dim in DIMS]
    starts = normal(random, *shapes)
    layer = tables_of(starts)
    theirs = [keras.Variable(start) for start in starts]
    ours = apply_of(sok.OptimizerWrapper(optimizer(), update_mode=mode), [layer.trigger])
    plain, push = apply_of(optimizer(), theirs), push_of(layer)
    for step in range(50):
        keys = [random.choice(NUM_KEYS, 2, replace=False).astype("int32") for _ in shapes]
        found = normal(random, *((2, dim) for dim in DIMS))
        dense = [np.zeros(shape, "float32") for shape in shapes]
        for whole, of, rows in zip(dense, keys, found, strict=True):
            whole[of] = rows
        ours([push(keys, found)])
        plain(tensors(dense))
        if step == 20:  # a lookup outside of training reads rows that have missed steps
            for mine, reference in zip(layer([keys[0]] * 2), theirs, strict=True):
                assert_close(mine, to_numpy(reference)[keys[0]], 1e-5)
    for table, reference in zip(layer.get_tables().values(), theirs, strict=True):
        assert_close(table.export().rows, reference, 1e-5)


def test_an_update_mode_needs_a_formula():
    class Halves(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, 0.5 * learning_rate * gradient)

    with pytest.raises(ValueError, match="whose formula the core does not have"):
        sok.OptimizerWrapper(Halves(0.1), update_mode="global")


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["adam", "row_wise_adagrad"])
def test_clipping_decay_and_accumulation_equal_keras(name, around):
    steps = 11 if "accumulation" in around else 7  # of eleven the last two are still on their way to an update
    assert_rows_move_as_variables(functools.partial(RULES[name], **AROUND[around]), steps)


def test_row_wise_adagrad_of_a_dim_of_one_is_adagrad():
    """The mean over one column is the column."""
    start, steps = normal(np.random.default_rng(1), (NUM_KEYS, 1), (STEPS, NUM_KEYS, 1))
    moved = []
    for optimizer in (sok.optimizers.RowWiseAdagrad(0.2), optimizers.Adagrad(0.2)):
        layer = tables_of([start])
        push, apply = push_of(layer), apply_of(sok.OptimizerWrapper(optimizer), [layer.trigger])
        for gradient in steps:
            apply([push([np.arange(NUM_KEYS, dtype="int32")], [gradient])])
        moved.append(layer.get_tables()["dim_1"].export().rows)
    assert_close(*moved)


@pytest.mark.parametrize("dim", DIMS)
def test_lamb_takes_a_row_as_a_variable_of_one_row(dim):
    """Without weight decay, and with it: the norm is that of the row after the decay."""
    for decay in (None, 0.2):
        make = functools.partial(optimizers.Lamb, 0.05, beta_1=0.8, beta_2=0.95, epsilon=1e-3, weight_decay=decay)
        start, *gradients = normal(np.random.default_rng(2), *[(NUM_KEYS, dim)] * (1 + STEPS))
        layer, theirs = tables_of([start]), [keras.Variable(row[None]) for row in start]
        ours, plain = apply_of(sok.OptimizerWrapper(make()), [layer.trigger]), apply_of(make(), theirs)
        push = push_of(layer)
        for gradient in gradients:
            ours([push([np.arange(NUM_KEYS, dtype="int32")], [gradient])])
            plain(tensors([row[None] for row in gradient]))
        assert_close(layer.get_tables()[f"dim_{dim}"].export().rows, np.concatenate([to_numpy(row) for row in theirs]))


@pytest.mark.parametrize("mode", ["global", "lazy_global"])
def test_fifty_sparse_steps_of_lamb_equal_variables_of_one_row(mode):
    make = functools.partial(optimizers.Lamb, 0.05, beta_1=0.8, beta_2=0.95, epsilon=1e-3, weight_decay=0.2)
    random = np.random.default_rng(3)
    (start,) = normal(random, (NUM_KEYS, DIMS[1]))
    layer, theirs = tables_of([start]), [keras.Variable(row[None]) for row in start]
    ours = apply_of(sok.OptimizerWrapper(make(), update_mode=mode), [layer.trigger])
    plain, push = apply_of(make(), theirs), push_of(layer)
    for _ in range(50):
        keys, (rows,) = random.choice(NUM_KEYS, 2, replace=False).astype("int32"), normal(random, (2, DIMS[1]))
        whole = np.zeros_like(start)
        whole[keys] = rows
        ours([push([keys], [rows])])
        plain(tensors([row[None] for row in whole]))
    (table,) = layer.get_tables().values()
    assert_close(table.export().rows, np.concatenate([to_numpy(row) for row in theirs]), 1e-5)


def test_each_class_of_keras_is_held_against_a_dense_variable_or_refused():
    """A class that a later Keras brings is in none of the lists."""
    held = {rule.func for rule in RULES.values()} | {optimizers.Lamb}
    # Of test_general_optimizers.py.
    held.add(getattr(optimizers, "ScheduleFreeAdamW", None))
    refused = {optimizers.Muon, optimizers.Adafactor}
    wrappers = {optimizers.LossScaleOptimizer, getattr(optimizers, "MultiOptimizer", None)}
    classes = {
        value
        for value in vars(optimizers).values()
        if isinstance(value, type) and issubclass(value, optimizers.Optimizer) and value is not optimizers.Optimizer
    }
    assert classes - wrappers - refused <= held, classes - wrappers - refused - held


def test_learning_rate_of_a_schedule_is_read_before_the_step():
    assert_rows_move_as_variables(
        lambda: optimizers.SGD(optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.5, 0.1, 0.02])), steps=8
    )


# ---- the same bits

# Of keys, rows and states, made by this very test on x86-64.
DIGESTS = {
    "small": "ac03a0f5f695baa876aa82b20ea2a45d002c2cdc8c910d6cd38a3623fd1f63c7",
    "large": "74fc9dc2c0c53a3e621d09ffe170ee250cf8bdb71b88ce7fedf3f599a2744676",
}
SIZES = {"small": (40, 100), "large": (3000, 6000)}  # the second is shared among threads


def digest_of(layer):
    """SHA-256 of what the tables hold."""
    digest = hashlib.sha256()
    for table in layer.get_tables().values():
        contents = table.export(states=True)
        for array in (contents.keys, contents.rows, *contents.states.values()):
            digest.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def trained_digest(num_keys, num_bags):
    """Ten steps of Adam: two features of a dynamic table, one of a static table, duplicates, weights, new rows on the way."""
    dynamic = sok.TableConfig("dynamic", None, 8, "uniform", combiner="mean", seed=11)
    static = sok.TableConfig("static", num_keys, 5, keras.initializers.RandomNormal(0, 0.25), combiner="sqrtn", seed=12)
    configs = [sok.FeatureConfig(name, table) for name, table in (("a", dynamic), ("b", dynamic), ("c", static))]
    layer = sok.DistributedEmbedding(configs, name="digest")
    layer.build()
    optimizer = sok.OptimizerWrapper(optimizers.Adam(0.03125, beta_1=0.75, beta_2=0.875, epsilon=2.0**-10))
    push, apply = push_of(layer), apply_of(optimizer, [layer.trigger])
    random = np.random.default_rng(5)
    for _ in range(10):
        ids = [random.integers(0, num_keys, (num_bags, 3)).astype("int32") - shift for shift in (0, num_keys // 2, 0)]
        weights = [random.integers(1, 9, (num_bags, 3)).astype("float32") / 8 for _ in ids]
        gradients = [(random.integers(-64, 65, (num_bags, dim)) / 64).astype("float32") for dim in (8, 8, 5)]
        apply([push(ids, gradients, weights)])
    return digest_of(layer)


@pytest.fixture
def threads(request):
    sok.backend.native.set_num_threads(request.param)
    yield
    # As the core does by itself.
    default = os.environ.get("SOK_NUM_THREADS") or len(os.sched_getaffinity(0))
    sok.backend.native.set_num_threads(int(default))


@pytest.mark.parametrize("threads", [1, 2, 3, 7], indirect=True)
@pytest.mark.parametrize("size", SIZES)
def test_equal_gradients_give_the_same_bits_on_every_backend_and_number_of_threads(size, threads):
    assert trained_digest(*SIZES[size]) == DIGESTS[size]


@pytest.mark.parametrize("mode", ["global", "lazy_global"])
def test_weight_decay_of_all_rows_refuses_frozen_tables(mode):
    """A step would change their rows, which no gradient asks for."""

    def layer(*trainable):
        tables = [sok.TableConfig(f"t{n}", None, 2, combiner="sum", trainable=one) for n, one in enumerate(trainable)]
        made = sok.DistributedEmbedding([sok.FeatureConfig(table.name, table) for table in tables])
        made.build()
        return made

    decays = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"its tables must be trainable.*Received: tables \['t1'\] with"):
        sok.OptimizerWrapper(decays, update_mode=mode).build(layer(True, False).trainable_variables)
    sok.OptimizerWrapper("adamw", update_mode=mode).build(layer(True, True).trainable_variables)
    sok.OptimizerWrapper("adam", update_mode=mode).build(layer(True, False).trainable_variables)
    sok.OptimizerWrapper("adamw").build(layer(True, False).trainable_variables)
