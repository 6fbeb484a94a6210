"""Ids and weights in every form that a framework or NumPy has: read as they are meant, or refused; never misread."""

import warnings

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND

on_torch = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's own")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="JAX' own")

KEYS = np.arange(-50, 50)
ROWS = np.stack([KEYS, KEYS * 0.5], 1).astype("float32")
IDS = np.array([[1, 2, 3], [4, 5, 6]], "int32")
WEIGHTS = np.array([[1, 0.5, 2], [0.25, 1, 4]], "float32")
INT = "int32" if BACKEND == "jax" else "int64"


def layer_of(combiner=None, **kwargs):
    layer = sok.DynamicEmbedding(2, combiner=combiner, missing="zeros", **kwargs)
    layer.get_table().assign(KEYS, ROWS)
    return layer


def looked_up(ids, weights=None, combiner=None, **kwargs):
    rows = layer_of(combiner, **kwargs)(ids, weights=weights, training=False)
    return keras.ops.convert_to_numpy(rows)


def oracle(ids, weights=None, combiner=None):
    """By NumPy, in float64."""
    ids = np.asarray(ids)
    weights = np.ones(ids.shape) if weights is None else np.asarray(weights, "float64")
    rows = np.stack([ids, ids * 0.5], -1) * weights[..., None]
    if combiner is None:
        return rows
    total = {"sum": np.ones(()), "mean": weights.sum(-1), "sqrtn": np.sqrt((weights**2).sum(-1))}[combiner]
    return rows.sum(-2) / total[..., None]


def check(ids, weights=None, plain_ids=IDS, plain_weights=None):
    for combiner in (None, "sum", "mean", "sqrtn"):
        given = None if combiner is None and weights is None else weights
        want = oracle(plain_ids, plain_weights, combiner) if plain_ids.ndim > 1 or combiner is None else None
        if want is not None:
            np.testing.assert_allclose(looked_up(ids, given, combiner), want, rtol=1e-6)


# ---- NumPy

ARRAYS = {
    "fortran": np.asfortranarray(IDS.astype(INT)),
    "strided": np.repeat(np.repeat(IDS, 2, 0), 3, 1).astype(INT)[::2, ::3],
    "reversed": IDS[::-1, ::-1].astype(INT).copy()[::-1, ::-1],
    "transposed": IDS.T.copy().T,
    "broadcast": np.broadcast_to(IDS, (2, 3)),
    "big_endian": IDS.astype(">i4"),
    "big_endian_unsigned": IDS.astype(">u4"),
    **{dtype: IDS.astype(dtype) for dtype in ("int8", "int16", "uint8", "uint16", "int32", "uint32")},
}
if BACKEND != "jax":
    ARRAYS |= {
        "big_endian_wide": IDS.astype(">i8"),
        "big_endian_unsigned_wide": IDS.astype(">u8"),
        "uint64": IDS.astype("uint64"),
        "list": IDS.tolist(),
    }


@pytest.mark.parametrize("form", ARRAYS)
def test_array_is_read_as_it_is_meant(form):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check(ARRAYS[form])


def test_array_of_a_file_that_is_read_only_is_read():
    ids, weights = IDS.copy(), WEIGHTS.copy()
    ids.flags.writeable = weights.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check(ids, weights, IDS, WEIGHTS)


def test_scalar_and_empty_ids():
    for scalar in (np.array(3, "int32"), np.int32(3)):
        np.testing.assert_array_equal(looked_up(scalar, combiner="sum"), [3, 1.5])
    assert looked_up(np.zeros((0, 3), "int32"), combiner="sum").shape == (0, 2)
    np.testing.assert_array_equal(looked_up(np.zeros((2, 0), "int32"), combiner="mean"), np.zeros((2, 2)))


WEIGHT_FORMS = {
    "big_endian": WEIGHTS.astype(">f4"),
    "double": WEIGHTS.astype("float64"),
    "half": WEIGHTS.astype("float16"),
    "fortran": np.asfortranarray(WEIGHTS),
    "reversed": WEIGHTS[::-1].copy()[::-1],
    "list": WEIGHTS.tolist(),
}


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_weights_are_read_as_they_are_meant(form):
    check(IDS, WEIGHT_FORMS[form], IDS, WEIGHTS)


