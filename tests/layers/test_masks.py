"""Masks of sequences: what follows an embedding honours `padding_key` and `mask_zero` as it does `keras.layers.Embedding`'s."""

import keras
import numpy as np
import pytest
from keras import layers

import sok_keras as sok
from reference import BACKEND, assert_close, to_numpy

DIM, LENGTH, VOCABULARY = 4, 5, 9
ROWS = np.random.default_rng(0).normal(size=(VOCABULARY, DIM)).astype("float32")
# Padding stands at the end, at the start, everywhere and nowhere.
HISTORIES = np.array([[1, 2, 0, 0, 0], [0, 0, 0, 3, 4], [0] * 5, [5, 6, 7, 8, 1]], "int32")
TARGETS = np.arange(4.0).reshape(4, 1)

PAD = {"mask_zero": 0, "padding_key": 0, "negative": -1, "wide": 2**40}


def theirs():
    embedding = layers.Embedding(VOCABULARY, DIM, mask_zero=True)
    embedding.build()
    embedding.set_weights([np.where(np.arange(VOCABULARY)[:, None], ROWS, 0)])
    return embedding


def ours(how, layer="dynamic"):
    if layer == "dynamic":
        options = {"mask_zero": True} if how == "mask_zero" else {"padding_key": PAD[how]}
        embedding = sok.DynamicEmbedding(DIM, **options)
    else:
        table = sok.TableConfig("t", None, DIM, combiner=None)
        embedding = sok.DistributedEmbedding(sok.FeatureConfig("f", table, padding_key=PAD[how]))
    embedding.build()
    table = embedding.get_table() if layer == "dynamic" else embedding.get_tables()["t"]
    table.assign(np.arange(1, VOCABULARY), ROWS[1:])
    return embedding


def ids_for(how):
    ids = HISTORIES.astype("int64" if how == "wide" else "int32")
    return np.where(ids == 0, PAD[how], ids)


