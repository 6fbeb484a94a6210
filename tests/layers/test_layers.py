"""What the layers promise: values by hand, first rows, who inserts, ids of every width, copies of configs."""

import keras
import numpy as np
import pytest
from keras import initializers, ops

import sok_keras as sok
from notebook import FIRST_FORWARD, NOTEBOOK_KEYS, NOTEBOOK_ROWS, SECOND_FORWARD
from one_table import DIM, distributed, table_of, train_step
from reference import BACKEND, assert_close, gradients, to_numpy
from sok_keras import ids as ids_module

INT64_MIN, INT64_MAX = np.iinfo("int64").min, np.iinfo("int64").max
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="ragged and sparse tensors are TensorFlow's")


@pytest.fixture
def wide_ids():
    """64-bit ids, which JAX has if x64 is on: for the length of a test."""
    if BACKEND != "jax":
        yield
        return
    import jax

    with jax.enable_x64(True):
        yield


# ---- the numbers of the HugeCTR TensorFlow plugin's notebook, "Verify Accuracy"

NOTEBOOK_LAYERS = {
    "dynamic_embedding": lambda: sok.DynamicEmbedding(4, combiner="sum", padding_key=-1),
    "distributed_dynamic": lambda: distributed(combiner="sum", padding_key=-1),
    "distributed_static": lambda: distributed(vocabulary_size=8, combiner="sum", padding_key=-1),
}


@pytest.mark.parametrize("update_mode", ["local", "global", "lazy_global"])
@pytest.mark.parametrize("kind", NOTEBOOK_LAYERS)
def test_numbers_of_the_hugectr_notebook(kind, update_mode):
    layer = NOTEBOOK_LAYERS[kind]()
    table_of(layer).assign(np.arange(8), NOTEBOOK_ROWS)
    forward = lambda: layer(NOTEBOOK_KEYS, training=True)
    np.testing.assert_array_equal(to_numpy(forward()), FIRST_FORWARD)
    adam = keras.optimizers.Adam(0.1, beta_1=0.9, beta_2=0.99, epsilon=1e-3)
    train_step(layer, sok.OptimizerWrapper(adam, update_mode=update_mode), lambda: ops.sum(forward()))
    np.testing.assert_allclose(to_numpy(forward()), SECOND_FORWARD, rtol=2e-6)
    np.testing.assert_array_equal(table_of(layer).find([3, 4, 5, 7])[0], NOTEBOOK_ROWS[[3, 4, 5, 7]])


# ---- sharing


def test_features_share_a_table_by_its_config():
    table, other = sok.TableConfig("shared", None, DIM), sok.TableConfig("own", None, DIM)
    layer = sok.DistributedEmbedding(
        {name: sok.FeatureConfig(name, t) for name, t in (("a", table), ("b", table), ("c", other))}
    )
    assert sorted(layer.get_tables()) == ["own", "shared"]
    layer({"a": np.array([1], "int32"), "b": np.array([2], "int32"), "c": np.array([3], "int32")}, training=True)
    assert layer.get_tables()["shared"].export().keys.tolist() == [1, 2]
    assert layer.get_tables()["own"].export().keys.tolist() == [3]


def test_two_configs_of_one_name_are_refused():
    features = [sok.FeatureConfig(name, sok.TableConfig("twice", None, DIM)) for name in "ab"]
    with pytest.raises(
        ValueError, match=r"different names; features share a table by using one `TableConfig`.*\['twice'\]"
    ):
        sok.DistributedEmbedding(features)


# ---- first rows


def first_rows(layer, *batches):
    """Rows of keys 0 to 99 after these batches were inserted."""
    table = table_of(layer)
    for batch in batches:
        table.find_or_insert(batch)
    assert len(table) == 100
    return table.export().rows


