"""A table whose rows many ranks have, with the methods of a native table. All ranks must call a method, each with keys of its own."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np

from sok_keras import distributed
from sok_keras.backend import native


class ShardedTable:
    """The whole of a table.

    Args:
        shard: The native table with the rows of this rank.
    """

    def __init__(self, shard: Any) -> None:
        self._shard = shard
        self.is_replicated: bool = shard.owners(np.empty(0, "int64"))[1]

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, found = self._ask(keys, [], self._shard.find, writes=False)
        return rows, found

    def find_or_insert(self, keys: np.ndarray) -> tuple[np.ndarray, tuple]:
        rows, outcomes = self._ask(keys, [], self._shard.find_or_insert, writes=True, sums=1)
        return rows, tuple(outcomes.tolist())

    def assign(self, keys: np.ndarray, rows: np.ndarray, insert: bool) -> tuple:
        return self._assign(self._shard.assign, keys, rows, insert)

    def assign_records(self, keys: np.ndarray, values: np.ndarray, insert: bool) -> tuple:
        return self._assign(self._shard.assign_records, keys, values, insert)

    def _assign(self, assign: Callable, keys: np.ndarray, values: np.ndarray, insert: bool) -> tuple:
        (outcomes,) = self._ask(keys, [values], lambda *own: (assign(*own, insert),), writes=True, sums=1)
        return tuple(outcomes.tolist())

    def erase(self, keys: np.ndarray) -> int:
        (erased,) = self._ask(keys, [], lambda keys: ([self._shard.erase(keys)],), writes=True, sums=1)
        return int(erased[0])

    def clear(self) -> None:
        self._shard.clear()
        distributed.barrier()

    def keys(self) -> np.ndarray:
        own = self._shard.keys()
        return own if self.is_replicated else np.sort(np.concatenate([part[0] for part in _gather([own])]))

    def export(self, states: bool) -> tuple:
        keys, rows, named, columns = self._shard.export(states)
        if self.is_replicated:
            return keys, rows, named, columns
        parts = _gather([keys, rows, *(array for _, array in named + columns)])
        keys, *arrays = (np.concatenate(of_ranks) for of_ranks in zip(*parts, strict=True))
        order = np.argsort(keys)
        rows, *arrays = (array[order] for array in arrays)
        names = [[name for name, _ in of_kind] for of_kind in (named, columns)]
        return keys[order], rows, *_with_names(arrays, *names)

    def changed(self, snapshot: int | None, new: int) -> tuple:
        """Those of rank 0 first."""
        keys, rows, *_ = self._shard.changed(snapshot, new)
        return tuple(np.concatenate(column) for column in zip(*_gather([keys, rows]), strict=True))

    def commit_times(self) -> list:
        return self._shard.commit_times()

    def explain(self, key: int) -> tuple:
        def explain(keys: np.ndarray) -> tuple:
            known = [self._shard.explain(key) for key in keys.tolist()]
            numbers = [(number is not None, number or 0) for _, number in known]
            return np.array([state for state, _ in known], "U8"), np.array(numbers, "uint64").reshape(-1, 2)

        (state,), ((is_number, number),) = self._ask(np.array([key], "int64"), [], explain, writes=False)
        return str(state), int(number) if is_number else None

    def take_evicted(self) -> tuple:
        """Those of rank 0 first."""
        parts = _gather(list(self._shard.take_evicted()))
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def scan(self, cursor: Any, num_rows: int, states: bool) -> tuple:
        """Up to `num_rows` rows, those of rank 0 first, and the next cursor."""
        if self.is_replicated:
            return self._shard.scan(cursor, num_rows, states)
        rank, within = cursor or (0, 0)
        (keys, rows, named, columns), then = (
            self._shard.scan(within, num_rows, states) if rank == distributed.rank() else _NOTHING
        )
        arrays = [keys, rows, *(array for _, array in named + columns)]
        names = [np.array([name for name, _ in of_kind], "U") for of_kind in (named, columns)]
        then = np.array(-1 if then is None else then, "int64")
        (then, named, columns, keys, rows, *arrays) = _unpack(native.broadcast(_pack([then, *names, *arrays]), rank))
        follows = (rank, int(then)) if then >= 0 else (rank + 1, 0)
        contents = (keys, rows, *_with_names(arrays, named.tolist(), columns.tolist()))
        return contents, follows if follows[0] < distributed.world_size() else None

    def stats(self, waits: bool) -> tuple:
        size, capacity, outcomes, dropped, pending, calls, num_bytes, unknown = self._shard.stats(waits)
        numbers = np.array([size, capacity, *outcomes, dropped, num_bytes, unknown], "int64")
        if not self.is_replicated:
            numbers = distributed.all_reduce(numbers)
        size, capacity, *outcomes, dropped, num_bytes, unknown = numbers.tolist()
        return size, capacity, tuple(outcomes), dropped, pending, calls, num_bytes, unknown

    def __len__(self) -> int:
        return len(self._shard) if self.is_replicated else int(distributed.all_reduce(len(self._shard)))

    def _ask(self, keys: np.ndarray, columns: list, answer: Callable, writes: bool, sums: int = 0) -> list[np.ndarray]:
        """Asks the owners of keys.

        Args:
            keys: `(n,)` int64.
            columns: Arrays `(n, ...)` that go with the keys.
            answer: What an owner does with some keys and columns: gives arrays.
            writes: Whether it changes rows. Those of a replicated table are changed on all ranks.
            sums: How many of the arrays, from the last one, are sums over the owners. The others are by key.
        """
        ranks, own = range(distributed.world_size()), distributed.rank()
        owners = self._shard.owners(keys)[0]
        places = [np.flatnonzero(owners == rank) for rank in ranks]
        sent = [places[own] if self.is_replicated and writes else places[rank] for rank in ranks]
        asked = native.exchange([_pack([array[rows] for array in (keys, *columns)]) for rows in sent], None)
        try:
            answers = [_pack(answer(*_unpack(part))) for part in asked]
        except Exception as error:
            with contextlib.suppress(native.SokError):  # the error of this rank, which the others hear of
                native.exchange([], str(error))
            raise
        replies = [_unpack(part) for part in native.exchange(answers, None)]
        if self.is_replicated:
            return replies[own]
        by_key = len(replies[own]) - sums
        order = np.argsort(np.concatenate(places), kind="stable")
        columns = list(zip(*replies, strict=True))
        return [np.concatenate(column)[order] for column in columns[:by_key]] + [
            np.sum(column, axis=0) for column in columns[by_key:]
        ]


_NOTHING: tuple = (np.empty(0, "int64"), np.empty((0, 0), "float32"), [], []), None


def _with_names(arrays: list[np.ndarray], states: list[str], columns: list[str]) -> tuple[list, list]:
    """Arrays of states by name, and then of columns."""
    named = list(zip(states + columns, arrays, strict=True))
    return named[: len(states)], named[len(states) :]


def _pack(arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, *map(np.asarray, arrays))
    return file.getvalue()


def _unpack(data: bytes) -> list[np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[name] for name in arrays.files]


def _gather(arrays: list) -> list[list[np.ndarray]]:
    """The arrays of each rank."""
    return [_unpack(part) for part in native.gather(_pack(arrays))]