class Pooling(layers.Layer):
    """Attention over a sequence, then its mean."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(1, DIM, kernel_initializer=keras.initializers.GlorotUniform(7))
        self.mean = layers.GlobalAveragePooling1D()
        self.supports_masking = True

    def call(self, x, mask=None):
        return self.mean(self.attention(x, x, query_mask=mask, value_mask=mask, key_mask=mask), mask=mask)


FOLLOWERS = {
    "gru": lambda: layers.GRU(3, kernel_initializer=keras.initializers.GlorotUniform(7), recurrent_initializer="zeros"),
    "mean": layers.GlobalAveragePooling1D,
    "attention": Pooling,
}


def outputs_of(embedding, ids, follower):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype=str(ids.dtype))
    model = keras.Model(inputs, FOLLOWERS[follower]()(embedding(inputs)))
    eager = to_numpy(model(ids))
    assert_close(model.predict(ids, verbose=0), eager)
    return eager


def skip_wide(how):
    if how == "wide" and BACKEND == "jax":
        pytest.skip("JAX without x64 takes 64-bit ids as two words")


@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize("how", PAD)
def test_layers_that_follow_honour_the_mask(how, follower):
    skip_wide(how)
    # Keras' mean of nothing is NaN.
    chosen = slice(None) if follower == "gru" else [0, 1, 3]
    expected = outputs_of(theirs(), HISTORIES[chosen], follower)
    assert_close(outputs_of(ours(how), ids_for(how)[chosen], follower), expected)
    if how != "mask_zero":
        assert_close(outputs_of(ours(how, "distributed"), ids_for(how)[chosen], follower), expected)


@pytest.mark.parametrize("layer", ["dynamic", "distributed"])
def test_training_with_a_mask_is_as_with_keras_embedding(layer):
    def train(embedding, optimizer):
        inputs = keras.Input((LENGTH,), dtype="int32")
        gru = FOLLOWERS["gru"]()(embedding(inputs))
        model = keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(gru))
        model.compile(optimizer, "mse")
        model.fit(HISTORIES, TARGETS, epochs=3, batch_size=4, shuffle=False, verbose=0)
        return model

    expected = train(theirs(), keras.optimizers.SGD(0.1)).layers[1].get_weights()[0]
    embedding = ours("padding_key", layer)
    train(embedding, sok.OptimizerWrapper(keras.optimizers.SGD(0.1)))
    table = embedding.get_table() if layer == "dynamic" else embedding.get_tables()["t"]
    contents = table.export()
    assert contents.keys.tolist() == list(range(1, VOCABULARY))  # padding has no row
    assert_close(contents.rows, expected[1:], 1e-5)


def test_padding_makes_no_row_and_is_no_member_of_a_mean():
    for options in ({"mask_zero": True}, {"padding_key": 0}):
        layer = sok.DynamicEmbedding(DIM, combiner="mean", embeddings_initializer="normal", **options)
        rows = to_numpy(layer(HISTORIES, training=True))
        assert layer.get_table().export().keys.tolist() == list(range(1, VOCABULARY))
        found = layer.get_table().find([1, 2])[0]
        assert_close(rows[0], found.mean(0))
        np.testing.assert_array_equal(rows[2], np.zeros(DIM))


def test_bags_of_padding_alone_are_masked():
    bags = np.array([[[1, 0], [0, 0]], [[2, 3], [0, 4]]], "int32")
    layer = sok.DynamicEmbedding(DIM, combiner="sum", mask_zero=True)
    assert to_numpy(layer.compute_mask(bags)).tolist() == [[True, False], [True, True]]
    table = sok.TableConfig("t", None, DIM, combiner="sum")
    features = [sok.FeatureConfig("bags", table, padding_key=0), sok.FeatureConfig("plain", table)]
    of_bags, of_plain = sok.DistributedEmbedding(features).compute_mask([bags, bags])
    assert to_numpy(of_bags).tolist() == [[True, False], [True, True]] and of_plain is None


def test_one_bag_a_sample_has_no_mask():
    """A mask of samples would take them out of the loss."""
    assert sok.DynamicEmbedding(DIM, combiner="mean", padding_key=0).compute_mask(HISTORIES) is None
    table = sok.TableConfig("t", None, DIM)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("f", table, padding_key=0))
    assert layer.compute_mask(HISTORIES) is None


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64", "words", "list"])
def test_masks_of_every_dtype(dtype):
    if BACKEND == "jax" and dtype in ("int64", "uint64", "list"):
        pytest.skip("JAX without x64 takes 64-bit ids as two words")
    ids = HISTORIES.astype("int64" if dtype in ("words", "list") else dtype)
    ids = {"words": lambda: sok.ids.split_words(ids), "list": ids.tolist}.get(dtype, lambda: ids)()
    for key, expected in ((0, HISTORIES != 0), (5, HISTORIES != 5), (-1, np.full(HISTORIES.shape, True))):
        mask = to_numpy(sok.DynamicEmbedding(DIM, padding_key=key).compute_mask(ids))
        np.testing.assert_array_equal(mask, expected)


def test_the_largest_key_is_masked_in_uint64():
    if BACKEND == "jax":
        pytest.skip("JAX without x64 takes 64-bit ids as two words")
    ids = np.array([[1, 2**64 - 1]], "uint64")
    for key in (2**64 - 1, -1):
        assert to_numpy(sok.DynamicEmbedding(DIM, padding_key=key).compute_mask(ids)).tolist() == [[True, False]]


def test_mask_zero_with_another_padding_key_is_refused():
    with pytest.raises(ValueError, match="`mask_zero` must be False .* Received: mask_zero=True, padding_key=3"):
        sok.DynamicEmbedding(DIM, mask_zero=True, padding_key=3)


@pytest.mark.parametrize("weighted", [False, True])
def test_features_without_a_combiner_have_a_row_for_each_id(weighted):
    table = sok.TableConfig("t", None, DIM, "normal", combiner=None)
    pooled = sok.TableConfig("p", None, DIM, "normal", combiner="sum")
    layer = sok.DistributedEmbedding({"a": sok.FeatureConfig("a", table), "b": sok.FeatureConfig("b", pooled)})
    ids = {"a": HISTORIES, "b": HISTORIES}
    weights = {"a": HISTORIES * 0.5 + 1, "b": HISTORIES * 0.0 + 1} if weighted else None
    rows = layer(ids, weights, training=True)
    found = layer.get_tables()["t"].find(HISTORIES)[0].reshape(*HISTORIES.shape, DIM)
    assert_close(rows["a"], found * weights["a"][..., None] if weighted else found)
    assert rows["b"].shape == (4, DIM)
    assert layer.compute_output_shape({"a": (None, 5), "b": (None, 5)}) == {"a": (None, 5, DIM), "b": (None, DIM)}
    twin = sok.DistributedEmbedding.from_config(layer.get_config())
    assert twin.feature_configs["a"].table.combiner is None
