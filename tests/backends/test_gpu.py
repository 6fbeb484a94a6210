"""Tables on a GPU: the order of calls beside other work, compiled steps, tables on the host under a model on the GPU."""

import contextlib
import json

import keras
import numpy as np
import pytest
from keras import layers, ops

import sok_keras as sok
from reference import BACKEND, ON_GPU, assert_close, our_embedding, rows_of, to_numpy
from sok_keras.backend.insertion import Insertion

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU that the framework computes on")


@pytest.mark.skipif(ON_GPU, reason="a GPU is there, and is used")
def test_hbm_without_a_gpu_is_one_clear_error():
    with pytest.raises(sok.DeviceError, match='`storage="hbm"` needs a GPU that the model runs on'):
        sok.DynamicEmbedding(4, storage="hbm")
    assert sok.DynamicEmbedding(4)._core.gpu is None


@pytest.mark.skipif(ON_GPU, reason="a GPU is there, and is used")
def test_core_asked_for_a_gpu_that_is_not_there_says_so():
    config = dict(sok.DynamicEmbedding(4)._core.configs[0])
    with pytest.raises(sok.DeviceError, match="a GPU was asked for, but"):
        sok.backend.native.Group([json.dumps(config)], 0)


def test_tables_of_a_layer_have_one_storage():
    tables = [sok.TableConfig(name, None, 4, storage=storage) for name, storage in (("a", "host"), ("b", "hbm"))]
    features = {table.name: sok.FeatureConfig(table.name, table) for table in tables}
    with pytest.raises(ValueError, match="must have one `storage`"):
        sok.DistributedEmbedding(features)


@needs_gpu
def test_auto_is_the_memory_of_the_gpu():
    assert sok.DynamicEmbedding(4)._core.gpu == 0
    assert sok.DynamicEmbedding(4, storage="hbm")._core.gpu == 0
    assert sok.DynamicEmbedding(4, storage="host")._core.gpu is None


# Launches of a step.
OURS = (
    *("deliver", "find_records", "settle_records", "count_digits", "sort_pass", "list_keys", "make_rows"),
    *("check_finite", "write_ticket", "weight_gradients", "resolve", "prepare", "update", "merge", "update_sums"),
)


def busy_model(storage, compile_arguments):
    """Large products before and after the lookup, so that a call on another stream would come too early."""
    keras.utils.set_random_seed(5)
    embedding = sok.DynamicEmbedding(64, seed=3, storage=storage)
    ids, numbers = keras.Input((8,), dtype="int32"), keras.Input((1024,))
    dense = numbers
    for _ in range(3):
        dense = layers.Dense(1024, activation="tanh")(dense)
    rows = layers.Flatten()(embedding(ids))
    both = layers.Concatenate()([rows * ops.mean(dense, axis=-1, keepdims=True), dense])
    for _ in range(3):
        both = layers.Dense(1024, activation="tanh")(both)
    model = keras.Model([ids, numbers], layers.Dense(1)(both))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(1e-3)), "mse", **compile_arguments)
    return model, embedding


def busy_rows(storage, compile_arguments):
    model, embedding = busy_model(storage, compile_arguments)
    random = np.random.default_rng(1)
    ids = random.integers(0, 3000, (4096, 8)).astype("int32")
    numbers = random.normal(size=(4096, 1024)).astype("float32")
    model.fit([ids, numbers], numbers[:, :1], batch_size=512, epochs=2, shuffle=False, verbose=0)
    return embedding.get_table().find(np.arange(3000))[0]


@needs_gpu
@pytest.mark.parametrize("compile_arguments", [{}, {"run_eagerly": True}], ids=["traced", "eager"])
def test_steps_are_in_order_with_work_around_them(compile_arguments):
    """Tables on the host wait for the stream in each call; those on the GPU must see the same."""
    assert_close(busy_rows("hbm", compile_arguments), busy_rows("host", compile_arguments), 2e-5)


