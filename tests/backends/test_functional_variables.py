"""Variables in training loops without Keras layers, on JAX and PyTorch."""

import copy
import pickle
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow has variables of its own")

if BACKEND == "jax":
    import jax
elif BACKEND == "torch":
    import torch

KEYS, DIM, RATE = 12, 3, 0.5


def some_rows(seed=0):
    return np.random.default_rng(seed).normal(size=(KEYS, DIM)).astype("float32")


def variable(rows, **kwargs):
    """A variable with these rows for the keys from 0 on."""
    return sok.assign(sok.DynamicVariable(dimension=DIM, **kwargs), np.arange(len(rows)), rows)


def array(values, dtype="int32"):
    return keras.ops.convert_to_tensor(np.asarray(values, dtype))


def csr(bags):
    """Ids in bags as values and row splits."""
    splits = np.cumsum([0, *map(len, bags)])
    return array(np.concatenate([np.zeros(0), *bags])), array(splits)


def padded(bags):
    """Ids in bags as a matrix, in which -1 stands for none."""
    ids = np.full((len(bags), max(map(len, bags))), -1)
    for row, bag in zip(ids, bags, strict=True):
        row[: len(bag)] = bag
    return array(ids)


def gradients(variables, loss):
    """The gradients of a function of the values of triggers, by the framework's own means."""
    triggers = sok.triggers(variables)
    if BACKEND == "jax":
        return jax.grad(lambda values: loss(values))([trigger.value for trigger in triggers])
    return list(torch.autograd.grad(loss(None), [trigger.value for trigger in triggers]))


def step(variables, optimizer, loss):
    optimizer.apply(gradients(variables, loss), sok.triggers(variables))


def combined(rows, bags, combiner, weights=None):
    """What a lookup gives, and the factor of each id."""
    out, factors = np.zeros((len(bags), DIM), "float32"), []
    for number, bag in enumerate(bags):
        w = np.ones(len(bag)) if weights is None else np.asarray(weights[number])
        divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner] if len(bag) else 1.0
        factors.append(w / divisor)
        for key, factor in zip(bag, w / divisor, strict=True):
            out[number] += factor * rows[key]
    return out, factors


BAGS = [[3, 5, 3], [], [0], [11, 2]]


@pytest.mark.parametrize("form", [csr, padded])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_rows_are_combined_and_learn(form, combiner):
    first, second = some_rows(), some_rows(1)
    variables = [sok.DynamicVariable(dimension=DIM) for _ in range(2)]
    for one, rows in zip(variables, (first, second), strict=True):
        sok.assign(one, np.arange(KEYS), rows)
    ids, upstream = form(BAGS), some_rows(2)[: len(BAGS)]
    of_rows = array(upstream, "float32")
    expected = [combined(rows, BAGS, combiner) for rows in (first, second)]

    def loss(values):
        found = sok.lookup_sparse(variables, [ids, ids], combiners=combiner, triggers=values)
        return keras.ops.sum(found[0] * of_rows) + 2.0 * keras.ops.sum(found[1] * of_rows)

    found = sok.lookup_sparse(variables, [ids, ids], combiners=combiner)
    for rows, (right, _) in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(keras.ops.stop_gradient(rows)), right, rtol=1e-6, atol=1e-6
        )
    assert len(sok.triggers(variables)) == 1
    step(variables, sok.OptimizerWrapper(keras.optimizers.SGD(RATE)), loss)
    for one, rows, (_, factors), scale in zip(variables, (first, second), expected, (1.0, 2.0), strict=True):
        right = rows.copy()
        for number, (bag, factor) in enumerate(zip(BAGS, factors, strict=True)):
            for key, of_key in zip(bag, factor, strict=True):
                right[key] -= RATE * scale * of_key * upstream[number]
        np.testing.assert_allclose(one.table.find(np.arange(KEYS))[0], right, rtol=1e-5, atol=1e-6)
        assert one.table.stats().size == KEYS


