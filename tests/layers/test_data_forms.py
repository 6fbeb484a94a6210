"""Ids as data libraries hold them: pandas' nullable columns, missing ids, object arrays, SciPy matrices, ragged rows, nested tensors."""

import keras
import numpy as np
import pandas as pd
import pytest
import scipy.sparse

import sok_keras as sok
from reference import BACKEND, assert_close, raises, to_numpy

on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has this behavior")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="only PyTorch has nested tensors")
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="only JAX compiles a step for each shape")

DIM = 4
WIDE = 2**62 + 1  # a float64 does not hold it
BAGS = [[3, 5, 5], [], [7], [9, 3]]


def layer_of(**options):
    options = {"embeddings_initializer": "normal", "seed": 5} | options
    return sok.DynamicEmbedding(DIM, **options)


def plain(ids):
    """Ids as int64, whatever form `preprocess` has given them."""
    if isinstance(ids, dict):
        return (ids["high"].astype("int64") << 32) + ids["low"].view("uint32")
    return np.asarray(ids).astype("int64")


def rows_of(keys, layer=None):
    """First values of the rows."""
    layer = layer or layer_of()
    if not layer.built:
        layer.build()
    return layer.get_table().find(keys)[0].reshape(*np.shape(keys), DIM)


def means():
    rows = [rows_of(bag).mean(0) if bag else np.zeros(DIM) for bag in BAGS]
    return np.stack(rows)


# ---- missing ids

MISSING = {
    "Int64": lambda: pd.Series([1, None, WIDE], dtype="Int64"),
    "UInt64": lambda: pd.Series([1, None, WIDE], dtype="UInt64"),
    "frame": lambda: pd.DataFrame({"a": pd.array([1, None, WIDE], "Int64")}),
    "category": lambda: pd.Series([1, None, WIDE], dtype="Int64").astype("category"),
    "objects": lambda: np.array([1, None, WIDE], object),
    "NaN among objects": lambda: np.array([1, float("nan"), WIDE], object),
    "list": lambda: [1, None, WIDE],
    "lists": lambda: [[1], [None], [WIDE]],
}


@pytest.mark.parametrize("form", MISSING)
def test_missing_ids_are_the_padding_key(form):
    ids = plain(layer_of(padding_key=-9).preprocess(MISSING[form]()))
    assert ids.ravel().tolist() == [1, -9, WIDE]


@pytest.mark.parametrize("form", MISSING)
def test_missing_ids_without_a_padding_key_are_refused_in_words(form):
    with pytest.raises(ValueError, match=r"no `padding_key`: set one.*Received: 1 of 3 ids missing \(feature 'mine'\)"):
        layer_of(name="mine").preprocess(MISSING[form]())
    with pytest.raises(ValueError, match="no `padding_key`"):
        layer_of()(MISSING[form]())


@pytest.mark.skipif(BACKEND == "jax", reason="on JAX without x64, ids of 64 bits go through `preprocess`")
@pytest.mark.parametrize("form", MISSING)
def test_layers_take_missing_ids(form):
    layer = layer_of(padding_key=-9)
    rows = to_numpy(layer(MISSING[form](), training=True)).reshape(-1, DIM)
    assert layer.get_table().export().keys.tolist() == [1, WIDE]
    assert_close(rows, np.stack([rows_of([1])[0], np.zeros(DIM), rows_of([WIDE])[0]]))


def test_missing_strings_are_the_padding_key():
    a, b = sok.string_keys(["a", "b"])
    for strings in (["a", None, "b"], pd.Series(["a", None, "b"]), pd.Series(["a", None, "b"]).astype("category")):
        ids = plain(layer_of(padding_key=0).preprocess(strings))
        assert ids.tolist() == [a, 0, b]
        with pytest.raises(ValueError, match="no `padding_key`"):
            layer_of().preprocess(strings)


def test_columns_without_missing_ids_keep_all_bits():
    for dtype in ("Int64", "int64", "uint64"):
        assert plain(layer_of().preprocess(pd.Series([1, WIDE], dtype=dtype))).tolist() == [1, WIDE]
    frame = pd.DataFrame({"a": [1, 2], "b": pd.array([3, 4], "Int32")})
    assert plain(layer_of().preprocess(frame)).tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (pd.Series([1, None]), r'with `dtype="Int64"`'),
        ([1, "a"], "Received: 'a' of type str"),
        (np.array([1, 2.5], object), "Received: 2.5 of type float"),
        ([[2**64]], f"Received: {2**64} of type int"),
        (np.array([True, None]), "Received: True of type bool"),
        ([[[1, 2], [3]], [[4], [5]]], "must have two axes"),
        ([[[1, 2], [3]], [[4]]], "must have two axes"),
    ],
    ids=["floats", "mixed", "fraction", "too large", "bool", "deep", "deeper"],
)
def test_what_is_no_id_is_refused_with_what_came(ids, says):
    with pytest.raises((ValueError, TypeError), match=says):
        layer_of(padding_key=0).preprocess(ids)


