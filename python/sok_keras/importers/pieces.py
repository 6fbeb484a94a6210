"""Pieces of rows, and how they come into a table."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np

from sok_keras import distributed
from sok_keras.sok_format import file_name
from sok_keras.table import Outcomes, Table

# Number of rows that are read at a time.
PIECE_ROWS = 65_536

_T = TypeVar("_T")


class Piece(NamedTuple):
    """Rows of a source.

    Attributes:
        keys: `(n,)`, integers.
        rows: `(n, dim)`, floats.
        states: Optimizer states by name, each `(n, width)`; None if only rows are imported.
    """

    keys: Any
    rows: Any
    states: Mapping[str, Any] | None = None


class Source(NamedTuple):
    """What is imported into a table.

    Attributes:
        num_rows: Number of rows.
        pieces: A function of a rank and the number of ranks: yields the pieces of the rank.
        has_states: Whether pieces have optimizer states.
    """

    num_rows: int
    pieces: Callable[[int, int], Iterator[Piece]]
    has_states: bool = False


def import_source(table: Table, source: Source, progress: bool) -> Outcomes:
    """Assigns the rows of a source, of which each rank reads its share.

    Args:
        table: Where the rows go.
        source: The same on all ranks.
        progress: Whether rank 0 shows a progress bar.

    Returns:
        The sums of the `Outcomes`, over all ranks.

    Raises:
        RankError: On all ranks, if another one cannot read its share.
    """
    rank, world_size = distributed.rank(), distributed.world_size()
    own = source.pieces(rank, world_size)
    widths = table.state_widths() if source.has_states else None
    bar = keras.utils.Progbar(source.num_rows, unit_name="row") if progress and rank == 0 and source.num_rows else None
    outcomes, done = Outcomes(0, 0, 0, 0, 0, 0), 0
    while True:
        piece = on_all_ranks(lambda: next(own, None))
        # Tables of ranks are assigned by all ranks together.
        lengths = _of_all_ranks(-1 if piece is None else len(piece.keys))
        if max(lengths) < 0:
            return outcomes if world_size == 1 else Outcomes(*distributed.all_reduce(np.array(outcomes)).tolist())
        keys, rows, states = piece or _empty(table, widths)
        more = table.assign(keys, rows, states=states)
        outcomes = Outcomes(*(sum(pair) for pair in zip(outcomes, more, strict=True)))
        done += sum(length for length in lengths if length > 0)
        if bar is not None:
            bar.update(done)


def on_all_ranks(call: Callable[[], _T]) -> _T:
    """Returns what a call returns. If it raises an error on one rank, all ranks raise one."""
    if distributed.world_size() == 1:
        return call()
    try:
        result = call()
    except Exception as error:
        distributed.agree(error)
        raise
    distributed.agree(None)
    return result


def _of_all_ranks(number: int) -> list[int]:
    if distributed.world_size() == 1:
        return [number]
    own = np.zeros(distributed.world_size(), "int64")
    own[distributed.rank()] = number
    return distributed.all_reduce(own).tolist()


def _empty(table: Table, widths: dict[str, int] | None) -> Piece:
    states = None if widths is None else {name: np.empty((0, width), "float32") for name, width in widths.items()}
    return Piece(np.empty(0, "int64"), np.empty((0, table.dim), "float32"), states)


def source_of(keys: Any, rows: Any, states: Mapping[str, Any] | None = None) -> Source:
    """Returns a source of arrays, which may be memory-mapped."""

    def pieces(rank: int, world_size: int) -> Iterator[Piece]:
        for start in range(rank * PIECE_ROWS, len(keys), world_size * PIECE_ROWS):
            part = slice(start, start + PIECE_ROWS)
            of_states = None if states is None else {name: state[part] for name, state in states.items()}
            yield Piece(keys[part], rows[part], of_states)

    return Source(len(keys), pieces, states is not None)


def source_of_files(
    of_keys: Sequence[Path], of_rows: Sequence[Path], dim: int, key_dtype: str = "int64", dtype: str = "float32"
) -> Source:
    """Returns a source of pairs of files: the keys of a part, and its rows of `dim` numbers. All numbers are little-endian.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: If a file does not end with a whole row, or a part has more or fewer rows than keys. The error names the file and the byte.
    """
    parts = []
    for keys_file, rows_file in zip(of_keys, of_rows, strict=True):
        keys = map_file(keys_file, np.dtype(key_dtype).newbyteorder("<"))
        rows = map_file(rows_file, np.dtype(dtype).newbyteorder("<"), row=dim)
        if len(keys) != len(rows):
            raise ValueError(
                f"{rows_file} must hold {len(keys)} rows of {dim} numbers of type {dtype}, one for each key of type {key_dtype}. Received: "
                f"{len(rows)}, up to byte {rows_file.stat().st_size}"
            )
        parts.append(source_of(keys, rows))

    def pieces(rank: int, world_size: int) -> Iterator[Piece]:
        for part in parts:
            yield from part.pieces(rank, world_size)

    return Source(sum(part.num_rows for part in parts), pieces)


def map_file(path: Path, dtype: Any, *, offset: int = 0, row: int | None = None) -> Any:
    """Maps a file of numbers, `(n,)`, or `(n, row)`.

    Args:
        path: The file.
        dtype: Type of its numbers.
        offset: Number of bytes before the first.
        row: Numbers in a row. None: one.

    Raises:
        ValueError: If the file does not end with a whole row. The error names the file and the byte at which the last row begins.
    """
    size = path.stat().st_size - offset
    width = np.dtype(dtype).itemsize * (1 if row is None else row)
    if size % width:
        raise ValueError(
            f"{path} must hold rows of {width} bytes after {offset} bytes. Received: {size % width} bytes from byte "
            f"{offset + size - size % width} on"
        )
    shape = (size // width,) if row is None else (size // width, row)
    return np.memmap(path, dtype, "r", offset, shape) if size else np.empty(shape, dtype)


@contextlib.contextmanager
def reading(path: Any, what: str) -> Iterator[None]:
    """Within, what a library cannot read of a file becomes a `ValueError` that names the file and the byte at which it ends."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, PermissionError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(path, str | os.PathLike):
            raise
        raise ValueError(
            f"{path} must be {what}, whole. Received: a file that ends at byte {Path(path).stat().st_size}; reading it: {error}"
        ) from error


