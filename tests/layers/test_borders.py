"""Wrong numbers given to the native module are errors, and a number of threads is 1 to 1024."""

import os
import subprocess
import sys

import pytest

import sok_keras as sok

native = sok.backend.native


def group():
    layer = sok.DynamicEmbedding(4)
    layer.build()
    return layer.get_table()._core.group


@pytest.mark.parametrize("number", [-1, 1, 99, 2**40])
def test_numbers_of_tables_that_are_not_there_are_refused(number):
    with pytest.raises(ValueError, match=f"one of 1 tables. Received: {number}"):
        native.Table(group(), number)
    with pytest.raises(ValueError, match=f"one of 1 tables. Received: {number}"):
        native.Plan(group(), [("f", number, False, "each", False, False, "sum", None)])


def test_an_optimizer_of_groups_that_come_twice_or_have_no_update_is_refused():
    one = group()
    for groups, updates in [([one, one], []), ([one], [])]:
        with pytest.raises(ValueError, match="`groups` must be different ones"):
            native.Optimizer(groups, updates, False, False)


@pytest.mark.parametrize("threads", [0, -1, 1025, 2**70, "many", 1.5, None])
def test_threads_are_1_to_1024(threads):
    with pytest.raises(ValueError, match="`threads` must be an integer from 1 to 1024. Received:"):
        native.set_num_threads(threads)


def test_threads_of_the_environment_are_1_to_1024():
    code = """
import numpy as np, os, tempfile, sok_keras as sok
layer = sok.DynamicEmbedding(4)
layer.build()
for text in ["0", "-3", "100000", "1" * 30, "many", ""]:
    os.environ["SOK_NUM_THREADS"] = text
    try:
        path = tempfile.mkdtemp()
        layer.get_table().find_or_insert(np.arange(10))
        sok.backend.native.dump((path, [layer.get_table()._native], [], (True, 0, True, None)))
        sok.verify(path)
    except ValueError as error:
        assert str(error) == f"SOK_NUM_THREADS must be an integer from 1 to 1024. Received: {text}", error
    else:
        raise AssertionError(text)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=120)


def test_rows_wider_than_any_memory_are_refused():
    with pytest.raises(ValueError, match="`embedding_dim` must be between 1 and 1048576. Received: 1099511627776"):
        sok.DynamicEmbedding(2**40).build()


def test_what_does_not_fit_into_memory_raises_memory_error():
    code = """
import resource, numpy as np, sok_keras as sok
layer = sok.DynamicEmbedding(2**16)
layer.build()
table = layer.get_table()
table.find_or_insert(np.arange(1000))
before = table.find(np.arange(10))[0]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
for call in [lambda: table.find(np.arange(60_000)), table.export, lambda: table.find_or_insert(np.arange(5_000))]:
    try:
        call()
    except MemoryError:
        pass
    else:
        raise AssertionError("it fits")
assert len(table) == 1000
np.testing.assert_array_equal(table.find(np.arange(10))[0], before)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=120)
