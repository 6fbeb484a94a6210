"""Converts Keras initializers for the core, where a row's first value is a function of seed, key and column."""

import math
import zlib

import keras

from sok_keras import initializers

# Standard deviation of a normal distribution that is truncated at two standard deviations. Keras divides by it.
_TRUNCATED_STDDEV = 0.87962566103423978

_NAMES = (
    "RandomUniform, RandomNormal, TruncatedNormal, Constant, Zeros, Ones, VarianceScaling, the classes made of it, "
    "and sok_keras.initializers"
)


def core_initializer(initializer, dim, vocabulary_size):
    """Returns the core's description of a Keras initializer.

    Args:
        initializer: `keras.Initializer`.
        dim: Columns of a row.
        vocabulary_size: Rows of a static table; None for a dynamic one.

    Raises:
        ValueError: If the core has no formula for the initializer, or if it needs the number of rows of a dynamic
            table.
    """
    kinds = keras.initializers
    if isinstance(initializer, initializers.Debug):
        return {"kind": "debug"}
    if isinstance(initializer, kinds.VarianceScaling):
        return _variance_scaling(initializer, dim, vocabulary_size)
    if isinstance(initializer, kinds.RandomUniform):
        return {"kind": "uniform", "minval": float(initializer.minval), "maxval": float(initializer.maxval)}
    if isinstance(initializer, kinds.RandomNormal | kinds.TruncatedNormal):
        kind = "normal" if isinstance(initializer, kinds.RandomNormal) else "truncated_normal"
        below = {"below": initializer.shares_below()} if isinstance(initializer, initializers.TruncatedNormal) else {}
        return {"kind": kind, "mean": float(initializer.mean), "stddev": float(initializer.stddev), **below}
    for known, value in ((kinds.Zeros, 0.0), (kinds.Ones, 1.0)):
        if isinstance(initializer, known):
            return {"kind": "constant", "value": value}
    if isinstance(initializer, kinds.Constant) and isinstance(initializer.value, int | float):
        return {"kind": "constant", "value": float(initializer.value)}
    raise ValueError(
        f"The core has a formula for {_NAMES}; a row's first value must be a function of its key. Received: initializer={initializer}"
    )


def _variance_scaling(initializer, dim, vocabulary_size):
    if initializer.mode != "fan_out" and vocabulary_size is None:
        raise ValueError(
            f"A dynamic table has no number of rows, so `mode={initializer.mode!r}` has no meaning for it; use "
            f"`VarianceScaling(mode='fan_out')`. Received: initializer={initializer}"
        )
    fans = {"fan_out": dim, "fan_in": vocabulary_size, "fan_avg": ((vocabulary_size or 0) + dim) / 2}
    scale = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * scale)
        return {"kind": "uniform", "minval": -limit, "maxval": limit}
    if initializer.distribution == "truncated_normal":
        return {"kind": "truncated_normal", "mean": 0.0, "stddev": math.sqrt(scale) / _TRUNCATED_STDDEV}
    return {"kind": "normal", "mean": 0.0, "stddev": math.sqrt(scale)}


def core_seed(seed, initializer, name=""):
    """Returns a table's seed: `seed` if given, else the initializer's, which Keras may have drawn.

    Args:
        seed: int or None.
        initializer: `keras.Initializer`.
        name: Mixed into the seed, so that the tables of a layer start with different rows.
    """
    if seed is None:
        seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        seed = int(keras.ops.convert_to_numpy(seed.state.value)[0])
    if seed is not None and not hasattr(seed, "__index__"):
        raise ValueError(f"`seed` must be an integer or None. Received: seed={seed!r}")
    return mixed_seed(0 if seed is None else int(seed), name)


def mixed_seed(seed, name):
    """Mixes a table's name into a seed, if there is one. Mixing it in twice gives the seed again."""
    return (seed ^ zlib.crc32(name.encode()) << 32) % 2**64 if name else seed % 2**64