@pytest.mark.parametrize("form", [csr, padded])
def test_weights_have_gradients(form):
    rows = some_rows()
    v, ids = variable(rows), form(BAGS)
    weights = [[1.0, 2.0, 0.5], [], [3.0], [1.5, 1.0]]
    if form is csr:
        values = np.concatenate([np.zeros(0), *weights])
        taken = [rows[key] for bag in BAGS for key in bag]
    else:
        values = np.ones((len(BAGS), 3))
        for row, of_row in zip(values, weights, strict=True):
            row[: len(of_row)] = of_row
        taken = [rows[bag[k]] if k < len(bag) else np.zeros(DIM) for bag in BAGS for k in range(3)]
    right, _ = combined(rows, BAGS, "sum", weights)
    expected = np.sum(taken, axis=1).reshape(values.shape)

    def loss(given, triggers=None):
        return keras.ops.sum(sok.lookup_sparse(v, ids, given, "sum", triggers=triggers))

    given = array(values, "float32")
    if BACKEND == "jax":
        total, found = jax.value_and_grad(loss)(given, [trigger.value for trigger in sok.triggers(v)])
    else:
        given.requires_grad_()
        total = loss(given)
        (found,) = torch.autograd.grad(total, [given])
        total = total.detach()
    np.testing.assert_allclose(keras.ops.convert_to_numpy(total), right.sum(), rtol=1e-5)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found), expected, rtol=1e-5, atol=1e-6)


def test_a_loop_learns_as_a_layer_does():
    """Adam, twenty steps, with ids that come and go, beside `DynamicEmbedding`."""
    rng = np.random.default_rng(0)
    batches = rng.integers(0, 40, (20, 16, 2)).astype("int32")
    v = sok.DynamicVariable(dimension=DIM, initializer=keras.initializers.Constant(0.1))
    layer = sok.DynamicEmbedding(DIM, combiner="mean", embeddings_initializer=keras.initializers.Constant(0.1))
    layer.build()
    upstream = array(rng.normal(size=(16, DIM)), "float32")
    ours, theirs = (sok.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2))
    for ids in batches:
        step(
            [v],
            ours,
            lambda values, ids=ids: keras.ops.sum(sok.lookup_sparse(v, array(ids), triggers=values) * upstream),
        )
        if BACKEND == "jax":

            def loss(values, ids=ids):
                rows, _ = layer.stateless_call(values, [], array(ids), training=True)
                return keras.ops.sum(rows * upstream)

            found = jax.grad(loss)([variable.value for variable in layer.trainable_variables])
        else:
            total = (layer(array(ids), training=True) * upstream).sum()
            found = list(torch.autograd.grad(total, [variable.value for variable in layer.trainable_variables]))
        theirs.apply(found, layer.trainable_variables)
    right = layer.get_table().export()
    keys, rows = sok.export(v)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(keys), right.keys)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(rows), right.rows)


@pytest.mark.skipif(BACKEND != "jax", reason="a function of JAX")
def test_a_jitted_step_is_a_pure_function_of_triggers():
    v = sok.DynamicVariable(dimension=DIM, initializer="0")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(RATE))
    optimizer.build([v])
    traces = []

    @jax.jit
    def train(triggers, state, ids):
        traces.append(ids.shape)
        tickets = jax.grad(lambda values: keras.ops.sum(sok.lookup_sparse(v, ids, combiners="sum", triggers=values)))(
            triggers
        )
        return optimizer.stateless_apply(state, tickets, triggers)

    triggers = [trigger.value for trigger in sok.triggers(v)]
    state = [one.value for one in optimizer.variables]
    for number in range(5):
        triggers, state = train(triggers, state, array([[number, 100], [number, -1]]))
    evaluate = jax.jit(
        lambda triggers, ids: sok.lookup_sparse(v, ids, combiners="sum", triggers=triggers, training=False)
    )
    np.testing.assert_array_equal(
        evaluate(triggers, array([[3], [100], [7]])), np.float32([[-1.0], [-2.5], [0.0]]) * np.ones(DIM)
    )
    # Without triggers, a lookup waits for the steps that were started.
    np.testing.assert_array_equal(sok.lookup_sparse(v, array([[4], [0]]), combiners="sum"), np.full((2, DIM), -1.0))
    assert len(traces) == 1 and v.table.stats().size == 6
    untraced = array([[1]])
    for function in (
        jax.jit(lambda x: x * sok.lookup_sparse(v, untraced)),
        jax.grad(lambda x: x * sok.lookup_sparse(v, untraced).sum()),
    ):
        with pytest.raises(ValueError, match="`triggers` must be given in a function that JAX traces"):
            function(1.0)


@pytest.mark.skipif(BACKEND != "jax", reason="a function of JAX")
def test_a_variable_is_first_used_outside_of_traces():
    v = sok.DynamicVariable(dimension=DIM, initializer="2")
    with pytest.raises(ValueError, match="must have been used before a function that JAX traces uses it"):
        jax.jit(lambda ids: sok.lookup_sparse(v, ids))(array([[1]]))
    np.testing.assert_array_equal(sok.lookup_sparse(v, array([[1]])), np.full((1, DIM), 2.0))