@pytest.mark.parametrize(
    "make", [lambda **k: sok.DynamicEmbedding(DIM, **k), lambda **k: distributed(**k)], ids=["dynamic", "distributed"]
)
def test_first_rows_depend_on_seed_and_key_alone(make):
    keys = np.arange(100)
    rows = first_rows(make(seed=5), keys)
    np.testing.assert_array_equal(first_rows(make(seed=5), keys[::-1]), rows)
    np.testing.assert_array_equal(
        first_rows(make(seed=5), *np.array_split(np.random.default_rng(0).permutation(keys), 7)), rows
    )
    assert not (first_rows(make(seed=6), keys) == rows).any()
    assert len(np.unique(rows)) > 0.99 * rows.size


def test_tables_of_a_layer_start_differently():
    configs = [sok.TableConfig(name, None, DIM, seed=5) for name in ("a", "b")]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs])
    a, b = (table.find(np.arange(100))[0] for table in layer.get_tables().values())
    assert not (a == b).any()


def test_keras_seed_gives_the_seeds_of_layers():
    def drawn():
        return [
            table_of(layer).find([1, 2])[0]
            for layer in (sok.DynamicEmbedding(DIM), sok.DynamicEmbedding(DIM), distributed())
        ]

    keras.utils.set_random_seed(3)
    first = drawn()
    keras.utils.set_random_seed(3)
    for one, other in zip(first, drawn(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not (first[0] == first[1]).any()


MANY = np.arange(20_000)
# Expected bounds (or None), mean and standard deviation of 80,000 numbers; fan of a dynamic table: its dim, 4.
INITIALIZERS = {
    "uniform": ("uniform", (-0.05, 0.05), 0.0, 0.1 / 12**0.5),
    "random_uniform": (initializers.RandomUniform(1.0, 3.0), (1.0, 3.0), 2.0, 2 / 12**0.5),
    "random_normal": (initializers.RandomNormal(1.0, 2.0), None, 1.0, 2.0),
    "truncated_normal": (initializers.TruncatedNormal(1.0, 2.0), (-3.0, 5.0), 1.0, 2.0 * 0.8796),
    # Between the mean and one standard deviation above it.
    "between_bounds": (sok.initializers.TruncatedNormal(1.0, 2.0, 1.0, 3.0), (1.0, 3.0), 1.919724, 0.564457),
    "zeros": ("zeros", (0.0, 0.0), 0.0, 0.0),
    "ones": ("ones", (1.0, 1.0), 1.0, 0.0),
    "constant": (initializers.Constant(0.25), (0.25, 0.25), 0.25, 0.0),
    "variance_scaling": (initializers.VarianceScaling(2.0, mode="fan_out"), None, 0.0, (2 / 4) ** 0.5),
    "variance_scaling_normal": (
        initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
        None,
        0.0,
        (2 / 4) ** 0.5,
    ),
    "variance_scaling_uniform": (
        initializers.VarianceScaling(2.0, "fan_out", "uniform"),
        (-(1.5**0.5), 1.5**0.5),
        0.0,
        (2 / 4) ** 0.5,
    ),
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_have_their_distribution(name):
    initializer, bounds, mean, deviation = INITIALIZERS[name]
    rows = sok.DynamicEmbedding(DIM, initializer, seed=1).get_table().find(MANY)[0]
    assert rows.mean() == pytest.approx(mean, abs=4 * deviation / rows.size**0.5 + 1e-7)
    assert rows.std() == pytest.approx(deviation, rel=0.01, abs=1e-7)
    if bounds:
        assert bounds[0] - 1e-6 <= rows.min() <= rows.max() <= bounds[1] + 1e-6


def test_initializers_fill_arrays_as_those_of_keras():
    between = sok.initializers.TruncatedNormal(1.0, 2.0, 1.0, 3.0, seed=1)
    values = to_numpy(between((20_000, DIM)))
    assert values.min() >= 1.0
    assert values.max() <= 3.0
    assert (values.mean(), values.std()) == (pytest.approx(1.919724, abs=0.01), pytest.approx(0.564457, rel=0.01))
    again = initializers.deserialize(initializers.serialize(between))
    np.testing.assert_array_equal(to_numpy(again((5, DIM))), to_numpy(between.clone()((5, DIM))))
    own = sok.initializers.TruncatedNormal(1.0, 2.0)
    assert (own.lower, own.upper) == (-3.0, 5.0)
    assert own.shares_below() == pytest.approx((0.0227501319, 0.9772498681))
    np.testing.assert_array_equal(to_numpy(sok.initializers.Debug()((3, 2))), [[0, 0], [1, 1], [2, 2]])


def test_debug_rows_say_their_key():
    rows = sok.DynamicEmbedding(DIM, sok.initializers.Debug()).get_table().find([7, 1_234_567])[0]
    np.testing.assert_array_equal(rows, [[7.0] * DIM, [34_567.0] * DIM])


@pytest.mark.parametrize(("lower", "upper"), [(1.0, 1.0), (2.0, 1.0), (100.0, 101.0)])
def test_bounds_without_values_between_them_are_refused(lower, upper):
    with pytest.raises(ValueError, match="`lower` and `upper` must have values of the distribution between them"):
        sok.initializers.TruncatedNormal(0.0, 1.0, lower, upper)


@pytest.mark.parametrize(
    "name", ["glorot_uniform", "glorot_normal", "he_normal", "he_uniform", "lecun_normal", "lecun_uniform"]
)
def test_fans_of_a_static_table_are_those_of_its_matrix(name):
    rows = table_of(distributed(vocabulary_size=50, dim=DIM * 100, initializer=name, seed=1)).find(np.arange(50))[0]
    of_keras = to_numpy(initializers.get(name)((50, DIM * 100)))
    assert rows.std() == pytest.approx(of_keras.std(), rel=0.03)
    assert np.abs(rows).max() == pytest.approx(np.abs(of_keras).max(), rel=0.2)


@pytest.mark.parametrize("name", ["glorot_uniform", "glorot_normal", "he_normal", "lecun_uniform"])
def test_fan_in_of_a_dynamic_table_is_refused(name):
    with pytest.raises(ValueError, match=r"has no number of rows.*VarianceScaling\(mode='fan_out'\)"):
        sok.DynamicEmbedding(DIM, name)


@pytest.mark.parametrize(
    "initializer",
    ["orthogonal", "identity", initializers.Constant(np.ones(DIM)), lambda shape, dtype=None: np.zeros(shape)],
)
def test_initializer_without_a_formula_is_refused(initializer):
    with pytest.raises(
        ValueError, match=r"The core has a formula for RandomUniform.*a function of its key. Received: initializer="
    ):
        sok.DynamicEmbedding(DIM, initializer)


# ---- who inserts

LAYERS = {"dynamic": lambda **k: sok.DynamicEmbedding(DIM, **k), "distributed": lambda **k: distributed(**k)}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("training", "records", "inserts"),
    [(True, False, 1), (True, True, 1), (False, False, 0), (False, True, 0), (None, False, 0), (None, True, 0)],
)
def test_which_lookups_insert(kind, training, records, inserts):
    """Those with `training=True` alone, whether a gradient is being recorded or not."""
    layer = LAYERS[kind]()
    layer.build()
    call = lambda: ops.sum(layer(np.array([5], "int32"), training=training))
    if records:
        gradients(call, layer.trainable_variables)
    elif BACKEND == "torch":
        import torch

        with torch.no_grad():
            call()
    else:
        call()
    assert len(table_of(layer)) == inserts


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_missing_says_what_an_unknown_id_answers(kind, missing):
    layer = LAYERS[kind](missing=missing, seed=9)
    answer = to_numpy(layer(np.array([5, 6], "int32"), training=False))
    rows, found = table_of(layer).find([5, 6])
    np.testing.assert_array_equal(answer, rows)
    assert not found.any() and len(table_of(layer)) == 0
    expected = table_of(LAYERS[kind](seed=9)).find_or_insert([5, 6])[0] if missing == "initial" else np.zeros((2, DIM))
    np.testing.assert_array_equal(answer, expected)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", LAYERS)
def test_bags_without_ids_or_weight_are_zeros(kind, combiner):
    layer = LAYERS[kind](combiner=combiner, padding_key=-1)
    ids = np.array([[-1, -1], [3, -1], [4, 5]], "int32")
    weights = np.array([[1, 1], [0, 1], [1, -1]], "float32")
    rows = to_numpy(layer(ids, weights, training=True))
    np.testing.assert_array_equal(rows[:2], np.zeros((2, DIM)))
    assert np.isfinite(rows).all()
    assert table_of(layer).export().keys.tolist() == [4, 5]  # an id of weight 0 never inserts


def test_weights_that_sum_to_zero_give_a_mean_of_zero():
    rows = distributed(combiner="mean")(np.array([[4, 5]], "int32"), np.array([[1.0, -1.0]], "float32"), training=True)
    np.testing.assert_array_equal(to_numpy(rows), np.zeros((1, DIM)))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (500, 0)])