@needs_gpu
def test_dumps_go_from_one_memory_to_the_other(tmp_path):
    keys = np.arange(0, 5000, 7)
    on_gpu, on_host = (sok.DynamicEmbedding(5, seed=1, storage=storage) for storage in ("hbm", "host"))
    rows, _ = on_gpu.get_table().find_or_insert(keys)
    sok.dump(tmp_path / "gpu", on_gpu)
    sok.load(tmp_path / "gpu", on_host)
    np.testing.assert_array_equal(on_host.get_table().find(keys)[0], rows)
    on_host.get_table().assign(keys[:9], np.ones((9, 5), "float32"))
    sok.dump(tmp_path / "host", on_host)
    sok.load(tmp_path / "host", on_gpu)
    np.testing.assert_array_equal(on_gpu.get_table().export().rows, on_host.get_table().export().rows)


def steps_of(num_tables, weighted=False):
    """A function that makes the next of a few steps of a layer with so many tables, 500 ids each, the first of them new.

    `weighted`: ids have weights, and gradients are float16, which are looked at for a loss scale.
    """
    import torch

    tables = [sok.TableConfig(f"t{t}", None, (8, 64)[t % 2], initial_capacity=100_000) for t in range(num_tables)]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(table.name, table) for table in tables])
    layer.build()
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    optimizer.build(layer.trainable_variables)
    features = [(table.name, t, False, "each", weighted, False, "sum", None) for t, table in enumerate(tables)]
    row_dtype = "float16" if weighted else "float32"
    plan = layer._core.plan(tuple(features), row_dtype)
    weights = [torch.full((500,), 0.5, device="cuda") if weighted else None] * num_tables
    batches = iter([[torch.arange(first, first + 500, device="cuda")] * num_tables for first in range(12)])
    dtype = getattr(torch, row_dtype)
    gradients = [torch.ones(500, table.embedding_dim, device="cuda", dtype=dtype) for table in tables]
    one, scalars = torch.ones(1, device="cuda"), torch.tensor([0.1, 1.0, 1.0, 1.0], device="cuda")

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *rows):
            return rows[0].new_empty(())

        @staticmethod
        def backward(ctx, _):
            return tuple(gradients)

    def step(trigger):
        rows = sok.backend.lookup(plan, trigger, True, [(i,) for i in next(batches)], weights, Insertion.AT_LOOKUP)
        (ticket,) = torch.autograd.grad(Loss.apply(*rows), [trigger])
        norm = sok.backend.commit(optimizer._tables, one, [ticket])
        return sok.backend.apply(optimizer._tables, scalars, norm, [trigger.detach()])[0].requires_grad_()

    trigger = torch.zeros(64, 2, device="cuda", requires_grad=True)
    for _ in range(4):
        trigger = step(trigger)
    torch.cuda.synchronize()
    return step, trigger


@needs_gpu
@pytest.mark.skipif(BACKEND != "torch", reason="reads the trace that PyTorch's profiler makes")
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("num_tables", [1, 40])
def test_launches_of_a_steady_step_do_not_grow_with_its_tables(num_tables, weighted):
    from torch.profiler import ProfilerActivity, profile

    step, trigger = steps_of(num_tables, weighted)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(4):
            trigger = step(trigger)
    events = trace.profiler.kineto_results.events()
    on_device = [event.name() for event in events if "CUDA" in str(event.device_type())]
    assert not [name for name in on_device if name.startswith("Memcpy")], on_device
    kernels = [name.split("(")[0].split("<")[0].split()[-1] for name in on_device if "at::" not in name]
    counts = {name: kernels.count(name) / 4 for name in OURS if name in kernels}
    assert all(count == 1 for name, count in counts.items() if name != "sort_pass"), counts
    assert 11 <= sum(counts.values()) <= 14, counts
    assert ("weight_gradients" in counts) == ("check_finite" in counts) == weighted


@needs_gpu
@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch can keep a GPU busy")
def test_steady_step_does_not_wait_for_the_device():
    import torch

    step, trigger = steps_of(3)
    torch.cuda._sleep(2_000_000_000)  # about a second
    slept = torch.cuda.Event()
    slept.record()
    step(trigger)
    assert not slept.query()


