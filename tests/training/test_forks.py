"""A forked child looks up, trains, dumps and loads like any process, whatever the parent's threads did at the moment of the fork."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, ON_GPU
from sok_keras.backend.insertion import Insertion

DIM = 16
TIMEOUT = 60
native = sok.backend.native
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning"),
]
on_host = pytest.mark.skipif(ON_GPU, reason="CUDA cannot be used in a forked process")


def in_child(work):
    """Exit status of a forked child that does `work`; 0 is well. It is killed when it takes longer than a minute."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # The handler of pytest-timeout would wait for the interpreter.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TIMEOUT)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def filled(num_rows=100_000, dim=DIM):
    layer = sok.DynamicEmbedding(dim, seed=3)
    layer.build()
    table = layer.get_table()
    table.find_or_insert(np.arange(num_rows))
    return layer, table


def use(table):
    """Calls of 4,000 and 100,000 ids, which the pool's threads share."""
    for num_ids in (4_000, 100_000):
        ids = np.arange(num_ids)
        rows, found = table.find(ids)
        assert found.all() and np.isfinite(rows).all()
        again, outcomes = table.find_or_insert(ids)
        assert outcomes.hit == num_ids
        np.testing.assert_array_equal(again, rows)
        table.assign(ids, rows + 1)
        np.testing.assert_array_equal(table.find(ids)[0], rows + 1)
        table.assign(ids, rows)
    assert table.erase(np.arange(10)) == 10
    table.find_or_insert(np.arange(10))


def use_native_lookup(layer):
    """The lookup of a step, by the entry point that all bridges call."""
    import torch

    group, ids = layer.get_table()._core.group, torch.arange(100_000)
    plan = native.Plan(group, [("f", 0, False, "each", False, False, "sum", None)])
    for num_ids in (4_000, 100_000):
        rows = torch.empty(num_ids, DIM)
        native.lookup(
            plan.handle, Insertion.AT_LOOKUP, True, [ids[:num_ids]], torch.empty(2, dtype=torch.int32), [rows], None
        )
        assert torch.isfinite(rows).all()


@pytest.fixture
def pool():
    """Threads that a child does not have."""
    native.set_num_threads(4)
    yield
    native.set_num_threads(len(os.sched_getaffinity(0)))


@on_host
def test_calls_of_many_ids_end_in_a_forked_child(pool):
    _, table = filled()
    use(table)
    for _ in range(3):
        assert in_child(lambda: use(table)) == 0
    use(table)


@on_host
def test_dumps_are_written_verified_and_loaded_in_a_forked_child(pool, tmp_path):
    layer, table = filled()
    model = keras.Sequential([keras.Input((1,), dtype="int32"), layer])
    sok.dump(tmp_path / "parent", model)
    sok.verify(tmp_path / "parent")

    def work():
        sok.verify(tmp_path / "parent")
        table.clear()
        sok.load(tmp_path / "parent", model)
        assert len(table) == 100_000
        sok.dump(tmp_path / "child", model)
        sok.verify(tmp_path / "child")

    assert in_child(work) == 0
    sok.verify(tmp_path / "child")


@on_host
@pytest.mark.skipif(BACKEND != "torch", reason="TensorFlow and JAX hang in forked children by themselves")
def test_a_model_is_trained_in_a_forked_child(pool):
    layer = sok.DynamicEmbedding(DIM, combiner="sum", seed=3)
    model = keras.Sequential([keras.Input((8,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.01)), "mse")
    x, y = np.arange(64 * 1024 * 8).reshape(-1, 8) % 50_000, np.ones((64 * 1024, 1), "float32")
    model.fit(x, y, batch_size=4096, epochs=1, verbose=0)
    use_native_lookup(layer)
    before = model.predict(x[:100], verbose=0)

    def work():
        use_native_lookup(layer)
        model.fit(x, y, batch_size=4096, epochs=1, verbose=0)
        assert np.abs(model.predict(x[:100], verbose=0) - before).max() > 0

    assert in_child(work) == 0
    np.testing.assert_array_equal(model.predict(x[:100], verbose=0), before)


@on_host
@pytest.mark.skipif(BACKEND != "jax", reason="other backends compute on the host before a call returns")
def test_a_forked_child_does_not_wait_for_what_its_parent_computes():
    import jax

    _, table = filled()
    matrix = jax.numpy.full((512, 512), 1 / 512)
    products = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, product: product @ matrix, x))
    products(matrix, 1).block_until_ready()
    under_way = products(matrix, 2000)  # seconds
    assert not under_way.is_ready()
    assert in_child(lambda: use(table)) == 0
    np.testing.assert_allclose(under_way, matrix, rtol=1e-3)


@pytest.mark.skipif(not ON_GPU, reason="needs a table on a GPU")
def test_a_forked_child_cannot_use_tables_on_a_gpu_and_raises():
    _, table = filled()

    def work():
        with pytest.raises(sok.DeviceError, match="forked process cannot use the GPU.*spawn"):
            use(table)

    assert in_child(work) == 0
    use(table)


def target(table):
    use(table)


def spawned():
    use(filled()[1])


@pytest.mark.parametrize("method", [pytest.param("fork", marks=on_host), "spawn"])
def test_multiprocessing_works_by_either_method(pool, method):
    if method == "fork":
        process = multiprocessing.get_context("fork").Process(target=target, args=(filled()[1],))
    else:
        process = multiprocessing.get_context("spawn").Process(target=spawned)
    process.start()
    process.join(TIMEOUT)
    is_over = process.exitcode is not None
    process.kill()
    assert is_over and process.exitcode == 0


def fork_beside_calls(table, num_children):
    """Forks while two threads call the table again and again."""
    stop = threading.Event()

    def work(offset):
        ids = np.arange(50_000) + offset
        while not stop.is_set():
            table.find_or_insert(ids)

    threads = [threading.Thread(target=work, args=(50_000 * i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        return [in_child(lambda: use(table)) for _ in range(num_children)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@on_host
def test_children_end_that_were_forked_while_a_thread_was_at_work(pool):
    _, table = filled()
    assert fork_beside_calls(table, 5) == [0] * 5
    use(table)


@pytest.mark.soak
@on_host
def test_a_hundred_children_end_that_were_forked_while_a_thread_was_at_work(pool):
    _, table = filled()
    assert fork_beside_calls(table, 100) == [0] * 100
    use(table)


def slow_ids(table):
    """So many ids without a row that to find them takes some seconds: their first values are what takes long."""
    count, seconds = 10_000, 0.0
    while seconds < 0.25:
        count *= 2
        start = time.monotonic()
        table.find(np.arange(count))
        seconds = time.monotonic() - start
    return np.arange(12 * count)


@on_host
def test_a_fork_waits_a_second_for_a_long_call_and_its_child_raises_for_that_table():
    layer = sok.DynamicEmbedding(256, embeddings_initializer="truncated_normal", missing="initial")
    layer.build()
    table, (_, other) = layer.get_table(), filled(4_000)
    ids = slow_ids(table)
    busy = threading.Thread(target=table.find, args=(ids,))
    busy.start()
    time.sleep(0.5)

    def work():
        other.find(np.arange(4_000))
        with pytest.raises(sok.SokError, match="forked while another thread was at work"):
            table.find(np.arange(3))

    start = time.monotonic()
    assert in_child(work) == 0
    assert busy.is_alive() and time.monotonic() - start > 0.9
    busy.join()
    assert not table.find([1])[1].any()