def test_empty_batches_pass(shape):
    layer = sok.DynamicEmbedding(DIM, combiner="mean")
    rows = to_numpy(layer(np.zeros(shape, "int32"), training=True))
    assert rows.shape == ((shape[0], DIM))
    assert not rows.any() and len(layer.get_table()) == 0


# ---- ids of every width


@pytest.mark.usefixtures("wide_ids")
@pytest.mark.parametrize("key", [0, -1, INT64_MIN, INT64_MAX, 2**53 + 1])
def test_every_int64_is_a_key(key):
    layer = sok.DynamicEmbedding(DIM)
    rows = to_numpy(layer(np.array([key], "int64"), training=True))
    contents = layer.get_table().export()
    assert contents.keys.tolist() == [key]
    np.testing.assert_array_equal(rows, contents.rows)


@pytest.mark.usefixtures("wide_ids")
def test_unsigned_ids_keep_their_bits():
    layer = sok.DynamicEmbedding(DIM)
    keys = np.array([0, 2**63, 2**64 - 1], "uint64")
    rows = to_numpy(layer(keys, training=True))
    assert layer.get_table().export().keys.tolist() == [INT64_MIN, -1, 0]
    np.testing.assert_array_equal(layer.get_table().find(keys)[0], rows)
    np.testing.assert_array_equal(layer.get_table().find(keys.view("int64"))[0], rows)


