"""Tables at `max_capacity` that remove the rows with the lowest scores of the caller's own."""

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, FAST, tensor

DIM, CAPACITY = 4, 12
Custom = sok.policies.Custom


def make_layer(**kwargs):
    kwargs = {"eviction": Custom(), "max_capacity": CAPACITY, **kwargs}
    return sok.DynamicEmbedding(DIM, combiner="sum", **kwargs)


def make_model(layer, hotness=6):
    ids, scores = (keras.Input((hotness,), dtype="int32", name=name) for name in ("ids", "scores"))
    model = keras.Model([ids, scores], keras.layers.Dense(1)(layer(ids, scores=scores)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse", **FAST)
    return model


def train(model, ids, scores):
    ids, scores = np.atleast_2d(np.asarray(ids, "int32")), np.atleast_2d(np.asarray(scores, "int32"))
    model.train_on_batch([ids, scores], np.ones((len(ids), 1)))


def infer(layer, ids, scores):
    """Looks up without a gradient."""
    if BACKEND != "torch":
        return layer(ids, scores=scores)
    import torch

    with torch.no_grad():
        return layer(ids, scores=scores)


def scores_of(table):
    contents = table.export(scores=True)
    return dict(zip(contents.keys.tolist(), contents.scores.tolist(), strict=True))


def test_rows_with_the_lowest_scores_go_first():
    layer = make_layer(eviction=Custom(keep_evicted=True))
    model, table, random = make_model(layer), layer.get_table(), np.random.default_rng(0)
    expected, gone = {}, []
    for _ in range(12):
        ids, scores = random.integers(-20, 20, (1, 6)), random.integers(-2, 9, (1, 6))
        train(model, ids, scores)
        given = {}
        for key, score in zip(ids[0].tolist(), scores[0].tolist(), strict=True):
            given[key] = max(given.get(key, 0), score)
        needed = len(expected | given) - CAPACITY
        may_go = sorted((score, key % 2**64, key) for key, score in expected.items() if key not in given)
        for _, _, key in may_go[: max(needed, 0)]:
            del expected[key]
            gone.append(key)
        expected |= given
        assert scores_of(table) == expected
    assert table.take_evicted().keys.tolist() == gone and len(gone) > 10


def test_ids_without_a_weight_and_padding_bring_no_score():
    layer = make_layer(padding_key=0)
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    ids, weights, scores = (keras.Input((4,), dtype=dtype) for dtype in ("int32", "float32", "int32"))
    model = keras.Model([ids, weights, scores], keras.layers.Dense(1)(layer(ids, weights, scores=scores)))
    model.compile(optimizer, "mse", **FAST)
    batch = [
        np.array([[1, 2, 1, 0]], "int32"),
        np.array([[1, 1, 0, 1]], "float32"),
        np.array([[3, 4, 9, 8]], "int32"),
    ]
    model.train_on_batch(batch, np.ones((1, 1)))
    assert scores_of(layer.get_table()) == {1: 3, 2: 4}


@pytest.mark.parametrize("counts", [False, True])
def test_inference_brings_scores_only_if_asked(counts):
    layer = make_layer(eviction=Custom(count_inference=counts))
    model = make_model(layer, hotness=2)
    train(model, [1, 2], [5, 6])
    model.predict([np.array([[1, 3]], "int32"), np.array([[8, 8]], "int32")], verbose=0)
    assert scores_of(layer.get_table()) == {1: 8 if counts else 5, 2: 6}


def test_scores_may_have_64_bits():
    layer = make_layer()
    wide = BACKEND != "jax"
    score = 2**40 if wide else 2**30
    rows = layer(
        tensor(np.array([[1, 2]])), scores=tensor(np.array([[score, -5]], "int64" if wide else "int32")), training=True
    )
    assert tuple(rows.shape) == (1, DIM)
    # A lookup without a gradient brings no scores to a table that counts training.
    assert scores_of(layer.get_table()) == {1: 0, 2: 0}


def test_each_feature_has_scores_of_its_own():
    tables = [sok.TableConfig(f"t{i}", None, DIM, max_capacity=9, eviction=(Custom(), "lru")[i]) for i in range(2)]
    layer = sok.DistributedEmbedding({f"f{i}": sok.FeatureConfig(f"f{i}", tables[i // 2]) for i in range(3)})
    ids = {f"f{i}": keras.Input((2,), dtype="int32", name=f"f{i}") for i in range(3)}
    scores = keras.Input((2,), dtype="int32", name="scores")
    rows = layer(ids, scores={"f0": scores, "f1": None, "f2": None})
    model = keras.Model([*ids.values(), scores], keras.layers.Dense(1)(keras.layers.add(list(rows.values()))))
    model.compile(sok.OptimizerWrapper("sgd"), "mse", **FAST)
    batch = [np.array([ids], "int32") for ids in ([1, 2], [2, 3], [1, 2], [7, 9])]
    model.train_on_batch(batch, np.ones((1, 1)))
    assert scores_of(layer.get_tables()["t0"]) == {1: 7, 2: 9, 3: 0}


def test_features_of_other_shapes_follow_one_with_scores():
    table = sok.TableConfig("t", None, DIM, combiner="sum", max_capacity=99, eviction=Custom())
    other = sok.TableConfig("u", None, DIM + 3, combiner="sum")
    layer = sok.DistributedEmbedding([sok.FeatureConfig("f", table), sok.FeatureConfig("g", other)])
    ids, scores, others = (keras.Input((length,), dtype="int32") for length in (5, 5, 2))
    found = layer([ids, others], scores=[scores, None])
    model = keras.Model([ids, scores, others], keras.layers.Dense(1)(keras.layers.Concatenate()(found)))
    model.compile(sok.OptimizerWrapper("sgd"), "mse", **FAST)
    batch = [np.arange(5)[None], np.arange(5)[None] * 3, np.array([[8, 9]])]
    batch = [array.astype("int32") for array in batch]
    model.train_on_batch(batch, np.ones((1, 1)))
    assert model.predict(batch, verbose=0).shape == (1, 1)
    assert scores_of(layer.get_tables()["t"]) == {key: 3 * key for key in range(5)}


def test_of_two_calls_in_a_step_the_highest_score_counts():
    for scores in ([9, 5], [5, 9]):
        layer = make_layer()
        inputs = [keras.Input((1,), dtype="int32") for _ in range(4)]
        rows = [layer(ids, scores=given) for ids, given in (inputs[:2], inputs[2:])]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.add(rows)))
        model.compile(sok.OptimizerWrapper("sgd"), "mse", **FAST)
        model.optimizer.build(
            model.trainable_variables
        )  # an eager step of TensorFlow builds it after its backward passes
        batch = [np.array([[value]], "int32") for value in (1, scores[0], 1, scores[1])]
        model.train_on_batch(batch, np.ones((1, 1)))
        assert scores_of(layer.get_table()) == {1: 9}


@pytest.mark.skipif(BACKEND != "tensorflow", reason="other backends take ragged ids as values and row splits")
def test_ragged_scores_are_those_of_ragged_ids():
    import tensorflow as tf

    layer = make_layer(eviction=Custom(count_inference=True))
    layer.get_table().find_or_insert([1, 2, 3])
    layer(tf.ragged.constant([[1], [2, 3]]), scores=tf.ragged.constant([[7], [8, 9]]))
    assert scores_of(layer.get_table()) == {1: 7, 2: 8, 3: 9}
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="`scores` must be shaped as the ids are"):
        layer(tf.ragged.constant([[1], [2, 3]]), scores=tf.ragged.constant([[7, 8], [9]]))


def test_flat_scores_are_those_of_values_and_row_splits():
    layer = make_layer(eviction=Custom(count_inference=True))
    layer.get_table().find_or_insert([1, 2, 3])
    ids = {"values": np.array([1, 2, 3, 1, 1], "int32"), "row_splits": np.array([0, 1, 5], "int32")}
    rows = infer(layer, ids, np.array([7, 8, 9, 2, 3], "int32"))
    assert tuple(rows.shape) == (2, DIM)
    assert scores_of(layer.get_table()) == {1: 7, 2: 8, 3: 9}


def test_dumps_and_saved_layers_keep_scores(tmp_path):
    layer = make_layer()
    model = make_model(layer, hotness=2)
    train(model, [1, 2], [5, 6])
    sok.dump(tmp_path / "dump", model)
    other = make_layer()
    loaded = make_model(other, hotness=2)
    sok.load(tmp_path / "dump", loaded)
    assert scores_of(other.get_table()) == {1: 5, 2: 6}
    assert other.get_table().explain(2) == sok.Explanation("present", score=6)
    assert sok.DynamicEmbedding.from_config(layer.get_config()).eviction == Custom()
    model.save(tmp_path / "m.keras")
    restored = keras.models.load_model(tmp_path / "m.keras")
    train(restored, [3, 1], [9, 1])
    assert scores_of(restored.layers[2].get_table()) == {1: 1, 2: 6, 3: 9}


def test_wrong_scores_are_refused():
    ids = np.array([[1, 2]], "int32")
    with pytest.raises(ValueError, match=r"`scores` are for tables with `eviction=sok_keras.policies.Custom\(\)`"):
        make_layer(eviction="lru")(ids, scores=ids)
    layer = make_layer()
    with pytest.raises(ValueError, match="`scores` must be int32 or int64. Received: scores of dtype float32"):
        layer(ids, scores=ids.astype("float32"))
    with pytest.raises(ValueError, match="`scores` must be shaped as the ids are"):
        layer(ids, scores=ids[0])
    with pytest.raises(ValueError, match="`scores` must be in rows of equal length, as the ids are"):
        layer(ids, scores=[[1], [2, 3]])
    with pytest.raises(ValueError, match="Ids, weights and scores must be plain arrays"):
        layer(ids, scores=np.ma.masked_array(ids))
    if BACKEND == "jax":
        with pytest.raises(ValueError, match="JAX cuts int64 scores to 32 bits"):
            layer(ids, scores=ids.astype("int64"))
    assert len(layer.get_table()) == 0
    symbolic = keras.Input((2,), dtype="int32")
    with pytest.raises(ValueError, match="`scores` must be int32 or int64. Received: scores of dtype float32"):
        layer(symbolic, scores=keras.Input((2,)))
    with pytest.raises(ValueError, match="`scores` are for tables with"):
        make_layer(eviction="lru")(symbolic, scores=symbolic)
    config = sok.TableConfig("t", None, DIM, max_capacity=9, eviction=Custom())
    with pytest.raises(ValueError, match=r"Received: scores of dtype float32 \(feature 'f'\)"):
        sok.DistributedEmbedding({"f": sok.FeatureConfig("f", config)})(
            {"f": symbolic}, scores={"f": keras.Input((2,))}
        )
    if BACKEND == "jax":
        with pytest.raises(ValueError, match="JAX cuts int64 scores to 32 bits"):
            layer(symbolic, scores=keras.Input((2,), dtype="int64"))
    with pytest.raises(ValueError, match="`eviction` needs|`max_capacity`"):
        sok.DynamicEmbedding(DIM, eviction=Custom())
