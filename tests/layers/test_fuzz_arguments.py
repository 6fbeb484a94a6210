"""Arguments of public calls by chance: each call works, as a dictionary says, or raises an error of those it may, with a message.

A crash ends the process, and a panic is no `Exception`: either fails the run. `pytest -m soak` runs for longer, from other seeds.
"""

import traceback

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sok_keras as sok
from reference import BACKEND, FAST

EXPECTED = (ValueError, TypeError, sok.SokError, MemoryError, OverflowError, OSError)
EXAMPLES, SOAK = 60, 20_000

pytestmark = pytest.mark.filterwarnings("ignore")
both = pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(SOAK, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)


def run(check, examples):
    """Gives `check` data of so many kinds; in an ordinary run always the same."""
    options = settings(
        max_examples=examples,
        derandomize=examples == EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    options(given(st.data())(check))()


def attempt(function, *arguments, **named):
    """`(whether it worked, what it gave)`. Fails for an error that is none of those expected, or says nothing."""
    note(f"{getattr(function, '__qualname__', function)}")
    try:
        return True, function(*arguments, **named)
    except EXPECTED as error:
        assert str(error), "an error must say what is wrong"
    except Exception as error:
        assert is_told(error), f"{type(error).__name__}: {error}"
    return False, None


def is_told(error):
    """Whether a framework tells an error of ours by its own class, under our name, or one of its own; so may Keras where it reads what it
    is to make."""
    names = [f"{expected.__name__}:" for expected in (*EXPECTED, sok.TableFullError, sok.TicketError)]
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    of_framework = (
        type(error).__module__.split(".")[0] in ("tensorflow", "jax", "jaxlib") and "sok_keras" not in raised_in
    )
    # Names of parameters, which PyTorch checks under `keras.layers.Embedding` alike.
    of_framework |= "site-packages/torch/nn/modules" in raised_in
    parts = ("initializers", "optimizers", "saving", "dtype_policies", "backend/tensorflow/optimizer")
    makes = any(f"keras/src/{part}" in raised_in for part in parts)
    return any(name in str(error) for name in names) or of_framework or makes


# ---- values

DTYPES = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    ">i4",
    ">i8",
    ">u8",
    "bool",
    "float32",
    "float64",
    "complex64",
)
INTEGERS = st.one_of(
    st.integers(-3, 12), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**80])
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


class Opaque:
    """Nothing that anybody knows."""


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    st.floats(width=32),
    st.text(max_size=4),
    st.binary(max_size=3),
    st.builds(Opaque),
    st.just(object),
)


@st.composite
def arrays(draw, dtypes=DTYPES, shapes=SHAPES):
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    elements = st.integers(0, 5) if dtype.kind in "iu" else None
    array = draw(
        hnp.arrays(dtype, draw(shapes) if isinstance(shapes, st.SearchStrategy) else shapes, elements=elements)
    )
    form = draw(st.sampled_from(["as it is", "fortran", "reversed", "read-only"]))
    if form == "fortran":
        array = np.asfortranarray(array)
    elif form == "reversed" and array.ndim:
        array = array[::-1]
    elif form == "read-only":
        array.flags.writeable = False
    return array


ANYTHING = st.one_of(
    SCALARS, arrays(), st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=4), SCALARS, max_size=2)
)


def some_changed(data, arguments):
    """A call's valid arguments, one or two of them replaced by anything."""
    changed = data.draw(st.lists(st.sampled_from(sorted(arguments)), max_size=2, unique=True))
    return arguments | {name: data.draw(ANYTHING, label=name) for name in changed}


# ---- what is made

LAYER = {
    "output_dim": 2,
    "embeddings_initializer": "ones",
    "combiner": "sum",
    "padding_key": None,
    "mask_zero": False,
    "missing": "zeros",
    "seed": 1,
    "initial_capacity": 0,
    "max_capacity": None,
    "check_mode": "count",
    "storage": "auto",
    "save_rows": True,
    "dtype": "float32",
    "name": "fuzz",
}
TABLE = {
    "name": "t",
    "vocabulary_size": None,
    "embedding_dim": 2,
    "initializer": "ones",
    "optimizer": None,
    "combiner": "sum",
    "placement": "auto",
    "missing": "zeros",
    "out_of_vocabulary": "zeros",
    "seed": 1,
    "initial_capacity": 0,
    "max_capacity": None,
    "check_mode": "count",
    "storage": "auto",
}
FEATURE = {"name": "f", "input_shape": (2, 2), "output_shape": (2, 2), "padding_key": None}
IDS = np.array([[1, 2], [1, 7]], "int32")


def dynamic(**changed):
    return sok.DynamicEmbedding(**(LAYER | changed))


@both
def test_dynamic_embedding(examples):
    def check(data):
        worked, layer = attempt(sok.DynamicEmbedding, **some_changed(data, LAYER))
        if worked:
            attempt(layer, IDS, training=True)
            attempt(type(layer).from_config, layer.get_config())

    run(check, examples)


