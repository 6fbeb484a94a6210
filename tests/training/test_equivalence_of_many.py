"""Layers of many tables beside layers of Keras: the same rows, gradients and training."""

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers

import sok_keras as sok
from reference import (
    BACKEND,
    BATCH,
    DIM,
    FAST,
    ROWS,
    STEPS,
    VOCABULARY,
    apply_gradients,
    assert_close,
    batches,
    dense_layer,
    gradients,
    reference_embedding,
    tensor,
    to_numpy,
)

only_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="ragged and sparse tensors are TensorFlow's")


# ---- DistributedEmbedding


def pooled(rows, weights, combiner):
    """`rows` `(..., hotness, dim)`, `weights` `(..., hotness)`: what Keras users would write."""
    weights = ops.convert_to_tensor(weights, "float32")
    total = ops.sum(rows * weights[..., None], axis=-2)
    if combiner == "sum":
        return total
    norm = ops.sum(weights if combiner == "mean" else ops.square(weights), axis=-1, keepdims=True)
    norm = norm if combiner == "mean" else ops.sqrt(ops.where(norm > 0, norm, 1.0))
    return total / ops.where(norm > 0, norm, 1.0)


def one_table(combiner, rows=ROWS, **feature):
    table = sok.TableConfig("table", None, rows.shape[1], combiner=combiner)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("feature", table, **feature))
    layer.get_tables()["table"].assign(np.arange(len(rows)), rows)
    layer.build()
    return layer


def objective(outputs):
    """A scalar whose gradient differs from element to element."""
    shape = tuple(int(n) for n in outputs.shape)
    return ops.sum(outputs * ops.reshape(ops.cos(ops.arange(int(np.prod(shape)), dtype="float32")), shape))


def assert_pools_as(layer, reference, ids, weights, expected):
    """Forward, the gradient of the rows (by one step of SGD(1)) and that of the weights.

    `expected(rows)` are the reference's outputs, of the rows of `ids`, given the weights as second argument.
    """
    tensors = [] if weights is None else [tensor(weights)]
    call = lambda *w: layer(ids, *w, training=True)
    theirs = lambda *w: expected(reference(ids), *w)
    assert_close(call(*tensors), theirs(*tensors))

    ours = gradients(lambda *w: objective(call(*w)), layer.trainable_variables, tensors)
    want = gradients(lambda *w: objective(theirs(*w)), reference.trainable_variables, tensors)
    optimizer = sok.OptimizerWrapper(optimizers.SGD(1.0))
    apply_gradients(optimizer, ours[0], layer.trainable_variables)
    (table,) = layer.get_tables().values()
    assert_close(table.find(np.arange(VOCABULARY))[0], ROWS - to_numpy(want[0][0]))
    for mine, reference_gradient in zip(ours[1], want[1], strict=True):
        assert_close(mine, reference_gradient, 2e-6)  # a difference of sums: mean and sqrtn divide by the weights


def ids_of(*shape):
    return np.random.default_rng(2).integers(0, VOCABULARY, shape).astype("int32")


def weights_for(ids):
    return np.random.default_rng(3).uniform(0.5, 1.5, ids.shape).astype("float32")


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)], ids=["2d", "3d"])
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_dense_ids_pool_as_keras_ops(combiner, shape, weighted):
    ids = ids_of(*shape)
    ones = np.ones(ids.shape, "float32")
    assert_pools_as(
        one_table(combiner),
        reference_embedding(),
        ids,
        weights_for(ids) if weighted else None,
        lambda rows, weights=ones: pooled(rows, weights, combiner),
    )


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_padding_key_counts_for_nothing(combiner, weighted):
    """The last bag is padding alone: zeros, not a division by zero."""
    ids = ids_of(5, 3)
    ids[0, 1:] = ids[2, 0] = ids[4] = 7
    present = tensor((ids != 7).astype("float32"))
    assert_pools_as(
        one_table(combiner, padding_key=7),
        reference_embedding(),
        ids,
        weights_for(ids) if weighted else None,
        lambda rows, weights=1.0: pooled(rows, weights * present, combiner),
    )


