"""Which samples each rank is given, and which of them only fill its batch."""

from typing import Any, NamedTuple

import keras
import numpy as np


class Share(NamedTuple):
    """The part of one rank."""

    rank: int
    world_size: int

    def of(self, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Divides samples into equal parts, of consecutive ones.

        Returns:
            The indices of the rank's samples, int64 `(n,)`, with the same n on all ranks; and their weights, float32 `(n,)`: 0 where the
            last sample is repeated to fill the part, otherwise 1.
        """
        size = -(-num_samples // self.world_size)
        indices = self.rank * size + np.arange(size)
        return np.minimum(indices, num_samples - 1), (indices < num_samples).astype("float32")


def check_batch(batch: Any, what: str) -> None:
    """Checks that a batch has targets.

    Raises:
        ValueError: If it has none. `what` names the data.
    """
    if isinstance(batch, tuple | list) and len(batch) in (2, 3):
        return
    raise ValueError(
        f"{what} must be `(x, y)` or `(x, y, sample_weight)`, since a sample that fills a batch has sample weight 0. "
        f"Received: {type(batch).__name__}" + (f" of length {len(batch)}" if isinstance(batch, tuple | list) else "")
    )


def with_weights(batch: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Returns inputs, targets and sample weights of a batch. Its own weights, if it has any, are multiplied by these."""
    check_batch(batch, "A batch")
    x, y, *own = batch
    if own:
        weights = own[0] * weights.reshape(-1, *[1] * (len(own[0].shape) - 1))
    return x, y, weights


def take(arrays: Any, indices: Any) -> Any:
    """Returns samples of a nest of arrays."""
    return keras.tree.map_structure(lambda array: array[indices], arrays)


def num_samples_of(arrays: Any) -> int:
    """Number of samples of a nest of arrays.

    Raises:
        ValueError: If the arrays have different numbers of samples, or there are none.
    """
    lengths = {len(array) for array in keras.tree.flatten(arrays)}
    if len(lengths) != 1:
        raise ValueError(f"All arrays must have the same number of samples. Received: {sorted(lengths)}")
    if lengths == {0}:
        raise ValueError("The data has no samples to share")
    return lengths.pop()