def test_uint32_ids_are_never_negative():
    layer = sok.DynamicEmbedding(DIM)
    layer(np.array([2**32 - 1], "uint32"), training=True)
    assert layer.get_table().export().keys.tolist() == [2**32 - 1]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_negative_narrow_ids_are_the_int64_ids(dtype):
    layer = sok.DynamicEmbedding(DIM)
    rows = to_numpy(layer(np.array([-1, -100], dtype), training=True))
    assert layer.get_table().export().keys.tolist() == [-100, -1]
    np.testing.assert_array_equal(layer.get_table().find(np.array([-1, -100], "int64"))[0], rows)


WORDS = np.array([[0, -1, 2**40 + 7], [INT64_MIN, INT64_MAX, -(2**33)], [1, 2**31, 2**32]], "int64")


@pytest.mark.parametrize("combiner", [None, "sum"])
def test_ids_in_two_words_are_the_int64_ids(combiner):
    layer = sok.DynamicEmbedding(DIM, combiner=combiner, seed=2)
    rows = to_numpy(layer(ids_module.split_words(WORDS), training=True))
    assert layer.get_table().export().keys.tolist() == sorted(WORDS.ravel().tolist())
    expected = layer.get_table().find(WORDS)[0].reshape(3, 3, DIM)
    assert_close(rows, expected if combiner is None else expected.sum(1))


def test_words_learn_as_int64_ids():
    layer = sok.DynamicEmbedding(DIM, "zeros")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    train_step(layer, optimizer, lambda: ops.sum(layer(ids_module.split_words(WORDS), training=True)))
    np.testing.assert_array_equal(layer.get_table().find(WORDS)[0], np.full((WORDS.size, DIM), -1.0))


def test_words_pass_through_a_functional_model():
    inputs = {word: keras.Input((3,), dtype="int32", name=word) for word in ("low", "high")}
    layer = sok.DynamicEmbedding(DIM, "ones", combiner="sum")
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, DIM)
    np.testing.assert_array_equal(model.predict(ids_module.split_words(WORDS), verbose=0), np.full((3, DIM), 3.0))


