"""Imports columns of keys and rows."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sok_keras.importers.pieces import PIECE_ROWS, Piece, import_pieces, pieces_of
from sok_keras.table import Outcomes, Table, as_keys


def numpy(
    source: str | os.PathLike | Mapping[str, Any],
    table: Table,
    *,
    keys: str = "keys",
    rows: str = "rows",
    progress: bool = True,
) -> Outcomes:
    """Imports arrays of keys and rows, from an `.npz` file or a mapping.

    Example:

    >>> import sok_keras as sok
    >>> np.savez(tmp_path / "rows.npz", ids=[3, 2**40], vectors=np.ones((2, 4)))
    >>> layer = sok.DynamicEmbedding(4)
    >>> layer.build()
    >>> sok.importers.numpy(tmp_path / "rows.npz", layer.get_table(), keys="ids", rows="vectors", progress=False).inserted
    2

    Args:
        source: An `.npz` file, or arrays by name; they may be memory-mapped.
        table: Where the rows go.
        keys: Name of the array of keys, `(n,)`, integers.
        rows: Name of the array of rows, `(n, dim)`, floats.
        progress: Whether a progress bar is shown.

    Returns:
        The `Outcomes` of the keys.

    Raises:
        KeyError: If there is no such array.
        TypeError: If keys are not integers.
        ValueError: If the shapes do not fit.
    """
    arrays = source if isinstance(source, Mapping) else np.load(source)
    missing = [name for name in (keys, rows) if name not in arrays]
    if missing:
        raise KeyError(f"`source` must have arrays {keys!r} and {rows!r}. Received: {sorted(arrays)}")
    of_keys, of_rows = arrays[keys], arrays[rows]
    if len(np.shape(of_keys)) != 1 or np.shape(of_rows) != (len(of_keys), table.dim):
        raise ValueError(
            f"Keys and rows must be of shape (n,) and (n, {table.dim}). Received: {np.shape(of_keys)} and {np.shape(of_rows)}"
        )
    as_keys(of_keys[:1])
    return import_pieces(table, pieces_of(of_keys, of_rows), len(of_keys), progress)


def parquet(
    path: str | os.PathLike, table: Table, *, keys: str, rows: str | Sequence[str], progress: bool = True
) -> Outcomes:
    """Imports columns of a Parquet file, or of a folder of such files. It needs pyarrow.

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
        TypeError: If keys are not integers.
        ValueError: If a column is not there, has missing values, or is not as wide as the table. Pieces before the error were imported.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: `pip install pyarrow`") from error
    names = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
    if not names:
        raise FileNotFoundError(f"{path} has no files `*.parquet`")
    files = [(name, ParquetFile(name)) for name in names]
    columns = [keys, *([rows] if isinstance(rows, str) else rows)]
    for name, file in files:
        missing = [column for column in columns if column not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"{name} must have columns {columns}. Received: {file.schema_arrow.names}")

    def pieces() -> Iterator[Piece]:
        for name, file in files:
            start = 0
            for batch in file.iter_batches(PIECE_ROWS, columns=columns):
                yield Piece(*_arrays(batch, columns, isinstance(rows, str), table.dim, f"{name}, row {start}"))
                start += len(batch)

    return import_pieces(table, pieces(), sum(file.metadata.num_rows for _, file in files), progress)


def _arrays(batch: Any, columns: list[str], is_list: bool, dim: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    for name in columns:
        if batch.column(name).null_count:
            raise ValueError(
                f"{where} and those after it must have values in column {name!r}. Received: missing values"
            )
    keys = as_keys(batch.column(columns[0]).to_numpy(zero_copy_only=False))
    if not is_list:
        floats = [batch.column(name).to_numpy(zero_copy_only=False) for name in columns[1:]]
        rows = np.stack(floats, axis=1) if floats else np.empty((len(keys), 0))
    else:
        lists = batch.column(columns[1])
        widths = set(lists.value_lengths().to_pylist())
        rows = np.empty((len(keys), 0))
        if widths == {dim}:
            rows = lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
    if rows.shape[1] != dim:
        raise ValueError(f"{where} and those after it must have rows of {dim} numbers. Received: other lengths")
    return keys, rows
