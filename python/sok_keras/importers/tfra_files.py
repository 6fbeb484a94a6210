"""Imports what TensorFlow Recommenders Addons has saved to a file system."""

import os
import re
from pathlib import Path
from typing import Any

from sok_keras.importers.pieces import Source, check_tables, import_source, on_all_ranks, source_of_files
from sok_keras.table import Outcomes, Table

# After the name of a variable: which of its shards the file has, and of which process.
_ENDING = re.compile(r"_mht_(\d+)of(\d+)(?:_rank(\d+)_size(\d+))?-keys")
_KEYS, _ROWS = ("int64", "int32"), ("float32", "float16", "float64")


def tfra(
    path: str | os.PathLike, tables: Any, *, key_dtype: str = "int64", dtype: str = "float32", progress: bool = True
) -> dict[str, Outcomes]:
    """Imports the rows of tables from a folder that the `FileSystemSaver` of TensorFlow Recommenders Addons has written.

    Keys are read from `<variable>_mht_<i>of<n>-keys` and rows from `<variable>_mht_<i>of<n>-values`, of all n shards of a variable; where several
    processes have saved, also of all `..._rank<r>_size<s>`. The files are plain numbers. Optimizer states, which have files of their
    own, stay behind.

    Args:
        path: The folder, such as `TFRADynamicEmbedding` beside the variables of a model.
        tables: As for `sok_keras.importers.sok`; names are those of the variables, such as `"items-parameter"` of a Keras layer `items`. A name
            without `-parameter` finds these files, too. A slash of a name is an underscore in those of files.
        key_dtype: Type of the keys, `"int64"` or `"int32"`. The files do not say it.
        dtype: Type of the rows, `"float32"`, `"float16"` or `"float64"`.
        progress: Whether a progress bar is shown.

    Returns:
        By name, the `Outcomes` of the keys.

    Raises:
        FileNotFoundError: If the folder has no such variable, or lacks a file of it.
        TypeError: If `tables` has other values than tables.
        ValueError: If a dtype is another one, or a file does not fit the table: the error names the file and the byte. All files are checked
            before a table changes. Also if a key is outside a static table; the pieces before it were imported then.
        TableFullError: If a table is full, and its `check_mode` is `"raise"`. The pieces before were imported.
    """
    for argument, value, allowed in (("key_dtype", key_dtype, _KEYS), ("dtype", dtype, _ROWS)):
        if value not in allowed:
            raise ValueError(f"`{argument}` must be one of {', '.join(allowed)}. Received: {argument}={value!r}")
    named, folder = check_tables(tables), Path(path)
    sources = on_all_ranks(
        lambda: {name: _source(folder, name, table, key_dtype, dtype) for name, table in named.items()}
    )
    return {name: import_source(named[name], source, progress) for name, source in sources.items()}


def _source(folder: Path, name: str, table: Table, key_dtype: str, dtype: str) -> Source:
    of_keys = _files_of_keys(folder, name)
    of_rows = [file.with_name(f"{file.name.removesuffix('-keys')}-values") for file in of_keys]
    return source_of_files(of_keys, of_rows, table.dim, key_dtype, dtype)


def _files_of_keys(folder: Path, name: str) -> list[Path]:
    """Returns the file of each shard of each process."""
    found: dict[tuple[int, int], Path] = {}
    sizes = set()
    base = name.replace("/", "_")
    for stem in (base, f"{base}-parameter"):
        for file in sorted(folder.glob("*-keys")):
            ending = _ENDING.fullmatch(file.name[len(stem) :]) if file.name.startswith(stem) else None
            if ending is not None:
                shard, num_shards, rank, num_ranks = (int(number or 0) for number in ending.groups())
                sizes.add((num_shards, num_ranks or 1))
                found[rank, shard] = file
        if found:
            break
    (num_shards, num_ranks), *more = sizes or {(1, 1)}
    wanted = [(rank, shard) for rank in range(num_ranks) for shard in range(1, num_shards + 1)]
    if more or sorted(found) != wanted:
        raise FileNotFoundError(
            f"{folder} must have the keys of all shards of {name!r} that were saved together: `{name}_mht_1of1-keys`, or "
            f"`{name}_mht_1of1_rank0_size2-keys` and so on. Received: {[file.name for file in found.values()]}"
        )
    return [found[place] for place in wanted]
