"""What a dump holds, without Keras or a framework."""

import dataclasses
import json
import os
from typing import Any, TypeAlias

from sok_keras import _native as native
from sok_keras.pending_dumps import wait_for_dumps

Path: TypeAlias = str | os.PathLike[str]


def path_of(path: Path) -> str:
    """Returns a path as a string.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"`path` must be a string or an `os.PathLike` of strings. Received: path={path!r}")
    return os.fspath(path)


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """A table in a dump.

    Attributes:
        name: The `Table.name` that it was written under.
        dim: Number of floats in a row.
        dtype: Type in which its rows are stored.
        vocabulary_size: Size of a static table; None for a dynamic one.
        num_rows: Number of rows; of an increment, those that were made or changed.
        num_removed: Of an increment: number of keys that were removed.
        states: Names of its optimizer states.
        optimizer: Name of the optimizer's formula, `"general"` for an optimizer without one; None if the table had none.
        score: What the scores of its rows count, `"lru"`, `"lfu"` or `"custom"`; None if it has none.
    """

    name: str
    dim: int
    dtype: str
    vocabulary_size: int | None
    num_rows: int
    num_removed: int
    states: tuple[str, ...]
    optimizer: str | None
    score: str | None


@dataclasses.dataclass(frozen=True)
class Increment:
    """A part of a dump that holds what has changed since the part before.

    Attributes:
        created: Time of writing, as in the `Manifest`.
        step: Number of optimizer updates when it was written.
        tables: A `TableEntry` for each table.
        parent: Checksum of the part before.
    """

    created: str
    step: int
    tables: tuple[TableEntry, ...]
    parent: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a dump.

    Attributes:
        path: The dump's directory.
        version: Version of the format.
        created: Time of writing in UTC, ISO 8601, for example `"2026-01-01T12:00:00Z"`.
        step: Number of optimizer updates when its base was written. That of the dump is the step of the last of `increments`.
        tables: A `TableEntry` for each table of the base.
        arrays: Names of the dense variables.
        increments: The `Increment`s that `dump_increment` has added, oldest first.
    """

    path: str
    version: int
    created: str
    step: int
    tables: tuple[TableEntry, ...]
    arrays: tuple[str, ...]
    increments: tuple[Increment, ...]


def read_manifest(path: Path) -> Manifest:
    """Returns the `Manifest` of the dump at `path`.

    Args:
        path: The dump's directory.

    Raises:
        CorruptDumpError: If the manifest differs from what was written.
        FileNotFoundError: If there is no dump.
    """
    return manifest_of(path, json.loads(native.read_manifest(path_of(path))))


def verify(path: Path) -> None:
    """Reads every byte of a dump and compares it with its checksums.

    Args:
        path: The dump's directory.

    Raises:
        CorruptDumpError: If a byte differs from what was written. The message names the file and the block.
        FileNotFoundError: If there is no dump.
    """
    path = path_of(path)
    wait_for_dumps(path)
    native.verify(path)


def compact(path: Path) -> Manifest:
    """Rewrites a dump with increments as one without: the rows of all parts, each once.

    Nothing is left of removed rows, neither values nor keys. A crash at any time leaves the old dump or the new one. Memory is needed for the
    keys of the increments. A `dump_increment` may follow. With several ranks, one of them calls this.

    Args:
        path: The dump's directory.

    Returns:
        The new `Manifest`. A dump without increments stays as it is.

    Raises:
        CorruptDumpError: If a byte differs from what was written. The dump is unchanged then.
        FileNotFoundError: If there is no dump.
    """
    path = path_of(path)
    wait_for_dumps(path)
    return manifest_of(path, json.loads(native.compact(path)))


def _name_of(score: str | dict[str, Any]) -> str:
    return score if isinstance(score, str) else next(iter(score))


def manifest_of(path: Path, body: dict[str, Any]) -> Manifest:
    """Returns the manifest of a dump. `body`: the JSON of the core."""
    arrays = tuple(tensor["name"] for tensor in body["arrays"]["tensors"]) if body["arrays"] else ()
    increments = tuple(
        Increment(part["created"], part["step"], _entries(part["tables"]), part["parent"])
        for part in body.get("increments", ())
    )
    return Manifest(
        os.fspath(path), body["version"], body["created"], body["step"], _entries(body["tables"]), arrays, increments
    )


def _entries(tables: list[dict[str, Any]]) -> tuple[TableEntry, ...]:
    return tuple(
        TableEntry(
            name=table["name"],
            dim=table["dim"],
            dtype=table["dtype"],
            vocabulary_size=table["vocabulary_size"],
            num_rows=table["num_rows"],
            num_removed=sum(file["tensors"][0]["shape"][0] for file in table.get("removed", ())),
            states=tuple(state["name"] for state in table["states"]),
            optimizer=table["update"]["rule"]["name"] if table["update"] else None,
            score=_name_of(table["scores"]["score"]) if table.get("scores") else None,
        )
        for table in tables
    )
