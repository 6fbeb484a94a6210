"""64-bit keys as Python integers."""

from typing import Any, overload

import numpy as np


def is_key(value: Any) -> bool:
    """Whether a value is an integer of 64 bits, signed or not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**64


@overload
def signed_key(key: int) -> int: ...
@overload
def signed_key(key: None) -> None: ...
def signed_key(key: int | None) -> int | None:
    """Reinterprets a 64-bit key as int64: the largest uint64 becomes -1. None stays None."""
    return key if key is None or key < 2**63 else key - 2**64