def test_weights_may_be_negative_and_those_that_are_not_finite_show_in_their_row_alone():
    weights = np.array([[-1, 0.5, 2], [np.nan, 1, 1]], "float32")
    got = looked_up(IDS, weights, "sum")
    np.testing.assert_allclose(got[0], oracle(IDS, weights, "sum")[0], rtol=1e-6)
    assert np.isnan(got[1]).all()
    weights[1, 0] = np.inf
    np.testing.assert_array_equal(looked_up(IDS, weights, "sum")[1], [np.inf] * 2)
    for combiner in ("mean", "sqrtn"):  # by a scale of 0 * inf
        assert not np.isfinite(looked_up(IDS, weights, combiner)[1]).any()


REFUSED_IDS = {
    "float": IDS * 1.0,
    "bool": IDS > 2,
    "complex": IDS.astype("complex64"),
    "object": np.array([1, None]),
    "date": np.zeros(3, "datetime64[s]"),
    "masked": np.ma.masked_array(IDS, IDS > 2),
    "too_large": [[2**64]],
}
if BACKEND != "tensorflow":  # which takes strings
    REFUSED_IDS["text"] = IDS.astype("U")


@pytest.mark.parametrize("form", REFUSED_IDS)
def test_ids_that_are_none_are_refused(form):
    with pytest.raises((ValueError, TypeError)):
        looked_up(REFUSED_IDS[form])


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "uint8", "U"])
def test_weights_that_are_no_floats_are_refused(dtype):
    with pytest.raises(ValueError, match="`weights` must be floats"):
        looked_up(IDS, np.ones(IDS.shape).astype(dtype), "sum")
    with pytest.raises(ValueError, match="masked"):
        looked_up(IDS, np.ma.masked_array(WEIGHTS, WEIGHTS > 1), "sum")


def words(low, high):
    return {"low": low, "high": high}


ZEROS = np.zeros_like(IDS)


def test_words_are_read_as_they_are_meant():
    check(words(IDS, ZEROS))
    check(words(np.asfortranarray(IDS), ZEROS[:, ::-1]))
    check(words(IDS.astype(">i4"), ZEROS))
    check(words(-IDS, ZEROS - 1), plain_ids=-IDS)


@pytest.mark.parametrize(
    "given",
    [
        words(IDS * 1.0, ZEROS),
        words(IDS, ZEROS * 1.0),
        words(IDS.astype("int64"), ZEROS.astype("int64")),
        words(IDS, ZEROS.astype("int64")),
        words(IDS, ZEROS > 0),
        words(IDS, ZEROS[:, :2]),
        words(IDS, ZEROS[0]),
        words(IDS, np.int32(0)),
    ],
    ids=["floats", "float", "wide", "one_wide", "bool", "narrower", "fewer_axes", "scalar"],
)
def test_words_that_are_none_are_refused(given):
    with pytest.raises(ValueError, match="two words must be dense int32 of one shape"):
        looked_up(given)


def test_words_of_a_model_that_are_none_are_refused():
    layer = layer_of()
    with pytest.raises(ValueError, match="two words must be dense int32"):
        layer(words(keras.Input((3,)), keras.Input((3,))))


def test_masked_arrays_are_refused_by_tables_and_preprocess():
    masked = np.ma.masked_array(IDS, IDS > 2)
    with pytest.raises(TypeError, match="masked"):
        layer_of().get_table().find(masked)
    with pytest.raises(ValueError, match="masked"):
        layer_of().preprocess(masked)


def test_keys_of_a_table_in_every_order_of_bytes():
    table = layer_of().get_table()
    for dtype in (">i8", ">u8", "<u8", ">i2", "u1"):
        np.testing.assert_array_equal(table.find(np.array([3, 1], dtype))[0], [[3, 1.5], [1, 0.5]])
    np.testing.assert_array_equal(table.find(np.array([2**64 - 1], ">u8"))[0], [[-1, -0.5]])


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8", "complex64"])
def test_layer_of_a_dtype_without_fractions_is_refused(dtype):
    with pytest.raises(ValueError):
        sok.DynamicEmbedding(2, dtype=dtype)
    with pytest.raises(ValueError):
        table = sok.TableConfig("t", None, 2)
        sok.DistributedEmbedding(sok.FeatureConfig("f", table), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "mixed_float16"])
