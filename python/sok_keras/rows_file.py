"""Tables in files that Keras writes (weights, whole models) and in copies of layers."""

import json
import warnings
from collections.abc import MutableMapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sok_keras import distributed
from sok_keras.backend import native

# What Keras passes to a layer to save into, such as a group of an HDF5 file, or a dict.
Store: TypeAlias = MutableMapping[str, Any]

# Floats in one dataset. No dataset of a weights file may be larger than a shard.
_CHUNK_FLOATS = 1 << 21


class _Stored(NamedTuple):
    """Description of a table in a file.

    Attributes:
        update_rule: JSON of the update whose states its records have.
        seed: Seed of first values.
        num_rows: Number of rows.
        score: The kind of its scores, if any.
        step: Number of the step in progress, as policies count.
        commit_times: As `Table.commit_times`, if its rows have ages.
        num_ranks: Number of ranks that shared it. Each had room for its part of `max_capacity`, rounded up.
    """

    update_rule: str | None
    seed: int | None = None
    num_rows: int | None = None
    score: str | None = None
    step: int = 1
    commit_times: list | None = None
    num_ranks: int = 1


def has_rows(store: Store) -> bool:
    """Whether `save` has written to `store`."""
    names = set(store.keys())
    return "tables" in names or "update_rule" in names


def save(core: Any, store: Store, *, on_all_ranks: bool = True) -> None:
    """Writes a description of each table, and its keys, records and columns in pieces. All ranks must call this.

    Args:
        core: The tables of a layer.
        store: What is written to.
        on_all_ranks: Whether all ranks write all rows. If not, rank 0 alone writes.
    """
    writes = on_all_ranks or distributed.rank() == 0
    described = []
    for number, table in enumerate(core.tables):
        native_table, config = table._native, core.configs[number]
        update = native_table.update_rule
        width = table.dim + sum(width for _, width in states_of(update, table.dim)[1])
        num_rows = 0
        for piece, arrays in enumerate(_pieces_to_save(table, width)):
            num_rows += len(arrays["keys"])
            for name, array in arrays.items() if writes else ():
                store[f"{number}.{name}.{piece:06d}"] = array
        times = native_table.commit_times() if config["time_to_live"] else None
        stored = _Stored(
            update,
            native_table.seed,
            num_rows,
            _kind_of_score(config),
            native_table.step,
            times,
            distributed.world_size(),
        )
        described.append(stored._asdict())
    if writes:
        store["tables"] = np.frombuffer(json.dumps(described).encode(), "uint8")


