"""States go on under the optimizer that they belong to, or it is said; a file that is bad changes nothing."""

import copy
import pickle

import h5py
import keras
import numpy as np
import pytest
from keras import optimizers

import sok_keras as sok
from dumped import all_of, assert_equal, compiled, contents_of
from reference import DIM, embedding_of, fit, our_embedding, table_of, to_numpy

MAKE = {
    "adam": lambda: optimizers.Adam(0.02),
    "amsgrad": lambda: optimizers.Adam(0.02, amsgrad=True),
    "sgd": lambda: optimizers.SGD(0.2),
    "momentum": lambda: optimizers.SGD(0.2, momentum=0.9),
    "rmsprop": lambda: optimizers.RMSprop(0.02),
    "centered": lambda: optimizers.RMSprop(0.02, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.02),
}
# The last two keep as many variables of the same shapes, which mean something else.
PAIRS = [
    ("adam", "sgd"),
    ("sgd", "adam"),
    ("adam", "amsgrad"),
    ("momentum", "sgd"),
    ("rmsprop", "centered"),
    ("momentum", "adagrad"),
]
of_pairs = pytest.mark.parametrize(("dumped", "other"), PAIRS)


def trained(name):
    return fit(compiled(MAKE[name](), our_embedding()), steps=2)


@of_pairs
@pytest.mark.parametrize("steps", [0, 1])
def test_dump_of_another_optimizer_is_refused_before_the_first_step_as_after_it(tmp_path, dumped, other, steps):
    model = trained(dumped)
    sok.dump(tmp_path / "d", model)
    target = compiled(MAKE[other](), our_embedding())
    if steps:
        fit(target, steps=steps)
    before = all_of(target)
    with pytest.raises(sok.DumpMismatchError, match="states=False"):
        sok.load(tmp_path / "d", target)
    assert_equal(all_of(target), before)
    sok.load(tmp_path / "d", target, states=False)
    np.testing.assert_array_equal(table_of(target).export().rows, table_of(model).export().rows)
    assert not any(
        (state != 0.1).all() and state.any() for state in table_of(target).export(states=True).states.values()
    )
    fit(target, steps=1)


def test_dense_variables_of_an_optimizer_that_keeps_more_are_refused_before_the_first_step(tmp_path):
    sok.dump(tmp_path / "d", trained("adam"))
    target = compiled(optimizers.Adam(0.02, use_ema=True), our_embedding())
    before = all_of(target)
    with pytest.raises(sok.DumpMismatchError, match="the optimizer's variables must agree.*states=False"):
        sok.load(tmp_path / "d", target)
    assert_equal(all_of(target), before)


def test_states_that_a_layer_was_given_are_lost_to_another_optimizer_with_a_warning(tmp_path):
    sok.dump(tmp_path / "d", embedding_of(trained("adam")))
    layer = sok.DynamicEmbedding(DIM)
    sok.load(tmp_path / "d", layer)
    with pytest.warns(UserWarning, match="states of another optimizer.*: adam, now sgd.*states start anew"):
        fit(compiled(MAKE["momentum"](), layer), steps=1)


@of_pairs
@pytest.mark.parametrize("steps", [0, 1])
def test_weights_of_another_optimizer_bring_rows_alone_and_say_so(tmp_path, dumped, other, steps):
    model = trained(dumped)
    model.save_weights(tmp_path / "m.weights.h5")
    target = compiled(MAKE[other](), our_embedding())
    if steps:
        fit(target, steps=steps)

    def load_and_build():
        target.load_weights(tmp_path / "m.weights.h5")
        target.optimizer.build(target.trainable_variables)

    if dumped == "sgd":  # which keeps none that could be lost
        with pytest.warns(UserWarning, match="so none of them were loaded"):
            load_and_build()
    else:
        with pytest.warns(UserWarning, match="states of another optimizer"):
            load_and_build()
    rows = contents_of(table_of(model))["rows"]
    np.testing.assert_array_equal(contents_of(table_of(target))["rows"], rows)
    fit(target, steps=1)


def test_dump_loads_before_the_first_step_under_a_loss_scale(tmp_path):
    def scaled():
        model = compiled(optimizers.Adam(0.02), our_embedding())
        model.compile(optimizers.LossScaleOptimizer(sok.OptimizerWrapper(optimizers.Adam(0.02))), "mse")
        return model

    model = fit(scaled(), steps=2)
    sok.dump(tmp_path / "d", model)
    target = scaled()
    sok.load(tmp_path / "d", target)
    assert_equal(all_of(fit(target, steps=1)), all_of(fit(model, steps=1)))


# ---- files that are bad


def _edit(change):
    def edited(path):
        with h5py.File(path, "r+") as file:
            found = []
            file.visit(lambda name: found.append(name) if name.endswith("0.keys.000000") else None)
            change(file[found[0]].parent)

    return edited


def _replace(name, make):
    def change(group):
        old = group[name][...]
        del group[name]
        group[name] = make(old)

    return _edit(change)


def _remove(name):
    return _edit(lambda group: group.__delitem__(name))


def _truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