def test_padding_and_ids_of_weight_zero_insert_nothing():
    """The weight of such an id still has a gradient, that of the row which the id would have."""
    layer = sok.DynamicEmbedding(DIM, combiner="sum", padding_key=7, seed=1)
    ids, weights = np.array([[3, 7, 5]], "int32"), np.array([[2.0, 1.0, 0.0]], "float32")
    layer.build()
    (found,) = gradients(lambda w: ops.sum(layer(ids, w, training=True)), layer.trainable_variables, [tensor(weights)])[
        1
    ]
    table = layer.get_table()
    assert table.export().keys.tolist() == [3]
    rows, is_found = table.find([3, 5])
    assert is_found.tolist() == [True, False]
    sums = rows.sum(axis=1)
    assert_close(found, np.array([[sums[0], 0.0, sums[1]]]))


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_ids_of_one_axis_are_not_combined(combiner):
    """As keras-rs: of one id the weights cancel but for "sum"."""
    ids = ids_of(6)
    weights = weights_for(ids)
    layer = one_table(combiner)
    expected = ROWS[ids] * (weights[:, None] if combiner == "sum" else 1.0)
    assert_close(layer(ids, weights, training=True), expected)
    assert_close(layer(ids, training=True), ROWS[ids])


def three_tables(rows):
    """Two features of a dynamic table, one of a static table of another dim, one of a third, nested."""
    names = {"users": (None, "sum"), "items": (VOCABULARY, "mean"), "words": (None, "sqrtn")}
    tables = {
        name: sok.TableConfig(name, vocabulary, rows[name].shape[1], combiner=combiner)
        for name, (vocabulary, combiner) in names.items()
    }
    feature = lambda name, table: sok.FeatureConfig(name, tables[table])
    layer = sok.DistributedEmbedding(
        {
            "social": [feature("user", "users"), feature("friends", "users")],
            "item": feature("item", "items"),
            "text": feature("text", "words"),
        }
    )
    for name, table in layer.get_tables().items():
        table.assign(np.arange(VOCABULARY), rows[name])
    return layer


class Pooling(layers.Layer):
    """Ids -> combined rows of a `RefEmbedding`."""

    def __init__(self, embedding, combiner):
        super().__init__()
        self.embedding, self.combiner = embedding, combiner

    def call(self, ids):
        rows = self.embedding(ids)
        return pooled(rows, ops.ones_like(ids, dtype="float32"), self.combiner)


def test_model_with_shared_static_and_dynamic_tables_of_mixed_dims_equals_keras():
    random = np.random.default_rng(4)
    rows = {
        n: random.normal(size=(VOCABULARY, d)).astype("float32") * 0.3
        for n, d in (("users", 4), ("items", 3), ("words", 6))
    }
    hotness = {"user": 1, "friends": 3, "item": 2, "text": 3}
    data = {}
    for name, size in hotness.items():
        bags = [random.permutation(BATCH) % VOCABULARY for _ in range(STEPS * size)]
        data[name] = np.reshape(bags, (STEPS, size, BATCH)).transpose(0, 2, 1).reshape(-1, size).astype("int32")

    def train(embed, optimizer):
        inputs = {name: keras.Input((size,), dtype="int32", name=name) for name, size in hotness.items()}
        model = keras.Model(inputs, dense_layer()(layers.Concatenate()(embed(inputs))))
        model.compile(optimizer, "mse", **FAST)
        model.fit(data, batches()[1], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return model

    layer = three_tables(rows)
    references = {name: reference_embedding(r) for name, r in rows.items()}

    def embed(inputs):
        out = layer({"social": [inputs["user"], inputs["friends"]], "item": inputs["item"], "text": inputs["text"]})
        return [*out["social"], out["item"], out["text"]]

    def embed_by_keras(inputs):
        of = {
            "user": ("users", "sum"),
            "friends": ("users", "sum"),
            "item": ("items", "mean"),
            "text": ("words", "sqrtn"),
        }
        return [Pooling(references[table], combiner)(inputs[name]) for name, (table, combiner) in of.items()]

    ours = train(embed, sok.OptimizerWrapper(optimizers.Adam(0.02)))
    theirs = train(embed_by_keras, optimizers.Adam(0.02))
    for name, table in layer.get_tables().items():
        assert_close(table.find(np.arange(VOCABULARY))[0], references[name].embeddings)
    for mine, reference in zip(ours.layers[-1].weights, theirs.layers[-1].weights, strict=True):
        assert_close(mine, reference)


@pytest.mark.parametrize("num_tables", [1, 20])
def test_a_step_takes_four_native_calls_whatever_the_number_of_tables(num_tables):
    tables = [sok.TableConfig(f"t{i}", None, 2 + i % 3) for i in range(num_tables)]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(f"f{i}", table) for i, table in enumerate(tables)])
    inputs = [keras.Input((2,), dtype="int32") for _ in tables]
    outputs = layer(inputs)
    model = keras.Model(inputs, dense_layer()(layers.Concatenate()(outputs) if num_tables > 1 else outputs[0]))
    model.compile(sok.OptimizerWrapper(optimizers.Adam(0.01)), "mse", **FAST)
    calls = lambda: {name: table.stats().native_calls for name, table in layer.get_tables().items()}
    data = [np.arange(16, dtype="int32").reshape(8, 2) + i for i in range(num_tables)], np.zeros((8, 2))
    model.train_on_batch(*data)
    before = calls()
    for _ in range(3):
        model.train_on_batch(*data)
    assert {name: count - before[name] for name, count in calls().items()} == dict.fromkeys(before, 3 * 4)


