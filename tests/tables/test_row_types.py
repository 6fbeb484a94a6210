"""Tables whose rows are stored as float16 or bfloat16."""

import keras
import ml_dtypes
import numpy as np
import pytest

import sok_keras as sok
from one_table import DIM, distributed, table_of, train_step
from reference import ON_GPU
from small_model import contents, make_model, train

NARROW = ("float16", "bfloat16")
KEYS = np.arange(100) * 2**25
IDS = np.arange(500, dtype="int32")


def rounded(rows, dtype):
    """The nearest numbers of a type, as float32."""
    return rows.astype(getattr(ml_dtypes, dtype, dtype)).astype("float32")


def rows_of(table):
    exported = table.export()
    return exported.rows[np.argsort(exported.keys)]


def layers_of(dtype, **options):
    """A layer of each kind with rows of this type."""
    options = {"embedding_dtype": dtype, "seed": 3, **options}
    yield sok.DynamicEmbedding(DIM, "uniform", **options)
    yield distributed(initializer="uniform", **options)


@pytest.mark.parametrize("dtype", ["float32", *NARROW])
def test_rows_are_rounded_where_they_are_stored(dtype):
    values = np.random.default_rng(0).normal(size=(len(KEYS), DIM)).astype("float32")
    for layer in layers_of(dtype):
        table = table_of(layer)
        table.assign(KEYS, values)
        np.testing.assert_array_equal(table.find(KEYS)[0], rounded(values, dtype))
        np.testing.assert_array_equal(rows_of(table), rounded(values, dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_first_values_are_those_of_float32_rounded(dtype):
    for narrow, wide in zip(layers_of(dtype), layers_of("float32"), strict=True):
        expected = rounded(table_of(wide).find_or_insert(KEYS)[0], dtype)
        # Without a row, then with one.
        for rows in (table_of(narrow).find(KEYS)[0], table_of(narrow).find_or_insert(KEYS)[0]):
            np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_step_is_one_of_float32_and_a_rounding(dtype):
    ids = np.array([[1, 2, 2], [3, 1, 9]], "int32")
    for layer in layers_of(dtype, combiner="sum"):
        optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.5))
        gradient = np.arange(1, DIM + 1, dtype="float32") * np.float32(0.3)

        def loss(layer=layer, gradient=gradient):
            return keras.ops.sum(layer(ids, training=True) * keras.ops.convert_to_tensor(gradient))

        first = table_of(layer).find(np.array([1, 2, 3, 9]))[0]
        train_step(layer, optimizer, loss)
        counts = np.array([[2], [2], [1], [1]], "float32")
        expected = rounded(first - np.float32(0.5) * (counts * gradient), dtype)
        np.testing.assert_allclose(table_of(layer).find(np.array([1, 2, 3, 9]))[0], expected, rtol=2**-7)
        rows = rows_of(table_of(layer))
        np.testing.assert_array_equal(rows, rounded(rows, dtype))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_training_stays_near_float32(dtype, stochastic):
    models = [make_model(), make_model(embedding_dtype=dtype, stochastic_rounding=stochastic)]
    for _ in range(20):
        wide, narrow = (train(model, *range(30)) for model in models)
        np.testing.assert_allclose(narrow, wide, rtol=0.05, atol=0.02)
    (_, wide, *_), (_, narrow, *_) = map(contents, models)
    np.testing.assert_array_equal(narrow, rounded(narrow, dtype))
    assert np.abs(np.sort(wide, axis=None) - np.sort(narrow, axis=None)).max() < 0.1


def test_small_steps_are_kept_by_chance_and_lost_to_the_nearest():
    means = []
    for stochastic in (False, True):
        layer = sok.DynamicEmbedding(DIM, "ones", embedding_dtype="bfloat16", stochastic_rounding=stochastic)
        optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.25 / 128))
        for _ in range(12):
            train_step(layer, optimizer, lambda layer=layer: -keras.ops.sum(layer(IDS, training=True)))
        means.append(rows_of(table_of(layer)).mean())
    assert means[0] == 1 and abs(means[1] - (1 + 3 / 128)) < 0.002, means


