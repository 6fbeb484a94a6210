"""Converts ids and weights, as data libraries hold them, to arrays that layers take."""

import math
from typing import Any, NamedTuple

import keras
import numpy as np

from sok_keras import backend, ids, ragged
from sok_keras.keys import is_key, signed_key
from sok_keras.strings import is_row, is_strings, string_keys


class _Bags(NamedTuple):
    """Bags of ids, one after the other: ids `(n,)`, row splits `(bags + 1,)` int64, weights `(n,)` float32 or None."""

    values: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None


def preprocess(inputs: Any, weights: Any, padding_key: int | None, is_ragged: bool, feature: str) -> Any:
    """See `DynamicEmbedding.preprocess`."""
    ids.check_no_mask(inputs)
    if _is_done(inputs):
        return inputs if weights is None else (inputs, weights)
    bags = _bags_of(inputs, weights, padding_key, is_ragged, feature)
    if bags is None:
        inputs = arrays_of(inputs, padding_key, feature)
        _check_axes(isinstance(inputs, list | tuple), inputs, feature)
        inputs = _narrow(inputs)
    elif is_ragged:
        inputs, weights = _as_ragged(bags, padding_key)
    else:
        inputs, weights = _padded(bags, padding_key)
    return inputs if weights is None else (inputs, weights)


def ones_for(value: Any) -> Any:
    """Weights of 1 for ids that `preprocess` has returned."""
    if ids.is_ragged_dict(value):
        return ones_for(value["values"])
    if hasattr(value, "with_values"):
        return value.with_values(ones_for(value.values))
    if keras.ops.is_tensor(value):
        return keras.ops.ones_like(value, "float32")
    return np.ones(ids.shape_of(value), "float32")


def ids_of(value: Any, padding_key: int | None, feature: str) -> Any:
    """Returns ids of a call in a form that `ids.kind` knows.

    Strings are converted on TensorFlow alone, whose tensors hold them.

    Raises:
        TypeError, ValueError: As `arrays_of`.
    """
    if ids.is_ragged_dict(value):
        value = ragged.from_parts(value)
        ids.check_splits(value, feature)
        return value
    if keras.ops.is_tensor(value):
        if getattr(value, "is_nested", False):
            return ragged.from_nested(value, feature)
        return string_keys(value) if backend.name == "tensorflow" and is_strings(value) else value
    if (
        ids.is_words(value)
        or isinstance(value, keras.KerasTensor)
        or _is_integer_array(value)
        or hasattr(value, "tocsr")
    ):
        return value
    ids.check_no_mask(value)
    if backend.name != "tensorflow" and is_strings(value):
        return value
    return arrays_of(value, padding_key, feature)