def test_layer_of_floats_gives_them(dtype):
    layer = layer_of(dtype=dtype)
    rows = keras.ops.convert_to_numpy(keras.ops.cast(layer(IDS), "float32"))
    np.testing.assert_array_equal(rows, oracle(IDS))


# ---- PyTorch


@on_torch
def test_views_of_torch_are_read_as_they_are_meant():
    import torch

    ids, weights = torch.as_tensor(IDS), torch.as_tensor(WEIGHTS)
    check(torch._neg_view(ids), plain_ids=-IDS)
    check(torch.as_tensor(-IDS).neg().neg(), plain_ids=-IDS)
    check(ids, torch._neg_view(weights), IDS, -WEIGHTS)
    imaginary = torch.complex(weights * 0, weights).conj().imag
    assert imaginary.is_neg()
    check(ids, imaginary, IDS, -WEIGHTS)
    check(ids[:1].expand(4, 3), plain_ids=np.repeat(IDS[:1], 4, 0))
    check(ids, weights[0, 1].expand(2, 3), IDS, np.full((2, 3), 0.5))
    check(
        torch.arange(5, dtype=torch.int32).as_strided((3, 3), (1, 1)),
        plain_ids=np.add.outer(np.arange(3), np.arange(3)),
    )
    check(ids.T.contiguous().T)
    check(ids.flip(1).flip(1))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64):
        check(ids.to(dtype))


@on_torch
def test_subclasses_of_torch_are_read():
    import torch

    class Subclass(torch.Tensor):
        pass

    check(
        torch.as_tensor(IDS).as_subclass(Subclass), torch.nn.Parameter(torch.as_tensor(WEIGHTS)).detach(), IDS, WEIGHTS
    )


@on_torch
def test_gradients_that_are_yet_to_be_negated_are_read_as_they_are_meant():
    """That of an imaginary part comes as such a view."""
    import torch

    layer = layer_of()
    seen = []
    rows = layer(IDS, training=True)
    rows.register_hook(lambda gradient: seen.append(torch._neg_view(gradient)) or seen[-1])
    (ticket,) = torch.autograd.grad(rows.sum(), [layer.trigger.value])
    assert seen[0].is_neg()
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    optimizer.apply([ticket], [layer.trigger])
    np.testing.assert_array_equal(layer.get_table().find([1])[0], [[2, 1.5]])


@on_torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["sparse", "csr", "quantised"])
def test_layouts_of_torch_that_are_not_dense_are_refused(form):
    import torch

    ids = torch.as_tensor(IDS)
    given = {
        "sparse": ids.to_sparse,
        "csr": ids.to_sparse_csr,
        "quantised": lambda: torch.quantize_per_tensor(ids * 1.0, 1.0, 0, torch.qint32),
    }[form]()
    with pytest.raises(ValueError, match="must be dense" if form != "quantised" else "dtype"):
        looked_up(given)
    if form != "quantised":
        with pytest.raises(ValueError, match="dense"):
            looked_up(ids, torch.as_tensor(WEIGHTS).to_sparse(), "sum")


@on_torch
def test_meta_tensors_have_shapes_alone():
    import torch

    ids = torch.zeros((2, 3), dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="must be dense"):
        layer_of("sum")(ids)
    with keras.device("meta"):
        rows = layer_of("sum").compute_output_spec(keras.KerasTensor((2, 3), "int64"))
    assert rows.shape == (2, 2)


# ---- JAX


@on_jax
def test_sparse_arrays_of_jax_are_refused():
    from jax.experimental import sparse

    with pytest.raises(ValueError, match="must be dense"):
        looked_up(sparse.BCOO.fromdense(IDS))


# ---- TensorFlow

PLACES = [[0, 0], [0, 2], [1, 1], [1, 2]]


def sparse(values, places=PLACES, shape=(3, 3)):
    import tensorflow as tf

    return tf.SparseTensor(np.reshape(places, (-1, 2)), np.asarray(values), shape)


def called(layer, graph):
    import tensorflow as tf

    return tf.function(lambda ids, weights: layer(ids, weights=weights, training=False)) if graph else layer


