"""Imports what SparseOperationKit has dumped."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from sok_keras.importers.pieces import check_tables, import_pieces, map_file, pieces_of
from sok_keras.sok_format import HEADER_BYTES, KEYS, ROWS, SLOTS, STATES, file_name, is_key_dtype, read_header
from sok_keras.table import Outcomes, Table


def sok(path: str | os.PathLike, tables: Any, *, states: bool = False, progress: bool = True) -> dict[str, Outcomes]:
    """Imports tables from a folder that SparseOperationKit's `sok.dump` has written, by any number of ranks.

    Example:

    >>> import sok_keras as sok
    >>> layer = sok.DynamicEmbedding(2, name="items")
    >>> layer.build()
    >>> outcomes = layer.get_table().assign([5, 9], np.ones((2, 2)))
    >>> sok.exporters.sok(tmp_path / "dump", layer.get_table())
    >>> other = sok.DynamicEmbedding(2)
    >>> other.build()
    >>> outcomes = sok.importers.sok(tmp_path / "dump", {"items": other.get_table()}, progress=False)
    >>> outcomes["items"].inserted, other.get_table().keys().tolist()
    (2, [5, 9])

    Args:
        path: The folder.
        tables: A `Table`, a list of them, or a dict of tables by the names of the dumped variables, such as `"items:0"`. Without a dict a
            table has its own name there.
        states: Whether optimizer states are imported, too. The optimizer must be built, and be that of the dump: SGD with momentum, Adam,
            Adamax, Adagrad, Adadelta or Ftrl.
        progress: Whether a progress bar is shown.

    Returns:
        By name, the `Outcomes` of the keys.

    Raises:
        FileNotFoundError: If the dump has no such table, or no such states.
        ValueError: If a file is damaged, or does not fit the table. The error names the file and the byte. All files are checked before a
            table changes.
    """
    folder = Path(path)
    sources = {name: _arrays(folder, name, table, states) for name, table in check_tables(tables).items()}
    named = check_tables(tables)
    return {
        name: import_pieces(named[name], pieces_of(*arrays), len(arrays[0]), progress)
        for name, arrays in sources.items()
    }


def _arrays(folder: Path, name: str, table: Table, states: bool) -> tuple[Any, Any, dict[str, Any] | None]:
    stem = file_name(name)
    keys = _map(folder / f"{stem}-key", KEYS, None)
    rows = _map(folder / f"{stem}-weight", ROWS, table.dim)
    _check_length(folder / f"{stem}-weight", len(rows), len(keys), table.dim)
    if not states:
        return keys, rows, None
    optimizer, slots = _slots_of(table)
    files = {state: folder / f"{stem}-{optimizer}-{slots[state]}" for state in table.state_widths()}
    arrays = {state: _map(file, STATES, table.state_widths()[state]) for state, file in files.items()}
    for state, array in arrays.items():
        _check_length(files[state], len(array), len(keys), array.shape[1])
    return keys, rows, arrays


def _map(path: Path, kind: int, row: int | None) -> Any:
    dtype = read_header(path, kind).dtype
    if is_key_dtype(dtype) != (kind == KEYS):
        raise ValueError(
            f"{path} must have {'integers' if kind == KEYS else 'floats'}, as byte 292 says. Received: {dtype}"
        )
    return map_file(path, np.dtype(dtype), offset=HEADER_BYTES, row=row)


def _check_length(path: Path, num_rows: int, num_keys: int, width: int) -> None:
    if num_rows != num_keys:
        raise ValueError(
            f"{path} must hold {num_keys} rows of {width} numbers, one for each key. Received: {num_rows}, up to byte "
            f"{path.stat().st_size}"
        )


def _slots_of(table: Table) -> tuple[str, dict[str, str]]:
    formula = table.formula()
    if formula not in SLOTS:
        raise ValueError(
            f"`states` must be False for table {table.name!r}: SparseOperationKit's files have the states of {sorted(SLOTS)}. Received: "
            f"a table whose optimizer is {formula!r}"
        )
    return SLOTS[formula]