@both
def test_distributed_embedding(examples):
    def check(data):
        made, table = attempt(sok.TableConfig, **some_changed(data, TABLE))
        if not made:
            return
        table = data.draw(st.one_of(st.just(table), ANYTHING))
        made, feature = attempt(sok.FeatureConfig, table=table, **some_changed(data, FEATURE))
        if not made:
            return
        structure = data.draw(st.sampled_from([feature, [feature], {"f": feature}, (feature, [feature])]))
        made, layer = attempt(sok.DistributedEmbedding, data.draw(st.one_of(st.just(structure), ANYTHING)))
        if made:
            attempt(layer, keras.tree.map_structure(lambda _: IDS, structure), training=True)
            attempt(type(layer).from_config, layer.get_config())

    run(check, examples)


@both
def test_optimizers_and_callbacks(examples):
    wrapper = {"inner_optimizer": "sgd", "update_mode": "local", "name": "w"}
    adagrad = {"learning_rate": 0.1, "initial_accumulator_value": 0.1, "epsilon": 1e-7, "name": "a"}

    def check(data):
        attempt(sok.OptimizerWrapper, **some_changed(data, wrapper))
        worked, inner = attempt(sok.optimizers.RowWiseAdagrad, **some_changed(data, adagrad))
        if worked:
            attempt(sok.OptimizerWrapper, inner)
        attempt(sok.callbacks.TableStatistics, data.draw(ANYTHING))
        dumps = {"path": "no/such/folder", "save_freq": "epoch", "keep": 1, "restore": True}
        worked, callback = attempt(sok.callbacks.DumpCheckpoint, **some_changed(data, dumps))
        if worked:
            attempt(callback.dumps)

    run(check, examples)


# ---- tables

KEYS = st.one_of(st.integers(-3, 5), st.sampled_from([2**31, -(2**63), 2**63 - 1]))


def as_signed(keys):
    return [int(key) - 2**64 if key >= 2**63 else int(key) for key in np.ravel(keys).tolist()]


@both
def test_table_is_a_dictionary(examples):
    def check(data):
        table, rows = dynamic().get_table(), {}

        def find(keys):
            got, found = table.find(keys)
            keys = as_signed(keys)
            np.testing.assert_array_equal(found, [key in rows for key in keys])
            np.testing.assert_array_equal(got, np.reshape([rows.get(key, (0, 0)) for key in keys], (-1, 2)))

        def assign(keys, value):
            table.assign(keys, np.full((keys.size, 2), value))
            rows.update(dict.fromkeys(as_signed(keys), (value, value)))

        def insert(keys):
            got, outcomes = table.find_or_insert(keys)
            new = set(as_signed(keys)) - rows.keys()
            assert outcomes.inserted == len(new)
            rows.update(dict.fromkeys(new, (1, 1)))
            np.testing.assert_array_equal(got, np.reshape([rows[key] for key in as_signed(keys)], (-1, 2)))

        def erase(keys):
            assert table.erase(keys) == len(rows.keys() & set(as_signed(keys)))
            for key in as_signed(keys):
                rows.pop(key, None)

        for _ in range(data.draw(st.integers(1, 6))):
            keys = np.array(data.draw(st.lists(KEYS, max_size=5)), "int64")
            keys = keys.astype(data.draw(st.sampled_from(["int64", "uint64", ">i8", ">u8"])))
            what = data.draw(st.sampled_from([find, assign, insert, erase]))
            what(keys, *([data.draw(st.integers(-9, 9))] if what is assign else []))
            method = data.draw(st.sampled_from(["find", "find_or_insert", "erase"]))
            before = len(rows)
            worked, _ = attempt(getattr(table, method), anything := data.draw(ANYTHING))
            if worked and np.size(anything):
                rows.clear()
                table.clear()
            else:
                assert len(table) == before
            attempt(
                table.assign, data.draw(st.sampled_from([keys, anything])), data.draw(arrays(shapes=st.just((2, 3))))
            )
            assert len(table) == len(rows)
        contents = table.export()
        assert contents.keys.tolist() == sorted(rows)
        np.testing.assert_array_equal(contents.rows, np.reshape([rows[key] for key in sorted(rows)], (-1, 2)))

    run(check, examples)


# ---- calls


