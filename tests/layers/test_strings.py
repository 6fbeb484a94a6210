"""Strings as ids: their keys on the host, in TensorFlow's graphs, through `preprocess` and in layers."""

import random
import subprocess
import sys

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, to_numpy

on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has tensors of strings")
elsewhere = pytest.mark.skipif(BACKEND == "tensorflow", reason="layers take strings on TensorFlow")

DIM = 4
# Keys that FarmHash's reference gives, as BigQuery's `FARM_FINGERPRINT` does.
KEYS = {"68fd1e64": 7920289447977470598, "80e26c9b": -7067138553114685044, "bü": 1064178085799839973}
WORDS = [["68fd1e64", "80e26c9b"], ["80e26c9b", "bü"]]


def keys_of_words():
    return np.array([[KEYS[word] for word in row] for row in WORDS])


@pytest.mark.parametrize(
    "values",
    [
        WORDS,
        tuple(map(tuple, WORDS)),
        [[word.encode() for word in row] for row in WORDS],
        np.array(WORDS),
        np.array(WORDS, object),
        np.char.encode(np.array(WORDS), "utf-8"),
        np.asfortranarray(np.array(WORDS)),
    ],
    ids=["lists", "tuples", "bytes", "text", "objects", "bytes in an array", "column-major"],
)
def test_keys_do_not_depend_on_the_form(values):
    keys = sok.string_keys(values)
    assert keys.dtype == "int64"
    np.testing.assert_array_equal(keys, keys_of_words())


def test_keys_of_one_string_of_none_and_of_rows_of_unequal_length():
    assert sok.string_keys("bü").shape == ()
    assert sok.string_keys("bü") == KEYS["bü"]
    assert sok.string_keys([]).shape == (0,)
    assert sok.string_keys(np.empty((0, 3), "U4")).shape == (0, 3)
    first, second, third = sok.string_keys([["68fd1e64", "bü"], ["80e26c9b"], []])
    assert [first.tolist(), second.tolist(), third.tolist()] == [[KEYS["68fd1e64"], KEYS["bü"]], [KEYS["80e26c9b"]], []]


@pytest.mark.parametrize("values", [["a", None], [1, 2], np.array([1.5]), np.array(["a", float("nan")], object), None])
def test_what_is_no_string_is_refused(values):
    with pytest.raises(TypeError, match="must be strings or bytes"):
        sok.string_keys(values)


def test_bytes_beside_text_and_zero_bytes_in_lists_count():
    keys = sok.string_keys(["a", b"a", b"a\0", b"\x80"])
    assert keys[0] == keys[1]
    assert len(set(keys.tolist())) == 3


def test_string_keys_need_no_keras():
    program = "import sok_keras, sys; print(sok_keras.string_keys('bü'), 'keras' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.split() == [str(KEYS["bü"]), "False"]


def any_strings():
    draw = random.Random(0)
    return [bytes(draw.randrange(1, 256) for _ in range(length)) for length in range(300) for _ in range(3)]


@on_tensorflow
def test_keys_in_a_graph_are_those_on_the_host():
    import tensorflow as tf

    strings = any_strings()
    in_graph = tf.function(sok.string_keys)(tf.constant(strings))
    np.testing.assert_array_equal(in_graph, sok.string_keys(strings))
    ragged = sok.string_keys(tf.ragged.constant([["68fd1e64"], [], ["80e26c9b", "bü"]]))
    assert ragged.to_list() == [[KEYS["68fd1e64"]], [], [KEYS["80e26c9b"], KEYS["bü"]]]
    sparse = sok.string_keys(tf.sparse.from_dense(WORDS))
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), keys_of_words())
    dataset = tf.data.Dataset.from_tensor_slices(WORDS).map(sok.string_keys)
    np.testing.assert_array_equal(list(dataset.as_numpy_iterator()), keys_of_words())


@on_tensorflow
def test_layers_take_strings():
    import tensorflow as tf

    layer = sok.DynamicEmbedding(DIM, combiner="mean", seed=1)
    wanted = to_numpy(layer(keys_of_words()))
    for words in (WORDS, np.array(WORDS), tf.constant(WORDS), tf.ragged.constant(WORDS), tf.sparse.from_dense(WORDS)):
        np.testing.assert_array_equal(to_numpy(layer(words)), wanted)
    table = sok.TableConfig("words", None, DIM, seed=1)
    both = sok.DistributedEmbedding({"a": sok.FeatureConfig("a", table), "b": sok.FeatureConfig("b", table)})
    rows = both({"a": tf.constant(WORDS), "b": tf.constant(keys_of_words())})
    np.testing.assert_array_equal(to_numpy(rows["a"]), to_numpy(rows["b"]))


@on_tensorflow
def test_a_model_of_strings_trains_and_is_saved(tmp_path):
    import tensorflow as tf

    inputs = keras.Input((2,), dtype="string")
    layer = sok.DynamicEmbedding(DIM, combiner="sum")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    words = tf.constant(WORDS)
    losses = model.fit(words, np.array([[1.0], [2.0]]), epochs=30, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert sorted(layer.get_table().export().keys.tolist()) == sorted(KEYS.values())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(words, verbose=0), model.predict(words, verbose=0))


@elsewhere
@pytest.mark.parametrize("words", [WORDS, np.array(WORDS), np.array(WORDS, object)])
def test_the_error_elsewhere_says_what_to_call(words):
    with pytest.raises(ValueError, match="sok_keras.string_keys"):
        sok.DynamicEmbedding(DIM)(words)


def test_preprocess_makes_keys_of_strings():
    layer = sok.DynamicEmbedding(DIM, combiner="mean", seed=1)
    rows = to_numpy(layer(layer.preprocess(WORDS)))
    np.testing.assert_array_equal(rows, to_numpy(layer(layer.preprocess(keys_of_words()))))
    ids, weights = layer.preprocess([["68fd1e64", "bü"], ["80e26c9b"]])
    assert to_numpy(weights).tolist() == [[1, 1], [1, 0]]
    bags = to_numpy(layer(ids, weights))
    singles = to_numpy(layer(layer.preprocess([["68fd1e64"], ["bü"], ["80e26c9b"]])))
    np.testing.assert_allclose(bags, [(singles[0] + singles[1]) / 2, singles[2]], rtol=1e-6)