@pytest.mark.parametrize("dtype", NARROW)
def test_rows_of_16_bits_take_half_the_memory(dtype):
    num_rows, dim = 20_000, 64
    bytes_of = {}
    for each in ("float32", dtype):
        layer = sok.DynamicEmbedding(dim, embedding_dtype=each)
        table_of(layer).find_or_insert(np.arange(num_rows))
        bytes_of[each] = table_of(layer).stats().bytes
    saved = bytes_of["float32"] - bytes_of[dtype]
    # A GPU gives memory in pages of 2 MiB.
    assert abs(saved - 2 * num_rows * dim) < (4 << 20 if ON_GPU else 1 << 16), bytes_of


@pytest.mark.parametrize("dtype", NARROW)
def test_dumps_and_weights_go_from_type_to_type(tmp_path, dtype):
    narrow = make_model(embedding_dtype=dtype)
    train(narrow, *range(40))
    sok.dump(tmp_path / "narrow", narrow)
    entry = sok.read_manifest(tmp_path / "narrow").tables[0]
    assert (entry.dtype, entry.num_rows) == (dtype, 40)
    wide = make_model()
    sok.load(tmp_path / "narrow", wide)
    for one, other in zip(contents(narrow), contents(wide), strict=True):
        np.testing.assert_array_equal(one, other)

    train(wide, *range(40))
    sok.dump(tmp_path / "wide", wide)
    sok.load(tmp_path / "wide", narrow)
    keys, rows, *others = contents(wide)
    expected = [keys, rounded(rows, dtype), *others]
    for one, other in zip(expected, contents(narrow), strict=True):
        np.testing.assert_array_equal(one, other)
    # The dump has rows of another type, so it has to be a whole one.
    with pytest.raises(sok.DumpMismatchError, match="row type"):
        sok.dump_increment(tmp_path / "wide", narrow)

    wide.save_weights(tmp_path / "w.weights.h5")
    narrow.load_weights(tmp_path / "w.weights.h5")
    for one, other in zip(expected, contents(narrow), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_saved_model_keeps_the_type(tmp_path):
    model = make_model(embedding_dtype="bfloat16", stochastic_rounding=True)
    train(model, 1, 2, 3)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    layer = again.get_layer("ids")
    assert (layer.embedding_dtype, layer.stochastic_rounding) == ("bfloat16", True)
    for one, other in zip(contents(model), contents(again), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(train(again, 1, 2), train(model, 1, 2), rtol=1e-6)
    for one, other in zip(contents(model), contents(again), strict=True):
        np.testing.assert_array_equal(one, other)
    config = sok.TableConfig("t", None, 4, embedding_dtype="float16", stochastic_rounding=True)
    again = sok.TableConfig.from_config(config.get_config())
    assert (again.embedding_dtype, again.stochastic_rounding) == ("float16", True)


def test_an_optimizer_of_ones_own_updates_rows_of_16_bits():
    class Halving(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign(variable, variable * 0.5 - learning_rate * gradient * 0.0)

    layer = sok.DynamicEmbedding(DIM, embedding_dtype="bfloat16", seed=1)
    optimizer = sok.OptimizerWrapper(Halving(0.1))
    first = table_of(layer).find(np.arange(5))[0]
    train_step(layer, optimizer, lambda: keras.ops.sum(layer(IDS[:5], training=True)))
    np.testing.assert_array_equal(table_of(layer).find(np.arange(5))[0], rounded(first * np.float32(0.5), "bfloat16"))


def test_wrong_types_are_refused():
    with pytest.raises(ValueError, match="`embedding_dtype` must be one of"):
        sok.DynamicEmbedding(4, embedding_dtype="float64")
    with pytest.raises(ValueError, match="`embedding_dtype` must be one of"):
        sok.TableConfig("t", None, 4, embedding_dtype="int8")
    with pytest.raises(ValueError, match="`stochastic_rounding` needs"):
        sok.DynamicEmbedding(4, stochastic_rounding=True)
    with pytest.raises(ValueError, match="`stochastic_rounding` must be True or False"):
        sok.TableConfig("t", None, 4, embedding_dtype="float16", stochastic_rounding="yes")
