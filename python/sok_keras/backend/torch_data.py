"""The part of a rank of a `torch.utils.data.DataLoader`."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sok_keras.shares import Share, with_weights


def shard_of_loader(loader: DataLoader, share: Share, agree: Callable) -> DataLoader:
    """Returns a loader of the batches of a rank. It reads their samples alone.

    Args:
        loader: A loader that draws indices.
        share: The part of the rank.
        agree: Returns the number that rank 0 gives.
    """
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "A `DataLoader` must have a dataset with a length, and batches, to be divided among ranks. Let an `IterableDataset` give each "
            "rank samples of its own"
        )
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    }
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return DataLoader(
        _WeightedSamples(loader.dataset),
        batch_sampler=_ShardedSampler(loader.batch_sampler, share, agree(torch.initial_seed() % 2**62)),
        collate_fn=_Collate(loader.collate_fn),
        **options,
    )


class _ShardedSampler:
    """Draws the indices of a rank's samples, each with its weight."""

    def __init__(self, batches: Any, share: Share, seed: int) -> None:
        self._batches, self._share, self._seed = batches, share, seed

    def __len__(self) -> int:
        return math.ceil(len(self._batches) / self._share.world_size)

    def __iter__(self) -> Iterator[list[tuple[Any, float]]]:
        # Without a generator of its own a sampler draws from the global one, which differs between ranks.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            batches = [list(batch) for batch in self._batches]
        self._seed += 1
        rank, world_size = self._share
        for first in range(0, len(batches), world_size):
            group = batches[first : first + world_size]
            if len(group) == world_size and len({len(batch) for batch in group}) == 1:
                yield [(index, 1.0) for index in group[rank]]
                continue
            merged = [index for batch in group for index in batch]
            own, weights = self._share.of(len(merged))
            yield [(merged[at], float(weight)) for at, weight in zip(own, weights, strict=True)]


class _WeightedSamples(Dataset):
    """Samples of a dataset, each with the weight that comes with its index."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: tuple[Any, float]) -> tuple[Any, float]:
        return self._dataset[index[0]], index[1]

    def __getitems__(self, indices: list[tuple[Any, float]]) -> list[tuple[Any, float]]:
        if not hasattr(self._dataset, "__getitems__"):
            return [self[index] for index in indices]
        samples = self._dataset.__getitems__([index for index, _ in indices])
        return [(sample, weight) for sample, (_, weight) in zip(samples, indices, strict=True)]


class _Collate:
    def __init__(self, collate: Callable) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[Any, float]]) -> tuple:
        batch = self._collate([sample for sample, _ in samples])
        return with_weights(batch, torch.tensor([weight for _, weight in samples]))
