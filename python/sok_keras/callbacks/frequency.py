"""How often a callback acts."""

from typing import Any


def check_frequency(argument: str, value: Any) -> None:
    """Raises a `ValueError` unless `value` is `"epoch"` or a positive number of batches."""
    if value != "epoch" and not (isinstance(value, int) and value > 0):
        raise ValueError(
            f'`{argument}` must be "epoch" or a positive number of batches. Received: {argument}={value!r}'
        )
