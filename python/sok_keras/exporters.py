"""Tables written in the formats of other systems."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from sok_keras import distributed
from sok_keras.copies import Copy, files_of_states, name_of, with_copies
from sok_keras.importers.pieces import PIECE_ROWS, by_name, check_tables, on_all_ranks
from sok_keras.sok_format import KEYS, ROWS, STATES, Header, file_name, write_header
from sok_keras.table import Table

# By array of a table: the ending of its file's name, and the header.
_Files = dict[str, tuple[str, Header]]


class _Content(NamedTuple):
    """What is written of a table.

    Attributes:
        table: The table.
        files: Its files.
        states: Whether they have states of the table's own optimizer.
        of_variable: States of a `Variable`, by name.
    """

    table: Table
    files: _Files
    states: bool
    of_variable: dict[str, Table]


def sok(
    path: str | os.PathLike,
    tables: Any,
    *,
    states: bool = False,
    optimizer: keras.optimizers.Optimizer | None = None,
    progress: bool = True,
) -> None:
    """Writes tables as SparseOperationKit's `sok.dump` does, which its `sok.load` reads with any number of ranks.

    A `DynamicEmbedding` becomes the dump of a `DynamicVariable`. A static table becomes that of a `Variable`: all its rows, in the order of
    their ids; rows that are not in the table have their first values. With many ranks all call it, and rank 0 writes.

    The files of a table are written beside those that are there, and replace them when they are whole. A dump of several files cannot be
    replaced at once: if the process dies then, the table has no file of keys, and cannot be loaded.

    Example: see `sok_keras.importers.sok`.

    Args:
        path: The folder. It is made if it is not there.
        tables: As for `sok_keras.importers.sok`. A variable of int32 keys gets files of such keys.
        states: Whether optimizer states are written, too, of SGD with momentum, Adam, Adamax, Adagrad, Adadelta or Ftrl.
        optimizer: The optimizer that trains each `Variable` of TensorFlow, which has its states.
        progress: Whether a progress bar is shown.

    Raises:
        TypeError: If `tables` has other values than tables.
        ValueError: If a table is empty, which SparseOperationKit does not load; if it has no files for the states of a table's optimizer, or
            `states` of a static table that is not a `Variable` of TensorFlow are asked for. Nothing was written then.
        OSError: If a file cannot be written.
    """
    given, folder = by_name(tables, name_of), Path(path)
    of_names, copies = with_copies(given, optimizer if states else None)
    key_types = {name: getattr(one, "key_type", "int64") for name, one in given.items()}
    contents = {
        name: _content_of(table, states, key_types[name], copies, optimizer)
        for name, table in check_tables(of_names).items()
    }
    for name, content in contents.items():
        table = content.table
        num_rows = len(table) if table.vocabulary_size is None else table.vocabulary_size
        bar = keras.utils.Progbar(num_rows, unit_name="row") if progress and distributed.rank() == 0 else None
        on_all_ranks(functools.partial(_write, folder / file_name(name), content.files, _arrays(content), bar))


def _content_of(table: Table, states: bool, key_type: str, copies: list[Copy], optimizer: Any) -> _Content:
    if table.vocabulary_size is None and len(table) == 0:
        raise ValueError(
            f"Table {table.name!r} must have rows: SparseOperationKit does not load an empty dump. Received: none"
        )
    files = {
        "keys": ("key", Header("", KEYS, "", key_type)),
        "rows": ("weight", Header("", ROWS, "", "float32")),
    }
    if not states:
        return _Content(table, files, False, {})
    if table.vocabulary_size is not None and not any(copy.table is table for copy in copies):
        raise ValueError(f"`states` must be False for the static table {table.name!r}: rows without an id have none")
    kind, slots, of_variable = files_of_states(table, copies, optimizer)
    for state, slot in slots.items():
        files[f"state {state}"] = (f"{kind}-{slot}", Header("", STATES, slot, "float32"))
    return _Content(table, files, not of_variable, of_variable)


def _write(stem: Path, files: _Files, arrays: Iterator[dict[str, np.ndarray]], bar: Any) -> None:
    """Writes all files of a table, then replaces those that are there. Ranks but 0 only help to make the arrays."""
    if distributed.rank() != 0:
        for _ in arrays:
            pass
        return
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = {name: stem.with_name(f"{stem.name}-{ending}") for name, (ending, _) in files.items()}
    parts = {name: path.with_name(f".{path.name}.part") for name, path in paths.items()}
    try:
        with contextlib.ExitStack() as stack:
            opened = {name: stack.enter_context(open(part, "wb")) for name, part in parts.items()}
            for name, (_, header) in files.items():
                opened[name].write(write_header(header))
            done = 0
            for of_piece in arrays:
                for name, array in of_piece.items():
                    opened[name].write(np.ascontiguousarray(array, files[name][1].dtype).data)
                done += len(of_piece["keys"])
                if bar is not None:
                    bar.update(done)
        # Without keys, what is left of an earlier dump cannot be loaded.
        paths["keys"].unlink(missing_ok=True)
        for other in stem.parent.glob(f"{stem.name}-*-*"):
            other.unlink()
        for name in reversed(paths):
            parts[name].replace(paths[name])
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _arrays(content: _Content) -> Iterator[dict[str, np.ndarray]]:
    table = content.table
    if table.vocabulary_size is None:
        for piece in table.pieces(PIECE_ROWS, states=content.states):
            named = {f"state {name}": array for name, array in piece.states.items()}
            yield {"keys": piece.keys, "rows": piece.rows, **named}
        return
    arrays = {"rows": table, **{f"state {name}": of_state for name, of_state in content.of_variable.items()}}
    for start in range(0, table.vocabulary_size, PIECE_ROWS):
        keys = np.arange(start, min(start + PIECE_ROWS, table.vocabulary_size))
        # Each rank asks for keys of its own.
        asked = keys if distributed.rank() == 0 else keys[:0]
        yield {"keys": keys, **{name: rows.find(asked)[0] for name, rows in arrays.items()}}
