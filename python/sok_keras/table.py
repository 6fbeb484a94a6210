"""A table, as users read and write it outside of training."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sok_keras import distributed
from sok_keras.backend import native
from sok_keras.errors import RankError, TableFullError
from sok_keras.flags import check_flags
from sok_keras.keys import is_key, signed_key
from sok_keras.sharded_table import ShardedTable


class Outcomes(NamedTuple):
    """What became of the distinct keys of a call.

    Attributes:
        hit: Keys that had a row.
        inserted: Keys that got a row.
        filtered: Keys that the admission policy kept out.
        evicted: Rows that were removed to make room.
        expired: Rows that were removed because their time to live was over.
        refused: Keys without a row that did not fit.
    """

    hit: int
    inserted: int
    filtered: int
    evicted: int
    expired: int
    refused: int


class EvictedRows(NamedTuple):
    """Rows that a table has removed by itself, in the order in which they went.

    Attributes:
        keys: `(n,)` int64.
        rows: `(n, dim)` float32, as they were when they went.
        scores: `(n,)` uint64: what the `eviction` policy counts, or the step of the last use without one.
    """

    keys: np.ndarray
    rows: np.ndarray
    scores: np.ndarray


class Explanation(NamedTuple):
    """What a table knows about a key.

    Attributes:
        state: `"present"` if the key has a row; `"filtered"` if `Frequency` has counted it without giving it one; `"evicted"` if its row was
            removed to make room; `"expired"` if its row was removed because its time to live was over; `"absent"` if it has never had
            one, was erased, or went longer ago than the table remembers.
        score: The score of its row; None without a row or a policy.
        step: The step in which its row was evicted or expired, else None.
        sights: How often it has come without getting a row, if it is filtered, else None.
    """

    state: str
    score: int | None = None
    step: int | None = None
    sights: int | None = None


class TableContents(NamedTuple):
    """A copy of a table.

    Attributes:
        keys: `(n,)` int64, ascending.
        rows: `(n, dim)` float32.
        states: Optimizer states by name, each `(n, width)` float32; empty unless asked for.
        scores: `(n,)` uint64, what the table's `eviction` policy counts; None unless asked for.
    """

    keys: np.ndarray
    rows: np.ndarray
    states: dict[str, np.ndarray]
    scores: np.ndarray | None


class TableStats(NamedTuple):
    """Statistics of a table.

    `size`, `capacity` and `bytes` are current values. The others count since the table was made.

    Attributes:
        size: Number of rows.
        capacity: Number of rows at which the index grows.
        hits: Distinct keys of training lookups that had a row.
        inserted: Distinct keys that got a row.
        filtered: Distinct keys that the admission policy kept out, added up over the lookups of applied steps.
        evicted: Rows that were removed to make room for others.
        expired: Rows that were removed because their time to live was over.
        refused: Distinct keys that did not fit.
        dropped_gradients: Ids whose gradient was dropped because their key has no row. Equal ids count each.
        pending_pushes: Backward passes of the layer that no optimizer has applied.
        native_calls: Calls of lookup, push, commit and apply on the table.
        bytes: Memory of the table.
        unknown_ids: Ids without a row in lookups outside of training, as of `predict` and `evaluate`. Equal ids count each. Padding
            and ids outside a vocabulary are not counted.
    """

    size: int
    capacity: int
    hits: int
    inserted: int
    filtered: int
    evicted: int
    expired: int
    refused: int
    dropped_gradients: int
    pending_pushes: int
    native_calls: int
    bytes: int
    unknown_ids: int


def as_keys(keys: Any) -> np.ndarray:
    """Keys as the core takes them, `(n,)` int64. The bits of uint64 are kept.

    Raises:
        TypeError: If they are not integers.
    """
    if isinstance(keys, np.ma.MaskedArray):
        raise TypeError("Keys must be a plain array: what a mask hides has no key. Received: a masked array")
    keys = _array_of(keys)
    if keys.size == 0:
        return np.empty(0, "int64")
    if keys.dtype.kind not in "iu":
        raise TypeError(f"Keys must be integers of at most 64 bits. Received: keys of dtype {keys.dtype}")
    keys = np.ravel(keys)
    return np.ascontiguousarray(keys.view("int64") if keys.dtype == np.uint64 else keys.astype("int64"))


def _array_of(keys: Any) -> np.ndarray:
    """An array of keys. NumPy makes floats of a list with integers on both sides of 2^63, whose bits are int64 here."""
    array = np.asarray(keys)
    if array.dtype.kind not in "fO" or hasattr(keys, "dtype"):
        return array
    flat = np.asarray(keys, object).ravel().tolist()
    return np.array([signed_key(key) for key in flat], "int64") if all(map(is_key, flat)) else array


class Table:
    """One embedding table of a layer.

    Layers make tables. `DynamicEmbedding.get_table()` and `DistributedEmbedding.get_tables()` return them. Every method waits for the
    training steps that were started, and raises their errors.

    With many ranks, methods are collective: all ranks call them, in the same order, each with keys of its own. They answer for the rows
    of all ranks; with `local=True` for those of this rank alone, without the others. If a method that changes rows raises an error on a
    rank, rows of other ranks may have changed.

    Example:

    >>> import numpy as np, sok_keras as sok
    >>> layer = sok.DynamicEmbedding(2, embeddings_initializer="ones")
    >>> layer.build()
    >>> table = layer.get_table()
    >>> rows, outcomes = table.find_or_insert([7, 7, 2**40])
    >>> outcomes.inserted, len(table)
    (2, 2)
    >>> table.assign([7], np.zeros((1, 2))).hit
    1
    >>> rows, found = table.find([7, 8])
    >>> rows.tolist(), found.tolist()
    ([[0.0, 0.0], [1.0, 1.0]], [True, False])
    >>> 7 in table, table[7].tolist(), table.keys().tolist()
    (True, [0.0, 0.0], [7, 1099511627776])
    """

    def __init__(self, core: Any, number: int, config: dict) -> None:
        self._core = core
        self._number = number
        # The rows that this process has, and those of all ranks.
        self._native = core.native_table(number)
        self._whole = ShardedTable(self._native) if distributed.is_initialized() else self._native
        self.name: str = config["name"]
        self.dim: int = config["dim"]
        self.dtype = "float32"
        self.vocabulary_size: int | None = config["vocabulary_size"]
        self._max_capacity: int | None = config["max_capacity"]
        self._raises_when_full = config["check_mode"] == "raise"
        self._evicts = config["eviction"] is not None

    @property
    def _is_whole(self) -> bool:
        """Whether this process has all rows."""
        return self._whole is self._native or self._whole.is_replicated

    def __len__(self) -> int:
        return len(self._ready())

    def __repr__(self) -> str:
        return f"<Table {self.name!r} dim={self.dim} vocabulary_size={self.vocabulary_size}>"

    def _ready(self, local: bool = False) -> Any:
        try:
            self._core.synchronize()
        except RankError:
            # What this rank has can be read without the rank that was lost.
            if not local:
                raise
        return self._native if local else self._whole

    def __contains__(self, key: Any) -> bool:
        """Whether a key has a row.

        Raises:
            TypeError: If it is not one integer.
        """
        keys = as_keys(key)
        if np.ndim(key) > 0 or len(keys) != 1:
            raise TypeError(f"`in` takes one key; `find` says of many which have a row. Received: {key!r:.100}")
        return bool(self.find(keys)[1][0])

    def __getitem__(self, keys: Any) -> np.ndarray:
        """Returns the rows of keys.

        Args:
            keys: Integers of any shape. Duplicates are allowed.

        Returns:
            Rows of shape `(*shape of keys, dim)`, float32.

        Raises:
            KeyError: If a key has no row.
            TypeError: If keys are not integers.
        """
        flat = as_keys(keys)
        rows, found = self.find(flat)
        if not found.all():
            missing = flat[~found]
            raise KeyError(
                f"table {self.name!r} has no rows for {len(missing)} of {len(flat)} keys: {missing[:5].tolist()}"
            )
        return rows.reshape(*np.shape(keys), self.dim)

    def __iter__(self) -> Iterator[int]:
        """Iterates over the keys, in no particular order, in bounded memory. Raises as `pieces`."""
        for piece in self.pieces():
            yield from piece.keys.tolist()

    def keys(self, *, local: bool = False) -> np.ndarray:
        """Returns the keys, `(n,)` int64, ascending. `local`: those of this rank alone."""
        return self._ready(local).keys()

    def pieces(self, num_rows: int = 65_536, *, states: bool = False) -> Iterator[TableContents]:
        """Copies all rows in pieces, for tables larger than the memory that is left.

        Example:

        >>> table = sok.DynamicEmbedding(4).get_table()
        >>> outcomes = table.assign(np.arange(5), np.ones((5, 4)))
        >>> [len(piece.keys) for piece in table.pieces(2)]
        [2, 2, 1]

        Args:
            num_rows: Maximal number of rows of a piece.
            states: Whether optimizer states are copied too.

        Yields:
            A `TableContents`: each row in one piece, keys ascending within a piece.

        Raises:
            ValueError: If `num_rows` is not a positive integer.
            RuntimeError: If rows are inserted or removed before the last piece.
        """
        if not isinstance(num_rows, int) or num_rows < 1:
            raise ValueError(f"`num_rows` must be a positive integer. Received: num_rows={num_rows!r}")
        return self._pieces(num_rows, states)

    def _pieces(self, num_rows: int, states: bool) -> Iterator[TableContents]:
        for keys, rows, named, _ in self._scan(num_rows, states):
            yield TableContents(keys, rows, dict(named), None)

    def _scan(self, num_rows: int, states: bool) -> Iterator[tuple]:
        """Keys, rows, states by name, and columns by name, in pieces that are not empty."""
        before, cursor = self._changes(), 0
        while cursor is not None:
            piece, cursor = self._ready().scan(cursor, num_rows, states)
            if self._changes() != before:
                raise RuntimeError(f"Table {self.name!r} must not gain or lose rows while it is copied in pieces")
            if len(piece[0]):
                yield piece

    def _changes(self) -> tuple[int, int]:
        """Numbers that differ after rows were inserted or removed."""
        stats = self.stats(local=True)
        return stats.size, stats.inserted

    def find(self, keys: Any, *, local: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Looks up rows and never inserts.

        Args:
            keys: Integers of any shape; n is their number. Duplicates are allowed.
            local: Whether only the rows of this rank are searched.

        Returns:
            Rows `(n, dim)` float32, and `(n,)` bool that says which keys have a row. A key without a row gets what the layer's
            `missing` says.

        Raises:
            TypeError: If keys are not integers.
        """
        keys = as_keys(keys)
        rows, found = self._ready(local).find(keys)
        return rows, found

    def find_or_insert(self, keys: Any) -> tuple[np.ndarray, Outcomes]:
        """Looks up rows, and inserts keys that have none.

        Args:
            keys: Integers of any shape; n is their number.

        Returns:
            Rows `(n, dim)` float32, and the `Outcomes`.

        Raises:
            TypeError: If keys are not integers.
            ValueError: If a key is outside a static table.
            TableFullError: If they do not fit and `check_mode` is `"raise"`. Nothing has changed then.
        """
        keys = as_keys(keys)
        rows, outcomes = self._ready().find_or_insert(keys)
        self._core.warn_of_refused()
        return rows, Outcomes(*outcomes)

    def assign(self, keys: Any, rows: Any, *, insert: bool = True, states: Mapping[str, Any] | None = None) -> Outcomes:
        """Overwrites rows.

        Args:
            keys: Integers of any shape; n is their number. Of duplicates the last one counts.
            rows: `(n, dim)` float32.
            insert: Whether keys without a row get one. If not, they count as refused.
            states: All optimizer states of the rows by name, each `(n, width)` float32, as `export(states=True)` returns them. None: they
                stay as they are; those of new rows have their first values. Rows that get states are as old as the last step, for a
                `time_to_live`.

        Returns:
            The `Outcomes`.

        Raises:
            TypeError: If keys are not integers.
            ValueError: If `rows` or `states` is of another shape, a key is outside a static table, or `states` are not those of the
                optimizer that trains the table.
            TableFullError: If the keys do not fit and `check_mode` is `"raise"`. Nothing has changed then.
        """
        keys = as_keys(keys)
        rows = np.ascontiguousarray(rows, "float32")
        if rows.size and rows.shape[-1] != self.dim:
            raise ValueError(f"`rows` must be {self.dim} wide. Received: rows of shape {rows.shape}")
        rows = rows.reshape(-1, self.dim)
        if len(rows) != len(keys):
            raise ValueError(f"`rows` must hold one row a key. Received: {len(rows)} rows for {len(keys)} keys")
        if states is None:
            outcomes = Outcomes(*self._ready().assign(keys, rows, insert))
        else:
            records = np.concatenate([rows, *self._states_in_order(states, len(keys))], axis=1)
            outcomes = Outcomes(*self._ready().assign_records(keys, records, insert))
        self._core.warn_of_refused()
        return outcomes

    def formula(self) -> str | None:
        """Returns the name of the formula by which the optimizer updates the rows, such as `"adam"`. None before an optimizer is built."""
        update = self._native.update_rule
        return native.states_of(update, self.dim)[0] if update else None

    def state_widths(self) -> dict[str, int]:
        """Returns the name and the width of each optimizer state of a row, in the order of a record. Empty before an optimizer is built."""
        update = self._native.update_rule
        return dict(native.states_of(update, self.dim)[1]) if update else {}

    def _states_in_order(self, states: Mapping[str, Any], num_rows: int) -> list[np.ndarray]:
        widths = self.state_widths()
        if not widths:
            raise ValueError(
                "`states` must be None for a table without states: they are there once an optimizer is built that has some"
            )
        if set(states) != set(widths):
            raise ValueError(
                f"`states` must be those of the optimizer that trains the table, {sorted(widths)}. Received: {sorted(states)}"
            )
        arrays = [np.ascontiguousarray(states[name], "float32") for name in widths]
        for (name, width), array in zip(widths.items(), arrays, strict=True):
            if array.shape != (num_rows, width):
                raise ValueError(f"`states` {name!r} must be of shape {(num_rows, width)}. Received: {array.shape}")
        return arrays

    def erase(self, keys: Any) -> int:
        """Removes rows.

        Gradients for them that no optimizer has applied yet are dropped.

        Args:
            keys: Integers, `(n,)`. Those without a row are ignored.

        Returns:
            The number of rows that were removed.
        """
        return self._ready().erase(as_keys(keys))

    def _check_replacement(self, keys: np.ndarray) -> None:
        """Raises the error that `clear` and then `assign` would raise for these keys, `(n,)` int64. Changes nothing.

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

    def export(self, *, states: bool = False, scores: bool = False, local: bool = False) -> TableContents:
        """Copies all rows.

        Args:
            states: Whether optimizer states are copied too.
            scores: Whether the scores of an `eviction` policy are copied too.
            local: Whether only the rows of this rank are copied.

        Returns:
            The `TableContents`.

        Raises:
            ValueError: If `states` or `scores` is not a boolean, or `scores` is True and the table has no `eviction` policy.
            MemoryError: If there is no memory for the copy.
        """
        check_flags(states=states, scores=scores)
        if scores and not self._evicts:
            raise ValueError(
                f"`scores` must be False, because table {self.name!r} has no `eviction` policy. Received: scores=True"
            )
        keys, rows, named, columns = self._ready(local).export(states)
        return TableContents(keys, rows, dict(named), dict(columns)["scores"] if scores else None)

    @property
    def step(self) -> int:
        """Number of the step in progress, which the policies of a table count from 1: one more than the steps that were made."""
        self._ready(local=True)
        return self._native.step

    def explain(self, key: Any, *, local: bool = False) -> Explanation:
        """Says whether a key has a row and, if not, why. A table with an `eviction` policy or a `time_to_live` remembers the
        last 2^20 keys that it removed.

        Args:
            key: An integer.
            local: Whether only this rank is asked.

        Raises:
            TypeError: If it is not one integer.
        """
        keys = as_keys(key)
        if len(keys) != 1:
            raise TypeError(f"`explain` takes one key. Received: {key!r:.100}")
        state, number = self._ready(local).explain(int(keys[0]))
        field = {"evicted": "step", "expired": "step", "filtered": "sights"}.get(state, "score")
        return Explanation(state, **{field: number})

    def take_evicted(self, *, local: bool = False) -> EvictedRows:
        """Returns the rows that the table has removed since the last call, and forgets them. They take memory until then. A load that replaces
        the rows of the table, and `clear`, drop those that were not taken, and what `explain` knows of keys that went.

        Args:
            local: Whether only the rows of this rank are taken. If not, those of rank 0 come first.

        Raises:
            SokError: If the policies of the table are not ones with `keep_evicted=True` or `keep_expired=True`.
        """
        return EvictedRows(*self._ready(local).take_evicted())

    def stats(self, *, wait: bool = True, local: bool = False) -> TableStats:
        """Returns the `TableStats`.

        Args:
            wait: Whether steps that were started are waited for. If not, the counts of a table on a GPU may be one or two steps old.
            local: Whether only this rank counts. If not, `pending_pushes` and `native_calls` are those of this rank, and the others are
                sums over all ranks.
        """
        whole = self._native if local else self._whole
        native = self._ready(local) if wait else whole
        size, capacity, outcomes, *others = native.stats(wait)
        return TableStats(size, capacity, *outcomes, *others)

    def synchronize(self) -> None:
        """Waits for the training steps that were started, and raises their errors."""
        self._ready()
