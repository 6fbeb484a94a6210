"""The files of SparseOperationKit's dumps.

A table has a file of keys, one of rows, and one for each optimizer state. A file is a header of 296 bytes and the numbers, in the order of
the machine, row by row. It says neither how many rows there are nor how wide they are: the sizes of the files do.
"""

import string
import struct
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

HEADER_BYTES = 296
KEYS, ROWS, STATES = range(3)
_LAYOUT = struct.Struct(">256sI32sI")
_DTYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
_KINDS = ("keys", "rows", "states")

# By formula: the optimizer in the names of files, and by state its slot there.
SLOTS: dict[str, tuple[str, dict[str, str]]] = {
    "sgd": ("SGD", {"momentum": "momentum"}),
    "adam": ("Adam", {"momentum": "m", "velocity": "v"}),
    # SparseOperationKit writes Adamax under the name of Adam.
    "adamax": ("Adam", {"momentum": "m", "norm": "v"}),
    "adagrad": ("Adagrad", {"accumulator": "accumulator"}),
    "adadelta": ("Adadelta", {"accumulated_grad": "accum_grad", "accumulated_delta_var": "accum_var"}),
    "ftrl": ("Ftrl", {"accumulator": "accumulator", "linear": "linear"}),
}

# By class of Keras: the same for a `Variable`, whose states the optimizer itself has, by the names of its lists.
SLOTS_OF_KERAS: dict[str, tuple[str, dict[str, str]]] = {
    "SGD": ("SGD", {"momentums": "momentum"}),
    "Adam": ("Adam", {"momentums": "m", "velocities": "v"}),
    "AdamW": ("Adam", {"momentums": "m", "velocities": "v"}),
    "Adamax": ("Adam", {"m": "m", "u": "v"}),
    "Adagrad": ("Adagrad", {"accumulators": "accumulator"}),
    "Adadelta": ("Adadelta", {"accumulated_grads": "accum_grad", "accumulated_delta_vars": "accum_var"}),
    "Ftrl": ("Ftrl", {"accumulators": "accumulator", "linears": "linear"}),
}


class Header(NamedTuple):
    """What a file says of itself.

    Attributes:
        table: Name of the table; in practice empty.
        kind: `KEYS`, `ROWS` or `STATES`.
        slot: Name of the state.
        dtype: Type of the numbers.
    """

    table: str
    kind: int
    slot: str
    dtype: str


def write_header(header: Header) -> bytes:
    """Returns the 296 bytes of a header."""
    table, slot = header.table.encode(), header.slot.encode()
    return _LAYOUT.pack(table.rjust(256), header.kind, slot.rjust(32), _DTYPES.index(header.dtype))


def read_header(path: Path, kind: int, table: str, slot: str = "") -> Header:
    """Reads the header of a file of a kind.

    Args:
        path: The file.
        kind: `KEYS`, `ROWS` or `STATES`.
        table: Name of the table that the file must have, unless it has none.
        slot: Name of the state, likewise.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is shorter than a header, of another kind, table or state, or has an unknown type. The error names file and
            byte.
    """
    with open(path, "rb") as file:
        data = file.read(HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        raise ValueError(f"{path} must begin with a header of {HEADER_BYTES} bytes. Received: {len(data)} bytes")
    of_table, found, of_slot, dtype = _LAYOUT.unpack(data)
    if found != kind:
        of = _KINDS[found] if found < len(_KINDS) else f"kind {found}"
        raise ValueError(f"{path} must be a file of {_KINDS[kind]}, as byte 256 says. Received: {of}")
    if dtype >= len(_DTYPES):
        raise ValueError(f"{path} must have a type from 0 to {len(_DTYPES) - 1} at byte 292. Received: {dtype}")
    names = [name.decode(errors="replace").strip(" \0") for name in (of_table, of_slot)]
    for what, name, expected, byte in zip(("table", "state"), names, (table, slot), (0, 260), strict=True):
        if name and file_name(name) != file_name(expected):
            raise ValueError(f"{path} must be of the {what} {expected!r}, as byte {byte} says. Received: {name!r}")
    return Header(names[0], found, names[1], _DTYPES[dtype])


def file_name(table: str) -> str:
    """Returns the name of a table in the names of its files: punctuation becomes underscores."""
    return "".join("_" if letter in string.punctuation else letter for letter in table)


def slots_of(table: str, formula: str | None, states: Collection[str]) -> tuple[str, dict[str, str]]:
    """Returns the optimizer's name in the names of files, and by state its slot there.

    Args:
        table: Name of the table, for messages.
        formula: Name of the formula that updates its rows; of a `Variable`, the class of its optimizer.
        states: Names of its states.

    Raises:
        ValueError: If SparseOperationKit has no files for the states.
    """
    optimizer, slots = (SLOTS | SLOTS_OF_KERAS).get(formula or "", ("", {}))
    if not states or not set(states) <= set(slots):
        raise ValueError(
            f"`states` must be False for table {table!r}: SparseOperationKit's files have the states of {sorted(SLOTS)}, without "
            f"`amsgrad`, once the optimizer is built. Received: {formula or 'no optimizer'} with the states {sorted(states)}"
        )
    return optimizer, {state: slots[state] for state in states}
