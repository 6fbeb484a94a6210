"""Imports what SparseOperationKit has dumped."""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sok_keras.copies import Copy, files_of_states, name_of, with_copies
from sok_keras.importers.pieces import Source, by_name, check_tables, import_source, map_file, on_all_ranks, source_of
from sok_keras.sok_format import HEADER_BYTES, KEYS, ROWS, STATES, file_name, read_header
from sok_keras.table import Outcomes, Table


def sok(
    path: str | os.PathLike,
    tables: Any,
    *,
    states: bool = False,
    optimizer: keras.optimizers.Optimizer | None = None,
    progress: bool = True,
) -> dict[str, Outcomes]:
    """Imports tables from a folder that SparseOperationKit's `sok.dump` has written, by any number of ranks.

    Example:

    >>> import sok_keras as sok
    >>> layer = sok.DynamicEmbedding(2, name="items")
    >>> layer.build()
    >>> outcomes = layer.get_table().assign([5, 9], np.ones((2, 2)))
    >>> sok.exporters.sok(tmp_path / "dump", layer.get_table(), progress=False)
    >>> other = sok.DynamicEmbedding(2)
    >>> other.build()
    >>> outcomes = sok.importers.sok(tmp_path / "dump", {"items": other.get_table()}, progress=False)
    >>> outcomes["items"].inserted, other.get_table().keys().tolist()
    (2, [5, 9])

    Args:
        path: The folder.
        tables: A `Table`, a `DynamicVariable` or a `Variable`, a list of them, or a dict of them by the names of the dumped variables, such as
            `"items:0"`. Without a dict each has its own name there, that of a variable with `":0"`.
        states: Whether optimizer states are imported, too. The optimizer must be built, and be that of the dump: SGD with momentum, Adam,
            Adamax, Adagrad, Adadelta or Ftrl.
        optimizer: The optimizer that trains each `Variable` of TensorFlow, which has its states.
        progress: Whether a progress bar is shown.

    Returns:
        By name, the `Outcomes` of the keys.

    Raises:
        FileNotFoundError: If the dump has no such table, or no such states.
        TypeError: If `tables` has other values than tables.
        ValueError: If a file is damaged, or does not fit the table. The error names the file and the byte. All files are checked before a
            table changes. Also if a key is outside a static table; the pieces before it were imported then.
        TableFullError: If a table is full, and its `check_mode` is `"raise"`. The pieces before were imported.
    """
    of_names, copies = with_copies(by_name(tables, name_of), optimizer if states else None)
    named, folder = check_tables(of_names), Path(path)
    sources = on_all_ranks(
        lambda: {name: _sources(folder, name, table, states, copies, optimizer) for name, table in named.items()}
    )
    outcomes = {}
    for name, of_name in sources.items():
        outcomes[name], *_ = [import_source(table, source, progress) for table, source in of_name]
    for copy in copies:
        copy.take_back()
    return outcomes


def _sources(
    folder: Path, name: str, table: Table, states: bool, copies: list[Copy], optimizer: Any
) -> list[tuple[Table, Source]]:
    """Returns the sources of a name, each with the table that takes it: the rows, and each state of a `Variable`."""
    stem = file_name(name)
    keys = _map(folder / f"{stem}-key", KEYS, None, name)
    rows = _map(folder / f"{stem}-weight", ROWS, table.dim, name)
    _check_length(folder / f"{stem}-weight", len(rows), len(keys), table.dim)
    if not states:
        return [(table, source_of(keys, rows))]
    kind, slots, of_variable = files_of_states(table, copies, optimizer)
    widths = {state: table.dim for state in of_variable} or table.state_widths()
    arrays = {}
    for state, slot in slots.items():
        file = folder / f"{stem}-{kind}-{slot}"
        arrays[state] = _map(file, STATES, widths[state], name, slot)
        _check_length(file, len(arrays[state]), len(keys), widths[state])
    if not of_variable:
        return [(table, source_of(keys, rows, arrays))]
    of_states = [(of_variable[state], source_of(keys, array)) for state, array in arrays.items()]
    return [(table, source_of(keys, rows)), *of_states]


def _map(path: Path, kind: int, row: int | None, table: str, slot: str = "") -> Any:
    dtype = np.dtype(read_header(path, kind, table, slot).dtype)
    if (dtype.kind in "iu") != (kind == KEYS):
        numbers = "integers" if kind == KEYS else "floats"
        raise ValueError(f"{path} must have {numbers}, as byte 292 says. Received: {dtype.name}")
    return map_file(path, dtype, offset=HEADER_BYTES, row=row)


def _check_length(path: Path, num_rows: int, num_keys: int, width: int) -> None:
    if num_rows != num_keys:
        raise ValueError(
            f"{path} must hold {num_keys} rows of {width} numbers, one for each key. Received: {num_rows}, up to byte "
            f"{path.stat().st_size}"
        )