@needs_gpu
@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch alone has tensors in pinned memory, or beside the model")
@pytest.mark.parametrize("storage", ["hbm", "host"])
def test_ids_may_be_in_memory_of_the_host(storage):
    import torch

    layer = sok.DynamicEmbedding(4, storage=storage)
    layer.build()
    plan = layer._core.plan((("f", 0, False, "each", False, False, "sum", None),))
    ids = torch.arange(5)
    for given in (ids, ids.pin_memory(), ids.cuda()):
        (rows,) = sok.backend.lookup(plan, layer.trigger.value, True, [(given,)], [None], Insertion.AT_LOOKUP)
        assert rows.is_cuda
        np.testing.assert_array_equal(to_numpy(rows), layer.get_table().find(np.arange(5))[0])


@needs_gpu
def test_gradient_of_a_batch_of_one_may_begin_anywhere():
    """That of a row behind 13 columns begins at any float, and PyTorch hands it over as it lies."""
    numbers, ids = np.ones((1, 13), "float32"), np.array([[5]], "int32")
    rows = []
    for storage in ("hbm", "host"):
        keras.utils.set_random_seed(1)
        embedding = sok.DynamicEmbedding(16, seed=2, storage=storage)
        inputs = keras.Input((13,)), keras.Input((1,), dtype="int32")
        both = layers.Concatenate()([inputs[0], layers.Flatten()(embedding(inputs[1]))])
        model = keras.Model(inputs, layers.Dense(1)(both))
        model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse", run_eagerly=BACKEND == "torch")
        model.fit([numbers, ids], np.ones((1, 1), "float32"), epochs=2, verbose=0)
        rows.append(embedding.get_table().find(np.array([5]))[0])
    assert_close(*rows)


@needs_gpu
@pytest.mark.skipif(BACKEND != "jax", reason="tests what XLA does under JAX")
def test_equal_and_rematerialised_lookups_count_each_push_once():
    import jax

    ids = np.arange(6).reshape(2, 3).astype("int32")

    def gradients_of(loss):
        layer = our_embedding()
        layer.build()
        optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
        optimizer.build(layer.trainable_variables)
        (ticket,) = jax.jit(jax.grad(lambda values: loss(layer, values)))([layer.trigger.value])
        optimizer.apply([ticket], layer.trainable_variables)
        return rows_of(layer)

    def call(layer, values):
        return layer.stateless_call(values, [], ids, training=True)[0]

    once = gradients_of(lambda layer, values: 2.0 * call(layer, values).sum())
    twice = gradients_of(lambda layer, values: call(layer, values).sum() + call(layer, values).sum())
    again = gradients_of(lambda layer, values: jax.checkpoint(lambda v: 2.0 * call(layer, v).sum())(values))
    assert_close(twice, once)
    assert_close(again, once)


@needs_gpu
def test_what_the_device_finds_is_told_by_its_class_once_at_the_next_read():
    table = sok.TableConfig("t", 10, 4)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("f", table))
    rows = to_numpy(layer(np.array([[3], [12]], "int32"), training=True))
    np.testing.assert_array_equal(rows[1], np.zeros(4))
    with pytest.raises(ValueError, match="id 12 is outside table"):
        len(layer.get_tables()["t"])
    assert layer.get_tables()["t"].export().keys.tolist() == [3]


@needs_gpu
def test_full_table_says_so_before_anything_has_changed():
    layer = sok.DynamicEmbedding(4, max_capacity=3)
    layer(np.array([1, 2], "int32"), training=True)
    with pytest.raises(Exception, match="is full: no room for 2 of the new keys"):
        ops.convert_to_numpy(layer(np.array([1, 3, 4, 5], "int32"), training=True))
    with contextlib.suppress(sok.TableFullError):  # JAX tells it here too
        layer.get_table().synchronize()
    assert layer.get_table().export().keys.tolist() == [1, 2]
