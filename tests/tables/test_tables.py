"""Tables in a user's hands, and what becomes of keys that a full one refuses."""

import keras
import numpy as np
import pytest
from keras import ops

import sok_keras as sok
from one_table import DIM, distributed, table_of, train_step
from reference import raises, to_numpy


@pytest.fixture
def table():
    table = sok.DynamicEmbedding(DIM, seed=4).get_table()
    table.assign([5, -1, 9], np.arange(12).reshape(3, DIM))
    return table


def test_find_never_inserts(table):
    rows, found = table.find([9, 777, 5])
    assert found.tolist() == [True, False, True]
    np.testing.assert_array_equal(rows[[0, 2]], [[8, 9, 10, 11], [0, 1, 2, 3]])
    assert len(table) == 3


def test_find_or_insert_counts_distinct_keys(table):
    rows, outcomes = table.find_or_insert([5, 6, 6, 5, 7])
    assert outcomes == sok.Outcomes(hit=1, inserted=2, filtered=0, evicted=0, expired=0, refused=0)
    np.testing.assert_array_equal(rows[1], rows[2])
    assert len(table) == 5


def test_assign_of_duplicates_keeps_the_last(table):
    outcomes = table.assign([5, 6, 5], np.repeat([[1.0], [2.0], [3.0]], DIM, 1))
    assert (outcomes.hit, outcomes.inserted) == (1, 1)
    np.testing.assert_array_equal(table.find([5, 6])[0][:, 0], [3, 2])


def test_assign_without_insert_leaves_unknown_keys_out(table):
    assert table.assign([5, 6], np.ones((2, DIM)), insert=False).refused == 1
    assert table.find([5, 6])[1].tolist() == [True, False]


def test_erase_counts_what_was_there(table):
    assert table.erase([5, 6, 5]) == 1
    assert table.export().keys.tolist() == [-1, 9]


def test_export_is_in_ascending_order_and_a_copy(table):
    contents = table.export()
    assert contents.keys.dtype == np.int64 and contents.keys.tolist() == [-1, 5, 9]
    contents.rows[:] = 0
    np.testing.assert_array_equal(table.export().rows[:, 0], [4, 0, 8])
    assert table.export(states=True).states == {}  # no optimizer is bound


def test_keys_are_ascending(table):
    keys = table.keys()
    assert keys.dtype == np.int64 and keys.tolist() == [-1, 5, 9]
    table.clear()
    assert table.keys().shape == (0,)


def test_in_says_whether_a_key_has_a_row(table):
    assert 5 in table and np.int32(9) in table and 2**64 - 1 in table and 6 not in table
    assert len(table) == 3
    for wrong in ([5], np.array([5, 9]), "5", 5.0, None):
        with pytest.raises(TypeError):
            wrong in table  # noqa: B015


def test_rows_by_key(table):
    np.testing.assert_array_equal(table[5], [0, 1, 2, 3])
    np.testing.assert_array_equal(table[[[9, 5]]], [[[8, 9, 10, 11], [0, 1, 2, 3]]])
    assert table[np.empty((0, 2), "int64")].shape == (0, 2, DIM)
    with pytest.raises(KeyError, match=r"has no rows for 2 of 3 keys: \[6, -7\]"):
        table[[6, 5, -7]]
    with pytest.raises(TypeError, match="must be integers"):
        table["5"]
    assert len(table) == 3


@pytest.mark.parametrize("num_rows", [1, 7, 1000, 65_536])
def test_pieces_are_all_rows_once(num_rows):
    table = sok.DynamicEmbedding(DIM, seed=4).get_table()
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 3000 if num_rows > 1 else 30)
    table.find_or_insert(keys)
    pieces = list(table.pieces(num_rows))
    assert all(0 < len(piece.keys) <= num_rows and np.all(piece.keys[1:] > piece.keys[:-1]) for piece in pieces)
    found = np.concatenate([piece.keys for piece in pieces])
    np.testing.assert_array_equal(np.sort(found), np.sort(keys))
    np.testing.assert_array_equal(np.concatenate([piece.rows for piece in pieces]), table[found])
    assert sorted(table) == sorted(keys.tolist())


def test_pieces_have_states():
    layer = sok.DynamicEmbedding(DIM, seed=4)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    train_step(layer, optimizer, lambda: ops.sum(layer(np.array([3, 4, 5], "int32"), training=True)))
    table = layer.get_table()
    (piece,) = table.pieces(states=True)
    whole = table.export(states=True)
    assert set(piece.states) == set(whole.states) and len(whole.states) == 2
    for name, state in whole.states.items():
        np.testing.assert_array_equal(piece.states[name], state)
    assert next(table.pieces()).states == {}


def test_pieces_of_a_table_that_changes_raise():
    table = sok.DynamicEmbedding(DIM).get_table()
    table.find_or_insert(np.arange(10))
    for change in (lambda: table.find_or_insert([99]), lambda: table.erase([3])):
        pieces = table.pieces(4)
        next(pieces)
        change()
        with pytest.raises(RuntimeError, match="must not gain or lose rows"):
            next(pieces)
    pieces = table.pieces(4)
    next(pieces)
    table.assign([4], np.ones((1, DIM)))  # no row comes or goes
    assert len(list(pieces)) == 2


