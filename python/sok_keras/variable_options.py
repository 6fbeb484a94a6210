"""The options of variables, as SparseOperationKit names them."""

import operator
import warnings
from typing import Any

import keras
import numpy as np

from sok_keras import backend, distributed
from sok_keras.policies import Probability
from sok_keras.table_config import TableConfig

_COMBINERS = {"sum": "sum", "mean": "mean", "average": "mean", "sqrtn": "sqrtn"}
# Options of HierarchicalKV that have no effect here: the memory of a table and its index is the core's.
_WITHOUT_EFFECT = ("max_hbm_for_vectors", "max_load_factor", "max_bucket_size", "block_size", "device_id", "io_by_cpu")


def rows_or_shape(initial_value: Any, shape: Any, dtype: Any) -> tuple[Any, tuple[int, int]]:
    """Returns the rows of a variable of a fixed size, or None if only `shape` is given; and its shape.

    Raises:
        ValueError: If `dtype` is not float32, both or neither are given, or the shape has not two axes.
    """
    if keras.backend.standardize_dtype(dtype or "float32") != "float32":
        raise ValueError(f"`dtype` must be float32. Received: dtype={dtype!r}")
    if (initial_value is None) == (shape is None):
        raise ValueError(
            f"Either `initial_value` or `shape` must be given. Received: initial_value={initial_value!r:.200}, shape={shape!r}"
        )
    rows = None
    if shape is None:
        rows = keras.ops.convert_to_numpy(initial_value() if callable(initial_value) else initial_value)
        shape = rows.shape
    lengths = tuple(int(length) for length in shape)
    if len(lengths) != 2 or min(lengths) < 1:
        raise ValueError(f"A variable must have two axes, of its rows and of their floats. Received: shape={lengths}")
    return rows, lengths


def combiner_of(name: Any) -> str:
    known = _COMBINERS.get(name.lower() if isinstance(name, str) else "") if name is not None else "mean"
    if known is None:
        raise ValueError(f"`combiners` must be of {sorted(_COMBINERS)}. Received: {name!r}")
    return known


def narrowed(ids: Any) -> Any:
    """Returns ids as int32 where the framework has no wider integers.

    Raises:
        ValueError: If one of them does not fit.
    """
    if backend.has_wide_integers() or not isinstance(ids, np.ndarray | list | tuple):
        return ids
    array = np.asarray(ids)
    if array.dtype not in (np.int64, np.uint64):
        return ids
    narrow = array.astype("int32")
    if (narrow != array).any():
        raise ValueError(
            f"Without `JAX_ENABLE_X64=1`, JAX has ids of 32 bits. Received: {array[narrow != array].flat[0]}"
        )
    return narrow


def owner_of(mode: str | None) -> int:
    """Returns the rank that has all rows of a variable; -1 if all have some.

    Raises:
        ValueError: If `mode` is another one, or there is no such rank.
    """
    if mode in (None, "distributed"):
        return -1
    rank = mode.removeprefix("localized:") if isinstance(mode, str) else mode
    if rank == mode or not (rank.isascii() and rank.isdecimal()):
        raise ValueError(
            f'`mode` must be "distributed" or "localized:r", with the number of a rank. Received: mode={mode!r}'
        )
    if int(rank) >= distributed.world_size():
        raise ValueError(
            f"`mode` must name one of the {distributed.world_size()} ranks, from 0. Received: mode={mode!r}"
        )
    return int(rank)


def _capacity_of(argument: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"`{argument}` must be an integer of at least {least}. Received: {argument}={value!r}")
    return operator.index(value)


def dtype_of(argument: str, value: Any, allowed: tuple[str, ...]) -> str:
    try:
        name = keras.backend.standardize_dtype(value)
    except ValueError:
        name = repr(value)
    if name not in allowed:
        raise ValueError(f"`{argument}` must be one of {', '.join(allowed)}. Received: {argument}={value!r}")
    return name


def initializer_of(initializer: Any) -> Any:
    if not isinstance(initializer, str) and initializer is not None:
        return keras.initializers.get(initializer)
    known = {
        "": keras.initializers.RandomUniform(),
        "random": keras.initializers.RandomUniform(),
        "normal": keras.initializers.RandomNormal(stddev=1.0),
        "uniform": keras.initializers.RandomUniform(0.0, 1.0),
        "ones": keras.initializers.Constant(1.0),
        "zeros": keras.initializers.Constant(0.0),
    }
    found = known.get(initializer or "")
    if found is not None:
        return found
    try:
        return keras.initializers.Constant(float(initializer))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(
            f"`initializer` must be one of {sorted(known)[1:]}, a number as a string, or a Keras initializer. Received: "
            f"initializer={initializer!r}"
        ) from error


def table_config(
    name: str, dimension: int, initializer: Any, var_type: str, mode: str | None, options: dict[str, Any]
) -> TableConfig:
    if var_type not in ("hbm", "hybrid"):
        raise ValueError(f'`var_type` must be "hbm" or "hybrid". Received: var_type={var_type!r}')
    ratio = options.get("filter_ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float | np.floating) or not 0 < ratio <= 1:
        raise ValueError(f"`filter_ratio` must be a number above 0, up to 1. Received: filter_ratio={ratio!r}")
    unknown = sorted(
        set(options) - {"filter_ratio", "init_capacity", "max_capacity", "evict_strategy", *_WITHOUT_EFFECT}
    )
    if unknown:
        raise ValueError(f"Options of a variable must be those of HierarchicalKV. Received: {unknown}")
    ignored = sorted(set(options) & set(_WITHOUT_EFFECT))
    if ignored:
        warnings.warn(f"{ignored} have no effect: the memory of rows and index grows with the rows", stacklevel=3)
    owner_of(mode)
    first, most = _capacity_of("init_capacity", options.get("init_capacity", 0), 0), options.get("max_capacity")
    if most is not None:
        most = _capacity_of("max_capacity", most, 1)
    if most is not None and first > most:
        raise ValueError(
            f"`init_capacity` must be at most `max_capacity`. Received: init_capacity={first}, max_capacity={most}"
        )
    strategy = options.get("evict_strategy", "kLru")
    if strategy not in ("kLru", "kLfu"):
        raise ValueError(f'`evict_strategy` must be "kLru" or "kLfu". Received: evict_strategy={strategy!r}')
    evicts = var_type == "hybrid" and most is not None
    return TableConfig(
        name,
        None,
        dimension,
        initializer_of(initializer),
        combiner="sum",
        initial_capacity=first,
        max_capacity=most,
        eviction=("lru" if strategy == "kLru" else "lfu") if evicts else None,
        admission=Probability(float(ratio)) if ratio < 1 else None,
        missing="zeros" if ratio < 1 else "initial",
        storage="host" if var_type == "hybrid" else "auto",
        placement="distributed" if mode is None else mode,
    )
