"""Imports what DynamicEmb has dumped."""

import os
import re
from pathlib import Path
from typing import Any

from sok_keras.importers.pieces import Source, check_tables, import_source, on_all_ranks, source_of_files
from sok_keras.table import Outcomes, Table

# After the name of a table: which file it is, and of which rank.
_ENDING = re.compile(r"_emb_keys(?:\.rank_(\d+)\.world_size_(\d+))?$")


def dynamicemb(path: str | os.PathLike, tables: Any, *, progress: bool = True) -> dict[str, Outcomes]:
    """Imports the rows of tables from a folder that `DynamicEmbDump` has written, by any number of ranks.

    Keys are read from `<table>_emb_keys.rank_<r>.world_size_<w>`, int64, and rows from `<table>_emb_values...`, float32. A dump of one file
    for all ranks has names without ranks. Optimizer states and scores stay behind.

    Args:
        path: The folder of the dump. The files of a table may be in a folder in it, as `DynamicEmbDump` makes one for each collection.
        tables: As for `sok_keras.importers.sok`; names are those of the tables in the dump.
        progress: Whether a progress bar is shown.

    Returns:
        By name, the `Outcomes` of the keys.

    Raises:
        FileNotFoundError: If the dump has no such table, or lacks the file of a rank.
        TypeError: If `tables` has other values than tables.
        ValueError: If a file does not fit the table, or several folders have files of its name. The error names the file and the byte. All
            files are checked before a table changes. Also if a key is outside a static table; the pieces before it were imported then.
        TableFullError: If a table is full, and its `check_mode` is `"raise"`. The pieces before were imported.
    """
    named, folder = check_tables(tables), Path(path)
    sources = on_all_ranks(lambda: {name: _source(folder, name, table) for name, table in named.items()})
    return {name: import_source(named[name], source, progress) for name, source in sources.items()}


def _source(folder: Path, name: str, table: Table) -> Source:
    of_keys = _files_of_keys(folder, name)
    endings = [file.name[len(f"{name}_emb_keys") :] for file in of_keys]
    of_rows = [file.with_name(f"{name}_emb_values{ending}") for file, ending in zip(of_keys, endings, strict=True)]
    return source_of_files(of_keys, of_rows, table.dim)


def _files_of_keys(folder: Path, name: str) -> list[Path]:
    """Returns the file of each rank."""

    def is_own(file: Path) -> bool:
        return file.name.startswith(name) and _ENDING.fullmatch(file.name[len(name) :]) is not None

    found = sorted(file for file in folder.rglob("*_emb_keys*") if is_own(file))
    folders = sorted({str(file.parent) for file in found})
    if len(folders) > 1:
        raise ValueError(f"One folder in {folder} must have files of table {name!r}. Received: {folders}")
    ranks = [_ENDING.search(file.name) for file in found]
    numbers = sorted(int(rank[1]) for rank in ranks if rank and rank[1])
    sizes = {int(rank[2]) for rank in ranks if rank and rank[2]}
    is_whole = numbers == list(range(*sizes)) if len(sizes) == 1 else not numbers
    if not found or len(found) != max(len(numbers), 1) or not is_whole:
        raise FileNotFoundError(
            f"{folder} must have the keys of table {name!r} of each rank of one dump: `{name}_emb_keys`, or `{name}_emb_keys.rank_0.world_size_n` "
            f"and so on. Received: {[file.name for file in found]}"
        )
    return found
