"""A table in the hands of a user: read it, write it, ask how it is."""

from typing import Any, NamedTuple

import numpy as np

from sok_keras.backend.native_errors import TableFullError


class Outcomes(NamedTuple):
    """How the distinct keys of a call ended."""

    hit: int
    inserted: int
    filtered: int
    evicted: int
    refused: int


class TableContents(NamedTuple):
    """A copy of a table: keys `(n,)` int64 ascending, rows `(n, dim)` float32, states `(n, width)` by name. Scores are None: they
    come with eviction."""

    keys: np.ndarray
    rows: np.ndarray
    states: dict[str, np.ndarray]
    scores: np.ndarray | None


class TableStats(NamedTuple):
    """Counts since the table was made; `size`, `capacity` (rows before the index grows) and `bytes` as of now.

    `hits` to `refused` count distinct keys of batches; `hits` those of lookups that train alone. `dropped_gradients` counts ids,
    equal ones too, whose gradient was for a key without a row. `pending_pushes` are backward passes of the layer that no optimizer
    has applied. `native_calls` are those of lookup, push, commit and apply that touched the table.
    """

    size: int
    capacity: int
    hits: int
    inserted: int
    filtered: int
    evicted: int
    refused: int
    dropped_gradients: int
    pending_pushes: int
    native_calls: int
    bytes: int


def as_keys(keys: Any) -> np.ndarray:
    """Ids as the core stores them: `(n,)` int64; uint64 keeps its bits.

    Raises:
        TypeError: If they are not integers.
    """
    if isinstance(keys, np.ma.MaskedArray):
        raise TypeError("Keys must be a plain array: what a mask hides has no key. Received: a masked array")
    keys = np.asarray(keys)
    if keys.size == 0:
        return np.empty(0, "int64")
    if keys.dtype.kind not in "iu":
        raise TypeError(f"Keys must be integers. Received: keys of dtype {keys.dtype}")
    keys = np.ravel(keys)
    return np.ascontiguousarray(keys.view("int64") if keys.dtype == np.uint64 else keys.astype("int64"))


class Table:
    """One embedding table. Every method waits for the steps before it and raises what they left behind.

    Layers make tables; get one by `DynamicEmbedding.get_table()` or `DistributedEmbedding.get_tables()`.
    """

    def __init__(self, core: Any, number: int, config: dict) -> None:
        self._core = core
        self._number = number
        self._native = core.native_table(number)
        self.name: str = config["name"]
        self.dim: int = config["dim"]
        self.dtype = "float32"
        self.vocabulary_size: int | None = config["vocabulary_size"]
        self._max_capacity: int | None = config["max_capacity"]
        self._raises_when_full = config["check_mode"] == "raise"

    def __len__(self) -> int:
        return len(self._ready())

    def __repr__(self) -> str:
        return f"<Table {self.name!r} dim={self.dim} vocabulary_size={self.vocabulary_size}>"

    def _ready(self) -> Any:
        self._core.synchronize()
        return self._native

    def find(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Rows `(n, dim)` float32 and whether each key has one, `(n,)` bool. Never inserts; the row of a key without one is
        what `missing` says."""
        keys = as_keys(keys)
        rows, found = self._ready().find(keys)
        return rows, found

    def find_or_insert(self, keys: Any) -> tuple[np.ndarray, Outcomes]:
        """Rows `(n, dim)` float32 and the `Outcomes`; keys without a row get one.

        Raises:
            TableFullError: If they do not fit and `check_mode` is `"raise"`; then nothing has changed.
        """
        keys = as_keys(keys)
        rows, outcomes = self._ready().find_or_insert(keys)
        self._core.warn_of_refused()
        return rows, Outcomes(*outcomes)

    def assign(self, keys: Any, rows: Any, *, insert: bool = True) -> Outcomes:
        """Overwrites rows, `(n, dim)`; optimizer states stay. Of duplicates the last wins. Without `insert`, keys without a row
        are counted as refused."""
        keys = as_keys(keys)
        rows = np.ascontiguousarray(rows, "float32")
        if rows.size and rows.shape[-1] != self.dim:
            raise ValueError(f"`rows` must be {self.dim} wide. Received: rows of shape {rows.shape}")
        rows = rows.reshape(-1, self.dim)
        if len(rows) != len(keys):
            raise ValueError(f"`rows` must hold one row a key. Received: {len(rows)} rows for {len(keys)} keys")
        outcomes = Outcomes(*self._ready().assign(keys, rows, insert))
        self._core.warn_of_refused()
        return outcomes

    def erase(self, keys: Any) -> int:
        """Removes rows; returns how many were there. Gradients on their way to them are dropped."""
        return self._ready().erase(as_keys(keys))

    def _check_replacement(self, keys: np.ndarray) -> None:
        """Raises what `clear`, then `assign` would raise for these keys, `(n,)` int64, and changes nothing.

        Raises:
            TableFullError: If they do not fit and `check_mode` is `"raise"`.
        """
        capacity = self._max_capacity
        if capacity is None or not self._raises_when_full:
            return
        num_rows = len(np.unique(keys))
        if num_rows > capacity:
            error = TableFullError(
                f"`max_capacity` of table {self.name!r} must be at least the number of its rows. Received: {num_rows} keys for at "
                f"most {capacity} rows"
            )
            error.refused, error.capacity = num_rows - capacity, capacity
            raise error

    def clear(self) -> None:
        """Removes all rows."""
        self._ready().clear()

    def export(self, *, states: bool = False, scores: bool = False) -> TableContents:
        """A copy of all rows as `TableContents`; with `states`, the optimizer's too.

        Raises:
            ValueError: If `scores` are asked for: no table keeps any before there is eviction.
        """
        if scores:
            raise ValueError(
                "`scores` must be False: tables keep none as long as no row is evicted. Received: scores=True"
            )
        keys, rows, named = self._ready().export(states)
        return TableContents(keys, rows, dict(named), None)

    def stats(self, *, wait: bool = True) -> TableStats:
        """How the table is, as `TableStats`. Without `wait` no step is waited for: on a GPU as of the last one that it has told of, which
        may be one or two behind."""
        native = self._ready() if wait else self._native
        size, capacity, outcomes, *others = native.stats(wait)
        return TableStats(size, capacity, *outcomes, *others)

    def synchronize(self) -> None:
        """Waits for the steps that were started, and raises what they left behind."""
        self._ready()
