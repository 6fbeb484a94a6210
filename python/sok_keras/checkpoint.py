"""Dumps: directories that hold tables, and for a model all that training needs to resume."""

import contextlib
import dataclasses
import glob
import json
import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, overload

import keras

from sok_keras.arrays import Arrays, arrays_of, expected_update, step_of
from sok_keras.backend import native
from sok_keras.backend.private_keras import flatten_layers
from sok_keras.copies import with_copies
from sok_keras.dump_handle import DumpHandle
from sok_keras.flags import check_flags
from sok_keras.layers.base import TableLayer
from sok_keras.manifest import Manifest, Path, manifest_of, path_of
from sok_keras.pending_dumps import wait_for_dumps
from sok_keras.static_variables import STATE_OF, Variable
from sok_keras.table import Table
from sok_keras.variables import DynamicVariable

# A model is a layer to Keras; in a list it is refused.
_Part: TypeAlias = keras.layers.Layer | Table | DynamicVariable | Variable
Source: TypeAlias = _Part | Sequence[_Part]

# How often a dump that new ones replace while it is read is read anew.
_ATTEMPTS = 32


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What `load` has read.

    Attributes:
        step: Number of optimizer updates when the dump was written.
        tables: Number of rows of each table, by its name in the dump: `"layer"` of a `DynamicEmbedding`, `"layer/table"` of a
            `DistributedEmbedding`.
        variables: Whether dense variables were read.
    """

    step: int
    tables: dict[str, int]
    variables: bool


@overload
def dump(
    path: Path,
    source: Source,
    optimizer: keras.optimizers.Optimizer | None = None,
    *,
    tables: Sequence[str] | None = None,
    overwrite: bool = True,
    states: bool = True,
    wait: Literal[True] = True,
) -> Manifest: ...


@overload
def dump(
    path: Path,
    source: Source,
    optimizer: keras.optimizers.Optimizer | None = None,
    *,
    tables: Sequence[str] | None = None,
    overwrite: bool = True,
    states: bool = True,
    wait: Literal[False],
) -> DumpHandle: ...


def dump(
    path: Path,
    source: Source,
    optimizer: keras.optimizers.Optimizer | None = None,
    *,
    tables: Sequence[str] | None = None,
    overwrite: bool = True,
    states: bool = True,
    wait: bool = True,
) -> Manifest | DumpHandle:
    """Writes a dump to the directory `path`.

    A dump of a `Model` also holds the variables of the model and of its optimizer, so that training resumes as if it had never
    stopped. A dump of layers or tables does not. A crash at any time leaves the old dump or the new one.

    Example:

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/dump"
    >>> manifest = sok.dump(path, model)
    >>> sok.load(path, model).variables
    True

    Args:
        path: A directory. It is made if it does not exist. A dump of this process that is being written there is waited for.
        source: A `Model`, a layer, a `Table`, a `DynamicVariable`, a `Variable`, or a list of them without models.
        optimizer: The optimizer that trains each `Variable` of TensorFlow, to write its states of their rows. Tables have those of their own rows.
        tables: Names of the tables to write, as in `Table.name`: `"layer"` for a `DynamicEmbedding`, `"layer/table"` for a
            `DistributedEmbedding`. None: all.
        overwrite: Whether an existing dump is replaced.
        states: Whether the optimizer is written: its states of the rows, and its variables. A dump for serving needs neither.
        wait: Whether the call waits until the dump is written. If not, it copies tables and variables, and training goes on while the
            copies are written. They need as much memory as the rows that are written: for tables on a GPU in its memory, or in that of
            the host if the GPU has too little.

    Returns:
        The `Manifest`; without `wait` a `DumpHandle`, whose `result()` waits for it.

    Raises:
        TypeError: If `path` is no path, or `optimizer` no optimizer.
        ValueError: If a flag is not a boolean; if `source` has no tables, two tables of the same name, or a model in a list; if `tables`
            has an unknown name; if a variable has a dtype that a dump cannot hold (`complex128`, `string`); or if there is a dump and
            `overwrite` is False.
        OSError: If it cannot be written, for example because the disk is full. An old dump is unchanged then. Without `wait`,
            `DumpHandle.result` raises it.
        MemoryError, DeviceError: Without `wait`, if there is not enough memory for the copies.
    """
    _check_optimizer(optimizer)
    return _write(path, source, optimizer, tables, overwrite, states, None, wait)


@overload
def dump_increment(
    path: Path,
    source: Source,
    *,
    since: int | None = None,
    tables: Sequence[str] | None = None,
    states: bool = True,
    wait: Literal[True] = True,
) -> Manifest: ...


@overload
def dump_increment(
    path: Path,
    source: Source,
    *,
    since: int | None = None,
    tables: Sequence[str] | None = None,
    states: bool = True,
    wait: Literal[False],
) -> DumpHandle: ...


def dump_increment(
    path: Path,
    source: Source,
    *,
    since: int | None = None,
    tables: Sequence[str] | None = None,
    states: bool = True,
    wait: bool = True,
) -> Manifest | DumpHandle:
    """Adds to the dump at `path` the rows that were made or changed since its newest part, and the keys that were removed.

    `load` reads all parts as one dump. A crash at any time leaves the dump without the increment or with it. From its first dump or load
    on, a table records its changes. This takes 4 bytes a row and 8 bytes a removed key. The dense variables of a model are written whole.
    `compact` merges all parts into one.

    Example:

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/dump"
    >>> manifest = sok.dump(path, model)
    >>> outcomes = model.layers[1].get_table().assign(np.array([7]), np.ones((1, 4)))
    >>> manifest = sok.dump_increment(path, model)
    >>> len(manifest.increments), len(sok.compact(path).increments)
    (1, 0)

    Args:
        path: The directory of a dump that was written from `source`, or loaded into it.
        source: As for `dump`, with the same tables.
        since: Step of the part that the increment follows, as the manifest has it; of several such parts, the newest. Later increments are
            removed from the dump. None: the newest part. The step of a part is the number of updates of the model's optimizer, or if `source`
            is not a model, the highest number of steps that the policies of a table have counted.
        tables: As for `dump`, with the tables of the dump.
        states: As for `dump`, with the value that the dump was written with.
        wait: As for `dump`.

    Returns:
        The `Manifest` of the dump with all its parts; without `wait` a `DumpHandle`.

    Raises:
        TypeError: As for `dump`.
        ValueError: As for `dump`, or if no part of the dump has the step `since`.
        DumpMismatchError: If the dump has other tables, seeds or optimizer states.
        UnknownChangesError: If a table has no record of its changes since that part: this process has neither written the dump nor loaded it
            with `mode="replace"` under the same name, or since then the table was cleared, got other optimizer states, or took rows from a
            weights file or from `set_embedding_tables`. Write a whole dump by `dump`.
        FileNotFoundError: If there is no dump.
        OSError: If it cannot be written. The dump is unchanged then.
    """
    if since is not None and (
        isinstance(since, bool) or not hasattr(since, "__index__") or not 0 <= operator.index(since) < 2**63
    ):
        raise ValueError(f"`since` must be None or the step of a part of the dump. Received: since={since!r}")
    return _write(path, source, None, tables, True, states, -1 if since is None else operator.index(since), wait)


def _write(path, source, optimizer, tables, overwrite, states, since, wait):
    """Writes a dump, or an increment. `since`: as for the core."""
    path = path_of(path)
    check_flags(overwrite=overwrite, states=states, wait=wait)
    source, copies = with_copies(source, optimizer if states else None)
    if copies and since is not None:
        raise TypeError(f"An increment cannot have a `Variable`: dump it whole. Received: {copies[0].variable.name}")
    chosen = _choose(_tables_of(source), tables)
    chosen += [copy.table for copy in copies if copy.state is not None and copy.rows in chosen]
    _wait_for_steps(source, chosen)
    for table in chosen:
        table.synchronize()
    if isinstance(source, keras.Model):
        arrays, step = arrays_of(source, states), step_of(source)
    else:
        arrays, step = [], max((table.step for table in chosen), default=1) - 1
    own = [table._native for table in chosen]
    request = path, own, arrays, (overwrite, step, states, since)
    wait_for_dumps(path)
    if not wait:
        return DumpHandle(path, native.FrozenDump(request))
    return manifest_of(path, json.loads(native.dump(request)))


def load(
    path: Path,
    source: Source | Mapping[str, Table | DynamicVariable | Variable],
    optimizer: keras.optimizers.Optimizer | None = None,
    *,
    tables: Sequence[str] | None = None,
    mode: str = "replace",
    states: bool = True,
) -> LoadReport:
    """Reads a dump into the tables of `source`.

    All of the dump is verified before anything changes. If another process writes new dumps to `path` meanwhile, `load` reads one of
    them as a whole. Any backend reads the dumps of any other.

    If both the dump and `source` are of a model, dense variables and the optimizer's variables are read too, before the first
    training step as well as after it.

    Tables are matched by name. If the dump has as many tables as `source` and none of the names agree, they are matched by order:
    Keras gives the layers of a second model other names.

    The seed of first values comes with the rows, so ids without a row return the same values as where the dump was written. A
    merge into a table that has rows keeps the table's own seed.

    Args:
        path: The dump's directory.
        source: A `Model`, a layer, a `Table`, or a list of layers and tables. Or a dict: names of the dump's tables, and the `Table` or
            variable to read each into, whatever its name and layer.
        optimizer: As for `dump`, after its `build` or a step. States that the dump does not have stay as they are, with a warning.
        tables: Names of the tables of `source` to read into, as for `dump`. None: all. A dict has all that are read.
        mode: `"replace"` to replace all rows, `"merge"` to add the rows of the dump, which overwrite rows of the same key.
        states: Whether optimizer states are read. If not, they are reset.

    Returns:
        A `LoadReport`.

    Raises:
        CorruptDumpError: If a byte differs from what was written. The message names the file.
        DumpMismatchError: If a dim, vocabulary size or optimizer differs, if a table would have more rows than its `max_capacity` (with an
            `eviction` policy: than twice that), or if the dump has some of the tables but not all. The optimizer of a model counts before
            its first step too; `states=False` loads without states.
        DumpError: If new dumps replace the one that is read, 32 times in a row.
        FileNotFoundError: If there is no dump. It names the importer if there are files of SparseOperationKit.
        TypeError: As for `dump`.
        ValueError: As for `dump`, or for an unknown `mode`.
    """
    path = path_of(path)
    check_flags(states=states)
    wait_for_dumps(path)
    if not os.path.exists(os.path.join(path, "manifest.json")) and glob.glob(
        os.path.join(glob.escape(path), "*-weight")
    ):
        raise FileNotFoundError(
            f"{path} must be a dump of this package. `sok_keras.importers.sok` reads files of SparseOperationKit"
        )
    if mode not in ("replace", "merge"):
        raise ValueError(f'`mode` must be "replace" or "merge". Received: mode={mode!r}')
    _check_optimizer(optimizer)
    source, copies = with_copies(source, optimizer if states else None)
    if isinstance(source, Mapping):
        names, chosen = _named(source, tables)
    else:
        names, chosen = None, _choose(_tables_of(source), tables)
    _wait_for_steps(source, chosen)
    of_states = [copy for copy in copies if copy.state is not None and copy.rows in chosen]
    report, loaded = _load_newest(path, source, chosen, names, mode, states, of_states, optimizer is not None)
    for copy in copies:
        if copy.table in loaded:
            copy.take_back()
    return report


def _load_newest(path, *arguments):
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(native.DumpReplacedError):
            return _load(path, *arguments)
    return _load(path, *arguments)


def _load(path, source, chosen, names, mode, states, of_states, has_optimizer):
    """Reads one dump, from its first byte to its last. Returns the report, and the tables that were read.

    Args:
        names: Of each table in the dump; None: as `_match` finds them.
        of_states: Copies of the states that an optimizer has of chosen tables.
        has_optimizer: Whether the optimizer was given.
    """
    reader = native.DumpReader(path)
    body = json.loads(reader.manifest())
    manifest = manifest_of(path, body)
    names = names or _match(manifest, chosen)
    if has_optimizer and states:
        names_of_states, tables_of_states = _match_states(manifest, dict(zip(chosen, names, strict=True)), of_states)
        names, chosen = names + names_of_states, chosen + tables_of_states
    expected = [expected_update(source, table) if isinstance(source, keras.Model) else None for table in chosen]
    arrays = None
    newest = [body, *body.get("increments", ())][-1]
    if isinstance(source, keras.Model) and newest["arrays"]:
        arrays = Arrays(path, newest["arrays"]["tensors"], source, states)
        arrays.read(reader)
    report = json.loads(reader.load(names, [table._native for table in chosen], expected, mode == "merge", states))
    for table in chosen:
        table._core.trigger.keep_rows()
    if arrays is not None:
        arrays.assign()
    _warn_of_seeds(report["tables"])
    rows = {entry["name"]: entry["num_rows"] for entry in report["tables"]}
    return LoadReport(report["step"], {name: rows[name] for name in names}, arrays is not None), chosen


def _warn_of_seeds(loaded):
    mixed = [entry["name"] for entry in loaded if entry["mixes_seeds"]]
    if mixed:
        warnings.warn(
            f"Rows of another seed were merged into {', '.join(map(repr, mixed))}: ids without a row go on answering by the table's own "
            "seed, not as they did where the dump was written.",
            stacklevel=5,
        )


# ---- tables


def layers_of(layer):
    if isinstance(layer, TableLayer):
        return [layer]
    return [found for found in flatten_layers(layer) if isinstance(found, TableLayer)]


def _check_optimizer(optimizer):
    if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"`optimizer` must be a Keras optimizer or None. Received: {optimizer!r}")


def _is_state(name, stored):
    """Whether a table of a dump has a state of another one."""
    return name.rpartition(STATE_OF)[0] in stored


def _match_states(manifest, names, of_states):
    """Returns the names and the tables of the states that a dump has. `names`: by chosen table, its name in the dump."""
    stored = {entry.name for entry in manifest.tables}
    by_name = {names[copy.rows] + STATE_OF + copy.name: copy.table for copy in of_states}
    missing = sorted(set(by_name) - stored)
    if missing:
        warnings.warn(f"The dump does not have {missing}: these states stay as they are", stacklevel=5)
    chosen = set(names.values())
    of_dump = {name for name in stored if name.rpartition(STATE_OF)[0] in chosen}
    unknown = sorted(of_dump - set(by_name))
    if unknown:
        warnings.warn(
            f"The optimizer does not have the states {unknown} of the dump: call its `build`, or make a step, before `load`",
            stacklevel=5,
        )
    found = [name for name in by_name if name in stored]
    return found, [by_name[name] for name in found]


def _tables_of(source):
    is_list = isinstance(source, list | tuple)
    found = []
    for part in source if is_list else [source]:
        if is_list and isinstance(part, keras.Model):
            raise ValueError(
                "A model must be `source` itself, not one of a list: its dense variables and its optimizer's would be left out. "
                f"Pass `model`, or `model.layers` for the tables alone. Received: {part!r} in a list"
            )
        if isinstance(part, Table | DynamicVariable):
            found.append(part if isinstance(part, Table) else part.table)
        elif isinstance(part, keras.layers.Layer):
            found += [table for layer in layers_of(part) for table in layer._core.tables]
        else:
            raise ValueError(
                f"`source` must be a Model, a layer, a Table, a variable of this package or a list of them. Received: {part!r}"
            )
    found = list(dict.fromkeys(found))
    if not found:
        raise ValueError("`source` has no embedding tables of sok_keras")
    names = [table.name for table in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Each table of `source` must have a name of its own. Received: more than one named {twice}")
    return found


def _named(source, tables):
    """Returns the names in the dump and the tables of a dict."""
    if tables is not None:
        raise ValueError(
            f"`tables` must be None if `source` is a dict, which has the tables to read. Received: tables={tables!r}"
        )
    source = {name: one.table if isinstance(one, DynamicVariable) else one for name, one in source.items()}
    wrong = [value for value in source.values() if not isinstance(value, Table)]
    if wrong or not source:
        raise ValueError(
            f"A dict as `source` must have `Table`s or variables of this package as values. Received: {wrong or source!r}"
        )
    if len(set(source.values())) < len(source):
        raise ValueError(f"A dict as `source` must have each `Table` once. Received: {source!r}")
    return list(source), list(source.values())


def _choose(found, names):
    if names is None:
        return found
    if isinstance(names, str):
        raise ValueError(f"`tables` must be a sequence of names. Received: tables={names!r}")
    known = {table.name: table for table in found}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"`tables` must name tables of `source`, which has {sorted(known)}. Received: {unknown}")
    return [known[name] for name in names]


def _match(manifest, chosen):
    """The name in the dump of each table."""
    all_stored = {entry.name for entry in manifest.tables}
    stored = [entry.name for entry in manifest.tables if not _is_state(entry.name, all_stored)]
    names = [table.name for table in chosen]
    if len(stored) != len(names) or set(stored) & set(names):
        return names  # one that is missing is the core's to report: by its place it could get the rows of another
    return stored  # layers that Keras named, in another process or a second time


def _wait_for_steps(source, tables):
    """After it, tables and variables are those of the last step that was started."""
    if hasattr(source, "jax_state_sync"):
        source.jax_state_sync()  # within an epoch, JAX's trainer has the variables' values
    for table in tables:
        table._core.wait_for_steps()