# ---- ragged and sparse tensors

BAGS = [[3, 1, 3], [], [7], [2, 2], [0, 11, 5, 9]]


def padded(bags, fill=0):
    width = max(map(len, bags))
    return np.array([list(bag) + [fill] * (width - len(bag)) for bag in bags])


def tensor_of_bags(form, bags, values, nested):
    """`values`, flat, in the form of `bags`: ragged or sparse; nested: as 2 and 3 of them in an outer axis."""
    import tensorflow as tf

    if form == "ragged":
        ragged = tf.RaggedTensor.from_row_lengths(values, [len(bag) for bag in bags])
        return tf.RaggedTensor.from_row_lengths(ragged, [2, 3]) if nested else ragged
    places = [(row, column) for row, bag in enumerate(bags) for column in range(len(bag))]
    if nested:  # two groups of three bags; the last bag of the first is empty
        places = [(row // 2 if row < 2 else 1, row if row < 2 else row - 2, column) for row, column in places]
    return tf.SparseTensor(np.array(places, "int64"), values, (2, 3, 4) if nested else (5, 4))


@only_tensorflow
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("nested", [False, True], ids=["2d", "3d"])
@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_bags_of_unequal_length_pool_as_padded_ones(form, nested, weighted, combiner):
    import tensorflow as tf

    flat_ids = np.concatenate(BAGS).astype("int64")
    flat_weights = np.random.default_rng(5).uniform(0.5, 1.5, len(flat_ids)).astype("float32")
    present = padded([[1.0] * len(bag) for bag in BAGS], 0.0).astype("float32")
    layer, reference = one_table(combiner), reference_embedding()

    def our_outputs(values=None):
        weights = None if values is None else tensor_of_bags(form, BAGS, values, nested)
        rows = layer(tensor_of_bags(form, BAGS, flat_ids, nested), weights, training=True)
        if not nested:
            return rows
        rows = rows.to_tensor() if form == "ragged" else rows
        return tf.concat([rows[0, :2], rows[1]], 0)

    def expected(values=None):
        weights = present if values is None else tf.tensor_scatter_nd_update(present, np.argwhere(present), values)
        return pooled(reference(padded(BAGS)), weights, combiner)

    tensors = [tensor(flat_weights)] if weighted else []
    assert_close(our_outputs(*tensors), expected(*tensors))
    ours = gradients(lambda *w: objective(our_outputs(*w)), layer.trainable_variables, tensors)
    want = gradients(lambda *w: objective(expected(*w)), reference.trainable_variables, tensors)
    apply_gradients(sok.OptimizerWrapper(optimizers.SGD(1.0)), ours[0], layer.trainable_variables)
    assert_close(layer.get_tables()["table"].find(np.arange(VOCABULARY))[0], ROWS - to_numpy(want[0][0]))
    for mine, gradient in zip(ours[1], want[1], strict=True):
        assert_close(mine, gradient, 2e-6)


@only_tensorflow
@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_fit_takes_ragged_and_sparse_inputs(form):
    import tensorflow as tf

    ids = tensor_of_bags(form, BAGS, np.concatenate(BAGS).astype("int64"), nested=False)
    inputs = keras.Input((None,), dtype="int64", **{form: True})
    layer = one_table("mean")
    model = keras.Model(inputs, dense_layer()(layer(inputs)))
    model.compile(sok.OptimizerWrapper(optimizers.SGD(0.5)), "mse")
    model.fit(tf.data.Dataset.from_tensors((ids, np.ones((5, 2), "float32"))), epochs=2, verbose=0)
    rows = layer.get_tables()["table"].find(np.arange(VOCABULARY))[0]
    has_moved = np.abs(rows - ROWS).max(axis=1) > 0
    assert has_moved.tolist() == [key in np.concatenate(BAGS) for key in range(VOCABULARY)]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow takes ragged tensors")
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_preprocess_pads_lists_of_unequal_length(combiner):
    layer = one_table(combiner)
    ids, weights = layer.preprocess([np.array(bag, "int32") for bag in BAGS])
    present = padded([[1.0] * len(bag) for bag in BAGS], 0.0).astype("float32")
    expected = pooled(reference_embedding()(padded(BAGS).astype("int32")), present, combiner)
    assert_close(layer(ids, weights, training=True), expected)
