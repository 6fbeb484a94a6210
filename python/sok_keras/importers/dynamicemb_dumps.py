"""Imports what DynamicEmb has dumped."""

import os
import re
from pathlib import Path
from typing import Any

from sok_keras.importers.pieces import check_tables, import_pieces, map_file, pieces_of
from sok_keras.table import Outcomes, Table

_KEYS = re.compile(r"_emb_keys(\.rank_\d+\.world_size_\d+)?$")


def dynamicemb(path: str | os.PathLike, tables: Any, *, progress: bool = True) -> dict[str, Outcomes]:
    """Imports the rows of tables from a folder that `DynamicEmbDump` has written, by any number of ranks.

    Keys are read from `<table>_emb_keys.rank_<r>.world_size_<w>`, int64, and rows from `<table>_emb_values...`, float32. A dump of one file
    for all ranks has names without ranks. Optimizer states and scores stay behind.

    Args:
        path: The folder.
        tables: As for `sok_keras.importers.sok`; names are those of the tables in the dump.
        progress: Whether a progress bar is shown.

    Returns:
        By name, the `Outcomes` of the keys.

    Raises:
        FileNotFoundError: If the dump has no such table, or lacks the file of a rank.
        ValueError: If a file does not fit the table. The error names the file and the byte. All files are checked before a table changes.
    """
    folder, named = Path(path), check_tables(tables)
    sources = {name: _files(folder, name, table) for name, table in named.items()}
    imported = {}
    for name, files in sources.items():
        pieces = (piece for keys, rows in files for piece in pieces_of(keys, rows))
        imported[name] = import_pieces(named[name], pieces, sum(len(keys) for keys, _ in files), progress)
    return imported


def _files(folder: Path, name: str, table: Table) -> list[tuple[Any, Any]]:
    """Maps the keys and rows of each rank."""
    found = sorted(
        file for file in folder.glob(f"{name}_emb_keys*") if file.name.startswith(name) and _KEYS.search(file.name)
    )
    found = [file for file in found if file.name[: _KEYS.search(file.name).start()] == name]  # type: ignore[union-attr]
    if not found:
        raise FileNotFoundError(f"{folder} has no keys of table {name!r}: no file `{name}_emb_keys`, for any rank")
    _check_ranks(found, name)
    arrays = []
    for file in found:
        values = file.with_name(file.name.replace("_emb_keys", "_emb_values"))
        keys, rows = map_file(file, "<i8"), map_file(values, "<f4", row=table.dim)
        if len(keys) != len(rows):
            raise ValueError(
                f"{values} must hold {len(keys)} rows of {table.dim} numbers, one for each key. Received: {len(rows)}, up to byte "
                f"{values.stat().st_size}"
            )
        arrays.append((keys, rows))
    return arrays


def _check_ranks(files: list[Path], name: str) -> None:
    """Raises a `FileNotFoundError` unless the files are those of all ranks of one dump."""
    ranks = [re.search(r"\.rank_(\d+)\.world_size_(\d+)$", file.name) for file in files]
    numbers = sorted(int(rank[1]) for rank in ranks if rank)
    sizes = {int(rank[2]) for rank in ranks if rank}
    is_whole = len(files) == 1 if not numbers else len(sizes) == 1 and numbers == list(range(*sizes))
    if not is_whole or (numbers and None in ranks):
        raise FileNotFoundError(
            f"{files[0].parent} must have the keys of table {name!r} of each rank of one dump. Received: {[file.name for file in files]}"
        )
