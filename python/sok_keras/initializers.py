"""Initializers of rows that Keras does not have. In a table, a row's first value is a function of seed, key and column."""

import math
from typing import Any

import keras

# Values of float32 are exact for all of them, and DynamicEmb has as many.
_DEBUG_KEYS = 100_000


@keras.saving.register_keras_serializable(package="sok_keras")
class TruncatedNormal(keras.initializers.TruncatedNormal):
    """The normal distribution between two bounds, as DynamicEmb's `TRUNCATED_NORMAL`.

    Keras' own `TruncatedNormal` is cut at two standard deviations from the mean.

    Args:
        mean: float. Mean of the distribution that is cut.
        stddev: float, above 0. Its standard deviation.
        lower: float. Lower bound. None: two standard deviations below the mean.
        upper: float, above `lower`. Upper bound. None: two standard deviations above the mean.
        seed: int, or `keras.random.SeedGenerator`.

    Raises:
        ValueError: If `stddev` is not above 0, or no values of the distribution are between the bounds.
    """

    def __init__(
        self,
        mean: float = 0.0,
        stddev: float = 0.05,
        lower: float | None = None,
        upper: float | None = None,
        seed: Any = None,
    ) -> None:
        super().__init__(mean=mean, stddev=stddev, seed=seed)
        if not stddev > 0:
            raise ValueError(f"`stddev` must be above 0. Received: stddev={stddev}")
        self.lower = mean - 2.0 * stddev if lower is None else float(lower)
        self.upper = mean + 2.0 * stddev if upper is None else float(upper)
        low, high = self.shares_below()
        if not low < high:
            raise ValueError(
                "`lower` and `upper` must have values of the distribution between them. "
                f"Received: mean={mean}, stddev={stddev}, lower={lower}, upper={upper}"
            )

    def shares_below(self) -> tuple[float, float]:
        """Returns which parts of the distribution that is cut are below the bounds."""
        low, high = (
            0.5 * math.erfc((self.mean - bound) / (self.stddev * math.sqrt(2))) for bound in (self.lower, self.upper)
        )
        return low, high

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        low, high = self.shares_below()
        shares = keras.random.uniform(shape, low, high, seed=self.seed)
        values = self.mean + self.stddev * math.sqrt(2) * keras.ops.erfinv(2 * shares - 1)
        return keras.ops.cast(keras.ops.clip(values, self.lower, self.upper), dtype or keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "lower": self.lower, "upper": self.upper}


@keras.saving.register_keras_serializable(package="sok_keras")
class Debug(keras.initializers.Initializer):
    """The key modulo 100,000 in every column, as DynamicEmb's `DEBUG`: a row shows whose it is."""

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        rows = keras.ops.arange(shape[0]) % _DEBUG_KEYS
        column = keras.ops.reshape(rows, (-1,) + (1,) * (len(shape) - 1))
        return keras.ops.cast(keras.ops.broadcast_to(column, shape), dtype or keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        return {}