def test_padding_key_may_be_any_key():
    layer = sok.DynamicEmbedding(DIM, combiner="sum", padding_key=2**40 + 7)
    layer(ids_module.split_words(WORDS), training=True)
    assert 2**40 + 7 not in layer.get_table().export().keys.tolist()


def test_padding_key_may_be_given_as_uint64():
    layer = sok.DynamicEmbedding(DIM, combiner="sum", padding_key=2**64 - 1)
    layer(np.array([[3, -1]], "int32"), training=True)
    assert layer.get_table().export().keys.tolist() == [3]


@pytest.mark.usefixtures("wide_ids")
def test_wide_ids_of_each_type_learn():
    layer = sok.DynamicEmbedding(DIM, "zeros")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    for dtype in ("int64", "uint64"):
        given = np.array([2**40 + 7, 5], dtype)
        train_step(layer, optimizer, lambda: ops.sum(layer(given, training=True)))  # noqa: B023
    assert layer.preprocess(WORDS) is WORDS
    np.testing.assert_array_equal(layer.get_table().find([2**40 + 7, 5])[0], np.full((2, DIM), -2.0))


# ---- ragged and sparse ids

UNEQUAL = {
    "ragged": lambda tf: tf.ragged.constant([[1, 2], [], [3]], dtype="int64"),
    "ragged_3d": lambda tf: tf.ragged.constant([[[1, 2], [], [3]], [[4, 4]]], dtype="int64"),
    "ragged_over_dense": lambda tf: tf.RaggedTensor.from_row_lengths([[1, 2], [3, 4], [5, 6]], [2, 0, 1]),
    "narrow_ragged": lambda tf: tf.ragged.constant([[1, 2], [], [3]], dtype="int8"),
    "sparse_1d": lambda tf: tf.sparse.from_dense([1, 0, 2]),
    "sparse": lambda tf: tf.sparse.from_dense([[1, 0, 2], [0, 0, 0], [0, 0, 3]]),
    "sparse_3d": lambda tf: tf.sparse.from_dense([[[1, 0, 2], [0, 0, 0]], [[0, 4, 4], [5, 0, 0]]]),
}


def filled(value):
    """Of a ragged or sparse tensor an array, with zeros where it has nothing."""
    import tensorflow as tf

    if isinstance(value, tf.RaggedTensor):
        return value.to_tensor().numpy()
    return tf.sparse.to_dense(value).numpy() if isinstance(value, tf.SparseTensor) else to_numpy(value)


def halves_at(ids):
    """Weights of 0.5 in the places of the ids."""
    import tensorflow as tf

    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(tf.fill(tf.shape(ids.flat_values), 0.5))
    return tf.SparseTensor(ids.indices, tf.fill(tf.shape(ids.values), 0.5), ids.dense_shape)


@on_tensorflow
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
@pytest.mark.parametrize("form", UNEQUAL)
def test_ragged_and_sparse_ids_keep_their_outer_axes(form, combiner, weighted, in_graph):
    import tensorflow as tf

    layer = sok.DynamicEmbedding(DIM, combiner=combiner)
    layer.get_table().assign(np.arange(8), NOTEBOOK_ROWS)
    ids = UNEQUAL[form](tf)
    arguments = (ids, halves_at(ids)) if weighted else (ids,)
    rows = (tf.function(layer) if in_graph else layer)(*arguments)

    padded = filled(ids)
    expected = NOTEBOOK_ROWS[padded] * (padded != 0)[..., None]
    reduces = combiner is not None and padded.ndim > 1
    if weighted and combiner != "mean":  # in a mean, equal weights cancel
        expected = expected * 0.5
    if reduces:
        counts = np.maximum((padded != 0).sum(-1, keepdims=True), 1) if combiner == "mean" else 1
        expected = expected.sum(-2) / counts
    np.testing.assert_array_equal(filled(rows), expected)

    kinds = {"ragged": isinstance(ids, tf.RaggedTensor), "sparse": isinstance(ids, tf.SparseTensor)}
    promised = layer(keras.KerasTensor(ids.shape, "int64", **kinds))
    assert tuple(promised.shape) == tuple(rows.shape)
    assert promised.ragged == isinstance(rows, tf.RaggedTensor)


