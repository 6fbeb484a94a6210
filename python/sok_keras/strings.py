"""Keys of strings."""

import sys
from typing import Any

import numpy as np

from sok_keras import _native as native


def string_keys(values: Any) -> Any:
    """Turns strings into 64-bit keys.

    A key is FarmHash's Fingerprint64 of the string's bytes, those of its UTF-8 form for text. It is the same on every machine and
    backend, and in a graph of TensorFlow. `tf.fingerprint`, BigQuery's `FARM_FINGERPRINT` and Guava's `farmHashFingerprint64` give the
    same 64 bits.

    Different strings may get the same key, and would then share a row. Among n strings, `n**2 / 2**65` pairs are to be expected:
    0.000003 among ten million, 0.03 among a billion.

    Example:

    >>> import sok_keras as sok
    >>> sok.string_keys(["68fd1e64", "80e26c9b"])
    array([ 7920289447977470598, -7067138553114685044])
    >>> sok.string_keys(b"68fd1e64")
    array(7920289447977470598)

    Args:
        values: `str` or `bytes`; arrays, lists, pandas columns of them, of any shape; rows of unequal length; a tensor of TensorFlow with
            dtype string, which may be ragged or sparse. As everywhere in NumPy, zero bytes at the end of an element of a fixed-width
            array do not count.

    Returns:
        int64 keys: an array of the same shape, a list of arrays for rows of unequal length, a tensor for a tensor.

    Raises:
        TypeError: If a value is neither `str` nor `bytes`, for example None.
    """
    if _is_tensor(values):
        return _keys_of_tensor(values)
    if is_unequal(values):
        return [string_keys(row) for row in values]
    # NumPy would decode bytes that are beside text, and drop zero bytes at their ends.
    array = np.asarray(values, object if isinstance(values, str | bytes | list | tuple) else None)
    if array.size == 0:
        return np.empty(array.shape, "int64")
    return _keys_of(array).reshape(array.shape)


def is_strings(value: Any) -> bool:
    """Whether ids are strings. Lists and object arrays are judged by their first value that is not an empty row, pandas' frames by their
    first column."""
    if isinstance(value, dict):
        return False
    if hasattr(value, "columns"):
        value = value[value.columns[0]] if len(value.columns) else []
    if isinstance(value, str | bytes):
        return True
    dtype = getattr(value, "dtype", "object")
    if str(dtype) != "object":
        # NumPy's kinds; the names of Keras ("string") and pandas ("string", "str"); TensorFlow's "<dtype: 'string'>".
        return (
            getattr(dtype, "kind", None) in ("S", "U", "T")
            or str(dtype) in ("string", "str")
            or "'string'" in str(dtype)
        )
    if isinstance(value, np.ndarray):
        value = value.ravel()
    if not hasattr(value, "__len__"):
        return False
    rows = (row for row in value if not is_row(row) or len(row))
    return is_strings(next(rows, None))


def is_unequal(value: Any) -> bool:
    """Whether `value` is a list or an object array of rows of unequal length."""
    if isinstance(value, np.ndarray):
        return value.dtype == object and value.ndim == 1 and len(value) > 0 and is_row(value[0])
    if not isinstance(value, list | tuple) or not value or not all(map(is_row, value)):
        return False
    return len({len(row) for row in value}) > 1


def is_row(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes)


def _keys_of(array: np.ndarray) -> np.ndarray:
    """Keys `(n,)` of an array of n strings."""
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype.kind == "S":
        flat = np.ascontiguousarray(array).ravel()
        starts = np.arange(flat.size) * flat.dtype.itemsize
        return native.string_keys(flat.tobytes(), starts, starts + np.char.str_len(flat))
    pieces = [_bytes_of(value) for value in array.ravel().tolist()]
    ends = np.cumsum([len(piece) for piece in pieces])
    return native.string_keys(b"".join(pieces), np.concatenate([[0], ends[:-1]]), ends)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(
        "`values` must be strings or bytes; replace missing ones first, by an empty string for example. Received: "
        f"{value!r:.100} of type {type(value).__name__}"
    )


def _is_tensor(value: Any) -> bool:
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, tf.Tensor | tf.Variable | tf.RaggedTensor | tf.SparseTensor)


def _keys_of_tensor(value: Any) -> Any:
    import tensorflow as tf

    if value.dtype != tf.string:
        raise TypeError(f"`values` must be strings. Received: a tensor of dtype {value.dtype.name}")
    if isinstance(value, tf.RaggedTensor):
        return value.with_flat_values(_keys_of_tensor(value.flat_values))
    if isinstance(value, tf.SparseTensor):
        return value.with_values(_keys_of_tensor(value.values))
    fingerprints = tf.fingerprint(tf.reshape(value, [-1]))
    keys = tf.reshape(tf.bitcast(fingerprints, "int64"), tf.shape(value))
    keys.set_shape(value.shape)
    return keys