@pytest.mark.parametrize("num_rows", [0, -1, 2.5, None])
def test_pieces_of_no_rows_are_refused(table, num_rows):
    with pytest.raises(ValueError, match="`num_rows` must be a positive integer"):
        table.pieces(num_rows)


def test_export_of_scores_is_refused_without_a_policy(table):
    with pytest.raises(ValueError, match=r"`scores` must be False, because table .* has no `eviction` policy"):
        table.export(scores=True)
    assert table.export().scores is None


def test_export_of_an_empty_table_has_its_shapes():
    contents = sok.DynamicEmbedding(DIM).get_table().export(states=True)
    assert contents.keys.shape == (0,) and contents.rows.shape == (0, DIM)


def test_clear_empties_a_table(table):
    table.clear()
    assert len(table) == 0 and table.export().rows.shape == (0, DIM)


def test_empty_lists_of_keys_pass(table):
    assert table.find([])[0].shape == (0, DIM)
    assert table.find_or_insert([])[1] == table.assign([], []) == sok.Outcomes(0, 0, 0, 0, 0, 0)
    assert table.erase([]) == 0


def test_exported_states_bear_the_names_of_the_optimizer():
    layer = sok.DynamicEmbedding(DIM)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    train_step(layer, optimizer, lambda: ops.sum(layer(np.array([3], "int32"), training=True)))
    states = layer.get_table().export(states=True).states
    assert {name: state.shape for name, state in states.items()} == {"momentum": (1, DIM), "velocity": (1, DIM)}
    np.testing.assert_allclose(states["momentum"], 0.1, rtol=1e-6)
    np.testing.assert_allclose(states["velocity"], 0.001, rtol=1e-4)


def test_assign_keeps_states_and_set_embedding_tables_does_not():
    layer = sok.DynamicEmbedding(DIM, name="t")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1, momentum=0.9))
    train_step(layer, optimizer, lambda: ops.sum(layer(np.array([3], "int32"), training=True)))
    table = layer.get_table()
    before = table.export(states=True).states
    (name,) = before
    assert before[name].any()
    table.assign([3], np.zeros((1, DIM)))
    np.testing.assert_array_equal(table.export(states=True).states[name], before[name])
    layer.set_embedding_tables({"t": ([3], np.zeros((1, DIM)))})
    assert not table.export(states=True).states[name].any()


def test_stats_add_up():
    layer = distributed(combiner="sum", max_capacity=4, check_mode="count")
    optimizer = sok.OptimizerWrapper("sgd")
    for ids in ([[1, 2, 1], [2, 3, 3]], [[1, 4, 5], [6, 6, 6]]):
        train_step(layer, optimizer, lambda: ops.sum(layer(np.array(ids, "int32"), training=True)))  # noqa: B023
    stats = table_of(layer).stats()
    assert (stats.hits, stats.inserted, stats.refused, stats.filtered, stats.evicted) == (1, 4, 2, 0, 0)
    assert stats.hits + stats.inserted + stats.refused == 3 + 4  # distinct keys of both calls
    assert stats.dropped_gradients == 4  # of the ids 5, 6, 6 and 6
    assert (stats.size, stats.native_calls, stats.pending_pushes) == (4, 2 * 4, 0)
    assert stats.size <= stats.capacity and stats.bytes >= 4 * (8 + 4 * DIM)


# ---- max_capacity


def full_table(check_mode):
    layer = sok.DynamicEmbedding(DIM, max_capacity=2, check_mode=check_mode, missing="zeros")
    layer(np.array([1], "int32"), training=True)
    return layer


def test_raise_changes_nothing():
    layer = full_table("raise")
    with raises(sok.TableFullError, "no room for 1 of the new keys, it holds 1 of at most 2 rows", layer.get_table()):
        layer(np.array([2, 3], "int32"), training=True)
    assert layer.get_table().export().keys.tolist() == [1]
    layer(np.array([2], "int32"), training=True)
    assert layer.get_table().export().keys.tolist() == [1, 2]


def test_raised_error_has_its_numbers():
    with pytest.raises(sok.TableFullError) as caught:
        full_table("raise").get_table().find_or_insert([2, 3])
    assert (caught.value.refused, caught.value.capacity) == (1, 2)  # of two new keys there is room for one


def test_warn_names_the_table_and_goes_on():
    layer = full_table("warn")
    with pytest.warns(UserWarning, match=rf"Table '{layer.name}' is full: it refused 1 of the new keys"):
        rows = to_numpy(layer(np.array([2, 3, 3], "int32"), training=True))
        layer.get_table().synchronize()
    assert len(layer.get_table()) == 2
    assert layer.get_table().stats().refused == 1
    assert (rows != 0).any(axis=1).tolist() == [True, False, False]


def test_count_only_counts():
    layer = full_table("count")
    layer(np.array([2, 3, 4], "int32"), training=True)
    assert (len(layer.get_table()), layer.get_table().stats().refused) == (2, 2)


def test_gradients_of_refused_keys_are_dropped_and_counted():
    layer = sok.DynamicEmbedding(DIM, "zeros", max_capacity=1, check_mode="count")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    train_step(layer, optimizer, lambda: ops.sum(layer(np.array([1, 2], "int32"), training=True)))
    contents, stats = layer.get_table().export(), layer.get_table().stats()
    np.testing.assert_array_equal(contents.rows, -np.ones((1, DIM)))
    assert (stats.refused, stats.dropped_gradients, stats.pending_pushes) == (1, 1, 0)
