"""Loads into tables of other names and layers, and dumps without optimizer states."""

import keras
import numpy as np
import pytest

import sok_keras as sok
from dumped import assert_equal, assert_tables_equal, compiled, contents_of, filled, two_tables
from reference import DIM, fit, table_of


def copies():
    """A layer of each kind, with an empty table of the same dim."""
    config = sok.TableConfig("mine", None, DIM, seed=3)
    distributed = sok.DistributedEmbedding([sok.FeatureConfig("f", config)], name="many")
    return sok.DynamicEmbedding(DIM, seed=3, name="one").get_table(), distributed.get_tables()["mine"]


@pytest.mark.parametrize("mode", ["replace", "merge"])
def test_tables_are_read_under_other_names_between_layers_of_either_kind(tmp_path, mode):
    one = filled()
    sok.dump(tmp_path / "one", one)
    many = two_tables("two")
    sok.dump(tmp_path / "two", many)
    for table in copies():
        report = sok.load(tmp_path / "one", {"filled": table}, mode=mode)
        assert report.tables == {"filled": len(one.get_table())} and not report.variables
        assert_tables_equal(table, one.get_table())
    for table in copies():
        sok.load(tmp_path / "two", {"two/dynamic": table}, mode=mode)
        assert_tables_equal(table, many.get_tables()["dynamic"])


def test_several_tables_of_a_model_are_read_at_once(tmp_path):
    sok.dump(tmp_path / "d", [filled(), two_tables("two")])
    first, second = copies()
    report = sok.load(tmp_path / "d", {"filled": second, "two/dynamic": first})
    assert list(report.tables) == ["filled", "two/dynamic"]
    assert_tables_equal(second, filled().get_table())
    assert_tables_equal(first, two_tables("two").get_tables()["dynamic"])


def test_tables_of_one_name_may_be_read_side_by_side(tmp_path):
    sok.dump(tmp_path / "d", [filled(), two_tables("two")])
    first, second = (sok.DynamicEmbedding(DIM, name="same").get_table() for _ in range(2))
    sok.load(tmp_path / "d", {"filled": first, "two/dynamic": second})
    assert len(first) == 20 and len(second) == 9


def test_a_dict_that_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    sok.dump(tmp_path / "d", [filled(), two_tables("two")])
    table, _ = copies()
    table.assign([1], np.ones((1, DIM)))
    before = contents_of(table)
    narrow = sok.DynamicEmbedding(DIM + 1).get_table()
    for source, error, says in (
        ({"unknown": table}, sok.DumpMismatchError, "got `unknown`"),
        ({"filled": table, "two/dynamic": narrow}, sok.DumpMismatchError, "dim"),
        ({"filled": table, "two/dynamic": table}, ValueError, "each `Table` once"),
        ({"filled": filled()}, ValueError, "must have `Table`s or variables of this package as values"),
        ({}, ValueError, "must have `Table`s or variables of this package as values"),
    ):
        with pytest.raises(error, match=says):
            sok.load(tmp_path / "d", source)
    with pytest.raises(ValueError, match="`tables` must be None"):
        sok.load(tmp_path / "d", {"filled": table}, tables=["one"])
    assert_equal(contents_of(table).values(), before.values())


def test_a_dump_without_states_has_rows_and_weights_alone(tmp_path):
    model = compiled(keras.optimizers.Adam(0.02))
    fit(model)
    whole, bare = sok.dump(tmp_path / "whole", model), sok.dump(tmp_path / "bare", model, states=False)
    assert len(whole.tables[0].states) == 2 and bare.tables[0].states == ()
    assert bare.step == whole.step
    sok.verify(tmp_path / "bare")
    size = {name: sum(f.stat().st_size for f in (tmp_path / name).iterdir()) for name in ("whole", "bare")}
    assert size["bare"] < 0.6 * size["whole"]

    twin = compiled(keras.optimizers.Adam(0.02))
    sok.load(tmp_path / "bare", twin)
    np.testing.assert_array_equal(table_of(twin).keys(), table_of(model).keys())
    np.testing.assert_array_equal(table_of(twin)[table_of(model).keys()], table_of(model).export().rows)
    assert_equal(twin.layers[-1].get_weights(), model.layers[-1].get_weights())
    fit(twin)  # with any optimizer, whose states start anew
    other = compiled(keras.optimizers.SGD(0.02, momentum=0.9))
    sok.load(tmp_path / "bare", other)
    fit(other)


def test_states_are_reset_by_a_load_of_a_dump_without_them(tmp_path):
    model = compiled(keras.optimizers.Adam(0.02))
    fit(model)
    sok.dump(tmp_path / "bare", model, states=False)
    assert any(state.any() for state in table_of(model).export(states=True).states.values())
    sok.load(tmp_path / "bare", model)
    assert not any(state.any() for state in table_of(model).export(states=True).states.values())
