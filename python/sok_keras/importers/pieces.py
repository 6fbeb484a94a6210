"""Pieces of rows, and how they come into a table."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from sok_keras import distributed
from sok_keras.table import Outcomes, Table

# Number of rows that are read at a time.
PIECE_ROWS = 65_536


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


def import_pieces(table: Table, pieces: Iterator[Piece], num_rows: int, progress: bool) -> Outcomes:
    """Assigns the rows of all pieces, of which each rank takes its share.

    Args:
        table: Where the rows go.
        pieces: All pieces, in the same order on all ranks.
        num_rows: Number of their rows.
        progress: Whether rank 0 shows a progress bar.

    Returns:
        The sums of the `Outcomes`, over all ranks.
    """
    world_size, has_states = distributed.world_size(), False
    own = itertools.islice(pieces, distributed.rank(), None, world_size)
    bar = keras.utils.Progbar(num_rows, unit_name="row") if progress and distributed.rank() == 0 and num_rows else None
    outcomes, done = Outcomes(0, 0, 0, 0, 0, 0), 0
    for number in itertools.count():
        piece = next(own, None)
        if piece is not None:
            has_states = piece.states is not None
        # Tables of ranks are assigned by all ranks together.
        if not _any_rank(piece is not None):
            return outcomes if world_size == 1 else Outcomes(*distributed.all_reduce(np.array(outcomes)).tolist())
        if piece is None:
            widths = table.state_widths() if _any_rank(has_states) else None
            piece = _empty(table, widths)
        elif world_size > 1:
            _any_rank(has_states)
        more = table.assign(piece.keys, piece.rows, states=piece.states)
        outcomes = Outcomes(*(sum(pair) for pair in zip(outcomes, more, strict=True)))
        done = min(num_rows, (number + 1) * world_size * PIECE_ROWS)
        if bar is not None:
            bar.update(done)
    raise AssertionError("the loop returns")


def _any_rank(value: bool) -> bool:
    return bool(distributed.all_reduce(int(value), "max")) if distributed.world_size() > 1 else value


def _empty(table: Table, widths: dict[str, int] | None) -> Piece:
    states = None if widths is None else {name: np.empty((0, width), "float32") for name, width in widths.items()}
    return Piece(np.empty(0, "int64"), np.empty((0, table.dim), "float32"), states)


def pieces_of(keys: Any, rows: Any, states: Mapping[str, Any] | None = None) -> Iterator[Piece]:
    """Yields pieces of arrays, which may be memory-mapped."""
    for start in range(0, len(keys), PIECE_ROWS):
        part = slice(start, start + PIECE_ROWS)
        yield Piece(keys[part], rows[part], None if states is None else {name: s[part] for name, s in states.items()})


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


def check_tables(tables: Any) -> dict[str, Table]:
    """Returns tables by the names that they have in a source.

    Raises:
        TypeError: If `tables` is neither a `Table`, nor a sequence of them, nor a mapping of names to them.
    """
    if isinstance(tables, Table):
        return {tables.name: tables}
    if isinstance(tables, Mapping):
        named = dict(tables)
    elif isinstance(tables, list | tuple) and all(isinstance(table, Table) for table in tables):
        named = {table.name: table for table in tables}
    else:
        named = {"": tables}
    if not all(isinstance(table, Table) for table in named.values()):
        raise TypeError(
            f"`tables` must be a `Table`, a list of them, or a dict of names and tables. Received: {tables!r:.100}"
        )
    return named