@on_tensorflow
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
def test_sparse_tensor_in_any_order_is_read_as_it_is_meant(graph, combiner):
    ids, weights = np.array([1, 2, 3, 4]), np.array([0.5, 1, 2, 4], "float32")
    layer = layer_of(combiner, mask_zero=combiner is None)
    want = np.zeros((3, 3, 2))
    want[tuple(np.transpose(PLACES))] = oracle(ids, None if combiner is None else weights)
    if combiner == "sum":
        want = want.sum(1)
    elif combiner == "mean":
        want = want.sum(1) / np.array([1.5, 6, 1])[:, None]
    for order, of_weights in ([0, 1, 2, 3], [3, 1, 0, 2]), ([2, 3, 1, 0], [2, 3, 1, 0]), ([1, 0, 2, 3], [0, 1, 2, 3]):
        given = sparse(ids[order], np.array(PLACES)[order])
        given_weights = None if combiner is None else sparse(weights[of_weights], np.array(PLACES)[of_weights])
        rows = called(layer, graph)(given, weights=given_weights)
        np.testing.assert_allclose(rows, want, rtol=1e-6)
        if combiner is None and not graph:
            np.testing.assert_array_equal(layer.compute_mask(given), want[..., 0] != 0)


@on_tensorflow
def test_features_of_a_distributed_embedding_are_put_in_order():
    table = sok.TableConfig("t", None, 2, combiner="sum")
    layer = sok.DistributedEmbedding([sok.FeatureConfig("a", table), sok.FeatureConfig("b", table)])
    layer.get_tables()["t"].assign(KEYS, ROWS)
    rows = layer([sparse([4, 1], [[1, 0], [0, 1]]), keras.ops.convert_to_tensor(IDS)], training=False)
    np.testing.assert_array_equal(rows[0], [[1, 0.5], [4, 2], [0, 0]])
    np.testing.assert_allclose(rows[1], oracle(IDS, None, "sum"))


SPARSE_FAULTS = {
    "twice": ([[0, 1], [0, 1]], (3, 3)),
    "twice_apart": ([[0, 1], [1, 1], [0, 1]], (3, 3)),
    "row_outside": ([[3, 0], [0, 0]], (3, 3)),
    "column_outside": ([[0, 0], [0, 3]], (3, 3)),
    "negative": ([[-1, 0], [0, 0]], (3, 3)),
    "huge": ([[0, 0], [1, 0]], (2**40, 3)),
}


@on_tensorflow
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("fault", SPARSE_FAULTS)
def test_sparse_tensor_that_is_none_is_refused(fault, graph):
    import tensorflow as tf

    places, shape = SPARSE_FAULTS[fault]
    given = sparse(np.arange(len(places)), places, shape)
    for combiner in ("sum", None):
        with pytest.raises(
            (ValueError, tf.errors.InvalidArgumentError), match="one value in a place, within its shape"
        ):
            called(layer_of(combiner), graph)(given, weights=None)


@on_tensorflow
def test_sparse_tensor_whose_shape_overflows_is_refused():
    import tensorflow as tf

    given = tf.SparseTensor([[0, 0, 0]], [1], [2**33, 2**33, 2])
    with pytest.raises(ValueError, match="at most"):
        layer_of("sum")(given)
    wide = sparse([1, 2], [[0, 5], [1, 2**40]], (2, 2**62))  # its last axis costs nothing
    np.testing.assert_array_equal(layer_of("sum")(wide), [[1, 0.5], [2, 1]])


@on_tensorflow
def test_ragged_tensor_with_splits_of_either_width():
    import tensorflow as tf

    for dtype in ("int32", "int64"):
        given = tf.RaggedTensor.from_row_splits([1, 2, 3], np.array([0, 2, 2, 3], dtype))
        np.testing.assert_array_equal(layer_of("sum")(given), [[3, 1.5], [0, 0], [3, 1.5]])


@on_tensorflow
@pytest.mark.parametrize("splits", [[0, 2, 1, 3], [1, 2, 3], [0, 2], [0, 5], [0, -1, 3]])
def test_ragged_tensor_with_splits_that_are_none_is_refused(splits):
    import tensorflow as tf

    given = tf.RaggedTensor.from_row_splits([1, 2, 3], splits, validate=False)
    with pytest.raises(Exception, match="row_splits must start at 0, never fall"):
        layer_of("sum")(given)
