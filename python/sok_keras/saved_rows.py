"""The rows of a table as arrays, for a `tf.train.Checkpoint` of a variable."""

import warnings

import numpy as np

from sok_keras import distributed
from sok_keras.table import Table

# Before the name of an optimizer state, in the name of its array.
_STATE = "state "


def rows_to_save(table: Table) -> dict[str, np.ndarray]:
    """Returns the keys, the rows and the optimizer states of this rank."""
    contents = table.export(states=True, local=True)
    states = {_STATE + name: state for name, state in contents.states.items()}
    return {"keys": contents.keys, "rows": contents.rows, **states}


def take(table: Table, arrays: dict[str, np.ndarray]) -> None:
    """Replaces all rows by what `rows_to_save` has returned. All ranks call it.

    Raises:
        ValueError: If the rows have another dimension. The table is unchanged then.
    """
    keys, rows, error = arrays["keys"], arrays["rows"], None
    if rows.shape != (len(keys), table.dim):
        error = ValueError(f"Rows of {table.name!r} must have {table.dim} columns. Received: shape {rows.shape}")
    distributed.agree(error)
    states = {name.removeprefix(_STATE): array for name, array in arrays.items() if name.startswith(_STATE)}
    if states and set(states) != set(table.state_widths()):
        warnings.warn(
            f"The checkpoint has the states {sorted(states)} of {table.name!r}, and its optimizer {sorted(table.state_widths())}: the rows were "
            "loaded alone, and states start anew. Build the optimizer before `restore`",
            stacklevel=3,
        )
        states = {}
    table.clear()
    table.assign(keys, rows, states=states or None)