def _is_integer_array(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype.kind in "iu"


def arrays_of(value: Any, padding_key: int | None, feature: str) -> Any:
    """Returns ids as an array of integers, where they are strings, objects, lists of these or pandas columns.

    Others are returned as they are: arrays, tensors, and what `ids.check_dtype` refuses.

    Raises:
        TypeError: If some values are strings and others are not.
        ValueError: If there are missing ids and no `padding_key`, or values that are no ids.
    """
    if hasattr(value, "isna") and hasattr(value, "to_numpy"):
        value = _from_pandas(value, padding_key, feature)
    if isinstance(value, list | tuple):
        array = _as_array(value)
        value = value if array is None else array
    if isinstance(value, str | bytes) or getattr(getattr(value, "dtype", None), "kind", None) in ("U", "S", "T"):
        return string_keys(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _from_objects(value, padding_key, feature)
    return value


def _is_done(value: Any) -> bool:
    """Whether ids are tensors, or what `preprocess` has returned."""
    is_tensor = keras.ops.is_tensor(value) and not getattr(value, "is_nested", False)
    return is_tensor or ids.is_words(value) or ids.is_ragged_dict(value)


def _as_array(value: list | tuple) -> np.ndarray | None:
    """An array of ids in lists; None if rows are not of one length. Objects and text beside numbers stay objects."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    is_exact = array.dtype.kind not in "OUS" and (array.dtype.kind != "f" or not array.size)
    return array if is_exact else np.asarray(value, object)


# ---- missing ids


def _from_pandas(value: Any, padding_key: int | None, feature: str) -> np.ndarray:
    """An array of a pandas column or frame. Nullable integers keep all 64 bits."""
    kinds = {dtype.kind for dtype in np.atleast_1d(np.asarray(value.dtypes, object))}
    missing = np.asarray(value.isna())
    if not kinds <= {"i", "u"}:
        if "f" in kinds and missing.any():
            raise ValueError(
                "Ids must be integers. pandas makes floats of integers with missing values, which are exact up to 2^53 alone: read the "
                f'column with `dtype="Int64"`. Received: a column of dtype float with missing values (feature {feature!r})'
            )
        return np.asarray(value, object) if "O" in kinds else np.asarray(value)
    array = value.to_numpy("uint64" if kinds == {"u"} else "int64", na_value=0)
    if missing.any():
        array = array.copy()
        array[missing] = _padding_for(missing, padding_key, feature).astype(array.dtype)
    return array


def _from_objects(array: np.ndarray, padding_key: int | None, feature: str) -> np.ndarray:
    """An array of integers or of strings' keys, from one of objects, some of which may be missing."""
    flat = array.ravel().tolist()
    missing = np.fromiter(map(_is_missing, flat), bool, len(flat))
    known = [value for value, is_missing in zip(flat, missing, strict=True) if not is_missing]
    if is_strings(known):
        keys = string_keys(np.array(known, object))
    else:
        other = next((value for value in known if not is_key(value)), None)
        if other is not None:
            raise ValueError(
                f"Ids must be 64-bit integers or strings. Received: {other!r:.100} of type {type(other).__name__} (feature {feature!r})"
            )
        keys = np.array([signed_key(key) for key in known], "int64")
    if missing.any():
        all_keys = np.full(len(flat), _padding_for(missing, padding_key, feature))
        all_keys[~missing] = keys
        keys = all_keys
    return keys.reshape(array.shape)


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NA."""
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and math.isnan(value))


def _padding_for(missing: np.ndarray, padding_key: int | None, feature: str) -> np.int64:
    if padding_key is None:
        raise ValueError(
            "Ids must not be missing where there is no `padding_key`: set one, or fill them first. Received: "
            f"{int(missing.sum())} of {missing.size} ids missing (feature {feature!r})"
        )
    return np.int64(signed_key(padding_key))


# ---- bags


def _bags_of(inputs: Any, weights: Any, padding_key: int | None, is_ragged: bool, feature: str) -> _Bags | None:
    """Returns the bags of a SciPy matrix, a nested tensor, or rows, which must be of unequal length unless `is_ragged`.

    None for anything else.
    """
    if hasattr(inputs, "tocsr"):
        return _bags_of_matrix(inputs, weights, feature)
    if getattr(inputs, "is_nested", False):
        inputs = [row.cpu().numpy() for row in inputs.unbind()]
    if hasattr(inputs, "isna"):
        inputs = np.asarray(inputs)
    if not _has_rows(inputs) or not (is_ragged or _are_unequal(inputs)):
        return None
    rows = [arrays_of([] if _is_missing(row) else row, padding_key, feature) for row in inputs]
    _check_axes(any(isinstance(row, list | tuple) or row.ndim != 1 for row in rows), inputs, feature)
    lengths = [len(row) for row in rows]
    filled = [row for row in rows if len(row)]
    values = np.concatenate(filled) if filled else np.empty(0, "int64")
    return _Bags(values, _splits_of(lengths), _flat_weights(weights, lengths, feature))


def _has_rows(value: Any) -> bool:
    """Whether a list or an object array holds rows. Some may be missing."""
    is_vector = isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1
    if not is_vector and not isinstance(value, list | tuple):
        return False
    return any(map(is_row, value)) and all(is_row(row) or _is_missing(row) for row in value)


def _are_unequal(rows: Any) -> bool:
    return isinstance(rows, np.ndarray) or len({len(row) if is_row(row) else None for row in rows}) > 1


def _bags_of_matrix(matrix: Any, weights: Any, feature: str) -> _Bags:
    """The bags of a SciPy matrix: columns are ids, values are weights."""
    if weights is not None:
        raise ValueError(
            f"`weights` must be None for a SciPy matrix, whose values are the weights. Received: {type(weights).__name__} (feature {feature!r})"
        )
    rows = matrix.tocsr()
    return _Bags(rows.indices.astype("int64"), rows.indptr.astype("int64"), rows.data.astype("float32"))


def _check_axes(fails: bool, rows: Any, feature: str) -> None:
    if fails:
        raise ValueError(
            f"Ids in rows of unequal length must have two axes. Received: {rows!r:.200} (feature {feature!r})"
        )


def _splits_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype="int64")])


def _flat_weights(weights: Any, lengths: list[int], feature: str) -> np.ndarray | None:
    if weights is None:
        return None
    if [len(row) for row in weights] != lengths:
        raise ValueError(f"`weights` must have as many numbers in each row as `inputs` has ids (feature {feature!r})")
    filled = [np.asarray(row, "float32") for row in weights if len(row)]
    return np.concatenate(filled) if filled else np.empty(0, "float32")


def _padded(bags: _Bags, padding_key: int | None) -> tuple[Any, np.ndarray | None]:
    """Ids `(bags, longest)` and weights of that shape. Padding is `padding_key` or, where there is none, id 0 of weight 0."""
    lengths = np.diff(bags.row_splits)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    padded = np.full(mask.shape, _fill_of(bags.values, padding_key))
    padded[mask] = bags.values
    if bags.weights is None and padding_key is not None:
        return _narrow(padded), None
    weights = mask.astype("float32")
    if bags.weights is not None:
        weights[mask] = bags.weights
    return _narrow(padded), weights


def _as_ragged(bags: _Bags, padding_key: int | None) -> tuple[Any, Any]:
    """Values with row splits, and weights `(n,)` or None."""
    values, row_splits, weights = bags
    if backend.name == "jax" and len(row_splits) > 1:
        values, row_splits, weights = _grown(bags, padding_key)
    return {"values": _narrow(values), "row_splits": row_splits.astype("int32")}, weights


def _grown(bags: _Bags, padding_key: int | None) -> _Bags:
    """Pads the last bag so that few shapes are compiled: the number of values becomes 4, 5, 6 or 7 times a power of two."""
    values, row_splits, weights = bags
    unit = 1 << max(len(values).bit_length() - 3, 0)
    missing = -(-max(len(values), 4) // unit) * unit - len(values)
    if weights is None and padding_key is None:
        weights = np.ones(len(values), "float32")
    values = np.concatenate([values, np.full(missing, _fill_of(values, padding_key))])
    row_splits = np.append(row_splits[:-1], len(values))
    return _Bags(values, row_splits, None if weights is None else np.append(weights, np.zeros(missing, "float32")))


def _fill_of(values: np.ndarray, padding_key: int | None) -> Any:
    """The padding, of the dtype of the ids if that holds it."""
    key = 0 if padding_key is None else signed_key(padding_key)
    if values.dtype == np.uint64:
        return np.int64(key).view("uint64")
    limits = np.iinfo(values.dtype)
    return values.dtype.type(key) if limits.min <= key <= limits.max else np.int64(key)


def _narrow(values: Any) -> Any:
    """Splits ids of 64 bits into two words where the backend's integers have 32."""
    array = np.asarray(values)
    is_wide = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    return ids.split_words(array) if is_wide and not backend.has_wide_integers() else values
