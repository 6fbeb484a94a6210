"""Tables written in the formats of other systems."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sok_keras import distributed
from sok_keras.importers.pieces import PIECE_ROWS, check_tables
from sok_keras.sok_format import KEYS, ROWS, SLOTS, STATES, Header, file_name, write_header
from sok_keras.table import Table


def sok(path: str | os.PathLike, tables: Any, *, states: bool = False, progress: bool = False) -> None:
    """Writes tables as SparseOperationKit's `sok.dump` does, which its `sok.load` reads with any number of ranks.

    Files that are there are replaced, each when it is whole. With many ranks all call it, and rank 0 writes.

    Example: see `sok_keras.importers.sok`.

    Args:
        path: The folder. It is made if it is not there.
        tables: As for `sok_keras.importers.sok`.
        states: Whether optimizer states are written, too, of SGD with momentum, Adam, Adamax, Adagrad, Adadelta or Ftrl.
        progress: Whether a progress bar is shown.

    Raises:
        ValueError: If SparseOperationKit has no files for the states of a table's optimizer. Nothing was written then.
    """
    named, folder = check_tables(tables), Path(path)
    for table in named.values() if states else ():
        if table.formula() not in SLOTS:
            raise ValueError(
                f"`states` must be False for table {table.name!r}: SparseOperationKit's files have the states of {sorted(SLOTS)}. "
                f"Received: a table whose optimizer is {table.formula()!r}"
            )
    for name, table in named.items():
        files = _files(folder, name, table, states)
        num_rows = len(table)
        if distributed.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _write(
                files, table, states, keras.utils.Progbar(num_rows, unit_name="row") if progress and num_rows else None
            )
        else:
            for _ in table.pieces(PIECE_ROWS, states=states):
                pass
    distributed.barrier()


def _files(folder: Path, name: str, table: Table, states: bool) -> dict[str, tuple[Path, Header]]:
    """By array: its file, and the header."""
    stem = file_name(name)
    files = {
        "keys": (folder / f"{stem}-key", Header("", KEYS, "", "int64")),
        "rows": (folder / f"{stem}-weight", Header("", ROWS, "", "float32")),
    }
    if states:
        optimizer, slots = SLOTS[table.formula() or ""]
        for state in table.state_widths():
            header = Header("", STATES, slots[state], "float32")
            files[f"state {state}"] = (folder / f"{stem}-{optimizer}-{slots[state]}", header)
    return files


def _write(files: dict[str, tuple[Path, Header]], table: Table, states: bool, bar: Any) -> None:
    """Writes files beside those that are there, and replaces these when all are whole."""
    parts = {name: path.with_name(f".{path.name}.part") for name, (path, _) in files.items()}
    try:
        with contextlib.ExitStack() as stack:
            opened = {name: stack.enter_context(open(part, "wb")) for name, part in parts.items()}
            for name, (_, header) in files.items():
                opened[name].write(write_header(header))
            done = 0
            for arrays in _arrays(table, states):
                for name, array in arrays.items():
                    opened[name].write(np.ascontiguousarray(array).data)
                done += len(arrays["keys"])
                if bar is not None:
                    bar.update(done)
        for name, (path, _) in files.items():
            parts[name].replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _arrays(table: Table, states: bool) -> Iterator[dict[str, np.ndarray]]:
    for contents in table.pieces(PIECE_ROWS, states=states):
        named = {f"state {name}": array for name, array in contents.states.items()}
        yield {"keys": contents.keys, "rows": contents.rows, **named}
