"""Data of ranks: each rank is given equally many batches, and all ranks' batches of a step are equally large."""

import math
import sys
from typing import Any

import keras
import numpy as np

from sok_keras import backend, distributed
from sok_keras.shares import Share, check_batch, num_samples_of, take, with_weights


def shard(data: Any, *, batch_size: int | None = None, shuffle: bool = False, seed: int = 0) -> Any:
    """Returns this rank's part of data, for `fit` and `evaluate`.

    All ranks must call it with the same data. In every step of an epoch each rank is given a batch, and all of them are equally large.
    Samples that are left at the end of an epoch are divided among the ranks. Where they cannot be divided equally, a sample is repeated
    with sample weight 0. It adds nothing to the loss, but a mean over the batch counts it. Metrics leave it out if they are given to
    `compile` as `weighted_metrics`.

    | data | batches of this rank |
    |---|---|
    | arrays `(x, y)` or `(x, y, sample_weight)`, also nested | `batch_size` samples of every `world_size * batch_size` |
    | `keras.utils.PyDataset`, `tf.data.Dataset` | one batch of every `world_size` batches |
    | `torch.utils.data.DataLoader` of a dataset with a length | one batch of every `world_size` batches; reads its own samples alone |

    Batches must be `(x, y)` or `(x, y, sample_weight)`. Data that is shuffled must come in the same order on all ranks: give a seed to
    `tf.data.Dataset.shuffle`, and to the generator of a sampler. A `DataLoader` without a generator is shuffled alike.

    Example:

    >>> data = sok.shard((x, y), batch_size=2)
    >>> inputs, targets, sample_weight = data[0]
    >>> inputs.shape, len(data)
    ((2, 3), 2)

    Args:
        data: The data of all ranks.
        batch_size: For arrays: number of samples of a batch of one rank. None: 32.
        shuffle: For arrays: whether every epoch has an order of its own.
        seed: For arrays: which orders they are.

    Returns:
        Data of the same kind. Arrays become a `keras.utils.PyDataset`. Its batches are `(x, y, sample_weight)`.

    Raises:
        ValueError: If the data has no targets or no samples, or is of another kind.
    """
    share = Share(distributed.rank(), distributed.world_size())
    is_array = isinstance(data, tuple | list)
    if not is_array and (batch_size is not None or shuffle):
        raise ValueError(
            "`batch_size` and `shuffle` are for arrays. Other data has its own. "
            f"Received: {type(data).__name__}, batch_size={batch_size}, shuffle={shuffle}"
        )
    if is_array:
        return _ShardedArrays(data, 32 if batch_size is None else batch_size, seed if shuffle else None, share)
    if isinstance(data, keras.utils.PyDataset):
        return _ShardedBatches(data, share)
    if "tensorflow" in sys.modules and isinstance(data, sys.modules["tensorflow"].data.Dataset):
        from sok_keras.backend.tensorflow_data import shard_of_dataset

        check_batch(data.element_spec, "A batch")
        return shard_of_dataset(data, share)
    if "torch" in sys.modules and isinstance(data, sys.modules["torch"].utils.data.DataLoader):
        from sok_keras.backend.torch_data import shard_of_loader

        return shard_of_loader(data, share, distributed.of_rank_0)
    raise ValueError(
        "`data` must be `(x, y)` or `(x, y, sample_weight)` of arrays, a `keras.utils.PyDataset`, a `tf.data.Dataset` or a "
        f"`torch.utils.data.DataLoader`. Received: {type(data).__name__}"
    )


class _ShardedArrays(keras.utils.PyDataset):
    def __init__(self, data: Any, batch_size: int, seed: int | None, share: Share) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1. Received: batch_size={batch_size}")
        check_batch(data, "`data`")
        self._arrays = keras.tree.map_structure(_to_numpy, tuple(data))
        self._num_samples = num_samples_of(self._arrays)
        self._batch_size, self._seed, self._share, self._epoch = batch_size, seed, share, 0
        self._order = self._order_of_epoch()

    def __len__(self) -> int:
        return math.ceil(self._num_samples / (self._batch_size * self._share.world_size))

    def __getitem__(self, index: int) -> tuple:
        step = self._batch_size * self._share.world_size
        start = index * step
        own, weights = self._share.of(min(step, self._num_samples - start))
        own += start
        is_slice = self._order is None and weights.all()
        indices = slice(own[0], own[-1] + 1) if is_slice else own if self._order is None else self._order[own]
        return with_weights(take(self._arrays, indices), weights)

    def on_epoch_end(self) -> None:
        self._epoch += 1
        self._order = self._order_of_epoch()

    def _order_of_epoch(self) -> np.ndarray | None:
        if self._seed is None:
            return None
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._num_samples)


class _ShardedBatches(keras.utils.PyDataset):
    def __init__(self, batches: keras.utils.PyDataset, share: Share) -> None:
        super().__init__(batches.workers, batches.use_multiprocessing, batches.max_queue_size)
        self._batches, self._share = batches, share

    @property
    def num_batches(self) -> int | None:
        num_batches = self._batches.num_batches
        return None if num_batches is None else math.ceil(num_batches / self._share.world_size)

    def __len__(self) -> int:
        return math.ceil(len(self._batches) / self._share.world_size)

    def __getitem__(self, index: int) -> tuple:
        first, num_batches = index * self._share.world_size, self._batches.num_batches
        if num_batches is None or first + self._share.world_size < num_batches:
            batch = self._batches[first + self._share.rank]
            return with_weights(batch, np.ones(num_samples_of(batch), "float32"))
        left = [self._batches[number] for number in range(first, num_batches)]
        merged = keras.tree.map_structure(lambda *parts: np.concatenate([_to_numpy(part) for part in parts]), *left)
        own, weights = self._share.of(num_samples_of(merged))
        return with_weights(take(merged, own), weights)

    def on_epoch_begin(self) -> None:
        self._batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._batches.on_epoch_end()


def _to_numpy(array: Any) -> Any:
    return backend.to_numpy(array) if keras.ops.is_tensor(array) else np.asarray(array)
