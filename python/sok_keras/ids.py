"""Converts ids, weights and scores, as users pass them, to the tensors that a lookup takes."""

from typing import Any

import keras
import numpy as np
from keras import ops

from sok_keras import backend, ragged
from sok_keras.keys import is_key, signed_key
from sok_keras.policies import Custom
from sok_keras.strings import is_strings
from sok_keras.table_config import TableConfig

_INTEGERS = ("int32", "int64", "uint32", "uint64")
_NARROW = ("int8", "int16", "uint8", "uint16")

NEEDS_INPUT = '`keras.Input(shape, dtype="int64")`'


def is_words(value: Any) -> bool:
    """Whether ids are given as two words, `{"low": int32, "high": int32}`."""
    return isinstance(value, dict) and set(value) == {"low", "high"}


def is_ragged_dict(value: Any) -> bool:
    """Whether ids are given as `{"values", "row_splits"}`."""
    return isinstance(value, dict) and set(value) == {"values", "row_splits"}


def _is_ragged(value: Any) -> bool:
    return getattr(value, "ragged", False) or hasattr(value, "row_splits")


def _is_sparse(value: Any) -> bool:
    return getattr(value, "sparse", False) or (hasattr(value, "dense_shape") and hasattr(value, "indices"))


def kind(value: Any) -> str:
    """The form of ids: `"dense"`, `"words"`, `"ragged"` or `"sparse"`."""
    if is_words(value):
        return "words"
    if _is_ragged(value):
        return "ragged"
    return "sparse" if _is_sparse(value) else "dense"


def shape_of(value: Any) -> tuple[int | None, ...]:
    """Shape of the ids. Unknown axes are None."""
    value = value["low"] if is_words(value) else value
    return tuple(value.shape if hasattr(value, "shape") else _as_array(value).shape)


def rows_shape(shape: Any, dim: int, reduces: bool) -> Any:
    """Shape of the rows of ids of a shape, which is a dict for ids in two words or ragged ids. `reduces`: whether the last axis is combined."""
    if is_ragged_dict(shape):
        if not reduces:
            values = rows_shape(shape["values"], dim, False)
            return {"values": values, "row_splits": tuple(shape["row_splits"])}
        (num_splits,) = shape["row_splits"]
        return (None if num_splits is None else num_splits - 1, dim)
    shape = shape["low"] if isinstance(shape, dict) else shape
    return (*(shape[:-1] if reduces and len(shape) > 1 else shape), dim)


def in_order(value: Any, feature: str, reduces: bool) -> Any:
    """Returns ids or weights with the values of sparse tensors in row-major order. `reduces`: whether the last axis is combined.

    Raises:
        ValueError: As `ragged.in_order`.
    """
    is_concrete = kind(value) == "sparse" and not isinstance(value, keras.KerasTensor)
    return ragged.in_order(value, feature, reduces) if is_concrete else value


def check_dtype(value: Any, feature: str) -> None:
    """Raises a `ValueError` for ids that are neither integers nor, on TensorFlow, strings, or that JAX would cut to 32 bits."""
    if is_words(value):
        _check_words(value, feature)
        return
    if isinstance(value, ragged.Ragged):
        check_dtype(value.values, feature)
        return
    check_no_mask(value)
    if hasattr(value, "tocsr"):
        raise ValueError(
            "Ids must be an array: `layer.preprocess` makes ids and weights of a SciPy matrix. Received: "
            f"{type(value).__name__} (feature {feature!r})"
        )
    if not backend.is_dense(value):
        raise ValueError(
            "Ids must be dense on this backend; `weights` of 0 leave ids out, and `layer.preprocess` makes them of rows of unequal "
            f"length. Received: {type(value).__name__} (feature {feature!r})"
        )
    dtype = _dtype_of(value)
    if dtype not in _INTEGERS + _NARROW:
        if is_strings(value):
            _check_backend_has_strings(feature)
            return
        raise ValueError(
            f"Ids must be integers; put {NEEDS_INPUT} in front of the layer, since Keras' default is float32, which is exact "
            f"for ids up to 2^24 alone. Received: ids of dtype {dtype} (feature {feature!r})"
        )
    if dtype in ("int64", "uint64") and not backend.has_wide_integers():
        raise ValueError(
            f"JAX cuts {dtype} ids to 32 bits. Set `JAX_ENABLE_X64=1` (Keras stays float32), or feed what "
            '`layer.preprocess(ids)` makes of them: `{"low": int32, "high": int32}`. '
            f"Received: ids of dtype {dtype} (feature {feature!r})"
        )