def _pieces_to_save(table, width):
    """Yields arrays by name, `width` floats a row; at least once."""
    is_empty = True
    for keys, rows, states, columns in table._scan(max(1, _CHUNK_FLOATS // width), states=True):
        is_empty = False
        yield {"keys": keys, "values": np.concatenate([rows, *(state for _, state in states)], axis=1), **dict(columns)}
    if is_empty:
        yield {"keys": np.empty(0, "int64"), "values": np.empty((0, width), "float32")}


def load(core: Any, store: Store) -> None:
    """Replaces all tables by what `save` wrote, together with their seeds.

    States are read if they are those of the bound optimizer, or if no optimizer is bound.

    Raises:
        ValueError: If the file has other tables, rows of another dim, more rows than a table's `max_capacity` (with an `eviction` policy:
            than twice that), or keys outside its vocabulary, or if it is incomplete. After an error nothing has changed.
    """
    stored, pieces = _described(core, store), _pieces(core, store)
    for table, config, of_table, names in zip(core.tables, core.configs, stored, pieces, strict=True):
        _check_shapes(store, names, table, config, of_table)
    core.wait_for_steps()
    is_bound = core.group.is_bound()
    updates = [t._native.update_rule if is_bound else s.update_rule for t, s in zip(core.tables, stored, strict=True)]
    seeds = [t._native.seed if s.seed is None else s.seed for t, s in zip(core.tables, stored, strict=True)]
    fresh = native.FreshTables(core.group, seeds, updates)
    lost = []
    for table, names, of_table, update in zip(core.tables, pieces, stored, updates, strict=True):
        keeps_states = same_states(of_table.update_rule, update, table.dim)
        config = core.configs[table._number]
        columns = []
        if of_table.score is not None and of_table.score == _kind_of_score(config):
            columns.append("scores")
        if of_table.commit_times is not None and config["time_to_live"] is not None:
            columns.append("ages")
            fresh.set_commit_times(table._number, [tuple(entry) for entry in of_table.commit_times])
        if columns or config["admission"] is not None or config["time_to_live"] is not None:
            fresh.set_step(table._number, of_table.step)
        _fill(fresh, store, names, table, keeps_states, columns)
        if not keeps_states and states_of(of_table.update_rule, table.dim)[1]:
            lost.append(f"{table.name!r}: {states_of(of_table.update_rule, table.dim)[0]}")
    core.trigger.keep_rows()  # if the trigger of other tables was set, these are its rows
    fresh.take_their_place()
    if lost:
        warnings.warn(
            f"The file has states of another optimizer than the one that trains the tables ({', '.join(lost)}): the rows were loaded "
            "alone, and states start anew.",
            stacklevel=3,
        )


def _kind_of_score(config):
    """Returns `"lru"`, `"lfu"`, or None for a table without scores."""
    score = (config["eviction"] or {}).get("score")
    return next(iter(score)) if isinstance(score, dict) else score


def states_of(update: str | None, dim: int) -> tuple[str | None, list[tuple[str, int]]]:
    """Returns the name of an update's formula, and names and widths of its states."""
    return native.states_of(update, dim) if update else (None, [])


def same_states(one: str | None, other: str | None, dim: int) -> bool:
    """Whether two updates have the same formula and states."""
    return states_of(one, dim) == states_of(other, dim)


def _described(core, store):
    names = set(store.keys())
    if "tables" in names:
        stored = [_Stored(**fields) for fields in json.loads(bytes(np.asarray(store["tables"], "uint8")))]
    else:
        rule = bytes(np.asarray(store["update_rule"], "uint8")).decode()
        stored = [_Stored(rule or None) for _ in core.tables]
    if len(stored) != len(core.tables):
        raise _other_tables(core, len(stored))
    return stored


def _other_tables(core, received):
    return ValueError(
        f"The file must have the layer's tables, which are {len(core.tables)}: {core.names()}. Received: {received} tables"
    )


def _pieces(core, store):
    """Returns for each table the names of its datasets of keys and values, in order."""
    names = {name for name in store.keys() if ".keys." in name}  # noqa: SIM118 (an HDF5 store has no `in`)
    in_file = {name.split(".")[0] for name in names}
    if in_file != {str(number) for number in range(len(core.tables))}:
        raise _other_tables(core, len(in_file))
    values = {name for name in store.keys() if ".values." in name}  # noqa: SIM118
    pieces = []
    for number, table in enumerate(core.tables):
        count = sum(name.startswith(f"{number}.") for name in names)
        of_table = [(f"{number}.keys.{piece:06d}", f"{number}.values.{piece:06d}") for piece in range(count)]
        missing = [name for pair in of_table for name in pair if name not in names | values]
        if missing:
            raise ValueError(f"The file must hold table {table.name!r} whole. Received: no {missing[0]!r}")
        pieces.append(of_table)
    return pieces


def _check_shapes(store, names, table, config, stored):
    """Raises a `ValueError` if a table cannot hold what a store has for it."""
    num_rows, states = 0, sum(width for _, width in states_of(stored.update_rule, table.dim)[1])
    for of_keys, of_values in names:
        keys, values = np.shape(store[of_keys]), np.shape(store[of_values])
        if len(keys) != 1 or len(values) != 2 or keys[0] != values[0]:
            raise ValueError(
                f"The file must have a row a key. Received: shapes {keys} of keys and {values} of rows for table {table.name!r}"
            )
        if values[1] != table.dim + states:
            raise ValueError(
                f"Rows of table {table.name!r} must be {table.dim} wide. Received: {values[1] - states} in the file"
            )
        num_rows += keys[0]
    if stored.num_rows not in (None, num_rows):
        raise ValueError(
            f"The file must hold table {table.name!r} whole. Received: {num_rows} of {stored.num_rows} rows"
        )
    capacity = config["max_capacity"]
    if capacity is None:
        return
    # A table that removes rows gets rid of what is too much by itself.
    beyond = capacity if config["eviction"] is not None else stored.num_ranks - 1
    if num_rows > capacity + beyond:
        raise ValueError(
            f"`max_capacity` of table {table.name!r} must be at least the file's rows, {num_rows}. Received: max_capacity={capacity}"
        )


def _fill(fresh, store, names, table, keeps_states, columns):
    num_rows = 0
    for of_keys, of_values in names:
        keys, values = np.asarray(store[of_keys]), np.asarray(store[of_values])
        _check_keys(keys, values, table)
        values = values if keeps_states else values[:, : table.dim]
        numbers = [(column, _column_of(store, of_keys, column, table, len(keys))) for column in columns]
        fresh.add(table._number, np.ascontiguousarray(keys), np.ascontiguousarray(values), numbers)
        num_rows += len(keys)
    num_loaded = _num_loaded(fresh, table)
    if num_loaded != num_rows:
        raise ValueError(
            f"Keys of table {table.name!r} must be different. Received: {num_loaded} different ones among {num_rows}"
        )


def _column_of(store, of_keys, column, table, num_rows):
    """A number for each key of a dataset, `(num_rows,)` uint64."""
    try:
        numbers = np.asarray(store[of_keys.replace(".keys.", f".{column}.")])
    except KeyError:
        numbers = np.empty(0, "uint64" if num_rows == 0 else "float64")
    if numbers.dtype != np.uint64 or numbers.shape != (num_rows,):
        raise ValueError(
            f"The file must have uint64 {column} of the {num_rows} keys of table {table.name!r}. Received: {numbers.dtype} of shape "
            f"{numbers.shape}"
        )
    return np.ascontiguousarray(numbers)


def _num_loaded(fresh, table):
    """Number of rows of a new table, on all ranks together."""
    num_rows = fresh.len(table._number)
    return num_rows if table._is_whole else int(distributed.all_reduce(num_rows))


def _check_keys(keys, values, table):
    if keys.dtype != np.int64 or values.dtype != np.float32:
        raise ValueError(
            f"Keys of table {table.name!r} must be int64, and its rows float32. Received: {keys.dtype} and {values.dtype} in the file"
        )
    size = table.vocabulary_size
    outside = keys[(keys < 0) | (keys >= size)] if size is not None else keys[:0]
    if len(outside):
        raise ValueError(
            f"Keys of table {table.name!r} must be below `vocabulary_size` {size}. Received: {outside[0]} in the file"
        )