@pytest.mark.skipif(BACKEND != "jax", reason="frameworks other than JAX have integers of 64 bits")
def test_ids_that_jax_would_cut_are_refused():
    v = sok.DynamicVariable(dimension=DIM, initializer="0")
    assert sok.lookup_sparse(v, np.array([[1, -1], [2, 3]])).shape == (2, DIM)
    for look_up in (sok.lookup_sparse, sok.all2all_dense_embedding):
        with pytest.raises(ValueError, match="JAX has ids of 32 bits. Received: 1099511627783"):
            look_up(v, np.array([[1, 2**40 + 7]]))
    with pytest.raises(ValueError, match="JAX has ids of 32 bits. Received: 4294967305"):
        sok.lookup_sparse(v, (np.array([1, 2**32 + 9]), np.array([0, 2])))
    assert v.table.keys().tolist() == [1, 2, 3]


@pytest.mark.skipif(BACKEND != "torch", reason="a mode of PyTorch")
def test_a_variable_that_inference_has_used_first_can_be_trained():
    v = sok.DynamicVariable(dimension=DIM, initializer="1")
    with torch.inference_mode():
        sok.lookup_sparse(v, array([[1]]))
    step(
        [v],
        sok.OptimizerWrapper(keras.optimizers.SGD(RATE)),
        lambda values: sok.lookup_sparse(v, torch.tensor([[1]])).sum(),
    )
    np.testing.assert_array_equal(v.table.find([1])[0], [[1.0 - RATE] * DIM])


@pytest.mark.skipif(BACKEND != "torch", reason="a loop of PyTorch")
def test_a_loop_with_a_dense_model_and_backward():
    v, dense = sok.DynamicVariable(dimension=DIM, initializer="1"), torch.nn.Linear(DIM, 1)
    torch.nn.init.ones_(dense.weight)
    sparse_optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(RATE))
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=0.0)
    (trigger,) = sok.triggers(v)
    device = keras.ops.convert_to_tensor(0.0).device
    dense.to(device)
    for _ in range(3):
        rows = sok.lookup_sparse(v, array([[1, 2], [2, -1]]), combiners="sum")
        dense(rows).sum().backward()
        sparse_optimizer.apply([trigger.value.grad], [trigger])
        trigger.value.grad = None
        dense_optimizer.step()
        dense_optimizer.zero_grad()
    np.testing.assert_array_equal(v.table.find([1, 2])[0], [[-0.5] * DIM, [-2.0] * DIM])


def test_ids_of_any_shape_and_several_kinds_of_tables():
    host = variable(some_rows(), var_type="hybrid")
    rows = sok.all2all_dense_embedding(host, array([[3, 1], [0, 3]]))
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(keras.ops.stop_gradient(rows)), some_rows()[[[3, 1], [0, 3]]]
    )
    fixed = sok.DynamicVariable(dimension=2, trainable=False, initializer="5")
    both = sok.lookup_sparse([host, fixed], [array([[1]]), array([[9]])])
    assert keras.ops.convert_to_numpy(keras.ops.stop_gradient(both[1])).tolist() == [[5.0, 5.0]]
    assert len(sok.triggers([host, fixed, host])) == 2
    sok.lookup_sparse(fixed, array([[10]]), training=False)
    assert fixed.table.stats().size == 1
    assert sok.filter_variables([fixed, 1, host]) == ([fixed, host], [1])
    assert np.asarray(keras.ops.convert_to_numpy(fixed.size)).tolist() == [1, 2]


