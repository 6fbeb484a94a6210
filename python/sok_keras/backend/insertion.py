"""When a lookup gives rows to ids that have none; the numbers are the core's."""

import enum


class Insertion(enum.IntEnum):
    """`AT_COMMIT`: when the optimizer applies a gradient of the lookup."""

    NEVER = 0
    AT_COMMIT = 1
    AT_LOOKUP = 2
