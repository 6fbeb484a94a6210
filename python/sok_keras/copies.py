"""Tables with copies of `Variable`s of TensorFlow, which have their rows outside of the core."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sok_keras.backend.private_keras import innermost, row_states_of
from sok_keras.sok_format import slots_of
from sok_keras.static_variables import Variable
from sok_keras.table import Table


@dataclasses.dataclass(frozen=True)
class Copy:
    """A table of the rows of a `Variable`, or of a state that an optimizer has of them.

    Args:
        variable: The `Variable`.
        table: The table.
        rows: That of the rows.
        state: The state, a Keras variable; None for the rows.
        name: Name of the state.
    """

    variable: Any
    table: Table
    rows: Table
    state: Any = None
    name: str = ""

    def take_back(self) -> None:
        """Overwrites what was copied with the rows of the table. All ranks call it."""
        self.variable.take(self.table, self.state)


def with_copies(source: Any, optimizer: Any) -> tuple[Any, list[Copy]]:
    """Puts a table of the rows in place of each `Variable`.

    Args:
        source: A `Variable`, a sequence or a mapping of them and of other things, or anything else.
        optimizer: The optimizer that has their states, or None.

    Returns:
        The source with tables, and the copies: of rows, and of their states in the optimizer.
    """
    if isinstance(source, Variable):
        source = [source]
    if not isinstance(source, list | tuple | Mapping):
        return source, []
    parts = source.values() if isinstance(source, Mapping) else source
    variables = [part for part in parts if isinstance(part, Variable)]
    tables = {id(variable): variable.as_table() for variable in variables}
    copies = [Copy(variable, tables[id(variable)], tables[id(variable)]) for variable in variables]
    for variable in variables if optimizer is not None else ():
        for name, state in row_states_of(optimizer, variable).items():
            copies.append(Copy(variable, variable.as_table(name, state), tables[id(variable)], state, name))
    if isinstance(source, Mapping):
        return {name: tables.get(id(part), part) for name, part in source.items()}, copies
    return [tables.get(id(part), part) for part in source], copies


def files_of_states(table: Table, copies: list[Copy], optimizer: Any) -> tuple[str, dict[str, str], dict[str, Table]]:
    """Says how SparseOperationKit names the files of the states of a table, or of a `Variable` whose rows were copied to it.

    Returns:
        The optimizer in the names of files, by state its slot there, and by state of a `Variable` the table with a copy of it.

    Raises:
        ValueError: If SparseOperationKit has no files for the states.
    """
    of_variable = {copy.name: copy.table for copy in copies if copy.rows is table and copy.state is not None}
    if any(copy.table is table for copy in copies):
        kind = None if optimizer is None else type(innermost(optimizer)).__name__
        return *slots_of(table.name, kind, of_variable), of_variable
    return *slots_of(table.name, table.formula(), table.state_widths()), of_variable


def name_of(given: Any) -> str:
    """Returns the name of a table, or that of a variable as SparseOperationKit has it: with `":0"`."""
    name = getattr(given, "name", "")
    return name if isinstance(given, Table) else f"{name.removesuffix(':0')}:0"