def test_a_variable_of_a_fixed_size():
    rows = some_rows()
    v = sok.Variable(rows)
    assert v.shape == (KEYS, DIM) and "shape=(12, 3)" in repr(v)
    np.testing.assert_array_equal(v.numpy(), rows)
    step(
        [v],
        sok.OptimizerWrapper(keras.optimizers.SGD(RATE)),
        lambda values: keras.ops.sum(sok.lookup_sparse(v, array([[1, 1], [4, -1]]), combiners="sum", triggers=values)),
    )
    rows[[1, 4]] -= [[2 * RATE], [RATE]]
    np.testing.assert_allclose(v.numpy(), rows, rtol=1e-6)
    # JAX wraps the error. A GPU tells of it at a later call.
    with pytest.raises(Exception, match="id 12 .*is outside table"):
        sok.lookup_sparse(v, array([[KEYS]]))
        v.table.find([0])
        sok.lookup_sparse(v, array([[0]]))
    shaped = sok.Variable(shape=(4, 2), initializer=keras.initializers.Constant(3.0))
    keys, contents = sok.export(shaped)
    assert keras.ops.convert_to_numpy(keys).tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(shaped.numpy(), keras.ops.convert_to_numpy(contents))
    np.testing.assert_array_equal(shaped.numpy(), np.full((4, 2), 3.0))
    made = sok.Variable(shape=(2, 2), initializer=lambda shape, dtype: np.ones(shape, dtype))
    np.testing.assert_array_equal(made.numpy(), np.ones((2, 2)))


def test_dumps_of_variables(tmp_path):
    v, fixed = variable(some_rows(), name="grows"), sok.Variable(some_rows(1), name="stays")
    sok.dump(tmp_path / "dump", [v, fixed])
    sok.assign(v, [0, 40], np.zeros((2, DIM)))
    sok.assign(fixed, [0], np.zeros((1, DIM)))
    sok.load(tmp_path / "dump", [v, fixed])
    keys, rows = sok.export(v)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(rows), some_rows())
    assert len(keys) == KEYS
    np.testing.assert_array_equal(fixed.numpy(), some_rows(1))


def test_the_program_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "variables.md").read_text()
    (program,) = re.findall(rf"^```python {BACKEND}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(program, "docs/variables.md", "exec"), {})
    assert capsys.readouterr().out == "4 users\n"


def test_wrong_arguments():
    v = sok.DynamicVariable(dimension=2)
    for made in (v, sok.Variable([[1.0]])):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotImplementedError, match="has its rows in a table"):
                copied(made)
    for initializer in (keras.initializers.Orthogonal(), keras.initializers.HeNormal()):
        with pytest.raises(ValueError, match="initializer"):
            sok.DynamicVariable(dimension=2, initializer=initializer)
    assert sok.DynamicVariable(2, key_type=np.int32, dtype=np.float32).key_type == "int32"
    splits = (array([1, 2]), array([0.0, 2.0], "float32")), (array([1, 2]), array([]))
    for wrong in (array([1, 2]), (array([1]),), [1, 2], (array([[1]]), array([0, 1])), *splits, "ids", None):
        with pytest.raises(TypeError, match="`sp_ids` must be pairs of values and row splits, or dense ids"):
            sok.lookup_sparse(v, wrong)
    with pytest.raises(ValueError, match=r"`sp_weights` must have the shape of the ids, \(1, 2\). Received: \(2,\)"):
        sok.lookup_sparse(v, array([[1, 2]]), array([1.0, 2.0], "float32"))
    with pytest.raises(ValueError, match="`triggers` must be the values of the 1 triggers of `params`. Received: 2"):
        sok.lookup_sparse(v, array([[1, 2]]), triggers=[None, None])
    with pytest.raises(TypeError, match="takes `sok_keras.triggers"):
        sok.OptimizerWrapper("sgd").apply([array([[1.0]], "float32")], [v])
    with pytest.raises(ValueError, match="Ids of .* must be int32"):
        sok.lookup_sparse(sok.DynamicVariable(dimension=2, key_type="int32"), array([[1.0]], "float32"))
    with pytest.raises(ValueError, match="Either `initial_value` or `shape`"):
        sok.Variable()
    with pytest.raises(ValueError, match="two axes"):
        sok.Variable([1.0])
    with pytest.raises(ValueError, match="`dtype` must be float32"):
        sok.Variable([[1.0]], dtype="float16")
    with pytest.raises(TypeError, match="`params` must be"):
        sok.triggers([1])


def test_ids_get_their_rows_by_chance_with_a_filter():
    v = sok.DynamicVariable(dimension=DIM, initializer="3", filter_ratio=0.3)
    ids = array(np.arange(1000).reshape(500, 2))

    def loss(triggers):
        rows = sok.lookup_sparse(v, ids, combiners="sum", use_low_frequency_filter=True, triggers=triggers)
        return rows.sum()

    step([v], sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), loss)
    keys, rows = map(keras.ops.convert_to_numpy, sok.export(v))
    assert 200 < len(keys) < 400 and (rows == 2).all()
    with pytest.raises(ValueError, match="`use_low_frequency_filter` must be True"):
        sok.lookup_sparse(v, ids)
