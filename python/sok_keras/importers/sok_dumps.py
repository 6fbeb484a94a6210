"""Imports what SparseOperationKit has dumped."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from sok_keras.importers.pieces import Source, check_tables, import_source, map_file, on_all_ranks, source_of
from sok_keras.sok_format import HEADER_BYTES, KEYS, ROWS, STATES, file_name, read_header, slots_of
from sok_keras.table import Outcomes, Table


def sok(path: str | os.PathLike, tables: Any, *, states: bool = False, progress: bool = True) -> dict[str, Outcomes]:
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
        tables: A `Table` or a `DynamicVariable`, a list of them, or a dict of them by the names of the dumped variables, such as `"items:0"`.
            Without a dict each has its own name there.
        states: Whether optimizer states are imported, too. The optimizer must be built, and be that of the dump: SGD with momentum, Adam,
            Adamax, Adagrad, Adadelta or Ftrl.
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
    named, folder = check_tables(tables), Path(path)
    sources = on_all_ranks(lambda: {name: _source(folder, name, table, states) for name, table in named.items()})
    return {name: import_source(named[name], source, progress) for name, source in sources.items()}


def _source(folder: Path, name: str, table: Table, states: bool) -> Source:
    stem = file_name(name)
    keys = _map(folder / f"{stem}-key", KEYS, None, name)
    rows = _map(folder / f"{stem}-weight", ROWS, table.dim, name)
    _check_length(folder / f"{stem}-weight", len(rows), len(keys), table.dim)
    if not states:
        return source_of(keys, rows)
    optimizer, slots = slots_of(table.name, table.formula(), table.state_widths())
    files = {state: folder / f"{stem}-{optimizer}-{slot}" for state, slot in slots.items()}
    arrays = {
        state: _map(file, STATES, table.state_widths()[state], name, slots[state]) for state, file in files.items()
    }
    for state, array in arrays.items():
        _check_length(files[state], len(array), len(keys), array.shape[1])
    return source_of(keys, rows, arrays)


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