# ---- rows of unequal length


@pytest.mark.parametrize(
    "bags",
    [
        BAGS,
        [[3, 5, 5], None, [7], [9, 3]],
        pd.Series([[3, 5, 5], None, [7], [9, 3]]),
        [[3, 5, 5], [None], [7], [9, 3]],
    ],
    ids=["lists", "None", "column of lists", "None in a list"],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_bags_of_unequal_length(bags, ragged):
    layer = layer_of(combiner="mean", padding_key=-1)
    ids = layer.preprocess(bags, ragged=ragged)  # weights need not say what is padding
    assert_close(layer(ids, training=True), means())
    assert layer.get_table().export().keys.tolist() == [3, 5, 7, 9]


@pytest.mark.parametrize("form", ["csr_matrix", "csr_array", "coo_matrix", "csc_array"])
@pytest.mark.parametrize("ragged", [False, True])
def test_columns_of_a_scipy_matrix_are_ids_and_its_values_weights(form, ragged):
    dense = np.zeros((3, 8), "float64")
    dense[0, [1, 7]], dense[2, 7] = [0.5, -2], 3
    layer = layer_of(combiner="sum")
    ids, weights = layer.preprocess(getattr(scipy.sparse, form)(dense), ragged=ragged)
    rows = rows_of([1, 7])
    assert_close(
        layer(ids, weights, training=True), np.stack([0.5 * rows[0] - 2 * rows[1], np.zeros(DIM), 3 * rows[1]])
    )
    assert layer.get_table().export().keys.tolist() == [1, 7]


def test_a_scipy_matrix_in_a_call_names_preprocess():
    with pytest.raises(
        ValueError, match=r"`layer.preprocess` makes ids and weights of a SciPy matrix. Received: csr_matrix"
    ):
        layer_of()(scipy.sparse.csr_matrix(np.eye(2)))
    with pytest.raises(ValueError, match="must be None for a SciPy matrix"):
        layer_of().preprocess(scipy.sparse.csr_matrix(np.eye(2)), np.ones(2))


def parts_of(bags, dtype="int32"):
    splits = np.cumsum([0, *map(len, bags)])
    return {"values": np.concatenate([np.array(bag, dtype) for bag in bags]), "row_splits": splits.astype("int32")}


@pytest.mark.parametrize("dtype", ["int32", "int64", "words"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
def test_values_with_row_splits_are_looked_up_and_trained(dtype, combiner):
    if dtype == "int64" and BACKEND == "jax":
        dtype = "words"
    parts = parts_of(BAGS, "int32" if dtype == "words" else dtype)
    if dtype == "words":
        parts["values"] = {"low": parts["values"], "high": np.zeros_like(parts["values"])}
    layer, dense = layer_of(combiner=combiner, name="mine"), layer_of(combiner=combiner, name="mine")
    rows = layer(parts, training=True)
    if combiner is None:
        assert to_numpy(rows["row_splits"]).tolist() == [0, 3, 3, 4, 6]
        assert_close(rows["values"], rows_of(np.concatenate(BAGS).astype("int64")))
        return
    ids, weights = dense.preprocess([np.array(bag, "int32") for bag in BAGS])
    assert_close(rows, to_numpy(dense(ids, weights, training=True)))
    shape = keras.tree.map_structure_up_to(parts, lambda part: (None,), parts)
    assert layer.compute_output_shape(shape) == (None, DIM)


def test_weights_of_values_with_row_splits_are_flat():
    layer = layer_of(combiner="sum")
    rows = layer(parts_of(BAGS), np.array([1, 2, 0, 4, 5, 6], "float32"), training=True)
    of = {key: rows_of([key])[0] for key in (3, 5, 7, 9)}
    assert_close(rows, np.stack([of[3] + 2 * of[5], np.zeros(DIM), 4 * of[7], 5 * of[9] + 6 * of[3]]))
    with pytest.raises(ValueError, match="`weights` must be shaped as the ids are"):
        layer(parts_of(BAGS), np.ones((4, 3), "float32"))


@pytest.mark.parametrize(
    ("row_splits", "says"),
    [
        ([1, 3, 6], "must start at 0"),
        ([0, 4, 3, 6], "never fall"),
        ([0, 3], "end at the number of ids"),
    ],
)
def test_row_splits_that_do_not_fit_are_refused(row_splits, says):
    layer = layer_of(combiner="sum")
    layer.build()
    with raises(ValueError, says, layer.get_table()):
        layer({**parts_of(BAGS), "row_splits": np.array(row_splits)})


@pytest.mark.parametrize("row_splits", [[0.0, 6.0], [[0, 6]], 6])
def test_row_splits_that_are_no_integers_of_one_axis_are_refused(row_splits):
    with pytest.raises(ValueError, match="int32 or int64 row splits"):
        layer_of(combiner="sum")({**parts_of(BAGS), "row_splits": np.array(row_splits)})


def model_of_ragged(combiner="mean"):
    inputs = {part: keras.Input((), dtype="int32", name=part) for part in ("values", "row_splits")}
    layer = layer_of(combiner=combiner, padding_key=-1)
    outputs = keras.layers.Dense(1)(layer(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    return model, layer


class Batches(keras.utils.PyDataset):
    """Batches of bags of many lengths."""

    def __init__(self, layer, count, seed=0):
        super().__init__()
        random = np.random.default_rng(seed)
        self.batches = []
        for _ in range(count):
            bags = [random.integers(0, 20, random.integers(0, 9)).astype("int32") for _ in range(8)]
            self.batches.append(
                (layer.preprocess(bags, ragged=True), np.array([[len(bag)] for bag in bags], "float32"))
            )

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        return self.batches[number]


def test_ragged_batches_train_a_functional_model():
    model, layer = model_of_ragged()
    batches = Batches(layer, 6)
    assert model.output_shape == (None, 1)
    losses = model.fit(batches, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert -1 not in layer.get_table().export().keys
    assert model.predict(batches, verbose=0).shape == (48, 1)


@on_jax
def test_few_shapes_are_compiled():
    layer = layer_of(combiner="mean", padding_key=-1)
    sizes = {len(plain(layer.preprocess([[1] * n], ragged=True)["values"])) for n in range(1000)}
    assert len(sizes) == 33 and max(sizes) == 1024
    for n in (1, 9, 300):  # padding without a padding key has weight 0
        ids, weights = layer_of(combiner="mean").preprocess([[1] * n, [2]], ragged=True)
        assert len(plain(ids["values"])) == len(weights) < 1.25 * (n + 4) and weights.sum() == n + 1


# ---- nested tensors


def nested(bags=BAGS, jagged=True):
    import torch

    layout = torch.jagged if jagged else torch.strided
    return torch.nested.nested_tensor([torch.tensor(bag, dtype=torch.int64) for bag in bags], layout=layout)


@on_torch
@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_ragged():
    assert_close(layer_of(combiner="mean")(nested()), means())
    rows = layer_of()(nested())
    assert rows.is_nested and [len(row) for row in rows.unbind()] == [3, 0, 1, 2]
    assert_close(rows.values(), rows_of(np.concatenate(BAGS).astype("int64")))
    for jagged in (True, False):
        ids = layer_of(padding_key=-1).preprocess(nested(jagged=jagged))
        assert ids.tolist() == [[3, 5, 5], [-1] * 3, [7, -1, -1], [9, 3, -1]]


@on_torch
@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_of_other_layouts_name_what_to_do():
    for is_built in (False, True):
        layer = layer_of()
        if is_built:
            layer.build()
        with pytest.raises(ValueError, match="`layout=torch.jagged`"):
            layer(nested(jagged=False))


# ---- many features


def test_many_features_of_many_forms():
    table = sok.TableConfig("t", None, DIM, "normal", combiner="sum")
    configs = {name: sok.FeatureConfig(name, table, padding_key=-1) for name in ("column", "bags", "dense")}
    layer = sok.DistributedEmbedding(configs)
    given = {
        "column": pd.Series([1, None], dtype="Int64"),
        "bags": [[1, 2], []],
        "dense": np.array([[1], [3]], "int32"),
    }
    for ragged in (False, True):
        ids = layer.preprocess(given, ragged=ragged)
        rows = layer(ids, training=True)
        one, two, three = layer.get_tables()["t"].find([1, 2, 3])[0]
        assert_close(rows["column"], np.stack([one, np.zeros(DIM)]))
        assert_close(rows["bags"], np.stack([one + two, np.zeros(DIM)]))
        assert_close(rows["dense"], np.stack([one, three]))
    assert layer.get_tables()["t"].export().keys.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ragged", [False, True])
def test_features_without_weights_get_ones_beside_others(ragged):
    table = sok.TableConfig("t", None, DIM, "normal", combiner="sum")
    layer = sok.DistributedEmbedding([sok.FeatureConfig(name, table) for name in ("bags", "matrix")])
    ids, weights = layer.preprocess([[[1, 2], []], scipy.sparse.csr_matrix([[0, 2.0], [0, 0]])], ragged=ragged)
    rows = layer(ids, weights, training=True)
    one, two = layer.get_tables()["t"].find([1, 2])[0]
    assert_close(rows[0], np.stack([one + two, np.zeros(DIM)]))
    assert_close(rows[1], np.stack([2 * one, np.zeros(DIM)]))
