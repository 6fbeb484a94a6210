"""Arguments that are True or False."""

from typing import Any


def check_flags(**flags: Any) -> None:
    """Raises a `ValueError` that names the first argument that is not a boolean."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"`{name}` must be True or False. Received: {name}={flag!r}")