@on_tensorflow
@pytest.mark.parametrize("form", ["ragged_3d", "sparse", "sparse_3d"])
@pytest.mark.parametrize("combiner", [None, "sum"])
def test_rows_of_ragged_and_sparse_ids_learn(form, combiner):
    import tensorflow as tf

    layer, ids = sok.DynamicEmbedding(DIM, "zeros", combiner=combiner), UNEQUAL[form](tf)
    flat = lambda rows: rows.flat_values if isinstance(rows, tf.RaggedTensor) else rows
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    train_step(layer, optimizer, lambda: ops.sum(flat(layer(ids, training=True))))
    keys, counts = np.unique(filled(ids)[filled(ids) != 0], return_counts=True)
    assert layer.get_table().export().keys.tolist() == keys.tolist()
    np.testing.assert_array_equal(layer.get_table().find(keys)[0][:, 0], -counts)


@on_tensorflow
def test_sparse_ids_of_unknown_shape_keep_their_axes():
    import tensorflow as tf

    layer = sok.DynamicEmbedding(DIM, "ones")
    call = tf.function(layer, input_signature=[tf.SparseTensorSpec([None, None], "int32")])
    np.testing.assert_array_equal(call(UNEQUAL["sparse"](tf))[0, :, 0], [1, 0, 1])


@on_tensorflow
def test_mask_of_sparse_ids_is_false_where_there_is_none():
    import tensorflow as tf

    mask = sok.DynamicEmbedding(DIM, mask_zero=True).compute_mask(UNEQUAL["sparse"](tf))
    assert to_numpy(mask).tolist() == [[True, False, True], [False] * 3, [False, False, True]]


# ---- preprocess


def test_preprocess_pads_rows_of_unequal_length():
    layer = sok.DynamicEmbedding(DIM, combiner="mean", seed=2)
    ids, weights = layer.preprocess([[3, 5, 7], [], [5]])
    np.testing.assert_array_equal(weights, [[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    rows = to_numpy(layer(ids, weights, training=True))
    assert layer.get_table().export().keys.tolist() == [3, 5, 7]  # 0, which fills, is no id of anyone
    known = layer.get_table().find([3, 5, 7])[0]
    assert_close(rows, np.stack([known.mean(0), np.zeros(DIM), known[1]]))


def test_preprocess_pads_weights_alike():
    _, weights = sok.DynamicEmbedding(DIM).preprocess([[3, 5], [7]], [[0.5, 2.0], [3.0]])
    np.testing.assert_array_equal(weights, [[0.5, 2.0], [3.0, 0.0]])


def test_preprocess_takes_object_arrays():
    rows = np.empty(2, object)
    rows[:] = [np.array([1, 2], "int32"), np.array([3], "int32")]
    ids, weights = sok.DynamicEmbedding(DIM).preprocess(rows)
    np.testing.assert_array_equal(ids, [[1, 2], [3, 0]])
    np.testing.assert_array_equal(weights, [[1, 1], [1, 0]])


def test_preprocess_gives_what_call_takes_of_wide_ids():
    made = sok.DynamicEmbedding(DIM).preprocess(WORDS)
    if BACKEND != "jax":
        assert made is WORDS
    else:
        assert made["low"].dtype == made["high"].dtype == np.int32
        np.testing.assert_array_equal((made["high"].astype("int64") << 32) + made["low"].view("uint32"), WORDS)


def test_preprocess_keeps_the_nesting():
    table = sok.TableConfig("t", None, DIM, combiner="sum")
    layer = sok.DistributedEmbedding({"a": sok.FeatureConfig("a", table), "b": [sok.FeatureConfig("b", table)]})
    ids, weights = layer.preprocess({"a": [[1, 2], [3]], "b": [np.array([[4], [5]], "int32")]})
    np.testing.assert_array_equal(weights["a"], [[1, 1], [1, 0]])
    np.testing.assert_array_equal(weights["b"][0], [[1], [1]])
    layer(ids, weights, training=True)
    assert layer.get_tables()["t"].export().keys.tolist() == [1, 2, 3, 4, 5]


# ---- embedding tables as arrays


def test_embedding_tables_of_a_dynamic_table_are_keys_and_rows():
    layer = sok.DynamicEmbedding(DIM, name="words")
    rows = np.arange(8, dtype="float32").reshape(2, DIM)
    layer.set_embedding_tables({"words": ([7, -2], rows)})
    keys, found = layer.get_embedding_tables()["words"]
    assert keys.tolist() == [-2, 7]
    np.testing.assert_array_equal(found, rows[::-1])
    layer.set_embedding_tables({"words": ([1], rows[:1])})
    assert layer.get_embedding_tables()["words"][0].tolist() == [1]


def test_embedding_tables_of_a_static_table_are_a_matrix():
    layer = distributed("words", vocabulary_size=5, seed=1)
    first = layer.get_embedding_tables()["words"]
    assert first.shape == (5, DIM)
    rows = np.random.default_rng(0).normal(size=(5, DIM)).astype("float32")
    layer.set_embedding_tables({"words": rows})
    np.testing.assert_array_equal(layer.get_embedding_tables()["words"], rows)
    np.testing.assert_array_equal(to_numpy(layer(np.array([4, 0], "int32"))), rows[[4, 0]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"other": np.zeros((5, DIM))}, r"this layer, which has \['t'\]. Received: \['other'\]"),
        ({"t": np.zeros((4, DIM))}, r"shape \(5, 4\)"),
    ],
    ids=["name", "shape"],
)
def test_set_embedding_tables_changes_nothing_when_refused(given, message):
    layer = distributed(vocabulary_size=5, initializer="ones")
    table_of(layer).find_or_insert(np.arange(5))
    with pytest.raises(ValueError, match=message):
        layer.set_embedding_tables(given)
    np.testing.assert_array_equal(layer.get_embedding_tables()["t"], np.ones((5, DIM)))


# ---- configs


def round_trip(layer):
    return type(layer).from_config(
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer)).get_config()
    )