def _check_backend_has_strings(feature: str) -> None:
    """Raises a `ValueError` for strings, except on TensorFlow."""
    if backend.name != "tensorflow":
        raise ValueError(
            f"Ids must be integers on {backend.name}: feed what `layer.preprocess(ids)` or `sok_keras.string_keys(ids)` makes of strings. "
            f"Received: strings (feature {feature!r})"
        )


def check_no_mask(value: Any) -> None:
    """Raises a `ValueError` for NumPy's masked arrays: frameworks ignore the mask."""
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            "Ids, weights and scores must be plain arrays; `weights` of 0 leave ids out. Received: a masked array"
        )


def _dtype_of(value: Any) -> str:
    dtype = value.dtype if hasattr(value, "dtype") else _as_array(value).dtype
    # The name of a NumPy dtype does not depend on its byte order.
    return dtype.name if isinstance(dtype, np.dtype) else keras.backend.standardize_dtype(dtype)


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(
            "Ids must be integers, in rows of equal length; `layer.preprocess` takes rows of unequal length. Received: "
            f"{value!r:.200}"
        ) from error


def _check_words(value: Any, feature: str) -> None:
    low, high = value["low"], value["high"]
    dtypes, shapes = [_dtype_of(low), _dtype_of(high)], [shape_of(low), shape_of(high)]
    agrees = len(shapes[0]) == len(shapes[1])
    agrees = agrees and all(None in pair or pair[0] == pair[1] for pair in zip(*shapes, strict=True))
    if dtypes != ["int32", "int32"] or not agrees or not (backend.is_dense(low) and backend.is_dense(high)):
        raise ValueError(
            "Ids in two words must be dense int32 of one shape, as `layer.preprocess` makes them. Received: "
            f"low of dtype {dtypes[0]} and shape {shapes[0]}, high of dtype {dtypes[1]} and shape {shapes[1]} (feature {feature!r})"
        )


def check_splits(value: ragged.Ragged, feature: str) -> None:
    """Raises a `ValueError` unless row splits are integers of one axis, as their values are."""
    dtype, shape = _dtype_of(value.row_splits), shape_of(value.row_splits)
    if dtype not in ("int32", "int64") or len(shape) != 1 or len(shape_of(value.values)) != 1:
        raise ValueError(
            "Ragged ids must be values `(n,)` and int32 or int64 row splits `(bags + 1,)`. Received: values of shape "
            f"{shape_of(value.values)}, row splits of dtype {dtype} and shape {shape} (feature {feature!r})"
        )


def check_padding_key(key: int | None) -> None:
    """Raises a `ValueError` unless a `padding_key` is a 64-bit integer or None."""
    if key is not None and not is_key(key):
        raise ValueError(f"`padding_key` must be a 64-bit integer. Received: padding_key={key!r}")


def has_words(value: Any) -> bool:
    """Whether ids have two words, ragged ones too."""
    return is_words(value.values if isinstance(value, ragged.Ragged) else value)


