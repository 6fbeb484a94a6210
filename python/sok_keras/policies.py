"""Policies of tables whose rows come and go."""

import dataclasses
from typing import Any

import keras


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eviction:
    """Base of the eviction policies."""

    count_inference: bool = False
    keep_evicted: bool = False

    def __post_init__(self) -> None:
        for argument in ("count_inference", "keep_evicted"):
            value = getattr(self, argument)
            if not isinstance(value, bool):
                raise ValueError(f"`{argument}` must be True or False. Received: {argument}={value!r}")

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Eviction":
        return cls(**config)

    def _core_score(self) -> Any:
        """Returns what the score of a row counts, as the core names it."""
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LRU(Eviction):
    """Eviction of the least recently used rows.

    A table at `max_capacity` removes the rows with the lowest scores to make room for new ones. The score of a row is the step in which
    it was last used. A step is a call of the optimizer, counted from 1; a lookup of training uses a row when the optimizer applies the
    step. Of equal scores the lowest keys go first, as unsigned integers. Rows that were looked up for training stay until their
    gradients are applied.

    At a time, the larger number of the rows that are needed and a 64th of `max_capacity` go. If too few can go, `check_mode` says what
    happens.

    Example:

    >>> import sok_keras as sok
    >>> layer = sok.DynamicEmbedding(8, max_capacity=2, eviction=sok.policies.LRU(keep_evicted=True))
    >>> table = layer.get_table()
    >>> rows, outcomes = table.find_or_insert([1, 2])
    >>> rows, outcomes = table.find_or_insert([3])
    >>> outcomes.evicted, table.keys().tolist(), table.take_evicted().keys.tolist()
    (1, [2, 3], [1])

    Args:
        count_inference: Whether lookups outside of training use rows, too.
        keep_evicted: Whether the table keeps the rows that it removes until `Table.take_evicted` takes them.
    """

    def _core_score(self) -> Any:
        return "lru"


@keras.saving.register_keras_serializable(package="sok_keras")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LFU(Eviction):
    """Eviction of the least frequently used rows.

    As `LRU`, but the score of a row is the number of ids that have used it: an id that comes three times in a batch counts three times.

    Args:
        half_life: Number of steps after which all scores are halved and rounded down, so that rows which are no longer used can go.
            None: never.
        count_inference: As in `LRU`.
        keep_evicted: As in `LRU`.
    """

    half_life: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.half_life, int) and not isinstance(self.half_life, bool)
        if self.half_life is not None and not (is_number and self.half_life > 0):
            raise ValueError(f"`half_life` must be a positive integer or None. Received: half_life={self.half_life!r}")

    def _core_score(self) -> Any:
        return {"lfu": {"half_life": self.half_life}}


_BY_NAME = {"lru": LRU, "lfu": LFU}


def get_eviction(identifier: Any) -> Eviction | None:
    """Returns the policy that an argument `eviction` names.

    Args:
        identifier: `"lru"`, `"lfu"`, a policy, what `keras.saving.serialize_keras_object` made of one, or None.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if identifier is None or isinstance(identifier, LRU | LFU):
        return identifier
    if isinstance(identifier, str) and identifier in _BY_NAME:
        return _BY_NAME[identifier]()
    raise ValueError(
        '`eviction` must be "lru", "lfu", `sok_keras.policies.LRU(...)`, `LFU(...)` or None. '
        f"Received: eviction={identifier!r}"
    )


def check_eviction(eviction: Eviction | None, vocabulary_size: int | None, max_capacity: int | None) -> None:
    """Raises a `ValueError` unless a table with these limits can have the policy."""
    if eviction is None:
        return
    if vocabulary_size is not None:
        raise ValueError(
            "`eviction` is for dynamic tables, since a static table has room for all of its ids. Received: "
            f"vocabulary_size={vocabulary_size!r}"
        )
    if max_capacity is None:
        raise ValueError("`eviction` needs `max_capacity`, the number of rows to keep. Received: max_capacity=None")


def core_eviction(eviction: Eviction | None) -> dict[str, Any] | None:
    """Converts a policy for the core."""
    if eviction is None:
        return None
    return {
        "score": eviction._core_score(),
        "counts_inference": eviction.count_inference,
        "keeps_evicted": eviction.keep_evicted,
    }
