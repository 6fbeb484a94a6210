"""Imports columns of keys and rows."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sok_keras.importers.pieces import (
    PIECE_ROWS,
    Piece,
    Source,
    check_table,
    import_source,
    on_all_ranks,
    reading,
    source_of,
)
from sok_keras.table import Outcomes, Table, as_keys


def numpy(
    source: str | os.PathLike | Mapping[str, Any],
    table: Table,
    *,
    keys: str = "keys",
    rows: str = "rows",
    progress: bool = True,
) -> Outcomes:
    """Imports arrays of keys and rows, from an `.npz` file or a mapping. The arrays of a file are read whole.

    Example:

    >>> import sok_keras as sok
    >>> np.savez(tmp_path / "rows.npz", ids=[3, 2**40], vectors=np.ones((2, 4)))
    >>> layer = sok.DynamicEmbedding(4)
    >>> layer.build()
    >>> sok.importers.numpy(tmp_path / "rows.npz", layer.get_table(), keys="ids", rows="vectors", progress=False).inserted
    2

    Args:
        source: An `.npz` file, or arrays by name, such as those that `np.load("keys.npy", mmap_mode="r")` maps.
        table: Where the rows go.
        keys: Name of the array of keys, `(n,)`, integers.
        rows: Name of the array of rows, `(n, dim)`, floats.
        progress: Whether a progress bar is shown.

    Returns:
        The `Outcomes` of the keys.

    Raises:
        KeyError: If there is no such array.
        TypeError: If keys are not integers, or `table` is not a `Table`.
        ValueError: If the shapes do not fit, or a key is outside a static table; the pieces before it were imported then.
        TableFullError: If the table is full, and its `check_mode` is `"raise"`. The pieces before were imported.
    """
    arrays = on_all_ranks(lambda: _named_arrays(source, check_table(table), keys, rows))
    return import_source(table, source_of(*arrays), progress)


def _named_arrays(source: Any, table: Table, keys: str, rows: str) -> tuple[Any, Any]:
    with contextlib.ExitStack() as stack:
        path = None if isinstance(source, Mapping) else source
        if path is not None:
            with reading(path, "an `.npz` file"):
                source = np.load(path)
            if not isinstance(source, np.lib.npyio.NpzFile):
                raise ValueError(
                    "`source` must be an `.npz` file, or a mapping of arrays by name. Received: a file of one array"
                )
            stack.enter_context(source)
        missing = [name for name in (keys, rows) if name not in source]
        if missing:
            raise KeyError(f"`source` must have arrays {keys!r} and {rows!r}. Received: {sorted(source)}")
        with reading(path, "an `.npz` file"):
            of_keys, of_rows = source[keys], source[rows]
    if len(np.shape(of_keys)) != 1 or np.shape(of_rows) != (len(of_keys), table.dim):
        raise ValueError(
            f"Keys and rows must be of shape (n,) and (n, {table.dim}). Received: {np.shape(of_keys)} and {np.shape(of_rows)}"
        )
    as_keys(of_keys[:1])
    return of_keys, of_rows


def parquet(
    path: str | os.PathLike, table: Table, *, keys: str, rows: str | Sequence[str], progress: bool = True
) -> Outcomes:
    """Imports columns of a Parquet file, or of a folder of such files. It needs pyarrow. Ranks read row groups in turns.

    Args:
        path: The file, or a folder with files `*.parquet`, which are read in the order of their names.
        table: Where the rows go.
        keys: Column of keys, integers.
        rows: Column of lists of `dim` floats; or a column of floats for each of the `dim` numbers of a row.
        progress: Whether a progress bar is shown.

    Returns:
        The `Outcomes` of the keys.

    Raises:
        ImportError: If pyarrow is not installed.
        FileNotFoundError: If there is no such file.
        TypeError: If keys are not integers, or `table` is not a `Table`.
        ValueError: If a column is not there, or is not as wide as the table; or, with pieces before it imported, if it has missing values
            or a key is outside a static table.
        TableFullError: If the table is full, and its `check_mode` is `"raise"`. The pieces before were imported.
    """
    columns = [keys, *([rows] if isinstance(rows, str) else rows)]
    files = on_all_ranks(lambda: _parquet_files(Path(path), check_table(table), columns, isinstance(rows, str)))

    def pieces(rank: int, world_size: int) -> Iterator[Piece]:
        groups = [(name, file, group) for name, file in files for group in range(file.num_row_groups)]
        for name, file, group in groups[rank::world_size]:
            batches = file.iter_batches(PIECE_ROWS, row_groups=[group], columns=columns)
            while True:
                with reading(name, "a Parquet file"):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield Piece(*_arrays(batch, columns, isinstance(rows, str), table.dim, f"{name}, row group {group}"))

    return import_source(table, Source(sum(file.metadata.num_rows for _, file in files), pieces), progress)


def _parquet_files(path: Path, table: Table, columns: list[str], is_list: bool) -> list[tuple[Path, Any]]:
    try:
        from pyarrow import types
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: `pip install pyarrow`") from error
    names = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not names:
        raise FileNotFoundError(f"{path} has no files `*.parquet`")
    files = []
    for name in names:
        with reading(name, "a Parquet file"):
            files.append((name, ParquetFile(name)))
    for name, file in files:
        schema = file.schema_arrow
        missing = [column for column in columns if column not in schema.names]
        if missing:
            raise ValueError(f"{name} must have columns {columns}. Received: {schema.names}")
        kinds = {column: schema.field(column).type for column in columns}
        if not types.is_integer(kinds[columns[0]]):
            raise TypeError(f"Keys must be integers. Received: column {columns[0]!r} of {kinds[columns[0]]} in {name}")
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        if is_list and not any(is_kind(kinds[columns[1]]) for is_kind in lists):
            raise ValueError(f"{name} must have lists in column {columns[1]!r}. Received: {kinds[columns[1]]}")
        if not is_list and len(columns) - 1 != table.dim:
            raise ValueError(
                f"`rows` must name {table.dim} columns, one for each number of a row. Received: {columns[1:]}"
            )
    return files


def _arrays(batch: Any, columns: list[str], is_list: bool, dim: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and rows."""
    for name in columns:
        column = batch.column(name)
        if column.null_count or (is_list and name == columns[1] and column.flatten().null_count):
            raise ValueError(f"{where} must have values in column {name!r}. Received: missing values")
    keys = as_keys(batch.column(columns[0]).to_numpy(zero_copy_only=False))
    if not is_list:
        floats = [batch.column(name).to_numpy(zero_copy_only=False) for name in columns[1:]]
        return keys, np.stack(floats, axis=1)
    lists = batch.column(columns[1])
    widths = {len(one) for one in lists}
    if widths - {dim}:
        raise ValueError(
            f"{where} must have lists of {dim} numbers in column {columns[1]!r}. Received: {sorted(widths)}"
        )
    return keys, lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