def tensors_of(value: Any, feature: str, axis: str) -> tuple:
    """Returns the tensors of a feature's ids: `(ids,)` or `(low, high)`, and then `row splits` if `axis` is `"ragged"`."""
    check_dtype(value, feature)
    splits: tuple = ()
    if axis == "ragged":
        value, row_splits = ragged.bags_of(value)
        splits = (ops.convert_to_tensor(_plain(row_splits)),)
    elif kind(value) in ("ragged", "sparse"):
        value = ragged.flat_of(value)
    if is_words(value):
        return *(ops.convert_to_tensor(_plain(value[word])) for word in ("low", "high")), *splits
    value = _plain(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint64:
        value = value.view("int64")  # the same keys; Keras has no uint64 on PyTorch
    value = ops.convert_to_tensor(value)
    dtype = keras.backend.standardize_dtype(value.dtype)
    return ops.cast(value, "int32") if dtype in _NARROW else value, *splits


def in_vocabulary(tensors: tuple, words: bool, table: TableConfig, padding_key: int | None) -> tuple:
    """Replaces ids outside of a static table by its `out_of_vocabulary_key`. `tensors`: of a feature, as `tensors_of` returns them."""
    key, size = table.out_of_vocabulary_key, table.vocabulary_size
    if key is None or size is None:
        return tensors
    if words:
        low, high, *splits = tensors
        # Low words are compared without their sign.
        is_outside = ops.logical_or(ops.not_equal(high, 0), ops.bitwise_xor(low, -(2**31)) >= size - 2**31)
        if padding_key is not None:
            padding = split_words(np.int64(padding_key))
            is_padding = ops.logical_and(ops.equal(low, int(padding["low"])), ops.equal(high, int(padding["high"])))
            is_outside = ops.logical_and(is_outside, ops.logical_not(is_padding))
        low_key = int(split_words(np.int64(key))["low"])
        return (_replaced(low, is_outside, low_key), _replaced(high, is_outside, 0), *splits)
    ids, *splits = tensors
    if backend.has_wide_integers():
        ids = ops.cast(ids, "int64")
    largest = np.iinfo(keras.backend.standardize_dtype(ids.dtype)).max
    is_outside = ids < 0
    if size <= largest:
        is_outside = ops.logical_or(is_outside, ids >= size)
    if padding_key is not None and padding_key <= largest:
        is_outside = ops.logical_and(is_outside, ops.not_equal(ids, padding_key))
    if key > largest:
        raise ValueError(
            f"Ids must have 64 bits for `out_of_vocabulary_key={key}`: feed what `layer.preprocess(ids)` makes of int64. Received: ids of "
            f"dtype {ids.dtype} (table {table.name!r})"
        )
    return (_replaced(ids, is_outside, key), *splits)


def _replaced(ids: Any, where: Any, key: int) -> Any:
    return ops.where(where, ops.full_like(ids, key), ids)


def _plain(value: Any) -> Any:
    """Converts arrays to a form that every framework takes: native byte order, row-major, writable.

    Lists become arrays here, because Keras would convert them to int32. Tensors are returned as they are.
    """
    if not isinstance(value, np.ndarray):
        return value if hasattr(value, "dtype") else np.asarray(value)
    return np.require(value, value.dtype.newbyteorder("="), ["C_CONTIGUOUS", "WRITEABLE"])


def rows_like(value: Any, rows: Any, axis: str) -> Any:
    """Gives the rows of a lookup, `(..., dim)`, the outer axes of its ids."""
    return ragged.rows_like(value, rows, axis) if kind(value) in ("ragged", "sparse") else rows


def spec_like(value: Any, shape: tuple, dtype: str, reduces: bool) -> Any:
    """The `KerasTensor`s of what `rows_like` returns. It is ragged if an axis before the last one is."""
    if isinstance(value, ragged.Ragged) and not reduces:
        rows = keras.KerasTensor((*shape_of(value.values), shape[-1]), dtype)
        return ragged.rows_like(value, rows, "each")
    is_ragged = kind(value) == "ragged" and len(shape) > 2
    return keras.KerasTensor(shape, dtype=dtype, ragged=is_ragged)


def mask_of(value: Any, padding_key: int | None, reduces: bool) -> Any:
    """The mask of ids: False where an id is `padding_key`, or where a sparse tensor has none.

    `reduces`: whether the last axis is combined. The mask of a bag is then False if all of its ids are; one bag alone has no mask.

    Returns:
        A tensor of bool in the shape of the rows without their last axis; None where there is no mask.
    """
    form = kind(value)
    if padding_key is None or form == "ragged" or (reduces and len(shape_of(value)) < 3):
        return None
    if form == "words":
        words = split_words(np.int64(signed_key(padding_key)))
        mask = ops.logical_or(*(ops.not_equal(value[word], int(words[word])) for word in words))
    elif form == "sparse" and not isinstance(value, keras.KerasTensor):
        mask = ragged.dense_mask(value, _differ(value.values, padding_key))
    else:
        mask = _differ(value, padding_key)
    return ops.any(mask, axis=-1) if reduces else mask


def _differ(value: Any, padding_key: int) -> Any:
    """Where dense ids are not `padding_key`."""
    if not isinstance(value, keras.KerasTensor):
        (value,) = tensors_of(value, "mask", "each")
    dtype = keras.backend.standardize_dtype(value.dtype)
    key = signed_key(padding_key) % 2**64 if dtype == "uint64" else signed_key(padding_key)
    limits = np.iinfo(dtype)
    if not limits.min <= key <= limits.max:
        return ops.ones_like(value, "bool")
    return ops.not_equal(value, key)


def split_words(values: Any) -> dict[str, Any]:
    """Splits 64-bit ids, `(...,)` int64 or uint64, into two int32 arrays, `{"low": ..., "high": ...}`."""
    bits = values.view("int64") if values.dtype == np.uint64 else values
    return {"low": bits.astype("int32"), "high": (bits >> 32).astype("int32")}


def weights_of(value: Any, ids: Any, feature: str) -> Any:
    """Weights as a flat or dense float32 tensor in the order of the ids' tensors.

    Raises:
        ValueError: If they are not floats, or as `_one_for_each_id` says.
    """
    if value is None:
        return None
    value = _one_for_each_id("weights", value, ids, feature)
    dtype = _dtype_of(value)
    if not dtype.startswith(("float", "bfloat")):
        raise ValueError(f"`weights` must be floats. Received: weights of dtype {dtype} (feature {feature!r})")
    return ops.cast(ops.convert_to_tensor(_plain(value)), "float32")


def scores_of(value: Any, ids: Any, feature: str, eviction: Any) -> Any:
    """Scores as a flat or dense tensor of int32 or int64 in the order of the ids' tensors.

    Raises:
        ValueError: If the eviction policy of the table does not take scores, if they are not signed integers or JAX would cut them to 32 bits, or as
            `_one_for_each_id` says.
    """
    if value is None:
        return None
    _check_takes_scores(eviction, feature)
    value = _one_for_each_id("scores", value, ids, feature)
    _check_dtype_of_scores(_dtype_of(value), feature)
    value = ops.convert_to_tensor(_plain(value))
    return ops.cast(value, "int32") if _dtype_of(value) in _NARROW else value


def check_scores(value: Any, feature: str, eviction: Any) -> None:
    """Raises the `ValueError`s of `scores_of` that a symbolic tensor has."""
    if value is None:
        return
    _check_takes_scores(eviction, feature)
    if isinstance(value, keras.KerasTensor):
        _check_dtype_of_scores(_dtype_of(value), feature)


def _check_takes_scores(eviction: Any, feature: str) -> None:
    if not isinstance(eviction, Custom):
        raise ValueError(
            "`scores` are for tables with `eviction=sok_keras.policies.Custom()`. Received: scores for a table with "
            f"eviction={eviction!r} (feature {feature!r})"
        )


def _check_dtype_of_scores(dtype: str, feature: str) -> None:
    if dtype not in ("int32", "int64", *_NARROW):
        raise ValueError(f"`scores` must be int32 or int64. Received: scores of dtype {dtype} (feature {feature!r})")
    if dtype == "int64" and not backend.has_wide_integers():
        raise ValueError(
            "JAX cuts int64 scores to 32 bits. Set `JAX_ENABLE_X64=1` (Keras stays float32), or feed int32. Received: scores of dtype "
            f"int64 (feature {feature!r})"
        )


def _one_for_each_id(name: str, value: Any, ids: Any, feature: str) -> Any:
    """Returns numbers, flat or dense, in the order of the ids' tensors.

    Args:
        name: Name of the argument, for messages.
        value: The numbers, of the form of the ids.
        ids: The ids in order.
        feature: Name of the feature, for messages.

    Raises:
        ValueError: If they differ from `ids` in shape, in the lengths of ragged rows, or in the places of sparse values. A `tf.function`
            raises `tf.errors.InvalidArgumentError` when it runs.
    """
    check_no_mask(value)
    if isinstance(value, list | tuple):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(
                f"`{name}` must be in rows of equal length, as the ids are. Received: {value!r:.200} (feature {feature!r})"
            ) from error
    ids = ids.values if isinstance(ids, ragged.Ragged) else ids  # their numbers are flat
    ids = ids["low"] if is_words(ids) else ids
    shape, wanted = shape_of(value), shape_of(ids)
    agrees = kind(value) == kind(ids) and len(shape) == len(wanted)
    agrees = agrees and all(s is None or w is None or s == w for s, w in zip(shape, wanted, strict=True))
    if not agrees:
        raise ValueError(
            f"`{name}` must be shaped as the ids are. Received: {kind(value)} {name} of shape {shape} for {kind(ids)} ids of "
            f"shape {wanted} (feature {feature!r})"
        )
    if not backend.is_dense(value):
        raise ValueError(
            f"`{name}` must be dense on this backend. Received: a {type(value).__name__} (feature {feature!r})"
        )
    if kind(ids) != "dense" or None in (*shape, *wanted):
        message = f"`{name}` must be shaped as the ids are: as many in each row, in the same places. Received: others for ids of shape"
        value = ragged.flat_numbers(ids, value, f"{message} {wanted} (feature {feature!r})")
    return value