KEYS, VALUES = "0.keys.000000", "0.values.000000"
BAD = {
    "other_dim": _replace(VALUES, lambda v: v[:, :-1]),
    "truncated": _truncate,
    "no_values": _remove(VALUES),
    "no_keys": _remove(KEYS),
    "fewer_rows": _edit(lambda g: (_replace_in(g, KEYS, 5), _replace_in(g, VALUES, 5))),
    "keys_of_nan": _replace(KEYS, lambda k: np.where(k == 3, np.nan, k.astype("float64"))),
    "keys_twice": _replace(KEYS, lambda k: k // 2),
    "rows_of_text": _replace(VALUES, lambda v: v.astype("S8")),
    "one_axis": _replace(VALUES, lambda v: v[:, 0]),
    "rule_of_noise": _replace("tables", lambda t: t[::-1]),
    "no_tables": _replace("tables", lambda t: np.frombuffer(b"[]", "uint8")),
}


def _replace_in(group, name, rows):
    old = group[name][:rows]
    del group[name]
    group[name] = old


@pytest.mark.parametrize("name", BAD)
def test_bad_weights_file_leaves_the_tables_as_they_were(tmp_path, name):
    model = trained("adam")
    model.save_weights(tmp_path / "m.weights.h5")
    BAD[name](tmp_path / "m.weights.h5")
    fit(model, steps=1)
    before = contents_of(table_of(model))
    with pytest.raises((ValueError, KeyError, OSError)):
        model.load_weights(tmp_path / "m.weights.h5")
    assert_equal(contents_of(table_of(model)).values(), before.values())


def test_tables_of_a_layer_come_together_or_not_at_all():
    """The second is bad, after the first was read."""
    configs = [sok.TableConfig("a", None, DIM), sok.TableConfig("b", 9, DIM)]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs])
    for table in layer.get_tables().values():
        table.find_or_insert([1, 2])
    layer.build()
    store = {}
    layer.save_own_variables(store)
    layer.get_tables()["a"].find_or_insert([5])
    store["1.keys.000000"] = np.array([1, 9])
    before = [contents_of(table) for table in layer.get_tables().values()]
    with pytest.raises(ValueError, match="must be below `vocabulary_size` 9. Received: 9"):
        layer.load_own_variables(store)
    for table, contents in zip(layer.get_tables().values(), before, strict=True):
        assert_equal(contents_of(table).values(), contents.values())


def test_error_in_the_middle_of_a_load_leaves_the_tables_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(sok.rows_file, "_CHUNK_FLOATS", 40)
    model = trained("adam")
    store = {}
    embedding_of(model).save_own_variables(store)
    assert "0.values.000002" in store

    class Failing(dict):
        def __getitem__(self, name):
            if name == "0.values.000002" and self.armed:
                raise MemoryError(name)
            return super().__getitem__(name)

    failing = Failing(store)
    failing.armed = False
    monkeypatch.setattr(sok.rows_file, "_check_shapes", lambda *_: setattr(failing, "armed", True))
    fit(model, steps=1)
    before = contents_of(table_of(model))
    with pytest.raises(MemoryError):
        embedding_of(model).load_own_variables(failing)
    assert_equal(contents_of(table_of(model)).values(), before.values())


# ---- no rows


def test_table_without_rows_whose_optimizer_is_bound_is_saved_like_any_other(tmp_path):
    model = compiled(MAKE["adam"](), sok.DynamicEmbedding(DIM))
    model.optimizer.build(model.trainable_variables)
    table = table_of(model)
    contents = table.export(states=True)
    assert contents.rows.shape == (0, DIM)
    assert {name: state.shape for name, state in contents.states.items()} == {
        "momentum": (0, DIM),
        "velocity": (0, DIM),
    }
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    sok.dump(tmp_path / "d", model)
    layer = embedding_of(model)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), embedding_of(copy.deepcopy(model))]
    twins.append(embedding_of(keras.models.load_model(tmp_path / "m.keras")))
    assert not any(len(twin.get_table()) for twin in twins)
    for load in (lambda m: m.load_weights(tmp_path / "m.weights.h5"), lambda m: sok.load(tmp_path / "d", m)):
        other = trained("adam")
        load(other)
        assert len(table_of(other)) == 0
        assert int(to_numpy(other.optimizer.iterations)) == 0
        fit(other, steps=1)


def test_layer_that_is_not_built_yet_is_copied_with_its_rows():
    layer = our_embedding()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not twin.built
        assert_equal(contents_of(twin.get_table()).values(), contents_of(layer.get_table()).values())


def test_tables_of_which_one_was_loaded_with_states_are_saved(tmp_path):
    """Its records are wider than those of the table beside it."""

    def layer():
        configs = [sok.TableConfig(name, None, DIM) for name in "ab"]
        made = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs], name="two")
        for table in made.get_tables().values():
            table.find_or_insert([1, 2])
        return made

    bound = layer()
    bound.build()
    sok.OptimizerWrapper("adam").build(bound.trainable_variables)
    sok.dump(tmp_path / "d", bound)
    half = layer()
    sok.load(tmp_path / "d", half, tables=["two/a"])
    for twin in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        for name, table in half.get_tables().items():
            assert contents_of(twin.get_tables()[name]).keys() == contents_of(table).keys()
            assert_equal(contents_of(twin.get_tables()[name]).values(), contents_of(table).values())