@both
def test_call_answers_what_a_dictionary_does(examples):
    layers = {combiner: dynamic(combiner=combiner, padding_key=3) for combiner in (None, "sum", "mean")}
    for layer in layers.values():
        layer.get_table().assign(np.arange(5), np.arange(10).reshape(5, 2))
    dtypes = [d for d in DTYPES if np.dtype(d).kind in "iu" and (BACKEND != "jax" or np.dtype(d).itemsize < 8)]

    def check(data):
        ids = data.draw(arrays(dtypes))
        weights = data.draw(
            st.one_of(st.none(), hnp.arrays("float32", ids.shape, elements=st.sampled_from([0, 0.5, 1, 2])))
        )
        combiner = data.draw(st.sampled_from(sorted(layers, key=str)))
        worked, rows = attempt(layers[combiner], ids, weights=weights, training=False)
        assert worked
        given = np.where(ids == 3, 0, 1.0 if weights is None else weights)
        known = np.where(ids < 5, ids, 0)
        each = np.stack([2 * known, 2 * known + 1], -1) * ((ids < 5) & (ids != 3))[..., None]
        if combiner is None or ids.ndim < 2:
            want = each * (1 if combiner == "mean" or weights is None else given[..., None])
            if combiner == "mean" and weights is not None:
                return  # of one id, they cancel, or leave it out
        else:
            total = given.sum(-1, keepdims=True) if combiner == "mean" else np.ones((*ids.shape[:-1], 1))
            sums = (each * given[..., None]).sum(-2)
            want = np.divide(sums, total, out=np.zeros_like(sums), where=total != 0)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(rows), want, rtol=1e-6)

    run(check, examples)


@both
def test_call_with_anything(examples):
    layer = dynamic()
    table = sok.TableConfig(**TABLE)
    many = sok.DistributedEmbedding({"a": sok.FeatureConfig("a", table), "b": sok.FeatureConfig("b", table)})

    def check(data):
        given = st.one_of(ANYTHING, st.just(IDS), arrays(shapes=st.just((2, 2))), words())
        inputs, weights = data.draw(given), data.draw(st.one_of(st.none(), given))
        attempt(layer, inputs, weights=weights, training=data.draw(st.sampled_from([None, True, False])))
        attempt(
            many,
            {"a": inputs, "b": data.draw(given)},
            weights=data.draw(st.one_of(st.none(), st.just({"a": weights, "b": weights}))),
        )
        for one in (layer, many):
            attempt(one.preprocess, inputs if one is layer else {"a": inputs, "b": inputs}, weights)
        assert layer(IDS, training=False) is not None

    run(check, examples)


def words():
    return st.fixed_dictionaries({"low": st.one_of(arrays(), SCALARS), "high": st.one_of(arrays(), SCALARS)})


# ---- steps, dumps, statistics


def trained():
    ids = keras.Input((2,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(dynamic(name="rows")(ids)))
    model.compile(sok.OptimizerWrapper("sgd"), "mse", **FAST)
    model.fit(IDS, np.zeros((2, 1)), verbose=0)
    return model


@both
def test_dump_and_load(examples, tmp_path):
    model = trained()
    sok.dump(tmp_path / "good", model)
    layer, rows = model.layers[1], model.layers[1].get_table().export().rows

    def check(data):
        sources = st.one_of(st.just(model), st.just(layer), st.just([layer]), st.just(layer.get_table()), ANYTHING)
        paths = st.one_of(st.sampled_from([tmp_path / "good", tmp_path / "none", str(tmp_path), "", "\0"]), ANYTHING)
        tables = st.one_of(st.none(), st.just(["rows"]), ANYTHING)
        options = {"tables": data.draw(tables), "states": data.draw(st.sampled_from([True, False]))}
        path = data.draw(paths)
        attempt(sok.load, path, data.draw(sources), mode=data.draw(st.one_of(st.just("merge"), ANYTHING)), **options)
        attempt(sok.read_manifest, path)
        attempt(sok.verify, path)
        attempt(sok.dump, tmp_path / "another", data.draw(sources), tables=data.draw(tables))
        attempt(
            layer.set_table if hasattr(layer, "set_table") else layer.get_table().assign,
            data.draw(ANYTHING),
            data.draw(ANYTHING),
        )
        sok.load(tmp_path / "good", model)
        np.testing.assert_array_equal(layer.get_table().export().rows, rows)

    run(check, examples)


@both
def test_apply_with_anything(examples):
    model = trained()
    layer, optimizer = model.layers[1], model.optimizer
    before = layer.get_table().export().rows

    def check(data):
        of_shape = hnp.arrays("float32", (64, 2), elements=st.sampled_from([0, 1, 0.5, 2.0**-20, -1, np.nan, np.inf]))
        gradient = data.draw(st.one_of(of_shape, of_shape.map(keras.ops.convert_to_tensor), ANYTHING))
        variables = data.draw(st.one_of(st.none(), st.just([layer.trigger]), st.lists(ANYTHING, max_size=2)))
        attempt(optimizer.apply, data.draw(st.one_of(st.just([gradient]), ANYTHING)), variables)
        attempt(layer.get_table().synchronize)  # under JAX an error may be told by the next call
        np.testing.assert_array_equal(layer.get_table().export().rows, before)

    run(check, examples)