def test_config_of_a_dynamic_layer_keeps_every_choice():
    layer = sok.DynamicEmbedding(
        DIM, initializers.RandomNormal(0.5, 2.0), combiner="sqrtn", padding_key=0, mask_zero=True, missing="zeros", initial_capacity=10,
        max_capacity=20, check_mode="warn", storage="host", save_rows=False, name="mine", dtype="mixed_float16",
    )  # fmt: skip
    twin = round_trip(layer)
    assert twin.get_config() == layer.get_config()
    assert twin.name == "mine" and twin.compute_dtype == "float16" and twin.save_rows is False
    np.testing.assert_array_equal(table_of(twin).find_or_insert([1])[0], table_of(layer).find_or_insert([1])[0])


@pytest.mark.parametrize("seed", [None, 5])
def test_config_of_a_distributed_layer_keeps_sharing_and_seeds(seed):
    shared = sok.TableConfig("shared", None, DIM, seed=seed, combiner="sum", max_capacity=9)
    static = sok.TableConfig("static", 7, 3, "uniform", seed=seed, out_of_vocabulary="zeros")
    features = {
        "a": sok.FeatureConfig("a", shared, (None, 2)),
        "b": [sok.FeatureConfig("b", shared, padding_key=1), sok.FeatureConfig("c", static)],
    }
    layer = sok.DistributedEmbedding(features, name="mine", save_rows=False)
    twin = round_trip(layer)
    assert twin.get_config() == layer.get_config()
    configs = twin.feature_configs
    assert configs["a"].table is configs["b"][0].table
    assert (configs["b"][0].padding_key, tuple(configs["a"].input_shape)) == (1, (None, 2))
    for name, table in layer.get_tables().items():
        np.testing.assert_array_equal(twin.get_tables()[name].find([1, 2])[0], table.find([1, 2])[0])


def test_seed_generator_of_keras_is_a_seed():
    layer = sok.DynamicEmbedding(DIM, initializers.RandomUniform(seed=keras.random.SeedGenerator(5)))
    np.testing.assert_array_equal(table_of(round_trip(layer)).find([1])[0], table_of(layer).find([1])[0])