def check_table(table: Any) -> Table:
    """Raises a `TypeError` unless it is a `Table`."""
    if not isinstance(table, Table):
        raise TypeError(
            "`table` must be a `Table`, as `layer.get_table()` or `layer.get_tables()[name]` returns. Received: "
            f"{type(table).__name__}"
        )
    return table


def _table_of(given: Any) -> Any:
    """Returns the table of a variable that has one. Anything else stays as it is."""
    return given if isinstance(given, Table) else getattr(given, "table", given)


def by_name(tables: Any, name_of: Callable[[Any], str]) -> dict[str, Any]:
    """Returns tables and variables by the names that they have in files.

    Args:
        tables: One, a sequence of them, or a mapping of names to them.
        name_of: Gives the name of one without a mapping.

    Raises:
        ValueError: If two names are those of the same files.
    """
    if isinstance(tables, Mapping):
        pairs = list(tables.items())
    else:
        pairs = [(name_of(one), one) for one in (tables if isinstance(tables, list | tuple) else [tables])]
    stems = [file_name(name) for name, _ in pairs]
    if len(set(stems)) < len(stems):
        raise ValueError(
            f"Each of `tables` must have a name of its own, apart from punctuation. Received: {[name for name, _ in pairs]}"
        )
    return dict(pairs)


def check_tables(tables: Any) -> dict[str, Table]:
    """Returns tables by the names that they have in a source.

    Raises:
        TypeError: If `tables` is neither a `Table` or a variable that has one, nor a sequence of them, nor a mapping of names to them.
        ValueError: If two names are those of the same files.
    """
    named = by_name(tables, lambda one: getattr(_table_of(one), "name", ""))
    found = {name: _table_of(one) for name, one in named.items()}
    for table in found.values():
        if not isinstance(table, Table):
            raise TypeError(
                "`tables` must be a `Table`, as `layer.get_table()` returns, or a `DynamicVariable`, a list of them, or a dict of names and them. "
                f"Received: {type(table).__name__}"
            )
    return found
